"""Views: what a call works on. Kept as a whole, or forgotten but for what was logged."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives import Tool, ToolContext, ToolResult
from weakincentives.errors import (
    MergeConflict,
    ReadOnlyView,
    SessionError,
    SnapshotExpired,
    ViewClosed,
)
from weakincentives.runtime import (
    Session,
    Slice,
    SlicePolicy,
    Snapshot,
    ToolInvoked,
    append_all,
    slice_policy,
    tool_transaction,
)


@dataclass(frozen=True)
class Note:
    text: str


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True)
class Line:
    text: str


@dataclass(frozen=True)
class Both:
    """Changes a STATE slice and a LOG slice."""

    text: str


@dataclass(frozen=True)
class Count:
    value: int


@dataclass(frozen=True)
class Increment:
    pass


def counted(current: Slice[Count], event: Increment) -> Slice[Count]:
    latest = current.latest()
    return current.replace(Count(1 if latest is None else latest.value + 1))


@pytest.fixture
def session() -> Session:
    return new_session()


def new_session() -> Session:
    session = Session()
    session[Count].register(Increment, counted)
    session[Note].register(Both, lambda current, event: current.append(Note(event.text)))
    session[Line].register(Both, lambda current, event: current.append(Line(event.text)))
    return session


def notes(session: Session) -> list[str]:
    return [note.text for note in session[Note]]


def lines(session: Session) -> list[str]:
    return [line.text for line in session[Line]]


class TestIsolation:
    def test_a_view_starts_as_its_session_is_and_shares_nothing_since(
        self, session: Session
    ) -> None:
        session.dispatch(Note("a"))
        view = session.fork()

        view.dispatch(Note("in the view"))
        session.dispatch(Note("in the session"))

        assert notes(view) == ["a", "in the view"]
        assert notes(session) == ["a", "in the session"]
        assert view.session_id == session.session_id
        assert view.is_view_of(session)
        assert not session.is_view_of(view)

    def test_merging_brings_everything_in(self, session: Session) -> None:
        view = session.fork()
        view.dispatch(Both("a"))
        view[Note].seed([Note("b"), Note("c")])
        view.dispatch(Increment())

        session.merge(view)

        assert notes(session) == ["b", "c"]
        assert lines(session) == ["a"]
        assert session[Count].latest() == Count(1)

    def test_views_that_ran_beside_each_other_lose_no_update(self, session: Session) -> None:
        views = [session.fork() for _ in range(3)]
        for view in views:
            view.dispatch(Increment())
            view[Note].append(Note("appended"))

        for view in views:
            session.merge(view)

        assert session[Count].all() == (Count(3),)
        assert len(session[Note]) == 3

    def test_views_merged_from_many_threads_lose_no_update(self, session: Session) -> None:
        def work(_: int) -> None:
            view = session.fork()
            view.dispatch(Increment())
            session.merge(view)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(200)))

        assert session[Count].latest() == Count(200)

    def test_a_view_goes_on_after_it_was_merged(self, session: Session) -> None:
        view = session.fork()
        view.dispatch(Note("a"))
        session.merge(view)
        session.merge(view)
        session.dispatch(Note("b"))

        view.dispatch(Note("c"))
        session.merge(view)

        assert notes(session) == ["a", "b", "c"]

    def test_only_a_session_s_own_views_are_merged(self, session: Session) -> None:
        view = session.fork()
        nested = view.fork()

        for stranger in (Session(), session, nested, Session().fork()):
            with pytest.raises(SessionError, match="only a view that was forked from this"):
                session.merge(stranger)

    def test_a_merge_that_fails_changes_nothing(self, session: Session) -> None:
        def only_once(current: Slice[Note], event: Note) -> Slice[Note]:
            if len(current):
                raise ValueError("there is one already")
            return current.append(event)

        session[Note].register(Note, only_once)
        view = session.fork()
        view.dispatch(Line("first"))
        view.dispatch(Note("view"))
        session.dispatch(Note("session"))

        with pytest.raises(MergeConflict, match="there is one already"):
            session.merge(view)

        assert notes(session) == ["session"]
        assert lines(session) == []


class TestRollback:
    def test_a_forgotten_view_leaves_its_log(self, session: Session) -> None:
        view = session.fork()
        view.dispatch(Note("a"))
        view.dispatch(Line("b"))
        view.dispatch(Both("c"))
        view[Line].append(Line("d"))

        session.settle(view, keep=False)

        assert notes(session) == []
        assert lines(session) == ["b", "c", "d"]

    def test_logs_survive_two_levels_of_rollback(self, session: Session) -> None:
        outer = session.fork()
        outer.dispatch(Both("outer"))
        inner = outer.fork()
        inner.dispatch(Both("inner"))

        outer.settle(inner, keep=False)
        assert notes(outer) == ["outer"]
        assert lines(outer) == ["outer", "inner"]

        session.settle(outer, keep=False)
        assert notes(session) == []
        assert lines(session) == ["outer", "inner"]

    @pytest.mark.parametrize("concurrent", [False, True])
    def test_what_an_inner_view_lost_stays_lost_when_the_outer_one_is_kept(
        self, session: Session, concurrent: bool
    ) -> None:
        outer = session.fork()
        inner = outer.fork()
        inner.dispatch(Both("inner"))
        outer.settle(inner, keep=False)
        outer.dispatch(Both("outer"))
        if concurrent:
            session.dispatch(Both("beside"))  # the outer view's events are replayed

        session.merge(outer)

        beside = ["beside"] if concurrent else []
        assert notes(session) == [*beside, "outer"]
        assert lines(session) == [*beside, "inner", "outer"]

    def test_what_an_inner_view_kept_is_lost_with_the_outer_one(self, session: Session) -> None:
        outer = session.fork()
        inner = outer.fork()
        inner.dispatch(Both("inner"))
        outer.merge(inner)
        assert notes(outer) == ["inner"]

        session.settle(outer, keep=False)

        assert notes(session) == []
        assert lines(session) == ["inner"]

    def test_the_record_of_a_view_comes_in_with_it(self, session: Session) -> None:
        kept, lost = session.fork(), session.fork()
        kept.dispatch(Note("kept"))
        lost.dispatch(Note("lost"))

        session.settle(kept, keep=True, record=Both("record"))
        session.settle(lost, keep=False, record=Both("record"))

        assert notes(session) == ["kept", "record"]
        assert lines(session) == ["record", "record"]  # the second reached only the LOG

    def test_rolling_back_does_not_fail_with_a_reducer(
        self, session: Session, caplog: pytest.LogCaptureFixture
    ) -> None:
        def at_most_one(current: Slice[Line], event: Line) -> Slice[Line]:
            if len(current):
                raise ValueError("full")
            return current.append(event)

        session[Line].register(Line, at_most_one)
        view = session.fork()
        view.dispatch(Line("view"))
        session.dispatch(Line("session"))

        session.settle(view, keep=False, record=Line("record"))

        assert lines(session) == ["session"]
        assert caplog.text.count("a LOG lacks an event") == 2


class TestSavepoints:
    def test_going_back_inside_a_view(self, session: Session) -> None:
        session.dispatch(Note("before"))
        view = session.fork()
        view.dispatch(Both("a"))
        savepoint = view.snapshot()
        view.dispatch(Both("b"))

        view.restore(savepoint)
        view.dispatch(Both("c"))
        assert notes(view) == ["before", "a", "c"]

        session.merge(view)
        assert notes(session) == ["before", "a", "c"]
        assert lines(session) == ["a", "b", "c"]

    def test_what_was_taken_back_is_not_replayed(self, session: Session) -> None:
        view = session.fork()
        savepoint = view.snapshot()
        view.dispatch(Both("lost"))
        view.restore(savepoint)
        view.dispatch(Both("kept"))
        session.dispatch(Both("beside"))

        session.merge(view)

        assert notes(session) == ["beside", "kept"]
        assert lines(session) == ["beside", "lost", "kept"]

    def test_logs_survive_a_savepoint_and_the_view_around_it(self, session: Session) -> None:
        view = session.fork()
        first = view.snapshot()
        view.dispatch(Both("a"))
        second = view.snapshot()
        view.dispatch(Both("b"))
        view.restore(second)
        view.restore(first)

        session.settle(view, keep=False)

        assert lines(session) == ["a", "b"]
        assert notes(session) == []

    def test_savepoints_are_undone_by_blocks_that_fail(self, session: Session) -> None:
        def inner() -> None:
            with tool_transaction(session):
                session.dispatch(Both("b"))
                raise ValueError("inner")

        def outer() -> None:
            with tool_transaction(session):
                session.dispatch(Both("a"))
                with pytest.raises(ValueError, match="inner"):
                    inner()
                assert notes(session) == ["a"]
                raise ValueError("outer")

        with pytest.raises(ValueError, match="outer"):
            outer()

        assert notes(session) == []
        assert lines(session) == ["a", "b"]

    def test_resetting_in_a_view_is_part_of_it(self, session: Session) -> None:
        session.dispatch(Note("a"))
        kept, lost = session.fork(), session.fork()
        kept.reset()
        lost.reset()

        session.settle(lost, keep=False)
        assert notes(session) == ["a"]

        session.merge(kept)
        assert notes(session) == []


class TestSnapshotsAcrossViews:
    def test_a_view_can_go_back_to_a_snapshot_of_its_session(self, session: Session) -> None:
        session.dispatch(Note("a"))
        before = session.snapshot()
        session.dispatch(Note("b"))
        view = session.fork()
        view.dispatch(Both("c"))

        view.restore(before)
        assert notes(view) == ["a"]
        assert notes(session) == ["a", "b"]

        session.merge(view)
        assert notes(session) == ["a"]
        assert lines(session) == ["c"]

    def test_that_makes_newer_snapshots_of_the_view_unusable(self, session: Session) -> None:
        before = session.snapshot()
        view = session.fork()
        savepoint = view.snapshot()
        view.restore(before)

        with pytest.raises(SnapshotExpired):
            view.restore(savepoint)

    def test_that_makes_newer_ones_of_the_session_unusable_if_the_view_is_kept(
        self, session: Session
    ) -> None:
        first = session.snapshot()
        session.dispatch(Note("a"))
        second = session.snapshot()
        lost, kept = session.fork(), session.fork()

        for view in (lost, kept):
            view.restore(first)
            with pytest.raises(SnapshotExpired):
                view.restore(second)

        session.settle(lost, keep=False)
        session.restore(second)
        session.settle(kept, keep=True)
        with pytest.raises(SnapshotExpired):
            session.restore(second)
        session.restore(first)

    def test_a_snapshot_of_a_call_that_was_kept_can_be_restored_later(
        self, session: Session
    ) -> None:
        before = session.snapshot()
        view = session.fork()
        view.dispatch(Note("a"))
        during = view.snapshot()
        view.dispatch(Note("b"))
        session.merge(view)

        session.restore(during)
        assert notes(session) == ["a"]

        session.restore(before)
        with pytest.raises(SnapshotExpired):
            session.restore(during)

    @pytest.mark.parametrize("ended", [False, True])
    def test_a_snapshot_of_a_call_that_was_not_kept_cannot(
        self, session: Session, ended: bool
    ) -> None:
        view = session.fork()
        nested = view.fork()
        nested.dispatch(Note("a"))
        taken = [view.snapshot(), nested.snapshot()]
        view.merge(nested)
        if ended:
            session.settle(view, keep=False)

        for snapshot in taken:
            with pytest.raises(SnapshotExpired, match="the call that took it was not committed"):
                session.restore(snapshot)

    def test_a_nested_view_can_go_back_to_a_savepoint_of_the_outer_one(
        self, session: Session
    ) -> None:
        outer = session.fork()
        savepoint = outer.snapshot()
        outer.dispatch(Both("a"))
        newer = outer.snapshot()
        inner = outer.fork()
        inner.dispatch(Both("b"))

        inner.restore(savepoint)
        outer.merge(inner)

        assert notes(outer) == []
        with pytest.raises(SnapshotExpired):
            outer.restore(newer)
        outer.restore(savepoint)
        session.merge(outer)
        assert notes(session) == []
        assert lines(session) == ["a", "b"]

    def test_a_view_goes_back_to_a_snapshot_of_a_nested_one_that_was_kept(
        self, session: Session
    ) -> None:
        outer = session.fork()
        outer.dispatch(Both("a"))
        inner = outer.fork()
        during = inner.snapshot()
        inner.dispatch(Both("b"))
        outer.merge(inner)
        session.dispatch(Line("beside"))  # the outer view's events are replayed

        outer.restore(during)
        session.merge(outer)

        assert notes(session) == ["a"]
        assert lines(session) == ["beside", "a", "b"]

    def test_a_view_restores_its_own_snapshot_after_a_merge(self, session: Session) -> None:
        view = session.fork()
        view.dispatch(Both("a"))
        savepoint = view.snapshot()
        view.dispatch(Both("b"))
        session.merge(view)

        view.restore(savepoint)
        session.merge(view)

        assert notes(session) == ["a"]
        assert lines(session) == ["a", "b"]

    def test_a_snapshot_does_not_keep_its_view_alive(self, session: Session) -> None:
        import gc
        import weakref

        view = session.fork()
        snapshot = view.snapshot()
        gone = weakref.ref(view)

        del view
        gc.collect()

        assert gone() is None
        with pytest.raises(SnapshotExpired):
            session.restore(snapshot)


class TestSealing:
    def test_a_sealed_view_refuses_every_change_and_logs_it(
        self, session: Session, caplog: pytest.LogCaptureFixture
    ) -> None:
        view = session.fork()
        view.dispatch(Note("a"))
        snapshot = view.snapshot()
        view.seal("the call has ended")

        changes: dict[str, Callable[[], object]] = {
            "Note": lambda: view.dispatch(Note("b")),
            "a change to the slice of Note": lambda: view[Note].clear(),
            "a restore or reset": view.reset,
        }
        for name, change in changes.items():
            with pytest.raises(ViewClosed, match="the call has ended"):
                change()
            assert f"Refused {name}: the call has ended" in caplog.text
        with pytest.raises(ViewClosed):
            view.restore(snapshot)
        assert notes(view) == ["a"]

        session.settle(view, keep=True)
        assert notes(session) == ["a"]

    def test_nothing_settles_into_a_sealed_view(self, session: Session) -> None:
        outer = session.fork()
        inner = outer.fork()
        inner.dispatch(Note("a"))
        outer.seal("the outer call has ended")

        with pytest.raises(ViewClosed):
            outer.merge(inner)
        with pytest.raises(ViewClosed):
            outer.settle(inner, keep=False)

    def test_a_read_only_view_refuses_changes_but_not_reading(self, session: Session) -> None:
        empty = session.snapshot()
        session.dispatch(Note("a"))
        view = session.fork()
        view.read_only = "this tool only reads"

        with pytest.raises(ReadOnlyView, match="this tool only reads"):
            view.dispatch(Note("b"))
        with pytest.raises(ReadOnlyView):
            view.reset()
        with pytest.raises(ReadOnlyView):
            view.restore(empty)
        view.restore(view.snapshot())  # which changes nothing
        assert notes(view) == ["a"]

        nested = view.fork()
        view.merge(nested)
        nested.dispatch(Note("b"))
        with pytest.raises(ReadOnlyView):
            view.merge(nested)

    def test_sealing_waits_for_a_write_under_way_and_lets_no_later_one_in(
        self, session: Session
    ) -> None:
        view = session.fork()
        started, go_on = threading.Event(), threading.Event()

        def slow(current: Slice[Note], event: Increment) -> Slice[Note]:
            started.set()
            go_on.wait(120)
            return current.append(Note("slow"))

        session[Note].register(Increment, slow)
        with ThreadPoolExecutor(2) as pool:
            write = pool.submit(view.dispatch, Increment())
            assert started.wait(120)
            seal = pool.submit(view.seal, "ended")
            go_on.set()
            write.result(120)
            seal.result(120)

        with pytest.raises(ViewClosed):
            view.dispatch(Note("late"))
        assert notes(view) == ["slow"]


class TestTrackedReads:
    """A view depends on the answers that it was given, and on nothing else."""

    @pytest.mark.parametrize(
        "ask",
        [
            lambda view: view[Note].latest(),
            lambda view: view[Note].all(),
            lambda view: list(view[Note]),
            lambda view: len(view[Note]),
            lambda view: view[Note].where(lambda note: note.text == "new"),
            lambda view: list(view[Note].newest_first()),
            lambda view: view[Note].select(lambda values: len(values) > 1),
            lambda view: view.read_slice(Note),
        ],
        ids=["latest", "all", "iter", "len", "where", "newest first", "select", "read slice"],
    )
    def test_a_view_is_not_merged_once_an_answer_would_be_another(
        self, session: Session, ask: Callable[[Session], object]
    ) -> None:
        session.dispatch(Note("old"))
        view = session.fork()
        ask(view)
        view.dispatch(Line("in the view"))
        session.dispatch(Note("new"))

        for attempt in (session.check_conflicts, session.merge):
            with pytest.raises(MergeConflict, match="slice Note") as caught:
                attempt(view)
            assert caught.value.paths == ("Note",)
        assert lines(session) == []

    def test_it_is_merged_where_the_answer_is_the_same(self, session: Session) -> None:
        session[Note].seed([Note("a"), Note("b")])
        view = session.fork()
        assert view[Note].latest() == Note("b")
        assert len(view[Note]) == 2
        assert view[Note].where(lambda note: note.text > "a") == (Note("b"),)
        view.dispatch(Line("in the view"))

        session[Note].seed([Note("A"), Note("b")])  # another slice, but not for these questions
        session[Count].seed(Count(1))
        session.check_conflicts(view)
        session.merge(view)

        assert notes(session) == ["A", "b"]
        assert lines(session) == ["in the view"]

    def test_what_a_view_wrote_before_it_asked_is_part_of_the_question(
        self, session: Session
    ) -> None:
        view = session.fork()
        view[Count].seed(Count(5))
        assert view[Count].latest() == Count(5)
        session[Count].seed(Count(1))

        session.merge(view)

        assert session[Count].all() == (Count(5),)

    def test_what_merges_by_itself_conflicts_when_it_was_looked_at(self, session: Session) -> None:
        view = session.fork()
        view.dispatch(Increment())
        assert view[Count].latest() == Count(1)
        session.dispatch(Increment())

        with pytest.raises(MergeConflict):
            session.merge(view)

    def test_reading_without_changing_is_checked_as_well(self, session: Session) -> None:
        view = session.fork()
        notes(view)
        session.check_conflicts(view)
        session.dispatch(Note("a"))

        with pytest.raises(MergeConflict):
            session.check_conflicts(view)

    def test_a_question_that_fails_on_what_others_put_there_is_answered_otherwise(
        self, session: Session
    ) -> None:
        view = session.fork()
        view[Note].where(lambda note: int(note.text) > 1)
        session.dispatch(Note("not a number"))

        with pytest.raises(MergeConflict):
            session.merge(view)

    def test_a_view_that_does_not_track_is_merged_whatever_it_read(self, session: Session) -> None:
        view = session.fork(tracks_reads=False)
        assert notes(view) == []
        view.dispatch(Note("in the view"))
        session.dispatch(Note("in the session"))

        session.merge(view)

        assert notes(session) == ["in the session", "in the view"]
        assert not view.tracks_reads

    @pytest.mark.parametrize("keep", [True, False])
    def test_what_an_inner_view_was_told_counts_for_the_outer_one(
        self, session: Session, keep: bool
    ) -> None:
        outer = session.fork()
        inner = outer.fork(tracks_reads=False)
        assert inner.tracks_reads  # it has no choice in a view that does
        notes(inner)
        outer.settle(inner, keep=keep)
        session.dispatch(Note("a"))

        with pytest.raises(MergeConflict):
            session.merge(outer)

    def test_what_was_read_before_a_savepoint_was_gone_back_to_still_counts(
        self, session: Session
    ) -> None:
        view = session.fork()
        for _ in range(3):
            savepoint = view.snapshot()
            notes(view)
            view.dispatch(Note("undone"))
            view.restore(savepoint)
        session.dispatch(Line("no matter"))
        session.check_conflicts(view)
        session.dispatch(Note("a"))

        with pytest.raises(MergeConflict):
            session.merge(view)

    def test_going_back_to_a_snapshot_of_the_session_needs_it_to_be_usable_still(
        self, session: Session
    ) -> None:
        session.dispatch(Note("a"))
        old = session.snapshot()
        session.dispatch(Note("b"))
        new = session.snapshot(tag="new")
        view = session.fork()
        view.restore(new)
        session.dispatch(Line("no matter"))
        session.check_conflicts(view)
        session.restore(old)

        with pytest.raises(MergeConflict) as caught:
            session.merge(view)
        assert caught.value.paths == ("snapshot 'new'",)

    def test_asking_the_same_again_costs_no_memory(self, session: Session) -> None:
        session.dispatch(Note("a"))
        view = session.fork()
        tracemalloc.start()
        try:
            for _ in range(1000):
                view[Note].latest()
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert grown < 20_000


@dataclass(frozen=True)
class Params:
    fail: bool = False


def tool(handler: Callable[..., Any], **options: Any) -> Tool[Params, None]:
    return Tool[Params, None](name="work", description="Work.", handler=handler, **options)


class TestInCalls:
    def test_the_session_a_handler_kept_leads_to_its_call(self, session: Session) -> None:
        def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
            session.dispatch(Both("through the outer session"))
            assert notes(context.session) == notes(session)
            with ThreadPoolExecutor(1) as pool:  # outside the call, nothing is to be seen
                assert pool.submit(notes, session).result() == []
            return ToolResult.error("no") if params.fail else ToolResult.ok()

        tool(handler)(Params(fail=True), context=ToolContext(session=session))
        assert notes(session) == []
        assert len(lines(session)) == 1

        tool(handler)(Params(), context=ToolContext(session=session))
        assert notes(session) == ["through the outer session"]
        assert len(lines(session)) == 2

    def test_a_failed_call_does_not_change_state_through_its_record(self) -> None:
        """A reducer on ToolInvoked sees every call in LOG slices, kept calls in STATE slices."""
        session = Session()
        session[Note].register(
            ToolInvoked, lambda current, event: current.append(Note(str(event.success)))
        )
        session[Line].register(
            ToolInvoked, lambda current, event: current.append(Line(str(event.success)))
        )

        def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
            return ToolResult.error("no") if params.fail else ToolResult.ok()

        for fail in (False, True, False):
            tool(handler)(Params(fail=fail), context=ToolContext(session=session))

        assert notes(session) == ["True", "True"]
        assert lines(session) == ["True", "False", "True"]
        assert len(session[ToolInvoked]) == 3

    @pytest.mark.parametrize("slice_type", [Note, Line])
    def test_a_call_whose_record_cannot_be_reduced_fails_and_is_recorded(
        self, slice_type: type, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(current: Slice[Any], event: object) -> Slice[Any]:
            raise ValueError("cannot count this")

        def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session.dispatch(Count(1))
            return ToolResult.ok()

        session = Session()
        session[slice_type].register(ToolInvoked, broken)

        result = tool(handler)(Params(), context=ToolContext(session=session))

        assert not result.success
        assert "cannot count this" in result.message
        assert session[Count].all() == ()
        assert [event.success for event in session[ToolInvoked]] == [False]

    @pytest.mark.parametrize("fail", [False, True])
    def test_a_child_made_in_a_call_belongs_to_the_session_if_the_call_is_kept(
        self, session: Session, fail: bool
    ) -> None:
        made: list[Session] = []

        def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
            made.append(Session(parent=context.session))
            assert len(context.session.children) == len(session.children) == 1
            return ToolResult.error("no") if params.fail else ToolResult.ok()

        tool(handler)(Params(fail=fail), context=ToolContext(session=session))

        assert session.children == (() if fail else tuple(made))
        assert made[0].parent is session  # not the view of a call that has ended

    def test_a_reducer_registered_in_a_call_stays(self, session: Session) -> None:
        def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
            context.session[Count].register(Note, lambda c, e: c.append(Count(9)))
            return ToolResult.error("no")

        tool(handler)(Params(), context=ToolContext(session=session))
        session.dispatch(Note("a"))

        assert session[Count].all() == (Count(9),)

    def test_a_block_that_fails_in_a_tool_that_only_reads_ends_with_its_own_error(
        self, session: Session
    ) -> None:
        def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
            with tool_transaction(context.session, context.resources):
                raise ValueError("my own error")

        result = tool(handler, reach="read")(Params(), context=ToolContext(session=session))

        assert result.message == "my own error"

    def test_a_view_written_after_its_call_ended_is_refused(
        self, session: Session, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept: list[Session] = []

        def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
            kept.append(context.session)
            return ToolResult.ok()

        tool(handler)(Params(), context=ToolContext(session=session))

        with caplog.at_level(logging.ERROR), pytest.raises(ViewClosed, match="has ended"):
            kept[0].dispatch(Note("late"))
        assert notes(session) == []
        assert "Refused Note" in caplog.text


# A model: a view is a list of changes, and what is visible is what they make of its start.

Change = tuple[str, int]
Block = tuple[Any, ...]

changes = st.one_of(
    st.tuples(st.sampled_from(["note", "line", "both", "increment", "clear"]), st.integers(0, 5)),
    st.tuples(st.just("seed"), st.integers(0, 35)),
    st.tuples(st.just("reset"), st.just(0)),
)


def blocks(depth: int) -> st.SearchStrategy[list[Block]]:
    plain = st.one_of(
        changes.map(lambda change: ("change", change)),
        st.just(("snapshot",)),
        st.tuples(st.just("restore"), st.integers(0, 6)),
    )
    if depth == 0:
        return st.lists(plain, max_size=6)
    inner = blocks(depth - 1)
    beside = st.lists(changes, max_size=2)
    view = st.tuples(st.just("view"), st.booleans(), inner, beside)
    return st.lists(st.one_of(plain, view), max_size=6)


def make(session: Session, change: Change) -> None:
    kind, number = change
    if kind == "note":
        session.dispatch(Note(str(number)))
    elif kind == "line":
        session.dispatch(Line(str(number)))
    elif kind == "both":
        session.dispatch(Both(str(number)))
    elif kind == "increment":
        session.dispatch(Increment())
    elif kind == "clear":
        session[Note].clear(lambda note: note.text == str(number))
    elif kind == "seed":
        session[Note].seed(Note("seed") for _ in range(number))
    else:
        session.reset()


Visible = tuple[tuple[str, ...], int, tuple[str, ...]]


def follow(visible: Visible, change: Change, only_log: bool) -> Visible:
    kind, number = change
    state, count, log = visible
    text = str(number)
    if kind in ("line", "both"):
        log = (*log, text)
    if not only_log:
        if kind in ("note", "both"):
            state = (*state, text)
        elif kind == "increment":
            count += 1
        elif kind == "clear":
            state = tuple(t for t in state if t != text)
        elif kind == "seed":
            state = ("seed",) * number
        elif kind == "reset":
            state, count = (), 0
    return state, count, log


class Model:
    """What a session or view should hold: its start, and the changes since."""

    def __init__(self, start: Visible, expired: set[int]) -> None:
        self.start = start
        self.changes: list[tuple[Change | Visible, bool]] = []
        self.expired = set(expired)

    def visible(self) -> Visible:
        visible = self.start
        for change, only_log in self.changes:
            if len(change) == 2:
                visible = follow(visible, change, only_log)
            elif not only_log:
                visible = (*change[:2], visible[2])
        return visible

    def forget_since(self, mark: int) -> None:
        self.changes[mark:] = [(change, True) for change, _ in self.changes[mark:]]


class Program:
    """Runs the same steps on a session and on its model."""

    def __init__(self) -> None:
        self.snapshots: list[tuple[Snapshot, Model, int, Visible]] = []

    def run(self, session: Session, model: Model, steps: list[Block]) -> None:
        for step, *details in steps:
            if step == "change":
                make(session, details[0])
                model.changes.append((details[0], False))
            elif step == "view":
                self.run_view(session, model, *details)
            elif step == "snapshot":
                taken = (session.snapshot(), model, len(model.changes), model.visible())
                self.snapshots.append(taken)
            elif details[0] < len(self.snapshots):
                self.restore(session, model, details[0])
            count = session[Count].latest()
            number = 0 if count is None else count.value
            assert (tuple(notes(session)), number, tuple(lines(session))) == model.visible()

    def run_view(
        self, session: Session, model: Model, keep: bool, inner: list[Block], beside: list[Change]
    ) -> None:
        first = len(self.snapshots)
        # Looked at after every step, so what is read must not count.
        view = session.fork(tracks_reads=False)
        view_model = Model(model.visible(), model.expired)
        self.run(view, view_model, inner)
        for change in beside:
            make(session, change)
            model.changes.append((change, False))
        session.settle(view, keep=keep)
        if keep:
            model.expired |= view_model.expired
        else:
            view_model.forget_since(0)
            model.expired |= set(range(first, len(self.snapshots)))
        model.changes += view_model.changes

    def restore(self, session: Session, model: Model, index: int) -> None:
        snapshot, taken_of, mark, visible = self.snapshots[index]
        if index in model.expired:
            with pytest.raises(SnapshotExpired):
                session.restore(snapshot)
            return
        session.restore(snapshot)
        model.expired |= set(range(index + 1, len(self.snapshots)))
        if taken_of is model:
            model.forget_since(mark)
        else:
            model.changes.append((visible, False))


@given(blocks(2))
def test_a_session_is_what_was_kept_and_its_log_is_everything(program: list[Block]) -> None:
    Program().run(new_session(), Model(((), 0, ()), set()), program)


# Interrupts: Ctrl-C can come between any two lines.


def interrupted(run: Callable[[], object], line: int) -> bool:
    """Run it with a KeyboardInterrupt at the given line of the session's code; True if it came."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(
            ("weakincentives/session/session.py", "/slices.py")
        ):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    gc.disable()  # what an earlier test left is not to be collected in between
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


class Settled:
    """All that settling asks of a transaction."""

    settled = False


class Prepared:
    """A session with a view, some snapshots, and an operation to interrupt."""

    def __init__(self, name: str) -> None:
        self.session = session = new_session()
        session.dispatch(Both("before"))
        self.old = session.snapshot()
        session.dispatch(Both("since"))
        self.new = session.snapshot()
        self.view = session.fork()
        self.view.dispatch(Both("view"))
        self.savepoint = self.view.snapshot()
        self.view.dispatch(Both("more"))
        self.transaction: Any = Settled()
        self.run: Callable[[], object] = {
            "dispatch": lambda: session.dispatch(Both("now")),
            "seed": lambda: session[Note].seed([Note("now")]),
            "reset": session.reset,
            "snapshot": session.snapshot,
            "restore": lambda: session.restore(self.old),
            "restore savepoint": lambda: self.view.restore(self.savepoint),
            "restore in view": lambda: self.view.restore(self.old),
            "merge": lambda: session.merge(self.view),
            "commit": lambda: self.settle(keep=True),
            "roll back": lambda: self.settle(keep=False),
            "register": lambda: session[Note].register(Note, append_all, policy=SlicePolicy.STATE),
            "fork": session.fork,
        }[name]

    def settle(self, *, keep: bool) -> None:
        self.session.settle(
            self.view, keep=keep, record=Both("record"), transaction=self.transaction
        )

    def usable(self, snapshot: Snapshot, on: Session) -> bool:
        probe = on.fork()
        try:
            probe.restore(snapshot)
        except SnapshotExpired:
            return False
        return True

    def observed(self) -> object:
        return (
            *((notes(s), lines(s), s[Count].all()) for s in (self.session, self.view)),
            *(self.usable(s, self.session) for s in (self.old, self.new, self.savepoint)),
            *(self.usable(s, self.view) for s in (self.old, self.new, self.savepoint)),
            self.session.handles(Note),
            self.transaction.settled,
        )


@pytest.mark.parametrize(
    "name",
    [
        "dispatch",
        "seed",
        "reset",
        "snapshot",
        "restore",
        "restore savepoint",
        "restore in view",
        "merge",
        "commit",
        "roll back",
        "register",
        "fork",
    ],
)
def test_an_interrupt_finds_all_of_an_operation_done_or_nothing(name: str) -> None:
    untouched = Prepared(name).observed()
    finished = Prepared(name)
    finished.run()
    done = finished.observed()
    line = 1
    while True:
        prepared = Prepared(name)
        came = interrupted(prepared.run, line)
        assert prepared.observed() in ((untouched, done) if came else (done,))
        prepared.session.dispatch(Note("and it goes on"))
        if not came:
            break
        line += 1
    assert line > 5
