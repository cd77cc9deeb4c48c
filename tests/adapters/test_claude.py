"""The Claude Agent SDK with its real program, against a server on loopback."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_same_text import TURN, scripted_texts
from test_same_text import run as run_same_text

import weakincentives as wink
from messages_server import MessagesServer, serving
from weakincentives.adapters import (
    ClaudeAgentSDKAdapter,
    Message,
    ModelTurn,
    RunConfig,
    calls,
)
from weakincentives.core.budget import TokenUsage
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import (
    BudgetExceededError,
    CallLimitExceeded,
    DeadlineExceededError,
    MissingExtra,
    PromptEvaluationError,
    PromptValidationError,
    ProviderUnavailable,
)
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.prompt import (
    Approval,
    ApprovalPolicy,
    Custom,
    EveryCalls,
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    SectionVisibility,
    Tool,
    if_offered,
)
from weakincentives.retry import RetryPolicies
from weakincentives.runtime import Session, ToolInvoked
from weakincentives.testing import FakeClock

program = pytest.mark.heavy
OURS = {"WINK_TESTS": uuid.uuid4().hex}
"""A variable by which the programs of these tests are known: others may run beside them."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "claude_agent.py"
PLAIN = Prompt(PromptTemplate(sections=[MarkdownSection(title="T", template="t")]))


@pytest.fixture(autouse=True)
def _sdk(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("heavy"):
        pytest.importorskip("claude_agent_sdk", reason="claude-agent-sdk is not installed")


def test_without_the_sdk_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "claude_agent_sdk", None)

    with pytest.raises(MissingExtra, match=r"pip install .*\[claude-agent-sdk\]"):
        ClaudeAgentSDKAdapter().evaluate(PLAIN, Session())


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

    def play(self, *turns: ModelTurn, adapter: Any = None, **options: Any) -> Any:
        with serving(turns) as self.server:
            model = ClaudeAgentSDKAdapter(
                model="claude-sonnet-5",
                native_tools=["Read", "Write", "Edit", "Bash"],
                env={**self.server.environment, **OURS},
                **(adapter or {}),
            )
            return model.evaluate(self.prompt, self.session, **options)

    def answers(self) -> list[str]:
        return [text_of(block) for block in self.server.tool_results()]

    def tree(self) -> dict[str, tuple[str, float]]:
        return {
            path.name: (path.read_text(), path.stat().st_mtime)
            for path in sorted(self.files.root.iterdir())
        }


def text_of(block: dict[str, Any]) -> str:
    content = block["content"]
    return content if isinstance(content, str) else content[0]["text"]


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
        read_tools=frozenset(map(if_offered, ["read"])),
        write_tools=frozenset(map(if_offered, ["write", "edit"])),
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
def test_a_native_call_whose_arguments_a_person_edits_does_not_run(workspace: HostFilesystem):
    """The program would run it with the arguments that nobody approved."""

    def ask(request: Any) -> Approval:
        return Approval(True, arguments={**request.arguments, "content": "edited\n"})

    run = Run(workspace, policies=[ApprovalPolicy(ask=ask, tools={if_offered("write")})])
    before = run.tree()

    run.play(write(workspace, "a.txt", "as the model wrote it\n"), DONE)

    assert run.tree() == before
    assert "cannot be edited" in run.answers()[0]


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
    """However long the program takes to start: the time runs out while the command does."""
    clock = FakeClock()

    class AlmostLate:
        name = "almost_late"

        def check(self, tool: Any, params: Any, *, context: wink.ToolContext) -> PolicyDecision:
            clock.advance(592)
            return PolicyDecision.allow()

    run = Run(workspace, policies=[AlmostLate()])
    before = run.tree()
    command = "echo new > a.txt; (sleep 2; echo late > b.txt) & sleep 600"

    with pytest.raises(DeadlineExceededError, match="while tool 'bash' ran"):
        run.play(bash(command), DONE, deadline=Deadline.after(600, clock=clock))

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
        while marker.read_text() != "new\n" and not task.done():
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving([bash("echo new > a.txt; sleep 600"), DONE]) as server:
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
def test_failures_of_our_tools_read_as_through_every_adapter():
    """All but those that the program itself refuses: they do not reach the server of our tools."""
    with serving([TURN, DONE]) as server:
        run_same_text(ClaudeAgentSDKAdapter(model="claude-sonnet-5", env=server.environment))

    # The ids end with a number.
    came = sorted(server.tool_results(), key=lambda b: (len(b["tool_use_id"]), b["tool_use_id"]))
    pairs = zip(TURN.tool_calls, map(text_of, came), scripted_texts(), strict=True)
    named = re.compile(r"call_id=\"\w+\"")  # the program has ids of its own
    different = [c.id for c, *texts in pairs if len({named.sub("", each) for each in texts}) > 1]
    assert different == ["not-json", "unknown-tool"]


@program
def test_a_long_result_is_cut_and_the_program_can_call_the_tool_that_reads_the_rest(
    workspace: HostFilesystem,
):
    @wink.tool(reach="read", max_result_chars=500)
    def print_all() -> str:
        """Print more than is shown at once."""
        return "\n".join(f"line {n}" for n in range(500))

    run = Run(workspace, sections=[MarkdownSection(title="Print", tools=[print_all])])

    run.play(calls("print_all"), calls(("read_result", {"call_id": "never"})), DONE)

    first, second = run.answers()
    assert first.startswith("line 0\nline 1\n")
    assert "more characters: read_result(call_id=" in first
    assert len(first) < 600
    assert second.startswith("There is no result of a call 'never'")


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

    assert processes() == []


def processes() -> list[int]:
    """Return the processes of programs that these tests have started."""
    mark = "=".join(*OURS.items()).encode()
    return [
        int(entry.parent.name)
        for entry in Path("/proc").glob("[0-9]*/environ")
        if mark in _read(entry)
    ]


def _read(entry: Path) -> bytes:
    try:
        return entry.read_bytes()
    except OSError:
        return b""


# When something goes wrong, or comes at the same time


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made, and nothing may be left."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


ONCE = RunConfig(retry=RetryPolicies.NONE)


@program
def test_a_program_that_is_missing_is_a_provider_that_is_not_there(temporary: Path):
    adapter = ClaudeAgentSDKAdapter(cli_path=temporary.parent / "nowhere")

    with pytest.raises(ProviderUnavailable, match="the Claude program did not start"):
        adapter.evaluate(PLAIN, Session(), config=ONCE)

    assert list(temporary.iterdir()) == []


@program
def test_a_deadline_while_the_program_starts_leaves_nothing_of_it(temporary: Path):
    sleeper = temporary.parent / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)

    with pytest.raises(DeadlineExceededError):
        ClaudeAgentSDKAdapter(cli_path=sleeper, env=OURS).evaluate(
            PLAIN, Session(), deadline=Deadline.after(1)
        )

    assert processes() == []
    assert list(temporary.iterdir()) == []


@program
@pytest.mark.parametrize("again", [False, True])
def test_a_program_that_is_killed_in_a_tool_of_its_own_leaves_nothing_of_that_tool(
    workspace: HostFilesystem, temporary: Path, again: bool
):
    """Asked again, a new program goes on: it is told what the old one was."""
    run = Run(workspace)
    before, marker = run.tree(), workspace.root / "a.txt"
    command = "echo new > a.txt; (sleep 1; echo late > b.txt) & sleep 600"

    def kill() -> None:
        while marker.read_text() != "new\n":
            time.sleep(0.05)
        for process in processes():
            if b"stream-json" in _read(Path(f"/proc/{process}/cmdline")):
                os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        if again:
            assert run.play(bash(command), DONE).text == "Done."
            assert "exited before the tool ended" in str(run.server.requests[-1]["messages"])
        else:
            with pytest.raises(ProviderUnavailable):
                run.play(bash(command), DONE, config=ONCE)
    finally:
        marker.write_text("new\n")
        killer.join()
        marker.write_text(before["a.txt"][0])
        os.utime(marker, (before["a.txt"][1],) * 2)

    time.sleep(1.5)  # what was left behind would write by now
    assert run.tree() == before
    assert [record.success for record in run.session[ToolInvoked]] == [False]
    assert list(temporary.iterdir()) == []


@program
@pytest.mark.filterwarnings("error")
def test_runs_of_one_adapter_at_the_same_time_do_not_meet(temporary: Path):
    async def scenario(adapter: ClaudeAgentSDKAdapter) -> list[str]:
        runs = [adapter.aevaluate(PLAIN, Session(), message=f"Say {n}.") for n in range(3)]
        return [response.text for response in await asyncio.gather(*runs)]

    with serving([ModelTurn(text="Done.")] * 3) as server:
        adapter = ClaudeAgentSDKAdapter(env=server.environment)
        assert asyncio.run(scenario(adapter), debug=True) == ["Done."] * 3

    asked = sorted(n for n in range(3) if f"Say {n}." in str(server.requests))
    assert asked == [0, 1, 2]
    assert list(temporary.iterdir()) == []


@program
def test_a_sync_run_inside_of_a_running_loop(workspace: HostFilesystem):
    run = Run(workspace)

    async def scenario() -> str:
        return run.play(write(workspace, "a.txt", "new\n"), DONE).text

    assert asyncio.run(scenario()) == "Done."
    assert (workspace.root / "a.txt").read_text() == "new\n"


@program
def test_several_native_tools_and_an_unknown_one_in_one_turn(workspace: HostFilesystem):
    run = Run(workspace)
    reads = [("read", {"file_path": str(workspace.root / f"{name}.txt")}) for name in "abc"]

    response = run.play(
        calls(*reads, "nowhere", ("bash", {"command": "echo ü > d.txt", "description": "x"})), DONE
    )

    assert response.text == "Done."
    assert [(r.tool_name, r.success) for r in run.session[ToolInvoked]] == [
        *(("read", True),) * 3,
        ("nowhere", False),
        ("bash", True),
    ]
    told = "\n".join(run.answers())
    assert [f"{name}.txt as it was" in told for name in "abc"] == [True] * 3, told
    assert (workspace.root / "d.txt").read_text() == "ü\n"


@program
def test_much_text_of_every_kind_comes_through(workspace: HostFilesystem):
    @wink.tool(reach="read", max_result_chars=None)
    def tell() -> str:
        """Tell a lot."""
        return text

    text = "naïve 🦊 \u2028 「」\n" * 25_000
    run = Run(workspace, sections=[MarkdownSection(title="Telling", tools=[tell])])

    response = run.play(calls("tell"), ModelTurn(text=text))

    assert response.text == text
    assert run.answers() == [text]


# What is refused


@pytest.mark.parametrize("name", ["Agent", "Task"])
def test_tools_that_start_agents_of_the_program_are_refused(name: str):
    with pytest.raises(ValueError, match="whose calls do not reach the pipeline"):
        ClaudeAgentSDKAdapter(native_tools=["Read", name])


@program
@pytest.mark.parametrize("resources", [{}, {Filesystem: MemoryFilesystem()}])
def test_native_tools_that_write_need_a_workspace_on_disk(
    resources: Any, temporary: Path, tmp_path: Path
):
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="T")], resources=resources))

    with pytest.raises(PromptEvaluationError, match="bind a HostFilesystem"):
        ClaudeAgentSDKAdapter(native_tools=["Read", "Bash"]).evaluate(prompt, Session())
    with pytest.raises(PromptEvaluationError, match="bind a HostFilesystem"):
        ClaudeAgentSDKAdapter(native_tools=["Bash"], cwd=tmp_path).evaluate(prompt, Session())

    assert list(temporary.iterdir()) == []


@program
def test_a_native_tool_and_one_of_ours_cannot_have_the_same_name(workspace: HostFilesystem):
    @wink.tool(reach="read")
    def read(path: str) -> str:
        """Read a file."""
        return path

    run = Run(workspace, sections=[MarkdownSection(title="Reading", tools=[read])])

    with pytest.raises(PromptValidationError, match="rename one"):
        run.play(DONE)


@program
def test_a_native_tool_writes_nothing_outside_of_the_workspace(
    workspace: HostFilesystem, tmp_path: Path
):
    (workspace.root / "out").symlink_to(tmp_path)
    run = Run(workspace)

    run.play(
        write(workspace, "../one.txt", "new\n"),
        write(workspace, str(tmp_path / "two.txt"), "new\n"),
        write(workspace, "out/three.txt", "new\n"),
        DONE,
    )

    assert [path.name for path in tmp_path.glob("*.txt")] == []
    assert [r.success for r in run.session[ToolInvoked]] == [False, False, False]
    assert ["is outside of the workspace" in answer for answer in run.answers()] == [True] * 3


@program
@pytest.mark.parametrize("path", ["a.txt", "./a.txt", "link.txt", "{root}/x/../a.txt"])
def test_policies_know_a_file_by_whatever_path_it_is_given(workspace: HostFilesystem, path: str):
    reads_first = ReadBeforeWritePolicy(
        read_tools=frozenset(map(if_offered, ["read"])),
        write_tools=frozenset(map(if_offered, ["write"])),
    )
    (workspace.root / "link.txt").symlink_to("a.txt")
    run = Run(workspace, policies=[reads_first])
    place = path.format(root=workspace.root)

    run.play(calls(("write", {"file_path": place, "content": "unread\n"})), DONE)

    assert (workspace.root / "a.txt").read_text() == "a.txt as it was\n"
    assert not run.session[ToolInvoked].latest().success


@program
def test_a_native_call_that_was_left_open_is_answered_when_the_run_goes_on(
    workspace: HostFilesystem,
):
    run = Run(workspace)
    with pytest.raises(CallLimitExceeded):
        run.play(
            calls(("note", {"text": "x"}), ("bash", {"command": "touch d.txt"})),
            config=RunConfig(max_tool_calls=1),
        )

    assert run.play(DONE, resume=True).text == "Done."

    assert not (workspace.root / "d.txt").exists()
    assert "does not wait for this call" in str(run.server.requests[0]["messages"])


@program
def test_a_prompt_that_changes_is_told_with_the_next_words(workspace: HostFilesystem):
    done: list[int] = []

    def enabled(*, session: Session) -> bool:
        return bool(done)

    def check(context: Any) -> bool:
        done.append(1)
        return len(done) > 1

    late = MarkdownSection(title="Late", template="Mind the gap.", enabled=enabled)
    run = Run(workspace, sections=[MarkdownSection(title="Notes", tools=[note]), late])

    run.play(ModelTurn(text="One."), DONE, config=RunConfig(completion=Custom(check, "Not yet.")))

    first, second = (str(request) for request in run.server.requests)
    assert "Mind the gap." not in first
    assert "Mind the gap." in second


@program
def test_a_model_that_was_cut_off_is_asked_by_the_program_to_go_on(workspace: HostFilesystem):
    """Then it is not told our words as well, and later ones are not late by one."""
    seen: list[int] = []

    def check(context: Any) -> bool:
        seen.append(1)
        return len(seen) > 2

    run = Run(workspace)
    cut = ModelTurn(text="It is", stop_reason="max_tokens")

    response = run.play(
        cut,
        ModelTurn(text="it."),
        DONE,
        config=RunConfig(completion=Custom(check, "Not yet.")),
        deadline=Deadline.after(600),
    )

    assert response.text == "Done."
    told = [str(request["messages"]).count("Stop hook feedback") for request in run.server.requests]
    assert told == [0, 0, 1]


@program
@pytest.mark.parametrize("mode", ["default", "acceptEdits", "dontAsk", "auto"])
def test_the_pipeline_decides_in_every_permission_mode(workspace: HostFilesystem, mode: Any):
    run = Run(workspace)
    turns = [write(workspace, "a.txt", "new\n"), bash("cp a.txt b.txt"), DONE]

    run.play(*turns, adapter={"permission_mode": mode}, deadline=Deadline.after(600))

    assert [r.success for r in run.session[ToolInvoked]] == [True, True]
    assert (workspace.root / "b.txt").read_text() == "new\n"


@program
def test_the_example_runs_as_a_user_would_run_it(workspace: HostFilesystem, tmp_path: Path):
    place = tmp_path / "docs"
    place.mkdir()
    (place / "a.md").write_text("Teh first.\n")
    edit = {"file_path": str(place / "a.md"), "old_string": "Teh", "new_string": "The"}
    turns = [
        calls(("edit", edit)),
        calls(("read", {"file_path": str(place / "a.md")})),
        calls(("edit", edit)),
        ModelTurn(text="One word was wrong."),
    ]

    with serving(turns) as server:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), str(place)],
            env={**os.environ, **server.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )

    assert (place / "a.md").read_text() == "The first.\n"
    assert "[--] edit: Cannot write to a.md without reading it first" in done.stdout
    assert done.stdout.endswith("One word was wrong.\n\nChanged: a.md (4 turns)\n")


@program
def test_policies_know_paths_from_the_workspace_wherever_the_program_works(
    workspace: HostFilesystem,
):
    inner = workspace.root / "inner"
    inner.mkdir()
    run = Run(workspace)

    run.play(
        calls(("write", {"file_path": "one.txt", "content": "1"})),
        write(workspace, "two.txt", "2"),
        DONE,
        adapter={"cwd": inner},
    )

    assert [r.params["path"] for r in run.session[ToolInvoked]] == ["inner/one.txt", "two.txt"]
    assert (inner / "one.txt").read_text() == "1"


@program
def test_what_a_run_may_cost_ends_it(workspace: HostFilesystem):
    run = Run(workspace)
    much = TokenUsage(input_tokens=1_000_000, output_tokens=1_000_000)

    with pytest.raises(BudgetExceededError, match="dollars"):
        run.play(
            *(calls(("note", {"text": "x"}), usage=much) for _ in range(5)),
            adapter={"max_budget_usd": 1.0},
            deadline=Deadline.after(600),
        )


class Reminds:
    name = "reminds"
    trigger = EveryCalls(1)

    def feedback(self, context: Any) -> str:
        return "Mind the time."


@program
@pytest.mark.parametrize("command", ["true", "false"])
def test_feedback_reaches_the_model_also_after_a_native_tool(
    workspace: HostFilesystem, command: str
):
    run = Run(workspace)
    turn = calls(
        ("bash", {"command": "true", "description": "First"}),
        ("note", {"text": "x"}),
        ("bash", {"command": command, "description": "Last"}),
    )

    run.play(turn, DONE, config=RunConfig(feedback=[Reminds()]))

    assert "Mind the time." in str(run.server.requests[-1]["messages"])


@program
def test_feedback_reaches_the_model_after_a_denied_native_tool(workspace: HostFilesystem):
    reads_first = ReadBeforeWritePolicy(
        read_tools=frozenset(map(if_offered, ["read"])),
        write_tools=frozenset(map(if_offered, ["write"])),
    )
    run = Run(workspace, policies=[reads_first])

    run.play(write(workspace, "a.txt", "x"), DONE, config=RunConfig(feedback=[Reminds()]))

    (answer,) = run.answers()
    assert "without reading it first\n\nMind the time." in answer


@program
def test_a_section_that_is_opened_before_a_native_tool_is_told(workspace: HostFilesystem):
    secret = MarkdownSection(
        title="Secret",
        key="secret",
        template="The word is xyzzy.",
        summary="There is a word.",
        visibility=SectionVisibility.SUMMARY,
    )
    run = Run(workspace, sections=[MarkdownSection(title="Notes", tools=[note]), secret])
    opened = ("open_sections", {"section_keys": ["secret"], "reason": "need"})

    run.play(calls(opened, ("bash", {"command": "true", "description": "Go"})), DONE)

    assert "The word is xyzzy." in str(run.server.requests[-1]["messages"])
