"""What a view has changed, told before anybody decides whether to keep it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weakincentives.filesystem import HostFilesystem, MemoryFilesystem

FILES = {"a.txt": "a\n", "b.txt": "b\n", "deep/er/c.txt": "c\n", "deep/d.txt": "d\n"}
View = MemoryFilesystem | HostFilesystem


@pytest.fixture(params=["memory", "private", "in place"])
def view(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[View]:
    if request.param == "memory":
        yield MemoryFilesystem(FILES).fork()
        return
    root = tmp_path / "root"
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    with HostFilesystem(root) as files:
        yield files.fork() if request.param == "private" else files.fork_in_place()


def _write(view: View) -> None:
    view.write("a.txt", "other")


def _write_twice(view: View) -> None:
    view.write("a.txt", "once")
    view.write("a.txt", "twice")


def _make(view: View) -> None:
    view.write("new/er/e.txt", "e")


def _delete(view: View) -> None:
    view.delete("deep", recursive=True)


def _move(view: View) -> None:
    view.move("deep", "shallow")


def _move_twice(view: View) -> None:
    view.move("deep/er", "between")
    view.move("between", "er")


def _move_and_delete(view: View) -> None:
    view.move("deep/er", "between")
    view.delete("between", recursive=True)


@pytest.mark.parametrize(
    ("change", "files"),
    [
        (_write, {"a.txt"}),
        (_write_twice, {"a.txt"}),
        (_make, {"new/er/e.txt"}),
        (_delete, {"deep/d.txt", "deep/er/c.txt"}),
        (_move, {"deep/d.txt", "deep/er/c.txt", "shallow/d.txt", "shallow/er/c.txt"}),
        (_move_twice, {"deep/er/c.txt", "er/c.txt"}),
        (_move_and_delete, {"deep/er/c.txt"}),
    ],
)
def test_every_file_that_came_changed_or_went_is_named(
    view: View, change: Callable[[View], None], files: set[str]
):
    """Also those in a directory that was moved or deleted as a whole."""
    assert view.changed_here() == ()

    change(view)

    changed = view.changed_here()
    assert list(changed) == sorted(changed)
    assert {path for path in changed if path.endswith(".txt")} == files


def test_nested_views_tell_what_they_did_themselves(tmp_path: Path):
    (tmp_path / "root").mkdir()
    with HostFilesystem(tmp_path / "root") as files:
        outer = files.fork_in_place()
        outer.write("a", "1")
        inner = outer.fork_in_place()
        inner.write("b", "2")

        assert inner.changed_here() == ("b",)
        outer.merge(inner)
        assert outer.changed_here() == ("a", "b")
        assert [each.path for each in outer.diff_here()] == ["a", "b"]
        files.discard(outer)
        assert files.changed_here() == ()


def test_a_file_changed_in_place_is_named_by_all_its_names(tmp_path: Path):
    """Another name of a file is a way to change it that its path does not tell."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "secret").write_text("s")
    os.link(root / "secret", root / "harmless")
    with HostFilesystem(root) as files:
        view = files.fork_in_place()
        view.write("harmless", "changed")

        assert view.changed_here() == ("harmless", "secret")


def test_what_other_programs_do_is_found(tmp_path: Path):
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "deep/a").write_text("a")
    with HostFilesystem(root) as files:
        view = files.fork_in_place()
        view.expect_external()
        (root / "deep/a").unlink()
        (root / "deep").rmdir()
        (root / "new").write_text("n")

        assert view.changed_here() == ("deep", "deep/a", "new")
        files.discard(view)
    assert (root / "deep/a").read_text() == "a"


def test_only_what_was_changed_is_told_of_a_directory_whose_mode_was(tmp_path: Path):
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "deep/a").write_text("a")
    with HostFilesystem(root) as files:
        view = files.fork_in_place()
        view.run("chmod 700 deep")

        assert view.changed_here() == ("deep",)
