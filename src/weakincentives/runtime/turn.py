"""The calls of one model turn: which run at the same time, in which order they commit, re-runs.

Concurrent calls work on private views and commit in call order. One that depends on what an
earlier call has changed is re-run in order: the outcome is that of running one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from weakincentives.call import ToolCall
from weakincentives.errors import MergeConflict, Refusal, ToolTimeout
from weakincentives.logs import get_logger
from weakincentives.prompt.tool import ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.runtime.answers import raises_through
from weakincentives.runtime.progress import Progress, offers_of, resources_of
from weakincentives.runtime.transactions import Place, Transaction

if TYPE_CHECKING:
    from asyncio import Task

Group = list[tuple[int, ToolCall]]
"""Calls that run together, each with its number in the turn."""

_logger = get_logger(__name__)

_MAX_CONCURRENCY = max(32, 8 * (os.cpu_count() or 1))
_MAX_RUNS = 5


class Turn:
    """The calls of one model turn, and what surrounds them."""

    def __init__(
        self, calls: Iterable[ToolCall], context: ToolContext, max_concurrency: int | None
    ) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
        self.calls = tuple(enumerate(calls))
        self.context = context
        # What the model was shown when it made the calls.
        self.offers = offers_of(context)
        self.resources = resources_of(context)
        self.max_concurrency = max_concurrency or _MAX_CONCURRENCY

    def groups(self) -> Iterator[Group]:
        """Yield neighbours that may run together, and every other call by itself."""
        group: Group = []
        for each in self.calls:
            offer = self.offers.get(each[1].name)
            if offer is not None and offer.may_run_beside and self.max_concurrency > 1:
                group.append(each)
                continue
            yield from self._split(group)
            group = []
            yield [each]
        yield from self._split(group)

    def _split(self, group: Group) -> Iterator[Group]:
        # Asked late: a call before it in the turn may have built such a resource.
        if self.resources.in_place:
            yield from ([each] for each in group)
        elif group:
            yield group


async def run_together(
    starts: Sequence[tuple[int, Callable[[Place], Coroutine[Any, Any, ToolResult[Any]]]]],
    max_concurrency: int,
) -> list[ToolResult[Any]]:
    """Run calls, given with their numbers in the turn; each commits after those before it."""
    import asyncio

    slots = asyncio.Semaphore(max_concurrency)
    # Each is set when the call before has ended: the next one may commit.
    reached = [asyncio.Event() for _ in range(len(starts) + 1)]
    reached[0].set()

    async def run(index: int) -> tuple[ToolResult[Any] | None, BaseException | None]:
        async with slots:
            try:
                number, start = starts[index]
                result = await start(Place(number, reached[index]))
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
    """Cancel what has not ended, and wait until it is rolled back."""
    import asyncio

    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:  # cancelled once more: told to them again, then waited for
            pending = {task for task in pending if not task.done()}


# Order and re-runs


async def reach(progress: Progress) -> None:
    """Wait until all calls before this one have ended."""
    place = progress.place
    if place is not None and place.reached is not None:
        await place.reached.wait()
        place.arrived = True


async def is_outdated(progress: Progress, transaction: Transaction, error: BaseException) -> bool:
    """Whether the call ends as it does because it ran before its place was reached.

    That goes for failures and refusals as well: on the state that an earlier call left, it may
    succeed.
    """
    place = progress.place
    if place is None or not isinstance(error, Exception):
        return False  # an interrupt is no answer to anything it read
    await reach(progress)
    if place.attempts >= _MAX_RUNS:
        return False  # somebody else changes the session all the time: the model is told
    if transaction.needs_place:
        found = tuple(name for name, _ in transaction.resource_context.in_place)
    elif progress.event is not None and isinstance(error, MergeConflict):
        found = error.paths  # from the commit
    else:
        try:
            transaction.check_conflicts()
            return False
        except MergeConflict as conflict:
            found = conflict.paths
    place.conflicts = tuple(dict.fromkeys((*place.conflicts, *found)))
    return True


# Retries: the tool's own policy


def wait_before_retry(
    progress: Progress, transaction: Transaction, result: ToolResult[Any], error: BaseException
) -> float | None:
    """Return the seconds until the tool's policy wants another attempt; None for never."""
    tool, failure = progress.tool, result.failure
    if tool is None or tool.retry is None or failure is None or not progress.ran:
        return None
    if raises_through(error) or transaction.settled or progress.succeeded:
        return None
    if isinstance(error, Refusal):
        return None  # it would be refused again
    if progress.ledger is not None and not progress.compensated:
        return None  # nobody knows whether it took effect
    if not tool.retry.retries(failure, progress.attempts - 1):
        return None
    wait = tool.retry.backoff.delay(progress.attempts)
    deadline = progress.context.deadline
    if deadline is not None and deadline.remaining() <= wait:
        return None  # it would be over before the next attempt begins
    _logger.info("tool %s failed (%s); retried in %.3g s", tool.name, failure.code, wait)
    return wait


async def pause(progress: Progress) -> None:
    """Wait for the next attempt; whoever cancels the caller's signal need not wait for it."""
    clock, signal = progress.clock, progress.context.signal
    until = clock.monotonic() + progress.wait
    while (left := until - clock.monotonic()) > 0:
        if signal.cancelled:
            raise ToolTimeout(f"cancelled between attempts: {signal.reason}")
        await clock.sleep(min(left, 0.1))
