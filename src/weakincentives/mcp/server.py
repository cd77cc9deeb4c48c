"""An MCP server over a prompt, sections or a registry: each call of a client is a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from weakincentives import __version__
from weakincentives.adapters.media import mcp_block
from weakincentives.call import RunContext, ToolCall, new_id
from weakincentives.deadlines import Deadline, Heartbeat
from weakincentives.errors import (
    MissingExtra,
    PromptEvaluationError,
    Suspended,
    VisibilityExpansionRequired,
)
from weakincentives.events import SUSPENDED, ToolInvoked
from weakincentives.logs import get_logger
from weakincentives.mcp.elicitation import ClientCall, client_call
from weakincentives.mcp.undo import UndoTools
from weakincentives.prompt.policies import AttachedPolicy
from weakincentives.prompt.prompt import Offer, Prompt, PromptTemplate, RenderedPrompt
from weakincentives.prompt.section import Section, expand
from weakincentives.prompt.tool import DEFAULT_MAX_RESULT_CHARS, Reach, Tool, ToolContext
from weakincentives.runtime.registry import ToolRegistry
from weakincentives.runtime.tool_call import aexecute_tool
from weakincentives.runtime.window import read_result_tool
from weakincentives.serde import dump, schema
from weakincentives.session import Session
from weakincentives.tool_result import ToolResult, dump_shown, is_shortened

try:
    import anyio
    from mcp.server import Server
    from mcp.server.lowlevel import NotificationOptions
    from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
    from mcp.types import CallToolRequestParams, ListToolsResult, ToolAnnotations
    from mcp.types import Tool as McpTool
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from mcp.server.connection import Connection
    from mcp.server.context import ServerRequestContext
    from mcp.server.session import ServerSession

    from weakincentives.mcp.stdio import Wire

T = TypeVar("T")
Served = Prompt[Any] | ToolRegistry | Section[Any] | Iterable[Section[Any]]
"""What can be served."""

_logger = get_logger(__name__)

_MOST_WAITING = 100
# What ends a run.
_ENDING = (PromptEvaluationError, Suspended)

CALL_ID = "weakincentives/callId"
"""The key of the call id in a result's ``_meta``, for ``undo`` and ``history``."""
FAILURE = "weakincentives/failure"
"""The key of the failure in the ``_meta`` of a failed call."""


class McpServer:
    """Serves tools to MCP clients; every call goes through the pipeline.

    It serves a prompt, sections, or a registry, which has a session of its own. One session serves
    all clients; their calls run one after the other, in the order of arrival. A call that fails or
    is cancelled is rolled back, and its result has ``isError``.

    With ``undo``, clients also get ``undo``, ``history`` and ``checkpoint``. ``time_limit`` is the
    number of seconds a call may take. Tools find ``config`` in their context, and the client's name
    in ``context.agent_id``.

    Run it with ``await server.run_stdio()`` or ``await server.run_http(...)``, or use
    ``server.protocol`` with another transport, in a ``with server:`` block.
    """

    def __init__(
        self,
        served: Served,
        *,
        session: Session | None = None,
        name: str = "wink",
        time_limit: float | None = None,
        undo: bool = True,
        config: Mapping[str, object] | None = None,
    ) -> None:
        ids = RunContext()
        if isinstance(served, ToolRegistry):
            if session is not None and session is not served.session:
                raise TypeError("a registry has a session of its own: leave session= out")
            if config is not None:
                raise TypeError("a registry has a config of its own: leave config= out")
            ids = served.run_context or ids
            self.session = served.session
            self._resources = None
            self._context: Callable[[], ToolContext] = served.context
            self._render = lambda: cast("RenderedPrompt", served.context().rendering)
            self._policies: tuple[AttachedPolicy, ...] = ()
        else:
            prompt = _as_prompt(served)
            self.session = Session() if session is None else session
            self._resources = prompt.resources
            self._context = lambda: ToolContext(
                session=self.session,
                prompt=prompt,
                resources=prompt.resources,
                config=self._config,
            )
            # With examples, which do not all fit into a tool's definition.
            self._render = lambda: prompt.render(self.session, examples=True)
            self._policies = prompt.policies
        run_id = new_id()
        self._ids = ids.filled(run_id=run_id, loop_id=name, trace_id=run_id)
        self._config = dict(config or {})
        self._time_limit = time_limit
        self._undo = UndoTools(self.session) if undo else None
        self._offered: _Offered | None = None
        self._has_shortened = False
        """Whether a result was shortened: then clients get the tool that reads the rest."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._clients: WeakSet[Connection] = WeakSet()
        self._bus = InMemorySubscriptionBus()
        self._notices: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, ClientCall] = {}
        """The calls that wait for an answer of their client's user."""
        self.protocol: Server[Any] = _Protocol(
            name,
            version=__version__,
            get_tool_input_schema=self._input_schema,
            on_list_tools=self._list_tools,
            on_subscriptions_listen=ListenHandler(self._bus),
        )
        """The server of the ``mcp`` package, for any transport."""
        self.protocol.add_request_handler("tools/call", CallToolRequestParams, self._call_tool)
        self._look()

    def __enter__(self) -> McpServer:
        if self._resources is not None:
            self._resources.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._resources is not None:
            self._resources.__exit__(*error)

    async def run_stdio(self, wire: Wire | None = None) -> None:
        """Serve one client over standard input and output, or another wire, until it leaves."""
        from weakincentives.mcp.stdio import stdio_streams

        with self:
            async with stdio_streams(wire) as (incoming, outgoing):
                options = self.protocol.create_initialization_options()
                await self.protocol.run(incoming, outgoing, options)

    async def run_http(self, *, host: str = "127.0.0.1", port: int = 0, token: str) -> None:
        """Serve streamable HTTP at ``/mcp`` until cancelled, to clients that have the token."""
        from weakincentives.mcp.http import listen, serve

        with self, listen(host, port) as socket:
            await serve(self, socket, token)

    # What is offered

    def _look(self) -> _Offered:
        """Return the current tools; notify clients if they have changed."""
        rendered, before = self._render(), self._offered
        extra = () if self._undo is None else self._undo.tools
        if self._has_shortened:
            extra = (*extra, read_result_tool())
        if before is not None and before.rendered is rendered and before.extra == extra:
            return before
        given = extra
        # A tool of the user replaces ours of the same name.
        extra = tuple(tool for tool in extra if tool.name not in rendered.offers)
        offers = {
            tool.name: Offer.of(tool, self._policies, rendered.listeners) for tool in extra
        } | dict(rendered.offers)
        tools = tuple(tool for tool in rendered.tools if tool.handler is not None)
        whole = replace(rendered, tools=(*tools, *extra), offers=offers)
        context = self._context().having(rendered_prompt=whole)
        now = _Offered(rendered, context, whole, given)
        self._offered = now
        guide = () if self._undo is None else (self._undo.guide,)
        self.protocol.instructions = "\n\n".join(filter(None, (rendered.text, *guide))) or None
        if before is not None and before.whole.tools != whole.tools:
            self._notify_of_changed_tools()
        return now

    def _notify_of_changed_tools(self) -> None:
        """Notify all clients, without waiting for them."""

        async def tell() -> None:
            await self._bus.publish(ToolsListChanged())
            for client in list(self._clients):
                await client.send_tool_list_changed()

        task = asyncio.ensure_future(tell())
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)

    async def _list_tools(self, request: ServerRequestContext, _: object) -> ListToolsResult:
        # There is no public way to the connection, which outlives the request.
        self._clients.add(request.session._connection)  # pyright: ignore[reportPrivateUsage]
        return ListToolsResult(tools=[_definition(tool) for tool in self._look().whole.tools])

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        offer = self._look().whole.offers.get(name)
        return None if offer is None else _definition(offer.tool).input_schema

    # Calls

    async def _call_tool(
        self, request: ServerRequestContext, params: CallToolRequestParams
    ) -> dict[str, Any]:
        # A call that waited for its user comes again, once: with what they have answered.
        earlier = self._waiting.pop(params.request_state or "", None)
        made = ClientCall(request, earlier, params.input_responses)
        call = ToolCall(params.name, params.arguments or {}, made.id)
        client = request.session.client_params
        ids = self._ids.filled(agent_id="mcp" if client is None else client.client_info.name)
        client_call.set(made)
        taken = self._take(call, _Beats(request.session), ids)
        tool, result, text = await _cancelled_once(taken)
        if made.question is None or result.failure is None or result.failure.code != SUSPENDED:
            return _answer(tool, result, text)
        state = new_id()
        self._waiting[state] = made
        for oldest in list(self._waiting)[:-_MOST_WAITING]:
            del self._waiting[oldest]
        return made.form_to_fill_in(state)

    async def _take(
        self, call: ToolCall, beats: _Beats, ids: RunContext
    ) -> tuple[Tool[Any, Any] | None, ToolResult[Any], str]:
        async with self._turn():
            offered = self._look()
            offer = offered.whole.offers.get(call.name)
            limit = self._time_limit
            deadline = None if limit is None else Deadline.after(limit, clock=self.session.clock)
            context = offered.context.having(
                deadline=deadline,
                heartbeat=beats.heart,
                run_context=ids,
                on_report=beats.report,
            )
            if self._undo is not None:
                self._undo.before(call, offer, context)
            result = await self._result(call, context)
            # Before the next call, but after the answer.
            asyncio.get_running_loop().call_soon(self._settle, call, result)
            tool = None if offer is None else offer.tool
            text = result.render(
                DEFAULT_MAX_RESULT_CHARS if tool is None else tool.max_result_chars
            )
            self._has_shortened = self._has_shortened or is_shortened(text)
        await beats.end()
        return tool, result, text

    def _turn(self) -> asyncio.Lock:
        """Return the lock that lets calls run one at a time, in order of arrival."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a lock belongs to one loop
            self._loop, self._lock = loop, asyncio.Lock()
        return self._lock

    def _settle(self, call: ToolCall, result: ToolResult[Any]) -> None:
        if self._undo is not None:
            self._undo.after(call, result)
        self._look()

    async def _result(self, call: ToolCall, context: ToolContext) -> ToolResult[Any]:
        try:
            return await aexecute_tool(call, context=context)
        except VisibilityExpansionRequired as request:
            expand(self.session, request)
            opened = ", ".join(request.section_keys)
            prompt = cast("Prompt[Any]", context.prompt)
            texts = [prompt.section_text(key, self.session) for key in request.section_keys]
            result = ToolResult.ok("\n\n".join(texts), f"Opened: {opened}.")
            result.call_id = call.id
            return result
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, Exception) and not isinstance(error, _ENDING):
                raise
            # It would end a run, but a server goes on. The record says that the call failed and was
            # rolled back.
            return cast("ToolInvoked", self.session[ToolInvoked].latest()).result


@dataclass(frozen=True, slots=True, eq=False)
class _Offered:
    """The tools at one moment."""

    rendered: RenderedPrompt
    """The same object as long as nothing changes."""
    context: ToolContext
    """The context of the next call."""
    whole: RenderedPrompt
    """With the server's own tools."""
    extra: tuple[Tool[Any, Any], ...]
    """The server's own tools."""


class _Protocol(Server[Any]):
    """The server of the ``mcp`` package; announces over every transport that tools may change."""

    def create_initialization_options(
        self, notification_options: NotificationOptions | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        options = notification_options or NotificationOptions(tools_changed=True)
        return super().create_initialization_options(options, *args, **kwargs)


def _as_prompt(served: Prompt[Any] | Section[Any] | Iterable[Section[Any]]) -> Prompt[Any]:
    if isinstance(served, Prompt):
        return served
    sections = [served] if isinstance(served, Section) else list(served)
    return Prompt(PromptTemplate(sections=sections))


# Definitions and results


@lru_cache(maxsize=1024)  # needed for every list and every answer
def _definition(tool: Tool[Any, Any]) -> McpTool:
    parameters = tool.parameters
    if tool.examples:
        parameters["examples"] = [
            {} if example.input is None else dump(example.input) for example in tool.examples
        ]
    return McpTool(
        name=tool.name,
        title=None if tool.title == tool.name else tool.title,
        description=tool.description,
        input_schema=parameters,
        output_schema=_output_schema(tool),
        annotations=_annotations(tool.reach),
    )


def _annotations(reach: Reach | None) -> ToolAnnotations:
    """Return the hints that follow from a reach; a missing hint means the worst case."""
    if reach == "read":
        return ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True)
    may_last = reach != "reversible"
    return ToolAnnotations(
        read_only_hint=False, destructive_hint=may_last, open_world_hint=may_last
    )


def _output_schema(tool: Tool[Any, Any]) -> dict[str, Any] | None:
    """Return the schema of a tool's value, if that is a JSON object."""
    if not isinstance(tool.result_type, type) or tool.result_type is type(None):
        return None
    try:
        found = schema(tool.result_type)
    except TypeError:
        return None
    if found.get("type") != "object":
        return None
    # A call without a value, or with one hidden from the model, has {}.
    found.pop("required", None)
    return found


def _answer(tool: Tool[Any, Any] | None, result: ToolResult[Any], text: str) -> dict[str, Any]:
    """Return a result in the wire format, which the ``mcp`` package validates."""
    meta: dict[str, Any] = {CALL_ID: result.call_id}
    if (failure := result.failure) is not None:
        meta[FAILURE] = {
            "code": failure.code,
            "recoverable": failure.recoverable,
            "suggestions": list(failure.suggestions),
            "undone": list(result.metadata.undone),
            "notUndone": list(result.metadata.not_undone),
        }
    answer: dict[str, Any] = {
        "content": [
            *([{"type": "text", "text": text}] if text else []),
            *map(mcp_block, result.media),
        ],
        "isError": not result.success,
        "resultType": "complete",
        "_meta": meta,
    }
    structured = None if tool is None else _structured(tool, result, is_shortened(text))
    if structured is not None:
        answer["structuredContent"] = structured
    return answer


def _structured(
    tool: Tool[Any, Any], result: ToolResult[Any], is_cut: bool
) -> Mapping[str, Any] | None:
    if not result.success or _definition(tool).output_schema is None:
        return None
    value: object = result.value
    # Exactly: a subclass may not fit the schema.
    if is_cut or result.exclude_value_from_context or type(value) is not tool.result_type:
        return {}
    return cast("Mapping[str, Any]", dump_shown(value))


# Running calls


class _Beats:
    """Reports a handler's heartbeats and progress, from any thread, to the client."""

    def __init__(self, client: ServerSession) -> None:
        self.heart = Heartbeat(on_beat=self._beat)
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._told = 1  # the first beat is the runtime's own
        self._message: str | None = None
        self._telling: asyncio.Task[None] | None = None

    def report(self, call_id: str, message: str, done: float | None, total: float | None) -> None:
        """Set the message of the next notification, which the beat that follows sends."""
        share = f"{done / total:.0%} " if done is not None and total else ""
        self._message = f"{share}{message}" or None

    def _beat(self) -> None:
        if self.heart.beats > 1:
            self._loop.call_soon_threadsafe(self._begin_to_tell)

    def _begin_to_tell(self) -> None:
        if self._telling is None or self._telling.done():
            self._telling = self._loop.create_task(self._tell())

    async def _tell(self) -> None:
        while self._told < self.heart.beats:  # beats in between share a notification
            self._told = self.heart.beats
            # The count, not the share that is done: progress may never go back.
            await self._client.report_progress(self._told - 1, message=self._message)

    async def end(self) -> None:
        """Wait for the last report: nothing may follow the answer."""
        if self._telling is not None:
            await self._telling


async def _cancelled_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a call; when it is cancelled, wait until it is rolled back.

    A cancelled anyio scope cancels its task repeatedly, which would interrupt the cleanup.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a cancelled call ended with an error", exc_info=error)
        raise
