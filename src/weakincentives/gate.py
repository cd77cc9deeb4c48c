"""A gate for one call at a time: first come, first served, across threads and event loops."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from weakincentives.deadlines import Deadline
from weakincentives.logs import get_logger

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

__all__ = ["Gate", "TooLate"]

_logger = get_logger(__name__)

_LOOK_SECONDS = 10.0
"""How long to wait before looking again without being woken."""


class TooLate(Exception):
    """The deadline passed before it was our turn."""


class Gate:
    """A fair lock without polling: a call that leaves wakes the first in line.

    ``with gate:`` blocks the thread. A sync call takes ``lock`` itself when it is its turn: a C
    lock in a ``with`` block, so that no interrupt can come between taking it and the block.
    """

    __slots__ = ("_line_lock", "joined", "line", "lock", "loop")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the call inside."""
        self.loop: AbstractEventLoop | None = None
        """The event loop that the call inside runs on."""
        self.joined: Any = None
        """The turn inside, if other calls can join it: see ``runtime.turn.JoinedTurn``."""
        self.line: deque[Ticket] = deque()
        self._line_lock = threading.Lock()

    def locked(self) -> bool:
        return self.lock.locked()

    @property
    def is_on_this_loop(self) -> bool:
        """Whether the call inside needs the event loop that is running here."""
        return self.loop is not None and self.loop is _running_loop()

    def turn(self, deadline: Deadline | None = None) -> Ticket:
        """Return a ``with`` block that begins when it is our turn to take ``lock``."""
        return Ticket(self, threading.Event(), deadline)

    async def enter(
        self, deadline: Deadline | None = None, may_join: Callable[[], bool] | None = None
    ) -> bool:
        """Enter when it is our turn, on the running event loop.

        Returns False if ``may_join`` allows us to join the calls inside: they hold the gate.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        if self.line or not self.lock.acquire(False):
            if may_join is not None and not self.line and may_join():
                return False
            ticket = Ticket(self, asyncio.Event(), deadline, loop)
            try:
                while not (first := self.is_first(ticket)) or not self.lock.acquire(False):
                    if first and may_join is not None and may_join():
                        self.leave(ticket)
                        return False
                    timer = loop.call_later(ticket.patience(), ticket.signal.set)
                    try:
                        await ticket.signal.wait()
                    finally:
                        timer.cancel()
                        ticket.signal.clear()
            except BaseException:  # cancelled, or too late
                self.leave(ticket)
                raise
            self.leave(ticket)
        self.loop = loop
        return True

    def release(self) -> None:
        """Leave, and wake the next in line."""
        self.loop = self.joined = None
        self.lock.release()
        if self.line:
            self.wake_next()

    def acquire(self, timeout: float | None = None) -> bool:
        """Enter, blocking the thread; False when that takes longer than ``timeout`` seconds."""
        if not self.line and self.lock.acquire(False):
            return True
        try:
            with self.turn(None if timeout is None else Deadline.after(timeout)):
                return self.lock.acquire()
        except TooLate:
            return False

    def __enter__(self) -> Gate:
        self.acquire()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    # The line

    def wake_next(self) -> None:
        """Wake the first in line, to see whether it is its turn."""
        while True:
            with self._line_lock:
                first = self.line[0] if self.line else None
            if first is None or first.wake():
                return
            with self._line_lock:  # its loop does not run: it gets in line again if that goes on
                self._remove(first)

    def is_first(self, ticket: Ticket) -> bool:
        """Whether it is the ticket's turn; it gets in line if it is not."""
        with self._line_lock:
            if ticket not in self.line:
                self.line.insert(self._place_of(ticket), ticket)
            return self.line[0] is ticket

    def _place_of(self, ticket: Ticket) -> int:
        """Return where a ticket goes: last, but before those of a loop that it would block."""
        loop = None if ticket.loop is not None else _running_loop()
        if loop is not None:
            for place, each in enumerate(self.line):
                if each.loop is loop:
                    return place
        return len(self.line)

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket out of the line; the next one may go."""
        with self._line_lock:
            self._remove(ticket)
        if self.line and (self.joined is not None or not self.lock.locked()):
            self.wake_next()

    def _remove(self, ticket: Ticket) -> None:
        if ticket in self.line:
            self.line.remove(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Block the thread until it is the ticket's turn and the gate is free."""
        while not self.is_first(ticket) or self.lock.locked():
            if self.is_on_this_loop:
                raise RuntimeError(
                    "another call is under way on this session, and waiting for it here would "
                    "stop the event loop it needs: await aexecute_tool(...) or tool.acall(...) "
                    "instead"
                )
            if not self.lock.locked():
                self.wake_next()
            patience = ticket.patience()
            if not ticket.signal.wait(patience) and patience == _LOOK_SECONDS:
                _logger.warning(
                    "still waiting for another call on the same session to end; if that call waits "
                    "for this one, pass its context on: tool(params, context=context)"
                )
            ticket.signal.clear()


class Ticket:
    """A place in line; in a ``with`` block, until the block ends."""

    __slots__ = ("_deadline", "_gate", "loop", "signal")

    def __init__(
        self,
        gate: Gate,
        signal: Any,
        deadline: Deadline | None,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self._gate = gate
        self.signal = signal
        """A threading or an asyncio event."""
        self._deadline = deadline
        self.loop = loop

    def wake(self) -> bool:
        """Signal that it may be its turn; False when its loop does not run."""
        if self.loop is None:
            self.signal.set()
            return True
        try:
            self.loop.call_soon_threadsafe(self.signal.set)
        except RuntimeError:  # it is closed
            return False
        return self.loop.is_running()

    def patience(self) -> float:
        """Return how long to wait before looking again; raises TooLate after the deadline."""
        if self._deadline is None:
            return _LOOK_SECONDS
        remaining = self._deadline.remaining()
        if remaining <= 0:
            raise TooLate
        return min(_LOOK_SECONDS, remaining)

    def __enter__(self) -> None:
        try:
            self._gate.wait(self)
        except BaseException:
            self._gate.leave(self)
            raise

    def __exit__(self, *_: object) -> None:
        self._gate.leave(self)


def _running_loop() -> AbstractEventLoop | None:
    asyncio: Any = sys.modules.get("asyncio")  # not imported: then there is no loop
    return None if asyncio is None else asyncio._get_running_loop()
