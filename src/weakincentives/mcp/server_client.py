"""One client of a server: its session, what it is offered, and its calls."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from weakincentives.core.call import RunContext, ToolCall
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import (
    PromptEvaluationError,
    Suspended,
    VisibilityExpansionRequired,
)
from weakincentives.mcp.client_call import AnsweredElsewhere, ClientCall, client_call
from weakincentives.mcp.reports import Reports
from weakincentives.mcp.undo import UndoTools
from weakincentives.prompt.policies import AttachedPolicy
from weakincentives.prompt.prompt import OfferedTool, Prompt, RenderedPrompt
from weakincentives.prompt.section import expand
from weakincentives.prompt.tool import DEFAULT_MAX_RESULT_CHARS, Tool, ToolContext
from weakincentives.runtime.tool_call import aexecute_tool
from weakincentives.runtime.window import read_result_tool
from weakincentives.session.events import ToolInvoked
from weakincentives.session.session import Session
from weakincentives.tool_result import ToolResult, is_shortened

if TYPE_CHECKING:
    from mcp.server.connection import Connection

# What ends a run.
_ENDING = (PromptEvaluationError, Suspended)


@dataclass(frozen=True, slots=True, eq=False)
class Offered:
    """The tools at one moment."""

    rendered: RenderedPrompt
    """The same object as long as nothing changes."""
    context: ToolContext
    """The context of the next call."""
    whole: RenderedPrompt
    """With the server's own tools."""
    extra: tuple[Tool[Any, Any], ...]
    """The server's own tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a server does for every client."""

    context: Callable[[Session], ToolContext]
    render: Callable[[Session], RenderedPrompt]
    policies: tuple[AttachedPolicy, ...]
    ids: RunContext
    time_limit: float | None
    undo: bool
    on_change: Callable[[ServedClient, Offered, Offered], object]
    """Called when what a client is offered has changed, maybe only its text."""


class ServedClient:
    """A client: its session, and the calls it makes there.

    Calls that may run concurrently do, with the isolation of a turn; all others run alone, in the
    order of arrival. Those that only read wait for nothing here.
    """

    def __init__(self, service: Service, session: Session) -> None:
        self.session = session
        self.undo = UndoTools(session) if service.undo else None
        self.connections: WeakSet[Connection] = WeakSet()
        """Those that hear of changes: they outlive a request."""
        self.watched: Counter[str] = Counter()
        """The addresses of resources that it wants to hear about."""
        self.versions: dict[str, object] = {}
        """What is known of those."""
        self.is_connected = False
        self._service = service
        self._offered: Offered | None = None
        self._has_shortened = False
        """Whether a result was shortened: then it gets the tool that reads the rest."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._order = _Order()

    @property
    def offered(self) -> Offered:
        """What was offered last."""
        return self._offered or self.look()

    def look(self) -> Offered:
        """Return what is offered now."""
        service, before = self._service, self._offered
        rendered = service.render(self.session)
        extra = () if self.undo is None else self.undo.tools
        if self._has_shortened:
            extra = (*extra, read_result_tool())
        if before is not None and before.rendered is rendered and before.extra == extra:
            return before
        given = extra
        # A tool of the user replaces ours of the same name.
        extra = tuple(tool for tool in extra if tool.name not in rendered.offers)
        offers = {
            tool.name: OfferedTool.of(tool, service.policies, rendered.listeners) for tool in extra
        } | dict(rendered.offers)
        tools = tuple(tool for tool in rendered.tools if tool.handler is not None)
        whole = replace(rendered, tools=(*tools, *extra), offers=offers)
        context = service.context(self.session).having(rendered_prompt=whole)
        self._offered = Offered(rendered, context, whole, given)
        if before is not None:
            service.on_change(self, before, self._offered)
        return self._offered

    @property
    def instructions(self) -> str | None:
        offered = self.look()
        guide = () if self.undo is None else (self.undo.guide,)
        return "\n\n".join(filter(None, (offered.rendered.text, *guide))) or None

    async def run(
        self,
        call: ToolCall,
        made: ClientCall,
        reports: Reports,
        offer: OfferedTool | None = None,
        settled: Callable[[bool], object] = lambda _: None,
    ) -> tuple[Tool[Any, Any] | None, ToolResult[Any], str]:
        """Run a call; ``offer`` is that of a tool which is not among the offered ones."""
        client_call.set(made)
        known = self.offered.whole.offers.get(call.name) if offer is None else offer
        if known is None or known.tool.reach == "read":
            done = await self._run(call, made, reports, offer, settled)
        else:
            loop = asyncio.get_running_loop()
            if loop is not self._loop:  # the order belongs to one loop
                self._loop, self._order = loop, _Order()
            order = self._order
            await order.enter(alone=not known.may_run_concurrently)
            try:
                done = await self._run(call, made, reports, offer, settled)
            finally:
                order.leave()
        await reports.end()
        return done

    async def _run(
        self,
        call: ToolCall,
        made: ClientCall,
        reports: Reports,
        offer: OfferedTool | None,
        settled: Callable[[bool], object],
    ) -> tuple[Tool[Any, Any] | None, ToolResult[Any], str]:
        offered, service = self.look(), self._service
        whole = offered.whole
        if offer is None:
            offer = whole.offers.get(call.name)
        else:
            whole = replace(whole, offers={call.name: offer})
        limit = service.time_limit
        client = made.client.client_params
        context = offered.context.having(
            rendered_prompt=whole,
            deadline=None if limit is None else Deadline.after(limit, clock=self.session.clock),
            heartbeat=reports.heart,
            run_context=service.ids.filled(
                agent_id="mcp" if client is None else client.client_info.name
            ),
            on_report=reports.report,
            caller=made,
        )
        if self.undo is not None:
            self.undo.before(call, offer, context)
        try:
            result = await self._result(call, context)
        except BaseException:  # cancelled
            if self.undo is not None:
                self.undo.abandon(call)
            raise
        may_have_changed = result.success and offer is not None and offer.tool.reach != "read"
        # Before the next call, but after the answer.
        asyncio.get_running_loop().call_soon(self._settle, call, result, settled, may_have_changed)
        tool = None if offer is None else offer.tool
        text = result.render(DEFAULT_MAX_RESULT_CHARS if tool is None else tool.max_result_chars)
        self._has_shortened = self._has_shortened or is_shortened(text)
        return tool, result, text

    def _settle(
        self,
        call: ToolCall,
        result: ToolResult[Any],
        settled: Callable[[bool], object],
        may_have_changed: bool,
    ) -> None:
        if self.undo is not None:
            self.undo.after(call, result)
        self.look()
        settled(may_have_changed)

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
            result = cast("ToolInvoked", self.session.record_of(call.id)).result
            if isinstance(error, AnsweredElsewhere):
                result = replace(result, message=str(error))
            return result


class _Order:
    """Lets some in together and others alone, in the order of arrival."""

    def __init__(self) -> None:
        self._inside = 0
        self._is_alone = False
        self._line: deque[tuple[bool, asyncio.Future[None]]] = deque()

    async def enter(self, *, alone: bool) -> None:
        if not self._line and self._admits(alone):
            self._inside, self._is_alone = self._inside + 1, alone
            return
        turn = asyncio.get_running_loop().create_future()
        self._line.append((alone, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # it was let in at the same moment
            else:
                self._line = deque(each for each in self._line if each[1] is not turn)
                self._let_in()
            raise

    def leave(self) -> None:
        self._inside -= 1
        self._let_in()

    def _admits(self, alone: bool) -> bool:
        return not self._inside or not (alone or self._is_alone)

    def _let_in(self) -> None:
        while self._line and self._admits(self._line[0][0]):
            alone, turn = self._line.popleft()
            if not turn.done():
                self._inside, self._is_alone = self._inside + 1, alone
                turn.set_result(None)


def paths_in(rendered: RenderedPrompt) -> list[str]:
    """Return the paths of the sections that are shown."""
    return [path for path, _ in rendered.sections]
