"""A run for tests: tools on session, files and an outside service, and a model with a script."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import weakincentives as wink
from weakincentives.adapters import ModelRequest, ModelTurn, ScriptedAdapter, calls, says
from weakincentives.core.call import ToolCall
from weakincentives.prompt import ApprovalPolicy, MarkdownSection, Prompt, PromptTemplate


@dataclass(frozen=True)
class Note:
    text: str


@wink.tool(reach="reversible")
def note(text: str, *, context: wink.ToolContext) -> str:
    """Note something in the session."""
    context.session[Note].append(Note(text))
    return f"Noted {text}"


@wink.tool(reach="reversible")
def append(text: str, *, context: wink.ToolContext) -> str:
    """Append a line to a file."""
    files = context.filesystem
    before = files.read("lines.txt") if files.exists("lines.txt") else ""
    files.write("lines.txt", f"{before}{text}\n")
    return f"Appended {text}"


@wink.tool(reach="irreversible")
def order(url: str, key: str, *, context: wink.ToolContext) -> str:
    """Order something from a service that counts."""
    made = Request(url, data=b"", headers={"Idempotency-Key": key}, method="POST")
    with urlopen(made, timeout=30) as response:
        return f"Ordered {key}: {response.read().decode()}"


@wink.tool(reach="read")
def produce(size: int, *, context: wink.ToolContext) -> str:
    """Return a text of so many characters, never the same."""
    rows = (os.urandom(24).hex() for _ in range(size // 49 + 1))
    return "\n".join(rows)[:size]


@wink.tool(reach="reversible")
def fail(text: str, *, context: wink.ToolContext) -> str:
    """Note something, and fail."""
    context.session[Note].append(Note(text))
    raise ValueError(f"Failed {text}")


def prompt_with(asks: Sequence[str] = (), **template: Any) -> Prompt[Any]:
    """Return a prompt with all tools; calls of those in ``asks`` wait for a person."""
    return Prompt(
        PromptTemplate(
            ns="tests",
            key="durable",
            name="Durable",
            sections=[MarkdownSection(title="Work", tools=[note, append, order, produce, fail])],
            policies=[ApprovalPolicy(tools=frozenset(asks))] if asks else [],
            **template,
        )
    )


class Script(ScriptedAdapter):
    """Plays the turn that follows the conversation, so it goes on in any process.

    Args:
        gate: A file for which it waits in its third turn; ``<gate>.reached`` says that it does.
    """

    def __init__(
        self,
        turns: Sequence[Sequence[tuple[str, dict[str, Any]]]],
        delay: float = 0.0,
        gate: str = "",
    ):
        def play(request: ModelRequest) -> ModelTurn:
            if delay:
                time.sleep(delay)
            n = sum(each.role == "model" for each in request.messages)
            if gate and n == 2:
                Path(f"{gate}.reached").touch()
                while not Path(gate).exists():
                    time.sleep(0.01)
            if n >= len(turns):
                return says("Done.")
            made = [ToolCall(name, args, f"t{n}c{c}") for c, (name, args) in enumerate(turns[n])]
            return calls(*made)

        super().__init__(_forever(play))


def _forever(play: Callable[[ModelRequest], ModelTurn]):
    while True:
        yield play
