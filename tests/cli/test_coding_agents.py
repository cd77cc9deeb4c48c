"""The coding agents that people use, as real programs: each of their tools can be undone alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from real_agents import AGENTS, RealAgent, Running
from scripted_agent import SUB
from terminal import WINK, wink

pytestmark = pytest.mark.heavy


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    (place / "src" / "deep").mkdir(parents=True)
    (place / "src" / "a.py").write_text("a\n")
    (place / "src" / "deep" / "run").write_text("#!/bin/sh\n")
    (place / "src" / "deep" / "run").chmod(0o750)
    (place / "src" / "link").symlink_to("a.py")
    (place / "a.txt").write_text("one\n")
    (place / ".env").write_text("SECRET=1\n")
    (place / ".env").chmod(0o600)
    for path in (place / "src" / "a.py", place / "a.txt"):
        os.utime(path, ns=(10**18, 10**18))
    return place


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest, project: Path, tmp_path: Path) -> Running:
    """An agent with our hooks."""
    running = Running(AGENTS[request.param], project, tmp_path / "home")
    installed = wink("hook", "install", request.param, cwd=project, env=running.env)
    assert installed.returncode == 0, installed.stderr
    return running


def tree(project: Path) -> dict[str, object]:
    """Return all that must come back: types, contents, modes, times and links."""
    found: dict[str, object] = {}
    for path in sorted(project.rglob("*")):
        status = path.lstat()
        name = str(path.relative_to(project))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = status.st_mode
        else:
            found[name] = status.st_mode, status.st_mtime_ns, path.read_bytes()
    return found


def calls(project: Path) -> list[tuple[str, str, list[str]]]:
    """Return the calls that may have changed something."""
    lines = wink("log", "--json", cwd=project).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    return [
        (each["tool"], each["outcome"], [file["path"] for file in each["files"]])
        for each in found
        if each["outcome"] != "ok"
    ]


def number_of(project: Path, tool: str, place: int = 0) -> str:
    lines = wink("log", "--json", cwd=project).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    return [each["call"] for each in found if each["tool"] == tool and each["files"]][place]


def read_first(agent: RealAgent, path: Path) -> list[Any]:
    """Some refuse to edit what they have not read."""
    return [[("read_file", {"file_path": str(path)})]] if agent.name == "qwen" else []


def test_each_of_its_tools_is_a_call_that_can_be_undone_alone(agent: Running, project: Path):
    before, known = tree(project), agent.agent
    file = project / "a.txt"
    agent.scripts["main"] = [
        *read_first(known, file),
        [known.shell("rm -r src")],
        [known.edit(str(file), "one", "two")],
        [known.shell("exit 3")],
    ]
    agent.run("repair it, please")

    assert file.read_text() == "two\n"
    assert calls(project) == [
        (known.shell_tool, "committed", ["src/a.py", "src/deep/run", "src/link"]),
        (known.edit_tool, "committed", ["a.txt"]),
    ]
    assert ": repair it, please" in wink("log", cwd=project).stdout.splitlines()[0]
    edited = tree(project)["a.txt"]
    assert wink("undo", number_of(project, known.shell_tool), cwd=project).returncode == 0
    assert tree(project) == {**before, "a.txt": edited}
    assert wink("undo", number_of(project, known.edit_tool), cwd=project).returncode == 0
    assert tree(project) == before


def test_what_a_cancelled_command_has_changed_is_recorded(
    agent: Running, project: Path, tmp_path: Path
):
    before, known = tree(project), agent.agent
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    agent.scripts["main"] = [[known.shell(f"rm -r src; echo > {ready}; sleep 30")]]
    with agent.started() as process:
        ready.read_bytes()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    agent.scripts["main"] = [[known.shell("echo > new.txt")]]
    agent.run()

    found = calls(project)
    assert found == [
        (known.shell_tool, "committed", ["src/a.py", "src/deep/run", "src/link"]),
        (known.shell_tool, "committed", ["new.txt"]),
    ]
    assert wink("undo", number_of(project, known.shell_tool), cwd=project).returncode == 0
    (project / "new.txt").unlink()
    assert tree(project) == before


def test_what_a_sub_agent_changes_can_be_undone_alone(agent: Running, project: Path):
    before, known = tree(project), agent.agent
    if known.delegate is None:
        pytest.skip(f"{known.name} offers no sub-agents here")
    agent.scripts["main"] = [[known.delegate(f"{SUB} clean up")]]
    agent.scripts["sub"] = [[known.shell("rm -r src")], "Removed."]
    agent.run("have it cleaned up")

    [(_, outcome, files)] = calls(project)
    assert (outcome, files) == ("committed", ["src/a.py", "src/deep/run", "src/link"])
    lines = wink("log", "--json", cwd=project).stdout.splitlines()
    assert len({json.loads(line)["run"] for line in lines}) == 1  # of the agent
    assert wink("undo", cwd=project).returncode == 0
    assert tree(project) == before


def test_a_person_can_undo_while_it_works(agent: Running, project: Path, tmp_path: Path):
    before, known = tree(project), agent.agent
    began, goes_on = tmp_path / "began", tmp_path / "goes_on"
    os.mkfifo(began)
    os.mkfifo(goes_on)
    agent.scripts["main"] = [
        [known.shell("rm -r src")],
        [known.shell(f"echo > {began}; cat {goes_on}; echo new > src/new.py")],
    ]
    with agent.started() as process:
        began.read_bytes()
        undone = wink("undo", "1", cwd=project)
        goes_on.write_text("\n")
        said, errors = process.communicate(timeout=300)

    assert undone.returncode == 0, undone.stderr
    assert "Done." in said, errors
    tools = [each for each in calls(project) if each[0] == known.shell_tool]
    assert tools[1:] == [(known.shell_tool, "committed", ["src/new.py"])]
    assert wink("undo", number_of(project, known.shell_tool, 1), cwd=project).returncode == 0
    assert tree(project) == before


def test_without_wink_it_runs_no_tool(agent: Running, project: Path, tmp_path: Path):
    """What would not be recorded does not run."""
    for path in agent.home.rglob("*"):
        is_hook = path.suffix in (".json", ".js", ".ts") or path.parent.name == "hooks"
        if path.is_file() and is_hook and "client.py" in path.read_text():
            text = path.read_text()
            path.write_text(text.replace("client.py", "gone.py"))
            if agent.agent.name == "codex":
                retrusted = ["--dangerously-bypass-hook-trust", *agent.agent.argv[1:]]
                agent.agent = retrusted_agent(agent.agent, ("exec", *retrusted))
    agent.scripts["main"] = [[agent.agent.shell("rm -r src")]]
    with agent.started() as process:
        process.communicate(timeout=300)

    assert (project / "src" / "a.py").exists()


def alone(agent: Running, *words: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run `wink`, and what it starts, where no network can be reached."""
    return subprocess.run(
        ["unshare", "--net", *WINK, *words], cwd=agent.project, env={**agent.env, "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_plug_in_for_claude_code_records_and_undoes(project: Path, tmp_path: Path):
    before = tree(project)
    agent = Running(AGENTS["claude"], project, tmp_path / "home")
    # As a person installs it: in no project's node_modules, which agents may change.
    launcher = tmp_path / "bin" / "claude"
    launcher.parent.mkdir()
    launcher.write_text(
        f'#!/bin/sh\nexec "{shutil.which("claude", path=agent.env["PATH"])}" "$@"\n'
    )
    launcher.chmod(0o755)
    path = f"{launcher.parent}:{agent.env['PATH']}"
    wink("hook", "install", "claude", cwd=project, env=agent.env)
    installed = alone(agent, "hook", "install", "claude", "--plugin", path=path)
    assert installed.returncode == 0, installed.stderr
    settings = json.loads((agent.home / ".claude" / "settings.json").read_text())
    agent.scripts["main"] = [[agent.agent.shell("rm -r src")], [agent.agent.shell("rm a.txt")]]
    agent.run("clean up")

    assert "hooks" not in settings
    assert [files for _, _, files in calls(project)] == [
        ["src/a.py", "src/deep/run", "src/link"],
        ["a.txt"],
    ]
    agent.scripts["main"] = []
    agent.run("/wink:undo 1")
    after = tree(project)
    assert {**after, "a.txt": before["a.txt"]} == before
    assert "a.txt" not in after
    removed = alone(agent, "hook", "uninstall", "claude", path=path)
    assert "removed" in removed.stdout, removed.stderr
    left = json.loads((agent.home / ".claude" / "settings.json").read_text())
    assert not any(left.get("enabledPlugins", {}).values())


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("opencode", ("run", "--auto", "-m", "loop/scripted", "--command", "wink-undo", "1")),
        ("pi", ("-p", "--provider", "loop", "--model", "scripted", "/wink-undo 1")),
    ],
)
def test_a_person_undoes_a_call_with_a_command_inside_the_agent(
    project: Path, tmp_path: Path, name: str, argv: tuple[str, ...]
):
    before = tree(project)
    agent = Running(AGENTS[name], project, tmp_path / "home")
    wink("hook", "install", name, cwd=project, env=agent.env)
    agent.scripts["main"] = [[agent.agent.shell("rm -r src")], [agent.agent.shell("rm a.txt")]]
    agent.run("clean up")
    agent.scripts["main"] = []
    with agent.started(argv=argv) as process:
        process.communicate(timeout=300)

    after = tree(project)
    assert "a.txt" not in after
    assert {**after, "a.txt": before["a.txt"]} == before


def retrusted_agent(agent: RealAgent, argv: tuple[str, ...]) -> RealAgent:
    from dataclasses import replace

    return replace(agent, argv=argv)
