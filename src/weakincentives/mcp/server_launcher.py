"""A program that runs an MCP server, and kills its process group when the parent is gone.

It is passed to Python as text, with the id of the parent and the command. The server's input and
output do not go through here.
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
    """Run a command as long as the process ``parent`` lives; return its exit code."""

    def look(*_: object) -> None:
        # A SIGTERM from the parent goes to the server, too. One from the kernel means that the
        # parent is gone.
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
    for stream in range(3):  # only the server holds its streams open
        os.dup2(nothing, stream)
    _, status = os.waitpid(child, 0)
    end_the_others()
    return os.waitstatus_to_exitcode(status)


def end_the_others() -> None:
    """Kill what the server has started and left running."""
    while left := living_in(os.getpgrp()) - {os.getpid()}:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def living_in(group: int) -> set[int]:
    """Return the processes of a group; none where there is no /proc."""
    if not os.path.isdir("/proc"):
        return set()
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return {pid for pid in pids if group_of(pid) == group}


def group_of(pid: int) -> int:
    """Return the group of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as about:
            state, _, group = about.read().rpartition(b")")[2].split()[:3]
    except OSError:
        return 0
    return 0 if state in b"ZX" else int(group)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), sys.argv[2:])
    sys.exit(128 - code if code < 0 else code)
