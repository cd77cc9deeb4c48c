"""What belongs to an event loop, such as a client's connections: made once, closed with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize

__all__ = ["PerLoop"]

T = TypeVar("T")
_Open: TypeAlias = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[T, None]]]


class PerLoop(Generic[T]):
    """One thing for each event loop; closed when the loop ends, or when this is dropped."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[object]]) -> None:
        self._make = make
        self._close = close
        self._lock = threading.Lock()
        self._open: _Open[T] = WeakKeyDictionary()
        # It holds what is open, too: sockets that are dropped with this would not be closed first.
        finalize(self, _close_all, self._open).atexit = False

    async def here(self) -> T:
        """Return that of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._open.get(loop)
        if found is not None:
            return found[0]
        keeper = _closed_with_the_loop(self._make(), self._close)
        made = await anext(keeper)
        with self._lock:
            for ended in [each for each in self._open if each.is_closed()]:
                del self._open[ended]
            self._open[loop] = made, keeper
        return made

    async def close_here(self) -> None:
        """Close that of the running loop, if there is one."""
        with self._lock:
            found = self._open.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found[1].aclose()


async def _closed_with_the_loop(
    made: T, close: Callable[[T], Awaitable[object]]
) -> AsyncGenerator[T, None]:
    """Keep something open until its loop ends.

    Nobody is told when a loop ends; but it closes the generators that are still open in it.
    """
    try:
        yield made
    finally:
        await close(made)


def _close_all(open_in: _Open[T]) -> None:
    for loop, (_, keeper) in list(open_in.items()):
        with suppress(RuntimeError):  # the loop has ended, and closed it
            loop.call_soon_threadsafe(_close_soon, loop, keeper)


def _close_soon(loop: asyncio.AbstractEventLoop, keeper: AsyncGenerator[T, None]) -> None:
    loop.create_task(_finish(keeper))


async def _finish(keeper: AsyncGenerator[T, None]) -> None:
    await keeper.aclose()
