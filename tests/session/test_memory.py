"""Memory, permissions and the event bus: what they hold, and what calls may do to them."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weakincentives as wink
from weakincentives.core.clock import FakeClock
from weakincentives.errors import (
    MergeConflict,
    ReadOnlyView,
    ResourceError,
    SnapshotError,
    ViewClosed,
)
from weakincentives.prompt import MemoryEffect
from weakincentives.resources import Binding, ResourceRegistry, Scope
from weakincentives.runtime import (
    EventBus,
    MemoryManager,
    Permissions,
    execute_tools,
    tool_transaction,
)

SCOPES = ["working", "short-term", "long-term"]


@dataclass(frozen=True)
class Page:
    url: str
    links: tuple[str, ...] = ()


@pytest.fixture(params=["memory", "file"])
def memory(request, tmp_path):
    """A memory whose long-term scope is in memory, and one where it is in a file."""
    made = MemoryManager(
        None if request.param == "memory" else tmp_path / "memory.db", clock=FakeClock()
    )
    yield made
    made.close()


def contents(memory):
    return {(s, key): memory.read(s, key) for s in SCOPES for key in memory.keys(s)}


# Values


@pytest.mark.parametrize("scope", SCOPES)
def test_what_was_written_is_read_updated_and_deleted(memory, scope):
    memory.write(scope, "n", 1)
    memory.update(scope, "n", lambda n: n + 1)

    assert memory.read(scope, "n") == 2
    assert memory.keys(scope) == ("n",)
    assert memory.delete(scope, "n") is True
    assert memory.delete(scope, "n") is False
    assert memory.read(scope, "n") is None
    assert memory.read(scope, "n", "none") == "none"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_value_is_a_copy_both_ways(memory, scope):
    history = ["a"]
    memory.write(scope, "history", history)
    history.append("b")
    memory.read(scope, "history").append("c")

    assert memory.read(scope, "history") == ["a"]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1.5, "", "é\0\ud800", b"\0", (1, (2,)), {"$": 1}, {1: {"a"}}, Page("x")],
)  # fmt: skip
def test_a_value_comes_back_exactly(memory, scope, value):
    memory.write(scope, "k", value)

    found = memory.read(scope, "k", "missing")

    assert found == value
    assert type(found) is type(value)


def test_a_value_without_an_exact_form_is_refused_and_changes_nothing(memory):
    with pytest.raises(SnapshotError, match="has no exact JSON form"):
        memory.write("working", "k", object())

    assert memory.keys("working") == ()


def test_updating_starts_from_the_default(memory):
    memory.update("working", "n", lambda n: n + 1, default=10)

    assert memory.read("working", "n") == 11


@pytest.mark.parametrize("scope", SCOPES)
def test_keys_are_sorted_and_chosen_by_prefix(memory, scope):
    for key in ("b", "a.2", "a", "a.1", "ab"):
        memory.write(scope, key, 0)

    assert memory.keys(scope) == ("a", "a.1", "a.2", "ab", "b")
    assert memory.keys(scope, "a.") == ("a.1", "a.2")
    assert memory.keys(scope, prefix="c") == ()


def test_both_spellings_of_a_scope_are_one(memory):
    memory.write("short_term", "k", 1)
    memory.write("long_term", "k", 2)

    assert (memory.read("short-term", "k"), memory.read("long-term", "k")) == (1, 2)


def test_an_unknown_scope_names_those_there_are(memory):
    with pytest.raises(ValueError, match="'mid-term': use 'working', 'short-term', 'long-term'"):
        memory.read("mid-term", "k")


@pytest.mark.parametrize("key", ["", None, 3, "\ud800"])
def test_a_key_is_text(memory, key):
    with pytest.raises(ValueError, match="a memory key"):
        memory.write("working", key, 1)


def test_the_end_of_a_loop_clears_the_working_scope_only(memory):
    for scope in SCOPES:
        memory.write(scope, "k", 1)

    memory.end_loop()

    assert set(contents(memory)) == {("short-term", "k"), ("long-term", "k")}


@pytest.mark.parametrize("scope", SCOPES)
def test_clearing_a_scope(memory, scope):
    memory.write(scope, "a", 1)
    memory.write(scope, "b", 1)

    memory.clear(scope)

    assert contents(memory) == {}


# Expiry


def test_short_term_entries_are_gone_when_their_time_is_up():
    clock = FakeClock()
    memory = MemoryManager(short_term_ttl=timedelta(seconds=10), clock=clock)
    memory.write("short-term", "default", "x")
    memory.write("short-term", "long", "x", ttl=20)
    memory.write("working", "stays", "x")

    clock.advance(9)
    assert memory.keys("short-term") == ("default", "long")
    clock.advance(1)
    assert memory.keys("short-term") == ("long",)
    assert memory.read("short-term", "default") is None
    assert not memory.delete("short-term", "default")
    assert [match.key for match in memory.search("x")] == ["long", "stays"]
    clock.advance(100)
    assert memory.keys("short-term") == ()


def test_an_update_keeps_the_time_and_a_write_starts_anew():
    clock = FakeClock()
    memory = MemoryManager(short_term_ttl=10, clock=clock)
    for key in ("updated", "written", "given"):
        memory.write("short-term", key, 0)
    clock.advance(6)
    memory.update("short-term", "updated", lambda n: n + 1)
    memory.write("short-term", "written", 1)
    memory.update("short-term", "given", lambda n: n + 1, ttl=60)
    clock.advance(6)

    assert memory.keys("short-term") == ("given", "written")


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), timedelta(0)])
def test_a_time_to_live_is_more_than_nothing(ttl):
    with pytest.raises(ValueError, match="more than 0 and finite"):
        MemoryManager().write("short-term", "k", 1, ttl=ttl)
    with pytest.raises(ValueError, match="short_term_ttl"):
        MemoryManager(short_term_ttl=ttl)


def test_only_short_term_entries_expire():
    with pytest.raises(ValueError, match="leave ttl out for 'long-term'"):
        MemoryManager().write("long-term", "k", 1, ttl=5)


def test_what_only_expired_is_no_conflict():
    clock = FakeClock()
    memory = MemoryManager(clock=clock)
    memory.write("short-term", "old", 1, ttl=5)
    view = memory.fork()
    view.read("short-term", "old")
    view.keys("short-term")
    view.write("working", "k", 1)

    clock.advance(10)
    memory.merge(view)

    assert memory.read("working", "k") == 1


def test_expired_entries_take_no_room():
    clock = FakeClock()
    memory = MemoryManager(clock=clock)
    for n in range(10_000):
        memory.write("short-term", str(n), n, ttl=1)
        clock.advance(0.1)

    assert len(memory._own("short-term")) < 200


# Searching


@pytest.fixture(params=["memory", "file"])
def searched(request, tmp_path):
    made = MemoryManager(None if request.param == "memory" else tmp_path / "memory.db")
    made.write("long-term", "trip.paris", {"hotel": "Grand Hôtel", "nights": 3})
    made.write("long-term", "trip.rome", ["The Pantheon", Page("https://a.example/PARIS")])
    made.write("working", "paris", "now")
    made.write("short-term", "noise", 'say "hello" 100%_')
    yield made
    made.close()


def found(memory, query, **options):
    return [(match.scope, match.key) for match in memory.search(query, **options)]


def test_a_search_looks_at_keys_and_text_and_orders_them(searched):
    assert found(searched, "Paris") == [
        ("working", "paris"), ("long-term", "trip.paris"), ("long-term", "trip.rome"),
    ]  # fmt: skip
    assert found(searched, "paris", limit=2) == [("working", "paris"), ("long-term", "trip.paris")]
    assert found(searched, "paris", scope="working") == [("working", "paris")]
    assert searched.search("hôtel")[0].value == {"hotel": "Grand Hôtel", "nights": 3}


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("HÔTEL grand", ["trip.paris"]), ("anthe", ["trip.rome"]), ("paris rome", ["trip.rome"]),
        ("3", ["trip.paris"]), ('"hello"', ["noise"]), ("100%_", ["noise"]), ("x%", []),
        ("tuple", []), ("Page", []), ("paris nowhere", []), ("of", []),
    ],
)  # fmt: skip
def test_every_word_must_be_there_also_inside_others(searched, query, keys):
    assert [key for _, key in found(searched, query)] == keys


@pytest.mark.parametrize("query", ["", "  "])
def test_a_search_needs_a_word(searched, query):
    with pytest.raises(ValueError, match="no words"):
        searched.search(query)


def test_a_search_follows_changes_also_those_a_view_has_staged(searched):
    view = searched.fork()
    view.write("long-term", "trip.rome", "somewhere else")
    view.delete("long-term", "trip.paris")
    view.write("long-term", "new", "PARIS")

    assert [key for _, key in found(view, "paris", scope="long-term")] == ["new"]
    searched.merge(view)
    assert [key for _, key in found(searched, "paris", scope="long-term")] == ["new"]


def test_a_search_finds_what_another_process_has_written(tmp_path):
    path = tmp_path / "memory.db"
    ours, theirs = MemoryManager(path), MemoryManager(path)
    ours.write("long-term", "one", "needle")
    theirs.write("long-term", "two", "needle")
    theirs.delete("long-term", "one")
    ours.write("long-term", "three", "needle")

    assert [key for _, key in found(ours, "needle")] == ["three", "two"]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("are_known", [True, False])
def test_changes_of_another_process_are_seen_also_if_an_earlier_version_made_them(
    tmp_path, are_known
):
    """Earlier versions do not list the keys that they changed, and neither do very old changes."""
    path = tmp_path / "memory.db"
    with closing(sqlite3.connect(path)) as file:
        ours, theirs = MemoryManager(path), MemoryManager(path)
        for key in ("stays", "changes", "goes"):
            ours.write("long-term", key, "old")
        theirs.write("long-term", "changes", "new")
        theirs.delete("long-term", "goes")
        theirs.write("long-term", "comes", "new")
        if not are_known:
            file.execute("DELETE FROM memory_changes WHERE revision = 5")
            file.commit()

        seen = {key: ours.read("long-term", key) for key in ("stays", "changes", "goes", "comes")}
        assert seen == {"stays": "old", "changes": "new", "goes": None, "comes": "new"}
        ours.close()
        theirs.close()


# Views


@pytest.mark.parametrize("scope", SCOPES)
def test_view_and_memory_do_not_see_each_other_until_the_merge(memory, scope):
    memory.write(scope, "a", 1)
    memory.write(scope, "gone", 1)
    view = memory.fork()
    view.write(scope, "a", 2)
    view.write(scope, "b", 2)
    view.delete(scope, "gone")

    assert memory.keys(scope) == ("a", "gone")
    assert view.keys(scope) == ("a", "b")
    memory.merge(view)
    assert [memory.read(scope, key) for key in memory.keys(scope)] == [2, 2]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("depend", "named"),
    [
        (lambda view, scope: view.read(scope, "k"), "{}/k"),
        (lambda view, scope: view.write(scope, "k", 5), "{}/k"),
        (lambda view, scope: view.delete(scope, "k"), "{}/k"),
        (lambda view, scope: view.keys(scope), "{}"),
        (lambda view, scope: view.search("nothing"), "{}"),
        (lambda view, scope: view.clear(scope), "{}"),
    ],
)
def test_a_view_conflicts_when_what_it_depends_on_was_changed(memory, scope, depend, named):
    view = memory.fork()
    depend(view, scope)
    view.write("working", "other", 1)
    memory.write(scope, "k", 1)

    for bring_in in (memory.check_conflicts, memory.merge):
        with pytest.raises(MergeConflict, match="Changed by another call") as caught:
            bring_in(view)
        assert named.format(scope) in caught.value.paths
    assert memory.read("working", "other") is None


@pytest.mark.parametrize("scope", SCOPES)
def test_other_keys_do_not_conflict(memory, scope):
    view = memory.fork()
    view.read(scope, "mine")
    view.write(scope, "mine", 1)
    memory.write(scope, "theirs", 1)

    memory.merge(view)

    assert memory.keys(scope) == ("mine", "theirs")


@pytest.mark.parametrize("scope", SCOPES)
def test_updates_of_one_key_merge(memory, scope):
    memory.write(scope, "n", 0)
    views = [memory.fork() for _ in range(5)]
    for view in views:
        view.update(scope, "n", lambda n: n + 1)
        nested = view.fork()
        nested.update(scope, "n", lambda n: n * 2)
        view.merge(nested)
    for view in views:
        memory.merge(view)

    assert memory.read(scope, "n") == 62  # ((((0+1)*2+1)*2 ...


@pytest.mark.parametrize("scope", SCOPES)
def test_an_update_that_was_looked_at_is_a_read(memory, scope):
    memory.write(scope, "n", 0)
    view = memory.fork()
    view.update(scope, "n", lambda n: n + 1)
    nested = view.fork()
    assert nested.read(scope, "n") == 1
    view.merge(nested)
    memory.update(scope, "n", lambda n: n + 1)

    with pytest.raises(MergeConflict):
        memory.merge(view)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_nested_view_conflicts_with_what_its_parent_did_meanwhile(memory, scope):
    memory.write(scope, "k", 1)
    view = memory.fork()
    nested = view.fork()
    assert nested.keys(scope) == ("k",)
    view.delete(scope, "k")

    with pytest.raises(MergeConflict):
        view.merge(nested)


def test_a_sealed_view_refuses_and_logs_and_can_be_merged(memory, caplog):
    view = memory.fork()
    view.write("long-term", "k", 1)
    view.seal("the call has ended")

    with pytest.raises(ViewClosed, match="the call has ended"):
        view.write("long-term", "k", 2)
    assert "Refused write" in caplog.text
    assert view.read("long-term", "k") == 1
    memory.merge(view)
    assert memory.read("long-term", "k") == 1


def test_a_read_only_view_can_only_be_read(memory):
    view = memory.fork()
    view.read_only = "look, do not touch"

    for change in (
        lambda: view.write("working", "k", 1),
        lambda: view.update("working", "k", str),
        lambda: view.delete("working", "k"),
        lambda: view.clear("working"),
        lambda: view.end_loop(),
    ):
        with pytest.raises(ReadOnlyView, match="do not touch"):
            change()
    memory.merge(view)


def test_a_view_of_another_memory_is_refused(memory):
    other = MemoryManager()

    with pytest.raises(ValueError, match="only a view that was forked from this MemoryManager"):
        memory.merge(other.fork())
    with pytest.raises(ValueError, match="not a snapshot of this MemoryManager"):
        memory.restore(other.snapshot())


# Going back


@pytest.mark.parametrize("scope", SCOPES)
def test_a_restore_goes_back_and_forth(memory, scope):
    memory.write(scope, "a", 1)
    first = memory.snapshot()
    memory.write(scope, "a", 2)
    memory.write(scope, "b", 2)
    second = memory.snapshot()
    memory.delete(scope, "a")

    memory.restore(second)
    assert contents(memory) == {(scope, "a"): 2, (scope, "b"): 2}
    memory.restore(first)
    assert contents(memory) == {(scope, "a"): 1}
    memory.restore(second)
    assert contents(memory) == {(scope, "a"): 2, (scope, "b"): 2}


def test_a_restore_undoes_a_merge(memory):
    memory.write("long-term", "kept", 1)
    memory.write("long-term", "deleted", 1)
    before = contents(memory)
    token = memory.snapshot_here()
    view = memory.fork()
    view.write("long-term", "new", 1)
    view.update("long-term", "kept", lambda n: n + 1)
    view.delete("long-term", "deleted")
    memory.merge(view)

    memory.restore_here(token)

    assert contents(memory) == before


def test_a_view_can_go_back_to_before_it_was_made(memory):
    memory.write("working", "k", 1)
    memory.write("long-term", "k", 1)
    token = memory.snapshot()
    memory.write("working", "k", 2)
    memory.write("long-term", "k", 2)
    view = memory.fork()
    view.restore(token)

    assert contents(view) == {("working", "k"): 1, ("long-term", "k"): 1}
    assert memory.read("long-term", "k") == 2
    memory.merge(view)
    assert contents(memory) == {("working", "k"): 1, ("long-term", "k"): 1}


def test_a_restore_leaves_what_somebody_else_wrote(tmp_path, caplog):
    one, two = MemoryManager(tmp_path / "m.db"), MemoryManager(tmp_path / "m.db")
    token = one.snapshot()
    one.write("long-term", "mine", 1)
    one.write("long-term", "shared", 1)
    two.write("long-term", "shared", 2)

    one.restore(token)

    assert contents(one) == {("long-term", "shared"): 2}
    assert "kept what another process has written: shared" in caplog.text
    one.close()
    two.close()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["write", "update", "delete", "clear"]),
        st.sampled_from(SCOPES),
        st.sampled_from("abc"),
        st.integers(0, 9),
    ),
    max_size=6,
)


def apply(memory, operations):
    for name, scope, key, n in operations:
        if name == "write":
            memory.write(scope, key, n)
        elif name == "update":
            memory.update(scope, key, lambda old, n=n: old * 10 + n, default=0)
        elif name == "delete":
            memory.delete(scope, key)
        else:
            memory.clear(scope)


def apply_to_model(model, operations):
    for name, scope, key, n in operations:
        if name == "write":
            model[scope, key] = n
        elif name == "update":
            model[scope, key] = model.get((scope, key), 0) * 10 + n
        elif name == "delete":
            model.pop((scope, key), None)
        else:
            for place in [place for place in model if place[0] == scope]:
                del model[place]


@given(OPERATIONS, st.lists(st.tuples(OPERATIONS, OPERATIONS, st.booleans()), max_size=5))
@pytest.mark.parametrize("on_disk", [False, True])
def test_views_merge_or_vanish_like_steps_on_a_plain_dict(tmp_path_factory, on_disk, first, steps):
    path = tmp_path_factory.mktemp("model") / "m.db" if on_disk else None
    memory, model = MemoryManager(path), {}
    apply(memory, first)
    apply_to_model(model, first)
    for outer, inner, keep in steps:
        token, before = memory.snapshot(), dict(model)
        view = memory.fork()
        apply(view, outer)
        nested = view.fork()
        apply(nested, inner)
        view.merge(nested)
        changed = dict(model)
        apply_to_model(changed, [*outer, *inner])
        assert contents(view) == changed
        assert contents(memory) == model
        memory.merge(view)
        assert contents(memory) == changed
        if keep:
            model = changed
        else:
            memory.restore(token)
            model = before
        assert contents(memory) == model
    memory.close()


@given(OPERATIONS, st.lists(OPERATIONS, max_size=4))
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_merges_equals_one_after_the_other(tmp_path_factory, on_disk, first, together):
    """A view that conflicts is done again, as the runtime does."""
    path = tmp_path_factory.mktemp("model") / "m.db" if on_disk else None
    memory, model = MemoryManager(path), {}
    apply(memory, first)
    apply_to_model(model, first)
    views = [memory.fork() for _ in together]
    for view, operations in zip(views, together, strict=True):
        apply(view, operations)
    for view, operations in zip(views, together, strict=True):
        try:
            memory.merge(view)
        except MergeConflict:
            again = memory.fork()
            apply(again, operations)
            memory.merge(again)
        apply_to_model(model, operations)

    assert contents(memory) == model
    memory.close()


# The file


def test_long_term_memory_survives_and_the_others_do_not(tmp_path):
    path = tmp_path / "deep" / "memory.db"
    memory = MemoryManager(path)
    for scope in SCOPES:
        memory.write(scope, "page", Page("a", ("b",)))
    memory.close()

    again = MemoryManager(path)

    assert contents(again) == {("long-term", "page"): Page("a", ("b",))}
    again.close()
    with pytest.raises(ResourceError, match="is closed"):
        again.read("long-term", "page")


def test_a_file_that_is_something_else_is_left_alone(tmp_path):
    import sqlite3

    (tmp_path / "text").write_text("not a database, but long enough to be looked at " * 20)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE customers (name)")
    other.close()

    for name in ("text", "other"):
        before = (tmp_path / name).stat().st_size
        with pytest.raises(ResourceError, match=r"cannot be used as a memory|is not a memory"):
            MemoryManager(tmp_path / name)
        assert (tmp_path / name).stat().st_size == before


def test_memory_without_a_path_does_not_load_sqlite():
    program = (
        "import sys; from weakincentives.runtime import MemoryManager\n"
        "MemoryManager().write('long-term', 'k', 1); print('sqlite3' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"


def test_threads_share_a_memory(memory):
    def count():
        for _ in range(50):
            memory.update("long-term", "n", lambda n: n + 1, default=0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert memory.read("long-term", "n") == 200


COUNT = """
import sys
from weakincentives.errors import MergeConflict
from weakincentives.runtime import MemoryManager

memory = MemoryManager(sys.argv[1])
for _ in range(40):
    memory.update("long-term", "updated", lambda n: n + 1, default=0)
    while True:
        view = memory.fork()
        view.write("long-term", "read", view.read("long-term", "read", 0) + 1)
        try:
            memory.merge(view)
            break
        except MergeConflict:
            continue
"""


def test_processes_share_a_file_and_lose_no_update(tmp_path):
    path = tmp_path / "memory.db"
    processes = [subprocess.Popen([sys.executable, "-c", COUNT, path]) for _ in range(3)]

    assert [process.wait(120) for process in processes] == [0, 0, 0]
    memory = MemoryManager(path)
    assert contents(memory) == {("long-term", "updated"): 120, ("long-term", "read"): 120}
    memory.close()


MERGE_FOR_EVER = """
import itertools, sys
from weakincentives.runtime import MemoryManager

memory = MemoryManager(sys.argv[1])
start = memory.read("long-term", "0", -1)
for call in itertools.count(start + 1):
    view = memory.fork()
    for key in range(8):
        view.write("long-term", str(key), call)
    memory.merge(view)
    print(call, flush=True)
"""


def test_a_killed_process_leaves_whole_calls(tmp_path):
    path, acknowledged = tmp_path / "memory.db", -1
    for reports in (1, 3, 7, 12):
        child = subprocess.Popen(
            [sys.executable, "-c", MERGE_FOR_EVER, path], stdout=subprocess.PIPE, text=True
        )
        for _ in range(reports):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.stdout.close()
        child.wait()
        acknowledged = max([acknowledged, *map(int, rest)])

        memory = MemoryManager(path)
        values = {memory.read("long-term", str(key)) for key in range(8)}
        assert len(values) == 1, "one call's rows, all of them"
        assert acknowledged <= values.pop() <= acknowledged + 1
        assert memory.search(str(memory.read("long-term", "0")))
        memory.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_gets_a_connection_of_its_own(tmp_path):
    program = (
        "import os, sys; from weakincentives.runtime import MemoryManager\n"
        "memory = MemoryManager(sys.argv[1]); memory.write('long-term', 'parent', 1)\n"
        "pid = os.fork()\n"
        "memory.write('long-term', 'child' if pid == 0 else 'after', 1)\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0); print(*memory.keys('long-term'))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "m.db"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.split() == ["after", "child", "parent"]


# Calls


@wink.tool(reach="reversible", concurrent=True)
def count(name: str, fail: bool = False, *, context: wink.ToolContext) -> str:
    """Count, in both ways."""
    memory = context.resources.get(MemoryManager)
    memory.update("long-term", "updated", lambda n: n + 1, default=0)
    memory.write("long-term", "read", memory.read("long-term", "read", 0) + 1)
    memory.write("working", name, "done")
    context.resources.get(EventBus).emit("count:done", name)
    if fail:
        raise ValueError("no")
    return name


def run(memory, calls, *, bus=None):
    template = wink.PromptTemplate(
        sections=[wink.MarkdownSection(title="Counting", tools=[count])],
        resources={MemoryManager: memory, EventBus: bus or EventBus()},
    )
    prompt, session = wink.Prompt(template), wink.Session()
    prompt.render(session)
    return execute_tools(
        [wink.ToolCall("count", {"name": name, "fail": fail}) for name, fail in calls],
        session=session,
    )


@given(st.lists(st.booleans(), max_size=6))
@pytest.mark.parametrize("on_disk", [False, True])
def test_calls_that_run_together_leave_what_they_leave_one_by_one(tmp_path_factory, on_disk, fails):
    memory = MemoryManager(tmp_path_factory.mktemp("calls") / "m.db" if on_disk else None)
    calls = [(f"call{n}", fail) for n, fail in enumerate(fails)]

    results = run(memory, calls)

    kept = [name for name, fail in calls if not fail]
    assert [result.success for result in results] == [not fail for fail in fails]
    counts = {("long-term", key): len(kept) for key in ("read", "updated") if kept}
    assert contents(memory) == {("working", name): "done" for name in kept} | counts
    memory.close()


def test_a_failed_call_leaves_the_memory_as_it_was(memory):
    memory.write("long-term", "updated", 5)

    [result] = run(memory, [("a", True)])

    assert "MemoryManager" in result.metadata.undone
    assert contents(memory) == {("long-term", "updated"): 5}


def test_a_handler_that_kept_the_outer_memory_works_on_its_view(memory):
    @wink.tool
    def keep(*, context: wink.ToolContext) -> str:
        """Write through the outer object, then fail."""
        memory.write("long-term", "k", 1)
        assert memory.read("long-term", "k") == 1
        raise ValueError("no")

    keep(context=wink.ToolContext(session=wink.Session(), resources={MemoryManager: memory}))

    assert contents(memory) == {}


def test_a_transaction_by_hand_rolls_the_memory_back(memory):
    memory.write("long-term", "k", 1)

    with pytest.raises(RuntimeError), tool_transaction(wink.Session(), {MemoryManager: memory}):
        memory.write("long-term", "k", 2)
        memory.write("working", "k", 2)
        raise RuntimeError("half way")

    assert contents(memory) == {("long-term", "k"): 1}


# context.memory


def memory_context(memory, *, given):
    """A context whose memory is bound as a resource, or given by hand."""
    if given:
        return wink.ToolContext(session=wink.Session(), memory=memory)
    return wink.ToolContext(session=wink.Session(), resources={MemoryManager: memory})


@pytest.mark.parametrize("given", [False, True])
def test_what_a_thread_of_a_failed_handler_wrote_through_its_context_is_gone(memory, given):
    @wink.tool
    def work(*, context: wink.ToolContext) -> str:
        """Write from a thread of its own, which knows nothing of the call, then fail."""

        def write():
            context.memory.write("long-term", "k", 1)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        assert context.memory.read("long-term", "k") == 1
        raise ValueError("no")

    result = work(context=memory_context(memory, given=given))

    assert result.message == "no"
    assert contents(memory) == {}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_a_handler_that_timed_out_writes_nothing_to_its_memory(memory, given, held):
    ended, tried = threading.Event(), threading.Event()
    outcome = []

    @wink.tool(timeout=0.05)
    def work(*, context: wink.ToolContext) -> str:
        """Write when nobody waits any more."""

        def write():
            mine = context.memory if held else None
            ended.wait(60)
            try:
                (mine or context.memory).write("long-term", "k", 1)
            except ViewClosed as error:
                outcome.append(error)
            tried.set()

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        return "late"

    result = work(context=memory_context(memory, given=given))
    ended.set()
    assert tried.wait(60)

    assert result.failure.code == "TIMEOUT"
    assert contents(memory) == {}
    assert outcome


def test_a_memory_that_no_tool_asks_for_is_not_built():
    built = []

    def provide(_):
        built.append(MemoryManager())
        return built[-1]

    @wink.tool
    def idle(*, context: wink.ToolContext) -> str:
        """Do nothing."""
        return "done"

    @wink.tool
    def remember(*, context: wink.ToolContext) -> str:
        """Write something."""
        context.memory.write("working", "k", 1)
        return "done"

    bound = ResourceRegistry.of(Binding(MemoryManager, provide))
    context = wink.ToolContext(session=wink.Session(), resources=bound)
    assert idle(context=context).success
    wink.ToolRegistry([idle, remember]).execute("idle", {}, context=context)
    assert not built
    assert remember(context=context).success
    assert [memory.read("working", "k") for memory in built] == [1]


@pytest.mark.parametrize("scope", list(Scope))
def test_context_memory_works_in_every_scope(scope):
    bound = ResourceRegistry.of(Binding(MemoryManager, lambda _: MemoryManager(), scope=scope))

    @wink.tool
    def remember(*, context: wink.ToolContext) -> str:
        """Write, then read."""
        context.memory.update("working", "k", lambda n: n + 1, default=0)
        return f"{context.memory.read('working', 'k')}"

    context = wink.ToolContext(session=wink.Session(), resources=bound)
    results = [remember(context=context), remember(context=context)]

    expected = ["1", "2"] if scope is Scope.SINGLETON else ["1", "1"]
    assert [result.render() for result in results] == expected


def test_effects_and_nested_calls_use_the_memory_of_the_call(memory):
    @wink.tool(reach="reversible", effects=[MemoryEffect(key="effect", value=1)])
    def inner(*, context: wink.ToolContext) -> str:
        """Write in a nested call."""
        context.memory.write("working", "inner", context.memory.read("working", "outer"))
        return "done"

    @wink.tool
    def outer(fail: bool, *, context: wink.ToolContext) -> str:
        """Call another tool."""
        context.memory.write("working", "outer", 1)
        assert inner(context=context).success
        assert context.memory.read("working", "inner") == 1
        if fail:
            raise ValueError("no")
        return "done"

    context = wink.ToolContext(session=wink.Session(), memory=memory)
    outer({"fail": True}, context=context)
    assert contents(memory) == {}

    outer({"fail": False}, context=context)
    assert contents(memory) == {("working", key): 1 for key in ("outer", "inner", "effect")}


def test_without_a_memory_there_is_none():
    assert wink.ToolContext(session=wink.Session()).memory is None


# Permissions


def test_permissions_are_per_session_and_wildcards_cover():
    permissions, session = Permissions(), wink.Session()
    permissions.grant("file:*", session=session)
    permissions.grant("web:scrape", session="other")
    permissions.grant("clock:read", session="*")

    assert permissions.has(session, "file:write")
    assert permissions.has(session.session_id, "file:write:deep")
    assert permissions.has(session, "file:*")
    assert not permissions.has(session, "file")
    assert not permissions.has(session, "filesystem:write")
    assert not permissions.has(session, "web:scrape")
    assert permissions.has("other", "web:scrape")
    assert not permissions.has("other", "web:*")
    assert permissions.has("anybody", "clock:read")
    assert permissions.granted(session) == ("clock:read", "file:*")
    permissions.grant("*", session=session)
    assert permissions.has(session, "anything")


def test_revoking_takes_back_what_is_covered_and_leaves_what_is_broader():
    permissions = Permissions()
    for permission in ("file:read", "file:write", "web:scrape"):
        permissions.grant(permission, session="s")

    assert permissions.revoke("file:*", session="s") is True
    assert permissions.granted("s") == ("web:scrape",)
    assert permissions.revoke("file:read", session="s") is False
    permissions.grant("*", session="s")
    permissions.revoke("web:scrape", session="s")
    assert permissions.has("s", "web:scrape")
    permissions.revoke("*", session="s")
    assert permissions.granted("s") == ()


@pytest.mark.parametrize("name", ["", ":", "file:", ":x", "fi*", "file:*:x", "**", None, 3])
def test_a_permission_has_a_name(name):
    for use in (
        lambda: Permissions().grant(name, session="s"),
        lambda: Permissions().has("s", name),
    ):
        with pytest.raises(ValueError, match="expected a name like 'file:write'"):
            use()


def test_a_failed_call_grants_nothing():
    permissions, session = Permissions(), wink.Session()

    @wink.tool
    def promote(fail: bool, *, context: wink.ToolContext) -> str:
        """Grant everything."""
        context.resources.get(Permissions).grant("*", session=context.session)
        assert permissions.has(context.session_id, "x")
        if fail:
            raise ValueError("no")
        return "done"

    context = wink.ToolContext(session=session, resources={Permissions: permissions})
    promote(fail=True, context=context)
    assert not permissions.has(session, "x")
    promote(fail=False, context=context)
    assert permissions.has(session, "x")


def test_a_view_that_asked_conflicts_with_a_revocation():
    permissions = Permissions()
    permissions.grant("file:*", session="s")
    view = permissions.fork()
    assert view.has("s", "file:write")
    permissions.revoke("file:*", session="s")

    with pytest.raises(MergeConflict, match=r"s/file:\*"):
        permissions.merge(view)


# Events


def test_outside_calls_events_are_told_at_once_by_pattern():
    bus, heard = EventBus(), []
    for pattern in ("api:error", "api:*", "*", "file:*"):
        bus.subscribe(pattern, lambda event, payload, p=pattern: heard.append((p, event, payload)))

    bus.emit("api:error", 1)
    bus.emit("other")

    assert heard == [
        ("api:error", "api:error", 1),
        ("api:*", "api:error", 1),
        ("*", "api:error", 1),
        ("*", "other", None),
    ]


def test_one_who_unsubscribed_hears_no_more():
    bus, heard = EventBus(), []
    stop = bus.subscribe("*", lambda *told: heard.append(told))
    bus.subscribe("*", lambda *told: heard.append("still here"))

    stop()
    stop()
    bus.emit("x")

    assert heard == ["still here"]


def test_a_subscriber_that_fails_is_logged_and_others_hear(caplog):
    bus, heard = EventBus(), []
    bus.subscribe("x", lambda event, payload: 1 / 0)
    bus.subscribe("x", lambda event, payload: heard.append(payload))

    with caplog.at_level(logging.ERROR):
        bus.emit("x", 7)

    assert heard == [7]
    assert "failed on x" in caplog.text


def test_what_cannot_be_subscribed_or_emitted_is_refused():
    async def later(event, payload): ...

    with pytest.raises(TypeError, match="must not be async"):
        EventBus().subscribe("x", later)
    with pytest.raises(ValueError, match="expected a name"):
        EventBus().subscribe("x*", print)
    for event in ("", "file:*", None):
        with pytest.raises(ValueError, match="an event has a name"):
            EventBus().emit(event)


def test_events_of_a_view_leave_after_the_outermost_commit_once_and_in_order():
    bus, heard = EventBus(), []
    bus.subscribe("*", lambda event, payload: heard.append(event))
    view = bus.fork()
    view.emit("one")
    nested, lost = view.fork(), view.fork()
    nested.emit("two")
    lost.emit("never")
    view.merge(nested)
    view.emit("three")
    token = view.snapshot()
    view.emit("taken back")
    view.restore(token)
    view.after_commit()
    view.seal("over")
    assert heard == []

    bus.merge(view)
    assert heard == []
    bus.after_commit()
    bus.after_commit()

    assert heard == ["one", "two", "three"]
    with pytest.raises(ViewClosed, match="over"):
        view.emit("late")


def test_a_restored_bus_does_not_tell_what_was_taken_back_nor_anything_twice():
    bus, heard = EventBus(), []
    bus.subscribe("*", lambda event, payload: heard.append(event))
    first, second = bus.fork(), bus.fork()
    first.emit("first")
    second.emit("second")
    bus.merge(first)
    token = bus.snapshot()
    bus.merge(second)
    bus.restore(token)
    bus.after_commit()
    bus.restore(token)
    bus.after_commit()

    assert heard == ["first"]
    with pytest.raises(ValueError, match="not a snapshot of this EventBus"):
        bus.restore(EventBus().snapshot())


def test_a_rolled_back_call_emits_nothing():
    bus, heard = EventBus(), []
    bus.subscribe("count:*", lambda event, payload: heard.append(payload))

    run(MemoryManager(), [("a", False), ("b", True), ("c", False)], bus=bus)
    bus.after_commit()  # what the runtime has not told yet

    assert heard == ["a", "c"]
