"""The cases with the smallest possible host: a loop over the turns of a script.

It shows what a driver for a framework has to do, and that the cases themselves are sound.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cases import Ask, Case, Driver, Job, Outcome, all_cases, run_on_loop

from weakincentives import Tool, tool
from weakincentives.errors import ApprovalNeeded, Suspended, ToolDefinitionError
from weakincentives.integrations.bridge import Bridge
from weakincentives.prompt import Approval, ApprovalPolicy, QuotaPolicy, if_offered


class Reference(Driver):
    """Runs the calls of a turn at once, and asks about those that need it."""

    name = "reference"

    def run(self, job: Job) -> Outcome:
        return self._played(job, ())

    def resume(self, job: Job, state: Any) -> Outcome:
        # As some frameworks do: the whole turn is run again, with the calls that had finished.
        return self._played(job, [Ask(**each) for each in state])

    def suspend(self) -> NoReturn:
        raise Suspended("paused")

    def _played(self, job: Job, unfinished: Sequence[Ask]) -> Outcome:
        done = Outcome()
        try:
            run_on_loop(_play(job, unfinished, done), job.cancel_when)
        except (Suspended, asyncio.CancelledError) as error:
            done.error = error
        return done


async def _play(job: Job, unfinished: Sequence[Ask], done: Outcome) -> None:
    bridge = Bridge(
        job.workspace, tools=job.tools, policies=job.policies, title="cases", run=job.run or None
    )
    own = [tool(writes="external")(each) for each in job.own]
    known = {each.name: each for each in (*bridge.tools, *own)}
    done.tools = {
        name: {"description": each.text(), "schema": each.parameters}
        for name, each in known.items()
    }
    with bridge:
        for turn in [*([unfinished] if unfinished else []), *job.turns]:
            if isinstance(turn, str):
                done.text = turn
                return
            results = await asyncio.gather(
                *(_call(bridge, known[ask.tool], ask, job, done) for ask in turn),
                return_exceptions=True,
            )
            errors = [each for each in results if isinstance(each, BaseException)]
            if any(isinstance(each, ApprovalNeeded) for each in errors):
                done.state = [vars(ask) for ask in turn]
            for error in errors:
                raise error


async def _call(bridge: Bridge, called: Tool[Any, Any], ask: Ask, job: Job, done: Outcome) -> None:
    asked = {"call_id": ask.id}
    work = asyncio.ensure_future(bridge.acall(called, ask.arguments, **asked))
    stop = job.cancel_calls.get(ask.id)
    try:
        if stop is not None:
            await _cancelled_when(stop, work)
            return
        result = await work
    except ApprovalNeeded as needed:
        done.questions[ask.id] = needed.request.describe(10_000)
        if ask.id not in job.answers:
            raise
        answer = job.answers[ask.id].given()
        if answer.approved:
            approval = Approval(True, answer.by, arguments=answer.arguments)
            result = await bridge.acall(called, ask.arguments, approval=approval, **asked)
        else:
            refused = {"by": answer.by, **asked}
            result = await bridge.arefuse(called, ask.arguments, answer.reason, **refused)
    done.answers[ask.id] = result.render(called.max_result_chars)


async def _cancelled_when(stop: threading.Event, work: asyncio.Future[Any]) -> None:
    while not stop.is_set():
        await asyncio.sleep(0.005)
    work.cancel()
    await asyncio.wait([work])


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(Reference, tmp_path)


def test_a_policy_that_misspells_a_known_tool_is_refused(tmp_path: Path):
    """The framework's own tools are not known here: their names are taken as they are."""
    with pytest.raises(ToolDefinitionError, match=r"'wirte_file'; did you mean 'write_file'\?"):
        Bridge(tmp_path, policies=[ApprovalPolicy(tools={"wirte_file"})])
    with pytest.raises(ToolDefinitionError, match=r"'serch'; did you mean 'search'\?"):
        Bridge(tmp_path, reaches={"search": "read"}, policies=[ApprovalPolicy(tools={"serch"})])
    with pytest.raises(ToolDefinitionError, match="would share one count"):
        Bridge(tmp_path, policies=[QuotaPolicy(1), QuotaPolicy(2)])

    names = {"write_file", "search", "browse", if_offered("wirte_file")}
    Bridge(tmp_path, reaches={"search": "read"}, policies=[ApprovalPolicy(tools=names)])
