"""Task completion: checkers that tell whether the task is done when the model stops.

They fail closed: if a checker raises, the task is not done, and the reason says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from weakincentives.core.logs import get_logger
from weakincentives.errors import FilesystemError
from weakincentives.filesystem import Filesystem

if TYPE_CHECKING:
    from weakincentives.prompt.context import ToolContext

P = TypeVar("P")

_logger = get_logger(__name__)

_SHOWN = 10
"""How many missing files or steps a reason names."""


@dataclass(frozen=True, slots=True)
class CompletionResult:
    """Whether the task is done, and if not, why: worded for the model."""

    done: bool
    reason: str = ""


class TaskCompletionChecker(Protocol):
    """Tells whether the task is done. May raise: the loop calls ``check_completion``."""

    def check(self, context: ToolContext) -> CompletionResult: ...


def check_completion(checker: TaskCompletionChecker, context: ToolContext) -> CompletionResult:
    """Return the result of a checker; not done if it raises."""
    try:
        result = cast("object", checker.check(context))
        if isinstance(result, CompletionResult):
            return result
        raise TypeError(f"expected a CompletionResult, got {result!r}")
    except Exception as error:
        name = type(checker).__name__
        _logger.exception("completion checker %s failed", name)
        return CompletionResult(False, f"{name} could not be checked: {error}")


@dataclass(frozen=True, slots=True)
class FilesExist:
    """Done when there is a file at every path of the Filesystem resource."""

    paths: Sequence[str]

    def __post_init__(self) -> None:
        if isinstance(self.paths, str):
            raise TypeError("paths must be a sequence of paths, got a string")
        object.__setattr__(self, "paths", tuple(self.paths))
        if not self.paths:
            raise ValueError("paths must name at least one file")

    def check(self, context: ToolContext) -> CompletionResult:
        files = context.filesystem
        missing = [path for path in self.paths if not _is_file(files, path)]
        if not missing:
            return CompletionResult(True)
        return CompletionResult(False, f"Missing files: {_listed(missing, ', ')}")


def _is_file(files: Filesystem, path: str) -> bool:
    try:
        return files.stat(path).kind == "file"
    except FilesystemError:
        return False


# No slots: with them, frozen and generic, `PlanDone[Plan](...)` is a TypeError on Python 3.11.
@dataclass(frozen=True)
class PlanDone(Generic[P]):
    """Done when the session has a plan without unfinished steps."""

    plan_type: type[P]
    """The type of the slice; its newest value is the plan."""
    pending: Callable[[P], Iterable[str]]
    """Returns the texts of the unfinished steps."""

    def check(self, context: ToolContext) -> CompletionResult:
        plan = context.session[self.plan_type].latest()
        if plan is None:
            return CompletionResult(False, f"There is no {self.plan_type.__name__} yet")
        steps = list(self.pending(plan))
        if not steps:
            return CompletionResult(True)
        return CompletionResult(False, f"Unfinished steps: {_listed(steps, '; ')}")


@dataclass(frozen=True, slots=True)
class Custom:
    """Done if ``function(context)`` says so, with a CompletionResult or a bool."""

    function: Callable[[ToolContext], CompletionResult | bool]
    reason: str = "The task is not done yet"
    """The reason for a plain False."""

    def check(self, context: ToolContext) -> CompletionResult:
        answer = cast("object", self.function(context))
        if isinstance(answer, CompletionResult):
            return answer
        if isinstance(answer, bool):
            return CompletionResult(answer, "" if answer else self.reason)
        raise TypeError(f"expected a CompletionResult or a bool, got {answer!r}")


class _Combined:
    """Several checkers as one."""

    __slots__ = ("checkers",)

    def __init__(self, *checkers: TaskCompletionChecker) -> None:
        if not checkers:
            raise ValueError(f"{type(self).__name__} needs at least one checker")
        self.checkers = checkers

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.checkers))})"


class AllOf(_Combined):
    """Done when all checkers are; the reason joins those of the others."""

    __slots__ = ()

    def check(self, context: ToolContext) -> CompletionResult:
        results = [check_completion(checker, context) for checker in self.checkers]
        left = [result for result in results if not result.done]
        return CompletionResult(not left, _joined(left or results))


class AnyOf(_Combined):
    """Done when one checker is; the rest is not checked."""

    __slots__ = ()

    def check(self, context: ToolContext) -> CompletionResult:
        left: list[CompletionResult] = []
        for checker in self.checkers:
            result = check_completion(checker, context)
            if result.done:
                return result
            left.append(result)
        return CompletionResult(False, _joined(left, " or "))


def _joined(results: Iterable[CompletionResult], separator: str = "; ") -> str:
    return separator.join(result.reason for result in results if result.reason)


def _listed(texts: Sequence[str], separator: str) -> str:
    more = len(texts) - _SHOWN
    return separator.join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
