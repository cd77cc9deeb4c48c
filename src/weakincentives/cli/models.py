"""Model names, such as `openai:NAME`, and the adapters they stand for."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weakincentives.cli.common import Misuse, hint
from weakincentives.errors import MissingExtra, ProviderRejected, ProviderUnavailable

if TYPE_CHECKING:
    from weakincentives.adapters import Adapter
    from weakincentives.budget import Budget, BudgetTracker, TokenPrice
    from weakincentives.cli.config import Settings
    from weakincentives.runtime import Session

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
    has_temperature: bool = True
    """Whether its requests can have one."""

    @property
    def needs_name(self) -> bool:
        return "[" not in self.form


_OPENAI = ("OPENAI_API_KEY", "OPENAI_BASE_URL")
_ANTHROPIC = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL")
PROVIDERS = {
    "openai": Provider("openai:NAME", "openai", _OPENAI),
    "openai-responses": Provider("openai-responses:NAME", "openai", _OPENAI),
    "anthropic": Provider("anthropic:NAME", "anthropic", _ANTHROPIC, has_temperature=False),
    "litellm": Provider("litellm:PROVIDER/NAME", "litellm"),
    "claude": Provider("claude[:NAME]", "claude-agent-sdk", _CLAUDE_KEYS[:2], False),
    "local": Provider("local[:FILE.gguf]", "local"),
    "scripted": Provider("scripted:FILE", "cli", has_temperature=False),
}


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
            adapter = _adapter(kind, rest, turns, stack, options)
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


def _adapter(
    kind: str, name: str, turns: int, stack: ExitStack, options: dict[str, Any]
) -> Adapter:
    from weakincentives import adapters

    match kind:
        case "openai":
            return adapters.OpenAIAdapter(name, options=options)
        case "openai-responses":
            return adapters.OpenAIAdapter(name, api="responses", options=options)
        case "anthropic":
            return adapters.AnthropicAdapter(name)
        case "litellm":
            return adapters.LiteLLMAdapter(name, options=options)
        case "claude":
            if find_spec("claude_agent_sdk") is None:
                raise MissingExtra("claude-agent-sdk", "claude-agent-sdk")
            if not any(os.environ.get(key) for key in _CLAUDE_KEYS):
                raise ProviderRejected("There is no key for Claude: set ANTHROPIC_API_KEY")
            return adapters.ClaudeAgentSDKAdapter(model=name or None)
        case "local":
            served = stack.enter_context(adapters.LocalModel(_path_of(name)))
            # Small models repeat themselves endlessly without a penalty.
            return adapters.LocalAdapter(served, options={"frequency_penalty": 0.4, **options})
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


def budget_of(settings: Settings, adapter: Adapter) -> Budget | None:
    """Return the limits of a run; raise Misuse if a limit in money could not be checked."""
    from weakincentives.budget import Budget

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
    from weakincentives.budget import BudgetTracker

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
    from weakincentives.budget import TokenPrice

    known = adapter.price()
    if known is not None or settings.price is None:
        return known
    read, written = settings.price.split("/")
    return TokenPrice(input=float(read), output=float(written))
