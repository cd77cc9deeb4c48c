"""What the runtime records, and the in-process bus that carries it to subscribers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives.slices import SlicePolicy, slice_policy

if TYPE_CHECKING:
    from weakincentives.budget import TokenUsage
    from weakincentives.prompt.tool_result import ToolResult

__all__ = ["Dispatcher", "PromptExecuted", "PromptRendered", "ToolInvoked"]

E = TypeVar("E")

_logger = logging.getLogger(__name__)


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Carries events to whoever subscribed to their type, in the order of subscription.

    A subscriber that raises is logged and does not keep the event from the others.

    >>> bus = Dispatcher()
    >>> seen = []
    >>> unsubscribe = bus.subscribe(str, seen.append)
    >>> bus.publish("hello")
    >>> seen
    ['hello']
    """

    def __init__(self) -> None:
        # Replaced, never changed: publishing reads it without a lock.
        self._subscribers: dict[type, tuple[Callable[[Any], object], ...]] = {}
        self._lock = threading.Lock()

    def subscribe(
        self, event_type: type[E], subscriber: Callable[[E], object]
    ) -> Callable[[], None]:
        """Call ``subscriber`` with every event of this type or a subtype; returns how to stop."""
        with self._lock:
            present = self._subscribers.get(event_type, ())
            self._subscribers = {**self._subscribers, event_type: (*present, subscriber)}

        def unsubscribe() -> None:
            with self._lock:
                left = tuple(s for s in self._subscribers.get(event_type, ()) if s is not subscriber)
                self._subscribers = {**self._subscribers, event_type: left}

        return unsubscribe

    def publish(self, event: object) -> None:
        """Hand the event to its subscribers."""
        subscribers = self._subscribers
        if not subscribers:
            return
        for event_type in type(event).__mro__:
            for subscriber in subscribers.get(event_type, ()):
                try:
                    subscriber(event)
                except Exception:
                    _logger.exception("subscriber %r failed on %s", subscriber, type(event).__name__)
