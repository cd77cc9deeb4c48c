"""An MCP server over a prompt, sections or a registry: each call of a client is a transaction."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from weakincentives import __version__
from weakincentives.adapters.media import mcp_block
from weakincentives.core.call import RunContext, ToolCall, new_id
from weakincentives.core.logs import get_logger
from weakincentives.errors import MissingExtra, PromptRenderError, ToolDefinitionError
from weakincentives.filesystem import Filesystem
from weakincentives.mcp.client_call import ClientCall, WaitingCall, is_newest_era
from weakincentives.mcp.reports import Reports, set_level
from weakincentives.mcp.server_client import Offered, ServedClient, Service, paths_in
from weakincentives.mcp.server_prompts import (
    McpPrompt,
    TemplatePrompt,
    choices_in,
    completed,
    messages_of,
    result_messages,
)
from weakincentives.mcp.server_resources import (
    FILE,
    Completer,
    McpResource,
    complete_path,
    files_after,
    listed_file,
)
from weakincentives.prompt.policies import AttachedPolicy
from weakincentives.prompt.prompt import OfferedTool, Prompt, PromptTemplate, RenderedPrompt
from weakincentives.prompt.section import Section
from weakincentives.prompt.tool import Reach, Tool, ToolContext
from weakincentives.runtime.answers import PROTOCOL_ERROR
from weakincentives.runtime.registry import ToolRegistry
from weakincentives.serde import dump, schema
from weakincentives.session.events import SUSPENDED
from weakincentives.session.session import Session
from weakincentives.tool_result import ToolResult, dump_shown, is_shortened

try:
    import anyio
    from mcp.server import Server
    from mcp.server.lowlevel import NotificationOptions
    from mcp.server.request_state import (
        RequestStateBoundary,
        RequestStateSecurity,
        authenticated_principal,
    )
    from mcp.server.subscriptions import (
        InMemorySubscriptionBus,
        ListenHandler,
        PromptsListChanged,
        ResourceUpdated,
        ServerEvent,
        ToolsListChanged,
    )
    from mcp.shared.exceptions import MCPError
    from mcp.types import (
        INTERNAL_ERROR,
        INVALID_PARAMS,
        INVALID_REQUEST,
        CallToolRequestParams,
        CompleteRequestParams,
        CompleteResult,
        EmptyResult,
        GetPromptRequestParams,
        ListPromptsResult,
        ListResourcesResult,
        ListResourceTemplatesResult,
        ListToolsResult,
        PaginatedRequestParams,
        ReadResourceRequestParams,
        SetLevelRequestParams,
        SubscribeRequestParams,
        SubscriptionsListenRequestParams,
        SubscriptionsListenResult,
        ToolAnnotations,
        UnsubscribeRequestParams,
    )
    from mcp.types import Prompt as ListedPrompt
    from mcp.types import Tool as McpTool
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

if TYPE_CHECKING:
    from mcp.server.connection import Connection
    from mcp.server.context import CallNext, HandlerResult, ServerRequestContext

    from weakincentives.mcp.server_auth import McpAuth
    from weakincentives.mcp.stdio import Wire

T = TypeVar("T")
Served = Prompt[Any] | ToolRegistry | Section[Any] | Iterable[Section[Any]]
"""What can be served."""

_logger = get_logger(__name__)

_MOST_WAITING = 1000
"""Calls that wait for an answer of their client's user; the oldest are forgotten."""
_MOST_CLIENTS = 1000
"""Clients without a connection whose sessions are known; the oldest are forgotten."""
_PAGE = 500
_CLIENT = "weakincentives"
"""The key of the client among what is known of a connection."""
_IDS = "weakincentives ids"
"""The key of the ids of the requests that are under way."""

CALL_ID = "weakincentives/callId"
"""The key of the call id in a result's ``_meta``, for ``undo`` and ``history``."""
FAILURE = "weakincentives/failure"
"""The key of the failure in the ``_meta`` of a failed call."""


class McpServer:
    """Serves tools, resources and prompts to MCP clients; calls go through the pipeline.

    It serves a prompt, sections, or a registry. Each client has a session of its own; they share
    files and other resources. A call that fails or is cancelled is rolled back, and its result has
    ``isError``.

    Run it with ``await server.run_stdio()`` or ``await server.run_http(...)``, or use
    ``server.protocol`` with another transport, in a ``with server:`` block.

    Args:
        session: The session of the first client, or of all prompts where ``new_session`` is given.
        new_session: Makes the session of a client, who is known by its name and, with OAuth, by
            whom its token is for; by default a new one like ``session``.
        time_limit: Seconds that a call may take.
        undo: Also offer ``undo``, ``history`` and ``checkpoint``.
        config: What tools find in ``context.config``. The client's name is ``context.agent_id``.
        resources: What clients can read, besides the workspace's files and history.
        prompts: What clients offer their users, besides the sections: tools and templates.
    """

    def __init__(
        self,
        served: Served,
        *,
        session: Session | None = None,
        new_session: Callable[[str], Session] | None = None,
        name: str = "wink",
        time_limit: float | None = None,
        undo: bool = True,
        config: Mapping[str, object] | None = None,
        resources: Iterable[McpResource] = (),
        prompts: Iterable[McpPrompt | Tool[Any, Any] | PromptTemplate[Any]] = (),
    ) -> None:
        ids = RunContext()
        if isinstance(served, ToolRegistry):
            if session is not None and session is not served.session:
                raise TypeError("a registry has a session of its own: leave session= out")
            if config is not None:
                raise TypeError("a registry has a config of its own: leave config= out")
            ids = served.run_context or ids
            self.session = served.session
            self._prompt: Prompt[Any] | None = None
            policies: tuple[AttachedPolicy, ...] = ()

            def context(session: Session) -> ToolContext:
                return served.context().having(session=session)

            def render(session: Session) -> RenderedPrompt:
                return cast("RenderedPrompt", served.context().rendering)
        else:
            prompt = self._prompt = _as_prompt(served)
            self.session = Session() if session is None else session
            settings, policies = dict(config or {}), prompt.policies

            def context(session: Session) -> ToolContext:
                return ToolContext(
                    session=session, prompt=prompt, resources=prompt.resources, config=settings
                )

            def render(session: Session) -> RenderedPrompt:
                # With examples, which do not all fit into a tool's definition.
                return prompt.render(session, examples=True)

        run_id = new_id()
        self._service = Service(
            context=context,
            render=render,
            policies=policies,
            ids=ids.filled(run_id=run_id, loop_id=name, trace_id=run_id),
            time_limit=time_limit,
            undo=undo,
            on_change=self._notify_of_changed_offer,
        )
        self._resources = tuple(resources)
        self._prompts = _named_prompts(prompts)
        self._first = ServedClient(self._service, self.session)
        self._new_session = new_session
        self._is_first_free = new_session is None
        self._clients: OrderedDict[tuple[str, str], list[ServedClient]] = OrderedDict()
        self._bus = InMemorySubscriptionBus()
        self._notices: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, tuple[ServedClient, WaitingCall]] = {}
        """The calls that wait for an answer of their client's user."""
        self._listen = ListenHandler(self._bus)
        self.protocol: Server[Any] = _Protocol(
            name,
            version=__version__,
            get_tool_input_schema=self._input_schema,
            on_list_tools=self._list_tools,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_list_prompts=self._list_prompts,
            on_completion=self._complete,
            on_subscribe_resource=self._subscribe,
            on_unsubscribe_resource=self._unsubscribe,
            on_subscriptions_listen=self._listen_to_changes,
        )
        """The server of the ``mcp`` package, for any transport."""
        self.protocol.middleware.append(_refuse_ids_in_use)
        # What a client sends back is sealed: it cannot be forged, nor used for another call.
        self.protocol.middleware.append(
            RequestStateBoundary(RequestStateSecurity.ephemeral(), default_audience=name)
        )
        add = self.protocol.add_request_handler
        add("tools/call", CallToolRequestParams, self._call_tool)
        add("resources/read", ReadResourceRequestParams, self._read_resource)
        add("prompts/get", GetPromptRequestParams, self._get_prompt)
        add("logging/setLevel", SetLevelRequestParams, self._set_level)
        self.protocol.instructions = self._first.instructions

    def __enter__(self) -> McpServer:
        if self._prompt is not None:
            self._prompt.resources.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._prompt is not None:
            self._prompt.resources.__exit__(*error)

    async def run_stdio(self, wire: Wire | None = None) -> None:
        """Serve one client over standard input and output, or another wire, until it leaves."""
        from weakincentives.mcp.stdio import stdio_streams

        with self:
            async with stdio_streams(wire) as (incoming, outgoing):
                options = self.protocol.create_initialization_options()
                await self.protocol.run(incoming, outgoing, options)

    async def run_http(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        auth: McpAuth | None = None,
    ) -> None:
        """Serve streamable HTTP at ``/mcp`` until cancelled, to clients that have the token.

        With ``auth`` they need one that an authorization server has made for this server.
        """
        from weakincentives.mcp.http import listen, serve

        with self, listen(host, port) as socket:
            await serve(self, socket, token, auth=auth)

    # Clients

    def _client_of(self, request: ServerRequestContext) -> ServedClient:
        """Return the client of a request: of its connection, or else by who and what it is."""
        # There is no public way to the connection, which outlives the request.
        connection = request.session._connection  # pyright: ignore[reportPrivateUsage]
        known = connection.state.get(_CLIENT)
        if known is not None:
            return known
        params = request.session.client_params
        names = ["" if params is None else params.client_info.name]
        if request.request is not None:  # over HTTP
            names += request.request.query_params.getlist("client")
        key = " ".join(names), authenticated_principal(request) or ""
        same = self._clients.setdefault(key, [])
        self._clients.move_to_end(key)
        # In the newest era each request is a connection of its own, on whatever channel.
        lasts = connection.has_standalone_channel and not is_newest_era(connection.protocol_version)
        client = next((each for each in same if not (lasts and each.is_connected)), None)
        if client is None:
            client = self._new_client(" ".join(filter(None, key)))
            same.append(client)
            self._forget_clients()
        if lasts:
            client.is_connected = True
            client.connections.add(connection)
            connection.exit_stack.callback(self._connection_ended, client, connection)
            connection.state[_CLIENT] = client
        return client

    def _connection_ended(self, client: ServedClient, connection: Connection) -> None:
        if connection in client.connections:  # or another one has resumed its session
            _leave(client)

    def _new_client(self, name: str) -> ServedClient:
        if self._is_first_free:
            self._is_first_free = False
            return self._first
        if self._new_session is not None:
            return ServedClient(self._service, self._new_session(name))
        session = Session(clock=self.session.clock)
        session.register_like(self.session)
        return ServedClient(self._service, session)

    def end_session(self, session_id: str) -> None:
        """Let another connection resume the session of a client that ends its own over HTTP."""
        for client in self._all_clients:
            if any(each.session_id == session_id for each in client.connections):
                _leave(client)

    def _forget_clients(self) -> None:
        """Forget those that have been away longest."""
        while len(self._clients) > _MOST_CLIENTS:
            oldest = next(
                (
                    key
                    for key, clients in self._clients.items()
                    if not any(each.is_connected or each is self._first for each in clients)
                ),
                None,
            )
            if oldest is None:
                return
            del self._clients[oldest]

    @property
    def _all_clients(self) -> list[ServedClient]:
        return [client for clients in self._clients.values() for client in clients]

    # Changes

    def _notify_of_changed_offer(self, client: ServedClient, before: Offered, now: Offered) -> None:
        events: list[ServerEvent] = []
        if before.whole.tools != now.whole.tools:
            events.append(ToolsListChanged())
        if paths_in(before.rendered) != paths_in(now.rendered):
            events.append(PromptsListChanged())
        if client is self._first:
            self.protocol.instructions = client.instructions
        self._publish(*events, only=client)

    def notify_of_change(self, uri: str) -> None:
        """Notify the clients that have subscribed to a resource, from its event loop."""
        self._publish(ResourceUpdated(uri))

    def _publish(self, *events: ServerEvent, only: ServedClient | None = None) -> None:
        """Tell clients, without waiting for them."""

        async def tell() -> None:
            for event in events:
                await self._bus.publish(event)
                for client in self._all_clients if only is None else [only]:
                    if isinstance(event, ResourceUpdated) and not client.watched[event.uri]:
                        continue
                    for connection in list(client.connections):
                        await _TOLD[type(event)](connection, event)

        try:
            task = asyncio.ensure_future(tell())
        except RuntimeError:
            return  # nothing is served yet
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)

    def _look_for_changes(self, may_have_changed: bool) -> None:
        """Notify clients of the resources that have changed, after a call."""
        for client in self._all_clients if may_have_changed else ():
            for uri in +client.watched:
                version = self._version(client, uri)
                if client.versions.get(uri) != version:
                    client.versions[uri] = version
                    self._publish(ResourceUpdated(uri), only=client)

    def _version(self, client: ServedClient, uri: str) -> object:
        found = self._resource(client, uri)
        if found is None or found[0].version is None:
            return None
        return found[0].version(client.look().context, uri)

    async def _subscribe(
        self, request: ServerRequestContext, params: SubscribeRequestParams
    ) -> EmptyResult:
        self._watch(self._client_of(request), [params.uri], 1)
        return EmptyResult()

    async def _unsubscribe(
        self, request: ServerRequestContext, params: UnsubscribeRequestParams
    ) -> EmptyResult:
        self._client_of(request).watched.pop(params.uri, None)
        return EmptyResult()

    async def _listen_to_changes(
        self, request: ServerRequestContext, params: SubscriptionsListenRequestParams
    ) -> SubscriptionsListenResult:
        client = self._client_of(request)
        uris = params.notifications.resource_subscriptions or []
        self._watch(client, uris, 1)
        try:
            return await self._listen(request, params)
        finally:
            self._watch(client, uris, -1)

    def _watch(self, client: ServedClient, uris: Iterable[str], more: int) -> None:
        for uri in uris:
            client.watched[uri] += more
            if client.watched[uri] > 0:
                client.versions[uri] = self._version(client, uri)

    async def _set_level(
        self, request: ServerRequestContext, params: SetLevelRequestParams
    ) -> EmptyResult:
        set_level(request, params.level)
        return EmptyResult()

    # Lists

    async def _list_tools(
        self, request: ServerRequestContext, params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        offered = self._client_of(request).look()
        page, following = _page(offered.whole.tools, params)
        return ListToolsResult(tools=[_definition(tool) for tool in page], next_cursor=following)

    def _input_schema(self, name: str) -> Mapping[str, Any] | None:
        for client in (self._first, *self._all_clients):
            offer = client.offered.whole.offers.get(name)
            if offer is not None:
                return _definition(offer.tool).input_schema
        return None

    def _offered_resources(self, client: ServedClient) -> list[tuple[McpResource, OfferedTool]]:
        """Return the resources of a client, each with the policies for reading it."""
        whole = client.look().whole
        listeners = whole.listeners
        policies = self._service.policies
        found = [(each, OfferedTool.of(each.tool, policies, listeners)) for each in self._resources]
        if client.undo is not None:
            found += [
                (each, OfferedTool.of(each.tool, policies, listeners))
                for each in client.undo.resources
            ]
        reading = whole.offers.get(FILE.tool.name)
        if reading is not None and client.look().context.resources.find(Filesystem) is not None:
            found.append((FILE, OfferedTool.of(FILE.tool, reading.rules, listeners)))
        return found

    def _resource(
        self, client: ServedClient, uri: str
    ) -> tuple[McpResource, OfferedTool, dict[str, Any]] | None:
        for resource, offer in self._offered_resources(client):
            arguments = resource.arguments(uri)
            if arguments is not None:
                return resource, offer, arguments
        return None

    async def _list_resources(
        self, request: ServerRequestContext, params: PaginatedRequestParams | None
    ) -> ListResourcesResult:
        """Return our resources first, then the files in their order."""
        client = self._client_of(request)
        offered = [each for each, _ in self._offered_resources(client)]
        cursor = _cursor(params)
        listed = [] if cursor else [each.listed() for each in offered if not each.is_template]
        following = None
        files = client.look().context.resources.find(Filesystem)
        if FILE in offered and files is not None:
            paths = await asyncio.to_thread(files_after, files, cursor, _PAGE)
            listed += map(listed_file, paths)
            following = paths[-1] if len(paths) == _PAGE else None
        elif cursor:
            raise MCPError(INVALID_PARAMS, "invalid cursor")
        return ListResourcesResult(resources=listed, next_cursor=following)

    async def _list_templates(
        self, request: ServerRequestContext, params: PaginatedRequestParams | None
    ) -> ListResourceTemplatesResult:
        offered = self._offered_resources(self._client_of(request))
        templates = [each.listed_template() for each, _ in offered if each.is_template]
        page, following = _page(templates, params)
        return ListResourceTemplatesResult(resource_templates=list(page), next_cursor=following)

    async def _list_prompts(
        self, request: ServerRequestContext, params: PaginatedRequestParams | None
    ) -> ListPromptsResult:
        client = self._client_of(request)
        listed = [each.listed() for each in self._prompts.values()]
        listed += [
            ListedPrompt(name=path, description=f"The section {path} of the instructions")
            for path in self._sections(client)
            if path not in self._prompts
        ]
        page, following = _page(listed, params)
        return ListPromptsResult(prompts=list(page), next_cursor=following)

    def _sections(self, client: ServedClient) -> list[str]:
        return [] if self._prompt is None else paths_in(client.look().rendered)

    async def _complete(
        self, request: ServerRequestContext, params: CompleteRequestParams
    ) -> CompleteResult:
        client, argument = self._client_of(request), params.argument
        others = (params.context and params.context.arguments) or {}
        values: Iterable[str] = ()
        complete: Mapping[str, Completer] = {}
        schemas: Sequence[Mapping[str, Any]] = ()
        if params.ref.type == "ref/prompt":
            prompt = self._prompts.get(params.ref.name)
            if prompt is None and params.ref.name not in self._sections(client):
                raise MCPError(INVALID_PARAMS, f"there is no prompt {params.ref.name!r}")
            if prompt is not None:
                complete, schemas = prompt.complete, prompt.schemas
        else:
            uri = params.ref.uri
            offered = self._offered_resources(client)
            resource = next((each for each, _ in offered if each.uri == uri), None)
            if resource is None:
                raise MCPError(INVALID_PARAMS, f"there is no resource {uri!r}", {"uri": uri})
            complete, schemas = resource.complete, [resource.tool.parameters]
            if resource is FILE:
                files = client.look().context.filesystem
                values = await asyncio.to_thread(lambda: list(complete_path(files, argument.value)))
        if (completer := complete.get(argument.name)) is not None:
            values = completer(argument.value, others)
        elif not values:
            values = [each for found in schemas for each in choices_in(found, argument.name)]
        return CompleteResult.model_validate(completed(list(values), argument.value))

    # Calls

    async def _call_tool(
        self, request: ServerRequestContext, params: CallToolRequestParams
    ) -> dict[str, Any]:
        return await self._make(request, params, params.name, params.arguments or {}, _answer)

    async def _read_resource(
        self, request: ServerRequestContext, params: ReadResourceRequestParams
    ) -> dict[str, Any]:
        uri = str(params.uri)
        found = self._resource(self._client_of(request), uri)
        if found is None:
            raise MCPError(INVALID_PARAMS, f"there is no resource {uri}", {"uri": uri})
        resource, offer, arguments = found

        def answer(tool: Tool[Any, Any] | None, result: ToolResult[Any], text: str) -> Any:
            if not result.success:
                raise _error_of(result, uri=uri)
            contents = resource.contents(uri, result)
            # A file may change at any time: nothing is to be cached.
            return {
                "contents": [contents],
                "resultType": "complete",
                "ttlMs": 0,
                "cacheScope": "private",
            }

        return await self._make(request, params, resource.tool.name, arguments, answer, offer)

    async def _get_prompt(
        self, request: ServerRequestContext, params: GetPromptRequestParams
    ) -> dict[str, Any]:
        client, given = self._client_of(request), params.arguments or {}
        prompt = self._prompts.get(params.name)
        if isinstance(prompt, McpPrompt):
            whole = client.look().whole
            offer = OfferedTool.of(prompt.tool, self._service.policies, whole.listeners)
            arguments = prompt.parameters(given)
            return await self._make(request, params, prompt.name, arguments, _prompt_answer, offer)
        if prompt is not None:
            return _prompt(prompt.listed().description, prompt.messages(given))
        if params.name not in self._sections(client) or self._prompt is None:
            raise MCPError(INVALID_PARAMS, f"there is no prompt {params.name!r}")
        try:
            text = self._prompt.section_text(params.name, client.session)
        except PromptRenderError as error:
            raise MCPError(INVALID_PARAMS, str(error)) from error
        return _prompt(None, messages_of([text]))

    async def _make(
        self,
        request: ServerRequestContext,
        params: CallToolRequestParams | ReadResourceRequestParams | GetPromptRequestParams,
        name: str,
        arguments: Mapping[str, Any],
        answer: Callable[[Tool[Any, Any] | None, ToolResult[Any], str], dict[str, Any]],
        offer: OfferedTool | None = None,
    ) -> dict[str, Any]:
        """Run a call of a client and return its answer."""
        client, earlier = self._client_of(request), None
        if params.request_state is not None:
            # A call that waited for its user comes again, once: with what they have answered.
            owner, earlier = self._waiting.get(params.request_state, (None, None))
            if earlier is None or owner is not client:
                raise MCPError(INVALID_PARAMS, "Invalid or expired requestState")
            del self._waiting[params.request_state]
        reports = Reports(request)
        made = ClientCall(request, earlier, params.input_responses, reports)
        call = ToolCall(name, arguments, made.id)
        running = client.run(call, made, reports, offer, self._look_for_changes)
        tool, result, text = await _cancelled_once(running)
        code = None if result.failure is None else result.failure.code
        if code == PROTOCOL_ERROR and made.refused is not None:
            refused = made.refused
            raise MCPError(refused.code, str(refused), refused.data)
        if not made.asked or code != SUSPENDED:
            return answer(tool, result, text)
        state = new_id()
        self._waiting[state] = client, made.waiting()
        for oldest in list(self._waiting)[:-_MOST_WAITING]:
            del self._waiting[oldest]
        return made.input_required(state)


async def _tell_tools(connection: Connection, event: ServerEvent) -> None:
    await connection.send_tool_list_changed()


async def _tell_prompts(connection: Connection, event: ServerEvent) -> None:
    await connection.send_prompt_list_changed()


async def _tell_updated(connection: Connection, event: ServerEvent) -> None:
    await connection.send_resource_updated(cast("ResourceUpdated", event).uri)


_TOLD: Mapping[type, Callable[[Any, Any], Coroutine[Any, Any, None]]] = {
    ToolsListChanged: _tell_tools,
    PromptsListChanged: _tell_prompts,
    ResourceUpdated: _tell_updated,
}


_ids_of_channels: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


async def _refuse_ids_in_use(ctx: ServerRequestContext, call_next: CallNext) -> HandlerResult:
    """Refuse a request whose id another one of its connection has: it would get that answer."""
    if ctx.request_id is None:
        return await call_next(ctx)
    # There is no public way to the connection, which outlives the request.
    connection = ctx.session._connection  # pyright: ignore[reportPrivateUsage]
    if not is_newest_era(connection.protocol_version):
        ids: set[str] = connection.state.setdefault(_IDS, set())
    elif connection.has_standalone_channel:  # several requests share one channel
        ids = _ids_of_channels.setdefault(connection.outbound, set())
    else:
        return await call_next(ctx)
    name = str(ctx.request_id)  # "7" and 7 are one for the transports, too
    if name in ids:
        raise MCPError(INVALID_REQUEST, f"another request has the id {name}")
    ids.add(name)
    try:
        return await call_next(ctx)
    finally:
        ids.remove(name)


def _leave(client: ServedClient) -> None:
    client.is_connected = False
    client.connections.clear()
    client.watched.clear()


class _Protocol(Server[Any]):
    """The server of the ``mcp`` package; announces over every transport that tools may change."""

    def create_initialization_options(
        self, notification_options: NotificationOptions | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        options = notification_options or NotificationOptions(
            tools_changed=True, prompts_changed=True
        )
        return super().create_initialization_options(options, *args, **kwargs)


def _as_prompt(served: Prompt[Any] | Section[Any] | Iterable[Section[Any]]) -> Prompt[Any]:
    if isinstance(served, Prompt):
        return served
    sections = [served] if isinstance(served, Section) else list(served)
    return Prompt(PromptTemplate(sections=sections))


def _named_prompts(
    prompts: Iterable[McpPrompt | Tool[Any, Any] | PromptTemplate[Any]],
) -> dict[str, McpPrompt | TemplatePrompt]:
    named: dict[str, McpPrompt | TemplatePrompt] = {}
    for each in prompts:
        if isinstance(each, Tool):
            each = McpPrompt(tool=each)
        elif isinstance(each, PromptTemplate):
            each = TemplatePrompt(each)
        if named.setdefault(each.name, each) is not each:
            raise ToolDefinitionError(f"there are two prompts {each.name!r}")
    return named


# Pages


def _cursor(params: PaginatedRequestParams | None) -> str:
    return (params and params.cursor) or ""


def _page(items: Sequence[T], params: PaginatedRequestParams | None) -> tuple[Sequence[T], Any]:
    """Return the items of a page, and where the next one begins; None if there is none."""
    cursor = _cursor(params) or "0"
    is_number = cursor.isascii() and cursor.isdigit() and len(cursor) < 10
    if not is_number or int(cursor) > len(items):
        raise MCPError(INVALID_PARAMS, "invalid cursor")
    start = int(cursor)
    end = start + _PAGE
    return items[start:end], str(end) if end < len(items) else None


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


def _prompt(description: str | None, messages: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"messages": messages, "resultType": "complete"}
    return answer if description is None else {"description": description, **answer}


def _prompt_answer(
    tool: Tool[Any, Any] | None, result: ToolResult[Any], text: str
) -> dict[str, Any]:
    if not result.success:
        raise _error_of(result)
    return _prompt(None if tool is None else tool.description, result_messages(result))


def _error_of(result: ToolResult[Any], **data: object) -> MCPError:
    """Return a failed call as an error, for requests whose results have no failures."""
    failure = result.failure
    code = INTERNAL_ERROR if failure and failure.code == "INTERNAL_ERROR" else INVALID_PARAMS
    about = {CALL_ID: result.call_id, **({} if failure is None else {"reason": failure.code})}
    return MCPError(code, result.message, {**data, **about})


# Running calls


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
