"""Sandboxes: commands run on a workspace, and can see, change and use nothing else.

An engine wraps a command: in namespaces of our own, with bubblewrap, or with podman. The
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
import signal
import stat
import subprocess
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

from weakincentives.contrib.tools.sandbox.environment import (
    CLEAN,
    PATH,
    SYSTEM,
    WORKSPACE,
    Mount,
    ProjectEnvironment,
    project_environment,
)
from weakincentives.contrib.tools.sandbox.limits import (
    CgroupEvents,
    Refusal,
    SandboxLimits,
    SandboxWatch,
    cgroup,
    new_name,
    remove_cgroups,
)
from weakincentives.contrib.tools.sandbox.seatbelt import Rules
from weakincentives.contrib.tools.sandbox.seccomp import container_profile, filter_program
from weakincentives.contrib.tools.sandbox.settings import (
    WITHOUT_MOUNTS,
    EngineName,
    SandboxChoice,
    SandboxSettings,
)
from weakincentives.contrib.tools.sandbox.zygote import Launched, Zygotes
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.programs import (
    agents_can_write,
    find_program,
    missing_program,
    reach_of_agents,
    safe_path,
)
from weakincentives.errors import (
    CommandFailed,
    FilesystemError,
    SandboxUnavailable,
    ToolValidationError,
)
from weakincentives.filesystem import CommandResult, HostFilesystem
from weakincentives.filesystem.commands import DEFAULT_OUTPUT_LIMIT, Command, Start, run_alone
from weakincentives.filesystem.overlay import Overlay, remove_tree
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.store import location_of
from weakincentives.filesystem.tree import mount_generation

if sys.platform == "linux":
    from weakincentives.contrib.tools.sandbox.launcher import hidden_in
if TYPE_CHECKING:
    from weakincentives.contrib.tools.outbound import CommandProxy

TOLD = 20
"""How many limits and denied connections a result names."""

KILLED_BY_LIMIT = {128 + each for each in (signal.SIGKILL, signal.SIGXCPU, signal.SIGXFSZ)}

TICK = 0.05
"""Seconds in which the time of a directory may stay the same though it changes."""

TRIAL = 60.0
"""Seconds for the trial command; podman can be slow on a busy machine."""

USER = 1000, 1000
"""The user and group of a command, as it sees them."""

ENV = "/.wink-env"
ENTER = f". {ENV}"
"""How a command gets its environment: see ``SystemFiles.environment``."""

# Joins the cgroups named before `--`, and makes the process the first to be killed when memory
# runs out. Descriptor 8 is bwrap's own arguments, 9 the seccomp filter.
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
class SandboxedCommand:
    """A command to wrap."""

    argv: Sequence[str]
    workspace: Path
    limits: SandboxLimits
    cwd: str = WORKSPACE
    """Where it starts, as it sees it."""
    env: Mapping[str, str] = field(default_factory=lambda: CLEAN)
    """All of its environment. Programs outside of the sandbox never get it: it could make them do
    anything."""
    read_only: Sequence[str] = ()
    """Paths in the workspace, relative to its root, that it sees and cannot change."""
    hidden: Sequence[str] = ()
    """Directories in the workspace that it sees empty."""
    project: ProjectEnvironment = field(default_factory=ProjectEnvironment)
    """Where it sees the workspace, and what else it sees."""
    proxy: CommandProxy | None = None
    """Its only way to the network."""

    @property
    def owner(self) -> tuple[int, int]:
        """The user and group of the command outside: root works as the owner of the files."""
        if os.geteuid() != 0:
            return os.geteuid(), os.getegid()
        status = os.stat(self.workspace)
        return status.st_uid, status.st_gid


@dataclass(frozen=True, slots=True)
class Launch:
    """The program that runs a command in the sandbox."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """The environment of the program that confines the command."""
    watched: bool = False
    """Whether its processes and their memory need to be watched."""
    start: Start | None = None
    """Starts the command in place of ``argv``."""
    refused: Callable[[], Collection[Refusal]] = frozenset
    """What the kernel has refused to it, once it has ended."""


class Engine(ABC):
    """A program, or a feature of the kernel, that confines commands."""

    name: EngineName
    told: str
    """What the model is told about its commands."""
    has_proxy = False
    """Whether commands can reach hosts through our proxy."""
    trial = 'test -w . && test ! -e "$0"'
    """A command that succeeds in the sandbox only: its directory can be written, and is not to be
    seen by its name outside."""
    is_untried = False
    """Whether it has never been run where it is for; then it must be asked for by name."""
    runs_images = False
    """Whether commands can run in an image."""

    def __init__(self, kit: SystemFiles, image: str | None = None) -> None:
        self.kit = kit
        self.image = image

    def missing(self) -> str | None:
        """Return why it cannot work here, if that is known without a trial."""
        return None

    @abstractmethod
    def wrapped(self, command: SandboxedCommand) -> AbstractContextManager[Launch]:
        """Give the program to start; its files are removed afterwards."""


# What a command sees: one description, translated by each engine


_ETC = (
    "alternatives", "ca-certificates", "debian_version", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "os-release", "pki/tls/certs",
    "protocols", "services", "ssl/certs",
)  # fmt: skip
"""The parts of ``/etc`` that programs need; the rest is hidden."""

_FILES = {
    "passwd": "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}


class SystemFiles:
    """The files of the engines: those of a minimal system, and the seccomp filter.

    Args:
        read_only: More directories of the host that commands see.
    """

    def __init__(self, read_only: Sequence[str | os.PathLike[str]] = ()) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="wink-", dir=_temporary()))
        weakref.finalize(self, _remove_ours, self.place, os.getpid())
        self.place.chmod(0o711)  # commands that root runs as other users read it
        self.filter = self.place / "filter"
        self.filter.write_bytes(filter_program() or b"")
        for name, text in _FILES.items():
            (self.place / name).write_text(text)
        for file in self.place.iterdir():
            file.chmod(0o644)  # whatever the umask of the caller
        self.nothing = self.place / "nothing"
        self.nothing.mkdir()
        self._more = [os.path.abspath(path) for path in read_only]
        self._system: list[Mount] = []
        self._seen: dict[str, int | None] | None = None
        """When the directories changed in which these parts were found."""

    @property
    def system(self) -> list[Mount]:
        """The parts of the host's system that a command sees; found again if one may be another."""
        if self._seen is None or any(_changed(at) != when for at, when in self._seen.items()):
            began = SYSTEM_CLOCK.time()
            self._system = [
                # Relative: the workspace may be below it, and is mounted before this is the root.
                ("link", "../tmp", "/var/tmp"),
                *_programs(),
                *(("read", str(self.place / name), f"/etc/{name}") for name in _FILES),
                *(("read", path, path) for path in self._more),
            ]
            places = {os.path.dirname(path) for _, *paths in self._system for path in paths}
            for name in _ETC:
                places |= _places_of(f"/etc/{name}")
            seen = {place: _changed(place) for place in places if os.path.isabs(place)}
            # Two changes may have the same time.
            is_old = all(when is None or when < (began - TICK) * 1e9 for when in seen.values())
            self._seen = seen if is_old else None
        return self._system

    def workspace(self, command: SandboxedCommand) -> list[Mount]:
        """Return the mounts of the workspace, and of its protected parts."""
        root, nothing = str(command.workspace), str(self.nothing)
        mounts: list[Mount] = []
        for place in command.project.places:
            own: list[Mount] = [
                ("write", root, place),
                *(("read", f"{root}/{path}", f"{place}/{path}") for path in command.read_only),
                *(("read", nothing, f"{place}/{path}") for path in command.hidden),
            ]
            mounts += own
        return mounts

    def around(self, command: SandboxedCommand) -> list[Mount]:
        """Return the mounts of what the project needs outside of the workspace."""
        covered = (path for path in command.project.covered if os.path.isdir(path))
        return [*command.project.mounts, *(("read", str(self.nothing), path) for path in covered)]

    def fixed(self, command: SandboxedCommand, *more: Mount) -> list[Mount]:
        """Return everything that a command sees besides the workspace, in mount order."""
        scratch = str(command.limits.scratch)
        return [
            ("scratch", scratch, "/tmp"),  # first: the host's directories may lie below it
            *self.system,
            *more,
            ("proc", "proc", "/proc"),
            ("dev", "dev", "/dev"),
            ("scratch", scratch, "/dev/shm"),
            ("lock", "", "/dev"),
            *self.around(command),
        ]

    def mounts(self, command: SandboxedCommand, *more: Mount) -> list[Mount]:
        """Return everything that a command sees, in mount order."""
        return [*self.fixed(command, *more), *self.workspace(command), ("lock", "", "/")]

    @contextmanager
    def folder(self) -> Generator[Path]:
        """Give a directory for one command, in which only we can write: as root we read it back."""
        # Podman takes no long paths.
        folder = self.place / os.urandom(4).hex()
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            remove_tree(folder)

    def environment(self, command: SandboxedCommand, folder: Path) -> Mount:
        """Write a script that sets the command's environment once its limits are in force.

        Earlier, the environment could make the programs around the command do something else, and
        in an argument everybody on the machine could read it.
        """
        if os.geteuid() == 0:
            folder.chmod(0o711)  # the command's own user reads the script
        exports = (f"export {name}={shlex.quote(value)}\n" for name, value in command.env.items())
        _write(folder / "env", "".join(exports).encode(errors="surrogateescape"), command.owner)
        return "read", str(folder / "env"), ENV


LINKS = 40
"""How many links a path leads through at most, as for the kernel."""


def _places_of(path: str) -> set[str]:
    """Return the directories in which a change can make a path lead to something else."""
    places, pending = set[str](), [path]
    for _ in range(LINKS):
        if not pending:
            break
        here = pending.pop()
        places.add(os.path.dirname(here))
        for part in (*map(str, PurePosixPath(here).parents), here):
            if os.path.islink(part):
                above = os.path.dirname(part)
                places.add(above)
                target = os.path.join(os.path.realpath(above), os.readlink(part))
                pending.append(os.path.normpath(target))
    return places


def _changed(place: str) -> int | None:
    """Return when a directory last got or lost an entry; None for no directory."""
    with suppress(OSError):
        return os.stat(place).st_mtime_ns
    return None


def _programs() -> Iterator[Mount]:
    """Yield the programs of the host, and the files they need."""
    for top in SYSTEM:
        if os.path.islink(top):
            yield "link", os.readlink(top), top
        elif os.path.isdir(top):
            yield "read", top, top
    for name in _ETC:
        source = os.path.realpath(f"/etc/{name}")
        if os.path.exists(source):
            yield "read", source, f"/etc/{name}"


def _proc_options(proc: str) -> Iterator[str]:
    """Yield bubblewrap's options for a ``/proc`` like the one of our own launcher."""
    yield from ("--proc", proc)
    for name in hidden_in(proc):
        # An entry that has gone by then needs no cover.
        yield from ("--ro-bind-try", "/dev/null", f"{proc}/{name}")
    yield from ("--remount-ro", proc)


# Directories of /proc that the runtimes of containers make read-only by themselves.
_READ_ONLY = {"asound", "bus", "fs", "irq", "sys", "sysrq-trigger"}


def _masked(proc: str) -> Iterator[str]:
    """Yield the parts of ``/proc`` to hide in a container, where it cannot be read-only."""
    yield from (f"{proc}/{name}" for name in hidden_in(proc))
    for name in os.listdir(proc):
        if not name.isdigit() and name not in _READ_ONLY and _has_writable(f"{proc}/{name}"):
            yield f"{proc}/{name}"


def _has_writable(path: str) -> bool:
    """Tell whether a file, or one in a directory, can be written by its owner."""
    with suppress(OSError):
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            return any(_has_writable(os.path.join(path, name)) for name in os.listdir(path))
        return stat.S_ISREG(mode) and mode & 0o222 != 0
    return False


def _remove_ours(place: Path, owner: int) -> None:
    """Remove a directory, unless this is a forked child: then its parent needs it."""
    if owner == os.getpid():
        remove_tree(place)


def _temporary() -> str:
    """Return where temporary files go: for root, where other users can read them."""
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
    home = os.environ.get("HOME", "/")
    # Podman takes settings from there, such as programs to run.
    home = "/" if reach_of_agents(os.path.abspath(home)) else home
    return {"PATH": safe_path(PATH), "HOME": home, "LANG": "C.UTF-8"}


def is_missing(program: str) -> str | None:
    return None if find_program(program, PATH) else missing_program(program, PATH)


def _found(program: str) -> str:
    """Return the path of a program that runs outside of the sandbox."""
    found = find_program(program, PATH)
    if found is None:
        raise SandboxUnavailable(missing_program(program, PATH))
    return found


# The engines


class Bubblewrap(Engine):
    """Confines commands with ``bwrap``."""

    name = "bubblewrap"
    told = "Commands run in a sandbox (bubblewrap)."

    def missing(self) -> str | None:
        return is_missing("bwrap") or is_missing("prlimit") or is_missing("setpriv")

    @contextmanager
    def wrapped(self, command: SandboxedCommand) -> Generator[Launch]:
        with (
            cgroup(command.limits) as cgroup_files,
            CgroupEvents(cgroup_files) as events,
            self.kit.folder() as folder,
        ):
            words = self._options(command, self.kit.environment(command, folder))
            _write(folder / "options", b"".join(os.fsencode(word) + b"\0" for word in words))
            limits = command.limits.rlimits(memory=not cgroup_files)
            argv = [
                _found("sh"),
                "-c",
                PRELUDE,
                "wink",
                str(folder / "options"),
                str(self.kit.filter),
            ]
            argv += [*cgroup_files, "--"]
            uid, gid = command.owner
            ours = *os.getresuid(), *os.getresgid(), *os.getgroups()
            if os.geteuid() == 0 and {uid, gid, *ours} != {0}:
                argv += [_found("setpriv"), f"--reuid={uid}", f"--regid={gid}"]
                argv += ["--clear-groups", "--"]
            argv += [_found("bwrap"), "--args", "8", "--", "prlimit"]
            argv += [f"--{name}={soft}:{hard}" for name, (soft, hard) in limits.items()]
            argv += ["--", "/bin/sh", "-c", f'{ENTER}; exec "$@"', "sh", *command.argv]
            yield Launch(argv, _outside(), watched=not cgroup_files, refused=events.new)

    def _options(self, command: SandboxedCommand, environment: Mount) -> list[str]:
        options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
        options += ["--uid", str(USER[0]), "--gid", str(USER[1])]
        options += ["--hostname", "sandbox", "--clearenv"]
        for name, value in CLEAN.items():
            options += ["--setenv", name, value]
        filtered = self.kit.filter.stat().st_size > 0
        options += ["--seccomp", "9"] if filtered else ["--disable-userns"]
        for kind, source, target in self.kit.mounts(command, environment):
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
            elif kind == "proc":
                options += _proc_options(target)
            else:
                options += [f"--{kind}", target]
        return [*options, "--chdir", command.cwd]


class Namespaces(Engine):
    """Confines commands with a program of our own; it needs Linux 5.12 and nothing else."""

    name = "namespaces"
    told = "Commands run in a sandbox (namespaces)."
    has_proxy = True

    def __init__(self, kit: SystemFiles, image: str | None = None) -> None:
        super().__init__(kit, image)
        self._rules = kit.filter.read_bytes()
        self._zygotes: dict[SandboxLimits, Zygotes] = {}

    def missing(self) -> str | None:
        return None if self._rules else f"it has no filter of system calls for {os.uname().machine}"

    @contextmanager
    def wrapped(self, command: SandboxedCommand) -> Generator[Launch]:
        limits, is_root = command.limits, os.geteuid() == 0
        static = marshal.dumps(
            {
                "generation": mount_generation(),
                "host": command.owner if is_root else None,
                "user": USER,
                "mounts": self.kit.fixed(command),
                "rules": self._rules,
                "rlimits": limits.rlimits(memory=not is_root),
            }
        )
        plan: dict[str, object] = {
            "argv": list(command.argv),
            "env": dict(command.env),
            "cwd": command.cwd,
            "root": str(command.workspace),
            "nothing": str(self.kit.nothing),
            "places": list(command.project.places),
            "read_only": list(command.read_only),
            "hidden": list(command.hidden),
            "proxy": None if command.proxy is None else command.proxy.port,
        }
        if limits not in self._zygotes:
            self._zygotes[limits] = Zygotes(limits, _outside())
        zygotes = self._zygotes[limits]

        def start(overlay: Overlay | None, stdin: bytes, inherited: Sequence[int]) -> Launched:
            channel = () if command.proxy is None else (command.proxy.channel.fileno(),)
            whole = {**plan, "overlay": None if overlay is None else overlay.mount}
            nonlocal launched
            launched = zygotes.start(static, whole, stdin, (*channel, *inherited))
            return launched

        launched: Launched | None = None
        yield Launch(
            command.argv,
            command.env,
            watched=not is_root,
            start=start,
            refused=lambda: () if launched is None else launched.refused,
        )


# Podman reads these from a file only. Without them, killed containers would leave locks behind.
SETTINGS = """
[engine]
lock_type = "file"
events_logger = "none"
tmp_dir = "{place}/tmp"
"""


class Podman(Engine):
    """Confines commands in containers. Podman's state is in the directory of the command.

    Without an image the container sees the host's programs, as with the other engines.
    """

    name = "podman"
    told = "Commands run in a container (podman)."
    runs_images = True

    @cached_property
    def _profile(self) -> Path:
        """The seccomp profile; an empty file if there is none."""
        profile = self.kit.place / "profile"
        profile.write_text(container_profile())
        return profile

    def missing(self) -> str | None:
        if missing := is_missing("podman") or is_missing("unshare"):
            return missing
        if os.geteuid() != 0 and not os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
            return "without root it needs cgroup v2 to limit memory and processes"
        if not self._profile.stat().st_size:
            return "its list of system calls, seccomp.json, is missing or cannot be read"
        return None

    @contextmanager
    def wrapped(self, command: SandboxedCommand) -> Generator[Launch]:
        group = new_name()
        try:
            with self.kit.folder() as place:
                settings = place / "containers.conf"
                _write(settings, SETTINGS.format(place=place).encode())
                env = {"CONTAINERS_CONF": str(settings), "XDG_RUNTIME_DIR": str(place)}
                argv = [*self._podman(place), "run", *self._options(command, group)]
                seen = [*self.kit.around(command), *self.kit.workspace(command)]
                argv += _binds([*seen, self.kit.environment(command, place)])
                argv += [self.image] if self.image is not None else self._root(command, place)
                # Process 1 of a container should be a shell: it reaps the others.
                argv += ["/bin/sh", "-c", f'{ENTER}; "$@"; exit $?', "sh", *command.argv]
                yield Launch(argv, {**env, **_outside()})
        finally:
            remove_cgroups(group)

    def _podman(self, place: Path) -> list[str]:
        runtime = _found("crun" if is_missing("runc") else "runc")
        # Its mounts and helper processes end with it. Without root it does that itself.
        apart = [_found("unshare"), "--mount", "--pid", "--fork", "--kill-child"]
        apart += ["--mount-proc", "--"]
        return [
            *(apart if os.geteuid() == 0 else []),
            _found("podman"),
            f"--root={place}/storage",
            f"--runroot={place}/run",
            f"--runtime={runtime}",
            f"--runtime-flag=root={place}/runtime",
            "--storage-driver=overlay",
            # The images of the user, without writing to their store.
            *([f"--storage-opt=additionalimagestore={_image_store()}"] if self.image else []),
            "--cgroup-manager=cgroupfs",
            "--log-level=fatal",
        ]

    def _options(self, command: SandboxedCommand, group: str) -> list[str]:
        limits = command.limits
        options = ["--rm", "--interactive", "--quiet", "--pull=never", "--log-driver=none"]
        options += ["--network=none", "--no-hosts", "--hostname=sandbox", "--unsetenv-all"]
        options += ["--cap-drop=all", "--security-opt=no-new-privileges"]
        options += [f"--security-opt=seccomp={self._profile}"]
        options += [f"--security-opt=mask={':'.join(_masked('/proc'))}"]
        options += ["--read-only", "--read-only-tmpfs=false", f"--shm-size={limits.scratch}"]
        # What is mounted below it is made there, not copied: its owner may have no number inside.
        options += [f"--tmpfs=/tmp:rw,nosuid,nodev,mode=1777,size={limits.scratch},notmpcopyup"]
        options += [f"--cgroup-parent=/{group}", f"--pids-limit={limits.processes}"]
        options += [f"--memory={limits.memory}", f"--memory-swap={limits.memory}"]
        options += ["--oom-score-adj=1000", f"--workdir={command.cwd}", *self._identity(command)]
        for name, (soft, hard) in limits.rlimits(memory=False).items():
            options += [f"--ulimit={name}={soft}:{hard}"]
        return options

    def _identity(self, command: SandboxedCommand) -> list[str]:
        """Return the options that run the command as the owner of the workspace."""
        uid, gid = command.owner
        if self.image is not None:
            # In a user namespace the files of the image would have no owner.
            return [f"--user={uid}:{gid}"] if os.geteuid() == 0 else []
        if os.geteuid() != 0:
            uid = gid = 0  # the number of the user in podman's namespace
        return [
            *(f"--uidmap={each}" for each in (f"0:100000:{USER[0]}", f"{USER[0]}:{uid}:1")),
            *(f"--gidmap={each}" for each in (f"0:100000:{USER[1]}", f"{USER[1]}:{gid}:1")),
            f"--user={USER[0]}:{USER[1]}",
        ]

    def _root(self, command: SandboxedCommand, place: Path) -> list[str]:
        """Make a root directory with the programs of the host; return the options that use it."""
        root = place / "root"
        mounts = [*self.kit.system, *command.project.mounts]
        for kind, source, target in mounts:
            if kind == "link":  # first: the workspace may be below /var/tmp
                (root / target[1:]).parent.mkdir(parents=True, exist_ok=True)
                (root / target[1:]).symlink_to(source)
        for name in ("dev", "proc", "sys", "tmp", "var", *command.project.places):
            (root / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for name in (ENV[1:], "etc/hostname", "etc/resolv.conf", "run/.containerenv"):
            _mount_point("", root / name)
        for kind, source, target in mounts:
            if kind in ("read", "write"):
                _mount_point(source, root / target[1:])
        for path in (root, *root.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)  # whatever the caller's umask
        (root / "tmp").chmod(0o1777)
        return [*_binds(self.kit.system), "--rootfs", str(root)]


@cache
def _image_store() -> str:
    ask = [_found("podman"), "info", "--format={{.Store.GraphRoot}}"]
    return subprocess.run(ask, env=_outside(), capture_output=True, text=True).stdout.strip()


def _mount_point(source: str, target: Path) -> None:
    """Make the target of a mount; the container may not be allowed to."""
    if os.path.isdir(source):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _binds(mounts: Sequence[Mount]) -> Iterator[str]:
    """Yield podman's options that mount files and directories of the host."""
    for kind, source, target in mounts:
        if kind in ("read", "write"):
            # The option is a CSV line: names with commas are quoted.
            line = io.StringIO()
            words = ["type=bind", f"src={source}", f"dst={target}"]
            csv.writer(line).writerow([*words, "ro=true"] if kind == "read" else words)
            yield f"--mount={line.getvalue().strip()}"


class Seatbelt(Engine):
    """Confines commands on macOS, by a profile: nobody has run it there yet."""

    name = "seatbelt"
    told = "Commands run in a sandbox (seatbelt)."
    is_untried = True
    trial = 'test -w . && ! touch "$0/../wink-trial"'

    def missing(self) -> str | None:
        return None if sys.platform == "darwin" else "it needs macOS"

    @contextmanager
    def wrapped(self, command: SandboxedCommand) -> Generator[Launch]:
        root, project = str(command.workspace), command.project
        with self.kit.folder() as folder:
            scratch = folder / "scratch"
            scratch.mkdir()
            rules = Rules(
                workspace=root,
                scratch=str(scratch),
                readable=[
                    str(folder),
                    *(path for kind, path, _ in project.mounts if kind == "read"),
                ],
                writable=project.writable,
                read_only=[f"{root}/{path}" for path in command.read_only],
                hidden=[*(f"{root}/{path}" for path in command.hidden), *project.covered],
            )
            _write(folder / "profile", rules.profile().encode())
            own = {"HOME": str(scratch), "TMPDIR": str(scratch)}
            _, script, _ = self.kit.environment(
                replace(command, env={**own, **command.env}), folder
            )
            shell = ["/bin/sh", "-c", '. "$0"; exec "$@"', script, *command.argv]
            yield Launch(rules.arguments(str(folder / "profile"), shell), _outside())


class Unconfined(Engine):
    """No sandbox: used only when asked for by name."""

    name = "none"
    told = "Commands run without a sandbox: they can reach everything, so be careful."

    def __init__(self) -> None:
        """It needs no files."""

    @contextmanager
    def wrapped(self, command: SandboxedCommand) -> Generator[Launch]:
        yield Launch(command.argv, command.env, watched=True)


ENGINES: tuple[type[Engine], ...] = (Namespaces, Bubblewrap, Podman, Seatbelt)
"""The only list of engines, the fastest first. Without one: ``Unconfined``."""


# The sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Runs commands on a workspace; made by :func:`find_sandbox`."""

    engine: Engine
    settings: SandboxSettings
    python: str
    """The Python that commands find."""
    passed_over: tuple[tuple[EngineName, str], ...] = ()
    """The faster engines, and why they are not used."""
    _known: dict[tuple[Path, Path | None], ProjectEnvironment] = field(
        default_factory=dict[tuple[Path, Path | None], ProjectEnvironment],
        init=False,
        repr=False,
        compare=False,
    )

    def environment(self, root: Path, store: Path | None = None) -> ProjectEnvironment:
        """Return what commands on a workspace see besides the system; found on first use.

        It is found again when a part of it has gone, since no command could be started then.
        Raises ValueError if a setting cannot be met there.

        Args:
            root: The workspace, resolved.
            store: Its store, if that is not in the usual place.
        """
        found = self._known.get((root, store))
        if found is None or not found.exists:
            if self.name != "none" and (root == Path("/") or root.parts[1] in ("proc", "sys")):
                # Through these a process of root controls the kernel, from any namespace.
                raise ValueError(f"commands on {root} cannot be confined: choose another directory")
            owner = os.stat(root).st_uid
            user = owner if os.geteuid() == 0 and owner != 0 else None
            settings = replace(self.settings, engine=self.name)
            found = project_environment(settings, root, store=store or location_of(root), user=user)
            for place in found.writable:
                agents_can_write(place)
            path = f"{found.env['PATH']}:{os.path.dirname(self.python)}".rstrip(":")
            self._known[root, store] = found = replace(found, env={**found.env, "PATH": path})
        return found

    @property
    def name(self) -> EngineName:
        return self.engine.name

    @property
    def limits(self) -> SandboxLimits:
        return self.settings.limits

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
        real_path: bool = True,
    ) -> CommandResult:
        """Run a command on the workspace; its changes are committed only if it exits with 0.

        Args:
            argv: The program and its arguments; one string is run by ``sh -c``.
            cwd: Where to start it, as a path of the filesystem.
            env: Variables to add to its minimal environment.
            stdin: Its input; empty by default.
            timeout: Seconds after which it is killed.
            output_limit: Bytes of stdout and of stderr to return; the middle of more is left out.
            real_path: Whether it sees the workspace at its own path, too, and starts there.
        """
        words = Command.of(argv).argv
        project = self.environment(fs.root, fs.store)
        if not real_path and self.name not in WITHOUT_MOUNTS:
            project = replace(project, places=(WORKSPACE,))
        inside = str(PurePosixPath(project.places[0], fs.normalize(cwd)))
        own = _checked(env or {})
        with ExitStack() as stack:
            proxy, proxy_env = None, {}
            if self.settings.network != "off":
                from weakincentives.contrib.tools.outbound import CommandProxy, HostList

                hosts = HostList(self.settings.network)
                proxy, proxy_env = stack.enter_context(CommandProxy(hosts)), hosts.variables
            command = SandboxedCommand(
                argv=words,
                workspace=fs.root,
                limits=self.limits,
                cwd=inside,
                env={**project.env, "PWD": inside, **proxy_env, **own},
                project=project,
                read_only=_present(fs, fs.reserved.trees),
                hidden=_present(fs, fs.reserved.hidden),
                proxy=proxy,
            )
            launch = stack.enter_context(self.engine.wrapped(command))
            watch = SandboxWatch(
                self.limits,
                places=(fs.store, fs.root),
                processes=launch.watched,
                workspace=fs.root,
            )
            try:
                result = fs.run(
                    launch.argv,
                    cwd=cwd,
                    env=launch.env,
                    stdin=stdin,
                    timeout=timeout,
                    output_limit=output_limit,
                    check=True,
                    watch=watch,
                    start=launch.start,
                )
            except CommandFailed as error:
                result = cast(CommandResult, error.result)
            hit = self.limits.hit(launch.refused(), result.returncode)
        if result.ok or result.timed_out or result.stopped is not None:
            hit = []
        elif hit and result.returncode in KILLED_BY_LIMIT:
            result, hit = replace(result, stopped=hit[0]), hit[1:]
        denied = [] if proxy is None else proxy.refused
        told = [*(f"limit: {each}" for each in hit), *(f"network: {each}" for each in denied)]
        stderr = result.stderr + "".join(f"{each}\n" for each in told[:TOLD])
        return replace(result, argv=words, stderr=stderr)

    def problem(self) -> str | None:
        """Run a trial command; return why it failed, if it did."""
        if missing := self.engine.missing():
            return missing
        if self.settings.network != "off" and not self.engine.has_proxy:
            return "it cannot let commands reach a list of hosts; namespaces can"
        with tempfile.TemporaryDirectory(prefix="wink-") as folder:
            test = ["/bin/sh", "-c", self.engine.trial, folder]
            command = SandboxedCommand(argv=test, workspace=Path(folder), limits=self.limits)
            try:
                with self.engine.wrapped(command) as launch:
                    trial = Command.of(
                        launch.argv,
                        env=launch.env,
                        timeout=TRIAL,
                        start=launch.start,
                        directory=Path(folder),
                    )
                    tried = run_alone(trial)
            except (OSError, FilesystemError, SandboxUnavailable) as error:
                return str(error)
        if tried.ok:
            return None
        if tried.timed_out:
            return f"a trial command took longer than {TRIAL:g} s"
        said = tried.stderr.strip().rpartition("\n")[2]
        return said or f"a trial command exited with {tried.returncode}"


def _present(fs: HostFilesystem, trees: Iterable[Parts]) -> list[str]:
    """Return the protected paths that exist and can be mounted; a link cannot."""
    places = ((path, fs.root / path) for path in map("/".join, trees) if path)
    return [path for path, at in places if os.path.exists(at) and not os.path.islink(at)]


def _checked(env: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in env.items():
        if not (name.isascii() and name.isidentifier()) or "\0" in value:
            raise ToolValidationError(
                f"the variable {name!r} is not valid: a name has letters, digits and underscores, "
                "a value no NUL character"
            )
    return env


def find_sandbox(
    choice: SandboxChoice | SandboxSettings = "auto",
    *,
    limits: SandboxLimits | None = None,
    image: str | None = None,
    read_only: Sequence[str | os.PathLike[str]] = (),
    network: Sequence[str] = (),
) -> Sandbox:
    """Return the first sandbox that works here: namespaces of our own, bubblewrap, podman.

    Raises SandboxUnavailable, with the reason for each, where none does.

    Args:
        choice: All settings; or the name of one of them, where ``"none"`` runs commands without a
            sandbox.
        image: A podman image to run commands in; without one they see the programs of the host.
        read_only: More directories of the host that commands can read.
        network: The hosts that commands can reach through a proxy: see ``HostList``.
    """
    if isinstance(choice, SandboxSettings):
        settings = choice
    else:
        settings = SandboxSettings(
            engine=choice,
            image=image,
            read=tuple(os.path.abspath(each) for each in read_only),
            limits=limits or SandboxLimits(),
            network=tuple(network),
        )
    for path in read_only:
        if not os.path.exists(path):
            raise FileNotFoundError(
                errno.ENOENT, "no such directory to show in the sandbox", str(path)
            )
    if settings.engine not in WITHOUT_MOUNTS and sys.platform != "linux":
        own = "; 'seatbelt' is for macOS, but has not been run there yet: try it with care"
        has_own = own if sys.platform == "darwin" else ""
        raise _unavailable(f"sandboxes need Linux, this is {sys.platform}{has_own}")
    python, base = "python3", ()
    if settings.image is None and is_missing(python):
        python, base = os.path.realpath(sys.executable), (sys.base_prefix,)
    passed_over: list[tuple[EngineName, str]] = []
    for engine in _engines(settings, base):
        sandbox = Sandbox(
            engine=engine, settings=settings, python=python, passed_over=tuple(passed_over)
        )
        problem = None if settings.engine == "none" else sandbox.problem()
        if problem is None:
            return sandbox
        passed_over.append((engine.name, problem))
    raise _unavailable("; ".join(f"{name}: {reason}" for name, reason in passed_over))


def _unavailable(reason: str) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"No sandbox works here, so commands are not run ({reason}). "
        "sandbox='none' runs them without one"
    )


def _engines(settings: SandboxSettings, read_only: Sequence[str]) -> list[Engine]:
    """Return the engines to try, the fastest first."""
    if settings.engine == "none":
        return [Unconfined()]
    kit = SystemFiles(read_only)
    return [
        engine(kit, settings.image)
        for engine in ENGINES
        if settings.engine in (engine.name, "" if engine.is_untried else "auto")
        and (engine.runs_images or not settings.image)
    ]
