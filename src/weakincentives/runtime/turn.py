"""The calls of one turn, made together or one by one: concurrency, order, re-runs and retries.

Concurrent calls work on private views and commit in call order. One that depends on what an
earlier call has changed is re-run in order: the outcome is that of running one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from logging import DEBUG
from random import random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from weakincentives.core.call import ToolCall
from weakincentives.core.gate import Gate, Lease
from weakincentives.core.logs import get_logger
from weakincentives.errors import DeadlineExceededError, MergeConflict, Refusal, ToolTimeout
from weakincentives.filesystem.paths import shown
from weakincentives.prompt.tool import ToolContext
from weakincentives.resources import ResourceContext
from weakincentives.runtime.answers import raises_through
from weakincentives.runtime.transactions import NO_RESOURCES, Transaction, TurnSlot
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from asyncio import Event, Task

    from weakincentives.core.deadlines import Deadline

Group = list[tuple[int, ToolCall]]
"""Calls that run together, each with its number in the turn."""

_logger = get_logger(__name__)

DEFAULT_CONCURRENCY = max(32, 8 * (os.cpu_count() or 1))
_MAX_RUNS = 5
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.25
"""Seconds before a call is re-run that lost a race against a transaction elsewhere."""
_MAX_JOINED = 1000
"""Calls that join one turn; then it must end, so that a call that waits unseen gets through: a
thread in the moment between looking at a gate and getting in line."""
_NO_LEASES: Mapping[Gate, Lease] = MappingProxyType({})
_reached: Event | None = None
"""Already set, so that all loops can share it; made when first needed."""


def groups(
    calls: Iterable[ToolCall], context: ToolContext, max_concurrency: int
) -> Iterator[Group]:
    """Yield neighbours that may run together, and every other call by itself."""
    offers = context.offers
    resources: ResourceContext = getattr(context.resources, "context", NO_RESOURCES)
    together: Group = []
    for each in (*enumerate(calls), None):
        offer = None if each is None else offers.get(each[1].name)
        if (
            each is not None
            and offer is not None
            and max_concurrency > 1
            and offer.may_join(len(together), context)
        ):
            together.append(each)
            continue
        # Asked late: a call before them in the turn may have built such a resource.
        if resources.in_place:
            yield from ([one] for one in together)
        elif together:
            yield together
        together = []
        if each is not None:
            yield [each]


async def run_together(
    starts: Sequence[tuple[int, Callable[[TurnSlot], Coroutine[Any, Any, ToolResult[Any]]]]],
    max_concurrency: int,
) -> list[ToolResult[Any]]:
    """Run calls, each with its number in the turn; each commits after those before it."""
    import asyncio

    slots = asyncio.Semaphore(max_concurrency)
    # Each is set when the call before has ended: the next one may commit.
    reached = [asyncio.Event() for _ in range(len(starts) + 1)]
    reached[0].set()

    async def run(index: int) -> tuple[ToolResult[Any] | None, BaseException | None]:
        async with slots:
            try:
                number, start = starts[index]
                result = await start(TurnSlot(number, reached[index]))
            except BaseException as error:
                # As a value: an interrupt raised in a task would end the whole loop. The next
                # call may not commit: what raises through ends the turn.
                return None, error
            reached[index + 1].set()
            return result, None

    tasks = [asyncio.create_task(run(index)) for index in range(len(starts))]
    results: list[ToolResult[Any]] = []
    try:
        for task in tasks:
            result, error = await task
            if error is not None:
                raise error
            results.append(cast("ToolResult[Any]", result))
    except BaseException:
        await _stop(tasks)
        raise
    return results


async def _stop(tasks: Iterable[Task[Any]]) -> None:
    """Cancel unfinished calls, and wait until they are rolled back."""
    import asyncio

    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:  # cancelled once more: cancel them again, and wait
            pending = {task for task in pending if not task.done()}


class JoinedTurn:
    """Calls that were started one by one on one event loop, as the calls of one turn.

    The first of them has locked the gates; the one that leaves last releases them. Each has its
    own caller: one that is cancelled or raises through does not end the others.
    """

    __slots__ = ("_gates", "_inside", "_joined", "leases")

    def __init__(
        self,
        gates: tuple[Gate, ...],
        first: TurnSlot,
        call_id: str,
        leases: Mapping[Gate, Lease] = _NO_LEASES,
    ) -> None:
        self._gates = gates
        self.leases = leases
        """For those of the gates that it has not entered: its calls only read beside others."""
        self._inside = {first: call_id}
        """The calls that have not ended, in order of arrival; the first of them may commit."""
        self._joined = 1
        gates[0].joined = self  # until the gate is released
        if gates[0].line:
            gates[0].wake_next()  # it may be able to join

    def admits(self, gates: tuple[Gate, ...], call_id: str, *, reads: bool) -> bool:
        """Whether a call at these gates can join, if it is its turn at the first of them."""
        import asyncio

        return (
            self._gates == gates
            and (reads or not self.leases)
            and all(lease.is_fresh for lease in self.leases.values())
            and gates[0].loop is asyncio.get_running_loop()
            and len(self._inside) < DEFAULT_CONCURRENCY
            and self._joined < _MAX_JOINED
            and not any(gate.is_awaited for gate in gates[1:])
            # The same call again may have to return the answer of the one under way.
            and call_id not in self._inside.values()
        )

    def join(self, call_id: str, deadline: Deadline | None) -> TurnSlot:
        """Return the place after all calls that are inside."""
        import asyncio

        if self._joined == 1:
            next(iter(self._inside)).number = 0
        place = TurnSlot(self._joined, asyncio.Event(), deadline)
        self._joined += 1
        self._inside[place] = call_id
        return place

    def leave(self, place: TurnSlot) -> None:
        """End a call in whatever way: the next one may commit, and one more may join."""
        gates = self._gates
        del self._inside[place]
        first = next(iter(self._inside), None)
        if first is None:
            for gate in reversed(gates):
                lease = self.leases.get(gate)
                gate.release() if lease is None else lease.end()
            return
        if gates[0].line:
            gates[0].wake_next()
        if first.reached is not None:
            first.reached.set()


def first_place(*, reads: bool) -> TurnSlot:
    """Return the place of a call that others can join; ``reads`` means it only reads."""
    global _reached
    if reads:
        # No call commits before it, and it has nothing to hide from those that join: it needs
        # no private views, which cost more.
        return TurnSlot(None, is_first=True)
    if _reached is None:
        import asyncio

        _reached = asyncio.Event()
        _reached.set()
    return TurnSlot(None, _reached, is_first=True)


# Order and re-runs


async def reach(transaction: Transaction) -> None:
    """Wait until all calls before this one have ended."""
    place = transaction.place
    if place is not None and place.reached is not None:
        if place.deadline is None or place.reached.is_set():
            await place.reached.wait()
        else:
            await _reach_in_time(place.reached, place.deadline)
        place.arrived = True


async def _reach_in_time(reached: Event, deadline: Deadline) -> None:
    import asyncio

    try:
        async with asyncio.timeout(deadline.remaining()):
            await reached.wait()
    except TimeoutError:
        raise DeadlineExceededError(
            "The deadline passed while the call waited for earlier calls"
        ) from None


async def is_to_be_re_run(transaction: Transaction, error: BaseException) -> bool:
    """Whether the call is run from its start again, on the state as it is then."""
    if transaction.in_order and transaction.is_open and await _is_outdated(transaction, error):
        return True
    if transaction.forks and await _races_again(transaction, error):
        return True
    return transaction.in_use is not None and _waits_elsewhere(transaction, error)


async def _is_outdated(transaction: Transaction, error: BaseException) -> bool:
    """Whether the call failed because an earlier call of the turn changed its read set.

    That includes refusals: on the state that the earlier call left, it may succeed.
    """
    place = transaction.place
    if place is None or not isinstance(error, Exception):
        return False  # an interrupt does not depend on what was read
    if place.deadline is not None and isinstance(error, DeadlineExceededError):
        return False  # there is no time to wait for the calls before it
    await reach(transaction)
    if place.attempts >= _MAX_RUNS:
        return False  # the session changes all the time: the model gets the conflict
    if transaction.needs_place:
        found = tuple(name for name, _ in transaction.resource_context.in_place)
    elif transaction.event is not None and isinstance(error, MergeConflict):
        found = error.paths  # from the commit
    else:
        try:
            transaction.check_conflicts()
            return False
        except MergeConflict as conflict:
            found = conflict.paths
    place.conflicts = tuple(dict.fromkeys((*place.conflicts, *found)))
    return True


async def _races_again(transaction: Transaction, error: BaseException) -> bool:
    """Whether a call is re-run because another transaction kept it from going on."""
    view, tool = transaction.lost_race, transaction.asked.tool
    if view is None or transaction.parent is not None or raises_through(error):
        return False
    if tool is None or tool.reach not in ("read", "reversible"):
        return False
    clock, deadline = transaction.clock, transaction.context.deadline
    left = view.patience - (clock.monotonic() - transaction.asked.started)
    if deadline is not None:
        left = min(left, deadline.remaining())
    transaction.races += 1
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**transaction.races)
    wait = longest * (0.5 + 0.5 * random())  # so that those that met once do not meet again
    if left <= wait or transaction.context.signal.cancelled:
        return False
    transaction.undo()  # first: its locks are released before it waits
    if transaction.around.on_loop:
        await clock.sleep(wait)
    else:
        transaction.signal.wait(wait)
    return True


def _waits_elsewhere(transaction: Transaction, error: BaseException) -> bool:
    """Whether a call is re-run once an object that it could not wait for is free.

    It could not because the calls inside would have waited for it, or for its event loop.
    """
    found, around, tool = transaction.in_use, transaction.around, transaction.asked.tool
    if found is None or not found.may_end or transaction.parent is not None:
        return False
    if raises_through(error) or found.gate in around.enters_first:
        return False  # once is enough: the gates are then entered in their order
    if transaction.asked.ran and (tool is None or tool.reach not in ("read", "reversible")):
        return False
    around.enters_first += (found.gate,)
    return True


# Retries: the tool's own policy


def wait_before_retry(
    transaction: Transaction, result: ToolResult[Any], error: BaseException
) -> float | None:
    """Return the seconds to wait before the tool's policy retries; None for no retry."""
    tool, failure = transaction.asked.tool, result.failure
    if tool is None or tool.retry is None or failure is None or not transaction.asked.ran:
        return None
    if raises_through(error) or transaction.settled or transaction.succeeded:
        return None
    if isinstance(error, Refusal):
        return None  # the retry would be refused, too
    if transaction.asked.ledger is not None and not transaction.compensated:
        return None  # it may have taken effect
    if not tool.retry.retries(failure, transaction.attempts - 1):
        return None
    wait = tool.retry.backoff.delay(transaction.attempts)
    deadline = transaction.context.deadline
    if deadline is not None and deadline.remaining() <= wait:
        return None  # the deadline comes before the next attempt
    # Quietly: a traceback is for a call that fails in the end.
    trace = error if _logger.isEnabledFor(DEBUG) else None
    said = shown(result.message.partition("\n")[0])
    retried = "tool %s failed (%s), and is retried in %.3g s: %s"
    _logger.info(retried, tool.name, failure.code, wait, said, exc_info=trace)
    return wait


async def pause(transaction: Transaction) -> None:
    """Wait before the next attempt; cancelling the caller's signal ends the wait."""
    clock, signal = transaction.clock, transaction.context.signal
    until = clock.monotonic() + transaction.wait
    while (left := until - clock.monotonic()) > 0:
        if signal.cancelled:
            raise ToolTimeout(f"cancelled between attempts: {signal.reason}")
        await clock.sleep(min(left, 0.1))
