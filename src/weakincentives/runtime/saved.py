"""A session saved as it goes, so that another process can resume it after a kill.

Its log is in a file, or in another store of sessions; ``stores.saves`` describes the lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weakincentives.core import locks
from weakincentives.core.call import ToolCall
from weakincentives.core.gc_pause import no_collection
from weakincentives.core.logs import get_logger
from weakincentives.errors import SessionError, SnapshotError, UndoRefused, WinkError
from weakincentives.prompt.policies import note_success
from weakincentives.runtime.conversation import (
    ContextCompacted,
    Message,
    last_conversation,
    without_rewound,
)
from weakincentives.runtime.index import MESSAGES, CallIndex, CallPosition
from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger
from weakincentives.runtime.stores.files import OpenFileLog, adopt_file, sealed_size
from weakincentives.runtime.stores.logs import LeasedLog, SessionStore
from weakincentives.runtime.stores.saves import (
    UNREADABLE,
    UNSAVED,
    VERSION,
    Opened,
    SavedSessionData,
    Until,
    change_of,
    compact_log,
    encode,
    from_head,
    gone_back,
    inherited_calls,
    is_unsaved,
    located,
    make_head,
    opened,
    parse_save,
    save_of,
    warn_of_incomplete,
    with_files,
)
from weakincentives.session.events import PromptExecuted, ToolInvoked
from weakincentives.session.session import Session, Snapshot, type_name
from weakincentives.session.slices import EMPTY, Slice, SlicePolicy
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.filesystem.history import Committed
    from weakincentives.filesystem.redo import Redo
    from weakincentives.runtime.rows import CallRows, KeptCall, RowHistory

_logger = get_logger(__name__)

_UNKNOWN = (
    "The process was killed before this call was recorded, so the call is not re-run. {}\n"
    "Check the present state before you continue"
)


def _unknown(why: str) -> ToolResult[Any]:
    return ToolResult.error(_UNKNOWN.format(why), code="OUTCOME_UNKNOWN")


def not_undone(history: Sequence[Committed | CallRows]) -> set[str]:
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
        self._attached: list[str] = []

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
        store, name, stem = located(path, store)
        head = make_head(session.session_id, session.tags, session.clock.time(), about)
        log = store.create(name, head)
        saved = cls(stem, log, session, about)
        try:
            saved.save()
        except BaseException:
            log.close()
            raise
        saved._listen()
        return saved

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
        store, name, stem = located(path, store)
        log = store.open(name, wait=wait)
        try:
            found = opened(log, types)
            head = found.head
            options = {"session_id": head.session_id, "tags": head.tags, **session_options}
            session = Session.from_snapshot(found.snapshot, **options)
            saved = cls(stem, log, session, head.about)
            saved.file_id, saved._types = head.session_id, tuple(types)
            saved._take_over(found)
        except BaseException:
            log.close()
            raise
        saved._listen()
        return saved

    def _take_over(self, found: Opened) -> None:
        """Note what the log says, so that only what is new is written."""
        self._index, self._frozen = CallIndex(inherited_calls(self.about)), found.log
        self._attached, self._saved = found.attached, {}
        (present,) = self.session.states_passed()
        for _, slice_type, values in present.slices():
            name = type_name(slice_type)
            self._names[name] = slice_type
            # An incomplete slice has other places here than in the log: write it anew.
            self._saved[slice_type] = Slice.of(()) if name in found.incomplete else values

    @staticmethod
    def is_in_use(path: str | Path, *, store: SessionStore | None = None) -> bool:
        """Whether a process, or this one, has the session open."""
        store, name, _ = located(path, store)
        return store.is_in_use(name)

    @staticmethod
    def delete(path: str | Path, *, store: SessionStore | None = None) -> bool:
        """Delete a session with everything that belongs to it; False if it is in use."""
        store, name, _ = located(path, store)
        return store.delete(name)

    @staticmethod
    def adopt(path: str | Path) -> int:
        """Seal a file that is damaged or whose key is lost; returns the number of lines lost.

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
                    found.append(from_head(values))
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
    def position(self) -> int:
        """The bytes in the file; 0 in another store."""
        return self._log.size if isinstance(self._log, OpenFileLog) else 0

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
            encoding = Encoding(call_id, self._encode_after)
            yield encoding
            if encoding.saved is not None:
                self._pending += encoding.lines
                self._saved, self._unsaved = encoding.saved, []

    def _encode_after(self, call_id: str, after: Snapshot) -> tuple[Redo, dict[type, Slice[Any]]]:
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
                found = opened(log, self._types)
                self.session.hold(found.snapshot)
                self._take_over(found)

    def _file_log(self) -> OpenFileLog:
        if not isinstance(self._log, OpenFileLog):
            raise SessionError(f"{self._log.shown} is not in a file")
        return self._log

    def _append(self, lines: list[str]) -> None:
        """Append lines, the last one with the lines that are attached."""
        pending = [(source, tuple(source.pending())) for source in self._sources]
        files = [line for _, each in pending for line in each]
        if files:
            lines.append(with_files(lines.pop() if lines else self._empty_line(), files))
        if lines:
            self._log.append([line.encode() for line in lines])
        for source, each in pending:
            if each:
                source.saved(len(each))
        self._attached += files

    def attach(self, source: AttachedLines) -> None:
        """Save the pending lines of a source with each save, in the same write."""
        self._sources.append(source)

    @property
    def attached(self) -> tuple[str, ...]:
        """All lines that were saved with the session, oldest first."""
        return tuple(self._attached)

    def compact(self) -> None:
        """Fold all saves into one, so that the log is as small as the session.

        What is lost is the way back: the session cannot be rewound, forked or viewed as it was
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
        changes: dict[SlicePolicy, list[str]] = {SlicePolicy.STATE: [], SlicePolicy.LOG: []}
        for slice_type, (policy, values) in changed.items():
            if self._has_unique_name(slice_type):
                kept = values.shared_with(saved.get(slice_type, EMPTY))
                items = [self._encoded(slice_type, each) for each in values.newer_than(kept)]
                changes[policy].append(change_of(type_name(slice_type), kept, items))
        return [save_of(state.taken_at, *changes.values())] if any(changes.values()) else []

    def mark_resumed(self) -> None:
        """Note the time, as the beginning of another sitting of the same session."""
        with self._lock:
            self._log.append([self._empty_line().encode()])

    def _empty_line(self) -> str:
        return save_of(self.session.clock.time())

    def recover_rows(self, databases: Sequence[RowHistory]) -> None:
        """Complete what a kill left of a call that changed rows, in a session without files.

        For a session that is resumed, before anything else is done with it; ``recover`` does this,
        too. The databases are those of its calls, with ``record_calls`` or ``track``.
        """
        from weakincentives.runtime.recovery import redo_in_databases

        redos, unknown = redo_in_databases(self, None, databases)
        redos.sort(key=lambda each: each.at)
        self.append_missing(redos)
        self._record_unknown(unknown)
        self.save()

    def _record_unknown(self, unknown: Iterable[tuple[KeptCall, str]]) -> None:
        for kept, why in unknown:
            _logger.warning("call %s: %s", kept.call_id, why)
            call = self._asked(kept.call_id) or ToolCall(kept.tool, None, kept.call_id)
            self.record(call, _unknown(f"{why[0].upper()}{why[1:]}"))

    def recover(
        self,
        files: HostFilesystem,
        *,
        ledger: OutcomeLedger | None = None,
        databases: Sequence[RowHistory] = (),
    ) -> tuple[str, ...]:
        """Complete what a kill left between a call's commit and its record; returns undone calls.

        For a session that is resumed, before anything else is done with it. A call that was
        committed gets its record, with the answer that it gave, and is not re-run.

        A commit without what the session needs is undone, and its call will be re-run. One that
        took effect outside is not re-run: it gets its answer from the ledger, by default the
        workspace's own. If neither is possible, it is recorded as unknown. In ``databases``, the
        rows of a call whose other changes are lost are undone.
        """
        from weakincentives.runtime.recovery import (
            redo_in_databases,
            redo_missing,
            unsaved_commits,
        )

        ledger = ledger or self.ledger or OutcomeLedger.at(files.store / "outcomes.jsonl")
        redos, unknown = redo_in_databases(self, files, databases) if databases else ([], [])
        if isinstance(self._log, OpenFileLog):
            redo_missing(self, files, ledger, redos)
        self._record_unknown(unknown)
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
        with locks.defer_interrupts():  # Ctrl-C must not leave the files rewound without the rest
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

    def moment(self, number: int) -> CallPosition:
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
        return CallPosition(
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
        saves = (parse_save(text, self._log.media) for text in self._log.newest_first())
        _, changed, logs = gone_back(saves, until, through=through, logs=(MESSAGES,))
        state = {
            kind: values
            for policy, kind, values in self.session.snapshot_here().slices()
            if policy is SlicePolicy.STATE and type_name(kind) not in changed
        }
        for name, before in changed.items():
            kind, values = present.get(name, (None, EMPTY))
            values, rest = values.first(before.kept), before.rest
            if any(map(is_unsaved, rest)):
                warn_of_incomplete(name)
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

    def _encoded(self, slice_type: type, value: object) -> str:
        """Return a value as JSON text, or what replaces a value without an exact form."""
        try:
            return encode(value, self._log.store)
        except (SnapshotError, RecursionError) as error:
            shown = None
            if isinstance(value, ToolInvoked):
                shown = _record_as_text(value, self._log.store)
            _logger.warning(
                "a value in the slice of %s is %s: %s",
                slice_type.__name__,
                "not saved" if shown is None else "saved as text",
                error,
            )
            return shown or UNSAVED


class Encoding:
    """The lines for the state after a call: made once, for the record that commits it and the file.

    Made when the record needs them. Without them, the next save makes them.
    """

    after: Snapshot

    def __init__(
        self, call_id: str, make: Callable[[str, Snapshot], tuple[Redo, dict[type, Slice[Any]]]]
    ) -> None:
        self._call_id = call_id
        self._make = make
        self.is_asked = False
        """Whether a record was to hold them."""
        self.lines: Sequence[str] = ()
        self.saved: dict[type, Slice[Any]] | None = None
        self._redo: Redo | None = None

    @property
    def is_done(self) -> bool:
        return self.saved is not None

    def redo(self) -> Redo | None:
        """Return what a record holds; None if that cannot be encoded now."""
        self.is_asked = True
        if self._redo is not None:
            return self._redo
        try:
            redo, self.saved = self._make(self._call_id, self.after)
        except (OSError, ValueError) as error:  # the next save may be luckier
            _logger.warning("the commit of %s has no session state: %s", self._call_id, error)
            return None
        self.lines, self._redo = redo.lines, redo
        return redo


def _record_as_text(record: ToolInvoked, store: Callable[[bytes], str]) -> str | None:
    """Return the record of a call with text for values that cannot be saved.

    Without the record, a resumed run would make the call again.
    """
    result = record.result
    shown = replace(result, message=result.render(), value=None)
    for params in (record.params, repr(record.params)):
        with contextlib.suppress(SnapshotError, RecursionError):
            return encode(replace(record, params=params, result=shown), store)
    return None
