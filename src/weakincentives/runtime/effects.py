"""Effects of a call, the steps after its commit, and its entry in the ledger.

State and memory effects belong to the transaction. Notifications and cascades follow its commit.
A call that reaches outside is on record in a ledger from before it runs until it has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, cast

from weakincentives.core.call import ToolCall, transaction_under_way
from weakincentives.core.logs import get_logger
from weakincentives.errors import ViewClosed
from weakincentives.filesystem import Filesystem
from weakincentives.prompt.prompt import OfferedTool
from weakincentives.runtime.transactions import CallSetting, Member, Transaction
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.prompt.context import ToolContext
    from weakincentives.prompt.contracts import CascadeEffect, Effect
    from weakincentives.prompt.tool import Tool
    from weakincentives.runtime.ledger import CallOutcome, Outcome, OutcomeLedger

_logger = get_logger(__name__)


# Effects


async def apply_effects(transaction: Transaction, result: ToolResult[Any]) -> None:
    """Apply the effects inside the transaction, and note those that follow its commit."""
    assert transaction.asked.tool is not None
    transaction.session.read_only = None  # that was for the handler
    for effect in transaction.asked.tool.effects:
        if effect.after_commit:
            transaction.after_commit += ((effect, result, transaction.asked.params),)
        else:
            applied = effect.run(transaction.bound, result, transaction.asked.params)
            await finish(applied, transaction.around.on_loop)
            transaction.applied += (effect,)


async def finish(answer: object, on_loop: bool = True) -> None:
    """Await what an effect returned, if it is async."""
    if not isawaitable(answer):
        return
    if on_loop:
        await answer
        return
    # A sync call rolls back what a nested call did, and that may have been made on a loop.
    _awaited(answer)


async def undo_effects(
    effects: Iterable[Effect],
    result: ToolResult[Any],
    context: ToolContext,
    params: object,
    on_loop: bool = True,
) -> list[str]:
    """Call the effects' own rollbacks, the last first; returns a sentence for each failure."""
    failures: list[str] = []
    for effect in reversed(tuple(effects)):
        if effect.can_roll_back:
            try:
                await finish(effect.roll_back(context, result, params), on_loop)
            except Exception as error:
                _logger.exception("the rollback of effect %r failed", effect.label)
                failures.append(f"the rollback of effect {effect.label!r} failed: {error}")
    return failures


async def roll_back_effects(transaction: Transaction) -> None:
    """Call the rollbacks of effects that were applied, before the snapshot is restored.

    Nested calls that were committed come first, the last of them before the others. A compensable
    tool's are called however far it came: they undo what its handler did.
    """
    asked, on_loop = transaction.asked, transaction.around.on_loop
    tool = asked.tool
    if transaction.settled or tool is None or not asked.ran or transaction.stays_unknown:
        return
    failures: list[str] = []
    outside: list[bool] = []  # for each call that reached outside, whether that was undone
    for member in reversed(transaction.members):
        bound = transaction.bound.having(call_id=member.call.id)
        left = await undo_effects(member.effects, member.result, bound, member.params, on_loop)
        failures += left
        if member.ledger is not None:
            compensated = not left and any(effect.can_roll_back for effect in member.effects)
            outside.append(compensated)
            if not compensated and asked.ledger is None:
                failures.append(
                    f"what '{member.call.name}' did outside the session, files and resources"
                )
            outcome = _outcome(
                transaction, member.call, "compensated" if compensated else "unknown"
            )
            transaction.session.dispatch(outcome)
            member.ledger.end(outcome)
    is_compensable = tool.reach == "compensable"
    effects = tool.effects if is_compensable else transaction.applied
    result: ToolResult[Any] = ToolResult.error("the call is rolled back")
    left = await undo_effects(effects, result, transaction.bound, asked.params, on_loop)
    failures += left
    if tool.effects and asked.ledger is not None:
        compensates = is_compensable and any(effect.can_roll_back for effect in effects)
        outside.append(compensates and not left)
    transaction.not_undone = tuple(failures)
    transaction.compensated = all(outside) if outside else None
    transaction.applied, transaction.members = (), ()


def hand_over(transaction: Transaction, result: ToolResult[Any]) -> None:
    """Pass the steps after the commit, and what undoes this call, to the call it is nested in."""
    parent, asked = transaction.parent, transaction.asked
    assert asked.tool is not None
    assert parent is not None
    parent.after_commit += transaction.after_commit
    effects = tuple(asked.tool.effects)
    own: tuple[Member, ...] = ()
    reaches_on = asked.ledger is not None or any(effect.can_roll_back for effect in effects)
    # A composed tool has members instead of effects: those undo what they did.
    if reaches_on and (effects or not transaction.members):
        own = (Member(transaction.call, effects, result, asked.params, asked.ledger),)
    parent.members += (*transaction.members, *own)


async def follow_up(
    transaction: Transaction, run_call: Callable[..., Coroutine[Any, Any, object]]
) -> None:
    """Send the notifications and run the cascades that follow the commit.

    Each cascade is a transaction of its own.
    """
    from weakincentives.prompt.contracts import CascadeEffect, NotificationEffect

    transaction_under_way.set(None)
    for effect, result, params in transaction.after_commit:
        try:
            if isinstance(effect, CascadeEffect) and not effect.triggers(result):
                continue
            if isinstance(effect, CascadeEffect) and effect.apply is None:
                request, offers = cascaded(effect, result, transaction.around.offers)
                around = CallSetting(transaction.context, offers)
                around.on_loop, depth = transaction.around.on_loop, transaction.depth + 1
                try:
                    done: Any = await run_call(around, request, transaction.recorded, depth=depth)
                finally:
                    around.leave()
                if not done.success:
                    _logger.warning(
                        "tool %s was called after %s, and failed: %s",
                        request.name, transaction.call.name, done.message.partition("\n")[0],
                    )  # fmt: skip
            elif isinstance(effect, NotificationEffect) and effect.apply is None:
                transaction.recorded.append(partial(effect.run, transaction.context, result))
            else:
                applied = effect.run(transaction.context, result, params)
                await finish(applied, transaction.around.on_loop)
        except Exception:
            _logger.exception(
                "effect %r failed after the commit; the call stays committed", effect.label
            )


def cascaded(
    effect: CascadeEffect, result: ToolResult[Any], offers: Mapping[str, OfferedTool]
) -> tuple[ToolCall, Mapping[str, OfferedTool]]:
    """Return the call of a cascade, and the tools it can name."""
    tool, arguments = effect.trigger_tool, effect.arguments
    params = arguments(result) if callable(arguments) else arguments
    if isinstance(tool, str):
        return ToolCall(tool, params), offers
    known = offers.get(tool.name)
    if known is None or known.tool is not tool:
        offers = {**offers, tool.name: OfferedTool.of(tool)}
    return ToolCall(tool.name, params), offers


# The ledger


def put_on_record(transaction: Transaction, offer: OfferedTool) -> OfferedTool:
    """Put a call that reaches outside on record; refuse one that took effect or may have.

    Returns the tool as it is run: one with ``recover`` is asked first about an unknown outcome.
    """
    from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger

    resources = transaction.bound.resources
    ledger = resources.find(OutcomeLedger)
    if ledger is None:
        # A workspace on disk has its ledger in its store.
        store = getattr(resources.find(Filesystem), "store", None)
        ledger = None if store is None else OutcomeLedger.at(store / "outcomes.jsonl")
    call, tool = transaction.call, offer.tool
    if ledger is None:
        ledger = OutcomeLedger()
        earlier = transaction.bound.session[CallOutcome].select(
            lambda outcomes: next(
                (each for each in outcomes.newest_first() if each.call_id == call.id), None
            )
        )
        if earlier is not None:
            ledger.end(earlier)
    may_repeat = tool.idempotent or tool.recover is not None
    unknown = ledger.begin(call.id, tool.name, transaction.asked.timestamp, may_repeat=may_repeat)
    transaction.asked.ledger = ledger
    if unknown is None or tool.recover is None:
        return offer
    transaction.asked.tool = tool.replace(handler=_asking_first(tool, unknown))
    return replace(offer, tool=transaction.asked.tool)


def _asking_first(tool: Tool[Any, Any], unknown: CallOutcome) -> Any:
    """Return a handler that runs the tool only if its ``recover`` says that the call did not."""
    recover: Any = tool.recover
    run: Any = tool.handler

    def booked(told: object) -> ToolResult[Any] | None:
        if isinstance(told, ToolResult):
            return cast("ToolResult[Any]", told)
        if told is None:
            from weakincentives.runtime.ledger import refuse

            refuse(unknown)
        if told != "rolled_back":
            raise TypeError(
                f"recover must return a ToolResult, 'rolled_back' or None, got {told!r}"
            )
        transaction_under_way.get().stays_unknown = False
        return None

    async def asynchronous(params: object, *, context: ToolContext) -> Any:
        transaction_under_way.get().stays_unknown = True
        told = recover(unknown, context)
        answer = booked(await told if isawaitable(told) else told)
        return await run(params, context=context) if answer is None else answer

    def synchronous(params: object, *, context: ToolContext) -> Any:
        transaction_under_way.get().stays_unknown = True
        told = recover(unknown, context)
        answer = booked(_awaited(told) if isawaitable(told) else told)
        return run(params, context=context) if answer is None else answer

    return asynchronous if tool.is_async else synchronous


def _awaited(answer: Awaitable[Any]) -> Any:
    """Return what an async function returns, in sync code."""
    from weakincentives.core.loops import run_blocking

    async def finished() -> Any:
        return await answer

    return run_blocking(finished)


def note_outcome(transaction: Transaction, result: ToolResult[Any]) -> None:
    """Note the outcome of a call that reaches outside; in a LOG, so a rollback does not undo it.

    A success is in the ledger before the commit: a kill between that and the next save must not
    lose the answer. In a saved session, one record commits both: see ``recovery``.
    """
    outcome = "committed" if result.success else _outcome_of_failure(transaction)
    noted = transaction.outcome = _outcome(transaction, transaction.call, outcome, result.render())
    transaction.open().session.read_only = None
    with suppress(ViewClosed):  # interrupted while ending: it is noted already
        transaction.session.dispatch(noted)
    ledger = transaction.asked.ledger
    if result.success and ledger is not None and transaction.saver is None:
        views = (view for _, _, view in transaction.forks if hasattr(view, "store"))
        ledger.answer(replace(noted, files=any(view.changed_here() for view in views)))


def end_on_record(transaction: Transaction, ledger: OutcomeLedger) -> None:
    """Record the outcome of a call that has ended; what it did cannot be undone any more."""
    if transaction.outcome is not None:
        try:
            ledger.end(transaction.outcome)
        except OSError as error:
            call = transaction.call
            _logger.error(
                "the outcome of call %s to %s is not in the ledger: %s", call.id, call.name, error
            )


def _outcome(
    transaction: Transaction, call: ToolCall, outcome: Outcome, message: str = ""
) -> CallOutcome:
    from weakincentives.runtime.ledger import CallOutcome

    return CallOutcome(call.id, call.name, outcome, transaction.asked.timestamp, message)


def _outcome_of_failure(transaction: Transaction) -> Outcome:
    if transaction.compensated is not None:
        return "compensated" if transaction.compensated else "unknown"
    # A handler that returns a failure did nothing; one that raised may have taken effect.
    return "rolled_back" if transaction.answered or not transaction.asked.ran else "unknown"
