"""Policies allow or deny calls before they run; everything goes through the pipeline here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.contrib.tools import file_tools
from weakincentives.errors import (
    FilesystemError,
    PolicyDenied,
    PromptValidationError,
    ToolDefinitionError,
    WinkError,
)
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.prompt import (
    ApprovalPolicy,
    ApprovalRule,
    MarkdownSection,
    PolicyDecision,
    PolicyState,
    Prompt,
    PromptTemplate,
    ProtectedPathsPolicy,
    QuotaPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
    if_offered,
    tool,
)
from weakincentives.retry import RetryPolicies
from weakincentives.runtime import (
    Session,
    Snapshot,
    ToolCall,
    ToolInvoked,
    ToolRegistry,
    execute_tool,
    sequence,
    tool_transaction,
)
from weakincentives.testing import FakeClock


@dataclass(frozen=True)
class Nothing:
    fail: bool = False


@dataclass(frozen=True)
class File:
    path: str
    content: str = "new"
    fail: bool = False


def step(name: str) -> Tool[Any, Any]:
    def handler(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.error("It failed") if params.fail else ToolResult.ok(message="done")

    return Tool[Nothing, None](name=name, description="Do a step.", handler=handler)


def read(params: File, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult.ok(message=context.filesystem.read(params.path))


def write(params: File, *, context: ToolContext) -> ToolResult[None]:
    context.filesystem.write(params.path, params.content)
    return ToolResult.error("It failed") if params.fail else ToolResult.ok(message="written")


STEPS = {name: step(name) for name in ("lint", "test", "build", "deploy", "release")}
FILES = {
    "read_file": Tool[File, None](name="read_file", description="Read.", handler=read),
    "write_file": Tool[File, None](name="write_file", description="Write.", handler=write),
    "edit_file": Tool[File, None](name="edit_file", description="Edit.", handler=write),
}


@dataclass
class Agent:
    """One section with every tool, or the sections given, and a session to call them in."""

    policies: Sequence[object] = ()
    prompt_policies: Sequence[object] = ()
    sections: Sequence[MarkdownSection[Any]] = ()
    files: dict[str, str] | None = field(default_factory=lambda: {"a.txt": "old", "b.txt": "old"})
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        sections = self.sections or [
            MarkdownSection(tools=[*STEPS.values(), *FILES.values()], policies=self.policies)
        ]
        template = PromptTemplate(sections=sections, policies=self.prompt_policies)
        self.fs = None if self.files is None else MemoryFilesystem(self.files)
        resources = {} if self.fs is None else {Filesystem: self.fs}
        self.prompt = Prompt(template).bind(resources=resources)
        self.session = self.new_session()

    def new_session(self) -> Session:
        session = Session(clock=self.clock)
        self.prompt.render(session)
        return session

    def call(self, name: str, **arguments: object) -> ToolResult[Any]:
        return execute_tool(ToolCall(name, arguments), session=self.session)

    def allows(self, name: str, **arguments: object) -> bool:
        result = self.call(name, **arguments)
        assert result.success or (result.failure and result.failure.code == "POLICY_DENIED")
        return result.success

    @property
    def ran(self) -> list[str]:
        return [event.tool_name for event in self.session[ToolInvoked].all() if event.ran]


PIPELINE = {"deploy": frozenset({"test", "build"}), "build": frozenset({"lint"})}


# SequentialDependencyPolicy


def test_a_tool_waits_for_those_it_depends_on():
    agent = Agent([SequentialDependencyPolicy(dependencies=PIPELINE)])

    denied = agent.call("deploy")

    assert denied.message == (
        "Cannot call 'deploy' - missing required tools: build, test\n"
        "Call these tools first, then retry deploy."
    )
    assert denied.failure is not None
    assert denied.failure.code == "POLICY_DENIED"
    assert agent.ran == []
    for name in ("lint", "build", "test"):
        assert agent.allows(name)
    assert agent.allows("deploy")


def test_only_the_missing_tools_are_named():
    agent = Agent([SequentialDependencyPolicy(dependencies=PIPELINE)])
    agent.call("test")

    assert "missing required tools: build\n" in agent.call("deploy").message


def test_a_dependency_that_failed_or_was_denied_has_not_been_met():
    agent = Agent([SequentialDependencyPolicy(dependencies=PIPELINE)])

    assert not agent.call("lint", fail=True).success
    assert not agent.allows("build")
    assert "missing required tools: build, test" in agent.call("deploy").message


def test_a_dependency_that_was_met_under_another_prompt_counts():
    """Whether or not a policy listened then: the session knows what has succeeded in it."""
    before = Agent()
    before.call("lint")
    after = Agent([SequentialDependencyPolicy(dependencies=PIPELINE)])
    after.session = before.session
    after.prompt.render(after.session)

    assert after.allows("build")
    assert not after.allows("deploy")


def test_a_dependency_that_was_rolled_back_under_another_prompt_does_not_count():
    before = Agent()
    with suppress(RuntimeError), tool_transaction(before.session, before.prompt.resources):
        before.call("lint")
        raise RuntimeError("half way")
    after = Agent([SequentialDependencyPolicy(dependencies=PIPELINE)])
    after.session = before.session
    after.prompt.render(after.session)

    assert not after.allows("build")


def test_a_tool_without_dependencies_is_free():
    agent = Agent([SequentialDependencyPolicy(dependencies={"deploy": frozenset()})])

    assert agent.allows("deploy")
    assert agent.allows("lint")


def test_a_dependency_may_stand_in_another_section():
    policy = SequentialDependencyPolicy(dependencies={"deploy": frozenset({"test"})})
    agent = Agent(
        sections=[
            MarkdownSection(title="Checks", tools=[STEPS["test"]]),
            MarkdownSection(title="Release", tools=[STEPS["deploy"]], policies=[policy]),
        ]
    )

    assert not agent.allows("deploy")
    assert agent.allows("test")
    assert agent.allows("deploy")


def test_the_policy_of_another_section_does_not_govern_a_tool():
    agent = Agent(
        sections=[
            MarkdownSection(title="Checks", tools=[STEPS["test"]], policies=[Small("No")]),
            MarkdownSection(title="Release", tools=[STEPS["deploy"]]),
        ]
    )

    assert agent.allows("deploy")
    assert not agent.allows("test")


def test_a_policy_of_the_prompt_governs_every_tool():
    policy = SequentialDependencyPolicy(dependencies={"deploy": frozenset({"test"})})
    agent = Agent(prompt_policies=[policy])

    assert not agent.allows("deploy")


def test_dependencies_are_copied_and_held_to_be_sets():
    dependencies = {"deploy": {"test"}}
    agent = Agent([SequentialDependencyPolicy(dependencies=dependencies)])
    dependencies["deploy"].clear()

    assert not agent.allows("deploy")
    with pytest.raises(TypeError, match="set of tool names"):
        SequentialDependencyPolicy(dependencies={"deploy": "test"})


CALLS = st.lists(st.tuples(st.sampled_from(list(STEPS)), st.booleans()), max_size=12)
GRAPHS = st.dictionaries(
    st.sampled_from(list(STEPS)), st.frozensets(st.sampled_from(list(STEPS))), max_size=4
)


@given(calls=CALLS, graph=GRAPHS)
def test_a_call_runs_exactly_when_its_dependencies_have_succeeded(
    calls: list[tuple[str, bool]], graph: dict[str, frozenset[str]]
):
    """A denied call never ran; an allowed one had all it needs."""
    agent = Agent([SequentialDependencyPolicy(dependencies=graph)])
    done: set[str] = set()
    ran: list[str] = []

    for name, fail in calls:
        result = agent.call(name, fail=fail)
        allowed = graph.get(name, frozenset()) <= done
        assert (result.failure is not None and result.failure.code == "POLICY_DENIED") != allowed
        if allowed:
            ran.append(name)
        if result.success:
            done.add(name)

    assert agent.ran == ran


# ReadBeforeWritePolicy


def files(agent: Agent) -> dict[str, str]:
    assert agent.fs is not None
    return {path: agent.fs.read(path) for path in agent.fs.glob("**/*")}


def test_a_file_that_exists_must_be_read_before_it_is_written():
    agent = Agent([ReadBeforeWritePolicy()])

    denied = agent.call("write_file", path="a.txt")

    assert denied.message == "Cannot write to a.txt without reading it first"
    assert files(agent)["a.txt"] == "old"
    assert agent.allows("read_file", path="a.txt")
    assert agent.allows("write_file", path="a.txt")
    assert not agent.allows("edit_file", path="b.txt")


def test_of_a_directory_the_tool_itself_says_that_it_cannot_be_written():
    """To read it first is no advice that a model could follow."""
    agent = Agent([ReadBeforeWritePolicy()], files={"d/a.txt": "old"})

    answer = agent.call("write_file", path="d")

    assert not answer.success
    assert "without reading" not in answer.message
    assert "directory" in answer.message


def test_a_new_file_may_be_written_at_once_and_is_known_from_then_on():
    agent = Agent([ReadBeforeWritePolicy()])

    assert agent.allows("write_file", path="new/c.txt")
    assert agent.allows("write_file", path="new/c.txt", content="again")
    assert agent.allows("edit_file", path="/workspace/new/c.txt", content="and again")


@pytest.mark.parametrize("other", ["/workspace/a.txt", "./a.txt", "x/../a.txt", "a.txt"])
def test_a_file_is_known_under_all_its_spellings(other: str):
    for first, second in (("a.txt", other), (other, "a.txt")):
        agent = Agent([ReadBeforeWritePolicy()])
        assert agent.allows("read_file", path=first)
        assert agent.allows("write_file", path=second)


def test_a_failed_read_or_write_makes_no_file_known():
    agent = Agent([ReadBeforeWritePolicy()])

    assert not agent.call("read_file", path="c.txt").success
    assert not agent.call("write_file", path="c.txt", fail=True).success
    assert agent.fs is not None
    agent.fs.write("c.txt", "someone else's")

    assert not agent.allows("write_file", path="c.txt")


def test_a_path_outside_the_root_is_denied_in_words():
    agent = Agent([ReadBeforeWritePolicy()])

    denied = agent.call("write_file", path="../etc/passwd")

    assert "outside the root" in denied.message
    assert denied.failure is not None
    assert denied.failure.code == "POLICY_DENIED"


def test_other_tools_and_fields_can_be_named():
    @dataclass(frozen=True)
    class Edit:
        target: str

    def edit(params: Edit, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok()

    tools = [
        Tool[Edit, None](name=name, description="Edit.", handler=edit) for name in ("see", "put")
    ]
    policy = ReadBeforeWritePolicy(
        read_tools={"see"}, write_tools={"put"}, path_field="target", name="mine"
    )
    agent = Agent(sections=[MarkdownSection(tools=tools, policies=[policy])])

    assert not agent.allows("put", target="a.txt")
    assert agent.allows("see", target="a.txt")
    assert agent.allows("put", target="a.txt")


def test_a_write_tool_without_a_path_is_denied():
    """Fail closed: what cannot be told is not allowed."""
    agent = Agent([ReadBeforeWritePolicy(write_tools={"deploy"})])

    assert "Cannot tell which file 'deploy' writes" in agent.call("deploy").message


def test_raw_arguments_name_their_path_too():
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}

    def handler(params: dict[str, Any], *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok()

    tools = [Tool.from_schema(n, "File.", schema, handler) for n in ("read_file", "write_file")]
    agent = Agent(sections=[MarkdownSection(tools=tools, policies=[ReadBeforeWritePolicy()])])

    assert not agent.allows("write_file", path="a.txt")
    assert agent.allows("read_file", path="./a.txt")
    assert agent.allows("write_file", path="a.txt")


def test_without_a_filesystem_every_file_must_be_read_first():
    """Nobody can tell what is new, so nothing is taken for new."""

    def handler(params: File, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok()

    tools = [
        Tool[File, None](name=name, description="File.", handler=handler)
        for name in ("read_file", "write_file")
    ]
    section = MarkdownSection(tools=tools, policies=[ReadBeforeWritePolicy()])
    agent = Agent(sections=[section], files=None)

    assert not agent.allows("write_file", path="a.txt")
    assert agent.allows("read_file", path="a.txt")
    assert agent.allows("write_file", path="a.txt")


SHIPPED = file_tools()


def shipped(*policies: object, fs: Any = None) -> Agent:
    """An agent with the file tools that we ship."""
    agent = Agent(sections=[MarkdownSection(tools=SHIPPED, policies=policies)])
    if fs is not None:
        agent.fs = fs
        agent.prompt = agent.prompt.bind(resources={Filesystem: fs})
        agent.session = agent.new_session()
    return agent


def test_a_file_that_was_read_is_overwritten_by_a_plain_write():
    agent = shipped(ReadBeforeWritePolicy())

    assert not agent.allows("write_file", path="a.txt", content="new")
    assert agent.allows("read_file", path="a.txt")
    assert agent.call("write_file", path="./a.txt", content="new").success
    assert agent.call("write_file", path="a.txt", content="newer").success
    assert files(agent) == {"a.txt": "newer", "b.txt": "old"}


def test_without_a_policy_a_plain_write_still_says_that_the_file_exists():
    agent = shipped()
    agent.call("read_file", path="a.txt")

    refused = agent.call("write_file", path="a.txt", content="new")

    assert refused.message.startswith("File already exists: a.txt")
    assert "overwrite=true" in refused.message
    assert agent.call("write_file", path="a.txt", content="new", overwrite=True).success


@pytest.mark.parametrize("tool", ["copy_file", "move_file"])
def test_a_file_that_was_not_read_is_not_replaced_by_another(tool: str):
    agent = shipped(ReadBeforeWritePolicy())
    agent.call("read_file", path="a.txt")
    move = {"source": "a.txt", "destination": "/workspace/b.txt", "overwrite": True}

    denied = agent.call(tool, **move)
    assert denied.message == "Cannot write to /workspace/b.txt without reading it first"
    assert files(agent) == {"a.txt": "old", "b.txt": "old"}

    assert agent.allows("read_file", path="b.txt")
    assert agent.allows(tool, **move)


@pytest.mark.parametrize("tool", ["copy_file", "move_file"])
def test_a_directory_takes_the_place_of_another_once_all_its_files_were_read(tool: str):
    agent = shipped(ReadBeforeWritePolicy())
    assert agent.fs is not None
    for path in ("from/x.txt", "to/x.txt", "to/deep/y.txt"):
        agent.fs.write(path, path)
    move = {"source": "from", "destination": "to", "overwrite": True}
    agent.call("read_file", path="to/x.txt")

    denied = agent.call(tool, **move)
    assert denied.message == "Cannot replace to: to/deep/y.txt in it was not read"

    assert agent.allows("read_file", path="to/deep/y.txt")
    assert agent.allows(tool, **move)


@pytest.mark.parametrize("tool", ["copy_file", "move_file"])
def test_what_was_read_is_known_where_it_was_put_and_nothing_else_is(tool: str):
    agent = shipped(ReadBeforeWritePolicy())
    assert agent.fs is not None
    agent.fs.write("d/x.txt", "x")
    for path in ("a.txt", "d/x.txt"):
        agent.call("read_file", path=path)
    for source, destination in (("a.txt", "new.txt"), ("b.txt", "unread.txt"), ("d", "e")):
        assert agent.allows(tool, source=source, destination=destination)

    assert agent.allows("write_file", path="new.txt", content="new")
    assert agent.allows("write_file", path="e/x.txt", content="new")
    assert not agent.allows("write_file", path="unread.txt", content="new")


@pytest.fixture(params=["memory", "disk"])
def two_files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "memory":
        yield MemoryFilesystem({"a.txt": "old", "b.txt": "old"})
        return
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("old")
    with HostFilesystem(tmp_path) as fs:
        yield fs


WRITES = [
    ("write_file", {"path": "a.txt", "content": "the agent's", "overwrite": True}),
    ("edit_file", {"path": "a.txt", "old_string": "o", "new_string": "0"}),
    ("copy_file", {"source": "b.txt", "destination": "a.txt", "overwrite": True}),
    ("move_file", {"source": "b.txt", "destination": "a.txt", "overwrite": True}),
]


@pytest.mark.parametrize(("tool", "arguments"), WRITES, ids=[name for name, _ in WRITES])
def test_a_file_that_someone_changed_since_it_was_read_must_be_read_again(
    two_files: Any, tool: str, arguments: dict[str, object]
):
    agent = shipped(ReadBeforeWritePolicy(), fs=two_files)
    agent.call("read_file", path="a.txt")
    two_files.write("a.txt", "a person's work: old")

    denied = agent.call(tool, **arguments)
    assert denied.failure.code == "POLICY_DENIED"
    assert denied.message == (
        "Cannot write to a.txt: it has changed since it was last read or written here\n"
        "Read it again, then retry"
    )
    assert two_files.read("a.txt") == "a person's work: old"

    assert agent.allows("read_file", path="a.txt")
    assert agent.call(tool, **arguments).success or tool == "edit_file"


def test_what_the_agent_wrote_and_someone_then_changed_must_be_read(two_files: Any):
    agent = shipped(ReadBeforeWritePolicy(), fs=two_files)
    assert agent.allows("write_file", path="new.txt", content="mine")
    two_files.write("new.txt", "a person's")

    assert not agent.allows("write_file", path="new.txt", content="mine again")


def test_a_file_of_which_a_part_was_read_is_known_as_it_was_then(two_files: Any):
    two_files.write("long.txt", "one\ntwo\nthree\n")
    agent = shipped(ReadBeforeWritePolicy(), fs=two_files)
    agent.call("read_file", path="long.txt", limit=1)
    assert agent.allows("edit_file", path="long.txt", old_string="two", new_string="2")

    agent.call("read_file", path="long.txt", limit=1)
    two_files.write("long.txt", "one\n2\nfour\n")
    assert not agent.allows("edit_file", path="long.txt", old_string="2", new_string="two")


def test_what_was_read_is_known_by_its_content_in_another_process():
    agent = shipped(ReadBeforeWritePolicy())
    assert agent.fs is not None
    for path in ("a.txt", "b.txt"):
        agent.call("read_file", path=path)
    saved = agent.session.snapshot().to_json()
    agent.fs.write("b.txt", "a person's")
    agent.session = Session.from_snapshot(Snapshot.from_json(saved))
    agent.prompt.render(agent.session)

    assert agent.allows("write_file", path="a.txt", content="new")
    assert not agent.allows("write_file", path="b.txt", content="new")


def test_a_change_between_the_read_and_its_note_is_not_missed(tmp_path: Path):
    """The content that the model was shown counts, not what the file holds a moment later."""
    file = tmp_path / "a.txt"
    file.write_text("old")

    class Person:
        name = "person"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision.allow()

        def on_result(self, tool: Any, *_: Any, context: ToolContext) -> None:
            file.write_text("a person's")

    with HostFilesystem(tmp_path) as fs:
        agent = shipped(Person(), ReadBeforeWritePolicy(), fs=fs)
        agent.call("read_file", path="a.txt")

        assert not agent.allows("write_file", path="a.txt", content="new")


def test_a_tool_that_reads_elsewhere_is_no_problem():
    """A path that means nothing to the filesystem makes no file known, and no call fail."""

    def fetch(params: File, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.ok()

    tool = Tool[File, None](name="read_file", description="Fetch.", handler=fetch)
    agent = Agent(sections=[MarkdownSection(tools=[tool], policies=[ReadBeforeWritePolicy()])])

    assert agent.allows("read_file", path="/etc/hosts")


FILE_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["read_file", "write_file", "edit_file"]),
        st.sampled_from(["a.txt", "./a.txt", "/workspace/a.txt", "b.txt", "c.txt", "d/../c.txt"]),
        st.booleans(),
    ),
    max_size=12,
)


@given(calls=FILE_CALLS)
def test_no_file_is_ever_overwritten_unseen(calls: list[tuple[str, str, bool]]):
    agent = Agent([ReadBeforeWritePolicy()])
    assert agent.fs is not None
    known: set[str] = set()

    for name, path, fail in calls:
        file = agent.fs.normalize(path)
        existed = agent.fs.exists(file)
        before = files(agent)
        result = agent.call(name, path=path, fail=fail, content=f"by {len(agent.ran)}")
        if name != "read_file" and existed and file not in known:
            assert not result.success
        if result.success:
            known.add(file)
        else:
            assert files(agent) == before
        if name != "read_file" and not fail and (file in known or not existed):
            assert result.success


# ProtectedPathsPolicy


@dataclass(frozen=True)
class Script:
    """What a tool that may do anything is to do."""

    steps: tuple[tuple[str, ...], ...]


def do_anything(params: Script, *, context: ToolContext) -> ToolResult[None]:
    """Stands for a command: its parameters do not tell what it changes."""
    files = context.filesystem
    for action, *arguments in params.steps:
        if action == "delete":
            files.delete(*arguments, recursive=True)
        else:
            getattr(files, action)(*arguments)
    return ToolResult.ok(None, "done")


ANYTHING = Tool[Script, None](name="do_anything", description="Do.", handler=do_anything)


def protected(*patterns: str, **options: Any) -> Agent:
    section = MarkdownSection(
        tools=[*FILES.values(), ANYTHING], policies=[ProtectedPathsPolicy(patterns, **options)]
    )
    files = {".env": "s", "app/.env": "s", "app/a.txt": "a", "docs/x/b.md": "b", "free.txt": "f"}
    return Agent(sections=[section], files=files)


@pytest.mark.parametrize(
    ("pattern", "kept", "free"),
    [
        (".env", [".env", "app/.env"], ["app/a.txt", ".env2"]),
        ("/.env", [".env"], ["app/.env"]),
        ("app", ["app", "app/a.txt", "app/new/x"], ["apple", "free.txt"]),
        ("app/", ["app/a.txt"], ["free.txt"]),
        ("app/*", ["app/a.txt", "app/x/y"], ["app", "free.txt"]),
        ("docs/**", ["docs/x", "docs/x/b.md"], ["docs", "free.txt"]),
        ("**/*.md", ["docs/x/b.md", "c.md"], ["app/a.txt"]),
        ("*.md", ["docs/x/b.md", "c.md"], ["app/a.txt"]),
        ("docs/*/b.md", ["docs/x/b.md"], ["docs/b.md", "docs/x/y/b.md"]),
    ],
)
def test_a_pattern_protects_what_it_matches_and_all_that_is_in_it(
    pattern: str, kept: list[str], free: list[str]
):
    policy = ProtectedPathsPolicy([pattern])

    assert [path for path in [*kept, *free] if policy.protects(path)] == kept


def test_a_call_that_names_a_protected_path_does_not_run():
    agent = protected(".env")

    denied = agent.call("write_file", path="/workspace/app/../.env", content="x")

    assert denied.message == "Cannot change .env: it is protected. Leave it as it is"
    assert agent.ran == []
    assert agent.call("read_file", path=".env").success


@pytest.mark.parametrize("pattern", ["DIR/sub/a", "DIR/sub", "DIR", "DIR/**/a", "DIR/link"])
@pytest.mark.parametrize("directory", ["/workspace", "its own"])
def test_a_pattern_may_have_the_whole_path(tmp_path: Path, directory: str, pattern: str):
    """It would silently never apply otherwise."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a").write_text("1")
    (tmp_path / "link").symlink_to("sub/a")
    place = str(tmp_path) if directory == "its own" else directory
    policy = ProtectedPathsPolicy([pattern.replace("DIR", place)])
    with HostFilesystem(tmp_path) as files:
        tools = ToolRegistry([FILES["write_file"], ANYTHING], policies=[policy], workspace=files)

        assert not tools.execute("write_file", {"path": "sub/a", "content": "2"}).success
        assert not tools.execute("do_anything", {"steps": [["write", "sub/a", "2"]]}).success
    assert (tmp_path / "sub/a").read_text() == "1"


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([("write", ".env", "x")], ".env"),
        ([("append", "app/.env", "x")], "app/.env"),
        ([("delete", "app")], "app/.env"),
        ([("move", "app", "elsewhere")], "app/.env, elsewhere/.env"),
        ([("move", "app", "b"), ("move", "b", "c")], "app/.env, c/.env"),
        ([("write", "new/.env", "x")], "new/.env"),
        ([("copy", ".env", "copy/.env")], "copy/.env"),
    ],
)
def test_whatever_changes_a_protected_path_is_undone_as_a_whole(
    steps: list[tuple[str, ...]], named: str
):
    agent = protected(".env")
    assert agent.fs is not None

    denied = agent.call("do_anything", steps=[("write", "free.txt", "x"), *steps])

    assert denied.failure is not None
    assert denied.failure.code == "POLICY_DENIED"
    assert denied.message == (
        f"'do_anything' changed protected paths: {named}. The whole call is undone. Leave these "
        "paths as they are"
    )
    record = agent.session[ToolInvoked].latest()
    assert record is not None
    assert (record.ran, record.denied_by) == (True, "protected_paths")
    assert agent.fs.read("free.txt") == "f"
    assert agent.fs.read(".env") == "s"
    assert agent.fs.read("app/.env") == "s"


@pytest.mark.parametrize("pattern", [".env", "/.env", "app/.env", "**/.env"])
def test_a_link_is_protected_with_what_it_leads_to(tmp_path: Path, pattern: str):
    """Whichever way the file is named, and whatever links are on the way."""
    root = tmp_path / "work"
    (root / "secrets/deep").mkdir(parents=True)
    (root / "real").mkdir()
    (root / "secrets/deep/production").write_text("s")
    (root / "secrets/current").symlink_to("deep/production")
    (root / ".env").symlink_to("secrets/current")
    (root / "app").symlink_to("real")
    (root / "real/.env").symlink_to("../secrets/current")
    (root / "free.txt").write_text("f")

    @tool(writes="external")
    def meddle(path: str) -> str:
        """Change a file as any program does."""
        (root / path).write_text("x")
        return "done"

    @tool
    def relink(*, context: ToolContext) -> str:
        """Put another link on the way."""
        context.filesystem.run("ln -sfn ../free.txt secrets/current", check=True)
        return "done"

    section = MarkdownSection(
        tools=[*FILES.values(), ANYTHING, meddle, relink],
        policies=[ProtectedPathsPolicy([pattern])],
    )
    with HostFilesystem(root) as files:
        prompt = Prompt(PromptTemplate(sections=[section])).bind(resources={Filesystem: files})
        session = Session()
        prompt.render(session)

        def call(name: str, **arguments: object) -> ToolResult[Any]:
            return execute_tool(ToolCall(name, arguments), session=session)

        target = "secrets/deep/production"
        denied = [
            call("write_file", path=target),
            call("do_anything", steps=[("write", target, "x")]),
            call("do_anything", steps=[("write", ".env", "x")]),
            call("do_anything", steps=[("move", "secrets/deep", "elsewhere")]),
            call("meddle", path=target),
            call("relink"),
        ]
        assert [each.success for each in denied] == [False] * 6
        assert all("protected" in each.message for each in denied), denied
        assert (root / ".env").read_text() == "s"
        assert call("do_anything", steps=[("write", "free.txt", "x")]).success


def test_what_ends_as_it_was_was_not_changed():
    agent = protected(".env")

    assert agent.allows("do_anything", steps=[("write", ".env", "x"), ("write", ".env", "s")])
    assert agent.allows("do_anything", steps=[("write", "new.txt", "x"), ("delete", "docs")])


def test_a_call_that_is_refused_after_it_ran_is_not_tried_again():
    section = MarkdownSection(
        tools=[
            Tool[Script, None](
                name="do_anything",
                description="Do.",
                handler=do_anything,
                reach="reversible",
                retry=RetryPolicies.QUICK,
            )
        ],
        policies=[ProtectedPathsPolicy([".env"])],
    )
    agent = Agent(sections=[section], files={".env": "s"})

    denied = agent.call("do_anything", steps=[("write", ".env", "x")])

    assert denied.metadata is not None
    assert denied.metadata.attempts == 1


def test_a_filesystem_that_cannot_tell_what_was_changed_is_not_trusted():
    class Silent:
        """Has what tools need, and no more."""

        def __init__(self) -> None:
            self.text = ""

        def write(self, path: str, content: str) -> None:
            self.text = content

        def normalize(self, path: str) -> str:
            return path

    section = MarkdownSection(tools=[ANYTHING], policies=[ProtectedPathsPolicy([".env"])])
    prompt = Prompt(PromptTemplate(sections=[section])).bind(resources={Filesystem: Silent()})
    session = Session()
    prompt.render(session)

    denied = execute_tool(
        ToolCall("do_anything", {"steps": [("write", "a", "b")]}), session=session
    )

    assert denied.message == "A Silent cannot tell what was changed"


def test_patterns_are_several_and_make_sense():
    with pytest.raises(TypeError, match="several globs"):
        ProtectedPathsPolicy(".env")
    with pytest.raises(FilesystemError, match=r"cannot contain '\.\.'"):
        ProtectedPathsPolicy(["../x"])


def test_a_quota_and_a_rate_can_be_about_some_tools():
    agent = Agent(
        policies=[
            QuotaPolicy(1, tools={"lint"}, name="quota of lint"),
            RateLimitPolicy(1, tools={"test"}),
        ]
    )

    assert [agent.allows(name) for name in ("lint", "lint", "build", "build")] == [
        True,
        False,
        True,
        True,
    ]
    assert [agent.allows("test"), agent.allows("test")] == [True, False]


# QuotaPolicy


def test_a_quota_is_used_up_by_calls_that_ran_failed_ones_too():
    agent = Agent([QuotaPolicy(max_calls=3)])

    assert agent.allows("lint")
    assert not agent.call("test", fail=True).success
    assert agent.allows("build")
    assert agent.call("deploy").message == "Quota exceeded: 3/3 calls used"
    assert agent.call("deploy").message == "Quota exceeded: 3/3 calls used"
    assert agent.ran == ["lint", "test", "build"]


def test_refusals_use_up_nothing():
    policies = [QuotaPolicy(max_calls=1), SequentialDependencyPolicy(dependencies=PIPELINE)]
    for order in (policies, policies[::-1]):
        agent = Agent(order)

        assert not agent.allows("deploy")
        assert "not found" in agent.call("no_such_tool").message
        assert "Invalid parameters" in agent.call("lint", colour="red").message
        assert agent.allows("lint")
        assert not agent.allows("lint")


def test_a_quota_counts_the_calls_it_governs():
    agent = Agent(
        sections=[
            MarkdownSection(title="Free", tools=[STEPS["lint"]]),
            MarkdownSection(title="Paid", tools=[STEPS["deploy"]], policies=[QuotaPolicy(1)]),
        ]
    )

    assert all(agent.allows("lint") for _ in range(3))
    assert agent.allows("deploy")
    assert not agent.allows("deploy")


def test_quotas_of_the_section_and_of_the_prompt_count_for_themselves():
    agent = Agent(
        sections=[
            MarkdownSection(title="Free", tools=[STEPS["lint"]]),
            MarkdownSection(
                title="Paid", tools=[STEPS["deploy"]], policies=[QuotaPolicy(1, name="paid")]
            ),
        ],
        prompt_policies=[QuotaPolicy(3)],
    )

    assert [agent.allows(name) for name in ("deploy", "deploy", "lint", "lint", "lint")] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_a_quota_of_none_allows_nothing_and_less_is_refused():
    assert not Agent([QuotaPolicy(0)]).allows("lint")
    with pytest.raises(ValueError, match="max_calls"):
        QuotaPolicy(-1)
    with pytest.raises(ValueError, match="max_calls_per_minute"):
        RateLimitPolicy(-1)


def test_a_reset_gives_back_no_quota():
    """It counts in a LOG slice: what was tried was tried."""
    agent = Agent([QuotaPolicy(1)])
    agent.call("lint")
    agent.session.reset()

    assert not agent.allows("lint")


@given(calls=CALLS, limit=st.integers(0, 5))
def test_never_more_calls_run_than_the_quota_has(calls: list[tuple[str, bool]], limit: int):
    agent = Agent([QuotaPolicy(limit), SequentialDependencyPolicy(dependencies=PIPELINE)])

    for name, fail in calls:
        before = len(agent.ran)
        result = agent.call(name, fail=fail)
        if "Quota exceeded" in result.message:
            assert before == limit
            assert len(agent.ran) == before

    assert len(agent.ran) <= limit


# RateLimitPolicy


def test_a_tool_may_run_so_often_within_a_minute():
    agent = Agent([RateLimitPolicy(max_calls_per_minute=2)])

    assert agent.allows("lint")
    agent.clock.advance(30)
    assert not agent.call("lint", fail=True).success
    agent.clock.advance(30)
    assert agent.call("lint").message == (
        "Rate limit exceeded: 2 calls to lint in last minute\n"
        "Maximum: 2 calls per minute\n"
        "Wait 60 seconds before retrying"
    )
    assert agent.allows("test"), "each tool has its own limit"
    agent.clock.advance(0.001)
    assert agent.allows("lint")
    assert not agent.allows("lint")


def test_denied_calls_do_not_extend_the_wait():
    agent = Agent([RateLimitPolicy(1)])
    agent.call("lint")

    for _ in range(12):
        agent.clock.advance(5)
        assert not agent.allows("lint")
    agent.clock.advance(5)
    assert agent.allows("lint")


@given(waits=st.lists(st.floats(0, 70, allow_nan=False), max_size=15), limit=st.integers(1, 3))
def test_no_minute_sees_more_calls_than_allowed(waits: list[float], limit: int):
    agent = Agent([RateLimitPolicy(limit)])
    ran: list[float] = []

    for wait in waits:
        agent.clock.advance(wait)
        now = agent.clock.time()
        recent = [moment for moment in ran if moment >= now - 60]
        assert agent.allows("lint") == (len(recent) < limit)
        if len(recent) < limit:
            ran.append(now)


# What policies remember


def test_memory_follows_snapshot_and_restore():
    agent = Agent([SequentialDependencyPolicy(dependencies=PIPELINE), ReadBeforeWritePolicy()])
    fresh = agent.session.snapshot()
    agent.call("lint")
    agent.call("read_file", path="a.txt")
    known = agent.session.snapshot()

    agent.session.restore(known)
    assert agent.allows("build")
    assert agent.allows("write_file", path="a.txt")
    agent.session.restore(fresh)
    assert not agent.allows("build")
    assert not agent.allows("write_file", path="a.txt")


def test_reset_clears_what_succeeded():
    agent = Agent([SequentialDependencyPolicy(dependencies=PIPELINE)])
    agent.call("lint")
    agent.session.reset()

    assert agent.session[PolicyState].all() == ()
    assert not agent.allows("build")


def test_each_session_remembers_for_itself():
    agent = Agent([SequentialDependencyPolicy(dependencies=PIPELINE), QuotaPolicy(2)])
    agent.call("lint")
    agent.call("lint")
    agent.session = agent.new_session()

    assert not agent.allows("build")
    assert agent.allows("lint")
    assert agent.allows("build")


def test_memory_is_a_slice_that_can_be_read():
    agent = Agent([SequentialDependencyPolicy(dependencies=PIPELINE), ReadBeforeWritePolicy()])
    agent.call("lint")
    agent.call("read_file", path="/workspace/a.txt")

    first, second = agent.session[PolicyState].all()
    assert first == PolicyState("sequential_dependency", frozenset({"lint", "read_file"}))
    assert (second.policy_name, second.invoked_tools) == ("read_before_write", {"read_file"})
    assert second.invoked_keys == {("read_file", "a.txt")}


def test_memory_can_be_given():
    agent = Agent([SequentialDependencyPolicy(dependencies=PIPELINE)])
    agent.session[PolicyState].seed(
        PolicyState("sequential_dependency", invoked_tools=frozenset({"test"}))
    )

    agent.call("lint")
    agent.call("build")
    assert agent.allows("deploy")


def test_memory_goes_on_in_another_process():
    policies = [
        SequentialDependencyPolicy(dependencies=PIPELINE),
        ReadBeforeWritePolicy(),
        QuotaPolicy(5),
        RateLimitPolicy(2),
    ]
    agent = Agent(policies)
    agent.call("lint")
    agent.call("read_file", path="a.txt")
    text = agent.session.snapshot().to_json()

    json.loads(text)
    agent.session = Session.from_snapshot(Snapshot.from_json(text), clock=agent.clock)
    agent.prompt.render(agent.session)
    assert agent.allows("build")
    assert agent.allows("write_file", path="a.txt")
    assert agent.allows("lint")
    assert "Quota exceeded: 5/5" in agent.call("lint").message


def test_a_call_within_a_call_is_remembered_only_if_both_succeed():
    policy = SequentialDependencyPolicy(dependencies=PIPELINE)

    def outer(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        assert execute_tool(ToolCall("lint"), context=context).success
        return ToolResult.error("It failed") if params.fail else ToolResult.ok()

    both = Tool[Nothing, None](name="both", description="Do both.", handler=outer)
    section = MarkdownSection(tools=[*STEPS.values(), both], policies=[policy])
    agent = Agent(sections=[section])

    agent.call("both", fail=True)
    assert not agent.allows("build")
    agent.call("both")
    assert agent.allows("build")


# Policies of one's own, in both forms


@dataclass
class Full:
    """The canonical form."""

    verdict: Any = field(default_factory=PolicyDecision.allow)
    name: str = "full"
    log: list[Any] = field(default_factory=list)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> Any:
        self.log.append((tool.name, params, context.session.session_id))
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: Any, *, context: ToolContext
    ) -> None:
        self.log.append((tool.name, result.message))


class Small:
    """The Chapter's form."""

    def __init__(self, verdict: Any = None) -> None:
        self.verdict = verdict
        self.log: list[Any] = []

    def check(self, tool_name: str, params: object, context: ToolContext) -> str | None:
        self.log.append((tool_name, params, context.session.session_id))
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


@pytest.mark.parametrize("form", [Full, Small])
def test_both_forms_are_asked_with_what_they_take(form: Callable[[], Any]):
    policy = form()
    agent = Agent([policy])

    assert agent.allows("lint")

    assert policy.log[0] == ("lint", Nothing(), agent.session.session_id)
    assert policy.log[1:] == ([("lint", "done")] if form is Full else [])


@pytest.mark.parametrize(
    "policy",
    [
        Full(PolicyDecision.deny("Not today")),
        Full(PolicyDecision(False, "Not today")),
        Small("Not today"),
    ],
)
def test_both_forms_deny_in_their_own_words(policy: Any):
    agent = Agent([policy])

    assert agent.call("lint").message == "Not today"
    assert agent.ran == []


@pytest.mark.parametrize("policy", [Full(PolicyDecision(False)), Full(PolicyDecision(False, ""))])
def test_a_denial_without_a_reason_names_the_policy(policy: Any):
    assert Agent([policy]).call("lint").message == "Denied by policy 'full'"
    assert Agent([Small("")]).call("lint").message == "Denied by policy 'Small'"


@pytest.mark.parametrize(
    "policy",
    [
        Full(RuntimeError("the store is down")),
        Small(RuntimeError("the store is down")),
        Full(None),
        Full(True),
        Full("Not today"),
        Full(Nothing()),
        Full(PolicyDecision("yes")),
        Full(PolicyDecision(1)),
        Small(True),
        Small(0),
        Small(["Not today"]),
    ],
)
def test_a_policy_that_raises_or_answers_nonsense_denies(policy: Any):
    """Fail closed: a policy that cannot decide does not allow."""
    agent = Agent([policy])

    assert not agent.allows("lint")
    assert agent.ran == []


def test_a_policy_may_deny_a_call_that_is_about_to_run():
    """By PolicyDenied in on_start: nothing runs, what it wrote to STATE is undone."""

    class LastMoment(Full):
        def on_start(self, tool: Any, params: Any, *, context: ToolContext) -> None:
            context.session[PolicyState].append(PolicyState("last moment"))
            raise PolicyDenied("The window has just closed")

    agent = Agent([LastMoment(PolicyDecision.allow())])
    result = agent.call("lint")

    assert result.failure is not None
    assert (result.failure.code, result.message) == ("POLICY_DENIED", "The window has just closed")
    assert agent.ran == []
    assert not agent.session[PolicyState].all()
    record = agent.session[ToolInvoked].latest()
    assert record is not None
    assert (record.denied_by, record.ran) == ("full", False)


def test_a_small_policy_may_answer_in_the_full_form():
    assert Agent([Small(PolicyDecision.allow())]).allows("lint")
    assert Agent([Small(PolicyDecision.deny("No"))]).call("lint").message == "No"


def test_a_policy_needs_neither_a_name_nor_to_hear_of_results():
    class OnlyCheck:
        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision.deny("") if tool.name == "deploy" else PolicyDecision.allow()

    agent = Agent([OnlyCheck()])

    assert agent.allows("lint")
    assert agent.call("deploy").message == "Denied by policy 'OnlyCheck'"


def test_a_check_that_is_annotated_to_take_the_tool_gets_the_tool():
    """Its context need not be keyword-only: a type checker takes it for the full form."""

    class Named:
        def check(self, tool: Tool[Any, Any], params: Any, context: ToolContext) -> PolicyDecision:
            return PolicyDecision.deny(f"Not {tool.name}")

    assert Agent([Named()]).call("lint").message == "Not lint"


def test_a_small_policy_gets_what_it_names():
    class Swapped:
        def check(self, context: ToolContext, tool_name: str) -> str | None:
            return None if tool_name == "lint" and context.session else "No"

    class KeywordOnly:
        def check(self, tool_name: str, params: Any, *, context: ToolContext) -> str | None:
            return None if tool_name == "lint" else "No"

    class Everything:
        def check(self, tool_name: str, **more: Any) -> str | None:
            return None if tool_name == "lint" and {*more} == {"params", "context"} else "No"

    for policy in (Swapped(), KeywordOnly(), Everything()):
        agent = Agent([policy])
        assert agent.allows("lint")
        assert not agent.allows("test")


class OtherNames:
    def check(self, name: str, params: object, ctx: ToolContext) -> str | None: ...


class NamesTheTool:
    """It compares a tool to a text, and would allow everything."""

    def check(self, tool: str, params: object, context: ToolContext) -> str | None: ...


@pytest.mark.parametrize(
    ("policy", "asked"), [(OtherNames(), "name, ctx"), (NamesTheTool(), "tool")]
)
def test_a_small_policy_that_names_something_else_is_refused(policy: Any, asked: str):
    with pytest.raises(
        TypeError, match=f"asks for {asked}, but .* any of tool_name, params, context"
    ):
        MarkdownSection(policies=[policy])


def test_a_full_policy_may_take_its_context_among_others():
    class Other:
        def check(self, tool: Any, params: Any, **more: Any) -> PolicyDecision:
            return PolicyDecision(allowed=tool.name == "lint" and "context" in more)

    agent = Agent([Other()])

    assert agent.allows("lint")
    assert not agent.allows("test")


def test_an_async_check_is_awaited():
    class Later:
        async def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision(tool.name == "lint", "Not today")

    class SmallLater:
        async def check(self, tool_name: str, params: Any, context: ToolContext) -> str | None:
            return None if tool_name == "lint" else "Not today"

    for policy in (Later(), SmallLater()):
        agent = Agent([policy])
        assert agent.allows("lint")
        assert agent.call("test").message == "Not today"


def test_the_sections_policies_are_asked_before_the_prompts_and_the_first_denial_answers():
    first, second, third = Small(), Small("Second says no"), Small("Third says no")
    agent = Agent([first, second], prompt_policies=[third])

    assert agent.call("lint").message == "Second says no"
    assert [len(policy.log) for policy in (first, second, third)] == [1, 1, 0]


def test_a_policy_that_fails_on_a_result_fails_the_call():
    """What a policy could not note must not have happened."""

    class Forgetful(Full):
        def on_result(self, *args: Any, context: ToolContext) -> None:
            raise RuntimeError("disk full")

    agent = Agent([Forgetful()])

    assert not agent.call("write_file", path="c.txt").success
    assert "c.txt" not in files(agent)


class NoCheck:
    name = "no check"


class NotCallable:
    check = "yes"


class TooFew:
    def check(self, tool: Any, *, context: Any) -> Any: ...


class TooMany:
    def check(self, tool: Any, params: Any, result: Any, *, context: Any) -> Any: ...


class WrongResult:
    def check(self, tool: Any, params: Any, *, context: Any) -> Any: ...
    def on_result(self, tool: Any, params: Any) -> None: ...


class AsyncResult:
    def check(self, tool: Any, params: Any, *, context: Any) -> Any: ...
    async def on_result(self, tool: Any, params: Any, result: Any, *, context: Any) -> None: ...


@pytest.mark.parametrize(
    "wrong",
    [
        QuotaPolicy,
        ReadBeforeWritePolicy,
        Small,
        "quota",
        None,
        lambda tool_name, params, context: None,
        NoCheck(),
        NotCallable(),
        TooFew(),
        TooMany(),
        WrongResult(),
        AsyncResult(),
    ],
)
def test_what_is_no_policy_is_refused_where_it_is_attached(wrong: Any):
    """A class instead of an instance, too."""
    with pytest.raises(TypeError, match="policy"):
        MarkdownSection(policies=[wrong])
    with pytest.raises(TypeError, match="policy"):
        PromptTemplate(policies=[wrong])


def test_a_policy_can_be_used_in_several_prompts():
    policy = SequentialDependencyPolicy(dependencies=PIPELINE)
    one, other = Agent([policy]), Agent([policy])
    one.call("lint")

    assert one.allows("build")
    assert not other.allows("build")


def test_policies_that_count_under_one_name_are_refused():
    with pytest.raises(PromptValidationError, match="both called 'quota'"):
        Agent([QuotaPolicy(1), QuotaPolicy(2)])


# Tools that a policy names


ABOUT: dict[str, Any] = {
    "approval": lambda name: ApprovalPolicy(ask=lambda _: True, tools={name}),
    "quota": lambda name: QuotaPolicy(3, tools={name}),
    "rate": lambda name: RateLimitPolicy(3, tools={name}),
    "dependency": lambda name: SequentialDependencyPolicy({name: {"test"}}),
    "write": lambda name: ReadBeforeWritePolicy(write_tools={name}),
    "transfer": lambda name: ReadBeforeWritePolicy(transfer_tools={name}),
    "removal": lambda name: ReadBeforeWritePolicy(removal_tools={name}),
}
REFERRING: dict[str, Any] = {
    "dependency": lambda name: SequentialDependencyPolicy({"deploy": {name}}),
    "read": lambda name: ReadBeforeWritePolicy(read_tools={name}),
    "rule": lambda name: ApprovalPolicy(ask=lambda _: True, approved=[ApprovalRule(tool=name)]),
}
TOOLS = [STEPS["test"], STEPS["deploy"]]
ATTACHED: dict[str, Any] = {
    "section": lambda policy: MarkdownSection(title="S", tools=TOOLS, policies=[policy]),
    "prompt": lambda policy: PromptTemplate(
        sections=[MarkdownSection(title="S", tools=TOOLS)], policies=[policy]
    ),
    "registry": lambda policy: ToolRegistry(TOOLS, policies=[policy]),
}


@pytest.mark.parametrize("where", ATTACHED)
@pytest.mark.parametrize("kind", ABOUT)
def test_a_policy_about_a_tool_that_is_not_offered_is_refused_where_it_is_attached(
    where: str, kind: str
):
    """It would silently let ``deploy`` run."""
    attached, policy = ATTACHED[where], ABOUT[kind]

    with pytest.raises(WinkError, match=r"'deplyo'.* never apply; did you mean 'deploy'\?"):
        attached(policy("deplyo"))
    with pytest.raises(WinkError, match=r"'fly'.*; its tools are deploy, test"):
        attached(policy("fly"))

    attached(policy("deploy"))
    attached(policy(if_offered("deplyo")))


@pytest.mark.parametrize("kind", REFERRING)
def test_a_policy_that_refers_to_a_tool_that_is_not_offered_is_refused(kind: str):
    policy = REFERRING[kind]
    section = MarkdownSection(title="S", tools=TOOLS, policies=[policy("tset")])

    for attached in (
        lambda: PromptTemplate(sections=[section]),
        lambda: ToolRegistry.from_section(section),
        lambda: ATTACHED["prompt"](policy("tset")),
        lambda: ATTACHED["registry"](policy("tset")),
    ):
        with pytest.raises(WinkError, match=r"refers to the tool 'tset'.*did you mean 'test'\?"):
            attached()
    for attached in ATTACHED.values():
        attached(policy("test"))
        attached(policy(if_offered("tset")))


def test_a_policy_may_refer_to_the_tools_of_other_sections():
    after = SequentialDependencyPolicy({"deploy": {"test"}})
    release = MarkdownSection(title="Release", tools=[STEPS["deploy"]], policies=[after])
    checks = MarkdownSection(title="Checks", tools=[STEPS["test"]], enabled=lambda: False)
    PromptTemplate(sections=[release, checks])

    with pytest.raises(PromptValidationError, match="refers to the tool 'test'"):
        PromptTemplate(sections=[release])


def test_a_policy_about_the_tool_of_another_section_is_refused():
    """The policies of a section govern its own tools alone."""
    late = MarkdownSection(title="Checks", policies=[QuotaPolicy(1, tools={"deploy"})])
    release = MarkdownSection(title="Release", tools=[STEPS["deploy"]])

    with pytest.raises(PromptValidationError, match="attach the policy to the section that does"):
        PromptTemplate(sections=[late, release])


def test_a_policy_governs_the_members_of_a_composed_tool():
    composed = sequence([STEPS["test"], STEPS["deploy"]])

    PromptTemplate(
        sections=[MarkdownSection(title="S", tools=[composed])],
        policies=[QuotaPolicy(1, tools={"deploy"})],
    )


def test_a_policy_may_be_about_the_tools_that_we_add_ourselves():
    PromptTemplate(policies=[QuotaPolicy(1, tools={"read_result", "open_sections"})])


def test_sections_that_are_bound_later_are_checked_when_they_are():
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="S", tools=TOOLS)]))
    more = MarkdownSection(title="More", policies=[QuotaPolicy(1, tools={"deplyo"})])

    with pytest.raises(PromptValidationError, match="'deplyo'"):
        prompt.bind(sections=[more])


def test_a_registry_without_tools_is_checked_at_its_first_use():
    tools = ToolRegistry(policies=[QuotaPolicy(1, tools={"deploy"})])

    with pytest.raises(ToolDefinitionError, match="about the tool 'deploy'"):
        tools.execute("deploy")
    tools.register(STEPS["deploy"])
    assert tools.execute("deploy").success
    assert tools.unregister("deploy")  # which was no mistake
    assert "not found" in tools.execute("deploy").message


def test_a_policy_names_a_tool_in_a_namespace_in_either_spelling():
    for name in ("ops:deploy", "ops__deploy"):
        policies = [QuotaPolicy(0, tools={name}), SequentialDependencyPolicy({name: {name}})]
        tools = ToolRegistry([STEPS["deploy"]], namespace="ops", policies=policies)
        assert "Quota exceeded" in tools.execute("ops:deploy").message

    with pytest.raises(ToolDefinitionError, match=r"did you mean 'ops__deploy'\?"):
        ToolRegistry(
            [STEPS["deploy"]], namespace="ops", policies=[QuotaPolicy(0, tools={"deploy"})]
        )


def test_the_policies_of_a_section_hold_for_its_tools_in_a_namespace():
    """They know the tools by the names that the section gives them."""
    after = SequentialDependencyPolicy({"deploy": {"test"}})
    section = MarkdownSection(title="S", tools=TOOLS, policies=[after, QuotaPolicy(2)])
    tools = ToolRegistry.from_section(section, namespace="ops")

    assert "missing required tools: test" in tools.execute("ops:deploy").message
    assert tools.execute("ops:test").success
    assert tools.execute("ops:deploy").success
    typo = MarkdownSection(title="S", tools=TOOLS, policies=[REFERRING["dependency"]("tset")])
    with pytest.raises(WinkError, match="refers to the tool 'tset'"):
        ToolRegistry.from_section(typo, namespace="ops")
    assert "Quota exceeded" in tools.execute("ops:deploy").message


@pytest.mark.parametrize("namespace", [None, "ops"])
def test_a_registry_of_a_prompt_has_the_policies_of_its_disabled_sections(namespace: Any):
    disabled = MarkdownSection(title="Off", tools=[STEPS["build"]], enabled=lambda: False)
    after = SequentialDependencyPolicy({"deploy": {"test"}, "build": {"deploy"}})
    sections = [MarkdownSection(title="S", tools=TOOLS), disabled]
    prompt = Prompt(PromptTemplate(sections=sections, policies=[after]))
    tools = ToolRegistry.from_prompt(prompt, namespace=namespace)

    assert "missing required tools: test" in tools.execute("deploy").message
    assert tools.execute("test").success
    assert tools.execute("deploy").success


def test_a_registry_runs_a_tool_of_ones_own_under_a_policy_about_it():
    tools = ToolRegistry(policies=[QuotaPolicy(1, tools={"deploy"})])

    assert tools.execute(STEPS["deploy"]).success
    assert "Quota exceeded" in tools.execute(STEPS["deploy"]).message


def test_files_are_read_before_they_are_written_in_a_namespace_too():
    files = MemoryFilesystem({"a.txt": "old"})
    section = MarkdownSection(
        title="Files",
        tools=file_tools(),
        policies=[ReadBeforeWritePolicy(), ProtectedPathsPolicy([".env"])],
        resources={Filesystem: files},
    )
    tools = ToolRegistry.from_section(section, namespace="fs")
    change = {"path": "a.txt", "content": "new"}

    assert "without reading it first" in tools.execute("fs:write_file", change).message
    assert tools.execute("fs:read_file", {"path": "a.txt"}).success
    assert tools.execute("fs:write_file", change).success
    assert not tools.execute("fs:write_file", {**change, "path": ".env"}).metadata.undone


def test_a_policy_of_ones_own_says_which_tools_it_is_about():
    class Mine:
        governs = frozenset({"deplyo"})

        def check(self, tool_name: str) -> str | None: ...

    class Unrelated:
        def governs(self) -> None: ...
        def check(self, tool_name: str) -> str | None: ...

    with pytest.raises(PromptValidationError, match="policy 'Mine' is about the tool 'deplyo'"):
        MarkdownSection(title="S", tools=TOOLS, policies=[Mine()])
    MarkdownSection(title="S", tools=TOOLS, policies=[Unrelated()])


@pytest.mark.parametrize("kind", [*ABOUT])
def test_a_text_is_not_a_set_of_tools(kind: str):
    with pytest.raises(TypeError, match="must be a set of tool names, got a string"):
        {
            "approval": lambda: ApprovalPolicy(tools="deploy"),  # type: ignore[arg-type]
            "quota": lambda: QuotaPolicy(3, tools="deploy"),  # type: ignore[arg-type]
            "rate": lambda: RateLimitPolicy(3, tools="deploy"),  # type: ignore[arg-type]
            "dependency": lambda: SequentialDependencyPolicy({"deploy": "test"}),  # type: ignore
            "write": lambda: ReadBeforeWritePolicy(write_tools="save"),  # type: ignore[arg-type]
            "transfer": lambda: ReadBeforeWritePolicy(transfer_tools="save"),  # type: ignore
            "removal": lambda: ReadBeforeWritePolicy(removal_tools="save"),  # type: ignore
        }[kind]()


@pytest.mark.parametrize("kind", [QuotaPolicy, RateLimitPolicy])
def test_two_counting_policies_of_one_name_are_refused_in_a_registry_too(kind: Any):
    """They would share one count, and each call would count twice."""
    tools, one, other = [STEPS["test"]], kind(3), kind(5)

    with pytest.raises(ToolDefinitionError, match="would share one count; rename one"):
        ToolRegistry(tools, policies=[one, other])
    section = MarkdownSection(title="S", tools=tools, policies=[one])
    with pytest.raises(ToolDefinitionError, match="would share one count"):
        ToolRegistry.from_section(section, policies=[other])
    with pytest.raises(ToolDefinitionError, match="would share one count"):
        ToolRegistry(policies=[one, other]).execute(STEPS["test"])

    named = ToolRegistry(tools, policies=[kind(3, name="mine"), one, one])
    for _ in range(3):
        assert named.execute("test").success
    assert not named.execute("test").success


def test_two_policies_of_one_name_that_ask_a_person_are_refused():
    """One answer would count for both, where two people were meant to agree."""
    one, other = ApprovalPolicy(), ApprovalPolicy()

    for attached in (
        lambda: ToolRegistry(TOOLS, policies=[one, other]),
        lambda: PromptTemplate(policies=[one, other]),
    ):
        with pytest.raises(WinkError, match="would share one answer; rename one"):
            attached()
    ToolRegistry(TOOLS, policies=[one, one, ApprovalPolicy(name="second")])
