"""What may go wrong around a server: clients that die or send nonsense, and its own death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("mcp")
pytest.importorskip("typer")

from program import SECONDS, SIGNALS, TOOLS, Program, wait_until_there

from waiting import is_readable


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "half.txt").write_bytes(b"as it was\r\n\xff")
    return folder


@pytest.fixture
def signs(tmp_path: Path) -> Path:
    folder = tmp_path / "signs"
    folder.mkdir()
    return folder


def is_as_it_was(workspace: Path) -> bool:
    found = {path.name: path.read_bytes() for path in workspace.iterdir()}
    return found == {"half.txt": b"as it was\r\n\xff"}


def can_be_served(workspace: Path) -> bool:
    """Whether a new server starts at once, and works."""
    with Program(workspace) as program:
        said = program.begin().call("write", path="next.txt", content="next")
        return said.startswith("Wrote") and program.end()[0] == 0


@pytest.mark.heavy
def test_garbage_half_lines_and_nonsense_do_not_stop_the_server(workspace: Path):
    with Program(workspace) as program:
        program.begin()
        for garbage in (
            b"\n",
            b"hello\n",
            b'{"jsonrpc": "2.0"\n',
            b"\xff\xfe\x00\n",
            b'{"jsonrpc":"2.0","id":{},"method":1}\n',
            b"[" * 100_000 + b"\n",
            b'{"jsonrpc":"2.0","method":"notifications/nobody","params":[1]}\n',
            b'{"jsonrpc":"2.0","id":77,"result":{}}\n',
            b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":99}}\n',
        ):
            program.write(garbage)
        # Half of a character, as a model may write it: the client waits for an answer to that.
        program.write(b'{"jsonrpc":"2.0","id":1000,"method":"tools/call","params":{"name":"')
        program.write(b'write","arguments":{"path":"a.txt","content":"\\ud800"}}}\n')
        assert program.answer(1000)["error"]["code"] == -32700
        unknown = program.ask("no/such/method")
        assert program.answer(unknown)["error"]["code"] == -32601
        message = json.dumps(
            {
                "jsonrpc": "2.0",
                "id": "half",
                "method": "tools/call",
                "params": {
                    "name": "write",
                    "arguments": {"path": "a.txt", "content": "é" * 70_000},
                },
            },
            ensure_ascii=False,
        ).encode()
        for piece in (message[:1], message[1:60], message[60:90_001], message[90_001:], b"\n"):
            program.write(piece)
        while (answer := program.read()).get("id") != "half":
            pass
        assert answer["result"]["content"][0]["text"] == "Wrote 70000 characters to a.txt"
        program.write(b'{"jsonrpc":"2.0","id":5,"meth')
        code, said = program.end()

    assert code == 0
    assert "ignored a line that is not a JSON-RPC message" in said
    assert "left in the middle of a message" in said
    assert "Traceback" not in said


@pytest.mark.heavy
def test_an_id_that_is_in_use_is_refused_and_a_late_cancellation_does_nothing(
    workspace: Path, signs: Path
):
    """Both are mistakes of a client: they cost neither the call under way nor the connection."""

    def call(tool: str, **arguments: object) -> None:
        params = {"name": tool, "arguments": arguments}
        message = {"jsonrpc": "2.0", "id": "same", "method": "tools/call", "params": params}
        program.write(json.dumps(message).encode() + b"\n")

    with Program(workspace) as program:
        program.begin()
        call("wait", signs=str(signs))
        wait_until_there(signs / "reached")
        call("write", path="a.txt", content="a")
        refused = program.read()
        (signs / "go on").touch()
        waited = program.read()
        program.write(
            b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"same"}}\n'
        )
        call("write", path="b.txt", content="b")
        written = program.read()

    assert refused["error"]["message"] == "another request has the id same"
    assert (waited["id"], waited["result"]["isError"]) == ("same", False)
    assert written["result"]["isError"] is False
    assert not (workspace / "a.txt").exists()
    assert (workspace / "b.txt").read_text() == "b"


@pytest.mark.heavy
@pytest.mark.parametrize("last", [False, True])
def test_an_argument_of_100_mb_is_refused_without_being_held(workspace: Path, last: bool):
    """Whether the id comes before what is too long, or after it."""
    start = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":'
    end = b"}"
    if last:
        start, end = b'{"method":"tools/call","params":', b',"jsonrpc":"2.0","id":7}'
    with Program(workspace) as program:
        program.begin().call("write", path="a.txt", content="a")
        before = resident(program.process.pid)
        program.write(start + b'{"name":"write","arguments":{"path":"a.txt","content":"')
        for _ in range(100):
            program.write(b'x\\"id\\":3,' * 100_000)
        program.write(b'"}}' + end + b"\n")
        refused = program.answer(7)
        grown = resident(program.process.pid) - before
        still = program.call("write", path="b.txt", content="b")

    assert "bytes at most" in refused["error"]["message"]
    assert still.startswith("Wrote")
    assert grown < 64 << 20
    assert (workspace / "a.txt").read_text() == "a"


def resident(pid: int) -> int:
    """Return the most memory that a process had at once, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.heavy
def test_a_client_that_closes_the_wire_in_the_middle_of_a_call_leaves_nothing(
    workspace: Path, signs: Path
):
    with Program(workspace) as program:
        program.begin().start("wait", signs=str(signs))
        wait_until_there(signs / "reached")
        code, _ = program.end()

    assert code == 0
    assert is_as_it_was(workspace)
    assert can_be_served(workspace)


@pytest.mark.heavy
@pytest.mark.parametrize("number", SIGNALS)
def test_a_server_that_is_told_to_end_rolls_back_and_lets_go(
    workspace: Path, signs: Path, number: int
):
    with Program(workspace) as program:
        program.begin().start("wait", signs=str(signs))
        wait_until_there(signs / "reached")
        code, said = program.end(number)

    assert code == 128 + number
    assert "Traceback" not in said
    assert is_as_it_was(workspace)
    assert can_be_served(workspace)


@pytest.mark.heavy
def test_a_server_that_is_killed_is_made_good_by_the_next(workspace: Path, signs: Path):
    with Program(workspace) as program:
        program.begin().start("wait", signs=str(signs))
        wait_until_there(signs / "reached")
        program.end(signal.SIGKILL)
    assert (workspace / "half.txt").read_bytes() == b"half done"

    with Program(workspace) as program:
        program.begin()
        assert is_as_it_was(workspace)


@pytest.mark.heavy
def test_a_cancelled_call_is_rolled_back_and_the_wire_stays_free(workspace: Path, signs: Path):
    with Program(workspace) as program:
        waiting = program.begin().start("wait", signs=str(signs))
        wait_until_there(signs / "reached")
        assert program.answer(program.ask("ping"))["result"] == {}
        cancel = {
            "jsonrpc": "2.0",
            "method": "notifications/cancelled",
            "params": {"requestId": waiting},
        }
        program.write(json.dumps(cancel).encode() + b"\n")
        assert program.call("history").splitlines()[-1].endswith("wait failed")
        assert is_as_it_was(workspace)


_CLIENT = """
import asyncio, os, sys
from mcp import Client, StdioServerParameters

async def main(workspace, signs, tools):
    command = ["-m", "weakincentives.cli", "mcp", "-w", workspace, tools]
    # The client hands on next to nothing of its environment, and the seals are those of this key.
    env = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    server = StdioServerParameters(command=sys.executable, args=command, env=env)
    async with Client(server) as client:
        await client.call_tool("wait", {"signs": signs})

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.heavy
def test_a_client_that_is_killed_in_the_middle_of_a_call_leaves_nothing(
    workspace: Path, signs: Path
):
    """The official client with a server that it started: the server ends, and lets go."""
    with subprocess.Popen([sys.executable, "-c", _CLIENT, workspace, signs, TOOLS]) as client:
        wait_until_there(signs / "reached")
        (server,) = children_of(client.pid)
        client.kill()
    wait_until_ended(server)

    assert is_as_it_was(workspace)
    assert can_be_served(workspace)


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def wait_until_ended(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        assert is_readable(descriptor, SECONDS)
    finally:
        os.close(descriptor)


@pytest.mark.heavy
def test_a_command_that_runs_is_ended_with_the_server(workspace: Path, signs: Path):
    seconds = str(1_000_000 + os.getpid())  # by which it is known
    command = f"echo half > half.txt; touch {signs}/reached; exec sleep {seconds}"
    options = ("--sandbox", "none", "--suites", "shell")
    with Program(workspace, *options, specs=()) as program:
        program.begin().start("shell_execute", command=["sh", "-c", command])
        wait_until_there(signs / "reached")
        program.end(signal.SIGTERM)

    assert is_as_it_was(workspace)
    assert not is_running("sleep", seconds)


def is_running(*command: str) -> bool:
    wanted = "".join(f"{part}\0" for part in command).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes() == wanted:
                return True
    return False


@pytest.mark.heavy
def test_a_client_that_does_not_read_keeps_nobody_from_ending(workspace: Path):
    with Program(workspace) as program:
        program.begin()
        for _ in range(2000):
            program.ask("tools/list")
        code, _ = program.end()

    assert code == 0
    assert can_be_served(workspace)
