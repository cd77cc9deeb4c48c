"""smolagents: cells of a CodeAgent are transactions, and calls of a ToolCallingAgent are ours."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cases import Ask, Case, Driver, Job, Outcome, Turn, all_cases, require

require("smolagents")

import smolagents
from smolagents.agents import ActionStep, FinalAnswerStep, ToolOutput
from smolagents.models import (
    ChatMessage,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
    get_tool_json_schema,
)
from smolagents.monitoring import LogLevel

from weakincentives.integrations.smolagents import WinkExecutor, WinkToolCallingAgent
from weakincentives.prompt import AnyPolicy, Approval, ApprovalPolicy, ApprovalRequest

QUIET: dict[str, Any] = {"verbosity_level": LogLevel.OFF}


class Script(smolagents.Model):
    """Says what it is told to, and remembers what it was shown."""

    def __init__(self, *says: ChatMessage) -> None:
        super().__init__()
        self.says = list(says)
        self.shown: list[list[ChatMessage]] = []

    def generate(self, messages: list[ChatMessage], **_: Any) -> ChatMessage:
        self.shown.append(messages)
        return self.says.pop(0)


def cell(code: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=f"<code>\n{code}\n</code>")


def calls(*asks: Ask) -> ChatMessage:
    made = [
        ChatMessageToolCall(
            ChatMessageToolCallFunction(ask.arguments, ask.tool), ask.id, "function"
        )
        for ask in asks
    ]
    return ChatMessage(role=MessageRole.ASSISTANT, content="", tool_calls=made)


def own_tool(function: Callable[..., Any]) -> smolagents.Tool:
    return smolagents.tool(function)


class Smolagents(Driver):
    """What both agents share."""

    def run(self, job: Job) -> Outcome:
        done = Outcome()
        asks = [ask for turn in job.turns if not isinstance(turn, str) for ask in turn]
        policies = [_answered(each, job, asks, done) for each in job.policies]
        agent = self.agent(job, policies, done)
        try:
            with _interrupted_when(job.cancel_when), agent:
                given = {ask.id: ask.arguments for ask in asks}
                for step in agent.run("the task", stream=True, additional_args=given):
                    self.note(step, done)
                    if isinstance(step, FinalAnswerStep):
                        done.text = str(step.output)
        except BaseException as error:
            done.error = error
        return done

    def agent(self, job: Job, policies: Sequence[AnyPolicy], done: Outcome) -> Any:
        raise NotImplementedError

    def note(self, step: object, done: Outcome) -> None:
        raise NotImplementedError


def _answered(policy: Any, job: Job, asks: list[Ask], done: Outcome) -> Any:
    """Return a policy that asks a person while the call waits: there is no other way."""
    if not isinstance(policy, ApprovalPolicy):
        return policy

    def ask(request: ApprovalRequest) -> Approval:
        this = next(
            a for a in asks if (a.tool, a.arguments) == (request.tool_name, request.arguments)
        )
        asks.remove(this)
        done.questions[this.id] = request.describe(10_000)
        answer = job.answers[this.id].given()
        return Approval(answer.approved, answer.by, answer.reason, answer.arguments)

    return replace(policy, ask=ask)


@contextmanager
def _interrupted_when(event: threading.Event | None) -> Iterator[None]:
    """Press Ctrl-C once the event is set: the only way to stop a call under way."""
    over = threading.Event()

    def press() -> None:
        assert event is not None
        while not over.is_set():
            if event.wait(0.01):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    if event is not None:
        threading.Thread(target=press, daemon=True).start()
    try:
        yield
    finally:
        over.set()


_NO_PAUSE = "smolagents cannot pause an agent: a person is asked while the call waits."
_NOT_STORED = "smolagents cannot store an agent and continue it."
_ONE_CALL = "smolagents cannot cancel one call."


class ToolCalling(Smolagents):
    """An agent that calls tools as JSON."""

    name = "smolagents"
    limits: ClassVar = {
        "an_own_tool_that_pauses_the_agent_is_suspended": _NO_PAUSE,
        "a_pending_call_is_suspended": _NO_PAUSE,
        "resuming_runs_nothing_twice": _NOT_STORED,
        "cancelling_one_call_leaves_the_others": _ONE_CALL,
    }

    def agent(self, job: Job, policies: Sequence[AnyPolicy], done: Outcome) -> Any:
        agent = WinkToolCallingAgent(
            [*job.tools, *map(own_tool, job.own)],
            Script(*(_said(turn) for turn in job.turns)),
            workspace=job.workspace,
            policies=policies,
            run=job.run or None,
            **QUIET,
        )
        for tool in agent.tools.values():
            shown = get_tool_json_schema(tool)["function"]
            done.tools[tool.name] = {
                "description": shown["description"],
                "schema": shown["parameters"],
            }
        return agent

    def note(self, step: object, done: Outcome) -> None:
        if isinstance(step, ToolOutput) and not step.is_final_answer:
            done.answers[step.id] = step.observation
        if isinstance(step, ActionStep) and step.error is not None:
            for call in step.tool_calls or ():
                if done.answers.get(call.id, "failed").endswith("see the error"):
                    done.answers[call.id] = str(step.error)


def _said(turn: Turn) -> ChatMessage:
    if isinstance(turn, str):
        return calls(Ask("end", "final_answer", {"answer": turn}))
    return calls(*turn)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(ToolCalling, tmp_path)


class InCells(Smolagents):
    """An agent that writes code: the calls of a turn are made in one cell."""

    name = "smolagents (code)"
    limits: ClassVar = {
        **ToolCalling.limits,
        "parallel_reads_overlap": "Code calls tools one after the other.",
        "repeating_a_run_runs_nothing_twice": "A cell has no id.",
    }

    def agent(self, job: Job, policies: Sequence[AnyPolicy], done: Outcome) -> Any:
        executor = WinkExecutor(
            job.workspace, tools=job.tools, policies=policies, run=job.run or None
        )
        model = Script(*(cell(_code(turn)) for turn in job.turns))
        tools = [*executor.tools, *map(own_tool, job.own)]
        for tool in tools:
            prompt = tool.to_code_prompt()
            done.tools[tool.name] = {"description": prompt, "schema": prompt}
        return smolagents.CodeAgent(tools, model, executor=executor, **QUIET)

    def note(self, step: object, done: Outcome) -> None:
        if not isinstance(step, ActionStep) or step.code_action is None:
            return
        for call_id, answer in re.findall(r"<(\w+): (.*?)>\n", step.observations or "", re.DOTALL):
            done.answers[call_id] = answer
        if step.error is not None:
            for call_id in re.findall(r"<(\w+): ", step.code_action):
                done.answers[call_id] = str(step.error)


def _code(turn: Turn) -> str:
    if isinstance(turn, str):
        return f"final_answer({turn!r})"
    lines: list[str] = []
    for ask in turn:
        # Not in the code: a policy that looks for a word must not find it there.
        show = f"a = {ask.tool}(**{ask.id})\nprint('<{ask.id}: ' + a + '>')"
        if len(turn) > 1:
            body = show.replace("\n", "\n    ")
            show = f"try:\n    {body}\nexcept Exception as error:\n    print('<{ask.id}: ' + str(error) + '>')"
        lines.append(show)
    return "\n".join(lines)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case_in_cells(case: Case, tmp_path: Path) -> None:
    case.run(InCells, tmp_path)
