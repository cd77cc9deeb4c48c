"""Kills a process at one of its system calls: at the start of the call, or at its end.

Run as a program, it traces processes and those that they start. It prints a line once it does, and
one with what it has killed, or, when it is terminated, with the steps of each role.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Mapping
from types import FrameType

PTRACE_SYSCALL, PTRACE_GETEVENTMSG = 24, 0x4201
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_LISTEN = 0x4206, 0x4207, 0x4208
TRACE_CALLS_AND_CHILDREN = 0b1111
EVENT_STOP = 128
WALL = 0x4000_0000

CHILDREN = {
    "zygote": "armed first process",
    "armed first process": "armed process 1",
    "first process": "process 1",
    "process 1": "command",
}
"""The role of what a process in a role starts, while it is traced."""

libc = ctypes.CDLL(None, use_errno=True)


class Tracer:
    """Traces processes; one is killed at a step."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program
        self.killed: int | None = None
        """The process that was killed, once that is over."""
        self.steps: dict[str, int] = {}
        """Otherwise, how many steps the processes of each role have made."""

    @property
    def has_killed(self) -> bool:
        return self._program.poll() is not None

    def end(self) -> None:
        self._program.terminate()
        assert self._program.stdout is not None
        told = json.loads(self._program.stdout.read())
        if isinstance(told, int):
            self.killed = told
        else:
            self.steps = told


@contextlib.contextmanager
def traced(processes: Mapping[str, int], role: str = "", step: int = 0) -> Generator[Tracer]:
    """Trace processes by their roles in the block; one is killed at a step, counted from here."""
    given = [f"{pid}={name}" for name, pid in processes.items()]
    words = [sys.executable, __file__, role, str(step), *given]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        tracer = Tracer(program)
        try:
            assert program.stdout.readline() == "traced\n"
            yield tracer
        finally:
            tracer.end()


class _TerminatedError(Exception):
    pass


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _TerminatedError


def _ptrace(request: int, pid: int, data: object = None) -> None:
    if libc.ptrace(request, pid, None, data) < 0 and ctypes.get_errno() != 3:  # it has ended
        raise OSError(ctypes.get_errno(), f"ptrace {request}")


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main(role: str, step: int, *processes: str) -> None:
    roles: dict[int, str] = {}
    for pid, _, name in (each.partition("=") for each in processes):
        roles[int(pid)] = name
        _ptrace(PTRACE_SEIZE, int(pid), ctypes.c_void_p(TRACE_CALLS_AND_CHILDREN))
        _ptrace(PTRACE_INTERRUPT, int(pid))  # it may wait in a system call
    steps = Counter[int]()
    signal.signal(signal.SIGTERM, _terminate)
    _say("traced")
    try:
        while True:
            pid, status = os.waitpid(-1, WALL)
            if not os.WIFSTOPPED(status):
                continue
            event, number, given = status >> 16, os.WSTOPSIG(status), 0
            if event == EVENT_STOP and number != signal.SIGTRAP:
                _ptrace(PTRACE_LISTEN, pid)
                continue
            if event in (1, 2, 3):  # it starts another
                child = ctypes.c_ulong()
                _ptrace(PTRACE_GETEVENTMSG, pid, ctypes.byref(child))
                roles[child.value] = CHILDREN.get(roles.get(pid, ""), "")
            elif number == signal.SIGTRAP | 0x80:
                steps[pid] += 1
                if roles.get(pid) == role and steps[pid] >= step:
                    os.kill(pid, signal.SIGKILL)
                    _say(str(pid))
                    return
            elif not event:
                given = number
            _ptrace(PTRACE_SYSCALL, pid, ctypes.c_void_p(given))
    except _TerminatedError:
        most: dict[str, int] = {}
        for pid, count in steps.items():
            name = roles.get(pid, "")
            most[name] = max(count, most.get(name, 0))
        _say(json.dumps(most))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
