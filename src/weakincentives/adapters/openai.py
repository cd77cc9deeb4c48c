"""OpenAI's models, and every server that speaks the same format, over OpenAI's own client."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.chat_format import ChatPieces, chat_body, read_chat
from weakincentives.adapters.failures import Provider
from weakincentives.adapters.forms import Forms, OutputForm, in_whole_characters
from weakincentives.adapters.per_loop import PerLoop
from weakincentives.adapters.responses_format import (
    Failure,
    ResponseEvent,
    read_response,
    responses_body,
)
from weakincentives.errors import MissingExtra, ProviderRejected
from weakincentives.runtime.conversation import ModelRequest, ModelTurn
from weakincentives.serde import parse

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["OpenAIAdapter"]

_ENCRYPTED = "reasoning.encrypted_content"
_TEXT_EVENTS = frozenset({"response.output_text.delta", "response.refusal.delta"})
_LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})


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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    # Chat completions

    async def _chat(self, client: AsyncOpenAI, forms: Forms) -> ModelTurn:
        body = chat_body(forms, self._options) | self._to_send(forms)
        create = cast("Any", client.chat.completions.create)
        on_text = forms.request.on_text
        if on_text is None:
            return read_chat(forms, _plain(await create(**body)))
        counted = {"stream_options": {"include_usage": True}, **body}
        pieces = ChatPieces()
        async with await create(**counted, stream=True) as stream:
            async for chunk in stream:
                on_text(pieces.add(_plain(chunk)))
        if not pieces.is_finished:
            raise self._provider.unfinished()
        return read_chat(forms, pieces.completion())

    def _to_send(self, forms: Forms) -> dict[str, Any]:
        timeout = forms.request.timeout
        return {"model": self.model, **({} if timeout is None else {"timeout": timeout})}

    # Responses

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
        body = responses_body(forms, self._options) | self._to_send(forms)
        if self._asks_for_reasoning and not body["store"]:
            body["include"] = [*body.get("include", ()), _ENCRYPTED]
        create = cast("Any", client.responses.create)
        if forms.request.on_text is None:
            data = _plain(await create(**body))
        else:
            data = await self._streamed(await create(**body, stream=True), forms.request.on_text)
        answer = read_response(forms, data)
        if isinstance(answer, Failure):
            raise self._failed(answer)
        return answer

    async def _streamed(self, stream: Any, on_text: Callable[[str], None]) -> object:
        """Pass text on as it comes; return the whole answer, which stands in the last event."""
        whole: object = None
        async with stream:
            async for each in stream:
                event = parse(ResponseEvent, _plain(each), extra="ignore")
                if event.type in _TEXT_EVENTS:
                    on_text(str(event.delta))
                elif event.type == "error":
                    raise self._failed(event)
                elif event.type in _LAST_EVENTS:
                    whole = event.response
        if whole is None:
            raise self._provider.unfinished()
        return whole

    def _failed(self, failure: Failure) -> Exception:
        return self._provider.failed(failure.code, failure.message or "")


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
