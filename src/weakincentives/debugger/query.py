"""Calls, changes and events of runs as SQLite tables, for one read-only statement.

The database is in memory and has only the columns that the statement reads: counting calls does
not compare files.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.debugger.contents import change_kind
from weakincentives.errors import QueryError, SnapshotError
from weakincentives.runtime.at import outermost
from weakincentives.runtime.calls import Call, Calls, Run
from weakincentives.runtime.conversation import Message
from weakincentives.runtime.index import MESSAGES, RECORDS
from weakincentives.runtime.stores.saves import Saves
from weakincentives.serde.exact import current_name, plain

MAX_ROWS = 10_000
MAX_SECONDS = 10.0
_LONGEST = 64 << 20
"""Bytes of one value: a statement can build texts of any length."""
_BY_NAME = re.compile(r"\b(?:using|natural)\b", re.IGNORECASE)
"""Joins of which SQLite does not tell which columns they read."""
_STEPS = 10_000
"""Instructions of SQLite between two looks at the clock."""

Value: TypeAlias = str | int | float | bytes | None
Row: TypeAlias = tuple[Any, ...]


class Column(NamedTuple):
    name: str
    type: str
    meaning: str


def _table(*columns: tuple[str, str, str]) -> tuple[Column, ...]:
    return tuple(Column(*each) for each in columns)


SCHEMA = {
    "calls": _table(
        ("run", "TEXT", "the id of the run; NULL for a call outside of runs, such as an undo"),
        ("n", "INTEGER", "its number in the run, from 1"),
        ("name", "TEXT", "as other commands take it: k3f/2"),
        ("call_id", "TEXT", ""),
        ("tool", "TEXT", ""),
        ("arguments", "JSON", "as parsed; edited ones if a person edited them"),
        ("outcome", "TEXT", "committed, ok, rolled back, denied, refused, suspended, undone, ..."),
        ("turn", "INTEGER", "the model's turn that asked for it, from 1; NULL without a model"),
        ("nested_in", "INTEGER", "the n of the call that made it"),
        ("time", "REAL", "when it began, in unix seconds"),
        ("duration", "REAL", "seconds"),
        ("attempts", "INTEGER", "how often it ran"),
        ("result", "TEXT", "as the model saw it"),
        ("output", "JSON", "the value that the tool returned"),
        ("code", "TEXT", "the error code of a failure"),
        ("denied_by", "TEXT", "the policy that denied it"),
        ("notes", "JSON", "the notes of policies: who approved it"),
        ("conflicts", "JSON", "what others had changed when it was re-run"),
        ("rolled_back", "JSON", "what was undone when it failed"),
        ("not_rolled_back", "JSON", "what was not"),
        ("branch", "TEXT", "the branch that it changed; NULL for the directory"),
    ),
    "changes": _table(
        ("run", "TEXT", "as in calls"),
        ("n", "INTEGER", "as in calls"),
        ("name", "TEXT", "as in calls"),
        ("path", "TEXT", "the changed file"),
        ("origin", "TEXT", "where a moved file was; NULL for others"),
        ("kind", "TEXT", "added (a moved file, too), changed or deleted"),
        ("added", "INTEGER", "lines"),
        ("removed", "INTEGER", "lines"),
        ("binary", "INTEGER", "1 if it is no text"),
        ("note", "TEXT", "what the patch does not have, in words"),
        ("patch", "TEXT", "a patch for git apply"),
    ),
    "events": _table(
        ("run", "TEXT", "as in calls"),
        ("n", "INTEGER", "its place among the events of the run, from 1"),
        ("kind", "TEXT", "Message, PromptRendered, PromptExecuted, ContextCompacted, or your own"),
        ("time", "REAL", "when it was saved, in unix seconds"),
        ("after_call", "INTEGER", "the n of the last call recorded before it; 0 if none"),
        ("turn", "INTEGER", "how many turns the model had had, this one included"),
        ("role", "TEXT", "of a message: user, model or tool"),
        ("text", "TEXT", "of a message, a prompt or a summary"),
        ("data", "JSON", "all its fields"),
    ),
}
"""The columns of each table."""


def schema_text() -> str:
    """Return the tables as SQL, with what each column means."""
    return "\n".join(_created(name, columns) for name, columns in SCHEMA.items())


def _created(name: str, columns: Sequence[Column]) -> str:
    width = max(len(each.name) for each in columns)
    lines = [
        f"  {each.name:<{width}} {each.type + ('' if last else ','):<8}"
        + (f"  -- {each.meaning}" if each.meaning else "")
        for each in columns
        for last in [each is columns[-1]]
    ]
    body = "\n".join(line.rstrip() for line in lines)
    return f"CREATE TABLE {name} (\n{body}\n);\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The rows of a statement."""

    columns: tuple[str, ...]
    rows: list[Row]
    is_cut: bool
    """Whether there are more rows than asked for."""


def query_run(
    workspace: Path,
    sql: str,
    *,
    run: Run | None = None,
    max_rows: int = MAX_ROWS,
    max_seconds: float = MAX_SECONDS,
) -> Answer:
    """Return what one SELECT says about a run, or all runs and calls of a workspace.

    ``SCHEMA`` has the tables. Takes no lock: an agent may be running.

    Raises:
        QueryError: The statement is wrong, is not a SELECT, or takes too long.
    """
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        for name, columns in SCHEMA.items():
            # No type that SQLite would convert to: a JSON number stays a text.
            names = ", ".join(f"{c.name} {'TEXT' if c.type == 'JSON' else c.type}" for c in columns)
            database.execute(f"CREATE TABLE {name} ({names})")
        read = _guarded(database)
        _run(database, sql, 1, max_seconds)  # on empty tables: to learn what it reads
        if _BY_NAME.search(sql):
            read |= {(name, c.name) for name in SCHEMA for c in SCHEMA[name]}
        tables = _Tables(workspace, run, read)
        database.set_authorizer(None)
        for name in SCHEMA.keys() & {table for table, _ in read}:
            wanted = [c.name for c in SCHEMA[name] if (name, c.name) in read] or ["run"]
            marks = ", ".join("?" * len(wanted))
            into = f"INSERT INTO {name} ({', '.join(wanted)}) VALUES ({marks})"
            database.executemany(into, tables.rows(name, wanted))
        _guarded(database)
        columns, rows = _run(database, sql, max_rows + 1, max_seconds)
    return Answer(columns=columns, rows=rows[:max_rows], is_cut=len(rows) > max_rows)


# The statement

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


def _guarded(database: sqlite3.Connection) -> set[tuple[str, str]]:
    """Refuse everything but reading; returns the columns by table that statements read."""
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
    database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    # Their first use declares them, which is a write to SQLite.
    for name in ("json_each", "json_tree"):
        database.execute(f"SELECT * FROM {name}('[]')")
    read: set[tuple[str, str]] = set()

    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        is_allowed = action in _ALLOWED and second != "load_extension"
        if action == sqlite3.SQLITE_READ:
            read.add((first or "", second or ""))
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    database.set_authorizer(authorize)
    return read


def _run(
    database: sqlite3.Connection, sql: str, most: int, seconds: float
) -> tuple[tuple[str, ...], list[Row]]:
    """Return the columns of a statement, and at most so many rows."""
    until = SYSTEM_CLOCK.monotonic() + seconds

    def is_late() -> bool:
        return SYSTEM_CLOCK.monotonic() > until

    database.set_progress_handler(is_late, _STEPS)
    try:
        cursor = database.execute(sql)
        if cursor.description is None:
            raise QueryError("the statement is empty; write a SELECT")
        return tuple(each[0] for each in cursor.description), cursor.fetchmany(most)
    except (sqlite3.Error, sqlite3.Warning, UnicodeError, ValueError) as error:
        if is_late():
            text = f"the statement takes more than {seconds:g} seconds; narrow it down"
            raise QueryError(text) from error
        raise QueryError(_in_words(str(error))) from error
    finally:
        database.set_progress_handler(None, 0)


def _in_words(error: str) -> str:
    """Return an error of SQLite with what to do about it."""
    if "not authorized" in error or "authorization denied" in error:
        return "only reading is allowed: one SELECT over calls, changes and events"
    if "one statement" in error:
        return "only one statement is allowed"
    if found := re.search(r"no such table: (\S+)", error):
        return f"{error}; {_near(found[1], SCHEMA)}the tables are {', '.join(SCHEMA)}"
    if found := re.search(r"no such column: (\S+)", error):
        known = sorted({c.name for columns in SCHEMA.values() for c in columns})
        table, _, column = found[1].rpartition(".")
        shown = {table: SCHEMA[table]} if table in SCHEMA else SCHEMA
        names = "; ".join(
            f"{name} has {', '.join(c.name for c in columns)}" for name, columns in shown.items()
        )
        return f"{error}; {_near(column, known)}{names}"
    return f"{error}; `wink query --schema` prints the tables"


def _near(wrong: str, known: Iterable[str]) -> str:
    near = get_close_matches(wrong.strip("\"'"), list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


# The tables

_COMPARED = {"kind", "added", "removed", "binary", "note", "patch"}
"""The columns of ``changes`` that need the contents of files."""


class _Tables:
    """The rows of a run, or of all runs and calls of a workspace; only the columns read."""

    def __init__(self, workspace: Path, run: Run | None, read: Collection[tuple[str, str]]) -> None:
        compares = any(("changes", name) in read for name in _COMPARED)
        self._calls = Calls(workspace, detail=lambda path: compares)
        self._run = run
        self._runs = self._calls.runs if run is None else (run,)

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[Row]:
        """Yield the values of some columns of a table."""
        makers = {"calls": self._call_rows, "changes": self._changes, "events": self._events}
        for row in makers[table](columns):
            # A column that no row has is an error in this module, not NULL.
            yield tuple(_stored(row[column]) for column in columns)

    def _call_rows(self, columns: Collection[str]) -> Iterator[Mapping[str, object]]:
        turns: dict[tuple[str, str], int] = {}
        for run, events in self._all_events() if "turn" in columns else ():
            for event in events:
                if event.is_turn:
                    asked = event.fields["tool_calls"]
                    turns |= {(run.id, each["id"]): event.turn for each in asked}
        for call in self._found():
            run_id = "" if call.run is None else call.run.id
            row = {
                **_key(call),
                "call_id": call.call_id,
                "tool": call.tool,
                "outcome": call.outcome,
                "turn": turns.get((run_id, outermost(call).call_id)),
                "time": call.time,
                "branch": call.branch or None,
                **_recorded(call),
            }
            if call.record is None:
                row = defaultdict[str, object](lambda: None, row)
            elif "result" in columns:
                row["result"] = call.shown
            yield row

    def _changes(self, _: Collection[str]) -> Iterator[Mapping[str, object]]:
        for call in self._calls.with_files(self._found()):
            for each in call.files:
                yield {
                    **_key(call),
                    "path": each.path,
                    "origin": each.origin or None,
                    "kind": change_kind(each),
                    "added": each.added,
                    "removed": each.removed,
                    "binary": int(each.is_binary),
                    "note": each.note or None,
                    "patch": each.text,
                }

    def _found(self) -> list[Call]:
        if self._run is not None:
            return self._calls.of_run(self._run)
        found: list[Call] = []
        for run in self._runs:
            with suppress(OSError, SnapshotError):  # nothing was saved yet, or it is not ours
                found += self._calls.of_run(run)
        for branch in ("", *self._calls.branches):
            found += [each for each in self._calls.changed(branch) if each.run is None]
        return sorted(found, key=lambda call: (call.time, call.number))

    def _events(self, _: Collection[str]) -> Iterator[Mapping[str, object]]:
        for run, events in self._all_events():
            for n, event in enumerate(events, 1):
                fields = event.fields
                yield {
                    "run": run.id,
                    "n": n,
                    "kind": event.kind,
                    "time": event.time,
                    "after_call": event.after_call,
                    "turn": event.turn,
                    "role": fields.get("role"),
                    "text": fields.get("text", fields.get("summary")),
                    "data": _json(fields),
                }

    def _all_events(self) -> Iterator[tuple[Run, list[_Event]]]:
        for run in self._runs:
            try:
                yield run, list(_events_of(run))
            except (OSError, SnapshotError):
                if self._run is not None:
                    raise
                continue  # nothing was saved yet, or the file is not ours


def _key(call: Call) -> dict[str, object]:
    """Return what calls and changes have in common."""
    run, n = (None, None) if call.run is None else (call.run.id, call.number)
    return {"run": run, "n": n, "name": call.name}


def _recorded(call: Call) -> dict[str, Any]:
    """Return what only the record of a call has."""
    details = call.details
    if not details:
        return {}
    failure: dict[str, Any] = details["failure"] or {}
    return details | {
        "nested_in": None if call.outer is None else call.outer.number,
        "arguments": _json(call.arguments),
        "output": _json(details["value"]),
        "code": failure.get("code"),
        "denied_by": details["denied_by"] or None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """A value in a LOG slice, other than the record of a call."""

    kind: str
    time: float
    after_call: int
    turn: int
    is_turn: bool
    fields: Mapping[str, Any]


def _events_of(run: Run) -> Iterator[_Event]:
    """Yield the events of a run in the order in which they were saved."""
    calls = turn = 0
    for _, save in Saves(run.path).new():
        log = {current_name(name): values for name, (_, values) in save["log"].items()}
        # A message of the model is saved at once, with what came before it.
        for name, values in sorted(log.items(), key=lambda each: each[0] == MESSAGES):
            if name == RECORDS:
                calls += len(values)
                continue
            is_message, kind = name == MESSAGES, name.rpartition(":")[2]
            if kind == Message.__name__ and not is_message:
                kind = name  # of a user's own type
            for value in values:
                data = plain(value)
                fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {"value": data}
                is_turn = is_message and fields.get("role") == "model" and not fields.get("depth")
                turn += is_turn
                yield _Event(
                    kind=kind,
                    time=save["at"],
                    after_call=calls,
                    turn=turn,
                    is_turn=is_turn,
                    fields=fields,
                )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _stored(value: object) -> Value:
    """Return a value as SQLite takes it: lone surrogates are escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict | list | tuple):
        return _stored(_json(cast("object", value)))
    return cast("Value", value)
