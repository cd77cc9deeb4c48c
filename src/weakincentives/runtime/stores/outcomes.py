"""The outcomes of a session's calls in a database, under the lease of the session."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from weakincentives.errors import LeaseLost
from weakincentives.runtime.ledger import CallOutcome, as_it_is
from weakincentives.runtime.stores.database import Transaction

T = TypeVar("T")

_COLUMNS = "entry, token, change"


class _Do(Protocol):
    def __call__(self, work: Callable[[Transaction], T], /) -> T: ...


class SqlOutcomes:
    """Entries of one session. Those of a killed process have an older token: they are unknown.

    Args:
        do: Runs a transaction, and repeats it if the connection was lost.
        session: Its name.
        token: That of the lease. Without one, calls can be read and settled, but not begun.
    """

    def __init__(self, do: _Do, session: str, *, token: int | None = None) -> None:
        self._do = do
        self._session = session
        self._token = token
        self._running: set[str] = set()

    def find(self, call_id: str) -> CallOutcome | None:
        return self._do(lambda transaction: self._found(transaction, call_id)[0])

    def calls(self, prefix: str) -> list[CallOutcome]:
        rows, holder = self._do(
            lambda transaction: (
                transaction.execute(
                    f"SELECT {_COLUMNS} FROM wink_outcomes WHERE session = ? ORDER BY number",
                    self._session,
                ),
                self._holder(transaction),
            )
        )
        found = (self._outcome(row, holder) for row in rows)
        return [each for each in found if each.call_id.startswith(prefix)]

    def change(
        self,
        call_id: str,
        decide: Callable[[CallOutcome | None], CallOutcome],
        *,
        running: bool | None = None,
    ) -> None:
        change = uuid.uuid4().hex

        def work(transaction: Transaction) -> None:
            self._check_token(transaction, is_call=running is not None)
            found, earlier = self._found(transaction, call_id)
            if earlier != change:  # else the connection was lost while this was committed
                self._write(transaction, decide(found), change)

        self._do(work)
        if running is not None:
            (self._running.add if running else self._running.discard)(call_id)

    def damage(self) -> str:
        """Nothing: the database has its own means to detect damage."""
        return ""

    def _check_token(self, transaction: Transaction, *, is_call: bool) -> None:
        """Lock the session's row, so that nobody takes it over before the change is committed."""
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
            f"SELECT {_COLUMNS} FROM wink_outcomes WHERE session = ? AND call_id = ?",
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
