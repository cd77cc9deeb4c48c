"""Memory, permissions and the event bus.

All three are ordinary resources: a call's changes to them are committed or rolled back with the
call. Each keeps its state in a session of its own, whose views, conflicts and snapshots it uses.
"""

# A participant and the session it keeps its state in are one mechanism:
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    cast,
)

from rpds import HashTrieMap

from weakincentives.core.call import current_view
from weakincentives.core.clock import SYSTEM_CLOCK, Clock
from weakincentives.core.logs import get_logger
from weakincentives.serde.exact import freeze, thaw
from weakincentives.session.participant import Participant
from weakincentives.session.rows import RowStore
from weakincentives.session.session import Session, Snapshot
from weakincentives.session.slices import EMPTY, Slice

if TYPE_CHECKING:
    from datetime import timedelta

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="_InSession")

_WORKING, _SHORT_TERM, _LONG_TERM = "working", "short-term", "long-term"
_SCOPES = (_WORKING, _SHORT_TERM, _LONG_TERM)
_FEWEST_TO_SWEEP = 64

_logger = get_logger(__name__)


def _reading(operation: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run the operation on the current call's view, with the view's lock held."""

    @functools.wraps(operation)
    def on_current_view(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        view = current_view(self)
        with view._lock:
            return operation(view, *args, **kwargs)

    return on_current_view


def _writing(operation: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Like ``_reading``, but refuse if the view is closed or read-only.

    The check holds the same lock as the change: after ``seal``, nothing can still be written.
    """

    def checked(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        self.check_writable(operation.__name__)
        return operation(self, *args, **kwargs)

    return _reading(functools.wraps(operation)(checked))


class _InSession(Participant):
    """Takes part in transactions by keeping its state in a session of its own."""

    _parent: _InSession | None = None

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._session = Session(clock=clock)
        self._lock = self._session._lock

    @_reading
    def snapshot(self) -> object:
        """Return a token for the present state. It costs a small object, whatever the size."""
        return self.snapshot_here()

    @_writing
    def restore(self, token: object) -> None:
        """Go to a token's state, older or newer than the present one."""
        self.restore_here(token)

    def snapshot_here(self) -> object:
        return self._session.snapshot_here()

    def restore_here(self, token: Any) -> None:
        if not isinstance(token, Snapshot) or not self._session.took(token):
            raise ValueError(f"the token is not a snapshot of this {type(self).__name__}")
        self._session.go_to(token)

    def fork(self) -> Self:
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.read_only = view._sealed = None
        view._session = self._session.fork()
        view._lock = view._session._lock
        view._parent = self
        return view

    def check_conflicts(self, view: Self) -> None:
        self._check_forked_here(view)
        with self._lock, view._lock:
            self._session.check_conflicts(view._session)

    def merge(self, view: Self) -> None:
        self._check_forked_here(view)
        with self._lock, view._lock:
            if not self.is_writable and view._session.has_changes:
                self.check_writable("merge")
            self._session.settle(view._session, keep=True)

    def _check_forked_here(self, view: _InSession) -> None:
        if view._parent is not self:
            name = type(self).__name__
            raise ValueError(f"only a view that was forked from this {name} can be merged")


class _Entry(NamedTuple):
    """The value of a key."""

    text: str
    expires: float = math.inf
    """On the clock's ``monotonic``."""

    def is_live(self, clock: Clock) -> bool:
        return self.expires == math.inf or self.expires > clock.monotonic()


# Keys of rpds maps are strings: a key whose ``__eq__`` returns NotImplemented makes rpds panic.
_Scope: TypeAlias = "HashTrieMap[str, _Entry]"
_Maps: TypeAlias = "HashTrieMap[str, _Scope]"
_NO_ENTRIES: _Scope = HashTrieMap()
_NO_MAPS: _Maps = HashTrieMap()


def _maps(values: Slice[Any]) -> _Maps:
    """Return all entries by scope and key: the only value of their slice."""
    return values.latest() or _NO_MAPS


class _Entries(_InSession):
    """Entries by scope and key."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(clock)
        self._clock = clock

    def _look(self, scope: str, key: str) -> _Entry | None:
        """Return the entry at a key and add it to the read set."""

        def at_key(values: Slice[Any]) -> _Entry | None:
            return _maps(values).get(scope, _NO_ENTRIES).get(key)

        self._refresh(scope)
        entry = self._session.select_here(_Entry, at_key, f"{scope}/{key}")
        return entry if entry is not None and entry.is_live(self._clock) else None

    def _look_at_all(self, scope: str) -> _Scope:
        """Return the entries of a scope, expired ones too, and add the scope to the read set."""

        def in_scope(values: Slice[Any]) -> _Scope:
            return _maps(values).get(scope, _NO_ENTRIES)

        self._refresh(scope)
        return self._session.select_here(_Entry, in_scope, scope)

    def _refresh(self, scope: str) -> None:
        """Bring in changes to a scope from outside this process."""

    def _list(self, scope: str, prefix: str = "") -> list[str]:
        """Return the keys of a scope, sorted."""
        entries = self._look_at_all(scope).items()
        return sorted(k for k, e in entries if k.startswith(prefix) and e.is_live(self._clock))

    def _set(self, scope: str, keys: Collection[str], entry: _Entry | None) -> None:
        """Set keys to an entry, or delete them. A view conflicts if one has changed meanwhile."""
        if self._parent is not None:
            for key in keys:
                self._look(scope, key)
        self._update(scope, keys, lambda _: entry)

    def _update(
        self,
        scope: str,
        keys: Collection[str],
        change: Callable[[_Entry | None], _Entry | None],
    ) -> None:
        """Change entries by a function, which a merge may apply again to newer entries."""

        def updated(maps: _Maps) -> _Maps:
            entries = maps.get(scope, _NO_ENTRIES)
            for key in keys:
                before = entries.get(key)
                after = change(before if before and before.is_live(self._clock) else None)
                entries = entries.discard(key) if after is None else entries.insert(key, after)
            return maps.insert(scope, entries)

        self._change_maps(updated)

    def _change_maps(self, change: Callable[[_Maps], _Maps]) -> None:
        def changed(values: Slice[Any]) -> Slice[Any]:
            return values.replace(change(_maps(values)))

        self._session.change_here(_Entry, changed)

    def _own(self, scope: str) -> _Scope:
        """Return the entries of a scope without adding them to the read set."""
        return _maps(self._session.slice_here(_Entry)).get(scope, _NO_ENTRIES)


_Rows = Mapping[str, _Entry | None]
"""Changed entries by key; None for a deleted one."""


class _Foreign:
    """A change that other processes made to the file, linked to the next one.

    Links point forward, so a change is freed once no older token or view needs it.
    """

    def __init__(self) -> None:
        self.rows: _Rows = {}
        self.next: _Foreign | None = None

    def until(self, end: _Foreign) -> dict[str, _Entry | None]:
        """Return the changes from here to another point."""
        found: dict[str, _Entry | None] = {}
        here: _Foreign | None = self
        while here is not None and here is not end:
            found.update(here.rows)
            here = here.next
        return found


class _Token(NamedTuple):
    session: Snapshot
    foreign: _Foreign


def _changed(entries: _Scope, rows: _Rows) -> _Scope:
    for key, entry in rows.items():
        if entry is None:
            entries = entries.discard(key)
    set_to = {key: entry for key, entry in rows.items() if entry is not None}
    return entries.update(set_to) if entries else HashTrieMap(set_to)


@dataclass(frozen=True, slots=True)
class MemoryMatch:
    """An entry that a search found."""

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
    short-term    until it expires
    long-term     forever in the file at ``path``; without one, as long as the manager
    ============  ====================================================================

    A value is plain data, an enum or a dataclass, nested in any way. Reading returns an equal copy:
    changing it changes nothing here.

    Args:
        path: An SQLite file for the long-term scope, created if missing. Several threads and
            processes may share it. Its rows are also held in memory.
        short_term_ttl: Seconds after which a short-term entry expires, unless its write says
            otherwise.
        types: Dataclasses and enums that values consist of, if their modules may not have been
            imported when they are read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        short_term_ttl: float | timedelta = 3600.0,
        types: Iterable[type[Any]] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(clock)
        self._ttl = _seconds("short_term_ttl", short_term_ttl)
        self._types = tuple(types)
        self._sweep_at = _FEWEST_TO_SWEEP
        self._store = None if path is None else RowStore(path)
        self._revision: int | None = None
        """Of the file, when its rows were last read or written here."""
        self._foreign = _Foreign()
        self._touched: set[str] = set()
        """The long-term keys that a view may have changed."""
        self._refresh()

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
        """Return the entries that contain every word of the query, in the key or in the value.

        Words match inside longer ones, in any case. Entries whose key contains all words come
        first; then by key, and at one key working before short-term before long-term.
        """
        words = _folded(query).split()
        if not words:
            raise ValueError("the query has no words")
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, or None for all, got {limit}")
        scopes = _SCOPES if scope is None else [_scope(scope)]
        found = [(key, each) for each in scopes for key in self._matching(each, words)]
        found.sort(key=lambda at: (not _contains(_folded(at[0]), words), at[0]))
        matches = ((each, key, self._own(each)[key]) for key, each in found[:limit])
        return tuple(MemoryMatch(each, key, self._value(entry)) for each, key, entry in matches)

    def _matching(self, scope: str, words: Sequence[str]) -> Iterator[str]:
        """Yield the keys of the entries in a scope that contain every word, in any order."""
        entries: Mapping[str, _Entry] = self._look_at_all(scope)
        if scope == _LONG_TERM and self._store is not None:
            rows = self._store.search(words)
            yield from (key for key in rows if key in entries and key not in self._touched)
            entries = {key: entries[key] for key in self._touched if key in entries}
        for key, entry in entries.items():
            if _contains(_search_text(key, entry.text), words) and entry.is_live(self._clock):
                yield key

    # Writing

    @_writing
    def write(
        self, scope: str, key: str, value: Any, *, ttl: float | timedelta | None = None
    ) -> None:
        """Set a key to a value. ``ttl`` is in seconds, for the short-term scope only."""
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
        """Set a key to what ``change`` returns for its value, or for ``default``.

        Concurrent calls may update the same key without losing an update: when another call
        committed first, ``change`` is applied again to the newer value. So it must be quick and
        pure. An entry keeps its expiry time unless ``ttl`` is given.
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
        """Delete a key; returns whether it existed."""
        scope, key = _scope(scope), _key(key)
        if self._look(scope, key) is None:
            return False
        self._set(scope, [key], None)
        return True

    @_writing
    def clear(self, scope: str) -> None:
        """Delete every key of a scope."""
        scope = _scope(scope)
        self._set(scope, self._list(scope), None)

    @_writing
    def end_loop(self) -> None:
        """Clear the working scope, at the end of the loop that it was for."""
        self.clear(_WORKING)

    def close(self) -> None:
        """Close the file."""
        if self._store is not None:
            self._store.close()

    def _value(self, entry: _Entry) -> Any:
        return thaw(json.loads(entry.text), types=self._types)

    def _expiry(self, scope: str, ttl: float | timedelta | None) -> float:
        if scope == _SHORT_TERM:
            seconds = self._ttl if ttl is None else _seconds("ttl", ttl)
            return self._clock.monotonic() + seconds
        if ttl is not None:
            raise ValueError(f"only short-term entries expire: leave ttl out for {scope!r}")
        return math.inf

    # The file. The manager mirrors it in its session; a view changes only its session.

    def _refresh(self, scope: str = _LONG_TERM) -> None:
        if scope != _LONG_TERM or self._store is None or self._parent is not None:
            return
        revision = self._store.revision()
        if revision == self._revision:
            return
        before = self._own(_LONG_TERM)
        rows = None if self._revision is None else self._store.changed_since(self._revision)
        if rows is None:
            rows = {**dict.fromkeys(before), **self._store.load()}
        foreign = {
            key: None if text is None else _Entry(text)
            for key, text in rows.items()
            if text != ((known := before.get(key)) and known.text)
        }
        self._change_maps(lambda maps: maps.insert(_LONG_TERM, _changed(before, foreign)))
        self._foreign.rows, self._foreign.next = foreign, _Foreign()
        self._foreign, self._revision = self._foreign.next, revision

    @contextmanager
    def _writing_rows(self, keys: Collection[str] | None) -> Generator[None]:
        """Write what the block does to long-term keys to the file; None stands for any key."""
        if self._store is None:
            yield
            return
        if self._parent is not None:
            self._touched.update(keys or ())
            yield
            return
        before = self._session.snapshot_here()
        try:
            with nullcontext() if keys == set() else self._store.transaction():
                self._refresh()
                old = self._own(_LONG_TERM)
                yield
                new = self._own(_LONG_TERM)
                keys = {*old, *new} if keys is None else keys
                rows = {key: new.get(key) for key in keys if new.get(key) != old.get(key)}
                if rows:
                    self._revision = self._store.put(
                        {k: e and (e.text, _search_text(k, e.text)) for k, e in rows.items()}
                    )
        except BaseException:  # the file and the session change together
            self._session.go_to(before)
            self._revision = None
            raise

    def _update(
        self,
        scope: str,
        keys: Collection[str],
        change: Callable[[_Entry | None], _Entry | None],
    ) -> None:
        if scope == _LONG_TERM:
            with self._writing_rows(keys):
                super()._update(scope, keys, change)
        else:
            super()._update(scope, keys, change)
            self._sweep()

    def fork(self) -> Self:
        with self._lock:
            self._refresh()
            view = super().fork()
        view._touched = {*self._touched}
        return view

    def check_conflicts(self, view: Any) -> None:
        with self._lock:
            self._refresh()
            super().check_conflicts(view)

    def merge(self, view: Any) -> None:
        with self._lock, self._writing_rows(view._touched):
            super().merge(view)
            self._sweep()

    def snapshot_here(self) -> object:
        with self._lock:
            return _Token(self._session.snapshot_here(), self._foreign)

    def restore_here(self, token: Any) -> None:
        """Go to a token's state, but keep what other processes have written to the file since."""
        snapshot, point = token if isinstance(token, _Token) else (None, self._foreign)
        with self._lock, self._writing_rows(None):
            if self._parent is None or self._session.has_savepoint(snapshot):
                super().restore_here(snapshot)
            else:  # the view now depends on, and may change, any row
                self._touched.update(self._look_at_all(_LONG_TERM))
                super().restore_here(snapshot)
                self._touched.update(self._own(_LONG_TERM))
            foreign = point.until(self._foreign)
            if foreign:
                _logger.warning("kept what another process has written: %s", ", ".join(foreign))
                restored = _changed(self._own(_LONG_TERM), foreign)
                self._change_maps(lambda maps: maps.insert(_LONG_TERM, restored))

    def _sweep(self) -> None:
        """Drop expired entries once the number of entries has doubled."""
        entries = self._own(_SHORT_TERM)
        if self._parent is None and len(entries) >= self._sweep_at:
            live = {key: entry for key, entry in entries.items() if entry.is_live(self._clock)}
            self._sweep_at = max(_FEWEST_TO_SWEEP, 2 * len(live))
            self._change_maps(lambda maps: maps.insert(_SHORT_TERM, HashTrieMap(live)))


def _scope(scope: str) -> str:
    found = str(scope).replace("_", "-")
    if found not in _SCOPES:
        raise ValueError(f"unknown memory scope {scope!r}: use {', '.join(map(repr, _SCOPES))}")
    return found


def _key(key: str) -> str:
    if not isinstance(key, str) or not key:  # pyright: ignore[reportUnnecessaryIsInstance]  # may come from a model
        raise ValueError(f"a memory key is a non-empty string, got {key!r}")
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


def _contains(text: str, words: Iterable[str]) -> bool:
    return all(word in text for word in words)


def _search_text(key: str, text: str) -> str:
    """Return the key and all text of a value, folded."""
    return _folded("\n".join([key, *_texts(json.loads(text))]))


def _folded(text: str) -> str:
    """Return text in the form that is compared: without case."""
    plain = text.casefold().replace("\0", "\ufffd")
    return plain.encode("utf-8", "replace").decode()  # SQLite takes no lone surrogates


def _texts(data: object) -> Iterator[str]:
    """Yield the texts, numbers and names in frozen data."""
    if isinstance(data, list):
        for item in cast("list[object]", data):
            yield from _texts(item)
    elif isinstance(data, dict):
        fields = cast("dict[str, object]", data)
        tagged = "$" in fields
        for name, item in fields.items():
            if not (tagged and name in ("$", "type", "base64")):
                if not tagged:
                    yield name
                yield from _texts(item)
    elif isinstance(data, (str, int, float)):
        yield str(data)


class Permissions(_Entries):
    """What each session may do.

    A permission is a name like ``file:write``. ``file:*`` covers every name that begins with
    ``file:``, and ``*`` covers all. A permission granted to the session ``"*"`` holds for every
    session.

    >>> permissions = Permissions()
    >>> permissions.grant("file:*", session="s1")
    >>> permissions.has("s1", "file:write"), permissions.has("s2", "file:write")
    (True, False)
    """

    @_writing
    def grant(self, permission: str, *, session: Session | str) -> None:
        """Give a permission to a session."""
        self._set(_session_id(session), [_permission(permission)], _Entry(""))

    @_writing
    def revoke(self, permission: str, *, session: Session | str) -> bool:
        """Revoke a permission and every narrower one; returns whether there was any.

        A broader one stays: see ``granted``.
        """
        owner, permission = _session_id(session), _permission(permission)
        revoked = [p for p in self._list(owner) if permission in (p, *_covering(p))]
        self._set(owner, revoked, None)
        return bool(revoked)

    @_reading
    def has(self, session: Session | str, permission: str) -> bool:
        """Return whether a session has a permission."""
        owner, permission = _session_id(session), _permission(permission)
        wanted = (permission, *_covering(permission))
        return any(
            self._look(each, name) is not None for each in (owner, _EVERYONE) for name in wanted
        )

    @_reading
    def granted(self, session: Session | str) -> tuple[str, ...]:
        """Return the permissions of a session, including those of every session, sorted."""
        owner = _session_id(session)
        return tuple(sorted({*self._list(owner), *self._list(_EVERYONE)}))


_EVERYONE = "*"
_PERMISSION = re.compile(r"\*|[^:*]+(:[^:*]+)*(:\*)?")


def _session_id(session: Session | str) -> str:
    found = session if isinstance(session, str) else session.session_id
    if not found:
        raise ValueError("expected a session or its id, or '*' for every session")
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


@dataclass(slots=True, eq=False)
class _Emitted:
    """An event that is published once."""

    event: str
    payload: object
    published: bool = False


Subscriber: TypeAlias = Callable[[str, Any], object]


class EventBus(_InSession):
    """Publishes events by name.

    Outside a call, events are published at once. Events of a call are published when the call
    commits; a call that is rolled back publishes none. ``api:*`` subscribes to all names that begin
    with ``api:``, and ``*`` to all.

    >>> bus = EventBus()
    >>> unsubscribe = bus.subscribe("file:*", lambda event, payload: print(event, payload))
    >>> bus.emit("file:changed", {"path": "a.txt"})
    file:changed {'path': 'a.txt'}
    """

    announces = True

    def __init__(self) -> None:
        super().__init__()
        # Shared by all views.
        self._subscriptions: dict[object, tuple[str, Subscriber]] = {}

    def subscribe(self, pattern: str, callback: Subscriber) -> Callable[[], None]:
        """Call ``callback(event, payload)`` for matching events; returns how to unsubscribe.

        A callback that raises is logged; the others are still called.
        """
        if inspect.iscoroutinefunction(callback):
            raise TypeError("a subscriber must not be async: it is not awaited")
        subscriptions, key = self._subscriptions, object()
        subscriptions[key] = (_permission(pattern), callback)

        def stop() -> None:
            subscriptions.pop(key, None)

        return stop

    def emit(self, event: str, payload: object = None) -> None:
        """Publish an event; in a call, once the call has committed."""
        if not isinstance(event, str) or "*" in event or not event:  # pyright: ignore[reportUnnecessaryIsInstance]  # may come from a model
            raise ValueError(f"an event has a name like 'file:changed', got {event!r}")
        bus, emitted = current_view(self), _Emitted(event, payload)
        with bus._lock:  # after ``seal``, nothing can still be emitted
            bus.check_open(f"to emit {event}")
            if bus._parent is not None:
                bus._session.change_here(_Emitted, lambda waiting: waiting.append(emitted))
                return
        bus._publish(emitted)

    def after_commit(self) -> None:
        """Publish what committed calls have emitted, in order. Views wait for their base."""
        if self._parent is not None:
            return
        with self._lock:
            due = [each for each in self._session.slice_here(_Emitted) if not each.published]
            self._session.change_here(_Emitted, lambda _: EMPTY)
            for each in due:
                each.published = True  # a restore may bring it back into the slice
        for each in due:
            self._publish(each)

    def _publish(self, emitted: _Emitted) -> None:
        patterns = {emitted.event, *_covering(emitted.event)}
        for pattern, callback in tuple(self._subscriptions.values()):
            if pattern in patterns:
                try:
                    callback(emitted.event, emitted.payload)
                except Exception:
                    _logger.exception("subscriber %r failed on %s", callback, emitted.event)
