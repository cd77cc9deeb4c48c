"""Slices are persistent sequences; reducers give the next one."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.runtime import (
    Session,
    Slice,
    SlicePolicy,
    append_all,
    reducer,
    replace_latest,
    slice_policy,
    upsert_by,
)
from weakincentives.session.slices import declared_policy, declared_reducers


@dataclass(frozen=True)
class Step:
    name: str
    done: bool = False


# Values stand in chunks of 32: lengths on both sides of the borders.
LENGTHS = st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 200])
CHANGES = st.lists(
    st.one_of(
        st.integers().map(lambda value: ("append", (value,))),
        st.lists(st.integers(), max_size=70).map(lambda values: ("replace", tuple(values))),
    ),
    max_size=40,
)


class TestSequence:
    @given(LENGTHS, CHANGES)
    def test_a_slice_is_a_list_of_which_every_older_version_stays(
        self, length: int, changes: list[tuple[str, tuple[int, ...]]]
    ) -> None:
        current, expected = Slice.of(range(length)), list(range(length))
        versions = [(current, tuple(expected))]
        for kind, values in changes:
            if kind == "append":
                current, expected = current.append(*values), [*expected, *values]
            else:
                current, expected = current.replace(*values), list(values)
            versions.append((current, tuple(expected)))

        for version, values in versions:
            assert version.all() == tuple(version) == values
            assert len(version) == len(values)
            assert version.latest() == (values[-1] if values else None)
            assert tuple(version.newest_first()) == values[::-1]
            assert version.where(lambda v: v % 2 == 0) == tuple(v for v in values if v % 2 == 0)

    @given(LENGTHS, st.integers(0, 70))
    def test_two_branches_of_one_slice_do_not_see_each_other(self, length: int, more: int) -> None:
        trunk = Slice.of(range(length))
        left, right = trunk, trunk
        for number in range(more):
            left, right = left.append(number), right.append(-number)

        assert left.all() == (*range(length), *range(more))
        assert right.all() == (*range(length), *(-n for n in range(more)))

    def test_a_slice_takes_any_iterable_once(self) -> None:
        assert Slice.of(n * n for n in range(40)).all() == tuple(n * n for n in range(40))

    def test_newest_first_looks_only_at_what_is_asked_for(self) -> None:
        newest = Slice.of(range(100_000)).newest_first()

        assert [next(newest) for _ in range(3)] == [99_999, 99_998, 99_997]

    def test_a_slice_shows_its_values(self) -> None:
        assert repr(Slice.of("ab")) == "Slice(['a', 'b'])"

    def test_versions_share_their_history_even_after_all_of_it_was_read(self) -> None:
        current = Slice.of(range(20_000))
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            versions = [current := current.append(0) for _ in range(100)]
            for version in versions:
                version.all()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()

        assert grown < 100_000  # one copy of the history alone is 160,000 bytes

    def test_a_long_history_is_dropped_without_harm(self) -> None:
        current: Slice[int] = Slice.of(())
        for number in range(200_000):
            current = current.append(number)
        assert len(current) == 200_000

        del current  # freed chunk by chunk, not by recursion


class TestReducers:
    def test_append_all_keeps_every_event(self) -> None:
        assert append_all(Slice.of(["a"]), "b").all() == ("a", "b")

    def test_replace_latest_keeps_only_the_newest(self) -> None:
        assert replace_latest(Slice.of(["a", "b"]), "c").all() == ("c",)

    def test_upsert_replaces_the_value_with_the_same_key_in_its_place(self) -> None:
        session = Session()
        session[Step].register(Step, upsert_by(lambda step: step.name))

        for step in (Step("a"), Step("b"), Step("c"), Step("a", done=True)):
            session.dispatch(step)

        assert session[Step].all() == (Step("a", done=True), Step("b"), Step("c"))

    @given(st.lists(st.tuples(st.integers(0, 50), st.integers())))
    def test_upsert_is_a_dict_in_order_of_first_keys(self, pairs: list[tuple[int, int]]) -> None:
        reduce = upsert_by(lambda pair: pair[0])
        current: Slice[tuple[int, int]] = Slice.of(())
        for pair in pairs:
            current = Slice.of(reduce(current, pair))

        assert current.all() == tuple(dict(pairs).items())


class TestDeclarations:
    def test_a_slice_is_state_unless_its_class_says_log(self) -> None:
        @slice_policy(SlicePolicy.LOG)
        class Line: ...

        class Special(Line): ...

        assert declared_policy(Step) is SlicePolicy.STATE
        assert declared_policy(Line) is SlicePolicy.LOG
        assert declared_policy(Special) is SlicePolicy.LOG

    def test_a_subclass_may_say_otherwise(self) -> None:
        @slice_policy(SlicePolicy.LOG)
        class Line: ...

        @slice_policy(SlicePolicy.STATE)
        class Draft(Line): ...

        assert declared_policy(Line) is SlicePolicy.LOG
        assert declared_policy(Draft) is SlicePolicy.STATE

    def test_a_policy_that_does_not_exist_is_refused(self) -> None:
        with pytest.raises(ValueError, match="sometimes"):
            slice_policy("sometimes")(Step)  # type: ignore[arg-type]

    def test_a_method_may_reduce_several_events_in_one_mark_or_in_several(self) -> None:
        class Total:
            @reducer(on=(int, float))
            def add(self, event: float) -> Total: ...

            @reducer(on=bytes)
            @reducer(on=str)
            def read(self, event: object) -> Total: ...

        found = {(event, method.__name__) for event, method in declared_reducers(Total)}

        assert found == {(int, "add"), (float, "add"), (str, "read"), (bytes, "read")}

    @pytest.mark.parametrize("on", [int | str, "Step", (int, list[int])])
    def test_events_that_are_not_classes_are_refused_at_the_mark(self, on: object) -> None:
        with pytest.raises(TypeError, match="takes a class or a tuple of classes"):
            reducer(on=on)  # type: ignore[arg-type]


class TestPlaces:
    @given(LENGTHS, LENGTHS)
    def test_the_first_values_are_shared(self, length: int, count: int) -> None:
        whole = Slice.of(object() for _ in range(length))

        first = whole.first(count)

        assert first.all() == whole.all()[:count]
        assert first.latest() is (first.all()[-1] if first.all() else None)
        assert first.shared_with(whole) == len(first) == min(length, count)
        assert first.append(9).all() == (*first.all(), 9)

    @given(LENGTHS.filter(bool), st.data())
    def test_another_value_can_be_put_at_any_place(self, length: int, data: st.DataObject) -> None:
        before = Slice.of(range(length))
        place = data.draw(st.integers(0, length - 1))

        after = before.put(place, -1)

        expected = list(range(length))
        expected[place] = -1
        assert after.all() == tuple(expected)
        assert [after.at(n) for n in range(length)] == expected
        assert before.all() == tuple(range(length))
        assert after.append(9).all() == (*expected, 9)

    @given(
        st.lists(
            st.tuples(st.sampled_from(["put", "keep", "back"]), st.integers(0, 120)), max_size=80
        ),
        st.integers(0, 100),
    )
    def test_upsert_is_right_on_every_branch_of_what_was_rolled_back(
        self, moves: list[tuple[str, int]], seeded: int
    ) -> None:
        """Branches share one table of places; none may see another's."""
        reduce = upsert_by(lambda pair: pair[0])
        current: Any = Slice.of((n, "seed") for n in range(seeded))
        model: dict[int, object] = dict.fromkeys(range(seeded), "seed")
        kept = [(current, dict(model))]
        for number, (move, key) in enumerate(moves):
            if move == "put":
                current = reduce(current, (key, number))
                model[key] = number
            elif move == "keep":
                kept.append((current, dict(model)))
            else:
                current, model = kept[key % len(kept)]
                model = dict(model)
            assert current.all() == tuple(model.items())

    @given(LENGTHS, LENGTHS, st.data())
    def test_what_two_slices_share_is_what_they_begin_with(
        self, common: int, more: int, data: st.DataObject
    ) -> None:
        values = [object() for _ in range(common)]
        older = Slice.of(values[: data.draw(st.integers(0, common))])
        newer = older
        for value in values[len(older) :]:
            newer = newer.append(value)
        other = newer
        for _ in range(more):
            other = other.append(object())

        assert other.shared_with(newer) == newer.shared_with(other) == common
        assert newer.shared_with(Slice.of(values)) == common
        assert newer.shared_with(older) == len(older)
        if common:
            place = data.draw(st.integers(0, common - 1))
            assert newer.put(place, object()).shared_with(other) == place


def test_encoded_values_are_decoded_when_they_are_read():
    decoded: list[int] = []

    def decode(items: list[str]) -> tuple[int, ...]:
        decoded.extend(map(int, items))
        return tuple(map(int, items))

    values = Slice.decoded([str(n) for n in range(100)], decode)
    longer = values.append(100)

    assert decoded == [96, 97, 98, 99]
    assert len(longer) == 101
    assert longer.latest() == 100
    assert longer.shared_with(values) == 100
    assert len(decoded) == 4
    assert next(islice(longer.newest_first(), 5, None)) == 95
    assert len(decoded) == 4 + 32
    assert longer.all() == tuple(range(101))
    assert values.put(3, -3).all()[:5] == (0, 1, 2, -3, 4)
    assert sorted(decoded) == list(range(100))


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 65])
def test_a_decoded_slice_equals_one_that_was_never_encoded(length: int):
    values = Slice.decoded([str(n) for n in range(length)], lambda items: tuple(map(int, items)))

    assert values.all() == Slice.of(range(length)).all()
    assert len(values) == length
