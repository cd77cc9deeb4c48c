"""MCP servers that nobody here wrote, each in an environment of its own, under our rules."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, calls, says
from weakincentives.core.deadlines import Heartbeat
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.mcp import McpToolsSection
from weakincentives.prompt import PolicyDecision, QuotaPolicy, SequentialDependencyPolicy
from weakincentives.prompt.tool import ToolContext
from weakincentives.runtime import ToolInvoked

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
SERVERS = Path(os.environ.get("WINK_MCP_SERVERS", ROOT / ".venv-servers"))
BASE = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


def program(name: str) -> str:
    """Return the path of a server's program, from PyPI or from npm."""
    if (SERVERS / "bin" / name).exists():
        return str(SERVERS / "bin" / name)
    pytest.skip(f"{name} is not installed: run `make servers`")


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(root.rglob("*"))
    }


# Git, from PyPI: it changes files that are not ours to know of


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "config", "user.name", "Tester")
    git(root, "config", "user.email", "tester@example.com")
    (root / "app.py").write_text("port = 80\n")
    git(root, "add", "app.py")
    git(root, "commit", "--quiet", "-m", "first")
    (root / "app.py").write_text("port = 8080\n")
    return root


def git(root: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", *args], cwd=root, env={**os.environ, **BASE}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def git_section(root: Path, **options: Any) -> McpToolsSection:
    return McpToolsSection(
        server=[program("mcp-server-git"), "--repository", str(root)],
        writes="external",
        reach="reversible",
        **options,
    )


def test_a_model_commits_under_a_policy_and_the_commit_can_be_undone(repository: Path):
    policy = SequentialDependencyPolicy(dependencies={"git_commit": {"git_diff_staged"}})
    where = {"repo_path": str(repository)}
    model = ScriptedAdapter(
        [
            calls(("git_add", {**where, "files": ["app.py"]})),
            calls(("git_commit", {**where, "message": "second"})),
            calls(("git_diff_staged", where)),
            calls(("git_commit", {**where, "message": "second"})),
            says("Done."),
        ]
    )
    with HostFilesystem(repository) as files, git_section(repository, policies=[policy]) as section:
        session = wink.Session()
        template = wink.PromptTemplate(sections=[section], resources={Filesystem: files})
        model.evaluate(wink.Prompt(template), session)
        events = session[ToolInvoked].all()

        assert [event.success for event in events] == [True, False, True, True]
        assert "git_diff_staged" in events[1].result.message
        assert events[1].denied_by == "sequential_dependency"
        assert "+port = 8080" in events[2].result.render()
        assert git(repository, "log", "--format=%s").split() == ["second", "first"]

        files.undo(events[3].call_id)
        assert git(repository, "log", "--format=%s").split() == ["first"]
        assert git(repository, "status", "--porcelain") == "M  app.py\n"
        git(repository, "fsck", "--strict")


def test_a_commit_that_a_hook_spoils_leaves_the_repository_as_it_was(repository: Path):
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.write_text("#!/bin/sh\necho mess > left-behind.txt\necho no >> app.py\nexit 1\n")
    hook.chmod(0o755)
    git(repository, "add", "app.py")
    before = tree(repository)
    with (
        git_section(repository) as section,
        wink.ToolRegistry.from_section(section, workspace=repository) as registry,
    ):
        result = registry.execute("git_commit", {"repo_path": str(repository), "message": "never"})

        assert not result.success
        assert "hook" in result.message.lower() or "error" in result.message.lower()
        assert tree(repository) == before


def test_a_commit_that_a_policy_does_not_take_afterwards_has_not_happened(repository: Path):
    class NoShortMessages:
        name = "messages"

        def check(self, tool: Any, params: Any, *, context: Any) -> PolicyDecision:
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: Any) -> None:
            if tool.name == "git_commit" and len(params["message"]) < 10:
                raise ValueError("say more")

    git(repository, "add", "app.py")
    before = tree(repository)
    with (
        git_section(repository, policies=[NoShortMessages()]) as section,
        wink.ToolRegistry.from_section(section, workspace=repository) as registry,
    ):
        where = {"repo_path": str(repository)}
        failed = registry.execute("git_commit", {**where, "message": "short"})
        assert not failed.success
        assert "Filesystem" in failed.metadata.undone
        assert tree(repository) == before

        assert registry.execute("git_commit", {**where, "message": "long enough a text"}).success
        assert git(repository, "log", "-1", "--format=%s") == "long enough a text\n"


# The time, from PyPI: it only reads


def test_a_server_that_only_reads_is_used_beside_itself_within_a_quota():
    with (
        McpToolsSection(
            server=[program("mcp-server-time"), "--local-timezone", "UTC"],
            reach="read",
            prefix="time_",
            policies=[QuotaPolicy(3)],
        ) as section,
        wink.ToolRegistry.from_section(section) as registry,
    ):
        zones = ["Europe/Paris", "Asia/Tokyo", "Nowhere/Atlantis", "UTC"]
        results = registry.execute_tools(
            [("time_get_current_time", {"timezone": zone}) for zone in zones]
        )

        assert [result.success for result in results] == [True, True, False, False]
        assert "Asia/Tokyo" in results[1].render()
        assert "Invalid timezone" in results[2].message
        assert results[3].failure.code == "POLICY_DENIED"


# Two from npm


@pytest.fixture(scope="module")
def everything() -> Iterator[McpToolsSection]:
    with McpToolsSection(
        server=[program("mcp-server-everything")],
        reach="annotations",
        timeout={"trigger-long-running-operation": 10.0},
    ) as section:
        yield section


def test_what_a_server_can_answer_with_reaches_the_model(everything: McpToolsSection):
    registry = wink.ToolRegistry(everything.tools)

    assert "7" in registry.execute("get-sum", {"a": 3, "b": 4}).render()
    image = registry.execute("get-tiny-image")
    assert "[image/png, " in image.render()
    assert image.value.media[0].media_type == "image/png"
    weather = registry.execute("get-structured-content", {"location": "New York"})
    assert weather.value.structured.keys() >= {"temperature", "conditions"}
    assert "[link to" in registry.execute("get-resource-links", {"count": 1}).render()


def test_its_progress_is_a_sign_of_life_and_its_time_is_limited(everything: McpToolsSection):
    registry = wink.ToolRegistry(everything.tools)
    heartbeat = Heartbeat()
    context = ToolContext(session=wink.Session(), heartbeat=heartbeat)
    work = "trigger-long-running-operation"

    assert registry.execute(work, {"duration": 0.3, "steps": 3}, context).success
    assert heartbeat.beats >= 3
    result = registry.execute(work, {"duration": 600, "steps": 2})
    assert result.failure is not None
    assert result.failure.code == "TIMEOUT"
    assert registry.execute("echo", {"message": "hello"}).render() == "Echo: hello"


def test_files_that_another_program_edits_are_put_back_when_it_fails(tmp_path: Path):
    root = tmp_path / "files"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    with (
        McpToolsSection(
            server=[program("mcp-server-filesystem"), str(root)],
            writes="external",
            reach={"read_*": "read", "list_*": "read", "*": "reversible"},
            deny=["move_file"],
        ) as section,
        wink.ToolRegistry.from_section(section, workspace=root) as registry,
    ):
        path = str(root / "a.txt")
        edit = {"oldText": "one", "newText": "two"}
        assert registry.execute("edit_file", {"path": path, "edits": [edit]}).success
        assert (root / "a.txt").read_text() == "two\n"
        assert not registry.execute("edit_file", {"path": path, "edits": [edit]}).success
        assert not registry.execute("write_file", {"path": "/etc/x", "content": ""}).success
        assert "move_file" not in registry
        registry.workspace.undo(registry.workspace.history()[-1].call_id)
        assert (root / "a.txt").read_text() == "one\n"
