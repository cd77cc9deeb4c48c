"""Requests of a loop, served from the queue of runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weakincentives.adapters import ScriptedAdapter, calls, says
from weakincentives.durable.dbos import DbosEngine
from weakincentives.durable.objects import LocalObjects
from weakincentives.durable.requests import output_of, serving, submit_request
from weakincentives.errors import WinkError
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, ToolContext, tool
from weakincentives.runtime import MainLoop, SavedSession, Session
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import Runs
from weakincentives.runtime.stores.sql import SqlStore
from weakincentives.session.events import ToolInvoked

pytest.importorskip("dbos")


@dataclass(frozen=True)
class Question:
    text: str


@dataclass(frozen=True)
class Answer:
    text: str


@dataclass(frozen=True)
class Asked:
    count: int = 0


@dataclass(frozen=True)
class Looked:
    pass


@tool(reach="reversible")
def look(*, context: ToolContext) -> str:
    """Look something up."""
    context.session.dispatch(Looked())
    return "Looked"


def counted(asked: Any, event: Looked) -> Any:
    return (Asked(asked.all()[-1].count + 1),)


class Answers(MainLoop[Question, Answer]):
    def prepare(self, request: Question) -> tuple[Prompt[Answer], Session]:
        session = Session()
        session[Asked].seed(Asked(10))
        session[Asked].register(Looked, counted)
        section = MarkdownSection(title="Question", template=request.text, tools=[look])
        template = PromptTemplate[Answer](ns="tests", key="answers", sections=[section])
        return Prompt(template), session


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    database = Database(f"sqlite:///{tmp_path / 'wink.db'}")
    yield Runs(database)
    database.close()


def test_a_loop_serves_requests_from_the_queue(runs: Runs, tmp_path: Path):
    heard: list[Any] = []
    adapter = ScriptedAdapter([calls("look"), calls("look"), says('{"text": "Because."}')])
    loop = Answers(adapter=adapter)
    loop.bus.subscribe(ToolInvoked, heard.append)
    run = submit_request(runs, Question("Why?"), key="once")
    assert submit_request(runs, Question("Why?"), key="once").id == run.id
    with pytest.raises(WinkError, match="is queued"):
        output_of(run, Answer)
    worker = serving(
        loop,
        DbosEngine(runs.database.url, poll=0.05),
        runs,
        objects=LocalObjects(tmp_path / "objects"),
        cache=tmp_path / "cache",
        lease=5.0,
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        until = time.monotonic() + 60
        while not runs.find(run.id).has_ended:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        worker.stop()
        thread.join()

    assert output_of(runs.find(run.id), Answer) == Answer("Because.")
    assert len(heard) == 2
    with SavedSession.open(run.id, store=SqlStore(runs.database)) as saved:
        assert saved.session[Asked].latest() == Asked(12)
