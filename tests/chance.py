"""The tests' random choices: the same in each `make test`, others in each `make torture`."""

from __future__ import annotations

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
HAS_LIMIT = bool(os.environ.get("WINK_UNTIL"))
"""Whether it is to end in time: `make torture SECONDS=…`."""


def dice(*about: object) -> random.Random:
    """Return a generator that gives the same numbers whenever the seed and these are the same."""
    return random.Random(repr((SEED, *about)))


def is_time_left() -> bool:
    """Whether it may go on."""
    return not HAS_LIMIT or time.time() < float(os.environ["WINK_UNTIL"])
