"""Examples of whole tasks, checked against the tools they use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from weakincentives.errors import PromptValidationError
from weakincentives.prompt import (
    Prompt,
    PromptTemplate,
    TaskExample,
    TaskExamplesSection,
    TaskStep,
    ToolExample,
    tool,
)


@dataclass(frozen=True)
class Answer:
    total: int


@tool
def add(numbers: tuple[int, ...]) -> Answer:
    """Add."""
    return Answer(sum(numbers))


STEP = TaskStep(add, ToolExample("Add both", {"numbers": [1, 2]}, Answer(3)))


def test_a_task_is_shown_from_objective_to_outcome():
    section = TaskExamplesSection(
        examples=[
            TaskExample("Add one and two", Answer(3), [STEP, STEP]),
            TaskExample("Say hi", "Hi!"),
        ]
    )

    assert Prompt(PromptTemplate(sections=[section])).render().text.split("\n\n") == [
        "## 1. Examples",
        "**Task**: Add one and two",
        '1. Add both: `add` with `{"numbers": [1, 2]}` gives `{"total": 3}`\n'
        '2. Add both: `add` with `{"numbers": [1, 2]}` gives `{"total": 3}`',
        '**Outcome**: `{"total": 3}`',
        "**Task**: Say hi",
        "**Outcome**: Hi!",
    ]


def test_a_section_of_examples_has_the_title_it_is_given():
    assert TaskExamplesSection(examples=[], title="How to").title == "How to"
    assert TaskExamplesSection(examples=[], key="how-to").title == "How To"


@pytest.mark.parametrize(
    "example",
    [
        ToolExample("Text", {"numbers": ["1"]}, Answer(1)),
        ToolExample("Nothing", {}, Answer(1)),
        ToolExample("Not an answer", {"numbers": []}, {"total": 1}),
        "text",
    ],
)
def test_a_step_that_does_not_fit_its_tool_is_refused(example: Any):
    with pytest.raises(PromptValidationError, match=r"a step of a task: .*'add'"):
        TaskStep(add, example)


def test_what_is_no_task_is_refused():
    with pytest.raises(PromptValidationError, match="needs an objective"):
        TaskExample(" ", "done")
    with pytest.raises(PromptValidationError, match="cannot be shown as JSON"):
        TaskExample("Add", object())
    with pytest.raises(PromptValidationError, match="is not a TaskStep"):
        TaskExample("Add", "done", ["add"])  # type: ignore[list-item]
