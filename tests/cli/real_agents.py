"""Other vendors' agents as real programs, each with a scripted model on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scripted_agent import PORT
from terminal import environment

PROGRAMS = Path(__file__).parents[2] / ".venv-agents" / "node_modules" / ".bin"
"""Where `make agents` installs them, and a Node that they all work with."""
LAUNCHER = Path(__file__).with_name("scripted_agent.py")
URL = f"http://127.0.0.1:{PORT}"
Call = tuple[str, Any]


@dataclass(frozen=True, kw_only=True)
class RealAgent:
    """How an agent is run without a person, and what its tools are called."""

    name: str
    argv: tuple[str, ...]
    """Without its first word, the program; the prompt comes where ``{prompt}`` stands."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What its settings need, by path in the home directory."""
    shell: Callable[[str], Call]
    edit: Callable[[str, str, str], Call]
    """The call that replaces text in a file, by absolute path."""
    shell_tool: str
    """What its shell is called in `wink log`."""
    edit_tool: str
    program: str = ""
    """What it is called where it is installed, if not by its name."""
    delegate: Callable[[str], Call] | None = None
    """The call that gives a task to a sub-agent."""
    setup: tuple[str, ...] = ()
    """What to run once, before anything else."""


def _patch(path: str, old: str, new: str) -> Call:
    text = f"*** Begin Patch\n*** Update File: {path}\n@@\n-{old}\n+{new}\n*** End Patch\n"
    return "apply_patch", text


AGENTS = {
    each.name: each
    for each in (
        RealAgent(
            name="claude",
            argv=("-p", "{prompt}", "--model", "claude-sonnet-5", "--dangerously-skip-permissions"),
            env={
                "ANTHROPIC_BASE_URL": URL,
                "ANTHROPIC_API_KEY": "not-a-key",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_MAX_RETRIES": "0",
                "IS_SANDBOX": "1",
            },
            shell=lambda command: ("Bash", {"command": command, "description": "-"}),
            edit=lambda path, old, new: (
                "Edit",
                {"file_path": path, "old_string": old, "new_string": new},
            ),
            delegate=lambda task: (
                "Agent",
                {"description": "-", "prompt": task, "subagent_type": "general-purpose"},
            ),
            shell_tool="bash",
            edit_tool="edit",
        ),
        RealAgent(
            name="cline",
            argv=("--json", "{prompt}"),
            # Else it works in a daemon, which would outlive a test.
            env={"CLINE_SESSION_BACKEND_MODE": "local", "CLINE_NO_AUTO_UPDATE": "1"},
            setup=(
                *("auth", "-p", "openai-compatible", "-k", "x"),
                *("-m", "scripted", "-b", f"{URL}/v1"),
            ),
            shell=lambda command: ("run_commands", {"commands": [command]}),
            edit=lambda path, old, new: (
                "editor",
                {"path": path, "old_text": old, "new_text": new},
            ),
            delegate=lambda task: ("spawn_agent", {"systemPrompt": "-", "task": task}),
            shell_tool="run_commands",
            edit_tool="editor",
        ),
        RealAgent(
            name="codex",
            argv=(
                *("exec", "--skip-git-repo-check"),
                *("--dangerously-bypass-approvals-and-sandbox", "{prompt}"),
            ),
            files={
                ".codex/config.toml": 'model = "gpt-5.5"\nmodel_provider = "loop"\n'
                '[model_providers.loop]\nname = "loop"\n'
                f'base_url = "{URL}/v1"\n'
                'wire_api = "responses"\nrequires_openai_auth = false\n'
            },
            shell=lambda command: ("exec_command", {"cmd": command}),
            edit=_patch,
            shell_tool="bash",
            edit_tool="apply_patch",
        ),
        RealAgent(
            name="copilot",
            argv=("-p", "{prompt}", "--allow-all-tools", "--no-auto-update"),
            env={
                "COPILOT_PROVIDER_BASE_URL": f"{URL}/v1",
                "COPILOT_PROVIDER_TYPE": "openai",
                "COPILOT_PROVIDER_API_KEY": "x",
                "COPILOT_MODEL": "scripted",
                "COPILOT_OFFLINE": "true",
            },
            shell=lambda command: ("bash", {"command": command, "description": "-"}),
            edit=lambda path, old, new: (
                "edit",
                {"path": path, "old_str": old, "new_str": new},
            ),
            delegate=lambda task: (
                "task",
                {"description": "-", "prompt": task, "agent_type": "general-purpose", "name": "s"},
            ),
            shell_tool="bash",
            edit_tool="edit",
        ),
        RealAgent(
            name="gemini",
            argv=("-p", "{prompt}", "--yolo", "--skip-trust", "-m", "gemini-2.5-flash"),
            env={"GEMINI_API_KEY": "x", "GOOGLE_GEMINI_BASE_URL": URL},
            files={
                ".gemini/settings.json": {
                    "security": {"auth": {"selectedType": "gemini-api-key"}},
                    "privacy": {"usageStatisticsEnabled": False},
                }
            },
            shell=lambda command: ("run_shell_command", {"command": command}),
            edit=lambda path, old, new: (
                "replace",
                {"file_path": path, "old_string": old, "new_string": new, "instruction": "-"},
            ),
            delegate=lambda task: ("invoke_agent", {"agent_name": "generalist", "prompt": task}),
            shell_tool="run_shell_command",
            edit_tool="replace",
        ),
        RealAgent(
            name="goose",
            program="goose-binary-linux-x64",
            argv=("run", "--no-session", "--with-builtin", "developer", "-t", "{prompt}"),
            env={
                "GOOSE_PROVIDER": "openai",
                "GOOSE_MODEL": "scripted",
                "OPENAI_HOST": URL,
                "OPENAI_API_KEY": "x",
                "GOOSE_DISABLE_KEYRING": "1",
                "GOOSE_MODE": "auto",
            },
            shell=lambda command: ("shell", {"command": command}),
            edit=lambda path, old, new: ("edit", {"path": path, "before": old, "after": new}),
            delegate=lambda task: ("delegate", {"instructions": task}),
            shell_tool="shell",
            edit_tool="edit",
        ),
        RealAgent(
            name="opencode",
            argv=("run", "--auto", "-m", "loop/scripted", "{prompt}"),
            env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
            files={
                ".npmrc": "fetch-retries=0\n",  # else it waits a minute for a package of its own
                ".config/opencode/opencode.json": {
                    "provider": {
                        "loop": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": f"{URL}/v1", "apiKey": "x"},
                            "models": {"scripted": {}},
                        }
                    }
                },
            },
            shell=lambda command: ("bash", {"command": command, "description": "-"}),
            edit=lambda path, old, new: (
                "edit",
                {"filePath": path, "oldString": old, "newString": new},
            ),
            delegate=lambda task: (
                "task",
                {"description": "-", "prompt": task, "subagent_type": "general"},
            ),
            shell_tool="bash",
            edit_tool="edit",
        ),
        RealAgent(
            name="pi",
            argv=("-p", "--provider", "loop", "--model", "scripted", "{prompt}"),
            env={"PI_OFFLINE": "1"},
            files={
                ".pi/agent/models.json": {
                    "providers": {
                        "loop": {
                            "baseUrl": f"{URL}/v1",
                            "api": "openai-completions",
                            "apiKey": "x",
                            "models": [{"id": "scripted"}],
                        }
                    }
                }
            },
            shell=lambda command: ("bash", {"command": command}),
            edit=lambda path, old, new: (
                "edit",
                {"path": path, "edits": [{"oldText": old, "newText": new}]},
            ),
            shell_tool="bash",
            edit_tool="edit",
        ),
        RealAgent(
            name="qwen",
            argv=("-p", "{prompt}", "--yolo"),
            env={"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_MODEL": "scripted"},
            files={
                ".qwen/settings.json": {
                    "security": {"auth": {"selectedType": "openai"}},
                    "privacy": {"usageStatisticsEnabled": False},
                }
            },
            shell=lambda command: (
                "run_shell_command",
                {"command": command, "is_background": False},
            ),
            edit=lambda path, old, new: (
                "edit",
                {"file_path": path, "old_string": old, "new_string": new},
            ),
            delegate=lambda task: (
                "agent",
                {"description": "-", "prompt": task, "subagent_type": "general-purpose"},
            ),
            shell_tool="run_shell_command",
            edit_tool="edit",
        ),
    )
}


class Running:
    """An agent at work on a project, or several runs of it after one another."""

    def __init__(self, agent: RealAgent, project: Path, home: Path) -> None:
        program = PROGRAMS / (agent.program or agent.name)
        if not program.exists():
            pytest.skip(f"{agent.name} is not installed: make agents")
        if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
            pytest.skip("this needs a network namespace: root, and `unshare`")
        self.agent, self.project, self.home = agent, project, home
        self._program = str(program)
        self.log = home / "requests.jsonl"
        self.scripts: dict[str, list[Any]] = {"main": [], "sub": []}
        home.mkdir(exist_ok=True)
        for path, data in agent.files.items():
            place = home / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(data if isinstance(data, str) else json.dumps(data, indent=2))
        if agent.setup:
            subprocess.run(
                ["unshare", "--net", self._program, *agent.setup], cwd=project, env=self.env,
                stdin=subprocess.DEVNULL, capture_output=True, check=True,
            )  # fmt: skip

    @property
    def env(self) -> dict[str, str]:
        own = {
            "HOME": str(self.home),
            "PWD": str(self.project),
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        }
        own |= {"XDG_CONFIG_HOME": str(self.home / ".config")}
        own |= {"XDG_DATA_HOME": str(self.home / ".local/share")}
        own |= {"XDG_CACHE_HOME": str(self.home / ".cache")}
        own |= {"WINK_HOOK_IDLE": "20"}
        return environment({**own, **self.agent.env})

    @contextmanager
    def started(
        self, prompt: str = "Go on", argv: Sequence[str] = ()
    ) -> Generator[subprocess.Popen[str]]:
        words = [each.replace("{prompt}", prompt) for each in argv or self.agent.argv]
        spec = {
            "command": [self._program, *words],
            "cwd": str(self.project),
            "env": self.env,
            "log": str(self.log),
            "scripts": self.scripts,
        }
        place = self.home / "spec.json"
        place.write_text(json.dumps(spec))
        with subprocess.Popen(
            ["unshare", "--net", sys.executable, "-IS", str(LAUNCHER), str(place)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def run(self, prompt: str = "Go on", argv: Sequence[str] = ()) -> str:
        with self.started(prompt, argv) as process:
            said, errors = process.communicate(timeout=300)
        assert "Done." in said, said + errors
        return said
