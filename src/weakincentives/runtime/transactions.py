"""Transactions: one attempt of a call on its way through the pipeline, and blocks by hand.

A call works on views of everything that takes part (see ``participant``), and commits or undoes
all of them. A block by hand restores snapshots.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from weakincentives.call import CancellationToken, ToolCall, transaction_under_way
from weakincentives.errors import ResourceError, SnapshotExpired, ViewClosed, WinkError
from weakincentives.events import ToolInvoked
from weakincentives.filesystem import bypass
from weakincentives.gate import Gate
from weakincentives.locks import undisturbed
from weakincentives.logs import get_logger
from weakincentives.participant import Participant, can_fork, participant_for
from weakincentives.prompt.prompt import Offer
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.resources import (
    ResourceContext,
    ResourceRegistry,
    Snapshotable,
    ToolScope,
    as_resolver,
)
from weakincentives.session import Session, Snapshot

if TYPE_CHECKING:
    from asyncio import Event

    from weakincentives.deadlines import Deadline
    from weakincentives.prompt.approval import Approval
    from weakincentives.prompt.contracts import Effect
    from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger
    from weakincentives.tool_result import ToolResult

T = TypeVar("T")

_logger = get_logger(__name__)

Recorded = ToolInvoked | Callable[[], object]
"""A record for subscribers, or a notification that goes out with it."""

_KNOWN_TO_RETRY = (
    "offer", "tool", "params", "ran", "notes", "edited", "degraded", "ledger", "started",
    "timestamp", "policies",
)  # fmt: skip
_opening = threading.Lock()
_identity = object.__hash__  # an object's address, too, but without the audit event of ``id``
NO_RESOURCES = ResourceRegistry.of().open()
"""For a context whose resources are of a class that is not ours."""


class NeedsItsPlace(WinkError):
    """A concurrent call asked for a resource that only one call at a time can use."""


@dataclass(frozen=True, slots=True)
class Member:
    """A nested call that was committed, and what undoes it when the call it belongs to fails."""

    call: ToolCall
    effects: tuple[Effect, ...]
    result: ToolResult[Any]
    params: object
    ledger: OutcomeLedger | None
    """Where it is on record, when it reaches outside."""


class Place:
    """A call's place among the calls of one turn."""

    __slots__ = ("arrived", "attempts", "conflicts", "deadline", "is_first", "number", "reached")

    def __init__(
        self,
        number: int | None,
        reached: Event | None = None,
        deadline: Deadline | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        self.number = number
        """None for the first call of a joined turn, until another joins it."""
        self.reached = reached
        """Set when all calls before it have ended; None for a call that runs alone."""
        self.deadline = deadline
        """How long to wait for that, where the calls have deadlines of their own."""
        self.is_first = self.arrived = is_first
        """Whether no call of the turn commits before it."""
        self.attempts = 1
        self.conflicts: tuple[str, ...] = ()


class Surroundings:
    """Where a call is made: in which context, among which tools, nested in which call."""

    on_loop = True
    """Whether it runs on an event loop; otherwise it is stepped by hand."""

    late = False
    """Whether the deadline passed before it was its turn."""

    kept_out: Exception | None = None
    """Why it could not enter a gate: another process has the workspace to itself, for example."""

    parent: Transaction | None = None
    """The transaction of the call that this one is nested in."""

    approval: Approval | None = None
    """What a person has decided about the call elsewhere."""

    def __init__(self, context: ToolContext, offers: Mapping[str, Offer]) -> None:
        self.context = context
        self.offers = offers
        self.session = context.session
        """What a call forks from: the session, or the view of the call it is nested in."""
        parent: Transaction | None = transaction_under_way.get()
        if parent is None and isinstance(context.resources, CallResources):
            # Called from a thread that a handler started: only its context tells where it belongs.
            parent = context.resources.transaction
        if parent is not None:
            view = parent.open().view(context.session)
            if parent.covers(view):
                self.session, self.parent = view, parent
        self.resources: ResourceContext = getattr(context.resources, "context", NO_RESOURCES)
        self.recorded: list[Recorded] = []


class Transaction:
    """One attempt of a call: what is known of it, and what it changes.

    While a call is being admitted it has no views: policies read the session as it is. The first
    of them that writes, asks for a resource or calls a tool opens the transaction, so that a
    refusal undoes that. It ends once, with ``commit`` or ``roll_back``.
    """

    # Defaults on the class: every call makes one, and most calls need few of these.

    # The call
    place: Place | None = None
    in_order = False
    """Whether calls of its turn run at the same time: it commits when its place is reached."""
    tracks_reads = False
    """Whether it has a read set of the session: calls of its turn commit before it."""
    depth = 0
    """How many cascades led here."""
    offer: Offer | None = None
    """Set when the call is admitted: a retry is not admitted again."""
    tool: Tool[Any, Any] | None = None
    ran = False
    succeeded = False
    """Whether the handler succeeded: a failure after that is not retried."""
    attempts = 1
    wait = 0.0
    """Seconds before this attempt."""
    applied: tuple[Effect, ...] = ()
    notes: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    """The names of the policies that were asked."""
    denied_by = ""
    edited: tuple[str, ...] = ()
    """What the model is told of arguments that a person has edited."""
    nested_edits: tuple[str, ...] = ()
    """The same, of the calls nested in it."""
    degraded: tuple[str, ...] = ()
    not_undone: tuple[str, ...] = ()
    bypassed: bypass.Bypassed | None = None
    """What it has changed in a workspace with plain file operations, in all its attempts."""
    compensated: bool | None = None
    """Whether all that it did outside was undone; None when that was not tried."""
    answered = False
    """Whether the handler itself said that it failed."""
    ledger: OutcomeLedger | None = None
    """Where a call that reaches outside is on record."""
    outcome: CallOutcome | None = None
    event: ToolInvoked | None = None
    stays_unknown = False
    """Whether it has only asked what became of it, so that there is nothing to compensate."""

    # What it changes
    settled = False
    committed = False
    reads_only = False
    """Whether writes are refused; also in a call that is nested in one that only reads."""
    concurrent = False
    """Whether other calls run at the same time: it gets private views that track reads."""
    at_place = True
    """Whether all calls before it in its turn have ended. Until then it must not touch what can
    only be changed in place."""
    needs_place = False
    """Whether it tried to: it is re-run when its place is reached."""
    runs = 1
    """How often the call was run in its turn, this time included."""
    parent: Transaction | None = None
    """The transaction of the call that this one is nested in."""
    nested: tuple[Recorded, ...] = ()
    """In a concurrent call, the records of calls nested in it: published with its own."""
    members: tuple[Member, ...] = ()
    """The nested calls that a snapshot alone does not undo, in the order they were made."""
    after_commit: tuple[tuple[Effect, ToolResult[Any], object], ...] = ()
    """What follows once nothing can be undone, with the call's result and parameters; a nested
    call leaves it to its parent."""
    forks: tuple[tuple[str, Participant, Participant], ...] = ()
    """What was forked for the call: its name, itself and the call's view of it."""
    views: dict[int, object] = {}  # noqa: RUF012  # replaced when the transaction is opened
    """The call's view of each object, by the object's identity."""
    _referenced: tuple[object, ...] = ()
    _merged: tuple[tuple[str, Participant, Any], ...] = ()
    _sealed = False
    _journalled = False
    _scope: ToolScope | None = None
    _gate: Gate | None = None

    def __init__(
        self,
        around: Surroundings,
        call: ToolCall,
        recorded: list[Recorded],
        place: Place | None = None,
        depth: int = 0,
    ) -> None:
        self.around = around
        self.call = call
        self.recorded = recorded
        if depth:
            self.depth = depth
        context = self.context = around.context
        """What surrounds the call; its handler gets ``bound``."""
        session = self.base = self.session = around.session
        """The session, or the view of the call that this one is nested in."""
        self.resource_context = around.resources
        if place is not None:
            self.place, self.runs = place, place.attempts
            if place.reached is not None:
                self.in_order = self.concurrent = True
                self.tracks_reads = not place.is_first
                self.at_place = place.arrived
        parent = around.parent
        if parent is not None:
            self.parent, self.reads_only = parent, parent.reads_only
            if parent.concurrent:
                self.concurrent, self.at_place = True, self.at_place and parent.at_place
        self.found: dict[type[Any], Any] = {}
        """The views of singletons that were requested by type."""
        self.params = call.params
        clock = self.clock = session.clock
        self.started = clock.monotonic()
        self.timestamp = clock.time()
        self.signal = CancellationToken()
        self.bound = context.having(
            session=session,
            resources=CallResources(self),
            call_id=call.id,
            signal=self.signal,
            config={**context.config, "tool_name": call.name},
            approval=around.approval,  # not that of the call it is nested in
        )

    @property
    def gate(self) -> Gate:
        """The gate of the calls nested in this one: threads or tasks of its handler make them."""
        if self._gate is None:
            with _opening:
                self._gate = self._gate or Gate()
        return self._gate

    def next_attempt(self, wait: float) -> Transaction:
        """Return the retry of this call: it is admitted already and starts from the state before.

        An abandoned handler keeps the context it was given.
        """
        retry = self._again()
        retry.attempts, retry.wait = self.attempts + 1, wait
        for name in _KNOWN_TO_RETRY:
            setattr(retry, name, getattr(self, name))
        retry.bound.__dict__["degraded"] = self.degraded
        return retry

    def re_run(self) -> Transaction:
        """Return this call from its start, to run on the state as it is now."""
        assert self.place is not None
        self.place.attempts += 1
        return self._again()

    def _again(self) -> Transaction:
        again = Transaction(self.around, self.call, self.recorded, self.place, self.depth)
        if self.bypassed is not None:
            again.bypassed = self.bypassed
        return again

    # What a call works on

    @property
    def is_open(self) -> bool:
        return bool(self.views)

    def open(self) -> Self:
        """Fork the session, unless that is done."""
        if not self.views:
            with _opening:  # threads of a policy may come at the same time
                if not self.views:
                    if self.settled:
                        raise ViewClosed(self._end_reason())
                    base = self.base
                    view = self.session = base.fork(tracks_reads=self.tracks_reads)
                    self._lock = view._lock  # pyright: ignore[reportPrivateUsage]
                    self.bound.__dict__["session"] = view
                    self.views = {_identity(base): view, _identity(view): view}
                    if sys.version_info < (3, 12) and self.resource_context.gates:
                        bypass.under_way.add(self)
        return self

    @property
    def scope(self) -> ToolScope:
        """The lifetime of resources that are the call's own; made when first needed."""
        if self._scope is None:
            with self.open()._lock:
                self._scope = self._scope or ToolScope(self.resource_context, self)
        return self._scope

    @property
    def participants(self) -> tuple[tuple[str, Participant], ...]:
        """The participants, by name."""
        return (self._scope or self.resource_context).participants

    def resource(self, kind: type[T]) -> T:
        """Return the resource bound for a type: this call's view, where it can fork."""
        if self.settled or not self.views:
            self.open().check_open()
        singleton = self.resource_context.instances.get(kind)
        instance = self.scope.get(kind) if singleton is None else singleton
        if not can_fork(instance):
            self.check_place(self.resource_context.in_place)
            return instance
        view = self.view(instance)
        if singleton is not None:
            self.found[kind] = view
        return view

    @property
    def lineage(self) -> tuple[Transaction, ...]:
        """The calls it is nested in, outermost first, then itself."""
        return (self,) if self.parent is None else (*self.parent.lineage, self)

    def check_place(self, in_place: object = None) -> None:
        """Refuse resources that may be changed in place, until the call's place is reached.

        Any resource without ``fork`` may be: it may hold another that only snapshots.
        """
        if self.at_place or not (self.needs_place or in_place):
            return
        here: Transaction | None = self
        while here is not None and here.concurrent:
            here.needs_place = True
            here = here.parent
        raise NeedsItsPlace(
            "a resource that cannot fork is changed in place, so this call cannot run "
            "concurrently; it is re-run in order"
        )

    def view(self, target: T) -> T:
        """Return this call's view of an object; the object itself if it is no participant."""
        views = self.views or self.open().views
        found = views.get(_identity(target))
        if found is not None:
            return found  # type: ignore[return-value]
        with self._lock:  # a handler's threads may ask at once, and must get the same view
            base = target if self.parent is None else self.parent.view(target)
            view: Any = views.get(_identity(base))
            if view is None:
                if isinstance(target, Session) and self.base.is_view_of(target):
                    view = self.session
                else:
                    found = self._participant(target, base)
                    if found is None:
                        return target
                    view = self._fork(*found, base, views)
            # Referenced, so that no other object can get an id that is in the table.
            self._referenced = (*self._referenced, target)
            views[_identity(target)] = view
            return view

    def covers(self, view: object) -> bool:
        """Whether an object is one of this call's views."""
        return self.views.get(_identity(view)) is view

    def _participant(self, target: object, base: object) -> tuple[str, Participant] | None:
        """Return the name and the participant of an object that can fork, if it is one of ours."""
        if isinstance(target, Session):
            is_related = target.is_related_to(self.base)
            return (f"session {target.session_id}", cast("Session", base)) if is_related else None
        for name, participant in (self._scope or self.resource_context).participants:
            if participant is target or participant.exposed is target:
                if participant.in_place:
                    return None
                return name, participant if base is target else _forkable(base)
        is_known = (
            target is self.context.given_memory
            or base is not target
            or (self.parent is not None and self.parent.covers(target))
        )
        return (type(target).__name__, _forkable(base)) if is_known and can_fork(target) else None

    def _fork(
        self, name: str, base: Participant, target: object, views: dict[int, object]
    ) -> object:
        """Fork a participant and return the call's view of it."""
        if base.journalled:
            if self._sealed and not self.concurrent:
                # An abandoned handler asks for it only now. It would lock out all other calls,
                # and nothing would end it.
                raise ViewClosed(self._end_reason())
            self._journalled = True
        # A view that is not in the list could not be undone. The lock is held already.
        with undisturbed() if base.journalled else self._lock:
            in_place = base.journalled and not self.concurrent
            # For a nested call, its parent forks: what is changed then belongs to the parent.
            before = transaction_under_way.set(self)
            try:
                view: Participant = base.fork_in_place() if in_place else base.fork()
            finally:
                transaction_under_way.reset(before)
            if self.reads_only:
                view.read_only = _reads_only(self.call)
            if self._sealed:
                view.seal(self._end_reason())
            self.forks = (*self.forks, (name, base, view))
            exposed = view.exposed
            views[_identity(target)] = views[_identity(exposed)] = exposed
            return exposed

    def read_only(self) -> None:
        """Refuse every write from here on; what the runtime itself remembers comes later."""
        self.reads_only = True
        self.session.read_only = _reads_only(self.call)
        for _, _, view in self.forks:
            view.read_only = self.session.read_only

    def take_snapshots(self, *, external: bool = False) -> None:
        """Note the state of every resource that is changed in place.

        With ``external``, journalled ones expect changes by other programs.
        """
        if self.at_place:
            for name, participant in self.resource_context.in_place:
                self._take_snapshot(name, participant)
        if external:
            for _, participant in self.participants:
                if participant.journalled:
                    self.view(participant).expect_external()

    def built(self, name: str, instance: Snapshotable, /) -> None:
        """Note the state of a new resource before it is handed out."""
        participant = participant_for(instance)
        if participant is not None and participant.in_place:
            self._take_snapshot(name, participant)

    def _take_snapshot(self, name: str, participant: Participant) -> None:
        if not self.at_place:
            self.needs_place = True
        elif not self.reads_only:
            self.forks = (*self.forks, (name, participant, participant.fork_in_place()))

    def holds(self, records: Sequence[Recorded]) -> bool:
        """Hold the records of nested calls back until this one ends; False once it has ended."""
        with self._lock:  # calls in threads of its handler may end at the same time
            if not self._sealed:
                self.nested = (*self.nested, *records)
            return not self._sealed

    # How it ends

    def check_conflicts(self) -> None:
        """Raise MergeConflict if the call depends on something that has changed since."""
        self.base.check_conflicts(self.session)
        for _, base, view in self.forks:
            base.check_conflicts(view)

    def commit(self, record: object) -> None:
        """Commit everything and add the record, atomically."""
        self._seal()
        if self._journalled or self.base.saver is not None:
            with undisturbed():
                self._commit(record)
        else:
            self._commit(record)
        self.committed = True

    def _commit(self, record: object) -> None:
        if self.base.saver is not None and self.saver is not None:
            from weakincentives.runtime.recovery import commit_saved

            commit_saved(self, record, self.saver)
            return
        for _, base, view in self.views_to_merge() if self.forks else ():
            base.merge(view)
        self.base.settle(self.session, keep=True, record=record, transaction=self)

    @property
    def saver(self) -> Any:
        """What saves the session, if the record that commits this call can hold its changes."""
        saver = self.base.saver
        return saver if saver is not None and saver.commits_with_calls else None

    def views_to_merge(self) -> list[tuple[str, Participant, Participant]]:
        """Return the forks to merge, and snapshot their bases first."""
        views: list[tuple[str, Participant, Participant]] = []
        for fork in self.forks:
            name, base, _ = fork
            if not base.in_place:
                views.append(fork)
                self._merged = (*self._merged, (name, base, base.snapshot_here()))
        return views

    def forget(self) -> None:
        """Leave nothing behind, not even what was logged: the call is re-run."""
        self.event = None
        self.restore()
        self._undo_merge()
        self.settled = True
        self.signal.cancel("the call is re-run")

    def roll_back(self, record: object) -> None:
        """Undo everything but what was logged, and add the record. May be called again."""
        if self.is_open:
            self._seal()
            self._undo_merge()
            for _, base, view in self.forks:
                if isinstance(base, Session) and isinstance(view, Session):
                    base.settle(view, keep=False)  # a relative of the call's session: it logs, too
        view = self.session if self.is_open else None
        try:
            self.base.settle(view, keep=False, record=record, transaction=self)
        except ViewClosed:
            self.settled = True
            _logger.error("the record of this call is lost: the call that made it has ended")

    def restore(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Restore what was changed in place; returns what is undone and what could not be."""
        self._seal()
        if self.reads_only:
            return (), ()
        with undisturbed(self._journalled):
            failures = self._discard(self.forks)
        names = dict.fromkeys(name for name, _, _ in self.forks)
        return ("session", *(n for n in names if n not in failures)), tuple(failures.values())

    def _undo_merge(self) -> None:
        if self.forks:
            with undisturbed(self._journalled):
                restore_all(self._merged)
                self._discard([fork for fork in self.forks if not fork[1].in_place])

    def _discard(self, forks: Sequence[tuple[str, Participant, Participant]]) -> dict[str, str]:
        """Undo what views have changed; returns by name what could not be undone."""
        failures: dict[str, str] = {}
        for name, base, view in reversed(forks):
            try:
                left = base.discard(view)
            except Exception as error:
                left = (_failure(name, error),)
            if left:
                failures[name] = "; ".join(left)
        return failures

    def close(self, error: BaseException | None = None) -> None:
        """End the lifetime of the call's own resources."""
        # No cycle: what a call made is freed when the call ends, not by the collector.
        self.__dict__.pop("bound", None)
        if sys.version_info < (3, 12):
            bypass.under_way.discard(self)
        if self._scope is not None:
            self._scope.close(error)

    def check_open(self) -> None:
        if self.settled:
            raise ViewClosed(self._end_reason())

    def _end_reason(self) -> str:
        return f"call {self.call.id} to tool '{self.call.name}' has ended"

    def _seal(self) -> None:
        reason = self._end_reason()
        with self._lock:
            self._sealed = True
            self.session.seal(reason)
        for _, _, view in self.forks:
            view.seal(reason)


def _forkable(instance: object) -> Participant:
    return cast("Participant", participant_for(instance))


def _reads_only(call: ToolCall) -> str:
    return f"tool '{call.name}' has the reach 'read': it must not change anything"


def restore_all(tokens: Sequence[tuple[str, Participant, Any]]) -> dict[str, str]:
    """Restore newest first, whatever fails; returns by name what could not be restored."""
    failures: dict[str, str] = {}
    for name, participant, token in reversed(tokens):
        try:
            participant.restore_here(token)
        except Exception as error:
            failures[name] = _failure(name, error)
    return failures


def _failure(name: str, error: Exception) -> str:
    _logger.error("restoring %s failed", name, exc_info=error)
    return f"{name} could not be restored: {error}"


class CallResources:
    """A call's resources: views where a resource can fork, and nothing once the call has ended."""

    __slots__ = ("transaction",)

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction

    @property
    def context(self) -> ResourceContext:
        return self.transaction.resource_context

    def get(self, kind: type[T]) -> T:
        transaction = self.transaction
        found = transaction.found.get(kind)
        if found is None or transaction.settled:
            return transaction.resource(kind)
        return found

    def find(self, kind: type[T]) -> T | None:
        transaction = self.transaction
        found = transaction.found.get(kind)
        if found is None or transaction.settled:
            is_bound = kind in transaction.resource_context.bindings
            return transaction.resource(kind) if is_bound else None
        return found

    def view(self, target: T) -> T:
        """Return the call's view of an object; the object itself if it is no participant."""
        return self.transaction.view(target)

    @property
    def snapshotables(self) -> tuple[tuple[str, Any], ...]:
        view = self.transaction.view
        return tuple((name, view(each.exposed)) for name, each in self.transaction.participants)

    def watch(self, watcher: Any) -> tuple[tuple[str, Any], ...]:
        self.transaction.scope.watch(watcher)
        return self.snapshotables


# Transactions by hand


class CompositeSnapshot:
    """A session's snapshot together with those of its resources."""

    __slots__ = ("__weakref__", "_tokens", "session", "tag")

    def __init__(self, session: Snapshot, tag: str) -> None:
        self.session = session
        self.tag = tag
        self._tokens: list[tuple[str, Participant, Any]] = []

    def built(self, name: str, instance: Snapshotable, /) -> None:
        """Snapshot a resource, existing or just built."""
        participant = participant_for(instance)
        known = any(each.exposed is instance for _, each, _ in self._tokens)
        if participant is not None and not known:
            self._tokens.append((name, participant, participant.snapshot_here()))

    def restore_resources(self) -> None:
        """Restore every resource; raise ResourceError at the end if any failed."""
        failures = restore_all(self._tokens)
        if failures:
            raise ResourceError("; ".join(failures.values()))


def create_snapshot(
    session: Session, resources: object = None, *, tag: str = ""
) -> CompositeSnapshot:
    """Return the state of the session and of every resource that can be snapshotted.

    ``resources`` is ``prompt.resources``, an open resource context, a registry or a mapping.
    """
    snapshot = CompositeSnapshot(session.snapshot(tag=tag), tag)
    resolver: Any = as_resolver(resources)
    if not hasattr(resolver, "watch"):  # of a prompt
        resolver = getattr(resolver, "context", None)
    if resolver is not None:
        for name, resource in resolver.watch(snapshot):
            snapshot.built(name, resource)
    return snapshot


def restore_snapshot(session: Session, resources: object, snapshot: CompositeSnapshot) -> None:
    """Restore a snapshot: STATE slices and resources; LOG slices stay.

    Resources that were first built since return to their initial state. Snapshots that were taken
    after this one expire.
    """
    session.restore(snapshot.session)
    snapshot.restore_resources()


@contextmanager
def tool_transaction(
    session: Session, resources: object = None, *, tag: str = ""
) -> Generator[CompositeSnapshot]:
    """Roll the session and resources back when the block raises. Blocks nest as savepoints."""
    snapshot = create_snapshot(session, resources, tag=tag)
    try:
        yield snapshot
    except BaseException:  # an interrupted block must not leave half its writes
        try:
            restore_snapshot(session, resources, snapshot)
        except SnapshotExpired:
            # The block restored an older snapshot itself: there is nothing left to undo.
            _logger.info("transaction %r was rolled back past its start", tag)
        raise


class PendingToolTracker:
    """Rolls back tools that another program runs, from hooks at their start and end."""

    def __init__(self, *, session: Session, resources: object = None) -> None:
        self._session = session
        self._resources = resources
        self._pending: dict[str, tuple[str, CompositeSnapshot]] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """The ids of tool uses under way."""
        return tuple(self._pending)

    def begin_tool_execution(self, *, tool_use_id: str, tool_name: str) -> None:
        if tool_use_id in self._pending:
            raise ValueError(f"tool use {tool_use_id!r} has begun already")
        snapshot = create_snapshot(self._session, self._resources, tag=f"tool:{tool_name}")
        self._pending[tool_use_id] = (tool_name, snapshot)

    def end_tool_execution(self, *, tool_use_id: str, success: bool) -> bool:
        """Commit what the tool did, or roll it back; returns whether it was rolled back.

        An unknown id is no error: hooks may come twice, or for tools that are not tracked.
        """
        pending = self._pending.pop(tool_use_id, None)
        if pending is None:
            return False
        tool_name, snapshot = pending
        if success:
            # The rollback of a tool that began earlier has undone this one, too.
            return not self._session.can_restore(snapshot.session)
        try:
            restore_snapshot(self._session, self._resources, snapshot)
        except SnapshotExpired:
            # The rollback of a tool that began earlier has undone this one, too.
            _logger.info("tool %s was rolled back with an earlier one", tool_name)
        return True

    def abort_all(self) -> tuple[str, ...]:
        """Roll back every pending tool, the newest first; returns their ids."""
        aborted = tuple(reversed(self._pending))
        for tool_use_id in aborted:
            self.end_tool_execution(tool_use_id=tool_use_id, success=False)
        return aborted
