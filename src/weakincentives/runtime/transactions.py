"""Transactions: all of a call's changes, or none.

A call works on views of everything that takes part (see ``participant``). ``Transaction`` commits
or undoes the views of one call; the functions below it do the same by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weakincentives.call import ToolCall
from weakincentives.errors import ResourceError, SnapshotExpired, ViewClosed, WinkError
from weakincentives.locks import undisturbed
from weakincentives.logs import get_logger
from weakincentives.participant import Participant, can_fork, participant_for
from weakincentives.resources import ResourceContext, Snapshotable, ToolScope, as_resolver
from weakincentives.runtime.session import Session, Snapshot

if TYPE_CHECKING:
    from asyncio import Event

    from weakincentives.prompt.contracts import Effect
    from weakincentives.prompt.tool import ToolContext
    from weakincentives.prompt.tool_result import ToolResult
    from weakincentives.runtime.events import ToolInvoked
    from weakincentives.runtime.ledger import OutcomeLedger

T = TypeVar("T")

_logger = get_logger(__name__)
_AS_IT_IS = nullcontext()


def _restore_all(tokens: Sequence[tuple[str, Participant, Any]]) -> dict[str, str]:
    """Restore newest first; one that fails does not keep the others from it.

    Returns the names of those that failed, each with what to say about it.
    """
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


class NeedsItsPlace(WinkError):
    """A call asked for what only one call at a time can have."""


@dataclass(frozen=True, slots=True)
class Member:
    """A nested call that was kept, and what takes it back when the call it belongs to fails."""

    call: ToolCall
    effects: tuple[Effect, ...]
    result: ToolResult[Any]
    ledger: OutcomeLedger | None
    """Where it is on record, when it reaches outside."""


class Place:
    """A call's place among the calls of one turn."""

    __slots__ = ("arrived", "attempts", "beside", "conflicts", "number", "reached")

    def __init__(self, number: int, reached: Event | None = None) -> None:
        self.number = number
        self.reached = reached
        """Done when all calls before it have ended; None for a call that runs alone."""
        self.beside = reached is not None
        self.arrived = False
        self.attempts = 1
        self.conflicts: tuple[str, ...] = ()


class Transaction:
    """What one call changes. Ends once, with ``commit`` or ``roll_back``."""

    # Defaults on the class: every call makes one, and most calls need none of these.
    settled = False
    reads_only = False
    """Whether writes are refused; also in a call that is nested in one that only reads."""
    beside = False
    """Whether other calls run at the same time: it gets private views, and what it reads counts."""
    at_place = True
    """Whether all calls before it in its turn have ended. Until then it must not touch what can
    only be changed in place."""
    needs_place = False
    """Whether it tried to, all the same: it is taken again when its place is reached."""
    attempt = 1
    """How often its call has been taken by now, this time included."""
    committed = False
    nested: tuple[ToolInvoked | Callable[[], object], ...] = ()
    """In a call beside others, the records of calls nested in it: told to subscribers with its
    own."""
    parent: Transaction | None = None
    """The transaction of the call that this one is nested in."""
    _kept: tuple[object, ...] = ()
    forks: tuple[tuple[str, Participant, Participant], ...] = ()
    """What was forked for the call: its name, itself and the call's view of it."""
    _merged: tuple[tuple[str, Participant, Any], ...] = ()
    _sealed = False
    _journalled = False
    _scope: ToolScope | None = None
    members: tuple[Member, ...] = ()
    """The nested calls that a snapshot alone does not take back, in the order they were made."""
    after_commit: tuple[tuple[Effect, ToolResult[Any]], ...] = ()
    """What is to follow once nothing can be taken back; a nested call leaves it to its parent."""

    def __init__(
        self,
        call: ToolCall,
        session: Session,
        resources: ResourceContext,
        parent: Transaction | None,
        outer: ToolContext,
        place: Place | None = None,
    ) -> None:
        self.call = call
        self.context = outer
        """What surrounds the call: the context it was made with, not the one it hands out."""
        self.base = session
        if place is not None and place.beside:
            self.beside, self.at_place = True, place.arrived
            self.attempt = place.attempts
        self.session = view = session.fork(tracks_reads=self.beside)
        self.resource_context = resources
        self._views: dict[int, object] = {id(session): view, id(view): view}
        self._lock = view.lock
        if parent is not None:
            self.parent = parent
            self.reads_only = parent.reads_only
            if parent.beside:
                self.beside, self.at_place = True, self.at_place and parent.at_place

    # What a call works on

    @property
    def resources(self) -> CallResources:
        """The call's resources. Made anew each time: a transaction that held it would be a cycle,
        and what a call made is best freed when the call ends, not when the collector comes by.
        """
        return CallResources(self)

    @property
    def scope(self) -> ToolScope:
        """The lifetime of resources that are the call's own; made when first needed."""
        if self._scope is None:
            with self._lock:
                self._scope = self._scope or ToolScope(self.resource_context, self)
        return self._scope

    @property
    def participants(self) -> tuple[tuple[str, Participant], ...]:
        """All that takes part in transactions, under its own name."""
        return (
            self.resource_context.participants if self._scope is None else self._scope.participants
        )

    def resource(self, kind: type[T]) -> T:
        """Return the resource bound for a type: this call's view, where it can fork."""
        self.check_open()
        instance = self.resource_context.built(kind)
        if instance is None:
            instance = self.scope.get(kind)
        if can_fork(instance):
            return self.view(instance)
        self.check_place(self.resource_context.in_place)
        return instance

    @property
    def lineage(self) -> tuple[Transaction, ...]:
        """Those it is nested in, the outermost first, and itself."""
        return (self,) if self.parent is None else (*self.parent.lineage, self)

    def check_place(self, in_place: object = None) -> None:
        """Refuse what leads to something that is changed in place, until its place is reached.

        Any resource may: one that cannot fork may hold another that only snapshots.
        """
        if self.at_place or not (self.needs_place or in_place):
            return
        here: Transaction | None = self
        while here is not None and here.beside:
            here.needs_place = True
            here = here.parent
        raise NeedsItsPlace(
            "a resource that cannot fork is changed in place, so this call cannot run beside "
            "others; it is taken again at its place"
        )

    def is_bound(self, kind: type) -> bool:
        return kind in self.resource_context.registry

    def view(self, target: T) -> T:
        """Return this call's view of an object, or the object where it takes no part."""
        found = self._views.get(id(target))
        if found is not None:
            return found  # type: ignore[return-value]
        with self._lock:  # a handler's threads may ask at once, and must get the same view
            return self._view(target)

    def _view(self, target: T) -> T:
        base = target if self.parent is None else self.parent.view(target)
        view: Any = self._views.get(id(base))
        if view is None:
            if isinstance(target, Session) and self.base.is_view_of(target):
                view = self.session
            else:
                name = self._name_of(target, base)
                if name is None:
                    return target
                view = self._fork(name, cast("Participant", participant_for(base)))
        # Kept alive: an id in the table must not be given to another object.
        self._kept = (*self._kept, target)
        self._views[id(target)] = view
        return view

    def covers(self, view: object) -> bool:
        """Whether an object is one of this call's views."""
        return self._views.get(id(view)) is view

    def _name_of(self, target: object, base: object) -> str | None:
        """Return what to call an object that takes part by forking; None for all others."""
        if isinstance(target, Session):
            return f"session {target.session_id}" if target.is_related_to(self.base) else None
        if can_fork(target):
            for name, participant in self.participants:
                if participant.exposed is target:
                    return name
            if target is self.context.given_memory:
                return type(target).__name__
            if base is not target or (self.parent is not None and self.parent.covers(target)):
                return type(target).__name__
        return None

    def _fork(self, name: str, base: Participant) -> Any:
        """Return what the call works with in place of a participant."""
        if not base.journalled:
            return self._adopt(name, base, base.fork())
        if self._sealed and not self.beside:
            # An abandoned handler comes to it only now. It would keep all others out, and nobody
            # would end it.
            raise ViewClosed(self._end_reason())
        self._journalled = True
        with undisturbed():  # a view that is not in the list could not be undone
            return self._adopt(name, base, base.fork() if self.beside else base.fork_in_place())

    def _adopt(self, name: str, base: Participant, view: Participant) -> Any:
        if self.reads_only:
            view.read_only = _reads_only(self.call)
        if self._sealed:
            view.seal(self._end_reason())
        self.forks = (*self.forks, (name, base, view))
        exposed = view.exposed
        self._views[id(base.exposed)] = self._views[id(exposed)] = exposed
        return exposed

    def read_only(self) -> None:
        """Refuse every write from here on; what the runtime itself remembers comes later."""
        self.reads_only = True
        self.session.read_only = _reads_only(self.call)
        for _, _, view in self.forks:
            view.read_only = self.session.read_only

    def take_snapshots(self, *, external: bool = False) -> None:
        """Note the state of every resource that is changed in place.

        ``external`` tells those that can look for it to expect changes from elsewhere.
        """
        if self.at_place:
            for name, participant in self.resource_context.in_place:
                self._take_snapshot(name, participant)
        if external:
            for _, participant in self.participants:
                if participant.journalled:
                    self.view(participant).expect_external()

    def built(self, name: str, instance: Snapshotable, /) -> None:
        """Note the state of a new resource before anyone has it."""
        participant = participant_for(instance)
        if participant is not None and participant.in_place:
            self._take_snapshot(name, participant)

    def _take_snapshot(self, name: str, participant: Participant) -> None:
        if not self.at_place:
            self.needs_place = True
        elif not self.reads_only:
            self.forks = (*self.forks, (name, participant, participant.fork_in_place()))

    def holds(self, records: Sequence[ToolInvoked | Callable[[], object]]) -> bool:
        """Keep the records of nested calls until this one ends; False once it has ended."""
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
        """Keep everything and add the record, in one step as far as anyone can see."""
        self._seal()
        views = [fork for fork in self.forks if not fork[1].in_place]
        with undisturbed() if self._journalled else _AS_IT_IS:
            self._merged = tuple((name, base, base.snapshot_here()) for name, base, _ in views)
            for _, base, view in views:
                base.merge(view)
            self.base.settle(self.session, keep=True, record=record, transaction=self)
        self.committed = True

    def forget(self) -> None:
        """Leave nothing behind, not even what was logged: the call is taken again."""
        self.restore()
        self._undo_merge()
        self.settled = True

    def roll_back(self, record: object) -> None:
        """Take everything back but what was logged, and add the record. May be called again."""
        self._seal()
        self._undo_merge()
        for _, base, view in self.forks:
            if isinstance(base, Session) and isinstance(
                view, Session
            ):  # a relative of the call's session: it logs, too
                base.settle(view, keep=False)
        try:
            self.base.settle(self.session, keep=False, record=record, transaction=self)
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
                _restore_all(self._merged)
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

    @property
    def listeners(self) -> tuple[Callable[[], object], ...]:
        """How to tell resources that wait for it that what was merged into them stays."""
        return tuple(base.after_commit for _, base, _ in self.forks if not base.in_place)

    def close(self, error: BaseException | None = None) -> None:
        """End the lifetime of the call's own resources."""
        if self._scope is not None:
            self._scope.close(error)

    def check_open(self) -> None:
        """Raise ViewClosed once the call has ended."""
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


def _reads_only(call: ToolCall) -> str:
    return f"tool '{call.name}' has the reach 'read': it must not change anything"


class CallResources:
    """A call's resources: views where a resource can fork, and nothing once the call has ended."""

    __slots__ = ("transaction",)

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction

    @property
    def context(self) -> ResourceContext:
        return self.transaction.resource_context

    def get(self, kind: type[T]) -> T:
        """Return the resource bound for a type."""
        return self.transaction.resource(kind)

    def find(self, kind: type[T]) -> T | None:
        """Return the resource bound for a type, or None."""
        return self.transaction.resource(kind) if self.transaction.is_bound(kind) else None

    def view(self, target: T) -> T:
        """Return the call's view of an object, or the object where it takes no part."""
        return self.transaction.view(target)

    @property
    def snapshotables(self) -> tuple[tuple[str, Any], ...]:
        view = self.transaction.view
        return tuple((name, view(each.exposed)) for name, each in self.transaction.participants)

    def watch(self, watcher: Any) -> tuple[tuple[str, Any], ...]:
        self.transaction.scope.watch(watcher)
        return self.snapshotables


class CompositeSnapshot:
    """A session's snapshot together with those of its resources."""

    __slots__ = ("__weakref__", "_tokens", "session", "tag")

    def __init__(self, session: Snapshot, tag: str) -> None:
        self.session = session
        self.tag = tag
        self._tokens: list[tuple[str, Participant, Any]] = []

    def built(self, name: str, instance: Snapshotable, /) -> None:
        """Note a resource's state: as it is now, or right after it was first built."""
        participant = participant_for(instance)
        known = any(each.exposed is instance for _, each, _ in self._tokens)
        if participant is not None and not known:
            self._tokens.append((name, participant, participant.snapshot_here()))

    def restore_resources(self) -> None:
        """Restore every resource; one that could not be is an error, once all were tried."""
        failures = _restore_all(self._tokens)
        if failures:
            raise ResourceError("; ".join(failures.values()))


def _participants(resources: object) -> Any:
    resolver: Any = as_resolver(resources)
    return getattr(resolver, "context", resolver) if not hasattr(resolver, "watch") else resolver


def create_snapshot(
    session: Session, resources: object = None, *, tag: str = ""
) -> CompositeSnapshot:
    """Return the state of the session and of every resource that can be snapshotted.

    ``resources`` is ``prompt.resources``, an open resource context, a registry or a mapping.
    """
    snapshot = CompositeSnapshot(session.snapshot(tag=tag), tag)
    participants = _participants(resources)
    if hasattr(participants, "watch"):
        for name, resource in participants.watch(snapshot):
            snapshot.built(name, resource)
    return snapshot


def restore_snapshot(session: Session, resources: object, snapshot: CompositeSnapshot) -> None:
    """Go back to a snapshot: STATE slices and resources; LOG slices stay.

    Resources that were first built since go back to how they began. Snapshots that were taken
    after this one cannot be restored any more.
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
            # The block went back to an older snapshot itself: there is nothing left to undo.
            _logger.info("transaction %r was rolled back further than it began", tag)
        raise


class PendingToolTracker:
    """Rolls back tools that run elsewhere and are only seen to begin and to end.

    For hooks: a vendor's program tells when its own tool starts and how it ended.
    """

    def __init__(self, *, session: Session, resources: object = None) -> None:
        self._session = session
        self._resources = resources
        self._pending: dict[str, tuple[str, CompositeSnapshot]] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """The ids of tool uses that have begun and not ended."""
        return tuple(self._pending)

    def begin_tool_execution(self, *, tool_use_id: str, tool_name: str) -> None:
        """Note the state before a tool runs."""
        if tool_use_id in self._pending:
            raise ValueError(f"tool use {tool_use_id!r} has begun already")
        snapshot = create_snapshot(self._session, self._resources, tag=f"tool:{tool_name}")
        self._pending[tool_use_id] = (tool_name, snapshot)

    def end_tool_execution(self, *, tool_use_id: str, success: bool) -> bool:
        """Keep what the tool did, or roll it back; returns whether it was rolled back.

        An id that never began is no error: hooks may come twice, or for tools not tracked.
        """
        pending = self._pending.pop(tool_use_id, None)
        if pending is None:
            return False
        tool_name, snapshot = pending
        if success:
            # A tool that began earlier and failed has taken this one's changes with it.
            return not self._session.can_restore(snapshot.session)
        try:
            restore_snapshot(self._session, self._resources, snapshot)
        except SnapshotExpired:
            # A tool that began earlier was rolled back meanwhile, and this one's changes with it.
            _logger.info("tool %s was rolled back with an earlier one", tool_name)
        return True

    def abort_all(self) -> tuple[str, ...]:
        """Roll back every pending tool, the newest first; returns their ids."""
        aborted = tuple(reversed(self._pending))
        for tool_use_id in aborted:
            self.end_tool_execution(tool_use_id=tool_use_id, success=False)
        return aborted
