"""What an agent remembers, what its sessions may do, and who is told about it.

``MemoryManager``, ``Permissions`` and ``EventBus`` are ordinary resources: what a call does to them
is committed with the call and gone when it fails.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar
from weakref import ref

from rpds import HashTrieMap

from weakincentives.call import current_view
from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import MergeConflict
from weakincentives.logs import get_logger
from weakincentives.participant import Participant
from weakincentives.runtime.rows import RowStore, fold, search_text
from weakincentives.runtime.session import Session, Snapshot
from weakincentives.serde.exact import freeze, thaw
from weakincentives.slices import EMPTY, Slice

if TYPE_CHECKING:
    from datetime import timedelta

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="_InSession")

_WORKING, _SHORT_TERM, _LONG_TERM = "working", "short-term", "long-term"
_SCOPES = (_WORKING, _SHORT_TERM, _LONG_TERM)
_FEWEST_TO_SWEEP = 64

_logger = get_logger(__name__)


class _Entry(NamedTuple):
    """What a key holds."""

    text: str | None
    """None says that a view has deleted what the file holds."""
    expires: float = math.inf
    """On the clock's ``monotonic``."""

    def is_there(self, clock: Clock) -> bool:
        """Whether it has neither been deleted nor expired."""
        if self.expires == math.inf:
            return self.text is not None
        return self.expires > clock.monotonic()


# Keys of rpds maps are strings: it takes the NotImplemented of an ``__eq__`` for an answer, and
# panics.
_Scope: TypeAlias = "HashTrieMap[str, _Entry]"
_Maps: TypeAlias = "HashTrieMap[str, _Scope]"
_NO_ENTRIES: _Scope = HashTrieMap()
_NO_MAPS: _Maps = HashTrieMap()
_DELETED = _Entry(None)
_NO_FILE = nullcontext()


def _entry(text: str | None) -> _Entry | None:
    return None if text is None else _Entry(text)


def _maps(values: Slice[Any]) -> _Maps:
    """Return all entries, by scope and key: the one value of the slice that holds them."""
    return values.latest() or _NO_MAPS


class _SeenRows:
    """A file as one call sees it: what the call has looked at stays as it was."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._found: dict[str, str | None] = {}
        self._revision: int | None = None
        self._peeked_at: int | None = None
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        """Return a row that the call depends on from now on."""
        with self._lock:
            if key not in self._found:
                self._found[key] = self._store.get(key)
            return self._found[key]

    def peek(self, key: str) -> str | None:
        """Return a row for a change that can be applied again to another one."""
        with self._lock:
            if self._peeked_at is None:
                self._peeked_at = self._store.revision()
            return self._found[key] if key in self._found else self._store.get(key)

    def note_all(self) -> None:
        """Depend on the whole file: what changes from now on is a conflict."""
        with self._lock:
            if self._revision is None:
                self._revision = self._store.revision()

    def keys(self, prefix: str) -> list[str]:
        self.note_all()
        return self._store.keys(prefix)

    def search(self, words: tuple[str, ...]) -> list[str]:
        self.note_all()
        return self._store.search(words)

    def check(self) -> bool:
        """Raise MergeConflict if a row the call depends on has changed.

        Returns whether others may have changed: what was peeked at must be looked up again.
        """
        now = self._store.revision()
        changed = [
            f"{_LONG_TERM}/{key}" for key, was in self._found.items() if self._store.get(key) != was
        ]
        if self._revision not in (None, now):
            changed.append(_LONG_TERM)
        if changed:
            names = sorted(changed)
            message = f"Changed by another call in the meantime: {', '.join(names)}"
            raise MergeConflict(message, names)
        return self._peeked_at not in (None, now)


class _Written:
    """A point in the writes to a file. Each points to the next, so only snapshots keep them."""

    __slots__ = ("__weakref__", "next", "rows")

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str | None, str | None]] = {}
        """What stood in the rows that were written here, and what was written."""
        self.next: _Written | None = None

    def since(self) -> dict[str, tuple[str | None, set[str | None]]]:
        """Return, by key, what the row was at this point and all that it was made since."""
        found: dict[str, tuple[str | None, set[str | None]]] = {}
        here: _Written | None = self
        while here is not None:
            for key, (before, after) in here.rows.items():
                found.setdefault(key, (before, set()))[1].add(after)
            here = here.next
        return found


class _Token(NamedTuple):
    """A snapshot of something that is kept in a session of its own."""

    session: Snapshot
    written: _Written | None


def _reading(operation: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run the operation on the view that the call under way works on, with its lock held."""

    @functools.wraps(operation)
    def on_current_view(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        view = current_view(self)
        with view.lock:
            return operation(view, *args, **kwargs)

    return on_current_view


def _writing(operation: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Like ``_reading``, if the view may be changed.

    The check and the change are under one lock: once ``seal`` has returned, nothing slips through.
    """

    @functools.wraps(operation)
    def on_current_view(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        view = current_view(self)
        with view.lock:
            view.check_writable(operation.__name__)
            return operation(view, *args, **kwargs)

    return on_current_view


class _InSession(Participant):
    """Takes part in transactions by keeping its state in a session of its own."""

    _parent: _InSession | None = None

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._session = Session(clock=clock)
        self._lock = self._session.lock

    @property
    def lock(self) -> Any:
        """Held while something is changed; re-entrant."""
        return self._lock

    @_reading
    def snapshot(self) -> object:
        """Return a token for the present state. It costs a small object, however much there is."""
        return self.snapshot_here()

    @_writing
    def restore(self, token: object) -> None:
        """Go back to the state the token stands for, which may be older or newer."""
        self.restore_here(token)

    def snapshot_here(self) -> object:
        """Like ``snapshot``, of exactly this object, whichever call is under way."""
        with self._lock:
            return _Token(self._session.snapshot_here(), self._point())

    def _point(self) -> _Written | None:
        """Return where in the writes to a file this is, if it writes to one."""
        return None

    def restore_here(self, token: object) -> None:
        """Like ``restore``, of exactly this object, also when it is sealed or read-only."""
        self._session.go_to(self._checked(token).session)

    def _checked(self, token: object) -> _Token:
        if not isinstance(token, _Token) or not self._session.shares_slices_with(token.session):
            raise ValueError(f"the token is not a snapshot of this {type(self).__name__}")
        return token

    def fork(self) -> Self:
        """Return a private view: it starts as this is now, and neither sees the other's changes."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.read_only = view._sealed = None
        view._session = self._session.fork()
        view._lock = view._session.lock
        view._parent = self
        return view

    def check_conflicts(self, view: Self) -> None:
        """Raise MergeConflict if something the view depends on has changed here since the fork."""
        with self._lock, view._lock:
            self._session.check_conflicts(view._session, replay=self._must_replay(view))

    def merge(self, view: Self) -> None:
        """Bring a view's changes in, all of them or none. A sealed view can be merged.

        Raises:
            MergeConflict: Something the view read or changed has changed here since the fork.
        """
        with self._lock, view._lock:
            replay = self._must_replay(view)
            if not self.is_writable and view._session.has_changes:
                self.check_writable("merge")
            self._session.settle(view._session, keep=True, replay=replay)

    def _must_replay(self, view: _InSession) -> bool:
        """Whether a view's changes depend on something outside the session that has changed."""
        if view._parent is not self:
            name = type(self).__name__
            raise ValueError(f"only a view that was forked from this {name} can be merged")
        return False


class _Entries(_InSession):
    """Entries by scope and key.

    One scope may be in a file instead. A view then stages its changes to that scope in its
    session, and the outermost merge writes them to the file in one step.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, store: RowStore | None = None) -> None:
        super().__init__(clock)
        self._clock = clock
        self._store = store
        self._rows: RowStore | _SeenRows | None = store
        self._written: Callable[[], _Written | None] = lambda: None
        """The point that a snapshot was taken at last, if one is still there."""
        self._sweep_at = _FEWEST_TO_SWEEP

    def restore_here(self, token: object) -> None:
        """Like ``restore``, of exactly this object, also when it is sealed or read-only.

        Rows of a file that somebody else has changed since are left alone, and logged.
        """
        point = self._checked(token).written
        with self._lock:
            written = {} if point is None else point.since()
            # The token of a view may hold staged changes.
            with self._written_through(point is None or bool(written)):
                super().restore_here(token)
                if self._parent is None:
                    self._put_back(written)
                elif isinstance(self._rows, _SeenRows) and point is not None:
                    self._rows.note_all()
                    for key, (before, _) in written.items():
                        self._set(_LONG_TERM, [key], _entry(before))

    def _point(self) -> _Written | None:
        if self._store is None or self._parent is not None:
            return None
        here = self._written() or _Written()
        self._written = ref(here)
        return here

    def _put_back(self, written: Mapping[str, tuple[str | None, set[str | None]]]) -> None:
        """Undo what was written to the file."""
        if self._store is None or not written:
            return
        undone: dict[str, str | None] = {}
        for key, (before, after) in written.items():
            now = self._store.get(key)
            if now in after:
                undone[key] = before
            elif now != before:
                _logger.warning("left as it is, somebody else has changed it: %s", key)
        self._put_rows(undone)

    def fork(self) -> Self:
        view = super().fork()
        if self._parent is None and self._store is not None:
            view._rows = _SeenRows(self._store)
        return view

    def merge(self, view: Any) -> None:
        if self._parent is not None:
            super().merge(view)
            return
        stages = self._store is not None and bool(view._own(_LONG_TERM))
        with self._lock, self._written_through(stages):
            super().merge(view)
            self._sweep()

    def _must_replay(self, view: _InSession) -> bool:
        super()._must_replay(view)
        rows = view._rows if isinstance(view, _Entries) else None
        return self._parent is None and isinstance(rows, _SeenRows) and rows.check()

    # One step of an operation each, on exactly this object.

    def _look(self, scope: str, key: str) -> _Entry | None:
        """Return the entry at a key; a view depends on it from now on."""

        def at_key(values: Slice[Any]) -> _Entry | None:
            return _maps(values).get(scope, _NO_ENTRIES).get(key)

        entry = self._session.select_here(_Entry, at_key, f"{scope}/{key}")
        rows = self._rows_of(scope)
        if entry is None and rows is not None:
            return _entry(rows.get(key))
        return entry if entry is not None and entry.is_there(self._clock) else None

    def _list(self, scope: str, prefix: str = "") -> list[str]:
        """Return the keys of a scope, sorted; a view depends on the whole scope from now on."""
        own, rows = self._look_at_all(scope), self._rows_of(scope)
        keys = {k for k, e in own.items() if k.startswith(prefix) and e.is_there(self._clock)}
        if rows is not None:
            keys.update(key for key in rows.keys(prefix) if key not in own)
        return sorted(keys)

    def _look_at_all(self, scope: str) -> Mapping[str, _Entry]:
        """Return what is not in the file; of the scope that is, what a view has staged."""

        def in_scope(values: Slice[Any]) -> _Scope:
            return _maps(values).get(scope, _NO_ENTRIES)

        return self._session.select_here(_Entry, in_scope, scope)

    def _set(self, scope: str, keys: Iterable[str], entry: _Entry | None) -> None:
        """Make keys hold an entry, whatever they hold; a view depends on what that was."""
        keys = tuple(keys)
        if self._parent is not None:
            for key in keys:
                self._look(scope, key)
        self._update(scope, keys, lambda _: entry, reads=False)

    def _update(
        self,
        scope: str,
        keys: Iterable[str],
        change: Callable[[_Entry | None], _Entry | None],
        *,
        reads: bool = True,
    ) -> None:
        """Change entries by a function that a merge may apply once more, to other entries."""
        rows = self._rows_of(scope)

        def updated(values: Slice[Any]) -> Slice[Any]:
            maps = _maps(values)
            entries = maps.get(scope, _NO_ENTRIES)
            for key in keys:
                before = entries.get(key)
                if before is None and rows is not None and reads:
                    before = _entry(rows.peek(key))
                if before is not None and not before.is_there(self._clock):
                    before = None
                after = change(before)
                if after is None and rows is None:
                    entries = entries.discard(key)
                else:
                    entries = entries.insert(key, after or _DELETED)
            return values.replace(maps.insert(scope, entries))

        with self._written_through(rows is not None):
            self._session.change_here(_Entry, updated)
            if self._parent is None:
                self._sweep()

    def _rows_of(self, scope: str) -> RowStore | _SeenRows | None:
        """Return where a scope is kept, if that is a file."""
        return self._rows if scope == _LONG_TERM else None

    def _own(self, scope: str) -> _Scope:
        return _maps(self._session.slice_here(_Entry)).get(scope, _NO_ENTRIES)

    def _written_through(self, needed: bool) -> AbstractContextManager[None]:
        """Write what the block stages to the file, in one step with it; only views stage."""
        if self._store is None or self._parent is not None or not needed:
            return _NO_FILE
        return self._file_transaction(self._store)

    @contextmanager
    def _file_transaction(self, store: RowStore) -> Generator[None]:
        before = self._session.snapshot_here()
        try:
            with store.transaction():
                yield
                staged = self._own(_LONG_TERM)
                if staged:
                    self._put_rows({key: entry.text for key, entry in staged.items()})
                    self._change_maps(lambda maps: maps.discard(_LONG_TERM))
        except BaseException:  # the file and the slice change together
            self._session.go_to(before)
            raise

    def _change_maps(self, change: Callable[[_Maps], _Maps]) -> None:
        def changed(values: Slice[Any]) -> Slice[Any]:
            return values.replace(change(_maps(values)))

        self._session.change_here(_Entry, changed)

    def _put_rows(self, rows: Mapping[str, str | None]) -> None:
        """Write rows, and note for snapshots what stood there before."""
        if self._store is None:
            return
        here = self._written()
        if here is not None:
            here.rows = {key: (self._store.get(key), text) for key, text in rows.items()}
            here.next = _Written()
            self._written = ref(here.next)
        self._store.put(rows)

    def _sweep(self) -> None:
        """Drop expired entries when there are twice as many entries as after the last time."""
        entries = self._own(_SHORT_TERM)
        if len(entries) >= self._sweep_at:
            current = {k: entry for k, entry in entries.items() if entry.is_there(self._clock)}
            self._sweep_at = max(_FEWEST_TO_SWEEP, 2 * len(current))
            self._change_maps(lambda maps: maps.insert(_SHORT_TERM, HashTrieMap(current)))


@dataclass(frozen=True, slots=True)
class MemoryMatch:
    """Something that a search found."""

    scope: str
    key: str
    value: Any


class MemoryManager(_Entries):
    """Values by scope and key.

    >>> memory = MemoryManager()
    >>> memory.write("working", "steps", ["read"])
    >>> memory.update("working", "steps", lambda steps: [*steps, "write"])
    >>> memory.read("working", "steps")
    ['read', 'write']

    ============  ====================================================================
    scope         lives
    ============  ====================================================================
    working       until ``end_loop()``
    short-term    until its time is up
    long-term     for ever: in the file at ``path``, or else as long as the manager does
    ============  ====================================================================

    A value is plain data, an enum or a dataclass, nested as one likes. It comes back exactly as it
    was, and as a copy: changing what was read changes nothing here.

    Args:
        path: An SQLite file for the long-term scope, made if missing. Several threads and
            processes may share it.
        short_term_ttl: Seconds after which a short-term entry is gone, unless its write says
            otherwise.
        types: Dataclasses and enums that values are made of, where their module may not have been
            imported when they are read.
        index: Whether the file keeps an index for ``search``, where SQLite can.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        short_term_ttl: float | timedelta = 3600.0,
        types: Iterable[type[Any]] = (),
        index: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._ttl = _seconds("short_term_ttl", short_term_ttl)
        self._types = tuple(types)
        store = None if path is None else RowStore(path, index=index)
        super().__init__(clock=clock, store=store)

    # Reading

    @_reading
    def read(self, scope: str, key: str, default: Any = None) -> Any:
        """Return the value at a key, or ``default``."""
        entry = self._look(_scope(scope), _key(key))
        return default if entry is None else self._value(entry)

    @_reading
    def keys(self, scope: str, prefix: str = "") -> tuple[str, ...]:
        """Return the keys of a scope that begin with ``prefix``, sorted."""
        return tuple(self._list(_scope(scope), prefix))

    @_reading
    def search(
        self, query: str, *, scope: str | None = None, limit: int | None = 20
    ) -> tuple[MemoryMatch, ...]:
        """Return what holds every word of the query, in its key or in the text of its value.

        A word is found inside longer ones, and in any case. Entries whose key holds all of the
        words come first; then by key, and at one key working before short-term before long-term.
        """
        words = tuple(fold(query).split())
        if not words:
            raise ValueError("the query has no words: say what to look for")
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, or None for all, got {limit}")
        scopes = _SCOPES if scope is None else (_scope(scope),)
        found = [(key, each) for each in scopes for key in self._holding(each, words)]
        found.sort(key=lambda at: (not _holds(fold(at[0]), words), at[0], _SCOPES.index(at[1])))
        entries = ((key, each, self._look(each, key)) for key, each in found[:limit])
        return tuple(
            MemoryMatch(each, key, self._value(entry))
            for key, each, entry in entries
            if entry is not None
        )

    # Writing

    @_writing
    def write(
        self, scope: str, key: str, value: Any, *, ttl: float | timedelta | None = None
    ) -> None:
        """Make a key hold a value. ``ttl`` says for how many seconds, in the short-term scope."""
        scope = _scope(scope)
        expires = self._expiry(scope, ttl)
        self._set(scope, [_key(key)], _Entry(_text(value), expires))

    @_writing
    def update(
        self,
        scope: str,
        key: str,
        change: Callable[[Any], Any],
        *,
        default: Any = None,
        ttl: float | timedelta | None = None,
    ) -> None:
        """Make a key hold what ``change`` returns for its value, or for ``default``.

        Calls that run together may update one key, and no update is lost: when another was first,
        ``change`` is applied once more, to what that one left. So it must be quick and do nothing
        but return a value. An entry keeps the time at which it expires, unless ``ttl`` is given.
        """
        scope, key = _scope(scope), _key(key)
        expires = self._expiry(scope, ttl)

        def changed(entry: _Entry | None) -> _Entry:
            value = default if entry is None else self._value(entry)
            kept = expires if entry is None or ttl is not None else entry.expires
            return _Entry(_text(change(value)), kept)

        self._update(scope, [key], changed)

    @_writing
    def delete(self, scope: str, key: str) -> bool:
        """Forget a key; returns whether there was anything."""
        scope, key = _scope(scope), _key(key)
        if self._look(scope, key) is None:
            return False
        self._set(scope, [key], None)
        return True

    @_writing
    def clear(self, scope: str) -> None:
        """Forget everything in a scope."""
        scope = _scope(scope)
        self._set(scope, self._list(scope), None)

    @_writing
    def end_loop(self) -> None:
        """Forget the working scope: the loop that it was for has ended."""
        self.clear(_WORKING)

    def close(self) -> None:
        """Let go of the file. What is in it stays."""
        if self._store is not None:
            self._store.close()

    # Steps

    def _value(self, entry: _Entry) -> Any:
        return thaw(json.loads(entry.text or "null"), types=self._types)

    def _expiry(self, scope: str, ttl: float | timedelta | None) -> float:
        if scope == _SHORT_TERM:
            seconds = self._ttl if ttl is None else _seconds("ttl", ttl)
            return self._clock.monotonic() + seconds
        if ttl is not None:
            raise ValueError(f"only short-term entries expire: leave ttl out for {scope!r}")
        return math.inf

    def _holding(self, scope: str, words: tuple[str, ...]) -> Iterator[str]:
        """Yield the keys of the entries in a scope that hold every word, in no order."""
        own, rows = self._look_at_all(scope), self._rows_of(scope)
        for key, entry in own.items():
            if entry.is_there(self._clock) and _holds(
                search_text(key, entry.text or "null"), words
            ):
                yield key
        if rows is not None:
            yield from (key for key in rows.search(words) if key not in own)


def _scope(scope: str) -> str:
    found = scope.replace("_", "-") if isinstance(scope, str) else scope  # pyright: ignore[reportUnnecessaryIsInstance]  # may come from a model
    if found not in _SCOPES:
        raise ValueError(f"unknown memory scope {scope!r}: use {', '.join(map(repr, _SCOPES))}")
    return found


def _key(key: str) -> str:
    if not isinstance(key, str) or not key:  # pyright: ignore[reportUnnecessaryIsInstance]  # may come from a model
        raise ValueError(f"a memory key is a string that is not empty, got {key!r}")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a memory key must be valid Unicode, got {key!r}") from None
    return key


def _text(value: object) -> str:
    return json.dumps(freeze(value), separators=(",", ":"))


def _seconds(name: str, value: float | timedelta) -> float:
    seconds: float = value if isinstance(value, (int, float)) else value.total_seconds()
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} is in seconds: more than 0 and finite, got {value!r}")
    return seconds


def _holds(text: str, words: tuple[str, ...]) -> bool:
    return all(word in text for word in words)


class Permissions(_Entries):
    """What each session may do.

    A permission is a name like ``file:write``. ``file:*`` covers all that begin with ``file:``, and
    ``*`` covers everything. What is granted to the session ``"*"`` every session has.

    >>> permissions = Permissions()
    >>> permissions.grant("file:*", session="s1")
    >>> permissions.has("s1", "file:write"), permissions.has("s2", "file:write")
    (True, False)
    """

    @_writing
    def grant(self, permission: str, *, session: Session | str) -> None:
        """Let a session do what the permission covers."""
        self._set(_session_id(session), [_permission(permission)], _Entry(""))

    @_writing
    def revoke(self, permission: str, *, session: Session | str) -> bool:
        """Take back a permission and every narrower one; returns whether there was any.

        A broader one stays, and so does what it covers: see ``granted``.
        """
        owner, permission = _session_id(session), _permission(permission)
        revoked = [p for p in self._list(owner) if permission in (p, *_covering(p))]
        self._set(owner, revoked, None)
        return bool(revoked)

    @_reading
    def has(self, session: Session | str, permission: str) -> bool:
        """Tell whether a session may do what the permission names."""
        owner, permission = _session_id(session), _permission(permission)
        wanted = (permission, *_covering(permission))
        return any(
            self._look(each, name) is not None for each in (owner, _EVERYONE) for name in wanted
        )

    @_reading
    def granted(self, session: Session | str) -> tuple[str, ...]:
        """Return what was granted to a session, and to all sessions, sorted."""
        owner = _session_id(session)
        return tuple(sorted({*self._list(owner), *self._list(_EVERYONE)}))


_EVERYONE = "*"
_PERMISSION = re.compile(r"\*|[^:*]+(:[^:*]+)*(:\*)?")


def _session_id(session: Session | str) -> str:
    found = session if isinstance(session, str) else session.session_id
    if not found:
        raise ValueError("a session, or the id of one, is needed; '*' stands for every session")
    return found


def _permission(permission: str) -> str:
    if not isinstance(permission, str) or not _PERMISSION.fullmatch(permission):  # pyright: ignore[reportUnnecessaryIsInstance]  # may come from a model
        raise ValueError(
            f"expected a name like 'file:write', or a wildcard like 'file:*' or '*', "
            f"got {permission!r}"
        )
    return permission


def _covering(permission: str) -> tuple[str, ...]:
    """Return the wildcards that cover a permission, the narrowest first."""
    parts = permission.split(":")
    return tuple(":".join([*parts[:n], "*"]) for n in range(len(parts) - 1, -1, -1))


class _Emitted:
    """Something to tell; told once."""

    __slots__ = ("event", "payload", "told")

    def __init__(self, event: str, payload: object) -> None:
        self.event = event
        self.payload = payload
        self.told = False


Subscriber: TypeAlias = Callable[[str, Any], object]


class EventBus(_InSession):
    """Tells subscribers what happened, by name.

    Outside a call it tells at once. What a call emits leaves when the call has been committed; a
    call that was rolled back emits nothing. ``api:*`` subscribes to all names that begin with
    ``api:``, and ``*`` to all.

    >>> bus = EventBus()
    >>> unsubscribe = bus.subscribe("file:*", lambda event, payload: print(event, payload))
    >>> bus.emit("file:changed", {"path": "a.txt"})
    file:changed {'path': 'a.txt'}
    """

    def __init__(self) -> None:
        super().__init__()
        # Shared by all views.
        self._subscriptions: dict[object, tuple[str, Subscriber]] = {}

    def subscribe(self, pattern: str, callback: Subscriber) -> Callable[[], None]:
        """Call ``callback(event, payload)`` for events that match; returns how to stop.

        One that raises is logged, and does not keep others from hearing of the event.
        """
        if inspect.iscoroutinefunction(callback):
            raise TypeError("a subscriber must not be async: nobody would await it")
        subscriptions, key = self._subscriptions, object()
        subscriptions[key] = (_permission(pattern), callback)

        def stop() -> None:
            subscriptions.pop(key, None)

        return stop

    def emit(self, event: str, payload: object = None) -> None:
        """Tell all who subscribed; in a call, once it has been committed."""
        if not isinstance(event, str) or "*" in event or not event:  # pyright: ignore[reportUnnecessaryIsInstance]  # may come from a model
            raise ValueError(f"an event has a name like 'file:changed', got {event!r}")
        bus, emitted = current_view(self), _Emitted(event, payload)
        with bus._lock:  # once `seal` has returned, nothing slips through
            bus.check_open(f"to emit {event}")
            if bus._parent is not None:
                bus._session.change_here(_Emitted, lambda waiting: waiting.append(emitted))
                return
        bus._tell(emitted)

    def after_commit(self) -> None:
        """Tell what calls have emitted and committed, in that order.

        For the runtime, once a call is over. A view tells nobody: its call may still fail.
        """
        if self._parent is not None:
            return
        with self._lock:
            due = [each for each in self._session.slice_here(_Emitted) if not each.told]
            self._session.change_here(_Emitted, lambda _: EMPTY)
            for each in due:
                each.told = True  # a restore may bring it back to those that wait
        for each in due:
            self._tell(each)

    def _tell(self, emitted: _Emitted) -> None:
        patterns = {emitted.event, *_covering(emitted.event)}
        for pattern, callback in tuple(self._subscriptions.values()):
            if pattern in patterns:
                try:
                    callback(emitted.event, emitted.payload)
                except Exception:
                    _logger.exception("subscriber %r failed on %s", callback, emitted.event)
