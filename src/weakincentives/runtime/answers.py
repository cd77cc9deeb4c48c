"""What the model is told: a handler's answer checked, a failure in words, the result and record."""

from __future__ import annotations

import logging
from dataclasses import replace
from json import JSONDecodeError
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn, cast

from weakincentives.errors import (
    BudgetExceededError,
    ContractError,
    DeadlineExceededError,
    MergeConflict,
    PolicyDenied,
    PromptEvaluationError,
    Refusal,
    Suspended,
    ToolNotFound,
    ToolTimeout,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from weakincentives.filesystem.protocol import shown
from weakincentives.logs import get_logger
from weakincentives.prompt.signatures import show
from weakincentives.prompt.tool import Tool
from weakincentives.prompt.tool_result import ToolError, ToolMetadata, ToolResult
from weakincentives.runtime.events import SUSPENDED, ToolInvoked
from weakincentives.runtime.progress import Progress
from weakincentives.runtime.transactions import NeedsItsPlace

_logger = get_logger(__name__)

_UNFINISHED: dict[type, tuple[str, str]] = {
    CoroutineType: ("a coroutine", "make it `async def`, or await what it calls"),
    GeneratorType: ("a generator", "return a list of what it yields"),
    AsyncGeneratorType: ("an async generator", "return a list of what it yields"),
}
_RAISED_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (DeadlineExceededError, "DEADLINE_EXCEEDED"),
    (BudgetExceededError, "BUDGET_EXCEEDED"),
    (PromptEvaluationError, "EVALUATION_STOPPED"),
    (VisibilityExpansionRequired, "VISIBILITY_EXPANSION"),
)


class Failed(Exception):
    """A handler's answer that says it failed, on its way to the place that undoes."""

    def __init__(self, result: ToolResult[Any]) -> None:
        self.result = result


# What a handler returned


def checked(tool: Tool[Any, Any], answer: Any) -> ToolResult[Any]:
    """Return a handler's answer if it is a success that keeps the contract; raise otherwise."""
    if not isinstance(answer, ToolResult):
        _check_finished(answer)
        raise TypeError(
            f"the handler returned {type(answer).__name__}, not a ToolResult; "
            "return ToolResult.ok(...) or ToolResult.error(...)"
        )
    result: ToolResult[Any] = answer  # pyright: ignore[reportUnknownVariableType]
    value = result.value
    if result.success and (value is None or type(value) in tool.value_types):
        return result
    if value is not None:
        _check_finished(value)
    if not result.success:
        raise Failed(result)
    if not isinstance(value, tool.value_types):
        raise TypeError(
            f"the handler returned a value of type {type(value).__name__}, but its contract is "
            f"ToolResult[{show(tool.result_type)}]"
        )
    return result


def _check_finished(answer: object) -> None:
    """Refuse what would only give a result if somebody awaited or ran it."""
    kind = type(answer)
    if kind not in _UNFINISHED and not hasattr(kind, "__await__"):
        return
    what, advice = _UNFINISHED.get(kind, (f"an awaitable {kind.__name__}", "make it `async def`"))
    if isinstance(answer, CoroutineType | GeneratorType):
        answer.close()
    raise TypeError(f"the handler returned {what}, not its result; {advice}")


# What a failure means


def refuse_unknown(progress: Progress) -> NoReturn:
    """Refuse a call to a tool that is not offered."""
    from difflib import get_close_matches

    name, offers = str(progress.call.name), progress.around.offers
    near = get_close_matches(name, offers, n=3)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    known = ", ".join(sorted(offers)) or "none"
    raise ToolNotFound(f"Tool '{name}' not found. {hint}Available tools: {known}", suggestions=near)


def raises_through(error: BaseException) -> bool:
    """Whether an error goes on to the caller after the call is undone."""
    return not isinstance(error, Exception) or isinstance(
        error, (PromptEvaluationError, VisibilityExpansionRequired, Suspended)
    )


def answer_to(progress: Progress, error: BaseException) -> ToolResult[Any]:
    """Return what a failure means for the model; an expected one is a line in the log."""
    level, cause = logging.INFO, None
    name, text = progress.call.name, _text(error)
    if isinstance(error, Failed):
        progress.answered = True
        result = _well_formed(progress, error.result)
    elif isinstance(error, Suspended):
        progress.answered = True  # whoever stops to be called again has not done it yet
        undone = " and rolled back" if progress.ran else ""
        said = f"'{name}' was suspended{undone}: {type(error).__name__}"
        return ToolResult.error(said, code=SUSPENDED)
    elif isinstance(error, Refusal):
        if isinstance(error, PolicyDenied):
            progress.denied_by = error.policy
        result = ToolResult.error(
            text, code=error.code, recoverable=error.recoverable, suggestions=error.suggestions
        )
    elif isinstance(error, ToolTimeout):
        result = ToolResult.error(text, code="TIMEOUT")
    elif isinstance(error, MergeConflict):
        result = ToolResult.error(text, code="CONFLICT", suggestions=("Look again, then retry",))
    elif raises_through(error):
        code = next((c for cls, c in _RAISED_CODES if isinstance(error, cls)), None)
        if code is not None:
            said = f"{type(error).__name__}: {text}"
        else:
            ended = "ended, and was rolled back" if progress.ran else "ran"
            said = f"'{name}' was interrupted before it {ended}"
        return ToolResult.error(said, code=code or "INTERRUPTED", recoverable=False)
    elif isinstance(error, ContractError):
        result = ToolResult.error(text, code="CONTRACT_VIOLATION")
    elif isinstance(error, (ToolValidationError, ValueError)):
        result = ToolResult.error(text, code="VALIDATION_FAILED")
        if not isinstance(error, ToolValidationError):
            cause = error
            # A library's own, not the handler's word: most likely a bug.
            if isinstance(error, (JSONDecodeError, UnicodeError)):
                level = logging.ERROR
    elif isinstance(error, TypeError):
        _logger.error("tool %s raised a TypeError", name, exc_info=error)
        message = f"Tool '{name}' failed on a value of the wrong type: {text}"
        return ToolResult.error(message, code="TYPE_ERROR", recoverable=False)
    elif isinstance(error, NeedsItsPlace):  # nested: the call it belongs to is re-run
        return ToolResult.error(text, code="NEEDS_ITS_PLACE")
    else:
        return _internal_error(name, text, error)
    if _logger.isEnabledFor(level):
        code = cast("ToolError", result.failure).code
        said = shown(result.message.partition("\n")[0])
        _logger.log(level, "tool %s failed (%s): %s", shown(name), code, said, exc_info=cause)
    return result


def _internal_error(name: str, text: str, error: BaseException) -> ToolResult[Any]:
    from weakincentives.retry import code_of

    _logger.error("tool %s failed", name, exc_info=error)
    code = code_of(error)  # those of the world outside: another try may succeed
    return ToolResult.error(
        f"Internal error: {text}", code=code or "INTERNAL_ERROR", recoverable=code is not None
    )


def _well_formed(progress: Progress, result: ToolResult[Any]) -> ToolResult[Any]:
    """Return a handler's own failure with a message and a ToolError, whatever it left out."""
    message, failure = result.message, result.failure
    retry = None if progress.tool is None else progress.tool.retry
    if failure is None and retry is not None and 0 < retry.max_retries < progress.attempts:
        exceeded = f"Exceeded maximum retries ({retry.max_retries})"
        message = message or exceeded
        failure = ToolError("MAX_RETRIES_EXCEEDED", exceeded, recoverable=False)
    message = message or f"Tool '{progress.call.name}' failed without saying why"
    failure = failure or ToolError("EXECUTION_FAILED", message)
    return replace(result, message=message, failure=failure)


def _text(error: BaseException) -> str:
    try:
        if type(error).__str__ is KeyError.__str__:  # the key alone says nothing
            return f"{type(error).__name__}: {error}"
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


# The result as it is handed out


def complete(
    progress: Progress, result: ToolResult[Any], undone: tuple[str, ...] = ()
) -> ToolInvoked:
    """Make the record of a call, with the result as it is handed out."""
    call, place = progress.call, progress.place
    duration = progress.clock.monotonic() - progress.started
    message = result.message
    if progress.degraded and progress.ran:
        message = f"{message}\nRan without: {'; '.join(progress.degraded)}".lstrip("\n")
    completed: ToolResult[Any] = ToolResult(
        message,
        result.value,
        result.success,
        result.exclude_value_from_context,
        result.failure,
        ToolMetadata(
            call.name,
            progress.timestamp,
            duration,
            progress.attempts,
            undone,
            progress.not_undone,
            progress.degraded,
        ),
        call.id,
    )
    event = ToolInvoked(
        tool_name=call.name,
        params=progress.params,
        result=completed,
        success=result.success,
        timestamp=progress.timestamp,
        duration=duration,
        call_id=call.id,
        ran=progress.ran,
    )
    if progress.notes:
        event.notes = progress.notes
    if progress.denied_by:
        event.denied_by = progress.denied_by
    if progress.parent is not None:
        event.nested_in = progress.parent.call.id
    if place is not None:
        event.place, event.attempts = place.number, place.attempts
        event.conflicts = place.conflicts
    progress.event = event
    return event
