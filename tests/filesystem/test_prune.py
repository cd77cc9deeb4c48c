"""The store stays small: old calls go, contents are compressed, and nothing needed is lost."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import multiprocessing
import multiprocessing.forkserver
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Literal

import killed_child
import pytest
from hypothesis import given
from hypothesis import strategies as st
from killed_child import Death
from trees import ON_DISK, look

from chance import HEAVY, SEED
from stored import damage, make_calls_older
from weakincentives.core.clock import FakeClock
from weakincentives.errors import ContentDamaged, FilesystemError
from weakincentives.filesystem import HostFilesystem, Limits, WorkspaceHistory
from weakincentives.filesystem.history import History
from weakincentives.filesystem.prune import disk_usage
from weakincentives.filesystem.store import Store, location_of
from weakincentives.log import Log

EVERYTHING = Limits(days=0, newest=0)
NOTHING = Limits()
DAY = 86_400
TEXT = "a line that repeats itself\n" * 1000

TORTURE = float(os.environ.get("WINK_TORTURE", "0"))

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["killed_child", "weakincentives.filesystem.disk", "weakincentives.cli.entry"]
)


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
    return location_of(root)


def objects(root: Path) -> list[Path]:
    return [path for path in (store_of(root) / "objects").rglob("*") if path.is_file()]


def contents(root: Path) -> dict[str, tuple[object, ...]]:
    return {path: (seen.kind, seen.mode, seen.content) for path, seen in look(root).items()}


def make_older(root: Path, days: float) -> None:
    """Make all committed calls look older."""
    make_calls_older(store_of(root), days)


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
        digests = [each.before.content for n in (1, 2) for each in history.operation(n).changes]
        history.needed_by.append(lambda: 3)
        assert history.prune(EVERYTHING) == 2
        assert history.serials() == [3, 4, 5], "serials go on from the newest call"
        assert not any(digest in history.objects for digest in digests)


def test_what_no_row_names_is_set_aside_and_a_damaged_call_keeps_what_it_has(root: Path):
    """A loss of power can have cost the row: then the file may be the only copy."""
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "second")
        fs.write("a.txt", "third")
    text = b"nothing refers to this"
    digest = hashlib.sha256(text).hexdigest()
    stray = store_of(root) / "objects" / digest[:2] / digest[2:]
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(text)
    (store_of(root) / "kept" / "lost" / "k1").mkdir(parents=True)
    (store_of(root) / "kept" / "lost" / "k1" / "f").write_text("the only copy")
    damage(store_of(root), 2)
    before = len(objects(root))
    with HostFilesystem(root) as fs:
        assert WorkspaceHistory(root).to_prune(NOTHING).set_aside == 1
        done = fs.prune(NOTHING)
        assert (done.contents, done.set_aside) == (0, 2)
        assert len(objects(root)) == before - 1
    left = store_of(root) / "left"
    found = [each.read_bytes() for each in left.rglob("*") if each.is_file()]
    assert sorted(found) == [text, b"the only copy"]


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


def change_by_a_program(fs: HostFilesystem, name: str, text: str) -> None:
    """Let a program change a file in a call that is undone."""
    view = fs.fork_in_place()
    view.expect_external()
    (fs.root / name).write_text(text)
    assert fs.discard(view) == ()


def test_a_scan_index_that_is_no_longer_used_is_removed_and_made_again(root: Path):
    with HostFilesystem(root) as fs:
        change_by_a_program(fs, "a.txt", "by a program")
    assert disk_usage(store_of(root))["scan index"] > 0
    with HostFilesystem(root) as fs:
        assert not fs.prune(NOTHING).scan_index
        assert fs.prune(EVERYTHING).scan_index
        assert disk_usage(store_of(root))["scan index"] == 0
        change_by_a_program(fs, "a.txt", "by another")
        assert fs.read("a.txt") == TEXT


# Kills and random histories


def prune_and_die(root: Path, limits: Limits, death: Death) -> int:
    """Prune in a child that dies there; returns its exit code, negative if it was killed."""
    return die(killed_child.prune, root, limits, death)


def die(target: Callable[..., None], *args: object) -> int:
    child = _processes.Process(target=target, args=args)
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

    def make(self, fs: HostFilesystem | WorkspaceHistory, change: Callable[[], object]) -> None:
        """Make one change; ``fs`` shows the history before and after it."""
        before = contents(self.root)
        last = next((each.serial for each in fs.newest_first()), 0)
        change()
        made = list(islice(fs.newest_first(), 1))
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


def used(base: Path, durability: Literal["fast", "safe"] = "safe") -> Told:
    """Return a workspace after some calls; nothing is compressed when a safe one closes."""
    root = base / "project"
    root.mkdir(parents=True)
    (root / "a.txt").write_text(TEXT)
    told = Told(root)
    with HostFilesystem(root, durability=durability) as fs:
        told.make(fs, lambda: fs.write("a.txt", "only the next call needs this"))
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
    [(NOTHING, 7), (Limits(count=3), 3), (EVERYTHING, 0)],
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


REMOVALS = ("rename", "rmdir", "unlink")


def test_a_kill_while_calls_are_removed_leaves_no_call_that_cannot_be_undone(tmp_path: Path):
    """The limits of one prune are not those of the next: what is left must be whole at once."""
    for step in range(1, 40):
        told = used(tmp_path / f"{step}", "fast")
        code = prune_and_die(told.root, Limits(count=3), Death(step, of=REMOVALS))
        told.check()
        with HostFilesystem(told.root) as fs:
            fs.prune(NOTHING)
            assert WorkspaceHistory(told.root).to_prune(NOTHING).contents == 0
            assert stray_trees(told.root) == []
        if code >= 0:
            assert step > 5, "it was killed at some steps"
            return
    pytest.fail("it takes more steps than expected")


def test_a_call_with_the_number_of_a_half_removed_one_is_saved_all_the_same(tmp_path: Path):
    """Numbers begin again when no call is left; a kill may have left a directory of the first."""
    for step in range(1, 40):
        root = tmp_path / f"{step}" / "project"
        (root / "dir").mkdir(parents=True)
        (root / "dir" / "b.txt").write_text("first")
        with HostFilesystem(root) as fs:
            fs.delete("dir", recursive=True)
        code = prune_and_die(root, EVERYTHING, Death(step, of=REMOVALS))
        told = Told(root)
        with HostFilesystem(root) as fs:
            if fs.history():
                fs.prune(EVERYTHING)
            (root / "dir").mkdir()
            (root / "dir" / "b.txt").write_text("second")
            told.make(fs, lambda fs=fs: fs.delete("dir", recursive=True))
        assert told.check() == 1
        if code >= 0:
            assert step > 3, "it was killed at some steps"
            return
    pytest.fail("it takes more steps than expected")


def test_a_kill_while_the_scan_index_is_removed_costs_no_file(tmp_path: Path):
    """A program's changes are undone from the index: it goes with its contents, or not at all."""
    large = "x" * (5 << 20)  # has a file of its own in the index
    for step in range(1, 20):
        root = tmp_path / f"{step}" / "project"
        root.mkdir(parents=True)
        (root / "a.txt").write_text("small")
        (root / "large").write_text(large)
        with HostFilesystem(root) as fs:
            change_by_a_program(fs, "a.txt", "by a program")
        code = prune_and_die(root, EVERYTHING, Death(step, of=REMOVALS))
        with HostFilesystem(root) as fs:
            change_by_a_program(fs, "a.txt", "by another")
            change_by_a_program(fs, "large", "by another")
        assert ((root / "a.txt").read_text(), (root / "large").read_text()) == ("small", large)
        assert not list(store_of(root).glob("*.new"))
        if code >= 0:
            assert step > 2, "it was killed at some steps"
            return
    pytest.fail("it takes more steps than expected")


@pytest.mark.heavy
@pytest.mark.parametrize("limit", [("--keep", "0"), ("--older-than", "0")], ids=" ".join)
def test_a_kill_during_gc_leaves_no_call_that_cannot_be_undone(
    tmp_path: Path, limit: tuple[str, str]
):
    for step in range(1, 40):
        told = used(tmp_path / f"{step}", "fast")
        code = die(killed_child.wink, told.root, ["gc", *limit], Death(step, of=REMOVALS))
        told.check()
        if code >= 0:
            assert step > 5, "it was killed at some steps"
            return
    pytest.fail("it takes more steps than expected")


def stray_trees(root: Path) -> list[str]:
    """Return the removed directories in the store that no call refers to."""
    with contextlib.closing(Log(store_of(root) / "log.db")) as log:
        known = {each.id for each in log.summaries()}
    kept = (store_of(root) / "kept").glob("*")
    return [path.name for path in kept if path.name not in known]


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
    with contextlib.suppress(OSError, ValueError, FilesystemError):
        if kind == "write":
            fs.write_bytes(*args)  # pyright: ignore
        elif kind == "delete":
            fs.delete(args[0], recursive=True)  # pyright: ignore
        elif kind == "move":
            fs.move(*args)  # pyright: ignore
        elif kind == "command":
            fs.run(["sh", "-c", f"mkdir -p dir; echo {len(fs.history())} >> {args[0]}"])
        elif kind == "link":
            fs.run(["sh", "-c", f"ln -f {args[0]} linked"])
        else:
            fs.undo(*(each.call_id for each in fs.history()[-args[0] :]))  # pyright: ignore


# Longer ones, by a seed


def survive(base: Path, seed: int) -> int:
    """Kill whatever removes calls from a random history; returns how often.

    After the last kill nothing is repaired: every call that is left must be undone exactly.
    """
    dice, kills, told = random.Random(seed), 0, Told(base / "project")
    told.root.mkdir(parents=True)
    story: list[object] = []
    try:
        for _ in range(dice.randint(1, 4)):
            limits = some_limits(dice)
            with HostFilesystem(told.root, history_limit=limits) as fs:
                for _ in range(dice.randint(3, 9)):
                    step = a_change(dice)
                    story.append(step)
                    told.make(fs, lambda fs=fs, step=step: change(fs, *step))
            for _ in range(dice.randint(1, 3)):
                killed, what = remove_and_die(told, dice)
                story.append(what)
                kills += killed
        told.check()
        with HostFilesystem(told.root) as fs:
            fs.prune(EVERYTHING)
        assert (objects(told.root), stray_trees(told.root)) == ([], [])
    except BaseException:
        sys.stderr.write(f"\nseed {seed} failed after {story}; see {base}\n")
        raise
    return kills


def some_limits(dice: random.Random) -> Limits:
    return Limits(count=dice.choice([2, 5, 100]), size=dice.choice([60_000, 1 << 20]), newest=2)


def a_change(dice: random.Random) -> tuple[object, ...]:
    kind = dice.choice(["write"] * 8 + ["delete", "delete", "move", "undo", "command", "link"])
    if kind == "write":
        data = dice.choice([*CONTENTS, dice.randbytes(dice.choice([3, 5_000, 20_000]))])
        return kind, dice.choice([*PATHS, "dir/deep/c"]), data
    if kind == "delete":
        return kind, dice.choice(["a.txt", "dir", "dir/deep"])
    if kind == "move":
        return kind, *dice.sample([*PATHS, "dir", "other"], 2)
    if kind == "undo":
        return kind, dice.randint(1, 3)
    return kind, dice.choice(PATHS)


def remove_and_die(told: Told, dice: random.Random) -> tuple[bool, str]:
    """Let a child remove calls in one of the ways there are, and kill it."""
    of = dice.choice([REMOVALS, Death().of])
    death = Death(dice.randint(1, 16 if of is REMOVALS else 60), torn=dice.random() < 0.3, of=of)
    match dice.choice(["prune", "gc", "commit"]):
        case "prune":
            limits = Limits(count=dice.randint(0, 6))
            code = prune_and_die(told.root, limits, death)
            return code < 0, f"prune({limits.count}), {death} of {len(of)}"
        case "gc":
            limit = dice.choice(
                [["--keep", dice.choice(["0", "9K", "30K"])], ["--older-than", "0"]]
            )
            code = die(killed_child.wink, told.root, ["gc", *limit], death)
            return code < 0, f"gc {limit}, {death} of {len(of)}"
        case _:
            args = some_limits(dice), dice.choice(PATHS), dice.randbytes(9), death
            codes: list[int] = []
            history = WorkspaceHistory(told.root)

            def write_and_die() -> None:
                codes.append(die(killed_child.write, told.root, *args))
                with HostFilesystem(told.root):  # rolls the call back, or finishes its commit
                    pass

            told.make(history, write_and_die)
            return codes[0] < 0, f"write{args[:2]}, {death} of {len(of)}"


@pytest.mark.parametrize("seed", range(100 if HEAVY else 6))
def test_whatever_removes_calls_may_be_killed_at_any_step(tmp_path: Path, seed: int):
    survive(tmp_path, seed)


if TORTURE:  # `make torture`: fresh seeds are for finding things, not for passing

    def test_torture():
        """Fresh seeds until the time is up; a failure names its seed and keeps its directory."""
        end, histories, kills = time.monotonic() + TORTURE, 0, 0
        while time.monotonic() < end:
            seed = SEED + histories
            base = Path(tempfile.mkdtemp(prefix=f"wink-prune-{seed}-"))
            kills += survive(base, seed)
            histories += 1
            shutil.rmtree(base)
        sys.stderr.write(f"\n{histories} histories with {kills} kills while calls were removed\n")
