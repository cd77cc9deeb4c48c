"""A session kept in a file as it goes, so that another process can take it up after a kill.

The file is JSON lines, each under a seal that only this user can make. The first says whose session
it is; each of the others is one save, and says of every slice that changed how many of its values
stay and which ones follow them. The seal of a save holds for this session and this place only.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weakincentives import locks
from weakincentives.errors import SessionError, SessionInUse, SnapshotError, UndoRefused
from weakincentives.logs import get_logger
from weakincentives.prompt.policies import note_success
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.runtime.conversation import Message
from weakincentives.runtime.events import PromptExecuted, ToolInvoked
from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger
from weakincentives.runtime.session import Session, Snapshot, type_name
from weakincentives.serde import freeze, thaw
from weakincentives.slices import EMPTY, Slice, SlicePolicy
from weakincentives.state import Seals

if TYPE_CHECKING:
    from weakincentives.call import ToolCall
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.filesystem.history import Committed

_logger = get_logger(__name__)

VERSION = 2
"""Of the file. Version 1 had no seals."""

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)

_UNSAVED = "unsaved"
"""What stands in the place of a value that could not be written."""


_UNKNOWN = (
    "The process was killed before this call was on record, so it is not run again. {}\n"
    "Find out what is there before you go on"
)


def not_undone(history: Sequence[Committed]) -> set[str]:
    """Return the calls whose changes are in place: of a call that was undone and made again too."""
    live: set[str] = set()
    undone: set[str] = set()
    for each in reversed(history):
        if each.call_id in undone:  # an undo that was undone itself does not count
            undone.remove(each.call_id)
            continue
        undone.update(each.undoes)
        live.add(each.call_id)
    return live


class SavedSession:
    """A session kept in a file (JSON lines) as it goes.

    It is saved by itself when the model has spoken, after every call and after every run. A save
    costs what has changed since the last one, and is one write: a kill costs at most the save
    under way. Child sessions are not kept.

    A value that has no exact JSON form is left out with a warning that names its slice: of a LOG
    the one value, of a STATE slice all, because half of a state never was one. The record of a
    call is always kept, in the words that the model saw.
    """

    def __init__(
        self, path: Path, session: Session, about: Mapping[str, object], fd: int, size: int
    ) -> None:
        self.path = path
        self.session = session
        self.about = about
        """What whoever created it had to say of it."""
        self._fd = fd
        self._pid = os.getpid()
        self._size = size
        """How much of the file is whole lines."""
        self._seals = Seals(_HEAD)
        self._saved: dict[type, Slice[Any]] = {}
        self._names: dict[str, type] = {}
        self._stops: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls,
        path: str | Path,
        session: Session,
        *,
        about: Mapping[str, object] | None = None,
    ) -> SavedSession:
        """Keep a session in a new file, from now on. Only its owner can read the file.

        Raises:
            FileExistsError: There is something at the path; ``open`` goes on with a session.
        """
        path, about = Path(path), dict(about or {})
        head = {
            "wink_session": VERSION,
            "id": session.session_id,
            "tags": freeze(dict(session.tags)),
            "began": session.clock.time(),
            "about": freeze(about),
        }
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600)
        with _closed_on_error(fd):
            _take_lock(fd, path)
            saved = cls(path, session, about, fd, 0)
            text = json.dumps(head)
            saved._append(text)
            saved._seals = _seals_after(text.encode())
            saved.save()
        saved._listen()
        return saved

    @classmethod
    def open(
        cls, path: str | Path, *, types: Iterable[type] = (), **session_options: Any
    ) -> SavedSession:
        """Go on with the session that a file holds; a last line that a kill has torn is dropped.

        The modules that define its types must be imported before; others go into ``types``. The
        options are those of ``Session``; its id and tags are as they were unless given.

        Raises:
            SessionInUse: Another process, or this one, has the file open.
            SnapshotError: The file is damaged, was not written by this user, or holds a type that
                is not known here.
        """
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | _NOFOLLOW)
        with _closed_on_error(fd):
            _take_lock(fd, path)
            data = SavedSessionData.read(path)
            options = {"session_id": data.session_id, "tags": data.tags, **session_options}
            session = Session.from_snapshot(data.snapshot(types), **options)
            saved = cls(path, session, data.about, fd, data.size)
            saved._seals = data.seals
            saved._note_what_is_there(data)
        saved._listen()
        return saved

    @staticmethod
    def adopt(path: str | Path) -> int:
        """Seal a file that an earlier version wrote, or that is damaged; returns the lines lost.

        For a person who knows where the file comes from: a run that is resumed loads what its
        flags name. What follows a line that cannot be read is left out, and is then in the copy
        that is kept beside the file.
        """
        path = Path(path)
        fd = os.open(path, os.O_RDWR | _NOFOLLOW)
        try:
            _take_lock(fd, path)
            data = path.read_bytes()
            texts = list(_readable(data))
            if not texts:
                raise SnapshotError(f"{path} is not the file of a session")
            copy = path.with_name(f"{path.name}.before-{os.urandom(4).hex()}")
            copy.touch(mode=0o600, exist_ok=False)
            copy.write_bytes(data)
            sealed, seals = b"", Seals(_HEAD)
            for text in texts:
                sealed += seals.sealed(text, len(sealed)) + b"\n"
                seals = _seals_after(texts[0])
            os.pwrite(fd, sealed, 0)
            os.ftruncate(fd, len(sealed))
            os.fsync(fd)
        finally:
            locks.close(fd)
        return data.count(b"\n") - len(texts)

    def save(self) -> None:
        """Append what has changed since the last save; nothing when nothing has."""
        with self._lock:
            if self._fd < 0 or self._pid != os.getpid():
                raise SessionError(f"{self.path} was closed, or is kept by another process")
            # Not what a call under way sees: that has not happened until it is kept.
            snapshot = self.session.snapshot_here()
            changed = {
                slice_type: (policy, values)
                for policy, slice_type, values in snapshot.slices()
                if values is not self._saved.get(slice_type, EMPTY)
            }
            gone = self._saved.keys() - snapshot.state.keys() - snapshot.log.keys()
            for slice_type in gone:  # a reset forgets slices altogether
                changed[slice_type] = (SlicePolicy.STATE, EMPTY)
            lines: dict[SlicePolicy, list[str]] = {SlicePolicy.STATE: [], SlicePolicy.LOG: []}
            for slice_type, (policy, values) in changed.items():
                if self._is_alone_with_its_name(slice_type):
                    lines[policy].append(self._change(slice_type, values))
            if any(lines.values()):
                state, log = (",".join(lines[policy]) for policy in lines)
                at = json.dumps(snapshot.taken_at)
                self._append(f'{{"at":{at},"state":{{{state}}},"log":{{{log}}}}}')
            self._saved.update({kind: values for kind, (_, values) in changed.items()})
            for slice_type in gone:
                del self._saved[slice_type]

    def take_back_unrecorded(
        self, files: HostFilesystem, *, ledger: OutcomeLedger | None = None
    ) -> tuple[str, ...]:
        """Put right what a kill left between a call's commit and its record; returns undone calls.

        For a session that is resumed. What a call did to files is undone: the call is made again.
        One that took effect outside is not: it gets the answer that the ledger has, which is
        the workspace's own unless another is given. What can be neither is recorded as unknown.
        """
        ledger = ledger or OutcomeLedger.at(files.store / "outcomes.jsonl")
        on_record = {r.call_id for r in self.session[ToolInvoked].all() if not r.suspended}
        asked = [call for said in self.session[Message].all() for call in said.tool_calls]
        live = not_undone(files.history())
        undone: list[str] = []
        for call in reversed(asked):  # the newest first: later changes may lie on earlier ones
            found = None if call.id in on_record else ledger.find(call.id)
            if call.id in on_record or (found is None and call.id not in live):
                continue
            if found is not None and found.outcome == "committed":
                self._record_answer(call, found, lost_files=found.files and call.id not in live)
                ledger.end(found)
            elif call.id in live and (found is None or found.outcome != "unknown"):
                try:
                    files.undo(call.id)
                    undone.append(call.id)
                except UndoRefused as error:
                    _logger.warning("what call %s did to files stays: %s", call.id, error)
                    self._record(call, _UNKNOWN.format(f"What it changed is kept: {error}"))
        self.save()
        return tuple(reversed(undone))

    def _record_answer(self, call: ToolCall, found: CallOutcome, *, lost_files: bool) -> None:
        told = f" It answered: {found.message}" if found.message else ""
        if lost_files:
            lost = f"It took effect outside, but its changes to files were lost.{told}"
            self._record(call, _UNKNOWN.format(lost))
        else:
            self._record(call, found.message, success=True)
            note_success(call.name, self.session)
        self.session.dispatch(found)

    def _record(self, call: ToolCall, message: str, *, success: bool = False) -> None:
        result: ToolResult[Any] = (
            ToolResult.ok(None, message)
            if success
            else ToolResult.error(message, code="OUTCOME_UNKNOWN")
        )
        result.call_id = call.id
        record = ToolInvoked(
            tool_name=call.name,
            params=call.params,
            result=result,
            success=success,
            timestamp=self.session.clock.time(),
            duration=0.0,
            call_id=call.id,
            ran=True,
        )
        self.session.dispatch(record)

    def close(self) -> None:
        """Save once more, and let others have the file."""
        for stop in self._stops:
            stop()
        if self._fd >= 0 and self._pid == os.getpid():
            try:
                self.save()
            finally:
                fd, self._fd = self._fd, -1
                locks.close(fd)

    def __enter__(self) -> SavedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        subscribe = self.session.dispatcher.subscribe
        for kind in (Message, ToolInvoked, PromptExecuted):
            self._stops.append(subscribe(kind, self._on_record))

    def _on_record(self, event: object) -> None:
        if isinstance(event, Message) and event.role == "tool":
            return  # the record of the call is there already, and that is what a resume needs
        try:
            self.save()
        except (OSError, SessionError) as error:
            _logger.error("the session was not saved: %s; it is tried again with the next", error)

    def _note_what_is_there(self, data: SavedSessionData) -> None:
        for _, slice_type, values in self.session.snapshot_here().slices():
            name = type_name(slice_type)
            self._names[name] = slice_type
            # What is not whole has other places there than here: it is written anew.
            self._saved[slice_type] = Slice.of(()) if name in data.incomplete else values

    # What is written

    def _is_alone_with_its_name(self, slice_type: type) -> bool:
        """Whether no other slice is called the same: classes made in functions can be."""
        if self._names.setdefault(type_name(slice_type), slice_type) is slice_type:
            return True
        if slice_type not in self._saved:
            _logger.warning(
                "the slice of %s is not saved: another class has the same name", slice_type
            )
        return False

    def _change(self, slice_type: type, values: Slice[Any]) -> str:
        kept = values.shared_with(self._saved.get(slice_type, EMPTY))
        new = [*islice(values.newest_first(), len(values) - kept)][::-1]
        items = ",".join(_encoded(slice_type, value) for value in new)
        return f"{json.dumps(type_name(slice_type))}:[{kept},[{items}]]"

    def _append(self, line: str) -> None:
        """Add a line, all of it or nothing."""
        data = self._seals.sealed(line.encode(), self._size) + b"\n"
        if os.fstat(self._fd).st_size != self._size:
            os.ftruncate(self._fd, self._size)  # a torn line, or a save that was interrupted
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes fit into {self.path}")
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSessionData:
    """What a session's file holds, as JSON data: for those who look at it, under way or not."""

    session_id: str
    tags: Mapping[str, str]
    began: float
    """When it was created, in unix seconds."""
    about: Mapping[str, object]
    state: Mapping[str, list[Any]]
    """Frozen values by the name of their slice, as ``weakincentives.serde.freeze`` writes them."""
    log: Mapping[str, list[Any]]
    at: float
    """When it was last saved."""
    size: int
    """How much of the file is whole lines."""
    seals: Seals
    """What its saves are sealed with."""
    incomplete: frozenset[str] = field(default_factory=frozenset[str])
    """The slices that hold what could not be saved."""
    damage: str = ""
    """What is wrong with the rest of the file, if only a part of it could be read."""

    @classmethod
    def read(cls, path: Path, *, partly: bool = False) -> SavedSessionData:
        """Read a file, also one that is written to at this moment.

        With ``partly`` what comes before the first damaged line is returned: to be looked at, not
        to go on from.

        Raises:
            SnapshotError: It is not the file of a session, is damaged, or was not written by this
                user.
        """
        whole, end, _ = path.read_bytes().rpartition(b"\n")  # the rest is torn, or on its way
        if not end:
            raise SnapshotError(f"{path} holds no session: nothing was saved in it")
        first, *lines = whole.split(b"\n")
        try:
            text = Seals(_HEAD).unsealed(first)
            if text is None:
                raise _unsealed(path)
            head = _head(json.loads(text))
            seals, found = _seals_after(text), _Saves(head["began"])
            size, damage = len(first) + 1, ""
            for number, sealed in enumerate(lines, 2):
                text = seals.unsealed(sealed, size)
                if text is None:
                    damage = f"line {number} of {path} is damaged, or is not ours"
                    break
                found.add(json.loads(text))
                size += len(sealed) + 1
            if damage and not partly:
                raise SnapshotError(
                    f"{damage}, so nothing goes on from it: a call that it has on record would be"
                    " made again. `wink log` shows what comes before"
                )
        except _UNREADABLE as error:
            raise SnapshotError(f"{path} is not the file of a session: {error!r}") from error
        return cls(
            **head,
            state=found.state,
            log=found.log,
            incomplete=found.incomplete(),
            at=found.at,
            size=size,
            seals=seals,
            damage=damage,
        )

    def snapshot(self, types: Iterable[type] = ()) -> Snapshot:
        """Return what the session held; its types must be known here."""
        for name in self.incomplete:
            _logger.warning("the slice of %s was not saved whole", name.rpartition(":")[2])
        state = ((name, s) for name, s in self.state.items() if name not in self.incomplete)
        log = ((name, [v for v in s if not _is_unsaved(v)]) for name, s in self.log.items())
        document = {
            "wink_snapshot": 1,
            "tag": "",
            "taken_at": self.at,
            "state": [[name, {"$": "tuple", "items": items}] for name, items in state if items],
            "log": [[name, {"$": "tuple", "items": items}] for name, items in log if items],
        }
        return Snapshot.from_data(document, types=types)


_HEAD = "session"
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def _seals_after(head: bytes) -> Seals:
    """Return the seals of the saves that follow a head."""
    return Seals(f"save of session {Seals(_HEAD).seal(head)}")


def _unsealed(path: Path) -> SnapshotError:
    return SnapshotError(
        f"{path} does not carry your seal: it is not the file of a session, an earlier version"
        " of wink wrote it, somebody else did, or it is damaged. If it is yours, adopt it:"
        " `wink doctor --adopt-store`, or SavedSession.adopt"
    )


def _readable(data: bytes) -> Generator[bytes]:
    """Yield the texts of a file's lines, sealed or not, up to the first that is none.

    Where the seal of the first is good, the others must be: only without the key are all bad.
    """
    found = _Saves(0.0)
    lines = data.split(b"\n")[:-1]
    head = Seals(_HEAD).unsealed(lines[0]) if lines else None
    seals, place = None if head is None else _seals_after(head), 0
    for line in lines:
        text = line if line.startswith(b"{") else line[33:]
        if place and seals is not None and seals.unsealed(line, place) is None:
            return
        try:
            values = json.loads(text)
            if place:
                found.add(values)
            else:
                values["wink_session"] = VERSION
                _head(values)
        except _UNREADABLE:
            return
        place += len(line) + 1
        yield json.dumps(values).encode()


def _head(line: Any) -> dict[str, Any]:
    if line["wink_session"] != VERSION:
        raise ValueError(f"it has the version {line['wink_session']!r}")
    return {
        "session_id": line["id"],
        "tags": thaw(line["tags"]),
        "began": float(line["began"]),
        "about": thaw(line["about"]),
    }


class _Saves:
    """What the saves of a file add up to, as JSON data."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.state: dict[str, list[Any]] = {}
        self.log: dict[str, list[Any]] = {}

    def add(self, line: Any) -> None:
        self.at = float(line["at"])
        for changes, slices in ((line["state"], self.state), (line["log"], self.log)):
            for name, (kept, items) in changes.items():
                values = slices.setdefault(name, [])
                if kept > len(values):
                    raise ValueError(f"something is missing in the slice of {name}")
                values[kept:] = items

    def incomplete(self) -> frozenset[str]:
        """Return the slices that hold what could not be saved."""
        slices = {**self.state, **self.log}
        return frozenset(name for name, values in slices.items() if any(map(_is_unsaved, values)))


def _is_unsaved(value: Any) -> bool:
    return isinstance(value, dict) and cast("dict[str, Any]", value).get("$") == _UNSAVED


def _encoded(slice_type: type, value: object) -> str:
    """Return a value as JSON text; where that cannot be, what stands in its place."""
    try:
        return _json(freeze(value))
    except (SnapshotError, RecursionError) as error:
        kept = _kept_record(value) if isinstance(value, ToolInvoked) else None
        _logger.warning(
            "a value in the slice of %s is %s: %s",
            slice_type.__name__,
            "not saved" if kept is None else "saved in words",
            error,
        )
        return kept or _json({"$": _UNSAVED})


def _kept_record(record: ToolInvoked) -> str | None:
    """Return the record of a call with words where there is something that cannot be saved.

    Without it a run that is taken up would make the call again.
    """
    result = record.result
    words = replace(result, message=result.render(), value=None)
    for params in (record.params, repr(record.params)):
        with contextlib.suppress(SnapshotError, RecursionError):
            return _json(freeze(replace(record, params=params, result=words)))
    return None


def _json(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Generator[None]:
    try:
        yield
    except BaseException:
        locks.close(fd)
        raise


def _take_lock(fd: int, path: Path) -> None:
    if not locks.take(fd):
        raise SessionInUse(
            f"the session in {path} is under way in another process, or open in this one: "
            "wait until it has ended"
        )
    locks.keep_from_forks(fd)
