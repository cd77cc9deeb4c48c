"""Files a tool may read and change, and that can be put back as they were."""

from weakincentives.filesystem.memory import MemoryFilesystem
from weakincentives.filesystem.protocol import FileStat, Filesystem, GrepMatch

__all__ = ["FileStat", "Filesystem", "GrepMatch", "MemoryFilesystem"]
