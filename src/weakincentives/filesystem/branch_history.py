"""The commits of a branch and its files after each, read without a lock."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from weakincentives.filesystem.branches import BranchInfo, add_points, base_of, changed_between
from weakincentives.filesystem.diffs import (
    Detail,
    Effort,
    FileChange,
    all_changed,
    file_changes,
)
from weakincentives.filesystem.history import Committed
from weakincentives.filesystem.layers import Changed, Disk, Layer, Look
from weakincentives.filesystem.reserved import Reserved
from weakincentives.filesystem.states import FilesAt
from weakincentives.filesystem.tree import Tree
from weakincentives.filesystem.undo import CallChanges


class BranchHistory:
    """The commits of a branch, as :class:`WorkspaceHistory` shows those of the workspace.

    It takes no lock and changes nothing. Close it after use.
    """

    def __init__(self, root: str | os.PathLike[str], info: BranchInfo) -> None:
        self.info = info
        path = Path(os.path.realpath(root))
        self._tree = Tree(path)
        self._base = base_of(path, info)
        reserved = Reserved(path, store=info.path.parent.parent)
        disk = reserved.without_hidden(self._base)
        self._points = [Layer(disk)]
        add_points(self._points, info.commits, disk)

    def close(self) -> None:
        self._base.close()
        self._tree.close()

    def __enter__(self) -> BranchHistory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def calls(self) -> tuple[Committed, ...]:
        """Return the calls, oldest first."""
        return self.info.calls

    def newest_first(self) -> Iterator[Committed]:
        return reversed(self.info.calls)

    def changes(self, detail: Detail | None = None) -> Iterator[CallChanges]:
        """Yield what each call changed, newest first."""
        for call in self.newest_first():
            yield CallChanges(call, self.diff([call], detail=detail))

    def diff(
        self,
        calls: Iterable[Committed],
        *,
        reverse: bool = False,
        detail: Detail | None = None,
        raw: bool = False,
    ) -> tuple[FileChange, ...]:
        """Return what some calls, and those between them, changed together; or the reverse."""
        serials = {call.serial for call in calls}
        ends = [min(serials) - 1, max(serials)]
        if reverse:
            ends.reverse()
        return self.diff_between(ends[0], ends[1], detail=detail, raw=raw)

    def diff_between(
        self, one: int, other: int, *, detail: Detail | None = None, raw: bool = False
    ) -> tuple[FileChange, ...]:
        """Return what differs after one commit from after another, ordered by path."""
        before, after = self._points[one], self._points[other]
        paths = changed_between(before, after)
        return tuple(file_changes(paths, before, after, detail=detail, effort=Effort(raw=raw)))

    def changed_since(self, calls: Iterable[Committed]) -> dict[str, tuple[str, ...]]:
        """Return nothing: only its own calls change a branch."""
        return {}

    def files_at(self, serial: int) -> FilesAt:
        """Return the files after so many commits."""
        return FilesAt(self, serial, self._points[serial], self._tree)

    def point(self, serial: int) -> Layer:
        """Return the state after so many commits."""
        return self._points[serial]

    @property
    def files(self) -> FilesAt:
        """The files as they are now."""
        return self.files_at(len(self.info.commits))

    # Compared with the workspace, or another branch

    def diff_from_workspace(self, *, detail: Detail | None = None) -> tuple[FileChange, ...]:
        """Return what differs here from the workspace as it is now."""
        return self._diff_from(Disk(self._tree), [], detail)

    def diff_from(
        self, other: BranchHistory, *, detail: Detail | None = None
    ) -> tuple[FileChange, ...]:
        """Return what differs here from another branch."""
        return self._diff_from(other._points[-1], [other._changed()], detail)

    def _diff_from(
        self, other: Look, changed: list[Changed], detail: Detail | None
    ) -> tuple[FileChange, ...]:
        every, here = [self._changed(), *changed], self._points[-1]
        paths = set[tuple[str, ...]]().union(*(each.paths for each in every))
        files = set[tuple[int, int]]().union(*(each.files for each in every))
        found = all_changed(paths, paths, files, other, here)
        return tuple(file_changes(found, other, here, detail=detail, effort=Effort(raw=True)))

    def _changed(self) -> Changed:
        """Return where the branch may differ from the workspace."""
        own, since = self._points[0].differing(self._points[-1]), self._base.changed()
        return Changed(own.paths | since.paths, own.files | since.files)
