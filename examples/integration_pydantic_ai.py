"""pydantic-ai, with and without WINK: a tool of the agent fails half way. No key, no network.

    pip install 'wink-runtime[pydantic-ai]'
    python examples/integration_pydantic_ai.py

The agent has one function as its tool, which knows nothing of WINK. It writes a release into two
files and fails before the third. Without us the release is half done when the model is told. With
the capability the files are as before, and the call is on record.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pydantic_ai import (
    Agent,
    ModelMessage,
    ModelResponse,
    ModelRetry,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.function import AgentInfo, FunctionModel

from weakincentives.integrations.pydantic_ai import Wink


def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Make one call, then repeat what the answer was."""
    last = messages[-1].parts[-1]
    if not isinstance(last, ToolReturnPart):
        return ModelResponse([ToolCallPart("release", {"version": "2.0"})])
    return ModelResponse([TextPart(f"I was told: {last.content}")])


def run(project: Path, capabilities: list[AbstractCapability[object]]) -> str:
    """Run the agent on a project, and return its last words."""

    def release(version: str) -> str:
        """Write a release into the files of the project."""
        (project / "VERSION").write_text(version)
        (project / "CHANGES").write_text(f"{version}: everything is new\n")
        raise ModelRetry("the release notes are missing")

    agent = Agent(FunctionModel(scripted), tools=[release], capabilities=capabilities)
    return agent.run_sync("Release 2.0").output


def main() -> None:
    for title, with_us in (("without us", False), ("with us", True)):
        with tempfile.TemporaryDirectory() as place:
            project = Path(place, "project")
            project.mkdir()
            (project / "VERSION").write_text("1.0")
            end = run(project, [Wink(project)] if with_us else [])
            files = {path.name: path.read_text() for path in sorted(project.iterdir())}
            print(f"{title}: {files}\n  {end}")


if __name__ == "__main__":
    main()
