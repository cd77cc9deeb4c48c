"""All suites in one prompt, on one workspace, used by a scripted model through the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.adapters import RunConfig, ScriptedAdapter, calls
from weakincentives.contrib.tools import (
    AstevalConfig,
    AstevalSection,
    Plan,
    PlanningToolsSection,
    PodmanSandboxConfig,
    PodmanSandboxSection,
    VfsConfig,
    VfsToolsSection,
    WorkspaceDigest,
    WorkspaceDigestSection,
    find_sandbox,
)
from weakincentives.errors import PromptValidationError, SandboxUnavailable
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.prompt import SectionVisibility
from weakincentives.runtime import ToolInvoked

FILES = {"README.md": "# Till\n\nAdds up.\n", "till.py": "price = 1\n"}

PLAN = ("setup_plan", {"objective": "Raise the price", "steps": ["Look", "Change"]})
READ = ("read_file", {"path": "till.py"})
RAISE = {"path": "till.py", "old_string": "1", "new_string": "2"}
NOTE = {"topic": "Prices", "text": "In cents.", "rests_on": ["till.py"]}


@pytest.fixture(params=["memory", "disk"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filesystem]:
    if request.param == "memory":
        yield MemoryFilesystem(FILES)
        return
    (tmp_path / "work").mkdir()
    with HostFilesystem(tmp_path / "work") as files:
        for path, text in FILES.items():
            files.write(path, text)
        yield files


def all_of(*inner: tuple[str, dict[str, object]]) -> wink.Section[Any]:
    """Return a section with a tool that makes calls and then fails."""

    @wink.tool(reach="reversible")
    def all_or_nothing(*, context: wink.ToolContext) -> str:
        """Do everything, or nothing."""
        for name, arguments in inner:
            result = wink.execute_tool(wink.ToolCall(name, arguments), context=context)
            assert result.success, result.message
        raise ValueError("one more thing was missing")

    return wink.MarkdownSection(title="All", tools=[all_or_nothing])


def outcomes(session: wink.Session) -> list[tuple[str, bool]]:
    return [(each.tool_name, each.success) for each in session[ToolInvoked].all()]


def test_suites_share_a_workspace_and_are_undone_together(files: Filesystem):
    planning = PlanningToolsSection()
    digest = WorkspaceDigestSection(filesystem=files, visibility=SectionVisibility.FULL)
    inner = [
        ("update_step", {"step": 1, "status": "done"}),
        ("edit_file", RAISE),
        ("evaluate_python", {"code": "write_file('total.txt', read_file('till.py'))"}),
        ("update_digest", NOTE),
    ]
    sections = [planning, VfsToolsSection(config=VfsConfig(filesystem=files)), digest]
    python = AstevalSection(config=AstevalConfig(timeout=600))  # however busy the machine is
    prompt = wink.Prompt(wink.PromptTemplate(sections=[*sections, python, all_of(*inner)]))
    session = wink.Session()
    seen: list[object] = []

    def look(request: object) -> object:
        seen.append((files.glob("*"), files.read("till.py"), session[Plan].latest()))
        seen.append(session[WorkspaceDigest].latest())
        return calls(*inner)

    script = [
        calls(PLAN, READ),
        calls(("all_or_nothing", {})),
        look,
        "Done.",
        calls(("update_step", {"step": 2, "status": "done"})),
        "Now it is.",
    ]
    answer = ScriptedAdapter(script).evaluate(
        prompt, session, config=RunConfig(completion=planning.completion)
    )

    assert answer.text == "Now it is."
    assert ("all_or_nothing", False) in outcomes(session)
    undone, known = seen
    assert undone == (tuple(FILES), "price = 1\n", Plan(["Look", "Change"], "Raise the price"))
    assert isinstance(known, WorkspaceDigest)
    assert known.notes == ()
    assert files.read("till.py") == files.read("total.txt") == "price = 2\n"
    final = session[WorkspaceDigest].latest()
    assert final is not None
    assert [note.topic for note in final.notes] == ["Prices"]


def test_two_tools_of_one_name_are_refused_and_one_can_have_another():
    box = PodmanSandboxSection(config=PodmanSandboxConfig(files=FILES, sandbox="none"))
    with pytest.raises(PromptValidationError, match="two tools are called 'evaluate_python'"):
        wink.Prompt(wink.PromptTemplate(sections=[box, AstevalSection()])).render(wink.Session())

    quick = AstevalSection(config=AstevalConfig(tool_name="calculate"))
    rendered = wink.Prompt(wink.PromptTemplate(sections=[box, quick])).render(wink.Session())

    assert {"evaluate_python", "calculate"} <= {tool.name for tool in rendered.tools}
    assert "Use `calculate` to compute" in rendered.text
    box.close()


def test_a_sandbox_shares_its_workspace_with_the_other_suites():
    try:
        find_sandbox("namespaces")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    box = PodmanSandboxSection(config=PodmanSandboxConfig(files=FILES, sandbox="namespaces"))
    files = box.filesystem
    assert files is not None
    planning = PlanningToolsSection()
    quick = AstevalSection(config=AstevalConfig(tool_name="calculate"))
    command = ("shell_execute", {"command": "echo more >>till.py; rm README.md"})
    inner = [command, ("calculate", {"code": "write_file('new.txt', 'x')"})]
    digest = WorkspaceDigestSection(filesystem=files)
    prompt = wink.Prompt(
        wink.PromptTemplate(sections=[planning, box, digest, quick, all_of(*inner)])
    )
    session = wink.Session()
    script = [
        calls(PLAN),
        calls(("shell_execute", {"command": "rm till.py; false"})),
        calls(("all_or_nothing", {})),
        calls(READ),
        calls(("calculate", {"code": "write_file('a.txt', str(6 * 7))"})),
        calls(("evaluate_python", {"code": "open('b.txt', 'w').write(open('a.txt').read())"})),
        "Done.",
    ]
    ScriptedAdapter(script).evaluate(prompt, session)

    assert outcomes(session)[1:3] == [("shell_execute", False), ("shell_execute", True)]
    assert [name for name, ok in outcomes(session) if not ok] == ["shell_execute", "all_or_nothing"]
    assert files.glob("*") == ("README.md", "a.txt", "b.txt", "till.py")
    assert (files.read("b.txt"), files.read("till.py")) == ("42", "price = 1\n")
    box.close()


def test_suites_that_only_read_change_nothing(files: Filesystem):
    sections = [
        VfsToolsSection(config=VfsConfig(filesystem=files, read_only=True)),
        AstevalSection(config=AstevalConfig(read_only=True)),
    ]
    prompt = wink.Prompt(wink.PromptTemplate(sections=sections))
    session = wink.Session()
    adapter = ScriptedAdapter(
        [
            calls(("evaluate_python", {"code": "len(read_file('till.py'))"})),
            calls(("evaluate_python", {"code": "write_file('till.py', '')"})),
            calls(("evaluate_python", {"code": "delete_file('till.py')"})),
            calls(("write_file", {"path": "a.txt", "content": ""})),
            "Done.",
        ]
    )
    adapter.evaluate(prompt, session)

    assert [ok for _, ok in outcomes(session)] == [True, False, False, False]
    assert {path: files.read(path) for path in files.glob("**/*")} == FILES
    assert {tool.reach for tool in prompt.render(session).tools} == {"read"}
