"""Claude, through the Claude Agent SDK and the program that it carries.

The program has a loop of its own. Here it is held on a leash: it asks the model, we take the turn,
and it waits until the pipeline has answered. Our tools reach it as an MCP server in this process,
so their answers are those of every other adapter. Its own tools (Write, Bash and so on) are calls
like any other: the pipeline admits them, the program runs them, and the pipeline keeps or undoes
what they changed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from weakincentives.adapters.base import Adapter
from weakincentives.budget import TokenUsage
from weakincentives.call import ToolCall, new_call_id
from weakincentives.errors import (
    MissingExtra,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
)
from weakincentives.filesystem import Filesystem
from weakincentives.logs import get_logger
from weakincentives.prompt.structured_output import output_instructions
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.runtime.conversation import Message, ModelRequest, ModelTurn, StopReason
from weakincentives.runtime.events import ToolInvoked

if TYPE_CHECKING:
    from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient
    from mcp.server import Server

    from weakincentives.prompt.prompt import RenderedPrompt
    from weakincentives.runtime.evaluation import Model

__all__ = ["ClaudeAgentSDKAdapter"]

PermissionMode = Literal["default", "acceptEdits", "plan", "bypassPermissions", "dontAsk", "auto"]

_logger = get_logger(__name__)

_SERVER = "wink"
_PREFIX = f"mcp__{_SERVER}__"
_LONG = 24 * 3600
"""Seconds that a hook or a tool may take: our own limits end it before."""
_MARK = "WINK_CLAUDE_RUN"
"""The variable by which the program and all that it starts are known."""
_READING = frozenset({"Glob", "Grep", "LS", "NotebookRead", "Read"})
"""Native tools that change no file."""
_STOP_REASONS: dict[str | None, StopReason] = {
    "tool_use": "tool_use",
    "max_tokens": "max_tokens",
    "refusal": "refusal",
}


class ClaudeAgentSDKAdapter(Adapter):
    """Asks Claude through the program of the Claude Agent SDK; one process for each run."""

    name = "claude-agent-sdk"

    def __init__(
        self,
        *,
        model: str | None = None,
        native_tools: Sequence[str] = (),
        cwd: str | Path | None = None,
        permission_mode: PermissionMode = "bypassPermissions",
        max_budget_usd: float | None = None,
        home: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        cli_path: str | Path | None = None,
    ) -> None:
        """Make an adapter; the key is taken from the environment, as the program does.

        Args:
            model: As the provider names it; the program's own default where it is not given.
            native_tools: Tools of the program to offer, such as ``"Read"``, ``"Write"``,
                ``"Edit"`` and ``"Bash"``. Each is a call through the pipeline, under its name in
                lower case: policies of the prompt hold, and what a failed one changed in the
                workspace is undone. None by default.
            cwd: Where the program works: by default the workspace that is bound as Filesystem,
                or an empty directory.
            permission_mode: Of the program; by default it asks nobody, since the pipeline decides.
            max_budget_usd: What a run may cost, as the program reckons.
            home: The program's home and settings: by default an empty directory for each run, so
                that nothing of the user's own set-up has a say.
            env: More variables for the program.
            cli_path: Another program than the one that the SDK carries.
        """
        self.model = model
        self.native_tools = tuple(native_tools)
        self.cwd = cwd
        self.permission_mode: PermissionMode = permission_mode
        self.max_budget_usd = max_budget_usd
        self.home = home
        self.env = dict(env or {})
        self.cli_path = cli_path

    def begin_run(self) -> Model:
        return _Program(self)

    async def complete(self, request: ModelRequest) -> ModelTurn:
        """Ask for one turn with a program that lives no longer than that."""
        program = _Program(self)
        try:
            return await program.complete(request)
        finally:
            await program.end_run()


class _Program:
    """The program, for one run."""

    name = ClaudeAgentSDKAdapter.name
    needs_loop = True

    def __init__(self, adapter: ClaudeAgentSDKAdapter) -> None:
        self._adapter = adapter
        self.model = adapter.model
        self.provider_tools = tuple(self._native_tool(name) for name in adapter.native_tools)
        self._client: ClaudeSDKClient | None = None
        self._loop: asyncio.AbstractEventLoop
        self._directory = ""
        self._mark = uuid.uuid4().hex
        self._own_home: str | None = None
        self._cleanup: list[Callable[[], object]] = []
        self._reader: asyncio.Task[None] | None = None
        self._turns: asyncio.Queue[ModelTurn | ProviderError] = asyncio.Queue()
        self._calls: dict[str, _Call] = {}
        """By the program's own id of the tool use."""
        self._rendered: RenderedPrompt | None = None
        self._tools_changed: Callable[[], Any] | None = None
        self._stop: asyncio.Future[str | None] | None = None
        """What the Stop hook waits for: why to go on, or None for the end."""
        self._on_text: Callable[[str], None] | None = None

    # What a run asks

    async def complete(self, request: ModelRequest) -> ModelTurn:
        self._on_text = request.on_text
        if self._client is None:
            await self._start(request)
        else:
            await self._go_on(request)
        turn = await self._turns.get()
        if isinstance(turn, ProviderError):
            await self.end_run()  # asked again, a new program is told what was said so far
            raise turn
        return turn

    async def end_run(self) -> None:
        """Let the program end, and make sure that it has, with all that it started."""
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(None)
        client, self._client = self._client, None
        for call in self._calls.values():
            call.break_off()
        self._calls.clear()
        if self._reader is not None:
            self._reader.cancel()
        if client is not None:
            _kill_marked(self._mark)
            with suppress(Exception):  # it was killed: how it complains does not matter
                await client.disconnect()
        while self._cleanup:
            self._cleanup.pop()()

    # Starting it, and going on

    async def _start(self, request: ModelRequest) -> None:
        try:
            from claude_agent_sdk import ClaudeSDKClient
        except ImportError as error:
            raise MissingExtra("claude-agent-sdk", "claude-agent-sdk") from error
        self._loop = asyncio.get_running_loop()
        self._rendered = request.prompt
        self._directory = self._working_directory(request)
        self._turns = asyncio.Queue()
        if request.session is not None:
            self._cleanup.append(request.session.dispatcher.subscribe(ToolInvoked, self._ended))
        client = ClaudeSDKClient(self._options(request))
        try:
            await client.connect()
            await client.query(_as_prompt(request.messages))
        except Exception as error:
            raise ProviderUnavailable(f"the Claude program did not start: {error}") from error
        self._client = client
        self._reader = asyncio.get_running_loop().create_task(self._read(client))

    def _options(self, request: ModelRequest) -> ClaudeAgentOptions:
        from claude_agent_sdk import ClaudeAgentOptions, HookMatcher

        adapter = self._adapter
        system = request.prompt.text
        if request.output_type is not None:
            system = f"{system}\n\n{output_instructions(request.output_type)}"
        home = str(adapter.home or self._temporary("home"))
        hooks: dict[Any, list[HookMatcher]] = {
            event: [HookMatcher(hooks=[hook], timeout=_LONG, on_failure="block")]
            for event, hook in (
                ("PreToolUse", self._before_tool),
                ("PostToolUse", self._after_tool),
                ("PostToolUseFailure", self._after_tool),
            )
        }
        hooks["Stop"] = [HookMatcher(hooks=[self._at_stop], timeout=_LONG)]
        return ClaudeAgentOptions(
            model=adapter.model,
            system_prompt=system,
            tools=list(adapter.native_tools),
            mcp_servers={_SERVER: {"type": "sdk", "name": _SERVER, "instance": self._server()}},
            strict_mcp_config=True,
            setting_sources=[],
            permission_mode=adapter.permission_mode,
            max_budget_usd=adapter.max_budget_usd,
            cwd=self._directory,
            cli_path=adapter.cli_path,
            hooks=hooks,
            include_partial_messages=True,
            verbatim_prompts=True,
            env={
                "HOME": home,
                "CLAUDE_CONFIG_DIR": home,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_MAX_RETRIES": "0",  # the run asks again, and minds its deadline
                "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
                "ENABLE_TOOL_SEARCH": "false",
                "MCP_TOOL_TIMEOUT": str(_LONG * 1000),
                **({"IS_SANDBOX": "1"} if _is_root() else {}),
                **adapter.env,
                _MARK: self._mark,
            },
            stderr=lambda line: _logger.debug("claude: %s", line),
        )

    def _temporary(self, name: str) -> str:
        place = tempfile.mkdtemp(prefix=f"wink-claude-{name}-")
        self._cleanup.append(lambda: shutil.rmtree(place, ignore_errors=True))
        return place

    def _working_directory(self, request: ModelRequest) -> str:
        if self._adapter.cwd is not None:
            return str(self._adapter.cwd)
        prompt = None if request.session is None else request.session.prompt
        files = None if prompt is None else prompt.resources.find(Filesystem)
        root = getattr(files, "root", None)
        return self._temporary("work") if root is None else str(root)

    async def _go_on(self, request: ModelRequest) -> None:
        """Give the program what it waits for: the answers to its calls, or why to go on."""
        news = _since_the_model_spoke(request.messages)
        extra = self._what_changed(request.prompt)
        answers = [message for message in news if message.role == "tool"]
        by_id = {call.call_id: call for call in self._calls.values()}
        for place, message in enumerate(answers, 1):
            text = message.text
            if extra and place == len(answers):
                text = f"{text}\n\n{extra}"
            call = by_id.get(message.call_id)
            if call is not None:
                call.answer_with(text)
        words = [message.text for message in news if message.role == "user"]
        if words and self._stop is not None and not self._stop.done():
            self._stop.set_result("\n\n".join(words))

    def _what_changed(self, rendered: RenderedPrompt) -> str:
        """Note what is offered now; return what the model must be told of it."""
        before, self._rendered = self._rendered, rendered
        assert before is not None
        if before.tools != rendered.tools and self._tools_changed is not None:
            notify = self._tools_changed()
            task = asyncio.ensure_future(notify)
            self._cleanup.append(task.cancel)
        if before.summarized == rendered.summarized:
            return ""
        return f"The instructions read now:\n\n{rendered.text}"

    # What the program tells

    async def _read(self, client: ClaudeSDKClient) -> None:
        from claude_agent_sdk import AssistantMessage, ResultMessage, StreamEvent, UserMessage

        turn = _TurnBuilder()
        failure: ProviderError | None = None
        try:
            async for message in client.receive_messages():
                if isinstance(message, StreamEvent) and message.parent_tool_use_id is None:
                    done = turn.add(message.event, self._heard)
                    if done:
                        self._take(turn)
                        turn = _TurnBuilder()
                elif isinstance(message, UserMessage):
                    self._saw_results(message.content)
                elif isinstance(message, AssistantMessage) and message.error is not None:
                    failure = _failure(message.error, _text_of(message.content))
                elif isinstance(message, ResultMessage):
                    if failure is None and message.is_error:
                        failure = _failed_result(message)
                    if failure is not None or turn.is_begun:
                        await self._turns.put(failure or _cut_off())
                    turn, failure = _TurnBuilder(), None
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self._turns.put(ProviderUnavailable(f"the Claude program failed: {error}"))
        else:
            await self._turns.put(ProviderUnavailable("the Claude program has ended"))

    def _heard(self, text: str) -> None:
        if self._on_text is not None:
            self._on_text(text)

    def _take(self, turn: _TurnBuilder) -> None:
        """Hand a turn to the run, with its calls under ids of our own."""
        calls: list[ToolCall] = []
        for use in turn.uses:
            call = self._call(use.id)
            name, params = use.name.removeprefix(_PREFIX), use.params()
            if name == use.name:
                name, params = name.lower(), self._with_path(params)
            calls.append(ToolCall(name, params, call.call_id))
        if not calls:
            self._stop = asyncio.get_running_loop().create_future()
        self._turns.put_nowait(
            ModelTurn(
                text=turn.text,
                tool_calls=tuple(calls),
                stop_reason=_STOP_REASONS.get(turn.stop_reason, "end_turn"),
                usage=turn.usage,
                model=turn.model,
            )
        )

    def _with_path(self, params: object) -> object:
        """Return a native tool's arguments with the path as policies know it: in the workspace."""
        if not isinstance(params, dict):
            return params
        given = cast("dict[str, object]", params)
        place = given.get("file_path")
        if isinstance(place, str) and Path(place).is_relative_to(self._directory):
            return {**given, "path": str(Path(place).relative_to(self._directory))}
        return given

    def _call(self, tool_use_id: str) -> _Call:
        call = self._calls.get(tool_use_id)
        if call is None:
            call = self._calls[tool_use_id] = _Call(new_call_id())
        return call

    def _saw_results(self, content: object) -> None:
        """A call that the program answered by itself has ended, too: it was no use of a hook."""
        from claude_agent_sdk import ToolResultBlock

        for block in _blocks(content):
            if isinstance(block, ToolResultBlock) and block.tool_use_id in self._calls:
                self._calls[block.tool_use_id].end(
                    success=not block.is_error, said=_text_of(block.content)
                )

    # Hooks

    async def _before_tool(self, told: Any, tool_use_id: str | None, _: object) -> Any:
        """Admit a native tool when the pipeline does; ours are asked about in their call."""
        if told["tool_name"].startswith(_PREFIX) or tool_use_id is None:
            return {}
        denied = await self._call(tool_use_id).admitted
        decision = {"permissionDecision": "allow"}
        if denied is not None:
            decision = {"permissionDecision": "deny", "permissionDecisionReason": denied}
        return {"hookSpecificOutput": {"hookEventName": "PreToolUse", **decision}}

    async def _after_tool(self, told: Any, tool_use_id: str | None, _: object) -> Any:
        """Wait until what a native tool changed is kept or undone; say so when it is undone."""
        if told["tool_name"].startswith(_PREFIX) or tool_use_id is None:
            return {}
        event, call = told["hook_event_name"], self._call(tool_use_id)
        failed = event == "PostToolUseFailure"
        call.end(success=not failed, said=told.get("error") or told.get("tool_response"))
        result = await call.result
        if result is None or result.success or not result.metadata.undone:
            return {}
        undone = ", ".join(result.metadata.undone)
        said = {"hookEventName": event, "additionalContext": f"It failed. Rolled back: {undone}."}
        return {"hookSpecificOutput": said}

    async def _at_stop(self, told: Any, _id: str | None, _: object) -> Any:
        if self._stop is None:
            return {}
        reason = await self._stop
        return {} if reason is None else {"decision": "block", "reason": reason}

    # Native tools, as the pipeline sees them

    def _native_tool(self, name: str) -> Tool[Any, Any]:
        async def wait(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            for earlier in self._calls.values():
                earlier.answer_with(None)  # the program may wait for it before it runs this one
            call = next(c for c in self._calls.values() if c.call_id == context.call_id)
            try:
                return await call.run_by_the_program()
            except asyncio.CancelledError:
                _kill_marked(self._mark)  # before anything is undone: it must not write after that
                raise

        return Tool.from_schema(
            name=name.lower(),
            description=f"{name}, a tool of the Claude program.",
            schema={"type": "object"},
            handler=wait,
            reach="read" if name in _READING else None,
            writes="api" if name in _READING else "external",
            concurrent=False,
        )

    def _ended(self, record: ToolInvoked) -> None:
        """The pipeline is done with a call, maybe in another thread."""
        self._loop.call_soon_threadsafe(self._settle, record)

    def _settle(self, record: ToolInvoked) -> None:
        for call in self._calls.values():
            if call.call_id == record.call_id:
                call.settle(record.result)

    # Our tools, as the program sees them

    def _server(self) -> Server:
        from mcp.server import Server
        from mcp.types import CallToolResult, ListToolsResult, TextContent, ToolAnnotations
        from mcp.types import Tool as McpTool

        async def list_tools(context: Any, params: Any) -> ListToolsResult:
            self._tools_changed = context.session.send_tool_list_changed
            assert self._rendered is not None
            return ListToolsResult(
                tools=[
                    McpTool(
                        name=tool.name,
                        description=tool.description,
                        input_schema=tool.parameters,
                        annotations=ToolAnnotations(read_only_hint=tool.reach == "read"),
                    )
                    for tool in self._rendered.tools
                    if tool.handler is not None
                ]
            )

        async def call_tool(context: Any, params: Any) -> CallToolResult:
            meta: Mapping[str, str] = params.meta or {}
            text = await self._call(meta["claudecode/toolUseId"]).answer
            return CallToolResult(content=[TextContent(type="text", text=text)], is_error=False)

        return Server(_SERVER, on_list_tools=list_tools, on_call_tool=call_tool)


class _Call:
    """One tool use, between the program and the pipeline."""

    def __init__(self, call_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.call_id = call_id
        self.answer: asyncio.Future[str] = loop.create_future()
        """What our tool says."""
        self.admitted: asyncio.Future[str | None] = loop.create_future()
        """Whether a native tool may run: None, or why not."""
        self.ended: asyncio.Future[ToolResult[Any]] = loop.create_future()
        """How a native tool ended in the program."""
        self.result: asyncio.Future[ToolResult[Any] | None] = loop.create_future()
        """What the pipeline made of it."""
        self._rendered: str | None = None

    def settle(self, result: ToolResult[Any]) -> None:
        """Take what the pipeline says; what it refused must not run."""
        self._rendered = result.render()
        _give(self.admitted, self._rendered)
        _give(self.result, result)

    def answer_with(self, text: str | None) -> None:
        """Let our tool say this, or else what the pipeline said, where it has spoken."""
        if text is None:
            text = self._rendered
        if text is not None:
            _give(self.answer, text)

    def end(self, *, success: bool, said: object) -> None:
        """Note how the program's own run of a native tool ended; the first word counts."""
        if success:
            _give(self.ended, ToolResult.ok(said))
        else:
            _give(self.ended, ToolResult.error(said if isinstance(said, str) else repr(said)))

    def break_off(self) -> None:
        """Let go of everybody who waits: the program is about to end."""
        self.end(success=False, said="The Claude program ended before the tool did")
        _give(self.admitted, "The run is over")
        _give(self.answer, "The run is over")
        _give(self.result, None)

    async def run_by_the_program(self) -> ToolResult[Any]:
        """Let the program run a native tool, and return how that ended."""
        _give(self.admitted, None)
        return await self.ended


def _give(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


# A turn, from the provider's stream


class _Use:
    """A tool use as it comes in."""

    def __init__(self, block: Mapping[str, Any]) -> None:
        self.id: str = block["id"]
        self.name: str = block["name"]
        self._json = ""

    def add(self, piece: str) -> None:
        self._json += piece

    def params(self) -> object:
        """Return the arguments; as text where they are not JSON: the pipeline refuses them."""
        try:
            return json.loads(self._json or "{}")
        except ValueError:
            return self._json


class _TurnBuilder:
    """Puts a turn together from the events of its stream."""

    def __init__(self) -> None:
        self.is_begun = False
        self.text = ""
        self.uses: list[_Use] = []
        self.stop_reason: str | None = None
        self.usage = TokenUsage()
        self.model = ""
        self._by_index: dict[int, _Use] = {}

    def add(self, event: Mapping[str, Any], heard: Callable[[str], None]) -> bool:
        """Take one event; returns whether the turn is whole."""
        match event["type"]:
            case "message_start":
                self.is_begun = True
                self.model = event["message"]["model"]
                self.usage = _usage(event["message"].get("usage") or {}, 0)
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                use = self._by_index[event["index"]] = _Use(event["content_block"])
                self.uses.append(use)
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                self.text += event["delta"]["text"]
                heard(event["delta"]["text"])
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                self._by_index[event["index"]].add(event["delta"]["partial_json"])
            case "message_delta":
                self.stop_reason = event["delta"].get("stop_reason")
                self.usage = _usage(event.get("usage") or {}, self.usage.input_tokens)
            case _:
                pass
        return event["type"] == "message_stop"


def _usage(usage: Any, input_tokens: int) -> TokenUsage:
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    read = sum(usage.get(kind) or 0 for kind in kinds)
    return TokenUsage(
        input_tokens=max(read, input_tokens), output_tokens=usage.get("output_tokens") or 0
    )


# What goes wrong


def _failure(kind: str, text: str) -> ProviderError:
    if kind == "rate_limit":
        return ProviderThrottled(text)
    if kind in ("authentication_failed", "billing_error", "invalid_request"):
        return ProviderRejected(text)
    return ProviderUnavailable(text)


def _failed_result(message: Any) -> ProviderError:
    text = "; ".join(message.errors or ()) or message.result or message.subtype
    status = message.api_error_status
    if status == 429:
        return ProviderThrottled(text)
    if status is not None and 400 <= status < 500:
        return ProviderRejected(text)
    return ProviderUnavailable(text)


def _cut_off() -> ProviderError:
    return ProviderUnavailable("the provider broke off in the middle of its answer")


def _text_of(content: object) -> str:
    """Return the text of blocks, or of a text."""
    if isinstance(content, str):
        return content
    return "".join(_block_text(block) for block in _blocks(content))


def _block_text(block: Any) -> str:
    if isinstance(block, dict):
        return str(cast("dict[str, object]", block).get("text", ""))
    return str(getattr(block, "text", ""))


def _blocks(content: object) -> list[Any]:
    return cast("list[Any]", content) if isinstance(content, list) else []


# Messages


def _since_the_model_spoke(messages: Sequence[Message]) -> list[Message]:
    news: list[Message] = []
    for message in reversed(messages):
        if message.role == "model":
            break
        news.append(message)
    return news[::-1]


def _as_prompt(messages: Sequence[Message]) -> str:
    """Return the words that the program begins with; all of a conversation that goes on."""
    if len(messages) == 1:
        return messages[0].text
    lines = ["This conversation goes on. What was said so far:"]
    for message in messages:
        match message.role:
            case "tool":
                lines.append(f"[tool answered] {message.text}")
            case "model":
                wanted = [
                    f"{c.name}({json.dumps(c.params, default=str)})" for c in message.tool_calls
                ]
                called = f" [called {', '.join(wanted)}]" if wanted else ""
                lines.append(f"[you] {message.text}{called}")
            case "user":
                lines.append(f"[user] {message.text}")
    return "\n\n".join([*lines, "Go on from there."])


# The process


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _kill_marked(mark: str) -> None:
    """Kill the program and all that it started and left behind, by the mark they inherited."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):  # none, where there is no such thing
        with suppress(OSError, ValueError):
            if wanted in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)
