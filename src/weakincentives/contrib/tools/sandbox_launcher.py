"""A program that runs a command in namespaces of its own, where there is nothing else to do it.

Started for every command, handed over as text, so it imports little: no packages, and not what
takes long.
What to do comes in a file: see ``Namespaces`` in ``sandbox_engines.py``.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    class Plan(TypedDict):
        """What to run, and what it shall see."""

        argv: list[str]
        env: dict[str, str]
        cwd: str
        workspace: str
        inside: str
        """Where the command sees the workspace."""
        shields: list[tuple[str, str]]
        """What it sees read-only over parts of the workspace, and where."""
        host: tuple[int, int]
        """The user and group that the command's files belong to outside."""
        user: tuple[int, int]
        """The user and group that the command takes itself for."""
        binds: list[tuple[str, str]]
        """What of the system it can read, and where."""
        links: list[tuple[str, str]]
        """What links lead to, and their names."""
        covers: list[tuple[str, str]]
        """What it sees instead of parts of ``/proc``."""
        filter: str
        """A file with the program that says which system calls are refused."""
        entrances: list[str]
        """Where to write the number of the process, to come under limits for all processes."""
        rlimits: dict[str, tuple[int, int]]
        scratch: int


__all__ = ["main"]

CLONE = {
    "mount": 0x0002_0000,
    "cgroup": 0x0200_0000,
    "uts": 0x0400_0000,
    "ipc": 0x0800_0000,
    "user": 0x1000_0000,
    "pid": 0x2000_0000,
    "net": 0x4000_0000,
}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x4_0000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
SYS_MOUNT_SETATTR = 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x2008_0522
SIGKILL = 9
AF_INET, SOCK_DGRAM, SIOCSIFFLAGS, IFF_UP = 2, 2, 0x8914, 1

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

libc = ctypes.CDLL(None, use_errno=True)


def main(path: str) -> NoReturn:
    """Run the command, and end as it ended."""
    with open(path, "rb") as file:
        plan: Plan = marshal.load(file)
    with open(plan["filter"], "rb") as file:
        rules = file.read()
    for entrance in plan["entrances"]:
        _write(entrance, str(os.getpid()))
    _write("/proc/self/oom_score_adj", "1000")
    _become(plan["host"])
    _unshare(plan["host"], plan["user"])
    first = os.fork()
    if first:
        _end_as(first)
    # From here on this is the first process of the namespace: when it ends, all others do.
    _prctl(PR_SET_PDEATHSIG, SIGKILL)
    _build(plan)
    _check(libc.sethostname(b"sandbox", 7), "sethostname")
    _raise_loopback()
    _confine(plan, rules)
    command = os.fork()
    if not command:
        _execute(plan)
    _end_as(command)


def _end_as(process: int) -> NoReturn:
    """Wait for a process, and whatever else ends before it; end with its code."""
    while True:
        pid, status = os.wait()
        if pid == process:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _execute(plan: Plan) -> NoReturn:
    name, problem = plan["argv"][0], FileNotFoundError(2, "No such file or directory")
    places = [""] if "/" in name else plan["env"].get("PATH", "").split(":")
    os.closerange(3, 1 << 20)
    os.chdir(plan["cwd"])
    for place in places:
        try:
            os.execve(os.path.join(place, name), plan["argv"], plan["env"])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problem = error
    os.write(2, f"{name}: {problem.strerror}\n".encode(errors="replace"))
    os._exit(127 if isinstance(problem, FileNotFoundError) else 126)


# Who it is


def _become(host: tuple[int, int]) -> None:
    if os.geteuid() == 0:
        uid, gid = host
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        # Else what is its own in /proc belongs to root from now on.
        _prctl(PR_SET_DUMPABLE, 1)


def _unshare(host: tuple[int, int], user: tuple[int, int]) -> None:
    _check(libc.unshare(sum(CLONE.values())), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user[0]} {host[0]} 1")
    _write("/proc/self/gid_map", f"{user[1]} {host[1]} 1")


def _confine(plan: Plan, rules: bytes) -> None:
    """Give up for good every right that the command does not need."""
    for name, limit in plan["rlimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), limit)
    with open("/proc/sys/kernel/cap_last_cap") as file:
        for capability in range(int(file.read()) + 1):
            _prctl(PR_CAPBSET_DROP, capability)
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    _check(libc.capset(header, bytes(24)), "capset")
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    buffer = ctypes.create_string_buffer(rules, len(rules))
    program = struct.pack("@HP", len(rules) // 8, ctypes.addressof(buffer))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)


# What it sees


def _build(plan: Plan) -> None:
    """Make a root directory of what the command may see, and put it in the place of the real one.

    The old root is seen at ``/old`` meanwhile, whatever lies above the place of the new one.
    """
    umask = os.umask(0o022)  # what is made here is there to be seen; the command gets its own back
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    _check(libc.pivot_root(b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    _scratch("/new/tmp", plan["scratch"])  # first: what is to be read may lie below
    for source, target in plan["binds"]:
        _bind(f"/old{source}", f"/new{target}", MS_RDONLY | MS_NOSUID | MS_NODEV)
    for target, name in plan["links"]:
        os.makedirs(os.path.dirname(f"/new{name}"), exist_ok=True)
        os.symlink(target, f"/new{name}")
    _bind(f"/old{plan['workspace']}", f"/new{plan['inside']}", MS_NOSUID | MS_NODEV)
    for source, target in plan["shields"]:
        _bind(f"/old{source}", f"/new{target}", MS_RDONLY | MS_NOSUID | MS_NODEV)
    _build_proc(plan["covers"])
    _build_dev(plan["scratch"])
    _mount("none", "/new", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/new")
    _check(libc.pivot_root(b".", b"."), "pivot_root")
    _check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    os.umask(umask)


def _build_proc(covers: list[tuple[str, str]]) -> None:
    os.mkdir("/new/proc")
    _mount("proc", "/new/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for source, target in covers:
        _bind(f"/old{source}", f"/new{target}", MS_RDONLY | MS_NOSUID)


def _build_dev(scratch: int) -> None:
    os.mkdir("/new/dev")
    _mount("tmpfs", "/new/dev", "tmpfs", MS_NOSUID, "mode=755,size=64k")
    for name in DEVICES:
        _bind(f"/old/dev/{name}", f"/new/dev/{name}", MS_NOSUID)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/new/dev/{name}")
    os.mkdir("/new/dev/pts")
    _mount("devpts", "/new/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666")
    os.symlink("pts/ptmx", "/new/dev/ptmx")
    _scratch("/new/dev/shm", scratch)
    _mount("none", "/new/dev", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)


def _scratch(path: str, size: int) -> None:
    os.mkdir(path)
    _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={size}")


def _bind(source: str, target: str, flags: int) -> None:
    """Show a file or directory in another place, with all that is mounted below."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb"):
            pass
    _mount(source, target, None, MS_BIND | MS_REC)
    # Read-only, nosuid and nodev are the same bits for the call that changes whole trees.
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    path = os.fsencode(target)
    result = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, attributes, 32)
    _check(result, f"mount_setattr {target}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        options.encode(),
    )
    _check(result, f"mount {target}")


def _raise_loopback() -> None:
    """Let programs reach themselves: tests of servers do."""
    link = libc.socket(AF_INET, SOCK_DGRAM, 0)
    _check(link, "socket")
    request = struct.pack("16sH22x", b"lo", IFF_UP)
    _check(libc.ioctl(link, SIOCSIFFLAGS, request), "ioctl")
    os.close(link)


def _prctl(option: int, argument: int | bytes, more: bytes | None = None) -> None:
    first = ctypes.c_ulong(argument) if isinstance(argument, int) else argument
    _check(libc.prctl(option, first, 0 if more is None else more, 0, 0), "prctl")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        os.write(2, f"The sandbox could not be made: {error.strerror} {error.filename}\n".encode())
        os._exit(125)
