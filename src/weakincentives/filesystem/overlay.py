"""Run a command over an overlay of a directory, and read what it changed from the upper layer.

Linux only. The command sees the workspace at its own path; what it writes goes to a directory in
the store, so its write set is known without reading anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import IO, Literal, Protocol

from weakincentives.core.programs import SYSTEM_PATH, find_program, missing_program
from weakincentives.errors import FilesystemError
from weakincentives.filesystem.entry import Attributes, Entry, capture, copy_exactly
from weakincentives.filesystem.layers import Look, Node, xattrs_at
from weakincentives.filesystem.paths import BARRED, Parts, join_path, shown, system_error
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.staging import Edit
from weakincentives.filesystem.tree import (
    CHUNK,
    PATIENCE,
    Held,
    Near,
    Tree,
    mounted_below,
    remove_path,
    remove_tree,
    set_xattrs,
    wait_until,
    xattrs_of,
)

# The first process of the command's own pid namespace: when it ends, the kernel ends all others.
# Descriptor 3 is the command's stderr and 5 its stdin. Descriptor 4 is a pipe that is never
# written to: it ends when the caller closes it or dies, and then everything in here is killed, more
# than once, since the command may be starting just then. The shell's own messages (`Killed`) are
# not the command's output.
#
# The shell's descriptors, for a program whose input is a file and whose output we read.
PIPED = """
exec 3>&2 4<&0 5<stdin
"""

# And for one that has our own input and output: what Ctrl-C does is up to the program.
ATTACHED = """
trap : INT QUIT
exec 3>&2 4<"$1" 5<&0
shift
"""

SCRIPT = """
cd -- "$1" || exit 125
: >"$2"/started
unset OLDPWD
shift 2
{ read -r _ <&4; while :; do kill -KILL -1; done; } >/dev/null 2>&1 3>&- 5<&- &
exec 2>/dev/null
(exec "$@") <&5 2>&3 3>&- 4<&- 5<&-
"""

# Comes before it in a user namespace, where only the process that made the namespace may mount.
MOUNT = """
"$1" -i -n -t overlay -o "$2" -- overlay "$3" || exit 125
shift 3
"""

FEW = 100
"""Entries of a layer that are removed one by one; one with more is removed as a whole."""

FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, EXT4_TOPDIR = 0x8008_6601, 0x4008_6602, 0x2_0000
CLONE_NEWNS, CLONE_NEWPID = 0x0002_0000, 0x2000_0000
MS_REC, MS_PRIVATE = 0x4000, 0x4_0000


@dataclass(frozen=True, slots=True)
class Way:
    """How an overlay is mounted here: by root, or by any user in a user namespace."""

    unshare: str
    shell: str
    mount: str
    options: str
    xattrs: str
    """The prefix of the overlay's own extended attributes."""
    owner: tuple[int, int] | None
    """The user and group of the command; None for root, which needs no user namespace."""


class Started(Protocol):
    """A program that was started, with everything that it starts."""

    @property
    def pid(self) -> int: ...

    @property
    def streams(self) -> tuple[IO[bytes], ...]:
        """Its stdout and stderr; none if they are ours."""
        ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""
        ...

    def exited(self) -> contextlib.AbstractContextManager[int | None]:
        """Give a descriptor that becomes readable when it ends, where the system has one."""
        ...

    def kill(self) -> None:
        """Kill it."""

    def end(self) -> None:
        """Kill it, and wait until nothing of it is left."""

    def released(self) -> bool:
        """Wait until its mounts are gone, after its end; tell whether they are known to be."""
        ...


LIFELINE = "\0lifeline"
"""In the words of an attached program: the path of the pipe that ends when we do."""


class Process(Started):
    """A program and everything that it starts. All of it is killed when we say so, or die.

    A pipe ends when we close it or die, and a shell that waits for that then kills the others. It
    is the standard input of what is started; an attached program has ours.

    Args:
        before: Called first, in the thread that starts the program.
        namespace: Whether it has a pid namespace of its own, so that nothing outlives its leader.
        attached: Whether it has our input and output, and stays in our process group: a program
            that uses the terminal needs that. Ctrl-C and Ctrl-Z then reach both.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None,
        inherited: Sequence[int] = (),
        before: Callable[[], None] | None = None,
        namespace: bool = False,
        attached: bool = False,
    ) -> None:
        reading, writing = os.pipe()
        self._namespace = namespace
        self._attached = attached
        self._lifeline: int | None = writing
        output = None if attached else subprocess.PIPE

        def start() -> subprocess.Popen[bytes]:
            if before is not None:
                before()
            return subprocess.Popen(
                [f"/dev/fd/{reading}" if word == LIFELINE else word for word in argv],
                cwd=cwd,
                env=env,
                stdin=None if attached else reading,
                stdout=output,
                stderr=output,
                start_new_session=not attached,
                pass_fds=(*inherited, reading) if attached else inherited,
            )

        try:
            # In a thread of its own, which may enter namespaces.
            with ThreadPoolExecutor(1, thread_name_prefix="wink-command") as thread:
                self.popen = thread.submit(start).result()
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def streams(self) -> tuple[IO[bytes], ...]:
        both = self.popen.stdout, self.popen.stderr
        return tuple(each for each in both if each is not None)

    @property
    def returncode(self) -> int | None:
        return self.popen.returncode

    def poll(self) -> int | None:
        return self.popen.poll()

    @contextlib.contextmanager
    def exited(self) -> Generator[int | None]:
        try:
            exited = Held(os.pidfd_open(self.pid))
        except (AttributeError, OSError):
            yield None
            return
        with exited:
            yield exited

    def kill(self) -> None:
        """Kill the program and everything that it started."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            if self._attached and not self._namespace:
                with contextlib.suppress(OSError):
                    os.write(lifeline, b"\n")  # we kill it ourselves, while its number is its own
            os.close(lifeline)
        if not self._namespace:
            self._kill_now()

    def end(self) -> None:
        """Kill it, and wait until nothing of it is left."""
        self.kill()
        for stream in self.streams:
            stream.close()
        if not self._namespace and not self._attached:
            # What it was just writing would come after the scan.
            wait_until(lambda: not _runs(self.pid), PATIENCE)
        try:
            self.popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            # The command killed the process that would have killed it.
            self._kill_now()
            self.popen.wait()

    def released(self) -> bool:
        return False  # it may have passed a descriptor to a program that goes on

    def _kill_now(self) -> None:
        if self._attached:
            self.popen.kill()  # its process group is ours, too
            return
        # The group's number is not used again while any process of it exists.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _runs(group: int) -> bool:
    """Whether a process of a group runs, where the system tells."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # What follows the name, which may hold anything: state, parent, group.
            state, _, found = entry.read_bytes().rpartition(b")")[2].split()[:3]
            if int(found) == group and state not in (b"Z", b"X"):
                return True
    return False


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_ways: dict[tuple[Path, int], Way | str] = {}
_finding = threading.Lock()


def find_way(workspace: Path, store: Path) -> Way | str:
    """Return how an overlay of the workspace is mounted, or why it cannot be.

    That is tried once for each workspace and filesystem of the store. An overlay would hide a
    filesystem that is mounted inside the workspace, so that is checked each time.
    """
    if sys.platform != "linux":
        return f"overlays need Linux, this is {sys.platform}"
    key = workspace, os.stat(store).st_dev
    with _finding:
        way = _ways.get(key)
        if way is None:
            way = _ways[key] = _try(workspace, store)
    mounted = None if isinstance(way, str) else mounted_below(workspace)
    if mounted is None:
        return way
    return f"another filesystem is mounted inside it at {shown(mounted)}"


def _try(workspace: Path, store: Path) -> Way | str:
    names = "unshare", "sh", "mount"
    unshare, shell, mount = (find_program(name, SYSTEM_PATH) for name in names)
    if unshare is None or shell is None or mount is None:
        missing = [each for each in names if find_program(each, SYSTEM_PATH) is None]
        return "; ".join(missing_program(each, SYSTEM_PATH) for each in missing)
    reason = "nothing was tried"
    for options, xattrs, owner in _candidates():
        way = Way(unshare, shell, mount, options, xattrs, owner)
        reason = _failure(way, workspace, store)
        if reason is None:
            return way
    return f"an overlay cannot be mounted: {reason}"


def _candidates() -> Iterator[tuple[str, str, tuple[int, int] | None]]:
    # Whole files and whole directories only: no redirects and no metadata-only copies to follow.
    # The index keeps hard links together. Volatile: unmounting need not sync the disk.
    root = "upperdir=upper,workdir=work,redirect_dir=off,metacopy=off"
    if os.geteuid() == 0:
        for options in ("index=on,volatile", "index=off,volatile", "index=off"):
            yield f"{root},{options}", "trusted.overlay.", None
    for options in (",volatile", ""):
        owner = os.geteuid(), os.getegid()
        yield f"upperdir=upper,workdir=work,userxattr{options}", "user.overlay.", owner


def _failure(way: Way, workspace: Path, store: Path) -> str | None:
    """Try a command that changes a file this way; returns the system's error, if any."""
    place = store / f"probe-{os.urandom(8).hex()}"
    overlay = Overlay(place, workspace, way)
    try:
        overlay.prepare()
        # By its path, and without another program: what PATH has may be the workspace's.
        process = overlay.start([way.shell, "-c", ": >probe"], directory=workspace)
        try:
            _, said = process.popen.communicate(timeout=PATIENCE)
        finally:
            process.end()
        code = process.popen.returncode
        if code or not (overlay.upper / "probe").exists():
            return said.decode(errors="replace").strip() or f"exit code {code}"
        return None
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        overlay.discard()


class Overlay:
    """The directories of one command: those it sees below, and the upper one it writes to."""

    def __init__(
        self,
        place: Path,
        workspace: Path,
        way: Way,
        identity: tuple[int, int] | None = None,
    ) -> None:
        """Make none of them yet.

        Args:
            identity: Device and inode of the workspace, where it must be that directory.
        """
        self.place = place
        self.upper = place / "upper"
        self.staged = place / "staged"
        """A private view's changes, between the workspace and the upper layer."""
        self.workspace = workspace
        self._way = way
        self._identity = identity
        self._trees: list[Tree | Near] = []
        self._stdin = b""
        self.holder: Started | None = None
        """What has it mounted."""

    def prepare(self, stdin: bytes = b"") -> None:
        """Make the directories, or use empty ones; the upper one has the workspace's attributes."""
        self._stdin = stdin
        with contextlib.suppress(FileExistsError):
            self.place.mkdir(mode=0o700)
            self.upper.mkdir(mode=0o700)
            (self.place / "work").mkdir(mode=0o700)
        _take_after(self.upper, os.stat(self.workspace), self.workspace)

    def cover(self, look: Look, paths: AbstractSet[Parts], tree: Tree) -> None:
        """Put what a view shows at some paths between the workspace and the upper layer."""
        if not paths:
            return
        self.staged.mkdir(mode=0o700)
        with contextlib.closing(Tree(self.staged)) as staged:
            _Stage(look, tree, staged, f"{self._way.xattrs}opaque").lay(paths)

    def start(
        self,
        argv: Sequence[str],
        *,
        directory: Path,
        env: Mapping[str, str] | None = None,
        attached: bool = False,
        inherited: Sequence[int] = (),
        in_place: bool = False,
    ) -> Process:
        """Start the command over the overlay.

        ``in_place`` mounts none: the command changes the workspace itself, but nothing that it
        starts outlives it.
        """
        way, lower = self._way, "staged:lower" if self.staged.exists() else "lower"
        options = f"lowerdir={lower},{way.options}"
        # A name without colons or commas, whatever the workspace is called.
        (self.place / "lower").symlink_to(self.workspace)
        (self.place / "stdin").write_bytes(self._stdin)
        wrapped = [way.unshare, "--mount", "--mount-proc"]
        inner = [str(directory), str(self.place)]
        script = (ATTACHED if attached else PIPED) + SCRIPT
        before = None
        if way.owner is None:
            wrapped += ["--", way.shell, "-c"]
            before = partial(self._enter, None if in_place else options)
        else:
            # Only the namespace's root can mount; the command runs as the user.
            uid, gid = way.owner
            wrapped += ["--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
            wrapped += ["--", way.shell, "-c"]
            if not in_place:
                script = script.replace(SCRIPT, MOUNT + SCRIPT)
                inner = [way.mount, options, str(self.workspace), *inner]
            inner += [way.unshare, "--user", f"--map-user={uid}", f"--map-group={gid}", "--"]
        if attached:
            inner = [LIFELINE, *inner]
        return Process(
            [*wrapped, script, "wink", *inner, *argv],
            cwd=self.place,
            env=env,
            inherited=inherited,
            before=before,
            namespace=True,
            attached=attached,
        )

    @property
    def mount(self) -> tuple[str, str, bool, tuple[int, int] | None]:
        """How to mount it: from which directory, with which options besides the lower layers,
        whether there is a staged one, and which directory the workspace must be.
        """
        return str(self.place), self._way.options, self.staged.exists(), self._identity

    def _enter(self, options: str | None) -> None:
        """Move this thread, and what it starts, into namespaces with the overlay mounted, if any.

        The rest of the process is not affected. Programs that do the same take much longer.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.unshare(CLONE_NEWNS | CLONE_NEWPID))
        _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        if options is None:
            return
        # The working directory is this thread's alone now. It keeps odd names out of the options.
        os.chdir(self.place)
        target = os.fsencode(self.workspace)
        _check(libc.mount(b"overlay", target, b"overlay", 0, os.fsencode(options)))

    @property
    def started(self) -> bool:
        """Whether the command was started: the overlay is mounted, its directory exists."""
        return (self.place / "started").exists()

    def discard(self) -> None:
        self._close_trees()
        remove_tree(self.place)

    def empty(self) -> bool:
        """Empty the layers for another command, once nothing uses them; tell whether they are."""
        self._close_trees()
        if self.holder is None or not self.holder.released():
            return False
        work = self.place / "work"
        if len(os.listdir(self.upper)) > FEW:
            return False
        others = (each for each in self.place.iterdir() if each not in (self.upper, work))
        for path in (*self.upper.iterdir(), *work.iterdir(), *others):
            if path != work / "index" or os.listdir(path):
                remove_path(path)
        for name in os.listxattr(self.upper):
            if not name.startswith("security."):
                os.removexattr(self.upper, name)
        # Files made in it inherit its flags (chattr).
        return _flags(self.upper) == _flags(self.place)

    def _close_trees(self) -> None:
        while self._trees:
            self._trees.pop().close()

    def steps(self, tree: Tree) -> list[Step]:
        """Return what turns the workspace into what the command saw, in the order to do it.

        Apply them before the layers are discarded.
        """
        index = self._opened(self.place / "work" / "index") if self._way.owner is None else None
        upper = self._opened(self.upper)
        assert upper is not None
        near = Near(upper)
        self._trees.append(near)
        return _Reader(tree, self._opened(self.staged), near, index, self._way.xattrs).read()

    def _opened(self, place: Path) -> Tree | None:
        """Open a layer, if it exists, until all are discarded."""
        if not place.exists():
            return None
        opened = Tree(place, resolved=True)
        self._trees.append(opened)
        return opened


# Laying a private view's changes over the workspace


class _Stage:
    def __init__(self, look: Look, tree: Tree, staged: Tree, opaque: str) -> None:
        self._look = look
        self._tree = tree
        self._staged = staged
        self._opaque = opaque
        self._done: set[Parts] = set()
        """Paths that are complete."""
        self._files: dict[tuple[int, int], Parts] = {}
        """Where the files with several names are."""

    def lay(self, paths: Iterable[Parts]) -> None:
        for parts in sorted(paths):
            if not any(parts[:depth] in self._done for depth in range(len(parts) + 1)):
                self._lay_one(parts)

    def _lay_one(self, parts: Parts) -> None:
        try:
            node = self._look.node(parts)
        except OSError:
            return  # below something else in these paths
        status = self._tree.status_if_reached(parts)
        directory = None if status is None or not stat.S_ISDIR(status.st_mode) else status.st_ino
        self._make_parents(parts)
        if node is None:
            if status is not None:
                with self._staged.reached(parts) as place:
                    os.mknod(place, stat.S_IFCHR, 0)
        elif node.kind == "directory" and node.ino == directory:
            self._make_parents((*parts, ""))
            self._staged.chmod(parts, node.mode)
            return
        else:
            self._lay(parts, node, status)
        self._done.add(parts)

    def _make_parents(self, parts: Parts) -> None:
        for depth in range(1, len(parts)):
            here = parts[:depth]
            if self._staged.status(here) is None:
                with self._staged.reached(here) as place, self._tree.reached(here) as original:
                    os.mkdir(place)
                    _take_after(place, os.lstat(original), original)

    def _lay(self, top: Parts, node: Node, status: os.stat_result | None) -> None:
        """Put what the view shows at a path, and everything below it, into the layer."""
        directories: list[tuple[Parts, Node]] = []
        pending = [(top, node, status)]
        while pending:
            parts, node, status = pending.pop()
            with self._staged.reached(parts) as place:
                if node.kind == "directory":
                    os.mkdir(place)
                    os.setxattr(place, self._opaque, b"y")
                    directories.append((parts, node))
                elif self._lay_file(place, parts, node, status):
                    _finish(place, node)
            if node.kind == "directory":
                inner = self._look.nodes(parts)
                pending += [((*parts, name), below, None) for name, below in inner]
        # Last, and inner ones first: what is put into a directory changes its time.
        for parts, node in reversed(directories):
            with self._staged.reached(parts) as place:
                _finish(place, node)

    def _lay_file(
        self, place: str, parts: Parts, node: Node, status: os.stat_result | None
    ) -> bool:
        """Make a file, link or pipe; False for one more name of a file that exists."""
        if node.kind == "link":
            os.symlink(self._look.link_target(parts), place)
        elif node.file is None:
            os.mkfifo(place)
        elif node.links > 1 and self._files.setdefault(node.file, parts) != parts:
            with self._staged.reached(self._files[node.file]) as other:
                os.link(other, place)
            return False
        else:
            Path(place).write_bytes(self._look.read(parts))
            if status is not None and stat.S_ISREG(status.st_mode):
                with self._tree.reached(parts) as original:
                    _take_after(place, status, original)
            else:
                set_xattrs(place, xattrs_at(self._look, parts))
        return True


def _finish(place: str, node: Node) -> None:
    if node.kind != "link":
        os.chmod(place, node.mode)
    os.utime(place, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)


def spread(folder: Path) -> None:
    """Let a new directory below this one have an area of the disk for itself, where it can.

    ext4 does not use the number of a deleted file again for a minute, and passes over all of them
    whenever it makes a file in the same area.
    """
    with contextlib.suppress(OSError), Held(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        flags = bytearray(fcntl.ioctl(fd, FS_IOC_GETFLAGS, bytes(8)))
        flags[2] |= EXT4_TOPDIR >> 16
        fcntl.ioctl(fd, FS_IOC_SETFLAGS, bytes(flags))


def _flags(folder: Path) -> bytes | None:
    """Return the flags of a directory; None where the filesystem has none."""
    with contextlib.suppress(OSError), Held(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        return fcntl.ioctl(fd, FS_IOC_GETFLAGS, bytes(8))
    return None


def _take_after(place: Path | str, status: os.stat_result, original: Path | str) -> None:
    present = os.stat(place)
    if (status.st_uid, status.st_gid) != (present.st_uid, present.st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(place, status.st_uid, status.st_gid)
    shutil.copystat(original, place)


# Reading the upper layer

Action = Literal["remove", "directory", "move", "link", "rewrite", "attributes"]


@dataclass(frozen=True, slots=True)
class Step:
    """One change of the workspace that a command has made."""

    action: Action
    parts: Parts
    do: Callable[[Edit], None]
    """Makes the change."""
    source: tuple[Tree, Parts] | None = None
    """Of a ``move``: where the file, link or pipe is."""


class _Reader:
    """Reads from the upper layer what a command changed."""

    def __init__(
        self, tree: Tree, staged: Tree | None, upper: Near, index: Tree | None, prefix: str
    ) -> None:
        self._tree = tree
        self._near = Near(tree)
        self._staged = staged
        self._upper = upper.tree
        self._near_upper = upper
        self._index = index
        self._prefix = prefix
        self._steps: list[Step] = []
        self._changed: set[Parts] = set()
        """The directories in which something changed."""
        self._handles: dict[int, str] = {}
        """The handle of each file that had several names before, by inode in the upper layer."""
        self._settled: set[int] = set()
        """The inodes of those whose content has its steps."""
        self._pending: list[tuple[Parts, bool, os.stat_result | Entry]] = []
        """Paths to read with their status, and directories to leave with what they are; whether
        the lower layer shows through."""

    def read(self) -> list[Step]:
        for name, status in () if self._index is None else self._index.scan(()):
            if stat.S_ISREG(status.st_mode) and not name.startswith("#"):
                self._handles[status.st_ino] = name
        with contextlib.closing(self._near):
            self._enter((), True)
            # Not recursive: a command may nest directories deeper than Python's stack.
            while self._pending:
                parts, merged, own = self._pending.pop()
                if isinstance(own, Entry):
                    self._leave(parts, merged, own)
                else:
                    self._read_one(parts, merged, own)
        return [*self._nameless(), *self._steps]

    def _lower(self, parts: Parts) -> Tree | None:
        """Return the tree in which the command saw a path; None if the staged layer hides it."""
        if self._staged is None or not parts:
            return self._tree
        for depth in range(1, len(parts) + 1):
            status = self._staged.status(parts[:depth])
            if status is None:
                return self._tree
            if stat.S_ISCHR(status.st_mode):
                return None
            if not stat.S_ISDIR(status.st_mode) or self._is_opaque(self._staged, parts[:depth]):
                return self._staged
        return self._staged

    def _is_opaque(self, tree: Tree, parts: Parts) -> bool:
        with tree.reached(parts) as path, contextlib.suppress(OSError):
            return os.getxattr(path, f"{self._prefix}opaque", follow_symlinks=False) == b"y"
        return False

    def _captured(self, tree: Tree, parts: Parts) -> Entry | None:
        entry = capture(tree, parts)
        return None if entry is None else self._without_own(entry)

    def _without_own(self, entry: Entry) -> Entry:
        """Return an entry without the overlay's own extended attributes."""
        kept = tuple(one for one in entry.xattrs if not one[0].startswith(self._prefix))
        return entry._replace(xattrs=kept)

    def _enter(self, parts: Parts, merged: bool) -> None:
        """Read everything in a directory of the upper layer, then the directory itself."""
        status = self._upper.status(parts)
        assert status is not None
        mode = stat.S_IMODE(status.st_mode)
        if os.geteuid() and mode & 0o700 != 0o700:
            self._upper.chmod(parts, mode | 0o700)
        own = self._captured(self._upper, parts)
        assert own is not None
        self._pending.append((parts, merged, own._replace(mode=mode)))
        for name, below in sorted(self._upper.scan(parts), key=itemgetter(0), reverse=True):
            if not name.startswith(TEMPORARY):  # the call's replaced files wait there
                self._pending.append(((*parts, name), merged, below))

    def _leave(self, parts: Parts, merged: bool, own: Entry) -> None:
        if merged:
            tree = self._lower(parts)
            was = None if tree is None else self._captured(tree, parts)
            # A directory is in the upper layer when anything below it changed, and its time moves
            # when an entry comes or goes: neither is a change of its own.
            # Nor is that of the workspace itself: others may have moved it.
            same_time = was is None or own.mtime_ns == was.mtime_ns or parts in self._changed
            same_time = same_time or not parts
            if was is None or (own.is_like(was) and same_time):
                return
        self._add(_attributes(parts, own))

    def _read_one(self, parts: Parts, merged: bool, status: os.stat_result) -> None:
        tree = self._lower(parts) if merged else None
        below = None if tree is None else self._below(tree, parts)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFCHR and status.st_rdev == 0:  # a whiteout
            if below is not None:
                self._remove(parts)
        elif kind == stat.S_IFDIR:
            is_merged = _is_directory(below) and not self._is_opaque(self._upper, parts)
            if not is_merged:
                if below is not None:
                    self._remove(parts)
                self._add(Step("directory", parts, lambda edit: edit.make_directory(parts)))
            self._enter(parts, is_merged)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            raise FilesystemError(
                f"The command made a device at {shown(join_path(parts))}. A workspace cannot have"
                " devices, so all changes of the command are undone"
            )
        elif kind == stat.S_IFREG:
            self._read_file(parts, status, tree, below)
        elif tree is None or below is None or not self._is_same_link(parts, status, tree, below):
            self._move(parts, below)

    def _below(self, tree: Tree, parts: Parts) -> os.stat_result | None:
        """Return what a command saw at a path; None also where a link or a file blocks it."""
        if tree is not self._tree:
            return tree.status_if_reached(parts)
        try:
            return self._near.status(parts)
        except OSError as error:
            if error.errno in BARRED:
                return None
            raise

    def _read_file(
        self, parts: Parts, status: os.stat_result, tree: Tree | None, below: os.stat_result | None
    ) -> None:
        if status.st_ino in self._handles:
            own = self._captured(self._upper, parts)
            assert own is not None
            if self._is_linked(parts, own, below):
                return
        # A file is in the upper layer as soon as it was opened for writing, or its mode changed.
        is_same = (
            tree is not None
            and below is not None
            and status.st_nlink == 1
            and stat.S_ISREG(below.st_mode)
            and (status.st_size, status.st_mtime_ns) == (below.st_size, below.st_mtime_ns)
            and self._has_same_bytes(parts, tree)
        )
        if tree is None or not is_same:
            self._move(parts, below)
            return
        own = self._captured(self._upper, parts)
        assert own is not None
        if not own.is_like(self._captured(tree, parts) or own):
            self._add(_attributes(parts, own))

    def _has_same_bytes(self, parts: Parts, tree: Tree) -> bool:
        with Held(tree.open_file(parts)) as fd:
            return _holds(fd, self._upper, parts)

    def _is_same_link(
        self, parts: Parts, status: os.stat_result, tree: Tree, below: os.stat_result
    ) -> bool:
        return (
            stat.S_ISLNK(status.st_mode)
            and stat.S_ISLNK(below.st_mode)
            and (status.st_uid, status.st_gid) == (below.st_uid, below.st_gid)
            and status.st_mtime_ns == below.st_mtime_ns
            and self._upper.link_target(parts) == tree.link_target(parts)
        )

    # Files that had several names before: they keep them, and their inode

    def _is_linked(self, parts: Parts, own: Entry, below: os.stat_result | None) -> bool:
        handle = self._handles.get(own.ino)
        was = None if handle is None else self._original(handle)
        if handle is None or was is None:
            return False
        if below is None or (below.st_dev, below.st_ino) != was.file:
            link = Step("link", parts, lambda edit: self._link(edit, handle, parts))
            self._replace(link, below)
        if own.ino not in self._settled:
            self._settled.add(own.ino)
            for step in self._rewritten(parts, own, was, handle, (self._upper, parts)):
                self._add(step)
        return True

    def _nameless(self) -> list[Step]:
        """Return the steps for files that were changed, and then lost all names in the layer.

        Names that they have elsewhere show the change. So it is made before the names go.
        """
        steps: list[Step] = []
        for ino, handle in self._handles.items():
            was = self._original(handle) if ino not in self._settled else None
            own = None if self._index is None else self._captured(self._index, (handle,))
            if was is None or own is None or self._index is None:
                continue
            source = self._index, (handle,)
            # Its name is looked for everywhere, so only if it has changed.
            is_changed = self._rewritten((), own, was, handle, source)
            parts = self._name_of(was) if is_changed else None
            if parts is not None:
                steps += self._rewritten(parts, own, was, handle, source)
        return steps

    def _rewritten(
        self, parts: Parts, own: Entry, was: Entry, handle: str, source: tuple[Tree, Parts]
    ) -> list[Step]:
        """Return the steps that give a file in the workspace a layer's content and attributes."""
        steps: list[Step] = []
        if own.size != was.size or not self._is_original(handle, *source):
            tree, place = source
            steps.append(
                Step("rewrite", parts, lambda edit: edit.write(parts, tree.read(place)[0]))
            )
        if steps or own.mtime_ns != was.mtime_ns or not own.is_like(was):
            steps.append(_attributes(parts, own))
        return steps

    def _name_of(self, file: Entry) -> Parts | None:
        """Return a name that a file had before the command, preferably a deleted one."""
        for top in [*(step.parts for step in self._steps if step.action != "directory"), ()]:
            tree = self._lower(top)
            for parts, status in () if tree is None else tree.walk(top):
                if (status.st_dev, status.st_ino) == file.file:
                    return parts
        return None

    def _original(self, handle: str) -> Entry | None:
        """Return the workspace's file that a handle stands for, if the system gives it."""
        with self._opened(handle) as fd:
            if fd is None:
                return None
            return self._without_own(Entry.of(os.fstat(fd), xattrs=xattrs_of(fd)))

    def _is_original(self, handle: str, tree: Tree, parts: Parts) -> bool:
        with self._opened(handle) as fd:
            return fd is not None and _holds(fd, tree, parts)

    def _opened(self, handle: str) -> contextlib.AbstractContextManager[int | None]:
        """Open a file for reading by what the overlay calls it.

        That is four bytes and the type of the handle, a UUID of sixteen bytes, and the handle that
        the filesystem itself takes.
        """
        name = bytes.fromhex(handle)
        body, kind = name[21:], name[4]
        numbers = len(body).to_bytes(4, sys.byteorder) + kind.to_bytes(4, sys.byteorder)
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(numbers + body)
        fd = libc.open_by_handle_at(self._tree.fd, buffer, os.O_RDONLY | os.O_CLOEXEC)
        return contextlib.nullcontext() if fd < 0 else Held(fd)

    def _link(self, edit: Edit, handle: str, parts: Parts) -> None:
        with self._opened(handle) as fd:
            if fd is None:
                raise system_error(errno.ENOENT, parts)
            edit.link(Path(f"/proc/self/fd/{fd}"), parts)

    # Adding steps

    def _add(self, step: Step) -> None:
        self._steps.append(step)
        self._changed.add(step.parts[:-1])

    def _remove(self, parts: Parts) -> None:
        self._add(Step("remove", parts, lambda edit: edit.remove(parts)))

    def _move(self, parts: Parts, below: os.stat_result | None) -> None:
        def put(edit: Edit) -> None:
            edit.put_file(parts, self._near_upper.path(parts))

        _scrub(self._near_upper.path(parts), self._prefix)
        self._replace(Step("move", parts, put, (self._upper, parts)), below)

    def _replace(self, step: Step, below: os.stat_result | None) -> None:
        if _is_directory(below):
            self._remove(step.parts)
        self._add(step)


def copied_steps(
    paths: Iterable[Parts], before: Look, workspace: Tree, place: Tree
) -> Iterator[Step]:
    """Yield the steps that make changes again, in the order to do them.

    What is at the changed paths now is copied to ``place``.
    """
    for number, parts in enumerate(sorted(paths)):
        status, was = workspace.status_if_reached(parts), _node_at(before, parts)
        is_same_kind = was is not None and was.is_directory == _is_directory(status)
        if was is not None and (status is None or not is_same_kind):
            if status is None and workspace.status_if_reached(parts[:-1]) is None:
                continue  # it went with its directory
            yield Step("remove", parts, lambda edit, parts=parts: edit.remove(parts))
        if _is_directory(status):
            if not is_same_kind:
                yield Step("directory", parts, lambda edit, parts=parts: edit.make_directory(parts))
        elif status is not None:
            name = str(number)
            copy_exactly(workspace, parts, place, (name,))
            yield Step(
                "move",
                parts,
                lambda edit, parts=parts, name=name: edit.put_file(parts, place.path / name),
                (place, (name,)),
            )


def _node_at(look: Look, parts: Parts) -> Node | None:
    try:
        return look.node(parts)
    except OSError as error:
        if error.errno in BARRED:
            return None
        raise


def _attributes(parts: Parts, own: Entry) -> Step:
    given = Attributes(
        mode=own.mode, mtime_ns=own.mtime_ns, uid=own.uid, gid=own.gid, xattrs=own.xattrs
    )
    return Step("attributes", parts, lambda edit: edit.set_attributes(parts, **given))


def _is_directory(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def _scrub(path: str, prefix: str) -> None:
    """Remove the extended attributes that only the overlay needed."""
    names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(prefix)]
    if not names:
        return
    mode = os.lstat(path).st_mode
    locked = os.geteuid() != 0 and not mode & 0o200
    if locked:
        os.chmod(path, mode | 0o200)
    for name in names:
        os.removexattr(path, name, follow_symlinks=False)
    if locked:
        os.chmod(path, mode)


def _holds(fd: int, tree: Tree, parts: Parts) -> bool:
    """Tell whether an open file and another hold the same bytes."""
    with Held(tree.open_file(parts)) as other:
        while data := os.read(fd, CHUNK):
            if data != os.read(other, CHUNK):
                return False
        return not os.read(other, 1)
