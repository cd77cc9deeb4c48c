"""The Chapter's tables and lists, row by row."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
from seed_names import FILE_TOOLS, Plan, noop_tool, tool_of
from seed_rows import Row, promise
from seed_scenarios import Model

from weakincentives.adapters import ScriptedAdapter, calls
from weakincentives.contrib import tools as suites
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import DeadlineExceededError, ToolDefinitionError
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    PolicyState,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.resources import Binding, ResourceRegistry, Scope
from weakincentives.runtime import Session, ToolInvoked
from weakincentives.session.slices import SlicePolicy, slice_policy
from weakincentives.testing import FakeClock, make_context, make_vfs


@dataclass(frozen=True)
class Params:
    query: str
    limit: int = 10
    case_sensitive: bool = False
    file_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    text: str = ""

    def render(self) -> str:
        return f"rendered {self.text}"


@dataclass(frozen=True)
class Plain:
    count: int


def answer(params: Params, *, context: ToolContext) -> ToolResult[Result]:
    return ToolResult.ok(Result(params.query), message="done")


def declare(**options: Any) -> Tool[Any, Any]:
    return Tool[Params, Result](**{"name": "t", "description": "d", "handler": answer, **options})


# Contracts


@promise("000", "Tool Contracts")
def contracts(row: Row) -> None:
    """Each part is checked when the tool is made."""
    part = row.name.partition(":")[0]
    if part == "Name":
        assert "^[a-z0-9_-]{1,64}$" in row.name
    wrong: dict[str, dict[str, Any]] = {
        "Name": {"name": "Not A Name"},
        "Description": {"description": "d" * 201},
        "Handler": {"handler": lambda: None},
    }
    if part in wrong:
        with pytest.raises(ToolDefinitionError):
            declare(**wrong[part])
        return
    for types in ((dict, None), (None, int)):
        with pytest.raises(ToolDefinitionError, match="must be a dataclass or None"):
            Tool[types](name="t", description="d", handler=None)
    none = Tool[None, None](
        name="t", description="d", handler=lambda p, *, context: ToolResult.ok()
    )
    assert none().success


@promise("000", "Why Type Parameters Matter")
def type_parameters(row: Row) -> None:
    tool = declare()
    assert tool.parameters["properties"]["limit"] == {"type": "integer", "default": 10}
    assert not tool({"query": 1}, context=make_context()).success
    result = tool({"query": "x"}, context=make_context())
    assert (result.value, result.render()) == (Result("x"), "done\nrendered x")
    other = declare(handler=lambda params, *, context: ToolResult.ok(Plain(1)))
    failure = other({"query": "x"}, context=make_context()).failure
    assert failure is not None
    assert failure.code == "TYPE_ERROR"


# Resources


class Closing:
    """A resource that notes when it is made, prepared and closed."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        log.append("made")

    def post_construct(self) -> None:
        self.log.append("prepared")

    def close(self) -> None:
        self.log.append("closed")


def calls_with(scope: Scope | None) -> tuple[list[list[object]], list[str]]:
    """Return the instances that two calls of a session see, and what became of them."""
    seen: list[list[object]] = []
    log: list[str] = []

    def look(params: None, *, context: ToolContext) -> ToolResult[None]:
        seen.append([context.resources.get(Closing), context.resources.get(Closing)])
        return ToolResult.ok()

    options: Any = {} if scope is None else {"scope": scope}
    bound = {Closing: Binding(Closing, lambda r: Closing(log), **options)}
    model = Model.offered(tool_of(look, "look", None, None), resources=bound)
    with model.prompt.resources:
        for _ in range(2):
            assert model.call("look").success
    return seen, log


@promise("000", "Resource Scopes")
def scopes(row: Row) -> None:
    """How many instances two calls of a session see, asking twice each; all are closed."""
    seen, log = calls_with(Scope[row.name])
    instances = {id(each) for call in seen for each in call}
    assert len(instances) == {"SINGLETON": 1, "TOOL_CALL": 2, "PROTOTYPE": 4}[row.name]
    assert log.count("made") == log.count("closed") == len(instances)
    if "default" in row.cells[0]:
        seen, _ = calls_with(None)
        assert len({id(each) for call in seen for each in call}) == 1


@promise("000", "9. Use Scopes Appropriately")
def recommended_scopes(row: Row) -> None:
    """The scope is there, under the name and with the default that the row says."""
    name, _, default = row.cells[0].partition(" ")
    assert Scope[name] in Scope
    if default:
        assert Binding(Closing, lambda r: Closing([])).scope is Scope[name]


@promise("000", "Resource Management")
def resource_management(row: Row) -> None:
    class Wrapped:
        def __init__(self, inner: Closing) -> None:
            self.inner = inner

    log: list[str] = []
    registry = ResourceRegistry.of(
        Binding(Closing, lambda r: Closing(log)),
        Binding(Wrapped, lambda r: Wrapped(r.get(Closing))),
        Binding(Filesystem, lambda r: MemoryFilesystem()),
    )
    with registry.open() as context:
        assert log == []
        assert context.get(Wrapped).inner is context.get(Closing)
        assert isinstance(context.get(Filesystem), MemoryFilesystem)
    assert log == ["made", "prepared", "closed"]
    assert {each.name for each in Scope} == {"SINGLETON", "TOOL_CALL", "PROTOTYPE"}


# Results


@promise("000", "Rendering Results")
def rendering(row: Row) -> None:
    kind = row.name.removeprefix("If value is ").partition(":")[0]
    if kind == "a dataclass without render()":
        cls = dataclass(type("Fresh", (), {"__annotations__": {"count": int}}))
        with TestCase().assertLogs("weakincentives", "WARNING"):
            assert ToolResult.ok(cls(3)).render() == '{"count": 3}'
        return
    values: dict[str, tuple[object, str]] = {
        "a dataclass with render()": (Result("x"), "rendered x"),
        "a mapping": ({"a": [1]}, '{"a": [1]}'),
        "a sequence": (["a", "b"], "a\nb"),
        "a string": ("as-is\n", "as-is\n"),
        "None": (None, ""),
    }
    value, expected = values[kind]
    assert ToolResult.ok(value).render() == expected


@promise("000", "Exception Handling")
def safety_exceptions(row: Row) -> None:
    """They propagate unchanged, the call is undone and on record."""
    name = row.name.partition(" ")[0]
    errors: dict[str, BaseException] = {
        "KeyboardInterrupt": KeyboardInterrupt("stop"),
        "SystemExit": SystemExit(3),
        "asyncio.CancelledError": asyncio.CancelledError("stop"),
        "DeadlineExceededError": DeadlineExceededError("late"),
    }
    context = make_context()

    def fail(params: None, *, context: ToolContext) -> ToolResult[None]:
        context.filesystem.write("trace.txt", "was here")
        raise errors[name]

    with pytest.raises(type(errors[name])) as caught:
        tool_of(fail, "fail", None, None)(context=context)
    assert caught.value is errors[name]
    assert not context.filesystem.exists("trace.txt")
    assert [each.success for each in context.session[ToolInvoked].all()] == [False]
    if name == "DeadlineExceededError":
        clock = FakeClock()
        late = make_context(deadline=Deadline.after(1, clock=clock))
        clock.advance(2)
        with pytest.raises(DeadlineExceededError):
            noop_tool("t")(context=late)


@promise("000", "Stage 1: Automatic Schema Validation")
def validated_fields(row: Row) -> None:
    name = row.name.partition(" ")[0]
    wrong: dict[str, list[object]] = {
        "query": [None, 7, ["x"]],
        "limit": ["10", 3.7, 3.0, True, None],
        "case_sensitive": ["true", 1, None],
        "file_types": ["py", [1], {"a": 1}],
    }
    for value in wrong[name]:
        failure = declare()({"query": "x", name: value}, context=make_context()).failure
        assert failure is not None
        assert failure.code == "INVALID_ARGUMENTS"
        assert f"'{name}" in failure.message
    good = declare()({"query": "x", "file_types": ["py"]}, context=make_context())
    assert good.success


@promise("000", "How Errors Propagate Through Adapters")
def errors_in_a_run(row: Row) -> None:
    """One run in which a call fails: what is undone, on record, and said to the model."""
    said: list[str] = []

    def fail(params: None, *, context: ToolContext) -> ToolResult[None]:
        context.session[Plan].seed(Plan(status="spoilt"))
        return ToolResult.error('File exists\n"quotes", é 🌍 \\n')

    section = MarkdownSection(
        title="T", tools=[tool_of(fail, "fail", None, None), noop_tool("again")]
    )
    session = Session()
    session[Plan].seed(Plan(status="planned"))

    def heard(then: Any) -> Any:
        def turn(request: Any) -> Any:
            said.append(request.messages[-1].text)
            return then

        return turn

    adapter = ScriptedAdapter([calls("fail"), heard(calls("again")), heard("Done.")])
    assert adapter.evaluate(Prompt(PromptTemplate(sections=[section])), session).text == "Done."
    assert session[Plan].all() == (Plan(status="planned"),)
    assert [each.success for each in session[ToolInvoked].all()] == [False, True]
    assert said == ['File exists\n"quotes", é 🌍 \\n', "again done"]


# Transactions


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True)
class Noted:
    text: str


class Counter:
    """A resource that can be snapshotted."""

    def __init__(self) -> None:
        self.value = 0

    def snapshot(self) -> int:
        return self.value

    def restore(self, token: int) -> None:
        self.value = token


def world(fails: bool, files: Any) -> dict[str, object]:
    """Return what a call has left, after it changed everything that it can reach."""
    outside: list[str] = []
    counter, session = Counter(), Session()
    session[Plan].seed(Plan(status="planned"))

    def change(params: None, *, context: ToolContext) -> ToolResult[None]:
        context.session[Plan].seed(Plan(status="changed"))
        context.session.dispatch(Noted("begun"))
        context.filesystem.write("a.txt", "changed")
        context.resources.get(Counter).value += 1
        outside.append("called")
        return ToolResult.error("no") if fails else ToolResult.ok()

    context = make_context(session=session, fs=files, resources={Counter: counter})
    tool_of(change, "change", None, None)(context=context)
    return {
        "state": session[Plan].latest() == Plan(status="changed"),
        "log": session[Noted].all() == (Noted("begun"),),
        "files": files.read("a.txt") == "changed",
        "resource": counter.value == 1,
        "outside": outside == ["called"],
        "recorded": [each.success for each in session[ToolInvoked].all()] == [not fails],
    }


STAYS = {"log", "outside", "recorded"}


@promise("000", "What Gets Rolled Back")
@promise("000", "Transaction Rollback on Errors")
@promise("000", "Transaction Lifecycle")
def rolled_back(row: Row) -> None:
    """After a success everything is changed; after a failure only what cannot be undone is."""
    assert all(world(fails=False, files=make_vfs({"a.txt": "old"})).values())
    left = world(fails=True, files=make_vfs({"a.txt": "old"}))
    assert {name for name, changed in left.items() if changed} == STAYS


@promise("000", "What Gets Rolled Back", "Filesystem (disk)")
def rolled_back_on_disk(row: Row) -> None:
    """Without git, which DESIGN.md lifts: also in a directory that is no repository."""
    import tempfile

    for fails in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "a.txt")
            path.write_text("old")
            with HostFilesystem(directory) as files:
                left = world(fails, files)
            assert path.read_text() == ("old" if fails else "changed")
            assert {name for name, changed in left.items() if changed} == (
                STAYS if fails else set(left)
            )


# Suites


@promise("000", "Contributed Tool Suites")
def contributed_suites(row: Row) -> None:
    """Tools with guidance; state is in the slice that the row names, or in the resource."""
    purpose, state = row.cells
    files = make_vfs({"a.txt": "a"})
    if row.name == "AstevalSection":
        pytest.importorskip("asteval")
    made: dict[str, Any] = {
        "PlanningToolsSection": lambda: suites.PlanningToolsSection(),
        "VfsToolsSection": lambda: suites.VfsToolsSection(session=Session()),
        "PodmanSandboxSection": lambda: suites.PodmanSandboxSection(
            config=suites.PodmanSandboxConfig(workspace=".")
        ),
        "AstevalSection": lambda: suites.AstevalSection(),
        "WorkspaceDigestSection": lambda: suites.WorkspaceDigestSection(filesystem=files),
    }
    section = made[row.name]()
    assert section.tools
    assert (Filesystem in section.resources) is ("resource" in state)
    if "In-memory" in purpose:
        assert isinstance(Model.given(section).prompt.resources.get(Filesystem), MemoryFilesystem)
    if state in ("Plan", "WorkspaceDigest"):
        model = Model.given(section)
        if state == "Plan":
            assert model.call("setup_plan", objective="ship it", steps=["build"]).success
        assert model.session[getattr(suites, state)].latest() is not None


@promise("000", "Example: VFS Tool Suite")
def vfs_suite(row: Row) -> None:
    model = Model.given(suites.VfsToolsSection(session=Session()))
    assert "Use these tools to read and write files" in model.rendered.text
    listed = {"read_file", "write_file", "list_directory", "delete_file"}
    assert listed <= {tool.name for tool in model.rendered.tools}
    files = model.prompt.resources.get(Filesystem)
    assert isinstance(files, MemoryFilesystem)
    files.write("a.txt", "old")
    refused = model.call("write_file", path="a.txt", content="new")
    assert refused.message == "Cannot write to a.txt without reading it first"


# Policies


@promise("000", "ReadBeforeWritePolicy")
@promise(
    "000", "Key Behaviors", 'ReadBeforeWritePolicy maintains a set of "safe" paths per session'
)
def safe_paths(row: Row) -> None:
    """Only what was read in this session, and new files; the paths are in its state."""
    files = make_vfs({"a.txt": "a", "b.txt": "b"})
    model = Model.offered(
        FILE_TOOLS["read_file"],
        FILE_TOOLS["write_file"],
        policies=[ReadBeforeWritePolicy()],
        resources={Filesystem: files},
    )
    model.call("read_file", path="a.txt")
    assert [
        model.call("write_file", path=path, content="x").success
        for path in ("a.txt", "new.txt", "b.txt")
    ] == [True, True, False]
    (state,) = model.session[PolicyState].all()
    assert {path for _, path in state.invoked_keys} == {"a.txt", "new.txt"}
    other = Model(model.prompt, Session())
    assert not other.call("write_file", path="a.txt", content="x").success


@promise(
    "000", "Key Behaviors", "SequentialDependencyPolicy checks ToolInvoked events for completions"
)
def completions(row: Row) -> None:
    """A tool has completed when a ToolInvoked of its success is on record, and not before.

    DESIGN.md rules that no policy walks the history: the session notes each success beside it.
    """
    policy = SequentialDependencyPolicy(dependencies={"deploy": {"test"}})
    fails = [True]

    def check(params: None, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.error("red") if fails[0] else ToolResult.ok()

    model = Model.offered(tool_of(check, "test"), noop_tool("deploy"), policies=[policy])
    for fails[0] in (True, False):
        model.call("test")
        done = any(each.success for each in model.session[ToolInvoked].all())
        assert model.call("deploy").success is done is not fails[0]


@promise("000", "Key Behaviors")
def policies(row: Row) -> None:
    """In order, before the handler, with the session; the first violation is the answer."""
    ran: list[str] = []

    def work(params: None, *, context: ToolContext) -> ToolResult[None]:
        ran.append("handler")
        return ToolResult.ok()

    class Small:
        def __init__(self, name: str, most: int) -> None:
            self.name, self.most = name, most

        def check(self, tool_name: str, params: object, context: ToolContext) -> str | None:
            ran.append(self.name)
            used = len(context.session[ToolInvoked].all())
            return f"{self.name} says no" if used >= self.most else None

    tool = tool_of(work, "work", None, None)
    model = Model.offered(tool, policies=[Small("first", 2), Small("second", 1), QuotaPolicy(9)])
    assert model.call("work").success
    assert ran == ["first", "second", "handler"]
    denied = model.call("work")
    assert (denied.success, denied.value, denied.message) == (False, None, "second says no")
    assert model.call("work").message == "first says no"
    assert ran.count("handler") == 1
