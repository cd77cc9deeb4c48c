"""``PlanningToolsSection``: a plan that a model makes, keeps up to date, and is held to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import Field

from weakincentives.errors import ToolValidationError
from weakincentives.prompt.completion import AnyOf, Custom, PlanDone, TaskCompletionChecker
from weakincentives.prompt.section import Section, SectionOptions
from weakincentives.prompt.tool import Tool, ToolContext, ToolExample
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.slices import reducer

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session

StepStatus = Literal["pending", "in-progress", "done", "blocked"]

_MARKS: dict[StepStatus, str] = {"pending": " ", "in-progress": ">", "done": "x", "blocked": "!"}

Text = Annotated[str, Field(min_length=1)]


# What happens to a plan


@dataclass(frozen=True, slots=True)
class SetupPlan:
    """A plan takes the place of the one there was."""

    objective: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AddSteps:
    """Steps come at the end of the plan."""

    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """One step changes; what is None stays as it is."""

    number: int
    status: StepStatus | None = None
    title: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The status of the plan as a whole changes, until a step does."""

    status: StepStatus


# The plan


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step, and how far it is."""

    title: str
    status: StepStatus = "pending"
    note: str = ""

    def render(self) -> str:
        note = f" ({self.note})" if self.note else ""
        words = f"{self.title}{note}".split()  # on one line, whatever is in it
        return f"[{_MARKS[self.status]}] {' '.join(words)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done, step by step: a STATE slice, so a failed call takes its changes back.

    >>> print(Plan(steps=("Write the test", "Fix the bug")).render())
    Plan: 0 of 2 steps done
    1. [ ] Write the test
    2. [ ] Fix the bug
    """

    steps: tuple[PlanStep, ...] = ()
    """A step may be given as its plain text."""
    objective: str = ""
    status: StepStatus = "pending"
    """That of the whole: as its steps are, or as an UpdatePlan said last."""

    if TYPE_CHECKING:
        # Says what dataclasses cannot: steps are taken in more forms than they are given.
        def __init__(
            self,
            steps: Iterable[PlanStep | str] = (),
            objective: str = "",
            status: StepStatus = "pending",
        ) -> None: ...

    def __post_init__(self) -> None:
        steps: Iterable[PlanStep | str] = self.steps
        if isinstance(steps, str):
            raise TypeError("steps takes several steps: put a single one in a list")
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
        step = self.steps[event.number - 1]
        changed = PlanStep(
            step.title if event.title is None else event.title,
            step.status if event.status is None else event.status,
            step.note if event.note is None else event.note,
        )
        before, after = self.steps[: event.number - 1], self.steps[event.number :]
        return self._with((*before, changed, *after))

    @reducer(on=UpdatePlan)
    def update(self, event: UpdatePlan) -> Plan:
        return replace(self, status=event.status)

    def _with(self, steps: tuple[PlanStep, ...]) -> Plan:
        return Plan(steps, self.objective, _overall([step.status for step in steps]))

    def unfinished(self, *, accept_blocked: bool = True) -> tuple[str, ...]:
        """Return the steps that are still to be done, in words for a model.

        One that is blocked, with a note that says by what, is as far as a model can get it.
        """
        return tuple(
            f"{number}. {step.title} ({step.status})"
            for number, step in enumerate(self.steps, start=1)
            if step.status != "done" and not (accept_blocked and _is_explained(step))
        )

    def render(self) -> str:
        """Return the plan as a checklist."""
        done = sum(step.status == "done" for step in self.steps)
        title = f"Plan: {self.objective} (" if self.objective else "Plan: "
        end = ")" if self.objective else ""
        head = f"{title}{done} of {len(self.steps)} steps done{end}"
        steps = (f"{number}. {step.render()}" for number, step in enumerate(self.steps, start=1))
        return "\n".join([head, *steps])


def _overall(statuses: list[StepStatus]) -> StepStatus:
    """Return the status of a whole whose parts have these."""
    if all(status == "done" for status in statuses):
        return "done"
    if all(status in ("done", "blocked") for status in statuses):
        return "blocked"
    return "pending" if all(status == "pending" for status in statuses) else "in-progress"


def _is_explained(step: PlanStep) -> bool:
    return step.status == "blocked" and bool(step.note)


def plan_done(*, required: bool = False, accept_blocked: bool = True) -> TaskCompletionChecker:
    """Return a checker that sends a model back as long as its plan is not finished.

    Args:
        required: Also send it back when it has not made a plan at all.
        accept_blocked: Let it stop at steps that are blocked, with a note that says by what.
    """
    finished = PlanDone[Plan](Plan, lambda plan: plan.unfinished(accept_blocked=accept_blocked))
    if required:
        return finished
    return AnyOf(Custom(lambda context: context.session[Plan].latest() is None, ""), finished)


# The tools


@dataclass(frozen=True, slots=True)
class SetupPlanParams:
    objective: Text
    """What is to be achieved, in one sentence."""
    steps: Annotated[tuple[Text, ...], Field(min_length=1)]
    """What to do, in order; each can be finished and checked by itself."""
    replace: bool = False
    """Give up a plan that is not finished."""


@dataclass(frozen=True, slots=True)
class AddStepsParams:
    steps: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Steps to put at the end of the plan."""


@dataclass(frozen=True, slots=True)
class UpdateStepParams:
    step: Annotated[int, Field(ge=1)]
    """Number of the step."""
    status: StepStatus | None = None
    """Its new status."""
    title: Text | None = None
    """Its new text."""
    note: str | None = None
    """What came out, or what it is blocked by."""


def planning_tools() -> tuple[Tool[Any, Any], ...]:
    """Return the tools of the section, for a section of your own."""
    return (
        Tool[SetupPlanParams, Plan](
            name="setup_plan",
            description="Make a plan for a task that takes several steps.",
            handler=_setup_plan,
            reach="reversible",
            concurrent=True,
            examples=(_SETUP_EXAMPLE,),
        ),
        Tool[AddStepsParams, Plan](
            name="add_steps",
            description="Add steps to the end of the plan.",
            handler=_add_steps,
            reach="reversible",
            concurrent=True,
        ),
        Tool[UpdateStepParams, Plan](
            name="update_step",
            description="Change the status, text or note of one step of the plan.",
            handler=_update_step,
            reach="reversible",
            concurrent=True,
            examples=(_UPDATE_EXAMPLE,),
        ),
        Tool[None, Plan](
            name="read_plan",
            description="Show the plan as a checklist.",
            handler=_read_plan,
            reach="read",
            concurrent=True,
        ),
    )


def _setup_plan(params: SetupPlanParams, *, context: ToolContext) -> ToolResult[Plan]:
    plan = context.session[Plan].latest()
    if plan is not None and plan.unfinished() and not params.replace:
        raise ToolValidationError(
            f"There is a plan that is not finished:\n{plan.render()}\n"
            "Go on with it, add to it with add_steps, or set replace=true to give it up"
        )
    return _changed(context, SetupPlan(params.objective, params.steps), "The plan is set up")


def _add_steps(params: AddStepsParams, *, context: ToolContext) -> ToolResult[Plan]:
    _plan(context)
    count = len(params.steps)
    added = "Added 1 step" if count == 1 else f"Added {count} steps"
    return _changed(context, AddSteps(params.steps), added)


def _update_step(params: UpdateStepParams, *, context: ToolContext) -> ToolResult[Plan]:
    plan = _plan(context)
    if params.step > len(plan.steps):
        raise ToolValidationError(
            f"There is no step {params.step}: the plan has {len(plan.steps)}\n{plan.render()}"
        )
    if params.status is None and params.title is None and params.note is None:
        raise ToolValidationError("Nothing to change: give a status, a title or a note")
    if params.status == "blocked" and not (params.note or plan.steps[params.step - 1].note):
        raise ToolValidationError("Say in note what the step is blocked by, then try again")
    event = UpdateStep(params.step, params.status, params.title, params.note)
    return _changed(context, event, f"Updated step {params.step}")


def _read_plan(params: None, *, context: ToolContext) -> ToolResult[Plan]:
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
        message += ". Nothing is left to be done"
    return ToolResult.ok(plan, message)


def _install(session: Session) -> None:
    """Let a session understand what happens to plans."""
    if not session.handles(SetupPlan):
        session.install(Plan)


# The section


class PlanningToolsSection(Section[None]):
    """Guidance and tools to plan, with the plan as it stands in the text.

    ``completion`` is the checker for it: give it to the loop, and a model that stops with a plan
    that is not finished is sent back with the steps that are left.
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
Use a plan for a task that takes three or more steps, or when you are asked for one. Do without \
for what a single answer or call does.

- Begin with `setup_plan`: the objective, and steps that can each be finished and checked.
- Set a step to `in-progress` with `update_step` before you work on it, one at a time, and to \
`done` as soon as it is finished and checked: not before, and not several at the end.
- Set a step that you cannot finish to `blocked`, with a note that says by what.
- Add what turns out to be missing with `add_steps`. Look at the plan with `read_plan`.
- Do not stop while steps are `pending` or `in-progress`: finish them first."""

_SETUP_EXAMPLE = ToolExample[SetupPlanParams, Plan](
    description="Plan the repair of a bug",
    input=SetupPlanParams(
        "Fix the wrong total", ("Write a test that fails", "Fix the sum", "Run all tests")
    ),
    output=Plan(("Write a test that fails", "Fix the sum", "Run all tests"), "Fix the wrong total"),
)
_UPDATE_EXAMPLE = ToolExample[UpdateStepParams, Plan](
    description="Say that a step cannot be finished",
    input=UpdateStepParams(2, "blocked", note="no access to the repository"),
    output=Plan(
        (PlanStep("Tag", "done"), PlanStep("Publish", "blocked", "no access to the repository")),
        "Release 1.2",
        "blocked",
    ),
)
