"""Starts `wink` in processes of its own, forked from one that has imported it already.

A new interpreter spends most of a short command on imports. A fork is as much a process: it has its
own directory, environment, descriptors, terminal and signals, and can be killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from waiting import is_readable

SERVER = Path(__file__).with_name("fork_server.py")
SETTLED_AT_START = ("PYTHON", "LANG", "LC_", "MALLOC_", "LD_")
"""How the names of variables begin that an interpreter reads before anything else."""


class Forked:
    """One process; as much of ``subprocess.Popen`` as the tests need."""

    def __init__(self, status: int) -> None:
        self._status = open(status, closefd=True)  # noqa: SIM115  # until the process has ended
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and is_readable(self._status.fileno(), 0):
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if timeout is not None and not is_readable(self._status.fileno(), timeout):
                raise subprocess.TimeoutExpired("wink", timeout)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether a fork is what a new interpreter with this environment would be."""
    return _settled(env) == SETTLED


def start(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    streams: tuple[int, int, int],
    terminal: bool = False,
) -> Forked:
    """Run `wink` with these arguments; ``terminal`` makes its input the terminal it belongs to."""
    told, status = os.pipe()
    request = {"arguments": arguments, "cwd": str(cwd), "env": dict(env), "terminal": terminal}
    socket.send_fds(_server(), [json.dumps(request).encode()], [*streams, status])
    os.close(status)
    return Forked(told)


@functools.cache
def _server() -> socket.socket:
    """Start the process that forks, and return the way to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    others = {name: value for name, value in os.environ.items() if name not in _settled(os.environ)}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), str(theirs.fileno())],
            env={**others, **SETTLED},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # first: this ends it
    return ours


def _settled(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(SETTLED_AT_START)}


SETTLED = {
    **{name: value for name, value in _settled(os.environ).items() if not name.startswith("LC_")},
    "LANG": "C.UTF-8",
}
