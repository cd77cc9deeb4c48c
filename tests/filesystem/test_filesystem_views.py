"""Private views of a filesystem: what they see, when they merge, and when they are closed."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)
from trees import ON_DISK, filesystem

from weakincentives.core.call import transaction_under_way
from weakincentives.core.clock import FakeClock
from weakincentives.errors import (
    AlreadyExists,
    FilesystemError,
    MergeConflict,
    NoSuchFile,
    NotADirectory,
    NotAFile,
    ReadOnlyFile,
    ReadOnlyView,
    ViewClosed,
)
from weakincentives.filesystem import MemoryFilesystem


def tree(fs):
    """Every path with its content; None stands for a directory."""
    found, pending = {}, ["."]
    while pending:
        for entry in fs.list(pending.pop()):
            if entry.kind == "directory":
                found[entry.path] = None
                pending.append(entry.path)
            else:
                found[entry.path] = fs.read_bytes(entry.path), entry.readonly
    return found


@pytest.fixture
def fs(make):
    return make({"a.txt": "a", "b.txt": "b", "dir/c.txt": "c"})


# What a view sees


def test_view_and_parent_do_not_see_each_other(fs):
    view = fs.fork()

    view.write("a.txt", "view")
    fs.write("b.txt", "parent")

    assert (fs.read("a.txt"), fs.read("b.txt")) == ("a", "parent")
    assert (view.read("a.txt"), view.read("b.txt")) == ("view", "b")


def test_view_keeps_the_prefix(make):
    view = make({"/srv/a": "x"}, root="/srv").fork()

    view.write("/srv/b", "y")

    assert view.read("/srv/a") == "x"
    assert view.read("b") == "y"


# Merging


def test_merge_into_an_unchanged_parent_takes_the_view_as_it_is(fs):
    view = fs.fork()
    view.write("a.txt", "new")
    view.mkdir("made")
    view.move("dir", "moved")

    fs.merge(view)

    assert tree(fs) == tree(view)


def test_changes_of_different_files_both_stay(fs):
    view = fs.fork()
    view.write("a.txt", "view")
    view.delete("dir/c.txt")
    fs.write("b.txt", "parent")
    fs.write("dir/d.txt", "parent")

    fs.merge(view)

    assert tree(fs) == {
        "a.txt": (b"view", False),
        "b.txt": (b"parent", False),
        "dir": None,
        "dir/d.txt": (b"parent", False),
    }


def test_files_made_in_a_directory_that_both_made_do_not_conflict(fs):
    view = fs.fork()
    view.write("new/deep/x", "view")
    fs.write("new/deep/y", "parent")

    fs.merge(view)

    assert fs.glob("new/**") == ("new/deep/x", "new/deep/y")


def test_directory_that_both_made_does_not_conflict(fs):
    view = fs.fork()
    view.mkdir("out")
    view.write("out/x", "")
    fs.mkdir("out")
    fs.write("out/y", "")

    fs.merge(view)

    assert fs.glob("out/**") == ("out/x", "out/y")


def test_seeing_that_a_directory_exists_does_not_conflict_with_changes_in_it(fs):
    view = fs.fork()
    assert view.exists("dir")
    fs.write("dir/d.txt", "")

    fs.merge(view)

    view = fs.fork()
    assert view.exists("dir")
    fs.delete("dir", recursive=True)
    with pytest.raises(MergeConflict):
        fs.merge(view)


def test_directory_of_a_file_made_and_deleted_again_stays(fs):
    view = fs.fork()
    view.write("new/x", "")
    view.delete("new/x")
    fs.write("b.txt", "parent")

    fs.merge(view)

    assert fs.stat("new").kind == "directory"


def test_deleted_directory_made_again_holds_only_what_is_new(fs):
    view = fs.fork()
    view.delete("dir", recursive=True)
    view.write("dir/x", "")
    fs.write("b.txt", "parent")

    fs.merge(view)

    assert fs.glob("dir/**") == ("dir/x",)


def test_file_and_directory_can_change_places(fs):
    view = fs.fork()
    view.delete("a.txt")
    view.write("a.txt/inner", "")
    view.delete("dir", recursive=True)
    view.write("dir", "now a file")
    fs.write("b.txt", "parent")

    fs.merge(view)

    assert fs.glob("**") == ("a.txt/inner", "b.txt", "dir")


OBSERVATIONS = {
    "read": lambda view: view.read("dir/c.txt"),
    "read_bytes": lambda view: view.read_bytes("dir/c.txt"),
    "stat": lambda view: view.stat("dir/c.txt"),
    "exists": lambda view: view.exists("dir/c.txt"),
    "is_readonly": lambda view: view.is_readonly("dir/c.txt"),
    "list": lambda view: view.list("dir"),
    "list root": lambda view: view.list(),
    "glob": lambda view: view.glob("*.py"),
    "grep": lambda view: view.grep("x", "dir"),
    "search": lambda view: view.search("q"),
    "copy": lambda view: view.copy("dir", "copied"),
    "write": lambda view: view.write("dir/c.txt", "mine"),
    "append": lambda view: view.append("dir/c.txt", "mine"),
    "delete": lambda view: view.delete("dir", recursive=True),
    "move": lambda view: view.move("dir/c.txt", "elsewhere"),
    "set_readonly": lambda view: view.set_readonly("dir/c.txt"),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.parametrize("change", ["write", "delete"])
def test_what_the_view_read_or_wrote_must_not_have_changed(fs, name, change):
    view = fs.fork()
    view.write("other.txt", "mine")
    OBSERVATIONS[name](view)
    if change == "write":
        fs.write("dir/c.txt", "theirs")
    else:
        fs.delete("dir/c.txt")
    before = tree(fs)

    with pytest.raises(MergeConflict) as conflict:
        fs.merge(view)

    assert set(conflict.value.paths) <= {"dir/c.txt", "dir", "."}
    assert conflict.value.paths[0] in str(conflict.value)
    assert tree(fs) == before


@pytest.mark.parametrize("operation", ["exists", "read"])
def test_missing_file_that_was_looked_for_must_still_be_missing(fs, operation):
    view = fs.fork()
    with contextlib.suppress(NoSuchFile):
        getattr(view, operation)("new/x")

    fs.write("new/y", "another file")
    fs.merge(view)

    fs.write("new/x", "the file")
    with pytest.raises(MergeConflict, match="new/x"):
        fs.merge(view)


def test_file_that_barred_the_way_must_still_bar_it(fs):
    view = fs.fork()
    with pytest.raises(NotADirectory):
        view.mkdir("a.txt/x/y")
    fs.delete("a.txt")

    with pytest.raises(MergeConflict):
        fs.merge(view)


def test_file_that_barred_the_way_and_is_now_at_its_end_is_a_change(fs):
    view = fs.fork()
    with pytest.raises(NotADirectory):
        view.read("a.txt/x")
    fs.move("a.txt", "aside")
    fs.move("aside", "a.txt/x")

    with pytest.raises(MergeConflict):
        fs.merge(view)


def test_directory_cannot_be_made_where_a_file_has_come_to_be(fs):
    view = fs.fork()
    view.mkdir("new/inner")
    fs.write("new", "a file")

    with pytest.raises(MergeConflict, match="new/inner"):
        fs.merge(view)


def test_change_taken_back_is_no_conflict(fs):
    before = fs.snapshot()
    view = fs.fork()
    view.read("a.txt")
    view.write("b.txt", "mine")
    fs.write("a.txt", "for a moment")
    fs.restore(before)
    fs.write("new", "")

    fs.merge(view)

    assert fs.read("b.txt") == "mine"


def test_mark_that_was_there_already_is_no_conflict(fs):
    view, other = fs.fork(), fs.fork()
    view.set_readonly("a.txt", readonly=False)
    other.append("a.txt", "more")
    fs.merge(view)

    fs.merge(other)

    assert fs.read("a.txt") == "amore"


def test_conflicts_can_be_asked_for_before_merging(fs):
    view = fs.fork()
    view.read("a.txt")
    view.write("b.txt", "mine")

    fs.check_conflicts(view)
    assert fs.read("b.txt") == "b"

    fs.write("a.txt", "new")
    with pytest.raises(MergeConflict, match=r"a\.txt"):
        fs.check_conflicts(view)
    with pytest.raises(ValueError, match="forked from this"):
        fs.check_conflicts(view.fork())


def test_view_that_changed_nothing_conflicts_when_what_it_read_is_stale(fs):
    view = fs.fork()
    view.read("a.txt")
    fs.write("a.txt", "new")

    with pytest.raises(MergeConflict):
        fs.merge(view)


def test_second_of_two_views_that_changed_one_file_conflicts(fs):
    first, second = fs.fork(), fs.fork()
    first.append("a.txt", "1")
    second.append("a.txt", "2")

    fs.merge(first)
    with pytest.raises(MergeConflict, match=r"a\.txt"):
        fs.merge(second)

    assert fs.read("a.txt") == "a1"


@pytest.mark.parametrize(
    "depend",
    [
        lambda view: view.read("dir/c.txt"),
        lambda view: view.append("dir/c.txt", "more"),
        lambda view: view.list("dir"),
        lambda view: view.glob("**/*"),
        lambda view: view.copy("dir", "copied"),
    ],
    ids=["read", "append", "list", "glob", "copy"],
)
def test_view_that_depends_on_a_directory_which_was_replaced_conflicts(fs, depend):
    view, unconcerned = fs.fork(), fs.fork()
    depend(view)
    assert unconcerned.exists("dir")
    fs.delete("dir", recursive=True)
    fs.mkdir("dir")

    fs.merge(unconcerned)
    with pytest.raises(MergeConflict):
        fs.merge(view)


def test_view_of_a_view_that_went_back_conflicts_where_that_made_a_difference(fs):
    token = fs.snapshot()
    fs.write("a.txt", "new")
    view = fs.fork()
    stale, unconcerned = view.fork(), view.fork()
    stale.read("a.txt")
    unconcerned.read("b.txt")

    view.restore(token)

    view.merge(unconcerned)
    with pytest.raises(MergeConflict, match=r"a\.txt"):
        view.merge(stale)


def test_only_an_own_view_can_be_merged(make, fs):
    view = fs.fork()
    for stranger in (make(), make().fork(), view.fork(), fs):
        with pytest.raises(ValueError, match="forked from this"):
            fs.merge(stranger)


def test_views_of_views_hand_on_what_they_touched(fs):
    outer = fs.fork()
    inner = outer.fork()
    inner.read("a.txt")
    inner.write("x", "inner")
    outer.merge(inner)
    assert outer.read("x") == "inner"
    fs.write("b.txt", "unrelated")
    fs.check_conflicts(outer)
    fs.write("a.txt", "changed since the inner view read it")
    with pytest.raises(MergeConflict, match=r"a\.txt"):
        fs.merge(outer)

    outer = fs.fork()
    inner = outer.fork()
    inner.read("a.txt")
    outer.merge(inner)
    fs.write("a.txt", "changed")
    with pytest.raises(MergeConflict):
        fs.merge(outer)


# Going back inside views


def test_restoring_in_a_view_takes_its_changes_back(fs):
    view = fs.fork()
    token = view.snapshot()
    view.write("new/x", "")
    view.write("a.txt", "mine")
    view.restore(token)
    view.write("y", "kept")
    fs.write("b.txt", "parent")

    fs.merge(view)

    assert fs.glob("**") == ("a.txt", "b.txt", "dir/c.txt", "y")
    assert fs.read("a.txt") == "a"
    assert not fs.exists("new")


def test_directory_of_a_write_taken_back_is_not_made_again(fs):
    view = fs.fork()
    token = view.snapshot()
    view.write("dir/x", "")
    view.restore(token)
    fs.delete("dir", recursive=True)

    fs.merge(view)

    assert not fs.exists("dir")


def test_snapshot_taken_before_can_be_restored_in_a_view_and_merged(fs):
    checkpoint = fs.snapshot()
    fs.write("a.txt", "later")
    fs.write("new/x", "later")
    view = fs.fork()
    view.restore(checkpoint)
    assert view.read("a.txt") == "a"
    assert fs.read("a.txt") == "later"

    bystander = fs.fork()
    bystander.write("z", "")
    fs.merge(bystander)
    with pytest.raises(MergeConflict):
        fs.merge(view)

    view = fs.fork()
    view.restore(checkpoint)
    fs.merge(view)
    assert fs.glob("**") == ("a.txt", "b.txt", "dir/c.txt")


def test_snapshot_taken_in_a_view_can_be_restored_in_the_next(fs):
    first = fs.fork()
    first.write("x", "1")
    token = first.snapshot()
    fs.merge(first)
    second = fs.fork()
    second.write("x", "2")

    second.restore(token)
    fs.merge(second)

    assert fs.read("x") == "1"


# Closed and read-only views

CHANGES = {
    "write": lambda fs: fs.write("a.txt", ""),
    "write_bytes": lambda fs: fs.write_bytes("a.txt", b""),
    "append": lambda fs: fs.append("a.txt", "x"),
    "mkdir": lambda fs: fs.mkdir("new"),
    "mkdir again": lambda fs: fs.mkdir("dir"),
    "move": lambda fs: fs.move("a.txt", "z"),
    "copy": lambda fs: fs.copy("a.txt", "z"),
    "delete": lambda fs: fs.delete("a.txt"),
    "set_readonly": lambda fs: fs.set_readonly("a.txt"),
    "restore": lambda fs: fs.restore(fs.snapshot()),
    "bad path": lambda fs: fs.write("../a", ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_sealed_view_refuses_and_logs_every_change(fs, change, caplog):
    view = fs.fork()
    view.write("b.txt", "in time")
    view.seal("the call has ended")
    view.seal("a second reason")
    before = tree(view)

    with (
        caplog.at_level(logging.ERROR, "weakincentives.filesystem"),
        pytest.raises(ViewClosed, match=r"^the call has ended$"),
    ):
        CHANGES[change](view)

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the call has ended" in caplog.text
    assert tree(view) == before


def test_sealed_view_can_be_read_and_merged(fs):
    view = fs.fork()
    view.write("b.txt", "in time")
    view.seal("over")

    assert view.read("b.txt") == "in time"
    assert view.grep("in time")
    fs.merge(view)
    assert fs.read("b.txt") == "in time"


@pytest.mark.parametrize("change", CHANGES)
def test_read_only_view_refuses_every_change_with_its_text(fs, change):
    view = fs.fork()
    view.read_only = "search may not change files"
    before = tree(view)

    with pytest.raises(ReadOnlyView, match=r"^search may not change files$"):
        CHANGES[change](view)

    assert tree(view) == before
    fs.merge(view)


def test_changes_cannot_be_merged_into_a_sealed_or_read_only_view(fs):
    outer = fs.fork()
    changed, unchanged = outer.fork(), outer.fork()
    changed.write("a.txt", "x")
    unchanged.read("a.txt")

    outer.read_only = "reads only"
    outer.merge(unchanged)
    with pytest.raises(ReadOnlyView):
        outer.merge(changed)
    outer.read_only = None
    outer.seal("over")
    with pytest.raises(ViewClosed):
        outer.merge(changed)

    assert outer.read("a.txt") == "a"


def test_fork_of_a_sealed_view_is_open(fs):
    view = fs.fork()
    view.seal("over")
    view.read_only = "no"

    inner = view.fork()
    inner.write("a.txt", "x")

    assert inner.read("a.txt") == "x"


def test_runtime_can_undo_on_a_sealed_view(fs):
    view = fs.fork()
    token = view.snapshot_here()
    view.write("a.txt", "half done")
    view.seal("timed out")

    view.restore_here(token)

    assert view.read("a.txt") == "a"


def test_nothing_slips_past_the_seal(make):
    """A thread that writes all the time changes nothing once seal() has returned."""
    for _ in range(30):
        view = make().fork()
        started, refused = threading.Event(), []

        def work(view=view, started=started, refused=refused):
            try:
                for number in itertools.count():
                    view.write("count", str(number))
                    started.set()
            except ViewClosed:
                refused.append(number)

        worker = threading.Thread(target=work)
        worker.start()
        started.wait()
        view.seal("over")
        at_the_seal = view.read("count")
        worker.join()

        assert view.read("count") == at_the_seal
        assert refused == [int(at_the_seal) + 1]


# The call under way


class FakeTransaction:
    """Stands for a call that works on ``view`` in place of ``outer``."""

    call = None

    def __init__(self, outer, view):
        self.outer, self.ours, self.views = outer, view, {}

    def view(self, target):
        return self.ours if target is self.outer else target


def during_call(outer, view, handler):
    def run():
        transaction_under_way.set(FakeTransaction(outer, view))
        return handler()

    return contextvars.copy_context().run(run)


def test_kept_reference_reaches_the_view_of_the_call_under_way(fs):
    view = fs.fork()
    view.write("a.txt", "view")

    def handler():
        assert fs.read("a.txt") == "view"
        assert fs.glob("*") == ("a.txt", "b.txt")
        token = fs.snapshot()
        for name, change in CHANGES.items():
            if name != "bad path":
                fs.restore(token)
                change(fs)
        fs.restore(token)
        fs.write("b.txt", "through the outer one")

    before = tree(fs)
    during_call(fs, view, handler)

    assert tree(fs) == before
    assert view.read("b.txt") == "through the outer one"


def test_fork_merge_seal_and_undo_act_on_the_object_itself(fs):
    view = fs.fork()
    view.write("a.txt", "view")

    def runtime():
        token = fs.snapshot_here()
        assert fs.fork().read("a.txt") == "a"
        fs.merge(view)
        fs.restore_here(token)
        fs.seal("closed")

    during_call(fs, view, runtime)

    assert fs.read("a.txt") == "a"
    with pytest.raises(ViewClosed):
        fs.write("a.txt", "")
    view.write("a.txt", "still open")


# Random operations. The model is a plain dict from path to (content, read-only), or None for a
# directory; it knows nothing of trees, views or snapshots.


class Model:
    def __init__(self, entries=()):
        self.entries = dict(entries)

    def at(self, path):
        """Return what is there; raise as a filesystem does when there is nothing."""
        if path == ".":
            return None
        self.check_way(path)
        if path not in self.entries:
            raise NoSuchFile(path)
        return self.entries[path]

    def check_way(self, path):
        parts = path.split("/")
        for end in range(1, len(parts)):
            if self.entries.get("/".join(parts[:end])) is not None:
                raise NotADirectory(path)

    def below(self, path):
        return {p: e for p, e in self.entries.items() if path == "." or p.startswith(f"{path}/")}

    def put(self, path, entry):
        parts = path.split("/")
        for end in range(1, len(parts)):
            self.entries["/".join(parts[:end])] = None
        self.entries[path] = entry

    def drop(self, path):
        for gone in (path, *self.below(path)):
            del self.entries[gone]

    def locked(self, path):
        return any(e is not None and e[1] for e in [self.entries[path], *self.below(path).values()])

    def changeable(self, path):
        try:
            entry = self.at(path)
        except NoSuchFile:
            return b""
        if entry is None:
            raise NotAFile(path)
        if entry[1]:
            raise ReadOnlyFile(path)
        return entry[0]

    def read(self, path):
        entry = self.at(path)
        if entry is None:
            raise NotAFile(path)
        return entry[0].decode()

    def exists(self, path):
        try:
            self.at(path)
        except FilesystemError:
            return False
        return True

    def names(self, path):
        if self.at(path) is not None:
            raise NotADirectory(path)
        prefix = "" if path == "." else f"{path}/"
        return sorted(p for p in self.below(path) if "/" not in p.removeprefix(prefix))

    def files(self, path):
        if self.at(path) is not None:
            raise NotADirectory(path)
        return sorted(p for p, e in self.below(path).items() if e is not None)

    def write(self, path, content):
        self.changeable(path)
        self.put(path, (content.encode(), False))

    def append(self, path, content):
        self.put(path, (self.changeable(path) + content.encode(), False))

    def mkdir(self, path):
        if path == ".":
            return
        self.check_way(path)
        if self.entries.get(path) is not None:
            raise NotADirectory(path)
        self.put(path, None)

    def set_readonly(self, path, readonly):
        entry = self.at(path)
        if entry is None:
            raise NotAFile(path)
        self.entries[path] = (entry[0], readonly)

    def delete(self, path, recursive):
        if path == ".":
            raise FilesystemError(path)
        if self.at(path) is None and self.below(path) and not recursive:
            raise FilesystemError(path)
        if self.locked(path):
            raise ReadOnlyFile(path)
        self.drop(path)

    def transfer(self, source, destination, overwrite, keep):
        if source == ".":
            raise FilesystemError(source)
        entry = self.at(source)
        if destination != ".":
            self.check_way(destination)
        if destination.startswith(f"{source}/"):
            raise FilesystemError(destination)
        if self.exists(destination):
            if not overwrite:
                raise AlreadyExists(destination)
            if destination == "." or source.startswith(f"{destination}/"):
                raise FilesystemError(destination)
            there = self.at(destination)
            if entry is not None and there is None:
                raise NotAFile(destination)
            if entry is None and there is not None:
                raise NotADirectory(destination)
            if self.locked(destination):
                raise ReadOnlyFile(destination)
        if not keep and self.locked(source):
            raise ReadOnlyFile(source)
        moved = {p.removeprefix(source): e for p, e in self.below(source).items()}
        if not keep:
            self.drop(source)
        if destination in self.entries:
            self.drop(destination)
        self.put(destination, entry)
        for rest, below in moved.items():
            self.put(destination + rest, below)


APPLY = {
    "read": lambda fs, path: fs.read(path),
    "exists": lambda fs, path: fs.exists(path),
    "list": lambda fs, path: [entry.path for entry in fs.list(path)],
    "glob": lambda fs, path: [*fs.glob("**/*", path)],
    "write": lambda fs, path, content: fs.write(path, content),
    "append": lambda fs, path, content: fs.append(path, content),
    "mkdir": lambda fs, path: fs.mkdir(path),
    "set_readonly": lambda fs, path, readonly: fs.set_readonly(path, readonly),
    "delete": lambda fs, path, recursive: fs.delete(path, recursive=recursive),
    "move": lambda fs, a, b, overwrite: fs.move(a, b, overwrite=overwrite),
    "copy": lambda fs, a, b, overwrite: fs.copy(a, b, overwrite=overwrite),
}
APPLY_TO_MODEL = {
    **APPLY,
    "list": lambda model, path: model.names(path),
    "glob": lambda model, path: model.files(path),
    "delete": lambda model, path, recursive: model.delete(path, recursive),
    "move": lambda model, a, b, overwrite: model.transfer(a, b, overwrite, keep=False),
    "copy": lambda model, a, b, overwrite: model.transfer(a, b, overwrite, keep=True),
}


def outcome(table, target, operation):
    name, *args = operation
    try:
        return table[name](target, *args)
    except FilesystemError as refusal:
        return type(refusal)


# Reading a directory, or the root, makes nearly every merge a conflict: it has to be rare here.
PATHS = st.sampled_from(["a", "b", "a/a", "a/b", "b/a", "b/b", "a/b/a", "a/b/b", "c", "c/a"])
CONTENT = st.sampled_from(["", "1", "2"])
WRITING = st.tuples(st.just("write"), PATHS, CONTENT)
CHANGING = st.one_of(
    WRITING,
    st.tuples(st.just("delete"), PATHS, st.just(True)),
    st.tuples(st.just("mkdir"), PATHS),
    st.tuples(st.sampled_from(["move", "copy"]), PATHS, PATHS, st.booleans()),
)
OPERATIONS = st.one_of(
    CHANGING,
    CHANGING,
    st.tuples(st.sampled_from(["read", "exists", "list", "glob"]), PATHS),
    st.tuples(st.sampled_from(["list", "glob", "exists", "mkdir"]), st.just(".")),
    st.tuples(st.just("append"), PATHS, CONTENT),
    st.tuples(st.sampled_from(["set_readonly", "delete"]), PATHS, st.booleans()),
    st.tuples(st.sampled_from(["move", "copy"]), PATHS, st.just("."), st.booleans()),
    st.tuples(st.sampled_from(["move", "copy"]), st.just("."), PATHS, st.booleans()),
)


PROGRAMS = {
    "start": st.lists(WRITING, max_size=5),
    "ours": st.lists(OPERATIONS, min_size=1, max_size=4),
    "theirs": st.lists(CHANGING, min_size=1, max_size=2),
    "undone": st.integers(0, 3),
}


@settings(max_examples=max(300, settings.default.max_examples))
@given(**PROGRAMS)
def test_merge_equals_running_one_after_the_other_or_conflicts(start, ours, theirs, undone):
    check_merge("memory", start, ours, theirs, undone)


@ON_DISK
@given(**PROGRAMS)
def test_merge_on_disk_equals_running_one_after_the_other_or_conflicts(start, ours, theirs, undone):
    check_merge("host", start, ours, theirs, undone)


def check_merge(kind, start, ours, theirs, undone):
    """Every result the view saw, and the outcome, are those of running it after the others."""
    with filesystem(kind) as fs:
        for operation in start:
            outcome(APPLY, fs, operation)
        view = fs.fork()
        seen = run_and_undo(view, ours, undone)
        for operation in theirs:
            outcome(APPLY, fs, operation)
        before, serial = tree(fs), fs.fork()

        try:
            fs.merge(view)
        except MergeConflict:
            assert tree(fs) == before
        else:
            assert run_and_undo(serial, ours, undone) == seen
            assert tree(fs) == tree(serial)


def run_and_undo(fs, operations, undone):
    """Run the operations, the first few of them in a transaction that is undone."""
    token = fs.snapshot()
    first = [outcome(APPLY, fs, operation) for operation in operations[:undone]]
    fs.restore(token)
    return first + [outcome(APPLY, fs, operation) for operation in operations[undone:]]


class Filesystems(RuleBasedStateMachine):
    """A filesystem with views and snapshots behaves like plain dicts that are copied.

    A merge must come out as if the view's whole program had run on the parent, or conflict.
    """

    views = Bundle("views")
    tokens = Bundle("tokens")
    anywhere = views | st.none()

    def __init__(self):
        super().__init__()
        self.outer = MemoryFilesystem(clock=FakeClock())
        self.models = {self.outer: Model()}
        self.programs = {self.outer: []}
        self.parents = {}

    @rule(view=anywhere, operations=st.lists(OPERATIONS, min_size=1, max_size=4))
    def operate(self, view, operations):
        self.run(view or self.outer, operations)

    def run(self, fs, operations):
        model = self.models[fs]
        for operation in operations:
            before = dict(model.entries)
            result = outcome(APPLY, fs, operation)
            assert result == outcome(APPLY_TO_MODEL, model, operation)
            assert model.entries == before or not isinstance(result, type)
            self.programs[fs].append((operation, result))

    @rule(target=tokens, view=anywhere)
    def snapshot(self, view):
        fs = view or self.outer
        token = fs.snapshot()
        self.programs[fs].append((("snapshot", token), None))
        return token, dict(self.models[fs].entries)

    @rule(view=anywhere, snapshot=tokens)
    def restore(self, view, snapshot):
        fs = view or self.outer
        token, entries = snapshot
        fs.restore(token)
        self.models[fs].entries = dict(entries)
        self.programs[fs].append((("restore", token), entries))

    @rule(target=views, view=anywhere, ours=st.lists(OPERATIONS, max_size=3))
    def fork(self, view, ours):
        fs = view or self.outer
        view = fs.fork()
        self.models[view] = Model(self.models[fs].entries)
        self.programs[view] = []
        self.parents[view] = fs
        self.run(view, ours)
        return view

    @rule(view=consumes(views), theirs=st.lists(CHANGING, max_size=2))
    def merge(self, view, theirs):
        parent = self.parents[view]
        self.run(parent, theirs)
        try:
            parent.merge(view)
        except MergeConflict:
            return
        self.programs[parent] += self.programs[view]
        model, taken = self.models[parent], {}
        for operation, result in self.programs[view]:
            match operation:
                case ("snapshot", token):
                    taken[token] = dict(model.entries)
                case ("restore", token):
                    model.entries = dict(taken.get(token, result))
                case _:
                    assert outcome(APPLY_TO_MODEL, model, operation) == result

    @invariant()
    def filesystems_are_as_their_models(self):
        for fs, model in self.models.items():
            # Looking at a view makes it depend on what is seen; looking at a fork of it does not.
            assert tree(fs.fork()) == model.entries


Filesystems.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestFilesystems = Filesystems.TestCase


def test_views_that_have_ended_leave_no_descriptor_open(make):
    """Also those of deleted directories, which an older view still sees."""
    fs = make({f"{number}/inner/file.txt": str(number) for number in range(20)})
    fs.write("first", "")  # opens the log
    older = fs.fork()
    older.read("0/inner/file.txt")
    before = len(os.listdir("/proc/self/fd"))

    for number in range(20):
        view = fs.fork()
        view.delete(f"{number}/inner", recursive=True)
        fs.merge(view)

    assert older.read("19/inner/file.txt") == "19"
    fs.discard(older)
    del view, older
    assert len(os.listdir("/proc/self/fd")) <= before
