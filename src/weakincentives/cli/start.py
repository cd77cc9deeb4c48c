"""`wink` alone: what has happened in this directory, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from weakincentives.cli.common import echo, existing_directory, shortened, table
from weakincentives.core.text import counted, harmless

if TYPE_CHECKING:
    from weakincentives.runtime.calls import Calls

AGENTS = {"claude": "Claude Code", "codex": "Codex", "gemini": "Gemini CLI", "opencode": "OpenCode"}
"""Programs that are looked for, and what they are called."""


def start() -> None:
    """Say what is recorded in the current directory, and which commands come next."""
    from weakincentives.runtime.calls import Calls

    calls = Calls(existing_directory(Path()), detail=lambda path: False)
    lines = _recorded(calls) if calls.runs or calls.latest(1) else _empty(calls.workspace)
    for line in lines:
        echo(line)
    echo("\nAll commands: wink --help")


def _recorded(calls: Calls) -> Iterator[str]:
    from weakincentives.runtime.approvals import pending_approvals

    runs = f"{counted(len(calls.runs), 'run')} recorded" if calls.runs else "calls recorded"
    yield f"{harmless(str(calls.workspace))}: {runs}."
    for run in calls.newest_runs[:1]:
        moment = datetime.fromtimestamp(run.data.began)
        title = shortened(harmless(run.title), 60)
        made = counted(len(calls.of_run(run)), "call")
        yield f"The last: {run.mark}, {moment:%Y-%m-%d %H:%M}, {title} ({made})"
    yield ""
    rows: list[tuple[str, str]] = []
    waiting = [each for each in pending_approvals(calls.workspace) if each.is_open]
    if waiting:
        rows.append(("wink approve", f"answer: {counted(len(waiting), 'call')} waiting for you"))
    rows += [
        ("wink log", "every call, and what it changed"),
        ("wink diff", "the changes of the last run, as a patch"),
        ("wink undo", "undo them: it shows them first, and can be undone"),
        ("wink debug", "every file at every call, in the browser"),
    ]
    yield from (f"  {line}" for line in table(rows))


def _empty(workspace: Path) -> Iterator[str]:
    import shutil

    yield f"Nothing is recorded in {harmless(str(workspace))} yet."
    yield ""
    found = [name for name in AGENTS if shutil.which(name)] or ["claude"]
    rows = [
        (f"wink hook install {name}", f"record every call of {AGENTS[name]} from now on")
        for name in found
    ]
    rows += [
        (f"wink exec -- {found[0]}", "or run it once, as one change that can be undone"),
        ('wink run "TASK" -m MODEL', "let WINK's own agent work here; every call can be undone"),
        ("wink demo", "watch an agent be stopped and rolled back: no key, no network"),
        ("wink doctor", "check what works on this machine"),
    ]
    yield from (f"  {line}" for line in table(rows))
