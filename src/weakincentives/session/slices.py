"""Persistent slices, which a session consists of, and reducers, which return the next slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, islice, takewhile
from typing import Any, Generic, TypeAlias, TypeVar, cast

__all__ = [
    "Reducer",
    "Slice",
    "SlicePolicy",
    "append_all",
    "reducer",
    "replace_latest",
    "slice_policy",
    "upsert_by",
]

T = TypeVar("T")
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., object])

_CHUNK = 32
_Chunks: TypeAlias = "tuple[_Chunks[T], Sequence[T]] | None"
"""Full chunks, newest first: each with the older ones."""


class SlicePolicy(Enum):
    """Whether a rollback restores a slice."""

    STATE = "state"
    """Working state: rolled back with the call, restored from snapshots, cleared by reset."""
    LOG = "log"
    """History: never rolled back."""


class Slice(Generic[T]):
    """An immutable sequence of values; every change returns a new one that shares the rest.

    Appending costs the same for ten values and for a million, and an older slice keeps its values:
    so a snapshot is a reference. Values are in full chunks and a short tail.

    >>> short = Slice.of([1, 2])
    >>> short.append(3).all(), short.all()
    ((1, 2, 3), (1, 2))
    """

    __slots__ = ("_full", "_length", "_tail")

    def __init__(self, full: _Chunks[T], tail: tuple[T, ...], length: int) -> None:
        self._full = full
        self._tail = tail
        self._length = length

    @staticmethod
    def of(items: Iterable[V]) -> Slice[V]:
        """Return a slice of these values, oldest first."""
        values = tuple(items)
        if len(values) <= _CHUNK:  # most are short, and reducers make one for every event
            return Slice(None, values, len(values))
        return _sliced(values, tuple, lambda chunk: chunk)

    @staticmethod
    def decoded(items: Sequence[object], decode: Callable[[Any], tuple[V, ...]]) -> Slice[V]:
        """Return a slice of encoded values: the newest are decoded now, others when first read."""
        return _sliced(items, decode, lambda chunk: _Encoded(chunk, decode))

    def append(self, item: T) -> Slice[T]:
        """Return this slice with one more value at the end."""
        if len(self._tail) < _CHUNK:
            # Added, not unpacked: twice as fast, and every record is appended here.
            return Slice(self._full, self._tail + (item,), self._length + 1)  # noqa: RUF005
        return Slice((self._full, self._tail), (item,), self._length + 1)

    def at(self, place: int) -> T:
        """Return the value at a place, counted from the oldest; newer values are found sooner."""
        in_tail = place - (self._length - len(self._tail))
        if in_tail >= 0:
            return self._tail[in_tail]
        chunks = islice(self._chunks(), self._chunks_after(place), None)
        return next(chunks)[place % _CHUNK]

    def put(self, place: int, item: T) -> Slice[T]:
        """Return this slice with another value at a place; older chunks are shared."""
        in_tail = place - (self._length - len(self._tail))
        if in_tail >= 0:
            return Slice(self._full, _with(self._tail, in_tail, item), self._length)
        newer = list(islice(self._chunks(), self._chunks_after(place)))
        rest, chunk = cast("tuple[_Chunks[T], Sequence[T]]", self._older_than(len(newer))[0])
        full: _Chunks[T] = (rest, _with(chunk, place % _CHUNK, item))
        for chunk in reversed(newer):
            full = (full, chunk)
        return Slice(full, self._tail, self._length)

    def _chunks_after(self, place: int) -> int:
        """Return the number of full chunks that are newer than the one at a place."""
        return (self._length - len(self._tail)) // _CHUNK - 1 - place // _CHUNK

    def replace(self, *items: T) -> Slice[T]:
        """Return a slice of only these values."""
        return Slice.of(items)

    def latest(self) -> T | None:
        """Return the newest value, or None."""
        return self._tail[-1] if self._tail else None

    def all(self) -> tuple[T, ...]:
        """Return every value, oldest first."""
        # Not cached: a snapshot would then hold a copy of the history instead of a reference.
        if self._full is None:
            return self._tail
        return tuple(chain.from_iterable(reversed([self._tail, *self._chunks()])))

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Return the values for which the predicate holds, oldest first."""
        return tuple(item for item in self.all() if predicate(item))

    def newest_first(self) -> Iterator[T]:
        """Yield every value, newest first; costs only the values that are consumed."""
        yield from reversed(self._tail)
        for chunk in self._chunks():
            yield from reversed(chunk)

    def newer_than(self, place: int) -> list[T]:
        """Return the values from a place on, oldest first; costs only these."""
        return [*islice(self.newest_first(), self._length - place)][::-1]

    def first(self, count: int) -> Slice[T]:
        """Return a slice of the oldest values, which shares them; costs the others."""
        if count >= self._length:
            return self
        chunks = max(count - 1, 0) // _CHUNK
        newer = (self._length - len(self._tail)) // _CHUNK - chunks
        rest, following = self._older_than(newer)
        return Slice(rest, tuple(following[: count - chunks * _CHUNK]), count)

    def _chunks(self) -> Iterator[Sequence[T]]:
        rest = self._full
        while rest is not None:
            rest, chunk = rest
            yield chunk

    def shared_with(self, other: Slice[T]) -> int:
        """Return how many values, from the oldest on, are the same objects in both.

        Costs the values that are not shared: a slice that grew from the other has its chunks.
        """
        mine, theirs = (each._length - len(each._tail) for each in (self, other))
        chunks = min(mine, theirs) // _CHUNK
        my_rest, my_next = self._older_than(mine // _CHUNK - chunks)
        their_rest, their_next = other._older_than(theirs // _CHUNK - chunks)
        newer = [(my_next, their_next)]
        while my_rest is not their_rest:
            my_rest, my_next = cast("tuple[_Chunks[T], Sequence[T]]", my_rest)
            their_rest, their_next = cast("tuple[_Chunks[T], Sequence[T]]", their_rest)
            newer.append((my_next, their_next))
        shared = (chunks + 1 - len(newer)) * _CHUNK
        for ours, others in reversed(newer):
            pairs = takewhile(lambda pair: pair[0] is pair[1], zip(ours, others, strict=False))
            same = sum(1 for _ in pairs)
            shared += same
            if same < _CHUNK:
                break
        return shared

    def not_in(self, other: Slice[T]) -> Iterator[T]:
        """Yield the values that another slice does not have, at least.

        Costs what this slice does not share with the other, and the newest values.
        """
        if len(self._tail) < 3:  # most slices that a reducer makes have one value
            yield from (item for item in self._tail if item is not other.latest())
        else:
            known = set(map(id, other._tail))
            yield from (item for item in self._tail if id(item) not in known)
        mine, theirs = self._full, other._full
        if mine is not None and mine[1] is other._tail:
            mine = mine[0]
        while mine is not None and mine is not theirs:
            mine, chunk = mine
            theirs, older = (None, ()) if theirs is None else theirs
            if chunk is not older:
                known = set(map(id, older))
                yield from (item for item in chunk if id(item) not in known)

    def _older_than(self, newer: int) -> tuple[_Chunks[T], Sequence[T]]:
        """Return the full chunks without the newest ones, and the values that come next."""
        rest: _Chunks[T] = self._full
        following: Sequence[T] = self._tail
        for _ in range(newer):
            rest, following = cast("tuple[_Chunks[T], Sequence[T]]", rest)
        return rest, following

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return iter(self.all())

    def __repr__(self) -> str:
        return f"Slice({list(self.all())!r})"


def _sliced(
    items: Sequence[Any],
    tail: Callable[[Any], tuple[V, ...]],
    chunk: Callable[[Any], Sequence[V]],
) -> Slice[V]:
    full: _Chunks[V] = None
    start = 0
    while len(items) - start > _CHUNK:
        full = (full, chunk(items[start : start + _CHUNK]))
        start += _CHUNK
    return Slice(full, tail(items[start:]), len(items))


class _Encoded(Sequence[T]):
    """A chunk that is decoded when it is first read."""

    def __init__(self, items: Sequence[object], decode: Callable[[Any], tuple[T, ...]]) -> None:
        self._items = items
        self._decode = decode
        self._values: tuple[T, ...] | None = None

    def _decoded(self) -> tuple[T, ...]:
        items = self._items  # before the check: another thread may decode them, then drop them
        values = self._values
        if values is None:
            values = self._values = self._decode(items)
            self._items = ()
        return values

    def __getitem__(self, place: Any) -> Any:
        values: tuple[Any, ...] = self._decoded()
        return values[place]

    def __iter__(self) -> Iterator[T]:
        return iter(self._decoded())

    def __len__(self) -> int:
        return _CHUNK


def _with(values: Sequence[T], place: int, item: T) -> tuple[T, ...]:
    return (*values[:place], item, *values[place + 1 :])


class _Keyed(Slice[T]):
    """A slice with a table of the place of each key, for ``upsert_by``.

    The table is shared by all slices that grew from one another, so it may contain entries of a
    slice that was rolled back: a place is checked before it is used.
    """

    __slots__ = ("key", "places")

    def __init__(
        self, values: Slice[T], key: Callable[[T], object], places: dict[object, int]
    ) -> None:
        super().__init__(values._full, values._tail, values._length)
        self.key = key
        self.places = places


EMPTY: Slice[Any] = Slice(None, (), 0)

Reducer = Callable[[Slice[T], Any], "Slice[T] | Iterable[T]"]
"""``(slice, event) -> next slice``: a Slice, or its values. Must be pure."""


def append_all(current: Slice[T], event: T) -> Slice[T]:
    """Keep every event. The default for a type without a registered reducer."""
    return current.append(event)


def replace_latest(current: Slice[T], event: T) -> Slice[T]:
    """Keep only the newest event."""
    return current.replace(event)


def upsert_by(key: Callable[[T], object]) -> Reducer[T]:
    """Keep one value per key, at the place where the key first occurred. Keys are hashable."""

    def found(current: Slice[T]) -> dict[object, int]:
        return {key(item): n for n, item in reversed(list(enumerate(current.all())))}

    def upsert(current: Slice[T], event: T) -> Slice[T]:
        wanted = key(event)
        if isinstance(current, _Keyed) and current.key is key:
            places = current.places
        else:
            places = found(current)
        place = places.get(wanted, -1)
        if place >= len(current) or (place >= 0 and key(current.at(place)) != wanted):
            place = found(current).get(wanted, -1)
        after = current.append(event) if place < 0 else current.put(place, event)
        places[wanted] = len(current) if place < 0 else place
        return _Keyed(after, key, places)

    return upsert


_REDUCES = "__wink_reduces__"
_POLICY = "__slice_policy__"


def reducer(*, on: type | tuple[type, ...]) -> Callable[[F], F]:
    """Mark a method of a slice's dataclass as the reducer for an event type.

    The method gets the slice's newest value as ``self`` and the event, and returns the value that
    replaces it. ``Session.install`` registers all reducers of a class.
    """
    event_types = cast("tuple[object, ...]", on if isinstance(on, tuple) else (on,))
    for event_type in event_types:
        if not isinstance(event_type, type):
            raise TypeError(f"on= takes a class or a tuple of classes, got {event_type!r}")

    def mark(method: F) -> F:
        setattr(method, _REDUCES, (*getattr(method, _REDUCES, ()), *event_types))
        return method

    return mark


def declared_reducers(slice_type: type) -> Iterator[tuple[type, Callable[[Any, Any], Any]]]:
    """Yield ``(event type, method)`` for every method marked with ``@reducer``."""
    for name in dir(slice_type):
        method = getattr(slice_type, name, None)
        for event_type in getattr(method, _REDUCES, ()):
            yield event_type, cast("Callable[[Any, Any], Any]", method)


def slice_policy(policy: SlicePolicy) -> Callable[[type[T]], type[T]]:
    """Declare on a class, and so on its subclasses, whether its slice is STATE or LOG.

    A class that declares nothing has a STATE slice.
    """

    def mark(cls: type[T]) -> type[T]:
        setattr(cls, _POLICY, SlicePolicy(policy))
        return cls

    return mark


def declared_policy(slice_type: type) -> SlicePolicy:
    """Return the policy a class declares for its slice."""
    return getattr(slice_type, _POLICY, SlicePolicy.STATE)
