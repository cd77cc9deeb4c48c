"""What commands share: refusing, printing, naming runs, and the options that several have."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weakincentives.text import harmless

if TYPE_CHECKING:
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.runtime.calls import Run

FILE_NAME = "wink.toml"


class Misuse(Exception):
    """Wrong use of the command. Its text is one line that says what to do; `wink` exits with 2."""


def echo(text: str, *, err: bool = False) -> None:
    """Print lines. Descriptions, names and messages come from models, servers and files."""
    typer.echo(harmless(text, lines=True), err=err)


def say(text: str) -> None:
    """Print one line about what was asked for, apart from the output."""
    echo(f"wink: {harmless(text)}", err=True)


def hint(wrong: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return which of the known names was probably meant; else something else to say."""
    near = get_close_matches(wrong, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


def examples(*lines: str, more: str = "") -> str:
    """Return the end of a command's help: examples, one below the other, and what else to say."""
    return "\n" + "\n\n".join(["Examples:", *(f"  {line}" for line in lines), more])


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


# A call in a few words


def shortened(text: str, limit: int) -> str:
    """Return a text on one line of at most so many characters, and harmless."""
    start = harmless(text[: 4 * limit])  # a long one is not worth looking at to its end
    if len(start) <= limit and len(text) <= 4 * limit:
        return start
    return f"{start[: limit - 3]}..."


_MAIN_ARGUMENTS = (
    "command",
    "path",
    "source",
    "pattern",
    "query",
    "code",
    "objective",
    "step",
    "steps",
    "url",
    "topic",
)


def summary_of(arguments: object, limit: int = 60) -> str:
    """Return what a call is about, in a few words: its main argument, or the first ones."""
    if not isinstance(arguments, Mapping):
        return "" if arguments is None else shortened(str(arguments), limit)
    given = cast("Mapping[str, object]", arguments)
    if "source" in given and "destination" in given:
        return shortened(f"{given['source']} -> {given['destination']}", limit)
    if "step" in given and "status" in given:
        return shortened(f"{given['step']} {given['status']}", limit)
    main = next((given[name] for name in _MAIN_ARGUMENTS if given.get(name)), None)
    if isinstance(main, (list, tuple)):
        main = " ".join(map(str, cast("Sequence[object]", main)))
    if main is None:
        main = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return shortened(str(main), limit)


# Where, and which run


def existing_directory(path: Path) -> Path:
    """Return a directory, resolved; one that cannot be looked into raises Misuse."""
    try:
        resolved = path.expanduser().resolve(strict=True)
        if not resolved.is_dir():
            raise Misuse(f"{path} is a file; --workspace takes the directory to work on")
        os.listdir(resolved)
    except FileNotFoundError:
        raise Misuse(f"there is no directory {path}; make it, or name another one") from None
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Misuse(f"the directory {path} cannot be opened: {reason}") from error
    return resolved


def find_run(workspace: Path, wanted: str) -> Run:
    """Return the run with this id; else raises Misuse.

    A prefix of the id is enough where no other run has it, and so are the letters at its end.
    """
    from weakincentives.runtime.calls import runs_of

    runs = runs_of(workspace)
    found = [run for run in runs if wanted and (run.id.startswith(wanted) or run.mark == wanted)]
    exact = [run for run in found if run.id == wanted]
    if len(found) == 1 or exact:
        return (exact or found)[0]
    if found:
        ids = ", ".join(run.id for run in found[-3:])
        raise Misuse(f"{wanted!r} is the name of {len(found)} runs: {ids}; say more of it")
    newest = f"; the newest is {runs[-1].id}" if runs else ": it has none yet"
    raise Misuse(f"there is no run {wanted!r} in {workspace}{newest}")


@contextmanager
def open_workspace(
    directory: Path, *, unprotected: Sequence[str] = ()
) -> Generator[HostFilesystem]:
    """Open a directory until the end of the block; one that is in use raises Misuse."""
    from weakincentives.errors import WorkspaceLocked
    from weakincentives.filesystem import HostFilesystem

    try:
        files = HostFilesystem(directory, unprotected=unprotected)
    except WorkspaceLocked as error:
        who = "another process" if error.pid is None else f"process {error.pid}"
        raise Misuse(
            f"{directory} is in use by {who}: one agent at a time works on a directory. "
            "Wait until that has ended, or end it"
        ) from error
    except NotImplementedError as error:
        raise Misuse(str(error)) from error
    with files:
        yield files


# What a shell offers where a run, a call, a tool, a model or a suite is to be named

_MOST = 50
"""How many of the newest are offered."""


def complete_runs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the runs of the workspace, newest first, with what they were told to do."""
    from weakincentives.errors import SnapshotError, WinkError
    from weakincentives.runtime.calls import runs_of

    def matching() -> Iterator[tuple[str, str]]:
        for run in runs_of(_workspace(context))[: -_MOST - 1 : -1]:
            with suppress(OSError, SnapshotError):  # of no session, or gone
                if run.id.startswith(incomplete):
                    yield run.id, _words(run.title)

    try:
        return list(matching())
    except (OSError, WinkError):  # there is no such directory, or its store is refused
        return []


def complete_calls(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the newest calls of the workspace, with their tools."""
    from weakincentives.errors import WinkError
    from weakincentives.runtime.calls import Calls

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
    return harmless(text[:240])[:60]


# The options that several commands have

Workspace = Annotated[
    Path, typer.Option("--workspace", "-w", help="The directory to work on.", show_default=".")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
