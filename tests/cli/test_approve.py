"""`wink approve`: a run without a terminal, or in another one, is answered from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import Wink
from terminal import WINK, Terminal, environment

from weakincentives.contrib.tools import find_sandbox
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.errors import FilesystemError, SandboxUnavailable
from weakincentives.filesystem import HostFilesystem
from weakincentives.runtime import PendingApproval, pending_approvals
from weakincentives.runtime.calls import runs_of

WRITES = [{"write_file": {"path": f"{name}.txt", "content": "new\n"}} for name in "ab"]
TURNS: list[Any] = [{"call": WRITES[:1]}, {"call": WRITES[1:]}, {"say": "Done."}]
FLAGS = ("--sandbox", "none", "--ask", "write_file")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "script.json").write_text(json.dumps(TURNS))
    return project


@pytest.fixture
def wink(project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Wink:
    monkeypatch.chdir(project)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    return Wink(capfd, project)


def command(project: Path, *flags: str) -> list[str]:
    model = f"scripted:{project.parent / 'script.json'}"
    return [*WINK, "run", "write", "-m", model, *FLAGS, *flags]


@contextmanager
def running(project: Path, *flags: str) -> Generator[subprocess.Popen[str]]:
    """Start a run without a terminal; what it wrote is read at its end."""
    with subprocess.Popen(
        command(project, "--ask-elsewhere", *flags),
        cwd=project,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(found: Callable[[], Any]) -> Any:
    late = SYSTEM_CLOCK.monotonic() + 240
    while not (value := found()):
        assert SYSTEM_CLOCK.monotonic() < late, "it did not happen"
        threading.Event().wait(0.02)
    return value


def asked(project: Path, path: str) -> PendingApproval:
    """Wait until the run asks about a file."""

    def found() -> PendingApproval | None:
        pending = pending_approvals(project)
        return next((each for each in pending if each.request.arguments["path"] == path), None)

    return until(found)


def test_a_run_without_a_terminal_waits_for_the_answers(wink: Wink, project: Path):
    with running(project) as run:
        pending = asked(project, "a.txt")
        (listed,) = map(json.loads, wink("approve", "--json").out.splitlines())
        first = wink("approve", "--yes")
        asked(project, "b.txt")
        second = wink("approve", pending.run.mark, "--deny", "not b")
        out, err = run.communicate(timeout=240)

    assert run.returncode == 0
    assert out == "Done.\n"
    assert f"It waits for an answer: wink approve {pending.run.mark}\n" in err
    assert ": not b" in err  # as the model reads it
    assert (listed["digest"], listed["tool"]) == (pending.digest, "write_file")
    assert "+new" in listed["diff"]
    assert "write_file wants to run; it can be undone.\n" in first.err
    assert "    | +new\n" in first.err
    assert [each.code for each in (first, second)] == [0, 0]
    assert [each.name for each in project.iterdir()] == ["a.txt"]
    record = runs_of(project)[-1].calls()[0].record
    assert record is not None
    assert "approval: approved by" in str(record["notes"])


def test_a_request_is_only_shown_where_nobody_can_answer(wink: Wink, project: Path):
    with running(project):
        pending = asked(project, "a.txt")

        done = wink("approve")

        assert done.code == 1
        assert "write_file wants to run" in done.err
        assert "use --yes or --deny REASON" in done.err
        assert pending.is_open


def test_the_first_of_two_answers_counts(wink: Wink, project: Path):
    """A person at the terminal of the run, and one elsewhere; the other is told."""
    with Terminal(command(project), cwd=project) as terminal:
        asked(project, "a.txt")
        terminal.wait_for("[y/n/r/e/a/v/?]?")
        assert wink("approve", "--yes").code == 0
        terminal.wait_for("approved elsewhere by")
        pending = asked(project, "b.txt")
        with Terminal([*WINK, "approve"], cwd=project) as other:
            other.wait_for("yes, no, no with a reason, view all [y/n/r/v/?]?")
            terminal.wait_for("[y/n/r/e/a/v/?]?", times=2)
            terminal.send("n\n")
            other.wait_for("the run no longer waits for it")
            assert other.end() == 1
        assert terminal.end() == 0

    assert not pending.is_open
    assert [each.name for each in project.iterdir()] == ["a.txt"]


def test_a_person_answers_at_another_terminal(project: Path):
    with running(project) as run:
        asked(project, "a.txt")
        with Terminal([*WINK, "approve"], cwd=project) as terminal:
            terminal.wait_for("[y/n/r/v/?]?")
            terminal.send("y\n")
            assert terminal.end() == 0
        asked(project, "b.txt")
        with Terminal([*WINK, "approve"], cwd=project) as terminal:
            terminal.wait_for("[y/n/r/v/?]?")
            terminal.send("r\n")
            terminal.wait_for("Reason, for the model:")
            terminal.send("one is enough\n")
            assert terminal.end() == 0
        _, err = run.communicate(timeout=240)

    assert ": one is enough" in err
    assert [each.name for each in project.iterdir()] == ["a.txt"]


def test_a_run_that_was_killed_asks_again_when_it_is_resumed(wink: Wink, project: Path):
    with running(project) as run:
        first = asked(project, "a.txt")
        run.kill()
        run.wait()
    assert wink("approve", "--yes").code == 2  # nobody waits

    with subprocess.Popen(
        [*WINK, "resume", "--ask-elsewhere"],
        cwd=project,
        env=environment(),
        stdin=subprocess.DEVNULL,
    ) as resumed:
        second = asked(project, "a.txt")
        assert (second.id != first.id, second.digest) == (True, first.digest)
        assert wink("approve", "--yes").code == 0
        asked(project, "b.txt")
        assert wink("approve", "--yes").code == 0
        assert resumed.wait(240) == 0
    assert sorted(each.name for each in project.iterdir()) == ["a.txt", "b.txt"]


def test_a_run_that_is_stopped_leaves_no_question(project: Path):
    with running(project) as run:
        pending = asked(project, "a.txt")
        run.terminate()
        run.communicate(timeout=240)

    assert run.returncode == 143
    assert not pending.is_open


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no run waits for an approval"),
        (["nosuch"], "no run 'nosuch'"),
        (["--yes", "--deny", "x"], "name only one of --yes and --deny"),
    ],
)
def test_wrong_use_is_said(wink: Wink, arguments: list[str], said: str):
    done = wink("approve", *arguments)

    assert done.code == 2
    assert said in done.err


def test_the_agent_cannot_answer_for_the_person(project: Path):
    """Neither with its files nor with commands, even if it works on the directory above the store.

    In its own directory, commands cannot even see the store.
    """
    above = Path(os.environ["XDG_STATE_HOME"])
    with running(project):
        pending = asked(project, "a.txt")
        folder = pending.run.path.with_suffix(".approvals") / pending.id
        answer = folder.relative_to(above) / "answer"
        try:
            sandbox = find_sandbox("auto")
        except SandboxUnavailable:
            sandbox = None
        with HostFilesystem(above, store=project.parent / "kept") as files:
            with pytest.raises(FilesystemError):
                files.write(str(answer), "yes")
            if sandbox is not None:
                assert not sandbox.run(files, f"echo yes > {answer}").ok
        assert pending.is_open
        assert not (folder / "answer").exists()
