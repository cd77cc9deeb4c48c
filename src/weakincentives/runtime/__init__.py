"""What happens when the model calls: sessions, transactions, and the pipeline."""

from weakincentives.call import CancellationToken, RunContext, ToolCall, call_under_way
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

__all__ = [
    "CancellationToken",
    "CompositeSnapshot",
    "Dispatcher",
    "PendingToolTracker",
    "PromptExecuted",
    "PromptRendered",
    "RunContext",
    "Session",
    "Slice",
    "SliceAccessor",
    "SlicePolicy",
    "Snapshot",
    "ToolCall",
    "ToolInvoked",
    "aexecute_tool",
    "aexecute_tools",
    "append_all",
    "call_under_way",
    "configure_logging",
    "create_snapshot",
    "execute_tool",
    "execute_tools",
    "reducer",
    "replace_latest",
    "restore_snapshot",
    "slice_policy",
    "tool_transaction",
    "upsert_by",
]
