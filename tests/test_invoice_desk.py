"""The invoice desk of ``examples/``: alone, over MCP, and inside another framework's bridge."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters

import weakincentives as wink
from weakincentives.contrib.databases import SqliteDatabase
from weakincentives.errors import WinkError
from weakincentives.integrations.bridge import Bridge
from weakincentives.prompt import QuotaPolicy
from weakincentives.runtime import Session

DESK = Path(__file__).parents[1] / "examples" / "invoice_desk"
BILL = {"customer": "Ann", "amounts": [70]}


@pytest.fixture
def desk_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(DESK))
    import desk

    yield desk
    del sys.modules["desk"]


def test_the_desk_refuses_rolls_back_and_settles():
    done = subprocess.run(
        [sys.executable, str(DESK / "desk.py")], capture_output=True, text=True, check=True
    )

    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "Cannot call 'bill' - missing required tools: find_customer",
        "Call these tools first, then retry bill.",
        "Ann has a credit of 100",
        "Invoice 1: Ann, 70",
        "Ann has too little credit for 50",
        "80 is 10 too much",
        "True [('Ann', 70, 20)] Till(cash=20)",
        "Bob has invoice 2. [('Ann', 70, 20), ('Bob', 5, 0)]",
    ]


def test_the_desk_over_mcp_writes_into_its_database(tmp_path: Path):
    async def run() -> list[tuple[bool, str]]:
        server = StdioServerParameters(
            command=sys.executable, args=[str(DESK / "server.py"), str(tmp_path / "desk.db")]
        )
        said: list[tuple[bool, str]] = []
        async with Client(server) as client:
            for name, arguments in (
                ("bill", BILL),
                ("find_customer", {"name": "Ann"}),
                ("bill", BILL),
                ("bill", BILL),
                ("pay", {"number": 1, "cash": 80}),
            ):
                result: Any = await client.call_tool(name, arguments)
                said.append((result.is_error, result.content[0].text.splitlines()[0]))
        return said

    assert asyncio.run(run()) == [
        (True, "Cannot call 'bill' - missing required tools: find_customer"),
        (False, "Ann has a credit of 100"),
        (False, "Invoice 1: Ann, 70"),
        (True, "Ann has too little credit for 70"),
        (True, "80 is 10 too much"),
    ]
    with SqliteDatabase(tmp_path / "desk.db").transaction() as db:
        assert [tuple(row) for row in db.execute("SELECT total, paid FROM invoice")] == [(70, 0)]


# Inside a framework: what all integrations share


def test_a_bridge_takes_an_applications_registry_and_no_directory(desk_module: Any):
    with desk_module.open_desk() as desk, Bridge(registry=desk) as bridge:
        assert not bridge.has_directory
        assert {"bill", "pay"} <= {tool.name for tool in bridge.tools}
        assert "missing required tools" in bridge.call("bill", BILL, call_id="1").message
        assert bridge.call("find_customer", {"name": "Ann"}, call_id="2").success
        assert bridge.call("bill", BILL, call_id="3").success
        again = bridge.call("bill", BILL, call_id="3")  # on record: nothing runs
        assert again.value.number == 1
        assert not bridge.call("bill", BILL, call_id="4").success
        assert desk_module.invoices(desk) == [("Ann", 70, 0)]
        with pytest.raises(WinkError, match=r"give workspace=\.\.\."):
            bridge.directory()
    with pytest.raises(TypeError, match="leave out the others"):
        Bridge(registry=desk, tools=[])


def test_a_bridge_takes_sections_resources_and_a_session(desk_module: Any, tmp_path: Path):
    @wink.tool(reach="reversible", needs=(desk_module.Till,))
    def earn(cash: int, *, context: wink.ToolContext) -> int:
        """Earn."""
        till = context.resources.get(desk_module.Till)
        till.cash += cash
        if cash > 100:
            raise ValueError("too much")
        return till.cash

    till, session = desk_module.Till(), Session()
    section = wink.MarkdownSection(
        title="Till", tools=[earn], policies=[QuotaPolicy(3, tools={"earn"})]
    )
    options: dict[str, Any] = {"sections": [section], "resources": {desk_module.Till: till}}
    with Bridge(None, session=session, **options) as bridge:
        assert bridge.call("earn", {"cash": 5}).value == 5
        assert not bridge.call("earn", {"cash": 500}).success
        assert bridge.call("earn", {"cash": 5}).value == 10
        assert "Quota exceeded" in bridge.call("earn", {"cash": 5}).message
        assert bridge.registry().session is session
    assert till.cash == 10

    place = tmp_path / "shop"
    place.mkdir()
    with Bridge(place, **options) as bridge:
        assert bridge.call("earn", {"cash": 5}, call_id="1").value == 15
        assert bridge.registry().workspace.root == place
    with pytest.raises(TypeError, match="give workspace=None"):
        Bridge(place, session=session)
