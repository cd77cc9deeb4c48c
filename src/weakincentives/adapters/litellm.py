"""Any provider that LiteLLM knows, through LiteLLM itself."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from weakincentives.adapters.catalog import price_in, window_in
from weakincentives.adapters.failures import Provider
from weakincentives.adapters.media import AUDIO, IMAGES, PDF
from weakincentives.adapters.openai import RETURNED_FIELDS, ChatAdapter, PerLoop
from weakincentives.adapters.schema import Forms, OutputForm, replace_lone_surrogates
from weakincentives.core.budget import TokenPrice
from weakincentives.core.programs import loading
from weakincentives.errors import MissingExtra, ProviderRejected
from weakincentives.runtime.conversation import ModelTurn


class LiteLLMAdapter(ChatAdapter):
    """Asks a model of any provider that LiteLLM knows.

    Args:
        model: Provider and name, such as ``"anthropic/claude-sonnet-4-5"``.
        base_url: Another address for it.
        api_key: Default: the environment variable that LiteLLM reads for the provider.
        strict: Send schemas in strict mode where they can be expressed in it.
        output: Ask for a structured answer by ``"schema"``, or in the prompt: ``"text"``.
        options: Extra arguments of every request, such as ``temperature`` or ``drop_params``.
        media: The media types that the model takes, such as ``"image/*"``; it is told about others
            in words. Default: what LiteLLM says of the model.
    """

    name = "litellm"

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        strict: bool = True,
        output: OutputForm = "schema",
        options: Mapping[str, Any] | None = None,
        media: Iterable[str] | None = None,
    ) -> None:
        self._litellm = _litellm()
        if api_key is None:
            api_key = _placeholder_key(self._litellm, model, base_url)
        settings = cast("dict[str, Any]", vars(self._litellm))
        keys = {name: value for name, value in settings.items() if name.endswith("_key")}
        provider = Provider(
            "LiteLLM",
            model,
            api_key,
            "api_key=... or the provider's environment variable",
            secrets=[base_url, options or {}, keys],
        )
        self.model = model
        media = self._taken() if media is None else media
        super().__init__(
            model, provider, strict=strict, output=output, options=options, media=media
        )
        # The run retries: it knows the deadline.
        self._arguments: dict[str, Any] = {"num_retries": 0, "max_retries": 0}
        given = {"api_base": base_url, "api_key": api_key}
        self._arguments |= {name: value for name, value in given.items() if value is not None}
        if find_spec("mcp") is None:
            self._arguments["_skip_mcp_handler"] = True  # otherwise every tool needs that package

    async def context_window(self) -> int | None:
        return window_in(self._info())

    def price(self) -> TokenPrice | None:
        return price_in(self._info())

    def _info(self) -> Mapping[str, Any]:
        try:
            return self._litellm.get_model_info(self.model)
        except Exception:  # of no documented type: LiteLLM does not know the model
            return {}

    def _taken(self) -> tuple[str, ...]:
        """Return the media types that the model takes; all that the format has if it is unknown."""
        if not (known := self._info()):
            return (*IMAGES, *AUDIO, *PDF)
        kinds = {"vision": IMAGES, "audio_input": AUDIO, "pdf_input": PDF}
        taken = [found for name, found in kinds.items() if known.get(f"supports_{name}")]
        return tuple(kind for found in taken for kind in found)

    async def _ask(self, forms: Forms) -> ModelTurn:
        await _clients.here()
        return await self._chat(forms, self._create)

    async def _create(self, **body: Any) -> Any:
        for name in ("tools", "response_format"):  # some of its providers change them in place
            if name in body:
                body[name] = copy.deepcopy(body[name])
        return await self._litellm.acompletion(**{**body, **self._arguments})

    def _decoded(self, answer: Any) -> dict[str, Any]:
        data: Any = replace_lone_surrogates(answer.model_dump(mode="json", warnings=False))
        for choice in data.get("choices") or ():  # LiteLLM moves a refusal
            message: dict[str, Any] = choice.get("message") or {}
            extra: dict[str, Any] = message.get("provider_specific_fields") or {}
            if extra.get("refusal"):
                message["refusal"] = extra.pop("refusal")
        return data

    def _with_stream_fields(self, completion: dict[str, Any], chunks: list[Any]) -> dict[str, Any]:
        # How the other fields are streamed depends on the provider: LiteLLM knows.
        whole = self._decoded(self._litellm.stream_chunk_builder(chunks))
        built = whole["choices"][0]["message"]
        completion["choices"][0]["message"].update(
            {name: built.get(name) for name in RETURNED_FIELDS}
        )
        return completion


def _litellm() -> Any:
    if "litellm" not in sys.modules:
        # Otherwise its import fetches a price list from the network.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        # And it loads variables from the .env of a project, which agents write: where to send keys.
        os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    try:
        with loading():
            litellm: Any = import_module("litellm")
    except ImportError as error:
        raise MissingExtra("litellm", "litellm") from error
    litellm.suppress_debug_info = True  # otherwise it prints every failure
    return litellm


def _placeholder_key(litellm: Any, model: str, base_url: str | None) -> str | None:
    """Return a key for a server that needs none; refuse a model whose key is missing.

    LiteLLM reports some missing keys as a server failure. Clouds have other ways to authenticate.
    """
    missing: list[str] = litellm.validate_environment(model)["missing_keys"]
    is_one_key = len(missing) == 1 and missing[0].endswith("_API_KEY")
    if not is_one_key or missing[0].startswith("AZURE") or litellm.api_key is not None:
        return None
    if base_url is not None:
        return "none"
    raise ProviderRejected(
        f"There is no key for {model!r}: set {missing[0]} or give api_key=...; "
        "for your own server give base_url=..."
    )


async def _close_clients(loop: asyncio.AbstractEventLoop) -> None:
    """Close the clients that LiteLLM caches for a loop, and drop them from its cache.

    Its cache key is the id of the loop, which the next loop may have as well.
    """
    cached: dict[str, Any] = import_module("litellm").in_memory_llm_clients_cache.cache_dict
    for key in [key for key in list(cached) if key.endswith(f"-{id(loop)}")]:
        client = cached.pop(key, None)  # other threads may evict some meanwhile
        closing = None if client is None else client.close()
        if inspect.isawaitable(closing):
            await closing


# All adapters share LiteLLM's cache, so its clients are closed when the loop ends, not before.
_clients = PerLoop(asyncio.get_running_loop, _close_clients)
