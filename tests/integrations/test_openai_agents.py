# ruff: noqa: E402 (without the framework, nothing below can be imported)
"""openai-agents: the shared cases, and what is special about it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cases import (
    Case,
    Driver,
    Job,
    Outcome,
    Stage,
    all_cases,
    require,
    run_invoice_desk,
    run_on_loop,
    save,
    until,
)

require("agents")

from agents import (
    Agent,
    AgentHooks,
    ApplyPatchResult,
    ApplyPatchTool,
    CustomTool,
    FunctionTool,
    RunContextWrapper,
    Runner,
    RunState,
    ShellTool,
    ToolOutputText,
    UserError,
    function_tool,
    set_tracing_disabled,
    tool_namespace,
)
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call
from openai.types.responses import ResponseCustomToolCall, ResponseFunctionShellToolCall

from weakincentives import Tool, ToolContext, ToolRegistry, tool
from weakincentives.core.media import Media
from weakincentives.errors import ToolDefinitionError
from weakincentives.integrations import adopt
from weakincentives.integrations.openai_agents import Wink
from weakincentives.prompt import ApprovalPolicy, ReadBeforeWritePolicy

set_tracing_disabled(True)  # it would be sent to the provider


class OpenAIAgents(Driver):
    name = "openai-agents"
    limits: ClassVar = {
        "an_own_tool_that_pauses_the_agent_is_suspended": (
            "a tool cannot pause the agent; only needs_approval can"
        ),
        "cancelling_one_call_leaves_the_others": "a run can be cancelled, a single call cannot",
        "a_person_can_edit_the_arguments": "RunState.approve takes no other arguments",
    }

    def run(self, job: Job) -> Outcome:
        return self._played(job, None)

    def resume(self, job: Job, state: Any) -> Outcome:
        return self._played(job, state)

    def _played(self, job: Job, state: str | None) -> Outcome:
        done = Outcome()
        try:
            run_on_loop(_play(job, state, done), job.cancel_when)
        except (Exception, asyncio.CancelledError) as error:
            done.error = error
        return done


def _model(turns: Sequence[Any]) -> ScriptedModel:
    return ScriptedModel(
        [
            [assistant_message(turn)]
            if isinstance(turn, str)
            else [function_call(ask.tool, ask.arguments, call_id=ask.id) for ask in turn]
            for turn in turns
        ]
    )


async def _play(job: Job, state: str | None, done: Outcome) -> None:
    model = _model(job.turns)
    wink = Wink(
        job.workspace, tools=job.tools, policies=job.policies, title="cases", run=job.run or None
    )
    own = [
        function_tool(each, failure_error_function=lambda _, error: f"It failed: {error}")
        for each in job.own
    ]
    agent = wink.cover(Agent(name="Tester", model=model, tools=[*wink.tools(), *own]))
    given: Any = "go" if state is None else await RunState.from_string(agent, state)
    with wink:
        while True:
            if isinstance(given, RunState):
                for item in given.get_interruptions():
                    if item.call_id in job.answers:
                        answer = job.answers[item.call_id].given()
                        if answer.approved:
                            wink.approve(given, item, by=answer.by)
                        else:
                            wink.reject(given, item, answer.reason, by=answer.by)
            result = await Runner.run(agent, given)
            for item in result.interruptions:
                shown = [each.describe(10_000) for each in wink.requests(item)]
                done.questions[item.call_id or ""] = "\n".join(shown) or str(item.arguments)
            _look(result, model, done)
            given = result.to_state()
            if not any(item.call_id in job.answers for item in result.interruptions):
                break
    done.text = str(result.final_output or "")
    done.state = given.to_string() if result.interruptions else None


def _look(result: Any, model: ScriptedModel, done: Outcome) -> None:
    for item in result.to_input_list():
        if item.get("type") == "function_call_output":
            done.answers[item["call_id"]] = item["output"]
    for each in model.calls[-1].tools if model.calls else ():
        if isinstance(each, FunctionTool):
            shown = {"description": each.description, "schema": each.params_json_schema}
            done.tools[each.name] = shown


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(OpenAIAgents, tmp_path)


# What is special


class Project(Stage):
    """A workspace, and agents in it with a scripted model."""

    def __init__(self, place: Path) -> None:
        super().__init__(OpenAIAgents, place)

    def agent(self, wink: Wink, *turns: Any, tools: Sequence[Any] = (), **options: Any) -> Any:
        self.model = ScriptedModel([*turns, [assistant_message("done")]])
        options = {"name": "Tester", "model": self.model, **options}
        return wink.cover(Agent(tools=[*wink.tools(), *tools], **options))

    def outcomes(self) -> list[tuple[str, str]]:
        return [(each["tool"], each["outcome"]) for each in self.records()]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    place = tmp_path / "project"
    place.mkdir()
    return Project(place)


def run(agent: Any, given: Any = "go", **options: Any) -> Any:
    return asyncio.run(Runner.run(agent, given, **options))


def resume(agent: Any, text: str) -> RunState[Any, Any]:
    return asyncio.run(RunState.from_string(agent, text))


def told(result: Any) -> dict[str, Any]:
    """Return what the model was told, by call id."""
    items = [each for each in result.to_input_list() if each.get("type", "").endswith("_output")]
    return {each["call_id"]: each.get("output", "") for each in items}


def shell_call(call_id: str, *commands: str) -> Any:
    action = {"commands": list(commands), "timeout_ms": None, "max_output_length": None}
    return ResponseFunctionShellToolCall.model_validate(
        {"id": call_id, "call_id": call_id, "type": "shell_call", "action": action}
        | {"status": "completed"}
    )


def patch(call_id: str, kind: str, path: str, diff: str | None = None, **more: str) -> Any:
    operation = {"type": kind, "path": path, **({} if diff is None else {"diff": diff}), **more}
    return {"type": "apply_patch_call", "call_id": call_id, "operation": operation}


def spoil(project: Project, **options: Any) -> FunctionTool:
    @function_tool(**options)
    def spoil(name: str) -> str:
        """Write a file, then fail."""
        (project.workspace / "a.txt").write_text(f"spoiled by {name}")
        raise ValueError("no luck")

    return spoil


def test_an_exception_that_the_framework_swallows_is_a_failure(project: Project) -> None:
    """The model is told what the framework says; the call is rolled back, and on record as that."""
    project.write("a.txt", b"a")
    call = function_call("spoil", {"name": "me"}, call_id="c1")

    with Wink(project.workspace, tools=[]) as wink:
        result = run(project.agent(wink, [call], tools=[spoil(project)]))

    alone = Agent(
        name="Alone",
        model=ScriptedModel([[call], [assistant_message("done")]]),
        tools=[spoil(project)],
    )
    assert project.read("a.txt") == "a"
    assert told(result) == told(run(alone))
    assert project.record("spoil")["outcome"] == "rolled back"
    assert "no luck" in project.record("spoil")["result"]
    assert project.read("a.txt") == "spoiled by me"  # without us


def test_an_exception_that_the_framework_raises_is_raised(project: Project) -> None:
    """A tool that fails the run still does, and is rolled back."""
    project.write("a.txt", b"a")
    call = function_call("spoil", {"name": "me"}, call_id="c1")
    raising = spoil(project, failure_error_function=None)

    with Wink(project.workspace, tools=[]) as wink, pytest.raises(UserError, match="no luck"):
        run(project.agent(wink, [call], tools=[raising]))

    assert project.read("a.txt") == "a"
    assert project.record("spoil")["outcome"] == "rolled back"


def test_what_a_tool_returns_reaches_the_framework_unchanged(project: Project) -> None:
    """The framework gets the same objects as without us; the record has their text."""
    returned = ToolOutputText(text="hello")
    seen: list[object] = []

    @function_tool
    def greet() -> Any:
        """Greet."""
        return returned

    class Hooks(AgentHooks[Any]):
        async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: object) -> None:
            seen.append(result)

        async def on_llm_start(self, *_: Any) -> None:
            seen.append("asked")

    with Wink(project.workspace, tools=[]) as wink:
        call = function_call("greet", {}, call_id="c1")
        run(project.agent(wink, [call], tools=[greet], hooks=Hooks()))

    assert seen == ["asked", returned, "asked"]
    assert seen[1] is returned
    assert "hello" in project.record("greet")["result"]


def test_the_frameworks_timeout_rolls_back(project: Project) -> None:
    """A tool that exceeds its timeout is rolled back; the model is told what it would be."""
    project.write("a.txt", b"a")

    @function_tool(timeout=2.0)
    async def stall() -> str:
        """Write a file, then wait."""
        (project.workspace / "a.txt").write_text("half")
        await until(lambda: False)
        return "never seen"

    with Wink(project.workspace, tools=[]) as wink:
        call = function_call("stall", {}, call_id="c1")
        result = run(project.agent(wink, [call], tools=[stall]))

    assert "timed out" in told(result)["c1"]
    assert project.read("a.txt") == "a"
    assert project.record("stall")["outcome"] == "rolled back"


def test_reading_tools_of_the_agent_run_concurrently(project: Project) -> None:
    """Own tools that are said to read only do not wait for each other."""
    inside: set[int] = set()

    @function_tool
    async def meet(number: int) -> str:
        """Wait for the others."""
        inside.add(number)
        await until(lambda: len(inside) == 3)
        return f"met {len(inside)}"

    wink = Wink(project.workspace, tools=[])
    model = ScriptedModel(
        [
            [function_call("meet", {"number": n}, call_id=f"c{n}") for n in range(3)],
            [assistant_message("done")],
        ]
    )
    with wink:
        agent = wink.cover(Agent(name="Reader", model=model, tools=[meet]), reads=["meet"])
        assert set(told(run(agent)).values()) == {"met 3"}


def test_covering_twice_changes_nothing_more(project: Project) -> None:
    """A call of an agent that was covered twice is one call."""
    project.write("a.txt", b"a")
    with Wink(project.workspace, tools=[save]) as wink:
        agent = project.agent(
            wink, [function_call("spoil", {"name": "me"}, call_id="c1")], tools=[spoil(project)]
        )
        run(wink.cover(agent))

    assert project.outcomes() == [("spoil", "rolled back")]


def test_the_rest_of_a_long_result_can_be_read(project: Project) -> None:
    """A result is shortened; the model reads the rest with the tool that its end names."""

    @tool(reach="read", max_result_chars=1000)
    def recite() -> str:
        """Recite."""
        return "".join(f"line {n}\n" for n in range(1000))

    def rest(call: Any) -> Any:
        shortened = call.input[-1]["output"]
        call_id = shortened.rpartition('call_id="')[2].partition('"')[0]
        arguments = {"call_id": call_id, "offset": len("".join(f"line {n}\n" for n in range(900)))}
        return [function_call("read_result", arguments, call_id="c2")]

    with Wink(project.workspace, tools=[recite]) as wink:
        agent = project.agent(
            wink, [function_call("recite", {}, call_id="c1")], ModelStep.respond(rest)
        )
        answers = told(run(agent))

    assert "line 900" not in answers["c1"]
    assert answers["c2"].startswith("line 900\n")


def test_pictures_reach_the_model(project: Project) -> None:
    """Media of a result are given to the framework as such."""

    @tool(reach="read")
    def draw() -> Media:
        """Draw."""
        return Media(b"GIF89a...", name="plot.gif")

    with Wink(project.workspace, tools=[draw]) as wink:
        result = run(project.agent(wink, [function_call("draw", {}, call_id="c1")]))

    text, picture = told(result)["c1"]
    assert "plot.gif" in text["text"]
    assert picture["image_url"].startswith("data:image/gif;base64,")


# Denials


@function_tool(needs_approval=True)
def deploy(target: str) -> str:
    """Deploy."""
    return f"deployed to {target}"


def test_a_plain_rejection_is_on_record(project: Project) -> None:
    """A denial through RunState is recorded when the run resumes, in another process too."""
    call = function_call("deploy", {"target": "prod"}, call_id="c1")
    with Wink(project.workspace, tools=[], run="job") as wink:
        stored = run(project.agent(wink, [call], tools=[deploy])).to_state().to_string()

    with Wink(project.workspace, tools=[], run="job") as wink:
        agent = project.agent(wink, tools=[deploy])
        state = resume(agent, stored)
        state.reject(state.get_interruptions()[0], rejection_message="not on a Friday")
        result = run(agent, state)

    assert told(result)["c1"] == "not on a Friday"
    record = project.record("deploy")
    assert record["outcome"] == "denied"
    assert "not on a Friday" in record["result"]


def test_a_standing_rejection_is_on_record_for_every_call(project: Project) -> None:
    """Calls that the framework denies by itself, because a person said never, are recorded."""
    with Wink(project.workspace, tools=[]) as wink:
        agent = project.agent(
            wink,
            [function_call("deploy", {"target": "test"}, call_id="c1")],
            [function_call("deploy", {"target": "prod"}, call_id="c2")],
            tools=[deploy],
        )
        state = run(agent).to_state()
        wink.reject(state, state.get_interruptions()[0], "never", by="ann", always=True)
        result = run(agent, state)

    assert result.final_output == "done"
    assert project.outcomes() == [("deploy", "denied")] * 2
    assert "ann" in project.records()[0]["result"]


def test_a_standing_approval_is_for_one_agent(project: Project) -> None:
    """What one agent may always do, another asks for; both may do it then."""
    policy = ApprovalPolicy(tools={"save"})

    def writing(*names: str) -> list[Any]:
        return [
            [function_call("save", {"path": each, "text": each}, call_id=each)] for each in names
        ]

    with Wink(project.workspace, tools=[save], policies=[policy]) as wink:
        second = project.agent(wink, *writing("c", "d"), name="Second")
        hand_over = [function_call("transfer_to_second", {}, call_id="h")]
        agent = project.agent(wink, *writing("a", "b"), hand_over, handoffs=[second])
        asked: list[str] = []
        result = run(agent)
        while result.interruptions:
            state = result.to_state()
            asked += [each.call_id for each in result.interruptions]
            wink.approve(state, state.get_interruptions()[0], by="ann", always=True)
            result = run(agent, state)

    assert asked == ["a", "c"]
    assert [project.read(each) for each in "abcd"] == [*"abcd"]


@pytest.mark.parametrize("approved", [True, False])
def test_tools_in_a_namespace_can_need_approval(project: Project, approved: bool) -> None:
    """A tool that the framework knows by a qualified name is approved and denied as others are."""

    @function_tool
    def publish(title: str) -> str:
        """Publish a page."""
        return f"published {title}"

    (tools,) = tool_namespace(name="site", description="The site.", tools=[publish])
    call = function_call("publish", {"title": "a"}, call_id="c1", namespace="site")
    with Wink(project.workspace, tools=[], policies=[ApprovalPolicy(tools={"publish"})]) as wink:
        agent = project.agent(wink, [call], tools=[tools])
        state = run(agent).to_state()
        (item,) = state.get_interruptions()
        if approved:
            wink.approve(state, item, by="ann")
        else:
            wink.reject(state, item, "no", by="ann")
        result = run(agent, state)

    assert told(result)["c1"] == ("published a" if approved else "no")
    assert [each["outcome"] for each in project.records()][1:] == ["ok" if approved else "denied"]
    assert "ann" in str(project.records()[-1])


def test_never_again_does_not_deny_what_ran_before(project: Project) -> None:
    """Calls of an earlier run in the conversation are not taken for denied ones."""
    ran = {"type": "function_call", "name": "deploy", "call_id": "c0", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c0", "output": "deployed"}
    history: Any = [ran, output, {"role": "user", "content": "again"}]
    with Wink(project.workspace, tools=[]) as wink:
        call = function_call("deploy", {"target": "test"}, call_id="c1")
        agent = project.agent(wink, [call], tools=[deploy])
        state = run(agent, history).to_state()
        wink.reject(state, state.get_interruptions()[0], by="ann", always=True)
        run(agent, state)

    assert project.record("deploy")["call_id"].endswith("c1")


def test_a_denial_is_on_record_once(project: Project) -> None:
    """The later turns of a run do not record it again, nor does a run that continues it."""
    history: Any
    with Wink(project.workspace, tools=[save], run="job") as wink:
        agent = project.agent(
            wink,
            [function_call("deploy", {"target": "test"}, call_id="c1")],
            [function_call("save", {"path": "a.txt", "text": "a"}, call_id="c2")],
            tools=[deploy],
        )
        state = run(agent).to_state()
        state.reject(state.get_interruptions()[0])
        result = run(agent, state)
        history = result.to_input_list()
        run(project.agent(wink, tools=[deploy]), [*history, {"role": "user", "content": "more"}])

    assert project.outcomes() == [("deploy", "denied"), ("save", "committed")]


# Shell and editor


def test_each_command_of_the_shell_is_a_transaction(project: Project) -> None:
    """A command that fails is undone; those before and after it in the same call stay."""
    project.write("a.txt", b"a")
    commands = ("echo one > one.txt", "echo bad > a.txt; exit 3", "cat a.txt")
    with Wink(project.workspace, tools=[]) as wink:
        agent = project.agent(wink, [shell_call("s1", *commands)], tools=[wink.shell()])
        first, second, third = told(run(agent))["s1"]

    assert project.read("one.txt") == "one\n"
    assert project.read("a.txt") == "a"
    assert first["outcome"] == {"type": "exit", "exit_code": 0}
    assert second["outcome"] == {"type": "exit", "exit_code": 3}
    assert "undone" in second["stderr"]
    assert third["stdout"] == "a"
    assert [each for _, each in project.outcomes()] == ["committed", "rolled back", "ok"]


def test_a_shell_call_is_approved_as_a_whole(project: Project) -> None:
    """A person sees every command; approved, all run; denied, each is on record."""
    policy = ApprovalPolicy(tools={"shell_execute"})
    with Wink(project.workspace, tools=[], policies=[policy]) as wink:
        agent = project.agent(
            wink,
            [shell_call("s1", "echo 1 > a.txt", "echo 2 > b.txt")],
            [shell_call("s2", "rm a.txt", "rm b.txt")],
            tools=[wink.shell()],
        )
        first = run(agent)
        state = first.to_state()
        asked = wink.requests(first.interruptions[0])
        wink.approve(state, first.interruptions[0], by="ann")
        second = run(agent, state)
        state = second.to_state()
        wink.reject(state, second.interruptions[0], "keep them", by="ann")
        third = run(agent, state)

    assert [each.arguments["command"] for each in asked] == ["echo 1 > a.txt", "echo 2 > b.txt"]
    assert (project.read("a.txt"), project.read("b.txt")) == ("1\n", "2\n")
    assert third.final_output == "done"
    ended = [each for each in project.records() if each["outcome"] != "suspended"]
    assert [each["outcome"] for each in ended] == ["committed"] * 2 + ["denied"] * 2
    assert all("ann" in str(each) for each in ended)


def test_the_editor_changes_the_workspace(project: Project) -> None:
    """Each operation is a call; one that fails changes nothing, and the model is told why."""
    project.write("a.txt", b"one\r\ntwo\r\n")
    project.write("b.txt", b"b\n")
    with Wink(project.workspace, tools=[]) as wink:
        agent = project.agent(
            wink,
            [
                patch("p1", "update_file", "a.txt", "@@\n one\n-two\n+2\n"),
                patch("p2", "update_file", "a.txt", "@@\n-nothing like it\n+x\n"),
                patch("p3", "create_file", "new/c.txt", "+c\n+d"),
                patch("p4", "create_file", "b.txt", "+c"),
                patch("p5", "delete_file", "b.txt"),
            ],
            tools=[wink.editor()],
        )
        answers = told(run(agent))

    assert (project.workspace / "a.txt").read_bytes() == b"one\r\n2\r\n"
    assert project.read("new/c.txt") == "c\nd"
    assert not project.has("b.txt")
    assert "does not fit" in answers["p2"]
    assert "exists already" in answers["p4"]
    kept, undone = "committed", "rolled back"
    assert project.outcomes() == [
        ("edit_file", kept),
        ("edit_file", undone),
        ("write_file", kept),
        ("write_file", undone),
        ("delete_file", kept),
    ]
    project.wink("undo")
    assert (project.workspace / "a.txt").read_bytes() == b"one\r\ntwo\r\n"


def test_the_editor_moves_a_file(project: Project) -> None:
    """An update with a new path is one call."""
    project.write("a.txt", b"one\n")
    project.write("there.txt", b"there\n")
    diff = "@@\n-one\n+1\n"
    with Wink(project.workspace, tools=[]) as wink:
        agent = project.agent(
            wink,
            [patch("p1", "update_file", "a.txt", diff, move_to="there.txt")],
            [patch("p2", "update_file", "a.txt", diff, move_to="b.txt")],
            tools=[wink.editor()],
        )
        run(agent)

    assert project.outcomes() == [("edit_file", "rolled back"), ("edit_file", "committed")]
    assert (project.read("b.txt"), project.read("there.txt")) == ("1\n", "there\n")
    assert not project.has("a.txt")


def test_policies_for_our_file_tools_hold_for_the_editor(project: Project) -> None:
    """Read before write: a patch of a file that was not read is refused."""
    project.write("a.txt", b"one\n")
    with Wink(project.workspace, tools=[], policies=[ReadBeforeWritePolicy()]) as wink:
        agent = project.agent(
            wink,
            [patch("p1", "update_file", "a.txt", "@@\n-one\n+1\n")],
            tools=[wink.editor()],
        )
        assert "without reading it first" in told(run(agent))["p1"]

    assert project.read("a.txt") == "one\n"


def test_nobody_is_asked_about_a_patch_that_does_not_fit(project: Project) -> None:
    """It is refused at once, and the model is told why."""
    project.write("a.txt", b"one\n")
    policies = [ApprovalPolicy(tools={"edit_file"})]
    with Wink(project.workspace, tools=[], policies=policies) as wink:
        agent = project.agent(
            wink,
            [patch("p1", "update_file", "a.txt", "@@\n-two\n+2\n")],
            tools=[wink.editor()],
        )
        result = run(agent)

    assert result.interruptions == []
    assert "does not fit" in told(result)["p1"]


@pytest.mark.parametrize("approved", [True, False])
def test_an_operation_of_the_editor_can_need_approval(project: Project, approved: bool) -> None:
    """Approved in another process, it runs once, also if that is repeated after a crash."""
    project.write("a.txt", b"one\n")
    options: Any = {
        "tools": [],
        "policies": [ApprovalPolicy(tools={"edit_file"})],
        "run": "job",
    }
    again = patch("p0", "update_file", "a.txt", "@@\n one\n+one\n")
    with Wink(project.workspace, **options) as wink:
        first = run(project.agent(wink, [again], tools=[wink.editor()]))
        (request,) = wink.requests(first.interruptions[0])
        stored = first.to_state().to_string()

    for _ in range(2):
        with Wink(project.workspace, **options) as wink:
            agent = project.agent(wink, tools=[wink.editor()])
            state = resume(agent, stored)
            if approved:
                wink.approve(state, state.get_interruptions()[0], by="ann")
            else:
                wink.reject(state, state.get_interruptions()[0], "leave it", by="ann")
            done = run(agent, state)

    assert "+one" in request.describe(1000)
    assert project.read("a.txt") == ("one\none\n" if approved else "one\n")
    assert ("Updated" if approved else "leave it") in told(done)["p0"]
    ended = [each for each in project.records() if each["outcome"] != "suspended"]
    assert [each["outcome"] for each in ended] == ["committed" if approved else "denied"]
    assert "ann" in str(ended[0])


def test_the_agents_own_shell_editor_and_custom_tool_are_covered(project: Project) -> None:
    """What they do is rolled back when they raise, or say that they failed."""
    project.write("a.txt", b"a")

    def write(text: str) -> None:
        (project.workspace / "a.txt").write_text(text)

    async def execute(request: Any) -> str:
        write("by the shell")
        raise OSError("no shell")

    class Editor:
        def create_file(self, operation: Any) -> ApplyPatchResult:
            write("by the editor")
            return ApplyPatchResult(status="failed", output="no editor")

        update_file = delete_file = create_file

    async def shout(context: Any, text: str) -> str:
        write(text)
        raise ValueError("too loud")

    custom = ResponseCustomToolCall(
        id="c1", call_id="c1", type="custom_tool_call", name="shout", input="hey"
    )
    with Wink(project.workspace, tools=[]) as wink:
        agent = project.agent(
            wink,
            [shell_call("s1", "x"), patch("p1", "delete_file", "a.txt"), custom],
            tools=[
                ShellTool(executor=execute),
                ApplyPatchTool(editor=Editor()),
                CustomTool(name="shout", description="Shout.", on_invoke_tool=shout),
            ],
        )
        answers = told(run(agent))

    assert project.read("a.txt") == "a"
    assert "no shell" in str(answers["s1"])
    assert answers["p1"] == "no editor"
    assert answers["c1"] == "too loud"
    assert sorted(project.outcomes()) == [
        ("apply_patch", "rolled back"),
        ("shell", "rolled back"),
        ("shout", "rolled back"),
    ]


# Ways to run an agent


def test_streamed_and_sync_runs(project: Project) -> None:
    """Calls work from every way to run an agent, one after the other on one Wink."""
    call = function_call("save", {"path": "a.txt", "text": "a"}, call_id="c1")
    other = function_call("save", {"path": "b.txt", "text": "b"}, call_id="c2")

    async def stream(agent: Any) -> str:
        streamed = Runner.run_streamed(agent, "go")
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output

    with Wink(project.workspace, tools=[save]) as wink:
        assert asyncio.run(stream(project.agent(wink, [call]))) == "done"
        assert Runner.run_sync(project.agent(wink, [other]), "go").final_output == "done"
        asyncio.get_event_loop_policy().get_event_loop().close()  # run_sync leaves it open

    assert (project.read("a.txt"), project.read("b.txt")) == ("a", "b")
    assert len({each["run"] for each in project.records()}) == 1


def test_a_cancelled_stream_rolls_back(project: Project) -> None:
    """RunResultStreaming.cancel() rolls back the call under way."""
    started = threading.Event()

    @tool(reach="reversible")
    async def linger(*, context: ToolContext) -> str:
        """Write, then wait."""
        context.filesystem.write("half.txt", "half")
        started.set()
        await until(lambda: False)
        return "never seen"

    async def stream(agent: Any) -> None:
        streamed = Runner.run_streamed(agent, "go")

        async def watch() -> None:
            await until(started.is_set)
            streamed.cancel()

        watching = asyncio.create_task(watch())
        async for _ in streamed.stream_events():
            pass
        await watching
        await until(lambda: not project.has("half.txt"))

    with Wink(project.workspace, tools=[linger]) as wink:
        asyncio.run(stream(project.agent(wink, [function_call("linger", {}, call_id="c1")])))

    assert not project.has("half.txt")
    assert project.record("linger")["outcome"] == "rolled back"


def test_agents_that_hand_over_share_a_run(project: Project) -> None:
    """Two agents with one Wink: one run, one record, one workspace."""
    with Wink(project.workspace, tools=[save]) as wink:
        second = project.agent(
            wink,
            [function_call("save", {"path": "b.txt", "text": "b"}, call_id="c3")],
            name="Second",
        )
        first = project.agent(
            wink,
            [function_call("save", {"path": "a.txt", "text": "a"}, call_id="c1")],
            [function_call("transfer_to_second", {}, call_id="c2")],
            handoffs=[second],
        )
        result = run(first)

    assert result.last_agent.name == "Second"
    assert project.outcomes() == [("save", "committed")] * 2
    assert len({each["run"] for each in project.records()}) == 1


def test_an_agent_as_a_tool_has_calls_of_its_own(project: Project) -> None:
    """What a nested agent calls is rolled back or kept call by call, and can need approval."""
    project.write("a.txt", b"a")
    policy = ApprovalPolicy(tools={"save"})
    with Wink(project.workspace, tools=[save], policies=[policy]) as wink:
        helper = project.agent(
            wink,
            [function_call("spoil", {"name": "me"}, call_id="n1")],
            [function_call("save", {"path": "b.txt", "text": "b"}, call_id="n2")],
            tools=[spoil(project)],
            name="Helper",
        )
        agent = project.agent(
            wink,
            [function_call("help", {"input": "do it"}, call_id="c1")],
            tools=[helper.as_tool("help", "Get help.")],
        )
        state = run(agent).to_state()
        (item,) = state.get_interruptions()
        wink.approve(state, item, by="ann")
        result = run(agent, state)

    assert result.final_output == "done"
    assert (project.read("a.txt"), project.read("b.txt")) == ("a", "b")
    ended = [each for each in project.outcomes() if each[1] != "suspended"]
    assert ended == [("spoil", "rolled back"), ("save", "committed")]


def test_the_workspace_may_depend_on_the_run(project: Project) -> None:
    """A function of the RunContextWrapper says where a run works."""

    def place(context: RunContextWrapper[str] | None) -> Path:
        return project.workspace / (context.context if context else "")

    for name in ("one", "two"):
        (project.workspace / name).mkdir()
    call = function_call("save", {"path": "a.txt", "text": "a"}, call_id="c1")
    with Wink(place, tools=[save]) as wink:
        run(project.agent(wink, [call]), context="one")
        run(project.agent(wink, [call]), context="two")

    assert project.read("one/a.txt") == project.read("two/a.txt") == "a"


def test_between_runs_others_can_work_on_the_directory(project: Project) -> None:
    """After release(), `wink undo` works; the next call continues the run."""
    with Wink(project.workspace, tools=[save], run="job") as wink:
        run(
            project.agent(
                wink, [function_call("save", {"path": "a.txt", "text": "a"}, call_id="c1")]
            )
        )
        wink.release()
        project.wink("undo")
        assert not project.has("a.txt")
        run(
            project.agent(
                wink, [function_call("save", {"path": "b.txt", "text": "b"}, call_id="c2")]
            )
        )

    assert project.read("b.txt") == "b"
    assert len({each["run"] for each in project.records("save")}) == 1


def test_a_run_is_resumed_by_another_process(project: Project) -> None:
    """A RunState that was stored as JSON continues in a new interpreter."""
    project.write("a.txt", b"a")
    script = Path(__file__).with_name("openai_agents_process.py")
    state = project.workspace.parent / "state.json"

    for part in ("start", "finish", "finish"):
        command = [sys.executable, str(script), part, str(project.workspace), str(state)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    assert done.stdout.splitlines() == ["appended", "denied: not needed", "done"]
    assert project.read("a.txt") == "a+b"
    ended = [each for each in project.outcomes() if each[1] != "suspended"]
    assert ended == [("append", "committed"), ("append", "denied")]


# Their tools in our registry


def test_a_function_tool_can_be_adopted(project: Project) -> None:
    """A FunctionTool is one of our tools: its schema, its context, rolled back on failure."""
    project.write("a.txt", b"a")

    @function_tool
    def lookup(context: RunContextWrapper[dict[str, str]], key: str) -> str:
        """Look up a value."""
        return context.context[key]

    tools = ToolRegistry(
        [adopt(lookup, context={"k": "v"}, reach="read", writes="api"), adopt(spoil(project))],
        workspace=project.workspace,
    )
    with tools:
        found = tools.execute("lookup", {"key": "k"})
        wrong = tools.execute("lookup", {"kee": 1})
        failed = tools.execute("spoil", {"name": "me"})

    assert found.render() == "v"
    assert "kee" in wrong.message
    assert "key" in wrong.message
    assert not failed.success
    assert "no luck" in failed.message
    assert project.read("a.txt") == "a"


def test_a_tool_with_rules_of_the_framework_is_not_adopted() -> None:
    """Its approval would silently be lost."""
    with pytest.raises(ToolDefinitionError, match="needs_approval"):
        adopt(deploy)


def test_an_adopted_tool_can_be_offered_again(project: Project) -> None:
    """Wink takes a FunctionTool where it takes our tools."""
    project.write("a.txt", b"a")
    with Wink(project.workspace, tools=[spoil(project), save]) as wink:
        assert all(isinstance(each, Tool) for each in wink.bridge.tools)
        run(project.agent(wink, [function_call("spoil", {"name": "x"}, call_id="c1")]))

    assert project.read("a.txt") == "a"


def test_the_invoice_desk_runs_unchanged_inside_an_agent() -> None:
    run_invoice_desk("openai_agents")
