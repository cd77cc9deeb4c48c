"""openai-agents: our tools, shell and editor for its agents, and their own tools as our calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

from weakincentives.contrib.tools import (
    CommandOutput,
    PodmanSandboxConfig,
    PodmanSandboxSection,
    SandboxSettings,
    file_tools,
)
from weakincentives.contrib.tools.sandbox.settings import SandboxChoice
from weakincentives.errors import (
    AlreadyExists,
    ApprovalNeeded,
    MissingExtra,
    Suspended,
    ToolDefinitionError,
    ToolValidationError,
)
from weakincentives.events import ToolInvoked
from weakincentives.filesystem import Filesystem
from weakincentives.integrations.bridge import (
    AnyResult,
    AnyTool,
    Bridge,
    RunName,
    Workspace,
    own_tool,
    wire_name,
)
from weakincentives.prompt.approval import Approval, ApprovalPolicy, ApprovalRequest, CallPreview
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.policies import AnyPolicy
from weakincentives.prompt.tool import Tool
from weakincentives.retry import TIMEOUT
from weakincentives.serde import dump
from weakincentives.tool_result import ToolResult

try:
    from agents import (
        Agent,
        AgentHooks,
        ApplyPatchEditor,
        ApplyPatchOperation,
        ApplyPatchResult,
        ApplyPatchTool,
        CustomTool,
        FunctionTool,
        LocalShellTool,
        ModelBehaviorError,
        RunContextWrapper,
        RunState,
        ShellActionRequest,
        ShellCallOutcome,
        ShellCommandOutput,
        ShellCommandRequest,
        ShellResult,
        ShellTool,
        SpanError,
        ToolApprovalItem,
        ToolOriginType,
        ToolOutputFileContent,
        ToolOutputImage,
        ToolOutputText,
        apply_diff,
        get_current_span,
    )
    from agents import Tool as AgentTool
    from agents.tool import (
        get_function_tool_origin,
        maybe_invoke_function_tool_failure_error_function,
        set_function_tool_failure_error_function,
    )
    from agents.tool_context import ToolContext as CallContext
except ImportError as error:
    raise MissingExtra("openai-agents", "openai-agents") from error

TContext = TypeVar("TContext")
Run = RunContextWrapper[Any]

_MAX_DESCRIPTION = 1024
"""Characters that the provider takes."""
_REJECTED = "Tool execution was not approved."


class Wink:
    """Runs the tools of agents as transactions on a workspace.

    >>> with Wink(workspace=".") as wink:  # doctest: +SKIP
    ...     agent = wink.cover(Agent(name="Coder", tools=[*wink.tools(), wink.shell(), deploy]))
    ...     Runner.run_sync(agent, "Add a health check.")

    Several agents may share it. A call that fails, times out or is cancelled is rolled back; a call
    that a policy denies does not run; `wink log` shows them all. Close it, or use it in a ``with``
    block, to release the workspace.

    Args:
        workspace: The directory, or a function of the ``RunContextWrapper``.
        tools: What ``tools()`` offers, ours or ``FunctionTool``; by default our file tools.
        policies: They govern every call. ``ApprovalPolicy(tools={...})`` interrupts the run, as
            ``needs_approval`` does.
        title: What `wink log` shows for the run.
        run: Names the run, so that another process continues it; may be a function of the
            ``RunContextWrapper``.
    """

    def __init__(
        self,
        workspace: Workspace = ".",
        *,
        tools: Iterable[object] | None = None,
        policies: Iterable[AnyPolicy] = (),
        title: str = "",
        run: RunName = None,
    ) -> None:
        self.bridge = Bridge(workspace, tools=tools, policies=policies, title=title, run=run)
        self._calls = _Calls(self.bridge)

    def tools(self) -> list[AgentTool]:
        """Return our tools for an agent, and one that reads the rest of a long result."""
        return [self._offered(tool) for tool in self.bridge.tools]

    def _offered(self, tool: AnyTool) -> FunctionTool:
        invoke = _Function(self._calls, tool)
        return FunctionTool(
            name=tool.name,
            description=tool.text(_MAX_DESCRIPTION),
            params_json_schema=tool.parameters,
            on_invoke_tool=invoke,
            strict_json_schema=False,  # as declared; we check it, and tell the model all errors
            needs_approval=self._calls.needs_approval(False, tool.name, tool, invoke.calls),
        )

    def shell(self, sandbox: SandboxChoice | SandboxSettings = "auto") -> ShellTool:
        """Return a shell on the workspace, in our sandbox.

        Each command is a call ``shell_execute``: the changes of one that fails are undone.
        """
        # Only the tool is used: its files are those of the call.
        section = PodmanSandboxSection(config=PodmanSandboxConfig(workspace=".", sandbox=sandbox))
        tool = next(each for each in section.tools if each.name == "shell_execute")
        execute = _Shell(self._calls, tool)
        needs_approval = self._calls.needs_approval(False, "shell", tool, execute.calls)
        return ShellTool(executor=execute, needs_approval=needs_approval)

    def editor(self) -> ApplyPatchTool:
        """Return an editor on the workspace.

        Each operation is a call: ``write_file``, ``edit_file`` or ``delete_file``, so policies for
        those hold.
        """
        editor = _Editor(self._calls)
        return ApplyPatchTool(editor=editor, needs_approval=editor.needs_approval)

    def cover(self, agent: Agent[TContext], *, reads: Collection[str] = ()) -> Agent[TContext]:
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

    # Answers of a person: RunState has no place for the name

    def requests(self, item: ToolApprovalItem) -> tuple[ApprovalRequest, ...]:
        """Return what to show a person of an interruption: arguments, diff, reach.

        One for each command of a shell call; none for a call that was interrupted by another
        process, or by a ``needs_approval`` of yours.
        """
        asked = self._calls.asked.get(item.call_id or "")
        return () if asked is None else asked.requests

    def approve(
        self,
        state: RunState[Any, Any],
        item: ToolApprovalItem,
        *,
        by: str = "",
        always: bool = False,
    ) -> None:
        """Approve an interruption, with a name for the record."""
        self._calls.answered_by[item.call_id or ""] = by
        state.approve(item, always_approve=always)

    def reject(
        self,
        state: RunState[Any, Any],
        item: ToolApprovalItem,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def adopt(tool: FunctionTool, *, context: object = None, **options: Any) -> AnyTool:
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
        return ToolResult.ok(_text(await raising.on_invoke_tool(call, text)))

    run_context = context
    options = {"writes": "external", "timeout": tool.timeout_seconds, **options}
    name, text = wire_name(tool.name), tool.description or tool.name
    return Tool.from_schema(name, text, tool.params_json_schema, handler, **options)


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


@dataclass(slots=True)
class _Done:
    """How a call of one of the agent's own tools ended."""

    value: Any = None
    error: Exception | None = None
    result: AnyResult | None = None
    """Set if the model gets this instead: the tool did not run, or was undone afterwards."""


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
        self.offered: dict[tuple[str, str], Callable[[Mapping[str, Any]], Sequence[_Call]]] = {}
        """How an item of the conversation becomes calls: by its type and the tool's name."""

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

    async def run_own(
        self, call: _Call, run: Run | None, name: str, work: Callable[[], Any]
    ) -> _Done:
        """Run the framework's own work as a call. What it returns or raises stays as it is."""
        done, finished, undone = _Done(), False, False

        async def handler(params: object, *, context: ToolContext) -> AnyResult:
            nonlocal finished, undone
            try:
                value = work()
                done.value = await value if isawaitable(value) else value
            except Exception as error:
                if isinstance(error, Suspended):
                    raise
                done.error = error
                return ToolResult.error(f"{type(error).__name__}: {error}")
            finished = True
            if isinstance(done.value, ApplyPatchResult) and done.value.status == "failed":
                undone = True
                return ToolResult.error(done.value.output or "The operation failed")
            return ToolResult.ok(_text(done.value))

        result = await self.run(replace(call, tool=call.tool.replace(handler=handler)), run, name)
        if done.error is None and not (undone or (finished and result.success)):
            done.result = result
        return done

    # Approval

    def needs_approval(
        self, own: Any, name: str, tool: AnyTool, calls_of: Callable[[Any, str], Sequence[_Call]]
    ) -> Any:
        """Return the ``needs_approval`` of a tool: its own, and what our policies say."""
        if own is False and not self._may_ask(tool):
            return False

        async def needs_approval(run: Run, given: Any, call_id: str) -> bool:
            wanted = own(run, given, call_id) if callable(own) else own
            wanted = await cast("Awaitable[object]", wanted) if isawaitable(wanted) else wanted
            return await self.asks(name, calls_of(given, call_id), run, bool(wanted))

        return needs_approval

    def _may_ask(self, tool: AnyTool) -> bool:
        """Whether a policy leaves it to the framework to ask a person about a tool."""
        asking = (each for each in self.bridge.policies if isinstance(each, ApprovalPolicy))
        return any(each.ask is None and each.applies_to(tool) for each in asking)

    async def asks(self, name: str, calls: Sequence[_Call], run: Run, wanted: bool = False) -> bool:
        """Whether a person must be asked. A call that is refused finds its answer on record."""
        requests: list[ApprovalRequest] = []
        for call in calls:
            if self._may_ask(call.tool):
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
            for (kind, offered), calls_of in self.offered.items():
                if kind == item.get("type") and name in ("", offered):
                    found = _Asked(offered, calls_of(item))
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
        item = ToolApprovalItem(agent=cast("Any", run.agent), raw_item=run.tool_call)
        with suppress(ModelBehaviorError):  # it is not known by this name
            status = run.get_approval_status(
                item.tool_name or name,
                call_id,
                tool_namespace=item.tool_namespace,
                tool_lookup_key=item.tool_lookup_key,
                current_invocation=item,
            )
            return status is True
    return run is not None and run.is_tool_approved(name, call_id) is True


class _Hooks(AgentHooks[Any]):
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
    """Marks what runs as our calls."""


class _Function(_Ours):
    """One of our tools."""

    def __init__(self, calls: _Calls, tool: AnyTool) -> None:
        self._calls, self._tool = calls, tool
        calls.offered["function_call", tool.name] = lambda item: self.calls(
            _arguments(item["arguments"]), item["call_id"]
        )

    def calls(self, arguments: object, call_id: str) -> list[_Call]:
        return [_Call(self._tool, arguments, call_id)]

    async def __call__(self, run: CallContext[Any], text: str) -> object:
        call = _Call(self._tool, _arguments(text), run.tool_call_id)
        return _shown(await self._calls.run(call, run, self._tool.name), self._tool)


class _Shell(_Ours):
    """Our shell: each command is a call."""

    def __init__(self, calls: _Calls, tool: AnyTool) -> None:
        self._calls, self._tool = calls, tool
        calls.offered["shell_call", "shell"] = lambda item: self.calls(
            ShellActionRequest(item["action"]["commands"], item["action"].get("timeout_ms")),
            item["call_id"],
        )

    def calls(self, action: ShellActionRequest, call_id: str) -> list[_Call]:
        limit = {"timeout": action.timeout_ms / 1000} if action.timeout_ms else {}
        return [
            _Call(self._tool, {"command": command, **limit}, call_id, number)
            for number, command in enumerate(action.commands, 1)
        ]

    async def __call__(self, request: ShellCommandRequest) -> ShellResult:
        action, outputs = request.data.action, list[ShellCommandOutput]()
        calls = self.calls(action, request.data.call_id)
        for command, call in zip(action.commands, calls, strict=True):
            result = await self._calls.run(call, request.ctx_wrapper, "shell")
            outputs.append(_output(command, result))
        return ShellResult(outputs, action.max_output_length)


class _Editor(_Ours):
    """Our editor: each operation is a call."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._ids: dict[int, tuple[ApplyPatchOperation, str]] = {}
        """The framework's ids of calls, by the identity of an operation, which is kept alive."""
        calls.offered["apply_patch_call", "apply_patch"] = lambda item: [
            _edit(operation, item["call_id"])
            for operation in item.get("operations") or [item["operation"]]
        ]

    async def needs_approval(self, run: Run, operation: ApplyPatchOperation, call_id: str) -> bool:
        # The only place where the framework says which call an operation belongs to.
        if await self._calls.asks("apply_patch", [_edit(operation, call_id)], run):
            return True
        self._ids[id(operation)] = operation, call_id
        return False

    async def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        run = operation.ctx_wrapper
        _, call_id = self._ids.pop(id(operation), (operation, None))
        call = _edit(operation, call_id)
        if call_id is None:
            call = replace(call, of=self._asked(call, run))
        return _edited(await self._calls.run(call, run, "apply_patch"))

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


def _edit_tool(
    name: str, description: str, done: str, content: Callable[[_Patch, Filesystem], str]
) -> AnyTool:
    def apply(params: _Patch, *, context: ToolContext) -> ToolResult[None]:
        context.filesystem.write(params.path, content(params, context.filesystem))
        if not params.move_to:
            return ToolResult.ok(None, f"{done} {params.path}")
        context.filesystem.move(params.path, params.move_to)
        return ToolResult.ok(None, f"{done} {params.path} and moved it to {params.move_to}")

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


def _created(params: _Patch, files: Filesystem) -> str:
    if files.exists(params.path):
        raise AlreadyExists(f"{params.path} exists already: update it")
    return _patched("", params, "create")


def _updated(params: _Patch, files: Filesystem) -> str:
    return _patched(files.read(params.path), params, "default")


def _patched(text: str, params: _Patch, mode: Literal["default", "create"]) -> str:
    try:
        return apply_diff(text, params.diff, mode)
    except ValueError as error:
        raise ToolValidationError(f"The patch of {params.path} does not fit: {error}") from error


_EDITS: Mapping[str, AnyTool] = {
    "create_file": _edit_tool("write_file", "Create a file.", "Created", _created),
    "update_file": _edit_tool("edit_file", "Change a file.", "Updated", _updated),
    "delete_file": next(tool for tool in file_tools() if tool.name == "delete_file"),
}


def _edit(operation: object, call_id: str | None) -> _Call:
    given = _given(operation)
    return _Call(_EDITS[given.pop("type")], given, call_id)


def _edited(result: AnyResult) -> ApplyPatchResult:
    status = "completed" if result.success else "failed"
    return ApplyPatchResult(status=status, output=result.render())


# What the agent's own tools do


class _Own(_Ours):
    """One of the agent's own tools: a function, a shell, an editor."""

    def __init__(self, calls: _Calls, own: Any, item: str, work: Any, reads: bool) -> None:
        self._calls, self._own, self._work = calls, own, work
        # The framework checks the arguments: it knows more of them than the schema says.
        self.tool = own_tool(
            own.name,
            getattr(own, "description", ""),
            _never,
            reach="read" if reads else None,
            writes="api" if reads else "external",
        )
        self.name = getattr(own, "qualified_name", own.name)
        calls.offered[item, self.name] = lambda item: self.calls(
            next(item[each] for each in _PARTS if each in item), item["call_id"]
        )

    def calls(self, given: object, call_id: str | None) -> list[_Call]:
        return [_Call(self.tool, _given(given), call_id)]

    async def __call__(self, *given: Any) -> Any:
        run, call_id, part = _seen(*given)
        (call,) = self.calls(part, call_id)
        done = await self._calls.run_own(call, run, self.name, lambda: self._work(*given))
        if done.error is not None:
            return await _told(self._own, run, done.error)
        if done.result is None:
            return done.value
        is_edit = isinstance(part, ApplyPatchOperation)
        return _edited(done.result) if is_edit else _shown(done.result, self.tool)

    create_file = update_file = delete_file = __call__


_ITEMS: Mapping[type, tuple[str, str]] = {
    FunctionTool: ("on_invoke_tool", "function_call"),
    CustomTool: ("on_invoke_tool", "custom_tool_call"),
    ShellTool: ("executor", "shell_call"),
    LocalShellTool: ("executor", "local_shell_call"),
    ApplyPatchTool: ("editor", "apply_patch_call"),
}
"""Where a tool has what it does, and the type of its calls in a conversation."""
_PARTS = ("arguments", "input", "action", "operation")
"""Where those have the arguments."""
_FIELDS = ("commands", "command", "timeout_ms", "type", "path", "diff", "move_to")
"""What goes on record of an action or an operation."""


def _covered(calls: _Calls, tool: AgentTool, reads: bool) -> AgentTool:
    """Return one of the agent's tools with its calls run as ours; others as they are."""
    slot, item = next((each for t, each in _ITEMS.items() if isinstance(tool, t)), ("name", ""))
    made: Any = copy(tool)
    work = getattr(made, slot)
    if not item or work is None or isinstance(work, _Ours):
        return tool
    if isinstance(tool, ApplyPatchTool):
        work = partial(_apply, tool.editor)
    if isinstance(tool, FunctionTool):
        origin = get_function_tool_origin(tool)
        if origin is not None and origin.type is ToolOriginType.AGENT_AS_TOOL:
            return tool  # what that agent calls are transactions of their own
        work, made.needs_approval = _raising(tool).on_invoke_tool, _careful(tool)
    own = _Own(calls, tool, item, work, reads)
    setattr(made, slot, own)
    if hasattr(made, "needs_approval"):
        needs = made.needs_approval
        made.needs_approval = calls.needs_approval(needs, own.name, own.tool, own.calls)
    return made


def _apply(editor: ApplyPatchEditor, operation: ApplyPatchOperation) -> Any:
    return getattr(editor, operation.type)(operation)


def _seen(given: Any, *more: Any) -> tuple[Any, str | None, Any]:
    """Return the run, the id and the arguments of a call, from what a tool is called with."""
    if isinstance(given, CallContext):
        return cast("Run", given), given.tool_call_id, more[0]
    if isinstance(given, ApplyPatchOperation):
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


def _careful(tool: FunctionTool) -> Any:
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


def _raising(tool: FunctionTool) -> FunctionTool:
    """Return a tool whose function's exceptions are raised, not told to the model."""
    return set_function_tool_failure_error_function(copy(tool), None)


async def _told(tool: AgentTool, run: Any, error: Exception) -> str:
    """Return what the framework tells the model of an exception; raise it where it would."""
    text: str | None = None
    if isinstance(tool, FunctionTool) and hasattr(tool.on_invoke_tool, "prepare_arguments"):
        text = await maybe_invoke_function_tool_failure_error_function(
            function_tool=tool, context=run, error=error
        )
    if text is None:
        raise error
    span = get_current_span()
    if span is not None:
        span.set_error(
            SpanError(message="Error running tool (non-fatal)", data={"tool_name": tool.name})
        )
    return text


async def _never(params: dict[str, Any], *, context: ToolContext) -> AnyResult:
    raise NotImplementedError("each call brings its own handler")


# Values


def _arguments(text: str) -> object:
    """Return the arguments of a call; a text that is not JSON is refused like wrong arguments."""
    try:
        return json.loads(text) if text.strip() else {}
    except ValueError:
        return text


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def _shown(result: AnyResult, tool: AnyTool) -> object:
    """Return a result for the model: text, and pictures and files if there are any."""
    text = result.render(tool.max_result_chars)
    shown: list[object] = []
    for each in result.media:
        if each.media_type.startswith("image/"):
            shown.append(ToolOutputImage(image_url=each.data_url))
        elif each.media_type == "application/pdf":
            name = each.name or "file.pdf"
            shown.append(ToolOutputFileContent(file_data=each.data_url, filename=name))
    return [ToolOutputText(text=text), *shown] if shown else text


def _output(command: str, result: AnyResult) -> ShellCommandOutput:
    """Return a command's output, with what became of its changes if it failed."""
    value = result.value
    if not isinstance(value, CommandOutput):  # refused, or on record in another process
        shown = result.render()
        out, err, code = (shown, "", 0) if result.success else ("", shown, 1)
    else:
        said = "" if result.success else result.message
        out, code = value.stdout, value.exit_code
        err = "\n".join(part for part in (value.stderr.rstrip("\n"), said) if part)
    failure = result.failure
    timed_out = failure is not None and failure.code == TIMEOUT
    outcome = ShellCallOutcome("timeout") if timed_out else ShellCallOutcome("exit", code)
    return ShellCommandOutput(out, err, outcome, command)
