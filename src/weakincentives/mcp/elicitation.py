"""Approval by the user of an MCP client: a form that the client shows, in either protocol era.

Older clients get a request of their own (``elicitation/create``) while the call waits. For newer
ones the call is suspended, the form is its answer, and the client repeats the call with the form
filled in. The model can bring up what durable runs ask, but only such a form answers it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from weakincentives.call import new_call_id
from weakincentives.errors import AnswerRefused, ApprovalNeeded, MissingExtra, ToolValidationError
from weakincentives.prompt import MarkdownSection, Section, Tool, ToolContext
from weakincentives.prompt.approval import Approval, ApprovalRequest, ApprovalRule, plain_words
from weakincentives.tool_result import ToolResult

try:
    from mcp.types import ElicitRequest, ElicitRequestFormParams, ElicitResult
    from mcp.types.version import is_version_at_least
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

    from weakincentives.durable.runs import Runs

_FORM = "approval"
"""The key of the form among the inputs that a call requires."""
_IN_ANSWER_SINCE = "2026-07-28"
_MOST_SHOWN = 20_000
"""Characters of the question."""
_PATIENCE = 300.0
"""Seconds that a user has to answer while the call waits, and with it the calls of all clients.

A client over HTTP can vanish unnoticed: its answer would never come.
"""

client_call: ContextVar[ClientCall | None] = ContextVar("client_call", default=None)
"""The call of a client that is under way."""


class NotAnswered(ToolValidationError):
    """The user of a client has given no answer that counts."""

    def __init__(self, message: str, by: str = "") -> None:
        super().__init__(message)
        self.by = by


class ClientCall:
    """A call of a client, with what its user has answered before."""

    def __init__(
        self,
        request: ServerRequestContext,
        earlier: ClientCall | None = None,
        responses: Mapping[str, Any] | None = None,
    ) -> None:
        self.client = request.session
        self.request_id = request.request_id
        self.id = new_call_id() if earlier is None else earlier.id
        self.question: ApprovalRequest | None = None
        """What the call waits for."""
        self._answers: list[tuple[ApprovalRequest, ElicitResult]] = []
        self._asked = 0
        if earlier is not None:
            self._answers += earlier._answers
            response = (responses or {}).get(_FORM)
            if earlier.question is not None and isinstance(response, ElicitResult):
                self._answers.append((earlier.question, response))

    @property
    def user(self) -> str:
        params = self.client.client_params
        return "the user" if params is None else f"the user of {params.client_info.name}"

    @property
    def can_ask(self) -> bool:
        capabilities = self.client.client_capabilities
        modes = None if capabilities is None else capabilities.elicitation
        return modes is not None and (modes.form is not None or modes.url is None)

    async def ask(self, request: ApprovalRequest) -> ElicitResult:
        if not is_version_at_least(self.client.protocol_version, _IN_ANSWER_SINCE):
            async with asyncio.timeout(_PATIENCE):
                return await self.client.elicit_form(
                    request.describe(_MOST_SHOWN), _schema(request), self.request_id
                )
        for number, (shown, answer) in enumerate(self._answers[self._asked :], self._asked):
            # The approval is for what was shown: another call, or another file, is asked about.
            # An answer "always" holds already, so its question does not come again.
            if shown.shows_the_same_as(request):
                self._asked = number + 1
                return answer
        del self._answers[self._asked :]
        self.question = request
        raise ApprovalNeeded(request)  # the client repeats the call with the form filled in

    def form_to_fill_in(self, state: str) -> dict[str, Any]:
        """Return the answer to a call that waits, in the wire format."""
        assert self.question is not None
        message, schema = self.question.describe(_MOST_SHOWN), _schema(self.question)
        form = ElicitRequest(
            params=ElicitRequestFormParams(message=message, requested_schema=schema)
        )
        return {
            "resultType": "input_required",
            "inputRequests": {
                _FORM: form.model_dump(by_alias=True, mode="json", exclude_none=True)
            },
            "requestState": state,
        }


async def ask_client(request: ApprovalRequest) -> Approval:
    """Ask the user of the MCP client that makes the call: for ``ApprovalPolicy(ask=ask_client)``.

    Where the client cannot ask its user, the call is denied.
    """
    try:
        return await answer_of_client(request)
    except NotAnswered as error:
        return Approval(False, error.by, str(error))


async def answer_of_client(request: ApprovalRequest) -> Approval:
    """Return the answer of the user of the MCP client that makes the call.

    Raises:
        NotAnswered: They did not give one, or the client cannot ask.
    """
    call = client_call.get()
    if call is None or not call.can_ask:
        raise NotAnswered("there is no one to ask")
    try:
        answer = await call.ask(request)
    except TimeoutError:
        raise NotAnswered(f"no answer within {_PATIENCE:g} s", call.user) from None
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
