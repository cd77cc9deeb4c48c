"""Entries by scope and key, as a resource that calls can fork, merge, snapshot and restore.

The whole state is one reference to persistent maps. One scope may stand in a store instead: then a
view only stages what it changes, and the outermost merge writes all of it in one step.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

from rpds import HashTrieMap

from weakincentives.call import current_view
from weakincentives.clock import Clock
from weakincentives.errors import MergeConflict, ReadOnlyView, ViewClosed
from weakincentives.logs import get_logger
from weakincentives.runtime.rows import RowStore

__all__ = ["Change", "Entries", "Entry", "reading", "writing"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Entries")

_logger = get_logger(__name__)


class Entry(NamedTuple):
    """What stands under a key. Entries are compared by what they hold, not by who wrote them."""

    text: str | None
    """None says that a view has deleted what the store below it holds."""
    expires: float = math.inf
    """On the clock's ``monotonic``."""


# Keys of rpds maps are strings, or pairs of them: it takes the NotImplemented of an ``__eq__`` for
# an answer, and panics.
Place: TypeAlias = tuple[str, str]
Batch: TypeAlias = Mapping[Place, Entry | None]
Change: TypeAlias = Callable[[Entry | None], Entry | None]
_Maps: TypeAlias = "HashTrieMap[str, HashTrieMap[str, Entry]]"
_NO_ENTRIES: HashTrieMap[str, Entry] = HashTrieMap()
_DELETED = Entry(None)
_FEWEST_TO_SWEEP = 64


class _State(NamedTuple):
    """All that changes and all that a restore brings back, in one reference."""

    maps: _Maps
    changes: HashTrieMap[Place, tuple[Change, ...]] = HashTrieMap()
    """In a view, what it changed: by functions that can be applied again, or, with none, to what
    stands in its maps now."""


@dataclass(slots=True)
class _Seen:
    """What a view depends on. It only grows: what has been read cannot be unread."""

    places: set[Place] = field(default_factory=set[Place])
    scopes: set[str] = field(default_factory=set[str])
    """Listed or searched: nothing in them may have changed."""


class _Mark:
    """What was changed in the store since a snapshot; the marks of later ones follow.

    They point forward, and only snapshots hold them: what no snapshot needs is not kept.
    """

    __slots__ = ("__weakref__", "changed", "later")

    def __init__(self) -> None:
        self.changed: dict[str, tuple[str | None, set[str | None]]] = {}
        self.later: _Mark | None = None

    def note(self, key: str, before: str | None, after: Iterable[str | None]) -> None:
        self.changed.setdefault(key, (before, set()))[1].update(after)

    def so_far(self) -> dict[str, tuple[str | None, set[str | None]]]:
        """Return, by key, what stood there at the mark and all that we have put there since."""
        total = _Mark()
        here: _Mark | None = self
        while here is not None:
            for key, (before, after) in here.changed.items():
                total.note(key, before, after)
            here = here.later
        return total.changed


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    state: _State
    family: object
    owner: object
    """Tells the view it was taken of, and does not keep that view alive."""
    mark: _Mark | None


class _SeenRows:
    """A store as one call sees it: what it has looked at stays as it was."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._found: dict[str, str | None] = {}
        self._revision: int | None = None
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        with self._lock:
            if key not in self._found:
                self._found[key] = self._store.get(key)
            return self._found[key]

    def revision(self) -> int:
        with self._lock:
            if self._revision is None:
                self._revision = self._store.revision()
            return self._revision

    def keys(self, prefix: str) -> list[str]:
        self.revision()  # noted first: what changes from now on is a conflict
        return self._store.keys(prefix)

    def search(self, words: tuple[str, ...]) -> list[str]:
        self.revision()
        return self._store.search(words)


def reading(operation: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run the operation on the view that the call under way works on."""

    @functools.wraps(operation)
    def on_current_view(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return operation(current_view(self), *args, **kwargs)

    return on_current_view


def writing(operation: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run the operation on the current view, if it may be changed, with the view's lock held.

    The check and the change are under one lock: once ``seal`` has returned, nothing slips through.
    """

    @functools.wraps(operation)
    def on_current_view(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        view = current_view(self)
        with view._lock:  # pyright: ignore[reportPrivateUsage]  # a method in all but its place
            view._check_writable(operation.__name__)  # pyright: ignore[reportPrivateUsage]
            return operation(view, *args, **kwargs)

    return on_current_view


class Entries:
    """Entries by scope and key, with all that a transactional resource needs."""

    def __init__(
        self, *, clock: Clock, store: RowStore | None = None, stored_scope: str | None = None
    ) -> None:
        self.read_only: str | None = None
        self._clock = clock
        self._store = store
        self._stored_scope = stored_scope if store is not None else None
        self._rows: RowStore | _SeenRows | None = store
        self._newest_mark: Callable[[], _Mark | None] = _no_mark
        self._sweep_at = _FEWEST_TO_SWEEP
        # Reentrant: a log handler or finaliser that uses the memory must not hang.
        self._lock = threading.RLock()
        self._sealed: str | None = None
        self._family = object()
        self._owner = object()
        self._parent: Entries | None = None
        self._seen: _Seen | None = None
        self._base: _Maps = HashTrieMap()
        self._state = _State(self._base)

    # Going back

    @reading
    def snapshot(self) -> object:
        """Return a token for the present state. It costs a small object, however many entries."""
        return self.snapshot_here()

    @writing
    def restore(self, token: object) -> None:
        """Go back to the state the token stands for, which may be older or newer."""
        self.restore_here(token)

    def snapshot_here(self) -> object:
        """Like ``snapshot``, of exactly this object, whichever call is under way."""
        with self._lock:
            mark = self._set_mark() if self._writes_store else None
            return _Snapshot(self._state, self._family, self._owner, mark)

    def _set_mark(self) -> _Mark:
        mark = self._newest_mark()
        if mark is None or mark.changed:
            later = _Mark()
            if mark is not None:
                mark.later = later
            self._newest_mark = weakref.ref(later)
            return later
        return mark

    def restore_here(self, token: object) -> None:
        """Like ``restore``, of exactly this object, also when it is sealed or read-only.

        For the runtime, which undoes what a call did after the call has ended. Rows of a store
        that somebody else has changed since are left alone, and logged.
        """
        if not isinstance(token, _Snapshot) or token.family is not self._family:
            raise ValueError(f"the token is not a snapshot of this {type(self).__name__}")
        with self._lock:
            if token.owner is not self._owner:
                self._become(token)
                return
            if token.mark is not None:
                self._put_back(token.mark)
            self._state = token.state

    def _put_back(self, mark: _Mark) -> None:
        """Undo in the store what was done there since the mark."""
        changed = mark.so_far()
        if not changed or self._store is None:
            return
        with self._store.transaction():
            undone: dict[str, str | None] = {}
            for key, (before, after) in changed.items():
                now = self._store.get(key)
                if now in after:
                    undone[key] = before
                elif now != before:
                    _logger.warning("left as it is, somebody else has changed it: %s", key)
            self._put_rows(undone)

    def _become(self, token: _Snapshot) -> None:
        """Take the state of another view, or of what this is a view of: anything may differ."""
        wanted: dict[Place, Entry | None] = {}
        for scope in {*self._state.maps, *token.state.maps}:
            self._note_scope(scope)
            mine = self._state.maps.get(scope, _NO_ENTRIES)
            theirs = token.state.maps.get(scope, _NO_ENTRIES)
            for key in {*mine, *theirs}:
                wanted[scope, key] = self._find(token.state.maps, scope, key)
        if token.mark is not None and self._stored_scope is not None:
            for key, (before, _) in token.mark.so_far().items():
                wanted[self._stored_scope, key] = _entry(before)
        for place in wanted:
            self._note(place)
        self._assign(lambda: wanted, wanted)

    # Views

    def fork(self: S) -> S:
        """Return a private view: it starts as this is now, and neither sees the other's changes."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.read_only = view._sealed = None
        view._lock = threading.RLock()
        view._owner = object()
        view._parent = self
        view._seen = _Seen()
        view._base = view._state.maps
        view._state = _State(view._base)
        if self._seen is None and self._store is not None:
            view._rows = _SeenRows(self._store)
        return view

    def check_conflicts(self: S, view: S) -> None:
        """Raise MergeConflict if something the view depends on has changed here since the fork."""
        with self._lock, view._lock:
            self._check_merge(view)

    def merge(self: S, view: S) -> None:
        """Bring a view's changes in, all of them or none. A sealed view can be merged.

        Raises:
            MergeConflict: Something the view read or changed has changed here since the fork.
        """
        with self._lock, view._lock:
            if view._state.changes:
                self._check_writable("merge")
            changes = view._state.changes

            def merged() -> Batch:
                self._check_merge(view)
                return {place: self._merged(view, place) for place in changes}

            own = self._state.changes
            self._assign(merged, changes)
            if self._seen is not None and view._seen is not None:
                self._seen.places |= view._seen.places
                self._seen.scopes |= view._seen.scopes
                for place, functions in changes.items():
                    self._note_functions(place, own.get(place), functions)

    def seal(self, reason: str) -> None:
        """Refuse every later change with ``ViewClosed`` and log it; reading still works."""
        with self._lock:
            if self._sealed is None:
                self._sealed = reason

    def _check_merge(self: S, view: S) -> None:
        seen = view._seen
        if view._parent is not self or seen is None:
            name = type(self).__name__
            raise ValueError(f"only a view that was forked from this {name} can be merged")
        changed = {
            "/".join(place) for place in seen.places if view._at_fork(place) != self._now(place)
        }
        changed |= {scope for scope in seen.scopes if not self._is_unchanged(scope, view)}
        if changed:
            names = sorted(changed)
            message = f"Changed by another call in the meantime: {', '.join(names)}"
            raise MergeConflict(message, names)

    def _is_unchanged(self: S, scope: str, view: S) -> bool:
        if (
            scope == self._stored_scope
            and self._seen is None
            and self._rows is not None
            and view._rows is not None
            and self._rows.revision() != view._rows.revision()
        ):
            return False
        base = view._base.get(scope, _NO_ENTRIES)
        now = self._state.maps.get(scope, _NO_ENTRIES)
        return base is now or self._unexpired(base) == self._unexpired(now)

    def _merged(self: S, view: S, place: Place) -> Entry | None:
        """Return what a merge puts at a place that the view has changed."""
        changes = view._state.changes[place]
        entry = self._now(place)
        if not changes or entry == view._at_fork(place):
            return view._now(place)
        for change in changes:
            entry = change(entry)
        return entry

    # One step of an operation each, on exactly this object.

    def _look(self, scope: str, key: str) -> Entry | None:
        """Return the entry at a place, and note that a view depends on it."""
        with self._lock:
            self._note((scope, key))
            return self._now((scope, key))

    def _list(self, scope: str, prefix: str = "") -> list[str]:
        """Return the keys of a scope, sorted, and note that a view depends on all of it."""
        with self._lock:
            self._note_scope(scope)
            own = self._own(scope)
            keys = {key for key in self._alive(own) if key.startswith(prefix)}
            if scope == self._stored_scope and self._rows is not None:
                keys.update(key for key in self._rows.keys(prefix) if key not in own)
            return sorted(keys)

    def _own(self, scope: str) -> HashTrieMap[str, Entry]:
        """Return what is not in the store; of the scope that is, what a view has staged."""
        return self._state.maps.get(scope, _NO_ENTRIES)

    def _set(self, scope: str, key: str, entry: Entry | None) -> None:
        place = (scope, key)
        self._note(place)
        self._assign(lambda: {place: entry}, [place])

    def _update(self, scope: str, key: str, change: Change) -> None:
        """Change an entry by a function that a merge may apply once more, to another entry."""
        place = (scope, key)
        before = self._state.changes.get(place)
        self._assign(lambda: {place: change(self._now(place))}, [place])
        if self._seen is not None:
            self._note_functions(place, before, (change,))

    def _note_functions(
        self, place: Place, before: tuple[Change, ...] | None, more: tuple[Change, ...]
    ) -> None:
        """Note that a place was changed by functions only, if it was."""
        if more and before != ():
            changes = self._state.changes.insert(place, (*(before or ()), *more))
            self._state = self._state._replace(changes=changes)

    def _note(self, place: Place) -> None:
        if self._seen is not None:
            self._seen.places.add(place)
            self._at_fork(place)  # a row that is written unseen must be known as it was, too

    def _note_scope(self, scope: str) -> None:
        if self._seen is not None:
            self._seen.scopes.add(scope)

    def _now(self, place: Place) -> Entry | None:
        return self._find(self._state.maps, *place)

    def _at_fork(self, place: Place) -> Entry | None:
        return self._find(self._base, *place)

    def _find(self, maps: _Maps, scope: str, key: str) -> Entry | None:
        entry = maps.get(scope, _NO_ENTRIES).get(key)
        if entry is None and scope == self._stored_scope and self._rows is not None:
            return _entry(self._rows.get(key))
        return entry if entry is not None and self._is_alive(entry) else None

    def _unexpired(self, entries: HashTrieMap[str, Entry]) -> dict[str, Entry]:
        """Return entries for comparing: what only expired was not changed by anyone."""
        return {k: e for k, e in entries.items() if e.text is None or self._is_alive(e)}

    def _alive(self, entries: HashTrieMap[str, Entry]) -> dict[str, Entry]:
        return {key: entry for key, entry in entries.items() if self._is_alive(entry)}

    def _is_alive(self, entry: Entry) -> bool:
        if entry.expires == math.inf:
            return entry.text is not None
        return entry.expires > self._clock.monotonic()

    @property
    def _writes_store(self) -> bool:
        return self._seen is None and self._store is not None

    def _assign(self, work_out: Callable[[], Batch], places: Iterable[Place]) -> None:
        """Work out what stands at the places and put it there, in one step for all others."""
        store = self._store if self._writes_store else None
        if store is not None and not any(scope == self._stored_scope for scope, _ in places):
            store = None
        with nullcontext() if store is None else store.transaction():
            batch = work_out()
            if store is not None:
                self._put_rows(
                    {
                        key: None if entry is None else entry.text
                        for (scope, key), entry in batch.items()
                        if scope == self._stored_scope
                    }
                )
        maps, changes = self._state
        for (scope, key), entry in batch.items():
            staged = scope == self._stored_scope
            if staged and store is not None:
                continue
            entries = maps.get(scope, _NO_ENTRIES)
            if entry is not None and entry.expires != math.inf:
                entries = self._swept(entries)
            if entry is None and not staged:
                entries = entries.discard(key)
            else:
                entries = entries.insert(key, entry or _DELETED)
            maps = maps.insert(scope, entries)
            if self._seen is not None:
                changes = changes.insert((scope, key), ())
        self._state = _State(maps, changes)

    def _put_rows(self, rows: Mapping[str, str | None]) -> None:
        """Write rows, and note for the snapshots there are what stood there before."""
        if self._store is None:
            return
        mark = self._newest_mark()
        if mark is not None:
            for key, text in rows.items():
                mark.note(key, self._store.get(key), [text])
        self._store.put(rows)

    def _swept(self, entries: HashTrieMap[str, Entry]) -> HashTrieMap[str, Entry]:
        """Return entries without the expired ones, now and then: when there are twice as many."""
        if self._seen is not None or len(entries) < self._sweep_at:
            return entries
        alive = HashTrieMap(self._alive(entries))
        self._sweep_at = max(_FEWEST_TO_SWEEP, 2 * len(alive))
        return alive

    def _check_writable(self, operation: str) -> None:
        if self._sealed is not None:
            _logger.error("Refused %s: %s", operation, self._sealed)
            raise ViewClosed(self._sealed)
        if self.read_only is not None:
            raise ReadOnlyView(self.read_only)


def _no_mark() -> None:
    return None


def _entry(text: str | None) -> Entry | None:
    return None if text is None else Entry(text)
