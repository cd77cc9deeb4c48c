"""What differs between two looks at a directory, file by file, in the format of ``git diff``."""

from __future__ import annotations

import errno
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weakincentives.errors import ContentDamaged
from weakincentives.filesystem.hunks import Effort, hunks
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.layers import Look, Node, names_of, walk
from weakincentives.filesystem.protocol import Parts, join_path, shown

__all__ = ["FileChange", "changed_paths", "file_changes"]

_MAX_COMPARED = 1 << 20
"""Bytes of a file; of a bigger one only the size is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """What happened to one path."""

    path: str
    origin: str = ""
    """Where it was before it was moved."""
    added: int = 0
    """Lines."""
    removed: int = 0
    text: str
    """Its part of a diff, as ``git diff`` writes it; in words where that has no way to say it."""


@dataclass(frozen=True, slots=True)
class _Side:
    """What is at a path in one of the looks."""

    node: Node | None
    data: bytes | None
    """Of a file its content, of a link its target; None where it cannot be told."""
    is_damaged: bool = False

    @property
    def words(self) -> str:
        if self.node is None:
            return "nothing"
        if self.is_damaged:
            return "a file whose kept content is damaged"
        return f"a file of {self.node.size} bytes" if self.is_file else f"a {self.node.kind}"

    @property
    def is_file(self) -> bool:
        return self.node is not None and self.node.kind == "file"

    @property
    def mode(self) -> str:
        """The mode as git knows it."""
        if self.node is None:
            return ""
        if self.node.kind == "link":
            return "120000"
        return "100755" if self.node.mode & stat.S_IXUSR else "100644"


_NOTHING = _Side(None, None)
_NOTHING_BELOW = (errno.ENOTDIR, errno.ELOOP)
"""What a look fails with where a file, or a link, stands above the path."""


def changed_paths(records: Sequence[Record], before: Look, now: Look) -> list[Parts]:
    """Return every path that some changes have changed, sorted.

    Of a directory that came, went or was moved, all that is in it; of a file with several names
    that was changed in place, all of them.
    """
    found = {parts for record in records if record.is_change for parts in record.paths}
    tops = {parts for record in records if record.is_whole for parts in record.paths}
    edited = [before.node(record.path) for record in records if record.in_place]
    files = {node.file for node in edited if node is not None and node.links > 1 and node.file}
    for look in (before, now):
        found.update(parts for parts, _ in walk(look, tops))
        if files:
            found |= names_of(look, files, [()])
    return sorted(found)


def file_changes(paths: Iterable[Parts], before: Look, now: Look) -> list[FileChange]:
    """Return what is not the same in two looks at some paths, in the order of the paths."""
    sides = {parts: (_side(before, parts), _side(now, parts)) for parts in paths}
    origins = _origins(sides)
    moved = set(origins.values())
    found: list[FileChange] = []
    effort = Effort()
    for parts, (old, new) in sides.items():
        origin = origins.get(parts)
        if origin is not None:
            found.append(_change(parts, sides[origin][0], new, effort, origin))
        elif parts not in moved and _differ(old, new):
            found.append(_change(parts, old, new, effort))
    return found


def _side(look: Look, parts: Parts) -> _Side:
    try:
        node = look.node(parts)
        data = None
        if node is not None and node.kind == "file" and node.size <= _MAX_COMPARED:
            data = look.read(parts)
        elif node is not None and node.kind == "link":
            data = look.link_target(parts).encode(errors="surrogateescape")
        return _Side(node, data)
    except ContentDamaged:
        return _Side(Node("other", 0, 0, 0, 0), None, is_damaged=True)
    except OSError as error:
        if error.errno in _NOTHING_BELOW:
            return _NOTHING
        return _Side(Node("other", 0, 0, 0, 0), None)  # not kept, not to be read, or just gone


def _origins(sides: dict[Parts, tuple[_Side, _Side]]) -> dict[Parts, Parts]:
    """Return where files are now that were elsewhere: by path, the path before."""
    gone = {
        old.node.file: parts
        for parts, (old, new) in sides.items()
        if old.node is not None and old.node.file is not None and new.node is None
    }
    came = (
        (parts, new.node.file)
        for parts, (old, new) in sides.items()
        if old.node is None and new.node is not None and new.node.file is not None
    )
    # A file of several names can come at several places, and goes from one.
    return {parts: gone.pop(file) for parts, file in came if file in gone}


def _differ(old: _Side, new: _Side) -> bool:
    if old.is_damaged or new.is_damaged:
        return True
    if old.node is None or new.node is None:
        return old.node is not new.node
    if old.node.kind != new.node.kind:
        return True
    if old.node.kind not in ("file", "link"):
        return False  # of a directory, what is in it is told
    if old.data is None or new.data is None:
        return old.node[:7] != new.node[:7]  # all that a status says, but for the change time
    return old.data != new.data or old.mode != new.mode


# The text


def _change(
    parts: Parts, old: _Side, new: _Side, effort: Effort, origin: Parts | None = None
) -> FileChange:
    path = join_path(parts)
    lines: list[str] = []
    added = removed = 0
    if not _has_a_diff(old, new):
        lines.append(f"{shown(path)}: {_in_words(old, new)}\n")
        # For git, a file that becomes a directory goes; what is in the directory is told by itself.
        old, new = _without_directory(old), _without_directory(new)
    if _has_a_diff(old, new):
        lines += _header(path, old, new, None if origin is None else join_path(origin))
        found = list(_hunks(old, new, effort))
        if found:
            names = _names(join_path(origin or parts), path, old, new)
            lines += [*names, *found] if len(found) > 1 else found
        added = sum(line.startswith("+") for line in found)
        removed = sum(line.startswith("-") for line in found)
    return FileChange(
        path=path,
        origin="" if origin is None else join_path(origin),
        added=added,
        removed=removed,
        text="".join(lines),
    )


def _in_words(old: _Side, new: _Side) -> str:
    if new.node is not None and new.node.kind == "directory" and old.node is None:
        return "new directory"
    if old.node is not None and old.node.kind == "directory" and new.node is None:
        return "directory deleted"
    if not old.is_damaged and old.node and old.node.kind == "other" and old.node.ino == 0:
        return f"changed; what it was before is not kept, now {new.words}"
    if new.node and new.node.kind == "other" and new.node.ino == 0 and not new.is_damaged:
        return f"{'created' if old.node is None else 'changed'}, and changed since by somebody else"
    return f"{old.words} became {new.words}"


def _without_directory(side: _Side) -> _Side:
    return _NOTHING if side.node is not None and side.node.kind == "directory" else side


def _has_a_diff(old: _Side, new: _Side) -> bool:
    """Whether git has a way to say it: both are files or links of known content, or nothing."""
    kinds = {side.node.kind for side in (old, new) if side.node is not None}
    known = all(side.node is None or side.data is not None for side in (old, new))
    return known and len(kinds) == 1 and kinds <= {"file", "link"}


def _header(path: str, old: _Side, new: _Side, origin: str | None) -> Iterator[str]:
    yield f"diff --git {_quoted(f'a/{origin or path}')} {_quoted(f'b/{path}')}\n"
    if old.node is None:
        yield f"new file mode {new.mode}\n"
    elif new.node is None:
        yield f"deleted file mode {old.mode}\n"
    elif old.mode != new.mode:
        yield f"old mode {old.mode}\n"
        yield f"new mode {new.mode}\n"
    if origin is not None:
        if old.data == new.data:
            yield "similarity index 100%\n"
        yield f"rename from {_quoted(origin)}\n"
        yield f"rename to {_quoted(path)}\n"


def _names(origin: str, path: str, old: _Side, new: _Side) -> Iterator[str]:
    before = "/dev/null" if old.node is None else _quoted(f"a/{origin}")
    after = "/dev/null" if new.node is None else _quoted(f"b/{path}")
    for mark, name in (("---", before), ("+++", after)):
        # A tab ends a name with a space in it; without one, what follows is taken for a time.
        yield f"{mark} {name}" + ("\t\n" if " " in name else "\n")


def _hunks(old: _Side, new: _Side, effort: Effort) -> Iterator[str]:
    before, after = old.data or b"", new.data or b""
    if before == after:
        return
    try:
        old_lines, new_lines = (_lines(data.decode()) for data in (before, after))
    except UnicodeDecodeError:
        yield f"Binary files differ: {len(before)} bytes became {len(after)}\n"
        return
    yield from hunks(old_lines, new_lines, effort)


def _lines(text: str) -> list[str]:
    """Return the lines, each with its end; only ``\\n`` ends one, as for git."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _quoted(path: str) -> str:
    """Return a path as git writes it: in quotes where there is something strange in it."""
    if path.isprintable() and not set(path) & {'"', "\\"}:
        return path
    data = path.encode("utf-8", "surrogateescape")
    return '"' + "".join(_ESCAPES.get(byte) or f"\\{byte:03o}" for byte in data) + '"'


_ESCAPES = {
    **{code: chr(code) for code in range(32, 127)},
    ord('"'): '\\"',
    ord("\\"): "\\\\",
    ord("\n"): "\\n",
    ord("\t"): "\\t",
}
