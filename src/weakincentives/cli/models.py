"""From the name of a model to the adapter that asks it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from weakincentives.cli.common import Misuse
from weakincentives.errors import MissingExtra, ProviderRejected, ProviderUnavailable

if TYPE_CHECKING:
    from weakincentives.adapters import Adapter
    from weakincentives.budget import TokenUsage

Price: TypeAlias = Callable[["TokenUsage"], "float | None"]
"""What so many tokens cost, in US dollars; None where that is not known."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that can be asked."""

    adapter: Adapter
    price: Price | None


@dataclass(frozen=True, slots=True)
class Provider:
    """A kind of model: how it is written, what it needs, and who makes its adapter."""

    form: str
    open: Callable[[str, int, ExitStack], Adapter]
    """Of the rest of the name, how many turns the model had before, and what is closed at the
    end."""
    extra: str
    """What must be installed."""
    variables: tuple[str, ...] = ()
    """One of these must be set."""
    needs_name: bool = True


@contextmanager
def open_model(name: str | None, *, turns: int = 0) -> Generator[OpenedModel]:
    """Yield the model of this name; what is wrong with it, or missing for it, raises Misuse.

    ``turns`` is how many the model had in a run that is resumed: a script goes on after them.
    """
    forms = ", ".join(provider.form for provider in PROVIDERS.values())
    if name is None:
        raise Misuse(
            f"which model? Give --model, set WINK_MODEL, or put model = ... into wink.toml: {forms}"
        )
    kind, _, rest = name.partition(":")
    provider = PROVIDERS.get(kind)
    if provider is None:
        near = get_close_matches(kind, PROVIDERS, n=1)
        known = f"did you mean {PROVIDERS[near[0]].form}?" if near else f"there are {forms}"
        raise Misuse(f"there is no model {name!r}; {known}")
    if provider.needs_name and not rest:
        raise Misuse(f"the model {name!r} lacks a part; write {provider.form}")
    with ExitStack() as stack:
        try:
            adapter = provider.open(rest, turns, stack)
        except (MissingExtra, ProviderRejected, ProviderUnavailable) as error:
            # What a program can do besides is nothing that can be done here.
            problem = str(error).partition(" or give api_key=")[0]
            raise Misuse(f"the model {name!r} cannot be used: {problem}") from error
        yield OpenedModel(adapter, _price_of(rest) if kind == "litellm" else None)


def problem_with_file(name: str) -> str:
    """Return why a model that is a file cannot be used; empty for all others. Starts nothing."""
    kind, _, rest = name.partition(":")
    try:
        if kind == "local":
            from weakincentives.adapters import LocalModel

            LocalModel(_path_of(rest))
        elif kind == "scripted":
            _scripted(rest, 0, ExitStack())
    except (MissingExtra, ProviderRejected, Misuse) as error:
        return str(error)
    return ""


def _path_of(name: str) -> Path | None:
    return Path(name).expanduser() if name else None


def _price_of(model: str) -> Price:
    def price(usage: TokenUsage) -> float | None:
        litellm: Any = import_module("litellm")
        tokens = {"prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens}
        try:
            return sum(litellm.cost_per_token(model=model, **tokens)) or None
        except Exception:  # it knows prices of some models; which ones, only trying tells
            return None

    return price


# The providers


def _openai(name: str, turns: int, stack: ExitStack) -> Adapter:
    from weakincentives.adapters import OpenAIAdapter

    return OpenAIAdapter(name)


def _openai_responses(name: str, turns: int, stack: ExitStack) -> Adapter:
    from weakincentives.adapters import OpenAIAdapter

    return OpenAIAdapter(name, api="responses")


def _litellm(name: str, turns: int, stack: ExitStack) -> Adapter:
    from weakincentives.adapters import LiteLLMAdapter

    return LiteLLMAdapter(name)


_CLAUDE_KEYS = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
)


def _claude(name: str, turns: int, stack: ExitStack) -> Adapter:
    from weakincentives.adapters import ClaudeAgentSDKAdapter

    if find_spec("claude_agent_sdk") is None:
        raise MissingExtra("claude-agent-sdk", "claude-agent-sdk")
    if not any(os.environ.get(key) for key in _CLAUDE_KEYS):
        raise ProviderRejected("There is no key for Claude: set ANTHROPIC_API_KEY")
    return ClaudeAgentSDKAdapter(model=name or None)


def _local(name: str, turns: int, stack: ExitStack) -> Adapter:
    from weakincentives.adapters import LocalAdapter, LocalModel

    served = stack.enter_context(LocalModel(_path_of(name)))
    # Small models repeat themselves without end when nothing keeps them from it.
    return LocalAdapter(served, options={"frequency_penalty": 0.4})


def _scripted(name: str, turns: int, stack: ExitStack) -> Adapter:
    from weakincentives.adapters import ScriptedAdapter

    try:
        return ScriptedAdapter.from_file(Path(name).expanduser(), skip=turns)
    except FileNotFoundError:
        raise Misuse(f"there is no script {name}; write scripted:FILE") from None
    except OSError as error:
        raise Misuse(f"the script {name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Misuse(f"the script {name} is wrong: {error}") from error


_OPENAI = ("OPENAI_API_KEY", "OPENAI_BASE_URL")

PROVIDERS = {
    "openai": Provider("openai:NAME", _openai, "openai", _OPENAI),
    "openai-responses": Provider("openai-responses:NAME", _openai_responses, "openai", _OPENAI),
    "litellm": Provider("litellm:PROVIDER/NAME", _litellm, "litellm"),
    "claude": Provider(
        "claude[:NAME]", _claude, "claude-agent-sdk", _CLAUDE_KEYS[:2], needs_name=False
    ),
    "local": Provider("local[:FILE.gguf]", _local, "local", needs_name=False),
    "scripted": Provider("scripted:FILE", _scripted, "cli"),
}
"""Every kind of model, by the first part of its name."""
