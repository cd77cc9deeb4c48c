from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from file_agent import Agent

import weakincentives as wink
from weakincentives.contrib.tools import (
    Plan,
    PlanningToolsSection,
    PlanStep,
    UpdatePlan,
    plan_done,
    planning_tools,
)
from weakincentives.prompt import PromptTemplate, check_completion
from weakincentives.prompt.completion import FilesExist
from weakincentives.runtime import Session, Snapshot, ToolInvoked
from weakincentives.testing import make_context, make_session

SETUP: Mapping[str, object] = {"objective": "Fix it", "steps": ["Test", "Repair"]}


def agent_for(session: Session | None = None, *others: Any) -> Agent:
    sections = [PlanningToolsSection(), *others]
    return Agent(wink.Prompt(PromptTemplate(sections=sections)), session or make_session())


@pytest.fixture
def agent() -> Agent:
    """An agent that has made a plan of two steps."""
    agent = agent_for()
    agent.call("setup_plan", **SETUP)
    return agent


def plan_of(agent: Agent) -> Plan:
    plan = agent.session[Plan].latest()
    assert plan is not None
    return plan


def test_a_plan_is_set_up_and_shown_as_a_checklist():
    agent = agent_for()

    result = agent.call("setup_plan", **SETUP)

    assert result.render() == (
        "The plan is set up\nPlan: Fix it (0 of 2 steps done)\n1. [ ] Test\n2. [ ] Repair"
    )
    assert agent.session[Plan].all() == (Plan(("Test", "Repair"), "Fix it"),)


def test_steps_are_added_updated_and_read(agent: Agent):
    agent.call("add_steps", steps=["Deploy", "Tell"])
    agent.call("update_step", step=1, status="done", note="it failed as it should")
    agent.call("update_step", step=2, status="in-progress")
    agent.call("update_step", step=3, status="blocked", note="no access")
    agent.call("update_step", step=4, title="Tell the others")

    assert agent.call("read_plan").render() == (
        "Plan: Fix it (1 of 4 steps done)\n"
        "1. [x] Test (it failed as it should)\n"
        "2. [>] Repair\n"
        "3. [!] Deploy (no access)\n"
        "4. [ ] Tell the others"
    )
    assert len(agent.session[Plan].all()) == 1


@pytest.mark.parametrize(
    ("statuses", "overall"),
    [
        (["pending", "pending"], "pending"),
        (["in-progress", "pending"], "in-progress"),
        (["done", "pending"], "in-progress"),
        (["done", "blocked"], "blocked"),
        (["done", "done"], "done"),
    ],
)
def test_the_plan_has_the_status_of_its_steps(agent: Agent, statuses: list[str], overall: str):
    for number, status in enumerate(statuses, start=1):
        agent.call("update_step", step=number, status=status, note="because")

    assert plan_of(agent).status == overall


def test_the_last_step_done_is_said(agent: Agent):
    assert agent.call("update_step", step=1, status="done").message == "Updated step 1"
    assert agent.call("update_step", step=2, status="done").message == (
        "Updated step 2. All steps are finished"
    )


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("update_step", {"step": 3, "status": "done"}, "There is no step 3: the plan has 2\nPlan:"),
        ("update_step", {"step": 1}, "Nothing to change"),
        (
            "update_step",
            {"step": 1, "status": "blocked"},
            "Give the reason in note",
        ),
        ("update_step", {"step": 0, "status": "done"}, "Invalid parameters"),
        ("update_step", {"step": 1, "status": "finished"}, "in-progress"),
        ("setup_plan", SETUP, "The current plan is not finished:\nPlan: Fix it"),
        ("add_steps", {"steps": []}, "Invalid parameters"),
        ("add_steps", {"steps": [""]}, "Invalid parameters"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    agent: Agent, tool: str, arguments: Mapping[str, object], said: str
):
    before = plan_of(agent)

    result = agent.call(tool, **arguments)

    assert not result.success
    assert said in result.message
    assert plan_of(agent) == before


def test_a_plan_is_given_up_only_when_that_is_asked_for_or_it_is_finished(agent: Agent):
    assert agent.call("setup_plan", **SETUP, replace=True).success
    for step in (1, 2):
        agent.call("update_step", step=step, status="done")
    assert agent.call("setup_plan", objective="Next", steps=["One"]).success
    assert plan_of(agent) == Plan(("One",), "Next")


@pytest.mark.parametrize("tool", ["add_steps", "update_step", "read_plan"])
def test_without_a_plan_the_model_is_told_to_make_one(tool: str):
    arguments = {"add_steps": {"steps": ["a"]}, "update_step": {"step": 1, "note": "x"}}

    result = agent_for().call(tool, **arguments.get(tool, {}))

    assert result.message == "There is no plan yet. Make one with setup_plan"


# What the Chapter shows


def test_steps_may_be_plain_texts():
    plan = Plan(steps=("step1",))

    assert plan == Plan(steps=[PlanStep("step1")])
    assert Plan(steps=(*plan.steps, "step2")).steps == (PlanStep("step1"), PlanStep("step2"))
    with pytest.raises(TypeError, match="a list of steps"):
        Plan(steps="step1")


def test_an_event_changes_the_status_of_the_whole_and_a_failed_call_takes_it_back():
    session = make_session()
    PlanningToolsSection(session=session)
    session[Plan].seed(Plan(steps=("step1",)))

    @wink.tool(reach="reversible")
    def risky(fail: bool, *, context: wink.ToolContext) -> str:
        """Begin, and perhaps fail."""
        context.session.dispatch(UpdatePlan(status="in-progress"))
        if fail:
            raise ValueError("Simulated failure")
        return "done"

    context = make_context(session=session)
    assert not risky(fail=True, context=context).success
    assert session[Plan].all() == (Plan(steps=("step1",)),)
    assert risky(fail=False, context=context).success
    assert session[Plan].all() == (Plan(steps=("step1",), status="in-progress"),)


def test_every_step_is_one_line_of_the_checklist():
    plan = Plan([PlanStep("one\n2. [x] two", note="a\tb")])

    assert plan.render() == "Plan: 0 of 1 steps done\n1. [ ] one 2. [x] two (a b)"


def test_a_plan_survives_being_written_down(agent: Agent):
    agent.call("update_step", step=1, status="blocked", note="no access")

    text = agent.session.snapshot().to_json()
    again = Session.from_snapshot(Snapshot.from_json(text, types=[Plan, ToolInvoked]))

    assert again[Plan].all() == agent.session[Plan].all()


# Several calls


def test_work_that_fails_in_the_middle_leaves_the_plan_as_it_was(agent: Agent):
    @wink.tool(reach="reversible")
    def all_at_once(*, context: wink.ToolContext) -> str:
        """Do everything, then fail."""
        for name, arguments in [
            ("update_step", {"step": 1, "status": "done"}),
            ("add_steps", {"steps": ["More"]}),
        ]:
            assert wink.execute_tool(wink.ToolCall(name, arguments), context=context).success
        raise ValueError("on purpose")

    before = plan_of(agent)
    section = wink.MarkdownSection(title="All", template="", tools=[all_at_once])
    agent = agent_for(agent.session, section)

    assert agent.call("all_at_once").message == "on purpose"
    assert plan_of(agent) == before


def test_calls_of_one_turn_all_count(agent: Agent):
    results = agent.turn(
        ("update_step", {"step": 1, "status": "done"}),
        ("add_steps", {"steps": ["Deploy"]}),
        ("update_step", {"step": 3, "status": "in-progress"}),
        ("add_steps", {"steps": ["Tell"]}),
        ("read_plan", {}),
    )

    assert all(result.success for result in results)
    assert [step.status for step in plan_of(agent).steps] == [
        "done",
        "pending",
        "in-progress",
        "pending",
    ]
    assert results[-1].value == plan_of(agent)


# Being held to it


def completion_of(agent: Agent, **options: Any) -> tuple[bool, str]:
    context = make_context(session=agent.session)
    result = check_completion(plan_done(**options), context)
    return result.done, result.reason


def test_a_model_that_stops_too_early_is_sent_back_with_what_is_left(agent: Agent):
    agent.call("update_step", step=1, status="in-progress")

    assert completion_of(agent) == (
        False,
        "Unfinished steps: 1. Test (in-progress); 2. Repair (pending)",
    )
    for step in (1, 2):
        agent.call("update_step", step=step, status="done")
    assert completion_of(agent)[0]


def test_a_step_that_is_blocked_with_a_reason_lets_a_model_stop(agent: Agent):
    agent.call("update_step", step=1, status="done")
    agent.call("update_step", step=2, status="blocked", note="no access")

    assert completion_of(agent)[0]
    assert completion_of(agent, accept_blocked=False) == (
        False,
        "Unfinished steps: 2. Repair (blocked)",
    )


def test_a_blocked_step_without_a_reason_is_not_finished():
    agent = agent_for()
    agent.session[Plan].seed(Plan([PlanStep("a", "blocked")]))

    assert completion_of(agent) == (False, "Unfinished steps: 1. a (blocked)")


def test_a_task_without_a_plan_is_done_unless_one_is_required():
    agent = agent_for()

    assert completion_of(agent) == (True, "")
    assert completion_of(agent, required=True) == (False, "There is no Plan yet")


def test_the_section_brings_the_check_along():
    session = make_session()
    section = PlanningToolsSection(session=session)
    session[Plan].seed(Plan(steps=("step1",)))

    assert not section.completion.check(make_context(session=session)).done
    other = FilesExist(["a"])
    assert PlanningToolsSection(completion=other).completion is other


# What the model is told


def test_the_text_says_when_to_plan_and_shows_the_plan_as_it_is(agent: Agent):
    assert "Use a plan for a task that takes three or more steps" in agent.rendered.text
    assert "[ ]" not in agent.rendered.text
    agent.call("update_step", step=1, status="done")

    assert agent.prompt.render(agent.session).text.endswith(
        "Plan: Fix it (1 of 2 steps done)\n1. [x] Test\n2. [ ] Repair"
    )


def test_every_tool_says_how_far_it_reaches():
    assert [(tool.name, tool.reach, tool.concurrent) for tool in planning_tools()] == [
        ("setup_plan", "reversible", True),
        ("add_steps", "reversible", True),
        ("update_step", "reversible", True),
        ("read_plan", "read", True),
    ]
