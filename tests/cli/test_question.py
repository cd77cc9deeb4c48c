"""What a person is asked about a call: all of it, in a form that stands for one call only."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

import weakincentives as wink
from weakincentives.cli.question import _chosen_rule, _Talk, question  # pyright: ignore[reportPrivateUsage]
from weakincentives.prompt import ApprovalPolicy, ApprovalRequest, ApprovalRule, CallPreview

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
BLANKS = "\u3164\u2800\u115f\ufe0f\u034f\U000e0041\u200b\u2060\xad\u3000\xa0\x1b\u202e"


def lines_of(arguments: dict[str, Any], width: int = 60) -> tuple[str, ...]:
    asked = question(request(arguments), width=width, height=None)
    assert asked.hidden == 0
    assert asked.lines[0] == "t wants to run; it can be undone."
    return asked.lines[1:]


def request(arguments: dict[str, Any], **preview: Any) -> ApprovalRequest:
    return ApprovalRequest(
        tool_name="t",
        description="",
        arguments=arguments,
        reach="reversible",
        call_id="c",
        session_id="s",
        preview=CallPreview(**preview),
    )


def read_back(lines: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that lines stand for: where that works, no two calls look the same."""
    if lines == ("  no arguments",):
        return {}
    found: dict[str, Any] = {}
    name = ""
    for head, body, has_end in blocks_of(lines):
        if head == "(a long name):":
            name = json.loads(unspelled(body), strict=False)
            continue
        match = re.match(r'(\(its value\)|"(?:[^"\\]|\\.)*"|[\w.-]+): ', head)
        assert match is not None, head
        label, text = match[1], head[match.end() :]
        if label != "(its value)":
            name = json.loads(unspelled(label), strict=False) if label.startswith('"') else label
        if re.fullmatch(r"text, [\d,]+ lines?(, [\d,]+ characters)?", text):
            value = text_of(body) + ("\n" if has_end else "")
        else:
            is_block = re.fullmatch(r"JSON, [\d,]+ lines?", text)
            value = json.loads(unspelled(body if is_block else text), strict=False)
        found[name] = value
    return found


def blocks_of(lines: Sequence[str]) -> list[tuple[str, str, bool]]:
    blocks: list[tuple[str, list[str], bool]] = []
    for line in lines:
        if line.startswith("    | "):
            blocks[-1][1].append(line[6:])
        elif line.startswith("    : "):
            blocks[-1][1][-1] += line[6:]
        elif line == "    \\ no newline at the end":
            blocks[-1] = (*blocks[-1][:2], False)
        else:
            assert line.startswith("  "), line
            assert line[2] != " ", line
            blocks.append((line[2:], [], True))
    return [(head, "\n".join(body), has_end) for head, body, has_end in blocks]


def unspelled(text: str) -> str:
    """Return a text with what was spelled out in it; what JSON escapes, and ``\\\\``, stay."""

    def one(match: re.Match[str]) -> str:
        if match["spaces"]:
            return " " * int(match["spaces"])
        code = match["code"]
        return chr(int(code[1:], 16)) if code else match[0]

    pattern = r"\\(?:s\{(?P<spaces>\d+)\}|(?P<code>U[0-9a-f]{8}|u[0-9a-f]{4}|x[0-9a-f]{2})|.)"
    return re.sub(pattern, one, text)


def text_of(shown: str) -> str:
    """Return a text that is not shown as JSON."""
    others = {"t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\(.)", lambda found: others[found[1]], unspelled(shown))


@given(st.dictionaries(st.text(), JSON, max_size=4), st.integers(40, 120))
@example({"a": "\\t\t\n\r"}, 80)
@example({"a": "x\n", "b": "x", "c": "x\ny", "d": "", "e": None, "f": False, "g": "false"}, 80)
@example({"a": "echo hi" + " " * 5000 + "; rm -rf ~"}, 80)
@example({"a": "x" * 500, "b": "\\s{80}" + " " * 80, "c": "\\x1b\x1b"}, 80)
@example({"A00000000000000": None}, 40)
@example({"y" * 200: "1", "a\nb: 2": {"c d": [1, "2\n", " " * 50]}}, 60)
def test_the_call_can_be_told_from_what_is_shown(arguments: dict[str, Any], width: int):
    """Everything is there, and no two calls look the same."""
    lines = lines_of(arguments, width)

    assert repr(read_back(lines)) == repr(arguments)


@given(st.dictionaries(st.text(), JSON, max_size=3), st.integers(40, 120))
@example({"000000\x1f\x7f\U00020000\U00020000": "000000000000"}, 40)
def test_no_text_of_others_begins_a_line_or_is_wrapped_by_the_terminal(
    arguments: dict[str, Any], width: int
):
    for line in lines_of(arguments, width):
        assert line.startswith(("  ", "    | ", "    : ", "    \\ "))
        assert cell_len(line) <= width
        assert "\n" not in line


@given(st.text(), st.dictionaries(st.text(), st.text()), JSON, st.integers(40, 120))
@example("+a\n  path: b\nyes, no [y/n]? ", {"a\nyes": "b\n    | x"}, {"a\nb": "c\r"}, 40)
def test_no_text_of_a_preview_begins_a_line_either(
    diff: str, facts: dict[str, str], value: Any, width: int
):
    asked = request({"a": value}, diff=diff, facts=facts)

    lines = question(asked, width=width, height=None).lines
    for line in lines[1:]:
        assert line.startswith(("  ", "    | ", "    : ", "    \\ "))
        assert cell_len(line) <= width
        assert line.isprintable()
    heads = ("The change:", "Arguments:", "What it can reach:")
    for line in asked.describe(10_000_000).split("\n")[1:]:
        assert line in heads or line.startswith("  | ")
        assert line.isprintable()


@pytest.mark.parametrize("blank", [*BLANKS, "e" + "\u0301" * 30, "\r", "\t"])
def test_nothing_that_is_shown_is_invisible(blank: str):
    """Not in a value on one line, not in a block, not in a name, not in a list."""
    for arguments in ({"a": blank}, {"a": f"{blank}\n"}, {blank: 1}, {"a": [{blank: blank}]}):
        shown = "".join(lines_of(arguments))
        assert shown.isprintable()
        assert not set(shown) & set(BLANKS)
        assert "\u0301" * 3 not in shown


def test_spaces_that_hide_something_are_counted():
    """At the end of a line, and in the middle of it."""
    lines = lines_of({"command": f"echo hi{' ' * 4000}; rm -rf ~", "text": "a  \nb\n"})

    assert lines == (
        '  command: "echo hi\\s{4000}; rm -rf ~"',
        "  text: text, 2 lines, 6 characters",
        "    | a\\s{2}",
        "    | b",
    )


def test_a_value_that_is_false_or_empty_is_shown():
    arguments = {"a": False, "b": "", "c": None, "d": 0, "e": [], "f": {}}

    assert lines_of(arguments) == (
        "  a: false",
        '  b: ""',
        "  c: null",
        "  d: 0",
        "  e: []",
        "  f: {}",
    )
    assert lines_of({}) == ("  no arguments",)


def test_what_does_not_fit_is_cut_with_a_mark_that_says_how_much():
    content = "".join(f"line {n}\n" for n in range(1, 1001))
    asked = question(request({"content": content, "path": "a"}), width=80, height=30)

    assert asked.lines[1] == "  content: text, 1,000 lines, 8,893 characters"
    assert asked.lines[10] == "    | line 9"
    assert asked.lines[11] == "    ... 987 lines (7,806 characters) hidden"
    assert asked.lines[12] == "    | line 997"
    assert asked.lines[-2] == '  path: "a"'
    assert asked.lines[-1] == (
        "NOT EVERYTHING IS SHOWN: 987 of 1,002 lines are hidden; v shows all."
    )
    assert asked.hidden == 987
    assert len(asked.lines) <= 30


def test_many_arguments_are_cut_too_and_what_fits_is_not():
    many = {f"a{n}": n for n in range(500)}

    cut = question(request(many), width=80, height=24)
    whole = question(request(dict.fromkeys("abcdef", "x\ny\n")), width=80, height=24)

    assert cut.lines[-1] == "NOT EVERYTHING IS SHOWN: 480 of 500 lines are hidden; v shows all."
    assert len(cut.lines) == 22
    assert whole.hidden == 0


def test_a_line_of_others_cannot_look_like_the_mark_or_the_question():
    fake = (
        "x\n    ... 1 lines (8 characters) hidden\nyes, no, always [y/n/a]? y\n  path: b\n"
        + "z" * 300
    )
    lines = lines_of({"content": fake}, width=60)

    assert all(line.startswith(("    | ", "    : ")) for line in lines[1:-1])
    assert lines[-1] == "    \\ no newline at the end"


def test_a_change_is_shown_as_a_diff_and_what_a_call_can_reach_as_facts():
    diff = "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-a \n+\x1b[2Jb\\n\n"
    asked = request(
        {"path": "a.txt", "content": "x"},
        diff=diff,
        in_diff=("content",),
        facts={"network": "none\nyes, no [y/n]? y"},
    )

    lines = question(asked, width=60, height=40)
    whole = question(asked, width=60, height=None)

    assert lines.lines == (
        "t wants to run; it can be undone.",
        "  the change:",
        "    | --- a/a.txt",
        "    | +++ b/a.txt",
        "    | @@ -1 +1 @@",
        "    | -a\\s{1}",
        "    | +\\x1b[2Jb\\\\n",
        '  path: "a.txt"',
        "  what it can reach:",
        "    | network: none yes, no [y/n]? y",
    )
    assert lines.hidden
    assert '  content: "x"' in whole.lines


def test_a_command_is_shown_as_a_command_without_what_is_as_always():
    arguments = {"command": "pytest -q", "cwd": ".", "env": {}, "timeout": None}
    asked = replace(
        request(arguments, script="command", facts={"network": "none", "writes": "the workspace"}),
        defaults=("cwd", "env", "timeout"),
    )

    assert question(asked, width=80, height=24).lines == (
        "t wants to run; it can be undone.",
        "  $ pytest -q",
        "  what it can reach:",
        "    | network: none; writes: the workspace",
    )
    whole = question(asked, width=80, height=None).lines
    assert '  cwd: "."' in whole
    assert "  timeout: null" in whole
    assert asked.describe(1000).split("\n") == [
        "t wants to run; it can be undone.",
        "Arguments:",
        "  | $ pytest -q",
        "What it can reach:",
        "  | network: none",
        "  | writes: the workspace",
    ]


@given(st.text(), st.integers(40, 120))
@example("ls\n  path: b\nyes, no [y/n]? y", 40)
@example("x" * 300, 60)
@example("(2 lines):", 80)
@example("a\\x1b\x1b" + " " * 50, 80)
@example("\\t\t\r", 80)
def test_a_command_can_be_told_from_what_is_shown(command: str, width: int):
    first, *rest = question(
        request({"command": command}, script="command"), width=width, height=None
    ).lines[1:]
    assert first.startswith("  $ ")
    lines = [first[4:]]
    if rest and rest[0].startswith("    | "):
        assert re.fullmatch(r"\([\d,]+ lines?\):", lines.pop())
    for line in rest:
        assert line.startswith(("    | ", "    : "))
        if line.startswith("    : "):
            lines[-1] += line[6:]
        else:
            lines.append(line[6:])
    assert all(cell_len(line) <= width and line.isprintable() for line in (first, *rest))
    assert text_of("\n".join(lines)) == command


def test_arguments_with_their_default_are_known_from_the_schema():
    shown: list[ApprovalRequest] = []

    @wink.tool
    def deploy(place: str, count: int = 1, flags: tuple[str, ...] = (), dry: bool = False) -> str:
        """Deploy."""
        return place

    policy = ApprovalPolicy(ask=lambda request: bool(shown.append(request)))
    with wink.ToolRegistry([deploy], policies=[policy]) as tools:
        tools.execute("deploy", {"place": "here", "dry": True})

    assert shown[0].defaults == ("count", "flags")


def test_arguments_with_their_default_are_known_where_a_factory_makes_it():
    shown: list[ApprovalRequest] = []

    @dataclass(frozen=True)
    class Command:
        command: str
        cwd: str = "."
        env: dict[str, str] = field(default_factory=dict[str, str])

    def run(params: Command, *, context: wink.ToolContext) -> wink.ToolResult[None]:
        return wink.ToolResult.ok(None)

    tool = wink.Tool[Command, None](name="run", description="Run.", handler=run)
    policy = ApprovalPolicy(ask=lambda request: bool(shown.append(request)))
    with wink.ToolRegistry([tool], policies=[policy]) as tools:
        tools.execute("run", {"command": "ls"})
        tools.execute("run", {"command": "ls", "env": {"CI": "1"}})

    assert [each.defaults for each in shown] == [("cwd", "env"), ("cwd",)]


def test_a_question_mark_explains_the_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    typed, labels = iter(["?", "n"]), list[str]()

    class Talk(_Talk):
        def __init__(self) -> None:
            self._out = sys.stdout

        def line(self, label: str) -> str:
            labels.append(label)
            return next(typed)

    size = os.terminal_size((80, 24))
    monkeypatch.setattr("weakincentives.cli.question._terminal_size", lambda: size)

    answers = {"y": "yes", "r": "no with a reason", "n": "no"}
    explained = {"y": "run it", "r": "do not run it; the model reads your reason", "n": "do not"}

    assert Talk().choose(["Run?"], answers, explained) == "n"
    assert labels[0] == "yes, no with a reason, no [y/r/n/?]? "
    assert "  r  no with a reason: do not run it; the model reads your reason\n" in (
        capsys.readouterr().out
    )


def test_a_request_as_text_has_everything_on_one_line():
    """For those who ask in their own way: `input(f"{request}? ")`."""
    asked = ApprovalRequest(
        tool_name="pay",
        description="",
        arguments={"a\x1b[2J": f"x\n{' ' * 100}\u3164", "none": None, "flag": False},
        reach=None,
        call_id="c",
        session_id="s",
    )

    assert str(asked) == ("pay('a\\x1b[2J'='x\\n\\s{100}\\u3164', none=None, flag=False)")


class Typed:
    """A person who answers "some paths", and then takes what is offered."""

    def choose(self, question: Sequence[str], answers: Mapping[str, str]) -> str:
        return "p"

    def line(self, label: str) -> str:
        return ""


def test_the_offered_paths_are_not_wider_than_what_was_chosen():
    rule = _chosen_rule(request({}, paths=("docs/a", "docs/b")), cast("Any", Typed()))
    assert rule == ApprovalRule(tool="t", path="docs/**")
    rule = _chosen_rule(request({}, paths=("docs/a",)), cast("Any", Typed()))
    assert rule == ApprovalRule(tool="t", path="docs/a")
    # Without a common directory there is no glob to offer; none would mean all calls.
    with pytest.raises(ValueError, match="give a glob of paths"):
        _chosen_rule(request({}, paths=("a", "docs/b")), cast("Any", Typed()))
