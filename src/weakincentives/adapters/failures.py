"""What goes wrong between us and a provider, from what the client library of OpenAI raises.

LiteLLM raises subclasses of the same errors, whatever the provider.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote, unquote

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import (
    MalformedResponse,
    ParseError,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
)
from weakincentives.retry import NETWORK, TIMEOUT

if TYPE_CHECKING:
    import openai

T = TypeVar("T")

_ADVICE = {
    400: 'if the server does not know strict schemas, give strict=False, or output="text"',
    401: "check the key: {key}",
    403: "check that the key may use this model: {key}",
    404: "check the model's name and base_url",
    422: 'if the server does not know strict schemas, give strict=False, or output="text"',
}
_THROTTLED = {"rate_limit_exceeded", "rate_limit_error", "too_many_requests"}
_NO_QUOTA = {"insufficient_quota", "billing_hard_limit_reached"}


@dataclass(frozen=True, slots=True)
class Provider:
    """Who is asked, for words about what went wrong."""

    name: str
    model: str
    key: str | None
    """Never shown, also where a server repeats it."""
    where_the_key_is: str
    secrets: object = ()
    """More of what is sent: addresses, headers, options. What may be a secret is not shown."""

    async def answered(self, work: Awaitable[T]) -> T:
        """Return what the provider answers; what the client library raises is a ProviderError.

        The library's own error is left behind: it has the request in it, and so the key.
        """
        import openai

        try:
            return await work
        except ProviderError:
            raise
        except openai.OpenAIError as error:
            failure = self._told(self._from_client(error), error)
        except _of_transport("HTTPError") as error:  # in the middle of a stream it is not wrapped
            failure = self._told(self._broke_off(error), error)
        except (json.JSONDecodeError, UnicodeDecodeError, ParseError) as error:
            failure = self._told(self.malformed(error), error)
        except Exception as error:  # some that a library does not mean to raise show the request
            text = "".join(traceback.format_exception(error))
            if self._without_secrets(text) == text:
                raise
            said = self._say("cannot be asked", f"{type(error).__name__}: {error}")
            failure = self._told(ProviderRejected(said), error)
        # Not while the other one is handled: it would be kept as the context of this one.
        raise failure

    def _told(self, failure: ProviderError, error: BaseException) -> ProviderError:
        """Return an error that says in words what caused it."""
        what = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        failure.__cause__ = RuntimeError(self._without_secrets(what))
        failure.__context__ = None
        return failure

    def malformed(self, what: object) -> MalformedResponse:
        return MalformedResponse(self._say("answered with something else than it promises", what))

    def unfinished(self) -> ProviderUnavailable:
        return ProviderUnavailable(self._say("ended its answer before it was done"), code=NETWORK)

    def failed(self, code: object, text: str) -> ProviderError:
        """Return the error for a code that stands in an answer, not in the status."""
        said = str(code)
        status = int(said) if said.isdecimal() else 500
        if said in _THROTTLED:
            status = 429
        elif said.startswith("invalid_"):
            status = 400
        return self._by_status(status, {}, said, text)

    def _from_client(self, error: openai.OpenAIError) -> ProviderError:
        import openai

        text = str(getattr(error, "message", error))
        if isinstance(error, openai.APIConnectionError):
            return self._broke_off(error)
        if isinstance(error, openai.APIResponseValidationError):
            return self.malformed(text)
        if isinstance(error, openai.APIStatusError):
            headers = {**error.response.headers, **_more_headers(error)}
            return self._by_status(error.status_code, headers, error.code, text)
        if isinstance(error, openai.APIError):  # in the middle of a stream
            return self.failed(error.code or error.type, text)
        return ProviderRejected(self._say("cannot be asked", text))

    def _by_status(
        self, status: int, headers: Mapping[str, Any], code: object, text: str
    ) -> ProviderError:
        wait = _retry_after(headers)
        if str(code) in _NO_QUOTA:
            return ProviderRejected(self._say("has no quota left for the key", text))
        if status == 429:
            return ProviderThrottled(self._say("was asked too often", text), retry_after=wait)
        if status in {408, 409} or status >= 500:
            said = self._say(f"failed ({status})", text)
            return ProviderUnavailable(said, retry_after=wait)
        said = self._say(f"does not take the request ({status})", text)
        advice = _ADVICE.get(status)
        if advice is not None:
            said = f"{said}; {advice.format(key=self.where_the_key_is)}"
        return ProviderRejected(said)

    def _broke_off(self, error: Exception) -> ProviderUnavailable:
        import openai

        cause = error.__cause__ or error
        what = f"{type(cause).__name__}: {cause}".removesuffix(": ")
        if isinstance(error, (openai.APITimeoutError, *_of_transport("TimeoutException"))):
            return ProviderUnavailable(self._say("did not answer in time", what), code=TIMEOUT)
        return ProviderUnavailable(self._say("cannot be reached", what), code=NETWORK)

    def _say(self, happened: str, details: object = "") -> str:
        said = f"{self.name} {happened}, for model {self.model!r}"
        if details:
            said = f"{said}: {details}"
        return self._without_secrets(said)

    def _without_secrets(self, text: str) -> str:
        return without_secrets(text, [{"key": self.key}, self.secrets])


def without_secrets(text: str, settings: object = ()) -> str:
    """Return a text without keys: those in the environment, and what settings have of them."""
    for secret in sorted({*_values(settings), *_in_environment()}, key=len, reverse=True):
        if len(secret) > 7:  # a stand-in is none
            for spelled in {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}:
                text = text.replace(spelled, "(the key)")
    return text


_SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|AUTHORIZATION|COOKIE", re.IGNORECASE)
_IN_URL = re.compile(r"://([^/@\s]+)@|[?&][^=&#\s]*=([^&#\s]+)")


def _in_environment() -> Iterator[str]:
    """Yield what libraries take for keys by themselves, whatever the provider."""
    return (value for name, value in os.environ.items() if _SECRET_NAMES.search(name))


def _values(settings: object, name: str = "") -> Iterator[str]:
    """Yield what may be secret in settings: by the name it has, or because it stands in a URL."""
    if isinstance(settings, Mapping):
        for key, value in cast("Mapping[Any, object]", settings).items():
            yield from _values(value, str(key))
    elif isinstance(settings, list | tuple):
        for each in cast("Sequence[object]", settings):
            yield from _values(each, name)
    elif isinstance(settings, str):
        if _SECRET_NAMES.search(name):
            yield settings
            yield settings.rpartition(" ")[2]  # Bearer
        for found in _IN_URL.finditer(settings):
            user, query = found.groups()
            parts = (user, user.rpartition(":")[2]) if user else (query,)
            yield from (*parts, *map(unquote, parts))


def _of_transport(name: str) -> tuple[type[Exception], ...]:
    """Return the error of that name of every transport in use: it depends on the client's version.

    One that is not loaded has raised nothing.
    """
    loaded = [sys.modules.get(module) for module in ("httpx", "httpx2")]
    return tuple(getattr(module, name) for module in loaded if module is not None)


def _more_headers(error: Exception) -> Mapping[str, Any]:
    """Return the headers that LiteLLM keeps beside the response."""
    return getattr(error, "litellm_response_headers", None) or {}


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    """Return the seconds to wait; they are given as such, in thousandths, or as a date."""
    given = {name.lower(): str(value) for name, value in headers.items()}
    for name, scale in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(given[name]) / scale
        except (KeyError, ValueError):
            continue
        return seconds if 0 <= seconds < float("inf") else None
    until = _unix_time(given.get("retry-after"))
    if until is None:
        return None
    now = _unix_time(given.get("date")) or SYSTEM_CLOCK.time()  # by the provider's own clock
    return max(0.0, until - now)


def _unix_time(text: str | None) -> float | None:
    try:
        date = parsedate_to_datetime(text or "")
    except ValueError:
        return None
    return date.replace(tzinfo=date.tzinfo or UTC).timestamp()
