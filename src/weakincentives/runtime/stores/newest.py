"""The slices of a log, parsed from its end: a session opens without reading its whole past.

A save says, for each changed slice, how many values stay and which values follow them. So the
newest save of a slice tells its length, and older saves are parsed when an older value is first
read.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, overload

from weakincentives.collector import no_collection
from weakincentives.errors import SnapshotError
from weakincentives.serde.exact import current_name

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


_CHANGE = re.compile(rb'":\[[0-9]+,\[')
"""What follows the name of a slice: how many values stay, and those that follow them."""


class NewestSaves:
    """The STATE and LOG slices of some saves, by name, as frozen values."""

    def __init__(self, texts: Sequence[bytes], parse: Callable[[bytes], Any]) -> None:
        """All texts must be as ``SavedSession`` writes them: ``are_plain`` tells."""
        self.state: dict[str, FrozenValues] = {}
        self.log: dict[str, FrozenValues] = {}
        self._texts = texts
        self._parse = parse
        self._older = len(texts)
        """The saves from here on have been applied."""
        self._lock = threading.Lock()
        whole = b"\n".join(texts)
        starts = [0, *accumulate(len(text) + 1 for text in texts)]
        for name, text in _names_in(whole):
            self._find(name, text, whole, starts)

    def load(self, values: FrozenValues, start: int) -> None:
        """Parse older saves until the values from a place on are known."""
        with self._lock, no_collection():
            while values.known_from > start:
                if not self._older:
                    raise SnapshotError(f"values are missing in the slice of {values.name}")
                self._older -= 1
                try:
                    self._add(self._parse(self._texts[self._older]))
                except UNREADABLE as error:
                    raise SnapshotError(
                        f"save {self._older + 1} cannot be read: {error}"
                    ) from error

    def _add(self, save: Any) -> None:
        for kind, slices in (("state", self.state), ("log", self.log)):
            for name, (kept, items) in save[kind].items():
                if (found := slices.get(current_name(name))) is not None:
                    found.add(kept, items)

    def _find(self, name: str, text: bytes, whole: bytes, starts: list[int]) -> None:
        """Find the newest save of a slice, if there is a slice of this name."""
        end = len(whole)
        while (found := whole.rfind(text, 0, end)) >= 0:
            place = bisect_right(starts, found) - 1
            end = starts[place]
            save = self._parse(self._texts[place])
            for kind, slices in (("state", self.state), ("log", self.log)):
                if name in save[kind]:
                    kept, items = save[kind][name]
                    self._note(slices, current_name(name), place, kept, items)
                    if items or kept or slices is self.log:
                        return
                    # A reset of a slice is a change of its state, whatever its kind: look further.

    def _note(
        self, slices: dict[str, FrozenValues], name: str, place: int, kept: int, items: list[Any]
    ) -> None:
        known = slices.get(name)
        if known is None or known.place < place:  # a class has several names if it has moved
            slices[name] = FrozenValues(self, name, place, kept, items)


class FrozenValues(Sequence[Any]):
    """The frozen values of a slice; a part of them is parsed when it is first read."""

    def __init__(
        self, saves: NewestSaves, name: str, place: int, kept: int, items: list[Any]
    ) -> None:
        self.name = name
        self.place = place
        """The newest save of the slice."""
        self.known_from = kept
        self._saves = saves
        self._values: list[Any] = [None] * kept + items

    def add(self, kept: int, items: list[Any]) -> None:
        """Add what an older save says."""
        end = self.known_from
        if kept < end:
            if kept + len(items) < end:
                raise SnapshotError(f"values are missing in the slice of {self.name}")
            self._values[kept:end] = items[: end - kept]
            self.known_from = kept

    def part(self, start: int, stop: int) -> list[Any]:
        if start < self.known_from:
            self._saves.load(self, start)
        return self._values[start:stop]

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            start, stop, _ = place.indices(len(self))
            return _Part(self, start, stop)
        at = range(len(self))[place]
        return self.part(at, at + 1)[0]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.part(0, len(self)))


class _Part(Sequence[Any]):
    """Some of the values of a slice, parsed when they are first read."""

    def __init__(self, values: FrozenValues, start: int, stop: int) -> None:
        self._values = values
        self._start = start
        self._stop = max(start, stop)

    def __getitem__(self, place: Any) -> Any:
        return self._values.part(self._start, self._stop)[place]

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.part(self._start, self._stop))


def are_plain(texts: Sequence[bytes]) -> bool:
    """Whether saves have the form that ``SavedSession`` writes: an adopted file has blanks."""
    return not any(text.startswith(b'{"at": ') for text in texts)


def _names_in(whole: bytes) -> set[tuple[str, bytes]]:
    """Return what may be the names of slices, each with the text that its changes begin with.

    Any key of such a list may be; most are told apart by the colon that every name of a class has.
    In a string, the quote after the key is escaped: no JSON string ends in a single backslash.
    """
    ends = (match.start() for match in _CHANGE.finditer(whole))
    keys = {whole[whole.rfind(b'"', 0, end) + 1 : end] for end in ends}
    found: set[tuple[str, bytes]] = set()
    for key in keys:
        if b":" in key:
            with suppress(ValueError):
                found.add((json.loads(b'"%b"' % key), b'"%b":[' % key))
    return found
