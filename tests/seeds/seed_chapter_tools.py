"""The Chapter up to its tool examples: contracts, resources, results."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
from seed_blocks import fenced_block
from seed_names import FileContents, ReadFileParams, tool_of
from seed_scenarios import Model, Run, scenario

from weakincentives import resources as resources_package
from weakincentives.adapters import ScriptedAdapter, calls
from weakincentives.contrib.tools import VfsConfig
from weakincentives.errors import DeadlineExceededError, ToolDefinitionError
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.runtime import (
    Dispatcher,
    MainLoop,
    Session,
    ToolCall,
    ToolInvoked,
    execute_tool,
)
from weakincentives.testing import make_context, make_context_with_files, make_vfs


@scenario("Chapter", "Basic Tool Definition")
def basic_tool_definition(run: Run) -> None:
    """The tool validates, runs with what its context offers, and renders for the model."""

    class DocumentIndex:
        def search(self, query: str, limit: int) -> list[str]:
            names = ("filesystem.md", "filesystem-api.md", "sessions.md")
            return [name for name in names if query in name][:limit]

    seen = run(DocumentIndex=DocumentIndex)
    context = make_context(resources={DocumentIndex: DocumentIndex()})

    result = seen.search_tool({"query": "filesystem"}, context=context)
    assert result.render() == (
        "Found 2 results\nFound 2 total matches:\n1. filesystem.md\n2. filesystem-api.md"
    )
    assert seen.search_tool({"query": "filesystem", "limit": 1}, context=context).value == (
        seen.SearchResult(matches=("filesystem.md",), total_count=1)
    )
    assert seen.search_tool({"query": "xyz"}, context=context).render() == (
        "Found 0 results\nNo matches found."
    )
    assert not seen.search_tool({"search_term": "filesystem"}, context=context).success

    parameters = seen.search_tool.parameters
    assert parameters["properties"]["query"]["type"] == "string"
    assert parameters["properties"]["limit"]["default"] == 10
    assert parameters["required"] == ["query"]

    # "Type mismatches are caught at construction time, not at runtime."
    for types in [(seen.SearchResult, seen.SearchResult), (seen.SearchParams, seen.SearchParams)]:
        with pytest.raises(ToolDefinitionError):
            Tool[types](name="t", description="d", handler=seen.search_handler)


@scenario("Chapter", "ToolContext Fields")
def tool_context_fields(run: Run) -> None:
    """Ours has every field of the sketch, and is just as immutable."""
    sketch = run().ToolContext
    names = {each.name for each in fields(sketch)}
    assert names <= {each.name for each in fields(ToolContext)}

    session = Session()
    context = ToolContext(**{**dict.fromkeys(names), "session": session})
    assert context.session is session
    assert context.deadline is None
    with pytest.raises(FrozenInstanceError):
        context.session = Session()  # type: ignore[misc]


@scenario("Chapter", "Binding Resources to Prompts")
def instances_bound_to_a_prompt(run: Run) -> None:
    """The tools of the run get the very client that was bound."""
    got: list[object] = []

    @dataclass
    class HTTPClient:
        base_url: str

    def fetch(params: None, *, context: ToolContext) -> ToolResult[None]:
        got.append(context.resources.get(HTTPClient))
        return ToolResult.ok(None, "fetched")

    tool = Tool[None, None](name="fetch", description="Fetch.", handler=fetch)
    template = PromptTemplate(sections=[MarkdownSection(title="Web", tools=[tool])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "myapp", ModuleType("myapp"))
        patch.setitem(sys.modules, "myapp.http", SimpleNamespace(HTTPClient=HTTPClient))
        seen = run(
            adapter=ScriptedAdapter([calls("fetch"), "Done."]),
            template=template,
            session=Session(),
            params=None,
        )

    assert seen.response.text == "Done."
    assert got == [seen.http_client]


@scenario("Chapter", "Binding Resources to Prompts", 2)
def lazy_bindings_of_a_prompt(run: Run) -> None:
    """Made when first asked for, with what they depend on; the tracer anew in every call."""
    made: list[str] = []

    class Config:
        url = "https://api.example.com"

        @classmethod
        def from_env(cls) -> Config:
            made.append("config")
            return cls()

    class HTTPClient:
        def __init__(self, url: str) -> None:
            made.append(f"client of {url}")

        def close(self) -> None:
            made.append("closed")

    class Tracer:
        pass

    tracers: list[Tracer] = []

    def trace(params: None, *, context: ToolContext) -> ToolResult[None]:
        tracers.append(context.resources.get(Tracer))
        assert context.resources.get(Tracer) is tracers[-1]
        context.resources.get(HTTPClient)
        return ToolResult.ok()

    @dataclass(frozen=True)
    class Params:
        topic: str

    section = MarkdownSection[Params](
        title="T", template="About $topic", tools=[tool_of(trace, "trace", None, None)]
    )
    seen = run(
        Config=Config,
        HTTPClient=HTTPClient,
        Tracer=Tracer,
        params=Params("files"),
        template=PromptTemplate(sections=[section]),
    )
    assert made == []
    session = Session()
    assert "About files" in seen.prompt.render(session).text
    with seen.prompt.resources:
        assert execute_tool(ToolCall("trace"), session=session).success
        assert execute_tool(ToolCall("trace"), session=session).success
        assert made == ["config", "client of https://api.example.com"]
    assert made[-1] == "closed"
    assert tracers[0] is not tracers[1]


@scenario("Chapter", "Using MainLoop (Recommended)")
def resources_of_a_main_loop(run: Run) -> None:
    """Bound for every request, made when asked for, closed at its end; a request may add some."""
    made: list[str] = []

    class Config:
        url = "https://api.example.com"

        @classmethod
        def from_env(cls) -> Config:
            return cls()

    class HTTPClient:
        def __init__(self, url: str) -> None:
            made.append(f"client of {url}")

        def close(self) -> None:
            made.append("closed")

    class Tracer:
        pass

    def fetch(params: None, *, context: ToolContext) -> ToolResult[None]:
        context.resources.get(HTTPClient)
        made.append("traced" if context.resources.find(Tracer) is tracer else "not traced")
        return ToolResult.ok(None, "fetched")

    tool = Tool[None, None](name="fetch", description="Fetch.", handler=fetch)
    template = PromptTemplate(sections=[MarkdownSection(title="Web", tools=[tool])])

    class MyLoop(MainLoop[str, Any]):
        def prepare(self, request: str) -> tuple[Prompt[Any], Session]:
            return Prompt(template), Session(dispatcher=self.bus)

    tracer = Tracer()
    bus = Dispatcher()
    heard: list[ToolInvoked] = []
    bus.subscribe(ToolInvoked, heard.append)
    seen = run(
        Config=Config,
        HTTPClient=HTTPClient,
        Tracer=Tracer,
        tracer=tracer,
        MyLoop=MyLoop,
        adapter=ScriptedAdapter([calls("fetch"), "One.", calls("fetch"), "Two."]),
        bus=bus,
        request="fetch it",
    )

    once = ["client of https://api.example.com", "not traced", "closed"]
    assert made == [*once, *once[:1], "traced", "closed"]
    assert seen.response.text == "Two."
    assert seen.session[ToolInvoked].latest() is heard[1]


@scenario("Chapter", "Dependency Injection Example")
def dependency_injection(run: Run) -> None:
    """The graph is resolved on demand, a tool scope has its own tracer, the client is closed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_KEY", "secret")
        patch.setenv("BASE_URL", "https://api.example.com")
        seen = run()
        assert seen.http.base_url == "https://api.example.com"
        assert seen.http.headers == {"Authorization": "Bearer secret"}
        assert seen.tracer.spans == ["search_started"]

        closed: list[object] = []
        patch.setattr(seen.HTTPClient, "close", lambda self: closed.append(self))
        with seen.registry.open() as context:
            http = context.get(seen.HTTPClient)
            assert context.get(seen.HTTPClient) is http
            with context.tool_scope() as first, context.tool_scope() as second:
                assert first.get(seen.HTTPClient) is http
                assert first.get(seen.Tracer) is first.get(seen.Tracer)
                assert first.get(seen.Tracer) is not second.get(seen.Tracer)
                assert first.get(seen.Tracer).spans == []
            assert closed == []
        assert closed == [http]


@scenario("Chapter", "Lifecycle Protocols")
def lifecycle_protocols(run: Run) -> None:
    """``post_construct`` comes before anyone has the resource, ``close`` when the context ends."""

    class Connection:
        def __init__(self, url: str) -> None:
            self.url, self.is_open = url, True

        def close(self) -> None:
            self.is_open = False

    config = SimpleNamespace(db_url="db://test")
    seen = run(Config=SimpleNamespace, connect=Connection)
    binding = Binding(seen.DatabaseConnection, lambda r: seen.DatabaseConnection(config))
    with ResourceRegistry.of(binding).open() as context:
        database = context.get(seen.DatabaseConnection)
        assert database.conn.url == "db://test"
        assert database.conn.is_open
    assert not database.conn.is_open

    for name, method in [("Closeable", "close"), ("PostConstruct", "post_construct")]:
        assert hasattr(getattr(seen, name), method)
        assert hasattr(getattr(resources_package, name), method)


@scenario("Chapter", "Resource Management in Tool Handlers")
def resources_in_a_handler(run: Run) -> None:
    """Client, tracer and files are found by type; what was fetched is saved."""

    class HTTPClient:
        def get(self, url: str) -> SimpleNamespace:
            return SimpleNamespace(text=f"content of {url}")

    class Tracer:
        def __init__(self) -> None:
            self.spans: list[str] = []

        def record(self, operation: str) -> None:
            self.spans.append(operation)

    @dataclass(frozen=True)
    class MyParams:
        url: str

    seen = run(HTTPClient=HTTPClient, Tracer=Tracer, MyParams=MyParams, MyResult=Status)
    fs, tracer = make_vfs(), Tracer()
    context = make_context(fs=fs, resources={HTTPClient: HTTPClient(), Tracer: tracer})
    result = tool_of(seen.handler)({"url": "http://x"}, context=context)

    assert result.success
    assert result.message == "Fetched and saved"
    assert result.value == Status("success")
    assert fs.read("output.json") == "content of http://x"
    assert tracer.spans == ["fetching http://x"]


@scenario("Chapter", "Filesystem Resource")
def filesystem_of_a_suite(run: Run) -> None:
    """The suite brings the Filesystem that a handler of the same prompt reads from."""
    config = VfsConfig(files={"a.txt": "mine"})
    seen = run(session=Session(), vfs_config=config, ReadFileResult=FileContents)
    tool = tool_of(seen.read_file_handler, "mine", ReadFileParams, FileContents)
    model = Model.given(seen.vfs, MarkdownSection(title="Mine", tools=[tool]))

    assert model.call("mine", path="a.txt").value == FileContents("mine")


@scenario("Chapter", "ToolResult Structure")
@scenario("Chapter", "ToolResult Structure Review")
def tool_result_structure(run: Run) -> None:
    """Ours begins with the sketch's fields, in that order and with those defaults."""
    sketch = run().ToolResult
    for theirs, mine in zip(fields(sketch), fields(ToolResult), strict=False):
        assert mine.name == theirs.name
        assert theirs.default in (MISSING, mine.default)

    by_position = ToolResult("m", "v")
    for name, value in vars_of(sketch("m", "v")).items():
        assert getattr(by_position, name) == value
    assert vars_of(ToolResult("m", "v", False, True)).items() >= (
        vars_of(sketch("m", "v", False, True)).items()
    )


@scenario("Chapter", "Convenience Constructors")
def convenience_constructors(run: Run) -> None:
    """A success, a failure, and a value that the model is spared."""

    @dataclass(frozen=True)
    class SearchResult:
        matches: tuple[str, ...]
        total_count: int

        def render(self) -> str:
            return ", ".join(self.matches)

    ok, error, full = run(SearchResult=SearchResult, large_string="x" * 1000).shown

    assert ok.success
    assert ok.value == SearchResult(matches=("doc1", "doc2"), total_count=2)
    assert ok.render() == "Found 2 results\ndoc1, doc2"
    assert (error.success, error.value) == (False, None)
    assert error.render() == error.message == "File not found: config.json"
    assert full.success
    assert full.value == FileContents("x" * 1000)
    assert full.render() == "Read 1.2MB from large_file.csv"


@scenario("Chapter", "Rendering Results")
def rendering_results(run: Run) -> None:
    """``render()`` decides what the model sees; the other five rules cover the rest."""
    seen = run()
    found = seen.FileSearchResult(("a.py", "b.py"), total_count=5, truncated=True)
    assert ToolResult.ok(found, message="Done").render() == (
        "Done\nFound 2 files\n(showing first 2 of 5 total)\n  - a.py\n  - b.py"
    )

    @dataclass(frozen=True)
    class Unrendered:
        count: int

    nothing = seen.FileSearchResult((), total_count=0, truncated=False)
    assert ToolResult.ok(nothing).render() == "No matching files found."

    with TestCase().assertLogs("weakincentives", "WARNING") as logged:
        assert ToolResult.ok(Unrendered(3)).render() == '{"count": 3}'
    assert "Unrendered has no render()" in logged.output[0]

    for value, rendered in [
        ({"a": 1}, '{"a": 1}'),
        (("a", "b"), "a\nb"),
        ("text", "text"),
        (None, ""),
    ]:
        assert ToolResult.ok(value).render() == rendered


@scenario("Chapter", "Exception Handling")
def exception_handling(run: Run) -> None:
    """What a handler raises is an answer for the model, and everything it did is undone."""
    seen = run(MyParams=ReadFileParams, MyResult=Status)

    def write_then_risk(params: ReadFileParams, *, context: ToolContext) -> ToolResult[Status]:
        context.filesystem.write("trace.txt", "was here")
        return seen.risky_handler(params, context=context)

    context = make_context()
    result = tool_of(write_then_risk)({"path": "/etc/passwd"}, context=context)
    assert not result.success
    assert result.message == "Path must start with /safe/"
    assert not context.filesystem.exists("trace.txt")

    # "Safety exceptions that propagate unchanged"
    safety = [KeyboardInterrupt, SystemExit, asyncio.CancelledError, DeadlineExceededError]
    for error in safety:

        def fail(params: None, *, context: ToolContext, e: Any = error) -> ToolResult[None]:
            context.filesystem.write("trace.txt", "was here")
            raise e

        with pytest.raises(error):
            tool_of(fail, "fail", None, None)(context=context)
        assert not context.filesystem.exists("trace.txt")
        assert not context.session[ToolInvoked].all()[-1].success


@scenario("Chapter", "Excluding Large Values from Context")
def excluding_large_values(run: Run) -> None:
    """The model gets the summary only; the session keeps the value."""
    seen = run()
    context = make_context_with_files({"big.txt": "x" * 10_000})
    result = tool_of(seen.read_large_file_handler)({"path": "big.txt"}, context=context)

    assert result.render() == "Read 10000 bytes from big.txt"
    recorded = context.session[ToolInvoked].latest()
    assert recorded is not None
    assert recorded.result.value == FileContents("x" * 10_000)


@scenario("Chapter", "Defining Examples")
def defining_examples(run: Run) -> None:
    """Examples are checked against the types, and a provider is told what the text shows."""

    @dataclass(frozen=True)
    class NowResult:
        iso: str

    def now_handler(params: Any, *, context: ToolContext) -> Any:
        return ToolResult.ok(NowResult("2025-01-01T00:00:00+00:00"))

    def declare(params: Any, result: Any) -> Any:
        names: dict[str, Any] = {"NowParams": params, "NowResult": result}
        return run(now_handler=now_handler, **names).now_tool

    tool = declare(NowParams, NowResult)
    # The next section prints what a provider is told, with the first example only.
    printed = json.loads(fenced_block(run.block.document, "Examples in Tool Schemas", "json"))
    told = tool.definition()
    assert told["examples"][1] == {
        "description": "Get time in specific timezone",
        "input": {"tz": "America/New_York"},
        "output": {"iso": "2025-01-01T05:00:00-05:00"},
    }
    # Beyond what is printed: the field has no default, and there are no others.
    told["examples"] = told["examples"][:1]
    assert told.pop("parameters") == {
        **printed.pop("parameters"),
        "required": ["tz"],
        "additionalProperties": False,
    }
    assert told == printed

    # Where a provider takes no examples, the model reads them.
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="Time", tools=[tool])]))
    for example in tool.examples:
        text = prompt.render(examples=True).text
        assert example.description in text
        assert example.input.tz in text
        assert example.output.iso in text

    # Neither an input nor an output may contradict the types.
    @dataclass(frozen=True)
    class Zone:
        tz: int

    @dataclass(frozen=True)
    class Moment:
        iso: float

    with pytest.raises(ToolDefinitionError, match=r"input of example 'Get current UTC time'.*tz"):
        declare(Zone, NowResult)
    with pytest.raises(ToolDefinitionError, match=r"(?s)output of example 'Get current UTC .*iso"):
        declare(NowParams, Moment)
    assert Model.offered(tool).call("now", tz="UTC").success


@dataclass(frozen=True)
class NowParams:
    tz: str
    """Timezone name (e.g., 'UTC', 'America/New_York')"""


@dataclass(frozen=True)
class Status:
    status: str = ""


def vars_of(result: Any) -> dict[str, Any]:
    return {each.name: getattr(result, each.name) for each in fields(result)}
