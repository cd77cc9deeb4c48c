"""An MCP server as a child process: its messages, and its end whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weakincentives.core.logs import get_logger
from weakincentives.core.programs import (
    find_program,
    missing_program,
    reach_of_agents,
    safe_path,
    script_in_reach,
)
from weakincentives.core.state import program, source_of
from weakincentives.errors import McpServerError
from weakincentives.mcp.server_launcher import living_in

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams  # the type of every transport of the SDK
    from mcp.shared.message import SessionMessage

_logger = get_logger(__name__)

_LAUNCHER = source_of(__file__, "server_launcher.py")

_GRACE = 2.0
"""Seconds that a server has to end when asked."""
_LEAVING = 10.0
"""Seconds to wait for the exit code of a server that has closed its output."""
_CERTAIN = 60.0
"""Seconds to wait for a killed process, however busy the machine is."""
_LINES, _LINE = 20, 500


@dataclass(kw_only=True)
class ServerProcess:
    """A command that speaks MCP on its input and output; start it with ``async with running()``.

    Unlike the SDK's own transport it limits the size of a message, keeps the last lines of standard
    error, and ends the server when this process is killed.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str | os.PathLike[str] | None
    max_message: int
    on_end: Callable[[], None]
    _process: asyncio.subprocess.Process | None = None
    _said: deque[str] = field(default_factory=lambda: deque[str](maxlen=_LINES))
    _fault: str = ""
    _has_left: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[TransportStreams, None]:
        """Start the server, yield the streams of its messages, and end it."""
        import anyio
        from mcp.shared.message import SessionMessage

        process = self._process = await self._start()
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
            with suppress(TimeoutError):  # a process that left the group may hold it open
                await asyncio.wait_for(complaints, 0.5)
            # There is no public way to close it while another process holds a pipe.
            process._transport.close()  # type: ignore[attr-defined]

    def kill(self) -> None:
        """Kill the server and everything it has started."""
        if self._process is not None:
            _signal(self._process, signal.SIGKILL)

    def last_words(self) -> str:
        """Return its exit code and its last lines, as far as they are known."""
        parts: list[str] = [self._fault] if self._fault else []
        code = None if self._process is None else self._process.returncode
        if code is not None and self._has_left:
            parts.append(f"It ended with exit code {code}.")
        if self._said:
            parts.append("Its last output:\n" + "\n".join(f"  {line}" for line in self._said))
        return " ".join(parts)

    async def _start(self) -> asyncio.subprocess.Process:
        program, *arguments = self.command
        path = self.env.get("PATH", os.defpath)
        directory = os.path.abspath(self.cwd or ".")
        # A relative path starts where the server does.
        named = os.path.join(directory, program) if os.path.dirname(program) else program
        found = find_program(named, path)
        if found is None:
            why = missing_program(named, path)
            if named == program and why.endswith("is not installed"):
                why = f"there is no program {program!r}: install it, or give its full path"
            raise McpServerError(why)
        if why := script_in_reach(found, arguments, directory):
            raise McpServerError(f"cannot start {program!r}: {why}")
        env = {**self.env, "PATH": safe_path(path)}
        if {"-m", "-c"} & set(arguments) and reach_of_agents(directory):
            env.setdefault("PYTHONSAFEPATH", "1")  # or Python looks for modules there
        try:
            return await asyncio.create_subprocess_exec(
                *_launched([found, *arguments]),
                env=env,
                cwd=directory,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a group of its own, to be ended as a whole
                limit=self.max_message,
            )
        except (OSError, ValueError) as error:
            raise McpServerError(f"cannot start {program!r}: {error}") from error

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
                    self._note(line, "on standard output, which is for messages only: ")
                    continue
                await heard.send(SessionMessage(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the session has ended
        finally:
            self.on_end()
            heard.close()  # ends all requests that wait for an answer

    async def _lines(self, process: asyncio.subprocess.Process) -> AsyncGenerator[bytes, None]:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                yield line
            self._has_left = True
        except ValueError:
            self._fault = f"It sent a message of more than {self.max_message:,} bytes."
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
            heard.close()  # it no longer reads: no request will be answered

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a very long line: the rest comes next
                continue
            if not line:
                return
            self._note(line)

    def _note(self, line: bytes, where: str = "") -> None:
        text = line.decode(errors="replace").rstrip()[:_LINE]
        if text:
            self._said.append(where + text)
            _logger.debug("%s: %s%s", self.command[0], where, text)


def _launched(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command inside the launcher, which ends the server when we are killed."""
    if sys.platform != "linux" or not sys.executable:
        return tuple(command)
    return (*program(_LAUNCHER, str(os.getpid())), *command)


async def _end(process: asyncio.subprocess.Process, grace: float) -> None:
    """End the server: close its input, then terminate it, then kill it."""
    assert process.stdin is not None
    process.stdin.close()
    # Not process.wait(): it also waits for the pipes, which a child of the server may hold.
    for step, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, _GRACE)):
        if await _until(lambda: process.returncode is not None, patience):
            break
        _signal(process, step)
    await _until(lambda: process.returncode is not None, _CERTAIN)
    # A killed launcher may end before its server.
    await _until(lambda: not living_in(process.pid), _CERTAIN)


async def _until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until something holds; return False after a timeout."""
    until = asyncio.get_running_loop().time() + seconds
    while not holds():
        if asyncio.get_running_loop().time() > until:
            return False
        await asyncio.sleep(0.01)
    return True


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
