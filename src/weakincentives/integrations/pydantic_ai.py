"""pydantic-ai: every tool call of an agent is a transaction.

``Agent(model, capabilities=[Wink(workspace=".")])`` offers our tools to an agent, covers its own
tools, and backs its workspace. ``Agent(model, toolsets=[Wink(workspace=".").toolset])`` only
offers our tools.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from weakincentives.call import call_under_way
from weakincentives.errors import ApprovalNeeded, FilesystemError, MissingExtra, Suspended
from weakincentives.filesystem import FileStat, HostFilesystem
from weakincentives.integrations.bridge import Bridge, RunName, Workspace, wire_name
from weakincentives.loops import in_thread
from weakincentives.prompt.approval import Approval, ApprovalRequest
from weakincentives.prompt.policies import AnyPolicy
from weakincentives.prompt.tool import Reach, Tool, ToolContext
from weakincentives.tool_result import ToolResult

try:
    from pydantic_ai import (
        ApprovalRequired,
        BinaryContent,
        CallDeferred,
        CallToolsNode,
        FunctionToolset,
        ModelRequestNode,
        ModelResponse,
        ModelRetry,
        RunContext,
        SkipToolExecution,
        ToolCallPart,
        ToolDefinition,
        ToolDenied,
        ToolFailed,
        ToolReturn,
        ToolReturnPart,
    )
    from pydantic_ai import Tool as PydanticTool
    from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
    from pydantic_ai.exceptions import ToolFailedError, ToolRetryError
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
    from pydantic_ai.usage import RunUsage
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        SupportsCommands,
        SupportsFilesystem,
        SupportsRealpath,
        WorkspaceBackend,
        WorkspaceCommand,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
    from pydantic_core import SchemaValidator, core_schema, to_json, to_jsonable_python
except ImportError as error:
    raise MissingExtra("pydantic-ai", "pydantic-ai") from error

T = TypeVar("T")
Context = RunContext[Any]
AnyResult = ToolResult[Any]

# A call that waits for someone outside is rolled back; it is made again with their answer.
Suspended.register(ApprovalRequired)
Suspended.register(CallDeferred)

# Only our tools have this validator, whatever they are renamed to. Their arguments are validated
# by our pipeline, which names every problem at once.
_OURS = SchemaValidator(core_schema.dict_schema())
_ANYTHING = {"type": "object"}
_NAME = "wink"
"""The key of our name of a tool in its metadata."""


class Wink(AbstractCapability[Any]):
    """Makes every tool call of an agent a transaction on a directory.

    The agent is offered our tools. Its own tools run under the same policies, are rolled back when
    they fail, and are on record. ``ctx.workspace`` is the directory. A call that needs approval
    becomes one of the agent's ``DeferredToolRequests``.

    Args:
        workspace: The directory, or a function of the run context that returns it.
        tools: Tools to offer; our file tools by default.
        policies: They govern all tools of the agent.
        run: Names our run, or a function of the run context that does. A call that is on record in
            a run is not made again. By default a run is a conversation of the agent.
        title: What `wink log` shows for the run.
        reaches: How far the agent's own tools reach, by name. Unstated, they run one at a time.
        covers: Whether one of the agent's own tools is covered; by default all are.
    """

    def __init__(
        self,
        workspace: Workspace = ".",
        *,
        tools: Iterable[object] | None = None,
        policies: Iterable[AnyPolicy] = (),
        run: RunName = None,
        title: str = "",
        reaches: Mapping[str, Reach] | None = None,
        covers: Callable[[ToolDefinition], bool] = lambda _: True,
        id: str | None = None,  # noqa: A002  # the framework's name for it
    ) -> None:
        self.id = id
        self.bridge = Bridge(
            workspace, tools=tools, policies=policies, title=title, run=run or _conversation
        )
        self.toolset = WinkToolset(self.bridge, id or _NAME)
        self._workspace = workspace
        self._reaches = dict(reaches or {})
        self._covers = covers

    def close(self) -> None:
        """Release the directory. The agent can make no more calls."""
        self.bridge.close()

    def __enter__(self) -> Wink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_ordering(self) -> CapabilityOrdering:
        # What other capabilities do around a call belongs to it: an attempt that they repeat, for
        # example, is part of the same transaction.
        return CapabilityOrdering(position="outermost")

    def get_toolset(self) -> AbstractToolset[Any]:
        return self.toolset

    def get_workspace(self, ctx: Context, *, ref: WorkspaceRef | None) -> WorkspaceBackend | None:
        found = self._workspace(ctx) if callable(self._workspace) else self._workspace
        backend = WinkWorkspace(os.path.realpath(found), self.bridge, ctx)
        return backend if ref is None or ref == backend.ref else None

    # The agent's own tools

    async def wrap_tool_execute(
        self,
        ctx: Context,
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: Callable[[dict[str, Any]], Awaitable[Any]],
    ) -> Any:
        validator = _validator(ctx, call.tool_name)
        if validator is _OURS or not self._covers(tool_def):
            return await handler(args)
        given = _plain(args)
        values: list[Any] = []
        errors: list[Exception] = []

        async def run(params: dict[str, Any], *, context: ToolContext) -> ToolResult[str]:
            # A policy may have replaced the arguments: a person edited them.
            chosen = args if params == given else validator.validate_json(to_json(params))
            try:
                values.append(await handler(chosen))
            except SkipToolExecution as skip:  # another capability has the result
                errors.append(skip)
                values.append(skip.result)
            except (ToolRetryError, ToolFailedError) as error:  # the tool's own answer
                errors.append(error)
                return ToolResult.error(str(error))
            except Exception as error:
                errors.append(error)
                raise
            return ToolResult.ok(_text(values[0]))

        result = await _run(self.bridge, self._own(tool_def, run), given, ctx, validator)
        if values and not result.success:  # undone: a policy denies the result, or a conflict
            raise ToolFailed(result.render())
        if errors:
            raise errors[0]
        return values[0] if values else _answer(result)

    def _own(self, tool_def: ToolDefinition, handler: Any) -> Tool[Any, Any]:
        reach = self._reaches.get(tool_def.name)
        return Tool.from_schema(
            wire_name(tool_def.name),
            tool_def.description or tool_def.name,
            _ANYTHING,  # the framework has validated the arguments
            handler,
            reach=reach,
            writes="api" if reach == "read" else "external",
            max_result_chars=None,
        )

    # Denials, which reach neither toolsets nor the other hooks

    async def before_node_run(self, ctx: Context, *, node: Any) -> Any:
        if isinstance(node, CallToolsNode):  # the answers to an earlier run's requests
            said = node.tool_call_metadata or {}
            for call_id, answer in (node.tool_call_results or {}).items():
                if isinstance(answer, ToolDenied):
                    await self._deny(ctx, call_id, answer.message, _by(said.get(call_id)))
        elif isinstance(node, ModelRequestNode):  # a handler answered during the run
            for part in node.request.parts:
                if isinstance(part, ToolReturnPart) and part.outcome == "denied":
                    await self._deny(ctx, part.tool_call_id, part.model_response_str())
        return node

    async def _deny(self, ctx: Context, call_id: str, reason: str, by: str = "") -> None:
        call = _call(ctx, call_id)
        if call is None:
            return
        ours = next((tool for tool in self.bridge.tools if tool.name == call.tool_name), None)
        tool = ours or self._own(ToolDefinition(name=call.tool_name), _never)
        await self.bridge.arefuse(
            tool, call.args_as_dict(), reason, by=by, call_id=call_id, context=ctx
        )


class WinkToolset(AbstractToolset[Any]):
    """Our tools, for an agent's ``toolsets=[...]``. A capability also covers the agent's own."""

    def __init__(self, bridge: Bridge, id: str = _NAME, ctx: Context | None = None) -> None:  # noqa: A002
        self._bridge = bridge
        self._id = id
        self._ctx = ctx
        self._held = ExitStack()

    @property
    def id(self) -> str:
        return self._id

    async def for_run(self, ctx: Context) -> WinkToolset:
        return WinkToolset(self._bridge, self._id, ctx)

    async def __aenter__(self) -> WinkToolset:
        if self._ctx is not None:  # between runs of the agent, others can work on the directory
            self._held.enter_context(self._bridge.held(self._ctx))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._held.close()

    async def get_tools(self, ctx: Context) -> dict[str, ToolsetTool[Any]]:
        return {
            tool.name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=tool.name,
                    description=tool.text(),
                    parameters_json_schema=tool.parameters,
                    metadata={_NAME: tool.name},
                ),
                max_retries=ctx.max_retries,
                args_validator=_OURS,
            )
            for tool in self._bridge.tools
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: Context, tool: ToolsetTool[Any]
    ) -> Any:
        found = next(each for each in self._bridge.tools if each.name == name)
        return _answer(await _run(self._bridge, found, tool_args, ctx, _OURS), found)


async def _run(
    bridge: Bridge, tool: Tool[Any, Any], arguments: Any, ctx: Context, validator: Any
) -> AnyResult:
    """Make a call; one that needs approval is deferred the framework's way."""
    approval = None
    if ctx.tool_call_approved:
        asked = None if ctx.tool_call_id is None else _call(ctx, ctx.tool_call_id)
        shown = arguments
        if asked is not None:
            shown = _plain(
                validator.validate_json(asked.args_as_json_str(), context=ctx.validation_context)
            )
        edited = None if shown == arguments else arguments
        approval = Approval(True, _by(ctx.tool_call_metadata), arguments=edited)
        arguments = shown
    try:
        return await bridge.acall(
            tool, arguments, call_id=ctx.tool_call_id, context=ctx, approval=approval
        )
    except ApprovalNeeded as needed:
        raise ApprovalRequired(_shown(needed.request)) from None


def _answer(result: AnyResult, tool: Tool[Any, Any] | None = None) -> Any:
    """Return what the model is told; a failure is raised as the framework's."""
    text = result.render(None if tool is None else tool.max_result_chars)
    if not result.success:
        raise ToolFailed(text)
    media = [BinaryContent(each.data, media_type=each.media_type) for each in result.media]
    return [text, *media] if media else text


def _shown(request: ApprovalRequest) -> dict[str, Any]:
    """Return what a person needs to decide, for the application that asks them."""
    return {
        "question": request.question,
        "text": request.describe(_MOST_SHOWN),
        "diff": request.preview.diff,
        "facts": dict(request.preview.facts),
        "policy": request.policy_name,
    }


_MOST_SHOWN = 20_000


def _by(metadata: Any) -> str:
    """Return who answered, if the application says so in ``DeferredToolResults.metadata``."""
    return str(metadata.get("by", "")) if isinstance(metadata, Mapping) else ""


def _conversation(ctx: Context | None) -> str | None:
    return None if ctx is None else ctx.conversation_id


def _call(ctx: Context, call_id: str) -> ToolCallPart | None:
    """Return a call as the model made it."""
    responses = (each for each in reversed(ctx.messages) if isinstance(each, ModelResponse))
    calls = (call for each in responses for call in each.tool_calls)
    return next((call for call in calls if call.tool_call_id == call_id), None)


def _validator(ctx: Context, name: str) -> Any:
    tools = ctx.tool_manager.tools if ctx.tool_manager is not None else None
    return tools[name].args_validator if tools and name in tools else None


def _plain(args: Any) -> Any:
    """Return validated arguments as JSON data."""
    return to_jsonable_python(args, fallback=repr)


def _text(value: Any) -> str:
    """Return a tool's value as the model reads it."""
    value = value.return_value if isinstance(value, ToolReturn) else value
    return ToolReturnPart("", value).model_response_str()


async def _never(params: Any, *, context: ToolContext) -> AnyResult:
    raise NotImplementedError


# The agent's workspace


class WinkWorkspace(SupportsCommands, SupportsFilesystem, SupportsRealpath, WorkspaceBackend):
    """A directory as ``ctx.workspace``. What a tool changes there is part of its call.

    Nothing leads outside the directory, except by a command, which is not confined. A change that
    is made outside of any call, by an output function for example, is a call of its own. A command
    ends with everything it has started.
    """

    def __init__(self, root: str, bridge: Bridge, ctx: Context | None = None) -> None:
        self._root = root
        self._bridge = bridge
        self._ctx = ctx

    @property
    def ref(self) -> WorkspaceRef:
        return WorkspaceRef(provider=_NAME, id=self._root)

    async def working_dir(self) -> str:
        if not os.path.isdir(self._root):
            raise WorkspaceUnavailableError(f"{self._root} is not a directory")
        return self._root

    async def _read(self, read: Callable[[HostFilesystem], T]) -> T:
        await self.working_dir()
        try:
            return await in_thread(lambda: read(self._bridge.registry(self._ctx).workspace))
        except FilesystemError as error:
            if isinstance(error, OSError):
                raise
            raise OSError(str(error)) from error

    async def _change(self, what: str, path: str, change: Callable[[HostFilesystem], T]) -> T:
        if call_under_way() is not None:
            return await self._read(change)
        values: list[T] = []
        errors: list[Exception] = []

        async def run(params: dict[str, Any], *, context: ToolContext) -> ToolResult[None]:
            try:
                values.append(await self._read(change))
            except Exception as error:
                errors.append(error)
                raise
            return ToolResult.ok()

        tool = Tool.from_schema(f"workspace_{what}", f"Workspace: {what}", _ANYTHING, run)
        result = await self._bridge.acall(tool, {what: path}, context=self._ctx)
        if errors:
            raise errors[0]
        if not result.success:
            raise PermissionError(result.render())
        return values[0]

    async def read_bytes(self, path: str) -> bytes:
        return await self._read(lambda files: files.read_bytes(path))

    async def stat(self, path: str) -> FileEntry:
        return await self._read(lambda files: self._entry(files.stat(path)))

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        return await self._read(lambda files: [*map(self._entry, files.list(path))])

    def _entry(self, found: FileStat) -> FileEntry:
        path = os.path.normpath(os.path.join(self._root, found.path))
        size = found.size if found.kind == "file" else None
        is_dir = found.kind == "directory"
        return FileEntry(name=os.path.basename(path), path=path, is_dir=is_dir, size=size)

    async def exists(self, path: str) -> bool:
        return await self._read(lambda files: files.exists(path))

    async def realpath(self, path: str) -> str:
        # Not ours, for which `link/..` is the directory of the link.
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
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        if isinstance(command, str) is not shell:
            raise TypeError("a command is a string with shell=True, or else a sequence of words")
        whole = {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(
            env or {}
        )
        cancelled: list[str] = []

        def run(files: HostFilesystem) -> Any:
            return files.run(
                command,
                env=whole,
                timeout=timeout,
                output_limit=_MOST_OUTPUT,
                watch=lambda _: next(iter(cancelled), None),
            )

        shown = command if isinstance(command, str) else shlex.join(command)
        try:
            done = await self._change("run", shown, run)
        finally:
            cancelled.append("cancelled")  # if it still runs, nobody waits for it
        if done.timed_out:
            said = f"the command timed out after {timeout:g} s; its changes were undone"
            raise WorkspaceTimeoutError(said, stdout=done.stdout, stderr=done.stderr)
        if done.stdout_truncated or done.stderr_truncated:
            raise WorkspaceOutputLimitError(
                f"the command wrote more than {_MOST_OUTPUT} bytes",
                limit=_MOST_OUTPUT,
                stdout=done.stdout,
                stderr=done.stderr,
            )
        return CommandResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE")
"""What commands see of this process's environment, as in the framework's own workspace: no keys."""
_MOST_OUTPUT = 10 << 20


# Tools of the framework as ours


def adopt(tool: PydanticTool[Any], *, deps: Any = None, **options: Any) -> Tool[Any, Any]:
    """Return a tool of pydantic-ai as one of ours.

    ``ModelRetry`` and ``ToolFailed`` are answers for the model; ``ApprovalRequired`` and
    ``CallDeferred`` suspend the call.

    Args:
        deps: The agent's dependencies, for a tool that takes the run context.
        options: As of ``Tool.from_schema``. Unstated, the tool may change files in any way.
    """
    toolset = FunctionToolset([tool])

    async def handler(params: dict[str, Any], *, context: ToolContext) -> AnyResult:
        approved = context.approval is not None and context.approval.approved
        ctx = RunContext(
            deps=deps,
            model=TestModel(),
            usage=RunUsage(),
            tool_name=tool.name,
            tool_call_id=context.call_id,
            tool_call_approved=approved,
        )
        if tool.requires_approval and not approved:
            raise ApprovalRequired
        found = (await toolset.get_tools(ctx))[tool.name]
        args = found.args_validator.validate_json(to_json(params))
        try:
            value = await toolset.call_tool(tool.name, args, ctx, found)
        except (ModelRetry, ToolFailed) as error:
            return ToolResult.error(error.message)
        return ToolResult.ok(_text(value))

    return Tool.from_schema(
        wire_name(tool.name),
        tool.description or tool.name,
        tool.tool_def.parameters_json_schema,
        handler,
        **{"writes": "external", **options},
    )
