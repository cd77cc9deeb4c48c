"""A model of files: a plain dict from path to what is there, and what each operation does to it.

It knows nothing of journals, views or snapshots: going back is taking an older copy of the dict.
Paths here are below ``ROOT``, so that a tree can have things beside it that must not be reached.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trees import Seen

from weakincentives.errors import (
    AlreadyExists,
    FilesystemError,
    NoSuchFile,
    NotADirectory,
    NotAFile,
    PathEscapesRoot,
    ReadOnlyFile,
)

ROOT = "workspace"

UMASK = os.umask(0o022)
os.umask(UMASK)

OWNER = (os.geteuid(), os.getegid()) if hasattr(os, "geteuid") else (0, 0)

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is at a path. Names with the same number are one file."""

    kind: str
    mode: int
    content: bytes | str | None
    number: int
    xattrs: tuple[tuple[str, bytes], ...] = ()
    owner: tuple[int, int] = OWNER
    modified: int | None = None
    """None until it has been seen: when a file is written is not for the model to say."""


class Stat(NamedTuple):
    """What ``stat`` and ``list`` tell of an entry."""

    path: str
    kind: str
    size: int
    readonly: bool


class Model:
    """Files as a dict."""

    def __init__(self, entries: dict[str, Entry], real_root: str = "/nowhere") -> None:
        self.entries = entries
        self.real_root = real_root
        """Where the tree really is: a symlink may name a place in it by its absolute path."""

    @classmethod
    def of(cls, seen: dict[str, Seen], real_root: str) -> Model:
        """Return the model of a tree that was looked at."""
        numbers: dict[frozenset[str], int] = {}
        entries = {
            path: Entry(
                kind=it.kind,
                mode=it.mode,
                content=it.content,
                number=numbers.setdefault(it.names, next(_numbers)),
                xattrs=it.xattrs,
                owner=it.owner,
                modified=it.modified,
            )
            for path, it in seen.items()
        }
        return cls(entries, real_root)

    def copy_of_entries(self) -> dict[str, Entry]:
        return dict(self.entries)

    # Comparing with what is really there

    def expected(self) -> dict[str, Seen]:
        """Return what a look at the tree should give; times that are not known are 0."""
        names: dict[int, set[str]] = {}
        for path, entry in self.entries.items():
            names.setdefault(entry.number, set()).add(path)
        return {
            path: Seen(
                kind=entry.kind,
                mode=entry.mode,
                content=entry.content,
                links=0,
                names=frozenset(names[entry.number]),
                xattrs=entry.xattrs,
                owner=entry.owner,
                modified=entry.modified or 0,
            )
            for path, entry in self.entries.items()
        }

    def check(self, seen: dict[str, Seen]) -> None:
        """Assert that the tree is as it should be, and learn the times that were not known."""
        expected = self.expected()
        wrong = {}
        for path in {*expected, *seen}:
            should, found = expected.get(path), seen.get(path)
            if should is not None and found is not None and should.modified == 0:
                should = should._replace(modified=found.modified)
            if should != found:
                wrong[path] = difference(should, found)
        assert not wrong, "\n".join(f"{path!r}: {text}" for path, text in sorted(wrong.items()))
        for path, entry in self.entries.items():
            if entry.modified is None:
                self.entries[path] = replace(entry, modified=seen[path].modified)

    def names_of(self, entry: Entry) -> set[str]:
        return {path for path, other in self.entries.items() if other.number == entry.number}

    def adopt(self, place: str, seen: dict[str, Seen]) -> None:
        """Take what is at one path as it is found, with what it has in common with others."""
        fresh = Model.of(seen, self.real_root)
        same = {p for p in seen[place].names if p in self.entries}
        gone = {p for p, e in self.entries.items() if e.number == self.entries[place].number}
        for name in same | gone:
            self.entries[name] = fresh.entries[name]
        self._stir(place)

    # Paths

    def resolve(self, path: str, *, follow: bool = True) -> str:
        """Return where a path leads, through symlinks; with a prefix, as all keys here have."""
        todo = [part for part in path.split("/") if part not in ("", ".")]
        at: list[str] = []
        hops = 0
        while todo:
            name = todo.pop(0)
            if name == "..":
                if not at:
                    raise PathEscapesRoot(path)
                at.pop()
                continue
            entry = self.entries.get("/".join((ROOT, *at, name)))
            if entry is not None and entry.kind == "symlink" and (todo or follow):
                hops += 1
                if hops > 40:
                    raise FilesystemError(path)
                at, todo = self._follow(entry, at, todo)
                continue
            at.append(name)
            if entry is not None and entry.kind != "directory" and todo:
                raise NotADirectory(path)
        return "/".join((ROOT, *at))

    def _follow(self, link: Entry, at: list[str], todo: list[str]) -> tuple[list[str], list[str]]:
        assert isinstance(link.content, str)
        target = link.content
        if target.startswith("/"):
            if not f"{target}/".startswith(f"{self.real_root}/"):
                raise PathEscapesRoot(target)
            at, target = [], target.removeprefix(self.real_root)
        return at, [part for part in target.split("/") if part not in ("", ".")] + todo

    def at(self, path: str, *, follow: bool = True) -> tuple[str, Entry]:
        """Return where a path leads and what is there."""
        place = self.resolve(path, follow=follow)
        if place not in self.entries:
            raise NoSuchFile(path)
        return place, self.entries[place]

    def below(self, place: str) -> dict[str, Entry]:
        return {p: e for p, e in self.entries.items() if p.startswith(f"{place}/")}

    def some_paths(self) -> list[str]:
        """Return paths that are there, but not all the objects in a git repository."""
        found = (p.removeprefix(f"{ROOT}/") for p in self.below(ROOT))
        left_out = (".git/", "bystander")
        return sorted(p for p in found if is_text(p) and not any(n in p for n in left_out))

    # Reading

    def read_bytes(self, path: str) -> bytes:
        return self._file(path)[1]

    def exists(self, path: str) -> bool:
        try:
            self.at(path)
        except (NoSuchFile, NotADirectory):
            return False
        return True

    def is_readonly(self, path: str) -> bool:
        try:
            _, entry = self.at(path)
        except (NoSuchFile, NotADirectory):
            return False
        return locked(entry)

    def stat(self, path: str) -> Stat:
        self.at(path, follow=False)
        return self._followed(path)

    def list(self, path: str) -> list[Stat]:
        place = self._directory(path)
        names = sorted(p.rpartition("/")[2] for p in self.below(place) if parent(p) == place)
        return [self._followed(join(path, name)) for name in names if is_text(name)]

    def glob(self, path: str) -> list[str]:
        """Return the files below a directory; symlinks to directories are not gone into."""
        place = self._directory(path)
        found = (join(path, p.removeprefix(f"{place}/")) for p in self.below(place))
        return sorted(p for p in found if is_text(p) and self._followed(p).kind == "file")

    def _directory(self, path: str) -> str:
        place, entry = self.at(path)
        if entry.kind != "directory":
            raise NotADirectory(path)
        return place

    def _followed(self, path: str) -> Stat:
        """Tell what a path leads to; of a symlink that leads nowhere or out, only that."""
        try:
            _, entry = self.at(path)
        except FilesystemError:
            return Stat(normal(path), "link", 0, False)
        return self._stat(normal(path), entry)

    def _stat(self, path: str, entry: Entry) -> Stat:
        kind = entry.kind if entry.kind in ("file", "directory") else "other"
        size = len(entry.content) if isinstance(entry.content, bytes) else 0
        return Stat(path, kind, size, locked(entry))

    # Writing

    def write_bytes(self, path: str, content: bytes) -> None:
        self._store(path, lambda _: content)

    def append(self, path: str, content: str) -> None:
        self._store(path, lambda old: old + content.encode())

    def _store(self, path: str, change: Any) -> None:
        place = self.resolve(path)
        entry = self.entries.get(place)
        if entry is None:
            self._make_way(place)
            self._put(place, Entry("file", 0o666 & ~UMASK, change(b""), next(_numbers)))
            return
        old = self._file(path)[1]
        if locked(entry):
            raise ReadOnlyFile(path)
        # Every name of the file sees it, and keeps its mode and attributes.
        for name, other in self.entries.items():
            if other.number == entry.number:
                self.entries[name] = replace(other, content=change(old), modified=None)
        self._stir(place)

    def mkdir(self, path: str) -> None:
        place = self.resolve(path)
        entry = self.entries.get(place)
        if entry is None:
            self._make_way(place)
            self._put(place, directory())
        elif entry.kind != "directory":
            raise NotADirectory(path)

    def set_readonly(self, path: str, readonly: bool) -> None:
        place, _ = self._file(path)
        number = self.entries[place].number
        for name, entry in self.entries.items():
            if entry.number == number:
                mode = entry.mode & ~0o222 if readonly else entry.mode | 0o200
                self.entries[name] = replace(entry, mode=mode)

    def delete(self, path: str, recursive: bool) -> None:
        if self.resolve(path, follow=False) == ROOT:
            raise FilesystemError(path)
        place, _ = self.at(path, follow=False)
        if self.below(place) and not recursive:
            raise FilesystemError(path)
        self._check_unlocked(place)
        self._drop(place)

    def move(self, source: str, destination: str, overwrite: bool) -> None:
        origin, target = self._check_transfer(source, destination, overwrite, follow=False)
        self._check_unlocked(origin)
        moved = {place.removeprefix(origin): entry for place, entry in self._whole(origin).items()}
        self._drop(origin)
        self._arrive(target, moved)

    def copy(self, source: str, destination: str, overwrite: bool) -> None:
        if self.at(source)[1].kind == "other":
            raise FilesystemError(source)
        origin, target = self._check_transfer(source, destination, overwrite, follow=True)
        if origin == target:
            self._stir(target)
            return
        numbers: dict[int, int] = {}
        copied = {}
        for place, entry in self._whole(origin).items():
            # Names of one file that are copied together are names of one file again.
            number = numbers.setdefault(entry.number, next(_numbers))
            copied[place.removeprefix(origin)] = replace(entry, number=number)
        self._arrive(target, copied)

    def _check_transfer(
        self, source: str, destination: str, overwrite: bool, *, follow: bool
    ) -> tuple[str, str]:
        if self.resolve(source, follow=follow) == ROOT:
            raise FilesystemError(source)
        origin, entry = self.at(source, follow=follow)
        target = self.resolve(destination, follow=False)
        if target.startswith(f"{origin}/"):
            raise FilesystemError(destination)
        there = self.entries.get(target)
        if there is None:
            return origin, target
        if not overwrite:
            raise AlreadyExists(destination)
        if origin.startswith(f"{target}/"):
            raise FilesystemError(destination)
        if there.kind == "directory" and entry.kind != "directory":
            raise NotAFile(destination)
        if there.kind != "directory" and entry.kind == "directory":
            raise NotADirectory(destination)
        self._check_unlocked(target)
        return origin, target

    def _arrive(self, target: str, entries: dict[str, Entry]) -> None:
        if target in self.entries:
            self._drop(target)
        self._make_way(target)
        for rest, entry in entries.items():
            self.entries[target + rest] = entry
        self._stir(target)

    def _file(self, path: str) -> tuple[str, bytes]:
        place, entry = self.at(path)
        if entry.kind == "directory":
            raise NotAFile(path)
        if entry.kind != "file":
            raise FilesystemError(path)
        assert isinstance(entry.content, bytes)
        return place, entry.content

    def _whole(self, place: str) -> dict[str, Entry]:
        return {place: self.entries[place], **self.below(place)}

    def _check_unlocked(self, place: str) -> None:
        if any(locked(entry) for entry in self._whole(place).values()):
            raise ReadOnlyFile(place)

    def _make_way(self, place: str) -> None:
        above = parent(place)
        if above not in self.entries:
            self._make_way(above)
            self._put(above, directory())

    def _put(self, place: str, entry: Entry) -> None:
        self.entries[place] = entry
        self._stir(place)

    def _drop(self, place: str) -> None:
        for gone in self._whole(place):
            del self.entries[gone]
        self._stir(place)

    def _stir(self, place: str) -> None:
        """Take the time of a directory as not known: an entry has come, gone or been replaced."""
        above = parent(place)
        self.entries[above] = replace(self.entries[above], modified=None)


def directory() -> Entry:
    return Entry("directory", 0o777 & ~UMASK, None, next(_numbers))


def locked(entry: Entry) -> bool:
    return entry.kind == "file" and not entry.mode & 0o200


def parent(place: str) -> str:
    return place.rpartition("/")[0]


def normal(path: str) -> str:
    return "/".join(part for part in path.split("/") if part not in ("", ".")) or "."


def join(path: str, rest: str) -> str:
    return rest if normal(path) == "." else f"{normal(path)}/{rest}"


def is_text(name: str) -> bool:
    """Tell whether a name can be given as a path: one that is not UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def difference(should: Seen | None, found: Seen | None) -> str:
    """Say in what two things differ, without printing megabytes."""
    if should is None or found is None:
        return f"should be {brief(should)}, is {brief(found)}"
    fields = [name for name in Seen._fields if getattr(should, name) != getattr(found, name)]
    return "; ".join(
        f"{name} should be {brief(getattr(should, name))}, is {brief(getattr(found, name))}"
        for name in fields
    )


def brief(value: object) -> str:
    text = oct(value) if isinstance(value, int) and value < 0o10000 else repr(value)
    return text if len(text) < 200 else f"{text[:120]}... ({len(text)} characters)"
