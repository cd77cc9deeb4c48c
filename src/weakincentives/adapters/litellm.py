"""Any provider that LiteLLM knows, over LiteLLM itself."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.failures import Provider
from weakincentives.adapters.openai import WANTED_BACK, PerLoop, chat_body, chat_turn
from weakincentives.adapters.schema import Forms, OutputForm, in_whole_characters
from weakincentives.errors import MissingExtra, ProviderRejected
from weakincentives.runtime.conversation import ModelRequest, ModelTurn


class LiteLLMAdapter(Adapter):
    """Asks a model of any provider that LiteLLM knows.

    Args:
        model: Provider and name, such as ``"anthropic/claude-sonnet-4-5"``.
        base_url: Another address for it.
        api_key: Else the environment variable that LiteLLM takes for the provider.
        strict: Whether schemas go out in strict mode, where they can be said in it.
        output: How a structured answer is asked for: by ``"schema"``, or in words, ``"text"``.
        options: More arguments of every request, such as ``temperature`` or ``drop_params``.
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
    ) -> None:
        self.model = model
        self._litellm = _litellm()
        if api_key is None:
            api_key = _stand_in(self._litellm, model, base_url)
        self._strict = strict
        self._output: OutputForm = output
        self._options = dict(options or {})
        self._provider = Provider(
            "LiteLLM",
            model,
            api_key,
            "api_key=... or the provider's environment variable",
            secrets=[base_url, self._options, _own_keys(self._litellm)],
        )
        # Ours is the one place that asks again: it knows the deadline.
        self._to_send = {"model": model, "num_retries": 0, "max_retries": 0}
        given = {"api_base": base_url, "api_key": api_key}
        self._to_send |= {name: value for name, value in given.items() if value is not None}
        if find_spec("mcp") is None:
            self._to_send["_skip_mcp_handler"] = True  # else it wants that package for any tool

    async def complete(self, request: ModelRequest) -> ModelTurn:
        await _clients.here()
        forms = Forms.of(request, strict=self._strict, output=self._output)
        return await self._provider.answered(self._ask(forms))

    async def _ask(self, forms: Forms) -> ModelTurn:
        body = {**chat_body(forms, self._options), **self._to_send}
        for name in ("tools", "response_format"):  # some of its providers change them in place
            if name in body:
                body[name] = copy.deepcopy(body[name])
        if forms.request.timeout is not None:
            body["timeout"] = forms.request.timeout
        create = self._litellm.acompletion
        return await chat_turn(self._provider, forms, create, body, _plain, self._completed)

    def _completed(self, whole: dict[str, Any], chunks: list[Any]) -> dict[str, Any]:
        if chunks:
            # How the rest of a message comes in pieces depends on the provider: LiteLLM knows.
            built = _plain(self._litellm.stream_chunk_builder(chunks))["choices"][0]["message"]
            rest = {name: built.get(name) for name in WANTED_BACK}
            whole["choices"][0]["message"].update(rest)
        return _with_refusal(whole)


def _plain(answer: Any) -> dict[str, Any]:
    return in_whole_characters(answer.model_dump(mode="json", warnings=False))


def _with_refusal(data: dict[str, Any]) -> dict[str, Any]:
    """Put a refusal where OpenAI has it; LiteLLM moves it."""
    for choice in data.get("choices") or ():
        beside: dict[str, Any] = choice["message"].get("provider_specific_fields") or {}
        if beside.get("refusal"):
            choice["message"]["refusal"] = beside.pop("refusal")
    return data


def _litellm() -> Any:
    if "litellm" not in sys.modules:
        # Else it fetches a list of prices over the network when it is imported.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        litellm: Any = import_module("litellm")
    except ImportError as error:
        raise MissingExtra("litellm", "litellm") from error
    litellm.suppress_debug_info = True  # it would print to standard output with every failure
    return litellm


def _own_keys(litellm: Any) -> dict[str, Any]:
    """Return the keys that were given to LiteLLM itself: `litellm.openai_key = ...`."""
    kept = cast("dict[str, Any]", vars(litellm))
    return {name: value for name, value in kept.items() if name.endswith("_key")}


def _stand_in(litellm: Any, model: str, base_url: str | None) -> str | None:
    """Return a key for a server that needs none; refuse a model whose key is not there.

    LiteLLM takes some of those for a server that failed. Clouds are left alone: they have other
    ways to say who asks.
    """
    missing: list[str] = litellm.validate_environment(model)["missing_keys"]
    is_one_key = len(missing) == 1 and missing[0].endswith("_API_KEY")
    if not is_one_key or missing[0].startswith("AZURE") or litellm.api_key is not None:
        return None
    if base_url is not None:
        return "none"
    raise ProviderRejected(
        f"There is no key for {model!r}: set {missing[0]} or give api_key=...; "
        "for a server of your own give base_url=..."
    )


async def _close_clients(loop: asyncio.AbstractEventLoop) -> None:
    """Close the clients that LiteLLM keeps for a loop, and make it forget them.

    It knows a loop by its id only, and would give them to the next one of the same id.
    """
    kept: dict[str, Any] = import_module("litellm").in_memory_llm_clients_cache.cache_dict
    for key in [key for key in list(kept) if key.endswith(f"-{id(loop)}")]:
        client = kept.pop(key, None)  # its other loops may drop some of them meanwhile
        closing = None if client is None else client.close()
        if inspect.isawaitable(closing):
            await closing


# All adapters share what LiteLLM keeps, so it is closed with the loop and never before.
_clients = PerLoop(asyncio.get_running_loop, _close_clients)
