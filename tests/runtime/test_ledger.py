from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import ledger_service
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import weakincentives as wink
from chance import SEED, dice
from weakincentives.core import locks
from weakincentives.core.state import Seals
from weakincentives.errors import WinkError
from weakincentives.prompt import Effect
from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger

CHILD = Path(__file__).with_name("ledger_child.py")


class World:
    """What lies outside: it has been reached this often, and nothing puts it back by itself."""

    def __init__(self) -> None:
        self.reached = 0


def sender(world: World, **options: Any) -> wink.Tool[Any, Any]:
    """A tool that reaches outside, and then does as it is told."""

    def send(params: dict[str, Any], *, context: wink.ToolContext) -> wink.ToolResult[str]:
        world.reached += 1
        if params.get("raises"):
            raise RuntimeError("the line is dead")
        if params.get("fails"):
            return wink.ToolResult.error("nobody at home")
        return wink.ToolResult.ok("sent", "sent it")

    options.setdefault("reach", "irreversible")
    schema = {"type": "object"}
    return wink.Tool.from_schema("send", "Send something.", schema, send, **options)


def taking_back(world: World, error: Exception | None = None) -> Effect:
    def rollback() -> None:
        if error is not None:
            raise error
        world.reached -= 1

    return Effect(description="take it back", apply=lambda: None, rollback=rollback)


class Agent:
    def __init__(self, tool: wink.Tool[Any, Any], ledger: OutcomeLedger | None = None) -> None:
        section = wink.MarkdownSection(title="Outside", tools=[tool])
        prompt = wink.Prompt(wink.PromptTemplate(sections=[section]))
        if ledger is not None:
            prompt = prompt.bind(resources={OutcomeLedger: ledger})
        self.session = wink.Session()
        prompt.render(self.session)

    def call(self, call_id: str, **params: Any) -> wink.ToolResult[Any]:
        return wink.execute_tool(wink.ToolCall("send", params, id=call_id), session=self.session)

    def outcomes(self) -> list[str]:
        return [each.outcome for each in self.session[CallOutcome].all()]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "outcomes.jsonl"


def code(result: wink.ToolResult[Any]) -> str | None:
    return None if result.failure is None else result.failure.code


# How a call ends


def test_a_call_that_took_effect_is_not_run_again(world: World, path: Path):
    """Also by another process, which knows only the file; it is told what was answered."""
    first = Agent(sender(world), OutcomeLedger(path))
    assert first.call("a").success
    assert first.outcomes() == ["committed"]

    again = Agent(sender(world), OutcomeLedger(path)).call("a")

    assert code(again) == "ALREADY_COMMITTED"
    assert "sent it" in again.message
    assert world.reached == 1


def test_a_handler_that_says_it_failed_may_be_called_again(world: World, path: Path):
    agent = Agent(sender(world), OutcomeLedger(path))
    agent.call("a", fails=True)

    assert agent.outcomes() == ["rolled_back"]
    assert agent.call("a").success


def test_a_handler_that_broke_off_leaves_the_outcome_unknown(world: World, path: Path):
    """Nobody can say whether it took effect, so it is not run again, and the model is told."""
    agent = Agent(sender(world), OutcomeLedger(path))
    broken = agent.call("a", raises=True)
    again = agent.call("a")

    assert agent.outcomes() == ["unknown"]
    assert broken.metadata.not_undone == ("what it did outside the session, files and resources",)
    assert code(again) == "OUTCOME_UNKNOWN"
    assert again.failure.suggestions
    assert world.reached == 1


def test_a_timeout_leaves_the_outcome_unknown(path: Path):
    ended = threading.Event()

    def hang(params: dict[str, Any], *, context: wink.ToolContext) -> wink.ToolResult[str]:
        context.signal.wait()
        ended.set()
        return wink.ToolResult.ok("late")

    options = {"reach": "irreversible", "timeout": 0.05}
    tool = wink.Tool.from_schema("send", "Hang.", {"type": "object"}, hang, **options)
    agent = Agent(tool, OutcomeLedger(path))

    assert code(agent.call("a")) == "TIMEOUT"
    assert ended.wait(120)
    assert code(agent.call("a")) == "OUTCOME_UNKNOWN"


def test_what_was_taken_back_may_be_called_again(world: World, path: Path):
    tool = sender(world, reach="compensable", effects=[taking_back(world)])
    agent = Agent(tool, OutcomeLedger(path))
    failed = agent.call("a", raises=True)

    assert agent.outcomes() == ["compensated"]
    assert failed.metadata.not_undone == ()
    assert world.reached == 0
    assert agent.call("a").success
    assert world.reached == 1


def test_what_could_not_be_taken_back_is_unknown(world: World, path: Path):
    effects = [taking_back(world, error=OSError("the line is dead"))]
    agent = Agent(sender(world, reach="compensable", effects=effects), OutcomeLedger(path))
    failed = agent.call("a", raises=True)

    assert agent.outcomes() == ["unknown"]
    assert "the line is dead" in failed.metadata.not_undone[0]
    assert code(agent.call("a")) == "OUTCOME_UNKNOWN"
    assert world.reached == 1


@pytest.mark.parametrize("reach", ["read", "reversible", None])
def test_what_stays_inside_needs_no_ledger(world: World, path: Path, reach: str | None):
    agent = Agent(sender(world, reach=reach), OutcomeLedger(path))

    assert agent.call("a").success
    assert agent.call("a").success
    assert agent.outcomes() == []
    assert not path.exists()


def test_a_call_that_was_refused_has_not_begun(world: World, path: Path):
    class Never:
        def check(self, tool_name: str) -> str:
            return "never"

    ledger = OutcomeLedger(path)
    tool = sender(world)
    section = wink.MarkdownSection(title="Outside", tools=[tool], policies=[Never()])
    prompt = wink.Prompt(wink.PromptTemplate(sections=[section]))
    prompt.bind(resources={OutcomeLedger: ledger})
    session = wink.Session()
    prompt.render(session)

    wink.execute_tool(wink.ToolCall("send", {}, id="a"), session=session)

    assert ledger.find("a") is None


def test_without_a_ledger_the_session_knows(world: World):
    agent = Agent(sender(world))
    agent.call("a")
    agent.call("b", raises=True)

    assert agent.outcomes() == ["committed", "unknown"]
    assert code(agent.call("a")) == "ALREADY_COMMITTED"
    assert code(agent.call("b")) == "OUTCOME_UNKNOWN"
    assert world.reached == 2


def test_a_workspace_on_disk_remembers(world: World, tmp_path: Path):
    """The ledger is where the workspace is, so a new process finds it there."""
    codes = []
    for _ in range(2):
        with wink.ToolRegistry([sender(world)], workspace=tmp_path) as tools:
            codes.append(code(tools.execute("send", {}, call_id="a")))

    assert codes == [None, "ALREADY_COMMITTED"]
    assert world.reached == 1


# What is unknown is asked about


def leave_unknown(world: World, path: Path) -> None:
    Agent(sender(world), OutcomeLedger(path)).call("a", raises=True)


@pytest.mark.parametrize(
    ("answer", "expected", "reached"),
    [
        ("committed", "ALREADY_COMMITTED", 1),
        ("rolled_back", None, 2),
        (None, "OUTCOME_UNKNOWN", 1),
        ("unknown", "OUTCOME_UNKNOWN", 1),
    ],
)
def test_who_can_find_out_is_asked(
    world: World, path: Path, answer: Any, expected: str | None, reached: int
):
    leave_unknown(world, path)
    asked: list[str] = []

    def resolve(call: CallOutcome) -> Any:
        asked.append(call.call_id)
        return answer

    result = Agent(sender(world), OutcomeLedger(path, resolve=resolve)).call("a")

    assert asked == ["a"]
    assert code(result) == expected
    assert world.reached == reached


@pytest.mark.parametrize("answer", [OSError("no line"), "perhaps", 7])
def test_an_answer_that_makes_no_sense_is_none(world: World, path: Path, answer: Any):
    leave_unknown(world, path)

    def resolve(call: CallOutcome) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    result = Agent(sender(world), OutcomeLedger(path, resolve=resolve)).call("a")

    assert code(result) == "OUTCOME_UNKNOWN"
    assert world.reached == 1


@pytest.mark.parametrize(("outcome", "reached"), [("committed", 1), ("rolled_back", 2)])
def test_a_person_settles_it(world: World, path: Path, outcome: Any, reached: int):
    leave_unknown(world, path)
    ledger = OutcomeLedger(path)
    assert [call.call_id for call in ledger.unsettled()] == ["a"]

    ledger.settle("a", outcome)

    assert ledger.unsettled() == ()
    Agent(sender(world), OutcomeLedger(path)).call("a")
    assert world.reached == reached


def test_only_what_is_on_record_is_settled_and_only_as_something(world: World, path: Path):
    leave_unknown(world, path)
    ledger = OutcomeLedger(path)

    with pytest.raises(WinkError, match="call 'b' is not on record"):
        ledger.settle("b", "committed")
    with pytest.raises(ValueError, match="'unknown'"):
        ledger.settle("a", "unknown")


# The file


def lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def leave(path: Path, *lines: bytes) -> None:
    """Leave a ledger as a kill left it that came after these lines."""
    path.write_bytes(b"".join(lines))
    lock_of(path).write_bytes(Seals("size of outcomes").sealed(b"%020d" % path.stat().st_size))


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_line_that_a_kill_cut_short_is_left_out(world: World, path: Path, cut: int):
    """Neither it nor what is written after it misleads anyone."""
    Agent(sender(world), OutcomeLedger(path)).call("a")
    started, answered, _ = path.read_bytes().splitlines(keepends=True)
    leave(path, started)
    with path.open("ab") as file:
        file.write(answered[:-cut])

    ledger = OutcomeLedger(path)
    agent = Agent(sender(world), ledger)

    assert code(agent.call("a")) == "OUTCOME_UNKNOWN"
    assert agent.call("b").success
    assert code(Agent(sender(world), OutcomeLedger(path)).call("b")) == "ALREADY_COMMITTED"
    assert world.reached == 2


def ledger_of(directory: Path, *calls: str) -> Path:
    """A ledger in which these calls were committed."""
    path = directory / "outcomes.jsonl"
    for call_id in calls:
        assert Agent(sender(World()), OutcomeLedger(path)).call(call_id).success
    return path


@given(flip=st.booleans(), place=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_whatever_is_damaged_no_call_on_record_runs_twice(
    tmp_path_factory: pytest.TempPathFactory, flip: bool, place: int, bit: int
):
    """One flipped bit, or an end that is missing: a call that took effect is never run again."""
    path = ledger_of(tmp_path_factory.mktemp("ledger"), "a", "b", "c")
    content = bytearray(path.read_bytes())
    place %= len(content)
    if flip:
        content[place] ^= 1 << bit
        path.write_bytes(content)
    else:
        path.write_bytes(content[:place])
    world = World()

    for _ in range(2):
        agent = Agent(sender(world), OutcomeLedger(path))
        codes = {call_id: code(agent.call(call_id)) for call_id in ("a", "b", "c")}
        assert set(codes.values()) <= {"ALREADY_COMMITTED", "OUTCOME_UNKNOWN"}
    assert world.reached == 0
    # Whoever has looked at it goes on. What a damaged line was about may be unknown from then on.
    assert isinstance(OutcomeLedger.adopt(path), tuple)
    agent = Agent(sender(world), OutcomeLedger(path))
    assert agent.call("new").success
    known = {call_id for call_id, each in codes.items() if each == "ALREADY_COMMITTED"}
    told = {call_id: code(agent.call(call_id)) for call_id in known}
    assert set(told.values()) <= {"ALREADY_COMMITTED", "OUTCOME_UNKNOWN"}
    assert list(told.values()).count("OUTCOME_UNKNOWN") <= 1
    assert world.reached == 1


@given(place=st.integers(0, 1 << 20), bit=st.integers(0, 7))
@example(place=-1, bit=0)  # the end of the line
def test_whatever_is_damaged_a_call_that_was_killed_stays_unknown(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
):
    """Its one line is the last: a flipped bit does not make it one that was cut short."""
    path = ledger_of(tmp_path_factory.mktemp("ledger"), "a", "b")
    *committed, started, _, _ = path.read_bytes().splitlines(keepends=True)
    damaged = bytearray(started)
    damaged[place % len(started)] ^= 1 << bit
    leave(path, *committed, bytes(damaged))
    world = World()

    for _ in range(2):
        assert code(Agent(sender(world), OutcomeLedger(path)).call("b")) == "OUTCOME_UNKNOWN"
    assert world.reached == 0


@pytest.mark.parametrize("lost", [slice(0, 1), slice(0, 60), slice(60, 90), slice(-30, -1)])
def test_a_line_that_a_power_cut_left_half_of_is_left_out(world: World, path: Path, lost: slice):
    """Of its blocks any can be on the disk. That it is there was told nobody, nor noted."""
    ledger_of(path.parent, "a", "b")
    *committed, started, _, _ = path.read_bytes().splitlines(keepends=True)
    leave(path, *committed)
    half = bytearray(started)
    half[lost] = bytes(len(half[lost]))
    with path.open("ab") as file:
        file.write(half)

    assert OutcomeLedger(path).damage() == ""
    agent = Agent(sender(world), OutcomeLedger(path))
    assert agent.call("b").success
    assert code(agent.call("a")) == "ALREADY_COMMITTED"
    assert agent.call("c").success
    assert OutcomeLedger(path).damage() == ""


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="shows who waits for a lock")
def test_what_looks_damaged_while_another_writes_is_looked_at_again(path: Path):
    """Who writes over what a kill cut short has the lock: a look in between shows a mixture."""
    ledger_of(path.parent, "a", "b")
    content = path.read_bytes()
    second = content.index(b"\n") + 1
    fd = os.open(lock_of(path), os.O_RDWR)
    assert locks.take(fd, byte=0)
    path.write_bytes(content[:second] + b"x" * 50 + content[second + 50 :])
    ledger, told = OutcomeLedger(path), list[str]()
    reader = threading.Thread(target=lambda: told.append(ledger.damage()))
    reader.start()

    def waits() -> bool:
        lines = Path("/proc/locks").read_text().splitlines()
        return any("->" in line and f":{os.fstat(fd).st_ino} " in line for line in lines)

    while reader.is_alive() and not waits():
        time.sleep(0.001)
    path.write_bytes(content)
    locks.close(fd)
    reader.join()

    assert told == [""]
    assert [ledger.find(call_id).outcome for call_id in "ab"] == ["committed", "committed"]


def test_a_damaged_entry_of_a_known_call_costs_no_other_call_anything(world: World, path: Path):
    ledger_of(path.parent, "a", "b")
    path.write_bytes(path.read_bytes().replace(b"sent it", b"sent at", 2))
    agent = Agent(sender(world), OutcomeLedger(path))

    assert code(agent.call("a")) == "OUTCOME_UNKNOWN"
    assert code(agent.call("b")) == "ALREADY_COMMITTED"
    assert agent.call("c").success
    assert world.reached == 1


def test_lines_that_were_taken_out_or_put_in_elsewhere_count_for_nothing(world: World, path: Path):
    """The seal of each is good; its place is not."""
    ledger_of(path.parent, "a", "b")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[2:], *lines[:2]]))
    agent = Agent(sender(world), OutcomeLedger(path))

    assert {code(agent.call(call_id)) for call_id in ("a", "b")} == {"OUTCOME_UNKNOWN"}
    assert world.reached == 0


def test_a_ledger_without_seals_is_refused_until_a_person_adopts_it(world: World, path: Path):
    """Somebody may have planted it."""
    path.parent.mkdir()
    entries = [("a", "started"), ("a", "committed"), ("b", "started")]
    path.write_text(
        "".join(
            json.dumps({"call_id": c, "tool_name": "send", "outcome": o, "timestamp": 1.0}) + "\n"
            for c, o in entries
        )
    )
    refused = Agent(sender(world), OutcomeLedger(path)).call("new")
    assert code(refused) == "OUTCOME_UNKNOWN"
    assert str(path) in refused.message

    assert OutcomeLedger.adopt(path) == ()

    agent = Agent(sender(world), OutcomeLedger(path))
    assert code(agent.call("a")) == "ALREADY_COMMITTED"
    assert code(agent.call("b")) == "OUTCOME_UNKNOWN"
    assert agent.call("new").success
    assert world.reached == 1


def test_only_the_owner_can_read_the_file(path: Path):
    ledger_of(path.parent, "a")

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_ledgers_of_one_file_keep_their_locks(path: Path):
    """Closing one, or any other descriptor of the lock file, takes none from the other."""
    one, other = OutcomeLedger(path), OutcomeLedger(path)
    one.begin("a", "send", 1.0)
    other.begin("b", "send", 1.0)
    lock_of(path).read_bytes()
    del other
    gc.collect()
    script = f"""
from weakincentives.runtime.ledger import OutcomeLedger
ledger = OutcomeLedger({str(path)!r})
print(ledger.find("a").outcome, ledger.find("b").outcome)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert told.stdout.split() == ["started", "unknown"], told.stderr


def test_what_was_answered_before_a_kill_is_known_to_have_taken_effect(world: World, path: Path):
    """The answer is on record before the rest is committed, and no other record is needed."""
    Agent(sender(world), OutcomeLedger(path)).call("a")
    started, answered, _ = path.read_bytes().splitlines(keepends=True)
    leave(path, started, answered)

    again = Agent(sender(world), OutcomeLedger(path)).call("a")

    assert code(again) == "ALREADY_COMMITTED"
    assert "sent it" in again.message
    assert world.reached == 1


def test_two_ledgers_of_one_file_know_the_same(world: World, path: Path):
    one, other = OutcomeLedger(path), OutcomeLedger(path)
    Agent(sender(world), one).call("a")
    Agent(sender(world), other).call("b")

    assert code(Agent(sender(world), other).call("a")) == "ALREADY_COMMITTED"
    assert code(Agent(sender(world), one).call("b")) == "ALREADY_COMMITTED"


def _block(path: Path, begun: Any) -> None:
    def send(params: dict[str, Any], *, context: wink.ToolContext) -> wink.ToolResult[str]:
        begun.send("begun")
        threading.Event().wait()
        return wink.ToolResult.ok("never")

    tool = wink.Tool.from_schema("send", "Block.", {"type": "object"}, send, reach="irreversible")
    Agent(tool, OutcomeLedger(path)).call("a")


def test_what_runs_in_another_process_is_under_way_until_that_is_killed(world: World, path: Path):
    """A call under way is not asked about: that nothing is known of it yet means nothing."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_block, args=(path, there), daemon=True)
    process.start()
    assert here.recv() == "begun"
    asked: list[str] = []

    def resolve(call: CallOutcome) -> Any:
        asked.append(call.call_id)
        return "rolled_back"

    agent = Agent(sender(world), OutcomeLedger(path, resolve=resolve))
    meanwhile = agent.call("a")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    afterwards = agent.call("a")

    assert code(meanwhile) == "ALREADY_STARTED"
    assert afterwards.success
    assert asked == ["a"]


def test_one_id_in_many_threads_runs_once(world: World, path: Path):
    ledger = OutcomeLedger(path)
    start = threading.Barrier(8)
    codes: list[str | None] = []

    def run() -> None:
        agent = Agent(sender(world), ledger)
        start.wait()
        codes.append(code(agent.call("a")))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert world.reached == 1
    assert codes.count(None) == 1
    assert set(codes) <= {None, "ALREADY_STARTED", "ALREADY_COMMITTED"}


# Killed at random, against a real service


@pytest.fixture
def service() -> Iterator[str]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=ledger_service.serve, args=(there,), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{here.recv()}"
    process.kill()
    process.join()


class Client:
    """The program that is killed: it orders, and is started again until it gets to the end."""

    def __init__(self, path: Path, url: str, count: int, resolves: bool) -> None:
        mode = "resolves" if resolves else "asks nobody"
        self.command = [sys.executable, str(CHILD), str(path), url, str(count), mode]

    def run(self, kill_after: Callable[[], float] | None = None) -> list[list[str]]:
        """Start it, kill it after so many seconds of work or let it end; returns what it said."""
        process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "ready\n"
            if kill_after is not None:
                # Not waited for: that the moment is any moment is the point.
                time.sleep(kill_after())
                process.kill()
            said = [line.split() for line in process.stdout if line.endswith("\n")]
        code = process.wait()
        assert code == 0 or (kill_after is not None and code == -signal.SIGKILL)
        return said


def kill_and_restart(path: Path, url: str, resolves: bool, kills: int, count: int) -> None:
    print(f"WINK_SEED={SEED}")  # noqa: T201  # shown when it fails: it repeats the moments
    moments = dice(resolves, kills)
    client = Client(path, url, count, resolves)
    for _ in range(kills):
        client.run(kill_after=lambda: moments.uniform(0, 0.08))
    last = {call_id: rest for call_id, *rest in client.run()}

    with urlopen(f"{url}/all") as response:
        seen = json.load(response)
    ledger = OutcomeLedger(path)
    assert len(last) == count
    for call_id, said in last.items():
        found = ledger.find(call_id)
        assert found is not None
        times = seen["counts"].get(call_id, 0)
        assert seen["most"].get(call_id, 0) <= 1, f"{call_id} took effect twice"
        if found.outcome == "committed":
            assert times == 1
        elif found.outcome == "unknown":
            assert not resolves
            assert said == ["unknown", "OUTCOME_UNKNOWN"]
        else:
            assert times == 0
            assert int(call_id.rpartition("-")[2]) % 3 == 2, "only those that fail are taken back"


@pytest.mark.parametrize("resolves", [False, True])
def test_a_killed_client_never_orders_twice(path: Path, service: str, resolves: bool):
    """Each order took effect exactly once, was cancelled, or is reported as unknown."""
    kill_and_restart(path, service, resolves, kills=5, count=40)


@pytest.mark.heavy
@pytest.mark.parametrize("resolves", [False, True])
def test_a_client_killed_many_times_never_orders_twice(path: Path, service: str, resolves: bool):
    kill_and_restart(path, service, resolves, kills=60, count=600)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_process_that_has_had_many_workspaces_keeps_few_ledgers_open(tmp_path: Path):
    """And a workspace that it comes back to still knows its calls."""

    @wink.tool(reach="irreversible")
    def send() -> str:
        """Send something."""
        return "sent"

    def use(number: int) -> wink.ToolResult[object]:
        place = tmp_path / str(number)
        place.mkdir(exist_ok=True)
        with wink.ToolRegistry([send], workspace=place) as tools:
            return tools.execute("send", call_id="once")

    before = len(os.listdir("/proc/self/fd"))
    for number in range(60):
        assert use(number).success
    gc.collect()

    assert len(os.listdir("/proc/self/fd")) < before + 30
    failure = use(0).failure
    assert failure is not None
    assert failure.code == "ALREADY_COMMITTED"
