"""Google ADK: the shared cases, and what is special to ADK."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from cases import Answer, Case, Driver, Job, Outcome, all_cases, require, run_on_loop

require("google.adk")

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.models import BaseLlm
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.session import Session
from google.adk.workflow._errors import NodeInterruptedError
from google.genai import types

from weakincentives.integrations.google_adk import WinkPlugin

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from cases import Turn
    from google.adk.models.llm_request import LlmRequest

CONFIRMATION = "adk_request_confirmation"


class Scripted(BaseLlm):
    """A model that says what a script says, and keeps what it was told."""

    model: str = "scripted"
    turns: list[Any] = []  # noqa: RUF012
    requests: list[Any] = []  # noqa: RUF012

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self.requests.append(llm_request)
        turn = self.turns.pop(0)
        if isinstance(turn, str):
            parts = [types.Part(text=turn)]
        else:
            calls = [
                types.FunctionCall(id=ask.id, name=ask.tool, args=ask.arguments) for ask in turn
            ]
            parts = [types.Part(function_call=call) for call in calls]
        yield LlmResponse(content=types.Content(role="model", parts=parts))


def said(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


class GoogleAdk(Driver):
    name = "google-adk"
    limits = {  # noqa: RUF012
        "cancelling_one_call_leaves_the_others": (
            "ADK cannot cancel one call of a turn: only the whole run."
        ),
    }

    def run(self, job: Job) -> Outcome:
        return self._played(job, None)

    def resume(self, job: Job, state: Any) -> Outcome:
        return self._played(job, state)

    def suspend(self) -> NoReturn:
        raise NodeInterruptedError

    def _played(self, job: Job, state: Any) -> Outcome:
        done = Outcome()
        try:
            run_on_loop(_play(job, state, done), job.cancel_when)
        except (Exception, asyncio.CancelledError, NodeInterruptedError) as error:
            done.error = error
        return done


async def _play(job: Job, state: Any, done: Outcome) -> None:
    plugin = WinkPlugin(
        job.workspace, tools=job.tools, policies=job.policies, run=job.run or None
    )
    model = Scripted(turns=list(job.turns), requests=[])
    agent = LlmAgent(name="tester", model=model, tools=[*plugin.tools, *job.own])
    app = App(name="cases", root_agent=agent, plugins=[plugin])
    sessions = InMemorySessionService()
    session = await sessions.create_session(app_name="cases", user_id="tom")
    message: types.Content | None = said("begin")
    if state is not None:  # as a session service in a database would return it
        stored = Session.model_validate_json(state)
        for event in stored.events:
            await sessions.append_event(session, event)
        message = _answers([e for e in stored.events if _asked(e)], job, done)
    async with Runner(app=app, session_service=sessions) as runner:
        try:
            while message is not None:
                events = [
                    event
                    async for event in runner.run_async(
                        user_id="tom", session_id=session.id, new_message=message
                    )
                ]
                message = _answers([e for e in events if _asked(e)], job, done)
                for event in events:
                    if event.is_final_response() and event.content and event.content.parts:
                        done.text = event.content.parts[0].text or done.text
        finally:
            _note_told(model.requests, done)
            stored = await sessions.get_session(
                app_name="cases", user_id="tom", session_id=session.id
            )
            done.state = stored.model_dump_json() if stored else None


def _asked(event: Any) -> list[types.FunctionCall]:
    return [call for call in event.get_function_calls() if call.name == CONFIRMATION]


def _answers(events: Sequence[Any], job: Job, done: Outcome) -> types.Content | None:
    """Return the message with a person's answers; None if one is missing, or nobody was asked."""
    parts: list[types.Part] = []
    for call in [call for event in events for call in _asked(event)]:
        name = call.args["originalFunctionCall"]["id"]
        done.questions[name] = call.args["toolConfirmation"]["hint"]
        if name not in job.answers:
            return None
        answer = job.answers[name].given()
        payload = {"by": answer.by, "reason": answer.reason, "arguments": answer.arguments}
        response = {"confirmed": answer.approved, "payload": payload}
        parts.append(
            types.Part(
                function_response=types.FunctionResponse(
                    id=call.id, name=CONFIRMATION, response=response
                )
            )
        )
    return types.Content(role="user", parts=parts) if parts else None


def _note_told(requests: Sequence[LlmRequest], done: Outcome) -> None:
    for request in requests:
        for tool in request.config.tools or []:
            for each in tool.function_declarations or []:
                shown = {"description": each.description, "schema": each.parameters_json_schema}
                done.tools[each.name] = shown
        for content in request.contents:
            for part in content.parts or []:
                told = part.function_response
                if told is not None and told.name != CONFIRMATION:
                    answer = told.response
                    done.answers[told.id] = answer.get("result") or answer.get("error") or str(answer)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(GoogleAdk, tmp_path)
