"""pydantic-ai: the tool calls of its agents are transactions.

``Agent(model, capabilities=[Wink(workspace=".")])`` gives an agent our tools, covers its own, and
backs its workspace. ``Agent(model, toolsets=[Wink(workspace=".").toolset])`` only does the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from weakincentives.call import call_under_way
from weakincentives.errors import ApprovalNeeded, MissingExtra, Suspended, ToolValidationError
from weakincentives.filesystem import HostFilesystem
from weakincentives.integrations.bridge import Bridge, wire_name
from weakincentives.loops import in_thread
from weakincentives.prompt.approval import Approval, ApprovalRequest
from weakincentives.prompt.policies import AnyPolicy
from weakincentives.prompt.tool import Reach, Tool, ToolContext, Writes
from weakincentives.tool_result import ToolResult

try:
    from pydantic_ai import (
        AgentNode,
        ApprovalRequired,
        BinaryContent,
        CallDeferred,
        CallToolsNode,
        FunctionToolResultEvent,
        FunctionToolset,
        ModelResponse,
        ModelRetry,
        RunContext,
        SkipToolExecution,
        ToolCallPart,
        ToolDefinition,
        ToolFailed,
        ToolReturn,
        ToolReturnPart,
    )
    from pydantic_ai import Tool as PydanticTool
    from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering, on_event
    from pydantic_ai.exceptions import ToolFailedError, ToolRetryError
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
    from pydantic_ai.usage import RunUsage
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        WorkspaceBackend,
        WorkspaceCommand,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
    from pydantic_core import SchemaValidator, core_schema, to_json, to_jsonable_python
except ImportError as error:
    raise MissingExtra("pydantic-ai", "pydantic-ai") from error

T = TypeVar("T")
Context = RunContext[Any]

# A call that waits for someone outside: rolled back, and made again with their answer.
Suspended.register(ApprovalRequired)
Suspended.register(CallDeferred)

# Arguments are validated by our pipeline, which names every problem. The tools that have this
# validator are ours, whatever they are renamed to.
_OURS = SchemaValidator(core_schema.dict_schema())


class Wink(AbstractCapability[Any]):
    """Makes every tool call of an agent a transaction on one directory.

    The agent gets our tools. Its other tools are covered: policies, rollback, record. ``ctx.workspace``
    is the directory. A call that needs approval ends up in the agent's ``DeferredToolRequests``.

    Args:
        workspace: The directory, or a function of the run context that returns it.
        tools: Tools to offer; our file tools by default.
        policies: They govern all tools of the agent.
        run: The name of our run, or a function of the run context that returns it; the agent's
            conversation by default. A call that is on the record of a run is not made again.
        reaches: How far the agent's own tools reach, by name. Of those that change nothing but
            files, several can run concurrently.
        cover: Which of the agent's own tools are covered; all by default.
    """

    # Read by the framework: with True it would stream every model request. What is listened to
    # below comes from tool calls, which are always streamed.
    has_on_event = False

    def __init__(
        self,
        workspace: str | os.PathLike[str] | Callable[[Any], str | os.PathLike[str]] = ".",
        *,
        tools: Iterable[Any] | None = None,
        policies: Iterable[AnyPolicy] = (),
        run: str | Callable[[Any], str] | None = None,
        title: str = "",
        reaches: Mapping[str, Reach] | None = None,
        cover: Callable[[ToolDefinition], bool] | None = None,
        id: str | None = None,  # noqa: A002
    ) -> None:
        self.id = id
        self.bridge = Bridge(
            workspace, tools=tools, policies=policies, title=title, run=run or _conversation
        )
        self.toolset = WinkToolset(self.bridge, id=id or "wink")
        self._reaches = dict(reaches or {})
        self._cover = cover
        self._answered_by: dict[str, str] = {}

    def close(self) -> None:
        """Release the directory now, not a moment after the last call."""
        self.bridge.close()

    # What the agent gets

    def get_toolset(self) -> AbstractToolset[Any]:
        return self.toolset

    def get_workspace(self, ctx: Context, *, ref: WorkspaceRef | None) -> WorkspaceBackend | None:
        workspace = WinkWorkspace(self.bridge, ctx)
        return workspace if ref in (None, workspace.ref) else None

    def get_ordering(self) -> CapabilityOrdering:
        # What other capabilities do around a call is part of it: one that tries a tool again, for
        # example, does so inside the transaction.
        return CapabilityOrdering(position="outermost")

    # The agent's own tools

    async def wrap_tool_execute(
        self,
        ctx: Context,
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: Callable[[dict[str, Any]], Any],
    ) -> Any:
        tool = _tool(ctx, call.tool_name)
        if _is_ours(tool) or (self._cover is not None and not self._cover(tool_def)):
            return await handler(args)
        given = to_jsonable_python(args, fallback=repr, serialize_unknown=True)
        ended: list[Any] = []
        raised: list[Exception] = []

        async def run(params: dict[str, Any], *, context: ToolContext) -> ToolResult[str]:
            chosen = args
            if params != given and tool is not None:  # a person has edited them
                chosen = tool.args_validator.validate_json(to_json(params))
            try:
                ended.append(await handler(chosen))
            except SkipToolExecution as skip:  # another capability has the answer
                raised.append(skip)
                ended.append(skip.result)
            except (ToolRetryError, ToolFailedError) as error:
                raised.append(error)
                return ToolResult.error(str(error))
            except Exception as error:
                raised.append(error)
                raise
            return ToolResult.ok(_text(ended[0]))

        result = await _run(self.bridge, self._own_tool(tool_def, run), given, ctx)
        if raised and (result.success or not ended):
            raise raised[0]
        return ended[0] if ended and result.success else _answer(result)

    def _own_tool(self, tool_def: ToolDefinition, handler: Any) -> Tool[Any, Any]:
        reach = self._reaches.get(tool_def.name)
        return Tool.from_schema(
            wire_name(tool_def.name),
            tool_def.description or tool_def.name,
            {"type": "object"},  # the framework has validated them
            handler,
            reach=reach,
            writes="api" if reach == "read" else "external",
            max_result_chars=None,
        )

    # Denials

    async def before_node_run(self, ctx: Context, *, node: AgentNode[Any, Any]) -> Any:
        if isinstance(node, CallToolsNode) and node.tool_call_metadata:
            answered = node.tool_call_metadata.items()
            self._answered_by.update((key, _by(each)) for key, each in answered)
        return node

    @on_event(FunctionToolResultEvent)
    async def _note_denial(self, ctx: Context, event: FunctionToolResultEvent) -> None:
        part = event.part
        if not isinstance(part, ToolReturnPart) or part.outcome != "denied":
            return
        by = self._answered_by.pop(part.tool_call_id, "")
        await _deny(self.bridge, ctx, part, by, self._own_tool)
