from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from file_agent import Agent, agent_on, put

import weakincentives as wink
from weakincentives.contrib.tools import FileLimits, VfsConfig, VfsToolsSection
from weakincentives.errors import WorkspaceLocked
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import PromptTemplate
from weakincentives.runtime import ToolRegistry
from weakincentives.testing import FakeClock, make_session


def agent_with(section: VfsToolsSection, *others: Any) -> Agent:
    return Agent(wink.Prompt(PromptTemplate(sections=[section, *others])), make_session())


def test_without_a_configuration_the_workspace_is_empty_and_in_memory():
    agent = agent_with(VfsToolsSection(session=make_session()))

    assert agent.call("list_directory").message == "The workspace has no entries"
    assert agent.call("write_file", path="a.txt", content="a").success
    assert agent.files.read("/workspace/a.txt") == "a"


def test_the_root_is_a_virtual_prefix_and_never_a_host_directory(tmp_path: Path):
    put(tmp_path, {"a.txt": "host"})
    agent = agent_with(VfsToolsSection(config=VfsConfig(root=str(tmp_path))))

    assert agent.call("write_file", path=f"{tmp_path}/a.txt", content="mine").success
    assert agent.files.read("a.txt") == "mine"
    assert (tmp_path / "a.txt").read_text() == "host"
    assert f"absolute below {tmp_path}" in agent.rendered.text
    assert not agent.call("read_file", path="/workspace/a.txt").success


def test_the_text_tells_what_the_tools_are_for():
    text = agent_with(VfsToolsSection()).rendered.text

    assert text.startswith("## 1. Files\n\nUse these tools to read and write files")
    assert "Read a file before you change it" in text


def test_work_in_a_directory_is_done_there(tmp_path: Path):
    with agent_on("disk", tmp_path, {"a.txt": "a"}) as agent:
        agent.call("read_file", path="a.txt")
        assert agent.call("edit_file", path="a.txt", old_string="a", new_string="b").success
        assert agent.call("write_file", path="c/d.txt", content="d").success
        with pytest.raises(WorkspaceLocked):
            HostFilesystem(tmp_path / "work")
    assert (tmp_path / "work" / "a.txt").read_text() == "b"
    assert (tmp_path / "work" / "c" / "d.txt").read_text() == "d"
    HostFilesystem(tmp_path / "work").close()  # the prompt has closed it


def test_a_directory_that_is_not_there_is_an_error_when_it_is_opened(tmp_path: Path):
    agent = agent_with(VfsToolsSection(config=VfsConfig(workspace=tmp_path / "missing")))

    assert "not a directory" in agent.call("list_directory").message


def test_a_filesystem_of_ones_own_is_used(tmp_path: Path):
    put(tmp_path / "work", {"a.txt": "a"})
    with HostFilesystem(tmp_path / "work", prefix="/repo") as files:
        agent = agent_with(VfsToolsSection(config=VfsConfig(filesystem=files)))
        assert agent.call("read_file", path="/repo/a.txt").value.lines == ("a",)


def test_other_tools_share_the_filesystem():
    @wink.tool(reach="reversible")
    def stamp(*, context: wink.ToolContext) -> str:
        """Write a stamp."""
        context.filesystem.write("stamp.txt", "x")
        return "done"

    agent = agent_with(
        VfsToolsSection(), wink.MarkdownSection(title="Stamp", template="", tools=[stamp])
    )

    assert agent.call("stamp").success
    assert agent.call("read_file", path="stamp.txt").value.lines == ("x",)


def test_read_only_offers_no_tool_that_changes_anything(tmp_path: Path):
    config = VfsConfig(files={"a": "a"}, read_only=True)
    agent = agent_with(VfsToolsSection(config=config))

    assert {tool.reach for tool in agent.rendered.tools} == {"read"}
    assert agent.call("write_file", path="b", content="").failure.code == "TOOL_NOT_FOUND"
    assert "edit_file" not in agent.rendered.text


def test_other_rules_take_the_place_of_reading_first():
    section = VfsToolsSection(config=VfsConfig(files={"a": "a"}), policies=())

    assert agent_with(section).call("write_file", path="a", content="b", overwrite=True).success


def test_a_section_takes_the_options_of_any_section():
    @wink.tool
    def extra() -> str:
        """Something else."""
        return "x"

    section = VfsToolsSection(title="Project", key="project", tools=[extra], resources={int: 7})

    assert section.tools[-1] is extra
    assert (section.title, section.key) == ("Project", "project")
    assert agent_with(section).prompt.resources.get(int) == 7


def test_times_of_files_are_those_of_the_session():
    clock = FakeClock(start=50.0)
    section = VfsToolsSection(session=make_session(clock=clock), config=VfsConfig(files={"a": ""}))

    assert section.filesystem is not None
    assert section.filesystem.stat("a").modified == 50.0


@pytest.mark.parametrize(
    "options",
    [
        {"workspace": ".", "files": {"a": ""}},
        {"workspace": ".", "filesystem": wink.MemoryFilesystem()},
    ],
)
def test_files_come_from_one_place(options: dict[str, Any]):
    with pytest.raises(ValueError, match="give one of the three"):
        VfsConfig(**options)


def test_a_registry_takes_the_section(tmp_path: Path):
    section = VfsToolsSection(config=VfsConfig(files={"a": "a"}))
    tools = ToolRegistry(resources=section.resources, policies=section.policies)
    tools.register_all(section.tools)

    with tools:
        assert not tools.execute(
            "edit_file", {"path": "a", "old_string": "a", "new_string": ""}
        ).success
        assert tools.execute("read_file", {"path": "a"}).success
        assert tools.execute(
            "edit_file", {"path": "a", "old_string": "a", "new_string": ""}
        ).success


def test_limits_are_part_of_the_configuration():
    limits = FileLimits(max_lines=1)
    agent = agent_with(VfsToolsSection(config=VfsConfig(files={"a": "1\n2"}, limits=limits)))

    assert agent.call("read_file", path="a").value.lines == ("1",)
