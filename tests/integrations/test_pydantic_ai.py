"""pydantic-ai: the shared cases, and what only this framework has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
from cases import Answer, Case, Driver, Job, Outcome, all_cases, require, run_on_loop

require("pydantic_ai")

from pydantic import TypeAdapter  # noqa: E402
from pydantic_ai import (  # noqa: E402
    Agent,
    ApprovalRequired,
    DeferredToolRequests,
    DeferredToolResults,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolApproved,
    ToolCallPart,
    ToolDenied,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel  # noqa: E402

from weakincentives.integrations.pydantic_ai import Wink  # noqa: E402


class PydanticAi(Driver):
    """An agent with a scripted model; a job is one conversation."""

    name = "pydantic-ai"
    limits: ClassVar[Mapping[str, str]] = {
        "cancelling_one_call_leaves_the_others": "Nothing cancels a single call: pydantic-ai "
        "cancels a run, with all calls under way.",
    }

    def run(self, job: Job) -> Outcome:
        return self._run(job, [])

    def resume(self, job: Job, state: Any) -> Outcome:
        history, pending = state
        messages = ModelMessagesTypeAdapter.validate_json(history)
        return self._run(job, messages, _REQUESTS.validate_json(pending))

    def suspend(self) -> NoReturn:
        raise ApprovalRequired

    def _run(
        self, job: Job, history: list[ModelMessage], pending: DeferredToolRequests | None = None
    ) -> Outcome:
        outcome = Outcome()
        turns = iter(job.turns)

        def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            for tool in info.function_tools:
                shown = {"description": tool.description, "schema": tool.parameters_json_schema}
                outcome.tools[tool.name] = shown
            turn = next(turns)
            if isinstance(turn, str):
                return ModelResponse([TextPart(turn)])
            return ModelResponse(
                [ToolCallPart(ask.tool, ask.arguments, tool_call_id=ask.id) for ask in turn]
            )

        with Wink(
            job.workspace, tools=job.tools, policies=job.policies, run=job.run or None
        ) as wink:
            agent = Agent(
                FunctionModel(model),
                tools=job.own,
                capabilities=[wink],
                output_type=[str, DeferredToolRequests],
            )
            try:
                run_on_loop(self._talk(agent, job, history, pending, outcome), job.cancel_when)
            except BaseException as error:
                outcome.error = error
        return outcome

    async def _talk(
        self,
        agent: Agent[None, Any],
        job: Job,
        history: list[ModelMessage],
        pending: DeferredToolRequests | None,
        outcome: Outcome,
    ) -> None:
        answers = None if pending is None else _answers(pending, job)
        prompt = "go" if pending is None else None
        while True:
            done = await agent.run(prompt, message_history=history, deferred_tool_results=answers)
            history, prompt = done.all_messages(), None
            outcome.answers = _told(history)
            if isinstance(done.output, str):
                outcome.text = done.output
                return
            pending = done.output
            outcome.questions |= {
                each.tool_call_id: str(pending.metadata.get(each.tool_call_id))
                for each in pending.approvals
            }
            answers = _answers(pending, job)
            if answers is None:
                stored = ModelMessagesTypeAdapter.dump_json(history)
                outcome.state = (stored, _REQUESTS.dump_json(pending))
                return


_REQUESTS = TypeAdapter(DeferredToolRequests)


def _answers(pending: DeferredToolRequests, job: Job) -> DeferredToolResults | None:
    """Return what the person says, unless they have no answer to one of the requests."""
    asked = [each.tool_call_id for each in pending.approvals]
    if not all(each in job.answers for each in asked):
        return None
    given = {each: job.answers[each].given() for each in asked}
    return pending.build_results(
        approvals={name: _answer(each) for name, each in given.items()},
        metadata={name: {"by": each.by} for name, each in given.items()},
    )


def _answer(answer: Answer) -> ToolApproved | ToolDenied:
    if answer.approved:
        return ToolApproved(override_args=answer.arguments)
    return ToolDenied(answer.reason)


def _told(history: list[ModelMessage]) -> dict[str, str]:
    """Return what the model was told, by call id."""
    requests = [each for each in history if isinstance(each, ModelRequest)]
    parts = [part for each in requests for part in each.parts if isinstance(part, ToolReturnPart)]
    return {part.tool_call_id: part.model_response_str(wrap_if_error=False) for part in parts}


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(PydanticAi, tmp_path)
