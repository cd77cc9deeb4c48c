"""Runs for the torture of workers: what their models do, and what must be there in the end."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

import weakincentives as wink
from weakincentives.adapters import ModelRequest, ModelTurn, ScriptedAdapter, calls, says
from weakincentives.core.call import ToolCall
from weakincentives.durable.performer import Prepared
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.prompt import ApprovalPolicy, MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import CallOutcome, Session
from weakincentives.runtime.stores.runs import DurableRun

BASE = {"base.txt": "from the base\n", "folder/kept.txt": "kept\n"}


@dataclass(frozen=True)
class Done:
    """Session state: a call that took effect."""

    key: str


def note_down(context: wink.ToolContext, key: str) -> str:
    """Change the session and a file; neither may be there without the other, or twice."""
    context.session[Done].append(Done(key))
    files = context.filesystem
    before = files.read("done.txt") if files.exists("done.txt") else ""
    files.write("done.txt", f"{before}{key}\n")
    return f"{key} done"


@wink.tool(reach="reversible")
def write(key: str, path: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, f"{key}\n" * 3)
    return note_down(context, key)


@wink.tool(reach="reversible")
def remove(key: str, path: str, *, context: wink.ToolContext) -> str:
    """Remove a file."""
    context.filesystem.delete(path)
    return note_down(context, key)


@wink.tool(reach="reversible", writes="command")
def shell(key: str, *, context: wink.ToolContext) -> str:
    """Append to two files with a command."""
    command = f"echo {key} >> shell.txt; echo {key} >> folder/shell.txt"
    context.filesystem.run(command, check=True)
    context.session[Done].append(Done(key))
    return f"{key} done"


@wink.tool(reach="reversible")
def count(key: str, *, context: wink.ToolContext) -> str:
    """Change the session alone."""
    context.session[Done].append(Done(key))
    return f"{key} done"


def ask(method: str, url: str, key: str) -> int:
    made = Request(url, method=method, headers={"Idempotency-Key": key})
    with urlopen(made, timeout=60) as response:
        return int(response.read())


@wink.tool(reach="irreversible")
def order(key: str, url: str, *, context: wink.ToolContext) -> str:
    """Order from a service that does not know a repetition from a new order."""
    ask("POST", f"{url}/orders", key)
    return note_down(context, key)


@wink.tool(reach="irreversible", idempotent=True)
def order_again(key: str, url: str, *, context: wink.ToolContext) -> str:
    """Order from a service that does nothing twice."""
    ask("POST", f"{url}/once", context.idempotency_key)
    return note_down(context, key)


def booked(outcome: CallOutcome, context: wink.ToolContext) -> Any:
    """Book an order that was made. One that was not may be on its way, from a paused worker."""
    url, key = context.session[Where].latest().url, outcome.call_id
    if not ask("GET", f"{url}/orders", key):
        return None
    return wink.ToolResult.ok(note_down(context, key))


def redone(outcome: CallOutcome, context: wink.ToolContext) -> Any:
    """Have an order made again that was not made; the service takes one on its way once."""
    url, key = context.session[Where].latest().url, outcome.call_id
    if not ask("GET", f"{url}/once", key):
        return "rolled_back"
    return wink.ToolResult.ok(note_down(context, key))


@dataclass(frozen=True)
class Where:
    """Where the service is."""

    url: str


@wink.tool(reach="irreversible", recover=booked)
def order_booked(key: str, url: str, *, context: wink.ToolContext) -> str:
    """Order from a service that can be asked."""
    ask("POST", f"{url}/orders", context.idempotency_key)
    return note_down(context, key)


@wink.tool(reach="irreversible", recover=redone)
def order_redone(key: str, url: str, *, context: wink.ToolContext) -> str:
    """Order from a service that can be asked and does nothing twice."""
    ask("POST", f"{url}/once", context.idempotency_key)
    return note_down(context, key)


@wink.tool(reach="irreversible")
def order_approved(key: str, url: str, *, context: wink.ToolContext) -> str:
    """Order what a person has to approve."""
    ask("POST", f"{url}/orders", key)
    return note_down(context, key)


TOOLS = [
    write, remove, shell, count, order, order_again, order_booked, order_redone, order_approved,
]  # fmt: skip
ORDERS = ("order", "order_again", "order_booked", "order_redone", "order_approved")
ALWAYS = ("order_again", "order_redone")
"""Those whose outcome is found out, whatever happens."""

Turns = list[list[tuple[str, dict[str, Any]]]]


def script(name: str, url: str, choice: random.Random) -> Turns:
    """Return what a run does, call by call."""
    turns: Turns = []
    written: list[str] = []
    names = ["write", "write", "remove", "shell", "count", *ORDERS[:4]]
    for n in range(choice.randint(2, 4)):
        made: list[tuple[str, dict[str, Any]]] = []
        for c in range(choice.randint(1, 4)):
            key = f"{name}-t{n}c{c}"
            tool = choice.choice(names)
            if tool == "remove" and not written:
                tool = "write"
            arguments: dict[str, Any] = {"key": key}
            if tool == "write":
                arguments["path"] = choice.choice([f"{name}/{c}.txt", f"{name}/deep/{c}.txt"])
                if arguments["path"] not in written:
                    written.append(arguments["path"])
            elif tool == "remove":
                arguments["path"] = written.pop(choice.randrange(len(written)))
            elif tool in ORDERS:
                arguments["url"] = url
            made.append((tool, arguments))
        turns.append(made)
    if choice.random() < 0.15:
        turns[-1].append(("order_approved", {"key": f"{name}-approved", "url": url}))
    return turns


def is_approved(key: str) -> bool:
    """Whether the person in this test approves a call."""
    return sum(key.encode()) % 4 != 0


@dataclass
class Expected:
    """What a run must leave, given how its calls ended."""

    files: dict[str, str]
    done: list[str]
    problems: list[str]


def expected(
    turns: Turns, ends: Mapping[str, str], counts: Mapping[str, int], most: Mapping[str, int]
) -> Expected:
    """Return what must be there; ``ends`` has a code for every call on record, "" for success."""
    result = Expected({}, [], [])
    for name, arguments in (call for turn in turns for call in turn):
        key = arguments["key"]
        end, number = ends.get(key), counts.get(key, 0)
        if end is None:
            result.problems.append(f"{key}: no record of {name}")
            continue
        if most.get(key, 0) > 1:
            result.problems.append(f"{key}: {name} was made {most[key]} times")
        if name in ORDERS and not end and number != 1:
            result.problems.append(f"{key}: {name} succeeded and was made {number} times")
        if end and not _may_fail(name, key, end, number):
            result.problems.append(f"{key}: {name} failed with {end}, made {number} times")
        if not end:
            _apply(result, name, arguments)
    return result


def _may_fail(name: str, key: str, end: str, number: int) -> bool:
    if name == "order_approved" and not is_approved(key):
        return number == 0
    if name == "order_booked" and number == 1:
        return end == "OUTCOME_UNKNOWN"  # it was on its way when it was looked for
    return end == "OUTCOME_UNKNOWN" and name in ("order", "order_booked", "order_approved")


def _apply(result: Expected, name: str, arguments: Mapping[str, Any]) -> None:
    key, files = arguments["key"], result.files
    result.done.append(key)
    if name == "write":
        files[arguments["path"]] = f"{key}\n" * 3
    elif name == "remove":
        files.pop(arguments["path"], None)
    elif name == "shell":
        for path in ("shell.txt", "folder/shell.txt"):
            files[path] = files.get(path, "") + f"{key}\n"
    if name not in ("shell", "count"):
        files["done.txt"] = files.get("done.txt", "") + f"{key}\n"


class Script(ScriptedAdapter):
    """Plays the turn that follows the conversation, so it goes on in any process."""

    def __init__(self, turns: Sequence[Sequence[Any]], delay: float) -> None:
        def play(request: ModelRequest) -> ModelTurn:
            time.sleep(delay)
            n = sum(each.role == "model" for each in request.messages)
            if n >= len(turns):
                return says("Done.")
            return calls(*(ToolCall(name, given, given["key"]) for name, given in turns[n]))

        def forever() -> Iterator[Any]:
            while True:
                yield play

        super().__init__(forever())


@contextmanager
def prepare(run: DurableRun, files: HostFilesystem, session: Session) -> Iterator[Prepared]:
    if not session[Where].all():
        session[Where].append(Where(run.about["service"]))
    policies = [ApprovalPolicy(tools=frozenset({"order_approved"}))]
    template = PromptTemplate(
        ns="tests",
        key="torture",
        name="Torture",
        sections=[MarkdownSection(title="Work", tools=TOOLS)],
        policies=policies,
        resources={Filesystem: files},
    )
    yield Prepared(adapter=Script(run.about["turns"], run.about["delay"]), prompt=Prompt(template))
