"""The directory as it was after any call: read, list, compare, export; without changing it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weakincentives.errors import FilesystemError
from weakincentives.filesystem.contents import node_of
from weakincentives.filesystem.entry import (
    Entry,
    apply_entry,
    capture,
    copy_content,
    matches,
    new_file,
)
from weakincentives.filesystem.history import Past
from weakincentives.filesystem.layers import (
    Changed,
    Disk,
    Forward,
    Look,
    Node,
    OnDisk,
    node_at,
)
from weakincentives.filesystem.new_tree import NewTree, new_directory
from weakincentives.filesystem.paths import (
    DEFAULT_ROOT,
    NodeKind,
    Parts,
    join_path,
    not_regular,
    split_root,
    system_error,
)
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.sides import Effects
from weakincentives.filesystem.store import FOR_CHANGES, DirectoryLock
from weakincentives.filesystem.tree import Held, Tree, write_all
from weakincentives.log import Entry as Value

if TYPE_CHECKING:
    from weakincentives.filesystem.branch_log import BranchHistory
    from weakincentives.filesystem.diffs import Detail, FileChange
    from weakincentives.filesystem.undo import WorkspaceHistory


_RETRIES = 3


class _Found(NamedTuple):
    """What was at a path at a point of the history."""

    node: Node | None
    value: Value | None = None
    """What an operation says of it; None for what is in the directory now."""
    place: Parts = ()
    """Where it is in the directory."""
    number: int = 0
    """The later operation that found it."""


class DirectoryAt(Forward):
    """The directory as it was after a call: as it is now, without what later calls did.

    Calls that are committed meanwhile, also by other processes, do not change it. Reading one file
    costs what the calls did that changed it since; the first look at a directory costs what all
    later calls did.

    What calls left is shown as they left it, also if someone has changed it since. What no call has
    ever changed is shown as it is now.

    Args:
        store: The store of the workspace.
        disk: The directory; ``close`` closes it.
        serial: The call's serial in the history; 0 is before the first.
        recover: Rolls back the call of a killed process.
        moment: When it was, in nanoseconds, if that is later than the call.
        patience: Seconds to wait for a call that is changing the directory.
    """

    def __init__(
        self,
        store: Path,
        past: Past,
        disk: Disk,
        serial: int,
        *,
        recover: Callable[[], None] = lambda: None,
        moment: int | None = None,
        patience: float = FOR_CHANGES,
    ) -> None:
        self.serial = serial
        self._recover = recover
        self._past = past
        self._steady = DirectoryLock(store)
        self._is_shared = os.access(store, os.W_OK)  # else no process of this user changes it
        self._patience = patience
        self._journal = store / "tx" / "journal"
        opened = contextlib.ExitStack()
        opened.callback(disk.tree.close)
        opened.callback(self._steady.close)
        self.close = weakref.finalize(self, opened.close)
        """Closes what is open; happens by itself when this is collected."""
        self.look = self._disk = disk
        self._effects: dict[int, Effects] = {}
        past.refresh()
        self._check_has_later()
        if moment is None:
            moment = past.operation(serial).moment if serial in past.serials() else 0
        self._moment = moment

    @contextlib.contextmanager
    def steady(self) -> Generator[None]:
        """Keep the directory from changing in the block."""
        if not self._is_shared:
            yield
            return
        if self._steady.is_ours:  # a merge reads the state that it is about to change
            yield
            return
        for _ in range(_RETRIES):
            with self._steady.reading(self._patience):
                if not self._holds_uncommitted():
                    self._refresh()
                    yield
                    return
            self._recover()
        raise FilesystemError(
            "A killed call has left changes in this directory. The next command that opens it, such"
            " as `wink undo`, rolls them back; then look again"
        )

    def _holds_uncommitted(self) -> bool:
        try:
            return os.stat(self._journal).st_size > 0
        except FileNotFoundError:
            return False

    def changed(self) -> Changed:
        """Return where the directory may differ from this state."""
        changed = Changed(set(), set())
        with self.steady():
            for number in self._past.after(self.serial):
                for path, change in self._effect(number).own.items():
                    changed.paths.add(path)
                    for known in (change.found, change.left):
                        if known is not None and known.links > 1:
                            changed.files.add((known.device, known.inode))
        return changed

    # Looking

    def at(self, parts: Parts) -> Look:
        """Return the look that has what is at a path: the directory, or this one."""
        with self.steady():
            found = self._find(parts)
            return self if found.value is not None or found.place != parts else self._disk

    def node(self, parts: Parts) -> Node | None:
        with self.steady():
            return self._find(parts).node

    def read(self, parts: Parts) -> bytes:
        with self.steady():
            return self._content_of(parts, self._find(parts))

    def link_target(self, parts: Parts) -> str:
        with self.steady():
            found = self._find(parts)
            if found.node is None:
                raise system_error(errno.ENOENT, parts)
            if found.value is None:
                return self._disk.link_target(found.place)
            if found.value.kind != "link":
                raise system_error(errno.EINVAL, parts)
            return found.value.content

    def nodes(self, parts: Parts) -> list[tuple[str, Node]]:
        with self.steady():
            here = self._find(parts).node
            if here is None:
                raise system_error(errno.ENOENT, parts)
            if not here.is_directory:
                raise system_error(errno.ENOTDIR, parts)
            names = set[str]()
            with contextlib.suppress(OSError):
                names.update(name for name, _ in self._disk.kinds(parts))
            for number in self._past.touching(parts, below=True):
                names.update(self._effect(number).names.get(parts, ()))
            found = [(name, self._find((*parts, name)).node) for name in sorted(names)]
            return [(name, node) for name, node in found if node is not None]

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        return [(name, node.kind) for name, node in self.nodes(parts)]

    # In the log

    def _find(self, parts: Parts) -> _Found:
        found = self._next(parts, self.serial)
        node = found.node
        # Not by the change time, which is new after every rollback.
        is_then = node is not None and (node.mtime_ns <= self._moment or node.is_directory)
        return found if is_then else self._as_left(parts, found)

    def _next(self, parts: Parts, number: int) -> _Found:
        """Return what the next operation found at a path, or else what is there now."""
        for later in self._past.touching(parts):
            if later > number and (change := self._effect(later).at(parts)) is not None:
                return _Found(node_of(change.before, change.found), change.before, number=later)
        node = node_at(self._disk, parts)
        return _Found(node, None, parts)

    def _as_left(self, parts: Parts, found: _Found) -> _Found:
        """Return what a call left at a path, if someone has changed it since."""
        for number in reversed(self._past.touching(parts)):
            if number > self.serial:
                continue
            change = self._effect(number).at(parts)
            if change is None:
                continue
            left = change.after
            if left is None:
                return _Found(None)
            if left.is_directory:
                return found
            node, now = node_of(left, change.left), found.node
            if now is not None and node is not None and node.mode == now.mode:
                same = matches(node, now)
            else:
                same = False
            if same:
                return found
            is_known = left.kind == "link" or (
                left.content and self._past.contents.has(left.content)
            )
            return _Found(node, left) if is_known else found
        return found

    def _content_of(self, parts: Parts, found: _Found) -> bytes:
        if found.node is None:
            raise system_error(errno.ENOENT, parts)
        if found.node.kind != "file":
            raise not_regular(found.node.kind, parts)
        value = found.value
        if value is None:
            return self._disk.read(found.place)
        if value.content:
            return self._past.contents.read(value.content)
        for change in self._effect(found.number).all() if found.number else ():
            # It was only moved: what came next to where it went has its content.
            if change.origin == parts and change.after is not None:
                moved = self._next(change.path, found.number)
                same = (value.size, value.mtime_ns)
                if moved.node is not None and (moved.node.size, moved.node.mtime_ns) == same:
                    return self._content_of(change.path, moved)
        raise FileNotFoundError(errno.ENOENT, "its content was not saved", join_path(parts))

    def _effect(self, number: int) -> Effects:
        if number not in self._effects:
            operation = self._past.operation(number)
            self._effects[number] = Effects(operation, self._past.contents)
        return self._effects[number]

    # Keeping up with the workspace

    def _refresh(self) -> None:
        self._past.refresh()
        self._check_has_later()

    def _check_has_later(self) -> None:
        if self._past.last > self.serial and min(self._past.serials()) > self.serial + 1:
            raise FilesystemError("The history no longer has this state: it was trimmed")


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
        with new_directory(target) as (staged, _):
            with contextlib.closing(Tree(staged)) as tree:
                _Export(self._look, self._tree, tree).run()
            os.rename(staged, target)  # replaces an empty directory


class _Export:
    """Copies what a look shows to an empty directory."""

    def __init__(self, look: Look, workspace: Tree, target: Tree) -> None:
        self._look = look
        self._workspace = workspace
        self._target = target

    def run(self) -> None:
        new = NewTree(self._target)
        for parts, node in self._walk():
            entry = self._entry(parts, node)
            if not new.add(parts, entry) and entry.kind == "file":  # else a socket or device
                with self._target.parent(parts) as above:
                    self._copy(parts, entry, above)
                apply_entry(self._target, parts, entry)
        new.finish()

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
        status = self._workspace.status_if_reached(parts)
        found = None if status is None else (status.st_ino, status.st_ctime_ns)
        return found == (node.ino, node.ctime_ns)

    def _copy(self, parts: Parts, entry: Entry, above: int) -> None:
        """Copy a file: from the workspace, unless it was changed there since."""
        if self._is_on_disk(parts, entry):
            with (
                Held(self._workspace.open_file(parts)) as reading,
                new_file(above, parts[-1]) as writing,
            ):
                copy_content(reading, writing)
                if os.fstat(reading).st_ctime_ns == entry.ctime_ns:
                    return
            os.unlink(parts[-1], dir_fd=above)
        with new_file(above, parts[-1]) as writing:
            write_all(writing, self._look.read(parts))
