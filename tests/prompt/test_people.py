"""People change files while an agent works: it must look again, and their work stays."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weakincentives.contrib.tools import file_tools
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    Tool,
    ToolContext,
    ToolResult,
    tool,
)
from weakincentives.runtime import Session, ToolCall, execute_tool, execute_tools

AGAIN = "it has changed since it was last read or written here\nRead it again, then retry"


def person_writes(path: Path, text: str) -> None:
    """Change a file from another process, as an editor does: with a new file in its place."""
    program = (
        "import os, sys; from pathlib import Path; new = Path(sys.argv[1] + '~'); "
        "new.write_text(sys.argv[2]); os.replace(new, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-I", "-c", program, path, text], check=True)


class Interrupts:
    """A person who works between the check of a call and its change."""

    name = "person"
    work: Callable[[], None] | None = None

    def check(
        self, tool: Tool[Any, Any], params: object, *, context: ToolContext
    ) -> PolicyDecision:
        work, self.work = self.work, None
        if work is not None:
            work()
        return PolicyDecision.allow()


@tool(writes="command")
def shell(command: str, *, context: ToolContext) -> str:
    """Run a command."""
    assert isinstance(context.filesystem, HostFilesystem)
    return context.filesystem.run(command, check=True).stdout


class Agent:
    def __init__(self, root: Path, files: HostFilesystem, *tools: Tool[Any, Any]) -> None:
        self.root, self.files = root, files
        self.person = Interrupts()
        section = MarkdownSection(
            title="Work",
            tools=[*file_tools(), shell, *tools],
            policies=[ReadBeforeWritePolicy(), self.person],
        )
        template = PromptTemplate(sections=[section], resources={Filesystem: files})
        self.session = Session()
        Prompt(template).render(self.session)

    def call(self, name: str, **arguments: object) -> ToolResult[Any]:
        return execute_tool(ToolCall(name, arguments), session=self.session)

    def denial(self, name: str, **arguments: object) -> str:
        result = self.call(name, **arguments)
        assert result.failure is not None
        assert result.failure.code == "POLICY_DENIED"
        return result.message


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    root = tmp_path / "project"
    (root / "docs").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "docs/c.txt"):
        (root / name).write_text("old")
    with HostFilesystem(root) as files:
        yield Agent(root, files)


CHANGES = [
    ("write to", "write_file", {"path": "a.txt", "content": "new", "overwrite": True}),
    ("write to", "edit_file", {"path": "a.txt", "old_string": "o", "new_string": "0"}),
    ("write to", "copy_file", {"source": "b.txt", "destination": "a.txt", "overwrite": True}),
    ("write to", "move_file", {"source": "b.txt", "destination": "a.txt", "overwrite": True}),
    ("move", "move_file", {"source": "a.txt", "destination": "new.txt"}),
    ("delete", "delete_file", {"path": "a.txt"}),
]
each_change = pytest.mark.parametrize(("do", "name", "arguments"), CHANGES)


@each_change
def test_a_file_that_a_person_changed_must_be_read_again(
    agent: Agent, do: str, name: str, arguments: dict[str, object]
):
    assert agent.call("read_file", path="a.txt").success
    person_writes(agent.root / "a.txt", "mine: o")

    assert agent.denial(name, **arguments) == f"Cannot {do} a.txt: {AGAIN}"
    assert (agent.root / "a.txt").read_text() == "mine: o"

    assert agent.call("read_file", path="a.txt").success
    assert agent.call(name, **arguments).success


@each_change
def test_a_person_who_is_quicker_than_the_call_loses_nothing(
    agent: Agent, do: str, name: str, arguments: dict[str, object]
):
    """The file changes after the call was allowed, and before the call changes it."""
    assert agent.call("read_file", path="a.txt").success
    agent.person.work = lambda: person_writes(agent.root / "a.txt", "mine: o")

    assert agent.denial(name, **arguments) == f"Cannot replace a.txt: {AGAIN}"
    assert (agent.root / "a.txt").read_text() == "mine: o"
    assert (agent.root / "b.txt").read_text() == "old"
    assert not (agent.root / "new.txt").exists()


def test_a_file_that_a_person_creates_meanwhile_is_not_replaced(agent: Agent):
    agent.person.work = lambda: person_writes(agent.root / "new.txt", "a person's")

    denied = agent.call("write_file", path="new.txt", content="the agent's", overwrite=True)

    assert not denied.success
    assert (agent.root / "new.txt").read_text() == "a person's"


def test_a_directory_with_a_file_that_a_person_changed_is_not_removed(agent: Agent):
    assert agent.call("read_file", path="docs/c.txt").success
    person_writes(agent.root / "docs" / "c.txt", "a person's")

    denied = agent.denial("delete_file", path="docs", recursive=True)
    assert denied == f"Cannot delete docs/c.txt: {AGAIN}"

    assert agent.call("read_file", path="docs/c.txt").success
    agent.person.work = lambda: person_writes(agent.root / "docs" / "c.txt", "more")
    denied = agent.denial("delete_file", path="docs", recursive=True)
    assert denied == f"Cannot replace docs/c.txt: {AGAIN}"
    assert (agent.root / "docs" / "c.txt").read_text() == "more"


def test_what_the_agent_never_read_or_changed_itself_may_be_deleted(agent: Agent):
    assert agent.call("delete_file", path="b.txt").success
    assert agent.call("read_file", path="a.txt").success
    assert agent.call("shell", command="echo more >> a.txt").success
    assert agent.call("delete_file", path="a.txt").success


# Commands


def test_the_model_is_told_when_its_command_changed_what_a_person_had_changed(agent: Agent):
    assert agent.call("read_file", path="a.txt").success
    assert agent.call("shell", command="echo 1 > a.txt; echo 2 > b.txt").message == ""
    person_writes(agent.root / "a.txt", "a person's")

    told = agent.call("shell", command="echo 3 > a.txt; echo done").render()
    assert told == (
        "Note: someone else had changed a.txt since you last read or wrote it, before this call "
        "changed it, too. Read it again\ndone\n"
    )
    assert agent.call("shell", command="echo 4 > a.txt").message == ""  # its own since then

    assert "has changed since" in agent.denial("write_file", path="a.txt", content="5")
    agent.files.undo(*(call.call_id for call in agent.files.history()[-2:]))
    assert (agent.root / "a.txt").read_text() == "a person's"


@pytest.mark.parametrize("ending", ["echo the command > a.txt", "rm -r docs a.txt"])
def test_a_command_does_not_replace_what_a_person_changed_while_it_ran(agent: Agent, ending: str):
    if sys.platform != "linux":
        pytest.skip("a command runs over an overlay on Linux only")
    go, changed = agent.root.parent / "go", agent.root.parent / "changed"
    os.mkfifo(go)
    os.mkfifo(changed)
    person = subprocess.Popen(
        [
            *(sys.executable, "-I", "-c"),
            "import sys; from pathlib import Path; Path(sys.argv[1]).read_text(); "
            "Path(sys.argv[2]).write_text('a person\\'s'); Path(sys.argv[3]).write_text('x')",
            *(go, agent.root / "a.txt", changed),
        ]
    )
    command = f"echo new > b.txt; echo > {go}; cat {changed} > /dev/null; {ending}"

    result = agent.call("shell", command=command)

    assert person.wait(60) == 0
    if agent.files.run("true").engine != "overlay":
        pytest.skip("no overlay can be mounted here")
    assert result.failure is not None
    assert result.failure.code == "CONFLICT"
    assert result.message.startswith("Someone else changed a.txt while the command ran")
    assert (agent.root / "a.txt").read_text() == "a person's"
    assert (agent.root / "b.txt").read_text() == "old"
    assert (agent.root / "docs" / "c.txt").read_text() == "old"
    assert agent.call("shell", command=ending).success


# Concurrent calls


def test_concurrent_calls_never_replace_what_a_person_changed_meanwhile(tmp_path: Path):
    root = tmp_path / "project"
    root.mkdir()
    for name in ("a.txt", "b.txt"):
        (root / name).write_text("1")
    interrupted: list[str] = []

    @tool(reach="reversible")
    async def add(path: str, *, context: ToolContext) -> None:
        """Add a line."""
        text = context.filesystem.read(path)
        if path == "a.txt" and not interrupted:
            interrupted.append(path)
            person_writes(root / "a.txt", "2")
        await asyncio.sleep(0)
        context.filesystem.write(path, f"{text} and more")

    with HostFilesystem(root) as files:
        agent = Agent(root, files, add)
        calls = [ToolCall("add", {"path": name}) for name in ("a.txt", "b.txt")]
        results = execute_tools(calls, session=agent.session)

    assert all(result.success for result in results)
    assert (root / "a.txt").read_text() == "2 and more"
    assert (root / "b.txt").read_text() == "1 and more"
