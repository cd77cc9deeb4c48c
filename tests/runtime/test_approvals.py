"""Approvals by another process: the first answer counts, once, and for exactly what was shown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.errors import AnswerRefused
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import Approval, ApprovalPolicy, MarkdownSection, Prompt, PromptTemplate
from weakincentives.prompt.approval import ApprovalRequest, CallPreview
from weakincentives.runtime import (
    ApprovalDesk,
    PendingApproval,
    SavedSession,
    ToolInvoked,
    answer_approval,
    pending_approvals,
)
from weakincentives.runtime.approvals import Question
from weakincentives.runtime.calls import begin_run

REQUEST = ApprovalRequest(
    tool_name="pay",
    description="Pay.",
    arguments={"amount": 3, "to": ["ü", None]},
    reach="irreversible",
    call_id="c1",
    session_id="s",
    preview=CallPreview(diff="+a\n", facts={"network": "none"}, paths=("a",), state="1"),
    policy_name="approval",
)


class Office:
    """A run in progress on a workspace, and its desk."""

    def __init__(self, root: Path, saved: SavedSession) -> None:
        self.root = root
        self.saved = saved
        self.desk = ApprovalDesk(saved.path)
        self.folder = saved.path.with_suffix(".approvals")

    def pending(self) -> PendingApproval:
        (found,) = pending_approvals(self.root)
        return found


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    root = tmp_path / "project"
    root.mkdir()
    with HostFilesystem(root) as files, begin_run(files.store, {"kind": "run"}) as saved:
        yield Office(root, saved)


def until(done: Any) -> None:
    """Wait for another thread or process."""
    late = SYSTEM_CLOCK.monotonic() + 120
    while not done():
        assert SYSTEM_CLOCK.monotonic() < late, "it did not happen"
        threading.Event().wait(0.01)


def test_a_request_is_seen_by_others_as_long_as_it_is_open(office: Office):
    assert pending_approvals(office.root) == ()
    with office.desk.asking(REQUEST):
        found = office.pending()
        assert (found.run.id, found.request) == (office.saved.path.stem, REQUEST)
        assert found.digest == REQUEST.digest
        assert found.is_open
    assert pending_approvals(office.root) == ()
    assert not found.is_open
    assert list(office.folder.iterdir()) == []


@pytest.mark.parametrize(
    "answer",
    [
        Approval(True, "ann"),
        Approval(False, "ann", "not today"),
        Approval(True, "ann", arguments={"amount": 1}),
    ],
)
def test_an_answer_arrives_as_it_was_given(office: Office, answer: Approval):
    with office.desk.asking(REQUEST) as question:
        assert not question.is_answered
        answer_approval(
            office.pending(),
            approved=answer.approved,
            digest=REQUEST.digest,
            reason=answer.reason,
            arguments=answer.arguments,
            by="ann",
        )
        assert question.is_answered
        assert pending_approvals(office.root) == ()
        assert question.settle(Approval(True, "too late")) == answer


def test_without_a_name_the_answer_is_from_this_user(office: Office):
    with office.desk.asking(REQUEST) as question:
        answer_approval(office.pending(), approved=True)
        assert question.settle().by


def test_what_is_answered_here_cannot_be_answered_elsewhere(office: Office):
    with office.desk.asking(REQUEST) as question:
        found = office.pending()
        assert question.settle(Approval(True, "me")) == Approval(True, "me")
        with pytest.raises(AnswerRefused, match="somebody else"):
            answer_approval(found, approved=False)
        assert question.settle() == Approval(True, "me")


def test_of_many_answers_at_once_exactly_one_counts(office: Office):
    for _ in range(20):
        with office.desk.asking(REQUEST) as question:
            found, ready = office.pending(), threading.Barrier(9)

            def give(name: str, found: PendingApproval, ready: threading.Barrier) -> str:
                ready.wait()
                try:
                    answer_approval(found, approved=True, by=name)
                except AnswerRefused:
                    return ""
                return name

            def here(question: Question, ready: threading.Barrier) -> str:
                ready.wait()
                own = Approval(False, "here")
                return "here" if question.settle(own) is own else ""

            with ThreadPoolExecutor(9) as pool:
                given = [pool.submit(give, f"n{n}", found, ready) for n in range(8)]
                given.append(pool.submit(here, question, ready))
                told = [each.result() for each in given if each.result()]
            assert told == [question.settle().by]


def test_an_answer_after_the_end_is_refused(office: Office):
    with office.desk.asking(REQUEST):
        found = office.pending()

    with pytest.raises(AnswerRefused, match="no longer waits"):
        answer_approval(found, approved=True)
    assert list(office.folder.glob("*/*")) == []


def test_an_answer_to_something_else_is_refused(office: Office):
    with office.desk.asking(REQUEST) as question:
        with pytest.raises(AnswerRefused, match="look at it again"):
            answer_approval(office.pending(), approved=True, digest="0" * 64)
        other = replace(REQUEST, arguments={"amount": 4})
        answer_approval(replace(office.pending(), request=other), approved=True)

        assert question.settle() == Approval(False, reason="the answer was invalid")


def answered(office: Office) -> bytes:
    """Return the content of an answer."""
    with office.desk.asking(REQUEST):
        found = office.pending()
        answer_approval(found, approved=True)
        return (office.folder / found.id / "answer").read_bytes()


@pytest.mark.parametrize("content", [b"", b"garbage", b'{"approved": true}'])
def test_a_forged_answer_denies(office: Office, content: bytes):
    with office.desk.asking(REQUEST) as question:
        (office.folder / office.pending().id / "answer").write_bytes(content)

        assert question.settle(Approval(True)) == Approval(False, reason="the answer was invalid")


def test_an_old_answer_does_not_count_for_the_same_question_again(office: Office):
    old = answered(office)
    with office.desk.asking(REQUEST) as question:
        (office.folder / office.pending().id / "answer").write_bytes(old)

        assert not question.settle().approved


def test_a_forged_request_is_not_shown(office: Office):
    with office.desk.asking(REQUEST):
        found = office.pending()
        request = (office.folder / found.id / "request").read_bytes()
        for name in ("0" * 32, "x"):
            (office.folder / name).mkdir()
            (office.folder / name / "request").write_bytes(request)

        assert office.pending() == found


def pay_prompt(desk: ApprovalDesk, **options: Any) -> Prompt[Any]:
    @wink.tool
    def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    policy = ApprovalPolicy(ask=desk.ask, **options)
    return Prompt(PromptTemplate(sections=[MarkdownSection(tools=[pay], policies=[policy])]))


def test_a_program_waits_for_another_one(office: Office):
    """`ApprovalPolicy(ask=desk.ask)` in a library user's program, answered from another thread."""
    prompt, session = pay_prompt(office.desk), office.saved.session
    prompt.render(session)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(
            wink.execute_tool, wink.ToolCall("pay", {"amount": 3}), session=session, prompt=prompt
        )
        until(lambda: pending_approvals(office.root))
        answer_approval(office.pending(), approved=True, arguments={"amount": 2}, by="ann")
        result = calling.result(120)

    assert result.value == "paid 2"
    record = session[ToolInvoked].latest()
    assert record is not None
    assert record.notes == ("approval: approved by ann", "the arguments were edited")


def test_a_question_that_timed_out_is_withdrawn(office: Office):
    prompt = pay_prompt(office.desk, timeout=0.3)
    prompt.render(office.saved.session)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(
            wink.execute_tool,
            wink.ToolCall("pay", {"amount": 3}),
            session=office.saved.session,
            prompt=prompt,
        )
        result = calling.result(120)

    assert result.message == "Call to 'pay' was not approved: no answer within 0.3 s"
    assert pending_approvals(office.root) == ()


def test_a_cancelled_question_is_withdrawn(office: Office):
    async def main() -> None:
        asking = asyncio.create_task(office.desk.ask(REQUEST))
        while not pending_approvals(office.root):
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(main())

    assert pending_approvals(office.root) == ()


_CHILD = """
import asyncio, json, sys
from pathlib import Path
from weakincentives.runtime import ApprovalDesk, SavedSession
from weakincentives.serde import thaw
import weakincentives.prompt.approval
path, request = Path(sys.argv[1]), thaw(json.loads(sys.argv[2]))
with SavedSession.open(path):
    print(asyncio.run(ApprovalDesk(path).ask(request)).by, flush=True)
"""


@contextmanager
def killed(child: subprocess.Popen[Any]) -> Generator[None]:
    """Do not wait for a process if the test has failed."""
    try:
        yield
    except BaseException:
        child.kill()
        raise


def test_what_a_killed_run_has_left_is_dead_and_goes_with_the_next_question(tmp_path: Path):
    from weakincentives.serde import freeze

    root = tmp_path / "project"
    root.mkdir()
    with HostFilesystem(root) as files, begin_run(files.store, {"kind": "run"}) as saved:
        path = saved.path
    argv = [sys.executable, "-c", _CHILD, str(path), json.dumps(freeze(REQUEST))]
    with subprocess.Popen(argv) as child, killed(child):
        until(lambda: pending_approvals(root))
        (found,) = pending_approvals(root)
        child.send_signal(signal.SIGKILL)
    assert pending_approvals(root) == ()
    with pytest.raises(AnswerRefused, match="no longer waits"):
        answer_approval(found, approved=True)

    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child, killed(child):
        until(lambda: pending_approvals(root))
        (again,) = pending_approvals(root)
        with pytest.raises(AnswerRefused, match="no longer waits"):
            answer_approval(found, approved=True)
        answer_approval(again, approved=True, by="ann")
        assert child.stdout is not None
        assert child.stdout.read() == "ann\n"
    assert again.id != found.id
    assert os.listdir(path.with_suffix(".approvals")) == []


def test_only_this_user_can_reach_the_files(office: Office):
    with office.desk.asking(REQUEST):
        for path in (office.folder, *office.folder.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0


def test_the_files_go_with_the_run(office: Office):
    with office.desk.asking(REQUEST):
        pass
    office.saved.close()

    assert SavedSession.delete(office.saved.path)
    assert not office.folder.exists()
