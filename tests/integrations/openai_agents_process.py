"""Half of a run of openai-agents: for a test that continues it in another process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from agents import Agent, Runner, RunState, set_tracing_disabled
from agents.testing import ScriptedModel, assistant_message, function_call

from weakincentives import ToolContext, tool
from weakincentives.integrations.openai_agents import Wink
from weakincentives.prompt import ApprovalPolicy


@tool(reach="reversible")
def append(text: str, *, context: ToolContext) -> str:
    """Append to the file.

    Args:
        text: What to append.
    """
    files = context.filesystem
    files.write("a.txt", files.read("a.txt") + text)
    return "appended"


async def main(part: str, workspace: str, stored: Path) -> None:
    set_tracing_disabled(True)
    calls = [function_call("append", {"text": f"+{each}"}, call_id=each) for each in "bc"]
    turns: list[Any] = [calls] if part == "start" else []
    model = ScriptedModel([*turns, [assistant_message("done")]])
    with Wink(workspace, tools=[append], policies=[ApprovalPolicy()], run="job") as wink:
        agent = wink.cover(Agent(name="Writer", model=model, tools=[*wink.tools()]))
        if part == "start":
            result = await Runner.run(agent, "go")
            stored.write_text(result.to_state().to_string())
            return
        state = await RunState.from_string(agent, stored.read_text())
        yes, no = state.get_interruptions()
        state.approve(yes)
        state.reject(no, rejection_message="denied: not needed")
        result = await Runner.run(agent, state)
        for item in result.to_input_list():
            if item.get("type") == "function_call_output":
                sys.stdout.write(f"{item['output']}\n")
        sys.stdout.write(f"{result.final_output}\n")


asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
