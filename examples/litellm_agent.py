"""An agent that answers a question about the files of a directory, and says where it found it.

    export LITELLM_MODEL=anthropic/claude-sonnet-4-5 ANTHROPIC_API_KEY=sk-...
    python examples/litellm_agent.py path/to/project "Where is the port set?"

LITELLM_MODEL is any model that LiteLLM knows; without it, one of OpenAI's is asked.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass

import weakincentives as wink
from weakincentives.adapters import LiteLLMAdapter, RunConfig
from weakincentives.filesystem import HostFilesystem


@dataclass(frozen=True)
class Place:
    path: str
    line: int


@dataclass(frozen=True)
class Answer:
    text: str
    places: tuple[Place, ...] = ()
    """The lines that show it."""


@wink.tool(reach="read")
def search(pattern: str, limit: int = 20, *, context: wink.ToolContext) -> list[str]:
    """Find lines by a regular expression, in all files."""
    found = context.filesystem.grep(pattern, limit=limit)
    return [f"{match.path}:{match.line_number}: {match.line}" for match in found]


@wink.tool(reach="read")
def read_lines(
    path: str, first: int = 1, last: int = 200, *, context: wink.ToolContext
) -> list[str]:
    """Read some lines of a file; the first line is 1."""
    lines = context.filesystem.read(path).splitlines()
    return [f"{n}: {line}" for n, line in enumerate(lines, 1) if first <= n <= last]


async def main(directory: str, question: str) -> None:
    section = wink.MarkdownSection(
        title="Question",
        template="Answer from the files alone. Look before you answer.",
        tools=[search, read_lines],
    )
    model = LiteLLMAdapter(os.environ.get("LITELLM_MODEL", "openai/gpt-5-mini"))
    with HostFilesystem(directory) as files:
        prompt = wink.Prompt(
            wink.PromptTemplate[Answer](sections=[section], resources={wink.Filesystem: files})
        )
        config = RunConfig(max_turns=20, time_limit=300)
        response = await model.aevaluate(prompt, wink.Session(), message=question, config=config)

    answer = response.output
    assert answer is not None
    print(answer.text)
    for place in answer.places:
        print(f"- {place.path}, line {place.line}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY QUESTION")
    asyncio.run(main(sys.argv[1], sys.argv[2]))
