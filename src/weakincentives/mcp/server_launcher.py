"""A program that starts an MCP server and ends all of it when whoever asked for it is gone.

Handed over as text, with the number of the process that asks and the command. The server's input
and output are its own: nothing goes through here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
NOT_STARTED = 127


def main(parent: int, command: list[str]) -> int:
    """Run a command as long as the process ``parent`` lives; returns its exit code."""

    def look(*_: object) -> None:
        # From whom asked for it when it ends the server: that has got the signal, too. From the
        # system when whoever asked is gone: then the whole group has to go.
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, look)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    look()
    try:
        child = os.posix_spawnp(
            command[0], command, os.environ, setsigdef=[signal.SIGTERM, signal.SIGPIPE]
        )
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        return NOT_STARTED
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the server's alone: its end is the end of what it says
        os.dup2(nothing, stream)
    _, status = os.waitpid(child, 0)
    end_the_others()
    return os.waitstatus_to_exitcode(status)


def end_the_others() -> None:
    """End what the server has started and left behind."""
    while left := living_in(os.getpgrp()) - {os.getpid()}:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def living_in(group: int) -> set[int]:
    """Return the processes of a group, where the system says which these are."""
    if not os.path.isdir("/proc"):
        return set()
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return {pid for pid in pids if group_of(pid) == group}


def group_of(pid: int) -> int:
    """Return the group of a process; 0 once there is none, or nothing but its exit code is."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as about:
            state, _, group = about.read().rpartition(b")")[2].split()[:3]
    except OSError:
        return 0
    return 0 if state in b"ZX" else int(group)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), sys.argv[2:])
    sys.exit(128 - code if code < 0 else code)
