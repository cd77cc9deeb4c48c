"""Waiting for a descriptor; a test run may have more of them open than ``select`` can name."""

from __future__ import annotations

import select


def is_readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read, or the end, within that time."""
    polled = select.poll()
    polled.register(descriptor, select.POLLIN)
    return bool(polled.poll(seconds * 1000))
