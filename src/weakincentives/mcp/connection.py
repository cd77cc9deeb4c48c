"""A connection to an MCP server: opened on first use, and again after it was lost.

The SDK's client belongs to one event loop, and calls come from many. So an open connection has a
loop and a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit, urlunsplit

from weakincentives.core.call import transaction_under_way
from weakincentives.core.logs import get_logger
from weakincentives.errors import McpServerError, MissingExtra
from weakincentives.mcp.requests import Requests
from weakincentives.mcp.server_process import ServerProcess
from weakincentives.retry import NETWORK, SERVER_ERROR, TIMEOUT
from weakincentives.serde.bounded_schema import BoundedSchema

if TYPE_CHECKING:
    import httpx2
    from anyio import CancelScope
    from mcp import Client, types

    from weakincentives.mcp.oauth import OAuth
    from weakincentives.mcp.requests import PendingCall

T = TypeVar("T")
OnProgress: TypeAlias = "Callable[[float, float | None, str | None], object]"
"""Given what is done, the total and a message."""

_logger = get_logger(__name__)

_PATIENCE = 5.0
_CERTAIN = 150.0
"""Seconds to wait for a server that is killed if nothing else helps."""
_MAX_LOST = 3
_MAX_PAGES = 100
_MAX_LISTED = 32_000_000
"""Characters in a server's whole list of tools."""


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A program that speaks MCP on its input and output."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Added to HOME, PATH and the like; the rest of our environment is not passed on."""
    cwd: str | os.PathLike[str] | None = None
    max_message: int = 32_000_000
    """Bytes in one message; a server that sends more is ended."""

    def __str__(self) -> str:
        return Path(self.command).name  # arguments may be secret


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server over streamable HTTP."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Sent with every request: `{"Authorization": "Bearer ..."}`."""
    auth: OAuth | httpx2.Auth | None = field(default=None, repr=False)
    """How to sign in: an ``OAuth`` for the user's browser, or any provider of the ``mcp`` package.
    """

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"a URL starts with http:// or https://, got {self.url!r}")

    def __str__(self) -> str:
        scheme, place, path, _, _ = urlsplit(self.url)  # the rest may be secret
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
        raise TypeError(f"{server!r} is not a URL; give a command as a list: {server.split()!r}")
    if isinstance(server, Sequence):
        words = [str(each) for each in server]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if words:
            return StdioServer(words[0], tuple(words[1:]))
    elif hasattr(server, "list_tools") or hasattr(server, "get_request_handler"):
        return _InProcess(server)
    raise TypeError(
        "server takes a command as a list, a URL, a StdioServer, an HttpServer, or a server of "
        f"the mcp package; got {server!r}"
    )


@dataclass(frozen=True, slots=True)
class AboutServer:
    """What a server says of itself, and what it has besides tools, each with a description."""

    title: str
    instructions: str
    resources: Sequence[tuple[str, str]]
    prompts: Sequence[tuple[str, str]]


class McpConnection:
    """A server's tools, for any thread and any event loop.

    ``on_tools`` gets the list of tools, on the connection's thread, when the server has started and
    when it reports a change. After ``close`` the next use opens the connection again.
    """

    def __init__(
        self,
        server: Server,
        *,
        start_timeout: float = 30.0,
        on_tools: Callable[[Sequence[types.Tool]], None] | None = None,
        requests: Requests | None = None,
    ) -> None:
        if find_spec("mcp") is None:
            raise MissingExtra("mcp", "mcp")
        self.server = server
        self.start_timeout = start_timeout
        self.on_tools = on_tools
        self.requests = requests or Requests(str(server))
        self._auth: httpx2.Auth | None = None
        self._lock = threading.Lock()
        self._runner: _Runner | None = None
        self._users = 0

    def open(self) -> Sequence[types.Tool]:
        """Connect if necessary, and return the server's tools."""
        return self._submit(lambda runner: runner.tools()).result()

    @property
    def auth(self) -> httpx2.Auth | None:
        """How we sign in at the server; the same object for all sessions, as it holds tokens."""
        server = self.server
        if self._auth is None and isinstance(server, HttpServer) and server.auth is not None:
            from weakincentives.mcp.oauth import as_auth

            self._auth = as_auth(server.auth, server.url)
        return self._auth

    @property
    def may_wait_for_person(self) -> bool:
        """Whether a call may take longer than its timeout because a person is asked."""
        return self.requests.asks or self.auth is not None

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        caller: PendingCall | None = None,
        on_progress: OnProgress | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> types.CallToolResult:
        """Call a tool; raises McpServerError when the server fails, MCPError when it refuses.

        ``check`` is called on the connection's thread, once the server's tools are known: it may
        raise. Cancelling tells the server; what it answers later is dropped.
        """

        async def report(progress: float, total: float | None, message: str | None) -> None:
            if on_progress is not None:
                on_progress(progress, total, message)

        async def ask(client: Client) -> types.CallToolResult:
            check()
            return await client.call_tool(name, dict(arguments), progress_callback=report)

        return await self.request(ask, caller)

    async def request(
        self, ask: Callable[[Client], Awaitable[T]], caller: PendingCall | None = None
    ) -> T:
        """Ask the server for something; raises like ``call``."""
        work = self._submit(lambda runner: runner.request(ask, caller))
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise McpServerError(
                f"The connection to the MCP server {self.server} was closed during the call."
            ) from None

    def read(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        """Ask the server for something, and wait: for code that runs on no loop."""
        return self._submit(lambda runner: runner.request(ask, None)).result()

    def about(self) -> AboutServer:
        """Return what the server says of itself, and what it has besides tools."""

        async def found(client: Client) -> AboutServer:
            named, has = client.server_info, client.server_capabilities
            name = str(self.server) if named is None else f"{named.name} {named.version}".strip()
            resources = [] if has.resources is None else await resources_of(client)
            prompts = [] if has.prompts is None else await prompts_of(client)
            return AboutServer(
                f"{name}, protocol {client.protocol_version}",
                client.instructions or "",
                tuple((str(each.uri), each.description or each.name) for each in resources),
                tuple(
                    (
                        f"{each.name}({', '.join(a.name for a in each.arguments or ())})",
                        each.description or "",
                    )
                    for each in prompts
                ),
            )

        return self.read(found)

    async def stop(self) -> None:
        """Kill the server; the next use starts it again."""
        await asyncio.wrap_future(self._submit(lambda runner: runner.stop(kill=True)))

    def enter(self) -> None:
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Undo one ``enter``; the last one closes the connection."""
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
        # A connection outlives the call that opened it, so it must not inherit its transaction.
        context = copy_context()
        context.run(transaction_under_way.set, None)
        with self._lock:
            if self._runner is None or not self._runner.is_ours:
                self._runner = _Runner(self)
            runner = self._runner
            return context.run(asyncio.run_coroutine_threadsafe, work(runner), runner.loop)


class _Runner:
    """The loop of an open connection, and its current session."""

    def __init__(self, connection: McpConnection) -> None:
        self._connection = connection
        self._server = connection.server
        self._link: _Link | None = None
        self._lost = 0
        """How often in a row the server ended without having answered."""
        self._last_words = ""
        self._linking = asyncio.Lock()
        self.loop = asyncio.new_event_loop()
        # A daemon: an unresponsive server must not keep the process alive.
        self._thread = threading.Thread(target=self._serve, name="wink-mcp", daemon=True)
        self._thread.start()
        self._process = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made it: a forked child has no such thread."""
        return self._process == os.getpid()

    def _serve(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    async def tools(self) -> Sequence[types.Tool]:
        return (await self._linked()).tools

    async def request(self, ask: Callable[[Client], Awaitable[T]], caller: PendingCall | None) -> T:
        link = await self._linked()
        await link.wait_for_tools()
        try:
            with self._connection.requests.during(caller):
                return await ask(link.client)
        except Exception as error:
            if not await link.is_lost_with(error):
                raise
            await link.end()
            how = "was lost" if isinstance(self._server, HttpServer) else "ended"
            text = f"The MCP server {self._server} {how} during the call."
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
                    f"The MCP server {self._server} ended {self._lost} times in a row, and is not "
                    f"restarted until the connection is closed. {self._last_words}".rstrip()
                )
            self._link = _Link(self._connection)
            await self._link.start()
            self._link.publish_tools()
            return self._link

    async def stop(self, *, kill: bool = False) -> None:
        if self._link is not None:
            self._link.has_answered = True  # it does not end by itself
            await self._link.end(kill=kill)

    def close(self) -> None:
        ended = asyncio.run_coroutine_threadsafe(self._shut_down(), self.loop)
        if threading.current_thread() is self._thread:
            # Called by the garbage collector: waiting would be a deadlock.
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
    """A server that repeatedly ends before it answers is not restarted."""

    def __init__(self, connection: McpConnection) -> None:
        self._connection = connection
        self._server = connection.server
        self._process: ServerProcess | None = None
        self._refusal = ""
        self._wake = asyncio.Event()
        """Set when the session ends, or when the server's tools have changed."""
        self._is_current = asyncio.Event()
        """Set unless the server's tools have changed and were not listed since."""
        self._is_current.set()
        self._was_closed = self._ending = False
        self._is_unknown = False
        """Whether the server does not know our session any more."""
        self._scope: CancelScope | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._ending

    @property
    def last_words(self) -> str:
        """How it ended, as far as that is known."""
        return self._refusal if self._process is None else self._process.last_words()

    @property
    def code(self) -> str:
        return NETWORK if isinstance(self._server, HttpServer) else SERVER_ERROR

    async def start(self) -> None:
        """Connect and list the tools; raise McpServerError on failure."""
        self._task = asyncio.create_task(self._keep())
        try:
            await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            await self.end(kill=True)
            raise

    def publish_tools(self) -> None:
        if self._connection.on_tools is not None:
            self._connection.on_tools(self.tools)

    async def wait_for_tools(self) -> None:
        """Wait until the tools are known that the server has now."""
        try:
            async with asyncio.timeout(self._connection.start_timeout):
                await self._is_current.wait()
        except TimeoutError:
            raise McpServerError(
                f"The MCP server {self._server} has changed its tools, and does not list them.",
                code=TIMEOUT,
            ) from None

    async def end(self, *, kill: bool = False) -> None:
        self._was_closed = True
        self._lose()
        if kill and self._process is not None:
            self._process.kill()
        if self._task is None:
            return
        if self._ready.done():
            await asyncio.wait([self._task], timeout=_PATIENCE)
        if self._scope is not None:
            self._scope.cancel()  # it still waits for an answer
        await asyncio.wait([self._task])

    async def is_lost_with(self, error: Exception) -> bool:
        """Whether an error of a call means that the session is gone.

        The transport knows: the server's process has ended, or it does not know our session. A
        server may use any code for an error of one call, also that of a closed connection.
        """
        from mcp import types

        if not self.is_open or self._is_unknown:
            return True
        if not isinstance(self._server, HttpServer):
            return False
        return getattr(error, "code", None) == types.CONNECTION_CLOSED and not await self._answers()

    async def _answers(self) -> bool:
        """Whether the server answers a request of ours, if only with an error."""
        from mcp import MCPError, types

        try:
            async with asyncio.timeout(_PATIENCE):
                await self.client.list_tools()
        except MCPError as error:
            return error.code != types.CONNECTION_CLOSED
        except Exception:
            return False
        return True

    async def _keep(self) -> None:
        """Hold the session open, in one task: the SDK must close it where it was opened."""
        import anyio
        from mcp import Client, types

        from weakincentives import __version__

        try:
            seconds = self._connection.start_timeout
            limit = anyio.current_time() + seconds
            with (
                anyio.CancelScope(deadline=limit) as self._scope,
                self._connection.requests.timed(_pausing(self._scope)),
            ):
                async with Client(
                    self._transport(),
                    message_handler=self._hear,
                    client_info=types.Implementation(name="wink", version=__version__),
                    cache=None,
                    **self._connection.requests.callbacks(),
                ) as self.client:
                    # The SDK's own validation of answers has no limits.
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
            if not self._ready.done():
                self._ready.set_exception(self._not_started(_first(error)))
            elif not self._ending:
                _logger.warning("an MCP server is lost: %s", self._server, exc_info=error)
        finally:
            self._lose()

    async def _check_answer(self, name: str, result: types.CallToolResult) -> None:
        """Raise ValueError if an answer does not match the tool's output schema."""
        schema = next((tool.output_schema for tool in self.tools if tool.name == name), None)
        if schema is None:
            return
        if "structured_content" not in result.model_fields_set:
            raise ValueError(f"tool {name} has an output schema, but gave no structured content")
        # In a thread, so that other calls of this connection go on.
        wrong = await asyncio.to_thread(_first_error, schema, result.structured_content)
        if wrong:
            raise ValueError(f"invalid structured content of tool {name}: {wrong}")

    def _transport(self) -> Any:
        server = self._server
        if isinstance(server, _InProcess):
            return server.server
        if isinstance(server, HttpServer):
            return _over_http(server, self._look, self._auth())
        from mcp.client.stdio import get_default_environment

        self._process = ServerProcess(
            command=[server.command, *server.args],
            env={**get_default_environment(), **server.env},
            cwd=server.cwd,
            max_message=server.max_message,
            on_end=self._lose,
        )
        return self._process.running()

    def _lose(self) -> None:
        self._ending = True
        self._wake.set()
        self._is_current.set()

    def _note_change(self) -> None:
        self._is_current.clear()
        self._wake.set()

    def _auth(self) -> httpx2.Auth | None:
        auth = self._connection.auth
        if auth is None:
            return None
        from weakincentives.mcp.oauth import PatientAuth

        return PatientAuth(auth, self._connection.requests.waiting, self._note_refusal)

    def _note_refusal(self, error: Exception) -> None:
        self._refusal = f"Signing in failed: {' '.join(str(error).split())[:300]}"

    async def _look(self, response: httpx2.Response) -> None:
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            self._is_unknown = True
        if response.status_code in (401, 403):
            sent = (
                "headers that are sent" if self._connection.auth is None else "access of the user"
            )
            self._refusal = (
                f"It answers with status {response.status_code} {response.reason_phrase}: "
                f"check the {sent}."
            )

    async def _hear(self, message: object) -> None:
        from mcp import types

        if isinstance(message, types.ToolListChangedNotification):
            self._note_change()  # listed elsewhere: while this runs, no answer is received

    async def _stay(self) -> None:
        """Wait for the end; meanwhile list the tools again when they change."""
        subscription = asyncio.create_task(self._subscribe())
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._ending:
                    return
                self.tools = await _listed(self.client)
                self.publish_tools()
                if not self._wake.is_set():
                    self._is_current.set()
        finally:
            subscription.cancel()
            await asyncio.wait([subscription])

    async def _subscribe(self) -> None:
        """Subscribe to changes of the tools; older servers report them unasked."""
        from mcp import MCPError
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

        offered = self.client.server_capabilities.tools
        if offered is None or not offered.list_changed:
            return
        with suppress(ListenNotSupportedError, SubscriptionLost, MCPError):
            async with self.client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._note_change()

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
    """Return the error inside the exception groups of the SDK's tasks."""
    inner = getattr(error, "exceptions", ())
    return _first(inner[0]) if inner else error


def _pausing(scope: CancelScope) -> Callable[[bool], None]:
    """Return what stops the clock of a scope while a person is waited for."""
    import anyio

    left: list[float] = []

    def on_wait(waits: bool) -> None:
        if waits:
            left.append(scope.deadline - anyio.current_time())
            scope.deadline = math.inf
        elif left:
            scope.deadline = anyio.current_time() + left.pop()

    return on_wait


@asynccontextmanager
async def _over_http(
    server: HttpServer,
    look: Callable[[httpx2.Response], Awaitable[None]],
    auth: httpx2.Auth | None,
) -> AsyncGenerator[Any, None]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    # No limit for answers: calls have timeouts of their own.
    timeout = httpx2.Timeout(30.0, read=None)
    with _logged_as(str(server), server.url, str(httpx2.URL(server.url))):
        async with (
            httpx2.AsyncClient(
                headers=dict(server.headers),
                timeout=timeout,
                event_hooks={"response": [look]},
                auth=auth,
            ) as client,
            streamable_http_client(server.url, http_client=client) as streams,
        ):
            yield streams


@contextmanager
def _logged_as(shown: str, *addresses: str) -> Generator[None]:
    """Keep what may be secret in an address out of the logs of other packages."""

    def hide(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        for address in addresses:
            if address != shown and address in text:
                text = text.replace(address, shown)
                record.msg, record.args = text, ()
        return True

    loggers = [logging.getLogger(name) for name in ("httpx2", "mcp.client.streamable_http")]
    for each in loggers:
        each.addFilter(hide)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(hide)


def _first_error(schema: Mapping[str, Any], value: object) -> str:
    try:
        error = next(BoundedSchema(schema).errors(value), None)
    except Exception as error:  # too much to check, or an invalid schema
        return str(error)[:300]
    return "" if error is None else str(error.message)[:300]


async def _listed(client: Client) -> tuple[types.Tool, ...]:
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
                f"its list of tools is invalid at {place}: {found['msg']}"
            ) from error
        tools += page.tools
        size += len(page.model_dump_json())
        if size > _MAX_LISTED:
            raise McpServerError(f"its list of tools has more than {_MAX_LISTED:,} characters")
        cursor = page.next_cursor
        if not cursor:
            return tuple(tools)
    raise McpServerError(f"it lists more than {_MAX_PAGES} pages of tools")


async def resources_of(client: Client) -> list[types.Resource]:
    """Return all resources of a server."""
    return await _pages(lambda cursor: client.list_resources(cursor=cursor), "resources")


async def prompts_of(client: Client) -> list[types.Prompt]:
    """Return all prompts of a server."""
    return await _pages(lambda cursor: client.list_prompts(cursor=cursor), "prompts")


async def _pages(page: Callable[[str | None], Awaitable[Any]], part: str) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        answer = await page(cursor)
        found += getattr(answer, part)
        cursor = answer.next_cursor
        if not cursor:
            return found
    raise McpServerError(f"it lists more than {_MAX_PAGES} pages of {part}")
