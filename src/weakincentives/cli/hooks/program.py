"""One event of an agent, from standard input to standard output."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from weakincentives.cli.common import Misuse, echo
from weakincentives.cli.hooks.adapters import adapter_of
from weakincentives.cli.hooks.recording import answer


def record(agent: str, workspace: Path | None = None) -> None:
    """Record the event that standard input describes, and print what to tell the agent.

    Raises:
        Misuse: It does not describe an event of this agent.
    """
    adapter = adapter_of(agent)
    try:
        event = adapter.read(json.loads(sys.stdin.buffer.read()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Misuse(
            f"expected an event of {adapter.title} as a JSON object on standard input"
            f" ({_named(error)}); it starts this itself: see wink hook install"
            f" {adapter.program} --print"
        ) from error
    if event is None:
        return
    if workspace is not None:
        event = replace(event, root=str(workspace))
    said = adapter.write(event.kind, answer(adapter, event))
    if said:
        echo(json.dumps(said))  # ASCII: other characters are escaped


def _named(error: Exception) -> str:
    """Return what is wrong with an event."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return str(error) if isinstance(error, ValueError) else "it is no such object"
