"""Files that tools read and change, and that a rollback or an undo restores exactly.

May know: `core`, `errors`, `log`, `serde`, `session`.
Must not go here: tools, what a model is shown, which call may change which file.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.filesystem.base import Filesystem as Filesystem
    from weakincentives.filesystem.branch_log import BranchHistory as BranchHistory
    from weakincentives.filesystem.branch_log import BranchInfo as BranchInfo
    from weakincentives.filesystem.branch_log import branches_of as branches_of
    from weakincentives.filesystem.branches import Branch as Branch
    from weakincentives.filesystem.branches import drop_branch as drop_branch
    from weakincentives.filesystem.commands import CommandResult as CommandResult
    from weakincentives.filesystem.diffs import FileChange as FileChange
    from weakincentives.filesystem.disk import HostFilesystem as HostFilesystem
    from weakincentives.filesystem.disk import engines as engines
    from weakincentives.filesystem.history import Committed as Committed
    from weakincentives.filesystem.history import adopt_store as adopt_store
    from weakincentives.filesystem.memory import MemoryFilesystem as MemoryFilesystem
    from weakincentives.filesystem.paths import FileStat as FileStat
    from weakincentives.filesystem.paths import GrepMatch as GrepMatch
    from weakincentives.filesystem.portable import Base as Base
    from weakincentives.filesystem.portable import BranchUpload as BranchUpload
    from weakincentives.filesystem.portable import git_base as git_base
    from weakincentives.filesystem.portable import line_keys as line_keys
    from weakincentives.filesystem.portable import materialize as materialize
    from weakincentives.filesystem.portable import store_tree as store_tree
    from weakincentives.filesystem.portable import stored_keys as stored_keys
    from weakincentives.filesystem.portable import unpack_branch as unpack_branch
    from weakincentives.filesystem.prune import Pruned as Pruned
    from weakincentives.filesystem.states import FilesAt as FilesAt
    from weakincentives.filesystem.store import Limits as Limits
    from weakincentives.filesystem.store import present_in as present_in
    from weakincentives.filesystem.transfer import ObjectStorage as ObjectStorage
    from weakincentives.filesystem.undo import CallChanges as CallChanges
    from weakincentives.filesystem.undo import WorkspaceHistory as WorkspaceHistory
