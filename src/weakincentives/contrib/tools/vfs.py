"""``VfsToolsSection``: files for a model to work on, in memory or in a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.contrib.tools.vfs_mounts import HostMount, LeftOut, left_out_text, read_mount
from weakincentives.contrib.tools.vfs_tools import file_tools
from weakincentives.contrib.tools.vfs_values import FileLimits
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.filesystem.protocol import DEFAULT_ROOT
from weakincentives.prompt.policies import ReadBeforeWritePolicy
from weakincentives.prompt.section import Section, SectionOptions
from weakincentives.resources import Binding, ResourceRegistry

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session

__all__ = ["VfsConfig", "VfsToolsSection", "file_tools"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VfsConfig:
    """Where the files come from, and how much of them a model is given at once.

    Without ``workspace`` and ``filesystem`` they live in memory: empty, or filled from ``mounts``
    and then from ``files``. Nothing on the host is ever changed then.
    """

    root: str = DEFAULT_ROOT
    """The virtual prefix below which absolute paths are understood; never a host directory."""
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    """Content by path."""
    mounts: Sequence[HostMount] = ()
    """Host directories to copy files from."""
    workspace: str | os.PathLike[str] | None = None
    """A host directory to work on directly: every change is made there, and can be undone."""
    filesystem: Filesystem | None = None
    """A filesystem of your own to work on; it has its own prefix, and you close it."""
    read_only: bool = False
    """Offer only the tools that change nothing."""
    limits: FileLimits = field(default_factory=FileLimits)

    def __post_init__(self) -> None:
        in_memory = bool(self.files or self.mounts)
        sources = [in_memory, self.workspace is not None, self.filesystem is not None]
        if sum(sources) > 1:
            raise ValueError(
                "files come from memory (files=, mounts=), from a directory (workspace=) or from "
                "a filesystem of your own (filesystem=): give one of the three"
            )


class VfsToolsSection(Section[None]):
    """Guidance and tools to work on files, with the ``Filesystem`` they work on.

    The filesystem is bound as a resource, so other tools of the prompt share it. A model must read
    a file that exists before it writes to it; pass ``policies`` to have other rules.
    """

    depends_only_on_params = True

    def __init__(
        self,
        *,
        session: Session | None = None,
        config: VfsConfig | None = None,
        **options: Unpack[SectionOptions[None]],
    ) -> None:
        self.config = config = config or VfsConfig()
        self.filesystem: Filesystem | None = config.filesystem
        """What the tools work on; None for a directory, which each prompt opens and closes."""
        self.left_out: tuple[LeftOut, ...] = ()
        """What the mounts did not bring, and why."""
        if self.filesystem is None and config.workspace is None:
            clock = SYSTEM_CLOCK if session is None else session.clock
            self.filesystem, self.left_out = _filled(config, clock)
        options.setdefault("title", "Files")
        options.setdefault("policies", () if config.read_only else (ReadBeforeWritePolicy(),))
        tools = file_tools(limits=config.limits, read_only=config.read_only)
        options["tools"] = (*tools, *options.get("tools", ()))
        bound: dict[type[Any], Any] = {
            Filesystem: _opening(config) if self.filesystem is None else self.filesystem
        }
        options["resources"] = ResourceRegistry.build(bound).merge(options.get("resources") or {})
        super().__init__(**options)

    def body(self, params: None, session: Session | None) -> str:
        guidance = _GUIDANCE.format(root=self.config.root)
        if not self.config.read_only:
            guidance += _WRITING
        return "\n\n".join(filter(None, [guidance, left_out_text(self.left_out)]))


def _filled(config: VfsConfig, clock: Clock) -> tuple[MemoryFilesystem, tuple[LeftOut, ...]]:
    """Return a filesystem in memory with what the configuration asks for."""
    files = MemoryFilesystem(root=config.root, clock=clock)
    left_out: list[LeftOut] = []
    for mount in config.mounts:
        taken, missing = read_mount(mount, config.root)
        left_out += missing
        for file in taken:
            _put(files, file.path, file.data, readonly=file.readonly)
    for path, content in config.files.items():
        _put(files, path, content.encode() if isinstance(content, str) else content)
    return files, tuple(left_out)


def _put(files: MemoryFilesystem, path: str, data: bytes, *, readonly: bool = False) -> None:
    """Store a file, also over one that may only be read."""
    if files.is_readonly(path):
        files.set_readonly(path, False)
    files.write_bytes(path, data)
    if readonly:
        files.set_readonly(path)


def _opening(config: VfsConfig) -> Binding[Any]:
    """Return how to open the directory that is worked on directly."""
    assert config.workspace is not None
    directory = os.path.abspath(config.workspace)  # not where the process is by then

    def opened(_: object) -> Filesystem:
        from weakincentives.filesystem import HostFilesystem

        return HostFilesystem(directory, prefix=config.root)

    return Binding(Filesystem, opened)


_GUIDANCE = """\
Use these tools to read and write files of the workspace. Paths are relative to its root, or \
absolute below {root}; nothing outside can be reached.

- Find out what is there with `list_directory`, `glob_files` (by path), `search_files` (by name) \
and `grep_files` (by content) before you guess a path.
- Read with `read_file`. What is too long is cut, and the answer says how to get the rest.
- Calls that do not depend on each other can be made together, in one turn."""

_WRITING = """
- Read a file before you change it: writing to one that exists and was not read is refused.
- Change a part with `edit_file`. Write a new file, or the whole of one, with `write_file`.
- A call that fails has changed nothing: read its message, correct the call and try again."""
