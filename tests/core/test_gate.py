"""The gate: one at a time, first come first served, for threads and event loops, no polling."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from weakincentives.core.deadlines import Deadline
from weakincentives.core.gate import Gate, TooLate
from weakincentives.errors import DeadlineExceededError
from weakincentives.prompt import Tool, ToolContext, ToolResult
from weakincentives.runtime import (
    Session,
    ToolCall,
    ToolInvoked,
    ToolRegistry,
    aexecute_tool,
    execute_tool,
)


def until(holds: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


class Crowd:
    """Waits at a gate in several ways, and notes who went through in which order."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.order: list[int] = []
        self.loops = [asyncio.new_event_loop() for _ in range(2)]
        self.threads = [threading.Thread(target=each.run_forever) for each in self.loops]
        for thread in self.threads:
            thread.start()

    def joins(self, number: int) -> None:
        """Add one that waits: in a thread, or on one of two loops."""
        before = len(self.gate.line)
        if number % 3 == 0:
            thread = threading.Thread(target=self._in_thread, args=(number,))
            thread.start()
            self.threads.append(thread)
        else:
            asyncio.run_coroutine_threadsafe(self._on_loop(number), self.loops[number % 2])
        until(lambda: len(self.gate.line) > before)

    def _in_thread(self, number: int) -> None:
        with self.gate.turn(), self.gate.lock:
            self.order.append(number)

    async def _on_loop(self, number: int) -> None:
        await self.gate.enter()
        self.order.append(number)
        self.gate.release()

    def close(self) -> None:
        for loop in self.loops:
            loop.call_soon_threadsafe(loop.stop)
        for thread in self.threads:
            thread.join(timeout=60)
        for loop in self.loops:
            loop.close()


@pytest.fixture
def crowd() -> Any:
    found = Crowd()
    yield found
    found.close()


def test_waiters_from_threads_and_loops_go_in_the_order_they_came(crowd: Crowd):
    with crowd.gate:
        for number in range(50):
            crowd.joins(number)
        assert crowd.order == []
    until(lambda: len(crowd.order) == 50)
    assert crowd.order == list(range(50))
    assert not crowd.gate.locked()
    assert not crowd.gate.line


def test_a_cancelled_waiter_does_not_block_the_next():
    async def main() -> list[str]:
        gate, order = Gate(), list[str]()

        async def passes(name: str) -> None:
            await gate.enter()
            order.append(name)
            gate.release()

        gate.acquire()
        first, second, third = (asyncio.create_task(passes(name)) for name in "abc")
        await asyncio.sleep(0)
        assert len(gate.line) == 3
        second.cancel()
        first.cancel()
        await asyncio.sleep(0)
        gate.release()
        await asyncio.wait_for(third, 60)
        assert not gate.locked()
        assert not gate.line
        return order

    assert asyncio.run(main()) == ["c"]


def test_one_who_is_cancelled_when_it_was_just_told_tells_the_next():
    async def main() -> list[str]:
        gate, order = Gate(), list[str]()

        async def passes(name: str) -> None:
            await gate.enter()
            order.append(name)
            gate.release()

        gate.acquire()
        first, second = (asyncio.create_task(passes(name)) for name in "ab")
        await asyncio.sleep(0)
        gate.release()  # the first is told, and has not looked yet
        first.cancel()
        await asyncio.wait_for(second, 60)
        return order

    assert asyncio.run(main()) == ["b"]


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_deadline_ends_the_wait_and_leaves_the_line(on_loop: bool):
    gate = Gate()
    gate.acquire()
    deadline = Deadline.after(0.05)

    with pytest.raises(TooLate):
        if on_loop:
            asyncio.run(gate.enter(deadline))
        else:
            with gate.turn(deadline):
                pass
    assert not gate.line
    gate.release()
    assert gate.acquire(timeout=60)


def test_a_time_limit_ends_the_wait():
    gate = Gate()
    assert gate.acquire(timeout=0.01)
    assert not gate.acquire(timeout=0.01)
    assert not gate.line
    gate.release()
    assert not gate.locked()


def test_a_waiter_whose_loop_is_gone_is_passed_over():
    gate = Gate()
    gate.acquire()
    loop = asyncio.new_event_loop()
    task = loop.create_task(gate.enter())
    loop.run_until_complete(asyncio.sleep(0))  # it waits, and its loop does not go on
    assert len(gate.line) == 1
    gate.release()

    assert gate.acquire(timeout=60)
    gate.release()
    loop.run_until_complete(asyncio.wait_for(task, 60))  # it does go on: its turn comes
    assert gate.locked()
    gate.release()
    loop.close()


def test_a_thread_that_blocks_its_loop_does_not_wait_behind_those_who_need_that_loop():
    gate = Gate()

    async def main() -> None:
        later = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        assert len(gate.line) == 1
        threading.Timer(0.05, gate.release).start()
        with gate:  # blocks this loop
            assert len(gate.line) == 1
        await asyncio.wait_for(later, 60)
        gate.release()

    gate.acquire()
    asyncio.run(main())
    assert not gate.locked()
    assert not gate.line


def test_300_waiting_calls_use_next_to_no_cpu():
    """A second of waiting takes a fraction of a second of CPU; polling took half of it.

    That of the loop's thread: other tests leave handlers behind that never end.
    """
    session = Session()
    begun, ends = threading.Event(), threading.Event()

    def work(params: None, *, context: ToolContext) -> ToolResult[None]:
        begun.set()
        ends.wait(120)
        return ToolResult.ok(None, message="done")

    tools = ToolRegistry(
        [
            Tool[None, None](name="work", description="Waits.", handler=work),
            Tool[None, None](
                name="next", description="Comes.", handler=lambda p, *, context: ToolResult.ok(None)
            ),
        ],
        session=session,
    )
    order: list[str] = []
    session.dispatcher.subscribe(ToolInvoked, lambda record: order.append(record.call_id))

    async def main() -> float:
        holder = threading.Thread(target=tools.execute, args=("work",))
        holder.start()
        await asyncio.to_thread(begun.wait, 120)
        calls = [
            asyncio.create_task(tools.aexecute("next", call_id=f"n{number}"))
            for number in range(300)
        ]
        gate = session.gate
        assert gate is not None
        while len(gate.line) < 300:
            await asyncio.sleep(0.01)
        before = time.thread_time()
        await asyncio.sleep(1)
        used = time.thread_time() - before
        ends.set()
        results = await asyncio.gather(*calls)
        assert all(result.success for result in results)
        holder.join(60)
        return used

    assert asyncio.run(main()) < 0.2
    # The record of the first call is published once the gate is free, perhaps after others.
    waiting = [call_id for call_id in order if call_id.startswith("n")]
    assert waiting == [f"n{number}" for number in range(300)]


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_call_whose_deadline_passes_while_it_waits_is_recorded_and_lets_the_next_one_by(
    on_loop: bool,
):
    session, ran = Session(), list[str]()

    def work(params: None, *, context: ToolContext) -> ToolResult[None]:
        ran.append(context.call_id)
        return ToolResult.ok(None)

    tool = Tool[None, None](name="work", description="Works.", handler=work)
    with ToolRegistry([tool], session=session) as tools:
        context = tools.context().having(deadline=Deadline.after(0.05))
        call = ToolCall("work", {}, id="late")
        gate = session.gate
        assert gate is not None
        with gate, pytest.raises(DeadlineExceededError):
            if on_loop:
                asyncio.run(aexecute_tool(call, context=context))
            else:
                execute_tool(call, context=context)
        assert not gate.locked()
        assert not gate.line
        assert tools.execute("work", call_id="next").success
    assert ran == ["next"]
    [late, following] = session[ToolInvoked].all()
    assert (late.call_id, late.ran, late.result.failure.code) == (
        "late",
        False,
        "DEADLINE_EXCEEDED",
    )
    assert following.success
