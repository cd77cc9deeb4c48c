"""Render a prompt of 200 sections and 500 tools: for the first time, again, and after a change."""

from dataclasses import dataclass

from timing import compare, emit, is_quick
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, tool

SECTIONS, TOOLS = 200, 500


@dataclass(frozen=True)
class Guest:
    name: str


def made(number: int) -> Tool:
    @tool(name=f"tool_{number}")
    def answer(text: str) -> str:
        """Answer."""
        return text

    return answer


def template() -> tuple[PromptTemplate, list[int]]:
    """Return the template, and the list of one number: which section is disabled."""
    disabled = [0]
    tools = [made(number) for number in range(TOOLS)]
    sections = [
        MarkdownSection[Guest](
            key=f"section-{number}",
            template="Hello $name.\n\n" + "Some guidance about these tools.\n" * 10,
            tools=tools[number::SECTIONS],
            enabled=lambda number=number: number != disabled[0],
        )
        for number in range(SECTIONS)
    ]
    return PromptTemplate(sections=sections), disabled


if __name__ == "__main__":
    quick = is_quick()
    whole, disabled = template()
    warm = Prompt(whole).bind(Guest("Ada"))
    last = SECTIONS - 1

    def cold() -> None:
        Prompt(whole).bind(Guest("Ada")).render()

    def one_changed() -> None:
        # The last one: all that stand before it keep their numbers.
        disabled[0] = last if disabled[0] != last else -1
        warm.render()

    samples = compare(
        {"cold": cold, "warm": warm.render, "one_changed": one_changed},
        times=2 if quick else 5,
        batches=10 if quick else 50,
    )
    figures = {name: each.figures() for name, each in samples.items()}
    emit("render", sections=SECTIONS, tools=TOOLS, **figures)
