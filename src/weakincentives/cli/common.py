"""Shared by the commands: errors, output, runs, shell completion, and common options."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from weakincentives.core.text import harmless
from weakincentives.core.text import shortened as shortened
from weakincentives.core.text import summary_of as summary_of
from weakincentives.errors import FilesystemError, NoSuchBranch, SnapshotError, WorkspaceLocked

if TYPE_CHECKING:
    from weakincentives.filesystem import Branch, HostFilesystem
    from weakincentives.runtime.calls import Run

_Command = TypeVar("_Command", bound=Callable[..., object])

FILE_NAME = "wink.toml"
INSIDE = "WINK_EXEC"
"""The variable that tells a program which directory `wink exec` runs it on."""

FOR_OTHERS = 10.0
"""Seconds to wait for another process that has the directory to itself."""


class Misuse(Exception):
    """Wrong use of the command: one line that says what to do. `wink` exits with 2."""


class InUse(Misuse):
    """Another process has a directory or branch to itself."""

    def __init__(self, error: WorkspaceLocked, what: str) -> None:
        self.pid = error.pid
        self.user = "another process" if error.pid is None else f"process {error.pid}"
        super().__init__(f"{what} is in use by {self.user}: wait for it to end, or stop it")


# Output


def echo(text: str, *, err: bool = False) -> None:
    """Print lines; escape sequences in them are escaped."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{harmless(text, lines=True)}\n")
    stream.flush()


def say(*texts: str) -> None:
    """Print each text as one line on standard error."""
    for text in texts:
        echo(f"wink: {harmless(text)}", err=True)


def hint(wrong: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return the most similar known name as a question, or ``otherwise``."""
    near = get_close_matches(wrong, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else otherwise


EPILOGS: dict[object, str] = {}
"""What follows the options in the help of a command."""


def examples(*lines: str, more: str = "") -> Callable[[_Command], _Command]:
    """Give a command examples, and more text after them, in its help."""

    def remember(command: _Command) -> _Command:
        block = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
        EPILOGS[command] = f"{block}\n\n{more}"
        return command

    return remember


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


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


def last_run(workspace: Path) -> Run:
    """Return the newest run of a directory, or raise Misuse."""
    from weakincentives.runtime.calls import runs_of

    for run in reversed(runs_of(workspace)):
        return run
    raise Misuse(f"no runs in {workspace} yet: `wink` alone says how to begin")


def open_workspace(
    directory: Path,
    *,
    unprotected: Sequence[str] = (),
    alone: bool = False,
    wait: float | None = None,
) -> HostFilesystem:
    """Open a directory, alone or with others; raise Misuse if that is not possible.

    Args:
        wait: Seconds to wait for other processes; see ``HostFilesystem``.
    """
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.runtime.undo import PATIENCE

    try:
        return HostFilesystem(
            directory,
            unprotected=unprotected,
            shared=not alone,
            wait=PATIENCE if alone and wait is None else wait,
        )
    except WorkspaceLocked as error:
        raise InUse(error, str(directory)) from error
    except NotImplementedError as error:
        raise Misuse(str(error)) from error


def open_branch(
    workspace: Path, name: str, *, run: str = "", unprotected: Iterable[str] = ()
) -> Branch:
    """Open a branch, or make one; raise Misuse if it is in use, or cannot have this name."""
    from weakincentives.filesystem import Branch
    from weakincentives.runtime.forks import RUN

    rules = tuple(unprotected)
    try:
        try:
            return Branch.open(workspace, name, unprotected=rules)
        except NoSuchBranch:
            about = {RUN: run} if run else {}
            return Branch.create(workspace, name, about=about, unprotected=rules)
    except WorkspaceLocked as error:
        raise Misuse(f"the branch {name} is in use by process {error.pid}") from error
    except FilesystemError as error:
        raise Misuse(str(error)) from error


def text_of(given: str, if_empty: str) -> str:
    """Return an argument, or standard input in place of a dash; raise Misuse if it is empty."""
    text = sys.stdin.read() if given == "-" else given
    if not text.strip():
        raise Misuse(if_empty)
    return text
