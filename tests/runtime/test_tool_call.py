from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_world import (
    AddStep,
    Counter,
    Noted,
    Plan,
    Step,
    World,
    changing_everything,
    make_tool,
    raising,
)

from weakincentives.core.budget import Budget, BudgetTracker, TokenUsage
from weakincentives.core.deadlines import Deadline, Heartbeat
from weakincentives.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    PromptEvaluationError,
    ReadOnlyView,
    ToolValidationError,
    ViewClosed,
    VisibilityExpansionRequired,
)
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.prompt import PolicyDecision, Tool, ToolContext, ToolResult, tool
from weakincentives.resources import Binding, Scope
from weakincentives.runtime import (
    RunContext,
    Session,
    ToolCall,
    ToolInvoked,
    aexecute_tool,
    aexecute_tools,
    call_under_way,
    execute_tool,
)
from weakincentives.testing import FakeClock, make_context

UNTOUCHED = (Plan(), {}, 0)


# A call that succeeds


def test_a_successful_call_keeps_session_files_and_resources():
    world = World([make_tool("work", lambda p, c: None)])

    result = world.call("work")

    assert result.success
    assert world.state() == (Plan(("a",)), {"a.txt": "written", "journal.txt": "a\n"}, 1)


def test_a_result_carries_what_the_runtime_knows():
    clock = FakeClock(1000.0)
    world = World(
        [make_tool("work", lambda p, c: clock.advance(2.5))], session=Session(clock=clock)
    )

    result = execute_tool(ToolCall("work", {"name": "a"}, id="c1"), session=world.session)

    assert result.call_id == "c1"
    assert result.metadata.tool_name == "work"
    assert result.metadata.timestamp == 1000.0
    assert result.metadata.duration == 2.5
    assert result.metadata.attempts == 1


def test_every_call_leaves_one_record_and_tells_subscribers():
    world = World([make_tool("work", lambda p, c: None)])
    heard: list[ToolInvoked] = []
    world.session.dispatcher.subscribe(ToolInvoked, heard.append)

    result = world.call("work")

    (record,) = world.records
    assert heard == [record]
    assert (record.tool_name, record.params, record.success) == ("work", Step("a"), True)
    assert record.result is result
    assert record.call_id == result.call_id
    assert record.ran


def test_a_value_reaches_a_slice_only_through_a_registered_reducer():
    def answer(p: Step, c: ToolContext) -> ToolResult[Any]:
        return ToolResult.ok(AddStep("from result"))

    world = World([make_tool("work", answer, AddStep)])
    world.call("work")
    assert world.session[Plan].latest() == Plan(("a", "from result"))

    other = World([make_tool("work", lambda p, c: ToolResult.ok(Step("unregistered")), Step)])
    other.call("work")
    assert other.session[Step].all() == ()


def test_the_value_of_a_failed_call_reaches_no_slice():
    failed = ToolResult(message="no", value=AddStep("x"), success=False)
    world = World([make_tool("work", lambda p, c: failed)])

    world.call("work")

    assert world.state() == UNTOUCHED


def test_a_handlers_own_result_object_is_not_changed():
    shared = ToolResult.ok(None, message="always the same")
    world = World([make_tool("work", lambda p, c: shared)])

    first, second = world.call("work"), world.call("work")

    assert shared.call_id == ""
    assert first.call_id != second.call_id


def test_a_subscriber_sees_the_session_as_it_is_then_and_may_call_tools():
    seen: list[Any] = []
    world = World(
        [make_tool("work", lambda p, c: None), make_tool("fail", raising(ValueError("x")))]
    )

    def hear(event: ToolInvoked) -> None:
        seen.append((world.session[ToolInvoked].latest() is event, world.state()[0].steps))
        world.session.dispatch(Noted(f"heard {event.tool_name}"))
        if event.tool_name == "fail":
            world.call("work", "after failure")

    world.session.dispatcher.subscribe(ToolInvoked, hear)

    world.call("fail")

    assert seen == [(True, ()), (True, ("after failure",))]
    assert [r.tool_name for r in world.records] == ["fail", "work"]
    assert Noted("heard fail") in world.session[Noted].all()


# The Runtime spec's exception table, row by row, and ruling 11


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (ToolValidationError("bad path"), "bad path", "VALIDATION_FAILED"),
        (ValueError("must start with /safe/"), "must start with /safe/", "VALIDATION_FAILED"),
        (RuntimeError("disk on fire"), "Internal error: disk on fire", "INTERNAL_ERROR"),
        (AssertionError("empty"), "Internal error: empty", "INTERNAL_ERROR"),
        (KeyError("k"), "Internal error: 'k'", "INTERNAL_ERROR"),
        (StopIteration("no more"), "Internal error: no more", "INTERNAL_ERROR"),
        (StopIteration(), "Internal error: StopIteration", "INTERNAL_ERROR"),
        (ValueError(), "ValueError", "VALIDATION_FAILED"),
    ],
)
def test_an_exception_becomes_a_failed_result_and_undoes_everything(error, message, code):
    world = World([make_tool("work", raising(error))])

    result = world.call("work")

    assert not result.success
    assert result.value is None
    assert result.message == message
    assert result.failure is not None
    assert result.failure.code == code
    assert world.state() == UNTOUCHED
    assert [r.success for r in world.records] == [False]


def test_a_type_error_names_the_tool():
    world = World([make_tool("work", raising(TypeError("unsupported operand")))])

    result = world.call("work")

    assert "work" in result.message
    assert "unsupported operand" in result.message
    assert world.state() == UNTOUCHED


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        asyncio.CancelledError(),
        VisibilityExpansionRequired("open it"),
        PromptEvaluationError("stop"),
        DeadlineExceededError("late"),
    ],
)
def test_what_must_reach_the_caller_is_raised_after_rollback_and_recorded(error):
    world = World([make_tool("work", raising(error))])

    with pytest.raises(type(error)) as raised:
        world.call("work")

    assert raised.value is error
    assert world.state() == UNTOUCHED
    (record,) = world.records
    assert not record.success
    assert record.ran
    assert record.result.message


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()])
def test_an_interrupted_call_says_so_in_plain_words(error):
    """A run that is taken up tells the model."""
    world = World([make_tool("work", raising(error))])

    with pytest.raises(type(error)):
        world.call("work")

    (record,) = world.records
    assert record.result.message == "'work' was interrupted before it ended, and was rolled back"


def test_a_deadline_error_is_a_prompt_evaluation_error():
    assert issubclass(DeadlineExceededError, PromptEvaluationError)


def test_an_unexpected_error_is_logged_with_its_traceback_and_call_id(caplog):
    world = World([make_tool("work", raising(RuntimeError("boom")))])

    with caplog.at_level(logging.ERROR):
        result = world.call("work")

    (line,) = [r for r in caplog.records if r.exc_info]
    assert line.call_id == result.call_id
    assert line.tool == "work"


def test_an_expected_failure_is_not_logged_as_an_error(caplog):
    world = World([make_tool("work", lambda p, c: ToolResult.error("File not found"))])

    with caplog.at_level(logging.WARNING):
        world.call("work")

    assert caplog.records == []


def test_an_expected_failure_has_a_line_at_info_level(caplog):
    """The Chapter: "should not be logged as errors (info level is appropriate)"."""
    world = World([make_tool("work", lambda p, c: ToolResult.error("no such file\nlook again"))])

    with caplog.at_level(logging.INFO, logger="weakincentives"):
        result = world.call("work")

    (line,) = caplog.records
    assert line.levelname == "INFO"
    assert line.getMessage() == "tool work failed (EXECUTION_FAILED): no such file"
    assert line.call_id == result.call_id  # type: ignore[attr-defined]
    assert not line.exc_info


def test_a_refusal_has_a_line_at_info_level(caplog):
    world = World([make_tool("work", lambda p, c: None)])

    with caplog.at_level(logging.INFO, logger="weakincentives"):
        execute_tool(ToolCall("work", {"nome": 1}), session=world.session)
        execute_tool(ToolCall("play"), session=world.session)

    assert [(r.levelname, r.getMessage().partition(":")[0]) for r in caplog.records] == [
        ("INFO", "tool work failed (INVALID_ARGUMENTS)"),
        ("INFO", "tool play failed (TOOL_NOT_FOUND)"),
    ]


@pytest.mark.parametrize(
    ("fail", "level"),
    [
        (raising(ValueError("must start with /safe/")), "INFO"),
        (lambda p, c: json.loads("{"), "ERROR"),
        (lambda p, c: b"\xff".decode(), "ERROR"),
    ],
)
def test_a_value_error_is_logged_with_its_traceback(caplog, fail, level):
    """The handler's own word at info level; what a library raised, which is a bug, as an error."""
    world = World([make_tool("work", fail)])

    with caplog.at_level(logging.INFO, logger="weakincentives"):
        result = world.call("work")

    assert result.failure is not None
    assert result.failure.code == "VALIDATION_FAILED"
    assert not result.message.startswith("Internal error")
    (line,) = caplog.records
    assert line.levelname == level
    assert line.exc_info


def test_an_unknown_tool_is_answered_in_the_protocols_words():
    world = World([make_tool("work", lambda p, c: None)])

    result = execute_tool(ToolCall("wrok"), session=world.session)

    assert result.failure is not None
    assert result.failure.code == "TOOL_NOT_FOUND"
    assert result.failure.recoverable is False
    assert result.message == ("Tool 'wrok' not found. Did you mean 'work'? Available tools: work")


# What a handler returns is held to its tool's contract


@dataclass(frozen=True)
class Report:
    text: str = ""


@pytest.mark.parametrize(
    ("result_type", "value", "said"),
    [
        (Report, Step("a"), "a value of type Step, but its contract is ToolResult[Report]"),
        (Report, "text", "a value of type str, but its contract is ToolResult[Report]"),
        (None, Report(), "a value of type Report, but its contract is ToolResult[None]"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_failure_that_names_the_tool(result_type, value, said):
    def handler(params, *, context):
        changing_everything(params, context)
        return ToolResult.ok(value)

    world = World([Tool[Step, result_type](name="work", description="d", handler=handler)])

    result = world.call("work")

    assert not result.success
    assert result.message == (
        f"Tool 'work' failed on a value of the wrong type: the handler returned {said}"
    )
    assert result.failure is not None
    assert result.failure.code == "TYPE_ERROR"
    assert world.state() == UNTOUCHED


def test_a_value_of_a_derived_type_fits_the_contract():
    class Longer(Report):
        pass

    def handler(params, *, context):
        return ToolResult.ok(Longer("long"))

    tool = Tool[None, Report](name="work", description="d", handler=handler)

    assert tool(context=make_context()).value == Longer("long")


def later(params, *, context):
    async def work() -> ToolResult[None]:
        raise AssertionError("nobody awaits it")

    return work()


def test_a_sync_handler_that_returns_a_coroutine_fails_and_says_what_to_do(recwarn):
    async def lookup() -> str:
        raise AssertionError("nobody awaits it")

    @tool
    def look(key: str) -> Any:
        """Look."""
        return lookup()

    plain = Tool[None, None](name="look", description="d", handler=later)
    for result in (look(key="a"), plain(context=make_context())):
        assert not result.success
        assert "'look'" in result.message
        assert "returned a coroutine" in result.message
        assert "async def" in result.message
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


def test_a_coroutine_as_the_value_of_a_result_is_a_failure(recwarn):
    async def lookup() -> str:
        raise AssertionError("nobody awaits it")

    @tool
    def look() -> Any:
        """Look."""
        return ToolResult.ok(lookup())

    result = look()

    assert not result.success
    assert "returned a coroutine" in result.message
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


def test_a_future_as_the_value_of_a_result_is_a_failure():
    loop = asyncio.new_event_loop()
    future = loop.create_future()

    @tool
    def look() -> Any:
        """Look."""
        return future

    result = look()
    loop.close()

    assert not result.success
    assert "returned an awaitable Future" in result.message


def test_a_generator_as_the_value_of_a_result_is_a_failure():
    @tool
    def look() -> Any:
        """Look."""
        yield 1

    result = look()

    assert not result.success
    assert "returned a generator" in result.message
    assert "list" in result.message


@pytest.mark.parametrize("answer", [None, "text", 5, {"message": "x"}])
def test_a_handler_that_returns_no_tool_result_fails_and_says_so(answer):
    work: Tool[Any, Any] = Tool(
        name="work",
        description="Returns the wrong thing.",
        handler=lambda params, *, context: answer,
        params_type=Step,
        result_type=None,
    )
    world = World([work])

    result = world.call("work")

    assert not result.success
    assert "work" in result.message
    assert "ToolResult" in result.message


def test_a_failure_without_a_message_gets_one():
    world = World([make_tool("work", lambda p, c: ToolResult.error(""))])

    assert "work" in world.call("work").message


# The Chapter's table of what gets rolled back, row by row


def failing_world() -> World:
    world = World([make_tool("work", lambda p, c: ToolResult.error("no"))])
    world.session.dispatch(AddStep("before"))
    world.fs.write("a.txt", "before")
    world.counter.value = 7
    world.call("work")
    return world


def test_state_slices_are_restored():
    assert failing_world().session[Plan].latest() == Plan(("before",))


def test_log_slices_are_never_rolled_back():
    world = failing_world()
    assert world.session[Noted].all() == (Noted("a"),)
    assert [r.success for r in world.records] == [False]


def test_the_memory_filesystem_is_restored():
    world = failing_world()
    assert world.fs.read("a.txt") == "before"
    assert not world.fs.exists("journal.txt")


def test_resources_that_can_be_snapshotted_are_restored():
    assert failing_world().counter.value == 7


def test_what_reached_outside_is_not_rolled_back_and_the_result_says_so():
    sent: list[str] = []

    def body(params: Step, context: ToolContext) -> ToolResult[Any]:
        sent.append(params.name)
        return ToolResult.error("bounced")

    world = World([make_tool("mail", body, reach="irreversible")])

    result = world.call("mail")

    assert sent == ["a"]
    assert result.message == "bounced"
    assert set(result.metadata.undone) == {"session", "Filesystem", "Counter"}
    assert result.metadata.not_undone == ("what it did outside the session, files and resources",)


def test_a_resource_that_cannot_be_restored_is_named_and_the_others_are_restored():
    @dataclass
    class Broken:
        def snapshot(self) -> None: ...
        def restore(self, token: None) -> None:
            raise OSError("gone")

    world = World([make_tool("work", raising(ValueError("x")))], resources={Broken: Broken()})

    result = world.call("work")

    assert result.metadata.not_undone == ("Broken could not be restored: gone",)
    assert world.state() == UNTOUCHED


def test_a_resource_first_built_inside_a_failed_call_goes_back_to_how_it_began():
    class Lazy(Counter):
        pass

    def body(params: Step, context: ToolContext) -> None:
        context.resources.get(Lazy).value += 5
        if params.name == "bad":
            raise ValueError("no")

    world = World(
        [make_tool("work", body)], resources={Lazy: Binding(Lazy, lambda r: Lazy(value=10))}
    )

    world.call("work", "bad")
    assert world.prompt.resources.get(Lazy).value == 10
    world.call("work", "good")
    assert world.prompt.resources.get(Lazy).value == 15


# Refusals: nothing runs


def test_an_unknown_tool_is_refused_with_what_there_is():
    world = World([make_tool("read_file", raising(AssertionError("ran")))])

    result = world.call("read_fil")

    assert result.failure is not None
    assert result.failure.code == "TOOL_NOT_FOUND"
    assert "Did you mean 'read_file'?" in result.message
    assert [(r.tool_name, r.ran) for r in world.records] == [("read_fil", False)]


def test_bad_arguments_are_refused_with_every_problem_at_once():
    world = World([make_tool("work", raising(AssertionError("ran")))])

    result = execute_tool(ToolCall("work", {"nam": 3, "name": 4}), session=world.session)

    assert result.failure is not None
    assert result.failure.code == "INVALID_ARGUMENTS"
    assert "Invalid parameters for tool 'work'" in result.message
    assert "Expected type string, got integer 4" in result.message
    assert "nam" in result.message
    assert world.records[0].params == {"nam": 3, "name": 4}


def test_a_denial_runs_nothing_and_takes_no_snapshot():
    class Never:
        name = "never"

        def check(self, tool, params, *, context):
            return PolicyDecision.deny("Not today")

    class Watched(Counter):
        def snapshot(self) -> int:
            raise AssertionError("snapshotted")

    world = World(
        [make_tool("work", raising(AssertionError("ran")))],
        [Never()],
        resources={Watched: Watched()},
    )

    result = world.call("work")

    assert result.message == "Not today"
    assert result.failure is not None
    assert result.failure.code == "POLICY_DENIED"
    assert world.state() == UNTOUCHED
    assert not world.records[0].ran


def test_a_policy_that_raises_denies():
    class Broken:
        def check(self, tool_name: str, params: object, context: ToolContext) -> str | None:
            raise OSError("policy server is down")

    world = World([make_tool("work", raising(AssertionError("ran")))], [Broken()])

    result = world.call("work")

    assert not result.success
    assert "Broken" in result.message
    assert "policy server is down" in result.message


def test_an_async_policy_is_awaited():
    class Slow:
        name = "slow"

        async def check(self, tool, params, *, context):
            await asyncio.sleep(0)
            return PolicyDecision.deny("No, after some thought")

    world = World([make_tool("work", raising(AssertionError("ran")))], [Slow()])

    assert world.call("work").message == "No, after some thought"


def test_a_policy_that_fails_on_the_result_undoes_the_call():
    class Forgetful:
        name = "forgetful"

        def check(self, tool, params, *, context):
            return PolicyDecision.allow()

        def on_result(self, tool, params, result, *, context):
            raise RuntimeError("no memory")

    world = World([make_tool("work", lambda p, c: None)], [Forgetful()])

    result = world.call("work")

    assert not result.success
    assert "forgetful" in result.message
    assert world.state() == UNTOUCHED


def test_a_tool_that_the_provider_runs_is_refused_here():
    world = World([Tool[Step, None](name="native", description="Elsewhere.", handler=None)])

    result = world.call("native")

    assert not result.success
    assert "provider" in result.message


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
    | st.binary()
    | st.text()
)
def test_arbitrary_arguments_never_raise_and_always_get_a_message(arguments):
    world = World([make_tool("work", lambda p, c: None)])

    result = execute_tool(ToolCall("work", arguments), session=world.session)

    assert result.message
    assert len(world.records) == 1


# reach="read"


@pytest.mark.parametrize(
    "write",
    [
        lambda c: c.session.dispatch(AddStep("x")),
        lambda c: c.session[Plan].seed(Plan(("x",))),
        lambda c: c.filesystem.write("x.txt", "x"),
        lambda c: c.filesystem.mkdir("x"),
    ],
)
def test_a_tool_that_only_reads_cannot_write(write):
    refused: list[BaseException] = []

    @tool(reach="read")
    def look(name: str, *, context: ToolContext) -> str:
        """Look around."""
        try:
            write(context)
        except ReadOnlyView as error:
            refused.append(error)
            raise
        return "seen"

    world = World([look])

    assert not world.call("look").success
    assert len(refused) == 1
    assert world.state() == UNTOUCHED


def test_a_tool_that_only_reads_takes_no_snapshot():
    class Watched(Counter):
        def snapshot(self) -> int:
            raise AssertionError("snapshotted")

    @tool(reach="read")
    def look(name: str, *, context: ToolContext) -> str:
        """Look around."""
        context.filesystem.exists("a.txt")
        return "seen"

    assert World([look], resources={Watched: Watched()}).call("look").success


# Views


def test_nothing_of_a_call_under_way_is_seen_outside():
    seen: list[Any] = []
    world = World([])

    def body(params: Step, context: ToolContext) -> None:
        other = threading.Thread(
            target=lambda: seen.append((world.session[Plan].latest(), world.fs.exists("a.txt")))
        )
        other.start()
        other.join()

    execute_tool(
        ToolCall("work", {"name": "a"}),
        context=_offering(world, make_tool("work", body)),
    )

    assert seen == [(None, False)]
    assert world.session[Plan].latest() == Plan(("a",))


def _offering(world: World, *tools: Tool[Any, Any]) -> ToolContext:
    other = World(list(tools))
    return ToolContext(
        session=world.session,
        rendered_prompt=other.prompt.rendered,
        resources=world.prompt.resources,
    )


def test_a_kept_reference_to_the_outer_session_and_files_reaches_the_calls_view():
    world = World([])

    def body(params: Step, context: ToolContext) -> None:
        world.session.dispatch(AddStep("through the outer session"))
        world.fs.write("outer.txt", "through the outer filesystem")
        assert context.filesystem.read("outer.txt")
        assert context.session[Plan].latest() == Plan(("a", "through the outer session"))
        raise ValueError("undo it all")

    execute_tool(ToolCall("work", {"name": "a"}), context=_offering(world, make_tool("work", body)))

    assert world.state() == UNTOUCHED


def test_what_a_handlers_own_threads_write_is_undone_with_it():
    def body(params: Step, context: ToolContext) -> None:
        with ThreadPoolExecutor(4) as pool:
            for n in range(20):
                pool.submit(context.filesystem.write, f"part{n}.txt", "x")
                pool.submit(context.session.dispatch, AddStep(f"part{n}"))
        assert len(context.filesystem.glob("part*")) == 20
        raise ValueError("after all that")

    world = World([make_tool("work", body)])

    world.call("work")

    assert world.state() == UNTOUCHED


def test_what_a_handlers_own_threads_write_is_kept_with_it():
    def body(params: Step, context: ToolContext) -> None:
        with ThreadPoolExecutor(4) as pool:
            for n in range(20):
                pool.submit(context.filesystem.write, f"part{n}.txt", "x")
                pool.submit(context.session.dispatch, AddStep(f"part{n}"))

    world = World([make_tool("work", body)])

    world.call("work")

    plan, files, _ = world.state()
    assert len(plan.steps) == 21
    assert len(files) == 22


def test_a_write_after_the_call_has_ended_is_refused_and_logged(caplog):
    kept: list[ToolContext] = []
    world = World([make_tool("work", lambda p, c: kept.append(c))])
    result = world.call("work")
    (context,) = kept
    before = world.state()

    with caplog.at_level(logging.ERROR):
        with pytest.raises(ViewClosed, match=result.call_id):
            context.session.dispatch(AddStep("late"))
        with pytest.raises(ViewClosed):
            context.filesystem.write("late.txt", "x")

    assert world.state() == before
    assert any("has ended" in r.getMessage() for r in caplog.records)


def test_a_filesystem_view_kept_past_the_call_refuses_writes():
    kept: list[Any] = []
    world = World([make_tool("work", lambda p, c: kept.append(c.filesystem))])
    world.call("work")

    with pytest.raises(ViewClosed):
        kept[0].write("late.txt", "x")

    assert not world.fs.exists("late.txt")


def test_the_call_under_way_can_be_named():
    seen: list[ToolCall | None] = []
    world = World([make_tool("work", lambda p, c: seen.append(call_under_way()))])

    result = world.call("work")

    assert seen[0] is not None
    assert seen[0].id == result.call_id
    assert call_under_way() is None


def test_what_others_change_during_a_call_is_not_lost():
    world = World([])

    def body(params: Step, context: ToolContext) -> None:
        def elsewhere() -> None:
            world.session.dispatch(AddStep("from outside"))
            world.fs.write("outside.txt", "x")

        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()

    execute_tool(ToolCall("work", {"name": "a"}), context=_offering(world, make_tool("work", body)))

    plan, files, _ = world.state()
    assert plan == Plan(("from outside", "a"))
    assert set(files) == {"a.txt", "journal.txt", "outside.txt"}


def test_a_file_that_someone_else_changed_during_the_call_is_a_conflict_and_nothing_is_kept():
    world = World([])

    def body(params: Step, context: ToolContext) -> None:
        other = threading.Thread(target=lambda: world.fs.write("a.txt", "from outside"))
        other.start()
        other.join()

    result = execute_tool(
        ToolCall("work", {"name": "a"}), context=_offering(world, make_tool("work", body))
    )

    assert result.failure is not None
    assert result.failure.code == "CONFLICT"
    assert "a.txt" in result.message
    assert world.state() == (Plan(), {"a.txt": "from outside"}, 0)


# Nested calls


def nested_world(inner_fails: bool, outer_fails: bool) -> tuple[World, list[ToolResult[Any]]]:
    inner_results: list[ToolResult[Any]] = []
    inner = make_tool("inner", raising(ValueError("inner")) if inner_fails else lambda p, c: None)

    def body(params: Step, context: ToolContext) -> None:
        inner_results.append(inner(Step("i"), context=context))
        if outer_fails:
            raise ValueError("outer")

    return World([make_tool("outer", body), inner]), inner_results


@pytest.mark.parametrize(
    ("inner_fails", "outer_fails", "steps"),
    [
        (False, False, ("o", "i")),
        (True, False, ("o",)),
        (False, True, ()),
        (True, True, ()),
    ],
)
def test_a_nested_call_is_a_savepoint(inner_fails, outer_fails, steps):
    world, results = nested_world(inner_fails, outer_fails)

    world.call("outer", "o")

    plan, files, count = world.state()
    assert plan.steps == steps
    assert set(files) == {f"{s}.txt" for s in steps} | ({"journal.txt"} if steps else set())
    assert count == len(steps)
    assert results[0].success is not inner_fails
    assert [r.tool_name for r in world.records] == ["inner", "outer"]
    assert [n.text for n in world.session[Noted].all()] == ["o", "i"]


def test_a_nested_call_from_a_handlers_thread_belongs_to_its_call():
    inner = make_tool("inner", lambda p, c: None)

    def body(params: Step, context: ToolContext) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda n: inner(Step(n), context=context), ["x", "y"]))
        raise ValueError("outer")

    world = World([make_tool("outer", body), inner])

    world.call("outer", "o")

    assert world.state() == UNTOUCHED
    assert sorted(r.tool_name for r in world.records) == ["inner", "inner", "outer"]


def test_a_nested_call_without_a_context_belongs_to_the_call_under_way():
    inner = make_tool("inner", lambda p, c: None)

    def body(params: Step, context: ToolContext) -> None:
        inner(name="i")
        raise ValueError("outer")

    world = World([make_tool("outer", body), inner])

    world.call("outer", "o")

    assert world.state() == UNTOUCHED


def test_a_nested_call_without_a_context_keeps_the_policies_and_limits_of_the_outer_one():
    class NotInner:
        def check(self, tool_name: str, params: object, context: ToolContext) -> str | None:
            return "not inner" if tool_name == "inner" else None

    answers: list[str] = []
    inner = make_tool("inner", raising(AssertionError("ran")))
    outer = make_tool("outer", lambda p, c: answers.append(inner(name="i").message))
    world = World([outer, inner], [NotInner()])

    execute_tool(ToolCall("outer", {"name": "o"}), session=Session(), prompt=world.prompt)

    assert answers == ["not inner"]


def test_a_tool_that_only_reads_cannot_write_through_another_tool():
    write = make_tool("write", lambda p, c: None)
    answers: list[ToolResult[Any]] = []

    @tool(reach="read")
    def look(name: str, *, context: ToolContext) -> str:
        """Look around."""
        answers.append(write(Step(name), context=context))
        return "seen"

    world = World([look, write])

    assert world.call("look").success
    assert not answers[0].success
    assert world.state() == UNTOUCHED


@pytest.mark.parametrize("up", [True, False])
def test_what_a_relative_of_the_session_logs_is_kept_and_its_state_is_not(up: bool):
    def body(params: Step, context: ToolContext) -> None:
        relative = context.session.parent if up else context.session.children[0]
        assert relative is not None
        relative.dispatch(Noted("in the relative"))
        relative.dispatch(AddStep("in the relative"))
        raise ValueError("undo")

    family = Session()
    world = World([make_tool("work", body)], session=Session(parent=family) if up else family)
    relative = family if up else Session(parent=world.session)

    world.call("work")

    assert relative[AddStep].all() == ()
    assert relative[Noted].all() == (Noted("in the relative"),)


def test_a_child_session_is_part_of_its_parents_call():
    child_of: list[Session] = []

    def body(params: Step, context: ToolContext) -> None:
        Session(parent=context.session)
        child_of[0].dispatch(AddStep("in the child"))
        raise ValueError("undo")

    world = World([make_tool("work", body)])
    child_of.append(Session(parent=world.session))

    world.call("work")

    assert world.session.children == (child_of[0],)
    assert child_of[0][AddStep].all() == ()


# Scopes


def test_a_tool_call_resource_lives_exactly_one_call():
    made: list[Any] = []
    closed: list[Any] = []

    class Tracer:
        def close(self) -> None:
            closed.append(self)

    def build(r: Any) -> Tracer:
        made.append(Tracer())
        return made[-1]

    def body(params: Step, context: ToolContext) -> None:
        assert context.resources.get(Tracer) is context.resources.get(Tracer)
        assert not closed or closed[-1] is not context.resources.get(Tracer)
        if params.name == "bad":
            raise ValueError("x")

    world = World(
        [make_tool("work", body)],
        resources={Tracer: Binding(Tracer, build, scope=Scope.TOOL_CALL)},
    )

    world.call("work", "good")
    world.call("work", "bad")

    assert len(made) == 2
    assert closed == made


def test_a_tool_call_resource_that_fails_to_close_does_not_undo_the_call(caplog):
    class Sticky:
        def close(self) -> None:
            raise OSError("stuck")

    world = World(
        [make_tool("work", lambda p, c: c.resources.get(Sticky) and None)],
        resources={Sticky: Binding(Sticky, lambda r: Sticky(), scope=Scope.TOOL_CALL)},
    )

    result = world.call("work")

    assert result.success
    assert world.state()[0] == Plan(("a",))
    assert "stuck" in caplog.text


# Limits


def test_an_endless_handler_is_answered_in_time_and_changes_nothing_later():
    """It goes on writing after its timeout; all of that is refused."""
    stop = threading.Event()
    refused = threading.Event()

    def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        while not stop.is_set():
            try:
                context.session.dispatch(AddStep("more"))
                context.filesystem.append("more.txt", "x")
            except ViewClosed:
                refused.set()
                break
        return ToolResult.ok(None)

    world = World(
        [Tool[Step, None](name="endless", description="Go on.", handler=handler, timeout=0.1)]
    )

    result = world.call("endless")

    assert refused.wait(120)
    stop.set()
    assert result.failure is not None
    assert result.failure.code == "TIMEOUT"
    assert "timed out after 0.1 s" in result.message
    assert world.state() == UNTOUCHED


def test_a_handler_that_comes_to_the_files_after_its_timeout_keeps_nobody_else_out(tmp_path: Path):
    answered, refused = threading.Event(), threading.Event()
    root = tmp_path / "root"
    root.mkdir()
    with HostFilesystem(root) as disk:

        def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
            answered.wait(120)
            with pytest.raises(ViewClosed):
                disk.write("late.txt", "x")
            refused.set()
            return ToolResult.ok(None)

        late = Tool[Step, None](name="late", description="Late.", handler=handler, timeout=0.05)
        world = World([late, make_tool("work", lambda p, c: None)], fs=disk)

        assert world.call("late").failure.code == "TIMEOUT"
        answered.set()
        assert refused.wait(120)

        assert world.call("work").success
        disk.write("free.txt", "x")
        assert not disk.exists("late.txt")


def test_an_async_handler_that_ignores_its_cancellation_is_left_behind():
    answered = False

    async def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        while not answered:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return ToolResult.ok(None)

    slow = Tool[Step, None](name="slow", description="Slow.", handler=handler, timeout=0.05)
    world = World([slow])

    result = world.call("slow")
    answered = True

    assert result.failure is not None
    assert result.failure.code == "TIMEOUT"


def test_a_timed_out_handler_is_told_to_stop():
    stopped = threading.Event()

    def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        if context.signal.wait(120):
            stopped.set()
        return ToolResult.ok(None)

    wait = Tool[Step, None](name="wait", description="Wait.", handler=handler, timeout=0.05)
    World([wait]).call("wait")

    assert stopped.wait(120)


def test_a_process_with_an_abandoned_handler_exits_normally():
    program = """
import time
import weakincentives as wink

@wink.tool(timeout=0.05)
def forever() -> str:
    \"\"\"Never return.\"\"\"
    while True:
        time.sleep(0.01)

result = forever()
print(result.failure.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )

    assert (done.returncode, done.stdout.strip()) == (0, "TIMEOUT"), done.stderr


def test_an_elapsed_deadline_is_recorded_then_raised():
    clock = FakeClock()
    deadline = Deadline.after(5, clock=clock)
    clock.advance(6)
    world = World([make_tool("work", raising(AssertionError("ran")))])
    context = ToolContext(
        session=world.session,
        prompt=world.prompt,
        resources=world.prompt.resources,
        deadline=deadline,
    )

    with pytest.raises(DeadlineExceededError):
        execute_tool(ToolCall("work", {"name": "a"}), context=context)

    (record,) = world.records
    assert (record.success, record.ran) == (False, False)
    assert record.result.failure is not None
    assert record.result.failure.code == "DEADLINE_EXCEEDED"


def test_a_deadline_that_passes_while_the_handler_runs_ends_it():
    world = World([make_tool("wait", lambda p, c: c.signal.wait(120) and None)])
    context = ToolContext(
        session=world.session,
        prompt=world.prompt,
        resources=world.prompt.resources,
        deadline=Deadline.after(0.1),
    )

    with pytest.raises(DeadlineExceededError):
        execute_tool(ToolCall("wait", {"name": "a"}), context=context)

    assert world.state() == UNTOUCHED
    assert [r.success for r in world.records] == [False]


def test_a_used_up_budget_stops_the_run_before_the_handler():
    tracker = BudgetTracker(Budget(max_total_tokens=10))
    tracker.record(TokenUsage(input_tokens=8, output_tokens=3))
    world = World(
        [make_tool("work", raising(AssertionError("ran")))], resources={BudgetTracker: tracker}
    )

    with pytest.raises(BudgetExceededError):
        world.call("work")

    assert world.state() == UNTOUCHED
    assert len(world.records) == 1


def test_a_handler_sees_limits_ids_and_heartbeat():
    seen: list[ToolContext] = []
    beats = Heartbeat()
    world = World([])

    def body(params: Step, context: ToolContext) -> None:
        seen.append(context)
        context.beat()

    work = make_tool("work", body)
    context = ToolContext(
        session=world.session,
        resources={Filesystem: world.fs, Counter: world.counter},
        heartbeat=beats,
        run_context=RunContext(run_id="r", loop_id="l", agent_id="ag"),
        config={"k": "v"},
    )

    result = work(Step("a"), context=context)

    (bound,) = seen
    assert (bound.session_id, bound.loop_id, bound.agent_id) == (
        world.session.session_id,
        "l",
        "ag",
    )
    assert bound.call_id == result.call_id
    assert bound.config == {"k": "v", "tool_name": "work"}
    assert beats.beats == 2


# Sync and async


@tool
async def nap(seconds: float, *, context: ToolContext) -> str:
    """Sleep a little."""
    await asyncio.sleep(seconds)
    context.session.dispatch(AddStep("slept"))
    return "awake"


def test_an_async_handler_runs_from_a_plain_script():
    assert nap(seconds=0.01).value == "awake"


def test_an_async_handler_runs_from_inside_a_running_loop():
    async def main() -> Any:
        return nap(seconds=0.01).value

    assert asyncio.run(main()) == "awake"


def test_an_async_handler_runs_on_the_callers_own_loop():
    loops: list[Any] = []

    @tool
    async def where() -> str:
        """Say which loop this is."""
        loops.append(asyncio.get_running_loop())
        return "here"

    async def main() -> Any:
        loops.append(asyncio.get_running_loop())
        return await where.acall()

    assert asyncio.run(main()).value == "here"
    assert loops[0] is loops[1]


def test_an_async_handler_runs_from_a_thread():
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: nap(seconds=0.01).value, range(6)))

    assert answers == ["awake"] * 6


def test_an_async_handler_may_call_another_async_tool_synchronously():
    @tool
    async def outer(*, context: ToolContext) -> str:
        """Call another."""
        return str(nap(seconds=0.01, context=context).value)

    assert outer().value == "awake"


def test_a_sync_call_needs_no_event_loop():
    program = """
import sys
import weakincentives as wink

@wink.tool
def add(a: int, b: int) -> str:
    \"\"\"Add.\"\"\"
    return str(a + b)

assert add(a=1, b=2).value == "3"
print("asyncio" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )

    assert done.stdout.strip() == "False"


_language: ContextVar[str] = ContextVar("language", default="none")
_LONG = 240
"""Seconds a handler waits for what a loop that is not blocked does at once."""


def test_a_loop_goes_on_while_a_sync_handler_runs():
    """A server that awaits a call still serves its other clients, and context variables hold."""
    served = threading.Event()

    def body(params: Step, context: ToolContext) -> ToolResult[None]:
        assert served.wait(_LONG), "the loop stood still"
        assert call_under_way().name == "work"
        return ToolResult.ok(None, _language.get())

    world = World([make_tool("work", body)])

    async def main() -> list[ToolResult[Any]]:
        async def serve() -> None:
            await asyncio.sleep(0.01)
            served.set()

        _language.set("la")
        turn = [ToolCall("work", {"name": "a"})]
        other = asyncio.create_task(serve())
        results = [await aexecute_tool(turn[0], session=world.session)]
        served.clear()
        again = asyncio.create_task(serve())
        results += await aexecute_tools(turn, session=world.session)
        await asyncio.gather(other, again)
        return results

    results = asyncio.run(main())

    assert [result.message for result in results] == ["la", "la"]
    assert world.counter.value == 2


def test_sync_handlers_of_sync_callers_do_not_stop_the_background_loop():
    """It serves all calls that need a loop: one that takes its time must not hold up the others."""
    second = threading.Event()

    class Asks:
        name = "asks"

        async def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            await asyncio.sleep(0)
            return PolicyDecision.allow()

        def on_result(self, *_: Any, context: ToolContext) -> None:
            pass

    def wait(params: Step, context: ToolContext) -> None:
        assert second.wait(_LONG), "the other call never ran"

    first_world = World([make_tool("work", wait)], policies=[Asks()])
    other_world = World([make_tool("work", lambda *_: second.set())], policies=[Asks()])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(first_world.call, "work")
        other = pool.submit(other_world.call, "work")

    assert first.result().success
    assert other.result().success


def test_cancelling_a_task_that_awaits_a_sync_handler_rolls_back_and_fences_it():
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    refused: list[BaseException] = []

    def body(params: Step, context: ToolContext) -> None:
        begun.set()
        go_on.wait(_LONG)
        try:
            context.filesystem.write("late.txt", "late")
        except ViewClosed as error:
            refused.append(error)
        ended.set()

    world = World([make_tool("work", body)])

    async def main() -> None:
        call = aexecute_tool(ToolCall("work", {"name": "a"}), session=world.session)
        task = asyncio.create_task(call)
        await asyncio.to_thread(begun.wait, _LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    go_on.set()
    assert ended.wait(_LONG)

    assert refused
    assert world.state() == UNTOUCHED
    assert [record.result.failure.code for record in world.records] == ["INTERRUPTED"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_that_a_sync_handler_raises_reaches_the_one_who_awaits(error: BaseException):
    world = World([make_tool("work", raising(error))])

    async def main() -> None:
        with pytest.raises(type(error)):
            await aexecute_tool(ToolCall("work", {"name": "a"}), session=world.session)

    asyncio.run(main())

    assert world.state() == UNTOUCHED


def test_cancelling_the_callers_task_rolls_back_and_records():
    started = asyncio.Event()

    async def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        changing_everything(params, context)
        started.set()
        await asyncio.sleep(30)
        return ToolResult.ok(None)

    world = World([Tool[Step, None](name="slow", description="Slow.", handler=handler)])

    async def main() -> None:
        task = asyncio.create_task(
            aexecute_tool(ToolCall("slow", {"name": "a"}), session=world.session)
        )
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())

    assert world.state() == UNTOUCHED
    assert [r.success for r in world.records] == [False]


def test_an_interrupt_raised_by_an_async_handler_reaches_a_sync_caller():
    async def handler(params: Step, *, context: ToolContext) -> ToolResult[None]:
        changing_everything(params, context)
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    world = World([Tool[Step, None](name="stop", description="Stop.", handler=handler), nap])

    with pytest.raises(KeyboardInterrupt):
        world.call("stop")

    assert world.state() == UNTOUCHED
    again = execute_tool(ToolCall("nap", {"seconds": 0.0}), session=world.session)
    assert again.success  # the background loop lives


def test_the_same_text_reaches_the_model_from_sync_and_async():
    world = World([make_tool("work", raising(ValueError("same")))])

    sync = world.call("work")
    other = asyncio.run(aexecute_tool(ToolCall("work", {"name": "a"}), session=world.session))

    assert sync.render() == other.render() == "same"


def test_a_handler_that_lets_stop_iteration_out_gets_its_text_to_the_model():
    world = World([make_tool("work", lambda p, c: next(iter(())))])

    assert "StopIteration" in world.call("work").message


def test_a_sync_wrapper_that_has_awaited_already_is_taken_at_its_word():
    import functools

    async def inner(params: Step, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok(None, message="awaited inside")

    @functools.wraps(inner)
    def wrapper(params: Step, *, context: ToolContext) -> ToolResult[None]:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, inner(params, context=context)).result()

    world = World([Tool[Step, None](name="work", description="Works.", handler=wrapper)])

    assert world.call("work").message == "awaited inside"


# Several callers


def test_200_calls_from_threads_lose_no_update():
    @tool
    def count(*, context: ToolContext) -> str:
        """Read, then write one more."""
        plan = context.session[Plan].latest() or Plan()
        context.session[Plan].seed(Plan((*plan.steps, "x")))
        counter = context.resources.get(Counter)
        counter.value = counter.value + 1
        return "counted"

    world = World([count])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: execute_tool(ToolCall("count"), session=world.session), range(200)))

    plan, _, counter = world.state()
    assert len(plan.steps) == 200
    assert counter == 200


def test_calls_from_tasks_of_one_loop_lose_no_update():
    @tool
    async def count(*, context: ToolContext) -> str:
        """Read, wait, then write one more."""
        plan = context.session[Plan].latest() or Plan()
        await asyncio.sleep(0.001)
        context.session[Plan].seed(Plan((*plan.steps, "x")))
        return "counted"

    world = World([count])

    async def main() -> None:
        await asyncio.gather(
            *(aexecute_tool(ToolCall("count"), session=world.session) for _ in range(20))
        )

    asyncio.run(main())

    assert len(world.state()[0].steps) == 20


def test_waiting_in_a_loop_for_a_call_of_that_loop_is_an_error_that_says_what_to_do():
    """A sync call inside a loop would wait for a task that can no longer run."""
    started = asyncio.Event()

    @tool
    async def slow() -> str:
        """Sleep."""
        started.set()
        await asyncio.sleep(0.2)
        return "done"

    world = World([slow])

    async def main() -> Any:
        task = asyncio.create_task(aexecute_tool(ToolCall("slow"), session=world.session))
        await started.wait()
        with pytest.raises(RuntimeError, match="aexecute_tool"):
            execute_tool(ToolCall("slow"), session=world.session)
        return await task

    assert asyncio.run(main()).success


def test_a_sync_call_inside_a_loop_waits_for_a_call_of_another_thread():
    release = threading.Event()
    inside = threading.Event()

    def body(params: Step, context: ToolContext) -> None:
        if params.name == "first":
            inside.set()
            release.wait(120)

    world = World([make_tool("work", body)])
    first = threading.Thread(target=lambda: world.call("work", "first"))
    first.start()
    assert inside.wait(120)

    async def main() -> Any:
        threading.Timer(0.05, release.set).start()
        return world.call("work", "second")

    assert asyncio.run(main()).success
    first.join()
    assert world.state()[0] == Plan(("first", "second"))


# Ways in


def test_a_tool_called_alone_gets_a_session_of_its_own():
    @tool
    def greet(name: str) -> str:
        """Greet."""
        return f"Hello {name}"

    assert greet(name="you").value == "Hello you"
    assert greet({"name": 3}).failure.code == "INVALID_ARGUMENTS"


def test_calling_a_tool_runs_the_pipeline_in_the_given_context():
    context = make_context(resources={Counter: Counter()})
    context.session[Plan].register(AddStep, lambda plans, e: plans.replace(Plan((e.step,))))

    make_tool("work", raising(ValueError("x")))(Step("a"), context=context)

    assert context.session[Plan].latest() is None
    assert not context.filesystem.exists("a.txt")
    assert [r.success for r in context.session[ToolInvoked].all()] == [False]


def test_policies_of_the_prompt_hold_for_a_tool_that_is_called_directly():
    class Never:
        def check(self, tool_name: str, params: object, context: ToolContext) -> str | None:
            return "never"

    work = make_tool("work", raising(AssertionError("ran")))
    world = World([work], [Never()])
    context = ToolContext(
        session=world.session, prompt=world.prompt, resources=world.prompt.resources
    )

    assert work(Step("a"), context=context).message == "never"


def test_each_session_has_the_tools_that_it_was_shown():
    """One prompt, rendered for two sessions, one of which does not see a section."""
    from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate

    for_admins = MarkdownSection(
        title="Admin",
        tools=[make_tool("admin", lambda p, c: None)],
        enabled=lambda session: session.tags.get("role") == "admin",
    )
    prompt = Prompt(PromptTemplate(sections=[for_admins])).bind(
        resources={Filesystem: World().fs, Counter: Counter()}
    )
    admin, guest = Session(tags={"role": "admin"}), Session()
    prompt.render(admin)
    prompt.render(guest)
    call = ToolCall("admin", {"name": "a"})

    assert execute_tool(call, session=admin).success
    assert execute_tool(call, session=guest).failure.code == "TOOL_NOT_FOUND"
    context = ToolContext(session=admin, prompt=prompt)
    assert execute_tool(call, context=context).success


def test_execute_tool_without_a_prompt_says_what_to_do():
    with pytest.raises(Exception, match=r"prompt\.render\(session\)"):
        execute_tool(ToolCall("work"), session=Session())
    with pytest.raises(TypeError, match="session="):
        execute_tool(ToolCall("work"))
