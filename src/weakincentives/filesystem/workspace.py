"""An open directory with its store, history and views."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weakincentives.core.call import ToolCall
from weakincentives.core.clock import SYSTEM_CLOCK, Clock
from weakincentives.core.gate import Gate, Lease
from weakincentives.core.programs import agents_can_write
from weakincentives.core.state import workspace_store
from weakincentives.errors import (
    FilesystemError,
    HistoryDamaged,
    LogUnavailable,
    MergeConflict,
    ProtectedPath,
    ViewClosed,
)
from weakincentives.filesystem.bypass import Watched
from weakincentives.filesystem.changes import Changes, recover
from weakincentives.filesystem.commands import Commands
from weakincentives.filesystem.contents import node_of
from weakincentives.filesystem.diffs import changed_paths
from weakincentives.filesystem.entry import Entry, apply_entry, capture
from weakincentives.filesystem.history import History, replaced
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.layers import (
    Disk,
    Layer,
    Look,
    Present,
    Replaced,
    state_before,
    undone,
)
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.redo import MakeRedo
from weakincentives.filesystem.reserved import Reserved
from weakincentives.filesystem.scan import External, Noted
from weakincentives.filesystem.sides import Effects
from weakincentives.filesystem.store import DirectoryLock, Limits, Store
from weakincentives.filesystem.tree import Tree

logger = logging.getLogger("weakincentives.filesystem")


_OVERTAKEN = "other processes have worked on this directory since this view was forked"


_READING = 20.0
"""Seconds for which a call may read beside another one that waits to change the directory."""
_SHARED = 1.0
"""Seconds for which more calls may read with it."""
_READ_TOO_LONG = "another call waits to change files, and this one has read for too long: try again"


class _Lent(Present):
    def _check_open(self) -> None:
        if self._closed is not None:
            raise MergeConflict(self._closed)


class Reading(Lease):
    """Keeps the directory as it is, without the gate: for calls that only read.

    Meanwhile another call may run a command over the directory, or wait for a person. When that
    wants to change files, it waits for us, but not for long: then our views are closed.
    """

    def __init__(self, lock: contextlib.ExitStack, disk: Look) -> None:
        self.present = _Lent(disk)
        """What they read."""
        self._lock = lock
        self._until = SYSTEM_CLOCK.monotonic() + _SHARED
        self._uses = 0
        self._ending = threading.Lock()
        self._timer = threading.Timer(_READING, self._close)
        self._timer.daemon = True
        self._timer.start()

    @property
    def is_fresh(self) -> bool:  # type: ignore[override]
        return SYSTEM_CLOCK.monotonic() < self._until

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Keep the directory until the end of the block: a command reads it."""
        with self._ending:
            self._uses += 1
        try:
            yield
        finally:
            with self._ending:
                self._uses -= 1

    def end(self) -> None:
        self._timer.cancel()
        with self._ending:
            self._lock.close()

    def _close(self) -> None:
        with self._ending:
            if not self._uses:
                self.present.close(_READ_TOO_LONG)
                self._lock.close()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Place:
    """A snapshot of the workspace: a position in the sequence of commits."""

    serial: int
    workspace: Workspace
    expired: bool = False


class Workspace:
    """The state shared by a filesystem and all its views."""

    def __init__(
        self,
        root: Path,
        store: Store,
        *,
        limits: Limits,
        clock: Clock,
        unprotected: Sequence[str],
        disk: Look | None = None,
    ) -> None:
        with contextlib.ExitStack() as opened:
            self.store = store
            opened.callback(self.store.close)
            self.tree = Tree(root)
            opened.callback(self.tree.close)
            self.external = External(self.tree, self.store)
            self.commands = Commands(self.store)
            is_usual = str(store.path) == workspace_store(str(self.tree.path))
            agents_can_write(self.tree.path, for_all=not is_usual)
            self.reserved = Reserved(self.tree.path, store=self.store.path, unprotected=unprotected)
            watched = Watched(self.tree.path, self.store.path)
            opened.pop_all()
        self.closing = weakref.finalize(
            self, _close, watched, self.commands, self.external, self.tree, self.store
        )
        self.lock = threading.RLock()
        self.gate = Gate()
        self.history = History(self.store, limits=limits, clock=clock)
        self.places: weakref.WeakSet[Place] = weakref.WeakSet()
        # Not a bound method: it would keep an unused workspace and its lock alive.
        self.history.needed_by.append(functools.partial(_oldest, self.places))
        self.private: weakref.WeakSet[object] = weakref.WeakSet()
        """Open private views."""
        self.in_place: Changes | None = None
        """The transaction that works in place."""
        self.in_place_thread = 0
        self.expects_programs = False
        """Whether other programs change files in that transaction."""
        self.disk = self.reserved.without_hidden(Disk(self.tree) if disk is None else disk)
        self.present = Present(self.disk)
        self.links: dict[Sequence[str], frozenset[Parts]] = {}
        """Targets of links at protected paths, by patterns."""
        self._stages: list[tuple[int, Present]] = []
        """The presents of the in-place call, with the number of its records at that time."""
        self.recovered = recover(self.tree, self.history)
        if disk is None:  # a branch never changes the directory
            self.gate.beside = functools.partial(_reading, weakref.ref(self))
        lock = self.store.lock
        self.is_shared = not lock.alone
        lock.is_stale = False
        if self.is_shared:
            self.gate.share(lock, self.catch_up)
            lock.is_held = False
            lock.release()

    # Other processes

    def catch_up(self) -> None:
        """Drop what other processes may have changed, and roll back what a killed one has left.

        No view outlives the gate: those that do are closed.
        """
        with self.lock:
            self.present.close(_OVERTAKEN)
            self.present = Present(self.disk)
            self.private.clear()
            self.in_place, self.expects_programs, self._stages = None, False, []
            self.links.clear()
            self.external.catch_up()
            self.history.catch_up()
            self.store.avoid(self.store.tree.names(()))
            recover(self.tree, self.history)

    def check_held(self) -> None:
        """Raise unless this process has the directory open and holds its lock."""
        lock = self.store.lock
        if not lock.is_held or self.store.pid != os.getpid() or not self.closing.alive:
            lock.check_process()
            raise ViewClosed(
                "several processes share this directory, and another may be at work on it: hold"
                " `fs.gate` in a `with` block from the fork to the merge"
            )

    def alone(self) -> contextlib.AbstractContextManager[object]:
        """Hold the lock between processes in the block; a call that is inside holds it already."""
        is_inside = self.store.lock.is_held or not self.closing.alive
        return contextlib.nullcontext() if is_inside else self.gate

    def reading(self) -> Reading | None:
        """Keep the directory as it is for a call that only reads; None if it has been changed by a
        call that has not ended, or that was killed.
        """
        with contextlib.ExitStack() as held:
            lock = DirectoryLock(self.store.path)
            held.callback(lock.close)
            try:
                held.enter_context(lock.reading(0))
                if self.history.journal.path.stat().st_size:
                    return None
            except FileNotFoundError:  # nothing has been changed yet
                pass
            except (FilesystemError, OSError):
                return None
            return Reading(held.pop_all(), self.disk)

    def seen_anew(self) -> History:
        """Return the history, with what other processes have committed so far."""
        with self.lock:
            if not self.store.lock.is_held:
                self.history.look_again()
            return self.history

    def steady(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from changing the directory, below a command."""
        return contextlib.nullcontext()

    # Commits, and what was before them

    def place(self) -> Place:
        """Return the current position in the sequence of commits."""
        place = Place(self.seen_anew().last, self)
        self.places.add(place)
        return place

    def now_ns(self) -> int:
        """Return the filesystem's time: a file that changes later has a later change time."""
        os.utime(self.store.tx_fd)
        return os.fstat(self.store.tx_fd).st_ctime_ns

    def at(self, place: Place) -> Look:
        look: Look = self.present
        if later := self.history.after(place.serial):
            contents = self.history.contents
            for serial in later:
                look = state_before(self.history.operation(serial), look, contents)
        return look

    def _committed(self, serial: int | None) -> None:
        """Let private views continue to see the state at their fork."""
        if serial is None or not self.private:
            return
        try:
            operation = self.history.operation(serial)
        except (
            OSError,
            LookupError,
            LogUnavailable,
            HistoryDamaged,
        ) as error:  # the call is committed
            self.present.close(f"what a call has changed since cannot be read: {error}")
            self.present = Present(self.disk)
            return
        contents = self.history.contents
        self.present = self.present.supersede(
            lambda after: state_before(operation, after, contents)
        )

    def note(self) -> None:
        """Note how all files are, so that a later process finds what other programs change."""
        self.external.note(self.history.last)

    def take_out_commits(self) -> None:
        """Take what calls have committed out of the noted state: no other program changed it."""
        since = self.external.noted_at()
        if since is None or since == self.history.last:
            return
        look: Look = self.disk
        paths: set[Parts] = set()
        left: dict[Parts, Entry | None] = {}
        for operation in self.history.readable(self.history.after(since)):  # the newest first
            contents = self.history.contents
            known = Effects(operation, contents).all()
            after = {each.path: node_of(each.after, each.left) for each in known}
            paths.update(after)
            left = {**after, **left}
            look = state_before(operation, look, contents)
        self.external.take_out(self.history.last, paths, look, left)

    def _commit_noted(self, changes: Changes) -> None:
        """Commit what programs have changed since it was noted, as of no call.

        Another scan begins, and would take it for the state before.
        """
        self.external.begin(changes, Noted())
        self.external.settle(changes, last=True)
        self.check_found(changes.since(None))
        changes.commit()
        self.external.end()
        self.note()

    # The transaction that works in place

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        """Wait until no call works in place."""
        if self.in_place is not None and self.in_place_thread == threading.get_ident():
            raise FilesystemError(
                "A call is working in place on this directory. Make the change through its view"
            )
        is_ours = self.gate.holder == threading.get_ident()
        with contextlib.nullcontext() if is_ours else self.gate:
            with self.lock:  # a merge works in place as well, without the gate
                is_busy = self.in_place is not None
            if is_busy:
                raise FilesystemError(
                    "A call is working in place on this directory. Try again when it has ended"
                )
            yield

    def begin_in_place(self) -> Changes:
        if self.in_place is not None:
            raise RuntimeError("another call is working in place on this directory: hold its gate")
        self.check_held()
        self.commands.wait()
        self.in_place = Changes(self.tree, self.history)
        self.in_place_thread = threading.get_ident()
        self._stages = [(0, self.present)]
        return self.in_place

    def expect_programs(self, changes: Changes, noted: Noted | None = None) -> None:
        """Expect other programs to change files until the transaction ends."""
        if self.external.noted_at() is not None:
            self.take_out_commits()  # again: the process that committed them may have been killed
            if noted is None and not changes.records:
                self._commit_noted(changes)
        self.external.begin(changes, noted)
        self.expects_programs = True

    def settle(self, changes: Changes) -> None:
        """Journal what other programs have changed so far."""
        if self.expects_programs:
            self.external.settle(changes)

    def changed(self, changes: Changes, index: int) -> None:
        """Note our own changes in place: all records from ``index`` on."""
        if self.expects_programs:
            self.external.refresh(changes)
        self.note_changes(changes, index)

    def note_changes(self, changes: Changes, index: int) -> None:
        """Like ``_committed``, for uncommitted changes."""
        if self.private and len(changes.records) > index:
            records, taken = self._undoable(changes.records[index:])
            present = self.present.supersede(lambda after: undone(Layer(after), records, taken))
            self._begin_stage(changes, present)

    def commit(
        self,
        changes: Changes,
        call: ToolCall | None,
        undoes: Sequence[str],
        redo: MakeRedo | None = None,
    ) -> None:
        """Commit the transaction that works in place, and close it."""
        if changes.records:
            self.check_held()
            if self.in_place is not changes:
                raise ViewClosed(_OVERTAKEN)
        if changes.has_programs:
            self.external.settle(changes, last=True)
            if self._moved_only_time(changes.records):
                before = changes.records[-1].before
                assert before is not None
                apply_entry(self.tree, (), before)  # over an overlay, it leaves no trace either
                changes.forget_from(len(changes.records) - 1)
            self.check_found(changes.since(None))
        self._check_assembled(changes.records)
        serial = changes.commit(call, undoes, redo)
        self._end_in_place(changes)
        self._committed(serial)
        try:
            self.take_out_commits()
        except (OSError, LogUnavailable) as error:  # it is committed; this is repeated later
            logger.warning("The noted state of %s is not up to date: %s", self.tree.path, error)

    def roll_back(self, changes: Changes) -> tuple[str, ...]:
        """Roll back the transaction that works in place, and close it.

        Returns a sentence for each path that could not be restored. A failure of the disk is
        retried before the next change.
        """
        try:
            with self.undoing(changes):
                told = changes.roll_back()
        except OSError as error:
            self.history.unfinished = functools.partial(self._roll_back_later, changes)
            told = (
                "Changes by other programs could not be determined, and nothing is restored yet"
                f" ({error.strerror}). This is retried before the next change and when the"
                " directory is next opened",
            )
            logger.error("%s", told[0])
            self._end_in_place(changes, undone=False)
            return told
        self._end_in_place(changes, undone=not changes.is_stuck)
        if changes.was_committed:
            self.present.close("a call was interrupted while it was committed")
            self.present = Present(self.disk)
        return told

    def _roll_back_later(self, changes: Changes) -> None:
        with self.undoing(changes):
            changes.roll_back()
        if changes.is_stuck:
            raise OSError(errno.EIO, "what an earlier call changed could not be undone")
        self._end_programs()

    @contextlib.contextmanager
    def undoing(self, changes: Changes) -> Generator[None]:
        """Undo changes in the block; views of undone states are closed afterwards."""
        with self.external.undoing(changes):
            yield
        self._go_back_to(len(changes.records), "what this view was forked from was undone")

    def _end_in_place(self, changes: Changes, *, undone: bool = True) -> None:
        # Programs of an earlier call stay expected until its rollback is finished.
        if undone and changes.has_programs:
            self._end_programs()
        self.in_place = None
        if len(self._stages) > 1:
            self._go_back_to(0, "the call that this view was forked from has ended")
        self._stages = []

    def _end_programs(self) -> None:
        self.external.end()
        self.expects_programs = False

    def check_found(self, records: list[Record]) -> None:
        try:
            self.reserved.check_changed(*self.changed_by(records))
        except ProtectedPath as error:
            raise ProtectedPath(f"{error}. Everything is rolled back") from error

    def _check_assembled(self, records: Sequence[Record]) -> None:
        """Raise ProtectedPath if the result of a transaction is a git repository that never was."""
        paths = {parts for record in records for parts in record.paths}
        if suspects := self.reserved.may_assemble(paths):
            before = self.changed_by(list(records))[1]
            earlier = functools.partial(self._earlier, before)
            self.reserved.check_assembled(suspects, before, self.disk, earlier)

    def _earlier(self, now: Look) -> Iterator[tuple[Look, int]]:
        """Yield the states before each committed call, newest first, and when the call ended."""
        with contextlib.suppress(OSError, LookupError):  # later changes hide what was there
            contents = self.history.contents
            for operation in self.history.readable(self.history.after(0)):
                now = state_before(operation, now, contents)
                yield now, operation.moment

    def changed_by(self, records: list[Record]) -> tuple[list[Parts], Look, Look]:
        """Return all paths changed by uncommitted records, sorted, and looks before and now."""
        if not records or self._moved_only_time(records):
            return [], self.disk, self.disk
        records, taken = self._undoable(records)
        before = undone(Layer(self.disk), records, taken)
        return changed_paths(records, before, self.disk), before, self.disk

    def _moved_only_time(self, records: Sequence[Record]) -> bool:
        """Tell whether only the time of the directory itself is another: a rollback restores it."""
        *others, last = records or [Record(op="was")]
        if last.path or last.before is None or any(record.is_change for record in others):
            return False
        now = capture(self.tree, ())
        return now is not None and last.before.is_like(now)

    def _undoable(self, records: list[Record]) -> tuple[list[Record], Replaced]:
        """Return uncommitted records with what each replaced, and where that is."""
        for index, entry, source in replaced(records, self.store.tree, self.tree):
            record, name = records[index], source.name
            scratch = record.scratch if name == record.saved else None
            records[index] = replace(record, before=entry, saved=name, scratch=scratch)
        own = self.store
        return records, Replaced(own.objects, own.tree, self.tree, store=own.path)

    # Private views during the transaction that works in place

    def forked(self) -> Present:
        """Return the base for a new private view; it ends with the in-place call, if any."""
        self.check_held()
        changes = self.in_place
        if changes is not None and self._stages[-1][0] != len(changes.records):
            # No view has seen the states in between.
            self._begin_stage(changes, Present(self.disk))
        return self.present

    def _begin_stage(self, changes: Changes, present: Present) -> None:
        self.present = present
        self._stages.append((len(changes.records), present))

    def _go_back_to(self, count: int, reason: str) -> None:
        """Return to the present after so many records."""
        while self._stages and self._stages[-1][0] > count:
            self._stages.pop()[1].close(reason)
        if self._stages:
            self.present = self._stages[-1][1]
            self.present.resume()


def _reading(workspace: weakref.ref[Workspace]) -> Reading | None:
    found = workspace()
    return None if found is None or not found.closing.alive else found.reading()


def _oldest(places: weakref.WeakSet[Place]) -> int | None:
    """Return the oldest serial that a snapshot or view still needs."""
    return min((place.serial for place in places if not place.expired), default=None)


def _close(*opened: Watched | Store | Tree | External | Commands) -> None:
    for each in opened:
        each.close()
