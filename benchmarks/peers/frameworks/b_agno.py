import asyncio
import os

os.environ["AGNO_TELEMETRY"] = "false"

from dataclasses import dataclass

from agno.agent import Agent
from agno.models.base import Model
from agno.models.response import ModelResponse
from agno.tools.function import Function, FunctionCall
from common import ARGUMENTS, JSON_ARGUMENTS, further_calls, make_add, report, time_async, time_sync


@dataclass
class Scripted(Model):
    id: str = "scripted"
    calls: int = 1

    def respond(self, messages):
        if messages[-1].role == "tool":
            return ModelResponse(role="assistant", content="done")
        function = {"name": "add", "arguments": JSON_ARGUMENTS}
        calls = [
            {"id": f"c{i}", "type": "function", "function": function} for i in range(self.calls)
        ]
        return ModelResponse(role="assistant", tool_calls=calls)

    def invoke(self, messages, *args, **kwargs):
        return self.respond(messages)

    async def ainvoke(self, messages, *args, **kwargs):
        return self.respond(messages)

    def invoke_stream(self, *args, **kwargs):
        raise NotImplementedError

    async def ainvoke_stream(self, *args, **kwargs):
        raise NotImplementedError
        yield

    def _parse_provider_response(self, response, **kwargs):
        return response

    def _parse_provider_response_delta(self, response, **kwargs):
        return response


async def measure(kind):
    function = Function.from_callable(make_add(kind))
    function.process_entrypoint()

    def call():
        return FunctionCall(function=function, arguments=dict(ARGUMENTS), call_id="c")

    assert (await call().aexecute()).status == "success"
    if kind == "async":
        direct = await time_async(lambda: call().aexecute(), 33)
    else:
        direct = time_sync(lambda: call().execute(), 33)
    report("direct", kind, direct, "FunctionCall.execute")
    model = Scripted()
    agent = Agent(model=model, tools=[make_add(kind)], telemetry=False)

    async def turn(calls=1):
        model.calls = calls
        assert (await agent.arun("hi")).content == "done"

    report("turn", kind, await time_async(turn, 3), "Agent.arun")
    report("further", kind, await further_calls(turn), "Agent.arun")


async def main():
    for kind in ("async", "sync"):
        await measure(kind)


asyncio.run(main())
