"""The runs of a database: submitted, taken by workers, waiting for a person, ended.

Every change of a run locks its row first, so changes of one run happen one after the other, in any
process. A run has one workflow per sitting: it ends as "waiting" when the run needs a
person, and their answer begins the next sitting in the same transaction that records it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, get_args

from weakincentives.core.call import new_id
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.text import letters
from weakincentives.errors import AnswerRefused, NoSuchRun, RunAlreadyEnded
from weakincentives.prompt.approval import Approval, ApprovalRequest, answering_user
from weakincentives.runtime.stores.database import Database, Transaction, prepare_tables
from weakincentives.serde import freeze, thaw

T = TypeVar("T")

Status = Literal["queued", "running", "waiting", "done", "failed", "cancelled"]
STATUSES: tuple[Status, ...] = get_args(Status)
UNFINISHED: tuple[Status, ...] = ("queued", "running", "waiting")
_MARKS = (3, 3, 3, 4, 4, 5, 6, 8)
"""Letters of a mark, for one try after the other: they are short as long as few runs have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableRun:
    """A run as the database has it."""

    id: str
    task: str
    status: Status
    about: Mapping[str, Any]
    """What a worker needs to perform it: flags, model, base, branch."""
    machine: str
    """The only machine whose workers may take it; empty for any."""
    partition: str
    """Of the runs with the same one, a single one runs at a time; empty for no such limit."""
    sitting: int
    """How many workflows it has had. Each has an id of its own."""
    submitted_at: float
    updated_at: float
    """Both in unix seconds, on the database's clock."""
    worker: str
    """The worker that took it last."""
    detail: str
    """Its answer, its error, or what it waits for."""

    @property
    def mark(self) -> str:
        """The letters at the end of the id: a short name to type."""
        return self.id.rpartition("-")[2]

    @property
    def workflow(self) -> str:
        """The id of its current workflow."""
        return f"{self.id}/{self.sitting}"

    @property
    def has_ended(self) -> bool:
        return self.status not in UNFINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingApproval:
    """A request without an answer."""

    id: str
    run: str
    """The id of the run."""
    request: ApprovalRequest
    since: float
    """When it was first asked, in unix seconds."""

    @property
    def digest(self) -> str:
        """Identifies what was shown: an answer is for exactly that."""
        return self.request.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWorker:
    """A worker that has reported, and has not left."""

    name: str
    machine: str
    seen: float
    """Seconds since it last reported."""


class Runs:
    """The runs, approvals and workers in a database. Any number of processes may use it.

    Args:
        patience: Seconds to try again while the database cannot be reached.

    Raises:
        StoreRefused: A newer version of this library has changed the tables.
    """

    def __init__(self, database: Database, *, patience: float = 60.0) -> None:
        self.database = database
        self._patience = patience
        # Ids sort by their bytes, whatever the language of the database: prefixes are ranges.
        collation = ' COLLATE "C"' if database.is_postgres else ""
        tables = [each.format(C=collation) for each in _TABLES]
        prepare_tables(database, "runs", [tables], patience=patience)

    # Runs

    def submit(
        self,
        task: str,
        *,
        about: Mapping[str, Any],
        machine: str = "",
        partition: str = "",
        key: str = "",
    ) -> DurableRun:
        """Return a new run, queued. With a key, the run that was submitted with it, if any.

        Args:
            about: JSON values. A ``branch`` that is ``-`` gets the mark of the run for a name.
            machine: The only machine whose workers may take it; empty for any.
            partition: Of the runs with the same one, a single one runs at a time.
        """
        key = key or new_id()

        def work(transaction: Transaction) -> DurableRun:
            for count in _MARKS:
                run_id = _new_id(count)
                named = {"branch": _mark(run_id)} if about.get("branch") == "-" else {}
                stored = json.dumps({**about, **named})
                transaction.changed(
                    "INSERT INTO wink_runs (id, mark, submit_key, task, status, about, machine,"
                    " part, sitting, enqueued, submitted_at, updated_at, worker, detail)"
                    f" VALUES (?, ?, ?, ?, 'queued', ?, ?, ?, 1, 0, {transaction.now},"
                    f" {transaction.now}, '', '') ON CONFLICT DO NOTHING",
                    run_id, _mark(run_id), key, _storable(task), stored, machine, partition,
                )  # fmt: skip
                rows = _select(transaction, "WHERE submit_key = ?", key)
                if rows:
                    return rows[0]
            raise AssertionError("no free name for a run")

        return self._do(work)

    def stand_in(self, key: str, *, task: str, about: Mapping[str, Any], worker: str) -> DurableRun:
        """Return the run that stands for a session which a process of its own performs.

        It is there for what the session asks: no worker takes it. With the same key it is the same
        run, also after it was done. One that a person has cancelled stays cancelled.
        """

        def work(transaction: Transaction) -> DurableRun:
            for count in _MARKS:
                run_id = _new_id(count)
                transaction.changed(
                    "INSERT INTO wink_runs (id, mark, submit_key, task, status, about, machine,"
                    " part, sitting, enqueued, submitted_at, updated_at, worker, detail)"
                    f" VALUES (?, ?, ?, ?, 'running', ?, '', '', 1, 1, {transaction.now},"
                    f" {transaction.now}, ?, '') ON CONFLICT DO NOTHING",
                    run_id, _mark(run_id), key, _storable(task), json.dumps(dict(about)), worker,
                )  # fmt: skip
                rows = _select(transaction, "WHERE submit_key = ?", key)
                if rows and rows[0].status == "done":
                    return _set_status(transaction, rows[0], "running")
                if rows:
                    return rows[0]
            raise AssertionError("no free name for a run")

        return self._do(work)

    def find(self, name: str) -> DurableRun:
        """Return the run with this id, unique prefix of an id, or mark.

        Raises:
            NoSuchRun: There is none, or several.
        """

        def work(transaction: Transaction) -> list[DurableRun]:
            exact = _select(transaction, "WHERE id = ? OR mark = ? LIMIT 2", name, name)
            if exact or not name:
                return exact
            end = name[:-1] + chr(ord(name[-1]) + 1)
            return _select(transaction, "WHERE id >= ? AND id < ? ORDER BY id LIMIT 4", name, end)

        found = self._do(work)
        if not found:
            raise NoSuchRun(f"no run {name!r} in {self.database.shown}")
        if len(found) > 1:
            ids = ", ".join(each.id for each in found[:3])
            raise NoSuchRun(f"{name!r} matches several runs: {ids}; use a longer prefix")
        return found[0]

    def list(
        self,
        *,
        status: Status | Sequence[Status] | None = None,
        limit: int | None = None,
    ) -> list[DurableRun]:
        """Return the runs with one of these statuses, oldest first; with a limit, the newest."""
        wanted = STATUSES if status is None else [status] if isinstance(status, str) else status
        most = "" if limit is None else f" LIMIT {limit:d}"
        where = f"WHERE status = ? ORDER BY submitted_at DESC, id DESC{most}"

        def work(transaction: Transaction) -> list[DurableRun]:
            return [
                run
                for each in dict.fromkeys(wanted)  # one by one: each is a range of the index
                for run in _select(transaction, where, each)
            ]

        found = sorted(self._do(work), key=lambda each: (each.submitted_at, each.id))
        return found if limit is None else found[max(len(found) - limit, 0) :]

    def count(self) -> dict[Status, int]:
        """Return how many runs have each status."""
        rows = self._execute("SELECT status, count(*) FROM wink_runs GROUP BY status")
        return {status: int(count) for status, count in rows}

    def begin(self, run_id: str, sitting: int, worker: str) -> bool:
        """Note that a worker performs a sitting; False if that is not, or no longer, to be done."""
        sql = (
            "UPDATE wink_runs SET status = 'running', worker = ?, detail = '', "
            f"updated_at = {self.database.now} "
            "WHERE id = ? AND sitting = ? AND status IN ('queued', 'running')"
        )
        return self._do(lambda transaction: transaction.changed(sql, worker, run_id, sitting)) > 0

    def end(self, run_id: str, sitting: int, status: Status, detail: str = "") -> DurableRun | None:
        """Note how a sitting ended, unless it is not the current one or the run was cancelled.

        Returns the run as it is now. One that waits for an answer which came meanwhile is queued
        again: enqueue its next workflow. None if nothing was noted.
        """
        if status not in ("waiting", "done", "failed", "cancelled"):
            raise ValueError(f"a sitting cannot end as {status}")

        def work(transaction: Transaction) -> DurableRun | None:
            run = _locked(transaction, run_id)
            if run is None or run.sitting != sitting or run.status not in ("queued", "running"):
                return None
            if status == "waiting" and _answered_in(transaction, run_id, sitting):
                return _next_sitting(transaction, run)
            if status != "waiting":
                _withdraw(transaction, run_id)
            return _set_status(transaction, run, status, detail)

        return self._do(work)

    def cancel(self, run_id: str) -> DurableRun:
        """Cancel a run and withdraw what it asks; its worker stops at the next step.

        Raises:
            NoSuchRun: There is none with this id.
            RunAlreadyEnded: It has ended otherwise.
        """

        def work(transaction: Transaction) -> DurableRun:
            run = self._known(_locked(transaction, run_id), run_id)
            if run.status in ("done", "failed"):
                raise RunAlreadyEnded(f"{run_id} has ended: it is {run.status}")
            if run.status == "cancelled":
                return run
            _withdraw(transaction, run_id)
            return _set_status(transaction, run, "cancelled")

        return self._do(work)

    def is_cancelled(self, run_id: str) -> bool:
        rows = self._execute("SELECT status FROM wink_runs WHERE id = ?", run_id)
        return rows == [("cancelled",)]

    def to_enqueue(self, limit: int = 100) -> list[DurableRun]:
        """Return queued runs whose workflow may be missing, oldest first.

        Enqueue each by its workflow's id, which has no effect if it is there, then call
        ``mark_enqueued``. What another process is about to enqueue is returned, too.
        """
        where = "WHERE status = 'queued' AND enqueued < sitting ORDER BY updated_at LIMIT"
        return self._do(lambda transaction: _select(transaction, f"{where} {limit:d}"))

    def mark_enqueued(self, run: DurableRun) -> None:
        """Note that the workflow of a run's sitting is in the queue."""
        sql = "UPDATE wink_runs SET enqueued = ? WHERE id = ? AND enqueued < ?"
        self._execute(sql, run.sitting, run.id, run.sitting)

    # Approvals that last

    def ask(self, run_id: str, request: ApprovalRequest) -> str:
        """Store a request, and return its id; empty if the run has ended.

        The same one is stored once; another one for its call replaces it.
        """
        stored = json.dumps(freeze(replace(request, revise=None)))
        digest = request.digest
        of_call = (run_id, request.call_id, request.policy_name)

        def work(transaction: Transaction) -> str:
            run = self._known(_locked(transaction, run_id), run_id)
            if run.has_ended:
                return ""
            transaction.changed(
                "UPDATE wink_approvals SET state = 'withdrawn' WHERE run = ? AND call_id = ? "
                "AND policy = ? AND digest <> ? AND state = 'open'",
                *of_call, digest,
            )  # fmt: skip
            transaction.changed(
                "INSERT INTO wink_approvals (id, run, call_id, policy, digest, request, sitting,"
                f" state, asked_at) VALUES (?, ?, ?, ?, ?, ?, ?, 'open', {transaction.now})"
                " ON CONFLICT (run, call_id, policy, digest) DO NOTHING",
                new_id(), *of_call, digest, stored, run.sitting,
            )  # fmt: skip
            # Asked again in a later sitting, perhaps after the files were changed and changed back.
            transaction.changed(
                "UPDATE wink_approvals SET sitting = ?, state = 'open', asked_at ="
                f" CASE WHEN state = 'used' THEN {transaction.now} ELSE asked_at END WHERE run = ?"
                " AND call_id = ? AND policy = ? AND digest = ? AND state <> 'answered'",
                run.sitting, *of_call, digest,
            )  # fmt: skip
            rows = transaction.execute(
                "SELECT id FROM wink_approvals WHERE run = ? AND call_id = ? AND policy = ? "
                "AND digest = ?",
                *of_call, digest,
            )  # fmt: skip
            return str(rows[0][0])

        return self._do(work)

    def pending(self, run_id: str | None = None) -> list[WaitingApproval]:
        """Return the open requests of a run, or of all runs, oldest first."""
        where, values = ("", ()) if run_id is None else (" AND run = ?", (run_id,))
        rows = self._execute(
            "SELECT id, run, request, asked_at FROM wink_approvals WHERE state = 'open'"
            f"{where} ORDER BY asked_at, id",
            *values,
        )
        return [
            WaitingApproval(id=name, run=run, request=thaw(json.loads(request)), since=float(at))
            for name, run, request, at in rows
        ]

    def answer(
        self,
        approval_id: str,
        *,
        approved: bool,
        digest: str,
        reason: str = "",
        arguments: Mapping[str, Any] | None = None,
        by: str = "",
    ) -> DurableRun:
        """Answer a request. The first answer counts, and queues the run that waits for it.

        Returns the run as it is now: if it is queued, enqueue its workflow.

        Args:
            digest: Of what was shown.
            reason: For the model, if it is not approved.
            arguments: Make the call with these instead; the policies check them, too.
            by: Who answers; by default this user.

        Raises:
            AnswerRefused: Somebody has answered it already, the run no longer waits for it, or what
                was shown is something else.
        """
        key = new_id()  # a repeated transaction knows its own answer
        edited = None if arguments is None else json.dumps(dict(arguments))
        who = by or answering_user()

        def work(transaction: Transaction) -> DurableRun:
            of = transaction.execute("SELECT run FROM wink_approvals WHERE id = ?", approval_id)
            if not of:
                raise AnswerRefused(f"no approval {approval_id!r} in {self.database.shown}")
            run = self._known(_locked(transaction, str(of[0][0])), str(of[0][0]))
            state, asked, first = transaction.execute(
                "SELECT state, digest, answer_key FROM wink_approvals WHERE id = ?", approval_id
            )[0]
            if first == key:
                return run
            if state in ("answered", "used"):
                raise AnswerRefused("somebody else has answered this")
            if state != "open" or run.has_ended:
                raise AnswerRefused("the run no longer waits for this answer")
            if asked != digest:
                raise AnswerRefused("this is not what is asked now; look at it again")
            transaction.execute(
                "UPDATE wink_approvals SET state = 'answered', approved = ?, reason = ?,"
                f" arguments = ?, answered_by = ?, answer_key = ?, answered_at = {transaction.now}"
                " WHERE id = ?",
                int(approved), _storable(reason), edited, _storable(who), key, approval_id,
            )  # fmt: skip
            # A sitting that has not ended finds the answer itself, or ``end`` does.
            return _next_sitting(transaction, run) if run.status == "waiting" else run

        return self._do(work)

    def answered(
        self, run_id: str, call_id: str, digest: str, policy: str | None = None
    ) -> Approval | None:
        """Return the answer to what was asked for a call, if there is one."""
        where, values = ("", ()) if policy is None else (" AND policy = ?", (policy,))
        rows = self._execute(
            "SELECT approved, answered_by, reason, arguments FROM wink_approvals WHERE run = ?"
            f" AND call_id = ? AND digest = ? AND state = 'answered'{where}",
            run_id, call_id, digest, *values,
        )  # fmt: skip
        if not rows:
            return None
        approved, who, reason, edited = rows[0]
        arguments = None if edited is None else json.loads(edited)
        return Approval(bool(approved), str(who), str(reason), arguments=arguments)

    def use(self, run_id: str, request: ApprovalRequest) -> Approval | None:
        """Return the answer to a request, once: after that it is asked again.

        For calls without an id of their own, which are known by what they do.
        """
        of_call = (run_id, request.call_id, request.policy_name, request.digest)

        def work(transaction: Transaction) -> bool:
            _locked(transaction, run_id)
            return self._change(transaction, "answered", "used", of_call)

        found = self.answered(run_id, request.call_id, request.digest, request.policy_name)
        return found if found is not None and self._do(work) else None

    def unuse(self, run_id: str, request: ApprovalRequest) -> None:
        """Let an answer that was used count again: the call was not made."""
        of_call = (run_id, request.call_id, request.policy_name, request.digest)
        self._do(lambda transaction: self._change(transaction, "used", "answered", of_call))

    def _change(
        self, transaction: Transaction, before: str, after: str, of_call: tuple[str, ...]
    ) -> bool:
        changed = transaction.changed(
            "UPDATE wink_approvals SET state = ? WHERE state = ? AND run = ? AND call_id = ?"
            " AND policy = ? AND digest = ?",
            after, before, *of_call,
        )  # fmt: skip
        return changed > 0

    # Workers

    def beat(self, worker: str, machine: str) -> None:
        """Note that a worker is alive."""
        self._execute(
            f"INSERT INTO wink_workers (name, machine, seen) VALUES (?, ?, {self.database.now})"
            " ON CONFLICT (name) DO UPDATE SET machine = excluded.machine, seen = excluded.seen",
            worker, machine,
        )  # fmt: skip

    def leave(self, worker: str) -> None:
        """Forget a worker: it has stopped, or its runs were taken over."""
        self._execute("DELETE FROM wink_workers WHERE name = ?", worker)

    def workers(self) -> list[KnownWorker]:
        """Return the workers that have reported and not left, by name."""
        rows = self._execute(
            f"SELECT name, machine, {self.database.now} - seen FROM wink_workers ORDER BY name"
        )
        return [
            KnownWorker(name=name, machine=machine, seen=max(0.0, float(seen)))
            for name, machine, seen in rows
        ]

    def _do(self, work: Callable[[Transaction], T]) -> T:
        return self.database.repeat(work, patience=self._patience)

    def _execute(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.database.execute(sql, *values, patience=self._patience)

    def _known(self, run: DurableRun | None, run_id: str) -> DurableRun:
        if run is None:
            raise NoSuchRun(f"no run {run_id!r} in {self.database.shown}")
        return run


# The tables

_TABLES = (
    """
    CREATE TABLE wink_runs (
        id TEXT{C} PRIMARY KEY, mark TEXT NOT NULL, submit_key TEXT NOT NULL, task TEXT NOT NULL,
        status TEXT NOT NULL, about TEXT NOT NULL, machine TEXT NOT NULL, part TEXT NOT NULL,
        sitting BIGINT NOT NULL, enqueued BIGINT NOT NULL, submitted_at DOUBLE PRECISION NOT NULL,
        updated_at DOUBLE PRECISION NOT NULL, worker TEXT NOT NULL, detail TEXT NOT NULL)
    """,
    "CREATE UNIQUE INDEX wink_runs_mark ON wink_runs (mark)",
    "CREATE UNIQUE INDEX wink_runs_key ON wink_runs (submit_key)",
    "CREATE INDEX wink_runs_status ON wink_runs (status, submitted_at, id)",
    "CREATE INDEX wink_runs_missing ON wink_runs (updated_at)"
    " WHERE status = 'queued' AND enqueued < sitting",
    """
    CREATE TABLE wink_approvals (
        id TEXT PRIMARY KEY, run TEXT NOT NULL, call_id TEXT NOT NULL, policy TEXT NOT NULL,
        digest TEXT NOT NULL, request TEXT NOT NULL, sitting BIGINT NOT NULL, state TEXT NOT NULL,
        asked_at DOUBLE PRECISION NOT NULL, approved BIGINT, reason TEXT, arguments TEXT,
        answered_by TEXT, answer_key TEXT, answered_at DOUBLE PRECISION)
    """,
    "CREATE UNIQUE INDEX wink_approvals_call ON wink_approvals (run, call_id, policy, digest)",
    "CREATE INDEX wink_approvals_open ON wink_approvals (asked_at) WHERE state = 'open'",
    """
    CREATE TABLE wink_workers (
        name TEXT PRIMARY KEY, machine TEXT NOT NULL, seen DOUBLE PRECISION NOT NULL)
    """,
)
_COLUMNS = ", ".join({"partition": "part"}.get(each.name, each.name) for each in fields(DurableRun))


def _select(transaction: Transaction, where: str, *values: Any) -> list[DurableRun]:
    rows = transaction.execute(f"SELECT {_COLUMNS} FROM wink_runs {where}", *values)
    names = [each.name for each in fields(DurableRun)]
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return [DurableRun(**{**each, "about": json.loads(each["about"])}) for each in found]


def _locked(transaction: Transaction, run_id: str) -> DurableRun | None:
    """Return a run, and lock it until the end of the transaction."""
    rows = _select(transaction, f"WHERE id = ?{transaction.for_update}", run_id)
    return rows[0] if rows else None


def _set_status(
    transaction: Transaction, run: DurableRun, status: Status, detail: str = "", sitting: int = 0
) -> DurableRun:
    transaction.execute(
        "UPDATE wink_runs SET status = ?, detail = ?, sitting = ?,"
        f" updated_at = {transaction.now} WHERE id = ?",
        status, _storable(detail), sitting or run.sitting, run.id,
    )  # fmt: skip
    return _select(transaction, "WHERE id = ?", run.id)[0]


def _next_sitting(transaction: Transaction, run: DurableRun) -> DurableRun:
    return _set_status(transaction, run, "queued", sitting=run.sitting + 1)


def _answered_in(transaction: Transaction, run_id: str, sitting: int) -> bool:
    """Whether something that was asked in a sitting has an answer."""
    return bool(
        transaction.execute(
            "SELECT 1 FROM wink_approvals WHERE run = ? AND sitting = ? AND state = 'answered'"
            " LIMIT 1",
            run_id, sitting,
        )
    )  # fmt: skip


def _withdraw(transaction: Transaction, run_id: str) -> None:
    transaction.execute(
        "UPDATE wink_approvals SET state = 'withdrawn' WHERE run = ? AND state = 'open'", run_id
    )


def _new_id(count: int) -> str:
    moment = datetime.fromtimestamp(SYSTEM_CLOCK.time(), UTC).strftime("%Y%m%d-%H%M%S")
    return f"{moment}-{letters(os.urandom(count))}"


def _mark(run_id: str) -> str:
    return run_id.rpartition("-")[2]


def _storable(text: str) -> str:
    """Return a text without what a database refuses; it may come from a model."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
