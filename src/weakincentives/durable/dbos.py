"""Runs on DBOS: its queue hands them to workers, and it records their steps.

A workflow is one sitting of a run; its id is that of the run and the number of the sitting. DBOS
has the ids and the names of what was done, never a text: those are in the run's session. Who may
go on with a run is decided by the lease on that session, so a workflow that two workers execute at
once, for whatever reason, is performed by one of them.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weakincentives.core.call import new_id
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.logs import get_logger
from weakincentives.core.programs import loading
from weakincentives.durable.host import Elsewhere, Hosting, Opening, Prepare, RunHost
from weakincentives.durable.steps import (
    Step,
    StepResult,
    drive,
    drive_whole,
    from_json,
    to_json,
)
from weakincentives.errors import DatabaseUnavailable, MissingExtra, WinkError
from weakincentives.runtime.main_loop import sigterm_calls
from weakincentives.runtime.stores.runs import DurableRun, Runs
from weakincentives.runtime.stores.sql import SqlStore
from weakincentives.runtime.tool_call import step_by_hand

if TYPE_CHECKING:
    from dbos import DBOS

    from weakincentives.filesystem.portable import ObjectStorage

_logger = get_logger(__name__)

QUEUE = "wink"
"""The queue of runs that any machine may take; those of one machine have its name behind an @."""
ONE_AT_A_TIME = "wink/partitions"
"""The queue of runs that any machine may take, one at a time of each partition.

Apart, because a look into a queue with partitions costs as much as there are partitions in it.
"""
WORKFLOW = "wink_sitting"
WHOLE = "whole_run"
"""In what a run says about itself: perform each sitting as one step."""
_APPLICATION = "wink"
_VERSION = "1"
"""Of the steps: DBOS gives a workflow only to workers with the same one."""
_NEEDED_SQLITE = (3, 42)
_PATIENCE = 60.0
"""Seconds for which a worker that starts waits for a database that cannot be reached."""
_PAUSE = 0.5
_FEW = 50
"""Workers up to which each of them does the housekeeping as often as if it were alone."""
_SELDOM = 10.0
"""How much less often at most, among many."""


def default_machine() -> str:
    """Return the name of this machine."""
    return socket.gethostname() or "localhost"


class DbosEngine:
    """DBOS, with its tables beside those of the runs; with SQLite, in a file of its own.

    In one process, two versions of SQLite must never open the same file: each would release the
    locks of the other. DBOS may need a newer one than Python has.

    Args:
        url: ``sqlite:///FILE`` or ``postgresql://...``, as for ``Database``.
        poll: Seconds between two looks into a queue.
    """

    def __init__(self, url: str, *, poll: float = 0.5) -> None:
        self.url = url
        self.poll = poll
        self._is_launched = False

    @property
    def system_url(self) -> str:
        """Where DBOS has its own tables."""
        return f"{self.url}.dbos" if self.url.startswith("sqlite") else self.url

    def enqueue(self, run: DurableRun) -> None:
        """Put the current workflow of a run into the queue; without effect if it is there.

        Only a worker can. Others leave it to the workers, which look for it every second.
        """
        options: Any = {
            "workflow_name": WORKFLOW,
            "queue_name": queue_of(run),
            "workflow_id": run.workflow,
            "app_version": _VERSION,
        }
        if partition := partition_of(run):
            options["queue_partition_key"] = partition
        whole = bool(run.about.get(WHOLE))
        with _reported():
            _dbos().enqueue_workflow_with_options(options, run.id, run.sitting, whole)

    def launch(self, worker: Worker) -> None:
        """Begin to take workflows from the queues, in threads."""
        dbos = _dbos()
        from dbos import DBOSPortableJSONSerializer

        global _worker
        if _worker is not None:
            raise WinkError("a worker runs in this process already")
        _worker = worker
        _quiet_logs()
        config: Any = {
            "name": _APPLICATION,
            "system_database_url": self.system_url,
            "application_version": _VERSION,
            "executor_id": worker.name,
            "max_executor_threads": 2 * worker.concurrency + 8,
            # It reads only JSON: nothing from a database is unpickled.
            "serializer": DBOSPortableJSONSerializer(),
            "log_level": "WARNING",
            **self._engine_options(),
        }
        try:
            with _reported():
                dbos(config=config)
                _quiet_logs()  # each step adds handlers of its own
                self._is_launched = True
                _register()
                queues = queues_of(worker)
                dbos.listen_queues([name for name, _ in queues])
                dbos.launch()
                _quiet_logs()
                for name, limits in queues:
                    dbos.register_queue(
                        name,
                        polling_interval_sec=self.poll,
                        on_conflict="always_update",
                        **limits,
                    )
        except BaseException:
            self.close()
            raise

    def pending(self, executor: str | None = None) -> list[tuple[str, str, str]]:
        """Return the workflows that were taken and have not ended: id, executor and queue."""
        with _reported():
            found = _dbos().list_workflows(
                status="PENDING",
                name=WORKFLOW,
                executor_id=executor,
                load_input=False,
                load_output=False,
            )
        return [(e.workflow_id, e.executor_id or "", e.queue_name or QUEUE) for e in found]

    def resume(self, workflow: str, queue: str) -> None:
        """Put a workflow back into its queue."""
        with _reported():
            _dbos().resume_workflow(workflow, queue_name=queue)

    def close(self) -> None:
        """Stop taking workflows, and disconnect."""
        global _worker
        if self._is_launched:
            self._is_launched, _worker = False, None
            _dbos().destroy()

    def _engine_options(self) -> dict[str, Any]:
        """Return what DBOS needs for this kind of database."""
        if not self.url.startswith("sqlite"):
            return {}
        if sqlite3.sqlite_version_info >= _NEEDED_SQLITE:
            return {}
        try:
            from pysqlite3 import dbapi2  # pyright: ignore
        except ImportError as error:
            needed = ".".join(map(str, _NEEDED_SQLITE))
            raise WinkError(
                f"DBOS needs SQLite {needed} or later, and this Python has"
                f" {sqlite3.sqlite_version}: pip install pysqlite3-binary, or use PostgreSQL"
            ) from error
        return {"db_engine_kwargs": {"module": dbapi2}}


def queue_of(run: DurableRun) -> str:
    """Return the queue of a run: that of its machine, or one of those for all."""
    if run.machine:
        return f"{QUEUE}@{run.machine}"
    return ONE_AT_A_TIME if run.partition else QUEUE


def partition_of(run: DurableRun) -> str | None:
    """Return the partition of a run in its queue; None if that has no partitions."""
    return None if queue_of(run) == QUEUE else run.partition or run.id


def queues_of(worker: Worker) -> list[tuple[str, dict[str, Any]]]:
    """Return the queues that a worker takes runs from, each with its limits."""
    at_once: dict[str, Any] = {"worker_concurrency": worker.concurrency}
    partitioned = {**at_once, "partition_concurrency": 1}
    return [
        (QUEUE, at_once),
        (ONE_AT_A_TIME, partitioned),
        (f"{QUEUE}@{worker.machine}", partitioned),
    ]


class Worker:
    """Takes runs from the queue and performs them, some at a time, until it is stopped.

    It reports to the table of workers. When a worker stops reporting, the first other one to notice
    takes over its runs. SIGTERM and ``stop`` finish the step in progress of each run; other workers
    continue.

    Args:
        engine: The queue.
        runs: The table of runs, in the same database.
        prepare: Returns what a run works with.
        objects: Has the contents of files.
        cache: A directory for copies of bases that come from elsewhere.
        machine: Runs that are bound to a machine are taken if it is this one.
        concurrency: How many runs it performs at a time.
        lease: Seconds after which a silent worker counts as dead.
        opening: Returns what must be known to open a run.
    """

    def __init__(
        self,
        engine: DbosEngine,
        runs: Runs,
        prepare: Prepare,
        *,
        objects: ObjectStorage,
        cache: Path,
        name: str = "",
        machine: str = "",
        concurrency: int = 4,
        lease: float = 30.0,
        opening: Callable[[DurableRun], Opening] = lambda run: Opening(),
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self.engine = engine
        self.runs = runs
        self.machine = machine or default_machine()
        self.name = name or f"{self.machine}:{os.getpid()}:{new_id()[:6]}"
        self.concurrency = concurrency
        self.lease = lease
        self._stopping, self._has_left = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._active: Counter[str] = Counter()
        """How often each workflow is executed here: again, if it was taken for lost."""
        self._idle = threading.Condition(self._lock)
        self._orphans: dict[str, float] = {}
        """Workflows that DBOS says we have and we do not, since when."""
        self._crowd = 1
        """Workers alive when it last looked."""
        self._looked = float("-inf")
        self.hosting = Hosting(
            runs=runs,
            store=SqlStore(runs.database, lease=lease),
            objects=objects,
            prepare=prepare,
            cache=cache,
            worker=self.name,
            wait=2 * lease,
            is_stopping=self._stopping.is_set,
            opening=opening,
        )

    def run(self) -> None:
        """Perform runs until SIGTERM, or until ``stop`` is called."""
        self.runs.beat(self.name, self.machine)  # first: what it takes is not to seem abandoned
        beating = threading.Thread(target=self._beat, name="wink heartbeat", daemon=True)
        with sigterm_calls(self.stop, every=True):
            try:
                self._launch()
                beating.start()
                pause = 0.0
                while not self._stopping.wait(pause):
                    pause = self.housekeep()
            finally:
                self._stopping.set()
                self._leave()

    def _launch(self) -> None:
        """Begin to take runs, once the database can be reached."""
        began = SYSTEM_CLOCK.monotonic()
        while True:
            try:
                return self.engine.launch(self)
            except DatabaseUnavailable as error:
                if self._stopping.is_set() or SYSTEM_CLOCK.monotonic() - began > _PATIENCE:
                    raise
                _logger.warning("the database cannot be reached: %s", error)
                self._stopping.wait(_PAUSE)

    def stop(self) -> None:
        """Finish the step in progress of each run, hand the runs over, and let ``run`` return."""
        self._stopping.set()

    def perform(self, run_id: str, sitting: int, whole: bool) -> str:
        """Perform one workflow, in a thread of the engine; returns how it ended."""
        workflow = f"{run_id}/{sitting}"
        with self._lock:
            self._active[workflow] += 1
        host = RunHost(run_id, sitting, self.hosting)
        try:
            return step_by_hand(drive_whole if whole else drive, run_id, _DbosJournal(host))
        except Exception as error:
            # DBOS will note that the workflow has failed, so no worker will retry it.
            if _is_of_the_database(error):
                raise Elsewhere(str(error)) from error
            _logger.exception("run %s cannot be driven", run_id)
            host.close()
            self.runs.end(run_id, sitting, "failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            host.close()
            with self._lock:
                self._active[workflow] -= 1
                if not self._active[workflow]:
                    del self._active[workflow]
                self._idle.notify_all()

    def housekeep(self) -> float:
        """Do what every worker does now and then; returns the seconds until the next time.

        Among many workers, each does it less often: together they look often enough.
        """
        self._try(self.enqueue_missing)
        crowd = min(max(1.0, self._crowd / _FEW), _SELDOM)
        now = SYSTEM_CLOCK.monotonic()
        if now - self._looked >= crowd * self.lease / 5:
            self._looked = now
            self._try(self.take_over)
        return crowd * min(1.0, self.lease / 10)

    def enqueue_missing(self) -> None:
        """Enqueue the runs that were submitted or answered by a process without DBOS."""
        for run in self.runs.to_enqueue():
            self.engine.enqueue(run)
            self.runs.mark_enqueued(run)

    def take_over(self) -> None:
        """Put the workflows of dead workers back into the queue, and what we have lost ourselves.

        Several workers may do so at once: the lease on the session decides who goes on.
        """
        workers = self.runs.workers()
        alive = {each.name for each in workers if each.seen <= self.lease}
        self._crowd = len(alive)
        now = SYSTEM_CLOCK.monotonic()
        mine: dict[str, float] = {}
        for workflow, executor, queue in self.engine.pending():
            if executor == self.name:
                with self._lock:
                    is_active = workflow in self._active
                since = self._orphans.get(workflow, now)
                if is_active:
                    continue
                mine[workflow] = since
                if now - since < self.lease:
                    continue
            elif executor in alive:
                continue
            _logger.info("taking over %s of %s", workflow, executor)
            self.engine.resume(workflow, queue)
        self._orphans = mine
        for each in workers:
            if each.seen > 10 * self.lease:
                self.runs.leave(each.name)

    def _beat(self) -> None:
        while not self._has_left.is_set():
            self._try(lambda: self.runs.beat(self.name, self.machine))
            self._has_left.wait(self.lease / 5)

    def _leave(self) -> None:
        """Wait for the steps in progress, and hand over what we have."""
        with self._lock:
            while self._active:
                self._idle.wait()
        self._try(self._hand_over)
        self._has_left.set()
        self.engine.close()
        self._try(lambda: self.runs.leave(self.name))

    def _hand_over(self) -> None:
        for workflow, _, queue in self.engine.pending(self.name):
            self.engine.resume(workflow, queue)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except DatabaseUnavailable as error:
            _logger.warning("the database cannot be reached: %s", error)
        except Exception:
            _logger.exception("a worker's housekeeping failed; it will try again")


class _DbosJournal:
    """Records the steps of a workflow with DBOS. A sitting that has to wait ends."""

    def __init__(self, host: RunHost) -> None:
        self._host = host

    async def step(self, step: Step) -> StepResult:
        perform = partial(_performed, self._host)
        options: Any = {"name": type(step).__name__}
        return from_json(_dbos().run_step(options, perform, to_json(step)))

    async def wait(self, run: str, approval: str) -> bool:
        return False


def _performed(host: RunHost, values: Mapping[str, Any]) -> dict[str, Any]:
    return to_json(host.perform(from_json(values)))


_worker: Worker | None = None
"""DBOS has one instance in a process, and finds workflows by their names."""


def _register() -> None:
    @_dbos().workflow(name=WORKFLOW, max_recovery_attempts=None)
    def sitting(run_id: str, number: int, whole: bool) -> str:  # pyright: ignore
        if _worker is None:
            raise WinkError("no worker runs in this process")
        return _worker.perform(run_id, number, whole)


def _dbos() -> type[DBOS]:
    """Import DBOS when it is first needed: a program that submits runs does without it."""
    try:
        with loading():
            from dbos import DBOS
    except ImportError as error:
        raise MissingExtra("durable", "dbos") from error
    return DBOS


@contextmanager
def _reported() -> Generator[None]:
    """Report an unreachable database as ours do."""
    try:
        yield
    except Exception as error:
        if _is_of_the_database(error):
            raise DatabaseUnavailable(f"DBOS cannot use the database: {error}") from error
        raise


def _is_of_the_database(error: Exception) -> bool:
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, SQLAlchemyError | DatabaseUnavailable)


def _quiet_logs() -> None:
    """Send the log of DBOS to ours, at the level of warnings."""
    logger = logging.getLogger("dbos")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.WARNING)
