"""Calls that are started one by one, and run as the calls of one turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import Counter
from test_turn_properties import (
    CHANGING,
    LOOKING,
    Script,
    World,
    quotas,
    scripts,
    steps,
    turns,
    was_interrupted,
)

import weakincentives as wink
from weakincentives.core import gate as gate_module
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import DeadlineExceededError, PromptEvaluationError, Suspended
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import Tool, ToolContext, ToolResult
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.runtime import Session, ToolCall, ToolInvoked, ToolRegistry, aexecute_tool
from weakincentives.runtime.turn import DEFAULT_CONCURRENCY


@dataclass(frozen=True)
class Params:
    name: str = ""


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Total:
    value: int


Handler = Callable[..., Any]


def tool(name: str, handler: Handler, reach: Any = "reversible", **options: Any) -> Tool[Any, Any]:
    return Tool[Params, None](
        name=name, description="Work.", handler=handler, reach=reach, **options
    )


def ok(message: str = "") -> ToolResult[None]:
    return ToolResult.ok(None, message=message)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


async def soon() -> None:
    """Let everything that can run do so."""
    for _ in range(50):
        await asyncio.sleep(0)


@dataclass
class Desk:
    """Tools whose calls wait inside until they are let out, and what happened."""

    workspace: Path | None = None
    resources: dict[type, Any] = field(default_factory=dict)
    session: Session = field(default_factory=Session)
    began: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    outs: dict[str, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tools = ToolRegistry(
            [
                tool("look", self.look, "read"),
                tool("note", self.note),
                tool("bump", self.bump),
                tool("alone", self.alone, None),
                tool("plain", self.plain, None),
            ],
            workspace=self.workspace,
            resources=self.resources or None,
            session=self.session,
        )
        self.session.dispatcher.subscribe(ToolInvoked, lambda each: self.heard.append(each.call_id))

    async def inside(self, name: str) -> None:
        self.began.append(name)
        if name in self.outs:
            await self.outs[name].wait()

    async def look(self, params: Params, *, context: ToolContext) -> ToolResult[None]:
        await self.inside(params.name)
        return ok(f"{len(context.session[Note])} notes")

    async def note(self, params: Params, *, context: ToolContext) -> ToolResult[None]:
        context.session[Note].append(Note(params.name))
        await self.inside(params.name)
        return ok()

    async def bump(self, params: Params, *, context: ToolContext) -> ToolResult[None]:
        """Read, let others run, write: what loses updates where nothing keeps calls apart."""
        latest = context.session[Total].latest()
        value = 0 if latest is None else latest.value
        files = context.filesystem if self.workspace else None
        text = files.read("total") if files is not None and files.exists("total") else "0"
        await self.inside(params.name)
        await asyncio.sleep(0)
        context.session[Total].seed(Total(value + 1))
        if files is not None:
            files.write("total", str(int(text) + 1))
        return ok()

    async def alone(self, params: Params, *, context: ToolContext) -> ToolResult[None]:
        return await self.note(params, context=context)

    def plain(self, params: Params, *, context: ToolContext) -> ToolResult[None]:
        self.began.append(params.name)
        context.session[Note].append(Note(params.name))
        return ok()

    def hold(self, *names: str) -> None:
        """Let these calls wait inside."""
        self.outs |= {name: asyncio.Event() for name in names}

    def let_out(self, *names: str) -> None:
        for name in names:
            self.outs[name].set()

    def call(self, name: str, call: str) -> Coroutine[Any, Any, ToolResult[Any]]:
        return self.tools.aexecute(name, {"name": call}, call_id=call)

    def start(self, name: str, call: str) -> asyncio.Task[ToolResult[Any]]:
        return asyncio.create_task(self.call(name, call))

    @property
    def records(self) -> tuple[ToolInvoked, ...]:
        return self.session[ToolInvoked].all()

    @property
    def notes(self) -> list[str]:
        return [each.text for each in self.session[Note].all()]

    @property
    def total(self) -> int:
        latest = self.session[Total].latest()
        return 0 if latest is None else latest.value

    def assert_free(self) -> None:
        gates = [self.session.gate]
        if self.workspace is not None:
            gates.append(self.tools.workspace.gate)
        for gate in gates:
            assert gate is not None
            assert not gate.locked()
            assert not gate.line
            assert gate.joined is None
            assert gate.loop is None


@pytest.fixture(autouse=True)
def _woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting call also looks by itself now and then: here it must be woken."""
    monkeypatch.setattr(gate_module, "_LOOK_SECONDS", 3600.0)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    with made.tools:
        yield made
        made.assert_free()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    with made.tools:
        yield made
        made.assert_free()


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), 120))


class TestTogether:
    @pytest.mark.parametrize("where", ["nowhere", "memory", "disk"])
    @pytest.mark.parametrize("reach", ["read", "reversible"])
    def test_ten_calls_that_wait_are_inside_at_once(
        self, where: str, reach: Any, tmp_path: Path
    ) -> None:
        async def main() -> list[ToolResult[Any]]:
            all_inside = asyncio.Barrier(10)

            async def wait(params: Params, *, context: ToolContext) -> ToolResult[None]:
                if where != "nowhere":
                    context.filesystem.exists("x")
                await all_inside.wait()
                if where != "nowhere" and reach == "reversible":
                    context.filesystem.write(params.name, params.name)
                return ok(params.name)

            resources = {Filesystem: MemoryFilesystem()} if where == "memory" else None
            workspace = tmp_path if where == "disk" else None
            waits = tool("wait", wait, reach)
            with ToolRegistry([waits], resources=resources, workspace=workspace) as tools:
                started = (tools.aexecute("wait", {"name": f"f{n}"}) for n in range(10))
                results = await asyncio.gather(*started)
                assert [each.place for each in tools.session[ToolInvoked].all()] == [*range(10)]
                return results

        results = run(main)
        assert [each.message for each in results] == [f"f{n}" for n in range(10)]
        if where == "disk" and reach == "reversible":
            assert sorted(each.name for each in tmp_path.iterdir()) == [f"f{n}" for n in range(10)]

    def test_sync_handlers_that_may_run_concurrently_do(self) -> None:
        all_inside = threading.Barrier(4)

        def wait(params: Params, *, context: ToolContext) -> ToolResult[None]:
            all_inside.wait(60)
            return ok()

        async def main() -> None:
            with ToolRegistry([tool("wait", wait, "read", concurrent=True)]) as tools:
                results = await asyncio.gather(*(tools.aexecute("wait") for _ in range(4)))
                assert all(result.success for result in results)

        run(main)

    def test_a_call_joins_at_any_time_while_others_are_under_way(self, desk: Desk) -> None:
        async def main() -> None:
            desk.hold("a", "b", "c")
            first, second = desk.start("note", "a"), desk.start("look", "b")
            await until(lambda: desk.began == ["a", "b"])
            desk.let_out("a")
            await first
            third = desk.start("look", "c")
            await until(lambda: desk.began[-1] == "c")
            desk.let_out("c")
            await soon()
            assert not third.done()
            desk.let_out("b")
            # Each saw nothing of the note until it committed: then they were re-run.
            assert [(await each).message for each in (second, third)] == ["1 notes", "1 notes"]

        run(main)
        assert [(each.call_id, each.place) for each in desk.records] == [
            ("a", 0), ("b", 1), ("c", 2),
        ]  # fmt: skip

    def test_commits_records_and_subscribers_follow_the_order_of_arrival(self, disk: Desk) -> None:
        async def main() -> None:
            names = [f"c{n}" for n in range(6)]
            disk.hold(*names)
            tasks = [disk.start("note", name) for name in names]
            await until(lambda: disk.began == names)
            for name in reversed(names):
                assert disk.records == ()
                disk.let_out(name)
                await soon()
            await asyncio.gather(*tasks)
            assert disk.notes == disk.heard == names
            assert [each.call_id for each in disk.records] == names

        run(main)

    def test_no_update_is_lost(self, disk: Desk) -> None:
        async def main() -> None:
            results = await asyncio.gather(*(disk.call("bump", f"c{n}") for n in range(50)))
            assert all(result.success for result in results)

        run(main)
        assert disk.total == 50
        assert disk.tools.workspace.read("total") == "50"
        assert [each.call_id for each in disk.records] == [f"c{n}" for n in range(50)]

    @pytest.mark.parametrize("where", ["memory", "disk"])
    def test_no_call_sees_what_another_has_not_committed(self, where: str, tmp_path: Path) -> None:
        async def main() -> None:
            written, seen = asyncio.Event(), asyncio.Event()

            async def write(params: Params, *, context: ToolContext) -> ToolResult[None]:
                context.filesystem.write("x", "new")
                written.set()
                await seen.wait()
                return ToolResult.error("no")

            async def read(params: Params, *, context: ToolContext) -> ToolResult[None]:
                await written.wait()
                found = context.filesystem.exists("x")
                seen.set()
                return ok(str(found))

            resources = {Filesystem: MemoryFilesystem()} if where == "memory" else None
            workspace = tmp_path if where == "disk" else None
            made = [tool("write", write), tool("read", read, "read")]
            with ToolRegistry(made, resources=resources, workspace=workspace) as tools:
                started = (tools.aexecute(name) for name in ("write", "read"))
                _, looked = await asyncio.gather(*started)
                assert looked.message == "False"
                assert tools.session[ToolInvoked].latest().attempts == 1

        run(main)

    def test_calls_beyond_the_limit_join_when_others_have_left(self, desk: Desk) -> None:
        async def main() -> None:
            names = [f"c{n}" for n in range(DEFAULT_CONCURRENCY + 3)]
            desk.hold(*names)
            tasks = [desk.start("look", name) for name in names]
            await until(lambda: len(desk.began) == DEFAULT_CONCURRENCY)
            await soon()
            assert len(desk.began) == DEFAULT_CONCURRENCY
            desk.let_out("c0")
            await until(lambda: len(desk.began) == DEFAULT_CONCURRENCY + 1)
            desk.let_out("c2", "c3")  # they cannot commit yet
            await soon()
            assert len(desk.began) == DEFAULT_CONCURRENCY + 1
            desk.let_out("c1")
            await until(lambda: len(desk.began) == DEFAULT_CONCURRENCY + 3)
            desk.let_out(*names)
            await asyncio.gather(*tasks)

        run(main)
        assert [each.place for each in desk.records] == [*range(DEFAULT_CONCURRENCY + 3)]

    def test_a_call_by_itself_is_recorded_as_before(self, disk: Desk) -> None:
        async def main() -> None:
            for name in ("look", "note", "bump"):
                await disk.call(name, name)

        run(main)
        assert [(each.place, each.attempts) for each in disk.records] == [(None, 1)] * 3

    def test_calls_with_a_resource_that_is_changed_in_place_run_one_after_the_other(self) -> None:
        counter, inside = Counter(), list[str]()

        async def count(params: Params, *, context: ToolContext) -> ToolResult[None]:
            inside.append(params.name)
            found = context.resources.get(Counter)
            value = found.value
            await asyncio.sleep(0)
            found.value = value + 1
            assert inside == [params.name]
            inside.clear()
            return ok()

        async def main() -> None:
            resources = {Counter: counter}
            with ToolRegistry([tool("count", count)], resources=resources) as tools:
                results = await asyncio.gather(*(tools.aexecute("count") for _ in range(5)))
                assert all(result.success for result in results), results
                assert {each.place for each in tools.session[ToolInvoked].all()} == {None}

        run(main)
        assert counter.value == 5

    def test_the_first_call_may_build_such_a_resource_and_the_others_are_re_run(self) -> None:
        runs: list[str] = []

        async def count(params: Params, *, context: ToolContext) -> ToolResult[None]:
            runs.append(params.name)
            await asyncio.sleep(0)
            context.resources.get(Counter).value += 1
            return ok()

        async def main() -> None:
            lazily = ResourceRegistry.build({Counter: Binding(Counter, lambda _: Counter())})
            with ToolRegistry([tool("count", count)], resources=lazily) as tools:
                started = (tools.aexecute("count", {"name": name}) for name in "abc")
                results = await asyncio.gather(*started)
                assert all(result.success for result in results), results
                assert tools.context().resources.get(Counter).value == 3

        run(main)
        assert runs[:2] == ["a", "b"]
        assert runs.count("a") == 1  # the one that built it
        assert runs[-2:] == ["b", "c"]


class TestOrder:
    @pytest.mark.parametrize("kind", ["alone", "plain", "unknown"])
    def test_a_call_that_runs_alone_overtakes_nothing_and_is_not_overtaken(
        self, desk: Desk, kind: str
    ) -> None:
        async def main() -> None:
            desk.hold("a", "b", "d", "e")
            tasks = [desk.start("note", "a"), desk.start("look", "b")]
            tasks += [desk.start(kind, "c"), desk.start("look", "d"), desk.start("note", "e")]
            await soon()
            assert desk.began == ["a", "b"]
            desk.let_out("b", "a")
            await until(lambda: desk.began[-2:] == ["d", "e"])  # together
            assert [each.call_id for each in desk.records] == ["a", "b", "c"]
            desk.let_out("e", "d")
            results = await asyncio.gather(*tasks)
            assert results[2].success == (kind != "unknown")

        run(main)
        assert [each.call_id for each in desk.records] == ["a", "b", "c", "d", "e"]
        assert desk.heard == ["a", "b", "c", "d", "e"]
        assert desk.notes == ["a", *(["c"] if kind != "unknown" else []), "e"]

    def test_a_sync_call_from_a_thread_is_not_overtaken(self, disk: Desk) -> None:
        thread = threading.Thread(target=lambda: disk.tools.execute("plain", {"name": "b"}))
        gate = disk.session.gate
        assert gate is not None

        async def main() -> None:
            disk.hold("a")
            first = disk.start("note", "a")
            await until(lambda: disk.began == ["a"])
            thread.start()
            await until(lambda: len(gate.line) == 1)
            third = disk.start("note", "c")
            await soon()
            assert disk.began == ["a"]
            disk.let_out("a")
            await asyncio.gather(first, third)

        run(main)
        thread.join(60)
        assert disk.notes == ["a", "b", "c"]

    def test_a_call_of_another_session_on_the_same_workspace_is_not_overtaken(
        self, disk: Desk
    ) -> None:
        resources = {Filesystem: disk.tools.workspace}
        other = Desk(resources=resources)

        async def main() -> None:
            disk.hold("a")
            first = disk.start("note", "a")
            await until(lambda: disk.began == ["a"])
            elsewhere = other.start("note", "b")
            await until(lambda: len(disk.tools.workspace.gate.line) == 1)
            third = disk.start("note", "c")
            await soon()
            assert disk.began == ["a"]
            assert other.began == []
            disk.let_out("a")
            await elsewhere
            assert disk.notes == ["a"]
            await asyncio.gather(first, third)

        run(main)
        assert disk.notes == ["a", "c"]
        assert other.notes == ["b"]
        other.assert_free()

    def test_the_same_call_made_twice_at_a_time_runs_once(self, desk: Desk) -> None:
        async def main() -> None:
            desk.hold("a")
            again = [
                asyncio.create_task(
                    desk.tools.aexecute("note", {"name": "a"}, call_id="a", once=True)
                )
                for _ in range(3)
            ]
            other = desk.start("note", "b")
            await soon()
            assert desk.began == ["a"]
            desk.let_out("a")
            first, *others = [await each for each in again]
            assert [each.metadata for each in others] == [first.metadata] * 2
            await other

        run(main)
        assert desk.notes == desk.began == ["a", "b"]

    def test_an_open_ended_call_runs_alone(self, desk: Desk) -> None:
        """Nobody does its work again if it conflicts."""

        async def main() -> None:
            desk.hold("a")
            first = desk.start("note", "a")
            opened = desk.tools.begin("note", {"name": "b"}, call_id="b")
            starting = asyncio.create_task(opened.start())
            await soon()
            assert not starting.done()
            desk.let_out("a")
            await starting
            last = desk.start("note", "c")
            await soon()
            assert desk.began == ["a"]
            opened.ok()
            assert (await opened.end()).success
            await asyncio.gather(first, last)

        run(main)
        assert [each.call_id for each in desk.records] == ["a", "b", "c"]

    def test_a_turn_that_is_made_at_once_waits_and_is_not_joined(self, desk: Desk) -> None:
        async def main() -> None:
            desk.hold("a", "b")
            first = desk.start("note", "a")
            await until(lambda: desk.began == ["a"])
            made = [("note", {"name": "b"}), ("note", {"name": "c"})]
            turn = asyncio.create_task(desk.tools.aexecute_tools(made))
            last = desk.start("note", "d")
            await soon()
            assert desk.began == ["a"]
            desk.let_out("a")
            await until(lambda: desk.began == ["a", "b", "c"])
            await soon()
            assert desk.began == ["a", "b", "c"]
            desk.let_out("b")
            await asyncio.gather(first, turn, last)

        run(main)
        assert desk.notes == ["a", "b", "c", "d"]

    def test_a_nested_call_is_part_of_its_call_and_joins_nothing(self, desk: Desk) -> None:
        async def fails(params: Params, *, context: ToolContext) -> ToolResult[None]:
            made = (desk.tools.aexecute("note", {"name": n}, context) for n in ("n1", "n2"))
            await asyncio.gather(*made)
            assert len(context.session[Note]) == 2
            return ToolResult.error("not this way")

        desk.tools.register(tool("fails", fails))

        async def main() -> None:
            desk.hold("a")
            tasks = [desk.start("note", "a"), desk.start("fails", "f"), desk.start("note", "z")]
            await until(lambda: "n2" in desk.began)
            desk.let_out("a")
            await asyncio.gather(*tasks)

        run(main)
        assert desk.notes == ["a", "z"]

    @pytest.mark.parametrize("wait", range(14))
    def test_a_call_that_comes_while_the_last_one_leaves(self, disk: Desk, wait: int) -> None:
        async def main() -> None:
            tasks = [disk.start("bump", "a"), disk.start("bump", "b")]
            while disk.began.count("b") == 0:
                await asyncio.sleep(0)
            for _ in range(wait):
                await asyncio.sleep(0)
            tasks.append(disk.start("bump", "c"))
            await asyncio.gather(*tasks)

        run(main)
        assert disk.total == 3
        assert disk.tools.workspace.read("total") == "3"
        assert disk.heard == ["a", "b", "c"]


class TestEnds:
    def test_cancelling_one_call_leaves_the_others(self, disk: Desk) -> None:
        async def main() -> None:
            names = ["c0", "c1", "c2", "c3", "c4"]
            disk.hold(*names)
            tasks = [disk.start("note", name) for name in names]
            await until(lambda: disk.began == names)
            tasks[2].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[2]
            assert [each.call_id for each in disk.records] == disk.heard == ["c2"]
            disk.let_out("c4", "c3", "c1")
            await soon()
            assert [task.done() for task in tasks] == [False, False, True, False, False]
            disk.let_out("c0")
            others = await asyncio.gather(*(task for n, task in enumerate(tasks) if n != 2))
            assert all(result.success for result in others)

        run(main)
        assert disk.notes == ["c0", "c1", "c3", "c4"]
        [cancelled, *others] = disk.records
        assert cancelled.result.failure is not None
        assert cancelled.result.failure.code == "INTERRUPTED"
        assert [each.call_id for each in others] == disk.notes

    def test_cancelling_the_first_call_lets_the_next_one_commit(self, disk: Desk) -> None:
        async def main() -> None:
            disk.hold("a")
            first, second = disk.start("note", "a"), disk.start("note", "b")
            await until(lambda: disk.began == ["a", "b"])
            first.cancel()
            assert (await second).success
            assert first.cancelled()

        run(main)
        assert disk.notes == ["b"]

    class Asks(Suspended):
        pass

    @pytest.mark.parametrize("error", [PromptEvaluationError, Asks, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("raising", [0, 2])
    def test_a_call_that_raises_through_does_not_disturb_the_others(
        self, disk: Desk, error: type[BaseException], raising: int
    ) -> None:
        async def stops(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session[Note].append(Note("never"))
            context.filesystem.write("never", "x")
            await disk.inside(params.name)
            raise error("stop")

        disk.tools.register(tool("stops", stops))

        async def caught(call: Coroutine[Any, Any, Any]) -> Any:
            try:
                return await call
            except BaseException as raised:
                return raised

        async def main() -> list[Any]:
            names = [f"c{n}" for n in range(4)]
            disk.hold(*names)
            tasks = [
                asyncio.create_task(caught(disk.call("stops" if n == raising else "note", name)))
                for n, name in enumerate(names)
            ]
            await until(lambda: disk.began == names)
            disk.let_out(*names)
            return await asyncio.gather(*tasks)

        results = run(main)
        assert isinstance(results.pop(raising), error)
        assert all(result.success for result in results)
        assert disk.notes == [f"c{n}" for n in range(4) if n != raising]
        assert not disk.tools.workspace.exists("never")
        assert [each.success for each in disk.records].count(False) == 1

    def test_a_stuck_handler_that_is_cancelled_frees_the_rest(self, desk: Desk) -> None:
        ends = threading.Event()

        def stuck(params: Params, *, context: ToolContext) -> ToolResult[None]:
            desk.began.append(params.name)
            ends.wait(60)
            with suppress(Exception):
                context.session[Note].append(Note("too late"))
            return ok()

        desk.tools.register(tool("stuck", stuck, concurrent=True))

        async def main() -> None:
            tasks = [desk.start("stuck", "s"), desk.start("note", "b"), desk.start("look", "c")]
            await until(lambda: len(desk.began) == 3)
            waiting = desk.start("alone", "d")
            await soon()
            tasks[0].cancel()
            results = await asyncio.gather(*tasks[1:], waiting)
            assert all(result.success for result in results)
            ends.set()

        run(main)
        assert desk.notes == ["b", "d"]

    def test_a_call_that_times_out_lets_the_others_commit(self, desk: Desk) -> None:
        async def slow(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session[Note].append(Note("slow"))
            await asyncio.sleep(60)
            return ok()

        desk.tools.register(tool("slow", slow, timeout=0.05))

        async def main() -> None:
            results = await asyncio.gather(desk.call("slow", "a"), desk.call("note", "b"))
            assert [result.success for result in results] == [False, True]

        run(main)
        assert desk.notes == ["b"]

    def test_a_call_whose_deadline_passes_while_it_waits_for_earlier_calls_ends_then(
        self, desk: Desk
    ) -> None:
        async def main() -> None:
            desk.hold("a")
            first, second = desk.start("note", "a"), desk.start("look", "x")
            await until(lambda: desk.began == ["a", "x"])
            context = desk.tools.context().having(deadline=Deadline.after(0.05))
            with pytest.raises(DeadlineExceededError):
                await desk.tools.aexecute("note", {"name": "b"}, context, call_id="b")
            last = desk.start("note", "c")
            await until(lambda: desk.began[-1] == "c")
            desk.let_out("a")
            await asyncio.gather(first, second, last)

        run(main)
        assert desk.notes == ["a", "c"]
        assert desk.records[0].result.failure is not None
        assert desk.records[0].result.failure.code == "DEADLINE_EXCEEDED"

    @pytest.mark.parametrize("after", range(30))
    def test_calls_that_are_cancelled_at_any_step_lock_nobody_out(
        self, disk: Desk, after: int
    ) -> None:
        async def main() -> None:
            names = ["a", "b", "c", "d", "e"]
            kinds = ["bump", "bump", "alone", "bump", "bump"]
            tasks = [disk.start(kind, name) for kind, name in zip(kinds, names, strict=True)]
            for _ in range(after):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            disk.assert_free()
            before = disk.total
            await asyncio.gather(disk.call("bump", "x"), disk.call("bump", "y"))
            assert disk.total == before + 2
            assert disk.tools.workspace.read("total") == str(disk.total)

        run(main)

    def test_when_a_waiting_call_is_cancelled_the_next_one_joins(self, desk: Desk) -> None:
        async def main() -> None:
            desk.hold("a", "c")
            first = desk.start("note", "a")
            second, third = desk.start("alone", "b"), desk.start("note", "c")
            await soon()
            assert desk.began == ["a"]
            second.cancel()
            await until(lambda: desk.began == ["a", "c"])
            desk.let_out("a", "c")
            await asyncio.gather(first, third)

        run(main)
        assert desk.notes == ["a", "c"]


class TestSubscribers:
    def test_they_hear_of_a_call_before_its_caller_gets_the_answer(self, desk: Desk) -> None:
        """A saved session saves then: what has been answered is not lost."""

        async def main() -> None:
            desk.hold("b")
            first, second = desk.start("note", "a"), desk.start("note", "b")
            await first
            assert desk.heard == ["a"]
            assert not second.done()
            desk.let_out("b")
            await second
            assert desk.heard == ["a", "b"]

        run(main)

    def test_one_that_calls_a_tool_is_refused_while_other_calls_run(
        self, desk: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Waiting there would stop the event loop that the others need."""

        def follow(record: ToolInvoked) -> None:
            if record.tool_name == "note":
                desk.tools.execute("plain", {"name": f"after {record.call_id}"})

        desk.session.dispatcher.subscribe(ToolInvoked, follow)

        async def main() -> None:
            await asyncio.gather(desk.call("note", "a"), desk.call("note", "b"))

        run(main)
        assert desk.notes == ["a", "b", "after b"]
        assert "another call is under way on this session" in caplog.text


class TestLoops:
    def test_calls_from_two_event_loops_and_from_threads_lose_nothing(self, disk: Desk) -> None:
        def on_a_loop(name: str) -> None:
            async def main() -> None:
                made = (disk.call("bump", f"{name}{n}") for n in range(10))
                results = await asyncio.gather(*made)
                assert all(result.success for result in results)
                ended.append(name)

            run(main)

        def in_a_thread(name: str) -> None:
            for n in range(5):
                assert disk.tools.execute("bump", {"name": f"{name}{n}"}).success
                time.sleep(0)
            ended.append(name)

        ended: list[str] = []
        workers = [threading.Thread(target=on_a_loop, args=(name,)) for name in ("l", "m")]
        workers += [threading.Thread(target=in_a_thread, args=(name,)) for name in ("s", "t")]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        assert sorted(ended) == ["l", "m", "s", "t"]
        assert disk.total == 30
        assert disk.tools.workspace.read("total") == "30"


# Whatever calls are made, the outcome is that of making one after the other.

PLAIN = tuple(kind for kind in (*LOOKING, *CHANGING) if kind not in ("log", "lines", "records"))
"""What a cancelled call leaves no trace of, and does not look for traces."""
unnoticed = scripts(steps(*PLAIN))
cancellable = st.one_of(
    *[st.tuples(st.sampled_from(("work", "first", "second", "alone")), unnoticed)] * 4,
    st.tuples(st.sampled_from(("unknown", "work")), st.just({"bad": 1})),
    st.tuples(st.just("work"), unnoticed.map(lambda s: Script(s.path, s.steps, "stop"))),
)
gaps = st.lists(st.sampled_from((0, 0, 0, 1, 2, 5, 20)), min_size=6, max_size=6)
cancels = st.dictionaries(st.integers(0, 5), st.integers(0, 40), max_size=3)


async def one_by_one(
    world: World, made: list[ToolCall], gaps: list[int], cancels: dict[int, int]
) -> list[Any]:
    """Start the calls; returns what each caller got."""

    async def cancel(task: asyncio.Task[Any], after: int) -> None:
        for _ in range(after):
            await asyncio.sleep(0)
        task.cancel()

    tasks: list[asyncio.Task[Any]] = []
    cancelling: list[asyncio.Task[Any]] = []
    for number, (call, gap) in enumerate(zip(made, gaps, strict=False)):
        tasks.append(asyncio.create_task(aexecute_tool(call, session=world.session)))
        if number in cancels:
            cancelling.append(asyncio.create_task(cancel(tasks[-1], cancels[number])))
        for _ in range(gap):
            await asyncio.sleep(0)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*cancelling)
    return [
        type(each)
        if isinstance(each, BaseException)
        else (each.success, each.message, each.failure and each.failure.code)
        for each in outcomes
    ]


def told(records: Any) -> list[Any]:
    return [(r.tool_name, r.success, r.ran, r.result.message) for r in records]


def check(
    drawn: list[tuple[str, Any]], quota: int | None, gaps: list[int], cancels: dict[int, int]
) -> None:
    made = [ToolCall(name, params, id=f"c{number}") for number, (name, params) in enumerate(drawn)]
    joined, serial = World(quota), World(quota)
    outcomes = run(lambda: one_by_one(joined, made, gaps, cancels))
    gate = joined.session.gate
    assert gate is not None
    assert not gate.locked()
    assert not gate.line

    records = joined.session[ToolInvoked].all()
    assert joined.heard == list(records)
    anomaly = joined.anomaly(complete=not cancels)
    assert anomaly is None, str(anomaly)

    ended = {each.call_id for each in records if not was_interrupted(each)}
    ran = [call for call in made if call.id in ended]
    assert [r.call_id for r in records if r.call_id in ended and not r.nested_in] == [
        call.id for call in ran
    ]
    if not cancels:
        assert ran == made

    async def in_turn() -> list[Any]:
        return [(await one_by_one(serial, [call], [0], {}))[0] for call in ran]

    expected = dict(zip((call.id for call in ran), run(in_turn), strict=True))
    for call, outcome in zip(made, outcomes, strict=True):
        if outcome is not asyncio.CancelledError:
            assert outcome == expected[call.id]
    if not cancels:
        assert told(records) == told(serial.session[ToolInvoked].all())
        assert joined.lines == serial.lines
    assert joined.state() == serial.state()


@given(turns, quotas, gaps)
@settings(max_examples=settings.default.max_examples * 2)
def test_calls_that_join_come_out_as_if_made_one_after_the_other(
    drawn: list[tuple[str, Any]], quota: int | None, gaps: list[int]
) -> None:
    check(drawn, quota, gaps, {})


@given(st.lists(cancellable, min_size=2, max_size=6), gaps, cancels)
@settings(max_examples=settings.default.max_examples * 2)
def test_calls_that_join_come_out_as_if_the_cancelled_ones_had_never_been_made(
    drawn: list[tuple[str, Any]], gaps: list[int], cancels: dict[int, int]
) -> None:
    check(drawn, None, gaps, cancels)


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_calls_that_a_handler_makes_at_the_same_time_lose_no_update(how: str):
    """Each works on the view of the call that they are nested in."""

    @dataclass(frozen=True)
    class Total:
        value: int = 0

    def read(context: wink.ToolContext) -> int:
        latest = context.session[Total].latest()
        return 0 if latest is None else latest.value

    @wink.tool(reach="reversible")
    def add(*, context: wink.ToolContext) -> str:
        """Add one."""
        before = read(context)
        time.sleep(0.001)
        context.session[Total].seed(Total(before + 1))
        return "added"

    @wink.tool(reach="reversible")
    async def aadd(*, context: wink.ToolContext) -> str:
        """Add one."""
        before = read(context)
        await asyncio.sleep(0.001)
        context.session[Total].seed(Total(before + 1))
        return "added"

    @wink.tool(reach="reversible")
    def in_threads(*, context: wink.ToolContext) -> str:
        """Add twenty."""
        calls = [
            threading.Thread(target=tools.execute, args=("add", {}, context)) for _ in range(20)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        return "added"

    @wink.tool(reach="reversible")
    async def in_tasks(*, context: wink.ToolContext) -> str:
        """Add twenty."""
        await asyncio.gather(*(tools.aexecute("aadd", {}, context) for _ in range(20)))
        return "added"

    tools = wink.ToolRegistry([add, aadd, in_threads, in_tasks])
    with tools:
        assert tools.execute(f"in_{how}").success
        assert tools.session[Total].latest() == Total(20)


def test_a_lone_call_that_writes_works_in_place(tmp_path: Path):
    """A program that its handler starts sees what it has written."""

    @wink.tool(reach="reversible")
    async def write(*, context: wink.ToolContext) -> str:
        """Write a file."""
        context.filesystem.write("a", "1")
        return (tmp_path / "a").read_text()

    with wink.ToolRegistry([write], workspace=tmp_path) as tools:
        assert asyncio.run(tools.aexecute("write")).render() == "1"


def test_a_handler_may_make_a_sync_call_while_one_of_its_async_calls_is_under_way():
    @wink.tool(reach="reversible")
    async def slow(*, context: wink.ToolContext) -> str:
        """Wait."""
        await go_on.wait()
        return "slow"

    @wink.tool
    def quick() -> str:
        """Answer."""
        return "quick"

    @wink.tool
    async def outer(*, context: wink.ToolContext) -> str:
        """Make both."""
        task = asyncio.create_task(tools.aexecute("slow", context=context))
        await asyncio.sleep(0.01)
        answer = tools.execute("quick", context=context).value
        go_on.set()
        return f"{answer} {(await task).value}"

    go_on = asyncio.Event()
    with wink.ToolRegistry([slow, quick, outer]) as tools:
        assert asyncio.run(tools.aexecute("outer")).render() == "quick slow"
