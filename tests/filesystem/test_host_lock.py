"""One process at a time has a workspace open; a dead one does not keep it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weakincentives.errors import WorkspaceLocked
from weakincentives.filesystem import HostFilesystem

OWNER = """
import os, sys
from weakincentives.filesystem import HostFilesystem

fs = HostFilesystem(sys.argv[1])
fs.write("owned.txt", "by another process")
{then}
print("open", flush=True)
sys.stdin.read()
fs.close()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    return place


@contextmanager
def owner(root: Path, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that has the workspace open until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(then=then), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_process_is_told_who_has_the_workspace(root: Path):
    with owner(root) as process:
        with pytest.raises(WorkspaceLocked, match=str(process.pid)) as caught:
            HostFilesystem(root)

        assert str(root) in str(caught.value)
        assert (root / "owned.txt").read_text() == "by another process"


def test_a_refused_opening_leaves_the_owner_at_work(root: Path):
    """A record lock is lost when its process closes any descriptor of the file; ours must not."""
    with HostFilesystem(root) as fs:
        with pytest.raises(WorkspaceLocked, match=str(os.getpid())):
            HostFilesystem(root)
        tried = subprocess.run(
            [sys.executable, "-c", OWNER.format(then=""), str(root)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert "WorkspaceLocked" in tried.stderr
        assert f"{os.getpid()}" in tried.stderr
        fs.write("a.txt", "still ours")
        assert not (root / "owned.txt").exists()


def test_waiting_ends_when_the_owner_closes(root: Path):
    with owner(root) as process:
        threading.Timer(0.05, process.stdin.close).start()
        with HostFilesystem(root, wait=60) as fs:
            assert fs.read("owned.txt") == "by another process"


def test_waiting_in_one_process_ends_when_the_other_filesystem_is_closed(root: Path):
    first = HostFilesystem(root)
    threading.Timer(0.05, first.close).start()
    with HostFilesystem(root, wait=60) as second:
        second.write("a.txt", "second")

    assert (root / "a.txt").read_text() == "second"


def test_waiting_in_vain_says_who_has_it(root: Path):
    with owner(root) as process, pytest.raises(WorkspaceLocked, match=str(process.pid)):
        HostFilesystem(root, wait=0.05)


def test_a_dead_owner_is_followed_at_once(root: Path):
    with owner(root) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with HostFilesystem(root) as fs:
            assert fs.read("owned.txt") == "by another process"


def test_a_dead_owner_with_a_call_under_way_is_followed_at_once(root: Path):
    half = 'view = fs.fork_in_place(); view.write("half.txt", "x"); view.delete("owned.txt")'
    with owner(root, half) as process:
        assert (root / "half.txt").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with HostFilesystem(root) as fs:
            assert fs.read("owned.txt") == "by another process"
            assert not fs.exists("half.txt")


def test_what_the_owner_forked_or_started_does_not_keep_the_workspace(root: Path):
    """The owner dies; a fork of it and a command that it started live on."""
    children = """
import subprocess
started = subprocess.Popen(["sleep", "600"], close_fds=False)
forked = os.fork()
if not forked:
    import time
    time.sleep(600)
print(started.pid, forked, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OWNER.format(then=children), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
        process.wait()
        try:
            with HostFilesystem(root) as fs:
                assert fs.read("owned.txt") == "by another process"
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("reaped", [True, False])
def test_a_child_that_did_not_get_to_run_yet_is_waited_for(root: Path, reaped: bool):
    """It has what its parent had open until it runs; by then the parent has been killed."""
    late = f"""
import os, time
os.register_at_fork(after_in_child=lambda: time.sleep(1))
{OWNER.format(then="if not os.fork(): time.sleep(600)")}"""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", late, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
        try:
            with HostFilesystem(root) as fs:
                assert fs.read("owned.txt") == "by another process"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_forked_child_cannot_change_what_its_parent_has_open(root: Path):
    """It holds no lock: neither the inherited filesystem nor a new one lets it write."""
    attempts = """
forked = os.fork()
if not forked:
    for attempt in (lambda: fs.write("child.txt", "x"), lambda: HostFilesystem(sys.argv[1])):
        try:
            attempt()
        except Exception as error:
            print(type(error).__name__, flush=True)
        else:
            print("allowed", flush=True)
    os._exit(0)
os.waitpid(forked, 0)
fs.write("parent.txt", "x")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OWNER.format(then=attempts), str(root)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    inherited, opened, *rest = done.stdout.split()
    assert opened == "WorkspaceLocked"
    assert inherited != "allowed"
    assert rest == ["open"], done.stderr
    assert sorted(os.listdir(root)) == ["owned.txt", "parent.txt"]


def test_one_workspace_by_two_names_is_one_workspace(root: Path, tmp_path: Path):
    (tmp_path / "alias").symlink_to(root)
    with HostFilesystem(root), pytest.raises(WorkspaceLocked):
        HostFilesystem(tmp_path / "alias")


def test_two_workspaces_are_open_side_by_side(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with HostFilesystem(tmp_path / "one") as one, HostFilesystem(tmp_path / "two") as two:
        one.write("a.txt", "1")
        two.write("a.txt", "2")

    assert (tmp_path / "one/a.txt").read_text() == "1"
    assert (tmp_path / "two/a.txt").read_text() == "2"


def test_a_closed_workspace_can_be_opened_again_and_closed_twice(root: Path):
    first = HostFilesystem(root)
    first.write("a.txt", "first")
    first.close()
    first.close()
    with HostFilesystem(root) as second:
        first.close()
        second.write("a.txt", "second")
        with pytest.raises(WorkspaceLocked):
            HostFilesystem(root)

    assert (root / "a.txt").read_text() == "second"


def test_a_closed_workspace_takes_no_more_writes(root: Path):
    fs = HostFilesystem(root)
    fs.close()

    with pytest.raises(Exception, match="closed"):
        fs.write("a.txt", "too late")
    assert os.listdir(root) == []


def test_a_store_of_another_workspace_is_refused(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with HostFilesystem(tmp_path / "one", store=tmp_path / "store") as one:
        one.write("a.txt", "1")

    with pytest.raises(ValueError, match="one"):
        HostFilesystem(tmp_path / "two", store=tmp_path / "store")
    with HostFilesystem(tmp_path / "one", store=tmp_path / "store"):
        pass
