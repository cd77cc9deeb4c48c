"""Resource limits of a command in a sandbox, and how they are enforced."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import stat
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator

from weakincentives.contrib.tools.file_values import check_positive
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem.commands import Running
from weakincentives.filesystem.tree import everything_below

# Seconds between two checks of a command, or this many times the duration of a check.
LOOK = 0.05
REST = 5

# Seconds by which the time of a change may lag behind the clock, on any filesystem.
COARSE = 2.0

# Processes around a command; they do not count towards its limit.
WRAPPERS = 16

GIB = 1 << 30


def byte_size(size: object) -> object:
    """Return the bytes of a text such as ``512 MiB``; anything else unchanged."""
    found = re.fullmatch(r"\s*(\d{1,15})\s*(?:([KMGT])i?B?)?\s*", str(size), re.IGNORECASE)
    if not isinstance(size, str) or found is None:
        return size
    return int(found[1]) << 10 * (" KMGT".index((found[2] or " ").upper()))


Bytes = Annotated[int, BeforeValidator(byte_size)]

_CONTROLLERS = {"memory", "pids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one command, for all its processes together unless stated otherwise.

    A command that needs more is refused or killed, and its changes are undone.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    memory: Bytes = GIB
    """Bytes."""
    processes: int = 128
    """Threads count as well."""
    disk: Bytes = GIB
    """Bytes that it may write to the workspace, also in one file."""
    files: int = 50_000
    """Files and directories that it may create or change in the workspace."""
    scratch: Bytes = GIB // 4
    """Bytes in ``/tmp``, and as many in ``/dev/shm``; both are removed when it ends."""
    cpu_seconds: int = 300
    """Processor time of each process."""
    open_files: int = 1024
    """Of each process."""

    def __post_init__(self) -> None:
        check_positive(self)

    def hit(self, refused: Collection[Refusal], returncode: int) -> list[str]:
        """Return the limits that a command has hit, in words.

        Args:
            refused: What its cgroup has refused.
        """
        found = [
            ("memory" in refused, f"it used more than {binary_size(self.memory)} of memory"),
            ("processes" in refused, f"it tried to start more than {self.processes} processes"),
            (
                returncode == 128 + signal.SIGXCPU,
                f"a process used more than {self.cpu_seconds} s of processor time",
            ),
            (
                returncode == 128 + signal.SIGXFSZ,
                f"a file grew to more than {binary_size(self.disk)}",
            ),
        ]
        return [text for is_hit, text in found if is_hit]

    def rlimits(self, *, memory: bool) -> dict[str, tuple[int, int]]:
        """Return the soft and hard limits of each process, by the kernel's name in lower case."""
        import resource

        limits = {
            "core": (0, 0),
            # A program may ignore the signal of the soft limit, not that of the hard one.
            "cpu": (self.cpu_seconds, self.cpu_seconds + 1),
            "fsize": (self.disk, self.disk),
            "nofile": (self.open_files, self.open_files),
            "nproc": (self.processes, self.processes),
        }
        if memory:
            # Not the address space: programs reserve far more of it than they use.
            limits["data"] = (self.memory, self.memory)
        for name, (soft, hard) in limits.items():
            # Our own hard limit cannot be raised.
            most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
            if most != resource.RLIM_INFINITY:
                limits[name] = min(soft, most), min(hard, most)
        return limits


# Limits of a cgroup, enforced by the kernel


@contextlib.contextmanager
def cgroup(limits: SandboxLimits) -> Generator[tuple[str, ...]]:
    """Give the files through which a process joins a new cgroup with these limits.

    There are none without root: the kernel limits the processes of every other user without a
    cgroup. Raises SandboxUnavailable where root can make none.
    """
    if os.geteuid() != 0:
        yield ()
        return
    name, owner = new_name(), os.getpid()
    settings = {
        "pids.max": limits.processes,
        "memory.max": limits.memory,
        "memory.swap.max": 0,
        # The same in the first version of cgroups; the second file includes swap.
        "memory.limit_in_bytes": limits.memory,
        "memory.memsw.limit_in_bytes": limits.memory,
    }
    # Two hierarchies, or a single one.
    folders = sorted({place / name for place, what in _controllers() if what in _CONTROLLERS})
    limited: set[str] = set()
    try:
        try:
            for folder in folders:
                folder.mkdir()
                for file, value in settings.items():
                    if (folder / file).exists():
                        (folder / file).write_text(f"{value}\n")
                        limited.add(file.partition(".")[0])
        except OSError as error:
            raise _no_cgroup(f"no cgroup can be made: {error.strerror}") from error
        if limited != _CONTROLLERS:
            raise _no_cgroup("the system has no cgroups that limit memory and processes")
        yield tuple(str(folder / "cgroup.procs") for folder in folders)
    finally:
        if owner == os.getpid():  # not in a forked child, which drops what its parent still uses
            remove_cgroups(name)


Refusal = Literal["memory", "processes"]

# What the kernel counts in a cgroup: the file, the line, and its meaning. The first file is of the
# first version of cgroups, the second of the second.
_EVENTS: tuple[tuple[str, str, Refusal], ...] = (
    ("memory.oom_control", "oom_kill", "memory"),
    ("memory.events", "oom_kill", "memory"),
    ("pids.events", "max", "processes"),
)


class CgroupEvents:
    """What the kernel refuses to the processes of a cgroup; its files stay open in the block."""

    def __init__(self, cgroup_files: Sequence[str]) -> None:
        self._sources: list[tuple[int, str, Refusal]] = [
            (os.open(path, os.O_RDONLY | os.O_CLOEXEC), key, refusal)
            for folder in map(os.path.dirname, cgroup_files)
            for name, key, refusal in _EVENTS
            if os.path.exists(path := os.path.join(folder, name))
        ]
        self._seen = self._count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._sources:
            os.close(self._sources.pop()[0])

    def new(self) -> set[Refusal]:
        """Return what has been refused since the last call."""
        before, self._seen = self._seen, self._count()
        return {what for what, count in self._seen.items() if count > before.get(what, 0)}

    def _count(self) -> dict[Refusal, int]:
        found: dict[Refusal, int] = {}
        for fd, key, refusal in self._sources:
            text = b""
            with contextlib.suppress(OSError):  # the cgroup has been removed
                text = os.pread(fd, 1 << 12, 0)
            for line in text.decode().splitlines():
                name, _, count = line.partition(" ")
                if name == key:
                    found[refusal] = found.get(refusal, 0) + int(count)
        return found


def _no_cgroup(reason: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"root can be limited only by cgroups, and {reason}")


def new_name() -> str:
    return f"wink-{os.urandom(8).hex()}"


def _controllers() -> Iterator[tuple[Path, str]]:
    """Yield the directory of each controller's hierarchy, and its name."""
    for place, options in cgroup_mounts():
        unified = place / "cgroup.controllers"
        if unified.exists():
            given = place / "cgroup.subtree_control"
            missing = _CONTROLLERS & set(unified.read_text().split())
            missing -= set(given.read_text().split())
            with contextlib.suppress(OSError):  # the controllers stay unavailable
                if missing:
                    given.write_text(" ".join(f"+{each}" for each in missing))
            options = given.read_text().split()
        for option in options:
            yield place, option


def cgroup_mounts() -> Iterator[tuple[Path, list[str]]]:
    """Yield where cgroup hierarchies are mounted, and their options."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            yield Path(before.split(" ")[4]), options.split(",")


_unused: set[str] = set()
"""Cgroups that are not removed yet."""


def remove_cgroups(name: str) -> None:
    """Remove the cgroups of that name from every hierarchy, with those below.

    A process stays in its cgroup for a moment after it has ended. A cgroup that cannot be removed
    yet is retried after the next command, and when the program ends.
    """
    _sweep_at_exit()
    _unused.add(name)
    sweep_cgroups()


@cache
def _sweep_at_exit() -> None:
    atexit.register(sweep_cgroups, patience=1.0)


def sweep_cgroups(patience: float = 0.0) -> bool:
    """Remove unused cgroups; tell whether all are gone."""
    until = SYSTEM_CLOCK.monotonic() + patience
    while True:
        for name in tuple(_unused):
            if all(_remove_group(place / name) for place, _ in cgroup_mounts()):
                _unused.discard(name)
        if not _unused or SYSTEM_CLOCK.monotonic() >= until:
            return not _unused
        threading.Event().wait(0.005)


def _remove_group(folder: Path) -> bool:
    for each, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(each)
    return not folder.exists()


# Limits that we enforce by checking


class SandboxWatch:
    """Enforces the limits on the disk, and without a cgroup those on memory and processes.

    Args:
        places: Directories on the filesystems that the command writes to.
        processes: Whether to watch its processes and their memory.
        workspace: Where a command without a layer of its own writes.
    """

    def __init__(
        self,
        limits: SandboxLimits,
        *,
        places: Sequence[Path],
        processes: bool,
        workspace: Path | None = None,
    ) -> None:
        self._limits = limits
        self._workspace = workspace
        self._since = SYSTEM_CLOCK.time() - COARSE
        self._processes = processes
        # One place for each filesystem.
        apart = {os.stat(place).st_dev: place for place in places}.values()
        self._bytes = {place: _free(place) for place in apart}
        self._files = {place: _free_files(place) for place in apart}
        self._next = 0.0

    def __call__(self, running: Running) -> str | None:
        """Return why to kill the command, if there is a reason."""
        began = SYSTEM_CLOCK.monotonic()
        if began < self._next and not running.ended:
            return None
        reason = self._look(running)
        ended = SYSTEM_CLOCK.monotonic()
        self._next = ended + max(LOOK, REST * (ended - began))
        return reason

    def _look(self, running: Running) -> str | None:
        limits = self._limits
        too_large = f"it wrote more than {binary_size(limits.disk)} to the disk"
        too_many = f"it created or changed more than {limits.files:,} files"
        if any(self._used(self._bytes, _free, limits.disk, running, self._written, half=True)):
            return too_large
        if any(self._used(self._files, _free_files, limits.files, running, self._made)):
            return too_many
        if running.ended and running.layer is not None:
            # What is free says nothing now: another program may have freed space at the same time.
            size = count = 0
            for status in everything_below(running.layer):
                size += _size(status)
                count += _is_made(status)
                if size > limits.disk or count > limits.files:
                    return too_large if size > limits.disk else too_many
        if not self._processes or running.ended:
            return None
        pids = descendants(running.pid)
        if len(pids) > limits.processes + WRAPPERS:
            return f"it started more than {limits.processes} processes"
        # Resident memory counts shared pages once per process: only near the limit, count exactly.
        if all(sum(map(size, pids)) > limits.memory for size in (_resident, _proportional)):
            return f"it used more than {binary_size(limits.memory)} of memory"
        return None

    def _used(
        self,
        known: dict[Path, int | None],
        free_at: Callable[[Path], int | None],
        limit: int,
        running: Running,
        amounts: Callable[[Running], Iterator[int]],
        half: bool = False,
    ) -> Iterator[bool]:
        """Tell for each filesystem whether the command has used more than the limit.

        Usually the free space shows that it has not. Other programs use the disk as well, so
        otherwise its own files are counted. Deleted files that are still open cannot be counted:
        with ``half``, half of the free space is too much in any case.
        """
        is_final = running.ended and running.layer is not None
        for place, before in known.items():
            free = free_at(place)
            if free is None or before is None:  # this filesystem does not report it
                yield not is_final and _exceeds(amounts(running), limit)
                continue
            # Other programs may free space: that must not hide what the command writes.
            before = known[place] = max(before, free)
            used = before - free
            yield used > limit and (
                (half and used > before // 2)
                or (not is_final and _exceeds(amounts(running), limit))
            )

    def _written(self, running: Running) -> Iterator[int]:
        """Yield the size of each file that the command wrote."""
        return map(_size, self._changed(running))

    def _made(self, running: Running) -> Iterator[int]:
        """Yield 1 for each file that the command created or changed."""
        return map(_is_made, self._changed(running))

    def _changed(self, running: Running) -> Iterator[os.stat_result]:
        if running.layer is not None:
            return everything_below(running.layer)
        below = () if self._workspace is None else everything_below(self._workspace)
        return (each for each in below if not _is_directory(each) and each.st_ctime >= self._since)


def _free(place: Path) -> int | None:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def _free_files(place: Path) -> int | None:
    status = os.statvfs(place)
    return status.f_ffree if status.f_files else None


def _exceeds(amounts: Iterator[int], limit: int) -> bool:
    return any(total > limit for total in accumulate(amounts))


def _is_directory(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode)


def _size(status: os.stat_result) -> int:
    """Return the bytes of a file; directories do not count."""
    return 0 if _is_directory(status) else status.st_blocks * 512


def _is_made(status: os.stat_result) -> int:
    """Return 1 for what a command makes, 0 for the mark of something that it has deleted."""
    return stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


def descendants(pid: int) -> list[int]:
    family = [pid]
    for each in family:
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{each}/task"):
                children = _read(f"/proc/{each}/task/{thread}/children").split()
                family += map(int, children)
    return family


def _resident(pid: int) -> int:
    sizes = _read(f"/proc/{pid}/statm").split()
    return int(sizes[1]) * os.sysconf("SC_PAGE_SIZE") if sizes else 0


def _proportional(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def binary_size(size: float) -> str:
    """Return a number of bytes: ``512 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
