"""OpenAI's models, and every server that speaks the same format, through OpenAI's own client.

LiteLLM and llama.cpp speak the chat completions format as well: see ``ChatAdapter``.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from abc import abstractmethod
from base64 import b64decode
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, finalize

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.catalog import known_price, known_window
from weakincentives.adapters.failures import Provider
from weakincentives.adapters.media import AUDIO, IMAGES, PDF, MediaFilter
from weakincentives.adapters.schema import (
    Form,
    Forms,
    OutputForm,
    arguments_of,
    replace_lone_surrogates,
)
from weakincentives.core.budget import TokenPrice, TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.core.logs import get_logger
from weakincentives.core.media import Media
from weakincentives.core.programs import loading
from weakincentives.errors import MissingExtra, ParseError, ProviderRejected
from weakincentives.runtime.conversation import Message, ModelRequest, ModelTurn, StopReason

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")

_logger = get_logger(__name__)

_ENCRYPTED_REASONING = "reasoning.encrypted_content"
_STOP_REASONS: Mapping[str | None, StopReason] = {
    "length": "max_tokens",
    "max_output_tokens": "max_tokens",
    "content_filter": "refusal",
}
_NOTHING: Any = {}
RETURNED_FIELDS = (
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "thinking_blocks",
    "extra_content",
    "provider_specific_fields",
)
"""Extra fields of a message or a call that the provider expects back in the next request."""


class ChatAdapter(Adapter):
    """Asks a model in the chat completions format."""

    def __init__(
        self,
        model: str,
        provider: Provider,
        *,
        strict: bool,
        output: OutputForm,
        options: Mapping[str, Any] | None,
        media: Iterable[str] = (*IMAGES, *AUDIO, *PDF),
    ) -> None:
        self.model = model
        self._provider = provider
        self._strict = strict
        self._output: OutputForm = output
        self._options = dict(options or {})
        self._media = MediaFilter(media)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.model}>"

    async def complete(self, request: ModelRequest) -> ModelTurn:
        return await self._media.ask(request, self._complete)

    async def _complete(self, request: ModelRequest) -> ModelTurn:
        forms = Forms.of(request, strict=self._strict, output=self._output)
        return await self._provider.answered(self._ask(forms))

    @abstractmethod
    async def _ask(self, forms: Forms) -> ModelTurn:
        """Send one request through the client library."""

    @abstractmethod
    def _decoded(self, answer: Any) -> Any:
        """Return an object of the client library as the JSON it came from."""

    def _with_stream_fields(self, completion: dict[str, Any], chunks: list[Any]) -> dict[str, Any]:
        """Return a streamed answer with fields that only the client library can assemble."""
        return completion

    def _sent(self, forms: Forms, body: Mapping[str, Any]) -> dict[str, Any]:
        timeout = forms.request.timeout
        return {**body, "model": self.model, **({} if timeout is None else {"timeout": timeout})}

    async def _chat(self, forms: Forms, create: Callable[..., Awaitable[Any]]) -> ModelTurn:
        body = self._sent(forms, _chat_body(forms, self._options))
        on_text = forms.request.on_text
        if on_text is None:
            answer = self._decoded(await create(**body))
        else:
            answer = await self._streamed(create, body, on_text)
        with reading():
            return _read_chat(forms, answer)

    async def _streamed(
        self,
        create: Callable[..., Awaitable[Any]],
        body: dict[str, Any],
        on_text: Callable[[str], None],
    ) -> dict[str, Any]:
        stream = await create(**{"stream_options": {"include_usage": True}, **body}, stream=True)
        built, chunks = _StreamedChat(), list[Any]()
        try:
            async for chunk in stream:
                chunks.append(chunk)
                with reading():
                    text = built.add(self._decoded(chunk))
                on_text(text)
        finally:
            await (getattr(stream, "aclose", None) or stream.close)()
        if built.finish_reason is None:
            raise self._provider.unfinished()
        return self._with_stream_fields(built.completion(), chunks)


class OpenAIAdapter(ChatAdapter):
    """Asks a model through the chat completions or the responses API.

    Args:
        model: The model's name on the server.
        api: ``"chat"``, which all servers speak, or ``"responses"``.
        base_url: Another server: Ollama, vLLM, llama.cpp. Default: ``OPENAI_BASE_URL``, or OpenAI.
        api_key: Default: ``OPENAI_API_KEY``; your own server may need none.
        strict: Send schemas in strict mode where they can be expressed in it.
        output: Ask for a structured answer by ``"schema"``, or in the prompt: ``"text"``.
        options: Extra fields of every request, such as ``temperature`` or ``reasoning``.
        media: The media types that the model takes, such as ``"image/*"``; it is told about others
            in words. Default: those of the API, until the server rejects one.
        client: Your own client. It is used as it is, on one event loop, and never closed.
        client_options: Arguments for ``openai.AsyncOpenAI``, such as ``default_headers``.
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
        media: Iterable[str] | None = None,
        client: AsyncOpenAI | None = None,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            with loading():
                import openai
        except ImportError as error:
            raise MissingExtra("openai", "openai") from error
        if api not in ("chat", "responses"):
            raise ValueError(f'api must be "chat" or "responses", got {api!r}')
        key = client.api_key if client is not None else _key(api_key, base_url)
        address = base_url if client is None else str(client.base_url)
        headers = {} if client is None else dict(client.default_headers)
        provider = Provider(
            server_name(address or os.environ.get("OPENAI_BASE_URL"), "OpenAI"),
            model,
            key,
            "api_key=... or OPENAI_API_KEY",
            secrets=[address, headers, options or {}, client_options or {}],
        )
        if media is None:
            media = (*IMAGES, *PDF) if api == "responses" else (*IMAGES, *AUDIO, *PDF)
        super().__init__(
            model, provider, strict=strict, output=output, options=options, media=media
        )
        self._api = api
        self._is_openai = (address or os.environ.get("OPENAI_BASE_URL")) is None
        self._asks_for_reasoning = True
        self._own = None if client is None else client.with_options(max_retries=0)
        arguments: dict[str, Any] = {"base_url": base_url, "api_key": key, **(client_options or {})}
        arguments["max_retries"] = 0  # the run retries: it knows the deadline
        self._clients = PerLoop(lambda: openai.AsyncOpenAI(**arguments), openai.AsyncOpenAI.close)

    async def aclose(self) -> None:
        """Close this event loop's client; when a loop ends, its client is closed anyway."""
        await self._clients.close_here()

    async def __aenter__(self) -> OpenAIAdapter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def context_window(self) -> int | None:
        if self._is_openai:
            return known_window(self.model)
        client = self._own or await self._clients.here()
        try:
            served = (await client.models.list(timeout=_QUICKLY)).data
        except Exception as error:  # most servers do not tell
            _logger.debug("the context window is not known: %s", type(error).__name__)
            return None
        named = [self._decoded(each) for each in served if each.id == self.model]
        return _window_of(named[0]) if named else None

    def price(self) -> TokenPrice | None:
        return known_price(self.model) if self._is_openai else None

    async def _ask(self, forms: Forms) -> ModelTurn:
        client = self._own or await self._clients.here()
        if self._api == "chat":
            return await self._chat(forms, cast("Any", client.chat.completions.create))
        return await self._respond(forms, cast("Any", client.responses.create))

    def _decoded(self, answer: Any) -> Any:
        import openai

        if isinstance(answer, openai.BaseModel):
            return replace_lone_surrogates(answer.to_dict(mode="json", warnings=False))
        return answer

    async def _respond(self, forms: Forms, create: Callable[..., Awaitable[Any]]) -> ModelTurn:
        import openai

        body = self._sent(forms, _responses_body(forms, self._options))
        reasoning = {"include": [*body.get("include", ()), _ENCRYPTED_REASONING]}
        try:
            if self._asks_for_reasoning and not body["store"]:
                data = await self._response(forms, create, body | reasoning)
            else:
                data = await self._response(forms, create, body)
        except openai.BadRequestError as error:
            # The only sign that a model does not reason.
            if not self._asks_for_reasoning or "ncrypted content" not in str(error):
                raise
            self._asks_for_reasoning = False
            data = await self._response(forms, create, body)
        with reading():
            if data.get("status") in {"failed", "cancelled"}:
                failure = data.get("error") or {"message": data["status"]}
                raise self._provider.failed(failure.get("code"), failure.get("message"))
            return _read_response(forms, data)

    async def _response(
        self, forms: Forms, create: Callable[..., Awaitable[Any]], body: dict[str, Any]
    ) -> Any:
        """Return the answer; of a stream, its last event has all of it."""
        on_text = forms.request.on_text
        if on_text is None:
            return self._decoded(await create(**body))
        async with await create(**body, stream=True) as stream:
            async for each in stream:
                with reading():
                    event = self._decoded(each)
                    kind = event.get("type")
                if kind in ("response.output_text.delta", "response.refusal.delta"):
                    on_text(str(event.get("delta")))
                elif kind == "error":
                    raise self._provider.failed(event.get("code"), event.get("message"))
                elif kind in ("response.completed", "response.incomplete", "response.failed"):
                    return event.get("response")
        raise self._provider.unfinished()


_QUICKLY = 5.0
"""Seconds to wait for what is only good to know."""
_WINDOWS = ("max_model_len", "context_length", "context_window", "max_context_length")
"""Fields for the context window in a list of models: vLLM, OpenRouter, Groq, Mistral."""


def _window_of(model: Mapping[str, Any]) -> int | None:
    found = [model.get(name) for name in _WINDOWS]
    found.append((model.get("meta") or _NOTHING).get("n_ctx"))  # llama.cpp
    return next((each for each in found if isinstance(each, int) and each > 0), None)


def _key(given: str | None, base_url: str | None) -> str:
    key = given or os.environ.get("OPENAI_API_KEY")
    if key:
        return key
    if base_url or os.environ.get("OPENAI_BASE_URL"):
        return "none"  # the client requires one
    raise ProviderRejected(
        "There is no key for OpenAI: set OPENAI_API_KEY or give api_key=...; "
        "for your own server give base_url=..."
    )


def server_name(address: str | None, vendor: str) -> str:
    """Return the server's name for messages, without a password in its address."""
    return f"The server at {urlsplit(address).netloc.rpartition('@')[2]}" if address else vendor


@contextmanager
def reading() -> Generator[None]:
    """Raise a ParseError for an answer that does not have the expected structure."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ParseError(f"unexpected structure: {error!r}", {}) from error


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"expected a text, got {value!r}")
    return value or ""


def _turn(
    forms: Forms,
    data: Any,
    calls: tuple[ToolCall, ...],
    text: str,
    *,
    refusal: str,
    reason: str | None,
    tokens: tuple[str, str],
    wire: Any,
    media: tuple[Media, ...] = (),
) -> ModelTurn:
    stop_reason = _STOP_REASONS.get(reason, "tool_use" if calls else "end_turn")
    usage = data.get("usage") or _NOTHING
    read, written = (max(0, usage.get(name) or 0) for name in tokens)
    cached = max(0, (usage.get(f"{tokens[0]}_details") or _NOTHING).get("cached_tokens") or 0)
    return ModelTurn(
        text=refusal or (text if calls else forms.final_text(text)),
        tool_calls=calls,
        stop_reason="refusal" if refusal else stop_reason,
        usage=TokenUsage(input_tokens=read, output_tokens=written, cached_tokens=cached),
        model=_text(data.get("model")),
        wire=wire,
        media=media,
    )


def _made(data: object, media_type: str = "") -> tuple[Media, ...]:
    """Return what a model made, from base64 or a data URL; nothing if it cannot be read."""
    try:
        return (Media(b64decode(str(data).rpartition(",")[2], validate=True), media_type),)
    except ValueError as error:
        _logger.warning("media that the model made is left out: %s", error)
        return ()


# The chat completions format


def _chat_body(forms: Forms, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request; the options may offer tools that the provider runs."""
    system = {"role": "system", "content": forms.system}
    messages = [system, *_chat_messages(forms.request.messages)]
    body = {**options, "messages": replace_lone_surrogates(messages)}
    tools = [*options.get("tools", ()), *map(_chat_function, forms.tools.values())]
    if tools:
        body["tools"] = tools
    if (answer := forms.answer) is not None:
        form = {"name": answer.name, "schema": answer.schema, "strict": answer.is_strict}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


def _chat_function(form: Form) -> dict[str, Any]:
    function = {"name": form.name, "description": form.description, "parameters": form.schema}
    # Some servers do not know the field: only send it when it is true.
    return {"type": "function", "function": function | ({"strict": True} if form.is_strict else {})}


def _chat_messages(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield the messages; media of tools follow their answers, which cannot hold them."""
    returned: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        if returned and message.role != "tool":
            yield {"role": "user", "content": returned}
            returned = []
        yield _chat_message(message)
        if message.role == "tool" and message.media:
            note = f"What {names.get(message.call_id)} returned (call {message.call_id}):"
            returned += [{"type": "text", "text": note}, *map(_chat_part, message.media)]
    if returned:
        yield {"role": "user", "content": returned}


def _chat_part(media: Media) -> dict[str, Any]:
    if media.media_type.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": media.data_url}}
    if media.media_type in AUDIO:
        form = "wav" if media.media_type == "audio/wav" else "mp3"
        return {"type": "input_audio", "input_audio": {"data": media.base64, "format": form}}
    return {"type": "file", "file": _file(media)}


def _file(media: Media) -> dict[str, str]:
    return {"filename": media.name or "file", "file_data": media.data_url}


def _chat_message(message: Message) -> dict[str, Any]:
    if message.role == "user":
        parts = [{"type": "text", "text": message.text}, *map(_chat_part, message.media)]
        return {"role": "user", "content": parts if message.media else message.text}
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.call_id, "content": message.text}
    wire = wire_of(message, "chat") or {"chat": {}, "calls": []}
    made: dict[str, Any] = {"role": "assistant", "content": message.text, **wire["chat"]}
    if message.tool_calls:
        made["content"] = message.text or None
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call)},
                **(wire["calls"][n] if n < len(wire["calls"]) else {}),
            }
            for n, call in enumerate(message.tool_calls)
        ]
    return made


def wire_of(message: Message, api: str) -> dict[str, Any] | None:
    """Return the fields the provider expects back; None for another adapter's message."""
    wire = cast("dict[str, Any]", message.wire)
    return wire if isinstance(message.wire, Mapping) and api in wire else None


def _read_chat(forms: Forms, data: Any) -> ModelTurn:
    choice = data["choices"][0]
    message = choice["message"]
    made = message.get("tool_calls") or ()
    extra, call_extras = _returned(message), [_returned(call) for call in made]
    media = [
        item for each in message.get("images") or () for item in _made(each["image_url"]["url"])
    ]
    audio = message.get("audio") or _NOTHING
    if audio.get("data"):
        media += _made(audio["data"])
        extra["audio"] = {"id": audio["id"]}
    return _turn(
        forms,
        data,
        tuple(_read_call(forms, each["function"], each.get("id")) for each in made),
        _text(message.get("content")) or _text(audio.get("transcript")),
        refusal=_text(message.get("refusal")),
        reason=choice.get("finish_reason"),
        tokens=("prompt_tokens", "completion_tokens"),
        wire={"chat": extra, "calls": call_extras} if extra or any(call_extras) else None,
        media=tuple(media),
    )


def _read_call(forms: Forms, function: Any, call_id: str | None) -> ToolCall:
    name = function["name"]
    if name is None:
        raise TypeError("a call has no function name")
    return forms.call(_text(name), function.get("arguments"), call_id)


def _returned(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in RETURNED_FIELDS if _has_content(given.get(name))}


def _has_content(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_content, cast("Mapping[str, Any]", value).values()))
    return bool(value)


class _StreamedChat:
    """Builds a chat completion from the chunks of its stream."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._message: dict[str, Any] = {}
        self._calls: list[dict[str, Any]] = []
        self._about: dict[str, Any] = {}

    def add(self, chunk: Any) -> str:
        """Add a chunk and return its text."""
        self._about |= {name: chunk[name] for name in ("model", "usage") if chunk.get(name)}
        if not chunk.get("choices"):  # usage only
            return ""
        choice = chunk["choices"][0]
        # Some servers send an empty reason with every chunk.
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or _NOTHING
        _append(self._message, delta, ("content", "refusal", "images", *RETURNED_FIELDS))
        for each in delta.get("tool_calls") or ():
            self._add_call(each)
        return _text(delta.get("content")) or _text(delta.get("refusal"))

    def _add_call(self, piece: Any) -> None:
        index, call_id = piece.get("index"), piece.get("id")
        same = [call for call in self._calls if call["index"] == index]
        # Some servers send no index, or the same one for every call: then a new id starts a call.
        if not same or (call_id and call_id != same[-1]["id"]):
            function = {"name": "", "arguments": ""}
            same = [{"index": index, "id": call_id, "function": function}]
            self._calls += same
        _append(same[-1], piece, RETURNED_FIELDS)
        function, given = same[-1]["function"], piece.get("function") or _NOTHING
        function["name"] = function["name"] or _text(given.get("name"))
        arguments = given.get("arguments") or ""
        function["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments)

    def completion(self) -> dict[str, Any]:
        message = {**self._message, "tool_calls": self._calls}
        choice = {"message": message, "finish_reason": self.finish_reason}
        return {**self._about, "choices": [choice]}


def _append(whole: dict[str, Any], piece: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Add fields of a chunk: texts and lists are concatenated, anything else is replaced."""
    for name in names:
        old, new = whole.get(name), piece.get(name)
        if isinstance(old, str | list) and type(new) is type(cast("object", old)):
            whole[name] = cast("Any", old) + new
        elif new is not None:
            whole[name] = new


# The format of the responses API


def _responses_body(forms: Forms, options: Mapping[str, Any]) -> dict[str, Any]:
    items = [item for message in forms.request.messages for item in _items(message)]
    body = {"store": False, **options}
    body |= {"instructions": forms.system, "input": replace_lone_surrogates(items)}
    tools = [*options.get("tools", ()), *map(_function, forms.tools.values())]
    if tools:
        body["tools"] = tools
    if (answer := forms.answer) is not None:
        form = {"name": answer.name, "schema": answer.schema, "strict": answer.is_strict}
        body["text"] = {**options.get("text", {}), "format": {"type": "json_schema", **form}}
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
    parts = [{"type": "input_text", "text": message.text}, *map(_input_part, message.media)]
    content = parts if message.media else message.text
    if message.role == "user":
        yield {"role": "user", "content": content}
    elif message.role == "tool":
        yield {"type": "function_call_output", "call_id": message.call_id, "output": content}
    elif (wire := wire_of(message, "responses")) is not None:
        # The original items, reasoning included; calls under our ids.
        calls, pictures = iter(message.tool_calls), iter(message.media)
        for item in wire["responses"]:
            if item["type"] == "function_call":
                item = {**item, **_call(next(calls))}
            elif item.get("result") == _IN_MEDIA:
                if (picture := next(pictures, None)) is None:
                    continue
                item = {**item, "result": picture.base64}
            yield item
    else:
        if message.text or not message.tool_calls:
            yield {"role": "assistant", "content": message.text}
        yield from map(_call, message.tool_calls)


def _input_part(media: Media) -> dict[str, Any]:
    if media.media_type.startswith("image/"):
        return {"type": "input_image", "image_url": media.data_url, "detail": "auto"}
    return {"type": "input_file", **_file(media)}


_IN_MEDIA = "in media"
"""Replaces the picture in an item, so that it is not saved twice."""


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = arguments_of(call)
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments}


def _read_response(forms: Forms, data: Any) -> ModelTurn:
    items = [item for item in data["output"] if "type" in item]
    calls = [item for item in items if item["type"] == "function_call"]
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    media: list[Media] = []
    for item in items:
        if item["type"] == "image_generation_call" and item.get("result"):
            made = _made(item["result"])
            media += made
            item["result"] = _IN_MEDIA if made else item["result"]
    return _turn(
        forms,
        data,
        tuple(_read_call(forms, each, each.get("call_id")) for each in calls),
        "".join(_text(part.get("text")) for part in parts),
        refusal="".join(_text(part.get("refusal")) for part in parts),
        reason=(data.get("incomplete_details") or _NOTHING).get("reason"),
        tokens=("input_tokens", "output_tokens"),
        wire={"responses": items},
        media=tuple(media),
    )


# Clients

_Open: TypeAlias = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[T, None]]]


class PerLoop(Generic[T]):
    """One object for each event loop; closed when the loop ends, or when this is dropped."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[object]]) -> None:
        self._make = make
        self._close = close
        self._lock = threading.Lock()
        self._open: _Open[T] = WeakKeyDictionary()
        # The finalizer keeps the objects alive until their sockets are closed.
        finalize(self, _close_all, self._open).atexit = False

    async def here(self) -> T:
        loop = asyncio.get_running_loop()
        found = self._open.get(loop)
        if found is None:
            keeper = _open_until_the_loop_ends(self._make(), self._close)
            found = await anext(keeper), keeper
            with self._lock:
                for ended in [each for each in self._open if each.is_closed()]:
                    del self._open[ended]
                self._open[loop] = found
        return found[0]

    async def close_here(self) -> None:
        """Close the running loop's object, if there is one."""
        found = self._open.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].aclose()


async def _open_until_the_loop_ends(
    made: T, close: Callable[[T], Awaitable[object]]
) -> AsyncGenerator[T, None]:
    """Yield an object and close it at the end: a loop that ends closes its open generators."""
    try:
        yield made
    finally:
        await close(made)


def _close_all(open_in: _Open[T]) -> None:
    for loop, (_, keeper) in list(open_in.items()):
        with suppress(RuntimeError):  # the loop has ended, and closed it
            loop.call_soon_threadsafe(lambda k=keeper, on=loop: on.create_task(_finish(k)))


async def _finish(keeper: AsyncGenerator[T, None]) -> None:
    await keeper.aclose()
