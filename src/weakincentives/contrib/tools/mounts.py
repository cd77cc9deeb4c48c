"""Host directories copied into a filesystem in memory, without what ``.gitignore`` excludes."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weakincentives.contrib.tools.file_values import listed
from weakincentives.errors import FilesystemError, MissingExtra
from weakincentives.filesystem.patterns import GlobPattern
from weakincentives.filesystem.protocol import Parts, join_path, split_path, split_root
from weakincentives.filesystem.tree import Tree

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec
    from pathspec.pattern import RegexPattern

_SLASH = "ps_d"
"""What pathspec calls the slash behind the directory that a rule is about."""


@dataclass(frozen=True, slots=True, eq=False)  # told apart by which file was parsed, and when
class IgnoreRules:
    """The rules of one file, for what is below its directory."""

    directory: str
    spec: GitIgnoreSpec


def parse_ignore_file(text: str, directory: str) -> IgnoreRules:
    """Return the rules of a ``.gitignore`` in a directory, given as a path or ``"."``."""
    try:
        from pathspec import GitIgnoreSpec
    except ImportError as error:
        raise MissingExtra("files", "pathspec") from error
    lines = text.removeprefix("\ufeff").splitlines()  # git does not mind a byte order mark
    return IgnoreRules(directory, GitIgnoreSpec.from_lines(lines))


def is_ignored(path: str, is_directory: bool, rules: Sequence[IgnoreRules]) -> bool:
    """Tell whether git would leave a path out, given that it looks into its directory."""
    for each in reversed(rules):  # the nearest file that says anything decides
        inside = path if each.directory == "." else path[len(each.directory) + 1 :]
        for pattern in reversed(tuple(each.spec.patterns)):  # and the last of its rules
            if pattern.include is not None and _matches(pattern, inside, is_directory):
                return pattern.include
    return False


def _matches(pattern: RegexPattern, path: str, is_directory: bool) -> bool:
    """Tell whether a rule is about a path itself, not about a directory above it."""
    found = _match(pattern, path)
    if found is not None and found.groupdict().get(_SLASH) is None:
        return True
    found = _match(pattern, f"{path}/") if is_directory else None
    return found is not None and _SLASH in found.groupdict() and found.start(_SLASH) == len(path)


def _match(pattern: RegexPattern, path: str) -> re.Match[str] | None:
    found: Any = pattern.match_file(path)  # pathspec does not say what it matches
    return None if found is None else found.match


Reason = Literal[
    "excluded",
    "ignored by .gitignore",
    "too large",
    "over the limit of the mount",
    "a link that leads nowhere, or out of the mount",
    "a link to a directory",
    "a name that is not text",
    "not a regular file",
    "not readable",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMount:
    """A directory of the host whose files are copied into the workspace.

    Patterns are as in ``Filesystem.glob``; one without a slash holds at any depth, and one that
    matches a directory takes all that is in it.
    """

    host_path: str | os.PathLike[str]
    path: str = "."
    """The directory of the workspace that its content goes to."""
    include: Sequence[str] = ()
    """Only what matches one of these; empty means everything."""
    exclude: Sequence[str] = (".git",)
    gitignore: bool = True
    """Leave out what the ``.gitignore`` files in it leave out."""
    max_file_bytes: int = 1_000_000
    """Larger files are left out."""
    max_bytes: int = 100_000_000
    """What all files together may have; those that come later are left out."""
    max_files: int = 20_000

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} takes several patterns: put a single one in a list")
        for name in ("max_file_bytes", "max_bytes", "max_files"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file or directory of the host that is not in the workspace."""

    path: str
    """Where it would be; a directory ends in a slash."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class MountedFile:
    path: str
    data: bytes
    readonly: bool


def read_mount(mount: HostMount, root: str) -> tuple[list[MountedFile], list[LeftOut]]:
    """Return the files of a mount, directory by directory, and what was left out.

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
    """Return what a model is told about files that are missing; empty when there is nothing.

    It is not told what was excluded, nor the names of what git ignores: those may be secrets.
    """
    lines: list[str] = []
    for reason in sorted({each.reason for each in left_out} - {"excluded"}):
        paths = [each.path for each in left_out if each.reason == reason]
        unnamed = reason == "ignored by .gitignore"
        lines.append(f"- {reason}: {len(paths) if unnamed else listed(paths)}")
    return "\n".join(["Not everything could be taken into the workspace:", *lines]) if lines else ""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file or directory on the way."""

    parts: Parts
    status: os.stat_result
    included: bool
    rules: tuple[IgnoreRules, ...] = ()
    """Those of the .gitignore files in the directories above it."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


class _Walk:
    """One look through a host directory. Links are never followed out of it."""

    def __init__(self, mount: HostMount, place: Parts, tree: Tree) -> None:
        self.left_out: list[LeftOut] = []
        self.mount = mount
        self.place = place
        self.tree = tree
        self._include = _any_of(mount.include)
        self._exclude = _any_of(mount.exclude)
        self._bytes = 0
        self._count = 0

    def files(self) -> Iterator[MountedFile]:
        pending = [_Entry((), os.fstat(self.tree.fd), not self.mount.include)]
        while pending:
            entry = pending.pop()
            if entry.is_directory:
                pending += reversed(list(self._entries(entry)))
            elif entry.included:
                found = self._read(entry.parts, entry.status)
                if isinstance(found, str):
                    self._leave(entry, found)
                    continue
                data, status = found
                self._bytes += len(data)
                self._count += 1
                yield MountedFile(self._shown(entry.parts), data, not status.st_mode & 0o222)

    def _entries(self, directory: _Entry) -> Iterator[_Entry]:
        """Yield what is in a directory and not to be left out."""
        try:
            found = sorted(self.tree.scan(directory.parts))
        except OSError:
            self._leave(directory, "not readable")
            return
        rules = directory.rules
        if self.mount.gitignore and any(name == ".gitignore" for name, _ in found):
            rules = (*rules, *self._ignore_file(directory.parts))
        for name, status in found:
            parts = (*directory.parts, name)
            # What matches a directory matches all that is in it.
            included = directory.included or self._include(parts)
            entry = _Entry(parts, status, included, rules)
            if self._exclude(parts):
                self._leave(entry, "excluded")
            elif is_ignored(join_path(parts), entry.is_directory, rules):
                self._leave(entry, "ignored by .gitignore")
            else:
                yield entry

    def _read(self, parts: Parts, status: os.stat_result) -> tuple[bytes, os.stat_result] | Reason:
        """Return a file's bytes and status, or why it is left out."""
        try:
            split_path(join_path(parts))
        except FilesystemError:
            return "a name that is not text"
        if stat.S_ISLNK(status.st_mode):
            try:
                parts = self.tree.resolve(parts)
                status = self.tree.status(parts) or status
            except (FilesystemError, OSError):
                pass  # then it still is a link
        refusal = self._refusal(status)
        if refusal is not None:
            return refusal
        try:
            return self.tree.read(parts)
        except OSError:
            return "not readable"

    def _refusal(self, status: os.stat_result) -> Reason | None:
        if stat.S_ISLNK(status.st_mode):
            return "a link that leads nowhere, or out of the mount"
        if stat.S_ISDIR(status.st_mode):
            return "a link to a directory"
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if status.st_size > self.mount.max_file_bytes:
            return "too large"
        is_full = self._count >= self.mount.max_files
        if is_full or self._bytes + status.st_size > self.mount.max_bytes:
            return "over the limit of the mount"
        return None

    def _shown(self, parts: Parts) -> str:
        return join_path((*self.place, *parts))

    def _leave(self, entry: _Entry, reason: Reason) -> None:
        path = self._shown(entry.parts) + ("/" if entry.is_directory else "")
        self.left_out.append(LeftOut(path, reason))

    def _ignore_file(self, parts: Parts) -> Iterator[IgnoreRules]:
        """Yield what a directory's .gitignore says."""
        try:
            data, _ = self.tree.read((*parts, ".gitignore"))
        except OSError:
            return
        yield parse_ignore_file(data.decode(errors="replace"), join_path(parts))


_Test = Callable[[Parts], bool]


def _any_of(patterns: Sequence[str]) -> _Test:
    """Return whether a path matches one of the patterns."""
    globs = [GlobPattern(each if "/" in each else f"**/{each}") for each in patterns]

    def matches(parts: Parts) -> bool:
        for glob in globs:
            positions = glob.start(())
            for name in parts:
                positions = glob.step(positions, name)
            if glob.matched(positions):
                return True
        return False

    return matches
