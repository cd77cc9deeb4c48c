"""The Chapter from its tool suites to the end: suites, transactions, policies, best practices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from seed_blocks import Executed
from seed_names import (
    FILE_TOOLS,
    FileContents,
    Plan,
    ReadFileParams,
    noop_tool,
    search_handler,
    session_with_plan,
    tool_of,
)
from seed_scenarios import Model, Run, run_tests, scenario

from weakincentives.adapters import ModelRequest, ScriptedAdapter, calls
from weakincentives.contrib.tools import VfsConfig
from weakincentives.errors import PromptEvaluationError
from weakincentives.filesystem import Filesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.runtime import Dispatcher, MainLoop, MainLoopConfig, Session, ToolInvoked
from weakincentives.testing import make_context, make_vfs

DEPLOY_DENIED = (
    "Cannot call 'deploy' - missing required tools: build, test\n"
    "Call these tools first, then retry deploy."
)
"""The Chapter's text; the missing names sorted and without its prefix, as the design rules."""

# Suites


@scenario("Chapter", "Why Bundle Tools with Sections?")
def tools_with_guidance(run: Run) -> None:
    """The model gets the instructions and, in their order, the tools."""
    names = ("run_tests", "build", "deploy", "health_check")
    seen = run(**{f"{name}_tool": noop_tool(name) for name in names})
    model = Model.given(seen.deployment_section)
    assert tuple(tool.name for tool in model.rendered.tools) == names
    assert "1. **Always run tests first** (`run_tests` tool)" in model.rendered.text
    assert "Never deploy directly to production." in model.rendered.text
    assert model.call("health_check").success


@scenario("Chapter", "Example: VFS Tool Suite")
def vfs_tool_suite(run: Run) -> None:
    """Instructions, tools and an in-memory Filesystem below the virtual prefix that it is given."""
    model = Model(run(session=Session(), template=PromptTemplate(), params=None).prompt)
    offered = {tool.name for tool in model.rendered.tools}
    assert offered >= {"read_file", "write_file", "list_directory", "delete_file"}
    assert "Use these tools to read and write files" in model.rendered.text
    assert model.call("write_file", path="/tmp/workspace/a.txt", content="mine").success
    assert model.prompt.resources.get(Filesystem).read("a.txt") == "mine"


# Transactions


@dataclass(frozen=True)
class Force:
    force_error: bool = False


@dataclass(frozen=True)
class Status:
    status: str = "done"


@scenario("Chapter", "Example: Automatic Rollback")
def automatic_rollback(run: Run) -> None:
    """With ``force_error=True`` plan and file are as before, and the model has a clean message."""
    tool = tool_of(run(MyParams=Force, MyResult=Status).risky_handler)
    session, fs = session_with_plan(Plan(status="planned")), make_vfs()
    context = make_context(session=session, fs=fs)

    failed = tool({"force_error": True}, context=context)
    assert not failed.success
    assert failed.message == "Simulated failure"
    assert session[Plan].all() == (Plan(status="planned"),)
    assert not fs.exists("output.txt")

    assert tool({"force_error": False}, context=context).value == Status("done")
    assert session[Plan].all() == (Plan(status="in-progress"),)
    assert fs.read("output.txt") == "partial results"
    assert [each.success for each in session[ToolInvoked].all()] == [False, True]


def fails_without_a_trace(run: Run, handler: str) -> None:
    """Call the handler with an API that is down, then with one that is up."""
    for is_up in (False, True):
        session, fs = session_with_plan(Plan(status="planned")), make_vfs()

        def external_api_call(session: Any = session, fs: Any = fs, is_up: bool = is_up) -> Status:
            assert session[Plan].latest() == Plan(status="in-progress")
            assert fs.exists("output.txt")
            if not is_up:
                raise ConnectionError("the API is down")
            return Status()

        seen = run(fs=fs, data="results", external_api_call=external_api_call)
        tool = tool_of(getattr(seen, handler), "a_tool", Force, Status)
        result = tool({}, context=make_context(session=session, fs=fs))

        assert result.success is is_up
        assert fs.exists("output.txt") is is_up
        assert session[Plan].latest() == Plan(status="in-progress" if is_up else "planned")
        if not is_up:
            assert result.message.endswith("the API is down")


@scenario("Chapter", "Why This Matters")
def cleanup_by_hand(run: Run) -> None:
    """The traditional way still works: `fs` is the outer one, and reaches the call's files."""
    fails_without_a_trace(run, "traditional_handler")


@scenario("Chapter", "Why This Matters", 2)
def cleanup_by_the_transaction(run: Run) -> None:
    """The same outcome without a line of cleanup."""
    fails_without_a_trace(run, "wink_handler")


@scenario("Chapter", "Manual Transaction Control")
def manual_transactions(run: Run) -> None:
    """The three options, on every form of resources that they take, with every outcome."""
    for form in (as_registry, as_open_context, as_prompt_resources, as_mapping):
        # What each option's work leaves: option 1 is undone by hand, option 3 by its failure.
        assert manual_run(run, form, commit=False) == ["work 2"]
        # Option 1 keeps its work.
        assert manual_run(run, form, commit=True) == ["work 1", "work 2"]
        # Option 2 raises and takes back its own work only.
        assert manual_run(run, form, commit=True, failing="work 2") == ["work 1"]
        # Option 1 raises: rolled back by the context manager.
        assert manual_run(run, form, commit=True, failing="work 1") == []


def manual_run(
    run: Run, form: Callable[[Any], object], *, commit: bool, failing: str = ""
) -> list[str]:
    """Run the block and return what is left of its work, in session and files alike."""
    session, fs = Session(), make_vfs()
    numbers = iter(range(1, 10))

    def do_work(name: str = "") -> None:
        name = name or f"work {next(numbers)}"
        session.dispatch(Status(name))
        fs.write(name, "done")
        if name == failing:
            raise RuntimeError(name)

    def run_block() -> Executed:
        return run(
            elisions={"# ... native tool executes ...": "native_tool_executes()"},
            native_tool_executes=lambda: do_work("native"),
            session=session,
            resources=form(fs),
            do_work=do_work,
            should_commit=lambda: commit,
        )

    if failing:
        with pytest.raises(RuntimeError, match=failing):
            run_block()
    else:
        assert run_block().tracker.pending == ()
    left = [each.status for each in session[Status].all()]
    assert [entry.path for entry in fs.list()] == left
    return left


def as_registry(fs: object) -> object:
    return ResourceRegistry.build({Filesystem: fs})


def as_open_context(fs: object) -> object:
    return ResourceRegistry.build({Filesystem: fs}).open()


def as_prompt_resources(fs: object) -> object:
    return Prompt(PromptTemplate()).bind(resources={Filesystem: fs}).resources


def as_mapping(fs: object) -> object:
    return {Filesystem: fs}


# Policies


@scenario("Chapter", "SequentialDependencyPolicy")
def sequential_dependency(run: Run) -> None:
    """Denied until all that it depends on has succeeded; dependencies chain."""
    tools = [noop_tool(name) for name in ("test", "build", "deploy", "release")]
    model = Model.offered(*tools, policies=[run().deploy_policy])

    assert denial(model.call("deploy")) == DEPLOY_DENIED
    assert model.call("test").success
    assert "missing required tools: build\n" in denial(model.call("deploy"))
    assert model.call("build").success
    assert "missing required tools: deploy\n" in denial(model.call("release"))
    assert model.call("deploy").success
    assert model.call("release").success


@scenario("Chapter", "ReadBeforeWritePolicy")
def read_before_write(run: Run) -> None:
    """Only paths that were read in this session, and new ones, may be written."""
    fs = make_vfs({"config.json": "{}", "other.json": "{}"})
    model = file_model(run().read_first, fs)
    assert model.call("write_file", path="new.txt", content="new").success
    assert model.call("read_file", path="config.json").success
    assert model.call("write_file", path="/workspace/config.json", content="[]").success
    assert fs.read("config.json") == "[]"
    refused = model.call("write_file", path="other.json", content="[]")
    assert denial(refused) == "Cannot write to other.json without reading it first"
    another = file_model(run().read_first, fs)
    refused = another.call("write_file", path="config.json", content="")
    assert "without reading" in denial(refused)
    assert (fs.read("config.json"), fs.read("other.json")) == ("[]", "{}")


@scenario("Chapter", "ReadBeforeWritePolicy", 2)
def read_before_write_flow(run: Run) -> None:
    """The printed calls, as a model makes them, end as their comments say."""
    fs = make_vfs({"config.json": "old content"})
    model = file_model(ReadBeforeWritePolicy(), fs)
    tools: Any = {name: partial(model.call, name) for name in ("read_file", "write_file")}
    denied, read, updated, created = run(**tools).shown

    assert denial(denied) == "Cannot write to config.json without reading it first"
    assert "old content" in read.render()
    assert updated.success
    assert fs.read("config.json") == "updated content"
    assert created.success
    assert fs.read("new_file.txt") == "content"


@scenario("Chapter", "Attaching Policies to Sections")
def policies_on_a_section(run: Run) -> None:
    """The section's policies govern its tools."""
    dependencies = {"deploy": frozenset({"test", "build"})}
    seen = run(deploy_policy=SequentialDependencyPolicy(dependencies=dependencies))
    model = Model.given(seen.section)
    assert denial(model.call("deploy")) == DEPLOY_DENIED
    assert model.call("test").success
    assert model.call("build").success
    assert model.call("deploy").success


@scenario("Chapter", "Default Policies on Contrib Sections")
def default_policies_of_a_suite(run: Run) -> None:
    """A file that exists is read before it is written, without anybody asking for the policy."""
    config = VfsConfig(files={"config.json": "{}"})
    model = Model.given(run(session=Session(), vfs_config=config).vfs)
    change = {"path": "config.json", "content": "new"}
    refused = denial(model.call("write_file", **change))
    assert refused == "Cannot write to config.json without reading it first"
    assert model.call("read_file", path="config.json").success
    assert model.call("write_file", **change).success
    assert model.prompt.resources.get(Filesystem).read("config.json") == "new"


@scenario("Chapter", "Custom Policies")
def custom_policies(run: Run) -> None:
    """A class with just ``check`` is a policy; the built-in one denies in the same words."""
    seen = run()
    for policy in (seen.QuotaPolicy(max_calls=2), QuotaPolicy(max_calls=2)):
        ran: list[int] = []

        def count(params: None, *, context: ToolContext, ran: Any = ran) -> ToolResult[None]:
            ran.append(1)
            return ToolResult.ok()

        model = Model.offered(tool_of(count, "count", None, None), policies=[policy])
        assert model.call("count").success
        assert model.call("count").success
        assert denial(model.call("count")) == "Quota exceeded: 2/2 calls used"
        assert len(ran) == 2


@scenario("Chapter", "Policy Composition")
def policy_composition(run: Run) -> None:
    """In order; the first that denies answers, and those behind it are not asked."""
    asked: list[str] = []

    def policy(name: str, reason: str | None) -> object:
        def check(tool_name: str, params: object, context: ToolContext) -> str | None:
            asked.append(name)
            return reason

        return SimpleNamespace(check=check)

    for reasons, answer, expected in [
        ((None, "no deploy", "no write"), "no deploy", ["quota", "deploy"]),
        (("no quota", "no deploy", None), "no quota", ["quota"]),
        ((None, None, None), "deploy done", ["quota", "deploy", "read"]),
    ]:
        asked.clear()
        seen = run(
            quota_policy=policy("quota", reasons[0]),
            deploy_policy=policy("deploy", reasons[1]),
            read_before_write=policy("read", reasons[2]),
        )
        result = Model.given(seen.section).call("deploy")
        assert (result.message, asked) == (answer, expected)


# Best practices


@scenario("Chapter", "1. Always Implement `render()` on Result Types")
def render_on_results(run: Run) -> None:
    """The model sees the sentence and none of the fields."""
    value = run().MyResult(data={"internal": "structure"}, count=3)
    assert ToolResult.ok(value).render() == "Processed 3 items successfully"


@scenario("Chapter", "2. Use `exclude_value_from_context` for Large Payloads")
def large_payloads(run: Run) -> None:
    fs = make_vfs({"big.txt": "x" * 5000})
    seen = run(fs=fs)
    tool = tool_of(seen.read_large_file_handler, "read", ReadFileParams, FileContents)
    result = tool({"path": "big.txt"}, context=make_context(fs=fs))
    assert result.success
    assert result.value == FileContents("x" * 5000)
    assert result.render() == "Read 5000 bytes from big.txt"


@scenario("Chapter", "3. Prefer Declarative Policies Over Imperative Checks")
def imperative_checks(run: Run) -> None:
    """The check by hand works: history is in the session."""
    seen = run(elisions={"# ... actual logic": "return ToolResult.ok(message='Deployed')"})
    deploy = tool_of(seen.deploy_handler, "deploy", None, None)
    model = Model.offered(deploy, noop_tool("test"))
    assert denial(model.call("deploy")) == "Must run tests first"
    assert model.call("test").success
    assert model.call("deploy").message == "Deployed"


@scenario("Chapter", "4. Use Tool Examples for Complex Parameters")
def examples_for_parameters(run: Run) -> None:
    (example,) = run(handler=search_handler).tool.definition()["examples"]
    assert example == {
        "description": "Basic search",
        "input": {"query": "filesystem", "limit": 10},
        "output": {"matches": ["doc1", "doc2"], "total_count": 2},
    }


@scenario("Chapter", "6. Bundle Tools with Guidance in Sections")
def bundled_tools(run: Run) -> None:
    """The section works without a key; tools past all sections work too, with a warning."""

    @dataclass(frozen=True)
    class Task:
        topic: str

    section = MarkdownSection[Task](title="Task", template="$topic")
    prompt = Prompt(PromptTemplate(sections=[section]))
    with pytest.warns(UserWarning, match="extra_tools offers tools without guidance"):
        seen = run(prompt=prompt, params=Task("files"))
    model = Model.given(seen.section, resources={Filesystem: make_vfs({"a.txt": "a"})})
    assert "Always read before writing." in model.rendered.text
    assert "without reading" in denial(model.call("write_file", path="a.txt", content=""))
    assert model.call("read_file", path="a.txt").success
    assert model.call("write_file", path="a.txt", content="").success

    with pytest.warns(UserWarning, match="extra_tools"):
        bare = prompt.bind(Task("files"), extra_tools=[seen.read_file])
    assert [tool.name for tool in bare.render().tools] == ["read_file"]


@scenario("Chapter", "7. Use MainLoop for Resource Management")
def main_loop_for_resources(run: Run) -> None:
    """The loop opens what its config binds when a tool asks for it, and closes it at the end; by
    hand the ``with`` statement does. Both also when the run fails."""
    happened: list[str] = []

    class HTTPClient:
        def __init__(self, name: str) -> None:
            self.name = name
            happened.append(f"{name} opened")

        def close(self) -> None:
            happened.append(f"{self.name} closed")

    class MyLoop(MainLoop[str, Any]):
        def prepare(self, request: str) -> tuple[Prompt[Any], Session]:
            return Prompt(template), Session()

    def made(name: str) -> Binding[Any]:
        return Binding(HTTPClient, lambda resources: HTTPClient(name))

    def fetch(params: None, *, context: ToolContext) -> ToolResult[None]:
        happened.append(f"fetched with {context.resources.get(HTTPClient).name}")
        return ToolResult.ok(message="fetched")

    def answer(request: ModelRequest) -> str:
        happened.append(request.messages[-1].text)
        return "Done."

    def fail(request: ModelRequest) -> str:
        raise PromptEvaluationError("the provider is down")

    template = PromptTemplate(
        sections=[MarkdownSection(title="Web", tools=[tool_of(fetch, "fetch", None, None)])],
        resources={HTTPClient: made("the prompt's")},
    )

    def run_with(*script: Any) -> Executed:
        happened.clear()
        return run(
            MyLoop=MyLoop,
            MainLoopConfig=MainLoopConfig,
            adapter=ScriptedAdapter(script),
            bus=Dispatcher(),
            HTTPClient=HTTPClient,
            http_client=made("the loop's"),
            request="fetch",
            prompt=Prompt(template),
            session=Session(),
        )

    def steps(name: str, *last: str) -> list[str]:
        return [f"{name} opened", f"fetched with {name}", *last, f"{name} closed"]

    seen = run_with(calls("fetch"), answer, calls("fetch"), answer)
    assert seen.response.text == "Done."
    assert happened == [*steps("the loop's", "fetched"), *steps("the prompt's", "fetched")]

    with pytest.raises(PromptEvaluationError, match="the provider is down"):
        run_with(calls("fetch"), fail)
    assert happened == steps("the loop's")
    with pytest.raises(PromptEvaluationError, match="the provider is down"):
        run_with(calls("fetch"), answer, calls("fetch"), fail)
    assert happened == [*steps("the loop's", "fetched"), *steps("the prompt's")]

    # Nobody asks for it: it is never made, and so there is nothing to close.
    run_with(answer, answer)
    assert not [each for each in happened if "closed" in each or "opened" in each]


@scenario("Chapter", "8. Trust Transactions, Don't Reinvent Rollback")
def trusting_transactions(run: Run) -> None:
    """Both handlers commit; when writing fails, both leave nothing, one of them by trust."""

    @dataclass(frozen=True)
    class UpdateState:
        anything: object

    @dataclass(frozen=True)
    class State:
        pass

    for is_text in (True, False):
        fs = make_vfs()
        # Something that cannot be written: the failure comes between the two changes.
        data: Any = "data" if is_text else object()
        seen = run(fs=fs, data=data, UpdateState=UpdateState, State=State)
        for handler in seen.defined["handler"]:
            context = make_context(fs=fs)
            # The block leaves the value out, as `...`: a tool whose result is whatever it is.
            tool = Tool(
                name="a_tool",
                description="A tool of a seed.",
                handler=handler,
                params_type=None,
                result_type=Any,
                checked=False,
            )
            result = tool(context=context)
            assert result.success is is_text
            assert fs.exists("output.txt") is is_text
            assert len(context.session[UpdateState]) == is_text
        assert len(seen.defined["handler"]) == 2


@scenario("Chapter", "10. Test Tools in Isolation")
def tools_in_isolation(run: Run) -> None:
    """A context takes a plain registry, and leaves everything else to its defaults."""
    fs = make_vfs(["filesystem.md", "docs/filesystem.md", "other.md"])
    seen = run(session=Session(), registry=ResourceRegistry.build({Filesystem: fs}))
    assert run_tests(seen) == 1


def file_model(policy: object, fs: object) -> Model:
    """Return a model that reads and writes files, with the tools we ship, under a policy."""
    return Model.offered(
        FILE_TOOLS["read_file"],
        FILE_TOOLS["write_file"],
        policies=[policy],
        resources={Filesystem: fs},
    )


def denial(result: ToolResult[Any]) -> str:
    """Return the words of a refusal."""
    assert not result.success
    return result.message
