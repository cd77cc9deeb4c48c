"""An MCP server as a process of ours: what it says line by line, and its end whatever happens."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from weakincentives.errors import McpServerError
from weakincentives.logs import get_logger
from weakincentives.mcp.server_launcher import living_in
from weakincentives.state import program, source_of

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams  # the type of every transport of the SDK
    from mcp.shared.message import SessionMessage

_logger = get_logger(__name__)

_LAUNCHER = source_of(__file__, "server_launcher.py")

_GRACE = 2.0
"""Seconds that a server has to do what it is asked."""
_LEAVING = 10.0
"""Seconds for one to end that has closed its output by itself: its exit code is worth a wait."""
_CERTAIN = 60.0
"""Seconds for what is sure to happen: a killed process ends, however busy the machine is."""
_LINES, _LINE = 20, 500


class ServerProcess:
    """A command that speaks MCP on its input and output; start it with ``async with running()``.

    Unlike the SDK's own transport it bounds what the server may send in one message, keeps the
    last lines of what it complains about, and takes the server along when this process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        max_message: int,
        on_end: Callable[[], None],
    ) -> None:
        self._command = tuple(command)
        self._env = {**env}
        self._cwd = cwd
        self._max_message = max_message
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._said: deque[str] = deque(maxlen=_LINES)
        self._fault = ""
        self._has_left = False
        """Whether it ended by itself."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[TransportStreams, None]:
        """Start the server; yields the streams of its messages, and ends it."""
        import anyio
        from mcp.shared.message import SessionMessage

        process = self._process = await self._start()
        # The reader's end of one and the writer's end of the other are the session's.
        heard, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, to_say = anyio.create_memory_object_stream[SessionMessage](0)
        complaints = asyncio.create_task(self._listen(process))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hear, process, heard)
                tasks.start_soon(self._say, process, to_say, heard)
                try:
                    yield incoming, outgoing
                finally:
                    with anyio.CancelScope(shield=True):
                        await _end(process, _LEAVING if self._has_left else _GRACE)
                    tasks.cancel_scope.cancel()
        finally:
            for stream in (heard, incoming, outgoing, to_say):
                stream.close()
            with suppress(TimeoutError):  # what has left the group may hold it open
                await asyncio.wait_for(complaints, 0.5)
            # Else it stays open, with a warning, as long as something left behind holds a pipe.
            process._transport.close()  # type: ignore[attr-defined]  # nothing public closes it

    def kill(self) -> None:
        """End the server and all it has started, at once."""
        if self._process is not None:
            _tell(self._process, signal.SIGKILL)

    def last_words(self) -> str:
        """Return how it ended and what it said last, as far as that is known."""
        parts: list[str] = [self._fault] if self._fault else []
        code = None if self._process is None else self._process.returncode
        if code is not None and self._has_left:
            parts.append(f"It ended with exit code {code}.")
        if self._said:
            parts.append("It said last:\n" + "\n".join(f"  {line}" for line in self._said))
        return " ".join(parts)

    async def _start(self) -> asyncio.subprocess.Process:
        program = self._command[0]
        found = shutil.which(program, path=self._env.get("PATH", os.defpath))
        if found is None and not (self._cwd and os.path.isfile(Path(self._cwd, program))):
            raise McpServerError(
                f"there is no program {program!r}: install it, or give its whole path"
            )
        try:
            return await asyncio.create_subprocess_exec(
                *_launched(self._command),
                env=self._env,
                cwd=self._cwd,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a group of its own, to be ended as a whole
                limit=self._max_message,
            )
        except (OSError, ValueError) as error:
            raise McpServerError(f"{program!r} cannot be started: {error}") from error

    async def _hear(
        self,
        process: asyncio.subprocess.Process,
        heard: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        try:
            async for line in self._lines(process):
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    self._note(line, "on its output, which is for messages only: ")
                    continue
                await heard.send(SessionMessage(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the session has ended
        finally:
            self._on_end()
            heard.close()  # whoever waits for an answer gets none

    async def _lines(self, process: asyncio.subprocess.Process) -> AsyncGenerator[bytes, None]:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                yield line
            self._has_left = True
        except ValueError:
            self._fault = f"It sent a message of more than {self._max_message:,} bytes."
            self.kill()

    async def _say(
        self,
        process: asyncio.subprocess.Process,
        to_say: MemoryObjectReceiveStream[SessionMessage],
        heard: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        assert process.stdin is not None
        try:
            async for each in to_say:
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except OSError:
            heard.close()  # it does not listen any more: nothing that is asked will be answered

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # longer than any complaint: what is left of it comes next
                continue
            if not line:
                return
            self._note(line)

    def _note(self, line: bytes, where: str = "") -> None:
        text = line.decode(errors="replace").rstrip()[:_LINE]
        if text:
            self._said.append(where + text)
            _logger.debug("%s: %s%s", self._command[0], where, text)


def _launched(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command with what takes the server along when this process is killed."""
    if sys.platform != "linux" or not sys.executable:
        return tuple(command)
    return (*program(_LAUNCHER, str(os.getpid())), *command)


async def _end(process: asyncio.subprocess.Process, grace: float) -> None:
    """End the server: asked by closing its input, then told, then killed."""
    assert process.stdin is not None
    process.stdin.close()
    # Not process.wait(): that waits for the pipes, too, which a child of the server may hold.
    for step, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, _GRACE)):
        if await _until(lambda: process.returncode is not None, patience):
            break
        _tell(process, step)
    await _until(lambda: process.returncode is not None, _CERTAIN)
    # A launcher that was killed with its server may be gone first.
    await _until(lambda: not living_in(process.pid), _CERTAIN)


async def _until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait for something, but no longer than that; returns whether it holds then."""
    until = asyncio.get_running_loop().time() + seconds
    while not holds():
        if asyncio.get_running_loop().time() > until:
            return False
        await asyncio.sleep(0.01)
    return True


def _tell(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
