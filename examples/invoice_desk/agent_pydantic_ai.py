"""The invoice desk inside a pydantic-ai agent: no directory, the same tools, rules and database.

pip install 'wink-runtime[pydantic-ai]'
python examples/invoice_desk/agent_pydantic_ai.py
"""

from __future__ import annotations

from desk import Till, invoices, open_desk
from pydantic_ai import Agent, ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from weakincentives.integrations.pydantic_ai import Wink

SCRIPT = [
    ("find_customer", {"name": "Ann"}),
    ("bill", {"customer": "Ann", "amounts": [30, 40]}),
    ("bill", {"customer": "Ann", "amounts": [50]}),
    ("pay", {"number": 1, "cash": 80}),
    ("pay", {"number": 1, "cash": 70}),
]


def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    taken = sum(isinstance(each, ModelResponse) for each in messages)
    if taken < len(SCRIPT):
        return ModelResponse([ToolCallPart(*SCRIPT[taken])])
    return ModelResponse([TextPart("Ann has paid.")])


def main() -> None:
    with open_desk() as desk:
        agent = Agent(FunctionModel(scripted), capabilities=[Wink(registry=desk)])
        print(agent.run_sync("Bill Ann").output)
        print(invoices(desk), desk.context().resources.get(Till))


if __name__ == "__main__":
    main()
