from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weakincentives import Tool, ToolContext, ToolResult
from weakincentives.contrib.tools import file_tools
from weakincentives.errors import ApprovalNeeded, Suspended, ToolDefinitionError
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.prompt import (
    Approval,
    ApprovalPolicy,
    ApprovalRequest,
    ApprovalRule,
    CallPreview,
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    if_offered,
)
from weakincentives.prompt.approval import plain_words
from weakincentives.retry import RetryPolicy
from weakincentives.runtime import (
    SavedSession,
    Session,
    ToolCall,
    ToolInvoked,
    execute_tool,
    execute_tools,
    sequence,
)


@dataclass(frozen=True)
class Params:
    amount: int


def agent(policy: ApprovalPolicy, ran: list[int], **options: Any) -> Session:
    def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
        ran.append(params.amount)
        return ToolResult.ok(None, "paid")

    tool = Tool[Params, None](name="pay", description="Pay.", handler=handler, **options)
    free = Tool[Params, None](name="look", description="Look.", handler=handler, reach="read")
    section = MarkdownSection(title="Money", tools=[tool, free], policies=[policy])
    session = Session()
    Prompt(PromptTemplate(sections=[section])).render(session)
    return session


def pay(session: Session, amount: int = 5) -> ToolResult[Any]:
    return execute_tool(ToolCall("pay", {"amount": amount}), session=session)


def test_a_call_runs_once_it_is_approved_and_the_record_says_by_whom():
    asked: list[ApprovalRequest] = []

    def ask(request: ApprovalRequest) -> Approval:
        asked.append(request)
        return Approval(True, by="ops")

    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=ask), ran, reach="reversible")

    assert pay(session).success
    assert ran == [5]
    assert str(asked[0]) == "pay(amount=5)"
    record = session[ToolInvoked].latest()
    assert record is not None
    assert record.notes == ("approval: approved by ops",)


def test_a_denial_says_why_and_is_in_the_record():
    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=lambda _: Approval(False, "ops", "too much")), ran)

    result = pay(session)

    assert not result.success
    assert result.message == "Call to 'pay' was not approved by ops: too much"
    assert ran == []
    record = session[ToolInvoked].latest()
    assert record is not None
    assert record.notes == ("approval: not approved by ops: too much",)
    assert not record.ran


def test_no_answer_in_time_means_no():
    answered = threading.Event()

    def ask(request: ApprovalRequest) -> bool:
        answered.wait(120)
        return True

    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=ask, timeout=0.05), ran)

    result = pay(session)
    answered.set()

    assert "no answer within 0.05 s" in result.message
    assert ran == []


@pytest.mark.parametrize("answer", [None, "yes", 1])
def test_an_answer_that_makes_no_sense_means_no(answer: Any):
    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=lambda _: answer), ran)

    assert "the answer was invalid" in pay(session).message
    assert ran == []


def test_an_ask_that_breaks_means_no():
    def ask(request: ApprovalRequest) -> bool:
        raise ConnectionError("no terminal")

    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=ask), ran)

    assert "asking failed: ConnectionError('no terminal')" in pay(session).message
    assert ran == []


def test_an_async_ask_works_too():
    async def ask(request: ApprovalRequest) -> bool:
        await asyncio.sleep(0)
        return request.arguments["amount"] < 10

    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=ask), ran)

    assert [pay(session, amount).success for amount in (5, 50)] == [True, False]
    assert ran == [5]


@pytest.mark.parametrize("reach", ["irreversable", "Irreversible", "unstated"])
def test_an_unknown_reach_is_refused(reach: Any):
    """The policy would silently never apply."""
    with pytest.raises(ValueError, match="unknown reach"):
        ApprovalPolicy(ask=lambda request: False, reaches={reach})


def test_only_the_named_reaches_and_cases_are_asked_about():
    asked: list[str] = []

    def ask(request: ApprovalRequest) -> bool:
        asked.append(str(request))
        return True

    policy = ApprovalPolicy(
        ask=ask, reaches={"irreversible"}, when=lambda tool, params, context: params.amount > 10
    )
    ran: list[int] = []
    session = agent(policy, ran, reach="irreversible")

    pay(session, 5)
    pay(session, 50)
    execute_tool(ToolCall("look", {"amount": 99}), session=session)

    assert asked == ["pay(amount=50)"]
    assert ran == [5, 50, 99]


def test_a_person_is_asked_once_per_call_also_in_a_turn():
    """Such calls do not run beside others: one that is taken again would ask again."""
    asked: list[str] = []

    def ask(request: ApprovalRequest) -> bool:
        asked.append(request.call_id)
        return True

    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=ask), ran, reach="reversible", concurrent=True)

    calls = [ToolCall("pay", {"amount": n}, id=f"c{n}") for n in range(3)]
    results = execute_tools(calls, session=session)

    assert all(result.success for result in results)
    assert asked == ["c0", "c1", "c2"]
    assert ran == [0, 1, 2]


def test_what_cannot_be_a_policy_is_refused():
    with pytest.raises(TypeError, match="tools must be a set of tool names"):
        ApprovalPolicy(ask=lambda _: True, tools="pay")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout must be positive"):
        ApprovalPolicy(ask=lambda _: True, timeout=0)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_approval_that_a_framework_waits_for_suspends_the_call(is_async: bool):
    class Waiting(Suspended):
        pass

    def ask(request: ApprovalRequest) -> bool:
        raise Waiting

    async def aask(request: ApprovalRequest) -> bool:
        raise Waiting

    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=aask if is_async else ask), ran, reach="reversible")

    with pytest.raises(Waiting):
        pay(session)

    assert ran == []
    assert session[ToolInvoked].latest().suspended


# Edited arguments


def edits(arguments: dict[str, Any], **answer: Any) -> Any:
    return lambda request: Approval(True, "ops", arguments=arguments, **answer)


def test_edited_arguments_run_and_the_model_and_the_record_say_so():
    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=edits({"amount": 3})), ran)

    result = pay(session, 500)

    assert ran == [3]
    assert result.message == "paid\nThe user edited the arguments of 'pay': {\"amount\": 3}"
    record = session[ToolInvoked].latest()
    assert record is not None
    assert record.params == Params(3)
    assert record.edited
    assert record.notes == ("approval: approved by ops", "the arguments were edited")


@pytest.mark.parametrize("arguments", [{"amount": True}, {"amount": "3"}, {}, {"more": 1}])
def test_edited_arguments_are_validated_like_those_of_a_model(arguments: dict[str, Any]):
    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=edits(arguments)), ran)

    result = pay(session, 1)

    assert "Invalid parameters for tool 'pay'" in result.message
    assert ran == []


def test_edited_arguments_pass_all_other_policies_and_a_person_comes_last():
    checked: list[tuple[str, int]] = []

    class Limit:
        def __init__(self, name: str) -> None:
            self.name = name

        def check(self, tool_name: str, params: Params, context: ToolContext) -> str | None:
            checked.append((self.name, params.amount))
            return "too much" if params.amount > 100 else None

    def ask(request: ApprovalRequest) -> Approval:
        checked.append(("person", request.arguments["amount"]))
        return Approval(True, arguments={"amount": request.arguments["amount"] * 2})

    ran: list[int] = []
    tool = Tool[Params, None](
        name="pay",
        description="Pay.",
        handler=lambda params, *, context: (ran.append(params.amount), ToolResult.ok(None))[1],
    )
    policies = [ApprovalPolicy(ask=ask), Limit("first")]
    section = MarkdownSection(title="Money", tools=[tool], policies=policies)
    session = Session()
    Prompt(PromptTemplate(sections=[section], policies=[Limit("last")])).render(session)

    assert pay(session, 30).success
    denied = pay(session, 80)
    assert pay(session, 300).message == "too much"  # nobody was asked

    assert ran == [60]
    assert denied.message.startswith("too much\nThe user edited the arguments")
    assert checked == [
        *(("first", 30), ("last", 30), ("person", 30), ("first", 60), ("last", 60)),
        *(("first", 80), ("last", 80), ("person", 80), ("first", 160)),
        ("first", 300),
    ]


def test_two_people_approve_the_same_arguments():
    """One who has approved the model's arguments is asked about the edited ones."""
    asked: list[tuple[str, int]] = []

    def one(request: ApprovalRequest) -> bool:
        asked.append(("one", request.arguments["amount"]))
        return True

    def two(request: ApprovalRequest) -> Approval:
        asked.append(("two", request.arguments["amount"]))
        return Approval(True, arguments={"amount": 7})

    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=one), ran)
    section = MarkdownSection(
        title="Money",
        tools=[offer.tool for offer in session.rendered.offers.values()],  # type: ignore[union-attr]
        policies=[ApprovalPolicy(ask=one, name="one"), ApprovalPolicy(ask=two, name="two")],
    )
    Prompt(PromptTemplate(sections=[section])).render(session)

    assert pay(session).success
    assert asked == [("one", 5), ("two", 5), ("one", 7)]
    assert ran == [7]


def test_every_attempt_of_a_retry_runs_with_the_edited_arguments():
    asked: list[int] = []
    ran: list[int] = []

    def ask(request: ApprovalRequest) -> Approval:
        asked.append(request.arguments["amount"])
        return Approval(True, arguments={"amount": 2})

    def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
        ran.append(params.amount)
        return ToolResult.ok(None) if len(ran) > 1 else ToolResult.error("busy")

    tool = Tool[Params, None](
        name="pay",
        description="Pay.",
        handler=handler,
        reach="reversible",
        retry=RetryPolicy(max_retries=2),
    )
    session = Session()
    section = MarkdownSection(title="Money", tools=[tool], policies=[ApprovalPolicy(ask=ask)])
    Prompt(PromptTemplate(sections=[section])).render(session)

    result = pay(session)

    assert (result.success, asked, ran) == (True, [5], [2, 2])
    assert result.message.count("The user edited") == 1


def test_a_member_of_a_composed_tool_can_be_edited_and_the_model_is_told():
    ran: list[int] = []

    def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
        ran.append(params.amount)
        return ToolResult.ok(None)

    tools = [
        Tool[Params, None](name=name, description="Pay.", handler=handler)
        for name in ("first", "second")
    ]
    both = sequence(tools)
    policy = ApprovalPolicy(ask=edits({"amount": 9}), tools={"second"})
    section = MarkdownSection(title="Money", tools=[both], policies=[policy])
    session = Session()
    Prompt(PromptTemplate(sections=[section])).render(session)

    result = execute_tool(ToolCall(both.name, {"amount": 1}), session=session)

    assert ran == [1, 9]
    assert "The user edited the arguments of 'second': {\"amount\": 9}" in result.message
    assert [record.params for record in session[ToolInvoked].all()][1] == Params(9)


def test_policies_that_remember_see_the_arguments_that_ran():
    files = MemoryFilesystem({"a.txt": "a\n"})
    session = files_agent(
        files,
        lambda request: Approval(True, arguments={**request.arguments, "path": "b.txt"}),
        first=[ReadBeforeWritePolicy()],
    )

    assert call(session, "write_file", path="c.txt", content="1").success
    assert call(session, "write_file", path="b.txt", content="2").success  # written before
    assert "without reading" in call(session, "write_file", path="a.txt", content="3").message

    assert files.glob("*") == ("a.txt", "b.txt")
    assert files.read("b.txt") == "2"


# Previews and rules


def files_agent(files: Filesystem, ask: Any, *, first: Sequence[object] = ()) -> Session:
    section = MarkdownSection(
        title="Files",
        tools=file_tools(),
        policies=[*first, ApprovalPolicy(ask=ask, reaches={"reversible"})],
    )
    session = Session()
    Prompt(PromptTemplate(sections=[section], resources={Filesystem: files})).render(session)
    return session


def call(session: Session, name: str, **arguments: Any) -> ToolResult[Any]:
    return execute_tool(ToolCall(name, arguments), session=session)


def test_the_request_shows_each_change_of_a_file_as_a_diff_and_changes_nothing():
    files = MemoryFilesystem({"a.py": "one\ntwo\nthree\n", "docs/b.md": "b\n", "c.bin": b"\0\1"})
    asked: list[ApprovalRequest] = []

    def ask(request: ApprovalRequest) -> bool:
        asked.append(request)
        return False

    session = files_agent(files, ask)
    before = {path: files.read_bytes(path) for path in files.glob("**/*")}
    call(session, "edit_file", path="a.py", old_string="two", new_string="2")
    call(session, "write_file", path="new.txt", content="x")
    call(session, "delete_file", path="a.py")
    call(session, "delete_file", path="docs", recursive=True)
    call(session, "move_file", source="a.py", destination="docs/b.md", overwrite=True)
    call(session, "copy_file", source="docs", destination="more")
    call(session, "write_file", path="c.bin", content="text", overwrite=True)

    assert [request.preview.diff for request in asked] == [
        "--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n",
        "--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+x\n\\ No newline at end of file\n",
        "--- a/a.py\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-one\n-two\n-three\n",
        "deleted: docs, a directory of 1 file\n-docs/b.md\n",
        "rename from a.py\nrename to docs/b.md\nreplaces a file of 2 bytes\n",
        "copy from docs\ncopy to more\ncopy with a directory of 1 file\n",
        "c.bin: a file of 2 bytes becomes 4 bytes\n",
    ]
    assert [request.preview.paths for request in asked][3:6] == [
        ("docs",),
        ("a.py", "docs/b.md"),
        ("more",),
    ]
    assert {path: files.read_bytes(path) for path in files.glob("**/*")} == before


def test_nobody_is_asked_about_a_call_that_would_fail():
    asked: list[ApprovalRequest] = []
    session = files_agent(MemoryFilesystem({"a.py": "one\n"}), asked.append)

    result = call(session, "edit_file", path="a.py", old_string="two", new_string="2")

    assert not result.success
    assert "a.py" in result.message
    assert asked == []


def test_an_approval_does_not_hold_for_a_file_that_changed_meanwhile(tmp_path: Path):
    (tmp_path / "a.txt").write_text("old\n")

    def ask(request: ApprovalRequest) -> bool:
        (tmp_path / "a.txt").write_text("a person was here\n")
        return True

    with HostFilesystem(tmp_path) as files:
        session = files_agent(files, ask)
        result = call(session, "write_file", path="a.txt", content="new\n", overwrite=True)

    assert "what it works on has changed since. Look at it again, then retry" in result.message
    assert (tmp_path / "a.txt").read_text() == "a person was here\n"


async def _async_preview(params: Params, *, context: ToolContext) -> CallPreview:
    return CallPreview()


@pytest.mark.parametrize("preview", [lambda params: CallPreview(), _async_preview])
def test_a_preview_that_cannot_be_called_is_refused_at_the_declaration(preview: Any):
    with pytest.raises(ToolDefinitionError, match="its preview must fit"):
        agent(ApprovalPolicy(ask=lambda _: True), [], preview=preview)


@pytest.mark.parametrize("value", [KeyError("x"), "a diff"])
def test_a_preview_that_breaks_is_said_and_the_person_decides(value: Any):
    asked: list[ApprovalRequest] = []

    def preview(params: Params, *, context: ToolContext) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    session = agent(
        ApprovalPolicy(ask=lambda request: bool(asked.append(request)) or True),
        ran := [],
        preview=preview,
    )

    assert pay(session).success
    assert asked[0].preview.facts["preview"].startswith("failed: ")
    assert ran == [5]


def test_always_holds_for_what_the_rule_covers_until_the_session_ends_and_after_a_resume():
    files = MemoryFilesystem()
    asked: list[str] = []

    def ask(request: ApprovalRequest) -> Approval:
        asked.append(request.arguments["path"])
        rule = ApprovalRule(tool="write_file", path="docs/**")
        return Approval(True, "ops", always=rule if rule.covers(request) else None)

    session = files_agent(files, ask)
    for path in ("docs/a.md", "docs/deep/b.md", "docs.md", "docs/../x.md", "docs/c.md"):
        assert call(session, "write_file", path=path, content="x").success
    resumed = Session.from_snapshot(session.snapshot())
    Prompt(cast("Any", session.prompt).template).render(resumed)
    assert call(resumed, "write_file", path="docs/d.md", content="x").success

    assert asked == ["docs/a.md", "docs.md", "docs/../x.md"]
    notes = [record.notes for record in session[ToolInvoked].all()]
    assert notes[0] == ("approval: approved by ops, always: write_file docs/**",)
    assert notes[1] == ("approval: approved by ops for the session: write_file docs/**",)
    other = files_agent(files, ask)
    call(other, "write_file", path="docs/e.md", content="x")
    assert asked[-1] == "docs/e.md"


def test_a_link_does_not_lead_around_a_rule_for_paths(tmp_path: Path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "docs" / "link").symlink_to("../src")
    asked: list[ApprovalRequest] = []

    def ask(request: ApprovalRequest) -> bool:
        asked.append(request)
        return False

    policy = ApprovalPolicy(
        ask=ask, approved=[ApprovalRule(tool="write_file", path="docs/**")], timeout=None
    )
    with HostFilesystem(tmp_path) as files:
        section = MarkdownSection(title="Files", tools=file_tools(), policies=[policy])
        session = Session()
        Prompt(PromptTemplate(sections=[section], resources={Filesystem: files})).render(session)
        assert call(session, "write_file", path="docs/a.md", content="x").success
        assert not call(session, "write_file", path="docs/link/a.md", content="x").success
        call(session, "delete_file", path="docs/link")

    assert [request.preview.paths for request in asked] == [("src/a.md",), ("docs/link",)]
    assert asked[1].preview.diff == "deleted: docs/link, a link to src\n"


@pytest.mark.parametrize(
    ("glob", "covered", "others"),
    [
        ("*.md", ["a.md"], ["a.md/run.py", "docs/a.md"]),
        ("docs/*", ["docs/a"], ["docs/a/b", "docs"]),
        ("docs/**", ["docs/a", "docs/a/b"], ["docs", "docs.py"]),
        ("/docs/", ["docs/a/b"], ["docs", "x/docs/a"]),
        ("docs/a.md", ["docs/a.md"], ["docs/a.md/run.py", "docs"]),
        ("/", [], ["a", "."]),
    ],
)
def test_a_rule_for_paths_covers_what_matches_and_nothing_below_it(
    glob: str, covered: list[str], others: list[str]
):
    rule = ApprovalRule(tool="write_file", path=glob)

    def covers(path: str) -> bool:
        preview = CallPreview(paths=(path,))
        return rule.covers(
            ApprovalRequest(
                tool_name="write_file", description="", arguments={}, reach=None, call_id="",
                session_id="", preview=preview,
            )
        )  # fmt: skip

    assert [path for path in (*covered, *others) if covers(path)] == covered


def test_without_a_time_limit_a_timeout_is_a_failure_of_the_question():
    def ask(request: ApprovalRequest) -> bool:
        raise TimeoutError("the chat server")

    ran: list[int] = []
    session = agent(ApprovalPolicy(ask=ask, timeout=None), ran)

    assert "asking failed: TimeoutError('the chat server')" in pay(session).message
    assert ran == []


def test_a_rule_that_does_not_cover_the_call_is_no_answer():
    ran: list[int] = []
    rule = ApprovalRule(tool="look")
    session = agent(ApprovalPolicy(ask=lambda _: Approval(True, always=rule)), ran)

    assert "the answer was invalid" in pay(session).message
    assert ran == []


@pytest.mark.parametrize(
    "command",
    [
        *("pytest; rm x", "pytest && rm x", "pytest | sh", "pytest > x", "pytest < x", "pytest &"),
        *("pytest $(rm x)", "pytest `rm x`", "pytest $HOME", "pytest\nrm x", "pytest\rrm x"),
        *("pytest 'a", "pytest {a,b}", "pytest \\; rm", "! pytest", "pytest # x", "(pytest)"),
        *("pytest\x00", "pytest\u2028rm", "pytest ~root", 'pytest "$(rm x)"', "X=1 pytest"),
        *("pytests", "./pytest", "py'test", ""),
    ],
)
def test_a_rule_for_commands_never_covers_shell_syntax_or_other_words(command: str):
    assert plain_words(command)[:1] != ("pytest",)


PIECE = st.sampled_from([*"ab .=/-*?[]%^@:,+'\"", "''", '""', " ' '", "-x", "a b"])


@given(st.lists(PIECE, max_size=12).map("".join))
@settings(max_examples=60, deadline=None)
def test_plain_words_are_the_words_that_a_shell_sees(command: str):
    words = plain_words(command)
    assume(words)
    done = subprocess.run(
        ["/bin/sh", "-c", f"set -f; printf '%s\\0' {command}"], capture_output=True, check=True
    )

    assert done.stdout == "".join(f"{word}\0" for word in words).encode()


def test_always_outlives_a_failed_call_and_the_process(tmp_path: Path):
    asked: list[ApprovalRequest] = []

    def ask(request: ApprovalRequest) -> Approval:
        asked.append(request)
        return Approval(True, always=ApprovalRule(tool="fail"))

    def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult.error("no")

    tool = Tool[Params, None](name="fail", description="Fail.", handler=handler)
    section = MarkdownSection(title="Money", tools=[tool], policies=[ApprovalPolicy(ask=ask)])
    prompt = Prompt(PromptTemplate(sections=[section]))
    for number in range(2):
        path = tmp_path / "session"
        saved = SavedSession.open(path) if number else SavedSession.create(path, Session())
        with saved:
            prompt.render(saved.session)
            for _ in range(2):
                call(saved.session, "fail", amount=1)

    assert len(asked) == 1


# What is checked before a person is checked again after the answer


def guarded(*policies: Any, ran: list[int]) -> Session:
    """A session with a tool under several policies."""
    session = agent(ApprovalPolicy(tools={if_offered("other")}), ran)
    assert session.prompt is not None
    (section,) = session.prompt.template.sections
    tools = MarkdownSection(title="Money", tools=section.tools, policies=policies)
    Prompt(PromptTemplate(sections=[tools])).render(session)
    return session


@dataclass
class Door:
    """A policy that allows calls while it is open; it counts what it is asked."""

    is_open: bool = True
    checks: int = 0
    name: str = "door"

    def check(self, tool_name: str) -> str | None:
        self.checks += 1
        return None if self.is_open else "Closed"


class AsyncDoor(Door):
    async def check(self, tool_name: str) -> str | None:  # type: ignore[override]
        await asyncio.sleep(0)
        return Door.check(self, tool_name)


@pytest.mark.parametrize("kind", [Door, AsyncDoor])
@pytest.mark.parametrize("order", [1, -1])
def test_what_was_allowed_before_a_person_was_asked_is_checked_again(kind: Any, order: int):
    """Checked at 16:59, approved at 22:59: the office is closed by then."""
    door, ran = kind(), []

    def ask(request: ApprovalRequest) -> bool:
        assert door.checks == 1
        door.is_open = False
        return True

    session = guarded(*[door, ApprovalPolicy(ask=ask)][::order], ran=ran)

    result = pay(session, 5)

    assert (result.success, result.message, ran) == (False, "Closed", [])
    record = session[ToolInvoked].latest()
    assert record is not None
    assert (record.denied_by, record.notes) == ("door", ("approval: approved",))


def test_a_policy_that_fails_after_the_answer_denies_the_call():
    ran: list[int] = []

    class Broken(Door):
        def check(self, tool_name: str) -> str | None:
            self.checks += 1
            if self.checks == 2:
                raise OSError("no route")
            return None

    result = pay(guarded(Broken(), ApprovalPolicy(ask=lambda _: True), ran=ran), 5)

    assert "could not decide and denies the call: OSError('no route')" in result.message
    assert ran == []


def test_a_call_that_a_person_approved_counts_once():
    ran: list[int] = []
    limits = [QuotaPolicy(2), RateLimitPolicy(2)]
    session = guarded(*limits, ApprovalPolicy(ask=lambda _: True), ran=ran)

    assert [pay(session, n).success for n in range(3)] == [True, True, False]
    assert ran == [0, 1]


def test_each_person_is_followed_by_the_checks_of_all_others():
    """The second one's answer may come hours after the first one's."""
    door, ran = Door(), []

    def slow(request: ApprovalRequest) -> bool:
        door.is_open = False
        return True

    two = [ApprovalPolicy(ask=lambda _: True), ApprovalPolicy(ask=slow, name="second")]

    assert pay(guarded(door, *two, ran=ran), 5).message == "Closed"
    assert ran == []


def test_a_call_that_waited_elsewhere_is_checked_when_it_is_made_again():
    door, ran = Door(), []
    session = guarded(door, ApprovalPolicy(), ran=ran)
    call = ToolCall("pay", {"amount": 5}, id="c1")
    with pytest.raises(ApprovalNeeded):
        execute_tool(call, session=session)
    door.is_open = False

    result = execute_tool(call, session=session, approval=Approval(True))

    assert (result.message, ran) == ("Closed", [])


def offering(policies: Sequence[Any], ran: list[str], **reaches: Any) -> Prompt[Any]:
    """Return a prompt with a tool of each name and reach."""

    def tool(name: str, reach: Any) -> Tool[Any, Any]:
        def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
            ran.append(name)
            return ToolResult.ok(None, "done")

        return Tool[Params, None](name=name, description="A tool.", handler=handler, reach=reach)

    tools = [tool(name, reach) for name, reach in reaches.items()]
    section = MarkdownSection(title="Money", tools=tools, policies=policies)
    return Prompt(PromptTemplate(sections=[section]))


def test_an_approval_of_one_tool_is_none_of_another_with_the_same_call_id():
    """Some providers use an id again."""
    ran: list[str] = []
    prompt = offering([ApprovalPolicy()], ran, look="read", pay="irreversible")
    session = Session()
    with pytest.raises(ApprovalNeeded):
        execute_tool(ToolCall("look", {"amount": 5}, id="c1"), session=session, prompt=prompt)

    result = execute_tool(
        ToolCall("pay", {"amount": 5}, id="c1"),
        session=session,
        prompt=prompt,
        approval=Approval(True),
    )

    assert "has changed since" in result.message
    assert ran == []


def test_a_recorded_approval_of_one_tool_is_none_of_another():
    """The first person has approved ``look`` only, the second ``pay``."""
    ran: list[str] = []
    two = [ApprovalPolicy(name="first"), ApprovalPolicy(name="second")]
    prompt = offering(two, ran, look="read", pay="irreversible")
    session = Session()
    for name, approval in (("look", None), ("look", True), ("pay", None), ("pay", True)):
        with pytest.raises(ApprovalNeeded):
            execute_tool(
                ToolCall(name, {"amount": 5}, id="c1"),
                session=session,
                prompt=prompt,
                approval=None if approval is None else Approval(approval),
            )

    assert ran == []


def test_an_approval_does_not_hold_for_a_tool_that_is_declared_anew():
    ran: list[str] = []
    session, call = Session(), ToolCall("pay", {"amount": 5}, id="c1")
    before = offering([ApprovalPolicy()], ran, pay="reversible")
    now = offering([ApprovalPolicy()], ran, pay="irreversible")
    with pytest.raises(ApprovalNeeded):
        execute_tool(call, session=session, prompt=before)

    result = execute_tool(call, session=session, prompt=now, approval=Approval(True))

    assert "has changed since" in result.message
    assert ran == []


def test_always_does_not_hold_for_a_tool_that_reaches_further():
    ran: list[str] = []
    session, rule = Session(), ApprovalRule(tool="pay")
    always = ApprovalPolicy(ask=lambda _: Approval(True, always=rule))
    before = offering([always], ran, pay="reversible")
    now = offering([ApprovalPolicy(ask=lambda _: False)], ran, pay="irreversible")
    for prompt in (before, before, now):
        execute_tool(ToolCall("pay", {"amount": 5}), session=session, prompt=prompt)

    assert ran == ["pay", "pay"]


def test_arguments_that_a_policy_wants_changed_after_the_approval_are_refused():
    """An approval is for exactly the arguments that were shown."""
    amounts = iter((None, {"amount": 500}))

    class Rewrites:
        name = "rewrites"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision(allowed=True, arguments=next(amounts))

    ran: list[int] = []

    result = pay(guarded(Rewrites(), ApprovalPolicy(ask=lambda _: True), ran=ran), 5)

    assert "other arguments than were approved" in result.message
    assert ran == []


def test_arguments_that_a_policy_changed_before_the_approval_are_those_that_run():
    class Doubles:
        name = "doubles"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision(allowed=True, arguments={"amount": params.amount * 2})

    asked: list[int] = []
    ran: list[int] = []
    ask = ApprovalPolicy(ask=lambda request: not asked.append(request.arguments["amount"]))

    assert pay(guarded(Doubles(), ask, ran=ran), 5).success
    assert (asked, ran) == ([10], [10])
