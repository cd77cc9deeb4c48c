"""What every resource that is rolled back must do: run these cases on your own.

Each case makes calls that change the resource through the pipeline, and compares its state with
what committed calls alone would have made.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from weakincentives.core.call import ToolCall
from weakincentives.prompt.tool import Tool, ToolContext, tool
from weakincentives.resources import Binding
from weakincentives.runtime.registry import ToolRegistry
from weakincentives.runtime.snapshots import tool_transaction
from weakincentives.runtime.tool_call import aexecute_tool, execute_tool
from weakincentives.session.participant import misfit, participant_for
from weakincentives.session.session import Session

R = TypeVar("R")

_WAIT = 60.0
_THREADS = 8
_HISTORIES = 20


@dataclass(frozen=True, slots=True)
class ResourceCase(Generic[R]):
    """One thing that every resource must do."""

    name: str
    text: str
    """The requirement, in one sentence."""
    body: Callable[[_Trial[R]], None]

    def __str__(self) -> str:
        return self.name

    def check(
        self,
        make: Callable[[], R],
        change: Callable[[R, int], object],
        look: Callable[[R], object],
    ) -> None:
        """Raise AssertionError, with the case and the reason, unless the resource passes.

        Args:
            make: Returns a fresh resource.
            change: Makes a change that ``number`` names: another number, another change.
            look: Returns the state, to compare with ``==``. It must hold what was changed, in any
                order, and nothing that differs from one resource to the next.
        """
        try:
            self.body(_Trial(make, change, look))
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {error}") from error


class _Trial(Generic[R]):
    def __init__(
        self, make: Callable[[], R], change: Callable[[R, int], object], look: Callable[[R], object]
    ) -> None:
        self.make, self.change, self.look = make, change, look
        self.resource = make()
        self.kind: type[Any] = type(self.resource)
        self.goes_on, self.is_waiting = threading.Event(), threading.Event()
        change_it = self.change

        @tool(reach="reversible")
        def one(number: int, fails: bool, *, context: ToolContext) -> None:
            """Make a change."""
            change_it(context.resources.get(self.kind), number)
            if fails:
                raise ValueError("it was to fail")

        @tool(reach="reversible")
        def outer(numbers: list[int], fails: bool, *, context: ToolContext) -> None:
            """Make a change, then nested ones, of which every second fails."""
            change_it(context.resources.get(self.kind), numbers[0])
            for place, number in enumerate(numbers[1:]):
                one({"number": number, "fails": place % 2 == 1}, context=context)
            if fails:
                raise ValueError("it was to fail")

        @tool(reach="reversible")
        async def waits(number: int, *, context: ToolContext) -> None:
            """Make a change, then wait."""
            change_it(context.resources.get(self.kind), number)
            self.is_waiting.set()
            await asyncio.sleep(_WAIT)

        @tool(reach="read")
        def reads(*, context: ToolContext) -> None:
            """Look."""
            self.seen.append(self.look(context.resources.get(self.kind)))

        self.seen: list[object] = []
        self.tools: tuple[Tool[Any, Any], ...] = (one, outer, waits, reads)

    def registry(self) -> ToolRegistry:
        """Return the tools on the one resource, with a session of their own."""
        binding = Binding.instance(self.kind, self.resource)
        return ToolRegistry(self.tools, resources={self.kind: binding}, session=Session())

    def call(self, number: int, *, fails: bool = False) -> None:
        done = self.registry().execute("one", {"number": number, "fails": fails})
        assert done.success is not fails, f"change({number}) failed: {done.message}"

    def expect(self, numbers: Iterable[int], when: str) -> None:
        """Compare with a fresh resource to which these changes were made, in this order."""
        fresh = self.make()
        for number in numbers:
            self.change(fresh, number)
        wanted, found = self.look(fresh), self.look(self.resource)
        assert found == wanted, f"{when}: expected {wanted!r}, got {found!r}"


# Cases


def _takes_part(trial: _Trial[Any]) -> None:
    problem = misfit(trial.resource)
    assert problem is None, problem
    assert participant_for(trial.resource) is not None, "it has no snapshot() and restore()"
    before = trial.look(trial.resource)
    trial.change(trial.resource, 1)
    assert trial.look(trial.resource) != before, "change() changed nothing that look() sees"


def _commits(trial: _Trial[Any]) -> None:
    trial.call(1)
    trial.call(2)
    trial.expect([1, 2], "after two calls")


def _rolls_back(trial: _Trial[Any]) -> None:
    trial.call(1)
    trial.call(2, fails=True)
    trial.expect([1], "after a call that failed")
    trial.call(3)
    trial.expect([1, 3], "after the next call")


def _snapshots_are_values(trial: _Trial[Any]) -> None:
    participant = participant_for(trial.resource)
    assert participant is not None
    trial.change(trial.resource, 1)
    token = participant.snapshot_here()
    for number in (2, 3):
        trial.change(trial.resource, number)
        participant.restore_here(token)
        trial.expect([1], "after a token was restored, perhaps for the second time")
    trial.change(trial.resource, 4)
    trial.expect([1, 4], "after a change behind a restored token")


def _nests(trial: _Trial[Any]) -> None:
    tools = trial.registry()
    assert tools.execute("outer", {"numbers": [1, 2, 3, 4], "fails": False}).success
    trial.expect([1, 2, 4], "after nested calls of which one failed")
    assert not tools.execute("outer", {"numbers": [5, 6], "fails": True}).success
    trial.expect([1, 2, 4], "after a call that failed behind its nested call")


def _blocks(trial: _Trial[Any]) -> None:
    tools = trial.registry()
    trial.call(1)
    try:
        with tool_transaction(tools.session, tools.context().resources):
            trial.change(trial.resource, 2)
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    trial.expect([1], "after a tool_transaction block that raised")


def _is_cancelled(trial: _Trial[Any]) -> None:
    tools = trial.registry()

    async def run() -> None:
        call = ToolCall("waits", {"number": 2})
        task = asyncio.create_task(aexecute_tool(call, context=tools.context()))
        while not trial.is_waiting.is_set() and not task.done():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])

    trial.call(1)
    asyncio.run(run())
    trial.expect([1], "after a call was cancelled")
    trial.call(3)
    trial.expect([1, 3], "after the next call")


def _is_shared(trial: _Trial[Any]) -> None:
    """Threads with a session each: half of the calls fail, readers see whole calls only."""
    start = threading.Barrier(_THREADS)
    problems: list[str] = []

    def work(first: int) -> None:
        tools = trial.registry()
        start.wait(_WAIT)
        for number in range(first, first + 6):
            fails = number % 2 == 1
            arguments = {"numbers": [number], "fails": fails}
            done = execute_tool(ToolCall("outer", arguments), context=tools.context())
            if done.success is fails:
                problems.append(f"change({number}): {done.message}")
            tools.execute("reads")

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, "; ".join(problems)
    made = {n for first in range(_THREADS) for n in range(10 * first, 10 * first + 6, 2)}
    fresh = trial.make()
    for number in sorted(made):
        trial.change(fresh, number)
    found, wanted = trial.look(trial.resource), trial.look(fresh)
    assert _unordered(found) == _unordered(wanted), (
        f"after calls of {_THREADS} threads: expected {wanted!r} in any order, got {found!r}"
    )


def _histories(trial: _Trial[Any]) -> None:
    for seed in range(_HISTORIES):
        dice = random.Random(seed)
        trial.resource, made = trial.make(), list[int]()
        tools = trial.registry()
        for step in range(12):
            numbers = [100 * step + n for n in range(dice.randint(1, 4))]
            fails = dice.random() < 0.5
            done = tools.execute("outer", {"numbers": numbers, "fails": fails})
            assert done.success is not fails, f"change({numbers}): {done.message}"
            if not fails:
                made += [numbers[0], *numbers[1::2]]
            trial.expect(made, f"after step {step} of history {seed}")


def _unordered(state: object) -> object:
    if isinstance(state, (list, tuple, set, frozenset)):
        return sorted(map(repr, state))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return state


_CASES: tuple[ResourceCase[Any], ...] = (
    ResourceCase("takes part", "It has the methods that a rollback needs.", _takes_part),
    ResourceCase("success", "Calls that succeed leave their changes.", _commits),
    ResourceCase("failure", "A call that fails leaves nothing.", _rolls_back),
    ResourceCase(
        "tokens are values",
        "A token does not change with the resource, and can be restored twice.",
        _snapshots_are_values,
    ),
    ResourceCase("nested calls", "A nested call is undone alone, or with its call.", _nests),
    ResourceCase("blocks", "A tool_transaction block that raises leaves nothing.", _blocks),
    ResourceCase("cancelled", "A call that is cancelled leaves nothing.", _is_cancelled),
    ResourceCase(
        "shared", "Calls of several threads and sessions are all there, or not at all.", _is_shared
    ),
    ResourceCase("random histories", "Whatever succeeds and fails, in any order.", _histories),
)


def resource_cases() -> tuple[ResourceCase[Any], ...]:
    """Return what every resource that is rolled back must do; see ``ResourceCase.check``."""
    return _CASES
