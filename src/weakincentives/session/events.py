"""What the runtime records, and the in-process bus that carries it to subscribers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives.core.logs import get_logger
from weakincentives.session.slices import SlicePolicy, slice_policy

if TYPE_CHECKING:
    from weakincentives.core.budget import TokenUsage
    from weakincentives.tool_result import ToolResult

E = TypeVar("E")

_logger = get_logger(__name__)

EDITED = "the arguments were edited"
"""The note of a call whose arguments a person has edited; notes of policies begin with a name."""
SUSPENDED = "SUSPENDED"
"""The code of a suspended call."""

telemetry: Any = None
"""The ``Telemetry`` of the process; None until ``instrument`` sets it."""


@slice_policy(SlicePolicy.LOG)
@dataclass(slots=True, kw_only=True)  # not frozen: every call makes one, at a third of the cost
class ToolInvoked:
    """One call, however it ended. Every call leaves exactly one."""

    tool_name: str
    params: object
    """The parsed parameters; if they could not be parsed, what the model sent."""
    result: ToolResult[Any]
    success: bool
    timestamp: float
    """When the call began, in unix seconds."""
    duration: float
    """Seconds."""
    call_id: str
    ran: bool = False
    """Whether the handler was started: False for every refusal."""
    notes: tuple[str, ...] = ()
    """The notes of policies: who approved it, for example."""
    policies: tuple[str, ...] = ()
    """The names of the policies that were asked, in order: the last one denied it, if any did."""
    denied_by: str = ""
    """The policy that denied it."""
    place: int | None = None
    """The call's place among the calls of its turn; the first is 0."""
    attempts: int = 1
    """How often it ran: more than once if it conflicted with another call of the turn."""
    conflicts: tuple[str, ...] = ()
    """What others had changed when it was re-run: slices by type, files by path."""
    nested_in: str = ""
    """The id of the call that made this one: both are committed, or both undone."""

    @property
    def edited(self) -> bool:
        """Whether a person has edited the arguments: ``params`` are the edited ones."""
        return EDITED in self.notes

    @property
    def suspended(self) -> bool:
        """Whether the call waits for an answer from outside: it was rolled back, to be re-run."""
        failure = self.result.failure
        return failure is not None and failure.code == SUSPENDED


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRendered:
    """A prompt was rendered for a model."""

    prompt_ns: str
    prompt_key: str
    text: str
    tool_names: tuple[str, ...]
    timestamp: float
    sections: tuple[tuple[str, int], ...] = ()
    """The path of each section in the text, and its length; two line ends are between them."""


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExecuted:
    """The evaluation of a prompt has ended."""

    prompt_ns: str
    prompt_key: str
    adapter: str
    stop_reason: str
    timestamp: float
    duration: float
    usage: TokenUsage | None = None


class Dispatcher:
    """Publishes events to the subscribers of their type and of its base classes.

    Subscribers of the event's own type come first, each type's in the order in which they
    subscribed. A subscriber that raises is logged; the others still get the event.

    >>> bus = Dispatcher()
    >>> seen = []
    >>> unsubscribe = bus.subscribe(str, seen.append)
    >>> bus.publish("hello")
    >>> seen
    ['hello']
    """

    def __init__(self) -> None:
        # Both are replaced, never changed: publishing reads them without a lock.
        self._subscriptions: tuple[tuple[type, Callable[[Any], object]], ...] = ()
        self._by_event: dict[type, tuple[Callable[[Any], object], ...]] = {}
        """The subscribers of an event type, base classes included; found with the first event."""
        self._lock = threading.RLock()

    def subscribe(
        self, event_type: type[E], subscriber: Callable[[E], object]
    ) -> Callable[[], None]:
        """Call ``subscriber`` with every event of this type or a subtype.

        Returns a function that ends the subscription.
        """
        if inspect.iscoroutinefunction(subscriber):
            raise TypeError("a subscriber must not be async: publishing does not await it")
        subscription = (event_type, subscriber)  # by identity: a function may subscribe twice

        def unsubscribe() -> None:
            with self._lock:
                left = tuple(each for each in self._subscriptions if each is not subscription)
                self._subscriptions, self._by_event = left, {}

        with self._lock:
            self._subscriptions, self._by_event = (*self._subscriptions, subscription), {}
        return unsubscribe

    def publish(self, event: object) -> None:
        subscribers = self._by_event.get(type(event))
        if subscribers is None:
            subscribers = self._found(type(event))
        for subscriber in subscribers:
            try:
                subscriber(event)
            except Exception:
                name, fields = type(event).__name__, {}
                if isinstance(event, ToolInvoked):  # the call has ended by now
                    fields = {"call_id": event.call_id, "tool": event.tool_name}
                _logger.exception("subscriber %r failed on %s", subscriber, name, extra=fields)

    def _found(self, event_type: type) -> tuple[Callable[[Any], object], ...]:
        with self._lock:
            found = tuple(
                subscriber
                for cls in event_type.__mro__
                for wanted, subscriber in self._subscriptions
                if wanted is cls
            )
            self._by_event = {**self._by_event, event_type: found}
        return found
