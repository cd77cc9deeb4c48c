"""What a shell offers where a run, a call, a tool, a model or a suite is to be named."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import typer

__all__ = [
    "complete_calls",
    "complete_models",
    "complete_runs",
    "complete_suites",
    "complete_tools",
]

_MOST = 50
"""How many of the newest are offered."""


def complete_runs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the runs of the workspace, newest first, with what they were told to do."""
    from weakincentives.cli.calls import Run
    from weakincentives.cli.runs import runs_of
    from weakincentives.errors import SnapshotError, WinkError

    found: list[tuple[str, str]] = []
    with suppress(OSError, WinkError):  # there is no such directory, or its store is refused
        for run in runs_of(_workspace(context))[: -_MOST - 1 : -1]:
            with suppress(OSError, SnapshotError):  # of no session, or gone
                if run.id.startswith(incomplete):
                    found.append((run.id, _words(Run(run, run.read()).title)))
    return found


def complete_calls(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the newest calls of the workspace, with their tools."""
    from weakincentives.cli.calls import Calls
    from weakincentives.errors import WinkError

    try:
        calls = Calls(_workspace(context)).latest(_MOST)
    except (OSError, WinkError):
        return []
    return [
        (call.name, _words(f"{call.tool} {call.outcome}"))
        for call in reversed(calls)
        if call.name.startswith(incomplete)
    ]


def complete_tools(incomplete: str) -> list[str]:
    """Return the tools that an agent can be given."""
    from weakincentives.cli.workbench import suite_tools

    return sorted(name for name in suite_tools() if name.startswith(incomplete))


def complete_models(incomplete: str) -> list[str]:
    """Return what names of models begin with."""
    from weakincentives.cli.models import PROVIDERS

    names = (f"{kind}:" if each.needs_name else kind for kind, each in PROVIDERS.items())
    return [name for name in names if name.startswith(incomplete)]


def complete_suites(incomplete: str) -> list[str]:
    """Return the suites of tools, after those that stand there already with commas between."""
    from weakincentives.cli.config import SUITES

    before, comma, last = incomplete.rpartition(",")
    chosen = before.split(",")
    return [
        f"{before}{comma}{suite}"
        for suite in SUITES
        if suite.startswith(last) and suite not in chosen
    ]


def _workspace(context: typer.Context) -> Path:
    return Path(context.params.get("workspace") or os.curdir)


def _words(text: str) -> str:
    from weakincentives.text import harmless

    return harmless(text[:240])[:60]
