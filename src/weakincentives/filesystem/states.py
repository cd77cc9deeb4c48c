"""The directory as it was after any call: read, list, compare, export; without changing it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from weakincentives.errors import FilesystemError, HistoryDamaged
from weakincentives.filesystem.entry import (
    Entry,
    apply_entry,
    capture,
    copy_content,
    matches,
    new_file,
)
from weakincentives.filesystem.history import Delta, Past, Touched
from weakincentives.filesystem.layers import (
    Changed,
    Disk,
    Forward,
    Layer,
    Look,
    Node,
    OnDisk,
    Present,
    replaced_by,
    undone,
)
from weakincentives.filesystem.new_tree import NewTree, new_directory
from weakincentives.filesystem.paths import DEFAULT_ROOT, NodeKind, Parts, join_path, split_root
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.store import FOR_CHANGES, DirectoryLock
from weakincentives.filesystem.tree import Held, Tree, write_all

if TYPE_CHECKING:
    from weakincentives.filesystem.branch_log import BranchHistory
    from weakincentives.filesystem.diffs import Detail, FileChange
    from weakincentives.filesystem.undo import WorkspaceHistory


def before_call(past: Past, delta: Delta, after: Layer) -> Layer:
    """Return the state before a call, given the one after it."""
    return undone(after, delta.records, replaced_by(past, delta))


def _at_and_above(parts: Parts) -> set[str]:
    return {"/".join(parts[:depth]) for depth in range(len(parts) + 1)}


_MANY = Touched(None)
_RETRIES = 3
_DEEPEST = 50
"""Calls; each look goes through as many layers as calls were committed since it began."""


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
        self._disk = disk
        past.refresh()
        self._changed_at = past.changed_at()
        self._begin()
        self._check_has_later()
        if moment is None:
            moment = past.moment(serial) if serial in past.serials() else 0
        self._moment = moment

    def _begin(self) -> None:
        """Begin with the directory as it is now."""
        self._present = self._current = Present(self._disk)
        """Shows the directory as it was at that time; later calls are undone in it."""
        self._newest = self._first = self._past.last
        self._index: Mapping[int, Touched] | None = None
        self._whole: Layer | None = None
        self._parts: dict[tuple[int, ...], Layer] = {}
        """Looks that are right for some paths only, by the calls undone in them."""
        self._left: dict[str, int] | None = None
        """The last call up to this state that changed a path, by path."""
        self._names: dict[str, set[str]] = {}
        """The names in each directory that calls changed."""

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
        with self.steady():
            later, whole = self._present.changed(), self.look
            assert isinstance(whole, Layer)
            return Changed(later.paths.union(whole.changed), later.files.union(whole.files))

    # Looking

    @property
    def look(self) -> Look:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The whole state."""
        if self._whole is None:
            later = [serial for serial in self._past.after(self.serial) if serial <= self._first]
            self._whole = self._without(later)
        return self._whole

    def node(self, parts: Parts) -> Node | None:
        with self.steady():
            node = self.at(parts).node(parts)
            left = self._as_left(parts, node)
            return node if left is None else left[1]

    def read(self, parts: Parts) -> bytes:
        with self.steady():
            look = self.at(parts)
            left = self._as_left(parts, look.node(parts))
            if left is None or (left[1] is not None and left[1].kind != "file"):
                return look.read(parts)
            if left[1] is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join_path(parts))
            return self._past.left(left[0], left[1])

    def link_target(self, parts: Parts) -> str:
        with self.steady():
            look = self.at(parts)
            left = self._as_left(parts, look.node(parts))
            target = None if left is None or left[1] is None else left[1].target
            return look.link_target(parts) if target is None else target

    def nodes(self, parts: Parts) -> list[tuple[str, Node]]:
        with self.steady():
            found: dict[str, Node | None] = dict(self.look.nodes(parts))
            for name in self._names_left(parts):
                found.setdefault(name, None)
            for name, node in list(found.items()):
                left = self._as_left((*parts, name), node)
                found[name] = node if left is None else left[1]
            return [(name, node) for name, node in found.items() if node is not None]

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        return [(name, node.kind) for name, node in self.nodes(parts)]

    # What someone changed after the last call that did

    def _as_left(self, parts: Parts, node: Node | None) -> tuple[Delta, Node | None] | None:
        """Return what a call left at a path, with the call, if someone has changed it since."""
        # Not by the change time, which is new after every rollback.
        if node is not None and (node.mtime_ns <= self._moment or node.is_directory):
            return None
        serial = self._last_calls().get("/".join(parts), 0)
        if not serial:
            return None
        try:
            delta = self._past.read(serial)
        except (FileNotFoundError, HistoryDamaged):
            return None
        left = delta.after.get(parts)
        if parts not in delta.after or (left is not None and left.is_directory):
            return None
        if left is None:
            return None if node is None else (delta, None)
        if node is not None and matches(left, node) and left.mode == node.mode:
            return None
        digest = left.digest or ""
        is_known = left.kind == "link" or digest in delta.kept or digest in self._past.objects
        return (delta, left) if is_known else None

    def _last_calls(self) -> dict[str, int]:
        if self._left is None:
            self._left = {}
            inside: dict[str, set[str]] = {}
            for serial in self._past.serials():
                if serial > self.serial:
                    break
                paths = self._paths_of(serial)
                for path in paths:
                    if path in inside and self._takes_along(serial, path):
                        for other in inside.pop(path):
                            self._left.pop(other, None)
                for path in paths:
                    self._left[path] = serial
                    above = path.rpartition("/")[0]
                    while above:
                        inside.setdefault(above, set()).add(path)
                        above = above.rpartition("/")[0]
            for path in self._left:
                above, _, name = path.rpartition("/")
                self._names.setdefault(above, set()).add(name)
        return self._left

    def _takes_along(self, serial: int, path: str) -> bool:
        """Whether a call moved or removed a directory with everything in it, or may have.

        An undo that only restored a directory's modification time did not.
        """
        parts = tuple(path.split("/"))
        found = list(self._past.readable([serial]))
        return not found or any(
            record.is_whole for record in found[0].records if parts in record.paths
        )

    def _paths_of(self, serial: int) -> Iterable[str]:
        """Return the paths that a call changed, from its entry if the index does not have them."""
        paths = self._touched().get(serial, _MANY).paths
        if paths is not None:
            return paths
        return {"/".join(p) for delta in self._past.readable([serial]) for p in delta.after}

    def _names_left(self, parts: Parts) -> AbstractSet[str]:
        self._last_calls()
        return self._names.get("/".join(parts), set())

    def _touched(self) -> Mapping[int, Touched]:
        if self._index is None:
            self._index = self._past.index()
        return self._index

    # Undoing later calls

    def at(self, parts: Parts) -> Look:
        """Return a look that is right for a path and everything above it."""
        if self._whole is not None or self._first == self.serial:
            return self.look
        serials = tuple(sorted(self._concerning(parts), reverse=True))
        if serials not in self._parts:
            self._parts[serials] = self._without(serials)
        return self._parts[serials]

    def _without(self, serials: Iterable[int]) -> Layer:
        """Return the state without some calls, newest first."""
        layer = Layer(self._present)
        for serial in serials:
            layer = before_call(self._past, self._past.read(serial), layer)
        return layer

    def _concerning(self, parts: Parts) -> set[int]:
        """Return the later calls that may have changed a path or what is above it."""
        index = self._touched()
        later = [n for n in self._past.serials() if self.serial < n <= self._first]
        if any(index.get(n, _MANY).paths is None for n in later):
            return set(later)
        path = "/".join(parts)
        for serial in later:
            touched = index[serial]
            if not (touched.paths or frozenset()).isdisjoint(_at_and_above(parts)):
                if path in (touched.paths or ()) and not touched.moves:
                    return {serial}  # the first later call has what was there
                break
        found: set[int] = set()
        pending = [(parts, self.serial)]
        while pending:
            parts, after = pending.pop()
            above = _at_and_above(parts)
            for serial in later:
                touched = index[serial]
                if serial <= after or (touched.paths or frozenset()).isdisjoint(above):
                    continue
                found.add(serial)
                # What a call moved away is now where it moved it to.
                for origin, path in touched.moves:
                    here = tuple(origin.split("/"))
                    if parts[: len(here)] == here:
                        pending.append(((*path.split("/"), *parts[len(here) :]), serial))
        return found

    # Keeping up with the workspace

    def _refresh(self) -> None:
        """Undo, in the present, the calls that have been committed since the last look."""
        changed_at = self._past.changed_at()
        if changed_at == self._changed_at:
            return
        self._past.refresh()
        self._check_has_later()
        if self._past.last - self._first > _DEEPEST:
            self._begin()
        later = self._past.after(self._newest)
        if later:
            newest = following = Present(self._disk)
            # Newest first: what a call left is only seen without what later ones did.
            for serial in later:
                delta = self._past.read(serial)
                present = self._current if serial == later[-1] else Present(self._disk)
                present.precede(following, delta.records, replaced_by(self._past, delta))
                following = present
            self._current, self._newest = newest, later[0]
        self._changed_at = changed_at

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
