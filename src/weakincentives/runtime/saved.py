"""A session saved to a file as it goes, so that another process can resume it after a kill.

The file is JSON lines, each with a seal that only this user can make. The first line identifies the
session. Every other line is one save: for each changed slice, how many values stay and which values
follow them. The seal of a save is valid only for this session and this position in the file. The
bytes of ``Media`` are in files of their own next to it, each once, named by their digest.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from weakincentives import locks
from weakincentives.call import ToolCall
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.collector import no_collection
from weakincentives.errors import SessionError, SessionInUse, SnapshotError, UndoRefused
from weakincentives.events import PromptExecuted, ToolInvoked
from weakincentives.logs import get_logger
from weakincentives.media import Media
from weakincentives.prompt.policies import note_success
from weakincentives.runtime.conversation import (
    ContextCompacted,
    Message,
    last_conversation,
    without_rewound,
)
from weakincentives.runtime.index import MESSAGES, CallIndex, Moment
from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger
from weakincentives.serde import freeze, thaw
from weakincentives.serde.exact import StoredBytes, current_name, json_of
from weakincentives.session import Session, Snapshot, type_name
from weakincentives.slices import EMPTY, Slice, SlicePolicy
from weakincentives.state import SEAL_SIZE, Seals, no_links
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.filesystem.history import Committed
    from weakincentives.filesystem.redo import Redo

_logger = get_logger(__name__)

VERSION = 2
"""Of the file. Version 1 had no seals."""

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_HEAD = "session"
_MAX_HEAD = 64 << 20
"""Bytes of the first line, whose seal is checked before anything else is read."""
_UNSAVED = "unsaved"
"""Marks the place of a value that could not be written."""
_MEDIA = type_name(Media)
_STORED = "stored"
"""Marks the place of bytes that are in a file of their own."""
_HAS_STORED = f'"{_STORED}"'.encode()
_DIGESTS = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')
_LARGE = 1_000
"""Characters of base64; fewer stay in the line."""
_BLOCK = 64 << 10
"""Bytes that are read first where a file is read from its end."""
INHERITED = "inherited_calls"
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_UNKNOWN = (
    "The process was killed before this call was recorded, so the call is not re-run. {}\n"
    "Check the present state before you continue"
)


def _unknown(why: str) -> ToolResult[Any]:
    return ToolResult.error(_UNKNOWN.format(why), code="OUTCOME_UNKNOWN")


def not_undone(history: Sequence[Committed]) -> set[str]:
    """Return the calls whose changes are in place, including calls that were undone and re-run."""
    live: set[str] = set()
    undone: set[str] = set()
    for each in reversed(history):
        if each.call_id in undone:  # an undo that was itself undone does not count
            undone.remove(each.call_id)
            continue
        undone.update(each.undoes)
        live.add(each.call_id)
    return live


@dataclass(frozen=True, slots=True)
class UserMessage:
    """A message of the user, and what the model did for it."""

    text: str
    calls: tuple[str, ...]
    """The ids of the calls that the model made for it, oldest first."""
    place: int
    """Its place in the slice of messages."""
    preceding: int
    """How many messages of the conversation precede it."""


class SavedSession:
    """A session and the file (JSON lines) that it is saved to.

    Saves happen after every message of the model, every call and every run. A save costs what has
    changed since the last one and is a single write: a kill loses at most the save in progress.
    Child sessions are not saved.

    A value without an exact JSON form is left out, with a warning that names its slice: in a LOG
    only that value, in a STATE slice all values, because a partial state is wrong. The record of a
    call is always saved, with the text that the model saw.
    """

    def __init__(
        self, path: Path, session: Session, about: Mapping[str, object], fd: int, size: int
    ) -> None:
        self.path = path
        self.session = session
        self.about = about
        """What ``create`` was given."""
        self._fd = fd
        self._pid = os.getpid()
        self._size = size
        """The length of the complete lines."""
        self._seals = Seals(_HEAD)
        self._saved: dict[type, Slice[Any]] = {}
        self._unsaved: list[Snapshot] = []
        """The states that a failed save has left."""
        self._pending: list[str] = []
        """Lines that the commit of a call has encoded, and that are not in the file yet."""
        self.file_id = session.session_id
        """The id of the session in its file."""
        self._types: tuple[type, ...] = ()
        self._names: dict[str, type] = {}
        self._stops: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._index = CallIndex(inherited_calls(about))

    @classmethod
    def create(
        cls,
        path: str | Path,
        session: Session,
        *,
        about: Mapping[str, object] | None = None,
    ) -> SavedSession:
        """Save a session to a new file from now on. Only its owner can read the file.

        Raises:
            FileExistsError: The path exists; ``open`` continues a saved session.
        """
        path, about = Path(path), dict(about or {})
        head = _head(session.session_id, session.tags, session.clock.time(), about)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL) as fd:
            saved = cls(path, session, about, fd, 0)
            saved._append(head.decode())
            saved._seals = _seals_after(head)
            saved.save()
        saved._listen()
        return saved

    @classmethod
    def open(
        cls, path: str | Path, *, types: Iterable[type] = (), **session_options: Any
    ) -> SavedSession:
        """Continue the session in a file; a last line that a kill cut short is dropped.

        Modules that define its types must have been imported; pass other types in ``types``. The
        options are those of ``Session``; id and tags are those of the saved session by default.

        Raises:
            SessionInUse: Another process, or this one, has the file open.
            SnapshotError: The file is damaged, was not written by this user, or contains an unknown
                type. Old values are decoded when they are first read, and may raise then.
        """
        path = Path(path)
        with _locked(path, os.O_RDWR | os.O_APPEND) as fd:
            data = SavedSessionData.read(path)
            options = {"session_id": data.session_id, "tags": data.tags, **session_options}
            session = Session.from_snapshot(data.snapshot(types), **options)
            saved = cls(path, session, data.about, fd, data.size)
            saved._types = tuple(types)
            saved._continue_from(data)
        saved._listen()
        return saved

    def _continue_from(self, data: SavedSessionData) -> None:
        """Save what differs from a file's content, which the session has just got."""
        self._seals, self.file_id, incomplete = data.seals, data.session_id, data.incomplete
        self._index, self._saved = CallIndex(inherited_calls(data.about)), {}
        if not incomplete:  # else it is made when it is first needed
            self._index = CallIndex.of(data.log, inherited_calls(data.about))
        (present,) = self.session.states_passed()
        for _, slice_type, values in present.slices():
            name = type_name(slice_type)
            self._names[name] = slice_type
            # An incomplete slice has other places here than in the file: write it anew.
            self._saved[slice_type] = Slice.of(()) if name in incomplete else values

    @staticmethod
    def is_in_use(path: str | Path) -> bool:
        """Whether a process, or this one, has the file open."""
        fd = os.open(path, os.O_RDWR | _NOFOLLOW)
        try:
            return locks.is_taken(fd)
        finally:
            os.close(fd)

    @staticmethod
    def delete(path: str | Path) -> bool:
        """Delete a file with everything that belongs to it; False if it is in use.

        That is every file or directory whose name continues its stem, such as its media. What a
        kill leaves of them, the next call deletes.
        """
        from weakincentives.filesystem.tree import remove_path

        path = Path(path)
        with contextlib.suppress(FileNotFoundError):
            try:
                with _locked(path, os.O_RDWR) as fd:
                    # Under the lock: another process finds the session, or that it is gone.
                    path.unlink()
            except SessionInUse:
                return False
            locks.close(fd)
        for each in os.listdir(path.parent):
            if each.startswith(f"{path.stem}."):
                remove_path(path.parent / each)
        return True

    @staticmethod
    def adopt(path: str | Path) -> int:
        """Seal a file that is damaged or from an earlier version; returns the number of lines lost.

        Only for files of known origin: resuming a run loads code that the file names. Lines after
        an unreadable one are left out; a copy of the whole file stays next to it.
        """
        path = Path(path)
        with _locked(path, os.O_RDWR) as fd:
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
        locks.close(fd)
        return data.count(b"\n") - len(texts)

    @property
    def mark(self) -> str:
        """The letters at the end of the file's name: the short name of a run."""
        return self.path.stem.rpartition("-")[2]

    def save(self) -> None:
        """Append what has changed since the last save: each call on a line of its own.

        So the file has the state before and after every call.
        """
        with self._lock:
            if self._fd < 0 or self._pid != os.getpid():
                raise SessionError(f"{self.path} was closed, or belongs to another process")
            # Not the view of a call in progress: that has not been committed.
            lines, saved = self._encode(self.session.states_passed())
            if self._pending or lines:
                self._append(*self._pending, *lines)
            self._saved, self._unsaved, self._pending = saved, [], []

    def _encode(self, states: list[Snapshot]) -> tuple[list[str], dict[type, Slice[Any]]]:
        """Return the lines for the states that are not saved, and what is saved after them."""
        states = [*self._unsaved, *states]
        self._unsaved = states[:-1]
        saved, lines = self._saved, list[str]()
        for state in states:
            lines += self._line(state, saved)
            saved = {kind: values for _, kind, values in state.slices()}
        return lines, saved

    # The record that commits a call: see ``recovery``

    @property
    def size(self) -> int:
        """The bytes in the file."""
        return self._size

    @property
    def commits_with_calls(self) -> bool:
        """Whether the record that commits a call can hold what its file gets next."""
        return self._fd >= 0 and self._pid == os.getpid()

    @contextlib.contextmanager
    def encoding(self, call_id: str) -> Generator[Encoding]:
        """Yield the encoding of a call's state; the next save writes it, unless the block fails."""
        with self._lock:
            encoding = Encoding(self, call_id)
            yield encoding
            if encoding.saved is not None:
                self._pending += encoding.lines
                self._saved, self._unsaved = encoding.saved, []

    def encode_after(self, call_id: str, after: Snapshot) -> tuple[Redo, dict[type, Slice[Any]]]:
        """Return the lines for the present state and the one to come, and what is saved then."""
        from weakincentives.filesystem.redo import Redo

        lines, saved = self._encode([*self.session.states_passed(), after])
        at = self._size + _sealed_size(self._pending)
        redo = Redo(
            session=self.file_id,
            file=str(self.path.absolute()),
            at=at,
            end=at + _sealed_size(lines),
            call_id=call_id,
            lines=tuple(lines),
        )
        return redo, saved

    def append_missing(self, redos: Iterable[Redo]) -> None:
        """Append what the file lacks of the lines that commit records hold, oldest first."""
        before = self._size
        with self._lock:
            for each in redos:
                if each.end <= self._size:
                    continue
                present = self._lines_from(each.at)
                if self._pending or present is None or present != [*each.lines[: len(present)]]:
                    _logger.warning("%s went on without call %s", self.path, each.call_id)
                    break
                self._append(*each.lines[len(present) :])
            if self._size == before:
                return
            data = SavedSessionData.read(self.path)
            self.session.hold(data.snapshot(self._types))
            self._continue_from(data)

    def _lines_from(self, at: int) -> list[str] | None:
        """Return the texts of the lines from a place on; None if no line begins there."""
        found: list[str] = []
        while at < self._size:
            line = os.pread(self._fd, self._size - at, at).partition(b"\n")[0]
            text = self._seals.unsealed(line, at)
            if text is None:
                return None
            found.append(text.decode())
            at += len(line) + 1
        return found if at == self._size else None

    def _line(self, state: Snapshot, saved: Mapping[type, Slice[Any]]) -> list[str]:
        """Return a line with what has changed from one state to another; none for nothing."""
        changed = {
            slice_type: (policy, values)
            for policy, slice_type, values in state.slices()
            if values is not saved.get(slice_type, EMPTY)
        }
        for slice_type in saved.keys() - state.state.keys() - state.log.keys():
            changed[slice_type] = (SlicePolicy.STATE, EMPTY)  # a reset removes slices
        lines: dict[SlicePolicy, list[str]] = {SlicePolicy.STATE: [], SlicePolicy.LOG: []}
        for slice_type, (policy, values) in changed.items():
            if self._has_unique_name(slice_type):
                lines[policy].append(self._change(slice_type, values, saved))
        if not any(lines.values()):
            return []
        state_text, log_text = (",".join(lines[policy]) for policy in lines)
        at = json.dumps(state.taken_at)
        return [f'{{"at":{at},"state":{{{state_text}}},"log":{{{log_text}}}}}']

    def mark_resumed(self) -> None:
        """Note the time, as the beginning of another sitting of the same session."""
        with self._lock:
            self._append(
                f'{{"at":{json.dumps(self.session.clock.time())},"state":{{}},"log":{{}}}}'
            )

    def recover(
        self, files: HostFilesystem, *, ledger: OutcomeLedger | None = None
    ) -> tuple[str, ...]:
        """Complete what a kill left between a call's commit and its record; returns undone calls.

        For a session that is resumed, before anything else is done with it. A call that was
        committed gets its record, with the answer that it gave, and is not re-run.

        A commit without what the session needs, such as that of an earlier version, is undone, and
        its call will be re-run. One that took effect outside is not re-run: it gets its answer
        from the ledger, by default the workspace's own. If neither is possible, it is recorded as
        unknown.
        """
        from weakincentives.runtime.recovery import redo_missing, unsaved_commits

        ledger = ledger or OutcomeLedger.at(files.store / "outcomes.jsonl")
        redo_missing(self, files, ledger)
        index, mark = self.index, f"{self.mark}:"
        # Calls of a framework: it has the messages, and their ids begin with the run's mark.
        hosted = {e.call_id: e.tool_name for e in ledger.calls(mark) if e.call_id not in index.made}
        outcomes = {call_id: ledger.find(call_id) for call_id in (*index.unrecorded, *hosted)}
        # The files of a call whose outcome was unknown may have been committed long ago.
        is_old = any(e and e.files and e.outcome == "committed" for e in outcomes.values())
        history = [*unsaved_commits(files.newest_first(), {} if is_old else index.made)][::-1]
        for each in history:
            if each.call_id.startswith(mark) and each.call_id not in index.made:
                hosted[each.call_id] = each.tool
                outcomes.setdefault(each.call_id, ledger.find(each.call_id))
        live = not_undone(history)
        undone: list[str] = []
        # Newest first: later changes may depend on earlier ones.
        for call_id, found in reversed(outcomes.items()):
            if found is None and call_id not in live:
                continue
            call = self._asked(call_id) or ToolCall(hosted[call_id], None, call_id)
            if found is not None and found.outcome == "committed":
                self._record_answer(call, found, lost_files=found.files and call_id not in live)
                ledger.end(found)
            elif call_id in live and (found is None or found.outcome != "unknown"):
                try:
                    files.undo(call_id)
                    undone.append(call_id)
                except UndoRefused as error:
                    _logger.warning("the file changes of call %s stay: %s", call_id, error)
                    self.record(call, _unknown(f"Its changes stay: {error}"))
        self.save()
        return tuple(reversed(undone))

    undo_unrecorded = recover
    """The name before ``recover`` redid anything."""

    def user_messages(self) -> list[UserMessage]:
        """Return the user's messages in the last conversation, without those rewound.

        A message that was sent to a run in progress belongs to the message before it.
        """
        found: list[UserMessage] = []
        for n, (place, message) in enumerate(self._conversation()):
            if message.role == "user" and not message.sent_id:
                found.append(UserMessage(message.text, (), place, n))
            elif found and message.tool_calls:
                asked = (*found[-1].calls, *(call.id for call in message.tool_calls))
                found[-1] = replace(found[-1], calls=asked)
        return found

    def rewind(
        self, number: int, files: HostFilesystem | None = None, *, force: bool = False
    ) -> tuple[str, ...]:
        """Go back to before the user's message with this number; the first is 1.

        The conversation and all STATE slices are as they were then; in ``files``, the calls since
        then are undone. Records stay, effects outside stay, and what was undone before stays
        undone. Returns what ``files.undo`` returns.

        Raises:
            IndexError: There is no such message.
            UndoRefused: Files have changed since; nothing was rewound. ``force`` replaces them.
        """
        messages = self.user_messages()
        if not 1 <= number <= len(messages):
            raise IndexError(f"there is no message {number}; there are {len(messages)}")
        target = messages[number - 1]
        self.save()  # so that the file has all messages
        state, _ = self.state_at((MESSAGES, target.place))
        notes: tuple[str, ...] = ()
        with locks.undisturbed():  # Ctrl-C must not leave the files rewound without the rest
            if files is not None:
                live = not_undone(files.history())
                since = [call for message in messages[number - 1 :] for call in message.calls]
                notes = files.undo(*(each for each in reversed(since) if each in live), force=force)
            # After a kill between these two steps, the same rewind completes both.
            conversation = last_conversation(self.session)[0].conversation
            self.session.restore(state)
            self.session.dispatch(
                Message(role="user", conversation=conversation, rewound_to=target.preceding)
            )
            self.save()
        return notes

    def _conversation(self) -> list[tuple[int, Message]]:
        """Return the last conversation, with the places of its messages in the slice."""
        found = last_conversation(self.session)
        messages = enumerate(self.session[Message].all())
        own = found[0].conversation if found else None
        return without_rewound((n, m) for n, m in messages if not m.depth and m.conversation == own)

    # Going back

    @property
    def index(self) -> CallIndex:
        """Where its calls are; costs what is new since it was last asked for."""
        self._index = self._index.extend(self.session)
        return self._index

    def moment(self, number: int) -> Moment:
        """Return when the call with this number was made; costs the calls since.

        Raises:
            IndexError: There is no such call.
        """
        records = self.session.read_slice(ToolInvoked)
        if not inherited_calls(self.about) < number <= len(records):
            raise IndexError(f"the run {self.path.stem} has no call {number}")
        outer, *later = records.newer_than(number - 1)
        for place, each in enumerate(later, number + 1):  # a call ends after those nested in it
            if not outer.nested_in:
                break
            if each.call_id == outer.nested_in:
                outer, number = each, place
        return Moment(
            name=f"{self.mark}/{number}",
            call_id=outer.call_id,
            number=number,
            began=outer.timestamp,
            end=outer.timestamp + outer.duration,
            success=outer.success,
        )

    def state_at(self, until: Until, *, through: bool = False) -> tuple[Snapshot, int]:
        """Return all STATE slices and the number of messages as saved before a save, or by it.

        Costs what was saved since then; for a slice that has changed since, also what was saved
        between its last change before then and then.

        Raises:
            SnapshotError: There are values of unknown types, or the file is damaged.
        """
        self.save()
        present = {type_name(kind): (kind, values) for kind, values in self._saved.items()}
        kinds = [kind for kind, _ in present.values()]
        saves = self._saves_newest_first()
        _, changed, logs = _gone_back(saves, until, through=through, logs=(MESSAGES,))
        state = {
            kind: values
            for policy, kind, values in self.session.snapshot_here().slices()
            if policy is SlicePolicy.STATE and type_name(kind) not in changed
        }
        for name, before in changed.items():
            kind, values = present.get(name, (None, EMPTY))
            values, rest = values.first(before.kept), before.rest
            if any(map(_is_unsaved, rest)):
                _warn_of_incomplete(name)
                continue
            if rest:
                older = Snapshot.from_items({name: rest}, {}, 0.0, types=kinds)
                ((kind, added),) = older.state.items()
                for each in added.all():
                    values = values.append(each)
            if kind is not None and len(values):
                state[kind] = values
        messages = logs.get(MESSAGES)
        known = len(self._saved.get(Message, ())) if messages is None else messages.size
        return Snapshot(state, {}), known

    def _saves_newest_first(self) -> Generator[Any]:
        """Yield the saves as JSON data, reading the file from its end."""
        end, block, rest = self._size, _BLOCK, b""
        while end:
            begin = max(end - block, 0)
            data = os.pread(self._fd, end - begin, begin) + rest
            first, *lines = data.split(b"\n")[:-1]
            place = begin + len(data)
            for line in reversed(lines):
                place -= len(line) + 1
                text = self._seals.unsealed(line, place)
                if text is None:
                    raise SnapshotError(f"{self.path} is damaged at byte {place}")
                yield _save_of(text, self.path)
            end, block, rest = begin, block * 2, first + b"\n"  # the last one is the head

    def _asked(self, call_id: str) -> ToolCall | None:
        place = self._index.unrecorded.get(call_id)
        message = None if place is None else self.session.read_slice(Message).at(place)
        return message and next(each for each in message.tool_calls if each.id == call_id)

    def _record_answer(self, call: ToolCall, found: CallOutcome, *, lost_files: bool) -> None:
        if lost_files:
            answer = f" It answered: {found.message}" if found.message else ""
            lost = f"It took effect outside, but its changes to files were lost.{answer}"
            self.record(call, _unknown(lost))
        else:
            self.record(call, ToolResult.ok(None, found.message))
            note_success(call.name, self.session)
        self.session.dispatch(found)

    def record(self, call: ToolCall, result: ToolResult[Any], began: float | None = None) -> None:
        """Put a call on record that was not made by the runtime; by default, it began now."""
        now = self.session.clock.time()
        result.call_id = call.id
        self.session.dispatch(
            ToolInvoked(
                tool_name=call.name,
                params=call.params,
                result=result,
                success=result.success,
                timestamp=now if began is None else began,
                duration=0.0 if began is None else now - began,
                call_id=call.id,
                ran=True,
            )
        )

    def close(self) -> None:
        """Save once more and release the file."""
        for stop in self._stops:
            stop()
        if self._fd >= 0 and self._pid == os.getpid():
            try:
                self.save()
            finally:
                fd, self._fd = self._fd, -1
                locks.close(fd)
                self.session.saver = None
                self.session.states_passed(follow=False)

    def __enter__(self) -> SavedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        subscribe = self.session.dispatcher.subscribe
        for kind in (Message, ToolInvoked, ContextCompacted, PromptExecuted):
            self._stops.append(subscribe(kind, self._on_record))
        self.session.saver = self

    def _on_record(self, event: object) -> None:
        if isinstance(event, Message) and event.role == "tool":
            return  # a resume needs only the record of the call, which is there already
        try:
            self.save()
        except (OSError, SessionError) as error:
            _logger.error("the session was not saved: %s; the next save includes it", error)

    # Writing

    def _has_unique_name(self, slice_type: type) -> bool:
        """Whether no other slice has the same name; classes defined in functions may."""
        if self._names.setdefault(type_name(slice_type), slice_type) is slice_type:
            return True
        if slice_type not in self._saved:
            _logger.warning(
                "the slice of %s is not saved: another class has the same name", slice_type
            )
        return False

    def _change(
        self, slice_type: type, values: Slice[Any], saved: Mapping[type, Slice[Any]]
    ) -> str:
        kept = values.shared_with(saved.get(slice_type, EMPTY))
        items = ",".join(self._encoded(slice_type, value) for value in values.newer_than(kept))
        return f"{json.dumps(type_name(slice_type))}:[{kept},[{items}]]"

    def _encoded(self, slice_type: type, value: object) -> str:
        """Return a value as JSON text, or what replaces a value without an exact form."""
        try:
            data = freeze(value)
            text = _json(data)
            if len(text) > _LARGE and _MEDIA in text:
                text = _json(_changed(data, partial(_media_stored, _media_directory(self.path))))
            return text
        except (SnapshotError, RecursionError) as error:
            shown = _record_as_text(value) if isinstance(value, ToolInvoked) else None
            _logger.warning(
                "a value in the slice of %s is %s: %s",
                slice_type.__name__,
                "not saved" if shown is None else "saved as text",
                error,
            )
            return shown or _json({"$": _UNSAVED})

    def _append(self, *lines: str) -> None:
        """Add lines in one write, completely or not at all."""
        data = b""
        for line in lines:
            data += self._seals.sealed(line.encode(), self._size + len(data)) + b"\n"
        if os.fstat(self._fd).st_size != self._size:
            os.ftruncate(self._fd, self._size)  # drops an incomplete line
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes fit into {self.path}")
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)


class Encoding:
    """The lines for the state after a call: made once, for the record that commits it and the file.

    Made when the record needs them. Without them, the next save makes them.
    """

    after: Snapshot

    def __init__(self, saved: SavedSession, call_id: str) -> None:
        self._of = saved
        self._call_id = call_id
        self.is_asked = False
        """Whether a record was to hold them."""
        self.lines: Sequence[str] = ()
        self.saved: dict[type, Slice[Any]] | None = None

    @property
    def is_done(self) -> bool:
        return self.saved is not None

    def redo(self) -> Redo | None:
        """Return what a record holds; None if that cannot be encoded now."""
        self.is_asked = True
        try:
            redo, self.saved = self._of.encode_after(self._call_id, self.after)
        except (OSError, ValueError) as error:  # the next save may be luckier
            _logger.warning("the commit of %s has no session state: %s", self._call_id, error)
            return None
        self.lines = redo.lines
        return redo


def _sealed_size(lines: Iterable[str]) -> int:
    return sum(SEAL_SIZE + 2 + len(line.encode()) for line in lines)


@dataclass(slots=True, kw_only=True)
class SavedSessionData:
    """The content of a session's file as JSON data, whether or not the session is in use."""

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
    ends: list[int]
    """The length of the first line, and where each save ends in the file."""
    seals: Seals
    """The seals of its saves."""
    damage: str = ""
    """What is wrong with the rest of the file, if only a part of it could be read."""

    @property
    def size(self) -> int:
        """The length of the complete lines."""
        return self.ends[-1]

    @classmethod
    def read(cls, path: Path, *, partly: bool = False) -> SavedSessionData:
        """Read a file, even while it is being written.

        With ``partly``, return what precedes the first damaged line: for display, not to resume.

        Raises:
            SnapshotError: It is not the file of a session, is damaged, or was not written by this
                user.
        """
        saves = Saves(path)
        data = saves.head
        try:
            with no_collection():
                for place, save in saves.new():
                    data.add(save)
                    data.ends.append(place.end)
        except _UNREADABLE as error:
            raise SnapshotError(f"{path} is not the file of a session: {error!r}") from error
        data.damage = saves.damage
        if data.damage and not partly:
            raise SnapshotError(
                f"{data.damage}, so the session cannot be resumed: calls on record could run twice."
                " `wink log` shows what precedes the damage"
            )
        return data

    def back_to(self, until: Until, *, through: bool) -> SavedSessionData:
        """Return what had been saved before a save, or up to its end."""
        undone, *changes = _gone_back(reversed(self.saves), until, through=through)
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
            ends=self.ends[: len(saves) + 1],
        )

    def add(self, line: Any) -> None:
        """Apply one save."""
        self.at = float(line["at"])
        self.saves.append(line)
        if not line["state"] and not line["log"]:
            self.resumed.append(self.at)
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
        text = _head(session_id, self.tags, SYSTEM_CLOCK.time(), about)
        lines = [text, *_unsealed_lines(path, self.size)]
        stored = partial(_media_stored, _media_directory(target))
        if replaced is not None:
            name, place, value = replaced
            frozen = _changed(freeze(value), stored)
            lines[1:] = (_with_replaced(line, name, place, frozen) for line in lines[1:])
        if added:
            changes = {
                name: [len(self.log.get(name, ())), [_changed(freeze(v), stored) for v in values]]
                for name, values in added.items()
            }
            lines.append(_json({"at": self.at, "state": {}, "log": changes}).encode())
        sealed, seals = b"", Seals(_HEAD)
        for line in lines:
            sealed += seals.sealed(line, len(sealed)) + b"\n"
            seals = _seals_after(text)
        _share_media(path, target, lines)
        fd, staged = tempfile.mkstemp(dir=target.parent)
        try:
            with open(fd, "wb") as file:
                file.write(sealed)
            os.link(staged, target)  # fails if it exists
        finally:
            os.unlink(staged)

    @property
    def incomplete(self) -> frozenset[str]:
        """The slices with values that could not be saved."""
        slices = {**self.state, **self.log}
        return frozenset(name for name, values in slices.items() if any(map(_is_unsaved, values)))

    def snapshot(self, types: Iterable[type] = ()) -> Snapshot:
        """Return the session's state; its types must be known here."""
        incomplete = self.incomplete
        for name in incomplete:
            _warn_of_incomplete(name)
        state = {name: each for name, each in self.state.items() if name not in incomplete}
        log = {
            name: [v for v in each if not _is_unsaved(v)] if name in incomplete else each
            for name, each in self.log.items()
        }
        return Snapshot.from_items(state, log, self.at, types=types)


class SavePlace(NamedTuple):
    """Where a save is in a file."""

    start: int
    end: int
    """After its line."""


class Saves:
    """The saves in a file, one by one, and later those that were added since.

    Raises:
        SnapshotError: It is not the file of a session, or was not written by this user.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        """What is wrong with the next save, if it cannot be read."""
        with open(path, "rb", opener=no_links) as file:
            first = file.readline(_MAX_HEAD)
        if not first.endswith(b"\n"):
            raise SnapshotError(f"{path} contains no session: nothing was saved in it")
        text = Seals(_HEAD).unsealed(first[:-1])
        if text is None:
            raise SnapshotError(
                f"{path} does not carry your seal: it is not the file of a session, an earlier"
                " version of wink or someone else wrote it, or it is damaged. If it is yours,"
                " adopt it: `wink doctor --adopt-store`, or SavedSession.adopt"
            )
        try:
            self.head = _from_head(json.loads(text), _seals_after(text), len(first))
        except _UNREADABLE as error:
            raise SnapshotError(f"{path} is not the file of a session: {error!r}") from error
        self._end, self._number = len(first), 1

    def new(self) -> Generator[tuple[SavePlace, Any]]:
        """Yield the complete saves after the last one, up to the first damaged one."""
        with open(self.path, "rb", opener=no_links) as file:
            file.seek(self._end)
            complete, end, _ = file.read().rpartition(b"\n")  # the rest is cut short or new
        for sealed in complete.split(b"\n") if end else ():
            text = self.head.seals.unsealed(sealed, self._end)
            if text is None:
                self.damage = f"line {self._number + 1} of {self.path} is damaged or not ours"
                return
            place = SavePlace(self._end, self._end + len(sealed) + 1)
            yield place, _save_of(text, self.path)
            self._end, self._number = place.end, self._number + 1

    def at(self, places: Iterable[SavePlace]) -> Generator[Any]:
        """Yield some saves again."""
        with open(self.path, "rb", opener=no_links) as file:
            for place in places:
                file.seek(place.start)
                sealed = file.read(place.end - place.start - 1)
                text = self.head.seals.unsealed(sealed, place.start)
                if text is None:
                    raise SnapshotError(f"{self.path} has changed while it was read")
                yield _save_of(text, self.path)


# Going back

Until: TypeAlias = tuple[str, int]
"""A save: the newest that filled this place in the LOG slice of this name."""


class _Before:
    """How a slice was at an earlier time: some of its present values, and others after them."""

    __slots__ = ("_end", "_parts", "kept", "size")

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.size = 0
        self._parts: list[list[Any]] = []
        self._end: int | None = None
        """Values from here on are known; those before ``kept`` are the present ones."""

    def add(self, kept: int, items: list[Any]) -> bool:
        """Add the next older change; returns whether all is known."""
        if self._end is None:
            self._end = self.size = kept + len(items)
            self.kept = min(self.kept, self.size)
        start = max(kept, self.kept)
        if start < self._end:
            self._parts.append(items[start - kept : self._end - kept])
            self._end = start
        return self._end <= self.kept

    @property
    def rest(self) -> list[Any]:
        """The values after those kept, frozen."""
        return [value for part in reversed(self._parts) for value in part]


def _gone_back(
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
            if name in found and found[name].add(kept, items):
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


def _with_replaced(text: bytes, name: str, place: int, value: Any) -> bytes:
    """Return a save with another value at a place of a LOG slice, if it has that place."""
    line = json.loads(text)
    for each, (kept, items) in line["log"].items():
        if current_name(each) == name and kept <= place < kept + len(items):
            items[place - kept] = value
            return _json(line).encode()
    return text


def _fills(save: Any, wanted: str, place: int) -> bool:
    return any(
        kept <= place < kept + len(items) and current_name(name) == wanted
        for name, (kept, items) in save["log"].items()
    )


def _head(
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


def _unsealed_lines(path: Path, size: int) -> Generator[bytes]:
    """Yield the texts of the saves in the first ``size`` bytes of a file."""
    with open(path, "rb", opener=no_links) as file:
        lines = file.read(size).split(b"\n")[:-1]
    seals, place = _seals_after(lines[0][SEAL_SIZE + 1 :]), len(lines[0]) + 1
    for line in lines[1:]:
        text = seals.unsealed(line, place)
        if text is None:
            raise SnapshotError(f"{path} has changed while it was read")
        place += len(line) + 1
        yield text


def _share_media(path: Path, target: Path, lines: Iterable[bytes]) -> None:
    """Link, or copy, the bytes that some lines refer to into the directory of another file."""
    digests = {each for line in lines for each in _DIGESTS.findall(line)}
    for digest in sorted(digests):
        source = _media_directory(path) / digest.decode()
        if source.is_file() and not source.is_symlink():
            _media_directory(target).mkdir(mode=0o700, exist_ok=True)
            try:
                os.link(source, _media_directory(target) / source.name, follow_symlinks=False)
            except OSError:  # not possible here
                _store(_media_directory(target), source.read_bytes())


def inherited_calls(about: Mapping[str, object]) -> int:
    """Return how many calls a run has from the run that it was forked from, which lists them."""
    return int(cast("int", about.get(INHERITED, 0)))


def _from_head(line: Any, seals: Seals, size: int = 0) -> SavedSessionData:
    if line["wink_session"] != VERSION:
        raise ValueError(f"unknown version {line['wink_session']!r}")
    began = float(line["began"])
    return SavedSessionData(
        session_id=line["id"],
        tags=thaw(line["tags"]),
        began=began,
        about=thaw(line["about"]),
        at=began,
        ends=[size],
        seals=seals,
    )


def _save_of(text: bytes, path: Path) -> Any:
    line = json_of(text)
    return _with_stored(line, path) if _HAS_STORED in text else line


def _seals_after(head: bytes) -> Seals:
    """Return the seals of the saves that follow a head."""
    return Seals(f"save of session {Seals(_HEAD).seal(head)}")


def _readable(data: bytes) -> Generator[bytes]:
    """Yield the texts of a file's lines, sealed or not, up to the first unreadable one.

    If the first seal is valid, the others must be: only without the key are all invalid.
    """
    lines = data.split(b"\n")[:-1]
    head = Seals(_HEAD).unsealed(lines[0]) if lines else None
    seals, place = _seals_after(head or b""), 0
    found: SavedSessionData | None = None
    for line in lines:
        text = line if line.startswith(b"{") else line[SEAL_SIZE + 1 :]
        if place and head is not None and seals.unsealed(line, place) is None:
            return
        try:
            values = json.loads(text)
            if found is None:
                values["wink_session"] = VERSION
                found = _from_head(values, seals)
            else:
                found.add(values)
        except _UNREADABLE:
            return
        place += len(line) + 1
        yield json.dumps(values).encode()


def _warn_of_incomplete(name: str) -> None:
    _logger.warning("the slice of %s was not saved completely", name.rpartition(":")[2])


def _is_unsaved(value: Any) -> bool:
    return isinstance(value, dict) and cast("dict[str, Any]", value).get("$") == _UNSAVED


def _media_directory(path: Path) -> Path:
    return path.with_suffix(".media")


def _changed(data: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return JSON data in which every object is replaced that ``change`` gives a value for."""
    if isinstance(data, list):
        return [_changed(each, change) for each in cast("list[Any]", data)]
    if not isinstance(data, dict):
        return data
    node = cast("dict[str, Any]", data)
    made = change(node)
    return {key: _changed(each, change) for key, each in node.items()} if made is None else made


def _media_stored(directory: Path, node: dict[str, Any]) -> Any:
    """Return frozen media with the digest of their bytes, which go to a file."""
    if node.get("$") != "dataclass" or node["type"] != _MEDIA:
        return None
    text = node["fields"]["data"]["base64"]
    if len(text) <= _LARGE:
        return None
    stored = {"$": _STORED, "sha256": _store(directory, base64.b64decode(text))}
    return {**node, "fields": {**node["fields"], "data": stored}}


def _with_stored(line: Any, path: Path) -> Any:
    """Return the JSON data of a line with the places of bytes that are in files of their own."""

    def found(node: dict[str, Any]) -> StoredBytes | None:
        if node.get("$") != _STORED:
            return None
        digest = str(node["sha256"])
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{digest!r} is not a digest")
        return StoredBytes(str(_media_directory(path) / digest), digest)

    return _changed(line, found)


def _store(directory: Path, data: bytes) -> str:
    """Write data to the file that its digest names, unless it is there; return the digest."""
    digest = hashlib.sha256(data).hexdigest()
    path = directory / digest
    if path.is_symlink() or not path.is_file() or path.stat().st_size != len(data):
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.is_symlink():
            raise OSError(f"{directory} is a link")
        fd, staged = tempfile.mkstemp(dir=directory)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.replace(staged, path)
        except BaseException:
            os.unlink(staged)
            raise
    return digest


def _record_as_text(record: ToolInvoked) -> str | None:
    """Return the record of a call with text for values that cannot be saved.

    Without the record, a resumed run would make the call again.
    """
    result = record.result
    shown = replace(result, message=result.render(), value=None)
    for params in (record.params, repr(record.params)):
        with contextlib.suppress(SnapshotError, RecursionError):
            return _json(freeze(replace(record, params=params, result=shown)))
    return None


def _json(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


@contextlib.contextmanager
def _locked(path: Path, flags: int) -> Generator[int]:
    """Open a file and lock it. Both last until ``locks.close``, or until the block raises."""
    fd = os.open(path, flags | _NOFOLLOW, 0o600)
    try:
        if not locks.take(fd):
            raise SessionInUse(
                f"the session in {path} is in use by another process, or open in this one"
            )
        locks.keep_from_forks(fd)
        yield fd
    except BaseException:
        locks.close(fd)
        raise
