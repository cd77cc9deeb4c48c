"""An application as users write one. Checked by ``test_typing_surface``, never run.

Nothing in it needs an ignore comment, whether the user checks in pyright's basic mode, in its
strict mode, or with ``mypy --strict``.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

from sqlalchemy import text

import weakincentives as wink
from weakincentives.adapters import (
    Adapter,
    AnthropicAdapter,
    ClaudeAgentSDKAdapter,
    LiteLLMAdapter,
    LocalAdapter,
    ModelRequest,
    ModelTurn,
    OpenAIAdapter,
    ScriptedAdapter,
)
from weakincentives.contrib.databases import AsyncSqlDatabase, SqlDatabase, SqliteDatabase
from weakincentives.filesystem import HostFilesystem
from weakincentives.mcp import McpServer
from weakincentives.prompt import (
    AnyPolicy,
    Approval,
    ApprovalPolicy,
    ApprovalRequest,
    CascadeEffect,
    CustomPrecondition,
    Effect,
    NotificationEffect,
    PolicyDecision,
    QuotaPolicy,
    SequentialDependencyPolicy,
    StateChangeEffect,
    if_offered,
)
from weakincentives.resources import Binding, Forkable, Scope
from weakincentives.retry import RetryPolicies
from weakincentives.runtime import (
    MainLoop,
    MainLoopConfig,
    SavedSession,
    Session,
    Slice,
    ToolInvoked,
    parallel,
    replace_latest,
    sequence,
    tool_transaction,
)
from weakincentives.testing import MadeUpAdapter, no_model_requests, resource_cases

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    text: str


@dataclass(frozen=True)
class Order:
    number: int


@dataclass(frozen=True)
class Booked:
    seat: str


# Contracts: every function names what it wants, in any order


def is_valid(params: Order) -> bool:
    return params.number > 0


async def is_free(*, context: wink.ToolContext, params: Order) -> bool:
    return context.filesystem.exists(f"{params.number}")


def within(limit: int, params: Order) -> bool:
    return params.number < limit


class Stock:
    def has(self, params: Order, context: wink.ToolContext) -> bool:
        return bool(context.call_id) and params.number > 0

    def release(self, params: Order, result: wink.ToolResult[Booked]) -> None:
        _logger.info("released %s: %s", params.number, result.success)


def cancel(result: wink.ToolResult[Booked], context: wink.ToolContext, params: Order) -> None:
    _logger.info("cancelled %s: %s %s", params.number, context.call_id, result.message)


def seat_of(result: wink.ToolResult[Booked]) -> str:
    return "" if result.value is None else result.value.seat


async def tell(context: wink.ToolContext) -> None:
    context.beat()


stock = Stock()
preconditions = [
    CustomPrecondition(description="nothing", check=lambda: True),
    CustomPrecondition(description="valid", check=is_valid),
    CustomPrecondition(description="free", check=is_free),
    CustomPrecondition(description="within", check=functools.partial(within, 3)),
    CustomPrecondition(description="stock", check=stock.has),
    CustomPrecondition(description="session", check=lambda context: bool(context.session_id)),
    CustomPrecondition(description="both", check=lambda params, context: bool(context.call_id)),
]
effects = [
    Effect(apply=lambda: None, rollback=cancel),
    Effect(apply=tell, rollback=stock.release),
    Effect(
        apply=lambda result: _logger.info(result.message), rollback=lambda context: context.beat()
    ),
    StateChangeEffect(state="orders", change="increment"),
    NotificationEffect(event="booked", payload=seat_of),
    CascadeEffect(trigger_tool="receipt", trigger_condition=lambda result: result.success),
]


@wink.tool(
    reach="compensable",
    preconditions=preconditions,
    effects=effects,
    retry=RetryPolicies.QUICK,
)
def book(params: Order, *, context: wink.ToolContext) -> wink.ToolResult[Booked]:
    """Book a seat."""
    return wink.ToolResult.ok(Booked("12A"))


# Policies


class OfficeHours:
    def check(self, tool_name: str, params: object, context: wink.ToolContext) -> str | None:
        return None if tool_name != "book" else "Closed"


class Careful:
    name = "careful"

    async def check(
        self, tool: wink.Tool[object, object], params: object, *, context: wink.ToolContext
    ) -> PolicyDecision:
        return PolicyDecision.deny(f"Not {tool.name}")


async def ask(request: ApprovalRequest) -> Approval:
    return Approval(True, by=request.session_id)


policies: list[AnyPolicy] = [
    OfficeHours(),
    Careful(),
    QuotaPolicy(3, tools={"book", if_offered("receipt")}),
    SequentialDependencyPolicy(dependencies={"book": {if_offered("search")}}),
    ApprovalPolicy(ask=ask, tools={"book"}),
]
section = wink.MarkdownSection(title="Seats", tools=[book], policies=policies)
registry = wink.ToolRegistry([book], policies=policies)
answer: wink.ToolResult[Booked] = book(Order(1), context=wink.ToolContext(Session()))


# Databases and other resources


class Orders(SqliteDatabase):
    """A second database, with a type of its own."""


class Till:
    def __init__(self) -> None:
        self.total = 0

    def snapshot(self) -> int:
        return self.total

    def restore(self, token: int, /) -> None:
        self.total = token


@wink.tool(reach="reversible", needs=(SqliteDatabase, Orders, SqlDatabase, Till), strict=False)
def bill(number: int, *, context: wink.ToolContext) -> Booked:
    """Bill an order."""
    db = context.resources.get(SqliteDatabase)
    rows = db.execute("INSERT INTO invoice (number) VALUES (?) RETURNING seat", (number,))
    for row in rows:
        _logger.info("%s %s", row["seat"], rows.rowcount)
    with context.resources.get(Orders).transaction() as orders:
        orders.executemany("DELETE FROM seats WHERE number = :number", [{"number": number}])
    sql = context.resources.get(SqlDatabase)
    names: list[str] = list(sql.execute("SELECT name FROM customer").scalars())
    context.resources.get(Till).total += len(names)
    return Booked(str(rows.one()["seat"]))


@wink.tool
async def bill_later(number: int, *, context: wink.ToolContext) -> int:
    """Bill an order later."""
    db = context.resources.get(AsyncSqlDatabase)
    await db.execute("UPDATE customer SET number = :number", {"number": number})
    found: int = await db.run(lambda db: len(db.session.execute(text("SELECT 1")).all()))
    return found


seat: str = bill(3, context=wink.ToolContext(Session())).unwrap().seat
count: int = bill_later({"number": 3}).unwrap()
resources: dict[type, object] = {SqliteDatabase: SqliteDatabase(":memory:"), Till: Till()}
desk = wink.ToolRegistry([bill, bill_later], resources=resources, strict=False, debug=True)


# What calls changed, after a kill and undone


def look_back(database: SqliteDatabase, saved: SavedSession, files: HostFilesystem) -> None:
    database.track("invoice")
    for call in database.calls():
        undone = database.undo([call.call_id])
        _logger.info("%s %s %s", call.tool, undone.notes, [each.name for each in undone.changes])
    saved.recover(files, databases=[database])
    record = saved.session[ToolInvoked].latest()
    _logger.info("%s", record and record.result.message)


# State, transactions, compositions, and a resource with views


def add_plan(plans: Slice[Booked], event: Order) -> tuple[Booked, ...]:
    return (*plans, Booked(str(event.number)))


session = Session()
session[Booked].register(Order, add_plan)
session[Order].register(Order, replace_latest)
with tool_transaction(session, resources):
    session.dispatch(Order(3))
latest: Booked | None = session[Booked].latest()
desk.register(sequence([bill, bill_later], name="both"))
desk.register(parallel([bill, bill_later], name="together"))
server = McpServer(desk, name="desk")


class Shelf:
    """A resource whose calls run concurrently."""

    def __init__(self, items: tuple[str, ...] = ()) -> None:
        self.items = items

    def snapshot(self) -> tuple[str, ...]:
        return self.items

    def restore(self, token: tuple[str, ...], /) -> None:
        self.items = token

    def fork(self) -> Shelf:
        return Shelf(self.items)

    def merge(self, view: Shelf, /) -> None:
        self.items = view.items

    def discard(self, view: Shelf, /) -> None:
        _logger.info("discarded %s", view.items)


views: Forkable = Shelf()
bindings = {Shelf: Binding(Shelf, lambda resolver: Shelf(), scope=Scope.SINGLETON)}
shelves = wink.ToolRegistry([book], resources=bindings)
for case in resource_cases():
    case.check(
        Shelf, lambda shelf, number: shelf.restore((str(number),)), lambda shelf: shelf.items
    )


# Outputs: text, unions, functions and validators


def is_booked(booked: Booked) -> None:
    if not booked.seat:
        raise ValueError("name the seat")


def booked(seat: str) -> Booked:
    """Return what was booked."""
    return Booked(seat)


def outputs(adapter: Adapter) -> None:
    template = wink.PromptTemplate[Booked](sections=[section], output_validators=[is_booked])
    made = wink.PromptTemplate[Booked](sections=[section], output_type=booked)
    answer: Booked = adapter.evaluate(wink.Prompt(template), Session()).unwrap()
    other: Booked = adapter.evaluate(wink.Prompt(made), Session()).unwrap()
    said: str = adapter.evaluate(wink.Prompt(wink.PromptTemplate[str]()), Session()).unwrap()
    _logger.info("%s %s %s", answer.seat, other.seat, said)


def tested() -> None:
    with no_model_requests():
        outputs(MadeUpAdapter())
    config = MainLoopConfig(tools={"book"}, debug=True)
    Desk(adapter=MadeUpAdapter(), config=config).execute(Request("a seat"))
    MainLoopConfig(tools=lambda tool: tool.reach == "read")


# The loop takes every adapter


class Echo(Adapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        return ModelTurn(text="echo")


class Desk(MainLoop[Request, Booked]):
    def prepare(self, request: Request) -> tuple[wink.Prompt[Booked], Session]:
        template = wink.PromptTemplate[Booked](sections=[section])
        return wink.Prompt(template), Session()


def serve(adapter: Adapter) -> Booked:
    desk = Desk(adapter=adapter, config=MainLoopConfig(max_turns=3))
    response, session = desk.execute(Request("a seat"), resources={Stock: Stock()})
    assert session.session_id
    return response.unwrap()


async def serve_later() -> None:
    for desk in (
        Desk(adapter=Echo()),
        Desk(adapter=ScriptedAdapter(["hello"])),
        Desk(adapter=OpenAIAdapter(model="m")),
        Desk(adapter=LiteLLMAdapter(model="m")),
        Desk(adapter=LocalAdapter()),
        Desk(adapter=AnthropicAdapter("m")),
        Desk(adapter=ClaudeAgentSDKAdapter()),
    ):
        response, _ = await desk.aexecute(Request("a seat"))
        _logger.info("%s", response.output)
