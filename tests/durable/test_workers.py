"""Workers: killed, paused, stopped and racing, they make each run exactly once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from durable_world import Note
from fleet import PATIENCE, Fleet, Gate, counting_service, orders

from postgres import Postgres
from weakincentives.durable.host import Elsewhere
from weakincentives.runtime import SavedSession
from weakincentives.runtime.stores.runs import DurableRun
from weakincentives.runtime.stores.sql import SqlStore
from weakincentives.session.events import ToolInvoked

pytest.importorskip("dbos")

from dbos import DBOS
from sqlalchemy.exc import OperationalError
from worker_child import make_worker


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'wink.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def fleet(url: str, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(url, tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def service() -> Iterator[str]:
    with counting_service() as url:
        yield url


def turns_of(name: str, service: str, count: int = 4) -> list[Any]:
    """Return turns with calls of every kind."""
    return [
        [
            ["append", {"text": f"{name}{n}"}],
            ["note", {"text": f"{name}{n}"}],
            ["order", {"url": service, "key": f"{name}{n}"}],
        ]
        for n in range(count)
    ]


def check_exact(fleet: Fleet, run: DurableRun, name: str, count: int = 4) -> None:
    """Check that every call of a run took effect once."""
    assert fleet.lines(run) == [f"{name}{n}" for n in range(count)], fleet.logs()
    with SavedSession.open(run.id, store=SqlStore(fleet.runs.database), types=[Note]) as saved:
        records = [e.call_id for e in saved.session[ToolInvoked].all() if e.tool_name != "merge"]
        notes = [each.text for each in saved.session[Note].all()]
    assert sorted(records) == sorted({*records})
    assert len(records) == 3 * count
    assert notes == [f"{name}{n}" for n in range(count)]


def test_a_worker_performs_what_was_submitted(fleet: Fleet, service: str):
    run = fleet.submit(turns_of("a", service, 2))
    whole = fleet.submit(turns_of("b", service, 2), whole_run=True)
    name = fleet.start()

    assert fleet.wait_for(run).detail == "Done.", fleet.logs()
    assert fleet.wait_for(whole).status == "done", fleet.logs()

    check_exact(fleet, run, "a", 2)
    check_exact(fleet, whole, "b", 2)
    assert set(orders(service).values()) == {1}
    fleet.kill(name, signal.SIGTERM)
    assert fleet.runs.workers() == []


@pytest.mark.parametrize("error", [OperationalError("", None, OSError()), ValueError("odd")])
def test_a_step_that_dbos_cannot_record_leaves_no_run_behind_that_nobody_goes_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    url = f"sqlite:///{tmp_path / 'wink.db'}"
    worker = make_worker(url, tmp_path, "w1")
    (tmp_path / "project").mkdir()
    run = worker.runs.submit("Work.", about={"workspace": str(tmp_path / "project"), "turns": []})

    def cannot(*args: object) -> None:
        raise error

    monkeypatch.setattr(DBOS, "run_step", cannot)
    of_the_database = isinstance(error, OperationalError)
    with pytest.raises(Elsewhere if of_the_database else ValueError):  # DBOS notes no Elsewhere
        worker.perform(run.id, 1, False)
    found = worker.runs.find(run.id)
    assert (found.status, found.detail) == (
        ("queued", "") if of_the_database else ("failed", "ValueError: odd")
    )
    worker.runs.database.close()


pytestmark = pytest.mark.heavy


def test_a_killed_worker_s_run_continues_elsewhere(fleet: Fleet, service: str):
    gate = Gate(fleet.folder)
    run = fleet.submit(turns_of("a", service), **gate.about)
    first = fleet.start()
    gate.wait(fleet)
    second = fleet.start()
    fleet.kill(first)
    gate.open()

    assert fleet.wait_for(run).status == "done", fleet.logs()

    check_exact(fleet, run, "a")
    assert set(orders(service).values()) == {1}
    assert fleet.runs.find(run.id).worker == second


def test_workers_that_are_killed_again_and_again_lose_nothing_and_double_nothing(
    fleet: Fleet, service: str
):
    names = [f"r{n}x" for n in range(4)]
    runs = [fleet.submit(turns_of(name, service), delay=0.2) for name in names]
    for _ in range(2):
        fleet.start()
    for _ in range(6):
        time.sleep(random.uniform(1.5, 3.5))
        fleet.kill(random.choice(list(fleet.workers)))
        fleet.start()
    fleet.until(lambda: all(fleet.runs.find(run.id).has_ended for run in runs))

    for run, name in zip(runs, names, strict=True):
        found = fleet.runs.find(run.id)
        assert found.status == "done", (found, fleet.logs())
        check_exact(fleet, run, name)
    assert max(orders(service).values()) == 1


def test_a_worker_paused_beyond_its_lease_changes_nothing_when_it_goes_on(
    fleet: Fleet, service: str, url: str
):
    if url.startswith("sqlite"):
        pytest.skip("a process that is paused in a transaction locks SQLite for everybody")
    gate = Gate(fleet.folder)
    run = fleet.submit(turns_of("a", service), **gate.about)
    first = fleet.start()
    gate.wait(fleet)
    fleet.kill(first, signal.SIGSTOP)
    second = fleet.start()
    fleet.until(lambda: fleet.runs.find(run.id).worker == second)
    gate.open()
    fleet.kill(first, signal.SIGCONT)

    assert fleet.wait_for(run).status == "done", fleet.logs()
    time.sleep(1.0)  # in which the first would do what it must not
    check_exact(fleet, run, "a")
    assert set(orders(service).values()) == {1}
    later = fleet.submit(turns_of("b", service, 1))
    assert fleet.wait_for(later).status == "done", "both go on to work"


def test_a_stopped_worker_hands_its_runs_over_at_once(fleet: Fleet, service: str):
    fleet.lease = 2 * PATIENCE  # nobody would take it over in time
    gate = Gate(fleet.folder)
    run = fleet.submit(turns_of("a", service), **gate.about)
    first = fleet.start()
    gate.wait(fleet)
    second = fleet.start()
    fleet.until(lambda: second in [each.name for each in fleet.runs.workers()])
    run_2 = fleet.submit(turns_of("b", service), delay=0.4)
    os.kill(fleet.workers[first].pid, signal.SIGTERM)
    gate.open()
    fleet.workers.pop(first).wait(PATIENCE)

    assert fleet.wait_for(run).status == "done", fleet.logs()
    assert fleet.wait_for(run_2).status == "done", fleet.logs()
    check_exact(fleet, run, "a")
    assert [each.name for each in fleet.runs.workers()] == [second]


def test_an_approval_waits_across_restarts_and_counts_once(fleet: Fleet, service: str):
    run = fleet.submit(turns_of("a", service, 1), asks=["order"])
    first = fleet.start()
    fleet.wait_for(run, "waiting")
    fleet.kill(first)
    (asked,) = fleet.runs.pending(run.id)
    second = fleet.start()
    fleet.runs.answer(asked.id, approved=True, digest=asked.digest)
    fleet.kill(second)
    fleet.start()

    assert fleet.wait_for(run).status == "done", fleet.logs()
    assert orders(service) == {"a0": 1}
    assert fleet.lines(run) == ["a0"]
    assert fleet.runs.find(run.id).sitting == 2


def test_a_cancelled_run_stops(fleet: Fleet, service: str):
    run = fleet.submit(turns_of("a", service, 50), delay=0.2)
    fleet.start()
    fleet.until(lambda: bool(orders(service)))
    fleet.runs.cancel(run.id)
    store = SqlStore(fleet.runs.database)
    fleet.until(lambda: not store.is_in_use(run.id))  # its worker has let go

    assert len(orders(service)) < 50
    assert fleet.lines(run) == []
    assert fleet.runs.find(run.id).status == "cancelled"


def test_a_database_that_restarts_is_waited_for(postgres: Postgres, tmp_path: Path, service: str):
    fleet = Fleet(postgres.new_database(), tmp_path, lease=5.0)
    try:
        run = fleet.submit(turns_of("a", service, 6), delay=0.3)
        fleet.start()
        fleet.wait_for(run, "running")
        for _ in range(2):
            time.sleep(1.0)
            postgres.restart()

        assert fleet.wait_for(run).status == "done", fleet.logs()
        check_exact(fleet, run, "a", 6)
        assert set(orders(service).values()) == {1}
    finally:
        fleet.close()
