"""Feedback is added to a tool's answer when its trigger fires; calls go through the pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.core.deadlines import Deadline
from weakincentives.prompt import ToolContext, ToolResult, tool
from weakincentives.prompt.feedback import (
    After,
    CallCountFeedback,
    DeadlineFeedback,
    DeadlineNear,
    EveryCalls,
    Feedback,
    FeedbackMoment,
    FeedbackState,
    FeedbackTrigger,
    NoProgress,
    collect_feedback,
    with_feedback,
)
from weakincentives.runtime import Session, Snapshot, ToolInvoked
from weakincentives.testing import FakeClock, make_context


@dataclass(frozen=True)
class Says:
    """A provider for tests: says its name, or what it is told to."""

    trigger: FeedbackTrigger
    name: str = "says"
    answer: Callable[[ToolContext], Any] | None = None

    def feedback(self, context: ToolContext) -> Feedback | str | None:
        return self.name if self.answer is None else self.answer(context)


@tool
def step(fail: bool = False) -> str:
    """Do a step."""
    if fail:
        raise ValueError("It failed")
    return "done"


@dataclass
class Run:
    """A loop in small: call, then collect."""

    providers: Sequence[Any]
    clock: FakeClock = field(default_factory=FakeClock)
    deadline: Deadline | None = None
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.session = Session(clock=self.clock)

    @property
    def context(self) -> ToolContext:
        return make_context(session=self.session, deadline=self.deadline)

    def call(self, *, fail: bool = False, takes: float = 0.0) -> list[str]:
        step(fail=fail, context=make_context(session=self.session))
        self.clock.advance(takes)
        return self.collect()

    def collect(self) -> list[str]:
        return [each.text for each in collect_feedback(self.providers, context=self.context)]


def test_every_calls_fires_at_each_nth_call():
    run = Run([Says(EveryCalls(3))])

    assert [bool(run.call()) for _ in range(9)] == [False, False, True] * 3


def test_failed_calls_count_as_calls():
    run = Run([Says(EveryCalls(2))])

    assert [bool(run.call(fail=True)) for _ in range(4)] == [False, True, False, True]


def test_calls_of_one_turn_are_counted_when_feedback_is_collected_once():
    run = Run([Says(EveryCalls(3)), Says(NoProgress(3), "stuck")])
    for fail in (False, True, True, True):
        step(fail=fail, context=run.context)

    assert run.collect() == ["says", "stuck"]
    assert run.collect() == []


def test_after_fires_when_the_time_since_it_last_spoke_has_passed():
    run = Run([Says(After(10))])

    spoke = [bool(run.call(takes=4)) for _ in range(7)]

    assert spoke == [False, False, True, False, False, True, False]


def test_after_counts_the_time_of_the_first_call():
    assert Run([Says(After(10))]).call(takes=10) == ["says"]


def test_deadline_near_fires_once():
    clock = FakeClock()
    run = Run([Says(DeadlineNear(30))], clock, Deadline.after(60, clock=clock))

    spoke = [bool(run.call(takes=10)) for _ in range(5)]

    assert spoke == [False, False, True, False, False]


def test_deadline_near_fires_again_for_the_deadline_of_another_run():
    clock = FakeClock()
    run = Run([Says(DeadlineNear(30))], clock, Deadline.after(20, clock=clock))
    assert run.call() == ["says"]
    clock.advance(5)

    run.deadline = Deadline.after(60, clock=clock)

    assert [bool(run.call(takes=20)) for _ in range(3)] == [False, True, False]


def test_deadline_near_needs_a_deadline():
    assert Run([Says(DeadlineNear(30)), DeadlineFeedback()]).call() == []


def test_no_progress_fires_when_calls_fail_in_a_row_and_again_after_as_many():
    run = Run([Says(NoProgress(2))])
    outcomes = [True, False, True, True, True, True, False, True]

    spoke = [bool(run.call(fail=fail)) for fail in outcomes]

    assert spoke == [False, False, False, True, False, True, False, False]


def test_a_success_ends_the_row():
    run = Run([Says(NoProgress(3))])

    for fail in (True, True, False, True, True):
        assert run.call(fail=fail) == []
    assert run.session[FeedbackState].all()[-1].failed_in_a_row == 2


def test_providers_speak_in_their_order_and_each_for_itself():
    run = Run([Says(EveryCalls(2), "b"), Says(EveryCalls(1), "a")])

    assert [run.call() for _ in range(3)] == [["a"], ["b", "a"], ["a"]]


def test_a_provider_with_nothing_to_say_is_asked_again_after_the_next_call():
    answers: list[str | None] = [None, "now", "too early"]
    run = Run([Says(EveryCalls(2), answer=lambda _: answers.pop(0))])

    assert [run.call() for _ in range(4)] == [[], [], ["now"], []]


def test_a_provider_may_return_feedback_or_a_string():
    run = Run([Says(EveryCalls(1), answer=lambda _: Feedback("Slow down"))])

    assert run.call() == ["Slow down"]


@pytest.mark.parametrize("answer", [lambda _: 1 / 0, lambda _: 3, lambda _: " "])
def test_a_provider_that_fails_is_logged_and_the_others_are_heard(
    answer: Callable[[ToolContext], Any], caplog: pytest.LogCaptureFixture
):
    run = Run([Says(EveryCalls(1), "broken", answer), Says(EveryCalls(1))])

    with caplog.at_level(logging.ERROR):
        assert run.call() == ["says"]

    assert "feedback provider 'broken' failed" in caplog.text


def test_a_trigger_that_fails_is_logged_and_the_others_are_heard(
    caplog: pytest.LogCaptureFixture,
):
    class Broken:
        def fires(self, moment: FeedbackMoment) -> bool:
            raise RuntimeError("no idea")

    assert Run([Says(Broken(), "broken"), Says(EveryCalls(1))]).call() == ["says"]
    assert "no idea" in caplog.text


def test_two_providers_of_one_name_are_refused():
    with pytest.raises(ValueError, match="different names"):
        Run([CallCountFeedback(2), CallCountFeedback(3)]).call()


def test_what_is_remembered_survives_a_rollback():
    run = Run([Says(EveryCalls(2))])
    before = run.session.snapshot()
    assert run.call() == []

    run.session.restore(before)

    assert run.call() == ["says"]


def test_what_is_remembered_survives_another_process():
    run = Run([Says(EveryCalls(2)), Says(EveryCalls(1), "each")])
    run.call()
    text = run.session.snapshot().to_json()

    again = Run(run.providers, run.clock)
    snapshot = Snapshot.from_json(text, types=[FeedbackState, ToolInvoked])
    for slice_type, values in snapshot.log.items():
        again.session[slice_type].seed(values.all())

    assert again.call() == ["says", "each"]
    assert again.call() == ["each"]


def test_there_is_one_state_however_long_the_run():
    run = Run([CallCountFeedback(3)])
    for _ in range(20):
        run.call()

    assert len(run.session[FeedbackState]) == 1


def test_the_call_count_says_how_many_calls_there_were():
    run = Run([CallCountFeedback(2)])

    assert [run.call() for _ in range(4)][1::2] == [
        ["2 tool calls so far. Check that you are still on course."],
        ["4 tool calls so far. Check that you are still on course."],
    ]
    assert Run([CallCountFeedback(1)]).call()[0].startswith("1 tool call so far")


def test_the_deadline_is_told_in_seconds():
    clock = FakeClock()
    run = Run([DeadlineFeedback(60)], clock, Deadline.after(50, clock=clock))

    assert run.call(takes=8.5) == [
        "41 seconds left until the deadline. Finish what matters most and give your answer."
    ]


def test_feedback_is_appended_to_a_copy_of_the_result():
    result = ToolResult.ok({"lines": 3}, message="Read a.txt")

    told = with_feedback(result, [Feedback("Slow down."), Feedback("Ten left.")])

    assert told.render() == 'Read a.txt\n\nSlow down.\n\nTen left.\n{"lines": 3}'
    assert result.message == "Read a.txt"
    assert with_feedback(result, Feedback("Stop.")).message == "Read a.txt\n\nStop."
    assert with_feedback(ToolResult.ok(), [Feedback("Stop.")]).message == "Stop."
    assert with_feedback(result, []) == result


def test_a_failed_result_stays_failed():
    told = with_feedback(ToolResult.error("No such file"), [Feedback("List the files first.")])

    assert not told.success
    assert told.failure is not None
    assert told.failure.message == "No such file"


@pytest.mark.parametrize(
    "make",
    [
        lambda: EveryCalls(0),
        lambda: After(-1),
        lambda: DeadlineNear(float("nan")),
        lambda: NoProgress(0),
        lambda: CallCountFeedback(0),
        lambda: DeadlineFeedback(0),
    ],
)
def test_limits_must_be_positive(make: Callable[[], object]):
    with pytest.raises(ValueError, match="must be positive"):
        make()


def test_feedback_needs_a_text():
    with pytest.raises(ValueError, match="needs a text"):
        Feedback("  ")


@given(st.lists(st.lists(st.booleans(), max_size=4)))
def test_counts_equal_those_of_the_whole_history(turns: list[list[bool]]):
    run = Run([])
    for turn in turns:
        for fail in turn:
            step(fail=fail, context=run.context)
        run.collect()

    outcomes = [record.success for record in run.session[ToolInvoked].all()]
    state = run.session[FeedbackState].latest() or FeedbackState()
    in_a_row = outcomes[::-1].index(True) if True in outcomes else len(outcomes)
    assert (state.calls, state.failed_in_a_row) == (len(outcomes), in_a_row)
