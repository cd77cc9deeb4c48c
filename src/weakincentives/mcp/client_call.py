"""A request of an MCP client, and what its handler asks the client while it runs.

Older clients get a request of their own (``elicitation/create``, ``sampling/createMessage``,
``roots/list``) while the call waits. For newer ones the call is suspended: what it asks is its
answer, and the client repeats the call with the responses.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from weakincentives.adapters.media import mcp_block
from weakincentives.core.call import new_call_id
from weakincentives.core.media import Content, Media
from weakincentives.errors import MissingExtra, ProtocolError, Suspended, ToolValidationError
from weakincentives.prompt.caller import (
    Caller,
    LogLevel,
    NotAnswered,
    Root,
    Sample,
    SampleRequest,
)
from weakincentives.prompt.forms import read_form

try:
    from mcp.shared.exceptions import MCPError
    from mcp.shared.message import ServerMessageMetadata
    from mcp.types import (
        ClientCapabilities,
        CreateMessageRequest,
        CreateMessageRequestParams,
        CreateMessageResult,
        ElicitationCapability,
        ElicitRequest,
        ElicitRequestFormParams,
        ElicitResult,
        ListRootsRequest,
        ListRootsResult,
        RootsCapability,
        SamplingCapability,
        SamplingMessage,
        TextContent,
    )
    from mcp.types.version import is_version_at_least
    from pydantic import BaseModel, ValidationError
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

    from weakincentives.mcp.reports import Reports

R = TypeVar("R", bound=BaseModel)

_MISSING_CAPABILITY = -32021
_NEWEST_ERA = "2026-07-28"
_PATIENCE = 300.0
"""Seconds that a client has to answer while the call waits: over HTTP it can vanish unnoticed."""

client_call: ContextVar[ClientCall | None] = ContextVar("client_call", default=None)
"""The call of a client that is under way."""


def is_newest_era(version: str) -> bool:
    """Whether each request stands alone: no handshake, and what it asks is its answer."""
    return is_version_at_least(version, _NEWEST_ERA)


def patience() -> float:
    return _PATIENCE


class InputNeeded(Suspended):
    """The client has to repeat the call with what it is asked."""


class AnsweredElsewhere(Suspended):
    """Someone else answers what the call asks; the client makes it again."""


class _Asked(NamedTuple):
    question: str
    """Tells this question from others, so that an answer is for what was asked."""
    wire: dict[str, Any]
    answer_type: type[BaseModel]


class WaitingCall(NamedTuple):
    """What is kept of a call that waits for its client's answers: not its arguments."""

    id: str
    asked: Mapping[str, _Asked]
    answers: Mapping[str, BaseModel]


class ClientCall(Caller):
    """A call of a client, with what the client has answered before."""

    def __init__(
        self,
        request: ServerRequestContext,
        earlier: WaitingCall | None = None,
        responses: Mapping[str, Any] | None = None,
        reports: Reports | None = None,
    ) -> None:
        self.request = request
        self.client = request.session
        self.id = new_call_id() if earlier is None else earlier.id
        self.asked: dict[str, _Asked] = {}
        """What the call waits for, by the names that the client answers under."""
        self.used: list[Callable[[], object]] = []
        """For each answer from elsewhere that the call has used: lets it count again."""
        self._reports = reports
        self._answers: dict[str, BaseModel] = {}
        self._unasked = {} if earlier is not None else dict(responses or {})
        """Responses that came with the first request: the client knows the tool's keys."""
        if earlier is not None:
            self._answers |= earlier.answers
            for key, asked in earlier.asked.items():
                answer = _read(asked.answer_type, (responses or {}).get(key))
                if answer is not None:
                    self._answers[asked.question] = answer

    @property
    def user(self) -> str:
        params = self.client.client_params
        return "the user" if params is None else f"the user of {params.client_info.name}"

    @property
    def _capabilities(self) -> ClientCapabilities:
        return self.client.client_capabilities or ClientCapabilities()

    @property
    def can_ask(self) -> bool:  # type: ignore[override]
        modes = self._capabilities.elicitation
        return modes is not None and (modes.form is not None or modes.url is None)

    @property
    def can_sample(self) -> bool:  # type: ignore[override]
        return self._capabilities.sampling is not None

    @property
    def has_roots(self) -> bool:  # type: ignore[override]
        return self._capabilities.roots is not None

    @property
    def is_repeated(self) -> bool:
        """Whether the client repeats a call with its answers, instead of answering meanwhile."""
        return is_newest_era(self.client.protocol_version)

    # What a handler asks

    async def ask(self, question: str, schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        if not self.can_ask:
            self._refuse("ask its user", ClientCapabilities(elicitation=ElicitationCapability()))
        params = ElicitRequestFormParams(message=question, requested_schema=dict(schema))
        while True:
            request = ElicitRequest(params=params)
            try:
                answer = await self.put(request, ElicitResult, key)
            except TimeoutError:
                raise NotAnswered(f"no answer within {_PATIENCE:g} s", self.user) from None
            if answer.action != "accept":
                said = "declined" if answer.action == "decline" else "gave no answer"
                raise NotAnswered(f"{self.user} {said}", self.user, action=answer.action)
            content = {k: v for k, v in (answer.content or {}).items() if v is not None}
            try:
                return read_form(schema, content)
            except ToolValidationError:
                if not self.is_repeated:
                    raise
                self._forget(request)  # asked again

    async def sample(self, request: SampleRequest, key: str) -> Sample:
        if not self.can_sample:
            self._refuse("ask its model", ClientCapabilities(sampling=SamplingCapability()))
        params = CreateMessageRequestParams(
            messages=[
                SamplingMessage.model_validate({"role": role, "content": block}, by_name=False)
                for role, content in request.messages
                for block in blocks_of(content)
            ],
            max_tokens=request.max_tokens,
            system_prompt=request.system or None,
            temperature=request.temperature,
            stop_sequences=list(request.stop_sequences) or None,
        )
        answer = await self._put(CreateMessageRequest(params=params), CreateMessageResult, key)
        parts = answer.content if isinstance(answer.content, list) else [answer.content]
        text = "\n".join(part.text for part in parts if isinstance(part, TextContent))
        return Sample(text=text, model=answer.model, stop_reason=answer.stop_reason or "")

    async def roots(self, key: str) -> tuple[Root, ...]:
        if not self.has_roots:
            self._refuse("name folders", ClientCapabilities(roots=RootsCapability()))
        answer = await self._put(ListRootsRequest(), ListRootsResult, key)
        return tuple(Root(str(each.uri), each.name or "") for each in answer.roots)

    def log(self, level: LogLevel, message: object, logger: str) -> None:
        if self._reports is not None:
            self._reports.log(level, message, logger)

    def _refuse(self, what: str, needed: ClientCapabilities) -> None:
        said = f"The client cannot {what}"
        if not self.is_repeated:
            raise ToolValidationError(said)
        data = {"requiredCapabilities": needed.model_dump(by_alias=True, exclude_none=True)}
        raise ProtocolError(said, code=_MISSING_CAPABILITY, data=data)

    async def _put(self, request: Any, answer_type: type[R], key: str) -> R:
        try:
            return await self.put(request, answer_type, key)
        except TimeoutError:
            raise ToolValidationError(f"no answer within {_PATIENCE:g} s") from None

    async def put(self, request: Any, answer_type: type[R], key: str = "", binding: str = "") -> R:
        """Put a request to the client; the same one has its answer at once.

        ``binding`` is what an answer is for, where its content is not all of that: then only what
        was asked can be answered.
        """
        wire = _wire(request)
        question = binding or _identity(wire)
        known = self._answers.get(question)
        if known is None and key in self._unasked and not binding:
            known = _read(answer_type, self._unasked.pop(key))
        if known is not None:
            return cast("R", known)
        if self.is_repeated:
            key = key or f"{wire['method'].partition('/')[0]}_{question[:8]}"
            self.asked[key] = _Asked(question, wire, answer_type)
            await asyncio.sleep(0)  # what is asked together goes out together
            raise InputNeeded(f"the call waits for {wire['method']}")
        about = ServerMessageMetadata(related_request_id=self.request.request_id)
        try:
            async with asyncio.timeout(_PATIENCE):
                answer = await self.client.send_request(request, answer_type, metadata=about)
        except MCPError as error:
            raise ToolValidationError(f"The client answers: {error}") from error
        except ValidationError as error:
            raise ToolValidationError(f"The client's answer is invalid: {error}") from error
        self._answers[question] = answer
        return answer

    def _forget(self, request: Any) -> None:
        self._answers.pop(_identity(_wire(request)), None)

    def waiting(self) -> WaitingCall:
        return WaitingCall(self.id, self.asked, self._answers)

    def input_required(self, state: str) -> dict[str, Any]:
        """Return the answer to a call that waits, in the wire format."""
        return {
            "resultType": "input_required",
            "inputRequests": {key: asked.wire for key, asked in self.asked.items()},
            "requestState": state,
        }


def blocks_of(content: Content) -> list[dict[str, Any]]:
    """Return texts and media as content blocks of MCP."""
    parts = (content,) if isinstance(content, str | Media) else content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else mcp_block(part)
        for part in parts
    ]


def _wire(request: BaseModel) -> dict[str, Any]:
    wire = request.model_dump(by_alias=True, mode="json", exclude_none=True)
    return {"params": {}, **wire}


def _identity(wire: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(wire, sort_keys=True).encode()).hexdigest()


def _read(answer_type: type[BaseModel], answer: Any) -> BaseModel | None:
    """Return a response if it is one to what was asked."""
    if isinstance(answer, BaseModel):
        answer = answer.model_dump(by_alias=True, mode="json", exclude_none=True)
    try:
        return answer_type.model_validate(answer, by_name=False)
    except ValidationError:
        return None


async def end_stream() -> None:
    """Close the stream on which the client of this call waits for its answer, and go on.

    For calls that take long: a client over HTTP comes back for the answer, and no proxy has to hold
    a silent connection meanwhile. Where a client could not come back, nothing happens.
    """
    call = client_call.get()
    if call is not None and call.request.close_sse_stream is not None:
        await call.request.close_sse_stream()
