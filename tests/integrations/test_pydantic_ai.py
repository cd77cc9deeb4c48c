"""pydantic-ai: the shared cases, and what only this framework has."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
from cases import (
    Answer,
    Case,
    Driver,
    Job,
    NoSecrets,
    Outcome,
    all_cases,
    require,
    run_invoice_desk,
    run_on_loop,
    until,
)

from weakincentives import ToolRegistry, tool
from weakincentives.cli.entry import main as wink_main
from weakincentives.core.media import Media
from weakincentives.integrations import adopt
from weakincentives.prompt import Approval, ApprovalPolicy

require("pydantic_ai")

from pydantic import TypeAdapter  # noqa: E402
from pydantic_ai import (  # noqa: E402
    Agent,
    ApprovalRequired,
    BinaryContent,
    CallDeferred,
    DeferredToolRequests,
    DeferredToolResults,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    ModelRetry,
    RunContext,
    SkipToolExecution,
    TextPart,
    ToolApproved,
    ToolCallPart,
    ToolDenied,
    ToolFailed,
    ToolReturn,
    ToolReturnPart,
)
from pydantic_ai import Tool as PydanticTool  # noqa: E402
from pydantic_ai.capabilities import AbstractCapability, HandleDeferredToolCalls  # noqa: E402
from pydantic_ai.exceptions import RunTimedOut  # noqa: E402
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel  # noqa: E402
from pydantic_ai.workspaces import WorkspaceBackend, WorkspaceRef  # noqa: E402
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite  # noqa: E402

from weakincentives.integrations.pydantic_ai import Wink, WinkWorkspace  # noqa: E402


class PydanticAi(Driver):
    """An agent with a scripted model; a job is one conversation."""

    name = "pydantic-ai"
    limits: ClassVar[Mapping[str, str]] = {
        "cancelling_one_call_leaves_the_others": "Nothing cancels a single call: pydantic-ai "
        "cancels a run, with all calls under way.",
    }

    def run(self, job: Job) -> Outcome:
        return self._run(job, [])

    def resume(self, job: Job, state: Any) -> Outcome:
        history, pending = state
        messages = ModelMessagesTypeAdapter.validate_json(history)
        return self._run(job, messages, _REQUESTS.validate_json(pending))

    def suspend(self) -> NoReturn:
        raise ApprovalRequired

    def _run(
        self, job: Job, history: list[ModelMessage], pending: DeferredToolRequests | None = None
    ) -> Outcome:
        outcome = Outcome()
        turns = iter(job.turns)

        def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            outcome.tools |= {
                each.name: {"description": each.description, "schema": each.parameters_json_schema}
                for each in info.function_tools
            }
            turn = next(turns)
            if isinstance(turn, str):
                return ModelResponse([TextPart(turn)])
            return ModelResponse(
                [ToolCallPart(ask.tool, ask.arguments, tool_call_id=ask.id) for ask in turn]
            )

        with Wink(
            job.workspace, tools=job.tools, policies=job.policies, run=job.run or None
        ) as wink:
            agent = Agent(
                FunctionModel(model),
                tools=job.own,
                capabilities=[wink],
                output_type=[str, DeferredToolRequests],
            )
            try:
                run_on_loop(self._talk(agent, job, history, pending, outcome), job.cancel_when)
            except BaseException as error:
                outcome.error = error
        return outcome

    async def _talk(
        self,
        agent: Agent[None, Any],
        job: Job,
        history: list[ModelMessage],
        pending: DeferredToolRequests | None,
        outcome: Outcome,
    ) -> None:
        answers = None if pending is None else _answers(pending, job)
        prompt = "go" if pending is None else None
        while True:
            done = await agent.run(prompt, message_history=history, deferred_tool_results=answers)
            history, prompt = done.all_messages(), None
            outcome.answers = _told(history)
            if isinstance(done.output, str):
                outcome.text = done.output
                return
            pending = done.output
            outcome.questions |= {
                each.tool_call_id: str(pending.metadata.get(each.tool_call_id))
                for each in pending.approvals
            }
            answers = _answers(pending, job)
            if answers is None:
                stored = ModelMessagesTypeAdapter.dump_json(history)
                outcome.state = (stored, _REQUESTS.dump_json(pending))
                return


_REQUESTS = TypeAdapter(DeferredToolRequests)


def _answers(pending: DeferredToolRequests, job: Job) -> DeferredToolResults | None:
    """Return what the person says, unless they have no answer to one of the requests."""
    asked = [each.tool_call_id for each in pending.approvals]
    if not all(each in job.answers for each in asked):
        return None
    given = {each: job.answers[each].given() for each in asked}
    return pending.build_results(
        approvals={name: _answer(each) for name, each in given.items()},
        metadata={name: {"by": each.by} for name, each in given.items()},
    )


def _answer(answer: Answer) -> ToolApproved | ToolDenied:
    if answer.approved:
        return ToolApproved(override_args=answer.arguments)
    return ToolDenied(answer.reason)


def _told(history: list[ModelMessage]) -> dict[str, str]:
    """Return what the model was told, by call id."""
    requests = [each for each in history if isinstance(each, ModelRequest)]
    parts = [part for each in requests for part in each.parts if isinstance(part, ToolReturnPart)]
    return {part.tool_call_id: part.model_response_str(wrap_if_error=False) for part in parts}


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(PydanticAi, tmp_path)


# What only this framework has


Call = tuple[str, str, dict[str, Any]]
"""The id of a call, the name of the tool, and its arguments."""


def script(*turns: list[Call] | str) -> FunctionModel:
    """Return a model that says these things, in order; also when its answers are streamed."""
    said = iter(turns)

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        turn = next(said)
        if isinstance(turn, str):
            return ModelResponse([TextPart(turn)])
        calls = [ToolCallPart(tool, args, tool_call_id=name) for name, tool, args in turn]
        return ModelResponse(calls)

    async def stream(
        messages: list[ModelMessage], info: AgentInfo
    ) -> AsyncIterator[str | dict[int, DeltaToolCall]]:
        turn = next(said)
        if isinstance(turn, str):
            yield turn
            return
        for number, (call_id, name, args) in enumerate(turn):
            yield {number: DeltaToolCall(name, json.dumps(args), tool_call_id=call_id)}

    return FunctionModel(model, stream_function=stream)


WRITE: Call = ("c1", "write_file", {"path": "new.txt", "content": "new"})


@pytest.fixture(autouse=True)
def _loop() -> Iterator[None]:
    """Give ``run_sync`` a loop: one that it makes itself is never closed."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "old.txt").write_text("old")
    return place


@pytest.fixture
def wink(place: Path) -> Iterator[Wink]:
    with Wink(place) as made:
        yield made


def log(place: Path, *names: str) -> list[Any]:
    """Return what `wink log` shows of each call, oldest first."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        wink_main(["log", "--json", "-n", "0", "--workspace", str(place)])
    calls = [json.loads(line) for line in out.getvalue().splitlines()]
    return [tuple(each[name] for name in names or ("tool", "outcome")) for each in calls]


def told(history: list[ModelMessage], call_id: str) -> ToolReturnPart:
    """Return the answer to a call in the history of a run."""
    parts = [part for message in history for part in message.parts]
    found = [each for each in parts if isinstance(each, ToolReturnPart)]
    return next(each for each in found if each.tool_call_id == call_id)


def files(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(place.iterdir())}


class TestToolset:
    """Our tools without the capability."""

    def test_offers_our_tools_and_leaves_the_agents_own_alone(
        self, place: Path, wink: Wink
    ) -> None:
        def own() -> str:
            """Do nothing."""
            return "nothing"

        model = script([WRITE, ("c2", "own", {})], "done")
        agent = Agent(model, tools=[own], toolsets=[wink.toolset])

        assert agent.run_sync("go").output == "done"

        assert files(place) == {"old.txt": "old", "new.txt": "new"}
        assert log(place) == [("write_file", "committed")]

    def test_a_denial_is_on_record(self, place: Path) -> None:
        policies = [ApprovalPolicy(tools={"write_file"})]
        with Wink(place, policies=policies) as wink:
            agent = Agent(
                script([WRITE], "done"),
                toolsets=[wink.toolset],
                output_type=[str, DeferredToolRequests],
            )
            asked = agent.run_sync("go")
            assert isinstance(asked.output, DeferredToolRequests)
            no = asked.output.build_results(approvals={"c1": ToolDenied("not today")})
            agent.run_sync(message_history=asked.all_messages(), deferred_tool_results=no)

        assert files(place) == {"old.txt": "old"}
        assert log(place)[-1] == ("write_file", "denied")


class TestApproval:
    """What a person decides, the framework's way."""

    def test_the_request_shows_the_change(self, place: Path) -> None:
        with Wink(place, policies=[ApprovalPolicy(tools={"write_file"})]) as wink:
            agent = Agent(
                script([WRITE], "done"),
                capabilities=[wink],
                output_type=[str, DeferredToolRequests],
            )

            asked = agent.run_sync("go").output

        assert isinstance(asked, DeferredToolRequests)
        assert [call.tool_name for call in asked.approvals] == ["write_file"]
        shown = asked.metadata["c1"]
        assert "+new" in shown["diff"]
        assert "write_file wants to run" in shown["text"]

    @pytest.mark.parametrize("approved", [True, False])
    def test_a_handler_can_answer_during_the_run(self, place: Path, approved: bool) -> None:
        def answer(ctx: RunContext[Any], asked: DeferredToolRequests) -> DeferredToolResults:
            decision = ToolApproved() if approved else ToolDenied("not today")
            return asked.build_results(approvals={"c1": decision})

        with Wink(place, policies=[ApprovalPolicy(tools={"write_file"})]) as wink:
            capabilities = [HandleDeferredToolCalls(answer), wink]
            agent = Agent(script([WRITE], "done"), capabilities=capabilities)
            history = agent.run_sync("go").all_messages()

        assert told(history, "c1").outcome == ("success" if approved else "denied")
        assert ("new.txt" in files(place)) is approved
        outcome = "committed" if approved else "denied"
        assert log(place) == [("write_file", "suspended"), ("write_file", outcome)]

    def test_a_denial_is_on_record_when_the_other_calls_end_the_run(self, place: Path) -> None:
        def crash() -> str:
            """Crash."""
            raise RuntimeError("crashed")

        policies = [ApprovalPolicy(tools={"write_file", "crash"})]
        with Wink(place, policies=policies) as wink:
            agent = Agent(
                script([WRITE, ("c2", "crash", {})], "done"),
                tools=[crash],
                capabilities=[wink],
                output_type=[str, DeferredToolRequests],
            )
            asked = agent.run_sync("go")
            assert isinstance(asked.output, DeferredToolRequests)
            answers = asked.output.build_results(approvals={"c1": False, "c2": True})
            with pytest.raises(RuntimeError, match="crashed"):
                agent.run_sync(message_history=asked.all_messages(), deferred_tool_results=answers)

        assert ("write_file", "denied") in log(place)

    def test_policies_come_before_the_person_that_the_framework_asks(self, place: Path) -> None:
        ran: list[str] = []

        def publish(title: str = "untitled") -> str:
            """Publish a page."""
            ran.append(title)
            return f"published {title}"

        turns: list[Call] = [
            ("c1", "publish", {"title": "a secret"}),
            ("c2", "publish", {}),
            ("c3", "publish", {"title": "news"}),
        ]
        with Wink(place, policies=[NoSecrets()]) as wink:
            agent = Agent(
                script(turns, "done"),
                tools=[PydanticTool(publish, requires_approval=True)],
                capabilities=[wink],
                output_type=[str, DeferredToolRequests],
            )
            asked = agent.run_sync("go")
            assert isinstance(asked.output, DeferredToolRequests)
            assert [call.tool_call_id for call in asked.output.approvals] == ["c2", "c3"]
            answers = asked.output.build_results(approvals={"c2": False, "c3": True})
            done = agent.run_sync(
                message_history=asked.all_messages(), deferred_tool_results=answers
            )

        assert ran == ["news"]
        assert told(done.all_messages(), "c1").content == "secrets are off limits"
        assert log(place) == [("publish", "denied"), ("publish", "denied"), ("publish", "ok")]

    def test_a_denial_is_that_of_the_suspended_call(self, place: Path) -> None:
        """Also where the tool was renamed, or the framework has added arguments."""

        def publish(title: str, draft: bool = False) -> str:
            """Publish a page."""
            return "published"

        name, tool_name, args = WRITE
        calls = [(name, f"disk_{tool_name}", args), ("c2", "publish", {"title": "news"})]
        with Wink(place, policies=[ApprovalPolicy(tools={"write_file", "publish"})]) as wink:
            agent = Agent(
                script(calls, "done"),
                tools=[publish],
                capabilities=[wink.prefix_tools("disk")],
                output_type=[str, DeferredToolRequests],
            )
            asked = agent.run_sync("go")
            assert isinstance(asked.output, DeferredToolRequests)
            answers = asked.output.build_results(approvals={"c1": False, "c2": False})
            agent.run_sync(message_history=asked.all_messages(), deferred_tool_results=answers)

        denied = [tool for tool, outcome in log(place) if outcome == "denied"]
        assert sorted(denied) == ["publish", "write_file"]

    def test_a_repeated_deferral_asks_again(self, place: Path) -> None:
        """A tool may defer a call that was approved: nothing of it stays."""

        def deploy(ctx: RunContext[Any]) -> str:
            """Deploy it."""
            (place / "deployed.txt").write_text("half")
            raise CallDeferred

        with Wink(place, policies=[ApprovalPolicy(tools={"deploy"})]) as wink:
            agent = Agent(
                script([("c1", "deploy", {})], "done"),
                tools=[deploy],
                capabilities=[wink],
                output_type=[str, DeferredToolRequests],
            )
            asked = agent.run_sync("go")
            assert isinstance(asked.output, DeferredToolRequests)
            answers = asked.output.build_results(approve_all=True)
            again = agent.run_sync(
                message_history=asked.all_messages(), deferred_tool_results=answers
            )

        assert isinstance(again.output, DeferredToolRequests)
        assert [call.tool_name for call in again.output.calls] == ["deploy"]
        assert files(place) == {"old.txt": "old"}
        assert {outcome for _, outcome in log(place)} == {"suspended"}


class TestOwnTools:
    """The agent's own tools keep their ways."""

    def test_a_retry_rolls_back_and_reaches_the_model(self, place: Path, wink: Wink) -> None:
        tries: list[int] = []

        def flaky() -> str:
            """Work the second time."""
            tries.append(1)
            (place / "old.txt").write_text(f"try {len(tries)}")
            if len(tries) == 1:
                raise ModelRetry("once more, please")
            return "worked"

        model = script([("c1", "flaky", {})], [("c2", "flaky", {})], "done")
        history = Agent(model, tools=[flaky], capabilities=[wink]).run_sync("go").all_messages()

        assert told(history, "c1").outcome == "retried"
        assert "once more, please" in told(history, "c1").model_response_str()
        assert told(history, "c2").content == "worked"
        assert files(place) == {"old.txt": "try 2"}
        assert log(place) == [("flaky", "rolled back"), ("flaky", "committed")]

    def test_an_exception_ends_the_run_as_it_does_without_us(self, place: Path, wink: Wink) -> None:
        error = LookupError("no such customer")

        def look_up() -> str:
            """Look it up."""
            (place / "old.txt").unlink()
            raise error

        agent = Agent(script([("c1", "look_up", {})], "done"), tools=[look_up], capabilities=[wink])
        with pytest.raises(LookupError) as raised:
            agent.run_sync("go")

        assert raised.value is error
        assert files(place) == {"old.txt": "old"}

    def test_a_value_comes_back_as_it_is(self, wink: Wink) -> None:
        value = ToolReturn({"a": 1}, content=["more"], metadata={"kept": object()})

        def find() -> ToolReturn:
            """Find it."""
            return value

        agent = Agent(script([("c1", "find", {})], "done"), tools=[find], capabilities=[wink])
        history = agent.run_sync("go").all_messages()

        assert told(history, "c1").content == {"a": 1}
        assert told(history, "c1").metadata is value.metadata

    def test_arguments_have_their_types(self, place: Path, wink: Wink) -> None:
        found: list[Any] = []

        def plan(day: date, where: Path = Path("here"), *, count: int = 1) -> str:
            """Plan a day."""
            found.append((day, where, count))
            return "planned"

        call = ("c1", "plan", {"day": "2026-11-17", "count": "3"})
        Agent(script([call], "done"), tools=[plan], capabilities=[wink]).run_sync("go")

        assert found == [(date(2026, 11, 17), Path("here"), 3)]
        assert log(place) == [("plan", "ok")]

    def test_the_wrappers_of_other_capabilities_are_part_of_the_call(
        self, place: Path, wink: Wink
    ) -> None:
        tries: list[int] = []

        def flaky() -> str:
            """Work the second time."""
            tries.append(1)
            if len(tries) == 1:
                raise OSError("not yet")
            return "worked"

        class TryTwice(AbstractCapability[Any]):
            async def wrap_tool_execute(
                self, ctx: Any, *, args: Any, handler: Any, **_: Any
            ) -> Any:
                try:
                    return await handler(args)
                except OSError:
                    return await handler(args)

        class Answer(AbstractCapability[Any]):
            async def before_tool_execute(self, ctx: Any, *, args: Any, **_: Any) -> Any:
                if len(tries) == 2:
                    raise SkipToolExecution("from the cache")
                return args

        agent = Agent(
            script([("c1", "flaky", {})], [("c2", "flaky", {})], "done"),
            tools=[flaky],
            capabilities=[TryTwice(), Answer(), wink],
        )
        history = agent.run_sync("go").all_messages()

        assert told(history, "c1").content == "worked"
        assert told(history, "c2").content == "from the cache"
        assert log(place) == [("flaky", "ok"), ("flaky", "ok")]

    def test_some_can_be_left_out(self, place: Path) -> None:
        def plain() -> str:
            """Do nothing."""
            return "nothing"

        with Wink(place, covers=lambda tool: tool.name != "plain") as wink:
            agent = Agent(script([("c1", "plain", {})], "done"), tools=[plain], capabilities=[wink])
            agent.run_sync("go")

        assert log(place) == []

    def test_those_that_only_read_overlap(self, place: Path) -> None:
        inside: set[int] = set()

        async def meet(number: int) -> str:
            """Wait for the others."""
            inside.add(number)
            await until(lambda: len(inside) == 3)
            return "met"

        with Wink(place, reaches={"meet": "read"}) as wink:
            model = script([(f"c{n}", "meet", {"number": n}) for n in range(3)], "done")
            agent = Agent(model, tools=[meet], capabilities=[wink])
            history = agent.run_sync("go").all_messages()

        assert [told(history, f"c{n}").content for n in range(3)] == ["met"] * 3

    def test_ours_are_not_covered_twice_under_another_name(self, place: Path, wink: Wink) -> None:
        name, tool, args = WRITE
        model = script([(name, f"disk_{tool}", args)], "done")

        Agent(model, capabilities=[wink.prefix_tools("disk")]).run_sync("go")

        assert log(place) == [("write_file", "committed")]


class TestRuns:
    """Which calls belong together."""

    def test_a_conversation_is_a_run(self, place: Path, wink: Wink) -> None:
        agent = Agent(
            script([WRITE], "one", [("c2", "read_file", {"path": "new.txt"})], "two", [WRITE], "x"),
            capabilities=[wink],
        )
        first = agent.run_sync("go")
        agent.run_sync("go on", message_history=first.all_messages())
        agent.run_sync("another")

        runs = [run for (run,) in log(place, "run")]
        assert runs[0] == runs[1] != runs[2]

    def test_the_directory_is_free_between_runs(self, place: Path, wink: Wink) -> None:
        Agent(script([WRITE], "done"), capabilities=[wink]).run_sync("go")

        wink_undo(place)

        assert files(place) == {"old.txt": "old"}

    def test_an_id_that_a_model_uses_again_names_another_call(
        self, place: Path, wink: Wink
    ) -> None:
        read: Call = ("call_0", "read_file", {"path": "old.txt"})

        def edit() -> str:
            """Edit the file."""
            (place / "old.txt").write_text("newer")
            return "edited"

        agent = Agent(
            script([read], [("call_1", "edit", {})], [read], "done"),
            tools=[edit],
            capabilities=[wink],
        )
        history = agent.run_sync("go").all_messages()

        parts = [part for message in history for part in message.parts]
        answers = [part for part in parts if isinstance(part, ToolReturnPart)]
        assert ["newer" in str(each.content) for each in answers] == [False, False, True]

    def test_an_agent_that_a_tool_runs_is_part_of_the_call(self, place: Path, wink: Wink) -> None:
        inner = Agent(script([WRITE], "written"), capabilities=[wink])

        async def delegate() -> str:
            """Ask another agent."""
            await inner.run("go")
            assert "new.txt" in files(place)
            raise ModelRetry("not like this")

        agent = Agent(
            script([("c1", "delegate", {})], "done"), tools=[delegate], capabilities=[wink]
        )
        assert agent.run_sync("go").output == "done"

        assert files(place) == {"old.txt": "old"}
        assert {*log(place)} == {("write_file", "rolled back"), ("delegate", "rolled back")}

    def test_two_agents_share_one(self, place: Path, wink: Wink) -> None:
        def agent(number: int) -> Agent[None, str]:
            calls: list[Call] = [
                (f"c{n}", "write_file", {"path": f"{number}-{n}.txt", "content": "x"})
                for n in range(5)
            ]
            return Agent(script(calls, "done"), capabilities=[wink])

        async def both() -> None:
            await asyncio.gather(agent(1).run("go"), agent(2).run("go"))

        asyncio.run(both())

        assert len(files(place)) == 11
        assert [outcome for _, outcome in log(place)] == ["committed"] * 10

    def test_the_directory_may_depend_on_the_run(self, tmp_path: Path) -> None:
        for name in ("ann", "bob"):
            (tmp_path / name).mkdir()
        model = script([WRITE], "done", [WRITE], "done")

        with Wink(lambda ctx: tmp_path / ctx.deps) as wink:
            agent = Agent(model, deps_type=str, capabilities=[wink])
            agent.run_sync("go", deps="ann")
            assert [path.name for path in tmp_path.glob("*/*.txt")] == ["new.txt"]
            agent.run_sync("go", deps="bob")

        assert (tmp_path / "bob/new.txt").read_text() == "new"

    def test_a_streamed_run_is_the_same(self, place: Path, wink: Wink) -> None:
        def fail() -> str:
            """Fail."""
            (place / "old.txt").write_text("half")
            raise ModelRetry("no")

        agent = Agent(
            script([WRITE], [("c2", "fail", {})], "done"), tools=[fail], capabilities=[wink]
        )

        async def stream() -> str:
            async with agent.run_stream("go") as streamed:
                return await streamed.get_output()

        assert asyncio.run(stream()) == "done"
        assert files(place) == {"old.txt": "old", "new.txt": "new"}
        assert log(place) == [("write_file", "committed"), ("fail", "rolled back")]

    def test_a_run_that_takes_too_long_rolls_back(self, place: Path, wink: Wink) -> None:
        async def linger() -> str:
            """Write, then wait."""
            (place / "half.txt").write_text("half")
            await until(lambda: False)
            return "never"

        agent = Agent(script([("c1", "linger", {})], "done"), tools=[linger], capabilities=[wink])
        with pytest.raises(RunTimedOut):
            agent.run_sync("go", timeout=3.0)

        assert files(place) == {"old.txt": "old"}
        assert log(place) == [("linger", "rolled back")]

    def test_a_call_that_outlives_its_run_ends_on_record(self, place: Path, wink: Wink) -> None:
        started = asyncio.Event()

        async def linger() -> str:
            """Wait, then write."""
            started.set()
            await asyncio.sleep(0.2)
            (place / "late.txt").write_text("late")
            return "done"

        agent = Agent(script([("c1", "linger", {})], "done"), tools=[linger], capabilities=[wink])

        async def leave() -> None:
            async with agent.iter("go") as run:
                reading = asyncio.create_task(_read(run))
                await started.wait()
                # The framework does not cancel the call, and ends the run without it.
                reading.cancel()
                await asyncio.wait([reading])

        asyncio.run(leave())
        assert files(place) == {"old.txt": "old", "late.txt": "late"}
        assert log(place) == [("linger", "committed")]

    def test_a_file_may_describe_the_agent(self, place: Path) -> None:
        spec = {"model": "test", "capabilities": [{"Wink": {"workspace": str(place)}}]}
        agent = Agent.from_spec(spec, custom_capability_types=[Wink])

        with agent.override(model=script([WRITE], "done")):
            agent.run_sync("go")

        assert files(place) == {"old.txt": "old", "new.txt": "new"}


async def _read(run: Any) -> None:
    async for _ in run:
        pass


class TestResults:
    """What the model is given."""

    def test_the_rest_of_a_long_result_can_be_read(self, place: Path) -> None:
        @tool(reach="read", max_result_chars=1000)
        def recite() -> str:
            """Recite something long."""
            return "\n".join(f"line {number}" for number in range(1000))

        def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            last = messages[-1].parts[-1]
            if not isinstance(last, ToolReturnPart):
                return ModelResponse([ToolCallPart("recite", {}, tool_call_id="c1")])
            if last.tool_name == "read_result":
                return ModelResponse([TextPart(str(last.content))])
            said = re.search(r'read_result\(call_id="(.+)", offset=(\d+)\)', str(last.content))
            assert said is not None
            args = {"call_id": said[1], "offset": int(said[2])}
            return ModelResponse([ToolCallPart("read_result", args, tool_call_id="c2")])

        with Wink(place, tools=[recite]) as wink:
            agent = Agent(FunctionModel(model), capabilities=[wink])
            assert agent.run_sync("go").output.endswith("line 999")

    def test_pictures_are_shown(self, place: Path) -> None:
        @tool(reach="read")
        def draw() -> Media:
            """Draw something."""
            return Media(b"GIF89a...", name="plot.gif")

        with Wink(place, tools=[draw]) as wink:
            agent = Agent(script([("c1", "draw", {})], "done"), capabilities=[wink])
            answer = told(agent.run_sync("go").all_messages(), "c1")

        text, picture = answer.content
        assert text == "[image/gif, 9 bytes: plot.gif]"
        assert isinstance(picture, BinaryContent)
        assert (picture.data, picture.media_type) == (b"GIF89a...", "image/gif")

    def test_arguments_that_are_no_json_are_answered_by_the_framework(
        self, place: Path, wink: Wink
    ) -> None:
        said = iter(
            [
                ModelResponse([ToolCallPart("write_file", "{not json", tool_call_id="c1")]),
                ModelResponse([TextPart("done")]),
            ]
        )
        agent = Agent(FunctionModel(lambda messages, info: next(said)), capabilities=[wink])
        history = agent.run_sync("go").all_messages()

        assert told(history, "c1").outcome == "retried"
        assert log(place) == []


class TestWorkspace:
    """``ctx.workspace`` is the directory of the transaction."""

    def test_what_a_tool_changes_there_is_rolled_back(self, place: Path, wink: Wink) -> None:
        async def rebuild(ctx: RunContext[Any]) -> str:
            """Rebuild it."""
            await ctx.workspace.write_text("old.txt", "new")
            await ctx.workspace.make_dir("out")
            done = await ctx.workspace.run("cp old.txt out/copy.txt; rm old.txt", shell=True)
            assert (done.exit_code, await ctx.workspace.read_text("out/copy.txt")) == (0, "new")
            raise ModelRetry("the tests fail")

        agent = Agent(script([("c1", "rebuild", {})], "done"), tools=[rebuild], capabilities=[wink])
        agent.run_sync("go")

        assert files(place) == {"old.txt": "old"}
        assert log(place) == [("rebuild", "rolled back")]

    def test_a_change_outside_of_tools_is_a_call(self, place: Path, wink: Wink) -> None:
        async def save(ctx: RunContext[Any], text: str) -> str:
            await ctx.workspace.write_text("result.txt", text)
            return text

        model = script([("c1", "final_result", {"text": "the end"})])
        Agent(model, output_type=save, capabilities=[wink]).run_sync("go")

        assert files(place)["result.txt"] == "the end"
        assert log(place) == [("workspace_write", "committed")]
        wink_undo(place)
        assert files(place) == {"old.txt": "old"}

    def test_policies_hold_for_it(self, place: Path) -> None:
        async def save(ctx: RunContext[Any], text: str) -> str:
            await ctx.workspace.write_text("secret.txt", text)
            return text

        model = script([("c1", "final_result", {"text": "the end"})])
        with Wink(place, policies=[NoSecrets()]) as wink, pytest.raises(ToolFailed):
            Agent(model, output_type=save, capabilities=[wink]).run_sync("go")

        assert files(place) == {"old.txt": "old"}

    def test_nothing_outside_is_reached(self, place: Path, wink: Wink) -> None:
        (place.parent / "outside.txt").write_text("out")
        (place / "link").symlink_to(place.parent)
        caught: list[str] = []

        async def look(ctx: RunContext[Any]) -> str:
            """Look around."""
            for path in ("../outside.txt", "link/outside.txt", "/etc/passwd"):
                try:
                    await ctx.workspace.read_text(path)
                except PermissionError:
                    caught.append(path)
            return "looked"

        Agent(script([("c1", "look", {})], "done"), tools=[look], capabilities=[wink]).run_sync(
            "go"
        )

        assert len(caught) == 3

    def test_a_cancelled_command_is_stopped_and_undone(self, place: Path, wink: Wink) -> None:
        backend = wink.get_workspace(None, ref=None)  # type: ignore[arg-type]
        assert isinstance(backend, WinkWorkspace)

        async def run() -> None:
            task = asyncio.create_task(backend.run("echo x > half.txt; sleep 3600", shell=True))
            await asyncio.sleep(0.3)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert (await backend.run(["true"])).exit_code == 0

        asyncio.run(run())
        assert files(place) == {"old.txt": "old"}


class TestConformance(WorkspaceBackendSuite):
    """The framework's own suite for workspaces."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    def backend(self, wink: Wink) -> WorkspaceBackend:
        return self._attached(wink, None)

    @pytest.fixture
    def attach_backend(self, wink: Wink) -> Callable[[WorkspaceRef], WorkspaceBackend]:
        return lambda ref: self._attached(wink, ref)

    def _attached(self, wink: Wink, ref: WorkspaceRef | None) -> WorkspaceBackend:
        found = wink.get_workspace(None, ref=ref)  # type: ignore[arg-type]
        assert found is not None
        return found

    @pytest.fixture
    def can_detect_exit_with_inherited_output_pipes(self) -> bool:
        return False  # a command ends with everything it has started

    async def test_cancellation_stops_foreground_work(self) -> None:
        pytest.skip("what a command writes is not visible before it has ended")

    async def test_a_backend_attached_by_ref_reaches_a_detached_process(self) -> None:
        pytest.skip("a command ends with everything it has started: no process stays behind")


class TestAdopt:
    """Tools of the framework in a registry of ours."""

    def test_it_is_validated_run_and_rolled_back(self, place: Path) -> None:
        def save(ctx: RunContext[Path], name: str, day: date, fail: bool = False) -> str:
            """Save a note.

            Args:
                name: The file.
                day: When.
            """
            (ctx.deps / name).write_text(day.isoformat())
            if fail:
                raise ModelRetry("the disk is full")
            return f"saved {day:%d.%m.}"

        adopted = adopt(PydanticTool(save), deps=place)
        with ToolRegistry([adopted], workspace=place) as tools:
            good = tools.execute("save", {"name": "a.txt", "day": "2026-11-17"})
            bad = tools.execute("save", {"name": "b.txt", "day": "2026-11-17", "fail": True})
            wrong = tools.execute("save", {"name": 1, "fail": "maybe"})

        assert (good.success, good.value) == (True, "saved 17.11.")
        assert (bad.success, bad.message) == (False, "the disk is full")
        assert files(place) == {"a.txt": "2026-11-17", "old.txt": "old"}
        assert {"name", "day", "fail"} <= json.loads(wrong.message)["details"].keys()
        assert adopted.description == "Save a note."
        assert adopted.parameters["properties"]["name"]["description"] == "The file."

    def test_a_call_that_needs_approval_is_suspended(self, place: Path) -> None:
        def erase() -> str:
            """Erase everything."""
            return "erased"

        with ToolRegistry([adopt(PydanticTool(erase, requires_approval=True))]) as tools:
            with pytest.raises(ApprovalRequired):
                tools.execute("erase", {}, call_id="c1")
            done = tools.execute("erase", {}, call_id="c1", approval=Approval(True, by="ann"))

        assert done.value == "erased"

    def test_an_agent_can_be_offered_it_as_ours(self, place: Path) -> None:
        def count(words: str) -> int:
            """Count words."""
            return len(words.split())

        with Wink(place, tools=[PydanticTool(count)]) as wink:
            model = script([("c1", "count", {"words": "a b c"})], "done")
            history = Agent(model, capabilities=[wink]).run_sync("go").all_messages()

        assert told(history, "c1").content == "3"


def wink_undo(place: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as ended:
        wink_main(["undo", "--workspace", str(place)])
    assert not ended.value.code


def test_the_invoice_desk_runs_unchanged_inside_an_agent():
    run_invoice_desk("pydantic_ai")
