"""`wink rerun`: a call once more with other arguments, another prompt or other rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Done, Wink

from weakincentives.filesystem import Branch, branches_of
from weakincentives.runtime import Calls, SavedSession
from weakincentives.runtime.calls import Run, runs_of
from weakincentives.session.events import PromptRendered

WRITES = [{"write_file": {"path": f"{name}.txt", "content": name}} for name in "abc"]
TURNS: list[Any] = [
    {"call": WRITES[:2]},
    {"say": "And now:", "call": WRITES[2:]},
    {"say": "Done."},
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    return project


@pytest.fixture
def wink(project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Wink:
    monkeypatch.chdir(project)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    wink = Wink(capfd, project)
    script = project.parent / "script.json"
    script.write_text(json.dumps(TURNS))
    assert wink("run", "write", "-m", f"scripted:{script}", "--sandbox", "none", "-q").code == 0
    return wink


def files_of(project: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in sorted(project.iterdir())}


def on_branch(project: Path, name: str) -> dict[str, str]:
    with Branch.open(project, name) as branch:
        return {path: branch.read(path) for path in sorted(branch.glob("*"))}


def forked(project: Path) -> Run:
    (found,) = (each for each in runs_of(project) if "forked_from" in each.data.about)
    return found


def rerun(wink: Wink, *arguments: str) -> Done:
    done = wink("rerun", *arguments, "--name", "other")
    assert done.code == 0, done.err
    return done


def test_one_argument_is_changed_and_the_rest_of_the_run_follows(wink: Wink, project: Path):
    before = files_of(project)

    done = rerun(wink, "2", "--set", "path=x.txt")

    assert files_of(project) == before
    assert on_branch(project, "other") == {"a.txt": "a", "x.txt": "b", "c.txt": "c"}
    calls = Calls(project).of_run(forked(project))
    assert [(each.number, each.outcome) for each in calls] == [(2, "committed"), (3, "committed")]
    assert done.out == "Done.\n"
    assert "wink branch diff other workspace" in done.err


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("flags", "written"),
    [
        (["--arguments", '{"path": "x.txt", "content": "1"}'], {"x.txt": "1"}),
        (["--set", "content=2", "--set", "path=y.txt"], {"y.txt": "2"}),
        (["--set", 'content="2"'], {"b.txt": '"2"'}),  # text stays text
    ],
)
def test_arguments_are_given_in_whole_or_one_by_one(
    wink: Wink, project: Path, flags: list[str], written: dict[str, str]
):
    rerun(wink, "2", *flags)

    assert on_branch(project, "other") == {"a.txt": "a", **written, "c.txt": "c"}


def test_a_section_is_replaced_and_the_model_is_asked_again(wink: Wink, project: Path):
    text = project.parent / "work.md"
    text.write_text("It costs $5.")

    rerun(wink, "3", "--section", f"your-work={text}")

    assert on_branch(project, "other") == {"a.txt": "a", "b.txt": "b", "c.txt": "c"}
    run = forked(project)
    assert [each.number for each in run.calls()] == [3]
    with SavedSession.open(run.path) as saved:
        rendered = saved.session[PromptRendered].all()
    assert "You work on the directory" in rendered[0].text
    assert "It costs $5." in rendered[-1].text
    assert "You work on the directory" not in rendered[-1].text


def test_the_changes_still_hold_when_the_run_is_resumed_later(wink: Wink, project: Path):
    text = project.parent / "work.md"
    text.write_text("Be brief.")
    rerun(wink, "3", "--section", f"your-work={text}", "--policy", "deny=write_file")
    script = project.parent / "more.json"
    script.write_text(json.dumps([*TURNS, {"call": WRITES[:1]}, "Really done."]))
    run = forked(project)

    done = wink("resume", run.id, "go on", "-m", f"scripted:{script}", "-q")

    assert (done.code, done.out) == (0, "Really done.\n")
    assert [each.outcome for each in Calls(project).of_run(forked(project))] == ["denied", "denied"]
    with SavedSession.open(run.path) as saved:
        rendered = saved.session[PromptRendered].latest()
    assert rendered is not None
    assert "Be brief." in rendered.text


def test_the_same_call_is_made_under_another_rule(wink: Wink, project: Path):
    rerun(wink, "2", "--policy", "protect=b.txt")

    assert on_branch(project, "other") == {"a.txt": "a", "c.txt": "c"}
    (second, _) = Calls(project).of_run(forked(project))
    assert (second.outcome, second.record and second.record["denied_by"]) == (
        "denied",
        "protected_paths",
    )


def test_another_model_and_a_message_begin_with_the_turn(wink: Wink, project: Path):
    script = project.parent / "other.json"
    script.write_text(json.dumps([TURNS[0], "I would stop here."]))

    done = rerun(wink, "3", "What would you do?", "--model", f"scripted:{script}", "-q")

    assert done.out == "I would stop here.\n"
    assert on_branch(project, "other") == {"a.txt": "a", "b.txt": "b"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["9"], "no call 9 in the run"),
        (["2", "--set", "path"], "expected NAME=VALUE"),
        (["2", "--arguments", "["], "not JSON"),
        (["2", "--arguments", "[1]"], "expected a JSON object"),
        (["2", "--arguments", "{}", "--set", "a=b"], "name only one of"),
        (["2", "--section", "your-work"], "expected PATH=FILE"),
        (["2", "--section", "your-work=nosuch.md"], "cannot read nosuch.md"),
        (["2", "--section", "nosuch=a.txt"], "no section 'nosuch'"),
        (["2", "--section", "planning=a.txt"], "its text cannot be overridden"),
        (["2", "--policy", "nonsense"], "expected NAME=VALUE"),
        (["2", "--model", "scripted:nosuch.json"], "cannot read the script"),
        (["2", "--model", "openai:gpt"], "OPENAI_API_KEY"),
        (["2", "--name", "No Name"], "No Name"),
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_nothing(
    wink: Wink, project: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    runs = runs_of(project)

    done = wink("rerun", *arguments)

    assert done.code == 2
    assert said in done.err
    assert (runs_of(project), branches_of(project)) == (runs, ())
