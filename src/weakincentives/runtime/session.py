"""Session: typed slices, the reducers that change them, snapshots, and the views of calls.

All of a session's state is one immutable value, replaced in one assignment. So a snapshot is a
reference, a rollback is to forget a view, and an interrupt leaves the old state or the new one.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from weakincentives.call import current_view
from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import (
    ReadOnlyView,
    ReducerError,
    SessionError,
    SnapshotError,
    SnapshotExpired,
    ViewClosed,
)
from weakincentives.logs import get_logger
from weakincentives.runtime.events import Dispatcher, PromptRendered
from weakincentives.slices import (
    EMPTY,
    Reducer,
    Slice,
    SlicePolicy,
    append_all,
    declared_policy,
    declared_reducers,
)

if TYPE_CHECKING:
    from weakincentives.prompt.prompt import Prompt, RenderedPrompt
    from weakincentives.runtime.transactions import Transaction

__all__ = ["Session", "SliceAccessor", "Snapshot"]

T = TypeVar("T")
E = TypeVar("E")

_logger = get_logger(__name__)

_Slices = Mapping[type, Slice[Any]]
# The events that made a view what it is, newest first; None outside views.
_Events = tuple[Any, object] | None


class _Root:
    """Everything a session holds at one moment."""

    __slots__ = ("events", "log", "state")

    def __init__(self, state: _Slices, log: _Slices, events: _Events = None) -> None:
        self.state = state
        self.log = log
        self.events = events


@dataclass(frozen=True, slots=True)
class _Route:
    """Where an event goes: this reducer of this slice."""

    slice_type: type
    reduce: Reducer[Any]
    is_log: bool


@dataclass(frozen=True, slots=True)
class _SliceChanged:
    """A change made to a slice directly, as an event, so that views can replay it."""

    slice_type: type
    change: Callable[[Slice[Any]], Slice[Any]]


@dataclass(frozen=True, slots=True)
class _StateReplaced:
    """STATE was set as a whole, by ``restore`` or ``reset``."""

    state: _Slices


@dataclass(frozen=True, slots=True)
class _LogPart:
    """What is left of an event that was rolled back: its effect on LOG slices."""

    event: object


@dataclass(frozen=True, slots=True)
class _Child:
    """A child session, kept in a slice so that a failed call takes back those it made."""

    session: Session


class _Wiring:
    """What a session and all its views share: none of it is state."""

    __slots__ = ("clock", "default_routes", "dispatcher", "gate", "id", "parent", "policies",
                 "prompt", "rendered", "routes", "tags")  # fmt: skip

    def __init__(
        self,
        session_id: str,
        parent: Session | None,
        dispatcher: Dispatcher,
        clock: Clock,
        tags: Mapping[str, str],
    ) -> None:
        self.id = session_id
        self.parent = parent
        self.dispatcher = dispatcher
        self.clock = clock
        self.tags = tags
        self.routes: dict[type, tuple[_Route, ...]] = {}
        self.default_routes: dict[type, tuple[_Route, ...]] = {}
        self.policies: dict[type, SlicePolicy] = {}
        self.prompt: Prompt[Any] | None = None
        self.rendered: RenderedPrompt | None = None
        # Held by the call under way: calls on one session run one after the other.
        self.gate = threading.Lock()

    def policy(self, slice_type: type) -> SlicePolicy:
        return self.policies.get(slice_type) or declared_policy(slice_type)

    def routes_for(self, event: object) -> tuple[_Route, ...]:
        event_type = type(event)
        routes = self.routes.get(event_type) or self.default_routes.get(event_type)
        if routes is not None:
            return routes
        if isinstance(event, _SliceChanged):
            is_log = self.policy(event.slice_type) is SlicePolicy.LOG
            return (_Route(event.slice_type, lambda current, e: e.change(current), is_log),)
        is_log = self.policy(event_type) is SlicePolicy.LOG
        routes = self.default_routes[event_type] = (_Route(event_type, append_all, is_log),)
        return routes


class Snapshot:
    """A session's state at one moment. Costs a reference; dropping it frees what only it held."""

    __slots__ = ("__weakref__", "_events", "_expired", "_serial", "_source", "log", "state", "tag",
                 "taken_at")  # fmt: skip

    def __init__(
        self, state: _Slices, log: _Slices, *, tag: str = "", taken_at: float = 0.0
    ) -> None:
        self.state = state
        self.log = log
        self.tag = tag
        self.taken_at = taken_at
        self._source: Session | None = None
        self._events: _Events = None
        self._serial = 0
        self._expired = False

    def to_json(self, *, include_log: bool = True) -> str:
        """Return the snapshot as JSON text that ``from_json`` reads in another process."""
        import json

        from weakincentives.serde import freeze

        def frozen(slices: _Slices) -> list[object]:
            return [
                [f"{cls.__module__}:{cls.__qualname__}", freeze(slices[cls].all())]
                for cls in slices
                if cls is not _Child
            ]

        document = {
            "wink_snapshot": 1,
            "tag": self.tag,
            "taken_at": self.taken_at,
            "state": frozen(self.state),
            "log": frozen(self.log) if include_log else [],
        }
        return json.dumps(document, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, types: Iterable[type] = ()) -> Snapshot:
        """Read what ``to_json`` wrote. Pass the slice types that no imported module defines."""
        import json

        from weakincentives.serde import thaw
        from weakincentives.serde.exact import find_type

        known = tuple(types)
        try:
            document = json.loads(text)
        except ValueError as error:
            raise SnapshotError(f"not a snapshot: {error}") from error
        if not isinstance(document, dict) or document.get("wink_snapshot") != 1:
            raise SnapshotError("not a snapshot: the text lacks 'wink_snapshot': 1")

        def thawed(name: str) -> dict[type, Slice[Any]]:
            return {
                find_type(type_name, types=known): Slice.of(thaw(items, types=known))
                for type_name, items in document[name]
            }

        try:
            return cls(
                thawed("state"),
                thawed("log"),
                tag=document["tag"],
                taken_at=document["taken_at"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"not a snapshot: {error!r}") from error


class SliceAccessor(Generic[T]):
    """``session[T]``: reads and changes the slice that holds values of type T."""

    __slots__ = ("_session", "_type")

    def __init__(self, session: Session, slice_type: type[T]) -> None:
        self._session = session
        self._type = slice_type

    def latest(self) -> T | None:
        """Return the newest value, or None."""
        return self._session.read_slice(self._type).latest()

    def all(self) -> tuple[T, ...]:
        """Return every value, oldest first."""
        return self._session.read_slice(self._type).all()

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Return the values for which the predicate holds, oldest first."""
        return self._session.read_slice(self._type).where(predicate)

    def newest_first(self) -> Iterator[T]:
        """Yield every value, newest first."""
        return self._session.read_slice(self._type).newest_first()

    def __len__(self) -> int:
        return len(self._session.read_slice(self._type))

    def __iter__(self) -> Iterator[T]:
        return iter(self.all())

    def seed(self, values: T | Iterable[T]) -> None:
        """Make the slice hold just this value, or these."""
        items = (values,) if isinstance(values, self._type) else tuple(values)  # type: ignore[arg-type]
        self._check(items)
        self.update(lambda _: Slice.of(items))

    def append(self, value: T) -> None:
        """Add one value, past the reducers."""
        self._check((value,))
        self.update(lambda current: current.append(value))

    def clear(self, predicate: Callable[[T], bool] | None = None) -> None:
        """Drop every value, or those for which the predicate holds."""

        def cleared(current: Slice[T]) -> Slice[T]:
            if predicate is None:
                return EMPTY
            return Slice.of(item for item in current.all() if not predicate(item))

        self.update(cleared)

    def update(self, change: Callable[[Slice[T]], Slice[T]]) -> None:
        """Replace the slice by a pure function of it. Run again on the newest when calls merge."""
        self._session.dispatch(_SliceChanged(self._type, change))

    def register(
        self,
        event_type: type[E],
        reducer: Reducer[T],
        *,
        policy: SlicePolicy | None = None,
    ) -> None:
        """Let ``reducer`` change this slice on every event of that type."""
        self._session.register(self._type, event_type, reducer, policy=policy)

    def _check(self, items: Iterable[object]) -> None:
        for item in items:
            if not isinstance(item, self._type):
                raise TypeError(
                    f"the slice of {self._type.__name__} does not take a {type(item).__name__}"
                )


class Session:
    """What an agent knows and has done: typed slices, changed by events.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Note:
    ...     text: str
    >>> session = Session()
    >>> session.dispatch(Note("hello"))
    >>> session[Note].latest()
    Note(text='hello')

    Safe to use from several threads.
    """

    def __init__(
        self,
        *,
        parent: Session | None = None,
        dispatcher: Dispatcher | None = None,
        session_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        outer = None if parent is None else parent._wiring
        self._wiring = _Wiring(
            session_id or uuid.uuid4().hex,
            parent,
            dispatcher or (outer.dispatcher if outer else Dispatcher()),
            clock or (outer.clock if outer else SYSTEM_CLOCK),
            dict(tags or {}),
        )
        self._start(_Root({}, {}), None)
        if parent is not None:
            parent[_Child].append(_Child(self))

    def _start(self, root: _Root, base: Session | None) -> None:
        self._root = root
        self._base = base
        self._forked_from = root
        self._lock = threading.RLock()
        self._sealed: str | None = None
        self._snapshots: WeakSet[Snapshot] | None = None
        self.read_only: str | None = None

    # Who it is

    @property
    def session_id(self) -> str:
        return self._wiring.id

    @property
    def tags(self) -> Mapping[str, str]:
        return self._wiring.tags

    @property
    def dispatcher(self) -> Dispatcher:
        """The bus that carries what the runtime records; handlers may publish on it, too."""
        return self._wiring.dispatcher

    @property
    def clock(self) -> Clock:
        return self._wiring.clock

    @property
    def parent(self) -> Session | None:
        return self._wiring.parent

    @property
    def children(self) -> tuple[Session, ...]:
        """The sessions that were made with this one as their parent."""
        return tuple(current_view(child.session) for child in self.read_slice(_Child))

    @property
    def prompt(self) -> Prompt[Any] | None:
        """The prompt that was last rendered for this session."""
        return self._wiring.prompt

    @property
    def rendered(self) -> RenderedPrompt[Any] | None:
        """That prompt as it was rendered: its tools are those a call can name."""
        return self._wiring.rendered

    def offer(self, prompt: Prompt[Any], rendered: RenderedPrompt) -> None:
        """Note what was rendered for this session: calls find their tools there."""
        self._wiring.prompt, self._wiring.rendered = prompt, rendered
        event = PromptRendered(
            prompt_ns=prompt.ns,
            prompt_key=prompt.key,
            text=rendered.text,
            tool_names=tuple(tool.name for tool in rendered.tools),
            timestamp=self.clock.time(),
        )
        self.dispatch(event)
        self.dispatcher.publish(event)

    @property
    def gate(self) -> threading.Lock | None:
        """The lock that a call holds while it is under way; None for a view, which has its turn."""
        return None if self._base is not None else self._wiring.gate

    def is_view_of(self, other: Session) -> bool:
        """Whether this was forked from the other, directly or not."""
        here: Session | None = self
        while here is not None:
            if here is other:
                return True
            here = here._base
        return False

    def belongs_to(self, other: Session) -> bool:
        """Whether this is the other session, a view of it, or a descendant."""
        here: Session | None = self
        while here is not None:
            if here._wiring is other._wiring:
                return True
            here = here._wiring.parent
        return False

    def __repr__(self) -> str:
        kind = "session" if self._base is None else "view of session"
        return f"<{kind} {self.session_id}>"

    # Reading and changing

    def __getitem__(self, slice_type: type[T]) -> SliceAccessor[T]:
        return SliceAccessor(self, slice_type)

    def read_slice(self, slice_type: type[T]) -> Slice[T]:
        """Return the slice as it is now; it does not change afterwards."""
        root = current_view(self)._root
        found = root.state.get(slice_type)
        return found if found is not None else root.log.get(slice_type, EMPTY)

    def dispatch(self, event: object) -> None:
        """Apply the event to every slice that has a reducer for its type, or to none.

        A type without a registered reducer is kept in the slice of its own. A reducer that raises
        leaves every slice as it was, and ReducerError says which one it was.
        """
        target = current_view(self)
        with target._lock:
            target._check_writable(event)
            before = target._root
            after = target._applied(before, event)
            if target._root is not before:
                raise SessionError("a reducer must not change its session; return the next slice")
            target._root = after

    def register(
        self,
        slice_type: type[T],
        event_type: type,
        reducer: Reducer[T],
        *,
        policy: SlicePolicy | None = None,
    ) -> None:
        """Let ``reducer`` change the slice of ``slice_type`` on every event of ``event_type``."""
        wiring = self._wiring
        with self._lock:
            if policy is not None:
                root = self._root
                if slice_type in (root.log if policy is SlicePolicy.STATE else root.state):
                    raise SessionError(f"the slice of {slice_type.__name__} is in use already")
                wiring.policies[slice_type] = policy
            route = _Route(slice_type, reducer, wiring.policy(slice_type) is SlicePolicy.LOG)
            others = tuple(
                r for r in wiring.routes.get(event_type, ()) if r.slice_type is not slice_type
            )
            wiring.routes[event_type] = (*others, route)

    def install(
        self,
        slice_type: type[T],
        *,
        initial: Callable[[], T] | None = None,
        policy: SlicePolicy | None = None,
    ) -> None:
        """Register the ``@reducer`` methods of a dataclass; its slice holds one value.

        ``initial`` gives the value that the first event meets; the class itself, called without
        arguments, is the default.
        """
        found = False
        for event_type, method in declared_reducers(slice_type):
            found = True

            def reduce(current: Slice[T], event: object, method: Any = method) -> Slice[T]:
                value = current.latest()
                if value is None:
                    value = (initial or slice_type)()
                return current.replace(method(value, event))

            self.register(slice_type, event_type, reduce, policy=policy)
        if not found:
            raise SessionError(
                f"{slice_type.__name__} has no @reducer(on=...) method; add one, "
                f"or register a reducer with session[{slice_type.__name__}].register(...)"
            )

    def handles(self, event_type: type) -> bool:
        """Whether a reducer was registered for this type of event."""
        return event_type in self._wiring.routes

    # Snapshots

    def snapshot(self, *, tag: str = "") -> Snapshot:
        """Return the state as it is now, to go back to."""
        return current_view(self).snapshot_here(tag=tag)

    def snapshot_here(self, *, tag: str = "") -> Snapshot:
        """Snapshot exactly this session or view, whatever call is under way."""
        with self._lock:
            root = self._root
            snapshot = Snapshot(root.state, root.log, tag=tag, taken_at=self.clock.time())
            snapshot._source = self
            snapshot._events = root.events
            if self._snapshots is None:
                self._snapshots = WeakSet()
            snapshot._serial = 1 + max((s._serial for s in self._snapshots), default=0)
            self._snapshots.add(snapshot)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Set every STATE slice to what the snapshot holds; LOG slices stay as they are.

        Snapshots that were taken after this one cannot be restored any more.
        """
        current_view(self).restore_here(snapshot)

    def restore_here(self, snapshot: Snapshot) -> None:
        """Restore on exactly this session or view, whatever call is under way."""
        if snapshot._expired:
            raise SnapshotExpired(
                f"snapshot {snapshot.tag!r} was taken after one that has been restored since; "
                "take a new one"
            )
        source = snapshot._source
        if source is not None and source._wiring is not self._wiring:
            raise SnapshotError(
                "the snapshot is of another session; carry it over with to_json and from_json"
            )
        with self._lock:
            self._check_writable(snapshot)
            if source is self and self._base is not None:
                # Back to a savepoint of this view: forget the events since, but for their logs.
                root = _Root(snapshot.state, self._root.log, snapshot._events)
                for event in self._events_since(snapshot._events):
                    kept = self._log_part(event)
                    if kept is not None:
                        root = _Root(root.state, root.log, (root.events, kept))
            else:
                root = self._applied(self._root, _StateReplaced(snapshot.state))
            for other in self._snapshots or ():
                if source is self and other._serial > snapshot._serial:
                    other._expired = True
            self._root = root

    def reset(self) -> None:
        """Empty every STATE slice; LOG slices stay as they are."""
        self.dispatch(_StateReplaced({}))

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, **options: Any) -> Session:
        """Return a new session with a snapshot's STATE and LOG, to go on in a fresh process."""
        session = cls(**options)
        session._root = _Root(dict(snapshot.state), dict(snapshot.log))
        return session

    # Views: what a call works on

    def fork(self) -> Session:
        """Return a private view: it starts as this session is now, and shares nothing since."""
        view = Session.__new__(Session)
        view._wiring = self._wiring
        root = self._root
        view._start(_Root(root.state, root.log, None), self)
        view._forked_from = root
        return view

    def merge(self, view: Session) -> None:
        """Bring in what a view changed, all or nothing."""
        self.settle(view, keep=True)

    def settle(
        self,
        view: Session,
        *,
        keep: bool,
        record: object = None,
        transaction: Transaction | None = None,
    ) -> None:
        """End a view: keep all it did, or only what it logged; add a record in the same step."""
        with self._lock:
            if self._sealed is not None:
                raise ViewClosed(self._sealed)
            root = self._root
            if keep and root is view._forked_from:
                # Nothing else happened since the fork: the view's slices are the outcome.
                events = root.events
                if self._base is not None:
                    for event in view._events_since(None):
                        events = (events, event)
                root = _Root(view._root.state, view._root.log, events)
            else:
                for event in view._events_since(None):
                    kept = event if keep else self._log_part(event)
                    if kept is not None:
                        root = self._applied(root, kept)
            if record is not None:
                root = self._applied(root, record)
            # The commit point. One statement, so that an interrupt finds both or neither done.
            if transaction is None:
                self._root = root
            else:
                self._root, transaction.settled = root, True

    def seal(self, reason: str) -> None:
        """Refuse every write through this view from now on."""
        with self._lock:
            self._sealed = reason

    # How events apply

    def _check_writable(self, event: object) -> None:
        reason = self._sealed or self.read_only
        if reason is None:
            return
        if self._sealed is None:
            raise ReadOnlyView(reason)
        _logger.error("refused %s: %s", type(event).__name__, reason)
        raise ViewClosed(reason)

    def _applied(self, root: _Root, event: object) -> _Root:
        events = None if self._base is None else (root.events, event)
        only_log = isinstance(event, _LogPart)
        if only_log:
            event = event.event
        if isinstance(event, _StateReplaced):
            return _Root(root.state if only_log else event.state, root.log, events)
        state, log = root.state, root.log
        for route in self._wiring.routes_for(event):
            if only_log and not route.is_log:
                continue
            slices = log if route.is_log else state
            current = slices.get(route.slice_type, EMPTY)
            try:
                reduced = route.reduce(current, event)
                following = reduced if isinstance(reduced, Slice) else Slice.of(reduced)
            except Exception as error:
                raise ReducerError(
                    f"the reducer of slice {route.slice_type.__name__} failed on "
                    f"{type(event).__name__}: {error}; no slice was changed"
                ) from error
            if following is current:
                continue
            if route.is_log:
                log = {**log, route.slice_type: following}
            else:
                state = {**state, route.slice_type: following}
        return _Root(state, log, events)

    def _events_since(self, mark: _Events) -> list[object]:
        found: list[object] = []
        here = self._root.events
        while here is not None and here is not mark:
            here, event = here
            found.append(event)
        found.reverse()
        return found

    def _log_part(self, event: object) -> _LogPart | None:
        if isinstance(event, _LogPart):
            return event
        if isinstance(event, _StateReplaced):
            return None
        if any(route.is_log for route in self._wiring.routes_for(event)):
            return _LogPart(event)
        return None
