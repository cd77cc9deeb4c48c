"""Directory trees for tests: filesystems of every kind, trees to work on, and an independent look.

Nothing here uses the library to look at a directory: what it does is checked with ``os`` alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.filesystem import HostFilesystem, MemoryFilesystem

KINDS = ("memory", "host")

ON_DISK = settings(max_examples=max(30, settings.default.max_examples // 5))
"""For random examples on a real directory: each takes some ten milliseconds."""


@contextlib.contextmanager
def filesystem(
    kind: str,
    files: Mapping[str, str | bytes] | Iterable[str] = (),
    *,
    root: str = "/workspace",
    readonly: Iterable[str] = (),
    clock: Any = SYSTEM_CLOCK,
) -> Iterator[Any]:
    """Give a filesystem of a kind that holds these files."""
    if kind == "memory":
        yield MemoryFilesystem(files, root=root, readonly=readonly, clock=clock)
        return
    with tempfile.TemporaryDirectory(prefix="wink-test-") as above:
        directory = Path(above, "workspace")
        directory.mkdir()
        contents = files if isinstance(files, Mapping) else dict.fromkeys(files, "")
        for path, content in contents.items():
            put(directory / path.removeprefix(root).lstrip("/"), content)
        for path in readonly:
            (directory / path).chmod(0o444)
        with HostFilesystem(directory, prefix=root, clock=clock) as fs:
            yield fs


def put(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Write a file, with its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if mode is not None:
        path.chmod(mode)


def remove_empty_directories(root: Path) -> None:
    """Leave only what git knows."""
    for directory, _, _ in os.walk(root, topdown=False):
        if directory != str(root) and not os.listdir(directory):
            os.rmdir(directory)


# An independent look at a directory


class Seen(NamedTuple):
    """All that a rollback must bring back of one path."""

    kind: str
    mode: int
    content: bytes | str | None
    """A file's bytes, a symlink's target, nothing for the rest."""
    links: int
    """How many names the file has, here and elsewhere; 0 for directories."""
    names: frozenset[str]
    """The names in this tree that are the same file."""
    xattrs: tuple[tuple[str, bytes], ...]
    owner: tuple[int, int]
    modified: int
    """Nanoseconds."""


def look(root: Path) -> dict[str, Seen]:
    """Return everything below a directory, and the directory itself as ``"."``."""
    found: dict[str, os.stat_result] = {".": os.lstat(root)}
    pending = [(os.fspath(root), "")]
    while pending:
        directory, prefix = pending.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                info = os.lstat(entry.path)
                found[prefix + entry.name] = info
                if stat.S_ISDIR(info.st_mode):
                    pending.append((entry.path, f"{prefix}{entry.name}/"))
    groups: dict[tuple[int, int], set[str]] = {}
    for path, info in found.items():
        groups.setdefault((info.st_dev, info.st_ino), set()).add(path)
    return {
        path: _seen(os.path.join(root, path), info, groups[info.st_dev, info.st_ino])
        for path, info in found.items()
    }


def _seen(path: str, info: os.stat_result, names: set[str]) -> Seen:
    directory = stat.S_ISDIR(info.st_mode)
    return Seen(
        kind=_kind(info.st_mode),
        mode=stat.S_IMODE(info.st_mode),
        content=_content(path, info.st_mode),
        links=0 if directory else info.st_nlink,
        names=frozenset(names),
        xattrs=xattrs(path),
        owner=(info.st_uid, info.st_gid),
        modified=info.st_mtime_ns,
    )


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def _content(path: str, mode: int) -> bytes | str | None:
    if stat.S_ISREG(mode):
        with open(path, "rb", buffering=0) as file:
            return file.read()
    return os.readlink(path) if stat.S_ISLNK(mode) else None


def xattrs(path: str) -> tuple[tuple[str, bytes], ...]:
    """Return a path's own extended attributes, where the system has any."""
    if not hasattr(os, "listxattr"):
        return ()
    try:
        names = sorted(os.listxattr(path, follow_symlinks=False))
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return ()  # a filesystem without any
    return tuple(
        (name, os.getxattr(path, name, follow_symlinks=False))
        for name in names
        if name.startswith("user.")
    )


def has_xattrs(directory: Path) -> bool:
    """Tell whether files in a directory can have extended attributes of the user's."""
    if not hasattr(os, "setxattr"):
        return False
    probe = directory / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.wink", b"x")
    except OSError:
        return False
    else:
        return True
    finally:
        probe.unlink()


# Trees to work on


def run_git(directory: Path, *arguments: str) -> str:
    """Run git with nobody's settings but its own, and return what it says."""
    completed = subprocess.run(
        ["git", "--no-optional-locks", "-c", "core.excludesFile=", *arguments],
        cwd=directory,
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.fspath(directory),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@example.org",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@example.org",
        },
        check=True,
        capture_output=True,
        text=True,
    )
    return completed.stdout


def make_repository(directory: Path) -> None:
    """Make a git repository with a commit, and a change that is staged."""
    directory.mkdir(parents=True)
    run_git(directory, "init", "--quiet", "--template=", "--initial-branch=main")
    put(directory / "tracked.py", "print('committed')\n")
    put(directory / ".gitignore", ".env\nnode_modules/\n")
    run_git(directory, "add", ".")
    run_git(directory, "commit", "--quiet", "--message=first")
    put(directory / "tracked.py", "print('staged')\n")
    run_git(directory, "add", "tracked.py")


@contextlib.contextmanager
def elsewhere(here: Path) -> Iterator[Path]:
    """Give a directory on another filesystem."""
    for candidate in (Path("/dev/shm"), Path.home(), Path("/var/tmp")):
        usable = os.access(candidate, os.W_OK)
        if usable and candidate.stat().st_dev != here.stat().st_dev:
            with tempfile.TemporaryDirectory(prefix="wink-test-", dir=candidate) as place:
                yield Path(place)
            return
    pytest.skip("there is only one filesystem here")


def plant(above: Path, repository: Path) -> None:
    """Make a workspace with some of everything, and something beside it that is not ours."""
    root, outside = above / "workspace", above / "outside"
    put(outside / "secret", "not yours")
    for path, content, mode in PLAIN_FILES:
        put(root / path, content, mode)
    for path in ("d/empty", "hollow/er"):
        (root / path).mkdir(parents=True)
    shutil.copytree(repository, root / "repo", symlinks=True)
    os.link(root / "d/twin", root / "twin")
    os.link(root / "e/shared", outside / "shared")
    os.mkfifo(root / "pipe")
    put(root / "odd" / os.fsdecode(b"not \xff UTF-8"), "no API path leads here")
    put(root / "odd" / os.fsdecode(b"nor \xff here") / "x", "")
    for path, target in SYMLINKS:
        (root / path).symlink_to(target)
    (root / "absolute").symlink_to(root / "d")
    (root / "out_absolute").symlink_to(outside)
    if has_xattrs(outside):
        os.setxattr(root / "noted", "user.note", b"keep me")
        os.setxattr(root / "d/twin", "user.note", b"and me")


PLAIN_FILES: tuple[tuple[str, str | bytes, int], ...] = (
    ("a", "a\n", 0o644),
    ("b", b"", 0o644),
    ("noted", b"\0\xff\x89PNG", 0o600),
    ("d/a", "in d\n", 0o644),
    ("d/run.sh", "#!/bin/sh\n", 0o755),
    ("d/twin", "one file, two names\n", 0o640),
    ("e/shared", "its other name is outside\n", 0o644),
    ("locked/file", "leave me", 0o444),
    ("bystander/file", "not the call's business", 0o644),
    (".gitignore", ".env\nnode_modules/\n", 0o644),
    (".env", "TOKEN=secret\n", 0o600),
    ("node_modules/pkg/index.js", "module.exports = 1\n", 0o644),
    ("caf\u00e9", "composed", 0o644),
    ("cafe\u0301", "decomposed", 0o644),
    ("\U0001f389 party/new\nline", "", 0o644),
)
SYMLINKS = (
    ("to_a", "a"),
    ("to_d", "d"),
    ("d/up", "../e"),
    ("d/far", "../to_d/./run.sh"),
    ("dangling", "nowhere/x"),
    ("coming", "d/coming"),
    ("loop", "loop2"),
    ("loop2", "loop"),
    ("self", "self/x"),
    ("out", "../outside"),
    ("out_file", "../outside/secret"),
    ("d/out_late", "../../outside/secret"),
)
