"""What a filesystem over a real directory adds: going back exactly, at any time, beside others."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trees import look

from weakincentives.core.call import ToolCall
from weakincentives.core.state import Seals
from weakincentives.errors import (
    FilesystemError,
    MergeConflict,
    PathEscapesRoot,
    SnapshotExpired,
    ViewClosed,
    WorkspaceLocked,
)
from weakincentives.filesystem import HostFilesystem
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.journal import Record, read_journal
from weakincentives.filesystem.store import Source, location_of
from weakincentives.filesystem.tree import Tree, exchange

ENTRY = Entry(kind="file", mode=0o644, mtime_ns=1, uid=0, gid=0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    (root / "dir" / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("a\n")
    (root / "dir" / "b.txt").write_text("b\n")
    (root / "dir" / "sub" / "c.txt").write_text("c\n")
    os.link(root / "a.txt", root / "dir" / "same as a")
    (root / "link").symlink_to("dir/b.txt")
    return root


@pytest.fixture
def fs(root: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root) as fs:
        yield fs


def store_of(root: Path) -> Path:
    return location_of(root)


def change_all(fs: HostFilesystem) -> None:
    fs.write("dir/b.txt", "changed")
    fs.write("a.txt", "both names")
    fs.move("dir/sub", "moved/here")
    fs.delete("link")
    fs.write("new/deep/file", "new")
    fs.set_readonly("dir/b.txt")


# In place


def test_discarded_view_leaves_the_same_inodes_and_times(fs: HostFilesystem, root: Path):
    """What was there is put back itself, not a copy of it."""
    before = look(root)
    inodes = {path: (root / path).lstat().st_ino for path in before}
    view = fs.fork_in_place()
    change_all(view)

    assert fs.discard(view) == ()
    assert look(root) == before
    assert {path: (root / path).lstat().st_ino for path in before} == inodes
    assert fs.discard(view) == ()


def test_nested_view_is_a_savepoint(fs: HostFilesystem, root: Path):
    outer = fs.fork_in_place()
    outer.write("dir/b.txt", "outer")
    between = look(root)
    inner = outer.fork_in_place()
    inner.write("dir/b.txt", "inner")
    inner.delete("dir", recursive=True)
    outer.discard(inner)

    assert look(root) == between
    fs.merge(outer)
    assert fs.read("dir/b.txt") == "outer"


def test_file_written_many_times_is_kept_once(fs: HostFilesystem, root: Path):
    before = look(root)
    view = fs.fork_in_place()
    for number in range(50):
        view.write("dir/b.txt", f"{number}")
    kept = [name for name in os.listdir(store_of(root) / "tx") if name != "journal"]

    assert len(kept) == 1
    fs.discard(view)
    assert look(root) == before


def test_operation_that_fails_after_a_rewrite_leaves_the_rewrite(fs: HostFilesystem):
    view = fs.fork_in_place()
    view.write("dir/b.txt", "first")
    view.write("dir/b.txt", "second")
    with pytest.raises(FilesystemError):
        view.write("dir/b.txt/below", "")

    assert view.read("dir/b.txt") == "second"
    fs.discard(view)


def test_what_others_put_into_a_new_directory_is_set_aside_and_named(
    fs: HostFilesystem, root: Path
):
    view = fs.fork_in_place()
    view.write("new/mine", "")
    (root / "new" / "theirs").write_text("not the call's")
    (told,) = fs.discard(view)

    assert "new/theirs" in told
    assert not (root / "new").exists()
    (left,) = (store_of(root) / "left").iterdir()
    assert (left / "theirs").read_text() == "not the call's"


def test_formatter_that_replaces_or_rewrites_a_written_file_is_undone(
    fs: HostFilesystem, root: Path
):
    before = look(root)
    view = fs.fork_in_place()
    view.write("dir/b.txt", "x=1")
    (root / "dir/b.txt").write_text("x = 1\n")
    view.write("dir/sub/c.txt", "y=1")
    (root / "dir/sub/formatted").write_text("y = 1\n")
    os.replace(root / "dir/sub/formatted", root / "dir/sub/c.txt")
    view.move("a.txt", "z.txt")
    (root / "z.txt").write_text("edited where it was moved to")

    assert fs.discard(view) == ()
    assert look(root) == before


def test_direct_change_in_the_thread_of_an_open_call_is_refused_instead_of_hanging(
    fs: HostFilesystem,
):
    with fs.gate:
        view = fs.fork_in_place()
        with pytest.raises(FilesystemError, match="through its view"):
            fs.write("a.txt", "")
        fs.discard(view)


def test_a_view_within_one_that_has_ended_changes_nothing(fs: HostFilesystem, root: Path):
    """As of a nested call, when the handler that made it was given up."""
    before = look(root)
    with fs.gate:
        view = fs.fork_in_place()
        inner = view.fork_in_place()
        inner.write("inner.txt", "x")
        fs.discard(view)
        with pytest.raises(ViewClosed, match="discarded"):
            inner.write("late.txt", "x")
        assert view.discard(inner) == ()

    assert look(root) == before


def test_direct_change_of_another_thread_waits_for_the_call(fs: HostFilesystem):
    with fs.gate:
        view = fs.fork_in_place()
        view.write("a.txt", "the call's")
        writer = threading.Thread(target=lambda: fs.append("a.txt", ", then mine"))
        writer.start()
        fs.merge(view)
    writer.join()

    assert fs.read("a.txt") == "the call's, then mine"


def test_reading_never_touches_the_store(fs: HostFilesystem, root: Path):
    view = fs.fork_in_place()
    view.read("dir/b.txt")
    view.glob("**/*")
    fs.discard(view)

    assert os.listdir(store_of(root) / "tx") == []


def test_sealed_view_refuses_and_can_still_be_discarded(fs: HostFilesystem, root: Path):
    before = look(root)
    view = fs.fork_in_place()
    view.write("a.txt", "changed")
    view.seal("the call has ended")
    with pytest.raises(ViewClosed, match="the call has ended"):
        view.write("a.txt", "too late")
    fs.discard(view)

    assert look(root) == before


# Snapshots of the directory itself


def test_snapshot_goes_back_over_committed_calls(fs: HostFilesystem, root: Path):
    before = look(root)
    token = fs.snapshot()
    change_all(fs)
    later = fs.snapshot()
    fs.restore(token)

    assert look(root) == before
    with pytest.raises(SnapshotExpired):
        fs.restore(later)
    fs.write("a.txt", "again")
    fs.restore(token)
    assert look(root) == before


def test_history_that_a_snapshot_needs_is_kept_whatever_the_limit(root: Path):
    with HostFilesystem(root, history_limit=0) as fs:
        token = fs.snapshot()
        fs.write("dir/b.txt", "x" * 10_000)
        fs.write("dir/b.txt", "y" * 10_000)
        fs.restore(token)

        assert fs.read("dir/b.txt") == "b\n"


# History


def committed(fs: HostFilesystem, call_id: str, **files: str) -> None:
    view = fs.fork_in_place()
    view.call = ToolCall("edit", {}, call_id)
    for path, content in files.items():
        view.write(path, content)
    fs.merge(view)


def test_history_names_calls_and_paths(fs: HostFilesystem):
    committed(fs, "call_1", one="1")
    committed(fs, "call_2", one="2", two="2")
    fs.write("direct", "")
    first, second, third = fs.history()

    assert (first.call_id, first.tool, first.paths) == ("call_1", "edit", ("one",))
    assert second.paths == ("one", "two")
    assert (third.tool, third.paths) == ("", ("direct",))
    assert first.serial < second.serial < third.serial
    assert first.time <= third.time


def test_history_is_there_when_the_directory_is_opened_again(root: Path):
    with HostFilesystem(root) as fs:
        committed(fs, "call_1", one="1")
        committed(fs, "call_2", one="2")
    with HostFilesystem(root) as fs:
        assert [entry.call_id for entry in fs.history()] == ["call_1", "call_2"]
        assert fs.revert_to("call_1") == ()
        assert fs.read("one") == "1"


def test_reverting_can_be_reverted(fs: HostFilesystem):
    committed(fs, "call_1", one="1")
    committed(fs, "call_2", one="2")
    fs.revert_to("call_1")
    fs.revert_to("call_2")

    assert fs.read("one") == "2"
    assert len(fs.history()) == 4


def test_diff_shows_what_a_call_changed_and_not_what_came_later(fs: HostFilesystem):
    committed(fs, "call_1", one="old\nsame\n")
    committed(fs, "call_2", one="new\nsame\n")
    committed(fs, "call_3", one="newest\n")
    lines = fs.diff("call_2").splitlines()

    assert "-old" in lines
    assert "+new" in lines
    assert " same" in lines
    assert "newest" not in fs.diff("call_2")
    assert "/dev/null" in fs.diff("call_1")


def test_unknown_call_has_no_diff(fs: HostFilesystem):
    with pytest.raises(LookupError, match="call_9"):
        fs.diff("call_9")


def test_same_content_is_kept_once(root: Path):
    content = "x" * 50_000
    (root / "big").write_text(content)
    with HostFilesystem(root) as fs:
        for _ in range(5):
            fs.write("big", "small")
            fs.write("big", content)
        objects = [path for path in (store_of(root) / "objects").rglob("*") if path.is_file()]

        assert sorted(path.stat().st_size for path in objects) == [len("small"), len(content)]


# Private views


def test_private_view_goes_on_seeing_what_was_there(fs: HostFilesystem):
    """Whatever is committed meanwhile: changed, moved, deleted or made."""
    view = fs.fork()
    change_all(fs)

    assert view.read("dir/b.txt") == "b\n"
    assert view.read("a.txt") == "a\n"
    assert view.read("dir/sub/c.txt") == "c\n"
    assert view.read("link") == "b\n"
    assert not view.exists("new")
    assert [entry.path for entry in view.list()] == ["a.txt", "dir", "link"]
    assert view.glob("**/*.txt") == ("a.txt", "dir/b.txt", "dir/sub/c.txt")
    with pytest.raises(MergeConflict):
        fs.merge(view)


def test_private_view_is_merged_as_one_call(fs: HostFilesystem, root: Path):
    before = look(root)
    view = fs.fork()
    view.call = ToolCall("edit", {}, "call_1")
    change_all(view)
    assert look(root) == before
    fs.merge(view)

    (entry,) = fs.history()
    assert entry.call_id == "call_1"
    assert (root / "dir/same as a").read_text() == "both names"
    assert not (root / "dir/b.txt").stat().st_mode & stat.S_IWUSR


def test_large_content_of_a_private_view_is_gone_with_it(fs: HostFilesystem, root: Path):
    view = fs.fork()
    view.write_bytes("big", bytes(1 << 20))
    views = store_of(root) / "open"
    assert [path.stat().st_size for path in views.glob("*/views/*/*")] == [1 << 20]
    fs.discard(view)

    assert not list(views.glob("*/views/*"))


# Killed processes


KILLED = """
import os, signal, sys
from weakincentives.filesystem import HostFilesystem
fs = HostFilesystem(sys.argv[1])
fs.write("kept", "committed")
view = fs.fork_in_place()
view.write("dir/b.txt", "changed")
view.write("a.txt", "both names")
view.delete("dir/sub", recursive=True)
view.move("kept", "gone")
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_and_kill(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(root)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_killed_call_is_undone_when_the_directory_is_opened_again(root: Path):
    before = look(root)
    run_and_kill(root)
    with HostFilesystem(root) as fs:
        assert fs.recovered == ()
        assert fs.read("kept") == "committed"
        fs.delete("kept")
    after = look(root)

    assert {path: entry._replace(modified=0) for path, entry in after.items()} == {
        path: entry._replace(modified=0) for path, entry in before.items()
    }


def test_torn_record_is_no_record(tmp_path: Path):
    seals = Seals("journal of a test")
    journal = tmp_path / "journal"

    def line(place: int) -> bytes:
        return seals.sealed(Record(op="was", path=("a",)).encode(), place) + b"\n"

    size = len(line(0))

    def read(data: bytes) -> tuple[int, str]:
        journal.write_bytes(data)
        records, damage = read_journal(journal, seals)
        return len(records), damage

    assert read(line(0) + line(size)) == (2, "whole")
    assert read(line(0) + line(size)[:-5]) == (1, "short")
    assert read(line(0) + b"damage\n") == (1, "torn")
    assert read(line(0) + b"damage\n" + line(size + 7)) == (1, "broken")
    # One that lies elsewhere than it was written is none: something was taken out, or put in.
    assert read(line(0) + line(0)) == (1, "torn")
    assert read(line(size) + line(0)) == (0, "torn")
    assert read(line(0)[:-1] + b" \n") == (0, "torn")


@pytest.mark.parametrize(
    "changed",
    [
        {"saved": "../../etc"},
        {"saved": "journal"},
        {"saved": ""},
        {"source": Source("/etc/passwd")},
        {"path": ("..", "a")},
        {"path": ("a", "", "b")},
        {"path": ("a\0b",)},
        {"origin": (".",)},
        {"scratch": ("..",)},
        {"twin": ("", "etc")},
        {"times": ((("..",), 0),)},
        {"before": ENTRY._replace(digest="ab")},
        {"before": ENTRY._replace(digest="../" * 20 + "a" * 4)},
        {"before": ENTRY._replace(digest="A" * 64)},
    ],
)
def test_a_name_that_leads_elsewhere_is_no_name_even_under_a_seal(
    tmp_path: Path, changed: dict[str, Any]
):
    seals = Seals("journal of a test")
    record = Record(**{"op": "was", "path": ("a",), **changed})
    (tmp_path / "journal").write_bytes(seals.sealed(record.encode(), 0) + b"\n")

    assert read_journal(tmp_path / "journal", seals) == ([], "torn")


# One process at a time


def test_second_filesystem_in_this_process_is_refused_and_can_wait(fs: HostFilesystem, root: Path):
    with pytest.raises(WorkspaceLocked, match=str(os.getpid())) as refused:
        HostFilesystem(root)
    assert refused.value.pid == os.getpid()
    opened: list[HostFilesystem] = []
    waiting = threading.Thread(target=lambda: opened.append(HostFilesystem(root, wait=60)))
    waiting.start()
    fs.close()
    waiting.join()

    opened[0].write("a.txt", "mine now")
    opened[0].close()


def test_forgotten_filesystem_lets_go_of_the_directory(root: Path):
    HostFilesystem(root)
    HostFilesystem(root).close()


def test_closed_filesystem_says_so(fs: HostFilesystem):
    fs.close()
    fs.close()
    with pytest.raises(ViewClosed, match="closed"):
        fs.write("a.txt", "")
    with pytest.raises(ViewClosed, match="closed"):
        fs.read("a.txt")


def test_store_inside_the_directory_or_of_another_is_refused(root: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="inside"):
        HostFilesystem(root, store=root / "store")
    with HostFilesystem(root, store=tmp_path / "store"):
        pass
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="belongs to"):
        HostFilesystem(tmp_path / "other", store=tmp_path / "store")


# Paths


@pytest.fixture(params=["openat2", "walk"])
def tree(request: pytest.FixtureRequest, root: Path) -> Iterator[Tree]:
    tree = Tree(root, openat2=request.param == "openat2")
    yield tree
    tree.close()


def test_links_are_never_followed_by_the_kernel(tree: Tree, root: Path):
    (root / "to_dir").symlink_to("dir")
    for parts in [("link",), ("to_dir", "b.txt"), ("to_dir", "sub", "c.txt")]:
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            tree.read(parts)


def test_links_are_resolved_below_the_root(tree: Tree, root: Path, tmp_path: Path):
    (root / "absolute").symlink_to(root / "dir")
    (root / "dir" / "up").symlink_to("../a.txt")
    (root / "loop").symlink_to("loop")
    (root / "out").symlink_to(tmp_path)

    assert tree.resolve(("absolute", "sub", "c.txt")) == ("dir", "sub", "c.txt")
    assert tree.resolve(("absolute", "up")) == ("a.txt",)
    assert tree.resolve(("link",), follow=False) == ("link",)
    with pytest.raises(FilesystemError, match="circle"):
        tree.resolve(("loop",))
    with pytest.raises(PathEscapesRoot):
        tree.resolve(("out", "x"))


def test_two_names_change_places(tree: Tree, root: Path):
    (root / "other").write_text("other")
    if exchange(tree.fd, "other", tree.fd, "a.txt"):
        assert (root / "a.txt").read_text() == "other"
        assert (root / "dir/same as a").stat().st_ino == (root / "other").stat().st_ino


def test_rollback_is_exact_where_names_cannot_change_places(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("weakincentives.filesystem.tree._libc", lambda *_: None)
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        change_all(view)
        fs.discard(view)

    assert look(root) == before


@pytest.mark.parametrize("durability", ["fast", "safe"])
def test_both_kinds_of_durability_keep_and_undo(root: Path, durability):
    before = look(root)
    with HostFilesystem(root, durability=durability) as fs:
        view = fs.fork_in_place()
        change_all(view)
        fs.discard(view)
        assert look(root) == before
        change_all(fs)
        assert fs.read("moved/here/c.txt") == "c\n"


def test_rollback_that_cannot_be_complete_is_logged(
    fs: HostFilesystem, root: Path, caplog: pytest.LogCaptureFixture
):
    view = fs.fork_in_place()
    view.move("dir/sub", "moved")
    (root / "moved").rename(root / "elsewhere")
    with caplog.at_level(logging.ERROR, "weakincentives.filesystem"):
        (told,) = fs.discard(view)

    assert "moved" in told
    assert told in caplog.text
