"""Running a coroutine from sync code: on a background event loop, also from inside another loop."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from inspect import isawaitable
from queue import SimpleQueue
from typing import Any, TypeVar

from weakincentives.errors import DeadlineExceededError, ToolTimeout
from weakincentives.locks import undisturbed
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.tool import Tool

T = TypeVar("T")

_loops: list[_BackgroundLoop] = []
_lock = threading.Lock()
_resting: list[_Worker] = []
_MOST_RESTING = 8
_LOOK_SECONDS = 0.5
"""How long to wait for a call before looking up: a signal that the system has handed to another
thread wakes nobody, and what it is for happens in this one."""


def _begin_anew() -> None:
    """Forget what a forked child does not have: none of the threads came along."""
    global _lock
    _lock = threading.Lock()  # whoever held it is not here to let go of it
    _loops.clear()
    _resting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@atexit.register
def _stop_all() -> None:
    for loop in _loops:
        loop.stop()


def run_blocking(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end and return what it returns, whatever thread this is.

    One loop serves all such calls, so that a client bound to it works from call to call. A call
    from that loop's own thread would wait for itself: it gets the next one.
    """
    me = threading.get_ident()
    with undisturbed(), _lock:
        depth = next((i + 1 for i, loop in enumerate(_loops) if loop.thread.ident == me), 0)
        if depth == len(_loops):
            _loops.append(_BackgroundLoop(depth))
        loop = _loops[depth]
    return loop.run(start)


class _BackgroundLoop:
    def __init__(self, number: int) -> None:
        self.loop = asyncio.new_event_loop()
        # A daemon: an endless handler must not keep the process alive.
        self.thread = threading.Thread(
            target=self.loop.run_forever, name=f"wink-loop-{number}", daemon=True
        )
        self.thread.start()

    def run(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        done = threading.Event()
        outcome: list[tuple[T | None, BaseException | None]] = []
        tasks: list[asyncio.Task[None]] = []
        context = copy_context()

        async def settle() -> None:
            # Interrupts are handed over as values: raised in a task, they would end the loop.
            try:
                outcome.append((await start(), None))
            except BaseException as error:
                outcome.append((None, error))

        def begin() -> None:
            task = self.loop.create_task(settle(), context=context)
            # Told by the task, not in it: one that is cancelled before it begins does nothing.
            task.add_done_callback(lambda _: done.set())
            tasks.append(task)

        try:
            # An interrupt waits until there is something to be cancelled.
            with undisturbed():
                self.loop.call_soon_threadsafe(begin)
            while not done.wait(_LOOK_SECONDS):
                pass
        except BaseException:  # Ctrl-C while waiting: the call is cancelled, and rolls back
            self.loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            done.wait(timeout=60)  # the next one is not waited out
            raise
        value, error = outcome[0]
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # no error: the coroutine returned a T

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._end()))
        self.thread.join(timeout=1)
        if self.thread.is_alive():
            return
        for task in asyncio.all_tasks(self.loop):
            # A handler that was abandoned and ignores its cancellation: reported when it happened.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.loop.close()

    async def _end(self) -> None:
        await self.loop.shutdown_asyncgens()  # closes what is kept open for as long as the loop
        self.loop.stop()


async def ends_within(seconds: float | None, work: asyncio.Future[Any]) -> bool:
    """Wait until the work has ended, however it does; False when that takes longer.

    What ``asyncio.wait`` does for many, for one, at half the cost: every async call comes by here.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    work.add_done_callback(wake)
    timer = None if seconds is None else loop.call_later(seconds, wake)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        work.remove_done_callback(wake)
    return work.done()


async def run_handler(tool: Tool[Any, Any], params: object, context: ToolContext) -> Any:
    """Run a handler within its limits: on the loop if it is async, else in a thread."""
    handler: Any = tool.handler

    async def shielded() -> Any:
        # As a value: an interrupt raised inside a task would end the whole loop.
        try:
            answer = handler(params, context=context)
            return await answer if isawaitable(answer) else answer, None
        except (KeyboardInterrupt, SystemExit) as interrupt:
            return None, interrupt

    if tool.is_async:
        work: asyncio.Future[Any] = asyncio.get_running_loop().create_task(shielded())
    else:
        work = in_thread(lambda: (handler(params, context=context), None))
    limit = tool.timeout
    remaining = None if context.deadline is None else context.deadline.remaining()
    if remaining is not None and (limit is None or remaining < limit):
        limit = remaining
    try:
        done = await ends_within(limit, work)
    except asyncio.CancelledError:
        work.cancel()
        if tool.is_async:
            # Let it clean up; its session and files are still its own.
            await ends_within(5, work)
        raise
    if not done:
        work.cancel()
        if remaining is not None and limit == remaining:
            raise DeadlineExceededError(f"The deadline passed while tool '{tool.name}' ran")
        raise ToolTimeout(f"Tool '{tool.name}' timed out after {tool.timeout:g} s")
    result, interrupt = work.result()
    if interrupt is not None:
        raise interrupt
    return result


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a thread that it has for itself; the future is of the running loop.

    The thread may serve another function after that, which then finds what the first has left in
    ``threading.local``, as in every pool. It has context variables of its own.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = copy_context()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if future.cancelled() or future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        elif isinstance(error, StopIteration):
            future.set_exception(RuntimeError(f"the handler raised StopIteration: {error}"))
        else:
            future.set_exception(error)

    def work() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = context.run(function)
        except BaseException as error:
            failure = error
        if future.cancelled():
            worker.end()  # it was abandoned: what it left in its thread is nobody else's to find
        else:
            worker.rest()
        with suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            loop.call_soon_threadsafe(deliver, value, failure)

    try:
        worker = _resting.pop()
    except IndexError:
        worker = _Worker()
    worker.work.put(work)
    return future


class _Worker:
    """A thread that does one thing after the other: to start one takes longer than most calls.

    Not one of a pool: an abandoned function keeps its thread, and pools wait for theirs at exit.
    """

    def __init__(self) -> None:
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._process = os.getpid()
        threading.Thread(target=self._run, name="wink-handler", daemon=True).start()

    def rest(self) -> None:
        """Be there for the next one; end where enough others are, or in a child that it forked."""
        if len(_resting) < _MOST_RESTING and os.getpid() == self._process:
            _resting.append(self)
        else:
            self.end()

    def end(self) -> None:
        """Do nothing more."""
        self.work.put(None)

    def _run(self) -> None:
        while (work := self.work.get()) is not None:
            work()
            del work  # it holds on to all that its call had
