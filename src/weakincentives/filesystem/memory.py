"""A filesystem in memory: one persistent tree, so snapshots and views cost next to nothing.

The whole state is one reference to an immutable tree. A change builds the new directories on the
way to the root and then assigns once, so there is no half-done state to see or to undo.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from rpds import HashTrieMap, HashTrieSet

from weakincentives.core.clock import SYSTEM_CLOCK, Clock
from weakincentives.filesystem.base import Filesystem, Reads, reading
from weakincentives.filesystem.paths import (
    DEFAULT_ROOT,
    FileStat,
    NodeKind,
    Parts,
    encode_text,
    split_root,
)


# Nodes are compared with `is`: the same node is the same content, all the way down. They are
# tuples, which are made in half the time of a frozen dataclass: a write makes one per directory.
class _File(NamedTuple):
    data: bytes
    modified: float
    readonly: bool = False

    kind = "file"


class _Directory(NamedTuple):
    children: HashTrieMap[str, _Node]
    modified: float
    readonly: int = 0
    """How many read-only files are below: a whole directory can be checked without a walk."""

    kind = "directory"


_Node = _File | _Directory

_EMPTY: HashTrieMap[str, _Node] = HashTrieMap()


class _State(NamedTuple):
    """Everything that changes, and that a restore brings back, in one reference."""

    root: _Directory
    written: HashTrieSet[Parts] = HashTrieSet()
    """In a view, its write set."""
    made: HashTrieSet[Parts] = HashTrieSet()
    """In a view, the directories it made; others may put files into them."""

    def node(self, parts: Parts) -> _Node | None:
        node: _Node = self.root
        for name in parts:
            if isinstance(node, _File):
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            child = node.children.get(name)
            if child is None:
                return None
            node = child
        return node

    def read(self, parts: Parts) -> bytes:
        node: Any = self.root
        try:
            for name in parts:
                node = node.children[name]
            return node.data
        except (AttributeError, KeyError):  # a directory, nothing, or a file on the way
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT)) from None

    def link_target(self, parts: Parts) -> str:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # there are no links in memory

    def nodes(self, parts: Parts) -> list[tuple[str, _Node]]:
        node = self.node(parts)
        return list(node.children.items()) if isinstance(node, _Directory) else []

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        return [
            (name, "file" if isinstance(node, _File) else "directory")
            for name, node in self.nodes(parts)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    state: _State
    family: object
    reads: Reads | None
    """Identifies the view without keeping it alive."""


_MOST_NAMED = 8
"""Names shown in the repr."""


class MemoryFilesystem(Filesystem):
    """A :class:`~weakincentives.filesystem.Filesystem` that lives in memory.

    >>> fs = MemoryFilesystem({"src/app.py": "print('hi')"})
    >>> before = fs.snapshot()
    >>> fs.write("/workspace/notes.txt", "ship it")
    >>> fs.glob("**/*")
    ('notes.txt', 'src/app.py')
    >>> fs.restore(before)
    >>> fs.exists("notes.txt")
    False

    Args:
        files: Content by path, or just the paths of empty files.
        root: The virtual prefix below which absolute paths are understood.
        readonly: Files that may only be read.
    """

    def __init__(
        self,
        files: Mapping[str, str | bytes] | Iterable[str] = (),
        *,
        root: str = DEFAULT_ROOT,
        readonly: Iterable[str] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if isinstance(files, str) or isinstance(readonly, str):
            raise TypeError("files and readonly take several paths: put a single one in a list")
        self.read_only: str | None = None
        self._prefix = split_root(root)
        self._clock = clock
        self._lock = self._read_lock = threading.RLock()
        self._sealed = None
        self._family = object()
        self._parent: MemoryFilesystem | None = None
        self._reads = None
        self._base = _Directory(_EMPTY, clock.time())
        self._look = _State(self._base)
        if not isinstance(files, Mapping):
            files = dict.fromkeys(files, "")
        for path, content in cast("Mapping[str, str | bytes]", files).items():
            self._put(path, encode_text(content, path) if isinstance(content, str) else content)
        for path in readonly:
            self._set_readonly(path, True)

    def __repr__(self) -> str:
        names = ", ".join(sorted(self._look.root.children)[:_MOST_NAMED])
        more = len(self._look.root.children) - _MOST_NAMED
        return f"<MemoryFilesystem: {names or 'empty'}{f' and {more} more' if more > 0 else ''}>"

    def _stat(self, path: str, node: _Node) -> FileStat:
        if isinstance(node, _File):
            size, modified, readonly = len(node.data), node.modified, node.readonly
            return FileStat(path=path, kind="file", size=size, modified=modified, readonly=readonly)
        return FileStat(path=path, kind="directory", size=0, modified=node.modified, readonly=False)

    # Changing: one assignment each

    def _write(self, where: Parts, data: bytes) -> None:
        now = self._clock.time()
        self._assign(_put(self._look.root, where, _File(data, now), now), where)

    def _make_directory(self, where: Parts) -> None:
        root, written, made = self._look
        if self._look.node(where) is None:
            now = self._clock.time()
            root = _put(root, where, _Directory(_EMPTY, now), now)
        self._look = _State(root, written, made if self._reads is None else made.insert(where))

    def _remove(self, where: Parts) -> None:
        self._assign(_put(self._look.root, where, None, self._clock.time()), where)

    def _rename(self, origin: Parts, target: Parts) -> None:
        now = self._clock.time()
        root = _put(self._look.root, origin, None, now)
        self._assign(_put(root, target, self._look.node(origin), now), origin, target)

    def _copy(self, origin: Parts, target: Parts) -> None:
        node = self._look.node(origin)
        self._assign(_put(self._look.root, target, node, self._clock.time()), target)

    def _mark(self, where: Parts, node: _Node, readonly: bool) -> None:
        # A mark that is set already is no change: no view conflicts with it.
        if isinstance(node, _File) and node.readonly != readonly:
            marked = node._replace(readonly=readonly)
            self._assign(_put(self._look.root, where, marked, node.modified), where)

    def _assign(self, root: _Directory, *written: Parts) -> None:
        _, before, made = self._look
        self._look = _State(root, before if self._reads is None else before.update(written), made)

    # Taking part in a transaction

    def snapshot_here(self) -> object:
        return _Snapshot(self._look, self._family, self._reads)

    def restore_here(self, token: object) -> None:
        state, reads = self._own(token)
        with self._lock:
            if reads is self._reads:
                self._look = state
            else:
                # Taken of another view, or of the parent: anything may differ.
                self._note(())
                self._assign(state.root, ())

    @reading
    def changed_since(self, token: object) -> tuple[str, ...]:
        """Return the paths that differ from a snapshot, sorted. The cost follows what differs."""
        return tuple(sorted(_differing(self._own(token)[0].root, self._look.root)))

    def changed_here(self) -> tuple[str, ...]:
        """Return every path that this view has changed since it was forked, sorted."""
        return tuple(sorted(_differing(self._base, self._look.root))) if self._parent else ()

    def fork(self) -> MemoryFilesystem:
        view = MemoryFilesystem.__new__(MemoryFilesystem)
        view.__dict__.update(self.__dict__)
        view.read_only = view._sealed = None
        view._lock = view._read_lock = threading.RLock()
        view._parent = self
        view._reads = Reads()
        view._base = view._look.root
        view._look = _State(view._base)
        return view

    def check_conflicts(self, view: MemoryFilesystem) -> None:
        with self._lock, view._lock:
            self._check_merge(view)

    def merge(self, view: MemoryFilesystem) -> None:
        with self._lock, view._lock:
            reads = self._check_merge(view)
            changes = view._look
            if changes.written or changes.made:
                self.check_writable("merge")
            current, written, made = self._look
            unchanged = current is view._base
            root = changes.root if unchanged else _apply(changes, current, self._clock.time())
            if self._reads is not None:
                self._reads.include(reads)
                written, made = written.update(changes.written), made.update(changes.made)
            self._look = _State(root, written, made)

    def discard(self, view: MemoryFilesystem) -> tuple[str, ...]:
        """Drop a view. What a view of a view has read still counts: that may be why it failed."""
        with self._lock, view._lock:
            if self._reads is not None and view._reads is not None:
                self._reads.include(view._reads)
        return ()

    def _own(self, token: object) -> tuple[_State, Reads | None]:
        if not isinstance(token, _Snapshot) or token.family is not self._family:
            raise ValueError("the token is not a snapshot of this filesystem")
        return token.state, token.reads

    def _check_merge(self, view: MemoryFilesystem) -> Reads:
        """Return the view's read set, if nothing in it has changed."""
        reads = view._reads
        if view._parent is not self or reads is None:
            raise ValueError("only a view that was forked from this filesystem can be merged")
        base, current = view._base, self._look
        if current.root is not base:
            reads.check(partial(_differs, base, current.root), _State(base), current)
        return reads


# The tree. Nothing here recurses: directories may be nested to any depth.


def _find(root: _Directory, parts: Parts) -> tuple[_Node | None, int]:
    """Return the node at a path and how many names lead to it.

    Fewer names than the path has mean a file that blocks the path.
    """
    node: _Node = root
    for depth, name in enumerate(parts):
        if isinstance(node, _File):
            return node, depth
        child = node.children.get(name)
        if child is None:
            return None, 0
        node = child
    return node, len(parts)


def _at(root: _Directory, parts: Parts) -> _Node | None:
    node, depth = _find(root, parts)
    return node if depth == len(parts) else None


def _put(root: _Directory, parts: Parts, node: _Node | None, now: float) -> _Directory:
    """Return the tree with ``node`` at the path, or with nothing there for None.

    Missing directories on the way are made; the caller has checked that no file blocks it.
    """
    spine: list[tuple[_Directory, str, bool]] = []
    directory = root
    for name in parts[:-1]:
        child = directory.children.get(name)
        spine.append((directory, name, child is None))
        directory = child if isinstance(child, _Directory) else _Directory(_EMPTY, now)
    name, children = parts[-1], directory.children
    old = children.get(name)
    readonly = (0 if node is None else node.readonly) - (0 if old is None else old.readonly)
    children = children.discard(name) if node is None else children.insert(name, node)
    same_entries = (old is None) == (node is None)
    modified = directory.modified if same_entries else now
    directory = _Directory(children, modified, directory.readonly + readonly)
    for above, name, new in reversed(spine):
        children = above.children.insert(name, directory)
        directory = _Directory(children, now if new else above.modified, above.readonly + readonly)
    return directory


def _differing(old: _Node | None, new: _Node | None) -> Iterator[str]:
    """Yield the paths at which two trees differ, also those in added and deleted directories."""
    pending: list[tuple[str, _Node | None, _Node | None]] = [("", old, new)]
    while pending:
        path, old, new = pending.pop()
        if old is new:
            continue
        olds, news = (
            node.children if isinstance(node, _Directory) else _EMPTY for node in (old, new)
        )
        prefix = f"{path}/" if path else ""
        pending += ((prefix + name, olds.get(name), news.get(name)) for name in {*olds, *news})
        if isinstance(old, _File) and isinstance(new, _File):
            if (old.data, old.readonly) != (new.data, new.readonly):
                yield path
        elif type(old) is not type(new):
            yield path


# Merging


def _apply(changes: _State, current: _Directory, now: float) -> _Directory:
    changed, written, made = changes
    if () in written:
        return changed
    merged = current
    # A directory comes before what is below it.
    for parts in sorted(written):
        node = _at(changed, parts)
        if node is not None or _at(merged, parts) is not None:
            merged = _put(merged, parts, node, now)
    # A write makes its directory, which stays when the file is deleted again.
    for parts in {*made, *(parts[:-1] for parts in written)}:
        is_made = isinstance(_at(changed, parts), _Directory)
        if is_made and not isinstance(_at(merged, parts), _Directory):
            merged = _put(merged, parts, _Directory(_EMPTY, now), now)
    return merged


def _differs(base: _Directory, current: _Directory, parts: Parts) -> bool:
    was, was_depth = _find(base, parts)
    now, now_depth = _find(current, parts)
    return was is not now or was_depth != now_depth
