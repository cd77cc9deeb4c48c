"""Sessions in a database: SQLite in a file, or PostgreSQL.

A process that can write to the database is trusted: its lines carry no seals. They are JSON data,
from which only known dataclasses and plain values are made; nothing is unpickled.

The outcomes of a session's calls are there as well, under the lease of the session. The start of a
call is there before it runs. How it ended is written with the next save of the session, in one
transaction: a kill leaves both, or a call whose outcome is unknown.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives.core.logs import get_logger
from weakincentives.errors import (
    DatabaseUnavailable,
    LeaseLost,
    SessionError,
    SessionInUse,
    SnapshotError,
)
from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger, as_it_is
from weakincentives.runtime.stores.database import Database, Transaction, prepare_tables
from weakincentives.runtime.stores.logs import LogPart, SavePlace, waited
from weakincentives.serde.exact import StoredBytes

if TYPE_CHECKING:
    from weakincentives.filesystem.redo import Redo

T = TypeVar("T")

_logger = get_logger(__name__)

_TABLES = [
    [
        """
        CREATE TABLE wink_sessions (
            name TEXT PRIMARY KEY, head TEXT NOT NULL, first BIGINT NOT NULL, last BIGINT NOT NULL,
            token BIGINT NOT NULL, holder TEXT NOT NULL, expires DOUBLE PRECISION NOT NULL)
        """,
        """
        CREATE TABLE wink_saves (
            session TEXT NOT NULL, number BIGINT NOT NULL, text TEXT NOT NULL,
            PRIMARY KEY (session, number))
        """,
        """
        CREATE TABLE wink_media (
            session TEXT NOT NULL, digest TEXT NOT NULL, data BYTEA NOT NULL,
            PRIMARY KEY (session, digest))
        """,
        """
        CREATE TABLE wink_outcomes (
            session TEXT NOT NULL, call_id TEXT NOT NULL, number BIGINT NOT NULL,
            token BIGINT NOT NULL, change TEXT NOT NULL, entry TEXT NOT NULL,
            PRIMARY KEY (session, call_id))
        """,
    ]
]
"""``first`` and ``last`` are numbers of saves: those before ``first`` were folded into it."""
_OUTCOME = "entry, token, change"
_BATCH = 64
"""Saves that are read first where a log is read from its end."""
_RELEASE = 2.0
"""Seconds for which releasing a lease is tried; it expires otherwise."""


class SqlStore:
    """Sessions in a database, each open in one process of all that use it.

    Opening a session takes a lease on the database's clock, which is renewed while the session is
    open. The lease of a process that dies expires. The next process to open the session gets a
    greater fencing token, and the former holder can no longer save, even if it was only paused.

    Args:
        database: Where; the tables are created when they are first needed.
        lease: Seconds until the lease of a process that is gone expires.
        patience: Seconds for which a write is repeated while the database cannot be reached.
    """

    def __init__(self, database: Database, *, lease: float = 30.0, patience: float = 60.0) -> None:
        if lease <= 0:
            raise ValueError(f"lease must be positive, got {lease}")
        self.database = database
        self.lease = lease
        self.patience = patience
        prepare_tables(database, "sessions", _TABLES)

    def create(self, name: str, head: bytes) -> OpenSqlLog:
        holder = _new_holder()

        def work(transaction: Transaction) -> None:
            made = transaction.changed(
                f"INSERT INTO wink_sessions VALUES (?, ?, 1, 0, 1, ?, {transaction.now} + ?)"
                " ON CONFLICT (name) DO NOTHING",
                name,
                head.decode(),
                holder,
                self.lease,
            )
            sql = "SELECT 1 FROM wink_sessions WHERE name = ? AND holder = ?"
            # Repeated after a lost connection, it may have been made before.
            if not made and not transaction.execute(sql, name, holder):
                raise FileExistsError(f"{self.shown(name)} exists")

        self.do(work)
        return OpenSqlLog(self, name, head, token=1)

    def open(self, name: str, *, wait: float = 0.0) -> OpenSqlLog:
        return waited(lambda: self._open(name, _new_holder()), wait)

    def _open(self, name: str, holder: str) -> OpenSqlLog:
        def work(transaction: Transaction) -> tuple[str, int]:
            taken = transaction.changed(
                "UPDATE wink_sessions"
                f" SET token = token + 1, holder = ?, expires = {transaction.now} + ?"
                f" WHERE name = ? AND expires <= {transaction.now}",
                holder,
                self.lease,
                name,
            )
            rows = transaction.execute(
                "SELECT head, token, holder FROM wink_sessions WHERE name = ?", name
            )
            if not rows:
                raise FileNotFoundError(f"there is no session {name!r} in {self.database.shown}")
            ((head, token, found),) = rows
            if not taken and found != holder:  # else a repetition: it was ours before
                raise SessionInUse(
                    f"the session {name!r} is in use by another process ({found}), or open in this"
                    " one. If that process is gone, its lease ends by itself"
                )
            return head, token

        head, token = self.do(work)
        return OpenSqlLog(self, name, head.encode(), token=token)

    def log(self, name: str) -> SqlLog:
        ((head,),) = self._session(name, "head")
        return SqlLog(self, name, head.encode())

    def names(self) -> list[str]:
        return sorted(name for (name,) in self.execute("SELECT name FROM wink_sessions"))

    def is_in_use(self, name: str) -> bool:
        ((in_use,),) = self._session(name, f"expires > {self.database.now}")
        return bool(in_use)

    def delete(self, name: str) -> bool:
        """Delete a session with its saves, media and outcomes; False if it is in use."""

        def work(transaction: Transaction) -> bool:
            transaction.execute(
                f"DELETE FROM wink_sessions WHERE name = ? AND expires <= {transaction.now}", name
            )
            if transaction.execute("SELECT 1 FROM wink_sessions WHERE name = ?", name):
                return False
            for table in ("wink_saves", "wink_media", "wink_outcomes"):
                transaction.execute(f"DELETE FROM {table} WHERE session = ?", name)
            return True

        return self.do(work)

    def ledger(self, name: str) -> OutcomeLedger:
        """Return the outcomes of a session's calls, to read and to settle them without a lease."""
        return OutcomeLedger(entries=_SqlOutcomes(self, name))

    def do(self, work: Callable[[Transaction], T]) -> T:
        """Return what a transaction returns; it is repeated while the connection is lost."""
        return self.database.repeat(work, patience=self.patience)

    def execute(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Run one statement, as ``do`` runs a transaction, and return its rows."""
        return self.database.execute(sql, *values, patience=self.patience)

    def shown(self, name: str) -> str:
        """What a session is called in messages."""
        return f"the session {name!r} in {self.database.shown}"

    def _session(self, name: str, columns: str) -> list[tuple[Any, ...]]:
        rows = self.execute(f"SELECT {columns} FROM wink_sessions WHERE name = ?", name)
        if not rows:
            raise FileNotFoundError(f"there is no session {name!r} in {self.database.shown}")
        return rows


class SqlLog:
    """The log of a session in a database."""

    begin = 0

    def __init__(self, store: SqlStore, name: str, head: bytes) -> None:
        self.name = name
        self.head = head
        self._store = store

    @property
    def shown(self) -> str:
        return self._store.shown(self.name)

    def read(self, start: int) -> LogPart:
        rows = self._store.execute(  # one statement, so that all is of one moment
            "SELECT s.first, s.last, v.number, v.text FROM wink_sessions s"
            " LEFT JOIN wink_saves v ON v.session = s.name AND v.number > ?"
            " WHERE s.name = ? ORDER BY v.number",
            start,
            self.name,
        )
        if not rows:
            raise SnapshotError(f"{self.shown} was deleted")
        first, last = rows[0][:2]
        texts: list[bytes] = []
        start = max(start, first - 1)
        expected = start + 1
        for _, _, number, text in rows:
            if number != expected:  # also None, if there is nothing new
                break
            texts.append(text.encode())
            expected += 1
        damage = f"save {expected} of {self.shown} is missing" if expected <= last else ""
        return LogPart(start, texts, range(start + 1, expected), damage)

    def at(self, places: Iterable[SavePlace]) -> Generator[bytes]:
        wanted = [place.end for place in places]
        for start in range(0, len(wanted), 500):
            numbers = wanted[start : start + 500]
            found = dict(self._select(f"number IN ({', '.join('?' * len(numbers))})", *numbers))
            for number in numbers:
                if number not in found:
                    raise SnapshotError(f"{self.shown} has changed while it was read")
                yield found[number].encode()

    def media(self, digest: str) -> StoredBytes:
        return StoredBytes(f"{digest} of {self.shown}", digest, lambda: self._bytes(digest))

    def _bytes(self, digest: str) -> bytes:
        sql = "SELECT data FROM wink_media WHERE session = ? AND digest = ?"
        rows = self._store.execute(sql, self.name, digest)
        if not rows:
            raise FileNotFoundError("it is not there")
        return bytes(rows[0][0])

    def _select(self, condition: str, *values: object) -> list[tuple[Any, ...]]:
        sql = f"SELECT number, text FROM wink_saves WHERE session = ? AND {condition}"
        return self._store.execute(sql, self.name, *values)


class OpenSqlLog(SqlLog):
    """The log of a session on which this process has the lease."""

    def __init__(self, store: SqlStore, name: str, head: bytes, *, token: int) -> None:
        super().__init__(store, name, head)
        self.token = token
        self._last = 0
        self._media: dict[str, bytes] = {}
        """Not yet stored: that happens with the next append."""
        self._outcomes = _SqlOutcomes(store, name, token=token)
        self._ledger = OutcomeLedger(entries=self._outcomes)
        self._closed = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name=f"lease of {name}", daemon=True)
        self._renewing.start()

    def load(self) -> LogPart:
        part = self.read(self.begin).checked()
        self._last = part.end
        return part

    def newest_first(self) -> Generator[bytes]:
        end, batch = self._last + 1, _BATCH
        while True:
            found = self._select("number < ? ORDER BY number DESC LIMIT ?", end, batch)
            for number, text in found:
                if number != end - 1:
                    raise SnapshotError(f"save {end - 1} of {self.shown} is missing")
                end = number
                yield text.encode()
            if len(found) < batch:
                return
            batch *= 2

    def append(self, texts: Sequence[bytes]) -> None:
        """Add saves in one transaction, which checks the fencing token and renews the lease.

        It also records how calls that reach outside ended since the last one.
        """
        self._write(texts, anew=False)

    def replace(self, texts: Sequence[bytes]) -> None:
        """Replace all saves in one transaction; the numbers go on, so that a reader can follow."""
        self._write(texts, anew=True)

    def _write(self, texts: Sequence[bytes], *, anew: bool) -> None:
        before, after = self._last, self._last + len(texts)

        def work(transaction: Transaction) -> dict[str, CallOutcome]:
            if not self._moved(transaction, before, after):
                return {}
            if anew:
                transaction.execute("DELETE FROM wink_saves WHERE session = ?", self.name)
                sql = "UPDATE wink_sessions SET first = ? WHERE name = ?"
                transaction.execute(sql, before + 1, self.name)
            self._insert(transaction, before, texts)
            return self._outcomes.save(transaction)

        self._outcomes.saved(self._store.do(work))
        self._last = after
        self._media.clear()

    def store(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self._media[digest] = data
        return digest

    def ledger(self) -> OutcomeLedger:
        return self._ledger

    def confirm(self) -> None:
        """Renew the lease, or raise LeaseLost."""
        if not self._store.do(self._renewed):
            raise LeaseLost(f"{self.shown} was taken over by another process, or deleted")

    def close(self) -> None:
        self._closed.set()
        with suppress(DatabaseUnavailable):  # then it expires
            self._store.database.repeat(self._release, patience=_RELEASE)

    def _moved(self, transaction: Transaction, before: int, after: int) -> bool:
        """Set the number of the last save, under the token; False if that was done before.

        A transaction is repeated if the connection was lost while it was committed.
        """
        moved = transaction.changed(
            f"UPDATE wink_sessions SET last = ?, expires = {transaction.now} + ?"
            " WHERE name = ? AND token = ? AND last = ?",
            after,
            self._store.lease,
            self.name,
            self.token,
            before,
        )
        if moved:
            return True
        rows = transaction.execute(
            "SELECT token, last FROM wink_sessions WHERE name = ?", self.name
        )
        if not rows or rows[0][0] != self.token:
            raise LeaseLost(f"{self.shown} was taken over by another process, or deleted")
        if rows[0][1] != after:
            raise SessionError(f"{self.shown} has {rows[0][1]} saves, not {before}")
        return False

    def _insert(self, transaction: Transaction, before: int, texts: Sequence[bytes]) -> None:
        if self._media:
            transaction.execute_many(
                "INSERT INTO wink_media VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                [(self.name, digest, data) for digest, data in self._media.items()],
            )
        rows = [(self.name, n, text.decode()) for n, text in enumerate(texts, before + 1)]
        transaction.execute_many("INSERT INTO wink_saves VALUES (?, ?, ?)", rows)

    def _release(self, transaction: Transaction) -> None:
        transaction.execute(
            "UPDATE wink_sessions SET expires = 0 WHERE name = ? AND token = ?",
            self.name,
            self.token,
        )

    def _renewed(self, transaction: Transaction) -> int:
        return transaction.changed(
            f"UPDATE wink_sessions SET expires = {transaction.now} + ?"
            " WHERE name = ? AND token = ? AND expires > 0",
            self._store.lease,
            self.name,
            self.token,
        )

    def _renew(self) -> None:
        """Renew the lease until the log is closed, or the lease is lost."""
        while not self._closed.wait(self._store.lease / 3):
            try:
                with self._store.database.transaction() as transaction:
                    is_ours = self._renewed(transaction)
            except DatabaseUnavailable as error:
                _logger.warning("the lease of %s was not renewed: %s", self.shown, error)
                continue
            if not is_ours:
                if not self._closed.is_set():
                    _logger.error("%s was taken over by another process", self.shown)
                return


def _new_holder() -> str:
    """Return a name for a lease: who has it, and unique, so that a repetition finds its own."""
    return f"process {os.getpid()}, {uuid.uuid4().hex[:12]}"


# Outcomes


class _SqlOutcomes:
    """Entries of one session. Those of a killed process have an older token: they are unknown.

    Args:
        token: That of the lease. Without one, calls can be read and settled, but not begun.
    """

    def __init__(self, store: SqlStore, session: str, *, token: int | None = None) -> None:
        self._do = store.do
        self._session = session
        self._token = token
        self._running: set[str] = set()
        self._ended: dict[str, CallOutcome] = {}
        """How calls ended, until the next save of the session."""

    @property
    def waits_for_save(self) -> bool:
        """Whether the next save of the session records how calls ended."""
        return self._token is not None

    def find(self, call_id: str) -> CallOutcome | None:
        if call_id in self._ended:
            return self._ended[call_id]
        return self._do(lambda transaction: self._found(transaction, call_id)[0])

    def calls(self, prefix: str) -> list[CallOutcome]:
        rows, holder = self._do(
            lambda transaction: (
                transaction.execute(
                    f"SELECT {_OUTCOME} FROM wink_outcomes WHERE session = ? ORDER BY number",
                    self._session,
                ),
                self._holder(transaction),
            )
        )
        found = (self._outcome(row, holder) for row in rows)
        own = (self._ended.get(each.call_id, each) for each in found)
        return [each for each in own if each.call_id.startswith(prefix)]

    def change(
        self,
        call_id: str,
        decide: Callable[[CallOutcome | None], CallOutcome],
        *,
        running: bool | None = None,
    ) -> None:
        if running is False and self.waits_for_save:
            self._ended[call_id] = decide(self.find(call_id))
            self._running.discard(call_id)
            return
        change = uuid.uuid4().hex

        def work(transaction: Transaction) -> None:
            self._check_token(transaction, is_call=running is not None)
            found, earlier = self._found(transaction, call_id)
            if earlier != change:  # else the connection was lost while this was committed
                self._write(transaction, decide(self._ended.get(call_id, found)), change)

        self._do(work)
        self._ended.pop(call_id, None)
        if running is not None:
            (self._running.add if running else self._running.discard)(call_id)

    def save(self, transaction: Transaction) -> dict[str, CallOutcome]:
        """Write how calls ended, and return that: it is ``saved`` once this is committed."""
        ended = dict(self._ended)
        for outcome in ended.values():
            self._write(transaction, outcome, uuid.uuid4().hex)
        return ended

    def saved(self, ended: dict[str, CallOutcome]) -> None:
        """Note that these outcomes are in the database."""
        for call_id, outcome in ended.items():
            if self._ended.get(call_id) is outcome:
                del self._ended[call_id]

    def redos(self, session: str, size: int) -> list[Redo]:
        """Nothing: what a session lacks, its outcomes lack as well."""
        return []

    def damage(self) -> str:
        """Nothing: the database has its own means to detect damage."""
        return ""

    def _check_token(self, transaction: Transaction, *, is_call: bool) -> None:
        """Lock the session's row, so that no process takes it over before the commit."""
        rows = transaction.execute(
            f"SELECT token FROM wink_sessions WHERE name = ?{transaction.for_update}",
            self._session,
        )
        token = rows[0][0] if rows else None
        if token is None or (token != self._token and (is_call or self._token is not None)):
            raise LeaseLost(
                f"the session {self._session!r} was taken over by another process, or deleted: its"
                " calls are not recorded here any more"
            )

    def _found(self, transaction: Transaction, call_id: str) -> tuple[CallOutcome | None, str]:
        """Return the outcome of a call, and the change that wrote it."""
        rows = transaction.execute(
            f"SELECT {_OUTCOME} FROM wink_outcomes WHERE session = ? AND call_id = ?",
            self._session,
            json.dumps(call_id),  # so that any text can be a key
        )
        if not rows:
            return None, ""
        return self._outcome(rows[0], self._holder(transaction)), rows[0][-1]

    def _holder(self, transaction: Transaction) -> int | None:
        """Return the token of the process that has the session open; None if there is none."""
        if self._token is not None:
            return self._token
        rows = transaction.execute(
            f"SELECT token FROM wink_sessions WHERE name = ? AND expires > {transaction.now}",
            self._session,
        )
        return rows[0][0] if rows else None

    def _outcome(self, row: tuple[Any, ...], holder: int | None) -> CallOutcome:
        entry, token, _ = row
        found = CallOutcome(**json.loads(entry))
        is_here = self._token is None or found.call_id in self._running
        return as_it_is(found, is_under_way=token == holder and is_here)

    def _write(self, transaction: Transaction, outcome: CallOutcome, change: str) -> None:
        transaction.execute(
            "INSERT INTO wink_outcomes VALUES (?, ?, (SELECT COALESCE(MAX(number), 0) + 1"
            " FROM wink_outcomes WHERE session = ?), ?, ?, ?)"
            " ON CONFLICT (session, call_id) DO UPDATE SET token = excluded.token,"
            " change = excluded.change, entry = excluded.entry",
            self._session,
            json.dumps(outcome.call_id),
            self._session,
            self._token or 0,
            change,
            json.dumps(asdict(outcome)),
        )
