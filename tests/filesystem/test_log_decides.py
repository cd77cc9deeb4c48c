"""The log decides what is committed: after errors, kills, and when the database is damaged."""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import logging
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from trees import look

import weakincentives
from chance import STRIDE
from stored import damage
from weakincentives.errors import FilesystemError, LogDamaged, LogUnavailable
from weakincentives.filesystem import HostFilesystem, Limits, WorkspaceHistory
from weakincentives.log import Log, Operation


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[HostFilesystem]:
    root = tmp_path / "work"
    (root / "d").mkdir(parents=True)
    (root / "a").write_text("first\n")
    (root / "d" / "b").write_text("b\n")
    with HostFilesystem(root, store=tmp_path / "store") as fs:
        yield fs


def opened(fs: HostFilesystem) -> HostFilesystem:
    return HostFilesystem(fs.root, store=fs.store)


def test_a_commit_that_the_log_has_is_kept_whatever_it_says(
    fs: HostFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Log.append

    def fail_after(self: Log, *args: Operation, **options: object) -> Operation:
        append(self, *args, **options)  # pyright: ignore
        raise LogUnavailable("no answer")

    monkeypatch.setattr(Log, "append", fail_after)
    fs.write("a", "second\n")
    fs.delete("d", recursive=True)
    monkeypatch.undo()

    assert [each.paths for each in fs.history()] == [("a",), ("d",)]
    fs.revert_to(fs.history()[0].call_id)
    fs.undo(fs.history()[0])
    assert (fs.read("a"), fs.read("d/b")) == ("first\n", "b\n")


def test_a_commit_that_the_log_has_not_is_rolled_back(
    fs: HostFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = look(fs.root)

    def fail(self: Log, *args: Operation, **options: object) -> Operation:
        raise LogUnavailable("database or disk is full")

    monkeypatch.setattr(Log, "append", fail)
    with pytest.raises(LogUnavailable, match="is full"):
        fs.write("a", "second\n")
    monkeypatch.undo()

    assert look(fs.root) == before
    assert fs.history() == ()


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("reopened", [True, False])
def test_while_the_log_cannot_be_asked_nothing_is_changed(
    fs: HostFilesystem, monkeypatch: pytest.MonkeyPatch, is_committed: bool, reopened: bool
) -> None:
    append = Log.append

    def fail(self: Log, *args: Operation, **options: object) -> Operation:
        if is_committed:
            append(self, *args, **options)  # pyright: ignore
        raise LogUnavailable("disk I/O error")

    def say_nothing(self: Log, *args: object) -> bool:
        raise LogUnavailable("disk I/O error")

    fs.write("d/new", "x\n")
    before = look(fs.root)
    monkeypatch.setattr(Log, "append", fail)
    monkeypatch.setattr(Log, "has", say_nothing)
    with pytest.raises(LogUnavailable):
        fs.write("a", "second\n")
    after = look(fs.root)
    for _ in range(2):
        with pytest.raises(LogUnavailable):
            fs.write("d/b", "other\n")
        assert look(fs.root) == after
    if reopened:
        fs.close()
        with pytest.raises(LogUnavailable, match="is not known"):
            opened(fs)
        assert look(fs.root) == after
    monkeypatch.undo()

    other = opened(fs) if reopened else fs
    with other:
        other.write("c", "goes on\n")
        assert other.read("a") == ("second\n" if is_committed else "first\n")
        assert len(other.history()) == (3 if is_committed else 2)
        other.undo(other.history()[-1])
        if is_committed:
            other.undo(other.history()[1])
        assert look(fs.root)["a"] == before["a"]


class Stopped(BaseException):
    """What a signal handler, a debugger or a time limit raises anywhere."""


def stop_at(number: int, *modules: str) -> Callable[[FrameType, str, object], None]:
    """Raise at one of the calls of functions in some modules."""
    made = itertools.count(1)

    def look_at(frame: FrameType, event: str, _: object) -> None:
        is_call = event == "call" and frame.f_code.co_filename.endswith(modules)
        if is_call and next(made) == number:
            raise Stopped

    return look_at


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is raised in a finalizer is lost."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_whatever_stops_a_commit_it_is_whole_or_nothing(tmp_path: Path) -> None:
    committed = stopped = 0
    for number in itertools.count(1, STRIDE):
        with tempfile.TemporaryDirectory(dir=tmp_path) as place:
            root = Path(place, "work")
            (root / "d").mkdir(parents=True)
            (root / "d" / "b").write_text("b\n")
            before = look(root)
            with HostFilesystem(root, store=Path(place, "store")) as fs:
                sys.setprofile(stop_at(number, "filesystem/history.py", "log/database.py"))
                try:
                    fs.delete("d", recursive=True)
                except Stopped:
                    stopped += 1
                else:
                    assert number > 1
                    break
                finally:
                    sys.setprofile(None)
                assert len(fs.history()) == (look(root) != before)
                committed += len(fs.history())
                fs.write("c", "goes on\n")
                assert fs.undo(*fs.history()) == ()
                assert look(root) == before
    assert 0 < committed < stopped


@pytest.mark.parametrize("of_the_call", [True, False])
def test_a_link_planted_among_displaced_things_is_not_followed(
    fs: HostFilesystem, tmp_path: Path, of_the_call: bool
) -> None:
    fs.delete("d", recursive=True)
    (kept,) = (fs.store / "kept").iterdir()
    (thing,) = kept.iterdir()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / thing.name).mkdir(parents=True)
    (elsewhere / thing.name / "b").write_text("precious")
    place, target = (kept, elsewhere) if of_the_call else (thing, elsewhere / thing.name)
    place.rename(tmp_path / "moved")
    place.symlink_to(target)
    before = look(elsewhere)

    with contextlib.suppress(OSError, FilesystemError):
        told = fs.undo(fs.history()[0])
        assert "could not be restored" in told[0]
    assert not os.path.lexists(fs.root / "d")
    with contextlib.suppress(OSError, FilesystemError):
        WorkspaceHistory(fs.root, store=fs.store).files_at(0).read("d/b")
        raise AssertionError("it was read from elsewhere")
    with contextlib.suppress(OSError):
        fs.prune(Limits(size=0))

    assert look(elsewhere) == before


@pytest.mark.parametrize("place", [0, 40, 4096, 9000])
def test_a_malformed_database_is_set_aside_and_costs_no_file(
    fs: HostFilesystem, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    for number in range(30):
        fs.write("a", f"{number}\n")
    fs.close()
    before = look(fs.root)
    database = fs.store / "log.db"
    data = bytearray(database.read_bytes())
    data[place : place + 400] = b"\xff" * 400
    database.write_bytes(data)

    with caplog.at_level(logging.ERROR), opened(fs) as other:
        assert look(fs.root) == before
        with contextlib.suppress(LogDamaged):  # rolled back, when it is noticed only at the end
            other.write("a", "goes on\n")
        if other.read("a") != "goes on\n":
            assert look(fs.root) == before
            other.write("a", "goes on\n")
        other.undo(other.history()[-1])
        assert other.read("a") == "29\n"
    aside = [
        path for path in (fs.store / "left").glob("*") if path.read_bytes()[:8] == bytes(data[:8])
    ]
    assert bool(aside) == ("a new log begins" in caplog.text)


def test_a_deleted_database_costs_only_the_history(fs: HostFilesystem) -> None:
    fs.write("a", "second\n")
    fs.close()
    before = look(fs.root)
    for path in fs.store.glob("log.db*"):
        path.unlink()

    with opened(fs) as other:
        assert (look(fs.root), other.history()) == (before, ())
        other.write("a", "third\n")
        other.undo(other.history()[-1])
        assert other.read("a") == "second\n"


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_call_whose_row_is_lost_is_named(fs: HostFilesystem, lost: int) -> None:
    for text in ("one\n", "two\n", "three\n"):
        fs.write("a", text)
    fs.close()
    with contextlib.closing(sqlite3.connect(fs.store / "log.db")) as log, log:
        log.execute("DELETE FROM operation WHERE number = ?", (lost,))

    (told,) = WorkspaceHistory(fs.root, store=fs.store).damaged()
    assert told.startswith(f"The record of change {lost} is damaged")
    with opened(fs) as other:
        assert [each.serial for each in other.history()] == [n for n in (1, 2, 3) if n != lost]
        told = other.undo(other.history()[0], force=True)
        is_later = lost > other.history()[0].serial
        assert any(f"change {lost} is damaged" in sentence for sentence in told) == is_later
        other.write("b", "goes on\n")
        assert other.history()[-1].serial == 5
        other.prune(Limits(count=1, newest=0))
        assert [each.serial for each in other.history()] == [5]
    assert WorkspaceHistory(fs.root, store=fs.store).damaged() == ()


@pytest.mark.parametrize("is_deleted", [True, False])
def test_calls_that_the_database_has_lost_are_told_once(
    fs: HostFilesystem, caplog: pytest.LogCaptureFixture, is_deleted: bool
) -> None:
    fs.write("a", "one\n")
    fs.close()
    copy = (fs.store / "log.db").read_bytes()
    with opened(fs) as other:
        other.write("a", "two\n")
        other.write("a", "three\n")
    for path in fs.store.glob("log.db*"):
        path.unlink()
    if not is_deleted:
        (fs.store / "log.db").write_bytes(copy)
    before, first = look(fs.root), 1 if is_deleted else 2

    (told,) = WorkspaceHistory(fs.root, store=fs.store).damaged()
    assert f"has lost its last changes, {first} to 3" in told
    with caplog.at_level(logging.ERROR), opened(fs) as other:
        assert (look(fs.root), len(other.history())) == (before, first - 1)
        other.write("b", "goes on\n")
        assert other.undo(other.history()[-1]) == ()
    assert caplog.text.count(f"{first} to 3") == 1
    assert WorkspaceHistory(fs.root, store=fs.store).damaged() == ()


@pytest.mark.parametrize("page", range(1, 30, 4))
def test_a_page_that_is_lost_costs_no_file_and_is_told(
    fs: HostFilesystem, caplog: pytest.LogCaptureFixture, page: int
) -> None:
    for number in range(11):
        fs.write("a", f"{number}\n" * 50)
    fs.close()
    before, database = look(fs.root), fs.store / "log.db"
    data = bytearray(database.read_bytes())
    data[page * 4096 : (page + 1) * 4096] = bytes(4096)
    database.write_bytes(data[: len(database.read_bytes())])

    with caplog.at_level(logging.ERROR), opened(fs) as other:
        for attempt in range(3):
            with contextlib.suppress(LogDamaged):
                other.history()
            with contextlib.suppress(LogDamaged):
                other.write("a", f"attempt {attempt}\n")
            if other.read("a").startswith("attempt"):
                break
            assert look(fs.root) == before
        assert other.read("a").startswith("attempt")
        assert other.undo(other.history()[-1]) == ()
        assert other.read("a") == "10\n" * 50


def test_what_is_damaged_in_the_log_is_named(fs: HostFilesystem) -> None:
    for text in ("one\n", "two\n"):
        fs.write("a", text)
    damage(fs.store, 1)

    history = WorkspaceHistory(fs.root, store=fs.store)
    assert [each.serial for each in history.calls()] == [2]
    assert [each.startswith("The record of change 1 is damaged") for each in history.damaged()] == [
        True
    ]


def test_nothing_but_its_connection_opens_the_database() -> None:
    """To close another descriptor of it would drop SQLite's locks."""
    package = Path(os.path.dirname(weakincentives.__file__))
    naming: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value == "log.db":
                naming.add(path.relative_to(package).as_posix())
    assert naming == {"filesystem/history.py", "filesystem/prune.py"}
