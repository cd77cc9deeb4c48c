"""Objects that calls change in place: one call at a time, whichever session, thread or loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from weakincentives.adapters import ScriptedAdapter, calls
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import DeadlineExceededError
from weakincentives.prompt import (
    ApprovalPolicy,
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.resources import Binding, ResourceRegistry, Scope
from weakincentives.retry import RetryPolicy
from weakincentives.runtime import (
    MainLoop,
    PendingToolTracker,
    Session,
    ToolCall,
    ToolInvoked,
    ToolRegistry,
    aexecute_tool,
    create_snapshot,
    execute_tool,
    parallel,
    restore_snapshot,
    sequence,
    tool_transaction,
)

WAIT = 60
"""Seconds to wait for what must happen."""


class Shelf:
    """A user's resource that can only be snapshotted."""

    def __init__(self) -> None:
        self.items: list[str] = []

    def snapshot(self) -> tuple[str, ...]:
        return tuple(self.items)

    def restore(self, token: tuple[str, ...]) -> None:
        self.items[:] = token


class Other(Shelf):
    """Another one."""


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    fails: bool = False


class Moment:
    """A place in a handler that a test waits for, and lets go on."""

    def __init__(self) -> None:
        self.begun, self.ends = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.ends.wait(WAIT)

    def starts(self, work: Callable[[], object]) -> threading.Thread:
        """Run work in a thread, up to this moment."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert self.begun.wait(WAIT)
        return thread

    def lets(self, thread: threading.Thread) -> None:
        self.ends.set()
        thread.join(WAIT)
        assert not thread.is_alive()


def put(params: Item, *, context: ToolContext) -> ToolResult[None]:
    """Put an item on the shelf in two steps, as a busy handler does."""
    shelf = context.resources.get(Shelf)
    found = [*shelf.items, params.name]
    time.sleep(0)
    shelf.items[:] = found
    return ToolResult.error("no") if params.fails else ToolResult.ok(None)


def tool(name: str, handler: Callable[..., Any] = put, **options: Any) -> Tool[Item, None]:
    return Tool[Item, None](name=name, description="Puts.", handler=handler, **options)


def on_shelf(body: Callable[[Shelf], object], *, fails: bool = False) -> Callable[..., Any]:
    """Return a handler that puts its item on the shelf, then does something."""

    def handler(params: Item, *, context: ToolContext) -> ToolResult[None]:
        shelf = context.resources.get(Shelf)
        shelf.items.append(params.name)
        body(shelf)
        return ToolResult.error("no") if fails or params.fails else ToolResult.ok(None)

    return handler


def has_waiting(shelf: Shelf, count: int = 1) -> None:
    """Wait until calls wait for a shelf."""
    from weakincentives.core.gate import gate_of

    for _ in range(100 * WAIT):
        if len(gate_of(shelf).line) >= count:
            return
        time.sleep(0.01)
    raise AssertionError("no call waits")


def is_free(shelf: Shelf) -> bool:
    from weakincentives.core.gate import gate_of

    return not gate_of(shelf).locked() and not gate_of(shelf).line


# Committed work stays


def test_a_call_that_fails_leaves_what_another_session_has_committed():
    shelf, moment = Shelf(), Moment()
    slow = tool("slow", on_shelf(lambda _: moment(), fails=True))
    with ToolRegistry([slow, tool("put")], resources={Shelf: shelf}) as tools:
        one = moment.starts(
            lambda: execute_tool(
                ToolCall("slow", {"name": "lost"}),
                context=tools.context().having(session=Session()),
            )
        )
        results: list[ToolResult[Any]] = []
        other = threading.Thread(
            target=lambda: results.append(
                execute_tool(
                    ToolCall("put", {"name": "kept"}),
                    context=tools.context().having(session=Session()),
                )
            )
        )
        other.start()
        has_waiting(shelf)
        moment.lets(one)
        other.join(WAIT)
    assert results[0].success
    assert shelf.items == ["kept"]
    assert is_free(shelf)


def rounds(count: int, ways: int = 40) -> None:
    """Half of the calls of 40 sessions fail; exactly the others are there, each once."""
    for number in range(count):
        shelf = Shelf()
        registries = [ToolRegistry([tool("put")], resources={Shelf: shelf}) for _ in range(ways)]
        start = threading.Barrier(ways)
        results: dict[str, bool] = {}

        def work(
            index: int,
            registries: list[ToolRegistry] = registries,
            start: threading.Barrier = start,
            results: dict[str, bool] = results,
        ) -> None:
            start.wait(WAIT)
            name = f"i{index}"
            fails = index % 2 == 1
            done = registries[index].execute("put", {"name": name, "fails": fails})
            results[name] = done.success

        threads = [threading.Thread(target=work, args=(index,)) for index in range(ways)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        committed = sorted(name for name, success in results.items() if success)
        assert len(results) == ways, f"round {number}"
        assert len(committed) == ways // 2, f"round {number}"
        assert sorted(shelf.items) == committed, f"round {number}"
        assert is_free(shelf)


def test_forty_sessions_in_threads_lose_nothing():
    rounds(3)


@pytest.mark.heavy
def test_forty_sessions_in_threads_lose_nothing_in_a_thousand_rounds():
    rounds(1000)


def test_an_object_that_each_registry_gets_from_a_provider_is_the_same_object():
    """It is not known before a call first asks for it; then that call waits in its handler."""
    for number in range(3):
        shelf = Shelf()
        bindings = ResourceRegistry.of(Binding(Shelf, lambda r, it=shelf: it))
        registries = [ToolRegistry([tool("put")], resources=bindings) for _ in range(20)]
        results = in_threads(
            [
                lambda each=each, index=index: each.execute(
                    "put", {"name": f"i{index}", "fails": index % 2 == 1}
                )
                for index, each in enumerate(registries)
            ]
        )
        assert [each.success for each in results] == [True, False] * 10, f"round {number}"
        assert sorted(shelf.items) == sorted(f"i{index}" for index in range(0, 20, 2))
        assert is_free(shelf)


@pytest.mark.parametrize("scope", list(Scope))
def test_an_object_of_any_scope_is_changed_by_one_call_at_a_time(scope: Scope):
    shelf = Shelf()
    bindings = ResourceRegistry.of(Binding(Shelf, lambda r: shelf, scope=scope))
    with ToolRegistry([tool("put")], resources=bindings) as tools:
        contexts = [tools.context().having(session=Session()) for _ in range(10)]
        results = in_threads(
            [
                lambda context=context, index=index: execute_tool(
                    ToolCall("put", {"name": f"i{index}", "fails": index % 2 == 1}),
                    context=context,
                )
                for index, context in enumerate(contexts)
            ]
        )
    assert [each.success for each in results] == [True, False] * 5
    assert sorted(shelf.items) == sorted(f"i{index}" for index in range(0, 10, 2))
    assert is_free(shelf)


@pytest.mark.parametrize("bound", ["instance", "provider"])
@pytest.mark.parametrize("loops", [1, 2])
def test_async_calls_on_one_loop_or_on_two_lose_nothing(loops: int, bound: str):
    shelf = Shelf()

    async def work(params: Item, *, context: ToolContext) -> ToolResult[None]:
        found = context.resources.get(Shelf)
        items = [*found.items, params.name]
        await asyncio.sleep(0)
        found.items[:] = items
        return ToolResult.error("no") if params.fails else ToolResult.ok(None)

    binding = Binding(Shelf, lambda r: shelf) if bound == "provider" else shelf
    results: list[ToolResult[Any]] = []

    def run(first: int) -> None:
        async def main() -> None:
            registries = [
                ToolRegistry([tool("work", work, reach="reversible")], resources={Shelf: binding})
                for _ in range(10)
            ]
            calls = (
                each.aexecute("work", {"name": f"i{index}", "fails": index % 2 == 1})
                for index, each in enumerate(registries, first)
            )
            results.extend(await asyncio.gather(*calls))

        asyncio.run(main())

    in_threads([lambda first=first: run(first) for first in range(0, loops * 10, 10)])
    assert sum(each.success for each in results) == loops * 5
    assert sorted(shelf.items) == sorted(f"i{index}" for index in range(0, loops * 10, 2))
    assert is_free(shelf)


def test_an_async_call_that_cannot_wait_and_must_not_be_re_run_says_so():
    """Its handler may have done something outside before it asked for the object."""
    shelf = Shelf()
    begun: list[str] = []

    async def work(params: Item, *, context: ToolContext) -> ToolResult[None]:
        begun.append(params.name)
        context.resources.get(Shelf).items.append(params.name)
        await asyncio.sleep(0.01)
        return ToolResult.ok(None)

    async def main() -> list[ToolResult[Any]]:
        bindings = {Shelf: Binding(Shelf, lambda r: shelf)}
        registries = [ToolRegistry([tool("work", work)], resources=bindings) for _ in range(2)]
        calls = (each.aexecute("work", {"name": f"i{i}"}) for i, each in enumerate(registries))
        first = list(await asyncio.gather(*calls))
        # By now both know the object, so that the call waits before its handler begins.
        calls = (each.aexecute("work", {"name": f"j{i}"}) for i, each in enumerate(registries))
        return [*first, *await asyncio.gather(*calls)]

    one, other, *later = asyncio.run(main())
    assert one.success
    assert other.failure is not None
    assert (other.failure.code, other.failure.recoverable) == ("CONFLICT", True)
    assert "another call is using Shelf" in other.message
    assert all(each.success for each in later)
    assert begun == ["i0", "i1", "j0", "j1"]
    assert shelf.items == ["i0", "j0", "j1"]
    assert is_free(shelf)


@pytest.mark.parametrize("bound", ["instance", "provider"])
def test_a_main_loop_in_each_thread_loses_nothing(bound: str):
    shelf = Shelf()
    binding = Binding(Shelf, lambda r: shelf) if bound == "provider" else shelf
    template = PromptTemplate[Any](sections=[MarkdownSection(title="Work", tools=[tool("put")])])

    class Working(MainLoop[int, Any]):
        def prepare(self, request: int) -> tuple[Prompt[Any], Session]:
            return Prompt(template).bind(resources={Shelf: binding}), Session()

    def run(index: int) -> bool:
        call = ToolCall("put", {"name": f"i{index}", "fails": index % 2 == 1})
        _, session = Working(adapter=ScriptedAdapter([calls(call), "done"])).execute(index)
        [record] = session[ToolInvoked].all()
        return record.success

    results = in_threads([lambda index=index: run(index) for index in range(12)])
    assert results == [True, False] * 6
    assert sorted(shelf.items) == sorted(f"i{index}" for index in range(0, 12, 2))
    assert is_free(shelf)


# Reading


@pytest.mark.parametrize("bound", ["instance", "provider"])
def test_a_call_that_only_reads_sees_no_half_done_work(bound: str):
    shelf, moment, seen = Shelf(), Moment(), list[list[str]]()

    def look(params: Item, *, context: ToolContext) -> ToolResult[None]:
        seen.append([*context.resources.get(Shelf).items])
        return ToolResult.ok(None)

    slow = tool("slow", on_shelf(lambda _: moment(), fails=True))
    binding = Binding(Shelf, lambda r: shelf) if bound == "provider" else shelf
    writer = ToolRegistry([slow], resources={Shelf: shelf})
    reader = ToolRegistry([tool("look", look, reach="read")], resources={Shelf: binding})
    one = moment.starts(lambda: writer.execute("slow", {"name": "half"}))
    other = threading.Thread(target=lambda: reader.execute("look", {"name": ""}))
    other.start()
    has_waiting(shelf)
    assert seen == []
    moment.lets(one)
    other.join(WAIT)
    assert seen == [[]]
    assert is_free(shelf)


def test_a_call_that_only_reads_something_else_does_not_wait():
    shelf, moment = Shelf(), Moment()
    slow = tool("slow", on_shelf(lambda _: moment()))
    look = tool("look", lambda p, *, context: ToolResult.ok(None), reach="read")
    writer = ToolRegistry([slow], resources={Shelf: shelf})
    reader = ToolRegistry([look], resources={Shelf: shelf})
    one = moment.starts(lambda: writer.execute("slow", {"name": "a"}))
    assert reader.execute("look", {"name": ""}).success
    moment.lets(one)


def test_a_precondition_holds_until_the_handler_has_run():
    """Two sessions want the last item: one gets it, the other is refused."""
    from weakincentives.prompt import Precondition

    shelf = Shelf()
    shelf.items.append("last")

    def is_there(context: ToolContext) -> bool:
        return bool(context.resources.get(Shelf).items)

    def take(params: Item, *, context: ToolContext) -> ToolResult[None]:
        context.resources.get(Shelf).items.pop()
        return ToolResult.ok(None)

    there = Precondition(check=is_there, description="There is an item")
    registries = [
        ToolRegistry([tool("take", take, preconditions=[there])], resources={Shelf: shelf})
        for _ in range(8)
    ]
    results = in_threads(
        [lambda each=each: each.execute("take", {"name": ""}) for each in registries]
    )
    assert sorted(each.failure.code if each.failure else "" for each in results) == [
        "",
        *["PRECONDITION_FAILED"] * 7,
    ]


# Waiting ends


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_call_that_waits_past_its_deadline_is_recorded_and_changes_nothing(on_loop: bool):
    shelf = Shelf()
    with ToolRegistry([tool("put")], resources={Shelf: shelf}) as tools:
        context = tools.context().having(deadline=Deadline.after(0.1))
        call = ToolCall("put", {"name": "late"})
        with tool_transaction(Session(), {Shelf: shelf}):

            def run() -> str:
                try:
                    if on_loop:
                        asyncio.run(aexecute_tool(call, context=context))
                    else:
                        execute_tool(call, context=context)
                except DeadlineExceededError as error:
                    return str(error)
                return "no error"

            [said] = in_threads([run])
        assert said.startswith("The deadline passed")
        assert shelf.items == []
        assert is_free(shelf)
        assert tools.execute("put", {"name": "next"}).success


def test_a_call_that_is_cancelled_while_it_waits_lets_the_next_one_by():
    shelf = Shelf()

    async def main() -> None:
        tools = [ToolRegistry([tool("put")], resources={Shelf: shelf}) for _ in range(2)]
        with tool_transaction(Session(), {Shelf: shelf}):
            # Not in the block's context: these calls do not belong to it.
            first, second = in_threads(
                [
                    lambda each=each, name=name: asyncio.run_coroutine_threadsafe(
                        each.aexecute("put", {"name": name}), loop
                    )
                    for name, each in zip("ab", tools, strict=True)
                ]
            )
            while len(gate_line(shelf)) < 2:
                await asyncio.sleep(0.01)
            first.cancel()
            while len(gate_line(shelf)) > 1:
                await asyncio.sleep(0.01)
        assert (await asyncio.wrap_future(second)).success

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), WAIT))
    finally:
        loop.close()
    assert shelf.items == ["b"]
    assert is_free(shelf)


def test_a_handler_that_was_abandoned_while_it_waited_never_enters():
    shelf, moment = Shelf(), Moment()
    slow = tool("slow", on_shelf(lambda _: moment()))
    writer = ToolRegistry([slow], resources={Shelf: shelf})
    late = ToolRegistry(
        [tool("put", timeout=0.1)], resources={Shelf: Binding(Shelf, lambda r: shelf)}
    )
    one = moment.starts(lambda: writer.execute("slow", {"name": "a"}))
    result = late.execute("put", {"name": "late"})
    assert result.failure is not None
    assert result.failure.code == "TIMEOUT"
    moment.lets(one)
    assert writer.execute("slow", {"name": "b"}).success
    for _ in range(100 * WAIT):
        if is_free(shelf):
            break
        time.sleep(0.01)
    assert is_free(shelf)
    assert shelf.items == ["a", "b"]


def test_two_calls_that_ask_for_two_objects_in_opposite_order_both_end():
    """One of them cannot wait: it is undone and re-run, or says that it is to be tried again."""
    for reach in ("reversible", None):
        shelf, other, meet = Shelf(), Other(), threading.Barrier(2)
        bindings = {
            Shelf: Binding(Shelf, lambda r, it=shelf: it),
            Other: Binding(Other, lambda r, it=other: it),
        }

        def crossing(*kinds: type[Shelf], meet: threading.Barrier = meet) -> Callable[..., Any]:
            def work(params: Item, *, context: ToolContext) -> ToolResult[None]:
                for index, kind in enumerate(kinds):
                    context.resources.get(kind).items.append(params.name)
                    if index == 0 and not meet.broken:
                        try:
                            meet.wait(WAIT)
                            meet.abort()
                        except threading.BrokenBarrierError:
                            pass
                return ToolResult.ok(None)

            return work

        works = (crossing(Shelf, Other), crossing(Other, Shelf))
        registries = [
            ToolRegistry([tool("work", each, reach=reach)], resources=bindings) for each in works
        ]
        results = in_threads(
            [
                lambda each=each, i=i: each.execute("work", {"name": f"i{i}"})
                for i, each in enumerate(registries)
            ]
        )
        committed = sorted(f"i{index}" for index, each in enumerate(results) if each.success)
        assert len(committed) == (2 if reach else 1)
        assert sorted(shelf.items) == sorted(other.items) == committed
        codes = [each.failure.code for each in results if each.failure is not None]
        assert codes == ([] if reach else ["CONFLICT"])
        assert is_free(shelf)
        assert is_free(other)


# Calls in calls


def test_calls_nested_in_a_call_use_what_it_holds():
    shelf = Shelf()
    inner = tool("inner")

    def outer(params: Item, *, context: ToolContext) -> ToolResult[None]:
        context.resources.get(Shelf).items.append(params.name)
        assert inner(Item("inner"), context=context).success
        assert not inner(Item("undone", fails=True), context=context).success
        in_threads([lambda: inner(Item("thread"), context=context)])
        return ToolResult.ok(None)

    composed = sequence([tool("one"), tool("two")], name="both")
    together = parallel({"left": tool("left"), "right": tool("right")}, name="together")
    tools = ToolRegistry([tool("outer", outer), composed, together], resources={Shelf: shelf})
    results = in_threads(
        [
            lambda: tools.execute("outer", {"name": "outer"}),
            lambda: tools.execute("both", {"name": "b"}),
            lambda: tools.execute("together", {"name": "t"}),
        ]
    )
    assert all(each.success for each in results), [each.message for each in results]
    assert sorted(shelf.items) == ["b", "b", "inner", "outer", "t", "t", "thread"]
    assert is_free(shelf)


@pytest.mark.parametrize("bound", ["instance", "provider"])
def test_a_call_that_fails_undoes_what_a_nested_one_has_changed(bound: str):
    """Also in an object that only the nested call has asked for."""
    shelf = Shelf()

    def outer(params: Item, *, context: ToolContext) -> ToolResult[None]:
        assert tool("inner")(Item("inner"), context=context).success
        return ToolResult.error("no")

    binding = Binding(Shelf, lambda r: shelf) if bound == "provider" else shelf
    tools = ToolRegistry([tool("outer", outer)], resources={Shelf: binding})
    result = tools.execute("outer", {"name": ""})
    assert not result.success
    assert "Shelf" in result.metadata.undone
    assert shelf.items == []
    assert is_free(shelf)


def test_a_call_on_an_unrelated_session_inside_a_call_is_refused_and_told_what_to_do():
    """It would commit to an object that the call around it may still roll back."""
    shelf = Shelf()
    other = ToolRegistry([tool("put")], resources={Shelf: shelf})
    inner: list[ToolResult[Any]] = []

    def outer(params: Item, *, context: ToolContext) -> ToolResult[None]:
        context.resources.get(Shelf)
        inner.append(other.execute("put", {"name": "x"}))
        return ToolResult.ok(None)

    tools = ToolRegistry([tool("outer", outer)], resources={Shelf: shelf})
    assert tools.execute("outer", {"name": ""}).success
    assert not inner[0].success
    assert "pass on its context" in inner[0].message
    assert shelf.items == []
    assert is_free(shelf)


# People


def test_other_sessions_go_on_while_a_person_is_asked():
    shelf, asked, answered = Shelf(), threading.Event(), threading.Event()

    def ask(request: Any) -> bool:
        asked.set()
        return answered.wait(WAIT)

    def look_first(tool: Any, params: Any, context: ToolContext) -> bool:
        return context.resources.get(Shelf) is shelf  # takes part with it

    policy = ApprovalPolicy(ask=ask, when=look_first)
    section = MarkdownSection(title="Work", tools=[tool("put")], policies=[policy])
    prompt = Prompt(PromptTemplate(sections=[section])).bind(resources={Shelf: shelf})
    session = Session()
    prompt.render(session)
    results: list[ToolResult[Any]] = []
    call = ToolCall("put", {"name": "approved"})
    one = threading.Thread(target=lambda: results.append(execute_tool(call, session=session)))
    one.start()
    assert asked.wait(WAIT)
    other = ToolRegistry([tool("put")], resources={Shelf: shelf})
    assert other.execute("put", {"name": "meanwhile"}).success
    assert not other.execute("put", {"name": "no", "fails": True}).success
    answered.set()
    one.join(WAIT)
    assert results[0].success
    assert shelf.items == ["meanwhile", "approved"]
    assert is_free(shelf)


# By hand


def test_a_block_by_hand_has_the_object_to_itself_and_calls_in_it_may_use_it():
    shelf, session = Shelf(), Session()
    tools = ToolRegistry([tool("put")], resources={Shelf: shelf}, session=session)
    other = ToolRegistry([tool("put")], resources={Shelf: shelf})
    waiting = threading.Thread(target=lambda: other.execute("put", {"name": "other"}))
    with pytest.raises(RuntimeError, match="no"), tool_transaction(session, {Shelf: shelf}):
        waiting.start()
        has_waiting(shelf)
        assert tools.execute("put", {"name": "undone"}).success
        with tool_transaction(session, {Shelf: shelf}):
            shelf.items.append("undone, too")
        snapshot = create_snapshot(session, {Shelf: shelf})
        shelf.items.append("x")
        restore_snapshot(session, {Shelf: shelf}, snapshot)
        assert shelf.items == ["undone", "undone, too"]
        raise RuntimeError("no")
    waiting.join(WAIT)
    assert shelf.items == ["other"]
    assert is_free(shelf)


def test_a_block_by_hand_in_a_handler_belongs_to_the_call():
    shelf = Shelf()

    def work(params: Item, *, context: ToolContext) -> ToolResult[None]:
        found = context.resources.get(Shelf)
        found.items.append("kept")
        with pytest.raises(RuntimeError), tool_transaction(context.session, context.resources):
            found.items.append("undone")
            raise RuntimeError
        return ToolResult.ok(None)

    for binding in (shelf, Binding(Shelf, lambda r: shelf)):
        tools = ToolRegistry([tool("work", work)], resources={Shelf: binding})
        assert tools.execute("work", {"name": ""}).success
        assert is_free(shelf)
    assert shelf.items == ["kept", "kept"]


def test_a_tool_that_another_program_runs_has_the_object_to_itself():
    shelf, session = Shelf(), Session()
    tracker = PendingToolTracker(session=session, resources={Shelf: shelf})
    other = ToolRegistry([tool("put")], resources={Shelf: shelf})
    waiting = threading.Thread(target=lambda: other.execute("put", {"name": "other"}))
    tracker.begin_tool_execution(tool_use_id="1", tool_name="edit")
    shelf.items.append("undone")
    tracker.begin_tool_execution(tool_use_id="2", tool_name="edit")
    waiting.start()
    has_waiting(shelf)
    tracker.end_tool_execution(tool_use_id="2", success=True)
    assert tracker.end_tool_execution(tool_use_id="1", success=False)
    waiting.join(WAIT)
    assert shelf.items == ["other"]
    own = ToolRegistry([tool("put")], resources={Shelf: shelf}, session=session)
    tracker.begin_tool_execution(tool_use_id="4", tool_name="edit")
    assert own.execute("put", {"name": "part of it"}).success  # on the same session: no wait
    assert tracker.end_tool_execution(tool_use_id="4", success=False)
    assert shelf.items == ["other"]
    tracker.begin_tool_execution(tool_use_id="3", tool_name="edit")
    del tracker  # its end is never reported
    gc.collect()
    assert is_free(shelf)


# Cost and leaks


def test_objects_that_fork_are_not_waited_for():
    class Forkable(Shelf):
        def fork(self) -> Forkable:
            view = Forkable()
            view.items = [*self.items]
            return view

        def merge(self, view: Forkable) -> None:
            self.items = [*self.items, *(each for each in view.items if each not in self.items)]

    shelf, moment = Forkable(), Moment()
    slow = tool("slow", on_shelf(lambda _: moment(), fails=True))
    writer = ToolRegistry([slow], resources={Shelf: shelf})
    other = ToolRegistry([tool("put")], resources={Shelf: shelf})
    one = moment.starts(lambda: writer.execute("slow", {"name": "a"}))
    assert other.execute("put", {"name": "b"}).success
    moment.lets(one)
    assert shelf.items == ["b"]


@dataclass(slots=True)
class NoReferences:
    """An object that no weak reference can be made to."""

    items: list[str] = field(default_factory=list)

    def snapshot(self) -> tuple[str, ...]:
        return tuple(self.items)

    def restore(self, token: tuple[str, ...]) -> None:
        self.items[:] = token


def test_an_object_is_freed_when_its_user_drops_it():
    from weakincentives.core import gate

    shelf = Shelf()
    gone = weakref.ref(shelf)
    gc.collect()  # what other tests have left
    before = len(gate._gates)
    for resource in (shelf, NoReferences()):
        tools = ToolRegistry([tool("put")], resources={Shelf: resource})
        tools.execute("put", {"name": "a"})
        tools.close()
    del shelf, resource, tools
    gc.collect()
    assert gone() is None
    assert len(gate._gates) <= before


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Run works at once, each in a thread of its own; return what they return."""
    results: list[Any] = [None] * len(works)

    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return results


def gate_line(shelf: Shelf) -> Any:
    from weakincentives.core.gate import gate_of

    return gate_of(shelf).line


# Handlers that go on after their call has ended


def endless(ends: threading.Event) -> Callable[..., Any]:
    """Return a handler that changes the shelf, and does so again when its call has long ended."""

    def handler(params: Item, *, context: ToolContext) -> ToolResult[None]:
        shelf = context.resources.get(Shelf)
        shelf.items.append(params.name)
        ends.wait(WAIT)
        shelf.items.append("later")
        return ToolResult.ok(None)

    return handler


STILL = "the handler of 'slow' is still running and can still change Shelf"


def test_a_timeout_says_what_the_handler_can_still_change():
    shelf, ends = Shelf(), threading.Event()
    slow = tool("slow", endless(ends), timeout=0.5)
    tools = ToolRegistry([slow], resources={Shelf: shelf})
    result = tools.execute("slow", {"name": "a"})
    assert result.failure is not None
    assert result.failure.code == "TIMEOUT"
    assert result.metadata.undone == ("session",)
    assert result.metadata.not_undone == (STILL,)
    assert shelf.items == []
    ends.set()


def test_a_deadline_that_passes_says_it_too():
    shelf, ends = Shelf(), threading.Event()
    tools = ToolRegistry([tool("slow", endless(ends))], resources={Shelf: shelf})
    context = tools.context().having(deadline=Deadline.after(1.0))
    with pytest.raises(DeadlineExceededError):
        execute_tool(ToolCall("slow", {"name": "a"}), context=context)
    [record] = context.session[ToolInvoked].all()
    assert record.result.metadata.not_undone == ((STILL,) if record.ran else ())
    ends.set()


def test_a_call_around_one_that_timed_out_says_it_too():
    shelf, ends = Shelf(), threading.Event()
    slow = tool("slow", endless(ends), timeout=0.5)

    def outer(params: Item, *, context: ToolContext) -> ToolResult[None]:
        slow(Item("a"), context=context)
        return ToolResult.error("no") if params.fails else ToolResult.ok(None)

    tools = ToolRegistry([tool("outer", outer)], resources={Shelf: shelf})
    failed = tools.execute("outer", {"name": "", "fails": True})
    assert failed.metadata.not_undone == (STILL,)
    assert failed.metadata.undone == ("session",)
    assert tools.execute("outer", {"name": ""}).success
    records = tools.session[ToolInvoked].all()
    assert STILL in records[-1].notes
    ends.set()


def test_a_retry_that_succeeds_says_that_the_first_handler_goes_on():
    shelf, ends = Shelf(), threading.Event()
    first: list[bool] = []

    def handler(params: Item, *, context: ToolContext) -> ToolResult[None]:
        context.resources.get(Shelf).items.append(params.name)
        if not first:
            first.append(True)
            ends.wait(WAIT)
        return ToolResult.ok(None)

    slow = tool("slow", handler, timeout=0.5, retry=RetryPolicy(max_retries=9), reach="reversible")
    tools = ToolRegistry([slow], resources={Shelf: shelf})
    assert tools.execute("slow", {"name": "a"}).success
    assert shelf.items == ["a"]
    assert STILL in tools.session[ToolInvoked].all()[-1].notes
    ends.set()


def test_an_async_handler_that_ends_when_it_is_cancelled_is_undone_as_a_whole():
    """Also what it changes in place while it cleans up."""
    shelf = Shelf()

    async def handler(params: Item, *, context: ToolContext) -> ToolResult[None]:
        found = context.resources.get(Shelf)
        try:
            await asyncio.sleep(WAIT)
        finally:
            found.items.append("cleaning up")
        return ToolResult.ok(None)

    tools = ToolRegistry([tool("slow", handler, timeout=0.05)], resources={Shelf: shelf})
    result = tools.execute("slow", {"name": "a"})
    assert not result.success
    assert result.metadata.undone == ("session", "Shelf")
    assert result.metadata.not_undone == ()
    assert shelf.items == []


def test_a_handler_that_goes_on_without_such_an_object_is_fenced_off():
    ends = threading.Event()

    def handler(params: Item, *, context: ToolContext) -> ToolResult[None]:
        ends.wait(WAIT)
        return ToolResult.ok(None)

    tools = ToolRegistry([tool("slow", handler, timeout=0.05)])
    result = tools.execute("slow", {"name": "a"})
    assert (result.metadata.undone, result.metadata.not_undone) == (("session",), ())
    ends.set()


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_block_and_a_call_that_wait_for_each_other_both_end(
    on_loop: bool, monkeypatch: pytest.MonkeyPatch
):
    """The block has the object, the call has the session that a call in the block is made on."""
    monkeypatch.setattr("weakincentives.core.gate._LOOK_SECONDS", 0.05)
    shelf, session = Shelf(), Session()
    tools = ToolRegistry([tool("put")], resources={Shelf: shelf}, session=session)
    results: list[ToolResult[Any]] = []

    def outside() -> None:
        if on_loop:
            results.append(asyncio.run(tools.aexecute("put", {"name": "outside"})))
        else:
            results.append(tools.execute("put", {"name": "outside"}))

    other = threading.Thread(target=outside, daemon=True)
    with tool_transaction(session, {Shelf: shelf}):
        other.start()
        has_waiting(shelf)
        assert tools.execute("put", {"name": "inside"}).success
    other.join(WAIT)
    assert not other.is_alive()
    assert results[0].failure is not None
    assert results[0].failure.code == "CONFLICT"
    assert shelf.items == ["inside"]
    assert is_free(shelf)


# All of it at once


class Third(Shelf):
    """And another one."""


KINDS: tuple[type[Shelf], ...] = (Shelf, Other, Third)


def changing(kinds: list[type[Shelf]], *, nested: bool, on_loop: bool) -> Callable[..., Any]:
    """Return a handler that changes some objects, itself or in nested calls."""

    def change(params: Item, context: ToolContext) -> None:
        for kind in kinds:
            found = context.resources.get(kind)
            items = [*found.items, params.name]
            time.sleep(0)
            found.items[:] = items

    def end(params: Item) -> ToolResult[None]:
        return ToolResult.error("no", code="MEANT") if params.fails else ToolResult.ok(None)

    def inner(params: Item, *, context: ToolContext) -> ToolResult[None]:
        change(params, context)
        return end(params)

    def handler(params: Item, *, context: ToolContext) -> ToolResult[None]:
        if not nested:
            return inner(params, context=context)
        call = tool("inner", inner)
        done = call(Item(params.name), context=context)
        call(Item("never", fails=True), context=context)
        if done.failure is not None:
            return ToolResult.error("no", code=done.failure.code)
        return end(params)

    async def on_a_loop(params: Item, *, context: ToolContext) -> ToolResult[None]:
        change(params, context)
        await asyncio.sleep(0)
        return end(params)

    return on_a_loop if on_loop else handler


def mixed_round(seed: int) -> None:
    """Calls of all kinds on three objects; exactly the committed ones are there."""
    objects = {kind: kind() for kind in KINDS}
    committed: dict[type[Shelf], list[str]] = {kind: [] for kind in KINDS}

    def work(number: int) -> None:
        random = Random(f"{seed} {number}")
        for index in range(4):
            kinds = random.sample(KINDS, random.randint(1, 3))
            handler = changing(kinds, nested=random.random() < 0.3, on_loop=random.random() < 0.4)
            made = tool("change", handler, reach=random.choice([None, "reversible"]))
            resources = {
                kind: Binding(kind, lambda r, it=objects[kind]: it)
                if random.random() < 0.5
                else objects[kind]
                for kind in kinds
            }
            arguments = {"name": f"{number}.{index}", "fails": random.random() < 0.5}
            tools = ToolRegistry([made], resources=resources)
            way = random.choice(["sync", "async", "block", "undone block"])
            if way == "async":
                result = asyncio.run(tools.aexecute("change", arguments))
            elif way == "sync":
                result = tools.execute("change", arguments)
            else:
                own = {kind: objects[kind] for kind in kinds}
                with suppress(LookupError), tool_transaction(Session(), own):
                    result = tools.execute("change", arguments)
                    if way == "undone block":
                        raise LookupError
            if result.failure is not None:
                assert result.failure.code in ("MEANT", "CONFLICT"), result.message
            elif way != "undone block":
                for kind in kinds:
                    committed[kind].append(arguments["name"])

    in_threads([lambda number=number: work(number) for number in range(10)])
    for kind, found in objects.items():
        assert sorted(found.items) == sorted(committed[kind]), f"seed {seed}"
        assert is_free(found), f"seed {seed}"


def test_calls_of_all_kinds_on_several_objects_lose_nothing():
    for seed in range(3):
        mixed_round(seed)


@pytest.mark.heavy
def test_calls_of_all_kinds_on_several_objects_lose_nothing_in_many_rounds():
    for seed in range(400):
        mixed_round(seed)
