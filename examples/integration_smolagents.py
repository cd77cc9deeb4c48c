"""A CodeAgent of smolagents whose code fails half-way, with and without WINK's executor.

    pip install 'wink-runtime[smolagents]'
    python examples/integration_smolagents.py

It runs offline: a script plays the model.
"""

# smolagents has annotations, but does not say so, and some are left open.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import tempfile
from pathlib import Path
from typing import Any

from smolagents import ChatMessage, CodeAgent, LogLevel, MessageRole, Model, tool

from weakincentives.integrations.smolagents import WinkExecutor

CELLS = [
    # The second order has no price: the code fails after it has written the first invoice.
    """
orders = load_orders()
total = 0
for order in orders:
    total = total + order["price"]
    write_invoice(order["id"], order["price"])
    mark_as_billed(order["id"])
""",
    'final_answer("I could not bill all orders: one of them has no price.")',
]


class Script(Model):
    """A model that says what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = list(CELLS)

    def generate(self, *args: Any, **kwargs: Any) -> ChatMessage:
        code = self.cells.pop(0)
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"<code>\n{code}\n</code>")


def tools_for(shop: Path) -> list[Any]:
    """Return tools of smolagents. They know nothing of us."""
    orders = shop / "orders.csv"

    @tool
    def load_orders() -> list[dict[str, Any]]:
        """Return all orders that are not billed."""
        rows = [line.split(",") for line in orders.read_text().splitlines()]
        return [{"id": row[0]} | ({"price": int(row[1])} if row[1] else {}) for row in rows]

    @tool
    def write_invoice(order: str, price: int) -> str:
        """Write an invoice.

        Args:
            order: The id of the order.
            price: What it costs.
        """
        (shop / f"invoice-{order}.txt").write_text(f"Please pay {price}\n")
        return "written"

    @tool
    def mark_as_billed(order: str) -> str:
        """Remove an order from the list.

        Args:
            order: The id of the order.
        """
        lines = orders.read_text().splitlines(keepends=True)
        orders.write_text("".join(line for line in lines if not line.startswith(f"{order},")))
        return "billed"

    return [load_orders, write_invoice, mark_as_billed]


def run(shop: Path, **options: Any) -> None:
    (shop / "orders.csv").write_text("a1,30\na2,\na3,5\n")
    agent: Any = CodeAgent(tools_for(shop), Script(), verbosity_level=LogLevel.OFF, **options)
    with agent:
        agent.run("Bill all open orders")
    print(f"  the variable total: {agent.python_executor.state.get('total', 'not set')}")
    for path in sorted(shop.glob("*")):
        print(f"  {path.name}: {path.read_text()!r}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print("On the disk afterwards, with smolagents alone:")
        run(Path(place))
    with tempfile.TemporaryDirectory() as place:
        print("With WinkExecutor:")
        run(Path(place), executor=WinkExecutor(workspace=place, tools=[]))
