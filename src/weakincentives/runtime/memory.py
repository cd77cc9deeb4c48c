"""What an agent remembers, what its sessions may do, and who is told about it.

``MemoryManager``, ``Permissions`` and ``EventBus`` are ordinary resources: what a call does to them
is kept when the call commits and gone when it fails.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from weakincentives.call import current_view
from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import ViewClosed
from weakincentives.logs import get_logger
from weakincentives.prompt.contracts import MemoryScope
from weakincentives.runtime.entries import Entries, Entry, reading, writing
from weakincentives.runtime.rows import RowStore, fold, search_text
from weakincentives.serde.exact import freeze, thaw
from weakincentives.slices import Slice

if TYPE_CHECKING:
    from datetime import timedelta

    from weakincentives.runtime.session import Session

__all__ = ["EventBus", "MemoryManager", "MemoryMatch", "MemoryScope", "Permissions"]

_WORKING, _SHORT_TERM, _LONG_TERM = "working", "short-term", "long-term"
_SCOPES = (_WORKING, _SHORT_TERM, _LONG_TERM)

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryMatch:
    """Something that a search found."""

    scope: str
    key: str
    value: Any


class MemoryManager(Entries):
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
        super().__init__(clock=clock, store=store, stored_scope=_LONG_TERM)

    # Reading

    @reading
    def read(self, scope: str, key: str, default: Any = None) -> Any:
        """Return the value at a key, or ``default``."""
        entry = self._look(_scope(scope), _key(key))
        return default if entry is None else self._value(entry)

    @reading
    def keys(self, scope: str, prefix: str = "") -> tuple[str, ...]:
        """Return the keys of a scope that begin with ``prefix``, sorted."""
        return tuple(self._list(_scope(scope), prefix))

    @reading
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
        with self._lock:
            found = [(key, each) for each in scopes for key in self._holding(each, words)]
            found.sort(key=lambda at: (not _holds(fold(at[0]), words), at[0], _SCOPES.index(at[1])))
            entries = ((key, each, self._now((each, key))) for key, each in found[:limit])
            return tuple(
                MemoryMatch(each, key, self._value(entry))
                for key, each, entry in entries
                if entry is not None
            )

    # Writing

    @writing
    def write(
        self, scope: str, key: str, value: Any, *, ttl: float | timedelta | None = None
    ) -> None:
        """Make a key hold a value. ``ttl`` says for how many seconds, in the short-term scope."""
        scope = _scope(scope)
        expires = self._expiry(scope, ttl)
        self._set(scope, _key(key), Entry(_text(value), expires))

    @writing
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

        def changed(entry: Entry | None) -> Entry:
            value = default if entry is None else self._value(entry)
            kept = expires if entry is None or ttl is not None else entry.expires
            return Entry(_text(change(value)), kept)

        self._update(scope, key, changed)

    @writing
    def delete(self, scope: str, key: str) -> bool:
        """Forget a key; returns whether there was anything."""
        scope, key = _scope(scope), _key(key)
        if self._look(scope, key) is None:
            return False
        self._set(scope, key, None)
        return True

    @writing
    def clear(self, scope: str) -> None:
        """Forget everything in a scope."""
        scope = _scope(scope)
        places = [(scope, key) for key in self._list(scope)]
        self._assign(lambda: dict.fromkeys(places), places)

    @writing
    def end_loop(self) -> None:
        """Forget the working scope: the loop that it was for has ended."""
        self.clear(_WORKING)

    def close(self) -> None:
        """Let go of the file. What is in it stays."""
        if self._store is not None:
            self._store.close()

    # Steps

    def _value(self, entry: Entry) -> Any:
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
        self._note_scope(scope)
        own = self._own(scope)
        for key, entry in own.items():
            if self._is_alive(entry) and _holds(search_text(key, entry.text or "null"), words):
                yield key
        if scope == self._stored_scope and self._rows is not None:
            yield from (key for key in self._rows.search(words) if key not in own)


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


class Permissions(Entries):
    """What each session may do.

    A permission is a name like ``file:write``. ``file:*`` covers all that begin with ``file:``, and
    ``*`` covers everything. What is granted to the session ``"*"`` every session has.

    >>> permissions = Permissions()
    >>> permissions.grant("file:*", session="s1")
    >>> permissions.has("s1", "file:write"), permissions.has("s2", "file:write")
    (True, False)
    """

    def __init__(self) -> None:
        super().__init__(clock=SYSTEM_CLOCK)

    @writing
    def grant(self, permission: str, *, session: Session | str) -> None:
        """Let a session do what the permission covers."""
        self._set(_session_id(session), _permission(permission), Entry(""))

    @writing
    def revoke(self, permission: str, *, session: Session | str) -> bool:
        """Take back a permission and every narrower one; returns whether there was any.

        A broader one stays, and so does what it covers: see ``granted``.
        """
        owner, permission = _session_id(session), _permission(permission)
        revoked = [p for p in self._list(owner) if permission in (p, *_covering(p))]
        places = [(owner, p) for p in revoked]
        self._assign(lambda: dict.fromkeys(places), places)
        return bool(revoked)

    @reading
    def has(self, session: Session | str, permission: str) -> bool:
        """Tell whether a session may do what the permission names."""
        owner, permission = _session_id(session), _permission(permission)
        wanted = (permission, *_covering(permission))
        return any(
            self._look(each, name) is not None for each in (owner, _EVERYONE) for name in wanted
        )

    @reading
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
_NOTHING: Slice[_Emitted] = Slice.of(())


class _Waiting(NamedTuple):
    """A snapshot of what a bus or view has still to tell."""

    emitted: Slice[_Emitted]
    family: object
    owner: object


class EventBus:
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
        self._lock = threading.RLock()
        self._family = object()
        self._owner = object()
        self._parent: EventBus | None = None
        self._sealed: str | None = None
        self._waiting: Slice[_Emitted] = _NOTHING
        # Shared by all views; replaced, never changed: telling reads it without a lock.
        self._audience = _Audience()

    def subscribe(self, pattern: str, callback: Subscriber) -> Callable[[], None]:
        """Call ``callback(event, payload)`` for events that match; returns how to stop.

        One that raises is logged, and does not keep others from hearing of the event.
        """
        if inspect.iscoroutinefunction(callback):
            raise TypeError("a subscriber must not be async: nobody would await it")
        return self._audience.add(_permission(pattern), callback)

    def emit(self, event: str, payload: object = None) -> None:
        """Tell all who subscribed; in a call, once it has been committed."""
        bus = current_view(self)
        emitted = _Emitted(_name(event), payload)
        with bus._lock:  # once `seal` has returned, nothing slips through
            if bus._sealed is not None:
                _logger.error("Refused to emit %s: %s", event, bus._sealed)
                raise ViewClosed(bus._sealed)
            if bus._parent is not None:
                bus._waiting = bus._waiting.append(emitted)
                return
        bus._audience.tell(emitted)

    def after_commit(self) -> None:
        """Tell what calls have emitted and committed, in that order.

        For the runtime, once a call is over. A view tells nobody: its call may still fail.
        """
        if self._parent is not None:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, _NOTHING
            due = [each for each in waiting if not each.told]
            for each in due:
                each.told = True  # a restore may bring it back to those that wait
        for each in due:
            self._audience.tell(each)

    # Views

    def fork(self) -> EventBus:
        """Return a view that keeps what is emitted to itself."""
        view = object.__new__(EventBus)
        view.__dict__.update(self.__dict__)
        view._lock = threading.RLock()
        view._owner = object()
        view._parent = self
        view._sealed = None
        view._waiting = _NOTHING
        return view

    def merge(self, view: EventBus) -> None:
        """Take over what a view has emitted. There are no conflicts."""
        with self._lock, view._lock:
            if view._parent is not self:
                raise ValueError("only a view that was forked from this EventBus can be merged")
            if self._sealed is not None and view._waiting:
                raise ViewClosed(self._sealed)
            for each in view._waiting:
                self._waiting = self._waiting.append(each)

    def seal(self, reason: str) -> None:
        """Refuse every later event with ``ViewClosed``, and log it."""
        with self._lock:
            if self._sealed is None:
                self._sealed = reason

    # Going back

    def snapshot(self) -> object:
        """Return a token for what has been emitted and not been told yet."""
        return current_view(self).snapshot_here()

    def restore(self, token: object) -> None:
        """Forget what has been emitted since; what has been told cannot be taken back."""
        current_view(self).restore_here(token)

    def snapshot_here(self) -> object:
        """Like ``snapshot``, of exactly this object, whichever call is under way."""
        return _Waiting(self._waiting, self._family, self._owner)

    def restore_here(self, token: object) -> None:
        """Like ``restore``, of exactly this object, also when it is sealed."""
        if not isinstance(token, _Waiting) or token.family is not self._family:
            raise ValueError("the token is not a snapshot of this EventBus")
        with self._lock:
            # One of another view, or of the bus itself, is from before this view emitted anything.
            self._waiting = token.emitted if token.owner is self._owner else _NOTHING


class _Audience:
    """Who wants to hear of what."""

    def __init__(self) -> None:
        self._subscriptions: tuple[tuple[str, Subscriber], ...] = ()
        self._lock = threading.Lock()

    def add(self, pattern: str, callback: Subscriber) -> Callable[[], None]:
        subscription = (pattern, callback)

        def remove() -> None:
            with self._lock:
                self._subscriptions = tuple(
                    each for each in self._subscriptions if each is not subscription
                )

        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
        return remove

    def tell(self, emitted: _Emitted) -> None:
        patterns = {emitted.event, *_covering(emitted.event)}
        for pattern, callback in self._subscriptions:
            if pattern in patterns:
                try:
                    callback(emitted.event, emitted.payload)
                except Exception:
                    _logger.exception("subscriber %r failed on %s", callback, emitted.event)


def _name(event: str) -> str:
    if not isinstance(event, str) or "*" in event or not event:  # pyright: ignore[reportUnnecessaryIsInstance]  # may come from a model
        raise ValueError(f"an event has a name like 'file:changed', got {event!r}")
    return event
