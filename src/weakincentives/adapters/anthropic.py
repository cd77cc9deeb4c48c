"""Anthropic's models through Anthropic's own client, with the Messages API."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.catalog import known_price, known_window
from weakincentives.adapters.failures import Provider
from weakincentives.adapters.media import IMAGES, PDF, MediaFilter
from weakincentives.adapters.openai import PerLoop, reading, server_name, wire_of
from weakincentives.adapters.schema import (
    Form,
    Forms,
    OutputForm,
    arguments_of,
    replace_lone_surrogates,
    strict_schema,
)
from weakincentives.core.budget import TokenPrice, TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.core.media import Media
from weakincentives.core.programs import loading
from weakincentives.errors import MissingExtra, ProviderRejected
from weakincentives.runtime.conversation import Message, ModelRequest, ModelTurn, StopReason

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from anthropic.lib.bedrock import AsyncAnthropicBedrock
    from anthropic.lib.vertex import AsyncAnthropicVertex

_STOP_REASONS: Mapping[str | None, StopReason] = {
    "max_tokens": "max_tokens",
    "model_context_window_exceeded": "max_tokens",
    "refusal": "refusal",
}
_PAUSED = "pause_turn"
_MOST_PAUSES = 20
"""How often a turn in which the provider runs tools is continued."""
_ALONE = frozenset({"text", "tool_use"})
"""Kinds of blocks that the text and the calls of a message express."""
_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
_CREDENTIALS = {"auth_token", "credentials", "profile", "config"}
_KEY_VARIABLES = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")


class AnthropicAdapter(Adapter):
    """Asks a Claude model through the Messages API. Answers are always streamed.

    Args:
        model: The model's name.
        max_tokens: The most tokens of one answer, thinking included.
        base_url: Another server. Default: ``ANTHROPIC_BASE_URL``, or Anthropic.
        api_key: Default: ``ANTHROPIC_API_KEY``.
        strict: Have the provider hold the model to the schemas of tools, where it can. It limits
            how many there may be.
        output: Ask for a structured answer by ``"schema"``, or in the prompt: ``"text"``.
        options: Extra fields of every request, such as ``thinking`` or ``cache_control``.
        media: The media types that the model takes, such as ``"image/*"``; it is told about others
            in words.
        client: Your own client, such as ``AsyncAnthropicBedrock``. It is used as it is, on one
            event loop, and never closed.
        client_options: Arguments for ``anthropic.AsyncAnthropic``, such as ``default_headers``.
    """

    name = "anthropic"

    def __init__(
        self,
        model: str,
        *,
        max_tokens: int = 16_000,
        base_url: str | None = None,
        api_key: str | None = None,
        strict: bool = False,
        output: OutputForm = "schema",
        options: Mapping[str, Any] | None = None,
        media: Iterable[str] = (*IMAGES, *PDF),
        client: AsyncAnthropic | AsyncAnthropicBedrock | AsyncAnthropicVertex | None = None,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            with loading():
                import anthropic
        except ImportError as error:
            raise MissingExtra("anthropic", "anthropic") from error
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {max_tokens}")
        self.model = model
        self._max_tokens, self._strict = max_tokens, strict
        self._output: OutputForm = output
        self._options = dict(options or {})
        arguments: dict[str, Any] = {"base_url": base_url, **(client_options or {})}
        address = arguments["base_url"] or os.environ.get("ANTHROPIC_BASE_URL")
        headers: Mapping[str, Any] = {}
        if client is None:
            key = api_key or _key(address, arguments)
            arguments["api_key"] = key
        else:
            key = getattr(client, "api_key", None)
            address, headers = str(client.base_url), client.default_headers
        self._is_anthropic = client is None and address is None
        self._provider = Provider(
            server_name(address, "Anthropic"),
            model,
            key,
            "api_key=... or ANTHROPIC_API_KEY",
            secrets=[address, dict(headers), self._options, client_options or {}],
            library="anthropic",
        )
        self._media = MediaFilter(media)
        given = cast("Any", client)
        self._own = None if client is None else given.with_options(max_retries=0)
        arguments["max_retries"] = 0  # the run retries: it knows the deadline
        self._clients = PerLoop(
            lambda: anthropic.AsyncAnthropic(**arguments), anthropic.AsyncAnthropic.close
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.model}>"

    async def aclose(self) -> None:
        """Close this event loop's client; when a loop ends, its client is closed anyway."""
        await self._clients.close_here()

    async def __aenter__(self) -> AnthropicAdapter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def context_window(self) -> int | None:
        return known_window(self.model) if self._is_anthropic else None

    def price(self) -> TokenPrice | None:
        return known_price(self.model) if self._is_anthropic else None

    async def complete(self, request: ModelRequest) -> ModelTurn:
        return await self._media.ask(request, self._complete)

    async def _complete(self, request: ModelRequest) -> ModelTurn:
        forms = Forms.of(request, strict=False, output=self._output)
        if forms.answer is not None and _held_to(forms.answer.schema) is None:
            forms = Forms.of(request, strict=False, output="text")
        return await self._provider.answered(self._ask(forms))

    async def _ask(self, forms: Forms) -> ModelTurn:
        client = self._own or await self._clients.here()
        body = _as_arguments(self._body(forms), client.messages.create)
        messages, answer = body["messages"], _Answer()
        for _ in range(_MOST_PAUSES):
            await self._stream(forms, client.messages.create, body, answer)
            if answer.stop_reason != _PAUSED or not answer.blocks:
                break
            # The provider runs tools itself, and wants its turn back to continue it.
            body["messages"] = [*messages, {"role": "assistant", "content": answer.content()}]
        with reading():
            return answer.turn(forms)

    def _body(self, forms: Forms) -> dict[str, Any]:
        timeout = forms.request.timeout
        body: dict[str, Any] = {
            "max_tokens": self._max_tokens,
            **self._options,
            "model": self.model,
            "messages": replace_lone_surrogates(_messages(forms.request.messages)),
            **({} if timeout is None else {"timeout": timeout}),
        }
        if forms.system.strip():
            body["system"] = replace_lone_surrogates(forms.system)
        tools = [*self._options.get("tools", ()), *map(self._tool, forms.tools.values())]
        if tools:
            body["tools"] = tools
        if forms.answer is not None:
            form = {"type": "json_schema", "schema": _held_to(forms.answer.schema)}
            body["output_config"] = {**self._options.get("output_config", {}), "format": form}
        return body

    def _tool(self, form: Form) -> dict[str, Any]:
        made = {"name": form.name, "description": form.description, "input_schema": form.schema}
        held = _held_to(form.schema) if self._strict else None
        return made if held is None else {**made, "input_schema": held, "strict": True}

    async def _stream(
        self,
        forms: Forms,
        create: Callable[..., Awaitable[Any]],
        body: dict[str, Any],
        answer: _Answer,
    ) -> None:
        on_text = forms.request.on_text
        answer.is_whole = False
        async with await create(**body, stream=True) as stream:
            async for each in stream:
                with reading():
                    text = answer.add(_decoded(each))
                if text and on_text is not None:
                    on_text(text)
        if not answer.is_whole:
            raise self._provider.unfinished()


def _key(address: str | None, arguments: Mapping[str, Any]) -> str | None:
    key, token = (os.environ.get(name) for name in _KEY_VARIABLES)
    if key or token or _CREDENTIALS & arguments.keys():
        return key
    if address is not None:
        return "none"  # the client requires one
    raise ProviderRejected(
        "There is no key for Anthropic: set ANTHROPIC_API_KEY or give api_key=...; "
        "for your own server give base_url=..."
    )


def _as_arguments(body: dict[str, Any], create: Callable[..., object]) -> dict[str, Any]:
    """Return a request as arguments, also fields that the client library does not know."""
    known = inspect.signature(create).parameters
    more = {name: value for name, value in body.items() if name not in known}
    arguments = {name: value for name, value in body.items() if name in known}
    return {**arguments, "extra_body": {**more, **(body.get("extra_body") or {})}}


def _held_to(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a schema that the provider can hold a model to; None for one that it cannot."""
    import anthropic

    if strict_schema(schema) is None:  # it allows any key, or a value of any type
        return None
    try:
        return anthropic.transform_schema(dict(schema))
    except (ValueError, AssertionError):
        return None


def _decoded(event: Any) -> dict[str, Any]:
    data = event.to_dict(mode="json", warnings=False) if hasattr(event, "to_dict") else event
    return replace_lone_surrogates(data)


# What goes out


def _messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the messages, in which the roles alternate."""
    made: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message.role == "model" else "user"
        blocks = list(_blocks(message))
        if made and made[-1]["role"] == role:
            made[-1]["content"] += blocks
        elif blocks:
            made.append({"role": role, "content": blocks})
    return made


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "tool":
        content = [*_texts(message.text), *map(_file, message.media)]
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": _id(message.call_id)}
        yield {**result, "content": content} if content else result
        return
    wire = wire_of(message, "messages") if message.role == "model" else None
    if wire is None:
        yield from _texts(message.text)
        yield from map(_file, message.media if message.role == "user" else ())
        yield from map(_use, message.tool_calls)
        return
    # The original blocks, thinking included; calls under our ids.
    calls = iter(message.tool_calls)
    for block in wire["messages"]:
        yield _use(next(calls)) if block["type"] == "tool_use" else block


def _texts(text: str) -> Iterator[dict[str, Any]]:
    if text.strip():  # others are refused
        yield {"type": "text", "text": text}


def _file(media: Media) -> dict[str, Any]:
    source = {"type": "base64", "media_type": media.media_type, "data": media.base64}
    if media.media_type.startswith("image/"):
        return {"type": "image", "source": source}
    return {"type": "document", "source": source, "title": media.name or "file"}


def _use(call: ToolCall) -> dict[str, Any]:
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", call.name)[:128] or "_"
    return {
        "type": "tool_use",
        "id": _id(call.id),
        "name": name,
        "input": json.loads(arguments_of(call)),
    }


def _id(call_id: str) -> str:
    """Return the id of a call as the provider accepts it: other adapters have other ids."""
    if re.fullmatch(r"[a-zA-Z0-9_-]+", call_id):
        return call_id
    return f"call_{hashlib.sha256(call_id.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"


# What comes back


class _Answer:
    """Builds an answer from the events of its stream; of several, if the provider paused."""

    def __init__(self) -> None:
        self.blocks = list[dict[str, Any]]()
        self.stop_reason: str | None = None
        self.is_whole = False
        self._model = ""
        self._before = 0
        """How many blocks precede the message that is being streamed."""
        self._spent: list[dict[str, int]] = []

    def add(self, event: dict[str, Any]) -> str:
        """Add an event and return its text."""
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
            self._model, self._before = str(message["model"]), len(self.blocks)
            self._spent.append({})
            self._count(message.get("usage"))
        elif kind == "content_block_start":
            self.blocks.append(dict[str, Any](event["content_block"]))
            return self._text(self.blocks[-1].get("text"))
        elif kind == "content_block_delta":
            place: int = self._before + event["index"]
            return self._extend(self.blocks[place], event["delta"])
        elif kind == "message_delta":
            self.stop_reason = event["delta"].get("stop_reason") or self.stop_reason
            self._count(event.get("usage"))
        elif kind == "message_stop":
            self.is_whole = self.stop_reason is not None
        return ""

    def _extend(self, block: dict[str, Any], delta: dict[str, Any]) -> str:
        kind = delta["type"]
        if kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
        elif kind in _DELTAS:
            name = _DELTAS[kind]
            piece = self._text(delta[name])
            block[name] = self._text(block.get(name)) + piece
            return piece if kind == "text_delta" else ""
        return ""

    def _text(self, value: Any) -> str:
        if value is not None and not isinstance(value, str):
            raise TypeError(f"expected a text, got {value!r}")
        return value or ""

    def _count(self, usage: dict[str, Any] | None) -> None:
        # The later event has the totals so far.
        found = {name: n for name, n in (usage or {}).items() if isinstance(n, int)}
        self._spent[-1] |= found

    def content(self) -> list[dict[str, Any]]:
        """Return the blocks as the provider expects them back."""
        return [self._closed(block) for block in self.blocks if block.get("text") != ""]

    def _closed(self, block: dict[str, Any]) -> dict[str, Any]:
        written = block.get("partial_json")
        if written is None:
            return block
        rest = {name: each for name, each in block.items() if name != "partial_json"}
        return {**rest, "input": json.loads(arguments_of(ToolCall("", written)))}

    def turn(self, forms: Forms) -> ModelTurn:
        calls = tuple(self._calls(forms))
        text = "".join(self._text(each.get("text")) for each in self.blocks)
        is_plain = all(block["type"] in _ALONE for block in self.blocks)
        stop = _STOP_REASONS.get(self.stop_reason, "tool_use" if calls else "end_turn")
        return ModelTurn(
            text=text if calls or stop == "refusal" else forms.final_text(text),
            tool_calls=calls,
            stop_reason=stop,
            usage=sum((_usage(each) for each in self._spent), TokenUsage()),
            model=self._model,
            wire=None if is_plain else {"messages": self.content()},
        )

    def _calls(self, forms: Forms) -> Iterator[ToolCall]:
        for block in self.blocks:
            if block["type"] == "tool_use":
                name, written = self._text(block["name"]), block.get("partial_json")
                yield forms.call(name, written or block.get("input"), self._text(block["id"]))


def _usage(spent: Mapping[str, int]) -> TokenUsage:
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    read: Sequence[int] = [max(0, spent.get(name, 0)) for name in names]
    written = max(0, spent.get("output_tokens", 0))
    return TokenUsage(input_tokens=sum(read), output_tokens=written, cached_tokens=read[2])
