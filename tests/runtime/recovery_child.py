"""The program that tests of recovery kill between the end of a handler and the save of the session.

Run as ``recovery_child.py URL``. Each line that it reads asks for a run: DIRECTORY, ``run`` or
``resume``, PLACE, AT and HOW as JSON. The run is in a fork, which has imported everything already,
and the answer is a line with how the fork ended and what it said.

PLACE is ``directory``, ``safe`` (the same, synced) or ``branch``. AT is the number of the system
call, counted only after handlers, at which the process is killed (HOW is ``kill``, or ``torn``:
after half of what it writes), or from which on the disk is full for a while (``full``) or fails
once (``fails``). A run says the number of such calls, and for each call of a tool its name and the
code of its failure.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import weakincentives as wink
from weakincentives.adapters import ModelRequest, ModelTurn, ScriptedAdapter, calls
from weakincentives.filesystem import Branch, Filesystem, HostFilesystem
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import CallOutcome, SavedSession, Session, ToolInvoked

URL = sys.argv[1]
WHERE, WHAT, PLACE, AT, HOW = Path(), "", "", 0, ""  # of the run
TAKING_SPACE = ("link", "mkdir", "open", "write")
NAMES = (*TAKING_SPACE, "fsync", "ftruncate", "rename", "replace", "unlink", "utime")
count, counting = 0, False


def interrupted(name: str, original: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        global count
        if not counting or (name == "open" and not int(str(args[1])) & os.O_CREAT):
            return original(*args, **kwargs)
        count += 1
        if HOW in ("kill", "torn"):
            if count == AT:
                if HOW == "torn" and name == "write":
                    original(args[0], bytes(args[1])[: len(bytes(args[1])) // 2])  # type: ignore[arg-type]
                os.kill(os.getpid(), 9)
        elif count == AT or (HOW == "full" and 0 < AT < count < AT + 20 and name in TAKING_SPACE):
            code = errno.ENOSPC if HOW == "full" else errno.EIO
            raise OSError(code, os.strerror(code))
        return original(*args, **kwargs)

    for capable in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in capable:
            capable.add(call)
    return call


for each in NAMES:
    setattr(os, each, interrupted(each, getattr(os, each)))


@dataclass(frozen=True)
class Note:
    """State that a call changes."""

    name: str


def begin() -> None:
    global counting
    counting = False


def note_and_end(context: wink.ToolContext, name: str) -> list[str | wink.Media]:
    """Note it in the session and in a file; the answer has a picture, and is long."""
    global counting
    context.session.dispatch(Note(name))
    context.filesystem.append("notes.txt", f"{name}\n")
    counting = True
    return [f"{name} done", wink.Media(b"GIF89a" + name.encode() * 2000), "x" * 40_000]


def ask(method: str, path: str, context: wink.ToolContext) -> int:
    key = {"Idempotency-Key": context.idempotency_key}
    with urlopen(Request(f"{URL}/{path}", method=method, headers=key)) as response:
        return int(response.read())


@wink.tool(reach="reversible")
def write(*, context: wink.ToolContext) -> list[str | wink.Media]:
    """Write a line."""
    begin()
    return note_and_end(context, "write")


@wink.tool(reach="reversible", writes="command")
def shell(*, context: wink.ToolContext) -> str:
    """Write a line with a command."""
    global counting
    begin()
    context.filesystem.run("echo shell >> notes.txt", check=True)
    context.session.dispatch(Note("shell"))
    counting = True
    return "shell done"


@wink.tool(reach="reversible")
async def left(*, context: wink.ToolContext) -> str:
    """Write a file, concurrently with another."""
    begin()
    context.filesystem.append("left.txt", "left\n")
    return "left done"


@wink.tool(reach="reversible")
async def right(*, context: wink.ToolContext) -> str:
    """Write another."""
    global counting
    context.filesystem.append("right.txt", "right\n")
    counting = True
    return "right done"


@wink.tool(reach="irreversible")
def post(*, context: wink.ToolContext) -> str:
    """Reach a service, and change only the session."""
    global counting
    begin()
    ask("POST", "orders", context)
    context.session.dispatch(Note("post"))
    counting = True
    return "post done"


@wink.tool(reach="irreversible")
def both(*, context: wink.ToolContext) -> list[str | wink.Media]:
    """Reach a service, and write a line."""
    begin()
    ask("POST", "orders", context)
    return note_and_end(context, "both")


@wink.tool(reach="irreversible", idempotent=True)
def again(*, context: wink.ToolContext) -> list[str | wink.Media]:
    """Reach a service that does nothing twice, and write a line."""
    begin()
    ask("POST", "once", context)
    return note_and_end(context, "again")


async def found_out(outcome: CallOutcome, context: wink.ToolContext) -> object:
    """Ask the service; what the call wrote is lost, so write it again."""
    begin()
    assert outcome.outcome == "unknown"
    if not ask("GET", "orders", context):
        return "rolled_back"
    return wink.ToolResult.ok(note_and_end(context, "asked"))


@wink.tool(reach="irreversible", recover=found_out)
def asked(*, context: wink.ToolContext) -> list[str | wink.Media]:
    """Reach a service that can be asked, and write a line."""
    begin()
    ask("POST", "orders", context)
    return note_and_end(context, "asked")


TURNS = (("write", "post"), ("left", "right"), ("both", "again"), ("shell", "asked"))
TOOLS = [write, shell, left, right, post, both, again, asked]


def turn(request: ModelRequest) -> ModelTurn | str:
    answers = sum(message.role == "tool" for message in request.messages) // 2
    return calls(*((name, {}) for name in TURNS[answers])) if answers < len(TURNS) else "Done."


def open_files() -> HostFilesystem:
    if PLACE != "branch":
        return HostFilesystem(WHERE / "work", durability="safe" if PLACE == "safe" else "fast")
    with HostFilesystem(WHERE / "work"):
        """Roll back, and make the store."""
    opening = Branch.create if WHAT == "run" else Branch.open
    return opening(WHERE / "work", "branch")


def run() -> None:
    with open_files() as files:
        section = MarkdownSection(title="Task", template="Work.", tools=TOOLS)
        prompt = Prompt(PromptTemplate(sections=[section], resources={Filesystem: files}))
        if WHAT == "run":
            saved = SavedSession.create(WHERE / "run.jsonl", Session())
        else:
            saved = SavedSession.open(WHERE / "run.jsonl", types=[Note])
            assert saved.recover(files) == ()
        with prompt.resources, saved:
            ScriptedAdapter([turn] * 5).evaluate(prompt, saved.session, resume=WHAT == "resume")
            begin()
            records = saved.session[ToolInvoked].all()
        notes = [each.name for each in saved.session[Note].all()]
        found = [f"{each}.txt" for each in ("notes", "left", "right")]
        lines = [files.read(each) for each in found if files.exists(each)]
    said = [(r.tool_name, r.result.failure.code if r.result.failure else "ok") for r in records]
    sys.stdout.write(f"calls {count}\n")
    sys.stdout.write("".join(f"{name} {code}\n" for name, code in said))
    sys.stdout.write(f"notes {' '.join(notes)}\nlines {' '.join(''.join(lines).split())}\n")


def in_fork(what: Callable[[], None]) -> dict[str, object]:
    """Do something in a fork; returns how that ended, and what it said."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as warned:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(warned.fileno(), 2)
                what()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [os.pread(each.fileno(), 1 << 20, 0).decode() for each in (said, warned)]
    return {"returncode": code, "stdout": texts[0], "stderr": texts[1]}


def run_and_list_modules() -> None:
    run()
    sys.stdout.write("\n" + " ".join(sys.modules))


with tempfile.TemporaryDirectory() as folder:
    WHERE, WHAT, PLACE = Path(folder), "run", "branch"
    (WHERE / "work").mkdir()
    for name in str(in_fork(run_and_list_modules)["stdout"]).rpartition("\n")[2].split():
        importlib.import_module(name)
for each in TOOLS:
    each.definition()

for line in sys.stdin:
    where, WHAT, PLACE, AT, HOW = json.loads(line)
    WHERE = Path(where)
    sys.stdout.write(json.dumps(in_fork(run)) + "\n")
    sys.stdout.flush()
