"""One record commits a call: after a kill anywhere, all of it is there, or nothing of it."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from ledger_service import serve

import weakincentives as wink
from chance import SEED, THOROUGH, dice, is_time_left
from weakincentives.errors import ToolDefinitionError
from weakincentives.filesystem import Branch, Filesystem, HostFilesystem, Limits, branches_of
from weakincentives.prompt import Effect, MarkdownSection, Prompt, PromptTemplate
from weakincentives.retry import RetryPolicy
from weakincentives.runtime import (
    CallOutcome,
    OutcomeLedger,
    SavedSession,
    Session,
    ToolInvoked,
    execute_tool,
)
from weakincentives.runtime.conversation import Message

CHILD = Path(__file__).with_name("recovery_child.py")
PLACES = ("directory", "safe", "branch")
HOWS = ("kill", "torn")
TOOLS = ["write", "post", "left", "right", "both", "again", "shell", "asked"]
OFTEN = 300
"""About so many system calls follow the handlers of a run; those of a kill are among them."""
KILLS = 1000 if THOROUGH else 60 if os.environ.get("WINK_HEAVY") else 3


def some_of(places: range, every: int) -> Iterator[int]:
    """Some of them; all of them in a thorough test, as far as there is time."""
    chosen = places if THOROUGH else places[SEED % every :: every]
    return itertools.takewhile(lambda _: is_time_left(), chosen)


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


class Worker:
    """The program that makes runs, and a service that counts what they do there."""

    def __init__(self, url: str, program: subprocess.Popen[str]) -> None:
        self.url = url
        self._program = program

    def run(self, where: Path, what: str, place: str, at: int = 0, how: str = "kill") -> Ended:
        asked, answers = self._program.stdin, self._program.stdout
        assert asked is not None
        assert answers is not None
        asked.write(json.dumps([str(where), what, place, at, how]) + "\n")
        asked.flush()
        return Ended(**json.loads(answers.readline()))

    def effects(self) -> dict[str, int]:
        """How often each call has taken effect."""
        with urlopen(f"{self.url}/all") as response:
            return json.load(response)["most"]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    here, there = multiprocessing.Pipe()
    service = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    service.start()
    url = f"http://127.0.0.1:{here.recv()}"
    command = [sys.executable, str(CHILD), url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
        yield Worker(url, program)
    service.kill()
    service.join()


def check(done: Ended, before: dict[str, int], worker: Worker) -> list[str]:
    """Check that each call of a finished run has happened completely or not at all.

    Returns the names of the calls that failed.
    """
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    *codes, notes, lines = said[1:]
    names = [name for name, _ in codes]
    assert names == TOOLS, done.stdout
    succeeded = [name for name, code in codes if code == "ok"]
    noted = [each for each in succeeded if each not in ("left", "right")]
    assert notes == ["notes", *noted], (done.stdout, done.stderr)
    in_files = [each for each in noted if each != "post"]
    in_files += [each for each in ("left", "right") if each in succeeded]
    assert lines == ["lines", *in_files], (done.stdout, done.stderr)
    new = {key: n for key, n in worker.effects().items() if key not in before}
    assert all(n == 1 for n in new.values()), "the service was reached twice"
    reached = [each for each in succeeded if each in ("post", "both", "again", "asked")]
    assert len(new) >= len(reached), "a call that succeeded has not taken effect"
    return [name for name, code in codes if code != "ok"]


def survive(where: Path, worker: Worker, place: str, kills: list[tuple[int, str]]) -> int:
    """Run with some kills one after the other, then check the outcome; returns how many hit."""
    (where / "work").mkdir(parents=True)
    before, hits = worker.effects(), 0
    for at, how in [*kills, (0, "kill")]:
        done = worker.run(where, "resume" if hits else "run", place, at, how)
        if done.returncode != -signal.SIGKILL:
            break
        hits += 1
    # What reached outside and cannot be asked or repeated is not known after a kill; all else is.
    try:
        unknown = set(check(done, before, worker))
        assert unknown <= {"post", "both"}, done.stdout
        assert len(unknown) <= hits
    except AssertionError as error:
        raise AssertionError(f"{place}, {kills}: {error}") from error
    return hits


@pytest.mark.heavy
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_any_system_call_leaves_all_of_a_call_or_nothing(
    tmp_path: Path, worker: Worker, place: str
):
    (tmp_path / "whole/work").mkdir(parents=True)
    count = int(worker.run(tmp_path / "whole", "run", place).stdout.split()[1])
    assert 100 < count < OFTEN
    chosen = dice(place)
    for at in some_of(range(1, count + 1), 4):
        for how in HOWS if THOROUGH else [chosen.choice(HOWS)]:
            hits = survive(tmp_path / f"{at}-{how}", worker, place, [(at, how)])
            assert hits or at > count * 0.9  # the count differs a little


@pytest.mark.heavy
@pytest.mark.parametrize("place", PLACES)
def test_kills_at_random_system_calls_lose_nothing_and_repeat_nothing(
    worker: Worker, place: str, record_property
):
    """Also several in one run, and in the middle of what is redone."""
    chosen, kills = dice(place), 0
    while kills < KILLS // len(PLACES) and is_time_left():
        planned = [
            (chosen.randint(1, OFTEN // 2), chosen.choice(HOWS))
            for _ in range(chosen.randint(1, 4))
        ]
        with tempfile.TemporaryDirectory() as folder:
            try:
                kills += survive(Path(folder), worker, place, planned)
            except AssertionError as error:
                raise AssertionError(f"WINK_SEED={SEED}, {planned}: {error}") from error
    record_property("kills", kills)


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["full", "fails"])
@pytest.mark.parametrize("place", PLACES)
def test_a_disk_that_is_full_or_fails_at_the_commit_undoes_the_call(
    tmp_path: Path, worker: Worker, place: str, how: str
):
    for at in some_of(range(1, 180), 16):
        where = tmp_path / f"{at}"
        (where / "work").mkdir(parents=True)
        before = worker.effects()
        done = worker.run(where, "run", place, at, how)
        # The calls on record are complete, and nothing else is there.
        check(done, before, worker)
        check(worker.run(where, "resume", place), before, worker)


# In one process: the file of a session as a kill between the commit and the save leaves it


@dataclass(frozen=True)
class Step:
    """State that a call changes."""

    text: str


ran: list[str] = []


@wink.tool(reach="reversible")
def put(text: str, *, context: wink.ToolContext) -> str:
    """Write a file, and note it."""
    ran.append(text)
    context.filesystem.write("file.txt", text)
    context.session.dispatch(Step(text))
    return f"put {text}"


@wink.tool(reach="reversible")
def put_twice(*, context: wink.ToolContext) -> str:
    """Call another tool twice."""
    first, second = put("one", context=context), put("two", context=context)
    return f"{first.value}, {second.value}"


def make(
    files: HostFilesystem, saved: SavedSession, name: str, params: object, call_id: str = "c1"
) -> wink.ToolResult[object]:
    """Make one call, or return its answer if it is on record."""
    section = MarkdownSection(title="Task", template="Work.", tools=[put, put_twice])
    prompt = Prompt(PromptTemplate(sections=[section], resources={Filesystem: files}))
    with prompt.resources:
        call = wink.ToolCall(name, params, call_id)
        return execute_tool(call, session=saved.session, prompt=prompt, once=True)


def opened(where: Path, place: str, **options: Any) -> HostFilesystem:
    (where / "work").mkdir(exist_ok=True)
    if place == "directory":
        return HostFilesystem(where / "work", **options)
    exists = any(each.name == "b" for each in branches_of(where / "work"))
    return (Branch.open if exists else Branch.create)(where / "work", "b")


def killed_after(
    where: Path, place: str, name: str, params: object, **options: Any
) -> tuple[Path, int]:
    """Make a call, and leave the session as it was saved before; returns its file, and its size."""
    path = where / "run.jsonl"
    with opened(where, place, **options) as files, SavedSession.create(path, Session()) as saved:
        assert make(files, saved, "put", {"text": "zero"}, "c0").success
        before = path.stat().st_size
        assert make(files, saved, name, params).success
    os.truncate(path, before)
    ran.clear()
    return path, before


@pytest.mark.parametrize("place", ["directory", "branch"])
@pytest.mark.parametrize("text", ["short", "long " * 20_000])
def test_a_committed_call_gets_its_record_and_is_not_run_again(
    tmp_path: Path, place: str, text: str
):
    path, _ = killed_after(tmp_path, place, "put", {"text": text})

    with opened(tmp_path, place) as files, SavedSession.open(path) as saved:
        assert saved.recover(files) == ()
        answer = make(files, saved, "put", {"text": text})
        assert files.read("file.txt") == text
        assert saved.session[Step].all() == (Step("zero"), Step(text))
    with SavedSession.open(path) as saved:
        assert [each.call_id for each in saved.session[ToolInvoked].all()] == ["c0", "c1"]
    assert (answer.value, ran) == (f"put {text}", [])


@pytest.mark.parametrize("place", ["directory", "branch"])
def test_the_record_of_a_call_has_the_calls_nested_in_it(tmp_path: Path, place: str):
    path, _ = killed_after(tmp_path, place, "put_twice", {})

    with opened(tmp_path, place) as files, SavedSession.open(path) as saved:
        saved.recover(files)
        names = [each.tool_name for each in saved.session[ToolInvoked].all()]
        assert saved.session[Step].all() == (Step("zero"), Step("one"), Step("two"))
    assert names == ["put", "put", "put", "put_twice"]


def test_to_recover_twice_is_to_recover_once(tmp_path: Path):
    path, _ = killed_after(tmp_path, "directory", "put", {"text": "a"})

    with opened(tmp_path, "directory") as files:
        for _ in range(2):
            with SavedSession.open(path) as saved:
                saved.recover(files)
                saved.recover(files)
                assert len(saved.session[ToolInvoked]) == 2
        size = path.stat().st_size
        with SavedSession.open(path) as saved:
            saved.recover(files)
    assert path.stat().st_size == size


def test_what_a_session_lacks_outlives_the_history(tmp_path: Path):
    """Other runs commit so much that the call is trimmed before its run is resumed."""
    path, _ = killed_after(tmp_path, "directory", "put", {"text": "a"})
    with opened(tmp_path, "directory", history_limit=Limits(count=2)) as files:
        with SavedSession.create(tmp_path / "other.jsonl", Session()) as other:
            for number in range(8):
                make(files, other, "put", {"text": f"other {number}"}, f"o{number}")
        assert [each.call_id for each in files.history()] == ["o6", "o7"]

        with SavedSession.open(path) as saved:
            saved.recover(files)
            assert saved.session[Step].all() == (Step("zero"), Step("a"))
            assert make(files, saved, "put", {"text": "a"}).value == "put a"
        assert files.read("file.txt") == "other 7"
        assert ran.count("a") == 0
        assert list((files.store / "redo").iterdir()) == []


def test_what_a_deleted_session_lacks_is_not_kept(tmp_path: Path):
    path, _ = killed_after(tmp_path, "directory", "put", {"text": "a"})
    SavedSession.delete(path)
    with opened(tmp_path, "directory", history_limit=Limits(count=1)) as files:
        for number in range(3):
            files.write("file.txt", str(number))
        assert not (files.store / "redo").exists()


def test_a_branch_that_begins_anew_keeps_what_a_session_lacks(tmp_path: Path):
    path, _ = killed_after(tmp_path, "branch", "put", {"text": "a"})
    with opened(tmp_path, "branch") as branch:
        assert isinstance(branch, Branch)
        with HostFilesystem(tmp_path / "work") as work:
            branch.merge_into(work)
        branch.begin_anew()

        with SavedSession.open(path) as saved:
            saved.recover(branch)
            assert saved.session[Step].all() == (Step("zero"), Step("a"))


def test_a_rebased_branch_still_has_what_a_session_lacks(tmp_path: Path):
    path, _ = killed_after(tmp_path, "branch", "put", {"text": "a"})
    (tmp_path / "work/new.txt").write_text("someone's")
    with opened(tmp_path, "branch") as branch, SavedSession.open(path) as saved:
        assert isinstance(branch, Branch)
        branch.rebase()
        saved.recover(branch)
        assert saved.session[Step].all() == (Step("zero"), Step("a"))


def test_a_session_that_went_on_without_the_call_has_it_undone(tmp_path: Path):
    """As a commit without a session's state: the call is re-run."""
    path, _ = killed_after(tmp_path, "directory", "put", {"text": "a"})
    with opened(tmp_path, "directory") as files, SavedSession.open(path) as saved:
        saved.session.dispatch(
            Message(role="model", tool_calls=(wink.ToolCall("put", {"text": "a"}, "c1"),))
        )
        saved.save()
        assert saved.recover(files) == ("c1",)
        assert files.read("file.txt") == "zero"
        assert make(files, saved, "put", {"text": "a"}).success
        assert ran == ["a"]


def test_a_session_that_is_not_saved_adds_nothing_to_the_history(tmp_path: Path):
    with opened(tmp_path, "directory") as files:
        registry = wink.ToolRegistry([put], workspace=files)
        with registry:
            assert registry.execute("put", {"text": "a"}).success
        (committed,) = files.history()
        assert files.redo_of(committed) is None


def test_a_workspace_without_history_is_as_before(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with (
        opened(tmp_path, "directory", history_limit=0) as files,
        SavedSession.create(path, Session()) as saved,
    ):
        assert make(files, saved, "put", {"text": "a"}).success
        assert saved.recover(files) == ()
    with SavedSession.open(path) as saved:
        assert saved.session[Step].all() == (Step("a"),)


def test_a_trial_that_is_not_committed_is_saved_as_ever(tmp_path: Path):
    """The calls of a dry run are savepoints: only the session's file has their records."""
    path = tmp_path / "run.jsonl"
    with opened(tmp_path, "directory") as files, SavedSession.create(path, Session()) as saved:
        view = files.fork_in_place()
        assert make(view, saved, "put", {"text": "a"}).success
        files.discard(view)
        assert files.history() == ()
    with SavedSession.open(path) as saved:
        assert saved.session[Step].all() == (Step("a"),)


# Calls whose outcome is unknown


def unknown_ledger(call_id: str = "c1") -> OutcomeLedger:
    """A ledger with a call that was killed."""
    ledger = OutcomeLedger()
    ledger.end(CallOutcome(call_id, "send", "unknown", 1.0))
    return ledger


def send_with(answer: object = None, **options: Any) -> tuple[wink.ToolResult[Any], list[str], str]:
    """Call a tool with an unknown outcome again: its result, what happened, its outcome."""
    happened: list[str] = []

    def send(params: dict[str, Any], *, context: wink.ToolContext) -> wink.ToolResult[str]:
        happened.append(f"sent {context.idempotency_key}")
        return wink.ToolResult.ok("sent", "sent")

    async def asend(params: dict[str, Any], *, context: wink.ToolContext) -> wink.ToolResult[str]:
        return send(params, context=context)

    def found_out(outcome: CallOutcome, context: wink.ToolContext) -> object:
        happened.append(f"asked {outcome.call_id} {outcome.outcome}")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def afound_out(outcome: CallOutcome, context: wink.ToolContext) -> object:
        return found_out(outcome, context)

    if options.pop("asks", False):
        options["recover"] = afound_out if options.pop("async_recover", False) else found_out
    handler = asend if options.pop("is_async", False) else send
    options.setdefault("reach", "irreversible")
    tool = wink.Tool.from_schema("send", "Send.", {"type": "object"}, handler, **options)
    ledger = unknown_ledger()
    section = MarkdownSection(title="Task", template="Work.", tools=[tool])
    prompt = Prompt(PromptTemplate(sections=[section], resources={OutcomeLedger: ledger}))
    with prompt.resources:
        call = wink.ToolCall("send", {}, "c1")
        result = execute_tool(call, session=Session(), prompt=prompt)
    found = ledger.find("c1")
    assert found is not None
    return result, happened, found.outcome


def test_a_call_of_unknown_outcome_is_refused():
    result, happened, outcome = send_with()
    assert result.failure is not None
    assert (result.failure.code, happened, outcome) == ("OUTCOME_UNKNOWN", [], "unknown")


@pytest.mark.parametrize("is_async", [False, True])
def test_an_idempotent_call_of_unknown_outcome_is_made_again_with_the_same_id(is_async: bool):
    result, happened, outcome = send_with(idempotent=True, is_async=is_async)
    assert (result.value, happened, outcome) == ("sent", ["sent c1"], "committed")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("async_recover", [False, True])
@pytest.mark.parametrize(
    ("answer", "code", "sends", "outcome"),
    [
        (wink.ToolResult.ok("found", "found"), None, False, "committed"),
        (wink.ToolResult.error("the service refused it"), "EXECUTION_FAILED", False, "rolled_back"),
        ("rolled_back", None, True, "committed"),
        (None, "OUTCOME_UNKNOWN", False, "unknown"),
        (RuntimeError("the service is down"), "INTERNAL_ERROR", False, "unknown"),
        ("committed", "TYPE_ERROR", False, "unknown"),
    ],
)
def test_a_tool_says_what_became_of_a_call(
    is_async: bool, async_recover: bool, answer: object, code: str | None, sends: bool, outcome: str
):
    result, happened, found = send_with(
        answer, asks=True, is_async=is_async, async_recover=async_recover
    )
    assert (None if result.failure is None else result.failure.code) == code
    assert happened == ["asked c1 unknown", *(["sent c1"] if sends else [])]
    assert found == outcome


def test_a_call_that_stays_unknown_is_not_compensated():
    undone: list[str] = []
    cancel = Effect(description="cancel", apply=lambda: None, rollback=lambda: undone.append("x"))
    result, _, outcome = send_with(asks=True, reach="compensable", effects=[cancel])
    assert (result.success, outcome, undone) == (False, "unknown", [])


def test_only_an_idempotent_irreversible_call_can_be_retried():
    retry = RetryPolicy(max_retries=1)
    with pytest.raises(ToolDefinitionError, match="cannot be retried"):
        send_with(retry=retry)
    assert send_with(retry=retry, idempotent=True)[0].success


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reach": "reversible", "idempotent": True}, "reaches outside"),
        ({"reach": None, "recover": lambda outcome, context: None}, "reaches outside"),
        ({"recover": lambda outcome: None}, r"recover\(outcome, context\)"),
        ({"recover": lambda outcome, context: None, "idempotent": True}, "never be asked"),
    ],
)
def test_a_tool_that_cannot_recover_like_this_is_refused(options: dict[str, Any], message: str):
    options = {"reach": "irreversible", **options}
    with pytest.raises(ToolDefinitionError, match=message):

        @wink.tool(**options)
        def send() -> str:
            """Send."""
            return "sent"
