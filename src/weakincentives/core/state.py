"""The user's state directory, the seals made with its key, and the paths of our own code.

An agent that could change our code, the interpreter or its modules would escape every sandbox with
the next call. So these paths are read-only, even inside a workspace; the state directory, with the
key of all seals, may not even be read.

The stores of all workspaces are in the state directory. Files in or near a workspace may have been
planted: by a cloned repository, or by an agent that worked on the parent directory. So every record
that is acted upon later carries a seal made with the key. The seal also detects damage.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import os
import site
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from weakincentives.errors import StateUnavailable

_KEY_SIZE = 32
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN: int = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))
WITHHELD = frozenset({"WINK_DATABASE", "WINK_OBJECTS", "WINK_MCP_TOKEN"})
"""Variables of our own with passwords: no command or program that an agent starts gets them."""
_WRITABLE = "writable"
SEAL_SIZE = 32
"""Characters of a seal: 128 bits in hexadecimal."""


def no_links(path: str, flags: int) -> int:
    """An opener for files of ours: not for links, pipes and devices that someone has planted."""
    fd = os.open(path, flags | _OWN)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def state_directory() -> Path:
    """Return the directory, created on first use with access only for this user.

    Raises:
        StateUnavailable: It cannot be created, or another user owns it.
    """
    path = state_path()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(path)
    except OSError as error:
        raise _unavailable(path, error) from error
    return path


def state_path() -> Path:
    """Return the path of the directory, which may not exist.

    Raises:
        StateUnavailable: Neither the environment nor the system names a home for this user.
    """
    return _place() / "wink"


# Stores of workspaces


def workspace_store(root: str) -> str:
    """Return where the store of a workspace is, or would be; the path is resolved.

    It is found by the path, else by the identity of a directory that was renamed or moved. A copy
    is another directory, and so it gets a store of its own.
    """
    above = workspace_stores()
    for mark in (_mark(root), _identity_mark(root)):
        folder = None if mark is None else _indexed(above, mark)
        if folder is not None:
            return os.path.join(above, folder)
    name = f"{os.path.basename(root) or 'root'}-{_mark(root)}"
    if os.path.lexists(os.path.join(above, name, "root")):  # of a directory that was moved away
        name = f"{name}-{_identity_mark(root) or 'new'}"
    return os.path.join(above, name)


def workspace_stores() -> str:
    """Return the directory with the stores of all workspaces; it may not exist."""
    return os.path.join(state_path(), "workspaces")


def claim_store(root: str, store: str, before: str | None) -> None:
    """Note that a directory of :func:`workspace_stores` is the store of a workspace.

    ``before`` is the path that the workspace had, if any. A store elsewhere needs no note.

    Raises:
        StateUnavailable: That cannot be stored.
    """
    above, folder = os.path.split(store)
    if above != workspace_stores():
        return
    index = Path(above) / _INDEX
    try:
        index.mkdir(mode=0o700, exist_ok=True)
        for mark in (_mark(root), _identity_mark(root)):
            if mark is not None and _indexed(above, mark) != folder:
                staged = index / f"new-{os.urandom(8).hex()}"
                staged.write_text(folder, "utf-8", "surrogateescape")
                staged.replace(index / mark)
        if before is not None and before != root and _indexed(above, _mark(before)) == folder:
            is_here = os.path.lexists(before) and _identity_mark(before) == _identity_mark(root)
            if not is_here:
                (index / _mark(before)).unlink()
    except OSError as error:
        raise _unavailable(index, error) from error


def forget_store(folder: str) -> None:
    """Forget which workspace a directory of :func:`workspace_stores` was for."""
    above = workspace_stores()
    for mark in os.listdir(os.path.join(above, _INDEX)):
        if _indexed(above, mark) == folder:
            os.unlink(os.path.join(above, _INDEX, mark))


_INDEX = "index"
"""The directory with a file for each path and identity of a workspace; it names the store."""


def _indexed(above: str, mark: str) -> str | None:
    try:
        with open(
            os.path.join(above, _INDEX, mark),
            encoding="utf-8",
            errors="surrogateescape",
            opener=no_links,
        ) as file:
            folder = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return folder if folder and os.path.basename(folder) == folder else None


def _identity_mark(directory: str) -> str | None:
    """Return what stays the same when a directory is moved; None where that cannot be told.

    Inode numbers are used again, device numbers change: the birth time and the id of the
    filesystem tell.
    """
    try:
        status, filesystem = os.stat(directory), os.statvfs(directory).f_fsid
        birth = _birth_ns(directory, status)
    except OSError:
        return None
    return None if birth is None else _mark(f"{filesystem} {status.st_ino} {birth}")


def _birth_ns(directory: str, status: os.stat_result) -> int | None:
    known = getattr(status, "st_birthtime", None)
    if known is not None:
        return int(known * 1e9)
    if sys.platform != "linux":
        return None
    import ctypes

    found = ctypes.create_string_buffer(256)
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except AttributeError:  # a C library before 2018
        return None
    at_current, no_flags, has_birth = -100, 0, 0x800
    if statx(at_current, os.fsencode(directory), no_flags, has_birth, found):
        return None
    mask, seconds, nanoseconds = struct.unpack_from("=I76xqI", found)
    return seconds * 1_000_000_000 + nanoseconds if mask & has_birth else None


# Directories that agents can change


def note_writable(directory: str) -> None:
    """Note for all processes of this user that agents can change a directory.

    Raises:
        StateUnavailable: That cannot be stored.
    """
    place = state_directory() / _WRITABLE
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        (place / _mark(directory)).touch()
    except OSError as error:
        raise _unavailable(place, error) from error


def is_noted_writable(directory: str) -> bool:
    """Tell whether a process of this user has noted that agents can change a directory."""
    return os.path.exists(state_path() / _WRITABLE / _mark(directory))


def _mark(directory: str) -> str:
    return hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]


def _make_private(path: Path) -> None:
    """Refuse anything but a directory of this user; remove access for all others."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise StateUnavailable(f"{path} must be a directory, not a link or a file")
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise StateUnavailable(
            f"{path} belongs to another user. Set XDG_STATE_HOME to a directory of your own"
        )
    if os.name == "posix" and status.st_mode & 0o077:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(fd, 0o700)
        finally:
            os.close(fd)


def _unavailable(path: Path, error: OSError) -> StateUnavailable:
    return StateUnavailable(
        f"Cannot store state in {path} ({error.strerror}). Set XDG_STATE_HOME to a directory that"
        " only you can write to"
    )


class Seals:
    """Makes and checks the seals of one kind of record; only this user's processes can make them.

    ``purpose`` names the kind of record or the store: a seal is not valid for another.
    """

    def __init__(self, purpose: str) -> None:
        self._begun = hashlib.blake2b(
            purpose.encode() + b"\0", key=_key(), digest_size=SEAL_SIZE // 2
        )

    def seal(self, data: bytes, at: int = 0) -> str:
        """Return the seal of data; ``at`` is its position, if that is part of the seal."""
        hashed = self._begun.copy()
        hashed.update(b"%d " % at)
        hashed.update(data)
        return hashed.hexdigest()

    def sealed(self, data: bytes, at: int = 0) -> bytes:
        """Return the seal, a space, and the data."""
        return self.seal(data, at).encode() + b" " + data

    def unsealed(self, line: bytes, at: int = 0) -> bytes | None:
        """Return the data of a sealed line, or None if the seal is invalid."""
        mark, data = line[:SEAL_SIZE], line[SEAL_SIZE + 1 :]
        if line[SEAL_SIZE : SEAL_SIZE + 1] != b" ":
            return None
        return data if hmac.compare_digest(mark, self.seal(data, at).encode()) else None

    def unsealed_lines(self, lines: Iterable[bytes], at: int) -> list[bytes]:
        """Return the data of lines of which the first is at a position, up to an invalid seal."""
        found: list[bytes] = []
        copied, equal = self._begun.copy, hmac.compare_digest
        for line in lines:  # written out: a log has thousands
            data, hashed = line[SEAL_SIZE + 1 :], copied()
            hashed.update(b"%d " % at)
            hashed.update(data)
            if not equal(hashed.hexdigest().encode() + b" ", line[: SEAL_SIZE + 1]):
                break
            found.append(data)
            at += len(line) + 1
        return found


_keys: dict[Path, bytes] = {}


def _key() -> bytes:
    place = _place()
    key = _keys.get(place)
    if key is None:
        # Concurrent threads read the same key: the first one to create it wins.
        key = _keys[place] = _read_key(state_directory() / "key")
    return key


def _read_key(path: Path) -> bytes:
    try:
        key = _read_or_make_key(path)
    except OSError as error:
        raise _unavailable(path, error) from error
    if len(key) != _KEY_SIZE:
        raise StateUnavailable(
            f"{path} is damaged: it must have {_KEY_SIZE} bytes. Delete it to get a new one;"
            " stores and sessions written so far must then be adopted: see `wink doctor --help`"
        )
    return key


def _read_or_make_key(path: Path) -> bytes:
    if not os.path.lexists(path):
        _make_key(path)
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        return os.read(fd, _KEY_SIZE + 1)
    finally:
        os.close(fd)


def _make_key(path: Path) -> None:
    """Create a key in one step; the first of several processes wins."""
    staged = path.with_name(f"key-{os.urandom(8).hex()}")
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, os.urandom(_KEY_SIZE))
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        os.link(staged, path)
    except FileExistsError:
        pass
    except OSError:  # a filesystem without hard links
        os.rename(staged, path)
        return
    os.unlink(staged)


def _place() -> Path:
    euid = os.geteuid() if hasattr(os, "geteuid") else 0
    return _place_of(os.environ.get("XDG_STATE_HOME"), os.environ.get("HOME"), euid)


@functools.cache  # used by every seal
def _place_of(named: str | None, home: str | None, euid: int) -> Path:
    if named and os.path.isabs(named):
        return Path(os.path.realpath(named))
    home = os.path.expanduser("~") if home is None else home
    # Under sudo, HOME may still be the calling user's.
    with contextlib.suppress(ImportError, OSError, KeyError):
        import pwd

        if not os.path.isabs(home) or os.stat(home).st_uid != euid:
            home = pwd.getpwuid(euid).pw_dir
    if not os.path.isabs(home):
        raise StateUnavailable(
            "There is no home directory to store state in. Set XDG_STATE_HOME to a directory that"
            " only you can write to"
        )
    return Path(os.path.realpath(os.path.join(home, ".local", "state")))


# Our code


@functools.cache
def our_code() -> tuple[Path, ...]:
    """Return the resolved paths of our code; some may not exist.

    These are the package, even if its install is editable, and everything that the interpreter
    loads: the standard library, site-packages with ``.pth`` files, and the user's own modules.
    """
    import sysconfig

    paths = sysconfig.get_paths()
    found = {_PACKAGE, *site.getsitepackages(), os.path.join(sys.prefix, "pyvenv.cfg")}
    found |= {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    if user := site.getusersitepackages():
        found.add(user)
    if sys.executable:
        found.add(sys.executable)
    return _resolved(found)


@functools.cache
def our_environment() -> tuple[Path, ...]:
    """Return the directories that Python is installed in."""
    return _resolved({sys.prefix, sys.exec_prefix, sys.base_prefix})


@functools.cache
def module_path() -> tuple[str, ...]:
    """Return where this process looks for modules, as it was when first asked."""
    return tuple(os.path.abspath(each) for each in sys.path)


@functools.cache
def module_places() -> tuple[Path, ...]:
    """Return the resolved paths of where this process looks for modules."""
    return _resolved(set(module_path()))


def _resolved(paths: set[str]) -> tuple[Path, ...]:
    absolute = {os.path.abspath(each) for each in paths}
    links = {link for path in absolute for link in _links_to(path)}
    return tuple(sorted(Path(each) for each in links | set(map(os.path.realpath, absolute))))


def _links_to(path: str) -> Iterator[str]:
    """Yield the symbolic links on the way to a path: replacing one redirects the path."""
    while path != (above := os.path.dirname(path)):
        if os.path.islink(path):
            yield os.path.join(os.path.realpath(above), os.path.basename(path))
        path = above


def is_our_code(status: os.stat_result) -> bool:
    """Tell whether a file is a part of our code that has another name elsewhere.

    Installers link the files of all environments to one cache: to change one of them in a project's
    environment would change it in ours.
    """
    return (status.st_dev, status.st_ino) in _inodes_of_our_code()


@functools.cache
def _inodes_of_our_code() -> frozenset[tuple[int, int]]:
    """Return device and inode of every file of our code.

    Directories list the inodes of their files: to ask for each of a hundred thousand files takes a
    second. Some filesystems list others there; the first file of each directory shows it.
    """
    found: set[tuple[int, int]] = set()
    places = set(our_code())
    todo = [os.fspath(each) for each in places if places.isdisjoint(each.parents)]
    for place in todo:
        with contextlib.suppress(OSError):
            status = os.lstat(place)
            found.add((status.st_dev, status.st_ino))
    while todo:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            device: int | None = None
            for each in entries:
                if each.is_dir(follow_symlinks=False):
                    todo.append(each.path)
                elif device is not None:
                    found.add((device, each.inode()))
                else:
                    with contextlib.suppress(OSError):  # it has just gone
                        status = each.stat(follow_symlinks=False)
                        found.add((status.st_dev, status.st_ino))
                        device = status.st_dev if status.st_ino == each.inode() else None
    return frozenset(found)


def our_secrets() -> tuple[Path, ...]:
    """Return paths that an agent must not read: the user's state directory."""
    with contextlib.suppress(StateUnavailable):
        return (state_directory().resolve(),)
    return ()


def source_of(module_file: str, name: str) -> str:
    """Return the text of a program next to a module.

    Call it when the module is imported, before an agent runs, and pass the text to the interpreter:
    then nothing can replace the program.
    """
    return Path(module_file).with_name(name).read_text(encoding="utf-8")


def python(source: str, *arguments: str) -> Sequence[str]:
    """Return the command line of a program of ours that uses installed packages.

    Neither the current directory nor the variables of Python can name a module to load instead: the
    workspace may be there, or in ``PYTHONPATH``.
    """
    return [sys.executable, "-P", "-E", "-X", "utf8", "-c", source, *arguments]


def program(source: str, *arguments: str) -> Sequence[str]:
    """Return the command line of a program of ours that uses only the standard library.

    Isolated from the environment and the user's modules, without ``site`` (no ``.pth`` files), and
    without byte code. The interpreter's real path is used: in a virtual environment it would first
    read the location of its library from there.
    """
    interpreter = os.path.realpath(sys.executable)
    return [interpreter, "-I", "-S", "-B", "-c", source, *arguments]
