"""What happens when the model calls: the pipeline, transactions, turns, runs, their history.

May know: `core`, `errors`, `filesystem`, `prompt`, `resources`, `retry`, `serde`, `session`,
`tool_result`.
Must not go here: the format of a provider, or what only one application does.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.core.call import CancellationToken as CancellationToken
    from weakincentives.core.call import RunContext as RunContext
    from weakincentives.core.call import ToolCall as ToolCall
    from weakincentives.core.call import call_under_way as call_under_way
    from weakincentives.core.logs import configure_logging as configure_logging
    from weakincentives.prompt.contracts import MemoryScope as MemoryScope
    from weakincentives.runtime.approvals import ApprovalDesk as ApprovalDesk
    from weakincentives.runtime.approvals import PendingApproval as PendingApproval
    from weakincentives.runtime.approvals import answer_approval as answer_approval
    from weakincentives.runtime.approvals import pending_approvals as pending_approvals
    from weakincentives.runtime.at import StateAt as StateAt
    from weakincentives.runtime.attempts import Attempt as Attempt
    from weakincentives.runtime.attempts import BestOf as BestOf
    from weakincentives.runtime.attempts import CommandJudge as CommandJudge
    from weakincentives.runtime.attempts import Judge as Judge
    from weakincentives.runtime.attempts import Verdict as Verdict
    from weakincentives.runtime.attempts import best_of as best_of
    from weakincentives.runtime.calls import Calls as Calls
    from weakincentives.runtime.calls import open_run as open_run
    from weakincentives.runtime.compose import ConditionalBranch as ConditionalBranch
    from weakincentives.runtime.compose import ConditionalOutput as ConditionalOutput
    from weakincentives.runtime.compose import ParallelOutput as ParallelOutput
    from weakincentives.runtime.compose import SequenceOutput as SequenceOutput
    from weakincentives.runtime.compose import ToolComposer as ToolComposer
    from weakincentives.runtime.compose import conditional as conditional
    from weakincentives.runtime.compose import parallel as parallel
    from weakincentives.runtime.compose import sequence as sequence
    from weakincentives.runtime.forks import Change as Change
    from weakincentives.runtime.forks import Fork as Fork
    from weakincentives.runtime.forks import fork_call as fork_call
    from weakincentives.runtime.forks import fork_run as fork_run
    from weakincentives.runtime.forks import rerun_call as rerun_call
    from weakincentives.runtime.hosted import Admission as Admission
    from weakincentives.runtime.hosted import OpenCall as OpenCall
    from weakincentives.runtime.inbox import Inbox as Inbox
    from weakincentives.runtime.ledger import CallOutcome as CallOutcome
    from weakincentives.runtime.ledger import Outcome as Outcome
    from weakincentives.runtime.ledger import OutcomeEntries as OutcomeEntries
    from weakincentives.runtime.ledger import OutcomeLedger as OutcomeLedger
    from weakincentives.runtime.main_loop import MainLoop as MainLoop
    from weakincentives.runtime.main_loop import MainLoopConfig as MainLoopConfig
    from weakincentives.runtime.main_loop import RequestFinished as RequestFinished
    from weakincentives.runtime.registry import ToolRegistry as ToolRegistry
    from weakincentives.runtime.rewind import Rewound as Rewound
    from weakincentives.runtime.rewind import rewind_run as rewind_run
    from weakincentives.runtime.saved import AttachedLines as AttachedLines
    from weakincentives.runtime.saved import SavedSession as SavedSession
    from weakincentives.runtime.saved import UserMessage as UserMessage
    from weakincentives.runtime.snapshots import CompositeSnapshot as CompositeSnapshot
    from weakincentives.runtime.snapshots import PendingToolTracker as PendingToolTracker
    from weakincentives.runtime.snapshots import create_snapshot as create_snapshot
    from weakincentives.runtime.snapshots import restore_snapshot as restore_snapshot
    from weakincentives.runtime.snapshots import tool_transaction as tool_transaction
    from weakincentives.runtime.stores.database import Database as Database
    from weakincentives.runtime.stores.files import FileStore as FileStore
    from weakincentives.runtime.stores.logs import LeasedLog as LeasedLog
    from weakincentives.runtime.stores.logs import LogPart as LogPart
    from weakincentives.runtime.stores.logs import SavePlace as SavePlace
    from weakincentives.runtime.stores.logs import SessionLog as SessionLog
    from weakincentives.runtime.stores.logs import SessionStore as SessionStore
    from weakincentives.runtime.stores.saves import SavedSessionData as SavedSessionData
    from weakincentives.runtime.stores.saves import compact_session as compact_session
    from weakincentives.runtime.stores.saves import copy_session as copy_session
    from weakincentives.runtime.stores.sql import SqlStore as SqlStore
    from weakincentives.runtime.tool_call import aexecute_tool as aexecute_tool
    from weakincentives.runtime.tool_call import aexecute_tools as aexecute_tools
    from weakincentives.runtime.tool_call import apply_effects as apply_effects
    from weakincentives.runtime.tool_call import execute_tool as execute_tool
    from weakincentives.runtime.tool_call import execute_tools as execute_tools
    from weakincentives.runtime.window import ContextPolicy as ContextPolicy
    from weakincentives.runtime.window import DropOldest as DropOldest
    from weakincentives.runtime.window import Room as Room
    from weakincentives.runtime.window import ShortenAndSummarize as ShortenAndSummarize
    from weakincentives.session.events import Dispatcher as Dispatcher
    from weakincentives.session.events import PromptExecuted as PromptExecuted
    from weakincentives.session.events import PromptRendered as PromptRendered
    from weakincentives.session.events import ToolInvoked as ToolInvoked
    from weakincentives.session.memory import EventBus as EventBus
    from weakincentives.session.memory import MemoryManager as MemoryManager
    from weakincentives.session.memory import MemoryMatch as MemoryMatch
    from weakincentives.session.memory import Permissions as Permissions
    from weakincentives.session.session import Session as Session
    from weakincentives.session.session import SliceAccessor as SliceAccessor
    from weakincentives.session.session import Snapshot as Snapshot
    from weakincentives.session.slices import Slice as Slice
    from weakincentives.session.slices import SlicePolicy as SlicePolicy
    from weakincentives.session.slices import append_all as append_all
    from weakincentives.session.slices import reducer as reducer
    from weakincentives.session.slices import replace_latest as replace_latest
    from weakincentives.session.slices import slice_policy as slice_policy
    from weakincentives.session.slices import upsert_by as upsert_by
