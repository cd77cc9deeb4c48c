"""`wink worker` and what it performs: through the real commands, each a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from terminal import WINK, environment
from test_approve import until

from postgres import Postgres
from weakincentives.errors import install_command
from weakincentives.filesystem import branches_of
from weakincentives.runtime.calls import runs_of
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import DurableRun, Runs

pytest.importorskip("dbos")

EDIT = {"edit_file": {"path": "app.py", "old_string": "80", "new_string": "8080"}}
SCRIPT: list[Any] = [
    {"call": [{"read_file": {"path": "app.py"}}]},
    {"call": [EDIT]},
    {"call": [{"write_file": {"path": "b.txt", "content": "b\n"}}]},
    {"say": "Done."},
]


class World:
    """A project, a database, and the commands on them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.project = folder / "project"
        self.project.mkdir()
        (self.project / "app.py").write_text("port = 80\n")
        self.script = folder / "script.json"
        self.script.write_text(json.dumps(SCRIPT))
        self.database = Database(url)
        self.runs = Runs(self.database)

    def env(self, machine: str = "here") -> dict[str, str]:
        return {
            **environment(),
            "WINK_DATABASE": self.url,
            "WINK_MACHINE": machine,
            "WINK_SUITES": "files",
            "XDG_CACHE_HOME": str(self.folder / f"cache-{machine}"),
        }

    def wink(
        self, *arguments: str, machine: str = "here", code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*WINK, *arguments],
            cwd=self.project, env=self.env(machine), capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL, timeout=240,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done

    def submit(self, *flags: str) -> DurableRun:
        done = self.wink("submit", "change the port", "-m", f"scripted:{self.script}", *flags)
        return self.runs.find(done.stdout.strip())

    @contextmanager
    def worker(self, *flags: str, machine: str = "here") -> Generator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [*WINK, "worker", "--lease", "2", *flags],
            cwd=self.folder, env=self.env(machine), text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def committed(self, run: DurableRun) -> list[str]:
        """Return the tools of the calls of a run that changed files."""
        lines = self.wink("log", run.mark, "--json").stdout.splitlines()
        calls = map(json.loads, lines)
        return [each["tool"] for each in calls if each["outcome"] == "committed"]

    def reaches(self, run: DurableRun, *statuses: str) -> DurableRun:
        """Wait until a run has one of these statuses."""

        def found() -> DurableRun | None:
            now = self.runs.find(run.id)
            assert now.status != "failed" or "failed" in statuses, now.detail
            return now if now.status in statuses else None

        return until(found)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A directory, with SQLite."""
    made = World(tmp_path, f"sqlite:///{tmp_path / 'runs.db'}")
    yield made
    made.database.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.heavy)])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'runs.db'}"
    else:
        server: Postgres = request.getfixturevalue("postgres")
        url = server.new_database()
    made = World(tmp_path, url)
    yield made
    made.database.close()


@pytest.mark.heavy
def test_a_submitted_run_is_performed_merged_and_shown_like_any_other(either: World) -> None:
    run = either.submit()
    with either.worker() as worker:
        done = either.reaches(run, "done")
        worker.send_signal(signal.SIGINT)
        out, _ = worker.communicate(timeout=120)

    assert worker.returncode == 130
    assert done.detail == "Done."
    assert (either.project / "app.py").read_text() == "port = 8080\n"
    assert (either.project / "b.txt").read_text() == "b\n"
    assert f"{run.mark} running: change the port\n" in out
    assert f"{run.mark} done: Done.\n" in out
    assert "wink: stopped; its runs continue elsewhere" in out
    assert "topsecret" not in out
    assert either.runs.workers() == []
    (here,) = runs_of(either.project)
    assert here.id == run.id
    assert "+port = 8080" in either.wink("diff").stdout
    either.wink("undo")
    assert (either.project / "app.py").read_text() == "port = 80\n"
    assert branches_of(either.project) == ()


@pytest.mark.heavy
def test_an_approval_is_answered_while_no_worker_runs(either: World) -> None:
    run = either.submit("--ask", "edit_file")
    with either.worker():
        waiting = either.reaches(run, "waiting")
    assert waiting.detail == "edit_file"
    assert (either.project / "app.py").read_text() == "port = 80\n"

    asked = json.loads(either.wink("approve", "--json").stdout)
    assert "+port = 8080" in asked["diff"]
    assert "approved: edit_file" in either.wink("approve", run.mark, "--yes").stderr
    with either.worker():
        either.reaches(run, "done")

    assert (either.project / "app.py").read_text() == "port = 8080\n"
    records = [each.record for each in runs_of(either.project)[-1].calls()]
    assert any(each and "approval: approved by" in str(each["notes"]) for each in records)


@pytest.mark.heavy
def test_the_model_reads_why_a_call_was_denied(world: World) -> None:
    run = world.submit("--ask", "edit_file")
    with world.worker():
        world.reaches(run, "waiting")
        world.wink("approve", "--deny", "not on a Friday")
        world.reaches(run, "done")

    assert (world.project / "app.py").read_text() == "port = 80\n"
    assert (world.project / "b.txt").exists()
    results = [each.record for each in runs_of(world.project)[-1].calls() if each.record]
    assert any("not on a Friday" in json.dumps(each) for each in results)


@pytest.mark.heavy
def test_another_worker_continues_the_run_of_one_that_was_killed(either: World) -> None:
    """Before each call, and the calls that were made are not made again."""
    run = either.submit("--ask", "reversible", "--no-merge")
    for answered in range(3):
        with either.worker() as worker:
            if answered < 2:
                until(lambda: either.runs.pending(run.id))
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        for request in either.runs.pending(run.id):
            either.runs.answer(request.id, approved=True, digest=request.digest)
    with either.worker():
        either.reaches(run, "done")

    assert either.committed(run) == ["edit_file", "write_file"]
    assert (either.project / "app.py").read_text() == "port = 80\n"
    assert "+port = 8080" in either.wink("branch", "diff", run.mark).stdout
    either.wink("branch", "merge", run.mark)
    assert (either.project / "app.py").read_text() == "port = 8080\n"


@pytest.mark.heavy
def test_two_workers_share_the_runs(either: World) -> None:
    runs = [either.submit("--no-merge") for _ in range(6)]
    with either.worker("--jobs", "1"), either.worker("--jobs", "1"):
        done = [either.reaches(run, "done") for run in runs]

    assert {each.detail for each in done} == {"Done."}
    assert all(either.committed(run) == ["edit_file", "write_file"] for run in runs)
    assert {each.name for each in branches_of(either.project)} == {each.mark for each in runs}


@pytest.mark.heavy
def test_a_cancelled_run_is_not_merged(world: World) -> None:
    run = world.submit("--ask", "write_file")
    with world.worker():
        world.reaches(run, "waiting")
        world.wink("cancel", run.mark)
        other = world.submit()
        world.reaches(other, "done")

    assert world.runs.find(run.id).status == "cancelled"
    world.wink("approve", run.mark, "--yes", code=2)
    assert "is cancelled" not in (world.project / "app.py").read_text()


@pytest.mark.heavy
def test_a_run_waits_for_its_own_machine(world: World) -> None:
    run = world.submit()
    with world.worker(machine="there"):
        elsewhere = world.submit("--anywhere")
        world.reaches(elsewhere, "done")

    assert world.runs.find(run.id).status == "queued"
    said = world.wink("fetch", run.mark, code=2).stderr
    assert "no worker has begun it yet" in said


@pytest.mark.heavy
def test_a_run_of_another_machine_is_fetched_and_merged(either: World, state: Path) -> None:
    """It worked on a copy of the directory; its branch comes back."""
    run = either.submit("--anywhere")
    with either.worker(machine="there"):
        either.reaches(run, "done")
    assert (either.project / "app.py").read_text() == "port = 80\n"

    assert f"{run.mark}/2" in either.wink("log", run.mark).stdout
    fetched = either.wink("fetch", run.mark)
    assert fetched.stdout == f"{run.id}: 2 changes on the branch {run.mark} of {either.project}\n"
    either.wink("fetch", run.mark)  # again: nothing was continued here
    assert "+port = 8080" in either.wink("branch", "diff", run.mark).stdout
    either.wink("branch", "merge", run.mark)
    assert (either.project / "app.py").read_text() == "port = 8080\n"

    said = either.wink("fetch", run.mark, machine="third", code=2).stderr
    assert "was submitted from" in said
    assert "--into DIR" in said
    copy = either.folder / "copy"
    either.wink("fetch", run.mark, "--into", str(copy), machine="third")
    assert (copy / "app.py").read_text() == "port = 80\n"
    assert "+port = 8080" in either.wink("branch", "diff", run.mark, "-w", str(copy)).stdout


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_run_on_a_commit_of_a_repository(world: World) -> None:
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.email=a@example", "-c", "user.name=a", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *arguments], cwd=world.project, check=True)
    (world.project / "b.txt").write_text("not committed\n")
    flags = ["submit", "a", "-m", f"scripted:{world.script}", "--git", str(world.project)]
    assert "b.txt differ from the commit" in world.wink(*flags, code=2).stderr
    (world.project / "b.txt").unlink()

    run = world.submit("--git", str(world.project))
    with world.worker(machine="there"):
        world.reaches(run, "done")

    world.wink("fetch", run.mark)
    assert "+port = 8080" in world.wink("branch", "diff", run.mark).stdout


@pytest.mark.heavy
def test_a_run_that_cannot_be_performed_fails_with_a_reason(world: World) -> None:
    gone = world.submit()
    shutil.move(world.project, world.folder / "moved")
    world.project.mkdir()
    world.script.unlink()
    with world.worker():
        failed = world.reaches(gone, "failed")

    assert "cannot read the script" in failed.detail
    assert "cannot read the script" in world.wink("ps", "--all").stdout


@pytest.mark.heavy
def test_a_worker_loads_only_approved_code(world: World) -> None:
    """Whoever can write to the database names code in a run: it must be approved here."""
    (world.project / "rules.py").write_text("print('loaded')\nclass Rule:\n    name = 'r'\n")
    run = world.submit("--policy", "rules.py:Rule")
    (world.project / "rules.py").write_text("print('changed')\n")
    with world.worker() as worker:
        failed = world.reaches(run, "failed")
        worker.terminate()
        out, _ = worker.communicate(timeout=120)

    assert "wink policy trust" in failed.detail
    assert "changed\n" not in out


@pytest.mark.heavy
def test_waiting_for_a_run_tells_how_it_ended(world: World) -> None:
    with world.worker("--json") as worker:
        flags = ("-m", f"scripted:{world.script}", "--wait", "--no-merge")
        done = world.wink("submit", "a", *flags)
        asks = world.wink("submit", "b", *flags, "--ask", "write_file", code=3)
        worker.terminate()
        out, _ = worker.communicate(timeout=120)

    assert done.stdout == "Done.\n"
    assert ": done\n" in done.stderr
    assert "it needs an approval: wink approve" in asks.stderr
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [each["status"] for each in events] == ["running", "done", "running", "waiting"]


@pytest.mark.heavy
def test_commands_and_tools_never_see_the_url(world: World) -> None:
    """Neither in a run nor in what a worker starts."""
    run = world.submit("--no-merge")
    with world.worker() as worker:
        world.reaches(run, "done")
        worker.terminate()
        out, _ = worker.communicate(timeout=120)

    stored = json.dumps([dict(each.about) for each in world.runs.list()])
    assert world.url not in stored
    if world.database.is_postgres:
        assert world.database.shown in out


def test_the_missing_extra_is_one_line(world: World) -> None:
    code = (
        "import sys; sys.modules['dbos'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name: None if name == 'dbos' else find(name)\n"
        "from weakincentives.cli.entry import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "worker"],
        capture_output=True, text=True, check=False, cwd=world.project, env=world.env(),
    )  # fmt: skip

    assert done.returncode == 2
    assert done.stderr == f"wink: dbos is not installed; run: {install_command('durable')}\n"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["worker", "--objects", "nosuch://x"], "--objects: "),
        (["worker", "--database", "mysql://x"], "--database: expected sqlite"),
        (["fetch", "zzz"], "no run 'zzz'"),
        (["fetch", "zzz", "-w", ".", "--into", "x"], "name only one of --workspace and --into"),
        (["log", "zzz", "--database", "{url}"], "no run 'zzz'"),
        (["log", "--database", "{url}"], "name a run"),
    ],
)
def test_wrong_use_is_said(world: World, arguments: list[str], said: str) -> None:
    done = world.wink(*(each.replace("{url}", world.url) for each in arguments), code=2)

    assert said in done.stderr
    assert done.stderr.count("\n") == 1
