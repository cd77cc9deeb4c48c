"""Time as a resource. The only module that reads the system's clock."""

from __future__ import annotations

import sys
import threading
from time import perf_counter
from time import time as unix_time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "FakeClock", "SystemClock", "since_boot"]


class Clock(Protocol):
    """The runtime's source of time."""

    def time(self) -> float:
        """Seconds since the epoch, for records."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, for durations and deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait, for example between the attempts of a call."""
        ...


class SystemClock:
    """The machine's clock."""

    # The built-in functions themselves: a wrapper would double the cost.
    time = staticmethod(unix_time)
    monotonic = staticmethod(perf_counter)

    async def sleep(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)


class FakeClock:
    """A clock that moves only when a test advances it.

    >>> clock = FakeClock(start=100.0)
    >>> clock.advance(5)
    >>> clock.time()
    105.0
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def time(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the time forward."""
        if not seconds >= 0:  # also refuses NaN
            raise ValueError(f"a clock cannot go back, got {seconds}")
        with self._lock:
            self._now += seconds

    async def sleep(self, seconds: float) -> None:
        """Move the time forward without waiting."""
        self.advance(max(seconds, 0.0))


SYSTEM_CLOCK = SystemClock()
"""The default clock."""


def since_boot() -> float:
    """Return the seconds on the clock by which Linux says when a process was started."""
    if sys.platform != "linux":
        return 0.0
    from time import CLOCK_BOOTTIME, clock_gettime

    return clock_gettime(CLOCK_BOOTTIME)
