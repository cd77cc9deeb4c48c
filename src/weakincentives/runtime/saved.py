"""A session saved as it goes, so that another process can resume it after a kill.

Its log is in a file, or in another store of sessions. The head of the log identifies the session.
Every other line is one save: for each changed slice, how many values stay and which values follow
them; and ``files``, further lines that are saved with it. Compacting a log writes its state anew,
as saves with ``fold``, the number of each: the first one replaces all before it. The bytes of
``Media`` are stored once, by digest.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from weakincentives import locks
from weakincentives.call import ToolCall
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.collector import no_collection
from weakincentives.errors import SessionError, SnapshotError, UndoRefused, WinkError
from weakincentives.events import PromptExecuted, ToolInvoked
from weakincentives.logs import get_logger
from weakincentives.prompt.policies import note_success
from weakincentives.runtime.conversation import (
    ContextCompacted,
    Message,
    last_conversation,
    without_rewound,
)
from weakincentives.runtime.index import MESSAGES, CallIndex, Moment
from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger
from weakincentives.runtime.stores.files import (
    FileLog,
    FileStore,
    OpenFileLog,
    adopt_file,
    sealed_size,
    share_media,
    store_media,
    write_file,
)
from weakincentives.runtime.stores.logs import LeasedLog, SavePlace, SessionLog, SessionStore
from weakincentives.runtime.stores.media import LARGE, MEDIA, parsed, without_media
from weakincentives.runtime.stores.newest import UNREADABLE, NewestSaves, are_plain
from weakincentives.serde import freeze, thaw
from weakincentives.serde.exact import current_name
from weakincentives.session import Session, Snapshot, type_name
from weakincentives.slices import EMPTY, Slice, SlicePolicy
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.filesystem.history import Committed
    from weakincentives.filesystem.redo import Redo

_logger = get_logger(__name__)

VERSION = 2
"""Of the file. Version 1 had no seals."""

_UNSAVED = "unsaved"
"""Marks the place of a value that could not be written."""
_HAS_UNSAVED = f'"{_UNSAVED}"'.encode()
_HAS_FILES = b'"files":['
_FOLDED = 64
"""Values in each save of a log that was compacted."""
INHERITED = "inherited_calls"
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


class AttachedLines(Protocol):
    """Lines of text that are saved with a session, such as the commits of its branch."""

    def pending(self) -> Sequence[str]:
        """Return the lines that are not saved yet, oldest first."""
        ...

    def saved(self, count: int) -> None:
        """Note that so many of them, the oldest, are saved."""
        ...


class SavedSession:
    """A session and the log that it is saved to: a file, or the log of another store.

    Saves happen after every message of the model, every call and every run. A save costs what has
    changed since the last one and is a single write or transaction: a kill loses at most the save
    in progress. Child sessions are not saved.

    A value without an exact JSON form is left out, with a warning that names its slice: in a LOG
    only that value, in a STATE slice all values, because a partial state is wrong. The record of a
    call is always saved, with the text that the model saw.
    """

    def __init__(
        self, name: str, log: LeasedLog, session: Session, about: Mapping[str, object]
    ) -> None:
        self.name = name
        """Of a session in a file, without the suffix."""
        self.session = session
        self.about = about
        """What ``create`` was given."""
        self._log = log
        self._is_open = True
        self._pid = os.getpid()
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
        self._frozen: Mapping[str, Sequence[Any]] | None = None
        """The LOG slices to make the index from, when it is first needed."""
        self._sources: list[AttachedLines] = []
        self._attached: list[str] | None = []
        self._texts: list[bytes] = []
        """The saves to find the attached lines in, when they are first needed."""

    @classmethod
    def create(
        cls,
        path: str | Path,
        session: Session,
        *,
        about: Mapping[str, object] | None = None,
        store: SessionStore | None = None,
    ) -> SavedSession:
        """Save a session to a new file from now on. Only its owner can read the file.

        With a ``store``, it is saved there, and the first argument is its name.

        Raises:
            FileExistsError: It exists; ``open`` continues a saved session.
        """
        about = dict(about or {})
        store, name, stem = _located(path, store)
        log = store.create(
            name, _head(session.session_id, session.tags, session.clock.time(), about)
        )
        return cls(stem, log, session, about)._begun()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        store: SessionStore | None = None,
        wait: float = 0.0,
        types: Iterable[type] = (),
        **session_options: Any,
    ) -> SavedSession:
        """Continue the session in a file, or in a ``store``, where the first argument is its name.

        A last line that a kill cut short is dropped. If the session is in use, waits so many
        seconds for its end. Modules that define its types must have been imported; pass other types
        in ``types``. The other options are those of ``Session``; id and tags are those of the saved
        session by default.

        Raises:
            FileNotFoundError: There is no such session.
            SessionInUse: Another process, or this one, has it open.
            SnapshotError: The log is damaged, was not written by this user, or contains an unknown
                type. Old values are decoded when they are first read, and may raise then.
        """
        store, name, stem = _located(path, store)
        log = store.open(name, wait=wait)
        try:
            data = _head_of(log)
            parse = partial(parsed, media=log.media)
            with _readable_from(log), no_collection():
                texts = log.load().texts
                found = _opened(data, texts, parse, types)
            options = {"session_id": data.session_id, "tags": data.tags, **session_options}
            session = Session.from_snapshot(found.snapshot, **options)
            saved = cls(stem, log, session, data.about)
            saved.file_id, saved._types = data.session_id, tuple(types)
            saved._take_over(found, texts)
        except BaseException:
            log.close()
            raise
        saved._listen()
        return saved

    def _begun(self) -> SavedSession:
        try:
            self.save()
        except BaseException:
            self._log.close()
            raise
        self._listen()
        return self

    def _take_over(self, found: _Opened, texts: Sequence[bytes]) -> None:
        """Note what the log says, so that only what is new is written."""
        self._frozen = found.log
        self._texts, self._attached = list(texts), None
        (present,) = self.session.states_passed()
        for _, slice_type, values in present.slices():
            name = type_name(slice_type)
            self._names[name] = slice_type
            # An incomplete slice has other places here than in the log: write it anew.
            self._saved[slice_type] = Slice.of(()) if name in found.incomplete else values

    @staticmethod
    def is_in_use(path: str | Path, *, store: SessionStore | None = None) -> bool:
        """Whether a process, or this one, has the session open."""
        store, name, _ = _located(path, store)
        return store.is_in_use(name)

    @staticmethod
    def delete(path: str | Path, *, store: SessionStore | None = None) -> bool:
        """Delete a session with everything that belongs to it; False if it is in use."""
        store, name, _ = _located(path, store)
        return store.delete(name)

    @staticmethod
    def adopt(path: str | Path) -> int:
        """Seal a file that is damaged or from an earlier version; returns the number of lines lost.

        Only for files of known origin: resuming a run loads code that the file names. Lines after
        an unreadable one are left out; a copy of the whole file stays next to it.
        """
        found: list[SavedSessionData] = []

        def checked(text: bytes) -> bytes:
            try:
                values = json.loads(text)
                if found:
                    found[0].add(values)
                else:
                    values["wink_session"] = VERSION
                    found.append(_from_head(values))
            except UNREADABLE as error:
                raise ValueError("this line cannot be read") from error
            return json.dumps(values).encode()

        return adopt_file(Path(path), checked)

    @property
    def path(self) -> Path:
        """The file that it is saved to.

        Raises:
            SessionError: It is in another store.
        """
        return self._file_log().path

    @property
    def token(self) -> int:
        """The fencing token of the lease: greater each time it is opened. 0 for a file."""
        return self._log.token

    def confirm(self) -> None:
        """Make sure that the lease is still ours, before something that no token protects.

        Raises:
            LeaseLost: Another process has opened the session.
        """
        self._log.confirm()

    @property
    def ledger(self) -> OutcomeLedger | None:
        """The ledger in the same store, under the same lease; None for a file."""
        return self._log.ledger()

    @property
    def mark(self) -> str:
        """The letters at the end of its name: the short name of a run."""
        return self.name.rpartition("-")[2]

    def save(self) -> None:
        """Append what has changed since the last save: each call on a line of its own.

        So the log has the state before and after every call. Attached lines are saved with it.

        Raises:
            LeaseLost: Another process has taken over the session.
        """
        with self._lock:
            if not self._is_open or self._pid != os.getpid():
                raise SessionError(f"{self._log.shown} was closed, or belongs to another process")
            # Not the view of a call in progress: that has not been committed.
            lines, saved = self._encode(self.session.states_passed())
            self._append([*self._pending, *lines])
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
        return self._file_log().size

    @property
    def commits_with_calls(self) -> bool:
        """Whether the record that commits a call can hold what its file gets next.

        In another store, the next save itself commits a call, with the lines that are attached.
        """
        is_file = isinstance(self._log, OpenFileLog) and not self._sources
        return is_file and self._is_open and self._pid == os.getpid()

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
        log = self._file_log()
        at = log.size + sealed_size(self._pending)
        redo = Redo(
            session=self.file_id,
            file=log.full_path,
            at=at,
            end=at + sealed_size(lines),
            call_id=call_id,
            lines=tuple(lines),
        )
        return redo, saved

    def append_missing(self, redos: Iterable[Redo]) -> None:
        """Append what the file lacks of the lines that commit records hold, oldest first."""
        log, made = self._file_log(), self.index.made
        before = log.size
        with self._lock:
            for each in redos:
                if each.end <= log.size:
                    continue
                present = log.lines_from(each.at)
                if self._pending or present is None or present != [*each.lines[: len(present)]]:
                    if each.call_id in made:
                        continue  # the file has been compacted since
                    _logger.warning("%s went on without call %s", log.path, each.call_id)
                    break
                log.append([line.encode() for line in each.lines[len(present) :]])
            if log.size != before:
                self._read_again(log)

    def _file_log(self) -> OpenFileLog:
        if not isinstance(self._log, OpenFileLog):
            raise SessionError(f"{self._log.shown} is not in a file")
        return self._log

    def _read_again(self, log: OpenFileLog) -> None:
        """Give the session what its file has."""
        data = _head_of(log)
        with _readable_from(log), no_collection():
            texts = log.load().texts
            found = _opened(data, texts, partial(parsed, media=log.media), self._types)
        self.session.hold(found.snapshot)
        self._index, self._saved = CallIndex(inherited_calls(data.about)), {}
        self._take_over(found, texts)

    def _append(self, lines: list[str]) -> None:
        """Append lines, the last one with the lines that are attached."""
        pending = [(source, tuple(source.pending())) for source in self._sources]
        files = [line for _, each in pending for line in each]
        if files:
            lines.append(_with_files(lines.pop() if lines else self._empty_line(), files))
        if lines:
            self._log.append([line.encode() for line in lines])
        for source, each in pending:
            if each:
                source.saved(len(each))
        if self._attached is not None:
            self._attached += files
        elif files:
            self._texts.append(lines[-1].encode())

    def attach(self, source: AttachedLines) -> None:
        """Save the pending lines of a source with each save, in the same write."""
        self._sources.append(source)

    @property
    def attached(self) -> tuple[str, ...]:
        """All lines that were saved with the session, oldest first."""
        with self._lock:
            if self._attached is None:
                self._attached = []
                for text in self._texts:
                    if _HAS_FILES in text:
                        _add_files(self._attached, json.loads(text))
                self._texts = []
            return tuple(self._attached)

    def compact(self) -> None:
        """Fold all saves into one, so that the log is as small as the session.

        What is lost is the way back: nobody can rewind, fork or look at the session as it was
        before this. A kill leaves the log as it was, or compacted.
        """
        self.save()
        with self._lock:
            compact_log(self._log)

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
            self._log.append([self._empty_line().encode()])

    def _empty_line(self) -> str:
        return f'{{"at":{json.dumps(self.session.clock.time())},"state":{{}},"log":{{}}}}'

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

        ledger = ledger or self.ledger or OutcomeLedger.at(files.store / "outcomes.jsonl")
        if isinstance(self._log, OpenFileLog):
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
        if self._frozen is not None:
            with no_collection():
                self._index = CallIndex.of(self._frozen, inherited_calls(self.about))
            self._frozen = None
        self._index = self._index.extend(self.session)
        return self._index

    def moment(self, number: int) -> Moment:
        """Return when the call with this number was made; costs the calls since.

        Raises:
            IndexError: There is no such call.
        """
        records = self.session.read_slice(ToolInvoked)
        if not inherited_calls(self.about) < number <= len(records):
            raise IndexError(f"the run {self.name} has no call {number}")
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
        """Yield the saves as JSON data, reading the log from its end."""
        for text in self._log.newest_first():
            yield parsed(text, self._log.media)

    def _asked(self, call_id: str) -> ToolCall | None:
        place = self.index.unrecorded.get(call_id)
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
        """Save once more and release the lease."""
        for stop in self._stops:
            stop()
        if self._is_open and self._pid == os.getpid():
            try:
                self.save()
            finally:
                self._is_open = False
                self._log.close()
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
        except (OSError, WinkError) as error:
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
            if len(text) > LARGE and MEDIA in text:
                text = _json(without_media(data, self._log.store))
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
        data, part = _head_of(log), log.read(log.begin)
        if not partly:
            part.checked()
        with _readable_from(log), no_collection():
            for text in part.texts:
                data.add(parsed(text, log.media))
        data.damage = part.damage
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
        head = _head(session_id, self.tags, SYSTEM_CLOCK.time(), about)
        log = FileLog(path)
        lines = log.read(log.begin).texts[: len(self.saves)]
        if len(lines) < len(self.saves):
            raise SnapshotError(f"{path} has changed while it was read")
        store = partial(store_media, target)
        if replaced is not None:
            name, place, value = replaced
            frozen = without_media(freeze(value), store)
            lines = [_with_replaced(line, name, place, frozen) for line in lines]
        if added:
            changes = {
                name: [
                    len(self.log.get(name, ())),
                    [without_media(freeze(v), store) for v in values],
                ]
                for name, values in added.items()
            }
            lines.append(_json({"at": self.at, "state": {}, "log": changes}).encode())
        share_media(path, target, lines)
        write_file(target, head, lines)

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


class Saves:
    """The saves in a file, or in another log, one by one, and later those that were added since.

    Raises:
        SnapshotError: It is not the file of a session, or was not written by this user.
    """

    def __init__(self, path: Path | SessionLog) -> None:
        self._log = _log_at(path)
        self.damage = ""
        """What is wrong with the next save, if it cannot be read."""
        self.head = _head_of(self._log)
        self._end = self._log.begin

    def new(self) -> Generator[tuple[SavePlace, Any]]:
        """Yield the complete saves after the last one, up to the first damaged one."""
        part = self._log.read(self._end)
        for place, text in zip(part.places, part.texts, strict=True):
            yield place, parsed(text, self._log.media)
            self._end = place.end
        self.damage = part.damage

    def at(self, places: Iterable[SavePlace]) -> Generator[Any]:
        """Yield some saves again."""
        for text in self._log.at(places):
            yield parsed(text, self._log.media)


# Opening


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a session is opened from."""

    snapshot: Snapshot
    log: Mapping[str, Sequence[Any]] | None
    """The LOG slices, frozen; None if a value of them could not be saved."""
    incomplete: frozenset[str] = frozenset()


def _opened(
    data: SavedSessionData,
    texts: Sequence[bytes],
    parse: Callable[[bytes], Any],
    types: Iterable[type],
) -> _Opened:
    """Return the state after some saves; the newest are parsed now, others when first needed."""
    if are_plain(texts) and _HAS_UNSAVED not in b"\n".join(texts):
        found = NewestSaves(texts, parse)
        at = float(parse(texts[-1])["at"]) if texts else data.began
        snapshot = Snapshot.from_items(found.state, found.log, at, types=types)
        return _Opened(snapshot, found.log)
    for text in texts:
        data.add(parse(text))
    incomplete = data.incomplete
    return _Opened(data.snapshot(types), None if incomplete else data.log, incomplete)


def _located(path: str | Path, store: SessionStore | None) -> tuple[SessionStore, str, str]:
    """Return the store and the name in it of a session, and its name without a suffix."""
    if store is not None:
        return store, str(path), Path(path).stem if isinstance(store, FileStore) else str(path)
    path = Path(path)
    return FileStore(path.parent), path.name, path.stem


def _log_at(path: Path | SessionLog) -> SessionLog:
    return FileLog(path) if isinstance(path, Path) else path


def _head_of(log: SessionLog) -> SavedSessionData:
    with _readable_from(log):
        return _from_head(json.loads(log.head))


@contextlib.contextmanager
def _readable_from(log: SessionLog) -> Generator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise SnapshotError(f"{log.shown} is not the file of a session: {error!r}") from error


def _add_files(files: list[str], line: Any) -> None:
    """Add the attached lines of a save to those of older saves."""
    if line.get("fold") == 0:
        files.clear()
    files += line.get("files", ())


def compact_session(
    path: str | Path, *, store: SessionStore | None = None, wait: float = 0.0
) -> None:
    """Compact a session that is not open: see ``SavedSession.compact``."""
    store, name, _ = _located(path, store)
    with contextlib.closing(store.open(name, wait=wait)) as log:
        compact_log(log)


def compact_log(log: LeasedLog) -> None:
    """Fold all saves of a log into one state; what is lost is going back to before.

    The state is written as several saves, so that a session still opens without parsing all of it.
    """
    data = _head_of(log)
    with _readable_from(log), no_collection():
        for text in log.load().texts:
            data.add(json.loads(text))
    changes = [
        (kind, name, start, values[start : start + _FOLDED])
        for kind, slices in (("state", data.state), ("log", data.log))
        for name, values in slices.items()
        for start in range(0, len(values), _FOLDED)
    ]
    first: dict[str, Any] = {"at": data.at, "state": {}, "log": {}, "resumed": data.resumed}
    lines = [_with_files(_json({**first, "fold": 0}), data.files)]
    for number, (kind, name, start, values) in enumerate(changes, 1):
        change = {"state": {}, "log": {}, kind: {name: [start, values]}}
        lines.append(_json({"at": data.at, **change, "fold": number}))
    log.replace([line.encode() for line in lines])


def _with_files(line: str, files: Sequence[str]) -> str:
    """Return a save with lines that are attached to it."""
    # ASCII only: any text can be attached, even half a surrogate pair.
    return f'{line[:-1]},"files":{json.dumps(files, separators=(",", ":"))}}}' if files else line


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


def inherited_calls(about: Mapping[str, object]) -> int:
    """Return how many calls a run has from the run that it was forked from, which lists them."""
    return int(cast("int", about.get(INHERITED, 0)))


def _from_head(line: Any) -> SavedSessionData:
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


def _warn_of_incomplete(name: str) -> None:
    _logger.warning("the slice of %s was not saved completely", name.rpartition(":")[2])


def _is_unsaved(value: Any) -> bool:
    return isinstance(value, dict) and cast("dict[str, Any]", value).get("$") == _UNSAVED


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
