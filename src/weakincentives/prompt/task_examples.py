"""Examples of whole tasks: what was asked, which calls were made, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack, cast

from weakincentives.errors import PromptValidationError, ToolDefinitionError
from weakincentives.prompt.section import Section, SectionOptions
from weakincentives.prompt.tool import Tool, ToolExample
from weakincentives.serde import dump

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One call of a task. Checked against the types of its tool, like the tool's own examples."""

    tool: Tool[Any, Any]
    example: ToolExample[Any, Any]

    def __post_init__(self) -> None:
        try:
            self.tool.replace(examples=(self.example,))
        except ToolDefinitionError as error:
            raise PromptValidationError(f"a step of a task: {error}") from error


@dataclass(frozen=True, slots=True)
class TaskExample:
    """A task that was done well, from the objective to the outcome."""

    objective: str
    outcome: object
    """Text, or the answer as the dataclass that the prompt asks for."""
    steps: Sequence[TaskStep] = ()

    def __post_init__(self) -> None:
        if not self.objective.strip():
            raise PromptValidationError("the example of a task needs an objective")
        try:
            _as_json(self.outcome)
        except (TypeError, ValueError) as error:
            raise PromptValidationError(
                f"the outcome of task {self.objective!r} cannot be shown as JSON: {error}"
            ) from error
        object.__setattr__(self, "steps", tuple(self.steps))
        for step in cast("tuple[object, ...]", self.steps):
            if not isinstance(step, TaskStep):
                raise PromptValidationError(
                    f"the example of task {self.objective!r}: {step!r} is not a TaskStep"
                )

    def render(self) -> str:
        """Return it as text for the model."""
        calls = [
            f"{number}. {step.example.description}: `{step.tool.name}` with "
            f"`{_as_json(_arguments(step))}` gives `{_as_json(step.example.output)}`"
            for number, step in enumerate(self.steps, 1)
        ]
        is_text = isinstance(self.outcome, str)
        outcome = self.outcome if is_text else f"`{_as_json(self.outcome)}`"
        parts = (f"**Task**: {self.objective}", "\n".join(calls), f"**Outcome**: {outcome}")
        return "\n\n".join(part for part in parts if part)


class TaskExamplesSection(Section[Any]):
    """A section that shows how whole tasks are done.

    >>> section = TaskExamplesSection(examples=[TaskExample("Say hi", "Hi!")])
    """

    depends_only_on_params = True

    def __init__(
        self, *, examples: Sequence[TaskExample], **options: Unpack[SectionOptions[Any]]
    ) -> None:
        if not options.get("key"):
            options.setdefault("title", "Examples")
        super().__init__(**options)
        self.examples = tuple(examples)

    def body(self, params: Any, session: Session | None) -> str:
        return "\n\n".join(example.render() for example in self.examples)


def _arguments(step: TaskStep) -> object:
    return {} if step.example.input is None else step.example.input


def _as_json(value: object) -> str:
    return json.dumps(dump(value), ensure_ascii=False)
