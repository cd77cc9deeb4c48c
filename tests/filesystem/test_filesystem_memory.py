"""What only the filesystem in memory has: how one is made, its clock, and what it costs."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from weakincentives.core.clock import FakeClock
from weakincentives.errors import NoSuchFile, NotADirectory, NotAFile
from weakincentives.filesystem import FileStat, MemoryFilesystem


@pytest.fixture
def clock():
    return FakeClock(start=100.0)


@pytest.fixture
def fs(clock):
    return MemoryFilesystem(
        {
            "README.md": "# Title\n",
            "src/app.py": "import os\nprint('hi')\n",
            "src/util/text.py": "import re\n",
        },
        clock=clock,
    )


# Making one


def test_names_alone_make_empty_files():
    fs = MemoryFilesystem(["a.txt", "b/c.txt"])

    assert fs.glob("**") == ("a.txt", "b/c.txt")
    assert fs.read("b/c.txt") == ""


def test_single_name_is_not_taken_for_its_letters():
    with pytest.raises(TypeError, match="list"):
        MemoryFilesystem("a.txt")
    with pytest.raises(TypeError, match="list"):
        MemoryFilesystem(["a.txt"], readonly="a.txt")


def test_files_that_cannot_both_be_there_are_refused():
    with pytest.raises(NotADirectory):
        MemoryFilesystem({"a": "x", "a/b": "y"})


def test_readonly_names_must_be_files():
    with pytest.raises(NoSuchFile):
        MemoryFilesystem(readonly=["missing"])
    with pytest.raises(NotAFile):
        MemoryFilesystem(["a/b"], readonly=["a"])


# Time


def test_stat_tells_kind_size_time_and_mark(fs, clock):
    clock.advance(5)
    fs.write("src/new.py", "é")
    fs.set_readonly("src/new.py")

    assert fs.stat("/workspace/src/new.py") == FileStat(
        path="src/new.py", kind="file", size=2, modified=105.0, readonly=True
    )
    assert fs.stat("src") == FileStat(
        path="src", kind="directory", size=0, modified=105.0, readonly=False
    )
    assert fs.stat(".").path == "."


def test_directory_is_modified_when_an_entry_comes_or_goes(fs, clock):
    clock.advance(5)
    fs.write("src/app.py", "changed")
    assert fs.stat("src").modified == 100.0

    fs.write("src/deep/er/x", "")
    assert fs.stat("src").modified == 105.0
    assert fs.stat(".").modified == 100.0

    clock.advance(5)
    fs.delete("src/util", recursive=True)
    assert fs.stat("src").modified == 110.0


def test_copy_and_mark_keep_the_time(fs, clock):
    clock.advance(9)
    fs.copy("src", "backup")
    fs.set_readonly("backup/app.py")

    assert fs.stat("backup/util/text.py").modified == 100.0
    assert fs.stat("backup/app.py").modified == 100.0


def test_view_keeps_the_clock(fs, clock):
    view = fs.fork()
    clock.advance(5)
    view.write("b", "y")

    assert view.stat("b").modified == 105.0


# Snapshots


def test_newer_snapshot_can_be_restored_after_an_older_one(fs):
    before = fs.snapshot()
    fs.write("src/app.py", "broken")
    after = fs.snapshot()
    fs.restore(before)

    fs.restore(after)

    assert fs.read("src/app.py") == "broken"


def test_dropped_snapshot_frees_what_only_it_held():
    fs = MemoryFilesystem()
    tracemalloc.start()
    try:
        fs.write_bytes("big", bytes(5_000_000))
        token = fs.snapshot()
        fs.delete("big")
        held, _ = tracemalloc.get_traced_memory()
        assert held > 4_000_000

        del token
        gc.collect()
        freed, _ = tracemalloc.get_traced_memory()
        assert freed < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.heavy
def test_thousands_of_nested_directories_do_no_harm():
    fs, deep = MemoryFilesystem(), "/".join(["a"] * 2000)
    fs.write(f"{deep}/x", "")
    for _ in range(5):
        fs.move("a", "b")
        fs.mkdir(deep)
        fs.move("b", f"{deep}/b")
    assert len(fs.search("x")) == 1

    fs.delete("a", recursive=True)

    assert fs.list() == ()
