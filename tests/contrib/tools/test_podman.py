"""The section: what a model is told, what it can call, and what becomes of the files."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives import Filesystem, Prompt, PromptTemplate, Session, ToolCall, ToolResult
from weakincentives.contrib.tools import (
    HostMount,
    PodmanSandboxConfig,
    PodmanSandboxSection,
    SandboxLimits,
    find_sandbox,
)
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem import HostFilesystem, MemoryFilesystem
from weakincentives.prompt import ApprovalPolicy, ApprovalRequest
from weakincentives.runtime import execute_tool

EXAMPLE = Path(__file__).parents[3] / "examples" / "sandboxed_fix.py"


def engine() -> str:
    """Return the quickest sandbox that works here."""
    for name in ("bubblewrap", "namespaces", "podman"):
        try:
            find_sandbox(name)  # type: ignore[arg-type]  # a name from the list
        except SandboxUnavailable:
            continue
        return name
    return ""


ENGINE = engine()
pytestmark = pytest.mark.skipif(not ENGINE, reason="no sandbox works here")


class Agent:
    """Calls tools as a model does: by name, through the whole pipeline."""

    def __init__(self, section: PodmanSandboxSection) -> None:
        self.section = section
        self.session = Session()
        self.prompt: Prompt[Any] = Prompt(PromptTemplate(sections=[section]))
        self.text = self.prompt.render(self.session).text

    def call(self, tool: str, /, **arguments: object) -> ToolResult[Any]:
        return execute_tool(ToolCall(tool, arguments), session=self.session)


@contextmanager
def agent_on(files: Mapping[str, str] | None = None, **config: Any) -> Iterator[Agent]:
    config.setdefault("sandbox", ENGINE)
    if files is not None:
        config["files"] = files
    agent = Agent(PodmanSandboxSection(config=PodmanSandboxConfig(**config)))
    with agent.prompt.resources:
        yield agent


def test_the_section_offers_files_a_shell_and_python():
    with agent_on({"a.txt": "one\n"}) as agent:
        names = [tool.name for tool in agent.section.tools]

        assert names[-2:] == ["shell_execute", "evaluate_python"]
        assert {"read_file", "write_file", "edit_file", "list_directory"} <= set(names)
        assert agent.call("read_file", path="a.txt").success
        assert agent.call("shell_execute", command="cat /workspace/a.txt").render() == (
            "The command exited with code 0.\none"
        )


def test_tools_and_commands_see_the_same_files():
    with agent_on({}) as agent:
        agent.call("write_file", path="src/a.py", content="x = 1\n")
        agent.call("shell_execute", command=["sed", "-i", "s/1/2/", "src/a.py"])
        value = agent.call("evaluate_python", code="from src import a\na.x").value

        assert "x = 2" in agent.call("read_file", path="src/a.py").render()
        assert value.value == "2"


def test_a_command_that_fails_is_undone_and_the_model_is_told():
    with agent_on({"a.txt": "one\n"}) as agent:
        result = agent.call("shell_execute", command="rm a.txt; echo so; echo why >&2; exit 3")

        assert not result.success
        assert result.render() == (
            "The command exited with code 3. Its changes were undone.\nso\n[stderr]\nwhy"
        )
        assert (result.value.exit_code, result.value.kept) == (3, False)
        assert result.failure is not None
        assert result.failure.code == "COMMAND_FAILED"
        assert agent.call("read_file", path="a.txt").success


def test_a_command_is_undone_with_the_call_that_it_is_part_of():
    @wink.tool(reach="reversible", writes="command")
    def change_and_fail(*, context: wink.ToolContext) -> str:
        """Run a command, then fail."""
        call = ToolCall("shell_execute", {"command": "echo two >a.txt"})
        assert execute_tool(call, context=context).success
        raise ValueError("no")

    config = PodmanSandboxConfig(files={"a.txt": "one\n"}, sandbox=ENGINE)  # type: ignore[arg-type]
    agent = Agent(PodmanSandboxSection(config=config, tools=[change_and_fail]))

    assert not agent.call("change_and_fail").success
    assert agent.call("shell_execute", command="cat a.txt").value.stdout == "one\n"


def test_a_command_takes_input_directory_and_environment():
    with agent_on({"sub/a.txt": ""}, env={"ONE": "1"}) as agent:
        result = agent.call(
            "shell_execute",
            command='cat; pwd; echo "$ONE $TWO"',
            cwd="sub",
            env={"TWO": "2"},
            stdin="given\n",
        )

        assert result.value.stdout == "given\n/workspace/sub\n1 2\n"


def test_a_command_that_takes_too_long_is_killed():
    with agent_on({}, timeout=0.5, max_timeout=1.0) as agent:
        result = agent.call("shell_execute", command="sleep 1000")
        longer = agent.call("shell_execute", command="sleep 1000", timeout=500)

        assert result.message == (
            "The command was killed: it took longer than 0.5 s. Its changes were undone."
        )
        assert result.failure is not None
        assert result.failure.code == "TIMEOUT"
        assert "longer than 1 s" in longer.message


def test_a_command_that_uses_too_much_is_killed_and_the_model_knows_why():
    limits = SandboxLimits(disk=8 << 20)
    with agent_on({}, limits=limits) as agent:
        flood = "while :; do head -c 3000000 /dev/zero >$(date +%N); done"

        result = agent.call("shell_execute", command=flood)

        assert "was killed: it wrote more than 8 MiB to the disk." in result.message
        assert agent.call("list_directory").value.entries == ()


def test_long_output_is_cut_in_the_middle():
    with agent_on({}, output_limit=1000) as agent:
        result = agent.call("shell_execute", command="echo start; seq 100000; echo end")

        assert "bytes left out" in result.value.stdout
        assert result.value.stdout.startswith("start\n")
        assert result.value.stdout.endswith("end\n")
        assert len(result.render()) < 1200


def test_a_cancelled_call_ends_its_command():
    with agent_on({"a.txt": "one\n"}) as agent:
        (tool,) = [each for each in agent.section.tools if each.name == "shell_execute"]
        context = wink.ToolContext(session=agent.session, resources=agent.prompt.resources)
        short = tool.replace(timeout=1.5)

        result = short(command="echo two >a.txt; sleep 1000", context=context)

        assert "timed out" in result.message
        assert agent.call("shell_execute", command="cat a.txt").value.stdout == "one\n"


# Python


def test_python_gives_value_and_output():
    with agent_on({}) as agent:
        result = agent.call("evaluate_python", code="print('hello')\nx = [1, 2]\nx * 2")

        assert result.render() == "hello\n=> [1, 2, 1, 2]"
        assert agent.call("evaluate_python", code="x = 1").render() == ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f():\n    return 1 / 0\nf()", 'File "<code>", line 3, in f'),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(4)", "exited with code 4"),
        ("import os\nos.kill(os.getpid(), 9)", "exited with code 137"),
    ],
)
def test_python_that_fails_is_undone(code: str, said: str):
    with agent_on({}) as agent:
        result = agent.call("evaluate_python", code=f"open('b', 'w').close()\n{code}")

        assert not result.success
        assert said in result.message
        assert "<string>" not in result.message
        assert agent.call("list_directory").value.entries == ()


def test_a_long_value_is_cut():
    with agent_on({}, output_limit=1000) as agent:
        value = agent.call("evaluate_python", code="print('x' * 5000)\n'y' * 5000").value

        assert value.value.startswith("'yyy")
        assert value.value.endswith("... (5002 characters)")


# Which sandbox, which files


def test_the_model_is_told_what_commands_run_in():
    with agent_on({}) as agent:
        assert ENGINE in agent.text
        assert "1 GiB of memory, 128 processes" in agent.text
    with agent_on({}, sandbox="none") as agent:
        assert "without a sandbox" in agent.text
        assert agent.call("shell_execute", command="echo hello").value.stdout == "hello\n"


def test_without_a_sandbox_commands_are_refused_and_files_work(monkeypatch: pytest.MonkeyPatch):
    from weakincentives.contrib.tools.sandbox import engines

    monkeypatch.setattr(engines.sys, "platform", "plan9")
    with agent_on({"a.txt": "one\n"}, sandbox="auto") as agent:
        result = agent.call("shell_execute", command="echo hello")

        assert "Commands cannot be run" in agent.text
        assert result.message.startswith(
            "No sandbox works here, so commands are not run (sandboxes need"
        )
        assert "sandbox='none'" in result.message
        assert agent.call("read_file", path="a.txt").success


def test_a_directory_is_worked_on_in_place(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    with agent_on(workspace=tmp_path) as agent:
        agent.call("shell_execute", command="echo two >>a.txt")
        files = agent.prompt.resources.get(Filesystem)

        assert (tmp_path / "a.txt").read_text() == "one\ntwo\n"
        assert isinstance(files, HostFilesystem)
        assert [each.tool for each in files.history()] == ["shell_execute"]


def test_a_relative_directory_stays_the_one_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    section = PodmanSandboxSection(config=PodmanSandboxConfig(workspace="work", sandbox=ENGINE))
    monkeypatch.chdir(tmp_path / "elsewhere")
    agent = Agent(section)
    with agent.prompt.resources:
        assert agent.call("write_file", path="a.txt", content="here").success

    assert (tmp_path / "work" / "a.txt").read_text() == "here"


def test_a_filesystem_of_your_own_is_used(tmp_path: Path):
    with HostFilesystem(tmp_path) as files, agent_on(filesystem=files) as agent:
        agent.call("shell_execute", command="echo new >b.txt")

        assert files.read("b.txt") == "new\n"


def test_commands_need_a_directory():
    section = PodmanSandboxSection(
        config=PodmanSandboxConfig(sandbox=ENGINE),  # type: ignore[arg-type]
        resources={Filesystem: MemoryFilesystem()},
    )

    result = Agent(section).call("shell_execute", command="true")

    assert "not a MemoryFilesystem" in result.message


def test_a_directory_of_its_own_is_filled_and_removed(tmp_path: Path):
    (tmp_path / "brought.txt").write_text("brought")
    section = PodmanSandboxSection(
        config=PodmanSandboxConfig(
            mounts=[HostMount(host_path=tmp_path)],
            files={"/workspace/deep/own.txt": "own"},
            sandbox=ENGINE,  # type: ignore[arg-type]
        )
    )
    assert section.filesystem is not None
    root = section.filesystem.root

    shown = Agent(section).call("shell_execute", command="cat brought.txt deep/own.txt")

    assert shown.value.stdout == "broughtown"
    assert root.exists()
    section.close()
    assert not root.parent.exists()


def test_a_configuration_that_cannot_be_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="give one of the three"):
        PodmanSandboxConfig(workspace=tmp_path, files={"a": ""})
    with pytest.raises(ValueError, match="not above max_timeout"):
        PodmanSandboxConfig(timeout=10, max_timeout=5)
    with pytest.raises(ValueError, match="output_limit must be positive"):
        PodmanSandboxConfig(output_limit=0)


def test_several_agents_run_commands_at_the_same_time(tmp_path: Path):
    """Each on a workspace of its own; no sandbox knows of another."""
    said: dict[int, str] = {}

    def work(number: int) -> None:
        with agent_on({"a.txt": str(number)}) as agent:
            said[number] = agent.call("shell_execute", command="cat a.txt").value.stdout

    threads = [threading.Thread(target=work, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert said == {number: str(number) for number in range(3)}


@pytest.mark.heavy
def test_the_example_undoes_the_first_fix_and_keeps_the_second():
    shown = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True
    ).stdout

    assert "-- shell_execute    The command exited with code 1. Its changes" in shown
    assert "ok shell_execute    The command exited with code 0." in shown
    assert "return sum(prices) / len(prices)" in shown


# Images


@pytest.fixture
def image(tmp_path: Path) -> Iterator[str]:
    busybox = shutil.which("busybox")
    if busybox is None or shutil.which("podman") is None or os.geteuid() != 0:
        pytest.skip("needs root, podman and a static busybox")
    with tarfile.open(tmp_path / "root.tar", "w") as archive:
        archive.add(busybox, "bin/busybox")
        for name in ("sh", "cat", "id", "ls", "test", "touch"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        mark = tarfile.TarInfo("etc/of-the-image")
        mark.size = 4
        archive.addfile(mark, io.BytesIO(b"yes\n"))
    name = f"localhost/wink-test-{os.getpid()}"
    done = subprocess.run(
        ["podman", "import", str(tmp_path / "root.tar"), name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    yield name
    subprocess.run(["podman", "rmi", "--force", name], capture_output=True, check=True)


@pytest.mark.heavy
def test_commands_run_in_an_image(image: str):
    with agent_on({"a.txt": "one\n"}, sandbox="auto", image=image) as agent:
        result = agent.call("shell_execute", command="cat /etc/of-the-image a.txt; echo two >a.txt")
        failed = agent.call("shell_execute", command="touch /etc/x /bin/x")
        python = agent.call("evaluate_python", code="1 + 1")

        assert agent.section.sandbox.name == "podman"
        assert result.value.stdout == "yes\none\n"
        assert agent.section.filesystem.read("a.txt") == "two\n"
        assert "Read-only file system" in failed.value.stderr
        assert "python3: not found" in python.message


@pytest.mark.heavy
def test_an_image_that_is_not_there_is_a_reason_to_refuse():
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    with pytest.raises(SandboxUnavailable, match=r"podman: .*no-such-image"):
        find_sandbox(image="localhost/no-such-image")


# Approval


def test_the_person_who_approves_a_command_sees_what_it_can_reach_and_its_words():
    asked: list[ApprovalRequest] = []

    def ask(request: ApprovalRequest) -> bool:
        asked.append(request)
        return False

    config = PodmanSandboxConfig(sandbox="none", env={"TOKEN": "secret"}, timeout=5)
    section = PodmanSandboxSection(config=config, policies=[ApprovalPolicy(ask=ask)])
    agent = Agent(section)
    for arguments in (
        {"command": "pytest -q 'a b'"},
        {"command": "pytest -q > x"},
        {"command": ["pytest", "-q; x"]},
        {"command": "pytest", "env": {"PATH": "."}},
        {"command": "pytest", "cwd": "sub"},
        {"command": "pytest", "stdin": "x"},
    ):
        agent.call("shell_execute", **arguments)

    words = [request.preview.command for request in asked]
    assert words == [("pytest", "-q", "a b"), (), ("pytest", "-q; x"), (), (), ()]
    facts = [request.preview.facts for request in asked]
    assert facts[0]["sandbox"] == "none: it can do everything that you can"
    assert facts[0]["environment"] == "TOKEN"
    assert facts[3]["environment"] == "PATH, TOKEN"
    assert facts[0]["limits"].startswith("5 s, ")
    assert "secret" not in str(facts)
