"""What an agent tells its hooks, and what they answer, in words that fit every agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["prompt", "before", "after", "failed", "subagent_end", "turn_end", "session_end"]
"""What has happened: a person's prompt, the begin or end of a tool, or the end of an agent."""
ENDS: frozenset[Kind] = frozenset({"subagent_end", "turn_end", "session_end"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of an agent's session."""

    kind: Kind
    session: str
    directory: str
    """The agent's working directory, which relative paths start from."""
    root: str
    """The project: the directory that is recorded."""
    agent: str = ""
    """The sub-agent that uses the tool; empty for the main one."""
    turn: str = ""
    """What identifies the agent's turn, if the program tells."""
    tool: str = ""
    use: str = ""
    """The program's id of this use of the tool; empty if it has none."""
    params: Any = None
    answer: str = ""
    """What the tool answered; of one that failed, why."""
    prompt: str = ""
    process: int = 0
    """The agent's process, if it tells: when it is gone, none of its tools runs."""


@dataclass(slots=True)
class Reply:
    """What to tell the agent."""

    denial: str = ""
    """Why the tool must not run."""
    question: str = ""
    """What to ask the person before the tool runs."""
    rolled_back: str = ""
    """Why the changes of a tool were rolled back; for the model."""
    messages: list[str] = field(default_factory=list[str])
    """For the person."""
