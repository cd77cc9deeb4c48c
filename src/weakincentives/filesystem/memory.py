"""A filesystem in memory: one persistent tree, so snapshots and views cost next to nothing.

The whole state is one reference to an immutable tree. A change builds the new directories on the
way to the root and then assigns once, so there is no half-done state to see or to undo.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from rpds import HashTrieMap, HashTrieSet

from weakincentives.call import current_view
from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import (
    AlreadyExists,
    FilesystemError,
)
from weakincentives.filesystem.patterns import (
    GlobPattern,
    check_limit,
    compile_regex,
    matching_lines,
)
from weakincentives.filesystem.protocol import (
    DEFAULT_ROOT,
    FileStat,
    GrepMatch,
    Parts,
    decode_text,
    directory_not_file,
    encode_text,
    file_not_directory,
    join_path,
    nothing_there,
    read_only,
    shown,
    split_path,
    split_root,
)
from weakincentives.filesystem.seen import Seen, check_open, conflict
from weakincentives.participant import Participant

__all__ = ["MemoryFilesystem"]

P = ParamSpec("P")
R = TypeVar("R")


# Nodes are compared with `is`: the same node is the same content, all the way down. They are
# tuples, which are made in half the time of a frozen dataclass: a write makes one per directory.
class _File(NamedTuple):
    data: bytes
    modified: float
    locked: bool = False
    """May only be read."""


class _Directory(NamedTuple):
    children: HashTrieMap[str, _Node]
    modified: float
    locked: int = 0
    """How many read-only files are below: a whole directory can be checked without a walk."""


_Node = _File | _Directory

_EMPTY: HashTrieMap[str, _Node] = HashTrieMap()


class _State(NamedTuple):
    """All that changes and all that a restore brings back, in one reference."""

    root: _Directory
    written: HashTrieSet[Parts] = HashTrieSet()
    """In a view, the paths where its node, or that there is none, is what counts."""
    made: HashTrieSet[Parts] = HashTrieSet()
    """In a view, the paths asked to be directories; what others put there is welcome."""


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    state: _State
    family: object
    seen: Seen | None
    """Tells the view it was taken of, and does not keep that view alive."""


def _reading(
    operation: Callable[Concatenate[MemoryFilesystem, P], R],
) -> Callable[Concatenate[MemoryFilesystem, P], R]:
    """Run the operation on the view that the call under way works on."""

    @functools.wraps(operation)
    def on_current_view(self: MemoryFilesystem, *args: P.args, **kwargs: P.kwargs) -> R:
        return operation(current_view(self), *args, **kwargs)

    return on_current_view


def _writing(
    operation: Callable[Concatenate[MemoryFilesystem, P], R],
) -> Callable[Concatenate[MemoryFilesystem, P], R]:
    """Run the operation on the current view, if it may be changed, with the view's lock held.

    The check and the change are under one lock: once ``seal`` has returned, nothing slips through.
    """

    @functools.wraps(operation)
    def on_current_view(self: MemoryFilesystem, *args: P.args, **kwargs: P.kwargs) -> R:
        view = current_view(self)
        with view._lock:  # pyright: ignore[reportPrivateUsage]
            view._check_writable(operation.__name__, *args)  # pyright: ignore[reportPrivateUsage]
            return operation(view, *args, **kwargs)

    return on_current_view


class MemoryFilesystem(Participant):
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
        # Reentrant: a log handler or finaliser that uses the filesystem must not hang.
        self._lock = threading.RLock()
        self._sealed: str | None = None
        self._family = object()
        self._parent: MemoryFilesystem | None = None
        self._seen: Seen | None = None
        self._base = _Directory(_EMPTY, clock.time())
        self._state = _State(self._base)
        if not isinstance(files, Mapping):
            files = dict.fromkeys(files, "")
        for path, content in cast("Mapping[str, str | bytes]", files).items():
            data = encode_text(content, path) if isinstance(content, str) else content
            self._store(self._parts(path), data)
        for path in readonly:
            self._mark(self._parts(path), True)

    # Reading

    def normalize(self, path: str) -> str:
        """Return the one relative spelling of a path; ``"."`` is the root."""
        return join_path(self._parts(path))

    @_reading
    def read(self, path: str) -> str:
        """Return a file's text, exactly as stored; one that is not UTF-8 raises ``BinaryFile``."""
        parts = self._parts(path)
        return decode_text(self._file(parts).data, join_path(parts))

    @_reading
    def read_bytes(self, path: str) -> bytes:
        """Return a file's bytes."""
        return self._file(self._parts(path)).data

    @_reading
    def exists(self, path: str) -> bool:
        """Tell whether there is a file or directory at the path."""
        parts = self._parts(path)
        with self._lock:
            node, depth = _find(self._state.root, parts)
            if self._seen is not None:
                directory = isinstance(node, _Directory)
                (self._seen.glimpsed if directory else self._seen.touched).add(parts)
        return node is not None and depth == len(parts)

    @_reading
    def is_readonly(self, path: str) -> bool:
        """Tell whether the file may only be read; False for directories and missing files."""
        parts = self._parts(path)
        node, depth = self._look(parts)
        return isinstance(node, _File) and depth == len(parts) and node.locked

    @_reading
    def stat(self, path: str) -> FileStat:
        """Return kind, size, time and read-only mark of a file or directory."""
        parts = self._parts(path)
        return _stat(join_path(parts), self._node(parts))

    @_reading
    def list(self, path: str = ".") -> tuple[FileStat, ...]:
        """Return a directory's entries, sorted by path."""
        parts = self._parts(path)
        children = self._directory(parts).children.items()
        prefix = _prefix(parts)
        return tuple(_stat(prefix + name, node) for name, node in sorted(children, key=_name))

    @_reading
    def glob(self, pattern: str, path: str = ".") -> tuple[str, ...]:
        """Return the files below ``path`` that match, sorted.

        ``*``, ``?`` and ``[a-z]`` stay within one name; ``**`` is any number of directories,
        also none. Names that start with a dot are like any other.
        """
        glob = GlobPattern(pattern, self._prefix)
        parts = self._parts(path)
        return tuple(sorted(path for path, _ in _walk(self._directory(parts), parts, glob)))

    @_reading
    def grep(
        self, pattern: str, path: str = ".", *, glob: str = "**/*", limit: int | None = None
    ) -> tuple[GrepMatch, ...]:
        """Return the lines in which the regular expression is found, by path and line.

        ``path`` is a directory, or one file. Binary files are left out.
        """
        check_limit(limit)
        regex = compile_regex(pattern)
        compiled = GlobPattern(glob, self._prefix)
        parts = self._parts(path)
        node = self._node(parts)
        files: Iterable[tuple[str, _File]] = (
            [(join_path(parts), node)]
            if isinstance(node, _File)
            else sorted(_walk(node, parts, compiled), key=_name)
        )
        matches: list[GrepMatch] = []
        for name, file in files:
            for number, line in matching_lines(file.data, regex.search):
                if len(matches) == limit:
                    return tuple(matches)
                matches.append(GrepMatch(path=name, line_number=number, line=line))
        return tuple(matches)

    @_reading
    def search(self, query: str, limit: int | None = None) -> tuple[str, ...]:
        """Return the files whose name contains ``query`` in any case, sorted by path."""
        check_limit(limit)
        wanted = query.casefold()
        found = (
            path
            for path, _ in _walk(self._directory(()), (), GlobPattern("**/*"))
            if wanted in path.rpartition("/")[2].casefold()
        )
        return tuple(sorted(found)[:limit])

    # Writing

    @_writing
    def write(self, path: str, content: str) -> None:
        """Make the file hold exactly this text, as UTF-8. Missing parent directories are made."""
        self._store(self._parts(path), encode_text(content, path))

    @_writing
    def write_bytes(self, path: str, content: bytes) -> None:
        """Make the file hold exactly these bytes. Missing parent directories are made."""
        self._store(self._parts(path), content)

    @_writing
    def append(self, path: str, content: str) -> None:
        """Add text at the end of a file, which is made if missing."""
        parts = self._parts(path)
        added = encode_text(content, path)
        file = self._changeable(parts)
        self._store(parts, added if file is None else file.data + added)

    @_writing
    def set_readonly(self, path: str, readonly: bool = True) -> None:
        """Mark a file as one that may only be read, or take the mark away."""
        self._mark(self._parts(path), readonly)

    @_writing
    def mkdir(self, path: str) -> None:
        """Make a directory and its missing parents; one that exists is fine."""
        parts = self._parts(path)
        root, written, made = self._state
        node, depth = _find(root, parts)
        if isinstance(node, _File):
            self._look(parts)
            raise file_not_directory(join_path(parts[:depth]))
        if node is None:
            now = self._clock.time()
            root = _put(root, parts, _Directory(_EMPTY, now), now)
        if self._seen is not None:
            self._seen.cleared.add(parts)
            made = made.insert(parts)
        self._state = _State(root, written, made)

    @_writing
    def move(self, source: str, destination: str, *, overwrite: bool = False) -> None:
        """Give a file, or a directory with all that is in it, another path.

        ``overwrite`` lets a file take the place of a file, and a directory that of a directory,
        as a whole.
        """
        origin, target = self._parts(source), self._parts(destination)
        node = self._check_transfer(origin, target, overwrite)
        _check_unlocked(node, origin)
        now = self._clock.time()
        root = _put(self._state.root, origin, None, now)
        self._assign(_put(root, target, node, now), origin, target)

    @_writing
    def copy(self, source: str, destination: str, *, overwrite: bool = False) -> None:
        """Copy a file or a whole directory: content, times and read-only marks.

        ``overwrite`` is as in :meth:`move`.
        """
        origin, target = self._parts(source), self._parts(destination)
        node = self._check_transfer(origin, target, overwrite)
        self._assign(_put(self._state.root, target, node, self._clock.time()), target)

    @_writing
    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or directory; one that is not empty needs ``recursive=True``."""
        parts = self._parts(path)
        if not parts:
            raise FilesystemError("The root directory cannot be deleted. Delete what is in it")
        node = self._node(parts)
        if isinstance(node, _Directory) and len(node.children) and not recursive:
            raise FilesystemError(
                f"{shown(join_path(parts))} is not empty. Pass recursive=True to delete it with"
                " all that is in it"
            )
        _check_unlocked(node, parts)
        self._assign(_put(self._state.root, parts, None, self._clock.time()), parts)

    # Going back

    @_reading
    def snapshot(self) -> object:
        """Return a token for the present state. It costs one small object, however many files."""
        return self.snapshot_here()

    @_writing
    def restore(self, token: object) -> None:
        """Go back to the state the token stands for, which may be older or newer."""
        self.restore_here(token)

    def snapshot_here(self) -> object:
        """Like ``snapshot``, of exactly this object, whichever call is under way."""
        return _Snapshot(self._state, self._family, self._seen)

    def restore_here(self, token: object) -> None:
        """Like ``restore``, of exactly this object, also when it is sealed or read-only.

        For the runtime, which undoes what a call did after the call has ended.
        """
        if not isinstance(token, _Snapshot) or token.family is not self._family:
            raise ValueError("the token is not a snapshot of this filesystem")
        with self._lock:
            if token.seen is self._seen:
                self._state = token.state
            else:
                # Taken of another view, or of what this is a view of: anything may differ.
                self._look(())
                self._assign(token.state.root, ())

    @_reading
    def changed_since(self, token: object) -> tuple[str, ...]:
        """Return the paths that differ from a snapshot, sorted; only what differs is looked at."""
        if not isinstance(token, _Snapshot) or token.family is not self._family:
            raise ValueError("the token is not a snapshot of this filesystem")
        return tuple(sorted(_differing(token.state.root, self._state.root)))

    def changed_here(self) -> tuple[str, ...]:
        """Return every path that this view has changed since it was forked, sorted."""
        if self._parent is None:
            return ()
        with self._lock:
            return tuple(sorted(_differing(self._base, self._state.root)))

    # Views

    def fork(self) -> MemoryFilesystem:
        """Return a private view: it starts as this is now, and neither sees the other's changes."""
        view = MemoryFilesystem.__new__(MemoryFilesystem)
        view.__dict__.update(self.__dict__)
        view.read_only = view._sealed = None
        view._lock = threading.RLock()
        view._parent = self
        view._seen = Seen()
        view._base = view._state.root
        view._state = _State(view._base)
        return view

    def check_conflicts(self, view: MemoryFilesystem) -> None:
        """Raise MergeConflict if something the view depends on has changed here since the fork."""
        with self._lock, view._lock:
            self._check_merge(view)

    def merge(self, view: MemoryFilesystem) -> None:
        """Bring a view's changes in, all of them or none. A sealed view can be merged.

        Raises:
            MergeConflict: Something the view read or changed has changed here since the fork.
        """
        with self._lock, view._lock:
            seen = self._check_merge(view)
            changes = view._state
            if changes.written or changes.made:
                self._check_writable("merge")
            current, written, made = self._state
            unchanged = current is view._base
            root = changes.root if unchanged else _apply(changes, current, self._clock.time())
            if self._seen is not None:
                self._seen.include(seen)
                written, made = written.update(changes.written), made.update(changes.made)
            self._state = _State(root, written, made)

    def discard(self, view: MemoryFilesystem) -> tuple[str, ...]:
        """Let go of a view that is not merged; returns what could not be undone, which is nothing.

        A view of a view: what it was told still counts, since it may be why it was let go.
        """
        with self._lock, view._lock:
            if self._seen is not None and view._seen is not None:
                self._seen.include(view._seen)
        return ()

    def _check_merge(self, view: MemoryFilesystem) -> Seen:
        """Return what the view depends on, if all of that is as it was."""
        seen = view._seen
        if view._parent is not self or seen is None:
            raise ValueError("only a view that was forked from this filesystem can be merged")
        if self._state.root is not view._base:
            _check_conflicts(seen, view._base, self._state.root)
        return seen

    def seal(self, reason: str) -> None:
        """Refuse every later change with ``ViewClosed`` and log it; reading still works."""
        with self._lock:
            if self._sealed is None:
                self._sealed = reason

    @property
    def touched(self) -> frozenset[str]:
        """The paths a view has read or changed, directories standing for all below them."""
        with self._lock:
            seen = self._seen or Seen()
            return _joined(seen.touched | seen.glimpsed | seen.cleared)

    @property
    def written(self) -> frozenset[str]:
        """The paths a view has changed, directories standing for all below them."""
        state = self._state
        return _joined(state.written) | _joined(state.made)

    # One step of an operation each. All take normalised paths and act on exactly this object.

    def _parts(self, path: str) -> Parts:
        return split_path(path, self._prefix)

    def _look(self, parts: Parts) -> tuple[_Node | None, int]:
        """Find what is at a path, and note that a view depends on it."""
        if self._seen is None:
            return _find(self._state.root, parts)
        with self._lock:
            self._seen.touched.add(parts)
            return _find(self._state.root, parts)

    def _node(self, parts: Parts) -> _Node:
        node, depth = self._look(parts)
        if node is None:
            raise nothing_there(join_path(parts))
        if depth < len(parts):
            raise file_not_directory(join_path(parts[:depth]))
        return node

    def _file(self, parts: Parts) -> _File:
        node = self._node(parts)
        if isinstance(node, _Directory):
            raise directory_not_file(join_path(parts))
        return node

    def _directory(self, parts: Parts) -> _Directory:
        node = self._node(parts)
        if isinstance(node, _File):
            raise file_not_directory(join_path(parts))
        return node

    def _changeable(self, parts: Parts) -> _File | None:
        """Return the file to be changed, or None when it is still to be made."""
        node, depth = self._look(parts)
        if node is None:
            return None
        if depth < len(parts):
            raise file_not_directory(join_path(parts[:depth]))
        if isinstance(node, _Directory):
            raise directory_not_file(join_path(parts))
        if node.locked:
            raise read_only(join_path(parts))
        return node

    def _store(self, parts: Parts, content: bytes) -> None:
        self._changeable(parts)
        # A bytearray or memoryview could change later on.
        data = content if type(content) is bytes else bytes(memoryview(content))
        now = self._clock.time()
        self._assign(_put(self._state.root, parts, _File(data, now), now), parts)

    def _mark(self, parts: Parts, readonly: bool) -> None:
        file = self._file(parts)
        if file.locked == readonly:
            return  # nobody can tell, so nobody's view is to conflict with it
        marked = _File(file.data, file.modified, readonly)
        self._assign(_put(self._state.root, parts, marked, file.modified), parts)

    def _check_transfer(self, origin: Parts, target: Parts, overwrite: bool) -> _Node:
        """Return what is at ``origin`` if it can be put at ``target``."""
        if not origin:
            raise FilesystemError(
                "The root directory cannot be moved or copied. Name what is in it"
            )
        node = self._node(origin)
        there, depth = self._look(target)
        old, new = shown(join_path(origin)), shown(join_path(target))
        if there is not None and depth < len(target):
            raise file_not_directory(join_path(target[:depth]))
        if target != origin and target[: len(origin)] == origin:
            raise FilesystemError(f"{old} cannot be put into itself, at {new}")
        if there is None:
            return node
        if not overwrite:
            raise AlreadyExists(f"{new} exists. Pass overwrite=True to replace it")
        if target != origin and origin[: len(target)] == target:
            raise FilesystemError(f"{new} cannot be replaced by {old}, which is in it")
        if isinstance(there, _Directory) and isinstance(node, _File):
            raise directory_not_file(join_path(target))
        if isinstance(there, _File) and isinstance(node, _Directory):
            raise file_not_directory(join_path(target))
        _check_unlocked(there, target)
        return node

    def _check_writable(self, operation: str, *args: object) -> None:
        check_open(operation, args, self._sealed, self.read_only)

    def _assign(self, root: _Directory, *written: Parts) -> None:
        """Make ``root`` the state; a view also notes where that is a change."""
        _, before, made = self._state
        self._state = _State(root, before if self._seen is None else before.update(written), made)


# The tree. Nothing here recurses: a directory may be moved into another as deep as one likes.


def _find(root: _Directory, parts: Parts) -> tuple[_Node | None, int]:
    """Return the node at a path and how many names lead to it.

    Fewer names than the path has mean a file that bars the way.
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


def _put(root: _Directory, parts: Parts, node: _Node | None, now: float) -> _Directory:
    """Return the tree with ``node`` at the path, or with nothing there for None.

    Missing directories on the way are made; that no file bars the way is checked before.
    """
    spine: list[tuple[_Directory, str, bool]] = []
    directory = root
    for name in parts[:-1]:
        child = directory.children.get(name)
        spine.append((directory, name, child is None))
        directory = child if isinstance(child, _Directory) else _Directory(_EMPTY, now)
    name, children = parts[-1], directory.children
    old = children.get(name)
    locked = (0 if node is None else node.locked) - (0 if old is None else old.locked)
    children = children.discard(name) if node is None else children.insert(name, node)
    same_entries = (old is None) == (node is None)
    modified = directory.modified if same_entries else now
    directory = _Directory(children, modified, directory.locked + locked)
    for above, name, new in reversed(spine):
        children = above.children.insert(name, directory)
        directory = _Directory(children, now if new else above.modified, above.locked + locked)
    return directory


def _walk(directory: _Directory, parts: Parts, glob: GlobPattern) -> Iterator[tuple[str, _File]]:
    """Yield path and node of each file below a directory that matches, in no order."""
    pending = [(directory, _prefix(parts), glob.start(parts))]
    while pending:
        directory, prefix, positions = pending.pop()
        names = glob.names(positions)
        children = directory.children
        for name in children if names is None else names:
            child = children.get(name)
            if child is None:
                continue
            reached = glob.step(positions, name)
            if isinstance(child, _Directory):
                if reached:
                    pending.append((child, f"{prefix}{name}/", reached))
            elif glob.matched(reached):
                yield prefix + name, child


def _differing(old: _Node | None, new: _Node | None) -> Iterator[str]:
    """Yield the paths at which two trees differ, those in directories that came or went too."""
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
            if (old.data, old.locked) != (new.data, new.locked):
                yield path
        elif type(old) is not type(new):
            yield path


def _stat(path: str, node: _Node) -> FileStat:
    if isinstance(node, _Directory):
        return FileStat(path=path, kind="directory", size=0, modified=node.modified, readonly=False)
    return FileStat(
        path=path, kind="file", size=len(node.data), modified=node.modified, readonly=node.locked
    )


def _check_unlocked(node: _Node, parts: Parts) -> None:
    if node.locked:
        name = join_path(parts)
        raise read_only(name if isinstance(node, _File) else f"A file in {name}")


def _joined(paths: Iterable[Parts]) -> frozenset[str]:
    return frozenset(join_path(parts) for parts in paths)


def _prefix(parts: Parts) -> str:
    return f"{join_path(parts)}/" if parts else ""


def _name(entry: tuple[str, object]) -> str:
    return entry[0]


# Merging


def _check_conflicts(seen: Seen, base: _Directory, current: _Directory) -> None:
    """Raise if anything the view depends on is not what it was when the view was forked."""
    changed = {parts for parts in seen.touched if not _unchanged(base, current, parts)}
    changed |= {
        parts
        for parts in seen.glimpsed
        if not _unchanged(base, current, parts)
        and not (_is_directory(base, parts) and _is_directory(current, parts))
    }
    changed |= {
        parts
        for parts in seen.cleared
        if isinstance(_find(current, parts)[0], _File) and not _unchanged(base, current, parts)
    }
    if changed:
        raise conflict(changed)


def _apply(changes: _State, current: _Directory, now: float) -> _Directory:
    """Return the current tree with a view's changes made to it."""
    changed, written, made = changes
    if () in written:
        return changed
    merged = current
    # A directory comes before what is below it.
    for parts in sorted(written):
        node, depth = _find(changed, parts)
        if node is not None and depth == len(parts):
            merged = _put(merged, parts, node, now)
        elif _is_there(merged, parts):
            merged = _put(merged, parts, None, now)
    # A write makes its directory, which stays when the file is deleted again.
    for parts in {*made, *(parts[:-1] for parts in written)}:
        if _is_directory(changed, parts) and not _is_directory(merged, parts):
            merged = _put(merged, parts, _Directory(_EMPTY, now), now)
    return merged


def _unchanged(base: _Directory, current: _Directory, parts: Parts) -> bool:
    was, was_depth = _find(base, parts)
    now, now_depth = _find(current, parts)
    return was is now and was_depth == now_depth


def _is_there(root: _Directory, parts: Parts) -> bool:
    node, depth = _find(root, parts)
    return node is not None and depth == len(parts)


def _is_directory(root: _Directory, parts: Parts) -> bool:
    # Only a file can bar the way, so a directory that is found is the one asked for.
    return isinstance(_find(root, parts)[0], _Directory)
