"""The Claude Agent SDK with its real program, against a server on loopback."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cases import (
    PATIENCE,
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

from claude_agent_sdk import (  # noqa: E402
    AssistantMessage,
    ClaudeAgentOptions,
    HookMatcher,
    PermissionResultAllow,
    PermissionResultDeny,
    ProcessError,
    ResultMessage,
)

from weakincentives import ToolContext, tool  # noqa: E402
from weakincentives.adapters import ModelTurn  # noqa: E402
from weakincentives.core.call import ToolCall  # noqa: E402
from weakincentives.errors import PolicyDenied, install_command  # noqa: E402
from weakincentives.integrations import Bridge  # noqa: E402
from weakincentives.integrations.claude import WinkClient, query  # noqa: E402
from weakincentives.prompt import (  # noqa: E402
    Approval,
    ApprovalPolicy,
    MarkdownSection,
    PolicyDecision,
    QuotaPolicy,
    ReadBeforeWritePolicy,
)
from weakincentives.runtime import (  # noqa: E402
    Session,
    ToolInvoked,
    ToolRegistry,
    open_run,
)

if not os.environ.get("WINK_INTEGRATION"):
    # Each test starts the program, which takes minutes: not twice in a run of CI.
    pytestmark = pytest.mark.skip(reason="run `make integrations`")


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
        ours = ("policies", "tools", "run", "approvals", "reaches", "title", "workspace")
        ours = (*ours, "registry", "sections", "resources", "session")
        given = {name: more.pop(name) for name in ours if name in more}
        more["tools"] = more.pop("native", ["Bash", "Read", "Write"])
        if "registry" not in given:
            given.setdefault("workspace", self.root)
        return query(prompt, self.options(**more), **given)

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


def test_a_command_cannot_go_on_in_the_background(play: Play):
    name, given = bash("sleep 1; echo late > a.txt")

    play(uses((name, {**given, "run_in_background": True})))

    assert play.tree() == AS_IT_WAS
    assert "unexpected parameter" in play.answers()[0]


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


# Approval


class Person:
    """Answers questions, and remembers them."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any], Any]] = []

    async def __call__(self, name: str, given: dict[str, Any], context: Any) -> Any:
        self.asked.append((name, given, context))
        return self._answers.pop(0)


YES = PermissionResultAllow()


def test_a_question_of_the_programs_own_rules_is_answered_once_and_on_record(play: Play):
    person = Person(
        PermissionResultDeny(message="leave it alone"),
        PermissionResultAllow(updated_input=bash("echo better > b.txt")[1]),
        YES,
    )

    play(
        uses(bash("rm a.txt"), bash("echo new > b.txt"), bash("echo new > c.txt")),
        permission_mode="default",
        can_use_tool=person,
    )

    assert len(person.asked) == 3
    assert play.tree() == {**AS_IT_WAS, "b.txt": "better\n", "c.txt": "new\n"}
    assert [each for each in play.records() if each[1] != "suspended"] == [
        ("bash", "denied"), ("bash", "committed"), ("bash", "committed")
    ]  # fmt: skip
    denied, *_, edited, _ = play.details()
    assert (denied["denied_by"], "leave it alone" in denied["result"]) == ("can_use_tool", True)
    assert edited["arguments"]["command"] == "echo better > b.txt"
    assert play.answers()[0] == "leave it alone"


def test_arguments_that_a_person_edits_are_under_all_policies(play: Play):
    person = Person(PermissionResultAllow(updated_input=bash("rm a.txt")[1]))
    no_rm = Rule(lambda params: "nothing is removed" if "rm" in params["command"] else None)

    play(
        uses(bash("echo new > a.txt")),
        permission_mode="default",
        can_use_tool=person,
        policies=[no_rm],
    )

    assert play.tree() == AS_IT_WAS
    assert play.records()[-1] == ("bash", "denied")
    assert "nothing is removed" in play.answers()[0]


@pytest.mark.parametrize("mode", ["bypassPermissions", "default", "dontAsk"])
@pytest.mark.filterwarnings("ignore::claude_agent_sdk.CanUseToolShadowedWarning")
def test_a_question_of_our_policies_is_asked_in_every_mode(play: Play, mode: Any):
    person = Person(
        PermissionResultDeny(message="leave it alone"),
        PermissionResultAllow(updated_input=bash("echo better > b.txt")[1]),
        YES,
        PermissionResultAllow(updated_input={"text": "better"}),
    )
    ask = ApprovalPolicy(tools={"bash", "note"})
    note_it = ("mcp__wink__note", {"text": "new"})

    play(
        uses(bash("rm a.txt"), bash("echo new > b.txt"), note_it, note_it),
        permission_mode=mode,
        can_use_tool=person,
        policies=[ask],
        tools=[note],
    )

    assert len(person.asked) == 4
    assert "$ rm a.txt" in person.asked[0][2].decision_reason
    assert play.tree() == {**AS_IT_WAS, "b.txt": "better\n", "notes.txt": "new\nbetter\n"}
    ended = [each for each in play.details() if each["outcome"] != "suspended"]
    assert [each["outcome"] for each in ended] == ["denied", *["committed"] * 3]
    assert "leave it alone" in ended[0]["result"]
    assert [each["notes"][0] for each in ended[1:]] == ["approval: approved by can_use_tool"] * 3
    assert ended[1]["arguments"]["command"] == "echo better > b.txt"
    assert ended[3]["arguments"] == {"text": "better"}


def test_a_denial_can_end_the_turn(play: Play):
    person = Person(PermissionResultDeny(message="stop it", interrupt=True))

    play(
        uses(bash("rm a.txt")),
        uses(bash("rm b.txt")),
        can_use_tool=person,
        permission_mode="default",
        policies=[ApprovalPolicy(tools={"bash"})],
    )

    assert play.tree() == AS_IT_WAS
    assert len(play.server.requests) == 1
    assert play.records()[-1] == ("bash", "denied")


def test_where_nobody_can_be_asked_a_call_is_deferred_and_resumed_with_the_answer(play: Play):
    more: Any = {"policies": [ApprovalPolicy(tools={"note"})], "tools": [note]}
    play(uses(("mcp__wink__note", {"text": "new"})), **more)
    (result,) = [each for each in play.messages if isinstance(each, ResultMessage)]
    deferred = result.deferred_tool_use
    assert play.tree() == AS_IT_WAS
    assert play.records() == [("note", "suspended")]

    yes = Approval(True, by="ann")
    play(prompt=None, resume=result.session_id, approvals={deferred.id: yes}, **more)

    assert play.tree()["notes.txt"] == "new\n"
    assert play.records() == [("note", "suspended"), ("note", "committed")]
    assert play.details()[-1]["notes"] == ["approval: approved by ann"]
    assert len(play.server.requests) == 1, "nothing more was said"


def test_a_native_tool_is_never_deferred(play: Play):
    """A resumed program would run it without asking anyone."""
    play(uses(bash("rm a.txt")), policies=[ApprovalPolicy(tools={"bash"})])

    assert play.tree() == AS_IT_WAS
    assert play.records() == [("bash", "suspended"), ("bash", "denied")]
    assert "nobody can be asked" in play.answers()[0]


# The user's own hooks and servers


def hook(event: str, **said: Any) -> Any:
    async def run(hook_input: Any, use_id: str | None, context: Any) -> Any:
        return {"hookSpecificOutput": {"hookEventName": event, **said}} if said else {}

    return run


def before(*hooks: Any) -> dict[Any, list[HookMatcher]]:
    return {"PreToolUse": [HookMatcher(matcher="Bash", hooks=list(hooks))]}


def test_a_hook_of_the_user_denies(play: Play):
    no = hook("PreToolUse", permissionDecision="deny", permissionDecisionReason="my rule")

    play(uses(bash("rm a.txt"), write(play, "b.txt", "new\n")), hooks=before(no))

    assert play.tree() == {**AS_IT_WAS, "b.txt": "new\n"}
    assert play.records() == [("bash", "denied"), ("write", "committed")]
    assert "my rule" in play.details()[0]["result"]
    assert "my rule" in play.answers()[0]


def test_what_a_hook_of_the_user_edits_is_the_call_and_under_all_policies(play: Play):
    edit = hook("PreToolUse", updatedInput=bash("echo edited > a.txt")[1])
    no_new = Rule(lambda params: "no!" if "new" in repr(params) else None)
    no_edits = Rule(lambda params: "nothing edited" if "edited" in repr(params) else None)

    play(uses(bash("echo first > a.txt")), hooks=before(edit), policies=[no_new])

    assert play.tree()["a.txt"] == "edited\n"
    assert play.records() == [("bash", "suspended"), ("bash", "committed")]
    assert play.details()[-1]["arguments"]["command"] == "echo edited > a.txt"

    play(uses(bash("echo second > a.txt")), hooks=before(edit), policies=[no_edits])

    assert play.tree()["a.txt"] == "edited\n"
    assert play.records()[-1] == ("bash", "denied")
    assert "nothing edited" in play.answers()[0]


@pytest.mark.parametrize(
    "said",
    [{"updatedInput": bash("echo edited > a.txt")[1]}, {"permissionDecision": "deny"}],
    ids=["edits", "denies"],
)
def test_the_time_limit_of_a_hook_is_not_that_of_the_call_it_is_about(play: Play, said: Any):
    """While another call is under way, the decision of the hook is not lost."""
    hooks = before(hook("PreToolUse", **said))
    hooks["PreToolUse"][0].timeout = 0.3

    async def scenario() -> None:
        with Bridge(play.root, tools=[note]) as other:
            async with other.begin("note", {"text": "x"}) as call:
                task = asyncio.create_task(_read(play, hooks=hooks))
                await until(lambda: play.server.requests)
                await asyncio.sleep(1.5)
                call.fail("never mind")
            await task

    with play.serving(uses(bash("echo new > a.txt"))):
        asyncio.run(scenario())

    assert play.tree() == {**AS_IT_WAS, **({"a.txt": "edited\n"} if "updatedInput" in said else {})}


def test_what_only_the_program_knows_to_be_edited_is_rolled_back(play: Play):
    """A hook in the project's settings is a command that the program runs."""
    said = {"hookEventName": "PreToolUse", "updatedInput": bash("echo edited > a.txt")[1]}
    command = f"echo '{json.dumps({'hookSpecificOutput': said})}'"
    settings = {"hooks": {"PreToolUse": [{"hooks": [{"type": "command", "command": command}]}]}}
    (play.root / ".claude").mkdir()
    (play.root / ".claude" / "settings.json").write_text(json.dumps(settings))

    play(uses(bash("echo new > a.txt")), setting_sources=["project"])

    assert play.tree() == AS_IT_WAS
    assert play.records() == [("bash", "rolled back")]
    assert "A hook changed the arguments" in play.answers()[0]


def test_other_hooks_and_servers_of_the_user_stay_and_their_tools_are_calls(play: Play):
    heard: list[str] = []

    async def listen(hook_input: Any, use_id: str | None, context: Any) -> Any:
        heard.append(hook_input["tool_name"])
        return {}

    @sdk.tool("publish", "Publish a page", {"title": str})
    async def publish(arguments: dict[str, Any]) -> dict[str, Any]:
        (play.root / "a.txt").write_text(arguments["title"])
        is_error = arguments["title"] == "draft"
        return {"content": [{"type": "text", "text": "published"}], "is_error": is_error}

    play(
        uses(*(("mcp__mine__publish", {"title": title}) for title in ("final", "draft"))),
        mcp_servers={"mine": sdk.create_sdk_mcp_server("mine", tools=[publish])},
        hooks={"PostToolUse": [HookMatcher(hooks=[listen])]},
        tools=[note],
    )

    assert heard == ["mcp__mine__publish"]
    assert play.tree() == {**AS_IT_WAS, "a.txt": "final"}
    assert play.records() == [("publish", "committed"), ("publish", "rolled back")]


def test_the_tools_of_a_sub_agent_are_calls_too(play: Play):
    task = {"description": "Look", "prompt": "Look at it.", "subagent_type": "general-purpose"}

    play(
        uses(("Agent", task)),
        uses(bash("echo sub > a.txt")),
        uses(bash("rm b.txt; false")),
        native=None,
    )

    assert play.tree() == {**AS_IT_WAS, "a.txt": "sub\n"}
    assert play.records() == [("bash", "committed"), ("bash", "rolled back")]


def test_a_policy_denies_a_tool_that_is_no_call_itself(play: Play):
    class NoAgents:
        def check(self, tool_name: str) -> str | None:
            return "no agents today" if tool_name == "agent" else None

    task = {"description": "Look", "prompt": "Look at it.", "subagent_type": "general-purpose"}

    play(
        uses(("Agent", task)),
        uses(bash("echo sub > a.txt")),
        native=None,
        policies=[NoAgents()],
    )

    assert "no agents today" in play.answers()[0]
    assert ("agent", "denied") in play.records()


def test_sub_agents_at_the_same_time_change_files_one_at_a_time(play: Play):
    task = {"description": "Look", "prompt": "Look at it.", "subagent_type": "general-purpose"}
    work = "echo $$ >> a.txt; echo x > $$.new; sleep 0.2; wc -l < a.txt >> counts.txt"

    play(
        uses(("Agent", task), ("Agent", task), ("Agent", task)),
        *(uses(bash(work)) for _ in range(3)),
        *[DONE] * 3,
        native=None,
    )

    assert play.tree()["counts.txt"].split() == ["2", "3", "4"]
    assert play.records() == [("bash", "committed")] * 3
    assert [len(each["files"]) for each in play.details()] == [3, 3, 3]


def test_a_tool_of_another_programs_server_is_a_call_named_after_that_server(
    play: Play, tmp_path: Path
):
    program = tmp_path / "server.py"
    program.write_text(
        "import asyncio, pathlib, sys\n"
        "from mcp.server import Server\n"
        "from mcp.server.stdio import stdio_server\n"
        "from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool\n"
        "async def list_tools(context, params):\n"
        "    schema = {'type': 'object', 'properties': {'ok': {'type': 'boolean'}}}\n"
        "    tool = Tool(name='read', description='Read.', input_schema=schema)\n"
        "    return ListToolsResult(tools=[tool])\n"
        "async def call_tool(context, params):\n"
        "    pathlib.Path(sys.argv[1], 'a.txt').write_text('by the server')\n"
        "    said = [TextContent(type='text', text='done')]\n"
        "    return CallToolResult(content=said, is_error=not params.arguments['ok'])\n"
        "async def main():\n"
        "    server = Server('files', on_list_tools=list_tools, on_call_tool=call_tool)\n"
        "    async with stdio_server() as streams:\n"
        "        await server.run(*streams, server.create_initialization_options())\n"
        "asyncio.run(main())\n"
    )
    command = {"command": sys.executable, "args": [str(program), str(play.root)]}

    play(
        uses(("mcp__files__read", {"ok": False})),
        uses(("mcp__files__read", {"ok": True})),
        mcp_servers={"files": command},
        env={"ENABLE_TOOL_SEARCH": "false"},
    )

    assert play.records() == [("files__read", "rolled back"), ("files__read", "committed")]
    assert play.tree()["a.txt"] == "by the server"


@pytest.mark.parametrize(
    "more",
    [{"permission_mode": "plan"}, {"disallowed_tools": ["mcp__wink__note"]}],
    ids=["planning", "disallowed"],
)
def test_our_tools_do_not_run_where_the_user_allows_none(play: Play, more: Any):
    play(uses(("mcp__wink__note", {"text": "x"})), tools=[note], **more)

    assert play.tree() == AS_IT_WAS
    assert ("note", "committed") not in play.records()


def test_the_rest_of_a_long_answer_can_be_read(play: Play):
    @tool(reach="read", max_result_chars=500)
    def print_all() -> str:
        """Print more than is shown at once."""
        return "\n".join(f"line {n}" for n in range(500))

    play(uses(("mcp__wink__print_all", {})), tools=[print_all])
    (first,) = play.answers()
    rest = re.search(r"read_result\(call_id=(\S+), offset=(\d+)\)", first)
    assert rest is not None
    given = {"call_id": json.loads(rest[1]), "offset": int(rest[2])}
    session = play.messages[-1].session_id

    play(uses(("mcp__wink__read_result", given)), tools=[print_all], resume=session)

    assert len(first) < 600
    assert "line 100\n" in play.answers()[-1]


def test_a_tool_of_the_sdk_as_one_of_ours(play: Play):
    @sdk.tool("Publish page", "Publish a page", {"title": str, "copies": int})
    async def publish(arguments: dict[str, Any]) -> dict[str, Any]:
        (play.root / "a.txt").write_text(arguments["title"])
        is_error = arguments["copies"] == 0
        return {"content": [{"type": "text", "text": "published"}], "is_error": is_error}

    with Bridge(play.root, tools=[publish]) as bridge:
        ours = bridge.tools[0]  # beside read_result
        failed = bridge.call("publish_page", {"title": "none", "copies": 0})
        refused = bridge.call("publish_page", {"copies": "x"})
        assert play.tree() == AS_IT_WAS
        done = bridge.call("publish_page", {"title": "new", "copies": 1})

    assert ours.parameters["required"] == ["title", "copies"]
    assert (failed.success, failed.message) == (False, "published")
    assert "title" in refused.message
    assert "copies" in refused.message
    assert done.render() == "published"
    assert play.tree()["a.txt"] == "new"


# An application, with and without a directory


@pytest.fixture
def desk_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    examples = Path(__file__).parents[2] / "examples" / "invoice_desk"
    monkeypatch.syspath_prepend(str(examples))
    yield importlib.import_module("desk")
    del sys.modules["desk"]


def ours(name: str, /, **given: Any) -> tuple[str, dict[str, Any]]:
    return (f"mcp__wink__{name}", given)


def ended(session: Session) -> list[tuple[str, str]]:
    """Return the calls on record in a session, and what the model was told first."""
    found = session[ToolInvoked].all()
    return [(each.tool_name, each.result.render().splitlines()[0]) for each in found]


def test_the_invoice_desk_runs_unchanged_inside_an_agent(play: Play, desk_module: Any):
    with desk_module.open_desk() as desk:
        play(
            uses(ours("bill", customer="Ann", amounts=[70])),
            uses(ours("find_customer", name="Ann")),
            uses(ours("bill", customer="Ann", amounts=["30", 40])),
            uses(ours("bill", customer="Ann", amounts=[50])),
            uses(ours("pay", number=1, cash=80)),
            uses(ours("pay", number=1, cash=70)),
            registry=desk,
            cwd=play.root,
        )

        assert [answer.splitlines()[0] for answer in play.answers()] == [
            "Cannot call 'bill' - missing required tools: find_customer",
            "Ann has a credit of 100",
            "Invoice 1: Ann, 70",
            "Ann has too little credit for 50",
            "80 is 10 too much",
            "0 is still open",
        ]
        assert desk_module.invoices(desk) == [("Ann", 70, 70)]
        assert desk.context().resources.get(desk_module.Till).cash == 70
        assert [each for each, _ in ended(desk.session)] == [
            *("bill", "find_customer", "bill", "bill", "pay", "pay")
        ]
        assert desk.execute("find_customer", {"name": "Bob"}).success, "its owner closes it"


def test_sections_resources_and_a_session_without_a_directory(play: Play, desk_module: Any):
    """The session goes on from one query to the next."""

    @tool(reach="reversible", needs=(desk_module.Till,))
    def earn(cash: int, *, context: ToolContext) -> int:
        """Earn."""
        till = context.resources.get(desk_module.Till)
        till.cash += cash
        if cash > 100:
            raise ValueError("too much")
        return till.cash

    till, session = desk_module.Till(), Session()
    section = MarkdownSection(title="Till", tools=[earn], policies=[QuotaPolicy(3, tools={"earn"})])
    more: Any = {
        "workspace": None,
        "sections": [section],
        "resources": {desk_module.Till: till},
        "session": session,
        "policies": [Rule(lambda params: "no cents" if params.cash == 1 else None)],
    }

    play(uses(ours("earn", cash=5), ours("earn", cash=500), ours("earn", cash=1)), **more)
    assert till.cash == 5
    play(uses(ours("earn", cash=5)), uses(ours("earn", cash=5)), **more)

    assert till.cash == 10
    answers = [answer for _, answer in ended(session)]
    assert answers[:4] == ["5", "too much", "no cents", "10"]
    assert "Quota exceeded" in answers[4]


@pytest.mark.filterwarnings("ignore::claude_agent_sdk.CanUseToolShadowedWarning")
def test_without_a_directory_native_tools_that_may_change_files_are_refused(play: Play):
    """In one line, before anyone is asked, also for a sub-agent; those that read run."""
    session, person = Session(), Person()
    task = {"description": "Look", "prompt": "Look at it.", "subagent_type": "general-purpose"}

    play(
        uses(bash("rm a.txt"), write(play, "b.txt", "new\n")),
        uses(("Read", {"file_path": str(play.root / "c.txt")})),
        uses(("Agent", task)),
        uses(bash("rm c.txt")),
        workspace=None,
        session=session,
        cwd=play.root,
        native=None,
        can_use_tool=person,
        policies=[ApprovalPolicy(tools={"bash", "write"})],
    )

    assert play.tree() == AS_IT_WAS
    assert person.asked == []
    bashed, written, read, *_ = play.answers()
    for name, answer in (("bash", bashed), ("write", written)):
        assert answer.endswith(
            f"Call to '{name}' was not approved: there is no directory whose changes could be "
            "rolled back: give one as workspace=..."
        )
    assert "c as it was" in read
    assert [name for name, _ in ended(session)] == ["bash", "write", "read", "bash"]


def test_tools_of_other_servers_run_without_a_directory(play: Play, desk_module: Any):
    """They are calls like all others; ``reaches`` says which of them only read."""
    seen: list[Any] = []

    class Watches:
        name = "watches"

        def check(self, tool: Any, params: Any, *, context: Any) -> PolicyDecision:
            seen.append((tool.name, tool.reach))
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: Any) -> None:
            """Remember nothing."""

    @sdk.tool("look", "Look it up", {"title": str})
    async def look(arguments: dict[str, Any]) -> dict[str, Any]:
        is_error = arguments["title"] == "draft"
        return {"content": [{"type": "text", "text": "looked"}], "is_error": is_error}

    session = Session()
    play(
        uses(*(("mcp__mine__look", {"title": title}) for title in ("final", "draft"))),
        mcp_servers={"mine": sdk.create_sdk_mcp_server("mine", tools=[look])},
        workspace=None,
        session=session,
        reaches={"look": "read"},
        policies=[Watches()],
    )

    assert play.answers() == ["looked", "looked"]
    assert seen == [("look", "read")] * 2
    assert [each.result.success for each in session[ToolInvoked].all()] == [True, False]


def test_native_tools_work_in_the_directory_of_a_registry(play: Play):
    with ToolRegistry([note], workspace=play.root) as registry:
        play(
            uses(ours("note", text="x")),
            uses(bash("echo new > a.txt; rm b.txt; false")),
            uses(bash("echo new > c.txt")),
            registry=registry,
        )

        assert play.tree() == {**AS_IT_WAS, "notes.txt": "x\n", "c.txt": "new\n"}
        assert [name for name, _ in ended(registry.session)] == ["note", "bash", "bash"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"registry": ToolRegistry(), "tools": [note]}, "leave out the others"),
        ({"registry": ToolRegistry(), "session": Session()}, "leave out the others"),
        ({"registry": ToolRegistry(), "workspace": "elsewhere"}, "leave out workspace"),
        ({"session": Session()}, "give workspace=None"),
    ],
    ids=["tools", "session", "workspace", "directory"],
)
def test_options_that_exclude_each_other_are_refused(play: Play, given: Any, said: str):
    with play.serving(), pytest.raises(TypeError, match=said):
        asyncio.run(anext(play.query(**given)))


# A run that ends early


MARK = {"WINK_TESTS": uuid.uuid4().hex}
"""A variable by which the programs of these tests are known: others may run beside them."""
LATE = "echo new > a.txt; (sleep 1; echo late > b.txt) & sleep 600"


def processes() -> list[int]:
    """Return the processes of programs that these tests have started."""
    mark, found = "=".join(*MARK.items()).encode(), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


async def _read(play: Play, **more: Any) -> None:
    async for _ in play.query(**more):
        pass


async def _cancelled(play: Play) -> None:
    task = asyncio.create_task(_read(play, env=MARK))
    await until(lambda: play.tree()["a.txt"] == "new\n")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _timed_out(play: Play) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(600) as limit:
            async for message in play.query(env=MARK):
                if isinstance(message, AssistantMessage):
                    await until(lambda: play.tree()["a.txt"] == "new\n")
                    limit.reschedule(asyncio.get_running_loop().time())


async def _left(play: Play) -> None:
    async with aclosing(play.query(env=MARK)) as messages:
        async for message in messages:
            if isinstance(message, AssistantMessage):
                await until(lambda: play.tree()["a.txt"] == "new\n")
                break


async def _dropped(play: Play) -> None:
    """Nobody closes what is left of the messages: the event loop does."""
    async for message in play.query(env=MARK):
        if isinstance(message, AssistantMessage):
            await until(lambda: play.tree()["a.txt"] == "new\n")
            return


async def _killed(play: Play) -> None:
    with pytest.raises(ProcessError):
        async for message in play.query(env=MARK):
            if isinstance(message, AssistantMessage):
                await until(lambda: play.tree()["a.txt"] == "new\n")
                for process in processes():
                    if b"stream-json" in Path(f"/proc/{process}/cmdline").read_bytes():
                        os.kill(process, signal.SIGKILL)


async def _disconnected(play: Play) -> None:
    async with WinkClient(play.options(env=MARK), workspace=play.root) as client:
        await client.query("Do it.")
        await until(lambda: play.tree()["a.txt"] == "new\n")


@pytest.mark.parametrize(
    "end",
    [_cancelled, _timed_out, _left, _dropped, _killed, _disconnected],
    ids=lambda f: f.__name__,
)
def test_a_run_that_ends_in_the_middle_of_a_command_leaves_nothing_of_it(play: Play, end: Any):
    with play.serving(uses(bash(LATE))):
        asyncio.run(end(play))

        assert play.tree() == AS_IT_WAS
        assert processes() == []
        time.sleep(1.5)  # what was left behind would write by now
    assert play.tree() == AS_IT_WAS
    assert play.records() == [("bash", "rolled back")]

    play(uses(bash("echo next > a.txt")))  # nothing is locked
    assert play.tree()["a.txt"] == "next\n"


def test_an_interrupted_turn_is_rolled_back_and_the_conversation_goes_on(play: Play):
    async def scenario() -> None:
        client = WinkClient(play.options(env=MARK), workspace=play.root, tools=[note])
        async with client:
            await client.query("Do it.")
            await until(lambda: play.tree()["a.txt"] == "new\n")
            await client.interrupt()
            ended = [message async for message in client.receive_response()]
            assert isinstance(ended[-1], ResultMessage)
            assert play.tree() == AS_IT_WAS
            await client.query("Go on.")
            async for _ in client.receive_response():
                pass

    turns = [
        uses(bash(LATE), write(play, "c.txt", "new\n")),
        uses(("mcp__wink__note", {"text": "x"})),
    ]
    with play.serving(*turns):
        asyncio.run(scenario())

    assert play.tree() == {**AS_IT_WAS, "notes.txt": "x\n"}
    assert play.records() == [("bash", "rolled back"), ("note", "committed")]
    assert processes() == []


def test_a_run_after_one_whose_process_was_killed(play: Play, tmp_path: Path):
    """The next run restores what the killed one left half done, when nothing of it runs on."""
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, json, sys\n"
        "from claude_agent_sdk import ClaudeAgentOptions\n"
        "from weakincentives.integrations.claude import query\n"
        "root, env = sys.argv[1], json.loads(sys.argv[2])\n"
        "options = ClaudeAgentOptions(\n"
        "    env=env, setting_sources=[], permission_mode='bypassPermissions'\n"
        ")\n"
        "async def main():\n"
        "    async for message in query('Do it.', options, workspace=root):\n"
        "        pass\n"
        "asyncio.run(main())\n"
    )
    with play.serving(uses(bash("echo kept > b.txt")), uses(bash("echo new > a.txt; sleep 600"))):
        arguments = [str(play.root), json.dumps(play.options(env=MARK).env)]
        process = subprocess.Popen([sys.executable, str(program), *arguments])
        asyncio.run(until(lambda: play.tree()["a.txt"] == "new\n"))
        process.kill()
        process.wait()
        assert processes(), "the command runs on"

    play(uses(bash("echo next > c.txt")))

    assert processes() == []
    assert play.tree() == {**AS_IT_WAS, "b.txt": "kept\n", "c.txt": "next\n"}
    assert play.records() == [("bash", "committed")] * 2


# Several runs


def test_two_runs_on_one_workspace_do_not_mix_their_changes(play: Play):
    async def scenario() -> None:
        await asyncio.gather(_read(play), _read(play))

    turns = iter(
        [uses(bash(f"echo {n} >> a.txt; echo {n} > {n}.txt; sleep 0.1")) for n in range(6)]
    )
    both = threading.Barrier(2)

    def answer(request: Any) -> ModelTurn:
        if all(each["role"] != "assistant" for each in request["messages"]):
            both.wait(PATIENCE)  # neither has done everything before the other begins
        return next(turns, DONE)

    with serving(answer, keeps_calls=True) as play.server:
        asyncio.run(scenario())

    assert sorted(play.tree()["a.txt"].split()[4:]) == ["0", "1", "2", "3", "4", "5"]
    changed = [sorted(each["path"] for each in call["files"]) for call in play.details()]
    assert sorted(changed) == [[f"{n}.txt", "a.txt"] for n in range(6)]
    assert len({call["run"] for call in play.details()}) == 2


def test_a_run_that_is_cancelled_while_it_waits_for_another_leaves_that_alone(play: Play):
    async def scenario() -> None:
        first = asyncio.create_task(_read(play))
        await until(lambda: play.tree()["a.txt"] == "begun\n")
        second = asyncio.create_task(_read(play))
        await until(lambda: len(play.server.requests) == 2)
        await asyncio.sleep(0.5)  # so that its hook waits, most likely
        second.cancel()
        await asyncio.wait([second])
        (play.root / "go").touch()
        await first

    waits = "echo begun > a.txt; until [ -e go ]; do sleep 0.05; done; echo done > a.txt"
    with play.serving(uses(bash(waits)), uses(bash("echo other > b.txt"))):
        asyncio.run(scenario())

    assert play.tree() == {**AS_IT_WAS, "a.txt": "done\n"}
    assert ("bash", "committed") in play.records()
    play(uses(bash("echo next > b.txt")))
    assert play.tree()["b.txt"] == "next\n"


def test_a_run_that_is_cancelled_while_a_person_is_asked(play: Play):
    async def scenario() -> None:
        asked = asyncio.Event()

        async def never_answers(name: str, given: Any, context: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        ask: Any = {"permission_mode": "default", "can_use_tool": never_answers}
        task = asyncio.create_task(_read(play, **ask))
        await asked.wait()
        task.cancel()
        await asyncio.wait([task])

    with play.serving(uses(bash("rm a.txt"))):
        asyncio.run(scenario())

    assert play.tree() == AS_IT_WAS
    assert play.records() == [("bash", "rolled back")]
    play(uses(bash("echo next > b.txt")))
    assert play.tree()["b.txt"] == "next\n"


def test_a_run_that_another_has_open_changes_nothing_and_says_so(play: Play):
    with play.serving(uses(bash("rm a.txt"))), open_run(play.root, key="x"):
        asyncio.run(_read(play, run="x"))

    assert play.tree() == AS_IT_WAS
    assert "Internal error" in play.answers()[0]
    assert "in use" in play.answers()[0]


def test_a_run_is_titled_by_its_task_or_as_one_says(play: Play):
    play(uses(bash("echo one > a.txt")))
    play(uses(bash("echo two > a.txt")), title="Release 2.0")

    shown = play.wink("log")
    assert "Do it." in shown
    assert "Release 2.0" in shown


def test_resuming_a_session_continues_the_run(play: Play):
    messages = play(uses(bash("echo one > a.txt")))
    session = messages[-1].session_id

    play(uses(bash("echo two > b.txt")), resume=session)

    assert len({call["run"] for call in play.details()}) == 1
    assert "echo one" in play.told()
    play.wink("undo")
    assert play.tree() == AS_IT_WAS


# What is refused


def test_what_could_not_be_rolled_back_is_refused(play: Play, tmp_path: Path):
    for more in (
        {"cwd": tmp_path},
        {"mcp_servers": {"wink": {"command": "true"}}, "tools": [note]},
    ):
        with play.serving(), pytest.raises(ValueError, match=r"workspace|wink"):
            asyncio.run(anext(play.query(**more)))


def test_without_the_sdk_one_line_says_what_to_install():
    program = (
        "import sys; sys.modules['claude_agent_sdk'] = None\n"
        "import weakincentives.integrations.claude"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert install_command("claude-agent-sdk") in done.stderr


def test_the_example_runs_as_a_user_would_run_it():
    example = Path(__file__).parents[2] / "examples" / "integration_claude_agent_sdk.py"
    alone = {k: v for k, v in os.environ.items() if not k.startswith("ANTHROPIC")}

    done = subprocess.run(
        [sys.executable, str(example)], env=alone, capture_output=True, text=True, check=True
    )

    without, _, with_us, told = done.stdout.splitlines()
    assert "'VERSION': '2.0\\n'" in without
    assert with_us == "with us: {'VERSION': '1.0\\n'}"
    assert told.endswith("It was rolled back.")
