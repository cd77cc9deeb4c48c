"""What must hold inside another framework's agent: one list of cases for all frameworks.

A framework gets them with a ``Driver``, which runs a scripted model in that framework's own agent
loop. ``test_<extra with underscores>.py`` is then::

    class LangChain(Driver): ...

    @pytest.mark.parametrize("case", all_cases(), ids=str)
    def test_case(case: Case, tmp_path: Path) -> None:
        case.run(LangChain, tmp_path)

The cases look at what the model was told, at the disk, and at the record as `wink log` shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import os
import stat
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import pytest

from weakincentives import Tool, ToolContext, tool
from weakincentives.cli.entry import main as wink_main
from weakincentives.prompt import (
    AnyPolicy,
    ApprovalPolicy,
    CallPreview,
    PolicyDecision,
    ToolExample,
)

T = TypeVar("T")

PATIENCE = 240.0
"""Seconds after which something that never happens fails a case; nothing depends on its length."""


# What a driver gets and returns


@dataclass(frozen=True)
class Ask:
    """One call of the scripted model."""

    id: str
    tool: str
    arguments: dict[str, Any] = field(default_factory=dict)


Turn = Sequence[Ask] | str
"""What the model says: calls, or its final text."""


@dataclass(frozen=True)
class Answer:
    """What a person says to a call that needs approval."""

    approved: bool
    reason: str = ""
    """Why not: the model reads it."""
    arguments: dict[str, Any] | None = None
    """Run it with these instead."""
    by: str = ""
    """Who answers."""
    first: Callable[[], None] | None = None
    """Call this after the question was shown and before the answer is given."""

    def given(self) -> Answer:
        """Return the answer, once what happens before it has happened."""
        if self.first is not None:
            self.first()
        return self


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the agent."""

    workspace: Path
    turns: Sequence[Turn]
    """What the model says from here on, in order; the last one is its final text."""
    tools: Sequence[Tool[Any, Any]] = ()
    """Ours: offered through the integration."""
    own: Sequence[Callable[..., Any]] = ()
    """Plain typed functions, to be made tools of the framework, its own way, and covered by the
    integration. They write with ``open()`` and subprocesses."""
    policies: Sequence[AnyPolicy] = ()
    run: str = ""
    """The name of our run, to be continued by another job of the same name; empty: a new run."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """A person's answers, by call id. A call that needs approval and has none stays pending."""
    cancel_when: threading.Event | None = None
    """Once it is set, cancel the agent's run, the framework's way."""
    cancel_calls: Mapping[str, threading.Event] = field(default_factory=dict)
    """Once one is set, cancel that call alone, by call id."""


@dataclass
class Outcome:
    """How a job ended."""

    answers: dict[str, str] = field(default_factory=dict)
    """What the model was told, by call id."""
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``{"description": ..., "schema": ...}`` by name, as the model was shown them."""
    text: str = ""
    """The model's final text."""
    error: BaseException | None = None
    """What the framework raised."""
    questions: dict[str, str] = field(default_factory=dict)
    """What a person was shown of each call that needed approval, by call id; answered or not."""
    state: Any = None
    """With pending calls: what ``resume`` needs, as the framework stores it for another process."""


def run_invoice_desk(framework: str) -> None:
    """Run the example application inside the framework: no directory, and nothing of it changed."""
    example = Path(__file__).parents[2] / "examples" / "invoice_desk" / f"agent_{framework}.py"
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout.splitlines() == ["Ann has paid.", "[('Ann', 70, 70)] Till(cash=70)"], (
        done.stderr
    )


class Driver(ABC):
    """Runs jobs in one framework. A new one remembers nothing of another, as a new process."""

    name: ClassVar[str]
    limits: ClassVar[Mapping[str, str]] = {}
    """Why this framework cannot pass a case, by the case's name. Such a case is skipped, and the
    reason is in the documentation's table."""

    @abstractmethod
    def run(self, job: Job) -> Outcome:
        """Run the agent to its end, or until it has calls without an answer.

        Exceptions of the framework are returned as ``Outcome.error``. When it returns, everything
        it opened is closed: no call is under way, and the workspace is free.
        """

    def resume(self, job: Job, state: Any) -> Outcome:
        """Continue from the ``state`` of an earlier outcome, with the answers of this job."""
        raise NotImplementedError

    def suspend(self) -> NoReturn:
        """Raise, from inside one of the framework's own tools, what pauses its agent."""
        raise NotImplementedError


def run_on_loop(work: Coroutine[Any, Any, T], cancel_when: threading.Event | None = None) -> T:
    """Run on a new event loop; cancel it once the event is set."""

    async def watched() -> T:
        task = asyncio.ensure_future(work)
        while cancel_when is not None and not task.done():
            await asyncio.wait([task], timeout=0.01)
            if cancel_when.is_set():
                task.cancel()
                break
        return await task

    return asyncio.run(watched())


def require(module: str) -> Any:
    """Import a framework. Where its own tests run it must be installed; elsewhere they skip."""
    if os.environ.get("WINK_INTEGRATION"):
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"needs {module}: run `make integrations`")


# The cases


@dataclass(frozen=True)
class Case:
    """One thing that must hold in every framework."""

    name: str
    text: str
    """The requirement, in one sentence."""
    body: Callable[[Stage], None]

    def __str__(self) -> str:
        return self.name

    def run(self, driver: Callable[[], Driver], place: Path) -> None:
        """Check it with a fresh driver in an empty directory; skip what the framework cannot do."""
        limits = driver().limits
        unknown = limits.keys() - _cases.keys()
        assert not unknown, f"limits of no case: {sorted(unknown)}"
        if self.name in limits:
            row = table_row(self.name, limits[self.name])
            assert row in _DOCUMENTED.read_text(), f"docs/integrations.md lacks: {row}"
            pytest.skip(limits[self.name])
        workspace = place / "project"
        workspace.mkdir()
        self.body(Stage(driver, workspace))


_DOCUMENTED = Path(__file__).parents[2] / "docs" / "integrations.md"
_cases: dict[str, Case] = {}


def table_row(name: str, reason: str) -> str:
    """Return what the documentation's table says about a case that a framework cannot pass."""
    return f"| {name.replace('_', ' ')} | {reason.removesuffix('.')} |"


def all_cases() -> list[Case]:
    """Return every case, in the order of this file."""
    return list(_cases.values())


def case(body: Callable[[Stage], None]) -> Callable[[Stage], None]:
    assert body.__doc__
    _cases[body.__name__] = Case(body.__name__, body.__doc__, body)
    return body


class Stage:
    """A workspace, and drivers to run jobs in it."""

    def __init__(self, driver: Callable[[], Driver], workspace: Path) -> None:
        self._new_driver = driver
        self.driver = driver()
        self.workspace = workspace

    def new_process(self) -> None:
        """Continue with a driver that remembers nothing."""
        self.driver = self._new_driver()

    def play(
        self, *turns: Turn, may_fail: bool = False, resume: Any = None, **options: Any
    ) -> Outcome:
        """Run a job with these turns of the model, then its final text."""
        job = Job(workspace=self.workspace, turns=[*turns, "done"], **options)
        done = self.driver.run(job) if resume is None else self.driver.resume(job, resume)
        if done.error is not None and not may_fail:
            raise AssertionError(f"the run ended with {done.error!r}") from done.error
        return done

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        file = self.workspace / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)

    def read(self, path: str) -> str:
        return (self.workspace / path).read_text()

    def has(self, path: str) -> bool:
        return (self.workspace / path).exists()

    def files(self) -> dict[str, tuple[str, int, int, bytes]]:
        """Return everything in the workspace: kind and mode, time, content."""
        found: dict[str, tuple[str, int, int, bytes]] = {}
        for path in sorted(self.workspace.rglob("*")):
            status = path.lstat()
            is_file = stat.S_ISREG(status.st_mode)
            found[str(path.relative_to(self.workspace))] = (
                stat.filemode(status.st_mode),
                status.st_nlink if is_file else 0,
                status.st_mtime_ns if is_file else 0,
                path.read_bytes() if is_file else b"",
            )
        return found

    def records(self, tool: str = "") -> list[dict[str, Any]]:
        """Return the calls on record, oldest first, with the details that `wink show` gives."""
        found = [json.loads(line) for line in self._here("log", "--json", "-n", "0")]
        return [
            json.loads("\n".join(self._here("show", each["call"], "--json")))
            for each in found
            if tool in ("", each["tool"])
        ]

    def record(self, tool: str) -> dict[str, Any]:
        """Return the one call of a tool."""
        found = self.records(tool)
        assert len(found) == 1, f"{tool} has {len(found)} records: {self.records()}"
        return found[0]

    def _here(self, *arguments: str) -> list[str]:
        """Run `wink` in this process, which is quicker; ``wink`` runs the real program."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
            wink_main([*arguments, "--workspace", str(self.workspace)])
        assert not ended.value.code, out.getvalue()
        return out.getvalue().splitlines()

    def wink(self, *arguments: str) -> str:
        """Run `wink` as people do, and return what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "weakincentives.cli", *arguments],
            cwd=self.workspace,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


async def until(condition: Callable[[], object]) -> None:
    """Wait, on any event loop, until something holds."""
    for _ in range(int(PATIENCE / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError("it never happened")


def kept(record: Mapping[str, Any]) -> bool:
    """Whether what a call changed is in place; a call inside of another is never "committed"."""
    return record["outcome"] in ("ok", "committed")


# What the model is shown


@dataclass(frozen=True)
class Address:
    """Where to send it."""

    street: str
    code: int
    """The postal code."""


@tool(
    reach="read",
    examples=[
        ToolExample(
            description="Two large boxes",
            input={
                "quantity": 2,
                "size": "large",
                "address": {"street": "Harbour Road", "code": 4711},
            },
            output="ordered 2",
        )
    ],
)
def place_order(quantity: int, size: Literal["small", "large"], address: Address) -> str:
    """Order boxes."""
    return f"ordered {quantity} {size}"


@case
def the_schema_and_examples_reach_the_model(stage: Stage) -> None:
    """The model is shown a tool's description, the schema of its arguments, and its examples."""
    arguments = {"quantity": 3, "size": "small", "address": {"street": "Quay", "code": 1}}

    done = stage.play([Ask("c1", "place_order", arguments)], tools=[place_order])

    assert "ordered 3 small" in done.answers["c1"]
    assert done.text == "done"
    shown = done.tools["place_order"]
    assert "Order boxes." in shown["description"]
    schema = json.dumps(shown["schema"])
    for part in ("quantity", "size", "large", "address", "street", "code", "The postal code."):
        assert part in schema, f"{part} is missing in {schema}"
    text = shown["description"] + schema
    for part in ("Two large boxes", "Harbour Road", "4711"):
        assert part in text, f"{part} is missing in {text}"


@case
def all_argument_errors_come_at_once(stage: Stage) -> None:
    """Every wrong argument is named with its path in one answer; nothing ran; it is on record."""
    wrong = {"quantity": "three", "size": "huge", "address": {"street": 1}}

    done = stage.play([Ask("c1", "place_order", wrong)], tools=[place_order])

    for part in ("quantity", "size", "small, large", "address.street", "address.code"):
        assert part in done.answers["c1"], f"{part} is missing in {done.answers['c1']}"
    assert done.text == "done"
    assert stage.record("place_order")["outcome"] == "refused"


@case
def the_model_can_correct_its_arguments(stage: Stage) -> None:
    """After a refused call, the run continues, and the next call works."""
    right = {"quantity": 3, "size": "small", "address": {"street": "Quay", "code": 1}}

    done = stage.play(
        [Ask("c1", "place_order", {"quantity": 3})],
        [Ask("c2", "place_order", right)],
        tools=[place_order],
    )

    assert "ordered 3 small" in done.answers["c2"]
    assert [each["outcome"] for each in stage.records("place_order")] == ["refused", "ok"]


# Policies


class NoSecrets:
    """Denies calls that name a secret."""

    name = "no_secrets"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if "secret" in repr(params):
            return PolicyDecision.deny("secrets are off limits")
        return PolicyDecision.allow()

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        """Remember nothing."""


@tool(reach="reversible")
def save(path: str, text: str, *, context: ToolContext) -> str:
    """Write a text to a file.

    Args:
        path: Which file.
        text: What to write.
    """
    context.filesystem.write(path, text)
    return f"saved {path}"


@case
def a_denial_is_read_by_the_model_and_recorded(stage: Stage) -> None:
    """A policy's denial is the call's answer and on record; nothing ran, and the run continues."""
    done = stage.play(
        [Ask("c1", "save", {"path": "secret.txt", "text": "x"})],
        [Ask("c2", "save", {"path": "open.txt", "text": "y"})],
        tools=[save],
        policies=[NoSecrets()],
    )

    assert "secrets are off limits" in done.answers["c1"]
    assert "saved open.txt" in done.answers["c2"]
    assert not stage.has("secret.txt")
    denied, allowed = stage.records("save")
    assert (denied["outcome"], denied["denied_by"]) == ("denied", "no_secrets")
    assert kept(allowed)


@case
def a_policy_covers_the_frameworks_own_tools(stage: Stage) -> None:
    """A denied call of one of the framework's own tools does not run, and is on record."""
    ran: list[str] = []

    def look_up(topic: str) -> str:
        """Look something up.

        Args:
            topic: What to look up.
        """
        ran.append(topic)
        return f"about {topic}"

    done = stage.play(
        [Ask("c1", "look_up", {"topic": "secret"})],
        [Ask("c2", "look_up", {"topic": "weather"})],
        own=[look_up],
        policies=[NoSecrets()],
    )

    assert ran == ["weather"]
    assert "secrets are off limits" in done.answers["c1"]
    assert "about weather" in done.answers["c2"]
    assert [each["outcome"] for each in stage.records("look_up")] == ["denied", "ok"]


# Rollback


@dataclass(frozen=True)
class Total:
    """A number in the session."""

    value: int


@tool(reach="read")
def show_total(*, context: ToolContext) -> str:
    """Show the total in the session."""
    total = context.session[Total].latest()
    return f"total {total.value if total else 0}"


@tool(reach="reversible")
def damage(*, context: ToolContext) -> str:
    """Change files and the session, then fail."""
    files = context.filesystem
    files.write("data.bin", "overwritten")
    files.delete("run.sh")
    files.write("run.sh", "echo replaced")
    files.write("new/deep/file.txt", "new")
    files.move("keep.txt", "moved.txt")
    context.session[Total].seed(Total(99))
    raise ValueError("no room left")


def _furnish(stage: Stage) -> dict[str, tuple[str, int, int, bytes]]:
    stage.write("data.bin", bytes(range(256)), 0o600)
    stage.write("run.sh", b"#!/bin/sh\nexit 0\n", 0o750)
    stage.write("keep.txt", b"keep\r\n", 0o604)
    stage.write("sub/.env", b"KEY=1\n", 0o640)
    return stage.files()


@case
def a_failed_call_is_rolled_back(stage: Stage) -> None:
    """A call that fails leaves files (bytes, mode, time) and session as they were."""
    before = _furnish(stage)

    done = stage.play([Ask("c1", "damage")], [Ask("c2", "show_total")], tools=[damage, show_total])

    assert "no room left" in done.answers["c1"], done.answers
    assert "total 0" in done.answers["c2"]
    assert done.text == "done"
    assert stage.files() == before
    assert stage.record("damage")["outcome"] == "rolled back"


@case
def a_timeout_rolls_back_and_fences_the_handler(stage: Stage) -> None:
    """A call that exceeds its tool's timeout is rolled back, and its late writes are refused."""
    before = _furnish(stage)
    over, tried = threading.Event(), threading.Event()
    late: list[str] = []

    @tool(reach="reversible", timeout=1.0)
    def stall(*, context: ToolContext) -> str:
        """Write, then take too long."""
        context.filesystem.write("data.bin", "overwritten")
        over.wait(PATIENCE)
        try:
            context.filesystem.write("data.bin", "late")
            late.append("written")
        except Exception as error:
            late.append(type(error).__name__)
        finally:
            tried.set()
        return "never seen"

    done = stage.play([Ask("c1", "stall")], tools=[stall])
    assert stage.files() == before
    over.set()

    assert tried.wait(PATIENCE)
    assert late != ["written"]
    assert stage.files() == before
    assert "never seen" not in done.answers["c1"]
    assert done.text == "done"
    assert stage.record("stall")["outcome"] == "rolled back"


@case
def cancelling_the_run_rolls_back_the_open_call(stage: Stage) -> None:
    """Cancelling the agent rolls back the call under way; calls that had finished stay."""
    _furnish(stage)
    started = threading.Event()

    @tool(reach="reversible")
    async def linger(*, context: ToolContext) -> str:
        """Write, then wait."""
        context.filesystem.write("data.bin", "overwritten")
        context.filesystem.write("half.txt", "half")
        started.set()
        await until(lambda: False)
        return "never seen"

    stage.play(
        [Ask("c1", "save", {"path": "first.txt", "text": "kept"})],
        [Ask("c2", "linger")],
        tools=[save, linger],
        cancel_when=started,
        may_fail=True,
    )

    assert started.is_set()
    assert stage.read("first.txt") == "kept"
    assert (stage.workspace / "data.bin").read_bytes() == bytes(range(256))
    assert not stage.has("half.txt")
    assert kept(stage.record("save"))
    assert stage.record("linger")["outcome"] == "rolled back"


@case
def the_next_run_works_after_a_cancelled_one(stage: Stage) -> None:
    """A cancelled run leaves nothing locked: the next run on the workspace works."""
    started = threading.Event()

    @tool(reach="reversible")
    async def linger() -> str:
        """Wait."""
        started.set()
        await until(lambda: False)
        return "never seen"

    stage.play([Ask("c1", "linger")], tools=[linger], cancel_when=started, may_fail=True)
    stage.new_process()
    stage.play([Ask("c2", "save", {"path": "a.txt", "text": "a"})], tools=[save])

    assert stage.read("a.txt") == "a"


# The framework's own tools


def _native(stage: Stage, then: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that knows nothing of us: it writes by itself and with a program."""
    place = stage.workspace

    def rebuild(target: str) -> str:
        """Rebuild a target.

        Args:
            target: Its name.
        """
        with open(place / "data.bin", "wb") as file:
            file.write(b"half of it")
        os.chmod(place / "run.sh", 0o600)
        (place / "keep.txt").unlink()
        (place / "out").mkdir()
        command = f"echo built {target} > out/{target}.txt; rm sub/.env"
        subprocess.run(["sh", "-c", command], cwd=place, check=True)
        then()
        return f"built {target}"

    return rebuild


@case
def an_own_tool_that_fails_is_rolled_back(stage: Stage) -> None:
    """One of the framework's own tools, which writes with open() and a program, is rolled back."""
    before = _furnish(stage)

    def fail() -> None:
        raise ValueError("the compiler crashed")

    done = stage.play(
        [Ask("c1", "rebuild", {"target": "site"})], own=[_native(stage, fail)], may_fail=True
    )

    assert stage.files() == before
    record = stage.record("rebuild")
    assert record["outcome"] == "rolled back"
    assert "the compiler crashed" in record["result"]
    if done.error is None:  # some frameworks end the run with the tool's exception
        assert "the compiler crashed" in done.answers["c1"]


@case
def cancelling_the_run_rolls_back_an_own_tool(stage: Stage) -> None:
    """Cancelling the agent rolls back one of its own tools, which is async and under way."""
    before = _furnish(stage)
    started = threading.Event()
    place = stage.workspace

    async def migrate(table: str) -> str:
        """Migrate a table.

        Args:
            table: Its name.
        """
        with open(place / "data.bin", "wb") as file:
            file.write(b"half of it")
        (place / "half.txt").write_text("half")
        started.set()
        await until(lambda: False)
        return "never seen"

    stage.play(
        [Ask("c1", "migrate", {"table": "users"})],
        own=[migrate],
        cancel_when=started,
        may_fail=True,
    )

    assert started.is_set()
    assert stage.files() == before
    assert stage.record("migrate")["outcome"] == "rolled back"


@case
def an_own_tool_that_works_is_committed(stage: Stage) -> None:
    """What one of the framework's own tools changed is kept, on record, and can be undone."""
    before = _furnish(stage)

    done = stage.play(
        [Ask("c1", "rebuild", {"target": "site"})], own=[_native(stage, lambda: None)]
    )

    assert "built site" in done.answers["c1"]
    assert stage.read("out/site.txt") == "built site\n"
    record = stage.record("rebuild")
    assert kept(record)
    assert record["arguments"] == {"target": "site"}
    # What a nested call changed is in the record of the outermost one. A file that reuses the inode
    # of a deleted one counts as that one renamed.
    files = [each for record in stage.records() for each in record["files"]]
    changed = {path for each in files for path in (each["path"], each["origin"])}
    assert {"data.bin", "keep.txt", "out/site.txt"} <= changed
    stage.wink("undo")
    assert stage.files() == before


@case
def an_own_tool_that_pauses_the_agent_is_suspended(stage: Stage) -> None:
    """The framework's control-flow exception rolls the call back; the record says suspended."""
    before = _furnish(stage)

    stage.play(
        [Ask("c1", "rebuild", {"target": "site"})],
        own=[_native(stage, lambda: stage.driver.suspend())],
        may_fail=True,
    )

    assert stage.files() == before
    assert {each["outcome"] for each in stage.records("rebuild")} == {"suspended"}


# Calls of one turn


@tool(reach="reversible")
async def add(amount: int, *, context: ToolContext) -> str:
    """Add to the total, in the session and in a file.

    Args:
        amount: How much.
    """
    total, file = context.session[Total].latest(), int(context.filesystem.read("total.txt"))
    await asyncio.sleep(0.005)  # so that others read the same, if they could
    context.session[Total].seed(Total((total.value if total else 0) + amount))
    context.filesystem.write("total.txt", str(file + amount))
    return "added"


@case
def parallel_calls_lose_no_update(stage: Stage) -> None:
    """Ten calls of one turn that change the same slice and the same file all count."""
    stage.write("total.txt", b"0")

    done = stage.play(
        [Ask(f"c{n}", "add", {"amount": n}) for n in range(1, 11)],
        [Ask("c11", "show_total")],
        tools=[add, show_total],
    )

    assert stage.read("total.txt") == "55"
    assert "total 55" in done.answers["c11"]
    assert [kept(each) for each in stage.records("add")] == [True] * 10


@case
def parallel_reads_overlap(stage: Stage) -> None:
    """Ten reads of one turn are under way at the same time."""
    inside: set[int] = set()
    gave_up: list[int] = []

    @tool(reach="read")
    async def meet(number: int) -> str:
        """Wait for the others.

        Args:
            number: Who comes.
        """
        inside.add(number)
        try:
            await until(lambda: len(inside) == 10 or gave_up)
        except TimeoutError:
            gave_up.append(number)
        return f"met {len(inside)}"

    done = stage.play([Ask(f"c{n}", "meet", {"number": n}) for n in range(10)], tools=[meet])

    assert [done.answers[f"c{n}"] for n in range(10)] == ["met 10"] * 10


@case
def a_failed_call_of_a_turn_leaves_the_others(stage: Stage) -> None:
    """When one call of a turn fails, only that one is rolled back."""
    before = _furnish(stage)

    done = stage.play(
        [
            Ask("c1", "save", {"path": "one.txt", "text": "1"}),
            Ask("c2", "damage"),
            Ask("c3", "save", {"path": "three.txt", "text": "3"}),
        ],
        tools=[save, damage],
    )

    assert "no room left" in done.answers["c2"]
    assert (stage.read("one.txt"), stage.read("three.txt")) == ("1", "3")
    after = stage.files()
    assert {path: after[path] for path in before} == before
    assert after.keys() - before.keys() == {"one.txt", "three.txt"}


@case
def cancelling_one_call_leaves_the_others(stage: Stage) -> None:
    """When one call of a turn is cancelled, it is rolled back and the others finish."""
    started, gone = threading.Event(), threading.Event()

    @tool(reach="reversible")
    async def linger(*, context: ToolContext) -> str:
        """Write, then wait."""
        context.filesystem.write("half.txt", "half")
        started.set()
        try:
            await until(lambda: False)
        finally:
            gone.set()
        return "never seen"

    @tool(reach="reversible")
    async def outlast(path: str, *, context: ToolContext) -> str:
        """Write a file once the other call is gone.

        Args:
            path: Which file.
        """
        await until(gone.is_set)
        context.filesystem.write(path, "kept")
        return "kept"

    stage.play(
        [
            Ask("c1", "outlast", {"path": "one.txt"}),
            Ask("c2", "linger"),
            Ask("c3", "outlast", {"path": "three.txt"}),
        ],
        tools=[linger, outlast],
        cancel_calls={"c2": started},
        may_fail=True,
    )

    assert (stage.read("one.txt"), stage.read("three.txt")) == ("kept", "kept")
    assert not stage.has("half.txt")
    assert stage.record("linger")["outcome"] == "rolled back"


# Approval


def _preview(params: Any, *, context: ToolContext) -> CallPreview:
    old = context.filesystem.read("note.txt")
    return CallPreview(diff=f"-{old}\n+{params.text}\n", paths=("note.txt",), state=old)


@tool(reach="reversible", preview=_preview)
def set_note(text: str, *, context: ToolContext) -> str:
    """Replace the note.

    Args:
        text: The new one.
    """
    context.filesystem.write("note.txt", text)
    return f"the note is {text}"


def _ask_first() -> ApprovalPolicy:
    return ApprovalPolicy(tools={"set_note"})


def _said(record: Mapping[str, Any]) -> str:
    """Return what the record of a call says about the answer."""
    return "\n".join([record["result"], *record["notes"]])


_SET_NOTE = Ask("c1", "set_note", {"text": "new words"})


@case
def an_approved_call_runs(stage: Stage) -> None:
    """A person is shown the call and approves it: it runs once, and the record says who did."""
    stage.write("note.txt", b"old words")
    while_asked: list[str] = []
    yes = Answer(True, by="ann", first=lambda: while_asked.append(stage.read("note.txt")))

    done = stage.play([_SET_NOTE], tools=[set_note], policies=[_ask_first()], answers={"c1": yes})

    assert while_asked == ["old words"]
    assert "new words" in done.questions["c1"]
    assert "the note is new words" in done.answers["c1"]
    assert stage.read("note.txt") == "new words"
    record = stage.records("set_note")[-1]
    assert kept(record)
    assert "approved" in _said(record)


@case
def a_denied_call_does_not_run(stage: Stage) -> None:
    """A person's denial and its reason are read by the model and on record; nothing ran."""
    stage.write("note.txt", b"old words")
    before = stage.files()
    no = Answer(False, "not before the review", by="ann")

    done = stage.play([_SET_NOTE], tools=[set_note], policies=[_ask_first()], answers={"c1": no})

    assert "not before the review" in done.answers["c1"]
    assert done.text == "done"
    assert stage.files() == before
    record = stage.records("set_note")[-1]
    assert record["outcome"] == "denied"
    assert "not before the review" in _said(record)


@case
def the_record_names_who_answered(stage: Stage) -> None:
    """Approvals and denials are on record with the name of the person."""
    stage.write("note.txt", b"old words")

    stage.play(
        [_SET_NOTE],
        [Ask("c2", "set_note", {"text": "newer words"})],
        tools=[set_note],
        policies=[_ask_first()],
        answers={"c1": Answer(True, by="ann"), "c2": Answer(False, "no", by="bob")},
    )

    found = [each for each in stage.records("set_note") if each["outcome"] != "suspended"]
    approved, denied = found
    assert kept(approved)
    assert "by ann" in _said(approved)
    assert denied["outcome"] == "denied"
    assert "by bob" in _said(denied)


@case
def a_person_can_edit_the_arguments(stage: Stage) -> None:
    """A call that is approved with other arguments runs with those, and the record says so."""
    stage.write("note.txt", b"old words")
    edited = Answer(True, by="ann", arguments={"text": "better words"})

    done = stage.play(
        [_SET_NOTE], tools=[set_note], policies=[_ask_first()], answers={"c1": edited}
    )

    assert stage.read("note.txt") == "better words"
    assert "better words" in done.answers["c1"]
    record = stage.records("set_note")[-1]
    assert record["arguments"] == {"text": "better words"}


@case
def an_approval_is_for_what_was_shown(stage: Stage) -> None:
    """If a file of the preview changes before the answer, the approved call is refused."""
    stage.write("note.txt", b"old words")
    meddle = Answer(True, by="ann", first=lambda: stage.write("note.txt", b"words of another"))

    done = stage.play(
        [_SET_NOTE], tools=[set_note], policies=[_ask_first()], answers={"c1": meddle}
    )

    assert stage.read("note.txt") == "words of another"
    assert "changed" in done.answers["c1"]
    assert stage.records("set_note")[-1]["outcome"] == "denied"


@case
def other_policies_come_before_a_person(stage: Stage) -> None:
    """A call that another policy denies is denied without asking anyone."""
    stage.write("note.txt", b"old words")

    done = stage.play(
        [Ask("c1", "set_note", {"text": "a secret"})],
        tools=[set_note],
        policies=[_ask_first(), NoSecrets()],
        answers={"c1": Answer(True)},
    )

    assert done.questions == {}
    assert "secrets are off limits" in done.answers["c1"]
    assert stage.read("note.txt") == "old words"


@case
def an_own_tool_can_need_approval(stage: Stage) -> None:
    """A person is asked about the framework's own tools, too; a denied call does not run."""
    ran: list[str] = []

    def publish(title: str) -> str:
        """Publish a page.

        Args:
            title: Which page.
        """
        ran.append(title)
        return f"published {title}"

    done = stage.play(
        [Ask("c1", "publish", {"title": "draft"})],
        [Ask("c2", "publish", {"title": "final"})],
        own=[publish],
        policies=[ApprovalPolicy(tools={"publish"})],
        answers={"c1": Answer(False, "it is a draft", by="ann"), "c2": Answer(True, by="ann")},
    )

    assert ran == ["final"]
    assert "it is a draft" in done.answers["c1"]
    assert "published final" in done.answers["c2"]
    outcomes = [each["outcome"] for each in stage.records("publish")]
    assert [each for each in outcomes if each != "suspended"] == ["denied", "ok"]


# Interrupted and repeated runs


class Counted:
    """A tool that reaches outside, and how often it ran."""

    def __init__(self) -> None:
        self.sent: list[str] = []

        @tool(reach="irreversible")
        def send(text: str) -> str:
            """Send a message.

            Args:
                text: What to send.
            """
            self.sent.append(text)
            return f"sent as number {len(self.sent)}"

        self.tool = send


@case
def a_pending_call_is_suspended(stage: Stage) -> None:
    """A call that waits for an answer has changed nothing, and the record says suspended."""
    stage.write("note.txt", b"old words")
    before = stage.files()

    done = stage.play([_SET_NOTE], tools=[set_note], policies=[_ask_first()], may_fail=True)

    assert "c1" in done.questions
    assert "c1" not in done.answers
    assert stage.files() == before
    assert {each["outcome"] for each in stage.records("set_note")} == {"suspended"}


@case
def resuming_runs_nothing_twice(stage: Stage) -> None:
    """Resumed in another process, a turn with a pending call continues; finished calls stay so."""
    stage.write("note.txt", b"old words")
    counted = Counted()
    options: dict[str, Any] = {
        "tools": [set_note, counted.tool],
        "policies": [_ask_first()],
        "run": "the job",
    }

    first = stage.play([Ask("c0", "send", {"text": "hello"}), _SET_NOTE], may_fail=True, **options)
    assert counted.sent == ["hello"]
    assert "c1" in first.questions
    assert stage.read("note.txt") == "old words"

    stage.new_process()
    done = stage.play(resume=first.state, answers={"c1": Answer(True, by="ann")}, **options)

    assert counted.sent == ["hello"]
    assert stage.read("note.txt") == "new words"
    assert "sent as number 1" in done.answers["c0"]
    assert "the note is new words" in done.answers["c1"]
    assert done.text == "done"
    assert [each["outcome"] for each in stage.records("send")] == ["ok"]
    found = [each for each in stage.records("set_note") if each["outcome"] != "suspended"]
    assert [kept(each) for each in found] == [True]


@case
def repeating_a_run_runs_nothing_twice(stage: Stage) -> None:
    """A run that is repeated from its start after a crash gets the recorded answers."""
    counted = Counted()
    turns: list[Turn] = [
        [Ask("c1", "send", {"text": "hello"})],
        [Ask("c2", "save", {"path": "a.txt", "text": "a"})],
    ]
    options: dict[str, Any] = {"tools": [counted.tool, save], "run": "the job"}
    first = stage.play(*turns, **options)
    stage.write("a.txt", b"changed by a person")
    stage.new_process()

    again = stage.play(*turns, [Ask("c3", "send", {"text": "bye"})], **options)

    assert counted.sent == ["hello", "bye"]
    assert stage.read("a.txt") == "changed by a person"
    assert {name: again.answers[name] for name in ("c1", "c2")} == first.answers
    assert "sent as number 2" in again.answers["c3"]
    assert len(stage.records("send")) == 2
    assert len(stage.records("save")) == 1


# Afterwards


@case
def wink_log_and_undo_work_afterwards(stage: Stage) -> None:
    """`wink log` lists the calls of the run, and `wink undo` restores the files as they were."""
    before = _furnish(stage)

    stage.play(
        [Ask("c1", "save", {"path": "data.bin", "text": "overwritten"})],
        [Ask("c2", "damage")],
        [Ask("c3", "save", {"path": "new/file.txt", "text": "new"})],
        tools=[save, damage],
    )

    lines = [json.loads(line) for line in stage.wink("log", "--json").splitlines()]
    ours = [each for each in lines if each["tool"] in ("save", "damage")]
    assert [(each["tool"], kept(each)) for each in ours] == [
        ("save", True),
        ("damage", False),
        ("save", True),
    ]
    assert len({each["run"] for each in lines}) == 1
    shown = stage.wink("log")
    assert "damage" in shown
    assert "rolled back" in shown
    assert stage.read("data.bin") == "overwritten"
    stage.wink("undo")
    assert stage.files() == before
