"""What has changed since a snapshot, told at the cost of what has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from weakincentives.filesystem import HostFilesystem, MemoryFilesystem

FILES = {"a.txt": "a", "b.txt": "b", "deep/er/c.txt": "c"}


@pytest.fixture(params=["memory", "disk"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryFilesystem | HostFilesystem:
    if request.param == "memory":
        return MemoryFilesystem(FILES)
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return HostFilesystem(tmp_path)


def test_nothing_has_changed_right_after_a_snapshot(files: MemoryFilesystem | HostFilesystem):
    assert files.changed_since(files.snapshot()) == ()


def test_what_came_changed_and_went_is_named(files: MemoryFilesystem | HostFilesystem):
    before = files.snapshot()

    files.write("deep/er/c.txt", "other")
    files.write("new/d.txt", "d")
    files.delete("b.txt")

    assert files.changed_since(before) == ("b.txt", "deep/er/c.txt", "new", "new/d.txt")


def test_each_snapshot_has_its_own_past(files: MemoryFilesystem | HostFilesystem):
    first = files.snapshot()
    files.write("a.txt", "1")
    second = files.snapshot()
    files.write("b.txt", "2")

    assert files.changed_since(first) == ("a.txt", "b.txt")
    assert files.changed_since(second) == ("b.txt",)


def test_a_snapshot_of_another_filesystem_is_refused(files: MemoryFilesystem | HostFilesystem):
    with pytest.raises(ValueError, match="not a snapshot of this filesystem"):
        files.changed_since(MemoryFilesystem().snapshot())


def test_in_memory_the_same_content_again_is_no_change_and_a_directory_tells_what_is_in_it():
    files = MemoryFilesystem(FILES)
    before = files.snapshot()

    files.write("a.txt", "a")
    files.move("deep", "shallow")
    files.set_readonly("b.txt")

    assert files.changed_since(before) == (
        "b.txt",
        "deep",
        "deep/er",
        "deep/er/c.txt",
        "shallow",
        "shallow/er",
        "shallow/er/c.txt",
    )


def test_in_memory_a_file_in_the_place_of_a_directory_is_a_change():
    files = MemoryFilesystem(FILES)
    before = files.snapshot()

    files.delete("deep", recursive=True)
    files.write("deep", "now a file")

    assert files.changed_since(before) == ("deep", "deep/er", "deep/er/c.txt")
