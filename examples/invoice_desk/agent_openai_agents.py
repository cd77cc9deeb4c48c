"""The invoice desk inside an openai-agents agent: no directory, the same tools, rules and database.

pip install 'wink-runtime[openai-agents]'
python examples/invoice_desk/agent_openai_agents.py
"""

from __future__ import annotations

from typing import Any

from agents import Agent, Runner, set_tracing_disabled
from agents.testing import ScriptedModel, assistant_message, function_call
from desk import Till, invoices, open_desk

from weakincentives.integrations.openai_agents import Wink

SCRIPT: list[tuple[str, dict[str, Any]]] = [
    ("find_customer", {"name": "Ann"}),
    ("bill", {"customer": "Ann", "amounts": [30, 40]}),
    ("bill", {"customer": "Ann", "amounts": [50]}),
    ("pay", {"number": 1, "cash": 80}),
    ("pay", {"number": 1, "cash": 70}),
]


def main() -> None:
    set_tracing_disabled(True)
    calls = [
        [function_call(name, arguments, call_id=f"c{n}")]
        for n, (name, arguments) in enumerate(SCRIPT)
    ]
    model = ScriptedModel([*calls, [assistant_message("Ann has paid.")]])
    with open_desk() as desk, Wink(registry=desk) as wink:
        agent = Agent[None](name="Desk", model=model, tools=[*wink.tools()])
        print(Runner.run_sync(agent, "Bill Ann").final_output)
        print(invoices(desk), desk.context().resources.get(Till))


if __name__ == "__main__":
    main()
