"""Signals: they take effect at once, and the first one stops a run at a clean point."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from weakincentives.core.clock import SYSTEM_CLOCK

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


# Stopping


@dataclass(slots=True)
class Stop:
    """Which signal stopped the run, and when."""

    by: int = signal.SIGINT
    at: float | None = None
    is_over: bool = False
    """The run has ended: closing and showing its result must not be interrupted."""

    @property
    def exit_code(self) -> int:
        return 128 + self.by


@contextmanager
def stopping(patience: float) -> Generator[Stop]:
    """Let the first signal stop the run at a clean point, and the next one at once."""
    stop = Stop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def interrupt(number: int, frame: object) -> None:
        if stop.at is None:
            stop.at = SYSTEM_CLOCK.monotonic()
            if not stop.is_over:
                raise KeyboardInterrupt
        # `timeout` and `make` pass one signal on twice, within moments.
        if SYSTEM_CLOCK.monotonic() - stop.at > patience:
            _end_at_once(stop)

    def terminate(number: int, frame: object) -> None:
        if stop.at is None:
            stop.by = number
        for each in terminals:
            if not os.isatty(each):  # closed: writing to it would fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), each)
        # As SIGINT, which is held back in critical sections.
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)
    if before[signal.SIGHUP] is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, terminate)
    try:
        with handled_at_once():
            yield stop
    finally:
        for number, handler in before.items():
            if stop.at is None:
                signal.signal(number, handler)
            elif number != signal.SIGINT:
                # A repeated signal must not cut the exit short; Python removes handlers before it
                # ends, so ignore it.
                signal.signal(number, signal.SIG_IGN)


def _end_at_once(stop: Stop) -> NoReturn:
    """Exit like a kill: the next process to open the directory rolls back the current call."""
    from weakincentives.cli.view import restore_terminal

    restore_terminal()
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h")  # the cursor, which the live view hides
    os.write(2, b"\nwink: stopped at once; the next wink command rolls back the current call\n")
    os._exit(stop.exit_code)
