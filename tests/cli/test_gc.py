"""`wink gc` shows what the store takes, removes what is old, and breaks nothing that is left."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from commands import Wink, make_run, run_open

from stored import make_calls_older
from weakincentives.adapters import calls
from weakincentives.filesystem import HostFilesystem, WorkspaceHistory
from weakincentives.filesystem.store import HISTORY_LIMITS, location_of
from weakincentives.runtime.calls import RUN_LIMITS, UNFINISHED_DAYS, Run, runs_of

TEXT = "a line that repeats itself\n" * 1000
DAY = 86_400


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "notes.txt").write_text(TEXT)
    return project


@pytest.fixture
def store(project: Path) -> Path:
    return location_of(project)


@pytest.fixture
def wink(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Wink:
    monkeypatch.chdir(project)
    return Wink(capfd, project)


def run_of(project: Path, name: str) -> Run:
    turn = calls(("write_file", {"path": name, "content": f"{name}\n"}))
    return make_run(project, [turn, "Done."], name)


def make_older(store: Path, days: float) -> None:
    make_calls_older(store, days)
    for path in (store / "runs").glob("*.jsonl"):
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))


def everything_in(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def test_a_dry_run_shows_the_use_by_kind_and_changes_nothing(
    wink: Wink, project: Path, store: Path
):
    for name in ("first", "second", "third"):
        run_of(project, name)
    make_older(store, 10)
    before = everything_in(store)

    done = wink("gc", "--dry-run", "--older-than", "5")

    assert done.code == 0
    for kind in ("history", "runs", "total"):
        assert f"  {kind} " in done.out
    assert "Would remove: 3 calls, 2 runs." in done.out
    assert everything_in(store) == before


def test_it_says_what_it_did_in_json(wink: Wink, project: Path, store: Path):
    runs = [run_of(project, name) for name in ("first", "second")]
    with HostFilesystem(project, durability="safe") as files:
        files.write("notes.txt", "short")
    make_older(store, 100)

    (line,) = wink("gc", "--json").out.splitlines()

    told = json.loads(line)
    assert (told["store"], told["dry_run"]) == (str(store), False)
    assert told["removed"]["calls"] == told["removed"]["contents"] == 0
    assert told["removed"]["runs"] == [], "the newest 20 stay, however old"
    assert told["removed"]["compressed"] == 1
    assert told["after"]["contents"] < told["before"]["contents"]
    assert {run.id for run in runs_of(project)} == {run.id for run in runs}


def test_what_is_left_can_still_be_undone(wink: Wink, project: Path, store: Path):
    run_of(project, "first")
    make_older(store, 10)
    run_of(project, "second")

    done = wink("gc", "--older-than", "5")

    assert "Removed: 1 call, 1 run." in done.out
    assert wink("undo").code == 0
    assert sorted(os.listdir(project)) == ["first", "notes.txt"]
    assert wink("gc").code == 0
    assert wink("log").code == 0


def test_the_size_that_stays_can_be_given(wink: Wink, project: Path, store: Path):
    with HostFilesystem(project) as files:
        for number in range(10):
            files.write("notes.txt", f"{number}" * 20_000)

    assert wink("gc", "--keep", "50K").code == 0

    kept = WorkspaceHistory(project).calls()
    assert 0 < len(kept) < 10
    assert sum(each.size for each in kept) <= 50 << 10
    assert wink("gc", "--keep", "plenty") == (
        2,
        "",
        "wink: 'plenty' is not a size; use 50M or 1GiB, for example\n",
    )


def test_without_a_store_there_is_nothing_to_do(wink: Wink, store: Path):
    done = wink("gc")

    assert (done.code, done.out) == (0, "")
    assert "No history yet" in done.err
    assert not store.exists()


def test_the_store_of_a_directory_that_is_gone_goes_by_its_age(
    wink: Wink, project: Path, tmp_path: Path
):
    stores: dict[str, Path] = {}
    for name, days in (("old", 91), ("recent", 89), ("present", 91)):
        (tmp_path / name).mkdir()
        run_of(tmp_path / name, "a")
        stores[name] = location_of(tmp_path / name)
        then = (stores[name] / "lock").stat().st_mtime - days * DAY
        os.utime(stores[name] / "lock", (then, then))
    for name in ("old", "recent"):
        shutil.rmtree(tmp_path / name)

    planned = json.loads(wink("gc", "--dry-run", "--json", "-w", str(tmp_path / "present")).out)
    assert planned["removed"]["stores"] == [str(stores["old"])]
    assert stores["old"].exists()
    assert wink("gc").out.startswith("Removed 1 history of a directory that no longer exists.\n")
    assert {name: store.exists() for name, store in stores.items()} == {
        "old": False,
        "recent": True,
        "present": True,
    }
    (tmp_path / "old").mkdir()
    assert WorkspaceHistory(tmp_path / "old").calls() == ()


def test_while_a_process_has_the_directory_alone_only_a_dry_run_is_possible(
    wink: Wink, project: Path
):
    with run_open(project, ["Done."]):
        assert wink("gc").code == 0
    with HostFilesystem(project):
        assert wink("gc", "--dry-run").code == 0
        refused = wink("gc")
    assert refused.code == 2
    assert "in use by process" in refused.err


def test_a_store_without_a_seal_is_refused(wink: Wink, project: Path, store: Path):
    HostFilesystem(project).close()
    (store / "root").unlink()
    (store / "objects" / "ab").mkdir(parents=True)
    stray = store / "objects" / "ab" / ("c" * 62)
    stray.write_text("planted")

    done = wink("gc")

    assert (done.code, stray.exists()) == (1, True)
    assert "does not carry your seal" in done.err


def test_the_defaults_are_those_that_the_help_names(wink: Wink):
    told = " ".join(wink("gc", "--help").out.split())

    assert (HISTORY_LIMITS.days, HISTORY_LIMITS.newest, HISTORY_LIMITS.count) == (90, 100, 10_000)
    assert "history keeps 90 days (in any case the newest 100 calls), 10,000 calls" in told
    assert (RUN_LIMITS.days, RUN_LIMITS.newest, RUN_LIMITS.count) == (90, 20, 1_000)
    assert "runs are kept for 90 days (in any case the newest 20), 1,000 of them" in told
    assert HISTORY_LIMITS.size == RUN_LIMITS.size == 256 << 20
    assert UNFINISHED_DAYS == 30
    assert "an unfinished run of the last 30 days" in told
