"""Every Python block of the seeds runs as printed, and does what the text around it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from seed_blocks import DOCUMENTS, Block, execute, python_blocks, seed_blocks
from seed_scenarios import SCENARIOS, Run, load_scenarios, state
from seed_table import TABLE, table

load_scenarios()
BLOCKS = seed_blocks()
# The full text of the Chapter comes first and holds all blocks of the short one.
BY_KEY = {block.key: block for block in reversed(BLOCKS)}


@pytest.fixture(autouse=True)
def _forget_blocks() -> Iterator[None]:
    """Drop the modules that blocks were run as."""
    yield
    for name in [name for name in sys.modules if name.startswith("seed_0")]:
        del sys.modules[name]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.label)
def test_seed_block(block: Block, tmp_path: Path) -> None:
    """The block runs as printed and keeps its promises."""
    if block.nocheck:
        pytest.skip("marked nocheck")
    if block.needs_python_312 and sys.version_info < (3, 12):
        pytest.skip("written in Python 3.12")
    scenario = SCENARIOS.get(block.key)
    assert scenario is not None, f"write a scenario for {block.label}"

    run = Run(block, BY_KEY, tmp_path)
    scenario(run)
    assert run.count, f"the scenario of {block.label} never runs the block"


def test_every_scenario_is_about_a_block() -> None:
    assert SCENARIOS.keys() <= BY_KEY.keys()
    assert {block.document for block in BLOCKS} == DOCUMENTS.keys()


def test_blocks_of_the_short_chapter_are_those_of_the_full_one() -> None:
    """So that one scenario stands for both."""
    full = {block.key: block.source for block in BLOCKS if block.document == "000"}
    short = {block.key: block.source for block in BLOCKS if block.document == "001"}
    assert short.items() <= full.items()


def test_table_in_docs_is_up_to_date() -> None:
    assert TABLE.read_text(encoding="utf-8") == table(BLOCKS), (
        "tests/seeds/seed_blocks.md differs; write it anew with `python tests/seeds/seed_table.py`"
    )


# The harness itself


def test_longer_fence_inside_a_block_belongs_to_it() -> None:
    text = '# A\n```python\nx = """\n````\ny\n````\n"""\n```\n## B\n```json\n{}\n```\n'
    (block,) = python_blocks(text, "000")
    assert block.source == 'x = """\n````\ny\n````\n"""\n'
    assert (block.heading, block.line) == ("A", 2)


def test_blocks_are_counted_by_document_and_by_heading() -> None:
    fence = "```python nocheck\npass\n```\n"
    blocks = list(python_blocks(f"# A\n{fence}{fence}# B\n{fence}", "000"))
    assert [(b.number, b.heading, b.nth) for b in blocks] == [(1, "A", 1), (2, "A", 2), (3, "B", 1)]
    assert all(block.nocheck for block in blocks)


def block_of(source: str) -> Block:
    return Block("000", 1, "A heading", 1, line=10, info="python", source=source)


def test_every_bare_return_is_reached(tmp_path: Path) -> None:
    seen = execute(block_of("a = 1\nreturn a\nb = a + x\nreturn b\n"), {"x": 1}, tmp_path, {})
    assert seen.returned == [1, 2]


def test_values_and_definitions_are_noted(tmp_path: Path) -> None:
    source = "f = int\ndef f(): return 1\nf()\ndef f(): return 2\nf()\n"
    seen = execute(block_of(source), {}, tmp_path, {})
    assert seen.shown == [1, 2]
    assert [each() for each in seen.defined["f"]] == [1, 2]


def test_annotations_are_not_evaluated(tmp_path: Path) -> None:
    seen = execute(block_of("def f(x: Unknown) -> Unknown: return x\n"), {}, tmp_path, {})
    assert seen.f.__annotations__ == {"x": "Unknown", "return": "Unknown"}


def test_traceback_names_the_line_of_the_seed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        execute(block_of("1\n1 / 0\n"), {}, tmp_path, {})
    assert raised.traceback[-1].lineno + 1 == 12


def test_label_is_document_number_and_heading() -> None:
    assert block_of("").label == "000-001-a-heading"


def test_state_of_type_parameter_syntax_is_the_same_on_every_version() -> None:
    assert state(block_of("class A[T]: pass\n")) == "needs Python 3.12"
    assert state(block_of("class A: pass\n")) == "runs"
