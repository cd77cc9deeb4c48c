"""Files with several names: a private view treats them as the directory itself does."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from trees import ON_DISK, Seen, elsewhere, look, put

from weakincentives.errors import FilesystemError, MergeConflict, ViewClosed
from weakincentives.filesystem import HostFilesystem, overlay

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a real directory needs POSIX calls")

# Three files: one with names here and in a directory, one with two names in that directory, and
# one with a single name. There is also a name outside of the workspace.
FILES = {"one": "first", "d/in": "second", "plain": "third"}
LINKS = {"two": "one", "d/one": "one", "d/in2": "d/in", "../outside": "d/in"}


@contextlib.contextmanager
def workspace(store: str = "beside") -> Iterator[HostFilesystem]:
    """Give a workspace whose store is beside it, or on another filesystem."""
    with contextlib.ExitStack() as stack:
        above = stack.enter_context(tempfile.TemporaryDirectory(prefix="wink-links-"))
        place = stack.enter_context(elsewhere(Path(above))) if store == "elsewhere" else None
        root = Path(above, "workspace")
        for path, content in FILES.items():
            put(root / path, content)
        for path, other in LINKS.items():
            os.link(root / other, root / path)
        yield stack.enter_context(HostFilesystem(root, store=place and place / "store"))


STORES = pytest.mark.parametrize("store", ["beside", "elsewhere"])


@pytest.fixture
def fs():
    with workspace() as fs:
        yield fs


def exactly(fs: HostFilesystem) -> dict[str, Seen]:
    """Return all that is in the workspace, but for names of its files that are not in it.

    With the store elsewhere, what an open call has replaced waits in the workspace.
    """
    found = {p: seen for p, seen in look(fs.root).items() if not p.startswith(".wink-temporary-")}
    return {p: seen._replace(links=0, names=seen.names & found.keys()) for p, seen in found.items()}


def contents(fs: HostFilesystem) -> dict[str, Seen]:
    return {path: seen._replace(modified=0) for path, seen in exactly(fs).items()}


# What can be done

PATHS = st.sampled_from(["one", "two", "d", "d/one", "d/in", "d/in2", "plain", "new", "d/new", "e"])
CONTENTS = st.sampled_from(["", "x", "longer"])
CHANGING = st.one_of(
    st.tuples(st.just("write"), PATHS, CONTENTS),
    st.tuples(st.just("append"), PATHS, CONTENTS),
    st.tuples(st.just("set_readonly"), PATHS, st.booleans()),
    st.tuples(st.just("delete"), PATHS),
    st.tuples(st.sampled_from(["move", "copy"]), PATHS, PATHS),
)
READING = st.tuples(st.sampled_from(["read", "stat", "list", "grep"]), PATHS)
OPERATIONS = st.one_of(CHANGING, CHANGING, READING)

APPLY: dict[str, Any] = {
    "read": lambda fs, path: fs.read(path),
    "stat": lambda fs, path: known(fs.stat(path)),
    "list": lambda fs, path: [known(entry) for entry in fs.list(path)],
    "grep": lambda fs, path: fs.grep(".", path),
    "write": lambda fs, path, content: fs.write(path, content),
    "append": lambda fs, path, content: fs.append(path, content),
    "set_readonly": lambda fs, path, readonly: fs.set_readonly(path, readonly),
    "delete": lambda fs, path: fs.delete(path, recursive=True),
    "move": lambda fs, old, new: fs.move(old, new, overwrite=True),
    "copy": lambda fs, old, new: fs.copy(old, new, overwrite=True),
}


def known(entry: Any) -> tuple[object, ...]:
    return entry.path, entry.kind, entry.size, entry.readonly


def run(fs: Any, operations: list[Any]) -> list[object]:
    """Return what the operations give, a refusal by its kind, and all that is seen at the end."""
    results: list[object] = []
    everything = [("grep", "."), ("list", "."), ("list", "d"), ("list", "e")]
    for name, *args in [*operations, *everything]:
        try:
            results.append(APPLY[name](fs, *args))
        except FilesystemError as refusal:
            results.append(type(refusal))
    return results


def run_in_place(operations: list[Any]) -> tuple[list[object], dict[str, Seen]]:
    with workspace() as fs, fs.gate:
        view = fs.fork_in_place()
        results = run(view, operations)
        fs.merge(view)
        return results, contents(fs)


@ON_DISK
@given(operations=st.lists(OPERATIONS, min_size=1, max_size=6))
def test_private_view_sees_and_leaves_what_working_in_place_does(operations):
    with workspace() as fs:
        before = contents(fs)
        view = fs.fork()
        results = run(view, operations)
        assert contents(fs) == before

        fs.merge(view)

        assert (results, contents(fs)) == run_in_place(operations)


@ON_DISK
@given(
    outer=st.lists(CHANGING, max_size=3),
    inner=st.lists(OPERATIONS, min_size=1, max_size=3),
    later=st.lists(OPERATIONS, max_size=2),
)
def test_view_of_a_view_sees_and_leaves_what_working_in_place_does(outer, inner, later):
    with workspace() as fs:
        view = fs.fork()
        results = run(view, outer)
        within = view.fork()
        results += run(within, inner)
        view.merge(within)
        results += run(view, later)
        fs.merge(view)

        with workspace() as other, other.gate:
            place = other.fork_in_place()
            assert run(place, outer) + run(place, inner) + run(place, later) == results
            other.merge(place)
            assert contents(fs) == contents(other)


@STORES
@pytest.mark.parametrize("fork", ["fork", "fork_in_place"], ids=["committed", "in place"])
@ON_DISK
@given(
    ours=st.lists(OPERATIONS, min_size=1, max_size=4),
    theirs=st.lists(CHANGING, min_size=1, max_size=3),
)
def test_merge_after_others_equals_running_after_them_or_conflicts(store, fork, ours, theirs):
    """Also, whatever becomes of it, the view goes on seeing what it was forked from."""
    in_place = fork == "fork_in_place"
    with workspace(store) as fs, fs.gate if in_place else contextlib.nullcontext():
        base = fs.fork_in_place() if in_place else fs
        view, still = base.fork(), base.fork()
        results, unchanged = run_seen(view, ours), run(base.fork(), [])
        run(base, theirs)
        assert run(still, []) == unchanged
        before = contents(fs)

        try:
            base.merge(view)
        except MergeConflict:
            assert contents(fs) == before
        else:
            with workspace() as other, other.gate:
                place = other.fork_in_place()
                run(place, theirs)
                assert run_seen(place, ours) == results
                other.merge(place)
                assert contents(fs) == contents(other)


def run_seen(fs: Any, operations: list[Any]) -> list[object]:
    """Like ``run``, without looking at everything at the end: a view depends on what it sees."""
    results: list[object] = []
    for name, *args in operations:
        try:
            results.append(APPLY[name](fs, *args))
        except FilesystemError as refusal:
            results.append(type(refusal))
    return results


def test_views_that_write_one_file_under_two_names_conflict(fs):
    first, second = fs.fork(), fs.fork()
    first.write("one", "from the first")
    second.write("two", "from the second")
    fs.merge(first)

    with pytest.raises(MergeConflict) as caught:
        fs.merge(second)

    assert caught.value.paths == ("two",)
    assert fs.read("d/one") == "from the first"


def test_view_that_looked_through_a_directory_conflicts_when_a_file_in_it_changed_elsewhere(fs):
    view = fs.fork()
    view.grep("x", "d")
    fs.write("one", "xxx")

    with pytest.raises(MergeConflict) as caught:
        fs.check_conflicts(view)

    assert caught.value.paths == ("d",)


def test_name_that_was_deleted_or_replaced_leaves_the_others_as_they_are(fs):
    view = fs.fork()
    view.write("one", "new")
    view.delete("two")
    view.move("plain", "d/one", overwrite=True)
    view.write("d/one", "its own now")

    fs.merge(view)

    assert (fs.read("one"), fs.exists("two"), fs.read("d/one")) == ("new", False, "its own now")


def test_copy_is_a_file_of_its_own(fs):
    view = fs.fork()
    view.copy("d", "e")
    view.write("e/in", "copy")

    assert (view.read("e/in2"), view.read("d/in")) == ("copy", "second")
    fs.merge(view)
    assert (fs.read("e/in2"), fs.read("d/in")) == ("copy", "second")


@pytest.mark.skipif(os.geteuid() != 0, reason="an overlay of root knows which names are one file")
def test_command_in_a_view_finds_the_names_of_what_the_view_has_changed_together(fs):
    if isinstance(way := overlay.find_way(fs.root, fs.store), str):
        pytest.skip(way)
    before = exactly(fs)
    view = fs.fork()
    view.write("one", "x")

    assert view.run("printf y >> two; cat d/one").stdout == "xy"

    assert [view.read(name) for name in ("one", "two", "d/one")] == ["xy"] * 3
    fs.merge(view)
    assert [fs.read(name) for name in ("one", "two", "d/one")] == ["xy"] * 3
    assert exactly(fs)["one"].names == before["one"].names


# Going back


def keep(fs: HostFilesystem, operations: list[Any]) -> None:
    with fs.gate:
        view = fs.fork_in_place()
        run_seen(view, operations)
        fs.merge(view)


@pytest.mark.heavy
@STORES
@ON_DISK
@given(
    calls=st.lists(st.lists(CHANGING, min_size=1, max_size=4), min_size=1, max_size=4),
    place=st.integers(0, 3),
)
@example(calls=[[("delete", "one"), ("write", "two", "")]], place=0)
@example(
    calls=[[("write", "d/in2", "")], [("write", "d/in", "x"), ("write", "d/in2", "")]], place=0
)
@example(calls=[[("write", "one", ""), ("delete", "d")]], place=0)
def test_going_back_over_kept_calls_brings_every_content_back(store, calls, place):
    """And going back over the going back does, too, with the names that were one file."""
    with workspace(store) as fs:
        states = [(fs.snapshot(), exactly(fs))]
        for operations in calls:
            keep(fs, operations)
            states.append((fs.snapshot(), exactly(fs)))
        token, before = states[place % len(states)]
        newest = fs.history()[-1:]

        fs.restore(token)
        assert exactly(fs) == before
        for call in newest:
            assert fs.revert_to(call.call_id) == ()
            assert exactly(fs) == states[-1][1]


@pytest.mark.parametrize(
    "delete",
    [
        [("delete", "d")],
        [("delete", "d"), ("write", "one", "changed after")],
        [("write", "d/one", "changed before"), ("delete", "d")],
        [("delete", "d"), ("delete", "two")],
        [("delete", "d/one"), ("write", "one", "changed after")],
        [("delete", "two"), ("delete", "d/one"), ("write", "one", "the last name")],
        [("move", "plain", "d/one"), ("delete", "d")],
    ],
    ids=str,
)
def test_file_of_a_deleted_directory_is_what_it_was_whatever_its_other_names_became(fs, delete):
    before, token = exactly(fs), fs.snapshot()
    keep(fs, delete)
    keep(fs, [("write", "one", "by a later call"), ("move", "one", "elsewhere")])

    fs.restore(token)

    assert exactly(fs) == before


def test_file_whose_other_name_somebody_else_has_changed_comes_back_as_its_own(fs):
    token = fs.snapshot()
    fs.delete("d", recursive=True)
    (fs.root / "one").write_text("somebody else's")

    fs.restore(token)

    assert (fs.read("one"), fs.read("d/one")) == ("somebody else's", "first")


# Views of a call that works in place


def test_private_view_of_a_call_that_is_undone_is_closed(fs):
    fs.gate.acquire()
    outer = fs.fork_in_place()
    before = outer.fork()
    outer.write("one", "half done")
    view = outer.fork()
    within = view.fork()
    assert (before.read("two"), view.read("two"), within.read("two")) == (
        "first",
        "half done",
        "half done",
    )

    fs.discard(outer)
    fs.gate.release()

    for use in (lambda: view.read("two"), lambda: within.write("two", "x"), view.list):
        with pytest.raises(ViewClosed, match="what this view was forked from was undone"):
            use()
    assert before.read("two") == "first"


def test_private_view_is_closed_by_going_back_to_before_it_was_forked(fs):
    with fs.gate:
        outer = fs.fork_in_place()
        outer.delete("plain")
        early, token = outer.fork(), outer.snapshot()
        outer.delete("d", recursive=True)
        late = outer.fork()
        late.write("new", "x")

        outer.restore(token)

        with pytest.raises(ViewClosed, match="was undone"):
            outer.merge(late)
        assert (early.exists("plain"), early.read("d/in")) == (False, "second")
        early.write("d/in", "from the early one")
        outer.merge(early)
        fs.merge(outer)
    assert (fs.read("d/in2"), fs.exists("new"), fs.exists("plain")) == (
        "from the early one",
        False,
        False,
    )


def test_private_view_of_a_call_that_is_kept_is_closed(fs):
    with fs.gate:
        unconcerned = fs.fork()
        outer = fs.fork_in_place()
        outer.delete("d", recursive=True)
        view = outer.fork()
        outer.write("one", "new")
        assert (view.read("one"), unconcerned.read("d/one")) == ("first", "first")
        fs.merge(outer)

    with pytest.raises(ViewClosed, match="the call that this view was forked from has ended"):
        view.read("one")
    assert (unconcerned.read("two"), unconcerned.read("d/in")) == ("first", "second")
