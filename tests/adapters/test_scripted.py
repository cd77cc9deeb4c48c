"""The scripted model: turns from Python or from a file, and what is wrong with a file."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weakincentives import MarkdownSection, Prompt, PromptTemplate, Session, ToolContext, tool
from weakincentives.adapters import ModelRequest, RunConfig, ScriptedAdapter, TextDelta, calls, says
from weakincentives.core.budget import TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.errors import MissingExtra, ProviderRejected, ProviderUnavailable
from weakincentives.retry import RetryPolicies


@tool
def add(left: int, right: int) -> str:
    """Add two numbers."""
    return str(left + right)


def prompt() -> Prompt[Any]:
    return Prompt(PromptTemplate(sections=[MarkdownSection(title="Sums", tools=[add])]))


# Turns in Python


def test_a_turn_is_a_text_or_calls_or_an_error_to_raise():
    adapter = ScriptedAdapter(
        [calls(("add", {"left": 1, "right": 2}), text="Well,"), ProviderUnavailable("busy"), "3"]
    )

    session = Session()
    with pytest.raises(ProviderUnavailable, match="busy"):
        adapter.evaluate(prompt(), session, config=RunConfig(retry=RetryPolicies.NONE))
    assert adapter.evaluate(prompt(), session, resume=True).text == "3"


def test_a_turn_may_be_made_from_what_was_asked():
    def repeat(request: ModelRequest) -> str:
        return f"You said: {request.messages[-1].text}"

    adapter = ScriptedAdapter([calls(("add", {"left": 1, "right": 2})), repeat])

    assert adapter.evaluate(prompt(), Session()).text == "You said: 3"
    assert adapter.last_request is not None
    assert [t.name for t in adapter.last_request.prompt.tools] == ["add"]


def test_turns_may_come_from_a_generator_that_looks_at_the_state():
    session = Session()

    @tool
    def note(text: str, *, context: ToolContext) -> str:
        """Keep a note."""
        context.session.dispatch(text)
        return "ok"

    def play() -> Any:
        while len(session[str]) < 3:
            yield calls(("note", {"text": "again"}))
        yield "Three."

    section = MarkdownSection(title="Notes", tools=[note])
    response = ScriptedAdapter(play()).evaluate(Prompt(PromptTemplate(sections=[section])), session)

    assert (response.text, response.calls) == ("Three.", 3)


def test_a_call_is_a_name_or_a_name_with_parameters_or_a_tool_call():
    made = calls("list", ("add", {"left": 1}), ToolCall("add", '{"left"', "id-7")).tool_calls

    assert [(call.name, call.params) for call in made] == [
        ("list", {}),
        ("add", {"left": 1}),
        ("add", '{"left"'),
    ]
    assert made[2].id == "id-7"
    assert len({call.id for call in made}) == 3


def test_text_comes_line_by_line_to_whoever_listens():
    pieces: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, TextDelta):
            pieces.append(event.text)

    ScriptedAdapter(["One.\nTwo.\n\nThree."]).evaluate(prompt(), Session(), on_event=listen)

    assert pieces == ["One.\n", "Two.\n", "\n", "Three."]


def test_a_script_that_is_too_short_says_what_came_last():
    adapter = ScriptedAdapter([calls(("add", {"left": 1, "right": 2}))])

    with pytest.raises(ProviderRejected, match=r"the script has 1 turns.*from the tool: '3'"):
        adapter.evaluate(prompt(), Session())


def test_no_event_loop_is_needed():
    assert not ScriptedAdapter([]).needs_loop


# Turns in files

TURNS = [
    "Hello.",
    {"say": "Let me see.", "call": [{"add": {"left": 1, "right": 2}}, "list", {"clear": None}]},
    {"say": "3", "usage": {"input_tokens": 7, "output_tokens": 1}},
]

YAML = """
- Hello.
- say: Let me see.
  call:
    - add: {left: 1, right: 2}
    - list
    - clear:
- say: "3"
  usage: {input_tokens: 7, output_tokens: 1}
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("turns.json", json.dumps(TURNS)), ("turns.yaml", YAML), ("turns.yml", YAML)],
)
def test_a_script_may_be_a_file(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    adapter, session = ScriptedAdapter.from_file(tmp_path / name), Session()

    assert adapter.evaluate(prompt(), session).text == "Hello."
    step = adapter.step(prompt(), session)
    response = adapter.step(prompt(), session, message="And?")

    assert (step.text, step.stop_reason) == ("Let me see.", "tool_use")
    assert [(call.name, call.params) for call in step.tool_calls] == [
        ("add", {"left": 1, "right": 2}),
        ("list", {}),
        ("clear", {}),
    ]
    assert (response.text, response.stop_reason) == ("3", "end_turn")
    assert response.usage == TokenUsage(input_tokens=7, output_tokens=1)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.json", "[", "a.json: cannot be read: Expecting value"),
        ("a.yaml", "- {", "a.yaml: cannot be read: while parsing"),
        ("a.yaml", "say: Hello.", "a.yaml: a script is a list of turns"),
        ("a.yaml", "", "a.yaml: a script is a list of turns"),
        ("a.yaml", "- Hello.\n- 7", "a.yaml, turn 2: a turn is a text, or has say, call and usage"),
        ("a.yaml", "- tell: Hello.", "tell: Unknown field; expected one of: say, call, usage"),
        ("a.yaml", "- say: 7", "say: Expected type string, got integer 7"),
        ("a.yaml", "- call: add", "call: Expected type array, got string 'add'"),
        ("a.yaml", "- call: {add: {}}", "call: Expected type array, got object"),
        ("a.yaml", "- call: [7]", "call.0: Expected"),
        ("a.yaml", "- call: [{a: {}, b: {}}]", "call.0: Expected a tool's name, or {name: param"),
        ("a.yaml", "- call: [{add: 7}]", "call.0.add: Expected type object, got integer 7"),
        ("a.yaml", "- usage: 7", "usage: Expected type object, got integer 7"),
        ("a.yaml", "- usage: {tokens: 7}", "usage.tokens: Unknown field; expected one of: input_"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_turn_and_what_belongs_there(
    tmp_path: Path, name: str, text: str, problem: str
):
    (tmp_path / name).write_text(text)

    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole text is compared below
        ScriptedAdapter.from_file(tmp_path / name)

    assert problem in str(caught.value)


def test_yaml_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.yaml").write_text("- Hello.")
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(MissingExtra, match="yaml"):
        ScriptedAdapter.from_file(tmp_path / "a.yaml")


def test_says_takes_the_fields_of_a_turn():
    assert says("I will not.", stop_reason="refusal").stop_reason == "refusal"


def test_runs_in_several_threads_may_share_a_script():
    """The second asks while a generator is still at the first's turn."""
    asked, go_on = threading.Event(), threading.Event()

    def turns():
        asked.set()
        go_on.wait(120)
        yield "One."
        yield "Two."

    model, prompt = ScriptedAdapter(turns()), Prompt(PromptTemplate(sections=[]))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(model.evaluate, prompt, Session())
        asked.wait(120)
        second = threads.submit(model.evaluate, prompt, Session())
        with pytest.raises(TimeoutError):
            second.result(0.05)  # it waits for its turn
        go_on.set()

        assert (first.result(120).text, second.result(120).text) == ("One.", "Two.")
