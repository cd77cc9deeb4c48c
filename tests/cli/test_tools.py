"""`wink tools` and `wink policy check`: nothing is run, and nothing is changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import Wink, approve, make_run, run_open
from test_history import TURNS, project, wink  # noqa: F401  # fixtures

CONFIG = """
suites = ["files", "planning"]
ask = ["delete_file"]

[policy]
protect = ["*.lock"]
deny = ["move_*"]
quota = { write_file = 2 }
use = ["rules.py:Odd"]
"""
RULES = """
class Odd:
    '''Refuses odd names.'''
    name = "odd"

    async def check(self, tool_name, params, context):
        if "odd" in getattr(params, "path", ""):
            return "that name is odd"
        if "boom" in getattr(params, "path", ""):
            raise RuntimeError("no idea")
"""


@pytest.fixture
def configured(project: Path) -> Path:  # noqa: F811
    (project / "wink.toml").write_text(CONFIG)
    (project / "rules.py").write_text(RULES)
    approve(project)
    return project


# tools


def test_the_tools_of_a_directory_are_listed_with_their_reach(wink: Wink, configured: Path):  # noqa: F811
    lines = wink("tools").out.splitlines()

    assert ["read_file", "read"] in [line.split()[:2] for line in lines]
    assert ["edit_file", "reversible"] in [line.split()[:2] for line in lines]
    assert not any(line.startswith("shell_execute") for line in lines)


def test_one_tool_is_shown_in_full(wink: Wink, configured: Path):  # noqa: F811
    shown = wink("tools", "write_file").out

    assert "Policies: read_before_write, protected_paths, quota of write_file" in shown
    assert '"overwrite"' in shown
    assert "Reach: reversible (" in shown


def test_what_servers_say_of_their_tools_cannot_act_on_the_terminal(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
):
    wild = "Wild \x1b[2J\x1b]0;title\x07\u202e\x9b31m\n\u2028end"
    file = project.parent / "wild.py"
    file.write_text(
        "import weakincentives as wink\n"
        f"wild = {wild!r}\n"
        "schema = {'type': 'object', 'properties': {wild: {'description': wild}}}\n"
        "class Rule:\n"
        "    def check(self, tool_name, params, context):\n"
        "        return f'no {wild}' if tool_name == 'wild' else None\n"
        "Rule.__doc__ = wild\n"
        "tool = wink.Tool.from_schema('wild', wild, schema,\n"
        "    lambda params, *, context: wink.ToolResult.ok(None, 'ran'))\n"
    )
    (project / "wink.toml").write_text(
        f'sections = ["{file}:tool"]\n[policy]\nuse = ["{file}:Rule"]\n'
    )
    approve(project)

    for command in (["tools"], ["tools", "wild"], ["policy", "check"]):
        done = wink(*command)
        assert (done.code, done.err) == (0, "")
        assert "Wild \\x1b[2J" in done.out
        assert done.out.replace("\n", "").isprintable()
    done = wink("policy", "check", "wild", "{}")
    assert done.code == 1
    assert done.out.count("\n") == 1
    assert done.out[:-1].isprintable()


def test_tools_for_machines_have_schema_and_policies(wink: Wink, configured: Path):  # noqa: F811
    (line,) = wink("tools", "delete_file", "--json").out.splitlines()
    tool = json.loads(line)

    assert tool["parameters"]["required"] == ["path"]
    assert "approval" in tool["policies"]


def test_looking_at_tools_leaves_nothing_behind_and_needs_no_lock(
    wink: Wink,  # noqa: F811
    configured: Path,
):
    assert wink("tools").code == 0
    assert sorted(os.listdir(configured.parent)) == ["project"]

    (configured / "wink.toml").unlink()
    with run_open(configured, ["Done."]):
        assert wink("tools").code == 0
        assert wink("policy", "check").code == 0


# policy check


def checked(wink: Wink, tool: str, *more: str, **arguments: object) -> tuple[int, str]:  # noqa: F811
    done = wink("policy", "check", tool, json.dumps(arguments), *more)
    assert done.err == ""
    return done.code, done.out.strip()


def test_a_call_is_admitted_or_denied_with_the_reason(wink: Wink, configured: Path):  # noqa: F811
    assert checked(wink, "write_file", path="a.txt", content="") == (0, "write_file is allowed.")
    code, said = checked(wink, "write_file", path="a.lock", content="")
    assert code == 1
    assert said.startswith("write_file is denied by protected_paths: Cannot change a.lock")
    assert checked(wink, "move_file", source="a", destination="b")[1].startswith(
        "move_file is denied by deny: "
    )
    code, said = checked(wink, "write_file", path="notes.txt", content="", overwrite=True)
    assert (code, said.split(":")[0]) == (1, "write_file is denied by read_before_write")
    assert (configured / "notes.txt").read_text() == "hello\n"
    assert not (configured / "a.txt").exists()


def test_policies_of_ones_own_are_asked_and_fail_closed(wink: Wink, configured: Path):  # noqa: F811
    assert checked(wink, "read_file", path="odd") == (
        1, "read_file is denied by odd: that name is odd"
    )  # fmt: skip
    code, said = checked(wink, "read_file", path="boom")
    assert code == 1
    assert "could not decide and denies the call: RuntimeError('no idea')" in said


def test_nobody_is_asked_for_approval_but_that_they_would_be_is_said(
    wink: Wink,  # noqa: F811
    configured: Path,
):
    code, said = checked(wink, "delete_file", path="notes.txt")

    assert (code, said) == (
        0, "approval: needs approval\ndelete_file is allowed."
    )  # fmt: skip


def test_what_a_run_has_read_counts_for_it(wink: Wink, project: Path):  # noqa: F811
    run = make_run(project, [TURNS[0], "Done."])
    edit = {"path": "src/calc.py", "old_string": "-", "new_string": "+"}

    assert checked(wink, "edit_file", **edit)[0] == 1
    assert checked(wink, "edit_file", "--run", run.mark, **edit)[0] == 0


def test_one_more_rule_can_be_tried(wink: Wink, project: Path):  # noqa: F811
    arguments = {"path": "src/new.py", "content": ""}

    assert checked(wink, "write_file", **arguments)[0] == 0
    assert checked(wink, "write_file", "--policy", "protect=src", **arguments)[0] == 1


def test_without_a_tool_the_policies_in_force_are_listed(wink: Wink, configured: Path):  # noqa: F811
    shown = wink("policy", "check").out

    assert "wink.toml: valid" in shown
    assert "odd: Refuses odd names.\n  applies to all tools" in shown
    assert "quota of write_file: " in shown
    assert "  applies to write_file\n" in shown


def test_rules_that_approve_calls_are_listed(wink: Wink, configured: Path):  # noqa: F811
    rule = 'ask = ["write_file"]\n[[approve]]\ntool = "write_file"\npath = "docs/**"\n'
    (configured / "wink.toml").write_text(rule)
    approve(configured)

    shown = wink("policy", "check").out

    assert "  applies to write_file\n  approves without asking: write_file docs/**\n" in shown


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["tools", "edit_fil"], "did you mean edit_file?"),
        (["policy", "check", "edit_fil"], "did you mean edit_file?"),
        (["policy", "check", "read_file", "{"], "the arguments are not JSON"),
        (["policy", "check", "read_file", "[" * 100_000], "the arguments are not JSON"),
        (["policy", "check", "read_file", '{"path": 1}'], "Expected type string"),
        (["policy", "check", "read_file", "{}", "--run", "zzz"], "no run 'zzz'"),
        (["policy", "check", "--policy", "protct=x"], "did you mean policy.protect?"),
        (["tools", "-w", "nosuch"], "cannot open the directory nosuch"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(
    wink: Wink,  # noqa: F811
    command: list[str],
    said: str,
):
    done = wink(*command)

    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_a_wrong_configuration_is_told_by_the_check(wink: Wink, project: Path):  # noqa: F811
    (project / "wink.toml").write_text('[policy]\ndeny = ["nosuch_tool"]\n')

    done = wink("policy", "check")

    assert (done.code, done.out) == (2, "")
    assert "unknown tool 'nosuch_tool'" in done.err
