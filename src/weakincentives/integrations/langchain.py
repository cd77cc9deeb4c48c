"""LangChain and LangGraph: every tool call of an agent as a transaction, resumed from checkpoints.

>>> agent = create_agent(model, middleware=[WinkMiddleware(workspace=".")])  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Self, Unpack, cast

from weakincentives.core.call import new_id
from weakincentives.core.logs import get_logger
from weakincentives.core.loops import in_thread
from weakincentives.errors import (
    ApprovalNeeded,
    InvalidArguments,
    MissingExtra,
    Suspended,
    ToolDefinitionError,
    ToolValidationError,
    WinkError,
)
from weakincentives.integrations.bridge import (
    MAX_SHOWN,
    AnyResult,
    AnyTool,
    Bridge,
    BridgeOptions,
    Closes,
    OwnWork,
    Workspace,
    adopted,
)
from weakincentives.prompt.approval import Approval, ApprovalRequest
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.tool import Reach
from weakincentives.runtime.answers import INTERRUPTED
from weakincentives.runtime.tool_call import step_by_hand
from weakincentives.tool_result import ToolResult

try:
    from langchain.agents.middleware import AgentMiddleware
    from langchain.agents.middleware.types import ToolCallRequest
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import (
        BaseTool,
        InjectedToolCallId,
        StructuredTool,
        ToolException,
    )
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
    from langgraph.config import get_config
    from langgraph.errors import GraphBubbleUp, GraphInterrupt, ParentCommand
    from langgraph.runtime import Runtime, get_runtime
    from langgraph.types import Command, interrupt
    from pydantic import BeforeValidator, PrivateAttr
    from typing_extensions import TypedDict  # pydantic reads it, before Python 3.12
except ImportError as error:
    raise MissingExtra("langchain", "langchain") from error

Answer = ToolMessage | Command[Any]
"""What a tool gives its agent."""

Suspended.register(GraphBubbleUp)

_logger = get_logger(__name__)
_serializer = JsonPlusSerializer()
_UNDONE = "What this call changed in the workspace was undone."
_ALONE = (
    "it needs a person's approval, which can be asked for one call of a node only: make this call "
    "again, alone"
)
_MAX_DESCRIPTION = 1024
_IDLE_SECONDS = 2.0
"""LangGraph does not tell when a run pauses. Then another process may continue it."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the model, as it reaches us."""

    tool: AnyTool
    name: str
    """The tool's name in the agent: those of its own tools may have capitals."""
    arguments: object
    id: str | None
    """The model's id; None if no model made the call."""
    blocking: bool
    """Whether it was made from sync code."""


class WinkMiddleware(Closes, AgentMiddleware[Any, Any, Any]):
    """Runs the tool calls of an agent as transactions: its own tools, and those offered here.

    List it last: middleware that retries or edits calls then does so around each transaction. One
    instance may serve several agents. In a graph without ``create_agent``, pass ``tools``,
    ``wrap_tool_call`` and ``awrap_tool_call`` to its ``ToolNode``.

    A policy that needs approval interrupts the graph, with the value of LangChain's own per-call
    review: ``name``, ``args``, ``description``. Resume with ``{"type": "approve"}``,
    ``{"type": "reject", "message": ...}`` or ``{"type": "edit", "edited_action": {"name": ...,
    "args": ...}}``, with ``by`` to name the person, or with a bool.

    Args:
        workspace: The directory, or a function of LangGraph's ``Runtime`` that returns it.
        agents: Those of the agent's own tools that run an agent themselves. Such a call is checked
            and recorded when it begins; the calls of that agent are transactions of their own.
        options: Those of ``Bridge``. By default the thread id names the run: a thread that is
            resumed in another process continues its run. With a name of your own, a run that is
            repeated from its start gets its recorded answers.
    """

    def __init__(
        self,
        workspace: Workspace | None = ".",
        *,
        agents: Iterable[str] = (),
        **options: Unpack[BridgeOptions],
    ) -> None:
        super().__init__()
        self._is_named = options.get("run") is not None
        if not self._is_named:
            options["run"] = _thread_or(new_id())
        self._bridge = Bridge(workspace, idle=_IDLE_SECONDS, **options)
        self._agents = frozenset(agents)
        self.tools = [_Offered.of(tool, self._answer) for tool in self._bridge.tools]

    def close(self) -> None:
        """Release the workspace; calls are refused from now on."""
        self._bridge.close()

    # The agent's own tools

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Answer]
    ) -> Answer:
        """Run a call of one of the agent's own tools as a transaction."""
        if isinstance(request.tool, _Offered):
            return handler(request)
        return step_by_hand(self._cover, request, handler, True)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Answer]]
    ) -> Answer:
        """Run a call of one of the agent's own tools as a transaction."""
        if isinstance(request.tool, _Offered):
            return await handler(request)
        return await self._cover(request, handler, False)

    async def _cover(self, request: ToolCallRequest, handler: Any, blocking: bool) -> Answer:
        call = request.tool_call
        name = call["name"]
        description = request.tool.description if request.tool else ""
        work = _OwnCall(request, handler, blocking, self._bridge.reaches.get(name))
        if name in self._agents:
            tool = self._bridge.covering(name, description, _start_agent, writes="api")
        else:
            tool = self._bridge.covering(name, description, work.handler)
        result = await self._answer(_Call(tool, name, call["args"], call["id"], blocking))
        if name in self._agents and result.success:
            given: Any = work.begin(cast("dict[str, Any]", result.value))
            return given if blocking else await given
        return work.outcome(result)

    # Every call

    async def _answer(self, call: _Call) -> AnyResult:
        """Run a call, or return its recorded answer; interrupt the graph to ask a person."""
        outer = _inside.get()
        if outer and call.id is not None:
            raise WinkError(
                f"{outer} runs an agent, whose finished calls would be undone with it: name it in "
                f"WinkMiddleware(agents={{{outer!r}}})"
            )
        runtime = _runtime()
        call_id = None if call.id is None else self._id_of(call.id, runtime)
        approval = None if call_id is None else self._given(call, call_id, runtime)
        while True:
            options: Any = {"call_id": call_id, "context": runtime, "approval": approval}
            try:
                if call.blocking:
                    return self._bridge.call(call.tool, call.arguments, **options)
                return await self._bridge.acall(call.tool, call.arguments, **options)
            except ApprovalNeeded as needed:
                if call_id is None:
                    raise
                node = call_id.rpartition(":")[0]
                asked = self._bridge.asked(runtime)
                first = next(i for i, _ in asked if i.rpartition(":")[0] == node)
                if first.partition("#")[0] == call_id:
                    approval = _ask(call, needed.request)
                else:  # LangGraph does not tell the answers to one node apart
                    approval = Approval(False, reason=_ALONE)

    def _given(self, call: _Call, call_id: str, runtime: Runtime[Any] | None) -> Approval | None:
        """Return a person's answer to a question that an earlier run of the node has asked.

        An answer is for what was shown then, so it is read before the call is checked again.
        LangGraph counts the interrupts of a node: those that were answered are counted again.
        """
        answers = [answer for asked, answer in self._bridge.asked(runtime) if asked == call_id]
        try:
            for answer in answers:
                if answer is not None and answer.reason != _ALONE:
                    interrupt(None)
            return _ask(call) if answers and answers[-1] is None else None
        except GraphInterrupt:
            return None  # no answer yet: the question is made, and asked, again

    def _id_of(self, tool_call_id: str, runtime: Runtime[Any] | None) -> str | None:
        """Return an id that is the same when its node runs again, and differs in other nodes."""
        info = None if runtime is None else runtime.execution_info
        if info is None:
            return None
        node = info.task_id
        if self._is_named:
            # A repeated run has other nodes: only their names and places are the same.
            names = "/".join(part.partition(":")[0] for part in info.checkpoint_ns.split("|"))
            about = get_config().get("metadata", {})
            place = "/".join(map(str, about.get("langgraph_path", ())))
            node = f"{names}:{about.get('langgraph_step', 0)}:{place}"
        # Ours are told apart by what is before the last colon.
        return f"{node}:{tool_call_id.replace(':', '_')}"


def _runtime() -> Runtime[Any] | None:
    try:
        return get_runtime()
    except (RuntimeError, KeyError):  # not in a graph
        return None


def _thread_or(name: str) -> Callable[[Any], str]:
    def named(runtime: Runtime[Any] | None) -> str:
        info = None if runtime is None else runtime.execution_info
        return name if info is None or info.thread_id is None else str(info.thread_id)

    return named


# Our tools for the agent


class _Offered(BaseTool):
    """One of our tools as LangChain's."""

    _tool: AnyTool = PrivateAttr()
    _answer: Callable[..., Awaitable[AnyResult]] = PrivateAttr()

    @classmethod
    def of(cls, tool: AnyTool, answer: Callable[..., Awaitable[AnyResult]]) -> Self:
        offered = cls(
            name=tool.name, description=tool.text(_MAX_DESCRIPTION), args_schema=tool.parameters
        )
        offered._tool, offered._answer = tool, answer
        return offered

    # The arguments as one value: by name they would clash with those of LangChain ("config").
    def _to_args_and_kwargs(
        self, tool_input: str | dict[str, Any], tool_call_id: str | None
    ) -> tuple[Any, dict[str, Any]]:
        return (tool_input, tool_call_id), {}

    def _run(self, arguments: object, tool_call_id: str | None) -> object:
        return step_by_hand(self._message, arguments, tool_call_id, True)

    async def _arun(self, arguments: object, tool_call_id: str | None) -> object:
        return await self._message(arguments, tool_call_id, False)

    async def _message(
        self, arguments: object, tool_call_id: str | None, blocking: bool
    ) -> ToolMessage | str:
        call = _Call(self._tool, self.name, arguments, tool_call_id, blocking)
        result = await self._answer(call)
        text = result.render(self._tool.max_result_chars)
        if tool_call_id is None:
            return text  # called directly, not by a model
        content: Any = text
        if result.media:
            content = [{"type": "text", "text": text}, *map(_block, result.media)]
        return _message({"name": self.name, "id": tool_call_id}, content, result)


def _message(call: Mapping[str, Any], content: Any, result: AnyResult) -> ToolMessage:
    return ToolMessage(
        content,
        name=call["name"],
        tool_call_id=call["id"] or "",
        status="success" if result.success else "error",
    )


def _block(media: Any) -> dict[str, str]:
    kind = media.media_type.partition("/")[0]
    return {
        "type": kind if kind in ("image", "audio", "video") else "file",
        "base64": media.base64,
        "mime_type": media.media_type,
    }


# Calls of the agent's own tools


_inside: ContextVar[str] = ContextVar("the agent's own tool that runs", default="")


class _OwnCall(OwnWork):
    """A call of one of the agent's own tools."""

    def __init__(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], Any],
        blocking: bool,
        reach: Reach | None,
    ) -> None:
        super().__init__(self._ended)
        self._request, self._handler = request, handler
        self._blocking, self._reach = blocking, reach
        self._text = ""

    def begin(self, arguments: dict[str, Any]) -> Any:
        """Start the tool, with arguments that a person may have edited."""
        call: Any = {**self._request.tool_call, "args": arguments}
        return self._handler(self._request.override(tool_call=call))

    def failed(self, error: Exception) -> AnyResult:
        if isinstance(error, ParentCommand):  # to another agent: the call has done its work
            command: Any = cast("Exception", error).args[0]
            said = "handed over to another agent"
            return ToolResult(said, _saved(command), exclude_value_from_context=True)
        if isinstance(error, GraphBubbleUp) or self._reach in ("compensable", "irreversible"):
            raise error  # it may have had its effect: it is not run again
        # It ends the node, and the model is told nothing: a node that resumes runs it again.
        return ToolResult.error(str(error) or type(error).__name__, code=INTERRUPTED)

    def recorded(self, value: Answer) -> AnyResult:
        self._text = _text_of(value)
        if isinstance(value, ToolMessage) and value.status == "error":
            undone = "" if self._request.tool is None else _UNDONE  # an unknown tool did nothing
            return ToolResult.error("\n".join(filter(None, (self._text, undone))))
        return ToolResult(self._text, _saved(value), exclude_value_from_context=True)

    async def _ended(self, arguments: dict[str, Any]) -> Answer:
        _inside.set(self._request.tool_call["name"])
        if self._blocking:
            return await in_thread(lambda: self.begin(arguments))
        if self._request.tool is None or _is_async(self._request.tool):
            return await self.begin(arguments)
        work = asyncio.ensure_future(self.begin(arguments))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # It is in a thread, which goes on: only what it has done by its end can be undone.
            await asyncio.wait([work])
            raise

    def outcome(self, result: AnyResult) -> Answer:
        """Return what the tool gave, unchanged unless the model must be told more."""
        if self.error is not None:
            raise self.error
        if not self.has_value:
            return _loaded(result.value) or _message(
                self._request.tool_call, result.render(), result
            )
        given: Answer = self.value
        more = result.message.removeprefix(self._text).lstrip("\n")
        if not more or not isinstance(given, ToolMessage):
            return given
        content: Any = given.content
        if isinstance(content, str):
            content = f"{content}\n{more}".lstrip("\n")
        else:
            content = [*content, {"type": "text", "text": more}]
        return given.model_copy(update={"content": content})


def _start_agent(params: dict[str, Any], *, context: ToolContext) -> AnyResult:
    # With the arguments: when its node runs again, the agent must continue with the same.
    return ToolResult("started", params, exclude_value_from_context=True)


def _text_of(given: Any) -> str:
    """Return what the model will read of a tool's answer."""
    if isinstance(given, ToolMessage):
        return str(given.text)
    if isinstance(given, Command):
        update = cast("Command[Any]", given).update
        given = cast("dict[str, Any]", update).get("messages") if isinstance(update, dict) else ()
    if not isinstance(given, list):
        return ""
    return "\n".join(filter(None, map(_text_of, cast("list[Any]", given))))


def _saved(given: Any) -> dict[str, str] | None:
    """Return what the text of a tool's answer does not contain, in a form that can be recorded."""
    if isinstance(given, ToolMessage) and given.artifact is None and isinstance(given.content, str):
        return None
    try:
        kind, data = _serializer.dumps_typed(given)
    except Exception:
        _logger.warning("the answer of a tool cannot be saved; only its text is on record")
        return None
    return {"langgraph": kind, "data": b64encode(data).decode()}


def _loaded(saved: Any) -> Answer | None:
    if not isinstance(saved, Mapping) or "langgraph" not in saved:
        return None
    found = cast("Mapping[str, str]", saved)
    return _serializer.loads_typed((found["langgraph"], b64decode(found["data"])))


# Approval


class EditedAction(TypedDict):
    """The call to run instead."""

    name: str
    args: dict[str, Any]


class Decision(TypedDict):
    """A person's answer, in LangChain's words."""

    type: Literal["approve", "edit", "reject"]
    edited_action: NotRequired[EditedAction]
    message: NotRequired[str]
    by: NotRequired[str]


def _ask(call: _Call, request: ApprovalRequest | None = None) -> Approval:
    """Interrupt the graph, or return a person's answer."""
    question = request and {
        "type": "tool_approval",
        "tool_call_id": call.id,
        "name": call.name,
        "args": dict(request.arguments),
        "description": request.describe(MAX_SHOWN),
    }

    def answer(given: Any) -> Any:
        return _decision(call, given)

    form: Any = Annotated[Decision, BeforeValidator(answer)]
    given: Decision = interrupt(question, response_schema=form)
    edited = given.get("edited_action") if given["type"] == "edit" else None
    return Approval(
        given["type"] != "reject",
        by=given.get("by", ""),
        reason=given.get("message", ""),
        arguments=None if edited is None else edited["args"],
    )


def _decision(call: _Call, answer: Any) -> Any:
    """Return an answer in LangChain's words. Who gives an invalid one can give another."""
    if isinstance(answer, bool):
        return {"type": "approve" if answer else "reject"}
    found = cast("Mapping[str, Any]", answer if isinstance(answer, Mapping) else {})
    if len(found.get("decisions", ())) == 1:  # of LangChain's batched review
        return _decision(call, found["decisions"][0])
    if found.get("type") == "edit":
        edited: Mapping[str, Any] = found.get("edited_action") or {}
        if edited.get("name") != call.name:
            raise ValueError(f"edited_action must name the tool, which is {call.name!r}")
        try:
            call.tool.parse(edited.get("args"))
        except InvalidArguments as error:
            raise ValueError(str(error)) from error
    return cast("Any", answer)


# LangChain's tools as ours


def adopt(tool: BaseTool, **options: Any) -> AnyTool:
    """Return one of LangChain's tools as ours.

    What it reports as an error, in any of LangChain's ways, is a failed call. Arguments that only a
    graph can inject are not supported. The options are those of ``Tool.from_schema``.
    """
    if injected := _injected(tool):
        raise ToolDefinitionError(
            f"{tool.name}: only a graph can inject {', '.join(sorted(injected))}; give the tool to "
            "create_agent, where WinkMiddleware covers it"
        )

    def call(params: dict[str, Any], context: ToolContext) -> Any:
        # As a model's call: then errors that the tool handles itself come back as such.
        return {"type": "tool_call", "name": tool.name, "args": params, "id": context.call_id}

    def handle(params: dict[str, Any], *, context: ToolContext) -> AnyResult:
        try:
            return _result_of(tool, tool.invoke(call(params, context)))
        except ToolException as error:  # worded for the model
            raise ToolValidationError(str(error)) from error

    async def ahandle(params: dict[str, Any], *, context: ToolContext) -> AnyResult:
        try:
            return _result_of(tool, await tool.ainvoke(call(params, context)))
        except ToolException as error:
            raise ToolValidationError(str(error)) from error

    schema: Any = tool.tool_call_schema
    return adopted(
        options.pop("name", tool.name),
        options.pop("description", tool.description),
        cast("Any", schema if isinstance(schema, Mapping) else schema.model_json_schema()),
        ahandle if _is_async(tool) else handle,
        **options,
    )


def _injected(tool: BaseTool) -> set[str]:
    """Return the arguments of a tool that neither a model nor we can give."""
    shown: Any = tool.tool_call_schema
    if isinstance(shown, Mapping):
        return set()
    fields: dict[str, Any] = dict(cast("Any", tool.get_input_schema()).model_fields)
    ours = {InjectedToolCallId}
    return {
        name
        for name in fields.keys() - shown.model_fields.keys()
        if not any(each in ours or type(each) in ours for each in fields[name].metadata)
    }


def _is_async(tool: BaseTool) -> bool:
    if isinstance(tool, StructuredTool):
        return tool.coroutine is not None
    return type(tool)._arun is not BaseTool._arun  # pyright: ignore[reportPrivateUsage]


def _result_of(tool: BaseTool, given: Any) -> AnyResult:
    if not isinstance(given, ToolMessage):
        raise TypeError(
            f"{tool.name} returned a {type(given).__name__}, which only a graph can apply; give it "
            "to create_agent, where WinkMiddleware covers it"
        )
    text = str(given.text)
    return ToolResult.error(text) if given.status == "error" else ToolResult.ok(text)
