"""The events of a run as a stream, for ``async for`` and ``for``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from weakincentives.core.loops import run_blocking
from weakincentives.runtime.conversation import PromptResponse, RunEvent

OutT = TypeVar("OutT")

Start = Callable[[Callable[[RunEvent], object]], Coroutine[Any, Any, PromptResponse[OutT]]]
"""Starts a run that passes its events to the given listener."""


class RunStream(Generic[OutT]):
    """The events of one run, in order. Iterating starts the run; it can be iterated once.

    The run does not wait for the consumer. When the consumer stops early (``break``, an error,
    ``close``), the run is cancelled and the call under way is rolled back. An error of the run is
    raised after its last event.
    """

    response: PromptResponse[OutT] | None = None
    """The result, once the stream has ended."""

    def __init__(self, start: Start[OutT]) -> None:
        self._start: Start[OutT] | None = start
        self._task: asyncio.Task[PromptResponse[OutT]] | None = None
        self._is_closed = False

    def __aiter__(self) -> AsyncGenerator[RunEvent]:
        start, self._start = self._start, None
        if start is None:
            raise RuntimeError("a stream can be iterated once: call stream() again for a new run")
        # Not stored: a loop that stops early drops the generator, which ends the run.
        return self._run(start)

    def __iter__(self) -> Generator[RunEvent]:
        events = aiter(self)

        async def following() -> RunEvent | None:
            return await anext(events, None)

        try:
            while (event := run_blocking(following)) is not None:
                yield event
        finally:
            run_blocking(events.aclose)

    async def aclose(self) -> None:
        """End the run; the call under way is rolled back."""
        self._start, self._is_closed = None, True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self, start: Start[OutT]) -> AsyncGenerator[RunEvent]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[RunEvent | None] = asyncio.Queue()

        def put(event: RunEvent | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)  # handlers report from threads

        task = self._task = loop.create_task(start(put))
        task.add_done_callback(lambda _: put(None))
        try:
            while (event := await queue.get()) is not None:
                yield event
            if not self._is_closed:
                self.response = task.result()
        finally:
            await self.aclose()
