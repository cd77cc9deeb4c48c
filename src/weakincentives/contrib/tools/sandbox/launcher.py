"""A zygote: it waits for commands, and runs each in namespaces of its own.

It has joined the cgroup with the limits, and so have the processes that it forks. A sandbox is
*armed* before its command is known: a process 1 with all that every command sees mounted. What
remains to be done is to mount the workspace, to drop all rights, and to start the command. While a
command runs, the next sandbox is armed.

It imports only small modules. It runs one command at a time; its client is ``zygote.py``.
"""

from __future__ import annotations

import _socket
import ctypes
import gc
import marshal
import os
import resource
import select
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Identity = tuple[int, int] | None

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
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 428, 429, 430, 431, 432
SYS_MOUNT_SETATTR, SYS_PIDFD_SEND_SIGNAL = 442, 424
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC = 1, 4, 1, 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE = 0, 1, 6
MSG_CMSG_CLOEXEC = 0x4000_0000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x2008_0522
SIGINT, SIGKILL, SIGPIPE, SIGXFSZ = 2, 9, 13, 25
SIG_DFL, SIG_IGN = 0, 1
ENOSYS, EPERM, ESTALE = 38, 1, 116
POSIX_SPAWN_SETSIGDEF, POSIX_SPAWN_SETSID = 0x04, 0x80
READY, UNMOUNTED = b"ready", b"u"
IN_DELETE_SELF, IN_UNMOUNT = 0x400, 0x2000
IDLE = 600.0  # seconds without a command after which a zygote exits
REST = 0.002  # seconds before a sandbox is torn down
FAILED = 125  # the exit code if a sandbox could not be set up
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


class Ignored:
    """Goes on after an error of the system; ``contextlib`` would load a dozen modules."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, OSError)


# The zygote


class Sandbox:
    """A sandbox that waits for its command, or runs it.

    Args:
        static: What it is made of: see ``main``.
        others: Descriptors of the zygote that its processes must not keep.
    """

    def __init__(self, static: bytes, others: list[int]) -> None:
        self.answer = -1
        """Open until nothing is left of the command and its mounts."""
        self.watch = -1
        """Tells when its overlay is unmounted: see ``Unmounts``."""
        self._static = static
        mounts = marshal.loads(static)["mounts"]
        self._paths = [source for kind, source, _ in mounts if kind in ("read", "write")]
        self._shown = _identities(self._paths)  # first: what is replaced while it is built counts
        self.control, its = _socket.socketpair()
        zygote = os.getpid()
        self.first = os.fork()
        """The process that all others descend from."""
        if not self.first:
            self.control.close()
            for descriptor in others:
                os.close(descriptor)
            _prepare(_socket.socket(fileno=its.detach()), static, zygote)
        its.close()
        self.ended = os.pidfd_open(self.first)
        self._process_1: int | None = None

    @property
    def process_1(self) -> int:
        """Process 1 of its namespace, once all is mounted there; 0 if that has failed."""
        if self._process_1 is None:
            head = _read(self.control, 4)
            self._process_1 = struct.unpack("=i", head)[0] if len(head) == 4 else 0
        return self._process_1

    def is_for(self, static: bytes) -> bool:
        """Tell whether it is what a command needs, and shows the system as it is now."""
        alive = not select.select([self.ended], [], [], 0)[0]
        return alive and static == self._static and self._shown == _identities(self._paths)

    def start(self, given: list[int], fields: dict[str, Any]) -> int:
        """Start its command; return the process."""
        if not self.process_1:
            why = self.control.recv(4096)
            if why:  # else it has been killed
                self.fail(given, why)
            return self.first
        with Ignored():  # it has been killed
            _send(self.control, marshal.dumps(fields), given)
        return self.process_1

    def fail(self, given: list[int], why: bytes) -> None:
        """Answer that there is no sandbox, and end."""
        os.write(given[2], b"The sandbox could not be set up: " + why + b"\n")
        os.write(given[3], struct.pack("=i", FAILED))
        self.kill()

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        with Ignored():
            _check(libc.syscall(SYS_PIDFD_SEND_SIGNAL, self.ended, SIGKILL, None, 0), "kill")


class Unmounts:
    """Which overlays nothing uses any more, not even a program that a descriptor was passed to."""

    def __init__(self) -> None:
        self.fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._unmounted: set[int] = set()

    def watch(self, mount: int) -> int:
        """Return the number of a watch; negative if there can be none."""
        return int(libc.inotify_add_watch(self.fd, b"/proc/self/fd/%d" % mount, IN_DELETE_SELF))

    def has(self, watch: int) -> bool:
        """Tell, once, whether the overlay of a watch is unmounted."""
        with Ignored():  # there are no events
            data = os.read(self.fd, 1 << 16)
            for number, event in struct.iter_unpack("=iI8x", data):  # without names
                if event & IN_UNMOUNT:
                    self._unmounted.add(number)
        known = watch in self._unmounted
        self._unmounted.discard(watch)
        return known


class Zygote:
    """Runs one command after the other."""

    def __init__(self, client: _socket.socket) -> None:
        self._client = client
        self._unmounts = Unmounts()
        self._armed: Sandbox | None = None
        self._running: list[Sandbox] = []
        """The last one, and earlier ones whose namespaces are being torn down."""
        self._last = b""
        self._next: tuple[Sandbox, bytes] | None = None
        """A sandbox whose command is being started, and what to arm when it has."""

    def serve(self) -> None:
        """Serve until the client no longer does; then kill everything."""
        with Ignored():  # the client has died
            self._serve()
        self._kill()

    def _serve(self) -> None:
        """Serve until the client closes its socket, dies or needs no command for a while.

        The client sends the lengths of two parts of a plan with descriptors, and then the parts:
        see ``main``. The first descriptors are the standard ones of the command, and one where
        process 1 writes its exit code. This one is closed when nothing is left of the sandbox. The
        answer to the client is the process.
        """
        self._client.send(READY)
        while True:
            ended = [each.ended for each in self._running]
            starting = [] if self._next is None else [self._next[0].control]
            sources = [self._client, *ended, *starting]
            waiting = select.select(sources, [], [], None if ended else IDLE)[0]
            if self._next is not None and self._next[0].control in waiting:
                self._arm(self._next[1])
            for each in [each for each in self._running if each.ended in waiting]:
                self._reap(each)
            if self._client in waiting:
                head, given = _receive(self._client, 8)
                if not head:
                    break
                static, more = struct.unpack("=II", head)
                plan = _read(self._client, static + more)
                if len(plan) < static + more:
                    break
                self._start(plan[:static], given, marshal.loads(plan[static:]))
            elif not waiting:
                break

    def _start(self, static: bytes, given: list[int], fields: dict[str, Any]) -> None:
        armed, self._armed = self._armed, None
        if armed is not None and not armed.is_for(static):
            self._discard(armed)
            armed = None
        sandbox = armed or Sandbox(static, self._ours(given))
        pid, opened, problem = sandbox.first, list[int](), b""
        try:
            overlay = fields.pop("overlay")
            opened.append(_open_workspace(overlay, fields["root"]))
            sandbox.watch = -1 if overlay is None else self._unmounts.watch(opened[0])
            opened += [_open_tree(fields["nothing"], MS_RDONLY) for _ in fields["hidden"]]
        except OSError as error:
            problem = _words(error)
        if problem:
            sandbox.fail(given, problem)
        else:
            if armed is not None and not armed.process_1:
                # An earlier command had left no room for it.
                watch, armed.watch = armed.watch, -1
                self._discard(armed)
                sandbox = Sandbox(static, self._ours([*given, *opened]))
                sandbox.watch = watch
            pid = sandbox.start([*given, *opened], fields)
        sandbox.answer = given[3]
        self._running.append(sandbox)
        for descriptor in (*given[:3], *given[4:], *opened):
            os.close(descriptor)
        self._client.send(struct.pack("=i", pid))
        # Not for the first command of a kind: it may be the only one.
        self._next = (sandbox, static) if static == self._last else None
        self._last = static

    def _discard(self, sandbox: Sandbox) -> None:
        """Kill a sandbox that has no command; return when there is room for another."""
        sandbox.kill()
        self._running.append(sandbox)
        for each in tuple(self._running):
            select.select([each.ended], [], [])
            self._reap(each)

    def _arm(self, static: bytes) -> None:
        """Arm the next sandbox, now that it does not keep the command from being started."""
        self._next = None
        with Ignored():  # the command leaves no room for it
            self._armed = Sandbox(static, self._ours([]))

    def _ours(self, more: list[int]) -> list[int]:
        own = [self._client.fileno(), *more]
        own += [self._unmounts.fd] if self._unmounts.fd >= 0 else []
        for each in self._running:
            own += [each.ended, each.control.fileno(), *([each.answer] if each.answer >= 0 else [])]
        return own

    def _reap(self, sandbox: Sandbox) -> None:
        """Note that a sandbox has ended, once nothing is left of it."""
        code = os.waitstatus_to_exitcode(os.waitpid(sandbox.first, 0)[1])
        if code < 0:
            # It was killed. Process 1 ends with it, and all others with that; now it is our child.
            known = [each.first for each in (*self._running, self._armed) if each is not None]
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for orphan in set(map(int, file.read().split())).difference(known):
                    os.waitpid(orphan, 0)
        self._forget(sandbox)

    def _forget(self, sandbox: Sandbox) -> None:
        self._running.remove(sandbox)
        if self._next is not None and self._next[0] is sandbox:
            self._next = None
        os.close(sandbox.ended)
        sandbox.control.close()
        if sandbox.answer >= 0:
            if self._unmounts.has(sandbox.watch):
                with Ignored():  # the client does not ask
                    os.write(sandbox.answer, UNMOUNTED)
            os.close(sandbox.answer)

    def _kill(self) -> None:
        """Kill everything, and wait until nothing is left."""
        if self._armed is not None:
            self._running.append(self._armed)
            self._armed = None
        for each in self._running:
            each.kill()
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
        for each in tuple(self._running):
            self._forget(each)


def serve(has_root: bool, cgroup_files: list[str]) -> NoReturn:
    """Be a zygote.

    Args:
        has_root: Whether it may mount; otherwise it enters namespaces in which it may.
        cgroup_files: The files through which it joins its cgroups.
    """
    for cgroup_file in cgroup_files:
        _write(cgroup_file, str(os.getpid()))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if not has_root:
        _unshare("mount", "user", user=(0, 0), outer=(os.geteuid(), os.getegid()))
    _check_overlays()
    gc.disable()  # a collection would copy all pages that processes share
    gc.freeze()
    client = _socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)  # so that what is received later is never a standard descriptor
    Zygote(client).serve()
    _leave(cgroup_files)


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


def _identities(paths: list[str]) -> list[Identity]:
    """Return which files and directories of the host are at some paths."""
    found: list[Identity] = []
    for path in paths:
        try:
            found.append(_identity(os.stat(path)))
        except OSError:
            found.append(None)
    return found


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


# A sandbox


def _prepare(control: _socket.socket, static: bytes, zygote: int) -> NoReturn:
    """Be the first process of a sandbox; it fails in words."""
    try:
        _write("/proc/self/oom_score_adj", "1000")
        main(control, zygote, **marshal.loads(static))
    except OSError as error:
        control.send(struct.pack("=i", 0) + _words(error))
    os._exit(FAILED)


def main(
    control: _socket.socket,
    zygote: int,
    *,
    generation: int,
    host: tuple[int, int] | None,
    user: tuple[int, int],
    mounts: list[tuple[str, str, str]],
    rules: bytes,
    rlimits: dict[str, tuple[int, int]],
) -> NoReturn:
    """Arm a sandbox, wait for the command, run it, and exit with its code.

    Args:
        control: Where the command comes from.
        zygote: The parent; the sandbox ends with it.
        generation: Of the table of mounts: with another one, this sandbox is not used.
        host: The user and group of the command outside; None for those of a zygote without root.
        user: The user and group of the command, as it sees them.
        mounts: What every command sees: see ``Mount`` in ``environment.py``.
        rules: The seccomp program.
    """
    if host is None:
        host = 0, 0
    else:
        _become(*host)
    _die_with_parent()
    if os.getppid() != zygote:
        os._exit(128 + SIGKILL)
    _unshare(*CLONE, user=user, outer=host)
    alive, held = os.pipe()
    first = os.fork()
    if first:
        os.close(alive)
        with Ignored():  # it has been killed
            os.write(held, struct.pack("=i", first))
        control.close()
        _end_as(first)
    # This is now process 1 of the namespace: when it ends, all others do.
    os.close(held)
    _die_with_parent()
    own = os.read(alive, 4)
    os.set_blocking(alive, False)
    try:
        os.read(alive, 1)
        os._exit(128 + SIGKILL)  # the parent had already ended
    except BlockingIOError:
        os.close(alive)
    _build(mounts)
    proc = _entries("/proc")
    _check(libc.sethostname(b"sandbox", 7), "sethostname")
    _raise_loopback()
    for name, limit in rlimits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), limit)
    _drop_bounds()
    # The memory of this process may hold the plans of other commands.
    _prctl(PR_SET_DUMPABLE, 0)
    # A process 1 gets no signal of its namespace, unless it handles it.
    if libc.signal(SIGINT, ctypes.c_void_p(SIG_DFL)) == SIG_IGN:
        libc.signal(SIGINT, ctypes.c_void_p(SIG_IGN))
    control.send(own)
    head, given = _receive(control, 4)
    if not head:
        os._exit(128 + SIGKILL)  # the zygote has ended
    fields: dict[str, Any] = marshal.loads(_read(control, *struct.unpack("=I", head)))
    try:
        _attach(fields, given, proc)
        _drop_rights(rules)
        code = _run(fields, given, control)
    except OSError as error:
        os.write(given[2], b"The sandbox could not be set up: " + _words(error) + b"\n")
        code = FAILED
    for descriptor in given[4:]:
        os.close(descriptor)
    with Ignored():  # the client has died
        os.write(given[3], struct.pack("=i", code))
    select.select([], [], [], REST)  # the client goes on before the namespaces are torn down
    os._exit(code)


def _attach(fields: dict[str, Any], given: list[int], proc: set[str]) -> None:
    """Mount the workspace, and what has come since the rest was mounted."""
    for name in _entries("/proc") - proc:
        if name in hidden_in("/proc"):
            _bind("/dev/null", f"/proc/{name}", MS_RDONLY | MS_NOSUID | MS_NODEV)
    place, *others = fields["places"]
    hidden = fields["hidden"]
    workspace, *nothing = given[len(given) - 1 - len(hidden) :]
    os.makedirs(place, exist_ok=True)
    _move_mount(workspace, place)
    for path in fields["read_only"]:
        inside = f"{place}/{path}"
        _bind(inside, inside, MS_RDONLY | MS_NOSUID | MS_NODEV)
    for path, empty in zip(hidden, nothing, strict=True):
        _move_mount(empty, f"{place}/{path}")
    for other in others:
        os.makedirs(other, exist_ok=True)
        _mount(place, other, None, MS_BIND | MS_REC)
    _add("lock", "", "/")
    if fields["proxy"] is not None:
        _pass_listening(fields["proxy"], given[4])
        del given[4]


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
    os._exit(_exit_code(process))


def _exit_code(process: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == process:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _run(fields: dict[str, Any], given: list[int], control: _socket.socket) -> int:
    """Run the command, and return its exit code when nothing is left of it."""
    try:
        command = _started(fields["argv"], fields["env"], fields["cwd"], fields["umask"], given)
    except OSError as error:
        os.write(given[2], f"{fields['argv'][0]}: {error.strerror}\n".encode(errors="replace"))
        return 127 if isinstance(error, FileNotFoundError) else 126
    control.close()  # tells the zygote
    for descriptor in given[:3]:
        os.close(descriptor)
    code = _exit_code(command)
    with Ignored():  # there are none
        os.kill(-1, SIGKILL)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return code


def _started(argv: list[str], env: dict[str, str], cwd: str, umask: int, given: list[int]) -> int:
    """Start the command with the first three descriptors; return its process."""
    name, problem = argv[0], OSError(2, "No such file or directory")
    places = [""] if "/" in name else env.get("PATH", "").split(":")
    words = [os.fsencode(each) for each in argv]
    variables = [os.fsencode(f"{name}={value}") for name, value in env.items()]
    os.chdir(cwd)
    os.umask(umask)
    for place in places:
        path = os.path.join(place, name)
        try:
            os.stat(path)  # much cheaper than a process that finds nothing
            return _spawn(os.fsencode(path), words, variables, given[:3])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problem = error
    raise problem


def _spawn(path: bytes, argv: list[bytes], env: list[bytes], streams: list[int]) -> int:
    """Start a program in a session of its own: much faster than fork and exec.

    The function of ``os`` makes it ignore two signals that the C library uses itself.
    """
    attributes, actions = ctypes.create_string_buffer(1024), ctypes.create_string_buffer(1024)
    signals = sum(1 << (number - 1) for number in (SIGPIPE, SIGXFSZ, 32, 33))
    libc.posix_spawnattr_init(attributes)
    libc.posix_spawnattr_setsigdefault(attributes, struct.pack("=Q120x", signals))
    flags = ctypes.c_short(POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID)
    libc.posix_spawnattr_setflags(attributes, flags)
    libc.posix_spawn_file_actions_init(actions)
    for number, descriptor in enumerate(streams):
        libc.posix_spawn_file_actions_adddup2(actions, descriptor, number)
    process = ctypes.c_int()
    words = (ctypes.c_char_p * (len(argv) + 1))(*argv)
    variables = (ctypes.c_char_p * (len(env) + 1))(*env)
    problem = libc.posix_spawn(ctypes.byref(process), path, actions, attributes, words, variables)
    if problem:
        raise OSError(problem, os.strerror(problem))
    return process.value


# Identity


def _become(uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        # Otherwise root owns its files in /proc from now on.
        _prctl(PR_SET_DUMPABLE, 1)


def _drop_bounds() -> None:
    """Drop for good what programs could regain."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        for capability in range(int(file.read()) + 1):
            _prctl(PR_CAPBSET_DROP, capability)


def _drop_rights(rules: bytes) -> None:
    """Drop for good every right that the command does not need."""
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    _check(libc.capset(header, bytes(24)), "capset")
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    buffer = ctypes.create_string_buffer(rules, len(rules))
    program = struct.pack("@HP", len(rules) // 8, ctypes.addressof(buffer))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)


# Mounts


def _check_overlays() -> None:
    """Raise if the system, or what confines us, does not have the calls for overlays.

    Whether there can be one is another question: commands run without one, too.
    """
    context = libc.syscall(SYS_FSOPEN, b"overlay", FSOPEN_CLOEXEC)
    if context >= 0:
        os.close(context)
    elif ctypes.get_errno() in (ENOSYS, EPERM):
        _check(context, "fsopen")


def _open_workspace(overlay: tuple[str, str, bool, Identity] | None, root: str) -> int:
    """Open a mount of the workspace, or of an overlay of it, that is not attached anywhere.

    Args:
        overlay: See ``Overlay.mount`` in ``overlay.py``.
    """
    if overlay is None:
        return _open_tree(root, 0)
    place, options, is_staged, identity = overlay
    lowest = os.open(root, os.O_PATH | os.O_DIRECTORY)
    if identity is not None and identity != _identity(os.fstat(lowest)):
        os.close(lowest)
        raise OSError(ESTALE, "the workspace is not the directory any more that was opened")
    context = libc.syscall(SYS_FSOPEN, b"overlay", FSOPEN_CLOEXEC)
    try:
        _check(context, "fsopen")
        os.chdir(place)  # the options name directories in there
        # Without colons or commas, whatever the workspace is called.
        lower = f"{'staged:' if is_staged else ''}/proc/self/fd/{lowest}"
        for option in (f"lowerdir={lower}", *options.split(",")):
            name, _, value = option.partition("=")
            kind = FSCONFIG_SET_STRING if value else FSCONFIG_SET_FLAG
            text = value.encode() if value else None
            result = libc.syscall(SYS_FSCONFIG, context, kind, name.encode(), text, 0)
            _check(result, f"overlay {name}")
        result = libc.syscall(SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
        _check(result, "mount overlay")
        mounted = libc.syscall(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, MS_NOSUID | MS_NODEV)
        _check(mounted, "fsmount")
        return int(mounted)
    finally:
        os.chdir("/")
        os.close(lowest)
        if context >= 0:
            os.close(context)


def _open_tree(path: str, flags: int) -> int:
    """Open a copy of the mounts at a path that is not attached anywhere."""
    own = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    tree = libc.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), own)
    _check(tree, f"open_tree {path}")
    _set_attributes(tree, "", flags | MS_NOSUID | MS_NODEV)
    return int(tree)


def _move_mount(mount: int, target: str) -> None:
    result = libc.syscall(
        SYS_MOVE_MOUNT, mount, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH
    )
    _check(result, f"move_mount {target}")


def _set_attributes(directory: int, path: str, flags: int) -> None:
    """Set attributes of a mount, and of all mounts below; they are private then.

    Read-only, nosuid and nodev have the same bits as for ``mount``.
    """
    attributes = struct.pack("=QQQQ", flags, 0, MS_PRIVATE, 0)
    how = AT_RECURSIVE | (0 if path else AT_EMPTY_PATH)
    at = os.fsencode(path)
    result = libc.syscall(SYS_MOUNT_SETATTR, directory, at, how, attributes, 32)
    _check(result, f"mount_setattr {path}")


def _build(mounts: list[tuple[str, str, str]]) -> None:
    """Make a root directory of what the command may see, and switch to it.

    Meanwhile the old root is at ``/old``.
    """
    os.umask(0o022)  # for the mount points
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


def _add(kind: str, source: str, target: str) -> None:
    if kind == "read":
        _bind(f"/old{source}", target, MS_RDONLY | MS_NOSUID | MS_NODEV)
    elif kind == "write":
        _bind(f"/old{source}", target, MS_NOSUID | MS_NODEV)
    elif kind == "link":
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(source, target)
    elif kind == "lock":
        own = MS_NOSUID if target.endswith("/dev") else MS_NOSUID | MS_NODEV
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


def _entries(proc: str) -> set[str]:
    """Return what ``/proc`` has besides processes."""
    return {name for name in os.listdir(proc) if not name.isdigit()}


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
    _set_attributes(AT_FDCWD, target, flags)


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


def _send(to: _socket.socket, data: bytes, descriptors: list[int]) -> None:
    given = struct.pack(f"{len(descriptors)}i", *descriptors)
    to.sendmsg([struct.pack("=I", len(data))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, given)])
    to.sendall(data)


def _receive(source: _socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Return the head of a message, and its descriptors; nothing at the end."""
    head, parts, _, _ = source.recvmsg(size, 1024, MSG_CMSG_CLOEXEC)
    given = b"".join(data for _, _, data in parts)
    return head, list(struct.unpack(f"{len(given) // 4}i", given))


def _read(source: _socket.socket, size: int) -> bytes:
    """Return that many bytes, less at the end."""
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            break
        data += more
    return data


def _words(error: OSError) -> bytes:
    return f"{error.strerror} {error.filename or ''}".rstrip().encode(errors="replace")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    serve(sys.argv[1] == "root", sys.argv[2:])
