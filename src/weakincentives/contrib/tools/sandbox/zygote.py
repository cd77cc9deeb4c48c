"""Zygotes: programs of ours that wait for commands, so that starting one is cheap.

A zygote (``launcher.py``) has started Python and has joined a cgroup with the limits of a command,
which together takes longer than everything else. It runs one command at a time, and is used again
if that has ended by itself. It exits when we close its socket or die, or after ten idle minutes.
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import signal
import socket
import struct
import subprocess
import weakref
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import IO

from weakincentives.contrib.tools.sandbox import byte_code
from weakincentives.contrib.tools.sandbox.limits import CgroupEvents, Refusal, SandboxLimits, cgroup
from weakincentives.errors import SandboxUnavailable
from weakincentives.state import program, source_of

LAUNCHER = source_of(__file__, "launcher.py")

PATIENCE = 60.0
"""Seconds in which a zygote must be ready."""

IDLE = 4
"""How many zygotes wait at most; each takes a few megabytes."""


class Zygote:
    """A program that waits for a command."""

    def __init__(self, limits: SandboxLimits, env: Mapping[str, str]) -> None:
        self._owner = os.getpid()
        with contextlib.ExitStack() as at_end:
            self.cgroup_files = at_end.enter_context(cgroup(limits))
            self.socket, its = socket.socketpair()
            at_end.callback(self.socket.close)
            with its:
                popen = subprocess.Popen(
                    program(byte_code(LAUNCHER), *self.cgroup_files),
                    cwd="/",
                    env=env,
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            assert popen.stderr is not None
            at_end.enter_context(popen.stderr)
            at_end.callback(popen.wait)
            at_end.callback(popen.kill)
            self.socket.settimeout(PATIENCE)
            if not self.socket.recv(16):
                said = popen.stderr.read().decode(errors="replace").strip()
                raise SandboxUnavailable(f"its launcher ended: {said.rpartition(os.linesep)[2]}")
            self.socket.settimeout(None)
            self.events = CgroupEvents(self.cgroup_files)
            self._at_end = at_end.pop_all()
        _alive.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, not one that has forked this process."""
        return self._owner == os.getpid()

    def start(self, plan: bytes, descriptors: Sequence[int]) -> int:
        """Start the command of a plan; return its process, or raise OSError."""
        socket.send_fds(self.socket, [struct.pack("=I", len(plan))], descriptors)
        self.socket.sendall(plan)
        return self.number()

    def number(self, flags: int = 0) -> int:
        """Return the next number that it sends."""
        data = self.socket.recv(4, flags)
        if len(data) < 4:
            raise BrokenPipeError(errno.EPIPE, "the launcher of commands has ended")
        return int(struct.unpack("=i", data)[0])

    def close(self) -> None:
        """End it, and remove its cgroup."""
        if self.is_ours:
            self._at_end.close()


_alive: weakref.WeakSet[Zygote] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for zygote in tuple(_alive):
        zygote.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class Zygotes:
    """Starts commands with the same limits."""

    def __init__(self, limits: SandboxLimits, env: Mapping[str, str]) -> None:
        self._limits = limits
        self._env = env
        self._idle: list[Zygote] = []
        weakref.finalize(self, _close_all, self._idle)

    def start(
        self, plan: Mapping[str, object], stdin: bytes, inherited: Sequence[int] = ()
    ) -> Launched:
        """Start the command of a plan: see ``main`` in ``launcher.py``."""
        data = marshal.dumps({**plan, "umask": _umask()})
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as passed:
            streams: list[IO[bytes]] = []
            descriptors = [_file_of(stdin)]
            passed.callback(os.close, descriptors[0])
            for _ in ("stdout", "stderr"):
                reading, writing = os.pipe()
                passed.callback(os.close, writing)
                descriptors.append(writing)
                streams.append(on_error.enter_context(open(reading, "rb", buffering=0)))
            zygote, pid = self._started(data, [*descriptors, *inherited])
            on_error.pop_all()
            return Launched(self, zygote, pid, *streams)

    def _started(self, plan: bytes, descriptors: Sequence[int]) -> tuple[Zygote, int]:
        while True:
            waiting = self._waiting()
            zygote = waiting or Zygote(self._limits, self._env)
            try:
                return zygote, zygote.start(plan, descriptors)
            except BaseException as error:
                zygote.close()
                if waiting is None or not isinstance(error, OSError):
                    raise  # else it was killed while it waited: nothing has run

    def _waiting(self) -> Zygote | None:
        with contextlib.suppress(IndexError):
            while not (zygote := self._idle.pop()).is_ours:
                pass
            return zygote
        return None

    def take_back(self, zygote: Zygote) -> None:
        """Keep a zygote for the next command."""
        if len(self._idle) < IDLE:
            self._idle.append(zygote)
        else:
            zygote.close()


def _close_all(idle: list[Zygote]) -> None:
    while idle:
        idle.pop().close()


class Launched:
    """A command that a zygote runs."""

    def __init__(
        self, zygotes: Zygotes, zygote: Zygote, pid: int, stdout: IO[bytes], stderr: IO[bytes]
    ) -> None:
        self._zygotes = zygotes
        self._zygote: Zygote | None = zygote
        self._killed = False
        self.pid = pid
        self.streams = stdout, stderr
        self.returncode: int | None = None
        self.refused: set[Refusal] = set()
        """What the kernel has refused to it, once it has ended."""

    @contextlib.contextmanager
    def exited(self) -> Generator[int]:
        """Give a descriptor that becomes readable when the command has ended."""
        assert self._zygote is not None
        yield self._zygote.socket.fileno()

    def poll(self) -> int | None:
        """Return the exit code if nothing is left of the command."""
        with contextlib.suppress(BlockingIOError):
            self._wait(socket.MSG_DONTWAIT)
        return self.returncode

    def _wait(self, flags: int = 0) -> None:
        if self.returncode is None and self._zygote is not None:
            try:
                self.returncode = self._zygote.number(flags)
            except BlockingIOError:
                raise
            except OSError:  # somebody has killed the zygote, and so the command
                self._killed, self.returncode = True, 128 + signal.SIGKILL

    def kill(self) -> None:
        """Kill the command and everything that it started."""
        if self.returncode is None and self._zygote is not None:
            self._killed = True
            with contextlib.suppress(OSError):
                self._zygote.socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Kill it, and wait until nothing of it is left."""
        self.kill()
        self._wait()
        for stream in self.streams:
            stream.close()
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            self.refused = zygote.events.new()
            if self._killed:
                zygote.close()
            else:
                self._zygotes.take_back(zygote)


def _file_of(data: bytes) -> int:
    """Return an unnamed file with that content, open for reading."""
    fd = os.memfd_create("stdin")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def _umask() -> int:
    """Return the umask of this process; asking for it in another way would change it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
