"""Feedback: text added to a tool's result when a trigger fires.

A provider has a trigger, which says when, and a method that returns the text. The counts, and when
each provider last gave feedback, are in a LOG slice: a failed call stays counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from rpds import HashTrieMap

from weakincentives.core.logs import get_logger
from weakincentives.core.text import counted
from weakincentives.session.slices import Slice, SlicePolicy, slice_policy

if TYPE_CHECKING:
    from weakincentives.prompt.context import ToolContext
    from weakincentives.session.events import ToolInvoked
    from weakincentives.tool_result import ToolResult

R = TypeVar("R")

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Feedback:
    """A text for the model."""

    text: str

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("feedback needs a text; return None to say nothing")


class FeedbackProvider(Protocol):
    """Gives feedback to the model when its trigger fires; None for no feedback."""

    @property
    def name(self) -> str:
        """Its key in the ``FeedbackState``: unique among the providers of a run."""
        ...

    @property
    def trigger(self) -> FeedbackTrigger: ...

    def feedback(self, context: ToolContext) -> Feedback | str | None: ...


# When


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackMoment:
    """What a trigger decides on."""

    calls_since: int
    """Since the provider's last feedback; at first, all calls."""
    seconds_since: float
    """Since the provider's last feedback; at first, since the first call began."""
    failed_in_a_row: int
    """The newest calls that failed, refusals included; 0 after a success."""
    seconds_left: float | None = None
    """Until the deadline; None without one."""
    has_spoken: bool = False


class _Positive:
    """Checks that the numbers in its fields are positive."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(cast("Any", self)):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:  # nor is NaN
                raise ValueError(f"{field.name} must be positive, got {value}")


class FeedbackTrigger(Protocol):
    """Decides whether a provider is asked now."""

    def fires(self, moment: FeedbackMoment) -> bool: ...


@dataclass(frozen=True, slots=True)
class EveryCalls(_Positive):
    """Fires after ``n`` calls since the provider's last feedback."""

    n: int

    def fires(self, moment: FeedbackMoment) -> bool:
        return moment.calls_since >= self.n


@dataclass(frozen=True, slots=True)
class After(_Positive):
    """Fires when ``seconds`` have passed since the provider's last feedback."""

    seconds: float

    def fires(self, moment: FeedbackMoment) -> bool:
        return moment.seconds_since >= self.seconds


@dataclass(frozen=True, slots=True)
class DeadlineNear(_Positive):
    """Fires once when at most ``seconds`` are left."""

    seconds: float

    def fires(self, moment: FeedbackMoment) -> bool:
        left = moment.seconds_left
        if left is None or left > self.seconds:
            return False
        # Counted back from this deadline, not remembered: the next run has another one.
        left_at_last_feedback = left + moment.seconds_since
        return not moment.has_spoken or left_at_last_feedback > self.seconds


@dataclass(frozen=True, slots=True)
class NoProgress(_Positive):
    """Fires when ``calls`` calls in a row have failed, and again after as many more."""

    calls: int

    def fires(self, moment: FeedbackMoment) -> bool:
        return min(moment.failed_in_a_row, moment.calls_since) >= self.calls


# State


@dataclass(frozen=True, slots=True)
class Spoken:
    """When a provider last gave feedback: after how many calls, and at what time."""

    calls: int
    time: float


_NOBODY: HashTrieMap[str, Spoken] = HashTrieMap()


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackState:
    """The counts that triggers use. A LOG slice with one value."""

    calls: int = 0
    failed_in_a_row: int = 0
    started: float = 0.0
    """When the first call began, in unix seconds."""
    seen: int = 0
    """How many of the session's records are counted."""
    spoken: Mapping[str, Spoken] = _NOBODY
    """By the name of the provider."""

    def counting(self, records: Slice[ToolInvoked], now: float) -> FeedbackState:
        """Return the state with the new records counted."""
        new = max(0, len(records) - self.seen)
        newest = list(islice(records.newest_first(), new))
        failures = sum(1 for _ in takewhile(lambda record: not record.success, newest))
        started = self.started
        if not self.calls:
            started = newest[-1].timestamp if newest else now
        return replace(
            self,
            calls=self.calls + new,
            failed_in_a_row=failures + (self.failed_in_a_row if failures == new else 0),
            started=started,
            seen=len(records),
        )

    def moment(self, name: str, now: float, seconds_left: float | None) -> FeedbackMoment:
        """Return what the trigger of the provider of that name decides on."""
        last = self.spoken.get(name)
        return FeedbackMoment(
            calls_since=self.calls - (last.calls if last else 0),
            seconds_since=now - (last.time if last else self.started),
            failed_in_a_row=self.failed_in_a_row,
            seconds_left=seconds_left,
            has_spoken=last is not None,
        )


# Collecting


def collect_feedback(
    providers: Sequence[FeedbackProvider], *, context: ToolContext
) -> tuple[Feedback, ...]:
    """Return the feedback of the providers, in their order. Call it after every tool call.

    A provider that returns None is asked again after the next call; one that raises is logged, and
    the others are still asked.
    """
    from weakincentives.session.events import ToolInvoked

    names = [provider.name for provider in providers]
    if len(set(names)) < len(names):
        raise ValueError(f"feedback providers must have different names, got {sorted(names)}")
    session = context.session
    records, now = session.read_slice(ToolInvoked), session.clock.time()
    session[FeedbackState].update(
        lambda current: current.replace(_latest(current).counting(records, now))
    )
    state = _latest(session.read_slice(FeedbackState))
    left = None if context.deadline is None else context.deadline.remaining()
    said: dict[str, Feedback] = {}
    for name, provider in zip(names, providers, strict=True):
        try:
            if provider.trigger.fires(state.moment(name, now, left)):
                feedback = _as_feedback(provider.feedback(context))
                if feedback is not None:
                    said[name] = feedback
        except Exception:
            # Feedback is advice: a broken provider must not cost the model its result.
            _logger.exception("feedback provider %r failed", name)
    if said:
        session[FeedbackState].update(lambda current: _noted(current, said, now))
    return tuple(said.values())


def with_feedback(result: ToolResult[R], feedback: Feedback | Iterable[Feedback]) -> ToolResult[R]:
    """Return a copy of a result with the feedback at the end of its message."""
    said = (feedback,) if isinstance(feedback, Feedback) else feedback
    parts = [result.message, *(each.text for each in said)]
    return replace(result, message="\n\n".join(part for part in parts if part))


def _latest(current: Slice[FeedbackState]) -> FeedbackState:
    return current.latest() or FeedbackState()


def _noted(current: Slice[FeedbackState], names: Iterable[str], now: float) -> Slice[FeedbackState]:
    state = _latest(current)
    spoken = cast("HashTrieMap[str, Spoken]", state.spoken)
    for name in names:
        spoken = spoken.insert(name, Spoken(state.calls, now))
    return current.replace(replace(state, spoken=spoken))


def _as_feedback(answer: object) -> Feedback | None:
    if answer is None or isinstance(answer, Feedback):
        return answer
    if isinstance(answer, str):
        return Feedback(answer)
    raise TypeError(f"feedback must be a Feedback, a string or None, got {answer!r}")


# Built-in providers


@dataclass(frozen=True, slots=True)
class DeadlineFeedback(_Positive):
    """Says how much time is left, once that is at most ``seconds``."""

    seconds: float = 60.0
    name: str = "deadline"

    @property
    def trigger(self) -> DeadlineNear:
        return DeadlineNear(self.seconds)

    def feedback(self, context: ToolContext) -> str | None:
        if context.deadline is None:
            return None
        left = int(context.deadline.remaining())
        return (
            f"{counted(left, 'second')} left until the deadline. "
            "Finish what matters most and give your answer."
        )


@dataclass(frozen=True, slots=True)
class CallCountFeedback(_Positive):
    """Says how many calls there were, every ``n`` calls."""

    n: int = 10
    name: str = "call_count"

    @property
    def trigger(self) -> EveryCalls:
        return EveryCalls(self.n)

    def feedback(self, context: ToolContext) -> str | None:
        calls = _latest(context.session.read_slice(FeedbackState)).calls
        return f"{counted(calls, 'tool call')} so far. Check that you are still on course."
