"""Rows that calls changed in databases: what undoing files asks of a database, by call id."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from weakincentives.core.call import new_id


@dataclass(frozen=True, slots=True)
class RowChange:
    """One row that a call changed."""

    table: str
    key: tuple[Any, ...]
    """The values of its primary key; empty for a change that is not known row by row."""
    before: Mapping[str, Any] | None = None
    """None for a row that is new."""
    after: Mapping[str, Any] | None = None
    note: str = ""
    """Instead of a row: what else the call did to the table, which is not undone."""

    @property
    def name(self) -> str:
        return " ".join([self.table, ", ".join(map(str, self.key))]).strip()


@dataclass(frozen=True, slots=True)
class CallRows:
    """A call that committed in a database."""

    call_id: str
    tool: str = ""
    """Empty for an undo."""
    at: float = 0.0
    """When, in unix seconds."""
    undoes: tuple[str, ...] = ()
    """The ids of the calls whose rows it undid."""
    count: int = 0
    """How many changes of rows are recorded."""


@dataclass(frozen=True, slots=True)
class UndoneRows:
    """What undoing rows changed."""

    changes: tuple[RowChange, ...] = ()
    notes: tuple[str, ...] = ()
    """A sentence for each thing that is not as it was before the calls."""


@dataclass(frozen=True, slots=True)
class KeptCall:
    """What a database keeps of a call whose session is saved, until that is known to be saved.

    It is written in the transaction of the call's rows. After a kill it says what must be there,
    too, for the call to have happened.
    """

    session: str
    """Identifies the file of the session."""
    at: int
    """Where the lines of the call begin in that file."""
    saved: int
    """How long the file was when the call committed."""
    call_id: str
    tool: str
    redo: str = ""
    """The lines, as JSON text; empty if they are not known here."""
    files: bool = False
    """Whether it changed files, which commit later."""
    later: tuple[str, ...] = ()
    """The databases that commit later."""


class RowHistory(Protocol):
    """A database that records the rows that calls change, and undoes them."""

    @property
    def title(self) -> str:
        """Its name for people."""
        ...

    def calls(self) -> Sequence[CallRows]:
        """Return the calls of its workspace, or all calls, that committed in it, oldest first."""
        ...

    def changes(self, call_ids: Iterable[str]) -> Mapping[str, Sequence[RowChange]]:
        """Return the rows that calls changed, by call."""
        ...

    def has_committed(self, call_id: str) -> bool:
        """Whether a call has committed in it, and is not undone."""
        ...

    def kept(self, session: str) -> Sequence[KeptCall]:
        """Return what it keeps for a session, oldest first."""
        ...

    def settle(self, kept: KeptCall) -> None:
        """Forget what is kept of a call."""
        ...

    @property
    def records_every_table(self) -> bool:
        """Whether no call can change rows here without a record."""
        ...

    def undo(
        self,
        call_ids: Sequence[str],
        *,
        call_id: str,
        force: bool = False,
        dry_run: bool = False,
    ) -> UndoneRows:
        """Undo the rows of some calls and nothing else, as a call with an id of its own.

        A row that something else has changed since is left alone and named, unless forced. Calls
        that are undone already, or changed nothing here, do no harm.

        Raises:
            RowUndoRefused: A foreign key or another rule of the database is in the way. Nothing
                was undone.
        """
        ...


@dataclass(frozen=True, slots=True)
class TableChange:
    """How many rows of a table a call changed."""

    table: str
    added: int = 0
    removed: int = 0
    changed: int = 0
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return f"{self.table}: {self.note}"
        more = f", {self.changed} changed" if self.changed else ""
        return f"{self.table}: +{self.added} -{self.removed}{more}"


def by_table(changes: Iterable[RowChange]) -> list[TableChange]:
    """Return what changes come to, table by table."""
    counts: dict[tuple[str, str], list[int]] = {}
    for each in changes:
        found = counts.setdefault((each.table, each.note), [0, 0, 0])
        found[0] += each.before is None
        found[1] += each.after is None
        found[2] += each.before is not None and each.after is not None
    return [
        TableChange(table, note=note) if note else TableChange(table, added, removed, changed)
        for (table, note), (added, removed, changed) in counts.items()
    ]


@contextmanager
def undoing_rows(
    databases: Sequence[RowHistory],
    call_ids: Sequence[str],
    call_id: str,
    *,
    force: bool = False,
) -> Generator[Sequence[tuple[RowHistory, UndoneRows]]]:
    """Undo the rows of calls in all databases; if the block or one of them fails, in none."""
    done: list[tuple[RowHistory, UndoneRows]] = []
    try:
        done.extend(
            (each, each.undo(call_ids, call_id=call_id, force=force))
            for each in (databases if call_ids else ())
        )
        yield done
    except BaseException:  # an interrupted undo must not leave the rows undone and the files not
        for each, found in reversed(done):
            if found.changes:
                each.undo([call_id], call_id=f"undo_{new_id()[:12]}")
        raise


def notes_on(rows: Sequence[tuple[RowHistory, UndoneRows]]) -> tuple[str, ...]:
    return tuple(f"{each.title}: {note}" for each, found in rows for note in found.notes)
