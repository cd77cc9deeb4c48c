"""Several processes work in one directory, call by call."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

import weakincentives as wink
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import (
    DeadlineExceededError,
    ResourceError,
    SnapshotExpired,
    ViewClosed,
    WorkspaceLocked,
)
from weakincentives.filesystem import Filesystem, HostFilesystem, present_in
from weakincentives.runtime import ToolRegistry, tool_transaction
from weakincentives.testing import make_context

SECONDS = 120


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    (place / "number").write_text("0")
    (place / "list").write_text("")
    return place


@wink.tool(reach="reversible")
def put(path: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return path


@wink.tool(reach="read")
def show(path: str, *, context: wink.ToolContext) -> str:
    """Read a file."""
    return context.filesystem.read(path)


@wink.tool(reach="reversible")
async def put_slowly(path: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file on an event loop."""
    await asyncio.sleep(0)
    context.filesystem.write(path, text)
    return path


@pytest.fixture
def pair(root: Path) -> Iterator[tuple[ToolRegistry, ToolRegistry]]:
    """Two registries that share a directory as two processes do: each with its own locks."""
    with ExitStack() as opened:
        one, two = (
            opened.enter_context(
                ToolRegistry(
                    [put, show, put_slowly],
                    workspace=opened.enter_context(HostFilesystem(root, shared=True)),
                )
            )
            for _ in range(2)
        )
        yield one, two


def child(root: Path, name: str, calls: int, *how: str) -> subprocess.Popen[str]:
    program = Path(__file__).with_name("shared_child.py")
    return subprocess.Popen(
        [sys.executable, str(program), str(root), name, str(calls), *how],
        stdout=subprocess.PIPE,
        text=True,
    )


def lines_of(stream: IO[str] | None) -> list[str]:
    """Return the complete lines: the last one may be cut off by a kill."""
    assert stream is not None
    with stream:
        return [line[:-1] for line in stream if line.endswith("\n")]


def check_serial(root: Path, answered: set[str]) -> None:
    """Check that every update is there, each call whole, in the order of the history."""
    with HostFilesystem(root) as files:
        assert files.recovered == ()
        history = files.history()
    lines = [line.split() for line in (root / "list").read_text().splitlines()]
    assert [number for number, _ in lines] == [str(n + 1) for n in range(len(lines))]
    assert (root / "number").read_text() == str(len(lines))
    assert [each.call_id for each in history] == [call for _, call in lines]
    assert {each.paths for each in history} <= {("list", "number")}
    assert answered <= {call for _, call in lines}


@pytest.mark.heavy
def test_no_update_of_several_processes_is_lost(root: Path):
    """Three processes make one call after the other, and one the calls of a turn together."""
    kinds = [("a", ()), ("b", ()), ("c", ()), ("d", ("async",))]
    running = [child(root, name, 40, *how) for name, how in kinds]
    answered: set[str] = set()
    for process in running:
        with process:
            answered.update(lines_of(process.stdout))
        assert process.returncode == 0

    assert len(answered) == 160
    check_serial(root, answered)


def kill_at_random(root: Path, seed: int, kills: int) -> set[str]:
    """Let three processes work, kill one of them again and again, and start another in its place.

    Returns the calls that were answered.
    """
    chance = random.Random(seed)
    started = iter(range(1000))
    answered: set[str] = set()
    readers = ThreadPoolExecutor(kills + 3)
    outputs = []

    def start() -> subprocess.Popen[str]:
        process = child(root, f"p{next(started)}", 0)
        outputs.append(readers.submit(lines_of, process.stdout))
        return process

    running = [start() for _ in range(3)]
    pause = threading.Event()
    for _ in range(kills):
        pause.wait(chance.uniform(0.2, 0.6))
        victim = chance.randrange(3)
        running[victim].send_signal(signal.SIGKILL)
        running[victim].wait()
        running[victim] = start()
    for process in running:
        process.kill()
        process.wait()
    for output in outputs:
        answered.update(output.result())
    readers.shutdown()
    return answered


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(2))
def test_what_killed_processes_leave_is_rolled_back_by_the_next_one(root: Path, seed: int):
    """At whatever moment: the outcome is that of whole calls, one after the other."""
    check_serial(root, kill_at_random(root, seed, 6))


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(2, 12))
def test_whatever_is_killed_when_every_call_is_whole(root: Path, seed: int):
    check_serial(root, kill_at_random(root, seed, 30))


# Between calls


def test_an_agent_sees_what_others_committed_since_its_last_call(
    pair: tuple[ToolRegistry, ToolRegistry],
):
    one, two = pair
    for number in range(3):
        assert one.execute("put", {"path": "a", "text": f"one {number}"}).success
        assert two.execute("show", {"path": "a"}).value == f"one {number}"
        assert two.execute("put", {"path": "a", "text": f"two {number}"}).success
        assert one.execute("show", {"path": "a"}).value == f"two {number}"

    calls = [each.call_id for each in one.workspace.history()]
    assert len(calls) == 6
    assert [each.call_id for each in two.workspace.history()] == calls


def test_each_can_undo_what_the_other_did(pair: tuple[ToolRegistry, ToolRegistry], root: Path):
    one, two = pair
    one.execute("put", {"path": "a", "text": "first"}, call_id="first")
    two.execute("put", {"path": "b", "text": "second"}, call_id="second")

    assert two.workspace.undo("first") == ()
    assert one.workspace.undo("second") == ()

    assert sorted(os.listdir(root)) == ["list", "number"]
    assert "+second" in one.workspace.diff("second")


def test_direct_changes_and_commands_take_their_turn_too(
    pair: tuple[ToolRegistry, ToolRegistry], root: Path
):
    one, two = (each.workspace for each in pair)
    one.write("a", "one")
    two.append("a", " two")
    assert one.run("printf ' three' >> a", check=True).ok
    assert two.read("a") == "one two three"

    one.revert_to(one.history()[0].call_id)

    assert two.read("a") == "one"


def test_programs_of_each_are_found_by_a_scan_of_its_own(
    pair: tuple[ToolRegistry, ToolRegistry], root: Path
):
    """The manifest of the one is not that of the directory once the other has worked."""
    one, two = (each.workspace for each in pair)
    for number, files in enumerate((one, two, one, two)):
        with files.gate:
            view = files.fork_in_place()
            view.expect_external()
            (root / "list").write_text(f"{number}")
            (root / f"new-{number}").write_text("x" * 300_000)
            if number % 2:
                files.discard(view)
            else:
                files.merge(view)

    assert (root / "list").read_text() == "2"
    assert sorted(os.listdir(root)) == ["list", "new-0", "new-2", "number"]
    assert [each.paths for each in two.history()] == [("list", "new-0"), ("list", "new-2")]


def test_a_full_history_is_trimmed_by_all_and_loses_nothing_that_is_in_use(root: Path):
    with (
        HostFilesystem(root, shared=True, history_limit=20_000) as one,
        HostFilesystem(root, shared=True, history_limit=20_000) as two,
    ):
        for number in range(60):
            (one, two)[number % 2].write(f"file-{number % 3}", f"{number:1000}")
        history = one.history()
        assert 5 <= len(history) <= 25
        assert [each.serial for each in history] == list(range(61 - len(history), 61))
        for each, files in zip(history[:-4:-1], (two, one, two), strict=True):
            assert files.undo(each.call_id) == ()
        for number in (54, 55, 56):
            assert one.read(f"file-{number % 3}") == f"{number:1000}"


# Snapshots


def test_a_snapshot_is_not_restored_over_what_others_did(
    pair: tuple[ToolRegistry, ToolRegistry], root: Path
):
    one, two = (each.workspace for each in pair)
    token = one.snapshot()
    one.write("a", "one")
    two.write("b", "two")

    with pytest.raises(SnapshotExpired, match="other processes have changed"):
        one.restore(token)
    assert sorted(os.listdir(root)) == ["a", "b", "list", "number"]

    token = one.snapshot()
    one.write("a", "again")
    assert two.read("b") == "two"
    one.restore(token)
    assert one.read("a") == "one"


def test_a_block_that_fails_says_that_others_worked_meanwhile(
    pair: tuple[ToolRegistry, ToolRegistry], root: Path
):
    one, two = pair
    with (
        pytest.raises(ResourceError, match="other processes have changed"),
        tool_transaction(one.session, {Filesystem: one.workspace}),
    ):
        two.workspace.write("b", "two")
        raise ValueError("the block fails")

    assert (root / "b").read_text() == "two"


def test_a_view_is_forked_and_merged_while_the_gate_is_held(
    pair: tuple[ToolRegistry, ToolRegistry],
):
    one, two = (each.workspace for each in pair)
    for fork in (one.fork, one.fork_in_place):
        with pytest.raises(ViewClosed, match=r"hold `fs\.gate`"):
            fork()
    with one.gate:
        stale = one.fork()
        in_place = one.fork_in_place()
        in_place.write("half", "x")

    two.write("b", "two")

    assert not two.exists("half"), "what was left without the gate is rolled back"
    with one.gate:
        with pytest.raises(ViewClosed, match="other processes have worked"):
            stale.read("b")
        with pytest.raises(ViewClosed, match="other processes have worked"):
            one.merge(in_place)
        one.merge(one.fork())
    assert one.read("b") == "two"


# Waiting


def test_a_process_that_has_it_to_itself_keeps_others_out(root: Path):
    with HostFilesystem(root, shared=True) as shared:
        with HostFilesystem(root) as alone:
            with pytest.raises(WorkspaceLocked, match=f"is open in this process.*{os.getpid()}"):
                shared.write("a", "x")
            with pytest.raises(WorkspaceLocked):
                HostFilesystem(root, shared=True)
            alone.write("a", "alone")
        shared.append("a", ", then shared")

    assert (root / "a").read_text() == "alone, then shared"


@pytest.mark.parametrize("tool", ["put", "put_slowly"])
def test_a_call_that_is_kept_out_fails_and_says_why(root: Path, tool: str):
    with (
        ToolRegistry([put, put_slowly], workspace=HostFilesystem(root, shared=True)) as tools,
        HostFilesystem(root),
    ):
        call = {"path": "a", "text": "x"}
        results = [tools.execute(tool, call), asyncio.run(tools.aexecute(tool, call))]
        results += asyncio.run(gathered(tools, tool, 3))
        tools.workspace.close()

    for result in results:
        assert not result.success
        assert result.failure is not None
        assert result.failure.code == "WORKSPACE_LOCKED"
        assert "Close it there" in result.message
    assert not (root / "a").exists()


async def gathered(tools: ToolRegistry, tool: str, count: int) -> list[wink.ToolResult[object]]:
    calls = (tools.aexecute(tool, {"path": "a", "text": "x"}) for _ in range(count))
    return await asyncio.gather(*calls)


def test_a_call_waits_for_a_call_of_another_process(
    pair: tuple[ToolRegistry, ToolRegistry], root: Path
):
    one, two = pair
    with ThreadPoolExecutor(1) as pool:
        with one.workspace.gate:
            later = pool.submit(two.execute, "put", {"path": "a", "text": "two"})
            wait_until_awaited(one.workspace)
            assert not later.done()
            assert not (root / "a").exists()
        assert later.result(SECONDS).success

    assert (root / "a").read_text() == "two"


def test_an_event_loop_goes_on_while_a_call_waits(
    pair: tuple[ToolRegistry, ToolRegistry], root: Path
):
    one, two = pair

    async def work() -> int:
        later = asyncio.ensure_future(two.aexecute("put_slowly", {"path": "a", "text": "two"}))
        steps = 0
        while not one.workspace.gate.is_awaited:
            await asyncio.sleep(0.001)
            steps += 1
        assert not later.done()
        one.workspace.gate.release()
        async with asyncio.timeout(SECONDS):
            assert (await later).success
        return steps

    one.workspace.gate.acquire()
    assert asyncio.run(work()) > 0
    assert (root / "a").read_text() == "two"


def test_a_call_does_not_wait_past_its_deadline(pair: tuple[ToolRegistry, ToolRegistry]):
    one, two = pair
    call = ("put", {"path": "a", "text": "x"})
    with one.workspace.gate:
        with pytest.raises(DeadlineExceededError):
            two.execute(*call, make_context(fs=two.workspace, deadline=Deadline.after(0.05)))
        soon = make_context(fs=two.workspace, deadline=Deadline.after(0.05))
        with pytest.raises(DeadlineExceededError):
            asyncio.run(two.aexecute(*call, soon))
    assert two.execute(*call).success


def test_a_call_that_is_cancelled_while_it_waits_leaves_the_line(
    pair: tuple[ToolRegistry, ToolRegistry], root: Path
):
    one, two = pair

    async def work() -> None:
        later = asyncio.ensure_future(two.aexecute("put", {"path": "a", "text": "x"}))
        while not one.workspace.gate.is_awaited:
            await asyncio.sleep(0.001)
        later.cancel()
        with pytest.raises(asyncio.CancelledError):
            await later

    with one.workspace.gate:
        asyncio.run(work())
        assert not one.workspace.gate.is_awaited
    assert one.execute("put", {"path": "a", "text": "one"}).success
    assert two.execute("show", {"path": "a"}).value == "one"


@wink.tool(reach="reversible")
def interrupt(*, context: wink.ToolContext) -> str:
    """Press Ctrl-C in the middle of a call."""
    context.filesystem.write("half", "x")
    signal.raise_signal(signal.SIGINT)
    return "never"


def test_an_interrupt_in_a_call_or_while_it_waits_lets_others_in(
    pair: tuple[ToolRegistry, ToolRegistry], root: Path
):
    one, two = pair
    with pytest.raises(KeyboardInterrupt):
        one.execute(interrupt)
    assert two.execute("put", {"path": "a", "text": "two"}).success
    assert not (root / "half").exists()

    def press_soon() -> None:
        wait_until_awaited(two.workspace)
        os.kill(os.getpid(), signal.SIGINT)

    with two.workspace.gate, ThreadPoolExecutor(1) as pool:
        pressed = pool.submit(press_soon)
        with pytest.raises(KeyboardInterrupt):
            one.execute("put", {"path": "a", "text": "one"})
        pressed.result(SECONDS)
        assert not two.workspace.gate.is_awaited
    assert one.execute("show", {"path": "a"}).value == "two"


def test_one_that_calls_without_a_pause_lets_others_through(
    pair: tuple[ToolRegistry, ToolRegistry],
):
    one, two = pair
    is_over = threading.Event()

    def without_pause() -> None:
        while not is_over.is_set():
            assert one.execute("put", {"path": "a", "text": "one"}).success

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(without_pause)
        try:
            for _ in range(20):
                assert two.execute("put", {"path": "b", "text": "two"}).success
        finally:
            is_over.set()
        busy.result(SECONDS)


def test_a_turn_that_others_could_join_ends_when_another_process_waits(
    pair: tuple[ToolRegistry, ToolRegistry],
):
    one, two = pair
    done = threading.Event()

    async def keep_joining() -> None:
        async def again(name: str) -> None:
            while not done.is_set():
                result = await one.aexecute("put_slowly", {"path": name, "text": "one"})
                assert result.success

        await asyncio.gather(*(again(f"file-{number}") for number in range(4)))

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(asyncio.run, keep_joining())
        try:
            for _ in range(5):
                assert two.execute("put", {"path": "b", "text": "two"}).success
        finally:
            done.set()
        busy.result(SECONDS)


def wait_until_awaited(files: HostFilesystem) -> None:
    until = SYSTEM_CLOCK.monotonic() + SECONDS
    while not files.gate.is_awaited:
        assert SYSTEM_CLOCK.monotonic() < until
        threading.Event().wait(0.001)


# Who else is there


def test_who_has_the_directory_open_is_known(root: Path):
    assert present_in(root) == ()
    with HostFilesystem(root, shared=True) as files:
        assert files.others == ()
        assert present_in(root) == (os.getpid(),)
        with child(root, "a", 0) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert files.others == (process.pid,)
            process.kill()
        assert files.others == ()
    assert present_in(root) == ()


def test_the_directory_of_a_live_process_stays_when_another_one_opens_the_workspace(root: Path):
    with HostFilesystem(root, shared=True) as one, one.gate:
        view = one.fork()
        view.write("big", "x" * 100_000)
        with (
            ThreadPoolExecutor(1) as pool,
            HostFilesystem(root.parent, shared=True),  # unrelated
        ):
            opening = pool.submit(HostFilesystem, root, shared=True)
            wait_until_awaited(one)
            one.merge(view)
            one.gate.release()
            with opening.result(SECONDS) as two:
                assert two.read("big") == "x" * 100_000
                assert list((one.store / "open").iterdir())
            one.gate.acquire()


def test_a_forked_child_does_not_touch_what_it_inherits(root: Path):
    with HostFilesystem(root, shared=True) as files:
        pid = os.fork()
        if pid == 0:
            try:
                files.write("a", "child")
                code = 1
            except ViewClosed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        files.write("a", "parent")
    assert (root / "a").read_text() == "parent"


def test_who_holds_the_gate_can_undo_and_change_files(root: Path):
    with HostFilesystem(root, shared=True) as fs, fs.gate:
        fs.write("a", "one")
        first = fs.history()[-1].call_id
        fs.write("a", "two")
        fs.revert_to(first)
        assert fs.read("a") == "one"
        fs.undo(fs.history()[-1].call_id)
        assert fs.read("a") == "two"


# Reading beside another call


@wink.tool(reach="reversible")
def think(go: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file only after someone says so."""
    events[go].wait(SECONDS)
    context.filesystem.write("number", text)
    return text


@wink.tool(reach="reversible")
def fail_late(go: str, *, context: wink.ToolContext) -> str:
    """Write a file at once, and fail when someone says so."""
    context.filesystem.write("number", "never")
    events["written"].set()
    events[go].wait(SECONDS)
    raise ValueError("it was wrong")


@wink.tool(reach="read")
async def read_twice(go: str, *, context: wink.ToolContext) -> str:
    """Read a file, and again after someone says so."""
    first = context.filesystem.read("number")
    events["read"].set()
    while not events[go].is_set():
        await asyncio.sleep(0.001)
    return first + context.filesystem.read("number")


events: dict[str, threading.Event] = {}


@pytest.fixture(params=["another process", "another session"])
def others(root: Path, request: pytest.FixtureRequest) -> Iterator[tuple[ToolRegistry, ...]]:
    """Two registries on a directory; each with its own locks, or with a session of its own."""
    events.clear()
    events.update({name: threading.Event() for name in ("go", "written", "read")})
    tools = [put, show, think, fail_late, read_twice]
    with ExitStack() as opened:
        files = [opened.enter_context(HostFilesystem(root, shared=True))]
        if request.param == "another process":
            files.append(opened.enter_context(HostFilesystem(root, shared=True)))
        yield tuple(
            opened.enter_context(ToolRegistry(tools, workspace=each))
            for each in (files[0], files[-1])
        )
        for each in events.values():
            each.set()


async def soon(event: threading.Event) -> None:
    async with asyncio.timeout(SECONDS):
        while not event.is_set():
            await asyncio.sleep(0.001)


def test_a_read_does_not_wait_for_a_call_that_has_changed_nothing_yet(
    others: tuple[ToolRegistry, ToolRegistry], root: Path
):
    """Such as one whose command runs over the directory, or which waits for a person."""
    one, two = others

    async def work() -> None:
        thinking = asyncio.ensure_future(one.aexecute("think", {"go": "go", "text": "1"}))
        await asyncio.sleep(0.05)
        reads = [two.aexecute("show", {"path": "number"}) for _ in range(5)]
        async with asyncio.timeout(SECONDS):
            assert [each.render() for each in await asyncio.gather(*reads)] == ["0"] * 5
        assert not thinking.done()
        events["go"].set()
        assert (await thinking).success
        assert (await two.aexecute("show", {"path": "number"})).render() == "1"
        assert (await two.aexecute("put", {"path": "number", "text": "2"})).success

    asyncio.run(work())
    assert (root / "number").read_text() == "2"


def test_a_read_waits_for_a_call_that_has_changed_something(
    others: tuple[ToolRegistry, ToolRegistry],
):
    one, two = others

    async def work() -> None:
        failing = asyncio.ensure_future(one.aexecute("fail_late", {"go": "go"}))
        await soon(events["written"])
        reading = asyncio.ensure_future(two.aexecute("show", {"path": "number"}))
        await asyncio.sleep(0.2)
        assert not reading.done()
        events["go"].set()
        assert not (await failing).success
        assert (await reading).render() == "0"

    asyncio.run(work())


def test_what_a_call_reads_does_not_change_under_it(
    others: tuple[ToolRegistry, ToolRegistry],
):
    one, two = others

    async def work() -> None:
        thinking = asyncio.ensure_future(one.aexecute("think", {"go": "written", "text": "1"}))
        await asyncio.sleep(0.05)
        reading = asyncio.ensure_future(two.aexecute("read_twice", {"go": "go"}))
        await soon(events["read"])
        events["written"].set()
        await asyncio.sleep(0.2)
        assert not thinking.done()  # it waits for the reader
        events["go"].set()
        assert (await reading).render() == "00"
        assert (await thinking).success

    asyncio.run(work())


def test_a_call_that_reads_on_and_on_does_not_keep_others_from_changing_files(
    others: tuple[ToolRegistry, ToolRegistry], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("weakincentives.filesystem.workspace._READING", 0.3)
    one, two = others

    async def work() -> None:
        thinking = asyncio.ensure_future(one.aexecute("think", {"go": "written", "text": "1"}))
        await asyncio.sleep(0.05)
        reading = asyncio.ensure_future(two.aexecute("read_twice", {"go": "go"}))
        await soon(events["read"])
        events["written"].set()
        async with asyncio.timeout(SECONDS):
            assert (await thinking).success
        events["go"].set()
        result = await reading
        assert result.failure is not None
        assert result.failure.code == "CONFLICT"
        assert "this one has read for too long: try again" in result.render()

    asyncio.run(work())
