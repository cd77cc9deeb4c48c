"""What calls changed in the rows of a database, kept in small tables of ours in it, and undone.

Triggers write a record for each row that a call changes, in the call's own transaction: which
driver or ORM makes the change does not matter. What others change is not recorded; it costs them
one look into an empty index. Undoing compares every row with what the calls left.
"""
# The classes of this package are one mechanism:
# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.errors import ResourceError, RowUndoRefused
from weakincentives.runtime.rows import CallRows, KeptCall, RowChange, UndoneRows

if TYPE_CHECKING:
    from weakincentives.contrib.databases.base import Database, Work

CALLS, ROWS, KEPT = "wink_call", "wink_row", "wink_kept"
Image: TypeAlias = Mapping[str, Any]
"""A row: a text for the value of each column, as its database has written it."""
_MOST_ROUNDS = 4
_AT_ONCE = 500
"""How many ids a statement names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    type: str = ""
    key: int = 0
    """Its place in the primary key, from 1; 0 outside of it."""
    is_generated: bool = False
    may_be_null: bool = False
    is_always_identity: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """A row that a call changed, as a trigger wrote it."""

    table: str
    key: str
    """The values of its primary key, as JSON text; empty for what cannot be undone."""
    before: str | None
    after: str | None
    call: int = 0
    """The number of the call's transaction."""


@dataclass(slots=True)
class Planned:
    """A row to undo."""

    table: str
    key: str
    present: Image | None
    target: Image | None
    text: str | None
    """The target as it was recorded."""

    @property
    def name(self) -> str:
        return row_name(self.table, self.key)


class Dialect(ABC):
    """How one kind of database records rows and puts them back."""

    calls, rows, kept = CALLS, ROWS, KEPT
    """The names of our tables, in statements."""
    names_columns = False
    """Whether a trigger records just the columns that the table had when it was created."""
    while_under_way = ""
    """The end of a SELECT in a call's transaction, for whose end ``wait`` then waits."""

    @abstractmethod
    def wait(self, work: Work, session: str, patience: float) -> None:
        """Wait until no transaction of a session's calls is under way; that of a killed one ends.

        Raises:
            ResourceError: One of them goes on for so many seconds.
        """

    def replaces(self, statement: str) -> bool:
        """Whether a statement may remove rows of which triggers are told on request only."""
        return False

    @abstractmethod
    def exists(self, work: Work) -> bool:
        """Whether the database has our tables."""

    @abstractmethod
    def create(self, work: Work) -> None:
        """Create our tables, unless they are there."""

    @abstractmethod
    def tables(self, work: Work) -> list[str]:
        """Return the names of its tables, without ours."""

    @abstractmethod
    def without_triggers(self, work: Work) -> list[str]:
        """Return the names of virtual and foreign tables."""

    @abstractmethod
    def named(self, work: Work, table: str) -> str:
        """Return the name under which a table is recorded; raises LookupError if there is none."""

    @abstractmethod
    def table(self, work: Work, name: str) -> Table:
        """Return the table that is recorded under a name."""

    @abstractmethod
    def record(self, work: Work, table: Table) -> None:
        """Create the triggers that record the rows of a table, in place of others of ours."""

    @abstractmethod
    def mention(self, work: Work, table: str) -> None:
        """Create the triggers that only note that a call changed a table."""

    @abstractmethod
    def recorded(self, work: Work) -> dict[str, bool]:
        """Return the tables with triggers of ours, and whether they record rows."""

    @abstractmethod
    def begin(self, work: Work) -> None:
        """Note the call whose transaction has begun."""

    @abstractmethod
    def finish(self, work: Work) -> None:
        """Note, before its end, what the transaction did that no trigger sees."""

    @abstractmethod
    def image(self, text: str) -> Image:
        """Return a recorded row."""

    @abstractmethod
    def values(self, image: Image) -> Mapping[str, Any]:
        """Return the values of a row, for people and programs."""

    @abstractmethod
    def present(self, work: Work, table: Table, key: str, names: Sequence[str]) -> Image | None:
        """Return a row as it is now, or None; only some of its columns."""

    @abstractmethod
    def insert(self, work: Work, table: Table, row: Planned) -> None: ...

    @abstractmethod
    def update(self, work: Work, table: Table, row: Planned) -> None: ...

    @abstractmethod
    def delete(self, work: Work, table: Table, row: Planned) -> None: ...

    @abstractmethod
    def defer(self, work: Work) -> Set[str]:
        """Have constraints checked at the end, those that allow it; returns ``check``."""

    @abstractmethod
    def check(self, work: Work) -> Set[str]:
        """Check what was deferred; returns the broken foreign keys that the database tolerates."""


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    """The name under which its rows are recorded."""
    sql: str
    """The same in a statement."""
    columns: Sequence[Column]

    @property
    def key(self) -> list[Column]:
        return sorted((each for each in self.columns if each.key), key=lambda each: each.key)

    @property
    def names(self) -> set[str]:
        return {each.name for each in self.columns}

    def settable(self, image: Image, *, new: bool) -> list[Column]:
        """Return the columns of a recorded row that a statement can give a value."""
        return [
            each
            for each in self.columns
            if each.name in image
            and not each.is_generated
            and (new or not (each.key or each.is_always_identity))
        ]


@dataclass
class RowLog:
    """The calls that changed a database, and their rows.

    Shared by a database and its views.
    """

    dialect: Dialect
    is_there: bool | None = None
    """Whether the database has our tables; None before the first look."""
    noted: dict[Path, str] = field(default_factory=dict[Path, str])
    """The workspaces that know of the database, and their identities."""

    # In the transaction of a call

    def begin(self, work: Work, workspace: Callable[[], str]) -> bool:
        """Note the call whose transaction has begun, if that was requested."""
        if self.is_there is None:
            self.is_there = self.dialect.exists(work)
        if self.is_there:
            work.workspace = workspace()
            self.dialect.begin(work)
        return self.is_there

    def note_undoes(self, work: Work) -> None:
        """Note that a call under way undoes others."""
        work.ask(
            f"UPDATE {self.dialect.calls} SET undoes = :undoes WHERE call_id = :call_id AND number"
            f" = (SELECT max(number) FROM {self.dialect.calls} WHERE call_id = :call_id)",
            undoes=json.dumps(work.undoes),
            call_id=work.call_id,
        )

    def finish(self, work: Work, workspace: Callable[[], str]) -> None:
        if not work.workspace and (found := workspace()):  # it was opened by the call
            work.ask(
                f"UPDATE {self.dialect.calls} SET workspace = :workspace WHERE call_id = :call_id"
                " AND number ="
                f" (SELECT max(number) FROM {self.dialect.calls} WHERE call_id = :call_id)",
                workspace=found,
                call_id=work.call_id,
            )
        kept = None if work.keep is None else work.keep()
        if kept is not None:
            # What is saved meanwhile is no longer needed: there is one row for a session.
            work.ask(
                f"DELETE FROM {self.dialect.kept} WHERE session = :session AND (starts < :saved"
                " OR :saved = 0)",
                session=kept.session,
                saved=kept.saved,
            )
            work.ask(
                f"INSERT INTO {self.dialect.kept} (session, starts, call_id, tool, redo, files,"
                " later) SELECT"
                " CAST(:session AS text), CAST(:starts AS bigint), CAST(:call_id AS text), CAST("
                ":tool AS text), CAST(:redo AS text), CAST(:files AS integer), CAST(:later AS text)"
                f" {self.dialect.while_under_way}",
                session=kept.session,
                starts=kept.at,
                call_id=kept.call_id,
                tool=kept.tool,
                redo=kept.redo,
                files=int(kept.files),
                later=json.dumps(kept.later),
            )
        self.dialect.finish(work)

    def kept(self, database: Database, session: str) -> list[KeptCall]:
        # The server may still be carrying out the last COMMIT of a process that was killed. What
        # the next transaction sees is later.
        with _at_work(database, read_only=True) as work:
            self.dialect.wait(work, session, database.patience)
        with _at_work(database, read_only=True) as work:
            if not self._is_there(work):
                return []
            found = work.ask(
                f"SELECT starts, call_id, tool, redo, files, later FROM {self.dialect.kept} WHERE"
                " session ="
                " :session ORDER BY starts",
                session=session,
            )
            return [
                KeptCall(
                    session=session,
                    at=int(at),
                    saved=0,
                    call_id=call_id,
                    tool=tool,
                    redo=redo,
                    files=bool(files),
                    later=tuple(json.loads(later)),
                )
                for at, call_id, tool, redo, files, later in found
            ]

    def settle(self, database: Database, kept: KeptCall) -> None:
        with _at_work(database) as work:
            self._is_there(work)
            work.ask(
                f"DELETE FROM {self.dialect.kept} WHERE session = :session AND starts = :starts"
                " AND call_id ="
                " :call_id",
                session=kept.session,
                starts=kept.at,
                call_id=kept.call_id,
            )

    def records_every_table(self, database: Database) -> bool:
        with _at_work(database, read_only=True) as work:
            return self._is_there(work) and self.dialect.recorded(work).keys() >= set(
                self.dialect.tables(work)
            )

    # On request

    def create(self, database: Database, tables: Sequence[str] = ()) -> None:
        with _at_work(database) as work:
            self.dialect.create(work)
            wanted = {self._named(work, each): None for each in tables}
            for each in wanted:
                table = self.dialect.table(work, each)
                if not table.key:
                    raise ResourceError(
                        f"the rows of {each} cannot be undone: it has no primary key. Add one, or "
                        "leave it out"
                    )
                self.dialect.record(work, table)
            if wanted:
                known = self.dialect.recorded(work)
                for each in self.dialect.tables(work):
                    if each not in known:
                        self.dialect.mention(work, each)
        self.is_there = True

    def _named(self, work: Work, table: str) -> str:
        try:
            return self.dialect.named(work, table)
        except LookupError:
            raise ResourceError(
                f"there is no table {table!r}: create it, and then call track()"
            ) from None

    # Looking

    def calls(self, database: Database) -> list[CallRows]:
        """Return the calls that changed the database, oldest first, without their rows."""
        with _at_work(database, read_only=True) as work:
            if not self._is_there(work):
                return []
            here = database.workspace
            where = "WHERE workspace = :here OR undoes IS NOT NULL" if here else ""
            found = work.ask(
                "SELECT call_id, tool, workspace, at, undoes, (SELECT count(*) FROM"
                f" {self.dialect.rows} r WHERE"
                f" r.of_call = c.number) FROM {self.dialect.calls} c {where} ORDER BY number",
                **({"here": here} if here else {}),
            )
        calls: list[CallRows] = []
        known: set[str] = set()
        for call_id, tool, workspace, at, text, count in found:
            undoes = tuple(json.loads(text or "[]"))
            if here in ("", workspace) or not known.isdisjoint(undoes):
                known.add(call_id)
                calls.append(CallRows(call_id, tool, at=at, undoes=undoes, count=count))
        return calls

    def changes(self, database: Database, call_ids: Iterable[str]) -> dict[str, list[RowChange]]:
        """Return the rows that calls changed, by call."""
        with _at_work(database, read_only=True) as work:
            if not self._is_there(work):
                return {}
            return {
                call_id: self._net(records)
                for call_id, number in self._numbers(work, call_ids).items()
                if (records := self._records(work, [number]))
            }

    def _net(self, records: Sequence[Record]) -> list[RowChange]:
        """Return what records come to: one change for each row."""
        of_rows: dict[tuple[str, str], list[Record]] = {}
        found: list[RowChange] = []
        for each in records:
            if not each.key:
                found.append(RowChange(each.table, (), note=each.after or "not tracked"))
            else:
                of_rows.setdefault((each.table, each.key), []).append(each)
        for (table, key), changes in of_rows.items():
            before, after = _ends(changes)
            if before != after:
                key_of = tuple(self._key_values(key))
                found.append(RowChange(table, key_of, self._values(before), self._values(after)))
        return found

    def _values(self, text: str | None) -> Mapping[str, Any] | None:
        return None if text is None else self.dialect.values(self.dialect.image(text))

    def _key_values(self, key: str) -> Iterable[Any]:
        return self.dialect.values({str(n): v for n, v in enumerate(json.loads(key))}).values()

    def has(self, database: Database, call_id: str) -> bool:
        """Whether a call has committed in the database, and is not undone."""
        with _at_work(database, read_only=True) as work:
            if not self._is_there(work):
                return False
            number = self._numbers(work, [call_id]).get(call_id)
            if number is None:
                return False
            undoes = (
                f"SELECT undoes FROM {self.dialect.calls} WHERE number > {number} AND undoes IS NOT"
                " NULL"
            )
            return not any(call_id in json.loads(each) for (each,) in work.ask(undoes))

    def forget(self, database: Database, seconds: float) -> int:
        """Delete the records of calls older than so many seconds; returns how many calls."""
        oldest = SYSTEM_CLOCK.time() - seconds
        with _at_work(database) as work:
            if not self._is_there(work):
                return 0
            old = f"SELECT number FROM {self.dialect.calls} WHERE at < :oldest"
            count = work.ask(
                f"SELECT count(*) FROM {self.dialect.calls} WHERE at < :oldest", oldest=oldest
            )
            work.ask(f"DELETE FROM {self.dialect.rows} WHERE of_call IN ({old})", oldest=oldest)
            work.ask(f"DELETE FROM {self.dialect.calls} WHERE at < :oldest", oldest=oldest)
            return int(count[0][0])

    def _is_there(self, work: Work) -> bool:
        return self.dialect.exists(work)

    def _numbers(self, work: Work, call_ids: Iterable[str]) -> dict[str, int]:
        """Return the newest transaction of each call."""
        found: dict[str, int] = {}
        ids = list(dict.fromkeys(call_ids))
        for start in range(0, len(ids), _AT_ONCE):
            some = {f"id{n}": each for n, each in enumerate(ids[start : start + _AT_ONCE])}
            names = ", ".join(f":{name}" for name in some)
            sql = (
                f"SELECT call_id, max(number) FROM {self.dialect.calls} WHERE call_id IN ({names})"
            )
            found.update((a, int(b)) for a, b in work.ask(f"{sql} GROUP BY call_id", **some))
        return found

    def _records(self, work: Work, numbers: Iterable[int]) -> list[Record]:
        listed = ", ".join(map(str, sorted(numbers)))
        if not listed:
            return []
        rows = work.ask(
            f"SELECT row_table, row_key, row_before, row_after, of_call FROM {self.dialect.rows}"
            " WHERE of_call"
            f" IN ({listed}) ORDER BY number"
        )
        return [
            Record(table, key or "", before, after, int(call))
            for table, key, before, after, call in rows
        ]

    # Undoing

    def undo(
        self,
        database: Database,
        call_ids: Sequence[str],
        *,
        call_id: str,
        force: bool = False,
        dry_run: bool = False,
    ) -> UndoneRows:
        """Undo the rows of calls, in a transaction that is recorded itself."""
        until = SYSTEM_CLOCK.monotonic() + database.patience
        while True:
            works: list[Work] = []
            try:
                with _at_work(database, call_id, call_ids, works=works) as work:
                    found = UndoneRows()
                    if self._is_there(work):
                        found = _Undo(self, work).perform(call_ids, force=force)
                    if dry_run or not found.changes:
                        raise _WithoutARecord(found)
                    return found
            except _WithoutARecord as done:
                return done.found
            except RowUndoRefused:
                raise
            except Exception as error:
                if works and works[0].lost_race and SYSTEM_CLOCK.monotonic() < until:
                    continue
                raise RowUndoRefused(f"the database refuses it: {_line(error)}") from error


class _WithoutARecord(Exception):
    """Rolls back what was only tried, or has changed nothing."""

    def __init__(self, found: UndoneRows) -> None:
        super().__init__()
        self.found = found


@dataclass
class _Undo:
    log: RowLog
    work: Work
    tables: dict[str, Table] = field(default_factory=dict[str, Table])

    def perform(self, call_ids: Sequence[str], *, force: bool) -> UndoneRows:
        log, work = self.log, self.work
        numbers = log._numbers(work, call_ids)
        records = log._records(work, numbers.values())
        notes = [*_not_undone(records), *self._unwatched()]
        planned, left = self._plan([each for each in records if each.key], force=force)
        notes += [f"row {name} has changed since, and stays" for name in left]
        if planned:
            broken = log.dialect.defer(work)
            work.run("SAVEPOINT wink_plan")
            try:
                self._apply(planned)
            except RowUndoRefused:  # rows wait for each other, such as two with swapped names
                work.run("ROLLBACK TO SAVEPOINT wink_plan")
                self._retrace(records, planned)
                self._apply(self._different(planned))
            work.run("RELEASE SAVEPOINT wink_plan")
            notes += self._confirm(planned, {each.table for each in records if not each.key})
            notes += self._newer_columns(planned)
            if more := log.dialect.check(work) - broken:
                raise RowUndoRefused(f"a foreign key would be broken: {sorted(more)[0]}")
        changes = log._net(self._own_records())
        return UndoneRows(tuple(changes), tuple(notes))

    def _unwatched(self) -> list[str]:
        """Name the tables that have no trigger of ours, though others have: they came later."""
        dialect, work = self.log.dialect, self.work
        known = dialect.recorded(work)
        if not any(known.values()):
            return []
        missing = sorted({*dialect.tables(work)} - known.keys())
        return [
            f"changes of {each} are not recorded, and so not undone, unless by triggers: it is a "
            "virtual or foreign table"
            for each in dialect.without_triggers(work)
        ] + [
            f"changes of {each} are not recorded, and so not undone: it is new, or was made "
            "again, since track() was called"
            for each in missing
        ]

    def _own_records(self) -> list[Record]:
        own = self.log._numbers(self.work, [self.work.call_id])
        return self.log._records(self.work, own.values())

    def _table(self, name: str) -> Table:
        if name not in self.tables:
            try:
                self.tables[name] = self.log.dialect.table(self.work, name)
            except LookupError:
                raise RowUndoRefused(f"the table {name} is gone") from None
        return self.tables[name]

    def _plan(self, records: Sequence[Record], *, force: bool) -> tuple[list[Planned], list[str]]:
        """Return the rows to change, those that were changed last first, and the rows to leave."""
        chains: dict[tuple[str, str], dict[int, list[Record]]] = {}
        for each in records:
            chain = chains.pop((each.table, each.key), {})
            chains[each.table, each.key] = chain  # the last now
            chain.setdefault(each.call, []).append(each)
        planned: list[Planned] = []
        left: list[str] = []
        # Those that were changed last come first. What a call made and removed itself is nothing to
        # undo: the same row may be there again, and be someone else's.
        for (name, key), chain in reversed(chains.items()):
            newest_first: list[Record] = []
            for of_call in reversed(chain.values()):
                before, after = _ends(of_call)
                if before != after:
                    newest_first.append(replace(of_call[0], before=before, after=after))
            if not newest_first:
                continue
            row, is_left = self._target(name, key, newest_first, force=force)
            if is_left:
                left.append(row.name)
            if row.present != row.target:
                planned.append(row)
        return planned, left

    def _target(
        self, name: str, key: str, newest_first: Sequence[Record], *, force: bool
    ) -> tuple[Planned, bool]:
        table, dialect = self._table(name), self.log.dialect
        images = [
            (each, _image(dialect, each.before), _image(dialect, each.after))
            for each in newest_first
        ]
        names = {name for _, *both in images for image in both if image for name in image}
        if gone := names - table.names:
            raise RowUndoRefused(f"the table {name} no longer has the column {sorted(gone)[0]}")
        state = present = dialect.present(self.work, table, key, sorted(names))
        text, is_left = None, False
        for record, before, after in images:
            if force or state == after:
                state, text = before, record.before
            elif state != before:  # else it is undone already
                is_left = True
                break
        return Planned(name, key, present, state, text), is_left

    def _apply(self, planned: Sequence[Planned]) -> None:
        """Change the rows, each when no constraint is in its way any more."""
        waiting, error = list(planned), None
        while waiting:
            later: list[Planned] = []
            for each in waiting:
                found = self._try(each)
                if found is not None:
                    error = found
                    later.append(each)
            if len(later) == len(waiting):
                names = ", ".join(each.name for each in later[:3])
                raise RowUndoRefused(f"the database refuses it at {names}: {_line(error)}")
            waiting = later

    def _retrace(self, records: Sequence[Record], planned: Sequence[Planned]) -> None:
        """Undo one record after the other, as far as that goes: through the same states."""
        dialect, rows = self.log.dialect, {(each.table, each.key) for each in planned}
        for each in reversed(records):
            if (each.table, each.key) in rows:
                before, after = _image(dialect, each.before), _image(dialect, each.after)
                step = Planned(each.table, each.key, after, before, each.before)
                if self._now(step) == after:
                    self._try(step)

    def _try(self, row: Planned) -> Exception | None:
        error = None
        self.work.run("SAVEPOINT wink_undo")
        try:
            self._put(row)
        except Exception as found:
            if self.work.lost_race:
                raise
            error = found
            self.work.run("ROLLBACK TO SAVEPOINT wink_undo")
        self.work.run("RELEASE SAVEPOINT wink_undo")
        return error

    def _put(self, row: Planned) -> None:
        table, dialect = self._table(row.table), self.log.dialect
        if row.target is None:
            dialect.delete(self.work, table, row)
        elif self._now(row) is None:
            dialect.insert(self.work, table, row)
        else:
            dialect.update(self.work, table, row)

    def _different(self, planned: Sequence[Planned]) -> list[Planned]:
        return [each for each in planned if self._now(each) != each.target]

    def _now(self, row: Planned) -> Image | None:
        names = row.target or row.present or {}
        return self.log.dialect.present(self.work, self._table(row.table), row.key, sorted(names))

    def _newer_columns(self, planned: Sequence[Planned]) -> list[str]:
        """Name the columns that no trigger knew, of rows that are back."""
        back = [each for each in planned if each.target is not None]
        newer = {
            (each.table, column.name): None
            for each in (back if self.log.dialect.names_columns else ())
            for column in self._table(each.table).columns
            if not column.is_generated and column.name not in (each.target or ())
        }
        return [
            f"the column {column} of {table} is not restored: it is newer than the last track()"
            for table, column in newer
        ]

    def _confirm(self, planned: Sequence[Planned], others: Set[str]) -> list[str]:
        """Make sure that just the planned rows are as planned: triggers may have changed more.

        Those of the database may also change tables that are not tracked, if the calls did so.
        """
        different, rounds, notes = self._different(planned), 0, list[str]()
        while different and rounds < _MOST_ROUNDS:
            self._apply(different)
            different, rounds = self._different(planned), rounds + 1
        for each in different:
            now = self._now(each)
            if now is None or each.target is None:
                raise RowUndoRefused(f"triggers of the database change row {each.name} again")
            columns = ", ".join(name for name in each.target if now[name] != each.target[name])
            notes.append(f"row {each.name} differs in {columns}, which a trigger sets")
        known = {(each.table, each.key) for each in planned}
        for each in self._own_records():
            is_more = (each.table, each.key) not in known if each.key else each.table not in others
            if is_more and (each.before is not None or each.after == _OTHER):
                name = row_name(each.table, each.key) if each.key else each.table
                raise RowUndoRefused(
                    f"it would also change {name}, which these calls did not change. Undo what "
                    "depends on it first"
                )
        return notes


_OTHER = "changed rows"


def _ends(records: Sequence[Record]) -> tuple[str | None, str | None]:
    """Return what a call found of a row, and what it left.

    A statement changes a row from one state to the next, so only the first and the last are not
    both found and left. The records need not be in that order: a trigger of the table may change
    the row again before ours is called.
    """
    counts = Counter(each.before for each in records)
    counts.subtract(each.after for each in records)
    found = [state for state, count in counts.items() if count > 0]
    lasts = [state for state, count in counts.items() if count < 0]
    if len(found) == len(lasts) == 1:
        return found[0], lasts[0]
    return records[0].before, records[-1].after if found else records[0].before


def _image(dialect: Dialect, text: str | None) -> Image | None:
    return None if text is None else dialect.image(text)


def _not_undone(records: Sequence[Record]) -> list[str]:
    """Name what the records of calls cannot undo."""
    found = dict.fromkeys((each.table, each.after) for each in records if not each.key)
    return [
        f"the schema was changed ({table}), which is not undone"
        if what == SCHEMA
        else f"rows of {table} are not undone: a part of their primary key is NULL, or renamed"
        if what == NO_KEY
        else f"the rows of {table} are not undone: it is not tracked"
        for table, what in found
    ]


SCHEMA, NO_KEY = "schema", "rows without a key"


def row_name(table: str, key: str) -> str:
    values = (re.sub(r"^'(.*)'$", r"\1", str(each)) for each in json.loads(key))
    return f"{table} {', '.join(values)}"


def _line(error: BaseException | None) -> str:
    original = getattr(error, "orig", None) or error
    return str(original).partition("\n")[0]


@contextmanager
def _at_work(
    database: Database,
    call_id: str = "",
    undoes: Sequence[str] = (),
    *,
    read_only: bool = False,
    works: list[Work] | None = None,
) -> Generator[Work]:
    """Yield a transaction of our own, with the name of a call if it has one."""
    with database.transaction(read_only=read_only) as view:
        work = view._work
        assert work is not None
        if not work.call_id:  # else it is that of the call under way
            work.call_id = call_id
        was_noted = work.is_recorded
        work.undoes = tuple(undoes)
        if works is not None:
            works.append(work)
        with view._using():
            if was_noted and undoes and database._log is not None:
                database._log.note_undoes(work)
            yield work
