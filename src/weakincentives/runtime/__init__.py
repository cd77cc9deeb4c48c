"""What happens when the model calls: sessions, transactions, and the pipeline."""

from typing import TYPE_CHECKING

from weakincentives.call import CancellationToken, RunContext, ToolCall, call_under_way
from weakincentives.lazy import lazy_names
from weakincentives.logs import configure_logging
from weakincentives.runtime.events import Dispatcher, PromptExecuted, PromptRendered, ToolInvoked
from weakincentives.runtime.session import Session, SliceAccessor, Snapshot
from weakincentives.runtime.tool_call import (
    aexecute_tool,
    aexecute_tools,
    execute_tool,
    execute_tools,
)
from weakincentives.runtime.transactions import (
    CompositeSnapshot,
    PendingToolTracker,
    create_snapshot,
    restore_snapshot,
    tool_transaction,
)
from weakincentives.slices import (
    Slice,
    SlicePolicy,
    append_all,
    reducer,
    replace_latest,
    slice_policy,
    upsert_by,
)

if TYPE_CHECKING:
    from weakincentives.runtime.compose import (
        ConditionalBranch,
        ConditionalOutput,
        ParallelOutput,
        SequenceOutput,
        ToolComposer,
        conditional,
        parallel,
        sequence,
    )
    from weakincentives.runtime.ledger import CallOutcome, Outcome, OutcomeLedger
    from weakincentives.runtime.main_loop import MainLoop, MainLoopConfig, RequestFinished
    from weakincentives.runtime.memory import (
        EventBus,
        MemoryManager,
        MemoryMatch,
        MemoryScope,
        Permissions,
    )
    from weakincentives.runtime.registry import ToolRegistry
    from weakincentives.runtime.saved import SavedSession, SavedSessionData

__all__ = [
    "CallOutcome",
    "CancellationToken",
    "CompositeSnapshot",
    "ConditionalBranch",
    "ConditionalOutput",
    "Dispatcher",
    "EventBus",
    "MainLoop",
    "MainLoopConfig",
    "MemoryManager",
    "MemoryMatch",
    "MemoryScope",
    "Outcome",
    "OutcomeLedger",
    "ParallelOutput",
    "PendingToolTracker",
    "Permissions",
    "PromptExecuted",
    "PromptRendered",
    "RequestFinished",
    "RunContext",
    "SavedSession",
    "SavedSessionData",
    "SequenceOutput",
    "Session",
    "Slice",
    "SliceAccessor",
    "SlicePolicy",
    "Snapshot",
    "ToolCall",
    "ToolComposer",
    "ToolInvoked",
    "ToolRegistry",
    "aexecute_tool",
    "aexecute_tools",
    "append_all",
    "call_under_way",
    "conditional",
    "configure_logging",
    "create_snapshot",
    "execute_tool",
    "execute_tools",
    "parallel",
    "reducer",
    "replace_latest",
    "restore_snapshot",
    "sequence",
    "slice_policy",
    "tool_transaction",
    "upsert_by",
]

if not TYPE_CHECKING:  # a type checker shall still find a misspelled name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "compose": [
                "ConditionalBranch",
                "ConditionalOutput",
                "ParallelOutput",
                "SequenceOutput",
                "ToolComposer",
                "conditional",
                "parallel",
                "sequence",
            ],
            "ledger": ["CallOutcome", "Outcome", "OutcomeLedger"],
            "main_loop": ["MainLoop", "MainLoopConfig", "RequestFinished"],
            "registry": ["ToolRegistry"],
            "saved": ["SavedSession", "SavedSessionData"],
            "memory": ["EventBus", "MemoryManager", "MemoryMatch", "MemoryScope", "Permissions"],
        },
    )
