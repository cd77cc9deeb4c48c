import asyncio

from agents import Agent, ModelResponse, Runner, Usage, function_tool, set_trace_processors
from agents.models.interface import Model
from agents.testing import assistant_message, function_call
from agents.tool_context import ToolContext
from common import ARGUMENTS, JSON_ARGUMENTS, further_calls, make_add, report, time_async

set_trace_processors([])  # tracing stays on, as it comes; nothing is sent


class Scripted(Model):
    def __init__(self):
        self.asked, self.calls = 0, 1

    async def get_response(self, *args, **kwargs):
        self.asked += 1
        if self.asked % 2:
            output = [function_call("add", ARGUMENTS, call_id=f"c{i}") for i in range(self.calls)]
        else:
            output = [assistant_message("done")]
        return ModelResponse(output=output, usage=Usage(), response_id=None)

    def stream_response(self, *args, **kwargs):
        raise NotImplementedError


async def measure(kind):
    model, tool = Scripted(), function_tool(make_add(kind))
    agent = Agent(name="t", model=model, tools=[tool])
    context = ToolContext(
        context=None, tool_name="add", tool_call_id="c", tool_arguments=JSON_ARGUMENTS
    )

    async def turn(calls=1):
        model.calls = calls
        assert (await Runner.run(agent, "hi")).final_output == "done"

    direct = await time_async(lambda: tool.on_invoke_tool(context, JSON_ARGUMENTS), 50)
    report("direct", kind, direct, "FunctionTool.on_invoke_tool")
    report("turn", kind, await time_async(turn, 5), "Runner.run, tracing on")
    report("further", kind, await further_calls(turn), "Runner.run, tracing on")


async def main():
    for kind in ("async", "sync"):
        await measure(kind)


asyncio.run(main())
