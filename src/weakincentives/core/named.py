"""Functions of users, called with those of the offered arguments that they name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import Any, NamedTuple

_NAMES_NOTHING = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class Named(NamedTuple):
    """A function, and the arguments that it names."""

    function: Callable[..., Any]
    positional: tuple[str, ...]
    by_name: tuple[str, ...]

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        """Call the function with those of the offered arguments that it names."""
        positional = [offered[name] for name in self.positional]
        return self.function(*positional, **{name: offered[name] for name in self.by_name})

    def is_in_order(self, names: Sequence[str]) -> bool:
        """Whether the function takes these by position, and nothing else."""
        parameters = inspect.signature(self.function).parameters.values()
        return [*names] == [each.name for each in parameters] and all(
            each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in parameters
        )


def named(function: Callable[..., Any], offered: Sequence[str], who: str, has: str) -> Named:
    """Return a function as it is called: with what it names; ``**kwargs`` gets everything.

    A parameter with a default that is not offered is its author's own: ``limit=limit`` in a loop.

    Args:
        who: Names the function in messages.
        has: What comes before the offered names there: "it is called with".

    Raises:
        TypeError: It cannot be called, asks for something else, or its parameters cannot be read.
    """
    if not callable(function):
        raise TypeError(f"{who} must be a function, got {function!r}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in without a signature
        raise TypeError(
            f"{who}: the parameters of {title_of(function)} cannot be read; wrap it in a lambda"
        ) from None
    held = function.keywords if isinstance(function, partial) else ()
    takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in parameters)
    wanted = [
        each
        for each in parameters
        if each.kind not in _NAMES_NOTHING
        and each.name not in held
        and (each.name in offered or each.default is Parameter.empty)
    ]
    unknown = [each.name for each in wanted if each.name not in offered]
    if not takes_all:  # `*args` would silently get nothing
        several = (each for each in parameters if each.kind is Parameter.VAR_POSITIONAL)
        unknown += [f"*{each.name}" for each in several if each.name.strip("_")]
    if unknown:
        raise TypeError(
            f"{who} asks for {', '.join(unknown)}, but {has} {', '.join(offered) or 'no arguments'}"
        )
    positional = tuple(each.name for each in wanted if each.kind is Parameter.POSITIONAL_ONLY)
    by_name = tuple(each.name for each in wanted if each.name not in positional)
    if takes_all:
        by_name = tuple(name for name in offered if name not in (*positional, *held))
    return Named(function, positional, by_name)


def title_of(function: Callable[..., Any]) -> str:
    """Return a name to show; for a lambda, where it stands."""
    name = getattr(function, "__name__", None) or type(function).__name__
    code = getattr(function, "__code__", None)
    if name != "<lambda>" or code is None:
        return name
    return f"the lambda at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
