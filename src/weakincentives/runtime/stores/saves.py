"""The saves of a session: what the lines of its log say, and how they are read back.

The head of a log identifies the session. Every other line is one save: for each changed slice, how
many values stay and which values follow them; and ``files``, further lines that are saved with it.
Compacting a log writes its state anew, as saves with ``fold``, the number of each: the first one
replaces all before it. The bytes of ``Media`` are stored once, by digest.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
from bisect import bisect_right
from collections.abc import (
    Callable,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias, cast, overload

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.gc_pause import no_collection
from weakincentives.core.logs import get_logger
from weakincentives.core.media import Media
from weakincentives.errors import SnapshotError
from weakincentives.runtime.stores.files import (
    FileLog,
    FileStore,
    share_media,
    store_media,
    write_file,
)
from weakincentives.runtime.stores.logs import LeasedLog, SavePlace, SessionLog, SessionStore
from weakincentives.serde import freeze, thaw
from weakincentives.serde.exact import StoredBytes, current_name, json_of
from weakincentives.session.session import Snapshot, type_name

_logger = get_logger(__name__)

VERSION = 2
"""Of the file."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
INHERITED = "inherited_calls"
"""In what a run says about itself: how many calls are of the run that it was forked from."""

UNSAVED = '{"$":"unsaved"}'
"""Marks the place of a value that could not be written."""
_HAS_UNSAVED = b'"unsaved"'
_FOLDED = 64
"""Values in each save of a log that was compacted."""
_MEDIA = type_name(Media)
_LARGE = 1_000
"""Characters of base64; fewer stay in the line."""
_STORED = "stored"
"""Marks the place of bytes that are stored elsewhere."""
_CHANGE = re.compile(rb'":\[[0-9]+,\[')
"""What follows the name of a slice: how many values stay, and those that follow them."""
_HAS_STORED = f'"{_STORED}"'.encode()
_DIGEST = "[0-9a-f]{64}"


def inherited_calls(about: Mapping[str, object]) -> int:
    """Return how many calls a run has from the run that it was forked from, which lists them."""
    return int(cast("int", about.get(INHERITED, 0)))


# Values


def encode(value: object, store: Callable[[bytes], str]) -> str:
    """Return a value as exact JSON text; the bytes of large media are stored elsewhere.

    Raises:
        SnapshotError: It has no exact form.
    """
    data = freeze(value)
    text = _to_json(data)
    if len(text) > _LARGE and _MEDIA in text:
        return _to_json(_without_media(data, store))
    return text


def change_of(name: str, kept: int, items: Iterable[str]) -> str:
    """Return the change of a slice: how many values stay, and the encoded values after them."""
    return f"{json.dumps(name)}:[{kept},[{','.join(items)}]]"


def save_of(at: float, state: Iterable[str] = (), log: Iterable[str] = ()) -> str:
    """Return the save of some changes."""
    state_text, log_text = ",".join(state), ",".join(log)
    return f'{{"at":{json.dumps(at)},"state":{{{state_text}}},"log":{{{log_text}}}}}'


def _to_json(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _without_media(data: Any, store: Callable[[bytes], str]) -> Any:
    """Return frozen data with the digests of large media, whose bytes are stored."""

    def stored(node: dict[str, Any]) -> Any:
        if node.get("$") != "dataclass" or node["type"] != _MEDIA:
            return None
        text = node["fields"]["data"]["base64"]
        if len(text) <= _LARGE:
            return None
        found = {"$": _STORED, "sha256": store(base64.b64decode(text))}
        return {**node, "fields": {**node["fields"], "data": found}}

    return _changed(data, stored)


def parse_save(text: bytes, media: Callable[[str], StoredBytes]) -> Any:
    """Return a save as JSON data, with the places of bytes that are stored elsewhere."""

    def found(node: dict[str, Any]) -> StoredBytes | None:
        if node.get("$") != _STORED:
            return None
        digest = str(node["sha256"])
        if not re.fullmatch(_DIGEST, digest):
            raise ValueError(f"{digest!r} is not a digest")
        return media(digest)

    line = json_of(text)
    return _changed(line, found) if _HAS_STORED in text else line


def digests_in(texts: Iterable[bytes]) -> list[str]:
    """Return the digests that saves may refer to."""
    pattern = f'"sha256": ?"({_DIGEST})"'.encode()
    return sorted({each.decode() for text in texts for each in re.findall(pattern, text)})


def _changed(data: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return JSON data in which every object is replaced that ``change`` gives a value for."""
    if isinstance(data, list):
        return [_changed(each, change) for each in cast("list[Any]", data)]
    if not isinstance(data, dict):
        return data
    node = cast("dict[str, Any]", data)
    made = change(node)
    return {key: _changed(each, change) for key, each in node.items()} if made is None else made


def is_unsaved(value: Any) -> bool:
    return isinstance(value, dict) and cast("dict[str, Any]", value).get("$") == "unsaved"


def warn_of_incomplete(name: str) -> None:
    _logger.warning("the slice of %s was not saved completely", name.rpartition(":")[2])


# The head


def make_head(
    session_id: str, tags: Mapping[str, str], began: float, about: Mapping[str, object]
) -> bytes:
    """Return the first line of a file."""
    head = {
        "wink_session": VERSION,
        "id": session_id,
        "tags": freeze(dict(tags)),
        "began": began,
        "about": freeze(dict(about)),
    }
    return json.dumps(head).encode()


def from_head(line: Any) -> SavedSessionData:
    if line["wink_session"] != VERSION:
        raise ValueError(f"unknown version {line['wink_session']!r}")
    began = float(line["began"])
    return SavedSessionData(
        session_id=line["id"],
        tags=thaw(line["tags"]),
        began=began,
        about=thaw(line["about"]),
        at=began,
    )


def head_of(log: SessionLog) -> SavedSessionData:
    with readable_from(log):
        return from_head(json.loads(log.head))


@contextlib.contextmanager
def readable_from(log: SessionLog) -> Generator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise SnapshotError(f"{log.shown} is not the file of a session: {error!r}") from error


# All saves


@dataclass(slots=True, kw_only=True)
class SavedSessionData:
    """The content of a session's log as JSON data, whether or not the session is in use."""

    session_id: str
    tags: Mapping[str, str]
    began: float
    """When it was created, in unix seconds."""
    about: Mapping[str, object]
    state: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Frozen values by the name of their slice, as ``weakincentives.serde.freeze`` writes them."""
    log: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    at: float = 0.0
    """When it was last saved."""
    resumed: list[float] = field(default_factory=list[float])
    """The times of ``SavedSession.mark_resumed``."""
    saves: list[Any] = field(default_factory=list[Any])
    """All of them, oldest first."""
    files: list[str] = field(default_factory=list[str])
    """The lines that were attached."""
    damage: str = ""
    """What is wrong with the rest of the log, if only a part of it could be read."""

    @classmethod
    def read(cls, path: Path | SessionLog, *, partly: bool = False) -> SavedSessionData:
        """Read a file, or the log of another store, even while it is being written.

        With ``partly``, return what precedes the first damaged line: for display, not to resume.

        Raises:
            SnapshotError: It is not the file of a session, is damaged, or was not written by this
                user.
        """
        log = _log_at(path)
        data, part = head_of(log), log.read(log.begin)
        if not partly:
            part.checked()
        with readable_from(log), no_collection():
            for text in part.texts:
                data.add(parse_save(text, log.media))
        data.damage = part.damage
        return data

    def back_to(self, until: Until, *, through: bool) -> SavedSessionData:
        """Return what had been saved before a save, or up to its end."""
        undone, *changes = gone_back(reversed(self.saves), until, through=through)
        saves = self.saves[: len(self.saves) - undone]
        state, log = (
            {**now, **{name: now[name][: each.kept] + each.rest for name, each in then.items()}}
            for now, then in zip((self.state, self.log), changes, strict=True)
        )
        return replace(
            self,
            state=state,
            log=log,
            at=float(saves[-1]["at"]) if saves else self.began,
            saves=saves,
        )

    def add(self, line: Any) -> None:
        """Apply one save."""
        self.at = float(line["at"])
        self.saves.append(line)
        if line.get("fold") == 0:
            self.state, self.log, self.resumed = {}, {}, [float(each) for each in line["resumed"]]
        elif not line["state"] and not line["log"] and "files" not in line:
            self.resumed.append(self.at)
        _add_files(self.files, line)
        for changes, slices in ((line["state"], self.state), (line["log"], self.log)):
            for name, (kept, items) in changes.items():
                values = slices.setdefault(current_name(name), [])
                if kept > len(values):
                    raise ValueError(f"values are missing in the slice of {name}")
                values[kept:] = items

    def fork(
        self,
        path: Path,
        target: Path,
        *,
        session_id: str,
        about: Mapping[str, object],
        added: Mapping[str, Sequence[object]] | None = None,
        replaced: tuple[str, int, object] | None = None,
    ) -> None:
        """Write what was read of a file to a new one, as a session of its own.

        ``added`` are further values of LOG slices, by name. ``replaced`` is another value of one,
        with the name and the place, in the save that it was first in. Costs what was read: no value
        is decoded. The new file appears complete, or not at all.
        """
        head = make_head(session_id, self.tags, SYSTEM_CLOCK.time(), about)
        log = FileLog(path)
        lines = log.read(log.begin).texts[: len(self.saves)]
        if len(lines) < len(self.saves):
            raise SnapshotError(f"{path} has changed while it was read")
        store = partial(store_media, target)
        if replaced is not None:
            name, place, value = replaced
            frozen = json.loads(encode(value, store))
            lines = [_with_replaced(line, name, place, frozen) for line in lines]
        if added:
            changes = (
                change_of(name, len(self.log.get(name, ())), [encode(v, store) for v in values])
                for name, values in added.items()
            )
            lines.append(save_of(self.at, log=changes).encode())
        share_media(path, target, digests_in(lines))
        write_file(target, head, lines)

    @property
    def incomplete(self) -> frozenset[str]:
        """The slices with values that could not be saved."""
        slices = {**self.state, **self.log}
        return frozenset(name for name, values in slices.items() if any(map(is_unsaved, values)))

    def snapshot(self, types: Iterable[type] = ()) -> Snapshot:
        """Return the session's state; its types must be known here."""
        incomplete = self.incomplete
        for name in incomplete:
            warn_of_incomplete(name)
        state = {name: each for name, each in self.state.items() if name not in incomplete}
        log = {
            name: [v for v in each if not is_unsaved(v)] if name in incomplete else each
            for name, each in self.log.items()
        }
        return Snapshot.from_items(state, log, self.at, types=types)


class Saves:
    """The saves in a file, or in another log, one by one, and later those that were added since.

    Raises:
        SnapshotError: It is not the file of a session, or was not written by this user.
    """

    def __init__(self, path: Path | SessionLog) -> None:
        self._log = _log_at(path)
        self.damage = ""
        """What is wrong with the next save, if it cannot be read."""
        self.head = head_of(self._log)
        self._end = self._log.begin

    def new(self) -> Generator[tuple[SavePlace, Any]]:
        """Yield the complete saves after the last one, up to the first damaged one."""
        part = self._log.read(self._end)
        for place, text in zip(part.places, part.texts, strict=True):
            yield place, parse_save(text, self._log.media)
            self._end = place.end
        self.damage = part.damage

    def at(self, places: Iterable[SavePlace]) -> Generator[Any]:
        """Yield some saves again."""
        for text in self._log.at(places):
            yield parse_save(text, self._log.media)


def _add_files(files: list[str], line: Any) -> None:
    """Add the attached lines of a save to those of older saves."""
    if line.get("fold") == 0:
        files.clear()
    files += line.get("files", ())


def _attached_in(texts: Iterable[bytes]) -> list[str]:
    """Return the lines that are attached to saves, oldest first."""
    files: list[str] = []
    for text in texts:
        if text.endswith(b"]}"):  # nothing else is a list at the end of a save
            _add_files(files, json.loads(text))
    return files


def with_files(line: str, files: Sequence[str]) -> str:
    """Return a save with lines that are attached to it."""
    # ASCII only: any text can be attached, even half a surrogate pair.
    return f'{line[:-1]},"files":{json.dumps(files, separators=(",", ":"))}}}' if files else line


# Opening


@dataclass(frozen=True, slots=True)
class Opened:
    """What a session is opened from."""

    head: SavedSessionData
    snapshot: Snapshot
    log: Mapping[str, Sequence[Any]] | None
    """The LOG slices, frozen; None if a value of them could not be saved."""
    incomplete: frozenset[str]
    attached: list[str]


def opened(log: LeasedLog, types: Iterable[type]) -> Opened:
    """Return the state of a log; its newest saves are parsed now, others when first needed."""
    data = head_of(log)
    parse = partial(parse_save, media=log.media)
    with readable_from(log), no_collection():
        texts = log.load().texts
        attached = _attached_in(texts)
        whole = b"\n".join(texts)
        # An adopted file has blanks.
        if _HAS_UNSAVED not in whole and not any(text.startswith(b'{"at": ') for text in texts):
            found = _NewestSaves(texts, whole, parse)
            at = float(parse(texts[-1])["at"]) if texts else data.began
            snapshot = Snapshot.from_items(found.state, found.log, at, types=types)
            return Opened(data, snapshot, found.log, frozenset(), attached)
        for text in texts:
            data.add(parse(text))
        snapshot, incomplete = data.snapshot(types), data.incomplete
        return Opened(data, snapshot, None if incomplete else data.log, incomplete, attached)


class _NewestSaves:
    """The STATE and LOG slices of some saves, by name, as frozen values."""

    def __init__(self, texts: Sequence[bytes], whole: bytes, parse: Callable[[bytes], Any]) -> None:
        """All texts must be as ``SavedSession`` writes them; ``whole`` is their lines."""
        self.state: dict[str, _FrozenValues] = {}
        self.log: dict[str, _FrozenValues] = {}
        self._texts = texts
        self._parse = parse
        self._older = len(texts)
        """The saves from here on have been applied."""
        self._lock = threading.Lock()
        starts = [0, *accumulate(len(text) + 1 for text in texts)]
        for name, text in _names_in(whole):
            self._find(name, text, whole, starts)

    def load(self, values: _FrozenValues, start: int) -> None:
        """Parse older saves until the values from a place on are known."""
        with self._lock, no_collection():
            while values.known_from > start:
                if not self._older:
                    raise SnapshotError(f"values are missing in the slice of {values.name}")
                self._older -= 1
                try:
                    self._add(self._parse(self._texts[self._older]))
                except UNREADABLE as error:
                    raise SnapshotError(
                        f"save {self._older + 1} cannot be read: {error}"
                    ) from error

    def _add(self, save: Any) -> None:
        for kind, slices in (("state", self.state), ("log", self.log)):
            for name, (kept, items) in save[kind].items():
                if (found := slices.get(current_name(name))) is not None:
                    found.add(kept, items)

    def _find(self, name: str, text: bytes, whole: bytes, starts: list[int]) -> None:
        """Find the newest save of a slice, if there is a slice of this name."""
        end = len(whole)
        while (found := whole.rfind(text, 0, end)) >= 0:
            place = bisect_right(starts, found) - 1
            end = starts[place]
            save = self._parse(self._texts[place])
            for kind, slices in (("state", self.state), ("log", self.log)):
                if name in save[kind]:
                    kept, items = save[kind][name]
                    current = current_name(name)
                    known = slices.get(current)
                    if known is None or known.place < place:  # several names, if it has moved
                        slices[current] = _FrozenValues(self, current, place, kept, items)
                    if items or kept or slices is self.log:
                        return
                    # A reset of a slice is a change of its state, whatever its kind: look further.


class _KnownValues:
    """The frozen values of a slice, known from a place on: older saves make more of them known."""

    def __init__(self, name: str, kept: int, items: list[Any]) -> None:
        self.name = name
        self.known_from = kept
        self.values: list[Any] = [None] * kept + items

    def add(self, kept: int, items: list[Any]) -> None:
        """Add what an older save says."""
        end = self.known_from
        if kept < end:
            if kept + len(items) < end:
                raise SnapshotError(f"values are missing in the slice of {self.name}")
            self.values[kept:end] = items[: end - kept]
            self.known_from = kept


class _FrozenValues(_KnownValues, Sequence[Any]):
    """The frozen values of a slice; a part of them is parsed when it is first read."""

    def __init__(
        self, saves: _NewestSaves, name: str, place: int, kept: int, items: list[Any]
    ) -> None:
        super().__init__(name, kept, items)
        self.place = place
        """The newest save of the slice."""
        self._saves = saves

    def part(self, start: int, stop: int) -> list[Any]:
        if start < self.known_from:
            self._saves.load(self, start)
        return self.values[start:stop]

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            start, stop, _ = place.indices(len(self))
            return _Part(self, start, stop)
        at = range(len(self))[place]
        return self.part(at, at + 1)[0]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.part(0, len(self)))


class _Part(Sequence[Any]):
    """Some of the values of a slice, parsed when they are first read."""

    def __init__(self, values: _FrozenValues, start: int, stop: int) -> None:
        self._values = values
        self._start = start
        self._stop = max(start, stop)

    def __getitem__(self, place: Any) -> Any:
        return self._values.part(self._start, self._stop)[place]

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.part(self._start, self._stop))


def _names_in(whole: bytes) -> set[tuple[str, bytes]]:
    """Return what may be the names of slices, each with the text that its changes begin with.

    Any key of such a list may be; most are told apart by the colon that every name of a class has.
    In a string, the quote after the key is escaped: no JSON string ends in a single backslash.
    """
    ends = (match.start() for match in _CHANGE.finditer(whole))
    keys = {whole[whole.rfind(b'"', 0, end) + 1 : end] for end in ends}
    found: set[tuple[str, bytes]] = set()
    for key in keys:
        if b":" in key:
            with contextlib.suppress(ValueError):
                found.add((json.loads(b'"%b"' % key), b'"%b":[' % key))
    return found


# Going back

Until: TypeAlias = tuple[str, int]
"""A save: the newest that filled this place in the LOG slice of this name."""


class _Before:
    """How a slice was at an earlier time: some of its present values, and others after them."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self._then: _KnownValues | None = None

    def add(self, name: str, kept: int, items: list[Any]) -> bool:
        """Add the next older change; returns whether all is known."""
        if self._then is None:
            self._then = _KnownValues(name, kept, items)
            self.kept = min(self.kept, self.size)
        else:
            self._then.add(kept, items)
        return self._then.known_from <= self.kept

    @property
    def size(self) -> int:
        return 0 if self._then is None else len(self._then.values)

    @property
    def rest(self) -> list[Any]:
        """The values after those kept, frozen."""
        return [] if self._then is None else self._then.values[self.kept :]


def gone_back(
    newest_first: Iterable[Any],
    until: Until,
    *,
    through: bool,
    logs: Container[str] | None = None,
) -> tuple[int, dict[str, _Before], dict[str, _Before]]:
    """Return the number of saves since another, and the STATE and LOG slices changed since.

    With ``through``, that save itself is not one of them. Of the LOG slices, only those named in
    ``logs``, or all. Reads no more saves than it needs.
    """
    state: dict[str, _Before] = {}
    log: dict[str, _Before] = {}
    undone, saves = 0, iter(newest_first)
    for save in saves:
        is_last = _fills(save, *until)
        if is_last and "fold" in save:
            raise SnapshotError("the log was compacted since, so there is no way back to then")
        if is_last and through:
            saves = chain([save], saves)
            break
        undone += 1
        for found, name, kept, _ in _changes(save, state, log, logs):
            if name not in found:
                found[name] = _Before(kept)
            elif kept < found[name].kept:
                found[name].kept = kept
        if is_last:
            break
    open_state, open_log = dict(state), dict(log)
    while open_state or open_log:
        save = next(saves, None)
        if save is None:
            break
        for found, name, kept, items in _changes(save, open_state, open_log):
            if name in found and found[name].add(name, kept, items):
                del found[name]
    for before in (*open_state.values(), *open_log.values()):
        before.kept = 0  # it was not there yet
    return undone, state, log


def _changes(
    save: Any,
    state: dict[str, _Before],
    log: dict[str, _Before],
    logs: Container[str] | None = None,
) -> Generator[tuple[dict[str, _Before], str, int, list[Any]]]:
    """Yield what a save changed, with the dictionary that is for it."""
    for name, (kept, items) in save["state"].items():
        yield state, current_name(name), kept, items
    for name, (kept, items) in save["log"].items():
        if logs is None or current_name(name) in logs:
            yield log, current_name(name), kept, items


def _fills(save: Any, wanted: str, place: int) -> bool:
    return any(
        kept <= place < kept + len(items) and current_name(name) == wanted
        for name, (kept, items) in save["log"].items()
    )


def _with_replaced(text: bytes, name: str, place: int, value: Any) -> bytes:
    """Return a save with another value at a place of a LOG slice, if it has that place."""
    line = json.loads(text)
    for each, (kept, items) in line["log"].items():
        if current_name(each) == name and kept <= place < kept + len(items):
            items[place - kept] = value
            return _to_json(line).encode()
    return text


# Whole logs


def located(path: str | Path, store: SessionStore | None) -> tuple[SessionStore, str, str]:
    """Return the store and the name in it of a session, and its name without a suffix."""
    if store is not None:
        return store, str(path), Path(path).stem if isinstance(store, FileStore) else str(path)
    path = Path(path)
    return FileStore(path.parent), path.name, path.stem


def _log_at(path: Path | SessionLog) -> SessionLog:
    return FileLog(path) if isinstance(path, Path) else path


def compact_session(
    path: str | Path, *, store: SessionStore | None = None, wait: float = 0.0
) -> None:
    """Compact a session that is not open: see ``SavedSession.compact``."""
    store, name, _ = located(path, store)
    with contextlib.closing(store.open(name, wait=wait)) as log:
        compact_log(log)


def compact_log(log: LeasedLog) -> None:
    """Fold all saves of a log into one state; what is lost is going back to before.

    The state is written as several saves, so that a session still opens without parsing all of it.
    """
    data = head_of(log)
    with readable_from(log), no_collection():
        for text in log.load().texts:
            data.add(json.loads(text))
    changes = [
        (kind, name, start, values[start : start + _FOLDED])
        for kind, slices in (("state", data.state), ("log", data.log))
        for name, values in slices.items()
        for start in range(0, len(values), _FOLDED)
    ]
    first: dict[str, Any] = {"at": data.at, "state": {}, "log": {}, "resumed": data.resumed}
    lines = [with_files(_to_json({**first, "fold": 0}), data.files)]
    for number, (kind, name, start, values) in enumerate(changes, 1):
        change = {"state": {}, "log": {}, kind: {name: [start, values]}}
        lines.append(_to_json({"at": data.at, **change, "fold": number}))
    log.replace([line.encode() for line in lines])


def copy_session(
    source: SessionStore, name: str, target: SessionStore, target_name: str = ""
) -> int:
    """Copy a session with its media to another store; returns how many saves were written.

    The source may be in use. If the target has an earlier copy, only what is new is added, so that
    a viewer can follow; if the source was compacted since, the copy is replaced.

    Raises:
        FileExistsError: The target has another session of that name.
        SessionInUse: The copy is in use.
    """
    log, target_name = source.log(name), target_name or name
    try:
        copy = target.open(target_name)
    except FileNotFoundError:
        copy = target.create(target_name, log.head)
    with contextlib.closing(copy):
        if copy.head != log.head:
            raise FileExistsError(f"{copy.shown} is another session")
        known, texts = copy.load().texts, log.read(log.begin).checked().texts
        is_longer = texts[: len(known)] == known
        new = texts[len(known) :] if is_longer else texts
        for digest in digests_in(new):
            with contextlib.suppress(SnapshotError):  # it may only look like the digest of media
                copy.store(log.media(digest).read())
        if not is_longer:
            copy.replace(new)
        elif new:
            copy.append(new)
        return len(new)
