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
import select
import signal
import socket
import struct
import subprocess
import weakref
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import IO

from weakincentives.contrib.tools.sandbox import compiled
from weakincentives.contrib.tools.sandbox.limits import (
    CgroupEvents,
    Refusal,
    SandboxLimits,
    cgroup,
    sweep_cgroups,
)
from weakincentives.core.state import program, source_of
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem.tree import mount_generation

LAUNCHER = source_of(__file__, "launcher.py")

PATIENCE = 60.0
"""Seconds in which a zygote must be ready."""

READY = b"ready"

UNMOUNTED = b"u"
"""Follows the exit code when nothing has the overlay mounted any more."""

GRACE = 5.0
"""Seconds in which a zygote must have ended once we have closed its socket."""

IDLE = 4
"""How many zygotes wait at most; each takes a few megabytes."""


class Zygote:
    """A program that waits for a command."""

    def __init__(self, limits: SandboxLimits, env: Mapping[str, str]) -> None:
        self._owner = os.getpid()
        is_root = os.geteuid() == 0
        # In a mount namespace of its own it does not see what is mounted later.
        self._generation = None if is_root else mount_generation()
        with contextlib.ExitStack() as at_end:
            self.cgroup_files = at_end.enter_context(cgroup(limits))
            self.socket, its = socket.socketpair()
            at_end.callback(self.socket.close)
            code = _file_of(compiled(LAUNCHER))
            start = f"import marshal; exec(marshal.load(open({code}, 'rb')))"
            try:
                popen = subprocess.Popen(
                    program(start, "root" if is_root else "user", *self.cgroup_files),
                    cwd="/",
                    env=env,
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=[code],
                )
            finally:
                os.close(code)
                its.close()
            assert popen.stderr is not None
            at_end.enter_context(popen.stderr)
            at_end.callback(_end, popen, self.socket)
            self.socket.settimeout(PATIENCE)
            if not self.socket.recv(len(READY)):
                said = popen.stderr.read().decode(errors="replace").strip()
                raise SandboxUnavailable(f"its launcher ended: {said.rpartition(os.linesep)[2]}")
            self.socket.settimeout(None)
            self.events = at_end.enter_context(CgroupEvents(self.cgroup_files))
            self._at_end = at_end.pop_all()
        _alive.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, not one that has forked this process."""
        return self._owner == os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether it sees what is mounted now."""
        return self._generation is None or self._generation == mount_generation()

    def start(self, static: bytes, plan: bytes, descriptors: Sequence[int]) -> int:
        """Start the command of a plan; return its process, or raise OSError."""
        head = struct.pack("=II", len(static), len(plan))
        socket.send_fds(self.socket, [head], descriptors)
        self.socket.sendall(static + plan)
        answer = self.socket.recv(4)
        if len(answer) < 4:
            raise BrokenPipeError(errno.EPIPE, "the launcher of commands has ended")
        return int(struct.unpack("=i", answer)[0])

    def close(self) -> None:
        """End it, and remove its cgroup."""
        if self.is_ours:
            self._at_end.close()


def _end(popen: subprocess.Popen[bytes], its: socket.socket) -> None:
    """Let a zygote end everything that it started."""
    its.close()
    try:
        popen.wait(GRACE)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


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
        self,
        static: bytes,
        plan: Mapping[str, object],
        stdin: bytes,
        inherited: Sequence[int] = (),
    ) -> Launched:
        """Start the command of a plan: see ``main`` in ``launcher.py``."""
        data = marshal.dumps({**plan, "umask": _umask()})
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as passed:
            streams: list[IO[bytes]] = []
            descriptors = [_file_of(stdin)]
            passed.callback(os.close, descriptors[0])
            for _ in ("stdout", "stderr", "answer"):
                reading, writing = os.pipe()
                passed.callback(os.close, writing)
                descriptors.append(writing)
                streams.append(on_error.enter_context(open(reading, "rb", buffering=0)))
            zygote, pid = self._started(static, data, [*descriptors, *inherited])
            on_error.pop_all()
            return Launched(self, zygote, pid, *streams)

    def _started(
        self, static: bytes, plan: bytes, descriptors: Sequence[int]
    ) -> tuple[Zygote, int]:
        while True:
            waiting = self._waiting()
            zygote = waiting or Zygote(self._limits, self._env)
            try:
                return zygote, zygote.start(static, plan, descriptors)
            except BaseException as error:
                zygote.close()
                if waiting is None or not isinstance(error, OSError):
                    raise  # else it was killed while it waited: nothing has run

    def _waiting(self) -> Zygote | None:
        with contextlib.suppress(IndexError):
            while True:
                zygote = self._idle.pop()
                if zygote.is_ours:
                    if zygote.is_current:
                        return zygote
                    zygote.close()
        return None

    def take_back(self, zygote: Zygote) -> None:
        """Keep a zygote for the next command."""
        sweep_cgroups()  # those of a zygote that was killed, once its processes have gone
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
        self,
        zygotes: Zygotes,
        zygote: Zygote,
        pid: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        answer: IO[bytes],
    ) -> None:
        self._zygotes = zygotes
        self._zygote: Zygote | None = zygote
        self._answer = answer
        """Process 1 of the sandbox writes the exit code when all others have ended. It ends when
        the namespaces are gone, after a mark if the overlay is, too."""
        self._killed = False
        self.pid = pid
        self.streams = stdout, stderr
        self.returncode: int | None = None
        self.refused: set[Refusal] = set()
        """What the kernel has refused to it, once it has ended."""
        os.set_blocking(answer.fileno(), False)

    @contextlib.contextmanager
    def exited(self) -> Generator[int]:
        """Give a descriptor that becomes readable when the command has ended."""
        yield self._answer.fileno()

    def poll(self) -> int | None:
        """Return the exit code if nothing is left of the command."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                data = os.read(self._answer.fileno(), 4)
                if len(data) == 4:
                    [self.returncode] = struct.unpack("=i", data)
                else:  # process 1 or the zygote was killed, and so the command
                    self._killed, self.returncode = True, 128 + signal.SIGKILL
        return self.returncode

    def kill(self) -> None:
        """Kill the command and everything that it started."""
        if self.returncode is None and self._zygote is not None:
            self._killed = True
            with contextlib.suppress(OSError):
                self._zygote.socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Kill it, and wait until nothing of it is left."""
        self.kill()
        while self.poll() is None:
            select.select([self._answer], [], [])
        for stream in self.streams:
            stream.close()
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            self.refused = zygote.events.new()
            if self._killed:
                zygote.close()
            else:
                self._zygotes.take_back(zygote)

    def released(self) -> bool:
        with self._answer:
            if self._killed:
                return False
            ended = select.select([self._answer], [], [], GRACE)[0]
            return bool(ended) and os.read(self._answer.fileno(), 1) == UNMOUNTED


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
