"""MCP over standard input and output: one JSON message per line.

Nothing here blocks: a client that sends half a line, or does not read, delays no other client and
does not keep the server from ending.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import select
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NamedTuple

from weakincentives.core.logs import get_logger
from weakincentives.errors import MissingExtra

try:
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
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

_logger = get_logger(__name__)

MAX_MESSAGE = 16 << 20
"""Bytes in one message; a longer one is refused, and never held in memory."""

_CHUNK = 1 << 16
_PIECE = 4096
"""Bytes that a pipe takes without blocking when it is ready."""
_MUCH = 1 << 20
"""Unsent bytes beyond which the server waits for the client."""
_GRACE = 2
"""Seconds that a client has to read the rest when the server ends."""
_TEXT = rb'"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*'
_ID = rb'"id"\s*:\s*(?:(\d{1,18})|"([^"\\]*)")\s*'
_ID_AT_THE_START = re.compile(rb"\s*\{\s*(?:" + _TEXT + rb",\s*)*" + _ID + rb"[,}]")
_ID_AT_THE_END = re.compile(rb",\s*" + _ID + rb"(?:,\s*" + _TEXT + rb")*\}\s*$")

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


class Wire(NamedTuple):
    """The descriptors that a client writes to and reads from."""

    incoming: int
    outgoing: int


@contextmanager
def claimed_wire() -> Generator[Wire]:
    """Reserve standard input and output for the protocol.

    In the block, output of everyone else goes to standard error, also that of programs which tools
    start; and standard input is empty for them.
    """
    wire = Wire(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        yield wire
    finally:
        os.dup2(wire.incoming, 0)
        os.dup2(wire.outgoing, 1)
        os.close(nothing)
        os.close(wire.outgoing)
        # Not the other one: a thread may still read it, and the number must not be reused.


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
    """Passes a client's messages to the server; holds at most one message in memory."""

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
        self._line = bytearray()
        self._length = 0
        self._start = self._end = b""
        """The two ends of a line that is too long."""

    def begin(self) -> None:
        try:
            self._loop.add_reader(self._descriptor, self._read)
        except PermissionError:  # a regular file
            threading.Thread(target=self._read_all, name="wink-stdio", daemon=True).start()

    def end(self) -> None:
        self._loop.remove_reader(self._descriptor)

    def _read(self) -> None:
        chunk = _read_from(self._descriptor)
        self._take(chunk)
        if not chunk:
            self.end()

    def _read_all(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            while chunk := _read_from(self._descriptor):
                self._loop.call_soon_threadsafe(self._take, chunk)
            self._loop.call_soon_threadsafe(self._take, b"")

    def _take(self, chunk: bytes) -> None:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._add(end)
            self._take_line()
        self._add(rest)
        if not chunk:
            if self._length:
                _logger.warning("the client left in the middle of a message")
            self._to_server.close()

    def _add(self, part: bytes) -> None:
        self._length += len(part)
        if self._length <= MAX_MESSAGE:
            self._line += part
            return
        self._start = self._start or bytes(self._line[:_CHUNK])
        self._end = (self._end + part)[-_CHUNK:]
        self._line.clear()

    def _take_line(self) -> None:
        line, length, start, end = bytes(self._line), self._length, self._start, self._end
        self._line.clear()
        self._length, self._start, self._end = 0, b"", b""
        if length > MAX_MESSAGE:
            _logger.warning("refused a message of more than %d bytes", MAX_MESSAGE)
            self._refuse(INVALID_REQUEST, f"a message has {MAX_MESSAGE} bytes at most", start, end)
        elif line.strip():
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                _logger.warning("ignored a line that is not a JSON-RPC message: %.80r", line)
                self._refuse(PARSE_ERROR, "not a JSON-RPC message", line, line)
                return
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                self._to_server.send_nowait(SessionMessage(message))

    def _refuse(self, code: int, why: str, start: bytes, end: bytes) -> None:
        """Answer a request that cannot be read, if its id can be found at either end."""
        found = _ID_AT_THE_START.match(start[:_CHUNK]) or _ID_AT_THE_END.search(end[-_CHUNK:])
        number, text = (None, None) if found is None else found.groups()
        name = text.decode("utf-8", "replace") if text is not None else None
        error = ErrorData(code=code, message=why)
        self._answer(JSONRPCError(jsonrpc="2.0", id=int(number) if number else name, error=error))


class _Sender:
    """Writes to a client as fast as it reads."""

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
        """Write messages until the server ends; then wait a moment for the client to read."""
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
        """Accept the rest without waiting for the client."""
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
            _logger.info("the client has left: %s", error)
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
        _logger.info("the client has left: %s", error)
        return b""
