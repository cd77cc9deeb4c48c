"""An agent that corrects spelling with Claude's own tools, every one of them a transaction.

    export ANTHROPIC_API_KEY=sk-ant-...
    python examples/claude_agent.py path/to/docs

Claude reads and edits the files with the tools of its own program. They are calls like any other:
a policy has it read a file before it edits it, and what a failed call changed is undone. At the end
all that it did can be taken back.
"""

from __future__ import annotations

import os
import sys

import weakincentives as wink
from weakincentives.adapters import (
    ClaudeAgentSDKAdapter,
    RunConfig,
    RunEvent,
    TextDelta,
    ToolEnded,
)
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import ReadBeforeWritePolicy, if_offered

TASK = "Correct the spelling in the Markdown files of this directory, and nothing else."


def show(event: RunEvent) -> None:
    if isinstance(event, TextDelta):
        print(event.text, end="", flush=True)
    elif isinstance(event, ToolEnded):
        result = event.result
        print(f"\n[{'ok' if result.success else '--'}] {event.call.name}", end="")
        print("" if result.success else f": {result.message}")


def main(directory: str) -> None:
    model = ClaudeAgentSDKAdapter(
        model=os.environ.get("ANTHROPIC_MODEL"), native_tools=["Glob", "Read", "Edit"]
    )
    # The prompt does not know the program's own tools.
    reads_first = ReadBeforeWritePolicy(
        read_tools={if_offered("read")}, write_tools={if_offered("edit")}
    )
    with HostFilesystem(directory) as files:
        prompt = wink.Prompt(
            wink.PromptTemplate(
                sections=[wink.MarkdownSection(title="Spelling", template=TASK)],
                policies=[reads_first],
                resources={wink.Filesystem: files},
            )
        )
        before = files.snapshot()
        config = RunConfig(max_turns=50, time_limit=600)
        response = model.evaluate(prompt, wink.Session(), config=config, on_event=show)
        changed = files.changed_since(before)
        print(f"\n\nChanged: {', '.join(changed) or 'nothing'} ({response.turns} turns)")
        if sys.stdin.isatty() and changed and input("Keep it? [Y/n] ").lower() == "n":
            files.restore(before)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
