"""A terminal for tests: a program runs in it, and what a person would see can be asked for."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import pyte
from forked import Forked, can_fork
from forked import start as start_forked

from waiting import is_readable
from weakincentives.core.clock import SYSTEM_CLOCK

WINK = (sys.executable, "-m", "weakincentives.cli")

# Makes the terminal that of the program: Ctrl-C reaches nobody else.
_WITH_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """Runs a program in a pseudo-terminal until the end of the ``with`` block."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        columns: int = 100,
        rows: int = 30,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=5000, ratio=1)
        self.raw = b""
        """All that the program wrote."""
        self._stream = pyte.ByteStream(self.screen)
        self._changed = threading.Condition()
        self._is_open = True
        self._master, slave = pty.openpty()
        self.screen.write_process_input = self.send  # answers, such as where the cursor is
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = _process(argv, slave, cwd, environment(env))
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(timeout=120)
        os.close(self._master)

    @property
    def text(self) -> str:
        """What is on the screen, and what has scrolled off it."""
        with self._changed:
            above = [_line(row, self.screen.columns) for row in self.screen.history.top]
            return "\n".join([*above, *(line.rstrip() for line in self.screen.display)]).rstrip()

    def wait_for(self, wanted: str, timeout: float = 240, *, times: int = 1) -> str:
        """Return the text once something stands in it; that it does not come is a failure."""
        with self._changed:  # held until the text is read: what is live is drawn anew all the time
            self._changed.wait_for(
                lambda: self.text.count(wanted) >= times or not self._is_open, timeout=timeout
            )
            seen = self.text
        assert seen.count(wanted) >= times, f"{wanted!r} did not come; on the screen is:\n{seen}"
        return seen

    def type(self, keys: str, timeout: float = 240) -> None:
        """Type at a prompt, once it is there: before it, the system or the live view takes it.

        Only a prompt reads Ctrl-C itself; a live view turns off no more than echo and line editing.
        """
        until = SYSTEM_CLOCK.monotonic() + timeout
        while termios.tcgetattr(self._master)[3] & termios.ISIG:
            assert SYSTEM_CLOCK.monotonic() < until, f"there is no prompt:\n{self.text}"
            time.sleep(0.01)
        self.send(keys)

    def send(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.send("\x03")

    def hang_up(self) -> None:
        """Close the terminal, as a window is closed."""
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, self._master)
        os.close(nowhere)

    def end(self, timeout: float = 240) -> int:
        """Return the exit code once the program has ended, and all that it wrote is shown."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it goes on; on the screen is:\n{self.text}") from error
        self._reader.join(timeout)
        return code

    def _read(self) -> None:
        while True:
            # A terminal that somebody waits to read from stays open, also when it is hung up.
            if not is_readable(self._master, 0.1):
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:  # nobody has the other end any more
                data = b""
            with self._changed:
                if data:
                    self.raw += data
                    self._stream.feed(data)
                else:
                    self._is_open = False
                self._changed.notify_all()
            if not data:
                return


def wink(
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `wink` without a terminal and return what it wrote."""
    around = environment(env)
    if not can_fork(around):
        return subprocess.run(
            [*WINK, *arguments],
            cwd=cwd,
            env=around,
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )
    assert len(stdin.encode()) < 65536, "more than a pipe holds"
    source, target = os.pipe()
    with open(target, "w", encoding="utf-8") as given:
        given.write(stdin)
    with (
        open(source) as given,
        TemporaryFile("w+", encoding="utf-8") as out,
        TemporaryFile("w+", encoding="utf-8") as err,
    ):
        streams = given.fileno(), out.fileno(), err.fileno()
        process = start_forked(arguments, cwd=cwd, env=around, streams=streams)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([*WINK, *arguments], code, out.read(), err.read())


def _process(
    argv: Sequence[str], terminal: int, cwd: Path, env: Mapping[str, str]
) -> Forked | subprocess.Popen[bytes]:
    """Run a program with a terminal of its own."""
    streams = terminal, terminal, terminal
    if tuple(argv[: len(WINK)]) == WINK and can_fork(env):
        arguments = argv[len(WINK) :]
        return start_forked(arguments, cwd=cwd, env=env, streams=streams, terminal=True)
    return subprocess.Popen(
        [sys.executable, "-IS", "-c", _WITH_TERMINAL, *argv],
        cwd=cwd,
        env=env,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a program of a person's finds around it, without keys and settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WINK_", "OPENAI_", "ANTHROPIC_", "CLAUDE_", "LC_", "PYTEST_"))
        and name not in ("COLUMNS", "LINES")  # the terminal's own size counts
    }
    kept |= {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
    kept["WINK_HOOK_IDLE"] = "0"  # no process stays behind
    return {**kept, **(more or {})}


def _line(row: Mapping[int, pyte.screens.Char], columns: int) -> str:
    return "".join(row[column].data for column in range(columns)).rstrip()
