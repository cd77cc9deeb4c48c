"""The garbage collector, paused while many objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def no_collection() -> Generator[None]:
    """Collect no garbage meanwhile: looking for it would take twice as long as all the rest."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
