# ruff: noqa: E402 (without the framework, nothing below can be imported)
"""Google ADK: the shared cases, and what is special to ADK."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from cases import (
    PATIENCE,
    Ask,
    Case,
    Driver,
    Job,
    NoSecrets,
    Outcome,
    Stage,
    all_cases,
    require,
    run_on_loop,
    until,
)

require("google.adk")

from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent
from google.adk.agents.live_request_queue import LiveRequestQueue
from google.adk.agents.run_config import RunConfig, StreamingMode, ToolThreadPoolConfig
from google.adk.apps import App, ResumabilityConfig
from google.adk.models import BaseLlm
from google.adk.models.base_llm_connection import BaseLlmConnection
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins import ReflectAndRetryToolPlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.sessions.session import Session
from google.adk.tools import (
    AgentTool,
    BaseTool,
    FunctionTool,
    LongRunningFunctionTool,
    exit_loop,
)
from google.adk.tools import ToolContext as AdkToolContext
from google.adk.tools.environment import EnvironmentToolset
from google.adk.workflow import START, Workflow
from google.adk.workflow._errors import NodeInterruptedError
from google.genai import types

from weakincentives import ToolContext, ToolRegistry, tool
from weakincentives.core.media import Media
from weakincentives.errors import ToolValidationError
from weakincentives.integrations.google_adk import WinkEnvironment, WinkPlugin, adopt
from weakincentives.prompt import ApprovalPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from cases import Turn
    from google.adk.events import Event
    from google.adk.models.llm_request import LlmRequest

CONFIRMATION = "adk_request_confirmation"


class Scripted(BaseLlm):
    """A model that says what a script says, and keeps what it was told."""

    model: str = "scripted"
    turns: list[Any] = []  # noqa: RUF012
    requests: list[Any] = []  # noqa: RUF012

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self.requests.append(llm_request)
        turn = self.turns.pop(0)
        if isinstance(turn, str):
            parts = [types.Part(text=turn)]
        else:
            calls = [
                types.FunctionCall(id=ask.id, name=ask.tool, args=ask.arguments) for ask in turn
            ]
            parts = [types.Part(function_call=call) for call in calls]
        yield LlmResponse(content=types.Content(role="model", parts=parts))


def said(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


class GoogleAdk(Driver):
    name = "google-adk"
    limits = {  # noqa: RUF012
        "cancelling_one_call_leaves_the_others": (
            "ADK cannot cancel one call of a turn: only the whole run."
        ),
    }

    def run(self, job: Job) -> Outcome:
        return self._played(job, None)

    def resume(self, job: Job, state: Any) -> Outcome:
        return self._played(job, state)

    def suspend(self) -> NoReturn:
        raise NodeInterruptedError

    def _played(self, job: Job, state: Any) -> Outcome:
        done = Outcome()
        try:
            run_on_loop(_play(job, state, done), job.cancel_when)
        except (Exception, asyncio.CancelledError, NodeInterruptedError) as error:
            done.error = error
        return done


async def _play(job: Job, state: Any, done: Outcome) -> None:
    plugin = WinkPlugin(job.workspace, tools=job.tools, policies=job.policies, run=job.run or None)
    model = Scripted(turns=list(job.turns), requests=[])
    agent = LlmAgent(name="tester", model=model, tools=[*plugin.tools, *job.own])
    app = App(name="cases", root_agent=agent, plugins=[plugin])
    sessions = InMemorySessionService()
    session = await sessions.create_session(app_name="cases", user_id="tom")
    message: types.Content | None = said("begin")
    if state is not None:  # as a session service in a database would return it
        stored = Session.model_validate_json(state)
        for event in stored.events:
            await sessions.append_event(session, event)
        message = _answers([e for e in stored.events if _asked(e)], job, done)
    async with Runner(app=app, session_service=sessions) as runner:
        try:
            while message is not None:
                events = [
                    event
                    async for event in runner.run_async(
                        user_id="tom", session_id=session.id, new_message=message
                    )
                ]
                message = _answers([e for e in events if _asked(e)], job, done)
                for event in events:
                    if event.is_final_response() and event.content and event.content.parts:
                        done.text = event.content.parts[0].text or done.text
        finally:
            _note_told(model.requests, done)
            stored = await sessions.get_session(
                app_name="cases", user_id="tom", session_id=session.id
            )
            done.state = stored.model_dump_json() if stored else None


def _asked(event: Any) -> list[types.FunctionCall]:
    return [call for call in event.get_function_calls() if call.name == CONFIRMATION]


def _answers(events: Sequence[Any], job: Job, done: Outcome) -> types.Content | None:
    """Return the message with a person's answers; None if one is missing, or nobody was asked."""
    parts: list[types.Part] = []
    for call in [call for event in events for call in _asked(event)]:
        name = call.args["originalFunctionCall"]["id"]
        done.questions[name] = call.args["toolConfirmation"]["hint"]
        if name not in job.answers:
            return None
        answer = job.answers[name].given()
        payload = {"by": answer.by, "reason": answer.reason, "arguments": answer.arguments}
        response = {"confirmed": answer.approved, "payload": payload}
        parts.append(
            types.Part(
                function_response=types.FunctionResponse(
                    id=call.id, name=CONFIRMATION, response=response
                )
            )
        )
    return types.Content(role="user", parts=parts) if parts else None


def _note_told(requests: Sequence[LlmRequest], done: Outcome) -> None:
    for request in requests:
        for offered in request.config.tools or []:
            for each in offered.function_declarations or []:
                shown = {"description": each.description, "schema": each.parameters_json_schema}
                done.tools[each.name] = shown
        for content in request.contents:
            for part in content.parts or []:
                told = part.function_response
                if told is not None and told.name != CONFIRMATION:
                    answer = told.response
                    done.answers[told.id] = (
                        answer.get("result") or answer.get("error") or str(answer)
                    )


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(GoogleAdk, tmp_path)


# What is special to ADK


class Bench:
    """An agent of ADK with the plug-in, and a session service that outlives its runners."""

    def __init__(self, workspace: Path, **options: Any) -> None:
        self.workspace = workspace
        self.plugin = WinkPlugin(workspace, **options)
        self.sessions = InMemorySessionService()
        self.model = Scripted()

    def agent(self, *tools: Any, **options: Any) -> LlmAgent:
        return LlmAgent(name="tester", model=self.model, tools=[*tools], **options)

    def app(self, agent: LlmAgent, *plugins: Any, **options: Any) -> App:
        return App(name="bench", root_agent=agent, plugins=[*plugins, self.plugin], **options)

    def play(self, agent: LlmAgent | App, *turns: Turn, **options: Any) -> list[Event]:
        """Run the agent once, to its end, and return the events."""
        return asyncio.run(self.aplay(agent, *turns, **options))

    async def aplay(
        self,
        agent: LlmAgent | App,
        *turns: Turn,
        message: types.Content | None = None,
        session: str = "s1",
        **options: Any,
    ) -> list[Event]:
        app = agent if isinstance(agent, App) else self.app(agent)
        self.model.turns = [*turns, "done"]
        runner = Runner(app=app, session_service=self.sessions, auto_create_session=True)
        if "invocation_id" not in options:
            options["new_message"] = message or said("begin")
        async with runner:
            run = runner.run_async(user_id="tom", session_id=session, **options)
            return [event async for event in run]

    def state(self, session: str = "s1") -> dict[str, Any]:
        found = asyncio.run(
            self.sessions.get_session(app_name="bench", user_id="tom", session_id=session)
        )
        assert found is not None
        return found.state

    def records(self, tool: str = "") -> list[dict[str, Any]]:
        return Stage(GoogleAdk, self.workspace).records(tool)

    def outcomes(self, tool: str = "") -> list[str]:
        return [each["outcome"] for each in self.records(tool)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "project").mkdir()
    return Bench(tmp_path / "project")


def responses(events: Sequence[Event]) -> dict[str, Any]:
    """Return the newest response to each call, by call id."""
    return {
        each.id: each.response
        for event in events
        for each in event.get_function_responses()
        if each.id and each.name != CONFIRMATION
    }


def questions(events: Sequence[Event]) -> list[types.FunctionCall]:
    return [call for event in events for call in _asked(event)]


def answer(question: types.FunctionCall, confirmed: bool, **payload: Any) -> types.Content:
    response = {"confirmed": confirmed, "payload": payload}
    given = types.FunctionResponse(id=question.id, name=CONFIRMATION, response=response)
    return types.Content(role="user", parts=[types.Part(function_response=given)])


@pytest.mark.parametrize("value", ["text", 3, None, [1, "b"], {"status": "ok", "n": 1}, {}, ""])
def test_own_tools_return_to_adk_what_they_returned(bench: Bench, value: Any) -> None:
    """The response of an own tool is the one ADK would have made without us."""

    def give() -> Any:
        """Give it."""
        return value

    alone = App(name="bench", root_agent=bench.agent(give))
    theirs = responses(bench.play(alone, [Ask("c1", "give")]))
    with_us = responses(bench.play(bench.agent(give), [Ask("c1", "give")], session="s2"))

    assert with_us == theirs


def test_an_error_that_a_tool_reports_rolls_it_back(bench: Bench) -> None:
    """A dict with an error is a failure: files are restored; the model reads the dict as it is."""

    def build(fail: bool) -> dict[str, Any]:
        """Build."""
        (bench.workspace / "out.txt").write_text("half")
        return {"status": "error", "error_message": "no compiler"} if fail else {"status": "ok"}

    events = bench.play(bench.agent(build), [Ask("c1", "build", {"fail": True})])

    assert responses(events) == {"c1": {"status": "error", "error_message": "no compiler"}}
    assert not (bench.workspace / "out.txt").exists()
    assert bench.outcomes("build") == ["rolled back"]


def test_state_of_the_adk_session_is_undone_with_the_call(bench: Bench) -> None:
    """What a failed call changed in ADK's state is as before; that of the others is there."""

    def note(text: str, fail: bool, tool_context: AdkToolContext) -> str:
        """Note it."""
        tool_context.state["last"] = text
        tool_context.state[text] = True
        tool_context.state.setdefault("all", []).append(text)
        tool_context.actions.escalate = True
        if fail:
            raise ValueError("no paper")
        return "noted"

    events = bench.play(
        bench.agent(note),
        [Ask("c1", "note", {"text": "one", "fail": False})],
        [Ask("c2", "note", {"text": "two", "fail": True})],
        [
            Ask("c3", "note", {"text": "three", "fail": False}),
            Ask("c4", "note", {"text": "four", "fail": True}),
        ],
    )

    assert "no paper" in responses(events)["c2"]["error"]
    expected = {"last": "three", "one": True, "three": True, "all": ["one", "three"]}
    assert bench.state() == expected
    failed = next(event for event in events if "c2" in responses([event]))
    assert failed.actions.escalate is None
    assert failed.actions.state_delta == {}


def test_callbacks_of_the_agent_still_run(bench: Bench) -> None:
    """Callbacks before and after a tool, and for its errors, are called as without us."""
    heard: list[Any] = []

    def before(tool: BaseTool, args: dict[str, Any], tool_context: Any) -> dict[str, Any] | None:
        heard.append(("before", tool.name))
        return {"cached": 1} if args.get("key") == "known" else None

    async def after(
        tool: BaseTool, args: dict[str, Any], tool_context: Any, tool_response: Any
    ) -> None:
        heard.append(("after", tool_response))

    def on_error(tool: BaseTool, args: dict[str, Any], context: Any, error: Exception) -> Any:
        heard.append(("error", error))
        return {"handled": str(error)} if "ours" in str(error) else None

    def look_up(key: str) -> dict[str, Any]:
        """Look it up."""
        if key.startswith("bad"):
            raise KeyError(key)
        return {"value": key}

    agent = bench.agent(
        look_up,
        before_tool_callback=before,
        after_tool_callback=after,
        on_tool_error_callback=on_error,
    )
    keys = ["known", "new", "bad", "bad, ours"]
    events = bench.play(agent, *[[Ask(key, "look_up", {"key": key})] for key in keys])

    told = responses(events)
    assert told["known"] == {"cached": 1}
    assert told["new"] == {"value": "new"}
    assert "bad" in told["bad"]["error"]
    assert told["bad, ours"] == {"handled": "'bad, ours'"}
    assert [name for name, _ in heard].count("before") == 4
    assert [value for name, value in heard if name == "after"][:2] == [
        {"cached": 1},
        {"value": "new"},
    ]
    assert [type(value) for name, value in heard if name == "error"] == [KeyError, KeyError]
    assert bench.outcomes("look_up") == ["ok", "rolled back", "rolled back"]


def test_other_plugins_hear_of_errors(bench: Bench) -> None:
    """ADK's plug-in that lets the model retry works beside ours; the failed try is undone."""
    tries: list[int] = []

    def flaky() -> str:
        """Fail once."""
        (bench.workspace / f"try{len(tries)}.txt").write_text("x")
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("try again")
        return "worked"

    app = bench.app(bench.agent(flaky), ReflectAndRetryToolPlugin(max_retries=2))
    events = bench.play(app, [Ask("c1", "flaky")], [Ask("c2", "flaky")])

    assert "reflection_guidance" in responses(events)["c1"]
    assert responses(events)["c2"] == {"result": "worked"}
    assert [path.name for path in bench.workspace.iterdir()] == ["try1.txt"]


# Confirmation


def deploy(target: str) -> str:
    """Deploy."""
    return f"deployed to {target}"


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_tool_that_must_be_confirmed(bench: Bench, confirmed: bool) -> None:
    """ADK's own `require_confirmation` works, and a denial is on record."""
    agent = bench.agent(FunctionTool(deploy, require_confirmation=True))
    first = bench.play(agent, [Ask("c1", "deploy", {"target": "prod"})])
    (question,) = questions(first)

    events = bench.play(agent, message=answer(question, confirmed, reason="it is Friday"))

    told = responses(events)["c1"]
    if confirmed:
        assert told == {"result": "deployed to prod"}
        assert bench.outcomes("deploy") == ["ok"]
    else:
        assert "it is Friday" in told["error"]
        (record,) = bench.records("deploy")
        assert (record["outcome"], record["denied_by"]) == ("denied", "tom")


def test_policies_come_before_a_tool_that_must_be_confirmed(tmp_path: Path) -> None:
    """Nobody is asked about a call that a policy denies."""
    bench = Bench(tmp_path, policies=[NoSecrets()])
    agent = bench.agent(FunctionTool(deploy, require_confirmation=True))

    events = bench.play(agent, [Ask("c1", "deploy", {"target": "secret"})])

    assert questions(events) == []
    assert "off limits" in responses(events)["c1"]["error"]


def test_a_tool_that_asks_by_itself_is_suspended(bench: Bench) -> None:
    """What it did before it asked is undone; it is called again, and reads the person's answer."""

    def book(days: int, tool_context: AdkToolContext) -> dict[str, Any]:
        """Book days."""
        (bench.workspace / f"booked{days}.txt").write_text(str(days))
        tool_context.state["booked"] = days
        if tool_context.tool_confirmation is None:
            tool_context.request_confirmation(hint="How many?", payload={"days": 0})
            return {"status": "waiting"}
        days = tool_context.tool_confirmation.payload["days"]
        return {"status": "ok", "confirmed": tool_context.tool_confirmation.confirmed, "days": days}

    agent = bench.agent(book)
    first = bench.play(agent, [Ask("c1", "book", {"days": 5})])
    assert responses(first)["c1"] == {"status": "waiting"}
    assert [*bench.workspace.iterdir()] == []
    assert bench.outcomes("book") == ["suspended"]
    assert bench.state() == {}
    (question,) = questions(first)

    events = bench.play(agent, message=answer(question, False, days=2))

    assert responses(events)["c1"] == {"status": "ok", "confirmed": False, "days": 2}
    assert (bench.workspace / "booked5.txt").exists()
    assert bench.state() == {"booked": 5}


def test_a_second_approval_is_refused(tmp_path: Path) -> None:
    """ADK asks once about a call: where two policies ask, the call is denied, and says why."""
    policies = [ApprovalPolicy(name="legal"), ApprovalPolicy(name="money")]
    bench = Bench(tmp_path, policies=policies)
    agent = bench.agent(deploy)
    (question,) = questions(bench.play(agent, [Ask("c1", "deploy", {"target": "prod"})]))

    events = bench.play(agent, message=answer(question, True))

    assert "only once" in responses(events)["c1"]["error"]
    assert bench.outcomes("deploy")[-1] == "denied"


# Tools that run for long, agents, workflows


@pytest.mark.parametrize("ticket", [None, {"ticket": 7}])
def test_a_tool_that_runs_for_long(bench: Bench, ticket: Any) -> None:
    """What it did is committed, and its answer may come later."""

    def order(item: str) -> Any:
        """Order it."""
        (bench.workspace / "order.txt").write_text(item)
        return ticket

    agent = bench.agent(LongRunningFunctionTool(order))
    events = bench.play(agent, [Ask("c1", "order", {"item": "pen"})])
    assert responses(events) == ({} if ticket is None else {"c1": ticket})
    later = types.FunctionResponse(id="c1", name="order", response={"status": "delivered"})
    message = types.Content(role="user", parts=[types.Part(function_response=later)])

    events = bench.play(agent, message=message)

    assert (bench.workspace / "order.txt").read_text() == "pen"
    assert bench.outcomes("order") == ["committed"]
    assert events[-1].content.parts[0].text == "done"


def write(path: str) -> Any:
    async def put(*, context: ToolContext) -> str:
        """Write a file."""
        context.filesystem.write(path, "x")
        return f"wrote {path}"

    return tool(reach="reversible")(put)


def test_calls_of_an_agent_that_is_a_tool_belong_to_the_run_of_its_caller(tmp_path: Path) -> None:
    """The calls of the inner agent are ours, in one run with those of the outer one."""
    bench = Bench(tmp_path, tools=[write("a.txt")])
    ask = Ask("c1", "put")
    inner = LlmAgent(
        name="helper",
        description="Helps.",
        model=Scripted(turns=[[ask], [Ask("c2", "sad")], "helped"]),
        tools=[*bench.plugin.tools, sad],
    )

    events = bench.play(
        bench.agent(AgentTool(inner), *bench.plugin.tools),
        [Ask("c1", "helper", {"request": "help"}), Ask("c2", "put")],
    )

    assert responses(events)["c1"] == {"result": "helped"}
    assert [each["tool"] for each in bench.records()].count("put") == 2
    assert bench.outcomes("sad") == ["rolled back"]
    assert len({each["run"] for each in bench.records()}) == 1


def sad() -> str:
    """Fail."""
    raise ValueError("sad")


def test_an_agent_that_is_a_tool_is_called_under_the_policies(tmp_path: Path) -> None:
    """A denied agent does not run."""
    bench = Bench(tmp_path, policies=[NoSecrets()])
    inner = LlmAgent(name="helper", description="Helps.", model=Scripted(turns=["helped"]))

    events = bench.play(
        bench.agent(AgentTool(inner)), [Ask("c1", "helper", {"request": "the secret"})]
    )

    assert "off limits" in responses(events)["c1"]["error"]
    assert bench.outcomes("helper") == ["denied"]


def test_a_transfer_to_another_agent_works(tmp_path: Path) -> None:
    """The agent that is transferred to has its calls covered."""
    bench = Bench(tmp_path, tools=[write("a.txt")])
    other = LlmAgent(
        name="other",
        description="Others.",
        model=Scripted(turns=[[Ask("c2", "put")], "I did it"]),
        tools=[*bench.plugin.tools],
    )

    agent = bench.agent(*bench.plugin.tools, sub_agents=[other])
    events = bench.play(agent, [Ask("c1", "transfer_to_agent", {"agent_name": "other"})])

    assert events[-1].content.parts[0].text == "I did it"
    assert (tmp_path / "a.txt").exists()


def test_agents_that_run_in_parallel(tmp_path: Path) -> None:
    """Their calls are told apart, even if their models use the same ids."""
    bench = Bench(tmp_path, tools=[])
    ran: list[str] = []

    def note() -> str:
        """Note it."""
        ran.append("x")
        return f"number {len(ran)}"

    agents = [
        LlmAgent(name=name, model=Scripted(turns=[[Ask("c1", "note")], "done"]), tools=[note])
        for name in ("ann", "bob", "cat")
    ]
    app = App(
        name="bench",
        root_agent=ParallelAgent(name="all", sub_agents=agents),
        plugins=[bench.plugin],
    )

    bench.play(app)

    assert len(ran) == 3
    assert bench.outcomes("note") == ["ok"] * 3


def test_tools_that_direct_adk(bench: Bench) -> None:
    """A tool that ends a loop of agents does so, and is on record."""
    agent = bench.agent(exit_loop)
    loop = LoopAgent(name="loop", sub_agents=[agent], max_iterations=5)
    app = App(name="bench", root_agent=loop, plugins=[bench.plugin])

    bench.play(app, "working", [Ask("c1", "exit_loop")], "not reached")

    assert len(bench.model.requests) == 2
    assert bench.outcomes("exit_loop") == ["ok"]


def test_an_agent_for_one_turn(tmp_path: Path) -> None:
    """An agent that ADK offers as a tool has its calls covered, in the run of its caller."""
    bench = Bench(tmp_path, tools=[write("a.txt")])
    inner = LlmAgent(
        name="helper",
        description="Helps.",
        mode="single_turn",
        model=Scripted(turns=[[Ask("c1", "put")], "helped"]),
        tools=[*bench.plugin.tools],
    )

    agent = bench.agent(sub_agents=[inner])
    events = bench.play(agent, [Ask("c1", "helper", {"request": "help"})])

    assert responses(events)["c1"] == {"result": "helped"}
    assert (tmp_path / "a.txt").exists()
    assert len({each["run"] for each in bench.records()}) == 1


class Connection(BaseLlmConnection):
    """A live session with a model that makes calls, each after the answer to the one before."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = asks
        self._told: asyncio.Queue[types.Content] = asyncio.Queue()

    async def receive(self) -> AsyncGenerator[LlmResponse, None]:
        await self._told.get()
        for ask in self._asks:
            call = types.FunctionCall(id=ask.id, name=ask.tool, args=ask.arguments)
            parts = [types.Part(function_call=call)]
            yield LlmResponse(content=types.Content(role="model", parts=parts))
            await self._told.get()
        yield LlmResponse(content=said("done"), turn_complete=True)
        await asyncio.Event().wait()

    async def send_content(self, content: types.Content, **_: Any) -> None:
        await self._told.put(content)

    async def send_history(self, history: list[types.Content]) -> None:
        """Ignore it."""

    async def send_realtime(self, blob: Any) -> None:
        """Ignore it."""

    async def close(self) -> None:
        """Do nothing."""


class LiveModel(Scripted):
    asks: list[Any] = []  # noqa: RUF012

    @asynccontextmanager
    async def connect(self, llm_request: LlmRequest) -> AsyncGenerator[Connection, None]:
        yield Connection(self.asks)


def test_a_live_session(tmp_path: Path) -> None:
    """Calls of a live session are covered; ADK runs tools that stream in the background itself."""
    bench = Bench(tmp_path, tools=[write("a.txt")])

    def build() -> str:
        """Build."""
        (tmp_path / "out.txt").write_text("half")
        raise ValueError("no compiler")

    async def ticks() -> AsyncGenerator[str, None]:
        """Tick."""
        yield "tick"

    model = LiveModel(asks=[Ask("c1", "put"), Ask("c2", "build"), Ask("c3", "ticks")])
    agent = LlmAgent(name="live", model=model, tools=[*bench.plugin.tools, build, ticks])

    async def run() -> list[Event]:
        queue = LiveRequestQueue()
        queue.send_content(said("begin"))
        runner = Runner(
            app=bench.app(agent), session_service=bench.sessions, auto_create_session=True
        )
        events: list[Event] = []
        async with runner, asyncio.timeout(PATIENCE):
            live = runner.run_live(user_id="tom", session_id="s1", live_request_queue=queue)
            async for event in live:
                events.append(event)
                if event.turn_complete:
                    break
            await live.aclose()
        return events

    told = responses(asyncio.run(run()))

    assert told["c1"] == {"result": "wrote a.txt"}
    assert "no compiler" in told["c2"]["error"]
    assert "pending" in told["c3"]["status"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert bench.outcomes() == ["committed", "rolled back"]


def test_our_tools_work_in_a_workflow(tmp_path: Path) -> None:
    """A node that is one of our tools is a call of ours."""
    bench = Bench(tmp_path, tools=[write("a.txt")])
    put = bench.plugin.tools[0]
    flow = Workflow(name="flow", edges=[(START, put)])
    app = App(name="bench", root_agent=flow, plugins=[bench.plugin])

    bench.play(app, message=said("{}"))

    assert (tmp_path / "a.txt").exists()
    assert bench.outcomes("put") == ["committed"]


def test_a_tool_that_runs_an_agent_itself(tmp_path: Path) -> None:
    """A function that runs another runner with the same plug-in inside a call does not lock up."""
    bench = Bench(tmp_path, tools=[write("a.txt")])
    inner = LlmAgent(
        name="helper",
        model=Scripted(turns=[[Ask("c1", "put")], "helped"]),
        tools=[*bench.plugin.tools],
    )

    async def delegate() -> str:
        """Let another do it."""
        app = App(name="inner", root_agent=inner, plugins=[bench.plugin])
        runner = Runner(app=app, session_service=InMemorySessionService(), auto_create_session=True)
        run = runner.run_async(user_id="tom", session_id="i", new_message=said("go"))
        events = [event async for event in run]
        return events[-1].content.parts[0].text

    events = bench.play(bench.agent(delegate), [Ask("c1", "delegate")])

    assert responses(events)["c1"] == {"result": "helped"}
    assert (tmp_path / "a.txt").exists()


def test_a_tool_that_calls_another_as_ours(bench: Bench) -> None:
    """An own tool may call an adopted one: a nested call, in the same context of ADK."""

    def inner(text: str, tool_context: AdkToolContext) -> str:
        """Be called."""
        tool_context.state["inner"] = text
        return f"inner {text}"

    called = adopt(inner)

    def outer(text: str, tool_context: AdkToolContext) -> str:
        """Call."""
        tool_context.state["outer"] = text
        return f"outer {called({'text': text}).render()}"

    events = bench.play(bench.agent(outer), [Ask("c1", "outer", {"text": "hi"})])

    assert responses(events)["c1"] == {"result": "outer inner hi"}
    assert bench.state() == {"outer": "hi", "inner": "hi"}


# Repeated and resumed runs


def test_a_resumed_invocation_repeats_no_call_and_keeps_its_state(bench: Bench) -> None:
    """ADK runs the calls of a crashed turn again; a finished one has its recorded response."""
    ran: list[str] = []
    crash = [True]

    def count(what: str, tool_context: AdkToolContext) -> dict[str, Any]:
        """Count it."""
        ran.append(what)
        tool_context.state[what] = len(ran)
        return {"counted": what, "as": len(ran)}

    def after(tool: BaseTool, args: Any, tool_context: Any, tool_response: Any) -> None:
        if crash:
            raise KeyboardInterrupt

    resumable = ResumabilityConfig(is_resumable=True)
    agent = bench.agent(count, after_tool_callback=after)
    app = bench.app(agent, resumability_config=resumable)
    with pytest.raises(KeyboardInterrupt):
        bench.play(app, [Ask("c1", "count", {"what": "a"})])
    assert ran == ["a"]
    crash.clear()
    stored = asyncio.run(
        bench.sessions.get_session(app_name="bench", user_id="tom", session_id="s1")
    )
    invocation = stored.events[-1].invocation_id

    again = Bench(bench.workspace)  # as another process
    again.sessions = bench.sessions
    app = again.app(again.agent(count), resumability_config=resumable)
    events = again.play(app, invocation_id=invocation)

    assert ran == ["a"]
    assert responses(events)["c1"] == {"counted": "a", "as": 1}
    assert again.state() == {"a": 1}


def test_a_model_that_uses_its_ids_again(tmp_path: Path) -> None:
    """The same call with the same id in a later turn is another call."""
    bench = Bench(tmp_path, tools=[])
    ran: list[int] = []

    def count() -> int:
        """Count."""
        ran.append(1)
        return len(ran)

    turn = [Ask("call_0", "count")]
    bench.play(bench.agent(count), turn, turn)
    events = bench.play(bench.agent(count), turn)

    assert len(ran) == 3
    assert responses(events) == {"call_0": {"result": 3}}


def test_a_model_that_gives_no_ids(tmp_path: Path) -> None:
    """Calls are told apart by the ids that ADK makes."""
    bench = Bench(tmp_path, tools=[])
    ran: list[int] = []

    def count() -> int:
        """Count."""
        ran.append(1)
        return len(ran)

    bench.play(bench.agent(count), [Ask("", "count"), Ask("", "count")], [Ask("", "count")])

    assert len(ran) == 3


def test_runners_share_a_plugin(tmp_path: Path) -> None:
    """Closing one runner does not end the calls of another; each session has a run of its own."""
    bench = Bench(tmp_path, tools=[])
    inside, closed = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        """Wait."""
        inside.set()
        await closed.wait()
        (tmp_path / "late.txt").write_text("x")
        return "waited"

    async def both() -> Any:
        one = asyncio.create_task(bench.aplay(bench.agent(wait), [Ask("c1", "wait")]))
        await inside.wait()
        other = Runner(
            app=App(name="other", root_agent=LlmAgent(name="o"), plugins=[bench.plugin]),
            session_service=InMemorySessionService(),
        )
        await other.close()
        closed.set()
        return responses(await one)

    assert asyncio.run(both()) == {"c1": {"result": "waited"}}
    bench.play(bench.agent(sad), [Ask("c1", "sad")], session="s2")
    assert bench.outcomes() == ["committed", "rolled back"]
    assert len({each["run"] for each in bench.records()}) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_workspace_is_free_between_runs(tmp_path: Path, fails: bool) -> None:
    """`wink undo` works while the runner is open; the next run continues."""
    bench = Bench(tmp_path, tools=[write("a.txt")])
    app = bench.app(bench.agent(*bench.plugin.tools))
    runner = Runner(app=app, session_service=bench.sessions, auto_create_session=True)

    async def run(ask: Ask) -> None:
        bench.model.turns = [[ask], *([] if fails else ["done"])]
        async for _ in runner.run_async(user_id="tom", session_id="s1", new_message=said("go")):
            pass

    for call_id in ("c1", "c2"):
        with pytest.raises(IndexError) if fails else nullcontext():
            asyncio.run(run(Ask(call_id, "put")))
        Stage(GoogleAdk, tmp_path).wink("undo")
        assert not (tmp_path / "a.txt").exists()
    asyncio.run(runner.close())
    assert len({each["run"] for each in bench.records("put")}) == 1


def test_the_sync_way_to_run(tmp_path: Path) -> None:
    """`Runner.run` has a thread and an event loop for every run."""
    bench = Bench(tmp_path, tools=[write("a.txt")])
    app = bench.app(bench.agent(*bench.plugin.tools, sad))
    runner = Runner(app=app, session_service=bench.sessions, auto_create_session=True)
    for turn in range(3):
        bench.model.turns = [[Ask(f"{turn}a", "put"), Ask(f"{turn}b", "sad")], "done"]
        told = responses([*runner.run(user_id="tom", session_id="s1", new_message=said("go"))])
        assert told[f"{turn}a"] == {"result": "wrote a.txt"}
        assert "sad" in told[f"{turn}b"]["error"]
    asyncio.run(runner.close())
    assert len(bench.records()) == 6


def test_the_abort_signal_of_adk_rolls_back(bench: Bench) -> None:
    """A run that ADK aborts leaves no half-done call."""

    async def run() -> None:
        inside, abort = asyncio.Event(), asyncio.Event()

        async def stall() -> str:
            """Write, then wait."""
            (bench.workspace / "half.txt").write_text("half")
            inside.set()
            await asyncio.Event().wait()
            return "never seen"

        turn = [Ask("c1", "stall")]
        task = asyncio.create_task(bench.aplay(bench.agent(stall), turn, abort_signal=abort))
        await inside.wait()
        abort.set()
        await asyncio.wait([task])

    asyncio.run(run())

    assert not (bench.workspace / "half.txt").exists()
    assert bench.outcomes("stall") == ["rolled back"]


def test_streamed_answers(tmp_path: Path) -> None:
    """With a streaming model, each call runs once."""
    bench = Bench(tmp_path, tools=[write("a.txt")])
    config = RunConfig(streaming_mode=StreamingMode.SSE)

    events = bench.play(bench.agent(*bench.plugin.tools), [Ask("c1", "put")], run_config=config)

    assert responses(events)["c1"] == {"result": "wrote a.txt"}
    assert len(bench.records()) == 1


def test_a_pool_of_threads_for_tools(bench: Bench) -> None:
    """Functions that ADK runs in threads are rolled back, too."""

    def damage(fail: bool) -> str:
        """Write."""
        (bench.workspace / f"{fail}.txt").write_text(threading.current_thread().name)
        if fail:
            raise ValueError("no")
        return "ok"

    config = RunConfig(tool_thread_pool_config=ToolThreadPoolConfig(max_workers=2))
    calls = [Ask("c1", "damage", {"fail": True}), Ask("c2", "damage", {"fail": False})]
    bench.play(bench.agent(damage), calls, run_config=config)

    assert [path.name for path in bench.workspace.iterdir()] == ["False.txt"]
    assert "adk" in (bench.workspace / "False.txt").read_text()


# Our tools elsewhere, theirs in ours


def test_pictures_reach_the_model(tmp_path: Path) -> None:
    """Media in a value are parts of the function response."""
    picture = Media(b"GIF89a...", name="plot.gif")

    @tool(reach="read")
    def plot() -> Media:
        """Plot."""
        return picture

    bench = Bench(tmp_path, tools=[plot])
    events = bench.play(bench.agent(*bench.plugin.tools), [Ask("c1", "plot")])

    (told,) = [each for event in events for each in event.get_function_responses()]
    assert told.parts[0].inline_data.data == picture.data
    assert told.parts[0].inline_data.mime_type == "image/gif"


def test_an_adopted_tool_in_a_registry_of_ours(tmp_path: Path) -> None:
    """ADK's tools run in our registry, without a runner, and are rolled back."""

    def build(target: str, jobs: int = 2, tool_context: AdkToolContext | None = None) -> str:
        """Build."""
        (tmp_path / "out.txt").write_text(f"{target} {jobs}")
        assert tool_context is not None
        if target == "bad":
            raise ValueError("no such target")
        return f"built {target} with {jobs}"

    with ToolRegistry([adopt(FunctionTool(build))], workspace=tmp_path) as registry:
        wrong = registry.execute("build", {"jobs": "two"})
        bad = registry.execute("build", {"target": "bad"})
        assert not (tmp_path / "out.txt").exists()
        good = registry.execute("build", {"target": "site"})

    assert "target" in wrong.message
    assert "jobs" in wrong.message
    assert "no such target" in bad.message
    assert good.render() == "built site with 2"


def test_an_adopted_tool_is_offered_with_what_is_known_of_it(tmp_path: Path) -> None:
    """Given to the plug-in, ADK's tools can state their reach, and run concurrently."""
    inside: list[int] = []

    async def look(number: int) -> str:
        """Look."""
        inside.append(number)
        await until(lambda: len(inside) == 3)
        return f"saw {number}"

    look_tool = adopt(FunctionTool(look), reach="read")
    bench = Bench(tmp_path, tools=[look_tool])
    turn = [Ask(f"c{n}", "look", {"number": n}) for n in range(3)]

    events = bench.play(bench.agent(*bench.plugin.tools), turn)

    assert responses(events) == {f"c{n}": {"result": f"saw {n}"} for n in range(3)}


def test_own_tools_that_only_read_run_concurrently(tmp_path: Path) -> None:
    """Own tools whose reach is stated as ``read`` are under way at the same time."""
    inside: list[int] = []

    async def look(number: int) -> str:
        """Look."""
        inside.append(number)
        await until(lambda: len(inside) == 3)
        return f"saw {number}"

    bench = Bench(tmp_path, tools=[], reaches={"look": "read"})
    turn = [Ask(f"c{n}", "look", {"number": n}) for n in range(3)]

    events = bench.play(bench.agent(look), turn)

    assert responses(events) == {f"c{n}": {"result": f"saw {n}"} for n in range(3)}


def test_the_rest_of_a_long_result_can_be_read(tmp_path: Path) -> None:
    """A shortened result says how to read on, and the model has the tool for it."""

    @tool(reach="read", max_result_chars=500)
    def long() -> str:
        """Say much."""
        return "\n".join(map(str, range(1000)))

    bench = Bench(tmp_path, tools=[long])
    agent = bench.agent(*bench.plugin.tools)
    text = responses(bench.play(agent, [Ask("c1", "long")]))["c1"]["result"]
    found = re.search(r'read_result\(call_id="(.*)", offset=(\d+)\)', text)
    assert found is not None
    arguments = {"call_id": found[1], "offset": int(found[2])}

    events = bench.play(agent, [Ask("c2", "read_result", arguments)])

    assert responses(events)["c2"]["result"].startswith("\n1")


def test_upper_case_names(bench: Bench) -> None:
    """A tool whose name ours may not have is called by its own, and on record in lower case."""

    def BuildSite() -> str:  # noqa: N802
        """Build."""
        return "built"

    events = bench.play(bench.agent(BuildSite), [Ask("c1", "BuildSite")])

    assert responses(events)["c1"] == {"result": "built"}
    assert bench.outcomes("buildsite") == ["ok"]


def test_a_tool_that_does_not_exist(bench: Bench) -> None:
    """ADK's own answer reaches the model."""
    events = bench.play(bench.agent(deploy), [Ask("c1", "destroy")])

    assert "deploy" in responses(events)["c1"]["error"]


# The environment


@pytest.fixture
def place(bench: Bench) -> Bench:
    (bench.workspace / "a.txt").write_text("one\n")
    return bench


def toolset(bench: Bench) -> EnvironmentToolset:
    return EnvironmentToolset(environment=WinkEnvironment(bench.plugin, sandbox="none"))


def test_adks_environment_tools_work_on_the_workspace(place: Bench) -> None:
    """Files and commands of ADK's environment toolset are calls of ours."""
    edit = {"path": "a.txt", "old_string": "one", "new_string": "two"}
    events = place.play(
        place.agent(toolset(place)),
        [Ask("c1", "ReadFile", {"path": "a.txt"})],
        [Ask("c2", "EditFile", edit)],
        [Ask("c3", "Execute", {"command": "cat a.txt; echo new > b.txt"})],
        [Ask("c4", "Execute", {"command": "rm a.txt; exit 3"})],
        [Ask("c5", "WriteFile", {"path": "deep/c.txt", "content": "c"})],
        [Ask("c6", "ReadFile", {"path": "none.txt"})],
    )

    told = responses(events)
    assert "one" in told["c1"]["content"]
    assert told["c2"]["status"] == "ok"
    assert told["c3"] == {"status": "ok", "stdout": "two\n"}
    assert (told["c4"]["status"], told["c4"]["exit_code"]) == ("error", 3)
    assert "undone" in told["c4"]["stderr"]
    assert told["c6"]["status"] == "error"
    assert (place.workspace / "a.txt").read_text() == "two\n"
    assert (place.workspace / "b.txt").read_text() == "new\n"
    assert (place.workspace / "deep/c.txt").read_text() == "c"
    made = [(each["tool"], each["outcome"]) for each in place.records()]
    assert made == [
        ("read_file", "ok"),
        ("read_file", "ok"),
        ("write_file", "committed"),
        ("shell_execute", "committed"),
        ("shell_execute", "rolled back"),
        ("write_file", "committed"),
        ("read_file", "rolled back"),
    ]


def test_a_person_is_asked_about_a_command(tmp_path: Path) -> None:
    """A command of ADK's toolset that needs approval waits for it."""
    bench = Bench(tmp_path, policies=[ApprovalPolicy(tools={"shell_execute"})])
    agent = bench.agent(toolset(bench))
    first = bench.play(agent, [Ask("c1", "Execute", {"command": "echo hi > a.txt"})])
    (question,) = questions(first)
    assert "echo hi" in question.args["toolConfirmation"]["hint"]
    assert not (tmp_path / "a.txt").exists()

    events = bench.play(agent, message=answer(question, True))

    assert responses(events)["c1"]["status"] == "ok"
    assert (tmp_path / "a.txt").read_text() == "hi\n"


def test_the_environment_without_an_agent(place: Bench) -> None:
    """Binary files, absolute paths, paths outside."""
    environment = WinkEnvironment(place.plugin, sandbox="none")

    async def run() -> None:
        await environment.write_file(place.workspace / "b.bin", b"\xff\x00")
        assert await environment.read_file(Path("b.bin")) == b"\xff\x00"
        assert await environment.read_file(environment.working_dir / "a.txt") == b"one\n"
        with pytest.raises(FileNotFoundError):
            await environment.read_file(Path("../../etc/passwd"))
        with pytest.raises(ToolValidationError):
            await environment.write_file(Path("/etc/wink"), "x")
        done = await environment.execute("sleep 5", timeout=0.2)
        assert done.timed_out
        await place.plugin.close()

    asyncio.run(run())
    assert (place.workspace / "b.bin").read_bytes() == b"\xff\x00"
