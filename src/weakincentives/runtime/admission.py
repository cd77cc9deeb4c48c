"""Admission: what policies and preconditions say about a call before it runs."""

from __future__ import annotations

from typing import Any

from weakincentives.core.logs import get_logger
from weakincentives.errors import PolicyDenied, Refusal, Suspended
from weakincentives.prompt import refusals
from weakincentives.prompt.policies import ALLOWED, AttachedPolicy, PolicyDecision
from weakincentives.prompt.prompt import OfferedTool
from weakincentives.prompt.tool import Tool
from weakincentives.runtime import answers
from weakincentives.runtime.transactions import Transaction
from weakincentives.session import events

_logger = get_logger(__name__)


async def check_policies(
    transaction: Transaction,
    offer: OfferedTool,
    editor: AttachedPolicy | None = None,
    again: bool = False,
) -> None:
    """Raise PolicyDenied unless all policies allow the call; ``editor`` has chosen its arguments.

    Arguments that a policy has edited are checked by all others, as if the model had given them.
    People take their time: what was allowed before they were asked is checked again afterwards,
    by all policies that ask nobody.
    """
    tool, params, transaction.asked.policies = offer.tool, transaction.asked.params, offer.names
    policies, context, left = offer.policies, transaction.bound, False
    if again:
        policies = [policy for policy in policies if not policy.asks_a_person]
    elif editor is not None:
        policies = [policy for policy in policies if policy is not editor]
    for policy in policies:
        if policy.asks_a_person:
            left = transaction.leave_gates()  # an answer may take hours
        try:
            verdict = policy.check(tool, params, context=context)
            if verdict is ALLOWED:
                continue
            if policy.is_async:
                verdict = await verdict
            reason = policy.denial(verdict)
        except Exception as error:
            transaction.asked.policies = offer.names if again else offer.asked_until(policy)
            if isinstance(error, Suspended):
                raise
            # Fail closed: a policy that cannot decide does not allow.
            _logger.error("policy %s failed and denies the call", policy.name, exc_info=error)
            reason = refusals.by_failed_policy(policy.name, error)
            raise PolicyDenied(reason, policy=policy.name) from error
        decision = verdict if isinstance(verdict, PolicyDecision) else ALLOWED
        if decision.note is not None:
            note = f"{policy.name}: {decision.note}"
            transaction.asked.notes = tuple(dict.fromkeys((*transaction.asked.notes, note)))
        if reason is not None:
            transaction.asked.policies = offer.names if again else offer.asked_until(policy)
            raise PolicyDenied(reason, policy=policy.name)
        if decision.arguments is not None and not again:
            transaction.asked.params = tool.parse(decision.arguments)
            transaction.asked.edited = (answers.edited(tool, decision.arguments),)
            transaction.asked.notes = (*transaction.asked.notes, events.EDITED)
            if left:
                await transaction.enter_gates()
            await check_policies(transaction, offer, policy)
            return
        is_rewritten = decision.arguments is not None and policy is not editor
        if is_rewritten and tool.parse(decision.arguments) != params:
            # An approval is for exactly what was shown.
            raise PolicyDenied(refusals.by_editing_policy(policy.name), policy=policy.name)
    if left:
        await transaction.enter_gates()
    if policies and policies[-1].asks_a_person:  # people come last
        await check_policies(transaction, offer, editor, again=True)


async def check_preconditions(transaction: Transaction, tool: Tool[Any, Any]) -> None:
    """Refuse a call whose critical preconditions do not hold; note the others."""
    from weakincentives.prompt.contracts import validate_preconditions

    found = await validate_preconditions(tool, transaction.bound, transaction.asked.params)
    failed = tuple(map(str, found.failed))
    if not found.can_proceed:
        problem, code = "Tool preconditions not met", "PRECONDITION_FAILED"
        suggestions = [each.precondition.description for each in found.failed]
        said = f"{problem}: {'; '.join(failed)}"
        raise Refusal(said, code=code, suggestions=suggestions, problem=problem)
    if failed:
        transaction.note_degraded(failed)
