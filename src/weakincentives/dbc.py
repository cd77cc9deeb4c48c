"""Design by contract: conditions that hold before and after a function runs. Always on.

On a tool handler a violation is an answer for the model, on any other function an exception:

>>> @require(lambda x: x >= 0, "x must not be negative")
... @ensure(lambda x, result: abs(result * result - x) < 1e-6, "not the square root")
... def root(x: float) -> float:
...     return x**0.5
>>> root(9.0)
3.0
>>> root(-1.0)
Traceback (most recent call last):
weakincentives.errors.ContractError: Precondition failed: x must not be negative
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from types import FunctionType
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from weakincentives.core.named import Named, named, title_of
from weakincentives.errors import ContractError
from weakincentives.tool_result import ToolResult

__all__ = ["ensure", "require"]

Function: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Function)


def require(predicate: Callable[..., object], message: str = "") -> Callable[[F], F]:
    """Check ``predicate`` before the function runs.

    It is called with those of the function's arguments that it names; ``**kwargs`` gets them all.
    """
    return _decorator("require", predicate, message)


def ensure(predicate: Callable[..., object], message: str = "") -> Callable[[F], F]:
    """Check ``predicate`` when the function has returned.

    Like ``require``, and ``result`` is what the function returned.
    """
    return _decorator("ensure", predicate, message)


@dataclass(frozen=True, slots=True)
class _Check:
    """One condition."""

    message: str
    holds: Named
    """The predicate."""


@dataclass(frozen=True, slots=True)
class _Contract:
    """All conditions of one function, in reading order."""

    function: Function
    before: tuple[_Check, ...] = ()
    after: tuple[_Check, ...] = ()


# Which functions carry a contract: a second decorator adds to it instead of wrapping again, so
# that conditions are checked in reading order. By identity of the function: an attribute would be
# copied by any other decorator that stands between ours.
_contracts: WeakKeyDictionary[FunctionType, _Contract] = WeakKeyDictionary()


def _decorator(name: str, predicate: Callable[..., object], message: str) -> Callable[[F], F]:
    if not callable(predicate):
        raise TypeError(f"@{name} needs a predicate to call, got {predicate!r}")
    if inspect.iscoroutinefunction(predicate):
        raise TypeError(f"@{name}: {title_of(predicate)} is async; predicates are plain functions")

    def decorate(function: F) -> F:
        if not callable(function) or isinstance(function, (type, staticmethod, classmethod)):
            raise TypeError(f"@{name} goes on a function, right above its def; got {function!r}")
        contract = _Contract(function)
        if isinstance(function, FunctionType):
            contract = _contracts.get(function, contract)
        signature = inspect.signature(contract.function)
        offered = [*signature.parameters, *(["result"] if name == "ensure" else [])]
        who, has = f"@{name}: {title_of(predicate)}", f"{title_of(contract.function)} has"
        holds = named(predicate, offered, who, has)
        kind = "Precondition" if name == "require" else "Postcondition"
        check = _Check(f"{kind} failed: {message or title_of(predicate)}", holds)
        if name == "require":
            contract = replace(contract, before=(check, *contract.before))
        else:
            contract = replace(contract, after=(check, *contract.after))
        checked = _enforce(contract, signature)
        _contracts[checked] = contract
        return cast(F, checked)

    return decorate


def _enforce(contract: _Contract, signature: Signature) -> FunctionType:
    """Return the function with its checks around it."""
    function, before, after = contract.function, contract.before, contract.after
    bind = _binder(function, signature)
    refuse = _answer_model if _is_handler(signature) else _raise

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def checked_async(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(args, kwargs)
            if violation := _violation(before, arguments):
                return refuse(violation)
            arguments["result"] = result = await function(*args, **kwargs)
            violation = _violation(after, arguments)
            return result if violation is None else refuse(violation)

        return cast(FunctionType, checked_async)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        if violation := _violation(before, arguments):
            return refuse(violation)
        arguments["result"] = result = function(*args, **kwargs)
        violation = _violation(after, arguments)
        return result if violation is None else refuse(violation)

    return cast(FunctionType, checked)


def _violation(checks: tuple[_Check, ...], arguments: Mapping[str, Any]) -> ContractError | None:
    """Return what the first condition that does not hold says; None when all hold."""
    for check in checks:
        try:
            if not check.holds(arguments):
                return ContractError(check.message)
        except Exception as raised:
            why = f"(the check raised {type(raised).__name__}: {raised})"
            error = ContractError(f"{check.message} {why}")
            error.__cause__ = raised
            return error
    return None


def _binder(
    function: Function, signature: Signature
) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return a function that maps a call's arguments by name, defaults applied."""
    parameters = signature.parameters.values()
    names = signature.parameters.keys()
    ordered = [each.name for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    keywords = [each.name for each in parameters if each.kind is Parameter.KEYWORD_ONLY]
    is_plain = len(ordered) + len(keywords) == len(names)
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        # What Signature.bind does for the usual shapes of a call, at a fraction of its cost.
        if is_plain and len(args) <= len(ordered):
            given = dict(zip(ordered, args, strict=False))
            arguments = {**defaults, **given, **kwargs}
            if arguments.keys() == names and given.keys().isdisjoint(kwargs):
                return arguments
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{title_of(function)}() {error}") from None
        bound.apply_defaults()
        return bound.arguments

    return bind


def _is_handler(signature: Signature) -> bool:
    returns = signature.return_annotation
    return "context" in signature.parameters and (
        # As text: the annotation may be a string.
        returns is Signature.empty or re.search(r"\bToolResult\b", str(returns)) is not None
    )


def _answer_model(violation: ContractError) -> object:
    return ToolResult.error(str(violation), code="CONTRACT_VIOLATION")


def _raise(violation: ContractError) -> object:
    raise violation
