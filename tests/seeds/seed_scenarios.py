"""A scenario says what a block of the seeds must do: it runs the block, then uses what it defines.

Scenarios stand in the modules ``seed_chapter_*`` and ``seed_specs``, one per block, in the order
of the documents. A block that nobody wrote a scenario for is a failure, not a pass.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from seed_blocks import Block, Executed, execute
from seed_names import LEFT_OUT

from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, Section, ToolResult
from weakincentives.runtime import Session, ToolCall, execute_tool

SCENARIO_MODULES = (
    "seed_chapter_tools",
    "seed_chapter_validation",
    "seed_chapter_running",
    "seed_specs",
)


@dataclass
class Run:
    """Runs the block of a scenario; names that the block leaves out are its arguments."""

    block: Block
    others: Mapping[tuple[str, str, int], Block]
    folder: Path
    count: int = 0

    def __call__(self, *, elisions: Mapping[str, str] | None = None, **names: object) -> Executed:
        self.count += 1
        return execute(self.block, {**LEFT_OUT, **names}, self.folder, elisions or {})

    @property
    def text(self) -> str:
        return self.block.source

    def block_before(self) -> Executed:
        """Run the block above this one, under the same heading: the one its comments are about."""
        document, heading, nth = self.block.key
        block = self.others[document, heading, nth - 1]
        return execute(block, LEFT_OUT, self.folder, {})


Scenario = Callable[[Run], None]

SCENARIOS: dict[tuple[str, str, int], Scenario] = {}


def scenario(document: str, heading: str, nth: int = 1) -> Callable[[Scenario], Scenario]:
    """Declare the scenario of the nth block under a heading."""

    def declare(function: Scenario) -> Scenario:
        key = (document, heading, nth)
        assert key not in SCENARIOS, f"two scenarios for {key}"
        SCENARIOS[key] = function
        return function

    return declare


def load_scenarios() -> None:
    """Import the modules that declare scenarios."""
    for name in SCENARIO_MODULES:
        importlib.import_module(name)


def state(block: Block) -> str:
    """Return what can be said of a block, on any version of Python."""
    if block.nocheck:
        return "skipped: nocheck"
    return "needs Python 3.12" if block.needs_python_312 else "runs"


@dataclass
class Model:
    """Stands for a model: it is given a prompt, and calls the tools by name."""

    prompt: Prompt[Any]
    session: Session = field(default_factory=Session)

    def __post_init__(self) -> None:
        self.rendered = self.prompt.render(self.session)

    @classmethod
    def given(
        cls, *sections: Section[Any], resources: Mapping[type, object] | None = None
    ) -> Model:
        """Return one that is given these sections."""
        template = PromptTemplate(sections=sections)
        return cls(Prompt(template).bind(resources=resources))

    @classmethod
    def offered(
        cls,
        *tools: Any,
        policies: Sequence[object] = (),
        resources: Mapping[type, object] | None = None,
    ) -> Model:
        """Return one that is offered these tools in one section, under these policies."""
        section = MarkdownSection(title="Tools", tools=tools, policies=policies)
        return cls.given(section, resources=resources)

    def call(self, name: str, /, **arguments: object) -> ToolResult[Any]:
        return execute_tool(ToolCall(name, arguments), session=self.session)


def run_tests(seen: Executed) -> int:
    """Run every ``test_*`` function that a block defines, once per parameter set; return how many.

    What ``@pytest.mark.parametrize`` and ``@given`` ask for is done; fixtures there are none.
    """
    count = 0
    for name, functions in seen.defined.items():
        if not name.startswith("test_"):
            continue
        for function in functions:
            for arguments in _parameter_sets(function):
                function(**arguments)
                count += 1
    return count


def _parameter_sets(function: Any) -> list[dict[str, object]]:
    choices: list[list[dict[str, object]]] = []
    for mark in getattr(function, "pytestmark", ()):
        assert mark.name == "parametrize", f"{function.__name__} has the mark {mark.name}"
        names, rows = mark.args
        keys = [name.strip() for name in names.split(",")]
        choices.append([dict(zip(keys, row, strict=True)) for row in rows])
    return [{k: v for each in chosen for k, v in each.items()} for chosen in product(*choices)]
