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
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from types import FunctionType
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from weakincentives.errors import ContractError

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
class _Violation:
    text: str
    cause: Exception | None = None
    """What the check raised, if it did not just say no."""


@dataclass(frozen=True, slots=True)
class _Check:
    """One condition."""

    kind: str
    message: str
    holds: Callable[[Mapping[str, Any]], object]
    """The predicate, called with what it wants of a call's arguments."""

    def violation(self, arguments: Mapping[str, Any]) -> _Violation | None:
        """Return what is wrong with these arguments, or None."""
        try:
            if self.holds(arguments):
                return None
        except Exception as error:
            raised = f"(the check raised {type(error).__name__}: {error})"
            return _Violation(f"{self.kind} failed: {self.message} {raised}", error)
        return _Violation(f"{self.kind} failed: {self.message}")


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
        raise TypeError(f"@{name}: {_title(predicate)} is async; predicates are plain functions")

    def decorate(function: F) -> F:
        if not callable(function) or isinstance(function, (type, staticmethod, classmethod)):
            raise TypeError(f"@{name} goes on a function, right above its def; got {function!r}")
        contract = _Contract(function)
        if isinstance(function, FunctionType):
            contract = _contracts.get(function, contract)
        signature = inspect.signature(contract.function)
        check = _check(name, predicate, message, contract.function, signature)
        if name == "require":
            contract = _Contract(contract.function, (check, *contract.before), contract.after)
        else:
            contract = _Contract(contract.function, contract.before, (check, *contract.after))
        checked = _enforce(contract, signature)
        _contracts[checked] = contract
        return cast(F, checked)

    return decorate


def _check(
    name: str,
    predicate: Callable[..., object],
    message: str,
    function: Function,
    signature: Signature,
) -> _Check:
    """Match the predicate's parameters with the function's; raise when they do not fit."""
    try:
        parameters = inspect.signature(predicate).parameters.values()
    except ValueError as error:
        raise TypeError(
            f"@{name}: the parameters of {_title(predicate)} cannot be read; wrap it in a lambda"
        ) from error
    offered = [*signature.parameters, *(["result"] if name == "ensure" else [])]
    wanted = [
        each
        for each in parameters
        if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        # `lambda x, limit=limit: ...` brings a value of its own.
        and (each.name in offered or each.default is Parameter.empty)
    ]
    unknown = [each.name for each in wanted if each.name not in offered]
    if unknown:
        raise TypeError(
            f"@{name}: {_title(predicate)} asks for {', '.join(unknown)}, "
            f"but {_title(function)} has {', '.join(offered) or 'no arguments'}"
        )
    return _Check(
        kind="Precondition" if name == "require" else "Postcondition",
        message=message or _title(predicate),
        holds=_caller(predicate, list(parameters), wanted),
    )


def _caller(
    predicate: Callable[..., object], parameters: list[Parameter], wanted: list[Parameter]
) -> Callable[[Mapping[str, Any]], object]:
    """Return what calls the predicate with its part of the arguments, in the cheapest way."""
    # By position as far as that goes, by name after a parameter that keeps its own default.
    positional = [
        each.name
        for given, each in zip(wanted, parameters, strict=False)
        if given is each and each.kind is not Parameter.KEYWORD_ONLY
    ]
    by_name = [each.name for each in wanted[len(positional) :]]
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        return lambda arguments: predicate(
            *[arguments[name] for name in positional],
            **{name: arguments[name] for name in arguments if name not in positional},
        )
    if by_name:
        return lambda arguments: predicate(
            *[arguments[name] for name in positional],
            **{name: arguments[name] for name in by_name},
        )
    if len(positional) == 1:
        only = positional[0]
        return lambda arguments: predicate(arguments[only])
    return lambda arguments: predicate(*[arguments[name] for name in positional])


def _enforce(contract: _Contract, signature: Signature) -> FunctionType:
    """Return the function with its checks around it."""
    function, before, after = contract.function, contract.before, contract.after
    bind = _binder(function, signature)
    refuse = _answer_model if _is_handler(signature) else _raise

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def checked_async(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(args, kwargs)
            if violation := _first_violation(before, arguments):
                return refuse(violation)
            result = await function(*args, **kwargs)
            if after and (violation := _first_violation(after, {**arguments, "result": result})):
                return refuse(violation)
            return result

        return cast(FunctionType, checked_async)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        if violation := _first_violation(before, arguments):
            return refuse(violation)
        result = function(*args, **kwargs)
        if after and (violation := _first_violation(after, {**arguments, "result": result})):
            return refuse(violation)
        return result

    return cast(FunctionType, checked)


def _first_violation(checks: tuple[_Check, ...], arguments: Mapping[str, Any]) -> _Violation | None:
    for check in checks:
        if violation := check.violation(arguments):
            return violation
    return None


def _binder(
    function: Function, signature: Signature
) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return what turns a call's arguments into a mapping by name, defaults applied."""
    parameters = dict(signature.parameters)
    names = parameters.keys()
    kinds = {each.kind for each in parameters.values()}
    is_plain = kinds <= {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    ordered = [
        name for name, each in parameters.items() if each.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    defaults = {
        name: each.default
        for name, each in parameters.items()
        if each.default is not Parameter.empty
    }

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        # What Signature.bind does for the usual shapes of a call, at a fraction of its cost.
        if is_plain and len(args) <= len(ordered):
            arguments = {**defaults, **kwargs}
            for position, value in enumerate(args):
                name = ordered[position]
                if name in kwargs:
                    break  # given twice
                arguments[name] = value
            else:
                if arguments.keys() == names:
                    return arguments
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{_title(function)}() {error}") from None
        bound.apply_defaults()
        return bound.arguments

    return bind


def _is_handler(signature: Signature) -> bool:
    returns = signature.return_annotation
    return "context" in signature.parameters and (
        # As text: it may be a string, and the class is not known this far up the package.
        returns is Signature.empty or re.search(r"\bToolResult\b", str(returns)) is not None
    )


def _answer_model(violation: _Violation) -> object:
    from weakincentives.tool_result import ToolResult

    return ToolResult.error(violation.text, code="CONTRACT_VIOLATION", recoverable=True)


def _raise(violation: _Violation) -> object:
    raise ContractError(violation.text) from violation.cause


def _title(function: Function) -> str:
    """Return a name to show; for a lambda, where it stands."""
    name = getattr(function, "__name__", None) or type(function).__name__
    code = getattr(function, "__code__", None)
    if name != "<lambda>" or code is None:
        return name
    return f"the lambda at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
