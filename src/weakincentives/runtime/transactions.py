"""Transactions: one attempt of a call on its way through the pipeline.

A call works on views of everything that takes part (see ``participant``), and commits or undoes
all of them. Blocks by hand, which restore snapshots instead, are in ``snapshots``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from weakincentives.core.call import CancellationToken, ToolCall, transaction_under_way
from weakincentives.core.gate import Gate, Holder, InUse, Lease, ObjectGate, TooLate, running_loop
from weakincentives.core.locks import defer_interrupts
from weakincentives.core.logs import get_logger
from weakincentives.errors import (
    DeadlineExceededError,
    ViewClosed,
    WinkError,
)
from weakincentives.filesystem import bypass
from weakincentives.prompt.prompt import OfferedTool
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.resources import (
    ResourceContext,
    ResourceRegistry,
    Snapshotable,
    ToolScope,
    in_gate_order,
)
from weakincentives.session.events import ToolInvoked
from weakincentives.session.participant import (
    Participant,
    can_fork,
    not_restored,
    participant_for,
    restore_all,
)
from weakincentives.session.session import Session, Snapshot

if TYPE_CHECKING:
    from asyncio import Event

    from weakincentives.core.clock import Clock
    from weakincentives.core.deadlines import Deadline
    from weakincentives.prompt.approval import Approval
    from weakincentives.prompt.contracts import Effect
    from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger
    from weakincentives.tool_result import ToolResult

T = TypeVar("T")

_logger = get_logger(__name__)

Recorded = ToolInvoked | Callable[[], object]
"""A record for subscribers, or a notification that goes out with it."""

_opening = threading.Lock()
_identity = object.__hash__  # an object's address, too, but without the audit event of ``id``
block_under_way: ContextVar[Holder | None] = ContextVar("wink_block_under_way", default=None)
"""What holds the gates of the innermost ``tool_transaction`` block."""
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


class TurnSlot:
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


class CallSetting:
    """Where a call is made: in which context, among which tools, nested in which call."""

    on_loop = True
    """Whether it runs on an event loop; otherwise it is stepped by hand."""

    late = False
    """Whether the deadline passed before it was its turn."""

    gate_error: Exception | None = None
    """Why it could not enter a gate: another process has the workspace to itself, for example."""

    parent: Transaction | None = None
    """The transaction of the call that this one is nested in."""

    made_in: Transaction | None = None
    """The transaction of a call whose handler makes this one, which does not belong to it."""

    approval: Approval | None = None
    """What a person has decided about the call elsewhere."""

    loop: Any = None
    """The event loop that it runs on, once its handler does."""

    leases: Mapping[Gate, Lease] = MappingProxyType({})
    """By the gate: what lets it read beside the call that is inside."""

    enters_first: tuple[ObjectGate, ...] = ()
    """Gates that an attempt could not wait for: the next one enters them before anything else."""

    def __init__(self, context: ToolContext, offers: Mapping[str, OfferedTool]) -> None:
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
            else:
                self.made_in = parent
        self.resources: ResourceContext = getattr(context.resources, "context", NO_RESOURCES)
        self.recorded: list[Recorded] = []
        self.entered: Holder | None = None
        """What holds the gates of objects that are changed in place; a new one for each attempt."""

    @property
    def holder(self) -> Holder:
        """What holds the gates of this call and of all calls nested in it."""
        entered = self.entered
        if entered is not None:
            return entered if entered.outer is None else entered.root
        if self.parent is not None:
            return self.parent.around.holder
        if self.entered is None:
            inside = None if self.made_in is None else self.made_in.lineage[0].around.entered
            outer = block_under_way.get() or self.session.holder
            with _opening:
                self.entered = self.entered or Holder(outer, inside)
            self.entered.passed = self.session.gate
        # In a block by hand, everything is held until the block ends: it may roll back.
        return self.entered.root

    @property
    def made_under(self) -> Holder | None:
        """What holds gates meanwhile: the call whose handler makes this one, or a block by hand."""
        if self.made_in is not None:
            return self.made_in.around.holder
        block = block_under_way.get()
        return None if block is None else block.root

    def leave(self) -> None:
        """Leave the gates of objects that are changed in place."""
        if self.entered is not None:
            self.entered.close()
            self.entered = None


class Asked:
    """What was asked, and what admission found: all attempts of a call share it.

    Only the pipeline changes it, from the call's admission until its handler starts.
    """

    # Defaults on the class: every call makes one, and most calls need few of these.
    offer: OfferedTool | None = None
    """Set when the handler starts: a retry is not admitted again."""
    tool: Tool[Any, Any] | None = None
    ran = False
    """Whether the handler was started."""
    notes: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    """The names of the policies that were asked."""
    denied_by = ""
    edited: tuple[str, ...] = ()
    """What the model is told of arguments that a person has edited."""
    degraded: tuple[str, ...] = ()
    """Failed preconditions that are not critical."""
    ledger: OutcomeLedger | None = None
    """Where a call that reaches outside is on record."""

    def __init__(self, params: object, clock: Clock) -> None:
        self.params = params
        self.started = clock.monotonic()
        self.timestamp = clock.time()


class Transaction:
    """One attempt of a call: what was asked, what the attempt changes, and how it ended.

    While a call is being admitted it has no views: policies read the session as it is. The first
    of them that writes, asks for a resource or calls a tool opens the transaction, so that a
    refusal undoes that. It ends once, with ``commit`` or ``roll_back``.
    """

    # Defaults on the class: every call makes one, and most calls need few of these.

    # The call
    place: TurnSlot | None = None
    in_order = False
    """Whether calls of its turn run at the same time: it commits when its place is reached."""
    tracks_reads = False
    """Whether it has a read set of the session: calls of its turn commit before it."""
    depth = 0
    """How many cascades led here."""
    succeeded = False
    """Whether the handler succeeded: a failure after that is not retried."""
    attempts = 1
    wait = 0.0
    """Seconds before this attempt."""
    applied: tuple[Effect, ...] = ()
    nested_edits: tuple[str, ...] = ()
    """What the model is told of edited arguments of the calls nested in it."""
    not_undone: tuple[str, ...] = ()
    abandoned: tuple[tuple[str, Callable[[], bool]], ...] = ()
    """The tools whose handlers did not end in time, nested ones too, and whether each has since."""
    bypassed: bypass.Bypassed | None = None
    """What it has changed in a workspace with plain file operations, in all its attempts."""
    compensated: bool | None = None
    """Whether all that it did outside was undone; None when that was not tried."""
    answered = False
    """Whether the handler itself said that it failed."""
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
    gated = True
    """Whether it enters the gates of what it takes part with; not while a person is asked."""
    in_use: InUse | None = None
    """What it could not wait for: it is re-run, if it may be."""
    races: int = 0
    """How often it has lost a race against a transaction elsewhere."""
    _entered: tuple[tuple[str, Participant], ...] = ()
    """Those of its context that are changed in place and whose gates it has entered."""
    _covered: object = ()
    """The same, once it takes part with all of them."""
    _late: tuple[tuple[str, Participant], ...] = ()
    """Those that were built in the call and whose gate was not free."""
    _ended: tuple[Participant, ...] = ()
    """The views that were merged or discarded."""
    _failures: Mapping[str, str] = MappingProxyType({})
    """By name, what could not be undone."""
    _referenced: tuple[object, ...] = ()
    _merged: tuple[tuple[str, Participant, Any], ...] = ()
    _sealed = False
    _journalled = False
    _scope: ToolScope | None = None
    _gate: Gate | None = None

    def __init__(
        self,
        around: CallSetting,
        call: ToolCall,
        recorded: list[Recorded],
        place: TurnSlot | None = None,
        depth: int = 0,
        asked: Asked | None = None,
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
        clock = self.clock = session.clock
        self.asked = asked = asked or Asked(call.params, clock)
        self.signal = CancellationToken()
        self.bound = context.having(
            session=session,
            resources=CallResources(self),
            call_id=call.id,
            signal=self.signal,
            config={**context.config, "tool_name": call.name},
            degraded=asked.degraded,
            approval=around.approval,  # not that of the call it is nested in
        )

    @property
    def tool(self) -> Tool[Any, Any] | None:
        return self.asked.tool

    @property
    def ledger(self) -> OutcomeLedger | None:
        return self.asked.ledger

    @property
    def started(self) -> float:
        return self.asked.started

    def note_degraded(self, failed: tuple[str, ...]) -> None:
        """Note preconditions that do not hold, for the handler and the record."""
        self.asked.degraded = self.bound.__dict__["degraded"] = failed

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
        retry = self._again(self.asked)
        retry.attempts, retry.wait = self.attempts + 1, wait
        return retry

    def re_run(self) -> Transaction:
        """Return this call from its start, to run on the state as it is now."""
        if self.place is not None:
            self.place.attempts += 1
        return self._again()

    def _again(self, asked: Asked | None = None) -> Transaction:
        again = Transaction(self.around, self.call, self.recorded, self.place, self.depth, asked)
        if self.races:
            again.races, again.asked.started = self.races, self.asked.started
        if self.bypassed is not None:
            again.bypassed = self.bypassed
        if self.abandoned:
            again.abandoned = self.abandoned
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
            in_place = self.resource_context.in_place
            self.check_place(in_place)
            if in_place is not self._covered or self._late:
                self._take_part_late(in_place)
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
        if base.in_call_order:
            self.check_place(base)
        if base.journalled or base.commits_last:
            if self._sealed and not self.concurrent:
                # An abandoned handler asks for it only now. It would lock out all other calls,
                # and nothing would end it.
                raise ViewClosed(self._end_reason())
            self._journalled = True
        # A view that is not in the list could not be undone. The lock is held already.
        with defer_interrupts() if base.journalled else self._lock:
            in_place = base.journalled and not self.concurrent
            # For a nested call, its parent forks: what is changed then belongs to the parent.
            before = transaction_under_way.set(self)
            try:
                view: Participant
                leases = self.around.leases
                lease = leases.get(base.gate) if leases and base.gate is not None else None
                if lease is not None:
                    view = base.fork_to_read(lease)
                else:
                    view = base.fork_in_place() if in_place else base.fork()
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

    def take_snapshots(self) -> None:
        """Note the state of every resource that is changed in place and whose gate was entered."""
        for name, participant in self._entered:
            self._take_part(name, participant)
        self._covered = self._entered

    def expect_external(self) -> None:
        """Have journalled resources expect changes by other programs."""
        for _, participant in self.participants:
            if participant.journalled:
                self.view(participant).expect_external()

    async def enter_gates(self) -> None:
        """Enter the gates of what the call takes part with from its start, in their order.

        A call that only reads takes part with what it requests, when it does.
        """
        around, context = self.around, self.resource_context
        in_place, gates, self.gated = context.in_place, context.object_gates, True
        tool = self.asked.tool
        only_reads = self.reads_only or (tool is not None and tool.reach == "read")
        if only_reads or not self.at_place:
            in_place, gates = (), ()
        if around.enters_first:
            every = {*around.enters_first, *gates}
            gates = tuple(sorted(every, key=lambda gate: gate.serial))
        if not gates:
            return
        holder, deadline = around.holder, self.context.deadline
        try:
            if around.on_loop:
                holder.loop = running_loop()
                await holder.enter_on_loop(gates, deadline)
            else:
                holder.enter(gates, deadline)
        except InUse as error:
            self._note_in_use(error)
            raise
        except TooLate:
            raise _too_late() from None
        self._entered = in_place

    def leave_gates(self) -> bool:
        """Leave all gates while a person is asked, as if the call had taken part with nothing.

        Not those of a call that this one is nested in, which may have changed something: then
        this returns False.
        """
        if self.parent is not None:
            return False
        self.gated = False
        if self.around.entered is not None:
            in_place = [fork for fork in self.forks if fork[1].in_place]
            self._discard(in_place)
            self.forks = tuple(fork for fork in self.forks if fork not in in_place)
            self._entered, self._covered = (), ()
            self.around.leave()
        return True

    def built(self, name: str, instance: Snapshotable, /) -> None:
        """Take part with a new resource before it is handed out; a provider may return a known one.

        The lock of the context is held, so this must not wait for a gate.
        """
        participant = participant_for(instance)
        if participant is not None and participant.in_place:
            if not self.at_place:
                self.needs_place = True
            elif self.gated and not self._live_holder().try_enter(gate_of_one((name, participant))):
                self._late = (*self._late, (name, participant))
            else:
                self._take_part(name, participant)

    def _take_part_late(self, in_place: tuple[tuple[str, Participant], ...]) -> None:
        """Take part with what is changed in place and was not there when the call began."""
        if not self.at_place or not self.gated:
            return
        late = in_gate_order((*in_place, *self._late))
        holder = self._live_holder()
        for each in late:
            try:
                self._enter_late(holder, gate_of_one(each))
            except InUse as error:
                self._note_in_use(error)
                raise
            except TooLate:
                raise _too_late() from None
            self._take_part(*each)
        self._covered, self._late = in_place, ()

    def _live_holder(self) -> Holder:
        """Return what holds the gates; raises ViewClosed to an abandoned handler."""
        holder = self.around.holder
        # In this order: what is there before the call ends is closed with it.
        self.lineage[0].check_open()
        return holder

    def _enter_late(self, holder: Holder, gate: ObjectGate) -> None:
        if holder.try_enter(gate):
            return
        if self.around.on_loop and running_loop() is not None:
            # To wait here would stop the event loop, perhaps the one that the call inside needs.
            raise InUse(f"another call is using {gate.subject_name}. Try again", gate, may_end=True)
        holder.loop = self.around.loop
        holder.enter((gate,), self.context.deadline)

    def _note_in_use(self, error: InUse) -> None:
        """Have the outermost call re-run once the gate is free."""
        for each in self.lineage:
            each.in_use = error

    def _take_part(self, name: str, participant: Participant) -> None:
        """Note the state of a resource that is changed in place, unless that is done."""
        if self.reads_only:
            return
        if self.parent is not None:  # which may be rolled back when this call has ended
            self.parent._take_part(name, participant)
        with self._lock:  # threads of a handler may come at the same time
            exposed, forks = participant.exposed, self.forks
            if not forks or not any(e[1].in_place and e[1].exposed is exposed for e in forks):
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
            with defer_interrupts():
                self._commit(record)
        else:
            self._commit(record)
        self.committed = True

    def _commit(self, record: object) -> None:
        if self.base.saver is not None and self.saver is not None:
            from weakincentives.runtime.recovery import commit_saved

            commit_saved(self, record, self.saver)
            return
        views = self.views_to_merge() if self.forks else ()
        for _, base, view in views:
            if not base.commits_last:
                self.merge(base, view)
        last = [each for each in views if each[1].commits_last]

        def commit_last(after: Snapshot) -> bool:
            if self.base.saver is not None:
                from weakincentives.runtime.recovery import keep_in_databases

                keep_in_databases(self, last, self.base.saver)
            self.merge_last(last)
            return False  # the state is not encoded yet

        first = commit_last if last else None
        self.base.settle(self.session, keep=True, record=record, transaction=self, first=first)

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
            if base.commits_last:
                views.append(fork)
            elif not base.in_place:
                views.append(fork)
                self._merged = (*self._merged, (name, base, base.snapshot_here()))
        return views

    def merge(self, base: Participant, view: Participant) -> None:
        """Commit one view. It is not discarded afterwards, whatever becomes of the call."""
        base.merge(view)
        self._ended += (view,)

    def merge_last(self, views: Sequence[tuple[str, Participant, Participant]]) -> None:
        """Commit the views whose commit is final."""
        done: list[str] = []
        for name, base, view in views:
            try:
                self.merge(base, view)
            except BaseException:
                if done:
                    committed = " and ".join(done)
                    self.not_undone += (f"{committed} was committed before {name} failed",)
                raise
            done.append(name)

    @property
    def lost_race(self) -> Participant | None:
        """The view that a transaction elsewhere kept from going on, if nothing is final yet."""
        if any(base.commits_last and self._has_ended(view) for _, base, view in self.forks):
            return None
        return next((view for _, _, view in self.forks if view.lost_race), None)

    def _has_ended(self, view: Participant) -> bool:
        return any(view is ended for ended in self._ended)

    def forget(self) -> None:
        """Leave nothing behind, not even what was logged: the call is re-run."""
        self.event = None
        self.undo()
        self.settled = True
        self.signal.cancel("the call is re-run")

    def undo(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Fence off the views and undo what they changed; may be called again.

        Returns the names of what is undone, and a sentence for each thing that could not be.
        """
        if not self.is_open:
            return (), ()
        self._seal()
        if self.forks:
            with defer_interrupts(self._journalled):
                self._discard(self.forks)
                self._failures = {**self._failures, **restore_all(self._merged)}
                self._merged = ()
        if self.reads_only:
            return (), ()
        failures, (changing, said) = self._failures, self.still_changing()
        names = dict.fromkeys(name for name, _, _ in self.forks)
        undone = (name for name in names if name not in failures and name not in changing)
        return ("session", *undone), (*failures.values(), *said)

    def roll_back(self, record: object) -> None:
        """End the session's view, after ``undo``: what was logged stays, and the record is added.

        May be called again.
        """
        view = None
        if self.is_open:
            view = self.session
            for _, base, other in self.forks:
                if isinstance(base, Session) and isinstance(other, Session):
                    base.settle(other, keep=False)  # a relative of the session: it logs, too
        try:
            self.base.settle(view, keep=False, record=record, transaction=self)
        except ViewClosed:
            self.settled = True
            _logger.error("the record of this call is lost: the call that made it has ended")

    def _discard(self, forks: Sequence[tuple[str, Participant, Participant]]) -> None:
        """Undo what views have changed, each once."""
        for name, base, view in reversed(forks):
            if self._has_ended(view):
                continue
            try:
                left = base.discard(view)
            except Exception as error:
                left = (not_restored(name, error),)
            if left:
                self._failures = {**self._failures, name: "; ".join(left)}
            self._ended += (view,)  # last: an interrupted discard is repeated

    def abandon(self, tool_name: str, has_ended: Callable[[], bool]) -> None:
        """Note a handler that goes on after its call has ended."""
        for each in self.lineage:
            each.abandoned = (*each.abandoned, (tool_name, has_ended))

    def still_changing(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of what abandoned handlers can still change, and the same in words.

        The session, files and views are fenced; an object that is changed in place is not.
        """
        if not self.abandoned:
            return (), ()
        running = dict.fromkeys(name for name, has_ended in self.abandoned if not has_ended())
        names = tuple(dict.fromkeys(name for name, base, _ in self.forks if base.in_place))
        if not running or not names:
            return (), ()
        who = " and ".join(f"'{name}'" for name in running)
        said = f"the handler of {who} is still running and can still change {', '.join(names)}"
        return names, (said,)

    def close(self, error: BaseException | None = None) -> None:
        """End the lifetime of the call's own resources, and leave its gates."""
        # No cycle: what a call made is freed when the call ends, not by the collector.
        self.__dict__.pop("bound", None)
        if sys.version_info < (3, 12):
            bypass.under_way.discard(self)
        try:
            if self._scope is not None:
                self._scope.close(error)
        finally:
            if self.around.entered is not None:
                self.around.leave()

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


def gate_of_one(in_place: tuple[str, Participant]) -> ObjectGate:
    return cast("ObjectGate", in_place[1].object_gate)


def _too_late() -> DeadlineExceededError:
    return DeadlineExceededError("The deadline passed while the call waited for earlier calls")


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
