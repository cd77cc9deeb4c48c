"""``PlanningToolsSection``: a plan that a model makes, updates, and has to finish."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import Field

from weakincentives.contrib.tools.suite import suite_tool
from weakincentives.core.text import counted
from weakincentives.errors import ToolValidationError
from weakincentives.prompt.completion import AnyOf, Custom, PlanDone, TaskCompletionChecker
from weakincentives.prompt.section import Section, SectionOptions
from weakincentives.prompt.tool import Tool, ToolContext, ToolExample
from weakincentives.session.slices import reducer
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.session.session import Session

StepStatus = Literal["pending", "in-progress", "done", "blocked"]

_MARKS: dict[StepStatus, str] = {"pending": " ", "in-progress": ">", "done": "x", "blocked": "!"}

Text = Annotated[str, Field(min_length=1)]


# Events


@dataclass(frozen=True, slots=True)
class SetupPlan:
    """A new plan replaces the old one."""

    objective: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AddSteps:
    """Steps are added to the end of the plan."""

    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """One step changes; None leaves a field as it is."""

    number: int
    status: StepStatus | None = None
    title: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The status of the whole plan changes, until a step changes."""

    status: StepStatus


# The plan


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step and its status."""

    title: str
    status: StepStatus = "pending"
    note: str = ""

    def render(self) -> str:
        note = f" ({self.note})" if self.note else ""
        words = f"{self.title}{note}".split()  # on one line
        return f"[{_MARKS[self.status]}] {' '.join(words)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a task. A STATE slice, so the changes of a failed call are rolled back.

    >>> print(Plan(steps=("Write the test", "Fix the bug")).render())
    Plan: 0 of 2 steps done
    1. [ ] Write the test
    2. [ ] Fix the bug
    """

    steps: tuple[PlanStep, ...] = ()
    """A step may be given as its plain text."""
    objective: str = ""
    status: StepStatus = "pending"
    """Of the whole plan: derived from its steps, or set by an UpdatePlan."""

    if TYPE_CHECKING:
        # A dataclass cannot declare that steps are also accepted as plain texts.
        def __init__(
            self,
            steps: Iterable[PlanStep | str] = (),
            objective: str = "",
            status: StepStatus = "pending",
        ) -> None: ...

    def __post_init__(self) -> None:
        steps: Iterable[PlanStep | str] = self.steps
        if isinstance(steps, str):
            raise TypeError("steps takes a list of steps, got a string")
        made = tuple(PlanStep(each) if isinstance(each, str) else each for each in steps)
        object.__setattr__(self, "steps", made)

    @reducer(on=SetupPlan)
    def set_up(self, event: SetupPlan) -> Plan:
        return Plan(event.steps, event.objective)

    @reducer(on=AddSteps)
    def add_steps(self, event: AddSteps) -> Plan:
        return self._with((*self.steps, *map(PlanStep, event.steps)))

    @reducer(on=UpdateStep)
    def update_step(self, event: UpdateStep) -> Plan:
        if not 1 <= event.number <= len(self.steps):
            raise ValueError(f"the plan has no step {event.number}")
        given = {"status": event.status, "title": event.title, "note": event.note}
        changes: Any = {name: value for name, value in given.items() if value is not None}
        steps = list(self.steps)
        steps[event.number - 1] = replace(steps[event.number - 1], **changes)
        return self._with(tuple(steps))

    @reducer(on=UpdatePlan)
    def update(self, event: UpdatePlan) -> Plan:
        return replace(self, status=event.status)

    def _with(self, steps: tuple[PlanStep, ...]) -> Plan:
        return Plan(steps, self.objective, _overall([step.status for step in steps]))

    def unfinished(self, *, accept_blocked: bool = True) -> tuple[str, ...]:
        """Return the open steps, worded for a model.

        A blocked step whose note gives the reason does not count as open.
        """
        return tuple(
            f"{number}. {step.title} ({step.status})"
            for number, step in enumerate(self.steps, start=1)
            if step.status != "done"
            and not (accept_blocked and step.status == "blocked" and step.note)
        )

    def render(self) -> str:
        """Return the plan as a checklist."""
        done = sum(step.status == "done" for step in self.steps)
        progress = f"{done} of {len(self.steps)} steps done"
        head = f"Plan: {self.objective} ({progress})" if self.objective else f"Plan: {progress}"
        steps = (f"{number}. {step.render()}" for number, step in enumerate(self.steps, start=1))
        return "\n".join([head, *steps])


def _overall(statuses: list[StepStatus]) -> StepStatus:
    """Return the status of a plan whose steps have these."""
    if all(status == "done" for status in statuses):
        return "done"
    if all(status in ("done", "blocked") for status in statuses):
        return "blocked"
    return "pending" if all(status == "pending" for status in statuses) else "in-progress"


def plan_done(*, required: bool = False, accept_blocked: bool = True) -> TaskCompletionChecker:
    """Return a checker that lets a model stop only when its plan is finished.

    Args:
        required: A model without a plan may not stop either.
        accept_blocked: Accept blocked steps whose note gives the reason.
    """
    finished = PlanDone[Plan](Plan, lambda plan: plan.unfinished(accept_blocked=accept_blocked))
    if required:
        return finished
    return AnyOf(Custom(lambda context: context.session[Plan].latest() is None, ""), finished)


# The tools


@dataclass(frozen=True, slots=True)
class SetupPlanParams:
    objective: Text
    """The goal, in one sentence."""
    steps: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Steps in order; each can be finished and checked by itself."""
    replace: bool = False
    """Replace a plan that is not finished."""


@dataclass(frozen=True, slots=True)
class AddStepsParams:
    steps: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Steps to add to the end of the plan."""


@dataclass(frozen=True, slots=True)
class UpdateStepParams:
    step: Annotated[int, Field(ge=1)]
    """Number of the step."""
    status: StepStatus | None = None
    """Its new status."""
    title: Text | None = None
    """Its new text."""
    note: str | None = None
    """The outcome, or why it is blocked."""


def planning_tools() -> tuple[Tool[Any, Any], ...]:
    """Return the tools of the section, for a section of your own."""
    change = partial(suite_tool, reach="reversible", concurrent=True)
    return (
        change(_setup_plan, examples=(_SETUP_EXAMPLE,)),
        change(_add_steps),
        change(_update_step, examples=(_UPDATE_EXAMPLE,)),
        suite_tool(_read_plan, reach="read", concurrent=True),
    )


def _setup_plan(params: SetupPlanParams, *, context: ToolContext) -> ToolResult[Plan]:
    """Make a plan for a task that takes several steps."""
    plan = context.session[Plan].latest()
    if plan is not None and plan.unfinished() and not params.replace:
        raise ToolValidationError(
            f"The current plan is not finished:\n{plan.render()}\n"
            "Continue with it, extend it with add_steps, or set replace=true to replace it"
        )
    return _changed(context, SetupPlan(params.objective, params.steps), "The plan is set up")


def _add_steps(params: AddStepsParams, *, context: ToolContext) -> ToolResult[Plan]:
    """Add steps to the end of the plan."""
    _plan(context)
    added = f"Added {counted(len(params.steps), 'step')}"
    return _changed(context, AddSteps(params.steps), added)


def _update_step(params: UpdateStepParams, *, context: ToolContext) -> ToolResult[Plan]:
    """Change the status, text or note of one step of the plan."""
    plan = _plan(context)
    if params.step > len(plan.steps):
        raise ToolValidationError(
            f"There is no step {params.step}: the plan has {len(plan.steps)}\n{plan.render()}"
        )
    if params.status is None and params.title is None and params.note is None:
        raise ToolValidationError("Nothing to change: give a status, a title or a note")
    if params.status == "blocked" and not (params.note or plan.steps[params.step - 1].note):
        raise ToolValidationError("Give the reason in note, then retry")
    event = UpdateStep(params.step, params.status, params.title, params.note)
    return _changed(context, event, f"Updated step {params.step}")


def _read_plan(params: None, *, context: ToolContext) -> ToolResult[Plan]:
    """Show the plan as a checklist."""
    return ToolResult.ok(_plan(context))


def _plan(context: ToolContext) -> Plan:
    plan = context.session[Plan].latest()
    if plan is None:
        raise ToolValidationError("There is no plan yet. Make one with setup_plan")
    return plan


def _changed(
    context: ToolContext, event: SetupPlan | AddSteps | UpdateStep, message: str
) -> ToolResult[Plan]:
    _install(context.session)
    context.session.dispatch(event)
    plan = _plan(context)
    if plan.steps and not plan.unfinished():
        message += ". All steps are finished"
    return ToolResult.ok(plan, message)


def _install(session: Session) -> None:
    """Register the reducers of a plan in a session."""
    if not session.handles(SetupPlan):
        session.install(Plan)


# The section


class PlanningToolsSection(Section[None]):
    """Guidance and tools to plan, with the current plan in the text.

    ``completion`` is a task-completion checker: give it to the loop, and a model that stops with an
    unfinished plan is told which steps are open.
    """

    def __init__(
        self,
        *,
        session: Session | None = None,
        completion: TaskCompletionChecker | None = None,
        **options: Unpack[SectionOptions[None]],
    ) -> None:
        if session is not None:
            _install(session)
        self.completion = completion or plan_done()
        options.setdefault("title", "Planning")
        options["tools"] = (*planning_tools(), *options.get("tools", ()))
        super().__init__(**options)

    def body(self, params: None, session: Session | None) -> str:
        plan = None if session is None else session[Plan].latest()
        return _GUIDANCE if plan is None else f"{_GUIDANCE}\n\n{plan.render()}"


_GUIDANCE = """\
Use a plan for a task that takes three or more steps, or when you are asked for one. A single \
answer or call needs no plan.

- Start with `setup_plan`: the objective, and steps that can each be finished and checked.
- Set a step to `in-progress` with `update_step` before you work on it, one at a time, and to \
`done` as soon as it is finished and checked: not before, and not several at the end.
- Set a step that you cannot finish to `blocked`, with the reason in the note.
- Add missing steps with `add_steps`. See the plan with `read_plan`.
- Do not stop while steps are `pending` or `in-progress`: finish them first."""

_SETUP_EXAMPLE = ToolExample[SetupPlanParams, Plan](
    description="Plan the repair of a bug",
    input=SetupPlanParams(
        "Fix the wrong total", ("Write a test that fails", "Fix the sum", "Run all tests")
    ),
    output=Plan(("Write a test that fails", "Fix the sum", "Run all tests"), "Fix the wrong total"),
)
_UPDATE_EXAMPLE = ToolExample[UpdateStepParams, Plan](
    description="Report that a step cannot be finished",
    input=UpdateStepParams(2, "blocked", note="no access to the repository"),
    output=Plan(
        (PlanStep("Tag", "done"), PlanStep("Publish", "blocked", "no access to the repository")),
        "Release 1.2",
        "blocked",
    ),
)
