"""The lines that differ between two texts, as the hunks of a patch, within a bounded time.

The standard library's difflib takes minutes for a megabyte that was rewritten. Here lines that are
there once in both texts are put side by side first, which takes no time worth counting; between
those, the shortest way from one text to the other is looked for as long as there is effort left.
Where it runs out, a whole block is replaced: longer than it had to be, and as right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Effort", "hunks"]

_CONTEXT = 3


@dataclass(slots=True)
class Effort:
    """How many steps may be made in the search for short diffs; about a second for all of them."""

    left: int = 500_000


@dataclass(frozen=True, slots=True)
class _Change:
    """Lines that are replaced: where they are in both texts."""

    old: int
    old_end: int
    new: int
    new_end: int


def hunks(old: Sequence[str], new: Sequence[str], effort: Effort) -> Iterator[str]:
    """Yield the lines of a patch's hunks, from one text's lines to the other's."""
    # Numbers are quicker to compare than lines are.
    known: dict[str, int] = {}
    old_ids, new_ids = (
        [known.setdefault(line, len(known)) for line in each] for each in (old, new)
    )
    changes = list(_changes(old_ids, new_ids, effort))
    for group in _groups(changes):
        yield from _hunk(old, new, group)


def _groups(changes: Sequence[_Change]) -> Iterator[Sequence[_Change]]:
    """Yield the changes that stand so close that their contexts meet."""
    group: list[_Change] = []
    for each in changes:
        if group and each.old - group[-1].old_end > 2 * _CONTEXT:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _hunk(old: Sequence[str], new: Sequence[str], group: Sequence[_Change]) -> Iterator[str]:
    first, last = group[0], group[-1]
    before = min(_CONTEXT, first.old)
    after = min(_CONTEXT, len(old) - last.old_end)
    start, end = first.old - before, last.old_end + after
    its_range = _range(start, end)
    new_range = _range(first.new - before, last.new_end + after)
    yield f"@@ -{its_range} +{new_range} @@\n"
    for change in group:
        yield from _marked(" ", old[start : change.old])
        yield from _marked("-", old[change.old : change.old_end])
        yield from _marked("+", new[change.new : change.new_end])
        start = change.old_end
    yield from _marked(" ", old[start:end])


def _range(start: int, end: int) -> str:
    length = end - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"


def _marked(mark: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        end = "" if line.endswith("\n") else "\n\\ No newline at end of file\n"
        yield f"{mark}{line}{end}"


# What is the same


def _changes(old: Sequence[int], new: Sequence[int], effort: Effort) -> Iterator[_Change]:
    """Yield what lies between the lines that are the same, in order."""
    i = j = 0
    for x, y in (*_same(old, new, effort), (len(old), len(new))):
        if (x, y) != (i, j):
            yield _Change(i, x, j, y)
        i, j = x + 1, y + 1


def _same(old: Sequence[int], new: Sequence[int], effort: Effort) -> Iterator[tuple[int, int]]:
    """Yield the lines that stay, as their places in both texts, in order."""
    i = j = 0
    for x, y in (*_anchors(old, new), (len(old), len(new))):
        yield from _between(old, new, (i, x), (j, y), effort)
        if x < len(old):
            yield x, y
        i, j = x + 1, y + 1


def _anchors(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """Return lines that are in both texts once: the most that stand in the same order."""
    in_old, in_new = Counter(old), Counter(new)
    places = {line: place for place, line in enumerate(new) if in_new[line] == 1}
    pairs = [
        (place, places[line])
        for place, line in enumerate(old)
        if in_old[line] == 1 and line in places
    ]
    # The longest rising sequence: for each length, the pair that ends one and lies lowest.
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
    """Yield the lines that stay in two parts: at both ends, then on the shortest way."""
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


def _shortest(old: Sequence[int], new: Sequence[int], effort: Effort) -> list[tuple[int, int]]:
    """Return the lines that stay where the fewest go and come; none where that takes too long.

    Myers' greedy search: how far one gets with so many lines that go or come, on each diagonal.
    """
    if not old or not new or not set(old) & set(new):
        return []
    rounds: list[dict[int, int]] = []
    reached = {1: 0}
    for edits in range(len(old) + len(new) + 1):
        effort.left -= edits + 1
        if effort.left < 0:
            return []
        rounds.append(dict(reached) if edits == 0 else reached)
        reached = dict[int, int]()
        for diagonal in range(-edits, edits + 1, 2):
            x = _step(rounds[-1], diagonal, edits)
            start = x
            while x < len(old) and 0 <= x - diagonal < len(new) and old[x] == new[x - diagonal]:
                x += 1
            effort.left -= (x - start) // 4
            reached[diagonal] = x
            if x >= len(old) and x - diagonal >= len(new):
                return _way_back(rounds, len(old), len(new))
    return []


def _step(reached: dict[int, int], diagonal: int, edits: int) -> int:
    """Return how far a diagonal is reached from the two beside it: a line came, or one went."""
    down, right = reached.get(diagonal + 1, -1), reached.get(diagonal - 1, -1)
    is_down = diagonal == -edits or (diagonal != edits and right < down)
    return down if is_down else right + 1


def _way_back(rounds: Sequence[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for edits in range(len(rounds) - 1, -1, -1):
        start = _step(rounds[edits], x - y, edits)
        while x > start:
            x, y = x - 1, y - 1
            found.append((x, y))
        if edits:
            is_down = start == rounds[edits].get(x - y + 1, -1) and (
                x - y == -edits or (x - y != edits and rounds[edits].get(x - y - 1, -1) < start)
            )
            x, y = (x, y - 1) if is_down else (x - 1, y)
    return found[::-1]
