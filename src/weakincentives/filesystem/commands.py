"""Run a command on a workspace so that what it changed can be kept or undone as a whole."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import selectors
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import CommandFailed, FilesystemError
from weakincentives.filesystem.overlay import (
    Handle,
    Layers,
    Step,
    Way,
    find_way,
    kill_group,
    remove_tree,
    start_apart,
    wait_for_group,
    with_odd_variables,
)
from weakincentives.filesystem.protocol import Parts, join_path, shown
from weakincentives.filesystem.staging import Edit
from weakincentives.filesystem.store import Store
from weakincentives.interrupts import undisturbed

if TYPE_CHECKING:
    from weakincentives.filesystem.disk import HostFilesystem

__all__ = [
    "DEFAULT_OUTPUT_LIMIT",
    "Command",
    "CommandResult",
    "Commands",
    "Engine",
    "EngineUse",
    "Running",
    "Watch",
    "apply_steps",
    "engines",
    "run_over",
    "run_plainly",
]

logger = logging.getLogger("weakincentives.filesystem")

DEFAULT_OUTPUT_LIMIT = 1 << 20

# How often to look whether someone asked to stop, or whether the command ended while a process it
# left behind still holds its output open.
LOOK = 0.05

# How many pieces of output to take from what is left when a command has ended.
DRAINS = 64

# How much of what a command said goes into the message when it had to succeed.
SAID = 2000

# Stays with a command on the workspace itself, and leads its process group. Descriptor 3 is the
# command's stderr and 5 its stdin. Descriptor 4 is a pipe that is never written to: it ends when
# the caller dies, and then the whole group is killed. What the shell itself has to say (`Killed`)
# is not the command's output.
SCRIPT = """
exec 3>&2 4<&0 5<"$1" 2>/dev/null
shift
{ read -r _ <&4; kill -KILL 0; } >/dev/null 3>&- 5<&- &
(exec "$@") <&5 2>&3 3>&- 4<&- 5<&-
"""

KILLED = 128 + signal.SIGKILL

Engine = Literal["overlay", "scan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command said, and what became of what it changed."""

    argv: tuple[str, ...]
    returncode: int
    """As a shell counts: 128 and the signal's number for a command that was killed by a signal."""
    stdout: str
    stderr: str
    stdout_truncated: bool = False
    """The middle of the output was left out: it was longer than the limit."""
    stderr_truncated: bool = False
    timed_out: bool = False
    stopped: str | None = None
    """Why the one who watched it had it killed."""
    kept: bool = True
    """False when the command was killed: then the workspace is as if it had never run."""
    engine: Engine
    engine_reason: str | None = None
    """Why it is not the overlay; None when it is."""

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself, and well."""
        return self.returncode == 0 and self.kept


@dataclass(slots=True)
class Output:
    """One stream of a command: its beginning and its end, when it is too long to keep."""

    limit: int
    head: bytearray
    tail: bytearray
    dropped: int = 0

    @classmethod
    def of(cls, limit: int) -> Output:
        """Return an empty one that keeps up to ``limit`` bytes."""
        return cls(limit, bytearray(), bytearray())

    def add(self, data: bytes) -> None:
        """Take in what the command said next."""
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
        """What the command said, with a line in the place of what was dropped."""
        if not self.dropped:
            return (self.head + self.tail).decode(errors="replace")
        return (
            f"{self.head.decode(errors='replace')}\n... {self.dropped} bytes left out ...\n"
            f"{self.tail.decode(errors='replace')}"
        )


Ending = Literal["ended", "timed out", "stopped"]


def collect(
    process: subprocess.Popen[bytes],
    outputs: tuple[Output, Output],
    *,
    timeout: float | None,
    stopped: Callable[[], bool],
    kill: Callable[[], None],
) -> Ending:
    """Read a command's output until it ends, has to, or is asked to; then nothing of it is left."""
    until = None if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
    with selectors.DefaultSelector() as selector, _exit_of(process) as exited:
        if exited is not None:
            selector.register(exited, selectors.EVENT_READ)
        for stream, output in zip((process.stdout, process.stderr), outputs, strict=True):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, output)
        ending: Ending | None = None
        while ending is None:
            _take(selector, LOOK)
            if process.poll() is not None:
                ending = "ended"
            elif stopped():
                ending = "stopped"
            elif until is not None and SYSTEM_CLOCK.monotonic() >= until:
                ending = "timed out"
        kill()
        # What is in the pipes, and no more: a process that got away may go on writing.
        for _ in range(DRAINS):
            if not _take(selector, 0):
                break
    return ending


@contextlib.contextmanager
def _exit_of(process: subprocess.Popen[bytes]) -> Generator[int | None]:
    """Give a descriptor that can be read once the process has ended, where the system has one."""
    try:
        exited = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        yield None
        return
    try:
        yield exited
    finally:
        os.close(exited)


def _take(selector: selectors.BaseSelector, wait: float) -> bool:
    """Take in what is there to be read; False when nothing was."""
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
    """A command under way, for those who watch it."""

    pid: int
    """The process that all others of the command descend from."""
    layer: Path | None
    """Where what it writes lies until it is kept; None when that is the workspace itself."""
    ended: bool = False
    """It has ended by itself: this is the last look, before what it changed is kept."""


Watch = Callable[[Running], str | None]
"""Looks at a command again and again while it runs; what it returns is why to kill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program to start, and how."""

    argv: tuple[str, ...]
    directory: Path = Path()
    env: Mapping[str, str] | None = None
    stdin: bytes = b""
    timeout: float | None = None
    output_limit: int = DEFAULT_OUTPUT_LIMIT
    watch: Watch | None = None

    @classmethod
    def of(
        cls,
        argv: Sequence[str] | str,
        *,
        env: Mapping[str, str] | None,
        stdin: bytes | str | None,
        timeout: float | None,
        limit: int,
        watch: Watch | None,
    ) -> Command:
        """Return the command that was asked for, if it can be one."""
        words = ("sh", "-c", argv) if isinstance(argv, str) else tuple(argv)
        if not words or not words[0]:
            raise FilesystemError("A command needs the name of a program")
        if any("\0" in word for word in words):
            raise FilesystemError("A command cannot contain a NUL character")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        if limit < 0:
            raise ValueError(f"output_limit must not be negative, got {limit}")
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        return cls(
            argv=words, env=env, stdin=data, timeout=timeout, output_limit=limit, watch=watch
        )


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that has ended, one way or another."""

    command: Command
    returncode: int
    stdout: Output
    stderr: Output
    ending: Ending
    stopped: str | None = None

    def is_kept(self, check: bool) -> bool:
        """Whether what the command changed is to stay."""
        killed = self.ending != "ended" or self.returncode == KILLED
        return not killed and not (check and self.returncode != 0)

    def result(self, engine: Engine, reason: str | None, *, check: bool) -> CommandResult:
        """Return what to tell; raise it when the command had to succeed and did not."""
        result = CommandResult(
            argv=self.command.argv,
            returncode=self.returncode if self.ending == "ended" else KILLED,
            stdout=self.stdout.text,
            stderr=self.stderr.text,
            stdout_truncated=self.stdout.dropped > 0,
            stderr_truncated=self.stderr.dropped > 0,
            timed_out=self.ending == "timed out",
            stopped=self.stopped,
            kept=self.is_kept(check),
            engine=engine,
            engine_reason=reason,
        )
        if check and not result.ok:
            raise CommandFailed(_failure(result, self.command.timeout), result)
        return result


def _failure(result: CommandResult, timeout: float | None) -> str:
    name = shown(shlex.join(result.argv))
    how = f"took longer than {timeout} s" if result.timed_out else f"ended with {result.returncode}"
    if result.stopped is not None:
        how = f"was killed because {result.stopped}"
    said = (result.stderr.strip() or result.stdout.strip())[-SAID:]
    return f"{name} {how}, and nothing that it changed was kept" + (f":\n{said}" if said else "")


class Commands:
    """The commands of a workspace: how they are run, and which are under way over overlays."""

    def __init__(self, store: Store) -> None:
        self._folder = store.path / "commands"
        self._store = store.path
        self._running = 0
        self._in_place = 0
        self._ended = threading.Condition()
        self._logged = False
        self._rubbish: SimpleQueue[Layers | None] = SimpleQueue()
        self._sweeper: threading.Thread | None = None
        self._is_open = True
        for folder in (self._folder, store.path / "views"):
            # Of a process that was killed: nothing of it has reached the workspace.
            _discard(folder)

    def way(self, workspace: Path) -> Way | str:
        """Return how a command is run over an overlay, or why it cannot be."""
        way = find_way(workspace, self._store)
        if isinstance(way, str) and not self._logged:
            self._logged = True
            logger.warning("Commands on %s run without an overlay: %s", workspace, way)
        return way

    def begin(self, way: Way, workspace: Path) -> Layers:
        """Return the layers for one more command; the workspace must not change until its end."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with self._ended:
            self._running += 1
        return Layers(self._folder / os.urandom(8).hex(), workspace, way)

    def end(self, layers: Layers) -> None:
        """Let the workspace change again."""
        with undisturbed(), self._ended:
            self._running -= 1
            self._ended.notify_all()
            if self._is_open:
                self._rubbish.put(layers)
                if self._sweeper is None or not self._sweeper.is_alive():
                    self._sweeper = threading.Thread(
                        target=_sweep, args=(self._rubbish,), name="wink-sweeper", daemon=True
                    )
                    self._sweeper.start()
                return
        _discard(layers.place, layers.discard)

    def close(self) -> None:
        """Return when nothing is left of the commands that have ended."""
        with self._ended:  # a call that was given up may be ending its command just now
            self._is_open = False
            sweeper = self._sweeper
        if sweeper is not None:
            self._rubbish.put(None)
            sweeper.join()

    def wait(self) -> None:
        """Return when no command is under way: what lies below an overlay must not change."""
        with self._ended:
            self._ended.wait_for(lambda: not self._running)

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """Run a command on the workspace itself in the block."""
        with self._ended:
            self._in_place += 1
        try:
            yield
        finally:
            with undisturbed(), self._ended:
                self._in_place -= 1
                self._ended.notify_all()

    def wait_in_place(self) -> None:
        """Return when no command works on the workspace itself: it would go on after an undo."""
        with self._ended:
            self._ended.wait_for(lambda: not self._in_place)


def _sweep(rubbish: SimpleQueue[Layers | None]) -> None:
    # Nobody needs to wait for this: removing directories is slow, above all on a busy machine.
    while (layers := rubbish.get()) is not None:
        _discard(layers.place, layers.discard)


def _discard(place: Path, remove: Callable[[], None] | None = None) -> None:
    """Remove what is not needed any more. Whatever goes wrong is logged: nothing depends on it."""
    try:
        (remove or functools.partial(remove_tree, place))()
    except Exception as error:
        logger.warning("%s could not be removed: %s", place, error)


def run_over(layers: Layers, command: Command, stopped: Callable[[], bool]) -> Ran:
    """Run a command over an overlay; what it changed is then in the upper layer."""
    outputs = Output.of(command.output_limit), Output.of(command.output_limit)
    try:
        # An interrupt waits until it is known what there is to be killed.
        with undisturbed():
            process = _start_over(layers, command)
        watched = _Watched(command.watch, Running(process.pid, layers.upper), stopped)
        ending = collect(
            process, outputs, timeout=command.timeout, stopped=watched, kill=layers.kill
        )
    finally:
        layers.end()
    if ending == "ended" and not layers.started:
        raise _not_started(outputs[1].text.strip())
    ending = watched.at_the_end(ending)
    return Ran(command, _as_shells_count(process.returncode), *outputs, ending, watched.reason)


@dataclass(slots=True)
class _Watched:
    """Whether a command is to be stopped; it keeps the reason."""

    watch: Watch | None
    running: Running
    stopped: Callable[[], bool]
    reason: str | None = None

    def __call__(self) -> bool:
        if self.watch is not None:
            self.reason = self.watch(self.running)
        return self.reason is not None or self.stopped()

    def at_the_end(self, ending: Ending) -> Ending:
        """Look once more: what is watched may have happened between two looks."""
        if ending == "ended" and self.watch is not None:
            self.reason = self.watch(replace(self.running, ended=True))
        return ending if self.reason is None else "stopped"


def _start_over(layers: Layers, command: Command) -> subprocess.Popen[bytes]:
    try:
        return layers.start(command.argv, directory=command.directory, env=command.env)
    except OSError as error:
        raise _not_started(str(error.strerror)) from error


def _not_started(reason: str) -> FilesystemError:
    return FilesystemError(f"The command could not be started over an overlay: {reason}")


def run_plainly(command: Command, store: Store, stopped: Callable[[], bool]) -> Ran:
    """Run a command on the workspace itself; others must find out what it changed."""
    outputs = Output.of(command.output_limit), Output.of(command.output_limit)
    with tempfile.NamedTemporaryFile() as stdin, contextlib.ExitStack() as ending:
        stdin.write(command.stdin)
        stdin.flush()
        try:
            # An interrupt waits until it is known what there is to be killed.
            with undisturbed():
                process, lifeline = _start_plainly(command, store, stdin.name)
                ending.callback(_end_plainly, process, lifeline)
        except OSError as error:
            # As a shell puts it, and as it is over an overlay.
            outputs[1].add(f"{command.argv[0]}: {error.strerror}\n".encode())
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return Ran(command, code, *outputs, "ended")
        watched = _Watched(command.watch, Running(process.pid, None), stopped)
        how = collect(
            process,
            outputs,
            timeout=command.timeout,
            stopped=watched,
            kill=lambda: kill_group(process),
        )
    how = watched.at_the_end(how)
    return Ran(command, _as_shells_count(process.returncode), *outputs, how, watched.reason)


def _start_plainly(
    command: Command, store: Store, stdin: str
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command; it is killed when the descriptor returned with it is closed, or we die."""
    argv = with_odd_variables(command.argv, os.environ if command.env is None else command.env)
    reading, lifeline = os.pipe()
    try:
        with store.running() as lock:
            process = start_apart(
                ["/bin/sh", "-c", SCRIPT, "wink", stdin, *argv],
                cwd=command.directory,
                env=command.env,
                stdin=reading,
                inherited=[lock],
            )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(reading)
    return process, lifeline


def _end_plainly(process: subprocess.Popen[bytes], lifeline: int) -> None:
    kill_group(process)
    wait_for_group(process)  # or what it was just writing would come after the look for changes
    process.wait()
    os.close(lifeline)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def _as_shells_count(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def apply_steps(steps: Sequence[Step], edit: Edit, check: Callable[[Step], bool]) -> None:
    """Make what a command changed a change of the workspace, or of a private view.

    ``check`` is asked before each step: False leaves it out, and it raises if it must not be made.
    """
    for step in steps:
        if not check(step):
            continue
        if step.action == "remove":
            edit.remove(step.parts)
        elif step.action == "directory":
            edit.make_directory(step.parts)
        elif step.handle is not None:
            _link(step.handle, step.parts, edit)
        elif step.source is not None:
            tree, place = step.source
            if step.action == "move":
                with tree.reached(place) as path:
                    edit.put_file(step.parts, Path(path))
            else:
                edit.write(step.parts, tree.read(place)[0])
        elif step.attributes is not None:
            own = step.attributes
            edit.set_attributes(
                step.parts,
                mode=own.mode,
                mtime_ns=own.mtime_ns,
                uid=own.uid,
                gid=own.gid,
                xattrs=own.xattrs,
            )


def _link(handle: Handle, parts: Parts, edit: Edit) -> None:
    opened = handle.open()
    if opened is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join_path(parts))
    try:
        edit.link(Path(f"/proc/self/fd/{opened}"), parts)
    finally:
        os.close(opened)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """Which engine undoes the changes of tools that change files in one way, and why."""

    writes: Literal["api", "command", "external"]
    engine: Literal["journal", "overlay", "scan"]
    reason: str


def engines(fs: HostFilesystem) -> tuple[EngineUse, ...]:
    """Return what is used for each of the ways in which tools change files on this workspace."""
    way = find_way(fs.root, fs.store)
    command = (
        EngineUse(writes="command", engine="scan", reason=way)
        if isinstance(way, str)
        else EngineUse(
            writes="command",
            engine="overlay",
            reason="in a user namespace" if way.owner else "mounted by root",
        )
    )
    return (
        EngineUse(writes="api", engine="journal", reason="every change is journalled first"),
        command,
        EngineUse(writes="external", engine="scan", reason="what changed is found by looking"),
    )
