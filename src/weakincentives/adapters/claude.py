"""Claude, through the Claude Agent SDK and the program that it bundles.

The program has its own loop; here it stops after each turn of the model until the pipeline has
answered. Our tools reach it as an MCP server in this process, so their answers are the same as
through every other adapter. Its own tools (Write, Bash and so on) are ordinary calls: the pipeline
admits them, the program runs them, and the pipeline commits or rolls back their changes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.catalog import known_price
from weakincentives.adapters.claude_program import (
    AGENTS,
    CALL_ID,
    LONG,
    MUCH,
    PATIENT,
    PREFIX,
    READING,
    SERVER,
    Processes,
    as_mcp_tool,
    outside,
    with_path,
)
from weakincentives.adapters.media import IMAGES, PDF, MediaFilter, in_words, mcp_block
from weakincentives.adapters.schema import json_object
from weakincentives.core.budget import TokenPrice, TokenUsage
from weakincentives.core.call import ToolCall, new_call_id
from weakincentives.core.logs import get_logger, without_secrets
from weakincentives.core.media import Media
from weakincentives.core.programs import find_program, missing_program, safe_path
from weakincentives.errors import (
    BudgetExceededError,
    MissingExtra,
    PromptEvaluationError,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
)
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.prompt.structured_output import output_instructions
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.runtime.conversation import Message, ModelRequest, ModelTurn, StopReason
from weakincentives.runtime.window import read_result_tool
from weakincentives.session.events import ToolInvoked
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient
    from mcp.server import Server

    from weakincentives.prompt.prompt import RenderedPrompt
    from weakincentives.runtime.run import Model

PermissionMode = Literal["default", "acceptEdits", "plan", "bypassPermissions", "dontAsk", "auto"]

_logger = get_logger(__name__)

_STOP_REASONS: dict[str | None, StopReason] = {
    "tool_use": "tool_use",
    "max_tokens": "max_tokens",
    "refusal": "refusal",
}


class ClaudeAgentSDKAdapter(Adapter):
    """Asks Claude through the program of the Claude Agent SDK, one process per run."""

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
        """Create an adapter; the program takes the key from the environment.

        Args:
            model: The provider's name for the model. Default: the program's own.
            native_tools: Tools of the program to offer, such as ``"Read"``, ``"Write"``,
                ``"Edit"`` and ``"Bash"``. Each is a call through the pipeline, under its name in
                lower case: policies apply, and a failed call is rolled back. Tools that write
                need a HostFilesystem. None by default.
            cwd: The program's working directory. Default: the workspace bound as Filesystem,
                or an empty directory.
            permission_mode: The program's; by default it never asks, since the pipeline decides.
            max_budget_usd: The maximum cost of a run, as the program computes it.
            home: The program's home and settings. Default: an empty directory for each run, so
                that the user's own settings do not apply.
            env: Extra environment variables for the program.
            cli_path: Another program than the one that the SDK bundles.
        """
        if agents := sorted(AGENTS.intersection(native_tools)):
            raise ValueError(
                f"{agents[0]} starts agents whose calls do not reach the pipeline: "
                "give the model a tool that runs an adapter instead"
            )
        self.model = model or ""
        self.native_tools = tuple(native_tools)
        self.cwd = cwd
        self.permission_mode: PermissionMode = permission_mode
        self.max_budget_usd = max_budget_usd
        self.home = home
        self.env = dict(env or {})
        self.cli_path = cli_path
        self.media = MediaFilter((*IMAGES, *PDF))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{f' {self.model}' if self.model else ''}>"

    def begin_run(self) -> Model:
        return _Program(self)

    def price(self) -> TokenPrice | None:
        return known_price(self.model) if self.model else None

    async def complete(self, request: ModelRequest) -> ModelTurn:
        """Ask for one turn, with a program of its own."""
        program = _Program(self)
        try:
            return await program.complete(request)
        finally:
            await program.end_run()


class _Program(Adapter):
    """One run of the program, which compacts the conversation itself."""

    name = ClaudeAgentSDKAdapter.name
    manages_context = True

    def __init__(self, adapter: ClaudeAgentSDKAdapter) -> None:
        self._adapter = adapter
        self.model = adapter.model
        self.provider_tools = tuple(map(self._native_tool, adapter.native_tools))
        self._client: ClaudeSDKClient | None = None
        self._loop: asyncio.AbstractEventLoop
        self._directory = ""
        self._root = ""
        """The workspace; paths in calls are relative to it."""
        self._processes = Processes()
        self._cleanup: list[Callable[[], object]] = []
        self._reader: asyncio.Task[None] | None = None
        self._turns: asyncio.Queue[ModelTurn | PromptEvaluationError] = asyncio.Queue()
        self._calls: dict[str, _Call] = {}
        """By the program's id of the tool use."""
        self._rendered: RenderedPrompt | None = None
        self._tools_changed: Callable[[], Any] | None = None
        self._words: asyncio.Queue[str | None] = asyncio.Queue()
        """What the Stop hook waits for: the reason to continue, or None to stop."""
        self._on_text: Callable[[str], None]

    async def complete(self, request: ModelRequest) -> ModelTurn:
        return await self._adapter.media.ask(request, self._complete)

    async def _complete(self, request: ModelRequest) -> ModelTurn:
        self._on_text = request.on_text or (lambda _: None)
        if self._client is None:
            await self._start(request)
        else:
            await self._go_on(request)
        turn = await self._turns.get()
        if isinstance(turn, PromptEvaluationError):
            await self.end_run()  # a retry starts a new program with the conversation so far
            raise turn
        return turn

    def price(self) -> TokenPrice | None:
        return self._adapter.price()

    async def end_run(self) -> None:
        """Stop the program and all processes that it started."""
        client, self._client = self._client, None
        reader, self._reader = self._reader, None
        if client is not None:
            self._break_off()
        self._words.put_nowait(None)
        try:
            if reader is not None:
                reader.cancel()
                await asyncio.wait([reader])
            if client is not None:
                with suppress(Exception):  # it was killed
                    await client.disconnect()
        finally:
            while self._cleanup:
                self._cleanup.pop()()

    def _break_off(self) -> None:
        """Kill the program, then release everything that waits for it."""
        self._processes.kill()  # first: it must not write after the rollback
        for call in self._calls.values():
            call.break_off()
        self._calls.clear()

    # Starting and continuing

    async def _start(self, request: ModelRequest) -> None:
        try:
            from claude_agent_sdk import ClaudeSDKClient
        except ImportError as error:
            raise MissingExtra("claude-agent-sdk", "claude-agent-sdk") from error
        self._loop = asyncio.get_running_loop()
        self._rendered = request.prompt
        self._directory = self._working_directory(request)
        self._turns, self._words = asyncio.Queue(), asyncio.Queue()
        self._tools_changed = None
        if request.session is not None:
            self._cleanup.append(request.session.dispatcher.subscribe(ToolInvoked, self._ended))
        client = self._client = ClaudeSDKClient(self._options(request))
        try:
            await client.connect()
            await client.query(_as_prompt(request.messages))
        except Exception as error:
            await self.end_run()
            why = without_secrets(f"the Claude program did not start: {error}")
            raise ProviderUnavailable(why) from error
        self._reader = asyncio.get_running_loop().create_task(self._read(client))

    def _options(self, request: ModelRequest) -> ClaudeAgentOptions:
        from claude_agent_sdk import ClaudeAgentOptions, HookMatcher

        adapter = self._adapter
        system = request.prompt.text
        if request.output_type is not None:
            system = f"{system}\n\n{output_instructions(request.output_type)}"
        home = str(adapter.home or self._temporary("home"))
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0
        hooks: dict[Any, list[HookMatcher]] = {
            event: [HookMatcher(hooks=[hook], timeout=LONG, on_failure="block")]
            for event, hook in (
                ("PreToolUse", self._before_tool),
                ("PostToolUse", self._after_tool),
                ("PostToolUseFailure", self._after_tool),
            )
        }
        hooks["Stop"] = [HookMatcher(hooks=[self._at_stop], timeout=LONG)]
        return ClaudeAgentOptions(
            model=adapter.model or None,
            system_prompt=system,
            tools=list(adapter.native_tools),
            mcp_servers={SERVER: {"type": "sdk", "name": SERVER, "instance": self._server()}},
            strict_mcp_config=True,
            setting_sources=[],
            permission_mode=adapter.permission_mode,
            max_budget_usd=adapter.max_budget_usd,
            cwd=self._directory,
            cli_path=_program(adapter.cli_path),
            hooks=hooks,
            include_partial_messages=True,
            max_buffer_size=100 * MUCH,
            verbatim_prompts=True,
            env={
                # Its Bash needs the project's programs; without it, the program runs only its own.
                **({} if "Bash" in adapter.native_tools else {"PATH": safe_path()}),
                "HOME": home,
                "CLAUDE_CONFIG_DIR": home,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_MAX_RETRIES": "0",  # the run retries: it knows the deadline
                "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
                "ENABLE_TOOL_SEARCH": "false",
                **PATIENT,
                **({"IS_SANDBOX": "1"} if is_root else {}),
                **adapter.env,
                **self._processes.environment,
            },
            stderr=lambda line: _logger.debug("claude: %s", without_secrets(line)),
        )

    def _temporary(self, name: str) -> str:
        place = tempfile.mkdtemp(prefix=f"wink-claude-{name}-")
        self._cleanup.append(lambda: shutil.rmtree(place, ignore_errors=True))
        return place

    def _working_directory(self, request: ModelRequest) -> str:
        """Return the working directory; tools that write need one that can be rolled back."""
        prompt = None if request.session is None else request.session.prompt
        files = None if prompt is None else prompt.resources.find(Filesystem)
        root = files.root if isinstance(files, HostFilesystem) else None
        given = self._adapter.cwd
        place = root if given is None else Path(os.path.realpath(given))
        writing = [name for name in self._adapter.native_tools if name not in READING]
        if writing and (root is None or place is None or not place.is_relative_to(root)):
            raise PromptEvaluationError(
                f"Changes that {writing[0]} makes in {place or 'a temporary directory'} could not "
                "be rolled back: bind a HostFilesystem over the program's working directory"
            )
        directory = self._temporary("work") if place is None else str(place)
        self._root = str(root or directory)
        return directory

    async def _go_on(self, request: ModelRequest) -> None:
        """Give the program the answers to its calls, or the reason to continue."""
        since = takewhile(lambda message: message.role != "model", reversed(request.messages))
        news = list(since)[::-1]
        answers = [message for message in news if message.role == "tool"]
        # The program takes a message only when it has stopped: until then, it goes with an answer.
        who = "The user says: " if answers else ""
        words = [f"{who}{_in_words(message)}" for message in news if message.role == "user"]
        words += filter(None, [self._what_changed(request.prompt)])
        for message in answers:
            text = _in_words(message, IMAGES)
            if message is answers[-1]:
                text = "\n\n".join([text, *words])
            if (call := self._by_our_id(message.call_id)) is not None:
                call.answer_with(text)
        if words and not answers:
            self._words.put_nowait("\n\n".join(words))

    def _what_changed(self, rendered: RenderedPrompt) -> str:
        """Remember the new prompt; return what to tell the model about it."""
        before, self._rendered = self._rendered, rendered
        assert before is not None
        if before.tools != rendered.tools and self._tools_changed is not None:
            task = asyncio.ensure_future(self._tools_changed())
            self._cleanup.append(task.cancel)
        if before.text == rendered.text:
            return ""
        return f"The instructions have changed:\n\n{rendered.text}"

    # Messages from the program

    async def _read(self, client: ClaudeSDKClient) -> None:
        from claude_agent_sdk import AssistantMessage, ResultMessage, StreamEvent, UserMessage

        turn = _TurnBuilder()
        failure: PromptEvaluationError | None = None
        try:
            async for message in client.receive_messages():
                if isinstance(message, StreamEvent) and message.parent_tool_use_id is None:
                    if turn.add(message.event, self._on_text):
                        self._take(turn)
                        turn = _TurnBuilder()
                elif isinstance(message, UserMessage):
                    self._saw_results(message.content)
                elif isinstance(message, AssistantMessage) and message.error is not None:
                    status = _STATUS_OF_ERROR.get(message.error)
                    failure = _by_status(status, _text_of(message.content))
                elif isinstance(message, ResultMessage):
                    if failure is None and message.is_error:
                        failure = _failed_result(message)
                    if failure is not None or turn.is_begun:
                        why = "the provider ended its answer too early"
                        await self._turns.put(failure or ProviderUnavailable(why))
                    turn, failure = _TurnBuilder(), None
        except Exception as error:
            self._lost(f"the Claude program failed: {error}")
        else:
            self._lost("the Claude program has exited")

    def _lost(self, why: str) -> None:
        """Handle the end of the program, perhaps while a native tool was running."""
        self._break_off()
        self._turns.put_nowait(ProviderUnavailable(without_secrets(why)))

    def _take(self, turn: _TurnBuilder) -> None:
        """Hand a turn to the run, with our own call ids."""
        calls: list[ToolCall] = []
        for use in turn.uses.values():
            call = self._call(use["id"])
            name, params = use["name"].removeprefix(PREFIX), json_object(use["json"])
            if params is None:
                params = use["json"]  # the pipeline refuses it
            if name == use["name"]:
                name, params = name.lower(), with_path(params, self._directory, self._root)
            call.params = params
            calls.append(ToolCall(name, params, call.call_id))
        while not self._words.empty():  # a truncated model continues without a reason
            self._words.get_nowait()
        self._turns.put_nowait(
            ModelTurn(
                text=turn.text,
                tool_calls=tuple(calls),
                stop_reason=_STOP_REASONS.get(turn.stop_reason, "end_turn"),
                usage=turn.usage,
                model=turn.model,
            )
        )

    def _call(self, tool_use_id: str) -> _Call:
        call = self._calls.get(tool_use_id)
        if call is None:
            call = self._calls[tool_use_id] = _Call(new_call_id())
        return call

    def _by_our_id(self, call_id: str) -> _Call | None:
        return next((call for call in self._calls.values() if call.call_id == call_id), None)

    def _saw_results(self, content: object) -> None:
        """End calls that the program answered by itself, without a hook."""
        from claude_agent_sdk import ToolResultBlock

        for block in _blocks(content):
            if isinstance(block, ToolResultBlock) and block.tool_use_id in self._calls:
                self._calls[block.tool_use_id].end(
                    success=not block.is_error, said=_text_of(block.content)
                )

    # Hooks

    async def _before_tool(self, hook_input: Any, tool_use_id: str | None, _: object) -> Any:
        """Admit a native call when the pipeline does; our own tools are admitted when called."""
        if hook_input["tool_name"].startswith(PREFIX) or tool_use_id is None:
            return {}
        call = self._call(tool_use_id)
        decision = {"permissionDecision": "allow"}
        if not await call.admitted:
            reason = await call.answer
            decision = {"permissionDecision": "deny", "permissionDecisionReason": reason}
        return {"hookSpecificOutput": {"hookEventName": "PreToolUse", **decision}}

    async def _after_tool(self, hook_input: Any, tool_use_id: str | None, _: object) -> Any:
        """Wait until a native call is committed or rolled back; add to its answer."""
        if hook_input["tool_name"].startswith(PREFIX) or tool_use_id is None:
            return {}
        event, call = hook_input["hook_event_name"], self._call(tool_use_id)
        failed = event == "PostToolUseFailure"
        call.end(
            success=not failed, said=hook_input.get("error") or hook_input.get("tool_response")
        )
        result = await call.result
        if result is None:
            return {}
        said: list[str] = []
        if not result.success and result.metadata.undone:
            said.append(f"It failed. Rolled back: {', '.join(result.metadata.undone)}.")
        if added := (await call.answer).removeprefix(result.render()).strip():
            said.append(added)  # feedback, or new instructions
        if not said:
            return {}
        more = {"hookEventName": event, "additionalContext": "\n\n".join(said)}
        return {"hookSpecificOutput": more}

    async def _at_stop(self, _hook_input: Any, _id: str | None, _: object) -> Any:
        reason = await self._words.get()
        return {} if reason is None else {"decision": "block", "reason": reason}

    # Native tools in the pipeline

    def _native_tool(self, name: str) -> Tool[Any, Any]:
        async def wait(params: Any, *, context: ToolContext) -> ToolResult[Any]:
            for earlier in self._calls.values():
                earlier.answer_with(None)  # the program may need it before it runs this one
            call = self._by_our_id(context.call_id)
            if call is None:  # of an interrupted run, or not called by the program
                return ToolResult.error("The Claude program does not wait for this call: retry")
            if params != call.params:
                return ToolResult.error(
                    "The Claude program runs this tool with the arguments it was called with: they "
                    "cannot be edited. Call it again with the edited arguments"
                )
            if name not in READING and (why := outside(params)) is not None:
                return ToolResult.error(why)
            try:
                return await call.run_by_the_program()
            except asyncio.CancelledError:
                self._processes.kill()  # it must not write after the rollback
                raise

        return Tool.from_schema(
            name=name.lower(),
            description=f"{name}, a native tool of the Claude program.",
            schema={"type": "object"},
            handler=wait,
            reach="read" if name in READING else None,
            writes="api" if name in READING else "external",
            concurrent=False,
            max_result_chars=None,  # the program shows it
        )

    def _ended(self, record: ToolInvoked) -> None:
        """Pass on a call's end in the pipeline, perhaps from another thread."""
        self._loop.call_soon_threadsafe(self._settle, record)

    def _settle(self, record: ToolInvoked) -> None:
        if (call := self._by_our_id(record.call_id)) is not None:
            offer = None if self._rendered is None else self._rendered.offers.get(record.tool_name)
            most = None if offer is None else offer.tool.max_result_chars
            call.settle(record.result, record.result.render(most))

    # Our tools in the program

    def _server(self) -> Server:
        from mcp.server import Server
        from mcp.types import CallToolResult, ListToolsResult

        async def list_tools(context: Any, params: Any) -> ListToolsResult:
            self._tools_changed = context.session.send_tool_list_changed
            assert self._rendered is not None
            # From the start: a running program does not ask for the list again.
            offered = self._rendered.with_tools([read_result_tool()], ())
            return ListToolsResult(
                tools=[
                    as_mcp_tool(tool, tool.description)
                    for tool in offered.tools
                    if tool.handler is not None
                ]
            )

        async def call_tool(context: Any, params: Any) -> CallToolResult:
            meta: Mapping[str, str] = params.meta or {}
            call = self._call(meta[CALL_ID])
            text = {"type": "text", "text": await call.answer}
            shown = [each for each in call.media if each.media_type in IMAGES]
            media = [mcp_block(each) for each in shown if self._adapter.media.takes(each)]
            return CallToolResult.model_validate({"content": [text, *media], "isError": False})

        return Server(SERVER, on_list_tools=list_tools, on_call_tool=call_tool)


class _Call:
    """One tool use, between the program and the pipeline."""

    def __init__(self, call_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.call_id = call_id
        self.answer: asyncio.Future[str] = loop.create_future()
        """The answer of our tool; for a native tool, additions are at its end."""
        self.admitted: asyncio.Future[bool] = loop.create_future()
        """Whether a native tool may run."""
        self.ended: asyncio.Future[ToolResult[Any]] = loop.create_future()
        """How a native tool ended in the program."""
        self.result: asyncio.Future[ToolResult[Any] | None] = loop.create_future()
        """The pipeline's result."""
        self.params: object = None
        """The arguments of the model."""
        self.media: tuple[Media, ...] = ()
        """Of the answer."""
        self._rendered: str | None = None

    def settle(self, result: ToolResult[Any], text: str) -> None:
        """Take the pipeline's result and its text; a refused call must not run."""
        self._rendered, self.media = text, result.media
        _give(self.admitted, False)
        _give(self.result, result)

    def answer_with(self, text: str | None) -> None:
        """Answer with this text, or with the pipeline's result if there is one."""
        if text is None:
            text = self._rendered
        if text is not None:
            _give(self.answer, text)

    def end(self, *, success: bool, said: object) -> None:
        """Record how a native tool ended in the program; the first report counts."""
        if success:
            _give(self.ended, ToolResult.ok(said))
        else:
            _give(self.ended, ToolResult.error(said if isinstance(said, str) else repr(said)))

    def break_off(self) -> None:
        """Release everything that waits: the program is gone."""
        self.end(success=False, said="The Claude program exited before the tool ended")
        _give(self.admitted, False)
        _give(self.answer, "The run is over")
        _give(self.result, None)

    async def run_by_the_program(self) -> ToolResult[Any]:
        """Let the program run a native tool, and return its result."""
        _give(self.admitted, True)
        return await self.ended


def _give(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


# A turn, from the provider's stream


class _TurnBuilder:
    """Builds a turn from the events of its stream."""

    def __init__(self) -> None:
        self.is_begun = False
        self.text = ""
        self.uses: dict[int, dict[str, Any]] = {}
        """Tool uses by the index of their block; ``json`` has the arguments so far."""
        self.stop_reason: str | None = None
        self.usage = TokenUsage()
        self.model = ""

    def add(self, event: Mapping[str, Any], heard: Callable[[str], None]) -> bool:
        """Add an event; return whether the turn is complete."""
        match event["type"]:
            case "message_start":
                self.is_begun = True
                self.model = event["message"]["model"]
                self.usage = _usage(event["message"].get("usage") or {}, TokenUsage())
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                self.uses[event["index"]] = {**event["content_block"], "json": ""}
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                self.text += event["delta"]["text"]
                heard(event["delta"]["text"])
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                self.uses[event["index"]]["json"] += event["delta"]["partial_json"]
            case "message_delta":
                self.stop_reason = event["delta"].get("stop_reason")
                self.usage = _usage(event.get("usage") or {}, self.usage)
            case _:
                pass
        # After a lost connection the program ends the message itself, without a reason.
        return event["type"] == "message_stop" and self.stop_reason is not None


def _usage(usage: Any, before: TokenUsage) -> TokenUsage:
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    read = sum(usage.get(kind) or 0 for kind in kinds)
    return TokenUsage(
        input_tokens=max(read, before.input_tokens),
        output_tokens=usage.get("output_tokens") or 0,
        cached_tokens=max(usage.get("cache_read_input_tokens") or 0, before.cached_tokens),
    )


# Failures


_STATUS_OF_ERROR = {
    "rate_limit": 429,
    "authentication_failed": 400,
    "billing_error": 400,
    "invalid_request": 400,
}


def _failed_result(message: Any) -> PromptEvaluationError:
    if message.subtype == "error_max_budget_usd":
        return BudgetExceededError(f"Used {message.total_cost_usd} dollars, more than allowed")
    text = "; ".join(message.errors or ()) or message.result or message.subtype
    return _by_status(message.api_error_status, text)


def _by_status(status: int | None, text: str) -> ProviderError:
    kind = ProviderUnavailable
    if status == 429:
        kind = ProviderThrottled
    elif status is not None and 400 <= status < 500:
        kind = ProviderRejected
    return kind(without_secrets(text))


def _text_of(content: object) -> str:
    """Return the text of blocks, which are objects or dicts."""
    if isinstance(content, str):
        return content
    dicts: list[dict[str, Any]] = [
        each if isinstance(each, dict) else vars(each) for each in _blocks(content)
    ]
    return "".join(str(each.get("text", "")) for each in dicts)


def _blocks(content: object) -> list[Any]:
    return cast("list[Any]", content) if isinstance(content, list) else []


def _in_words(message: Message, shown: Sequence[str] = ()) -> str:
    """Return a message with its media in words, but for those types that the program shows."""
    unseen = [each for each in message.media if each.media_type not in shown]
    return "\n\n".join([message.text, *map(in_words, unseen)])


def _program(given: str | Path | None) -> str:
    """Return the program to start: the given one, the SDK's own, or the one in ``PATH``."""
    import claude_agent_sdk

    name = "claude.exe" if os.name == "nt" else "claude"
    bundled = Path(str(claude_agent_sdk.__file__)).parent / "_bundled" / name
    wanted = os.path.abspath(given) if given is not None else str(bundled)
    if given is None and not bundled.is_file():
        wanted = name
    found = find_program(wanted)
    if found is None:
        raise ProviderUnavailable(f"the Claude program did not start: {missing_program(wanted)}")
    return found


def _as_prompt(messages: Sequence[Message]) -> str | AsyncIterator[dict[str, Any]]:
    """Return the first message for the program, with all media of a resumed conversation."""
    text = _as_text(messages)
    blocks = [_block(each) for message in messages for each in message.media]
    if not blocks:
        return text

    async def one() -> AsyncIterator[dict[str, Any]]:
        content = [{"type": "text", "text": text}, *blocks]
        said = {"role": "user", "content": content}
        yield {"type": "user", "message": said, "parent_tool_use_id": None}

    return one()


def _block(media: Media) -> dict[str, Any]:
    source = {"type": "base64", "media_type": media.media_type, "data": media.base64}
    kind = "image" if media.media_type.startswith("image/") else "document"
    return {"type": kind, "source": source}


def _as_text(messages: Sequence[Message]) -> str:
    """Return the user's message; a resumed conversation goes into it."""
    if len(messages) == 1:
        return messages[0].text
    lines: list[str] = []
    for message in messages:
        who = {"tool": "tool answered", "model": "you", "user": "user"}[message.role]
        wanted = [f"{c.name}({json.dumps(c.params, default=str)})" for c in message.tool_calls]
        called = f" [called {', '.join(wanted)}]" if wanted else ""
        lines.append(f"[{who}] {message.text}{called}")
    room = MUCH - len(lines[0])
    newest = [*takewhile(lambda total: total <= room, accumulate(map(len, lines[:0:-1])))]
    lost = len(lines) - 1 - len(newest)
    if lost:
        lines[1 : lost + 1] = [f"({lost} messages are not shown.)"]
    return "\n\n".join(["This conversation continues. So far:", *lines, "Continue from there."])
