"""Results: run the handler, check what it returned, word a failure, complete the record."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from json import JSONDecodeError
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn, cast

from weakincentives.core.call import ToolCall
from weakincentives.core.gate import InUse
from weakincentives.core.logs import get_logger
from weakincentives.errors import (
    BudgetExceededError,
    ContractError,
    DeadlineExceededError,
    MergeConflict,
    PolicyDenied,
    PromptEvaluationError,
    ProtocolError,
    Refusal,
    Suspended,
    ToolTimeout,
    ToolValidationError,
    VisibilityExpansionRequired,
    WorkspaceLocked,
)
from weakincentives.filesystem.bypass import warn_once
from weakincentives.filesystem.paths import shown
from weakincentives.prompt.prompt import OfferedTool
from weakincentives.prompt.signatures import show
from weakincentives.prompt.tool import Tool
from weakincentives.runtime.transactions import NeedsItsPlace, Transaction
from weakincentives.serde import dump
from weakincentives.session.events import SUSPENDED, ToolInvoked
from weakincentives.session.session import Session
from weakincentives.tool_result import ToolError, ToolMetadata, ToolResult

_logger = get_logger(__name__)

INTERRUPTED = "INTERRUPTED"
"""The code of a call that was cancelled, or whose process was interrupted."""
PROTOCOL_ERROR = "PROTOCOL_ERROR"
"""The code of a call whose handler raised an error for its caller's protocol."""
_UNFINISHED: dict[type, tuple[str, str]] = {
    CoroutineType: ("a coroutine", "make it `async def`, or await what it calls"),
    GeneratorType: ("a generator", "return a list of what it yields"),
    AsyncGeneratorType: ("an async generator", "return a list of what it yields"),
}
_GRACE = 0.05
"""Seconds for an async handler to end when it has timed out: then nothing is left that could change
what was undone."""
_MOST_SHOWN = 5
"""Errors of a TaskGroup that the model is told."""
_MAX_EDITED = 2000
"""Characters of edited arguments that the model is told."""
_MEMBERS_FIRST = 5.0
"""Seconds by which the limits of a composed tool's members come before its own."""
_PLAIN = frozenset({str, int, float, bool, type(None), dict, list, tuple})
_RAISED_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (DeadlineExceededError, "DEADLINE_EXCEEDED"),
    (BudgetExceededError, "BUDGET_EXCEEDED"),
    (PromptEvaluationError, "EVALUATION_STOPPED"),
    (VisibilityExpansionRequired, "VISIBILITY_EXPANSION"),
)


class Failed(Exception):
    """Carries a handler's own failure to the place that undoes."""

    def __init__(self, result: ToolResult[Any]) -> None:
        self.result = result


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal of a call that could not enter a gate."""
    code = "WORKSPACE_LOCKED" if isinstance(error, WorkspaceLocked) else None
    return Refusal(f"Nothing was run: {error}", code=code)


# The handler and what it returned


async def run_handler(tool: Tool[Any, Any], transaction: Transaction) -> Any:
    """Run a handler within its limits: on the loop if it is async, else in a thread."""
    import asyncio

    from weakincentives.core.loops import ends_within, in_thread

    handler: Any = tool.handler
    params, context = transaction.asked.params, transaction.bound
    loop = transaction.around.loop = asyncio.get_running_loop()
    has_ended: list[bool] = []

    async def shielded() -> Any:
        # As a value: an interrupt raised inside a task would end the whole loop.
        try:
            answer = handler(params, context=context)
            return await answer if isawaitable(answer) else answer, None
        except (KeyboardInterrupt, SystemExit) as interrupt:
            return None, interrupt

    def in_worker() -> Any:
        try:
            return handler(params, context=context), None
        finally:
            has_ended.append(True)

    if tool.is_async:
        work: asyncio.Future[Any] = loop.create_task(shielded())
    else:
        work = in_thread(in_worker)

    def abandon() -> None:
        ended = work.done if tool.is_async else partial(bool, has_ended)
        if not ended():
            transaction.abandon(tool.name, ended)

    limit = tool.timeout
    if limit is not None and limit == getattr(handler, "longest", None):
        limit += _MEMBERS_FIRST
    remaining = None if context.deadline is None else context.deadline.remaining()
    if remaining is not None and (limit is None or remaining < limit):
        limit = remaining
    try:
        done = await ends_within(limit, work)
    except asyncio.CancelledError:
        work.cancel()
        if tool.is_async:
            # Let it clean up; its session and files are still its own.
            await ends_within(5, work)
        abandon()
        raise
    if not done:
        work.cancel()
        if tool.is_async:
            await ends_within(_GRACE, work)
        abandon()
        if remaining is not None and limit == remaining:
            raise DeadlineExceededError(f"The deadline passed while tool '{tool.name}' ran")
        raise ToolTimeout(f"Tool '{tool.name}' timed out after {tool.timeout:g} s")
    result, interrupt = work.result()
    if interrupt is not None:
        raise interrupt
    return result


def checked(tool: Tool[Any, Any], answer: Any) -> ToolResult[Any]:
    """Return a handler's result if it is a success of the declared type; raise otherwise."""
    if not isinstance(answer, ToolResult):
        _check_finished(answer)
        raise TypeError(
            f"the handler returned {type(answer).__name__}, not a ToolResult; "
            "return ToolResult.ok(...) or ToolResult.error(...)"
        )
    result: ToolResult[Any] = answer  # pyright: ignore[reportUnknownVariableType]
    value = result.value
    if type(result.message) is not str:
        raise TypeError(
            f"the message of its result must be a text, got {result.message!r}; for a value, "
            "return ToolResult.ok(value)"
        )
    if result.success and (value is None or type(value) in tool.value_types):
        return result
    if type(value) not in _PLAIN:
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
    """Refuse coroutines and generators: they are not a result yet."""
    kind = type(answer)
    if kind not in _UNFINISHED and not hasattr(kind, "__await__"):
        return
    what, advice = _UNFINISHED.get(kind, (f"an awaitable {kind.__name__}", "make it `async def`"))
    if isinstance(answer, CoroutineType | GeneratorType):
        answer.close()
    raise TypeError(f"the handler returned {what}, not its result; {advice}")


# Failures


def refuse_unknown(transaction: Transaction) -> NoReturn:
    from difflib import get_close_matches

    name, offers = str(transaction.call.name), transaction.around.offers
    # A registry finds a tool under two spellings: name each once, as the caller spells names.
    named = {offer.tool.name: offer.tool.name for offer in offers.values()}
    if ":" in name:
        named |= {offer.tool.name: each for each, offer in offers.items() if ":" in each}
    near = get_close_matches(name, named.values(), n=3)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    known = ", ".join(sorted(named.values())) or "none"
    problem = f"Tool '{name}' not found"
    raise Refusal(
        f"{problem}. {hint}Available tools: {known}",
        code="TOOL_NOT_FOUND",
        recoverable=False,
        suggestions=near,
        problem=problem,
    )


def raises_through(error: BaseException) -> bool:
    """Whether an error is raised to the caller after the call is undone."""
    return not isinstance(error, Exception) or isinstance(
        error, (PromptEvaluationError, VisibilityExpansionRequired, Suspended)
    )


def answer_to(transaction: Transaction, error: BaseException) -> ToolResult[Any]:
    """Return the result for a failure, worded for the model."""
    name, text = transaction.call.name, _text(error)
    if isinstance(error, Failed):
        transaction.answered = True
        return _well_formed(transaction, error.result)
    if isinstance(error, Suspended):
        transaction.answered = True  # a suspended call has not taken effect
        undone = " and rolled back" if transaction.asked.ran else ""
        said = f"'{name}' was suspended{undone}: {type(error).__name__}"
        return ToolResult.error(said, code=SUSPENDED)
    if isinstance(error, Refusal):
        if isinstance(error, PolicyDenied):
            transaction.asked.denied_by = error.policy
        failure = ToolError(error.code, error.problem, error.recoverable, error.suggestions)
        return ToolResult(text, success=False, failure=failure)
    if isinstance(error, ProtocolError):
        caller = transaction.context.caller
        if caller is not None:
            caller.refused = error
        return ToolResult.error(text, code=PROTOCOL_ERROR, recoverable=False)
    if isinstance(error, ToolTimeout):
        return ToolResult.error(text, code="TIMEOUT")
    if transaction.lost_race is not None and not raises_through(error):
        said = f"another transaction was changing the same data: {text.partition(chr(10))[0]}"
        return ToolResult.error(said, code="CONFLICT", suggestions=("Look again, then retry",))
    if isinstance(error, (MergeConflict, InUse)):
        return ToolResult.error(text, code="CONFLICT", suggestions=("Look again, then retry",))
    if raises_through(error):
        code = next((c for cls, c in _RAISED_CODES if isinstance(error, cls)), None)
        if code is not None:
            said = f"{type(error).__name__}: {text}"
        else:
            ended = "ended, and was rolled back" if transaction.asked.ran else "ran"
            said = f"'{name}' was interrupted before it {ended}"
        return ToolResult.error(said, code=code or INTERRUPTED, recoverable=False)
    if isinstance(error, ContractError):
        return ToolResult.error(text, code="CONTRACT_VIOLATION")
    if isinstance(error, (ToolValidationError, ValueError)):
        return ToolResult.error(text, code="VALIDATION_FAILED")
    if isinstance(error, TypeError):
        message = f"Tool '{name}' failed on a value of the wrong type: {text}"
        return ToolResult.error(message, code="TYPE_ERROR", recoverable=False)
    if isinstance(error, NeedsItsPlace):  # nested: the call it belongs to is re-run
        return ToolResult.error(text, code="NEEDS_ITS_PLACE")
    from weakincentives.retry import code_of

    code = code_of(error)  # a failure of the network or the like: a retry may succeed
    return ToolResult.error(
        f"Internal error: {text}", code=code or "INTERNAL_ERROR", recoverable=code is not None
    )


_EXPECTED = (
    Failed, Refusal, ToolTimeout, MergeConflict, ContractError, ToolValidationError, ProtocolError
)  # fmt: skip
"""Failures that are no bug: a line in the log, without a traceback."""


def is_bug(error: BaseException) -> bool:
    """Whether a failure is logged with its traceback: it was not worded for the model."""
    if isinstance(error, (*_EXPECTED, NeedsItsPlace)):
        return False
    return not isinstance(error, ValueError) or isinstance(error, (JSONDecodeError, UnicodeError))


def log(transaction: Transaction, result: ToolResult[Any], error: BaseException) -> None:
    """Log the failure of a call that is not retried: a bug as an error, with its traceback."""
    if raises_through(error) or isinstance(error, NeedsItsPlace):
        return
    level, cause = logging.ERROR, error
    if isinstance(error, _EXPECTED):
        level, cause = logging.INFO, None
    elif not is_bug(error):
        level = logging.INFO
    if _logger.isEnabledFor(level):
        code = cast("ToolError", result.failure).code
        name, said = shown(transaction.call.name), shown(result.message.partition("\n")[0])
        _logger.log(level, "tool %s failed (%s): %s", name, code, said, exc_info=cause)


def _well_formed(transaction: Transaction, result: ToolResult[Any]) -> ToolResult[Any]:
    """Return a handler's own failure with a message and a ToolError."""
    message, failure = result.message, result.failure
    retry = None if transaction.asked.tool is None else transaction.asked.tool.retry
    if failure is None and retry is not None and 0 < retry.max_retries < transaction.attempts:
        exceeded = f"Exceeded maximum retries ({retry.max_retries})"
        message = message or exceeded
        failure = ToolError("MAX_RETRIES_EXCEEDED", exceeded, recoverable=False)
    message = message or f"Tool '{transaction.call.name}' failed without a message"
    failure = failure or ToolError("EXECUTION_FAILED", message)
    return replace(result, message=message, failure=failure)


def _text(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[Any]", error)
        inner = "; ".join(f"{type(each).__name__}: {each}" for each in leaves(group)[:_MOST_SHOWN])
        return f"{error.message}: {inner}"
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    """Return the errors in a group, and in the groups in it."""
    found: list[BaseException] = []
    for each in group.exceptions:
        nested = isinstance(each, BaseExceptionGroup)
        found += leaves(cast("BaseExceptionGroup[Any]", each)) if nested else [each]
    return found


def edited(tool: Tool[Any, Any], arguments: Mapping[str, Any]) -> str:
    """Return what the model is told when a person has edited its arguments."""
    text = json.dumps(arguments, ensure_ascii=False, default=repr)
    if len(text) > _MAX_EDITED:
        text = f"{text[:_MAX_EDITED]}... ({len(text)} characters)"
    return f"The user edited the arguments of '{tool.name}': {text}"


# The record


def on_record(
    call: ToolCall, session: Session, offers: Mapping[str, OfferedTool]
) -> tuple[ToolCall, ToolResult[Any] | None]:
    """Return the recorded answer of a call, if there is one.

    Some providers use an id again. Another call of the same id gets an id of its own, the same
    whenever it is made again.
    """
    offer, found = offers.get(call.name), call
    for number in itertools.count(2):
        record = session.record_of(found.id)
        if record is None:
            break
        if _is_of(record, call, offer):
            failure = record.result.failure
            # The model was never told. What reached outside is in the ledger.
            is_open = failure is not None and failure.code in (SUSPENDED, INTERRUPTED)
            return found, None if is_open else record.result
        found = ToolCall(call.name, call.params, f"{call.id}#{number}")
    return found, None


def _is_of(record: ToolInvoked, call: ToolCall, offer: OfferedTool | None) -> bool:
    """Whether a record is that of a call: the same tool and arguments."""
    if record.tool_name != call.name or record.edited:
        return record.tool_name == call.name
    params = call.params
    if offer is not None:
        with suppress(Refusal):  # then the record has what the model sent
            params = offer.tool.parse(params)
    # Arguments that could not be saved are on record as text; after a kill they may be lost.
    return record.params in (None, repr(params)) or _json(record.params) == _json(params)


def _json(params: object) -> str:
    return json.dumps(dump(params), sort_keys=True, default=repr)


def complete(
    transaction: Transaction, result: ToolResult[Any], undone: tuple[str, ...] = ()
) -> ToolInvoked:
    """Return the record of a call, with its completed result."""
    call, asked, place = transaction.call, transaction.asked, transaction.place
    duration = transaction.clock.monotonic() - asked.started
    message = result.message
    if asked.degraded and asked.ran:
        message = f"{message}\nRan without: {'; '.join(asked.degraded)}".lstrip("\n")
    if asked.edited or transaction.nested_edits:
        edits = asked.edited + transaction.nested_edits
        message = "\n".join((message, *edits)).lstrip("\n")
        parent = transaction.parent
        if parent is not None:  # once each: a call that conflicts at its commit comes here twice
            parent.nested_edits = tuple(dict.fromkeys((*parent.nested_edits, *edits)))
    notes, not_undone = asked.notes, transaction.not_undone
    if transaction.abandoned and result.success:  # an earlier attempt, or a nested call
        notes += transaction.still_changing()[1]
    if transaction.bypassed is not None and (named := transaction.bypassed.named()):
        warn_once(call.name, named)
        if result.success:
            notes += (f"changed with plain file operations, so not in the history: {named}",)
        else:
            not_undone += (f"{named}, changed with plain file operations",)
            message = f"{message}\nNot undone: {not_undone[-1]}"
    completed: ToolResult[Any] = ToolResult(
        message,
        result.value,
        result.success,
        result.exclude_value_from_context,
        result.failure,
        ToolMetadata(
            call.name,
            asked.timestamp,
            duration,
            transaction.attempts,
            undone,
            not_undone,
            asked.degraded,
        ),
        call.id,
    )
    event = ToolInvoked(
        tool_name=call.name,
        params=asked.params,
        result=completed,
        success=result.success,
        timestamp=asked.timestamp,
        duration=duration,
        call_id=call.id,
        ran=asked.ran,
        policies=asked.policies,
    )
    if notes:
        event.notes = notes
    if asked.denied_by:
        event.denied_by = asked.denied_by
    if transaction.parent is not None:
        event.nested_in = transaction.parent.call.id
    if place is not None:
        event.place, event.attempts = place.number, place.attempts
        event.conflicts = place.conflicts
    transaction.event = event
    return event
