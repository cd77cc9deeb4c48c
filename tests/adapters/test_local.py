"""A real model drives the pipeline. What it decides is its own affair; what comes of it is not.

The first part needs no model: a server on loopback writes what a model could have written.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from wire import Script, WireServer

import weakincentives as wink
from waiting import is_readable
from weakincentives.adapters import (
    LocalAdapter,
    LocalModel,
    Message,
    ModelTurn,
    OpenAIAdapter,
    RunConfig,
    RunEvent,
    TextDelta,
    ToolEnded,
    TurnStarted,
)
from weakincentives.core.clock import FakeClock
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import (
    DeadlineExceededError,
    MissingExtra,
    OutputParseError,
    ProviderRejected,
    ProviderUnavailable,
    TurnLimitExceeded,
)
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import CompletionResult
from weakincentives.retry import RetryPolicies
from weakincentives.runtime import ToolInvoked

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_agent.py"

# The agent: it orders and writes


@dataclass(frozen=True)
class Ordered:
    item: str
    amount: int


@dataclass(frozen=True)
class Report:
    summary: str
    files: tuple[str, ...] = ()


@wink.tool(reach="reversible")
def order(item: Literal["milk", "bread", "eggs"], amount: int, *, context: wink.ToolContext) -> str:
    """Order something for the kitchen."""
    context.filesystem.append("orders.txt", f"{item} {amount}\n")
    context.session.dispatch(Ordered(item, amount))
    if amount > 10:  # too late on purpose: all of it must be undone
        raise ValueError("Order at most 10 of a kind.")
    return f"Ordered {amount} of {item}."


@wink.tool(reach="reversible")
def write_file(path: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    if not text:
        raise ValueError("Write something into the file.")
    return f"Wrote {path}."


class NoEggs:
    def check(self, tool_name: str, params: Any, context: wink.ToolContext) -> str | None:
        is_denied = tool_name == "order" and params.item == "eggs"
        return "There are eggs enough: order something else." if is_denied else None


class NeverDone:
    def check(self, context: wink.ToolContext) -> CompletionResult:
        return CompletionResult(done=False, reason="Use another tool.")


class Agent:
    """A prompt over a directory, and what must hold of it at any time."""

    def __init__(self, directory: Path, task: str, output: type[Any] | None = None) -> None:
        self.clock = FakeClock()
        self.session = wink.Session(clock=self.clock)
        directory.mkdir()
        self.files = HostFilesystem(directory)
        self.files.write("notes.md", "Milk for Monday.")
        template = wink.PromptTemplate if output is None else wink.PromptTemplate[output]
        section = wink.MarkdownSection(
            title="Task", template=task, tools=[order, write_file], policies=[NoEggs()]
        )
        self.prompt = wink.Prompt(
            template(sections=[section], resources={wink.Filesystem: self.files})
        )

    def close(self) -> None:
        self.files.close()

    @property
    def records(self) -> list[ToolInvoked]:
        return list(self.session[ToolInvoked])

    def check(self) -> None:
        """Every call is on record once and answered once; only those that succeeded have effect."""
        messages = list(self.session[Message])
        made = [call.id for message in messages for call in message.tool_calls]
        assert [record.call_id for record in self.records] == made
        assert [message.call_id for message in messages if message.role == "tool"] == made
        assert len(set(made)) == len(made)
        self._check_state()

    def _check_state(self) -> None:
        expected, ordered = wink.MemoryFilesystem(), []
        expected.write("notes.md", "Milk for Monday.")
        for record in self.records:
            params: Any = record.params
            if record.success and record.tool_name == "order":
                expected.append("orders.txt", f"{params.item} {params.amount}\n")
                ordered.append(Ordered(params.item, params.amount))
            elif record.success and record.tool_name == "write_file":
                expected.write(params.path, params.text)
        assert list(self.session[Ordered]) == ordered
        assert _contents(self.files) == _contents(expected)


def _contents(files: wink.Filesystem) -> dict[str, str]:
    return {path: files.read(path) for path in files.glob("**/*")}


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(task: str, output: type[Any] | None = None) -> Agent:
        made.append(Agent(tmp_path / str(len(made)), task, output))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


# Without a model: what is asked for, and how it is read


class Elsewhere(LocalModel):
    """A model that somebody else serves."""

    def __init__(self, script: Script) -> None:
        self.path = Path("model.gguf")
        self.api_key = "none"
        self.context_tokens = 8192
        self.script = script

    @property
    def base_url(self) -> str:
        return self.script.base_url

    def start(self) -> LocalModel:
        return self


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


def written(server: WireServer, *turns: str | ModelTurn) -> Elsewhere:
    return Elsewhere(server.play(*[ModelTurn(text=t) if isinstance(t, str) else t for t in turns]))


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def heard(request: pytest.FixtureRequest) -> list[str] | None:
    """The text that was told; None when nobody listens."""
    return [] if request.param else None


def listening(heard: list[str] | None) -> dict[str, Any]:
    def hear(event: RunEvent) -> None:
        if isinstance(event, TextDelta) and heard is not None:
            heard.append(event.text)

    return {} if heard is None else {"on_event": hear}


def test_a_call_and_an_answer_are_read_from_one_object(
    server: WireServer, make_agent: Callable[..., Agent], heard: list[str] | None
):
    agent = make_agent("Order milk.")
    model = written(
        server,
        '{ "tool" : "order",\n "arguments": {"item": "milk", "amount": 2}}',
        '{"answer": "It is \\"ordered\\" \\ud83e\\udd5b\\u00e9\\n"}',
    )

    response = LocalAdapter(model).evaluate(agent.prompt, agent.session, **listening(heard))

    assert response.text == 'It is "ordered" 🥛é\n'
    assert heard is None or "".join(heard) == response.text
    assert list(agent.session[Ordered]) == [Ordered("milk", 2)]
    agent.check()
    assert model.script.problems == []


def test_the_model_is_shown_its_calls_as_it_wrote_them(
    server: WireServer, make_agent: Callable[..., Agent]
):
    agent = make_agent("Order milk.")
    call = '{"tool": "order", "arguments": {"item": "milk", "amount": 2}}'
    model = written(server, call, '{"answer": "Done."}', '{"answer": "Yes."}')
    adapter = LocalAdapter(model)

    adapter.evaluate(agent.prompt, agent.session)
    adapter.evaluate(agent.prompt, agent.session, resume=True, message="Really?")

    said = [(m["role"], m["content"]) for m in model.script.bodies[-1]["messages"][1:]]
    assert said == [
        ("user", "Begin."),
        ("assistant", call),
        ("user", "Result:\nOrdered 2 of milk."),
        ("assistant", '{"answer": "Done."}'),
        ("user", "Really?"),
    ]
    assert "tools" not in model.script.bodies[-1]


def test_a_picture_is_told_in_words(server: WireServer, make_agent: Callable[..., Agent]):
    agent = make_agent("Order milk.")
    model = written(server, '{"answer": "I cannot see it."}')
    picture = wink.Media(b"GIF89a...", name="list.gif")

    LocalAdapter(model).evaluate(agent.prompt, agent.session, message=["Order this:", picture])

    shown = "[image/gif, 9 bytes: list.gif]"
    assert model.script.bodies[-1]["messages"][1]["content"] == (
        f"Order this:\n{shown}\n\n{shown} is not shown: you cannot be given image/gif here."
    )


def test_a_call_that_is_cut_off_is_refused_and_the_model_told(
    server: WireServer, make_agent: Callable[..., Agent]
):
    agent = make_agent("Order milk.")
    cut = '{"tool": "order", "arguments": {"item": "mi'
    model = written(server, ModelTurn(text=cut, stop_reason="max_tokens"), '{"answer": "No."}')

    LocalAdapter(model).evaluate(agent.prompt, agent.session)

    assert agent.session[Message].all()[2].text.startswith('{"error": "Invalid parameters')
    assert agent.records[0].result.failure.code == "INVALID_ARGUMENTS"
    agent.check()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"answer": "It is a long \\', "It is a long "),
        ('{"answer": "Milk \\ud83e\\udd', "Milk "),
        ('{"tool": "ord', '{"tool": "ord'),
        ("I cannot.", "I cannot."),
        ("[1]", "[1]"),
        ('{"other": 1}', '{"other": 1}'),
    ],
)
def test_anything_else_is_an_answer_as_far_as_it_can_be_read(
    server: WireServer, make_agent: Callable[..., Agent], text: str, said: str
):
    agent = make_agent("Talk.")
    model = written(server, ModelTurn(text=text, stop_reason="max_tokens"))

    response = LocalAdapter(model).evaluate(agent.prompt, agent.session)

    assert (response.text, response.stop_reason) == (said, "max_tokens")


def test_a_structured_answer_stands_in_the_same_object(
    server: WireServer, make_agent: Callable[..., Agent], heard: list[str] | None
):
    agent = make_agent("Report.", Report)
    model = written(
        server, '{"answer": {"files": []}}', '{"answer": {"summary": "é", "files": ["a"]}}'
    )

    response = LocalAdapter(model).evaluate(agent.prompt, agent.session, **listening(heard))

    assert response.output == Report("é", ("a",))
    assert heard is None or heard == ['{"files": []}', '{"summary": "é", "files": ["a"]}']


@dataclass(frozen=True)
class Part:
    name: str
    parts: tuple[Part, ...] = ()


@wink.tool(reach="read")
def build(whole: Part) -> str:
    """Build something of parts."""
    return whole.name


@wink.tool(reach="read")
def take_apart(whole: Part, deep: bool = False) -> str:
    """Take something apart."""
    return whole.name


def test_the_schema_of_a_turn_holds_those_of_tools_and_answer(server: WireServer):
    """Each has references of its own, and all of them lead somewhere."""
    import jsonschema

    model = written(server, '{"answer": {"name": "x"}}')
    section = wink.MarkdownSection(title="Parts", template="Build.", tools=[build, take_apart])
    prompt = wink.Prompt(wink.PromptTemplate[Part](sections=[section]))

    LocalAdapter(model).evaluate(prompt, wink.Session())

    schema = model.script.bodies[0]["response_format"]["json_schema"]["schema"]
    fits = jsonschema.Draft202012Validator(schema).is_valid
    tree = {"name": "a", "parts": [{"name": "b", "parts": []}]}
    assert fits({"tool": "build", "arguments": {"whole": tree}})
    assert fits({"tool": "take_apart", "arguments": {"whole": tree, "deep": True}})
    assert fits({"answer": tree})
    assert not fits({"tool": "build", "arguments": {"whole": tree, "deep": True}})
    assert not fits({"tool": "build", "arguments": {"whole": {"parts": [{"name": 1}]}}})
    assert not fits({"tool": "other", "arguments": {}})
    assert not fits({"answer": {"parts": []}})


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(MissingExtra, match=r"xllamacpp is not installed.*\[local\]"):
        LocalModel(tmp_path / "model.gguf")


# With the model

heavy = pytest.mark.heavy
TALKS = {"frequency_penalty": 0.4, "temperature": 1.0}
"""Else this small a model says the same for ever."""
TASK = "Order 12 eggs and 3 milk, then write what you ordered to list.md."
"""The same in most tests: the server need not read it again."""


@pytest.fixture(scope="module")
def model() -> Iterator[LocalModel]:
    with LocalModel() as model:
        yield model


def adapter_for(model: LocalModel, seed: int = 0, max_tokens: int = 64) -> LocalAdapter:
    return LocalAdapter(model, max_tokens=max_tokens, options={**TALKS, "seed": seed})


@heavy
def test_whatever_the_model_does_is_handled_recorded_and_consistent(
    model: LocalModel, tmp_path: Path
):
    tasks = [TASK, "Order 2 bread, then 20 milk."]
    records: list[ToolInvoked] = []
    for n, task in enumerate(tasks * 2):
        agent = Agent(tmp_path / str(n), task)
        heard: list[RunEvent] = []
        options: dict[str, Any] = {"on_event": heard.append} if n < 2 else {}
        config = RunConfig(max_turns=3, completion=NeverDone())
        with pytest.raises(TurnLimitExceeded):
            adapter_for(model, seed=n, max_tokens=40).evaluate(
                agent.prompt, agent.session, config=config, **options
            )
        agent.check()
        agent.close()
        ended = [event.call.id for event in heard if isinstance(event, ToolEnded)]
        assert ended == ([record.call_id for record in agent.records] if options else [])
        records += agent.records

    # Held to the schema, it cannot but make calls now and then, and they name tools that exist.
    assert len(records) >= 3
    assert {record.tool_name for record in records} <= {"order", "write_file"}


@heavy
def test_turns_that_are_too_short_for_a_call_leave_nothing(
    model: LocalModel, make_agent: Callable[..., Agent]
):
    """Calls break off in the middle of their arguments; each is refused, and the run goes on."""
    agent = make_agent(TASK)
    config = RunConfig(max_turns=2, completion=NeverDone())

    with pytest.raises(TurnLimitExceeded, match="2 turns"):
        adapter_for(model, max_tokens=16).evaluate(agent.prompt, agent.session, config=config)

    agent.check()
    assert sum(message.role == "model" for message in agent.session[Message]) == 2


@heavy
def test_a_structured_answer_fits_or_is_sent_back(
    model: LocalModel, make_agent: Callable[..., Agent]
):
    agent = make_agent(TASK, Report)
    config = RunConfig(max_turns=2, output_retries=1)
    # It may ramble until it is cut off, or use tools to the end.
    with suppress(OutputParseError, TurnLimitExceeded):
        response = adapter_for(model).evaluate(agent.prompt, agent.session, config=config)
        assert isinstance(response.output, Report)
    agent.check()


@heavy
def test_without_tools_the_model_can_only_answer(model: LocalModel):
    section = wink.MarkdownSection(title="Task", template="Report on the weather, briefly.")
    prompt = wink.Prompt(wink.PromptTemplate[Report](sections=[section]))

    turn = adapter_for(model, max_tokens=256).step(prompt, wink.Session())

    assert isinstance(turn.output, Report)
    assert turn.usage.output_tokens > 0


@heavy
def test_a_deadline_in_the_middle_of_an_answer_leaves_a_consistent_state(
    model: LocalModel, make_agent: Callable[..., Agent]
):
    agent = make_agent(TASK)
    deadline = Deadline.after(60, clock=agent.clock)

    def nearly_late(event: RunEvent) -> None:
        if isinstance(event, TurnStarted) and event.number == 2:
            agent.clock.advance(deadline.remaining() - 0.01)

    with pytest.raises(DeadlineExceededError, match="before the model answered"):
        adapter_for(model).evaluate(
            agent.prompt,
            agent.session,
            deadline=deadline,
            config=RunConfig(completion=NeverDone(), retry=RetryPolicies.NONE),
            on_event=nearly_late,
        )

    agent.check()


@heavy
def test_a_cancelled_run_can_go_on(model: LocalModel, make_agent: Callable[..., Agent]):
    agent = make_agent(TASK)
    adapter = adapter_for(model, max_tokens=512)

    async def cancel_in_the_second_turn() -> None:
        run = asyncio.current_task()
        assert run is not None

        def cancel_soon(event: RunEvent) -> None:
            if isinstance(event, TurnStarted) and event.number == 2:
                asyncio.get_running_loop().call_later(0.05, run.cancel)

        config = RunConfig(completion=NeverDone())
        await adapter.aevaluate(agent.prompt, agent.session, config=config, on_event=cancel_soon)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel_in_the_second_turn())

    agent.check()
    said = len(agent.session[Message])
    config = RunConfig(max_turns=1, completion=NeverDone())
    with pytest.raises(TurnLimitExceeded):
        adapter_for(model).evaluate(agent.prompt, agent.session, resume=True, config=config)
    agent.check()
    assert len(agent.session[Message]) > said


@heavy
def test_a_conversation_that_gets_too_long_is_said_so(make_agent: Callable[..., Agent]):
    agent = make_agent("Order milk. " * 200)
    with (
        LocalModel(context_tokens=256) as small,
        pytest.raises(ProviderRejected, match="context size"),
    ):
        adapter_for(small).evaluate(agent.prompt, agent.session)


# The server


@heavy
def test_any_client_with_the_key_can_ask_it(model: LocalModel):
    prompt = wink.Prompt(
        wink.PromptTemplate(sections=[wink.MarkdownSection(title="Task", template="Greet.")])
    )
    options: dict[str, Any] = {"base_url": model.base_url, "options": {"max_tokens": 8}}
    config = RunConfig(retry=RetryPolicies.NONE)

    client = OpenAIAdapter(model.name, api_key=model.api_key, **options)
    assert client.evaluate(prompt, wink.Session(), config=config).usage.output_tokens > 0
    stranger = OpenAIAdapter(model.name, api_key="another", **options)
    with pytest.raises(ProviderRejected, match="401"):
        stranger.evaluate(prompt, wink.Session(), config=config)


@heavy
def test_it_is_never_asked_through_a_proxy(
    model: LocalModel, make_agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    agent = make_agent(TASK)

    assert adapter_for(model, max_tokens=16).step(agent.prompt, agent.session).turns == 1


@heavy
def test_one_server_is_shared_and_ends_with_the_process(tmp_path: Path):
    """Also when the process is killed, and nothing of it can clean up."""
    program = (
        "import sys\n"
        "from weakincentives.adapters import LocalAdapter, LocalModel\n"
        "LocalAdapter(), LocalAdapter()\n"
        "print(LocalModel.shared().pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    for how in (signal.SIGKILL, None):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        server = os.pidfd_open(int(process.stdout.readline()))
        try:
            assert not is_readable(server, 0)
            if how is not None:
                process.send_signal(how)
            _, said = process.communicate()
            assert said == ""
            assert is_readable(server, 300), f"it outlives {how}"
        finally:
            os.close(server)


@heavy
def test_a_model_is_started_again_after_its_end():
    model = LocalModel()
    assert model.pid is None
    with model:
        first = model.pid
        assert model.start().pid == first
    assert model.pid is None
    with model:
        assert model.pid not in (None, first)


@heavy
def test_a_server_that_does_not_come_up_says_why(tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_text("no model")

    with pytest.raises(ProviderRejected, match="There is no file"):
        LocalModel(tmp_path / "none.gguf")
    with pytest.raises(
        ProviderUnavailable, match=r"did not start with broken\.gguf: .*invalid magic characters"
    ):
        LocalModel(broken).start()
    with pytest.raises(ProviderUnavailable, match=r"not ready after 0\.01 s"):
        LocalModel(start_timeout=0.01).start()


@heavy
def test_the_example_runs(tmp_path: Path):
    (tmp_path / "notes.md").write_text("Buy milk on Monday.\n")

    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1].startswith("Every call is on record: ")
    assert done.stderr == ""
