"""MCP over standard input and output: one JSON message a line, and nothing else on that wire.

Nothing here blocks: a client that sends half a line, or does not read, keeps nobody waiting and
nothing from ending.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import select
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    jsonrpc_message_adapter,
)

from weakincentives.logs import get_logger
from weakincentives.mcp.wire import Wire, claimed_wire

_logger = get_logger(__name__)

MAX_MESSAGE = 16 << 20
"""Bytes that one message may have; a longer one is refused, and never held in memory."""

_CHUNK = 1 << 16
_PIECE = 4096
"""Bytes that a pipe takes without blocking whenever it says that it takes any."""
_MUCH = 1 << 20
"""Bytes that may wait for the client to read them before the server stops sending more."""
_GRACE = 2
"""Seconds that a client has for reading what is left when the server ends."""
_TEXT = rb'"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*'
_ID = rb'"id"\s*:\s*(?:(\d{1,18})|"([^"\\]*)")\s*'
_ID_AT_THE_START = re.compile(rb"\s*\{\s*(?:" + _TEXT + rb",\s*)*" + _ID + rb"[,}]")
_ID_AT_THE_END = re.compile(rb",\s*" + _ID + rb"(?:,\s*" + _TEXT + rb")*\}\s*$")

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


@asynccontextmanager
async def stdio_streams(wire: Wire | None = None) -> AsyncGenerator[tuple[Incoming, Outgoing]]:
    """Yield the streams of a client: by default the one at standard input and output."""
    if wire is None:
        with claimed_wire() as wire:
            async with stdio_streams(wire) as streams:
                yield streams
        return
    to_server, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](math.inf)
    outgoing, to_client = anyio.create_memory_object_stream[SessionMessage](0)
    sender = _Sender(wire.outgoing, to_server.close)
    receiver = _Receiver(wire.incoming, to_server, sender.put)
    sending = asyncio.ensure_future(sender.send_all(to_client))
    receiver.begin()
    try:
        yield incoming, outgoing
    finally:
        receiver.end()
        await outgoing.aclose()
        sender.end()
        await sending
        to_server.close()
        incoming.close()


class _Receiver:
    """Hands the server what a client writes."""

    def __init__(
        self,
        descriptor: int,
        to_server: MemoryObjectSendStream[SessionMessage | Exception],
        answer: Callable[[JSONRPCMessage], None],
    ) -> None:
        self._descriptor = descriptor
        self._to_server = to_server
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._lines = _Lines()

    def begin(self) -> None:
        try:
            self._loop.add_reader(self._descriptor, self._read)
        except PermissionError:  # a file, which cannot be waited for; nor need it be
            threading.Thread(target=self._read_all, name="wink-stdio", daemon=True).start()

    def end(self) -> None:
        self._loop.remove_reader(self._descriptor)

    def _read(self) -> None:
        chunk = _read_from(self._descriptor)
        self._take(chunk)
        if not chunk:
            self.end()

    def _read_all(self) -> None:
        with suppress(RuntimeError):  # the loop has ended: nobody serves any more
            while chunk := _read_from(self._descriptor):
                self._loop.call_soon_threadsafe(self._take, chunk)
            self._loop.call_soon_threadsafe(self._take, b"")

    def _take(self, chunk: bytes) -> None:
        for line in self._lines.add(chunk):
            self._take_line(line)
        if not chunk:
            if self._lines.is_within_one:
                _logger.warning("the client left in the middle of a line")
            self._to_server.close()

    def _take_line(self, line: bytes | tuple[bytes, bytes]) -> None:
        if isinstance(line, tuple):
            _logger.warning("refused a message of more than %d bytes", MAX_MESSAGE)
            self._refuse(INVALID_REQUEST, f"a message has {MAX_MESSAGE} bytes at most", *line)
            return
        if not line.strip():
            return
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            _logger.warning("ignored a line that is no JSON-RPC message: %.80r", line)
            self._refuse(PARSE_ERROR, "not a JSON-RPC message", line, line)
            return
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._to_server.send_nowait(SessionMessage(message))

    def _refuse(self, code: int, why: str, start: bytes, end: bytes) -> None:
        """Answer what the server never sees."""
        error = ErrorData(code=code, message=why)
        self._answer(JSONRPCError(jsonrpc="2.0", id=_id_in(start, end), error=error))


class _Sender:
    """Writes to a client as far as it reads."""

    def __init__(self, descriptor: int, leave: Callable[[], object]) -> None:
        self._descriptor = descriptor
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._most: float = _MUCH
        self._is_waiting = False
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    async def send_all(self, messages: MemoryObjectReceiveStream[SessionMessage]) -> None:
        """Write what the server sends until it ends; a client that does not read then loses it."""
        async with messages:
            async for each in messages:
                self.put(each.message)
                await self._has_room.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE):
                while self._unsent:
                    await asyncio.sleep(0.01)
        self._wait(False)

    def end(self) -> None:
        """Take what is left without waiting for the client to read."""
        self._most = math.inf
        self._has_room.set()

    def put(self, message: JSONRPCMessage) -> None:
        """Write a message now, or as soon as the client reads."""
        line = message.model_dump_json(by_alias=True, exclude_unset=True)
        self._unsent += line.encode() + b"\n"
        if not self._is_waiting:
            self._write()
        if len(self._unsent) > self._most:
            self._has_room.clear()

    def _write(self) -> None:
        try:
            while self._unsent and self._poll.poll(0):
                written = os.write(self._descriptor, self._unsent[:_PIECE])
                del self._unsent[:written]
        except OSError as error:
            _logger.info("the client has gone: %s", error)
            self._unsent.clear()
            self._leave()
        self._wait(bool(self._unsent))
        if len(self._unsent) <= self._most:
            self._has_room.set()

    def _wait(self, wanted: bool) -> None:
        if wanted and not self._is_waiting:
            self._loop.add_writer(self._descriptor, self._write)
        elif self._is_waiting and not wanted:
            self._loop.remove_writer(self._descriptor)
        self._is_waiting = wanted


def _read_from(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _CHUNK)
    except OSError as error:
        _logger.info("the client has gone: %s", error)
        return b""


def _id_in(start: bytes, end: bytes) -> int | str | None:
    """Return the id of a request that cannot be read: whoever sent it waits for an answer."""
    # At either end, where it is not inside of something else.
    found = _ID_AT_THE_START.match(start[:_CHUNK]) or _ID_AT_THE_END.search(end[-_CHUNK:])
    if found is None:
        return None
    number, text = found.groups()
    return int(number) if number is not None else text.decode("utf-8", "replace")


class _Lines:
    """Puts lines together from what comes in, and holds no more than a message may have."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._kept = bytearray()
        self._length = 0
        self._start = self._end = b""  # of a line that is too long

    @property
    def is_within_one(self) -> bool:
        return self._length > 0

    def add(self, chunk: bytes) -> Iterator[bytes | tuple[bytes, bytes]]:
        """Yield the lines that are whole now; of one that is too long, its start and its end."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._keep(end)
            is_short = self._length <= MAX_MESSAGE
            yield bytes(self._kept) if is_short else (self._start, self._end)
            self._begin()
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        self._length += len(part)
        if self._length <= MAX_MESSAGE:
            self._kept += part
            return
        self._start = self._start or bytes(self._kept[:_CHUNK])
        self._end = (self._end + part)[-_CHUNK:]
        self._kept.clear()
