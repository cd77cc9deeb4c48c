"""How a run is shown, whatever a model or a file brings."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import termios
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.cli.common import summary_of
from weakincentives.cli.view import (
    CallEnded,
    ChangedFile,
    Event,
    JsonView,
    LiveView,
    PlainView,
    RunResult,
    RunStarted,
    Words,
)
from weakincentives.contrib.tools import Plan
from weakincentives.contrib.tools.planning import PlanStep
from weakincentives.core.budget import TokenPrice, TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.core.text import harmless
from weakincentives.errors import ProviderUnavailable
from weakincentives.prompt import ToolResult
from weakincentives.runtime import ToolInvoked
from weakincentives.runtime.conversation import (
    ContextCompacted,
    ModelTurn,
    Retrying,
    SentBack,
    TextDelta,
    ToolProgress,
    ToolStarted,
    TurnEnded,
    TurnStarted,
)

WILD = "\x1b[2Jwiped \x1b]0;title\x07 \x9b31m \u202eevil \r over \x00 caf\xe9 \ud800 \u2028"


def ended(
    outcome: str,
    *,
    tool: str = "edit_file",
    arguments: object = None,
    message: str = "because",
    output: str | None = None,
    seconds: float = 0.25,
    files: tuple[ChangedFile, ...] = (),
) -> CallEnded:
    """Return a call that has ended in this way; one that failed was rolled back."""
    record = ToolInvoked(
        tool_name=tool,
        params=None,
        result=ToolResult(message=message, value=output, success=outcome == "committed"),
        success=outcome == "committed",
        timestamp=0.0,
        duration=seconds,
        call_id="c1",
        denied_by="a policy" if outcome == "denied" else "",
        ran=outcome != "denied",
    )
    rolled_back = outcome == "rolled back"
    return CallEnded(record=record, arguments=arguments, rolled_back=rolled_back, files=files)


def events(text: str) -> list[Event]:
    """Return one event of each kind, with a text in all places where there can be one."""
    files = (ChangedFile(text, 1, 2), ChangedFile("b"))
    steps = (PlanStep(text, "done"), PlanStep(text, "blocked", text))
    arguments = {"path": text, "content": text}
    call = ToolCall(text, arguments, "c1")
    output = f"{text}\n{text}"
    return [
        RunStarted(run="r1", workspace=text, model=text, task=text, notes=(text,)),
        TurnStarted(1, request=None),  # type: ignore[arg-type]  # nobody looks at it
        TextDelta(text),
        Retrying(ProviderUnavailable(text), 1.5),
        TurnEnded(1, ModelTurn(text=text, tool_calls=(call,))),
        ToolStarted(call),
        ToolProgress(call, text, 1, 2),
        ended(
            "rolled back", tool=text, arguments=arguments, message=text, output=output, files=files
        ),
        Plan(objective=text, steps=steps),
        SentBack(text),
        ContextCompacted(
            conversation="c",
            shown=(),
            of_messages=9,
            digest=0,
            shortened=2,
            removed=1,
            summary=text,
            usage=TokenUsage(input_tokens=100, output_tokens=7),
            tokens_before=9000,
            tokens_after=4000,
        ),
        RunResult(run="r1", outcome="failed", text=text, error=text, diff=text, resume=text),
    ]


def acts_on_a_terminal(text: str) -> list[str]:
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def test_nothing_that_acts_on_a_terminal_is_let_through():
    assert harmless("plain caf\xe9") == "plain caf\xe9"
    assert harmless("\x1b[2Ja\nb") == "\\x1b[2Ja b"
    assert harmless("a\nb\x07", lines=True) == "a\nb\\x07"
    assert harmless("\u202eevil\x9b\ud800") == "\\u202eevil\\x9b\\ud800"


@given(st.text(st.characters()))
def test_whatever_a_text_holds_it_is_harmless_on_one_line(text: str):
    assert acts_on_a_terminal(harmless(text)) == []
    assert set(acts_on_a_terminal(harmless(text, lines=True))) <= {"\n"}


@pytest.mark.parametrize("is_utf8", [True, False])
def test_no_event_can_bring_anything_else_into_plain_lines(
    monkeypatch: pytest.MonkeyPatch, is_utf8: bool
):
    monkeypatch.setenv("LC_ALL", "C.UTF-8" if is_utf8 else "C")
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    view = PlainView(out, out)

    for event in events(WILD):
        view.show(event)

    written = out.buffer.getvalue().decode()  # type: ignore[attr-defined]  # it is a BytesIO
    assert set(acts_on_a_terminal(written)) == {"\n"}
    assert "\\x1b[2Jwiped" in written
    assert written.isascii() is not is_utf8


def test_no_event_can_bring_anything_else_onto_a_live_screen(monkeypatch: pytest.MonkeyPatch):
    """What is there of escape sequences is what the view itself says: colours and cursor."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    view = LiveView(out)

    for event in events(WILD):
        view.show(event)
    view.close()

    written = out.getvalue()
    assert "\\x1b[2Jwiped" in written
    assert "\x1b[2J" not in written
    assert not {"\x07", "\x9b", "\u202e", "\x00", "\u2028"}.intersection(written)


def test_json_is_one_object_a_line_and_ascii():
    out = io.StringIO()
    view = JsonView(out)

    for event in events(WILD):
        view.show(event)

    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert out.getvalue().isascii()
    assert [line["type"] for line in lines] == [
        "run_started",
        "turn_started",
        "retrying",
        "turn_ended",
        "tool_started",
        "tool_progress",
        "tool_ended",
        "plan",
        "sent_back",
        "context_compacted",
        "result",
    ]
    assert lines[6]["files"][0] == {"path": WILD, "added": 1, "removed": 2, "ignored": False}
    assert lines[6]["message"] == WILD


def test_arguments_that_are_no_json_are_shown_all_the_same():
    out = io.StringIO()

    JsonView(out).show(ToolStarted(ToolCall("t", {"value": {1, 2}})))

    assert json.loads(out.getvalue())["arguments"] == {"value": "{1, 2}"}


@pytest.mark.parametrize(
    ("outcome", "rolled_back", "sign", "plain"),
    [
        ("committed", False, "✓", "ok"),
        ("rolled back", True, "✗", "failed"),
        ("denied", False, "⊘", "denied"),
    ],
)
def test_the_outcome_of_a_call_is_told_by_a_sign_or_a_word(
    outcome: str, rolled_back: bool, sign: str, plain: str
):
    event = ended(outcome, arguments={"path": "a.py"}, files=(ChangedFile("a.py", 2, 1),))
    mark = " rolled back" if rolled_back else ""
    word = " denied" if outcome == "denied" else mark

    assert Words(True).lines(event)[0].plain == f"{sign} edit_file{word} a.py +2 -1 0.2s"
    assert Words(False).lines(event)[0].plain == f"{plain} edit_file{mark} a.py +2 -1 0.2s"
    told = [line.plain for line in Words(True).lines(event)[1:]]
    assert told == ([] if outcome == "committed" else ["  because"])


def test_the_end_of_a_run_lists_files_and_counts_the_rest():
    many = {f"f{n:02}.py": ChangedFile(f"f{n:02}.py", n, 1) for n in range(12)}
    many |= {f"__pycache__/{n}": ChangedFile(f"__pycache__/{n}", ignored=True) for n in range(214)}
    result = RunResult(outcome="done", turns=1, files=many)

    head, *lines = [line.plain for line in Words(True).lines(result)]

    assert "12 files changed" in head
    assert lines[:2] == ["  f00.py -1", "  f01.py +1 -1"]
    assert lines[10:] == ["  and 2 more files", "  + 214 ignored files"]
    call = ended("committed", arguments={}, files=tuple(many.values()))
    assert "f02.py +2 -1 and 9 more files + 214 ignored files" in Words(True).lines(call)[0].plain


def test_of_a_failed_command_the_last_line_is_told():
    event = ended(
        "rolled back",
        tool="shell_execute",
        arguments={"command": ["make", "test"]},
        message="The command ended with exit code 2.",
        output="...\nE   assert 1 == 2\nFAILED (failures=1)\n",
        seconds=61.0,
    )

    assert [line.plain for line in Words(True).lines(event)] == [
        "✗ shell_execute rolled back make test 1m01s",
        "  The command ended with exit code 2.",
        "  FAILED (failures=1)",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"path": "a.py", "content": "x"}, "a.py"),
        ({"command": "make  all\nmake test"}, "make all make test"),
        ({"source": "a", "destination": "b"}, "a -> b"),
        ({"step": 2, "status": "done"}, "2 done"),
        ({"some": 1, "other": "b"}, "some=1, other='b'"),
        ({"code": "x" * 100}, "x" * 57 + "..."),
        ({}, ""),
        (None, ""),
        ("{not json", "{not json"),
    ],
)
def test_a_call_is_summed_up_by_what_it_is_about(arguments: object, said: str):
    assert summary_of(arguments) == said


def test_a_plan_is_told_as_it_changes():
    out = io.StringIO()
    view = PlainView(out, out)
    steps = [PlanStep(f"step {n}") for n in range(1, 4)]

    view.show(Plan(objective="o", steps=steps))
    steps[0] = PlanStep("step 1", "done")
    view.show(Plan(objective="o", steps=steps))

    assert out.getvalue().splitlines()[-2:] == ["plan: 1 of 3 done", "  [x] 1. step 1"]
    assert out.getvalue().count("step 2") == 1


def test_the_price_is_told_only_where_it_is_known():
    known = RunResult(run="r", outcome="done", input_tokens=1000, output_tokens=234, cost_usd=0.5)
    unknown = RunResult(run="r", outcome="done", input_tokens=1000, output_tokens=234)

    assert "1,234 tokens, $0.5000" in Words(True).lines(known)[0].plain
    assert "$" not in Words(True).lines(unknown)[0].plain


def test_a_full_context_window_leaves_a_line_and_counts_as_tokens_and_money():
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    view = PlainView(out, out)
    view.price = TokenPrice(input=10, output=100)
    (event,) = (each for each in events("x") if isinstance(each, ContextCompacted))

    view.show(event)

    written = out.buffer.getvalue().decode()  # type: ignore[attr-defined]  # it is a BytesIO
    assert written == (
        "context compacted: 2 results shortened, 1 message summarized "
        "(about 9,000 tokens became 4,000)\n"
    )
    assert (view.totals.input_tokens, view.totals.output_tokens) == (100, 7)
    assert view.totals.cost_usd == pytest.approx(0.0017)


@pytest.fixture
def slave(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """A terminal that is the standard input."""
    master, slave = pty.openpty()
    with open(slave, "r+b", buffering=0) as raw, io.TextIOWrapper(raw, "utf-8") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        yield terminal
    os.close(master)


def test_ctrl_c_while_the_view_begins_leaves_the_terminal_as_it_was(
    slave: TextIO, monkeypatch: pytest.MonkeyPatch
):
    before = termios.tcgetattr(slave)
    view = LiveView(io.StringIO())
    view.close()
    view.on_line = lambda line: True
    change = termios.tcsetattr

    def interrupted(*change_of: Any) -> None:
        change(*change_of)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("termios.tcsetattr", interrupted)
        with pytest.raises(KeyboardInterrupt):
            view.begin()
    view.close()

    assert termios.tcgetattr(slave) == before


def test_a_question_that_ends_late_does_not_begin_a_second_view(slave: TextIO):
    before = termios.tcgetattr(slave)
    view = LiveView(io.StringIO())
    view.on_line = lambda line: True
    with view.asking():  # in its thread, which notices a little later that the run has ended
        view.close()
        view.begin()
    view.close()

    assert termios.tcgetattr(slave) == before
