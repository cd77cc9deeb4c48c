"""Google ADK: the tool calls of a runner as transactions on a workspace.

>>> plugin = WinkPlugin(workspace=".", policies=[...])  # doctest: +SKIP
>>> agent = LlmAgent(name="coder", model=..., tools=[*plugin.tools, deploy])  # doctest: +SKIP
>>> runner = InMemoryRunner(agent, plugins=[plugin])  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, cast

from weakincentives.contrib.tools import SandboxSettings, file_tools
from weakincentives.contrib.tools.sandbox.settings import SandboxChoice
from weakincentives.errors import (
    ApprovalNeeded,
    MissingExtra,
    Suspended,
    ToolDefinitionError,
    ToolValidationError,
)
from weakincentives.integrations.bridge import (
    MAX_SHOWN,
    AnyResult,
    AnyTool,
    Bridge,
    BridgeOptions,
    Workspace,
    adopted,
    command_output,
    own_tool,
    shell_tool,
)
from weakincentives.prompt import context as ours
from weakincentives.prompt.approval import Approval
from weakincentives.tool_result import ToolError, ToolResult, render_value

try:
    from google.adk.agents import LlmAgent
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.environment import BaseEnvironment, ExecutionResult
    from google.adk.plugins import BasePlugin
    from google.adk.sessions import InMemorySessionService, Session
    from google.adk.tools import AgentTool, BaseTool, FunctionTool, ToolContext
    from google.adk.workflow import BaseNode, FunctionNode
    from google.adk.workflow._errors import NodeInterruptedError  # not exported
    from google.genai import types
except ImportError as error:
    raise MissingExtra("google-adk", "google-adk") from error

Suspended.register(NodeInterruptedError)

Response = dict[str, Any]

_WAITING = "This tool call requires confirmation, please approve or reject."
_DECISIONS = ("transfer_to_agent", "transfer_reason", "escalate", "route", "skip_summarization")
"""The actions by which a tool directs ADK."""


@dataclass(frozen=True, slots=True)
class AdkResponse:
    """What one of ADK's tools returned, and what it asked ADK to do: for a call made again."""

    value: Any
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    decisions: dict[str, Any] = field(default_factory=dict[str, Any])

    def render(self) -> str:
        return render_value(self.value)


class _Waits(Suspended):
    """One of ADK's tools asks for a confirmation or for credentials, and will be called again."""

    def __init__(self, value: object) -> None:
        super().__init__("it waits for an answer")
        self.value = value


@dataclass(slots=True)
class _Call:
    """ADK's side of a call that runs as ours."""

    context: ToolContext
    tool: BaseTool | None = None
    """The tool that ADK calls, where it is not one of ours."""
    call_id: str = ""
    """Our id of it, when it runs."""
    undo: _StateUndo | None = None
    error: Exception | None = None


_call: ContextVar[_Call | None] = ContextVar("wink_adk_call", default=None)


@dataclass(frozen=True, slots=True)
class _Caller:
    """A call that makes others: of an agent, or of a tool that runs one."""

    context: ToolContext
    """Of the outermost one: all calls belong to its run."""
    path: str
    """The ids of ADK from there, each of which is unique in its own session only."""


_caller: ContextVar[_Caller | None] = ContextVar("wink_adk_caller", default=None)


def _as_caller(context: ToolContext) -> _Caller:
    outer, call_id = _caller.get(), _call_id(context)
    if outer is None:
        return _Caller(context, call_id)
    return _Caller(outer.context, f"{outer.path}/{call_id}")


def _call_id(context: ToolContext) -> str:
    """Return an id that is unique in a session.

    Some models restart their ids with every response, and several agents may run at a time.
    """
    call_id, agent = context.function_call_id or "", context.agent_name
    if call_id.startswith("adk-"):  # made by ADK, where the model gives none
        return call_id
    events = (event for event in context.session.events if event.author == agent)
    uses = sum(call.id == call_id for event in events for call in event.get_function_calls())
    return f"{agent}:{call_id}#{uses}" if uses > 1 else f"{agent}:{call_id}"


# ADK's tools as ours


def adopt(tool: BaseTool | Callable[..., Any], **options: Any) -> AnyTool:
    """Return one of ADK's tools, or a function, as one of ours.

    A dict with an ``error``, or with the status ``error``, is a failure. Changes to ADK's session
    state are undone with the call; those to files are found by a scan, unless its ``reach`` is
    ``read``. A tool that asks for a confirmation or for credentials suspends the call.
    """
    theirs = tool if isinstance(tool, BaseTool) else FunctionTool(tool)

    async def run(params: dict[str, Any], *, context: ours.ToolContext) -> AnyResult:
        call = _call.get() or _Call(_new_context(context.call_id))
        if call.call_id not in ("", context.call_id):
            call = _Call(call.context)  # called by another tool
        if call.undo is not None:
            call.undo()  # it is run again
        call.call_id, call.undo = context.call_id, _StateUndo(call.context)
        called, undo = call.tool or theirs, call.undo
        try:
            value = await called.run_async(args=dict(params), tool_context=call.context)
        except BaseException as error:
            undo()
            call.error = error if isinstance(error, Exception) else None
            raise
        actions, call_id = call.context.actions, call.context.function_call_id
        if call_id in {*actions.requested_tool_confirmations, *actions.requested_auth_configs}:
            undo.state()
            raise _Waits(value)
        problem = _problem_in(value)
        if problem:
            undo()
            answer = AdkResponse(value)
            return ToolResult(
                "", answer, success=False, failure=ToolError("EXECUTION_FAILED", problem)
            )
        decisions = {name: getattr(actions, name) for name in _DECISIONS}
        decisions = {name: each for name, each in decisions.items() if each is not None}
        return ToolResult.ok(AdkResponse(value, dict(actions.state_delta), decisions))

    try:
        return adopted(theirs.name, theirs.description, _schema(theirs), run, **options)
    except ToolDefinitionError:  # ADK takes schemas that are none
        return adopted(theirs.name, theirs.description, {"type": "object"}, run, **options)


def _declaration(tool: BaseTool) -> types.FunctionDeclaration | None:
    # ADK has no public way to ask a tool for its schema.
    return tool._get_declaration()  # pyright: ignore[reportPrivateUsage]


def _schema(tool: BaseTool) -> dict[str, Any]:
    found = _declaration(tool)
    if found is not None and found.parameters_json_schema is not None:
        return cast("dict[str, Any]", found.parameters_json_schema)
    if found is not None and found.parameters is not None:
        schema = found.parameters.json_schema
        return schema.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"type": "object"}


def _new_context(call_id: str) -> ToolContext:
    """Return a context for a tool that runs outside of ADK."""
    session = Session(id="wink", app_name="wink", user_id="wink")
    invocation = InvocationContext(
        session_service=InMemorySessionService(), invocation_id=call_id, session=session
    )
    return ToolContext(invocation, function_call_id=call_id)


def _problem_in(value: object) -> str:
    """Return the error that a tool reports by its value, as ADK's tools do."""
    if not isinstance(value, Mapping):
        return ""
    reported = cast("Mapping[str, Any]", value)
    if reported.get("error") or reported.get("status") == "error" or reported.get("isError"):
        return render_value(reported)
    return ""


class _StateUndo:
    """Undoes what a call changes in the session state of ADK, and what it asks ADK to do."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        self._before = dict(context.session.state)
        self._copies = dict(self._before)
        with suppress(Exception):  # what cannot be copied is only put back
            self._copies = copy.deepcopy(self._before)

    def __call__(self) -> None:
        self.state()
        for name in _DECISIONS:
            setattr(self._context.actions, name, None)

    def state(self) -> None:
        context = self._context
        delta = context.actions.state_delta
        for key in [*delta]:
            if key not in self._before:
                context.session.state.pop(key, None)
                continue
            value, copied = self._before[key], self._copies[key]
            # In place: the changes of other calls of the turn may hold the same list.
            if isinstance(value, list):
                value[:] = copied
            elif isinstance(value, dict):
                value.clear()
                value |= copied
            context.state[key] = value  # so that ADK does not look for changes inside of it
        delta.clear()


# One call, with a person's answer


async def _answered(
    bridge: Bridge,
    tool: AnyTool,
    args: dict[str, Any],
    context: ToolContext,
    *,
    asks: bool = False,
    once: bool = True,
) -> AnyResult | None:
    """Run a call, or return None when a person has to be asked first.

    Args:
        asks: Whether the tool itself must be confirmed.
        once: Whether a recorded answer will do.
    """
    caller = _as_caller(context)
    call: dict[str, Any] = {"call_id": caller.path if once else None, "context": caller.context}
    said, approval = context.tool_confirmation, None
    outer = _caller.set(caller)
    try:
        if said is not None:
            payload: Any = said.payload
            terms = cast("dict[str, Any]", payload if isinstance(payload, dict) else {})
            by, reason = str(terms.get("by") or context.user_id), str(terms.get("reason") or "")
            if asks and not said.confirmed:
                return await bridge.arefuse(tool, args, reason, by=by, **call)
            # A tool that has asked by itself reads the answer itself.
            asked = [each for i, each in bridge.asked(caller.context) if i == caller.path]
            if asks or asked[-1:] == [None]:
                approval = Approval(said.confirmed, by, reason, terms.get("arguments"))
        elif asks:
            admission = await bridge.aadmit(tool, args, **call)
            if admission.state == "ready":
                context.request_confirmation(hint=f"Approve the call of {tool.name}?")
                return None
            if admission.request is not None:
                raise ApprovalNeeded(admission.request)
            return admission.result
        return await bridge.acall(tool, args, approval=approval, **call)
    except ApprovalNeeded as needed:
        if said is not None:
            reason = "another approval is needed, and ADK asks about a call only once"
            return await bridge.arefuse(tool, args, reason, **call)
        context.request_confirmation(hint=needed.request.describe(MAX_SHOWN))
        return None
    finally:
        _caller.reset(outer)


def _waiting(context: ToolContext) -> Response:
    # As ADK does: without a summary, or the model would make the call again.
    context.actions.skip_summarization = True
    return {"error": _WAITING}


def _shown(result: AnyResult, tool: AnyTool) -> Response:
    """Return a result as the model sees it."""
    text = result.render(tool.max_result_chars)
    if not result.success:
        return {"error": text}
    media = [
        types.Part.from_bytes(data=each.data, mime_type=each.media_type) for each in result.media
    ]
    return {"result": text, **({"media": media} if media else {})}


class WinkTool(BaseTool):
    """One of our tools, for an agent of ADK."""

    def __init__(self, tool: AnyTool, bridge: Bridge) -> None:
        super().__init__(name=tool.name, description=tool.text())
        self.tool = tool
        self._bridge = bridge

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(
            name=self.name,
            description=self.description,
            parameters_json_schema=self.tool.parameters,
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: ToolContext) -> Any:
        outer = _call.set(_Call(tool_context))
        try:
            result = await _answered(self._bridge, self.tool, args, tool_context)
        except _Waits as waits:
            return waits.value
        finally:
            _call.reset(outer)
        return _waiting(tool_context) if result is None else _shown(result, self.tool)


class WinkPlugin(BasePlugin):
    """Makes each tool call of a runner a transaction: validated, checked, committed or undone.

    Give it to the runner, after your other plug-ins, and ``plugin.tools`` to the agent. Calls of
    the agent's other tools are covered, too. The calls of one session of ADK are one run: a call
    that ADK makes again, after a crash or a confirmation, has its recorded answer. An
    ``ApprovalPolicy`` without ``ask`` uses ADK's tool confirmation; the payload of the answer may
    have a ``reason``, the name of the person (``by``), and other ``arguments``.

    Args:
        workspace: The directory, or a function of ADK's ``ToolContext``.
        options: Those of ``Bridge``. By default, each session of ADK has a run.
    """

    def __init__(
        self,
        workspace: Workspace | None = ".",
        *,
        name: str = "wink",
        **options: Unpack[BridgeOptions],
    ) -> None:
        super().__init__(name)
        options["run"] = options.get("run") or _session_name
        self.bridge = Bridge(workspace, **options)
        self.tools = [WinkTool(tool, self.bridge) for tool in self.bridge.tools]
        self._adopted: dict[str, tuple[types.FunctionDeclaration | None, AnyTool]] = {}

    async def before_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext
    ) -> Response | None:
        """Run the tool as our call; ADK takes the returned value for the tool's.

        What ADK would have done between this callback and the tool is done here.
        """
        if type(tool) is BaseTool or isinstance(tool, WinkTool):
            return None  # unknown, which ADK tells the model; or a call of ours already
        invocation = tool_context.get_invocation_context()
        if _streams(tool, invocation):
            return None
        agent = invocation.agent
        callbacks = agent.canonical_before_tool_callbacks if isinstance(agent, LlmAgent) else ()
        given = {"tool": tool, "args": tool_args, "tool_context": tool_context}
        answer = await _first_answer(callbacks, given)
        if answer is not None:
            return answer
        if _is_agent(tool):
            return await self._begun(tool, tool_args, tool_context)
        if isinstance(getattr(tool, "_environment", None), WinkEnvironment):
            _call.set(_Call(tool_context))
            return None
        return await self._run(tool, tool_args, tool_context, given)

    async def _run(
        self, tool: BaseTool, args: dict[str, Any], context: ToolContext, given: dict[str, Any]
    ) -> Any:
        adopted = self._ours(tool)
        call = _Call(context, tool)
        outer = _call.set(call)
        try:
            asks = await tool.check_require_confirmation(args, context) is True
            result = await _answered(self.bridge, adopted, args, context, asks=asks)
        except _Waits as waits:
            return waits.value
        except asyncio.CancelledError as cancelled:
            await self._handled(cancelled, given)
            raise
        finally:
            _call.reset(outer)
        if result is None:
            return _waiting(context)
        response = result.value
        if isinstance(response, AdkResponse):
            if not call.call_id:  # it did not run: its answer was on record
                _repeat(response, context)
            if response.value is None:  # nothing yet, of a tool that runs for long
                return {} if tool.is_long_running else {"result": None}
            return response.value
        if call.error is not None and not result.success:
            handled = await self._handled(call.error, given)
            if handled is not None:
                return handled
        return _shown(result, adopted)

    async def _begun(
        self, tool: BaseTool, args: dict[str, Any], context: ToolContext
    ) -> Response | None:
        """Let ADK run an agent if it may: that is no transaction, but each of its calls is."""
        adopted = self._ours(tool)
        result = await _answered(self.bridge, adopted, args, context)
        if result is None:
            return _waiting(context)
        if not result.success:
            return _shown(result, adopted)
        _caller.set(_as_caller(context))
        return None

    def _ours(self, tool: BaseTool) -> AnyTool:
        # ADK makes a new tool of a plain function for every invocation; the schema stays.
        declared = _declaration(tool)
        known, found = self._adopted.get(tool.name, (None, None))
        if found is None or known != declared:
            if _is_agent(tool):
                found = adopt(tool, writes="api").replace(handler=_agent_begins)
            else:
                found = adopt(tool, reach=self.bridge.reaches.get(tool.name))
            self._adopted[tool.name] = declared, found
        return found

    async def _handled(self, error: BaseException, given: dict[str, Any]) -> Any:
        """Tell the callbacks for errors, as ADK does; return the answer of one."""
        context: ToolContext = given["tool_context"]
        invocation = context.get_invocation_context()
        answer = await invocation.plugin_manager.run_on_tool_error_callback(
            tool=given["tool"],
            tool_args=given["args"],
            tool_context=context,
            error=cast("Exception", error),
        )
        if answer is not None or not isinstance(invocation.agent, LlmAgent):
            return answer
        callbacks = invocation.agent.canonical_on_tool_error_callbacks
        return await _first_answer(callbacks, {**given, "error": error})

    async def after_run_callback(self, *, invocation_context: InvocationContext) -> None:
        """Release the workspace: between runs, others can work on it, `wink undo` for example."""
        with self.bridge.held(ToolContext(invocation_context)):
            pass

    async def on_run_error_callback(
        self, *, invocation_context: InvocationContext, error: Exception
    ) -> None:
        """Release the workspace."""
        await self.after_run_callback(invocation_context=invocation_context)

    async def close(self) -> None:
        """Release the workspace once no call is under way; a call of another runner opens it."""
        self.bridge.release()


def _session_name(context: ToolContext | None) -> str | None:
    if context is None:
        return None
    session = context.session
    return f"adk:{session.app_name}/{session.user_id}/{session.id}"


def _streams(tool: BaseTool, invocation: InvocationContext) -> bool:
    """Whether ADK runs a tool in the background of a live session, or stops one there."""
    if invocation.live_request_queue is None:
        return False
    function = getattr(tool, "func", None)
    return tool.name == "stop_streaming" or inspect.isasyncgenfunction(function)


def _is_agent(tool: BaseTool) -> bool:
    """Whether a tool is an agent or a workflow, which calls tools in turn."""
    node = getattr(tool, "node", None)
    return isinstance(tool, AgentTool) or (
        isinstance(node, BaseNode) and not isinstance(node, FunctionNode)
    )


def _agent_begins(params: dict[str, Any], *, context: ours.ToolContext) -> AnyResult:
    return ToolResult.ok(message="The agent begins.")


async def _first_answer(callbacks: Iterable[Callable[..., Any]], given: dict[str, Any]) -> Any:
    """Return the first answer of an agent's callbacks, which take arguments by name or place."""
    for callback in callbacks:
        try:
            inspect.signature(callback).bind(**given)
        except TypeError:
            answer = callback(*given.values())
        else:
            answer = callback(**given)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is not None:
            return answer
    return None


def _repeat(response: AdkResponse, context: ToolContext) -> None:
    """Ask ADK again for what a recorded call asked for."""
    context.state.update(response.state)
    for name, value in response.decisions.items():
        setattr(context.actions, name, value)


# Its environment


class WinkEnvironment(BaseEnvironment):
    """The workspace of a plug-in as an environment of ADK: ``EnvironmentToolset`` works on it.

    Each command and each file that is read or written is a call of ours, under the policies of the
    plug-in: ``shell_execute``, ``read_file``, ``write_file``. Commands run in our sandbox; the
    changes of a failed command are undone.
    """

    def __init__(
        self, plugin: WinkPlugin, *, sandbox: SandboxChoice | SandboxSettings = "auto"
    ) -> None:
        self._bridge = plugin.bridge
        self._shell = shell_tool(sandbox)

    @property
    def working_dir(self) -> Path:
        """The directory of the workspace."""
        call = _call.get()
        return self._bridge.directory(call and call.context)

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        """Run a command; its changes are committed if it exits with 0."""
        result = await self._made(self._shell, {"command": command, "timeout": timeout})
        done, timed_out = command_output(result)
        if done is None:  # refused
            raise ToolValidationError(result.render())
        return ExecutionResult(done.exit_code, done.stdout, done.stderr, timed_out)

    async def read_file(self, path: Path) -> bytes:
        """Return what a file contains."""
        found: list[bytes] = []

        def read(params: dict[str, Any], *, context: ours.ToolContext) -> AnyResult:
            found.append(context.filesystem.read_bytes(params["path"]))
            return ToolResult.ok(message=f"{len(found[-1])} bytes")

        tool = own_tool("read_file", "Read a file.", read, reach="read")
        # A recorded answer would be of no use: it has not the content.
        result = await self._made(tool, {"path": self._inside(path)}, once=False)
        if not result.success:
            raise FileNotFoundError(result.render())
        return found[-1]

    async def write_file(self, path: Path, content: str | bytes) -> None:
        """Write a file, and the directories above it."""
        tool, arguments = _WRITE_TEXT, {"path": self._inside(path), "overwrite": True}
        try:
            arguments["content"] = content if isinstance(content, str) else content.decode()
        except UnicodeDecodeError:
            encoded = b64encode(cast("bytes", content)).decode()
            tool, arguments = _WRITE_BYTES, {"path": arguments["path"], "base64": encoded}
        result = await self._made(tool, arguments)
        if not result.success:
            raise ToolValidationError(result.render())

    def _inside(self, path: Path) -> str:
        path, here = Path(path), self.working_dir
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    async def _made(
        self, tool: AnyTool, arguments: dict[str, Any], *, once: bool = True
    ) -> AnyResult:
        call = _call.get()
        if call is None:  # not from a tool of an agent
            return await self._bridge.acall(tool, arguments)
        result = await _answered(self._bridge, tool, arguments, call.context, once=once)
        if result is None:
            raise ToolValidationError(_waiting(call.context)["error"])
        return result


def _write_bytes(params: dict[str, Any], *, context: ours.ToolContext) -> AnyResult:
    data = b64decode(params["base64"])
    context.filesystem.write_bytes(params["path"], data)
    return ToolResult.ok(message=f"{len(data)} bytes")


_WRITE_TEXT = next(tool for tool in file_tools() if tool.name == "write_file")
_WRITE_BYTES = own_tool("write_file", "Write a file.", _write_bytes, reach="reversible")
