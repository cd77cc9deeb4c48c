"""The invoice desk inside a LangChain agent: no directory, the same tools, rules and database.

pip install 'wink-runtime[langchain]'
python examples/invoice_desk/agent_langchain.py
"""

from __future__ import annotations

from typing import Any

from desk import Till, invoices, open_desk
from langchain.agents import create_agent  # pyright: ignore[reportUnknownVariableType]
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from weakincentives.integrations.langchain import WinkMiddleware

SCRIPT: list[tuple[str, dict[str, Any]]] = [
    ("find_customer", {"name": "Ann"}),
    ("bill", {"customer": "Ann", "amounts": [30, 40]}),
    ("bill", {"customer": "Ann", "amounts": [50]}),
    ("pay", {"number": 1, "cash": 80}),
    ("pay", {"number": 1, "cash": 70}),
]


class Scripted(BaseChatModel):
    """Makes the next call of the script."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        spoken = sum(isinstance(each, AIMessage) for each in messages)
        said = AIMessage("Ann has paid.")
        if spoken < len(SCRIPT):
            name, arguments = SCRIPT[spoken]
            said = AIMessage("", tool_calls=[{"id": f"c{spoken}", "name": name, "args": arguments}])
        return ChatResult(generations=[ChatGeneration(message=said)])


def main() -> None:
    with open_desk() as desk, WinkMiddleware(registry=desk) as wink:
        agent: Any = create_agent(Scripted(), middleware=[wink])
        state = agent.invoke({"messages": [("user", "Bill Ann")]})
        print(state["messages"][-1].text)
        print(invoices(desk), desk.context().resources.get(Till))


if __name__ == "__main__":
    main()
