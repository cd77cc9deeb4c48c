"""`wink hook claude-code`: each tool that Claude Code uses is a call, which can be undone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from terminal import WINK, environment, wink

from messages_server import serving
from weakincentives.adapters import ModelTurn
from weakincentives.call import ToolCall


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

    def tell(self, event: str, **more: Any) -> dict[str, Any]:
        told = {"session_id": "s1", "cwd": str(self.project), "hook_event_name": event, **more}
        done = wink("hook", "claude-code", cwd=self.project, stdin=json.dumps(told))
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout) if done.stdout else {}

    def before(self, use: str, name: str, agent: str = "", **given: str) -> dict[str, Any]:
        more = {"agent_id": agent} if agent else {}
        return self.tell("PreToolUse", tool_name=name, tool_use_id=use, tool_input=given, **more)

    def after(self, use: str, name: str, answer: object = "ok", **given: str) -> dict[str, Any]:
        return self.tell(
            "PostToolUse", tool_name=name, tool_use_id=use, tool_input=given, tool_response=answer
        )


@pytest.fixture
def claude(project: Path) -> Claude:
    return Claude(project)


def calls(project: Path, **env: str) -> list[tuple[str, str, list[str]]]:
    lines = wink("log", "--json", cwd=project, env=env).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    return [(c["tool"], c["outcome"], [f["path"] for f in c["files"]]) for c in found]


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


@pytest.mark.parametrize("is_over", [True, False])
def test_a_tool_without_an_end_leaves_nothing_to_the_next(
    claude: Claude, project: Path, is_over: bool
):
    claude.before("denied", "Bash", command="rm -r /")
    if is_over:
        claude.tell("Stop")
    (project / "mine.txt").write_text("edited by the person\n")
    claude.before("u2", "Bash", command="make")
    (project / "a.txt").write_text("two\n")
    claude.after("u2", "Bash", command="make")

    assert calls(project) == [("bash", "committed", ["a.txt"])]


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


def test_a_damaged_note_in_the_store_attributes_nothing(claude: Claude, project: Path):
    claude.before("u1", "Bash", command="make")
    (project.parent / ".project.wink" / "claude-code.json").write_text("{")
    (project / "a.txt").write_text("two\n")
    claude.after("u1", "Bash", command="make")

    assert calls(project) == [("bash", "ok", [])]
    assert (project / "a.txt").read_text() == "two\n"


def test_inside_wink_exec_the_hooks_leave_it_at_one_call(project: Path):
    told = {"session_id": "s1", "hook_event_name": "PreToolUse", "tool_name": "Bash"}
    hook = [*WINK, "hook", "claude-code", "-w", "."]
    script = f"printf '%s' '{json.dumps(told)}' | {' '.join(hook)} > said && echo two > a.txt"

    assert wink("exec", "--", "sh", "-c", script, cwd=project).returncode == 0
    assert (project / "said").read_text() == ""
    assert calls(project) == [("exec", "committed", ["a.txt", "said"])]


def test_what_is_no_hook_s_input_is_wrong_use(project: Path):
    done = wink("hook", "claude-code", cwd=project, stdin="hello")

    assert done.returncode == 2
    assert "--print-settings" in done.stderr


@pytest.mark.heavy
def test_the_real_program_is_recorded_tool_by_tool(project: Path, tmp_path: Path):
    sdk = pytest.importorskip("claude_agent_sdk")
    program = Path(sdk.__file__).parent / "_bundled" / "claude"
    if not program.exists():
        pytest.skip("this wheel has no program")
    printed = wink("hook", "claude-code", "--print-settings", cwd=project)
    settings = json.loads(printed.stdout)
    for [matcher] in settings["hooks"].values():  # as it is started here
        matcher["hooks"][0]["command"] = " ".join([*WINK, "hook", "claude-code"])
    (project / ".claude").mkdir()
    (project / ".claude" / "settings.json").write_text(json.dumps(settings))
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
    with serving(
        [*(ModelTurn(tool_calls=tuple(calls)) for calls in turns), ModelTurn(text="Done.")],
        keeps_calls=True,
    ) as server:
        env = {
            "CLAUDE_CONFIG_DIR": str(tmp_path),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_RETRIES": "0",
            "IS_SANDBOX": "1",  # or it refuses to bypass permissions as root
            **server.environment,
        }
        argv = [program, "-p", "Go", "--model", "claude-sonnet-5"]
        done = subprocess.run(
            [*argv, "--permission-mode", "bypassPermissions"],
            cwd=project,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.stdout.strip() == "Done.", done.stderr

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
