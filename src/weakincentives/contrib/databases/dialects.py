"""How SQLite and PostgreSQL record the rows that calls change: tables and triggers of ours.

On SQLite, the call under way is the row of ``wink_call`` that is open: there is one writer at a
time, and the row is closed before the commit, so nobody else ever sees it. On PostgreSQL it is a
setting of the transaction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from weakincentives.contrib.databases.row_log import (
    CALLS,
    KEPT,
    NO_KEY,
    ROWS,
    SCHEMA,
    Column,
    Dialect,
    Image,
    Planned,
    Table,
)
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.errors import ResourceError

if TYPE_CHECKING:
    from weakincentives.contrib.databases.base import Work

_EVENTS = ("insert", "update", "delete")
_NEW, _CHANGED = "new rows", "changed rows"
_KEPT = (
    f"CREATE TABLE IF NOT EXISTS {KEPT} (session text NOT NULL, starts bigint NOT NULL, call_id"
    " text NOT NULL, tool text NOT NULL, redo text NOT NULL, files integer NOT NULL, later text NOT"
    " NULL, PRIMARY KEY (session, starts, call_id))"
)


_REPLACES = re.compile(r"\b(OR|ON\s+CONFLICT)\s+REPLACE\b|\bREPLACE\s+INTO\b", re.IGNORECASE)


def _call(work: Work) -> dict[str, Any]:
    return {
        "call_id": work.call_id,
        "tool": work.tool,
        "session": work.session_id,
        "workspace": work.workspace,
        "at": SYSTEM_CLOCK.time(),
        "undoes": json.dumps(work.undoes) if work.undoes else None,
    }


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


# SQLite


class SqliteDialect(Dialect):
    names_columns = True

    def wait(self, work: Work, session: str, patience: float) -> None:
        """A transaction is part of its process, and ends with it."""

    _always_replaces = False
    """Whether a constraint or trigger has REPLACE, so that any statement may remove rows by it."""

    def exists(self, work: Work) -> bool:
        found = work.ask(
            "SELECT name, sql FROM sqlite_master WHERE name = :name OR sql LIKE '%replace%'",
            name=CALLS,
        )
        self._always_replaces = any(_REPLACES.search(sql) for _, sql in found)
        return any(name == CALLS for name, _ in found)

    def replaces(self, statement: str) -> bool:
        return self._always_replaces or _REPLACES.search(statement) is not None

    def create(self, work: Work) -> None:
        self.exists(work)
        work.run(
            f"CREATE TABLE IF NOT EXISTS {CALLS} (number INTEGER PRIMARY KEY AUTOINCREMENT, call_id"
            " TEXT NOT NULL, tool TEXT NOT NULL, session_id TEXT NOT NULL, workspace TEXT NOT NULL,"
            " at REAL NOT NULL, undoes TEXT, is_open INTEGER, schema INTEGER)"
        )
        work.run(f"CREATE INDEX IF NOT EXISTS {CALLS}_id ON {CALLS} (call_id)")
        work.run(f"CREATE INDEX IF NOT EXISTS {CALLS}_open ON {CALLS} (is_open) WHERE is_open = 1")
        work.run(
            f"CREATE TABLE IF NOT EXISTS {ROWS} (number INTEGER PRIMARY KEY AUTOINCREMENT, of_call"
            f" INTEGER NOT NULL REFERENCES {CALLS}, row_table TEXT NOT NULL, row_key TEXT,"
            " row_before TEXT, row_after TEXT)"
        )
        work.run(f"CREATE INDEX IF NOT EXISTS {ROWS}_call ON {ROWS} (of_call)")
        work.run(_KEPT)

    def tables(self, work: Work) -> list[str]:
        found = work.ask(
            "SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table' AND name"
            " NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND name NOT IN (:calls, :rows, :kept)",
            calls=CALLS,
            rows=ROWS,
            kept=KEPT,
        )
        return [name for (name,) in found]

    def without_triggers(self, work: Work) -> list[str]:
        # SQLite crashes at triggers on the tables in which a virtual one keeps its rows.
        found = work.ask(
            "SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'virtual'"
        )
        return [name for (name,) in found]

    def named(self, work: Work, table: str) -> str:
        for name in self.tables(work):
            if name.lower() == table.lower():
                return name
        raise LookupError(table)

    def table(self, work: Work, name: str) -> Table:
        name = self.named(work, name)
        found = work.ask(
            'SELECT name, type, pk, hidden, "notnull" FROM pragma_table_xinfo(:name)', name=name
        )
        columns = [
            Column(
                name=name,
                type=kind,
                key=key,
                is_generated=hidden in (2, 3),
                may_be_null=not not_null,
            )
            for name, kind, key, hidden, not_null in found
            if hidden != 1
        ]
        return Table(name, _quoted(name), columns)

    def recorded(self, work: Work) -> dict[str, bool]:
        found = work.ask(
            "SELECT tbl_name, min(name LIKE 'wink\\_row\\_%' ESCAPE '\\') FROM sqlite_master WHERE"
            " type = 'trigger' AND name LIKE 'wink\\_%' ESCAPE '\\' GROUP BY tbl_name HAVING"
            f" count(*) = {len(_EVENTS)}"
        )
        return {table: bool(rows) for table, rows in found}

    def record(self, work: Work, table: Table) -> None:
        name = table.name
        self._drop(work, name)
        settable = [each for each in table.columns if not each.is_generated]
        key = [each.name for each in table.key]
        same = " AND ".join(f"OLD.{_quoted(each)} IS NEW.{_quoted(each)}" for each in key)
        before, after = (_sqlite_image(row, settable) for row in ("OLD", "NEW"))

        def note(row: str, before: str, after: str, where: str = "1") -> str:
            columns = [f"{row}.{_quoted(each.name)}" for each in table.key if each.may_be_null]
            made = self._note(name, _sqlite_key(row, key), before, after, where)
            if not columns:
                return made
            # A key with NULL may be that of several rows; the rowid is never NULL.
            is_null = " OR ".join(f"{each} IS NULL" for each in columns)
            keyed = f"({where}) AND NOT ({is_null})"
            return (
                f"{self._note(name, _sqlite_key(row, key), before, after, keyed)} "
                f"{self._note(name, 'NULL', 'NULL', _text(NO_KEY), f'({where}) AND ({is_null})')}"
            )

        self._trigger(work, "insert", name, note("NEW", "NULL", after))
        self._trigger(work, "delete", name, note("OLD", before, "NULL"))
        both = [
            note("OLD", before, after, same),
            note("OLD", before, "NULL", f"NOT ({same})"),
            note("NEW", "NULL", after, f"NOT ({same})"),
        ]
        self._trigger(work, "update", name, " ".join(both))

    def mention(self, work: Work, table: str) -> None:
        self._drop(work, table)
        for event in _EVENTS:
            what = _NEW if event == "insert" else _CHANGED
            known = (
                f"NOT EXISTS (SELECT 1 FROM {ROWS} r WHERE r.of_call = c.number AND r.row_table ="
                f" {_text(table)} AND r.row_after = {_text(what)} AND r.row_key IS NULL)"
            )
            note = self._note(table, "NULL", "NULL", _text(what), known)
            self._trigger(work, event, table, note, "other")

    def _note(self, table: str, key: str, before: str, after: str, where: str = "1") -> str:
        return (
            f"INSERT INTO {ROWS} (of_call, row_table, row_key, row_before, row_after) SELECT"
            f" c.number, {_text(table)}, {key}, {before}, {after} FROM {CALLS} c WHERE c.is_open ="
            f" 1 AND ({where});"
        )

    def _trigger(self, work: Work, event: str, table: str, body: str, kind: str = "row") -> None:
        name = _quoted(f"wink_{kind}_{event}_{table}")
        work.run(
            f"CREATE TRIGGER {name} AFTER {event.upper()} ON {_quoted(table)} BEGIN {body} END"
        )

    def _drop(self, work: Work, table: str) -> None:
        for kind in ("row", "other"):
            for event in _EVENTS:
                work.run(f"DROP TRIGGER IF EXISTS {_quoted(f'wink_{kind}_{event}_{table}')}")

    def begin(self, work: Work) -> None:
        work.ask(
            f"INSERT INTO {CALLS} (call_id, tool, session_id, workspace, at, undoes, is_open,"
            " schema) SELECT :call_id, :tool, :session, :workspace, :at, :undoes, 1, schema_version"
            " FROM pragma_schema_version",
            **_call(work),
        )

    def finish(self, work: Work) -> None:
        work.run(
            f"INSERT INTO {ROWS} (of_call, row_table, row_after) SELECT number, 'the database',"
            f" '{SCHEMA}' FROM {CALLS}, pragma_schema_version WHERE is_open = 1 AND schema <>"
            " schema_version"
        )
        work.run(f"UPDATE {CALLS} SET is_open = NULL, schema = NULL WHERE is_open = 1")

    def image(self, text: str) -> Image:
        return json.loads(text)

    def values(self, image: Image) -> Mapping[str, Any]:
        return {name: _sqlite_value(literal) for name, literal in image.items()}

    def present(self, work: Work, table: Table, key: str, names: Sequence[str]) -> Image | None:
        columns = [each for each in table.columns if each.name in names]
        where, parameters = self._where(table, key)
        found = work.ask(
            f"SELECT {_sqlite_image('t', columns)} FROM {table.sql} t WHERE {where}",
            **parameters,
        )
        return self.image(found[0][0]) if found else None

    def insert(self, work: Work, table: Table, row: Planned) -> None:
        assert row.target is not None
        columns = [each.name for each in table.settable(row.target, new=True)]
        names = ", ".join(map(_quoted, columns))
        places = ", ".join(f":v{n}" for n in range(len(columns)))
        work.ask(
            f"INSERT INTO {table.sql} ({names}) VALUES ({places})",
            **{f"v{n}": _sqlite_value(row.target[each]) for n, each in enumerate(columns)},
        )

    def update(self, work: Work, table: Table, row: Planned) -> None:
        assert row.target is not None
        columns = [each.name for each in table.settable(row.target, new=False)]
        sets = ", ".join(f"{_quoted(each)} = :v{n}" for n, each in enumerate(columns))
        values = {f"v{n}": _sqlite_value(row.target[each]) for n, each in enumerate(columns)}
        where, parameters = self._where(table, row.key)
        work.ask(f"UPDATE {table.sql} SET {sets} WHERE {where}", **values, **parameters)

    def delete(self, work: Work, table: Table, row: Planned) -> None:
        where, parameters = self._where(table, row.key)
        work.ask(f"DELETE FROM {table.sql} WHERE {where}", **parameters)

    def _where(self, table: Table, key: str) -> tuple[str, dict[str, Any]]:
        where = [f"{_quoted(each.name)} IS :k{n}" for n, each in enumerate(table.key)]
        values = {f"k{n}": _sqlite_value(each) for n, each in enumerate(json.loads(key))}
        return " AND ".join(where), values

    def defer(self, work: Work) -> Set[str]:
        work.run("PRAGMA defer_foreign_keys=1")
        return self.check(work)

    def check(self, work: Work) -> Set[str]:
        if work.ask("PRAGMA foreign_keys")[0][0]:
            return set()  # COMMIT checks what was deferred
        return {
            f"row {rowid} of {table} refers to nothing in {parent}"
            for table, rowid, parent, _ in work.ask("PRAGMA foreign_key_check")
        }


def _sqlite_literal(value: str) -> str:
    """Return an expression for a value as text, exactly; ``quote`` ends a text at its first NUL."""
    has_nul = f"typeof({value}) = 'text' AND instr(CAST({value} AS BLOB), X'00')"
    return f"CASE WHEN {has_nul} THEN 'T' || hex(CAST({value} AS BLOB)) ELSE quote({value}) END"


def _sqlite_key(row: str, names: Sequence[str]) -> str:
    return f"json_array({', '.join(_sqlite_literal(f'{row}.{_quoted(each)}') for each in names)})"


def _sqlite_image(row: str, columns: Sequence[Column]) -> str:
    """Return an expression for a row as JSON; ``json_object`` takes at most 63 columns."""
    parts = [
        f"{_text(json.dumps(each.name, ensure_ascii=False) + ':')} ||"
        f" json_quote({_sqlite_literal(f'{row}.{_quoted(each.name)}')})"
        for each in columns
    ]
    return "'{' || " + " || ',' || ".join(parts) + " || '}'"


def _sqlite_value(literal: str) -> Any:
    if literal == "NULL":
        return None
    if literal.startswith("'"):
        return literal[1:-1].replace("''", "'")
    if literal.startswith("X'"):
        return bytes.fromhex(literal[2:-1])
    if literal.startswith("T"):
        return bytes.fromhex(literal[1:]).decode("utf-8", "surrogateescape")
    try:
        return int(literal)
    except ValueError:
        return float(literal)


# PostgreSQL

# A row is the same text whatever the connection that reads it has set: undo compares these texts.
_FUNCTIONS = """
CREATE OR REPLACE FUNCTION {schema}.wink_image(given record) RETURNS json LANGUAGE plpgsql STABLE
    SET TimeZone = 'UTC' SET DateStyle = 'ISO, YMD' SET IntervalStyle = 'postgres'
    SET bytea_output = 'hex' SET extra_float_digits = 1
    AS $wink$ BEGIN RETURN row_to_json(given); END $wink$
""", """
CREATE OR REPLACE FUNCTION {schema}.wink_note_row() RETURNS trigger LANGUAGE plpgsql AS $wink$
DECLARE
    call_number text = current_setting('wink.call', true);
    was json; becomes json; old_key text; new_key text;
BEGIN
    IF call_number IS NULL OR call_number = '' THEN RETURN NULL; END IF;
    IF TG_OP <> 'INSERT' THEN
        was = {schema}.wink_image(OLD);
        SELECT CASE WHEN bool_and(was ->> name IS NOT NULL)
                THEN json_agg(was ->> name ORDER BY place)::text END INTO old_key
            FROM unnest(TG_ARGV) WITH ORDINALITY AS part(name, place) WHERE place > 1;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        becomes = {schema}.wink_image(NEW);
        SELECT CASE WHEN bool_and(becomes ->> name IS NOT NULL)
                THEN json_agg(becomes ->> name ORDER BY place)::text END INTO new_key
            FROM unnest(TG_ARGV) WITH ORDINALITY AS part(name, place) WHERE place > 1;
    END IF;
    IF coalesce(old_key, new_key) IS NULL THEN  -- a column of the key was renamed
        INSERT INTO {schema}.wink_row (of_call, row_table, row_after)
            VALUES (call_number::bigint, TG_ARGV[0], 'rows without a key');
        RETURN NULL;
    END IF;
    IF old_key = new_key THEN
        INSERT INTO {schema}.wink_row (of_call, row_table, row_key, row_before, row_after)
            VALUES (call_number::bigint, TG_ARGV[0], old_key, was::text, becomes::text);
        RETURN NULL;
    END IF;
    IF old_key IS NOT NULL THEN
        INSERT INTO {schema}.wink_row (of_call, row_table, row_key, row_before)
            VALUES (call_number::bigint, TG_ARGV[0], old_key, was::text);
    END IF;
    IF new_key IS NOT NULL THEN
        INSERT INTO {schema}.wink_row (of_call, row_table, row_key, row_after)
            VALUES (call_number::bigint, TG_ARGV[0], new_key, becomes::text);
    END IF;
    RETURN NULL;
END $wink$
""", """
CREATE OR REPLACE FUNCTION {schema}.wink_note_table() RETURNS trigger LANGUAGE plpgsql AS $wink$
DECLARE
    call_number text = current_setting('wink.call', true);
BEGIN
    IF call_number IS NULL OR call_number = '' THEN RETURN NULL; END IF;
    IF TG_OP = 'TRUNCATE' THEN
        {truncated}
    END IF;
    INSERT INTO {schema}.wink_row (of_call, row_table, row_after)
        SELECT call_number::bigint, TG_ARGV[0], TG_ARGV[1] WHERE NOT EXISTS (
            SELECT 1 FROM {schema}.wink_row WHERE of_call = call_number::bigint
            AND row_table = TG_ARGV[0] AND row_key IS NULL AND row_after = TG_ARGV[1]);
    RETURN NULL;
END $wink$
""", """
CREATE OR REPLACE FUNCTION {schema}.wink_note_truncate() RETURNS trigger LANGUAGE plpgsql AS $wink$
DECLARE
    call_number text = current_setting('wink.call', true);
BEGIN
    IF call_number IS NULL OR call_number = '' THEN RETURN NULL; END IF;
    {truncated}
    EXECUTE 'INSERT INTO {schema}.wink_row (of_call, row_table, row_key, row_before)
        SELECT $1, $2[1], (SELECT json_agg(image ->> name ORDER BY place)::text
            FROM unnest($2) WITH ORDINALITY AS part(name, place) WHERE place > 1), image::text
        FROM (SELECT {schema}.wink_image(wink_it) AS image FROM '
        || (SELECT CASE relkind WHEN 'r' THEN 'ONLY ' ELSE '' END FROM pg_class
            WHERE oid = TG_RELID) || TG_RELID::regclass || ' wink_it) AS gone'
        USING call_number::bigint,
        ARRAY(SELECT each FROM unnest(TG_ARGV) WITH ORDINALITY AS part(each, n) ORDER BY n);
    RETURN NULL;
END $wink$
"""  # fmt: skip


_TRUNCATED = """
    -- TRUNCATE locks the table as a change of the schema does: `finish` tells them apart.
    PERFORM set_config('wink.truncated', concat_ws(',', current_setting('wink.truncated', true),
        TG_RELID::oid::text, (SELECT string_agg(relid::oid::text, ',')
            FROM pg_partition_tree(TG_RELID))), true);
"""


class PostgresDialect(Dialect):
    while_under_way = (
        "FROM (SELECT pg_advisory_xact_lock_shared(hashtextextended(CAST(:session AS text), 0)))"
        " AS under_way"
    )

    def wait(self, work: Work, session: str, patience: float) -> None:
        work.run(f"SET LOCAL lock_timeout = {max(1, int(1000 * patience))}")
        try:
            work.ask(
                "SELECT CAST(pg_advisory_xact_lock(hashtextextended(CAST(:session AS text), 0)) AS"
                " text)",
                session=session,
            )
        except Exception as error:
            if not work.lost_race:
                raise
            raise ResourceError(
                "the last call of this session is still under way in the database, although its "
                "process is gone: try again when it has ended"
            ) from error

    schema = ""
    """Where our tables are, whatever the search path of the connection."""
    name = ""
    """An expression for the name under which the rows of ``c`` in ``n`` are recorded."""

    def exists(self, work: Work) -> bool:
        found = work.ask(
            "SELECT quote_ident(n.nspname) FROM pg_class c JOIN pg_namespace n ON n.oid ="
            " c.relnamespace WHERE c.relname = :name AND c.relkind = 'r' AND"
            " has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'INSERT') ORDER"
            " BY (c.oid = to_regclass(:name)) IS TRUE DESC, c.oid LIMIT 1",
            name=CALLS,
        )
        if found:
            self._are_in(found[0][0])
        return bool(found)

    def _are_in(self, schema: str) -> None:
        self.schema = schema
        self.calls, self.rows, self.kept = (f"{schema}.{name}" for name in (CALLS, ROWS, KEPT))
        self.name = (
            f"(CASE WHEN quote_ident(n.nspname) <> {_text(schema)} THEN quote_ident(n.nspname) ||"
            " '.' ELSE '' END || quote_ident(c.relname))"
        )

    def create(self, work: Work) -> None:
        if not self.exists(work):
            self._are_in(work.ask("SELECT quote_ident(current_schema())")[0][0])
        work.run(
            f"CREATE TABLE IF NOT EXISTS {self.calls} (number bigint GENERATED ALWAYS AS IDENTITY"
            " PRIMARY KEY, call_id text NOT NULL, tool text NOT NULL, session_id text NOT NULL,"
            " workspace text NOT NULL, at double precision NOT NULL, undoes text)"
        )
        work.run(f"CREATE INDEX IF NOT EXISTS {CALLS}_id ON {self.calls} (call_id)")
        work.run(
            f"CREATE TABLE IF NOT EXISTS {self.rows} (number bigint GENERATED ALWAYS AS IDENTITY"
            f" PRIMARY KEY, of_call bigint NOT NULL REFERENCES {self.calls}, row_table text NOT"
            " NULL, row_key text, row_before text, row_after text)"
        )
        work.run(f"CREATE INDEX IF NOT EXISTS {ROWS}_call ON {self.rows} (of_call)")
        work.run(_KEPT.replace(KEPT, self.kept))
        for function in _FUNCTIONS:
            made = function.replace("{truncated}", _TRUNCATED)
            work.run(made.replace("{schema}", self.schema))

    def tables(self, work: Work) -> list[str]:
        found = work.ask(
            f"SELECT {self.name} FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND n.nspname NOT IN"
            " ('pg_catalog', 'information_schema') AND c.relname NOT IN (:calls, :rows, :kept)",
            calls=CALLS,
            rows=ROWS,
            kept=KEPT,
        )
        return [name for (name,) in found]

    def without_triggers(self, work: Work) -> list[str]:
        found = work.ask(
            f"SELECT {self.name} FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE c.relkind = 'f'"
        )
        return [name for (name,) in found]

    def named(self, work: Work, table: str) -> str:
        for place in ("to_regclass(quote_ident(:table))", "to_regclass(:table)"):
            found = work.ask(
                f"SELECT {self.name} FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
                f" WHERE c.oid = {place}",
                table=table,
            )
            if found:
                return found[0][0]
        raise LookupError(table)

    def _find(self, work: Work, name: str) -> tuple[int, str]:
        """Return the table that is recorded under a name: its oid, and its name in statements."""
        found = work.ask(
            "SELECT CAST(c.oid AS bigint), quote_ident(n.nspname) || '.' || quote_ident(c.relname)"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN"
            f" ('r', 'p') AND {self.name} = :name",
            name=name,
        )
        if not found:
            raise LookupError(name)
        return found[0][0], found[0][1]

    def table(self, work: Work, name: str) -> Table:
        # In full: a table can have the name of a type, such as ``line``.
        oid, sql = self._find(work, name)
        found = work.ask(
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod), coalesce(array_position("
            "CAST(i.indkey AS int2[]), a.attnum) + 1, 0), a.attgenerated <> '', a.attidentity = 'a'"
            " FROM pg_attribute a LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND"
            " i.indisprimary WHERE a.attrelid = CAST(:oid AS bigint) AND a.attnum > 0 AND NOT"
            " a.attisdropped ORDER BY a.attnum",
            oid=oid,
        )
        columns = [
            Column(name=name, type=kind, key=key, is_generated=generated, is_always_identity=always)
            for name, kind, key, generated, always in found
        ]
        return Table(name, sql, columns)

    def recorded(self, work: Work) -> dict[str, bool]:
        found = work.ask(
            f"SELECT {self.name}, t.tgname = 'wink_row' FROM pg_trigger t JOIN pg_class c ON c.oid"
            " = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE t.tgname IN"
            " ('wink_row', 'wink_other_new', 'wink_other_changed') AND t.tgenabled <> 'D'"
        )
        return {str(table): bool(rows) for table, rows in found}

    def record(self, work: Work, table: Table) -> None:
        self._drop(work, table.sql)
        key = [each.name for each in table.key]
        arguments = ", ".join(map(_text, [table.name, *key]))
        work.run(
            f"CREATE TRIGGER wink_row AFTER INSERT OR UPDATE OR DELETE ON {table.sql} FOR EACH ROW"
            f" EXECUTE FUNCTION {self.schema}.wink_note_row({arguments})"
        )
        work.run(
            f"CREATE TRIGGER wink_truncate BEFORE TRUNCATE ON {table.sql} FOR EACH STATEMENT"
            f" EXECUTE FUNCTION {self.schema}.wink_note_truncate({arguments})"
        )

    def mention(self, work: Work, table: str) -> None:
        _, sql = self._find(work, table)
        self._drop(work, sql)
        for name, events, each, what in (
            ("new", "INSERT", "ROW", _NEW),
            ("changed", "UPDATE OR DELETE", "ROW", _CHANGED),
            ("truncate", "TRUNCATE", "STATEMENT", _CHANGED),
        ):
            work.run(
                f"CREATE TRIGGER wink_other_{name} AFTER {events} ON {sql} FOR EACH {each}"
                f" EXECUTE FUNCTION {self.schema}.wink_note_table({_text(table)},"
                f" {_text(what)})"
            )

    def _drop(self, work: Work, sql: str) -> None:
        for name in (
            "wink_row",
            "wink_truncate",
            "wink_other_new",
            "wink_other_changed",
            "wink_other_truncate",
        ):
            work.run(f"DROP TRIGGER IF EXISTS {name} ON {sql}")

    def begin(self, work: Work) -> None:
        work.ask(
            f"WITH made AS (INSERT INTO {self.calls} (call_id, tool, session_id, workspace, at,"
            " undoes)"
            " VALUES (:call_id, :tool, :session, :workspace, :at, :undoes) RETURNING number) SELECT"
            " set_config('wink.call', CAST(number AS text), true) FROM made",
            **_call(work),
        )

    def finish(self, work: Work) -> None:
        # A table whose definition is changed stays locked until the end of the transaction.
        work.run(
            f"INSERT INTO {self.rows} (of_call, row_table, row_after) SELECT CAST(current_setting("
            f"'wink.call') AS bigint), coalesce({self.name}, 'a table that is"
            f" gone'), '{SCHEMA}' FROM (SELECT DISTINCT relation FROM pg_locks WHERE locktype ="
            " 'relation' AND pid = pg_backend_pid() AND mode IN ('AccessExclusiveLock',"
            " 'ExclusiveLock', 'ShareRowExclusiveLock', 'ShareLock')) l LEFT JOIN pg_class c ON"
            " c.oid = l.relation LEFT JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid"
            " IS NULL OR (c.relkind IN ('r', 'p', 'v', 'm') AND"
            " c.relpersistence <> 't' AND NOT coalesce(CAST(c.oid AS text) = ANY(string_to_array("
            "current_setting('wink.truncated', true), ',')), false))"
        )

    def image(self, text: str) -> Image:
        # Numbers as they are written: a float would round them.
        return json.loads(text, parse_float=_Number, parse_int=_Number)

    def values(self, image: Image) -> Mapping[str, Any]:
        return {name: _plain(each) for name, each in image.items()}

    def present(self, work: Work, table: Table, key: str, names: Sequence[str]) -> Image | None:
        where, parameters = self._where(table, key)
        found = work.ask(
            # A column called as the table is here would be taken for it.
            f"SELECT CAST({self.schema}.wink_image(wink_it) AS text) FROM {table.sql} wink_it"
            f" WHERE {where}",
            **parameters,
        )
        if not found:
            return None
        image = self.image(found[0][0])
        return {name: image[name] for name in names}

    def insert(self, work: Work, table: Table, row: Planned) -> None:
        assert row.target is not None
        columns = [_quoted(each.name) for each in table.settable(row.target, new=True)]
        names, values = ", ".join(columns), ", ".join(f"r.{each}" for each in columns)
        work.ask(
            f"INSERT INTO {table.sql} ({names}) OVERRIDING SYSTEM VALUE SELECT {values} FROM"
            f" json_populate_record(CAST(NULL AS {table.sql}), CAST(:image AS json)) r",
            image=row.text,
        )

    def update(self, work: Work, table: Table, row: Planned) -> None:
        assert row.target is not None
        columns = [_quoted(each.name) for each in table.settable(row.target, new=False)]
        names, values = ", ".join(columns), ", ".join(f"r.{each}" for each in columns)
        where, parameters = self._where(table, row.key)
        work.ask(
            f"UPDATE {table.sql} wink_it SET ({names}) = (SELECT {values} FROM"
            f" json_populate_record(CAST(NULL AS {table.sql}), CAST(:image AS json)) r) WHERE"
            f" {where}",
            image=row.text,
            **parameters,
        )

    def delete(self, work: Work, table: Table, row: Planned) -> None:
        where, parameters = self._where(table, row.key)
        work.ask(f"DELETE FROM {table.sql} wink_it WHERE {where}", **parameters)

    def _where(self, table: Table, key: str) -> tuple[str, dict[str, Any]]:
        where = [
            f"wink_it.{_quoted(each.name)} = CAST(CAST(:k{n} AS text) AS {each.type})"
            for n, each in enumerate(table.key)
        ]
        return " AND ".join(where), {f"k{n}": each for n, each in enumerate(json.loads(key))}

    def defer(self, work: Work) -> Set[str]:
        work.run("SET CONSTRAINTS ALL DEFERRED")
        return set()

    def check(self, work: Work) -> Set[str]:
        work.run("SET CONSTRAINTS ALL IMMEDIATE")
        return set()


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


def _plain(value: Any) -> Any:
    if isinstance(value, _Number):
        try:
            return int(value)
        except ValueError:
            return float(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}  # pyright: ignore
    return value
