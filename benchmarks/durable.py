"""Durable runs on a real PostgreSQL: overhead of a step beside plain DBOS, and steps per second.

    python benchmarks/durable.py [--runs 8] [--turns 10]

It starts a PostgreSQL of its own (the tests' way) and workers in processes of their own. A model
that takes 100 ms per turn answers each turn with one call that appends a line to a file.

Seen on a virtual machine with 2 quiet cores (18 November 2026, --runs 8 --turns 5, load 2 from the
benchmark itself): a step takes 13.8 ms with plain DBOS, 38.3 ms with ours, which includes DBOS's
own record, and 18.7 ms with the whole run as one step; 10.8, 22.0 and 41.9 steps/s with 1, 2 and 4
workers of 2 runs each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "durable")]

from fleet import Fleet  # noqa: E402

from postgres import Postgres  # noqa: E402


def plain_dbos(url: str, steps: int) -> float:
    """Return the milliseconds of a step of plain DBOS that does nothing."""
    from dbos import DBOS

    DBOS(config={"name": "plain", "system_database_url": url, "log_level": "ERROR"})

    @DBOS.workflow()
    def work() -> list[float]:
        taken: list[float] = []
        for _ in range(steps):
            began = time.perf_counter()
            DBOS.run_step({"name": "nothing"}, lambda: {"n": 1})
            taken.append(time.perf_counter() - began)
        return taken

    DBOS.launch()
    taken = work()
    DBOS.destroy(destroy_registry=True)
    return 1000 * statistics.median(taken)


def our_steps(url: str, folder: Path, turns: int, **about: Any) -> float:
    """Return the milliseconds of one of our steps, with a model that answers at once."""
    fleet = Fleet(url, folder, lease=30.0)
    fleet.start(concurrency=1)
    taken: list[float] = []
    try:
        first = fleet.submit([[["note", {"text": "x"}]]])
        fleet.wait_for(first)  # the worker is up
        for _ in range(3):
            run = fleet.submit([[["note", {"text": "x"}]]] * turns, **about)
            fleet.wait_for(run, "running", "done")
            began = time.perf_counter()
            fleet.wait_for(run)
            taken.append((time.perf_counter() - began) / (2 * turns + 2))
    finally:
        fleet.close()
    return 1000 * statistics.median(taken)


def steps_per_second(
    url: str, folder: Path, *, workers: int, runs: int, turns: int, concurrency: int
) -> float:
    """Return the steps per second of some workers, with a model that takes 100 ms per turn."""
    fleet = Fleet(url, folder, lease=30.0)
    try:
        for _ in range(workers):
            fleet.start(concurrency=concurrency)
        for each in [fleet.submit([[["note", {"text": "x"}]]]) for _ in range(2 * workers)]:
            fleet.wait_for(each, seconds=120)
        script = [[["append", {"text": "x"}]]] * turns
        began = time.perf_counter()
        submitted = [fleet.submit(script, delay=0.1) for _ in range(runs)]
        for each in submitted:
            fleet.wait_for(each, seconds=600)
        taken = time.perf_counter() - began
        assert all(len(fleet.lines(each)) == turns for each in submitted)
    finally:
        fleet.close()
    return runs * (2 * turns + 2) / taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wink-bench-") as place:
        folder = Path(place)
        folder.chmod(0o755)
        (folder / "pg").mkdir()
        server = Postgres(folder / "pg")
        server.start()
        try:
            plain = plain_dbos(server.new_database(), 200)
            (folder / "one").mkdir()
            ours = our_steps(server.new_database(), folder / "one", 30)
            (folder / "whole").mkdir()
            whole = our_steps(server.new_database(), folder / "whole", 30, whole_run=True)
            print(
                f"a step: {plain:.1f} ms with plain DBOS, {ours:.1f} ms for one of ours,"
                f" {whole:.1f} ms with the whole run as one step; load {os.getloadavg()[0]:.1f}"
            )
            for workers in (1, 2, 4):
                where = folder / f"workers{workers}"
                where.mkdir()
                found = steps_per_second(
                    server.new_database(),
                    where,
                    workers=workers,
                    runs=given.runs,
                    turns=given.turns,
                    concurrency=given.concurrency,
                )
                print(f"{workers} workers: {found:.1f} steps/s")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
