import asyncio

from common import ARGUMENTS, further_calls, report, time_async, time_sync
from smolagents import Model, ToolCallingAgent, tool
from smolagents.models import (
    ChatMessage,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
)
from smolagents.monitoring import LogLevel


@tool
def add(a: int, b: float, c: str = "x") -> str:
    """Add.

    Args:
        a: first
        b: second
        c: suffix
    """
    return f"{a + b}{c}"


def tool_call(call_id, name, arguments):
    function = ChatMessageToolCallFunction(name=name, arguments=arguments)
    return ChatMessageToolCall(id=call_id, type="function", function=function)


class Scripted(Model):
    def __init__(self):
        super().__init__(model_id="scripted")
        self.asked, self.calls = 0, 1

    def generate(self, messages, **kwargs):
        self.asked += 1
        if self.asked % 2:
            calls = [tool_call(f"c{i}", "add", dict(ARGUMENTS)) for i in range(self.calls)]
        else:
            calls = [tool_call("f", "final_answer", {"answer": "done"})]
        return ChatMessage(role=MessageRole.ASSISTANT, content="", tool_calls=calls)


model = Scripted()
agent = ToolCallingAgent(tools=[add], model=model, verbosity_level=LogLevel.OFF)


async def turn(calls=1):
    model.calls, model.asked = calls, 0
    assert agent.run("hi") == "done"


direct = time_sync(lambda: agent.execute_tool_call("add", ARGUMENTS), 80)
report("direct", "sync", direct, "ToolCallingAgent.execute_tool_call")
report("turn", "sync", asyncio.run(time_async(turn, 3)), "ToolCallingAgent.run")
report("further", "sync", asyncio.run(further_calls(turn)), "ToolCallingAgent.run")
