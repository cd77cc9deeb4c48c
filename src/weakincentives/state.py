"""The user's own state directory, where no agent can write, and the key that seals our records.

What lies beside or inside a workspace may have been planted: a cloned repository can carry it, an
agent that worked on the parent directory can have written it. So each record that is acted upon
later carries a seal made with a key from here. The same seal detects damage.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import stat
import threading
from pathlib import Path

from weakincentives.errors import StateUnavailable

__all__ = ["seal", "sealed", "state_directory", "unsealed"]

_KEY_SIZE = 32
SEAL_SIZE = 32
"""Characters of a seal: 128 bits in hexadecimal."""


def state_directory() -> Path:
    """Return the directory, made on first use with access for this user alone.

    Raises:
        StateUnavailable: It cannot be made, or somebody else can write there.
    """
    path = _place() / "wink"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(path)
    except OSError as error:
        raise StateUnavailable(
            f"Cannot keep state in {path} ({error.strerror}). Set XDG_STATE_HOME to a directory"
            " that only you can write to"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise StateUnavailable(f"{path} must be a directory, not a link or a file")
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise StateUnavailable(
            f"{path} belongs to another user. Set XDG_STATE_HOME to a directory of your own"
        )
    if status.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


def seal(purpose: str, data: bytes) -> str:
    """Return the seal of some bytes: only a process of this user can make it.

    ``purpose`` keeps a record of one kind, or of one store, from being taken for another's.
    """
    digest = hashlib.blake2b(
        purpose.encode() + b"\0" + data, key=_key(), digest_size=SEAL_SIZE // 2
    )
    return digest.hexdigest()


def sealed(purpose: str, data: bytes) -> bytes:
    """Return a line that :func:`unsealed` takes apart: the seal, a space, the data."""
    return seal(purpose, data).encode() + b" " + data


def unsealed(purpose: str, line: bytes) -> bytes | None:
    """Return the data of a sealed line; None if it is damaged or not ours."""
    mark, data = line[:SEAL_SIZE], line[SEAL_SIZE + 1 :]
    if line[SEAL_SIZE : SEAL_SIZE + 1] != b" ":
        return None
    return data if hmac.compare_digest(mark, seal(purpose, data).encode()) else None


_keys: dict[Path, bytes] = {}
_keys_lock = threading.Lock()


def _key() -> bytes:
    place = _place()
    key = _keys.get(place)
    if key is None:
        with _keys_lock:
            key = _keys[place] = _read_key(state_directory() / "key")
    return key


def _read_key(path: Path) -> bytes:
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            try:
                key = os.read(fd, _KEY_SIZE + 1)
            finally:
                os.close(fd)
            if len(key) != _KEY_SIZE:
                raise StateUnavailable(
                    f"{path} is damaged: it must have {_KEY_SIZE} bytes. Delete it to get a new"
                    " one; stores and sessions written so far will then be refused"
                )
            return key
        _make_key(path)
    raise StateUnavailable(f"{path} disappears as soon as it is made")


def _make_key(path: Path) -> None:
    """Put a new key at a path in one step; the first of several processes wins."""
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
    except OSError:  # no hard links on this filesystem
        os.rename(staged, path)
        return
    os.unlink(staged)


def _place() -> Path:
    named = os.environ.get("XDG_STATE_HOME")
    if named and os.path.isabs(named):
        return Path(os.path.realpath(named))
    home = os.path.expanduser("~")
    if hasattr(os, "geteuid"):
        # Under sudo, HOME may still be the home of the user who called it.
        with contextlib.suppress(OSError, KeyError):
            if os.stat(home).st_uid != os.geteuid():
                import pwd

                home = pwd.getpwuid(os.geteuid()).pw_dir
    return Path(os.path.realpath(os.path.join(home, ".local", "state")))
