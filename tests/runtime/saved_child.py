"""The program that a test of saved sessions kills: a run of four calls in two turns.

Run as ``saved_child.py DIRECTORY run|resume KILL_AT``: the call for the note KILL_AT is killed when
it has written half of its line; in capitals, when it is committed and not yet on record.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import ModelRequest, ModelTurn, ScriptedAdapter, calls
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import SavedSession, Session, ToolInvoked

WHERE, WHAT, KILL_AT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


@wink.tool(reach="reversible")
def note(text: str, *, context: wink.ToolContext) -> list[str | wink.Media]:
    """Write a line, and return a picture of it."""
    context.filesystem.append("notes.txt", text)
    if text == KILL_AT:
        os.kill(os.getpid(), 9)
    context.filesystem.append("notes.txt", "\n")
    return [f"noted {text}", wink.Media(b"GIF89a" + text.encode() * 5000)]


def turn(request: ModelRequest) -> ModelTurn | str:
    """Ask for what comes next: it depends on how many answers there are."""
    answers = sum(message.role == "tool" for message in request.messages)
    if answers == 4:
        return "Done."
    return calls(*(("note", {"text": text}) for text in "abcd"[answers : answers + 2]))


def committed(record: ToolInvoked) -> None:
    if record.params.text.upper() == KILL_AT:
        os.kill(os.getpid(), 9)


section = MarkdownSection(title="Task", template="Take notes.", tools=[note])
files = HostFilesystem(WHERE / "project")
prompt = Prompt(PromptTemplate(sections=[section], resources={Filesystem: files}))
adapter = ScriptedAdapter([turn] * 4)
if WHAT == "run":
    session = Session()
    session.dispatcher.subscribe(ToolInvoked, committed)  # before the one that saves
    saved = SavedSession.create(WHERE / "run.jsonl", session)
else:
    saved = SavedSession.open(WHERE / "run.jsonl")
    saved.recover(files)
with prompt.resources, saved:
    answer = adapter.evaluate(prompt, saved.session, resume=WHAT == "resume")
    texts = [record.params.text for record in saved.session[ToolInvoked].all()]
    assert adapter.last_request is not None
    shown = [each.data[-1:].decode() for m in adapter.last_request.messages for each in m.media]
    sys.stdout.write(f"{answer.text}\n{' '.join(texts)}\n{' '.join(shown)}\n")
