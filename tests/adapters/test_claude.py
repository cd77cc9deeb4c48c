"""The Claude Agent SDK with its real program, against a server on loopback."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
from messages_server import MessagesServer, serving

import weakincentives as wink
from weakincentives.adapters import (
    ClaudeAgentSDKAdapter,
    Message,
    ModelTurn,
    RunConfig,
    calls,
)
from weakincentives.deadlines import Deadline
from weakincentives.errors import DeadlineExceededError, MissingExtra, ProviderError
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.prompt import (
    Custom,
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    Tool,
)
from weakincentives.runtime import Session, ToolInvoked
from weakincentives.testing import AdapterCase, adapter_cases

program = pytest.mark.heavy


@pytest.fixture(autouse=True)
def _sdk(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("heavy"):
        pytest.importorskip("claude_agent_sdk", reason="claude-agent-sdk is not installed")


def test_without_the_sdk_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "claude_agent_sdk", None)
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="T", template="t")]))

    with pytest.raises(MissingExtra, match=r"pip install 'wink-runtime\[claude-agent-sdk\]'"):
        ClaudeAgentSDKAdapter().evaluate(prompt, Session())


# What every adapter must do


@program
@pytest.mark.parametrize("case", adapter_cases(), ids=str)
def test_what_every_adapter_must_do(case: AdapterCase):
    with ExitStack() as servers:

        def make(turns: Sequence[ModelTurn | ProviderError]) -> ClaudeAgentSDKAdapter:
            if any(isinstance(turn, ProviderError) and turn.retry_after for turn in turns):
                raise SkipTest("the program does not pass on how long the provider asks to wait")
            server = servers.enter_context(serving(turns))
            return ClaudeAgentSDKAdapter(model="claude-sonnet-5", env=server.environment)

        try:
            case.check(make)
        except SkipTest as skipped:
            pytest.skip(str(skipped))


# Its own tools


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[HostFilesystem]:
    place = tmp_path / "workspace"
    place.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (place / name).write_text(f"{name} as it was\n")
        os.utime(place / name, (1_700_000_000, 1_700_000_000))
    (place / ".env").write_text("SECRET=1\n")
    with HostFilesystem(place) as files:
        yield files


@wink.tool(reach="reversible")
def note(text: str, *, context: wink.ToolContext) -> str:
    """Take a note."""
    context.filesystem.append("notes.txt", f"{text}\n")
    return f"noted {text}"


class Run:
    """One run of the program over a workspace, with a script of turns."""

    def __init__(self, files: HostFilesystem, **template: Any) -> None:
        self.files = files
        self.session = Session()
        sections = template.pop("sections", [MarkdownSection(title="Notes", tools=[note])])
        self.prompt = Prompt(
            PromptTemplate(sections=sections, resources={Filesystem: files}, **template)
        )
        self.server: MessagesServer

    def play(self, *turns: ModelTurn, **options: Any) -> Any:
        with serving(turns) as self.server:
            adapter = ClaudeAgentSDKAdapter(
                model="claude-sonnet-5",
                native_tools=["Read", "Write", "Edit", "Bash"],
                env=self.server.environment,
            )
            return adapter.evaluate(self.prompt, self.session, **options)

    def answers(self) -> list[str]:
        return [
            block["content"] if isinstance(block["content"], str) else block["content"][0]["text"]
            for block in self.server.tool_results()
        ]

    def tree(self) -> dict[str, tuple[str, float]]:
        return {
            path.name: (path.read_text(), path.stat().st_mtime)
            for path in sorted(self.files.root.iterdir())
        }


def write(files: HostFilesystem, name: str, text: str) -> ModelTurn:
    return calls(("write", {"file_path": str(files.root / name), "content": text}))


def bash(command: str) -> ModelTurn:
    return calls(("bash", {"command": command, "description": "Run it"}))


DONE = ModelTurn(text="Done.")


@program
def test_a_native_write_is_kept_and_can_be_taken_back(workspace: HostFilesystem):
    run = Run(workspace)
    before, token = run.tree(), workspace.snapshot()

    response = run.play(write(workspace, "a.txt", "new\n"), DONE)

    assert response.text == "Done."
    assert (workspace.root / "a.txt").read_text() == "new\n"
    (record,) = run.session[ToolInvoked]
    assert (record.tool_name, record.success) == ("write", True)
    assert [entry.tool for entry in workspace.history()] == ["write"]
    workspace.restore(token)
    assert run.tree() == before


@program
def test_a_native_write_that_is_rolled_back_leaves_the_file_as_it_was(workspace: HostFilesystem):
    """A policy hears of the success and cannot accept it: the call has failed after all."""

    class Vetoes:
        name = "vetoes"

        def check(self, tool: Tool[Any, Any], params: Any, *, context: Any) -> PolicyDecision:
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: Any) -> None:
            raise ValueError("this file must stay as it is")

    run = Run(workspace, policies=[Vetoes()])
    before = run.tree()

    run.play(write(workspace, "a.txt", "new\n"), DONE)

    assert run.tree() == before
    assert not run.session[ToolInvoked].latest().success


@program
def test_a_native_command_that_fails_leaves_all_three_files_as_they_were(
    workspace: HostFilesystem,
):
    run = Run(workspace)
    before = run.tree()

    run.play(bash("echo new > a.txt; rm b.txt; mv c.txt d.txt; exit 3"), DONE)

    assert run.tree() == before
    (record,) = run.session[ToolInvoked]
    assert (record.tool_name, record.success) == ("bash", False)
    assert "Filesystem" in record.result.metadata.undone
    assert "Rolled back: session, Filesystem." in str(run.server.requests[-1]["messages"])


@program
def test_native_tools_and_ours_run_in_the_order_of_the_turn(workspace: HostFilesystem):
    run = Run(workspace)
    turn = calls(
        ("note", {"text": "first"}),
        ("bash", {"command": "cat notes.txt > seen.txt", "description": "Look"}),
        ("note", {"text": "second"}),
        ("bash", {"command": "cp notes.txt a.txt; false", "description": "Fail"}),
        ("note", {"text": "third"}),
    )

    run.play(turn, DONE)

    assert (workspace.root / "seen.txt").read_text() == "first\n"
    assert (workspace.root / "notes.txt").read_text() == "first\nsecond\nthird\n"
    assert (workspace.root / "a.txt").read_text() == "a.txt as it was\n"
    assert [record.tool_name for record in run.session[ToolInvoked]] == [
        *("note", "bash", "note", "bash", "note")
    ]
    assert [answer for answer in run.answers() if "noted" in answer] == [
        *("noted first", "noted second", "noted third")
    ]


@program
def test_policies_govern_native_tools(workspace: HostFilesystem):
    reads_first = ReadBeforeWritePolicy(
        read_tools=frozenset({"read"}), write_tools=frozenset({"write", "edit"})
    )
    run = Run(workspace, policies=[reads_first])
    before = run.tree()
    place = str(workspace.root / "a.txt")

    run.play(write(workspace, "a.txt", "unread\n"), DONE)

    assert run.tree() == before
    assert "Cannot write to a.txt without reading it first" in run.answers()[0]

    run.play(calls(("read", {"file_path": place})), write(workspace, "a.txt", "read\n"), DONE)

    assert (workspace.root / "a.txt").read_text() == "read\n"


@program
def test_the_policies_of_a_section_that_declares_a_native_tool_hold(workspace: HostFilesystem):
    class Never:
        name = "never"

        def check(self, tool: Any, params: Any, *, context: Any) -> PolicyDecision:
            return PolicyDecision.deny("There is no shell today")

    shell = Tool.from_schema("bash", "The program's shell.", {"type": "object"}, None)
    run = Run(
        workspace, sections=[MarkdownSection(title="Shell", tools=[shell], policies=[Never()])]
    )
    before = run.tree()

    run.play(bash("rm a.txt"), DONE)

    assert run.tree() == before
    assert "There is no shell today" in run.answers()[0]


@program
def test_what_the_program_refuses_by_itself_leaves_nothing(workspace: HostFilesystem):
    """An edit of a text that is not there: the program says so before it asks anybody."""
    run = Run(workspace)
    before = run.tree()
    edit = {
        "file_path": str(workspace.root / "a.txt"),
        "old_string": "not there",
        "new_string": "x",
    }

    response = run.play(calls(("edit", edit), ("note", {"text": "after"})), DONE)

    assert response.text == "Done."
    assert {name: file for name, file in run.tree().items() if name != "notes.txt"} == before
    assert [record.success for record in run.session[ToolInvoked]] == [False, True]


@program
def test_a_deadline_in_a_native_command_kills_it_and_leaves_nothing(workspace: HostFilesystem):
    run = Run(workspace)
    before = run.tree()
    command = "echo new > a.txt; (sleep 2; echo late > b.txt) & sleep 60"

    with pytest.raises(DeadlineExceededError):
        run.play(bash(command), DONE, deadline=Deadline.after(12))

    assert run.tree() == before
    time.sleep(2.5)  # what was left behind would write by now
    assert run.tree() == before


@program
def test_a_run_that_is_cancelled_takes_its_native_tool_with_it(workspace: HostFilesystem):
    run = Run(workspace)
    before = run.tree()
    marker = workspace.root / "a.txt"

    async def scenario(adapter: ClaudeAgentSDKAdapter) -> None:
        task = asyncio.create_task(adapter.aevaluate(run.prompt, run.session))
        while marker.read_text() != "new\n":
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving([bash("echo new > a.txt; sleep 60"), DONE]) as server:
        adapter = ClaudeAgentSDKAdapter(native_tools=["Bash"], env=server.environment)
        asyncio.run(scenario(adapter))

    assert run.tree() == before


# The rest of what it does


@program
def test_failures_of_our_tools_are_no_protocol_errors(workspace: HostFilesystem):
    run = Run(workspace)

    run.play(calls(("note", {"words": 1})), DONE)

    (result,) = run.server.tool_results()
    assert not result.get("is_error")
    assert result["content"][0]["text"] == [m.text for m in run.session[Message]][2]


@program
def test_a_model_that_stops_too_early_is_held_by_the_stop_hook(workspace: HostFilesystem):
    run = Run(workspace)
    noted = Custom(lambda context: context.filesystem.exists("notes.txt"), "Take a note first.")

    response = run.play(
        ModelTurn(text="Done already."),
        calls(("note", {"text": "x"})),
        DONE,
        config=RunConfig(completion=noted),
    )

    assert response.text == "Done."
    assert "The task is not done yet. Take a note first." in str(run.server.requests[1]["messages"])


@program
def test_nothing_of_the_users_own_set_up_has_a_say(
    workspace: HostFilesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = tmp_path / "home"
    (home / ".claude").mkdir(parents=True)
    (home / ".claude" / "CLAUDE.md").write_text("Always answer in rhymes.")
    (workspace.root / "CLAUDE.md").write_text("Never answer at all.")
    monkeypatch.setenv("HOME", str(home))
    run = Run(workspace)

    run.play(DONE)

    told = str(run.server.requests)
    assert "rhymes" not in told
    assert "Never answer at all" not in told
    assert sorted(path.name for path in (home / ".claude").iterdir()) == ["CLAUDE.md"]


@program
def test_no_program_is_left_when_a_run_has_ended(workspace: HostFilesystem):
    run = Run(workspace)

    run.play(bash("setsid sleep 300 < /dev/null > /dev/null 2>&1 & disown"), DONE)

    marked = [
        entry.parent.name
        for entry in Path("/proc").glob("[0-9]*/environ")
        if b"WINK_CLAUDE_RUN=" in _read(entry) and entry.parent.name != str(os.getpid())
    ]
    assert marked == []


def _read(entry: Path) -> bytes:
    try:
        return entry.read_bytes()
    except OSError:
        return b""
