"""The store stays small: old calls go, contents are compressed, and nothing needed is lost."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import killed_child
import pytest
from hypothesis import given
from hypothesis import strategies as st
from killed_child import Death
from trees import ON_DISK, look

from weakincentives.clock import FakeClock
from weakincentives.errors import ContentDamaged
from weakincentives.filesystem import HostFilesystem, Limits, WorkspaceHistory
from weakincentives.filesystem.history import History
from weakincentives.filesystem.prune import disk_usage
from weakincentives.filesystem.store import Store

EVERYTHING = Limits(days=0, newest=0)
NOTHING = Limits()
DAY = 86_400
TEXT = "a line that repeats itself\n" * 1000

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["killed_child", "weakincentives.filesystem.disk"])


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell it where our modules are, and then loads them in every child.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        multiprocessing.forkserver.ensure_running()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a.txt").write_text(TEXT)
    return root


def store_of(root: Path) -> Path:
    return root.parent / f".{root.name}.wink"


def objects(root: Path) -> list[Path]:
    return [path for path in (store_of(root) / "objects").rglob("*") if path.is_file()]


def contents(root: Path) -> dict[str, tuple[object, ...]]:
    return {path: (seen.kind, seen.mode, seen.content) for path, seen in look(root).items()}


def make_older(root: Path, days: float) -> None:
    """Make all committed calls look older."""
    for entry in (store_of(root) / "history").glob("*-*"):
        then = entry.stat().st_mtime - days * DAY
        os.utime(entry, (then, then))


# Compressed contents


def test_replaced_contents_are_compressed_when_the_workspace_closes(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "short")
        assert [path.stat().st_size for path in objects(root)] == [len(TEXT)]
    (packed,) = objects(root)
    assert packed.stat().st_size < len(TEXT) / 5
    with HostFilesystem(root) as fs:
        assert "a line that repeats itself" in fs.diff(fs.history()[0].call_id)
        fs.undo(fs.history()[0].call_id)
        assert fs.read("a.txt") == TEXT


@pytest.mark.parametrize(
    "content",
    [b"x" * 4096, os.urandom(20_000), bytes(5 << 20)],
    ids=["one block", "does not shrink", "large enough to be cloned"],
)
def test_a_content_that_gains_nothing_stays_as_it_is(root: Path, content: bytes):
    (root / "a.txt").write_bytes(content)
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "short")
        assert fs.prune(NOTHING).compressed == 0
    assert [path.read_bytes() for path in objects(root)] == [content]


def test_a_content_with_holes_keeps_them(root: Path):
    with open(root / "a.txt", "wb") as file:
        file.truncate(1 << 20)
        file.write(b"start")
    before = (root / "a.txt").stat().st_blocks
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "short")
        assert fs.prune(NOTHING).compressed == 0
        fs.undo(fs.history()[0].call_id)
    assert (root / "a.txt").stat().st_blocks == before


@pytest.mark.parametrize("damage", [b"", b"not compressed at all", None])
def test_a_damaged_compressed_content_is_never_restored(root: Path, damage: bytes | None):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "short")
    (packed,) = objects(root)
    packed.write_bytes(packed.read_bytes()[:-9] if damage is None else damage)
    with HostFilesystem(root) as fs:
        with pytest.raises(ContentDamaged):
            fs.undo(fs.history()[0].call_id)
        assert fs.read("a.txt") == "short"


def test_a_content_that_is_replaced_again_takes_the_place_of_a_damaged_compressed_one(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "short")
    (packed,) = objects(root)
    packed.write_bytes(b"damaged")
    with HostFilesystem(root) as fs:
        fs.write("a.txt", TEXT)
        fs.write("a.txt", "third")
    with HostFilesystem(root) as fs:
        fs.undo(fs.history()[-1].call_id)
        assert fs.read("a.txt") == TEXT


def test_a_reader_without_a_lock_finds_a_content_that_is_compressed_meanwhile(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "short")
        reader = WorkspaceHistory(root)
        before = reader.diff(reader.calls())
        assert fs.prune(NOTHING).compressed == 1
        assert reader.diff(reader.calls()) == before


def test_a_full_disk_costs_the_compression_only(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "short")
        write = os.write

        def full(fd: int, data: bytes) -> int:
            if "new-" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, data)

        monkeypatch.setattr(os, "write", full)
        assert fs.prune(NOTHING).compressed == 0
        assert "No space left" in caplog.text
        monkeypatch.undo()
        assert [path.read_text() for path in objects(root)] == [TEXT]


# What goes, and what stays


def test_old_calls_go_with_the_next_commit_but_not_the_newest(root: Path):
    with HostFilesystem(root, history_limit=Limits(days=30, newest=3)) as fs:
        for number in range(10):
            fs.write("a.txt", f"{number}")
    make_older(root, 31)
    with HostFilesystem(root, history_limit=Limits(days=30, newest=3)) as fs:
        fs.write("a.txt", "new")
        assert [each.serial for each in fs.history()] == [9, 10, 11]
        fs.undo(fs.history()[0].call_id, fs.history()[1].call_id, fs.history()[2].call_id)
        assert fs.read("a.txt") == "7"
        assert fs.prune(NOTHING).contents == 0, "the contents went with their calls"


def test_the_age_is_told_by_the_clock_of_the_workspace(root: Path):
    clock = FakeClock(time.time())
    with HostFilesystem(root, history_limit=Limits(newest=0), clock=clock) as fs:
        fs.write("a.txt", "first")
        clock.advance(91 * DAY)
        fs.write("a.txt", "second")
        assert len(fs.history()) <= 1


def test_by_default_the_newest_hundred_calls_stay_however_old(root: Path):
    with HostFilesystem(root) as fs:
        for number in range(102):
            fs.write("a.txt", f"{number}")
    make_older(root, 1000)
    with HostFilesystem(root) as fs:
        for number in range(4):  # a commit reads a few entries, and removes as many
            fs.write("a.txt", f"new {number}")
        assert len(fs.history()) == 100


def test_what_a_snapshot_needs_is_not_pruned(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "before")
        fs.write("b.txt", TEXT)
        token = fs.snapshot()
        fs.write("a.txt", "after")
        fs.delete("b.txt")
        assert fs.prune(EVERYTHING).calls == 1
        fs.restore(token)
        assert (fs.read("a.txt"), fs.read("b.txt")) == ("before", TEXT)
        del token
        assert fs.prune(EVERYTHING).calls > 1
        assert (fs.history(), objects(root)) == ((), [])


def test_what_else_refers_to_a_call_keeps_it(root: Path):
    """As a branch does: with the state after a call as its base."""
    with HostFilesystem(root) as fs:
        for number in range(5):
            fs.write("a.txt", f"{number}" * 100)
    store = Store(root)
    with contextlib.closing(store):
        history = History(store)
        digests = [record.before.digest for n in (1, 2) for record in history.read(n).records]
        history.needed_by.append(lambda: 3)
        assert history.prune(EVERYTHING) == 2
        assert history.serials() == [3, 4, 5], "serials go on from the newest call"
        assert not any(digest in history.objects for digest in digests)


def test_unused_contents_are_removed_unless_a_damaged_call_may_need_them(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "second")
        fs.write("a.txt", "third")
    stray = store_of(root) / "objects" / "ab" / ("c" * 62)
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("nothing refers to this")
    entry = min((store_of(root) / "history").glob("*-*"))
    whole = entry.read_bytes()
    entry.write_bytes(whole.replace(b"a.txt", b"z.txt", 1))
    with HostFilesystem(root) as fs:
        pruned = fs.prune(NOTHING)
        assert (pruned.contents, pruned.damaged, stray.exists()) == (0, 1, True)
    entry.write_bytes(whole)
    with HostFilesystem(root) as fs:
        assert WorkspaceHistory(root).to_prune(NOTHING).contents == 1
        assert fs.prune(NOTHING).contents == 1
        assert not stray.exists()
        fs.revert_to(fs.history()[0].call_id)
        fs.undo(fs.history()[0].call_id)
        assert fs.read("a.txt") == TEXT


def test_files_that_are_no_objects_stay(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "second")
        other = store_of(root) / "objects" / "ab" / "notes"
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
        fs.prune(EVERYTHING)
    assert other.read_text() == "mine"


def test_what_could_not_be_restored_goes_only_when_asked_for(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "second")
        (store_of(root) / "left" / "folder").mkdir(parents=True)
        (store_of(root) / "left" / "folder" / "inner").write_text("the only copy")
        assert fs.prune(EVERYTHING).left == 0
        assert WorkspaceHistory(root).to_prune(EVERYTHING, left_too=True).left == 1
        assert fs.prune(EVERYTHING, left_too=True).left == 1
        assert os.listdir(store_of(root) / "left") == []


def test_a_scan_index_that_is_no_longer_used_is_removed_and_made_again(root: Path):
    def change_by_a_program(fs: HostFilesystem, text: str) -> None:
        view = fs.fork_in_place()
        view.expect_external()
        (root / "a.txt").write_text(text)
        assert fs.discard(view) == ()

    with HostFilesystem(root) as fs:
        change_by_a_program(fs, "by a program")
    assert disk_usage(store_of(root))["scan index"] > 0
    with HostFilesystem(root) as fs:
        assert not fs.prune(NOTHING).scan_index
        assert fs.prune(EVERYTHING).scan_index
        assert disk_usage(store_of(root))["scan index"] == 0
        change_by_a_program(fs, "by another")
        assert fs.read("a.txt") == TEXT


# Kills and random histories


def prune_and_die(root: Path, limits: Limits, death: Death) -> int:
    """Prune in a child that dies there; returns its exit code, negative if it was killed."""
    child = _processes.Process(target=killed_child.prune, args=(root, limits, death))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


class Told:
    """What the workspace held before and after each call."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.before: dict[str, dict[str, tuple[object, ...]]] = {}
        self.after: dict[str, dict[str, tuple[object, ...]]] = {}

    def make(self, fs: HostFilesystem, change: Callable[[], object]) -> None:
        before, last = contents(self.root), len(fs.history()) and fs.history()[-1].serial
        change()
        made = fs.history()[-1:]
        if made and made[0].serial > last:
            self.before[made[0].call_id] = before
            self.after[made[0].call_id] = contents(self.root)

    def check(self) -> int:
        """Fail unless every call that is left can be undone exactly; returns how many these are."""
        with HostFilesystem(self.root) as fs:
            assert fs.recovered == ()
            calls = [each.call_id for each in fs.history()]
            for call_id in reversed(calls):
                assert fs.revert_to(call_id) == ()
                assert contents(self.root) == self.after[call_id]
            for call_id in calls[:1]:
                assert fs.undo(call_id) == ()
                assert contents(self.root) == self.before[call_id]
            return len(calls)


def used(base: Path) -> Told:
    """Return a workspace after some calls; nothing is compressed when a safe one closes."""
    root = base / "project"
    root.mkdir(parents=True)
    (root / "a.txt").write_text(TEXT)
    told = Told(root)
    with HostFilesystem(root, durability="safe") as fs:
        told.make(fs, lambda: fs.write("a.txt", "second"))
        told.make(fs, lambda: fs.write("dir/deep/b.txt", TEXT + "b"))
        told.make(fs, lambda: fs.delete("dir", recursive=True))
        told.make(fs, lambda: fs.write("a.txt", TEXT))
        told.make(fs, lambda: fs.write("a.txt", TEXT * 2))
        told.make(fs, lambda: fs.write("a.txt", "last"))
    return told


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("limits", "left"),
    [(NOTHING, 6), (Limits(count=3), 3), (EVERYTHING, 0)],
    ids=["compressing", "some calls", "all calls"],
)
def test_a_kill_at_any_step_of_pruning_loses_nothing_that_stays(
    tmp_path: Path, limits: Limits, left: int
):
    for step in range(1, 400):
        told = used(tmp_path / f"{step}")
        code = prune_and_die(told.root, limits, Death(step, torn=step % 2 == 0))
        with HostFilesystem(told.root) as fs:
            fs.prune(limits)
            assert len(fs.history()) == left
            assert WorkspaceHistory(told.root).to_prune(limits).contents == 0
        assert told.check() == left
        assert not [path for path in objects(told.root) if path.name.startswith("new-")]
        if code >= 0:
            assert step > 5, "it was killed at some steps"
            return
        assert code == -signal.SIGKILL
    pytest.fail("it takes more steps than expected")


CONTENTS = [b"small", TEXT.encode(), random.Random(1).randbytes(9_000)]
PATHS = ["a.txt", "dir/b"]

writes = st.tuples(st.just("write"), st.sampled_from(PATHS), st.sampled_from(CONTENTS))
changes = st.one_of(
    *[writes] * 8,  # few contents and paths: calls must share contents
    st.tuples(st.just("delete"), st.sampled_from(["a.txt", "dir"])),
    st.tuples(st.just("move"), st.sampled_from(PATHS), st.sampled_from(PATHS)),
    st.tuples(st.just("undo"), st.integers(1, 3)),
    st.tuples(st.just("prune"), st.integers(0, 6)),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("older"), st.integers(1, 60)),
    st.tuples(st.just("die"), st.integers(1, 60), st.integers(0, 6)),
)


@ON_DISK
@given(st.lists(changes, min_size=10, max_size=30), st.sampled_from([3, 8, 100]))
def test_after_any_history_every_call_that_is_left_is_undone_exactly(
    steps: list[tuple[object, ...]], most: int
):
    limits = Limits(size=200_000, count=most, days=90, newest=4)
    with tempfile.TemporaryDirectory(prefix="wink-test-") as above, contextlib.ExitStack() as open_:
        root = Path(above, "project")
        root.mkdir()
        told = Told(root)
        fs = open_.enter_context(HostFilesystem(root, history_limit=limits))
        for step in steps:
            if step[0] in ("reopen", "die", "older"):
                open_.close()
                if step[0] == "die":
                    prune_and_die(root, Limits(count=step[2]), Death(step[1]))
                elif step[0] == "older":
                    make_older(root, step[1])
                fs = open_.enter_context(HostFilesystem(root, history_limit=limits))
            elif step[0] == "prune":
                fs.prune(Limits(count=step[1]))
            else:
                told.make(fs, lambda fs=fs, step=step: change(fs, *step))
        open_.close()
        told.check()


def change(fs: HostFilesystem, kind: str, *args: object) -> None:
    with contextlib.suppress(OSError, ValueError):
        if kind == "write":
            fs.write_bytes(*args)  # pyright: ignore
        elif kind == "delete":
            fs.delete(args[0], recursive=True)  # pyright: ignore
        elif kind == "move":
            fs.move(*args)  # pyright: ignore
        else:
            fs.undo(*(each.call_id for each in fs.history()[-args[0] :]))  # pyright: ignore
