"""Kills and errors injected below Python: at a program's system calls, those of SQLite included.

Patching ``os`` never reaches what a C library does. ``strace`` does, at one system call at a time.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest

MODIFYING = (
    *("write", "pwrite64", "writev", "pwritev", "copy_file_range"),
    *("ftruncate", "truncate", "fallocate", "fsync", "fdatasync", "openat"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
    *("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
    *("chmod", "fchmod", "fchmodat", "fchown", "fchownat", "utimensat", "fsetxattr"),
)
"""System calls that change a disk; ``openat`` creates files."""


class Injection(NamedTuple):
    """What happens at one system call of a program."""

    call: str
    number: int
    """Which of the calls of this name; the first is 1."""
    what: str
    """``signal=KILL`` or ``error=ENOSPC``."""


def needs_strace() -> None:
    """Skip the test where no program can be traced."""
    program = shutil.which("strace")
    if program is None:
        pytest.skip("needs strace")
    tried = subprocess.run([program, "-qq", "-o", "/dev/null", "true"], capture_output=True)
    if tried.returncode:
        pytest.skip(f"strace does not work here: {tried.stderr.decode().strip()}")


def run(program: Sequence[str | Path], injection: Injection | None = None) -> int:
    """Run a Python program to its end, or until the injected kill; returns its exit code."""
    return _traced(program, injection)[0]


def injections(program: Sequence[str | Path], *what: str, code: int = 0) -> list[Injection]:
    """Return injections for each modifying system call of a program that ends with a code."""
    ended, trace = _traced(program, None)
    assert ended == code
    return [Injection(*call, each) for call in sorted(_modifying_calls(trace)) for each in what]


processes = multiprocessing.get_context("forkserver")
"""Starts children that have everything imported already: a fault then costs milliseconds."""


def run_forked(
    target: Callable[..., int], *args: object, injection: Injection | None = None
) -> tuple[int, list[Injection]]:
    """Run a function in a child; returns its exit code, and the modifying calls that it made.

    The child ends with what the function returns, or by the injected kill.
    """
    ours, its = processes.Pipe()
    child = processes.Process(target=_held, args=(its, target, args))
    child.start()
    its.close()
    assert ours.recv() == "ready"
    with tempfile.NamedTemporaryFile() as log:
        command = [*_strace(log.name, injection), "-p", str(child.pid)]
        # Without -q it tells when it has attached; what it says later is not read.
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            try:
                assert strace.stderr is not None
                told = strace.stderr.readline()
                assert "attached" in told, told
                ours.send("go")
                child.join()
            finally:
                child.kill()
                strace.terminate()  # programs that the child has left are no longer traced
        code = child.exitcode
        assert code is not None
        child.close()
        ours.close()
        trace = Path(log.name).read_text(errors="replace").splitlines()
    return code, [Injection(*each, "") for each in sorted(_modifying_calls(trace))]


_SET_TRACER, _ANYONE = 0x59616D61, 2**64 - 1


def _held(starter: Connection, target: Callable[..., int], args: Sequence[object]) -> None:
    """Wait until faults can be injected: not into the start of the process."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # each fault is told there
    # Where only parents may trace: strace is none of ours.
    ctypes.CDLL(None).prctl(_SET_TRACER, ctypes.c_ulong(_ANYONE))
    starter.send("ready")
    starter.recv()
    os._exit(target(*args))  # what the interpreter does at its end is not under test


def _strace(log: str, injection: Injection | None) -> list[str]:
    command = ["strace", "-f", "-o", log, "-e", f"trace={','.join(MODIFYING)}"]
    if injection is not None:
        call, number, what = injection
        command += ["-e", f"inject={call}:{what}:when={number}"]
    return command


def _traced(program: Sequence[str | Path], injection: Injection | None) -> tuple[int, list[str]]:
    with tempfile.NamedTemporaryFile() as log:
        command = [*_strace(log.name, injection), "-qq", sys.executable, *program]
        ran = subprocess.run(command, capture_output=True, check=False)
        return ran.returncode, Path(log.name).read_text(errors="replace").splitlines()


_CALL = re.compile(r"^(\d+) +(\w+)\(")


def _modifying_calls(trace: Sequence[str]) -> set[tuple[str, int]]:
    """Return the modifying calls in a trace, by name and number among those of a thread."""
    made: Counter[tuple[str, str]] = Counter()
    found: set[tuple[str, int]] = set()
    for line in trace:
        call = _CALL.match(line)
        if call is None:
            continue
        thread, name = call[1], call[2]
        made[thread, name] += 1
        if name != "openat" or "O_CREAT" in line:
            found.add((name, made[thread, name]))
    return found
