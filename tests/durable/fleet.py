"""Workers in processes of their own, that a test can kill, pause and stop."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

from ledger_service import serve

from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import DurableRun, Runs

CHILD = Path(__file__).with_name("worker_child.py")


PATIENCE = 300.0
"""Seconds until what must happen counts as not happening: a loaded machine is slow."""


class Gate:
    """Where the model of a run waits in its third turn, until a test lets it go on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        self.about = {"gate": str(self.path)}

    def wait(self, fleet: Fleet) -> None:
        """Return once the run is there."""
        fleet.until(Path(f"{self.path}.reached").exists)

    def open(self) -> None:
        self.path.touch()


class Fleet:
    """Workers on one database, and the projects of its runs."""

    def __init__(self, url: str, folder: Path, *, lease: float = 2.0) -> None:
        self.url = url
        self.folder = folder
        self.lease = lease
        self.runs = Runs(Database(url))
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._count = 0

    def start(self, *, concurrency: int = 4) -> str:
        """Start a worker and return its name."""
        self._count += 1
        name = f"w{self._count}"
        command = [sys.executable, str(CHILD), self.url, str(self.folder), name]
        log = open(self.folder / f"{name}.log", "wb")  # noqa: SIM115  # the child's
        with log:
            self.workers[name] = subprocess.Popen(
                [*command, str(concurrency), str(self.lease)], stderr=log, stdout=log
            )
        return name

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.workers[name].pid, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.workers.pop(name).wait(PATIENCE)

    def submit(self, turns: Sequence[Any], **about: Any) -> DurableRun:
        """Submit a run on a project of its own."""
        self._count += 1
        project = self.folder / f"project{self._count}"
        project.mkdir()
        given = {"workspace": str(project), "turns": turns, **about}
        return self.runs.submit("Work.", about=given, machine="here")

    def wait_for(self, run: DurableRun, *statuses: str) -> DurableRun:
        """Return a run once it has a status; by default once it has ended."""

        def is_there() -> bool:
            found = self.runs.find(run.id)
            return found.status in statuses or (not statuses and found.has_ended)

        self.until(is_there)
        return self.runs.find(run.id)

    def until(self, is_there: Callable[[], bool]) -> None:
        """Return once something is so."""
        until = time.monotonic() + PATIENCE
        while not is_there():
            assert time.monotonic() < until, self.logs()
            time.sleep(0.05)

    def lines(self, run: DurableRun) -> list[str]:
        path = Path(run.about["workspace"]) / "lines.txt"
        return path.read_text().split() if path.exists() else []

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for process in self.workers.values():
            process.kill()
            process.wait()
        self.runs.database.close()


@contextmanager
def counting_service() -> Iterator[str]:
    """Yield the URL of a service that counts orders."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


def orders(service: str) -> dict[str, int]:
    """Return how often each key was ordered, at most at any time."""
    with urlopen(f"{service}/all") as response:
        return json.load(response)["most"]
