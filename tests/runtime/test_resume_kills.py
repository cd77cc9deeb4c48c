"""Kills between the commit of files, the ledger and the save of the session; twice in a row."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from ledger_service import serve

CHILD = Path(__file__).with_name("resume_child.py")
OUTSIDE = ("handler", "answer", "answered", "end", "ended")
POINTS = [
    *((tool, point) for tool in ("note", "shell") for point in ("handler", "ended")),
    *(("post", point) for point in OUTSIDE),
    # Its answer is in the record that commits its files.
    *(("both", point) for point in ("handler", "end", "ended")),
]


@pytest.fixture
def service() -> Iterator[str]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    yield f"http://127.0.0.1:{here.recv()}"
    process.kill()
    process.join()


def run(where: Path, url: str, what: str, kill_at: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHILD), str(where), url, what, kill_at]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.heavy
@pytest.mark.parametrize(("tool", "point"), POINTS, ids=[f"{t}@{p}" for t, p in POINTS])
def test_a_run_that_is_killed_twice_at_one_point_doubles_nothing_and_loses_nothing(
    tmp_path: Path, service: str, tool: str, point: str
):
    (tmp_path / "project").mkdir()

    kill_at = f"{tool}@{point}"
    killed = [run(tmp_path, service, what, kill_at) for what in ("run", "resume")]
    last = run(tmp_path, service, "resume", "never")

    assert killed[0].returncode == -signal.SIGKILL, killed[0].stderr
    assert last.returncode == 0 or killed[1].returncode == 0, last.stderr
    said = dict(line.split() for line in (last.stdout or killed[1].stdout).splitlines())
    with urlopen(f"{service}/all") as response:
        seen = json.load(response)
    lines = (tmp_path / "project/notes.txt").read_text().split()

    assert sorted(said) == ["both", "note", "post", "shell"]
    assert all(count == 1 for count in seen["most"].values()), "the service was reached twice"
    assert len(seen["most"]) == 2
    assert lines == [name for name in ("note", "shell", "both") if said[name] == "ok"]
    # What the service did and nobody was told of is said to be unknown, and only that.
    lost = {"post": ("handler", "answer"), "both": ("handler",)}
    for name, code in said.items():
        is_lost = name == tool and point in lost.get(name, ())
        assert code == ("OUTCOME_UNKNOWN" if is_lost else "ok"), said


@pytest.mark.heavy
def test_what_a_person_built_on_is_neither_undone_nor_made_again(tmp_path: Path, service: str):
    """A call that was killed before its record, and whose file a person has changed since."""
    (tmp_path / "project").mkdir()
    notes = tmp_path / "project/notes.txt"
    assert run(tmp_path, service, "run", "note@ended").returncode == -signal.SIGKILL
    notes.write_text(notes.read_text() + "person\n")

    done = run(tmp_path, service, "resume", "never")

    said = dict(line.split() for line in done.stdout.splitlines())
    assert said["note"] == "ok", done.stderr
    assert notes.read_text().split() == ["note", "person", "shell", "both"]
