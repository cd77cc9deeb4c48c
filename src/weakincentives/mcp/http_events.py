"""What was sent to clients over HTTP, for those that lose a stream and come back for the rest."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from weakincentives.core.call import new_id
from weakincentives.errors import MissingExtra

try:
    from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
    from mcp.types import JSONRPCMessage
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

_MOST = 10_000
"""Messages of all clients together; the oldest are forgotten."""
_MOST_BYTES = 64 << 20


class _Sent(NamedTuple):
    stream: str
    message: JSONRPCMessage | None
    size: int


class RecentEvents(EventStore):
    """The last messages on all streams, in memory."""

    def __init__(self) -> None:
        self._sent: OrderedDict[str, _Sent] = OrderedDict()
        self._size = 0

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        name = new_id()  # not a number: another client must not guess it
        sent = self._sent[name] = _Sent(stream_id, message, _size_of(message))
        self._size += sent.size
        while len(self._sent) > _MOST or (self._size > _MOST_BYTES and len(self._sent) > 1):
            _, oldest = self._sent.popitem(last=False)
            self._size -= oldest.size
        return name

    async def replay_events_after(
        self, last_event_id: str, send_callback: EventCallback
    ) -> str | None:
        last = self._sent.get(last_event_id)
        if last is None:
            return None
        names = list(self._sent)
        for name in names[names.index(last_event_id) + 1 :]:
            sent = self._sent.get(name)
            if sent is not None and sent.stream == last.stream and sent.message is not None:
                await send_callback(EventMessage(sent.message, name))
        return last.stream


def _size_of(message: JSONRPCMessage | None) -> int:
    """Return about how many bytes a message holds: the texts and media in it are what is long."""
    left: list[Any] = [getattr(message, "result", None), getattr(message, "params", None)]
    size = 100
    while left:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each
    return size
