"""A program that runs a command in namespaces of its own, where nothing else is installed for it.

It is started for every command, from its text, so it imports little, and nothing that takes long.
Its plan comes in a file: see ``Namespaces`` in ``engines.py``.
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
    from typing import NoReturn

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

libc = ctypes.CDLL(None, use_errno=True)


def main(
    *,
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    host: tuple[int, int],
    user: tuple[int, int],
    mounts: list[tuple[str, str, str]],
    rules: str,
    entrances: list[str],
    rlimits: dict[str, tuple[int, int]],
) -> NoReturn:
    """Run the command, and end as it ended.

    Args:
        host: The user and group that the command's files belong to outside.
        user: The user and group that the command sees as its own.
        mounts: What the command sees: see ``Mount`` in ``engines.py``.
        rules: A file with the seccomp program.
        entrances: Files to write the number of the process to, so that it joins its cgroups.
    """
    with open(rules, "rb") as file:
        program = file.read()
    for entrance in entrances:
        _write(entrance, str(os.getpid()))
    _write("/proc/self/oom_score_adj", "1000")
    _become(*host)
    _check(libc.unshare(sum(CLONE.values())), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user[0]} {host[0]} 1")
    _write("/proc/self/gid_map", f"{user[1]} {host[1]} 1")
    first = os.fork()
    if first:
        _end_as(first)
    # From here on this is the first process of the namespace: when it ends, all others do.
    _prctl(PR_SET_PDEATHSIG, SIGKILL)
    _build(mounts)
    _check(libc.sethostname(b"sandbox", 7), "sethostname")
    _raise_loopback()
    for name, limit in rlimits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), limit)
    _give_up_rights(program)
    command = os.fork()
    if not command:
        _execute(argv, env, cwd)
    _end_as(command)


def _end_as(process: int) -> NoReturn:
    """Wait for a process, and others that end before it; end with its code."""
    while True:
        pid, status = os.wait()
        if pid == process:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _execute(argv: list[str], env: dict[str, str], cwd: str) -> NoReturn:
    name, problem = argv[0], FileNotFoundError(2, "No such file or directory")
    places = [""] if "/" in name else env.get("PATH", "").split(":")
    os.closerange(3, 1 << 20)
    os.chdir(cwd)
    for place in places:
        try:
            os.execve(os.path.join(place, name), argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problem = error
    os.write(2, f"{name}: {problem.strerror}\n".encode(errors="replace"))
    os._exit(127 if isinstance(problem, FileNotFoundError) else 126)


# Who it is


def _become(uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        # Otherwise its own files in /proc belong to root from now on.
        _prctl(PR_SET_DUMPABLE, 1)


def _give_up_rights(rules: bytes) -> None:
    """Give up for good every right that the command does not need."""
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


def _build(mounts: list[tuple[str, str, str]]) -> None:
    """Make a root directory of what the command may see, and put it in the place of the real one.

    The old root is seen at ``/old`` meanwhile, whatever lies above the place of the new one.
    """
    umask = os.umask(0o022)  # for the mount points; the command gets its own back
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    _check(libc.pivot_root(b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for kind, source, target in mounts:
        _add(kind, source, f"/new{target}")
    os.chdir("/new")
    _check(libc.pivot_root(b".", b"."), "pivot_root")
    _check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    os.umask(umask)


def _add(kind: str, source: str, target: str) -> None:
    if kind == "read":
        _bind(f"/old{source}", target, MS_RDONLY | MS_NOSUID | MS_NODEV)
    elif kind == "write":
        _bind(f"/old{source}", target, MS_NOSUID | MS_NODEV)
    elif kind == "link":
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(source, target)
    elif kind == "lock":
        own = MS_NOSUID if target == "/new/dev" else MS_NOSUID | MS_NODEV
        _mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | own)
    else:
        os.mkdir(target)
        if kind == "scratch":
            _mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={source}")
        elif kind == "proc":
            _mount("proc", target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        else:
            _build_dev(target)


def _build_dev(dev: str) -> None:
    _mount("tmpfs", dev, "tmpfs", MS_NOSUID, "mode=755,size=64k")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        _bind(f"/old/dev/{name}", f"{dev}/{name}", MS_NOSUID)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{dev}/{name}")
    os.mkdir(f"{dev}/pts")
    _mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666")
    os.symlink("pts/ptmx", f"{dev}/ptmx")


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
        with open(sys.argv[1], "rb") as plan:
            arguments = marshal.load(plan)
        main(**arguments)
    except OSError as error:
        os.write(2, f"The sandbox could not be made: {error.strerror} {error.filename}\n".encode())
        os._exit(125)
