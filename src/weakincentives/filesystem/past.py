"""The files of a workspace as they were after a commit: read, list, compare, export."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weakincentives.errors import FilesystemError
from weakincentives.filesystem.diffs import Detail, FileChange
from weakincentives.filesystem.entry import (
    Entry,
    File,
    apply_entry,
    capture,
    copy_content,
    create,
    link,
    new_file,
)
from weakincentives.filesystem.layers import Disk, Look, OnDisk
from weakincentives.filesystem.paths import DEFAULT_ROOT, Parts, split_root
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.tree import Held, Tree, remove_tree, write_all

if TYPE_CHECKING:
    from weakincentives.filesystem.branch_history import BranchHistory
    from weakincentives.filesystem.undo import WorkspaceHistory


class FilesAt(OnDisk):
    """A read-only :class:`~weakincentives.filesystem.Filesystem`: a directory after a commit.

    It takes no lock and changes nothing. What was changed outside of wink since then shows as it
    is now, unless a later call has saved it.
    """

    def __init__(
        self, history: WorkspaceHistory | BranchHistory, serial: int, look: Look, tree: Tree
    ) -> None:
        self._prefix = split_root(DEFAULT_ROOT)
        self._real = tree.spellings
        self._lock = self._read_lock = threading.RLock()
        self._reads = self._sealed = None
        self.read_only = "these are the files as they were, and cannot be changed"
        self._history = history
        self.serial = serial
        """The number of the commit in the history; 0 precedes the first."""
        self._look = look
        self._tree = tree

    def _below_root(self, target: str) -> list[str] | None:
        return self._tree.below_root(target)

    def diff(self, other: FilesAt, detail: Detail | None = None) -> tuple[FileChange, ...]:
        """Return what differs in ``other``, ordered by path; costs the calls in between.

        Paths for which ``detail`` returns false are only named.
        """
        return self._history.diff_between(self.serial, other.serial, detail=detail)

    def export(self, directory: str | os.PathLike[str]) -> None:
        """Create a directory with these files, or fill an empty one: all of them, or none.

        Content, modes, times, links, hard links between them, pipes, extended attributes; owners
        where the process may set them. Unchanged files share their blocks with the workspace where
        the filesystem can do that.

        Raises:
            FilesystemError: The directory is not empty, or is in the workspace.
        """
        target = Path(os.path.abspath(directory))
        if Path(os.path.realpath(target)).is_relative_to(self._tree.path):
            raise FilesystemError(f"{target} is in the workspace. Name a directory outside of it")
        with contextlib.suppress(FileNotFoundError):
            if os.listdir(target):
                raise FilesystemError(f"{target} is not empty. Name one that is, or a new one")
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            tree = Tree(staged)
            try:
                _Export(self._look, self._tree, tree).run()
            finally:
                tree.close()
            os.rename(staged, target)  # replaces an empty directory
        except BaseException:
            remove_tree(staged)
            raise


class _Export:
    """Copies what a look shows to an empty directory."""

    def __init__(self, look: Look, workspace: Tree, target: Tree) -> None:
        self._look = look
        self._workspace = workspace
        self._disk = Disk(workspace)
        self._target = target
        self._links: dict[File, Parts] = {}

    def run(self) -> None:
        directories: list[tuple[Parts, Entry]] = []
        for parts, node in self._walk():
            entry = self._entry(parts, node)
            if entry.is_directory:
                directories.append((parts, entry))
                if parts:
                    with self._target.parent(parts) as above:
                        create(above, parts[-1], entry)
            elif self._create(parts, entry):
                apply_entry(self._target, parts, entry)
        # Last, inner directories first: adding an entry changes a directory's time.
        for parts, entry in reversed(directories):
            apply_entry(self._target, parts, entry)

    def _walk(self) -> Iterator[tuple[Parts, Entry]]:
        """Yield all entries, directories before what is in them; errors are the system's."""
        root = self._look.node(())
        pending: list[tuple[Parts, Entry]] = [] if root is None else [((), root)]
        while pending:
            parts, node = pending.pop()
            yield parts, node
            if node.is_directory:
                pending += [
                    ((*parts, name), inner)
                    for name, inner in self._look.nodes(parts)
                    if not name.startswith(TEMPORARY)
                ]

    def _entry(self, parts: Parts, node: Entry) -> Entry:
        """Return a node with its extended attributes and the text of a link."""
        if node.kind == "link":
            return node._replace(target=self._look.link_target(parts))
        if self._is_on_disk(parts, node):
            now = capture(self._workspace, parts)
            return node if now is None else node._replace(xattrs=now.xattrs)
        return node

    def _is_on_disk(self, parts: Parts, node: Entry) -> bool:
        """Tell whether the workspace has exactly this at the path now."""
        try:
            now = self._disk.node(parts)
        except OSError:
            return False
        return now is not None and (now.ino, now.ctime_ns) == (node.ino, node.ctime_ns)

    def _create(self, parts: Parts, entry: Entry) -> bool:
        """Create a file, link or pipe; False if there is nothing left to set."""
        known = None if entry.file is None or entry.links < 2 else self._links.get(entry.file)
        with self._target.parent(parts) as above:
            if known is not None:
                with self._target.parent(known) as other:
                    link(other, known[-1], above, parts[-1])
                return False
            if entry.kind != "file":
                return create(above, parts[-1], entry)  # sockets and devices are left out
            if entry.file is not None:
                self._links[entry.file] = parts
            if not self._clone(parts, entry, above):
                with new_file(above, parts[-1]) as writing:
                    write_all(writing, self._look.read(parts))
            return True

    def _clone(self, parts: Parts, entry: Entry, above: int) -> bool:
        """Copy a file from the workspace; False if it was changed since."""
        if not self._is_on_disk(parts, entry):
            return False
        with (
            Held(self._workspace.open_file(parts)) as reading,
            new_file(above, parts[-1]) as writing,
        ):
            copy_content(reading, writing)
            if os.fstat(reading).st_ctime_ns == entry.ctime_ns:
                return True
        os.unlink(parts[-1], dir_fd=above)
        return False
