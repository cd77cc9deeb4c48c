"""A refused call runs nothing and prepares nothing: no transaction, no view, no snapshot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from small_world import AddStep, Noted, Plan, Step, World, make_tool

from weakincentives.errors import ToolValidationError
from weakincentives.filesystem import Filesystem
from weakincentives.prompt import PolicyDecision, ToolContext
from weakincentives.retry import RetryPolicy
from weakincentives.runtime import Session, ToolCall, ToolInvoked, call_under_way, execute_tools


class Forked:
    """A user's resource that counts how often a call prepared itself to change it."""

    def __init__(self) -> None:
        self.prepared: list[str] = []

    def snapshot(self) -> None:
        self.prepared.append("snapshot")

    def restore(self, token: None) -> None:
        pass

    def fork(self) -> Forked:
        self.prepared.append("fork")
        return copy.copy(self)

    def merge(self, view: Forked) -> None:
        pass


class Check:
    """A policy that does something and then denies."""

    name = "check"

    def __init__(self, does: Callable[[ToolContext], object] = lambda context: None) -> None:
        self.does = does
        self.calls: list[str] = []

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        call = call_under_way()
        assert call is not None
        self.calls.append(call.id)
        self.does(context)
        return PolicyDecision.deny("no")


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    made: list[Session] = []
    fork = Session.fork

    def counted(self: Session, **options: Any) -> Session:
        made.append(self)
        return fork(self, **options)

    monkeypatch.setattr(Session, "fork", counted)
    return made


def world(policy: Check, **resources: Any) -> World:
    return World(
        [make_tool("work", lambda p, c: None)],
        [policy],
        resources={Forked: Forked(), **resources},
    )


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("work", {"name": "a"}, id="c1"),
        ToolCall("work", {"nome": "a"}, id="c1"),
        ToolCall("walk", {"name": "a"}, id="c1"),
    ],
    ids=["denied", "bad arguments", "unknown"],
)
def test_a_refused_call_makes_no_view_and_no_snapshot(call: ToolCall, forks: list[Session]):
    policy = Check(lambda context: context.session[Plan].all())
    w = world(policy)

    [result] = execute_tools([call], session=w.session, prompt=w.prompt)

    assert not result.success
    assert forks == []
    assert w.prompt.resources.get(Forked).prepared == []
    [record] = w.session[ToolInvoked].all()
    assert (record.call_id, record.ran, record.success) == ("c1", False, False)


@pytest.mark.parametrize(
    "writes",
    [
        lambda c: c.session.dispatch(AddStep("checked")),
        lambda c: c.resources.get(Filesystem).write("checked.txt", "x"),
        lambda c: make_tool("other", lambda p, c: None)(Step("checked"), context=c),
    ],
    ids=["session", "files", "tool"],
)
def test_what_a_policy_changes_before_it_denies_is_undone(writes: Callable[[ToolContext], object]):
    w = world(Check(writes))

    assert not w.call("work").success

    plan, files, _ = w.state()
    assert (plan, files) == (Plan(), {})
    own = [each for each in w.records if each.tool_name == "work"]
    assert [each.ran for each in own] == [False]


def test_what_a_policy_logs_before_it_denies_stays(forks: list[Session]):
    w = world(Check(lambda context: context.session.dispatch(Noted("asked"))))

    assert not w.call("work").success

    assert w.session[Noted].all() == (Noted("asked"),)


# Which policies were asked


class Says:
    """A policy that answers with a reason to deny, with nothing, or with an error."""

    def __init__(self, name: str, answer: str | Exception | None = None) -> None:
        self.name = name
        self.answer = answer

    def check(self, tool_name: str, params: Any, context: ToolContext) -> str | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Elsewhere(Says):
    """One that is about no tool here."""

    def applies_to(self, tool: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("answers", "asked", "denied_by"),
    [
        ({"a": None, "b": None}, ("a", "b"), ""),
        ({"a": None, "b": "no", "c": None}, ("a", "b"), "b"),
        ({"a": ValueError("unsure"), "b": None}, ("a",), "a"),
        ({}, (), ""),
    ],
)
def test_the_record_names_the_policies_that_were_asked_in_order(
    answers: dict[str, Any], asked: tuple[str, ...], denied_by: str
):
    policies = [Elsewhere("other"), *(Says(name, answer) for name, answer in answers.items())]
    world = World([make_tool("work", lambda *_: None)], policies=policies)

    world.call("work")

    (record,) = world.records
    assert (record.policies, record.denied_by) == (asked, denied_by)


def test_two_policies_of_one_name_are_both_on_record():
    policies = [Says("a"), Says("a", "no"), Says("a")]
    world = World([make_tool("work", lambda *_: None)], policies=policies)

    world.call("work")

    assert [each.policies for each in world.records] == [("a", "a")]


def test_a_call_that_was_retried_names_the_policies_that_admitted_it():
    tries: list[int] = []

    def fail_once(*_: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ToolValidationError("not yet")

    tool = make_tool("work", fail_once, reach="reversible", retry=RetryPolicy(max_retries=1))
    world = World([tool], policies=[Says("a")])

    assert world.call("work").success
    assert [each.policies for each in world.records] == [("a",)]


def test_a_call_that_is_not_parsed_has_asked_nobody():
    world = World([make_tool("work", lambda *_: None)], policies=[Says("a")])

    world.call("work", unknown=1)

    assert [each.policies for each in world.records] == [()]
