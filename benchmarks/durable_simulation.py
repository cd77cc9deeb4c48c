"""A simulation: up to 1,000 workers and 100,000 runs against one real PostgreSQL.

    python benchmarks/durable_simulation.py [--runs 100000] [--workers 10 30 100 300 1000]

The workers are simulated, the database is not. Each of them issues what a real one does, through
the same code: it polls DBOS's queues, takes a run, opens its session, checks and records every step
with DBOS, appends to the session under its token, notes calls that reach outside, renews its
leases, reports, and looks for dead workers. There is no model and there are no files: between two
steps a run waits as long as ``--pace`` says, as it would for a model. Threads perform all of that
in this process, behind a pool of connections, so that this program takes processor time that real
workers would take elsewhere: look at the database's share, which is measured apart.

It prints, for each number of workers: transactions per second, steps per second beside what was
asked for, latency of an append, delay behind the schedule, connections and processor time. Then the
sizes of the tables, the plans of the queries that are issued all the time, and what a poll of the
queue costs with runs in it. It takes less than five minutes and only talks to 127.0.0.1.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from dbos._queue import _INTERNAL_QUEUE_CONSTRUCTION, Queue  # noqa: E402
from dbos._serialization import DBOSPortableJSON  # noqa: E402
from dbos._sys_db import SystemDatabase  # noqa: E402

from postgres import Postgres  # noqa: E402
from weakincentives.core.call import new_id  # noqa: E402
from weakincentives.durable import dbos as engines  # noqa: E402
from weakincentives.durable.dbos import DbosEngine, Worker  # noqa: E402
from weakincentives.durable.objects import DatabaseObjects  # noqa: E402
from weakincentives.prompt.approval import ApprovalRequest  # noqa: E402
from weakincentives.runtime.stores import database as databases  # noqa: E402
from weakincentives.runtime.stores.database import Database  # noqa: E402
from weakincentives.runtime.stores.runs import DurableRun, Runs  # noqa: E402
from weakincentives.runtime.stores.sql import OpenSqlLog, SqlStore  # noqa: E402

VERSION = "1"
ENTRY = json.dumps({"type": "call", "text": "x" * 700}).encode()
"""A save: a turn or a call with its answer."""
TURNS = 3
"""Of a run; each but the last makes one call, so a run has six steps."""


class Pooled(Database):
    """A database behind a pool: never more connections than that, as with a pooler."""

    def __init__(self, url: str, size: int) -> None:
        super().__init__(url)
        self._slots = threading.Semaphore(size)
        databases._MAX_IDLE = size

    @contextmanager
    def _connection(self) -> Generator[Any]:
        with self._slots, super()._connection() as connection:
            yield connection


class SharedEngine(DbosEngine):
    """The engine of a simulated worker: DBOS's own code on connections that all share."""

    def __init__(self, url: str, system: Any) -> None:
        super().__init__(url)
        self.system = system
        self.taken_over = 0

    def enqueue(self, run: DurableRun) -> None:
        self.system.init_workflow(workflow_of(run), creator_xid=new_id())

    def pending(self, executor: str | None = None) -> list[tuple[str, str, str]]:
        found = self.system.list_workflows(
            status="PENDING",
            name=engines.WORKFLOW,
            executor_id=executor,
            load_input=False,
            load_output=False,
        )
        return [(e.workflow_id, e.executor_id or "", e.queue_name or "") for e in found]

    def resume(self, workflow: str, queue: str) -> None:
        self.taken_over += 1  # so late with its reports that it seems dead; nobody dies here


def workflow_of(run: DurableRun) -> Any:
    """Return the row that DBOS makes of a run in the queue."""
    fields: dict[str, Any] = dict.fromkeys(
        [
            "class_name",
            "config_name",
            "authenticated_user",
            "assumed_role",
            "authenticated_roles",
            "created_at",
            "updated_at",
            "executor_id",
            "app_id",
            "recovery_attempts",
            "workflow_timeout_ms",
            "debounce_deadline_epoch_ms",
            "workflow_deadline_epoch_ms",
            "deduplication_id",
            "forked_from",
            "parent_workflow_id",
            "attributes",
            "started_at_epoch_ms",
            "delay_until_epoch_ms",
            "schedule_name",
        ]
    )
    return fields | {
        "workflow_uuid": run.workflow,
        "status": "ENQUEUED",
        "name": engines.WORKFLOW,
        "queue_name": engines.queue_of(run),
        "app_version": VERSION,
        "priority": 0,
        "inputs": json.dumps({"positionalArgs": [run.id, run.sitting, False], "namedArgs": {}}),
        "queue_partition_key": engines.partition_of(run),
        "serialization": DBOSPortableJSON.name(),
        "is_debounced": False,
        "application_name": "wink",
    }


class World:
    """One database, and everything that workers share in this process."""

    def __init__(self, url: str, pool: int, lease: float) -> None:
        self.url = url
        self.lease = lease
        self.database = Pooled(url, pool)
        self.runs = Runs(self.database)
        self.store = SqlStore(self.database, lease=lease)
        self.system: Any = SystemDatabase.create(
            system_database_url=url.replace("postgresql://", "postgresql+psycopg://"),
            engine_kwargs={"pool_size": pool, "max_overflow": 0, "pool_timeout": 60},
            engine=None,
            schema=None,
            serializer=DBOSPortableJSON,
            executor_id="simulation",
            app_name="wink",
        )
        self.system.run_migrations()
        self.system.create_application_version(VERSION)
        self.objects = DatabaseObjects(self.database)
        self.engine = SharedEngine(url, self.system)
        self.appends: list[float] = []
        self.polls: list[float] = []
        self.late: list[float] = []
        self.steps = 0
        self.errors: Counter[str] = Counter()
        self._queues: dict[tuple[str, float], Queue] = {}

    def queue(self, name: str, poll: float, **limits: Any) -> Queue:
        if (name, poll) in self._queues:
            return self._queues[name, poll]
        self.system.upsert_queue(
            name=name,
            concurrency=None,
            worker_concurrency=limits.get("worker_concurrency"),
            rate_limit_max=None,
            rate_limit_period_sec=None,
            polling_interval_sec=poll,
            update_existing=True,
            partition_concurrency=limits.get("partition_concurrency"),
        )
        self._queues[name, poll] = made = Queue(
            name,
            polling_interval_sec=poll,
            database_backed_queue=True,
            token=_INTERNAL_QUEUE_CONSTRUCTION,
            **limits,
        )
        return made

    def execute(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.database.repeat(lambda transaction: transaction.execute(sql, *values))


class Schedule:
    """Things to do at their times, by some threads. A thing returns the seconds until the next."""

    def __init__(self, world: World, threads: int) -> None:
        self._world = world
        self._heap: list[tuple[float, int, Callable[[], float | None]]] = []
        self._lock = threading.Condition()
        self._count = 0
        self._is_over = False
        self._threads = [threading.Thread(target=self._work) for _ in range(threads)]

    def add(self, delay: float, thing: Callable[[], float | None]) -> None:
        with self._lock:
            self._count += 1
            heapq.heappush(self._heap, (time.monotonic() + delay, self._count, thing))
            self._lock.notify()

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        with self._lock:
            self._is_over = True
            self._lock.notify_all()
        for each in self._threads:
            each.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._is_over:
                    wait = self._heap[0][0] - time.monotonic() if self._heap else 1.0
                    if wait <= 0:
                        break
                    self._lock.wait(wait)
                if self._is_over:
                    return
                due, _, thing = heapq.heappop(self._heap)
            self._world.late.append(time.monotonic() - due)
            try:
                again = thing()
            except Exception as error:  # counted, and shown at the end
                self._world.errors[f"{type(error).__name__}: {str(error)[:100]}"] += 1
                again = 1.0
            if again is not None:
                self.add(again, thing)


class SimulatedWorker:
    """What one `wink worker` asks of the database."""

    def __init__(
        self, world: World, schedule: Schedule, number: int, jobs: int, pace: float, poll: float
    ) -> None:
        self._world = world
        self._schedule = schedule
        self._pace = pace
        self._poll = poll
        self._jobs = jobs
        self._busy = 0
        self.open: list[OpenSqlLog] = []
        self.worker = Worker(
            world.engine,
            world.runs,
            _nothing,
            objects=world.objects,
            cache=Path("."),
            name=f"sim{number}",
            machine=f"m{number % 50}",
            concurrency=jobs,
            lease=world.lease,
        )
        self.queues = [
            world.queue(name, poll, **limits) for name, limits in engines.queues_of(self.worker)
        ]
        self._internal = Queue("_dbos_internal_queue", token=_INTERNAL_QUEUE_CONSTRUCTION)

    def begin(self) -> None:
        add, jitter = self._schedule.add, random.random
        add(jitter() * self._world.lease / 5, self._beat)
        add(jitter(), self._housekeeping)
        add(jitter(), self._manager)
        for queue in self.queues:
            add(jitter() * self._poll, lambda queue=queue: self._look(queue))

    def _beat(self) -> float:
        self._world.runs.beat(self.worker.name, self.worker.machine)
        return self._world.lease / 5

    def _housekeeping(self) -> float:
        return self.worker.housekeep()

    def _manager(self) -> float:
        """Do what DBOS does every second, whatever is configured."""
        system = self._world.system
        system.list_queues(application_name="wink")
        system.transition_delayed_workflows()
        system.start_queued_workflows(
            self._internal, self.worker.name, VERSION, None, 0, owner_xid=new_id()
        )
        return 1.0

    def _look(self, queue: Queue) -> float:
        """Look into a queue, and take what there is room for."""
        system, owner = self._world.system, new_id()
        system.get_queue(queue.name)
        room = self._jobs - self._busy
        if room > 0:
            began = time.perf_counter()
            if queue._has_partition_limits():
                taken = system.start_queued_partitioned_workflows(
                    queue, self.worker.name, VERSION, room, owner_xid=owner
                )
            else:
                taken, _ = system.start_queued_workflows(
                    queue, self.worker.name, VERSION, None, self._busy, owner_xid=owner
                )
            self._world.polls.append(time.perf_counter() - began)
            if taken:
                system.get_workflow_statuses(taken)
            for workflow in taken:
                self._busy += 1
                self.worker._active.add(workflow)
                self._schedule.add(0, _Steps(self, workflow, owner).next)
        return self._poll * random.uniform(0.95, 1.05)


class _Steps:
    """A run, step by step."""

    def __init__(self, of: SimulatedWorker, workflow: str, owner: str) -> None:
        self._of = of
        self._world = of._world
        self._workflow = workflow
        self._owner = owner
        self._run = workflow.rpartition("/")[0]
        self._log: OpenSqlLog | None = None
        self._n = 0

    def next(self) -> float | None:
        world = self._world
        if self._log is None:
            world.runs.find(self._run)
            self._log = world.store.create(self._run, b'{"simulation": true}')
            self._of.open.append(self._log)
            world.runs.begin(self._run, 1, self._of.worker.name)
        self._n += 1
        is_call = self._n % 2 == 0
        name = "Call" if is_call else "Turn"
        began = int(time.time() * 1000)
        world.system.check_operation_execution(self._workflow, self._n, name)
        if self._n == 2 * TURNS:
            return self._end(began)
        world.runs.is_cancelled(self._run)
        if self._n == 2:  # one call of the run reaches outside
            call = f"{self._run}-{self._n}"
            self._log.ledger().begin(call, "send", time.time())
        start = time.perf_counter()
        self._log.append([ENTRY])
        world.appends.append(time.perf_counter() - start)
        self._record(
            name, {"is": f"{name}Result", "n": self._n, "calls": [["call-1", "send"]]}, began
        )
        return self._of._pace * random.uniform(0.5, 1.5) if not is_call else 0.0

    def _end(self, began: int) -> None:
        assert self._log is not None
        self._log.append([ENTRY])
        self._log.close()
        self._of.open.remove(self._log)
        self._world.runs.end(self._run, 1, "done", "It is done.")
        self._record("Finish", {"is": "FinishResult", "ended": "done"}, began)
        self._world.system.update_workflow_outcome(
            self._workflow, "SUCCESS", output='"done"', owner_xid=self._owner
        )
        self._of.worker._active.discard(self._workflow)
        self._of._busy -= 1

    def _record(self, name: str, output: dict[str, Any], began: int) -> None:
        self._world.steps += 1
        self._world.system.record_operation_result(
            {
                "workflow_uuid": self._workflow,
                "function_id": self._n,
                "function_name": name,
                "output": json.dumps(output),
                "error": None,
                "child_workflow_id": None,
                "serialization": DBOSPortableJSON.name(),
                "started_at_epoch_ms": began,
            },
            owner_xid=self._owner,
        )


@contextmanager
def _nothing(*given: Any) -> Generator[Any]:
    yield None


# Filling


def submitted(world: World, count: int) -> None:
    """Submit runs for any machine."""
    about = {
        "kind": "run",
        "task": "x" * 200,
        "model": "script",
        "flags": {},
        "base": {"kind": "empty"},
    }
    for _ in range(count):
        world.runs.submit("x" * 200, about=about)


def multiply(world: World, run: str, count: int) -> None:
    """Store copies of a run that has ended, with everything it left in the tables."""
    end = f"replace(%s, '{run}', '{run}-' || lpad(n::text, 7, '0'))"
    for table, key, more in (
        ("wink_runs", "id", ("mark", "submit_key")),
        ("wink_sessions", "name", ()),
        ("wink_saves", "session", ()),
        ("wink_outcomes", "session", ()),
        ("dbos.workflow_status", "workflow_uuid", ("inputs", "queue_partition_key", "owner_xid")),
        ("dbos.operation_outputs", "workflow_uuid", ()),
    ):
        schema, _, name = table.rpartition(".")
        columns = [
            str(row[0])
            for row in world.execute(
                "SELECT column_name FROM information_schema.columns WHERE table_name = ? AND"
                " table_schema = ? AND is_generated = 'NEVER'",
                name,
                schema or "public",
            )
        ]
        values = [
            end % each
            if each in (key, "inputs", "queue_partition_key")
            else f"{each} || n::text"
            if each in more
            else each
            for each in columns
        ]
        matched = f"{key} = '{run}'" if key != "workflow_uuid" else f"{key} = '{run}/1'"
        names = ", ".join(columns)
        world.execute(
            f"INSERT INTO {table} ({names}) SELECT {', '.join(values)} FROM {table},"
            f" generate_series(1, {count:d}) AS n WHERE {matched}"
        )


def add_approvals(world: World, run: str, count: int) -> None:
    """Store approvals: many that were answered, a hundredth of them open."""
    request = ApprovalRequest(
        tool_name="send",
        description="Sends.",
        arguments={"text": "x" * 300},
        reach="irreversible",
        call_id="call-1",
        session_id="",
    )
    queued = world.runs.submit("x", about={})
    world.runs.ask(queued.id, request)
    world.runs.cancel(queued.id)
    names = "call_id, policy, digest, request, sitting, asked_at, approved, reason, answered_by"
    world.execute(
        f"INSERT INTO wink_approvals (id, run, state, {names}) SELECT id || n, '{run}-' ||"
        " lpad(n::text, 7, '0'), CASE WHEN mod(n, 100) = 0 THEN 'open' ELSE 'answered' END,"
        f" {names} FROM wink_approvals, generate_series(1, {count:d}) AS n"
    )


# Measuring


class Server:
    """The processor time of a PostgreSQL server."""

    def __init__(self, data: Path) -> None:
        self._pid = int((data / "postmaster.pid").read_text().split()[0])

    def seconds(self) -> float:
        """Of all its processes, those that have ended included."""
        total = self._of(self._pid, with_children=True)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError, ValueError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[1]) == self._pid:
                        total += self._of(int(entry.name), with_children=False)
        return total

    def _of(self, pid: int, *, with_children: bool) -> float:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            last = 15 if with_children else 13
            return sum(map(int, fields[11:last])) / os.sysconf("SC_CLK_TCK")
        return 0.0


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def level(
    world: World, server: Server, given: argparse.Namespace, *, workers: int, jobs: int, poll: float
) -> float:
    """Let so many workers work for some seconds, print what was seen; returns the delay."""
    schedule = Schedule(world, given.threads)
    world.execute("DELETE FROM wink_workers")
    made = [SimulatedWorker(world, schedule, n, jobs, given.pace, poll) for n in range(workers)]
    for each in made:
        world.runs.beat(each.worker.name, each.worker.machine)
        each.begin()
    schedule.start()
    time.sleep(given.seconds / 3)  # until they have runs
    for found in (world.appends, world.polls, world.late):
        found.clear()
    world.steps = world.engine.taken_over = 0
    sql = (
        "SELECT xact_commit + xact_rollback FROM pg_stat_database"
        " WHERE datname = current_database()"
    )
    before, cpu, own, began = (
        world.execute(sql)[0][0],
        server.seconds(),
        time.process_time(),
        time.perf_counter(),
    )
    time.sleep(given.seconds)
    taken = time.perf_counter() - began
    ((connections,),) = world.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    )
    transactions = (world.execute(sql)[0][0] - before) / taken
    database, client = (server.seconds() - cpu) / taken, (time.process_time() - own) / taken
    busy = sum(each._busy for each in made)
    schedule.stop()
    for each in made:
        for log in list(each.open):
            log.close()
    world.execute("UPDATE dbos.workflow_status SET status = 'CANCELLED' WHERE status = 'PENDING'")
    world.execute("UPDATE wink_runs SET status = 'cancelled' WHERE status = 'running'")
    late = quantile(world.late, 0.5)
    print(
        f"{workers:>5} x {jobs:<3} poll {poll:>4} s: {transactions:6.0f} transactions/s, "
        f"{world.steps / taken:6.1f} steps/s, {busy} runs open, append p50 "
        f"{1000 * quantile(world.appends, 0.5):.1f} p99 "
        f"{1000 * quantile(world.appends, 0.99):.0f} ms, poll p50 "
        f"{1000 * quantile(world.polls, 0.5):.1f} ms, behind schedule p50 {1000 * late:.0f} ms, "
        f"{connections} connections, processors: database {database:.2f}, simulator {client:.2f}, "
        f"taken for dead {world.engine.taken_over}",
        flush=True,
    )
    return late


TABLES = """
    SELECT c.oid::regclass::text, pg_total_relation_size(c.oid), c.reltuples::bigint
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind = 'r' AND (c.relname LIKE 'wink%' OR n.nspname = 'dbos')
    ORDER BY 2 DESC LIMIT 8
"""
QUERIES = {
    "queued runs to enqueue": (
        "SELECT id FROM wink_runs WHERE status = 'queued' AND enqueued < sitting ORDER "
        "BY updated_at LIMIT 100"
    ),
    "wink ps": (
        "SELECT id FROM wink_runs WHERE status = 'running' ORDER BY submitted_at DESC, id DESC"
    ),
    "wink ps, counts": "SELECT status, count(*) FROM wink_runs GROUP BY status",
    "a run by id or mark": "SELECT id FROM wink_runs WHERE id = 'x' OR mark = 'x' LIMIT 2",
    "a run by prefix": (
        "SELECT id FROM wink_runs WHERE id >= '20261118' AND id < '20261119' ORDER BY id LIMIT 4"
    ),
    "approvals waiting": (
        "SELECT id FROM wink_approvals WHERE state = 'open' ORDER BY asked_at, id"
    ),
    "approvals of a run": (
        "SELECT id FROM wink_approvals WHERE state = 'open' AND run = 'x' ORDER BY asked_at, id"
    ),
    "workflows taken (DBOS)": (
        "SELECT workflow_uuid FROM dbos.workflow_status WHERE status = 'PENDING' AND "
        "name = 'wink_sitting' ORDER BY created_at"
    ),
    "saves of a session": (
        "SELECT number, text FROM wink_saves WHERE session = 'x' AND number > 3 ORDER BY number"
    ),
    "a ledger's next number": (
        "SELECT COALESCE(MAX(number), 0) + 1 FROM wink_outcomes WHERE session = 'x'"
    ),
}


def show_tables_and_plans(world: World) -> None:
    with world.database.transaction() as transaction:
        transaction.execute("SELECT 1")
    for name, size, rows in world.execute(TABLES.replace("%", "%%")):
        print(f"  {name:<28} {size / 1e6:8.1f} MB, {rows:>9} rows")
    ((total,),) = world.execute("SELECT pg_database_size(current_database())")
    print(f"  {'the database':<28} {total / 1e6:8.1f} MB")
    for what, sql in QUERIES.items():
        plan = [row[0] for row in world.execute(f"EXPLAIN (ANALYZE, TIMING OFF) {sql}")]
        scans = [line.strip() for line in plan if "Scan" in line]
        spent = plan[-1].strip()
        print(f"  {what:<26} {spent:<26} {'; '.join(each.partition('(')[0] for each in scans)}")


def show_backlog(world: World, sizes: Sequence[int]) -> None:
    """Print what one look into the queue costs with so many runs in it."""
    for partitioned in (False, True):
        limits: dict[str, Any] = {"worker_concurrency": 4}
        if partitioned:
            limits["partition_concurrency"] = 1
        queue = world.queue("backlog", 1.0 + partitioned, **limits)
        world.execute("DELETE FROM dbos.workflow_status WHERE queue_name = 'backlog'")
        there = 0
        for size in sizes:
            row = workflow_of(
                DurableRun(
                    id="backlog",
                    task="",
                    status="queued",
                    about={},
                    machine="",
                    partition="",
                    sitting=1,
                    submitted_at=0,
                    updated_at=0,
                    worker="",
                    detail="",
                )
            ) | {"queue_name": "backlog", "queue_partition_key": "p" if partitioned else None}
            if not there:
                world.system.init_workflow(row, creator_xid=new_id())
                there = 1
            columns = (
                "status, name, created_at, updated_at, application_version, priority, inputs,"
                " serialization, is_debounced, application_name, queue_name, recovery_attempts,"
                " rate_limited"
            )
            world.execute(
                f"INSERT INTO dbos.workflow_status (workflow_uuid, queue_partition_key, {columns})"
                f" SELECT 'backlog' || n, queue_partition_key || n, {columns}"
                " FROM dbos.workflow_status,"
                f" generate_series({there + 1}, {size}) AS n WHERE workflow_uuid = 'backlog/1'"
            )
            there = size
            world.execute("ANALYZE dbos.workflow_status")
            taken: list[float] = []
            for _ in range(3):
                began = time.perf_counter()
                if partitioned:
                    got = world.system.start_queued_partitioned_workflows(
                        queue, "one", VERSION, 1, owner_xid=new_id()
                    )
                else:
                    got, _ = world.system.start_queued_workflows(
                        queue, "one", VERSION, None, 3, owner_xid=new_id()
                    )
                taken.append(time.perf_counter() - began)
                assert len(got) == 1
            kind = "one partition each" if partitioned else "no partitions"
            print(
                f"  {size:>7} queued, {kind}: a poll takes {1000 * statistics.median(taken):.1f} ms"
            )
        world.execute("DELETE FROM dbos.workflow_status WHERE queue_name = 'backlog'")


STEP = """
\\set n random(1, {runs})
\\set f random(1000, 2000000000)
SELECT output, error FROM dbos.operation_outputs
 WHERE workflow_uuid = '{run}-' || lpad(:n::text, 7, '0') || '/1' AND function_id = :f;
SELECT status FROM wink_runs WHERE id = '{run}-' || lpad(:n::text, 7, '0');
BEGIN;
UPDATE wink_sessions SET last = last + 1,
 expires = extract(epoch from clock_timestamp())::double precision + 30
 WHERE name = '{run}-' || lpad(:n::text, 7, '0') AND token = 1;
INSERT INTO wink_saves SELECT name, last, repeat('x', 750) FROM wink_sessions
 WHERE name = '{run}-' || lpad(:n::text, 7, '0');
COMMIT;
BEGIN;
SELECT status, owner_xid FROM dbos.workflow_status
 WHERE workflow_uuid = '{run}-' || lpad(:n::text, 7, '0') || '/1' FOR SHARE;
INSERT INTO dbos.operation_outputs (workflow_uuid, function_id, function_name, output)
 VALUES ('{run}-' || lpad(:n::text, 7, '0') || '/1', :f, 'Call', repeat('x', 80))
 ON CONFLICT DO NOTHING;
COMMIT;
"""


def show_saturation(
    world: World, server: Server, folder: Path, run: str, runs: int, clients: Sequence[int]
) -> None:
    """Print the steps per second that the database can record.

    The statements of a step are sent by pgbench, which takes far less processor time than we do.
    """
    script = folder / "step.sql"
    script.write_text(STEP.format(run=run, runs=runs))
    pgbench = next(Path("/usr/lib/postgresql").glob("*/bin/pgbench"), Path("pgbench"))
    for count in clients:
        cpu, began = server.seconds(), time.perf_counter()
        done = subprocess.run(
            [str(pgbench), "-n", "-M", "prepared", "-f", str(script), "-c", str(count), "-j", "2",
             "-T", "8", world.url],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        used = (server.seconds() - cpu) / (time.perf_counter() - began)
        told = [
            each for each in done.stdout.splitlines() if "latency average" in each or "tps" in each
        ]
        print(
            f"  {count} connections that only write steps: {'; '.join(told)}; database {used:.2f}"
        )


def simulate(given: argparse.Namespace, folder: Path) -> None:
    postgres = Postgres(folder)
    postgres.start()
    try:
        world = World(postgres.new_database(), given.pool, given.lease)
        server = Server(folder / "data")
        print(
            f"a simulation: {given.pool} + {given.pool} connections, {given.threads} threads,"
            f" load {os.getloadavg()[0]:.1f}"
        )
        began = time.perf_counter()
        run = first_run(world, given)
        multiply(world, run, given.runs)
        add_approvals(world, run, given.runs // 5)
        vacuumed(postgres, world.url)
        print(f"{given.runs} runs stored in {time.perf_counter() - began:.0f} s")
        show_tables_and_plans(world)
        show_saturation(world, server, folder, run, given.runs, given.clients)
        show_backlog(world, [100, 1000, 10_000])
        submitted(world, given.queued)
        for poll in given.poll:
            for workers in given.workers:
                late = level(world, server, given, workers=workers, jobs=given.jobs, poll=poll)
                if late > 2.0:
                    break  # saturated: more of them only wait longer
        for what, count in world.errors.most_common(5):
            print(f"{count} x {what}")
        world.database.close()
    finally:
        postgres.stop()


def first_run(world: World, given: argparse.Namespace) -> str:
    """Perform one run, which the others are copies of."""
    submitted(world, 1)
    (run,) = world.runs.list()
    schedule = Schedule(world, 2)
    worker = SimulatedWorker(world, schedule, 0, 1, 0.0, 0.1)
    worker.begin()
    schedule.start()
    until = time.monotonic() + 30
    while not world.runs.find(run.id).has_ended and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)
    schedule.stop()
    assert world.runs.find(run.id).status == "done", world.errors
    return run.id


def vacuumed(postgres: Postgres, url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--queued", type=int, default=3_000, help="submitted before the ramp")
    parser.add_argument("--workers", type=int, nargs="*", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of a worker")
    parser.add_argument("--poll", type=float, nargs="+", default=[0.5, 10.0])
    parser.add_argument("--pace", type=float, default=5.0, help="seconds of a turn of the model")
    parser.add_argument("--seconds", type=float, default=9.0, help="for each number of workers")
    parser.add_argument("--lease", type=float, default=30.0)
    parser.add_argument("--pool", type=int, default=16, help="connections of ours, and of DBOS")
    parser.add_argument("--threads", type=int, default=24)
    given = parser.parse_args()
    logging.getLogger("dbos").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="wink-simulation-") as place:
        folder = Path(place)
        folder.chmod(0o755)
        (folder / "pg").mkdir()
        simulate(given, folder / "pg")


if __name__ == "__main__":
    main()
