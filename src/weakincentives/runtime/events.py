"""What the runtime records, and the in-process bus that carries it to subscribers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives.logs import get_logger
from weakincentives.slices import SlicePolicy, slice_policy

if TYPE_CHECKING:
    from weakincentives.budget import TokenUsage
    from weakincentives.prompt.tool_result import ToolResult

E = TypeVar("E")

_logger = get_logger(__name__)

SUSPENDED = "SUSPENDED"
"""The code of a call that waits for somebody outside."""

telemetry: Any = None
"""The slot for ``Telemetry``: one for the whole process, empty until ``instrument`` fills it."""


@slice_policy(SlicePolicy.LOG)
@dataclass(slots=True, kw_only=True)  # not frozen: every call makes one, at a third of the cost
class ToolInvoked:
    """One call, however it ended. Every call leaves exactly one."""

    tool_name: str
    params: object
    """The parsed parameters; what the model sent where they could not be parsed."""
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
    """What policies had to say: who approved it, for example."""
    denied_by: str = ""
    """The policy that refused it."""
    place: int | None = None
    """The call's place among the calls of its turn; the first is 0."""
    attempts: int = 1
    """How often it was taken, because another call of the turn came in its way."""
    conflicts: tuple[str, ...] = ()
    """What others had changed when it was taken again: slices by type, files by path."""
    nested_in: str = ""
    """The id of the call that made this one: it stays or is undone with that."""

    @property
    def suspended(self) -> bool:
        """Whether the call waits for somebody outside: it was undone, and is to be made again."""
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


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExecuted:
    """A prompt ran to its end."""

    prompt_ns: str
    prompt_key: str
    adapter: str
    stop_reason: str
    timestamp: float
    duration: float
    usage: TokenUsage | None = None


class Dispatcher:
    """Carries events to whoever subscribed to their type or to one it derives from.

    Those who asked for the event's own type hear of it first, each type's in the order in which
    they subscribed. A subscriber that raises is logged and does not keep the event from others.

    >>> bus = Dispatcher()
    >>> seen = []
    >>> unsubscribe = bus.subscribe(str, seen.append)
    >>> bus.publish("hello")
    >>> seen
    ['hello']
    """

    def __init__(self) -> None:
        # Replaced, never changed: publishing reads it without a lock.
        self._subscriptions: dict[type, tuple[_Subscription, ...]] = {}
        # Who hears of an event of a type, found when the first one comes.
        self._audiences: dict[type, tuple[_Subscription, ...]] = {}
        self._lock = threading.RLock()

    def subscribe(
        self, event_type: type[E], subscriber: Callable[[E], object]
    ) -> Callable[[], None]:
        """Call ``subscriber`` with every event of this type or a subtype; returns how to stop."""
        if inspect.iscoroutinefunction(subscriber):
            raise TypeError("a subscriber must not be async: nobody would await it")
        subscription = _Subscription(subscriber)

        def unsubscribe() -> None:
            with self._lock:
                present = self._subscriptions.get(event_type, ())
                left = tuple(s for s in present if s is not subscription)
                others = {t: s for t, s in self._subscriptions.items() if t is not event_type}
                self._subscriptions = {**others, event_type: left} if left else others
                self._audiences = {}

        with self._lock:
            present = self._subscriptions.get(event_type, ())
            self._subscriptions = {**self._subscriptions, event_type: (*present, subscription)}
            self._audiences = {}
        return unsubscribe

    def publish(self, event: object) -> None:
        """Hand the event to its subscribers."""
        audience = self._audiences.get(type(event))
        if audience is None:
            audience = self._audience_of(type(event))
        for subscription in audience:
            try:
                subscription.call(event)
            except Exception:
                _logger.exception(
                    "subscriber %r failed on %s",
                    subscription.call,
                    type(event).__name__,
                    extra=_call_fields(event),
                )

    def _audience_of(self, event_type: type) -> tuple[_Subscription, ...]:
        with self._lock:
            found = self._subscriptions
            audience = tuple(s for cls in event_type.__mro__ for s in found.get(cls, ()))
            self._audiences = {**self._audiences, event_type: audience}
        return audience


@dataclass(frozen=True, slots=True, eq=False)
class _Subscription:
    """One act of subscribing: the same function may be there twice."""

    call: Callable[[Any], object]


def _call_fields(event: object) -> dict[str, str]:
    """Return what a log line says of the call: it has ended when its record is published."""
    if isinstance(event, ToolInvoked):
        return {"call_id": event.call_id, "tool": event.tool_name}
    return {}
