"""What a call is, and which call is under way."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

T = TypeVar("T")

_count = itertools.count(1)
_process = os.urandom(6).hex()  # what secrets.token_hex does, without its imports


def _renew_prefix() -> None:
    global _process
    _process = os.urandom(6).hex()


if hasattr(os, "register_at_fork"):
    # A forked child counts on from the same number: it needs a prefix of its own.
    os.register_at_fork(after_in_child=_renew_prefix)


def new_id() -> str:
    """Return an id of 32 hexadecimal digits that nobody else has, as traces have them."""
    return os.urandom(16).hex()


def new_call_id() -> str:
    """Return an id no other call has, in this process or another."""
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
    """Ids that tie a call to the run, loop, agent and trace it belongs to.

    Whatever runs tools (an adapter, a ``MainLoop``, a ``ToolRegistry``, an MCP server) fills in
    those that it is not given.
    """

    run_id: str = ""
    loop_id: str = ""
    agent_id: str = ""
    trace_id: str = ""
    """32 hexadecimal digits; in a run that telemetry records, those of its trace."""
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])

    def filled(self, **ids: str) -> RunContext:
        """Return this with ids where it has none."""
        missing = {name: each for name, each in ids.items() if not getattr(self, name)}
        return replace(self, **missing)


class CancellationToken:
    """Tells a handler that nobody waits for it any more.

    The runtime cancels it when a call times out or is interrupted. A long handler may look at
    ``cancelled`` now and then, or sleep with ``wait``; one that does not is fenced off anyway.
    """

    __slots__ = ("_event", "reason")

    def __init__(self) -> None:
        self.reason: str | None = None
        self._event: threading.Event | None = None

    @property
    def cancelled(self) -> bool:
        return self.reason is not None

    def cancel(self, reason: str = "cancelled") -> None:
        """Ask the handler to stop; the first reason stays."""
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


# One lock and no event for every token: each call makes one, and hardly any waits on it.
_tokens = threading.Lock()


# Named only so that a handler which kept a reference to the outer session or filesystem reaches
# the same view as through its context. Each call runs in a copy of its caller's context, so the
# variable is never reset: an interrupt cannot leave it behind.
transaction_under_way: ContextVar[Any] = ContextVar("wink_transaction_under_way", default=None)
"""The ``Transaction`` of the call, or None."""


def call_under_way() -> ToolCall | None:
    """Return the call whose handler, policy or effect is running here, if there is one."""
    transaction = transaction_under_way.get()
    return None if transaction is None else transaction.call


def current_view(target: T) -> T:
    """Return the view of ``target`` that the call under way works on, or ``target`` itself."""
    transaction = transaction_under_way.get()
    return target if transaction is None else transaction.view(target)
