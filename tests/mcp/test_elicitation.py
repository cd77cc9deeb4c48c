"""Approval by the user of an MCP client, over both eras of the protocol."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from weakincentives.contrib.tools import file_tools
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.mcp import McpServer, ask_client
from weakincentives.prompt import (
    ApprovalPolicy,
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ProtectedPathsPolicy,
)
from weakincentives.runtime import ToolInvoked

mcp = pytest.importorskip("mcp")

from mcp import Client, MCPError  # noqa: E402
from mcp.types import ElicitResult, Implementation  # noqa: E402

Mode = Literal["auto", "legacy"]
ERAS = pytest.mark.parametrize("mode", ["auto", "legacy"])


class User:
    """Fills in the forms of a client, one answer after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.forms: list[Any] = []

    async def __call__(self, context: Any, form: Any) -> ElicitResult:
        self.forms.append(form)
        answer = self.answers.pop(0)
        if callable(answer):
            answer = answer(form)
        if isinstance(answer, str):
            return ElicitResult(action=answer)  # type: ignore[arg-type]
        return ElicitResult(action="accept", content=answer)


def server_of(
    files: Filesystem, *policies: object, repeat: int = 1, undo: bool = False
) -> McpServer:
    asking = [
        ApprovalPolicy(ask=ask_client, reaches={"reversible"}, name=f"approval {number}")
        for number in range(repeat)
    ]
    section = MarkdownSection(title="Files", tools=file_tools(), policies=[*asking, *policies])
    template = PromptTemplate(sections=[section], resources={Filesystem: files})
    return McpServer(Prompt(template), undo=undo)


def use(server: McpServer, user: User | None, mode: Mode, *arguments: Any) -> list[Any]:
    """Let a client make calls, of write_file if not said otherwise, and return the results."""
    calls = [dict(each) for each in arguments]

    async def run() -> list[Any]:
        async with (
            asyncio.timeout(240),
            Client(
                server.protocol,
                mode=mode,
                elicitation_callback=user,
                client_info=Implementation(name="editor", version="1"),
            ) as client,
        ):
            return [await client.call_tool(each.pop("tool", "write_file"), each) for each in calls]

    with server:
        return asyncio.run(run())


def said(result: Any) -> str:
    return "".join(part.text for part in result.content)


A = {"path": "a.txt", "content": "one\n"}


@ERAS
def test_the_user_sees_the_change_and_says_yes_or_no_with_a_reason(mode: Mode):
    files = MemoryFilesystem()
    user = User({"answer": "yes"}, {"answer": "no", "reason": "use b.txt"}, "decline", "cancel")
    server = server_of(files)

    done = use(server, user, mode, A, {"path": "c.txt", "content": ""}, *[{**A, "path": "d"}] * 2)

    assert [result.is_error for result in done] == [False, True, True, True]
    assert said(done[1]) == (
        "Call to 'write_file' was not approved by the user of editor: use b.txt"
    )
    assert "not approved by the user of editor: declined" in said(done[2])
    assert "the question was not answered" in said(done[3])
    assert files.glob("**/*") == ("a.txt",)
    form = user.forms[0]
    assert "write_file wants to run; it can be undone.\nThe change:\n" in form.message
    assert "  | +++ b/a.txt\n  | @@ -0,0 +1 @@\n  | +one\n" in form.message
    assert form.requested_schema["properties"]["answer"]["enum"] == ["yes", "no", "always"]
    records = [each for each in server.session[ToolInvoked].all() if not each.suspended]
    assert records[0].notes == ("approval 0: approved by the user of editor",)
    assert len({each.call_id for each in server.session[ToolInvoked].all()}) == 4


@ERAS
def test_an_approved_call_is_one_call_in_the_history_and_can_be_undone(tmp_path: Path, mode: Mode):
    with HostFilesystem(tmp_path) as files:
        server = server_of(files, undo=True)
        calls = (A, {"tool": "history"}, {"tool": "undo"})
        done = use(server, User({"answer": "yes"}), mode, *calls)

    assert said(done[1]).count("write_file") == 1
    assert "write_file ok: a.txt" in said(done[1])
    assert said(done[2]).startswith("Undone: 1 call (write_file).")
    assert list(tmp_path.iterdir()) == []


@ERAS
def test_the_user_edits_the_arguments_and_all_policies_check_them(mode: Mode):
    files = MemoryFilesystem({"keep": "x"})
    other = json.dumps({"path": "b.txt", "content": "two\n"})
    kept = json.dumps({"path": "keep", "content": "", "overwrite": True})
    user = User(
        {"answer": "yes", "arguments": other},
        {"answer": "yes", "arguments": kept},
        {"answer": "yes", "arguments": '{"path": 3}'},
        {"answer": "yes", "arguments": "{"},
    )

    done = use(server_of(files, ProtectedPathsPolicy(["keep"])), user, mode, A, A, A, A)

    assert [result.is_error for result in done] == [False, True, True, True]
    assert "The user edited the arguments of 'write_file'" in said(done[0])
    assert files.read("b.txt") == "two\n"
    assert "Cannot change keep: it is protected" in said(done[1])
    assert "Invalid parameters for tool 'write_file'" in said(done[2])
    assert "the answer was invalid" in said(done[3])
    assert files.glob("**/*") == ("b.txt", "keep")


@ERAS
def test_each_policy_gets_its_own_answer_also_after_always(mode: Mode):
    """The first question is not asked again; its answer is none to the second."""
    files, user = MemoryFilesystem(), User({"answer": "always"}, {"answer": "no", "reason": "stop"})

    (done,) = use(server_of(files, repeat=2), user, mode, A)

    assert said(done) == "Call to 'write_file' was not approved by the user of editor: stop"
    assert len(user.forms) == 2
    assert files.glob("**/*") == ()


def test_a_client_that_never_answers_does_not_keep_the_server_for_itself(
    monkeypatch: pytest.MonkeyPatch,
):
    """Over HTTP a client can vanish unnoticed, and every other call waits for this one."""
    monkeypatch.setattr("weakincentives.mcp.client_call._PATIENCE", 0.2)
    files = MemoryFilesystem()

    async def silent(context: Any, form: Any) -> ElicitResult:
        return await asyncio.get_running_loop().create_future()

    policy = ApprovalPolicy(ask=ask_client, reaches={"reversible"}, timeout=None)
    section = MarkdownSection(title="Files", tools=file_tools(), policies=[policy])
    server = McpServer(
        Prompt(PromptTemplate(sections=[section], resources={Filesystem: files})), undo=False
    )
    denied, listed = use(
        server, cast("Any", silent), "legacy", A, {"tool": "list_directory", "path": "."}
    )

    assert said(denied) == (
        "Call to 'write_file' was not approved by the user of editor: no answer within 0.2 s"
    )
    assert not listed.is_error
    assert files.glob("**/*") == ()


@ERAS
def test_always_holds_for_its_scope(mode: Mode):
    files = MemoryFilesystem()
    user = User({"answer": "always", "scope": "docs/**"}, "decline")
    paths = ("docs/a.md", "docs/b.md", "a.md")

    done = use(server_of(files), user, mode, *[{"path": path, "content": ""} for path in paths])

    assert [result.is_error for result in done] == [False, False, True]
    assert len(user.forms) == 2


@ERAS
def test_several_approvals_of_one_call_are_asked_one_after_the_other(mode: Mode):
    user = User({"answer": "yes"}, {"answer": "yes"}, {"answer": "yes"}, {"answer": "no"})

    done = use(server_of(MemoryFilesystem(), repeat=2), user, mode, A, {**A, "path": "b"})

    assert [result.is_error for result in done] == [False, True]


@ERAS
@pytest.mark.parametrize("answer", [{}, {"answer": "sure"}, {"answer": "always", "scope": "x/**"}])
def test_an_answer_that_makes_no_sense_means_no(mode: Mode, answer: Any):
    files = MemoryFilesystem()

    (done,) = use(server_of(files), User(answer), mode, A)

    assert done.is_error
    assert "the answer was invalid" in said(done)
    assert files.glob("**/*") == ()


@ERAS
def test_a_client_that_cannot_ask_gets_a_denial_in_words(mode: Mode):
    (done,) = use(server_of(MemoryFilesystem()), None, mode, A)

    assert said(done) == "Call to 'write_file' was not approved: there is no one to ask"


@ERAS
def test_an_approval_is_for_the_file_that_was_shown(tmp_path: Path, mode: Mode):
    def meddle(form: Any) -> Any:
        (tmp_path / "a.txt").write_text("of a person\n")
        return {"answer": "yes"}

    with HostFilesystem(tmp_path) as files:
        (done,) = use(server_of(files), User(meddle, "decline"), mode, {**A, "overwrite": True})

    assert done.is_error
    assert (tmp_path / "a.txt").read_text() == "of a person\n"


def test_an_answer_counts_once_and_for_its_call_only():
    """What was sealed for another call, made up, or sent before is an error."""
    files = MemoryFilesystem()
    server = server_of(files)
    again = {**A, "overwrite": True}

    async def run() -> list[Any]:
        found: list[Any] = []
        async with asyncio.timeout(240), Client(server.protocol, elicitation_callback=User()) as c:
            yes = {"approval": ElicitResult(action="accept", content={"answer": "yes"})}

            async def call(arguments: Any, **more: Any) -> Any:
                try:
                    result = await c.session.call_tool(
                        "write_file", arguments, allow_input_required=True, **more
                    )
                except MCPError as error:
                    found.append(error.code)
                    return error
                found.append(type(result).__name__)
                return result

            asked = await call(again)
            state = asked.request_state
            await call({**again, "content": "other"}, input_responses=yes, request_state=state)
            await call(again, input_responses=yes, request_state=state)
            await call(again, input_responses=yes, request_state="made up")
            await call(again, input_responses=yes)
            asked = await call(again)
            await call(again, input_responses=yes, request_state=asked.request_state)
            await call(again, input_responses=yes, request_state=asked.request_state)
        return found

    with server:
        found = asyncio.run(run())

    asked = "InputRequiredResult"
    assert found == [
        asked,
        -32602,
        "CallToolResult",
        -32602,
        asked,
        asked,
        "CallToolResult",
        -32602,
    ]
    assert files.read("a.txt") == "one\n"


def test_an_answer_that_another_client_sends_does_not_use_up_the_question():
    files = MemoryFilesystem()
    server = server_of(files)
    yes = {"approval": ElicitResult(action="accept", content={"answer": "yes"})}

    async def run() -> None:
        other = Implementation(name="another", version="1")
        async with (
            asyncio.timeout(240),
            Client(server.protocol, elicitation_callback=User()) as c,
            Client(server.protocol, elicitation_callback=User(), client_info=other) as thief,
        ):
            asked = await c.session.call_tool("write_file", A, allow_input_required=True)
            answer = {"input_responses": yes, "request_state": asked.request_state}
            with pytest.raises(MCPError):
                await thief.session.call_tool("write_file", A, **answer)
            assert not files.exists("a.txt")
            assert not (await c.session.call_tool("write_file", A, **answer)).is_error

    with server:
        asyncio.run(run())
    assert files.exists("a.txt")
