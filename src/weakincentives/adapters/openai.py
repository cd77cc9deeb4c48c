"""OpenAI's models, and every server that speaks the same format, over OpenAI's own client.

The chat completions format is also what LiteLLM speaks to every other provider.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, finalize

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.failures import Provider
from weakincentives.adapters.schema import (
    Form,
    Forms,
    OutputForm,
    arguments_of,
    in_whole_characters,
    tokens,
)
from weakincentives.call import ToolCall
from weakincentives.errors import MissingExtra, ParseError, ProviderRejected
from weakincentives.runtime.conversation import Message, ModelRequest, ModelTurn, StopReason
from weakincentives.serde import parse

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")

_ENCRYPTED = "reasoning.encrypted_content"
_TEXT_EVENTS = frozenset({"response.output_text.delta", "response.refusal.delta"})
_LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_STOP_REASONS: Mapping[str | None, StopReason] = {
    "length": "max_tokens",
    "max_output_tokens": "max_tokens",
    "content_filter": "refusal",
}
WANTED_BACK = (
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "thinking_blocks",
    "extra_content",
    "provider_specific_fields",
)
"""What providers put beside a message or a call, and want to see again with it."""


class OpenAIAdapter(Adapter):
    """Asks a model through the chat completions or the responses API.

    Args:
        model: Its name, as the server knows it.
        api: ``"chat"``, which all servers speak, or ``"responses"``.
        base_url: Another server: Ollama, vLLM, llama.cpp. Else ``OPENAI_BASE_URL``, or OpenAI.
        api_key: Else ``OPENAI_API_KEY``; a server of your own may need none.
        strict: Whether schemas go out in strict mode, where they can be said in it.
        output: How a structured answer is asked for: by ``"schema"``, or in words, ``"text"``.
        options: More fields of every request, such as ``temperature`` or ``reasoning``.
        client: A client of your own. It is used as it is, on one event loop, and not closed.
        client_options: What ``openai.AsyncOpenAI`` is made with, such as ``default_headers``.
    """

    name = "openai"

    def __init__(
        self,
        model: str,
        *,
        api: Literal["chat", "responses"] = "chat",
        base_url: str | None = None,
        api_key: str | None = None,
        strict: bool = True,
        output: OutputForm = "schema",
        options: Mapping[str, Any] | None = None,
        client: AsyncOpenAI | None = None,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise MissingExtra("openai", "openai") from error
        if api not in ("chat", "responses"):
            raise ValueError(f'api is "chat" or "responses", got {api!r}')
        self.model = model
        self._api = api
        self._strict = strict
        self._output: OutputForm = output
        self._options = dict(options or {})
        self._asks_for_reasoning = True
        key = client.api_key if client is not None else _key(api_key, base_url)
        address = base_url if client is None else str(client.base_url)
        given = [address, {} if client is None else dict(client.default_headers)]
        self._provider = Provider(
            _name(address),
            model,
            key,
            "api_key=... or OPENAI_API_KEY",
            secrets=[*given, self._options, client_options or {}],
        )
        self._own = None if client is None else client.with_options(max_retries=0)
        made_with: dict[str, Any] = {"base_url": base_url, "api_key": key, **(client_options or {})}
        made_with["max_retries"] = 0  # ours is the one place that asks again
        self._clients = PerLoop(lambda: openai.AsyncOpenAI(**made_with), openai.AsyncOpenAI.close)

    async def complete(self, request: ModelRequest) -> ModelTurn:
        forms = Forms.of(request, strict=self._strict, output=self._output)
        client = self._own or await self._clients.here()
        ask = self._chat if self._api == "chat" else self._responses
        return await self._provider.answered(ask(client, forms))

    async def aclose(self) -> None:
        """Close the client of this event loop; that of a loop which ends is closed with it."""
        await self._clients.close_here()

    async def __aenter__(self) -> OpenAIAdapter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _chat(self, client: AsyncOpenAI, forms: Forms) -> ModelTurn:
        body = chat_body(forms, self._options) | self._to_send(forms)
        create = cast("Any", client.chat.completions.create)
        return await chat_turn(self._provider, forms, create, body, _plain)

    def _to_send(self, forms: Forms) -> dict[str, Any]:
        timeout = forms.request.timeout
        return {"model": self.model, **({} if timeout is None else {"timeout": timeout})}

    async def _responses(self, client: AsyncOpenAI, forms: Forms) -> ModelTurn:
        import openai

        try:
            return await self._respond(client, forms)
        except openai.BadRequestError as error:
            # What a model that does not reason says; nothing else tells which ones those are.
            if not (self._asks_for_reasoning and "ncrypted content" in str(error)):
                raise
        self._asks_for_reasoning = False
        return await self._respond(client, forms)

    async def _respond(self, client: AsyncOpenAI, forms: Forms) -> ModelTurn:
        body = _responses_body(forms, self._options) | self._to_send(forms)
        if self._asks_for_reasoning and not body["store"]:
            body["include"] = [*body.get("include", ()), _ENCRYPTED]
        create = cast("Any", client.responses.create)
        if forms.request.on_text is None:
            data = _plain(await create(**body))
        else:
            data = await self._streamed(await create(**body, stream=True), forms.request.on_text)
        answer = _read_response(forms, data)
        if isinstance(answer, _Failure):
            raise self._provider.failed(answer.code, answer.message or "")
        return answer

    async def _streamed(self, stream: Any, on_text: Callable[[str], None]) -> object:
        """Pass text on as it comes; return the whole answer, which stands in the last event."""
        whole: object = None
        async with stream:
            async for each in stream:
                event = _read(_Event, _plain(each))
                if event.type in _TEXT_EVENTS:
                    on_text(str(event.delta))
                elif event.type == "error":
                    raise self._provider.failed(event.code, event.message or "")
                elif event.type in _LAST_EVENTS:
                    whole = event.response
        if whole is None:
            raise self._provider.unfinished()
        return whole


def _key(given: str | None, base_url: str | None) -> str:
    key = given or os.environ.get("OPENAI_API_KEY")
    if key:
        return key
    if base_url or os.environ.get("OPENAI_BASE_URL"):
        return "none"  # the client insists on one
    raise ProviderRejected(
        "There is no key for OpenAI: set OPENAI_API_KEY or give api_key=...; "
        "for a server of your own give base_url=..."
    )


def _name(address: str | None) -> str:
    """Return how to call the server, without a password that may stand in its address."""
    address = address or os.environ.get("OPENAI_BASE_URL")
    return f"The server at {urlsplit(address).netloc.rpartition('@')[2]}" if address else "OpenAI"


def _plain(answer: Any) -> object:
    """Return an answer as the dict it came as."""
    import openai

    if isinstance(answer, openai.BaseModel):
        return in_whole_characters(answer.to_dict(mode="json", warnings=False))
    return answer


# The chat completions format


def chat_body(forms: Forms, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request; the options may offer tools that the provider runs."""
    system = {"role": "system", "content": forms.system}
    messages = [system, *map(_chat_message, forms.request.messages)]
    body = {**options, "messages": in_whole_characters(messages)}
    tools = [*options.get("tools", ()), *map(_chat_function, forms.tools.values())]
    if tools:
        body["tools"] = tools
    if forms.answer is not None:
        form = {"name": forms.answer.name, "schema": forms.answer.schema}
        strict = {"strict": forms.answer.is_strict}
        body["response_format"] = {"type": "json_schema", "json_schema": form | strict}
    return body


def _chat_function(form: Form) -> dict[str, Any]:
    function = {"name": form.name, "description": form.description, "parameters": form.schema}
    # Only said where it is so: some servers do not know it.
    return {"type": "function", "function": function | ({"strict": True} if form.is_strict else {})}


def _chat_message(message: Message) -> dict[str, Any]:
    if message.role == "user":
        return {"role": "user", "content": message.text}
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.call_id, "content": message.text}
    kept = _wire_of(message, "chat") or {"chat": {}, "calls": []}
    made: dict[str, Any] = {"role": "assistant", "content": message.text, **kept["chat"]}
    if message.tool_calls:
        made["content"] = message.text or None
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call)},
                **(kept["calls"][n] if n < len(kept["calls"]) else {}),
            }
            for n, call in enumerate(message.tool_calls)
        ]
    return made


def _wire_of(message: Message, api: str) -> dict[str, Any] | None:
    """Return what the provider wants back; another adapter's message has nothing of the kind."""
    wire = cast("dict[str, Any]", message.wire)
    return wire if isinstance(message.wire, Mapping) and api in wire else None


async def chat_turn(
    provider: Provider,
    forms: Forms,
    create: Callable[..., Awaitable[Any]],
    body: Mapping[str, Any],
    plain: Callable[[Any], Any],
    completed: Callable[[dict[str, Any], list[Any]], dict[str, Any]] = lambda data, chunks: data,
) -> ModelTurn:
    """Ask for a turn, in pieces where somebody listens.

    ``plain`` makes a dict of what the library returns. ``completed`` gets the whole answer, and the
    pieces that it came in, and may add to it.
    """
    on_text = forms.request.on_text
    if on_text is None:
        return _read_chat(forms, completed(plain(await create(**body)), []))
    counted = {"stream_options": {"include_usage": True}, **body}
    stream = await create(**counted, stream=True)
    pieces, chunks = _ChatPieces(), list[Any]()
    try:
        async for chunk in stream:
            chunks.append(chunk)
            on_text(pieces.add(plain(chunk)))
    finally:
        await (getattr(stream, "aclose", None) or stream.close)()
    if pieces.finish_reason is None:
        raise provider.unfinished()
    return _read_chat(forms, completed(pieces.completion(), chunks))


@dataclass(frozen=True)
class _Function:
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


@dataclass(frozen=True)
class _Call:
    function: _Function | None = None
    id: str | None = None
    index: int | None = None


@dataclass(frozen=True)
class _Said:
    content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[_Call, ...] | None = None


@dataclass(frozen=True)
class _Choice:
    message: _Said | None = None
    delta: _Said | None = None
    """A piece of the message, in a stream."""
    finish_reason: str | None = None


@dataclass(frozen=True)
class _Usage:
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class _Completion:
    choices: tuple[_Choice, ...] = ()
    model: str | None = None
    usage: _Usage | None = None


def _read_chat(forms: Forms, data: Any) -> ModelTurn:
    """Return an answer as a turn, or raise a ParseError that says what is wrong with it."""
    completion = _read(_Completion, data)
    choice = completion.choices[0] if completion.choices else _Choice()
    answer, usage = choice.message or _Said(), completion.usage or _Usage()
    made = [(each.function or _Function(), each.id) for each in answer.tool_calls or ()]
    if choice.message is None or any(function.name is None for function, _ in made):
        expected = "Required field. Expected a message, with the name of each function it calls"
        raise ParseError("The answer is not complete", {"choices": expected})
    calls = tuple(forms.call(str(each.name), each.arguments, id_) for each, id_ in made)
    reason = _STOP_REASONS.get(choice.finish_reason, "tool_use" if calls else "end_turn")
    text = answer.content or ""
    return ModelTurn(
        text=answer.refusal or (text if calls else forms.final_text(text)),
        tool_calls=calls,
        stop_reason="refusal" if answer.refusal else reason,
        usage=tokens(usage.prompt_tokens, usage.completion_tokens),
        model=completion.model or "",
        wire=_chat_wire(data["choices"][0]["message"]),
    )


def _chat_wire(message: Mapping[str, Any]) -> dict[str, Any] | None:
    beside = _beside(message)
    beside_calls = [_beside(call) for call in message.get("tool_calls") or ()]
    return {"chat": beside, "calls": beside_calls} if beside or any(beside_calls) else None


def _beside(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in WANTED_BACK if _says_something(given.get(name))}


def _says_something(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_says_something, cast("Mapping[str, Any]", value).values()))
    return bool(value)


@dataclass(slots=True)
class _ChatPieces:
    """Puts the pieces of an answer together, as if it had come at once."""

    finish_reason: str | None = None
    _message: dict[str, Any] = field(default_factory=dict[str, Any])
    _calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _about: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, data: Any) -> str:
        """Take a piece; return the text in it, or raise a ParseError for one that is none."""
        chunk = _read(_Completion, data)
        self._about |= {name: data[name] for name in ("model", "usage") if data.get(name)}
        if not chunk.choices:  # about the request, or its cost
            return ""
        choice = chunk.choices[0]
        if choice.finish_reason:  # some servers send an empty one with every piece
            self.finish_reason = choice.finish_reason
        if choice.delta is None:
            return ""
        raw = data["choices"][0]["delta"]
        _merge(self._message, raw, {"content", "refusal", *WANTED_BACK})
        for n, piece in enumerate(choice.delta.tool_calls or ()):
            self._add_call(piece, raw["tool_calls"][n])
        return choice.delta.content or choice.delta.refusal or ""

    def _add_call(self, piece: _Call, raw: Mapping[str, Any]) -> None:
        # Some servers count every call as the first, or do not count: then a new id begins one.
        same = [call for call in self._calls if call["index"] == piece.index]
        if not same or (piece.id and piece.id != same[-1]["id"]):
            empty = {"name": "", "arguments": ""}
            self._calls.append({"index": piece.index, "id": piece.id, "function": empty})
            same = self._calls
        call, function = same[-1], piece.function or _Function()
        _merge(call, raw, set(WANTED_BACK))
        arguments = function.arguments or ""
        call["function"]["name"] = call["function"]["name"] or function.name or ""
        call["function"]["arguments"] += (
            arguments if isinstance(arguments, str) else json.dumps(arguments)
        )

    def completion(self) -> dict[str, Any]:
        """Return the whole answer."""
        message = {**self._message, "tool_calls": self._calls}
        choice = {"message": message, "finish_reason": self.finish_reason}
        return {**self._about, "choices": [choice]}


def _merge(whole: dict[str, Any], piece: Mapping[str, Any], names: set[str]) -> None:
    """Add a piece: texts and lists go on, anything else is replaced."""
    for name in names & piece.keys():
        old, new = whole.get(name), piece[name]
        if isinstance(old, str | list) and type(new) is type(cast("object", old)):
            whole[name] = cast("Any", old) + new
        elif new is not None:
            whole[name] = new


# The format of the responses API


def _responses_body(forms: Forms, options: Mapping[str, Any]) -> dict[str, Any]:
    items = [item for message in forms.request.messages for item in _items(message)]
    body = {"store": False, **options}
    body |= {"instructions": forms.system, "input": in_whole_characters(items)}
    tools = [*options.get("tools", ()), *map(_function, forms.tools.values())]
    if tools:
        body["tools"] = tools
    if forms.answer is not None:
        form = {"type": "json_schema", "name": forms.answer.name, "schema": forms.answer.schema}
        strict = {"strict": forms.answer.is_strict}
        body["text"] = {**options.get("text", {}), "format": form | strict}
    return body


def _function(form: Form) -> dict[str, Any]:
    return {
        "type": "function",
        "name": form.name,
        "description": form.description,
        "parameters": form.schema,
        "strict": form.is_strict,
    }


def _items(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "user":
        yield {"role": "user", "content": message.text}
    elif message.role == "tool":
        yield {"type": "function_call_output", "call_id": message.call_id, "output": message.text}
    elif (wire := _wire_of(message, "responses")) is not None:
        # As they came, reasoning included; calls under our ids.
        calls = iter(message.tool_calls)
        for item in wire["responses"]:
            yield {**item, **_call(next(calls))} if item["type"] == "function_call" else item
    else:
        if message.text or not message.tool_calls:
            yield {"role": "assistant", "content": message.text}
        yield from map(_call, message.tool_calls)


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = arguments_of(call)
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments}


@dataclass(frozen=True)
class _Failure:
    """What a provider says of a failure, in an answer or in a stream."""

    code: str | int | None = None
    message: str | None = None


@dataclass(frozen=True)
class _Event(_Failure):
    """One event of a stream; only some say something to us."""

    type: str = ""
    delta: Any = None
    response: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Incomplete:
    reason: str | None = None


@dataclass(frozen=True)
class _Response:
    output: tuple[dict[str, Any], ...]
    status: str | None = None
    error: _Failure | None = None
    incomplete_details: _Incomplete | None = None
    model: str | None = None
    usage: _Usage | None = None


@dataclass(frozen=True)
class _FunctionCall:
    name: str
    arguments: str | dict[str, Any] | None = None
    call_id: str | None = None


@dataclass(frozen=True)
class _Part:
    type: str
    text: str | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class _Parts:
    content: tuple[_Part, ...]


def _read_response(forms: Forms, data: Any) -> ModelTurn | _Failure:
    """Return an answer as a turn, or what the provider says of its failure.

    What does not fit the format raises a ParseError.
    """
    response = _read(_Response, data)
    if response.status in {"failed", "cancelled"}:
        return response.error or _Failure(message=response.status)
    items = [item for item in response.output if "type" in item]
    made = [_read(_FunctionCall, each) for each in items if each["type"] == "function_call"]
    calls = tuple(forms.call(each.name, each.arguments, each.call_id) for each in made)
    said = [_read(_Parts, item) for item in items if item["type"] == "message"]
    parts = [part for each in said for part in each.content]
    text = "".join(part.text or "" for part in parts)
    refusal = "".join(part.refusal or "" for part in parts)
    incomplete, usage = response.incomplete_details or _Incomplete(), response.usage or _Usage()
    reason = _STOP_REASONS.get(incomplete.reason, "tool_use" if calls else "end_turn")
    return ModelTurn(
        text=refusal or (text if calls else forms.final_text(text)),
        tool_calls=calls,
        stop_reason="refusal" if refusal else reason,
        usage=tokens(usage.input_tokens, usage.output_tokens),
        model=response.model or "",
        wire={"responses": items},
    )


def _read(kind: type[T], data: object) -> T:
    return parse(kind, data, extra="ignore")


# Clients

_Open: TypeAlias = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[T, None]]]


class PerLoop(Generic[T]):
    """One thing for each event loop; closed when the loop ends, or when this is dropped."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[object]]) -> None:
        self._make = make
        self._close = close
        self._lock = threading.Lock()
        self._open: _Open[T] = WeakKeyDictionary()
        # It holds what is open, too: sockets that are dropped with this would not be closed first.
        finalize(self, _close_all, self._open).atexit = False

    async def here(self) -> T:
        """Return that of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._open.get(loop)
        if found is not None:
            return found[0]
        keeper = _closed_with_the_loop(self._make(), self._close)
        made = await anext(keeper)
        with self._lock:
            for ended in [each for each in self._open if each.is_closed()]:
                del self._open[ended]
            self._open[loop] = made, keeper
        return made

    async def close_here(self) -> None:
        """Close that of the running loop, if there is one."""
        with self._lock:
            found = self._open.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].aclose()


async def _closed_with_the_loop(
    made: T, close: Callable[[T], Awaitable[object]]
) -> AsyncGenerator[T, None]:
    """Keep something open until its loop ends.

    Nobody is told when a loop ends; but it closes the generators that are still open in it.
    """
    try:
        yield made
    finally:
        await close(made)


def _close_all(open_in: _Open[T]) -> None:
    for loop, (_, keeper) in list(open_in.items()):
        with suppress(RuntimeError):  # the loop has ended, and closed it
            loop.call_soon_threadsafe(_close_soon, loop, keeper)


def _close_soon(loop: asyncio.AbstractEventLoop, keeper: AsyncGenerator[T, None]) -> None:
    loop.create_task(_finish(keeper))


async def _finish(keeper: AsyncGenerator[T, None]) -> None:
    await keeper.aclose()
