"""Shared by the commands: errors, output, runs, shell completion, and common options."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weakincentives.errors import SnapshotError
from weakincentives.text import harmless
from weakincentives.text import shortened as shortened
from weakincentives.text import summary_of as summary_of

if TYPE_CHECKING:
    from weakincentives.errors import WorkspaceLocked
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.runtime.calls import Run

FILE_NAME = "wink.toml"
INSIDE = "WINK_EXEC"
"""The variable that tells a program which directory `wink exec` runs it on."""


class Misuse(Exception):
    """Wrong use of the command: one line that says what to do. `wink` exits with 2."""


# Output


def echo(text: str, *, err: bool = False) -> None:
    """Print lines; escape sequences in them are spelled out."""
    typer.echo(harmless(text, lines=True), err=err)


def say(text: str) -> None:
    """Print one line on standard error."""
    echo(f"wink: {harmless(text)}", err=True)


def hint(wrong: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return the most similar known name as a question, or ``otherwise``."""
    near = get_close_matches(wrong, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


def examples(*lines: str, more: str = "") -> str:
    """Return the epilog of a command's help."""
    block = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
    return f"{block}\n\n{more}"


_DIFF_STYLES = {
    "diff --git": "bold",
    "+++": "bold",
    "---": "bold",
    "@@": "cyan",
    "+": "green",
    "-": "red",
}


def diff_style(line: str) -> str:
    """Return the style of a line of a diff."""
    return next((style for start, style in _DIFF_STYLES.items() if line.startswith(start)), "")


# Workspaces and runs


def existing_directory(path: Path) -> Path:
    """Return a directory that can be read, resolved; otherwise raise Misuse."""
    try:
        resolved = path.expanduser().resolve(strict=True)
        os.listdir(resolved)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Misuse(f"cannot open the directory {path}: {reason}") from error
    return resolved


def find_run(workspace: Path, wanted: str) -> Run:
    """Return the run with this id, unique prefix of an id, suffix or branch, or raise Misuse."""
    from weakincentives.filesystem import branches_of
    from weakincentives.runtime.calls import runs_of

    runs = runs_of(workspace)
    found = [run for run in runs if wanted and (run.id.startswith(wanted) or run.mark == wanted)]
    exact = [run for run in found if run.id == wanted]
    if len(found) == 1 or exact:
        return (exact or found)[0]
    if found:
        ids = ", ".join(run.id for run in found[-3:])
        raise Misuse(f"{wanted!r} matches {len(found)} runs: {ids}; use a longer prefix")
    if any(branch.name == wanted for branch in branches_of(workspace)):
        for run in reversed(runs):
            with suppress(OSError, SnapshotError):  # one that cannot be read is on no branch
                if run.branch == wanted:
                    return run
        raise Misuse(f'no run works on the branch {wanted}; wink run "..." --branch {wanted}')
    newest = f"the newest is {runs[-1].id}" if runs else "there are none yet"
    raise Misuse(f"no run {wanted!r} in {workspace}; {newest}")


@contextmanager
def open_workspace(
    directory: Path,
    *,
    unprotected: Sequence[str] = (),
    alone: bool = False,
    wait: float | None = None,
) -> Generator[HostFilesystem]:
    """Open a directory for the block, alone or with others; raise Misuse if that is not possible.

    Args:
        wait: Seconds to wait for other processes; see ``HostFilesystem``.
    """
    from weakincentives.errors import WorkspaceLocked

    try:
        files = opened_workspace(directory, unprotected=unprotected, alone=alone, wait=wait)
    except WorkspaceLocked as error:
        raise in_use(error, directory) from error
    with files:
        yield files


def opened_workspace(
    directory: Path,
    *,
    unprotected: Sequence[str] = (),
    alone: bool = False,
    wait: float | None = None,
) -> HostFilesystem:
    """Open a directory; raises WorkspaceLocked if another process has it alone."""
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.runtime.undo import PATIENCE

    try:
        return HostFilesystem(
            directory,
            unprotected=unprotected,
            shared=not alone,
            wait=PATIENCE if alone and wait is None else wait,
        )
    except NotImplementedError as error:
        raise Misuse(str(error)) from error


def user(error: WorkspaceLocked) -> str:
    """Return who uses a directory."""
    return "another process" if error.pid is None else f"process {error.pid}"


def in_use(error: WorkspaceLocked, directory: Path) -> Misuse:
    return Misuse(f"{directory} is in use by {user(error)}: wait until it has ended, or stop it")


# Shell completion

_MOST = 50
"""How many of the newest runs or calls are offered."""


def complete_runs(context: typer.Context, incomplete: str) -> list[str]:
    from weakincentives.errors import WinkError
    from weakincentives.runtime.calls import runs_of

    with suppress(OSError, WinkError):
        runs = runs_of(_workspace(context))[: -_MOST - 1 : -1]
        return [run.id for run in runs if run.id.startswith(incomplete)]
    return []


def complete_calls(context: typer.Context, incomplete: str) -> list[str]:
    from weakincentives.errors import WinkError
    from weakincentives.runtime.calls import Calls

    with suppress(OSError, WinkError):
        known = Calls(_workspace(context), detail=lambda path: False)
        calls = reversed(known.latest(_MOST))
        return [call.name for call in calls if call.name.startswith(incomplete)]
    return []


def complete_branches(context: typer.Context, incomplete: str) -> list[str]:
    from weakincentives.errors import WinkError
    from weakincentives.filesystem import branches_of

    with suppress(OSError, WinkError):
        found = branches_of(_workspace(context))
        return [each.name for each in found if each.name.startswith(incomplete)]
    return []


def complete_tools(incomplete: str) -> list[str]:
    from weakincentives.cli.workbench import suite_tools

    return sorted(name for name in suite_tools() if name.startswith(incomplete))


def complete_models(incomplete: str) -> list[str]:
    from weakincentives.cli.models import PROVIDERS

    names = (f"{kind}:" if each.needs_name else kind for kind, each in PROVIDERS.items())
    return [name for name in names if name.startswith(incomplete)]


def complete_suites(incomplete: str) -> list[str]:
    from weakincentives.cli.config import SUITES

    before, comma, last = incomplete.rpartition(",")
    rest = [suite for suite in SUITES if suite not in before.split(",")]
    return [f"{before}{comma}{suite}" for suite in rest if suite.startswith(last)]


def _workspace(context: typer.Context) -> Path:
    return Path(context.params.get("workspace") or os.curdir)


# Options that several commands have

Workspace = Annotated[
    Path,
    typer.Option(
        "--workspace", "-w", metavar="DIR", help="The directory to work on.", show_default="."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="A run: a prefix of its id, the letters at its end, or its branch.",
        autocompletion=complete_runs,
    ),
]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="RULE",
        help="Add a rule: protect=GLOB, deny=TOOL, quota=TOOL:N, a .toml file, or module:object. "
        "Can be repeated.",
    ),
]
SandboxName = Annotated[
    list[str] | None,
    typer.Option(
        "--sandbox",
        metavar="NAME",
        help="What commands run in: auto, podman, bubblewrap, namespaces or none. Or what they may "
        "use: read=DIR, write=DIR, env=NAME, network=HOST. Can be repeated.",
    ),
]
InPlace = Annotated[
    bool,
    typer.Option(
        "--in-place", help="Have the directory to yourself: nobody else may work there meanwhile."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Approve everything without asking.")]
