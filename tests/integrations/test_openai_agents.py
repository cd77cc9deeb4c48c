"""openai-agents: the shared cases, and what is special about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cases import Answer, Ask, Case, Driver, Job, Outcome, all_cases, require, run_on_loop

require("agents")

from agents import Agent, FunctionTool, Runner, RunState, function_tool, set_tracing_disabled
from agents.testing import ScriptedModel, assistant_message, function_call

from weakincentives.integrations.openai_agents import Wink

set_tracing_disabled(True)  # it would be sent to the provider


class OpenAIAgents(Driver):
    name = "openai-agents"
    limits = {
        "an_own_tool_that_pauses_the_agent_is_suspended": (
            "a tool cannot pause the agent; only needs_approval can"
        ),
        "cancelling_one_call_leaves_the_others": "a run can be cancelled, a single call cannot",
        "a_person_can_edit_the_arguments": "RunState.approve takes no other arguments",
    }

    def run(self, job: Job) -> Outcome:
        return self._played(job, None)

    def resume(self, job: Job, state: Any) -> Outcome:
        return self._played(job, state)

    def _played(self, job: Job, state: str | None) -> Outcome:
        done = Outcome()
        try:
            run_on_loop(_play(job, state, done), job.cancel_when)
        except (Exception, asyncio.CancelledError) as error:
            done.error = error
        return done


def _model(turns: Sequence[Any]) -> ScriptedModel:
    return ScriptedModel(
        [
            [assistant_message(turn)]
            if isinstance(turn, str)
            else [function_call(ask.tool, ask.arguments, call_id=ask.id) for ask in turn]
            for turn in turns
        ]
    )


async def _play(job: Job, state: str | None, done: Outcome) -> None:
    model = _model(job.turns)
    wink = Wink(
        job.workspace, tools=job.tools, policies=job.policies, title="cases", run=job.run or None
    )
    own = [
        function_tool(each, failure_error_function=lambda _, error: f"It failed: {error}")
        for each in job.own
    ]
    agent = wink.cover(Agent(name="Tester", model=model, tools=[*wink.tools(), *own]))
    given: Any = "go" if state is None else await RunState.from_string(agent, state)
    with wink:
        while True:
            if isinstance(given, RunState):
                for item in given.get_interruptions():
                    if item.call_id in job.answers:
                        answer = job.answers[item.call_id].given()
                        if answer.approved:
                            wink.approve(given, item, by=answer.by)
                        else:
                            wink.reject(given, item, answer.reason, by=answer.by)
            result = await Runner.run(agent, given)
            for item in result.interruptions:
                shown = [each.describe(10_000) for each in wink.requests(item)]
                done.questions[item.call_id or ""] = "\n".join(shown) or str(item.arguments)
            _look(result, model, done)
            given = result.to_state()
            if not any(item.call_id in job.answers for item in result.interruptions):
                break
    done.text = str(result.final_output or "")
    done.state = given.to_string() if result.interruptions else None


def _look(result: Any, model: ScriptedModel, done: Outcome) -> None:
    for item in result.to_input_list():
        if item.get("type") == "function_call_output":
            done.answers[item["call_id"]] = item["output"]
    for tool in model.calls[-1].tools if model.calls else ():
        if isinstance(tool, FunctionTool):
            done.tools[tool.name] = {
                "description": tool.description,
                "schema": tool.params_json_schema,
            }


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(OpenAIAgents, tmp_path)
