"""Runs that survive the death of their process, and can move to another machine.

May know: `adapters`, `core`, `errors`, `filesystem`, `prompt`, `runtime`, `serde`, `session`.
Must not go here: how a call is run; a step runs it through the pipeline, as everything does.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.durable.dbos import DbosEngine as DbosEngine
    from weakincentives.durable.dbos import Worker as Worker
    from weakincentives.durable.host import Hosting as Hosting
    from weakincentives.durable.host import Opening as Opening
    from weakincentives.durable.host import RunHost as RunHost
    from weakincentives.durable.objects import BucketObjects as BucketObjects
    from weakincentives.durable.objects import CollectableObjects as CollectableObjects
    from weakincentives.durable.objects import DatabaseObjects as DatabaseObjects
    from weakincentives.durable.objects import LocalObjects as LocalObjects
    from weakincentives.durable.objects import collect as collect
    from weakincentives.durable.objects import open_objects as open_objects
    from weakincentives.durable.performer import Prepared as Prepared
    from weakincentives.durable.performer import SessionSteps as SessionSteps
    from weakincentives.durable.requests import output_of as output_of
    from weakincentives.durable.requests import serve as serve
    from weakincentives.durable.requests import serving as serving
    from weakincentives.durable.requests import submit_request as submit_request
    from weakincentives.durable.steps import Call as Call
    from weakincentives.durable.steps import CallResult as CallResult
    from weakincentives.durable.steps import Finish as Finish
    from weakincentives.durable.steps import FinishResult as FinishResult
    from weakincentives.durable.steps import Journal as Journal
    from weakincentives.durable.steps import LocalJournal as LocalJournal
    from weakincentives.durable.steps import Step as Step
    from weakincentives.durable.steps import StepResult as StepResult
    from weakincentives.durable.steps import Turn as Turn
    from weakincentives.durable.steps import TurnResult as TurnResult
    from weakincentives.durable.steps import WholeRun as WholeRun
    from weakincentives.durable.steps import drive as drive
    from weakincentives.durable.steps import drive_whole as drive_whole
    from weakincentives.runtime.stores.runs import DurableRun as DurableRun
    from weakincentives.runtime.stores.runs import KnownWorker as KnownWorker
    from weakincentives.runtime.stores.runs import Runs as Runs
    from weakincentives.runtime.stores.runs import WaitingApproval as WaitingApproval
