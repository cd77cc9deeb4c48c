"""A zygote: it waits for commands, and forks a process for each in namespaces of its own.

It has joined the cgroup with the limits, and so have the processes that it forks. It imports only
small modules. It runs one command at a time; its client is ``zygote.py``.
"""

from __future__ import annotations

import _socket
import ctypes
import marshal
import os
import resource
import select
import stat
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
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x2008_0522
SIGKILL, SIGPIPE, SIGXFSZ = 9, 13, 25
READY = b"ready"
IDLE = 600.0  # seconds without a command after which a zygote exits
# The parts of /proc that expose the whole machine, or change it.
HIDDEN = (
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "sched_debug",
    "sysrq-trigger",
    "timer_list",
)
AF_INET, SOCK_DGRAM, SIOCSIFFLAGS, IFF_UP = 2, 2, 0x8914, 1

libc = ctypes.CDLL(None, use_errno=True)


# The zygote


def serve(cgroup_files: list[str]) -> NoReturn:
    """Run one command after the other, until the client closes its socket, dies or needs none.

    The client sends the length of a plan together with descriptors, and then the plan. The answer
    is the number of the process, and its exit code when all processes of the command have ended.
    """
    for cgroup_file in cgroup_files:
        _write(cgroup_file, str(os.getpid()))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        _serve(_socket.socket(fileno=0))
    except OSError:
        _leave(cgroup_files)  # the client has died
    _leave(cgroup_files)


def _serve(client: _socket.socket) -> None:
    client.send(READY)
    while select.select([client], [], [], IDLE)[0]:
        head, parts, _, _ = client.recvmsg(4, 1024)
        if not head:
            return
        given = b"".join(data for _, _, data in parts)
        descriptors = struct.unpack(f"{len(given) // 4}i", given)
        [left] = struct.unpack("=I", head)
        plan = b""
        while len(plan) < left:
            more = client.recv(left - len(plan))
            if not more:
                return
            plan += more
        zygote = os.getpid()
        first = os.fork()
        if not first:
            client.close()
            _run(plan, descriptors, zygote)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            client.send(struct.pack("=i", first))
        finally:
            code = _outcome(first, client)
        client.send(struct.pack("=i", code))


def _outcome(first: int, client: _socket.socket) -> int:
    """Return the exit code of a process once all others that it left have ended as well.

    When the client writes or goes away, they are killed.
    """
    ended = os.pidfd_open(first)
    events = select.poll()
    events.register(ended, select.POLLIN)
    events.register(client, select.POLLIN)
    if (ended, select.POLLIN) not in events.poll():
        os.kill(first, SIGKILL)
    os.close(ended)
    code = -SIGKILL
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code if code >= 0 else 128 - code
        if pid == first:
            code = os.waitstatus_to_exitcode(status)


def _leave(cgroup_files: list[str]) -> NoReturn:
    """Remove the cgroups, which the client cannot do when it was killed, and exit."""
    for cgroup_file in cgroup_files:
        folder = os.path.dirname(cgroup_file)
        try:
            _write(os.path.join(os.path.dirname(folder), "cgroup.procs"), str(os.getpid()))
        except OSError:
            os._exit(1)
        for _ in range(200):  # a process stays in its cgroup for a moment after it has ended
            try:
                os.rmdir(folder)
                break
            except FileNotFoundError:
                break
            except OSError:
                select.select([], [], [], 0.005)
    os._exit(0)


def _run(plan: bytes, descriptors: tuple[int, ...], zygote: int) -> NoReturn:
    """Run the command of a plan, with the first three descriptors."""
    try:
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        main(zygote, descriptors[-1], **marshal.loads(plan))
    except OSError as error:
        said = f"The sandbox could not be set up: {error.strerror} {error.filename or ''}"
        os.write(2, f"{said.rstrip()}\n".encode(errors="replace"))
        os._exit(125)


def main(
    zygote: int,
    channel: int,
    *,
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    umask: int,
    host: tuple[int, int],
    user: tuple[int, int],
    overlay: tuple[str, str, str, bool] | None,
    mounts: list[tuple[str, str, str]],
    rules: bytes,
    rlimits: dict[str, tuple[int, int]],
    proxy: int | None,
) -> NoReturn:
    """Run the command, and exit with its code.

    Args:
        zygote: The parent; the command ends with it.
        host: The user and group of the command outside.
        user: The user and group of the command, as it sees them.
        overlay: What to mount over the workspace first: see ``Overlay.mount`` in ``overlay.py``.
        mounts: What the command sees: see ``Mount`` in ``engines.py``.
        rules: The seccomp program.
        channel: The last descriptor: a socket of the proxy, if there is one.
        proxy: The port of the proxy.
    """
    _write("/proc/self/oom_score_adj", "1000")
    os.umask(umask)
    if overlay is not None:
        host = _mount_overlay(*overlay, host)
    if overlay is None or not overlay[3]:
        _become(*host)
    _die_with_parent()
    if os.getppid() != zygote:
        os._exit(128 + SIGKILL)
    _unshare(*CLONE, user=user, outer=host)
    alive, held = os.pipe()
    first = os.fork()
    if first:
        os.close(alive)
        _end_as(first)
    # This is now process 1 of the namespace: when it ends, all others do.
    os.close(held)
    _die_with_parent()
    os.set_blocking(alive, False)
    try:
        os.read(alive, 1)
        os._exit(128 + SIGKILL)  # the parent had already ended
    except BlockingIOError:
        os.close(alive)
    _build(mounts)
    _check(libc.sethostname(b"sandbox", 7), "sethostname")
    _raise_loopback()
    if proxy is not None:
        _pass_listening(proxy, channel)
    for name, limit in rlimits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), limit)
    _drop_rights(rules)
    # The memory of this process may hold the plans of other commands.
    _prctl(PR_SET_DUMPABLE, 0)
    command = os.fork()
    if not command:
        _execute(argv, env, cwd)
    _end_as(command)


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, SIGKILL)


def _unshare(*what: str, user: tuple[int, int], outer: tuple[int, int]) -> None:
    """Enter new namespaces in which ``user`` is the user ``outer`` of the present one."""
    _check(libc.unshare(sum(CLONE[each] for each in what)), "unshare")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user[0]} {outer[0]} 1")
    _write("/proc/self/gid_map", f"{user[1]} {outer[1]} 1")


def _end_as(process: int) -> NoReturn:
    """Wait for a process, and for others that end before it; exit with its code."""
    while True:
        pid, status = os.wait()
        if pid == process:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _execute(argv: list[str], env: dict[str, str], cwd: str) -> NoReturn:
    name, problem = argv[0], FileNotFoundError(2, "No such file or directory")
    places = [""] if "/" in name else env.get("PATH", "").split(":")
    os.closerange(3, 1 << 20)
    os.setsid()
    for ignored in (SIGPIPE, SIGXFSZ):  # by Python
        libc.signal(ignored, None)
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


# Identity


def _become(uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        # Otherwise root owns its files in /proc from now on.
        _prctl(PR_SET_DUMPABLE, 1)


def _drop_rights(rules: bytes) -> None:
    """Drop for good every right that the command does not need."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        for capability in range(int(file.read()) + 1):
            _prctl(PR_CAPBSET_DROP, capability)
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    _check(libc.capset(header, bytes(24)), "capset")
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    buffer = ctypes.create_string_buffer(rules, len(rules))
    program = struct.pack("@HP", len(rules) // 8, ctypes.addressof(buffer))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)


# Mounts


def _mount_overlay(
    place: str, options: str, target: str, in_namespace: bool, host: tuple[int, int]
) -> tuple[int, int]:
    """Mount the overlay where only this command sees it; return what ``host`` is called now."""
    if in_namespace:
        _unshare("mount", "user", user=(0, 0), outer=host)
        host = 0, 0
    else:
        _check(libc.unshare(CLONE["mount"]), "unshare")
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    os.chdir(place)  # the options name directories in there
    _mount("overlay", target, "overlay", 0, options)
    return host


def _build(mounts: list[tuple[str, str, str]]) -> None:
    """Make a root directory of what the command may see, and switch to it.

    Meanwhile the old root is at ``/old``.
    """
    umask = os.umask(0o022)  # for the mount points; restored for the command
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
            _build_proc(target)
        else:
            _build_dev(target)


def _build_proc(proc: str) -> None:
    own = MS_NOSUID | MS_NODEV | MS_NOEXEC
    _mount("proc", proc, "proc", own)
    for name in hidden_in(proc):
        _bind("/old/dev/null", f"{proc}/{name}", MS_RDONLY | MS_NOSUID | MS_NODEV)
    # All of it: a driver may add more while the command runs.
    _mount("none", proc, None, MS_REMOUNT | MS_BIND | MS_RDONLY | own)


def hidden_in(proc: str) -> list[str]:
    """Return the entries that ``/proc`` has now and a command may not read.

    A process of root, without any capability, can still read what only root can.
    """
    found: list[str] = []
    for name in os.listdir(proc):
        if not name.isdigit():
            try:
                mode = os.lstat(f"{proc}/{name}").st_mode
            except FileNotFoundError:  # its driver has just gone
                continue
            if name in HIDDEN or (stat.S_ISREG(mode) and not mode & stat.S_IROTH):
                found.append(name)
    return found


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
    """Mount a file or directory in another place, with everything mounted below it."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb"):
            pass
    _mount(source, target, None, MS_BIND | MS_REC)
    # Read-only, nosuid and nodev have the same bits in mount_setattr.
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
    """Enable the loopback device: tests of servers use it."""
    link = libc.socket(AF_INET, SOCK_DGRAM, 0)
    _check(link, "socket")
    request = struct.pack("16sH22x", b"lo", IFF_UP)
    _check(libc.ioctl(link, SIOCSIFFLAGS, request), "ioctl")
    os.close(link)


def _pass_listening(port: int, channel: int) -> None:
    """Pass a listening socket of this network to the proxy, which is outside of it."""
    listening = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listening.bind(("127.0.0.1", port))
    listening.listen(128)
    given = struct.pack("i", listening.fileno())
    out = _socket.socket(fileno=channel)
    out.sendmsg([b"x"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, given)])
    out.close()
    listening.close()


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
    serve(sys.argv[1:])
