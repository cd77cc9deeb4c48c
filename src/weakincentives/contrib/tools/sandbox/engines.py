"""Sandboxes: commands run on a workspace, and can see, change and use up nothing else.

A sandbox is a way to wrap a command: with podman, with bubblewrap, or in namespaces of our own. The
workspace's own ``HostFilesystem.run`` runs it, so rollback, private views and the history work as
for every command.
"""

from __future__ import annotations

import csv
import errno
import io
import marshal
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol, cast, get_args

from weakincentives.contrib.tools.sandbox import byte_code
from weakincentives.contrib.tools.sandbox.limits import (
    SandboxLimits,
    SandboxWatch,
    cgroup,
    new_name,
    remove_cgroups,
)
from weakincentives.contrib.tools.sandbox.seccomp import container_profile, filter_program
from weakincentives.errors import CommandFailed, SandboxUnavailable, ToolValidationError
from weakincentives.filesystem import CommandResult, HostFilesystem
from weakincentives.filesystem.commands import DEFAULT_OUTPUT_LIMIT, Command
from weakincentives.filesystem.overlay import remove_tree
from weakincentives.filesystem.protocol import Parts
from weakincentives.state import program, source_of

SandboxChoice = Literal["auto", "podman", "bubblewrap", "namespaces", "none"]
EngineName = Literal["podman", "bubblewrap", "namespaces", "none"]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLEAN = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}
"""A command's environment besides what it is given; nothing of ours."""

TRIAL = 60.0
"""Seconds that the first command may take; podman can be slow on a busy machine."""

INSIDE = "/workspace"
"""Where a command sees the workspace: the file tools call it the same."""

USER = 1000, 1000
"""The user and group that a command sees as its own, whatever they are outside."""

ENV = "/.wink-env"
ENTER = f". {ENV}"
"""How a command's environment gets into the sandbox: see ``Kit.folder``."""

LAUNCHER = byte_code(source_of(__file__, "launcher.py"))

# Joins the groups named up to `--`, and makes the process the first to be killed when memory runs
# out. Descriptor 8 is bwrap's own arguments, 9 the seccomp filter.
PRELUDE = """
options=$1 filter=$2
shift 2
while [ "$1" != -- ]; do
    echo $$ >"$1" || exit 125
    shift
done
shift
echo 1000 >/proc/self/oom_score_adj
exec "$@" 8<"$options" 9<"$filter"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A command to wrap."""

    argv: Sequence[str]
    workspace: Path
    cwd: str
    """Where it starts, as it sees it."""
    env: Mapping[str, str]
    """All of its environment. Never that of a process outside, which it could make do anything."""
    owner: tuple[int, int]
    """The user and group that its files belong to outside."""
    limits: SandboxLimits
    read_only: Sequence[str] = ()
    """Paths in the workspace, relative to its root, that it sees and cannot change."""
    hidden: Sequence[str] = ()
    """Directories in the workspace that it sees empty."""


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What to start in the place of a command."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """The environment of the program that confines the command."""
    watched: bool = False
    """Whether its processes and their memory need to be watched."""


class SandboxEngine(Protocol):
    """A program, or a feature of the kernel, that confines commands."""

    @property
    def name(self) -> EngineName: ...

    def missing(self) -> str | None:
        """Return why it need not even be tried, if so."""
        ...

    def wrapped(self, order: Order) -> AbstractContextManager[Wrapped]:
        """Give what to start; nothing is left of it afterwards."""
        ...


# What a command sees, described once and rendered by each engine


Mount = tuple[Literal["read", "write", "link", "scratch", "proc", "dev", "lock"], str, str]
"""What is seen at a path (the last part): a ``read``-only or ``write``-able file or directory of
the host, a ``link`` to somewhere, an empty ``scratch`` directory with so many bytes, ``/proc`` or
``/dev``; ``lock`` makes the directory itself read-only, when everything else in it is mounted."""

_TOP = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
_ETC = (
    "alternatives", "ca-certificates", "debian_version", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "os-release", "pki/tls/certs",
    "protocols", "services", "ssl/certs",
)  # fmt: skip
"""The parts of ``/etc`` that programs need; the rest is hidden."""

_HIDDEN = {"kcore", "key-users", "keys", "kmsg", "sched_debug", "sysrq-trigger", "timer_list"}
"""The parts of ``/proc`` that tell about the whole machine, or change it."""

_FILES = {
    "passwd": "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}


class Kit:
    """What engines need on disk: the files of a small system, and the seccomp filters.

    Args:
        read_only: Directories of the host that commands see besides its programs.
    """

    def __init__(self, read_only: Sequence[str | os.PathLike[str]] = ()) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="wink-", dir=_temporary()))
        weakref.finalize(self, remove_tree, self.place)
        self.place.chmod(0o711)  # as root, commands of other users get here
        self.filter = self.place / "filter"
        self.filter.write_bytes(filter_program() or b"")
        self.profile = self.place / "profile"
        self.profile.write_text(container_profile())
        for name, text in _FILES.items():
            (self.place / name).write_text(text)
        for file in self.place.iterdir():
            file.chmod(0o644)  # whatever the caller's umask: other users' commands read them
        self._nothing = self.place / "nothing"
        self._nothing.mkdir()
        self.system: list[Mount] = [
            ("link", "/tmp", "/var/tmp"),
            *_programs(),
            *(("read", str(self.place / name), f"/etc/{name}") for name in _FILES),
            *(("read", os.path.abspath(path), os.path.abspath(path)) for path in read_only),
        ]
        """The parts of the host's system that a command sees."""
        self._proc = list(_proc_covers())

    def workspace(self, order: Order) -> list[Mount]:
        """Return the workspace, and what covers protected parts of it."""
        return [
            ("write", str(order.workspace), INSIDE),
            *(
                ("read", str(order.workspace / path), f"{INSIDE}/{path}")
                for path in order.read_only
            ),
            *(("read", str(self._nothing), f"{INSIDE}/{path}") for path in order.hidden),
        ]

    def mounts(self, order: Order, *more: Mount) -> list[Mount]:
        """Return all that a command sees, in the order to mount it."""
        scratch = str(order.limits.scratch)
        return [
            ("scratch", scratch, "/tmp"),  # first: the host's directories may lie below it
            *self.system,
            *more,
            ("proc", "proc", "/proc"),
            *self._proc,
            ("dev", "dev", "/dev"),
            ("scratch", scratch, "/dev/shm"),
            ("lock", "", "/dev"),
            *self.workspace(order),
            ("lock", "", "/"),
        ]

    @contextmanager
    def folder(self, order: Order, **files: bytes) -> Generator[Path]:
        """Give a directory for what starts one command, with these files. Only we can write there.

        As root we read back what is there, so not even the user who the command runs as may.
        The file ``env`` sets the command's environment once its limits are in force: earlier, it
        could make the programs around it do something else, and in an argument everybody on the
        machine could read it.
        """
        # Short, because podman takes no long names.
        folder = self.place / os.urandom(4).hex()
        folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            folder.chmod(0o711)  # the environment is read there by the command's own user
        exports = (f"export {name}={shlex.quote(value)}\n" for name, value in order.env.items())
        try:
            env = "".join(exports).encode(errors="surrogateescape")
            _write(folder / "env", env, order.owner)
            for name, data in files.items():
                _write(folder / name, data)
            yield folder
        finally:
            remove_tree(folder)


def _programs() -> Iterator[Mount]:
    """Yield the host's programs, and what they need."""
    for top in _TOP:
        if os.path.islink(top):
            yield "link", os.readlink(top), top
        elif os.path.isdir(top):
            yield "read", top, top
    for name in _ETC:
        source = os.path.realpath(f"/etc/{name}")
        if os.path.exists(source):
            yield "read", source, f"/etc/{name}"


def _proc_covers() -> Iterator[Mount]:
    """Yield what covers the parts of ``/proc`` that a command may not see or write.

    A process of root's has the right to write there, even without any capability.
    """
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name in _HIDDEN:
                yield "read", "/dev/null", entry.path
            elif entry.name.isdigit() or entry.is_symlink():
                continue
            elif entry.is_dir() or entry.stat().st_mode & 0o222:
                yield "read", entry.path, entry.path


def _cgroup(order: Order) -> AbstractContextManager[tuple[str, ...]]:
    """Give the entrances to a group with the limits, if they need one to be enforced.

    The kernel limits the processes of a user in a namespace itself, for every user but root.
    """
    return cgroup(order.limits) if os.geteuid() == 0 else nullcontext(())


def _temporary() -> str:
    """Return where temporary files go: for root, where commands of other users can get to."""
    places = [tempfile.gettempdir(), *(["/tmp", "/var/tmp"] if os.geteuid() == 0 else [])]
    for place in map(Path, places):
        with suppress(OSError):
            if all(each.stat().st_mode & 0o001 for each in (place, *place.absolute().parents)):
                return str(place)
    return places[0]


def _write(path: Path, data: bytes, owner: tuple[int, int] | None = None) -> None:
    """Write a file that only we, or the owner, can read."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with open(fd, "wb") as file:
        file.write(data)
        if owner is not None and os.geteuid() == 0:
            os.fchown(fd, *owner)


def _outside() -> dict[str, str]:
    """Return the environment of the programs that confine a command."""
    return {"PATH": PATH, "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}


def is_missing(program: str) -> str | None:
    """Return the reason not to use a program, if it is not installed."""
    return None if shutil.which(program, path=PATH) else f"{program} is not installed"


# The engines


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Confines commands with ``bwrap``."""

    kit: Kit
    name: EngineName = "bubblewrap"

    def missing(self) -> str | None:
        return is_missing("bwrap") or is_missing("prlimit") or is_missing("setpriv")

    @contextmanager
    def wrapped(self, order: Order) -> Generator[Wrapped]:
        with _cgroup(order) as entrances, self.kit.folder(order) as folder:
            words = self._options(order, folder)
            _write(folder / "options", b"".join(os.fsencode(word) + b"\0" for word in words))
            limits = order.limits.rlimits(memory=not entrances)
            argv = ["sh", "-c", PRELUDE, "wink", str(folder / "options"), str(self.kit.filter)]
            argv += [*entrances, "--"]
            uid, gid = order.owner
            ours = *os.getresuid(), *os.getresgid(), *os.getgroups()
            if os.geteuid() == 0 and {uid, gid, *ours} != {0}:
                argv += ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--"]
            argv += ["bwrap", "--args", "8", "--", "prlimit"]
            argv += [f"--{name}={soft}:{hard}" for name, (soft, hard) in limits.items()]
            argv += ["--", "/bin/sh", "-c", f'{ENTER}; exec "$@"', "sh", *order.argv]
            yield Wrapped(argv, _outside(), watched=not entrances)

    def _options(self, order: Order, folder: Path) -> list[str]:
        options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
        options += ["--uid", str(USER[0]), "--gid", str(USER[1])]
        options += ["--hostname", "sandbox", "--clearenv"]
        for name, value in CLEAN.items():
            options += ["--setenv", name, value]
        filtered = self.kit.filter.stat().st_size > 0
        options += ["--seccomp", "9"] if filtered else ["--disable-userns"]
        for kind, source, target in self.kit.mounts(order, ("read", str(folder / "env"), ENV)):
            if kind == "read":
                options += ["--ro-bind", source, target]
            elif kind == "write":
                options += ["--bind", source, target]
            elif kind == "link":
                options += ["--symlink", source, target]
            elif kind == "scratch":
                options += ["--size", source, "--tmpfs", target]
            elif kind == "lock":
                options += ["--remount-ro", target]
            else:
                options += [f"--{kind}", target]
        return [*options, "--chdir", order.cwd]


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Confines commands with a program of our own; it needs Linux 5.12 and nothing else."""

    kit: Kit
    name: EngineName = "namespaces"

    def missing(self) -> str | None:
        if not self.kit.filter.stat().st_size:
            return f"its filter of system calls does not know this machine, {os.uname().machine}"
        return None

    @contextmanager
    def wrapped(self, order: Order) -> Generator[Wrapped]:
        with _cgroup(order) as entrances:
            plan = {
                "argv": list(order.argv),
                "env": dict(order.env),
                "cwd": order.cwd,
                "host": order.owner,
                "user": USER,
                "mounts": self.kit.mounts(order),
                "rules": str(self.kit.filter),
                "entrances": entrances,
                "rlimits": order.limits.rlimits(memory=not entrances),
            }
            with self.kit.folder(order, plan=marshal.dumps(plan)) as folder:
                argv = program(LAUNCHER, str(folder / "plan"))
                yield Wrapped(argv, _outside(), watched=not entrances)


# Podman reads these from a file only. Without them, killed containers would leave locks behind.
SETTINGS = """
[engine]
lock_type = "file"
events_logger = "none"
tmp_dir = "{place}/tmp"
"""


@dataclass(frozen=True, slots=True)
class Podman:
    """Confines commands in a container; podman keeps its state in a directory of the command's.

    Without an image the container sees the host's programs, as with the other engines.
    """

    kit: Kit
    image: str | None = None
    name: EngineName = "podman"

    def missing(self) -> str | None:
        missing = is_missing("podman") or is_missing("unshare")
        if missing is not None:
            return missing
        if os.geteuid() != 0 and not os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
            return "without root it limits memory and processes with cgroup v2 only"
        if not self.kit.profile.stat().st_size:
            return "its own list of system calls, seccomp.json, is missing or cannot be read"
        return None

    @contextmanager
    def wrapped(self, order: Order) -> Generator[Wrapped]:
        group = new_name()
        try:
            with self.kit.folder(order) as place:
                settings = place / "containers.conf"
                _write(settings, SETTINGS.format(place=place).encode())
                env = {
                    "CONTAINERS_CONF": str(settings),
                    "XDG_RUNTIME_DIR": str(place),
                    **_outside(),
                }
                argv = [*self._podman(place), "run", *self._options(order, group)]
                argv += _binds([*self.kit.workspace(order), ("read", str(place / "env"), ENV)])
                argv += self._root(place) if self.image is None else [self.image]
                # The first process of a container should be a shell, which does not mind it.
                argv += ["/bin/sh", "-c", f'{ENTER}; "$@"; exit $?', "sh", *order.argv]
                yield Wrapped(argv, env)
        finally:
            remove_cgroups(group)

    def _podman(self, place: Path) -> list[str]:
        runtime = "crun" if is_missing("runc") else "runc"
        # What it mounts, and what it starts beside the container, goes when it has ended. Without
        # root it sees to that itself.
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
        return [
            *(apart if os.geteuid() == 0 else []),
            "podman",
            f"--root={place}/storage",
            f"--runroot={place}/run",
            f"--runtime={runtime}",
            f"--runtime-flag=root={place}/runtime",
            "--storage-driver=overlay",
            # The user's images, without writing to their store.
            *([f"--storage-opt=additionalimagestore={_image_store()}"] if self.image else []),
            "--cgroup-manager=cgroupfs",
            "--log-level=fatal",
        ]

    def _options(self, order: Order, group: str) -> list[str]:
        limits = order.limits
        options = ["--rm", "--interactive", "--quiet", "--pull=never", "--log-driver=none"]
        options += ["--network=none", "--no-hosts", "--hostname=sandbox", "--unsetenv-all"]
        options += ["--cap-drop=all", "--security-opt=no-new-privileges"]
        options += [f"--security-opt=seccomp={self.kit.profile}"]
        options += ["--read-only", "--read-only-tmpfs=false", f"--shm-size={limits.scratch}"]
        options += [f"--tmpfs=/tmp:rw,nosuid,nodev,mode=1777,size={limits.scratch}"]
        options += [f"--cgroup-parent=/{group}", f"--pids-limit={limits.processes}"]
        options += [f"--memory={limits.memory}", f"--memory-swap={limits.memory}"]
        options += ["--oom-score-adj=1000", f"--workdir={order.cwd}", *self._identity(order)]
        for name, (soft, hard) in limits.rlimits(memory=False).items():
            options += [f"--ulimit={name}={soft}:{hard}"]
        return options

    def _identity(self, order: Order) -> list[str]:
        """Return who the command is: the workspace's owner, and nobody else."""
        uid, gid = order.owner
        if self.image is not None:
            # In a namespace of users its files would belong to nobody.
            return [f"--user={uid}:{gid}"] if os.geteuid() == 0 else []
        if os.geteuid() != 0:
            uid = gid = 0  # the user's own number in podman's namespace
        return [
            *(f"--uidmap={each}" for each in (f"0:100000:{USER[0]}", f"{USER[0]}:{uid}:1")),
            *(f"--gidmap={each}" for each in (f"0:100000:{USER[1]}", f"{USER[1]}:{gid}:1")),
            f"--user={USER[0]}:{USER[1]}",
        ]

    def _root(self, place: Path) -> list[str]:
        """Make a root directory out of the host's system, and return how to use it."""
        root = place / "root"
        for name in ("dev", "proc", "sys", "tmp", "var", INSIDE[1:]):
            (root / name).mkdir(parents=True)
        for name in (ENV[1:], "etc/hostname", "etc/resolv.conf", "run/.containerenv"):
            _mount_point("", root / name)
        for kind, source, target in self.kit.system:
            if kind == "read":
                _mount_point(source, root / target[1:])
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # whatever the caller's umask
        (root / "tmp").chmod(0o1777)
        for kind, source, target in self.kit.system:
            if kind == "link":
                (root / target[1:]).symlink_to(source)
        return [*_binds(self.kit.system), "--rootfs", str(root)]


@cache
def _image_store() -> str:
    """Return where podman keeps the user's images."""
    ask = ["podman", "info", "--format={{.Store.GraphRoot}}"]
    return subprocess.run(ask, env=_outside(), capture_output=True, text=True).stdout.strip()


def _mount_point(source: str, target: Path) -> None:
    """Make something to mount a source on; the container may not be allowed to."""
    if os.path.isdir(source):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _binds(mounts: Sequence[Mount]) -> Iterator[str]:
    """Yield podman's options for files and directories of the host."""
    for kind, source, target in mounts:
        if kind in ("read", "write"):
            # The option is a line of comma-separated values: names with commas are quoted.
            line = io.StringIO()
            words = ["type=bind", f"src={source}", f"dst={target}"]
            csv.writer(line).writerow([*words, "ro=true"] if kind == "read" else words)
            yield f"--mount={line.getvalue().strip()}"


@dataclass(frozen=True, slots=True)
class Unconfined:
    """No sandbox: only for those who ask for it by name."""

    name: EngineName = "none"

    def missing(self) -> str | None:
        return None

    @contextmanager
    def wrapped(self, order: Order) -> Generator[Wrapped]:
        yield Wrapped(order.argv, order.env, watched=True)


# Finding one, and running commands in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Runs commands on a workspace; made by :func:`find_sandbox`."""

    engine: SandboxEngine
    limits: SandboxLimits
    python: str
    """The Python that commands find."""
    passed_over: tuple[tuple[EngineName, str], ...] = ()
    """The engines that come before this one, and why they are not used."""

    @property
    def name(self) -> EngineName:
        return self.engine.name

    def run(
        self,
        fs: HostFilesystem,
        argv: Sequence[str] | str,
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> CommandResult:
        """Run a command on the workspace; its changes are kept only if it exits with 0.

        Args:
            argv: The program and its arguments; one string is run by ``sh -c``.
            cwd: Where to start it, as the filesystem calls it.
            env: Variables to add to the bare minimum that it finds in its environment.
            stdin: Its input; nothing by default.
            timeout: Seconds after which it is killed.
            output_limit: Bytes of each of its outputs to keep; the middle of more is left out.
        """
        words = Command.of(argv).argv
        inside = str(PurePosixPath(INSIDE, fs.normalize(cwd)))
        given = {**self._path(), "PWD": inside, **_checked(env or {})}
        order = replace(
            self._order(words, fs.root, given),
            cwd=inside,
            read_only=_present(fs, fs.reserved.trees),
            hidden=_present(fs, fs.reserved.hidden),
        )
        with self.engine.wrapped(order) as wrapped:
            watch = SandboxWatch(self.limits, places=(fs.store, fs.root), processes=wrapped.watched)
            try:
                result = fs.run(
                    wrapped.argv,
                    cwd=cwd,
                    env=wrapped.env,
                    stdin=stdin,
                    timeout=timeout,
                    output_limit=output_limit,
                    check=True,
                    watch=watch,
                )
            except CommandFailed as error:
                result = cast(CommandResult, error.result)
        return replace(result, argv=words)

    def _order(self, argv: Sequence[str], workspace: Path, env: Mapping[str, str]) -> Order:
        return Order(
            argv=argv,
            workspace=workspace,
            cwd=INSIDE,
            env={**CLEAN, **env},
            owner=_owner(workspace),
            limits=self.limits,
        )

    def _path(self) -> Mapping[str, str]:
        """Let commands find a Python of ours by its name, where the system has none."""
        place = os.path.dirname(self.python)
        return {"PATH": f"{CLEAN['PATH']}:{place}"} if place else {}

    def problem(self) -> str | None:
        """Return why no command can be run here, if so; it is tried."""
        missing = self.engine.missing()
        if missing is not None:
            return missing
        with tempfile.TemporaryDirectory(prefix="wink-") as folder:
            # It works if the command can write there, and cannot see it by its own name.
            test = ["/bin/sh", "-c", 'test -w . && test ! -e "$0"', folder]
            try:
                with self.engine.wrapped(self._order(test, Path(folder), {})) as wrapped:
                    tried = subprocess.run(
                        wrapped.argv, env=wrapped.env, capture_output=True, timeout=TRIAL
                    )
            except (OSError, subprocess.TimeoutExpired, SandboxUnavailable) as error:
                return str(error)
        if tried.returncode == 0:
            return None
        said = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return said or f"a first command ended with {tried.returncode}"


def _present(fs: HostFilesystem, trees: Iterable[Parts]) -> list[str]:
    """Return the protected paths that can be mounted over themselves; a link cannot."""
    paths = ["/".join(parts) for parts in trees if parts]
    return [
        path
        for path in paths
        if os.path.exists(fs.root / path) and not (fs.root / path).is_symlink()
    ]


def _checked(env: Mapping[str, str]) -> Mapping[str, str]:
    for name in env:
        if not (name.isascii() and name.isidentifier()):
            raise ToolValidationError(
                f"{name!r} cannot be the name of a variable: use letters, digits and underscores"
            )
        if "\0" in env[name]:
            raise ToolValidationError(f"the variable {name} cannot contain a NUL character")
    return env


def _owner(workspace: Path) -> tuple[int, int]:
    """Return who the command is outside: root does not stay root where others own the files."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    status = os.stat(workspace)
    return status.st_uid, status.st_gid


def find_sandbox(
    choice: SandboxChoice = "auto",
    *,
    limits: SandboxLimits | None = None,
    image: str | None = None,
    read_only: Sequence[str | os.PathLike[str]] = (),
) -> Sandbox:
    """Return the first sandbox that works here: podman, bubblewrap, then namespaces of our own.

    Raises SandboxUnavailable, with the reason for each, where none does.

    Args:
        choice: One of them by its name; ``"none"`` runs commands without any.
        image: An image of podman's to run commands in; the host's programs without one.
        read_only: Directories of the host that commands can read besides its programs.
    """
    if choice not in get_args(SandboxChoice):
        raise ValueError(f"sandbox must be one of {get_args(SandboxChoice)}, got {choice!r}")
    if image is not None and choice not in ("auto", "podman"):
        raise ValueError(f"an image needs podman, but the sandbox is {choice!r}")
    for path in read_only:
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, "nothing to show in the sandbox", str(path))
    if choice != "none" and sys.platform != "linux":
        raise _unavailable(f"they need Linux, this is {sys.platform}")
    python = "python3"
    if image is None and is_missing(python):
        python, read_only = os.path.realpath(sys.executable), (*read_only, sys.base_prefix)
    passed_over: list[tuple[EngineName, str]] = []
    for engine in _engines(choice, image, read_only):
        sandbox = Sandbox(
            engine=engine,
            limits=limits or SandboxLimits(),
            python=python,
            passed_over=tuple(passed_over),
        )
        problem = None if choice == "none" else sandbox.problem()
        if problem is None:
            return sandbox
        passed_over.append((engine.name, problem))
    raise _unavailable("; ".join(f"{name}: {reason}" for name, reason in passed_over))


def _unavailable(reason: str) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"No sandbox works here, so no command is run ({reason}). "
        "sandbox='none' would run them without one"
    )


def _engines(
    choice: SandboxChoice, image: str | None, read_only: Sequence[str | os.PathLike[str]]
) -> list[SandboxEngine]:
    """Return the engines to try, the best first."""
    if choice == "none":
        return [Unconfined()]
    kit = Kit(read_only)
    podman = Podman(kit, image)
    if image is not None:
        return [podman]
    engines: list[SandboxEngine] = [podman, Bubblewrap(kit), Namespaces(kit)]
    return [each for each in engines if choice in ("auto", each.name)]
