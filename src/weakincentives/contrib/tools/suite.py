"""Shared by the suites: tools made from their handlers, and the workspace of a section.

A workspace is filled from host directories, without the files that ``.gitignore`` excludes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

from weakincentives.contrib.tools.file_values import listed
from weakincentives.errors import FilesystemError
from weakincentives.filesystem import Filesystem
from weakincentives.filesystem.ignored import IgnoreRules, is_ignored, parse_ignore_file
from weakincentives.filesystem.paths import DEFAULT_ROOT, Parts, join_path, split_path, split_root
from weakincentives.filesystem.patterns import PathPatterns
from weakincentives.filesystem.tree import Tree
from weakincentives.prompt.section import Section, SectionOptions
from weakincentives.prompt.signatures import hints_of
from weakincentives.prompt.tool import Reach, Tool
from weakincentives.resources import Binding, ResourceRegistry


def load_types() -> None:
    """Import the types of our tools, so that a saved session that has some can be opened."""
    for name in ("asteval", "digest", "planning", "sandbox.section", "file_values", "files"):
        import_module(f"weakincentives.contrib.tools.{name}")


def suite_tool(
    handler: Callable[..., Any], *, reach: Reach | None, **options: Any
) -> Tool[Any, Any]:
    """Return a tool with the name, the types and the docstring of its handler."""
    hints = hints_of(handler)
    return Tool(
        name=handler.__name__.strip("_"),
        description=" ".join((handler.__doc__ or "").split()),
        handler=handler,
        params_type=None if hints["params"] is type(None) else hints["params"],
        result_type=get_args(hints["return"])[0],
        reach=reach,
        **options,
    )


# Workspaces


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceConfig:
    """Where the files of a section come from: give one of the three sources."""

    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    """Content by path."""
    mounts: Sequence[HostMount] = ()
    """Host directories to copy files from; ``files`` come on top."""
    workspace: str | os.PathLike[str] | None = None
    """A host directory to work on directly: every change is made there, and can be undone."""
    filesystem: Filesystem | None = None
    """A filesystem of your own; it has its own prefix, and you close it."""

    def __post_init__(self) -> None:
        copied = bool(self.files or self.mounts)
        if sum([copied, self.workspace is not None, self.filesystem is not None]) > 1:
            raise ValueError(
                "files come from a workspace of the section's own (files=, mounts=), a directory "
                "(workspace=) or a filesystem (filesystem=): give one of the three"
            )


class WorkspaceSection(Section[None]):
    """A section with a workspace that is bound as the ``Filesystem``: other tools share it."""

    def __init__(
        self,
        config: WorkspaceConfig,
        own_tools: Sequence[Tool[Any, Any]],
        fill: Callable[[Mapping[str, MountedFile]], Filesystem],
        *,
        root: str = DEFAULT_ROOT,
        **options: Unpack[SectionOptions[None]],
    ) -> None:
        self.left_out: tuple[LeftOut, ...] = ()
        """Files of the mounts that were left out, and why."""
        self.filesystem: Filesystem | None = config.filesystem
        """The workspace; None for a directory, which each prompt opens and closes."""
        if self.filesystem is None and config.workspace is None:
            files, self.left_out = _copied(config, root)
            self.filesystem = fill(files)
        bound: dict[type[Any], Any] = {Filesystem: self.filesystem or _opening(config, root)}
        options["resources"] = ResourceRegistry.build(bound).merge(options.get("resources") or {})
        options["tools"] = (*own_tools, *options.get("tools", ()))
        super().__init__(**options)

    def with_left_out(self, *parts: str) -> str:
        """Return parts of the prompt, and a list of the files left out.

        Excluded files and the names of ignored ones are not mentioned: they may be secrets.
        """
        lines: list[str] = []
        for reason in sorted({each.reason for each in self.left_out} - {"excluded"}):
            paths = [each.path for each in self.left_out if each.reason == reason]
            unnamed = reason == "ignored by .gitignore"
            lines.append(f"- {reason}: {len(paths) if unnamed else listed(paths)}")
        if lines:
            parts += ("\n".join(["Files that are not in the workspace:", *lines]),)
        return "\n\n".join(parts)


def _copied(
    config: WorkspaceConfig, root: str
) -> tuple[dict[str, MountedFile], tuple[LeftOut, ...]]:
    """Return the files of ``mounts`` and ``files`` by path, and what was left out."""
    files: dict[str, MountedFile] = {}
    left_out: list[LeftOut] = []
    for mount in config.mounts:
        walk = _Walk(mount, root)
        files |= {file.path: file for file in walk.files()}
        left_out += walk.left_out
    for name, content in config.files.items():
        path = join_path(split_path(name, split_root(root)))
        data = content.encode() if isinstance(content, str) else content
        files[path] = MountedFile(path, data, readonly=False)
    return files, tuple(left_out)


def _opening(config: WorkspaceConfig, root: str) -> Binding[Any]:
    assert config.workspace is not None
    directory = os.path.abspath(config.workspace)  # the process may change its directory

    def opened(_: object) -> Filesystem:
        from weakincentives.filesystem import HostFilesystem

        return HostFilesystem(directory, prefix=root)

    return Binding(Filesystem, opened)


# Mounts


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
class MountedFile:
    path: str
    data: bytes
    readonly: bool


Reason = Literal[
    "excluded",
    "ignored by .gitignore",
    "too large",
    "over the limit of the mount",
    "not a regular file",
    "not readable",
]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file or directory of the host that is not in the workspace."""

    path: str
    """Its path in the workspace; a directory ends in a slash."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class _Entry:
    parts: Parts
    status: os.stat_result
    rules: tuple[IgnoreRules, ...] = ()
    """Of the .gitignore files in the directories above it."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


class _Walk:
    """A walk through a host directory. Links are never followed out of it."""

    def __init__(self, mount: HostMount, root: str) -> None:
        self.left_out: list[LeftOut] = []
        self._mount = mount
        self._place = split_path(mount.path, split_root(root))
        if not os.path.isdir(mount.host_path):
            raise NotADirectoryError(f"not a directory to mount: {os.fspath(mount.host_path)}")
        self._tree = Tree(Path(mount.host_path))
        self._include = PathPatterns(mount.include or ("*",))
        self._exclude = PathPatterns(mount.exclude)
        self._bytes = 0
        self._count = 0

    def files(self) -> Iterator[MountedFile]:
        """Yield the files, directory by directory; then the walk is over."""
        try:
            pending = [_Entry((), os.fstat(self._tree.fd))]
            while pending:
                entry = pending.pop()
                if entry.is_directory:
                    pending += reversed(list(self._entries(entry)))
                elif self._include.match(join_path(entry.parts)):
                    yield from self._read(entry)
        finally:
            self._tree.close()

    def _entries(self, directory: _Entry) -> Iterator[_Entry]:
        """Yield the entries of a directory that are not left out."""
        try:
            found = sorted(self._tree.scan(directory.parts))
        except OSError:
            self._leave(directory, "not readable")
            return
        rules = directory.rules
        if self._mount.gitignore and any(name == ".gitignore" for name, _ in found):
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

    def _read(self, entry: _Entry) -> Iterator[MountedFile]:
        """Yield the file, unless it is left out."""
        parts, status = entry.parts, entry.status
        try:
            split_path(join_path(parts))  # raises for a name that is not UTF-8
            if stat.S_ISLNK(status.st_mode):
                parts = self._tree.resolve(parts)  # raises for a broken link, or one that leads out
                status = self._tree.status(parts) or status
            if (reason := self._refused(status)) is not None:
                self._leave(entry, reason)
                return
            data, status = self._tree.read(parts)
        except (FilesystemError, OSError):
            self._leave(entry, "not readable")
            return
        self._bytes += len(data)
        self._count += 1
        yield MountedFile(self._shown(entry), data, not status.st_mode & 0o222)

    def _refused(self, status: os.stat_result) -> Reason | None:
        mount = self._mount
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if status.st_size > mount.max_file_bytes:
            return "too large"
        if self._count >= mount.max_files or self._bytes + status.st_size > mount.max_bytes:
            return "over the limit of the mount"
        return None

    def _shown(self, entry: _Entry) -> str:
        return join_path((*self._place, *entry.parts))

    def _leave(self, entry: _Entry, reason: Reason) -> None:
        path = self._shown(entry) + ("/" if entry.is_directory else "")
        self.left_out.append(LeftOut(path, reason))

    def _ignore_file(self, parts: Parts) -> Iterator[IgnoreRules]:
        try:
            data, _ = self._tree.read((*parts, ".gitignore"))
        except OSError:
            return
        yield parse_ignore_file(data.decode(errors="replace"), join_path(parts))
