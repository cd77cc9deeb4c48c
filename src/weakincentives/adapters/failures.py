"""A provider's failures, from the errors of its client library.

LiteLLM raises subclasses of OpenAI's errors for every provider; Anthropic's library has the same
classes under the same names.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import Any, TypeVar

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.logs import without_secrets
from weakincentives.errors import (
    ContextOverflow,
    MalformedResponse,
    ParseError,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
)
from weakincentives.retry import NETWORK, TIMEOUT

T = TypeVar("T")

_SCHEMA_ADVICE = 'if the server does not support strict schemas, give strict=False or output="text"'
_ADVICE = {
    400: _SCHEMA_ADVICE,
    401: "check the key: {key}",
    403: "check that the key may use this model: {key}",
    404: "check the model's name and base_url",
    422: _SCHEMA_ADVICE,
}
_STATUS_OF_CODE = {
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "too_many_requests": 429,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_NO_QUOTA = {"insufficient_quota", "billing_hard_limit_reached", "billing_error"}

_TOO_LONG = {"context_length_exceeded", "exceed_context_size_error", "request_too_large"}
# OpenAI, vLLM and others; Anthropic; llama.cpp; LiteLLM; Gemini; Bedrock.
_SAYS_TOO_LONG = re.compile(
    r"maximum context length|context_length_exceeded|prompt is too long|exceed\w* (?:the |its )?"
    r"(?:available |maximum |model'?s? )*context|ContextWindowExceeded|input token count.{0,40}"
    r"exceeds|input is too long|too many (?:input )?tokens",
    re.IGNORECASE,
)
_LIMIT = re.compile(
    r"maximum context length (?:is|of) ([\d,]+)|> ([\d,]+) maximum"
    r"|(?:context size|n_ctx\W{1,4})\s*\(?([\d,]+)|tokens allowed \(?([\d,]+)",
    re.IGNORECASE,
)
_TOKENS = re.compile(
    r"resulted in ([\d,]+) tokens|too long: ([\d,]+) tokens|request \(([\d,]+) tokens\)"
    r"|n_prompt_tokens\W{1,4}([\d,]+)|token count \(?([\d,]+)",
    re.IGNORECASE,
)


def _sizes_in(text: str) -> dict[str, int]:
    """Return the size of the window and of the request, as far as an error tells them."""
    found: dict[str, int] = {}
    for name, pattern in (("limit", _LIMIT), ("tokens", _TOKENS)):
        if match := pattern.search(text):
            number = next(filter(None, match.groups())).replace(",", "")
            if 0 < len(number) < 16:
                found[name] = int(number)
    return found


@dataclass(frozen=True, slots=True)
class Provider:
    """The provider of a model: turns the client library's errors into a ProviderError."""

    name: str
    model: str
    key: str | None
    """Never shown, even where a server repeats it."""
    where_the_key_is: str
    secrets: object = ()
    """Addresses, headers and options that are sent; anything secret in them is never shown."""
    library: str = "openai"
    """The package of the client library, which is loaded when it is used."""

    @property
    def _client(self) -> Any:
        return import_module(self.library)

    async def answered(self, work: Awaitable[T]) -> T:
        """Await a request; raise the client library's errors as a ProviderError.

        The library's own error is not chained: it holds the request, and so the key.
        """
        client = self._client
        any_error = getattr(client, "OpenAIError", None) or client.AnthropicError
        try:
            return await work
        except ProviderError:
            raise
        except any_error as error:
            failure = self._caused_by(error, self._from_client(error))
        except _transport_errors("HTTPError") as error:  # a broken stream is not wrapped
            failure = self._caused_by(error, self._connection_failed(error))
        except (json.JSONDecodeError, UnicodeDecodeError, ParseError) as error:
            failure = self._caused_by(error, self._malformed(error))
        except Exception as error:
            # A bug, ours or the library's: raised as it is, unless it shows a secret.
            text = "".join(traceback.format_exception(error))
            if self._without_secrets(text) == text:
                raise
            said = self._say("cannot be used", f"{type(error).__name__}: {error}")
            failure = self._caused_by(error, ProviderRejected(said))
        # Outside of the handlers: otherwise the original would be the context of this one.
        raise failure

    def _caused_by(self, error: BaseException, failure: ProviderError) -> ProviderError:
        """Chain the text of the original error, not the error."""
        what = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        failure.__cause__ = RuntimeError(self._without_secrets(what))
        failure.__context__ = None
        return failure

    def unfinished(self) -> ProviderUnavailable:
        return ProviderUnavailable(self._say("ended the stream too early"), code=NETWORK)

    def failed(self, code: object, text: object) -> ProviderError:
        """Return the error for a code in the body of an answer."""
        name = str(code)
        status = int(name) if name.isdecimal() else _STATUS_OF_CODE.get(name, 500)
        if name.startswith("invalid_"):
            status = 400
        return self._by_status(status, {}, name, text)

    def _malformed(self, what: object) -> MalformedResponse:
        return MalformedResponse(self._say("sent a malformed response", what))

    def _from_client(self, error: Any) -> ProviderError:
        client = self._client
        text = str(getattr(error, "message", error))
        code = getattr(error, "code", None) or getattr(error, "type", None)
        if isinstance(error, client.APIConnectionError):
            return self._connection_failed(error)
        if isinstance(error, client.APIResponseValidationError):
            return self._malformed(text)
        if isinstance(error, client.APIStatusError) and error.status_code >= 400:
            more: dict[str, Any] = getattr(error, "litellm_response_headers", None) or {}
            headers = {**error.response.headers, **more}
            failure = self._by_status(error.status_code, headers, code, text)
            failure.status = error.status_code
            return failure
        if isinstance(error, client.APIError):  # in a stream
            return self.failed(code, text)
        return ProviderRejected(self._say("cannot be used", text))

    def _by_status(
        self, status: int, headers: Mapping[str, Any], code: object, text: object
    ) -> ProviderError:
        wait = _retry_after(headers)
        if str(code) in _NO_QUOTA:
            return ProviderRejected(self._say("has no quota left for this key", text))
        if status == 429:
            return ProviderThrottled(self._say("rate-limited the request", text), retry_after=wait)
        if str(code) in _TOO_LONG or _SAYS_TOO_LONG.search(str(text)):
            said = self._say("cannot take so long a conversation", text)
            return ContextOverflow(said, **_sizes_in(str(text)))
        if status in {408, 409} or status >= 500:
            return ProviderUnavailable(self._say(f"failed ({status})", text), retry_after=wait)
        message = self._say(f"rejected the request ({status})", text)
        if status in _ADVICE:
            message = f"{message}; {_ADVICE[status].format(key=self.where_the_key_is)}"
        return ProviderRejected(message)

    def _connection_failed(self, error: Exception) -> ProviderUnavailable:
        cause = error.__cause__ or error
        what = f"{type(cause).__name__}: {cause}".removesuffix(": ")
        timeouts = (self._client.APITimeoutError, *_transport_errors("TimeoutException"))
        if isinstance(error, timeouts):
            return ProviderUnavailable(self._say("did not answer in time", what), code=TIMEOUT)
        return ProviderUnavailable(self._say("cannot be reached", what), code=NETWORK)

    def _say(self, happened: str, details: object = "") -> str:
        text = f"{self.name} {happened}, for model {self.model!r}"
        return self._without_secrets(f"{text}: {details}" if details else text)

    def _without_secrets(self, text: str) -> str:
        return without_secrets(text, [{"key": self.key}, self.secrets])


def _transport_errors(name: str) -> tuple[type[Exception], ...]:
    """Return an error class of each loaded HTTP library; which one depends on the client."""
    loaded = [sys.modules.get(module) for module in ("httpx", "httpx2")]
    return tuple(getattr(module, name) for module in loaded if module is not None)


def _retry_after(headers: Mapping[str, Any]) -> float | None:
    """Return the seconds to wait: given as seconds, milliseconds, or a date."""
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
