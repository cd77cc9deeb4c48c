"""`wink hook run`: each tool that an agent uses is a call, which can be undone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from terminal import WINK, environment, wink

from messages_server import serving
from weakincentives.adapters import ModelTurn
from weakincentives.cli.hooks.adapters import ADAPTERS
from weakincentives.core.call import ToolCall
from weakincentives.filesystem import HostFilesystem
from weakincentives.filesystem.store import location_of


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "a.txt").write_text("one\n")
    (place / "mine.txt").write_text("mine\n")
    return place


class Claude:
    """Tells our hook what Claude Code would."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.turn = "p1"

    def tell(self, event: str, **more: Any) -> dict[str, Any]:
        told = {"session_id": "s1", "cwd": str(self.project), "hook_event_name": event, **more}
        told["prompt_id"] = self.turn
        done = wink("hook", "run", "claude", cwd=self.project, stdin=json.dumps(told))
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout) if done.stdout else {}

    def before(self, use: str, name: str, agent: str = "", **given: str) -> dict[str, Any]:
        more = {"agent_id": agent} if agent else {}
        return self.tell("PreToolUse", tool_name=name, tool_use_id=use, tool_input=given, **more)

    def after(
        self, use: str, name: str, answer: object = "ok", agent: str = "", **given: str
    ) -> dict[str, Any]:
        more = {"agent_id": agent} if agent else {}
        told = {"tool_name": name, "tool_use_id": use, "tool_input": given, **more}
        return self.tell("PostToolUse", tool_response=answer, **told)


@pytest.fixture
def claude(project: Path) -> Claude:
    return Claude(project)


def calls(project: Path, **env: str) -> list[tuple[str, str, list[str]]]:
    lines = wink("log", "--json", cwd=project, env=env).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    return [(c["tool"], c["outcome"], [f["path"] for f in c["files"]]) for c in found]


@pytest.mark.parametrize("agent", ["", "sub"])
@pytest.mark.parametrize("tool", ["mcp__prod__drop", "WebFetch"])
def test_a_running_tool_does_not_lift_the_rules(
    claude: Claude, project: Path, tool: str, agent: str
):
    """When it has ended, what it did to them is undone: too late for what ran meanwhile."""
    rules = project / "wink.toml"
    rules.write_text('[policy]\ndeny = ["mcp__prod__*", "WebFetch"]\n')

    claude.before("u1", "Bash", agent, command="rm wink.toml; sleep 9")
    rules.unlink()
    denied = [claude.before("u2", tool)]
    rules.write_text("")
    denied.append(claude.before("u3", tool))
    claude.after("u1", "Bash", agent=agent, command="rm wink.toml; sleep 9")

    for said in denied:
        decision = said["hookSpecificOutput"]
        assert decision["permissionDecision"] == "deny"
        assert "wink.toml has changed while another tool" in decision["permissionDecisionReason"]
    assert "mcp__prod__*" in rules.read_text()
    said = claude.before("u4", tool)["hookSpecificOutput"]
    assert "not allowed here" in said["permissionDecisionReason"]


def test_a_rule_holds_for_a_tool_by_its_former_name(claude: Claude, project: Path):
    (project / "wink.toml").write_text('[policy]\ndeny = ["Task", "KillShell"]\n')

    for number, name in enumerate(["Agent", "Task", "TaskStop", "KillBash"]):
        said = claude.before(f"u{number}", name)["hookSpecificOutput"]
        assert said["permissionDecision"] == "deny", name
    assert claude.before("u9", "TodoWrite") == {}


def test_what_a_tool_changed_is_one_call_that_can_be_undone(claude: Claude, project: Path):
    claude.before("u1", "Bash", command="make")
    (project / "a.txt").write_text("one\ntwo\n")
    (project / "new").mkdir()
    (project / "new" / "b.txt").write_text("b\n")
    said = claude.after("u1", "Bash", {"stdout": "built", "stderr": ""}, command="make")
    claude.before("u2", "Bash", command="rm mine.txt")
    (project / "mine.txt").unlink()
    claude.after("u2", "Bash", command="rm mine.txt")

    assert said == {}
    assert calls(project) == [
        ("bash", "committed", ["a.txt", "new/b.txt"]),
        ("bash", "committed", ["mine.txt"]),
    ]
    assert "built" in wink("show", "1", cwd=project).stdout
    assert wink("undo", "1", cwd=project).returncode == 0
    assert sorted(os.listdir(project)) == ["a.txt"]
    assert (project / "a.txt").read_text() == "one\n"


def test_a_person_s_edits_are_not_the_tool_s(claude: Claude, project: Path):
    claude.before("u1", "Edit", file_path="a.txt")
    (project / "a.txt").write_text("uno\n")
    (project / "mine.txt").write_text("edited while the tool ran\n")
    claude.after("u1", "Edit", file_path="a.txt")
    (project / "mine.txt").write_text("edited between two tools\n")
    claude.before("u2", "Write", file_path=str(project / "deep" / "er" / "c.txt"))
    (project / "deep" / "er").mkdir(parents=True)
    (project / "deep" / "er" / "c.txt").write_text("c\n")
    claude.after("u2", "Write", file_path=str(project / "deep" / "er" / "c.txt"))

    assert calls(project) == [
        ("edit", "committed", ["a.txt"]),
        ("write", "committed", ["deep/er/c.txt"]),
    ]
    assert wink("undo", cwd=project).returncode == 0
    assert sorted(os.listdir(project)) == ["a.txt", "mine.txt"]
    assert (project / "mine.txt").read_text() == "edited between two tools\n"


def test_reading_is_recorded_without_a_look_at_the_files(claude: Claude, project: Path):
    assert claude.before("u1", "Read", file_path="a.txt") == {}
    (project / "mine.txt").write_text("edited\n")
    claude.after("u1", "Read", "one\n", file_path="a.txt")

    assert calls(project) == [("read", "ok", [])]


def test_a_failed_tool_is_recorded_with_what_it_changed(claude: Claude, project: Path):
    claude.before("u1", "Bash", command="make")
    (project / "a.txt").write_text("half\n")
    given = {"tool_name": "Bash", "tool_use_id": "u1", "tool_input": {"command": "make"}}
    claude.tell("PostToolUseFailure", error="Exit code 2", **given)

    assert calls(project) == [("bash", "committed", ["a.txt"])]
    assert "It failed: Exit code 2" in wink("show", "1", cwd=project).stdout


def test_the_same_end_told_twice_is_one_call(claude: Claude, project: Path):
    claude.before("u1", "Bash", command="make")
    (project / "a.txt").write_text("two\n")
    claude.after("u1", "Bash", command="make")
    claude.after("u1", "Bash", command="make")

    assert calls(project) == [("bash", "committed", ["a.txt"])]


def test_after_the_end_of_a_turn_a_tool_without_an_end_has_no_part_in_the_next(
    claude: Claude, project: Path
):
    claude.before("denied", "Bash", command="rm -r /")
    claude.tell("Stop")
    (project / "mine.txt").write_text("edited by the person\n")
    claude.before("u2", "Bash", command="make")
    (project / "a.txt").write_text("two\n")
    claude.after("u2", "Bash", command="make")

    assert calls(project) == [("bash", "committed", ["a.txt"])]


@pytest.mark.parametrize("event", ["PreToolUse", "Stop", "SessionEnd"])
def test_the_next_event_adopts_what_a_cancelled_tool_has_changed(
    claude: Claude, project: Path, event: str
):
    claude.before("u1", "Bash", command="rm mine.txt; sleep 60")
    (project / "mine.txt").unlink()
    claude.turn = "p2"
    if event == "PreToolUse":
        claude.before("u2", "Bash", command="make")
        (project / "a.txt").write_text("two\n")
        claude.after("u2", "Bash", command="make")
    else:
        claude.tell(event)

    found = calls(project)
    assert found[0] == ("bash", "committed", ["mine.txt"])
    assert found[1:] == [("bash", "committed", ["a.txt"])] * (event == "PreToolUse")
    assert "cancelled" in wink("show", "1", cwd=project).stdout
    assert wink("undo", "1", cwd=project).returncode == 0
    assert (project / "mine.txt").read_text() == "mine\n"


def test_a_person_s_edits_after_a_cancelled_tool_was_adopted_are_not_its_own(
    claude: Claude, project: Path
):
    claude.before("u1", "Bash", command="rm mine.txt; sleep 60")
    (project / "mine.txt").unlink()
    claude.turn = "p2"
    claude.before("u2", "Bash", command="make")
    claude.after("u2", "Bash", command="make")
    (project / "a.txt").write_text("edited by the person\n")
    claude.before("u3", "Bash", command="make")
    claude.after("u3", "Bash", command="make")
    claude.tell("Stop")

    assert [files for _, _, files in calls(project)] == [["mine.txt"], [], []]


def test_tools_of_one_turn_may_run_at_the_same_time(claude: Claude, project: Path):
    claude.before("u1", "Bash", command="slow")
    claude.before("u2", "Bash", command="quick")
    (project / "b.txt").write_text("either\n")
    claude.after("u2", "Bash", "quick", command="quick")
    (project / "c.txt").write_text("slow\n")
    claude.after("u1", "Bash", "slow", command="slow")

    assert calls(project) == [
        ("bash", "committed", ["b.txt"]),
        ("bash", "committed", ["c.txt"]),
    ]
    assert "slow" in wink("show", "2", cwd=project).stdout


def test_the_end_of_the_main_turn_leaves_tools_of_background_agents_under_way(
    claude: Claude, project: Path
):
    claude.before("u1", "Bash", agent="x", command="sleep 5; rm mine.txt")
    claude.tell("Stop")
    (project / "mine.txt").unlink()
    claude.after("u1", "Bash", agent="x", command="sleep 5; rm mine.txt")
    claude.tell("Stop")

    assert calls(project) == [("bash", "committed", ["mine.txt"])]
    assert wink("undo", "1", cwd=project).returncode == 0
    assert (project / "mine.txt").read_text() == "mine\n"


def test_the_end_of_a_background_agent_adopts_what_its_killed_tool_has_changed(
    claude: Claude, project: Path
):
    claude.before("u1", "Bash", agent="x", command="rm mine.txt; sleep 60")
    (project / "mine.txt").unlink()
    claude.tell("SubagentStop", agent_id="x")
    (project / "a.txt").write_text("edited by the person\n")
    claude.tell("Stop")

    assert calls(project) == [("bash", "committed", ["mine.txt"])]


def test_a_sub_agent_in_the_background_that_no_hook_hears_of_is_recorded_until_the_turn_ends(
    project: Path,
):
    def tell(event: str, **more: Any) -> None:
        told = {"event": event, "session_id": "s1", "working_dir": str(project), **more}
        done = wink("hook", "run", "goose", cwd=project, stdin=json.dumps(told))
        assert (done.returncode, done.stderr) == (0, "")

    task = {"tool_name": "delegate", "tool_input": {"instructions": "-", "async": True}}
    tell("PreToolUse", **task)
    tell("PostToolUse", **task, tool_output="it works in the background")
    (project / "mine.txt").unlink()
    tell("Stop")

    assert calls(project) == [("delegate", "committed", ["mine.txt"])]


def test_what_a_sub_agent_with_a_session_of_its_own_does_is_in_the_agent_s_run(project: Path):
    def tell(event: str, *, is_sub: bool = False, **more: Any) -> None:
        told = {"hook_event_name": event, "cwd": str(project), "session_id": "main", **more}
        if is_sub:
            told |= {"session_id": "sub", "agent_id": "sub", "parent_agent_id": "main"}
        done = wink("hook", "run", "copilot", cwd=project, stdin=json.dumps(told))
        assert (done.returncode, done.stderr) == (0, "")

    task = {"tool_name": "Agent", "tool_input": {"prompt": "clean up"}}
    shell = {"tool_name": "Bash", "tool_input": {"command": "rm mine.txt"}}
    tell("UserPromptSubmit", prompt="have it cleaned up")
    tell("PreToolUse", **task)
    tell("UserPromptSubmit", is_sub=True, prompt="clean up")
    tell("PreToolUse", is_sub=True, **shell)
    (project / "mine.txt").unlink()
    tell("PostToolUse", is_sub=True, **shell)
    tell("Stop", is_sub=True)
    tell("PostToolUse", **task)

    assert calls(project) == [("bash", "committed", ["mine.txt"])]
    assert "Copilot CLI: have it cleaned up" in wink("log", cwd=project).stdout.splitlines()[0]


# What WINK itself changes while a tool runs


def removed(claude: Claude, project: Path) -> None:
    """Let a tool delete a directory."""
    source = project / "src"
    (source / "deep").mkdir(parents=True)
    for name in ("a.py", "b.py", "deep/c.py"):
        (source / name).write_text(f"{name}\n")
    claude.before("u1", "Bash", command="rm -r src")
    shutil.rmtree(source)
    claude.after("u1", "Bash", command="rm -r src")


@pytest.mark.parametrize("how", ["undo", "rewind"])
def test_what_wink_restores_while_a_tool_runs_is_not_the_tool_s(
    claude: Claude, project: Path, how: str
):
    removed(claude, project)
    claude.before("u2", "Bash", command="wink undo 1; make")
    command = ("undo", "1") if how == "undo" else ("rewind", "--before", "1", "--files-only")
    assert wink(*command, cwd=project).returncode == 0
    (project / "src" / "built.o").write_text("by make\n")
    (project / "src" / "b.py").write_text("by make\n")
    claude.after("u2", "Bash", command="wink undo 1; make")

    made = next(each for each in reversed(calls(project)) if each[0] == "bash")
    assert made == ("bash", "committed", ["src/b.py", "src/built.o"])
    number = "2" if how == "undo" else "3"
    undone = wink("undo", number, cwd=project)
    assert undone.returncode == 0, undone.stderr
    assert sorted(os.listdir(project / "src")) == ["a.py", "b.py", "deep"]
    assert (project / "src" / "b.py").read_text() == "b.py\n"
    assert (project / "src" / "deep" / "c.py").read_text() == "deep/c.py\n"


def test_an_undo_by_a_tool_that_changes_nothing_else_leaves_its_call_without_files(
    claude: Claude, project: Path
):
    removed(claude, project)
    claude.before("u2", "Bash", command="wink undo 1")
    assert wink("undo", "1", cwd=project).returncode == 0
    claude.after("u2", "Bash", command="wink undo 1")
    claude.tell("Stop")

    assert [each[2] for each in calls(project) if each[0] == "bash"][1] == []
    assert "nothing to undo" in wink("undo", "2", cwd=project).stderr
    assert (project / "src" / "deep" / "c.py").exists()


@pytest.mark.parametrize("is_merged", [True, False])
def test_what_a_call_commits_while_a_tool_runs_is_recorded_once(
    claude: Claude, project: Path, is_merged: bool
):
    claude.before("u1", "Bash", command="make")
    (project / "made.txt").write_text("by make\n")
    with HostFilesystem(project, shared=True) as files:
        call = ToolCall("write_file", {}, "beside")
        if is_merged:
            branch = files.branch("side")
            branch.write("a.txt", "ours\n")
            branch.write("new/ours.txt", "ours\n")
            branch.merge_into(files)
            branch.close()
        else:
            with files.gate:
                view = files.fork_in_place()
                view.call = call
                view.write("a.txt", "ours\n")
                view.write("new/ours.txt", "ours\n")
                files.merge(view)
    (project / "new" / "theirs.txt").write_text("by make\n")
    claude.after("u1", "Bash", command="make")

    assert calls(project)[-1] == ("bash", "committed", ["made.txt", "new/theirs.txt"])
    assert wink("undo", "1", cwd=project).returncode == 0
    assert (project / "a.txt").read_text() == "ours\n"
    assert sorted(os.listdir(project / "new")) == ["ours.txt"]
    assert not (project / "made.txt").exists()


def test_what_a_process_committed_that_was_killed_right_after_is_not_the_tool_s(
    claude: Claude, project: Path
):
    claude.before("u1", "Bash", command="make")
    note = location_of(project) / "scan" / "noted"
    note.rename(note.with_name("kept"))  # so that it does not take its changes out
    with HostFilesystem(project, shared=True) as files:
        files.write("a.txt", "ours\n")
    note.with_name("kept").rename(note)
    (project / "b.txt").write_text("by make\n")
    claude.after("u1", "Bash", command="make")

    assert calls(project)[-1] == ("bash", "committed", ["b.txt"])


def test_a_call_that_looks_for_changes_itself_loses_none_of_a_tool_that_runs(
    claude: Claude, project: Path
):
    claude.before("u1", "Bash", command="make")
    (project / "a.txt").write_text("by make\n")
    with HostFilesystem(project, shared=True) as files, files.gate:
        view = files.fork_in_place()
        view.call = ToolCall("other", {}, "beside")
        view.expect_external()
        (project / "ours.txt").write_text("ours\n")
        files.merge(view)
    (project / "later.txt").write_text("by make\n")
    claude.after("u1", "Bash", command="make")

    with HostFilesystem(project) as files:
        found = [(call.tool, call.paths) for call in files.history()]
        first = files.history()[0]
        assert found == [("", ("a.txt",)), ("other", ("ours.txt",)), ("bash", ("later.txt",))]
        files.undo(first)
    assert (project / "a.txt").read_text() == "one\n"


def test_what_a_tool_had_changed_before_wink_did_can_still_be_undone(claude: Claude, project: Path):
    claude.before("u1", "Bash", command="make")
    (project / "a.txt").write_text("by make\n")
    with HostFilesystem(project, shared=True) as files:
        files.write("a.txt", "ours\n")
    claude.after("u1", "Bash", command="make")

    assert calls(project)[-1] == ("bash", "committed", ["a.txt"])
    assert wink("undo", "1", cwd=project).returncode == 0
    assert (project / "a.txt").read_text() == "one\n"


def test_of_overlapping_tools_the_first_to_end_has_what_changed_so_far(
    claude: Claude, project: Path
):
    claude.before("u1", "Bash", agent="x", command="slow")
    (project / "a.txt").write_text("x\n")
    claude.before("u2", "Bash", agent="y", command="quick")
    (project / "b.txt").write_text("y\n")
    claude.after("u2", "Bash", command="quick")
    (project / "c.txt").write_text("x\n")
    claude.after("u1", "Bash", command="slow")

    assert calls(project) == [
        ("bash", "committed", ["a.txt", "b.txt"]),
        ("bash", "committed", ["c.txt"]),
    ]


def test_the_rules_of_the_directory_hold(claude: Claude, project: Path):
    (project / ".env").write_text("SECRET=1\n")
    (project / "wink.toml").write_text(
        'ask = ["unstated"]\n[policy]\nprotect = [".env"]\nquota = { "*" = 2 }\n'
    )
    asked = claude.before("u1", "Bash", command="make")
    (project / ".env").write_text("changed\n")
    said = claude.after("u1", "Bash", command="make")

    assert asked["hookSpecificOutput"]["permissionDecision"] == "ask"
    assert said["decision"] == "block"
    assert "protected" in said["reason"]
    assert (project / ".env").read_text() == "SECRET=1\n"
    claude.before("u2", "Write", file_path="b.txt")
    (project / "b.txt").write_text("b\n")
    claude.after("u2", "Write", file_path="b.txt")
    denied = claude.before("u3", "Write", file_path="c.txt")
    assert denied["hookSpecificOutput"]["permissionDecision"] == "deny"
    assert [outcome for _, outcome, _ in calls(project)] == ["denied", "committed", "denied"]


TOOLS = ["Read", "Grep", "WebFetch", "WebSearch", "Bash", "Agent", "TodoWrite", "mcp__x__y", "New"]


@pytest.mark.parametrize("name", TOOLS)
def test_a_rule_that_denies_every_tool_denies_this_one(claude: Claude, project: Path, name: str):
    (project / "wink.toml").write_text('[policy]\ndeny = ["*"]\n')

    said = claude.before("u1", name, file_path="a.txt", url="https://example.com")

    assert said["hookSpecificOutput"]["permissionDecision"] == "deny"
    assert [outcome for _, outcome, _ in calls(project)] == ["denied"]


SPOKEN: dict[str, dict[str, Any]] = {
    "cline": {"hookName": "tool_call", "taskId": "s1", "agent_id": "a"},
    "codex": {},
    "copilot": {},
    "gemini": {"hook_event_name": "BeforeTool"},
    "goose": {"event": "PreToolUse"},
    "opencode": {},
    "pi": {},
    "qwen": {},
}
"""What differs in the words of other agents."""


@pytest.mark.parametrize("agent", SPOKEN)
def test_a_rule_that_denies_every_tool_denies_all_of_every_agent(project: Path, agent: str):
    (project / "wink.toml").write_text('[policy]\ndeny = ["*"]\n')
    adapter = ADAPTERS[agent]
    each_kind = [adapter.editing, adapter.reading, adapter.not_calls, adapter.others, {"mcp__x__y"}]
    for name in [min(tools) for tools in each_kind if tools]:
        told = {"session_id": "s1", "hook_event_name": "PreToolUse", "cwd": str(project)}
        told |= {"tool_name": name, "tool_call": {"name": name, "id": "u1", "input": {}}}
        told |= {"workspaceRoots": [str(project)], "working_dir": str(project)}
        done = wink("hook", "run", agent, cwd=project, stdin=json.dumps(told | SPOKEN[agent]))
        said = json.loads(done.stdout)
        own = said.get("hookSpecificOutput", {})
        denied = [own.get("permissionDecision"), said.get("decision"), said.get("cancel")]
        assert said.get("block") or {"deny", "block", True}.intersection(denied), (name, said)


@pytest.mark.parametrize("spelling", ["WebFetch", "webfetch", "Web*"])
def test_a_rule_may_name_a_tool_as_claude_code_does(claude: Claude, project: Path, spelling: str):
    (project / "wink.toml").write_text(
        f'ask = ["WebSearch"]\n[policy]\ndeny = ["{spelling}"]\nquota = {{ Read = 0 }}\n'
    )
    said = [claude.before(f"u-{name}", name) for name in ("WebFetch", "Read", "Glob")]

    decisions = [each.get("hookSpecificOutput", {}).get("permissionDecision") for each in said]
    assert decisions == ["deny", "deny", None]
    if spelling != "Web*":
        asked = claude.before("u4", "WebSearch")
        assert asked["hookSpecificOutput"]["permissionDecision"] == "ask"


@pytest.mark.parametrize("rule", ["mcp__server__{}", "mcp__*_end", "MCP__SERVER__{}"])
def test_a_rule_holds_for_a_long_name(claude: Claude, project: Path, rule: str):
    """Our own names have 64 characters at most; those of MCP tools can have more."""
    long = f"{'x' * 80}_end"
    (project / "wink.toml").write_text(f'[policy]\ndeny = ["{rule.format(long)}"]\n')

    said = [claude.before("u1", f"mcp__server__{each}") for each in (long, f"{long}ing")]

    decisions = [each.get("hookSpecificOutput", {}).get("permissionDecision") for each in said]
    assert decisions == ["deny", None]


@pytest.mark.parametrize(
    "rule", ['deny = ["WebFech"]', "quota = { Webfetsh = 1 }", 'after = { Bash = ["Raed"] }']
)
def test_a_rule_that_names_almost_a_tool_denies_all(claude: Claude, project: Path, rule: str):
    (project / "wink.toml").write_text(f"[policy]\n{rule}\n")

    said = claude.before("u1", "Glob")["hookSpecificOutput"]

    assert said["permissionDecision"] == "deny"
    assert "the rule would never apply; did you mean" in said["permissionDecisionReason"]


def test_without_rules_reading_waits_for_nobody(claude: Claude, project: Path):
    with HostFilesystem(project):
        assert claude.before("u1", "Read", file_path="a.txt") == {}


def test_a_damaged_note_attributes_nothing(claude: Claude, project: Path, state: Path):
    claude.before("u1", "Bash", command="make")
    [note] = (state / "wink" / "hooks").glob("*/uses.json")
    note.write_text("{")
    (project / "a.txt").write_text("two\n")
    claude.after("u1", "Bash", command="make")

    assert calls(project) == [("bash", "ok", [])]
    assert (project / "a.txt").read_text() == "two\n"


def test_inside_wink_exec_the_hooks_leave_it_at_one_call(project: Path):
    told = {"session_id": "s1", "hook_event_name": "PreToolUse", "tool_name": "Bash"}
    hook = [*WINK, "hook", "run", "claude", "-w", "."]
    script = f"printf '%s' '{json.dumps(told)}' | {' '.join(hook)} > said && echo two > a.txt"

    assert wink("exec", "--", "sh", "-c", script, cwd=project).returncode == 0
    assert (project / "said").read_text() == ""
    assert calls(project) == [("exec", "committed", ["a.txt", "said"])]


def test_inside_wink_exec_tools_are_denied_by_name(project: Path):
    (project / "wink.toml").write_text('[policy]\ndeny = ["WebFetch"]\n')
    told = {"session_id": "s1", "hook_event_name": "PreToolUse", "tool_name": "WebFetch"}
    hook = [*WINK, "hook", "run", "claude", "-w", "."]
    script = f"printf '%s' '{json.dumps(told)}' | {' '.join(hook)} > said"

    assert wink("exec", "--", "sh", "-c", script, cwd=project).returncode == 0
    said = json.loads((project / "said").read_text())["hookSpecificOutput"]
    assert said["permissionDecision"] == "deny"


RULES = {
    'ask = ["WebFetch"]': "ask",
    'ask = ["read"]': "ask",
    'ask = ["WebSearch", "unstated"]': None,
    "[policy]\nquota = { WebFetch = 1 }": "deny",
    "[policy]\nquota = { '*' = 9 }": "deny",
    "[policy]\nrate = { WebFetch = '9/minute' }": "deny",
    "[policy]\nafter = { WebFetch = ['Read'] }": "deny",
    "[policy]\nquota = { Read = 1 }": None,
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("where", ["inside wink exec", "in the home directory"])
def test_rules_that_need_no_record_hold_without_one_and_others_deny(
    project: Path, where: str, rules: str
):
    (project / "wink.toml").write_text(f"{rules}\n")
    told = {"session_id": "s1", "hook_event_name": "PreToolUse", "tool_name": "WebFetch"}
    hook = [*WINK, "hook", "run", "claude", "-w", "."]
    script = f"printf '%s' '{json.dumps(told)}' | {' '.join(hook)} > said"

    if where == "inside wink exec":
        assert wink("exec", "--", "sh", "-c", script, cwd=project).returncode == 0
    else:
        env = {**os.environ, "HOME": str(project)}
        subprocess.run(["sh", "-c", script], cwd=project, env=env, check=True)
    said = json.loads((project / "said").read_text() or "{}").get("hookSpecificOutput", {})
    assert said.get("permissionDecision") == RULES[rules]


def test_what_is_no_hook_s_input_is_wrong_use(project: Path):
    done = wink("hook", "run", "claude", cwd=project, stdin="hello")

    assert done.returncode == 2
    assert "wink hook install claude --print" in done.stderr


# The real program


class Program:
    """Runs Claude Code on a project, with our hooks and a scripted model.

    Args:
        turns: What the main agent does, and sub-agents whose task begins with ``SUB``.
    """

    def __init__(
        self, project: Path, home: Path, turns: Sequence[Sequence[ToolCall]], sub: Any = ()
    ) -> None:
        sdk = pytest.importorskip("claude_agent_sdk")
        self._program = Path(sdk.__file__).parent / "_bundled" / "claude"
        if not self._program.exists():
            pytest.skip("this wheel has no program")
        self.project, self._home = project, home
        self._left = {"main": list(turns), "sub": list(sub)}
        self.ends_after: list[Path] = []
        """Pipes to be written before the main agent gets its last answer."""
        home.mkdir(exist_ok=True)
        wink("hook", "install", "claude", cwd=project, env={"CLAUDE_CONFIG_DIR": str(home)})
        self._file = home / "settings.json"
        self.settings = json.loads(self._file.read_text())

    def _turn(self, request: dict[str, Any]) -> ModelTurn:
        first = json.dumps(request["messages"][0])
        left = self._left["sub" if "SUBTASK" in first else "main"]
        if "SUBTASK" not in first and not left and self.ends_after:
            self.ends_after.pop().read_bytes()
        return ModelTurn(tool_calls=tuple(left.pop(0))) if left else ModelTurn(text="Done.")

    @contextmanager
    def started(self, *options: str) -> Generator[subprocess.Popen[str]]:
        with serving(self._turn, keeps_calls=True) as server:
            env = {
                "CLAUDE_CONFIG_DIR": str(self._home),
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_MAX_RETRIES": "0",
                "IS_SANDBOX": "1",  # or it refuses to bypass permissions as root
                **server.environment,
            }
            argv = [self._program, "-p", "Go", "--model", "claude-sonnet-5", *options]
            self._file.write_text(json.dumps(self.settings))
            with subprocess.Popen(
                [*argv, "--permission-mode", "bypassPermissions"],
                cwd=self.project, env=environment(env), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            ) as process:  # fmt: skip
                try:
                    yield process
                finally:
                    process.kill()

    def run(self, *options: str) -> None:
        with self.started(*options) as process:
            said, errors = process.communicate(timeout=300)
        assert said.strip().endswith("Done."), errors


def bash(use: str, command: str) -> ToolCall:
    return ToolCall("Bash", {"command": command, "description": "-"}, use)


@pytest.mark.heavy
def test_the_real_program_is_recorded_tool_by_tool(project: Path, tmp_path: Path):
    place = str(project / "a.txt")
    turns = [
        [ToolCall("Read", {"file_path": place}, "toolu_1")],
        [
            ToolCall("Write", {"file_path": str(project / "d/b.txt"), "content": "b"}, "toolu_2"),
            ToolCall("Bash", {"command": "echo two >> a.txt"}, "toolu_3"),
        ],
        [ToolCall("Bash", {"command": "echo three >> a.txt; exit 3"}, "toolu_4")],
        [ToolCall("Edit", {"file_path": place, "old_string": "one", "new_string": "1"}, "toolu_5")],
    ]
    Program(project, tmp_path, turns).run()

    assert calls(project) == [
        ("read", "ok", []),
        ("write", "committed", ["d/b.txt"]),
        ("bash", "committed", ["a.txt"]),
        ("bash", "committed", ["a.txt"]),
        ("edit", "committed", ["a.txt"]),
    ]
    assert wink("undo", "5", cwd=project).returncode == 0
    assert (project / "a.txt").read_text() == "one\ntwo\nthree\n"
    assert wink("undo", "2", cwd=project).returncode == 0
    assert not (project / "d").exists()


@pytest.mark.heavy
def test_the_real_program_may_undo_its_own_tool(project: Path, tmp_path: Path):
    (project / "src").mkdir()
    (project / "src" / "a.py").write_text("a\n")
    own = shlex.join([*WINK, "undo", "1"])
    turns = [[bash("toolu_1", "rm -r src")], [bash("toolu_2", f"{own}; touch src/b.py")]]
    Program(project, tmp_path, turns).run()

    found = [each for each in calls(project) if each[0] == "bash"]
    assert found[1:] == [("bash", "committed", ["src/b.py"])]
    assert wink("undo", "2", cwd=project).returncode == 0
    assert os.listdir(project / "src") == ["a.py"]


@pytest.mark.heavy
def test_a_background_agent_of_the_real_program_is_recorded(project: Path, tmp_path: Path):
    task = {"description": "-", "prompt": "SUBTASK", "subagent_type": "general-purpose"}
    start = [ToolCall("Agent", {**task, "run_in_background": True}, "toolu_1")]
    began, stopped = tmp_path / "began", tmp_path / "stopped"
    os.mkfifo(began)
    os.mkfifo(stopped)
    # The turn of the main agent ends while this tool runs.
    slow = [bash("toolu_2", f"echo > {began}; cat {stopped}; rm mine.txt")]
    program = Program(project, tmp_path / "home", [start], [slow])
    program.ends_after.append(began)
    [matcher] = program.settings["hooks"]["Stop"]
    matcher["hooks"][0]["command"] += f"; test -e {stopped} && echo > {stopped} && rm {stopped}"
    program.run()

    assert calls(project) == [("bash", "committed", ["mine.txt"])]
    assert wink("undo", "1", cwd=project).returncode == 0
    assert (project / "mine.txt").read_text() == "mine\n"


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_a_cancelled_tool_of_the_real_program_has_changed_is_recorded(
    project: Path, tmp_path: Path, number: signal.Signals
):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    slow = bash("toolu_1", f"rm mine.txt; echo > {ready}; sleep 30")
    program = Program(project, tmp_path / "home", [[slow], [bash("toolu_2", "echo > new.txt")]])
    with program.started() as process:
        ready.read_bytes()
        process.send_signal(number)
        process.wait(120)
    program.run("--continue")

    assert calls(project) == [
        ("bash", "committed", ["mine.txt"]),
        ("bash", "committed", ["new.txt"]),
    ]
    assert wink("undo", "1", cwd=project).returncode == 0
    assert (project / "mine.txt").read_text() == "mine\n"


@pytest.mark.heavy
def test_without_wink_the_real_program_runs_no_tool(project: Path, tmp_path: Path):
    program = Program(project, tmp_path, [[bash("toolu_1", "rm mine.txt")]])
    for [matcher] in program.settings["hooks"].values():
        command = matcher["hooks"][0]["command"]
        matcher["hooks"][0]["command"] = re.sub(r"^\S+", "/nowhere/python", command)
    program.run()

    assert (project / "mine.txt").exists()
    assert calls(project) == []
