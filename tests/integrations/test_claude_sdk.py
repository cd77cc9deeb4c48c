"""The Claude Agent SDK with its real program, against a server on loopback."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import Answer, Ask, Case, Driver, Job, Outcome, all_cases, require, run_on_loop
from messages_server import MessagesServer, serving

sdk = require("claude_agent_sdk")

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage  # noqa: E402

from weakincentives.adapters import ModelTurn  # noqa: E402
from weakincentives.call import ToolCall  # noqa: E402
from weakincentives.integrations.claude import query  # noqa: E402
from weakincentives.prompt import Approval  # noqa: E402

pytestmark = pytest.mark.heavy


def options(server: MessagesServer, home: Path, **more: Any) -> ClaudeAgentOptions:
    """Return options of a program that asks this server, and knows nothing of the user."""
    settings: dict[str, Any] = {
        "model": "claude-sonnet-5",
        "setting_sources": [],
        "permission_mode": "bypassPermissions",
        "stderr": lambda line: None,
        **more,
    }
    env = {
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "IS_SANDBOX": "1",  # or it refuses to bypass permissions as root
        **server.environment,
        **settings.pop("env", {}),
    }
    return ClaudeAgentOptions(env=env, **settings)


def text_of(block: Mapping[str, Any]) -> str:
    content = block["content"]
    return content if isinstance(content, str) else content[0]["text"]


# The cases of all frameworks


class ClaudeSDK(Driver):
    """Lets the program defer calls that need approval, and resumes it with the answers."""

    name = "claude-agent-sdk"
    limits = {
        "an_own_tool_that_pauses_the_agent_is_suspended": (
            "a tool cannot pause the agent: the SDK turns every exception of it into an answer"
        ),
        "cancelling_one_call_leaves_the_others": (
            "the SDK cannot cancel one call: it interrupts the turn, or the query is cancelled"
        ),
    }

    def run(self, job: Job) -> Outcome:
        return self._played(job, None)

    def resume(self, job: Job, state: Any) -> Outcome:
        return self._played(job, state)

    def _played(self, job: Job, session: str | None) -> Outcome:
        done = Outcome()
        names = {f.__name__: f"mcp__own__{f.__name__}" for f in job.own}
        turns = [_turn(turn, names) for turn in job.turns]
        with serving(turns, keeps_calls=True) as server:
            try:
                run_on_loop(_play(job, session, server, done), job.cancel_when)
            except (Exception, asyncio.CancelledError) as error:
                done.error = error
        done.answers = {each["tool_use_id"]: text_of(each) for each in server.tool_results()}
        for tool in server.requests[0]["tools"]:
            shown = {"description": tool["description"], "schema": tool["input_schema"]}
            done.tools[tool["name"].rpartition("__")[2]] = shown
        return done


def _turn(turn: Any, names: Mapping[str, str]) -> ModelTurn:
    if isinstance(turn, str):
        return ModelTurn(text=turn)
    made = [
        ToolCall(names.get(ask.tool, f"mcp__wink__{ask.tool}"), ask.arguments, ask.id)
        for ask in turn
    ]
    return ModelTurn(tool_calls=tuple(made), stop_reason="tool_use")


async def _play(job: Job, session: str | None, server: MessagesServer, done: Outcome) -> None:
    home = job.workspace.parent / "home"
    home.mkdir(exist_ok=True)
    own = sdk.create_sdk_mcp_server("own", tools=[_as_sdk_tool(each) for each in job.own])
    given = options(server, home, tools=[], mcp_servers={"own": own} if job.own else {})
    approvals: dict[str, Approval] = {}
    if session is not None:
        approvals = {name: _approval(answer) for name, answer in job.answers.items()}
    while True:
        ended = None
        async for message in query(
            "Do it." if session is None else None,
            replace(given, resume=session),
            workspace=job.workspace,
            policies=job.policies,
            tools=job.tools,
            run=job.run or None,
            approvals=approvals,
        ):
            ended = message if isinstance(message, ResultMessage) else ended
        assert ended is not None
        session, deferred = ended.session_id, ended.deferred_tool_use
        if deferred is None:
            done.text = ended.result or ""
            return
        done.questions[deferred.id] = json.dumps(deferred.input)
        if deferred.id not in job.answers:
            done.state = session
            return
        approvals = {deferred.id: _approval(job.answers[deferred.id])}


def _approval(answer: Answer) -> Approval:
    answer = answer.given()
    return Approval(answer.approved, answer.by, answer.reason, answer.arguments)


def _as_sdk_tool(function: Callable[..., Any]) -> Any:
    types = {
        name: each.annotation for name, each in inspect.signature(function, eval_str=True).parameters.items()
    }

    async def run(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": str(function(**arguments))}]}

    return sdk.tool(function.__name__, inspect.getdoc(function), types)(run)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(ClaudeSDK, tmp_path)
