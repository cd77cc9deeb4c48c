"""What a server offers besides tools, and what its handlers ask of a client, in both eras."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import weakincentives as wink
from weakincentives.contrib.tools import file_tools
from weakincentives.core.media import Media
from weakincentives.errors import ProtocolError, ToolDefinitionError
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    NotAnswered,
    Prompt,
    PromptTemplate,
    ProtectedPathsPolicy,
    ToolContext,
)
from weakincentives.runtime import Session, ToolInvoked, ToolRegistry

mcp = pytest.importorskip("mcp")

from mcp import Client, MCPError  # noqa: E402
from mcp.types import (  # noqa: E402
    CreateMessageResult,
    ElicitResult,
    ListRootsResult,
    PromptReference,
    ResourceTemplateReference,
    Root,
    TextContent,
)

from weakincentives.mcp import McpPrompt, McpResource, McpServer  # noqa: E402

Mode = Literal["auto", "legacy"]
ERAS = pytest.mark.parametrize("mode", ["auto", "legacy"])
SECONDS = 240


def use(
    server: McpServer, work: Callable[[Client], Awaitable[Any]], mode: Mode = "auto", **options: Any
) -> Any:
    async def run() -> Any:
        async with (
            asyncio.timeout(SECONDS),
            Client(server.protocol, mode=mode, **options) as client,
        ):
            return await work(client)

    with server:
        return asyncio.run(run())


def text(result: Any) -> str:
    return "".join(part.text for part in result.content)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "app.py").write_text("port = 80\n")
    (root / "README.md").write_text("# Demo\n")
    (root / ".gitignore").write_text("build\n")
    (root / "build").mkdir()
    (root / "build" / "out.bin").write_bytes(b"\xff\x00")
    (root / "empty.txt").write_text("")
    return root


def workspace(files: Filesystem, *policies: Any, **options: Any) -> McpServer:
    section = MarkdownSection(
        title="Files", template="Work on files.", tools=file_tools(), policies=policies
    )
    template = PromptTemplate(sections=[section], resources={Filesystem: files})
    return McpServer(Prompt(template), **options)


# Resources


@ERAS
def test_a_client_reads_files_and_what_calls_have_changed(project: Path, mode: Mode):
    async def work(client: Client) -> list[Any]:
        listed = await client.list_resources()
        names = [each.name for each in listed.resources]
        read = await client.read_resource("wink://files/src/app.py")
        empty = await client.read_resource("wink://files/empty.txt")
        arguments = {"path": "new file.txt", "content": "hello\n"}
        written = await client.call_tool("write_file", arguments)
        call_id = written.meta["weakincentives/callId"]
        diffs = [
            (await client.read_resource(uri)).contents[0].text
            for uri in ("wink://diff", f"wink://calls/{call_id}/diff", "wink://history")
        ]
        new = await client.read_resource("wink://files/new%20file.txt")
        return [names, read.contents[0], empty.contents[0].text, diffs, new.contents[0].text]

    with HostFilesystem(project) as files:
        names, read, empty, diffs, new = use(workspace(files), work, mode)

    assert names == ["history", "history", "README.md", "empty.txt", "src/app.py"]
    assert (read.text, read.mime_type) == ("port = 80\n", "text/x-python")
    assert (empty, new) == ("", "hello\n")
    assert diffs[0] == diffs[1]
    assert "+hello" in diffs[0]
    assert "write_file ok: new file.txt" in diffs[2]


def test_a_binary_file_is_a_blob(project: Path):
    async def work(client: Client) -> Any:
        return (await client.read_resource("wink://files/build/out.bin")).contents[0]

    with HostFilesystem(project) as files:
        assert use(workspace(files), work).blob == "/wA="


def test_reading_a_file_is_a_call_under_the_policies_of_read_file(project: Path):
    class Secret:
        def check(self, tool_name: str, params: Any, context: Any) -> str | None:
            if tool_name == "read_file" and params.path == "README.md":
                return "that is secret"
            return None

    async def work(client: Client) -> list[str]:
        said: list[str] = []
        for path in ("README.md", "missing.txt", "../outside"):
            with pytest.raises(MCPError) as caught:
                await client.read_resource(f"wink://files/{path}")
            said.append(f"{caught.value.code} {caught.value.message}")
        return said

    with HostFilesystem(project) as files:
        server = workspace(files, Secret())
        said = use(server, work)

    assert said[0] == "-32602 that is secret"
    assert "missing.txt" in said[1]
    records = server.session[ToolInvoked].all()
    assert [record.success for record in records] == [False] * len(records)


@pytest.mark.parametrize(
    "path",
    [
        *("..%2Foutside%2Fkey", "%2e%2e/outside/key", "src/..%2f..%2foutside/key"),
        *("%2Fetc%2Fhosts", "//etc/hosts", "README.md%00", "link", "folder/key", "pipe"),
    ],
)
def test_no_address_leads_out_of_the_workspace(project: Path, path: str):
    outside = project.parent / "outside"
    outside.mkdir()
    (outside / "key").write_text("sesame")
    (project / "link").symlink_to(outside / "key")
    (project / "folder").symlink_to(outside)
    os.mkfifo(project / "pipe")

    async def work(client: Client) -> list[Any]:
        template = ResourceTemplateReference(uri="wink://files/{+path}")
        with pytest.raises(MCPError) as caught:
            await client.read_resource(f"wink://files/{path}")
        starts = ("../", "folder/", "/etc/")
        arguments = [{"name": "path", "value": start} for start in starts]
        found = [(await client.complete(template, each)).completion for each in arguments]
        listed = (await client.list_resources(cursor="../outside")).resources
        return [caught.value.code, [each.values for each in found], [each.uri for each in listed]]

    with HostFilesystem(project) as files:
        code, completed, listed = use(workspace(files), work)

    assert code == -32602
    assert completed == [[], [], []]
    assert not any("outside" in uri or "key" in uri for uri in listed)


def test_what_may_not_be_seen_in_the_history_is_in_no_resource_either(project: Path):
    class NoHistory:
        def check(self, tool_name: str, params: Any, context: Any) -> str | None:
            return f"not {params.call_id}" if tool_name == "history" else None

    async def work(client: Client) -> list[str]:
        said: list[str] = []
        for uri in ("wink://history", "wink://diff", "wink://calls/c1/diff"):
            with pytest.raises(MCPError) as caught:
                await client.read_resource(uri)
            said.append(caught.value.message)
        return said

    with HostFilesystem(project) as files:
        template = PromptTemplate(resources={Filesystem: files}, policies=[NoHistory()])
        said = use(McpServer(Prompt(template)), work)

    assert said == ["not None", "not None", "not c1"]


def test_files_are_offered_only_where_a_model_may_read_them(project: Path):
    async def work(client: Client) -> list[str]:
        return [each.uri for each in (await client.list_resources()).resources]

    with ToolRegistry([], workspace=project) as tools:
        assert use(McpServer(tools, undo=False), work) == []


def test_long_lists_come_in_pages():
    files = MemoryFilesystem()
    for number in range(1200):
        files.write(f"d{number % 3}/{number:04}.txt", "x")

    async def work(client: Client) -> list[str]:
        found, cursor, pages = [], None, 0
        while True:
            page = await client.list_resources(cursor=cursor)
            found += [each.uri for each in page.resources]
            cursor, pages = page.next_cursor, pages + 1
            if cursor is None:
                assert pages == 3
                return found

    found = use(workspace(files, undo=False), work)

    assert len(found) == len(set(found)) == 1200


@ERAS
@pytest.mark.parametrize("cursor", ["x", "-1", "²", "9" * 5000])
def test_an_invalid_cursor_is_an_error(mode: Mode, cursor: str):
    async def work(client: Client) -> int:
        with pytest.raises(MCPError) as caught:
            await client.list_tools(cursor=cursor)
        return caught.value.code

    assert use(workspace(MemoryFilesystem()), work, mode) == -32602


@wink.tool(reach="read")
def note(name: str, *, context: ToolContext) -> str:
    """A note by its name."""
    return context.filesystem.read(f"{name}.txt")


@wink.tool(reach="read")
def picture() -> Media:
    """A picture."""
    return Media(b"GIF89a...", name="plot.gif")


@ERAS
def test_resources_of_ones_own_are_tools_read_by_address(mode: Mode):
    files = MemoryFilesystem()
    files.write("a.txt", "noted")
    resources = [
        McpResource(uri="notes://{name}", tool=note, complete={"name": lambda *_: ["a", "b"]}),
        McpResource(uri="notes://plot", tool=picture, mime_type="image/gif"),
    ]

    async def work(client: Client) -> list[Any]:
        templates = (await client.list_resource_templates()).resource_templates
        reference = ResourceTemplateReference(uri="notes://{name}")
        completed = await client.complete(reference, {"name": "name", "value": "A"})
        return [
            [each.uri_template for each in templates],
            (await client.read_resource("notes://a")).contents[0].text,
            (await client.read_resource("notes://plot")).contents[0].blob,
            completed.completion.values,
        ]

    tools = ToolRegistry([], resources={Filesystem: files})
    found = use(McpServer(tools, undo=False, resources=list(reversed(resources))), work, mode)

    assert found == [["notes://{name}"], "noted", "R0lGODlhLi4u", ["a"]]


def test_a_template_whose_variables_the_tool_does_not_take_is_refused():
    with pytest.raises(ToolDefinitionError, match="has no parameter title"):
        McpResource(uri="notes://{title}", tool=note)


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
def test_who_has_subscribed_to_a_file_hears_of_its_changes(project: Path):
    heard: list[str] = []
    changed = asyncio.Event()

    async def hear(message: Any) -> None:
        if getattr(message, "method", "") == "notifications/resources/updated":
            heard.append(str(message.params.uri))
            changed.set()

    async def work(client: Client) -> None:
        await client.session.subscribe_resource("wink://files/README.md")
        await client.call_tool("write_file", {"path": "other.txt", "content": ""})
        await client.call_tool("read_file", {"path": "README.md"})
        arguments = {"path": "README.md", "content": "# New\n", "overwrite": True}
        assert not (await client.call_tool("write_file", arguments)).is_error
        await changed.wait()

    with HostFilesystem(project) as files:
        use(workspace(files), work, "legacy", message_handler=hear)

    assert heard == ["wink://files/README.md"]


def test_in_the_newest_era_a_subscription_is_a_stream(project: Path):
    async def work(client: Client) -> str:
        async with client.listen(resource_subscriptions=["wink://files/README.md"]) as events:
            arguments = {"path": "README.md", "content": "# New\n", "overwrite": True}
            await client.call_tool("read_file", {"path": "README.md"})
            assert not (await client.call_tool("write_file", arguments)).is_error
            async for event in events:
                return event.uri
        raise AssertionError

    with HostFilesystem(project) as files:
        assert use(workspace(files), work) == "wink://files/README.md"


# Prompts


@dataclass(frozen=True)
class Review:
    language: Literal["python", "rust"]
    """What it is written in."""
    strict: bool = False


@wink.tool(reach="read")
def explain(topic: Annotated[str, "What to explain"], depth: int = 1) -> str:
    """Explain something."""
    return f"Explain {topic} at depth {depth}"


@wink.tool(reach="read")
def talk() -> list[tuple[str, str]]:
    """A conversation to go on with."""
    return [("user", "Hello"), ("assistant", "Hi")]


@ERAS
def test_prompts_are_sections_templates_and_tools(mode: Mode):
    review = MarkdownSection[Review](
        title="Review", template="Review $language, strict: $strict.", key="review"
    )
    template = PromptTemplate(sections=[review], key="review-code", name="Review code")
    server = workspace(
        MemoryFilesystem(),
        prompts=[McpPrompt(tool=explain, complete={"topic": lambda *_: ["undo"]}), talk, template],
    )

    async def work(client: Client) -> list[Any]:
        listed = {each.name: each for each in (await client.list_prompts()).prompts}

        async def got(name: str, **arguments: str) -> list[tuple[str, str]]:
            found = await client.get_prompt(name, arguments)
            return [(each.role, each.content.text) for each in found.messages]

        values = [
            (await client.complete(PromptReference(name=name), {"name": key, "value": value}))
            for name, key, value in [
                ("review-code", "language", "r"),
                ("review-code", "strict", ""),
                ("explain", "topic", "u"),
            ]
        ]
        with pytest.raises(MCPError, match="no prompt 'nothing'"):
            await client.get_prompt("nothing")
        with pytest.raises(MCPError, match="depth"):
            await client.get_prompt("explain", {"topic": "undo", "depth": "deep"})
        return [
            list(listed),
            [(each.name, each.required) for each in listed["review-code"].arguments],
            await got("explain", topic="undo", depth="3"),
            await got("talk"),
            await got("review-code", language="rust", strict="true"),
            await got("files"),
            [each.completion.values for each in values],
        ]

    names, arguments, explained, talked, reviewed, section, completed = use(server, work, mode)

    assert names == ["explain", "talk", "review-code", "files"]
    assert arguments == [("language", True), ("strict", False)]
    assert explained == [("user", "Explain undo at depth 3")]
    assert talked == [("user", "Hello"), ("assistant", "Hi")]
    assert "Review rust, strict: True." in reviewed[0][1]
    assert "Work on files." in section[0][1]
    assert completed == [["rust"], ["true", "false"], ["undo"]]


# What a handler asks


@dataclass(frozen=True)
class Person:
    name: str
    """How you are called."""
    age: int
    kind: Literal["cat", "dog"] = "cat"


@wink.tool(reach="reversible")
async def greet(*, context: ToolContext) -> str:
    """Ask for everything, and write it down."""
    context.filesystem.append("tries.txt", "x")
    person, roots, sample = await asyncio.gather(
        context.ask("Who are you?", Person, key="person"),
        context.roots(),
        context.sample("Greet", max_tokens=10, system="Be kind"),
    )
    again = await context.ask("Sure?", {"type": "object", "properties": {}})
    text = f"{sample.text} {person.name}, {person.age}, from {roots[0].uri} {dict(again)}"
    context.filesystem.write("greeting.txt", text)
    return text


async def sampled(context: Any, params: Any) -> CreateMessageResult:
    assert params.system_prompt == "Be kind"
    content = TextContent(type="text", text="Hello")
    return CreateMessageResult(role="assistant", content=content, model="small")


async def rooted(context: Any) -> ListRootsResult:
    return ListRootsResult(roots=[Root(uri="file:///home/me")])  # type: ignore[arg-type]


def answering(*answers: Any) -> Any:
    left = list(answers)

    async def answer(context: Any, form: Any) -> ElicitResult:
        given = left.pop(0)
        if isinstance(given, str):
            return ElicitResult(action=given)  # type: ignore[arg-type]
        return ElicitResult(action="accept", content=given)

    return answer


@ERAS
def test_a_handler_asks_user_model_and_folders_and_runs_as_if_once(mode: Mode):
    files = MemoryFilesystem()
    tools = ToolRegistry([greet], resources={Filesystem: files})

    result = use(
        McpServer(tools),
        lambda client: client.call_tool("greet"),
        mode,
        elicitation_callback=answering({"name": "Ann", "age": 7}, {}),
        sampling_callback=sampled,
        list_roots_callback=rooted,
    )

    assert text(result) == "Hello Ann, 7, from file:///home/me {}"
    assert files.read("greeting.txt") == text(result)
    assert files.read("tries.txt") == "x"  # what was suspended was rolled back
    records = tools.session[ToolInvoked].all()
    assert len({record.call_id for record in records}) == 1
    assert [record.suspended for record in records] == (
        [True, True, False] if mode == "auto" else [False]
    )


def test_an_answer_that_does_not_fit_is_asked_for_again():
    @wink.tool(reach="read")
    async def ask(*, context: ToolContext) -> str:
        """Ask."""
        return str((await context.ask("Who are you?", Person)).age)

    server = McpServer(ToolRegistry([ask]))
    answers = answering({"name": "Ann"}, {"name": "Ann", "age": "x"}, {"name": "Ann", "age": 3})
    result = use(server, lambda c: c.call_tool("ask"), elicitation_callback=answers)

    assert text(result) == "3"


@ERAS
@pytest.mark.parametrize("action", ["decline", "cancel"])
def test_a_handler_learns_that_the_user_declined(mode: Mode, action: str):
    @wink.tool(reach="read")
    async def ask(*, context: ToolContext) -> str:
        """Ask."""
        try:
            await context.ask("Who are you?", Person)
        except NotAnswered as error:
            return error.action
        return "answered"

    server = McpServer(ToolRegistry([ask]))
    result = use(server, lambda c: c.call_tool("ask"), mode, elicitation_callback=answering(action))

    assert text(result) == action


def test_a_client_that_cannot_is_told_what_is_missing():
    @wink.tool(reach="reversible")
    async def ask(*, context: ToolContext) -> str:
        """Ask."""
        context.filesystem.write("a.txt", "a")
        return (await context.sample("Hello")).text

    files = MemoryFilesystem()

    async def work(client: Client) -> Any:
        try:
            return await client.call_tool("ask")
        except MCPError as error:
            return error

    def tools() -> ToolRegistry:
        return ToolRegistry([ask], resources={Filesystem: files})

    new, old = use(McpServer(tools()), work), use(McpServer(tools()), work, "legacy")

    assert (new.code, new.data) == (-32021, {"requiredCapabilities": {"sampling": {}}})
    assert old.is_error
    assert text(old) == "The client cannot ask its model"
    assert not files.exists("a.txt")


def test_where_there_is_no_client_a_question_is_a_failed_call():
    result = ToolRegistry([greet], resources={Filesystem: MemoryFilesystem()}).execute("greet")

    assert (result.success, result.message) == (False, "there is no one to ask")


def test_a_form_that_no_client_could_show_is_an_error():
    @dataclass(frozen=True)
    class Nested:
        person: Person

    @wink.tool(reach="read")
    async def ask(*, context: ToolContext) -> str:
        """Ask."""
        return str(await context.ask("?", Nested))

    assert "cannot be asked in a form" in ToolRegistry([ask]).execute("ask").message


@ERAS
def test_a_tool_may_fail_the_request_itself(mode: Mode):
    files = MemoryFilesystem()

    @wink.tool(reach="reversible")
    def fail(*, context: ToolContext) -> str:
        """Fail."""
        context.filesystem.write("a.txt", "a")
        raise ProtocolError("no such thing", code=-32002, data={"uri": "x"})

    tools = ToolRegistry([fail], resources={Filesystem: files})

    async def work(client: Client) -> Any:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("fail")
        return caught.value

    error = use(McpServer(tools), work, mode)

    assert (error.code, error.message, error.data) == (-32002, "no such thing", {"uri": "x"})
    assert not files.exists("a.txt")
    assert tools.execute("fail").failure.code == "PROTOCOL_ERROR"


# Logs


@wink.tool(reach="read")
def chatty(*, context: ToolContext) -> str:
    """Log at every level."""
    context.log("quiet", level="debug")
    context.log({"loud": True}, level="error")
    return "Done"


@pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
def test_older_clients_hear_the_log_from_a_level_on():
    heard: list[Any] = []

    async def hear(params: Any) -> None:
        heard.append((params.level, params.data, params.logger))

    async def work(client: Client) -> None:
        await client.call_tool("chatty")
        await client.session.set_logging_level("warning")
        await client.call_tool("chatty")

    use(McpServer(ToolRegistry([chatty])), work, "legacy", logging_callback=hear)

    loud = ("error", {"loud": True}, "chatty")
    assert heard == [("debug", "quiet", "chatty"), loud, loud]


def test_without_a_client_the_program_gets_the_log(caplog: pytest.LogCaptureFixture):
    ToolRegistry([chatty]).execute("chatty")

    assert [(each.levelname, each.message) for each in caplog.records if "tools" in each.name] == [
        ("ERROR", "{'loud': True}")
    ]


# Calls at the same time


def test_independent_calls_of_a_client_run_at_the_same_time(tmp_path: Path):
    meeting = asyncio.Barrier(3)

    @wink.tool(reach="read")
    async def look(*, context: ToolContext) -> str:
        """Wait for the others."""
        await meeting.wait()
        return "met"

    @wink.tool(reach="reversible")
    async def keep(path: str, *, context: ToolContext) -> str:
        """Wait for the others, and write."""
        context.filesystem.write(path, "")
        await meeting.wait()
        return "met"

    async def work(client: Client) -> list[str]:
        calls = [("look", {}), ("keep", {"path": "a"}), ("keep", {"path": "b"})]
        return [text(each) for each in await asyncio.gather(*(client.call_tool(*c) for c in calls))]

    with ToolRegistry([look, keep], workspace=tmp_path) as tools:
        assert use(McpServer(tools), work) == ["met"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_sums_of_concurrent_calls_are_those_of_calls_in_order(tmp_path: Path):
    @wink.tool(reach="reversible")
    async def add(value: int, *, context: ToolContext) -> str:
        """Add to a file."""
        files = context.filesystem
        total = int(files.read("sum.txt")) if files.exists("sum.txt") else 0
        await asyncio.sleep(0.001)
        files.write("sum.txt", str(total + value))
        return str(total + value)

    async def work(client: Client) -> None:
        await asyncio.gather(*(client.call_tool("add", {"value": n}) for n in range(40)))
        assert not (await client.call_tool("undo")).is_error

    with ToolRegistry([add], workspace=tmp_path) as tools:
        use(McpServer(tools), work)
        records = [each for each in tools.session[ToolInvoked] if each.tool_name == "add"]
        sums = sorted(int(each.result.render()) for each in records)
    assert sums[-1] == sum(range(40))
    assert (tmp_path / "sum.txt").read_text() == str(sums[-2])


def test_a_client_of_another_name_has_a_session_of_its_own():
    from mcp.types import Implementation

    @dataclass(frozen=True)
    class Seen:
        by: str

    @wink.tool(reach="reversible")
    def see(*, context: ToolContext) -> str:
        """Say who was here."""
        before = context.session[Seen].latest()
        context.session[Seen].seed(Seen(context.agent_id))
        return "no one" if before is None else before.by

    server = McpServer(ToolRegistry([see], session=Session()))

    async def run() -> list[str]:
        said = []
        for name in ("one", "two", "one"):
            info = Implementation(name=name, version="1")
            async with Client(server.protocol, client_info=info) as client:
                said.append(text(await client.call_tool("see")))
        return said

    with server:
        assert asyncio.run(run()) == ["no one", "no one", "one"]


def test_protected_paths_hold_for_resources_and_tools_alike(project: Path):
    """The guard of files is at the filesystem: a resource is no way around it."""

    async def work(client: Client) -> bool:
        arguments = {"path": "src/app.py", "content": "", "overwrite": True}
        return (await client.call_tool("write_file", arguments)).is_error

    with HostFilesystem(project) as files:
        assert use(workspace(files, ProtectedPathsPolicy(["src/**"])), work)


@pytest.mark.heavy
def test_a_long_command_reports_how_long_it_has_run(project: Path):
    import os
    import sys

    from mcp import StdioServerParameters

    from weakincentives.contrib.tools import find_sandbox
    from weakincentives.errors import SandboxUnavailable

    try:
        find_sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    heard: list[Any] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message))

    async def work() -> Any:
        command = ["-m", "weakincentives.cli", "mcp", "--workspace", str(project)]
        server = StdioServerParameters(
            command=sys.executable, args=command, env=dict(os.environ), cwd=str(project)
        )
        arguments = {"command": "sleep 3", "timeout": 100.0}
        async with asyncio.timeout(SECONDS), Client(server) as client:
            return await client.call_tool("shell_execute", arguments, progress_callback=hear)

    result = asyncio.run(work())

    assert not result.is_error, text(result)
    assert heard == sorted(set(heard))
    assert [message for _, message in heard] == [f"running for {n:.0f} s" for n, _ in heard]
    assert heard[0][0] >= 1
