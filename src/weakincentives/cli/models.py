"""Model names, such as `openai:NAME`, and the adapters they stand for."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weakincentives.cli.common import Misuse, hint
from weakincentives.errors import MissingExtra, ProviderRejected, ProviderUnavailable

if TYPE_CHECKING:
    from weakincentives.adapters import Adapter

_CLAUDE_KEYS = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
)


@dataclass(frozen=True, slots=True)
class Provider:
    """A kind of model."""

    form: str
    """How its name is written."""
    extra: str
    """The extra that must be installed."""
    variables: tuple[str, ...] = ()
    """One of these must be set."""

    @property
    def needs_name(self) -> bool:
        return "[" not in self.form


_OPENAI = ("OPENAI_API_KEY", "OPENAI_BASE_URL")
PROVIDERS = {
    "openai": Provider("openai:NAME", "openai", _OPENAI),
    "openai-responses": Provider("openai-responses:NAME", "openai", _OPENAI),
    "litellm": Provider("litellm:PROVIDER/NAME", "litellm"),
    "claude": Provider("claude[:NAME]", "claude-agent-sdk", _CLAUDE_KEYS[:2]),
    "local": Provider("local[:FILE.gguf]", "local"),
    "scripted": Provider("scripted:FILE", "cli"),
}


@contextmanager
def open_model(name: str | None, *, turns: int = 0) -> Generator[Adapter]:
    """Yield the adapter for a model; raise Misuse if the model cannot be used.

    ``turns`` is the number of turns in a run that is resumed: a script continues after them.
    """
    forms = ", ".join(provider.form for provider in PROVIDERS.values())
    if name is None:
        raise Misuse(
            f"no model: give --model, set WINK_MODEL, or put model = ... into wink.toml: {forms}"
        )
    kind, _, rest = name.partition(":")
    provider = PROVIDERS.get(kind)
    if provider is None:
        near = hint(kind, PROVIDERS)
        raise Misuse(f"unknown model {name!r}; {near or f'use one of {forms}'}")
    if provider.needs_name and not rest:
        raise Misuse(f"incomplete model name {name!r}; write {provider.form}")
    with ExitStack() as stack:
        try:
            adapter = _adapter(kind, rest, turns, stack)
        except (MissingExtra, ProviderRejected, ProviderUnavailable) as error:
            # The rest is advice for programs.
            problem = str(error).partition(" or give api_key=")[0]
            raise Misuse(f"cannot use the model {name!r}: {problem}") from error
        yield adapter


def _adapter(kind: str, name: str, turns: int, stack: ExitStack) -> Adapter:
    from weakincentives import adapters

    match kind:
        case "openai":
            return adapters.OpenAIAdapter(name)
        case "openai-responses":
            return adapters.OpenAIAdapter(name, api="responses")
        case "litellm":
            return adapters.LiteLLMAdapter(name)
        case "claude":
            if find_spec("claude_agent_sdk") is None:
                raise MissingExtra("claude-agent-sdk", "claude-agent-sdk")
            if not any(os.environ.get(key) for key in _CLAUDE_KEYS):
                raise ProviderRejected("There is no key for Claude: set ANTHROPIC_API_KEY")
            return adapters.ClaudeAgentSDKAdapter(model=name or None)
        case "local":
            served = stack.enter_context(adapters.LocalModel(_path_of(name)))
            # Small models repeat themselves endlessly without a penalty.
            return adapters.LocalAdapter(served, options={"frequency_penalty": 0.4})
        case _:
            return _scripted(name, turns)


def _scripted(name: str, turns: int = 0) -> Adapter:
    from weakincentives.adapters import ScriptedAdapter

    try:
        return ScriptedAdapter.from_file(Path(name).expanduser(), skip=turns)
    except OSError as error:
        raise Misuse(f"cannot read the script {name}: {error.strerror}") from error
    except ValueError as error:
        raise Misuse(f"the script {name} is invalid: {error}") from error


def problem_with_file(name: str) -> str:
    """Return why a model that is a file cannot be used; empty for all others."""
    kind, _, rest = name.partition(":")
    try:
        if kind == "local":
            from weakincentives.adapters import LocalModel

            LocalModel(_path_of(rest))
        elif kind == "scripted":
            _scripted(rest)
    except (MissingExtra, ProviderRejected, Misuse) as error:
        return str(error)
    return ""


def _path_of(name: str) -> Path | None:
    return Path(name).expanduser() if name else None


def cost_of(name: str | None, input_tokens: int, output_tokens: int) -> float | None:
    """Return what tokens cost in US dollars; None if the price is unknown."""
    kind, _, rest = (name or "").partition(":")
    if kind != "litellm":
        return None
    litellm: Any = import_module("litellm")
    tokens = {"prompt_tokens": input_tokens, "completion_tokens": output_tokens}
    try:
        return sum(litellm.cost_per_token(model=rest, **tokens)) or None
    except Exception:  # it knows the prices of some models only
        return None
