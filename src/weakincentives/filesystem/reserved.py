"""Protected paths: no call may change them, since they decide what runs outside of calls.

Our own code and state if they are in the workspace, stores, ``wink.toml``, and git's hooks and
settings. The user can lift the protection of names, but not that of our code.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from pathlib import Path

from weakincentives.core.state import module_places, our_code, our_environment, our_secrets
from weakincentives.errors import ProtectedPath
from weakincentives.filesystem.layers import Disk, Layer, Look, Node, node_at, walk, walk_kinds
from weakincentives.filesystem.paths import NodeKind, Parts, join_path, shown
from weakincentives.filesystem.patterns import PathPatterns
from weakincentives.filesystem.tree import Tree

# In a git directory: hooks and settings, or where git finds them.
_CODE = frozenset({"config", "config.worktree", "hooks", "info", "commondir"})
# What makes a directory a git directory, also one that is not called .git.
_STRUCTURE = frozenset({"head", "objects", "refs"})
_SPELLED = {"head": "HEAD"}
# In a git directory: below these, any name may be that of a branch or an object.
_CONTENT = frozenset({"refs", "logs", "objects"})
_FILES = frozenset({"wink.toml", ".gitmodules", ".gitconfig"})

# Where we look for modules: what Python runs before anything of ours, from a file or a package.
_FIRST = re.compile(r"(sitecustomize|usercustomize)(\..*)?", re.IGNORECASE).fullmatch

_names = "|".join(re.escape(name) for name in sorted({".git", *_CODE, *_STRUCTURE, *_FILES}))
_suspect = re.compile(rf"(?:^|/)(?:{_names})(?:/|$)", re.IGNORECASE).search


@lru_cache(maxsize=4096)
def _is_plain(parts: Parts) -> bool:
    """Tell whether no name in a path can protect it: so it is for nearly all paths."""
    return _suspect("/".join(parts)) is None


class Reserved:
    """The protected paths of one workspace.

    Args:
        root: The workspace, resolved.
        store: Its store.
        unprotected: Globs of paths that their names do not protect. A pattern without a slash is a
            name at any depth.
    """

    def __init__(self, root: Path, *, store: Path, unprotected: Sequence[str] = ()) -> None:
        self.hidden = _within(root, our_secrets())
        """Paths that cannot be read either."""
        ours = [
            *our_code(),
            *our_environment(),
            *our_secrets(),
            store,
            *_targets(root),
            *_aliases(root),
        ]
        self.trees = _within(root, ours)
        """Paths that are protected with everything below them, whatever their names."""
        if any(root.is_relative_to(each) for each in our_code()):
            self.trees = ((),)  # the workspace is in our code
        self._modules = tuple(
            each.relative_to(root).parts for each in module_places() if each.is_relative_to(root)
        )
        """Where we look for modules, as when a project is installed beside us to be edited."""
        self.unprotected = tuple(unprotected)
        self._allowed = PathPatterns(unprotected)

    def without_hidden(self, look: Look) -> Look:
        """Return a look without the hidden paths."""
        return reduce(Layer.remove, self.hidden, Layer(look)) if self.hidden else look

    def check(self, parts: Parts, look: Look, *, directory: bool = False) -> None:
        """Raise ProtectedPath if nothing may be put at a path, or changed or removed there.

        Args:
            look: What is there now.
            directory: Only a directory is made, changed or removed there, not its entries.
        """
        if self._is_plain(parts):
            return
        found = self.problem(parts, look, directory=directory)
        if found is not None:
            raise self._protected(found)

    def check_tree(self, parts: Parts, look: Look) -> None:
        """Raise ProtectedPath if a path, or anything below it, may not be changed or removed."""
        for tree in self.trees:
            if tree[: len(parts)] == parts:
                raise self._protected(tree)
        for each, kind in walk_kinds(look, parts):
            self.check(each, look, directory=kind == "directory")

    def check_moved(self, origin: Parts, target: Parts, look: Look) -> None:
        """Raise ProtectedPath if what is at a path may not be put at another."""
        for each, kind in walk_kinds(look, origin):
            there = (*target, *each[len(origin) :])
            self.check(there, look, directory=kind == "directory")

    def check_changed(self, paths: Iterable[Parts], before: Look, now: Look) -> None:
        """Raise ProtectedPath if one of the paths that were changed is protected."""
        for parts in paths:
            if self._is_plain(parts):
                continue
            kinds = {_kind(before, parts), _kind(now, parts)} - {None}
            found = self.problem(parts, before, now=now, directory=kinds == {"directory"})
            if found is not None and (
                found in self.trees or not _is_same(before, parts, now, parts)
            ):
                raise self._protected(found)

    def may_assemble(self, paths: Iterable[Parts]) -> list[Parts]:
        """Return those of some changed paths that may be parts of a git repository."""
        return [parts for parts in paths if not _is_plain(parts)]

    def check_assembled(
        self,
        paths: Iterable[Parts],
        before: Look,
        now: Look,
        earlier: Callable[[], Iterable[tuple[Look, int]]],
    ) -> None:
        """Raise ProtectedPath if a change makes a git repository, or changes the code of one.

        Each part may have been allowed: in another call, on another branch, or before an undo. What
        was a repository in an ``earlier`` state may become one again with the same code; with each
        state comes its time in nanoseconds, as it also has what others have added since.
        """
        for place, part in self._places(paths).items():
            if not _is_repository(place, now):
                continue
            if _is_repository(place, before) and _has_code_of(place, before, now):
                continue
            states = (each for each, moment in earlier() if _was_repository(place, each, moment))
            if not any(_has_code_of(place, state, now) for state in states):
                raise self._protected(part)

    def _places(self, paths: Iterable[Parts]) -> dict[Parts, Parts]:
        """Return the directories that paths may make a repository of, each with a part of it."""
        found: dict[Parts, Parts] = {}
        for parts in paths:
            names = tuple(each.lower() for each in parts)
            for depth, name in enumerate(names):
                if names[:depth][-1:] == (".git",):
                    continue  # checked by name
                is_part = name in _CODE or name in _STRUCTURE
                if is_part and not self._allowed.match("/".join(parts)):
                    found.setdefault(parts[:depth], parts[: depth + 1])
        return found

    def is_rewritten_as_it_was(self, parts: Parts, look: Look, tree: Tree, place: Parts) -> bool:
        """Tell whether a file is protected by its name, and gets the content that it has.

        git does so with its settings, for example when it deletes a branch.
        """
        found = self.problem(parts, look)
        if found is None or found in self.trees:
            return False
        return _is_same(look, parts, Disk(tree), place)

    def check_copied(self, parts: Parts) -> None:
        """Raise ProtectedPath if something that cannot be read is at a path or below it."""
        for tree in self.hidden:
            if tree[: len(parts)] == parts:
                raise self._protected(tree)

    def _is_plain(self, parts: Parts) -> bool:
        return not self.trees and not self._modules and _is_plain(parts)

    def _protected(self, parts: Parts) -> ProtectedPath:
        whose = "only the user can allow it"
        if parts in self.trees:
            whose = "it belongs to wink, and no setting allows it"
        named = shown(join_path(parts))
        return ProtectedPath(f"Cannot change {named}: it is protected. Leave it as it is; {whose}")

    def problem(
        self, parts: Parts, look: Look, *, now: Look | None = None, directory: bool = False
    ) -> Parts | None:
        """Return the protected path that a path is, or is below; None if it is not protected.

        Args:
            look: The state before the change.
            now: The state after it; without it, something is put at the path.
        """
        for tree in self.trees:
            if parts[: len(tree)] == tree:
                return tree
        found = self._module(parts, directory)
        if found is None and not _is_plain(parts):
            found = self._named(parts, look, now, directory)
        return None if found is None or self._allowed.match("/".join(parts)) else found

    def _module(self, parts: Parts, directory: bool) -> Parts | None:
        """Return what decides which code our next process starts with, if a path is that."""
        for place in self._modules:
            if parts[: len(place)] == place and any(map(_FIRST, parts[len(place) :][:1])):
                return parts[: len(place) + 1]
            if not directory and parts == place[: len(parts)]:
                return parts  # a link there would lead to other modules
        return None

    def _named(self, parts: Parts, look: Look, now: Look | None, directory: bool) -> Parts | None:
        # Some filesystems ignore case.
        names = tuple(name.lower() for name in parts)
        for depth, name in enumerate(names):
            if name in _FILES:
                return parts[: depth + 1]
            if name == ".git":
                length = _code_in(names[depth + 1 :])
                if length or not (names[depth + 1 :] or directory):
                    return parts[: depth + 1 + length]
            elif names[:depth][-1:] != (".git",) and self._in_repository(
                parts, names, depth, look, now
            ):
                return parts[: depth + 1]  # also in .git: a submodule, or what a link leads to
        return None

    def _in_repository(
        self, parts: Parts, names: Parts, depth: int, look: Look, now: Look | None
    ) -> bool:
        """Tell whether a name holds git's code in a repository, or turns a directory into one."""
        name, place = names[depth], parts[:depth]
        if name not in _CODE and name not in _STRUCTURE:
            return False
        becomes = _is_repository(place, now or look, name if now is None else None)
        if name in _STRUCTURE:
            return becomes and not _is_repository(place, look)
        if names[depth:] == ("info", "refs"):
            return False
        return becomes or _is_repository(place, look)


def _code_in(names: Parts) -> int:
    """Return how many names in a ``.git`` directory lead to hooks or settings; 0 for none."""
    if not names or names == ("info", "refs"):  # a list of branches, which `git gc` writes
        return 0
    if names[0] in _CODE:
        return 1
    if names[0] == "worktrees":  # each has a git directory of its own
        length = _code_in(names[2:])
        return length and length + 2
    if names[0] == "modules":
        for depth, name in enumerate(names[1:], start=2):
            if name in _CONTENT and depth > 2:  # a submodule may be called ``logs``
                return 0
            if name in _CODE:
                return 0 if names[depth - 1 :] == ("info", "refs") else depth
    return 0


def _is_repository(place: Parts, look: Look, added: str | None = None) -> bool:
    def has(name: str) -> bool:
        return name == added or _kind(look, (*place, _SPELLED.get(name, name))) is not None

    return has("head") and (has("commondir") or (has("objects") and has("refs")))


def _was_repository(place: Parts, look: Look, moment: int) -> bool:
    head = node_at(look, (*place, "HEAD"))
    return head is not None and head.ctime_ns <= moment and _is_repository(place, look)


def _has_code_of(place: Parts, one: Look, other: Look) -> bool:
    """Tell whether git runs nothing in a repository that it has not run in another state."""
    tops = [(*place, name) for name in sorted(_CODE)]
    return all(
        _is_like(node, parts, one, other)
        for parts, node in walk(other, tops)
        if parts != (*place, "info", "refs")  # a list of branches, which `git gc` writes
    )


def _is_like(node: Node, parts: Parts, one: Look, other: Look) -> bool:
    if node.kind != _kind(one, parts):
        return False
    if node.kind == "link":
        return one.link_target(parts) == other.link_target(parts)
    return node.kind != "file" or _is_same(one, parts, other, parts)


def _kind(look: Look, parts: Parts) -> NodeKind | None:
    node = node_at(look, parts)
    return None if node is None else node.kind


def _is_same(before: Look, parts: Parts, now: Look, place: Parts) -> bool:
    """Tell whether two files have the same content and mode."""
    was, found = node_at(before, parts), node_at(now, place)
    if was is None or found is None or not was.kind == found.kind == "file":
        return False
    same = (was.size, was.mode) == (found.size, found.mode)
    return same and before.read(parts) == now.read(place)


def _within(root: Path, paths: Iterable[Path]) -> tuple[Parts, ...]:
    """Return those of some paths that are in a workspace, relative to it, the topmost only."""
    inside = {path.relative_to(root).parts for path in paths if path.is_relative_to(root)}
    inside.discard(())  # the workspace itself cannot be protected as a whole
    return tuple(
        parts for parts in sorted(inside) if not any(parts[:n] in inside for n in range(len(parts)))
    )


def _targets(root: Path) -> Iterator[Path]:
    """Yield the targets of protected names at the top of the workspace that are links."""
    for name in ("wink.toml", ".gitmodules", *(f".git/{name}" for name in sorted(_CODE))):
        if os.path.islink(root / name):
            yield Path(os.path.realpath(root / name))


def _aliases(root: Path) -> Iterator[Path]:
    """Yield the links at the top of the workspace through which the user may start us."""
    ours = {os.fspath(path) for path in (*our_code(), *our_environment())}
    prefix = os.path.realpath(sys.prefix)
    in_environment = f"{prefix}/" if sys.prefix != sys.base_prefix else None
    with contextlib.suppress(OSError), os.scandir(root) as found:
        for each in found:
            if not each.is_symlink():
                continue
            target = os.path.realpath(each.path)
            if (
                target in ours
                or (in_environment and target.startswith(in_environment))
                # On the way to our code in the workspace.
                or (target.startswith(f"{root}/") and prefix.startswith(f"{target}/"))
            ):
                yield Path(each.path)
