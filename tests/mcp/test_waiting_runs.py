"""The user of an MCP client answers what durable runs ask; the model cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_elicitation import ERAS, Mode, User, said, use

from weakincentives.mcp import McpServer
from weakincentives.mcp.elicitation import approvals_section
from weakincentives.prompt.approval import ApprovalRequest
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import Runs

ASK = {"tool": "ask_about_waiting_run"}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    database = Database(f"sqlite:///{tmp_path / 'runs.db'}")
    yield Runs(database)
    database.close()


def waiting(runs: Runs, text: str = "hello") -> str:
    """Let a run wait for a person; returns its id."""
    run = runs.submit("a", about={})
    request = ApprovalRequest(
        tool_name="send_mail",
        description="Sends a mail.",
        arguments={"text": text},
        reach="irreversible",
        call_id="c1",
        session_id="s",
    )
    runs.begin(run.id, 1, "w")
    runs.ask(run.id, request)
    runs.end(run.id, 1, "waiting", "send_mail")
    return run.id


@ERAS
def test_the_user_approves_and_denies(runs: Runs, mode: Mode) -> None:
    first, second = waiting(runs), waiting(runs, "other")
    user = User({"answer": "yes"}, {"answer": "no", "reason": "not today"})

    done = use(McpServer(approvals_section(runs), undo=False), user, mode, ASK, ASK, ASK)

    assert [each.is_error for each in done] == [False, False, False]
    assert said(done[0]).endswith(f"the user of editor approved send_mail of {first}. 1 more wait.")
    assert "denied send_mail" in said(done[1])
    assert "No run waits for an approval." in said(done[2])
    assert '| text: "hello"' in user.forms[0].message
    for run, approved, reason in ((first, True, ""), (second, False, "not today")):
        assert runs.find(run).status == "queued"
        text = "hello" if run == first else "other"
        request = ApprovalRequest(
            tool_name="send_mail", description="Sends a mail.", arguments={"text": text},
            reach="irreversible", call_id="c1", session_id="s",
        )  # fmt: skip
        answer = runs.answered(run, "c1", request.digest)
        assert answer is not None
        assert (answer.approved, answer.reason) == (approved, reason)
        assert answer.by == "the user of editor"


@ERAS
@pytest.mark.parametrize("answer", ["decline", "cancel", {"answer": "perhaps"}])
def test_without_an_answer_the_run_goes_on_waiting(runs: Runs, mode: Mode, answer: object) -> None:
    run = waiting(runs)

    (done,) = use(McpServer(approvals_section(runs), undo=False), User(answer), mode, ASK)

    assert done.is_error
    assert runs.find(run).status == "waiting"


def test_a_client_that_cannot_ask_its_user_answers_nothing(runs: Runs) -> None:
    """Whatever the model says: arguments of the call are no answer."""
    run = waiting(runs)
    calls = (ASK, {**ASK, "answer": "yes", "approved": True})

    done = use(McpServer(approvals_section(runs), undo=False), None, "auto", *calls)

    assert "there is no one to ask" in said(done[0])
    assert done[1].is_error
    assert runs.find(run).status == "waiting"


@ERAS
def test_an_answer_that_comes_too_late_is_said(runs: Runs, mode: Mode) -> None:
    run = waiting(runs)

    def late(form: object) -> dict[str, str]:
        (request,) = runs.pending(run)
        runs.answer(request.id, approved=False, digest=request.digest)
        return {"answer": "yes"}

    (done,) = use(McpServer(approvals_section(runs), undo=False), User(late), mode, ASK)

    assert ("somebody else has answered" in said(done)) == (mode == "legacy")
    (answer,) = [runs.answered(run, "c1", each) for each in [_digest()]]
    assert answer is not None
    assert not answer.approved


def _digest() -> str:
    return ApprovalRequest(
        tool_name="send_mail", description="Sends a mail.", arguments={"text": "hello"},
        reach="irreversible", call_id="c1", session_id="s",
    ).digest  # fmt: skip
