"""The programs and facilities that shut commands in, each a way to wrap a command."""

from __future__ import annotations

import csv
import io
import marshal
import os
import shlex
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

from weakincentives.contrib.tools.sandbox_filter import container_profile, filter_program
from weakincentives.contrib.tools.sandbox_limits import (
    Cgroup,
    SandboxLimits,
    new_name,
    remove_cgroups,
)
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem.overlay import remove_tree
from weakincentives.state import program, source_of

__all__ = [
    "Bubblewrap",
    "EngineName",
    "Kit",
    "Namespaces",
    "Order",
    "Podman",
    "SandboxEngine",
    "Unconfined",
    "Wrapped",
]

EngineName = Literal["podman", "bubblewrap", "namespaces", "none"]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLEAN = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}
"""What a command finds in its environment besides what it is given; nothing of ours."""

INSIDE = "/workspace"
"""Where a command sees the workspace: what the file tools call it."""

USER = 1000, 1000
"""Who a command takes itself for, whoever it is outside."""

ENV = "/.wink-env"
ENTER = f". {ENV}"
"""How the environment of a command comes into the sandbox: see ``_write_env``."""

LAUNCHER = source_of(__file__, "sandbox_launcher.py")

# Brings the process under the limits of the groups named up to `--`, and makes it the first to go
# when memory runs out. Descriptor 8 is bwrap's own arguments, 9 the system calls to be refused.
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
    """All of its environment. Never that of a process outside: it could make that do anything."""
    owner: tuple[int, int]
    """The user and group that its files belong to outside."""
    limits: SandboxLimits
    read_only: Sequence[str] = ()
    """Paths in the workspace, from its root on, that it sees and cannot change."""
    hidden: Sequence[str] = ()
    """Directories in the workspace that it sees empty."""


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What to start in the place of a command."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """The environment of what shuts the command in."""
    watched: bool = False
    """Whether it takes somebody to look after its processes and their memory."""


class SandboxEngine(Protocol):
    """A program, or a facility of the system, that shuts commands in."""

    @property
    def name(self) -> EngineName: ...

    def missing(self) -> str | None:
        """Return what it lacks to be tried at all."""
        ...

    def wrapped(self, order: Order) -> AbstractContextManager[Wrapped]:
        """Give what to start; nothing is left of it afterwards."""
        ...


# What the engines have in common


_TOP = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
_ETC = (
    "alternatives",
    "ca-certificates",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "pki/tls/certs",
    "protocols",
    "services",
    "ssl/certs",
)
"""What programs need of ``/etc``; the rest of it is nobody's business."""

_HIDDEN = {"kcore", "key-users", "keys", "kmsg", "sched_debug", "sysrq-trigger", "timer_list"}
"""What of ``/proc`` tells about the whole machine, or changes it."""

_FILES = {
    "passwd": "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}


class Kit:
    """What engines need on disk: the files of a small system, and the filter.

    Args:
        read_only: Directories of the host that commands see besides its programs.
    """

    def __init__(self, read_only: Sequence[str | os.PathLike[str]] = ()) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="wink-", dir=_temporary()))
        weakref.finalize(self, remove_tree, self.place)
        self.place.chmod(0o711)  # as root, commands of other users come by here
        self.filter = self.place / "filter"
        self.filter.write_bytes(filter_program() or b"")
        self.profile = self.place / "profile"
        self.profile.write_text(container_profile())
        for name, text in _FILES.items():
            (self.place / name).write_text(text)
        for file in self.place.iterdir():
            file.chmod(0o644)  # whatever the caller's umask: other users' commands read them
        self.nothing = self.place / "nothing"
        """What a command sees in the place of a directory that is hidden from it."""
        self.nothing.mkdir()
        self.links: list[tuple[str, str]] = [("/tmp", "/var/tmp")]
        """What links lead to, and their names."""
        self.binds: list[tuple[str, str]] = []
        """What is seen read-only, and where."""
        self.covers = list(_proc_covers())
        """What is seen instead of parts of ``/proc``, and where."""
        self._show_programs()
        self.binds += [(str(self.place / name), f"/etc/{name}") for name in _FILES]
        shown = [os.path.abspath(path) for path in read_only]
        self.binds += [(path, path) for path in shown]

    def _show_programs(self) -> None:
        for top in _TOP:
            if os.path.islink(top):
                self.links.append((os.readlink(top), top))
            elif os.path.isdir(top):
                self.binds.append((top, top))
        for name in _ETC:
            source = os.path.realpath(f"/etc/{name}")
            if os.path.exists(source):
                self.binds.append((source, f"/etc/{name}"))

    @contextmanager
    def folder(self) -> Generator[Path]:
        """Give a directory for what starts one command. Nobody but us can write there.

        As root we read back what is there, so not even the user who the command runs as may.
        """
        # Short, because podman takes no long names.
        folder = self.place / os.urandom(4).hex()
        folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            folder.chmod(0o711)  # the environment is read there by the command's own user
        try:
            yield folder
        finally:
            remove_tree(folder)

    def shields(self, order: Order) -> list[tuple[str, str]]:
        """Return what is mounted read-only over parts of the workspace, and where."""
        own = [(str(order.workspace / path), f"{INSIDE}/{path}") for path in order.read_only]
        return own + [(str(self.nothing), f"{INSIDE}/{path}") for path in order.hidden]


def _proc_covers() -> Iterator[tuple[str, str]]:
    """Yield what a command sees in ``/proc`` instead of what it shall not see or write.

    A process of root's has the right to write there, even without any capability.
    """
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name in _HIDDEN:
                yield "/dev/null", entry.path
            elif entry.name.isdigit() or entry.is_symlink():
                continue
            elif entry.is_dir() or entry.stat().st_mode & 0o222:
                yield entry.path, entry.path


@contextmanager
def _limited(order: Order) -> Generator[tuple[str, ...]]:
    """Give the entrances to a group with the limits, if it takes one to hold the command to them.

    The number of processes that a user has in a namespace is limited for every user but root.
    """
    if os.geteuid() != 0:
        yield ()
        return
    group = Cgroup.make(order.limits)
    if isinstance(group, str):
        raise SandboxUnavailable(f"root is held to limits by cgroups only, and {group}")
    try:
        yield group.entrances
    finally:
        group.remove()


def _temporary() -> str:
    """Return where temporary files go: for root, where commands of other users can get to."""
    places = [tempfile.gettempdir(), *(["/tmp", "/var/tmp"] if os.geteuid() == 0 else [])]
    for place in map(Path, places):
        with suppress(OSError):
            if all(each.stat().st_mode & 0o001 for each in (place, *place.absolute().parents)):
                return str(place)
    return places[0]


def _write_env(folder: Path, order: Order) -> None:
    """Write what sets a command's environment, once it is held to its limits.

    Before that it could make the programs that do so do something else, and in an argument
    everybody on the machine could read it.
    """
    exports = (f"export {name}={shlex.quote(value)}\n" for name, value in order.env.items())
    _write(folder / "env", "".join(exports).encode(errors="surrogateescape"), order.owner)


def _write(path: Path, data: bytes, owner: tuple[int, int] | None = None) -> None:
    """Write a file that only we, or the owner, can read."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with open(fd, "wb") as file:
        file.write(data)
        if owner is not None and os.geteuid() == 0:
            os.fchown(fd, *owner)


def _outside() -> dict[str, str]:
    """Return what the programs that shut a command in find in their environment."""
    return {"PATH": PATH, "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}


def is_missing(program: str) -> str | None:
    """Return the reason not to use a program, if it is not installed."""
    return None if shutil.which(program, path=PATH) else f"{program} is not installed"


# The engines


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Shuts commands in with ``bwrap``."""

    kit: Kit
    name: EngineName = "bubblewrap"

    def missing(self) -> str | None:
        return is_missing("bwrap") or is_missing("prlimit") or is_missing("setpriv")

    @contextmanager
    def wrapped(self, order: Order) -> Generator[Wrapped]:
        with _limited(order) as entrances, self.kit.folder() as folder:
            _write_env(folder, order)
            options = folder / "options"
            words = self._options(order, folder)
            _write(options, b"".join(os.fsencode(word) + b"\0" for word in words))
            limits = order.limits.rlimits(memory=not entrances)
            argv = ["sh", "-c", PRELUDE, "wink", str(options), str(self.kit.filter)]
            argv += [*entrances, "--", *self._identity(order), "bwrap", "--args", "8", "--"]
            argv += [
                "prlimit",
                *(f"--{name}={soft}:{hard}" for name, (soft, hard) in limits.items()),
            ]
            argv += ["--", "/bin/sh", "-c", f'{ENTER}; exec "$@"', "sh", *order.argv]
            yield Wrapped(argv, _outside(), watched=not entrances)

    def _identity(self, order: Order) -> list[str]:
        if os.geteuid() != 0:
            return []
        uid, gid = order.owner
        return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--"]

    def _options(self, order: Order, folder: Path) -> list[str]:
        scratch = str(order.limits.scratch)
        options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
        options += ["--uid", str(USER[0]), "--gid", str(USER[1])]
        options += ["--hostname", "sandbox", "--clearenv"]
        for name, value in CLEAN.items():
            options += ["--setenv", name, value]
        filtered = self.kit.filter.stat().st_size > 0
        options += ["--seccomp", "9"] if filtered else ["--disable-userns"]
        # First: what is to be read may lie below.
        options += ["--size", scratch, "--tmpfs", "/tmp"]
        for source, target in [*self.kit.binds, (str(folder / "env"), ENV)]:
            options += ["--ro-bind", source, target]
        for target, name in self.kit.links:
            options += ["--symlink", target, name]
        options += ["--proc", "/proc"]
        for source, target in self.kit.covers:
            options += ["--ro-bind", source, target]
        options += ["--dev", "/dev", "--size", scratch, "--tmpfs", "/dev/shm"]
        options += ["--remount-ro", "/dev", "--bind", str(order.workspace), INSIDE]
        for source, target in self.kit.shields(order):
            options += ["--ro-bind", source, target]
        options += ["--remount-ro", "/"]
        return [*options, "--chdir", order.cwd]


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Shuts commands in with a program of our own; the least that is needed is Linux 5.12."""

    kit: Kit
    name: EngineName = "namespaces"

    def missing(self) -> str | None:
        if not self.kit.filter.stat().st_size:
            return f"its filter of system calls does not know this machine, {os.uname().machine}"
        return None

    @contextmanager
    def wrapped(self, order: Order) -> Generator[Wrapped]:
        with _limited(order) as entrances, self.kit.folder() as folder:
            plan = {
                "argv": list(order.argv),
                "env": dict(order.env),
                "cwd": order.cwd,
                "workspace": str(order.workspace),
                "inside": INSIDE,
                "shields": self.kit.shields(order),
                "host": order.owner,
                "user": USER,
                "binds": self.kit.binds,
                "links": self.kit.links,
                "covers": self.kit.covers,
                "filter": str(self.kit.filter),
                "entrances": entrances,
                "rlimits": order.limits.rlimits(memory=not entrances),
                "scratch": order.limits.scratch,
            }
            file = folder / "plan"
            _write(file, marshal.dumps(plan))
            yield Wrapped(program(LAUNCHER, str(file)), _outside(), watched=not entrances)


# What podman takes from a file only. Without it locks would be left behind by what is killed.
SETTINGS = """
[engine]
lock_type = "file"
events_logger = "none"
tmp_dir = "{place}/tmp"
"""


@dataclass(frozen=True, slots=True)
class Podman:
    """Shuts commands in a container; what podman keeps about it lies in a directory of its own.

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
            with self.kit.folder() as place:
                _write_env(place, order)
                settings = place / "containers.conf"
                _write(settings, SETTINGS.format(place=place).encode())
                env = {
                    "CONTAINERS_CONF": str(settings),
                    "XDG_RUNTIME_DIR": str(place),
                    **_outside(),
                }
                argv = [*self._podman(place), "run", *self._options(order, group)]
                argv += [_bind(str(place / "env"), ENV, "ro=true"), *self._root(place)]
                # The first process of a container should be one that does not mind it.
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
            *self._images(),
            "--cgroup-manager=cgroupfs",
            "--log-level=fatal",
        ]

    def _images(self) -> list[str]:
        """Return the option that lets it use the user's images, without writing to their store."""
        if self.image is None:
            return []
        return [f"--storage-opt=additionalimagestore={_image_store()}"]

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
        shields = (_bind(*each, "ro=true") for each in self.kit.shields(order))
        return [*options, _bind(str(order.workspace), INSIDE), *shields]

    def _identity(self, order: Order) -> list[str]:
        """Return who the command is: the workspace's owner, and nobody else."""
        uid, gid = order.owner
        if self.image is not None:
            # In a namespace of users its files would be nobody's.
            return [f"--user={uid}:{gid}"] if os.geteuid() == 0 else []
        if os.geteuid() != 0:
            uid = gid = 0  # that is who the user is in podman's own namespace
        return [
            *(f"--uidmap={each}" for each in (f"0:100000:{USER[0]}", f"{USER[0]}:{uid}:1")),
            *(f"--gidmap={each}" for each in (f"0:100000:{USER[1]}", f"{USER[1]}:{gid}:1")),
            f"--user={USER[0]}:{USER[1]}",
        ]

    def _root(self, place: Path) -> list[str]:
        """Return where the container's own files come from."""
        if self.image is not None:
            return [self.image]
        root = place / "root"
        for name in ("dev", "proc", "sys", "tmp", "var", INSIDE[1:]):
            (root / name).mkdir(parents=True)
        for source, target in self.kit.binds:
            _place_for(source, root / target[1:])
        for name in (ENV[1:], "etc/hostname", "etc/resolv.conf", "run/.containerenv"):
            _place_for("", root / name)
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # whatever the caller's umask
        (root / "tmp").chmod(0o1777)
        for target, name in self.kit.links:
            (root / name[1:]).symlink_to(target)
        binds = [_bind(source, target, "ro=true") for source, target in self.kit.binds]
        return [*binds, "--rootfs", str(root)]


@cache
def _image_store() -> str:
    """Return where podman keeps the user's images."""
    ask = ["podman", "info", "--format={{.Store.GraphRoot}}"]
    return subprocess.run(ask, env=_outside(), capture_output=True, text=True).stdout.strip()


def _place_for(source: str, target: Path) -> None:
    """Make what something can be mounted on; in the container nobody might be allowed to."""
    if os.path.isdir(source):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _bind(source: str, target: str, *more: str) -> str:
    # The option is a line of comma-separated values: names with commas are quoted.
    line = io.StringIO()
    csv.writer(line).writerow(["type=bind", f"src={source}", f"dst={target}", *more])
    return f"--mount={line.getvalue().strip()}"


@dataclass(frozen=True, slots=True)
class Unconfined:
    """No sandbox: only for those who ask for it by name."""

    name: EngineName = "none"

    def missing(self) -> str | None:
        return None

    @contextmanager
    def wrapped(self, order: Order) -> Generator[Wrapped]:
        yield Wrapped(order.argv, order.env, watched=True)
