"""A store on another filesystem than the workspace: just as exact, and nothing stays behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_host_faults import CHANGES, Change, each_change, fill
from trees import elsewhere, look, run_git

from weakincentives.filesystem import HostFilesystem

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a real directory needs POSIX calls")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A place for a store, on another filesystem."""
    with elsewhere(tmp_path) as place:
        yield place / "store"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fill(tmp_path / "work")


def test_things_that_are_moved_changed_and_replaced_in_turn_come_back(root: Path, store: Path):
    """A file keeps its identity however often something takes its place."""
    before = look(root)
    with HostFilesystem(root, store=store) as fs:
        view = fs.fork_in_place()
        view.write("b.txt", "over")
        view.move("dir", "lib")
        view.move("a.txt", "lib/a.txt")
        view.write("lib/a.txt", "another")
        view.move("one", "lib/a.txt", overwrite=True)
        view.write("lib/two", "all names see it")
        subprocess.run(["sed", "-i", "s/all/no/", "two"], cwd=root / "lib", check=True)
        view.delete("lib", recursive=True)
        assert fs.discard(view) == ()
    assert look(root) == before


@each_change(always=CHANGES)
def test_nothing_stays_behind_in_the_workspace(root: Path, store: Path, change: Change):
    with HostFilesystem(root, store=store) as fs:
        for end in (fs.discard, fs.merge):
            view = fs.fork_in_place()
            change(view)
            end(view)
            assert not temporaries(root)
        assert fs.revert_to(fs.history()[0].call_id) == ()
        assert not temporaries(root)


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.name.startswith(".wink")]


def test_a_directory_that_a_call_did_not_change_keeps_its_time(root: Path, store: Path):
    modified = root.stat().st_mtime_ns
    with HostFilesystem(root, store=store) as fs:
        fs.write("dir/c.txt", "changed")
    assert root.stat().st_mtime_ns == modified


def test_what_waits_during_a_call_is_nobodys_business(root: Path, store: Path):
    """It is not listed, not found by a scan, and git does not add it."""
    run_git(root, "init", "-q")
    with HostFilesystem(root, store=store) as fs:
        view = fs.fork_in_place()
        view.write("b.txt", "over")
        assert temporaries(root)
        assert not [each for each in view.list() if ".wink" in each.path]
        view.expect_external()
        shown = run_git(root, "status", "--porcelain", "-uall")
        fs.merge(view)
        assert "b.txt" in shown
        assert ".wink" not in shown
        assert fs.history()[0].paths == ("b.txt",)


def test_a_command_cannot_take_away_what_a_call_has_replaced(root: Path, store: Path):
    before = look(root)
    with HostFilesystem(root, store=store) as fs:
        view = fs.fork_in_place()
        view.write("b.txt", "over")
        result = view.run("rm -rf .wink-temporary-*; rm b.txt")
        if result.engine == "scan":
            pytest.skip("a command that works on the directory itself can remove anything")
        assert fs.discard(view) == ()
    assert look(root) == before
