"""When a failed call is retried, how long to wait first, and what kind of failure it was.

Pure: nothing here sleeps, and nothing is imported that a program does not use anyway.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from weakincentives.errors import ToolTimeout, WorkspaceLocked

if TYPE_CHECKING:
    from datetime import timedelta

    from weakincentives.tool_result import ToolError

__all__ = [
    "LOCK",
    "NETWORK",
    "RATE_LIMIT",
    "SERVER_ERROR",
    "TIMEOUT",
    "Backoff",
    "ExponentialBackoff",
    "FixedBackoff",
    "JitteredBackoff",
    "LinearBackoff",
    "NoBackoff",
    "RetryPolicies",
    "RetryPolicy",
    "code_of",
]

# The kinds of failure that a retry may cure.
TIMEOUT = "TIMEOUT"
"""It took too long."""
RATE_LIMIT = "RATE_LIMIT"
"""Too many requests."""
NETWORK = "NETWORK"
"""The other side could not be reached, or broke off."""
SERVER_ERROR = "SERVER_ERROR"
"""The other side failed."""
LOCK = "LOCK"
"""It was locked by another user or process."""

_LONGEST = sys.float_info.max


def _random() -> float:
    from random import random  # slow to import, and only jitter needs it

    return random()


def _number(name: str, value: object, least: float = 0.0, most: float = _LONGEST) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        limits = f"from {least:g} up, and finite" if most == _LONGEST else f"{least:g} to {most:g}"
        raise ValueError(f"{name} must be a number {limits}, got {value!r}")
    return float(value)


def _seconds(name: str, value: object) -> float:
    total_seconds = getattr(value, "total_seconds", None)  # a timedelta: no need to import it
    return _number(name, total_seconds() if callable(total_seconds) else value)


def _codes(name: str, given: Collection[str]) -> frozenset[str]:
    codes: frozenset[object] = frozenset([] if isinstance(given, str) else given)
    if isinstance(given, str) or not all(isinstance(code, str) for code in codes):
        raise ValueError(f"{name} takes several error codes, as in {{{TIMEOUT!r}}}; got {given!r}")
    return cast("frozenset[str]", codes)


def _backoff(name: str, given: Backoff) -> Backoff:
    if isinstance(given, type) or not hasattr(given, "delay"):
        raise ValueError(f"{name} must be a backoff such as NoBackoff(), got {given!r}")
    return given


# How long to wait


class Backoff:
    """How long to wait before each retry."""

    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)  # checked by the subclass, which is frozen

    def delay(self, attempt: int, random: Callable[[], float] = _random) -> float:
        """Return the seconds to wait before a retry; the first is attempt 1."""
        if attempt < 1:
            raise ValueError(f"the first retry is attempt 1, got {attempt!r}")
        try:
            return max(0.0, min(self._delay(attempt, random), _LONGEST))
        except OverflowError:
            return _LONGEST

    def _delay(self, attempt: int, random: Callable[[], float]) -> float:
        raise NotImplementedError


@dataclass(frozen=True, init=False)
class NoBackoff(Backoff):
    """Retry at once."""

    def _delay(self, attempt: int, random: Callable[[], float]) -> float:
        return 0.0


@dataclass(frozen=True, init=False, repr=False)
class FixedBackoff(Backoff):
    """Wait equally long each time."""

    seconds: float

    def __init__(self, delay: float | timedelta) -> None:
        super().__init__(seconds=_seconds("delay", delay))

    def __repr__(self) -> str:
        return f"FixedBackoff(delay={self.seconds!r})"

    def _delay(self, attempt: int, random: Callable[[], float]) -> float:
        return self.seconds


@dataclass(frozen=True, init=False)
class LinearBackoff(Backoff):
    """Wait ``base_delay`` first, and ``increment`` longer each time."""

    base_delay: float
    increment: float

    def __init__(self, base_delay: float | timedelta, increment: float | timedelta) -> None:
        super().__init__(
            base_delay=_seconds("base_delay", base_delay),
            increment=_seconds("increment", increment),
        )

    def _delay(self, attempt: int, random: Callable[[], float]) -> float:
        return self.base_delay + self.increment * (attempt - 1)


@dataclass(frozen=True, init=False)
class ExponentialBackoff(Backoff):
    """Wait ``base_delay`` first, ``multiplier`` times as long each time, never over a maximum."""

    base_delay: float
    max_delay: float
    multiplier: float

    def __init__(
        self, base_delay: float | timedelta, max_delay: float | timedelta, multiplier: float = 2.0
    ) -> None:
        super().__init__(
            base_delay=_seconds("base_delay", base_delay),
            max_delay=_seconds("max_delay", max_delay),
            multiplier=_number("multiplier", multiplier, least=1.0),
        )

    def _delay(self, attempt: int, random: Callable[[], float]) -> float:
        if self.base_delay == 0:
            return 0.0
        try:
            return min(self.base_delay * self.multiplier ** (attempt - 1), self.max_delay)
        except OverflowError:
            return self.max_delay


@dataclass(frozen=True, init=False)
class JitteredBackoff(Backoff):
    """Wait up to ``jitter`` (a fraction: 0.1 is ten percent) less or more than ``base`` says.

    Clients that failed together then do not all come back together.
    """

    base: Backoff
    jitter: float

    def __init__(self, base: Backoff, jitter: float) -> None:
        super().__init__(base=_backoff("base", base), jitter=_number("jitter", jitter, most=1.0))

    def _delay(self, attempt: int, random: Callable[[], float]) -> float:
        base = self.base.delay(attempt, random)
        return base + (random() * 2 - 1) * (base * self.jitter)


# Whether to retry


_AT_ONCE = NoBackoff()


@dataclass(frozen=True)
class RetryPolicy:
    """How often a failed call is retried, and the wait before each retry."""

    max_retries: int = 0
    backoff: Backoff = _AT_ONCE
    retryable_errors: Collection[str] | None = None
    """Error codes worth a retry; None means every recoverable one."""
    non_retryable_errors: Collection[str] = frozenset()
    should_retry: Callable[[ToolError, int], bool] | None = None
    """Asked first, with the error and how many retries there were; may only say no."""

    def __post_init__(self) -> None:
        if type(self.max_retries) is not int or self.max_retries < 0:
            raise ValueError(
                f"max_retries must be a whole number from 0 up, got {self.max_retries!r}"
            )
        if self.should_retry is not None and not callable(self.should_retry):
            raise ValueError(f"should_retry must be a function, got {self.should_retry!r}")
        _backoff("backoff", self.backoff)
        for name in ("retryable_errors", "non_retryable_errors"):
            codes = getattr(self, name)
            if codes is not None:
                object.__setattr__(self, name, _codes(name, codes))

    def retries(self, error: ToolError, attempt: int) -> bool:
        """Tell whether a call is retried.

        Args:
            error: Why it failed; only ``code`` and ``recoverable`` are looked at here.
            attempt: How many retries there have been: 0 after the first attempt.
        """
        if attempt >= self.max_retries:
            return False
        if self.should_retry is not None and not self.should_retry(error, attempt):
            return False
        if self.retryable_errors is not None and error.code not in self.retryable_errors:
            return False
        return error.code not in self.non_retryable_errors and error.recoverable

    def delays(self, random: Callable[[], float] = _random) -> Iterator[float]:
        """Yield the wait before each attempt, starting at zero."""
        yield 0.0
        for attempt in range(1, self.max_retries + 1):
            yield self.backoff.delay(attempt, random)


class RetryPolicies:
    """Policies for common cases."""

    NONE = RetryPolicy()
    """Fail at once."""
    QUICK = RetryPolicy(3, FixedBackoff(1.0), {TIMEOUT, RATE_LIMIT, NETWORK})
    """A second between attempts: for failures that pass."""
    STANDARD = RetryPolicy(
        3, ExponentialBackoff(1.0, 30.0, 2.0), {TIMEOUT, RATE_LIMIT, NETWORK, SERVER_ERROR}
    )
    """One, two, four seconds: for services."""
    AGGRESSIVE = RetryPolicy(
        5,
        JitteredBackoff(ExponentialBackoff(0.5, 60.0, 2.0), 0.1),
        {TIMEOUT, RATE_LIMIT, NETWORK, SERVER_ERROR, LOCK},
    )
    """Five retries, from half a second up: for what must succeed."""

    @staticmethod
    def CUSTOM(policy: RetryPolicy) -> RetryPolicy:  # noqa: N802  # the Protocol's name
        """Return the policy, so that your own reads like the named ones."""
        return policy


# What kind of failure it was


def code_of(error: BaseException) -> str | None:
    """Return the code of a failure that may pass, or None for every other.

    Knows the standard library's exceptions, those of common HTTP clients if they are loaded, and
    any exception with an HTTP status. What an exception was raised from counts as well.

    >>> code_of(ConnectionResetError("peer went away"))
    'NETWORK'
    >>> code_of(KeyError("x")) is None
    True
    """
    seen: set[int] = set()
    current: object = error
    while isinstance(current, Exception) and id(current) not in seen:
        seen.add(id(current))
        status = _http_status(current)
        if status is not None:
            return _STATUS_CODES.get(status, SERVER_ERROR if status >= 500 else None)
        code = _code_of_type(current)
        if code is not None:
            return code
        current = current.__cause__ or _attribute(current, "reason")  # as urllib has it
    return None


_STATUS_CODES = {408: TIMEOUT, 423: LOCK, 429: RATE_LIMIT, 504: TIMEOUT}


def _http_status(error: Exception) -> int | None:
    response = _attribute(error, "response")
    for holder, name in (
        (error, "status_code"),
        (error, "status"),
        (response, "status_code"),
        (response, "status"),
        (error, "code"),
    ):
        value = _attribute(holder, name)
        if type(value) is int and 400 <= value < 600:  # a code may also be something else's
            return value
    return None


def _attribute(holder: object, name: str) -> object:
    try:
        return getattr(holder, name, None)
    except Exception:  # a property of somebody else's class
        return None


_NETWORK_ERRNOS = {
    getattr(errno, name)
    for name in (
        "EADDRNOTAVAIL", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH",
        "ENOTCONN", "EPROTO",
    )
    if hasattr(errno, name)
}  # fmt: skip
_LOCK_ERRNOS = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK, errno.ENOLCK}

# The special before the general; None is for what no retry will cure. A module that is not loaded
# has raised nothing, so none is imported to ask.
_KNOWN: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    (None, ("http.client.InvalidURL", "httpx.UnsupportedProtocol", "httpx2.UnsupportedProtocol",
            "aiohttp.InvalidURL")),
    (TIMEOUT, ("subprocess.TimeoutExpired", "httpx.TimeoutException", "httpx2.TimeoutException",
               "requests.exceptions.Timeout", "urllib3.exceptions.TimeoutError",
               "openai.APITimeoutError", "anthropic.APITimeoutError")),
    (NETWORK, ("socket.gaierror", "socket.herror", "ssl.SSLError", "http.client.HTTPException",
               "urllib.error.ContentTooShortError", "httpx.TransportError", "httpx2.TransportError",
               "requests.exceptions.ConnectionError", "requests.exceptions.ChunkedEncodingError",
               "urllib3.exceptions.ProtocolError", "aiohttp.ClientConnectionError",
               "aiohttp.ClientPayloadError", "openai.APIConnectionError",
               "anthropic.APIConnectionError")),
)  # fmt: skip


def _code_of_type(error: Exception) -> str | None:
    if isinstance(error, (TimeoutError, ToolTimeout)):
        return TIMEOUT
    if isinstance(error, ConnectionError):
        return NETWORK
    if isinstance(error, (BlockingIOError, WorkspaceLocked)) or _is_locked_database(error):
        return LOCK
    for code, names in _KNOWN:
        for name in names:
            module, _, kind_name = name.rpartition(".")
            kind = _attribute(sys.modules.get(module), kind_name)
            if isinstance(kind, type) and isinstance(error, kind):
                return code
    if isinstance(error, OSError):
        if error.errno in _NETWORK_ERRNOS:
            return NETWORK
        if error.errno in _LOCK_ERRNOS:
            return LOCK
    return None


def _is_locked_database(error: Exception) -> bool:
    sqlite = sys.modules.get("sqlite3")
    if sqlite is None or not isinstance(error, sqlite.OperationalError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # made by hand, or passed on by a driver
        return "locked" in str(error)
    return code & 0xFF in (5, 6)  # SQLITE_BUSY and SQLITE_LOCKED, in all their forms
