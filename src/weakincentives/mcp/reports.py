"""Progress and log lines of a running call, told to its client from any thread, in order."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from weakincentives.core.deadlines import Heartbeat
from weakincentives.errors import MissingExtra
from weakincentives.prompt.caller import LogLevel
from weakincentives.serde import dump

try:
    from mcp.server.connection import allowed_log_levels
    from mcp.types import LoggingMessageNotification, LoggingMessageNotificationParams
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

_LEVEL = "weakincentives level"
_MOST_WAITING = 1000
"""Log lines that wait for a client that does not read; the oldest are dropped."""


class _Progress(NamedTuple):
    message: str | None
    done: float | None
    total: float | None


class _Line(NamedTuple):
    level: LogLevel
    message: object
    logger: str


class Reports:
    """Tells one client about one request."""

    def __init__(self, request: ServerRequestContext) -> None:
        self.heart = Heartbeat(on_beat=self._beat)
        self._client, self._request_id = request.session, request.request_id
        self._request = request
        self._levels: AbstractSet[str] | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Progress | _Line] = deque(maxlen=_MOST_WAITING)
        self._reported = True  # the first beat is the runtime's own
        self._last: float | None = None
        self._has_numbers = False
        self._telling: asyncio.Task[None] | None = None

    def report(self, call_id: str, message: str, done: float | None, total: float | None) -> None:
        """Tell about progress; the beat that follows says nothing more."""
        self._reported = True
        self._add(_Progress(message or None, done, total))

    def log(self, level: LogLevel, message: object, logger: str) -> None:
        if self._levels is None:
            self._levels = _levels_of(self._request)
        if level in self._levels:
            self._add(_Line(level, message, logger))

    def _beat(self) -> None:
        if not self._reported:
            self._add(_Progress(None, None, None))
        self._reported = False

    def _add(self, notice: _Progress | _Line) -> None:
        self._waiting.append(notice)
        self._loop.call_soon_threadsafe(self._begin_to_tell)

    def _begin_to_tell(self) -> None:
        if self._telling is None or self._telling.done():
            self._telling = self._loop.create_task(self._tell())

    async def _tell(self) -> None:
        while self._waiting:
            notice = self._waiting.popleft()
            if isinstance(notice, _Line):
                await self._tell_line(notice)
                continue
            following = self._waiting[0] if self._waiting else None
            if notice.message is None and isinstance(following, _Progress):
                continue  # beats in between share a notification
            await self._tell_progress(notice)

    async def _tell_line(self, line: _Line) -> None:
        params = LoggingMessageNotificationParams(
            level=line.level, data=_plain(line.message), logger=line.logger or None
        )
        await self._client.send_notification(
            LoggingMessageNotification(params=params), self._request_id
        )

    async def _tell_progress(self, notice: _Progress) -> None:
        """Send the numbers as they are: they may never go back, and each must be new."""
        last, done = self._last, notice.done
        if done is None and not self._has_numbers:
            done = (last or 0) + 1
        elif done is None and notice.message is None:
            return  # alive, and no further
        self._has_numbers = self._has_numbers or notice.done is not None
        if done is None or (last is not None and done <= last):
            done = math.nextafter(last or 0, math.inf)
        self._last = done
        await self._client.report_progress(done, notice.total, notice.message)

    async def end(self) -> None:
        """Wait for the last report: nothing may follow the answer."""
        if self._waiting:
            self._begin_to_tell()
        if self._telling is not None:
            await self._telling


def _plain(message: object) -> Any:
    return message if isinstance(message, str) else dump(message)


def set_level(request: ServerRequestContext, level: LogLevel) -> None:
    """Leave out the lines below a level, for a client of an older era."""
    _state_of(request)[_LEVEL] = level


def _levels_of(request: ServerRequestContext) -> AbstractSet[str]:
    """Return the levels that the client wants to hear; of the newest era, it says so each time."""
    levels = get_args(LogLevel)
    least = _state_of(request).get(_LEVEL, "debug")
    wanted = allowed_log_levels(request.session.protocol_version, cast("Any", request.meta))
    return wanted & set(levels[levels.index(least) :])


def _state_of(request: ServerRequestContext) -> dict[str, Any]:
    # There is no public way to the connection, which outlives the request.
    return request.session._connection.state  # pyright: ignore[reportPrivateUsage]
