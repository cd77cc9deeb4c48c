"""Runs that survive processes and machines."""

from typing import TYPE_CHECKING

from weakincentives.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.durable.objects import BucketObjects as BucketObjects
    from weakincentives.durable.objects import CollectableObjects as CollectableObjects
    from weakincentives.durable.objects import DatabaseObjects as DatabaseObjects
    from weakincentives.durable.objects import LocalObjects as LocalObjects
    from weakincentives.durable.objects import collect as collect
    from weakincentives.durable.objects import open_objects as open_objects
    from weakincentives.durable.runs import DurableRun as DurableRun
    from weakincentives.durable.runs import KnownWorker as KnownWorker
    from weakincentives.durable.runs import Runs as Runs
    from weakincentives.durable.runs import WaitingApproval as WaitingApproval
