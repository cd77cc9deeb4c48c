"""Threads and loops that the runtime keeps: what one call leaves there is never another's."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from weakincentives.core.loops import in_thread, run_blocking


def test_a_thread_serves_the_next_function_once_it_is_free():
    async def run() -> list[threading.Thread]:
        return [await in_thread(threading.current_thread) for _ in range(3)]

    assert len(set(asyncio.run(run()))) == 1


def test_a_thread_whose_function_was_abandoned_serves_no_other():
    async def run() -> None:
        go_on = threading.Event()
        begun: asyncio.Queue[threading.Thread] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def stuck() -> None:
            loop.call_soon_threadsafe(begun.put_nowait, threading.current_thread())
            go_on.wait()

        abandoned = in_thread(stuck)
        thread = await begun.get()
        abandoned.cancel()
        beside = await in_thread(threading.current_thread)
        go_on.set()
        await asyncio.to_thread(thread.join, 300)

        assert beside is not thread
        assert not thread.is_alive()

    asyncio.run(run())


def test_a_thread_at_rest_keeps_nothing_of_what_it_did():
    class Large:
        pass

    async def run() -> weakref.ref[Large]:
        large = Large()
        await in_thread(lambda: large)
        return weakref.ref(large)

    kept = asyncio.run(run())
    until = time.monotonic() + 300
    while kept() is not None and time.monotonic() < until:  # it lets go a moment after its answer
        gc.collect()
    assert kept() is None


def test_an_interrupt_that_another_thread_was_handed_is_not_lost():
    """The system gives a signal to any thread, and wakes that one; the handler runs in ours."""

    async def wait() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await asyncio.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        run_blocking(wait)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_runs_async_tools_and_ends_in_silence():
    """Its parent's loops have no thread there: to wait for one would be for ever."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["parent", "child", "parent"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_a_function_forks_ends_with_the_function():
    """Its one thread has nothing more to do: it would hold on to locks and pipes for ever."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS_IN_THREAD],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


_FORKS_IN_THREAD = """
import asyncio, os
from weakincentives.core.loops import in_thread

async def run():
    return await in_thread(os.fork)

os.waitpid(asyncio.run(run()), 0)
"""

_FORKS = """
import os, sys
import weakincentives as wink

@wink.tool
async def who() -> str:
    "Say who."
    return "me"

def say(name):
    assert tools.execute("who").success
    print(name, flush=True)

tools = wink.ToolRegistry([who])
say("parent")
child = os.fork()
if child == 0:
    say("child")
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
say("parent")
"""
