"""What committed calls did to a directory, for those who look: also while another is at work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from weakincentives.filesystem.diffs import FileChange, changed_paths, file_changes
from weakincentives.filesystem.history import Committed, Delta, Past
from weakincentives.filesystem.layers import Disk, Layer, Look, taken_by, undone
from weakincentives.filesystem.protocol import Parts
from weakincentives.filesystem.records import JOURNAL
from weakincentives.filesystem.revert import obstacles
from weakincentives.filesystem.store import Note, location_of
from weakincentives.filesystem.tree import Tree
from weakincentives.state import Seals


class CallChanges(NamedTuple):
    """A committed call, and what it did to each path."""

    call: Committed
    files: tuple[FileChange, ...]


class WorkspaceHistory:
    """The committed calls of a directory that can be undone.

    It takes no lock and changes nothing, so it works while an agent does. Calls that are forgotten
    while it looks are left out.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
    ) -> None:
        self.store = location_of(Path(root)) if store is None else Path(os.path.realpath(store))
        note = Note.read(self.store)
        self._past = Past(self.store, Seals("nothing") if note is None else note.seals(JOURNAL))
        self._disk = Disk(Tree(Path(root)))

    def calls(self) -> tuple[Committed, ...]:
        """Return the calls, oldest first."""
        past = self._past
        return tuple(delta.committed for delta in past.readable(past.serials()))

    def damaged(self) -> tuple[str, ...]:
        """Return a sentence for each call whose record is damaged; the other methods pass it by."""
        return tuple(str(error) for error in self._past.damaged().values())

    def changes(self) -> Iterator[CallChanges]:
        """Yield what each call changed, newest first.

        What the last call to change a file left there is known by what is there now: if somebody
        has changed it since, that shows, too.
        """
        for delta, before, after in _backwards(self._past, self._disk):
            paths = changed_paths(delta.records, before, after)
            yield CallChanges(delta.committed, tuple(file_changes(paths, before, after)))

    def diff(self, calls: Iterable[Committed], *, reverse: bool = False) -> tuple[FileChange, ...]:
        """Return what some calls changed together, in the order of the paths; or its reverse."""
        serials = {call.serial for call in calls}
        return _changes_of(self._past, serials, self._disk, reverse=reverse)

    def changed_since(self, calls: Iterable[Committed]) -> dict[str, tuple[str, ...]]:
        """Return the paths that are not as some calls left them, each with the ids of the other
        calls that have changed it since. Where there are none, somebody else has.
        """
        serials = {call.serial for call in calls}
        return obstacles(self._past, serials, self._disk) if serials else {}


def diff_of(past: Past, serials: Iterable[int], disk: Look) -> str:
    """Return what some calls changed together, as a diff that ``git apply`` takes."""
    return "".join(change.text for change in _changes_of(past, set(serials), disk))


def _changes_of(
    past: Past, serials: set[int], disk: Look, *, reverse: bool = False
) -> tuple[FileChange, ...]:
    """Return what is different between before the first and after the last of some calls, at the
    paths that they changed.
    """
    paths: set[Parts] = set()
    newest: Look = disk
    for delta, before, after in _backwards(past, disk):
        serial = delta.committed.serial
        if serial == max(serials):
            newest = after
        if serial in serials:
            paths.update(changed_paths(delta.records, before, after))
        if serial == min(serials):
            sides = (newest, before) if reverse else (before, newest)
            return tuple(file_changes(sorted(paths), *sides))
    return ()


def _backwards(past: Past, disk: Look) -> Iterator[tuple[Delta, Look, Look]]:
    """Yield each call with how things were before and after it, newest first."""
    after = Layer(disk)
    with contextlib.ExitStack() as opened:
        for delta in past.readable(past.after(0)):
            # On a layer of its own only where it must be told apart from what came later: a look
            # through thousands of layers would be slow, and too deep.
            layer = Layer(after) if delta.links else after
            taken = taken_by(past, delta)
            if taken.tree is not None:
                opened.callback(taken.tree.close)
            try:
                before = undone(layer, delta.records, taken)
            except OSError:
                return  # somebody else has changed the directory too much to tell what was there
            yield delta, before, after
            after = before
