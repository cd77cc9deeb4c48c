"""Whole copies of a tree, to compare the functions over operations with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from weakincentives.log import Change, Entry, Parts

Files = dict[Parts, Entry]


class Manifests:
    """Stores manifests by digest."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[Parts, Entry]] = {}

    def __call__(self, digest: str) -> Mapping[Parts, Entry]:
        return self._known[digest]

    def store(self, files: Mapping[Parts, Entry], top: Parts) -> str:
        listed = {path[len(top) :]: files[path] for path in below(files, top)}
        digest = hashlib.sha256(repr(sorted(listed.items())).encode()).hexdigest()
        self._known[digest] = listed
        return digest


class Present:
    """A tree as the algebra asks for it."""

    def __init__(self, files: Mapping[Parts, Entry]) -> None:
        self._files = files

    def entry(self, path: Parts) -> Entry | None:
        return self._files.get(path)

    def below(self, path: Parts) -> Iterable[Parts]:
        return below(self._files, path)


def below(files: Mapping[Parts, Entry], top: Parts) -> list[Parts]:
    return [path for path in files if path[: len(top)] == top and path != top]


def is_directory(files: Mapping[Parts, Entry], path: Parts) -> bool:
    return not path or (path in files and files[path].is_directory)


def remove(files: Files, path: Parts) -> None:
    for each in [*below(files, path), path]:
        files.pop(each, None)


def with_groups(files: Files) -> Files:
    """Return a tree in which only files with several names have a number."""
    groups = [entry.group for entry in files.values()]
    return {
        path: entry if groups.count(entry.group) > 1 else entry._replace(group=0)
        for path, entry in files.items()
    }


def changes_between(
    old: Files, new: Files, manifests: Manifests, *, whole: bool
) -> Iterator[Change]:
    """Yield what differs; ``whole``: directories that come or go are one change with a manifest."""
    differ = {path for path in {*old, *new} if old.get(path) != new.get(path)}
    groups = {e.group for path in differ for e in (old.get(path), new.get(path)) if e and e.group}
    differ |= {p for files in (old, new) for p, entry in files.items() if entry.group in groups}
    done: set[Parts] = set()
    for path in sorted(differ):
        if path in done:
            continue
        sides = [old.get(path), new.get(path)]
        replaced = sides[0] is None or sides[1] is None or sides[0].kind != sides[1].kind
        inside = {*below(old, path), *below(new, path)}
        linked = any(f[p].group for f in (old, new) for p in inside if p in f)
        if whole and replaced and inside and not linked:
            for number, files in enumerate((old, new)):
                if (entry := sides[number]) is not None and entry.is_directory:
                    sides[number] = entry._replace(content=manifests.store(files, path))
            done |= inside
        yield Change(path, sides[0], sides[1])


def applied(changes: Iterable[Change], files: Files, manifests: Manifests) -> Files:
    """Return a tree with some changes made, after checking that it is as they expect."""
    found = dict(files)
    for change in sorted(changes):
        if change.is_whole:
            remove(found, change.path)
        after = change.after
        if after is not None and after.is_directory and after.content:
            for inner, entry in manifests(after.content).items():
                found[(*change.path, *inner)] = entry
            after = after._replace(content="")
        if after is None:
            found.pop(change.path, None)
        else:
            found[change.path] = after
    return found


def shown(files: Files) -> dict[Parts, tuple[Entry, frozenset[Parts]]]:
    """Return a tree with the names of each file in place of its number."""
    names: dict[int, set[Parts]] = {}
    for path, entry in files.items():
        names.setdefault(entry.group, set()).add(path)
    return {
        path: (entry._replace(group=0), frozenset(names[entry.group] if entry.group else ()))
        for path, entry in files.items()
    }


def nodes(files: Mapping[Parts, Entry | None]) -> dict[Parts, Entry]:
    """Return entries without the numbers of links and the manifests of directories."""
    return {
        path: entry._replace(group=0, content="" if entry.is_directory else entry.content)
        for path, entry in files.items()
        if entry is not None
    }
