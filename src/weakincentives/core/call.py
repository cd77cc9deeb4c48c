"""A tool call, the ids around it, and which call is under way."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

T = TypeVar("T")

_identity = object.__hash__  # an object's address, too, but without the audit event of ``id``
_count = itertools.count(1)
_process = os.urandom(6).hex()  # what secrets.token_hex does, without its imports


def _renew_prefix() -> None:
    global _process
    _process = os.urandom(6).hex()


if hasattr(os, "register_at_fork"):
    # A forked child counts on from the same number: it needs a prefix of its own.
    os.register_at_fork(after_in_child=_renew_prefix)


def new_id() -> str:
    """Return a random id of 32 hexadecimal digits, the form of a trace id."""
    return os.urandom(16).hex()


def new_call_id() -> str:
    """Return an id that is unique across processes."""
    return f"call_{_process}_{next(_count)}"


@dataclass(slots=True)  # not frozen: every call makes one, at a third of the cost
class ToolCall:
    """A request to run one tool, as it came from a model or from code."""

    name: str
    params: object = field(default_factory=dict[str, object])
    """A mapping, JSON text, or an instance of the tool's parameter type."""
    id: str = field(default_factory=new_call_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The ids of the run, loop, agent and trace that a call belongs to.

    An adapter, ``MainLoop``, ``ToolRegistry`` or MCP server fills in those that are missing.
    """

    run_id: str = ""
    loop_id: str = ""
    agent_id: str = ""
    trace_id: str = ""
    """32 hexadecimal digits; in a run that telemetry records, those of its trace."""
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])

    def filled(self, **ids: str) -> RunContext:
        """Return a copy with the missing ids filled in."""
        missing = {name: each for name, each in ids.items() if not getattr(self, name)}
        return replace(self, **missing)


class CancellationToken:
    """Tells a handler that its call was abandoned.

    The runtime cancels it when a call times out or is interrupted. A long handler may check
    ``cancelled`` now and then, or sleep with ``wait``; one that does not is fenced anyway.
    """

    # Defaults on the class: every call makes a token, and few are cancelled.
    reason: str | None = None
    _event: threading.Event | None = None

    @property
    def cancelled(self) -> bool:
        return self.reason is not None

    def cancel(self, reason: str = "cancelled") -> None:
        """Ask the handler to stop. The first reason wins."""
        with _tokens:
            if self.reason is None:
                self.reason = reason
            if self._event is not None:
                self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until cancelled or until ``timeout`` seconds have passed; True when cancelled."""
        with _tokens:
            if self._event is None:
                self._event = threading.Event()
                if self.reason is not None:
                    self._event.set()
        return self._event.wait(timeout)


# One lock for all tokens, and an event only on demand.
_tokens = threading.Lock()


# A handler that holds a reference to the outer session or filesystem reaches the same view as
# through its context. Each call runs in a copy of its caller's context, so the variable is never
# reset: an interrupt cannot leave it behind.
transaction_under_way: ContextVar[Any] = ContextVar("wink_transaction_under_way", default=None)
"""The ``Transaction`` of the call, or None."""


def call_under_way() -> ToolCall | None:
    """Return the call whose handler, policy or effect is running here, or None."""
    transaction = transaction_under_way.get()
    return None if transaction is None else transaction.call


def current_view(target: T) -> T:
    """Return the current call's view of ``target``; ``target`` itself outside a call."""
    transaction = transaction_under_way.get()
    if transaction is None:
        return target
    view = transaction.views.get(_identity(target))
    return transaction.view(target) if view is None else view
