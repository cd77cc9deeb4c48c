"""Differences between two looks at a directory, file by file, in ``git diff`` format."""

from __future__ import annotations

import base64
import errno
import hashlib
import re
import stat
import string
import sys
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from difflib import Match, SequenceMatcher
from itertools import islice
from typing import Any, Literal, Protocol

from weakincentives.errors import ContentDamaged
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.layers import File, Look, Node, names_of, walk
from weakincentives.filesystem.paths import NodeKind, Parts, join_path, shown

_CONTEXT = 3
"""Unchanged lines shown around a change."""
_MAX_TEXT = 8 << 20
"""Bytes; a larger file is never compared line by line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """The change of one path."""

    path: str
    origin: str = ""
    """The previous path of a moved file."""
    added: int = 0
    """Lines."""
    removed: int = 0
    text: str = ""
    """A patch for ``git apply``."""
    note: str = ""
    """What the patch does not have, in words, such as an empty directory or permissions."""
    is_binary: bool = False
    is_complete: bool = True
    """Whether the patch has the whole content. It does not if a file is too large or unknown."""


def diff_text(changes: Iterable[FileChange]) -> str:
    """Return changes as one patch, with their notes as comments at its start."""
    changes = list(changes)
    notes = [f"# {shown(each.path)}: {each.note}\n" for each in changes if each.note]
    return "".join([*notes, *(each.text for each in changes)])


@dataclass(slots=True)
class Effort:
    """What a diff may cost; beyond that, changes are coarser or only named."""

    left: int = 500_000
    """Search steps, about one second."""
    size: int = 128 << 20
    """Bytes of all files."""
    largest: int = 32 << 20
    """Bytes of one file."""
    files: int = sys.maxsize
    """How many files are compared."""
    raw: bool = False
    """Whether lines that are not UTF-8 are shown, with lone surrogates; else they are binary."""


Detail = Callable[[str], bool]
"""Tells whether a path's content is compared; of the others only the path is returned."""


@dataclass(frozen=True, slots=True)
class _Side:
    """What is at a path in one look."""

    node: Node | None = None
    data: bytes | None = None
    """A file's content or a link's target; None if it was not read."""
    problem: Literal["", "damaged", "large", "unknown"] = ""
    """Why the content was not read."""

    @property
    def kind(self) -> NodeKind | None:
        return None if self.node is None else self.node.kind

    @property
    def words(self) -> str:
        if self.node is None:
            return "nothing"
        if self.problem == "damaged":
            return "a file whose saved content is damaged"
        if self.kind == "file":
            return f"a file of {self.node.size} bytes"
        if self.kind == "other":
            return "a named pipe" if self.node.pipe else "a special file"
        return f"a {self.kind}"

    @property
    def mode(self) -> str:
        """The mode in git's notation."""
        if self.node is None:
            return ""
        if self.node.kind == "link":
            return "120000"
        return "100755" if self.node.mode & stat.S_IXUSR else "100644"

    @property
    def is_known(self) -> bool:
        """Whether the patch can have it; a directory is only in the names of its files."""
        return not self.problem and (self.data is not None or self.kind in (None, "directory"))


_NOTHING = _Side()
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


class Side(Protocol):
    """What is at a path at one time: a :class:`Look` without directories."""

    def node(self, parts: Parts) -> Node | None: ...

    def read(self, parts: Parts) -> bytes: ...

    def link_target(self, parts: Parts) -> str: ...


def file_changes(
    paths: Iterable[Parts],
    before: Side,
    now: Side,
    *,
    detail: Detail | None = None,
    effort: Effort | None = None,
) -> list[FileChange]:
    """Return the differences of two looks at some paths, in order."""
    effort = effort or Effort()
    nodes = {parts: (_node(before, parts), _node(now, parts)) for parts in paths}
    every = (parts for parts in nodes if detail is None or detail(join_path(parts)))
    wanted = set(islice(every, effort.files))
    found: list[FileChange] = []
    for parts, origin, old_node, new_node in _changed_nodes(nodes, wanted):
        if parts not in wanted:
            found.append(FileChange(path=join_path(parts)))
            continue
        old = _side(before, origin or parts, old_node, effort)
        new = _side(now, parts, new_node, effort)
        if origin is not None or _differ(old, new):
            found.append(_change(parts, old, new, effort, origin))
    return found


def changed_nodes(
    paths: Iterable[Parts], before: Look, now: Look
) -> Iterator[tuple[Parts, Parts | None, Node | None, Node | None]]:
    """Yield the paths where two looks differ: previous path if it was moved, and both nodes."""
    nodes = {parts: (_node(before, parts), _node(now, parts)) for parts in paths}
    return _changed_nodes(nodes, nodes.keys())


def _changed_nodes(
    nodes: Mapping[Parts, tuple[Node | None, Node | None]], wanted: AbstractSet[Parts]
) -> Iterator[tuple[Parts, Parts | None, Node | None, Node | None]]:
    filled = [{parts[:-1] for parts, two in nodes.items() if two[n] is not None} for n in (0, 1)]
    origins = _origins(nodes, wanted)
    moved = set(origins.values())
    for parts, (_, new_node) in nodes.items():
        origin = origins.get(parts)
        two = nodes[origin or parts][0], new_node
        if parts in moved or (origin is None and _is_same(*two)):
            continue
        if None in two and any(
            node is not None and node.is_directory and parts in full
            for node, full in zip(two, filled, strict=True)
        ):
            continue  # the paths of its files imply it
        yield parts, origin, *two


def change_between(
    path: Parts,
    old: tuple[Node | None, bytes | None],
    new: tuple[Node | None, bytes | None],
    *,
    origin: Parts | None = None,
    effort: Effort | None = None,
) -> FileChange:
    """Return the change of one path, given what was and what is there: nodes, and their contents.

    A content is None if it is not known.
    """
    return _change(path, _known_side(*old), _known_side(*new), effort or Effort(), origin)


def _known_side(node: Node | None, data: bytes | None) -> _Side:
    is_unknown = data is None and node is not None and node.kind in ("file", "link")
    return _Side(_UNKNOWN, problem="unknown") if is_unknown else _Side(node, data)


def _node(look: Side, parts: Parts) -> Node | None:
    try:
        return look.node(parts)
    except OSError as error:
        return None if error.errno in _NOTHING_BELOW else _UNKNOWN


def _side(look: Side, parts: Parts, node: Node | None, effort: Effort) -> _Side:
    if node is None or node.is_directory or (node.kind == "other" and node != _UNKNOWN):
        return _Side(node)
    try:
        if node.kind == "link":
            return _Side(node, look.link_target(parts).encode(errors="surrogateescape"))
        if node.size > min(effort.largest, effort.size):
            return _Side(node, problem="large")
        effort.size -= node.size
        return _Side(node, look.read(parts))
    except ContentDamaged:
        return _Side(_UNKNOWN, problem="damaged")
    except OSError:  # not saved, unreadable, or changed since
        return _Side(_UNKNOWN, problem="unknown")


def _origins(
    nodes: Mapping[Parts, tuple[Node | None, Node | None]], wanted: AbstractSet[Parts]
) -> dict[Parts, Parts]:
    """Return the previous path of each moved file; both have detail, or none has."""
    gone = {
        (old.file, parts in wanted): parts
        for parts, (old, new) in nodes.items()
        if old is not None and old.file is not None and new is None
    }
    came = (
        (parts, (new.file, parts in wanted))
        for parts, (old, new) in nodes.items()
        if old is None and new is not None and new.file is not None
    )
    # A hard-linked file can appear at several paths; only one is its move.
    return {parts: gone.pop(file) for parts, file in came if file in gone}


def _is_same(old: Node | None, new: Node | None) -> bool:
    """Tell whether the status alone shows that nothing has changed."""
    if old is None or new is None or old == _UNKNOWN or new == _UNKNOWN:
        return old is new
    if old.is_directory and new.is_directory:
        return not _attributes(old, new)  # entries of a directory are compared by themselves
    return old[:7] == new[:7] and bool(old.ctime_ns) and old.ctime_ns == new.ctime_ns


def _differ(old: _Side, new: _Side) -> bool:
    if old.problem or new.problem:
        is_large = "large" in (old.problem, new.problem) and None not in (old.node, new.node)
        return not is_large or (old.node or ())[:7] != (new.node or ())[:7]
    if old.node is None or new.node is None or old.kind != new.kind:
        return True
    return old.data != new.data or old.mode != new.mode or bool(_attributes(old.node, new.node))


def _attributes(old: Node, new: Node) -> str:
    """Return what has changed of the attributes that git does not know, in words."""
    words: list[str] = []
    if old.kind == new.kind != "link":
        ignored = 0o111 if old.kind == "file" and (old.mode ^ new.mode) & stat.S_IXUSR else 0
        if (old.mode ^ new.mode) & ~ignored:
            words.append(f"permissions {old.mode:04o} became {new.mode:04o}")
        if None not in (old.digest, new.digest):  # from the history: all of it is known
            if (old.uid, old.gid) != (new.uid, new.gid):
                words.append(f"owner {old.uid}:{old.gid} became {new.uid}:{new.gid}")
            if old.xattrs != new.xattrs:
                words.append("extended attributes changed")
    return ", ".join(words)


# The text


def _change(
    parts: Parts, old: _Side, new: _Side, effort: Effort, origin: Parts | None
) -> FileChange:
    path, source = join_path(parts), "" if origin is None else join_path(origin)
    is_complete = old.is_known and new.is_known
    is_special = {old.kind, new.kind} == {None, "other"} and not (old.problem or new.problem)
    pieces: list[tuple[_Side, _Side]] = []
    if is_complete:
        # For git, what becomes something of another kind is deleted, then created.
        sides = [_NOTHING if side.kind == "directory" else side for side in (old, new)]
        both = None not in (sides[0].kind, sides[1].kind) and sides[0].kind != sides[1].kind
        pieces = [(sides[0], _NOTHING), (_NOTHING, sides[1])] if both else [(sides[0], sides[1])]
    lines: list[str] = []
    body: list[str] = []
    is_binary = False
    for before, after in pieces:
        if before.kind is None and after.kind is None:
            continue
        data = before.data or b"", after.data or b""
        is_piece_binary = not all(_is_text(each, effort) for each in data)
        header = list(_header(path, before, after, source, full=is_piece_binary))
        if len(header) == 1 and data[0] == data[1]:
            continue  # git knows nothing of what has changed
        lines += header
        is_binary = is_binary or is_piece_binary
        if is_piece_binary:
            lines += _binary(*data)
        elif hunk := list(_hunks(*data, effort)):
            lines += [*_names(source or path, path, before, after), *hunk]
            body += hunk
    return FileChange(
        path=path,
        origin=source,
        added=sum(line.startswith("+") for line in body),
        removed=sum(line.startswith("-") for line in body),
        text="".join(lines),
        note=_in_words(old, new, moved=origin is not None),
        is_binary=is_binary,
        is_complete=is_complete or is_special,  # git knows no pipes
    )


def _is_text(data: bytes, effort: Effort) -> bool:
    if len(data) > _MAX_TEXT or b"\0" in data:
        return False
    try:
        data.decode(errors="surrogateescape" if effort.raw else "strict")
    except UnicodeDecodeError:
        return False
    return True


def _in_words(old: _Side, new: _Side, *, moved: bool) -> str:
    if "large" in (old.problem, new.problem):
        return f"too large for a diff: {old.words} became {new.words}"
    if moved and new.problem == "unknown":
        return "moved, and changed since by somebody else"
    if old.problem == "unknown":
        return f"changed; the previous version is not saved, now {new.words}"
    if new.problem == "unknown":
        return f"{'created' if old.node is None else 'changed'}, and changed since by somebody else"
    if old.node is None or new.node is None:
        if new.kind == "directory":
            return "new empty directory"
        if old.kind == "directory":
            return "empty directory deleted"
    elif old.kind == new.kind and not (old.problem or new.problem):
        return _attributes(old.node, new.node)
    if old.is_known and new.is_known:
        return ""
    return f"{old.words} became {new.words}"


def _header(path: str, old: _Side, new: _Side, origin: str, *, full: bool) -> Iterator[str]:
    yield f"diff --git {_quoted(f'a/{origin or path}')} {_quoted(f'b/{path}')}\n"
    if old.node is None:
        yield f"new file mode {new.mode}\n"
    elif new.node is None:
        yield f"deleted file mode {old.mode}\n"
    elif old.mode != new.mode:
        yield f"old mode {old.mode}\n"
        yield f"new mode {new.mode}\n"
    if origin:
        if old.data == new.data:
            yield "similarity index 100%\n"
        yield f"rename from {_quoted(origin)}\n"
        yield f"rename to {_quoted(path)}\n"
    if full and old.data != new.data:
        yield f"index {_blob(old.data)}..{_blob(new.data)}\n"


def _blob(data: bytes | None) -> str:
    """Return the name of a file's content in git, which a binary patch must have."""
    if data is None:
        return "0" * 40
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


_LENGTHS = string.ascii_uppercase + string.ascii_lowercase
"""Git's first letter of a line: the number of bytes in it, at most 52."""


def _binary(old: bytes, new: bytes) -> Iterator[str]:
    if old == new:
        return
    yield "GIT binary patch\n"
    for data in (new, old):  # forward, then for --reverse
        packed = zlib.compress(data)
        yield f"literal {len(data)}\n"
        for start in range(0, len(packed), 52 << 10):
            chunk = packed[start : start + (52 << 10)]
            text = base64.b85encode(chunk, pad=True).decode()
            for n in range(0, len(chunk), 52):
                begin = n // 4 * 5
                yield f"{_LENGTHS[min(len(chunk) - n, 52) - 1]}{text[begin : begin + 65]}\n"
        yield "\n"


def _names(origin: str, path: str, old: _Side, new: _Side) -> Iterator[str]:
    before = "/dev/null" if old.node is None else _quoted(f"a/{origin}")
    after = "/dev/null" if new.node is None else _quoted(f"b/{path}")
    yield f"--- {before}\n"
    yield f"+++ {after}\n"


def _hunks(old: bytes, new: bytes, effort: Effort) -> Iterator[str]:
    if old != new:
        before, after = (lines_of(data.decode(errors="surrogateescape")) for data in (old, new))
        yield from hunks(before, after, effort)


def lines_of(text: str) -> list[str]:
    """Return the lines with their ends; only ``\\n`` ends a line, as in git."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _quoted(path: str) -> str:
    """Return a path as git reads it, quoted if it has unusual characters.

    Also if it has spaces: git cannot always tell where such a name ends in a patch without lines.
    """
    if path.isprintable() and not set(path) & {'"', "\\", " "}:
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


class _Matcher(SequenceMatcher[str]):
    """Groups changes into hunks, given the matching lines."""

    def __init__(self, blocks: list[Match]) -> None:
        super().__init__()
        self._blocks = blocks

    def get_matching_blocks(self) -> list[Match]:
        return self._blocks


def line_edits(
    old: Sequence[str], new: Sequence[str], effort: Effort | None = None
) -> list[tuple[int, int, list[str]]]:
    """Return the edits from one text's lines to the other's, in order.

    Each has the place in the old lines, how many of them go, and the lines that come instead.
    """
    found: list[tuple[int, int, list[str]]] = []
    i = j = 0
    for x, y, size in _matching(old, new, effort or Effort()):
        if x > i or y > j:
            found.append((i, x - i, list(new[j:y])))
        i, j = x + size, y + size
    return found


def _matching(old: Sequence[str], new: Sequence[str], effort: Effort) -> list[Match]:
    """Return the runs of matching lines; the last one is empty, at both ends."""
    # Numbers compare faster than lines.
    known: dict[str, int] = {}
    old_ids, new_ids = (
        [known.setdefault(line, len(known)) for line in each] for each in (old, new)
    )
    return [*_blocks(_same(old_ids, new_ids, effort)), Match(len(old), len(new), 0)]


def hunks(old: Sequence[str], new: Sequence[str], effort: Effort) -> Iterator[str]:
    """Yield the lines of a patch's hunks, from one text's lines to the other's."""
    for group in _Matcher(_matching(old, new, effort)).get_grouped_opcodes(_CONTEXT):
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
