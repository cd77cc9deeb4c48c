"""A directory that is open to change: its lock, store and history, and the views of it."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import threading
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weakincentives.call import ToolCall
from weakincentives.clock import Clock
from weakincentives.errors import FilesystemError, ProtectedPath
from weakincentives.filesystem.changes import Changes, recover
from weakincentives.filesystem.commands import Commands
from weakincentives.filesystem.diffs import changed_paths
from weakincentives.filesystem.history import History, replaced
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.layers import (
    Disk,
    Layer,
    Look,
    Present,
    Taken,
    taken_by,
    undone,
)
from weakincentives.filesystem.protocol import Parts
from weakincentives.filesystem.reserved import Reserved
from weakincentives.filesystem.scan import External
from weakincentives.filesystem.store import Store
from weakincentives.filesystem.tree import Tree
from weakincentives.gate import Gate

logger = logging.getLogger("weakincentives.filesystem")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Place:
    """A snapshot of the workspace itself: a place in the sequence of commits."""

    serial: int
    workspace: Workspace
    expired: bool = False


class Workspace:
    """What a filesystem and all its views have in common."""

    def __init__(
        self, root: Path, store: Store, *, limit: int, clock: Clock, unprotected: Sequence[str]
    ) -> None:
        with contextlib.ExitStack() as opened:
            self.store = store
            opened.callback(self.store.close)
            self.tree = Tree(root)
            opened.callback(self.tree.close)
            self.external = External(self.tree, self.store)
            self.commands = Commands(self.store)
            self.reserved = Reserved(self.tree.path, store=self.store.path, unprotected=unprotected)
            opened.pop_all()
        self.closing = weakref.finalize(
            self, _close, self.commands, self.external, self.tree, self.store
        )
        self.lock = threading.RLock()
        self.gate = Gate()
        self.history = History(self.store, limit=limit, clock=clock)
        self.places: weakref.WeakSet[Place] = weakref.WeakSet()
        # Not a method of this object: it would keep a forgotten workspace, and its lock, alive.
        self.history.needed = functools.partial(_oldest, self.places)
        self.private: weakref.WeakSet[object] = weakref.WeakSet()
        """The private views that may still be read."""
        self.in_place: Changes | None = None
        """The one transaction that works in place."""
        self.in_place_thread = 0
        self.expects_programs = False
        """Whether other programs change files in the transaction that works in place."""
        self.disk: Look = Disk(self.tree)
        if self.reserved.hidden:
            self.disk = functools.reduce(Layer.remove, self.reserved.hidden, Layer(self.disk))
        self.present = Present(self.disk)
        self.links: dict[Sequence[str], frozenset[Parts]] = {}
        """What links at protected paths lead to, by the patterns."""
        self._stages: list[tuple[int, Present]] = []
        """What was the present in the call that works in place, by how many changes it had made."""
        self.recovered = recover(self.tree, self.history)

    # Commits, and what was before them

    def place(self) -> Place:
        """Return the present place in the sequence of commits."""
        place = Place(self.history.last, self)
        self.places.add(place)
        return place

    def at(self, place: Place) -> Look:
        """Return how things were at a place."""
        look: Look = self.present
        for serial in self.history.after(place.serial):
            delta = self.history.read(serial)
            look = undone(Layer(look), delta.records, taken_by(self.history, delta))
        return look

    @contextlib.contextmanager
    def transaction(self, call: ToolCall | None, undoes: Sequence[str] = ()) -> Generator[Changes]:
        """Commit the changes that are made in the block, or undo them if it raises."""
        self.commands.wait()
        changes = Changes(self.tree, self.history)
        try:
            yield changes
            serial = changes.commit(call, undoes)
        except BaseException:
            changes.roll_back()
            raise
        self._committed(serial)

    def _committed(self, serial: int | None) -> None:
        """Let the private views go on seeing what was there when they were forked."""
        if serial is None or not self.private:
            return
        delta = self.history.read(serial)
        self.present = self.present.supersede(delta.records, taken_by(self.history, delta))

    # The transaction that works in place

    @contextlib.contextmanager
    def turn(self) -> Generator[None]:
        """Wait until no call works in place."""
        if self.in_place is not None and self.in_place_thread == threading.get_ident():
            raise FilesystemError(
                "A call works on this directory in place. Make the change through its view"
            )
        with self.gate:
            if self.in_place is not None:
                raise FilesystemError(
                    "A call works on this directory in place. Try again when it has ended"
                )
            yield

    def begin_in_place(self) -> Changes:
        """Open the one transaction that works in place."""
        if self.in_place is not None:
            raise RuntimeError("another call works on this directory in place: hold its gate")
        self.commands.wait()
        self.in_place = Changes(self.tree, self.history)
        self.in_place_thread = threading.get_ident()
        self._stages = [(0, self.present)]
        return self.in_place

    def expect_programs(self, changes: Changes) -> None:
        """Expect other programs to change files until the transaction ends."""
        self.external.begin(changes)
        self.expects_programs = True

    def settle(self, changes: Changes) -> None:
        """Journal what other programs have changed so far."""
        if self.expects_programs:
            self.external.settle(changes)

    def changed(self, changes: Changes, index: int) -> None:
        """Take note of changes that we have made in place: all records from one on."""
        if self.expects_programs:
            self.external.refresh(changes)
        self.note_changes(changes, index)

    def note_changes(self, changes: Changes, index: int) -> None:
        """Like ``_committed``, for changes that are not committed yet."""
        if self.private and len(changes.records) > index:
            records, taken = self._undoable(changes.records[index:])
            self._begin_stage(changes, self.present.supersede(records, taken))

    def commit(self, changes: Changes, call: ToolCall | None, undoes: Sequence[str]) -> None:
        """Commit the transaction that works in place, and close it."""
        if self.expects_programs:
            self.external.settle(changes, last=True)
            self.check_found(changes.since(None))
        serial = changes.commit(call, undoes)
        self._end_in_place()
        self._committed(serial)

    def roll_back(self, changes: Changes) -> tuple[str, ...]:
        """Undo the transaction that works in place, and close it.

        Returns a sentence for each thing that could not be put back. What the disk does not let us
        look for now is looked for, and undone, before the next change.
        """
        try:
            with self.undoing(changes):
                told = changes.roll_back()
        except OSError as error:
            self.history.unfinished = functools.partial(self._roll_back_later, changes)
            told = (
                "What other programs changed could not be looked for, and nothing is put back yet"
                f" ({error.strerror}). That is tried again before the next change, and when the"
                " directory is opened again",
            )
            logger.error("%s", told[0])
            self._end_in_place(undone=False)
            return told
        self._end_in_place(undone=not changes.is_stuck)
        return told

    def _roll_back_later(self, changes: Changes) -> None:
        with self.undoing(changes):
            changes.roll_back()
        if changes.is_stuck:
            raise OSError(errno.EIO, "what an earlier call changed could not be undone")
        self.external.end()

    @contextlib.contextmanager
    def undoing(self, changes: Changes) -> Generator[None]:
        """Undo changes in the block; views of what is undone have nothing to show afterwards."""
        with self.external.undoing(changes):
            yield
        self._go_back_to(len(changes.records), "what this view was forked from was undone")

    def _end_in_place(self, *, undone: bool = True) -> None:
        if undone and self.expects_programs:
            self.external.end()
            self.expects_programs = False
        self.in_place = None
        if len(self._stages) > 1:
            self._go_back_to(0, "the call that this view was forked from has ended")
        self._stages = []

    def check_found(self, records: list[Record]) -> None:
        """Raise if other programs have made changes that no call may make."""
        try:
            self.reserved.check_changed(*self.changed_by(records))
        except ProtectedPath as error:
            raise ProtectedPath(f"{error}. All that was changed is undone") from error

    def changed_by(self, records: list[Record]) -> tuple[list[Parts], Look, Look]:
        """Return every path that uncommitted changes have changed, sorted; and how to look at it
        as it was before them, and as it is now.
        """
        if not records:
            return [], self.disk, self.disk
        records, taken = self._undoable(records)
        before = undone(Layer(self.disk), records, taken)
        return changed_paths(records, before, self.disk), before, self.disk

    def _undoable(self, records: list[Record]) -> tuple[list[Record], Taken]:
        """Return uncommitted changes with what each replaced, and where that is."""
        for number, entry, name in replaced(records, self.store.tree, self.tree):
            record = records[number]
            room = record.room if name == record.kept else None
            records[number] = replace(record, before=entry, kept=name, room=room)
        own = self.store
        return records, Taken(own.objects, own.tree, self.tree, store=own.path)

    # Private views beside the transaction that works in place, and of it

    def forked(self) -> Present:
        """Return what a view is forked from: it ends with the call that works in place, if any."""
        changes = self.in_place
        if changes is not None and self._stages[-1][0] != len(changes.records):
            # Nobody has looked at what was there between.
            self._begin_stage(changes, Present(self.disk))
        return self.present

    def _begin_stage(self, changes: Changes, present: Present) -> None:
        self.present = present
        self._stages.append((len(changes.records), present))

    def _go_back_to(self, count: int, reason: str) -> None:
        """Have what was the present after so many changes be the present again."""
        while self._stages and self._stages[-1][0] > count:
            self._stages.pop()[1].close(reason)
        if self._stages:
            self.present = self._stages[-1][1]
            self.present.resume()


def _oldest(places: weakref.WeakSet[Place]) -> int | None:
    """Return the oldest place that a snapshot or a view may still ask for."""
    return min((place.serial for place in places if not place.expired), default=None)


def _close(*opened: Store | Tree | External | Commands) -> None:
    for each in opened:
        each.close()
