"""Deadlines end a run; heartbeats say that it is alive."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from weakincentives.core.clock import SYSTEM_CLOCK, FakeClock
from weakincentives.core.deadlines import Deadline, Heartbeat
from weakincentives.errors import DeadlineExceededError, PromptEvaluationError


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_000.0)


class TestDeadline:
    @pytest.mark.parametrize("delay", [30, 30.0, timedelta(seconds=30)])
    def test_it_counts_down_to_its_moment(self, clock: FakeClock, delay: float | timedelta) -> None:
        deadline = Deadline.after(delay, clock=clock)
        assert deadline.remaining() == 30.0
        deadline.check()

        clock.advance(29.5)
        assert deadline.remaining() == 0.5
        assert not deadline.expired
        deadline.check()

        clock.advance(0.5)
        assert deadline.remaining() == 0.0
        assert deadline.expired
        with pytest.raises(DeadlineExceededError):
            deadline.check()

    def test_it_says_how_late_it_is(self, clock: FakeClock) -> None:
        deadline = Deadline.after(1, clock=clock)
        clock.advance(3.25)

        assert deadline.remaining() == 0.0
        with pytest.raises(PromptEvaluationError, match=r"passed 2\.250 s ago"):
            deadline.check()

    def test_it_can_be_a_moment_in_any_time_zone(self) -> None:
        now = datetime(2030, 1, 1, 12, tzinfo=UTC)
        clock = FakeClock(now.timestamp())

        assert Deadline.at(now + timedelta(minutes=1), clock=clock).remaining() == 60.0

    @pytest.mark.parametrize("delay", [0, -1, float("nan"), timedelta(0)])
    def test_a_delay_must_lie_in_the_future(self, delay: float | timedelta) -> None:
        with pytest.raises(ValueError, match="must lie in the future"):
            Deadline.after(delay)

    def test_a_moment_must_lie_in_the_future_and_know_its_zone(self, clock: FakeClock) -> None:
        with pytest.raises(ValueError, match="must lie in the future"):
            Deadline.at(datetime.fromtimestamp(999, UTC), clock=clock)
        with pytest.raises(ValueError, match="time zone"):
            Deadline.at(datetime(2030, 1, 1))

    def test_a_deadline_may_be_so_far_that_it_never_comes(self, clock: FakeClock) -> None:
        deadline = Deadline.after(float("inf"), clock=clock)

        assert deadline.remaining() == float("inf")
        assert not deadline.expired
        deadline.check()

    def test_it_uses_the_machine_s_clock_unless_told_otherwise(self) -> None:
        deadline = Deadline.after(1_000_000)

        assert deadline.clock is SYSTEM_CLOCK
        assert 999_000 < deadline.remaining() <= 1_000_000


class TestHeartbeat:
    def test_it_remembers_the_last_sign_of_life(self, clock: FakeClock) -> None:
        heartbeat = Heartbeat(clock=clock)
        clock.advance(5)
        assert heartbeat.silence() == 5.0

        heartbeat.beat()
        clock.advance(2)

        assert heartbeat.silence() == 2.0
        assert heartbeat.beats == 1
        assert heartbeat.last == 1_005.0

    def test_each_beat_is_passed_on(self, clock: FakeClock) -> None:
        extended: list[float] = []
        heartbeat = Heartbeat(clock, on_beat=lambda: extended.append(clock.time()))

        heartbeat.beat()
        clock.advance(1)
        heartbeat.beat()

        assert extended == [1_000.0, 1_001.0]
