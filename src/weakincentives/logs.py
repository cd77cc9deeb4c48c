"""Structured logging: every line written during a call carries that call's id.

The library logs to ``weakincentives`` with the standard library and configures nothing.
``configure_logging`` is for programs that want readable lines or JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from typing import IO, Any

from weakincentives.call import transaction_under_way
from weakincentives.text import harmless


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
