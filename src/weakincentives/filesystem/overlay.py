"""Run a command over an overlay of a directory, and read what it changed from the upper layer.

Linux only. The command sees the workspace at its own path; what it writes goes to a directory in
the store, so its write set is known without looking at anything that it did not change.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import FilesystemError
from weakincentives.filesystem.layers import Look, Node
from weakincentives.filesystem.protocol import Parts, join_path, shown
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.tree import (
    PATIENCE,
    Tree,
    mounted_below,
    remove_tree,
    xattrs_of,
)

SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The first process of the command's own pid namespace: when it ends, the kernel ends all others.
# Descriptor 3 is the command's stderr and 5 its stdin. Descriptor 4 is a pipe that is never
# written to: it ends when the caller closes it or dies, and then everything in here is killed, more
# than once, since the command may be starting just then.
# What the shell itself has to say (`Killed`) is not the command's output.
SCRIPT = """
exec 3>&2 4<&0 5<stdin
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
    """What the names of the overlay's own extended attributes start with."""
    owner: tuple[int, int] | None
    """The user and group a command keeps; None for root, which needs no user namespace."""


class Process:
    """A program and all that it starts. It is killed when it is told to end, or when we die.

    Its input is a pipe that is never written to: it ends when we close it or die, and a shell that
    leads the program's process group then kills the others.

    Args:
        before: Called in the thread that starts the program.
        namespace: Whether it has a pid namespace of its own, so that nothing outlives its leader.
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
    ) -> None:
        reading, writing = os.pipe()
        self._namespace = namespace
        self._lifeline: int | None = writing

        def start() -> subprocess.Popen[bytes]:
            if before is not None:
                before()
            return subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=reading,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=inherited,
            )

        try:
            self.popen = _in_a_thread(start)
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)

    def kill(self) -> None:
        """Kill the program and everything that it started."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)
        if not self._namespace:
            kill_group(self.popen)

    def end(self) -> None:
        """Kill it, and wait until nothing of it is left."""
        self.kill()
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()
        if not self._namespace:
            # What it was just writing would come after the look for changes.
            wait_for_group(self.popen)
        try:
            self.popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            # The command killed the process that would have killed it.
            kill_group(self.popen)
            self.popen.wait()


def _in_a_thread(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a program from a thread of its own, which may enter namespaces.

    An interrupt that comes meanwhile is raised once the program is known, and killed.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def run() -> None:
        if started.set_running_or_notify_cancel():
            try:
                process = start()
            except BaseException as error:
                started.set_exception(error)
            else:
                started.set_result(process)

    try:
        threading.Thread(target=run, name="wink-command").start()
        return started.result()
    except BaseException:
        if not started.cancel() and started.exception() is None:
            with started.result() as process:
                kill_group(process)
        raise


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and what it started, as far as that has not left its process group."""
    # The group's number stays taken while any of them is there.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def wait_for_group(process: subprocess.Popen[bytes]) -> None:
    """Return when nothing runs any more of a group that was killed, where the system tells."""
    until = SYSTEM_CLOCK.monotonic() + PATIENCE
    pause = threading.Event()
    while _runs(process.pid) and SYSTEM_CLOCK.monotonic() < until:
        pause.wait(0.001)


def _runs(group: int) -> bool:
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

    It is found by trying, once for each workspace and filesystem of the store. A filesystem mounted
    inside the workspace, which an overlay would hide, is looked for each time.
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
    programs = {name: shutil.which(name, path=SEARCH) for name in ("unshare", "sh", "mount")}
    unshare, shell, mount = programs.values()
    if unshare is None or shell is None or mount is None:
        missing = ", ".join(name for name, path in programs.items() if path is None)
        return f"these programs are missing: {missing}"
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
    """Return what the system says when a command that changes a file is tried this way."""
    place = store / f"probe-{os.urandom(8).hex()}"
    layers = Layers(place, workspace, way)
    try:
        layers.prepare()
        process = layers.start(["touch", "probe"], directory=workspace)
        try:
            _, said = process.popen.communicate(timeout=PATIENCE)
        finally:
            process.end()
        code = process.popen.returncode
        if code or not (layers.upper / "probe").exists():
            return said.decode(errors="replace").strip() or f"exit code {code}"
        return None
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        layers.discard()


class Layers:
    """The directories of one command: what it sees below, and the upper one that it writes to."""

    def __init__(self, place: Path, workspace: Path, way: Way) -> None:
        self.place = place
        self.upper = place / "upper"
        self.staged = place / "staged"
        """What lies between the workspace and the upper layer, when a view's changes do."""
        self.workspace = workspace
        self._way = way
        self._trees: list[Tree] = []

    def prepare(self, stdin: bytes = b"") -> None:
        """Make the directories; the upper one with the attributes that the workspace has."""
        self.place.mkdir(mode=0o700)
        self.upper.mkdir(mode=0o700)
        (self.place / "work").mkdir(mode=0o700)
        # A name without colons or commas, whatever the workspace is called.
        (self.place / "lower").symlink_to(self.workspace)
        (self.place / "stdin").write_bytes(stdin)
        _take_after(self.upper, os.stat(self.workspace), self.workspace)

    def cover(self, look: Look, paths: AbstractSet[Parts], tree: Tree) -> None:
        """Lay what a view sees at some paths between the workspace and the upper layer."""
        if not paths:
            return
        self.staged.mkdir(mode=0o700)
        staged = Tree(self.staged)
        try:
            _Cover(look, tree, staged, f"{self._way.xattrs}opaque").lay(paths)
        finally:
            staged.close()

    def start(
        self, argv: Sequence[str], *, directory: Path, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start the command over the overlay."""
        way = self._way
        lower = "staged:lower" if self.staged.exists() else "lower"
        options = f"lowerdir={lower},{way.options}"
        wrapped = [way.unshare, "--mount", "--mount-proc"]
        inner = [str(directory), str(self.place)]
        before = None
        if way.owner is None:
            wrapped += ["--", way.shell, "-c", SCRIPT, "wink", *inner]
            before = partial(self._enter, options)
        else:
            # Mounting takes the namespace's root; the command runs as the user it is.
            uid, gid = way.owner
            wrapped += ["--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
            wrapped += ["--", way.shell, "-c", MOUNT + SCRIPT, "wink"]
            wrapped += [way.mount, options, str(self.workspace), *inner]
            wrapped += [way.unshare, "--user", f"--map-user={uid}", f"--map-group={gid}", "--"]
        argv = [*wrapped, *argv]
        return Process(argv, cwd=self.place, env=env, before=before, namespace=True)

    def _enter(self, options: str) -> None:
        """Bring this thread, and what it starts, into namespaces with the overlay mounted.

        The rest of the process sees nothing of it. Programs that do the same take much longer.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.unshare(CLONE_NEWNS | CLONE_NEWPID))
        _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        # The working directory is this thread's alone by now. It keeps odd names out of options.
        os.chdir(self.place)
        target = os.fsencode(self.workspace)
        _check(libc.mount(b"overlay", target, b"overlay", 0, os.fsencode(options)))

    @property
    def started(self) -> bool:
        """Whether the command was reached: the overlay is mounted, its directory is there."""
        return (self.place / "started").exists()

    def discard(self) -> None:
        """Throw away everything that was written."""
        while self._trees:
            self._trees.pop().close()
        remove_tree(self.place)

    def steps(self, tree: Tree) -> list[Step]:
        """Return what turns the workspace into what the command saw, in the order to do it.

        They lead to what is in the layers: apply them before these are discarded.
        """
        prefix = self._way.xattrs
        lower = Lower(tree, self._opened(self.staged), prefix)
        index = self._opened(self.place / "work" / "index") if self._way.owner is None else None
        upper = self._opened(self.upper)
        assert upper is not None
        return _Reader(self.workspace, upper, lower, index, prefix).read()

    def _opened(self, place: Path) -> Tree | None:
        """Return a layer that is there; it stays open until all are discarded."""
        if not place.exists():
            return None
        self._trees.append(Tree(place))
        return self._trees[-1]


# Laying a private view's changes over the workspace


class _Cover:
    def __init__(self, look: Look, tree: Tree, staged: Tree, opaque: str) -> None:
        self._look = look
        self._tree = tree
        self._staged = staged
        self._opaque = opaque
        self._done: set[Parts] = set()
        """Paths whose whole content is laid out."""
        self._files: dict[tuple[int, int], Parts] = {}
        """Where the files with several names are laid out."""

    def lay(self, paths: Iterable[Parts]) -> None:
        for parts in sorted(paths):
            if not any(parts[:depth] in self._done for depth in range(len(parts) + 1)):
                self._lay_one(parts)

    def _lay_one(self, parts: Parts) -> None:
        try:
            node = self._look.node(parts)
        except OSError:
            return  # below something else, which is laid out itself
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
        """Put what the view sees at a path, with all that is in it, into the layer."""
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
        """Lay out what is not a directory; False for one more name of what is laid out."""
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
        return True


def _finish(place: str, node: Node) -> None:
    if node.kind != "link":
        os.chmod(place, node.mode)
    os.utime(place, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)


def _take_after(place: Path | str, status: os.stat_result, original: Path | str) -> None:
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.chown(place, status.st_uid, status.st_gid)
    shutil.copystat(original, place)


# Reading the upper layer


@dataclass(frozen=True, slots=True)
class Attributes:
    """What belongs to a path besides its content."""

    mode: int
    mtime_ns: int
    uid: int
    gid: int
    xattrs: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, place: str | int, status: os.stat_result, prefix: str) -> Attributes:
        """Return those of a path or an open file, without the overlay's own."""
        xattrs = tuple(one for one in xattrs_of(place) if not one[0].startswith(prefix))
        mode = stat.S_IMODE(status.st_mode)
        return cls(mode, status.st_mtime_ns, status.st_uid, status.st_gid, xattrs)

    def differs(self, other: Attributes) -> bool:
        """Tell whether anything but the time differs."""
        return replace(self, mtime_ns=other.mtime_ns) != other


_HANDLE_TYPE = 4
_HANDLE_START = 21


@dataclass(frozen=True, slots=True)
class Handle:
    """Stands for a file with several names in the workspace, whatever they are."""

    workspace: Path
    name: bytes
    """What the overlay calls it: four bytes and the handle's type, a UUID of sixteen bytes, and
    then what the filesystem itself takes for a handle."""

    def open(self) -> int | None:
        """Return a descriptor that only stands for the file, if the system gives one."""
        body = self.name[_HANDLE_START:]
        size, kind = len(body), self.name[_HANDLE_TYPE]
        numbers = size.to_bytes(4, sys.byteorder) + kind.to_bytes(4, sys.byteorder)
        libc = ctypes.CDLL(None, use_errno=True)
        directory = os.open(self.workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            handle = ctypes.create_string_buffer(numbers + body)
            opened = libc.open_by_handle_at(directory, handle, os.O_PATH | os.O_CLOEXEC)
        finally:
            os.close(directory)
        return None if opened < 0 else opened


Action = Literal["remove", "directory", "move", "link", "rewrite", "attributes"]


@dataclass(frozen=True, slots=True)
class Step:
    """One change of the workspace.

    ``remove`` what is there; make a ``directory``; ``move`` the source there, whatever it is;
    ``link`` the file there that the handle stands for; ``rewrite`` what is there in place with the
    source's bytes; set the ``attributes``.
    """

    action: Action
    parts: Parts
    source: tuple[Tree, Parts] | None = None
    attributes: Attributes | None = None
    handle: Handle | None = None


class Lower:
    """What the command saw before it changed anything: the workspace, and a staged layer on it."""

    def __init__(self, tree: Tree, staged: Tree | None, prefix: str) -> None:
        self._tree = tree
        self._staged = staged
        self._prefix = prefix

    def status(self, parts: Parts) -> os.stat_result | None:
        """Return what is there, or None."""
        tree = self._where(parts)
        return None if tree is None else tree.status_if_reached(parts)

    def link_target(self, parts: Parts) -> str:
        """Return where a symlink leads."""
        return self._found(parts).link_target(parts)

    def open_file(self, parts: Parts) -> int:
        """Return a descriptor to read the file with."""
        return self._found(parts).open_file(parts)

    def attributes(self, parts: Parts, status: os.stat_result) -> Attributes:
        """Return a path's attributes, given its status."""
        with self._found(parts).reached(parts) as path:
            return Attributes.of(path, status, self._prefix)

    def walk(self, parts: Parts) -> Iterator[tuple[Parts, os.stat_result]]:
        """Yield what is at a path and below it, as far as one tree has it."""
        tree = self._where(parts)
        return iter(()) if tree is None else tree.walk(parts)

    def _found(self, parts: Parts) -> Tree:
        tree = self._where(parts)
        if tree is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join_path(parts))
        return tree

    def _where(self, parts: Parts) -> Tree | None:
        """Return the tree in which a path is seen; None for one that the staged layer hides."""
        if self._staged is None or not parts:
            return self._tree
        for depth in range(1, len(parts) + 1):
            status = self._staged.status(parts[:depth])
            if status is None:
                return self._tree
            if stat.S_ISCHR(status.st_mode):
                return None
            if not stat.S_ISDIR(status.st_mode):
                return self._staged
            with self._staged.reached(parts[:depth]) as path:
                if _is_marked(path, f"{self._prefix}opaque"):
                    return self._staged
        return self._staged


class _Reader:
    """Reads what a command changed from the upper layer."""

    def __init__(
        self, workspace: Path, upper: Tree, lower: Lower, index: Tree | None, prefix: str
    ) -> None:
        self._workspace = workspace
        self._upper = upper
        self._lower = lower
        self._index = index
        self._prefix = prefix
        self._steps: list[Step] = []
        self._changed: set[Parts] = set()
        """The directories in which something changed."""
        self._handles: dict[int, Handle] = {}
        """By inode in the upper layer: what stands for each file that had several names before."""
        self._settled: set[int] = set()
        """The inodes of those whose content is dealt with."""
        self._pending: list[tuple[Parts, bool, Attributes | None]] = []
        """Paths to look at, with whether something may be below them; directories to leave."""

    def read(self) -> list[Step]:
        names = () if self._index is None else self._index.scan(())
        indexed = {
            status.st_ino: (name, Handle(self._workspace, bytes.fromhex(name)))
            for name, status in names
            if stat.S_ISREG(status.st_mode) and not name.startswith("#")
        }
        self._handles = {ino: handle for ino, (_, handle) in indexed.items()}
        self._enter((), True)
        # Not recursive: a command may nest directories deeper than Python's stack.
        while self._pending:
            parts, merged, own = self._pending.pop()
            if own is not None:
                self._leave(parts, merged, own)
            else:
                self._entry(parts, merged)
        return [*self._nameless(indexed), *self._steps]

    def _nameless(self, indexed: Mapping[int, tuple[str, Handle]]) -> list[Step]:
        """Return the steps for files that were changed, and then lost all names in the layer.

        Those that they have elsewhere show the change. So it is made before the names go.
        """
        steps: list[Step] = []
        for ino, (name, handle) in indexed.items():
            if ino in self._settled or self._index is None:
                continue
            with self._index.reached((name,)) as path:
                own = Attributes.of(path, os.lstat(path), self._prefix)
                was, same, attributes = _compare(handle, path, self._prefix) or (None, True, own)
            if was is None or (same and own == attributes):
                continue
            parts = self._name_of(was)
            if parts is not None:
                source = self._index, (name,)
                steps += [] if same else [Step("rewrite", parts, source)]
                steps.append(Step("attributes", parts, attributes=own))
        return steps

    def _name_of(self, file: os.stat_result) -> Parts | None:
        """Return a name that a file had before the command, first among those that go."""
        for top in [*(step.parts for step in self._steps if step.action != "directory"), ()]:
            for parts, status in self._lower.walk(top):
                if os.path.samestat(file, status):
                    return parts
        return None

    def _add(self, step: Step) -> None:
        self._steps.append(step)
        self._changed.add(step.parts[:-1])

    def _enter(self, parts: Parts, merged: bool) -> None:
        """Look at all that is in a directory of the upper layer, then at itself."""
        with self._upper.reached(parts) as path:
            status = os.lstat(path)
            own = Attributes.of(path, status, self._prefix)
            if os.geteuid() and status.st_mode & 0o700 != 0o700:
                os.chmod(path, status.st_mode | 0o700)
        self._pending.append((parts, merged, own))
        for name in sorted(self._upper.names(parts), reverse=True):
            if not name.startswith(TEMPORARY):  # what the call has replaced so far waits there
                self._pending.append(((*parts, name), merged, None))

    def _leave(self, parts: Parts, merged: bool, own: Attributes) -> None:
        if not merged:
            self._add(Step("attributes", parts, attributes=own))
            return
        status = self._lower.status(parts)
        if status is None:
            return
        was = self._lower.attributes(parts, status)
        # A directory is in the upper layer when anything below it changed, and its time moves
        # when an entry comes or goes: neither is a change of its own.
        moved = own.mtime_ns != was.mtime_ns and parts not in self._changed
        if own.differs(was) or moved:
            self._add(Step("attributes", parts, attributes=own))

    def _entry(self, parts: Parts, merged: bool) -> None:
        below = self._lower.status(parts) if merged else None
        with self._upper.reached(parts) as path:
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            if _is_whiteout(path, status, self._prefix):
                if below is not None:
                    self._add(Step("remove", parts))
            elif kind == stat.S_IFDIR:
                self._subdirectory(path, parts, below)
            elif kind == stat.S_IFREG:
                self._file(path, parts, status, below)
            elif kind in (stat.S_IFCHR, stat.S_IFBLK):
                raise FilesystemError(
                    f"The command made a device at {shown(join_path(parts))}. Devices are not kept"
                    " in the workspace, so nothing that the command changed was kept"
                )
            elif kind != stat.S_IFLNK or not self._same_link(path, parts, below):
                self._move(path, parts, below)

    def _subdirectory(self, path: str, parts: Parts, below: os.stat_result | None) -> None:
        is_directory = below is not None and stat.S_ISDIR(below.st_mode)
        merged = is_directory and not _is_marked(path, f"{self._prefix}opaque")
        if not merged:
            if below is not None:
                self._add(Step("remove", parts))
            self._add(Step("directory", parts))
        self._enter(parts, merged)

    def _file(
        self, path: str, parts: Parts, status: os.stat_result, below: os.stat_result | None
    ) -> None:
        own = Attributes.of(path, status, self._prefix)
        handle = self._handles.get(status.st_ino)
        if handle is not None and self._linked(path, parts, status, own, handle, below):
            return
        if (
            below is None
            or not stat.S_ISREG(below.st_mode)
            or status.st_nlink > 1
            or not self._same_bytes(path, parts, status, below)
        ):
            self._move(path, parts, below)
        elif own.differs(self._lower.attributes(parts, below)):
            self._add(Step("attributes", parts, attributes=own))

    def _linked(
        self,
        path: str,
        parts: Parts,
        status: os.stat_result,
        own: Attributes,
        handle: Handle,
        below: os.stat_result | None,
    ) -> bool:
        """Add the steps for a file that had several names before: it keeps them, and its inode."""
        compared = _compare(handle, path, self._prefix)
        if compared is None:
            return False
        was, same, attributes = compared
        if below is None or not os.path.samestat(below, was):
            self._replace(Step("link", parts, handle=handle), below)
        if status.st_ino in self._settled:
            return True
        self._settled.add(status.st_ino)
        if not same:
            self._add(Step("rewrite", parts, (self._upper, parts)))
        if not same or own != attributes:
            self._add(Step("attributes", parts, attributes=own))
        return True

    def _same_bytes(
        self, path: str, parts: Parts, status: os.stat_result, below: os.stat_result
    ) -> bool:
        # A file is in the upper layer as soon as it was opened for writing, or its mode changed.
        if (status.st_size, status.st_mtime_ns) != (below.st_size, below.st_mtime_ns):
            return False
        old = self._lower.open_file(parts)
        try:
            with open(path, "rb") as new:
                return _equal(old, new.fileno())
        finally:
            os.close(old)

    def _same_link(self, path: str, parts: Parts, below: os.stat_result | None) -> bool:
        if below is None or not stat.S_ISLNK(below.st_mode):
            return False
        own = os.lstat(path)
        return (own.st_uid, own.st_gid, own.st_mtime_ns) == (
            below.st_uid,
            below.st_gid,
            below.st_mtime_ns,
        ) and os.readlink(path) == self._lower.link_target(parts)

    def _move(self, path: str, parts: Parts, below: os.stat_result | None) -> None:
        _scrub(path, self._prefix)
        self._replace(Step("move", parts, (self._upper, parts)), below)

    def _replace(self, step: Step, below: os.stat_result | None) -> None:
        if below is not None and stat.S_ISDIR(below.st_mode):
            self._add(Step("remove", step.parts))
        self._add(step)


def _compare(
    handle: Handle, path: str, prefix: str
) -> tuple[os.stat_result, bool, Attributes] | None:
    """Return what a handle stands for, whether it holds the same as the file at a path, and its
    attributes; None where the system does not give it.
    """
    opened = handle.open()
    if opened is None:
        return None
    try:
        was = os.fstat(opened)
        with open(f"/proc/self/fd/{opened}", "rb") as old, open(path, "rb") as new:
            sizes = was.st_size == os.fstat(new.fileno()).st_size
            same = sizes and _equal(old.fileno(), new.fileno())
            return was, same, Attributes.of(old.fileno(), was, prefix)
    finally:
        os.close(opened)


def _is_whiteout(path: str, status: os.stat_result, prefix: str) -> bool:
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    # The other form, which tools write where they cannot make device nodes.
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_size == 0
        and f"{prefix}whiteout" in os.listxattr(path, follow_symlinks=False)
    )


def _is_marked(path: str, name: str) -> bool:
    try:
        return os.getxattr(path, name, follow_symlinks=False) == b"y"
    except OSError:
        return False


def _scrub(path: str, prefix: str) -> None:
    """Take away the extended attributes that only the overlay needed."""
    status = os.lstat(path)
    names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(prefix)]
    if not names:
        return
    locked = os.geteuid() != 0 and not status.st_mode & 0o200
    if locked:
        os.chmod(path, status.st_mode | 0o200)
    for name in names:
        os.removexattr(path, name, follow_symlinks=False)
    if locked:
        os.chmod(path, status.st_mode)


def _equal(one: int, other: int) -> bool:
    while True:
        data = os.read(one, 1 << 20)
        if data != os.read(other, 1 << 20):
            return False
        if not data:
            return True
