"""The events of a run as a stream, in sync and in async code."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.adapters import (
    PartialOutput,
    RunConfig,
    RunEnded,
    RunEvent,
    RunStream,
    ScriptedAdapter,
    TextDelta,
    ToolCommitted,
    ToolProgress,
    ToolRefused,
    ToolRolledBack,
    ToolStarted,
    TurnStarted,
    calls,
)
from weakincentives.errors import TurnLimitExceeded
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, ToolContext
from weakincentives.prompt.structured_output import PartialAnswer
from weakincentives.runtime import Session, ToolInvoked


@dataclass(frozen=True)
class Added:
    n: int


@wink.tool(reach="reversible")
def add(n: int, *, context: ToolContext) -> str:
    """Add a number."""
    context.session[Added].append(Added(n))
    context.report(f"adding {n}", done=1, total=2)
    if n < 0:
        raise ValueError("n must not be negative")
    return f"added {n}"


def prompt_with(*tools: Any) -> Prompt[Any]:
    section = MarkdownSection(title="Adding", template="Add numbers.", tools=tools)
    return Prompt(PromptTemplate(sections=[section]))


def adds(*numbers: int) -> Any:
    return calls(*(("add", {"n": n}) for n in numbers))


Collect = Callable[[RunStream[Any]], list[RunEvent]]


@pytest.fixture(params=["sync", "async"])
def collect(request: pytest.FixtureRequest) -> Collect:
    """Return all events of a stream."""

    async def all_of(stream: RunStream[Any]) -> list[RunEvent]:
        return [event async for event in stream]

    return list if request.param == "sync" else lambda stream: asyncio.run(all_of(stream))


def test_a_stream_yields_text_calls_progress_and_their_ends_in_order(collect: Collect):
    model, session = ScriptedAdapter([adds(1, -1), "One\nand two."]), Session()
    heard: list[RunEvent] = []

    stream = model.stream(prompt_with(add), session, on_event=heard.append)
    events = collect(stream)

    assert [type(event).__name__ for event in events] == [
        *("TurnStarted", "TurnEnded", "ToolStarted", "ToolStarted"),
        *("ToolProgress", "ToolCommitted", "ToolProgress", "ToolRolledBack"),
        *("TurnStarted", "TextDelta", "TextDelta", "TurnEnded", "RunEnded"),
    ]
    assert events == heard
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "One\nand two."
    (committed,) = (e for e in events if isinstance(e, ToolCommitted))
    assert committed.result.value == "added 1"
    assert committed.record.call_id == committed.call.id
    (undone,) = (e for e in events if isinstance(e, ToolRolledBack))
    assert undone.undone == ("session",)
    assert undone.not_undone == ()
    assert session[Added].all() == (Added(1),)
    progress = [e for e in events if isinstance(e, ToolProgress)]
    assert [(e.message, e.done, e.total) for e in progress] == [
        ("adding 1", 1, 2),
        ("adding -1", 1, 2),
    ]
    assert stream.response is not None
    assert events[-1] == RunEnded(stream.response)
    assert stream.response.text == "One\nand two."


def test_a_refused_call_ends_as_refused(collect: Collect):
    model = ScriptedAdapter([calls(("add", {"n": "one"}), ("nothing", {})), "Done."])

    events = collect(model.stream(prompt_with(add), Session()))

    refused = [e for e in events if isinstance(e, ToolRefused)]
    assert [e.call.name for e in refused] == ["add", "nothing"]
    assert not any(e.record.ran for e in refused)


def test_progress_of_a_nested_call_belongs_to_the_call_of_the_model(collect: Collect):
    @wink.tool(reach="reversible")
    def twice(*, context: ToolContext) -> str:
        """Add twice."""
        for n in (1, 2):
            assert add({"n": n}, context=context).success
        return "added"

    model = ScriptedAdapter([calls(("twice", {})), "Done."])

    events = collect(model.stream(prompt_with(twice), Session()))

    progress = [e for e in events if isinstance(e, ToolProgress)]
    assert [e.call.name for e in progress] == ["twice", "twice"]


def test_an_error_of_the_run_is_raised_after_its_events(collect: Collect):
    model, events = ScriptedAdapter([adds(1), adds(2)]), list[RunEvent]()
    config = RunConfig(max_turns=1)
    stream = model.stream(prompt_with(add), Session(), config=config, on_event=events.append)

    with pytest.raises(TurnLimitExceeded):
        collect(stream)

    assert isinstance(events[-1], ToolCommitted)
    assert stream.response is None


def test_a_stream_is_iterated_once(collect: Collect):
    stream = ScriptedAdapter(["Done."]).stream(prompt_with(add), Session())
    collect(stream)

    with pytest.raises(RuntimeError, match="iterated once"):
        collect(stream)


# Stopping early


@pytest.fixture
def slow() -> tuple[Any, threading.Event]:
    """A tool that writes, then works until its call is abandoned."""
    abandoned = threading.Event()

    @wink.tool(reach="reversible")
    def work(*, context: ToolContext) -> str:
        """Work for a long time."""
        context.session[Added].append(Added(1))
        context.report("at work")
        if context.signal.wait(60):
            abandoned.set()
        return "done"

    return work, abandoned


def test_a_loop_that_breaks_rolls_back_the_call_under_way(slow: tuple[Any, threading.Event]):
    work, abandoned = slow
    session = Session()
    model = ScriptedAdapter([calls(("work", {})), "Done."])
    stream = model.stream(prompt_with(work), session)

    for event in stream:
        if isinstance(event, ToolProgress):
            break

    assert abandoned.wait(30)
    assert session[Added].all() == ()
    (record,) = session[ToolInvoked].all()
    assert not record.success
    assert stream.response is None


def test_closing_a_stream_waits_for_the_rollback(slow: tuple[Any, threading.Event]):
    work, abandoned = slow
    session = Session()
    model = ScriptedAdapter([calls(("work", {})), "Done."])

    async def consume() -> None:
        async with contextlib.aclosing(model.stream(prompt_with(work), session)) as stream:
            async for event in stream:
                if isinstance(event, ToolProgress):
                    break
            assert stream.response is None
        assert session[Added].all() == ()
        assert len(session[ToolInvoked].all()) == 1

    asyncio.run(consume())
    assert abandoned.wait(30)


def test_a_break_in_async_code_ends_the_run_although_the_stream_is_still_named(
    slow: tuple[Any, threading.Event],
):
    work, _ = slow
    session = Session()
    model = ScriptedAdapter([calls(("work", {})), "Done."])

    async def consume() -> None:
        stream = model.stream(prompt_with(work), session)
        async for event in stream:
            if isinstance(event, ToolProgress):
                break
        until = time.monotonic() + 30
        while not session[ToolInvoked].all() and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert stream.response is None
        assert session[Added].all() == ()
        assert len(session[ToolInvoked].all()) == 1

    asyncio.run(consume())


def test_a_stream_that_is_closed_before_it_starts_runs_nothing():
    session = Session()
    stream = ScriptedAdapter([adds(1), "Done."]).stream(prompt_with(add), session)

    asyncio.run(stream.aclose())

    assert session[ToolInvoked].all() == ()
    with pytest.raises(RuntimeError, match="iterated once"):
        list(stream)


def test_a_consumer_may_use_a_plain_loop_inside_a_running_event_loop():
    async def consume() -> list[RunEvent]:
        return list(ScriptedAdapter([adds(1), "Done."]).stream(prompt_with(add), Session()))

    assert any(isinstance(event, ToolStarted) for event in asyncio.run(consume()))


def test_a_call_that_has_ended_reports_nothing():
    reported, begun, release = list[str](), threading.Event(), threading.Event()
    late: list[ToolContext] = []

    @wink.tool(reach="read", timeout=0.05)
    def work(*, context: ToolContext) -> str:
        """Take too long."""
        late.append(context)
        begun.set()
        release.wait(30)
        context.report("too late")
        reported.append("done")
        return "done"

    events = list(
        ScriptedAdapter([calls(("work", {})), "Done."]).stream(prompt_with(work), Session())
    )
    assert begun.wait(120)
    release.set()

    assert not any(isinstance(event, ToolProgress) for event in events)
    context = late[0]
    context.report("and later still")  # changes nothing, raises nothing


def test_a_request_in_an_event_has_what_was_sent_then(collect: Collect):
    stream = ScriptedAdapter([adds(1), "Done."]).stream(prompt_with(add), Session())

    requests = [event.request for event in collect(stream) if isinstance(event, TurnStarted)]

    roles = [[message.role for message in request.messages] for request in requests]
    assert roles == [["user"], ["user", "model", "tool"]]


# A structured answer while it is streamed


@dataclass(frozen=True)
class Trip:
    city: str
    days: tuple[int, ...] = ()


LISBON = {"city": "Lisbon"}


@pytest.mark.parametrize(
    ("output", "written", "values"),
    [
        (
            Trip,
            '{"city": "Lisbon",\n"days": [1,\n2]}',
            [LISBON, {**LISBON, "days": [1]}, {**LISBON, "days": [1, 2]}],
        ),
        (Trip, 'So:\n```json\n{"city":\n"Lisbon"}\n```', [{}, LISBON]),
        (
            list[Trip],
            '{"items": [{"city": "Lisbon"},\n{"city": "A"}]}',
            [[LISBON], [LISBON, {"city": "A"}]],
        ),
        (int | str, "It is hot.\nVery.", []),
        (str, '{"city":\n1}', []),
    ],
)
def test_a_structured_answer_is_seen_while_it_is_written(
    output: Any, written: str, values: list[Any], collect: Collect
):
    """A script is streamed line by line."""
    section = MarkdownSection(title="Trip", template="Plan it.")
    prompt: Prompt[Any] = Prompt(PromptTemplate[output](sections=[section]))
    stream = ScriptedAdapter([written]).stream(prompt, Session())

    seen = [each.value for each in collect(stream) if isinstance(each, PartialOutput)]

    assert seen == values
    assert stream.response is not None


def test_a_text_may_be_incomplete_and_a_void_answer_is_forgotten():
    partial = PartialAnswer(Trip)
    assert partial.add('{"city": "Li') == {"city": "Li"}
    partial.clear()
    assert partial.add('{"city": "Ro') == {"city": "Ro"}
    assert partial.add("") is None
    assert partial.add('me"') == {"city": "Rome"}
    assert partial.add("} and so on") is None


def test_a_long_answer_is_not_read_again_with_every_piece():
    partial = PartialAnswer(Trip)
    partial.add('{"days": [')

    read = sum(partial.add("1, ") is not None for _ in range(20_000))

    assert 100 < read < 1000
