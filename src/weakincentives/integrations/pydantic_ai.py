"""pydantic-ai: every tool call of an agent is a transaction.

``Agent(model, capabilities=[Wink(workspace=".")])`` offers our tools to an agent, covers its own
tools, and backs its workspace. ``Agent(model, toolsets=[Wink(workspace=".").toolset])`` only
offers our tools.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack, cast

from weakincentives.core.call import call_under_way
from weakincentives.core.loops import in_thread
from weakincentives.errors import ApprovalNeeded, FilesystemError, MissingExtra, Suspended
from weakincentives.filesystem import FileStat, HostFilesystem
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
    own_tool,
)
from weakincentives.prompt.approval import Approval, ApprovalRequest
from weakincentives.prompt.context import ToolContext
from weakincentives.tool_result import ToolResult

try:
    import pydantic_ai as ai
    from pydantic_ai import RunContext, ToolDefinition, ToolFailed, messages, workspaces
    from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
    from pydantic_ai.exceptions import ToolFailedError, ToolRetryError
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
    from pydantic_ai.usage import RunUsage
    from pydantic_core import SchemaValidator, core_schema, to_json, to_jsonable_python
except ImportError as error:
    raise MissingExtra("pydantic-ai", "pydantic-ai") from error

T = TypeVar("T")
Context = RunContext[Any]

# A call that waits for someone outside is rolled back, and made again with their answer.
Suspended.register(ai.ApprovalRequired)
Suspended.register(ai.CallDeferred)

# Only our tools have this validator, whatever they are renamed to. Their arguments are validated by
# our pipeline, which names every problem at once.
_OURS = SchemaValidator(core_schema.dict_schema())


@dataclass(init=False, eq=False)  # a file that describes an agent may name only dataclasses
class Wink(Closes, AbstractCapability[Any]):
    """Makes every tool call of an agent a transaction on a directory.

    The agent is offered our tools. Its own tools run under the same policies, are rolled back when
    they fail, and are on record. ``ctx.workspace`` is the directory. A call that needs approval
    becomes one of the agent's ``DeferredToolRequests``.

    Args:
        workspace: The directory, or a function of the run context that returns it.
        covers: Whether one of the agent's own tools is covered; by default all are.
        options: Those of ``Bridge``. By default a run is a conversation of the agent.
    """

    def __init__(
        self,
        workspace: Workspace | None = ".",
        *,
        covers: Callable[[ToolDefinition], bool] = lambda _: True,
        id: str | None = None,  # noqa: A002  # the framework's name for it
        **options: Unpack[BridgeOptions],
    ) -> None:
        self.id = id
        options["run"] = options.get("run") or _conversation
        self.bridge = Bridge(workspace, **options)
        self.toolset = WinkToolset(self.bridge, id or "wink")
        self._covers = covers

    def close(self) -> None:
        """Release the directory for good. Between runs of the agent it is free anyway."""
        self.bridge.close()

    def get_ordering(self) -> CapabilityOrdering:
        # What other capabilities do around a call belongs to it: one that tries a tool again, for
        # example, does so inside the transaction.
        return CapabilityOrdering(position="outermost")

    def get_toolset(self) -> AbstractToolset[Any]:
        return self.toolset

    def get_workspace(
        self, ctx: Context, *, ref: messages.WorkspaceRef | None
    ) -> workspaces.WorkspaceBackend | None:
        if not self.bridge.has_directory:
            return None
        backend = WinkWorkspace(str(self.bridge.directory(ctx)), self.bridge, ctx)
        return backend if ref is None or ref == backend.ref else None

    # The agent's own tools

    async def after_tool_validate(
        self,
        ctx: Context,
        *,
        call: messages.ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
    ) -> dict[str, Any]:
        if tool_def.kind == "unapproved" and not ctx.tool_call_approved and self._covers(tool_def):
            # The framework asks a person about each call of this tool. Policies come first.
            tool = self.bridge.covering(tool_def.name, tool_def.description)
            given = _plain(args)
            found = await self.bridge.aadmit(tool, given, call_id=_call_id(ctx), context=ctx)
            if found.result is not None:
                raise ToolFailed(found.result.render())
        return args

    async def wrap_tool_execute(
        self,
        ctx: Context,
        *,
        call: messages.ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: Callable[[dict[str, Any]], Awaitable[Any]],
    ) -> Any:
        assert ctx.tool_manager is not None
        validator = (ctx.tool_manager.tools or {})[call.tool_name].args_validator
        if validator is _OURS or not self._covers(tool_def):
            return await handler(args)
        given = _plain(args)

        def work(params: Any) -> Awaitable[Any]:
            if params == given:
                return handler(args)
            return handler(validator.validate_json(to_json(params)))  # a person has edited them

        own = _Work(work)
        tool = self.bridge.covering(tool_def.name, tool_def.description, own.handler)
        return own.outcome(await _run(self.bridge, tool, given, ctx, validator))

    # Denials: the framework tells no tool of them

    async def before_node_run(self, ctx: Context, *, node: Any) -> Any:
        if isinstance(node, ai.CallToolsNode):  # with the answers to the requests of an earlier run
            said = node.tool_call_metadata or {}
            for call_id, answer in (node.tool_call_results or {}).items():
                if isinstance(answer, ai.ToolDenied):
                    by = _by(said.get(call_id))
                    await _deny(self.bridge, ctx, call_id, answer.message, by, covers=True)
        elif isinstance(node, ai.ModelRequestNode):  # a handler has answered during the run
            await _note_denials(self.bridge, ctx, node.request, covers=True)
        return cast("Any", node)


class WinkToolset(AbstractToolset[Any]):
    """Our tools, for an agent's ``toolsets=[...]``; the agent's own tools are not covered then."""

    def __init__(self, bridge: Bridge, id: str, ctx: Context | None = None) -> None:  # noqa: A002
        self._bridge = bridge
        self._id = id
        self._ctx = ctx
        self._held = ExitStack()
        self._tools: dict[str, AnyTool] = {tool.name: tool for tool in bridge.tools}

    @property
    def id(self) -> str:
        return self._id

    async def for_run(self, ctx: Context) -> WinkToolset:
        return WinkToolset(self._bridge, self._id, ctx)

    async def __aenter__(self) -> WinkToolset:
        if self._ctx is not None:
            self._held.enter_context(self._bridge.held(self._ctx))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._held.close()

    async def for_run_step(self, ctx: Context) -> WinkToolset:
        if ctx.messages:
            await _note_denials(self._bridge, ctx, ctx.messages[-1])
        return self

    async def get_tools(self, ctx: Context) -> dict[str, ToolsetTool[Any]]:
        return {
            name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=name,
                    description=tool.text(),
                    parameters_json_schema=tool.parameters,
                ),
                max_retries=ctx.max_retries,
                args_validator=_OURS,
            )
            for name, tool in self._tools.items()
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: Context, tool: ToolsetTool[Any]
    ) -> Any:
        ours = self._tools[name]
        result = await _run(self._bridge, ours, tool_args, ctx, _OURS)
        return _answer(result, ours.max_result_chars)


# One call


class _Work(OwnWork):
    def failed(self, error: Exception) -> AnyResult:
        if isinstance(error, ai.SkipToolExecution):  # another capability has the result
            self.value = error.result
            return self.recorded(self.value)
        if isinstance(error, (ToolRetryError, ToolFailedError)):  # told to the model
            return ToolResult.error(str(error))
        raise error

    def recorded(self, value: Any) -> AnyResult:
        return ToolResult.ok(_text(value))

    def answer(self, result: AnyResult) -> Any:
        return _answer(result)


async def _run(
    bridge: Bridge, tool: AnyTool, arguments: Any, ctx: Context, validator: Any
) -> AnyResult:
    """Make a call; if it needs approval, defer it the framework's way."""
    approval = None
    if ctx.tool_call_approved:
        made, given = _made(ctx, ctx.tool_call_id), arguments
        if made is not None:
            text = made.args_as_json_str()
            arguments = _plain(validator.validate_json(text, context=ctx.validation_context))
        edited = None if arguments == given else given
        approval = Approval(True, _by(ctx.tool_call_metadata), arguments=edited)
    try:
        return await bridge.acall(
            tool, arguments, call_id=_call_id(ctx), context=ctx, approval=approval
        )
    except ApprovalNeeded as needed:
        request: ApprovalRequest = needed.request
        shown = {
            "question": request.question,
            "text": request.describe(MAX_SHOWN),
            "diff": request.preview.diff,
            "policy": request.policy_name,
        }
        raise ai.ApprovalRequired(shown) from None


def _answer(result: AnyResult, most: int | None = None) -> Any:
    """Return what the model is told; a failure is raised as the framework's."""
    text = result.render(most)
    if not result.success:
        raise ToolFailed(text)
    found = [messages.BinaryContent(each.data, media_type=each.media_type) for each in result.media]
    return [text, *found] if found else text


async def _deny(
    bridge: Bridge,
    ctx: Context,
    call_id: str,
    reason: str,
    by: str = "",
    *,
    covers: bool = False,
) -> None:
    """Put a person's denial on record; of the agent's own tools, too, if those are covered."""
    made = _made(ctx, call_id)
    if made is None:
        return
    tool = next((each for each in bridge.tools if each.name == made.tool_name), None)
    if tool is None and covers:
        tool = bridge.covering(made.tool_name, "")
    if tool is not None:
        arguments, name = made.args_as_dict(), _call_id(ctx, call_id)
        await bridge.arefuse(tool, arguments, reason, by=by, call_id=name, context=ctx)


async def _note_denials(
    bridge: Bridge, ctx: Context, message: messages.ModelMessage, *, covers: bool = False
) -> None:
    """Put on record the denials that the model is about to be told."""
    for part in message.parts:
        if isinstance(part, messages.ToolReturnPart) and part.outcome == "denied":
            reason = part.model_response_str(wrap_if_error=False)
            await _deny(bridge, ctx, part.tool_call_id, reason, covers=covers)


def _by(metadata: Any) -> str:
    """Return who answered, if the application says so in ``DeferredToolResults.metadata``."""
    found: dict[str, Any] = {}
    said = cast("Mapping[str, Any]", metadata) if isinstance(metadata, Mapping) else found
    return str(said.get("by", ""))


def _conversation(ctx: Context | None) -> str | None:
    return None if ctx is None else ctx.conversation_id


def _calls(ctx: Context, call_id: str | None) -> list[messages.ToolCallPart]:
    """Return the calls of an id, as the model made them."""
    parts = (part for message in ctx.messages for part in message.parts)
    calls = (part for part in parts if isinstance(part, messages.ToolCallPart))
    return [call for call in calls if call.tool_call_id == call_id]


def _made(ctx: Context, call_id: str | None) -> messages.ToolCallPart | None:
    return next(reversed(_calls(ctx, call_id)), None)


def _call_id(ctx: Context, call_id: str | None = None) -> str | None:
    """Return the id of a call. Some models restart their ids with every response."""
    call_id = call_id or ctx.tool_call_id
    count = len(_calls(ctx, call_id))
    return f"{call_id}#{count}" if count > 1 else call_id


def _plain(args: Any) -> Any:
    """Return validated arguments as JSON data."""
    return to_jsonable_python(args, fallback=repr)


def _text(value: Any) -> str:
    """Return a tool's value as the model reads it."""
    value = value.return_value if isinstance(value, messages.ToolReturn) else value
    return messages.ToolReturnPart("", value).model_response_str()


# The agent's workspace


class WinkWorkspace(
    workspaces.SupportsCommands,
    workspaces.SupportsFilesystem,
    workspaces.SupportsRealpath,
    workspaces.WorkspaceBackend,
):
    """A directory as ``ctx.workspace``: what a tool changes there is part of its call.

    A change outside of any call, by an output function for example, is a call of its own. Files
    outside the directory cannot be reached, except by commands, which are not confined. A command
    ends with everything it has started; its changes are visible when it has ended.
    """

    def __init__(self, root: str, bridge: Bridge, ctx: Context | None = None) -> None:
        self._root = root
        self._bridge = bridge
        self._ctx = ctx

    @property
    def ref(self) -> messages.WorkspaceRef:
        return messages.WorkspaceRef(provider="wink", id=self._root)

    async def working_dir(self) -> str:
        if not os.path.isdir(self._root):
            raise workspaces.WorkspaceUnavailableError(f"{self._root} is not a directory")
        return self._root

    async def _use(self, use: Callable[[HostFilesystem], T]) -> T:
        await self.working_dir()
        try:
            with self._bridge.held(self._ctx):  # perhaps after the run, in a hook
                return await in_thread(lambda: use(self._bridge.registry(self._ctx).workspace))
        except FilesystemError as error:
            if isinstance(error, OSError):
                raise
            raise OSError(str(error)) from error

    async def _change(self, what: str, where: str, change: Callable[[HostFilesystem], T]) -> T:
        if call_under_way() is not None:
            return await self._use(change)
        own = _Work(lambda _: self._use(change))
        description = f"ctx.workspace.{what}, outside of any call"
        tool = own_tool(f"workspace_{what}", description, own.handler)
        return own.outcome(await self._bridge.acall(tool, {what: where}, context=self._ctx))

    async def read_bytes(self, path: str) -> bytes:
        return await self._use(lambda files: files.read_bytes(path))

    async def stat(self, path: str) -> workspaces.FileEntry:
        return await self._use(lambda files: self._entry(files.stat(path)))

    async def list_dir(self, path: str) -> Sequence[workspaces.FileEntry]:
        return await self._use(lambda files: [self._entry(each) for each in files.list(path)])

    def _entry(self, found: FileStat) -> workspaces.FileEntry:
        path = os.path.normpath(os.path.join(self._root, found.path))
        return workspaces.FileEntry(
            name=os.path.basename(path),
            path=path,
            is_dir=found.kind == "directory",
            size=found.size if found.kind == "file" else None,
        )

    async def exists(self, path: str) -> bool:
        return await self._use(lambda files: files.exists(path))

    async def realpath(self, path: str) -> str:
        # The system's: in ours, `link/..` is the directory of the link.
        return await in_thread(lambda: os.path.realpath(path))

    async def write_bytes(self, path: str, data: bytes) -> None:
        await self._change("write", path, lambda files: files.write_bytes(path, data))

    async def make_dir(self, path: str) -> None:
        def make(files: HostFilesystem) -> None:
            if files.exists(path) and files.stat(path).kind != "directory":
                raise FileExistsError(f"{path} is a file")
            files.mkdir(path)

        await self._change("make_dir", path, make)

    async def remove(self, path: str) -> None:
        if os.path.commonpath([path, self._root]) == os.path.normpath(path):
            raise ValueError("the working directory cannot be removed")
        await self._change("remove", path, lambda files: files.delete(path, recursive=True))

    async def run(
        self,
        command: workspaces.WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> workspaces.CommandResult:
        if isinstance(command, str) is not shell:
            raise TypeError("a command is a string with shell=True, or else a sequence of words")
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        cancelled: list[str] = []

        def run(files: HostFilesystem) -> Any:
            return files.run(
                command,
                env={**passed, **(env or {})},
                timeout=timeout,
                output_limit=_MOST_OUTPUT,
                watch=lambda _: next(iter(cancelled), None),
            )

        shown = command if isinstance(command, str) else shlex.join(command)
        try:
            done = await self._change("run", shown, run)
        finally:
            cancelled.append("cancelled")  # where it still runs
        output = {"stdout": done.stdout, "stderr": done.stderr}
        if done.timed_out:
            said = f"the command was stopped after {timeout:g} s, and its changes were undone"
            raise workspaces.WorkspaceTimeoutError(said, **output)
        if done.stdout_truncated or done.stderr_truncated:
            said = f"the command wrote more than {_MOST_OUTPUT} bytes"
            raise workspaces.WorkspaceOutputLimitError(said, limit=_MOST_OUTPUT, **output)
        return workspaces.CommandResult(exit_code=done.returncode, **output)


_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE")
"""What commands see of our environment, as in the framework's own workspaces: no keys."""
_MOST_OUTPUT = 10 << 20


# A tool of the framework as one of ours


def adopt(tool: ai.Tool[Any], *, deps: Any = None, **options: Any) -> AnyTool:
    """Return a tool of pydantic-ai as one of ours.

    ``ModelRetry`` and ``ToolFailed`` are answers to the model, and roll the call back.
    ``ApprovalRequired`` and ``CallDeferred`` suspend it.

    Args:
        deps: The dependencies, for a tool that takes the run context.
        options: Those of ``Tool.from_schema``. Unstated, the tool may change files in any way.
    """
    toolset = ai.FunctionToolset([tool])

    async def handler(params: dict[str, Any], *, context: ToolContext) -> ToolResult[str]:
        approved = context.approval is not None and context.approval.approved
        if tool.requires_approval and not approved:
            raise ai.ApprovalRequired
        ctx = RunContext(
            deps=deps,
            model=TestModel(),
            usage=RunUsage(),
            tool_name=tool.name,
            tool_call_id=context.call_id,
            tool_call_approved=approved,
        )
        found = (await toolset.get_tools(ctx))[tool.name]
        args = found.args_validator.validate_json(to_json(params))
        try:
            return ToolResult.ok(_text(await toolset.call_tool(tool.name, args, ctx, found)))
        except (ai.ModelRetry, ToolFailed) as error:
            return ToolResult.error(error.message)

    schema = tool.tool_def.parameters_json_schema
    return adopted(tool.name, tool.description or "", schema, handler, **options)
