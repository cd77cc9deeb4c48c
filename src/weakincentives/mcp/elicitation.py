"""Approval by the user of an MCP client: a form that the client shows, in either protocol era.

The model can bring up what durable runs ask, but only such a form answers it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from weakincentives.errors import AnswerRefused, MissingExtra, ToolValidationError
from weakincentives.mcp.client_call import AnsweredElsewhere, client_call, patience
from weakincentives.prompt import MarkdownSection, Section, Tool, ToolContext
from weakincentives.prompt.approval import Approval, ApprovalRequest, ApprovalRule, plain_words
from weakincentives.prompt.caller import NotAnswered
from weakincentives.tool_result import ToolResult

try:
    from mcp.types import ElicitRequest, ElicitRequestFormParams, ElicitResult
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from weakincentives.runtime.stores.runs import DurableRun, Runs

_FORM = "approval"
"""The key of the form among the inputs that a call requires."""
_MOST_SHOWN = 20_000
"""Characters of the question."""


async def ask_client(request: ApprovalRequest) -> Approval:
    """Ask the user of the MCP client that makes the call: for ``ApprovalPolicy(ask=ask_client)``.

    Where the client cannot ask its user, the call is denied.
    """
    try:
        return await answer_of_client(request)
    except NotAnswered as error:
        return Approval(False, error.by, str(error))


class AskElsewhere:
    """Asks the user of the MCP client that makes the call, for ``ApprovalPolicy(ask=…)``.

    Where the client cannot ask its user, the call is suspended, and what it asks waits in a
    database: for ``wink approve``, ``wink debug`` or another client. When it is answered, the
    client makes the same call again. An answer counts once.

    Args:
        runs: Returns the runs of the database; called when they are first needed.
        about: What to note about the session in the database, as JSON values.
    """

    def __init__(self, runs: Callable[[], Runs], about: Mapping[str, Any] | None = None) -> None:
        self._runs, self._about = runs, dict(about or {})
        self._stand_ins: dict[str, DurableRun] = {}

    def close(self) -> None:
        """Note in the database that the sessions are over which have nothing left to ask."""
        for run in self._stand_ins.values():
            if not self._runs().pending(run.id):
                self._runs().end(run.id, run.sitting, "done")

    async def __call__(self, request: ApprovalRequest) -> Approval:
        call = client_call.get()
        if call is None or call.can_ask:
            return await ask_client(request)
        # The client does not repeat a call under its id: it is known by what it does.
        asked = replace(request, call_id=_mark_of(request))
        answer, waits_for = await asyncio.to_thread(self._look, asked, call.user)
        if answer is not None:
            call.used.append(lambda: self._unuse(asked))
            return answer
        if not waits_for:
            return Approval(False, reason="the session was cancelled in the database")
        for unuse in call.used:  # by another policy of this call
            await asyncio.to_thread(unuse)
        raise AnsweredElsewhere(
            f"{request.tool_name} needs approval, which this client cannot ask its user for. The "
            f"call has not run: it waits for an answer (`wink approve {waits_for}`). Make the same "
            "call again once a person has answered"
        )

    def _look(self, asked: ApprovalRequest, user: str) -> tuple[Approval | None, str]:
        """Return the answer, or else the mark of the run that waits for it."""
        runs, run = self._runs(), self._run(asked, user)
        answer = runs.use(run.id, asked)
        return answer, "" if answer is not None or not runs.ask(run.id, asked) else run.mark

    def _unuse(self, asked: ApprovalRequest) -> None:
        self._runs().unuse(self._run(asked).id, asked)

    def _run(self, asked: ApprovalRequest, user: str = "a client") -> DurableRun:
        run = self._stand_ins[asked.session_id] = self._runs().stand_in(
            f"mcp {asked.session_id}",
            task=f"Calls of {user}",
            about={"kind": "mcp", **self._about},
            worker=f"mcp:{os.getpid()}",
        )
        return run


def _mark_of(request: ApprovalRequest) -> str:
    made = json.dumps([request.tool_name, request.arguments], sort_keys=True, default=repr)
    return hashlib.sha256(made.encode()).hexdigest()[:16]


async def answer_of_client(request: ApprovalRequest) -> Approval:
    """Return the answer of the user of the MCP client that makes the call.

    Raises:
        NotAnswered: They did not give one, or the client cannot ask.
    """
    call = client_call.get()
    if call is None or not call.can_ask:
        raise NotAnswered("there is no one to ask")
    form = ElicitRequestFormParams(
        message=request.describe(_MOST_SHOWN), requested_schema=_schema(request)
    )
    try:
        # The approval is for what was shown: another call, or another file, is asked about.
        asked = f"{request.policy_name} {request.digest}"
        answer = await call.put(ElicitRequest(params=form), ElicitResult, _FORM, asked)
    except TimeoutError:
        raise NotAnswered(f"no answer within {patience():g} s", call.user) from None
    if answer.action != "accept":
        reason = "declined" if answer.action == "decline" else "the question was not answered"
        raise NotAnswered(reason, call.user)
    content: Mapping[str, Any] = answer.content or {}
    said, given = content.get("answer"), str(content.get("arguments") or "").strip()
    if said == "no":
        return Approval(False, call.user, str(content.get("reason") or ""))
    if said not in ("yes", "always"):
        raise NotAnswered("the answer was invalid")
    try:
        arguments = cast("dict[str, Any]", json.loads(given)) if given else None
        rule = _rule(request, str(content.get("scope") or "").strip()) if said == "always" else None
    except ValueError as error:
        raise NotAnswered(f"the answer was invalid: {error}", call.user) from error
    return Approval(True, call.user, arguments=arguments, always=rule)


def _rule(request: ApprovalRequest, scope: str) -> ApprovalRule:
    tool, preview = request.tool_name, request.preview
    if not scope:
        return ApprovalRule(tool=tool)
    if preview.paths:
        return ApprovalRule(tool=tool, path=scope)
    words = plain_words(scope)
    if not words:
        raise ValueError("the scope must be the first words of a command, without shell syntax")
    return ApprovalRule(tool=tool, command=words)


def _schema(request: ApprovalRequest) -> dict[str, Any]:
    preview = request.preview
    fields = {
        "reason": ("Reason", "If no: why, for the model."),
        "arguments": ("Arguments", "To run it with other arguments: all of them, as JSON."),
    }
    if preview.paths:
        fields["scope"] = ("Scope", "If always: a glob of paths. Empty: all calls of the tool.")
    elif preview.command:
        fields["scope"] = ("Scope", "If always: how commands begin. Empty: all commands.")
    texts = {
        name: {"type": "string", "title": title, "description": text}
        for name, (title, text) in fields.items()
    }
    choices = {"type": "string", "title": "Answer", "enum": ["yes", "no", "always"]}
    return {"type": "object", "properties": {"answer": choices, **texts}, "required": ["answer"]}


# Runs elsewhere

_WORK = """
Runs elsewhere may wait for the approval of the user. `ask_about_waiting_run` shows the user what
the oldest of them asks, in a form of their client; only the user can answer it.
"""


def approvals_section(runs: Runs) -> Section[None]:
    """Return a section with the tool, for the prompt of an ``McpServer``."""

    async def ask_about_waiting_run(params: None, *, context: ToolContext) -> ToolResult[None]:
        waiting = await asyncio.to_thread(runs.pending)
        if not waiting:
            return ToolResult.ok(None, "No run waits for an approval.")
        asked = waiting[0]
        # From the form alone: without an answer of a person, the request stays open.
        answer = await answer_of_client(asked.request)
        said = {name: getattr(answer, name) for name in ("approved", "reason", "arguments", "by")}
        try:
            await asyncio.to_thread(runs.answer, asked.id, digest=asked.digest, **said)
        except AnswerRefused as error:
            raise ToolValidationError(str(error)) from error
        done = "approved" if answer.approved else "denied"
        left = len(waiting) - 1
        more = f" {left} more wait." if left else ""
        message = f"{answer.by} {done} {asked.request.tool_name} of {asked.run}.{more}"
        return ToolResult.ok(None, message)

    tool: Tool[None, None] = Tool(
        name="ask_about_waiting_run",
        description="Ask the user about the oldest call of another run that waits for approval.",
        handler=ask_about_waiting_run,
        reach="read",
    )
    return MarkdownSection(title="Runs that wait", template=_WORK, tools=[tool])
