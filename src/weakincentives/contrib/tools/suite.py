"""Shared by the suites: a tool made from its handler, and the workspace of a section."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack, get_args

from weakincentives.contrib.tools.mounts import HostMount, LeftOut, MountedFile, read_mount
from weakincentives.filesystem import Filesystem
from weakincentives.filesystem.paths import DEFAULT_ROOT, join_path, split_path, split_root
from weakincentives.prompt.section import Section, SectionOptions
from weakincentives.prompt.signatures import hints_of
from weakincentives.prompt.tool import Reach, Tool
from weakincentives.resources import Binding, ResourceRegistry


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


def _copied(
    config: WorkspaceConfig, root: str
) -> tuple[dict[str, MountedFile], tuple[LeftOut, ...]]:
    """Return the files of ``mounts`` and ``files`` by path, and what was left out."""
    files: dict[str, MountedFile] = {}
    left_out: list[LeftOut] = []
    for mount in config.mounts:
        found, missing = read_mount(mount, root)
        files |= {file.path: file for file in found}
        left_out += missing
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
