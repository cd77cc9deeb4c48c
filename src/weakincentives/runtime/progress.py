"""One call on its way through the pipeline: the one object that holds its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weakincentives.call import CancellationToken, ToolCall
from weakincentives.errors import ViewClosed
from weakincentives.logs import get_logger
from weakincentives.prompt.prompt import Offer
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.resources import ResourceContext, ResourceRegistry, ToolScope
from weakincentives.runtime.events import ToolInvoked
from weakincentives.runtime.session import Session
from weakincentives.runtime.transactions import CallResources, Place, Transaction

if TYPE_CHECKING:
    from weakincentives.prompt.contracts import Effect
    from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger

__all__ = ["Progress", "Recorded", "offers_of", "resource_context"]

T = TypeVar("T")

_logger = get_logger(__name__)

Recorded = ToolInvoked | Callable[[], object]
"""A record for subscribers, or a notification that goes out with it."""

_NO_RESOURCES = ResourceRegistry.of().open()


class Progress:
    """What is known of a call so far.

    While a call is being admitted it has no transaction: policies read the session as it is. The
    first of them that writes, asks for a resource or calls a tool opens it, so that a refusal
    takes that back. Until then this object stands for the transaction.
    """

    # Defaults on the class: most calls end without setting all of them.
    transaction: Transaction | None = None
    """That of the attempt under way; None until the call is admitted."""
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
    late = False
    """Whether its deadline passed before it was its turn."""

    def __init__(
        self,
        call: ToolCall,
        offers: Mapping[str, Offer],
        context: ToolContext,
        session: Session,
        parent: Transaction | None,
        recorded: list[Recorded],
        *,
        place: Place | None = None,
        depth: int = 0,
        on_loop: bool = True,
    ) -> None:
        self.call = call
        self.offers = offers
        self.context = context
        """What surrounds the call; its handler gets ``bound``."""
        self.base = self.session = session
        """The session, or the view of the call that this one is nested in."""
        self.parent = parent
        self.recorded = recorded
        self.place = place
        self.beside = place is not None and place.beside
        """Whether other calls of its turn run at the same time."""
        self.depth = depth
        """How many cascades led here."""
        self.on_loop = on_loop
        self.resource_context = resource_context(context)
        self.params = call.params
        clock = self.clock = session.clock
        self.started = clock.monotonic()
        self.timestamp = clock.time()
        self._bind()

    def _bind(self) -> None:
        context, call = self.context, self.call
        self.signal = CancellationToken()
        resources: Any = CallResources(cast("Transaction", self))
        bound = self.bound = context.bound_to(self.base, resources, call.id, self.signal)
        bound.__dict__["config"] = {**context.config, "tool_name": call.name}

    def next_attempt(self, wait: float) -> Progress:
        """Return the retry of this call: it is admitted already and starts from the state before.

        An abandoned handler keeps what it was given.
        """
        following = copy(self)
        following.attempts, following.wait = self.attempts + 1, wait
        following.transaction, following.session = None, self.base
        following._bind()
        if self.degraded:
            following.bound.__dict__["degraded"] = self.degraded
        return following

    def run_again(self) -> Progress:
        """Return this call from its start, for a state that has changed since."""
        assert self.place is not None
        self.place.attempts += 1
        return Progress(
            self.call,
            self.offers,
            self.context,
            self.base,
            self.parent,
            self.recorded,
            place=self.place,
            depth=self.depth,
            on_loop=self.on_loop,
        )

    @property
    def is_settled(self) -> bool:
        """Whether it is committed or undone, and on record."""
        return self.settled if self.transaction is None else self.transaction.settled

    def record_refusal(self, event: ToolInvoked) -> None:
        """Record a call that never had a transaction."""
        try:
            this = cast("Transaction", self)
            self.base.settle(None, keep=False, record=event, transaction=this)
        except ViewClosed:
            self.settled = True
            _logger.error("the record of this call is lost: the call that made it has ended")
        # Not a cycle any more: what a call made is best freed when the call ends.
        self.bound.__dict__["resources"] = self.context.resources

    # What a transaction offers to policies, until there is one

    def open(self) -> Transaction:
        """Return the transaction of this attempt."""
        transaction = self.transaction
        if transaction is None:
            with self.base.lock:
                if self.transaction is None:
                    self.transaction = self._opened()
                transaction = self.transaction
        return transaction

    def _opened(self) -> Transaction:
        transaction = Transaction(
            self.call, self.base, self.resource_context, self.parent, self.context, self.place
        )
        fields = self.bound.__dict__
        self.session = fields["session"] = transaction.session
        fields["resources"] = transaction.resources
        return transaction

    def view(self, target: T) -> T:
        return self.open().view(target)

    def resource(self, kind: type[T]) -> T:
        return self.open().resource(kind)

    def is_bound(self, kind: type) -> bool:
        return kind in self.resource_context.registry

    @property
    def snapshotables(self) -> tuple[tuple[str, Any], ...]:
        return self.open().snapshotables

    @property
    def scope(self) -> ToolScope:
        return self.open().scope

    @property
    def lineage(self) -> tuple[Transaction, ...]:
        return self.open().lineage


def offers_of(context: ToolContext) -> Mapping[str, Offer]:
    """Return the tools that a call in this context can name."""
    rendered = context.rendering
    return {} if rendered is None else rendered.offers


def resource_context(context: ToolContext) -> ResourceContext:
    """Return what a context's resources are taken from, whatever call it is bound to."""
    resources: Any = context.resources
    if isinstance(resources, ResourceContext):
        return resources
    return getattr(resources, "context", _NO_RESOURCES)
