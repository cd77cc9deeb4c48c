"""A connection to an MCP server: opened when it is needed, and again after it broke off.

The SDK's client is async and belongs to one event loop, and calls come from many: so a connection
has a loop of its own, in a thread of its own, for as long as it is open.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit, urlunsplit

from weakincentives.call import transaction_under_way
from weakincentives.errors import McpServerError, MissingExtra
from weakincentives.logs import get_logger
from weakincentives.mcp.server_process import ServerProcess
from weakincentives.retry import NETWORK, SERVER_ERROR, TIMEOUT
from weakincentives.serde.bounded_schema import BoundedSchema

if TYPE_CHECKING:
    import httpx2
    from anyio import CancelScope
    from mcp import Client, types

T = TypeVar("T")

_logger = get_logger(__name__)

_PATIENCE = 5.0
_CERTAIN = 150.0
"""Seconds for an end that is sure to come: a server is killed when nothing else helps."""
_MAX_LOST = 3
_MAX_PAGES = 100
_MAX_LISTED = 32_000_000
"""Characters in all that a server may say of its tools."""


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A program that speaks MCP on its input and output."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """What it finds in its environment beside HOME, PATH and the like. Of this process's own it
    gets nothing else."""
    cwd: str | os.PathLike[str] | None = None
    max_message: int = 32_000_000
    """Bytes that it may send in one message; it is ended when it sends more."""

    def __str__(self) -> str:
        return Path(self.command).name  # what may be secret is not shown: arguments may


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server that is reached over streamable HTTP."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Sent with every request: `{"Authorization": "Bearer ..."}`."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"a URL starts with http:// or https://, got {self.url!r}")

    def __str__(self) -> str:
        scheme, place, path, _, _ = urlsplit(self.url)  # the same holds for the rest
        return urlunsplit((scheme, place.rpartition("@")[2], path, "", ""))


@dataclass(frozen=True, slots=True)
class _InProcess:
    """A server object of the SDK, in this process."""

    server: Any

    def __str__(self) -> str:
        return str(getattr(self.server, "name", None) or type(self.server).__name__)


Server: TypeAlias = StdioServer | HttpServer | _InProcess


def as_server(server: object) -> Server:
    """Return how to connect to a server: a command, a URL, or a server object of the SDK."""
    if isinstance(server, StdioServer | HttpServer):
        return server
    if isinstance(server, str):
        if server.startswith(("http://", "https://")):
            return HttpServer(server)
        raise TypeError(f"{server!r} is no URL; give a command as a list: {server.split()!r}")
    if isinstance(server, Sequence):
        words = [str(each) for each in server]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # whatever it holds
        if words:
            return StdioServer(words[0], tuple(words[1:]))
    elif hasattr(server, "list_tools") or hasattr(server, "get_request_handler"):
        return _InProcess(server)
    raise TypeError(
        "server takes a command as a list, a URL, a StdioServer, an HttpServer, or a server of "
        f"the mcp package; got {server!r}"
    )


class McpConnection:
    """A server's tools, to be listed and called from any thread and any event loop.

    ``on_tools`` is told which tools the server has, whenever it was started or says that it has
    others, on the connection's thread.
    After ``close`` the next use opens it again.
    """

    def __init__(
        self,
        server: Server,
        *,
        start_timeout: float = 30.0,
        on_tools: Callable[[Sequence[types.Tool]], None] | None = None,
    ) -> None:
        if find_spec("mcp") is None:
            raise MissingExtra("mcp", "mcp")
        self.server = server
        self.start_timeout = start_timeout
        self.on_tools = on_tools
        self._lock = threading.Lock()
        self._runner: _Runner | None = None
        self._users = 0

    def open(self) -> Sequence[types.Tool]:
        """Connect if need be, and return the tools that the server lists."""
        return self._submit(lambda runner: runner.tools()).result()

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        on_progress: Callable[[], object] | None = None,
    ) -> types.CallToolResult:
        """Call a tool; raises McpServerError when the server fails, MCPError when it refuses.

        Cancelling tells the server; what it answers later is dropped.
        """
        work = self._submit(lambda runner: runner.call(name, dict(arguments), on_progress))
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise McpServerError(
                f"The connection to the MCP server {self.server} was closed during the call."
            ) from None

    async def stop(self) -> None:
        """End the server at once, whatever it does; the next use starts it again."""
        await asyncio.wrap_future(self._submit(lambda runner: runner.stop(kill=True)))

    def enter(self) -> None:
        """Note one more that uses it."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Close it when nobody uses it any more."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
        self.close()

    def close(self) -> None:
        """End the connection, and the server if it is a process of ours."""
        with self._lock:
            runner, self._runner = self._runner, None
        if runner is not None and runner.is_ours:
            runner.close()

    def _submit(self, work: Callable[[_Runner], Coroutine[Any, Any, T]]) -> Future[T]:
        # A connection outlives the call that opened it, and must not keep what belongs to that.
        context = copy_context()
        context.run(transaction_under_way.set, None)
        with self._lock:
            if self._runner is None or not self._runner.is_ours:
                self._runner = _Runner(self)
            runner = self._runner
            return context.run(asyncio.run_coroutine_threadsafe, work(runner), runner.loop)


class _Runner:
    """The loop of an open connection, and the link of now."""

    def __init__(self, connection: McpConnection) -> None:
        self._connection = connection
        self._server = connection.server
        self._link: _Link | None = None
        self._lost = 0
        """How often in a row the server ended without having answered a call."""
        self._last_words = ""
        self._linking = asyncio.Lock()
        self.loop = asyncio.new_event_loop()
        # A daemon: a server that does not answer must not keep the process alive.
        self._thread = threading.Thread(target=self._serve, name="wink-mcp", daemon=True)
        self._thread.start()
        self._process = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether it was made in this process: a forked child has neither thread nor server."""
        return self._process == os.getpid()

    def _serve(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    async def tools(self) -> Sequence[types.Tool]:
        return (await self._linked()).tools

    async def call(
        self, name: str, arguments: dict[str, Any], on_progress: Callable[[], object] | None
    ) -> types.CallToolResult:
        async def progress(progress: float, total: float | None, message: str | None) -> None:
            if on_progress is not None:
                on_progress()

        link = await self._linked()
        try:
            return await link.client.call_tool(name, arguments, progress_callback=progress)
        except Exception as error:
            if not link.is_lost_with(error):
                raise
            await link.end()
            how = "was lost" if isinstance(self._server, HttpServer) else "ended"
            text = f"The MCP server {self._server} {how} in the middle of the call."
            raise McpServerError(f"{text} {link.last_words}".rstrip(), code=link.code) from error
        finally:
            link.has_answered = link.has_answered or link.is_open

    async def _linked(self) -> _Link:
        async with self._linking:
            if self._link is not None and self._link.is_open:
                return self._link
            if self._link is not None:
                self._lost = 0 if self._link.has_answered else self._lost + 1
                self._link, self._last_words = None, self._link.last_words
            if self._lost >= _MAX_LOST:
                raise McpServerError(
                    f"The MCP server {self._server} ended {self._lost} times in a row and is not "
                    f"started again before the connection is closed. {self._last_words}".rstrip()
                )
            self._link = _Link(self._connection)
            await self._link.start()
            self._link.tell_of_tools()
            return self._link

    async def stop(self, *, kill: bool = False) -> None:
        if self._link is not None:
            self._link.has_answered = True  # that it ends now is not its fault
            await self._link.end(kill=kill)

    def close(self) -> None:
        ended = asyncio.run_coroutine_threadsafe(self._shut_down(), self.loop)
        if threading.current_thread() is self._thread:
            # The collector came by here: waiting would be for ourselves.
            ended.add_done_callback(lambda _: self.loop.stop())
            return
        try:
            ended.result(timeout=_CERTAIN)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=_CERTAIN)

    async def _shut_down(self) -> None:
        await self.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CERTAIN / 2)


class _Link:
    """One session with a server, from its start to its end."""

    client: Client
    tools: Sequence[types.Tool] = ()
    has_answered = False
    """Whether it was of use: a server that ends before it is, again and again, is given up."""

    def __init__(self, connection: McpConnection) -> None:
        self._connection = connection
        self._server = connection.server
        self._process: ServerProcess | None = None
        self._refusal = ""
        self._wake = asyncio.Event()
        self._was_closed = self._ending = False
        self._changed = False
        self._scope: CancelScope | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._ending

    @property
    def last_words(self) -> str:
        """What is known of how it ended."""
        return self._refusal if self._process is None else self._process.last_words()

    @property
    def code(self) -> str:
        return NETWORK if isinstance(self._server, HttpServer) else SERVER_ERROR

    async def start(self) -> None:
        """Connect and list the tools; raises McpServerError with all that is known of a failure."""
        self._task = asyncio.create_task(self._keep())
        try:
            await asyncio.shield(self._ready)
        except asyncio.CancelledError:  # nobody waits for it any more
            await self.end(kill=True)
            raise

    def tell_of_tools(self) -> None:
        """Say which tools the server has now."""
        if self._connection.on_tools is not None:
            self._connection.on_tools(self.tools)

    async def end(self, *, kill: bool = False) -> None:
        """End it; returns when it has ended."""
        self._was_closed = self._ending = True
        self._wake.set()
        if kill and self._process is not None:
            self._process.kill()
        if self._task is None:
            return
        if self._ready.done():
            await asyncio.wait([self._task], timeout=_PATIENCE)
        if self._scope is not None:
            self._scope.cancel()  # it waits for an answer that does not come
        await asyncio.wait([self._task])

    def is_lost_with(self, error: Exception) -> bool:
        """Whether the server is gone, and not only unwilling."""
        from mcp import types

        gone = {types.CONNECTION_CLOSED}
        if isinstance(self._server, HttpServer):
            gone.add(types.INVALID_REQUEST)  # it does not know the session: it was started again
        return not self.is_open or getattr(error, "code", None) in gone

    async def _keep(self) -> None:
        """Hold the session open: what the SDK opens in a task it wants closed there."""
        import anyio
        from mcp import Client, types

        from weakincentives import __version__

        try:
            seconds = self._connection.start_timeout
            limit = anyio.current_time() + seconds
            with anyio.CancelScope(deadline=limit) as self._scope:
                async with Client(
                    self._transport(),
                    message_handler=self._hear,
                    client_info=types.Implementation(name="wink", version=__version__),
                    cache=None,
                ) as self.client:
                    # Theirs is bounded in nothing: the server's schema, on the server's answer.
                    self.client.session.validate_tool_result = self._check_answer
                    self.tools = await _listed(self.client)
                    self._scope.deadline = math.inf
                    self._ready.set_result(None)
                    await self._stay()
            if not self._ready.done():
                if self._was_closed:
                    raise McpServerError("the connection was closed")
                raise McpServerError(f"it did not answer within {seconds:g} s", code=TIMEOUT)
        except BaseException as error:
            self._failed(error)
        finally:
            self._ending = True

    async def _check_answer(self, name: str, result: types.CallToolResult) -> None:
        """Raise ValueError where an answer is not what the server said it would be."""
        schema = next((tool.output_schema for tool in self.tools if tool.name == name), None)
        if schema is None:
            return
        if "structured_content" not in result.model_fields_set:
            raise ValueError(f"tool {name} has an output schema, but gave no structured content")
        # In a thread: meanwhile others of this connection go on.
        wrong = await asyncio.to_thread(_first_error, schema, result.structured_content)
        if wrong:
            raise ValueError(f"invalid structured content of tool {name}: {wrong}")

    def _transport(self) -> Any:
        server = self._server
        if isinstance(server, _InProcess):
            return server.server
        if isinstance(server, HttpServer):
            return _over_http(server, self._look)
        from mcp.client.stdio import get_default_environment

        self._process = ServerProcess(
            [server.command, *server.args],
            env={**get_default_environment(), **server.env},
            cwd=server.cwd,
            max_message=server.max_message,
            on_end=self._lose,
        )
        return self._process.running()

    def _lose(self) -> None:
        self._ending = True
        self._wake.set()

    async def _look(self, response: httpx2.Response) -> None:
        if response.status_code in (401, 403):
            self._refusal = (
                f"It answers with status {response.status_code} {response.reason_phrase}: "
                "check the headers that are sent."
            )

    async def _hear(self, message: object) -> None:
        from mcp import types

        if isinstance(message, types.ToolListChangedNotification):
            # Asked for elsewhere: while this runs, no answer is heard.
            self._changed = True
            self._wake.set()

    async def _stay(self) -> None:
        """Wait for the end, and list the tools again when there are others."""
        subscription = asyncio.create_task(self._subscribe())
        try:
            while not self._ending:
                await self._wake.wait()
                self._wake.clear()
                if self._changed and not self._ending:
                    self._changed = False
                    self.tools = await _listed(self.client)
                    self.tell_of_tools()
        finally:
            subscription.cancel()
            await asyncio.wait([subscription])

    async def _subscribe(self) -> None:
        """Ask newer servers to tell of changes; older ones do without being asked."""
        from mcp import MCPError
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

        offered = self.client.server_capabilities.tools
        if offered is None or not offered.list_changed:
            return
        with suppress(ListenNotSupportedError, SubscriptionLost, MCPError):
            async with self.client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._changed = True
                    self._wake.set()

    def _failed(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(self._not_started(_first(error)))
        elif not self._ending:
            _logger.warning("an MCP server is lost: %s", self._server, exc_info=error)

    def _not_started(self, error: BaseException) -> McpServerError:
        from mcp import MCPError, types

        code = error.code if isinstance(error, McpServerError) else self.code
        reason = str(error) or type(error).__name__
        if isinstance(error, MCPError) and error.code == types.CONNECTION_CLOSED:
            reason = "the connection was closed before it answered"
        how = "reached" if isinstance(self._server, HttpServer) else "started"
        return McpServerError(
            f"The MCP server {self._server} cannot be {how}: {reason.rstrip('.')}. "
            f"{self.last_words}".rstrip(),
            code=code,
        )


def _first(error: BaseException) -> BaseException:
    """Return what went wrong, out of the groups that the SDK's tasks wrap it in."""
    inner = getattr(error, "exceptions", ())
    return _first(inner[0]) if inner else error


@asynccontextmanager
async def _over_http(
    server: HttpServer, look: Callable[[httpx2.Response], Awaitable[None]]
) -> AsyncGenerator[Any, None]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    # No limit on an answer: calls have one of their own.
    timeout = httpx2.Timeout(30.0, read=None)
    async with (
        httpx2.AsyncClient(
            headers=dict(server.headers), timeout=timeout, event_hooks={"response": [look]}
        ) as client,
        streamable_http_client(server.url, http_client=client) as streams,
    ):
        yield streams


def _first_error(schema: Mapping[str, Any], value: object) -> str:
    """Return what is wrong with a value, in a few words."""
    try:
        error = next(BoundedSchema(schema).errors(value), None)
    except Exception as error:  # too much to check, or a schema that is none
        return str(error)[:300]
    return "" if error is None else str(error.message)[:300]


async def _listed(client: Client) -> tuple[types.Tool, ...]:
    """Return all tools, page by page."""
    from pydantic import ValidationError

    tools: list[types.Tool] = []
    size = 0
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        try:
            page = await client.list_tools(cursor=cursor)
        except ValidationError as error:
            found = error.errors()[0]
            place = ".".join(map(str, found["loc"]))
            raise McpServerError(
                f"its list of tools is not what MCP prescribes, at {place}: {found['msg']}"
            ) from error
        tools += page.tools
        size += len(page.model_dump_json())
        if size > _MAX_LISTED:
            raise McpServerError(f"its list of tools has more than {_MAX_LISTED:,} characters")
        cursor = page.next_cursor
        if not cursor:
            return tuple(tools)
    raise McpServerError(f"it lists more than {_MAX_PAGES} pages of tools")
