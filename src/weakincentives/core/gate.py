"""A gate for one call at a time: first come, first served, across threads and event loops.

The gate of something that several processes share also takes a lock between processes. An object
that calls change in place has an ``ObjectGate``; what may hold several of those is a ``Holder``.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from weakincentives.core import locks
from weakincentives.core.call import ToolCall
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.deadlines import Deadline
from weakincentives.core.logs import get_logger
from weakincentives.errors import ViewClosed, WinkError, WorkspaceLocked

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from types import FrameType

__all__ = [
    "Gate",
    "Holder",
    "InUse",
    "Lease",
    "ObjectGate",
    "ProcessLock",
    "TooLate",
    "gate_of",
    "running_loop",
]

_logger = get_logger(__name__)

_SOON = 0.25
"""Seconds after which a thread that waits looks whether the call inside waits for it."""
_LOOK_SECONDS = 10.0
"""How long to wait before looking again without being woken."""
_LOOK_BESIDE = 0.02
"""The same, for a call that may work beside the one inside: nothing wakes it when it can."""


class TooLate(Exception):
    """The deadline passed before it was our turn."""


class InUse(WinkError):
    """Another call has an object to itself, and waiting for it here would never end."""

    def __init__(self, message: str, gate: ObjectGate, *, may_end: bool) -> None:
        super().__init__(message)
        self.gate = gate
        self.may_end = may_end
        """Whether the wait ends if we wait elsewhere, holding nothing."""


class Lease:
    """Lets calls that only read work beside the one inside a gate, until it is ended."""

    is_fresh: bool
    """Whether one more call may use it."""

    def end(self) -> None:
        """End it. May be called again."""
        raise NotImplementedError


class Gate:
    """A fair lock without polling: a call that leaves wakes the first in line.

    ``with gate:`` blocks the thread. A sync call takes ``lock`` itself when it is its turn: a C
    lock in a ``with`` block, so that no interrupt can come between taking it and the block.
    """

    __slots__ = (
        "_catch_up", "_line_lock", "beside", "between", "blocks", "holder", "joined", "line",
        "lock", "loop",
    )  # fmt: skip

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the call inside."""
        self.loop: AbstractEventLoop | None = None
        """The event loop that the call inside runs on."""
        self.holder = 0
        """The thread inside a ``with`` block; 0 if there is none."""
        self.joined: Any = None
        """The turn inside, if other calls can join it: see ``runtime.turn.JoinedTurn``."""
        self.line: deque[Ticket] = deque()
        self._line_lock = threading.Lock()
        self.between: ProcessLock | None = None
        """Held, too, by the call inside, if several processes share what it works on."""
        self._catch_up: Callable[[], object] = bool
        self.beside: Callable[[], Lease | None] | None = None
        """Lets a call that only reads work beside the one inside; returns None if it can't now."""
        self.blocks: AbstractEventLoop | None = None
        """The event loop that the call inside would block if it waited for such a call."""

    def share(self, lock: ProcessLock, catch_up: Callable[[], object]) -> None:
        """Take a lock between processes, too, from now on.

        ``catch_up`` is called inside, before anything else, when another process has held it since.
        """
        self.between, self._catch_up = lock, catch_up

    @property
    def name(self) -> str:
        """The same in all processes, if several share what it is for."""
        return "" if self.between is None else str(self.between.root)

    @property
    def is_awaited(self) -> bool:
        """Whether a call waits to enter, here or in another process."""
        return bool(self.line) or (self.between is not None and self.between.is_awaited)

    def locked(self) -> bool:
        return self.lock.locked()

    @property
    def is_on_this_loop(self) -> bool:
        """Whether the call inside needs the event loop that is running here."""
        return self.loop is not None and self.loop is running_loop()

    def turn(self, deadline: Deadline | None = None) -> Ticket:
        """Return a ``with`` block that begins when it is our turn to take ``lock``."""
        return Ticket(self, threading.Event(), deadline)

    async def enter(
        self,
        deadline: Deadline | None = None,
        may_join: Callable[[], bool] | None = None,
        may_pass: Callable[[], bool] | None = None,
    ) -> bool:
        """Enter when it is our turn, on the running event loop.

        Returns False if ``may_join`` allows us to join the calls inside, which hold the gate, or
        ``may_pass`` to work beside them.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        if self.line or not self.lock.acquire(False):
            if may_join is not None and not self.line and may_join():
                return False
            if may_pass is not None and may_pass():
                return False
            take = partial(self.lock.acquire, False)
            if not await self.queue(take, deadline, may_join, may_pass):
                return False
        self.loop = loop
        if self.between is not None:
            try:
                if not await self.between.take_on_loop(deadline, may_pass):
                    self.release()
                    return False
                self.catch_up(self.between)
            except BaseException:
                self.release()
                raise
        return True

    async def queue(
        self,
        take: Callable[[], bool],
        deadline: Deadline | None,
        may_join: Callable[[], bool] | None = None,
        may_pass: Callable[[], bool] | None = None,
    ) -> bool:
        """Get in line on the running event loop until ``take`` succeeds.

        Returns False if we may join the calls inside, or pass them.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        ticket = Ticket(self, asyncio.Event(), deadline, loop)
        longest = _LOOK_SECONDS if may_pass is None else _LOOK_BESIDE
        try:
            while not (first := self.is_first(ticket)) or not take():
                if (first and may_join is not None and may_join()) or (
                    may_pass is not None and may_pass()
                ):
                    self.leave(ticket)
                    return False
                timer = loop.call_later(min(ticket.patience(), longest), ticket.signal.set)
                try:
                    await ticket.signal.wait()
                finally:
                    timer.cancel()
                    ticket.signal.clear()
                self.look_again(take)
        except BaseException:  # cancelled, or too late
            self.leave(ticket)
            raise
        self.leave(ticket)
        return True

    def release(self) -> None:
        """Leave, and wake the next in line."""
        self.loop = self.joined = self.blocks = None
        if self.between is not None:
            self.between.is_held = False
            self.between.release()
        self.lock.release()
        if self.line:
            self.wake_next()

    def acquire(self, timeout: float | None = None) -> bool:
        """Enter, blocking the thread; False when that takes longer than ``timeout`` seconds."""
        deadline = None if timeout is None else Deadline.after(timeout)
        try:
            if self.line or not self.lock.acquire(False):
                with self.turn(deadline):
                    self.lock.acquire()
            if self.between is not None:
                try:
                    self.between.take(deadline)
                    self.catch_up(self.between)
                except BaseException:
                    self.release()
                    raise
        except TooLate:
            return False
        return True

    def catch_up(self, between: ProcessLock) -> None:
        """Take note of what other processes have done since we were inside, if any were there."""
        if between.is_stale:
            self._catch_up()
            between.is_stale = False

    def __enter__(self) -> Gate:
        self.acquire()
        self.holder = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        self.holder = 0
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
        loop = None if ticket.loop is not None else running_loop()
        if loop is not None:
            for place, each in enumerate(self.line):
                if each.loop is loop:
                    return place
        return len(self.line)

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket out of the line; the next one may go."""
        with self._line_lock:
            self._remove(ticket)
        if self.line and (self.joined is not None or not self.locked()):
            self.wake_next()

    def _remove(self, ticket: Ticket) -> None:
        if ticket in self.line:
            self.line.remove(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Block the thread until it is the ticket's turn and the gate is free."""
        while not self.is_first(ticket) or self.locked():
            if self.is_on_this_loop:
                raise self.unreachable()
            if not self.locked():
                self.wake_next()
            patience = ticket.patience()
            soon = min(patience, _SOON)
            if ticket.signal.wait(soon):
                pass
            elif (deadlock := _deadlock(self)) is not None:
                raise RuntimeError(deadlock)
            elif not ticket.signal.wait(patience - soon) and patience == _LOOK_SECONDS:
                _logger.warning(
                    "still waiting for another call on the same %s to end; if that call waits "
                    "for this one, pass its context on: tool(params, context=context)",
                    self.subject_name,
                )
            ticket.signal.clear()
            self.look_again(ticket.take)

    def look_again(self, take: Callable[[], bool] | None) -> None:
        """Called now and then by one that waits to ``take`` it; may raise."""

    @property
    def subject_name(self) -> str:
        """What the gate is for, in messages."""
        return "session"

    def unreachable(self) -> Exception:
        """Return the error of a sync call that would stop the loop of the call it waits for."""
        return RuntimeError(
            f"another call is under way on this {self.subject_name}, and waiting for it here would "
            "stop the event loop it needs: await aexecute_tool(...) or tool.acall(...) instead"
        )


def _deadlock(gate: Gate) -> str | None:
    """Return what is wrong if the call inside a gate waits for the thread that is running here."""
    me, mine = threading.current_thread(), inspect.currentframe()
    waits, futures = {threading.Thread.join.__code__}, list[object]()
    pools: Any = sys.modules.get("concurrent.futures.thread")
    if pools is not None:
        waits.add(sys.modules["concurrent.futures"].Future.result.__code__)
        run = pools._WorkItem.run.__code__
        futures = [each.f_locals["self"].future for each in _stack(mine) if each.f_code is run]
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        if ident == me.ident:
            continue
        stack = list(_stack(frame))
        waits_for = [each.f_locals.get("self") for each in stack if each.f_code in waits]
        if any(each is me or each in futures for each in waits_for) and any(
            each.f_locals.get("gate") is gate for each in stack
        ):
            outer, inner = _call_of(stack), _call_of(_stack(mine))
            return (
                f"{outer} waits for this thread, and {inner}, made here, waits for it to end: pass "
                "on its context, as in tool(params, context=context)"
            )
    return None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _call_of(stack: Iterable[FrameType]) -> str:
    """Return the call that a stack is in, in words."""
    for frame in stack:
        found = frame.f_locals.get("transaction") or frame.f_locals.get("self")
        call = getattr(found, "call", None) or getattr(found, "_call", None)
        if isinstance(call, ToolCall):
            return f"the call of tool {call.name!r}"
    return "the call under way"


class Ticket:
    """A place in line; in a ``with`` block, until the block ends."""

    __slots__ = ("_deadline", "_gate", "loop", "signal", "take")

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
        self.take: Callable[[], bool] | None = None
        """What is tried when it is its turn, if that is known."""

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


def running_loop() -> AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    asyncio: Any = sys.modules.get("asyncio")  # not imported: then there is no loop
    return None if asyncio is None else asyncio._get_running_loop()


# Objects that calls change in place

_serials = itertools.count()
_gates: WeakValueDictionary[int, ObjectGate] = WeakValueDictionary()
_making = threading.Lock()
_waiting = threading.Lock()
_identity = object.__hash__  # an object's address, too, but without the audit event of ``id``


def gate_of(subject: object) -> ObjectGate:
    """Return the one gate of an object; it is freed when nothing refers to it any more."""
    with _making:
        gate = _gates.get(_identity(subject))
        if gate is None:
            gate = _gates[_identity(subject)] = ObjectGate(subject)
        return gate


class ObjectGate(Gate):
    """The gate of an object that calls change in place, whatever their session, thread or loop.

    Who is inside is one attribute, so that an interrupt finds a gate that is taken or free.
    """

    __slots__ = ("__weakref__", "owner", "serial", "subject")

    def __init__(self, subject: object) -> None:
        super().__init__()
        self.subject = subject
        """Referenced, so that no other object can get its identity while there is a gate."""
        self.owner: Holder | None = None
        self.serial = next(_serials)
        """Calls enter several gates in this order, so that no two wait for each other."""

    def locked(self) -> bool:
        return self.owner is not None

    @property
    def is_on_this_loop(self) -> bool:
        owner = self.owner
        loop = None if owner is None else owner.root.loop
        return loop is not None and loop is running_loop()

    @property
    def subject_name(self) -> str:
        return type(self.subject).__name__

    def unreachable(self) -> Exception:
        return InUse(str(super().unreachable()), self, may_end=False)

    def look_again(self, take: Any) -> None:
        take.args[0].check_wait(self)  # its holder

    def take(self, holder: Holder, *, in_line: bool = False) -> bool:
        """Enter if it is free, and if no one is in line before us."""
        with self._line_lock:
            if holder.is_closed:
                raise ViewClosed("the call has ended")
            if self.owner is None and (in_line or not self.line):
                self.owner = holder
        return self.owner is holder

    def release_from(self, holder: Holder) -> None:
        """Leave if the holder is inside, and wake the next in line. May be called again."""
        with self._line_lock:
            if self.owner is holder:
                self.owner = None
        if self.line and self.owner is None:
            self.wake_next()


class Holder:
    """What holds the gates of objects: a call with all calls nested in it, or a block by hand.

    Args:
        outer: The block that this call is made in: what one of them holds, the other may enter.
        inside: The call whose handler makes this one, which does not belong to it.
    """

    # Defaults on the class: every call on a shared object makes one, and few have to wait.
    waits_for: tuple[ObjectGate, ...] = ()
    """Several, if threads of a handler wait at once."""
    loop: AbstractEventLoop | None = None
    """The event loop that the call runs on."""
    passed: Gate | None = None
    """The gate of the session that the call is made on."""
    waits_at: Gate | None = None
    """The gate of a session that a call waits at which was made in this one, or in this block."""
    is_closed = False

    def __init__(self, outer: Holder | None = None, inside: Holder | None = None) -> None:
        self.outer = outer
        self.inside = inside
        self.gates: list[ObjectGate] = []
        """Those that it has entered, or is about to enter."""

    @property
    def root(self) -> Holder:
        return self if self.outer is None else self.outer.root

    def holds(self, gate: ObjectGate) -> bool:
        owner = gate.owner
        return owner is not None and (owner is self or owner.root is self.root)

    @property
    def holds_any(self) -> bool:
        return any(gate.owner is self for gate in self.gates)

    def try_enter(self, gate: ObjectGate) -> bool:
        """Enter a gate if that is possible without waiting."""
        if self.holds(gate):
            return True
        self.gates.append(gate)  # first: then an interrupt cannot leave it taken
        return gate.take(self)

    def enter(self, gates: Sequence[ObjectGate], deadline: Deadline | None = None) -> None:
        """Enter gates, blocking the thread.

        Raises:
            InUse: The calls inside wait for us, or need the event loop that is running here.
            TooLate: The deadline passed.
        """
        rest, held_before = list(gates), self.holds_any
        while rest:
            if self.try_enter(rest[0]):
                del rest[0]
            elif self._may_wait(rest, gates, held_before):
                gate = rest[0]
                ticket = gate.turn(deadline)
                take = ticket.take = partial(gate.take, self, in_line=True)
                try:
                    with ticket:
                        while not take():
                            gate.wait(ticket)
                finally:
                    self._note_end(gate)

    async def enter_on_loop(
        self, gates: Sequence[ObjectGate], deadline: Deadline | None = None
    ) -> None:
        """Enter gates without blocking the running event loop; raises like ``enter``."""
        rest, held_before = list(gates), self.holds_any
        while rest:
            if self.try_enter(rest[0]):
                del rest[0]
            elif self._may_wait(rest, gates, held_before):
                gate = rest[0]
                try:
                    await gate.queue(partial(gate.take, self, in_line=True), deadline)
                finally:
                    self._note_end(gate)

    def _may_wait(
        self, rest: list[ObjectGate], gates: Sequence[ObjectGate], held_before: bool
    ) -> bool:
        """Note that we wait for the first one. False: we begin anew, and wait for that one first.

        Then nobody waits for us, because we hold nothing else.
        """
        try:
            self._note_wait(rest[0])
        except InUse as error:
            if held_before or not error.may_end or self.outer is not None:
                raise
            self.leave()
            rest[:] = [error.gate, *(gate for gate in gates if gate is not error.gate)]
            return False
        return True

    def leave(self) -> None:
        """Leave all gates. May be called again."""
        for gate in reversed(self.gates):
            gate.release_from(self)
        self.gates.clear()

    def close(self) -> None:
        """Leave all gates for good: a thread of an abandoned handler enters none any more."""
        self.is_closed = True
        self.leave()

    def check_wait(self, gate: ObjectGate) -> None:
        """Raise InUse if a call inside waits for the session that we keep from it."""
        with _waiting:
            for owner in _owners(gate):
                if owner.waits_at is not None and owner.waits_at is self.root.passed:
                    name = gate.subject_name
                    raise InUse(
                        f"another call is using {name}, and waits for this session. Try again",
                        gate,
                        may_end=False,
                    )

    def _note_end(self, gate: ObjectGate) -> None:
        with _waiting:
            waits_for = list(self.root.waits_for)
            waits_for.remove(gate)
            self.root.waits_for = tuple(waits_for)

    def _note_wait(self, gate: ObjectGate) -> None:
        """Note that we wait; raise InUse if the call inside waits for us, directly or not."""
        name = gate.subject_name
        ours: set[Holder] = {self.root}
        around = self.root.inside
        while around is not None:
            ours.add(around.root)
            around = around.root.inside
        with _waiting:
            found = _owners(gate)
            if found and found[0] is not self.root and found[0] in ours:
                raise InUse(
                    f"the call under way holds the {name} of this call: pass on its context, as in "
                    "tool(params, context=context)",
                    gate,
                    may_end=False,
                )
            if not ours.isdisjoint(found):
                raise InUse(
                    f"another call is using {name}, and waits for this one. Try again",
                    gate,
                    may_end=self.root.inside is None,
                )
            self.root.waits_for += (gate,)


def _owners(gate: ObjectGate) -> list[Holder]:
    """Return the roots of what is inside a gate, and of what is inside those that it waits for."""
    found: list[Holder] = []
    owners = [gate.owner]
    while owners:
        owner = owners.pop()
        if owner is not None and owner.root not in found:
            found.append(owner.root)
            owners += (each.owner for each in owner.root.waits_for)
    return found


# Between processes

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.005
"""Seconds between two looks at a lock that another process holds."""
_FOR_CALLS = 600.0
"""Seconds to wait for a call in another process."""
_FOR_CHILDREN = 10.0
"""Seconds to wait for children of a killed owner, which close the lock once they run."""
_FOR_PASSING = 0.05
"""Seconds to wait in any case: another process may be about to leave."""
_NOTE_SIZE = 256
"""Fixed, so that a full disk does not prevent the next owner from writing its note."""


class ProcessLock:
    """A lock that processes take in turn; one that waits goes before one that was just inside.

    ``with`` a call at a time: ``take`` in a ``try`` block, and in its ``finally`` first set
    ``is_held`` to False, then call ``release``, a C function.

    Args:
        folder: The descriptor of the directory with the lock's files.
        root: What it locks, for messages.
        wait: Seconds to wait for another process. By default not at all for one that holds it for
            as long as it runs, and ten minutes for one that holds it for a call.
        alone: Whether this process holds it for as long as it runs; then it does not wait by
            default.

    Raises:
        WorkspaceLocked: Another process holds it.
    """

    def __init__(self, folder: int, root: Path, *, wait: float | None, alone: bool) -> None:
        self.root = root
        self.alone = alone
        self.is_held = False
        self.is_stale = True
        """Whether another process has held it since we last did."""
        self._wait = wait
        self._pid = os.getpid()
        self._fd = self._turn = -1
        note = {"pid": self._pid, "since": SYSTEM_CLOCK.time(), "alone": alone}
        token = os.urandom(8).hex()
        self._note = json.dumps({**note, "token": token}).ljust(_NOTE_SIZE).encode()
        try:
            self._fd = os.open("lock", locks.OWN_FILE, 0o600, dir_fd=folder)
            self._turn = os.open("turn", locks.OWN_FILE, 0o600, dir_fd=folder)
            for fd in (self._fd, self._turn):
                locks.keep_from_forks(fd)
            self.release: Callable[[], object] = locks.releaser(self._fd)
            self._leave_line = locks.releaser(self._turn)
            # Made once: every call takes and releases both.
            self._take = locks.taker(self._fd)
            self._take_turn = locks.taker(self._turn)
            self.take()
        except BaseException:
            self.close()
            raise

    @property
    def is_awaited(self) -> bool:
        """Whether another process waits for it."""
        return locks.is_taken(self._turn)

    def take(self, deadline: Deadline | None = None) -> None:
        """Take it, blocking the thread; raises TooLate after the deadline."""
        self.check_process()
        try:
            if not self._attempt():
                pause = threading.Event()
                for seconds in self._pauses(deadline):
                    pause.wait(seconds)
                    if self._attempt():
                        break
        finally:
            self._leave_line()

    async def take_on_loop(
        self, deadline: Deadline | None = None, may_pass: Callable[[], bool] | None = None
    ) -> bool:
        """Take it without blocking the running event loop; False if ``may_pass`` spares us that."""
        import asyncio

        self.check_process()
        try:
            if not self._attempt():
                for seconds in self._pauses(deadline):
                    if may_pass is not None and may_pass():
                        return False
                    await asyncio.sleep(seconds)
                    if self._attempt():
                        break
        finally:
            self._leave_line()
        return True

    def check_process(self) -> None:
        """Raise ViewClosed in a forked child, or if it is closed."""
        if self._pid != os.getpid():
            self._let_go()
            raise ViewClosed("this filesystem belongs to the process that opened it")
        if self._fd < 0:
            raise ViewClosed("this filesystem was closed")

    def close(self) -> None:
        """Release it for good."""
        fds, self._fd, self._turn = (self._fd, self._turn), -1, -1
        self._let_go()
        for fd in fds:
            if fd >= 0 and self._pid == os.getpid():
                locks.close(fd)

    def _let_go(self) -> None:
        """Touch the descriptors no more: other files may have them by now."""
        self.is_held = False
        self.release = self._leave_line = bool

    def _attempt(self) -> bool:
        """Take it if it is free and no other process is first in line."""
        try:
            self._take_turn()
            self._take()
        except locks.TAKEN:
            return False
        self.is_held = True
        if os.pread(self._fd, _NOTE_SIZE, 0) != self._note:
            self.is_stale = True
            os.pwrite(self._fd, self._note, 0)
        return True

    def _pauses(self, deadline: Deadline | None) -> Iterator[float]:
        """Yield how long to wait before each further attempt, until it has been too long."""
        begun = SYSTEM_CLOCK.monotonic()
        pause = _FIRST_PAUSE
        while True:
            if deadline is not None and deadline.remaining() <= 0:
                raise TooLate
            if SYSTEM_CLOCK.monotonic() >= begun + self._patience():
                raise self._locked()
            yield pause
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _patience(self) -> float:
        pid, alone = _owner_of(self._fd)
        if pid is not None and _is_gone(pid):
            return max(self._wait or 0, _FOR_CHILDREN)
        if self._wait is None:
            return _FOR_PASSING if alone or self.alone else _FOR_CALLS
        return max(self._wait, _FOR_PASSING)

    def _locked(self) -> WorkspaceLocked:
        pid, alone = _owner_of(self._fd)
        who = f"this process ({pid})" if pid == os.getpid() else f"process {pid}"
        if alone:
            text = f"{self.root} is open in {who}. Close it there, or pass wait= to wait for it"
        else:
            text = f"A call of {who} is working on {self.root}. Wait until it has ended, or stop it"
        return WorkspaceLocked(text, pid)


def _owner_of(fd: int) -> tuple[int | None, bool]:
    """Return the process that took a lock last, or None, and if it holds the lock while it runs."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(os.pread(fd, _NOTE_SIZE, 0))
        return int(note["pid"]), bool(note.get("alone", True))
    return None, True


def _is_gone(pid: int) -> bool:
    """Tell whether an owner has ended: then only a child it was starting holds the lock."""
    try:
        os.kill(pid, 0)
        with locks.defer_interrupts():  # Ctrl-C must not leave the file open
            status = Path(f"/proc/{pid}/stat").read_bytes()
    except ProcessLookupError:
        return True
    except OSError:  # another user's process, or no /proc
        return False
    return status.rpartition(b") ")[2][:1] in b"ZX"  # a zombie
