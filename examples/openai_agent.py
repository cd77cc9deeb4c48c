"""An agent that corrects spelling in the Markdown files of a directory, and reports what it did.

    export OPENAI_API_KEY=sk-...
    python examples/openai_agent.py path/to/docs

OPENAI_MODEL names another model; OPENAI_BASE_URL another server that speaks the same format.
A change that fails leaves no trace: every call is a transaction.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import weakincentives as wink
from weakincentives.adapters import OpenAIAdapter, RunConfig, RunEvent, TextDelta, ToolEnded
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import ReadBeforeWritePolicy

TASK = """\
Correct the spelling in these files, and nothing else: ${files}.
Read a file before you change it."""


@dataclass(frozen=True)
class Files:
    files: str


@dataclass(frozen=True)
class Report:
    """What was done."""

    summary: str
    corrected: tuple[str, ...] = ()
    """The words that were wrong."""


@wink.tool(reach="read")
def read_file(path: str, *, context: wink.ToolContext) -> str:
    """Read a file."""
    return context.filesystem.read(path)


@wink.tool(reach="reversible")
def correct(path: str, wrong: str, right: str, *, context: wink.ToolContext) -> str:
    """Replace a wrong word by the right one, everywhere in a file."""
    text = context.filesystem.read(path)
    if wrong not in text:
        raise ValueError(f"There is no {wrong!r} in {path}.")
    context.filesystem.write(path, text.replace(wrong, right))
    return f"Replaced it {text.count(wrong)} times."


def show(event: RunEvent) -> None:
    if isinstance(event, TextDelta):
        print(event.text, end="", flush=True)
    elif isinstance(event, ToolEnded):
        mark = "ok" if event.result.success else "--"
        print(f"\n[{mark}] {event.call.name}: {event.result.message or 'done'}")


def main(directory: str) -> None:
    section = wink.MarkdownSection[Files](
        title="Spelling",
        template=TASK,
        tools=[read_file, correct],
        policies=[ReadBeforeWritePolicy(write_tools={"correct"})],
    )
    model = OpenAIAdapter(os.environ.get("OPENAI_MODEL", "gpt-5-mini"))
    with HostFilesystem(directory) as files:
        prompt = wink.Prompt(
            wink.PromptTemplate[Report](sections=[section], resources={wink.Filesystem: files})
        ).bind(Files(", ".join(files.glob("**/*.md"))))
        config = RunConfig(max_turns=50, time_limit=600)
        response = model.evaluate(prompt, wink.Session(), config=config, on_event=show)

    report = response.output
    assert report is not None
    print(f"\n\n{report.summary}")
    for word in report.corrected:
        print(f"- {word}")
    print(f"({response.turns} turns, {response.usage.total_tokens} tokens)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
