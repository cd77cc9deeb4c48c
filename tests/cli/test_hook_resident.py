"""The process that stays behind and records an agent's next events: quicker, and no different."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from terminal import environment, wink

from weakincentives.cli.hooks import client

CLIENT = [sys.executable, "-I", "-S", client.__file__]


class Hooks:
    """Starts our hook as an agent does."""

    def __init__(self, project: Path, state: Path) -> None:
        self.project = project
        # The path of a socket is short, that of a test is not.
        self.env = environment({"WINK_HOOK_IDLE": "60", "XDG_STATE_HOME": str(state)})

    def tell(self, event: str, use: str = "u1", **env: str) -> dict[str, Any]:
        told = {"session_id": "s1", "cwd": str(self.project), "hook_event_name": event}
        told |= {"prompt_id": "p1", "tool_name": "Bash", "tool_use_id": use}
        done = subprocess.run(
            [*CLIENT, "claude"], input=json.dumps({**told, "tool_input": {"command": "make"}}),
            cwd="/", env={**self.env, **env}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout) if done.stdout else {}

    @property
    def address(self) -> Path:
        found = client.address({k.encode(): v.encode() for k, v in self.env.items()})
        assert found is not None
        return Path(os.fsdecode(found))

    @property
    def resident(self) -> int:
        """The process that listens; zero if there is none."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self.address))
                data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                return int.from_bytes(data[:4], sys.byteorder)
        except OSError:
            return 0

    def start(self) -> int:
        self.tell("Stop")
        for _ in range(2_400):
            if self.resident:
                break
            time.sleep(0.05)
        assert self.resident, "it has not started within two minutes"
        return self.resident


@pytest.fixture
def hooks(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hooks]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.txt").write_text("one\n")
    found = Hooks(project, tmp_path_factory.mktemp("s"))
    yield found
    if found.resident:
        os.kill(found.resident, signal.SIGKILL)


pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="Linux only")


def calls(hooks: Hooks) -> list[list[str]]:
    shown = wink("log", "--json", cwd=hooks.project, env=hooks.env).stdout.splitlines()
    return [[file["path"] for file in json.loads(line)["files"]] for line in shown]


def test_it_takes_the_events_after_the_first(hooks: Hooks):
    process = hooks.start()
    hooks.tell("PreToolUse")
    (hooks.project / "a.txt").unlink()
    hooks.tell("PostToolUse")

    assert calls(hooks) == [["a.txt"]]
    assert hooks.resident == process
    assert os.stat(hooks.address).st_mode & 0o777 == 0o600


def test_settings_are_read_for_each_event(hooks: Hooks):
    hooks.start()
    first = hooks.tell("PreToolUse")
    (hooks.project / "wink.toml").write_text('[policy]\ndeny = ["bash"]\n')
    second = hooks.tell("PreToolUse", "u2")

    assert first == {}
    assert second["hookSpecificOutput"]["permissionDecision"] == "deny"


def test_the_environment_is_the_event_s(hooks: Hooks):
    hooks.start()
    denied = hooks.tell("PreToolUse", WINK_POLICY_DENY="bash")

    assert denied["hookSpecificOutput"]["permissionDecision"] == "deny"
    assert hooks.tell("PreToolUse", "u2") == {}


def test_without_it_events_are_recorded_as_well(hooks: Hooks):
    os.kill(hooks.start(), signal.SIGKILL)
    hooks.tell("PreToolUse")
    (hooks.project / "a.txt").unlink()
    hooks.tell("PostToolUse")

    assert calls(hooks) == [["a.txt"]]


def test_another_one_is_not_started_beside_it(hooks: Hooks):
    process = hooks.start()
    wink("hook", "run", "claude", cwd=hooks.project, env=hooks.env, stdin="{}")

    assert hooks.resident == process


def test_no_process_stays_where_it_is_turned_off(hooks: Hooks):
    hooks.env["WINK_HOOK_IDLE"] = "0"
    hooks.tell("Stop")

    assert not hooks.address.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.heavy
def test_another_user_is_not_served(tmp_path: Path):
    with TemporaryDirectory(prefix="wink-") as place:  # other users can enter what it is in
        state = Path(place)
        hooks = Hooks(tmp_path, state)
        process = hooks.start()
        for opened in (state, state / "wink", state / "wink" / "hooks", hooks.address):
            opened.chmod(0o777)  # as if everything else had failed
        said = subprocess.run(
            ["setpriv", "--reuid=65534", "--clear-groups", "--", "/usr/bin/python3", "-c", _ASK],
            env={**hooks.env, "ADDRESS": str(hooks.address)}, cwd="/", capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        os.kill(process, signal.SIGKILL)

    assert said.stdout == "b''\n", said.stderr


_ASK = """
import os, socket
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["ADDRESS"])
    socket.send_fds(connection, [(2).to_bytes(4, "big")], [0, 1, 2])
    try:
        print(connection.recv(1))
    except ConnectionResetError:
        print(b"")
"""
