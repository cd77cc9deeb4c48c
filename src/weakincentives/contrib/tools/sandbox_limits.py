"""What a command in a sandbox may use at most, and how it is held to that."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.filesystem.commands import Running
from weakincentives.filesystem.tree import files_below

__all__ = [
    "Cgroup",
    "SandboxLimits",
    "SandboxWatch",
    "cgroup_mounts",
    "remove_cgroups",
    "sweep_cgroups",
]

# How often a command is looked at, and how much longer than a look the time between two of them is.
LOOK = 0.05
REST = 5

# Processes that shut a command in and belong to nobody's limit.
WRAPPERS = 16

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one command may use, all its processes together where nothing else is said.

    A command that wants more is refused it or killed, and nothing that it changed is kept.
    """

    memory: int = GIB
    """Bytes."""
    processes: int = 128
    """Threads count as well."""
    disk: int = GIB
    """Bytes that it may write into the workspace, and the size of its largest file."""
    files: int = 50_000
    """Files and directories that it may make or change in the workspace."""
    scratch: int = GIB // 4
    """Bytes in ``/tmp``, and as much in ``/dev/shm``: they are gone when it ends."""
    cpu_seconds: int = 300
    """Processor time of each process."""
    open_files: int = 1024
    """Of each process."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def rlimits(self, *, memory: bool) -> dict[str, tuple[int, int]]:
        """Return the soft and hard limit of each process by the kernel's name in lower case."""
        import resource

        limits = {
            "core": (0, 0),
            # The first is a signal that a program may ignore; the second is not.
            "cpu": (self.cpu_seconds, self.cpu_seconds + 1),
            "fsize": (self.disk, self.disk),
            "nofile": (self.open_files, self.open_files),
            "nproc": (self.processes, self.processes),
        }
        if memory:
            # Not the address space: programs reserve far more of it than they ever use.
            limits["data"] = (self.memory, self.memory)
        for name, (soft, hard) in limits.items():
            # What we are limited to ourselves is nobody's to raise.
            most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
            if most != resource.RLIM_INFINITY:
                limits[name] = min(soft, most), min(hard, most)
        return limits


# Limits of the kernel for many processes together


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A group of processes that may use so much together. Only root can make one."""

    name: str
    entrances: tuple[str, ...]
    """Files to write the number of a process to that shall belong to the group."""

    @classmethod
    def make(cls, limits: SandboxLimits) -> Cgroup | str:
        """Return a new group, or why there can be none. It is to be removed after its use."""
        name = new_name()
        places = {controller: place for place, controller in _controllers()}
        if not {"memory", "pids"} <= places.keys():
            return "the system has no cgroups that limit memory and processes"
        memory, pids = places["memory"] / name, places["pids"] / name
        folders = sorted({memory, pids})  # two hierarchies, or a single one
        try:
            for folder in folders:
                folder.mkdir()
            _write(pids / "pids.max", limits.processes)
            _limit_memory(memory, limits.memory)
        except OSError as error:
            remove_cgroups(name)
            return f"no cgroup can be made: {error.strerror}"
        return cls(name, tuple(str(folder / "cgroup.procs") for folder in folders))

    def remove(self) -> None:
        """Remove the group; nothing of it runs any more."""
        remove_cgroups(self.name)


def new_name() -> str:
    """Return a name that no other group has."""
    return f"wink-{os.urandom(8).hex()}"


def _limit_memory(folder: Path, limit: int) -> None:
    if (folder / "memory.max").exists():
        _write(folder / "memory.max", limit)
        swap, most = folder / "memory.swap.max", 0
    else:
        _write(folder / "memory.limit_in_bytes", limit)
        swap, most = folder / "memory.memsw.limit_in_bytes", limit  # of memory and swap together
    if swap.exists():
        _write(swap, most)


def _write(path: Path, value: int) -> None:
    path.write_text(f"{value}\n")


def _controllers() -> Iterator[tuple[Path, str]]:
    """Yield where groups are made for each controller that can limit them."""
    for place, options in cgroup_mounts():
        unified = place / "cgroup.controllers"
        if unified.exists():
            given = place / "cgroup.subtree_control"
            missing = {"memory", "pids"} & set(unified.read_text().split())
            missing -= set(given.read_text().split())
            with contextlib.suppress(OSError):  # then these are not given to groups below
                if missing:
                    given.write_text(" ".join(f"+{each}" for each in missing))
            options = given.read_text().split()
        for option in options:
            yield place, option


def cgroup_mounts() -> Iterator[tuple[Path, list[str]]]:
    """Yield where the hierarchies of groups are, and with which options they are mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            yield Path(before.split(" ")[4]), options.split(",")


_unused: set[str] = set()
"""Groups that are to be removed."""


def remove_cgroups(name: str) -> None:
    """Remove the groups of that name from every hierarchy, with those below.

    For the kernel a process belongs to its group for a moment after it has ended. What cannot be
    removed yet is tried again with the next, and once more when the program ends.
    """
    _sweep_at_exit()
    _unused.add(name)
    sweep_cgroups()


@cache
def _sweep_at_exit() -> None:
    atexit.register(sweep_cgroups, patience=1.0)


def sweep_cgroups(patience: float = 0.0) -> bool:
    """Remove the groups that are not used any more; tell whether all are gone."""
    until = SYSTEM_CLOCK.monotonic() + patience
    while True:
        for name in tuple(_unused):
            if all(_remove_tree(place / name) for place, _ in cgroup_mounts()):
                _unused.discard(name)
        if not _unused or SYSTEM_CLOCK.monotonic() >= until:
            return not _unused
        threading.Event().wait(0.005)


def _remove_tree(folder: Path) -> bool:
    for each, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(each)
    return not folder.exists()


# Limits that are kept by looking


class SandboxWatch:
    """Looks after a command: the disk, and where no cgroup does it, the memory and the processes.

    Args:
        places: Directories on the filesystems that the command's changes are written to.
        processes: Whether to look after what the command's processes are and have.
    """

    def __init__(self, limits: SandboxLimits, *, places: Sequence[Path], processes: bool) -> None:
        self._limits = limits
        self._processes = processes
        self._free = {place: _free(place) for place in places}
        self._free_files = {place: _free_files(place) for place in places}
        self._next = 0.0

    def __call__(self, running: Running) -> str | None:
        """Return why the command is to be killed, if it is."""
        began = SYSTEM_CLOCK.monotonic()
        if began < self._next and not running.ended:
            return None
        reason = self._look(running)
        ended = SYSTEM_CLOCK.monotonic()
        self._next = ended + max(LOOK, REST * (ended - began))
        return reason

    def _look(self, running: Running) -> str | None:
        limits = self._limits
        if self._floods(running.layer):
            return f"it wrote more than {in_words(limits.disk)} to the disk"
        if self._litters(running.layer):
            return f"it made or changed more than {limits.files:,} files"
        if not self._processes or running.ended:
            return None
        pids = family_of(running.pid)
        if len(pids) > limits.processes + WRAPPERS:
            return f"it had more than {limits.processes} processes"
        if _takes_more(pids, limits.memory):
            return f"it used more than {in_words(limits.memory)} of memory"
        return None

    def _floods(self, layer: Path | None) -> bool:
        """Tell whether the command has written too much.

        The free space tells at once when there is nothing to look for. Others write to the disk as
        well, so what the command wrote is then counted. It can have files that no name leads to:
        therefore nothing may use up half of what was free.
        """
        limit = self._limits.disk
        for place in self._free:
            free = _free(place)
            # Others may make room meanwhile: what the command writes must not hide behind that.
            before = self._free[place] = max(self._free[place], free)
            used = before - free
            if used > limit and (layer is None or used > before // 2 or _size(layer) > limit):
                return True
        return False

    def _litters(self, layer: Path | None) -> bool:
        """Tell whether the command has made too many files; what is counted is as for the bytes."""
        limit = self._limits.files
        for place in self._free_files:
            free, before = _free_files(place), self._free_files[place]
            if free is None or before is None:
                # This filesystem has no limit of its own, so it does not count.
                if layer is not None and _has_more(layer, limit):
                    return True
                continue
            before = self._free_files[place] = max(before, free)
            if before - free > limit and (layer is None or _has_more(layer, limit)):
                return True
        return False


def _free_files(place: Path) -> int | None:
    status = os.statvfs(place)
    return status.f_ffree if status.f_files else None


def _has_more(folder: Path, limit: int) -> bool:
    """Tell whether there is more in a layer, but for marks of what was removed."""
    count = 0
    pending = [str(folder)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif not (entry.is_file(follow_symlinks=False) or entry.is_symlink()):
                    continue
                count += 1
                if count > limit:
                    return True
    return False


def _free(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def _size(folder: Path) -> int:
    return sum(status.st_blocks * 512 for status in files_below(folder))


def family_of(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    family = [pid]
    for each in family:
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{each}/task"):
                children = _read(f"/proc/{each}/task/{thread}/children").split()
                family += map(int, children)
    return family


def _takes_more(pids: Sequence[int], limit: int) -> bool:
    """Tell whether processes have more in memory; what they share counts once, if it matters."""
    return sum(map(_resident, pids)) > limit and sum(map(_proportional, pids)) > limit


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


def in_words(size: float) -> str:
    """Return a number of bytes as people say it."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
