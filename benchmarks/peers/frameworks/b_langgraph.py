import asyncio

from common import ARGUMENTS, further_calls, make_add, report, time_async, time_sync
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode


class Scripted(BaseChatModel):
    calls: int = 1

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        if isinstance(messages[-1], ToolMessage):
            message = AIMessage("done")
        else:
            message = AIMessage(
                "",
                tool_calls=[
                    {"name": "add", "args": ARGUMENTS, "id": f"c{i}", "type": "tool_call"}
                    for i in range(self.calls)
                ],
            )
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(self, *args, **kwargs):
        return self._generate(*args, **kwargs)


def react(model, add):
    def ask(state):
        return {"messages": [model.invoke(state["messages"])]}

    async def ask_async(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    def next_node(state):
        return "tools" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", RunnableLambda(ask, afunc=ask_async))
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", next_node, ["tools", END])
    graph.add_edge("tools", "model")
    return graph.compile()


async def turns(kind, app, model, detail):
    async def turn(calls=1):
        model.calls = calls
        outcome = await app.ainvoke({"messages": [("user", "hi")]})
        assert outcome["messages"][-1].content == "done"

    report("turn", kind, await time_async(turn, 5), detail)
    report("further", kind, await further_calls(turn), detail)


async def measure(kind):
    add = tool(make_add(kind))
    if kind == "async":
        report("direct", kind, await time_async(lambda: add.ainvoke(ARGUMENTS), 50), "ainvoke")
    else:
        report("direct", kind, time_sync(lambda: add.invoke(ARGUMENTS), 50), "invoke")
    model = Scripted()
    await turns(kind, react(model, add), model, "graph of a model and a ToolNode")
    await turns(kind, create_agent(model, [add]), model, "create_agent")


async def main():
    for kind in ("async", "sync"):
        await measure(kind)


asyncio.run(main())
