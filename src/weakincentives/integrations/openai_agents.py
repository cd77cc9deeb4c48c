"""openai-agents: our tools, shell and editor for its agents, and their own tools as our calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from typing import Any, Literal, TypeVar, Unpack, cast

from weakincentives.contrib.tools import SandboxSettings, file_tools
from weakincentives.contrib.tools.sandbox.settings import SandboxChoice
from weakincentives.errors import (
    AlreadyExists,
    ApprovalNeeded,
    MissingExtra,
    Suspended,
    ToolDefinitionError,
    ToolValidationError,
)
from weakincentives.filesystem import Filesystem
from weakincentives.integrations.bridge import (
    AnyResult,
    AnyTool,
    Bridge,
    BridgeOptions,
    Closes,
    OwnWork,
    Workspace,
    adopted,
    command_output,
    shell_tool,
)
from weakincentives.prompt.approval import Approval, ApprovalPolicy, ApprovalRequest, CallPreview
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.tool import Tool
from weakincentives.serde import dump
from weakincentives.session.events import ToolInvoked
from weakincentives.tool_result import ToolResult

try:
    import agents
    from agents.tool import (
        get_function_tool_origin,
        maybe_invoke_function_tool_failure_error_function,
        set_function_tool_failure_error_function,
    )
    from agents.tool_context import ToolContext as CallContext
except ImportError as error:
    raise MissingExtra("openai-agents", "openai-agents") from error

TContext = TypeVar("TContext")
Run = agents.RunContextWrapper[Any]

_MAX_DESCRIPTION = 1024
"""Characters that the provider takes."""
_REJECTED = "Tool execution was not approved."


class Wink(Closes):
    """Runs the tools of agents as transactions on a workspace.

    >>> with Wink(workspace=".") as wink:  # doctest: +SKIP
    ...     agent = wink.cover(Agent(name="Coder", tools=[*wink.tools(), wink.shell(), deploy]))
    ...     Runner.run_sync(agent, "Add a health check.")

    Several agents may share it. A call that fails, times out or is cancelled is rolled back; a call
    that a policy denies does not run; `wink log` shows them all. Close it, or use it in a ``with``
    block, to release the workspace.

    Args:
        workspace: The directory, or a function of the ``RunContextWrapper``.
        options: Those of ``Bridge``. ``ApprovalPolicy(tools={...})`` interrupts the run, as
            ``needs_approval`` does.
    """

    def __init__(self, workspace: Workspace | None = ".", **options: Unpack[BridgeOptions]) -> None:
        self.bridge = Bridge(workspace, **options)
        self._calls = _Calls(self.bridge)

    def tools(self) -> list[agents.Tool]:
        """Return our tools for an agent, and one that reads the rest of a long result."""
        return [self._offered(tool) for tool in self.bridge.tools]

    def _offered(self, tool: AnyTool) -> agents.FunctionTool:
        invoke = _Function(self._calls, "function_call", tool.name, tool)
        return agents.FunctionTool(
            name=tool.name,
            description=tool.text(_MAX_DESCRIPTION),
            params_json_schema=tool.parameters,
            on_invoke_tool=invoke,
            strict_json_schema=False,  # as declared; we check it, and tell the model all errors
            needs_approval=invoke.asking(),
        )

    def shell(self, sandbox: SandboxChoice | SandboxSettings = "auto") -> agents.ShellTool:
        """Return a shell on the workspace, in our sandbox.

        Each command is a call ``shell_execute``: the changes of a failed command are undone.
        """
        execute = _Shell(self._calls, "shell_call", "shell", shell_tool(sandbox))
        return agents.ShellTool(executor=execute, needs_approval=execute.asking())

    def editor(self) -> agents.ApplyPatchTool:
        """Return an editor on the workspace.

        Each operation is a call: ``write_file``, ``edit_file`` or ``delete_file``, so policies for
        those hold.
        """
        editor = _Editor(self._calls)
        return agents.ApplyPatchTool(editor=editor, needs_approval=editor.needs_approval)

    def cover(
        self, agent: agents.Agent[TContext], *, reads: Collection[str] = ()
    ) -> agents.Agent[TContext]:
        """Return a copy of an agent whose own tools run as our calls.

        What they change in the workspace is scanned for, and undone if they raise: also if the
        framework tells the model so itself. A person's denials are put on record. Tools that run
        at the provider, on MCP servers or as agents of their own stay as they are.

        Args:
            agent: It may have tools of ours; cover the agents that it hands over to as well.
            reads: The names of its tools that change nothing: they run concurrently, and nothing
                is scanned for.
        """
        tools = [_covered(self._calls, tool, tool.name in reads) for tool in agent.tools]
        return agent.clone(tools=tools, hooks=_Hooks(self._calls, agent.hooks))

    # Answers of a person: agents.RunState has no place for the name

    def requests(self, item: agents.ToolApprovalItem) -> tuple[ApprovalRequest, ...]:
        """Return what to show a person of an interruption: arguments, diff, reach.

        One for each command of a shell call; none for a call that was interrupted by another
        process, or by a ``needs_approval`` of yours.
        """
        asked = self._calls.asked.get(item.call_id or "")
        return () if asked is None else asked.requests

    def approve(
        self,
        state: agents.RunState[Any, Any],
        item: agents.ToolApprovalItem,
        *,
        by: str = "",
        always: bool = False,
    ) -> None:
        """Approve an interruption, with a name for the record."""
        self._calls.answered_by[item.call_id or ""] = by
        state.approve(item, always_approve=always)

    def reject(
        self,
        state: agents.RunState[Any, Any],
        item: agents.ToolApprovalItem,
        reason: str = "",
        *,
        by: str = "",
        always: bool = False,
    ) -> None:
        """Reject an interruption: with a reason for the model, and a name for the record."""
        self._calls.answered_by[item.call_id or ""] = by
        # The message tells calls that are denied from now on from those that ran before.
        state.reject(item, always_reject=always, rejection_message=reason or _REJECTED)

    def release(self) -> None:
        """Let others work on the directory until the next call, which continues a named run."""
        self.bridge.release()

    def close(self) -> None:
        """Release the workspace for good."""
        self.bridge.close()


def adopt(tool: agents.FunctionTool, *, context: object = None, **options: Any) -> AnyTool:
    """Return a ``FunctionTool`` as one of our tools.

    An exception of the function is a failure, also where the framework would tell the model.

    Args:
        tool: Without guardrails and ``needs_approval``, which only hold in the framework's loop.
        context: What the function finds in its ``RunContextWrapper``.
        options: Those of ``Tool.from_schema``.
    """
    if (
        tool.needs_approval is not False
        or tool.tool_input_guardrails
        or tool.tool_output_guardrails
    ):
        raise ToolDefinitionError(
            f"tool {tool.name!r}: needs_approval and guardrails only hold in the framework's loop; "
            "adopt it without them, and use policies such as ApprovalPolicy"
        )
    raising = _raising(tool)

    async def handler(params: dict[str, Any], *, context: ToolContext) -> AnyResult:
        text = json.dumps(params)
        call = CallContext[Any](
            run_context, tool_name=tool.name, tool_call_id=context.call_id, tool_arguments=text
        )
        return ToolResult.ok(str(await raising.on_invoke_tool(call, text)))

    run_context = context
    options.setdefault("timeout", tool.timeout_seconds)
    return adopted(tool.name, tool.description, tool.params_json_schema, handler, **options)


# Calls


@dataclass(frozen=True, slots=True)
class _Call:
    """One of our calls; a call of the framework may be several."""

    tool: AnyTool
    arguments: object
    of: str | None
    """The framework's id."""
    number: int = 1

    @property
    def id(self) -> str | None:
        return self.of if self.number == 1 else f"{self.of}:{self.number}"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call of the framework that a person is asked about."""

    name: str
    """The framework's name of the tool."""
    calls: Sequence[_Call]
    requests: tuple[ApprovalRequest, ...] = ()


class _Calls:
    """Runs the framework's calls as ours."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.answered_by: dict[str, str] = {}
        self.asked: dict[str, _Asked] = {}
        self.offered: dict[tuple[str, str], _Ours] = {}
        """By the type of its calls in a conversation, and its name there."""

    async def run(self, call: _Call, run: Run | None, name: str) -> AnyResult:
        """Run a call of the tool that the framework knows by a name."""
        self.asked.pop(call.of or "", None)
        by = self.answered_by.get(call.of or "", "")
        approval = Approval(True, by) if _is_approved(run, name, call.of or "") else None
        try:
            return await self.bridge.acall(
                call.tool, call.arguments, call_id=call.id, context=run, approval=approval
            )
        except ApprovalNeeded:
            # It is needed only since the framework has looked: from here it cannot be interrupted.
            return ToolResult.error(f"Call '{name}' again: by now, it needs approval")

    # Approval

    def may_ask(self, tool: AnyTool) -> bool:
        """Whether a policy leaves it to the framework to ask a person about a tool."""
        asking = (each for each in self.bridge.policies if isinstance(each, ApprovalPolicy))
        return any(each.ask is None and each.applies_to(tool) for each in asking)

    async def asks(self, name: str, calls: Sequence[_Call], run: Run, wanted: bool = False) -> bool:
        """Whether a person must be asked. A call that is refused finds its answer on record."""
        requests: list[ApprovalRequest] = []
        for call in calls:
            if self.may_ask(call.tool):
                admission = await self.bridge.aadmit(
                    call.tool, call.arguments, call_id=call.id, context=run
                )
                requests += () if admission.request is None else (admission.request,)
        if requests or wanted:
            self.asked[calls[0].of or ""] = _Asked(name, calls, tuple(requests))
        return bool(requests) or wanted

    async def note_denials(self, run: Run, items: Sequence[Mapping[str, Any]]) -> None:
        """Put on record what a person has denied: the framework answers such calls by itself."""
        outputs = {each["call_id"]: str(each.get("output")) for each in items if "call_id" in each}
        for item in items:
            call_id, name = item.get("call_id", ""), item.get("name", "")
            name = f"{item['namespace']}.{name}" if item.get("namespace") else name
            found = self.asked.get(call_id)  # a conversation that the provider keeps is not given
            was_asked = found is not None
            for (kind, offered), tool in self.offered.items():
                if kind == item.get("type") and name in ("", offered):
                    part = next(item[each] for each in _PARTS if item.get(each) is not None)
                    found = _Asked(offered, tool.calls(part, call_id))
            if found is None or run.is_tool_approved(found.name, call_id) is not False:
                continue
            reason = run.get_rejection_message(found.name, call_id) or ""
            # "Never again" denies calls of every id, also those that ran before it was said.
            was_told = bool(reason) and reason in outputs[call_id]
            if run.is_tool_approved(found.name, "") is False and not (was_asked or was_told):
                continue
            by = self.answered_by.get(call_id, "")
            for call in found.calls:
                await self.bridge.arefuse(
                    call.tool, call.arguments, reason, by=by, call_id=call.id, context=run
                )
            self.asked.pop(call_id, None)


def _is_approved(run: Run | None, name: str, call_id: str) -> bool:
    """Whether a person has approved a call in the framework."""
    if isinstance(run, CallContext) and run.agent is not None and run.tool_call is not None:
        # Of several agents with a tool of that name, one may be allowed to use it always.
        item = agents.ToolApprovalItem(agent=cast("Any", run.agent), raw_item=run.tool_call)
        with suppress(agents.ModelBehaviorError):  # it is not known by this name
            status = run.get_approval_status(
                item.tool_name or name,
                call_id,
                tool_namespace=item.tool_namespace,
                tool_lookup_key=item.tool_lookup_key,
                current_invocation=item,
            )
            return status is True
    return run is not None and run.is_tool_approved(name, call_id) is True


class _Hooks(agents.AgentHooks[Any]):
    """Looks for denials before each request to the model; otherwise the agent's own hooks."""

    def __init__(self, calls: _Calls, own: Any) -> None:
        self._calls, self._own = calls, own
        for name in ("start", "end", "handoff", "tool_start", "tool_end", "llm_end"):
            if own is not None:
                setattr(self, f"on_{name}", getattr(own, f"on_{name}"))

    async def on_llm_start(
        self, context: Run, agent: Any, system_prompt: str | None, input_items: list[Any]
    ) -> None:
        await self._calls.note_denials(context, input_items)
        if self._own is not None:
            await self._own.on_llm_start(context, agent, system_prompt, input_items)


# What our tools do


class _Ours:
    """What a tool of the framework does: its calls run as ours."""

    def __init__(self, calls: _Calls, kind: str, name: str, tool: AnyTool) -> None:
        self._calls, self._name, self._tool = calls, name, tool
        calls.offered[kind, name] = self

    def calls(self, part: Any, call_id: str | None) -> list[_Call]:
        """Return the calls that one of the framework's is, from its arguments."""
        return [_Call(self._tool, _given(part), call_id)]

    def asking(self, own: Any = False) -> Any:
        """Return the ``needs_approval`` of the tool: its own, and what our policies say."""
        if own is False and not self._calls.may_ask(self._tool):
            return False

        async def needs_approval(run: Run, given: Any, call_id: str) -> bool:
            wanted = own(run, given, call_id) if callable(own) else own
            wanted = await cast("Awaitable[object]", wanted) if isawaitable(wanted) else wanted
            return await self._calls.asks(
                self._name, self.calls(given, call_id), run, wanted=bool(wanted)
            )

        return needs_approval


class _Function(_Ours):
    """One of our tools."""

    def calls(self, part: Any, call_id: str | None) -> list[_Call]:
        arguments = _arguments(part) if isinstance(part, str) else part
        return [_Call(self._tool, arguments, call_id)]

    async def __call__(self, run: CallContext[Any], text: str) -> object:
        (call,) = self.calls(text, run.tool_call_id)
        return _shown(await self._calls.run(call, run, self._name), self._tool)


class _Shell(_Ours):
    """Our shell: each command is a call."""

    def calls(self, part: Any, call_id: str | None) -> list[_Call]:
        action = _given(part)
        limit = {"timeout": action["timeout_ms"] / 1000} if action.get("timeout_ms") else {}
        return [
            _Call(self._tool, {"command": command, **limit}, call_id, number)
            for number, command in enumerate(action["commands"], 1)
        ]

    async def __call__(self, request: agents.ShellCommandRequest) -> agents.ShellResult:
        action, outputs = request.data.action, list[agents.ShellCommandOutput]()
        calls = self.calls(action, request.data.call_id)
        for command, call in zip(action.commands, calls, strict=True):
            result = await self._calls.run(call, request.ctx_wrapper, self._name)
            outputs.append(_output(command, result))
        return agents.ShellResult(outputs, action.max_output_length)


class _Editor(_Ours):
    """Our editor: each operation is a call."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__(calls, "apply_patch_call", "apply_patch", _EDITS["update_file"])
        self._ids: dict[int, tuple[agents.ApplyPatchOperation, str]] = {}
        """The framework's ids of calls, by the identity of an operation, which is kept alive."""

    def calls(self, part: Any, call_id: str | None) -> list[_Call]:
        parts = cast("list[Any]", part if isinstance(part, list) else [part])
        operations = [_given(each) for each in parts]
        return [_Call(_EDITS[each.pop("type")], each, call_id) for each in operations]

    async def needs_approval(
        self, run: Run, operation: agents.ApplyPatchOperation, call_id: str
    ) -> bool:
        # The only place where the framework says which call an operation belongs to.
        if await self._calls.asks(self._name, self.calls(operation, call_id), run):
            return True
        self._ids[id(operation)] = operation, call_id
        return False

    async def create_file(self, operation: agents.ApplyPatchOperation) -> agents.ApplyPatchResult:
        run = operation.ctx_wrapper
        _, call_id = self._ids.pop(id(operation), (operation, None))
        (call,) = self.calls(operation, call_id)
        if call_id is None:
            call = replace(call, of=self._asked(call, run))
        return _edited(await self._calls.run(call, run, self._name))

    update_file = delete_file = create_file

    def _asked(self, call: _Call, run: Run | None) -> str | None:
        """Return the id under which a person was asked: a resumed run does not give it."""
        session = self._calls.bridge.registry(run).session
        given = dump(call.tool.parse(call.arguments))
        for record in session[ToolInvoked].newest_first():
            same = record.tool_name == call.tool.name and dump(record.params) == given
            if same and record.suspended:
                return record.call_id.partition(":")[2]
        return None


@dataclass(frozen=True, slots=True)
class _Patch:
    path: str
    diff: str
    """In the V4A format."""
    move_to: str = ""
    """The new path of the file."""


def _edit_tool(name: str, description: str, mode: Literal["create", "default"]) -> AnyTool:
    def content(params: _Patch, files: Filesystem) -> str:
        if mode == "create" and files.exists(params.path):
            raise AlreadyExists(f"{params.path} exists already: update it")
        before = "" if mode == "create" else files.read(params.path)
        try:
            return agents.apply_diff(before, params.diff, mode)
        except ValueError as error:
            said = f"The patch of {params.path} does not fit: {error}"
            raise ToolValidationError(said) from error

    def apply(params: _Patch, *, context: ToolContext) -> ToolResult[None]:
        context.filesystem.write(params.path, content(params, context.filesystem))
        done = f"{'Created' if mode == 'create' else 'Updated'} {params.path}"
        if params.move_to:
            context.filesystem.move(params.path, params.move_to)
            done += f" and moved it to {params.move_to}"
        return ToolResult.ok(None, done)

    def preview(params: _Patch, *, context: ToolContext) -> CallPreview:
        files = context.filesystem
        content(params, files)  # a person is not asked about a patch that does not fit
        before = files.read_bytes(params.path) if files.exists(params.path) else b""
        return CallPreview(
            diff=f"{params.diff}\n",
            in_diff=("diff",),
            paths=tuple(files.real_path(each) for each in (params.path, params.move_to) if each),
            state=hashlib.sha256(before).hexdigest(),
        )

    return Tool[_Patch, None](
        name=name, description=description, handler=apply, reach="reversible", preview=preview
    )


_EDITS: Mapping[str, AnyTool] = {
    "create_file": _edit_tool("write_file", "Create a file.", "create"),
    "update_file": _edit_tool("edit_file", "Change a file.", "default"),
    "delete_file": next(tool for tool in file_tools() if tool.name == "delete_file"),
}


def _edited(result: AnyResult) -> agents.ApplyPatchResult:
    status = "completed" if result.success else "failed"
    return agents.ApplyPatchResult(status=status, output=result.render())


# What the agent's own tools do


class _Own(_Ours):
    """One of the agent's own tools: a function, a shell, an editor."""

    def __init__(self, calls: _Calls, kind: str, own: Any, work: Any, reads: bool) -> None:
        # The framework checks the arguments: it knows more of them than the schema says.
        description = getattr(own, "description", "")
        reach = "read" if reads else calls.bridge.reaches.get(own.name)
        tool = calls.bridge.covering(own.name, description, reach=reach)
        super().__init__(calls, kind, getattr(own, "qualified_name", own.name), tool)
        self._own, self._work = own, work

    async def __call__(self, *given: Any) -> Any:
        run, call_id, part = _seen(*given)
        work = _Work(lambda _: self._work(*given))
        tool = self._tool.replace(handler=work.handler)
        result = await self._calls.run(_Call(tool, _given(part), call_id), run, self._name)
        if work.error is not None:
            return await _told(self._own, run, work.error)
        if work.has_value and (result.success or _is_failed(work.value)):
            return work.value
        return (
            _edited(result)
            if isinstance(part, agents.ApplyPatchOperation)
            else _shown(result, tool)
        )

    create_file = update_file = delete_file = __call__


class _Work(OwnWork):
    def failed(self, error: Exception) -> AnyResult:
        if isinstance(error, Suspended):
            raise error
        return ToolResult.error(f"{type(error).__name__}: {error}")

    def recorded(self, value: Any) -> AnyResult:
        if _is_failed(value):
            return ToolResult.error(value.output or "The operation failed")
        return ToolResult.ok(str(value))


def _is_failed(value: Any) -> bool:
    return isinstance(value, agents.ApplyPatchResult) and value.status == "failed"


_ITEMS: Mapping[type, tuple[str, str]] = {
    agents.FunctionTool: ("on_invoke_tool", "function_call"),
    agents.CustomTool: ("on_invoke_tool", "custom_tool_call"),
    agents.ShellTool: ("executor", "shell_call"),
    agents.LocalShellTool: ("executor", "local_shell_call"),
    agents.ApplyPatchTool: ("editor", "apply_patch_call"),
}
"""Where a tool has what it does, and the type of its calls in a conversation."""
_PARTS = ("arguments", "input", "action", "operation", "operations")
"""Where those have the arguments."""
_FIELDS = ("commands", "command", "timeout_ms", "type", "path", "diff", "move_to")
"""What goes on record of an action or an operation."""


def _covered(calls: _Calls, tool: agents.Tool, reads: bool) -> agents.Tool:
    """Return one of the agent's tools with its calls run as ours; others unchanged."""
    slot, item = next((each for t, each in _ITEMS.items() if isinstance(tool, t)), ("name", ""))
    made: Any = copy(tool)
    work = getattr(made, slot)
    if not item or work is None or isinstance(work, _Ours):
        return tool
    if isinstance(tool, agents.ApplyPatchTool):
        work = partial(_apply, tool.editor)
    if isinstance(tool, agents.FunctionTool):
        origin = get_function_tool_origin(tool)
        if origin is not None and origin.type is agents.ToolOriginType.AGENT_AS_TOOL:
            return tool  # what that agent calls are transactions of their own
        work, made.needs_approval = _raising(tool).on_invoke_tool, _careful(tool)
    own = _Own(calls, item, tool, work, reads)
    setattr(made, slot, own)
    if hasattr(made, "needs_approval"):
        made.needs_approval = own.asking(made.needs_approval)
    return made


def _apply(editor: agents.ApplyPatchEditor, operation: agents.ApplyPatchOperation) -> Any:
    return getattr(editor, operation.type)(operation)


def _seen(given: Any, *more: Any) -> tuple[Any, str | None, Any]:
    """Return the run, the id and the arguments of a call, from what a tool is called with."""
    if isinstance(given, CallContext):
        return cast("Run", given), given.tool_call_id, more[0]
    if isinstance(given, agents.ApplyPatchOperation):
        return given.ctx_wrapper, None, given
    return given.ctx_wrapper, given.data.call_id, given.data.action


def _given(part: object) -> dict[str, Any]:
    """Return the arguments of a call for the record."""
    found = _arguments(part) if isinstance(part, str) else part
    if isinstance(found, str):
        return {"input": part}
    if not isinstance(found, Mapping):
        found = {name: getattr(part, name, None) for name in _FIELDS}
    items = cast("Mapping[str, Any]", found).items()
    return {name: value for name, value in items if value is not None}


def _careful(tool: agents.FunctionTool) -> Any:
    """Return a tool's ``needs_approval``, as careful as the framework is with its own tools."""
    needs, prepare = tool.needs_approval, getattr(tool.on_invoke_tool, "prepare_arguments", None)
    if not callable(needs) or prepare is None:
        return needs

    async def needs_approval(run: Run, arguments: dict[str, Any], call_id: str) -> bool:
        prepared = prepare(json.dumps(arguments), tool.name)
        # What the function gets is not what the model gave: its policy cannot judge that.
        if prepared is not None and not prepared.unchanged:
            return True
        return bool(await needs(run, arguments, call_id))

    return needs_approval


def _raising(tool: agents.FunctionTool) -> agents.FunctionTool:
    """Return a tool whose function's exceptions are raised, not told to the model."""
    return set_function_tool_failure_error_function(copy(tool), None)


async def _told(tool: agents.Tool, run: Any, error: Exception) -> str:
    """Return what the framework tells the model of an exception; raise it where it would."""
    text: str | None = None
    if isinstance(tool, agents.FunctionTool) and hasattr(tool.on_invoke_tool, "prepare_arguments"):
        text = await maybe_invoke_function_tool_failure_error_function(
            function_tool=tool, context=run, error=error
        )
    if text is None:
        raise error
    span = agents.get_current_span()
    if span is not None:
        span.set_error(
            agents.SpanError(
                message="Error running tool (non-fatal)", data={"tool_name": tool.name}
            )
        )
    return text


# Values


def _arguments(text: str) -> object:
    """Return the arguments of a call; a text that is not JSON is refused like wrong arguments."""
    try:
        return json.loads(text) if text.strip() else {}
    except ValueError:
        return text


def _shown(result: AnyResult, tool: AnyTool) -> object:
    """Return a result for the model: text, and pictures and files if there are any."""
    text = result.render(tool.max_result_chars)
    shown: list[object] = []
    for each in result.media:
        if each.media_type.startswith("image/"):
            shown.append(agents.ToolOutputImage(image_url=each.data_url))
        elif each.media_type == "application/pdf":
            name = each.name or "file.pdf"
            shown.append(agents.ToolOutputFileContent(file_data=each.data_url, filename=name))
    return [agents.ToolOutputText(text=text), *shown] if shown else text


def _output(command: str, result: AnyResult) -> agents.ShellCommandOutput:
    """Return a command's output, with what became of its changes if it failed."""
    done, timed_out = command_output(result)
    if done is None:
        shown = result.render()
        out, err, code = (shown, "", 0) if result.success else ("", shown, 1)
    else:
        out, err, code = done.stdout, done.stderr, done.exit_code
    outcome = (
        agents.ShellCallOutcome("timeout") if timed_out else agents.ShellCallOutcome("exit", code)
    )
    return agents.ShellCommandOutput(out, err, outcome, command)
