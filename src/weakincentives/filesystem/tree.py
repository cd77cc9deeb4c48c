"""A directory tree that nothing leads out of: every call works on directory descriptors.

The kernel never gets a path with a symbolic link in it. Links are read here, name by name, and
their targets are opened anew, so a link that is planted between check and use is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.filesystem.paths import BARRED, NodeKind, Parts, not_regular, resolve

T = TypeVar("T")

CHUNK = 1 << 20
LONGEST = 4000
"""Bytes of a path in one system call: Linux allows 4095. A longer path is opened in pieces."""

# Seconds for what takes milliseconds, unless the machine stalls: a wrong answer would be remembered
# for as long as this process lives.
PATIENCE = 60.0

# Missing on some systems; the module must still load there.
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_PATH = getattr(os, "O_PATH", 0)

_OPEN_DIRECTORY = os.O_RDONLY | _DIRECTORY | _NOFOLLOW | _CLOEXEC
_OPEN_FILE = os.O_RDONLY | _NOFOLLOW | _NONBLOCK | _CLOEXEC


def supported() -> bool:
    """Tell whether the system has calls relative to directory descriptors."""
    return {os.open, os.stat, os.rename, os.unlink, os.link, os.utime} <= os.supports_dir_fd


class Held(int):
    """An open directory descriptor for a ``with`` block, closed at its end."""

    __slots__ = ()
    __enter__ = int.__int__  # runs in C: every change opens several directories

    def __exit__(self, *_: object) -> None:
        os.close(self)


class _Root(Held):
    """A tree's own descriptor, which stays open."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        pass


class Tree:
    """The files below one directory. Paths are name by name; errors are the system's own.

    ``ELOOP`` or ``ENOTDIR`` from any method means that the path is not canonical (any more):
    :meth:`resolve` finds the one that is.
    """

    def __init__(self, root: Path, *, openat2: bool = True, resolved: bool = False) -> None:
        self.path = root if resolved else Path(os.path.realpath(root))
        named = root if resolved else Path(os.path.abspath(root))
        self.spellings = tuple(dict.fromkeys((self.path.parts[1:], named.parts[1:])))
        """The paths of the root: as the system names it, and as the caller did."""
        self.fd = os.open(self.path, os.O_RDONLY | _DIRECTORY | _CLOEXEC)
        # A view keeps trees open for as long as it lives, and is not always closed.
        self._closed = weakref.finalize(self, os.close, self.fd)
        self._closed.atexit = False
        self._root = _Root(self.fd)
        self.mount = mount_of(self.fd)
        self.exchanges: dict[Mount, bool] = {}
        """Where two names can be exchanged in one step, as far as that was tried."""
        self._openat2 = _find_openat2() if openat2 else None

    def close(self) -> None:
        self.fd = self._root = _Root(-1)
        self._closed()

    # Opening

    def directory(self, parts: Parts) -> Held:
        """Return a directory's descriptor, to be held in a ``with`` block.

        For the root that is ours: it works even if the root can no longer be opened.
        """
        return Held(self._open(parts, _OPEN_DIRECTORY)) if parts else self._root

    def listing(self, parts: Parts) -> Held:
        """Return a new descriptor, to read names with: its position is not shared."""
        return Held(self._open(parts, _OPEN_DIRECTORY))

    def parent(self, parts: Parts) -> Held:
        """Return the descriptor of the directory that holds the last name of a path."""
        return Held(self._open(parts[:-1], _OPEN_DIRECTORY)) if len(parts) > 1 else self._root

    @contextlib.contextmanager
    def reached(self, parts: Parts) -> Generator[str]:
        """Give a short path to something, however deep it is, for calls that take no descriptor.

        Linux only; the path is valid within the block.
        """
        with self.parent(parts) as above:
            yield f"/proc/self/fd/{above}/{parts[-1] if parts else '.'}"

    def open_file(self, parts: Parts) -> int:
        """Return a new descriptor for reading; the caller checks what was opened."""
        return self._open(parts, _OPEN_FILE)

    def _open(self, parts: Parts, flags: int) -> int:
        if len(parts) == 1:
            return os.open(parts[0], flags, dir_fd=self.fd)
        if self._openat2 is not None and parts:
            path = os.fsencode("/".join(parts))
            try:
                if len(path) <= LONGEST:
                    return self._openat2(self.fd, path, flags)
                return _open_in_steps(self.fd, _pieces(path), flags, self._openat2)
            except OSError as error:
                # Something was renamed meanwhile, or a directory is searchable but not readable.
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
        return _open_in_steps(self.fd, parts or (".",), flags, _open_name)

    # Reading

    def status(self, parts: Parts) -> os.stat_result | None:
        """Return the status of a path, of a link itself and not its target; None for nothing."""
        if not parts:
            return os.fstat(self.fd)
        try:
            if len(parts) == 1:
                return os.stat(parts[0], dir_fd=self.fd, follow_symlinks=False)
            above = self._open(parts[:-1], _OPEN_DIRECTORY)
        except FileNotFoundError:
            return None
        try:
            return os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
        except FileNotFoundError:
            return None
        finally:
            os.close(above)

    def status_if_reached(self, parts: Parts) -> os.stat_result | None:
        """Like ``status``; None also where a link or a file blocks the path."""
        try:
            return self.status(parts)
        except OSError as error:
            if error.errno in BARRED:
                return None
            raise

    def link_target(self, parts: Parts) -> str:
        with self.parent(parts) as fd:
            return os.readlink(parts[-1], dir_fd=fd)

    def read(self, parts: Parts) -> tuple[bytes, os.stat_result]:
        """Return a regular file's bytes and status; others raise EISDIR, or EINVAL unread."""
        fd = self.open_file(parts)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                is_directory = stat.S_ISDIR(status.st_mode)
                raise not_regular("directory" if is_directory else "other", parts)
            return read_all(fd, status.st_size), status
        finally:
            os.close(fd)

    def names(self, parts: Parts) -> list[str]:
        with self.listing(parts) as fd:
            return os.listdir(fd)

    def scan(self, parts: Parts) -> list[tuple[str, os.stat_result]]:
        """Return name and status of everything in a directory; what vanishes is skipped."""
        with self.listing(parts) as fd:
            found: list[tuple[str, os.stat_result]] = []
            for name in os.listdir(fd):
                with contextlib.suppress(FileNotFoundError):
                    found.append((name, os.stat(name, dir_fd=fd, follow_symlinks=False)))
            return found

    def kinds(self, parts: Parts) -> list[tuple[str, NodeKind]]:
        """Return name and kind of everything in a directory.

        Needs no status per name where the directory itself has the types.
        """
        with self.listing(parts) as fd, os.scandir(fd) as entries:
            return [(entry.name, _kind_of(entry)) for entry in entries]

    # Resolving

    def resolve(
        self, parts: Parts, *, follow: bool = True, seen: set[Parts] | None = None
    ) -> Parts:
        return resolve(parts, self.link_target, self.below_root, follow=follow, seen=seen)

    def below_root(self, target: str) -> list[str] | None:
        """Return the names that an absolute path has below the root; None for one outside."""
        names = [name for name in target.split("/") if name and name != "."]
        for spelling in self.spellings:
            if tuple(names[: len(spelling)]) == spelling:
                return names[len(spelling) :]
        return None

    # Changing

    def chmod(self, parts: Parts, mode: int) -> None:
        with self.parent(parts) as above:
            chmod_at(above, parts[-1] if parts else ".", mode)

    def remove_all(self, parts: Parts) -> None:
        """Remove whatever is at a path, if anything."""
        with contextlib.suppress(FileNotFoundError), self.parent(parts) as fd:
            status = os.stat(parts[-1], dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                remove_directory(fd, parts[-1])
            else:
                os.unlink(parts[-1], dir_fd=fd)

    def walk(self, top: Parts, *, lenient: bool = False) -> Iterator[tuple[Parts, os.stat_result]]:
        """Yield path and status of a path and everything below it, directories first.

        With ``lenient``, a directory that cannot be read, or vanishes, is skipped.
        """
        status = self.status(top)
        if status is None:
            return
        yield top, status
        pending = [top] if stat.S_ISDIR(status.st_mode) else []
        while pending:
            parts = pending.pop()
            try:
                found = self.scan(parts)
            except OSError:
                if not lenient:
                    raise
                continue
            for name, status in found:
                yield (*parts, name), status
                if stat.S_ISDIR(status.st_mode):
                    pending.append((*parts, name))


class Near:
    """A tree of which one directory stays open: what is read next is usually in the same one."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._parts: Parts | None = None
        self._held: Held | None = None

    def close(self) -> None:
        held, self._held, self._parts = self._held, None, None
        if held is not None:
            held.__exit__()

    def parent(self, parts: Parts) -> int:
        """Return the descriptor of the directory that holds the last name, until the next call."""
        if self._held is None or parts[:-1] != self._parts:
            self.close()
            self._held, self._parts = self.tree.directory(parts[:-1]), parts[:-1]
        return self._held

    def status(self, parts: Parts) -> os.stat_result | None:
        """Return the status of a path, of a link itself and not its target; None for nothing."""
        if not parts:
            return self.tree.status(parts)
        try:
            return os.stat(parts[-1], dir_fd=self.parent(parts), follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open_file(self, parts: Parts) -> int:
        """Return a new descriptor for reading; the caller checks what was opened."""
        return os.open(parts[-1], _OPEN_FILE, dir_fd=self.parent(parts))

    def path(self, parts: Parts) -> str:
        """Return a short path to something, valid until the next call."""
        return f"/proc/self/fd/{self.parent(parts)}/{parts[-1]}"


def status_at(above: int, name: str) -> os.stat_result | None:
    """Return the status of a name in a directory, of a link itself; None for nothing."""
    try:
        return os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _pieces(path: bytes) -> list[bytes]:
    """Return a path in pieces, each short enough for one system call."""
    pieces: list[bytes] = []
    while len(path) > LONGEST:
        cut = path.rfind(b"/", 0, LONGEST)
        pieces.append(path[:cut])
        path = path[cut + 1 :]
    return [*pieces, path]


def _open_in_steps(
    root: int, pieces: Sequence[T], flags: int, open_one: Callable[[int, T, int | None], int]
) -> int:
    """Open a path piece by piece; all but the last are directories on the way."""
    above = root
    try:
        for piece in pieces[:-1]:
            below = open_one(above, piece, None)
            if above != root:
                os.close(above)
            above = below
        return open_one(above, pieces[-1], flags)
    finally:
        if above != root:
            os.close(above)


def _open_name(above: int, name: str, flags: int | None) -> int:
    if flags is not None:
        return os.open(name, flags, dir_fd=above)
    try:
        return os.open(name, _OPEN_DIRECTORY, dir_fd=above)
    except PermissionError:
        if not _PATH:
            raise
        # Searchable but not readable.
        return os.open(name, _PATH | _DIRECTORY | _NOFOLLOW | _CLOEXEC, dir_fd=above)


def everything_below(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of everything below a directory, named as the system does; what vanishes
    or is not readable is skipped.
    """
    with contextlib.closing(Tree(folder, resolved=True)) as tree:
        for parts, status in tree.walk((), lenient=True):
            if parts:
                yield status


def files_below(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of every file below a directory, as :func:`everything_below` does."""
    below = everything_below(Path(os.path.realpath(folder)))
    return (status for status in below if not stat.S_ISDIR(status.st_mode))


def remove_directory(above: int, name: str) -> None:
    """Remove a directory with everything in it, however deep and whatever its modes.

    Two descriptors are open at a time, and no path is longer than one name. A mount in it raises
    ``EBUSY``.
    """
    fd = _open_to_remove(name, above)
    try:
        mount = mount_of(fd)
        # For each directory on the way down: its name, its status, the directories left in it.
        way = [(name, os.fstat(fd), _unlink_files(fd))]
        while True:
            here, status, inner = way[-1]
            if inner:
                child = inner.pop()
                below = _open_to_remove(child, fd)
                os.close(fd)
                fd = below
                if mount_of(fd) != mount:
                    raise OSError(errno.EBUSY, "a filesystem is mounted there", child)
                way.append((child, os.fstat(fd), _unlink_files(fd)))
                continue
            way.pop()
            if not way:
                break
            up = os.open("..", _OPEN_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd, status = up, way[-1][1]
            if not os.path.samestat(os.fstat(fd), status):
                raise FileNotFoundError(errno.ENOENT, "it was moved while it was removed", here)
            os.rmdir(here, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=above)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until a condition holds; False if it does not within so many seconds."""
    until = SYSTEM_CLOCK.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if SYSTEM_CLOCK.monotonic() >= until:
            return False
        pause.wait(0.002)
    return True


def remove_tree(place: Path) -> None:
    """Remove a directory with everything in it, also while others still work in it.

    A command whose caller was killed is killed, too, but not at the same instant.
    """
    until = SYSTEM_CLOCK.monotonic() + PATIENCE
    while os.path.lexists(place):
        try:
            with Held(os.open(place.parent, os.O_RDONLY | _DIRECTORY | _CLOEXEC)) as above:
                remove_directory(above, place.name)
        except OSError as error:
            if error.errno not in _CHANGING or SYSTEM_CLOCK.monotonic() >= until:
                raise


def remove_path(path: Path) -> None:
    """Remove a file, a link, or a directory with everything in it; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


_CHANGING = (errno.ENOENT, errno.ENOTEMPTY)
"""Errors of removing a directory that is in use."""


def _open_to_remove(name: str, above: int) -> int:
    """Open a directory so that its entries can be removed, whatever its mode."""
    try:
        fd = os.open(name, _OPEN_DIRECTORY, dir_fd=above)
    except PermissionError:
        chmod_at(above, name, 0o700)
        fd = os.open(name, _OPEN_DIRECTORY, dir_fd=above)
    if os.fstat(fd).st_mode & 0o700 != 0o700:
        with contextlib.suppress(OSError):  # not ours, or no modes: removing will fail
            os.fchmod(fd, 0o700)
    return fd


def _unlink_files(fd: int) -> list[str]:
    """Remove the files in a directory; returns the names of the directories."""
    with os.scandir(fd) as entries:
        kinds = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in kinds:
        if not is_directory:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
    return [name for name, is_directory in kinds if is_directory]


def read_all(fd: int, size: int) -> bytes:
    """Return the rest of an open file, in one call where the size is as expected."""
    data = os.read(fd, size + 1)
    if len(data) <= size and (len(data) == size or not data):
        return data
    chunks = [data]
    while data := os.read(fd, CHUNK):
        chunks.append(data)
    return b"".join(chunks)


def write_all(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    if written != len(data):
        view = memoryview(data)
        while written < len(data):
            written += os.write(fd, view[written:])


def without_privileges(mode: int) -> int:
    """Return a file's permission bits after its content has changed.

    As the kernel does for any writer but root: setuid is dropped, and setgid where the group may
    execute the file.
    """
    dropped = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
    return mode & ~dropped


PRIVILEGES = "security.capability"
"""The extended attribute that gives a program a privilege; any write removes it, too."""


def sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def sync_all(fd: int) -> None:
    """Flush the whole filesystem that a descriptor is on."""
    syncfs = _libc("syncfs", "i")
    if syncfs is None:
        os.sync()
    elif syncfs(fd):
        raise _last_error()


_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EROFS)


def chmod_at(above: int, name: str, mode: int) -> None:
    """Set permission bits by directory descriptor and name, never through a link."""
    try:
        with Held(os.open(name, _OPEN_FILE, dir_fd=above)) as fd:
            os.fchmod(fd, mode)
    except PermissionError:
        if not _PATH:
            raise
        # Not readable, but ours: the descriptor's own path leads to exactly this file.
        with Held(os.open(name, _PATH | _NOFOLLOW | _CLOEXEC, dir_fd=above)) as fd:
            os.chmod(f"/proc/self/fd/{fd}", mode)


_HAS_XATTRS = hasattr(os, "listxattr")


def xattrs_of(target: int | str) -> tuple[tuple[str, bytes], ...]:
    """Return the extended attributes of an open file, or of a path that is not followed."""
    if not _HAS_XATTRS:
        return ()
    follow = isinstance(target, int)
    try:
        names = os.listxattr(target, follow_symlinks=follow)
    except OSError as error:
        if error.errno in _NO_XATTRS:
            return ()
        raise
    if not names:
        return ()
    return tuple((n, os.getxattr(target, n, follow_symlinks=follow)) for n in sorted(names))


def set_xattrs(target: int | str, wanted: tuple[tuple[str, bytes], ...]) -> None:
    """Make the extended attributes exactly these, as far as the process may."""
    present = dict(xattrs_of(target))
    follow = isinstance(target, int)
    for name, value in wanted if _HAS_XATTRS else ():
        if present.pop(name, None) != value:
            with contextlib.suppress(PermissionError):
                os.setxattr(target, name, value, follow_symlinks=follow)
    for name in present:
        with contextlib.suppress(PermissionError):
            os.removexattr(target, name, follow_symlinks=follow)


_ACL, _DEFAULT_ACL = "system.posix_acl_access", "system.posix_acl_default"


def inherit(fd: int, above: int) -> None:
    """Give a new file what its directory gives to new files: the group (setgid) and the ACL."""
    directory = os.fstat(above)
    if directory.st_mode & stat.S_ISGID and os.fstat(fd).st_gid != directory.st_gid:
        with contextlib.suppress(PermissionError):
            os.fchown(fd, -1, directory.st_gid)
    acl = _default_acl(above)
    if acl is not None:
        with contextlib.suppress(PermissionError):
            os.setxattr(fd, _ACL, _for_file(acl))


def without_default_acl(directory: int | Path) -> None:
    """Remove the ACL that a directory of ours would give to new files."""
    if _default_acl(directory) is not None:
        os.removexattr(directory, _DEFAULT_ACL)


def _default_acl(directory: int | Path) -> bytes | None:
    if not _HAS_XATTRS:
        return None
    try:
        return os.getxattr(directory, _DEFAULT_ACL)
    except OSError:
        return None


def _for_file(acl: bytes) -> bytes:
    """Return a directory's ACL for a file, without execute permission."""
    header, entry = struct.Struct("<I"), struct.Struct("<HHI")
    entries = list(entry.iter_unpack(acl[header.size :]))
    mask = 0x10 in (tag for tag, _, _ in entries)
    # As open(2) does with 0666: for the owner, for others, and for the mask or the group.
    limited = {0x01, 0x20, 0x10 if mask else 0x04}
    return acl[: header.size] + b"".join(
        entry.pack(tag, allowed & 6 if tag in limited else allowed, who)
        for tag, allowed, who in entries
    )


_NO_XATTRS = frozenset(
    getattr(errno, name) for name in ("ENOTSUP", "EOPNOTSUPP", "ENOSYS") if hasattr(errno, name)
)


def _kind_of(entry: os.DirEntry[str]) -> NodeKind:
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def mounted_below(place: Path | str) -> str | None:
    """Return a mount point below a directory; None if there is none."""
    start = os.fsencode(place) + b"/"
    return next((os.fsdecode(each) for each in _mounts.points() if each.startswith(start)), None)


def mount_generation() -> int:
    """Return a number that is another one once something was mounted or unmounted."""
    return _mounts.generation()


class _Mounts:
    """The table of what is mounted where, read again when the kernel says that it has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._changed = select.poll() if hasattr(select, "poll") else None
        self._generation = 0
        self._points: tuple[bytes, ...] | None = None

    def generation(self) -> int:
        with self._lock:
            self._look()
            return self._generation

    def points(self) -> tuple[bytes, ...]:
        """Return all mount points; none where the system has no such table."""
        with self._lock:
            self._look()
            if self._points is None or self._fd is None:
                self._points = self._read()
            return self._points

    def _look(self) -> None:
        if self._fd is None:
            with contextlib.suppress(OSError):
                self._fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
                if self._changed is not None:
                    self._changed.register(self._fd, select.POLLPRI)
        elif self._changed is not None and not self._changed.poll(0):
            return
        self._generation += 1
        self._points = None

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
        except FileNotFoundError:
            return ()
        targets = (line.split(b" ", 5)[4] for line in lines)
        return tuple(
            each.decode("unicode_escape").encode("latin-1") if b"\\" in each else each
            for each in targets
        )

    def forget(self) -> None:
        """Open the table anew: a forked child would take its parent's news away."""
        self._lock = threading.Lock()
        if self._fd is not None and self._changed is not None:
            self._changed.unregister(self._fd)
            os.close(self._fd)
            self._fd = None


_mounts = _Mounts()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mounts.forget)


Mount = tuple[int, int]
"""Device and mount id: a rename is possible within one mount only.

The same disk may be mounted in several places, and nothing can be renamed from one to another.
"""


def mount_of(fd: int) -> Mount:
    statx = _find_statx()
    return (os.fstat(fd).st_dev, _mount_in_proc(fd)) if statx is None else statx(fd)


def _mount_in_proc(fd: int) -> int:
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_bytes().splitlines()
    except OSError:
        return 0
    return next((int(line[7:]) for line in lines if line.startswith(b"mnt_id:")), 0)


# Linux system calls that Python has no function for.


@cache
def _libc(name: str, arguments: str) -> Callable[..., int] | None:
    """Return a function of Linux's C library; None elsewhere.

    ``arguments`` has a letter for each: ``i`` an int, ``l`` a long, ``u`` unsigned, ``s`` a size,
    ``b`` bytes, ``p`` a pointer.
    """
    if os.uname().sysname != "Linux":
        return None
    import ctypes

    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    kinds = {
        "i": ctypes.c_int,
        "l": ctypes.c_long,
        "u": ctypes.c_uint,
        "s": ctypes.c_size_t,
        "b": ctypes.c_char_p,
        "p": ctypes.c_void_p,
    }
    found.restype = ctypes.c_int
    found.argtypes = [kinds[letter] for letter in arguments]
    return found


def _last_error(name: str | None = None) -> OSError:
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), name)


@cache
def _find_statx() -> Callable[[int], Mount] | None:
    """Return ``mount_of`` by one system call, if the kernel has it."""
    call = _libc("statx", "ibiub")
    if call is None:
        return None
    import ctypes

    empty_path, mount_id = 0x1000, 0x1000  # AT_EMPTY_PATH, STATX_MNT_ID
    buffer = ctypes.c_char * 256  # a struct statx
    mask, device_and_mount = struct.Struct("=I"), struct.Struct("=QQ")

    def statx(fd: int) -> Mount:
        found = buffer()
        if call(fd, b"", empty_path, mount_id, found):
            raise _last_error()
        if not mask.unpack_from(found)[0] & mount_id:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # a kernel before 5.8
        device, mount = device_and_mount.unpack_from(found, 136)
        return device, mount

    return statx if _works(statx) else None


@cache
def _find_openat2() -> Callable[[int, bytes, int | None], int] | None:
    """Return the call that opens a path without following any link, if the kernel has it.

    Without flags it opens a directory on the way.
    """
    syscall = _libc("syscall", "libps")
    if syscall is None:
        return None
    import ctypes

    number = 437  # openat2; one number for every architecture that Python knows but Alpha
    no_magiclinks, no_symlinks, beneath = 0x02, 0x04, 0x08
    resolve = no_magiclinks | no_symlinks | beneath
    how = ctypes.c_uint64 * 3  # flags, mode, resolve
    hows = {flags: how(flags, 0, resolve) for flags in (_OPEN_DIRECTORY, _OPEN_FILE)}
    places = {flags: ctypes.addressof(each) for flags, each in hows.items()}
    places[None] = places[_OPEN_DIRECTORY]
    size = ctypes.sizeof(how)

    def openat2(directory: int, path: bytes, flags: int | None) -> int:
        fd = syscall(number, directory, path, places[flags], size)
        if fd < 0:
            raise _last_error(os.fsdecode(path))
        return fd

    openat2.hows = hows  # pyright: ignore[reportFunctionMemberAccess]  # kept alive: C reads them
    # An older kernel, or a filter, may refuse the call.
    return openat2 if _works(lambda root: os.close(openat2(root, b".", None))) else None


def _works(call: Callable[[int], object]) -> bool:
    """Tell whether a call on the root directory succeeds."""
    with contextlib.suppress(OSError), Held(os.open("/", _OPEN_DIRECTORY)) as root:
        call(root)
        return True
    return False


def exchange(one: int, name: str, other: int, place: str) -> bool:
    """Exchange two names in one step; False where the system cannot.

    Each is a directory's descriptor and a name in it.
    """
    renameat2 = _libc("renameat2", "ibibu")
    both = 2  # RENAME_EXCHANGE
    if renameat2 is None:
        return False
    if renameat2(one, os.fsencode(name), other, os.fsencode(place), both):
        error = _last_error(place)
        if error.errno in _CANNOT_EXCHANGE:
            return False
        raise error
    return True


def is_being_written(fd: int) -> bool:
    """Tell whether anyone has a file open for writing; False where the system does not say.

    A program that has found the file by its name may still be about to change it, though it has
    another name by now.
    """
    import fcntl

    lease = getattr(fcntl, "F_SETLEASE", None)
    if lease is None:
        return False
    try:
        # Should it be opened right now, we would get a signal: one that is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, lease, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, lease, fcntl.F_UNLCK)
    return False


def rename_to_new(one: int, name: str, other: int, place: str) -> None:
    """Rename to a name that must not exist; raises FileExistsError, where the system can."""
    renameat2 = _libc("renameat2", "ibibu")
    no_replace = 1  # RENAME_NOREPLACE
    if renameat2 is not None:
        if not renameat2(one, os.fsencode(name), other, os.fsencode(place), no_replace):
            return
        error = _last_error(place)
        if error.errno not in _CANNOT_EXCHANGE:
            raise error
    if status_at(other, place) is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place)
    os.rename(name, place, src_dir_fd=one, dst_dir_fd=other)


_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EXDEV)
