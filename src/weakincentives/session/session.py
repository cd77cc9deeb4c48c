"""Session: typed slices, the reducers that change them, snapshots, and the views of calls.

All of a session's state is one immutable value, replaced in one assignment. So a snapshot is a
reference, a rollback drops a view, and an interrupt leaves the old state or the new one.
"""
# A session and the accessors of its slices are one mechanism:
# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import math
from _thread import RLock  # threading's is a function around it, and every call makes one
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import iscoroutinefunction
from typing import Any, Generic, NoReturn, TypeVar, cast
from weakref import WeakSet, ref

from weakincentives.core.call import current_view, new_id, transaction_under_way
from weakincentives.core.clock import SYSTEM_CLOCK, Clock
from weakincentives.core.gate import Gate, Holder
from weakincentives.core.logs import get_logger
from weakincentives.errors import (
    MergeConflict,
    ReducerError,
    SessionError,
    SnapshotError,
    SnapshotExpired,
    ViewClosed,
)
from weakincentives.session.events import Dispatcher, PromptRendered, ToolInvoked
from weakincentives.session.frozen import changeable, refused_class
from weakincentives.session.participant import Participant
from weakincentives.session.slices import (
    EMPTY,
    Reducer,
    Slice,
    SlicePolicy,
    append_all,
    declared_policy,
    declared_reducers,
    replace_latest,
)

T = TypeVar("T")
V = TypeVar("V")

_logger = get_logger(__name__)

_Slices = Mapping[type, Slice[Any]]
# The changes and reads of a view, newest first. None outside views.
_Events = tuple[Any, object] | None

# The states before and after each recorded call, newest first. None if they are not followed.
_Passed = tuple[Any, ...] | None

_APPEND = cast("Reducer[Any]", Slice.append)  # type: ignore[type-arg]
# Orders the snapshots of a session and of all its views.
_serials = itertools.count(1)


@dataclass(slots=True, eq=False)
class _Root:
    """The content of a session at one moment. Replaced, never changed."""

    state: _Slices
    log: _Slices
    events: _Events = None


@dataclass(frozen=True, slots=True)
class _Route:
    """Where an event goes: this reducer of this slice."""

    slice_type: type
    reduce: Reducer[Any]
    is_log: bool
    refuses_changeable: bool = field(init=False)
    """Whether values that can be changed in place are refused: a rollback restores the slice."""
    holds_events: bool = field(init=False)
    """Whether the reducer adds the event itself, and nothing else."""

    def __post_init__(self) -> None:
        # Our own values never change, or are no state: child sessions, events to publish.
        is_ours = self.slice_type.__module__.startswith("weakincentives.")
        object.__setattr__(self, "refuses_changeable", not (self.is_log or is_ours))
        known = (_APPEND, append_all, replace_latest)
        object.__setattr__(self, "holds_events", self.reduce in known)


@dataclass(frozen=True, slots=True)
class _SliceChanged:
    """A direct change to a slice, as an event, so that views can replay it."""

    slice_type: type
    change: Callable[[Slice[Any]], Slice[Any]]


class _Entry:
    """A record among a view's events that is not an event itself."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _StateReplaced(_Entry):
    """STATE was set as a whole, by ``restore`` or ``reset``."""

    state: _Slices
    snapshot: Snapshot | None = None
    """What it was restored from, and the session or view that owns it: a view merges only where the
    snapshot can still be restored."""
    owner: Session | None = None


@dataclass(frozen=True, slots=True)
class _Observed(_Entry):
    """A read of a view: it merges only if the answer is still the same."""

    slice_type: type
    query: Callable[[Slice[Any]], object]
    answer: object
    subject: str = ""
    """What was read, if less than the slice."""

    def check(self, root: _Root) -> None:
        try:
            same = _same(self.query(_slice_in(root, self.slice_type)), self.answer)
        except Exception:  # a predicate that fails on the new values
            same = False
        if not same:
            name = self.slice_type.__name__
            raise MergeConflict(
                f"Changed by another call in the meantime: {self.subject or f'slice {name}'}",
                (self.subject or name,),
            )


@dataclass(frozen=True, slots=True)
class _RolledBack(_Entry):
    """What remains of entries that were rolled back in a view."""

    logged: tuple[object, ...]
    """The events for LOG slices, which stay."""
    entries: tuple[object, ...]
    """All entries, in a view that tracks reads: the reads must still be valid."""


@dataclass(frozen=True, slots=True)
class _Child:
    """A child session, in a slice so that a rollback removes the children of a call."""

    session: Session


def _slice_in(root: _Root, slice_type: type) -> Slice[Any]:
    found = root.state.get(slice_type)
    return found if found is not None else root.log.get(slice_type, EMPTY)


def _same(left: object, right: object) -> bool:
    """Whether two answers are equal, item by item."""
    if left is right:
        return True
    ours, theirs = _items(left), _items(right)
    if ours is not None and theirs is not None:
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return type(left) is type(right) and bool(left == right)


def _items(answer: Any) -> tuple[object, ...] | None:
    if isinstance(answer, Slice):
        return cast("Slice[object]", answer).all()
    return cast("tuple[object, ...]", answer) if type(answer) is tuple else None


# Frequent queries, each one function, so that a repeated query is recognised.
def _whole(values: Slice[T]) -> Slice[T]:
    return values


def _latest(values: Slice[T]) -> T | None:
    return values.latest()


def _all(values: Slice[T]) -> tuple[T, ...]:
    return values.all()


def _named(change: object) -> str:
    if isinstance(change, _SliceChanged):
        return f"a change to the slice of {change.slice_type.__name__}"
    if isinstance(change, (_StateReplaced, Snapshot)):
        return "a restore or reset"
    if isinstance(change, Session):
        return "a merge"
    return type(change).__name__


@dataclass(slots=True, eq=False)
class _Wiring:
    """What a session and all its views share. It is not state and is never rolled back."""

    id: str
    parent: Session | None
    tags: Mapping[str, str]
    # Replaced together, never changed: they are read without the lock.
    routes: Mapping[type, tuple[_Route, ...]] = field(default_factory=dict[type, Any])
    policies: Mapping[type, SlicePolicy] = field(default_factory=dict[type, SlicePolicy])
    default_routes: dict[type, tuple[_Route, ...]] = field(default_factory=dict[type, Any])
    """For types without a registered reducer, filled as events are dispatched."""
    change_routes: dict[type, tuple[_Route, ...]] = field(default_factory=dict[type, Any])
    """By slice type, for changes that ``session[T]`` makes."""
    # Not typed: prompts are above this layer, and put themselves here.
    prompt: Any = None
    rendered: Any = None
    lock: Any = field(default_factory=RLock)
    gate: Gate = field(default_factory=Gate)
    """Held by the current call: calls on one session run one after the other."""
    holder: Holder | None = None
    """What holds the gates of objects for tools that another program runs in this session."""
    by_call: dict[str, ToolInvoked] = field(default_factory=dict[str, ToolInvoked])
    """The newest record of each call, of the records that ``indexed`` holds."""
    indexed: Slice[ToolInvoked] = EMPTY

    def policy(self, slice_type: type) -> SlicePolicy:
        return self.policies.get(slice_type) or declared_policy(slice_type)

    def routes_for(self, event: object) -> tuple[_Route, ...]:
        event_type = type(event)
        defaults, changes = self.default_routes, self.change_routes
        if isinstance(event, _SliceChanged):
            slice_type = event.slice_type
            routes = changes.get(slice_type)
            if routes is None:
                is_log = self.policy(slice_type) is SlicePolicy.LOG
                routes = changes[slice_type] = (_Route(slice_type, _change, is_log),)
            return routes
        routes = self.routes.get(event_type) or defaults.get(event_type)
        if routes is None:
            routes = defaults[event_type] = (self.own_route(event_type),)
        return routes

    def own_route(self, event_type: type) -> _Route:
        return _Route(event_type, _APPEND, self.policy(event_type) is SlicePolicy.LOG)

    def add_route(
        self,
        event_type: type,
        slice_type: type,
        reducer: Reducer[Any],
        policy: SlicePolicy | None,
        root: _Root,
    ) -> None:
        with self.lock:
            policy = policy or self.policy(slice_type)
            is_log = policy is SlicePolicy.LOG
            if slice_type in (root.state if is_log else root.log):
                raise SessionError(
                    f"the slice of {slice_type.__name__} cannot become {policy.name}: "
                    "it is not empty"
                )
            instead = None if is_log else refused_class(slice_type)
            if instead is not None:
                _refuse(slice_type, f"{slice_type.__name__}: {instead}")
            present = self.routes.get(event_type, ())
            if not present and self.policy(event_type) is SlicePolicy.LOG:
                # An event of a LOG type stays in its own slice, too.
                present = (self.own_route(event_type),)
            others = tuple(r for r in present if r.slice_type is not slice_type)
            routes = {**self.routes, event_type: (*others, _Route(slice_type, reducer, is_log))}
            for key, found in routes.items():
                routes[key] = tuple(
                    replace(r, is_log=is_log) if r.slice_type is slice_type else r for r in found
                )
            policies = {**self.policies, slice_type: policy}
            self.policies, self.routes = policies, routes
            self.default_routes, self.change_routes = {}, {}


class _Restorable:
    """The snapshots that a session or view can restore. Replaced with every restore."""

    __slots__ = ("limit", "taken")

    def __init__(self, taken: Iterable[Snapshot] = (), limit: float = math.inf) -> None:
        self.taken = WeakSet(taken)
        """Those taken here, and in merged views."""
        self.limit = limit
        """In a view that restored a snapshot of its base: the serial of that snapshot. Newer ones
        of the base cannot be restored in the view, nor in the base once the view is merged."""

    def up_to(self, serial: float) -> Iterator[Snapshot]:
        return (snapshot for snapshot in self.taken if snapshot.serial <= serial)

    def merged(self, view: _Restorable) -> _Restorable:
        taken = itertools.chain(self.up_to(view.limit), view.taken)
        return _Restorable(taken, min(self.limit, view.limit))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """A session's state at one moment. It costs a reference, and is freed when dropped."""

    state: _Slices = field(repr=False)
    log: _Slices = field(repr=False)
    tag: str = ""
    taken_at: float = 0.0
    wiring: _Wiring | None = field(default=None, repr=False)
    """Of the session; None in a snapshot that was read from JSON."""
    owner: Callable[[], Session | None] = field(default=lambda: None, repr=False)
    """A weak reference to the session or view that took it."""
    events: _Events = field(default=None, repr=False)
    serial: int = 0

    def slices(self) -> Iterator[tuple[SlicePolicy, type, Slice[Any]]]:
        """Yield every slice that can be saved; child sessions cannot."""
        for slice_type, values in self.state.items():
            if slice_type is not _Child:
                yield SlicePolicy.STATE, slice_type, values
        for slice_type, values in self.log.items():
            yield SlicePolicy.LOG, slice_type, values

    def to_json(self, *, include_log: bool = True) -> str:
        """Return the snapshot as JSON text that ``from_json`` reads in another process."""
        import json

        from weakincentives.serde import freeze

        found: dict[SlicePolicy, list[object]] = {SlicePolicy.STATE: [], SlicePolicy.LOG: []}
        for policy, slice_type, values in self.slices():
            if len(values) and (include_log or policy is SlicePolicy.STATE):
                try:
                    found[policy].append([type_name(slice_type), freeze(values.all())])
                except SnapshotError as error:
                    raise SnapshotError(f"the slice of {slice_type.__name__}: {error}") from error
        document = {
            "wink_snapshot": 1,
            "tag": freeze(self.tag),
            "taken_at": self.taken_at,
            "state": found[SlicePolicy.STATE],
            "log": found[SlicePolicy.LOG],
        }
        return json.dumps(document, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, types: Iterable[type] = ()) -> Snapshot:
        """Read what ``to_json`` wrote. Pass the slice types that no imported module defines."""
        import json

        from weakincentives.serde import thaw

        try:
            document: Any = json.loads(text)
            if document["wink_snapshot"] != 1:
                raise SnapshotError(f"a snapshot of version {document['wink_snapshot']!r}")
            state, log = (
                {name: values["items"] for name, values in document[kind]}
                for kind in ("state", "log")
            )
            snapshot = cls.from_items(state, log, float(document["taken_at"]), types=types)
            snapshot.tag = str(thaw(document["tag"]))
            for _, _, values in snapshot.slices():
                values.all()  # decoded now: the text may come from anywhere
            return snapshot
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            raise SnapshotError(f"not a snapshot: {error!r}") from error

    @classmethod
    def from_items(
        cls,
        state: Mapping[str, Sequence[Any]],
        log: Mapping[str, Sequence[Any]],
        taken_at: float,
        *,
        types: Iterable[type] = (),
    ) -> Snapshot:
        """Return a snapshot of frozen values by the name of their slice; most are thawed later."""
        from importlib import import_module

        for name in _OWN_MODULES:
            import_module(name)
        known = tuple(types)
        slices = [
            dict(_decoded(name, items, known) for name, items in each.items() if items)
            for each in (state, log)
        ]
        return cls(slices[0], slices[1], taken_at=taken_at)


_OWN_MODULES = (
    "weakincentives.prompt.feedback",
    "weakincentives.prompt.policies",
    "weakincentives.prompt.section",
    "weakincentives.runtime.conversation",
    "weakincentives.runtime.ledger",
)
"""Modules whose types any session may hold, imported before a session is read."""


def type_name(cls: type) -> str:
    """Return the name of a class in a snapshot."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _decoded(name: str, items: Sequence[Any], known: tuple[type, ...]) -> tuple[type, Slice[Any]]:
    """Return the slice of frozen values, with its type: theirs, or one they derive from."""
    from weakincentives.serde.exact import current_name, thaw

    def thawed(items: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return tuple(thaw(list(items), types=known))
        except SnapshotError:
            if name != type_name(ToolInvoked):
                raise
            # A tool that has changed since: its records must not keep a session from opening.
            if len(items) == 1:
                return (thaw(_with_plain_values(items[0]), types=known),)
            return tuple(value for item in items for value in thawed([item]))

    name, found = current_name(name), None
    (newest,) = thawed(items[-1:])
    for cls in (*known, *type(newest).__mro__):
        if type_name(cls) == name:
            found = cls
            break
    else:
        raise SnapshotError(f"the slice type {name} is not known here; pass it in types=")

    def decode(items: Sequence[Any]) -> tuple[Any, ...]:
        values = thawed(items)
        for value in values:
            if not isinstance(value, found):
                raise SnapshotError(f"the slice of {found.__name__} holds a {type(value).__name__}")
        return values

    return found, Slice.decoded(items, decode)


def _with_plain_values(record: Any) -> Any:
    """Return the frozen record of a call with its arguments and its value as plain data."""
    from weakincentives.serde.exact import freeze, plain

    fields = record["fields"]
    result = fields["result"]
    value = {**result["fields"], "value": freeze(plain(result["fields"]["value"]))}
    params = freeze(plain(fields["params"]))
    changed = {"params": params, "result": {**result, "fields": value}}
    return {**record, "fields": {**fields, **changed}}


class SliceAccessor(Generic[T]):
    """``session[T]``: reads and changes the slice that holds values of type T."""

    __slots__ = ("_session", "_type")

    def __init__(self, session: Session, slice_type: type[T]) -> None:
        self._session = session
        self._type = slice_type

    def latest(self) -> T | None:
        """Return the newest value, or None."""
        return self.select(_latest)

    def all(self) -> tuple[T, ...]:
        """Return every value, oldest first."""
        return self.select(_all)

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        """Return the values for which the predicate holds, oldest first."""
        return self.select(lambda values: values.where(predicate))

    def select(self, query: Callable[[Slice[T]], V]) -> V:
        """Return the result of a pure function of the slice.

        A concurrent call depends only on the answer: it is re-run only if the query has another
        answer when the call commits. So the less a query returns, the fewer calls conflict.
        """
        return self._session.select(self._type, query)

    def newest_first(self) -> Iterator[T]:
        """Yield every value, newest first."""
        return self._session.read_slice(self._type).newest_first()

    def __len__(self) -> int:
        return self.select(len)

    def __iter__(self) -> Iterator[T]:
        return iter(self.all())

    def seed(self, values: T | Iterable[T]) -> None:
        """Set the slice to this value, or these values."""
        # A value first: it may be iterable itself.
        if isinstance(values, self._type) or not isinstance(values, Iterable):
            items = cast("tuple[T, ...]", (values,))
        else:
            items = tuple(cast("Iterable[T]", values))
        self._check(items)
        self.update(lambda _: Slice.of(items))

    def append(self, value: T) -> None:
        """Add one value without calling reducers."""
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
        """Replace the slice by a pure function of it, which a merge applies to the newest slice."""
        self._session.dispatch(_SliceChanged(self._type, change))

    def register(
        self,
        event_type: type,
        reducer: Reducer[T],
        *,
        policy: SlicePolicy | None = None,
    ) -> None:
        """Register a reducer of this slice for events of exactly that type.

        It replaces an earlier one for the same type. It is not state: no rollback removes it.
        """
        if iscoroutinefunction(reducer):
            raise TypeError(
                f"a reducer of {self._type.__name__} must not be async: it is a function of the "
                "slice and the event"
            )
        view = current_view(self._session)
        with view._lock:
            view._wiring.add_route(event_type, self._type, reducer, policy, view._root)

    def _check(self, items: Iterable[object]) -> None:
        for item in items:
            if not isinstance(item, self._type):
                raise TypeError(
                    f"the slice of {self._type.__name__} cannot hold a {type(item).__name__}"
                )


class Session(Participant):
    """An agent's state and history: typed slices, changed by events.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Note:
    ...     text: str
    >>> session = Session()
    >>> session.dispatch(Note("hello"))
    >>> session[Note].latest()
    Note(text='hello')

    Thread-safe.
    """

    # Defaults on the class: every call makes a view, and hardly any view needs its own.
    _base: Session | None = None
    _forked_from: _Root | None = None
    _restorable: _Restorable | None = None
    tracks_reads = False
    """Whether this is a view with a read set."""
    _passed: _Passed = None
    saver: Any = None
    """The ``SavedSession`` that this session is saved by; None in views."""

    def __init__(
        self,
        *,
        parent: Session | None = None,
        dispatcher: Dispatcher | None = None,
        session_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._wiring = _Wiring(
            session_id or new_id(),
            # Not the view of a call, which is closed when the call ends.
            None if parent is None else parent._outermost(),
            dict(tags or {}),
        )
        self.dispatcher = dispatcher or (parent.dispatcher if parent else Dispatcher())
        """The bus for the runtime's records; handlers may publish on it, too."""
        self.clock = clock or (parent.clock if parent else SYSTEM_CLOCK)
        self._root: _Root = _Root({}, {})
        self._lock = RLock()
        if parent is not None:
            parent[_Child].append(_Child(self))

    def _outermost(self) -> Session:
        return self if self._base is None else self._base._outermost()

    # Who it is

    @property
    def session_id(self) -> str:
        return self._wiring.id

    @property
    def tags(self) -> Mapping[str, str]:
        return self._wiring.tags

    @property
    def parent(self) -> Session | None:
        return current_view(self._wiring.parent)

    @property
    def children(self) -> tuple[Session, ...]:
        """The sessions with this one as their parent."""
        return tuple(current_view(child.session) for child in self.read_slice(_Child))

    @property
    def prompt(self) -> Any:
        """The prompt last rendered for this session."""
        return self._wiring.prompt

    @property
    def rendered(self) -> Any:
        """The rendered form of that prompt: calls find their tools here."""
        return self._wiring.rendered

    def offer(self, prompt: Any, rendered: Any) -> None:
        """Set the rendered prompt of this session."""
        wiring = self._wiring
        last, was_it = wiring.rendered, wiring.prompt is prompt
        wiring.prompt, wiring.rendered = prompt, rendered
        if was_it and last is not None and last.says_the_same_as(rendered):
            return  # a run renders before every turn: record only changes
        event = PromptRendered(
            prompt_ns=prompt.ns,
            prompt_key=prompt.key,
            text=rendered.text,
            tool_names=tuple(tool.name for tool in rendered.tools),
            timestamp=self.clock.time(),
            sections=rendered.sections,
        )
        self.dispatch(event)
        self.dispatcher.publish(event)

    @property
    def gate(self) -> Gate | None:
        """The gate of the calls on this session; None for a view, whose call has passed it."""
        return None if self._base is not None else self._wiring.gate

    @property
    def holder(self) -> Holder | None:
        """What has objects to itself for tools that another program runs in this session."""
        return self._wiring.holder

    @holder.setter
    def holder(self, holder: Holder | None) -> None:
        self._wiring.holder = holder

    @property
    def depth(self) -> int:
        """How many nested calls this is a view of; 0 for a session."""
        return 0 if self._base is None else self._base.depth + 1

    def is_view_of(self, other: Session) -> bool:
        """Whether this was forked from the other, directly or not."""
        here: Session | None = self
        while here is not None:
            if here is other:
                return True
            here = here._base
        return False

    def is_related_to(self, other: Session) -> bool:
        """Whether both belong to one tree of parents and children."""
        return self._top()._wiring is other._top()._wiring

    def _top(self) -> Session:
        return self if self._wiring.parent is None else self._wiring.parent._top()

    def __repr__(self) -> str:
        kind = "Session" if self._base is None else "view of Session"
        found = {**self._root.state, **self._root.log}
        slices = ", ".join(f"{each.__name__}: {len(items)}" for each, items in found.items())
        return f"<{kind} {self.session_id}{': ' if slices else ''}{slices}>"

    # Reading and changing

    def record_of(self, call_id: str) -> ToolInvoked | None:
        """Return the newest record of a call, or None. Costs what was recorded since the last look.

        In the view of a call, the records of calls nested in it count, too.
        """
        view, wiring = current_view(self), self._wiring
        with wiring.lock:
            records = _slice_in(self._outermost()._root, ToolInvoked)
            known = records.shared_with(wiring.indexed)
            if known < len(wiring.indexed):  # the log was cleared
                wiring.by_call, known = {}, 0
            wiring.by_call.update((each.call_id, each) for each in records.newer_than(known))
            wiring.indexed = records
            found = wiring.by_call.get(call_id)
        if view._base is not None:
            own = _slice_in(view._root, ToolInvoked)
            nested = own.newer_than(own.shared_with(records))
            found = next((each for each in reversed(nested) if each.call_id == call_id), found)
        return found

    def __getitem__(self, slice_type: type[T]) -> SliceAccessor[T]:
        if not isinstance(slice_type, type) and not isinstance(  # pyright: ignore[reportUnnecessaryIsInstance]
            getattr(slice_type, "__origin__", None), type
        ):
            raise TypeError(f"session[...] takes the type of a slice, got {slice_type!r}")
        return SliceAccessor(self, slice_type)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Session cannot be pickled or copied: transfer session.snapshot().to_json(), and "
            "restore it in another one"
        )

    def read_slice(self, slice_type: type[T]) -> Slice[T]:
        """Return the present slice, which is immutable."""
        # current_view, inlined: policies read on every call.
        transaction = transaction_under_way.get()
        if transaction is None or transaction.session is self:
            target = self
        else:
            target = transaction.view(self)
        if target.tracks_reads:
            return target._observed(slice_type, _whole)
        root = target._root
        found = root.state.get(slice_type)
        return found if found is not None else root.log.get(slice_type, EMPTY)

    def select(self, slice_type: type[T], query: Callable[[Slice[T]], V]) -> V:
        """Return the result of a pure function of a slice; see ``session[T].select``."""
        transaction = transaction_under_way.get()
        if transaction is None or transaction.session is self:
            target = self
        else:
            target = transaction.view(self)
        if target.tracks_reads:
            return target._observed(slice_type, query)
        root = target._root
        found = root.state.get(slice_type)
        return query(found if found is not None else root.log.get(slice_type, EMPTY))

    def select_here(
        self, slice_type: type[T], query: Callable[[Slice[T]], V], subject: str = ""
    ) -> V:
        """Like ``select``, on exactly this session or view; ``subject`` is for conflicts."""
        if self.tracks_reads:
            return self._observed(slice_type, query, subject)
        return query(_slice_in(self._root, slice_type))

    def slice_here(self, slice_type: type[T]) -> Slice[T]:
        """Return a slice of exactly this session or view without adding it to the read set."""
        return _slice_in(self._root, slice_type)

    def _observed(
        self, slice_type: type[T], query: Callable[[Slice[T]], V], subject: str = ""
    ) -> V:
        """Return the answer and add it to the read set."""
        with self._lock:
            root = self._root
            answer = query(_slice_in(root, slice_type))
            newest = None if root.events is None else root.events[1]
            if not (
                isinstance(newest, _Observed)
                and newest.slice_type is slice_type
                and newest.query is query
                and newest.answer is answer
            ):
                events = (root.events, _Observed(slice_type, query, answer, subject))
                self._root = _Root(root.state, root.log, events)
        return answer

    def dispatch(self, event: object) -> None:
        """Apply the event to every slice that has a reducer for its type.

        An event without a registered reducer is appended to the slice of its own type; so is an
        event of a LOG type in any case. If a reducer raises, no slice is changed, and the
        ReducerError names the reducer.
        """
        if isinstance(event, type):
            raise TypeError(
                f"dispatch takes an event, got the class {event.__name__}: write "
                f"dispatch({event.__name__}(...))"
            )
        target = current_view(self)
        with target._lock:
            target._check_change(event)
            before = target._root
            try:
                after = target._applied(before, event)
                if target._root is not before:
                    raise SessionError(
                        "a reducer must not change its session; return the next slice"
                    )
            except BaseException:
                target._root = before  # in case a reducer did change it
                raise
            target._root = after

    def change_here(self, slice_type: type[T], change: Callable[[Slice[T]], Slice[T]]) -> None:
        """Like ``session[T].update``, on exactly this session or view, even when it is sealed."""
        with self._lock:
            following = change(_slice_in(self._root, slice_type))  # its errors are the caller's
            root = self._root
            event = None if self._base is None else (root.events, _SliceChanged(slice_type, change))
            self._root = _Root({**root.state, slice_type: following}, root.log, event)

    def install(
        self,
        slice_type: type[T],
        *,
        initial: Callable[[], T] | None = None,
        policy: SlicePolicy | None = None,
    ) -> None:
        """Register the ``@reducer`` methods of a dataclass; its slice holds one value.

        ``initial`` returns the value before the first event, by default an instance of the class.
        """
        methods: dict[type, Callable[[T, Any], T]] = {}
        for event_type, method in declared_reducers(slice_type):
            if event_type in methods:
                raise SessionError(
                    f"{slice_type.__name__} has two @reducer methods for {event_type.__name__}: "
                    f"{methods[event_type].__name__} and {method.__name__}"
                )
            methods[event_type] = method
        if not methods:
            raise SessionError(
                f"{slice_type.__name__} has no @reducer(on=...) method; add one, "
                f"or register a reducer with session[{slice_type.__name__}].register(...)"
            )
        for event_type, method in methods.items():
            reduce = _method_reducer(slice_type, method, initial or slice_type)
            self[slice_type].register(event_type, reduce, policy=policy)

    def handles(self, event_type: type) -> bool:
        return event_type in self._wiring.routes

    # Snapshots

    def snapshot(self, *, tag: str = "") -> Snapshot:
        """Return a snapshot of the present state."""
        return current_view(self).snapshot_here(tag=tag)

    def snapshot_here(self, *, tag: str = "") -> Snapshot:
        with self._lock:
            root = self._root
            taken_at, serial = self.clock.time(), next(_serials)
            snapshot = Snapshot(
                root.state, root.log, tag, taken_at, self._wiring, ref(self), root.events, serial
            )
            if self._restorable is None:
                self._restorable = _Restorable()
            self._restorable.taken.add(snapshot)
        return snapshot

    def states_passed(self, *, follow: bool = True) -> list[Snapshot]:
        """Return the states before and after each call since this was last called, and the present.

        The first time, only the present. Without ``follow``, no further states are kept.
        """
        with self._lock:
            roots: list[_Root] = []
            here, self._passed = self._passed, () if follow else None
            while here:
                here, before, after = here
                roots += (after, before)
            present = self.snapshot_here()
            at = present.taken_at
            return [*(Snapshot(r.state, r.log, taken_at=at) for r in reversed(roots)), present]

    def restore(self, snapshot: Snapshot) -> None:
        """Set every STATE slice to what the snapshot holds; LOG slices stay as they are.

        Newer snapshots cannot be restored afterwards. A snapshot taken in a call can be restored
        later if that call was committed.
        """
        target = current_view(self)
        with target._lock:
            # Restoring an unchanged savepoint is always allowed: a failing block in a read-only
            # tool must end with its own error.
            unchanged = target._root.state is snapshot.state
            if target._sealed is not None or not (unchanged and target.has_savepoint(snapshot)):
                target._check_change(snapshot)
            target.restore_here(snapshot)

    def can_restore(self, snapshot: Snapshot) -> bool:
        try:
            current_view(self)._check_restorable(snapshot)
        except (SnapshotError, SnapshotExpired):
            return False
        return True

    def restore_here(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._check_restorable(snapshot)
            limit, restorable = math.inf, self._restorable
            if self.has_savepoint(snapshot):
                # Drop the events since the savepoint, except for what they logged.
                left = self._left_of(self._events_since(snapshot.events))
                root = _Root(snapshot.state, self._root.log, _appended(snapshot.events, left))
            else:
                replaced = _StateReplaced(snapshot.state, snapshot, self._owner_of(snapshot))
                root, limit = self._applied(self._root, replaced), snapshot.serial
            if snapshot.wiring is not None:
                restorable = self._restorable_after(snapshot.serial, limit)
            self._root, self._restorable = root, restorable

    def took(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is of this session, or of a view of it."""
        return snapshot.wiring is self._wiring

    def has_savepoint(self, snapshot: object) -> bool:
        """Whether a snapshot was taken in exactly this session or view, and is still valid."""
        if not isinstance(snapshot, Snapshot) or snapshot.owner() is not self:
            return False
        return self._restorable is not None and snapshot in self._restorable.taken

    def go_to(self, snapshot: Snapshot) -> None:
        """Like ``restore_here``, but expired snapshots are valid, too."""
        try:
            self.restore_here(snapshot)
        except SnapshotExpired:
            with self._lock:
                self._root = self._applied(self._root, _StateReplaced(snapshot.state))

    def reset(self) -> None:
        """Empty every STATE slice and drop the children; LOG slices stay."""
        self.dispatch(_StateReplaced({}))

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, **options: Any) -> Session:
        """Return a new session with a snapshot's STATE and LOG slices."""
        session = cls(**options)
        session.hold(snapshot)
        return session

    def hold(self, snapshot: Snapshot) -> None:
        """Replace all STATE and LOG slices by those of a snapshot; the children stay."""
        with self._lock:
            here = self._root.state
            state = {kind: values for kind, values in here.items() if kind is _Child}
            state |= {kind: each for kind, each in snapshot.state.items() if kind is not _Child}
            # ``register`` may have set other policies than the types declare.
            policies = {kind: policy for policy, kind, _ in snapshot.slices()}
            self._wiring.policies = {**self._wiring.policies, **policies}
            self._root = _Root(state, snapshot.log)

    def register_like(self, other: Session) -> None:
        """Register the reducers and slice policies that another session has."""
        wiring, given = self._wiring, other._wiring
        with wiring.lock:
            wiring.routes = {**wiring.routes, **given.routes}
            wiring.policies = {**wiring.policies, **given.policies}
            wiring.default_routes.clear()
            wiring.change_routes.clear()

    def _check_restorable(self, snapshot: Snapshot) -> None:
        if snapshot.wiring is not None:
            if not self.took(snapshot):
                raise SnapshotError(
                    "the snapshot is of another session; transfer it with to_json and from_json"
                )
            if self._owner_of(snapshot) is None:
                raise SnapshotExpired(
                    f"snapshot {snapshot.tag!r} has expired: an older one was restored, or the "
                    "call that took it was not committed"
                )
        for slice_type in snapshot.state:
            if self._wiring.policy(slice_type) is SlicePolicy.LOG:
                raise SnapshotError(
                    f"the slice of {slice_type.__name__} is STATE in the snapshot and LOG here"
                )

    def _restorable_after(self, serial: int, limit: float) -> _Restorable:
        before = self._restorable or _Restorable()
        kept = list(before.up_to(serial))
        if len(kept) == len(before.taken) and before.limit <= limit:
            return before  # the common case: the newest one was restored
        return _Restorable(kept, min(before.limit, limit))

    def _owner_of(self, snapshot: Snapshot) -> Session | None:
        """Return the session or view, this one or an outer one, that can restore a snapshot."""
        here: Session | None = self
        while here is not None:
            restorable = here._restorable
            if restorable is not None:
                if snapshot in restorable.taken:
                    return here
                if snapshot.serial > restorable.limit:
                    return None
            here = here._base
        return None

    # Views

    def fork(self, *, tracks_reads: bool = True) -> Session:
        """Return a private view: it starts with the present state and sees no later changes.

        A view that tracks reads cannot be merged once something it read has changed here.
        """
        view = Session.__new__(Session)
        root = self._root
        view._wiring = self._wiring
        view.dispatcher = self.dispatcher
        view.clock = self.clock
        # A root without events need not be copied.
        view._root = root if root.events is None else _Root(root.state, root.log)
        view._base = self
        view._forked_from = root
        view._lock = RLock()
        if tracks_reads or self.tracks_reads:
            view.tracks_reads = True
        return view

    @property
    def has_changes(self) -> bool:
        """Whether this view has made changes."""
        return not all(isinstance(entry, _Observed) for entry in self._events_since(None))

    def merge(self, view: Session) -> None:
        """Commit a view's changes, all or nothing. The view continues from the result.

        If this session has changed since the fork, the view's events are dispatched again on the
        present state, so that appends and counters add up.

        Raises:
            MergeConflict: Something the view has read has changed here since the fork.
        """
        if view._base is not self:
            raise SessionError("only a view that was forked from this session can be merged")
        with view._lock:
            if not self.is_writable and view.has_changes:
                self._check_change(view)
            self.settle(view, keep=True)

    def check_conflicts(self, view: Session) -> None:
        """Raise MergeConflict if something the view has read has changed here since the fork."""
        with self._lock:
            if self._root is not view._forked_from:
                self._replayed(self._root, view)

    def settle(
        self,
        view: Session | None,
        *,
        keep: bool,
        record: object = None,
        transaction: Any = None,
        first: Callable[[Snapshot], bool] | None = None,
    ) -> None:
        """End a view and add a record, in one step that also marks a ``transaction`` as settled.

        With ``keep``, all changes are committed, otherwise only events and records for LOG slices.
        Reducers that fail on those are skipped and logged: a rollback must not fail. A refused
        call has no view, only a record.

        ``first`` gets the state to come, and may still fail; nothing can after it. It returns
        whether that state is encoded already.
        """
        with self._lock:
            if self._sealed is not None:
                raise ViewClosed(self._sealed)
            root, restorable = self._root, self._restorable
            if view is not None and keep:
                if view._restorable is not None:
                    with view._lock:  # an abandoned handler may still take snapshots
                        restorable = (restorable or _Restorable()).merged(view._restorable)
                if root is view._forked_from:
                    # Nothing has changed since the fork: the view's slices are the result.
                    outcome, events = view._root, root.events
                    if self._base is not None:
                        events = _appended(events, view._events_since(None))
                    if outcome is not root or events is not root.events:
                        root = _Root(outcome.state, outcome.log, events)
                else:
                    root = self._replayed(root, view)
            elif view is not None:
                root = self._forgotten(root, view._events_since(None))
            if record is not None:
                root = self._applied(root, record) if keep else self._forgotten(root, [record])
            is_encoded = first is not None and first(
                Snapshot(root.state, root.log, taken_at=self.clock.time())
            )
            passed = self._passed
            if passed is not None and record is not None and not is_encoded:
                passed = (passed, self._root, root)
            # The commit point: one statement, so that an interrupt finds all of it done or none.
            if transaction is not None:
                self._root, self._restorable, self._passed, transaction.settled = (
                    root, restorable, passed, True
                )  # fmt: skip
            elif view is not None:
                self._root, self._restorable, view._root, view._forked_from, view._restorable = (
                    root, restorable, _Root(root.state, root.log), root, None
                )  # fmt: skip

    # How events apply

    def _check_change(self, change: object) -> None:
        if self._sealed is not None or self.read_only is not None:
            self.check_writable(_named(change))

    def _applied(self, root: _Root, event: object) -> _Root:
        """Return the state after an event; raises ReducerError."""
        if isinstance(event, _Entry):
            return self._entry_applied(root, event)
        state, log = root.state, root.log
        wiring = self._wiring
        kind = type(event)
        routes = wiring.routes.get(kind) or wiring.default_routes.get(kind)
        for route in routes or wiring.routes_for(event):
            if route.is_log:
                log = _reduced(log, route, event)
            else:
                state = _reduced(state, route, event)
        return _Root(state, log, None if self._base is None else (root.events, event))

    def _entry_applied(self, root: _Root, entry: _Entry) -> _Root:
        state, log = root.state, root.log
        if isinstance(entry, _Observed):
            entry.check(root)
        elif isinstance(entry, _StateReplaced):
            if entry.snapshot is not None and entry.owner is not None:
                self._check_replayed(entry.snapshot, entry.owner)
            state = entry.state
        elif isinstance(entry, _RolledBack):
            tried = root
            for event in entry.entries:
                tried = self._applied(tried, event)
            log = self._with_logged(log, entry.logged)
        return _Root(state, log, None if self._base is None else (root.events, entry))

    def _check_replayed(self, snapshot: Snapshot, owner: Session) -> None:
        """Raise MergeConflict if an older snapshot has been restored meanwhile."""
        if not self.is_view_of(owner):
            return  # it belonged to a view in between
        try:
            self._check_restorable(snapshot)
        except SnapshotExpired as error:
            raise MergeConflict(
                f"Changed by another call in the meantime: {error}", (f"snapshot {snapshot.tag!r}",)
            ) from error

    def _replayed(self, root: _Root, view: Session) -> _Root:
        """Return a newer state after the events of a view."""
        try:
            for event in view._events_since(None):
                root = self._applied(root, event)
        except ReducerError as error:
            raise MergeConflict(f"Changed by another call in the meantime: {error}") from error
        return root

    def _forgotten(self, root: _Root, entries: list[object]) -> _Root:
        """Return the state after entries were rolled back: their events for LOG slices stay."""
        left = self._left_of(entries)
        if not left:
            return root
        log = root.log
        for each in left:
            log = self._with_logged(log, each.logged)
        events = None if self._base is None else _appended(root.events, left)
        return _Root(root.state, log, events)

    def _left_of(self, entries: list[object]) -> list[_RolledBack]:
        """Return what remains of entries in a view's events when they are rolled back."""
        # Do not wrap leading _RolledBack entries again: they would nest deeper with each restore.
        first = next((n for n, e in enumerate(entries) if not isinstance(e, _RolledBack)), None)
        if first is None:
            return cast("list[_RolledBack]", entries)
        leading = cast("list[_RolledBack]", entries[:first])
        rest = entries[first:]
        logged = tuple(event for entry in rest for event in self._logged_by(entry))
        if not logged and not self.tracks_reads:
            return leading
        return [*leading, _RolledBack(logged, tuple(rest) if self.tracks_reads else ())]

    def _logged_by(self, entry: object) -> tuple[object, ...]:
        """Return the events of an entry for LOG slices."""
        if isinstance(entry, _Entry):
            return entry.logged if isinstance(entry, _RolledBack) else ()
        is_logged = any(route.is_log for route in self._wiring.routes_for(entry))
        return (entry,) if is_logged else ()

    def _with_logged(self, log: _Slices, events: Iterable[object]) -> _Slices:
        for event in events:
            for route in self._wiring.routes_for(event):
                if route.is_log:
                    try:
                        log = _reduced(log, route, event)
                    except ReducerError:
                        _logger.exception("a LOG lacks an event of a call that was rolled back")
        return log

    def _events_since(self, mark: _Events) -> list[object]:
        found: list[object] = []
        here = self._root.events
        while here is not None and here is not mark:
            here, event = here
            found.append(event)
        found.reverse()
        return found


def _appended(events: _Events, entries: Iterable[object]) -> _Events:
    for entry in entries:
        events = (events, entry)
    return events


def _change(current: Slice[Any], event: Any) -> Any:
    return event.change(current)


def _reduced(slices: _Slices, route: _Route, event: object) -> _Slices:
    """Return the slices after one reducer."""
    slice_type = route.slice_type
    current = slices.get(slice_type, EMPTY)
    try:
        reduced = route.reduce(current, event)
        following = reduced if isinstance(reduced, Slice) else _sliced(slice_type, reduced)
    except Exception as error:
        what = (
            _named(event)
            if isinstance(event, _SliceChanged)
            else f"the reducer of slice {slice_type.__name__} on {_named(event)}"
        )
        raise ReducerError(
            f"{what} failed: {type(error).__name__}: {error}; no slice was changed"
        ) from error
    if following is current:
        return slices
    if route.refuses_changeable:
        for value in (event,) if route.holds_events else following.not_in(current):
            found = changeable(value)
            if found is not None:
                _refuse(slice_type, found)
    return {**slices, slice_type: following}


def _sliced(slice_type: type, reduced: Any) -> Slice[Any]:
    """Return what a reducer made as a slice; refuse what is no sequence of its values."""
    if reduced is None or isinstance(reduced, str | slice_type):
        raise TypeError(f"it must return all values of the slice, got {reduced!r}")
    values = Slice[Any].of(reduced)
    for value in values:
        if not isinstance(value, slice_type):
            raise TypeError(f"it must return values of type {slice_type.__name__}, got {value!r}")
    return values


def _refuse(slice_type: type, found: str) -> NoReturn:
    raise SessionError(
        f"session[{slice_type.__name__}] cannot hold a value that can be changed in place, "
        f"because no rollback could restore it: {found}"
    )


def _method_reducer(
    slice_type: type[T], method: Callable[[T, Any], T], initial: Callable[[], T]
) -> Reducer[T]:
    def reduce(current: Slice[T], event: object) -> Slice[T]:
        value = current.latest()
        following = method(initial() if value is None else value, event)
        if not isinstance(following, slice_type):
            raise TypeError(
                f"{method.__name__} must return a {slice_type.__name__}, "
                f"got {type(following).__name__}"
            )
        return current.replace(following)

    return reduce
