"""The most likely mistakes: each ends at once in one line that says what to do.

``MISTAKES`` is the table: a mistake, and words of its message. A mistake either raises, or is the
message of a failed call.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter
from weakincentives.contrib.databases import SqlDatabase, SqliteDatabase
from weakincentives.core.budget import Budget
from weakincentives.prompt import (
    CascadeEffect,
    CustomPrecondition,
    PolicyDecision,
    QuotaPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
)
from weakincentives.resources import Binding
from weakincentives.retry import RetryPolicies
from weakincentives.runtime import MainLoop, Session, ToolRegistry
from weakincentives.session.memory import MemoryManager

DOCS = Path(__file__).parents[1] / "docs" / "mistakes.md"


@dataclass(frozen=True)
class Plan:
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Added:
    step: str


@dataclass(frozen=True)
class Order:
    number: int = 0


@dataclass(frozen=True)
class Receipt:
    number: int = 0


class Shelf:
    def __init__(self) -> None:
        self.items: list[str] = []

    def snapshot(self) -> Any:
        return tuple(self.items)

    def restore(self, token: Any) -> None:
        self.items[:] = token


class Drawer(Shelf):
    """A shelf of another type."""


def handler(params: Order, *, context: wink.ToolContext) -> wink.ToolResult[Receipt]:
    return wink.ToolResult.ok(Receipt(params.number))


@wink.tool(reach="reversible")
def add(number: int, *, context: wink.ToolContext) -> int:
    """Add."""
    return number


def section(**fields: Any) -> wink.MarkdownSection[Any]:
    return wink.MarkdownSection(title="Desk", **fields)


def prompt(**fields: Any) -> wink.Prompt[Any]:
    return wink.Prompt(wink.PromptTemplate(sections=[section(**fields)]))


def called(function: Callable[..., Any], *, params: Any = None, **options: Any) -> Any:
    """Call a function as a tool of a registry."""
    function.__doc__ = function.__doc__ or "Do."
    tool = wink.tool(function)
    return ToolRegistry([tool], **options).execute(tool.name, params)


def bound(methods: dict[str, Any]) -> None:
    """Bind a resource that has some methods."""
    resource: Any = type("Camera", (), methods)
    ToolRegistry([add], resources={resource: resource()})


def with_policy(**methods: Any) -> Any:
    return ToolRegistry([add], policies=[type("Rule", (), methods)()]).execute("add", {"number": 1})


def served(prepared: Any) -> None:
    """Serve a request with what ``prepare`` returns."""
    loop: Any = type("Desk", (MainLoop,), {"prepare": lambda self, request: prepared})
    loop(adapter=ScriptedAdapter(["hello"])).execute("a question")


def reduced(reducer: Any) -> None:
    session = Session()
    session[Plan].register(Added, reducer)
    session.dispatch(Added("one"))


def after_its_end() -> None:
    kept: list[wink.ToolContext] = []

    def keeps(*, context: wink.ToolContext) -> None:
        kept.append(context)

    called(keeps)
    kept[0].session.dispatch(Plan())


def in_a_thread() -> Any:
    """Call a tool from a thread that the call itself waits for."""
    raised: list[Exception] = []

    @wink.tool
    def outer() -> None:
        """Start a thread and wait for it."""

        def work() -> None:
            try:
                tools.execute("add", {"number": 1})
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    tools = ToolRegistry([outer, add])
    tools.execute("outer")
    raise raised[0]


def in_a_pool() -> Any:
    @wink.tool
    def outer() -> Any:
        """Wait for a future."""
        with ThreadPoolExecutor() as pool:
            return pool.submit(tools.execute, "add", {"number": 1}).result().message

    tools = ToolRegistry([outer, add])
    return tools.execute("outer")


def group() -> int:
    """Fail in a task group."""

    async def fails() -> None:
        raise ValueError("the printer is out of paper")

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails())

    asyncio.run(main())
    return 1


def nothing() -> int:  # type: ignore[empty-body]
    """Return nothing."""


def text() -> int:
    """Return another type."""
    return "one"  # type: ignore[return-value]


def unawaited() -> int:
    """Forget to await."""
    return asyncio.sleep(0)  # type: ignore[return-value]


def yields() -> list[int]:
    """Yield."""
    yield 1  # type: ignore[misc]


def result_of_value() -> wink.ToolResult[int]:
    """Make a result without ok."""
    return wink.ToolResult(5)  # type: ignore[arg-type]


def error_of_error() -> wink.ToolResult[int]:
    """Give an exception for a message."""
    return wink.ToolResult.error(ValueError("no"))  # type: ignore[arg-type]


def reads(*, context: wink.ToolContext) -> str:
    """Read a file where there are none."""
    return context.filesystem.read("a.txt")


def asks_shelf(*, context: wink.ToolContext) -> int:
    """Ask for a base class."""
    return len(context.resources.get(Shelf).items)


def commits(*, context: wink.ToolContext) -> None:
    """Commit by hand."""
    context.resources.get(SqliteDatabase).execute("COMMIT")


def undocumented() -> int:
    return 1


undocumented.__doc__ = None


def untyped(number) -> int:  # type: ignore[no-untyped-def]
    """Take something."""
    return 1


def starred(*numbers: int) -> int:
    """Take some."""
    return 1


async def async_snapshot(self: Any) -> None: ...


def template() -> wink.PromptTemplate[Any]:
    return wink.PromptTemplate(sections=[section(tools=[add])])


def closed() -> Any:
    tools = ToolRegistry([add])
    tools.close()
    return tools.execute("add", {"number": 1})


def memory_database() -> SqliteDatabase:
    return SqliteDatabase(":memory:")


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # Tools
    "@tool without a docstring": (lambda: wink.tool(undocumented), "needs a docstring"),
    "@tool without a type": (lambda: wink.tool(untyped), "needs a type annotation"),
    "@tool with *args": (lambda: wink.tool(starred), "a model gives arguments by name"),
    "@tool twice": (lambda: wink.tool(add), "is a tool already: apply @tool once"),
    "a forgotten return": (lambda: called(nothing), "is a return statement missing?"),
    "a result of another type": (lambda: called(text), "its contract is ToolResult[int]"),
    "a forgotten await": (lambda: called(unawaited), "make it `async def`, or await"),
    "yield in a tool": (lambda: called(yields), "return a list of what it yields"),
    "ToolResult(value)": (lambda: called(result_of_value), "return ToolResult.ok(value)"),
    "ToolResult.error(exception)": (lambda: called(error_of_error), "takes a message"),
    "a handler without context": (
        lambda: wink.Tool[Order, Receipt](
            name="a",
            description="b",
            handler=lambda params: wink.ToolResult.ok(Receipt()),  # type: ignore[arg-type,misc]
        ),
        "must be callable as handler(params, *, context)",
    ),
    "a handler of other types": (
        lambda: wink.Tool[Receipt, Order](name="a", description="b", handler=handler),  # type: ignore[arg-type]
        "its handler takes Order, but the tool's parameters are Receipt",
    ),
    "a name with a space": (
        lambda: wink.Tool[Order, Receipt](name="a b", description="b", handler=handler),
        "its name must match",
    ),
    "a misspelt reach": (
        lambda: wink.tool(reach="reads")(nothing),  # type: ignore[arg-type]
        "reach must be one of",
    ),
    "retry without a reach": (
        lambda: wink.tool(retry=RetryPolicies.QUICK)(nothing),
        "state its reach, or leave out retry",
    ),
    "a precondition in words": (
        lambda: wink.tool(preconditions=["must exist"])(nothing),  # type: ignore[list-item]
        "preconditions must be a Precondition",
    ),
    "a check with another name": (
        lambda: CustomPrecondition(description="valid", check=lambda order: True),
        "check asks for order, but it is called with context, params",
    ),
    "a cascade to no tool": (
        lambda: ToolRegistry([wink.tool(effects=[CascadeEffect(trigger_tool="ad")])(nothing), add]),
        "calls the tool 'ad', which the registry does not offer; did you mean 'add'?",
    ),
    "a task group that fails": (lambda: called(group), "the printer is out of paper"),
    # Registries and sections
    "one tool for a list": (lambda: ToolRegistry(add), "takes a list of tools"),  # type: ignore[arg-type]
    "a function for a tool": (
        lambda: ToolRegistry([handler]),  # type: ignore[list-item]
        "make one with @tool",
    ),
    "a tool twice": (lambda: ToolRegistry([add, add]), "Tool 'add' is already registered"),
    "one tool for a list in a section": (lambda: section(tools=add), "write tools=[...]"),
    "a function for a tool in a section": (lambda: section(tools=[handler]), "is not a Tool"),
    "a tool in two sections": (
        lambda: wink.PromptTemplate(
            sections=[section(tools=[add]), wink.MarkdownSection(title="B", tools=[add])]
        ),
        "two tools are called 'add'",
    ),
    "a misspelt tool name": (
        lambda: ToolRegistry([add]).execute("addd", {"number": 1}),
        "Did you mean 'add'?",
    ),
    "arguments as a list": (
        lambda: ToolRegistry([add]).execute("add", [1]),
        "Expected type object, got array",
    ),
    "a number as a string": (
        lambda: ToolRegistry([add]).execute("add", {"number": "1"}),
        "Expected type integer, got string",
    ),
    "a call on a closed registry": (closed, "this registry is closed"),
    "no directory": (lambda: ToolRegistry([add], workspace="/no/such/place"), "not a directory"),
    "files without a workspace": (lambda: called(reads), "give workspace=..."),
    # Policies
    "a policy about no tool": (
        lambda: ToolRegistry([add], policies=[QuotaPolicy(3, tools={"ad"})]),
        "so it would never apply; did you mean 'add'?",
    ),
    "a dependency on no tool": (
        lambda: ToolRegistry([add], policies=[SequentialDependencyPolicy({"add": {"read"}})]),
        "refers to the tool 'read'",
    ),
    "a policy of a section about no tool": (
        lambda: prompt(tools=[add], policies=[QuotaPolicy(3, tools={"ad"})]),
        "which section 'Desk' does not offer",
    ),
    "a class for a policy": (
        lambda: ToolRegistry([add], policies=[ReadBeforeWritePolicy]),  # type: ignore[list-item]
        "it takes an instance",
    ),
    "one policy for a list": (
        lambda: ToolRegistry([add], policies=ReadBeforeWritePolicy()),  # type: ignore[arg-type]
        "write policies=[...]",
    ),
    "a policy of both forms": (
        lambda: with_policy(
            check=lambda self, tool_name, params, context: None,
            on_result=lambda self, tool, params, result, *, context: None,
        ),
        "mixes both forms",
    ),
    "a policy that returns True": (
        lambda: with_policy(name="r", check=lambda self, tool, params, *, context: True),
        "must return a PolicyDecision",
    ),
    "a policy that returns nothing": (
        lambda: with_policy(name="r", check=lambda self, tool, params, *, context: None),
        "must return a PolicyDecision",
    ),
    "a small policy that returns False": (
        lambda: with_policy(check=lambda self, tool_name, params, context: False),
        "must return None or the reason",
    ),
    "a policy with another signature": (
        lambda: with_policy(name="r", check=lambda self, tool, *, context: PolicyDecision.allow()),
        "does not fit",
    ),
    # Sessions
    "a list in a slice": (lambda: Session().dispatch(Plan(["a"])), "is a list; use a tuple"),  # type: ignore[arg-type]
    "dispatch of a class": (lambda: Session().dispatch(Plan), "write dispatch(Plan(...))"),
    "a slice by name": (lambda: Session()["Plan"].all(), "takes the type of a slice"),  # type: ignore[index]
    "a slice by value": (lambda: Session()[Plan()].all(), "takes the type of a slice"),  # type: ignore[index]
    "a reducer that returns other types": (
        lambda: reduced(lambda plans, event: [event.step]),
        "it must return values of type Plan, got 'one'",
    ),
    "a reducer that returns nothing": (
        lambda: reduced(lambda plans, event: None),
        "it must return all values of the slice",
    ),
    "a reducer that returns one value": (
        lambda: reduced(lambda plans, event: Plan()),
        "it must return all values of the slice",
    ),
    "an async reducer": (lambda: reduced(async_snapshot), "must not be async"),
    "pickling a session": (lambda: pickle.dumps(Session()), "session.snapshot().to_json()"),
    "copying a session": (lambda: copy.deepcopy(Session()), "session.snapshot().to_json()"),
    "a context kept after its call": (after_its_end, "has ended"),
    "a call without a prompt": (
        lambda: wink.execute_tool(wink.ToolCall("add"), session=Session()),
        "pass prompt=..., or render one",
    ),
    "a memory scope that there is not": (
        lambda: MemoryManager().write("longterm", "a", 1),
        "use 'working', 'short-term', 'long-term'",
    ),
    # Threads
    "a thread without its context": (in_a_thread, "pass on its context"),
    "a pool without its context": (in_a_pool, "pass on its context"),
    # Resources
    "snapshot without restore": (
        lambda: bound({"snapshot": lambda self: 1}),
        "it has snapshot() but no restore()",
    ),
    "restore without snapshot": (
        lambda: bound({"restore": lambda self, token: None}),
        "it has restore() but no snapshot()",
    ),
    "fork without merge": (
        lambda: bound({**vars(Shelf), "fork": lambda self: self}),
        "it has fork() but no merge()",
    ),
    "fork and merge without snapshot": (
        lambda: bound({"fork": lambda self: self, "merge": lambda self, view: None}),
        "no snapshot() and restore()",
    ),
    "an async snapshot": (
        lambda: bound({**vars(Shelf), "snapshot": async_snapshot}),
        "snapshot() must not be async",
    ),
    "restore without a token": (
        lambda: bound({**vars(Shelf), "restore": lambda self: None}),
        "restore() is called with one value",
    ),
    "snapshot without restore, from a provider": (
        lambda: called(
            asks_shelf,
            resources={Shelf: Binding(Shelf, lambda r: type("S", (), {"snapshot": id})())},  # type: ignore[arg-type,return-value]
        ),
        "it has snapshot() but no restore()",
    ),
    "a class for an instance": (
        lambda: ToolRegistry([add], resources={Shelf: Shelf}),
        "bind an instance, or Binding(Shelf, provider)",
    ),
    "None for an instance": (
        lambda: ToolRegistry([add], resources={Shelf: None}),
        "Shelf is bound to None",
    ),
    "a value of another type": (
        lambda: ToolRegistry([add], resources={Shelf: 3}),
        "Shelf is bound to 3, which is no Shelf",
    ),
    "a resource by name": (
        lambda: ToolRegistry([add], resources={"shelf": Shelf()}),  # type: ignore[dict-item]
        "Resources are bound by type",
    ),
    "resources as a list": (
        lambda: ToolRegistry([add], resources=[Shelf()]),  # type: ignore[arg-type]
        "{type: instance or Binding}",
    ),
    "a resource bound as its subclass": (
        lambda: called(asks_shelf, resources={Drawer: Drawer()}),
        "but Drawer is",
    ),
    "COMMIT in a handler": (
        lambda: called(commits, resources={SqliteDatabase: memory_database()}),
        "leave out COMMIT",
    ),
    "a statement outside a call": (
        lambda: memory_database().execute("SELECT 1"),
        "with database.transaction() as db:",
    ),
    "a database in no directory": (
        lambda: SqliteDatabase("/no/such/place/desk.db"),
        "unable to open database file: /no/such/place/desk.db",
    ),
    "another engine": (lambda: SqlDatabase("sqlite://"), "takes a SQLAlchemy Engine"),  # type: ignore[arg-type]
    # Runs
    "a template for a prompt": (
        lambda: ScriptedAdapter(["a"]).evaluate(template(), Session()),  # type: ignore[arg-type]
        "write Prompt(template)",
    ),
    "prepare that returns the prompt only": (
        lambda: served(prompt()),
        "prepare must return (prompt, session)",
    ),
    "prepare that returns nothing": (lambda: served(None), "prepare must return (prompt, session)"),
    "prepare that returns a template": (
        lambda: served((template(), Session())),
        "write Prompt(template)",
    ),
    "prepare in the other order": (lambda: served((Session(), prompt())), "got (session, prompt)"),
    "a class for an adapter": (
        lambda: type("Desk", (MainLoop,), {"prepare": None})(adapter=ScriptedAdapter),
        "write ScriptedAdapter(...)",
    ),
    "a script that is one text": (lambda: ScriptedAdapter("hello"), "write ['hello']"),
    "seconds for a deadline": (
        lambda: ScriptedAdapter(["a"]).evaluate(prompt(), Session(), deadline=30),  # type: ignore[arg-type]
        "write Deadline.after(seconds)",
    ),
    "a negative budget": (lambda: Budget(max_total_tokens=-1), "must be positive"),
    "a placeholder without parameters": (
        lambda: prompt(template="Hello ${name}"),
        "unknown placeholders $name",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_at_once_in_one_line_that_says_what_to_do(mistake: str):
    make, words = MISTAKES[mistake]
    try:
        result = make()
    except Exception as error:
        message = str(error)
    else:
        assert isinstance(result, wink.ToolResult), "nothing was said"
        message = result.message

    assert words in message
    assert "\n" not in message.strip()


def test_a_cascade_that_fails_is_in_the_log(caplog: pytest.LogCaptureFixture):
    def fails() -> None:
        """Fail."""
        raise ValueError("the printer is out of paper")

    caplog.set_level("WARNING", "weakincentives")

    @wink.tool(effects=[CascadeEffect(trigger_tool="fails")])
    def bills() -> None:
        """Bill."""

    assert ToolRegistry([bills, wink.tool(fails)]).execute("bills").success
    assert (
        "tool fails was called after bills, and failed: the printer is out of paper" in caplog.text
    )


def test_the_page_of_mistakes_names_every_one():
    page = DOCS.read_text()
    missing = [each for each in MISTAKES if f"| {each} |" not in page]

    assert missing == []
    assert len(MISTAKES) >= 60
