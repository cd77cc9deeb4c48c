from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import AddStep, Counter, Plan, add_step, make_tool, raising

import weakincentives as wink
from weakincentives.errors import InvalidPattern, ToolDefinitionError, WinkError, WorkspaceLocked
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
    tool,
)
from weakincentives.prompt.contracts import (
    CascadeEffect,
    CustomPrecondition,
    DependencyPrecondition,
    Effect,
    NotificationEffect,
    StateChangeEffect,
)
from weakincentives.runtime import (
    EventBus,
    MemoryManager,
    RunContext,
    Session,
    ToolCall,
    ToolInvoked,
    ToolRegistry,
    execute_tool,
    sequence,
)
from weakincentives.testing import make_context, make_context_with_files


@tool(reach="read")
def size(path: str, *, context: ToolContext) -> int:
    """Return how long a file is."""
    return len(context.filesystem.read(path))


@tool(reach="reversible")
def save(path: str, text: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    if text == "bad":
        raise ValueError("not this text")
    return "saved"


def in_memory(*tools: Tool[Any, Any], **options: Any) -> ToolRegistry:
    fs = MemoryFilesystem({"a.txt": "abc"})
    return ToolRegistry(tools, resources={Filesystem: fs}, **options)


# What is registered


def test_tools_are_found_by_name_in_the_order_they_came():
    registry = in_memory(size)
    registry.register(save)

    assert registry.get("save") is save
    assert registry.get("nothing") is None
    assert registry.has("size")
    assert not registry.has("nothing")
    assert registry.list() == (size, save) == tuple(registry)
    assert len(registry) == 2
    assert "size" in registry
    assert repr(registry) == "ToolRegistry(size, save)"


def test_the_registry_is_one_class_under_all_its_names():
    from weakincentives import runtime

    assert wink.ToolRegistry is ToolRegistry is runtime.ToolRegistry


def test_a_tool_in_a_namespace_is_found_under_both_its_names():
    registry = in_memory()
    registered = registry.register(size, namespace="file")

    assert registered.name == "file__size"
    assert registered.title == "file:size"
    assert registry.get("file:size") is registry.get("file__size") is registered
    assert not registry.has("size")
    for name in ("file:size", "file__size"):
        assert registry.execute(name, {"path": "a.txt"}).value == 3
    assert {r.tool_name for r in registry.session[ToolInvoked].all()} == {"file__size"}


def test_a_registry_in_a_namespace_finds_short_names_too():
    registry = in_memory(size, namespace="file")

    assert registry.get("size") is registry.get("file:size")
    assert registry.execute("size", {"path": "a.txt"}).value == 3


def test_namespaces_have_levels():
    registry = in_memory()
    registry.register(size, namespace="disk:file")

    assert registry.has("disk:file:size")
    assert registry.has("disk__file__size")


@pytest.mark.parametrize("namespace", ["Web", "a b", "a::b", ":a", "ä"])
def test_a_namespace_that_providers_would_not_take_is_refused(namespace: str):
    with pytest.raises(ToolDefinitionError, match="namespace"):
        in_memory().register(size, namespace=namespace)


def test_a_name_that_gets_too_long_in_its_namespace_is_refused():
    with pytest.raises(ToolDefinitionError, match=r"with 66 characters; 64 are allowed"):
        in_memory().register(size, namespace="n" * 60)


def test_a_name_is_registered_once():
    registry = in_memory(size)

    with pytest.raises(ToolDefinitionError, match=r"^Tool 'size' is already registered$"):
        registry.register(size)
    registry.register(size, namespace="file")
    with pytest.raises(ToolDefinitionError, match=r"^Tool 'file:size' is already registered$"):
        registry.register(size, namespace="file")


def test_all_are_registered_or_none():
    registry = in_memory(size)

    with pytest.raises(ToolDefinitionError):
        registry.register_all([save, size])

    assert registry.list() == (size,)


def test_what_is_no_tool_is_refused():
    with pytest.raises(ToolDefinitionError, match="takes tools, got"):
        in_memory(lambda: None)  # type: ignore[arg-type]
    provided = Tool[None, None](name="search", description="Searches.", handler=None)
    with pytest.raises(ToolDefinitionError, match="'search' must have a handler"):
        in_memory(provided)


def test_an_unregistered_tool_is_gone():
    registry = in_memory(size)
    registry.register(save, namespace="file")

    assert registry.unregister("file:save")
    assert not registry.unregister("file:save")

    assert registry.list() == (size,)
    result = registry.execute("file:save", {"path": "b.txt", "text": "x"})
    assert result.failure is not None
    assert result.failure.code == "TOOL_NOT_FOUND"


# Searching


def test_search_looks_at_names_and_descriptions_without_regard_to_case():
    registry = in_memory(size)
    registry.register(save, namespace="file")
    saved = registry.get("file:save")

    assert registry.search("SIZE") == (size,)
    assert registry.search("^file:") == (saved,)
    assert registry.search("^file__") == (saved,)
    assert registry.search("how long|write") == (size, saved)
    assert registry.search(r"\d{4}") == ()


@pytest.mark.parametrize("pattern", ["(", "*", "[z-a]", r"(?=a)", r"(a)\1", "x" * 201, "a\nb"])
def test_a_pattern_that_is_wrong_is_a_clear_error(pattern: str):
    with pytest.raises(InvalidPattern) as refused:
        in_memory(size).search(pattern)
    assert isinstance(refused.value, ValueError)


@pytest.mark.heavy
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*)*x", "(a|ab|b)*c", "a*a*a*a*a*b"])
def test_patterns_that_explode_elsewhere_just_do_not_match(pattern: str):
    """In a process of its own: an engine that backtracks would not come back from this."""
    program = f"""
from weakincentives import Tool, ToolRegistry, ToolResult
long = Tool.from_schema("t", "a" * 5000 + "!", {{"type": "object"}}, lambda p, context: None)
print(ToolRegistry([long]).search({pattern!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )

    assert done.stdout.strip() == "()"


@pytest.mark.parametrize("pattern", ["a{21}", "(a{5}){5}", "(?x)a{3 0}", "a{0,999999999999}"])
def test_large_repetitions_are_refused(pattern: str):
    with pytest.raises(InvalidPattern, match="repeats too much"):
        in_memory(size).search(pattern)


@given(st.text(st.sampled_from("a(){}[]*+?|.\\,0123456789:^$-"), max_size=30))
@settings(max_examples=200)
def test_whatever_the_pattern_search_answers_or_says_what_is_wrong(pattern: str):
    with suppress(InvalidPattern):
        assert set(in_memory(size, save).search(pattern)) <= {size, save}


# Calling


def test_the_first_ten_lines_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rename that breaks a file leaves the directory as it was."""
    monkeypatch.chdir(tmp_path)
    source = Path("module.py")
    source.write_text("foo = 1\n")
    Path("ignored.txt").write_text("foo")

    def check_syntax(fs: Filesystem) -> None:
        for path in fs.glob("**/*.py"):
            compile(fs.read(path), path, "exec")

    @wink.tool(reach="reversible")
    def rename(old: str, new: str, *, context: wink.ToolContext) -> str:
        """Rename a symbol in every Python file."""
        fs = context.filesystem
        for path in fs.glob("**/*.py"):
            fs.write(path, fs.read(path).replace(old, new))
        check_syntax(fs)
        return f"Renamed {old} to {new}"

    with wink.ToolRegistry([rename], workspace=".") as tools:
        before = source.stat().st_mtime_ns
        result = tools.execute("rename", {"old": "foo", "new": "class"})

        assert not result.success
        assert "Filesystem" in result.metadata.undone
        assert source.read_text() == "foo = 1\n"
        assert source.stat().st_mtime_ns == before
        assert tools.execute("rename", {"old": "foo", "new": "bar"}).success
        assert source.read_text() == "bar = 1\n"


def test_a_workspace_is_closed_with_the_registry(tmp_path: Path):
    with ToolRegistry([save], workspace=tmp_path), pytest.raises(WorkspaceLocked):
        ToolRegistry([save], workspace=tmp_path)  # it is open already
    again = ToolRegistry([save], workspace=str(tmp_path))
    again.close()
    again.close()

    with pytest.raises(WinkError, match="registry is closed"):
        again.execute("save", {"path": "a", "text": "b"})


def test_a_workspace_that_is_not_there_is_told_at_once(tmp_path: Path):
    with pytest.raises(NotADirectoryError):
        ToolRegistry([save], workspace=tmp_path / "missing")


def test_there_is_one_filesystem(tmp_path: Path):
    with pytest.raises(TypeError, match="not both"):
        ToolRegistry(workspace=tmp_path, resources={Filesystem: MemoryFilesystem()})
    opened = make_context().resources
    with pytest.raises(TypeError, match="open already"):
        ToolRegistry(workspace=tmp_path, resources=opened)


def test_calls_go_through_the_whole_pipeline():
    registry = in_memory(save)

    assert registry.execute("save", {"path": "b.txt", "text": "good"}).success
    assert not registry.execute("save", {"path": "c.txt", "text": "bad"}).success

    fs = registry.as_section().resources.open().get(Filesystem)
    assert fs.exists("b.txt")
    assert not fs.exists("c.txt")
    assert [r.success for r in registry.session[ToolInvoked].all()] == [True, False]


def test_what_is_wrong_has_the_protocols_codes():
    registry = in_memory(size, save)

    def code(*call: Any) -> str:
        failure = registry.execute(*call).failure
        assert failure is not None
        return failure.code

    assert code("sise") == "TOOL_NOT_FOUND"
    assert code("size") == "INVALID_ARGUMENTS"
    assert code("size", {"path": 3}) == "INVALID_ARGUMENTS"


def test_an_unknown_tool_is_answered_with_names_that_are_near():
    registry = in_memory()
    registry.register(size, namespace="file")

    failure = registry.execute("file:sise", {}).failure

    assert failure is not None
    assert "file:size" in failure.suggestions


def test_calls_share_one_session_and_resources():
    counting = make_tool("count", lambda p, c: None)
    session = Session()
    session[Plan].register(AddStep, add_step)
    counter = Counter()
    resources = {Filesystem: MemoryFilesystem(), Counter: counter}
    registry = ToolRegistry([counting], session=session, resources=resources)

    registry.execute("count", {"name": "a"})
    registry.execute("count", {"name": "b"})

    assert session[Plan].latest() == Plan(("a", "b"))
    assert counter.value == 2


def test_a_context_of_ones_own_brings_session_and_resources():
    registry = in_memory(size)
    context = make_context_with_files({"other.txt": "abcde"})

    assert registry.execute("size", {"path": "other.txt"}, context).value == 5
    assert len(context.session[ToolInvoked].all()) == 1
    assert registry.session[ToolInvoked].all() == ()


def test_arguments_come_in_any_form_a_call_takes():
    registry = in_memory(size)

    assert registry.execute("size", '{"path": "a.txt"}').value == 3
    assert registry.execute("size", {"path": "a.txt"}, call_id="mine").call_id == "mine"


def test_policies_govern_every_tool():
    once = QuotaPolicy(max_calls=1)
    registry = in_memory(size, policies=[once])

    assert registry.execute("size", {"path": "a.txt"}).success
    refused = registry.execute("size", {"path": "a.txt"})
    assert refused.failure is not None
    assert refused.failure.code == "POLICY_DENIED"


def test_policies_know_namespaced_tools_by_the_name_providers_take():
    order = SequentialDependencyPolicy({"file__save": {"file__size"}})
    registry = in_memory(policies=[order])
    registry.register_all([size, save], namespace="file")
    arguments = {"path": "b.txt", "text": "x"}

    assert not registry.execute("file:save", arguments).success
    registry.execute("file:size", {"path": "a.txt"})
    assert registry.execute("file:save", arguments).success


def test_several_calls_run_as_one_turn():
    registry = in_memory(size, save)

    results = registry.execute_tools(
        [
            ("save", {"path": "b.txt", "text": "four"}),
            ToolCall("size", {"path": "b.txt"}, id="second"),
            ("nothing", {}),
        ]
    )

    assert [r.success for r in results] == [True, True, False]
    assert results[1].value == 4
    assert results[1].call_id == "second"


def test_calls_can_be_awaited():
    @tool(reach="read")
    async def later(*, context: ToolContext) -> bool:
        """Say whether it runs on the caller's loop."""
        return asyncio.get_running_loop() in loops

    loops: list[Any] = []
    registry = in_memory(later)

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        assert (await registry.aexecute("later")).value is True
        results = await registry.aexecute_tools([("later", {}), ("later", {})])
        assert [r.value for r in results] == [True, True]

    asyncio.run(main())
    assert registry.execute("later").value is False  # and from sync code, on another


def test_what_nested_calls_change_is_in_the_history_of_the_outermost_call(tmp_path: Path):
    """Also when the first of them failed, and the outermost has changed nothing itself."""

    @tool
    def write(path: str, *, context: ToolContext) -> str:
        """Write a file; one in particular cannot be written."""
        context.filesystem.write(path, "x")
        if path == "bad.txt":
            raise ValueError("not this one")
        return "written"

    @tool
    def write_all() -> str:
        """Write two files."""
        for path in ("bad.txt", "good.txt"):
            registry.execute("write", {"path": path})
        return "done"

    with ToolRegistry([write, write_all], workspace=tmp_path) as registry:
        registry.execute("write_all", call_id="outer")
        (committed,) = registry.workspace.history()

    assert committed.call_id == "outer"
    assert committed.paths == ("good.txt",)


def test_a_call_that_fails_says_what_its_nested_calls_did_outside():
    @tool(reach="irreversible")
    def send() -> str:
        """Send a message."""
        return "sent"

    @tool
    def send_and_fail() -> str:
        """Send a message, then fail."""
        registry.execute("send")
        raise ValueError("changed my mind")

    registry = in_memory(send, send_and_fail)

    result = registry.execute("send_and_fail")

    assert result.metadata.not_undone == (
        "what 'send' did outside the session, files and resources",
    )


def test_a_handler_calls_its_own_registry_as_a_nested_call():
    @tool
    def save_twice(*, context: ToolContext) -> str:
        """Write two files, and fail."""
        registry.execute("save", {"path": "x.txt", "text": "x"})
        raise ValueError("changed my mind")

    registry = in_memory(save, save_twice)

    assert not registry.execute("save_twice").success
    assert [r.tool_name for r in registry.session[ToolInvoked].all()] == ["save", "save_twice"]
    assert not registry.execute("size", {"path": "x.txt"}).success


def test_composed_tools_can_be_registered():
    registry = in_memory(size)
    registry.register(sequence([save, size]), namespace="flow")

    result = registry.execute("flow:sequence-save-size", {"path": "b.txt", "text": "xy"})

    assert result.success
    assert result.value.results[-1].value == 2


# While others register


def test_tools_come_and_go_while_calls_are_under_way():
    """A call that has begun ends; every other finds its tool or is told that there is none."""
    entered, leave = threading.Event(), threading.Event()

    @tool
    def wait() -> str:
        """Wait."""
        entered.set()
        leave.wait(120)
        return "ended"

    registry = in_memory(wait, size)
    results: list[ToolResult[Any]] = []
    thread = threading.Thread(target=lambda: results.append(registry.execute("wait")))
    thread.start()
    entered.wait(120)
    registry.unregister("wait")
    leave.set()
    thread.join(120)
    assert results[0].value == "ended"

    stop = threading.Event()
    failures: list[Any] = []

    def come_and_go() -> None:
        while not stop.is_set():
            registry.register(save)
            registry.unregister("save")

    def call() -> None:
        for number in range(50):
            result = registry.execute("save", {"path": f"{number}.txt", "text": "x"})
            if not result.success and result.failure.code != "TOOL_NOT_FOUND":  # type: ignore[union-attr]
                failures.append(result)
            if not registry.execute("size", {"path": "a.txt"}).success:
                failures.append("size was always there")

    changing = threading.Thread(target=come_and_go)
    callers = [threading.Thread(target=call) for _ in range(3)]
    changing.start()
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    stop.set()
    changing.join(120)

    assert failures == []


def test_one_of_many_threads_registers_a_name():
    registry = in_memory()
    won: list[bool] = []
    start = threading.Barrier(8)

    def register() -> None:
        start.wait(120)
        try:
            registry.register(size)
            won.append(True)
        except ToolDefinitionError:
            won.append(False)

    threads = [threading.Thread(target=register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert sorted(won) == [False] * 7 + [True]


# The parts of a call, by hand


def test_preconditions_can_be_checked_without_running_anything():
    async def later(context: ToolContext) -> bool:
        await asyncio.sleep(0)
        return False

    ran: list[str] = []
    careful = make_tool(
        "careful",
        lambda p, c: ran.append("ran"),
        preconditions=[
            CustomPrecondition(description="always", check=lambda: True),
            CustomPrecondition(description="not now", check=later, critical=False),
            CustomPrecondition(description="broken", check=raising(ValueError("?"))),
        ],
    )
    registry = in_memory(careful)

    found = registry.validate_preconditions("careful")

    assert [check.passed for check in found.results] == [True, False, False]
    assert not found.can_proceed
    assert ran == []
    result = registry.execute("careful", {"name": "a"})
    assert result.failure is not None
    assert result.failure.code == "PRECONDITION_FAILED"
    assert result.failure.suggestions == ("not now", "broken")
    with pytest.raises(KeyError, match="Tool 'nothing' not found"):
        registry.validate_preconditions("nothing")


def test_a_precondition_sees_the_arguments_it_is_checked_for():
    even = CustomPrecondition(
        description="an even number of letters", check=lambda params: len(params.name) % 2 == 0
    )
    registry = in_memory(make_tool("even", lambda p, c: None, preconditions=[even]))

    assert registry.validate_preconditions("even", arguments={"name": "ab"}).passed
    assert not registry.validate_preconditions("even", arguments={"name": "a"}).passed


def test_a_dependency_is_seen_among_the_registered_tools():
    first = make_tool("first", lambda p, c: None)
    waits = DependencyPrecondition(description="first has run", tool="first")
    second = make_tool("second", lambda p, c: None, preconditions=[waits])
    session = Session()
    resources = {Filesystem: MemoryFilesystem(), Counter: Counter()}
    registry = ToolRegistry([first, second], session=session, resources=resources)

    assert not registry.execute("second", {"name": "a"}).success
    registry.execute("first", {"name": "a"})
    assert registry.execute("second", {"name": "a"}).success


def test_effects_can_be_applied_for_a_result_from_elsewhere():
    told: list[Any] = []
    bus = EventBus()
    bus.subscribe("done", lambda event, payload: told.append((event, payload)))

    @tool
    def send(text: str) -> str:
        """Send a text."""
        told.append(("sent", text))
        return "sent"

    effects = [
        CascadeEffect(trigger_tool="send", arguments=lambda result: {"text": result.value}),
        NotificationEffect(event="done", payload=lambda result: result.value),
        Effect(apply=lambda context, result: told.append(result.value)),
    ]
    tool_with_effects = make_tool("t", lambda p, c: None, effects=effects)
    registry = ToolRegistry([tool_with_effects, send], resources={EventBus: bus})

    applied = registry.apply_effects("t", ToolResult.ok("value"))

    # What can fail and be undone first; then who is told; then what is called.
    assert told == ["value", ("done", "value"), ("sent", "value")]
    assert set(applied) == set(effects)
    assert [each.tool_name for each in registry.session[ToolInvoked].all()] == ["send"]


def test_a_cascade_of_effects_applied_by_hand_waits_for_its_condition():
    never = CascadeEffect(trigger_tool=size, trigger_condition=lambda result: False)
    registry = in_memory(make_tool("t", lambda p, c: None, effects=[never]))

    assert registry.apply_effects("t", ToolResult.ok()) == ()
    assert registry.session[ToolInvoked].all() == ()


def test_effects_applied_by_hand_leave_nothing_when_one_fails():
    told: list[str] = []
    bus = EventBus()
    bus.subscribe("*", lambda event, payload: told.append(event))

    def fail() -> None:
        raise OSError("disk full")

    effects = [
        NotificationEffect(event="done"),
        StateChangeEffect(state="steps", change="increment"),
        Effect(
            apply=lambda context: context.filesystem.write("b.txt", "b"),
            rollback=lambda: told.append("b"),
        ),
        Effect(apply=fail),
    ]
    fs, memory = MemoryFilesystem({"a.txt": "a"}), MemoryManager()
    registry = ToolRegistry(
        [make_tool("t", lambda p, c: None, effects=effects)],
        resources={Filesystem: fs, EventBus: bus, MemoryManager: memory},
    )

    with pytest.raises(OSError, match="disk full"):
        registry.apply_effects("t", ToolResult.ok())

    assert told == ["b"]
    assert [entry.path for entry in fs.list()] == ["a.txt"]
    assert memory.read("working", "steps") is None


# What a call without a context gets


@tool
def tell(*, context: ToolContext) -> dict[str, Any]:
    """Tell what surrounds the call."""
    assert context.memory is not None
    context.memory.update("working", "calls", lambda count: (count or 0) + 1)
    return {
        "calls": context.memory.read("working", "calls"),
        "config": dict(context.config),
        "ids": (context.loop_id, context.agent_id),
        "trace": context.trace_id,
    }


def test_a_call_without_a_context_has_memory_config_and_ids():
    """As the Protocol's ``createDefaultContext`` has them."""
    registry = ToolRegistry([tell])

    first, second = (registry.execute("tell").value for _ in range(2))

    assert first["config"] == {"tool_name": "tell"}
    assert first["ids"] == ("default", "default")
    assert (first["calls"], second["calls"]) == (1, 2)
    assert len(first["trace"]) == 32
    assert first["trace"] == second["trace"]
    assert ToolRegistry([tell]).execute("tell").value["trace"] != first["trace"]


def test_the_memory_of_a_registry_is_rolled_back_with_the_call():
    @tool
    def fail(*, context: ToolContext) -> None:
        """Write and fail."""
        context.memory.write("working", "calls", 99)
        raise ValueError("no")

    registry = ToolRegistry([tell, fail])
    registry.execute("tell")

    assert not registry.execute("fail").success
    assert registry.execute("tell").value["calls"] == 2


def test_config_and_ids_of_a_registry_are_the_callers_to_choose():
    registry = ToolRegistry(
        [tell],
        config={"api.credentials": "secret", "tool_name": "no other"},
        run_context=RunContext(loop_id="loop-1", trace_id="t" * 32),
        namespace="about",
    )

    for seen in (
        registry.execute("about:tell").value,
        registry.execute_tools([("tell", {})])[0].value,
    ):
        assert seen["config"] == {"api.credentials": "secret", "tool_name": "about__tell"}
        assert seen["ids"] == ("loop-1", "default")
        assert seen["trace"] == "t" * 32


def test_a_memory_that_is_bound_is_the_one_that_is_used():
    memory = MemoryManager()
    memory.write("working", "calls", 41)

    assert (
        ToolRegistry([tell], resources={MemoryManager: memory}).execute("tell").value["calls"] == 42
    )


def test_the_default_memory_stays_with_the_registry_when_it_becomes_sections():
    """Two registries in one prompt do not bring two memories."""
    sections = [ToolRegistry([each]).as_section(title=each.name) for each in (save, size)]

    prompt = Prompt(PromptTemplate(sections=sections))

    assert prompt.resources.find(MemoryManager) is None


# To sections and back


class NotToday:
    name = "not_today"

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision(tool.name != "save", "not today")


def test_a_registry_becomes_a_section():
    registry = in_memory(save, policies=[NotToday()])
    registry.register(size, namespace="file")
    session = Session()
    prompt = Prompt(PromptTemplate(sections=[registry.as_section(title="Files", key="files")]))

    rendered = prompt.render(session)

    assert [t.name for t in rendered.tools] == ["save", "file__size"]
    assert "Files" in rendered.text
    call = ToolCall("file__size", {"path": "a.txt"})
    assert execute_tool(call, session=session).value == 3
    denied = execute_tool(ToolCall("save", {"path": "b", "text": "x"}), session=session)
    assert denied.message == "not today"


def test_a_section_of_a_workspace_works_on_the_same_directory(tmp_path: Path):
    with ToolRegistry([save], workspace=tmp_path) as registry:
        session = Session()
        Prompt(PromptTemplate(sections=[registry.as_section()])).render(session)

        call = ToolCall("save", {"path": "b.txt", "text": "x"})
        assert execute_tool(call, session=session).success
        assert (tmp_path / "b.txt").read_text() == "x"


def test_a_section_becomes_a_registry_with_its_children_policies_and_resources():
    provided = Tool[None, None](name="search", description="Searches.", handler=None)
    section = MarkdownSection(
        title="Outer",
        tools=[size, provided],
        resources={Filesystem: MemoryFilesystem({"a.txt": "abc"})},
        children=[MarkdownSection(title="Inner", tools=[save], policies=[NotToday()])],
    )

    registry = ToolRegistry.from_section(section)

    assert registry.list() == (size, save)
    assert registry.execute("size", {"path": "a.txt"}).value == 3
    assert registry.execute("save", {"path": "b", "text": "x"}).message == "not today"
    spaced = ToolRegistry.from_section(section, namespace="file")
    assert [t.name for t in spaced.list()] == ["file__size", "file__save"]


def test_a_section_can_be_given_another_workspace(tmp_path: Path):
    section = MarkdownSection(title="T", tools=[save], resources={Filesystem: MemoryFilesystem()})
    with ToolRegistry.from_section(section, workspace=tmp_path) as registry:
        registry.execute("save", {"path": "b.txt", "text": "x"})

    assert (tmp_path / "b.txt").read_text() == "x"


def test_a_prompts_tools_become_a_registry():
    order = SequentialDependencyPolicy({"save": {"size"}})
    section = MarkdownSection(title="T", tools=[size, save])
    template = PromptTemplate(sections=[section], policies=[order])
    fs = MemoryFilesystem({"a.txt": "abc"})
    prompt = Prompt(template).bind(resources={Filesystem: fs})
    registry = ToolRegistry.from_prompt(prompt)
    arguments = {"path": "b.txt", "text": "x"}

    assert not registry.execute("save", arguments).success
    registry.execute("size", {"path": "a.txt"})
    assert registry.execute("save", arguments).success
    assert fs.read("b.txt") == "x"
    registry.close()
    assert prompt.resources.get(Filesystem) is fs  # whose it is


def test_there_and_back_again_is_the_same():
    registry = in_memory(save, policies=[NotToday()])
    registry.register(size, namespace="file")

    again = ToolRegistry.from_section(registry.as_section())

    assert [t.name for t in again] == [t.name for t in registry]
    assert again.execute("file:size", {"path": "a.txt"}).value == 3
    assert again.execute("save", {"path": "b", "text": "x"}).message == "not today"
