"""Old runs are removed with everything that belongs to them; those that may be needed stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weakincentives.adapters import ScriptedAdapter
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.media import Media
from weakincentives.filesystem import HostFilesystem, Limits
from weakincentives.filesystem.store import location_of
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import SavedSession, Session, open_run
from weakincentives.runtime.calls import Run, begin_run, delete_runs, new_run, old_runs, runs_of

DAY = 86_400
ALL = Limits(days=0, newest=0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    with HostFilesystem(tmp_path / "project") as fs:
        fs.write("a.txt", "first")
    return tmp_path / "project"


@pytest.fixture
def store(root: Path) -> Path:
    return location_of(root)


def make_run(
    store: Path, number: int, *, days: float = 0.0, finished: bool = True, branch: str = ""
) -> Run:
    """Make a run that was last saved so many days ago."""
    run = Run(store / "runs" / f"20260101-{number:06}-abc.jsonl")
    prompt = Prompt(
        PromptTemplate(
            ns="t", key="t", sections=[MarkdownSection(title="T", key="t", template="t")]
        )
    )
    about = {"task": f"{number}", "branch": branch}
    with SavedSession.create(run.path, Session(), about=about) as saved:
        if finished:
            ScriptedAdapter(["Done."]).evaluate(prompt, saved.session, message="go")
    then = SYSTEM_CLOCK.time() - days * DAY
    os.utime(run.path, (then, then))
    return run


def numbers(runs: object) -> list[int]:
    return [int(run.id.split("-")[1]) for run in runs]  # pyright: ignore


def test_the_oldest_runs_beyond_age_count_or_size_go(store: Path):
    sizes = [make_run(store, n, days=100 - n).path.stat().st_size for n in range(6)]

    assert numbers(old_runs(store, Limits(days=96.5, newest=0))) == [0, 1, 2, 3]
    assert numbers(old_runs(store, Limits(days=96.5, newest=4))) == [0, 1]
    assert numbers(old_runs(store, Limits(days=200, count=4))) == [0, 1]
    assert numbers(old_runs(store, Limits(days=200, size=sum(sizes[2:])))) == [0, 1]
    assert numbers(old_runs(store, Limits())) == []


def test_the_newest_run_stays_whatever_the_limits(store: Path):
    for number in range(3):
        make_run(store, number, days=1000 - number)

    assert numbers(delete_runs(old_runs(store, Limits(size=0, count=0, days=0, newest=0)))) == [
        0,
        1,
    ]
    assert numbers(old_runs(store, ALL)) == []


def test_runs_in_use_unfinished_or_with_a_branch_stay(store: Path):
    make_run(store, 1, days=40, finished=False)
    make_run(store, 2, days=20, finished=False)
    used = make_run(store, 3, days=15)
    make_run(store, 4, days=10)
    make_run(store, 5, days=50, branch="b")
    make_run(store, 6, days=50, branch="merged")
    make_run(store, 7)
    (store / "branches" / "b").mkdir(parents=True)
    with SavedSession.open(used.path):
        assert numbers(old_runs(store, ALL)) == [6, 1, 4]
        assert not SavedSession.delete(used.path)
    assert used.path.exists()


def test_a_damaged_run_stays_as_long_as_an_unfinished_one(store: Path):
    for number, days in ((1, 40), (2, 20)):
        path = make_run(store, number, days=days).path
        times = path.stat()
        path.write_bytes(b"damaged\n")
        os.utime(path, (times.st_atime, times.st_mtime))
    make_run(store, 3)

    assert numbers(old_runs(store, ALL)) == [1]


def test_everything_that_belongs_to_a_run_goes_with_it(store: Path):
    run = make_run(store, 1, days=100, finished=False)
    with SavedSession.open(run.path) as saved:
        saved.session[Media].append(Media(os.urandom(5000), "image/png"))
    for suffix in (".log", ".inbox", ".jsonl.before-0123"):
        run.path.with_suffix(suffix).write_text("x")
    assert (store / "runs" / f"{run.id}.media").is_dir()
    other = make_run(store, 2)
    os.utime(run.path, (0, 0))

    assert delete_runs(old_runs(store, ALL)) == [run]
    assert os.listdir(store / "runs") == [other.path.name]


def test_what_a_kill_left_of_a_deleted_run_goes_next_time(store: Path):
    make_run(store, 2)
    (store / "runs" / "20260101-000001-abc.log").write_text("x")
    (store / "runs" / "notes.txt").write_text("mine")

    delete_runs(old_runs(store, Limits()))

    assert sorted(os.listdir(store / "runs")) == ["20260101-000002-abc.jsonl", "notes.txt"]


def test_links_among_the_runs_are_neither_followed_nor_removed(store: Path, tmp_path: Path):
    make_run(store, 2)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    link = store / "runs" / "20260101-000001-abc.media"
    link.symlink_to(outside)

    delete_runs(old_runs(store, Limits(size=0, count=0, days=0, newest=0)))

    assert link.is_symlink()
    assert (outside / "precious").exists()


def test_a_new_run_removes_old_ones_a_few_at_a_time(root: Path, store: Path):
    for number in range(40):
        make_run(store, number, days=1000 - number)
    counts: list[int] = []
    for _ in range(4):
        with open_run(root, "new"):
            counts.append(len(runs_of(root)))
    assert counts == [33, 26, 21, 21]
    assert numbers(runs_of(root))[0] == 23


@pytest.mark.heavy
def test_runs_that_begin_in_the_same_second_have_ids_of_their_own(tmp_path: Path):
    """Also if there are so many that chance would give two of them the same letters."""
    marks: set[str] = set()
    for _ in range(400):
        with begin_run(tmp_path, {"kind": "hosted"}) as run:
            marks.add(run.mark)
    assert len(marks) == 400


def test_the_mark_of_a_run_is_never_a_number(tmp_path: Path):
    """`wink undo 266` means the call of that number."""
    marks = [new_run(tmp_path).mark for _ in range(300)]

    assert [mark for mark in marks if mark[0].isdecimal()] == []
