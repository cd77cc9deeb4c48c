"""The program that a test of resuming kills: four calls, two of which reach a service.

Run as ``resume_child.py DIRECTORY URL run|resume KILL_AT``. KILL_AT is TOOL@POINT or ``never``. The
points, in order: ``handler`` (the handler is done), ``answer`` (of a call without changes to files,
the answer is about to be put on record), ``answered`` (it is), ``end`` (the call is committed),
``ended`` (the outcome is on record; the session is not saved).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import weakincentives as wink
from weakincentives.adapters import ModelRequest, ModelTurn, ScriptedAdapter, calls
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import Dispatcher, OutcomeLedger, SavedSession, Session, ToolInvoked
from weakincentives.runtime.ledger import CallOutcome

WHERE, URL, WHAT, KILL_AT = Path(sys.argv[1]), *sys.argv[2:5]


def reach(tool: str, point: str) -> None:
    if f"{tool}@{point}" == KILL_AT:
        os.kill(os.getpid(), 9)


class Ledger(OutcomeLedger):
    def answer(self, outcome: CallOutcome) -> None:
        reach(outcome.tool_name, "answer")
        super().answer(outcome)
        reach(outcome.tool_name, "answered")

    def end(self, outcome: CallOutcome) -> None:
        reach(outcome.tool_name, "end")
        super().end(outcome)


@wink.tool(reach="reversible")
def note(*, context: wink.ToolContext) -> str:
    """Write a line."""
    context.filesystem.append("notes.txt", "note\n")
    reach("note", "handler")
    return "noted"


@wink.tool(reach="reversible", writes="command")
def shell(*, context: wink.ToolContext) -> str:
    """Write a line with a command."""
    context.filesystem.run("echo shell >> notes.txt", check=True)
    reach("shell", "handler")
    return "run"


@wink.tool(reach="irreversible")
def post(*, context: wink.ToolContext) -> str:
    """Reach a service, and nothing else."""
    order(context)
    reach("post", "handler")
    return "posted"


@wink.tool(reach="irreversible")
def both(*, context: wink.ToolContext) -> str:
    """Reach a service, and write a line."""
    context.filesystem.append("notes.txt", "both\n")
    order(context)
    reach("both", "handler")
    return "both done"


def order(context: wink.ToolContext) -> None:
    key = {"Idempotency-Key": context.idempotency_key}
    with urlopen(Request(f"{URL}/orders", method="POST", headers=key)) as response:
        response.read()


NAMES = ("note", "shell", "post", "both")


def turn(request: ModelRequest) -> ModelTurn | str:
    answers = sum(message.role == "tool" for message in request.messages)
    if answers == len(NAMES):
        return "Done."
    return calls(*((name, {}) for name in NAMES[answers : answers + 2]))


section = MarkdownSection(title="Task", template="Work.", tools=[note, shell, post, both])
files = HostFilesystem(WHERE / "project")
ledger = Ledger(WHERE / "outcomes.jsonl")
template = PromptTemplate(sections=[section], resources={Filesystem: files, OutcomeLedger: ledger})
prompt, session = Prompt(template), Session()


def ended(record: ToolInvoked) -> None:
    reach(record.tool_name, "ended")


if WHAT == "run":
    session.dispatcher.subscribe(ToolInvoked, ended)  # before the one that saves
    saved = SavedSession.create(WHERE / "run.jsonl", session)
else:
    bus = Dispatcher()
    bus.subscribe(ToolInvoked, ended)
    saved = SavedSession.open(WHERE / "run.jsonl", dispatcher=bus)
    saved.recover(files, ledger=ledger)
with prompt.resources, saved:
    answer = ScriptedAdapter([turn] * 4).evaluate(prompt, saved.session, resume=WHAT == "resume")
    records = saved.session[ToolInvoked].all()
    said = [(r.tool_name, r.result.failure.code if r.result.failure else "ok") for r in records]
    sys.stdout.write("".join(f"{name} {code}\n" for name, code in said))
