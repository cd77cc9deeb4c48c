"""Time as a resource. The only module that reads the system's clock."""

from __future__ import annotations

import threading
from time import perf_counter
from time import time as unix_time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "FakeClock", "SystemClock"]


class Clock(Protocol):
    """Where the runtime gets the time from."""

    def time(self) -> float:
        """Seconds since the epoch: what records show."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back: what durations and deadlines are measured in."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; between the attempts of a call, for example."""
        ...


class SystemClock:
    """The machine's clock."""

    # The built-in functions themselves: a wrapper would double the cost of asking.
    time = staticmethod(unix_time)
    monotonic = staticmethod(perf_counter)

    async def sleep(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)


class FakeClock:
    """A clock that stands still until it is told to move. For tests.

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
        if not seconds >= 0:  # nor is NaN
            raise ValueError(f"a clock does not go back, got {seconds}")
        with self._lock:
            self._now += seconds

    async def sleep(self, seconds: float) -> None:
        """Move the time forward at once: nobody waits in a test."""
        self.advance(max(seconds, 0.0))


SYSTEM_CLOCK = SystemClock()
"""What is used where no other clock is given."""
