"""The tests' random choices: the same in each `make test`, others in each `make torture`."""

from __future__ import annotations

import functools
import os
import random
import time

SEED = int(os.environ.get("WINK_SEED") or 0)
"""The seed of all random choices; `make torture` takes a new one, and prints it."""
HEAVY = bool(os.environ.get("WINK_HEAVY"))
"""Whether this is `make test-all`, or `make torture`."""
STRIDE = 1 if HEAVY else 4
"""For tests that go through system calls one by one: `make test` tries every fourth."""
THOROUGH = bool(os.environ.get("WINK_THOROUGH"))
"""Whether this is `make torture`, which tries many more."""
LIMIT = float(os.environ.get("WINK_SECONDS") or 0)
"""After how many seconds no more tests begin: `make torture SECONDS=…`; 0 is never."""


def dice(*about: object) -> random.Random:
    """Return a generator that gives the same numbers whenever the seed and these are the same."""
    return random.Random(repr((SEED, *about)))


def is_time_left() -> bool:
    """Whether it may go on."""
    return not LIMIT or time.monotonic() < _end()


@functools.cache
def _end() -> float:
    """Return when the time is over: it begins with the first test, after all were collected."""
    return time.monotonic() + LIMIT
