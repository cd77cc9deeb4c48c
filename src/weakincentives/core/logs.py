"""Structured logging: every line written during a call carries that call's id.

The library logs to ``weakincentives`` with the standard library and configures nothing.
``configure_logging`` is for programs that want readable lines or JSON. ``Redaction`` has the rules
for what is secret, and therefore neither logged nor exported.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import IO, Any, cast

from weakincentives.core.call import transaction_under_way
from weakincentives.core.text import harmless


def _call_fields() -> dict[str, str]:
    transaction = transaction_under_way.get()
    if transaction is None:
        return {"call_id": "", "tool": "", "session_id": "", "run_id": ""}
    run = transaction.context.run_context
    return {
        "call_id": transaction.call.id,
        "tool": transaction.call.name,
        "session_id": transaction.session.session_id,
        "run_id": "" if run is None else run.run_id,
    }


class _CallLogger(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        kwargs["extra"] = {**_call_fields(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def get_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger whose records carry ``call_id``, ``tool``, ``session_id`` and ``run_id``."""
    return _CallLogger(logging.getLogger(name), {})


class CallFilter(logging.Filter):
    """Adds the same fields to the records of any other logger. Put it on a handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in _call_fields().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = record.__dict__
        call_id, tool = fields.get("call_id"), fields.get("tool")
        record.call_prefix = f"[{tool} {call_id}] " if call_id else ""
        # Names and messages come from models and servers: their text must not begin a line.
        return harmless(super().format(record), lines=True).replace("\n", "\n    ")


# Fields of every record, and those that formatters add; the rest are the caller's.
_STANDARD = {*logging.makeLogRecord({}).__dict__, "asctime", "call_prefix", "message"}


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        given = {
            name: value
            for name, value in record.__dict__.items()
            if name not in _STANDARD and not (isinstance(value, str) and not value)
        }
        line: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        # Plain ASCII: every stream can encode it.
        return json.dumps({**given, **line}, default=str)


class _CallHandler(logging.StreamHandler[IO[str]]):
    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self.addFilter(CallFilter())


def configure_logging(
    level: int | str = logging.INFO, *, as_json: bool = False, stream: IO[str] | None = None
) -> logging.Handler:
    """Write the program's log lines, each with its call; return the handler.

    A second call for the same stream replaces the first.
    """
    handler = _CallHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(
        _JsonFormatter()
        if as_json
        else _LineFormatter("%(asctime)s %(levelname)s %(name)s: %(call_prefix)s%(message)s")
    )
    root = logging.getLogger()
    root.setLevel(level)
    for other in root.handlers[:]:
        if isinstance(other, _CallHandler) and other.stream is handler.stream:
            root.removeHandler(other)
    root.addHandler(handler)
    return handler


# Secrets

HIDDEN = "(the key)"
"""What a secret is replaced with."""
_SHORTEST = 8
"""Characters; a placeholder is shorter."""
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|AUTHORIZATION|COOKIE", re.IGNORECASE)
_IN_URL = re.compile(r"://([^/@\s]+)@|[?&][^=&#\s]*=([^&#\s]+)")
# In data and source code, where `key` alone says nothing.
_FIELDS = re.compile(
    r"(?:.*[_-])?(?:(?:api|access|private|secret)[_-]?key|token|secret|passw(?:or)?d|passphrase"
    r"|authorization|cookie|credential)s?",
    re.IGNORECASE,
)
# Each with texts of which one must be there, because searching for a text is much faster. Every
# pattern takes linear time, whatever the text.
_SHAPES = tuple(
    (needles, re.compile(pattern))
    for needles, pattern in (
        (("sk-",), r"(?<![\w-])(?P<secret>sk-[\w-]{20,})"),
        (("gh",), r"(?<!\w)(?P<secret>gh[pousr]_\w{20,}|github_pat_\w{20,})"),
        (("glpat-",), r"(?<![\w-])(?P<secret>glpat-[\w-]{16,})"),
        (("hf_",), r"(?<!\w)(?P<secret>hf_\w{20,})"),
        (("xox",), r"(?<![\w-])(?P<secret>xox[abeprs]-[\w-]{10,})"),
        (("AKIA", "ASIA"), r"(?<!\w)(?P<secret>A[KS]IA[0-9A-Z]{16})(?!\w)"),
        (("AIza",), r"(?<![\w-])(?P<secret>AIza[\w-]{30,})"),
        (("eyJ",), r"(?<![\w-])(?P<secret>eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"),
        (("earer ",), r"\b[Bb]earer (?P<secret>[\w.~+/=-]{8,})"),
        (("://",), r"://(?P<secret>[^/@\s:]*:[^/@\s]+)@"),
        # Private keys in the formats of age, WireGuard, PuTTY and JSON Web Keys.
        (("AGE-SECRET-KEY-",), r"(?P<secret>AGE-SECRET-KEY-[0-9A-Z-]{40,})"),
        (("edKey", "teKey"), r"(?:Private|Preshared)Key[ \t]*=[ \t]*(?P<secret>[\w+/]{42,44}=?)"),
        (
            ("Private-Lines:",),
            r"Private-Lines: \d{1,3}(?P<secret>(?:(?:\r?\n|\\{1,4}n)[^\w\n]{0,9}(?:\d{1,6}\W{1,3})?"
            r"[A-Za-z0-9+/]{1,99}={0,2}(?=\s|\\|\Z))+)",
        ),
        (
            ("kty",),
            r"\b(?:d|p|q|dp|dq|qi|k)\\{0,4}[\"'][ \t]*:[ \t]*\\{0,4}[\"'](?P<secret>[\w-]{20,})",
        ),
        (  # as in .env
            ("=",),
            r"(?<![\w$])(?P<variable>[A-Z][A-Z0-9_]{0,63})(?P<gap>[ \t]{1,4})?=[ \t]{0,4}[\"']?"
            r"(?P<secret>(?<=[\"'])[^\"'\n]{8,200}(?=[\"'])"
            # With spaces it may be source code: a call or an index is no value.
            r"|(?(gap)[^\s$(\[\"'][^\s(\[]{7,}(?=\s|\Z)|[^\s$(\"']\S{7,}))",
        ),
        (
            ("='", '="', ": '", ': "', "= '", '= "', ":'", ':"'),
            r"(?<![\w-])(?P<field>[\w-]{5,64})[\"']?[ \t]*[=:][ \t]*(?P<quote>[\"'])"
            r"(?P<secret>[^\s\"']{8,200})(?P=quote)",
        ),
    )
)


_ANY_NEEDLE = re.compile("|".join(re.escape(each) for some, _ in _SHAPES for each in some))
_SHORT = 400
"""Characters up to which one search for all of them is faster than one for each."""
_KEYS = 10_000
_PRIVATE = frozenset({"d", "p", "q", "dp", "dq", "qi", "k"})
"""The private parts of a JSON Web Key."""


class Redaction:
    """Replaces secrets in texts and in JSON data.

    Secret are values of the environment and of ``settings`` whose names say so, what precedes the
    host or follows a `?` in their URLs; and in any text what looks like a key of a well-known
    service, a private key or a part of one, a password in a URL, or a literal assigned to such a
    name.

    >>> Redaction({"api_key": "correct horse"})("Incorrect key: correct horse")
    'Incorrect key: (the key)'
    >>> Redaction()("API_KEY=abcdefgh123")
    'API_KEY=(the key)'
    """

    def __init__(self, settings: object = ()) -> None:
        from urllib.parse import quote

        from weakincentives.core.pem import PrivateKeys

        self.keys = PrivateKeys(_hidden)
        known = {*_secrets_in(settings), *_secrets_in(os.environ)}
        self._known: list[tuple[str, str]] = []
        self._keys: dict[str, str] = {}
        """Keys of JSON data: most are the same ones again."""
        for secret in sorted(known, key=len, reverse=True):
            if len(secret) >= _SHORTEST:
                escaped = json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]
                spelled = {secret, quote(secret, safe=""), *escaped}
                self._known += [(each, _hidden(each)) for each in sorted(spelled)]

    def __call__(self, text: str) -> str:
        """Return a text without secrets; it has as many lines as before."""
        if len(text) < _SHORTEST:
            return text
        for secret, hidden in self._known:
            text = text.replace(secret, hidden)
        text = self.keys.without(text)
        if len(text) < _SHORT and not _ANY_NEEDLE.search(text):
            return text
        for needles, pattern in _SHAPES:
            if any(needle in text for needle in needles):
                text = pattern.sub(_without_group, text)
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """Return JSON data without secrets, keys included."""
        if isinstance(value, str):
            if len(value) >= _SHORTEST and _FIELDS.fullmatch(name):
                return _hidden(value)
            return self(value)
        if isinstance(value, dict):
            given = cast("dict[str, Any]", value)
            # Those of a JSON Web Key say nothing by themselves.
            secret = _PRIVATE if "kty" in given else frozenset[str]()
            return {
                self._key(key): self.value(each, "private_key" if key in secret else key)
                for key, each in given.items()
            }
        if isinstance(value, list | tuple):
            items = cast("Sequence[Any]", value)
            is_text = len(items) > 1 and all(isinstance(each, str) for each in items)
            if is_text and not _FIELDS.fullmatch(name):
                return self._lines(items)
            return [self.value(each, name) for each in items]
        return value

    def _lines(self, lines: Sequence[str]) -> list[str]:
        """Return texts without secrets; they may be the lines of one text, with a private key."""
        rest = iter(self("\n".join(lines)).split("\n"))
        return ["\n".join(next(rest) for _ in range(1 + each.count("\n"))) for each in lines]

    def _key(self, key: str) -> str:
        if len(self._keys) > _KEYS:
            self._keys.clear()
        if key not in self._keys:
            self._keys[key] = self(key)
        return self._keys[key]


def without_secrets(text: str, settings: object = ()) -> str:
    """Return a text without the secrets that ``Redaction`` knows."""
    return Redaction(settings)(text)


def _hidden(secret: str) -> str:
    return HIDDEN + "\n" * secret.count("\n")


def _without_group(found: re.Match[str]) -> str:
    named = found.groupdict()
    if "variable" in named and not _NAMES.search(named["variable"]):
        return found[0]
    if "field" in named and not _FIELDS.fullmatch(named["field"]):
        return found[0]
    start, end = (place - found.start() for place in found.span("secret"))
    return found[0][:start] + _hidden(found["secret"]) + found[0][end:]


def _secrets_in(settings: object, name: str = "") -> Iterator[str]:
    """Yield values that may be secret: by their name, or by their place in a URL."""
    if isinstance(settings, Mapping):
        for key, value in cast("Mapping[Any, object]", settings).items():
            yield from _secrets_in(value, str(key))
    elif isinstance(settings, list | tuple):
        for each in cast("Sequence[object]", settings):
            yield from _secrets_in(each, name)
    elif isinstance(settings, str):
        from urllib.parse import unquote

        if _NAMES.search(name):
            yield settings
            yield settings.rpartition(" ")[2]  # Bearer
        for found in _IN_URL.finditer(settings):
            user, query = found.groups()
            parts = (user, user.rpartition(":")[2]) if user else (query,)
            yield from (*parts, *map(unquote, parts))
