"""Host directories copied into a workspace, without the files that ``.gitignore`` excludes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weakincentives.contrib.tools.file_values import listed
from weakincentives.errors import FilesystemError
from weakincentives.filesystem.ignored import IgnoreRules, is_ignored, parse_ignore_file
from weakincentives.filesystem.paths import Parts, join_path, split_path, split_root
from weakincentives.filesystem.patterns import PathPatterns
from weakincentives.filesystem.tree import Tree

Reason = Literal[
    "excluded",
    "ignored by .gitignore",
    "too large",
    "over the limit of the mount",
    "not a regular file",
    "not readable",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMount:
    """A directory of the host whose files are copied into the workspace.

    Patterns are as in ``Filesystem.glob``; a pattern without a slash matches at any depth, and one
    that matches a directory includes everything in it.
    """

    host_path: str | os.PathLike[str]
    path: str = "."
    """The directory of the workspace to copy it to."""
    include: Sequence[str] = ()
    """Only files that match one of these; empty means everything."""
    exclude: Sequence[str] = (".git",)
    gitignore: bool = True
    """Leave out the files that its ``.gitignore`` files exclude."""
    max_file_bytes: int = 1_000_000
    """Larger files are left out."""
    max_bytes: int = 100_000_000
    """Of all files together; later files are left out."""
    max_files: int = 20_000

    def __post_init__(self) -> None:
        PathPatterns(self.include)  # refuses a string
        PathPatterns(self.exclude)
        if min(self.max_file_bytes, self.max_bytes, self.max_files) < 0:
            raise ValueError("max_file_bytes, max_bytes and max_files must not be negative")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file or directory of the host that is not in the workspace."""

    path: str
    """Its path in the workspace; a directory ends in a slash."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class MountedFile:
    path: str
    data: bytes
    readonly: bool


def read_mount(mount: HostMount, root: str) -> tuple[list[MountedFile], list[LeftOut]]:
    """Return the files of a mount, directory by directory, and the files left out.

    ``root`` is the virtual prefix of the workspace.
    """
    place = split_path(mount.path, split_root(root))
    if not os.path.isdir(mount.host_path):
        raise NotADirectoryError(f"not a directory to mount: {os.fspath(mount.host_path)}")
    tree = Tree(Path(mount.host_path))
    try:
        walk = _Walk(mount, place, tree)
        return list(walk.files()), walk.left_out
    finally:
        tree.close()


def left_out_text(left_out: Sequence[LeftOut]) -> str:
    """Return the prompt's text about files that were left out; empty if there are none.

    Excluded files and the names of ignored ones are not mentioned: they may be secrets.
    """
    lines: list[str] = []
    for reason in sorted({each.reason for each in left_out} - {"excluded"}):
        paths = [each.path for each in left_out if each.reason == reason]
        unnamed = reason == "ignored by .gitignore"
        lines.append(f"- {reason}: {len(paths) if unnamed else listed(paths)}")
    return "\n".join(["Files that are not in the workspace:", *lines]) if lines else ""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file or directory of the mount."""

    parts: Parts
    status: os.stat_result
    rules: tuple[IgnoreRules, ...] = ()
    """Of the .gitignore files in the directories above it."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


class _Walk:
    """A walk through a host directory. Links are never followed out of it."""

    def __init__(self, mount: HostMount, place: Parts, tree: Tree) -> None:
        self.left_out: list[LeftOut] = []
        self.mount = mount
        self.place = place
        self.tree = tree
        self._include = PathPatterns(mount.include or ("*",))
        self._exclude = PathPatterns(mount.exclude)
        self._bytes = 0
        self._count = 0

    def files(self) -> Iterator[MountedFile]:
        pending = [_Entry((), os.fstat(self.tree.fd))]
        while pending:
            entry = pending.pop()
            if entry.is_directory:
                pending += reversed(list(self._entries(entry)))
            elif self._include.match(join_path(entry.parts)):
                found = self._read(entry.parts, entry.status)
                if isinstance(found, str):
                    self._leave(entry, found)
                    continue
                data, status = found
                self._bytes += len(data)
                self._count += 1
                yield MountedFile(self._shown(entry.parts), data, not status.st_mode & 0o222)

    def _entries(self, directory: _Entry) -> Iterator[_Entry]:
        """Yield the entries of a directory that are not left out."""
        try:
            found = sorted(self.tree.scan(directory.parts))
        except OSError:
            self._leave(directory, "not readable")
            return
        rules = directory.rules
        if self.mount.gitignore and any(name == ".gitignore" for name, _ in found):
            rules = (*rules, *self._ignore_file(directory.parts))
        for name, status in found:
            entry = _Entry((*directory.parts, name), status, rules)
            path = join_path(entry.parts)
            if self._exclude.match(path):
                self._leave(entry, "excluded")
            elif is_ignored(path, entry.is_directory, rules):
                self._leave(entry, "ignored by .gitignore")
            else:
                yield entry

    def _read(self, parts: Parts, status: os.stat_result) -> tuple[bytes, os.stat_result] | Reason:
        """Return a file's bytes and status, or why it is left out."""
        mount = self.mount
        try:
            split_path(join_path(parts))  # raises for a name that is not UTF-8
            if stat.S_ISLNK(status.st_mode):
                parts = self.tree.resolve(parts)  # raises for a broken link, or one that leads out
                status = self.tree.status(parts) or status
            if not stat.S_ISREG(status.st_mode):
                return "not a regular file"
            if status.st_size > mount.max_file_bytes:
                return "too large"
            is_full = self._count >= mount.max_files
            if is_full or self._bytes + status.st_size > mount.max_bytes:
                return "over the limit of the mount"
            return self.tree.read(parts)
        except (FilesystemError, OSError):
            return "not readable"

    def _shown(self, parts: Parts) -> str:
        return join_path((*self.place, *parts))

    def _leave(self, entry: _Entry, reason: Reason) -> None:
        path = self._shown(entry.parts) + ("/" if entry.is_directory else "")
        self.left_out.append(LeftOut(path, reason))

    def _ignore_file(self, parts: Parts) -> Iterator[IgnoreRules]:
        """Yield the rules of a directory's .gitignore."""
        try:
            data, _ = self.tree.read((*parts, ".gitignore"))
        except OSError:
            return
        yield parse_ignore_file(data.decode(errors="replace"), join_path(parts))
