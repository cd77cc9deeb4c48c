"""Run a command on a workspace so that its changes can be committed or undone as a whole."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shlex
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.locks import defer_interrupts
from weakincentives.errors import CommandFailed, FilesystemError
from weakincentives.filesystem.overlay import (
    LIFELINE,
    Overlay,
    Process,
    Started,
    Step,
    Way,
    find_way,
    spread,
)
from weakincentives.filesystem.paths import shown
from weakincentives.filesystem.store import Store
from weakincentives.filesystem.tree import remove_tree

logger = logging.getLogger("weakincentives.filesystem")

DEFAULT_OUTPUT_LIMIT = 1 << 20

# Seconds between checks whether the command is to stop, or has ended while a process that it left
# behind still holds its output open.
POLL = 0.05

# How many chunks of output to read after a command has ended.
DRAINS = 64

# How many empty layers wait for the next commands.
LAYERS = 8

# With less free space, or fewer free files, layers are emptied before the result is given.
ROOM, ROOM_FOR_FILES = 1 << 30, 50_000

# How much output goes into the error message of a command that had to succeed.
SAID = 2000

# Leads the process group of a command on the workspace itself. Descriptor 3 is the command's
# stderr and 5 its stdin. Descriptor 4 is a pipe that is never written to: it ends when the caller
# dies, and then the whole group is killed. The shell's own messages (`Killed`) are not the
# command's output.
SCRIPT = """
exec 3>&2 4<&0 5<"$1" 2>/dev/null
shift
{ read -r _ <&4; kill -KILL 0; } >/dev/null 3>&- 5<&- &
(exec "$@") <&5 2>&3 3>&- 4<&- 5<&-
"""

# The same for a program that has our input and output, and so is in our process group: only the
# program itself can be killed. Who watches over it is not its child.
ATTACHED = """
exec 4<"$1"
shift
( { read -r _ <&4 || kill -KILL $$; } >/dev/null 2>&1 & )
exec "$@" 4<&-
"""

KILLED = 128 + signal.SIGKILL

Engine = Literal["overlay", "scan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """A command's output, and whether its changes are part of the call."""

    argv: tuple[str, ...]
    returncode: int
    """As a shell counts: 128 and the signal's number for a command that was killed by a signal."""
    stdout: str
    stderr: str
    stdout_truncated: bool = False
    """The output was longer than the limit, and its middle was left out."""
    stderr_truncated: bool = False
    timed_out: bool = False
    stopped: str | None = None
    """Why its watch killed it."""
    kept: bool = True
    """False for a command that was killed: the workspace is as if it had never run."""
    engine: Engine
    engine_reason: str | None = None
    """Why no overlay was used; None if one was."""
    others: tuple[str, ...] = ()
    """Of an attached command over an overlay: what changed in the directory itself meanwhile."""

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with exit code 0."""
        return self.returncode == 0 and self.kept


@dataclass(slots=True)
class Output:
    """One output stream of a command; only its beginning and end if it is too long."""

    limit: int
    """In bytes."""
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped: int = 0

    def add(self, data: bytes) -> None:
        room = self.limit - self.limit // 2 - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        excess = len(self.tail) - self.limit // 2
        if excess > 0:
            del self.tail[:excess]
            self.dropped += excess

    @property
    def text(self) -> str:
        """The output, with a line in place of the dropped bytes."""
        if not self.dropped:
            return (self.head + self.tail).decode(errors="replace")
        return (
            f"{self.head.decode(errors='replace')}\n... {self.dropped} bytes left out ...\n"
            f"{self.tail.decode(errors='replace')}"
        )


Ending = Literal["ended", "timed out", "stopped"]


def _collect(
    process: Started,
    outputs: tuple[Output, Output],
    timeout: float | None,
    stopped: Callable[[], bool],
) -> Ending:
    """Read a command's output until it ends, times out or is stopped; then kill what is left."""
    until = None if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
    with selectors.DefaultSelector() as selector, process.exited() as exited:
        if exited is not None:
            selector.register(exited, selectors.EVENT_READ)
        for stream, output in zip(process.streams, outputs, strict=False):
            selector.register(stream, selectors.EVENT_READ, output)
        ending: Ending | None = None
        while ending is None:
            _take(selector, POLL)
            if process.poll() is not None:
                ending = "ended"
            elif stopped():
                ending = "stopped"
            elif until is not None and SYSTEM_CLOCK.monotonic() >= until:
                ending = "timed out"
        process.kill()
        # Only what is in the pipes: a process that escaped may go on writing.
        for _ in range(DRAINS):
            if not _take(selector, 0):
                break
    return ending


def _take(selector: selectors.BaseSelector, wait: float) -> bool:
    """Read what has arrived; False if nothing has."""
    taken = False
    for key, _ in selector.select(wait):
        output: Output | None = key.data
        data = b"" if output is None else os.read(key.fd, 1 << 16)
        if output is None or not data:
            selector.unregister(key.fileobj)
        else:
            output.add(data)
            taken = True
    return taken


@dataclass(frozen=True, slots=True)
class Running:
    """A running command, as its watch sees it."""

    pid: int
    """The process that all others of the command descend from."""
    layer: Path | None
    """The directory that it writes to; None when that is the workspace itself."""
    ended: bool = False
    """It has ended by itself: this is the last look, before its changes are committed."""


Watch = Callable[[Running], str | None]
"""Called repeatedly while a command runs; returns why to kill the command, or None."""

Start = Callable[[Overlay | None, bytes, Sequence[int]], Started]
"""Starts a command over an overlay, with its input and with descriptors to keep open."""


Salvage = Callable[[Sequence[Step]], None]
"""Gets the changes that are about to be dropped: they can be made on a branch until it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program to start, and how to start it."""

    argv: tuple[str, ...]
    directory: Path = Path()
    env: Mapping[str, str] | None = None
    stdin: bytes = b""
    timeout: float | None = None
    output_limit: int = DEFAULT_OUTPUT_LIMIT
    check: bool = False
    watch: Watch | None = None
    start: Start | None = None
    attached: bool = False
    salvage: Salvage | None = None

    @classmethod
    def of(
        cls, argv: Sequence[str] | str, *, stdin: bytes | str | None = None, **options: Any
    ) -> Command:
        """Return a command; raise if it cannot be run."""
        words = ("sh", "-c", argv) if isinstance(argv, str) else tuple(argv)
        if not words or not words[0]:
            raise FilesystemError("A command needs the name of a program")
        if any("\0" in word for word in words):
            raise FilesystemError("A command cannot contain a NUL character")
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        command = cls(argv=words, stdin=data, **options)
        if command.timeout is not None and not command.timeout > 0:
            raise ValueError(f"timeout must be positive, got {command.timeout}")
        if command.output_limit < 0:
            raise ValueError(f"output_limit must not be negative, got {command.output_limit}")
        return command

    @property
    def words(self) -> Sequence[str]:
        """What to start, so that variables which a shell does not pass on reach the command."""
        env = os.environ if self.env is None else self.env
        odd = [f"{k}={v}" for k, v in env.items() if not (k.isascii() and k.isidentifier())]
        return ["env", *odd, *self.argv] if odd else self.argv


class Commands:
    """The running commands of a workspace."""

    def __init__(self, store: Store) -> None:
        self._folder = store.own / "commands"
        self._store = store.path
        self._running: dict[Engine, int] = {"overlay": 0, "scan": 0}
        self._ended = threading.Condition()
        self._logged = False
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="wink-sweeper")
        self._empty: deque[tuple[int, Path]] = deque()
        """Layers to use again, each with the process that may."""

    def way(self, workspace: Path) -> Way | str:
        """Return how to run a command over an overlay, or why that is not possible."""
        way = find_way(workspace, self._store)
        if isinstance(way, str) and not self._logged:
            self._logged = True
            logger.warning("Commands on %s run without an overlay: %s", workspace, way)
        return way

    def begin(self, way: Way, workspace: Path, identity: tuple[int, int]) -> Overlay:
        """Return the overlay for one more command; the workspace must not change until its end.

        Args:
            identity: Device and inode of the workspace.
        """
        self._count("overlay", 1)
        with contextlib.suppress(IndexError):
            while True:
                process, place = self._empty.popleft()
                if process == os.getpid():
                    return Overlay(place, workspace, way, identity)
        if not self._folder.exists():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            spread(self._folder)
        return Overlay(self._folder / os.urandom(8).hex(), workspace, way, identity)

    def end(self, overlay: Overlay) -> None:
        """Let the workspace change again; its layers are emptied in the background."""
        with defer_interrupts():
            self._count("overlay", -1)
            try:
                emptied = self._sweeper.submit(self._put_back, overlay)
            except RuntimeError:  # an abandoned call ends its command after everything is closed
                _discard(overlay.place, overlay.discard)
                return
        if _is_nearly_full(self._folder):
            emptied.exception()  # waits for it

    def _put_back(self, overlay: Overlay) -> None:
        """Keep the layers of a command for another one, if they are as new."""
        try:
            if len(self._empty) < LAYERS and overlay.empty():
                self._empty.append((os.getpid(), overlay.place))
                return
        except OSError as error:
            logger.info("%s is not used again: %s", overlay.place, error)
        _discard(overlay.place, overlay.discard)

    @contextlib.contextmanager
    def attached(self, command: Command, store: Store, workspace: Path) -> Generator[Started]:
        """Run a program on the workspace itself, with our input and output, during the block.

        Where there are namespaces, everything that it starts is killed with it.
        """
        way = find_way(workspace, self._store)
        with contextlib.ExitStack() as at_end, store.running() as lock:
            with defer_interrupts():
                if isinstance(way, str):
                    process = _start_attached(command, lock)
                else:
                    self._folder.mkdir(mode=0o700, exist_ok=True)
                    place = Overlay(self._folder / os.urandom(8).hex(), workspace, way)
                    at_end.callback(_discard, place.place, place.discard)
                    place.prepare()
                    process = place.start(
                        command.words,
                        directory=command.directory,
                        env=command.env,
                        attached=True,
                        inherited=[lock],
                        in_place=True,
                    )
                at_end.callback(process.end)
            yield process

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """Run a command on the workspace itself in the block."""
        self._count("scan", 1)
        try:
            yield
        finally:
            with defer_interrupts():
                self._count("scan", -1)

    def wait(self, engine: Engine = "overlay") -> None:
        """Return when no command of an engine runs.

        The directory below an overlay must not change; a command on the workspace itself would
        go on after an undo.
        """
        if self._running[engine]:
            with self._ended:
                self._ended.wait_for(lambda: not self._running[engine])

    def close(self) -> None:
        """Return when nothing is left of the commands that have ended."""
        self._sweeper.shutdown()
        while self._empty:
            process, place = self._empty.popleft()
            if process == os.getpid():
                _discard(place, partial(remove_tree, place))

    def _count(self, engine: Engine, change: int) -> None:
        with self._ended:
            self._running[engine] += change
            self._ended.notify_all()


def _is_nearly_full(folder: Path) -> bool:
    status = os.statvfs(folder)
    if status.f_files and status.f_ffree < ROOM_FOR_FILES:
        return True
    return status.f_bavail * status.f_frsize < ROOM


def _discard(place: Path, remove: Callable[[], None]) -> None:
    """Remove a directory; nothing depends on it, so a failure is only logged."""
    try:
        remove()
    except Exception as error:
        logger.warning("%s could not be removed: %s", place, error)


def run_over(overlay: Overlay, command: Command, stopped: Callable[[], bool]) -> CommandResult:
    """Run a command over an overlay; the upper layer then has what it changed."""

    def start() -> Started:
        return overlay.start(
            command.words,
            directory=command.directory,
            env=command.env,
            attached=command.attached,
        )

    result = _run(command, start, stopped, overlay=overlay)
    if command.start is None and result.returncode != KILLED and not overlay.started:
        raise _not_started(result.stderr.strip())
    return _checked(result, command)


def run_plainly(
    command: Command, store: Store, stopped: Callable[[], bool], reason: str
) -> CommandResult:
    """Run a command on the workspace itself; the caller finds what it changed."""
    with tempfile.NamedTemporaryFile() as stdin, store.running() as lock:
        stdin.write(command.stdin)
        stdin.flush()
        argv = ["/bin/sh", "-c", SCRIPT, "wink", stdin.name, *command.words]

        def start() -> Started:
            if command.attached:
                return _start_attached(command, lock)
            return Process(argv, cwd=command.directory, env=command.env, inherited=[lock])

        return _checked(_run(command, start, stopped, reason=reason, inherited=[lock]), command)


def _start_attached(command: Command, lock: int) -> Process:
    argv = ["/bin/sh", "-c", ATTACHED, "wink", LIFELINE, *command.words]
    return Process(argv, cwd=command.directory, env=command.env, inherited=[lock], attached=True)


def run_alone(command: Command) -> CommandResult:
    """Run a command that changes no workspace."""

    argv = ["/bin/sh", "-c", SCRIPT, "wink", os.devnull, *command.words]

    def start() -> Started:
        return Process(argv, cwd=command.directory, env=command.env)

    return _run(command, start, lambda: False, reason="there is no workspace")


def _not_started(reason: str | None) -> FilesystemError:
    return FilesystemError(f"The command could not be started: {reason}")


def _run(
    command: Command,
    start: Callable[[], Started],
    stopped: Callable[[], bool],
    *,
    overlay: Overlay | None = None,
    reason: str | None = None,
    inherited: Sequence[int] = (),
) -> CommandResult:
    """Run a command until it ends or is stopped; ``reason`` says why there is no overlay."""
    stdout, stderr = Output(command.output_limit), Output(command.output_limit)
    why: str | None = None

    def is_stopped() -> bool:
        nonlocal why
        why = None if command.watch is None else command.watch(running)
        return why is not None or stopped()

    with contextlib.ExitStack() as at_end:
        # An interrupt waits until the process to kill is known.
        with defer_interrupts():
            try:
                if command.start is None:
                    process = start()
                else:
                    process = command.start(overlay, command.stdin, inherited)
            except OSError as error:
                raise _not_started(error.strerror) from error
            at_end.callback(process.end)
            if overlay is not None:
                overlay.holder = process
        running = Running(process.pid, None if overlay is None else overlay.upper)
        ending = _collect(process, (stdout, stderr), command.timeout, is_stopped)
    if overlay is None:
        process.released()
    if ending == "ended" and command.watch is not None:
        # Once more: what is watched for may have happened between two looks.
        why = command.watch(replace(running, ended=True))
        ending = ending if why is None else "stopped"
    code = process.returncode
    assert code is not None
    code = KILLED if ending != "ended" else code if code >= 0 else 128 - code
    return CommandResult(
        argv=command.argv,
        returncode=code,
        stdout=stdout.text,
        stderr=stderr.text,
        stdout_truncated=stdout.dropped > 0,
        stderr_truncated=stderr.dropped > 0,
        timed_out=ending == "timed out",
        stopped=why,
        kept=code != KILLED and not (command.check and code),
        engine="scan" if overlay is None else "overlay",
        engine_reason=reason,
    )


def _checked(result: CommandResult, command: Command) -> CommandResult:
    """Return the result; raise CommandFailed when the command had to succeed and did not."""
    if not command.check or result.ok:
        return result
    how = f"ended with {result.returncode}"
    if result.timed_out:
        how = f"took longer than {command.timeout} s"
    if result.stopped is not None:
        how = f"was killed because {result.stopped}"
    said = (result.stderr.strip() or result.stdout.strip())[-SAID:]
    message = f"{shown(shlex.join(result.argv))} {how}. Its changes are undone"
    raise CommandFailed(f"{message}:\n{said}" if said else message, result)
