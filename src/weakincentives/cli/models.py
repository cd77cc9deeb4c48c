"""Model names, such as `openai:NAME`, and the adapters they stand for."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from weakincentives.cli.common import Misuse, hint
from weakincentives.errors import MissingExtra, ProviderRejected, ProviderUnavailable

if TYPE_CHECKING:
    from weakincentives.adapters import Adapter, LocalModel
    from weakincentives.cli.config import Settings
    from weakincentives.core.budget import Budget, BudgetTracker, TokenPrice
    from weakincentives.runtime import Session

_CLAUDE_KEYS = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
)


class _Asked(NamedTuple):
    """A model to open."""

    name: str
    """What follows the provider and the colon."""
    options: dict[str, Any]
    """Parameters of its requests."""
    turns: int
    """The turns that a resumed run already has."""
    stack: ExitStack
    """Closes what the adapter needs, at the end of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A kind of model."""

    form: str
    """How its name is written."""
    extra: str
    """The extra that must be installed."""
    open: Callable[[_Asked], Adapter]
    """Returns the adapter."""
    variables: tuple[str, ...] = ()
    """One of these must be set."""
    if_unset: Literal["error", "warning"] = "error"
    """How `wink doctor` calls it if none is: the program may be logged in without a variable."""
    has_temperature: bool = True
    """Whether its requests can have one."""
    has_own_tools: bool = False
    """Whether the provider's program brings tools, which reach the directory itself."""
    find: Callable[[str], object] | None = None
    """For a model that is a file: raises if the file cannot be used."""

    @property
    def needs_name(self) -> bool:
        return "[" not in self.form


@contextmanager
def open_model(
    name: str | None, *, turns: int = 0, temperature: float | None = None
) -> Generator[Adapter]:
    """Yield the adapter for a model; raise Misuse if the model cannot be used.

    ``turns`` is the number of turns in a run that is resumed: a script continues after them.
    """
    kind, rest = check_model(name, temperature=temperature)
    options = {} if temperature is None else {"temperature": temperature}
    with ExitStack() as stack:
        try:
            adapter = PROVIDERS[kind].open(_Asked(rest, options, turns, stack))
        except (MissingExtra, ProviderRejected, ProviderUnavailable) as error:
            # The rest is advice for programs.
            problem = str(error).partition(" or give api_key=")[0]
            raise Misuse(f"cannot use the model {name!r}: {problem}") from error
        yield adapter


def check_model(name: str | None, *, temperature: float | None = None) -> tuple[str, str]:
    """Return the kind of a model and the rest of its name; raise Misuse if it can be no model."""
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
    if temperature is not None and not provider.has_temperature:
        raise Misuse(f"{kind} takes no temperature; leave it out, or use another model")
    return kind, rest


def problem_with_file(name: str) -> str:
    """Return why a model that is a file cannot be used; empty for all others."""
    kind, _, rest = name.partition(":")
    provider = PROVIDERS.get(kind)
    try:
        if provider is not None and provider.find is not None:
            provider.find(rest)
    except (MissingExtra, ProviderRejected, Misuse) as error:
        return str(error)
    return ""


def has_own_tools(name: str | None) -> bool:
    """Whether the provider of a model brings tools, which reach the directory itself."""
    provider = PROVIDERS.get((name or "").partition(":")[0])
    return provider is not None and provider.has_own_tools


def budget_of(settings: Settings, adapter: Adapter) -> Budget | None:
    """Return the limits of a run; raise Misuse if a limit in money could not be checked."""
    from weakincentives.core.budget import Budget

    if settings.max_tokens is None and settings.max_cost is None:
        return None
    price = price_of(settings, adapter)
    if price is None and settings.max_cost is not None:
        raise Misuse(
            f"max_cost cannot be checked: the price of {settings.model} is unknown; give --price "
            "INPUT/OUTPUT, in dollars per million tokens"
        )
    return Budget(max_total_tokens=settings.max_tokens, max_cost_usd=settings.max_cost, price=price)


def tracker_of(settings: Settings, adapter: Adapter, session: Session) -> BudgetTracker | None:
    """Return what checks the limits. Money counts from the start of the run, resumed or not."""
    from weakincentives.adapters import ContextCompacted, Message
    from weakincentives.core.budget import BudgetTracker

    budget = budget_of(settings, adapter)
    if budget is None:
        return None
    usages = [each.usage for each in session[Message] if not each.depth]
    usages += [each.usage for each in session[ContextCompacted]]
    price = budget.price
    spent = 0.0 if price is None else sum(price.of(usage) for usage in usages if usage is not None)
    return BudgetTracker(budget, spent_usd=spent)


def price_of(settings: Settings, adapter: Adapter) -> TokenPrice | None:
    """Return the price of the model, or the one that is set if it is unknown.

    In this order: the file of a directory must not make a model look cheap.
    """
    from weakincentives.core.budget import TokenPrice

    known = adapter.price()
    if known is not None or settings.price is None:
        return known
    read, written = settings.price.split("/")
    return TokenPrice(input=float(read), output=float(written))


# The providers


def _openai(asked: _Asked) -> Adapter:
    from weakincentives.adapters import OpenAIAdapter

    return OpenAIAdapter(asked.name, options=asked.options)


def _openai_responses(asked: _Asked) -> Adapter:
    from weakincentives.adapters import OpenAIAdapter

    return OpenAIAdapter(asked.name, api="responses", options=asked.options)


def _anthropic(asked: _Asked) -> Adapter:
    from weakincentives.adapters import AnthropicAdapter

    return AnthropicAdapter(asked.name, options=asked.options)


def _litellm(asked: _Asked) -> Adapter:
    from weakincentives.adapters import LiteLLMAdapter

    return LiteLLMAdapter(asked.name, options=asked.options)


def _claude(asked: _Asked) -> Adapter:
    from weakincentives.adapters import ClaudeAgentSDKAdapter

    if find_spec("claude_agent_sdk") is None:
        raise MissingExtra("claude-agent-sdk", "claude-agent-sdk")
    if not any(os.environ.get(key) for key in _CLAUDE_KEYS):
        raise ProviderRejected("There is no key for Claude: set ANTHROPIC_API_KEY")
    return ClaudeAgentSDKAdapter(model=asked.name or None)


def _local(asked: _Asked) -> Adapter:
    from weakincentives.adapters import LocalAdapter

    served = asked.stack.enter_context(_local_model(asked.name))
    # Small models repeat themselves endlessly without a penalty.
    return LocalAdapter(served, options={"frequency_penalty": 0.4, **asked.options})


def _local_model(name: str) -> LocalModel:
    from weakincentives.adapters import LocalModel

    return LocalModel(Path(name).expanduser() if name else None)


def _scripted(asked: _Asked) -> Adapter:
    return _script(asked.name, asked.turns)


def _script(name: str, turns: int = 0) -> Adapter:
    from weakincentives.adapters import ScriptedAdapter

    try:
        return ScriptedAdapter.from_file(Path(name).expanduser(), skip=turns)
    except OSError as error:
        raise Misuse(f"cannot read the script {name}: {error.strerror}") from error
    except ValueError as error:
        raise Misuse(f"the script {name} is invalid: {error}") from error


_OPENAI = ("OPENAI_API_KEY", "OPENAI_BASE_URL")
PROVIDERS = {
    "openai": Provider(form="openai:NAME", extra="openai", open=_openai, variables=_OPENAI),
    "openai-responses": Provider(
        form="openai-responses:NAME", extra="openai", open=_openai_responses, variables=_OPENAI
    ),
    "anthropic": Provider(
        form="anthropic:NAME",
        extra="anthropic",
        open=_anthropic,
        variables=(*_CLAUDE_KEYS[:2], "ANTHROPIC_BASE_URL"),
        has_temperature=False,
    ),
    "litellm": Provider(form="litellm:PROVIDER/NAME", extra="litellm", open=_litellm),
    "claude": Provider(
        form="claude[:NAME]",
        extra="claude-agent-sdk",
        open=_claude,
        variables=_CLAUDE_KEYS[:2],
        if_unset="warning",
        has_temperature=False,
        has_own_tools=True,
    ),
    "local": Provider(form="local[:FILE.gguf]", extra="local", open=_local, find=_local_model),
    "scripted": Provider(
        form="scripted:FILE", extra="cli", open=_scripted, has_temperature=False, find=_script
    ),
}
"""The only list of providers: a new one is an entry here."""
