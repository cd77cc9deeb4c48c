"""What a filesystem on disk looks at: the directory itself, or changes laid over it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from rpds import HashTrieMap, HashTrieSet

from weakincentives.filesystem.confined import Tree
from weakincentives.filesystem.protocol import Parts, join_path
from weakincentives.filesystem.records import Record
from weakincentives.filesystem.store import Entry, Store

__all__ = ["Cover", "Disk", "Layer", "Look", "Node", "NodeKind", "Present", "node_of", "undone"]

NodeKind = Literal["file", "directory", "link", "other"]


class Node(NamedTuple):
    """What is at a path, links not followed."""

    kind: NodeKind
    mode: int
    size: int
    mtime_ns: int
    ino: int

    @property
    def readonly(self) -> bool:
        """Whether it is a file that may only be read."""
        return self.kind == "file" and not self.mode & stat.S_IWUSR


def node_of(status: os.stat_result) -> Node:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
    mode = stat.S_IMODE(status.st_mode)
    return Node(kind, mode, status.st_size, status.st_mtime_ns, status.st_ino)


_KINDS: dict[int, NodeKind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
}


class Look(Protocol):
    """Reading by canonical path. Errors are the system's: ELOOP or ENOTDIR for a barred way."""

    def node(self, parts: Parts) -> Node | None:
        """Return what is at a path; None for nothing."""
        ...

    def read(self, parts: Parts) -> bytes:
        """Return the bytes of a regular file."""
        ...

    def link_target(self, parts: Parts) -> str:
        """Return the text of a symbolic link."""
        ...

    def nodes(self, parts: Parts) -> list[tuple[str, Node]]:
        """Return all that is in a directory."""
        ...

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        """Return the names in a directory with what they are: cheaper than the nodes."""
        ...


class Disk:
    """The directory as it is now."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.link_target = tree.link_target

    def node(self, parts: Parts) -> Node | None:
        """Return what is at a path; None for nothing."""
        status = self._tree.status(parts)
        return None if status is None else node_of(status)

    def read(self, parts: Parts) -> bytes:
        """Return the bytes of a regular file."""
        return self._tree.read(parts)[0]

    def nodes(self, parts: Parts) -> list[tuple[str, Node]]:
        """Return all that is in a directory."""
        return [(name, node_of(status)) for name, status in self._tree.scan(parts)]

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        """Return the names in a directory with what they are."""
        return [(name, _KINDS.get(kind, "other")) for name, kind in self._tree.kinds(parts)]


class Present:
    """Where a view's way down ends: the directory, or what it was before later changes."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.layer: Layer | None = None
        """What leads back from the next present to this one; None while this is the present."""
        self.next: Present | None = None

    def supersede(self, undo: Sequence[Record], store: Store, trees: Tree | None) -> Present:
        """Return the new present; this one shows what was before the changes in ``undo``."""
        following = Present(self.look)
        layer = undone(Layer(following), undo, store, trees)
        self.next, self.layer, self.look = following, layer, layer
        return following

    def changed(self) -> set[Parts]:
        """Return the paths that were changed since this was the present."""
        paths: set[Parts] = set()
        present = self
        while present.next is not None and present.layer is not None:
            paths.update(present.layer.changed)
            present = present.next
        return paths

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


Where = tuple[Look, Parts]
"""Somewhere to look, and at what path there."""


class Cover(NamedTuple):
    """What a layer has at a path, whatever is below the layer."""

    node: Node | None
    """None for nothing."""
    source: Where | Path | bytes | None = None
    """A file's content, a link's text, or where what is in a directory comes from."""


_GONE = Cover(None)
_NOTHING: HashTrieMap[Parts, HashTrieMap[str, Cover]] = HashTrieMap()
_NO_COVERS: HashTrieMap[str, Cover] = HashTrieMap()


class Layer:
    """Changes laid over what is below. Never changed itself: every change gives another layer."""

    __slots__ = ("_covers", "below", "changed")

    def __init__(
        self,
        below: Look,
        covers: HashTrieMap[Parts, HashTrieMap[str, Cover]] = _NOTHING,
        changed: HashTrieSet[Parts] | None = None,
    ) -> None:
        self.below = below
        self._covers = covers
        self.changed: HashTrieSet[Parts] = HashTrieSet() if changed is None else changed

    # Looking

    def node(self, parts: Parts) -> Node | None:
        """Return what is at a path; None for nothing."""
        cover, where = self._find(parts)
        if cover is not None:
            return cover.node
        return None if where is None else where[0].node(where[1])

    def read(self, parts: Parts) -> bytes:
        """Return the bytes of a regular file."""
        cover, where = self._find(parts)
        if cover is not None and cover.node is not None:
            _check_file(cover.node, parts)
            source = cover.source
            if isinstance(source, Path):
                return source.read_bytes()
            if isinstance(source, bytes):
                return source
            where = source
        if where is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join_path(parts))
        return where[0].read(where[1])

    def link_target(self, parts: Parts) -> str:
        """Return the text of a symbolic link."""
        cover, where = self._find(parts)
        if cover is not None and cover.node is not None:
            if cover.node.kind != "link":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), join_path(parts))
            if isinstance(cover.source, bytes):
                return os.fsdecode(cover.source)
            where = cover.source if isinstance(cover.source, tuple) else None
        if where is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join_path(parts))
        return where[0].link_target(where[1])

    def nodes(self, parts: Parts) -> list[tuple[str, Node]]:
        """Return all that is in a directory."""
        where, covers = self._directory(parts)
        inner = [] if where is None else where[0].nodes(where[1])
        return [(name, node) for name, node in inner if name not in covers] + [
            (name, cover.node) for name, cover in covers.items() if cover.node is not None
        ]

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        """Return the names in a directory with what they are."""
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
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join_path(parts))
            if cover.node.kind != "directory":
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            where = cover.source if isinstance(cover.source, tuple) else None
        return where, self._covers.get(parts) or _NO_COVERS

    def _find(self, parts: Parts) -> tuple[Cover | None, Where | None]:
        """Return what the layer has at a path, or else where to look below it."""
        if not self._covers:
            return None, (self.below, parts)
        cover: Cover | None = None
        start: Where = (self.below, ())
        where: Where | None = start
        for depth, name in enumerate(parts):
            if cover is not None and cover.node is not None and cover.node.kind != "directory":
                number = errno.ELOOP if cover.node.kind == "link" else errno.ENOTDIR
                raise OSError(number, os.strerror(number), join_path(parts))
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
        """Return a layer that has this at the path, and nothing of its own below it."""
        covers = self._without_below(parts)
        inside = covers.get(parts[:-1]) or _NO_COVERS
        covers = covers.insert(parts[:-1], inside.insert(parts[-1], cover))
        return Layer(self.below, covers, self.changed.insert(parts))

    def remove(self, parts: Parts) -> Layer:
        """Return a layer with nothing at the path."""
        return self.put(parts, _GONE)

    def make_directories(self, parts: Parts, mtime_ns: int) -> Layer:
        """Return a layer with a directory at the path, and those it needs."""
        layer = self
        for depth in range(1, len(parts) + 1):
            if layer.node(parts[:depth]) is None:
                layer = layer.put(parts[:depth], Cover(Node("directory", 0o755, 0, mtime_ns, 0)))
        return layer

    def rename(self, origin: Parts, target: Parts) -> Layer:
        """Return a layer with what is at one path at another."""
        layer = self.copy(origin, target)
        return layer.remove(origin)

    def copy(self, origin: Parts, target: Parts) -> Layer:
        """Return a layer with what is at one path at another, too."""
        cover = self._cover_of(origin)
        layer = self.put(target, cover)
        return Layer(self.below, layer._covers.update(self._moved(origin, target)), layer.changed)

    def set_mode(self, parts: Parts, mode: int) -> Layer:
        """Return a layer in which the permission bits are these."""
        cover = self._cover_of(parts)
        if cover.node is None or cover.node.mode == mode or not parts:
            return self
        covers = self._covers
        inside = covers.get(parts[:-1]) or _NO_COVERS
        changed = Cover(cover.node._replace(mode=mode), cover.source)
        covers = covers.insert(parts[:-1], inside.insert(parts[-1], changed))
        return Layer(self.below, covers, self.changed.insert(parts))

    def differing(self, other: Layer) -> set[Parts]:
        """Return the paths at which two layers over the same do not have the same."""
        if self.below is not other.below:
            return {()}
        paths: set[Parts] = set()
        for one, two in ((self, other), (other, self)):
            for parent, inside in one._covers.items():
                there = two._covers.get(parent) or _NO_COVERS
                paths |= {
                    (*parent, name)
                    for name, cover in inside.items()
                    if there.get(name) is not cover
                }
        return paths

    def _cover_of(self, parts: Parts) -> Cover:
        cover, where = self._find(parts)
        if cover is not None or where is None:
            return cover or _GONE
        node = where[0].node(where[1])
        return _GONE if node is None else Cover(node, where)

    def _moved(self, origin: Parts, target: Parts) -> dict[Parts, HashTrieMap[str, Cover]]:
        """Return what the layer has below one path, as it is below another."""
        return {
            (*target, *parts[len(origin) :]): inside
            for parts, inside in self._covers.items()
            if parts[: len(origin)] == origin
        }

    def _without_below(self, parts: Parts) -> HashTrieMap[Parts, HashTrieMap[str, Cover]]:
        depth = len(parts)
        covers = self._covers
        for known in [known for known in covers if known[:depth] == parts]:
            covers = covers.remove(known)
        return covers


def _below(where: Where | None, name: str) -> Where | None:
    return None if where is None else (where[0], (*where[1], name))


def _check_file(node: Node, parts: Parts) -> None:
    if node.kind == "directory":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), join_path(parts))
    if node.kind == "link":
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), join_path(parts))
    if node.kind != "file":
        raise OSError(errno.EINVAL, "Not a regular file", join_path(parts))


def undone(layer: Layer, records: Sequence[Record], store: Store, trees: Tree | None) -> Layer:
    """Return a layer in which changes have not happened; ``trees`` has the directories kept."""
    for record in reversed(records):
        layer = _undone(layer, record, store, trees)
    return layer


def _undone(layer: Layer, record: Record, store: Store, trees: Tree | None) -> Layer:
    """Return a layer in which one change has not happened."""
    match record.op:
        case "moved" | "moved over" if record.origin is not None:
            return layer.rename(record.path, record.origin)
        case "made":
            return layer.remove(record.path)
        case "put" | "gone" | "edit" | "found":
            if record.before is None:
                return layer.remove(record.path)
            return _again(layer, record, record.before, store, trees)
        case "attributes" if record.before is not None:
            return layer.set_mode(record.path, record.before.mode)
        case _:
            return layer


def _again(layer: Layer, record: Record, before: Entry, store: Store, trees: Tree | None) -> Layer:
    kind: NodeKind = "other"
    source: Where | Path | bytes | None = None
    match before.kind:
        case "file":
            kind = "file"
            source = _content(record, before, store)
        case "symlink":
            kind, source = "link", os.fsencode(before.target or "")
        case "directory":
            kind = "directory"
            if record.op == "found":
                return (
                    layer
                    if layer.node(record.path)
                    else layer.put(
                        record.path, Cover(Node(kind, before.mode, 0, before.mtime_ns, before.ino))
                    )
                )
            if trees is not None and record.kept is not None:
                source = (Disk(trees), (record.kept,))
        case _:
            pass
    node = Node(kind, before.mode, before.size, before.mtime_ns, before.ino)
    return layer.put(record.path, Cover(node, source))


def _content(record: Record, before: Entry, store: Store) -> Path | None:
    if before.digest is not None:
        return store.objects.path(before.digest)
    name = record.copy if record.op == "edit" else record.kept
    return None if name is None else store.tx / name
