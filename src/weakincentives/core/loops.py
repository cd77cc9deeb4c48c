"""Run coroutines from sync code, even inside a running loop, and handlers within their limits."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives.core.locks import defer_interrupts

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_loops: list[_BackgroundLoop] = []
_lock = threading.Lock()
_resting: list[_Worker] = []
_MOST_RESTING = 8
_LOOK_SECONDS = 0.5
"""How long to wait before checking for signals: a signal delivered to another thread does not wake
this one, but its handler runs here."""


def _reset_after_fork() -> None:
    """Drop the loops and workers, whose threads a forked child does not have."""
    global _lock
    _lock = threading.Lock()  # a thread of the parent may hold the old one
    _loops.clear()
    _resting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


@atexit.register
def _stop_all() -> None:
    for loop in _loops:
        loop.stop()


def run_blocking(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, from any thread, and return its result.

    One loop serves all such calls, so that a client bound to it can be reused. A call from that
    loop's own thread would wait for itself: it gets the next loop.
    """
    me = threading.get_ident()
    with defer_interrupts(), _lock:
        depth = next((i + 1 for i, loop in enumerate(_loops) if loop.thread.ident == me), 0)
        if depth == len(_loops):
            _loops.append(_BackgroundLoop(depth))
        loop = _loops[depth]
    return loop.run(start)


class _BackgroundLoop:
    def __init__(self, number: int) -> None:
        import asyncio  # here and below: it takes 30 ms, and most commands need no loop

        self.loop = asyncio.new_event_loop()
        # A daemon: a handler that never ends must not keep the process alive.
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
            # Interrupts are passed as values: raised in a task, they would end the loop.
            try:
                outcome.append((await start(), None))
            except BaseException as error:
                outcome.append((None, error))

        def begin() -> None:
            task = self.loop.create_task(settle(), context=context)
            # A callback: a task that is cancelled before it starts runs none of its code.
            task.add_done_callback(lambda _: done.set())
            tasks.append(task)

        try:
            # An interrupt waits until there is a task to cancel.
            with defer_interrupts():
                self.loop.call_soon_threadsafe(begin)
            while not done.wait(_LOOK_SECONDS):
                pass
        except BaseException:  # Ctrl-C while waiting: the call is cancelled, and rolls back
            self.loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            done.wait(timeout=60)  # a second Ctrl-C does not wait
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
        import asyncio

        for task in asyncio.all_tasks(self.loop):
            # An abandoned handler that ignores its cancellation has been logged already.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.loop.close()

    async def _end(self) -> None:
        await self.loop.shutdown_asyncgens()
        self.loop.stop()


async def ends_within(seconds: float | None, work: asyncio.Future[Any]) -> bool:
    """Wait until the work has ended in any way; returns whether it did in time.

    Half the cost of ``asyncio.wait``, which every async call would pay.
    """
    import asyncio

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


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a worker thread, in a copy of the context; returns a future of this loop.

    As in every pool, ``threading.local`` may hold values of an earlier function.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = copy_context()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if future.cancelled() or future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        elif isinstance(error, StopIteration):
            # A future takes no StopIteration.
            future.set_exception(RuntimeError(str(error) or "StopIteration"))
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
            worker.end()  # abandoned: do not reuse what it left in the thread
        else:
            worker.rest()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, value, failure)

    try:
        worker = _resting.pop()
    except IndexError:
        worker = _Worker()
    worker.work.put(work)
    return future


class _Worker:
    """A reusable thread: starting one takes longer than most calls.

    Not from a pool: an abandoned function keeps its thread, and a pool would wait for it at exit.
    """

    def __init__(self) -> None:
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._process = os.getpid()
        threading.Thread(target=self._run, name="wink-handler", daemon=True).start()

    def rest(self) -> None:
        """Wait for the next function; end if enough others wait, or in a forked child."""
        if len(_resting) < _MOST_RESTING and os.getpid() == self._process:
            _resting.append(self)
        else:
            self.end()

    def end(self) -> None:
        self.work.put(None)

    def _run(self) -> None:
        while (work := self.work.get()) is not None:
            work()
            del work  # it refers to everything of its call
