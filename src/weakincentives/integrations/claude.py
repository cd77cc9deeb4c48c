"""The Claude Agent SDK: what its program does to a workspace runs as our calls.

``query`` and ``WinkClient`` are the SDK's own, with a workspace or an application. Hooks open a
call before one of the program's tools runs (Bash, Write, an MCP server's) and end it afterwards;
our tools come in as an MCP server in this process.
"""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack, cast

from weakincentives.adapters.claude_program import (
    CALL_ID,
    EDITING,
    LONG,
    NOT_CALLS,
    PATIENT,
    PREFIX,
    READING,
    SERVER,
    Processes,
    as_mcp_tool,
    outside,
    with_path,
    without_path,
)
from weakincentives.adapters.mcp_output import output_of
from weakincentives.adapters.media import IMAGES, mcp_block
from weakincentives.core.clock import since_boot
from weakincentives.core.logs import get_logger
from weakincentives.core.loops import run_blocking
from weakincentives.errors import ApprovalNeeded, MissingExtra, PolicyDenied, Suspended
from weakincentives.integrations.bridge import (
    MAX_SHOWN,
    AnyTool,
    Bridge,
    BridgeOptions,
    adopted,
    wire_name,
)
from weakincentives.prompt.approval import Approval, ApprovalRequest, CallPreview, plain_words
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.refusals import by_person
from weakincentives.prompt.tool import DEFAULT_MAX_RESULT_CHARS, Reach
from weakincentives.runtime.hosted import OpenCall
from weakincentives.runtime.registry import ToolRegistry
from weakincentives.tool_result import ToolResult

try:
    import claude_agent_sdk as sdk
    from claude_agent_sdk import ClaudeAgentOptions, HookMatcher, Message, PermissionResultDeny
    from mcp.server import Server
    from mcp.types import CallToolResult, ListToolsResult
except ImportError as error:
    raise MissingExtra("claude-agent-sdk", "claude-agent-sdk") from error

Prompt = str | AsyncIterable[dict[str, Any]]
Input = dict[str, Any]

_logger = get_logger(__name__)

_PERSON = "can_use_tool"
"""Who has answered: the SDK does not say more."""
_HOOK_SECONDS = 60.0
"""How long the program waits for a hook, by default."""


_NO_DIRECTORY = (
    "there is no directory whose changes could be rolled back: give one as workspace=..."
)
"""Why a native tool that may change files is refused without one."""


class Ours(BridgeOptions, total=False):
    """What ``query`` and ``WinkClient`` take besides the SDK's arguments: see ``query``."""

    workspace: str | os.PathLike[str] | None
    approvals: Mapping[str, Approval] | None


async def query(
    prompt: Prompt | None,
    options: ClaudeAgentOptions | None = None,
    transport: sdk.Transport | None = None,
    **ours: Unpack[Ours],
) -> AsyncIterator[Message]:
    """Ask Claude as ``claude_agent_sdk.query`` does; yields the same messages.

    Each use of a tool is a call of ours: policies are asked first, a failed one is rolled back, and
    when the loop is left early, by a timeout or in any other way, the call under way is, too.

    Ours, beside those of the SDK:

    - ``workspace``: The directory that the agent works in; also its working directory. None for an
      application that works on no directory: then the program's own tools that may change files,
      such as Bash, Write and Edit, are refused.
    - The options of ``Bridge``. ``policies`` govern our tools and the program's, whose names are
      in lower case here and in ``reaches``. ``tools`` are those to add, by default none: ours, or
      the SDK's, which are adopted. By default the ``run`` goes with the SDK's session: resuming
      that continues the run. A ``registry`` brings its directory, if it has one.
    - ``approvals``: Answers to calls that were deferred, by the id in
      ``ResultMessage.deferred_tool_use``. Where the options have no ``can_use_tool``, a call that
      needs approval is deferred if its tool is in this process, and else denied.

    Args:
        prompt: As the SDK takes it. None with a resumed session continues with its deferred call.
        options: As the SDK takes them; your hooks, servers and permissions stay in force.
        transport: As the SDK takes it.
    """
    ours["title"] = ours.get("title") or _title(prompt)
    agent = _Agent(options, **ours)
    try:
        said = agent.nothing_more() if prompt is None else prompt
        stream = sdk.query(prompt=said, options=agent.options, transport=transport)
        agent.watch(stream)
        async for message in agent.messages():
            yield message
    finally:
        await agent.close()


class WinkClient(sdk.ClaudeSDKClient):
    """A ``ClaudeSDKClient`` with a workspace or an application: see ``query`` for the arguments."""

    def __init__(
        self,
        options: ClaudeAgentOptions | None = None,
        transport: sdk.Transport | None = None,
        **ours: Unpack[Ours],
    ) -> None:
        self._agent = _Agent(options, **ours)
        super().__init__(self._agent.options, transport)

    async def connect(self, prompt: Prompt | None = None) -> None:
        await super().connect(prompt)
        self._agent.watch(super().receive_messages())

    async def receive_messages(self) -> AsyncIterator[Message]:
        async for message in self._agent.messages():
            yield message

    async def disconnect(self) -> None:
        self._agent.stop()
        try:
            await super().disconnect()
        finally:
            await self._agent.close()


def adopt(tool: sdk.SdkMcpTool[Any], **options: Any) -> AnyTool:
    """Return a tool made with the SDK's ``@tool`` as one of ours."""
    server: Any = sdk.create_sdk_mcp_server(tool.name, tools=[tool])["instance"]
    listed = run_blocking(lambda: server.get_request_handler("tools/list").handler(None, None))
    if tool.annotations is not None and tool.annotations.read_only_hint:
        options.setdefault("reach", "read")
    limit = options.get("max_result_chars", DEFAULT_MAX_RESULT_CHARS)

    async def run(params: Input, *, context: ToolContext) -> ToolResult[Any]:
        answer = await tool.handler(params)
        made = {"content": answer.get("content", []), "isError": answer.get("is_error", False)}
        said = output_of(CallToolResult.model_validate(made), limit=limit or _LIMITLESS)
        return ToolResult.error(said.text) if answer.get("is_error") else ToolResult.ok(said)

    return adopted(tool.name, tool.description, listed.tools[0].input_schema, run, **options)


_LIMITLESS = 1 << 62


# The program's calls


@dataclass(frozen=True, slots=True)
class _Use:
    """A tool of the program, or of one of its MCP servers, while it runs."""

    call: OpenCall
    given: Input
    """The arguments it was admitted with, as the program has them."""
    began: float
    """Since the system was started; zero if the tool starts no processes."""


class _Agent:
    """One run of the program."""

    def __init__(
        self,
        options: ClaudeAgentOptions | None,
        *,
        workspace: str | os.PathLike[str] | None = ".",
        approvals: Mapping[str, Approval] | None = None,
        **given: Unpack[BridgeOptions],
    ) -> None:
        options = _with_session(options or ClaudeAgentOptions())
        registry = given.get("registry")
        if registry is not None:
            if workspace not in (".", None):
                raise TypeError(
                    "a registry has a directory of its own or none: leave out workspace"
                )
            workspace = _directory_of(registry)
        elif given.get("tools") is None:
            given["tools"] = ()  # the program has file tools
        self._root = None if workspace is None else os.path.realpath(workspace)
        self._directory = os.path.realpath(options.cwd or self._root or ".")
        if self._root is not None and not Path(self._directory).is_relative_to(self._root):
            raise ValueError(
                f"{self._directory} is outside of the workspace {self._root}: what the agent "
                "changes there could not be rolled back"
            )
        given["run"] = given.get("run") or options.session_id or options.resume
        self._bridge = Bridge(self._root, **given)
        self._can_use_tool = options.can_use_tool
        self._approvals = dict(approvals or {})
        self._stops: set[str] = set()
        """Tool uses whose denial ends the turn."""
        self._in_process = _servers_here(options)
        self._tools: dict[str, AnyTool] = {}
        self._processes = Processes(self._root or "")
        if self._root is not None:
            self._processes.kill_orphans()
        self._uses: dict[str, _Use] = {}
        """By the program's id of the tool use."""
        self._checks: dict[str, asyncio.Future[None]] = {}
        """Done when our hook has decided about a tool use."""
        self._others: set[str] = set()
        """Tool uses that are no calls."""
        self._closing = False
        self._idle = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._messages: asyncio.Queue[Message | _End] = asyncio.Queue()
        self.options = self._merged(options)

    def _merged(self, options: ClaudeAgentOptions) -> ClaudeAgentOptions:
        """Return the user's options with our hooks, tools and settings."""
        servers = options.mcp_servers
        if self._bridge.tools:
            if not isinstance(servers, dict) or SERVER in servers:
                raise ValueError(f"mcp_servers must be a dict without {SERVER!r}: that one is ours")
            ours: Any = {"type": "sdk", "name": SERVER, "instance": self._server()}
            servers = {**servers, SERVER: ours}
        hooks: dict[Any, list[HookMatcher]] = {**(options.hooks or {})}
        hooks["PreToolUse"] = [
            replace(
                each, hooks=[self._noting(hook, each.timeout) for hook in each.hooks], timeout=LONG
            )
            for each in hooks.get("PreToolUse", [])
        ]
        for event, hook in (
            ("PreToolUse", self._before),
            ("PostToolUse", self._after),
            ("PostToolUseFailure", self._after),
        ):
            matcher = HookMatcher(hooks=[hook], timeout=LONG, on_failure="block")
            hooks[event] = [*hooks.get(event, []), matcher]
        return replace(
            options,
            cwd=self._directory,
            mcp_servers=servers,
            hooks=hooks,
            can_use_tool=None if options.can_use_tool is None else self._on_question,
            env={
                **PATIENT,
                # What a command does after its call has ended could not be rolled back.
                "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
                **options.env,
                **self._processes.environment,
            },
        )

    # Before and after a tool runs

    async def _before(self, hook_input: Any, use_id: str | None, _: object) -> Any:
        """Open the call of a tool of the program; check one of ours, which runs when called."""
        name, given = hook_input["tool_name"], hook_input["tool_input"]
        if use_id is None or name in NOT_CALLS:
            self._others.add(use_id or "")
            return await self._govern(name, given, use_id, hook_input)
        try:
            if name.startswith(PREFIX):
                return await self._check(name, given, use_id, hook_input)
            return await self._begin(name, given, use_id, hook_input)
        except Exception as error:  # the program would not say what it was
            _logger.exception("%s could not begin, and does not run", name)
            return _decision("deny", f"Internal error: {error}")
        finally:
            check = self._check_of(use_id)
            if not check.done():
                check.set_result(None)

    async def _govern(self, name: str, given: Input, use_id: str | None, hook_input: Any) -> Any:
        """Ask the policies about a tool that is no call: it changes nothing itself."""
        tool = self._tool(name)
        admission = await self._bridge.aadmit(tool, given, call_id=use_id)
        if admission.request is not None:
            answer = await self._ask(admission.request, name, given, use_id or "", hook_input)
            answer = answer or Approval(False, reason="nobody can be asked: set can_use_tool")
            if answer.approved is not True:
                return await self._refuse(tool, given, use_id or "", answer)
            admission = await self._bridge.aadmit(tool, given, call_id=use_id, approval=answer)
        if admission.result is not None:
            return _decision("deny", admission.result.message)
        return {}

    def _check_of(self, use_id: str) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        return self._checks.setdefault(use_id, future)

    async def _check(self, name: str, given: Input, use_id: str, hook_input: Any) -> Any:
        """Ask a person about one of our calls if need be; the rest is up to the call."""
        tool, answer = name.removeprefix(PREFIX), self._approvals.pop(use_id, None)
        while True:
            if answer is not None and answer.approved is not True:
                return await self._refuse(tool, given, use_id, answer)
            admission = await self._bridge.aadmit(tool, given, call_id=use_id, approval=answer)
            if admission.request is None:
                break
            answer = await self._ask(admission.request, name, given, use_id, hook_input)
            if answer is None:
                return _decision("defer", admission.request.question)
        # While planning, the program decides what may run.
        return {} if hook_input.get("permission_mode") == "plan" else _decision("allow")

    async def _begin(
        self, name: str, given: Input, use_id: str, hook_input: Any, answer: Approval | None = None
    ) -> Any:
        """Open the call of a tool of the program, or say why it must not run."""
        tool, params = self._tool(name), self._params(name, given)
        answer = answer or self._approvals.pop(use_id, None)
        if self._root is None and _is_native(name) and tool.reach != "read":
            answer = Approval(False, reason=_NO_DIRECTORY)
        if answer is not None and answer.approved is not True:
            return await self._refuse(tool, params, use_id, answer)
        began = 0.0 if name in READING else since_boot()
        call = self._bridge.begin(tool, params, call_id=use_id, approval=answer)
        try:
            await call.start()
        except ApprovalNeeded as needed:
            answer = await self._ask(needed.request, name, given, use_id, hook_input)
            if answer is None and self._server_of(name) is not None:
                return _decision("defer", needed.request.question)
            # A resumed program runs a native tool before it knows our hooks: never defer one.
            answer = answer or Approval(False, reason="nobody can be asked: set can_use_tool")
            return await self._begin(name, given, use_id, hook_input, answer)
        if call.result is not None:
            return _decision("deny", call.result.render(tool.max_result_chars))
        admitted = cast("Input", call.params)
        runs = without_path(admitted) if _is_native(name) else admitted
        why = outside(admitted) if name in EDITING else None
        if self._params(name, runs) != admitted:
            why = "To have it write elsewhere, edit file_path: path is derived from that"
        if self._closing:
            why = "The run is over"
        if why is not None:
            call.fail(why)
            return _decision("deny", (await call.end()).message)
        self._uses[use_id] = _Use(call, runs, began)
        edited = None if runs == given else runs
        return _decision(None if answer is None else "allow", edited=edited)

    async def _after(self, hook_input: Any, use_id: str | None, _: object) -> Any:
        """Commit or roll back a call of the program, and tell the model what it cannot see."""
        use = self._uses.pop(use_id or "", None)
        if use is None:
            return {}
        event, name = hook_input["hook_event_name"], hook_input["tool_name"]
        error = hook_input["error"] if event == "PostToolUseFailure" else None
        if hook_input["tool_input"] != use.given:
            error = "A hook changed the arguments after the call was admitted"
        result = await self._end(use, hook_input.get("tool_response"), error)
        if result.success:
            return _context(event, result.message)
        if event == "PostToolUseFailure":
            undone = ", ".join(result.metadata.undone)
            return _context(event, f"It failed. Rolled back: {undone}." if undone else "")
        # The program takes it for a success: its answer is replaced where it lets us.
        text = f"Rolled back: {result.render()}"
        if name == "Bash":
            output: Any = {"stdout": "", "stderr": text, "interrupted": True}
        elif name.startswith("mcp__"):
            output = text
        else:
            return {"decision": "block", "reason": text}
        return {"hookSpecificOutput": {"hookEventName": event, "updatedToolOutput": output}}

    async def _end(
        self, use: _Use, value: object = None, error: str | Exception | None = None
    ) -> ToolResult[Any]:
        """Commit a call, or roll it back; then no process that it left behind can write."""
        if error is None:
            use.call.ok(_plain(value))
        else:
            self._kill_since(use)
            use.call.fail(error)
        result = await use.call.end()
        if error is None and not result.success:
            self._kill_since(use)
        return result

    def _kill_since(self, use: _Use) -> None:
        if use.began:
            self._processes.kill(since=use.began)

    # Decisions of others

    def _noting(self, hook: Any, timeout: float | None) -> Any:
        """Return a PreToolUse hook of the user whose decision counts for the call, too."""

        async def noted(hook_input: Any, use_id: str | None, context: Any) -> Any:
            # Their time limit is for their hook, not for the calls that ours waits for.
            work = hook(hook_input, use_id, context)
            output = await asyncio.wait_for(work, timeout or _HOOK_SECONDS)
            said: Any = output.get("hookSpecificOutput") or {}
            name, edited = hook_input["tool_name"], said.get("updatedInput")
            denies = said.get("permissionDecision") == "deny" or output.get("decision") == "block"
            defers = said.get("permissionDecision") == "defer"
            if use_id is None or name in NOT_CALLS or not (denies or defers or edited):
                return output
            await self._check_of(use_id)  # the program asks all hooks at once
            if defers:
                await self._forget(use_id, Deferred("by a hook"))
            elif denies:
                why = said.get("permissionDecisionReason") or output.get("reason") or ""
                await self._deny(name, hook_input["tool_input"], use_id, why, "a hook")
            elif await self._forget(use_id, ArgumentsEdited("by a hook")):
                ours = await self._begin(name, edited, use_id, hook_input)
                return {**output, "hookSpecificOutput": said | ours["hookSpecificOutput"]}
            return output

        return noted

    async def _on_question(
        self, name: str, given: Input, context: sdk.ToolPermissionContext
    ) -> sdk.PermissionResultAllow | PermissionResultDeny:
        """Pass on a question of the program's own rules; the answer counts for the call, too."""
        assert self._can_use_tool is not None
        answer, use_id = await self._can_use_tool(name, given, context), context.tool_use_id or ""
        if isinstance(answer, PermissionResultDeny):
            await self._deny(name, given, use_id, answer.message, _PERSON)
            return answer
        edited, use = answer.updated_input, self._uses.get(use_id)
        if edited is not None and use is not None and edited != use.given:
            await self._forget(use_id, ArgumentsEdited("by a person"))
            ours = (await self._begin(name, edited, use_id, {}))["hookSpecificOutput"]
            use = self._uses.get(use_id)
            if use is None:
                return PermissionResultDeny(message=ours["permissionDecisionReason"])
            return replace(answer, updated_input=use.given)
        return answer

    async def _ask(
        self, request: ApprovalRequest, name: str, given: Input, use_id: str, hook_input: Any
    ) -> Approval | None:
        """Return the answer to a question of our policies; None if there is no one to ask."""
        if self._can_use_tool is None:
            return None
        context = sdk.ToolPermissionContext(
            tool_use_id=use_id,
            agent_id=hook_input.get("agent_id"),
            decision_reason=request.describe(MAX_SHOWN),
            title=request.question,
            display_name=name,
            description=request.description,
        )
        answer = await self._can_use_tool(name, given, context)
        if isinstance(answer, PermissionResultDeny):
            if answer.interrupt:
                self._stops.add(use_id)
            return Approval(False, _PERSON, answer.message)
        edited = answer.updated_input
        arguments = None if edited in (None, given) else self._params(name, edited)
        return Approval(True, _PERSON, arguments=arguments)

    async def _refuse(
        self, tool: str | AnyTool, params: Input, use_id: str, answer: Approval
    ) -> Any:
        """Record a person's denial, and return it for the program."""
        refused = await self._bridge.arefuse(
            tool, params, answer.reason, by=answer.by, call_id=use_id
        )
        output = _decision("deny", refused.message)
        if use_id in self._stops:
            output |= {"continue_": False, "stopReason": refused.message}
        return output

    async def _deny(self, name: str, given: Input, use_id: str, reason: str, by: str) -> None:
        """Record that someone else denied a call that our policies allow."""
        use = self._uses.pop(use_id, None)
        if use is not None:
            await self._end(use, error=PolicyDenied(by_person(name, by, reason), policy=by))
        elif name.startswith(PREFIX):
            tool = name.removeprefix(PREFIX)
            await self._bridge.arefuse(tool, given, reason, by=by, call_id=use_id)

    async def _forget(self, use_id: str, why: Suspended) -> bool:
        """Cancel an admitted call; returns whether there was one."""
        use = self._uses.pop(use_id, None)
        if use is not None:
            await self._end(use, error=why)
        return use is not None

    # Tools

    def _tool(self, name: str) -> AnyTool:
        """Return a tool of the program as one of ours."""
        found = self._tools.get(name)
        if found is None:
            reach: Reach | None = self._bridge.reaches.get(wire_name(self._name(name)))
            if name in READING | NOT_CALLS:
                reach = "read"
            elif name in EDITING:
                reach = "reversible"
            found = self._tools[name] = self._bridge.covering(
                self._name(name),
                f"{name}, a tool of the Claude program.",
                reach=reach,
                concurrent=reach == "read",
                preview=_preview if _is_native(name) else None,
            )
        return found

    def _name(self, name: str) -> str:
        """Return our name of a tool; only servers of this process are not told apart by theirs."""
        server = self._server_of(name)
        return name.removeprefix("mcp__" if server is None else f"mcp__{server}__")

    def _server_of(self, name: str) -> str | None:
        """Return the server in this process that has a tool; None if it is elsewhere."""
        return next((s for s in self._in_process if name.startswith(f"mcp__{s}__")), None)

    def _params(self, name: str, given: Input) -> Input:
        if not _is_native(name):
            return given
        return cast("Input", with_path(given, self._directory, self._root or ""))

    def _server(self) -> Server:
        async def list_tools(context: Any, params: Any) -> ListToolsResult:
            return ListToolsResult(
                tools=[as_mcp_tool(tool, tool.text()) for tool in self._bridge.tools]
            )

        async def call_tool(context: Any, params: Any) -> CallToolResult:
            result = await self._bridge.acall(
                params.name, params.arguments or {}, call_id=params.meta[CALL_ID]
            )
            tool = next((each for each in self._bridge.tools if each.name == params.name), None)
            text = result.render(None if tool is None else tool.max_result_chars)
            shown = [mcp_block(each) for each in result.media if each.media_type in IMAGES]
            content = [{"type": "text", "text": text}, *shown]
            return CallToolResult.model_validate({"content": content, "isError": False})

        return Server(SERVER, on_list_tools=list_tools, on_call_tool=call_tool)

    # Messages, and the end

    def watch(self, stream: AsyncIterator[Message]) -> None:
        """Read the program's messages, whether or not someone waits for them."""
        self._reader = asyncio.get_running_loop().create_task(self._read(stream))

    async def _read(self, stream: Any) -> None:
        error: Exception | None = None
        try:
            async for message in stream:
                await self._look(message)
                self._messages.put_nowait(message)
        except Exception as failure:
            error = failure
        finally:
            self.stop()
            try:
                await stream.aclose()
            finally:
                await self._abort()
                self._messages.put_nowait(_End(error))

    async def nothing_more(self) -> AsyncIterator[dict[str, Any]]:
        """End the input once the program has finished by itself."""
        await self._idle.wait()
        for message in list[dict[str, Any]]():
            yield message

    async def _look(self, message: Message) -> None:
        """End calls that have no hook at their end: what did not run, or was interrupted."""
        if isinstance(message, sdk.ResultMessage):
            self._idle.set()
        blocks = message.content if isinstance(message, sdk.UserMessage) else []
        for block in blocks:
            if isinstance(block, sdk.ToolResultBlock):
                check = self._checks.pop(block.tool_use_id, None)
                use = self._uses.pop(block.tool_use_id, None)
                if check is None and not block.is_error and block.tool_use_id not in self._others:
                    _logger.error("the Claude program ran %s without our hooks", block.tool_use_id)
                if use is not None:
                    said = str(_plain(block.content))
                    await self._end(use, said, said if block.is_error else None)

    async def messages(self) -> AsyncIterator[Message]:
        """Yield the messages as they come, until the stream ends."""
        while not isinstance(message := await self._messages.get(), _End):
            yield message
        self._messages.put_nowait(message)  # for the next reader
        if message.error is not None:
            raise message.error

    def stop(self) -> None:
        """Let no call begin any more, and kill a program that is in the middle of one."""
        self._closing = True
        if self._uses:
            self._processes.kill()  # first: it must not write after the rollback

    async def _abort(self) -> None:
        """Roll back what is under way, once the program and all that it started are gone."""
        self._processes.kill()
        while self._uses:
            _, use = self._uses.popitem()
            await self._end(use, error="The run ended before the tool did")

    async def close(self) -> None:
        """End the run, in whatever state it is; it goes on if the caller is cancelled meanwhile."""
        await asyncio.shield(asyncio.get_running_loop().create_task(self._close()))

    async def _close(self) -> None:
        self.stop()
        try:
            if self._reader is not None:
                if not self._reader.cancelling():  # the SDK does not clean up if cancelled twice
                    self._reader.cancel()
                await asyncio.wait([self._reader])
        finally:  # also when the event loop is shut down meanwhile
            try:
                await self._abort()
            finally:
                self._bridge.close()


class ArgumentsEdited(Suspended):
    """The arguments of an admitted call were edited: it is made again."""


class Deferred(Suspended):
    """An admitted call was deferred: the session ends, and runs it when it is resumed."""


@dataclass(frozen=True, slots=True)
class _End:
    """Ends the stream of messages."""

    error: Exception | None


def _decision(
    decision: str | None, reason: str = "", edited: Input | None = None
) -> dict[str, Any]:
    """Return what a PreToolUse hook says; without a decision, the program's own rules hold."""
    said: dict[str, Any] = {"hookEventName": "PreToolUse"}
    if edited is not None:
        said["updatedInput"] = edited
    if decision is not None:
        said["permissionDecision"] = decision
    if reason:
        said["permissionDecisionReason"] = reason
    return {"hookSpecificOutput": said}


def _context(event: str, text: str) -> Any:
    more = {"hookEventName": event, "additionalContext": text}
    return {"hookSpecificOutput": more} if text else {}


def _plain(answer: object) -> object:
    """Return the text of content blocks; other answers as they are."""
    if not isinstance(answer, list):
        return answer
    blocks = cast("list[Any]", answer)
    return "\n".join(str(each.get("text", each.get("type"))) for each in blocks)


def _is_native(name: str) -> bool:
    return not name.startswith("mcp__")


def _preview(params: Input, *, context: ToolContext) -> CallPreview:
    """Say what rules for approval look at."""
    command, path = params.get("command"), params.get("path")
    return CallPreview(
        command=plain_words(command) if isinstance(command, str) else (),
        script="command",
        paths=(path,) if isinstance(path, str) else (),
    )


def _directory_of(registry: ToolRegistry) -> Path | None:
    """Return the directory that a registry was made with, if any."""
    try:
        return registry.workspace.root
    except LookupError:
        return None


def _servers_here(options: ClaudeAgentOptions) -> list[str]:
    """Return the MCP servers in this process, by the names that the program gives them."""
    servers = options.mcp_servers if isinstance(options.mcp_servers, dict) else {}
    here = [name for name, each in servers.items() if each.get("type") == "sdk"]
    return [re.sub(r"[^a-zA-Z0-9_-]", "_", name) for name in here]


def _with_session(options: ClaudeAgentOptions) -> ClaudeAgentOptions:
    """Return options with an id for a new session, so that resuming it continues our run."""
    if options.session_id or options.continue_conversation:
        return options
    if options.resume and not options.fork_session:
        return options
    return replace(options, session_id=str(uuid.uuid4()))


def _title(prompt: Prompt | None) -> str:
    return prompt.strip().partition("\n")[0][:80] if isinstance(prompt, str) else ""
