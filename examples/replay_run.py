"""Record a run, replay it, change a tool, and see at which call the state first differs.

Run it: python examples/replay_run.py
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weakincentives import MarkdownSection, Prompt, PromptTemplate, Session, Tool, ToolContext, tool
from weakincentives.adapters import ScriptedAdapter, calls, record, replay, says
from weakincentives.errors import ReplayDiverged
from weakincentives.filesystem import Filesystem, MemoryFilesystem


@dataclass(frozen=True)
class Ordered:
    what: str
    cents: int


def order_tool(*, discount: int) -> Tool[Any, Any]:
    """Return the tool: the shop is about to change how it rounds."""

    @tool(reach="reversible")
    def order(what: str, cents: int, *, context: ToolContext) -> str:
        """Order something."""
        price = cents - cents * discount // 100
        context.session.dispatch(Ordered(what, price))
        context.filesystem.append("orders.csv", f"{what},{price}\n")
        return f"Ordered {what}"

    return order


def shop(*, discount: int) -> Prompt[Any]:
    section = MarkdownSection(
        title="Shop", template="Order what is asked for.", tools=[order_tool(discount=discount)]
    )
    resources = {Filesystem: MemoryFilesystem({"orders.csv": "what,cents\n"})}
    return Prompt(PromptTemplate(sections=[section], resources=resources))


# Any adapter can be recorded; this one needs no key.
model = ScriptedAdapter(
    [
        calls(("order", {"what": "a pin", "cents": 9}), text="First the pin."),
        calls(
            ("order", {"what": "a lamp", "cents": 4_000}), ("order", {"what": "tea", "cents": 5})
        ),
        says("All three are ordered."),
    ]
)

with tempfile.TemporaryDirectory() as folder:
    recording = Path(folder) / "run.jsonl"
    answer = record(model, recording).evaluate(shop(discount=0), Session()).text
    print(f"Recorded:  {answer}  ({len(recording.read_text().splitlines())} lines)")

    same = replay(recording)
    print(f"Replayed:  {same.evaluate(shop(discount=0), Session()).text}")
    print(f"Differs:   {same.divergence}")

    print("\nThe shop now gives ten percent off. A pin costs what it did: 9 cents are too few.")
    other = replay(recording)
    other.evaluate(shop(discount=10), Session())
    found = other.divergence
    assert found is not None
    print(f"Differs at turn {found.turn}, call {found.call}, {found.tool}:")
    for name in found.recorded:
        print(f"  {name}\n    recorded  {found.recorded[name]}\n    now       {found.came[name]}")

    try:
        replay(recording, strict=True).evaluate(shop(discount=10), Session())
    except ReplayDiverged as error:
        print(f"\nStrictly:  {str(error)[:77]}...")
