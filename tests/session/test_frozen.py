"""STATE slices refuse values that can be changed in place: no rollback could restore them."""

from __future__ import annotations

import datetime
import decimal
import enum
import pathlib
import re
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pydantic
import pytest
from rpds import HashTrieMap, HashTrieSet

from weakincentives.errors import SessionError
from weakincentives.prompt import Tool, ToolContext, ToolResult
from weakincentives.runtime import (
    Session,
    SlicePolicy,
    ToolRegistry,
    append_all,
    reducer,
    replace_latest,
    slice_policy,
    upsert_by,
)


@dataclass(frozen=True)
class Cart:
    items: Any = ()
    owner: str = ""


@dataclass
class Thawed:
    count: int = 0


@dataclass(eq=False)
class ThawedByIdentity:
    count: int = 0


@slice_policy(SlicePolicy.LOG)
@dataclass
class Logged:
    items: list[str] = field(default_factory=list)


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(enum.Enum):
    RED = "red"


class Model(pydantic.BaseModel):
    items: Any = ()


class FrozenModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    items: Any = ()


class Plain:
    def __init__(self) -> None:
        self.items: list[str] = []


class Slotted:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = 1


class Version:
    """Compares by value, and so promises to stay as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class Tags(list[str]):
    pass


def contains_itself() -> Cart:
    cart = Cart()
    object.__setattr__(cart, "items", (cart,))
    return cart


FROZEN: list[object] = [
    "text",
    1,
    2.5,
    None,
    b"bytes",
    (1, ("a", (None,))),
    frozenset({1, (2, 3)}),
    Colour.RED,
    Pair(1, "a"),
    Cart(("a", "b")),
    Cart(Cart(Cart((1,)))),
    FrozenModel(items=("a",)),
    Version("1.0"),
    HashTrieMap({"a": 1}),
    HashTrieSet([1]),
    MappingProxyType({"a": (1,)}),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    datetime.timedelta(1),
    decimal.Decimal("1.5"),
    uuid.UUID(int=1),
    pathlib.PurePosixPath("a"),
    re.compile("a"),
    ValueError("no"),
    print,
    (Cart,),  # a class
    numpy.float64(1.5),
]

CHANGEABLE: list[tuple[object, str]] = [
    (["a"], "it is a list; use a tuple"),
    ({"a": 1}, "it is a dict; use a tuple of pairs, or rpds.HashTrieMap"),
    (OrderedDict(a=1), "it is an OrderedDict; use a tuple of pairs, or rpds.HashTrieMap"),
    ({"a"}, "it is a set; use a frozenset"),
    (bytearray(b"a"), "it is a bytearray; use bytes"),
    (deque([1]), "it is a deque; use an immutable value"),
    (Tags(["a"]), "it is a Tags; use a tuple"),
    (numpy.zeros(3), "it is a ndarray; use an immutable value"),
    (Thawed(), "it is a Thawed; declare it with @dataclass(frozen=True)"),
    (ThawedByIdentity(), "it is a ThawedByIdentity; declare it with @dataclass(frozen=True)"),
    (Model(), "it is a Model; set frozen=True in its model_config"),
    (Plain(), "it is a Plain; declare it with @dataclass(frozen=True), or give it __eq__"),
    (Slotted(), "it is a Slotted; declare it with @dataclass(frozen=True), or give it __eq__"),
    (Cart(["a"]), "items is a list; use a tuple"),
    (Cart((1, {"a": 2})), "items[1] is a dict; use a tuple of pairs"),
    (Cart(Cart(Cart({1}))), "items.items.items is a set; use a frozenset"),
    (Cart(Thawed()), "items is a Thawed; declare it with"),
    (FrozenModel(items=["a"]), "items is a list; use a tuple"),
    (Pair(1, [2]), "[1] is a list; use a tuple"),
    (MappingProxyType({"a": [1]}), "['a'] is a list; use a tuple"),
    ((("a",), (("b", []),)), "[1][0][1] is a list; use a tuple"),
]


class TestValues:
    @pytest.mark.parametrize("value", FROZEN, ids=lambda each: type(each).__name__)
    def test_what_cannot_change_is_held(self, value: object):
        session = Session()
        session.dispatch(value)
        assert session[type(value)].latest() is value
        session[Cart].seed(Cart(value))
        session[Cart].append(Cart((value,)))
        assert len(session[Cart]) == 2

    @pytest.mark.parametrize(("value", "problem"), CHANGEABLE, ids=lambda each: type(each).__name__)
    def test_what_can_be_changed_in_place_is_refused_in_one_line(self, value: object, problem: str):
        session, kind = Session(), type(value)
        ways: list[Callable[[], object]] = [
            lambda: session.dispatch(value),
            lambda: session[kind].append(value),
            lambda: session[kind].seed((value,)),
            lambda: session[kind].update(lambda current: current.append(value)),
        ]
        for way in ways:
            with pytest.raises(SessionError) as refused:
                way()
            said = str(refused.value)
            assert said.startswith(
                f"session[{kind.__name__}] cannot hold a value that can be changed in place, "
                "because no rollback could restore it: "
            )
            assert problem in said
            assert "\n" not in said
        assert session[kind].all() == ()

    def test_a_value_that_contains_itself_is_looked_at_once(self):
        session = Session()
        session.dispatch(contains_itself())
        assert len(session[Cart]) == 1

    def test_a_deeply_nested_value_is_looked_at_without_recursion(self):
        value: Any = ()
        for _ in range(50_000):
            value = Cart(value)
        Session()[Cart].append(value)
        while value:  # taken apart step by step: freeing it recurses
            value = value.items

    def test_a_log_holds_anything(self):
        """It is never rolled back."""
        session = Session()
        session.dispatch(Logged(["a"]))
        assert session[Logged].latest() == Logged(["a"])
        session[Thawed].register(Thawed, append_all, policy=SlicePolicy.LOG)
        session.dispatch(Thawed(1))


class TestReducers:
    @pytest.mark.parametrize("reduce", [append_all, replace_latest, upsert_by(lambda c: c.owner)])
    def test_what_a_reducer_returns_is_looked_at(self, reduce: Any):
        session = Session()
        session[Cart].register(Cart, reduce)
        for number in range(100):
            session.dispatch(Cart((), f"o{number % 70}"))
        before = session[Cart].all()
        with pytest.raises(SessionError, match="items is a list"):
            session.dispatch(Cart([], "o3"))
        assert session[Cart].all() == before

    def test_a_value_in_the_middle_of_a_rebuilt_slice_is_found(self):
        session = Session()
        session[Cart].seed([Cart((), f"{number}") for number in range(100)])
        for place in (0, 31, 32, 50, 99):
            with pytest.raises(SessionError, match="items is a list"):
                session[Cart].update(lambda current, at=place: current.put(at, Cart([], "x")))
            values = [*session[Cart].all()]
            values[place] = Cart([], "x")
            with pytest.raises(SessionError, match="items is a list"):
                session[Cart].seed(values)
        assert len(session[Cart]) == 100

    def test_a_class_that_can_only_be_changed_in_place_is_refused_when_it_is_registered(self):
        with pytest.raises(SessionError, match=r"Thawed: declare it with @dataclass\(frozen=True"):
            Session()[Thawed].register(Cart, lambda current, event: current)

        @dataclass
        class Counted:
            count: int = 0

            @reducer(on=Cart)
            def add(self, event: Cart) -> Counted:
                return Counted(self.count + 1)

        with pytest.raises(SessionError, match="Counted: declare it with"):
            Session().install(Counted)

    def test_only_new_values_are_looked_at(self):
        """A slice of many values costs what one more value costs."""
        looked: list[object] = []

        class Watched(tuple[Any, ...]):
            def __iter__(self) -> Any:
                looked.append(self)
                return super().__iter__()

        session = Session()
        for number in range(1000):
            session[Cart].append(Cart(Watched((number,))))
        looked.clear()
        session[Cart].append(Cart(Watched((1000,))))
        session[Cart].update(lambda current: current.put(500, Cart(Watched((0,)))))
        assert len(looked) <= 4


class TestRollback:
    @pytest.mark.parametrize("reach", [None, "read"])
    def test_nothing_that_a_handler_can_change_in_place_is_in_the_session(self, reach: Any):
        def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
            cart = context.session[Cart].latest()
            assert cart is not None
            with pytest.raises(AttributeError):
                cart.items.append("x")
            with pytest.raises(AttributeError):
                cart.owner = "x"
            return ToolResult.error("no")

        session = Session()
        with pytest.raises(SessionError):
            session[Cart].seed(Cart(["a"]))
        session[Cart].seed(Cart(("a",)))
        tool = Tool[None, None](name="add", description="Adds.", handler=handler, reach=reach)
        result = ToolRegistry([tool], session=session).execute("add")
        assert result.message == "no"
        assert session[Cart].all() == (Cart(("a",)),)

    def test_a_call_whose_result_cannot_be_held_is_undone(self):
        def handler(params: None, *, context: ToolContext) -> ToolResult[Cart]:
            context.session.dispatch(Pair(1, 2))
            return ToolResult.ok(Cart(["a"]))

        session = Session()
        session[Cart].register(Cart, append_all)
        tool = Tool[None, Cart](name="add", description="Adds.", handler=handler)
        result = ToolRegistry([tool], session=session).execute("add")
        assert not result.success
        assert "items is a list; use a tuple" in result.message
        assert session[Pair].all() == session[Cart].all() == ()
