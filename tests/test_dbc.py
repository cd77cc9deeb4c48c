"""Contracts: what a predicate sees, what a violation becomes, and in which order."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from weakincentives import dbc
from weakincentives.dbc import ensure, require
from weakincentives.errors import ContractError
from weakincentives.tool_result import ToolResult


@dataclass(slots=True, frozen=True)
class SearchParams:
    query: str
    limit: int = 10


class ToolContext:
    pass


CONTEXT = ToolContext()


def says(expected: str) -> Callable[..., bool]:
    """Return a predicate that only holds for one value of ``x``."""
    return lambda x: x == expected


def test_exports_are_sorted():
    assert dbc.__all__ == sorted(dbc.__all__)


# The Chapter's examples.


@require(lambda params: 1 <= params.limit <= 100, "limit must be between 1 and 100")
@require(lambda params: len(params.query.strip()) > 0, "query cannot be empty")
def search_handler(params: SearchParams, *, context: ToolContext) -> ToolResult[str]:
    """Search files with validated parameters."""
    return ToolResult.ok(params.query, message="Found 1 match")


def test_handler_runs_when_its_preconditions_hold():
    result = search_handler(SearchParams("test"), context=CONTEXT)

    assert result == ToolResult.ok("test", message="Found 1 match")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SearchParams("", 10), "Precondition failed: query cannot be empty"),
        (SearchParams("test", 500), "Precondition failed: limit must be between 1 and 100"),
        (SearchParams("", 500), "Precondition failed: limit must be between 1 and 100"),
    ],
)
def test_violated_precondition_of_a_handler_is_an_error_for_the_model(
    params: SearchParams, message: str
):
    result = search_handler(params, context=CONTEXT)

    assert (result.success, result.value, result.message) == (False, None, message)
    assert result.failure is not None
    assert (result.failure.code, result.failure.recoverable) == ("CONTRACT_VIOLATION", True)


def test_violated_postcondition_of_a_handler_is_an_error_for_the_model():
    @ensure(
        lambda result: result.success or result.value is None,
        "Failed results must have value=None",
    )
    @ensure(lambda result: len(result.message) > 0, "Result must include a message")
    def validated_handler(params: str, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(params, message=params)

    assert validated_handler("Done", context=CONTEXT).success
    result = validated_handler("", context=CONTEXT)
    assert result.message == "Postcondition failed: Result must include a message"
    assert not result.success


# What counts as a handler.


def test_unannotated_function_with_a_context_is_a_handler():
    @require(lambda params: False, "never")
    def handler(params, context):  # type: ignore[no-untyped-def]
        return None

    assert handler(1, CONTEXT).message == "Precondition failed: never"


def test_annotation_may_be_the_class_itself():
    def handler(params: str, *, context: ToolContext) -> Any: ...

    for returns in (ToolResult, ToolResult[str], "wink.ToolResult[str] | None"):
        handler.__annotations__["return"] = returns
        assert not require(lambda params: False)(handler)("", context=CONTEXT).success


def test_any_other_function_raises():
    @require(lambda x: x > 0, "x must be positive")
    def no_context(x: int) -> ToolResult[int]: ...

    @require(lambda x: x > 0, "x must be positive")
    def other_result(x: int, *, context: ToolContext) -> list[ToolResultSummary]: ...

    for call in (lambda: no_context(0), lambda: other_result(0, context=CONTEXT)):
        with pytest.raises(ContractError, match=r"^Precondition failed: x must be positive$"):
            call()


ToolResultSummary = str


# What a predicate sees.


def test_predicate_is_called_with_the_arguments_it_names():
    seen: list[tuple[Any, ...]] = []

    @require(lambda c, a: seen.append((a, c)) is None)
    def function(a: int, b: int = 2, *, c: int = 3) -> None: ...

    function(1)
    function(a=4, c=5)
    function(6, 7, c=8)

    assert seen == [(1, 3), (4, 5), (6, 8)]


def test_postcondition_sees_arguments_and_result():
    @ensure(lambda x, result: result >= x, "must not shrink")
    def grow(x: int, by: int = 1) -> int:
        return x + by

    assert grow(1) == 2
    with pytest.raises(ContractError, match="Postcondition failed: must not shrink"):
        grow(1, by=-5)


def test_keyword_predicate_gets_everything():
    seen: list[dict[str, Any]] = []

    @require(lambda **everything: seen.append(everything) is None)
    @ensure(lambda x, **rest: seen.append(rest) is None)
    def function(x: int, *rest: int, flag: bool = False, **options: int) -> str:
        return "done"

    function(1, 2, 3, depth=4)

    assert seen == [
        {"x": 1, "rest": (2, 3), "flag": False, "options": {"depth": 4}},
        {"rest": (2, 3), "flag": False, "options": {"depth": 4}, "result": "done"},
    ]


def test_positional_only_parameters_work_on_both_sides():
    def positive(x: int, /) -> bool:
        return x > 0

    @require(positive)
    def function(x: int, /, y: int = 0) -> int:
        return x + y

    assert function(1, y=2) == 3
    with pytest.raises(ContractError, match="Precondition failed: positive"):
        function(-1)


def test_default_of_a_predicate_is_its_own():
    checks = [require(lambda x, least=least: x >= least, f"at least {least}") for least in (1, 5)]

    def function(x: int) -> int:
        return x

    for check in checks:
        function = check(function)

    assert function(5) == 5
    with pytest.raises(ContractError, match="at least 5"):
        function(4)


def test_predicate_may_mix_its_own_defaults_and_keywords():
    seen: list[tuple[int, int, int]] = []

    @require(lambda a, own=9, b=0, *, c: seen.append((a, own, b + c)) is None)
    def function(a: int, b: int, c: int) -> None: ...

    function(1, 2, 3)

    assert seen == [(1, 9, 5)]


def test_methods_can_be_checked():
    class Account:
        balance = 10

        @require(lambda self, amount: amount <= self.balance, "not enough money")
        def withdraw(self, amount: int) -> int:
            self.balance -= amount
            return self.balance

        @staticmethod
        @require(lambda x: x)
        def static(x: int) -> int:
            return x

        @classmethod
        @require(lambda cls, x: x)
        def of_class(cls, x: int) -> int:
            return x

    assert Account().withdraw(4) == 6
    assert Account.static(1) == Account.of_class(1) == 1
    with pytest.raises(ContractError, match="not enough money"):
        Account().withdraw(11)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing a required argument: 'a'"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"a": 1}, "multiple values for argument 'a'"),
        ((1,), {"z": 1}, "unexpected keyword argument 'z'"),
        ((), {"b": 1, "z": 2}, "missing a required argument: 'a'"),
    ],
)
def test_wrong_call_is_a_type_error_that_names_the_function(
    args: tuple[Any, ...], kwargs: dict[str, Any], words: str
):
    @require(lambda a: True)
    def function(a: int, b: int = 2) -> None: ...

    with pytest.raises(TypeError, match=rf"function\(\) .*{words}"):
        function(*args, **kwargs)


# Violations.


def test_check_that_raises_counts_as_violated():
    @require(lambda x: 1 / x, "x must have an inverse")
    def function(x: int) -> None: ...

    with pytest.raises(ContractError) as caught:
        function(0)
    assert str(caught.value) == (
        "Precondition failed: x must have an inverse "
        "(the check raised ZeroDivisionError: division by zero)"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_value_that_has_no_truth_counts_as_violated():
    class Vague:
        def __bool__(self) -> bool:
            raise ValueError("ambiguous")

    @require(lambda x: Vague(), "sure")
    def function(x: int) -> None: ...

    with pytest.raises(ContractError, match=r"sure \(the check raised ValueError: ambiguous\)"):
        function(0)


def test_interrupt_in_a_check_passes_through():
    def interrupted(x: int) -> bool:
        raise KeyboardInterrupt

    @require(interrupted)
    def function(x: int) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        function(0)


def test_message_defaults_to_the_name_of_the_predicate():
    def is_even(x: int) -> bool:
        return x % 2 == 0

    @require(is_even)
    def named(x: int) -> None: ...

    @require(lambda x: False)
    def unnamed(x: int) -> None: ...

    with pytest.raises(ContractError, match=r"^Precondition failed: is_even$"):
        named(1)
    with pytest.raises(ContractError, match=r"failed: the lambda at test_dbc\.py:\d+$"):
        unnamed(1)


def test_contract_error_is_an_assertion_error():
    with pytest.raises(AssertionError):
        require(says("a"))(lambda x: x)("b")


def test_function_does_not_run_when_a_precondition_fails():
    ran: list[int] = []
    with pytest.raises(ContractError):
        require(lambda x: False)(lambda x: ran.append(x))(1)

    assert ran == []


# Order.


def test_conditions_are_checked_in_reading_order():
    order: list[str] = []

    def note(text: str) -> Callable[..., bool]:
        return lambda x: order.append(text) is None

    @ensure(note("after 1"))
    @require(note("before 1"))
    @ensure(note("after 2"))
    @require(note("before 2"))
    def function(x: int) -> None:
        order.append("function")

    function(1)

    assert order == ["before 1", "before 2", "function", "after 1", "after 2"]


def test_first_violated_condition_answers():
    @ensure(lambda result: False, "first")
    @ensure(lambda result: False, "second")
    def function() -> None: ...

    with pytest.raises(ContractError, match="first"):
        function()


def test_refused_handler_is_not_held_to_its_postconditions():
    @ensure(lambda result: result.value is not None, "there must be a value")
    @require(lambda params: params, "params must not be empty")
    def handler(params: str, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(params, "ok")

    message = handler("", context=CONTEXT).message
    assert message == "Precondition failed: params must not be empty"


def test_another_decorator_in_between_stays_in_effect():
    def shout(function: Callable[[str], str]) -> Callable[[str], str]:
        @functools.wraps(function)
        def shouting(x: str) -> str:
            return function(x).upper()

        return shouting

    @ensure(lambda result: result.isupper(), "must be loud")
    @shout
    @require(lambda x: x, "x must not be empty")
    def say(x: str) -> str:
        return x

    assert say("hello") == "HELLO"
    with pytest.raises(ContractError, match="x must not be empty"):
        say("")


def test_one_function_can_carry_two_different_contracts():
    def function(x: int) -> int:
        return x

    strict = require(lambda x: x > 10, "big")(function)
    lenient = require(lambda x: x > 0, "positive")(function)
    both = require(lambda x: x % 2, "odd")(strict)

    assert lenient(2) == 2
    assert strict(12) == 12
    with pytest.raises(ContractError, match="odd"):
        both(12)
    with pytest.raises(ContractError, match="big"):
        both(3)


# Async.


def test_async_function_is_checked_and_stays_async():
    @require(lambda x: x > 0, "x must be positive")
    @ensure(lambda result: result < 10, "too big")
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    assert inspect.iscoroutinefunction(double)
    assert asyncio.run(double(2)) == 4
    with pytest.raises(ContractError, match="x must be positive"):
        asyncio.run(double(0))
    with pytest.raises(ContractError, match="too big"):
        asyncio.run(double(6))


def test_async_handler_answers_the_model():
    @require(lambda params: params, "params must not be empty")
    @ensure(lambda result: result.message, "say something")
    async def handler(params: str, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(params, "")

    before = asyncio.run(handler("", context=CONTEXT))
    after = asyncio.run(handler("x", context=CONTEXT))

    assert before.message == "Precondition failed: params must not be empty"
    assert after.message == "Postcondition failed: say something"


# At decoration.


def test_metadata_is_that_of_the_function():
    def function(x: int, *, context: ToolContext) -> ToolResult[str]:
        """Do it."""

    checked = require(lambda x: x)(ensure(lambda result: result)(function))

    assert inspect.signature(checked) == inspect.signature(function)
    assert (checked.__name__, checked.__doc__) == ("function", "Do it.")
    assert checked.__wrapped__ is function  # type: ignore[attr-defined]
    assert not inspect.iscoroutinefunction(checked)


async def async_predicate(x: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("decorate", "words"),
    [
        (require(lambda y: True), r"asks for y, but function has x$"),
        (require(lambda result: True), r"asks for result, but function has x$"),
        (ensure(lambda y, z: True), r"asks for y, z, but function has x, result$"),
        (require(min), r"min cannot be read; wrap it in a lambda"),
    ],
)
def test_predicate_that_does_not_fit_is_refused(decorate: Callable[..., Any], words: str):
    def function(x: int) -> None: ...

    with pytest.raises(TypeError, match=words):
        decorate(function)


def test_what_is_no_predicate_is_refused():
    with pytest.raises(TypeError, match="needs a predicate to call, got True"):
        require(True, "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="async_predicate is async"):
        require(async_predicate)


@pytest.mark.parametrize("target", [SearchParams, staticmethod(len), classmethod(len), 3])
def test_what_is_no_function_is_refused(target: Any):
    with pytest.raises(TypeError, match="goes on a function"):
        require(lambda: True)(target)


def test_callable_object_can_be_checked():
    @dataclass
    class Adder:  # equal to others, so not hashable
        by: int

        def __call__(self, x: int) -> int:
            return x + self.by

    add = require(lambda x: x > 0, "x must be positive")(Adder(2))

    assert add(1) == 3
    with pytest.raises(ContractError):
        add(0)
