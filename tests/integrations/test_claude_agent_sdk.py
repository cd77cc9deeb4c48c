"""The Claude Agent SDK with its real program, against a server on loopback."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cases import (
    Answer,
    Case,
    Driver,
    Job,
    Outcome,
    Stage,
    all_cases,
    require,
    run_on_loop,
    until,
)

from messages_server import MessagesServer, serving

sdk = require("claude_agent_sdk")

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage  # noqa: E402

from weakincentives import ToolContext, tool  # noqa: E402
from weakincentives.adapters import ModelTurn  # noqa: E402
from weakincentives.call import ToolCall  # noqa: E402
from weakincentives.errors import PolicyDenied  # noqa: E402
from weakincentives.integrations.claude import query  # noqa: E402
from weakincentives.prompt import (  # noqa: E402
    Approval,
    PolicyDecision,
    ReadBeforeWritePolicy,
)

if not os.environ.get("WINK_INTEGRATION"):
    pytestmark = pytest.mark.heavy  # each test starts the program


def options(server: MessagesServer, home: Path, **more: Any) -> ClaudeAgentOptions:
    """Return options of a program that asks this server, and knows nothing of the user."""
    settings: dict[str, Any] = {
        "model": "claude-sonnet-5",
        "setting_sources": [],
        "permission_mode": "bypassPermissions",
        "stderr": lambda line: None,
        **more,
    }
    env = {
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "IS_SANDBOX": "1",  # or it refuses to bypass permissions as root
        **server.environment,
        **settings.pop("env", {}),
    }
    return ClaudeAgentOptions(env=env, **settings)


def text_of(block: Mapping[str, Any]) -> str:
    content = block["content"]
    return content if isinstance(content, str) else content[0]["text"]


# The cases of all frameworks


class ClaudeSDK(Driver):
    """Lets the program defer calls that need approval, and resumes it with the answers."""

    name = "claude-agent-sdk"
    limits: ClassVar = {
        "all_argument_errors_come_at_once": (
            "the program makes a number of a string of digits where the schema wants one; all "
            "other errors come at once"
        ),
        "an_own_tool_that_pauses_the_agent_is_suspended": (
            "a tool cannot pause the agent: the SDK turns every exception of it into an answer"
        ),
        "cancelling_one_call_leaves_the_others": (
            "the SDK cannot cancel one call: it interrupts the turn, or the query is cancelled"
        ),
    }

    def run(self, job: Job) -> Outcome:
        return self._played(job, None)

    def resume(self, job: Job, state: Any) -> Outcome:
        return self._played(job, state)

    def _played(self, job: Job, session: str | None) -> Outcome:
        done = Outcome()
        names = {f.__name__: f"mcp__own__{f.__name__}" for f in job.own}
        turns = [_turn(turn, names) for turn in job.turns]
        with serving(turns, keeps_calls=True) as server:
            try:
                run_on_loop(_play(job, session, server, done), job.cancel_when)
            except (Exception, asyncio.CancelledError) as error:
                done.error = error
        done.answers = {each["tool_use_id"]: text_of(each) for each in server.tool_results()}
        for each in server.requests[0]["tools"]:
            shown = {"description": each["description"], "schema": each["input_schema"]}
            done.tools[each["name"].rpartition("__")[2]] = shown
        return done


def _turn(turn: Any, names: Mapping[str, str]) -> ModelTurn:
    if isinstance(turn, str):
        return ModelTurn(text=turn)
    made = [
        ToolCall(names.get(ask.tool, f"mcp__wink__{ask.tool}"), ask.arguments, ask.id)
        for ask in turn
    ]
    return ModelTurn(tool_calls=tuple(made), stop_reason="tool_use")


async def _play(job: Job, session: str | None, server: MessagesServer, done: Outcome) -> None:
    home = job.workspace.parent / "home"
    home.mkdir(exist_ok=True)
    own = sdk.create_sdk_mcp_server("own", tools=[_as_sdk_tool(each) for each in job.own])
    given = options(server, home, tools=[], mcp_servers={"own": own} if job.own else {})
    approvals: dict[str, Approval] = {}
    if session is not None:
        approvals = {name: _approval(answer) for name, answer in job.answers.items()}
    while True:
        ended = None
        async for message in query(
            "Do it." if session is None else None,
            replace(given, resume=session),
            workspace=job.workspace,
            policies=job.policies,
            tools=job.tools,
            run=job.run or None,
            approvals=approvals,
        ):
            ended = message if isinstance(message, ResultMessage) else ended
        assert ended is not None
        session, deferred = ended.session_id, ended.deferred_tool_use
        if deferred is None:
            done.text = ended.result or ""
            return
        done.questions[deferred.id] = json.dumps(deferred.input)
        if deferred.id not in job.answers:
            done.state = session
            return
        approvals = {deferred.id: _approval(job.answers[deferred.id])}


def _approval(answer: Answer) -> Approval:
    answer = answer.given()
    return Approval(answer.approved, answer.by, answer.reason, answer.arguments)


def _as_sdk_tool(function: Callable[..., Any]) -> Any:
    types = {
        name: each.annotation
        for name, each in inspect.signature(function, eval_str=True).parameters.items()
    }

    async def run(arguments: dict[str, Any]) -> dict[str, Any]:
        value = function(**arguments)
        text = str(await value if inspect.isawaitable(value) else value)
        return {"content": [{"type": "text", "text": text}]}

    return sdk.tool(function.__name__, inspect.getdoc(function), types)(run)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(ClaudeSDK, tmp_path)


# The program's own tools


class Play:
    """A project, and what the program does to it."""

    def __init__(self, place: Path) -> None:
        self.root, self.home = place / "project", place / "home"
        self.root.mkdir()
        self.home.mkdir()
        for name in "abc":
            (self.root / f"{name}.txt").write_text(f"{name} as it was\n")
        self.server: MessagesServer
        self.messages: list[Any] = []
        self._wink = Stage(ClaudeSDK, self.root)
        self.wink = self._wink.wink

    def __call__(self, *turns: ModelTurn, **more: Any) -> list[Any]:
        """Let the model say this; returns all messages."""

        async def play() -> None:
            async for message in self.query(**more):
                self.messages.append(message)

        with self.serving(*turns):
            asyncio.run(play())
        return self.messages

    @contextmanager
    def serving(self, *turns: ModelTurn) -> Iterator[MessagesServer]:
        with serving([*turns, *[DONE] * 3], keeps_calls=True) as self.server:
            yield self.server

    def query(self, prompt: Any = "Do it.", **more: Any) -> AsyncGenerator[Any, None]:
        ours = ("policies", "tools", "run", "approvals")
        given = {name: more.pop(name) for name in ours if name in more}
        more["tools"] = more.pop("native", ["Bash", "Read", "Write"])
        return query(prompt, self.options(**more), workspace=self.root, **given)

    def options(self, **more: Any) -> ClaudeAgentOptions:
        return options(self.server, self.home, **more)

    def tree(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(self.root.glob("*.txt"))}

    def told(self) -> str:
        """Return all that the model was told last."""
        return json.dumps(self.server.requests[-1]["messages"])

    def answers(self) -> list[str]:
        return [text_of(each) for each in self.server.tool_results()]

    def records(self) -> list[tuple[str, str]]:
        return [(each["tool"], each["outcome"]) for each in self._wink.records()]

    def details(self) -> list[dict[str, Any]]:
        return self._wink.records()


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


AS_IT_WAS = {f"{name}.txt": f"{name} as it was\n" for name in "abc"}
DONE = ModelTurn(text="Done.")
_numbers = itertools.count()


def uses(*wanted: tuple[str, dict[str, Any]]) -> ModelTurn:
    """Return a turn that uses tools."""
    made = [ToolCall(name, given, f"toolu_{next(_numbers)}") for name, given in wanted]
    return ModelTurn(tool_calls=tuple(made), stop_reason="tool_use")


def bash(command: str) -> tuple[str, dict[str, Any]]:
    return ("Bash", {"command": command, "description": "Run it"})


def write(play: Play, name: str, text: str) -> tuple[str, dict[str, Any]]:
    return ("Write", {"file_path": str(play.root / name), "content": text})


@tool(reach="reversible")
def note(text: str, *, context: ToolContext) -> str:
    """Take a note.

    Args:
        text: What to note.
    """
    context.filesystem.append("notes.txt", f"{text}\n")
    return f"noted {text}"


class Rule:
    """A policy out of two functions."""

    name = "rule"

    def __init__(self, before: Callable[[Any], str | None], after: Any = None) -> None:
        self._before, self._after = before, after

    def check(self, tool: Any, params: Any, *, context: Any) -> PolicyDecision:
        reason = self._before(params)
        return PolicyDecision.allow() if reason is None else PolicyDecision.deny(reason)

    def on_result(self, tool: Any, params: Any, result: Any, *, context: Any) -> None:
        if self._after is not None:
            self._after()


def never(params: Any) -> str | None:
    return "not today"


def test_the_programs_changes_are_committed_and_can_be_undone(play: Play):
    play(uses(bash("echo one > a.txt; rm b.txt")), uses(write(play, "d.txt", "four\n")))

    assert play.tree() == {
        "a.txt": "one\n", "c.txt": "c as it was\n", "d.txt": "four\n"
    }  # fmt: skip
    assert play.records() == [("bash", "committed"), ("write", "committed")]
    bashed, written = play.details()
    assert {each["path"] for each in bashed["files"]} == {"a.txt", "b.txt"}
    assert [each["path"] for each in written["files"]] == ["d.txt"]
    play.wink("undo")
    assert play.tree() == AS_IT_WAS


def test_a_command_that_fails_leaves_all_files_as_they_were(play: Play):
    """What it left running can write no more, either."""
    command = "echo new > a.txt; rm b.txt; (sleep 1; echo late > c.txt) & exit 3"

    play(uses(bash(command)), uses(bash("sleep 2")))

    assert play.tree() == AS_IT_WAS
    assert play.records() == [("bash", "rolled back"), ("bash", "ok")]
    assert "It failed. Rolled back: session, Filesystem." in play.told()


def test_a_policy_denies_before_the_program_runs_its_tool(play: Play):
    play(uses(write(play, "a.txt", "new\n"), bash("rm a.txt")), policies=[Rule(never)])

    assert play.tree() == AS_IT_WAS
    assert play.records() == [("write", "denied"), ("bash", "denied")]
    assert all("not today" in answer for answer in play.answers())
    assert "created" not in play.told()
    assert "updated" not in play.told()


def test_a_success_that_is_rolled_back_is_reported_as_far_as_the_program_lets_us(play: Play):
    def veto() -> None:
        raise PolicyDenied("two files must stay", policy="rule")

    play(
        uses(bash("echo new > a.txt"), write(play, "b.txt", "new\n")),
        policies=[Rule(lambda params: None, veto)],
    )

    assert play.tree() == AS_IT_WAS
    assert play.records() == [("bash", "denied"), ("write", "denied")]
    said, _ = play.answers()
    assert said.startswith("Rolled back: two files must stay")
    # The words of Write stay; the reason comes with them.
    assert play.told().count("Rolled back: two files must stay") == 2


def test_paths_are_the_workspaces_and_none_is_outside(play: Play, tmp_path: Path):
    reads_first = ReadBeforeWritePolicy(
        read_tools=frozenset({"read"}), write_tools=frozenset({"write"})
    )
    (play.root / "link.txt").symlink_to("a.txt")

    play(
        uses(write(play, "link.txt", "unread\n")),
        uses(("Read", {"file_path": str(play.root / "a.txt")})),
        uses(write(play, "a.txt", "read\n")),
        policies=[reads_first],
    )
    play(uses(write(play, "../out.txt", "out\n")))

    assert (play.root / "a.txt").read_text() == "read\n"
    assert not (tmp_path / "out.txt").exists()
    outcomes = [("write", "denied"), ("read", "ok"), ("write", "committed")]
    assert play.records() == [*outcomes, ("write", "rolled back")]
    assert "is outside of the workspace" in play.answers()[0]


def test_all_tools_of_a_turn_run_one_at_a_time_and_none_waits_for_ever(play: Play):
    """The program asks about those that only read at once, and about the others in order."""
    reads = [("Read", {"file_path": str(play.root / f"{name}.txt")}) for name in "abc"]

    play(
        uses(
            bash("sleep 0.2; echo 1 >> a.txt"),
            *(bash(f"cat {name}.txt") for name in "abc"),
            *reads,
            ("mcp__wink__note", {"text": "first"}),
            bash("cat notes.txt > seen.txt"),
            bash("echo 2 >> a.txt; exit 1"),
            ("mcp__wink__note", {"text": "second"}),
            write(play, "d.txt", "four\n"),
            ("Grep", {"pattern": "four", "path": str(play.root)}),
            ("Nowhere", {}),
        ),
        tools=[note],
        native=["Bash", "Grep", "Read", "Write"],
    )

    assert play.tree()["a.txt"] == "a as it was\n1\n"
    assert play.tree()["seen.txt"] == "first\n"
    assert play.tree()["notes.txt"] == "first\nsecond\n"
    assert len(play.answers()) == 14
    by_tool = Counter(play.records())
    assert by_tool == {
        ("bash", "committed"): 2,
        ("bash", "ok"): 3,
        ("bash", "rolled back"): 1,
        ("grep", "ok"): 1,
        ("note", "committed"): 2,
        ("read", "ok"): 3,
        ("write", "committed"): 1,
    }


def test_what_the_programs_own_rules_refuse_is_on_record_and_holds_nothing_up(play: Play):
    """Nobody is told of it but by the message, which is read even if nobody waits for one."""

    async def scenario() -> None:
        messages = play.query(permission_mode="default", tools=[note], disallowed_tools=["Edit"])
        await anext(messages)  # and then nobody reads
        await until(lambda: (play.root / "notes.txt").exists())
        async for message in messages:
            play.messages.append(message)

    turn = uses(bash("rm a.txt"), write(play, "b.txt", "new\n"), ("mcp__wink__note", {"text": "x"}))
    with play.serving(turn):
        asyncio.run(scenario())

    assert play.tree() == {**AS_IT_WAS, "notes.txt": "x\n"}
    assert play.records() == [
        ("bash", "rolled back"), ("write", "rolled back"), ("note", "committed")
    ]  # fmt: skip
    assert "haven't granted it yet" in play.details()[1]["result"]
