"""Every operation on files, once: path, look up, check, and then the backend acts.

A backend gives a ``_look``, which reads by path, and six steps that change it. In memory both work
on one persistent tree. On disk they are the directory and its journal or, for a private view, a
layer over the directory and the steps to replay when the view is merged.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from weakincentives.core.call import current_view
from weakincentives.errors import (
    AlreadyExists,
    FilesystemError,
    MergeConflict,
    NotADirectory,
    ViewClosed,
    WinkError,
)
from weakincentives.filesystem.paths import (
    BARRED,
    FileStat,
    GrepMatch,
    NodeKind,
    Parts,
    directory_not_file,
    encode_text,
    escapes,
    file_not_directory,
    join_path,
    not_text,
    nothing_there,
    read_only,
    resolve,
    shown,
    split_path,
)
from weakincentives.filesystem.patterns import (
    GlobPattern,
    check_limit,
    compile_regex,
    matching_lines,
)
from weakincentives.session.participant import Participant

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

RETRIES = 10
"""How often a path is looked up again when links on it come and go."""


class Node(Protocol):
    """What is at a path, links not followed."""

    @property
    def kind(self) -> NodeKind: ...

    @property
    def readonly(self) -> int:
        """Whether a file is read-only. A directory may count the read-only files below it."""
        ...


class Look(Protocol[T]):
    """Reads by canonical path. Errors are the system's: ELOOP or ENOTDIR for a blocked path."""

    def node(self, parts: Parts) -> T | None:
        """Return what is at a path; None for nothing."""
        ...

    def read(self, parts: Parts) -> bytes:
        """Return the bytes of a regular file."""
        ...

    def link_target(self, parts: Parts) -> str:
        """Return the text of a symbolic link."""
        ...

    def nodes(self, parts: Parts) -> list[tuple[str, T]]:
        """Return everything in a directory."""
        ...

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        """Return the names in a directory with their kinds: cheaper than the nodes."""
        ...


@dataclass(slots=True)
class Reads:
    """The read set of a private view. It only grows: a rollback does not undo a read."""

    touched: set[Parts] = field(default_factory=set[Parts])
    """Read or written: nothing at the path or below it may have changed."""
    glimpsed: set[Parts] = field(default_factory=set[Parts])
    """Seen to be a directory: it must still be one."""
    cleared: set[Parts] = field(default_factory=set[Parts])
    """Made a directory: no file may have appeared there, or on the way."""

    def include(self, other: Reads) -> None:
        """Add another view's read set."""
        self.touched |= other.touched
        self.glimpsed |= other.glimpsed
        self.cleared |= other.cleared

    def check(self, differs: Callable[[Parts], bool], base: Look[Any], current: Look[Any]) -> None:
        """Raise MergeConflict if anything in the read set has changed since the fork.

        Args:
            differs: Tells whether a path, or anything below it, has changed.
            base: What the view was forked from.
            current: What it is merged into.
        """
        changed = {parts for parts in self.touched if differs(parts)}
        changed |= {
            parts
            for parts in self.glimpsed
            if differs(parts)
            and not (kind_at(base, parts) == kind_at(current, parts) == "directory")
        }
        changed |= {
            parts
            for parts in self.cleared
            if differs(parts) and kind_at(current, parts) not in (None, "directory")
        }
        if changed:
            paths = sorted(map(join_path, changed))
            names = ", ".join(map(shown, paths))
            raise MergeConflict(f"Changed by another call in the meantime: {names}", paths)


def kind_at(look: Look[Any], parts: Parts) -> NodeKind | None:
    """Return the kind of what is at a path, None for nothing, "other" for a blocked path."""
    try:
        node = look.node(parts)
    except OSError:
        return "other"
    return None if node is None else node.kind


def reading(operation: F) -> F:
    """Run the operation on the view that the current call works on."""

    @functools.wraps(operation)
    def on_current_view(self: Filesystem, *args: Any, **kwargs: Any) -> Any:
        view = current_view(self)
        try:
            if view._reads is None:  # pyright: ignore[reportPrivateUsage]
                return operation(view, *args, **kwargs)
            # What a private view sees must not change under it.
            with view._read_lock:  # pyright: ignore[reportPrivateUsage]
                return operation(view, *args, **kwargs)
        except WinkError:
            raise
        except OSError as error:
            raise worded(error, "read", args) from error

    return cast(F, on_current_view)


def writing(operation: F) -> F:
    """Run the operation on the current view if it is writable: as a whole, or not at all."""
    name = operation.__name__

    @functools.wraps(operation)
    def on_current_view(self: Filesystem, *args: Any, **kwargs: Any) -> Any:
        view = current_view(self)
        try:
            do = functools.partial(operation, view, *args, **kwargs)
            return view._change(do, name)  # pyright: ignore[reportPrivateUsage]
        except WinkError:
            raise
        except OSError as error:
            raise worded(error, "changed", args) from error

    return cast(F, on_current_view)


def worded(error: OSError, what: str, args: tuple[object, ...] = ()) -> Exception:
    """Return the system's error in words for the model."""
    if error.errno == errno.EBADF:
        return ViewClosed("this filesystem was closed")
    path = args[0] if args and isinstance(args[0], str) else "."
    if error.errno == errno.ENOENT:
        return nothing_there(path)
    reason = os.strerror(error.errno) if error.errno else str(error)
    return FilesystemError(f"{shown(path)} could not be {what}: {reason}")


class Filesystem(Participant):
    """Files below one root, read and changed by path.

    Paths are relative to the root, or absolute below a virtual prefix: ``a.txt``, ``./a.txt``,
    ``x/../a.txt`` and ``/workspace/a.txt`` are one file. For files on disk, absolute paths below
    the directory itself work as well. Every path a method returns is relative.
    Nothing ever resolves outside the root.

    An operation takes effect as a whole or raises and changes nothing. What a model may have caused
    raises a :class:`~weakincentives.errors.FilesystemError` worded for it.
    """

    _prefix: Parts
    _real: tuple[Parts, ...] = ()
    """The paths of the root itself, which commands use: absolute paths may start with them."""
    _read_lock: Any
    """Held while a private view is read."""
    _reads: Reads | None
    """The read set of a private view; None for anything else."""
    _look: Any
    """A ``Look`` at what there is."""

    # A backend implements these: one step each, given canonical paths. Missing parent directories
    # are made.

    def _write(self, where: Parts, data: bytes) -> None:
        raise NotImplementedError

    def _make_directory(self, where: Parts) -> None:
        raise NotImplementedError

    def _remove(self, where: Parts) -> None:
        raise NotImplementedError

    def _rename(self, origin: Parts, target: Parts) -> None:
        raise NotImplementedError

    def _copy(self, origin: Parts, target: Parts) -> None:
        raise NotImplementedError

    def _mark(self, where: Parts, node: Any, readonly: bool) -> None:
        """Mark a file as read-only, or remove the mark."""
        raise NotImplementedError

    def _stat(self, path: str, node: Any) -> FileStat:
        raise NotImplementedError

    # A backend may override these.

    def _change(self, do: Callable[[], T], operation: str) -> T:
        """Check that this is writable, and change it: as a whole, or not at all."""
        with self._lock:
            if self._sealed is not None or self.read_only is not None:
                self.check_writable(operation)
            return do()

    def _below_root(self, target: str) -> list[str] | None:
        """Return the names that an absolute link has below the root; None for one outside."""
        return None

    def _shown(self, entries: Sequence[tuple[str, T]]) -> Sequence[tuple[str, T]]:
        """Return those entries of a directory that are shown."""
        return entries

    def _holds_readonly(self, where: Parts) -> bool:
        """Tell whether a read-only file is below a directory whose node does not count them."""
        return False

    def _check_put(self, where: Parts, node: Any, *, directory: bool = False) -> None:
        """Raise if nothing may be put at a path, or changed there."""

    def _check_gone(self, where: Parts) -> None:
        """Raise if a path, or anything below it, may not be removed or replaced."""

    def _check_moved(self, origin: Parts, target: Parts, *, copied: bool) -> None:
        """Raise if what is at a path may not be put at another."""

    # Reading

    def normalize(self, path: str) -> str:
        """Return the one relative spelling of a path; ``"."`` is the root."""
        return join_path(self._parts(path))

    @reading
    def real_path(self, path: str, *, follow: bool = True) -> str:
        """Return the path with its links followed; that of its last name only if ``follow``."""
        return join_path(self._find(self._parts(path), follow=follow)[0])

    @reading
    def read(self, path: str) -> str:
        """Return a file's text, exactly as stored; one that is not UTF-8 raises ``BinaryFile``."""
        parts = split_path(path, self._prefix, self._real)
        try:
            return self._content(parts).decode()
        except UnicodeDecodeError as error:
            raise not_text(join_path(parts)) from error

    @reading
    def read_bytes(self, path: str) -> bytes:
        """Return a file's bytes."""
        return self._content(split_path(path, self._prefix, self._real))

    @reading
    def exists(self, path: str) -> bool:
        """Tell whether there is a file or directory at the path."""
        parts = self._parts(path)
        try:
            where, node = self._find(parts, note=False)
        except NotADirectory:
            self._note(parts)
            return False
        if self._reads is not None:
            is_directory = node is not None and node.kind == "directory"
            (self._reads.glimpsed if is_directory else self._reads.touched).add(where)
        return node is not None

    @reading
    def is_readonly(self, path: str) -> bool:
        """Tell whether the file is read-only; False for directories and missing files."""
        try:
            _, node = self._find(self._parts(path))
        except NotADirectory:
            return False
        return node is not None and node.kind == "file" and bool(node.readonly)

    @reading
    def stat(self, path: str) -> FileStat:
        """Return kind, size, time and read-only mark of a file or directory."""
        parts = self._parts(path)
        where, node = self._existing(parts, follow=False)
        return self._stat(join_path(parts), self._followed(where, node))

    @reading
    def list(self, path: str = ".") -> tuple[FileStat, ...]:
        """Return a directory's entries, sorted by path."""
        parts = self._parts(path)
        where = self._directory(parts)
        prefix = _prefix(parts)
        return tuple(
            self._stat(prefix + name, self._followed((*where, name), node))
            for name, node in sorted(self._shown(self._look.nodes(where)), key=_name)
        )

    @reading
    def glob(self, pattern: str, path: str = ".") -> tuple[str, ...]:
        """Return the files below ``path`` that match, sorted.

        ``*``, ``?`` and ``[a-z]`` stay within one name; ``**`` is any number of directories,
        also none. Names that start with a dot are like any other. Links to directories are not
        followed.
        """
        glob = GlobPattern(pattern, self._prefix, self._real)
        parts = self._parts(path)
        return tuple(sorted(path for path, _ in self._walk(parts, self._directory(parts), glob)))

    @reading
    def grep(
        self, pattern: str, path: str = ".", *, glob: str = "**/*", limit: int | None = None
    ) -> tuple[GrepMatch, ...]:
        """Return the lines that match the regular expression, by path and line.

        ``path`` is a directory, or one file. Binary files are left out.
        """
        check_limit(limit)
        regex = compile_regex(pattern)
        compiled = GlobPattern(glob, self._prefix, self._real)
        parts = self._parts(path)
        where, node = self._existing(parts)
        files = [(join_path(parts), where)]
        if node.kind == "directory":
            files = sorted(self._walk(parts, where, compiled), key=_name)
        elif node.kind != "file":
            raise _not_a_file(parts, node)
        matches: list[GrepMatch] = []
        for name, file in files:
            try:
                data = self._look.read(file)
            except OSError:
                continue  # deleted meanwhile, or not readable
            for number, line in matching_lines(data, regex.search):
                if len(matches) == limit:
                    return tuple(matches)
                matches.append(GrepMatch(path=name, line_number=number, line=line))
        return tuple(matches)

    @reading
    def search(self, query: str, limit: int | None = None) -> tuple[str, ...]:
        """Return the files whose name contains ``query`` in any case, sorted by path."""
        check_limit(limit)
        wanted = query.casefold()
        found = (
            path
            for path, _ in self._walk((), self._directory(()), GlobPattern("**/*"))
            if wanted in path.rpartition("/")[2].casefold()
        )
        return tuple(sorted(found)[:limit])

    # Writing

    @writing
    def write(self, path: str, content: str) -> None:
        """Make the file hold exactly this text, as UTF-8. Missing parent directories are made."""
        self._put(path, encode_text(content, path))

    @writing
    def write_bytes(self, path: str, content: bytes) -> None:
        """Make the file hold exactly these bytes. Missing parent directories are made."""
        # A bytearray or memoryview could change later on.
        self._put(path, content if type(content) is bytes else bytes(memoryview(content)))

    def _put(self, path: str, data: bytes) -> None:
        where, _ = self._changeable(split_path(path, self._prefix, self._real))
        self._write(where, data)

    @writing
    def append(self, path: str, content: str) -> None:
        """Add text at the end of a file, which is made if missing."""
        added = encode_text(content, path)
        where, node = self._changeable(self._parts(path))
        self._write(where, added if node is None else self._look.read(where) + added)

    @writing
    def set_readonly(self, path: str, readonly: bool = True) -> None:
        """Mark a file as read-only, or remove the mark."""
        self._set_readonly(path, readonly)

    def _set_readonly(self, path: str, readonly: bool) -> None:
        parts = self._parts(path)
        where, node = self._existing(parts)
        if node.kind != "file":
            raise _not_a_file(parts, node)
        self._check_put(where, node)
        self._mark(where, node, readonly)

    @writing
    def mkdir(self, path: str) -> None:
        """Make a directory and its missing parents; one that exists is fine."""
        parts = self._parts(path)
        where, node = self._find(parts, note=False)
        if node is not None and node.kind != "directory":
            self._note(where)
            raise file_not_directory(join_path(parts))
        if self._reads is not None:
            self._reads.cleared.add(where)
        if node is None:
            self._check_put(where, None, directory=True)
        if node is None or self._reads is not None:
            self._make_directory(where)

    @writing
    def move(self, source: str, destination: str, *, overwrite: bool = False) -> None:
        """Move a file, or a directory with everything in it, to another path.

        ``overwrite`` lets a file replace a file, and a directory replace a directory as a whole. A
        symbolic link is moved itself, not its target.
        """
        origin, target, node = self._transfer(source, destination, overwrite, copied=False)
        self._check_unlocked(origin, node)
        if origin != target:
            self._check_gone(origin)
            self._check_moved(origin, target, copied=False)
            self._rename(origin, target)

    @writing
    def copy(self, source: str, destination: str, *, overwrite: bool = False) -> None:
        """Copy a file or a whole directory: content, times and read-only marks.

        ``overwrite`` is as in :meth:`move`.
        """
        origin, target, _ = self._transfer(source, destination, overwrite, copied=True)
        if origin != target:
            self._check_moved(origin, target, copied=True)
            self._copy(origin, target)

    @writing
    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Delete a file or directory; one that is not empty needs ``recursive=True``."""
        parts = self._parts(path)
        if not parts:
            raise FilesystemError("The root directory cannot be deleted. Delete what is in it")
        where, node = self._existing(parts, follow=False)
        if node.kind == "directory" and not recursive and self._look.kinds(where):
            raise FilesystemError(
                f"{shown(join_path(parts))} is not empty. Pass recursive=True to delete it with"
                " all that is in it"
            )
        self._check_unlocked(where, node)
        self._check_gone(where)
        self._remove(where)

    # Taking part in a transaction

    @reading
    def snapshot(self) -> object:
        """Return a token for the present state."""
        return self.snapshot_here()

    @writing
    def restore(self, token: object) -> None:
        """Go back to the state of a snapshot."""
        self.restore_here(token)

    def changed_since(self, token: object) -> tuple[str, ...]:
        """Return the paths that were changed since a snapshot, sorted."""
        raise NotImplementedError

    # One part of an operation each. All act on exactly this object.

    def replaced_here(
        self, among: Callable[[str], bool], *, meanwhile: bool = False
    ) -> list[tuple[str, bytes]]:
        """Return the files that this view has changed or removed, with their content before.

        ``meanwhile`` leaves them all out if none had changed since the view was forked.
        """
        return []

    def _parts(self, path: str) -> Parts:
        return split_path(path, self._prefix, self._real)

    def _note(self, parts: Parts) -> None:
        if self._reads is not None:
            self._reads.touched.add(parts)

    def _find(
        self, parts: Parts, *, follow: bool = True, note: bool = True
    ) -> tuple[Parts, Node | None]:
        """Return the canonical path and its node; ``note`` adds the path to the read set."""
        look, touched = self._look, None if self._reads is None else self._reads.touched
        where = parts  # canonical, unless it turns out to be a link or behind one
        for attempt in range(RETRIES):  # links may come and go meanwhile
            try:
                node = look.node(where)
                if node is None or node.kind != "link" or not follow:
                    if note and touched is not None:
                        touched.add(where)
                    return where, node
            except OSError as error:
                if error.errno not in BARRED:
                    raise
                if attempt:
                    self._check_barred(where)
            where = resolve(parts, look.link_target, self._below_root, follow=follow, seen=touched)
        raise escapes(parts)

    def _check_barred(self, parts: Parts) -> None:
        """Raise if a file blocks the path."""
        for depth in range(1, len(parts)):
            try:
                node = self._look.node(parts[:depth])
            except OSError:
                return
            if node is not None and node.kind in ("file", "other"):
                self._note(parts[:depth])
                raise file_not_directory(join_path(parts[:depth]))

    def _existing(self, parts: Parts, *, follow: bool = True) -> tuple[Parts, Node]:
        where, node = self._find(parts, follow=follow)
        if node is None:
            raise nothing_there(join_path(parts))
        return where, node

    def _directory(self, parts: Parts) -> Parts:
        where, node = self._existing(parts)
        if node.kind != "directory":
            raise file_not_directory(join_path(parts))
        return where

    def _content(self, parts: Parts) -> bytes:
        # One open that follows no link; only where that fails is there more to find out.
        try:
            data = self._look.read(parts)
        except OSError:
            where, node = self._existing(parts)
            if node.kind != "file":
                raise _not_a_file(parts, node) from None
            return self._look.read(where)
        if self._reads is not None:
            self._reads.touched.add(parts)
        return data

    def _followed(self, parts: Parts, node: Node) -> Node:
        """Return what a link leads to, if that is below the root; else the node itself."""
        if node.kind != "link":
            return node
        try:
            _, found = self._find(parts)
        except FilesystemError:
            return node
        return found or node

    def _walk(self, parts: Parts, where: Parts, glob: GlobPattern) -> Iterator[tuple[str, Parts]]:
        """Yield path and canonical path of each file below a directory that matches."""
        pending = [(where, _prefix(parts), glob.start(parts))]
        while pending:
            directory, prefix, positions = pending.pop()
            for name, kind in self._shown(self._entries(directory, glob.names(positions))):
                reached = glob.step(positions, name)
                here = (*directory, name)
                if kind == "directory":
                    if reached:
                        pending.append((here, f"{prefix}{name}/", reached))
                elif glob.matched(reached):
                    file = here if kind == "file" else self._file_behind(here, kind)
                    if file is not None:
                        yield prefix + name, file

    def _entries(
        self, directory: Parts, names: frozenset[str] | None
    ) -> Sequence[tuple[str, NodeKind]]:
        """Return everything in a directory, or only those of some names that exist."""
        found: list[tuple[str, NodeKind]] = []
        with contextlib.suppress(OSError):  # deleted meanwhile, or not readable
            if names is None:
                return self._look.kinds(directory)
        for name in names or ():
            with contextlib.suppress(OSError):
                node = self._look.node((*directory, name))
                if node is not None:
                    found.append((name, node.kind))
        return found

    def _file_behind(self, parts: Parts, kind: str) -> Parts | None:
        if kind != "link":
            return None
        try:
            where, node = self._find(parts)
        except (FilesystemError, OSError):
            return None
        return where if node is not None and node.kind == "file" else None

    def _changeable(self, parts: Parts) -> tuple[Parts, Node | None]:
        """Return the file to change; its node is None if it is missing."""
        where, node = self._find(parts)
        if node is not None:
            if node.kind != "file":
                raise _not_a_file(parts, node)
            if node.readonly:
                raise read_only(join_path(parts))
        self._check_put(where, node)
        return where, node

    def _transfer(
        self, source: str, destination: str, overwrite: bool, *, copied: bool
    ) -> tuple[Parts, Parts, Node]:
        """Return source, destination and what is moved or copied, if that is possible.

        A link is moved itself; copying one copies its target.
        """
        origin, node = self._existing(self._parts(source), follow=copied)
        if not origin:
            raise FilesystemError(
                "The root directory cannot be moved or copied. Name what is in it"
            )
        if copied and node.kind == "other":
            raise _not_a_file(origin, node)
        target, there = self._find(self._parts(destination), follow=False)
        old, new = shown(join_path(origin)), shown(join_path(target))
        if target != origin and target[: len(origin)] == origin:
            raise FilesystemError(f"{old} cannot be put into itself, at {new}")
        if there is None:
            return origin, target, node
        if not overwrite:
            raise AlreadyExists(f"{new} exists. Pass overwrite=True to replace it")
        if target != origin and origin[: len(target)] == target:
            raise FilesystemError(f"{new} cannot be replaced by {old}, which is in it")
        if there.kind == "directory" and node.kind != "directory":
            raise directory_not_file(join_path(target))
        if there.kind != "directory" and node.kind == "directory":
            raise file_not_directory(join_path(target))
        self._check_unlocked(target, there)
        if target != origin:
            self._check_gone(target)
        return origin, target, node

    def _check_unlocked(self, where: Parts, node: Node) -> None:
        """Raise if it, or a file in it, is read-only."""
        if node.kind != "directory":
            if node.readonly:
                raise read_only(join_path(where))
        elif node.readonly or self._holds_readonly(where):
            raise read_only(f"A file in {join_path(where)}")


def _not_a_file(parts: Parts, node: Node) -> FilesystemError:
    if node.kind == "directory":
        return directory_not_file(join_path(parts))
    return FilesystemError(
        f"{shown(join_path(parts))} is not a regular file but a pipe, socket or device. Give the"
        " path of a file"
    )


def _prefix(parts: Parts) -> str:
    return f"{join_path(parts)}/" if parts else ""


def _name(entry: tuple[str, object]) -> str:
    return entry[0]
