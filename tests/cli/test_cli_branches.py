"""Runs on branches, and `wink branch`: several agents and a person on one directory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import Done, Wink, approve
from forked import Forked
from forked import start as start_forked
from terminal import environment

from weakincentives.adapters import Message
from weakincentives.filesystem import Branch, HostFilesystem, branches_of
from weakincentives.runtime import SavedSession
from weakincentives.runtime.calls import Run, runs_of

TEXT = "".join(f"line {n}\n" for n in range(1, 10))
EDIT = {"edit_file": {"path": "a.txt", "old_string": "line 5\n", "new_string": "line five\n"}}
READ = {"read_file": {"path": "a.txt"}}
WAIT = {"wait": {"number": 0}}

WAITING = """
from pathlib import Path
import weakincentives as wink

@wink.tool(reach="read")
def wait(number: int) -> str:
    '''Wait until something has happened.'''
    return (Path(__file__).parent / f"waiting{number}").read_text()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.txt").write_text(TEXT)
    (project / "b.txt").write_text("b\n")
    for n in range(4):
        os.mkfifo(tmp_path / f"waiting{n}")
    (tmp_path / "mine.py").write_text(WAITING)
    (project / "wink.toml").write_text('sections = ["../mine.py:wait"]\n')
    approve(project)
    return project


@pytest.fixture
def wink(project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Wink:
    monkeypatch.chdir(project)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    return Wink(capfd, project)


def script(project: Path, turns: list[Any], name: str = "script.json") -> str:
    path = project.parent / name
    path.write_text(json.dumps(turns))
    return f"scripted:{path}"


def run(wink: Wink, turns: list[Any], *flags: str) -> Done:
    model = script(wink.directory, turns)
    return wink("run", "change it", "-m", model, "--sandbox", "none", *flags)


@contextmanager
def meanwhile(project: Path, *acts: Callable[[], object]) -> Iterator[None]:
    """Do something while a call of the run waits; the run goes on when it is done."""

    def work() -> None:
        for n, act in enumerate(acts):
            with open(project.parent / f"waiting{n}", "w"):  # when the call reads it
                act()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(240)
    assert not thread.is_alive(), "no call has waited"


def release(project: Path, number: int, process: Forked) -> int:
    """Wait until a call of a process waits; closing the descriptor lets it go on."""
    while True:
        assert process.poll() is None, "the run has ended"
        try:
            return os.open(project.parent / f"waiting{number}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it yet
            threading.Event().wait(0.01)


def start(project: Path, turns: list[Any], *flags: str, name: str) -> Forked:
    """Start a run in a process of its own."""
    model = script(project, turns, f"{name}.json")
    arguments = ("run", name, "-m", model, "--sandbox", "none", *flags)
    with open(os.devnull) as nothing:
        streams = nothing.fileno(), 1, 2
        return start_forked(arguments, cwd=project, env=environment(), streams=streams)


def names(project: Path) -> list[str]:
    return [each.name for each in branches_of(project)]


def messages(run: Run) -> list[str]:
    """Return the texts of a run's conversation."""
    with SavedSession.open(run.path) as saved:
        return [each.text for each in saved.session[Message]]


# A run on a branch


def test_a_run_on_a_branch_changes_the_directory_only_at_its_end(project: Path, wink: Wink):
    seen: list[str] = []
    with meanwhile(project, lambda: seen.append((project / "a.txt").read_text())):
        done = run(wink, [{"call": [READ, EDIT, WAIT]}, "Done."], "--branch", "-")

    assert (done.code, done.out) == (0, "Done.\n")
    assert seen == [TEXT]
    assert (project / "a.txt").read_text() == TEXT.replace("line 5", "line five")
    assert "1 file changed" in done.err  # not one for the call, and one for the merge
    assert names(project) == []


def test_the_merge_is_one_call_of_the_run_and_undo_undoes_it(project: Path, wink: Wink):
    put = {"write_file": {"path": "new.txt", "content": "new\n"}}
    run(wink, [{"call": [READ, EDIT, put]}, "Done."], "--branch", "parser")

    logged = [json.loads(line) for line in wink("log", "--json").out.splitlines()]
    assert {each["tool"] for each in logged} == {"read_file", "edit_file", "write_file", "merge"}
    assert logged[-1]["tool"] == "merge"
    assert [each["path"] for each in logged[-1]["files"]] == ["a.txt", "new.txt"]
    assert len({each["run"] for each in logged}) == 1
    assert wink("undo").code == 0
    assert (project / "a.txt").read_text() == TEXT
    assert not (project / "new.txt").exists()


def test_no_merge_leaves_the_changes_on_the_branch(project: Path, wink: Wink):
    done = run(wink, [{"call": [READ, EDIT]}, "Done."], "--branch", "parser", "--no-merge")

    assert done.code == 0
    assert "wink branch merge parser" in done.err
    assert (project / "a.txt").read_text() == TEXT
    assert names(project) == ["parser"]


def test_commands_see_the_branch_and_change_only_it(project: Path, wink: Wink):
    command = "cat a.txt; rm b.txt; mkdir d; echo made > d/made"
    turns = [{"call": [READ, EDIT, {"shell_execute": {"command": command}}]}, "Done."]
    run(wink, turns, "--no-merge")

    assert sorted(os.listdir(project)) == ["a.txt", "b.txt", "wink.toml"]
    (branch,) = branches_of(project)
    assert {"a.txt", "b.txt", "d/made"} <= set(branch.paths)
    shown = wink("show", "3")
    assert "line five" in shown.out


def test_other_lines_of_a_person_are_merged(project: Path, wink: Wink):
    edited = TEXT.replace("line 1\n", "the person's line\n")
    with meanwhile(project, lambda: (project / "a.txt").write_text(edited)):
        done = run(wink, [{"call": [READ, EDIT, WAIT]}, "Done."], "--branch", "-")

    assert done.code == 0, done.err
    assert (project / "a.txt").read_text() == edited.replace("line 5", "line five")


def test_a_conflict_goes_back_to_the_model_which_finishes(project: Path, wink: Wink):
    edited = TEXT.replace("line 5\n", "the person's line\n")
    again = {"path": "a.txt", "old_string": "the person's line\n", "new_string": "both\n"}
    turns = [{"call": [READ, EDIT, WAIT]}, "Done.", {"call": [READ, {"edit_file": again}]}, "Both."]
    with meanwhile(project, lambda: (project / "a.txt").write_text(edited)):
        done = run(wink, turns, "--branch", "-")

    assert (done.code, done.out) == (0, "Both.\n"), done.err
    assert (project / "a.txt").read_text() == TEXT.replace("line 5", "both")
    assert "sent back: The branch cannot be merged: a.txt was changed in the same" in done.err
    (file,) = runs_of(project)
    (told,) = (each for each in messages(file) if "not in the workspace yet" in each)
    assert "-line 5\n+the person's line" in told
    assert "-line 5\n+line five" in told


def test_a_file_that_the_run_only_read_and_others_changed_is_a_conflict(project: Path, wink: Wink):
    def other() -> None:
        with HostFilesystem(project) as files:
            files.write("b.txt", "of another agent\n")

    turns = [{"call": [{"read_file": {"path": "b.txt"}}, READ, EDIT, WAIT]}, "Done.", "Still so."]
    with meanwhile(project, other):
        done = run(wink, turns, "--branch", "-")

    assert (done.code, done.out) == (0, "Still so.\n"), done.err
    assert "sent back: The branch cannot be merged: b.txt was read by the branch" in done.err
    assert (project / "b.txt").read_text() == "of another agent\n"
    assert "line five" in (project / "a.txt").read_text()


def test_after_three_conflicts_the_branch_stays(project: Path, wink: Wink):
    def edit(n: int) -> None:
        (project / "a.txt").write_text(TEXT.replace("line 5", f"person {n}"))

    turns: list[Any] = []
    for n in range(4):
        own = {"path": "a.txt", "content": TEXT.replace("line 5", f"own {n}")}
        wait = {"wait": {"number": n}}
        turns += [{"call": [READ]}, {"call": [{"write_file": own}]}, {"call": [wait]}, "Done."]
    with meanwhile(project, *(partial(edit, n) for n in range(4))):
        done = run(wink, turns, "--branch", "parser")

    assert done.code == 1
    assert done.err.count("sent back:") == 3
    assert "wink branch merge parser" in done.err
    assert "person 3" in (project / "a.txt").read_text()
    with Branch.open(project, "parser") as branch:
        assert "own 3" in branch.read("a.txt")


# Several agents


def test_a_run_on_a_directory_in_use_works_on_a_branch(
    project: Path, wink: Wink, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("weakincentives.cli.agent.FOR_OTHERS", 0.1)  # they will not finish
    monkeypatch.setattr("weakincentives.runtime.undo.PATIENCE", 0.1)
    with HostFilesystem(project):
        done = run(wink, [{"call": [READ, EDIT]}, "Done."])
        refused = run(wink, ["Done."], "--in-place")

    assert done.code == 1  # it could not be merged yet
    assert "this run works on a branch" in done.err
    assert (project / "a.txt").read_text() == TEXT
    assert len(names(project)) == 1
    assert refused.code == 2
    assert "is in use by process" in refused.err


def test_a_run_beside_another_agent_works_on_a_branch_and_merges_it(
    project: Path, wink: Wink, monkeypatch: pytest.MonkeyPatch
):
    (project / "wink.toml").unlink()  # tools of the user's own may reach the directory itself
    with HostFilesystem(project, shared=True) as other:
        done = run(wink, [{"call": [READ, EDIT]}, "Done."])
        assert other.read("a.txt") != TEXT
        assert [each.tool for each in other.history()] == ["merge"]
        monkeypatch.setenv("WINK_BRANCHES", "no")
        call = {"write_file": {"path": "new.txt", "content": "b"}}
        shared = run(wink, [{"call": [call]}, "Done."])
        assert [each.tool for each in other.history()] == ["merge", "write_file"]

    assert (done.code, shared.code) == (0, 0)
    assert f"process {os.getpid()} is at work here, too" in done.err
    assert "branch" not in shared.err
    assert names(project) == []


def test_an_interrupted_run_keeps_its_branch_and_is_resumed_there(project: Path, wink: Wink):
    turns = [{"call": [READ, EDIT]}, {"call": [WAIT]}, "Done."]
    process = start(project, turns, "--branch", "parser", name="killed")
    waiting = release(project, 0, process)
    process.kill()
    process.wait()
    os.close(waiting)

    assert (project / "a.txt").read_text() == TEXT
    assert names(project) == ["parser"]
    with meanwhile(project, lambda: None):
        done = wink("resume")
    assert (done.code, done.out) == (0, "Done.\n"), done.err
    assert "line five" in (project / "a.txt").read_text()
    assert names(project) == []


@pytest.mark.parametrize("delay", [0.02, 0.08, 0.2])
def test_a_killed_merge_is_complete_or_has_not_happened(project: Path, wink: Wink, delay: float):
    """Whatever the kill hits, resuming the run leads to the same files."""
    made = {f"f{n}.txt" for n in range(200)}
    command = "for n in $(seq 0 199); do echo $n > f$n.txt; done"
    turns = [{"call": [{"shell_execute": {"command": command}}]}, {"call": [WAIT]}, "Done."]
    process = start(project, turns, "--branch", "parser", name="killed")
    os.close(release(project, 0, process))
    threading.Event().wait(delay)
    process.kill()
    process.wait()

    HostFilesystem(project).close()  # rolls back what the kill has left
    found = made & set(os.listdir(project))
    assert found in (set(), made)
    if not found or names(project):
        model = script(project, ["Done."] * 9, "rest.json")
        done = wink("resume", "-m", model)
        assert done.code == 0, done.err
    assert made <= set(os.listdir(project))
    assert names(project) == []


def test_a_finished_run_goes_on_with_a_new_branch(project: Path, wink: Wink):
    put = {"write_file": {"path": "more.txt", "content": "more\n"}}
    run(wink, [{"call": [READ, EDIT]}, "Done.", {"call": [put]}, "More."], "--branch", "parser")
    done = wink("resume", runs_of(project)[0].mark, "more")

    assert (done.code, done.out) == (0, "More.\n"), done.err
    assert (project / "more.txt").exists()
    assert "line five" in (project / "a.txt").read_text()


def test_what_cannot_work_leaves_no_branch_behind(project: Path, wink: Wink):
    (project.parent / "mine.py").write_text(
        "import weakincentives as wink\n@wink.tool(writes='external', reach='reversible')\n"
        "def wait() -> str:\n    '''Start programs.'''\n    return ''\n"
    )
    approve(project)
    done = run(wink, ["Done."], "--branch", "parser")

    assert done.code == 2
    assert "wait starts programs that change the directory itself" in done.err
    assert names(project) == []


def test_two_runs_at_once_with_overlapping_files_lose_nothing(project: Path, wink: Wink):
    """Each changes its own line of one file, a line of its own file, and deletes nothing."""
    started: list[Forked] = []
    for n, line in enumerate((2, 8)):
        own = {"old_string": f"line {line}\n", "new_string": f"of run {n}\n", "path": "a.txt"}
        put = {"path": f"own{n}.txt", "content": f"{n}\n"}
        wait = {"wait": {"number": n}}
        turns = [{"call": [READ]}, {"call": [{"edit_file": own}, {"write_file": put}]},
                 {"call": [wait]}, "Done.", "Still done."]  # fmt: skip
        started.append(start(project, turns, "--branch", "-", name=f"task {n}"))
    # Both have read and changed before one of them merges.
    waiting = [release(project, n, each) for n, each in enumerate(started)]
    for each in waiting:
        os.close(each)

    assert [each.wait(60) for each in started] == [0, 0]
    text = TEXT.replace("line 2\n", "of run 0\n").replace("line 8\n", "of run 1\n")
    assert (project / "a.txt").read_text() == text
    assert [(project / f"own{n}.txt").read_text() for n in (0, 1)] == ["0\n", "1\n"]
    assert names(project) == []
    logged = [json.loads(line) for line in wink("log", "--json").out.splitlines()]
    assert [each["outcome"] for each in logged if each["tool"] == "merge"].count("committed") == 2


# Branches and their commands


@pytest.fixture
def parser(project: Path, wink: Wink) -> str:
    """A branch with a change and a new file, in two calls; the second run command."""
    put = {"write_file": {"path": "new.txt", "content": "new\n"}}
    done = run(wink, [{"call": [READ, EDIT]}, {"call": [put]}, "Done."], "--branch", "parser",
               "--no-merge")  # fmt: skip
    assert done.code == 0, done.err
    return runs_of(project)[-1].mark


def test_branches_are_listed_for_people_and_programs(project: Path, wink: Wink, parser: str):
    with HostFilesystem(project) as files:
        files.write("b.txt", "changed\n")
    done = wink("branch", "list")
    assert done.out.splitlines()[0].split() == ["NAME", "RUN", "AGE", "CALLS", "FILES", "BEHIND"]
    assert "parser" in done.out
    with Branch.open(project, "parser"):
        (row,) = map(json.loads, wink("branch", "list", "--json").out.splitlines())
    shown = {key: row[key] for key in ("name", "run", "calls", "files", "behind", "in_use")}
    assert shown == {
        "name": "parser",
        "run": parser,
        "calls": 2,
        "files": ["a.txt", "new.txt"],
        "behind": 1,
        "in_use": True,
    }


def test_the_diff_of_a_branch_is_a_patch(project: Path, wink: Wink, parser: str):
    patch = wink("branch", "diff", "parser").out
    subprocess.run(["git", "apply"], cwd=project, input=patch.encode(), check=True)

    assert "line five" in (project / "a.txt").read_text()
    assert (project / "new.txt").read_text() == "new\n"
    assert wink("branch", "diff", "parser", "workspace").out == ""


def test_the_diff_from_the_workspace_has_what_was_committed_there(
    project: Path, wink: Wink, parser: str
):
    with HostFilesystem(project) as files:
        files.write("b.txt", "later\n")
    out = wink("branch", "diff", "parser", "workspace").out
    assert "-later\n+b" in out
    assert "+line five" in out


def test_a_merge_is_undone_like_a_call_and_the_branch_is_gone(
    project: Path, wink: Wink, parser: str
):
    assert wink("branch", "merge", "parser").code == 0
    assert "line five" in (project / "a.txt").read_text()
    assert names(project) == []
    assert wink("undo").code == 0
    assert (project / "a.txt").read_text() == TEXT
    assert not (project / "new.txt").exists()


def test_a_merge_of_what_is_protected_needs_the_settings_of_the_directory(
    project: Path, wink: Wink, parser: str
):
    with Branch.open(project, "parser", unprotected=[".gitmodules"]) as branch:
        branch.write(".gitmodules", "x\n")
    refused = wink("branch", "merge", "parser")

    assert refused.code != 0
    assert "Cannot change .gitmodules: it is protected" in refused.err
    assert not (project / "new.txt").exists()
    (project / "wink.toml").write_text('[policy]\nunprotect = [".gitmodules"]\n')
    assert "not approved: wink.toml" in wink("branch", "merge", "parser").err
    approve(project)
    assert wink("branch", "merge", "parser").code == 0
    assert (project / ".gitmodules").read_text() == "x\n"
    assert (project / "new.txt").exists()


def test_a_conflict_is_listed_and_nothing_is_merged(project: Path, wink: Wink, parser: str):
    edited = TEXT.replace("line 5", "the person's line")
    (project / "a.txt").write_text(edited)
    done = wink("branch", "merge", "parser")

    assert done.code == 1
    assert "a.txt was changed in the same places by the branch and by others" in done.err
    assert (project / "a.txt").read_text() == edited
    assert not (project / "new.txt").exists()
    assert wink("branch", "merge", "parser", "--prefer", "workspace", "--keep").code == 0
    assert (project / "a.txt").read_text() == edited
    assert (project / "new.txt").exists()
    assert names(project) == ["parser"]


def test_a_dry_run_of_a_merge_changes_nothing(project: Path, wink: Wink, parser: str):
    done = wink("branch", "merge", "parser", "--dry-run")
    assert done.out.splitlines() == ["would change 2 paths", "  a.txt", "  new.txt"]
    assert (project / "a.txt").read_text() == TEXT
    assert names(project) == ["parser"]


def test_a_branch_in_use_is_not_dropped(project: Path, wink: Wink, parser: str):
    with Branch.open(project, "parser"):
        assert wink("branch", "drop", "parser").code == 1
    assert wink("branch", "drop", "parser").code == 0
    assert names(project) == []
    assert "no branch 'parsr'" in wink("branch", "drop", "parsr").err


def test_a_checkout_has_modes_times_links_and_empty_directories(
    project: Path, wink: Wink, tmp_path: Path
):
    (project / "tool.sh").write_text("#!/bin/sh\n")
    (project / "tool.sh").chmod(0o755)
    os.utime(project / "b.txt", ns=(1_000_000_000, 1_000_000_000))
    command = "ln -s b.txt link; mkdir empty; touch -d @77 old; chmod 600 old"
    run(wink, [{"call": [{"shell_execute": {"command": command}}]}, "Done."],
        "--branch", "x", "--no-merge")  # fmt: skip
    target = tmp_path / "out"
    assert wink("branch", "checkout", "x", str(target)).code == 0

    assert os.readlink(target / "link") == "b.txt"
    assert (target / "empty").is_dir()
    assert (target / "tool.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "b.txt").stat().st_mtime_ns == 1_000_000_000
    status = (target / "old").stat()
    assert (status.st_mtime, status.st_mode & 0o777) == (77, 0o600)
    assert wink("branch", "checkout", "x", str(target)).code == 1  # not empty
    assert wink("branch", "checkout", "x", str(project / "inside")).code == 1


# Calls on branches


def test_log_show_and_diff_have_the_files_of_calls_on_branches(
    project: Path, wink: Wink, parser: str
):
    logged = [json.loads(line) for line in wink("log", "--json").out.splitlines()]
    assert {(each["tool"], each["branch"]) for each in logged if each["files"]} == {
        ("edit_file", "parser"),
        ("write_file", "parser"),
    }
    assert "(branch parser)" in wink("log").out
    assert "+line five" in wink("diff", "2").out
    assert "+line five" in wink("diff", parser).out
    assert "line five" in wink("show", "2:a.txt").out
    assert "line 5" in wink("show", "2:a.txt", "--before").out


def test_undo_of_a_call_on_a_branch_undoes_it_there(project: Path, wink: Wink, parser: str):
    refused = wink("undo", f"{parser}/2")
    assert refused.code == 1
    assert "Only the newest calls of a branch can be undone" in refused.err
    done = wink("undo", f"{parser}/3")
    assert (done.code, (project / "a.txt").read_text()) == (0, TEXT), done.err
    with Branch.open(project, "parser") as branch:
        assert not branch.exists("new.txt")
    redo = next(line for line in done.out.splitlines() if line.startswith("To redo it: "))
    assert wink(*redo.split()[4:]).code == 0
    with Branch.open(project, "parser") as branch:
        assert branch.exists("new.txt")


def test_a_run_on_a_branch_is_rewound_there(project: Path, wink: Wink, parser: str):
    done = wink("rewind", f"{parser}/2")
    assert done.code == 0, done.err
    with Branch.open(project, "parser") as branch:
        assert not branch.exists("new.txt")
        assert "line five" in branch.read("a.txt")
    assert wink("undo", f"{parser}/4").code == 0
    with Branch.open(project, "parser") as branch:
        assert branch.exists("new.txt")


# Forks


def test_a_fork_of_a_call_in_the_directory_has_its_files_and_conversation(
    project: Path, wink: Wink
):
    put = {"write_file": {"path": "new.txt", "content": "new\n"}}
    run(wink, [{"call": [READ, EDIT]}, {"call": [put]}, "Done."])
    done = wink("fork", "2", "--name", "other")
    assert done.code == 0, done.err
    with Branch.open(project, "other") as branch:
        assert "line five" in branch.read("a.txt")
        assert not branch.exists("new.txt")

    third = {"write_file": {"path": "third.txt", "content": "3\n"}}
    model = script(project, ["", {"call": [third]}, "On the fork."])
    resumed = wink("resume", "other", "another way", "-m", model)
    assert resumed.out == "On the fork.\n", resumed.err
    assert not (project / "third.txt").exists()

    assert wink("branch", "merge", "other").code == 0
    assert (project / "third.txt").exists()
    assert (project / "new.txt").exists()  # what the directory has got since stays
    assert names(project) == []


def test_a_call_on_a_branch_is_forked_with_the_commits_up_to_it(
    project: Path, wink: Wink, parser: str
):
    assert wink("fork", f"{parser}/2", "--name", "other").code == 0
    wink("branch", "drop", "parser")  # the fork has all that it needs
    with Branch.open(project, "other") as branch:
        assert "line five" in branch.read("a.txt")
        assert not branch.exists("new.txt")
        assert len(branch.history()) == 1


def test_the_fork_of_now_has_what_a_person_has_changed(project: Path, wink: Wink):
    run(wink, [{"call": [READ, EDIT]}, "Done."])
    (project / "b.txt").write_text("of a person\n")
    assert wink("fork", "--name", "other").code == 0
    with Branch.open(project, "other") as branch:
        assert "line five" in branch.read("a.txt")
        assert branch.read("b.txt") == "of a person\n"


def test_a_branch_without_a_run_cannot_be_resumed(project: Path, wink: Wink):
    Branch.create(project, "mine").close()
    assert "no run works on the branch mine" in wink("resume", "mine", "go on").err


# A conversation on a branch


def test_a_chat_on_a_branch_merges_when_told(
    project: Path, wink: Wink, monkeypatch: pytest.MonkeyPatch
):
    model = script(project, [{"call": [READ, EDIT]}, "Done."])
    said = "change it\n/diff\n/merge\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    done = wink("chat", "-m", model, "--branch", "talk")
    assert done.code == 0, done.err
    assert "+line five" in done.out
    assert "Merged into" in done.out
    assert "line five" in (project / "a.txt").read_text()
    assert names(project) == []
