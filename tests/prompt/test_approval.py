from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from weakincentives import Tool, ToolContext, ToolResult
from weakincentives.errors import Suspended
from weakincentives.prompt import (
    Approval,
    ApprovalPolicy,
    ApprovalRequest,
    MarkdownSection,
    Prompt,
    PromptTemplate,
)
from weakincentives.runtime import Session, ToolCall, ToolInvoked, execute_tool, execute_tools


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
    with pytest.raises(TypeError, match="sets of names"):
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
