"""What a call does besides its handler: effects, what follows its commit, and what is outside.

State and memory effects belong to the transaction. Notifications and cascades follow its commit.
A call that reaches outside is on record in a ledger from before it runs until it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weakincentives.call import ToolCall, transaction_under_way
from weakincentives.errors import ViewClosed
from weakincentives.filesystem import Filesystem
from weakincentives.logs import get_logger
from weakincentives.prompt.prompt import Offer
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.runtime.progress import Progress
from weakincentives.runtime.transactions import Member, Transaction

if TYPE_CHECKING:
    from weakincentives.prompt.contracts import CascadeEffect, Effect
    from weakincentives.runtime.ledger import CallOutcome, Outcome

_logger = get_logger(__name__)


# Effects


async def apply_effects(
    progress: Progress, transaction: Transaction, result: ToolResult[Any]
) -> None:
    """Apply what belongs to the transaction, and note what follows its commit."""
    from weakincentives.prompt.contracts import apply_each

    assert progress.tool is not None
    applied: list[Effect] = []
    transaction.session.read_only = None  # that was for the handler
    try:
        await apply_each(progress.tool, result, progress.bound, applied)
    finally:
        progress.applied = tuple(applied)
    later = [effect for effect in progress.tool.effects if effect.after_commit]
    if later:
        transaction.after_commit += tuple((effect, result) for effect in later)


async def roll_back_effects(progress: Progress, transaction: Transaction) -> None:
    """Call the rollbacks of effects that were applied, before the snapshot is restored.

    Nested calls that were committed come first, the last of them before the others. A compensable
    tool's are called however far it came: they undo what its handler did.
    """
    from weakincentives.prompt.contracts import roll_back_effects as roll_back

    tool = progress.tool
    if transaction.settled or tool is None or not progress.ran:
        return
    failures: list[str] = []
    outside: list[bool] = []  # what was undone of all that reached outside
    for member in reversed(transaction.members):
        bound = progress.bound.bound_to(
            transaction.session, transaction.resources, member.call.id, progress.signal
        )
        left = await roll_back(member.effects, member.result, bound)
        failures += left
        if member.ledger is not None:
            compensated = not left and any(effect.can_roll_back for effect in member.effects)
            outside.append(compensated)
            outcome = _outcome(progress, member.call, "compensated" if compensated else "unknown")
            transaction.session.dispatch(outcome)
            member.ledger.end(outcome)
    is_compensable = tool.reach == "compensable"
    effects = tool.effects if is_compensable else progress.applied
    left = await roll_back(effects, ToolResult.error("the call is rolled back"), progress.bound)
    failures += left
    if tool.effects and progress.ledger is not None:
        compensates = is_compensable and any(effect.can_roll_back for effect in effects)
        outside.append(compensates and not left)
    progress.not_undone = tuple(failures)
    progress.compensated = all(outside) if outside else None
    progress.applied, transaction.members = (), ()


def hand_over(
    progress: Progress, transaction: Transaction, parent: Transaction, result: ToolResult[Any]
) -> None:
    """Leave to the call that this one is nested in what follows its commit or its failure."""
    assert progress.tool is not None
    parent.after_commit += transaction.after_commit
    effects = tuple(progress.tool.effects)
    own: tuple[Member, ...] = ()
    reaches_on = progress.ledger is not None or any(effect.can_roll_back for effect in effects)
    # A composite has members instead of effects: they know how to undo what they did.
    if reaches_on and (effects or not transaction.members):
        own = (Member(progress.call, effects, result, progress.ledger),)
    parent.members += (*transaction.members, *own)


async def follow_up(
    progress: Progress,
    transaction: Transaction,
    call: Callable[[ToolCall, Mapping[str, Offer]], Coroutine[Any, Any, object]],
) -> None:
    """Send notifications and make the calls that follow the commit."""
    from weakincentives.prompt.contracts import CascadeEffect, NotificationEffect

    transaction_under_way.set(None)
    for effect, result in transaction.after_commit:
        try:
            if isinstance(effect, CascadeEffect) and effect.apply is None:
                request, offers = cascaded(effect, result, progress.around.offers)
                if request is not None:
                    await call(request, offers)
            elif isinstance(effect, NotificationEffect) and effect.apply is None:
                progress.recorded.append(partial(effect.emit, progress.context, result))
            else:
                await effect.run(progress.context, result)
        except Exception:
            name = effect.description or effect.type
            _logger.exception("effect %r failed after the commit; the call stays", name)


def cascaded(
    effect: CascadeEffect, result: ToolResult[Any], offers: Mapping[str, Offer]
) -> tuple[ToolCall | None, Mapping[str, Offer]]:
    """Return the call that a cascade asks for, if any, and the tools it is made among."""
    if effect.trigger_condition is not None and not effect.trigger_condition(result):
        return None, offers
    tool, arguments = effect.trigger_tool, effect.arguments
    params = arguments(result) if callable(arguments) else arguments
    if isinstance(tool, str):
        return ToolCall(tool, params), offers
    known = offers.get(tool.name)
    if known is None or known.tool is not tool:
        offers = {**offers, tool.name: Offer.of(tool)}
    return ToolCall(tool.name, params), offers


# What is outside: on record


def put_on_record(progress: Progress) -> None:
    """Note that a call which reaches outside begins; refuse one that was made before."""
    from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger

    resources = progress.bound.resources
    ledger = resources.find(OutcomeLedger)
    if ledger is None:
        # Where the files are on disk, so is what must outlive the process.
        store = getattr(resources.find(Filesystem), "store", None)
        ledger = None if store is None else OutcomeLedger.at(store / "outcomes.jsonl")
    call, tool = progress.call, progress.tool
    assert tool is not None
    if ledger is None:
        ledger = OutcomeLedger()
        earlier = progress.bound.session[CallOutcome].select(
            lambda outcomes: next(
                (each for each in outcomes.newest_first() if each.call_id == call.id), None
            )
        )
        if earlier is not None:
            ledger.end(earlier)
    ledger.begin(call.id, tool.name, progress.timestamp)
    progress.ledger = ledger


def note_outcome(progress: Progress, transaction: Transaction, result: ToolResult[Any]) -> None:
    """Note how a call that reaches outside ended; in a LOG, so it stays either way.

    A success is in the ledger before the commit: a kill between that and the next save must not
    lose the answer.
    """
    outcome = "committed" if result.success else _outcome_of_failure(progress)
    noted = progress.outcome = _outcome(progress, progress.call, outcome, result.render())
    transaction.session.read_only = None
    with suppress(ViewClosed):  # it was interrupted on its way out, and is noted already
        transaction.session.dispatch(noted)
    if result.success and progress.ledger is not None:
        views = (view for _, _, view in transaction.forks if hasattr(view, "store"))
        progress.ledger.answer(replace(noted, files=any(view.changed_here() for view in views)))


def _outcome(
    progress: Progress, call: ToolCall, outcome: Outcome, message: str = ""
) -> CallOutcome:
    from weakincentives.runtime.ledger import CallOutcome

    return CallOutcome(call.id, call.name, outcome, progress.timestamp, message)


def _outcome_of_failure(progress: Progress) -> Outcome:
    if progress.compensated is not None:
        return "compensated" if progress.compensated else "unknown"
    # A handler that answers knows that it did nothing; one that broke off may have.
    return "rolled_back" if progress.answered or not progress.ran else "unknown"
