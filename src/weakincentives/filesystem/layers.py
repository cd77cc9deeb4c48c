"""How a filesystem on disk is read: the directory itself, or layers of changes over it."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple, TypeVar, Unpack

from rpds import HashTrieMap, HashTrieSet

from weakincentives.errors import ViewClosed
from weakincentives.filesystem import base
from weakincentives.filesystem.contents import Contents, found_of
from weakincentives.filesystem.entry import Attributes, Entry, File, Xattrs, capture
from weakincentives.filesystem.history import saved_at
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.paths import (
    BARRED,
    FileStat,
    NodeKind,
    Parts,
    not_regular,
    system_error,
)
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.store import Objects
from weakincentives.filesystem.tree import Tree
from weakincentives.log import Change, Operation
from weakincentives.log import Entry as Value

T = TypeVar("T")

Node = Entry
"""An entry from a stat call only, without extended attributes."""


node_of = Entry.of


Look = base.Look[Entry]


class Disk:
    """The directory as it is now."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.link_target = tree.link_target
        self.kinds = tree.kinds

    def node(self, parts: Parts) -> Node | None:
        status = self.tree.status(parts)
        return None if status is None else node_of(status)

    def read(self, parts: Parts) -> bytes:
        return self.tree.read(parts)[0]

    def nodes(self, parts: Parts) -> list[tuple[str, Node]]:
        return [(name, node_of(status)) for name, status in self.tree.scan(parts)]


class OnDisk(base.Filesystem):
    """What all filesystems over a directory have in common."""

    @base.reading
    def unnamed(self, path: str = ".") -> tuple[str, ...]:
        """Return the names in a directory that are not UTF-8, escaped: no path can name them."""
        where = self._directory(self._parts(path))
        names = (os.fsencode(name) for name, _ in self._look.nodes(where) if not _is_text(name))
        return tuple(sorted(ascii(name.decode("latin-1"))[1:-1] for name in names))

    def _stat(self, path: str, node: Node) -> FileStat:
        return FileStat(
            path=path,
            kind=node.kind,
            size=node.size if node.kind == "file" else 0,
            modified=node.mtime_ns / 1e9,
            readonly=node.readonly,
        )

    def _shown(self, entries: Sequence[tuple[str, T]]) -> Sequence[tuple[str, T]]:
        return [each for each in entries if not each[0].startswith(TEMPORARY) and _is_text(each[0])]


def _is_text(name: str) -> bool:
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


Where = tuple[Look, Parts]
"""A look and a path in it."""


Origin = Where | functools.partial[bytes] | Path | bytes | None
"""A file's content, a link's text, or the source of a directory's entries."""


class Cover(NamedTuple):
    """What a layer has at a path, hiding what is below."""

    node: Node | None
    """None for nothing."""
    source: Origin = None


class Changed(NamedTuple):
    """Where two looks may differ."""

    paths: set[Parts]
    files: set[File]
    """Hard-linked files that may differ under all their names."""


_GONE = Cover(None)
_NOTHING: HashTrieMap[Parts, HashTrieMap[str, Cover]] = HashTrieMap()
_NO_COVERS: HashTrieMap[str, Cover] = HashTrieMap()
_NO_FILES: HashTrieMap[File, Cover] = HashTrieMap()
_NO_INNER: HashTrieMap[Parts, HashTrieSet[str]] = HashTrieMap()
_NO_NAMES: HashTrieSet[str] = HashTrieSet()
_UNCHANGED: HashTrieSet[Parts] = HashTrieSet()


class Layer:
    """Immutable changes over another look: every change returns a new layer.

    Entries are found by path; the content of a hard-linked file by its identity, so that all its
    names show a change made through one.
    """

    __slots__ = ("_covers", "_inner", "below", "changed", "files")

    def __init__(
        self,
        below: Look,
        covers: HashTrieMap[Parts, HashTrieMap[str, Cover]] = _NOTHING,
        changed: HashTrieSet[Parts] = _UNCHANGED,
        files: HashTrieMap[File, Cover] = _NO_FILES,
        inner: HashTrieMap[Parts, HashTrieSet[str]] = _NO_INNER,
    ) -> None:
        self.below = below
        self._covers = covers
        self._inner = inner
        """For each directory the names in it that have, or had, covers at or below them."""
        self.changed = changed
        self.files = files

    # Looking

    def node(self, parts: Parts) -> Node | None:
        cover, where = self._look_up(parts)
        if cover is not None:
            return cover.node
        return None if where is None else where[0].node(where[1])

    def read(self, parts: Parts) -> bytes:
        cover, where = self._look_up(parts)
        if cover is not None and cover.node is not None:
            return content_of(cover, parts)
        if where is None:
            raise system_error(errno.ENOENT, parts)
        return where[0].read(where[1])

    def link_target(self, parts: Parts) -> str:
        cover, where = self._find(parts)
        if cover is not None and cover.node is not None:
            if cover.node.kind != "link":
                raise system_error(errno.EINVAL, parts)
            if isinstance(cover.source, bytes):
                return os.fsdecode(cover.source)
        if where is None:
            raise system_error(errno.ENOENT, parts)
        return where[0].link_target(where[1])

    def nodes(self, parts: Parts) -> list[tuple[str, Node]]:
        where, covers = self._directory(parts)
        inner = [] if where is None else where[0].nodes(where[1])
        found = [(name, node) for name, node in inner if name not in covers] + [
            (name, cover.node) for name, cover in covers.items() if cover.node is not None
        ]
        return [(name, self._as_changed(node)) for name, node in found] if self.files else found

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        where, covers = self._directory(parts)
        inner = [] if where is None else where[0].kinds(where[1])
        found: list[tuple[str, NodeKind]] = [one for one in inner if one[0] not in covers]
        for name, cover in covers.items():
            if cover.node is not None:
                found.append((name, cover.node.kind))
        return found

    def _directory(self, parts: Parts) -> tuple[Where | None, HashTrieMap[str, Cover]]:
        cover, where = self._find(parts)
        if cover is not None:
            if cover.node is None:
                raise system_error(errno.ENOENT, parts)
            if cover.node.kind != "directory":
                raise system_error(errno.ENOTDIR, parts)
        return where, self._covers.get(parts) or _NO_COVERS

    def _as_changed(self, node: Node) -> Node:
        cover = self._changed_file(node)
        return node if cover is None or cover.node is None else cover.node

    def _changed_file(self, node: Node) -> Cover | None:
        # With one name only, it is a later file that has the inode of one that is gone.
        return None if node.file is None or node.links < 2 else self.files.get(node.file)

    def _look_up(self, parts: Parts) -> tuple[Cover | None, Where | None]:
        """Like ``_find``, but a changed hard-linked file is found under all its names."""
        cover, where = self._find(parts)
        if not self.files:
            return cover, where
        node = cover.node if cover else where[0].node(where[1]) if where else None
        changed = None if node is None else self._changed_file(node)
        return (cover, where) if changed is None else (changed, None)

    def _find(self, parts: Parts) -> tuple[Cover | None, Where | None]:
        """Return what the layer has at a path, or where to look below it."""
        if not self._covers:
            return None, (self.below, parts)
        cover: Cover | None = None
        where: Where | None = (self.below, ())
        for depth, name in enumerate(parts):
            if cover is not None and cover.node is not None and cover.node.kind != "directory":
                number = errno.ELOOP if cover.node.kind == "link" else errno.ENOTDIR
                raise system_error(number, parts)
            inside = self._covers.get(parts[:depth])
            cover = None if inside is None else inside.get(name)
            if cover is None:
                where = _below(where, name)
            elif cover.node is None:
                return cover, None
            else:
                where = cover.source if isinstance(cover.source, tuple) else None
        return cover, where

    # Changing

    def put(self, parts: Parts, cover: Cover) -> Layer:
        """Return a layer with this at the path, and for a hard-linked file at all its names."""
        return self._put(parts, cover)._with_file(cover)

    def remove(self, parts: Parts) -> Layer:
        return self.put(parts, _GONE)

    def make_directories(self, parts: Parts, mtime_ns: int) -> Layer:
        """Return a layer with a directory at the path, and its missing parents."""
        there = len(parts)
        while there and self.node(parts[:there]) is None:
            there -= 1
        layer = self
        for depth in range(there + 1, len(parts) + 1):
            layer = layer.put(parts[:depth], Cover(Node("directory", 0o755, 0, mtime_ns, 0)))
        return layer

    def rename(self, origin: Parts, target: Parts) -> Layer:
        return self._transfer(origin, target).remove(origin)

    def copy(self, origin: Parts, target: Parts, fresh: Iterator[int]) -> Layer:
        """Return a layer with an entry copied; ``fresh`` yields unused inode numbers."""
        layer = self._transfer(origin, target)
        for places in self._links_below(origin):
            ino = next(fresh)
            for place in places:
                node, source = self.cover_of(place)
                if node is not None:
                    node = node._replace(ino=ino, device=0, links=len(places))
                    layer = layer._put((*target, *place[len(origin) :]), Cover(node, source))
        return layer

    def add_name(self, origin: Parts, target: Parts) -> Layer:
        """Return a layer with another hard link to a file."""
        node, source = self.cover_of(origin)
        if node is None:
            return self
        cover = Cover(node._replace(links=node.links + 1), source)
        return self._put(target, cover)._with_file(cover)

    def set_attributes(self, parts: Parts, **given: Unpack[Attributes]) -> Layer:
        """Return a layer with other attributes of an entry: fields of its node."""
        cover = self.cover_of(parts)
        if cover.node is None or not parts:
            return self
        changed = Cover(cover.node._replace(**given), cover.source)
        if changed.node == cover.node:
            return self
        return self._insert(self._covers, parts, changed)._with_file(changed)

    def take(self, parts: Parts, look: Look) -> Layer:
        """Return a layer with what another look has at a path."""
        node = look.node(parts)
        return self.remove(parts) if node is None else self._put(parts, Cover(node, (look, parts)))

    def differing(self, other: Layer) -> Changed:
        """Return where two layers over the same look differ."""
        if self.below is not other.below:
            return Changed({()}, set())
        paths: set[Parts] = set()
        files: set[File] = set()
        for one, two in ((self, other), (other, self)):
            for parent, inside in one._covers.items():
                there = two._covers.get(parent) or _NO_COVERS
                paths |= {
                    (*parent, name)
                    for name, cover in inside.items()
                    if there.get(name) is not cover
                }
            files |= {file for file, cover in one.files.items() if two.files.get(file) is not cover}
        return Changed(paths, files)

    def _put(self, parts: Parts, cover: Cover) -> Layer:
        covers = self._covers
        for known in self._covered(parts):
            covers = covers.remove(known)
        return self._insert(covers, parts, cover)

    def _insert(
        self, covers: HashTrieMap[Parts, HashTrieMap[str, Cover]], parts: Parts, cover: Cover
    ) -> Layer:
        inside = covers.get(parts[:-1]) or _NO_COVERS
        covers = covers.insert(parts[:-1], inside.insert(parts[-1], cover))
        inner = _with_directory(self._inner, parts[:-1])
        return Layer(self.below, covers, self.changed.insert(parts), self.files, inner)

    def _with_file(self, cover: Cover) -> Layer:
        node = cover.node
        if node is None or node.file is None or node.links < 2:
            return self
        files = self.files.insert(node.file, cover)
        return Layer(self.below, self._covers, self.changed, files, self._inner)

    def _transfer(self, origin: Parts, target: Parts) -> Layer:
        layer = self._put(target, self.cover_of(origin))
        covers, inner = layer._covers, layer._inner
        for known in self._covered(origin):
            place = (*target, *known[len(origin) :])
            covers = covers.insert(place, self._covers[known])
            inner = _with_directory(inner, place)
        return Layer(self.below, covers, layer.changed, self.files, inner)

    def _covered(self, parts: Parts) -> Iterator[Parts]:
        """Yield the directories at or below a path that have covers."""
        pending = [parts]
        while pending:
            here = pending.pop()
            if here in self._covers:
                yield here
            pending += [(*here, name) for name in self._inner.get(here) or _NO_NAMES]

    def _links_below(self, parts: Parts) -> Iterable[list[Parts]]:
        """Return the names, at or below a path, of each hard-linked file."""
        files: dict[File, list[Parts]] = {}
        for place, node in walk(self, [parts]):
            if node.file is not None and node.links > 1:
                files.setdefault(node.file, []).append(place)
        return files.values()

    def cover_of(self, parts: Parts) -> Cover:
        """Return what is at a path, and where its content is."""
        cover, where = self._look_up(parts)
        if cover is not None or where is None:
            return cover or _GONE
        node = where[0].node(where[1])
        return _GONE if node is None else Cover(node, where)


def _with_directory(
    inner: HashTrieMap[Parts, HashTrieSet[str]], parts: Parts
) -> HashTrieMap[Parts, HashTrieSet[str]]:
    """Add a directory to the names in the directories above it."""
    for depth in range(len(parts), 0, -1):
        above, name = parts[: depth - 1], parts[depth - 1]
        names = inner.get(above) or _NO_NAMES
        if name in names:
            break
        inner = inner.insert(above, names.insert(name))
    return inner


class Forward:
    """Forwards to another look."""

    look: Look

    def at(self, parts: Parts) -> Look:
        """Return the look that is right for a path."""
        return self.look

    def node(self, parts: Parts) -> Node | None:
        return self.look.node(parts)

    def read(self, parts: Parts) -> bytes:
        return self.look.read(parts)

    def link_target(self, parts: Parts) -> str:
        return self.look.link_target(parts)

    def nodes(self, parts: Parts) -> list[tuple[str, Node]]:
        return self.look.nodes(parts)

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        return self.look.kinds(parts)


class Present(Forward):
    """The base of private views: the directory, or its state before later changes."""

    def __init__(self, disk: Look) -> None:
        self._disk = disk
        self._look: Look = disk
        self._layer: Layer | None = None
        """The layer over the next present that gives this state; None while it is current."""
        self._next: Present | None = None
        self._closed: str | None = None

    @property
    def look(self) -> Look:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The current or earlier state."""
        self._check_open()
        return self._look

    def supersede(self, undo: Callable[[Look], Layer]) -> Present:
        """Return the new present; this one now shows the state before what ``undo`` undoes."""
        following = Present(self._disk)
        layer = undo(following)
        self._next, self._layer, self._look = following, layer, layer
        return following

    def resume(self) -> None:
        self._next, self._layer, self._look = None, None, self._disk

    def close(self, reason: str) -> None:
        """Refuse further reads: the state is gone."""
        self._closed = reason

    def changed(self) -> Changed:
        """Return what has changed since this was current."""
        self._check_open()
        changed = Changed(set(), set())
        present = self
        while present._next is not None and present._layer is not None:
            changed.paths.update(present._layer.changed)
            changed.files.update(present._layer.files)
            present = present._next
        return changed

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ViewClosed(self._closed)


def _below(where: Where | None, name: str) -> Where | None:
    return None if where is None else (where[0], (*where[1], name))


def node_at(look: Look, parts: Parts) -> Node | None:
    """Return the entry at a path; None also below a file or link."""
    try:
        return look.node(parts)
    except OSError:
        return None


def names_of(look: Look, files: AbstractSet[File], tops: Iterable[Parts]) -> set[Parts]:
    """Return the names of some files at or below some paths."""
    return {parts for parts, node in walk(look, tops) if node.file in files}


def walk(look: Look, tops: Iterable[Parts]) -> Iterator[tuple[Parts, Node]]:
    """Yield the readable entries at and below some paths, each once."""
    seen: set[Parts] = set()
    pending: list[tuple[Parts, Node]] = []
    for top in tops:
        with contextlib.suppress(OSError):
            node = look.node(top)
            if node is not None:
                pending.append((top, node))
    while pending:
        parts, node = pending.pop()
        if parts in seen:
            continue
        seen.add(parts)
        yield parts, node
        if node.kind == "directory":
            with contextlib.suppress(OSError):
                pending += [((*parts, name), inner) for name, inner in look.nodes(parts)]


def walk_kinds(look: Look, top: Parts) -> Iterator[tuple[Parts, NodeKind]]:
    """Like ``walk`` for one path, without the nodes: that is cheaper."""
    pending: list[tuple[Parts, NodeKind]] = []
    with contextlib.suppress(OSError):
        node = look.node(top)
        if node is not None:
            pending.append((top, node.kind))
    while pending:
        parts, kind = pending.pop()
        yield parts, kind
        if kind == "directory":
            with contextlib.suppress(OSError):
                pending.extend(((*parts, name), inner) for name, inner in look.kinds(parts))


def xattrs_at(look: Look, parts: Parts) -> Xattrs:
    """Return the extended attributes of a file or directory, wherever its content is from."""
    while not isinstance(look, Disk):
        if isinstance(look, Layer):
            node, source = look.cover_of(parts)
            if not isinstance(source, tuple) or (node is not None and node.xattrs):
                return () if node is None else node.xattrs
            look, parts = source
        elif isinstance(look, Forward):
            there = look.at(parts)
            if there is look:  # it is stored
                node = look.node(parts)
                return () if node is None else node.xattrs
            look = there
        else:
            return ()
    entry = capture(look.tree, parts)
    return () if entry is None else entry.xattrs


def content_of(cover: Cover, parts: Parts) -> bytes:
    if cover.node is not None and cover.node.kind != "file":
        raise not_regular(cover.node.kind, parts)
    match cover.source:
        case functools.partial():
            return cover.source()
        case Path():
            return cover.source.read_bytes()
        case bytes():
            return cover.source
        case (look, place):
            return look.read(place)
        case None:
            raise system_error(errno.ENOENT, parts)


class Replaced(NamedTuple):
    """Where replaced content is."""

    objects: Objects
    tree: Tree | None
    """Holds removed directories and uncommitted originals."""
    workspace: Tree | None = None
    """Holds scratch directories with uncommitted originals."""
    store: Path | None = None
    """Holds uncommitted previous contents of files changed in place."""

    def at(self, record: Record) -> tuple[Tree, Parts] | None:
        """Return the place of a replaced file that is not among the objects."""
        if self.tree is None or record.saved is None:
            return None
        if self.workspace is None:
            return self.tree, (record.saved,)
        return saved_at(record, self.tree, self.workspace)


def state_before(operation: Operation, after: Look, contents: Contents) -> Layer:
    """Return the state before an operation, given the one after it."""
    layer = Layer(after)
    moved = {change.origin: change for change in operation.changes if change.origin is not None}
    for change in operation.changes:  # directories before what is in them
        path, found, left, *_ = change
        if found is None:
            layer = layer.remove(path)
            continue
        above = node_at(layer, path[:-1])
        node = found_of(found)._replace(device=0 if above is None else above.device)
        if (seen := change.found) is not None:
            node = node._replace(ino=seen.inode, links=seen.links, ctime_ns=seen.ctime_ns)
        if found.is_directory and left is not None and left.is_directory:
            is_same = not found.content or (path not in moved and not found.content.startswith("@"))
            if is_same:  # only its attributes were changed
                layer = layer.set_attributes(path, mode=node.mode)
                continue
        layer = layer.put(path, Cover(node, _origin(found, moved.get(path), after, contents)))
    return layer


def _origin(found: Value, moved: Change | None, after: Look, contents: Contents) -> Origin:
    """Return where the content is of what an operation found."""
    if found.kind == "link":
        return os.fsencode(found.content)
    if found.is_directory and found.content.startswith("@"):
        tree, parts = contents.place(found.content)
        return (Removed(tree, after), parts)
    if found.kind == "file" and found.content:
        return functools.partial(contents.read, found.content)
    if moved is not None and (found.content or found.kind == "file"):
        return (after, moved.path)
    return None


def undone(layer: Layer, records: Sequence[Record], taken: Replaced) -> Layer:
    for record in reversed(records):
        layer = _undone(layer, record, taken)
    return layer


def _undone(layer: Layer, record: Record, taken: Replaced) -> Layer:
    if record.op == "moved" and record.origin is not None:
        return layer.rename(record.path, record.origin)
    if record.op != "was":
        return layer
    before = record.before
    if before is None:
        return layer.remove(record.path)
    if record.saved is None and before.is_directory and _is_directory(layer, record.path):
        return layer.set_attributes(record.path, mode=before.mode)
    above = layer.node(record.path[:-1])
    device = 0 if above is None else above.device
    source: Origin = None
    match before.kind:
        case "file":
            source = _content(layer, record, before, taken)
        case "link":
            source = os.fsencode(before.target or "")
        case "directory" if (place := taken.at(record)) is not None:
            source = (Removed(place[0], layer.below), place[1])
        case _:
            pass
    return layer.put(record.path, Cover(before._replace(device=device), source))


def _is_directory(layer: Layer, parts: Parts) -> bool:
    try:
        node = layer.node(parts)
        return node is not None and node.kind == "directory"
    except OSError as error:
        if error.errno in BARRED:
            return False
        raise


def _content(layer: Layer, record: Record, before: Entry, taken: Replaced) -> Origin:
    if before.digest is not None:
        return functools.partial(taken.objects.read, before.digest)
    if record.source is not None and taken.store is not None:
        own = record.source.path(taken.store, before.size)
        return record.source.read(taken.store, before.size) if own is None else Path(own)
    place = taken.at(record)
    return None if place is None else (Removed(place[0], layer.below), place[1])


class Removed(Disk):
    """Removed entries. A file among them may still be changed through another hard link.

    Then the ``later`` layers have its previous content.
    """

    def __init__(self, tree: Tree, later: Look) -> None:
        super().__init__(tree)
        self._later = later

    def node(self, parts: Parts) -> Node | None:
        node = super().node(parts)
        return None if node is None else self._as_taken(node)

    def nodes(self, parts: Parts) -> list[tuple[str, Node]]:
        return [(name, self._as_taken(node)) for name, node in super().nodes(parts)]

    def read(self, parts: Parts) -> bytes:
        node = super().node(parts)
        cover = None if node is None else self._changed(node)
        return super().read(parts) if cover is None else content_of(cover, parts)

    def _as_taken(self, node: Node) -> Node:
        cover = self._changed(node)
        return node if cover is None or cover.node is None else cover.node

    def _changed(self, node: Node) -> Cover | None:
        """Return a file as it was before the first later change."""
        look, file = self._later, node.file
        if file is None:
            return None
        while isinstance(look, (Layer, Present)):
            if isinstance(look, Present):
                look = look.look
            elif (cover := look.files.get(file)) is not None:
                return cover
            else:
                look = look.below
        return None
