"""Runs on Temporal: the same steps and the same loop, as a workflow and an activity.

**Tested without a server**: data conversion, the workflow in Temporal's sandbox, replayed from
histories, and the activity in Temporal's test environment. No run has been performed by a Temporal
server in our tests. If that is what you rely on, use ``durable.dbos``.

A worker is made with what Temporal's own ``Worker`` takes::

    steps = TemporalSteps(hosting)
    Worker(client, task_queue="wink", workflows=[SittingWorkflow], activities=[steps.perform],
           activity_executor=ThreadPoolExecutor(8))

Start a sitting with ``client.start_workflow("wink_sitting", args=[run.id, run.sitting, False],
id=run.workflow, task_queue="wink")``. Who answers an approval with ``Runs.answer`` sends the signal
``answered`` with the id of the approval to the workflow.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weakincentives.errors import MissingExtra

try:
    from temporalio import activity, workflow
    from temporalio.common import RetryPolicy
    from temporalio.exceptions import ApplicationError
except ImportError as error:
    raise MissingExtra("temporal", "temporalio") from error

with workflow.unsafe.imports_passed_through():
    from weakincentives.durable.steps import (
        Step,
        StepResult,
        drive,
        drive_whole,
        from_json,
        to_json,
    )

if TYPE_CHECKING:
    from weakincentives.durable.host import Hosting

WORKFLOW = "wink_sitting"
ACTIVITY = "wink_step"
_STEP = timedelta(hours=1)
_SITTING = timedelta(days=1)
"""How long a step may take, and a sitting that is performed as one step."""
_RETRY = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=30))


@workflow.defn(name=WORKFLOW)
class SittingWorkflow:
    """One sitting of a run. It waits for the answers of people as long as they take."""

    def __init__(self) -> None:
        self._answered: set[str] = set()

    @workflow.run
    async def run(self, run_id: str, sitting: int, whole: bool = False) -> str:
        """Drive a run; returns how it ended."""
        journal = _TemporalJournal(sitting, self._answered, _SITTING if whole else _STEP)
        return await (drive_whole if whole else drive)(run_id, journal)

    @workflow.signal
    def answered(self, approval: str) -> None:
        """Tell the workflow that an approval was answered."""
        self._answered.add(approval)


class _TemporalJournal:
    """Performs steps as activities, which Temporal records."""

    def __init__(self, sitting: int, answered: set[str], limit: timedelta) -> None:
        self._sitting = sitting
        self._answered = answered
        self._limit = limit

    async def step(self, step: Step) -> StepResult:
        result: dict[str, Any] = await workflow.execute_activity(
            ACTIVITY,
            args=[step.run, self._sitting, to_json(step)],
            start_to_close_timeout=self._limit,
            retry_policy=_RETRY,
        )
        return from_json(result)

    async def wait(self, run: str, approval: str) -> bool:
        await workflow.wait_condition(lambda: approval in self._answered)
        return True


class TemporalSteps:
    """The activity that performs the steps of runs in this process.

    Temporal gives each step to any worker, so the session is opened for each step and released
    after it. A whole sitting as one step opens it once.
    """

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting

    @activity.defn(name=ACTIVITY)
    def perform(self, run_id: str, sitting: int, step: dict[str, Any]) -> dict[str, Any]:
        """Perform a step; raises an error that Temporal retries if another process has the run."""
        from weakincentives.durable.host import Elsewhere, RunHost

        host = RunHost(run_id, sitting, self._hosting)
        try:
            return to_json(host.perform(from_json(step)))
        except Elsewhere as error:
            raise ApplicationError(str(error), type="Elsewhere") from error
        finally:
            host.close()
