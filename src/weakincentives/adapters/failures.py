"""What goes wrong between us and a provider, from what the client library of OpenAI raises.

LiteLLM raises subclasses of the same errors, whatever the provider.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

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

__all__ = ["Provider"]

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

    @contextmanager
    def errors(self) -> Generator[None]:
        """Raise what the client library raises as a ProviderError."""
        import openai

        try:
            yield
        except openai.OpenAIError as error:
            raise self._from_client(error) from error
        except _of_transport("HTTPError") as error:  # in the middle of a stream it is not wrapped
            raise self._broke_off(error) from error
        except (json.JSONDecodeError, UnicodeDecodeError, ParseError) as error:
            raise self.malformed(error) from error

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
        is_secret = self.key is not None and len(self.key) > 7  # a stand-in is none
        return said.replace(str(self.key), "(the key)") if is_secret else said


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
