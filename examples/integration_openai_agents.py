"""openai-agents with and without WINK: a tool fails halfway. What is on the disk afterwards?

    python examples/integration_openai_agents.py

The framework tells the model that the tool failed, but what it had written stays. Covered by
``Wink``, the same tool is a transaction. The model is scripted: no key, no network.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from agents import Agent, FunctionTool, Runner, function_tool, set_tracing_disabled
from agents.testing import ScriptedModel, assistant_message, function_call

from weakincentives.integrations.openai_agents import Wink

set_tracing_disabled(True)


def rename_tool(project: Path) -> FunctionTool:
    """Return one of the agent's own tools: it knows nothing of us."""

    @function_tool
    def rename(old: str, new: str) -> str:
        """Rename a function in every module."""
        for path in sorted(project.glob("*.py")):
            path.write_text(path.read_text().replace(old, new))
            compile(path.read_text(), str(path), "exec")  # raises for a name that is a keyword
        return f"renamed {old} to {new}"

    return rename


def coder(tool: FunctionTool) -> Agent[None]:
    """Return an agent whose model makes one call, and then says what it was told."""
    call = function_call("rename", {"old": "start", "new": "class"}, call_id="call_1")
    model = ScriptedModel([[call], [assistant_message("I could not rename it.")]])
    return Agent(name="Coder", model=model, tools=[tool])


async def play(project: Path, covered: bool) -> None:
    """Run the agent on a small project, and show the project."""
    project.mkdir()
    (project / "app.py").write_text("def start():\n    pass\n")
    (project / "main.py").write_text("import app\n\napp.start()\n")
    agent = coder(rename_tool(project))
    if covered:
        with Wink(project, title="rename") as wink:
            result = await Runner.run(wink.cover(agent), "Rename start to class.")
    else:
        result = await Runner.run(agent, "Rename start to class.")
    told = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    print("With us" if covered else "The framework alone")
    print(f"  the model was told: {told[0]}")
    for path in sorted(project.glob("*.py")):
        print(f"  {path.name}: {path.read_text().splitlines()[-1 if path.stem == 'main' else 0]}")


async def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        await play(Path(place, "alone"), covered=False)
        await play(Path(place, "covered"), covered=True)


if __name__ == "__main__":
    asyncio.run(main())
