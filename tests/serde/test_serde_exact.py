"""freeze and thaw: exact values across processes."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.util
import json
import math
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpds import HashTrieMap, HashTrieSet

from weakincentives.errors import SnapshotError
from weakincentives.serde import freeze, parse, thaw

T = TypeVar("T")


class Colour(enum.Enum):
    RED = 1
    BLUE = (2, 3)


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True, slots=True)
class Point:
    x: object
    y: object = 0


@dataclass
class Counter:
    count: int
    twice: int = field(init=False, default=0)
    cache: dict[str, int] = field(default_factory=dict, metadata={"transient": True})
    note: str = field(default="none", metadata={"transient": True})
    calls = 0

    def __post_init__(self) -> None:
        type(self).calls += 1
        self.twice = 2 * self.count


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T


class Outer:
    @dataclass(frozen=True)
    class Inner:
        value: int


@dataclass
class Listing(list[int]):
    name: str


@dataclass
class NoDefault:
    handle: object = field(metadata={"transient": True})


@dataclass
class Lonely:
    late: int = field(init=False)


class Pair(NamedTuple):
    a: int


class Opaque:
    pass


class Wandering(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta | None:
        return when and timedelta(hours=1)


def through_json(value: object, **options: Any) -> Any:
    return thaw(json.loads(json.dumps(freeze(value), allow_nan=False)), **options)


def types_in(value: Any) -> Any:
    """Return the shape of a value, every type in it named."""
    if isinstance(value, dict | HashTrieMap):
        pairs = sorted(str((types_in(k), types_in(v))) for k, v in value.items())
        return type(value), pairs
    if isinstance(value, set | frozenset | HashTrieSet):
        return type(value), sorted(str(types_in(item)) for item in value)
    if isinstance(value, list | tuple):
        return type(value), [types_in(item) for item in value]
    if isinstance(value, Point):
        return Point, types_in(value.x), types_in(value.y)
    return type(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        10**5000,
        -(10**30),
        2**53 + 1,
        float("inf"),
        -0.0,
        "half a pair: \ud800",
        {"$": "tuple", "items": []},
        {1: "a", (2, 3): {"b"}, None: []},
        {"\ud800": 1},
        HashTrieMap({Point(1): HashTrieSet([Colour.RED])}),
        frozenset({frozenset({1}), ()}),
        Decimal("-0.10"),
        Decimal("sNaN").copy_abs().to_eng_string(),
        UUID(int=5),
        Path("a/b"),
        PurePosixPath("/x"),
        PureWindowsPath("c:/x"),
        Colour.BLUE,
        Access.READ | Access.WRITE,
        Access(0),
        datetime(2020, 1, 2, 3, 4, 5, 6),
        datetime(2020, 1, 2, tzinfo=UTC),
        datetime(2020, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2020, 1, 2, tzinfo=ZoneInfo("UTC")),
        time(1, 2, tzinfo=timezone(timedelta(seconds=-3599))),
        timedelta.min,
        timedelta.max,
        date.min,
        Box(Box((1, [2]))),
        Outer.Inner(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_equal_and_of_the_same_type(value: Any):
    back = through_json(value)

    assert back == value
    assert types_in(back) == types_in(value)


def test_not_a_number_stays_one():
    assert math.isnan(through_json(float("nan")))
    assert through_json(Decimal("sNaN")).is_snan()


def test_time_zones_survive():
    moment = datetime(2020, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)

    back = through_json(moment)

    assert (back.tzinfo, back.fold, back.utcoffset()) == (moment.tzinfo, 1, timedelta(hours=1))
    assert through_json(time(2, fold=1, tzinfo=moment.tzinfo)).tzinfo == moment.tzinfo


def test_a_moment_that_was_parsed_can_be_frozen():
    """pydantic brings a time zone class of its own."""
    (moment,) = parse(list[datetime], ["2020-01-02T03:04:05+05:30"])

    assert through_json(moment) == moment
    assert through_json(moment).utcoffset() == timedelta(hours=5, minutes=30)


def test_equal_sets_freeze_to_equal_text():
    one, other = {"a", "b", "c", 1, 9}, {9, "c", 1, "b", "a"}

    assert json.dumps(freeze(one)) == json.dumps(freeze(other))


def test_a_dataclass_is_rebuilt_without_its_constructor():
    counter = Counter(2)
    counter.twice = 77
    counter.cache["x"] = 1
    counter.note = "changed"
    calls = Counter.calls

    back = through_json(counter)

    assert Counter.calls == calls
    assert (back.count, back.twice) == (2, 77)
    assert (back.cache, back.note) == ({}, "none")


def test_plain_json_stays_as_it_is():
    data = {"a": [1, 2.5, "x", True, None, {"b": {}}]}

    assert freeze(data) == data


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Point([{"k": Opaque()}]), r"Cannot freeze value\.x\[0\]\['k'\]: .*Opaque has no exact"),
        ({Opaque: 1}, "Cannot freeze value key <class .*builtins.type has no exact"),
        (OrderedDict(), "collections.OrderedDict has no exact JSON form"),
        (Pair(1), "Pair has no exact JSON form"),
        (functools.partial(print), "functools.partial has no exact JSON form"),
        (Listing("a"), "Listing is a list, whose content is not in its fields"),
        (NoDefault(1), "transient field handle of .*NoDefault has no default"),
        (Lonely(), "Cannot freeze value: the field late is not set"),
        ([datetime(2020, 1, 1, tzinfo=Wandering())], r"value\[0\]: the time zone .*Wandering"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_frozen_is_named_with_its_place(value: object, message: str):
    with pytest.raises(SnapshotError, match=message):
        freeze(value)


def test_a_cycle_cannot_be_frozen():
    cycle: list[object] = []
    cycle.append(cycle)

    with pytest.raises(SnapshotError, match="contains itself"):
        freeze(cycle)


def test_data_nested_too_deeply_cannot_be_thawed():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]

    with pytest.raises(SnapshotError, match="nested too deeply"):
        thaw(deep)


def test_changed_fields_are_named():
    frozen = freeze(Point(1))
    frozen["fields"]["z"] = frozen["fields"].pop("x")

    with pytest.raises(SnapshotError, match="the data lacks x and has z, which the class lacks"):
        thaw([frozen])


def test_a_field_that_is_newer_than_the_data_gets_its_default():
    frozen = freeze(Point(1, 2))
    del frozen["fields"]["y"]

    assert thaw(frozen) == Point(1, 0)


def test_a_local_type_is_found_among_those_passed():
    @dataclass
    class Local:
        box: Box[int]

    frozen = freeze(Local(Box(1)))

    with pytest.raises(
        SnapshotError, match=r"<locals>\.Local is not known here; pass it in types="
    ):
        thaw(frozen)
    assert thaw(frozen, types=[Local, Box[int]]) == Local(Box(1))
    with pytest.raises(TypeError, match="types= takes classes"):
        thaw(frozen, types=["Local"])


def test_a_module_that_is_not_imported_stays_so():
    assert "this" not in sys.modules
    frozen = {"$": "dataclass", "type": "this:Zen", "fields": {}}

    with pytest.raises(SnapshotError, match=r"this:Zen is not known here.*import its module first"):
        thaw(frozen)
    assert "this" not in sys.modules


def test_looking_for_a_type_runs_no_module_code(monkeypatch: pytest.MonkeyPatch):
    def load(name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    module = ModuleType("lazy_serde_module")
    module.__getattr__ = load  # pyright: ignore
    monkeypatch.setitem(sys.modules, module.__name__, module)

    with pytest.raises(SnapshotError, match="not known here"):
        thaw({"$": "enum", "type": "lazy_serde_module:Anything", "name": "X"})


def test_a_lazy_module_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tmp_path / "lazy_serde_source.py"
    source.write_text("raise AssertionError('it was loaded')")
    spec = importlib.util.spec_from_file_location("lazy_serde_source", source)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_serde_source", module)
    spec.loader.exec_module(module)

    with pytest.raises(SnapshotError, match="not known here"):
        thaw({"$": "enum", "type": "lazy_serde_source:Anything", "name": "X"})


@pytest.mark.parametrize(
    "data",
    [
        {"$": "dataclass", "type": "subprocess:Popen", "fields": {}},
        {"$": "dataclass", "type": f"{__name__}:Opaque", "fields": {}},
        {"$": "dataclass", "type": f"{__name__}:Colour", "fields": {}},
        {"$": "dataclass", "type": f"{__name__}:Point", "fields": []},
        {"$": "dataclass", "type": f"{__name__}:json.dumps", "fields": {}},
        {"$": "dataclass", "type": "", "fields": {}},
        {"$": "dataclass", "type": [], "fields": {}},
        {"$": "dataclass"},
        {"$": "enum", "type": f"{__name__}:Point", "name": "x"},
        {"$": "enum", "type": f"{__name__}:Colour", "name": "mro"},
        {"$": "enum", "type": f"{__name__}:Colour", "name": []},
        {"$": "flag", "type": f"{__name__}:Access", "value": 64},
        {"$": "flag", "type": f"{__name__}:Access", "value": "x"},
        {"$": "nothing"},
        {"$": []},
        {"$": "int", "hex": "zz"},
        {"$": "int", "hex": 5},
        {"$": "tuple", "items": 5},
        {"$": "set", "items": [[]]},
        {"$": "HashTrieSet", "items": [[]]},
        {"$": "HashTrieSet", "items": [0, ""]},
        {"$": "HashTrieMap", "pairs": [[[], 1]]},
        {"$": "HashTrieMap", "pairs": [["", 1], [0, 1]]},
        {"$": "dict", "pairs": [1]},
        {"$": "dict", "pairs": [[1, 2, 3]]},
        {"$": "bytes", "base64": "***"},
        {"$": "datetime", "text": "soon"},
        {"$": "datetime", "text": "2020-01-01", "zone": "../../etc/passwd"},
        {"$": "datetime", "text": "2020-01-01", "fold": 7},
        {"$": "timedelta", "parts": [10**12, 0, 0]},
        {"$": "Decimal", "text": "many"},
        {"$": "UUID", "text": "x"},
        {"$": "Path", "text": {}},
        {"a": {1, 2}},
    ],
    ids=str,
)
def test_data_that_was_not_frozen_is_refused(data: object):
    with pytest.raises(SnapshotError, match="Cannot thaw value"):
        thaw(data)


# properties of all of it

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.text(st.characters(categories=["Cs"]), max_size=2)
    | st.binary(max_size=5)
    | st.datetimes(timezones=st.none() | st.just(UTC) | st.just(ZoneInfo("Europe/Berlin")))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.text("abc/.", max_size=5).map(Path)
    | st.sampled_from(Colour)
    | st.sampled_from([Access(0), *Access, Access.READ | Access.WRITE])
)


def no_collisions(keys: Collection[object]) -> bool:
    """rpds panics when keys of one hash cannot be compared: 0 and "", Point(1, 2) and (1, 2)."""
    return len({hash(key) for key in keys}) == len(keys)


hashables = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.frozensets(inner, max_size=3).filter(no_collisions).map(HashTrieSet)
    ),
    max_leaves=4,
)
anything = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=3)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.dictionaries(hashables, inner, max_size=3).filter(no_collisions).map(HashTrieMap)
        | st.sets(hashables, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Box, inner)
    ),
    max_leaves=6,
)


@given(anything)
def test_anything_freezable_comes_back_equal_and_of_the_same_types(value: object):
    back = through_json(value)

    assert back == value
    assert types_in(back) == types_in(value)


tags = ["tuple", "set", "dict", "int", "str", "bytes", "time", "dataclass", "enum", "flag"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.fixed_dictionaries(
            {"$": st.sampled_from(tags)},
            optional={
                "items": inner,
                "pairs": inner,
                "text": inner,
                "hex": inner,
                "base64": inner,
                "type": st.sampled_from([f"{__name__}:Point", f"{__name__}:Access", "a:b"]),
                "fields": st.dictionaries(st.sampled_from("xy"), inner),
                "value": inner,
                "name": inner,
            },
        )
    ),
    max_leaves=8,
)


@given(json_values)
def test_any_json_is_thawed_or_a_snapshot_error(data: object):
    with contextlib.suppress(SnapshotError):
        thaw(data)


SHAPES = """
from dataclasses import dataclass
from enum import Enum
from rpds import HashTrieMap, HashTrieSet

class Kind(Enum):
    READ = "read"

@dataclass(frozen=True, slots=True)
class Step:
    title: str
    kind: Kind
    seen: HashTrieSet

def example():
    steps = (Step("one", Kind.READ, HashTrieSet(["a", "b"])),)
    return HashTrieMap({("plan", 1): steps})
"""


def test_a_value_frozen_in_one_process_is_thawed_in_another(tmp_path: Path):
    (tmp_path / "serde_shapes.py").write_text(SHAPES)

    def run(code: str, data: str = "") -> str:
        setup = f"import json, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        setup += "from weakincentives.serde import freeze, thaw\n"
        command = [sys.executable, "-c", setup + code]
        done = subprocess.run(command, input=data, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    frozen = run("import serde_shapes as s; print(json.dumps(freeze(s.example())))")

    check = "import serde_shapes as s; print(thaw(json.load(sys.stdin)) == s.example())"
    assert run(check, frozen) == "True"
    refused = "try: thaw(json.load(sys.stdin))\nexcept Exception as e: print(type(e).__name__)"
    assert run(refused, frozen) == "SnapshotError"
