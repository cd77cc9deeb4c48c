"""Time is a resource, and one module reads it."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import weakincentives
from weakincentives.core.clock import SYSTEM_CLOCK, Clock, FakeClock, SystemClock


class TestSystemClock:
    def test_it_tells_unix_time(self) -> None:
        before = time.time()
        now = SYSTEM_CLOCK.time()

        assert before <= now <= time.time()

    def test_its_monotonic_time_does_not_go_back(self) -> None:
        readings = [SystemClock().monotonic() for _ in range(100)]

        assert readings == sorted(readings)


class TestFakeClock:
    def test_it_stands_still_until_it_is_moved(self) -> None:
        clock: Clock = FakeClock(start=100.0)
        assert (clock.time(), clock.monotonic()) == (100.0, 100.0)

        assert isinstance(clock, FakeClock)
        clock.advance(2.5)
        clock.advance(0)

        assert (clock.time(), clock.monotonic()) == (102.5, 102.5)

    @pytest.mark.parametrize("seconds", [-0.1, float("nan")])
    def test_it_does_not_go_back(self, seconds: float) -> None:
        clock = FakeClock()

        with pytest.raises(ValueError, match="cannot go back"):
            clock.advance(seconds)

        assert clock.time() == FakeClock().time()

    def test_moves_from_many_threads_are_all_made(self) -> None:
        clock = FakeClock(0.0)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(clock.advance, [1.0] * 200))

        assert clock.time() == 200.0


def test_no_other_module_reads_the_time() -> None:
    """A run on a fake clock must not meet the real one anywhere."""
    package = Path(weakincentives.__file__).parent
    reads = re.compile(
        r"^\s*(import time\b|from time import)|\b(datetime|date)\.(now|utcnow|today)\(", re.M
    )

    found = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.name != "clock.py" and reads.search(path.read_text(encoding="utf-8"))
    ]

    assert found == []
