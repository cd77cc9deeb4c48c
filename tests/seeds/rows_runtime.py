"""The Runtime spec, row by row."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass, fields
from typing import Any

import pytest
from seed_names import noop_tool, tool_of
from seed_rows import Row, promise, seed_rows
from seed_scenarios import Model

from weakincentives.adapters import ScriptedAdapter, calls
from weakincentives.core.budget import Budget, BudgetTracker
from weakincentives.core.deadlines import Deadline, Heartbeat
from weakincentives.errors import (
    DeadlineExceededError,
    PromptEvaluationError,
    PromptOverrideError,
    PromptValidationError,
    ToolDefinitionError,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from weakincentives.filesystem import Filesystem
from weakincentives.prompt import (
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptOverrides,
    PromptTemplate,
    SectionOverride,
    TextOverride,
    Tool,
    ToolContext,
    ToolExample,
    ToolOverride,
    ToolResult,
)
from weakincentives.runtime import (
    RunContext,
    Session,
    ToolCall,
    ToolInvoked,
    aexecute_tool,
    execute_tool,
)
from weakincentives.testing import FakeClock, make_context, make_vfs


@dataclass(frozen=True)
class Params:
    topic: str = ""


@dataclass(frozen=True)
class Result:
    text: str = ""


@dataclass(frozen=True)
class Step:
    name: str


def answer(params: Params, *, context: ToolContext) -> ToolResult[Result]:
    return ToolResult.ok(Result(params.topic), message="answered")


def declare(**options: Any) -> Tool[Params, Result]:
    fields = {"name": "t", "description": "d", "handler": answer, **options}
    return Tool[Params, Result](**fields)


# Core schemas


@promise("002", "places")
def places(row: Row) -> None:
    """Found at the module that the spec names, the one definition, and public for type checkers."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    import weakincentives.prompt as package

    module = "weakincentives." + row.cells[0].removesuffix(".py").replace("/", ".")
    found = getattr(importlib.import_module(module), row.name)
    assert found is getattr(package, row.name)
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    exported = {
        each.name if isinstance(each, ast.ClassDef) else alias.asname
        for each in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef | ast.ImportFrom)
        for alias in (each.names if isinstance(each, ast.ImportFrom) else (None,))
    }
    # In a typed package, an import is public only `as` itself.
    assert row.name in exported


@promise("002", "Tool", "name")
def names(row: Row) -> None:
    assert row.cells == ("^[a-z0-9_-]{1,64}$",)
    for good in ("a", "read_file", "web-2", "x" * 64):
        assert declare(name=good).name == good
    for bad in ("", "Read", "web:scrape", "a b", "é", "x" * 65, "a\n"):
        with pytest.raises(ToolDefinitionError, match="must match"):
            declare(name=bad)


@promise("002", "Tool", "description")
def descriptions(row: Row) -> None:
    assert row.cells == ("1-200 chars",)
    for good in ("d", "d" * 200):
        assert declare(description=good).description == good
    for bad in ("", "  ", "d" * 201):
        with pytest.raises(ToolDefinitionError, match="description"):
            declare(description=bad)


@promise("002", "Tool", "handler")
def handlers(row: Row) -> None:
    """None is a tool that the provider runs."""
    assert declare()({"topic": "files"}, context=make_context()).value == Result("files")
    provided = declare(handler=None)({"topic": "files"}, context=make_context())
    assert "run by the provider" in provided.message
    with pytest.raises(ToolDefinitionError, match="not callable"):
        declare(handler="answer")


@promise("002", "Tool", "accepts_overrides")
def overridable_descriptions(row: Row) -> None:
    """A description can be replaced, unless the tool says that it cannot."""
    for accepts in (True, False):
        section = MarkdownSection(
            title="Guide", key="guide", tools=[declare(accepts_overrides=accepts)]
        )
        template = PromptTemplate(ns="n", key="k", sections=[section])
        text = ToolOverride(description=TextOverride.of("d", "better"))
        overrides = PromptOverrides(
            ns="n", key="k", tag="new", sections={"guide": SectionOverride(tools={"t": text})}
        )
        if accepts:
            (tool,) = Prompt(template, overrides=overrides).render().tools
            assert tool.description == "better"
        else:
            with pytest.raises(PromptOverrideError, match="no tool 't' that can be overridden"):
                Prompt(template, overrides=overrides).render()


@promise("002", "Tool", "examples")
def examples(row: Row) -> None:
    example = ToolExample("About files", Params("files"), Result("a text"))
    assert declare(examples=[example]).examples == (example,)
    assert declare().examples == ()


@promise("002", "ToolResult", "message")
def message_for_the_model(row: Row) -> None:
    """The provider is sent it, as the answer to the call."""
    adapter = ScriptedAdapter([calls(("t", {"topic": "files"})), lambda r: r.messages[-1].text])
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="T", tools=[declare()])]))
    assert adapter.evaluate(prompt, Session()).text.startswith("answered\n")


@promise("002", "ToolResult", "value")
def typed_payload(row: Row) -> None:
    assert ToolResult("m").value is None
    assert declare()({"topic": "x"}, context=make_context()).value == Result("x")


@promise("002", "ToolResult", "success")
def success_or_failure(row: Row) -> None:
    for success in (True, False):
        context = make_context()
        result = ending(lambda context: ToolResult("m", success=success))(context=context)  # noqa: B023
        assert result.success is success
        assert (result.failure is None) is success
        assert context.filesystem.exists("trace.txt") is success


@promise("002", "ToolResult", "exclude_value_from_context")
def hidden_value(row: Row) -> None:
    """The provider is not sent it; the record has it."""
    hidden = ToolResult("Read it", Result("secret"), exclude_value_from_context=True)
    tool = tool_of(lambda params, *, context: hidden, "read", None, Result)
    adapter = ScriptedAdapter([calls("read"), lambda request: request.messages[-1].text])
    session = Session()
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="T", tools=[tool])]))
    assert adapter.evaluate(prompt, session).text == "Read it"
    assert session[ToolInvoked].all()[0].result.value == Result("secret")


@promise("002", "ToolResult", "ToolResult.ok(value, message) - Success")
def factory_of_successes(row: Row) -> None:
    made = ToolResult.ok(Result("x"), "done")
    assert (made.success, made.value, made.message) == (True, Result("x"), "done")


@promise("002", "ToolResult", "ToolResult.error(message) - Failure")
def factory_of_failures(row: Row) -> None:
    made = ToolResult.error("no")
    assert (made.success, made.value, made.message) == (False, None, "no")


def seen_by_a_tool(**options: Any) -> ToolContext:
    """Return the context that a tool gets in a run of an adapter."""
    seen: list[ToolContext] = []

    def look(params: None, *, context: ToolContext) -> ToolResult[None]:
        context.beat()
        seen.append(context)
        return ToolResult.ok()

    section = MarkdownSection(title="T", template="Look.", tools=[tool_of(look, "look")])
    prompt = Prompt(PromptTemplate(sections=[section], resources={Filesystem: make_vfs()}))
    session = options.pop("session", None) or Session()
    adapter = ScriptedAdapter([calls("look"), "Done."])
    adapter.evaluate(prompt, session, **options)
    (context,) = seen
    assert context.prompt is prompt
    assert context.adapter is adapter
    return context


@promise("002", "ToolContext", "prompt", "adapter")
def surroundings(row: Row) -> None:
    assert getattr(seen_by_a_tool(), row.name) is not None


@promise("002", "ToolContext", "rendered_prompt")
def rendered_prompt(row: Row) -> None:
    rendered = seen_by_a_tool().rendered_prompt
    assert rendered is not None
    assert "Look." in rendered.text
    assert [tool.name for tool in rendered.tools] == ["look"]


@promise("002", "ToolContext", "session")
def session_for_state(row: Row) -> None:
    """The call's view of it: "Tool handlers publish events via context.session.dispatcher"."""
    session = Session()
    heard: list[object] = []
    session.dispatcher.subscribe(Step, heard.append)
    context = seen_by_a_tool(session=session)
    assert context.session.session_id == session.session_id
    context.session.dispatcher.publish(Step("told"))
    assert heard == [Step("told")]


@promise("002", "ToolContext", "deadline")
def optional_deadline(row: Row) -> None:
    deadline = Deadline.after(60)
    assert seen_by_a_tool(deadline=deadline).deadline is deadline
    assert seen_by_a_tool().deadline is None


@promise("002", "ToolContext", "heartbeat", "beat()")
def heartbeats(row: Row) -> None:
    heartbeat = Heartbeat()
    assert seen_by_a_tool(heartbeat=heartbeat).heartbeat is heartbeat
    before = heartbeat.beats
    seen_by_a_tool(heartbeat=heartbeat).beat()  # one that it makes itself, and one from here
    assert heartbeat.beats >= before + 2
    assert seen_by_a_tool().heartbeat is None


@promise("002", "ToolContext", "run_context")
def correlation_ids(row: Row) -> None:
    ids = RunContext(run_id="r", loop_id="l", agent_id="a", trace_id="t" * 32)
    assert seen_by_a_tool(run_context=ids).run_context == ids
    made = seen_by_a_tool().run_context
    assert made is not None
    assert all((made.run_id, made.loop_id, made.agent_id, made.trace_id))


@promise("002", "ToolContext", "resources", "filesystem")
def prompt_resources(row: Row) -> None:
    fs = make_vfs({"a.txt": "a"})
    context = make_context(fs=fs)

    def read(params: None, *, context: ToolContext) -> ToolResult[None]:
        assert context.filesystem is context.resources.get(Filesystem)
        return ToolResult.ok(message=context.filesystem.read("a.txt"))

    assert tool_of(read, "read")(context=context).message == "a"

    # "Access prompt's resource context"
    prompt = Prompt(PromptTemplate(resources={Filesystem: fs}))
    own = ToolContext(session=Session(), prompt=prompt)
    assert own.resources.get(Filesystem) is own.filesystem is fs


@promise("002", "ToolContext", "budget_tracker")
def budget_shortcut(row: Row) -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=10))
    assert make_context(resources={BudgetTracker: tracker}).budget_tracker is tracker
    assert make_context().budget_tracker is None


@promise("002", "ToolExample", "description")
def short_descriptions(row: Row) -> None:
    assert row.cells == ("<=200 chars",)
    assert ToolExample("d" * 200, Params(), Result()).description == "d" * 200
    with pytest.raises(ToolDefinitionError, match="200"):
        ToolExample("d" * 201, Params(), Result())


@promise("002", "ToolExample", "input", "output")
def instances(row: Row) -> None:
    """Of the dataclasses that the tool declares, and of no others."""
    wrong: dict[str, Any] = {"input": Params(), "output": Result(), row.name: Step("x")}
    with pytest.raises(ToolDefinitionError, match=f"{row.name} of example"):
        declare(examples=[ToolExample("d", **wrong)])


# Registration


@promise("002", "Prompt Rendering", "Duplicate names -> PromptValidationError")
def duplicate_names(row: Row) -> None:
    sections = [MarkdownSection(title=title, tools=[noop_tool("same")]) for title in "AB"]
    with pytest.raises(PromptValidationError, match="same"):
        PromptTemplate(sections=sections)


@promise("002", "Prompt Rendering", "Examples against params/result dataclasses")
def checked_examples(row: Row) -> None:
    """Already when the tool is made: a prompt never sees a wrong one."""
    with pytest.raises(ToolDefinitionError, match="output of example"):
        declare(examples=[ToolExample("d", Params(), Result(text=5))])  # type: ignore[arg-type]


@promise("002", "Prompt Rendering", "Declaration order cached")
def declaration_order(row: Row) -> None:
    """From enabled sections only; rendering again gives the same tools."""
    hidden = MarkdownSection(title="B", tools=[noop_tool("b")], enabled=lambda: False)
    sections = [MarkdownSection(title="C", tools=[noop_tool("z"), noop_tool("a")]), hidden]
    rendered = Prompt(PromptTemplate(sections=sections))
    assert [tool.name for tool in rendered.render().tools] == ["z", "a"]
    assert rendered.render().tools == rendered.render().tools


# Dispatch


class Watching:
    """A policy, a resource and a handler that note in which order they are asked."""

    name = "watching"

    def __init__(self, *, allows: bool = True, fails: bool = False) -> None:
        self.allows, self.fails = allows, fails
        self.steps: list[str] = []
        self.value = 0
        tool = tool_of(self.handle, "work", Params, None)
        section = MarkdownSection(title="W", tools=[tool], policies=[self])
        prompt = Prompt(PromptTemplate(sections=[section])).bind(resources={Watching: self})
        self.model = Model(prompt)
        prompt.resources.get(Watching)
        self.model.session.dispatcher.subscribe(ToolInvoked, lambda _: self.steps.append("told"))

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        assert isinstance(params, Params)
        self.steps.append("policy")
        return PolicyDecision(self.allows, "no")

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        self.steps.append("policy update")

    def snapshot(self) -> int:
        self.steps.append("snapshot")
        return self.value

    def restore(self, token: int) -> None:
        self.steps.append("restore")
        self.value = token

    def handle(self, params: Params, *, context: ToolContext) -> ToolResult[None]:
        assert context.resources.get(Watching) is self
        self.steps.append("handler")
        self.value += 1
        return ToolResult.error("failed") if self.fails else ToolResult.ok(message="done")


@promise("002", "Runtime Dispatch", "Registry lookup - Resolve tool name")
def lookup_first(row: Row) -> None:
    watching = Watching()
    result = watching.model.call("wrok", topic=5)
    assert result.failure is not None
    assert result.failure.code == "TOOL_NOT_FOUND"
    assert watching.steps == ["told"]


@promise("002", "Runtime Dispatch", 'Argument parsing - serde.parse(..., extra="forbid")')
def parsing_second(row: Row) -> None:
    watching = Watching(allows=False)
    result = watching.model.call("work", topic="x", more=1)
    assert result.failure is not None
    assert result.failure.code == "INVALID_ARGUMENTS"
    assert '"more"' in result.message
    assert watching.steps == ["told"]


@promise("002", "Runtime Dispatch", "Policy check - All policies must allow (fail-closed)")
def policies_third(row: Row) -> None:
    watching = Watching(allows=False)
    assert watching.model.call("work").message == "no"
    assert watching.steps == ["policy", "told"]

    class Broken:
        def check(self, tool_name: str, params: object, context: ToolContext) -> str | None:
            raise RuntimeError("cannot decide")

    refused = Model.offered(noop_tool("t"), policies=[Broken()]).call("t")
    assert refused.failure is not None
    assert refused.failure.code == "POLICY_DENIED"


@promise("002", "Runtime Dispatch", "Deadline check - Refuse if elapsed")
def deadline_fourth(row: Row) -> None:
    """Policies have been asked, nothing has run, and the run ends."""
    watching, clock = Watching(), FakeClock()
    late = Deadline.after(1, clock=clock)
    clock.advance(2)
    context = ToolContext(
        session=watching.model.session, prompt=watching.model.prompt, deadline=late
    )
    with pytest.raises(DeadlineExceededError):
        execute_tool(ToolCall("work"), context=context)
    assert watching.steps == ["policy", "told"]


@promise("002", "Runtime Dispatch", "Context construction - Build ToolContext")
@promise("002", "Runtime Dispatch", "Snapshot - Capture session and resource state")
@promise("002", "Runtime Dispatch", "Handler execution - Run with params/context")
@promise("002", "Runtime Dispatch", "Policy update - Call on_result for successful invocations")
@promise("002", "Runtime Dispatch", "Telemetry - Publish ToolInvoked to session.dispatcher")
def order_of_a_success(row: Row) -> None:
    """In the order of the list; the context was built before the policies, which get it, too."""
    watching = Watching()
    assert watching.model.call("work").message == "done"
    assert watching.steps == ["policy", "snapshot", "handler", "policy update", "told"]
    assert watching.value == 1


@promise("002", "Runtime Dispatch", "Restore on failure - Rollback state")
def order_of_a_failure(row: Row) -> None:
    watching = Watching(fails=True)
    assert watching.model.call("work").message == "failed"
    assert watching.steps == ["policy", "snapshot", "handler", "restore", "told"]
    assert watching.value == 0


@promise("002", "Runtime Dispatch", "Response assembly - Return result")
def response_last(row: Row) -> None:
    watching = Watching()
    result = watching.model.call("work")
    (recorded,) = watching.model.session[ToolInvoked].all()
    assert recorded.result is result
    order = [
        row.name.partition(" - ")[0] for row in seed_rows() if row.heading == "Runtime Dispatch"
    ]
    assert order[0] == "Registry lookup"
    assert order[-1] == "Response assembly"


# Failure semantics


def ending(end: Any) -> Tool[Any, Any]:
    """Return a tool that changes session and files, then ends as it is told."""

    def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        context.session.dispatch(Step("x"))
        context.filesystem.write("trace.txt", "was here")
        return end(context)

    return tool_of(handler, "work", None, None)


def raising(error: BaseException) -> Any:
    def end(context: ToolContext) -> ToolResult[None]:
        raise error

    return end


@promise("002", "ToolResult Contract", "success=True: Normal payload in value")
def payload_of_a_success(row: Row) -> None:
    result = declare()({"topic": "x"}, context=make_context())
    assert (result.success, result.value) == (True, Result("x"))


@promise(
    "002",
    "ToolResult Contract",
    "success=False: Error condition; value=None unless error payload",
)
def payload_of_a_failure(row: Row) -> None:
    context = make_context()
    assert ending(lambda c: ToolResult.error("no"))(context=context).value is None
    payload = ToolResult("no", value=Result("why"), success=False)
    result = ending(lambda c: payload)(context=context)
    assert (result.success, result.value) == (False, Result("why"))
    assert context.session[Result].all() == ()


@promise("002", "Exception Handling")
def exceptions(row: Row) -> None:
    """Re-raised or wrapped, as the row says; rolled back and recorded in every case."""
    raised: dict[str, BaseException] = {
        "ToolValidationError": ToolValidationError("bad path"),
        "VisibilityExpansionRequired": VisibilityExpansionRequired("open it"),
        "PromptEvaluationError": PromptEvaluationError("stop"),
        "DeadlineExceededError": DeadlineExceededError("late"),
        "TypeError": TypeError("unsupported operand"),
        "Other": RuntimeError("disk on fire"),
    }
    said = {
        "ToolValidationError": "bad path",
        "TypeError": "Tool 'work' failed on a value of the wrong type: unsupported operand",
        "Other": "Internal error: disk on fire",
    }
    context, error = make_context(), raised[row.name]
    tool = ending(raising(error))
    (behavior,) = row.cells
    if behavior.startswith("Wrap"):
        result = tool(context=context)
        assert (result.success, result.value, result.message) == (False, None, said[row.name])
    else:
        # A deadline is a PromptEvaluationError: whoever expects that gets it.
        expected = PromptEvaluationError if behavior.startswith("Convert") else type(error)
        with pytest.raises(expected) as caught:
            tool(context=context)
        assert caught.value is error
    assert context.session[Step].all() == ()
    assert not context.filesystem.exists("trace.txt")
    assert [each.success for each in context.session[ToolInvoked].all()] == [False]


@promise("002", "Handler Validation", "Development: pyright strict mode catches mismatches")
def typed_surface(row: Row) -> None:
    """What pyright makes of it is in tests/prompt; here: what annotations say is checked, too."""

    def other(params: Result, *, context: ToolContext) -> ToolResult[Result]:
        return ToolResult.ok(params)

    with pytest.raises(ToolDefinitionError, match="takes Result, but the tool's parameters"):
        declare(handler=other)


@promise("002", "Handler Validation", "Runtime: TypeErrors converted to failed results")
def type_errors(row: Row) -> None:
    """What a handler without annotations does wrong is a failure that names the tool."""
    for wrong in (lambda p, *, context: None + 1, lambda p, *, context: ToolResult.ok("text")):
        result = declare(handler=wrong)(context=make_context())
        assert not result.success
        assert "Tool 't' failed on a value of the wrong type" in result.message


# Limitations of the spec that are lifted, and the one that stays


@promise("002", "Limitations", "Synchronous handlers: Execute on provider loop thread")
def async_handlers_too(row: Row) -> None:
    threads: list[int] = []

    async def later(params: None, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok(message="later")

    def now(params: None, *, context: ToolContext) -> ToolResult[None]:
        threads.append(threading.get_ident())
        return ToolResult.ok(message="now")

    assert tool_of(later, "later")(context=make_context()).message == "later"
    assert tool_of(now, "now")(context=make_context()).message == "now"
    assert threads == [threading.get_ident()]
    assert aexecute_tool is not execute_tool


@promise("002", "Limitations", "Dataclass-only schemas: No TypedDict or arbitrary mappings")
def raw_schemas_too(row: Row) -> None:
    """``Tool[...]`` takes dataclasses only, as the spec says; for the rest there is another way."""
    with pytest.raises(ToolDefinitionError, match="must be a dataclass"):
        Tool[dict, None](name="t", description="d", handler=None)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    raw = Tool.from_schema("t", "d", schema, lambda params, *, context: ToolResult.ok(params))
    assert raw({"n": 1}).value == {"n": 1}
    assert not raw({"n": "1"}).success


@promise(
    "002",
    "Limitations",
    "Payload visibility: exclude_value_from_context not security boundary",
)
def payloads_are_on_record(row: Row) -> None:
    hidden_value(row)


@promise("002", "Limitations", "Deadline enforcement: Checked before entry, not per-invocation")
def deadline_within_a_call(row: Row) -> None:
    """A handler that goes on when the deadline passes is left, and what it did is undone."""
    context = make_context(deadline=Deadline.after(0.05))

    def slow(context: ToolContext) -> ToolResult[None]:
        assert context.signal.wait(60), "nobody says that the deadline has passed"
        return ToolResult.ok()

    with pytest.raises(DeadlineExceededError):
        ending(slow)(context=context)
    assert not context.filesystem.exists("trace.txt")


assert {each.name for each in fields(ToolExample)} == {"description", "input", "output"}
