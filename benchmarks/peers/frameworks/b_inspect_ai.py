import asyncio
import os
import tempfile

os.environ["INSPECT_LOG_DIR"] = tempfile.mkdtemp()
os.environ["INSPECT_DISPLAY"] = "none"

from common import ARGUMENTS, further_calls, make_add, report, time_async
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageUser,
    ModelOutput,
    ModelUsage,
    execute_tools,
    get_model,
)
from inspect_ai.tool import ToolCall, tool


@tool
def add():
    return make_add("async")


def tool_calls(count):
    return [
        ToolCall(id=f"c{i}", function="add", arguments=ARGUMENTS, type="function")
        for i in range(count)
    ]


async def main():
    the_tool, wanted = add(), 1

    async def direct():
        messages = [
            ChatMessageUser(content="hi"),
            ChatMessageAssistant(content="", tool_calls=tool_calls(1)),
        ]
        outcome = await execute_tools(messages, [the_tool])
        assert outcome.messages[0].error is None

    def scripted(messages, tools, tool_choice, config):
        if messages[-1].role == "tool":
            output = ModelOutput.from_content("mockllm/model", "done")
        else:
            output = ModelOutput.for_tool_call("mockllm/model", "add", ARGUMENTS)
            output.choices[0].message.tool_calls = tool_calls(wanted)
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        return output

    model = get_model("mockllm/model", custom_outputs=scripted)

    async def turn(calls=1):
        nonlocal wanted
        wanted = calls
        _, output = await model.generate_loop("hi", tools=[the_tool])
        assert output.completion == "done"

    report("direct", "async", await time_async(direct, 8), "execute_tools")
    report("turn", "async", await time_async(turn, 5), "generate_loop")
    report("further", "async", await further_calls(turn), "generate_loop")


asyncio.run(main())
