"""Limits in time: deadlines, and the heartbeat of a long operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from weakincentives.core.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import DeadlineExceededError

__all__ = ["Deadline", "Heartbeat"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment after which a run must not continue.

    >>> from weakincentives.core.clock import FakeClock
    >>> clock = FakeClock()
    >>> deadline = Deadline.after(30, clock=clock)
    >>> clock.advance(20)
    >>> deadline.remaining()
    10.0
    """

    expires_at: float
    """On the clock's monotonic scale; use ``after`` or ``at`` to make one."""
    clock: Clock = field(default=SYSTEM_CLOCK, repr=False, compare=False)

    @classmethod
    def after(cls, delay: float | timedelta, *, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        """Return the deadline ``delay`` (seconds or a timedelta) from now."""
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
        if not seconds > 0:  # also refuses NaN
            raise ValueError(f"a deadline must lie in the future, got {seconds} seconds")
        return cls(clock.monotonic() + seconds, clock)

    @classmethod
    def at(cls, moment: datetime, *, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        """Return the deadline at a wall-clock moment, which must have a time zone."""
        if moment.utcoffset() is None:
            raise ValueError("a deadline needs a moment with a time zone")
        return cls.after(moment.timestamp() - clock.time(), clock=clock)

    def remaining(self) -> float:
        """Return the seconds left; never below zero."""
        return max(0.0, self.expires_at - self.clock.monotonic())

    @property
    def expired(self) -> bool:
        return self.clock.monotonic() >= self.expires_at

    def check(self) -> None:
        """Raise DeadlineExceededError if the deadline has passed."""
        late = self.clock.monotonic() - self.expires_at
        if late >= 0:
            raise DeadlineExceededError(f"The deadline passed {late:.3f} s ago")


def check_deadline(deadline: object) -> None:
    """Refuse a number of seconds where a Deadline is expected."""
    if deadline is not None and not hasattr(deadline, "remaining"):
        raise TypeError(
            f"a deadline is a Deadline, got {deadline!r}: write Deadline.after(seconds)"
        )


@dataclass(slots=True)
class Heartbeat:
    """Stores the last sign of life; ``on_beat`` may extend a lease."""

    clock: Clock = SYSTEM_CLOCK
    on_beat: Callable[[], object] | None = None
    last: float = field(default=0.0, init=False)
    beats: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.last = self.clock.monotonic()

    def beat(self) -> None:
        """Record a sign of life."""
        self.last = self.clock.monotonic()
        self.beats += 1
        if self.on_beat is not None:
            self.on_beat()

    def silence(self) -> float:
        """Return the seconds since the last beat."""
        return self.clock.monotonic() - self.last
