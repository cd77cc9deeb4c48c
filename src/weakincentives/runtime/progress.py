"""One call on its way through the pipeline: the one object that holds its state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weakincentives.call import CancellationToken, ToolCall, transaction_under_way
from weakincentives.errors import ViewClosed
from weakincentives.logs import get_logger
from weakincentives.participant import Participant
from weakincentives.prompt.prompt import Offer
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.resources import ResourceContext, ResourceRegistry, ToolScope
from weakincentives.runtime.events import ToolInvoked
from weakincentives.runtime.transactions import CallResources, Place, Transaction

if TYPE_CHECKING:
    from weakincentives.prompt.contracts import Effect
    from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger

T = TypeVar("T")

_logger = get_logger(__name__)

Recorded = ToolInvoked | Callable[[], object]
"""A record for subscribers, or a notification that goes out with it."""

_KEPT = ("offer", "tool", "params", "ran", "notes", "degraded", "ledger", "started", "timestamp")
"""What a retry knows already."""
_opening = threading.Lock()
_NO_RESOURCES = ResourceRegistry.of().open()


class Surroundings:
    """Where a call is made: in which context, among which tools, nested in which call."""

    late = False
    """Whether the deadline passed before it was its turn."""

    parent: Transaction | None = None
    """That of the call which this one is nested in."""

    def __init__(self, context: ToolContext, offers: Mapping[str, Offer]) -> None:
        self.context = context
        self.offers = offers
        self.session = context.session
        """What a call forks from: the session, or the view of the call it is nested in."""
        resources: Any = context.resources
        parent = transaction_under_way.get()
        if parent is None and isinstance(resources, CallResources):
            # Called from a thread that a handler started: only its context tells where it belongs.
            parent = resources.transaction
        if parent is not None:
            parent = opened(parent)
            view = parent.view(context.session)
            if parent.covers(view):
                self.session, self.parent = view, parent
        self.resources = resources_of(context)
        self.recorded: list[Recorded] = []


class Progress:
    """What is known of a call so far.

    While a call is being admitted it has no transaction: policies read the session as it is. The
    first of them that writes, asks for a resource or calls a tool opens it, so that a refusal
    takes that back. Until then this object stands for the transaction.
    """

    # Defaults on the class: most calls end without setting all of them.
    transaction: Transaction | None = None
    """That of the attempt under way; None until the call is admitted."""
    place: Place | None = None
    beside = False
    """Whether other calls of its turn run at the same time."""
    depth = 0
    """How many cascades led here."""
    settled = False
    """Whether a call that never had a transaction is on record."""
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
    denied_by = ""
    degraded: tuple[str, ...] = ()
    not_undone: tuple[str, ...] = ()
    compensated: bool | None = None
    """Whether all that it did outside was undone; None when nobody tried."""
    answered = False
    """Whether the handler itself said that it failed."""
    ledger: OutcomeLedger | None = None
    """Where a call that reaches outside is on record."""
    outcome: CallOutcome | None = None
    event: ToolInvoked | None = None

    def __init__(
        self,
        around: Surroundings,
        call: ToolCall,
        recorded: list[Recorded],
        place: Place | None = None,
        on_loop: bool = True,
        depth: int = 0,
    ) -> None:
        self.around = around
        self.call = call
        self.recorded = recorded
        if place is not None:
            self.place, self.beside = place, place.beside
        self.on_loop = on_loop
        if depth:
            self.depth = depth
        context = self.context = around.context
        """What surrounds the call; its handler gets ``bound``."""
        self.parent = around.parent
        session = self.base = self.session = around.session
        """The session, or the view of the call that this one is nested in."""
        self.params = call.params
        clock = self.clock = session.clock
        self.started = clock.monotonic()
        self.timestamp = clock.time()
        self.signal = CancellationToken()
        # Of this call until it has a transaction, then of that.
        self._resources = CallResources(self)  # type: ignore[arg-type]
        bound = self.bound = context.bound_to(session, self._resources, call.id, self.signal)
        bound.__dict__["config"] = {**context.config, "tool_name": call.name}

    def next_attempt(self, wait: float) -> Progress:
        """Return the retry of this call: it is admitted already and starts from the state before.

        An abandoned handler keeps what it was given.
        """
        following = Progress(
            self.around, self.call, self.recorded, self.place, self.on_loop, self.depth
        )
        following.attempts, following.wait = self.attempts + 1, wait
        for name in _KEPT:
            setattr(following, name, getattr(self, name))
        following.bound.__dict__["degraded"] = self.degraded
        return following

    def run_again(self) -> Progress:
        """Return this call from its start, for a state that has changed since."""
        assert self.place is not None
        self.place.attempts += 1
        return Progress(self.around, self.call, self.recorded, self.place, self.on_loop, self.depth)

    def record_refusal(self, event: ToolInvoked) -> None:
        """Record a call that never had a transaction."""
        try:
            this = cast("Transaction", self)
            self.base.settle(None, keep=False, record=event, transaction=this)
        except ViewClosed:
            self.settled = True
            _logger.error("the record of this call is lost: the call that made it has ended")
        # No cycle: what a call made is best freed when the call ends.
        del self._resources, self.bound

    # What a transaction offers to policies, until there is one

    def open(self) -> Transaction:
        """Return the transaction of this attempt; it is made when first needed."""
        if self.transaction is None:
            with _opening:  # threads of a policy may come at the same time
                if self.transaction is None:
                    resources = self.around.resources
                    transaction = self.transaction = Transaction(
                        self.call, self.base, resources, self.parent, self.context, self.place
                    )
                    self.session = self.bound.__dict__["session"] = transaction.session
                    self._resources.transaction = transaction
        return self.transaction

    def view(self, target: T) -> T:
        return self.open().view(target)

    def resource(self, kind: type[T]) -> T:
        return self.open().resource(kind)

    def is_bound(self, kind: type) -> bool:
        return kind in self.around.resources.registry

    @property
    def resource_context(self) -> ResourceContext:
        return self.around.resources

    @property
    def participants(self) -> tuple[tuple[str, Participant], ...]:
        return self.open().participants

    @property
    def scope(self) -> ToolScope:
        return self.open().scope

    @property
    def lineage(self) -> tuple[Transaction, ...]:
        return self.open().lineage


def opened(under_way: Transaction | Progress) -> Transaction:
    """Return a transaction also for a call that is being admitted: a policy calls a tool."""
    return under_way.open() if isinstance(under_way, Progress) else under_way


def offers_of(context: ToolContext) -> Mapping[str, Offer]:
    """Return the tools that a call in this context can name."""
    rendered = context.rendering
    return {} if rendered is None else rendered.offers


def resources_of(context: ToolContext) -> ResourceContext:
    """Return what a context's resources are taken from, whatever call it is bound to."""
    resources: Any = context.resources
    if isinstance(resources, ResourceContext):
        return resources
    return getattr(resources, "context", _NO_RESOURCES)
