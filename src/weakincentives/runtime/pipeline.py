"""The pipeline between a model's call and its result. Every call goes through it.

admit: look up, parse, policies, preconditions, limits → attempt: snapshot, handler, effects,
on_result → commit, or undo → record. It is written once, as a coroutine: a call whose parts are
all sync is stepped by hand, without an event loop.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from weakincentives.core.call import ToolCall, transaction_under_way
from weakincentives.core.logs import get_logger
from weakincentives.errors import PolicyDenied, Refusal, Suspended
from weakincentives.prompt.policies import note_success
from weakincentives.prompt.prompt import OfferedTool
from weakincentives.prompt.refusals import by_person
from weakincentives.prompt.tool import Tool
from weakincentives.runtime import answers, effects, turn
from weakincentives.runtime.admission import check_policies, check_preconditions
from weakincentives.runtime.transactions import CallSetting, Recorded, Transaction, TurnSlot
from weakincentives.session import events
from weakincentives.tool_result import ToolResult

_logger = get_logger(__name__)

_MAX_CASCADE = 8


def run_call(
    around: CallSetting,
    call: ToolCall,
    recorded: list[Recorded],
    place: TurnSlot | None = None,
    depth: int = 0,
) -> Coroutine[Any, Any, ToolResult[Any]]:
    """Return a call ready to run, in a span where telemetry is on."""
    transaction = Transaction(around, call, recorded, place, depth)
    telemetry = events.telemetry
    return _run(transaction) if telemetry is None else telemetry.tool_call(_run, transaction)


async def _run(transaction: Transaction) -> ToolResult[Any]:
    waits = False
    while True:
        following: Transaction | None = None
        asked = transaction.asked
        transaction_under_way.set(transaction)
        try:
            if waits:
                await transaction.enter_gates()
            offer = asked.offer or await admit(transaction)
            tool = offer.tool
            transaction.open()
            if asked.ran:
                await turn.pause(transaction)
            else:
                tool = _start(transaction, offer)
            if tool.reach == "read" or transaction.reads_only:
                transaction.read_only()
            else:
                if transaction.resource_context.in_place:
                    await transaction.enter_gates()
                    transaction.take_snapshots()
                if tool.writes == "external":
                    transaction.expect_external()
            if transaction.around.on_loop:
                answer = await answers.run_handler(tool, transaction)
            else:
                try:
                    answer = tool.handler(asked.params, context=transaction.bound)  # type: ignore[misc]
                except StopIteration as error:  # which a coroutine cannot let through
                    raise RuntimeError(str(error) or "StopIteration") from error
            result = answers.checked(tool, answer)
            transaction.succeeded = True
            if tool.effects:
                await effects.apply_effects(transaction, result)
            result = _accept(transaction, offer, result)
            if transaction.in_order:
                await turn.reach(transaction)
                transaction.check_place()
            if asked.ledger is not None:
                effects.note_outcome(transaction, result)
            transaction.commit(answers.complete(transaction, result))
        except BaseException as error:  # the one place that undoes
            following = await undo(transaction, error)
            if following is None and (
                answers.raises_through(error)
                or (transaction.context.debug and answers.is_bug(error))
            ):
                raise
        finally:
            end(transaction)
        if following is None:
            break
        transaction, waits = following, bool(following.around.enters_first)
    assert transaction.event is not None
    result = transaction.event.result
    if result.success and transaction.parent is not None:
        effects.hand_over(transaction, result)
    elif result.success and transaction.after_commit:
        await effects.follow_up(transaction, run_call)
    return result


# Admit


async def admit(transaction: Transaction) -> OfferedTool:
    """Return the tool as it is offered when the call may run; a refusal is raised."""
    if transaction.around.late:
        _check_limits(transaction)
    if transaction.around.gate_error is not None:
        raise answers.refusal_of(transaction.around.gate_error)
    if transaction.in_order:
        transaction.open()  # the read set starts here
    context, asked, name = transaction.context, transaction.asked, transaction.call.name
    offer = transaction.around.offers.get(name) or answers.refuse_unknown(transaction)
    tool = asked.tool = offer.tool
    asked.params = tool.parse(asked.params)
    if transaction.resource_context.in_place and (offer.policies or tool.preconditions):
        await transaction.enter_gates()  # nothing changes between the checks and the handler
    if offer.policies:
        await check_policies(transaction, offer)
    given = transaction.around.approval
    if given is not None and given.approved is not True:  # and no policy asked for it
        raise PolicyDenied(by_person(tool.name, given.by, given.reason))
    if tool.preconditions:
        await check_preconditions(transaction, tool)
    if transaction.depth or context.deadline is not None or context.budget_tracker is not None:
        _check_limits(transaction)
    if tool.handler is None:
        raise Refusal(f"Tool '{tool.name}' is run by the provider and has no handler here")
    return offer


def _check_limits(transaction: Transaction) -> None:
    context = transaction.context
    if transaction.depth > _MAX_CASCADE:
        raise Refusal(f"A cascade of calls may be {_MAX_CASCADE} deep at most")
    if context.deadline is not None:
        context.deadline.check()
    if context.budget_tracker is not None:
        context.budget_tracker.check()


# Attempt


def _start(transaction: Transaction, offer: OfferedTool) -> Tool[Any, Any]:
    """Put a call that reaches outside on record, and notify policies that it is about to run."""
    if offer.tool.reach in ("compensable", "irreversible"):
        offer = effects.put_on_record(transaction, offer)
    for policy in offer.counters:
        try:
            policy.on_start(offer.tool, transaction.asked.params, context=transaction.bound)  # type: ignore[misc]
        except PolicyDenied as error:
            error.policy = error.policy or policy.name
            raise
    transaction.asked.ran, transaction.asked.offer = True, offer
    if transaction.context.heartbeat is not None:
        transaction.context.heartbeat.beat()
    return offer.tool


def _accept(
    transaction: Transaction, offer: OfferedTool, result: ToolResult[Any]
) -> ToolResult[Any]:
    """Hand a success to the session and the policies, still inside the transaction."""
    tool, session, params = offer.tool, transaction.session, transaction.asked.params
    session.read_only = None  # that was for the handler; the runtime may write
    value: object = result.value
    if value is not None and session.handles(type(value)):
        session.dispatch(value)
    note_success(tool.name, session)
    for policy in offer.listeners:
        try:
            said = policy.on_result(tool, params, result, context=transaction.bound)  # type: ignore[misc]
        except Exception as error:
            if isinstance(error, (PolicyDenied, Suspended)):
                raise  # the policy denies what the call did: it is undone
            # Fail closed: a call that a policy could not note is undone.
            raise RuntimeError(f"policy '{policy.name}' failed on the result: {error!r}") from error
        if isinstance(said, str) and said:
            result = replace(result, message=f"{result.message}\n{said}".lstrip("\n"))
    return result


# Undo


async def undo(transaction: Transaction, error: BaseException) -> Transaction | None:
    """Undo an attempt. Return the next one, if any; otherwise record the call."""
    tool = transaction.asked.tool
    if transaction.is_open and (transaction.members or (tool is not None and tool.effects)):
        await effects.roll_back_effects(transaction)
    if await turn.is_to_be_re_run(transaction, error):
        transaction.forget()
        return transaction.re_run()
    result = answers.answer_to(transaction, error)
    wait = turn.wait_before_retry(transaction, result, error)
    if wait is not None:
        transaction.event = None
        transaction.undo()
        transaction.roll_back(None)
        transaction.signal.cancel(result.message)
        return transaction.next_attempt(wait)
    answers.log(transaction, result, error)
    _roll_back(transaction, result)
    return None


def _roll_back(transaction: Transaction, result: ToolResult[Any]) -> None:
    """Roll back and record; after the commit point there is nothing to undo."""
    if transaction.settled and transaction.event is not None:
        return
    asked = transaction.asked
    if asked.ledger is not None:
        effects.note_outcome(transaction, result)
    undone, left = transaction.undo()
    if asked.ran:
        transaction.not_undone += left
        if asked.ledger is not None and not transaction.compensated:
            transaction.not_undone += ("what it did outside the session, files and resources",)
    else:
        undone = ()  # only a policy can have changed something
    event = answers.complete(transaction, result, undone)
    transaction.roll_back(event)
    transaction.signal.cancel(event.result.message)


# Record


def end(transaction: Transaction) -> None:
    """Make sure that the call is settled, leave its gates, and hand out its record."""
    error = sys.exc_info()[1]
    if not transaction.settled:
        why = error or RuntimeError("the call was not settled")
        result = answers.answer_to(transaction, why)
        answers.log(transaction, result, why)
        _roll_back(transaction, result)
    event, recorded = transaction.event, transaction.recorded
    try:
        transaction.close(error)
    except Exception:
        _logger.exception("closing the resources of a call failed")
    finally:
        if event is not None:
            recorded += transaction.nested
            recorded.append(event)
            if transaction.asked.ledger is not None:
                effects.end_on_record(transaction, transaction.asked.ledger)
            if transaction.parent is None and event.success:
                for _, base, _ in transaction.forks:
                    if base.announces:
                        recorded.append(base.after_commit)
