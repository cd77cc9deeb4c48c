"""An application: invoices in a database, a till, rules. Every call succeeds or fails as a whole.

    python examples/invoice_desk/desk.py

``server.py`` serves the same tools over MCP, ``agent_*.py`` give them to an agent of pydantic-ai,
LangChain or openai-agents. Each is a few lines: the application is a ``ToolRegistry``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, calls
from weakincentives.contrib.databases import SqliteDatabase
from weakincentives.prompt import QuotaPolicy, SequentialDependencyPolicy
from weakincentives.runtime import MainLoop, Session, parallel

SCHEMA = """
CREATE TABLE IF NOT EXISTS customer (name TEXT PRIMARY KEY, credit INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS invoice (
    number INTEGER PRIMARY KEY,
    customer TEXT NOT NULL REFERENCES customer,
    total INTEGER NOT NULL CHECK (total > 0),
    paid INTEGER NOT NULL DEFAULT 0
);
"""


@dataclass
class Till:
    """Cash: a resource of its own, rolled back with the rows."""

    cash: int = 0

    def snapshot(self) -> int:
        return self.cash

    def restore(self, token: int, /) -> None:
        self.cash = token


@dataclass(frozen=True)
class Invoice:
    number: int
    customer: str
    total: int

    def render(self) -> str:
        return f"Invoice {self.number}: {self.customer}, {self.total}"


@wink.tool(reach="read", needs=(SqliteDatabase,))
def find_customer(name: str, *, context: wink.ToolContext) -> str:
    """Look a customer up."""
    db = context.resources.get(SqliteDatabase)
    row = db.execute("SELECT credit FROM customer WHERE name = ?", (name,)).first()
    if row is None:
        raise ValueError(f"there is no customer {name!r}")
    return f"{name} has a credit of {row['credit']}"


@wink.tool(reach="reversible", needs=(SqliteDatabase,))
def bill(customer: str, amounts: list[int], *, context: wink.ToolContext) -> Invoice:
    """Write an invoice."""
    db = context.resources.get(SqliteDatabase)
    total = sum(amounts)
    made = db.execute("INSERT INTO invoice (customer, total) VALUES (?, ?)", (customer, total))
    left = db.execute(
        "UPDATE customer SET credit = credit - ? WHERE name = ? RETURNING credit", (total, customer)
    )
    if left.one()["credit"] < 0:
        raise ValueError(f"{customer} has too little credit for {total}")
    return Invoice(made.lastrowid or 0, customer, total)


@wink.tool(reach="reversible", needs=(SqliteDatabase, Till))
def pay(number: int, cash: int, *, context: wink.ToolContext) -> str:
    """Take cash for an invoice."""
    context.resources.get(Till).cash += cash
    db = context.resources.get(SqliteDatabase)
    found = db.execute(
        "UPDATE invoice SET paid = paid + ? WHERE number = ? RETURNING total - paid AS open",
        (cash, number),
    ).first()
    if found is None:
        raise ValueError(f"there is no invoice {number}")
    if found["open"] < 0:
        raise ValueError(f"{cash} is {-found['open']} too much")
    return f"{found['open']} is still open"


def open_desk(
    path: str | Path = ":memory:", *, session: Session | None = None
) -> wink.ToolRegistry:
    """Return the desk's tools on a database, with its rules."""
    database = SqliteDatabase(path)
    with database.transaction() as db:
        db.executescript(SCHEMA)
        db.execute("INSERT OR IGNORE INTO customer VALUES ('Ann', 100), ('Bob', 10)")
    return wink.ToolRegistry(
        [find_customer, bill, pay],
        resources={SqliteDatabase: database, Till: Till()},
        policies=[
            SequentialDependencyPolicy({"bill": {"find_customer"}}),
            QuotaPolicy(20, tools={"bill"}),
        ],
        session=session,
        strict=False,
    )


def invoices(desk: wink.ToolRegistry) -> list[tuple[str, int, int]]:
    """Return customer, total and what was paid of each invoice."""
    database = desk.context().resources.get(SqliteDatabase)
    with database.transaction(read_only=True) as db:
        rows = db.execute("SELECT customer, total, paid FROM invoice ORDER BY number")
        return [(row["customer"], row["total"], row["paid"]) for row in rows]


class Desk(MainLoop[str, str]):
    """The same with a model."""

    def __init__(self, tools: wink.ToolRegistry, adapter: ScriptedAdapter) -> None:
        super().__init__(adapter=adapter)
        self.section = tools.as_section(title="Invoice desk", template="You write invoices.")

    def prepare(self, request: str) -> tuple[wink.Prompt[str], Session]:
        task = wink.MarkdownSection(title="Request", template=request.replace("$", "$$"))
        return wink.Prompt(wink.PromptTemplate[str](sections=[self.section, task])), Session()


def main() -> None:
    desk = open_desk()
    print(desk.execute("bill", {"customer": "Ann", "amounts": [30]}).message)  # not looked up yet
    print(desk.execute("find_customer", {"name": "Ann"}).unwrap())
    print(desk.execute("bill", {"customer": "Ann", "amounts": ["30", 40]}).unwrap().render())
    print(desk.execute("bill", {"customer": "Ann", "amounts": [50]}).message)  # too little credit
    print(desk.execute("pay", {"number": 1, "cash": 80}).message)  # too much: the till is as before

    both = parallel([find_customer, pay], name="settle")  # one transaction
    desk.register(both)
    done = desk.execute("settle", {"name": "Ann", "number": 1, "cash": 20})
    print(done.success, invoices(desk), desk.context().resources.get(Till))

    model = ScriptedAdapter(
        [
            calls(("find_customer", {"name": "Bob"})),
            calls(("bill", {"customer": "Bob", "amounts": [5]})),
            "Bob has invoice 2.",
        ]
    )
    response, _ = Desk(desk, model).execute("Bill Bob 5")
    print(response.unwrap(), invoices(desk))


if __name__ == "__main__":
    main()
