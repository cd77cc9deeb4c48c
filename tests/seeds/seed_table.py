"""Write ``tests/seeds/seed_blocks.md``: which Python blocks of the seeds run.

Run it as ``python tests/seeds/seed_table.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from seed_blocks import DOCUMENTS, Block, seed_blocks
from seed_scenarios import load_scenarios, state

TABLE = Path(__file__).with_name("seed_blocks.md")

_INTRODUCTION = """\
# Python blocks of the seed documents

The seeds are the documents this library was written from. Each of their Python blocks is run as
printed by `tests/seeds`, and what it defines is used: its handlers are called as tools, its tests
are run, and what the text around it promises is checked.

The documents promise more than their blocks: each row of a table, each item of a list that says
what happens, and each member of a type, a composed tool or an example tool of the TypeScript
protocol is a test of its own, in `tests/seeds/test_seed_rows.py`.

This page is written by `python tests/seeds/seed_table.py`; a test compares it with what is run.
"""


def table(blocks: Sequence[Block]) -> str:
    """Return the page: a count of each state, then a row for each block."""
    load_scenarios()
    states = [state(block) for block in blocks]
    titles = {**DOCUMENTS, "001": "Chapter, shorter"}
    lines = [_INTRODUCTION, "| state | blocks |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in sorted(Counter(states).items())]
    lines += ["", "| document | block | heading | state |", "|---|---|---|---|"]
    lines += [
        f"| {block.document} {titles[block.document]} | {block.number} | {block.heading} | {each} |"
        for block, each in zip(blocks, states, strict=True)
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table(seed_blocks()), encoding="utf-8")
