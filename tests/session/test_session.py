"""A session holds typed slices, changed by events, and can go back to its snapshots."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    execute_tool,
)
from weakincentives.errors import ReducerError, SessionError, SnapshotError, SnapshotExpired
from weakincentives.prompt import (
    PolicyState,
    QuotaPolicy,
    RateLimitPolicy,
    SequentialDependencyPolicy,
    if_offered,
)
from weakincentives.runtime import (
    Dispatcher,
    PromptRendered,
    Session,
    Slice,
    SlicePolicy,
    Snapshot,
    ToolInvoked,
    reducer,
    replace_latest,
    slice_policy,
)
from weakincentives.testing import FakeClock


@dataclass(frozen=True)
class Note:
    text: str


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True)
class Line:
    text: str


@dataclass(frozen=True)
class Add:
    amount: int


@dataclass(frozen=True)
class Subtract:
    amount: int


@dataclass(frozen=True)
class Total:
    value: int = 0

    @reducer(on=Add)
    def add(self, event: Add) -> Total:
        return replace(self, value=self.value + event.amount)

    @reducer(on=Subtract)
    def subtract(self, event: Subtract) -> Total:
        return replace(self, value=self.value - event.amount)


@dataclass(frozen=True)
class Route:
    """Itself an iterable."""

    stops: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stops)


def added(current: Slice[Total], event: Add) -> Slice[Total]:
    total = current.latest() or Total()
    return current.replace(Total(total.value + event.amount))


def broken(current: Slice[Any], event: object) -> Slice[Any]:
    raise ZeroDivisionError("no")


class TestDispatch:
    def test_an_event_without_a_reducer_is_kept_in_the_slice_of_its_own_type(self) -> None:
        session = Session()

        session.dispatch(Note("a"))
        session.dispatch(Note("b"))
        session.dispatch(Line("c"))

        assert session[Note].all() == tuple(session[Note]) == (Note("a"), Note("b"))
        assert session[Note].latest() == Note("b")
        assert session[Note].where(lambda note: note.text == "a") == (Note("a"),)
        assert list(session[Note].newest_first()) == [Note("b"), Note("a")]
        assert len(session[Note]) == 2
        assert session[Line].all() == (Line("c"),)
        assert session[Add].latest() is None

    def test_a_registered_reducer_gets_the_event_instead(self) -> None:
        session = Session()
        session[Total].register(Add, added)

        session.dispatch(Add(2))
        session.dispatch(Add(3))

        assert session[Total].all() == (Total(5),)
        assert session[Add].all() == ()
        assert session.handles(Add)
        assert not session.handles(Note)

    def test_one_event_changes_every_slice_that_asked_for_it(self) -> None:
        session = Session()
        session[Total].register(Add, added)
        session[Note].register(Add, lambda current, event: current.append(Note(str(event.amount))))

        session.dispatch(Add(2))

        assert session[Total].latest() == Total(2)
        assert session[Note].latest() == Note("2")

    def test_a_second_reducer_for_the_same_slice_and_event_takes_the_place_of_the_first(
        self,
    ) -> None:
        session = Session()
        session[Note].register(Note, broken)
        session[Note].register(Note, replace_latest)

        session.dispatch(Note("a"))
        session.dispatch(Note("b"))

        assert session[Note].all() == (Note("b"),)

    def test_a_reducer_may_return_plain_values(self) -> None:
        session = Session()
        session[Note].register(Note, lambda current, event: [*current, event, event])

        session.dispatch(Note("a"))

        assert session[Note].all() == (Note("a"), Note("a"))

    def test_what_is_derived_from_a_log_event_does_not_cost_the_log(self) -> None:
        session = Session()
        session[Note].register(Line, lambda current, event: current.append(Note(event.text)))

        session.dispatch(Line("a"))

        assert session[Line].all() == (Line("a"),)
        assert session[Note].all() == (Note("a"),)

    def test_a_log_may_have_a_reducer_of_its_own(self) -> None:
        session = Session()
        session[Note].register(Line, lambda current, event: current.append(Note(event.text)))
        session[Line].register(Line, replace_latest)

        session.dispatch(Line("a"))
        session.dispatch(Line("b"))

        assert session[Line].all() == (Line("b"),)
        assert len(session[Note]) == 2

    def test_a_slice_that_was_read_does_not_change_afterwards(self) -> None:
        session = Session()
        session.dispatch(Note("a"))
        before = session.read_slice(Note)

        session.dispatch(Note("b"))

        assert before.all() == (Note("a"),)

    def test_increments_from_many_threads_are_all_counted(self) -> None:
        session = Session()
        session[Total].register(Add, added)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(session.dispatch, [Add(1)] * 200))

        assert session[Total].latest() == Total(200)

    def test_reducers_registered_from_many_threads_are_all_there(self) -> None:
        session = Session()
        types = [type(f"Slice{n}", (), {}) for n in range(50)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda t: session[t].register(Add, lambda c, e: c.append(e)), types))

        session.dispatch(Add(1))

        assert all(len(session[slice_type]) == 1 for slice_type in types)


class TestReducerErrors:
    def test_a_reducer_that_raises_leaves_every_slice_as_it_was(self) -> None:
        session = Session()
        session[Total].register(Add, added)
        session[Line].register(Add, lambda current, event: current.append(Line("added")))
        session.dispatch(Add(1))
        session[Note].register(Add, broken)

        with pytest.raises(ReducerError, match=r"slice Note on Add failed: ZeroDivisionError: no"):
            session.dispatch(Add(2))

        assert session[Total].all() == (Total(1),)
        assert session[Line].all() == (Line("added"),)
        assert session[Note].all() == ()

    def test_a_reducer_that_returns_nothing_useful_is_an_error(self) -> None:
        session = Session()
        session[Note].register(Note, lambda current, event: None)  # type: ignore[arg-type, return-value]

        with pytest.raises(ReducerError, match="must return all values of the slice, got None"):
            session.dispatch(Note("a"))

    def test_an_interrupt_in_a_reducer_passes_and_changes_nothing(self) -> None:
        def interrupted(current: Slice[Note], event: Add) -> Slice[Note]:
            raise KeyboardInterrupt

        session = Session()
        session[Total].register(Add, added)
        session[Note].register(Add, interrupted)

        with pytest.raises(KeyboardInterrupt):
            session.dispatch(Add(1))

        assert session[Total].all() == ()

    @pytest.mark.parametrize("raises", [False, True])
    def test_a_reducer_must_not_change_its_session(self, raises: bool) -> None:
        session = Session()

        def meddle(current: Slice[Total], event: Add) -> Slice[Total]:
            session.dispatch(Note("from a reducer"))
            if raises:
                raise ValueError("and fails")
            return current.append(Total(event.amount))

        session[Total].register(Add, meddle)

        with pytest.raises(SessionError):
            session.dispatch(Add(1))

        assert session[Note].all() == ()
        assert session[Total].all() == ()

    def test_a_reducer_may_read_its_session(self) -> None:
        session = Session()
        session.dispatch(Note("a"))
        session[Total].register(Add, lambda c, e: c.append(Total(len(session[Note]))))

        session.dispatch(Add(1))

        assert session[Total].latest() == Total(1)

    def test_a_failing_predicate_names_the_slice(self) -> None:
        session = Session()
        session.dispatch(Note("a"))

        with pytest.raises(ReducerError, match="a change to the slice of Note failed"):
            session[Note].clear(lambda note: note.missing)  # type: ignore[attr-defined]

        assert session[Note].all() == (Note("a"),)


class TestSlices:
    def test_seeding_one_value_or_several(self) -> None:
        session = Session()
        session.dispatch(Note("old"))

        session[Note].seed(Note("a"))
        assert session[Note].all() == (Note("a"),)

        session[Note].seed(Note(text) for text in "bc")
        assert session[Note].all() == (Note("b"), Note("c"))

        session[Note].seed(())
        assert session[Note].all() == ()

    def test_a_value_that_is_itself_iterable_is_seeded_as_one(self) -> None:
        session = Session()
        north, south = Route(("a", "b")), Route(("b", "a"))

        session[Route].seed(north)
        assert session[Route].all() == (north,)

        session[Route].seed([north, south])
        assert session[Route].all() == (north, south)

        session[str].seed("whole")
        assert session[str].all() == ("whole",)

    @pytest.mark.parametrize("wrong", [Add(1), [Note("a"), Add(1)], None, "text"])
    def test_values_of_another_type_are_refused_and_change_nothing(self, wrong: Any) -> None:
        session = Session()
        session[Note].seed(Note("kept"))

        with pytest.raises(TypeError, match="the slice of Note cannot hold a"):
            session[Note].seed(wrong)
        with pytest.raises(TypeError, match="the slice of Note cannot hold a"):
            session[Note].append(wrong)

        assert session[Note].all() == (Note("kept"),)

    def test_appending_goes_past_the_reducers(self) -> None:
        session = Session()
        session[Note].register(Note, broken)

        session[Note].append(Note("a"))

        assert session[Note].all() == (Note("a"),)

    def test_clearing_all_or_some(self) -> None:
        session = Session()
        session[Note].seed([Note("a"), Note("b"), Note("c")])

        session[Note].clear(lambda note: note.text == "b")
        assert session[Note].all() == (Note("a"), Note("c"))

        session[Note].clear()
        assert session[Note].all() == ()

    def test_updating_with_a_function_of_the_slice(self) -> None:
        session = Session()
        session[Note].seed([Note("a"), Note("b")])

        session[Note].update(lambda current: current.replace(*current.newest_first()))

        assert session[Note].all() == (Note("b"), Note("a"))


class TestPolicies:
    def test_a_slice_can_be_made_a_log_where_it_is_registered(self) -> None:
        session = Session()
        session[Total].register(Add, added, policy=SlicePolicy.LOG)
        before = session.snapshot()

        session.dispatch(Add(1))
        session[Total].append(Total(7))
        session.restore(before)
        session.reset()

        assert session[Total].all() == (Total(1), Total(7))

    def test_every_way_to_a_slice_follows_its_policy(self) -> None:
        """Also a reducer that was registered before, and the default for events of its type."""
        session = Session()
        session[Note].register(Add, lambda current, event: current.append(Note("added")))
        session.dispatch(Note("default"))
        session.reset()
        session[Note].register(
            Subtract,
            lambda current, event: current.append(Note("subtracted")),
            policy=SlicePolicy.LOG,
        )

        for event in (Add(1), Subtract(1), Note("default")):
            session.dispatch(event)
        session.reset()

        assert [note.text for note in session[Note]] == ["added", "subtracted", "default"]

    def test_a_slice_in_use_keeps_its_policy(self) -> None:
        session = Session()
        session.dispatch(Note("a"))
        session.dispatch(Line("b"))

        with pytest.raises(SessionError, match="Note cannot become LOG"):
            session[Note].register(Add, broken, policy=SlicePolicy.LOG)
        with pytest.raises(SessionError, match="Line cannot become STATE"):
            session[Line].register(Add, broken, policy=SlicePolicy.STATE)

        session.dispatch(Add(1))
        assert session[Add].all() == (Add(1),)

    def test_reset_empties_state_and_keeps_logs(self) -> None:
        session = Session()
        session.dispatch(Note("a"))
        session.dispatch(Line("b"))

        session.reset()

        assert session[Note].all() == ()
        assert session[Line].all() == (Line("b"),)


class TestInstall:
    def test_every_marked_method_reduces_its_event(self) -> None:
        session = Session()
        session.install(Total)

        session.dispatch(Add(5))
        session.dispatch(Subtract(2))

        assert session[Total].all() == (Total(3),)

    def test_the_first_event_meets_the_initial_value(self) -> None:
        session = Session()
        session.install(Total, initial=lambda: Total(100))

        session.dispatch(Subtract(1))

        assert session[Total].latest() == Total(99)

    def test_the_first_event_meets_a_seeded_value(self) -> None:
        session = Session()
        session.install(Total)
        session[Total].seed(Total(10))

        session.dispatch(Add(1))

        assert session[Total].latest() == Total(11)

    def test_the_policy_holds_for_all_its_events(self) -> None:
        session = Session()
        session.install(Total, policy=SlicePolicy.LOG)

        session.dispatch(Add(5))
        session.dispatch(Subtract(1))
        session.reset()

        assert session[Total].all() == (Total(4),)

    def test_installing_twice_is_the_same_as_once(self) -> None:
        session = Session()
        session.install(Total)
        session.install(Total)

        session.dispatch(Add(5))

        assert session[Total].all() == (Total(5),)

    def test_inherited_reducers_work(self) -> None:
        @dataclass(frozen=True)
        class Fancy(Total):
            colour: str = "red"

        session = Session()
        session.install(Fancy)

        session.dispatch(Add(5))

        assert session[Fancy].latest() == Fancy(5, "red")

    def test_a_class_without_reducers_is_refused(self) -> None:
        with pytest.raises(SessionError, match="Note has no @reducer"):
            Session().install(Note)

    def test_two_reducers_for_one_event_are_refused(self) -> None:
        class Twice:
            @reducer(on=Add)
            def one(self, event: Add) -> Twice: ...

            @reducer(on=(Subtract, Add))
            def two(self, event: Add) -> Twice: ...

        with pytest.raises(SessionError, match="two @reducer methods for Add: one and two"):
            Session().install(Twice)

    def test_a_method_that_forgets_to_return_is_an_error(self) -> None:
        class Forgetful:
            @reducer(on=Add)
            def add(self, event: Add) -> Forgetful: ...

        session = Session()
        session.install(Forgetful)

        with pytest.raises(ReducerError, match="add must return a Forgetful, got NoneType"):
            session.dispatch(Add(1))


class TestSnapshots:
    def test_restoring_brings_back_state_and_leaves_logs(self) -> None:
        session = Session(clock=FakeClock(50.0))
        session.dispatch(Note("a"))
        before = session.snapshot(tag="before")
        session.dispatch(Note("b"))
        session.dispatch(Total(1))
        session.dispatch(Line("c"))

        session.restore(before)

        assert (before.tag, before.taken_at) == ("before", 50.0)
        assert session[Note].all() == (Note("a"),)
        assert session[Total].all() == ()
        assert session[Line].all() == (Line("c"),)

    def test_a_snapshot_can_be_restored_many_times(self) -> None:
        session = Session()
        empty = session.snapshot()
        for _ in range(3):
            session.dispatch(Note("a"))
            session.restore(empty)
            assert session[Note].all() == ()

    def test_restoring_an_older_snapshot_makes_newer_ones_unusable(self) -> None:
        session = Session()
        first = session.snapshot(tag="first")
        session.dispatch(Note("a"))
        second = session.snapshot(tag="second")
        session.dispatch(Note("b"))

        session.restore(second)
        session.restore(first)

        with pytest.raises(SnapshotExpired, match="'second'"):
            session.restore(second)
        assert session[Note].all() == ()
        later = session.snapshot()
        session.restore(later)
        session.restore(first)

    def test_resetting_does_not_expire_snapshots(self) -> None:
        session = Session()
        session.dispatch(Note("a"))
        before = session.snapshot()
        session.reset()

        session.restore(before)

        assert session[Note].all() == (Note("a"),)

    def test_a_snapshot_of_another_session_is_refused(self) -> None:
        with pytest.raises(SnapshotError, match="another session"):
            Session().restore(Session().snapshot())

    def test_what_became_a_log_meanwhile_is_not_restored_as_state(self) -> None:
        session = Session()
        session.dispatch(Note("a"))
        before = session.snapshot()
        session.reset()
        session[Note].register(Note, replace_latest, policy=SlicePolicy.LOG)

        with pytest.raises(SnapshotError, match="slice of Note is STATE in the snapshot and LOG"):
            session.restore(before)

    def test_dropping_a_snapshot_frees_it_and_what_only_it_held(self) -> None:
        class Big: ...

        session = Session()
        big = Big()
        session.dispatch(big)
        freed = weakref.ref(big)
        snapshot = session.snapshot()
        gone = weakref.ref(snapshot)
        session.reset()
        del big
        assert freed() is not None

        del snapshot
        gc.collect()

        assert gone() is None
        assert freed() is None

    def test_snapshots_cost_the_same_however_many_are_held(self) -> None:
        session = Session()
        session.dispatch(Note("a"))

        held = [session.snapshot() for _ in range(5_000)]

        session.restore(held[2_500])
        with pytest.raises(SnapshotExpired):
            session.restore(held[2_501])


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("note"), st.integers(0, 9)),
        st.tuples(st.just("line"), st.integers(0, 9)),
        st.tuples(st.just("add"), st.integers(0, 9)),
        st.tuples(st.just("seed"), st.integers(0, 40)),
        st.tuples(st.just("clear"), st.integers(0, 9)),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("snapshot"), st.just(0)),
        st.tuples(st.just("restore"), st.integers(0, 9)),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_a_session_behaves_like_a_dict_of_lists(operations: list[tuple[str, int]]) -> None:
    session = Session()
    session.install(Total)
    notes: list[str] = []
    total = 0
    lines: list[str] = []
    # Each with whether it can still be restored.
    snapshots: list[tuple[Snapshot, list[str], int]] = []
    usable: list[bool] = []

    for kind, number in operations:
        if kind == "note":
            session.dispatch(Note(str(number)))
            notes = [*notes, str(number)]
        elif kind == "line":
            session.dispatch(Line(str(number)))
            lines.append(str(number))
        elif kind == "add":
            session.dispatch(Add(number))
            total += number
        elif kind == "seed":
            session[Note].seed(Note("seed") for _ in range(number))
            notes = ["seed"] * number
        elif kind == "clear":
            session[Note].clear(lambda note, text=str(number): note.text == text)
            notes = [text for text in notes if text != str(number)]
        elif kind == "reset":
            session.reset()
            notes, total = [], 0
        elif kind == "snapshot":
            snapshots.append((session.snapshot(), notes, total))
            usable.append(True)
        elif number < len(snapshots):
            snapshot, saved_notes, saved_total = snapshots[number]
            if usable[number]:
                session.restore(snapshot)
                notes, total = saved_notes, saved_total
                usable[number + 1 :] = [False] * (len(usable) - number - 1)
            else:
                with pytest.raises(SnapshotExpired):
                    session.restore(snapshot)

        assert [note.text for note in session[Note]] == notes
        assert [line.text for line in session[Line]] == lines
        assert (session[Total].latest() or Total()).value == total


@dataclass(frozen=True)
class Question:
    text: str
    about: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Answer:
    text: str
    sources: frozenset[str]


def answer(params: Question, *, context: ToolContext) -> ToolResult[Answer]:
    """Answer a question, or fail on an empty one."""
    context.session.dispatch(Note(params.text))
    context.session.dispatch(Line(params.text))
    if not params.text:
        return ToolResult.error("nothing was asked", suggestions=["ask something"])
    return ToolResult.ok(Answer("42", frozenset({"a", "b"})), "answered")


ANSWER = Tool[Question, Answer](name="answer", description="Answer it.", handler=answer)


class TestJson:
    def test_a_session_goes_on_from_json(self) -> None:
        first = Session()
        first.install(Total)
        first.dispatch(Add(3))
        first[Note].seed([Note("ü"), Note("\udc80 half a surrogate pair")])
        first.dispatch("a plain string")
        context = ToolContext(session=first)
        ANSWER(Question("why?", (Note("n"),)), context=context)
        ANSWER({"text": ""}, context=context)
        ANSWER({"txt": 1}, context=context)

        text = first.snapshot(tag="saved").to_json()
        second = Session.from_snapshot(Snapshot.from_json(text), session_id="again")
        second.install(Total)
        second.dispatch(Add(1))

        assert second.session_id == "again"
        assert second[Total].latest() == Total(4)
        for slice_type in (Note, Line, ToolInvoked, str):
            assert second[slice_type].all() == first[slice_type].all()
        assert [event.success for event in second[ToolInvoked]] == [True, False, False]
        assert text.isprintable()
        assert json.loads(text)["tag"] == "saved"

    def test_policies_remember_across_processes(self) -> None:
        policies = [
            RateLimitPolicy(max_calls_per_minute=3),
            QuotaPolicy(max_calls=2),
            SequentialDependencyPolicy(dependencies={if_offered("other"): frozenset({"answer"})}),
        ]
        section = MarkdownSection(title="Ask", template="Ask away.", key="ask", tools=[ANSWER])
        prompt = Prompt(
            PromptTemplate(ns="tests", key="ask", sections=[section], policies=policies)
        )
        first = Session()
        execute_tool(ToolCall("answer", {"text": "why?"}), session=first, prompt=prompt)
        execute_tool(ToolCall("answer", {"text": ""}), session=first, prompt=prompt)

        second = Session.from_snapshot(Snapshot.from_json(first.snapshot().to_json()))
        result = execute_tool(ToolCall("answer", {"text": "?"}), session=second, prompt=prompt)

        assert result.message == "Quota exceeded: 2/2 calls used"
        assert second[PolicyState].all() == first[PolicyState].all()

    def test_state_and_log_stay_what_they_were(self) -> None:
        first = Session()
        first[Total].register(Add, added, policy=SlicePolicy.LOG)
        first.dispatch(Add(1))
        first.dispatch(Note("a"))
        first.dispatch(Line("b"))

        second = Session.from_snapshot(Snapshot.from_json(first.snapshot().to_json()))
        second.dispatch(Total(2))
        second.reset()

        assert second[Total].all() == (Total(1), Total(2))
        assert second[Note].all() == ()
        assert second[Line].all() == (Line("b"),)

    def test_the_log_can_be_left_out(self) -> None:
        session = Session()
        session.dispatch(Note("a"))
        session.dispatch(Line("b"))

        back = Session.from_snapshot(
            Snapshot.from_json(session.snapshot().to_json(include_log=False))
        )

        assert back[Note].all() == (Note("a"),)
        assert back[Line].all() == ()

    def test_a_session_takes_back_its_own_state_from_json(self) -> None:
        session = Session()
        session.dispatch(Note("a"))
        text = session.snapshot().to_json()
        live = session.snapshot()
        session.dispatch(Note("b"))
        session.dispatch(Line("c"))

        session.restore(Snapshot.from_json(text))

        assert session[Note].all() == (Note("a"),)
        assert session[Line].all() == (Line("c"),)
        session.restore(live)  # nothing older was restored: it is still good

    def test_a_slice_of_a_base_class_keeps_its_type(self) -> None:
        session = Session()
        session[Total].append(Total(1))
        session[Note].seed([LongNote("a", pages=3), Note("b")])

        back = Session.from_snapshot(Snapshot.from_json(session.snapshot().to_json()))

        assert back[Note].all() == (LongNote("a", pages=3), Note("b"))
        assert back[LongNote].all() == ()

    def test_types_that_no_module_defines_are_passed(self) -> None:
        @dataclass(frozen=True)
        class Local:
            text: str

        session = Session()
        session.dispatch(Local("a"))
        text = session.snapshot().to_json()

        with pytest.raises(SnapshotError, match=r"<locals>.Local"):
            Snapshot.from_json(text)

        back = Session.from_snapshot(Snapshot.from_json(text, types=[Local]))
        assert back[Local].all() == (Local("a"),)

    def test_a_value_without_a_json_form_is_named_with_its_slice(self) -> None:
        session = Session()
        session.dispatch(Question("q", about=(threading.Lock(),)))  # type: ignore[arg-type]

        with pytest.raises(SnapshotError, match=r"the slice of Question: .*about\[0\]"):
            session.snapshot().to_json()

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{}",
            "null",
            '{"wink_snapshot": 2}',
            '{"wink_snapshot": 1}',
            '{"wink_snapshot": 1, "tag": "", "taken_at": 0, "state": [1], "log": []}',
            '{"wink_snapshot": 1, "tag": "", "taken_at": 0, "state": [["a:b", []]], "log": []}',
            '{"wink_snapshot": 1, "tag": "", "taken_at": 0, "state": [["a:b", [1]]], "log": []}',
            '{"wink_snapshot": 1, "tag": "", "taken_at": 0, "log": [],'
            ' "state": [["builtins:int", [1, "two"]]]}',
            '{"wink_snapshot": 1, "tag": "", "taken_at": "now", "state": [], "log": []}',
            "[" * 100_000,
        ],
    )
    def test_text_that_is_no_snapshot_is_refused(self, text: str) -> None:
        with pytest.raises(SnapshotError):
            Snapshot.from_json(text)

    def test_a_fresh_process_goes_on_where_this_one_stopped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "wink_app.py").write_text(APP)
        monkeypatch.syspath_prepend(str(tmp_path))
        import wink_app  # type: ignore[import-not-found]

        session = wink_app.start()
        (tmp_path / "session.json").write_text(session.snapshot().to_json())

        done = subprocess.run(
            [sys.executable, "-c", "import wink_app; wink_app.go_on()"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

        assert done.stderr == ""
        assert done.stdout.splitlines() == ["Plan(steps=('a', 'b'))", "[True, False]", "Made('b')"]


@dataclass(frozen=True)
class LongNote(Note):
    pages: int = 0


APP = """
from dataclasses import dataclass
from pathlib import Path

from weakincentives import Session, Tool, ToolContext, ToolResult
from weakincentives.runtime import Snapshot, ToolInvoked, reducer


@dataclass(frozen=True)
class AddStep:
    name: str


@dataclass(frozen=True)
class Made:
    name: str

    def __repr__(self):
        return f"Made({self.name!r})"


@dataclass(frozen=True)
class Plan:
    steps: tuple[str, ...] = ()

    @reducer(on=AddStep)
    def add(self, event: AddStep) -> "Plan":
        return Plan((*self.steps, event.name))


def handle(params: AddStep, *, context: ToolContext) -> ToolResult[Made]:
    context.session.dispatch(params)
    if params.name == "bad":
        raise ValueError("bad step")
    return ToolResult.ok(Made(params.name), "made")


step = Tool[AddStep, Made](name="step", description="Add a step.", handler=handle)


def start():
    session = Session()
    session.install(Plan)
    step(AddStep("a"), context=ToolContext(session=session))
    step(AddStep("bad"), context=ToolContext(session=session))
    return session


def go_on():
    session = Session.from_snapshot(Snapshot.from_json(Path("session.json").read_text()))
    session.install(Plan)
    invoked = [event.success for event in session[ToolInvoked].all()]
    step(AddStep("b"), context=ToolContext(session=session))
    print(session[Plan].latest())
    print(invoked)
    print(session[ToolInvoked].latest().result.value)
"""


class TestFamily:
    def test_a_child_knows_its_parent_and_the_parent_its_children(self) -> None:
        clock, bus = FakeClock(), Dispatcher()
        parent = Session(clock=clock, dispatcher=bus)
        children = tuple(Session(parent=parent) for _ in range(3))

        assert parent.children == children
        assert all(child.parent is parent for child in children)
        assert all(child.clock is clock and child.dispatcher is bus for child in children)
        assert all(child.is_related_to(parent) for child in children)
        assert not parent.is_related_to(Session())
        assert parent.parent is None

    def test_children_have_slices_of_their_own(self) -> None:
        parent = Session()
        child = Session(parent=parent)

        child.dispatch(Note("a"))

        assert parent[Note].all() == ()

    def test_going_back_takes_back_the_children_made_since(self) -> None:
        parent = Session()
        kept = Session(parent=parent)
        before = parent.snapshot()
        Session(parent=parent)

        parent.restore(before)

        assert parent.children == (kept,)

    def test_children_do_not_go_into_another_session(self) -> None:
        parent = Session()
        Session(parent=parent)
        parent.dispatch(Note("a"))

        copy = Session.from_snapshot(parent.snapshot())

        assert copy.children == ()
        assert copy[Note].all() == (Note("a"),)
        assert Session.from_snapshot(Snapshot.from_json(parent.snapshot().to_json())).children == ()

    def test_ids_differ_and_tags_are_kept(self) -> None:
        tags = {"team": "blue"}
        session = Session(tags=tags)
        tags.clear()

        assert session.session_id != Session().session_id
        assert session.tags == {"team": "blue"}
        assert session.session_id in repr(session)


def test_a_rendered_prompt_is_noted_and_published() -> None:
    session = Session(clock=FakeClock(9.0))
    heard: list[PromptRendered] = []
    session.dispatcher.subscribe(PromptRendered, heard.append)
    section = MarkdownSection(title="Ask", template="Ask away.", key="ask", tools=[ANSWER])
    prompt = Prompt(PromptTemplate(ns="tests", key="ask", sections=[section]))

    rendered = prompt.render(session)

    assert session.prompt is prompt
    assert session.rendered is rendered
    assert session[PromptRendered].all() == tuple(heard)
    assert heard[0].tool_names == ("answer",)
    assert heard[0].timestamp == 9.0


class TestMemory:
    @pytest.mark.parametrize("undo", ["restore", "discard", "call"])
    def test_what_was_rolled_back_leaves_nothing_but_its_log(self, undo: str) -> None:
        class Big: ...

        def work(session: Session) -> None:
            big = Big()
            alive.add(big)
            session.dispatch(big)
            session.dispatch(Line("worked"))

        def by_restore() -> None:
            before = session.snapshot()
            work(session)
            session.restore(before)

        def by_discard() -> None:
            view = session.fork()
            work(view)
            session.settle(view, keep=False)

        def handler(params: Note, *, context: ToolContext) -> ToolResult[None]:
            work(context.session)
            return ToolResult.error("no")

        failing = Tool[Note, None](name="failing", description="Fails.", handler=handler)

        def by_call() -> None:
            failing(Note("x"), context=ToolContext(session=session))

        session = Session()
        alive: weakref.WeakSet[Big] = weakref.WeakSet()
        step: Callable[[], None] = {
            "restore": by_restore,
            "discard": by_discard,
            "call": by_call,
        }[undo]
        for _ in range(50):
            step()
        gc.collect()

        assert len(alive) == 0
        assert len(session[Line]) == 50
        assert session.snapshot().state == {}
