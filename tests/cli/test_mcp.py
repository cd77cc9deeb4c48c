"""`wink mcp` as its users run it: a program that the official client talks to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("mcp")

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult

from weakincentives.filesystem import WorkspaceHistory
from weakincentives.filesystem.overlay import find_way
from weakincentives.runtime.calls import runs_of

TOOLS = f"{Path(__file__).parents[1] / 'mcp' / 'served_tools.py'}:tools"
SECONDS = 240
"""How long anything may take before a test gives up: the machine may be busy."""
SUITES = ("--suites", "files,shell,planning,digest", "--sandbox", "none")

# Every tool, in an order in which each has something to do.
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("setup_plan", {"objective": "Tidy up", "steps": ["Look", "Move"]}, "Tidy up"),
    ("add_steps", {"steps": ["Check"]}, "Check"),
    ("update_step", {"step": 1, "status": "done"}, "Look"),
    ("read_plan", {}, "1 of 3"),
    ("list_directory", {}, "notes.txt"),
    ("read_file", {"path": "notes.txt"}, "first line"),
    ("glob_files", {"pattern": "*.txt"}, "notes.txt"),
    ("grep_files", {"pattern": "first"}, "notes.txt"),
    ("search_files", {"query": "NOTES"}, "notes.txt"),
    ("write_file", {"path": "new.txt", "content": "new"}, "new.txt"),
    ("edit_file", {"path": "notes.txt", "old_string": "first", "new_string": "1st"}, "notes.txt"),
    ("move_file", {"source": "new.txt", "destination": "moved.txt"}, "moved.txt"),
    ("copy_file", {"source": "moved.txt", "destination": "copy.txt"}, "copy.txt"),
    ("delete_file", {"path": "moved.txt"}, "moved.txt"),
    ("shell_execute", {"command": "cat notes.txt"}, "1st line"),
    ("evaluate_python", {"code": "6 * 7"}, "42"),
    ("checkpoint", {"name": "here"}, "here"),
    ("write_file", {"path": "later.txt", "content": ""}, "later.txt"),
    ("undo", {"checkpoint": "here"}, "1 call (write_file)"),
    ("history", {}, "delete_file"),
    ("read_section", {"section_key": "workspace"}, "notes.txt"),
    ("open_sections", {"section_keys": ["workspace"], "reason": "to see"}, "Opened"),
    ("update_digest", {"topic": "Size", "text": "Few.", "rests_on": ["notes.txt"]}, "Size"),
]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "notes.txt").write_text("first line\n")
    return folder


def command(workspace: Path, *options: str) -> list[str]:
    return ["-m", "weakincentives.cli", "mcp", "--workspace", str(workspace), *options]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WINK_")}


@asynccontextmanager
async def over_stdio(workspace: Path, *options: str, mode: Any = "auto") -> AsyncGenerator[Client]:
    server = StdioServerParameters(
        command=sys.executable, args=command(workspace, *options), env=environment()
    )
    async with asyncio.timeout(SECONDS), Client(server, mode=mode) as client:
        yield client


@contextmanager
def program(workspace: Path, *options: str) -> Generator[subprocess.Popen[str]]:
    """A server of its own; ended when the block is."""
    with subprocess.Popen(
        [sys.executable, *command(workspace, *options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as running:
        try:
            yield running
        finally:
            running.kill()


@asynccontextmanager
async def over_http(url: str, token: str, mode: Any = "auto") -> AsyncGenerator[Client]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        asyncio.timeout(SECONDS),
        httpx2.AsyncClient(headers=headers, timeout=SECONDS) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


def where(running: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the address and the token that a server says when it is there."""
    assert running.stderr is not None
    address, token = running.stderr.readline(), running.stderr.readline()
    return address.split()[-1], token.split()[-1]


def text(result: CallToolResult) -> str:
    return "".join(part.text for part in result.content)  # type: ignore[union-attr]


def run(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run the program to its end; return its code and what it said, which is not much."""
    done = subprocess.run(
        [sys.executable, "-m", "weakincentives.cli", "mcp", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**environment(), **(env or {})},
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


async def drive_every_tool(client: Client) -> None:
    """Call every tool there is, and hold its answer against what it should say."""
    offered = {tool.name for tool in (await client.list_tools()).tools}
    for name, arguments, said in CALLS:
        result = await client.call_tool(name, arguments)
        assert not result.is_error, (name, text(result))
        assert said in text(result), name
        offered |= {tool.name for tool in (await client.list_tools()).tools}
    assert offered == {name for name, _, _ in CALLS}


def as_it_should_be(workspace: Path) -> None:
    found = {path.name: path.read_text() for path in workspace.iterdir()}
    assert found == {"notes.txt": "1st line\n", "copy.txt": "new"}


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.heavy)])
def test_the_official_client_drives_every_tool_over_stdio(workspace: Path, mode: str):
    async def work() -> None:
        async with over_stdio(workspace, *SUITES, mode=mode) as client:
            await drive_every_tool(client)

    asyncio.run(work())
    as_it_should_be(workspace)


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.heavy)])
def test_the_official_client_drives_every_tool_over_http(workspace: Path, mode: str):
    async def work() -> None:
        async with over_http(*where(running), mode=mode) as client:
            await drive_every_tool(client)

    with program(workspace, *SUITES, "--http") as running:
        asyncio.run(work())
        running.send_signal(signal.SIGTERM)
        assert running.wait(SECONDS) == 128 + signal.SIGTERM
    as_it_should_be(workspace)


@pytest.mark.heavy
def test_nothing_but_the_protocol_is_on_the_wire_and_the_session_goes_on(workspace: Path):
    """Tools print in every way; what they remember is there when the server is started again."""

    async def work() -> list[str]:
        said: list[str] = []
        for _ in range(2):
            async with over_stdio(workspace, TOOLS) as client:
                said.append(text(await client.call_tool("chatter")))
                said.append(text(await client.call_tool("add", {"value": 2})))
                said.append(text(await client.call_tool("history", {"limit": 50})))
        return said

    first, one, history, second, two, longer = asyncio.run(work())

    assert (first, second) == ("Done", "Done")
    assert (one, two) == ("2 2", "4 4")
    assert longer.startswith(history)


@pytest.mark.heavy
def test_a_fresh_session_knows_nothing_of_the_last(workspace: Path):
    async def add(*options: str) -> str:
        async with over_stdio(workspace, *options, TOOLS) as client:
            return text(await client.call_tool("add", {"value": 2}))

    async def work() -> list[str]:
        return [await add(), await add("--fresh"), await add()]

    assert asyncio.run(work()) == ["2 2", "4 2", "6 4"]


@pytest.mark.heavy
def test_rules_of_the_workspace_hold(workspace: Path):
    (workspace / "wink.toml").write_text('[policy]\nprotect = ["*.txt"]\ndeny = ["delete_file"]\n')

    async def work() -> list[str]:
        async with over_stdio(workspace, "--suites", "files") as client:
            calls = [
                ("write_file", {"path": "notes.txt", "content": "x", "overwrite": True}),
                ("delete_file", {"path": "wink.md"}),
                ("write_file", {"path": "other.md", "content": "x"}),
            ]
            return [text(await client.call_tool(*each)) for each in calls]

    protected, denied, written = asyncio.run(work())

    assert "notes.txt" in protected
    assert "not allowed" in denied
    assert "other.md" in written
    assert (workspace / "notes.txt").read_text() == "first line\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no.such.module:thing"], "cannot load no.such.module"),
        pytest.param(["-w", "nowhere"], "cannot open the directory", marks=pytest.mark.heavy),
        pytest.param(["--suites", "flies"], "Input should be 'files'", marks=pytest.mark.heavy),
    ],
)
def test_wrong_use_is_one_clear_line(workspace: Path, arguments: list[str], said: str):
    code, shown = run("-w", str(workspace), *arguments)

    assert code == 2, shown
    assert said in shown
    assert shown.startswith("wink: ")
    assert shown.count("\n") == 1


@pytest.mark.heavy
def test_whoever_opens_it_to_other_machines_is_warned(workspace: Path):
    with subprocess.Popen(
        [sys.executable, *command(workspace, "--http", "--suites", "files", "--host", "0.0.0.0")],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as running:
        assert running.stderr is not None
        running.stderr.readline()
        warning = running.stderr.readline()
        running.terminate()

    assert "nothing is encrypted" in warning


@pytest.mark.heavy
def test_two_servers_and_a_run_work_on_one_directory(workspace: Path, tmp_path: Path):
    """Each of their commands reads a number and writes the next: none of them is lost."""
    count = {"command": "echo $(( $(cat number) + 1 )) > number"}
    (workspace / "number").write_text("0\n")
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"call": [{"shell_execute": count}]}] * 6 + ["Done."]))
    task = ["run", "count", "-w", str(workspace), "-m", f"scripted:{script}", "--sandbox", "none"]

    async def work() -> int:
        async with over_stdio(workspace, *SUITES) as one, over_stdio(workspace, *SUITES) as two:
            agent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "weakincentives.cli", *task, "--yes"),
                env={**environment(), "WINK_BRANCHES": "no"},
            )
            for number in range(6):
                answers = await asyncio.gather(
                    *(each.call_tool("shell_execute", count) for each in (one, two))
                )
                assert not any(answer.is_error for answer in answers), answers
                seen = await one.call_tool("read_file", {"path": "number"})
                assert int(text(seen).split()[-1]) >= 2 * number + 2
            ended = await agent.wait()
            listed = text(await two.call_tool("history", {}))
            assert listed.count("shell_execute") == 6  # those of its own session
            return ended

    assert asyncio.run(work()) == 0
    assert (workspace / "number").read_text() == "18\n"
    calls = WorkspaceHistory(workspace).calls()
    assert [each.tool for each in calls] == ["shell_execute"] * 18
    assert len(runs_of(workspace)) == 3


@pytest.mark.heavy
def test_a_read_does_not_wait_for_a_command_of_another_server(workspace: Path):
    if isinstance(find_way(workspace, workspace.parent), str):
        pytest.skip("commands run in the directory itself here")

    async def work() -> None:
        async with over_stdio(workspace) as first, over_stdio(workspace) as second:
            command = {"command": f"sleep {SECONDS}; touch made"}
            running = asyncio.ensure_future(first.call_tool("shell_execute", command))
            await asyncio.sleep(2)
            said = await second.call_tool("read_file", {"path": "notes.txt"})
            found = await second.read_resource("wink://files/notes.txt")
            listed = await second.call_tool("list_directory", {"path": "."})
            assert not running.done()
            assert "first line" in text(said)
            assert "first line" in str(found.contents[0])
            assert "made" not in text(listed)
            running.cancel()
            await asyncio.wait([running])
            assert not (await second.call_tool("write_file", {"path": "a", "content": ""})).is_error

    asyncio.run(work())


@pytest.mark.heavy
def test_a_workspace_or_port_that_is_taken_is_told_in_one_line(workspace: Path, tmp_path: Path):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        program(workspace, "--http", "--in-place") as running,
    ):
        where(running)
        assert run("-w", str(workspace)) == (
            2,
            f"wink: {workspace} is in use by process {running.pid}: wait for it to end, or "
            "stop it\n",
        )
        other = tmp_path / "other"
        other.mkdir()
        port = str(taken.getsockname()[1])
        code, shown = run("-w", str(other), "--http", "--port", port)

    assert code == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in shown
    assert shown.count("\n") == 1


@pytest.mark.heavy
def test_a_token_from_the_environment_is_not_shown(workspace: Path):
    async def work(url: str) -> int:
        async with httpx2.AsyncClient(timeout=SECONDS) as http:
            return (await http.get(url, headers={"Authorization": "Bearer mine"})).status_code

    with subprocess.Popen(
        [sys.executable, *command(workspace, "--http", "--suites", "files")],
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), "WINK_MCP_TOKEN": "mine"},
    ) as running:
        assert running.stderr is not None
        url = running.stderr.readline().split()[-1]
        assert asyncio.run(work(url)) != 401
        running.send_signal(signal.SIGINT)
        assert running.wait(SECONDS) == 128 + signal.SIGINT
        assert "mine" not in running.stderr.read()
