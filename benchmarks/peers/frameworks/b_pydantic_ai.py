import asyncio

from common import JSON_ARGUMENTS, further_calls, make_add, report, time_async
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.tool_manager import ToolManager
from pydantic_ai.toolsets import FunctionToolset
from pydantic_ai.usage import RunUsage


async def direct(kind):
    toolset = FunctionToolset()
    toolset.add_function(make_add(kind))
    context = RunContext(deps=None, model=TestModel(), usage=RunUsage(), prompt="x", run_step=0)
    manager = await ToolManager(toolset).for_run_step(context)
    call = ToolCallPart("add", JSON_ARGUMENTS, tool_call_id="c")
    return await time_async(lambda: manager.handle_call(call), 50)


def make_turn(kind):
    wanted = 1

    def model(messages, info):
        if len(messages) > 1:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(
            parts=[ToolCallPart("add", JSON_ARGUMENTS, tool_call_id=f"c{i}") for i in range(wanted)]
        )

    agent = Agent(FunctionModel(model))
    agent.tool_plain(make_add(kind))

    async def turn(calls=1):
        nonlocal wanted
        wanted = calls
        assert (await agent.run("hi")).output == "done"

    return turn


async def main():
    for kind in ("async", "sync"):
        report("direct", kind, await direct(kind), "ToolManager.handle_call")
        turn = make_turn(kind)
        report("turn", kind, await time_async(turn, 5), "Agent.run")
        report("further", kind, await further_calls(turn), "Agent.run")


asyncio.run(main())
