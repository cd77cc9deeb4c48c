"""A private view's changes: a layer over its parent, and the steps to replay on a merge."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.filesystem.base import Reads
from weakincentives.filesystem.layers import (
    Cover,
    File,
    Forward,
    Layer,
    Look,
    Node,
    Present,
    names_of,
    node_of,
)
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.store import Store
from weakincentives.filesystem.tree import without_privileges

# Below every inode number on disk, so that no staged file is mistaken for one there.
_numbers = itertools.count(-1, -1)

IN_MEMORY = 64 << 10
"""Larger contents get a file of their own until the view is merged."""


class Edit(Protocol):
    """Where changes can be made: an open transaction, or a private view."""

    def write(self, parts: Parts, data: bytes) -> None: ...
    def make_directory(self, parts: Parts) -> None: ...
    def remove(self, parts: Parts) -> None: ...
    def rename(self, origin: Parts, target: Parts) -> None: ...
    def copy(self, origin: Parts, target: Parts) -> None: ...
    def put_file(self, parts: Parts, source: Path) -> None: ...
    def link(self, opened: Path, parts: Parts) -> None: ...
    def add_name(self, origin: Parts, parts: Parts) -> None: ...
    def set_attributes(
        self,
        parts: Parts,
        *,
        mode: int | None = None,
        mtime_ns: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        xattrs: tuple[tuple[str, bytes], ...] | None = None,
    ) -> None: ...


class _Step(NamedTuple):
    """A change: a method of ``Edit``, or "back", which restores a snapshot."""

    method: str
    parts: Parts
    target: Parts | None = None
    content: Any = None
    """A file's bytes or where they are; attributes; or a snapshot."""

    @property
    def changed(self) -> set[Parts]:
        """The paths where something changes."""
        if self.target is None:
            return {self.parts}
        return {self.parts, self.target} if self.method == "rename" else {self.target}


class State(NamedTuple):
    """A private view's changes: the layer that shows them, and the steps that lead there."""

    layer: Layer
    steps: tuple[_Step, ...] = ()


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
        if isinstance(look, Present):
            changed = look.changed()
            paths |= changed.paths
            files |= changed.files
        return paths | names_of(self, files, [()]) if files else paths

    # Changing

    def write(self, parts: Parts, data: bytes) -> None:
        now = _now()
        layer = self.layer.make_directories(parts[:-1], now)
        old = layer.node(parts)
        content = data if len(data) <= IN_MEMORY else self._spill(data)
        mode = 0o644 if old is None else without_privileges(old.mode)
        if old is not None and old.links > 1:  # the same file, for all the names it has
            node = old._replace(mode=mode, size=len(data), mtime_ns=now)
        else:
            node = Node("file", mode, len(data), now, next(_numbers))
        steps = self.state.steps
        if steps and steps[-1].method == "write" and steps[-1].parts == parts:
            steps = steps[:-1]
        self.state = State(
            layer.put(parts, Cover(node, content)),
            (*steps, _Step("write", parts, content=content)),
        )

    def make_directory(self, parts: Parts) -> None:
        layer = self.layer.make_directories(parts, _now())
        self._add(layer, _Step("make_directory", parts))

    def remove(self, parts: Parts) -> None:
        self._add(self.layer.remove(parts), _Step("remove", parts))

    def rename(self, origin: Parts, target: Parts) -> None:
        layer = self.layer.make_directories(target[:-1], _now()).rename(origin, target)
        self._add(layer, _Step("rename", origin, target))

    def copy(self, origin: Parts, target: Parts) -> None:
        layer = self.layer.make_directories(target[:-1], _now())
        layer = layer.copy(origin, target, _numbers)
        self._add(layer, _Step("copy", origin, target))

    def put_file(self, parts: Parts, source: Path) -> None:
        """Move the file, link or pipe at ``source`` to the path."""
        place = self._place()
        os.rename(source, place)
        node = node_of(os.lstat(place))
        content = os.fsencode(os.readlink(place)) if node.kind == "link" else place
        layer = self.layer.make_directories(parts[:-1], _now()).put(parts, Cover(node, content))
        self._add(layer, _Step("put_file", parts, content=place))

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
        layer = self.layer.make_directories(parts[:-1], _now()).add_name(origin, parts)
        self._add(layer, _Step("add_name", origin, parts))

    def set_attributes(self, parts: Parts, *, mode: int | None = None, **others: Any) -> None:
        """Change the given attributes of a file or directory."""
        layer = self.layer if mode is None or not parts else self.layer.set_mode(parts, mode)
        self._add(layer, _Step("set_attributes", parts, content={"mode": mode, **others}))

    def go_to(self, place: object, state: State) -> None:
        """Restore a snapshot, then redo what ``state`` did from there."""
        self.state = State(state.layer, (_Step("back", (), content=place), *state.steps))

    def replay(self, edit: Edit, go_back: Callable[[Any], None]) -> None:
        """Make all these changes elsewhere, in the same order; ``go_back`` restores a snapshot."""
        copies: dict[int, Path] = {}
        for method, parts, target, content in self.state.steps:
            match method:
                case "write":
                    data = content.read_bytes() if isinstance(content, Path) else content
                    edit.write(parts, data)
                case "put_file":
                    self._put_file(edit, parts, content, copies)
                case "set_attributes":
                    edit.set_attributes(parts, **content)
                case "back":
                    go_back(content)
                case _:
                    getattr(edit, method)(parts, *(() if target is None else (target,)))

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
        changed = {parts for parts in changed if not _is_same(base, current, parts)}
        if not changed:
            return
        within = {parts[:depth] for parts in changed for depth in range(len(parts) + 1)}

        def differs(parts: Parts) -> bool:
            if parts in within:
                return True
            inside = any(parts[:depth] in changed for depth in range(len(parts)))
            return inside and not _is_same(base, current, parts)

        reads.check(differs, base, current)

    def drop(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __del__(self) -> None:
        self.drop()

    def _add(self, layer: Layer, step: _Step) -> None:
        self.state = State(layer, (*self.state.steps, step))

    def _spill(self, data: bytes) -> Path:
        place = self._place()
        place.write_bytes(data)
        return place

    def _place(self) -> Path:
        """Return a free path for a file of this view."""
        if self._folder is None:
            self._folder = self._store.path / "views" / os.urandom(8).hex()
            self._folder.mkdir(mode=0o700, parents=True)
        self._count += 1
        return self._folder / str(self._count)


def _now() -> int:
    return int(SYSTEM_CLOCK.time() * 1e9)


def _is_same(base: Look, current: Look, parts: Parts) -> bool:
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
