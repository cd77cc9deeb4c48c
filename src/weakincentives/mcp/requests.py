"""Answers to what a server asks its client: the user, a model, and the directories it may use.

A request comes while a call waits, on the connection's loop. It is answered on the loop of the
call, where the approvals and the model of the run are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from weakincentives.adapters.mcp_output import parts_of
from weakincentives.core.logs import get_logger
from weakincentives.core.media import Media
from weakincentives.core.text import harmless, visible
from weakincentives.errors import InvalidArguments, ParseError, PromptEvaluationError, Suspended
from weakincentives.prompt.approval import (
    Approval,
    ApprovalPolicy,
    ApprovalRequest,
    Ask,
    CallPreview,
    answer_to,
)
from weakincentives.serde.bounded_schema import BoundedSchema

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterator

    from mcp import types
    from mcp.client.context import ClientRequestContext

    from weakincentives.adapters import Adapter
    from weakincentives.prompt.tool import ToolContext

T = TypeVar("T")
AskUser: TypeAlias = "Ask | Literal['approvals'] | None"
AskModel: TypeAlias = "Adapter | Literal['run'] | None"
OnWait: TypeAlias = Callable[[bool], object]
"""Called, on any thread, when waiting for a person begins (True) and ends (False)."""

_logger = get_logger(__name__)

_PATIENCE = 300.0
"""Seconds that a person has to answer."""
_MOST_SHOWN = 4_000
"""Characters of a server's question."""
_MAX_SAMPLES = _MAX_QUESTIONS = 20
"""Answers of the model, and questions to a person, for one call of a tool."""


@dataclass(eq=False)
class PendingCall:
    """A call that waits for the server, and the loop that it runs on."""

    context: ToolContext
    tool: str
    """Our name of the tool."""
    on_wait: OnWait
    samples: int = 0
    questions: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._variables = copy_context()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do work on the loop of the call, from another one."""
        submit = self._variables.copy().run
        return await asyncio.wrap_future(
            submit(asyncio.run_coroutine_threadsafe, work(), self._loop)
        )


_calling: ContextVar[object] = ContextVar("calling", default=None)
"""The key of the call that a request to the server belongs to.

Not the call itself: a task that a server in this process starts would keep it alive.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerQuestion(ApprovalRequest):
    """What a server asks a person: approving sends the arguments, which can be edited."""

    server: str = ""
    message: str = ""

    @property
    def question(self) -> str:
        asked = visible(json.dumps(self.message[:_MOST_SHOWN], ensure_ascii=False))
        return f"The MCP server {harmless(self.server)} asks during {self.tool_name}: {asked}"

    def describe(self, most: int) -> str:
        lines = [self.question, "The answer:" if self.arguments else "It takes no other answer."]
        for name, value in self.arguments.items():
            shown = visible(json.dumps(value, ensure_ascii=False))
            lines.append(f"  | {visible(name)}: {shown}")
        lines += ["About it:"] if self.preview.facts else []
        facts = self.preview.facts.items()
        lines += [f"  | {harmless(f'{name}: {text}')}" for name, text in facts]
        text = "\n".join(lines)
        return text if len(text) <= most else f"{text[:most]}\nNOT EVERYTHING IS SHOWN"


class Requests:
    """Answers the requests of one server, as far as that is wanted."""

    def __init__(
        self,
        server: str,
        *,
        ask: AskUser = None,
        model: AskModel = None,
        roots: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        self._server, self._ask, self._model = server, ask, model
        if isinstance(roots, str):
            raise TypeError(f"roots takes a list of directories, got a string: [{roots!r}]")
        self._roots = [Path(each).absolute() for each in roots]
        self._calls: dict[object, PendingCall] = {}
        self._clocks: list[OnWait] = []

    @property
    def asks(self) -> bool:
        """Whether a call may wait for a person."""
        return self._ask is not None

    def callbacks(self) -> Mapping[str, Any]:
        """Return the options of the SDK's client; what is left out is not offered to the server."""
        return {
            **({"elicitation_callback": self._elicit} if self._ask is not None else {}),
            **({"sampling_callback": self._sample} if self._model is not None else {}),
            **({"list_roots_callback": self._list_roots} if self._roots else {}),
        }

    @contextmanager
    def during(self, caller: PendingCall | None) -> Generator[None]:
        """Answer requests for this call while the block runs."""
        if caller is None:
            yield
            return
        key = object()
        token = _calling.set(key)
        self._calls[key] = caller
        try:
            with self.timed(caller.on_wait):
                yield
        finally:
            del self._calls[key]
            _calling.reset(token)

    @contextmanager
    def timed(self, on_wait: OnWait) -> Generator[None]:
        """Tell a clock when a person is waited for, while the block runs."""
        self._clocks.append(on_wait)
        try:
            yield
        finally:
            self._clocks.remove(on_wait)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Stop all clocks: the block waits for a person."""
        clocks = tuple(self._clocks)
        for each in clocks:
            each(True)
        try:
            yield
        finally:
            for each in clocks:
                each(False)

    def _caller(self) -> PendingCall | None:
        # Older servers do not say for which call they ask: the newest that waits.
        newest = next(reversed(self._calls.values()), None)
        return self._calls.get(_calling.get(), newest)

    # The user

    async def _elicit(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        from mcp import types

        caller = self._caller()
        try:
            form = _Form.of(params)
        except (TypeError, ValueError) as error:
            _logger.warning("a question of the MCP server %s is invalid: %s", self._server, error)
            return types.ElicitResult(action="cancel")
        answer = None if caller is None else await self._answer(caller, form)
        if answer is None:
            return types.ElicitResult(action="cancel")
        if answer.approved is not True:
            return types.ElicitResult(action="decline")
        try:
            return types.ElicitResult(action="accept", content=form.content(answer.arguments))
        except ParseError as error:
            _logger.warning("the answer to the MCP server %s is invalid: %s", self._server, error)
            return types.ElicitResult(action="cancel")

    async def _answer(self, caller: PendingCall, form: _Form) -> Approval | None:
        """Return the answer of a person, or None if there was none."""
        ask = _asking(caller) if isinstance(self._ask, str) else self._ask
        if ask is None:
            return None
        if caller.questions >= _MAX_QUESTIONS:  # whoever is asked without end agrees in the end
            _logger.warning("the MCP server %s asks too much during one call", self._server)
            return None
        caller.questions += 1

        def revise(arguments: Mapping[str, Any]) -> ApprovalRequest:
            try:
                form.content(arguments)
            except ParseError as error:
                raise InvalidArguments(json.dumps(dict(error.details))) from error
            return replace(request, arguments=dict(arguments))

        request = ServerQuestion(
            tool_name=caller.tool,
            description=form.message,
            arguments=form.shown,
            reach=None,
            call_id=caller.context.call_id,
            session_id=caller.context.session_id,
            preview=CallPreview(facts=form.facts),
            policy_name="elicitation",
            server=self._server,
            message=form.message,
            revise=revise,
        )
        with self.waiting():
            try:
                return await caller.run(lambda: answer_to(ask, request, _PATIENCE))
            except Suspended:  # a person is asked later, but the server waits now
                return None

    # A model

    async def _sample(
        self, context: ClientRequestContext, params: types.CreateMessageRequestParams
    ) -> types.CreateMessageResult | types.ErrorData:
        from mcp import types

        caller = self._caller()
        refused = self._refusal(caller, params)
        if refused or caller is None:
            return types.ErrorData(code=types.INVALID_REQUEST, message=refused)
        form = _Form(
            "It asks the model.",
            {"type": "object"},
            facts={"asks the model": "\n".join(_texts_of(params))[:_MOST_SHOWN]},
        )
        if self._ask is not None:
            answer = await self._answer(caller, form)
            if answer is None or answer.approved is not True:
                return types.ErrorData(code=types.INVALID_REQUEST, message="The user declined")
        caller.samples += 1
        try:
            return await caller.run(lambda: _sampled(cast("Any", self._model), caller, params))
        except (PromptEvaluationError, TimeoutError) as error:
            _logger.warning("the model failed for the MCP server %s: %s", self._server, error)
            return types.ErrorData(code=types.INTERNAL_ERROR, message="The model failed")

    def _refusal(self, caller: PendingCall | None, params: types.CreateMessageRequestParams) -> str:
        if caller is None:
            return "Only a call of a tool can ask the model"
        if self._model == "run" and caller.context.adapter is None:
            return "No model runs here"
        if params.tools:
            return "The model is offered no tools of a server"
        if caller.samples >= _MAX_SAMPLES:
            return f"A call can ask the model {_MAX_SAMPLES} times"
        return ""

    # Directories

    async def _list_roots(self, context: ClientRequestContext) -> types.ListRootsResult:
        from mcp import types
        from pydantic import FileUrl

        roots = [types.Root(uri=FileUrl(each.as_uri()), name=each.name) for each in self._roots]
        return types.ListRootsResult(roots=roots)


def _asking(caller: PendingCall) -> Ask | None:
    """Return how the approvals of the prompt ask; None where they ask nobody."""
    context = caller.context
    offer = context.offers.get(caller.tool)
    rules = () if offer is None else offer.rules
    found = (each.policy for each in rules if isinstance(each.policy, ApprovalPolicy))
    return next((policy.ask for policy in found if policy.ask is not None), None)


@dataclass
class _Form:
    """A question of a server, and the answers that it takes."""

    message: str
    schema: Mapping[str, Any]
    takes_content: bool = False
    facts: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, params: types.ElicitRequestParams) -> _Form:
        from mcp import types

        if isinstance(params, types.ElicitRequestURLParams):
            if not params.url.startswith(("https://", "http://")):
                raise ValueError("its address is not a web page")
            return cls(params.message, {"type": "object"}, facts={"opens": params.url})
        schema = {"type": "object", **params.requested_schema}
        facts = {name: _about(each) for name, each in _properties(schema).items()}
        return cls(params.message, schema, True, facts)

    def __post_init__(self) -> None:
        self._checked = BoundedSchema(self.schema)

    @property
    def shown(self) -> Mapping[str, Any]:
        """The fields, with the server's defaults."""
        return {name: each.get("default") for name, each in _properties(self.schema).items()}

    def content(self, given: Mapping[str, Any] | None) -> Any:
        """Return the answer as the server gets it; raise ParseError if it does not fit."""
        if not self.takes_content:
            return None
        answered = self.shown if given is None else given
        left_out = {name: value for name, value in answered.items() if value is not None}
        return self._checked.parse(left_out)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    given = cast("Mapping[str, Any]", schema.get("properties") or {})
    return {name: cast("Any", each) for name, each in given.items() if isinstance(each, dict)}


def _about(field: Mapping[str, Any]) -> str:
    """Return what a field of a form takes, in words."""
    items: object = field.get("items")
    holder = cast("Mapping[str, Any]", items) if isinstance(items, Mapping) else field
    listed = cast("Sequence[Any]", holder.get("oneOf") or holder.get("anyOf") or ())
    constants = [each.get("const") for each in listed]
    choices = cast("Sequence[Any]", holder.get("enum") or constants)
    said = [str(field[key]) for key in ("title", "description") if field.get(key)]
    said.append(f"one of {', '.join(map(str, choices))}" if choices else str(field.get("type", "")))
    return "; ".join(filter(None, said))


def _texts_of(params: types.CreateMessageRequestParams) -> Iterator[str]:
    if params.system_prompt:
        yield params.system_prompt
    for message in params.messages:
        for part in parts_of(_blocks(message)):
            yield part if isinstance(part, str) else part.render()


def _blocks(message: types.SamplingMessage) -> Sequence[Any]:
    content = message.content
    return cast("Sequence[Any]", content) if isinstance(content, list) else [content]


async def _sampled(
    model: Adapter | Literal["run"], caller: PendingCall, params: types.CreateMessageRequestParams
) -> types.CreateMessageResult:
    from mcp import types

    from weakincentives.prompt.prompt import RenderedPrompt
    from weakincentives.runtime.conversation import Message, ModelRequest

    context = caller.context
    given = cast("Adapter", context.adapter) if model == "run" else model
    messages: list[Message] = []
    for each in params.messages:
        parts = list(parts_of(_blocks(each)))
        texts = [part if isinstance(part, str) else part.render() for part in parts]
        messages.append(
            Message(
                role="model" if each.role == "assistant" else "user",
                text="\n".join(texts),
                media=tuple(part for part in parts if isinstance(part, Media)),
            )
        )
    tracker, deadline = context.budget_tracker, context.deadline
    if tracker is not None:
        tracker.check()
    asked = given if model == "run" else given.begin_run()
    try:
        turn = await asked.complete(
            ModelRequest(
                prompt=RenderedPrompt(text=params.system_prompt or "", tools=()),
                messages=messages,
                timeout=None if deadline is None else deadline.remaining(),
            )
        )
    finally:
        if model != "run":
            await asked.end_run()
    if tracker is not None:
        tracker.record(turn.usage, given.price())
    text, used = turn.text, turn.usage.output_tokens
    is_cut = turn.stop_reason == "max_tokens" or used > params.max_tokens
    if used > params.max_tokens:  # no adapter takes a limit for one request
        text = text[: len(text) * params.max_tokens // used]
    return types.CreateMessageResult(
        role="assistant",
        content=types.TextContent(text=text),
        model=turn.model or given.name,
        stop_reason="maxTokens" if is_cut else "endTurn",
    )
