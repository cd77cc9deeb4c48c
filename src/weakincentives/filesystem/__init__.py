"""Files a tool may read and change, and that can be put back as they were."""

from typing import TYPE_CHECKING

from weakincentives.filesystem.memory import MemoryFilesystem
from weakincentives.filesystem.protocol import FileStat, Filesystem, GrepMatch
from weakincentives.lazy import lazy_names

if TYPE_CHECKING:
    from weakincentives.filesystem.commands import CommandResult, engines
    from weakincentives.filesystem.diffs import FileChange
    from weakincentives.filesystem.history import Committed, adopt_store
    from weakincentives.filesystem.host import HostFilesystem
    from weakincentives.filesystem.undo import CallChanges, WorkspaceHistory

__all__ = [
    "CallChanges",
    "CommandResult",
    "Committed",
    "FileChange",
    "FileStat",
    "Filesystem",
    "GrepMatch",
    "HostFilesystem",
    "MemoryFilesystem",
    "WorkspaceHistory",
    "adopt_store",
    "engines",
]

# A program that works in memory does not load what a directory takes.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "commands": ["CommandResult", "engines"],
        "diffs": ["FileChange"],
        "history": ["Committed", "adopt_store"],
        "host": ["HostFilesystem"],
        "undo": ["CallChanges", "WorkspaceHistory"],
    },
)
