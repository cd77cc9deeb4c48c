import asyncio
import logging

from common import ARGUMENTS, further_calls, make_add, report, time_async
from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmResponse
from google.adk.runners import InMemoryRunner
from google.adk.tools import FunctionTool
from google.genai import types

logging.disable(logging.WARNING)


class Scripted(BaseLlm):
    calls: int = 1

    async def generate_content_async(self, llm_request, stream=False):
        if llm_request.contents[-1].parts[-1].function_response:
            parts = [types.Part(text="done")]
        else:
            parts = [
                types.Part(function_call=types.FunctionCall(name="add", args=ARGUMENTS, id=f"c{i}"))
                for i in range(self.calls)
            ]
        yield LlmResponse(content=types.Content(role="model", parts=parts))


class NoContext:
    """Stands for a context that the tool never asks for."""


async def measure(kind):
    tool = FunctionTool(make_add(kind))
    direct = await time_async(
        lambda: tool.run_async(args=dict(ARGUMENTS), tool_context=NoContext()), 33
    )
    report("direct", kind, direct, "FunctionTool.run_async")
    model = Scripted(model="scripted")
    agent = LlmAgent(name="t", model=model, tools=[make_add(kind)])
    runner = InMemoryRunner(agent=agent, app_name="app")
    sessions = runner.session_service

    async def turn(calls=1):
        model.calls = calls
        session = await sessions.create_session(app_name="app", user_id="u")
        said = None
        message = types.Content(role="user", parts=[types.Part(text="hi")])
        async for event in runner.run_async(
            user_id="u", session_id=session.id, new_message=message
        ):
            for part in event.content.parts if event.content else ():
                said = part.text or said
        assert said == "done"
        await sessions.delete_session(app_name="app", user_id="u", session_id=session.id)

    report("turn", kind, await time_async(turn, 3), "InMemoryRunner.run_async")
    report("further", kind, await further_calls(turn), "InMemoryRunner.run_async")


async def main():
    for kind in ("async", "sync"):
        await measure(kind)


asyncio.run(main())
