"""A private view's changes: a layer over its parent, and the steps to replay on a merge."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Unpack, cast

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.filesystem.base import Reads
from weakincentives.filesystem.entry import Attributes, apply_entry, create
from weakincentives.filesystem.layers import (
    Cover,
    File,
    Forward,
    Layer,
    Look,
    Node,
    Present,
    content_of,
    names_of,
    node_of,
)
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.states import DirectoryAt
from weakincentives.filesystem.store import Store
from weakincentives.filesystem.tree import Tree, without_privileges


class _Numbers(Iterator[int]):
    """Below every inode number on disk, so that no staged file is mistaken for one there.

    They begin anywhere, also in a forked child: a branch has numbers of other processes, too.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        self._next = itertools.count(-int.from_bytes(os.urandom(6)) - 1, -1).__next__

    def __next__(self) -> int:
        return self._next()


numbers = _Numbers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=numbers.begin_anew)

IN_MEMORY = 64 << 10
"""Larger contents get a file of their own until the view is merged."""


class Edit(Protocol):
    """Where changes can be made: an open transaction, or a private view."""

    def write(self, parts: Parts, data: bytes) -> None: ...
    def make_directory(self, parts: Parts) -> None: ...
    def remove(self, parts: Parts) -> None: ...
    def rename(self, origin: Parts, target: Parts) -> None: ...
    def copy(self, origin: Parts, target: Parts) -> None: ...
    def put_file(self, parts: Parts, source: Path | str) -> None: ...
    def link(self, opened: Path, parts: Parts) -> None: ...
    def add_name(self, origin: Parts, parts: Parts) -> None: ...
    def set_attributes(self, parts: Parts, **given: Unpack[Attributes]) -> None: ...


class Step(NamedTuple):
    """A change: a method of ``Edit``, or "back", which restores a snapshot."""

    method: str
    parts: Parts
    target: Parts | None = None
    content: Any = None
    """A file's bytes or where they are; attributes; or a snapshot."""
    node: Node | None = None
    """What is put there."""
    moment: int = 0
    """When, in nanoseconds since the epoch."""

    @property
    def changed(self) -> set[Parts]:
        """The paths where something changes."""
        if self.target is None:
            return {self.parts}
        return {self.parts, self.target} if self.method == "rename" else {self.target}

    @property
    def attributes(self) -> Attributes:
        """The attributes to set: a step in a branch's log also has those that stay, as None."""
        given = {name: value for name, value in self.content.items() if value is not None}
        return cast("Attributes", given)

    def applied(self, layer: Layer) -> Layer:
        parts, target, node = self.parts, self.target, self.node
        if self.method == "make_directory":
            return layer.make_directories(parts, self.moment)
        if self.method == "remove":
            return layer.remove(parts)
        if self.method == "set_attributes":
            return layer.set_attributes(parts, **self.attributes)
        layer = layer.make_directories((target or parts)[:-1], self.moment)
        if target is None:
            link = None if node is None else node.target
            source = self.content if link is None else os.fsencode(link)
            return layer.put(parts, Cover(node, source))
        if self.method == "copy":
            return layer.copy(parts, target, numbers)
        return getattr(layer, self.method)(parts, target)


class State(NamedTuple):
    """A private view's changes: the layer that shows them, and the steps that lead there."""

    layer: Layer
    steps: tuple[Step, ...] = ()


class Staging(Forward):
    """A private view's changes, and the files that hold the large ones."""

    def __init__(self, base: Look, store: Store) -> None:
        self.base = base
        self.state = State(Layer(base))
        self._store = store
        self._folder: Path | None = None
        self._count = 0

    @property
    def look(self) -> Layer:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.state.layer

    layer = look

    @property
    def changed(self) -> bool:
        return bool(self.state.steps)

    @property
    def written(self) -> set[Parts]:
        return set[Parts]().union(*(step.changed for step in self.state.steps))

    @property
    def wholes(self) -> set[Parts]:
        """The changed paths that stand for everything below them."""
        steps = (step for step in self.state.steps if step.method != "set_attributes")
        return set[Parts]().union(*(step.changed for step in steps))

    @property
    def covered(self) -> set[Parts]:
        """The paths where this may differ from the directory itself."""
        paths: set[Parts] = set()
        files: set[File] = set()
        look: Look = self.layer
        while isinstance(look, Layer):
            paths.update(look.changed)
            files.update(look.files)
            look = look.below
        if isinstance(look, (Present, DirectoryAt)):
            changed = look.changed()
            paths |= changed.paths
            files |= changed.files
        return paths | names_of(self, files, [()]) if files else paths

    # Changing

    def write(self, parts: Parts, data: bytes) -> None:
        now, old = _now(), self.layer.node(parts)
        content: bytes | Path = data
        if len(data) > IN_MEMORY:
            content = self._place()
            content.write_bytes(data)
        mode = 0o644 if old is None else without_privileges(old.mode)
        if old is not None and old.links > 1:  # the same file, for all the names it has
            node = old._replace(mode=mode, size=len(data), mtime_ns=now)
        else:
            node = Node("file", mode, len(data), now, next(numbers))
        layer, steps = self.state
        if steps and steps[-1].method == "write" and steps[-1].parts == parts:
            self.state = State(layer, steps[:-1])
        self._add(Step("write", parts, None, content, node, now))

    def make_directory(self, parts: Parts) -> None:
        self._add(Step("make_directory", parts, moment=_now()))

    def remove(self, parts: Parts) -> None:
        self._add(Step("remove", parts))

    def rename(self, origin: Parts, target: Parts) -> None:
        self._add(Step("rename", origin, target, moment=_now()))

    def copy(self, origin: Parts, target: Parts) -> None:
        self._add(Step("copy", origin, target, moment=_now()))

    def put_file(self, parts: Parts, source: Path | str) -> None:
        """Move the file, link or pipe at ``source`` to the path."""
        place = self._place()
        os.rename(source, place)
        node = node_of(os.lstat(place))
        if node.kind == "link":
            node = node._replace(target=os.readlink(place))
        self._add(Step("put_file", parts, None, place, node, _now()))

    def link(self, opened: Path, parts: Parts) -> None:
        """Make the path one more name of a file; ``opened`` is the path of a descriptor of it."""
        file = node_of(os.stat(opened)).file
        names = set[Parts]() if file is None else names_of(self, {file}, [()])
        if names:
            self.add_name(min(names), parts)
        else:
            # Not in the workspace: this view's own file, which a command saw.
            place = self._place()
            shutil.copy2(opened, place)
            self.put_file(parts, place)

    def add_name(self, origin: Parts, parts: Parts) -> None:
        """Make the path one more name of the file at another."""
        self._add(Step("add_name", origin, parts, moment=_now()))

    def set_attributes(self, parts: Parts, **given: Unpack[Attributes]) -> None:
        self._add(Step("set_attributes", parts, content=given))

    def go_to(self, place: object, state: State) -> None:
        """Restore a snapshot, then redo what ``state`` did from there."""
        self.state = State(state.layer, (Step("back", (), content=place), *state.steps))

    def replay(self, edit: Edit, go_back: Callable[[Any], None]) -> None:
        """Make all these changes elsewhere, in the same order; ``go_back`` restores a snapshot."""
        copies: dict[int, Path] = {}
        for step in self.state.steps:
            method, parts, target, content, node, _ = step
            match method:
                case "write":
                    edit.write(parts, content_of(Cover(node, content), parts))
                case "put_file" if not isinstance(content, Path):
                    edit.put_file(parts, self._made(parts, node, content))
                case "put_file":
                    self._put_file(edit, parts, content, copies)
                case "set_attributes":
                    edit.set_attributes(parts, **step.attributes)
                case "back":
                    go_back(content)
                case _:
                    getattr(edit, method)(parts, *(() if target is None else (target,)))

    def _made(self, parts: Parts, node: Node | None, content: Any) -> Path:
        """Make a file, link or pipe whose content is stored elsewhere."""
        assert node is not None
        place = self._place()
        with contextlib.closing(Tree(place.parent)) as tree:
            if not create(tree.fd, place.name, node):
                place.write_bytes(content_of(Cover(node, content), parts))
            apply_entry(tree, (place.name,), node)
        return place

    def _put_file(self, edit: Edit, parts: Parts, place: Path, copies: dict[int, Path]) -> None:
        """Put a staged file elsewhere, and keep a copy: the merge may be repeated."""
        name = self._place()
        ino = os.lstat(place).st_ino
        os.link(place, name, follow_symlinks=False)
        edit.put_file(parts, name)
        # A copy: what is in the directory now may be changed in place.
        if ino in copies:
            os.link(copies[ino], name, follow_symlinks=False)
        elif place.is_symlink():
            name.symlink_to(os.readlink(place))
        elif place.is_file():
            shutil.copy2(place, name)
        else:
            os.mkfifo(name)
        os.rename(name, place)
        copies[ino] = place

    def check_conflicts(self, reads: Reads, onto: Layer | None, current: Look) -> None:
        """Raise MergeConflict if anything in the read set has changed since the fork.

        Args:
            onto: The layer of the parent; None if that is not a private view.
            current: What the parent shows now.
        """
        base = self.base
        if isinstance(base, Present):
            changes = base.changed()
        else:
            assert isinstance(base, Layer)
            assert onto is not None
            changes = base.differing(onto)
        changed = changes.paths
        if changes.files:
            changed = changed | names_of(base, changes.files, reads.touched)
        changed = {parts for parts in changed if not is_same(base, current, parts)}
        if not changed:
            return
        within = {parts[:depth] for parts in changed for depth in range(len(parts) + 1)}

        def differs(parts: Parts) -> bool:
            if parts in within:
                return True
            inside = any(parts[:depth] in changed for depth in range(len(parts)))
            return inside and not is_same(base, current, parts)

        reads.check(differs, base, current)

    def drop(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __del__(self) -> None:
        self.drop()

    def _add(self, step: Step) -> None:
        layer, steps = self.state
        self.state = State(step.applied(layer), (*steps, step))

    def _place(self) -> Path:
        if self._folder is None:
            self._folder = self._store.own / "views" / os.urandom(8).hex()
            self._folder.mkdir(mode=0o700, parents=True)
        self._count += 1
        return self._folder / str(self._count)


def _now() -> int:
    return int(SYSTEM_CLOCK.time() * 1e9)


def is_same(base: Look, current: Look, parts: Parts) -> bool:
    """Tell whether a path, and everything below it, is unchanged."""
    pending = [parts]
    while pending:
        place = pending.pop()
        was, now = _node(base, place), _node(current, place)
        if not _is_alike(was, now):
            return False
        if was is not None and was.kind == "directory":
            # It may have been replaced as a whole: then changes below it are not on record.
            names = _names(base, place)
            if names != _names(current, place):
                return False
            pending += [(*place, name) for name in names]
    return True


def _is_alike(was: Node | None, now: Node | None) -> bool:
    if was is None or now is None:
        return was is now
    if (was.kind, was.mode) != (now.kind, now.mode):
        return False
    if was.kind == "directory":
        return True
    if was.file != now.file and max(was.links, now.links) > 1:
        return False  # another file, even if it holds the same
    return (was.size, was.mtime_ns) == (now.size, now.mtime_ns)


def _names(look: Look, parts: Parts) -> set[str]:
    try:
        return {name for name, _ in look.kinds(parts) if not name.startswith(TEMPORARY)}
    except OSError:
        return set()


def _node(look: Look, parts: Parts) -> Node | None:
    try:
        return look.node(parts)
    except OSError:
        return _BARRED


_BARRED = Node("other", -1, 0, 0, 0)
