"""The ways to undo an accident: each runs the agent under it, and then undoes what it did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "cli"), str(ROOT / "tests")]
from real_agents import AGENTS, LAUNCHER, Running  # noqa: E402
from terminal import WINK  # noqa: E402

PEERS = Path(os.environ.get("DISASTER_PEERS", ROOT / ".bench" / "disaster-peers"))
"""An environment with the tools of other projects: see README.md."""


class Way:
    """One way to undo: here without any."""

    name = "nothing"
    agent = "claude"
    edits_by_shell = False
    """Whether the agent works in a copy, whose path nobody knows before."""

    def __init__(self, project: Path, home: Path) -> None:
        self.project, self.home = project, home
        self.running = Running(AGENTS[self.agent], project, home)

    def version(self) -> str:
        return ""

    def run(self, script: list[Any]) -> str:
        """Let the agent work; return what was said."""
        said = self.started(self.argv(), script)
        if "Done." not in said:
            raise RuntimeError(f"the agent did not finish: {said[-2000:]}")
        return said

    def argv(self) -> list[str]:
        agent = self.running.agent
        words = [each.replace("{prompt}", "clean up") for each in agent.argv]
        return [str(self.running._program), *words]

    def env(self) -> dict[str, str]:
        return {**self.running.env, "XDG_STATE_HOME": str(self.home / "state")}

    def started(self, command: Sequence[str], script: Sequence[Any] = ()) -> str:
        """Run a command where only the scripted model can be reached; return what it says."""
        spec = {
            "command": list(command),
            "cwd": str(self.project),
            "env": self.env(),
            "log": str(self.running.log),
            "scripts": {"main": list(script), "sub": []},
        }
        place = self.home / "spec.json"
        place.write_text(json.dumps(spec))
        done = subprocess.run(
            ["unshare", "--net", sys.executable, "-IS", str(LAUNCHER), str(place)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def called(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command that needs no network."""
        return subprocess.run(
            command, cwd=self.project, env=self.env(), input=text, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    def before(self) -> None:
        """Get ready, before the agent works."""

    def undo(self) -> str:
        """Undo what it did; return what was said about it."""
        return ""


class Wink(Way):
    name = "WINK"

    def version(self) -> str:
        return self.called(*WINK, "--version").stdout.strip().split()[-1]

    def before(self) -> None:
        self.called(*WINK, "hook", "install", self.agent).check_returncode()

    def undo(self) -> str:
        lines = self.called(*WINK, "log", "--json").stdout.splitlines()
        calls = [json.loads(line) for line in lines]
        first = next(call for call in calls if call["tool"] == self.running.agent.shell_tool)
        if first["outcome"] != "committed":
            return f"{first['outcome']} at once: {first.get('message', '')}"
        done = self.called(*WINK, "undo", first["call"], "--yes")
        return done.stdout + done.stderr


class ClaudeRewind(Way):
    """`/rewind`, as the program's own option does it without a terminal."""

    name = "Claude Code's rewind"

    def env(self) -> dict[str, str]:
        return {**super().env(), "CLAUDE_CODE_ENABLE_SDK_FILE_CHECKPOINTING": "1"}

    def version(self) -> str:
        return self.called(self.argv()[0], "--version").stdout.split()[0]

    def before(self) -> None:
        self._session = str(uuid.uuid4())

    def argv(self) -> list[str]:
        return [*super().argv(), *(["--session-id", self._session] if self._session else [])]

    _session = ""

    def undo(self) -> str:
        [transcript] = (self.home / ".claude" / "projects").rglob(f"{self._session}.jsonl")
        lines = [json.loads(line) for line in transcript.read_text().splitlines()]
        message = next(each["uuid"] for each in lines if each.get("type") == "user")
        command = [self.argv()[0], "-p", "--resume", self._session, "--rewind-files", message]
        return self.started(command)


class OpenCodeUndo(Way):
    """`/undo`, as its own server does it."""

    name = "OpenCode's undo"
    agent = "opencode"

    def version(self) -> str:
        return self.called(self.argv()[0], "--version").stdout.strip()

    def undo(self) -> str:
        return self.started([sys.executable, "-c", _REVERT, self.argv()[0]])


_REVERT = """
import json, subprocess, sys, time, urllib.request
URL = "http://127.0.0.1:4096"
server = subprocess.Popen([sys.argv[1], "serve", "--port", "4096"])
def ask(path, data=None):
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(URL + path, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
for _ in range(200):
    try:
        [session] = ask("/session")
        break
    except OSError:
        time.sleep(0.1)
messages = ask(f"/session/{session['id']}/message")
first = next(each["info"]["id"] for each in messages if each["info"]["role"] == "user")
print(json.dumps(ask(f"/session/{session['id']}/revert", {"messageID": first}))[:2000])
server.terminate()
"""


class ShadowGit(Way):
    """A git directory of its own over the project, as several agents keep one."""

    name = "shadow git"

    def version(self) -> str:
        return self.called("git", "--version").stdout.split()[-1]

    def _git(self, *words: str) -> str:
        own = (f"--git-dir={self.home / 'shadow.git'}", f"--work-tree={self.project}")
        who = ("-c", "user.name=shadow", "-c", "user.email=shadow@localhost")
        done = self.called("git", *own, *who, *words)
        return done.stdout + done.stderr

    def before(self) -> None:
        self._git("init", "--quiet")
        self._git("add", "--all")
        self._git("commit", "--quiet", "--allow-empty", "--message=before")

    def undo(self) -> str:
        return self._git("reset", "--hard", "--quiet", "HEAD") + self._git("clean", "-fd")


class Stepback(Way):
    name = "stepback"

    def version(self) -> str:
        return _version_of("stepback")

    def argv(self) -> list[str]:
        return [str(PEERS / "bin" / "stepback"), "run", "--", *super().argv()]

    def undo(self) -> str:
        listed = self.called(str(PEERS / "bin" / "stepback"), "list").stdout
        numbers = sorted(int(each) for each in re.findall(r"#(\d+)", listed))
        if not numbers:
            return f"no checkpoint: {listed}"
        done = self.called(str(PEERS / "bin" / "stepback"), "rewind", str(numbers[0]), "--yes")
        return listed + done.stdout + done.stderr


class Sandlock(Way):
    """The whole session in a copy-on-write sandbox, which is discarded."""

    name = "sandlock"
    agent = "pi"  # the shell of Claude Code does not start there: it refuses its output file

    def version(self) -> str:
        return _version_of("sandlock")

    def argv(self) -> list[str]:
        own = [str(PEERS / "bin" / "python"), "-c", _SANDLOCK]
        return [*own, str(self.project), str(self.home), *super().argv()]


_SANDLOCK = """
import sys
from sandlock import BranchAction, Sandbox
project, home, *command = sys.argv[1:]
sandbox = Sandbox(
    workdir=project, cwd=project, fs_readable=["/"], fs_writable=[project, home, "/tmp", "/dev"],
    net_allow=["127.0.0.1:8123"], on_exit=BranchAction.DEFER,
)
result = sandbox.run(command)
print((getattr(result, "stdout", b"") or b"").decode(errors="replace"))
print((getattr(result, "stderr", b"") or b"").decode(errors="replace"), file=sys.stderr)
print([(each.path, each.after is None) for each in result.changes][:20], result.error)
if sandbox.pending:
    sandbox.abort()
"""


class Shepherd(Way):
    """The whole session in a copy, as a task of the framework; the copy is discarded."""

    name = "shepherd-ai"
    edits_by_shell = True

    def version(self) -> str:
        return _version_of("shepherd-ai")

    def env(self) -> dict[str, str]:
        env = super().env()
        return {**env, "PATH": f"{PEERS / 'bin'}:{env['PATH']}"}

    def before(self) -> None:
        done = self.called(str(PEERS / "bin" / "shepherd"), "init")
        if done.returncode:  # for example, since it takes no symbolic links
            raise RuntimeError(done.stderr.strip())
        (self.home / "task.py").write_text(_SHEPHERD)

    def argv(self) -> list[str]:
        return [str(PEERS / "bin" / "python"), str(self.home / "task.py")]


_SHEPHERD = """
import shepherd as sp

@sp.task
def clean_up(repo: sp.GitRepo, goal: str) -> None:
    \"\"\"Clean up.\"\"\"

with sp.open(".") as workspace:
    workspace.tasks.register(clean_up)
    run = workspace.run(
        clean_up, repo=workspace.git_repo(), goal="clean up", placement="jail",
        runtime={"provider": "claude"},
    )
    print(run.status)
    output = run.output()
    print(list(output.changeset().changed_paths)[:20])
    output.discard()
    print("Done.")
"""


def _version_of(package: str) -> str:
    command = [str(PEERS / "bin" / "python"), "-c", _ASKED, package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


_ASKED = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
WAYS: tuple[type[Way], ...] = (
    Wink,
    ClaudeRewind,
    OpenCodeUndo,
    ShadowGit,
    Stepback,
    Sandlock,
    Shepherd,
)
