"""Differences between two looks at a directory, file by file, in ``git diff`` format."""

from __future__ import annotations

import errno
import re
import stat
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from difflib import Match, SequenceMatcher
from typing import Any

from weakincentives.errors import ContentDamaged
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.layers import File, Look, Node, names_of, walk
from weakincentives.filesystem.paths import NodeKind, Parts, join_path, shown

_MAX_COMPARED = 1 << 20
"""Bytes; of a larger file only the size is shown."""
_CONTEXT = 3
"""Unchanged lines shown around a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """The change of one path."""

    path: str
    origin: str = ""
    """The previous path of a moved file."""
    added: int = 0
    """Lines."""
    removed: int = 0
    text: str
    """Its diff in ``git diff`` format, or a description where that format has none."""


@dataclass(frozen=True, slots=True)
class _Side:
    """What is at a path in one look."""

    node: Node | None
    data: bytes | None
    """A file's content or a link's target; None if unknown."""
    is_damaged: bool = False

    @property
    def kind(self) -> NodeKind | None:
        return None if self.node is None else self.node.kind

    @property
    def words(self) -> str:
        if self.node is None:
            return "nothing"
        if self.is_damaged:
            return "a file whose saved content is damaged"
        return f"a file of {self.node.size} bytes" if self.kind == "file" else f"a {self.kind}"

    @property
    def mode(self) -> str:
        """The mode in git's notation."""
        if self.node is None:
            return ""
        if self.node.kind == "link":
            return "120000"
        return "100755" if self.node.mode & stat.S_IXUSR else "100644"


_NOTHING = _Side(None, None)
_UNKNOWN = Node("other", 0, 0, 0, 0)
_NOTHING_BELOW = (errno.ENOTDIR, errno.ELOOP)
"""The errors of a look if a file or link is above the path."""


def changed_paths(records: Sequence[Record], before: Look, now: Look) -> list[Parts]:
    """Return every path changed by some records, sorted.

    This includes everything in a directory that was added, removed or moved, and all names of a
    hard-linked file that was changed in place.
    """
    found = {parts for record in records if record.is_change for parts in record.paths}
    tops = {parts for record in records if record.is_whole for parts in record.paths}
    return all_changed(found, tops, frozenset(), before, now)


def all_changed(
    paths: AbstractSet[Parts],
    tops: AbstractSet[Parts],
    files: AbstractSet[File],
    before: Look,
    now: Look,
) -> list[Parts]:
    """Return paths with everything below ``tops``, and all names of some files."""
    found = set(paths)
    for look in (before, now):
        found.update(parts for parts, _ in walk(look, tops))
        if files:
            found |= names_of(look, files, [()])
    return sorted(found)


def file_changes(paths: Iterable[Parts], before: Look, now: Look) -> list[FileChange]:
    """Return the differences of two looks at some paths, in order."""
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
        return _Side(_UNKNOWN, None, is_damaged=True)
    except OSError as error:
        if error.errno in _NOTHING_BELOW:
            return _NOTHING
        return _Side(_UNKNOWN, None)  # not saved, unreadable, or just removed


def _origins(sides: dict[Parts, tuple[_Side, _Side]]) -> dict[Parts, Parts]:
    """Return the previous path of each moved file."""
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
    # A hard-linked file can appear at several paths; only one is its move.
    return {parts: gone.pop(file) for parts, file in came if file in gone}


def _differ(old: _Side, new: _Side) -> bool:
    if old.is_damaged or new.is_damaged:
        return True
    if old.node is None or new.node is None or old.kind != new.kind:
        return old.kind != new.kind
    if old.kind not in ("file", "link"):
        return False  # entries of a directory are compared by themselves
    if old.data is None or new.data is None:
        return old.node[:7] != new.node[:7]  # the whole status except the change time
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
        # For git, a file that becomes a directory is deleted; its entries are shown separately.
        old, new = (_NOTHING if side.kind == "directory" else side for side in (old, new))
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
    if new.kind == "directory" and old.kind is None:
        return "new directory"
    if old.kind == "directory" and new.kind is None:
        return "directory deleted"
    if old.node == _UNKNOWN and not old.is_damaged:
        return f"changed; the previous version is not saved, now {new.words}"
    if new.node and new.node.kind == "other" and new.node.ino == 0 and not new.is_damaged:
        return f"{'created' if old.node is None else 'changed'}, and changed since by somebody else"
    return f"{old.words} became {new.words}"


def _has_a_diff(old: _Side, new: _Side) -> bool:
    """Whether git can show it: both are files or links of known content, or nothing."""
    kinds = {old.kind, new.kind} - {None}
    known = all(side.kind is None or side.data is not None for side in (old, new))
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
        # A tab ends a name that contains a space, as in git.
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
    """Return the lines with their ends; only ``\\n`` ends a line, as in git."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _quoted(path: str) -> str:
    """Return a path as git writes it, quoted if it has unusual characters."""
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

# The line diff. The standard library's difflib takes minutes for a rewritten megabyte. Here, lines
# that occur exactly once in both texts are matched first, as in a patience diff. Between them,
# Myers' algorithm finds the shortest edit within a budget; when that is used up, the whole block is
# replaced, which is longer but also correct.


@dataclass(slots=True)
class Effort:
    """The budget of search steps, about one second."""

    left: int = 500_000


class _Matcher(SequenceMatcher[str]):
    """Groups changes into hunks, given the matching lines."""

    def __init__(self, blocks: list[Match]) -> None:
        super().__init__()
        self._blocks = blocks

    def get_matching_blocks(self) -> list[Match]:
        return self._blocks


def hunks(old: Sequence[str], new: Sequence[str], effort: Effort) -> Iterator[str]:
    """Yield the lines of a patch's hunks, from one text's lines to the other's."""
    # Numbers compare faster than lines.
    known: dict[str, int] = {}
    old_ids, new_ids = (
        [known.setdefault(line, len(known)) for line in each] for each in (old, new)
    )
    blocks = [*_blocks(_same(old_ids, new_ids, effort)), Match(len(old), len(new), 0)]
    for group in _Matcher(blocks).get_grouped_opcodes(_CONTEXT):
        if {opcode[0] for opcode in group} == {"equal"}:
            return  # nothing differs
        (_, start, _, new_start, _), (_, _, end, _, new_end) = group[0], group[-1]
        yield f"@@ -{_range(start, end)} +{_range(new_start, new_end)} @@\n"
        for tag, i, x, j, y in group:
            if tag == "equal":
                yield from _marked(" ", old[i:x])
            else:
                yield from _marked("-", old[i:x])
                yield from _marked("+", new[j:y])


def _blocks(same: Iterable[tuple[int, int]]) -> Iterator[Match]:
    """Yield the runs of matching lines."""
    i = j = size = 0
    for x, y in same:
        if size and (x, y) != (i + size, j + size):
            yield Match(i, j, size)
            size = 0
        if not size:
            i, j = x, y
        size += 1
    if size:
        yield Match(i, j, size)


def _range(start: int, end: int) -> str:
    length = end - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"


def _marked(mark: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        end = "" if line.endswith("\n") else "\n\\ No newline at end of file\n"
        yield f"{mark}{line}{end}"


def _same(old: Sequence[int], new: Sequence[int], effort: Effort) -> Iterator[tuple[int, int]]:
    """Yield the matching lines, as positions in both texts, in order."""
    i = j = 0
    for x, y in (*_anchors(old, new), (len(old), len(new))):
        yield from _between(old, new, (i, x), (j, y), effort)
        if x < len(old):
            yield x, y
        i, j = x + 1, y + 1


def _anchors(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """Return the longest ordered sequence of lines that occur once in both texts."""
    in_old, in_new = Counter(old), Counter(new)
    places = {line: place for place, line in enumerate(new) if in_new[line] == 1}
    pairs = [
        (place, places[line])
        for place, line in enumerate(old)
        if in_old[line] == 1 and line in places
    ]
    # Longest increasing subsequence: for each length, the pair with the lowest end.
    lowest: list[int] = []
    chosen: list[int] = []
    before: list[int] = []
    for number, (_, place) in enumerate(pairs):
        length = bisect_left(lowest, place)
        before.append(chosen[length - 1] if length else -1)
        lowest[length : length + 1] = [place]
        chosen[length : length + 1] = [number]
    found: list[tuple[int, int]] = []
    number = chosen[-1] if chosen else -1
    while number >= 0:
        found.append(pairs[number])
        number = before[number]
    return found[::-1]


def _between(
    old: Sequence[int],
    new: Sequence[int],
    in_old: tuple[int, int],
    in_new: tuple[int, int],
    effort: Effort,
) -> Iterator[tuple[int, int]]:
    """Yield the matching lines of two parts: common ends, then the shortest edit."""
    (i, x), (j, y) = in_old, in_new
    while i < x and j < y and old[i] == new[j]:
        yield i, j
        i, j = i + 1, j + 1
    end = 0
    while x - end > i and y - end > j and old[x - end - 1] == new[y - end - 1]:
        end += 1
    for a, b in _shortest(old[i : x - end], new[j : y - end], effort):
        yield i + a, j + b
    yield from ((x - n, y - n) for n in range(end, 0, -1))


_Way = tuple[int, Any]
"""The position reached in the old lines, and the matching runs, newest first."""


def _shortest(old: Sequence[int], new: Sequence[int], effort: Effort) -> list[tuple[int, int]]:
    """Return the matching lines of the shortest edit, or none if the budget runs out.

    Myers' greedy algorithm: the furthest position on each diagonal for a number of edits.
    """
    if not old or not new or not set(old) & set(new):
        return []
    furthest: dict[int, _Way] = {1: (0, None)}
    for edits in range(len(old) + len(new) + 1):
        effort.left -= edits + 1
        if effort.left < 0:
            return []
        for diagonal in range(-edits, edits + 1, 2):
            down, right = furthest.get(diagonal + 1), furthest.get(diagonal - 1)
            if right is None or (down is not None and diagonal != edits and right[0] < down[0]):
                assert down is not None
                x, runs = down  # an added line
            else:
                x, runs = right[0] + 1, right[1]  # a removed line
            start = x
            while x < len(old) and 0 <= x - diagonal < len(new) and old[x] == new[x - diagonal]:
                x += 1
            if x > start:
                effort.left -= (x - start) // 4
                runs = (x, x - diagonal, x - start, runs)
            furthest[diagonal] = (x, runs)
            if x >= len(old) and x - diagonal >= len(new):
                return _unrolled(runs)
    return []


def _unrolled(runs: Any) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while runs is not None:
        x, y, length, runs = runs
        found += [(x - n, y - n) for n in range(1, length + 1)]
    return found[::-1]
