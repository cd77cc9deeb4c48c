"""Signals take effect at once, whatever the main thread waits for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

_AGAIN = 0.05
"""Seconds until the main thread is interrupted again."""


@contextmanager
def handled_at_once() -> Generator[None]:
    """Run the handlers of signals without delay in the block.

    Python runs them in the main thread, between two instructions. A signal that arrives just before
    a system call blocks, or in another thread, does not interrupt that call: the handler would wait
    for its end, which may be hours away. So a thread hears of every signal, and interrupts the main
    thread until handlers have run.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "pthread_kill"):  # Windows
        yield
        return
    main = threading.get_ident()
    nudge = signal.SIGURG  # ignored by default, so one that comes late is harmless
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    runs, is_over = 0, False

    def ran(number: int, frame: object) -> None:
        nonlocal runs
        runs += 1

    def watch() -> None:
        pause = threading.Event()
        while numbers := os.read(reading, 512):
            if set(numbers) == {nudge}:
                continue
            # Twice: the first time, handlers may have been running already.
            for _ in range(2):
                before = runs
                while runs == before and not is_over:
                    signal.pthread_kill(main, nudge)
                    pause.wait(_AGAIN)
        os.close(reading)

    handler = signal.signal(nudge, ran)
    threading.Thread(target=watch, name="wink signals", daemon=True).start()
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        is_over = True
        signal.set_wakeup_fd(outer)
        signal.signal(nudge, handler)
        os.close(writing)
