"""An agent cleans up customer records: with a quota, with approvals, all of a batch or none of it.

The records come from a CSV file and are in an SQLite database, which takes part in every call's
transaction. Run it with `.venv/bin/python examples/data_cleanup.py`.
"""

from __future__ import annotations

import csv
import io
import sqlite3
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, Turn, calls
from weakincentives.prompt import Approval, ApprovalPolicy, ApprovalRequest, QuotaPolicy
from weakincentives.runtime import ToolInvoked

CUSTOMERS = """\
id,email,orders,last_order
1,ada@example.org,7,2026
2,ADA@example.org,2,2024
3,bob@example.org,0,2019
4,carl@example.org,1,2018
5,dora@example.org,0,2017
6,test@test.test,0,2026
"""


class Database:
    """Records that follow the call: what it changed is gone when it fails.

    The run is one transaction of SQLite, and each call a savepoint in it. With these two methods
    any resource takes part.
    """

    def __init__(self, path: Path) -> None:
        # A call that asks somebody runs in another thread, but never beside another call.
        self._connection = sqlite3.connect(path, check_same_thread=False)
        self._connection.isolation_level = None  # transactions are ours
        self._snapshots = 0
        self.run("BEGIN")

    def run(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        return self._connection.execute(statement, values).fetchall()

    def take(self, customer: str) -> tuple[object, ...]:
        """Delete a customer and return what was there."""
        gone = self.run("DELETE FROM customers WHERE id = ? RETURNING *", customer)
        if not gone:
            raise ValueError(f"There is no customer {customer}")
        return gone[0]

    def snapshot(self) -> str:
        self._snapshots += 1
        name = f"call_{self._snapshots}"
        self.run(f"SAVEPOINT {name}")
        return name

    def restore(self, token: str) -> None:
        self.run(f"ROLLBACK TO {token}")

    def close(self) -> None:
        self._connection.close()


# The tools


@wink.tool(reach="read")
def query(where: str, *, context: wink.ToolContext) -> str:
    """List the customers for which an SQL condition holds."""
    database = context.resources.get(Database)
    database.run("PRAGMA query_only = 1")  # whatever the condition says
    try:
        return _lines(database.run(f"SELECT * FROM customers WHERE {where}"))
    except sqlite3.Error as error:
        raise ValueError(f"That is not a condition: {error}") from error
    finally:
        database.run("PRAGMA query_only = 0")


@wink.tool(reach="reversible")
def merge(keep: str, drop: str, *, context: wink.ToolContext) -> str:
    """Give the orders of one customer to another, and delete the first."""
    database = context.resources.get(Database)
    _, _, orders, _ = database.take(drop)
    database.run("UPDATE customers SET orders = orders + ? WHERE id = ?", orders, keep)
    _check(database)
    return f"Customer {keep} has {orders} more orders; {drop} is gone"


@wink.tool(reach="reversible")
def delete(ids: list[str], reason: str, *, context: wink.ToolContext) -> str:
    """Delete customers, and keep a list of what was deleted."""
    database = context.resources.get(Database)
    for each in ids:
        gone = _lines([(*database.take(each), reason)])
        context.filesystem.append("deleted.csv", f"{gone}\n")
    _check(database)  # raises: all of them are back, and so is the list
    return f"Deleted {len(ids)} customers"


def _check(database: Database) -> None:
    """What must hold after every call, whatever it was meant to do."""
    [[orders]] = database.run("SELECT sum(orders) FROM customers")
    if orders != 10:
        raise ValueError(f"10 orders must have a customer, and now {orders} have")


def _lines(rows: Iterable[tuple[object, ...]]) -> str:
    return "\n".join(",".join(map(str, row)) for row in rows)


# The person who is asked. Yours might be a prompt on a terminal, or a message to a channel.


def ask(request: ApprovalRequest) -> Approval:
    if len(request.arguments["ids"]) > 3:
        return Approval(False, by="data owner", reason="no more than 3 at once")
    return Approval(True, by="data owner")


SCRIPT: list[Turn] = [
    calls(("query", {"where": "lower(email) IN ('ada@example.org')"})),
    calls(("merge", {"keep": "1", "drop": "2"})),
    calls(("delete", {"ids": ["3", "4", "5", "6"], "reason": "old or a test"})),  # not approved
    calls(("delete", {"ids": ["3", "4", "5"], "reason": "old"})),  # 4 has an order: all undone
    calls(("query", {"where": "last_order < '2020'"})),
    calls(("delete", {"ids": ["3", "5"], "reason": "old"})),
    calls(("delete", {"ids": ["6"], "reason": "a test"})),  # two calls have run: the quota
    "Merged 1 pair and deleted 2 old customers. Customer 6 is a test; I may not delete more.",
]


def load(path: Path, table: str) -> None:
    names, *rows = csv.reader(io.StringIO(table))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE customers ({', '.join(names)})")
        database.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", rows)


def clean_up(path: Path) -> None:
    files = wink.MemoryFilesystem()
    session = wink.Session()
    sections = [
        wink.MarkdownSection(
            title="Customers",
            template="Merge customers that are there twice. Delete those without use.",
            tools=[query, merge],
        ),
        # A section's policies hold for its tools: only deletions are counted and asked about.
        # The quota comes first, so that nobody is asked about what may not be done anyway.
        wink.MarkdownSection(
            title="Deletions",
            tools=[delete],
            policies=[QuotaPolicy(max_calls=2), ApprovalPolicy(ask=ask)],
        ),
    ]
    with closing(Database(path)) as database:
        prompt = wink.Prompt(wink.PromptTemplate(sections=sections)).bind(
            resources={wink.Filesystem: files, Database: database}
        )
        answer = ScriptedAdapter(SCRIPT).evaluate(prompt, session)
        left = database.run("SELECT id, email, orders FROM customers")
        database.run("COMMIT")  # the run as a whole; without it, nothing has happened

    for record in session[ToolInvoked].all():
        said = "\n          ".join(record.result.render().splitlines())
        print(f"{'ok' if record.success else '--'} {record.tool_name:<6} {said}")
        for note in record.notes:
            print(f"          ({note})")
    print(f"\n{answer.text}\n\nLeft:\n{_lines(left)}\n\ndeleted.csv:\n{files.read('deleted.csv')}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "customers.db"
        load(path, CUSTOMERS)
        clean_up(path)


if __name__ == "__main__":
    main()
