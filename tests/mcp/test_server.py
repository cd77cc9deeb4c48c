"""The server in one process with the official client, over both eras of the protocol."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import weakincentives as wink
from weakincentives.errors import Suspended
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.mcp import McpServer
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    SectionVisibility,
    Tool,
    ToolContext,
    ToolExample,
    ToolResult,
)
from weakincentives.runtime import RunContext, SavedSession, Session, ToolInvoked, ToolRegistry

mcp = pytest.importorskip("mcp")

from mcp import Client  # noqa: E402
from mcp.types import CallToolResult  # noqa: E402

Mode = Literal["auto", "legacy"]
ERAS = pytest.mark.parametrize("mode", ["auto", "legacy"])
SECONDS = 240
"""How long anything may take before a test gives up."""


def use(
    server: McpServer, work: Callable[[Client], Awaitable[Any]], mode: Mode = "auto", **options: Any
) -> Any:
    """Let a client of the server do something, and return what it returns."""

    async def run() -> Any:
        async with (
            asyncio.timeout(SECONDS),
            Client(server.protocol, mode=mode, **options) as client,
        ):
            return await work(client)

    with server:
        return asyncio.run(run())


def call(server: McpServer, name: str, **arguments: object) -> CallToolResult:
    return use(server, lambda client: client.call_tool(name, arguments))


def text(result: CallToolResult) -> str:
    return "".join(part.text for part in result.content)  # type: ignore[union-attr]


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, SECONDS)


@dataclass(frozen=True)
class Count:
    value: int = 0


@dataclass(frozen=True)
class FindParams:
    word: str
    """What to look for."""
    limit: int = 10


@dataclass(frozen=True)
class Found:
    places: tuple[str, ...]
    more: bool = False

    def render(self) -> str:
        return "; ".join(self.places)


def find(params: FindParams, *, context: ToolContext) -> ToolResult[Found]:
    if params.word == "nothing":
        return ToolResult.ok(None, "Found nothing")
    if params.word == "secret":
        found: ToolResult[Found] = ToolResult.ok(Found(("here",)), "Found it")
        found.exclude_value_from_context = True
        return found
    return ToolResult.ok(Found((f"{params.word}.py:1",)), "Found")


FIND = Tool[FindParams, Found](
    name="find",
    title="Find a word",
    description="Find a word.",
    handler=find,
    reach="read",
    examples=[ToolExample("A name", FindParams("main"), Found(("main.py:1",)))],
)


@wink.tool(reach="reversible")
def write(path: str, content: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, content)
    return f"Wrote {path}"


@wink.tool(reach="reversible")
def add(value: int, *, context: ToolContext) -> str:
    """Add to the count."""
    now = context.session[Count].latest() or Count()
    context.session[Count].seed(Count(now.value + value))
    return str(now.value + value)


@wink.tool(reach="irreversible")
def send(*, context: ToolContext) -> str:
    """Send a letter."""
    return "Sent"


def registry(*tools: Tool[Any, Any], workspace: Path | None = None) -> ToolRegistry:
    if workspace is not None:
        return ToolRegistry(tools, workspace=workspace)
    return ToolRegistry(tools, resources={Filesystem: MemoryFilesystem()})


# What is offered


@ERAS
def test_a_tool_is_told_with_schema_title_example_and_what_its_reach_means(mode: Mode):
    server = McpServer(registry(FIND, write, send), undo=False)

    listed = use(server, lambda client: client.list_tools(), mode)

    found, written, sent = listed.tools
    assert (found.name, found.title, found.description) == ("find", "Find a word", "Find a word.")
    assert found.input_schema["properties"]["word"] == {
        "type": "string",
        "description": "What to look for.",
    }
    assert found.input_schema["examples"] == [{"word": "main", "limit": 10}]
    assert found.output_schema["properties"]["places"]["type"] == "array"
    assert found.annotations.read_only_hint
    assert found.annotations.idempotent_hint
    assert not written.annotations.read_only_hint
    assert not written.annotations.destructive_hint
    assert not written.annotations.open_world_hint
    assert sent.annotations.destructive_hint
    assert sent.annotations.open_world_hint
    assert written.output_schema is None


def test_a_tool_without_a_reach_must_be_feared():
    @wink.tool
    def unknown() -> str:
        """Do something."""
        return ""

    (told,) = use(McpServer(registry(unknown), undo=False), lambda c: c.list_tools()).tools

    assert told.annotations.destructive_hint
    assert told.annotations.open_world_hint


def test_a_tool_that_the_provider_runs_is_not_offered():
    search = Tool[None, None](name="web_search", description="Search.", handler=None)
    section = MarkdownSection(title="Tools", tools=[search, FIND])

    listed = use(McpServer(section, undo=False), lambda client: client.list_tools())

    assert [tool.name for tool in listed.tools] == ["find"]


@ERAS
def test_the_instructions_are_the_prompt_with_its_examples(mode: Mode):
    section = MarkdownSection(title="Search", template="Search before you ask.", tools=[FIND])

    async def instructions(client: Client) -> str | None:
        return client.instructions

    told = use(McpServer(section), instructions, mode)

    assert told.startswith("## 1. Search\n\nSearch before you ask.")
    assert "A name" in told
    assert "`undo`" in told


def test_a_tool_that_is_registered_later_is_offered():
    tools = registry(FIND)
    server = McpServer(tools, undo=False)
    tools.register(write)

    listed = use(server, lambda client: client.list_tools())

    assert [tool.name for tool in listed.tools] == ["find", "write"]


def test_a_registry_keeps_its_session():
    with pytest.raises(TypeError, match="a session of its own"):
        McpServer(registry(FIND), session=Session())


# What a call answers


@ERAS
def test_a_result_is_what_the_model_sees_elsewhere_and_its_value(mode: Mode):
    tools = registry(FIND)

    async def work(client: Client) -> CallToolResult:
        await client.list_tools()  # from here on the client holds results against the schema
        return await client.call_tool("find", {"word": "main"})

    result = use(McpServer(tools), work, mode)

    record = tools.session[ToolInvoked].latest()
    assert text(result) == record.result.render() == "Found\nmain.py:1"
    assert result.structured_content == {"places": ["main.py:1"], "more": False}
    assert not result.is_error
    assert result.meta["weakincentives/callId"] == record.call_id


@pytest.mark.parametrize(("word", "said"), [("nothing", "Found nothing"), ("secret", "Found it")])
def test_a_value_that_is_not_there_or_not_to_be_seen_is_an_empty_object(word: str, said: str):
    async def work(client: Client) -> CallToolResult:
        await client.list_tools()
        return await client.call_tool("find", {"word": word})

    result = use(McpServer(registry(FIND)), work)

    assert (text(result), result.structured_content) == (said, {})


def test_all_that_is_wrong_with_arguments_is_told_at_once():
    result = call(McpServer(registry(FIND)), "find", word=1, limit="ten", wrod="x")

    assert result.is_error
    assert all(f'"{name}"' in text(result) for name in ("word", "limit", "wrod"))
    assert result.meta["weakincentives/failure"]["code"] == "INVALID_ARGUMENTS"


def test_an_unknown_tool_is_an_answer_with_a_hint():
    tools = registry(FIND)

    result = call(McpServer(tools), "fnid")

    assert result.is_error
    assert "Did you mean 'find'?" in text(result)
    assert tools.session[ToolInvoked].latest().tool_name == "fnid"


def _refused(params: None, *, context: ToolContext) -> ToolResult[None]:
    context.filesystem.write("a.txt", "changed")
    return ToolResult.error("The account is locked", code="LOCKED", suggestions=["Ask Ann"])


def _broken(params: None, *, context: ToolContext) -> ToolResult[None]:
    context.filesystem.write("a.txt", "changed")
    raise KeyError("oops")


def _leaving(params: None, *, context: ToolContext) -> ToolResult[None]:
    context.filesystem.write("a.txt", "changed")
    sys.exit(3)


def _suspended(params: None, *, context: ToolContext) -> ToolResult[None]:
    context.filesystem.write("a.txt", "changed")
    raise Suspended("who approves?")


@ERAS
@pytest.mark.parametrize("handler", [_refused, _broken, _leaving, _suspended])
def test_a_failure_is_an_error_for_the_client_and_leaves_nothing(
    tmp_path: Path, mode: Mode, handler: Any
):
    """Also a tool that ends its program: the server serves on."""
    (tmp_path / "a.txt").write_text("as it was")
    tool = Tool[None, None](name="fail", description="Fail.", handler=handler)

    async def work(client: Client) -> tuple[CallToolResult, CallToolResult]:
        return await client.call_tool("fail"), await client.call_tool("write", {
            "path": "b.txt", "content": "b"
        })  # fmt: skip

    with registry(tool, write, workspace=tmp_path) as tools:
        failed, after = use(McpServer(tools), work, mode)

    assert failed.is_error
    assert failed.structured_content is None
    assert "Filesystem" in failed.meta["weakincentives/failure"]["undone"]
    assert not after.is_error
    assert (tmp_path / "a.txt").read_text() == "as it was"


def test_a_failure_says_for_programs_what_it_was():
    tool = Tool[None, None](name="fail", description="Fail.", handler=_refused)

    failure = call(McpServer(registry(tool)), "fail").meta["weakincentives/failure"]

    assert (failure["code"], failure["suggestions"]) == ("LOCKED", ["Ask Ann"])


def test_policies_of_section_and_prompt_hold():
    class Never:
        def check(self, tool_name: str, params: object, context: object) -> str | None:
            return f"{tool_name} is not allowed" if tool_name != "find" else None

    section = MarkdownSection(title="Tools", tools=[FIND, write])
    template = PromptTemplate(
        sections=[section], policies=[Never()], resources={Filesystem: MemoryFilesystem()}
    )
    server = McpServer(Prompt(template))

    async def work(client: Client) -> list[str]:
        calls = [("find", {"word": "a"}), ("write", {"path": "a", "content": ""}), ("undo", {})]
        return [text(await client.call_tool(*each)) for each in calls]

    assert use(server, work) == ["Found\na.py:1", "write is not allowed", "undo is not allowed"]


# While a call is under way


class Gate:
    """A tool that waits in the middle of its work, and says when it is there."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.ended = threading.Event()

    def blocking(self) -> Tool[Any, Any]:
        @wink.tool(reach="reversible", name="wait")
        def wait(*, context: ToolContext) -> str:
            """Wait in the middle."""
            context.filesystem.write("a.txt", "half done")
            context.session[Count].seed(Count(99))
            self.reached.set()
            assert self.go_on.wait(SECONDS)
            try:
                context.filesystem.write("b.txt", "too late")
            finally:
                self.ended.set()
            return "Done"

        return wait

    def awaiting(self) -> Tool[Any, Any]:
        @wink.tool(reach="reversible", name="wait")
        async def wait(*, context: ToolContext) -> str:
            """Wait in the middle."""
            context.filesystem.write("a.txt", "half done")
            context.session[Count].seed(Count(99))
            self.reached.set()
            try:
                await asyncio.sleep(SECONDS)
            finally:
                await asyncio.sleep(0.01)  # it cleans up, which takes a moment
                self.ended.set()
            return "Done"

        return wait


@ERAS
@pytest.mark.parametrize("kind", ["blocking", "awaiting"])
def test_a_cancelled_call_is_rolled_back_byte_for_byte(tmp_path: Path, mode: Mode, kind: str):
    """And what its handler does later changes nothing any more."""
    (tmp_path / "a.txt").write_bytes(b"as it\r\nwas\xff")
    (tmp_path / "a.txt").chmod(0o640)
    before = (tmp_path / "a.txt").stat()
    gate = Gate()

    async def work(client: Client) -> CallToolResult:
        waiting = asyncio.ensure_future(client.call_tool("wait"))
        await wait_for(gate.reached)
        waiting.cancel()
        await asyncio.wait([waiting])
        gate.go_on.set()
        await wait_for(gate.ended)
        return await client.call_tool("write", {"path": "c.txt", "content": "next"})

    with registry(getattr(gate, kind)(), write, workspace=tmp_path) as tools:
        after = use(McpServer(tools), work, mode)

    now = (tmp_path / "a.txt").stat()
    assert (tmp_path / "a.txt").read_bytes() == b"as it\r\nwas\xff"
    assert (now.st_mode, now.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "c.txt"]
    assert not after.is_error
    assert tools.session[Count].latest() is None
    assert [record.success for record in tools.session[ToolInvoked]] == [False, True]


@ERAS
def test_a_client_that_leaves_in_the_middle_of_a_call_leaves_nothing(tmp_path: Path, mode: Mode):
    gate = Gate()

    async def work(client: Client) -> None:
        waiting = asyncio.ensure_future(client.call_tool("wait"))
        await wait_for(gate.reached)
        waiting.cancel()

    with registry(gate.blocking(), workspace=tmp_path) as tools:
        use(McpServer(tools), work, mode)
        gate.go_on.set()
        assert gate.ended.wait(SECONDS)

    assert list(tmp_path.iterdir()) == []


@ERAS
def test_the_wire_is_free_while_a_handler_blocks(mode: Mode):
    gate = Gate()

    async def work(client: Client) -> CallToolResult:
        waiting = asyncio.ensure_future(client.call_tool("wait"))
        await wait_for(gate.reached)
        assert [tool.name for tool in (await client.list_tools()).tools] == ["wait"]
        assert not waiting.done()
        gate.go_on.set()
        return await waiting

    assert text(use(McpServer(registry(gate.blocking()), undo=False), work, mode)) == "Done"


@ERAS
@pytest.mark.parametrize("is_async", [False, True])
def test_beats_are_progress_in_order_and_before_the_answer(mode: Mode, is_async: bool):
    @wink.tool(name="work")
    def blocking(*, context: ToolContext) -> str:
        """Work."""
        for _ in range(3):
            context.beat()
            context.signal.wait(0.02)
        return "Done"

    @wink.tool(name="work")
    async def awaiting(*, context: ToolContext) -> str:
        """Work."""
        for done in (1, 2, 3):
            context.report("at work", done=done, total=3)
            await asyncio.sleep(0.02)
        return "Done"

    heard: list[float] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(progress)
        assert (message, total) == (("at work", 3) if is_async else (None, None))

    async def work(client: Client) -> list[float]:
        await client.call_tool("work", progress_callback=hear)
        return list(heard)

    server = McpServer(registry(awaiting if is_async else blocking))
    at_the_answer = use(server, work, mode)

    assert at_the_answer
    assert at_the_answer[-1] == 3
    assert at_the_answer == sorted(set(at_the_answer)) == heard


@pytest.mark.heavy  # long enough for the handler to have begun on any machine
def test_a_call_that_takes_too_long_is_rolled_back_and_keeps_nobody_waiting(tmp_path: Path):
    gate = Gate()

    async def work(client: Client) -> tuple[CallToolResult, CallToolResult]:
        return await client.call_tool("wait"), await client.call_tool("add", {"value": 1})

    with registry(gate.blocking(), add, workspace=tmp_path) as tools:
        late, after = use(McpServer(tools, time_limit=5), work)
        gate.go_on.set()
        assert gate.ended.wait(SECONDS)

    assert late.is_error
    assert "deadline passed while tool 'wait' ran" in text(late)
    assert (text(after), list(tmp_path.iterdir())) == ("1", [])


@ERAS
def test_fifty_calls_at_once_lose_nothing_and_run_in_the_order_they_came(
    tmp_path: Path, mode: Mode
):
    @wink.tool
    def append(line: int, *, context: ToolContext) -> str:
        """Append a line."""
        fs = context.filesystem
        fs.write("log.txt", (fs.read("log.txt") if fs.exists("log.txt") else "") + f"{line}\n")
        if line % 7 == 3:
            raise ValueError("unlucky")
        return str(add(value=line, context=context).value)

    async def work(client: Client) -> list[CallToolResult]:
        calls = (client.call_tool("append", {"line": line}) for line in range(50))
        return await asyncio.gather(*calls)

    with registry(append, workspace=tmp_path) as tools:
        results = use(McpServer(tools), work, mode)

    kept = [line for line in range(50) if line % 7 != 3]
    assert (tmp_path / "log.txt").read_text() == "".join(f"{line}\n" for line in kept)
    assert [result.is_error for result in results] == [line % 7 == 3 for line in range(50)]
    sums = [sum(kept[: place + 1]) for place in range(len(kept))]
    assert [int(text(result)) for result in results if not result.is_error] == sums


# When sections turn on or off


def _sections() -> list[MarkdownSection[Any]]:
    return [
        MarkdownSection(title="Counting", tools=[add]),
        MarkdownSection(
            title="Searching",
            tools=[FIND],
            enabled=lambda session: (session[Count].latest() or Count()).value > 1,
        ),
    ]


def test_clients_hear_that_a_section_turned_on():
    heard = asyncio.Event()

    async def hear(message: Any) -> None:
        if getattr(message, "method", "") == "notifications/tools/list_changed":
            heard.set()

    async def work(client: Client) -> list[list[str]]:
        names = [[tool.name for tool in (await client.list_tools()).tools]]
        await client.call_tool("add", {"value": 1})
        assert not heard.is_set()
        await client.call_tool("add", {"value": 1})
        await heard.wait()
        assert not (await client.call_tool("find", {"word": "a"})).is_error
        return [*names, [tool.name for tool in (await client.list_tools()).tools]]

    server = McpServer(_sections(), undo=False)
    assert use(server, work, "legacy", message_handler=hear) == [["add"], ["add", "find"]]


def test_clients_that_listen_hear_that_a_section_turned_on():
    from mcp.shared.subscriptions import ToolsListChanged

    async def work(client: Client) -> None:
        async with client.listen(tools_list_changed=True) as events:
            await client.call_tool("add", {"value": 2})
            async for event in events:
                assert isinstance(event, ToolsListChanged)
                return

    use(McpServer(_sections()), work, "auto")


def test_a_tool_of_a_section_that_is_off_cannot_be_called():
    result = call(McpServer(_sections()), "find", word="a")

    assert result.is_error
    assert "Tool 'find' not found" in text(result)


def test_a_tool_learns_who_calls():
    seen: list[ToolContext] = []

    @wink.tool
    def look(*, context: ToolContext) -> None:
        """Look around."""
        seen.append(context)

    ours = RunContext(loop_id="mine", agent_id="me")
    section = MarkdownSection(title="Look", tools=[look])
    for served in (
        McpServer(section, name="files", config={"api.credentials": "secret"}),
        McpServer(ToolRegistry([look], config={"api.credentials": "secret"}), name="files"),
        McpServer(ToolRegistry([look], run_context=ours), name="files"),
    ):
        call(served, "look")

    for context in seen[:2]:
        assert dict(context.config) == {"api.credentials": "secret", "tool_name": "look"}
        assert (context.loop_id, context.agent_id) == ("files", "mcp")  # the client's own name
        assert len(context.trace_id) == 32
    assert seen[0].trace_id != seen[1].trace_id
    assert (seen[2].loop_id, seen[2].agent_id) == ("mine", "me")


def test_a_summarized_section_is_opened_and_its_tools_are_there():
    section = MarkdownSection(
        title="Searching",
        key="searching",
        template="Search for whole words.",
        tools=[FIND],
        visibility=SectionVisibility.SUMMARY,
        summary="How to search.",
    )

    async def work(client: Client) -> list[str]:
        before = [tool.name for tool in (await client.list_tools()).tools]
        assert before == ["open_sections", "read_section"]
        opened = await client.call_tool(
            "open_sections", {"section_keys": ["searching"], "reason": "to search"}
        )
        found = await client.call_tool("find", {"word": "a"})
        return [text(opened), text(found)]

    opened, found = use(McpServer(section, undo=False), work)

    assert opened.startswith("Opened: searching.")
    assert "Search for whole words." in opened
    assert found == "Found\na.py:1"


# Undo


def _texts(server: McpServer, *calls: tuple[str, dict[str, Any]]) -> Sequence[str]:
    async def work(client: Client) -> list[str]:
        await client.list_tools()
        return [text(await client.call_tool(*each)) for each in calls]

    return use(server, work)


def _write(path: str, content: str) -> tuple[str, dict[str, Any]]:
    return "write", {"path": path, "content": content}


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_undo_takes_back_the_last_change_then_the_one_before(tmp_path: Path, where: str):
    """Files and session state; calls that changed nothing are not counted."""
    files: Any = HostFilesystem(tmp_path) if where == "disk" else MemoryFilesystem()
    tools = ToolRegistry([write, add, FIND], resources={Filesystem: files})

    said = _texts(
        McpServer(tools),
        _write("a.txt", "one"),
        ("add", {"value": 5}),
        _write("a.txt", "two"),
        ("find", {"word": "x"}),
        ("undo", {}),
    )
    assert said[-1] == "Undone: 1 call (write)."
    assert files.read("a.txt") == "one"
    assert tools.session[Count].latest() == Count(5)


def test_undo_goes_step_by_step_and_says_when_there_is_no_more(tmp_path: Path):
    with registry(write, add, workspace=tmp_path) as tools:
        said = _texts(
            McpServer(tools),
            _write("a.txt", "one"),
            ("add", {"value": 5}),
            ("undo", {}),
            ("undo", {}),
            ("undo", {}),
        )

    assert said[-3:] == [
        "Undone: 1 call (add).",
        "Undone: 1 call (write).",
        "There is no change to undo",
    ]
    assert list(tmp_path.iterdir()) == []
    assert tools.session[Count].latest() is None


def _undo_of_the_second(
    tools: ToolRegistry, *calls: tuple[str, dict[str, Any]], **options: object
) -> str:
    """Make calls, undo the second, and return what is said to that."""

    async def work(client: Client) -> str:
        made = [await client.call_tool(*each) for each in calls]
        call_id = made[1].meta["weakincentives/callId"]
        return text(await client.call_tool("undo", {"call_id": call_id, **options}))

    return use(McpServer(tools), work)


def test_undo_of_a_call_leaves_what_came_after_it(tmp_path: Path):
    with registry(write, add, workspace=tmp_path) as tools:
        said = _undo_of_the_second(
            tools, _write("a.txt", "a"), _write("b.txt", "b"), ("add", {"value": 5})
        )

    assert said == "Undone: 1 call (write)."
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert tools.session[Count].latest() == Count(5)


def test_undo_of_a_call_takes_what_came_after_it_along_when_told_to(tmp_path: Path):
    with registry(write, add, workspace=tmp_path) as tools:
        said = _undo_of_the_second(
            tools,
            _write("a.txt", "one"),
            ("add", {"value": 5}),
            _write("a.txt", "two"),
            and_later=True,
        )

    assert said == "Undone: 2 calls (write, add)."
    assert (tmp_path / "a.txt").read_text() == "one"
    assert tools.session[Count].latest() is None


@pytest.mark.parametrize("kind", ["file", "state"])
def test_a_call_that_others_built_on_is_not_undone_by_itself(tmp_path: Path, kind: str):
    calls = {
        "file": [_write("a.txt", "1"), _write("a.txt", "2"), _write("a.txt", "3")],
        "state": [("add", {"value": 1}), ("add", {"value": 2}), ("add", {"value": 3})],
    }[kind]
    with registry(write, add, workspace=tmp_path) as tools:
        said = _undo_of_the_second(tools, *calls)
        third = tools.session[ToolInvoked].all()[2].call_id

    expected = {"file": f"a.txt was changed since by {third}", "state": "undo those first"}
    assert expected[kind] in said
    assert kind == "file" or tools.session[Count].latest() == Count(6)
    assert kind == "state" or (tmp_path / "a.txt").read_text() == "3"


def test_a_checkpoint_is_a_place_to_come_back_to(tmp_path: Path):
    with registry(write, add, workspace=tmp_path) as tools:
        said = _texts(
            McpServer(tools),
            ("add", {"value": 1}),
            _write("a.txt", "one"),
            ("checkpoint", {"name": "good"}),
            ("add", {"value": 1}),
            _write("a.txt", "two"),
            _write("b.txt", "two"),
            ("undo", {"checkpoint": "good"}),
            ("undo", {"checkpoint": "good"}),
            ("undo", {"checkpoint": "god"}),
        )

    assert said[-3:] == [
        "Undone: 3 calls (write, write, add).",
        "Nothing has changed since: there is nothing to undo",
        "No checkpoint 'god'. Checkpoints: good",
    ]
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.txt": "one"}
    assert tools.session[Count].latest() == Count(1)


def test_a_checkpoint_is_none_any_more_when_what_was_before_it_is_undone(tmp_path: Path):
    with registry(write, workspace=tmp_path) as tools:
        said = _texts(
            McpServer(tools),
            _write("a.txt", "one"),
            ("checkpoint", {"name": "good"}),
            ("undo", {}),
            ("undo", {"checkpoint": "good"}),
        )

    assert said[-1] == "No checkpoint 'good'. Checkpoints: none"


def test_undo_loses_nothing_that_somebody_else_changed(tmp_path: Path):
    with registry(write, workspace=tmp_path) as tools:
        server = McpServer(tools)
        _texts(server, ("checkpoint", {"name": "start"}))
        _texts(server, _write("a.txt", "ours"), _write("b.txt", "ours"))
        (tmp_path / "b.txt").write_text("theirs")

        (said,) = _texts(server, ("undo", {"checkpoint": "start"}))

    assert said == "Nothing was undone:\nb.txt was changed since by someone else"
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"a.txt": "ours", "b.txt": "theirs"}


def test_undo_does_not_take_back_the_work_of_another_run(tmp_path: Path):
    with HostFilesystem(tmp_path) as files:
        ours = ToolRegistry([write], resources={Filesystem: files})
        theirs = ToolRegistry([write], resources={Filesystem: files})
        server = McpServer(ours)
        _texts(server, _write("a.txt", "ours"))
        theirs.execute("write", {"path": "c.txt", "content": "theirs"})

        (said,) = _texts(server, ("undo", {}))
        history = files.history()

    assert said == "Undone: 1 call (write)."
    assert [path.name for path in tmp_path.iterdir()] == ["c.txt"]
    assert history[-1].undoes == (history[0].call_id,)  # the history of the files says so, too


def test_what_was_undone_outside_of_the_session_is_not_undone_twice(tmp_path: Path):
    """As `wink undo` does between two starts of the server."""
    with HostFilesystem(tmp_path) as files:
        server = McpServer(ToolRegistry([write], resources={Filesystem: files}))
        _texts(server, _write("a.txt", "a"), _write("b.txt", "b"))
        files.undo(files.history()[-1].call_id)

        history, said = _texts(server, ("history", {}), ("undo", {}))

    assert [line.split()[-2:] for line in history.splitlines()] == [
        ["ok:", "a.txt"],
        ["undone:", "b.txt"],
    ]
    assert said == "Undone: 1 call (write)."
    assert list(tmp_path.iterdir()) == []


def test_files_are_undone_after_a_restart_and_so_is_all_since_a_checkpoint(tmp_path: Path):
    """Where the session is saved; how its state was before a single call is not known then."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    tools = registry(write, add, FIND, workspace=folder)
    with tools, SavedSession.create(tmp_path / "session.jsonl", tools.session):
        _texts(
            McpServer(tools),
            ("add", {"value": 1}),
            ("checkpoint", {"name": "good"}),
            ("add", {"value": 1}),
            _write("a.txt", "a"),
            _write("b.txt", "b"),
            ("find", {"word": "x"}),
        )

    types = [Count, Found, FindParams, write.params_type, add.params_type]
    with (
        SavedSession.open(tmp_path / "session.jsonl", types=types) as saved,
        ToolRegistry([write, add, FIND], workspace=folder, session=saved.session) as again,
    ):
        first, second = _texts(McpServer(again), ("undo", {}), ("undo", {"checkpoint": "good"}))
        assert saved.session[Count].latest() == Count(1)

    assert first.startswith(
        "Undone: 1 call (write).\nThe session's state (such as plans) is not undone"
    )
    assert second == "Undone: 2 calls (write, add)."
    assert list(folder.iterdir()) == []


def test_what_was_done_outside_is_not_claimed_to_be_undone(tmp_path: Path):
    @wink.tool(reach="irreversible")
    def publish(*, context: ToolContext) -> str:
        """Publish."""
        context.filesystem.write("published.txt", "yes")
        return "Published"

    with registry(publish, workspace=tmp_path) as tools:
        said = _texts(McpServer(tools), ("publish", {}), ("undo", {}))

    assert said[-1].endswith("The effects of publish outside files and session are not undone.")


def test_the_history_cuts_long_lists_and_counts_ignored_files(tmp_path: Path):
    @wink.tool(reach="reversible")
    def generate(*, context: wink.ToolContext) -> str:
        """Generate files."""
        for n in range(12):
            context.filesystem.write(f"f{n:02}.txt", "x")
            context.filesystem.write(f"__pycache__/{n}.pyc", "x")
        context.filesystem.write_bytes("latin", "caf\u00e9\n".encode("latin-1"))
        return "done"

    async def work(client: Any) -> tuple[str, str]:
        made = await client.call_tool("generate", {})
        call_id = made.meta["weakincentives/callId"]
        listed = text(await client.call_tool("history", {}))
        return listed, text(await client.call_tool("history", {"call_id": call_id}))

    with ToolRegistry([generate], workspace=tmp_path) as tools:
        listed, diff = use(McpServer(tools), work)

    assert listed.endswith("f09.txt and 3 more files + 12 ignored files")
    assert "diff --git a/latin b/latin" in diff


def test_the_history_shows_calls_files_and_what_was_undone(tmp_path: Path):
    async def work(client: Client) -> tuple[CallToolResult, str]:
        written = await client.call_tool(*_write("a.txt", "one\n"))
        await client.call_tool(*_write("/etc/passwd", "no"))
        diff = await client.call_tool("history", {"call_id": written.meta["weakincentives/callId"]})
        await client.call_tool("undo", {})
        return await client.call_tool("history", {"limit": 4}), text(diff)

    with registry(write, workspace=tmp_path) as tools:
        history, diff = use(McpServer(tools), work)

    calls = history.structured_content["calls"]
    assert [(each["tool"], each["success"], each["undone"]) for each in calls] == [
        ("write", True, True),
        ("write", False, False),
        ("history", True, False),
        ("undo", True, False),
    ]
    assert calls[0]["paths"] == ["a.txt"]
    assert "+one" in diff


def test_a_tool_of_the_users_own_goes_before_ours():
    @wink.tool(name="undo")
    def mine() -> str:
        """My own."""
        return "mine"

    assert text(call(McpServer(registry(mine)), "undo")) == "mine"


@pytest.mark.heavy
def test_the_example_renames_everywhere_or_nowhere_and_undoes():
    example = Path(__file__).parents[2] / "examples" / "mcp_server.py"

    shown = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=True
    ).stdout

    assert shown.splitlines() == [
        "Tools: rename, undo, history, checkpoint",
        "  asked: Change main.py and shop.py?",
        "ok: total is amount now.",
        "  shop.py: amount = 1",
        "failed: main.py would not compile: invalid syntax",
        "  shop.py: amount = 1",
        "Changed so far: +++ b/main.py +++ b/shop.py",
        "Undone: 1 call (rename).",
        "  shop.py: total = 1",
    ]


# Long results


def test_a_long_result_is_cut_and_the_client_can_read_the_rest():
    @wink.tool(reach="read", max_result_chars=1_000)
    def dump_all() -> str:
        """Print everything."""
        return "\n".join(f"line {n}" for n in range(1_000))

    server = McpServer(MarkdownSection(title="T", tools=[dump_all]))

    async def work(client: Client) -> tuple[list[str], CallToolResult, list[str], CallToolResult]:
        before = [tool.name for tool in (await client.list_tools()).tools]
        first = await client.call_tool("dump_all", {})
        after = [tool.name for tool in (await client.list_tools()).tools]
        call_id = (first.meta or {})["weakincentives/callId"]
        rest = await client.call_tool("read_result", {"call_id": call_id, "offset": 8_881})
        return before, first, after, rest

    before, first, after, rest = use(server, work)

    assert len(text(first)) < 1_200
    assert text(first).endswith(")]")
    assert set(after) - set(before) == {"read_result"}
    assert text(rest) == "line 999"
