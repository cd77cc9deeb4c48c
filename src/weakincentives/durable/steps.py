"""Steps as data, and the agent loop over them: what a durable engine records and repeats.

A step names what is to be done, never what it is done with: the conversation, the arguments and
the results are in the run's session. So a step and its result are a few dozen bytes, and a step
that an engine repeats finds in the session what it has done already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, cast

Ended = Literal["done", "failed", "cancelled", "waiting"]
"""How a sitting of a run ends: ``waiting`` for a person, whose answer begins the next."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Take a turn of the model. Turn 0 is the run as it is: its last turn, or else the first."""

    run: str
    n: int


@dataclass(frozen=True, slots=True)
class Call:
    """Make one call of the last turn."""

    run: str
    call_id: str
    name: str
    params: Mapping[str, Any] | None = None
    """None: as the message of the model in the session has them."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End a sitting; the changes of a run that is done are merged, if that was asked for."""

    run: str
    status: Ended
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WholeRun:
    """The whole sitting as one step: cheapest, and after a kill it continues just the same."""

    run: str


@dataclass(frozen=True, slots=True)
class TurnResult:
    n: int
    """The number of the turn."""
    calls: tuple[tuple[str, str], ...] = ()
    """The ids and tools of its calls, to be made in this order."""
    ended: Ended | None = None
    """Set if it was the last turn of the run."""
    detail: str = ""
    """Why the run failed."""


@dataclass(frozen=True, slots=True)
class CallResult:
    success: bool = True
    waits_for: str = ""
    """The id of the approval that the call waits for: make it again once that is answered."""
    ended: Ended | None = None
    """Set if the run cannot go on."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FinishResult:
    ended: Ended
    goes_on: bool = False
    """Whether the model has to deal with a conflict first."""


Step: TypeAlias = Turn | Call | Finish | WholeRun
"""What is to be done, as data."""
StepResult: TypeAlias = TurnResult | CallResult | FinishResult
"""What an engine records of a step."""


def result_of_end(step: Step, ended: Ended, detail: str = "") -> StepResult:
    """Return the result of a step after which the run has ended."""
    if isinstance(step, Turn):
        return TurnResult(step.n, ended=ended, detail=detail)
    if isinstance(step, Call):
        return CallResult(success=False, ended=ended, detail=detail)
    return FinishResult(ended)


class Journal(Protocol):
    """Where an engine records the steps of one sitting, so that it can be repeated."""

    async def step(self, step: Step) -> StepResult:
        """Return the recorded result of a step, or perform it and record the result."""
        ...

    async def wait(self, run: str, approval: str) -> bool:
        """Wait for an answer; False if the sitting is to end instead, and the answer begins another
        one."""
        ...


async def drive(run: str, journal: Journal) -> Ended:
    """Drive a run to its end, or until it waits for a person; returns how it ended.

    Deterministic: what happens depends only on what the journal returns. It never waits for
    anything but the journal.
    """
    turn = await _turn(journal, Turn(run, 0))
    while True:
        ended, detail = turn.ended, turn.detail
        for call_id, name in turn.calls:
            ended, detail = await _make(journal, Call(run, call_id, name))
            if ended is not None:
                break
        if ended is not None:
            finished = cast("FinishResult", await journal.step(Finish(run, ended, detail)))
            if not finished.goes_on:
                return finished.ended
        turn = await _turn(journal, Turn(run, turn.n + 1))


async def drive_whole(run: str, journal: Journal) -> Ended:
    """Perform a sitting as a single step; returns how it ended."""
    return cast("FinishResult", await journal.step(WholeRun(run))).ended


async def _turn(journal: Journal, turn: Turn) -> TurnResult:
    return cast("TurnResult", await journal.step(turn))


async def _make(journal: Journal, call: Call) -> tuple[Ended | None, str]:
    """Make a call, which may have to wait; returns how the run ended because of it, if it did."""
    while True:
        result = cast("CallResult", await journal.step(call))
        if not result.waits_for:
            return result.ended, result.detail
        if not await journal.wait(call.run, result.waits_for):
            return "waiting", call.name


class Performer(Protocol):
    """Performs the steps of a run in this process."""

    def perform(self, step: Step) -> StepResult: ...


@dataclass(slots=True)
class LocalJournal:
    """Performs every step here and now, and records nothing: the session has all of it."""

    performer: Performer
    steps: list[tuple[Step, StepResult]] = field(default_factory=list[tuple[Step, StepResult]])
    """What was performed."""

    async def step(self, step: Step) -> StepResult:
        result = self.performer.perform(step)
        self.steps.append((step, result))
        return result

    async def wait(self, run: str, approval: str) -> bool:
        return False


# As JSON


def to_json(value: Step | StepResult) -> dict[str, Any]:
    """Return a step or a result as plain JSON values, without defaults."""
    from dataclasses import MISSING, fields

    found = {each.name: getattr(value, each.name) for each in fields(value)}
    defaults = {each.name: each.default for each in fields(value) if each.default is not MISSING}
    said = {name: each for name, each in found.items() if each != defaults.get(name, MISSING)}
    return {"is": type(value).__name__, **said}


def from_json(values: Mapping[str, Any]) -> Any:
    """Return the step or the result that ``to_json`` was given."""
    fields = dict(values)
    kind = _KINDS[fields.pop("is")]
    if "calls" in fields:
        fields["calls"] = tuple((call_id, name) for call_id, name in fields["calls"])
    return kind(**fields)


_KINDS: Mapping[str, type[Any]] = {
    each.__name__: each
    for each in (Turn, Call, Finish, WholeRun, TurnResult, CallResult, FinishResult)
}
