"""`wink log`, `show`, `diff` and `undo`, as a person uses them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Wink, make_run, resume_run, run_open
from terminal import WINK, Terminal

import weakincentives as wink_library
from stored import damage
from weakincentives.adapters import calls
from weakincentives.cli.common import find_run
from weakincentives.errors import Suspended
from weakincentives.filesystem import Filesystem, HostFilesystem, WorkspaceHistory
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import SavedSession, Session, ToolCall, execute_tool
from weakincentives.runtime.calls import new_run, runs_of
from weakincentives.runtime.conversation import last_conversation

TURNS = [
    calls(("read_file", {"path": "src/calc.py"}), ("read_file", {"path": "notes.txt"})),
    calls(
        ("write_file", {"path": "wink.toml", "content": "x"}),
        ("edit_file", {"path": "src/calc.py", "old_string": "-", "new_string": "+"}),
        ("edit_file", {"path": "src/calc.py", "old_string": "no such", "new_string": "x"}),
    ),
    calls(("write_file", {"path": "new.txt", "content": "new\n"}), ("nosuch", {})),
    "Done.",
]
# The calls: 1 and 2 read, 3 is denied, 4 edits, 5 fails, 6 makes a file, 7 is of no tool.


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src/calc.py").write_text("def add(a, b):\n    return a - b\n")
    (project / "notes.txt").write_text("hello\n")
    return project


@pytest.fixture
def wink(project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Wink:
    monkeypatch.chdir(project)
    monkeypatch.setenv("NO_COLOR", "1")
    return Wink(capfd, project)


# log


def test_the_log_has_every_call_with_what_came_of_it(wink: Wink, project: Path):
    run = make_run(project, TURNS, "fix the sum")

    shown = wink("log").out.splitlines()

    assert shown[0].startswith(run.id)
    assert shown[0].endswith("fix the sum")
    outcomes = [line.split() for line in shown if line.strip().startswith(f"{run.mark}/")]
    assert [line[3] for line in outcomes] == [
        "ok", "ok", "denied", "committed", "rolled", "committed", "refused"
    ]  # fmt: skip
    assert "src/calc.py +1 -1" in "\n".join(shown)
    assert "Cannot change wink.toml: it is protected" in "\n".join(shown)


def test_the_log_for_machines_is_one_object_a_line(wink: Wink, project: Path):
    run = make_run(project, TURNS)

    lines = [json.loads(line) for line in wink("log", "--json", "-n", "0").out.splitlines()]

    assert [line["call"] for line in lines] == [f"{run.mark}/{n}" for n in range(1, 8)]
    assert lines[3]["arguments"]["path"] == "src/calc.py"
    assert lines[3]["files"] == [
        {"path": "src/calc.py", "origin": "", "added": 1, "removed": 1, "ignored": False}
    ]


def test_the_log_is_cut_to_the_newest_and_to_one_run(wink: Wink, project: Path):
    first, second = make_run(project, [*TURNS[:1], "Done."]), make_run(project, TURNS)

    names = [json.loads(line)["call"] for line in wink("log", "--json", "-n", "8").out.splitlines()]
    assert names == [f"{first.mark}/2", *(f"{second.mark}/{n}" for n in range(1, 8))]

    shown = wink("log", "--json", first.id).out.splitlines()
    assert [json.loads(line)["call"] for line in shown] == [f"{first.mark}/1", f"{first.mark}/2"]


def test_calls_of_programs_that_keep_no_run_are_in_the_log(wink: Wink, project: Path):
    with HostFilesystem(project) as files:
        files.write("direct.txt", "x\n")

        @wink_library.tool
        def note(*, context: wink_library.ToolContext) -> str:
            """Note something."""
            context.filesystem.append("notes.txt", "noted\n")
            return "noted"

        note(context=context_of(Session(), files))

    lines = [json.loads(line) for line in wink("log", "--json").out.splitlines()]

    assert [(line["tool"], line["run"]) for line in lines] == [("", None), ("note", None)]
    assert wink("diff", lines[1]["call"]).out.endswith(" hello\n+noted\n")


def test_everything_can_be_looked_at_while_a_run_is_under_way(wink: Wink, project: Path):
    with run_open(project, TURNS) as run:
        assert len(wink("log", "--json").out.splitlines()) == 7
        assert "a + b" in wink("diff", f"{run.mark}/4").out
        assert wink("show", f"{run.mark}/4").code == 0
        assert wink("undo", "--dry-run").code == 0


def test_an_undo_takes_its_turn_beside_a_run_under_way(wink: Wink, project: Path):
    with run_open(project, TURNS):
        done = wink("undo")
        assert done.code == 0
        assert not (project / "new.txt").exists()


def test_an_undo_beside_an_agent_that_has_the_directory_alone_says_who_it_is(
    wink: Wink, project: Path, monkeypatch: pytest.MonkeyPatch
):
    make_run(project, TURNS)
    monkeypatch.setattr("weakincentives.runtime.undo.PATIENCE", 0.1)  # it will not end
    with HostFilesystem(project):
        done = wink("undo")

    assert (done.code, done.out) == (2, "")
    assert f"is in use by process {os.getpid()}: wait for it to end" in done.err


def test_an_empty_log_says_how_to_begin(wink: Wink):
    done = wink("log")

    assert (done.code, done.out) == (0, "")
    assert "wink hook install" in done.err


def test_a_run_whose_file_is_torn_or_foreign_does_not_hide_the_others(wink: Wink, project: Path):
    run = make_run(project, TURNS)
    (run.path.parent / "20990101-000000-xxx.jsonl").write_text('{"wink_sess')
    (run.path.parent / "20990101-000001-yyy.jsonl").write_text('{"hello": 1}\n')

    assert len(wink("log", "--json").out.splitlines()) == 7
    assert wink("show", f"{run.mark}/4").code == 0


def test_a_damaged_history_does_not_hide_what_is_on_record(wink: Wink, project: Path):
    make_run(project, TURNS)
    damage(WorkspaceHistory(project).store)

    lines = [json.loads(line) for line in wink("log", "--json").out.splitlines()]

    assert len(lines) == 7
    assert all(line["files"] == [] for line in lines)
    assert wink("undo").err.startswith("wink: nothing to undo: no files were changed")


@pytest.mark.parametrize("what", ["history", "session"])
def test_the_log_names_what_is_damaged_and_shows_the_rest(wink: Wink, project: Path, what: str):
    run = make_run(project, TURNS)
    named = "change 1 is" if what == "history" else str(run.path)
    if what == "history":
        damage(WorkspaceHistory(project).store, 1)
    else:
        data = run.path.read_bytes()
        run.path.write_bytes(data[:-40] + b"~" + data[-39:])

    done = wink("log", "--json")

    assert done.code == 0
    assert named in done.err
    assert "damaged" in done.err
    # The last save of the session has no call in it.
    assert len(done.out.splitlines()) == 7


# show


def test_all_that_is_known_of_a_call_is_shown(wink: Wink, project: Path):
    run = make_run(project, TURNS)

    denied = wink("show", f"{run.mark}/3").out
    assert "denied by    protected_paths" in denied
    assert "Cannot change wink.toml" in denied
    edited = wink("show", run.id[:15] + "/4").out
    assert '"old_string": "-"' in edited
    assert "Edited src/calc.py: 1 replacement" in edited
    assert f"wink undo {run.mark}/4" in edited
    failed = json.loads(wink("show", "5", "--json").out)
    assert failed["outcome"] == "rolled back"
    assert failed["rolled_back"] == ["session", "Filesystem"]


def test_the_result_of_a_call_without_a_model_is_shown_as_it_would_see_it(
    wink: Wink, project: Path
):
    run = new_run(WorkspaceHistory(project).store)

    @wink_library.tool
    def count() -> list[str]:
        """Count."""
        return ["one", "two"]

    with SavedSession.create(run.path, Session()) as saved:
        count(context=wink_library.ToolContext(session=saved.session))

    assert "  one\n  two\n" in wink("show", "1").out


def test_a_nested_call_ends_with_the_call_it_is_nested_in(wink: Wink, project: Path):
    """A success inside a call that was rolled back has not happened, however deep it is."""
    run = new_run(WorkspaceHistory(project).store)

    @wink_library.tool
    def inner(*, context: wink_library.ToolContext) -> str:
        """Succeed."""
        return "done"

    @wink_library.tool
    def middle(*, context: wink_library.ToolContext) -> str:
        """Succeed, too."""
        return str(inner(context=context).success)

    @wink_library.tool
    def outer(fail: bool, *, context: wink_library.ToolContext) -> str:
        """Call it, then succeed or fail."""
        assert middle(context=context).success
        if fail:
            raise ValueError("no")
        return "done"

    with SavedSession.create(run.path, Session()) as saved:
        for fail in (True, False):
            outer({"fail": fail}, context=wink_library.ToolContext(session=saved.session))

    lines = [json.loads(line) for line in wink("log", "--json").out.splitlines()]
    assert [(line["tool"], line["outcome"]) for line in lines] == [
        *((tool, "rolled back") for tool in ("outer", "middle", "inner")),
        *((tool, "ok") for tool in ("outer", "middle", "inner")),
    ]
    assert [line["nested_in"] for line in lines[:3]] == [None, f"{run.mark}/3", f"{run.mark}/2"]
    assert f"nested in    {run.mark}/3" in wink("show", "2").out


def test_a_suspended_call_says_so(wink: Wink, project: Path):
    run = new_run(WorkspaceHistory(project).store)

    @wink_library.tool
    def wait(*, context: wink_library.ToolContext) -> str:
        """Wait for a person."""
        raise Suspended("who approves?")

    with SavedSession.create(run.path, Session()) as saved, pytest.raises(Suspended):
        wait(context=wink_library.ToolContext(session=saved.session))

    [line] = wink("log", "--json").out.splitlines()
    assert json.loads(line)["outcome"] == "suspended"
    assert "suspended" in wink("log").out


def test_text_of_a_model_cannot_act_on_the_terminal(wink: Wink, project: Path):
    make_run(
        project, [calls(("read_file", {"path": "\x1b[2J\x1b]0;title\x07x"})), "Done."], "\x1b[31m"
    )

    for command in (["log"], ["show", "1"]):
        assert "\x1b" not in wink(*command).out


def test_half_a_surrogate_pair_is_shown_as_its_escape(wink: Wink, project: Path):
    """Not as base64, which nobody can read."""
    make_run(project, [calls(("read_file", {"path": "caf\udce9.txt"})), "Done."])

    assert "caf\\udce9.txt" in wink("log").out
    (line,) = wink("log", "--json").out.splitlines()
    assert json.loads(line)["arguments"]["path"] == "caf\\udce9.txt"
    assert json.dumps("caf\\udce9.txt")[1:-1] in wink("show", "1").out


def test_what_the_terminal_has_no_letters_for_is_spelled_out(project: Path):
    make_run(project, TURNS, "größer")

    done = subprocess.run(
        [*WINK, "log"], cwd=project, capture_output=True, check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip

    assert b"gr\\xf6\\xdfer" in done.stdout


# diff


def test_the_diff_of_a_run_is_a_patch_for_git(wink: Wink, project: Path, tmp_path: Path):
    run = make_run(project, TURNS)

    patch = wink("diff", run.id).out

    assert patch == wink("diff", run.mark).out
    subprocess.run(
        ["git", "apply", "--reverse", "--unsafe-paths", "-"],
        input=patch.encode(), cwd=project, check=True,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)},
    )  # fmt: skip
    assert "a - b" in (project / "src/calc.py").read_text()
    assert not (project / "new.txt").exists()


def test_without_a_name_the_last_run_is_meant(wink: Wink, project: Path):
    make_run(project, TURNS)

    whole = wink("diff")
    assert "+++ b/new.txt" in whole.out
    assert "+++ b/src/calc.py" in whole.out
    assert (whole.code, whole.err) == (0, "")
    assert "src/calc.py" not in wink("diff", "--last").out


def test_after_an_undo_the_run_before_is_meant(wink: Wink, project: Path):
    first = make_run(project, TURNS, "the first task")
    again = calls(("write_file", {"path": "again.txt", "content": "again\n"}))
    second = make_run(project, [again, "Done."], "the second task")
    assert wink("undo").code == 0

    shown = wink("diff")
    assert "+++ b/new.txt" in shown.out
    assert "again" not in shown.out
    assert f"{second.mark}/1 write_file is already undone; before it came" in shown.err
    assert f"the run {first.mark} (2 calls: the first task)" in shown.err

    assert wink("undo").code == 0
    done = wink("diff")
    assert (done.code, done.out) == (1, "")
    assert "is already undone, and so is everything before it" in done.err
    undone = wink("diff", first.mark)
    assert "+++ b/new.txt" in undone.out
    assert "is undone; this is what it changed" in undone.err


def test_an_mcp_session_is_one_run_each_time_the_server_is_started(wink: Wink, project: Path):
    """A server resumes its session for weeks; nobody means all of that."""

    def write(path: str) -> list[Any]:
        return [calls(("write_file", {"path": path, "content": "x\n"})), "Done."]

    run = make_run(project, [*write("a")[:1], *write("b")], kind="mcp")
    resume_run(project, run, [*write("c")[:1], *write("d")])

    assert wink("diff", run.mark).out.count("diff --git") == 4
    assert wink("diff").out.count("diff --git") == 2
    assert wink("undo").code == 0
    assert {path.name for path in project.iterdir()} == {"src", "notes.txt", "a", "b"}
    assert wink("undo").code == 0
    assert {path.name for path in project.iterdir()} == {"src", "notes.txt"}


def test_what_a_run_has_undone_itself_does_not_come_back(wink: Wink, project: Path):
    """The `undo` tool of an MCP session is a call of the same run."""
    run = make_run(project, TURNS)
    with SavedSession.open(run.path) as saved, HostFilesystem(project) as files:
        undone = next(each.call_id for each in files.history() if "new.txt" in each.paths)

        @wink_library.tool(reach="reversible")
        def undo(*, context: wink_library.ToolContext) -> str:
            """Undo a call."""
            context.filesystem.undo(undone)
            return "undone"

        undo(context=context_of(saved.session, files))

    assert "new.txt" not in wink("diff").out
    assert wink("undo").code == 0
    assert not (project / "new.txt").exists()
    assert "a - b" in (project / "src/calc.py").read_text()


def context_of(session: Session, files: HostFilesystem) -> wink_library.ToolContext:
    return wink_library.ToolContext(session=session, resources={Filesystem: files})


def test_a_resumed_run_is_one_run_and_a_call_without_a_run_stands_for_itself(
    wink: Wink, project: Path
):
    run = make_run(project, TURNS)
    make_run(project, [calls(("write_file", {"path": "other", "content": "x\n"})), "Done."])
    write = calls(("write_file", {"path": "more", "content": "x\n"}))
    resume_run(project, run, [write, "Done."])
    with HostFilesystem(project) as files:
        files.write("direct.txt", "x\n")

    assert "direct.txt" in wink("undo").out
    resumed = wink("undo")
    assert "the run" in resumed.out
    assert "(3 calls" in resumed.out
    assert {path.name for path in project.iterdir()} == {"src", "notes.txt", "other"}
    assert "other" in wink("undo").out


def test_a_diff_shows_what_the_run_wrote_though_a_person_has_changed_it_since(
    wink: Wink, project: Path
):
    run = make_run(project, TURNS)
    before = wink("diff").out
    (project / "new.txt").write_text("mine\n")
    (project / "src/calc.py").unlink()

    for done in (wink("diff", f"{run.mark}/6"), wink("diff")):
        assert "+new" in done.out
        assert "mine" not in done.out
        assert done.code == 0
        assert "not complete" not in done.err
        assert "these files have changed since, outside wink (not shown)" in done.err
        assert "new.txt" in done.err
    assert done.out == before


def test_a_call_that_changed_nothing_has_no_diff(wink: Wink, project: Path):
    run = make_run(project, TURNS)

    done = wink("diff", f"{run.mark}/1")

    assert (done.code, done.out) == (1, "")
    assert "no files were changed" in done.err


def test_a_diff_is_coloured_on_a_terminal(project: Path):
    run = make_run(project, TURNS)

    with Terminal([*WINK, "diff", f"{run.mark}/4"], cwd=project) as terminal:
        terminal.process.wait(timeout=240)
        terminal.wait_for("return a + b")
        assert b"\x1b[32m+    return a + b" in terminal.raw
        assert b"\x1b[31m-    return a - b" in terminal.raw


# undo


def test_a_call_that_was_undone_and_made_again_is_in_place(wink: Wink, project: Path):
    """A run that is resumed makes a call again, under the same id."""

    @wink_library.tool
    def note(*, context: wink_library.ToolContext) -> str:
        """Write a note."""
        context.filesystem.write("note.txt", "x\n")
        return "written"

    def make_call() -> None:
        with HostFilesystem(project) as files:
            section = MarkdownSection(title="Notes", tools=[note])
            resources = {Filesystem: files}
            template = PromptTemplate(
                ns="test", key="notes", sections=[section], resources=resources
            )
            prompt = Prompt(template)
            with prompt.resources:
                execute_tool(ToolCall("note", {}, "c1"), session=Session(), prompt=prompt)

    make_call()
    wink("undo", "c1")
    assert not (project / "note.txt").exists()
    make_call()

    assert " committed " in wink("log", "-n", "1").out
    assert wink("undo").code == 0
    assert not (project / "note.txt").exists()


def test_undo_goes_back_one_run_after_the_other(wink: Wink, project: Path):
    run = make_run(project, TURNS)
    make_run(project, [calls(("write_file", {"path": "again", "content": "x\n"})), "Done."])

    assert "again +0 -1" in wink("undo").out
    assert (project / "new.txt").exists()
    first = wink("undo")
    assert first.code == 0
    assert f"Undone: the run {run.mark} (2 calls: a task)" in first.out
    assert "new.txt +0 -1" in first.out
    assert "Only files were undone" in first.out
    assert not (project / "new.txt").exists()
    assert "a - b" in (project / "src/calc.py").read_text()
    assert "is already undone, and so is everything before it" in wink("undo").err

    again = first.out.split("wink undo ")[1].split()[0]
    assert wink("undo", again).code == 0
    assert (project / "new.txt").exists()
    assert "new.txt" in wink("undo").out, "a run that was redone is the last one"


def test_the_last_call_alone_is_undone_on_request(wink: Wink, project: Path):
    make_run(project, TURNS)

    assert "new.txt" in wink("undo", "--last").out
    assert "a + b" in (project / "src/calc.py").read_text()
    assert wink("undo", "--last").code == 0
    assert "a - b" in (project / "src/calc.py").read_text()
    assert wink("undo", "--last").err.startswith("wink: nothing to undo: the run")


def test_one_call_is_undone_by_name_and_had_back_again(wink: Wink, project: Path):
    run = make_run(project, TURNS)

    undone = wink("undo", f"{run.mark}/4")
    assert "a - b" in (project / "src/calc.py").read_text()
    assert (project / "new.txt").exists()
    again = undone.out.split("wink undo ")[1].split()[0]
    twice = wink("undo", f"{run.mark}/4")
    assert (twice.code, twice.err) == (
        1, "wink: nothing to undo: no files were changed here, or it is already undone, or the "
        "history no longer has them; `wink log` lists the calls\n"
    )  # fmt: skip

    assert wink("undo", again).code == 0
    assert "a + b" in (project / "src/calc.py").read_text()
    assert "undone" not in wink("log", run.id).out


def test_what_a_person_changed_since_is_kept_unless_forced_and_then_too(wink: Wink, project: Path):
    run = make_run(project, TURNS)
    (project / "src/calc.py").write_text("mine\n")

    refused = wink("undo", f"{run.mark}/4")
    assert (refused.code, refused.out) == (1, "")
    assert "src/calc.py: changed by a person or program outside wink" in refused.err
    assert (project / "src/calc.py").read_text() == "mine\n"

    forced = wink("undo", f"{run.mark}/4", "--force")
    assert forced.code == 0
    assert "a - b" in (project / "src/calc.py").read_text()
    assert wink("undo", forced.out.split("wink undo ")[1].split()[0]).code == 0
    assert (project / "src/calc.py").read_text() == "mine\n"


KILLED = """
import os, signal, sys
from weakincentives.filesystem import HostFilesystem

view = HostFilesystem(sys.argv[1]).fork_in_place()
view.write("src/calc.py", "half of it\\n")
view.write("made.txt", "half of it\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_call_left_is_rolled_back_before_anything_is_undone(
    wink: Wink, project: Path
):
    """Nobody else has changed these files, so nobody else is blamed."""
    run = make_run(project, TURNS)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(project)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (project / "src/calc.py").read_text() == "half of it\n"

    looked = [wink("undo", f"{run.mark}/4", "--dry-run"), wink("diff", f"{run.mark}/4")]
    for each in looked:
        assert "a call was killed" in each.err
        assert "someone else" not in each.err
    assert (project / "made.txt").exists(), "looking changes nothing"

    undone = wink("undo", f"{run.mark}/4")

    assert undone.code == 0, undone.err
    assert undone.err == "wink: a call was killed; its changes were rolled back first\n"
    assert "a - b" in (project / "src/calc.py").read_text()
    assert (project / "new.txt").exists()
    assert not (project / "made.txt").exists()
    assert wink("undo").err == "", "it is said once"


def test_a_call_under_a_later_one_is_refused_with_the_way_to_go_back_over_both(
    wink: Wink, project: Path
):
    edit = ("edit_file", {"path": "src/calc.py", "old_string": "a + b", "new_string": "b + a"})
    run = make_run(project, [*TURNS[:2], calls(edit), "Done."])

    refused = wink("undo", f"{run.mark}/4")
    assert refused.code == 1
    assert f"src/calc.py: changed by {run.mark}/6" in refused.err
    assert f"wink undo --to {run.mark}/4" in refused.err

    assert wink("undo", "--to", f"{run.mark}/4").code == 0
    assert "a - b" in (project / "src/calc.py").read_text()


def test_a_whole_run_is_undone_and_a_dry_run_only_shows_it(wink: Wink, project: Path):
    run = make_run(project, TURNS)

    shown = wink("undo", run.mark, "--dry-run")
    assert "+    return a - b" in shown.out
    assert "deleted file mode" in shown.out
    assert (project / "new.txt").exists()

    assert wink("undo", run.mark).code == 0
    assert not (project / "new.txt").exists()
    assert "a - b" in (project / "src/calc.py").read_text()


# Asking


@pytest.mark.parametrize(
    ("command", "answer", "is_undone"),
    [
        ("undo", "\n", True),
        ("undo", "n\n", False),
        ("undo", "\x04", False),
        ("undo --yes", "", True),
        ("rewind 3", "y\n", True),
        ("rewind 3", "n\n", False),
    ],
)
def test_a_person_sees_what_will_change_before_it_does(
    project: Path, command: str, answer: str, is_undone: bool
):
    make_run(project, TURNS)
    with Terminal([*WINK, *command.split()], cwd=project) as terminal:
        if answer:
            terminal.wait_for("[Y/n]:")
            assert "This changes:" in terminal.text
            assert "src/calc.py +1 -1" in terminal.text
            assert (project / "new.txt").exists()
            terminal.send(answer)
        code = terminal.end()

    assert (code == 0) == is_undone
    assert (project / "new.txt").exists() != is_undone


# Wrong use


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["show", "nope"], "no call 'nope'"),
        (["show", "99"], "no call 99 in the run"),
        (["show", "zzz/1"], "no run 'zzz'"),
        (["log", "zzz"], "no run 'zzz'"),
        (["log", "2"], "matches 2 runs"),
        (["log", ""], "no run ''"),
        (["log", "-w", "nosuch"], "cannot open the directory nosuch"),
        (["log", "-w", "notes.txt"], "notes.txt: Not a directory"),
        (["log", "-n", "-1"], "greater than or equal to 0"),
        (["undo", "1", "--last"], "name only one of"),
        (["undo", "--last", "--to", "1"], "name only one of"),
        (["diff", "1", "--last"], "name only one of"),
        (["undo", "--to", "1"], "changed no files"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(wink: Wink, project: Path, command: list[str], said: str):
    make_run(project, ["Done."])
    make_run(project, TURNS)

    done = wink(*command)

    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.startswith("wink: ")
    assert done.err.count("\n") == 1


def test_runs_are_named_by_a_beginning_or_by_the_letters_at_the_end(project: Path):
    run = make_run(project, ["Done."])

    assert find_run(project, run.id[:6]) == find_run(project, run.mark) == run
    assert runs_of(project) == (run,)


def test_looking_needs_no_model_and_is_quick_to_load():
    """What takes long to load is loaded by the commands that need it."""
    program = (
        "import sys\nfrom weakincentives.cli.entry import make_app\nmake_app()\n"
        "print([m for m in ('pydantic', 'rich', 'mcp', 'openai', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"


# Ignored files and long lists


def test_ignored_files_are_counted_and_still_undone(wink: Wink, project: Path):
    (project / ".gitignore").write_text("*.log\n")
    writes = [
        ("write_file", {"path": path, "content": "x\n"})
        for path in ("a.log", "src/__pycache__/a.pyc", "src/__pycache__/b.pyc", "real.txt")
    ]
    run = make_run(project, [calls(*writes), "Done."])
    counted = "+ 3 ignored files (src/__pycache__, a.log)"

    shown = wink("diff")
    assert (shown.code, shown.out.count("diff --git")) == (0, 1)
    assert shown.err == f"{counted}; --all shows them\n"
    assert wink("diff", "--all").out.count("diff --git") == 4
    assert "+ 1 ignored file (a.log)" in wink("log").out
    assert "a.log +1 -0" in wink("log", "--ignored").out
    assert "+ 1 ignored file (a.log)" in wink("show", f"{run.mark}/1").out

    undone = wink("undo")
    assert counted in undone.out
    assert "a.log +0 -1" not in undone.out
    assert {path.name for path in project.rglob("*")} == {
        "src", "calc.py", "notes.txt", ".gitignore"
    }  # fmt: skip


def test_long_lists_are_cut_with_a_count(wink: Wink, project: Path):
    with HostFilesystem(project) as files:
        view = files.fork_in_place()
        for number in range(30):
            view.write(f"f{number}.txt", "x\n")
            view.mkdir(f"empty{number}")
        files.merge(view)

    assert "and 50 more files; --all lists them" in wink("log").out
    assert "f9.txt" in wink("log", "--all").out
    shown = wink("diff")
    assert shown.out.count("diff --git") == 30
    assert shown.err.count("new empty directory") == 10
    assert "and 20 more; --all lists them" in shown.err
    for number in range(30):
        (project / f"f{number}.txt").write_text("mine\n")
    refused = wink("undo")
    assert refused.err.count("changed by a person or program outside wink") == 10
    assert "  and 20 more files\n" in refused.err


def test_every_kind_of_change_is_told_in_a_word(wink: Wink, project: Path):
    (project / "script").write_text("x\n")
    with HostFilesystem(project) as files, files.gate:
        view = files.fork_in_place()
        view.expect_external()
        (project / "logo").write_bytes(b"\0")
        (project / "script").chmod(0o755)
        (project / "notes.txt").chmod(0o600)
        (project / "empty").mkdir()
        (project / "big").write_bytes(b"x" * (33 << 20))
        files.merge(view)

    told = [line.strip() for line in wink("log").out.splitlines()[1:]]
    assert told == [
        "big: too large for a diff: nothing became a file of 34603008 bytes",
        "empty: new empty directory",
        "logo: binary",
        "notes.txt: permissions 0644 became 0600",
        "script: now executable",
    ]
    done = wink("diff")
    assert done.code == 3
    assert "the patch is not complete: it lacks big" in done.err
    assert "GIT binary patch" in done.out


def test_a_log_that_begins_in_the_middle_of_a_run_says_so(wink: Wink, project: Path):
    run = make_run(project, TURNS)

    assert "(2 of 7 calls)" in wink("log", "-n", "2").out.splitlines()[0]
    wink("undo")
    first = next(line for line in wink("log").out.splitlines() if line.startswith(run.id))
    assert first.endswith("(undone)")


# What was found by trying to break it


def test_without_history_a_diff_says_so_in_a_whole_sentence(wink: Wink):
    done = wink("diff")

    assert done.code == 1
    assert done.err.startswith("wink: no files were changed here")


def test_an_undo_tells_what_it_did_and_not_what_it_left(wink: Wink, project: Path):
    make_run(project, [calls(("write_file", {"path": "docs/a", "content": "a\n"})), "Done."])
    (project / "docs/mine").write_text("x\n")

    done = wink("undo")

    assert "docs/a +0 -1" in done.out
    assert "mine" not in done.out
    assert "docs holds something that is not from these calls" in done.err
    assert done.code == 3
    assert (project / "docs/mine").read_text() == "x\n"


def test_an_undo_that_changes_nothing_offers_nothing_to_have_back(wink: Wink, project: Path):
    with HostFilesystem(project) as fs:
        fs.mkdir("docs")
        fs.write("other", "x")
    (project / "docs/mine").write_text("x\n")

    done = wink("undo", "direct_1")

    assert done.code == 1
    assert done.out == ""
    assert done.err.endswith("wink: nothing was undone\n")


def test_an_undo_that_finds_no_room_says_that_nothing_was_undone(wink: Wink, project: Path):
    (project / "notes.txt").write_text("x" * 100_000)
    with HostFilesystem(project) as fs:
        fs.write("notes.txt", "short")

    limited = "import resource as r, runpy, sys; r.setrlimit(r.RLIMIT_FSIZE, (50_000, 50_000)); "
    limited += (
        "sys.argv = ['wink', 'undo']; runpy.run_module('weakincentives.cli', None, '__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited], cwd=project, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr == "wink: nothing was undone: File too large\n"
    assert (project / "notes.txt").read_text() == "short"


@pytest.mark.parametrize("name", ["9" * 5000, "/1", "0", "k3f/" + "9" * 5000])
def test_a_number_that_no_call_has_is_one_line(wink: Wink, project: Path, name: str):
    make_run(project, TURNS)

    done = wink("show", name)

    assert done.code == 2
    assert done.err.count("\n") == 1


# Files as they were


def test_a_file_and_a_directory_are_shown_as_they_were(wink: Wink, project: Path):
    run = make_run(project, TURNS)
    (project / "notes.txt").write_text("mine\n")

    assert "a + b" in wink("show", f"{run.mark}/4:src/calc.py").out
    assert "a - b" in wink("show", f"{run.mark}/4:src/calc.py", "--before").out
    assert "a - b" in wink("show", "3:src/calc.py").out  # of the last run; it was denied
    assert wink("show", f"{run.mark}/4:").out == "notes.txt\nsrc/\n"
    assert wink("show", f"{run.mark}/6:").out == "new.txt\nnotes.txt\nsrc/\n"
    assert wink("show", f"{run.mark}/6:src").out == "src/calc.py\n"
    assert (project / "notes.txt").read_text() == "mine\n"

    missing = wink("show", f"{run.mark}/4:new.txt")
    assert (missing.code, "new.txt" in missing.err) == (1, True)
    assert wink("show", f"{run.mark}/4:src", "--json").code == 2
    assert wink("show", f"{run.mark}/4", "--before").code == 2


def test_all_files_of_then_are_exported(wink: Wink, project: Path, tmp_path: Path):
    run = make_run(project, TURNS)

    assert wink("show", f"{run.mark}/4", "--export", str(tmp_path / "then")).code == 0
    assert "a + b" in (tmp_path / "then/src/calc.py").read_text()
    assert not (tmp_path / "then/new.txt").exists()

    again = wink("show", f"{run.mark}/4", "--export", str(tmp_path / "then"))
    assert (again.code, "is not empty" in again.err) == (1, True)


def test_bytes_are_printed_as_they_are(wink: Wink, project: Path):
    (project / "odd").write_bytes(b"\xff\x00\n")
    run = make_run(project, TURNS)

    command = [*WINK, "show", f"{run.mark}/4:odd"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"\xff\x00\n"


# rewind


WRITES = [
    {"call": [{"write_file": {"path": name, "content": "1"}} for name in ("a", "b")]},
    {"call": [{"delete_file": {"path": "b"}}, {"read_file": {"path": "a"}}]},
    "Written.",
    "So be it.",
]


@pytest.fixture
def written(wink: Wink, project: Path) -> str:
    """Run a scripted model that makes four calls; returns the name of the run."""
    script = project.parent / "script.json"
    script.write_text(json.dumps(WRITES))
    done = wink("run", "write", "-m", f"scripted:{script}", "--sandbox", "none", "-q")
    assert (done.code, done.out) == (0, "Written.\n"), done.err
    (run,) = runs_of(project)
    return run.mark


def conversation_of(project: Path, mark: str) -> list[tuple[str, str]]:
    with SavedSession.open(find_run(project, mark).path) as saved:
        return [(each.role, each.text[:9]) for each in last_conversation(saved.session)]


def names_in(project: Path) -> list[str]:
    return sorted(path.name for path in project.iterdir())


def test_chat_and_files_are_rewound_together_and_the_run_continues(
    wink: Wink, project: Path, written: str
):
    done = wink("rewind", f"{written}/1")

    assert done.code == 0, done.err
    assert f"Rewound to after {written}/1 write_file" in done.out
    assert names_in(project) == ["a", "notes.txt", "src"]
    before = [("user", "write"), ("model", ""), ("tool", "Wrote a: "), ("tool", "Not made:")]
    assert [each[0] for each in conversation_of(project, written)] == [each[0] for each in before]
    assert conversation_of(project, written)[-1] == ("tool", "Not made:")

    assert wink("resume", written, "go on").out == "So be it.\n"
    told = [("tool", "Not made:"), ("user", "go on"), ("model", "So be it.")]
    assert conversation_of(project, written)[-3:] == told


@pytest.mark.heavy
def test_a_rewound_run_continues_as_a_chat(wink: Wink, project: Path, written: str):
    wink("rewind", f"{written}/2")

    command = [*WINK, "chat", "--resume", written, "--quiet"]
    done = subprocess.run(command, input="and?\n", capture_output=True, text=True, check=True)

    assert done.stdout == "So be it.\n"
    assert conversation_of(project, written)[3:5] == [("tool", "Wrote b: "), ("user", "and?")]


def test_the_undo_of_a_rewind_brings_back_all_of_it(wink: Wink, project: Path, written: str):
    names, talk = names_in(project), conversation_of(project, written)
    done = wink("rewind", f"{written}/2", "--before")
    assert names_in(project) == ["a", "notes.txt", "src"]

    assert f"To undo the rewind: wink undo {written}/5" in done.out
    undone = wink("undo", f"{written}/5")

    assert undone.code == 0, undone.err
    assert (names_in(project), conversation_of(project, written)) == (names, talk)
    assert "Rewound to before" in undone.out


def test_the_undo_of_a_rewind_does_not_reach_over_later_calls(
    wink: Wink, project: Path, written: str
):
    wink("rewind", f"{written}/1")
    wink("rewind", f"{written}/2")

    refused = wink("undo", f"{written}/5")

    assert (refused.code, f"wink rewind --before {written}/5" in refused.err) == (2, True)
    assert wink("rewind", "--before", f"{written}/5").code == 0
    assert names_in(project) == ["a", "notes.txt", "src"]


def test_a_rewind_is_in_the_log(wink: Wink, written: str):
    wink("rewind", f"{written}/1")

    last = json.loads(wink("log", "--json").out.splitlines()[-1])

    assert (last["call"], last["tool"], last["outcome"]) == (f"{written}/5", "wink rewind", "undo")
    assert last["arguments"] == {"to": f"{written}/1"}
    assert wink("show", last["call_id"]).code == 0  # its id has a colon
    assert wink("show", f"{last['call_id']}:a").out == "1"


def test_a_dry_run_of_a_rewind_changes_nothing(wink: Wink, project: Path, written: str):
    talk = conversation_of(project, written)

    done = wink("rewind", f"{written}/2", "--dry-run")

    assert (done.code, "+++ b/b" in done.out) == (0, True)
    assert (names_in(project), conversation_of(project, written)) == (
        ["a", "notes.txt", "src"],
        talk,
    )


def test_a_person_s_edit_stays_and_is_listed(wink: Wink, project: Path, written: str):
    (project / "a").write_text("mine")

    shown = wink("rewind", f"{written}/1", "--before", "--dry-run")
    done = wink("rewind", f"{written}/1", "--before")

    assert "a was changed outside wink since, and would stay" in shown.err
    assert (done.code, (project / "a").read_text()) == (3, "mine")
    assert "a was changed by someone else since and is left unchanged" in done.err
    assert outcomes_of(wink)[:3] == ["partly undone", "undone", "undone"]


def outcomes_of(wink: Wink) -> list[str]:
    return [json.loads(line)["outcome"] for line in wink("log", "--json").out.splitlines()]


REMOVES = [calls(("delete_file", {"path": "src", "recursive": True})), "Done."]


@pytest.mark.parametrize("way", ["undo", "rewind"])
def test_a_re_created_file_costs_no_other_and_the_exit_code_says_that_it_is_left(
    wink: Wink, project: Path, way: str
):
    for number in range(3):
        (project / f"src/f{number}").write_text(f"{number}\n")
    run = make_run(project, REMOVES)
    (project / "src").mkdir()
    (project / "src/f1").write_text("mine\n")
    command = ("undo",) if way == "undo" else ("rewind", f"{run.mark}/1", "--before")

    shown = wink(*command, "--dry-run")
    done = wink(*command)

    assert "src/f1 was changed outside wink since, and would stay" in shown.err
    assert "b/src/f0" in shown.out
    assert "b/src/f1" not in shown.out
    assert done.code == 3
    assert "src/f1 was changed by someone else since and is left unchanged" in done.err
    names = {path.name: path.read_text() for path in (project / "src").iterdir()}
    assert (names["f0"], names["f1"], names["f2"]) == ("0\n", "mine\n", "2\n")
    assert "calc.py" in names
    assert outcomes_of(wink)[0] == "partly undone"
    assert "partly undone" in wink("log").out


def test_what_an_undo_left_is_undone_later_or_replaced_by_force(wink: Wink, project: Path):
    (project / "src/f1").write_text("1\n")
    run = make_run(project, REMOVES)
    (project / "src").mkdir()
    (project / "src/f1").write_text("mine\n")
    assert wink("undo").code == 3

    forced = wink("undo", f"{run.mark}/1", "--force")

    assert forced.code == 0, forced.err
    assert (project / "src/f1").read_text() == "1\n"
    assert outcomes_of(wink)[0] == "undone"


def test_force_restores_what_a_moved_directory_replaced(wink: Wink, project: Path):
    (project / "lib").mkdir()
    (project / "lib/one").write_text("one\n")
    move = {"source": "lib", "destination": "src", "overwrite": True}
    with HostFilesystem(project) as files:
        files.move(**move)
    (project / "src/one").unlink()
    (project / "src").rmdir()

    shown = wink("undo", "--force", "--dry-run")
    done = wink("undo", "--force")

    assert "b/src/calc.py" in shown.out
    assert (project / "src/calc.py").exists()
    assert done.code == 3
    assert "lib could not be restored" in done.err


def test_a_file_that_another_run_has_changed_is_in_the_way(wink: Wink, project: Path, written: str):
    look = calls(("read_file", {"path": "a"}))
    other = make_run(project, [look, calls(("write_file", {"path": "a", "content": "2"})), "Done."])
    for flags in (["--dry-run"], []):
        refused = wink("rewind", f"{written}/1", "--before", *flags)
        assert refused.code == 1
        assert (
            "nothing was rewound: these files have changed since:\n  a: changed by" in refused.err
        )
        assert f"a: changed by {other.mark}/2" in refused.err
    assert (project / "a").read_text() == "2"

    assert wink("rewind", f"{written}/1", "--before", "--force").code == 0
    assert not (project / "a").exists()


def test_only_the_files_or_only_the_conversation(wink: Wink, project: Path, written: str):
    talk = conversation_of(project, written)
    wink("rewind", f"{written}/2", "--files-only")
    assert names_in(project) == ["a", "b", "notes.txt", "src"]
    assert conversation_of(project, written) == talk

    wink("rewind", f"{written}/1", "--conversation-only")
    assert names_in(project) == ["a", "b", "notes.txt", "src"]
    assert len(conversation_of(project, written)) == 4

    assert wink("rewind", f"{written}/1", "--files-only", "--conversation-only").code == 2


def test_a_run_in_progress_is_not_rewound(wink: Wink, project: Path):
    with run_open(project, TURNS) as run:
        refused = wink("rewind", f"{run.mark}/4")

    assert (refused.code, "is running in another process" in refused.err) == (2, True)


def test_what_is_not_a_call_of_a_run_is_not_rewound(wink: Wink, project: Path):
    with HostFilesystem(project) as files:
        files.write("direct.txt", "x\n")

    refused = wink("rewind", "direct_1")

    assert (refused.code, "is not a call of a run" in refused.err) == (2, True)
    assert wink("rewind", "nosuch").code == 2
