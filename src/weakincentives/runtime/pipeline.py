"""The pipeline: what happens between a model's call and its answer. Everything goes through here.

admit: look up, parse, policies, preconditions, limits → attempt: snapshot, handler, effects,
policies told → commit, or undo → record. It is written once, as a coroutine: a call whose parts
are all sync is stepped by hand, without an event loop.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from weakincentives.call import ToolCall, transaction_under_way
from weakincentives.errors import (
    PolicyDenied,
    PreconditionFailed,
    Refusal,
    Suspended,
)
from weakincentives.logs import get_logger
from weakincentives.prompt.policies import ALLOWED, AttachedPolicy, PolicyDecision, note_success
from weakincentives.prompt.prompt import Offer
from weakincentives.prompt.tool import Tool
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.runtime import answers, effects, events, turn
from weakincentives.runtime.answers import checked, complete
from weakincentives.runtime.progress import Progress, Recorded, Surroundings
from weakincentives.runtime.session import Session
from weakincentives.runtime.transactions import Place

_logger = get_logger(__name__)

_MAX_CASCADE = 8


def run_call(
    around: Surroundings,
    call: ToolCall,
    recorded: list[Recorded],
    on_loop: bool,
    place: Place | None = None,
    depth: int = 0,
) -> Coroutine[Any, Any, ToolResult[Any]]:
    """Return a call ready to run, in a span where telemetry is on."""
    progress = Progress(around, call, recorded, place, on_loop, depth)
    telemetry = events.telemetry
    return _run(progress) if telemetry is None else telemetry.tool_call(_run, progress)


async def _run(progress: Progress) -> ToolResult[Any]:
    while True:
        following: Progress | None = None
        transaction_under_way.set(progress)  # type: ignore[arg-type]  # it stands for one until then
        try:
            offer = progress.offer or await _admit(progress)
            tool, transaction = offer.tool, progress.transaction or progress.open()
            transaction_under_way.set(transaction)
            if progress.ran:
                await turn.pause(progress)
            else:
                _start(progress, offer)
            if tool.reach == "read" or transaction.reads_only:
                transaction.read_only()
            else:
                transaction.take_snapshots(external=tool.writes == "external")
            if progress.on_loop:
                from weakincentives.runtime.loops import run_handler

                answer = await run_handler(tool, progress.params, progress.bound)
            else:
                try:
                    answer = tool.handler(progress.params, context=progress.bound)  # type: ignore[misc]
                except StopIteration as error:  # which a coroutine cannot let through
                    raise RuntimeError(f"the handler raised StopIteration: {error}") from error
            result = checked(tool, answer)
            progress.succeeded = True
            if tool.effects:
                await effects.apply_effects(progress, transaction, result)
            _accept(progress, offer, transaction.session, result)
            if progress.beside:
                await turn.reach(progress)
                transaction.check_place()
            if progress.ledger is not None:
                effects.note_outcome(progress, transaction, result)
            transaction.commit(complete(progress, result))
        except BaseException as error:  # the one place that undoes
            following = await _undo(progress, error)
            if following is None and answers.raises_through(error):
                raise
        finally:
            _end(progress)
        if following is None:
            break
        progress = following
    event, transaction = progress.event, progress.transaction
    assert event is not None
    result = event.result
    if result.success and transaction is not None:
        if progress.parent is not None:
            effects.hand_over(progress, transaction, progress.parent, result)
        elif transaction.after_commit:
            await effects.follow_up(progress, transaction, partial(_cascade, progress))
    return result


# Admit


async def _admit(progress: Progress) -> Offer:
    """Return the tool as it is offered when the call may run; a refusal is raised."""
    if progress.around.late:
        _check_limits(progress)
    if progress.beside:
        progress.open()  # what it reads counts from the start
    offer = progress.around.offers.get(progress.call.name) or answers.refuse_unknown(progress)
    tool = progress.tool = offer.tool
    params = progress.params = tool.parse(progress.call.params)
    for policy in offer.policies:
        try:
            verdict = policy.check(tool, params, context=progress.bound)
            reason = None if verdict is ALLOWED else await _denial(progress, policy, verdict)
        except Exception as error:
            if isinstance(error, Suspended):
                raise
            # Fail closed: a policy that cannot decide does not allow.
            _logger.error("policy %s failed and denies the call", policy.name, exc_info=error)
            reason = f"Policy '{policy.name}' could not decide and denies the call: {error!r}"
            raise PolicyDenied(reason, policy=policy.name) from error
        if reason is not None:
            raise PolicyDenied(reason, policy=policy.name)
    if tool.preconditions:
        await _check_preconditions(progress, tool)
    context = progress.context
    if progress.depth or context.deadline is not None or context.budget_tracker is not None:
        _check_limits(progress)
    if tool.handler is None:
        raise Refusal(f"Tool '{tool.name}' is run by the provider and has no handler here")
    if tool.reach in ("compensable", "irreversible"):
        effects.put_on_record(progress)
    return offer


async def _denial(progress: Progress, policy: AttachedPolicy, verdict: Any) -> str | None:
    """Return why the call is denied, once an async policy has said so; None when it is not."""
    if policy.is_async:
        verdict = await verdict
    if isinstance(verdict, PolicyDecision) and verdict.note is not None:
        progress.notes = (*progress.notes, f"{policy.name}: {verdict.note}")
    return policy.denial(verdict)


async def _check_preconditions(progress: Progress, tool: Tool[Any, Any]) -> None:
    from weakincentives.prompt.contracts import validate_preconditions

    found = await validate_preconditions(tool, progress.bound, progress.params)
    if not found.can_proceed:
        failed = [str(each) for each in found.failed]
        raise PreconditionFailed(
            f"Tool preconditions not met: {'; '.join(failed)}",
            suggestions=[each.precondition.description for each in found.failed],
        )
    progress.degraded = tuple(str(each) for each in found.failed)
    if progress.degraded:
        progress.bound.__dict__["degraded"] = progress.degraded


def _check_limits(progress: Progress) -> None:
    context = progress.context
    if progress.depth > _MAX_CASCADE:
        raise Refusal(f"A cascade of calls goes {_MAX_CASCADE} deep at most; this one goes further")
    if context.deadline is not None:
        context.deadline.check()
    if context.budget_tracker is not None:
        context.budget_tracker.check()


# Attempt


def _start(progress: Progress, offer: Offer) -> None:
    """Tell policies that the call is about to run."""
    for policy in offer.counters:
        policy.on_start(offer.tool, progress.params, context=progress.bound)  # type: ignore[misc]
    progress.ran, progress.offer = True, offer
    if progress.context.heartbeat is not None:
        progress.context.heartbeat.beat()


def _accept(progress: Progress, offer: Offer, session: Session, result: ToolResult[Any]) -> None:
    """Let session and policies learn from a success, still inside the transaction."""
    tool = offer.tool
    session.read_only = None  # that was for the handler; now the runtime notes what it learned
    value: object = result.value
    if value is not None and session.handles(type(value)):
        session.dispatch(value)
    note_success(tool.name, session)
    for policy in offer.listeners:
        try:
            policy.on_result(tool, progress.params, result, context=progress.bound)  # type: ignore[misc]
        except Exception as error:
            if isinstance(error, (PolicyDenied, Suspended)):
                raise  # it decided: what the call did is refused, and undone
            # Fail closed: what a policy did not note did not happen.
            raise RuntimeError(f"policy '{policy.name}' failed on the result: {error!r}") from error


# Undo


async def _undo(progress: Progress, error: BaseException) -> Progress | None:
    """Undo an attempt. Another may follow, and is returned; otherwise the call is recorded."""
    transaction, tool = progress.transaction, progress.tool
    if transaction is not None:
        if transaction.members or (tool is not None and tool.effects):
            await effects.roll_back_effects(progress, transaction)
        if progress.beside and await turn.is_outdated(progress, transaction, error):
            progress.event = None
            transaction.forget()
            progress.signal.cancel("the call is taken again")
            return progress.run_again()
    result = answers.answer_to(progress, error)
    if transaction is not None:
        wait = turn.wait_before_retry(progress, transaction, result, error)
        if wait is not None:
            progress.event = None
            transaction.restore()
            transaction.roll_back(None)
            progress.signal.cancel(result.message)
            return progress.next_attempt(wait)
    _roll_back(progress, result)
    return None


def _roll_back(progress: Progress, result: ToolResult[Any]) -> None:
    """Roll back and record; after the commit point there is nothing to undo."""
    if (progress.transaction or progress).settled and progress.event is not None:
        return
    if progress.ledger is not None:
        effects.note_outcome(progress, progress.open(), result)
    transaction = progress.transaction
    undone: tuple[str, ...] = ()
    if transaction is not None and progress.ran:
        undone, not_restored = transaction.restore()
        progress.not_undone = (*progress.not_undone, *not_restored)
        if progress.ledger is not None and not progress.compensated:
            outside = "what it did outside the session, files and resources"
            progress.not_undone = (*progress.not_undone, outside)
    event = complete(progress, result, undone)
    if transaction is not None:
        transaction.roll_back(event)
    else:
        progress.record_refusal(event)
    progress.signal.cancel(event.result.message)


# Record


def _end(progress: Progress) -> None:
    """Make sure of the end, whatever interrupted it, and hand out the record."""
    error = sys.exc_info()[1]
    if not (progress.transaction or progress).settled:
        why = error or RuntimeError("the call did not end")
        _roll_back(progress, answers.answer_to(progress, why))
    transaction, event, recorded = progress.transaction, progress.event, progress.recorded
    if transaction is None:
        if event is not None:
            recorded.append(event)
        return
    try:
        transaction.close(error)
    except Exception:
        _logger.exception("closing the resources of a call failed")
    finally:
        if event is not None:
            recorded += transaction.nested
            recorded.append(event)
            if progress.ledger is not None and progress.outcome is not None:
                progress.ledger.end(progress.outcome)
            if transaction.forks and progress.parent is None and event.success:
                recorded += transaction.listeners


async def _cascade(
    progress: Progress, call: ToolCall, offers: Mapping[str, Offer]
) -> ToolResult[Any]:
    """Make a call that follows a commit, as a transaction of its own."""
    around, depth = Surroundings(progress.context, offers), progress.depth + 1
    return await run_call(around, call, progress.recorded, progress.on_loop, None, depth)
