"""The adapters that are run against the conformance cases, each over what stands for its provider.

``python tests/adapters/under_test.py`` runs them all and writes ``tests/adapters/conformance.md``.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from unittest import SkipTest

from wire import Script, WireServer

from messages_server import serving
from weakincentives.adapters import (
    Adapter,
    AnthropicAdapter,
    ClaudeAgentSDKAdapter,
    LiteLLMAdapter,
    OpenAIAdapter,
    ReplayAdapter,
    ScriptedAdapter,
    record,
    replay,
)
from weakincentives.errors import ProviderError
from weakincentives.testing import AdapterCase, MakeAdapter, Played, Served, adapter_cases

PAGE = Path(__file__).with_name("conformance.md")
YES = "yes"

_KEY = "sk-loopback-0123456789"

Make = Callable[[Script], Adapter]

# Those that speak to a provider, by the heading of their column.
ON_THE_WIRE: Mapping[str, Make] = {
    "OpenAI, chat": lambda script: OpenAIAdapter(
        "model", api="chat", base_url=script.base_url, api_key=_KEY
    ),
    "OpenAI, responses": lambda script: OpenAIAdapter(
        "model", api="responses", base_url=script.base_url, api_key=_KEY
    ),
    "LiteLLM": lambda script: LiteLLMAdapter(
        "openai/model", base_url=script.base_url, api_key=_KEY
    ),
    "Anthropic": lambda script: AnthropicAdapter(
        "model", base_url=script.base_url.removesuffix("/v1"), api_key=_KEY
    ),
}

ADAPTERS = ("Scripted", "recorded", "replayed", *ON_THE_WIRE, "Claude Agent SDK")

# What cannot be done, and why: such a case must fail, or this is to be taken out.
_NOT_STREAMED = {
    ("LiteLLM", "refusal"): "Not while streaming: LiteLLM leaves out a refusal that is streamed.",
}


def missing(adapter: str) -> str | None:
    """Return the package that an adapter needs and that is not installed."""
    packages = {
        "LiteLLM": "litellm",
        "Anthropic": "anthropic",
        "Claude Agent SDK": "claude_agent_sdk",
    }
    package = packages.get(adapter, "openai" if adapter in ON_THE_WIRE else "json")
    return None if find_spec(package) else package


def outcome(
    adapter: str, case: AdapterCase, *, streaming: bool, server: WireServer, folder: Path
) -> str:
    """Return "yes", or why the case does not apply; a case that fails raises."""
    reason = _NOT_STREAMED.get((adapter, case.name))
    try:
        _check(adapter, case, streaming, server, folder)
    except SkipTest as skipped:
        return f"{str(skipped).capitalize()}."
    except AssertionError:
        if reason is None or not streaming:
            raise
        return reason
    assert reason is None or not streaming, f"{adapter} can do it: {case.name}"
    return reason or YES


def _check(
    adapter: str, case: AdapterCase, streaming: bool, server: WireServer, folder: Path
) -> None:
    if adapter in ON_THE_WIRE:
        scripts: list[Script] = []
        case.check(_served(ON_THE_WIRE[adapter], server, scripts), streaming=streaming)
        problems = [problem for script in scripts for problem in script.problems]
        assert problems == [], f"the provider refused what it was asked: {problems[0]}"
    elif adapter == "Claude Agent SDK":
        with ExitStack() as servers:
            case.check(_by_its_program(servers), streaming=streaming)
    elif adapter == "Scripted":
        case.check(ScriptedAdapter, streaming=streaming)
    else:
        case.check(_recording(folder), streaming=streaming)
        if adapter == "replayed":
            adapters: list[ReplayAdapter] = []
            case.check(_replaying(folder, adapters), streaming=streaming)
            assert [each.divergence for each in adapters] == [None] * len(adapters)


def _served(make: Make, server: WireServer, scripts: list[Script]) -> MakeAdapter:
    def made(turns: Sequence[Played]) -> Served:
        scripts.append(server.play(*turns))
        return Served(make(scripts[-1]), scripts[-1].asked)

    return made


def _by_its_program(servers: ExitStack) -> MakeAdapter:
    def made(turns: Sequence[Played]) -> Adapter:
        if any(isinstance(turn, ProviderError) and turn.retry_after for turn in turns):
            raise SkipTest("the program does not pass on how long the provider asks to wait")
        server = servers.enter_context(serving(turns))
        return ClaudeAgentSDKAdapter(model="claude-sonnet-5", env=server.environment)

    return made


def _recording(folder: Path) -> MakeAdapter:
    numbers = itertools.count()
    return lambda turns: record(ScriptedAdapter(turns), folder / f"{next(numbers)}.jsonl")


def _replaying(folder: Path, adapters: list[ReplayAdapter]) -> MakeAdapter:
    def made(_: Sequence[Played]) -> ReplayAdapter:
        adapters.append(replay(folder / f"{len(adapters)}.jsonl"))
        return adapters[-1]

    return made


# The page

_INTRODUCTION = """\
# Conformance

What every adapter must do, whatever its provider does: the cases of `adapter_cases()`, which you
can run over [your own adapter](../../docs/testing.md#an-adapter-of-your-own). Those of this library
are run against them with and without streaming. For the ones that speak to a provider, a server on
loopback stands in for it: it speaks the provider's format, refuses what the provider would refuse,
and what
it was asked is read back and compared, so that the words of a tool are seen to reach the model as
they are, byte for byte, through each of them. The Claude Agent SDK runs its real program, which
puts words of its own around the conversation: there only what comes of it is compared.

This page is written by `python tests/adapters/under_test.py`; each cell is compared with a test.
"""


def cells(text: str) -> dict[tuple[str, str], str]:
    """Return what the page says, by case and adapter."""
    notes = dict(line.split(" ", 1) for line in text.splitlines() if line.startswith("("))
    found: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        name, *values = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and name != "case" and not name.startswith("---"):
            for adapter, value in zip(ADAPTERS, values[1:], strict=True):
                found[name, adapter] = notes.get(value, value)
    return found


def page(outcomes: Mapping[tuple[str, str], str]) -> str:
    """Return the page: a row for each case, a column for each adapter, reasons below."""
    reasons = sorted({each for each in outcomes.values() if each != YES})
    numbers = {reason: f"({n})" for n, reason in enumerate(reasons, 1)}
    lines = [_INTRODUCTION, f"| case | what it must do | {' | '.join(ADAPTERS)} |"]
    lines.append("|---" * (len(ADAPTERS) + 2) + "|")
    for case in adapter_cases():
        row = [outcomes[case.name, adapter] for adapter in ADAPTERS]
        shown = " | ".join(numbers.get(each, each) for each in row)
        lines.append(f"| {case.name} | {case.text} | {shown} |")
    notes = [f"{number} {reason}\n" for reason, number in numbers.items()]
    neighbours = "See also: [Testing](../../docs/testing.md)"
    return "\n".join([*lines, "", *notes, neighbours]) + "\n"


def _run_all() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    with WireServer() as server:
        for case, adapter in itertools.product(adapter_cases(), ADAPTERS):
            for streaming in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    found[case.name, adapter] = outcome(
                        adapter, case, streaming=streaming, server=server, folder=Path(folder)
                    )
    return found


if __name__ == "__main__":
    PAGE.write_text(page(_run_all()), encoding="utf-8")
