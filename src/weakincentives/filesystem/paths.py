"""Paths, file descriptions and error messages that all filesystems share."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from weakincentives.errors import (
    BinaryFile,
    FilesystemError,
    NoSuchFile,
    NotADirectory,
    NotAFile,
    PathEscapesRoot,
    ReadOnlyFile,
)
from weakincentives.log.operation import Parts as Parts

DEFAULT_ROOT = "/workspace"

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096

NodeKind = Literal["file", "directory", "link", "other"]

# Errors of a path that a link, or something that is not a directory, blocks.
BARRED = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})

MAX_LINKS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """A file or directory, without its content."""

    path: str
    kind: NodeKind
    """On disk also ``"link"``, a symbolic link that dangles or leads out of the root, and
    ``"other"``, such as a pipe."""
    size: int
    """Bytes of a file; 0 for anything else."""
    modified: float
    """Seconds since the epoch. A directory changes when an entry is added or deleted."""
    readonly: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GrepMatch:
    """A line that matches."""

    path: str
    line_number: int
    """The first line is 1."""
    line: str
    """Without its line end."""


def split_root(root: str) -> Parts:
    """Return a virtual prefix name by name."""
    if not root.startswith("/"):
        raise ValueError(
            f"the root must be an absolute path such as {DEFAULT_ROOT!r}, got {root!r}"
        )
    try:
        return split_path(root)
    except FilesystemError as error:
        raise ValueError(f"not a usable root: {error}") from error


def split_path(path: str, root: Parts = (), real: Sequence[Parts] = ()) -> Parts:
    """Return the one spelling of ``path``, name by name, relative to the root.

    Only the text counts: ``x/../a.txt`` is ``a.txt`` whatever ``x`` is. An absolute path starts
    with a virtual prefix, ``root``, or with the path of the directory itself, ``real``.
    """
    if "\0" in path:
        raise FilesystemError(f"A path cannot contain a NUL character: {shown(path)}")
    parts = [part for part in path.split("/") if part and part != "."]
    if path.startswith("/"):
        for prefix in (*real, root):
            if tuple(parts[: len(prefix)]) == prefix:
                del parts[: len(prefix)]
                break
        else:
            raise _outside(path, root)
    if ".." in parts:
        parts = _climb(parts, path, root)
    if len(path) > MAX_NAME_BYTES or not path.isascii():
        _check_encoded(parts, path)
    return tuple(parts)


def join_path(parts: Parts) -> str:
    """Return the relative path that :func:`split_path` took apart."""
    return "/".join(parts) or "."


def outermost(paths: Iterable[Parts]) -> list[Parts]:
    """Return the paths that are not below another of them, sorted."""
    found: list[Parts] = []
    for parts in sorted(paths):
        if not found or parts[: len(found[-1])] != found[-1]:
            found.append(parts)
    return found


def shown(path: str) -> str:
    """Return a path for a message: on one line, and not too long."""
    if len(path) > 200:
        path = f"{path[:100]}...{path[-60:]}"
    return path if path.isprintable() else ascii(path)


def encode_text(content: str, path: str) -> bytes:
    """Return the bytes a text is stored as."""
    try:
        return content.encode()
    except UnicodeEncodeError as error:
        raise FilesystemError(
            f"The text for {shown(path)} cannot be stored as UTF-8: the character at position"
            f" {error.start} is half of a surrogate pair"
        ) from error


def system_error(number: int, parts: Parts) -> OSError:
    """Return the system's error with this number, of the class that Python has for it."""
    return OSError(number, os.strerror(number), join_path(parts))


def not_regular(kind: NodeKind, parts: Parts) -> OSError:
    """Return the error of reading anything but a regular file."""
    if kind in ("directory", "link"):
        return system_error(errno.EISDIR if kind == "directory" else errno.ELOOP, parts)
    return OSError(errno.EINVAL, "Not a regular file", join_path(parts))


def not_text(path: str) -> BinaryFile:
    return BinaryFile(f"Not a UTF-8 text file: {shown(path)}. Use read_bytes to get its bytes")


def nothing_there(path: str) -> NoSuchFile:
    return NoSuchFile(
        f"No such file or directory: {shown(path)}. List its directory to see what is there"
    )


def directory_not_file(path: str) -> NotAFile:
    return NotAFile(f"{shown(path)} is a directory. Give the path of a file")


def file_not_directory(path: str) -> NotADirectory:
    return NotADirectory(f"{shown(path)} is a file, not a directory. Give the path of a directory")


def read_only(path: str) -> ReadOnlyFile:
    return ReadOnlyFile(f"{shown(path)} is read-only. Leave it as it is, or work on another file")


def _climb(parts: list[str], path: str, root: Parts) -> list[str]:
    resolved: list[str] = []
    for part in parts:
        if part != "..":
            resolved.append(part)
        elif resolved:
            resolved.pop()
        else:
            raise _outside(path, root)
    return resolved


def _check_encoded(parts: list[str], path: str) -> None:
    total = 0
    for part in parts:
        try:
            size = len(part.encode())
        except UnicodeEncodeError as error:
            raise FilesystemError(
                f"A path must be valid Unicode, without half a surrogate pair: {shown(path)}"
            ) from error
        if size > MAX_NAME_BYTES:
            raise FilesystemError(
                f"A name can have {MAX_NAME_BYTES} bytes, this one has {size}: {shown(part)}"
            )
        total += size + 1
    if total > MAX_PATH_BYTES:
        raise FilesystemError(f"A path can have {MAX_PATH_BYTES} bytes: {shown(path)} has {total}")


def _outside(path: str, root: Parts) -> PathEscapesRoot:
    return PathEscapesRoot(
        f"{shown(path)} is outside the root. Use a relative path, or one below /{'/'.join(root)}"
    )


def resolve(
    parts: Parts,
    link_target: Callable[[Parts], str],
    below_root: Callable[[str], list[str] | None],
    *,
    follow: bool = True,
    seen: set[Parts] | None = None,
) -> Parts:
    """Return the canonical path: links followed, as long as they stay below the root.

    With ``follow=False`` a link that is the last name stands for itself. A missing path is returned
    as it is. The paths of the links on the way are added to ``seen``.
    """
    done: list[str] = []
    todo = list(reversed(parts))
    links = 0
    while todo:
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            if not done:
                raise escapes(parts)
            done.pop()
            continue
        here = (*done, name)
        target = None if not follow and not todo else _target(here, link_target)
        if target is None:
            done.append(name)
            continue
        links += 1
        if links > MAX_LINKS:
            raise FilesystemError(
                f"{shown(join_path(parts))} leads through too many symbolic links, or in a"
                " circle. Use the path of the file itself"
            )
        if seen is not None:
            seen.add(here)
        names: list[str] | None = target.split("/")
        if target.startswith("/"):
            names = below_root(target)
            done.clear()
        if names is None:
            raise escapes(parts)
        todo.extend(reversed(names))
    return tuple(done)


def _target(parts: Parts, link_target: Callable[[Parts], str]) -> str | None:
    """Return the text of a link; None for anything else, and for nothing."""
    try:
        return link_target(parts)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def escapes(parts: Parts) -> PathEscapesRoot:
    return PathEscapesRoot(
        f"{shown(join_path(parts))} leads outside the root through a symbolic link. Use a path"
        " that stays below the root"
    )
