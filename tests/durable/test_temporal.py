"""The Temporal implementation, as far as its SDK runs without a server."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("temporalio", reason="temporalio is not installed")

from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowHistory
from temporalio.converter import DataConverter
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Replayer
from test_host import World

from weakincentives.durable.steps import (
    Call,
    CallResult,
    Finish,
    FinishResult,
    Step,
    StepResult,
    Turn,
    TurnResult,
    WholeRun,
    drive,
    from_json,
    to_json,
)
from weakincentives.durable.temporal import ACTIVITY, WORKFLOW, SittingWorkflow, TemporalSteps


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.database.close()


def payloads(*values: Any) -> dict[str, Any]:
    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    return {
        "payloads": [
            {"metadata": {"encoding": encoded("json/plain")}, "data": encoded(json.dumps(value))}
            for value in values
        ]
    }


class History:
    """The events of a workflow, as a server would have recorded them."""

    def __init__(self, *arguments: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.add(
            "WORKFLOW_EXECUTION_STARTED",
            "workflowExecutionStartedEventAttributes",
            workflowType={"name": WORKFLOW},
            taskQueue={"name": "wink"},
            input=payloads(*arguments),
            workflowTaskTimeout="10s",
            originalExecutionRunId="run",
            firstExecutionRunId="run",
            attempt=1,
        )

    def add(self, kind: str, attributes: str, **values: Any) -> int:
        number = len(self.events) + 1
        self.events.append(
            {
                "eventId": str(number),
                "eventTime": f"2026-11-18T00:00:{number % 60:02}Z",
                "eventType": f"EVENT_TYPE_{kind}",
                attributes: values,
            }
        )
        return number

    def task(self) -> int:
        """Add a task of the workflow; returns its last event."""
        number = self.add(
            "WORKFLOW_TASK_SCHEDULED",
            "workflowTaskScheduledEventAttributes",
            taskQueue={"name": "wink"},
            startToCloseTimeout="10s",
            attempt=1,
        )
        begun = self.add(
            "WORKFLOW_TASK_STARTED",
            "workflowTaskStartedEventAttributes",
            scheduledEventId=str(number),
            identity="test",
        )
        return self.add(
            "WORKFLOW_TASK_COMPLETED",
            "workflowTaskCompletedEventAttributes",
            scheduledEventId=str(number),
            startedEventId=str(begun),
            identity="test",
        )

    def step(self, step: Step, result: StepResult, *, name: str = ACTIVITY) -> None:
        """Add a step that the workflow scheduled, and its result."""
        task = self.task()
        activities = sum("SCHEDULED" in e["eventType"] and "ACTIVITY" in e["eventType"]
                         for e in self.events)  # fmt: skip
        number = self.add(
            "ACTIVITY_TASK_SCHEDULED",
            "activityTaskScheduledEventAttributes",
            activityId=str(activities + 1),
            activityType={"name": name},
            taskQueue={"name": "wink"},
            input=payloads("r", 1, to_json(step)),
            startToCloseTimeout="3600s",
            workflowTaskCompletedEventId=str(task),
        )
        begun = self.add(
            "ACTIVITY_TASK_STARTED",
            "activityTaskStartedEventAttributes",
            scheduledEventId=str(number),
            identity="test",
            attempt=1,
        )
        self.add(
            "ACTIVITY_TASK_COMPLETED",
            "activityTaskCompletedEventAttributes",
            result=payloads(to_json(result)),
            scheduledEventId=str(number),
            startedEventId=str(begun),
            identity="test",
        )

    def signal(self, name: str, *arguments: Any) -> None:
        self.task()
        self.add(
            "WORKFLOW_EXECUTION_SIGNALED",
            "workflowExecutionSignaledEventAttributes",
            signalName=name,
            input=payloads(*arguments),
            identity="test",
        )

    def end(self, result: str) -> WorkflowHistory:
        task = self.task()
        self.add(
            "WORKFLOW_EXECUTION_COMPLETED",
            "workflowExecutionCompletedEventAttributes",
            result=payloads(result),
            workflowTaskCompletedEventId=str(task),
        )
        return WorkflowHistory.from_json("r/1", {"events": self.events})


def replay(history: WorkflowHistory) -> None:
    """Run the workflow in its sandbox against what was recorded; raises if it does otherwise."""

    async def work() -> None:
        replayer = Replayer(workflows=[SittingWorkflow])
        await replayer.replay_workflow(history)

    asyncio.run(work())


def test_a_sitting_replays_from_its_history():
    history = History("r", 1, False)
    history.step(Turn("r", 0), TurnResult(1, (("c1", "note"), ("c2", "note"))))
    history.step(Call("r", "c1", "note"), CallResult())
    history.step(Call("r", "c2", "note"), CallResult(success=False))
    history.step(Turn("r", 2), TurnResult(2, ended="done"))
    history.step(Finish("r", "done"), FinishResult("done"))

    replay(history.end("done"))


def test_a_whole_sitting_is_one_activity():
    history = History("r", 1, True)
    history.step(WholeRun("r"), FinishResult("done"))

    replay(history.end("done"))


def test_a_call_waits_for_the_signal_of_its_approval():
    history = History("r", 1, False)
    history.step(Turn("r", 0), TurnResult(1, (("c1", "note"),)))
    history.step(Call("r", "c1", "note"), CallResult(success=False, waits_for="a1"))
    history.signal("answered", "other")
    history.signal("answered", "a1")
    history.step(Call("r", "c1", "note"), CallResult())
    history.step(Turn("r", 2), TurnResult(2, ended="done"))
    history.step(Finish("r", "done"), FinishResult("done"))

    replay(history.end("done"))


def test_a_history_of_another_loop_is_refused():
    """So the other tests do test something."""
    from temporalio.workflow import NondeterminismError

    history = History("r", 1, False)
    history.step(Turn("r", 0), TurnResult(1, (("c1", "note"),)))
    history.step(Call("r", "c1", "note"), CallResult(), name="another")

    with pytest.raises(NondeterminismError):
        replay(history.end("done"))


def test_steps_and_results_pass_the_data_converter():
    values = [to_json(TurnResult(1, (("c1", "note"),))), to_json(Finish("r", "failed", "why"))]

    async def there_and_back() -> list[Any]:
        converter = DataConverter.default
        return await converter.decode(await converter.encode(values))

    assert [from_json(each) for each in asyncio.run(there_and_back())] == [
        TurnResult(1, (("c1", "note"),)),
        Finish("r", "failed", "why"),
    ]
    assert EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED


class Activities:
    """Performs steps as the activity, each in an environment of its own."""

    def __init__(self, world: World, run: Any, name: str = "t") -> None:
        self._steps = TemporalSteps(world.host(run, name)._hosting)

    async def step(self, step: Step) -> StepResult:
        values = ActivityEnvironment().run(self._steps.perform, step.run, 1, to_json(step))
        return from_json(values)

    async def wait(self, run: str, approval: str) -> bool:
        return False


def test_the_activity_performs_a_run(world: World):
    run = world.submit()

    assert asyncio.run(drive(run.id, Activities(world, run))) == "done"
    assert world.lines == ["one", "two", "three"]
    assert world.runs.find(run.id).status == "done"


def test_an_activity_is_retried_if_another_process_has_the_run(world: World):
    run = world.submit()
    steps = TemporalSteps(world.host(run, "t", wait=0.0)._hosting)
    other = world.host(run, "other")
    other.perform(Turn(run.id, 0))

    with pytest.raises(ApplicationError) as refused:
        ActivityEnvironment().run(steps.perform, run.id, 1, to_json(Turn(run.id, 0)))

    assert not refused.value.non_retryable
    other.close()
