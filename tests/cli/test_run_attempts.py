"""`wink run --attempts`: runs on branches, a judge in a sandbox, and the best of them merged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import Done, Wink
from terminal import WINK
from tests.adapters.wire import WireServer

from waiting import is_readable
from weakincentives.adapters import says
from weakincentives.filesystem import Branch, branches_of
from weakincentives.filesystem.overlay import find_way
from weakincentives.runtime import SavedSession
from weakincentives.runtime.calls import runs_of

BROKEN = "def total(prices):\n    return sum(prices[1:])\n"
FIXED = "def total(prices):\n    return sum(prices)\n"
JUDGE = f"{sys.executable} -m pytest -q -p no:cacheprovider"
SANDBOX = ("--sandbox", "none")
"""The quickest; one test has the usual one."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    way = find_way(project, tmp_path)
    if isinstance(way, str):
        pytest.skip(way)
    (project / "calc.py").write_text(BROKEN)
    (project / "test_calc.py").write_text(
        "from calc import total\n\ndef test_total():\n    assert total([1, 2]) == 3\n"
    )
    return project


@pytest.fixture
def wink(project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Wink:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.chdir(project)
    return Wink(capfd, project)


def edits(new: str) -> list[Any]:
    edit = {"path": "calc.py", "old_string": "[1:]", "new_string": new}
    return [
        {"call": [{"read_file": {"path": "calc.py"}}], "usage": {"input_tokens": 1000}},
        {"call": [{"edit_file": edit}], "usage": {"output_tokens": 500}},
        f"It is {new or 'fixed'} now.",
    ]


def models(project: Path, *scripts: list[Any]) -> str:
    """Write scripts beside the project; return the models that play them."""
    names: list[str] = []
    for number, script in enumerate(scripts, 1):
        path = project.parent / f"script{number}.json"
        path.write_text(json.dumps(script))
        names.append(f"scripted:{path}")
    return ",".join(names)


@pytest.mark.heavy
def test_the_attempt_that_passes_the_tests_is_merged_and_can_be_undone(project: Path, wink: Wink):
    scripts = models(project, edits("[2:]"), edits(""))
    options = ("--models", scripts, "--judge", "python3 -m pytest -q -p no:cacheprovider")
    done = wink("run", "fix it", "--attempts", "3", "--branch", "try", "--price", "1/2", *options)

    assert done.code == 0, done.err
    head, best, *others = [line.split() for line in done.out.splitlines()[:4]]
    assert head[:8] == ["branch", "verdict", "score", "files", "lines", "tokens", "cost", "time"]
    assert best[:7] == ["try-2", "passed", "1", "+1", "-1", "1,500", "$0.0020"]
    assert [row[:2] for row in others] == [["try-1", "failed"], ["try-3", "failed"]]
    assert done.out.endswith("It is fixed now.\n")
    assert "3 attempts on the branches try-1 to try-3" in done.err
    assert "merged try-2: 1 path changed; to undo it: wink undo --last" in done.err
    assert "try-1, try-3 remain: see `wink branch diff try-1`" in done.err
    assert (project / "calc.py").read_text() == FIXED
    assert [each.name for each in branches_of(project)] == ["try-1", "try-3"]
    runs = runs_of(project)
    assert [run.title for run in runs] == ["fix it"] * 3
    assert len({run.mark for run in runs}) == 3

    assert wink("undo", "--last").code == 0
    assert (project / "calc.py").read_text() == BROKEN


def lines_of(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.heavy
def test_json_has_an_object_for_each_attempt_and_the_result(project: Path, wink: Wink):
    scripts = models(project, edits(""), edits("[2:]"), ["I give up."])
    judge = "cat calc.py; grep -q 'sum(prices)' calc.py && echo '{\"score\": 4}'"
    options = ("--models", scripts, "--judge", judge, "--json", "--branch", "try", *SANDBOX)
    done = wink("run", "fix it", "--attempts", "3", *options)

    *attempts, result = lines_of(done)
    assert done.code == 0
    by_number = {each["attempt"]: each for each in attempts}
    assert {each["type"] for each in attempts} == {"attempt"}
    assert by_number[1]["verdict"] == "passed"
    assert by_number[1]["score"] == 4
    assert by_number[1]["files"] == [{"path": "calc.py", "added": 1, "removed": 1}]
    assert by_number[1]["run"] in [run.id for run in runs_of(project)]
    assert by_number[2]["verdict"] == "failed"
    assert (by_number[3]["files"], by_number[3]["text"]) == ([], "I give up.")
    assert result == {
        "type": "result",
        "outcome": "done",
        "winner": "try-1",
        "merged": ["calc.py"],
        "problem": "",
        "branches": ["try-3", "try-2"],
        "text": "It is fixed now.",
    }


@pytest.mark.heavy
def test_without_a_pass_nothing_is_merged_and_it_is_said_why(project: Path, wink: Wink):
    scripts = models(project, edits("[2:]"), [{"call": [{"read_file": {"path": "calc.py"}}]}])
    options = ("--models", scripts, "--judge", "echo 'not good'; exit 3", "--branch", "try")
    done = wink("run", "fix it", "--attempts", "2", *options, *SANDBOX)

    assert done.code == 1
    assert "attempt 1 failed: not good" in done.err
    assert "attempt 2 error: the script has 1 turns" in done.err
    assert "no attempt passed, so nothing was merged" in done.err
    assert (project / "calc.py").read_text() == BROKEN
    assert [each.name for each in branches_of(project)] == ["try-1", "try-2"]


def test_the_winner_can_be_left_on_its_branch(project: Path, wink: Wink):
    options = ("--models", models(project, edits("")), "--judge", "true", "--branch", "try")
    done = wink("run", "fix it", "--attempts", "1", "--no-merge", *options, *SANDBOX)

    assert done.code == 0
    assert "try-1 is the best; to merge it: wink branch merge try-1" in done.err
    assert (project / "calc.py").read_text() == BROKEN


@pytest.mark.heavy
def test_a_judge_that_takes_too_long_is_killed(project: Path, wink: Wink):
    os.mkfifo(project.parent / "never")
    options = ("--judge", f"cat {project.parent}/never", "--models", models(project, edits("")))
    limits = ("--sandbox", "timeout=1", "--sandbox", "max_timeout=1")
    done = wink("run", "fix it", "--attempts", "1", *options, *SANDBOX, *limits)

    assert done.code == 1
    assert "attempt 1 failed: the judge took longer than 1 s" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--attempts", "2"], "--attempts needs --judge COMMAND"),
        (["--attempts", "2", "--judge", "true", "--dry-run"], "neither --dry-run nor"),
        (["--judge", "true"], "--judge and --models need --attempts N"),
        (["--attempts", "2", "--judge", "true", "--temperature", "0,9"], "temperature"),
        (["--model", "scripted:x.json", "--temperature", "0.5"], "scripted takes no temperature"),
    ],
)
def test_wrong_use_is_refused_before_anything(
    project: Path, wink: Wink, options: list[str], said: str
):
    done = wink("run", "fix it", *options)

    assert done.code == 2
    assert said in done.err
    assert branches_of(project) == ()


@pytest.mark.heavy
def test_the_temperatures_are_used_in_turn(
    project: Path, wink: Wink, monkeypatch: pytest.MonkeyPatch
):
    with WireServer() as server:
        played = server.play(says("One."), says("Two."), says("Three."))
        monkeypatch.setenv("OPENAI_BASE_URL", played.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-loopback-0123456789")
        options = ("--temperature", "0,0.7", "--model", "openai:some-model", "--judge", "true")
        done = wink("run", "fix it", "--attempts", "3", "--jobs", "1", *options, *SANDBOX, "--json")

    assert [body["temperature"] for body in played.bodies] == [0, 0.7, 0]
    assert [each["temperature"] for each in lines_of(done)[:3]] == [0, 0.7, 0]


# In a process of their own


class Waiting:
    """Attempts in progress. Each has opened ``begun`` and waits until ``go`` is opened."""

    def __init__(self, project: Path) -> None:
        self.project = project
        for name in ("begun", "go"):
            os.mkfifo(project.parent / name)
        # For reading and writing: so that opening does not wait, and nobody sees an end.
        self.begun = os.open(project.parent / "begun", os.O_RDWR)
        self.go = os.open(project.parent / "go", os.O_RDWR)

    @property
    def command(self) -> str:
        place = self.project.parent
        return f"echo x > {place}/begun; read line < {place}/go"

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert is_readable(self.begun, 120)
            assert os.read(self.begun, 2) == b"x\n"

    def let_go(self) -> None:
        os.write(self.go, b"go\n")


@contextmanager
def started(project: Path, *options: str) -> Generator[subprocess.Popen[str]]:
    words = [*WINK, "run", "fix it", "-w", str(project), "--branch", "try", *SANDBOX, *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, cwd=project.parent, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.heavy
def test_a_winner_that_conflicts_with_the_workspace_stays_a_branch(project: Path):
    judge = Waiting(project)
    options = ("--models", models(project, edits("")), "--judge", judge.command)
    with started(project, "--attempts", "1", *options) as process:
        judge.wait()
        (project / "calc.py").write_text("# a person's\n")
        judge.let_go()
        out, err = process.communicate(timeout=120)

    assert process.returncode == 1, err
    assert "try-1 is the best, but was not merged" in err
    assert "calc.py" in err
    assert (project / "calc.py").read_text() == "# a person's\n"
    assert [each.name for each in branches_of(project)] == ["try-1"]
    assert out.startswith("branch")


@pytest.mark.heavy
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all_attempts_and_their_branches_stay(
    project: Path, number: signal.Signals, code: int
):
    work = Waiting(project)
    script = [*edits("")[:2], {"call": [{"shell_execute": {"command": work.command}}]}, "Done."]
    options = ("--models", models(project, script), "--judge", "true")
    with started(project, "--attempts", "3", "--jobs", "2", *options) as process:
        work.wait(2)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)

    assert process.returncode == code, err
    assert "wink: interrupted; try-1, try-2, try-3 remain: see `wink branch diff try-1`" in err
    assert (project / "calc.py").read_text() == BROKEN
    found = branches_of(project)
    assert [(each.name, each.paths) for each in found][:2] == [
        ("try-1", ("calc.py",)),
        ("try-2", ("calc.py",)),
    ]
    assert not any(each.is_in_use for each in found)
    assert not any(SavedSession.is_in_use(run.path) for run in runs_of(project))


def test_the_branches_of_killed_attempts_stay_and_their_runs_end(project: Path):
    work = Waiting(project)
    script = [
        *edits("")[:2],
        {"call": [{"shell_execute": {"command": work.command}}]},
        {"call": [{"write_file": {"path": "late.txt", "content": "late"}}]},
        "Done.",
    ]
    options = ("--models", models(project, script), "--judge", "true")
    with started(project, "--attempts", "2", *options) as process:
        work.wait(2)
        process.kill()
        process.wait()
        work.let_go()
        work.let_go()
        for name in ("try-1", "try-2"):  # in use until its run ends
            Branch.open(project, name, wait=120).close()

    found = branches_of(project)
    assert [each.name for each in found] == ["try-1", "try-2"]
    assert all("calc.py" in each.paths and "late.txt" not in each.paths for each in found)
    assert (project / "calc.py").read_text() == BROKEN
