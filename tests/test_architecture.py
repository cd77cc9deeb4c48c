"""docs/architecture.md says what the source says, and the source keeps to its map."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import grimp
import pytest

import weakincentives as wink
from weakincentives.prompt import PolicyDecision
from weakincentives.prompt.contracts import Precondition

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "weakincentives"
PAGE = (DOCS / "architecture.md").read_text()


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    """The script that draws the map."""
    place = DOCS / "draw_architecture.py"
    spec = importlib.util.spec_from_file_location("draw_architecture", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


# The map


def test_the_picture_shows_the_imports(drawing: ModuleType):
    """`make map` draws it again."""
    assert (DOCS / "architecture.svg").read_text() == drawing.picture(drawing.imports())


def test_an_import_that_is_not_drawn_would_change_the_picture(drawing: ModuleType):
    edges = drawing.imports()
    more = {**edges, "log": edges["log"] | {"serde"}}

    assert drawing.picture(more) != drawing.picture(edges)


def test_the_lists_are_those_of_the_docstrings(drawing: ModuleType):
    """`make map` writes them again."""
    assert drawing.with_lists(PAGE) == PAGE


def test_each_package_knows_what_its_docstring_says(drawing: ModuleType):
    known = {each.name: set(each.knows) for each in drawing.packages()}
    imported = {
        name: {
            part
            for part in drawing.imports_of(name)
            if (name.partition(".")[0], part) not in drawing.LAZY
        }
        for name in known
    }

    assert known == imported


# Cycles

HAND_OVER = ("weakincentives.prompt.tool", "weakincentives.runtime.tool_call")
"""Calling a tool runs the pipeline: the one import that points up."""
TYPES_NAME_EACH_OTHER = {
    f"weakincentives.prompt.{name}"
    for name in (
        "approval",
        "context",
        "contracts",
        "overrides",
        "policies",
        "prompt",
        "section",
        "tool",
    )
}
"""A handler takes a context, which has a prompt, which has tools with handlers: by their types
alone, these modules form one cycle."""


def cycles(*, types_too: bool, hand_over: bool = False) -> list[set[str]]:
    """Return the groups of more than three modules that import each other."""
    graph = grimp.build_graph(
        "weakincentives", cache_dir=None, exclude_type_checking_imports=not types_too
    )
    if not hand_over:
        graph.remove_import(importer=HAND_OVER[0], imported=HAND_OVER[1])
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    groups = {
        frozenset({module, *(each for each in reached[module] if module in reached[each])})
        for module in graph.modules
    }
    return [set(group) for group in groups if len(group) > 3]


def test_a_cycle_would_be_found():
    """The check can fail: with the hand-over, tools and pipeline import each other."""
    assert any(set(HAND_OVER) <= each for each in cycles(types_too=False, hand_over=True))


def is_waiting_for_the_log(group: set[str]) -> bool:
    """The log replaces the history of ``filesystem``, and its cycle with it."""
    return all(module.startswith("weakincentives.filesystem.") for module in group)


def test_no_more_than_three_modules_import_each_other():
    assert [each for each in cycles(types_too=False) if not is_waiting_for_the_log(each)] == []


def test_types_alone_close_one_cycle_more():
    found = [each for each in cycles(types_too=True) if not is_waiting_for_the_log(each)]

    assert all(each <= TYPES_NAME_EACH_OTHER for each in found), found


# What to open


def rows(heading: str) -> list[tuple[list[Path], list[str]]]:
    """Return the files and the names in each row of a table."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [
        (
            [(DOCS / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", where)],
            re.findall(r"`([^`]+)`", names),
        )
        for _, where, names in cells[1:]
    ]


def defined(tree: ast.AST, inside: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield inside + node.name
            yield from defined(node, f"{inside}{node.name}.")
        elif isinstance(node, ast.Assign):
            yield from (inside + each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield inside + node.target.id


def names_in(file: Path) -> set[str]:
    text = file.read_text()
    return set(defined(ast.parse(text)) if file.suffix == ".py" else re.findall(r"\w+", text))


TABLES = (
    "To change X, open Y",
    "The path of a call",
    "The path of a file change",
    "The path of a resume",
)


@pytest.mark.parametrize("heading", TABLES)
def test_every_name_is_in_a_file_of_its_row(heading: str):
    for files, names in rows(heading):
        there = set().union(*(names_in(file) for file in files))
        assert files
        assert names
        assert [name for name in names if name not in there] == [], files


def test_a_call_takes_the_path_of_the_page():
    """Every function of the table is called, in its order."""
    path = [
        (file, name)
        for files, names in rows("The path of a call")
        for name, file in zip(names, files if len(files) > 1 else files * len(names), strict=True)
    ]
    seen: list[tuple[Path, str]] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            seen.append((Path(code.co_filename), code.co_qualname.partition(".<locals>")[0]))

    call = a_call_with_a_policy_and_a_precondition()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(before)

    assert result.success
    found = [seen.index(step) if step in seen else -1 for step in path]
    assert -1 not in found, [step for step, place in zip(path, found, strict=True) if place < 0]
    assert found == sorted(found)


class Watch:
    name = "watch"

    def check(self, tool: object, params: object, *, context: object) -> PolicyDecision:
        return PolicyDecision.allow()

    def on_result(self, tool: object, params: object, result: object, *, context: object) -> None:
        pass


def a_call_with_a_policy_and_a_precondition() -> Any:
    always = Precondition(description="always", check=lambda: True)

    @wink.tool(reach="read", preconditions=[always])
    def look(path: str) -> str:
        """Look."""
        return path

    section = wink.MarkdownSection(
        title="T", key="t", template="x", tools=[look], policies=[Watch()]
    )
    prompt = wink.Prompt(wink.PromptTemplate(ns="a", key="b", sections=[section]))
    context = wink.ToolContext(session=wink.Session(), prompt=prompt)
    return lambda: wink.execute_tool(wink.ToolCall("look", {"path": "a"}), context=context)
