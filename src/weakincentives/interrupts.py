"""Ctrl-C at the wrong moment: held back while something must not be cut in two."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

__all__ = ["undisturbed"]

# What `signal` is built on, without its enums: those cost a look at the handler's repr each time.
_signal: Any = import_module("_signal")
_SIGINT: int = _signal.SIGINT


@contextmanager
def undisturbed(needed: bool = True) -> Generator[None]:
    """Hold Ctrl-C back until a step that must not be cut in two is done.

    Python raises it in the main thread only, wherever that is at the moment.
    """
    is_main = needed and threading.current_thread() is threading.main_thread()
    before: Any = _signal.getsignal(_SIGINT) if is_main else None
    if not callable(before):
        yield
        return
    came: list[tuple[int, object]] = []

    def note(number: int, frame: object) -> None:
        came.append((number, frame))

    try:
        _signal.signal(_SIGINT, note)
        yield
    finally:
        _signal.signal(_SIGINT, before)
        if came:
            before(*came[-1])
