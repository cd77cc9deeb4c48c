"""Serving requests: prompts and sessions, resources, limits, and a queue until stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.adapters import ModelRequest, RunConfig, ScriptedAdapter, calls
from weakincentives.errors import CallLimitExceeded, TurnLimitExceeded
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, ToolContext
from weakincentives.resources import Binding
from weakincentives.runtime import (
    Dispatcher,
    MainLoop,
    MainLoopConfig,
    PromptExecuted,
    RequestFinished,
    RunContext,
    Session,
    ToolInvoked,
)


@dataclass(frozen=True)
class Question:
    text: str


class Client:
    def __init__(self, log: list[str], name: str = "client") -> None:
        self.log, self.name = log, name
        log.append(f"{name} opened")

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


@wink.tool
def fetch(*, context: ToolContext) -> str:
    """Fetch something."""
    return f"fetched with {context.resources.get(Client).name}"


TEMPLATE = PromptTemplate[Any](
    sections=[MarkdownSection[Question](title="Question", template="${text}", tools=[fetch])]
)


class Answering(MainLoop[str, Any]):
    def prepare(self, request: str) -> tuple[Prompt[Any], Session]:
        if not request:
            raise ValueError("an empty request")
        return Prompt(TEMPLATE).bind(Question(request)), Session()


def echo(request: ModelRequest) -> str:
    return request.prompt.text.rsplit("\n", 1)[-1].upper()


def test_a_request_gets_an_answer_and_its_session():
    response, session = Answering(adapter=ScriptedAdapter([echo])).execute("hello")

    assert response.text == "HELLO"
    assert session[PromptExecuted].latest().stop_reason == "end_turn"


def test_a_request_can_be_served_on_an_event_loop():
    loop = Answering(adapter=ScriptedAdapter([echo]))

    response, _ = asyncio.run(loop.aexecute("hello"))

    assert response.text == "HELLO"


def test_requests_on_one_session_are_one_conversation():
    """The prompt of each request says what to do, also if it comes without a message."""
    session = Session()

    class Remembering(Answering):
        def prepare(self, request: str) -> tuple[Prompt[Any], Session]:
            prompt, _ = super().prepare(request)
            return prompt, session

    def seen(request: ModelRequest) -> str:
        return "+".join([*(message.text for message in request.messages), echo(request)])

    loop = Remembering(adapter=ScriptedAdapter([seen] * 3))

    assert loop.execute("one")[0].text == "Begin.+ONE"
    assert loop.execute("two")[0].text == "Begin.+Begin.+ONE+Begin.+TWO"
    assert loop.execute("three", resume=False)[0].text == "Begin.+THREE"


def test_resources_of_the_loop_are_opened_and_closed_with_every_request():
    log: list[str] = []
    config = MainLoopConfig(resources={Client: Binding(Client, lambda r: Client(log))})
    script = [calls("fetch"), "One.", calls("fetch"), "Two."]
    loop = Answering(adapter=ScriptedAdapter(script), config=config)

    loop.execute("first")
    loop.execute("second")

    assert log == ["client opened", "client closed"] * 2


def test_what_is_given_with_a_request_comes_before_what_the_loop_has():
    log: list[str] = []
    config = MainLoopConfig(resources={Client: Client(log)})
    loop = Answering(adapter=ScriptedAdapter([calls("fetch"), "Done."]), config=config)

    _, session = loop.execute("first", resources={Client: Client(log, "mine")})

    assert session[ToolInvoked].latest().result.value == "fetched with mine"
    assert "client closed" not in log, "what was handed in open is not the loop's to close"


def test_resources_are_closed_also_when_a_request_fails():
    log: list[str] = []
    config = MainLoopConfig(
        resources={Client: Binding(Client, lambda r: Client(log))}, max_tool_calls=1
    )
    loop = Answering(adapter=ScriptedAdapter([calls("fetch", "fetch")]), config=config)

    with pytest.raises(CallLimitExceeded):
        loop.execute("first")

    assert log == ["client opened", "client closed"]


def test_the_limits_of_the_loop_hold_for_every_request_and_can_be_replaced_for_one():
    log: list[str] = []
    config = MainLoopConfig(resources={Client: Client(log)}, max_turns=1)
    loop = Answering(adapter=ScriptedAdapter([calls("fetch")] * 3 + ["Done."]), config=config)

    with pytest.raises(TurnLimitExceeded):
        loop.execute("first")
    response, _ = loop.execute("second", config=replace(config, max_turns=3))

    assert response.turns == 3


def test_a_config_of_a_run_is_one_of_a_loop():
    assert isinstance(MainLoopConfig(max_turns=3), RunConfig)
    with pytest.raises(ValueError, match="max_turns"):
        MainLoopConfig(max_turns=0)


def test_the_bus_hears_every_session_and_how_each_request_ended():
    bus, heard, ended = Dispatcher(), list[ToolInvoked](), list[RequestFinished]()
    bus.subscribe(ToolInvoked, heard.append)
    bus.subscribe(RequestFinished, ended.append)
    config = MainLoopConfig(resources={Client: Client([])})
    adapter = ScriptedAdapter([calls("fetch"), "Done."])
    loop = Answering(adapter=adapter, bus=bus, config=config)

    response, session = loop.execute("first")
    with pytest.raises(ValueError, match="empty"):
        loop.execute("")

    assert [record.tool_name for record in heard] == ["fetch"]
    assert (ended[0].response, ended[0].session, ended[0].error) == (response, session, None)
    assert ended[1].session is None
    assert isinstance(ended[1].error, ValueError)


# Requests from a queue


def test_requests_are_served_in_order_until_the_loop_is_stopped():
    loop = Answering(adapter=ScriptedAdapter([echo] * 3))
    futures = [loop.submit(text) for text in ("one", "two", "three")]
    futures[-1].add_done_callback(lambda _: loop.stop())

    assert loop.run() == 3

    assert [future.result()[0].text for future in futures] == ["ONE", "TWO", "THREE"]


def test_a_request_that_fails_does_not_stop_the_loop(caplog: pytest.LogCaptureFixture):
    loop = Answering(adapter=ScriptedAdapter([echo]))
    bad, good = loop.submit(""), loop.submit("good")
    good.add_done_callback(lambda _: loop.stop())

    loop.run()

    assert isinstance(bad.exception(), ValueError)
    assert good.result()[0].text == "GOOD"
    assert "an empty request" in caplog.text


def test_what_is_under_way_is_finished_and_what_was_not_begun_is_cancelled():
    started, go_on = threading.Event(), threading.Event()

    def slow(request: ModelRequest) -> str:
        started.set()
        go_on.wait(120)
        return "finished"

    loop = Answering(adapter=ScriptedAdapter([slow]))
    under_way, waiting = loop.submit("first"), loop.submit("second")
    runner = threading.Thread(target=loop.run)
    runner.start()
    started.wait(120)

    loop.stop()
    go_on.set()
    runner.join(120)

    assert under_way.result(timeout=120)[0].text == "finished"
    with pytest.raises(CancelledError):
        waiting.result(timeout=120)
    with pytest.raises(RuntimeError, match="takes no more requests"):
        loop.submit("third")


def test_several_threads_can_serve_one_queue():
    both = threading.Barrier(2)

    def together(request: ModelRequest) -> str:
        both.wait(120)
        return "done"

    loop = Answering(adapter=ScriptedAdapter([together] * 2))
    futures = [loop.submit("one"), loop.submit("two")]
    runners = [threading.Thread(target=loop.run) for _ in range(2)]
    for runner in runners:
        runner.start()

    assert [future.result(timeout=120)[0].text for future in futures] == ["done", "done"]
    loop.stop()
    for runner in runners:
        runner.join(120)
        assert not runner.is_alive()


PROGRAM = """
import os, signal, sys, threading
from weakincentives import MarkdownSection, Prompt, PromptTemplate, Session
from weakincentives.adapters import ScriptedAdapter
from weakincentives.runtime import MainLoop

class Loop(MainLoop):
    def prepare(self, request):
        section = MarkdownSection(title="Task", template="Wait.")
        return Prompt(PromptTemplate(sections=[section])), Session()

def slow(request):
    print("started", flush=True)
    sys.stdin.readline()
    return "finished"

loop = Loop(adapter=ScriptedAdapter([slow]))
first, second = loop.submit("one"), loop.submit("two")
served = loop.run()
print(served, first.result()[0].text, second.cancelled(), flush=True)
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
"""


def test_sigterm_finishes_what_is_under_way(tmp_path: Path):
    program = tmp_path / "serve.py"
    program.write_text(PROGRAM)
    child = subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        os.kill(child.pid, signal.SIGTERM)
        shown, _ = child.communicate("go on\n", timeout=120)
    finally:
        child.kill()

    assert shown.splitlines() == ["1 finished True", "True"]
    assert child.returncode == 0


def test_stopping_a_loop_that_nobody_runs_cancels_what_waits():
    loop = Answering(adapter=ScriptedAdapter([echo]))
    futures = [loop.submit("one"), loop.submit("two")]

    loop.stop()

    assert [future.cancelled() for future in futures] == [True, True]
    assert loop.run() == 0


def test_a_loop_that_an_interrupt_ended_can_be_run_again_or_stopped():
    def interrupted(request: ModelRequest) -> str:
        raise KeyboardInterrupt

    loop = Answering(adapter=ScriptedAdapter([interrupted, echo, echo]))
    first, second, third = (loop.submit(word) for word in ("one", "two", "three"))
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert isinstance(first.exception(), KeyboardInterrupt)
    assert not second.done()

    second.add_done_callback(lambda _: loop.stop())

    assert loop.run() == 1
    assert third.cancelled()


# Who calls


def test_tools_learn_which_run_loop_and_agent_they_work_for():
    seen: list[ToolContext] = []

    @wink.tool
    def look(*, context: ToolContext) -> None:
        """Look around."""
        seen.append(context)

    template = PromptTemplate[Any](
        name="clerk", sections=[MarkdownSection(title="Look", tools=[look])]
    )

    class Looking(MainLoop[str, Any]):
        def prepare(self, request: str) -> tuple[Prompt[Any], Session]:
            return Prompt(template), Session()

    script = [calls("look"), "Done."]
    config = MainLoopConfig(tool_config={"api.credentials": "secret"})
    loop = Looking(adapter=ScriptedAdapter([*script, *script, *script]), config=config)
    for given in (None, None, RunContext(loop_id="mine", trace_id="t" * 32)):
        loop.execute("look", run_context=given)

    first, second, third = seen
    assert dict(first.config) == {"api.credentials": "secret", "tool_name": "look"}
    assert first.agent_id == "clerk"
    assert first.loop_id == second.loop_id == loop.loop_id != ""
    assert third.loop_id == "mine"
    assert len(first.trace_id) == 32
    assert first.trace_id != second.trace_id
    assert third.trace_id == "t" * 32
    ids = {context.run_context.run_id for context in seen if context.run_context}
    assert len(ids) == 3


def test_a_run_without_a_loop_has_ids_too():
    seen: list[ToolContext] = []

    @wink.tool
    def look(*, context: ToolContext) -> None:
        """Look around."""
        seen.append(context)

    prompt = Prompt(PromptTemplate[Any](sections=[MarkdownSection(title="Look", tools=[look])]))
    ScriptedAdapter([calls("look"), "Done."]).evaluate(prompt, Session())

    (context,) = seen
    assert context.run_context is not None
    assert context.loop_id == context.trace_id == context.run_context.run_id != ""
    assert context.agent_id
