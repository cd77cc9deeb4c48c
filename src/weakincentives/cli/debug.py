"""`wink debug`, `export`, `query`: a run in the browser, as a page to share, and as tables."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weakincentives.cli.common import (
    Misuse,
    echo,
    examples,
    existing_directory,
    find_run,
    last_run,
    say,
    shortened,
)
from weakincentives.cli.database import is_named, open_runs
from weakincentives.cli.fetching import where_to_look
from weakincentives.cli.options import AsJson, DatabaseUrl, Workspace, complete_runs, run_argument
from weakincentives.core.text import counted, size_of
from weakincentives.errors import QueryError

if TYPE_CHECKING:
    from weakincentives.debugger.query import Answer, Value


# debug


@examples(
    "wink debug                    # all runs and branches of the directory",
    "wink debug k3f                # one run: timeline, files, state, blame",
    "wink debug --no-open --port 8080   # over ssh: forward the port, open the printed link",
    "wink debug --link             # of the one that is running: for another browser",
    more="Runs in progress appear as they happen. Ctrl-C ends it.",
)
def debug(
    run: Annotated[
        str | None,
        run_argument("A run to begin with: a prefix of its id, or the letters at its end."),
    ] = None,
    workspace: Workspace = Path(),
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="0 is any free port.")
    ] = 0,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Only print the link; open no browser.")
    ] = False,
    link_only: Annotated[
        bool,
        typer.Option("--link", help="Print one more link to the debugger that is running here."),
    ] = False,
    database: DatabaseUrl = None,
) -> None:
    """See every file and value at every call in the browser.

    Undo, fork and rerun there. With a database of runs, the page also shows the approvals that
    wait there.
    """
    from weakincentives.core.programs import open_link
    from weakincentives.debugger import serve
    from weakincentives.debugger.links import running
    from weakincentives.debugger.server import Actions

    directory = existing_directory(where_to_look(run, workspace, database))
    chosen = "" if run is None else find_run(directory, run).id
    if link_only:
        links = running(directory)
        if links is None:
            raise Misuse(f"no debugger is running on {directory}; start it with wink debug")
        echo(links.new(chosen))
        return

    def opened(link: str) -> None:
        echo(link)
        if no_open or not _has_browser() or not open_link(link):
            say("open this link in a browser on this machine; it works once")
        say("Ctrl-C ends it")

    with open_runs(database) if is_named(database) else nullcontext() as runs:
        try:
            serve(directory, on_ready=opened, run=chosen, port=port, actions=Actions.ours(runs))
        except OSError as error:
            reason = error.strerror or str(error)
            raise Misuse(f"cannot listen on port {port}: {reason}; choose another") from error


def _has_browser() -> bool:
    """Tell whether a browser would appear before the person who gave the command."""
    if any(os.environ.get(name) for name in ("SSH_CONNECTION", "SSH_TTY")):
        return False
    displays = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform != "linux" or any(os.environ.get(name) for name in displays)


# export


@examples(
    "wink export                   # the last run, to RUN.html",
    "wink export k3f -o run.html",
    "wink export k3f -o run.html --changed-only --max-size 5",
    more="The file opens from disk and makes no request.",
)
def export(
    run: Annotated[str | None, run_argument("Which run; by default the last.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write; by default the id of the run and .html, here.",
            show_default=False,
        ),
    ] = None,
    workspace: Workspace = Path(),
    max_size: Annotated[
        float, typer.Option(metavar="MB", min=0.1, help="The largest size of the file.")
    ] = 20.0,
    changed_only: Annotated[
        bool, typer.Option("--changed-only", help="Leave out files that the run did not change.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run to one HTML file, to keep or to share.

    Secrets are replaced. Look at the file before you share it: no rule finds every secret.
    """
    from weakincentives.debugger import export_run

    directory = existing_directory(workspace)
    found = last_run(directory) if run is None else find_run(directory, run)
    file = Path(f"{found.id}.html") if output is None else output
    if not file.parent.is_dir():
        raise Misuse(f"there is no directory {file.parent} to write {file.name} to")
    done = export_run(
        directory,
        found,
        file,
        max_size=round(max_size * 1_000_000),
        changed_only=changed_only,
        force=force,
    )
    if as_json:
        echo(json.dumps({"run": found.id, **asdict(done), "path": str(done.path)}))
        return
    files = counted(done.changed, "changed file")
    if done.unchanged:
        files += f" and {done.unchanged} that it did not change"
    echo(f"{done.path}: {size_of(done.size)}, {counted(done.calls, 'call')}, {files}")
    if done.note:
        say(f"left out: {done.note}")


# query

_WIDEST = 60
"""Characters of a cell in a table."""


def _complete_runs_or_all(context: typer.Context, incomplete: str) -> list[str]:
    every = ["all"] if "all".startswith(incomplete) else []
    return every + complete_runs(context, incomplete)


@examples(
    "wink query k3f \"select n, tool, outcome from calls where outcome != 'ok'\"",
    'wink query "select tool, count(*), avg(duration) from calls group by tool"',
    "wink query k3f \"select n from changes where patch like '%+port = 8080%'\" --json",
    "wink query --schema",
    more="Nothing is changed, and an agent can be running.",
)
def query(
    run: Annotated[
        str | None,
        run_argument(
            "A run, or all: every call on the directory, which is the default.",
            _complete_runs_or_all,
        ),
    ] = None,
    sql: Annotated[
        str | None,
        typer.Argument(
            metavar="SQL",
            help="One SELECT over the tables calls, changes and events.",
            show_default=False,
        ),
    ] = None,
    workspace: Workspace = Path(),
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many rows at most.")] = 10_000,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long the statement may take.")
    ] = 10.0,
    schema: Annotated[bool, typer.Option("--schema", help="Print the tables and exit.")] = False,
) -> None:
    """Query calls, changed files and events in SQL."""
    from weakincentives.debugger.query import query_run, schema_text

    if as_json and as_csv:
        raise Misuse("name only one of --json and --csv")
    if schema:
        echo(schema_text().removesuffix("\n"))
        return
    if sql is None:
        run, sql = None, run
    elif run is not None and " " in run:
        raise Misuse(f'name the run first: wink query {sql} "select ..."')
    if sql is None:
        raise Misuse('name a statement, such as "select * from calls"; --schema prints the tables')
    directory = existing_directory(workspace)
    only = None if run in (None, "all") else find_run(directory, run)
    try:
        answer = query_run(directory, sql, run=only, max_rows=limit, max_seconds=timeout)
    except QueryError as error:
        raise Misuse(str(error)) from error
    if as_csv:
        _print_csv(answer)
    else:
        for line in (_json if as_json else _table)(answer):
            echo(line)
    if answer.is_cut:
        say(f"these are the first {counted(limit, 'row')}; --limit shows more")


def _table(answer: Answer) -> Iterator[str]:
    cells = [[shortened(_text(value), _WIDEST) for value in row] for row in answer.rows]
    heads = [shortened(name, _WIDEST) for name in answer.columns]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    is_number = [
        all(isinstance(row[n], int | float | None) for row in answer.rows)
        for n in range(len(heads))
    ]
    for line in [heads, ["-" * width for width in widths], *cells]:
        padded = (
            f"{cell:>{width}}" if right else f"{cell:<{width}}"
            for cell, width, right in zip(line, widths, is_number, strict=True)
        )
        yield "  ".join(padded).rstrip()


def _json(answer: Answer) -> Iterator[str]:
    for row in answer.rows:
        yield json.dumps(dict(zip(answer.columns, map(_as_json, row), strict=True)))


def _as_json(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _text(value) if isinstance(value, bytes) else value


def _print_csv(answer: Answer) -> None:
    import csv
    from io import StringIO

    written = StringIO()
    csv.writer(written, lineterminator="\n").writerows(
        [answer.columns, *(map(_text, row) for row in answer.rows)]
    )
    if sys.stdout.isatty():
        echo(written.getvalue().removesuffix("\n"))
    else:  # exactly
        sys.stdout.write(written.getvalue())


def _text(value: Value) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return "" if value is None else str(value)
