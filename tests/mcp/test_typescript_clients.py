"""The official TypeScript clients of both generations, and the Inspector, with `wink mcp`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "conformance"))
from suite import NODE, environment, program

pytest.importorskip("mcp")
pytest.importorskip("typer")
pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent
TOKEN = "a-token-for-this-test"
WINK = [sys.executable, "-m", "weakincentives.cli"]
CLIENTS = [("1", "old"), ("2", "old"), ("2", "new")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "wink.toml").write_text('ask = ["write_file"]\n')
    return root


@contextmanager
def served(project: Path) -> Iterator[str]:
    command = [*WINK, "mcp", "--workspace", str(project), "--http", "--port", "0"]
    env = {**os.environ, "WINK_MCP_TOKEN": TOKEN}
    server = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/mcp", said)):
            line = server.stderr.readline()
            assert line, said
            said += line
        yield found[0]
    finally:
        server.terminate()
        server.communicate(timeout=240)


def ran(command: list[str]) -> Any:
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def client(major: str, era: str, kind: str, *rest: str) -> Any:
    script, modules = str(HERE / "typescript_client.cjs"), str(NODE / "node_modules")
    return ran([program("node"), script, modules, major, era, kind, *rest])


def check(seen: Any, project: Path) -> None:
    """What it has seen is what it did: under approval, on record, and undone."""
    assert (seen["written"], seen["failed"], seen["undone"]) == (False, True, False)
    assert len(seen["questions"]) == 1
    assert "+++ b/new.txt" in seen["questions"][0]
    assert {"wink://history", "wink://files/new.txt"} <= set(seen["resources"])
    assert seen["read"] == "hello\n"
    assert "+hello" in seen["diff"]
    assert seen["prompt"]
    assert seen["completed"] == ["new.txt"]
    assert not (project / "new.txt").exists()


@pytest.mark.parametrize(("major", "era"), CLIENTS)
def test_a_client_that_starts_the_server_reads_writes_and_undoes(
    project: Path, major: str, era: str
):
    seen = client(major, era, "stdio", *WINK, "mcp", "--workspace", str(project))

    check(seen, project)


def test_clients_of_all_generations_share_a_server_over_http(project: Path):
    with served(project) as url:
        for major, era in CLIENTS:
            check(client(major, era, "http", url, TOKEN), project)


def test_the_inspector_calls_tools_and_reads_resources(project: Path):
    inspector = [program("node"), program("mcp-inspector"), "--cli"]
    mkdir = ["--method", "tools/call", "--tool-name", "list_directory"]
    command = [*WINK, "mcp", "--workspace", str(project)]
    with served(project) as url:
        header = ["--header", f"Authorization: Bearer {TOKEN}"]
        over_http = ran([*inspector, url, *header, *mkdir])
    # It starts servers without the environment it has.
    state = [
        f"{name}={os.environ[name]}" for name in ("HOME", "XDG_STATE_HOME") if name in os.environ
    ]
    passed = [each for setting in state for each in ("-e", setting)]
    over_stdio = ran([*inspector, *passed, "--method", "resources/list", *command])

    assert "wink.toml" in json.dumps(over_http["content"])
    assert "wink://files/wink.toml" in [each["uri"] for each in over_stdio["resources"]]
