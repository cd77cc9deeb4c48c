"""A loss of power at any step: what was on disk before is still there, and ``safe`` is exact.

A process is killed at one of its system calls, those of SQLite included. At that instant ext4 goes
down: it may still write its own journal, but no content that it holds back, and that is the worst
that a loss of power can leave. What is mounted again has to hold everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing.forkserver
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import injected_child
import pytest
from injected_child import FAILED
from test_host_power import ROOT, copy_disk, mounted
from test_injected_faults import KILL, Contents, Workspace, contents
from test_kills_of_all_deeds import differing
from trees import look

from chance import THOROUGH
from injection import Injection, needs_strace, processes, run_forked
from weakincentives.errors import FilesystemError, HistoryDamaged, UndoRefused
from weakincentives.filesystem import HostFilesystem

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not ROOT, reason="only root can mount filesystems"),
]

EXT4_IOC_SHUTDOWN, LOG_IS_FLUSHED = 0x8004587D, 1
EVERY = 1 if THOROUGH else 20
"""`make torture` loses power at every step."""
CALLS = {"call": 1, "command": 1, "external": 1, "undo": 2, "rewind": 3, "prune": 3}
"""How many calls there are before each step."""


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    needs_strace()
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell it where our modules are, and then loads them in every child.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        processes.set_forkserver_preload(["injected_child", "killed_child", "sqlite3"])
        multiprocessing.forkserver.ensure_running()


class Disk:
    """A disk with a workspace on it, all of it written; each trial begins with a copy."""

    def __init__(self, place: Path, step: str, durability: str) -> None:
        self.place, self.step, self.durability = place, step, durability
        self.disk, self.live = place / "disk", place / "live"
        with open(self.disk, "wb") as file:
            file.truncate(32 << 20)
        made = subprocess.run(
            ["mkfs.ext4", "-q", "-F", self.disk], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip(f"not possible here: {made.stderr.decode().strip()}")
        with mounted(self.disk, self.live):
            workspace = Workspace(self.live, CALLS[step])
            self.before = workspace.contents()
            os.sync()

    def calls(self) -> list[Injection]:
        """Return the modifying calls of the step; afterwards ``after`` is what it leads to."""
        with self._trial() as live:
            code, found = self._make(live, None)
            assert (code, len(found) > 20) == (0, True)
            self.after = contents(look(live / "work"))
        return found

    def lose_power(self, injection: Injection) -> tuple[int, Path]:
        """Kill the step there, and return its exit code and the disk as it is then."""
        with self._trial() as live:
            code, _ = self._make(live, injection)
            fd = os.open(live, os.O_RDONLY)
            try:
                fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", LOG_IS_FLUSHED))
            except OSError as error:
                pytest.skip(f"this filesystem can't be shut down: {error}")
            finally:
                os.close(fd)
        return code, self.place / "trial"

    def _make(self, live: Path, injection: Injection | None) -> tuple[int, list[Injection]]:
        given = (
            self.step,
            str(live / "work"),
            str(live / "store"),
            self.durability,
            str(live / "state"),
        )
        return run_forked(injected_child.work, *given, injection=injection)

    @contextlib.contextmanager
    def _trial(self) -> Iterator[Path]:
        trial = self.place / "trial"
        trial.unlink(missing_ok=True)
        copy_disk(self.disk, trial)
        with mounted(trial, fresh(self.live)) as live:
            yield live


def fresh(place: Path) -> Path:
    with contextlib.suppress(FileNotFoundError):
        place.rmdir()
    return place


def stored(place: Path) -> set[bytes]:
    """Return every content on a disk, wherever it is."""
    found: set[bytes] = set()
    for path in place.rglob("*"):
        if path.is_file() and not path.is_symlink() and not path.name.startswith("log.db"):
            data = path.read_bytes()
            found.add(data)
            with contextlib.suppress(zlib.error):
                found.add(zlib.decompress(data))
    for log in place.rglob("log.db"):
        with contextlib.closing(sqlite3.connect(log)) as database:
            found.update(data for (data,) in database.execute("SELECT data FROM content"))
    return found


def undo_all(fs: HostFilesystem) -> None:
    for call in reversed(fs.history()):
        with contextlib.suppress(FilesystemError, UndoRefused, HistoryDamaged, OSError):
            fs.undo(call)


def files(seen: Contents) -> set[bytes]:
    return {content for _, _, content in seen.values() if isinstance(content, bytes)}


@pytest.mark.parametrize("step", CALLS)
def test_fast_loses_nothing_that_was_on_the_disk(tmp_path: Path, step: str) -> None:
    disk = Disk(tmp_path, step, "fast")
    failures: list[str] = []
    for call in disk.calls()[::EVERY]:
        _, copy = disk.lose_power(call._replace(what=KILL))
        with mounted(copy, fresh(tmp_path / "after")) as after:
            try:
                assert files(disk.before) <= stored(after), "lost before it was opened"
                with HostFilesystem(after / "work", store=after / "store") as fs:
                    assert files(disk.before) <= stored(after), "lost when it was opened"
                    undo_all(fs)
                    fs.write("goes on", "yes")
                    fs.undo(fs.history()[-1])
                assert files(disk.before) <= stored(after), "lost by an undo"
            except Exception as error:
                failures.append(f"{call}: {type(error).__name__}: {error}")
    assert failures == []


@pytest.mark.parametrize("step", CALLS)
def test_safe_leaves_all_of_a_call_or_nothing(tmp_path: Path, step: str) -> None:
    disk = Disk(tmp_path, step, "safe")
    failures: list[str] = []
    for call in disk.calls()[::EVERY]:
        code, copy = disk.lose_power(call._replace(what=KILL))
        with mounted(copy, fresh(tmp_path / "after")) as after:
            try:
                assert code in (0, FAILED, -signal.SIGKILL)
                with HostFilesystem(after / "work", store=after / "store") as fs:
                    seen = contents(look(after / "work"))
                    if code == 0 or seen["edited"] == disk.after["edited"]:
                        assert differing(seen, disk.after) == {}
                    else:
                        assert differing(seen, disk.before) == {}
                    for each in reversed(fs.history()):
                        assert fs.undo(each) == ()
            except Exception as error:
                failures.append(f"{call}: {type(error).__name__}: {error}")
    assert failures == []
