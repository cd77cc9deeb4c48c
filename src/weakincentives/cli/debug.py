"""`wink debug`, `export`, `query`: a run in the browser, as a page to share, and as tables."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weakincentives.cli.common import (
    Misuse,
    Workspace,
    complete_runs,
    echo,
    examples,
    existing_directory,
    find_run,
    say,
    shortened,
)
from weakincentives.errors import QueryError
from weakincentives.text import counted

if TYPE_CHECKING:
    from weakincentives.debugger.query import Answer, Value

_PAGE = 'In the documentation: "Debugger".'
_QUERY_EXAMPLES = examples(
    "wink query k3f \"select n, tool, outcome from calls where outcome != 'ok'\"",
    'wink query "select tool, count(*), avg(duration) from calls group by tool"',
    "wink query k3f \"select n from changes where patch like '%+port = 8080%'\" --format json",
    "wink query --schema",
    more=f"Nothing is changed, and an agent may be running. {_PAGE}",
)

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run: a prefix of its id, or the letters at its end.",
        autocompletion=complete_runs,
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    app.command("query", epilog=_QUERY_EXAMPLES)(query)


# query

_WIDEST = 60
"""Characters of a cell in a table."""
Format = Literal["table", "json", "csv"]


def _complete_runs_or_all(context: typer.Context, incomplete: str) -> list[str]:
    every = ["all"] if "all".startswith(incomplete) else []
    return every + complete_runs(context, incomplete)


def query(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run, or all: every call on the directory, which is the default.",
            autocompletion=_complete_runs_or_all,
            show_default=False,
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
    form: Annotated[
        Format, typer.Option("--format", help="json prints one object per line.")
    ] = "table",
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many rows at most.")] = 10_000,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long the statement may take.")
    ] = 10.0,
    schema: Annotated[bool, typer.Option("--schema", help="Print the tables and exit.")] = False,
) -> None:
    """Ask about calls, changed files and events of runs in SQL; nothing is changed."""
    from weakincentives.debugger.query import query_run, schema_text

    if schema:
        echo(schema_text().removesuffix("\n"))
        return
    if sql is None:
        run, sql = None, run
    if sql is None:
        raise Misuse('name a statement, such as "select * from calls"; --schema prints the tables')
    directory = existing_directory(workspace)
    only = None if run in (None, "all") else find_run(directory, run)
    try:
        answer = query_run(directory, sql, run=only, max_rows=limit, max_seconds=timeout)
    except QueryError as error:
        raise Misuse(str(error)) from error
    if form == "csv":
        _print_csv(answer)
    else:
        for line in (_table if form == "table" else _json)(answer):
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
