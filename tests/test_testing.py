"""The checker that ships to users: every anomaly it names, made on purpose."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import pytest

from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.runtime import Session, ToolCall, ToolInvoked, aexecute_tools
from weakincentives.testing import Anomaly, History

Body = Callable[["Shared", ToolContext], Awaitable[Any]]


class Shared:
    """What nobody keeps apart: a plain dict that all calls change in place, at once."""

    def __init__(self, history: History, **values: Any) -> None:
        self.history = history
        self.values = dict(values)

    def get(self, key: str) -> Any:
        return self.history.read(key, self.values.get(key))

    def put(self, key: str, value: Any) -> None:
        self.values[key] = value
        self.history.wrote(key, value)


async def rest(times: int = 1) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def run(*bodies: Body, final: dict[str, Any] | None = None, **initial: Any) -> Anomaly | None:
    """Run one call per body in one turn, with ids c0, c1 and so on, and check the history."""
    history = History()
    shared = Shared(history, **initial)
    session = Session()

    def tool(number: int, body: Body) -> Tool[None, None]:
        async def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
            await body(shared, context)
            return ToolResult.ok()

        return Tool[None, None](
            name=f"tool-{number}", description="Work.", handler=handler, reach="reversible"
        )

    tools = [tool(number, body) for number, body in enumerate(bodies)]
    Prompt(PromptTemplate(sections=[MarkdownSection(title="Work", tools=tools)])).render(session)
    calls = [ToolCall(f"tool-{number}", id=f"c{number}") for number in range(len(bodies))]
    asyncio.run(aexecute_tools(calls, session=session))
    left = shared.values if final is None else final
    return history.check(session, initial=initial, final=left)


async def bump(shared: Shared, context: ToolContext) -> None:
    value = shared.get("n")
    await rest()
    shared.put("n", value + 1)


async def look(shared: Shared, context: ToolContext) -> None:
    shared.get("n")


async def nothing(shared: Shared, context: ToolContext) -> None:
    await rest()


def test_nothing_is_found_where_calls_do_not_meet() -> None:
    async def other(shared: Shared, context: ToolContext) -> None:
        shared.put("m", shared.get("m") + 1)
        shared.put("m", shared.get("m") + 1)

    assert run(bump, other, nothing, n=0, m=0) is None


def test_lost_update() -> None:
    anomaly = run(bump, bump, n=0)

    assert anomaly is not None
    assert (anomaly.name, anomaly.key, anomaly.seen, anomaly.expected, anomaly.calls) == (
        "lost update", "n", 0, 1, ("c1", "c0"),
    )  # fmt: skip
    assert str(anomaly) == (
        "lost update: call c1 of 'tool-1' at place 1 read 'n' as 0, not 1: "
        "call c0 of 'tool-0' at place 0 had changed it, and the write replaced that"
    )


def test_dirty_read_of_what_was_not_kept() -> None:
    async def gives_up(shared: Shared, context: ToolContext) -> None:
        shared.put("n", 1)
        await rest(3)
        raise ValueError("no")

    async def looks_later(shared: Shared, context: ToolContext) -> None:
        await rest()
        shared.get("n")

    anomaly = run(gives_up, looks_later, n=0, final={})

    assert anomaly is not None
    assert (anomaly.name, anomaly.seen, anomaly.expected, anomaly.calls) == (
        "dirty read", 1, 0, ("c1", "c0"),
    )  # fmt: skip
    assert "wrote that, and was rolled back" in str(anomaly)


def test_dirty_read_of_what_comes_later() -> None:
    async def looks_later(shared: Shared, context: ToolContext) -> None:
        await rest()
        shared.get("n")

    async def sets(shared: Shared, context: ToolContext) -> None:
        shared.put("n", 1)

    anomaly = run(looks_later, sets, n=0)

    assert anomaly is not None
    assert anomaly.name == "dirty read"
    assert "wrote that, and comes later" in str(anomaly)


def test_dirty_read_of_what_was_half_done() -> None:
    async def in_two_steps(shared: Shared, context: ToolContext) -> None:
        shared.put("n", 1)
        await rest(3)
        shared.put("n", 2)

    async def looks_between(shared: Shared, context: ToolContext) -> None:
        await rest()
        shared.get("n")

    anomaly = run(in_two_steps, looks_between, n=0)

    assert anomaly is not None
    assert (anomaly.name, anomaly.seen, anomaly.expected) == ("dirty read", 1, 2)
    assert "wrote that, and overwrote it" in str(anomaly)


def leave(mine: str, other: str) -> Body:
    """One of the two on call may leave; each looks whether the other stays."""

    async def body(shared: Shared, context: ToolContext) -> None:
        stays = shared.get(other)
        await rest()
        if stays:
            shared.put(mine, False)

    return body


def test_write_skew() -> None:
    anomaly = run(leave("a", "b"), leave("b", "a"), a=True, b=True)

    assert anomaly is not None
    assert (anomaly.name, anomaly.key, anomaly.seen, anomaly.expected, anomaly.calls) == (
        "write skew", "a", True, False, ("c1", "c0"),
    )  # fmt: skip
    assert str(anomaly) == (
        "write skew: call c1 of 'tool-1' at place 1 read 'a' as True, not False: "
        "it wrote 'b', while call c0 of 'tool-0' at place 0 read that and wrote 'a'"
    )


def test_stale_read() -> None:
    anomaly = run(bump, look, n=0)

    assert anomaly is not None
    assert (anomaly.name, anomaly.seen, anomaly.expected) == ("stale read", 0, 1)


def test_stale_read_in_a_call_that_failed() -> None:
    """What it saw is why it failed, so it counts."""

    async def refuses(shared: Shared, context: ToolContext) -> None:
        if shared.get("n") == 0:
            raise ValueError("there is nothing yet")

    anomaly = run(bump, refuses, n=0)

    assert anomaly is not None
    assert anomaly.name == "stale read"


def test_stale_read_of_what_the_call_itself_had_written() -> None:
    async def forgets(shared: Shared, context: ToolContext) -> None:
        shared.put("n", 1)
        shared.history.read("n", 0)

    anomaly = run(forgets, nothing, n=0)

    assert anomaly is not None
    assert anomaly.name == "stale read"
    assert "the call itself had changed it" in str(anomaly)


def test_a_read_that_nothing_explains() -> None:
    async def dreams(shared: Shared, context: ToolContext) -> None:
        shared.history.read("n", 42)

    anomaly = run(dreams, nothing, n=0)

    assert anomaly is not None
    assert anomaly.name == "unexplained read"
    assert "no call wrote that" in str(anomaly)


def test_a_final_state_that_lacks_one_call_is_a_lost_update() -> None:
    async def adds(shared: Shared, context: ToolContext) -> None:
        shared.history.updated("n", lambda n: n + 1)

    async def doubles(shared: Shared, context: ToolContext) -> None:
        shared.history.updated("n", lambda n: n * 2)

    assert run(adds, doubles, n=1, final={"n": 4}) is None
    anomaly = run(adds, doubles, n=1, final={"n": 2})
    assert anomaly is not None
    assert (anomaly.name, anomaly.calls) == ("lost update", ("c0",))
    assert "the write of call c0 of 'tool-0' at place 0 is missing" in str(anomaly)


def test_any_other_final_state_is_wrong() -> None:
    anomaly = run(bump, nothing, n=0, final={"n": 42})

    assert anomaly is not None
    assert (anomaly.name, anomaly.seen, anomaly.expected) == ("wrong final state", 42, 1)
    assert str(anomaly) == "wrong final state: 'n' is 42 at the end, not 1"


def test_a_key_that_is_not_given_begins_as_none() -> None:
    async def looks(shared: Shared, context: ToolContext) -> None:
        shared.get("unheard of")

    assert run(looks, nothing) is None


def test_a_history_belongs_into_a_call() -> None:
    with pytest.raises(RuntimeError, match=r"copy_context\(\)\.run"):
        History().read("n", 1)


def test_a_thread_of_a_handler_belongs_to_its_call() -> None:
    async def in_thread(shared: Shared, context: ToolContext) -> None:
        here = copy_context()
        thread = threading.Thread(target=lambda: here.run(shared.put, "n", 1))
        thread.start()
        thread.join()

    assert run(in_thread, nothing, n=0) is None


# On what WINK keeps apart, it finds nothing: also where calls are nested, fail or are tried again.


@dataclass(frozen=True)
class Count:
    value: int


class Keeping:
    """The same operations on a session slice."""

    def __init__(self) -> None:
        self.history = History()
        self.session = Session()
        self.session[Count].seed(Count(0))

    def get(self, context: ToolContext) -> int:
        latest = context.session[Count].latest()
        return self.history.read("n", 0 if latest is None else latest.value)

    def put(self, context: ToolContext, value: int) -> None:
        context.session[Count].seed(Count(value))
        self.history.wrote("n", value)

    def run(self, *tools: Tool[Any, Any]) -> Anomaly | None:
        section = MarkdownSection(title="Work", tools=list({t.name: t for t in tools}.values()))
        Prompt(PromptTemplate(sections=[section])).render(self.session)
        calls = [ToolCall(tool.name) for tool in tools]
        asyncio.run(aexecute_tools(calls, session=self.session))
        latest = self.session[Count].latest()
        assert latest is not None
        return self.history.check(self.session, initial={"n": 0}, final={"n": latest.value})


def reversible(name: str, handler: Any, **options: Any) -> Tool[None, None]:
    return Tool[None, None](
        name=name, description="Work.", handler=handler, reach="reversible", **options
    )


def test_an_attempt_that_was_taken_again_does_not_count() -> None:
    keeping = Keeping()

    async def bump(params: None, *, context: ToolContext) -> ToolResult[None]:
        value = keeping.get(context)
        await rest()
        keeping.put(context, value + 1)
        return ToolResult.ok()

    tool = reversible("bump", bump)

    assert keeping.run(tool, tool, tool) is None
    assert [record.attempts for record in keeping.session[ToolInvoked]] == [1, 2, 2]
    assert keeping.session[Count].latest() == Count(3)


def test_nested_calls_are_part_of_theirs_and_those_that_fail_change_nothing() -> None:
    keeping = Keeping()

    async def add(params: None, *, context: ToolContext) -> ToolResult[None]:
        value = keeping.get(context)
        await rest()
        keeping.put(context, value + 1)
        return ToolResult.ok()

    async def add_and_fail(params: None, *, context: ToolContext) -> ToolResult[None]:
        await add(params, context=context)
        raise ValueError("no")

    adds, fails = reversible("adds", add), reversible("fails", add_and_fail)

    async def outer(params: None, *, context: ToolContext) -> ToolResult[None]:
        calls = [ToolCall("adds"), ToolCall("fails"), ToolCall("adds")]
        await aexecute_tools(calls, context=context)
        keeping.put(context, keeping.get(context) + 10)
        return ToolResult.ok()

    assert keeping.run(adds, reversible("outer", outer), fails, adds) is None
    assert keeping.session[Count].latest() == Count(14)
