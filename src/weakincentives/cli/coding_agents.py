"""Other vendors' coding agents, as far as `wink exec` must know them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from weakincentives.cli.common import Misuse


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """How a program is kept from working outside of its own process."""

    packages: tuple[str, ...] = ()
    """What it is called where packages are run by name, such as with ``npx``."""
    option: str = ""
    """Makes it work without a daemon; versions without the option have no daemon."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    outside: frozenset[str] = frozenset()
    """Words that make it work in a daemon, whatever else is given."""


AGENTS: Mapping[str, CodingAgent] = {
    "aider": CodingAgent(("aider-chat",)),
    "amp": CodingAgent(("@sourcegraph/amp",)),
    "claude": CodingAgent(
        ("@anthropic-ai/claude-code", "claude-code"),
        outside=frozenset({"--bg", "--background", "attach", "respawn"}),
    ),
    "cline": CodingAgent(
        environment={"CLINE_SESSION_BACKEND_MODE": "local"}, outside=frozenset({"-z", "--zen"})
    ),
    "codex": CodingAgent(("@openai/codex",), option="--no-daemon", outside=frozenset({"--remote"})),
    "copilot": CodingAgent(("@github/copilot",)),
    "crush": CodingAgent(("@charmland/crush",)),
    "cursor-agent": CodingAgent(),
    "gemini": CodingAgent(("@google/gemini-cli",)),
    "goose": CodingAgent(("@aaif/goose",)),
    "opencode": CodingAgent(("opencode-ai",)),
    "pi": CodingAgent(("@earendil-works/pi-coding-agent", "@mariozechner/pi-coding-agent")),
    "qwen": CodingAgent(("@qwen-code/qwen-code",)),
}
_NAMES = {name: program for program, agent in AGENTS.items() for name in (program, *agent.packages)}
_RUNNERS = frozenset({"bunx", "env", "nice", "nohup", "npm", "npx", "pipx", "pnpm", "uvx", "yarn"})
_VERBS = frozenset({"dlx", "exec", "run", "x"})


def agent_named(name: str) -> str | None:
    """Return the program of a known agent, by its name or that of its package; or None."""
    return _NAMES.get(re.sub(r"(?<=.)@[^/]*$", "", name))  # without a version


def agent_in(command: Sequence[str]) -> tuple[int, CodingAgent] | None:
    """Return where the name of a known agent stands in a command, and the agent; or None."""
    for place, word in enumerate(command):
        program = agent_named(word) or agent_named(PurePath(word).name)
        if program is not None:
            return place, AGENTS[program]
        is_skipped = word.startswith("-") or "=" in word or word in _VERBS
        if not is_skipped and PurePath(word).name not in _RUNNERS:
            return None
    return None


def check_is_inside(command: Sequence[str], place: int, agent: CodingAgent) -> None:
    """Raise Misuse if a command tells an agent to work in a daemon."""
    arguments = list(command[place + 1 :])
    for word in arguments[: arguments.index("--")] if "--" in arguments else arguments:
        if word.partition("=")[0] in agent.outside:
            raise Misuse(
                f"with {word}, {PurePath(command[place]).name} works in a daemon outside of"
                " `wink exec`, which could neither record nor undo it: run it without"
            )
