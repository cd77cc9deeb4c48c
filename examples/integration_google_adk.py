"""Google ADK, with and without WINK: a tool of the agent fails half way. No key, no network.

    pip install 'wink-runtime[google-adk]'
    python examples/integration_google_adk.py

The agent has one function as its tool, which knows nothing of WINK. It writes a release into two
files and fails before the third. Without us the release is half done, and ADK ends the run with the
exception. With the plug-in the files are as before, the model is told, and the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from weakincentives.integrations.google_adk import WinkPlugin


class Scripted(BaseLlm):
    """A model that makes one call, then repeats what it was told."""

    model: str = "scripted"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        last = (llm_request.contents[-1].parts or [types.Part()])[0]
        if last.function_response is None:
            call = types.FunctionCall(id="c1", name="release", args={"version": "2.0"})
            part = types.Part(function_call=call)
        else:
            part = types.Part(text=f"I was told: {last.function_response.response}")
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


async def run(project: Path, plugins: list[Any]) -> str:
    """Run the agent on a project, and return its last words."""

    def release(version: str) -> str:
        """Write a release into the files of the project."""
        (project / "VERSION").write_text(version)
        (project / "CHANGES").write_text(f"{version}: everything is new\n")
        raise RuntimeError("the release notes are missing")

    agent = LlmAgent(name="releaser", model=Scripted(), tools=[release])
    app = App(name="example", root_agent=agent, plugins=plugins)
    sessions = InMemorySessionService()
    session = await sessions.create_session(app_name="example", user_id="me")
    message = types.Content(role="user", parts=[types.Part(text="Release 2.0")])
    words = ""
    async with Runner(app=app, session_service=sessions) as runner:
        async for event in runner.run_async(
            user_id="me", session_id=session.id, new_message=message
        ):
            for part in (event.content.parts or []) if event.content else []:
                words = part.text or words
    return words


def main() -> None:
    logging.disable(logging.CRITICAL)  # ADK logs the exception at length
    for title, with_us in (("without us", False), ("with us", True)):
        with tempfile.TemporaryDirectory() as place:
            project = Path(place, "project")
            project.mkdir()
            (project / "VERSION").write_text("1.0")
            try:
                end = asyncio.run(run(project, [WinkPlugin(project)] if with_us else []))
            except RuntimeError as error:
                end = f"the run ended with {error!r}"
            files = {path.name: path.read_text() for path in sorted(project.iterdir())}
            print(f"{title}: {files}\n  {end}")


if __name__ == "__main__":
    main()
