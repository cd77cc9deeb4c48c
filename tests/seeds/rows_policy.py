"""The Policy spec, row by row."""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

from seed_names import FILE_TOOLS, noop_tool, tool_of
from seed_rows import Row, promise, seed_rows
from seed_scenarios import Model

from weakincentives.filesystem import Filesystem
from weakincentives.prompt import (
    MarkdownSection,
    PolicyDecision,
    PolicyState,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    ToolContext,
    ToolResult,
)
from weakincentives.runtime import Session, ToolInvoked, create_snapshot, restore_snapshot
from weakincentives.testing import make_vfs

AFTER_TEST = SequentialDependencyPolicy(dependencies={"deploy": frozenset({"test"})})


def shop(*policies: object) -> Model:
    return Model.offered(noop_tool("test"), noop_tool("deploy"), policies=policies or [AFTER_TEST])


class Noting:
    """A policy in the full form, which notes what it is asked and told."""

    name = "noting"

    def __init__(self, decision: PolicyDecision | None = None) -> None:
        self.decision = decision or PolicyDecision(allowed=True)
        self.asked: list[tuple[str, object]] = []
        self.told: list[tuple[str, bool]] = []
        self.threads: list[int] = []

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        self.threads.append(threading.get_ident())
        assert isinstance(context, ToolContext)
        self.asked.append((tool.name, params))
        return self.decision

    def on_result(
        self, tool: Any, params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        self.told.append((tool.name, result.success))


@promise("004", "Guiding Principles", "Prompt-scoped declaration: Bound to prompts alongside tools")
def declared_with_tools(row: Row) -> None:
    """The same tools in a prompt without the policy are free of it."""
    assert not shop().call("deploy").success
    assert Model.offered(noop_tool("test"), noop_tool("deploy")).call("deploy").success
    for policies in ({"policies": [AFTER_TEST]}, {}):
        tools = [noop_tool("test"), noop_tool("deploy")]
        section = MarkdownSection(title="S", tools=tools)
        model = Model(Prompt(PromptTemplate(sections=[section], **policies)))
        assert model.call("deploy").success is not bool(policies)


@promise("004", "Guiding Principles", "Session-scoped state: Invocation history in session slices")
def history_in_slices(row: Row) -> None:
    model = shop()
    assert model.session[PolicyState].all() == ()
    model.call("test")
    assert "test" in {t for state in model.session[PolicyState].all() for t in state.invoked_tools}


@promise(
    "004",
    "Guiding Principles",
    "Composable: Multiple policies can govern same tool; all must allow",
)
def all_must_allow(row: Row) -> None:
    for first, second in [(True, True), (True, False), (False, True)]:
        policies = [Noting(PolicyDecision(allowed, "no")) for allowed in (first, second)]
        assert shop(*policies).call("deploy").success is (first and second)
    model = shop(AFTER_TEST, QuotaPolicy(max_calls=1))
    assert model.call("test").success
    assert model.call("deploy").message == "Quota exceeded: 1/1 calls used"


@promise("004", "Guiding Principles", "Fail-closed: Denied calls return error without executing")
def denied_without_executing(row: Row) -> None:
    model = shop(Noting(PolicyDecision.deny("not today")))
    result = model.call("deploy")
    assert (result.success, result.message) == (False, "not today")
    (record,) = model.session[ToolInvoked].all()
    assert not record.ran


@promise("004", "ToolPolicy Protocol", "name")
def unique_name(row: Row) -> None:
    """A denial is on record under it, and two policies of other names remember apart."""
    model = shop(Noting(PolicyDecision.deny("no")))
    model.call("deploy")
    assert model.session[ToolInvoked].all()[0].denied_by == "noting"
    other = SequentialDependencyPolicy(dependencies=AFTER_TEST.dependencies, name="other")
    both = shop(AFTER_TEST, other)
    both.call("test")
    names = [state.policy_name for state in both.session[PolicyState].all()]
    assert sorted(names) == ["other", "sequential_dependency"]


@promise("004", "ToolPolicy Protocol", "check(tool, params, , context)")
def check_decides(row: Row) -> None:
    policy = Noting()
    assert shop(policy).call("deploy").success
    assert policy.asked == [("deploy", None)]


@promise("004", "ToolPolicy Protocol", "on_result(tool, params, result, , context)")
def told_of_successes(row: Row) -> None:
    """Of those that are kept, and of no others."""
    policy = Noting()
    model = shop(policy)
    model.call("deploy", unknown=1)
    model.call("deploy")
    assert policy.told == [("deploy", True)]


@promise("004", "PolicyDecision", "allowed")
def allowed_or_not(row: Row) -> None:
    for allowed in (True, False):
        assert shop(Noting(PolicyDecision(allowed))).call("deploy").success is allowed


@promise("004", "PolicyDecision", "reason")
def reason_of_a_denial(row: Row) -> None:
    assert PolicyDecision(allowed=True).reason is None
    assert shop(Noting(PolicyDecision(False, "because"))).call("deploy").message == "because"


@promise("004", "PolicyState (Session Slice)", "policy_name")
def named_state(row: Row) -> None:
    """The first of the three fields, and there are no others."""
    rows = [each.name for each in seed_rows() if each.heading == row.heading]
    assert [each.name for each in fields(PolicyState)] == rows
    model = shop()
    model.call("test")
    (state,) = model.session[PolicyState].all()
    assert state.policy_name == AFTER_TEST.name


@promise("004", "PolicyState (Session Slice)", "invoked_tools")
def invoked_tools(row: Row) -> None:
    """Those that succeeded, without what was denied."""
    model = shop()
    model.call("deploy")
    model.call("test")
    (state,) = model.session[PolicyState].all()
    assert frozenset(state.invoked_tools) == {"test"}


@promise("004", "PolicyState (Session Slice)", "invoked_keys")
def invoked_keys(row: Row) -> None:
    """Pairs of a tool and what it was about, however the path was spelled."""
    assert row.cells[1] == "(tool, key) pairs"
    model = Model.offered(
        FILE_TOOLS["read_file"],
        FILE_TOOLS["write_file"],
        policies=[ReadBeforeWritePolicy()],
        resources={Filesystem: make_vfs({"a.txt": "a", "b.txt": "b"})},
    )
    model.call("read_file", path="/workspace/a.txt")
    model.call("write_file", path="./new.txt", content="new")
    model.call("write_file", path="b.txt", content="denied")
    (state,) = model.session[PolicyState].all()
    assert frozenset(state.invoked_keys) == {("read_file", "a.txt"), ("write_file", "new.txt")}
    assert frozenset(state.invoked_tools) == {"read_file", "write_file"}


@promise("004", "State Management", "Snapshot/restore: State captured with session snapshots")
def follows_snapshots(row: Row) -> None:
    model = shop()
    before = model.session.snapshot()
    model.call("test")
    assert model.call("deploy").success
    model.session.restore(before)
    assert not model.call("deploy").success

    checkpoint = create_snapshot(model.session, model.prompt.resources, tag="checkpoint")
    model.call("test")
    restore_snapshot(model.session, model.prompt.resources, checkpoint)
    assert not model.call("deploy").success


@promise("004", "State Management", "Reset: session.reset() clears policy state")
def cleared_by_reset(row: Row) -> None:
    model = shop()
    model.call("test")
    model.session.reset()
    assert model.session[PolicyState].all() == ()
    assert not model.call("deploy").success


@promise("004", "State Management", "Isolation: Each session has independent state")
@promise("004", "Limitations", "Session-scoped: No cross-session persistence")
def sessions_apart(row: Row) -> None:
    model = shop()
    model.call("test")
    other = Model(model.prompt, Session())
    assert other.session[PolicyState].all() == ()
    assert not other.call("deploy").success


@promise("004", "Limitations", "Synchronous: Policy checks run on tool execution thread")
def on_the_calling_thread(row: Row) -> None:
    """On the thread of the handler, unless that has one of its own because of its time limit."""
    for timeout in (None, 60.0):
        policy, ran = Noting(), []

        def work(params: None, *, context: ToolContext, ran: Any = ran) -> ToolResult[None]:
            ran.append(threading.get_ident())
            return ToolResult.ok()

        work_tool = tool_of(work, "work", None, None).replace(timeout=timeout)
        assert Model.offered(work_tool, policies=[policy]).call("work").success
        assert len(policy.threads) == len(ran) == 1
        assert (policy.threads == ran) is (timeout is None)
        assert (ran == [threading.get_ident()]) is (timeout is None)


@promise("004", "Limitations", "No rollback notification: Policies not notified on restore")
def not_told_of_restores(row: Row) -> None:
    """What it remembers in the session follows by itself."""
    policy = Noting()
    model = shop(policy)
    before = model.session.snapshot()
    model.call("test")
    model.session.restore(before)
    assert policy.told == [("test", True)]
