"""The pipeline: what happens between a model's call and its answer. Everything goes through here.

look up → parse → policies → limits → snapshot → handler → policies told → commit, or roll back;
recorded either way. It is written once, as a coroutine: a call whose parts are all sync is stepped
by hand, without an event loop. The calls of one turn that may run together do so on private views,
and are kept in call order: what comes out is what comes out when they run one after the other.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from json import JSONDecodeError
from threading import Lock
from types import AsyncGeneratorType, CoroutineType, GeneratorType, coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from weakincentives.call import CancellationToken, ToolCall, transaction_under_way
from weakincentives.clock import Clock
from weakincentives.errors import (
    BudgetExceededError,
    ContractError,
    DeadlineExceededError,
    MergeConflict,
    PolicyDenied,
    PreconditionFailed,
    PromptEvaluationError,
    Refusal,
    Suspended,
    ToolNotFound,
    ToolTimeout,
    ToolValidationError,
    ViewClosed,
    VisibilityExpansionRequired,
    WinkError,
)
from weakincentives.filesystem import Filesystem
from weakincentives.filesystem.protocol import shown
from weakincentives.logs import get_logger
from weakincentives.prompt.policies import (
    ALLOWED,
    AttachedPolicy,
    PolicyDecision,
    note_success,
)
from weakincentives.prompt.prompt import Offer, Prompt
from weakincentives.prompt.signatures import show
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolError, ToolMetadata, ToolResult
from weakincentives.resources import ResourceContext, ResourceRegistry
from weakincentives.runtime import instrumentation
from weakincentives.runtime.events import SUSPENDED, ToolInvoked
from weakincentives.runtime.session import Session
from weakincentives.runtime.transactions import (
    CallResources,
    Member,
    NeedsItsPlace,
    Place,
    Transaction,
)

if TYPE_CHECKING:
    from asyncio import Task

    from weakincentives.prompt.contracts import CascadeEffect, Effect
    from weakincentives.runtime.ledger import CallOutcome, Outcome, OutcomeLedger

__all__ = [
    "acall_tool",
    "aexecute_tool",
    "aexecute_tools",
    "call_tool",
    "execute_tool",
    "execute_tools",
    "may_wait",
    "run_cascade",
    "step_by_hand",
]

T = TypeVar("T")
# Calls that run together, each with its place in the turn.
_Group = list[tuple[int, ToolCall]]
# What happened, for subscribers; and what is to be done once nobody waits for the call any more.
_Recorded = ToolInvoked | Callable[[], object]
# A call that is ready to run.
_Start = Callable[[], Coroutine[Any, Any, ToolResult[Any]]]
_Outcome = tuple[ToolResult[Any] | None, BaseException | None]

_logger = get_logger(__name__)

# The loop that a call on it runs on, by the gate that the call holds.
_held_by: dict[Lock, object] = {}
_NO_RESOURCES = ResourceRegistry.of().open()


# Ways in


def execute_tool(
    call: ToolCall,
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
) -> ToolResult[Any]:
    """Run one call and return its result; failures are results, too.

    The tools are those of the context's prompt, or of ``prompt``, or of the prompt that the
    session last rendered.
    """
    if context is None:
        context = _context(session, prompt)
    return _run(call, _offers(context), context)


async def aexecute_tool(
    call: ToolCall,
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
) -> ToolResult[Any]:
    """Run one call on the caller's event loop."""
    if context is None:
        context = _context(session, prompt)
    return await _arun(call, _offers(context), context)


def call_tool(tool: Tool[Any, Any], params: object, context: ToolContext | None) -> ToolResult[Any]:
    """Run one tool, offered by the context's prompt or not."""
    context = context or _context_under_way()
    return _run(ToolCall(tool.name, params), _offers_with(tool, context), context)


async def acall_tool(
    tool: Tool[Any, Any], params: object, context: ToolContext | None
) -> ToolResult[Any]:
    """Run one tool on the caller's event loop."""
    context = context or _context_under_way()
    return await _arun(ToolCall(tool.name, params), _offers_with(tool, context), context)


def execute_tools(
    calls: Iterable[ToolCall],
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
    max_concurrency: int | None = None,
) -> tuple[ToolResult[Any], ...]:
    """Run the calls of one model turn and return their results, in call order.

    Neighbours that may run together do: tools with an async handler, or ``concurrent=True``, whose
    reach is ``read`` or ``reversible``. All others run alone. Either way the outcome is that of
    running one after the other; a call that came in another's way is taken again at its place.

    A call that raises through (a deadline, an interrupt) ends the turn: the calls before it are
    kept, those after it are not.
    """
    if context is None:
        context = _context(session, prompt)
    turn = _Turn(calls, context, max_concurrency)
    results: list[ToolResult[Any]] = []
    for group in turn.groups():
        if len(group) == 1:
            results.append(_run(*turn.alone(group)))
        else:
            results += _run_group(turn, group)
    return tuple(results)


async def aexecute_tools(
    calls: Iterable[ToolCall],
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
    max_concurrency: int | None = None,
) -> tuple[ToolResult[Any], ...]:
    """Run the calls of one model turn on the caller's event loop."""
    if context is None:
        context = _context(session, prompt)
    turn = _Turn(calls, context, max_concurrency)
    results: list[ToolResult[Any]] = []
    for group in turn.groups():
        if len(group) == 1:
            results.append(await _arun(*turn.alone(group)))
        else:
            results += await _arun_group(turn, group)
    return tuple(results)


# Whose turn it is: calls on one session, or on one workspace, run one after the other


def _run(
    call: ToolCall, offers: Mapping[str, Offer], context: ToolContext, place: Place | None = None
) -> ToolResult[Any]:
    offer = offers.get(call.name)
    needs_loop = context.deadline is not None or (offer is not None and offer.needs_loop)
    session, parent = _base(context)
    gates = _gates(session, context)
    recorded: list[_Recorded] = []
    args = (call, offers, context, session, parent, recorded, place, 0, needs_loop)
    start = partial(_traced, _pipeline, *args)
    try:
        return _in_turn(gates, _run_on_loop if needs_loop else _run_here, start)
    finally:
        _publish(session, parent, recorded)


def _in_turn(gates: tuple[Lock, ...], run: Callable[..., T], *args: Any) -> T:
    """Run once all gates are ours."""
    if not gates:
        return run(*args)
    gate, others = gates[0], gates[1:]
    if gate.locked():
        _wait(gate)
    with gate:
        return _in_turn(others, run, *args) if others else run(*args)


def _run_on_loop(start: _Start) -> ToolResult[Any]:
    from weakincentives.runtime.loops import run_blocking

    return run_blocking(start)


def _run_here(start: _Start) -> ToolResult[Any]:
    return copy_context().run(step_by_hand, start)


def step_by_hand(start: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine in which nothing waits: its first step is also its last."""
    try:
        # At once: an interrupt must not find it made and not begun.
        asked = (running := start(*args)).send(None)
        while asked is None:
            asked = running.send(_BY_HAND)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a sync call waited for something; this is a bug in the runtime")


_BY_HAND: Any = object()


@coroutine
def may_wait() -> Generator[None, object, bool]:
    """Ask whoever runs this coroutine whether it can wait: a loop can, ``step_by_hand`` cannot."""
    return (yield) is not _BY_HAND


async def _arun(
    call: ToolCall, offers: Mapping[str, Offer], context: ToolContext, place: Place | None = None
) -> ToolResult[Any]:
    session, parent = _base(context)
    recorded: list[_Recorded] = []
    try:
        gates = _gates(session, context)
        args = (call, offers, context, session, parent, recorded, place, 0, True)
        return await _ain_turn(gates, _traced, _pipeline, *args)
    finally:
        _publish(session, parent, recorded)


async def _ain_turn(
    gates: tuple[Lock, ...], run: Callable[..., Coroutine[Any, Any, T]], *args: Any
) -> T:
    """Run on the caller's event loop once all gates are ours."""
    import asyncio

    held: list[Lock] = []
    try:
        for gate in gates:
            while not gate.acquire(blocking=False):
                # Looked at again, not waited for: blocking here would stop the loop that the call
                # which holds it may need to end.
                await asyncio.sleep(0.001)
            held.append(gate)
            _held_by[gate] = asyncio.get_running_loop()
        # A task of its own, so that what it sets in its context stays there.
        value, interrupt = await asyncio.create_task(_shielded(run, *args))
        if interrupt is not None:
            raise interrupt
        return cast("T", value)
    finally:
        for gate in reversed(held):
            _held_by.pop(gate, None)
            gate.release()


async def _shielded(
    run: Callable[..., Coroutine[Any, Any, T]], *args: Any
) -> tuple[T | None, BaseException | None]:
    # As a value: an interrupt raised inside a task would end the whole loop.
    try:
        return await run(*args), None
    except (KeyboardInterrupt, SystemExit) as interrupt:
        return None, interrupt


def _gates(session: Session, context: ToolContext) -> tuple[Lock, ...]:
    gate = session.gate
    if gate is None:
        return ()  # nested: it runs in the turn of the call it belongs to
    others = _resource_context(context).gates
    if not others:
        return (gate,)
    outer = transaction_under_way.get()
    if outer is not None and not set(others).isdisjoint(outer.resource_context.gates):
        raise RuntimeError(
            "this call works on a workspace that the call under way holds: pass that call's "
            "context on, as in tool(params, context=context)"
        )
    return (gate, *others)


def _publish(session: Session, parent: Transaction | None, recorded: list[_Recorded]) -> None:
    """Tell subscribers, once the call and its turn are over: they may call tools themselves."""
    # Told with the call it is nested in: when that is taken again, this has not happened.
    if parent is not None and parent.beside and parent.holds(recorded):
        return
    for each in recorded:
        if isinstance(each, ToolInvoked):
            session.dispatcher.publish(each)
        else:
            try:
                each()
            except Exception:
                _logger.exception("what follows a commit failed; the call stays")


def _wait(gate: Lock) -> None:
    """Wait until another call on the session has ended; say so when that takes long."""
    loop = _held_by.get(gate)
    if loop is not None and loop is sys.modules["asyncio"]._get_running_loop():
        raise RuntimeError(
            "another call is under way on this session, and waiting for it here would stop the "
            "event loop it needs: await aexecute_tool(...) or tool.acall(...) instead"
        )
    while not gate.acquire(timeout=10):
        _logger.warning(
            "still waiting for another call on the same session to end; if that call waits for "
            "this one, pass its context on: tool(params, context=context)"
        )
    gate.release()


def _base(context: ToolContext) -> tuple[Session, Transaction | None]:
    """Return what a call forks from: the session, or the view of the call it is nested in."""
    parent = transaction_under_way.get()
    if parent is None and isinstance(context.resources, CallResources):
        # Called from a thread that a handler started: only its context tells where it belongs.
        parent = context.resources.transaction
    if parent is not None:
        view = parent.view(context.session)
        if parent.covers(view):
            return view, parent
    return context.session, None


# What surrounds a call


def _context(session: Session | None, prompt: Prompt[Any] | None) -> ToolContext:
    if session is None:
        raise TypeError("execute_tool needs context=... or session=...")
    prompt = prompt or session.prompt
    if prompt is None:
        raise WinkError(
            "no prompt was rendered for this session: pass prompt=..., or render one with "
            "prompt.render(session)"
        )
    return ToolContext(session=session, prompt=prompt, resources=prompt.resources)


def _context_under_way() -> ToolContext:
    parent = transaction_under_way.get()
    if parent is None:
        return ToolContext(session=Session())
    # All that surrounds the call under way holds for those it makes: policies, limits, ids.
    outer = parent.context
    return outer.bound_to(parent.session, parent.resources, parent.call.id, outer.signal)


def _offers(context: ToolContext) -> Mapping[str, Offer]:
    rendered = context.rendering
    return {} if rendered is None else rendered.offers


def _offers_with(tool: Tool[Any, Any], context: ToolContext) -> Mapping[str, Offer]:
    offers = _offers(context)
    offered = offers.get(tool.name)
    if offered is not None and offered.tool is tool:
        return offers
    return {tool.name: Offer.of(tool)}


def _resource_context(context: ToolContext) -> ResourceContext:
    resources: Any = context.resources
    if isinstance(resources, ResourceContext):
        return resources
    return getattr(resources, "context", _NO_RESOURCES)


# The pipeline


def _traced(
    run: Callable[..., Coroutine[Any, Any, ToolResult[Any]]], *args: Any
) -> Coroutine[Any, Any, ToolResult[Any]]:
    """Return a call ready to run, in a span where telemetry is on."""
    telemetry = instrumentation.telemetry
    return run(*args) if telemetry is None else telemetry.tool_call(run, *args)


class _Progress:
    """How far a call has come."""

    transaction: Transaction
    """That of the attempt under way."""
    bound: ToolContext
    """What its handler gets."""
    signal: CancellationToken
    # Defaults on the class: most calls end without setting all of them.
    tool: Tool[Any, Any] | None = None
    offer: Offer | None = None
    """Set once the call is admitted: what was asked before is not asked again for a retry."""
    ran: bool = False
    attempts: int = 1
    wait: float = 0.0
    """Seconds to the next attempt."""
    applied: tuple[Effect, ...] = ()
    notes: tuple[str, ...] = ()
    denied_by: str = ""
    degraded: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()
    not_undone: tuple[str, ...] = ()
    compensated: bool = False
    """Whether all that it did outside was taken back."""
    reached_outside: bool = False
    """Whether something that it did outside was not."""
    answered: bool = False
    """Whether the handler itself said that it failed."""
    succeeded: bool = False
    """Whether the handler succeeded: whatever fails after that is not retried."""
    ledger: OutcomeLedger | None = None
    outcome: CallOutcome | None = None
    event: ToolInvoked | None = None

    def __init__(self, call: ToolCall, clock: Clock, place: Place | None) -> None:
        self.call = call
        self.place = place
        self.params = call.params
        self.clock = clock
        self.started = clock.monotonic()
        self.timestamp = clock.time()


class _Failed(Exception):
    """A handler's answer that says it failed, on its way to the place that undoes."""

    def __init__(self, result: ToolResult[Any]) -> None:
        self.result = result


async def _pipeline(
    call: ToolCall,
    offers: Mapping[str, Offer],
    context: ToolContext,
    session: Session,
    parent: Transaction | None,
    recorded: list[_Recorded],
    place: Place | None = None,
    depth: int = 0,
    on_loop: bool = True,
) -> ToolResult[Any]:
    progress = _Progress(call, session.clock, place)
    beside = place if place is not None and place.beside else None
    resources = _resource_context(context)
    while True:
        transaction = Transaction(call, session, resources, parent, context, place)
        transaction_under_way.set(transaction)
        progress.transaction = transaction
        progress.signal = CancellationToken()
        bound = progress.bound = context.bound_to(
            transaction.session, transaction.resources, call.id, progress.signal
        )
        bound.__dict__["config"] = {**context.config, "tool_name": call.name}
        try:
            if progress.offer is None:
                offer = offers.get(call.name) or _unknown(call, offers)
                tool = progress.tool = offer.tool
                params = progress.params = tool.parse(call.params)
                for policy in offer.policies:
                    try:
                        verdict = policy.check(tool, params, context=bound)
                        reason = (
                            None if verdict is ALLOWED else await _denial(progress, policy, verdict)
                        )
                    except Exception as error:
                        if isinstance(error, Suspended):
                            raise
                        raise _undecided(policy, error) from error
                    if reason is not None:
                        raise PolicyDenied(reason, policy=policy.name)
                if tool.preconditions:
                    await _check_preconditions(progress, tool, params, bound)
                _check_limits(bound, depth)
                _start(progress, offer, params, bound)
            else:
                offer, tool, params = progress.offer, progress.offer.tool, progress.params
                await _pause(progress, context)
                transaction.take_snapshots(external=tool.writes == "external")
            if not on_loop:
                try:
                    answer = tool.handler(params, context=bound)  # type: ignore[misc]  # _start looked
                except StopIteration as error:  # which a coroutine cannot let through
                    raise RuntimeError(f"the handler raised StopIteration: {error}") from error
            else:
                answer = await _handle_on_loop(tool, params, bound)
            result = _succeeded(tool, answer)
            progress.succeeded = True
            if tool.effects:
                await _apply_effects(progress, tool, result, bound)
            _accept(progress, offer, params, result, bound)
            if beside is not None:
                await _reach(beside)
                transaction.check_place()
            if progress.ledger is not None:
                _note_outcome(progress, "committed", result)
                _put_answer_on_record(progress)
            result = _completed(progress, result)
            transaction.commit(progress.event)
        except BaseException as error:  # the one place that undoes
            if transaction.members or (progress.tool is not None and progress.tool.effects):
                await _roll_back_effects(progress)
            if beside is not None and await _is_outdated(beside, progress, error):
                progress.event = None
                transaction.forget()
                progress.signal.cancel("the call is taken again")
                raise _TakeAgain from error
            result = _answer(progress, error)
            if _is_tried_again(progress, result, error):
                progress.event = None
                transaction.restore()
                transaction.roll_back(None)
                progress.signal.cancel(result.message)
                continue
            result = _undo(progress, result)
            if _raises_through(error):
                raise
        finally:
            _end(progress, recorded)
        if result.success and parent is not None:
            _hand_over(progress, parent, result)
        elif result.success and transaction.after_commit:
            await _follow_up(progress, offers, context, recorded, depth, on_loop)
        return result


def _unknown(call: ToolCall, offers: Mapping[str, Offer]) -> NoReturn:
    from difflib import get_close_matches

    name = str(call.name)
    near = get_close_matches(name, offers, n=3)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    known = ", ".join(sorted(offers)) or "none"
    raise ToolNotFound(f"Tool '{name}' not found. {hint}Available tools: {known}", suggestions=near)


async def _denial(progress: _Progress, policy: AttachedPolicy, verdict: Any) -> str | None:
    """Return why the call is denied, once an async policy has said so; None when it is not."""
    if policy.is_async:
        verdict = await verdict
    if isinstance(verdict, PolicyDecision) and verdict.note is not None:
        progress.notes = (*progress.notes, f"{policy.name}: {verdict.note}")
    return policy.denial(verdict)


def _undecided(policy: AttachedPolicy, error: Exception) -> PolicyDenied:
    """Fail closed: a policy that cannot decide does not allow."""
    _logger.error("policy %s failed and denies the call", policy.name, exc_info=error)
    reason = f"Policy '{policy.name}' could not decide and denies the call: {error!r}"
    return PolicyDenied(reason, policy=policy.name)


async def _check_preconditions(
    progress: _Progress, tool: Tool[Any, Any], params: object, context: ToolContext
) -> None:
    from weakincentives.prompt.contracts import validate_preconditions

    found = await validate_preconditions(tool, context, params)
    if not found.can_proceed:
        failed = [str(each) for each in found.failed]
        raise PreconditionFailed(
            f"Tool preconditions not met: {'; '.join(failed)}",
            suggestions=[each.precondition.description for each in found.failed],
        )
    progress.degraded = tuple(str(each) for each in found.failed)
    if progress.degraded:
        context.__dict__["degraded"] = progress.degraded


def _check_limits(context: ToolContext, depth: int) -> None:
    if depth > _MAX_CASCADE:
        raise Refusal(f"A cascade of calls goes {_MAX_CASCADE} deep at most; this one goes further")
    if context.deadline is not None:
        context.deadline.check()
    if context.budget_tracker is not None:
        context.budget_tracker.check()


def _start(progress: _Progress, offer: Offer, params: object, context: ToolContext) -> None:
    """Take the snapshots and tell policies that the call is about to run."""
    tool = offer.tool
    if tool.handler is None:
        raise Refusal(f"Tool '{tool.name}' is run by the provider and has no handler here")
    if tool.reach in ("compensable", "irreversible"):
        _put_on_record(progress, tool, context)
    for policy in offer.counters:
        policy.on_start(tool, params, context=context)  # type: ignore[misc]  # or it were not here
    progress.ran, progress.offer = True, offer
    if context.heartbeat is not None:
        context.heartbeat.beat()
    if tool.reach == "read" or progress.transaction.reads_only:
        progress.transaction.read_only()
    else:
        progress.transaction.take_snapshots(external=tool.writes == "external")


def _put_on_record(progress: _Progress, tool: Tool[Any, Any], context: ToolContext) -> None:
    """Note that a call which reaches outside begins; refuse one that was taken before."""
    from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger

    ledger = context.resources.find(OutcomeLedger)
    if ledger is None:
        # Where the files are on disk, so is what must outlive the process.
        filesystem = context.resources.find(Filesystem)
        store = getattr(filesystem, "store", None)
        ledger = None if store is None else OutcomeLedger.at(store / "outcomes.jsonl")
    if ledger is None:
        ledger = OutcomeLedger()
        earlier = context.session[CallOutcome].select(
            lambda outcomes: next(
                (o for o in outcomes.newest_first() if o.call_id == progress.call.id), None
            )
        )
        if earlier is not None:
            ledger.end(earlier)
    ledger.begin(progress.call.id, tool.name, progress.timestamp)
    progress.ledger = ledger


async def _handle_on_loop(tool: Tool[Any, Any], params: object, context: ToolContext) -> Any:
    """Run a handler on a loop if it is async; a sync one in a thread, so that the loop goes on."""
    import asyncio
    from inspect import isawaitable

    from weakincentives.runtime.loops import ends_within, in_thread

    handler: Any = tool.handler

    async def shielded() -> Any:
        # As a value: an interrupt raised inside a task would end the whole loop.
        try:
            answer = handler(params, context=context)
            return await answer if isawaitable(answer) else answer, None
        except (KeyboardInterrupt, SystemExit) as interrupt:
            return None, interrupt

    if tool.is_async:
        work: asyncio.Future[Any] = asyncio.get_running_loop().create_task(shielded())
    else:
        work = in_thread(lambda: (handler(params, context=context), None))
    limit = tool.timeout
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
        raise
    if not done:
        work.cancel()
        if remaining is not None and limit == remaining:
            raise DeadlineExceededError(f"The deadline passed while tool '{tool.name}' ran")
        raise ToolTimeout(f"Tool '{tool.name}' timed out after {tool.timeout:g} s")
    result, interrupt = work.result()
    if interrupt is not None:
        raise interrupt
    return result


_UNFINISHED: dict[type, tuple[str, str]] = {
    CoroutineType: ("a coroutine", "make it `async def`, or await what it calls"),
    GeneratorType: ("a generator", "return a list of what it yields"),
    AsyncGeneratorType: ("an async generator", "return a list of what it yields"),
}


def _succeeded(tool: Tool[Any, Any], answer: Any) -> ToolResult[Any]:
    """Return a handler's answer if it is a success that keeps the contract; raise otherwise."""
    if not isinstance(answer, ToolResult):
        _check_finished(answer)
        raise TypeError(
            f"the handler returned {type(answer).__name__}, not a ToolResult; "
            "return ToolResult.ok(...) or ToolResult.error(...)"
        )
    result = cast("ToolResult[Any]", answer)
    value = result.value
    if value is not None:
        _check_finished(value)
    if not result.success:
        raise _Failed(result)
    if value is not None and not isinstance(value, tool.value_types):
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


async def _apply_effects(
    progress: _Progress, tool: Tool[Any, Any], result: ToolResult[Any], context: ToolContext
) -> None:
    """Apply what belongs to the transaction, and note what is to follow its commit."""
    from weakincentives.prompt.contracts import apply_each

    applied: list[Effect] = []
    progress.transaction.session.read_only = None  # that was for the handler
    try:
        await apply_each(tool, result, context, applied)
    finally:
        progress.applied = tuple(applied)
    later = [effect for effect in tool.effects if effect.after_commit]
    if later:
        progress.transaction.after_commit += tuple((effect, result) for effect in later)


async def _roll_back_effects(progress: _Progress) -> None:
    """Call the rollbacks of effects that were applied, before the snapshot is restored.

    Nested calls that were kept come first, the last of them before the others. A compensable
    tool's are called however far it came: they take back what its handler did.
    """
    from weakincentives.prompt.contracts import roll_back_effects

    transaction, tool = progress.transaction, progress.tool
    if transaction.settled or tool is None or not progress.ran:
        return
    failures: list[str] = []
    outside: list[bool] = []  # what was taken back of all that reached outside
    for member in reversed(transaction.members):
        bound = progress.bound.bound_to(
            transaction.session, transaction.resources, member.call.id, progress.signal
        )
        left = await roll_back_effects(member.effects, member.result, bound)
        failures += left
        if member.ledger is not None:
            compensated = not left and any(effect.can_roll_back for effect in member.effects)
            outside.append(compensated)
            outcome = _outcome(member.call, "compensated" if compensated else "unknown", progress)
            transaction.session.dispatch(outcome)
            member.ledger.end(outcome)
    is_compensable = tool.reach == "compensable"
    effects = tool.effects if is_compensable else progress.applied
    result: ToolResult[Any] = ToolResult.error("the call is rolled back")
    left = await roll_back_effects(effects, result, progress.bound)
    failures += left
    if tool.effects and progress.ledger is not None:
        compensates = is_compensable and any(effect.can_roll_back for effect in effects)
        outside.append(compensates and not left)
    progress.not_undone = tuple(failures)
    progress.compensated = bool(outside) and all(outside)
    progress.reached_outside = bool(outside) and not all(outside)
    progress.applied, transaction.members = (), ()


def _hand_over(progress: _Progress, parent: Transaction, result: ToolResult[Any]) -> None:
    """Leave to the call that this one is nested in what follows its commit or its failure."""
    transaction, tool = progress.transaction, cast("Tool[Any, Any]", progress.tool)
    parent.after_commit += transaction.after_commit
    effects = tuple(tool.effects)
    if progress.ledger is not None or any(effect.can_roll_back for effect in effects):
        # A composite has members instead of effects: they know how to take back what they did.
        is_composite = bool(transaction.members) and not effects
        own = () if is_composite else (Member(progress.call, effects, result, progress.ledger),)
        parent.members += (*transaction.members, *own)
    else:
        parent.members += transaction.members


def _accept(
    progress: _Progress,
    offer: Offer,
    params: object,
    result: ToolResult[Any],
    context: ToolContext,
) -> None:
    """Let session and policies learn from a success, still inside the transaction."""
    session = progress.transaction.session
    session.read_only = None  # that was for the handler; now the runtime notes what it learned
    value: object = result.value
    if value is not None and session.handles(type(value)):
        session.dispatch(value)
    note_success(offer.tool.name, session)
    for policy in offer.listeners:
        try:
            policy.on_result(offer.tool, params, result, context=context)  # type: ignore[misc]
        except PolicyDenied:  # it decided: what the call did is refused, and undone
            raise
        except Exception as error:  # fail closed: what a policy did not note did not happen
            if isinstance(error, Suspended):
                raise
            raise RuntimeError(f"policy '{policy.name}' failed on the result: {error!r}") from error


# The calls of one turn

_MAX_CONCURRENCY = max(32, 8 * (os.cpu_count() or 1))


class _Turn:
    """The calls of one model turn, and what surrounds them."""

    def __init__(
        self, calls: Iterable[ToolCall], context: ToolContext, max_concurrency: int | None
    ) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
        self.calls = tuple(enumerate(calls))
        self.context = context
        # What the model was shown when it made the calls.
        self.offers = _offers(context)
        self.max_concurrency = max_concurrency or _MAX_CONCURRENCY

    def groups(self) -> Iterator[_Group]:
        """Yield neighbours that may run together, and every other call by itself."""
        resources = _resource_context(self.context)
        group: _Group = []
        for each in self.calls:
            offer = self.offers.get(each[1].name)
            if offer is not None and offer.may_run_beside and self.max_concurrency > 1:
                group.append(each)
                continue
            yield from self._together(group, resources)
            group = []
            yield [each]
        yield from self._together(group, resources)

    def _together(self, group: _Group, resources: ResourceContext) -> Iterator[_Group]:
        # Asked late: a call before it in the turn may have built such a resource.
        if resources.in_place:
            yield from ([each] for each in group)
        elif group:
            yield group

    def alone(self, group: _Group) -> tuple[ToolCall, Mapping[str, Offer], ToolContext, Place]:
        [(number, call)] = group
        return call, self.offers, self.context, Place(number)


def _run_group(turn: _Turn, group: _Group) -> list[ToolResult[Any]]:
    from weakincentives.runtime.loops import run_blocking

    session, parent = _base(turn.context)
    gates = _gates(session, turn.context)
    recorded: list[_Recorded] = []

    def together() -> list[ToolResult[Any]]:
        return run_blocking(lambda: _together(turn, group, session, parent, recorded))

    try:
        return _in_turn(gates, together)
    finally:
        _publish(session, parent, recorded)


async def _arun_group(turn: _Turn, group: _Group) -> list[ToolResult[Any]]:
    session, parent = _base(turn.context)
    recorded: list[_Recorded] = []
    try:
        gates = _gates(session, turn.context)
        return await _ain_turn(gates, _together, turn, group, session, parent, recorded)
    finally:
        _publish(session, parent, recorded)


async def _together(
    turn: _Turn,
    group: _Group,
    session: Session,
    parent: Transaction | None,
    recorded: list[_Recorded],
) -> list[ToolResult[Any]]:
    """Run calls at the same time and keep them in their order."""
    import asyncio

    # What each call recorded, those nested in it included.
    records: list[list[_Recorded]] = [[] for _ in group]
    slots = asyncio.Semaphore(turn.max_concurrency)
    # Each is set when the call before has ended, and the place of the next one is reached.
    reached = [asyncio.Event() for _ in range(len(group) + 1)]
    reached[0].set()

    async def take(index: int, call: ToolCall, place: Place) -> _Outcome:
        async with slots:
            args = (call, turn.offers, turn.context, session, parent, records[index], place)
            try:
                result = await _traced(_until_it_holds, *args)
            except BaseException as error:
                # As a value: an interrupt raised in a task would end the whole loop. The next
                # place is not reached: what raises through ends the turn.
                return None, error
            reached[index + 1].set()
            return result, None

    tasks = [
        asyncio.create_task(take(index, call, Place(number, reached[index])))
        for index, (number, call) in enumerate(group)
    ]
    results: list[ToolResult[Any]] = []
    try:
        for task in tasks:
            result, error = await task
            if error is not None:
                raise error
            results.append(cast("ToolResult[Any]", result))
    except BaseException:
        await _stop(tasks)
        raise
    finally:
        recorded += (event for each in records for event in each)
    return results


async def _stop(tasks: Iterable[Task[Any]]) -> None:
    """Cancel what has not ended, and wait until it is rolled back."""
    import asyncio

    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:  # cancelled once more: told to them again, then waited for
            pending = {task for task in pending if not task.done()}


async def _until_it_holds(*args: Any) -> ToolResult[Any]:
    """Take a call until nothing that it depends on has changed meanwhile."""
    place: Place = args[-1]
    while True:
        try:
            return await _pipeline(*args)
        except _TakeAgain:
            place.attempts += 1


class _TakeAgain(Exception):
    """The call depends on what an earlier one of its turn has changed."""


_MAX_ATTEMPTS = 5


async def _reach(place: Place) -> None:
    """Wait until all calls before this one have ended."""
    if place.reached is not None:
        await place.reached.wait()
        place.arrived = True


async def _is_outdated(place: Place, progress: _Progress, error: BaseException) -> bool:
    """Whether the call ends as it does because it ran before its place was reached.

    A failure or refusal counts as well: on the state that an earlier call left, it may succeed.
    """
    if not isinstance(error, Exception):
        return False  # an interrupt is no answer to anything it read
    await _reach(place)
    transaction = progress.transaction
    if place.attempts >= _MAX_ATTEMPTS:
        return False  # somebody else changes the session all the time: the model is told
    if transaction.needs_place:
        found = tuple(name for name, _ in transaction.resource_context.in_place)
    elif progress.event is not None and isinstance(error, MergeConflict):
        found = error.paths  # from the commit
    else:
        try:
            transaction.check_conflicts()
            return False
        except MergeConflict as conflict:
            found = conflict.paths
    place.conflicts = tuple(dict.fromkeys((*place.conflicts, *found)))
    return True


# How a call ends


def _completed(progress: _Progress, result: ToolResult[Any]) -> ToolResult[Any]:
    """Return the result as it is handed out, and note the record that goes with it."""
    call = progress.call
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
            progress.undone,
            progress.not_undone,
            progress.degraded,
        ),
        call.id,
    )
    event = progress.event = ToolInvoked(
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
    outer = progress.transaction.parent
    if outer is not None:
        event.nested_in = outer.call.id
    place = progress.place
    if place is not None:
        event.place, event.attempts = place.number, place.attempts
        event.conflicts = place.conflicts
    return completed


def _undo(progress: _Progress, result: ToolResult[Any]) -> ToolResult[Any]:
    """Roll back and record; after the commit point there is nothing to undo."""
    transaction = progress.transaction
    if transaction.settled and progress.event is not None:
        return progress.event.result
    if progress.ledger is not None:
        _note_outcome(progress, _outcome_of_failure(progress, result), result)
    if progress.ran:
        progress.undone, not_restored = transaction.restore()
        progress.not_undone = (*progress.not_undone, *not_restored)
        if progress.ledger is not None and not progress.compensated:
            outside = "what it did outside the session, files and resources"
            progress.not_undone = (*progress.not_undone, outside)
    result = _completed(progress, result)
    transaction.roll_back(progress.event)
    progress.signal.cancel(result.message)
    return result


def _note_outcome(progress: _Progress, outcome: Outcome, result: ToolResult[Any]) -> None:
    """Put into the session how a call that reaches outside ends; LOG, so it stays either way."""
    noted = progress.outcome = _outcome(progress.call, outcome, progress, result.render())
    progress.transaction.session.read_only = None
    with suppress(ViewClosed):  # it was interrupted on its way out, and is noted already
        progress.transaction.session.dispatch(noted)


def _put_answer_on_record(progress: _Progress) -> None:
    """Note the answer before the commit: a kill between that and the next save must not lose it."""
    ledger, outcome = progress.ledger, progress.outcome
    if ledger is None or outcome is None:
        return
    views = (view for _, _, view in progress.transaction.forks if hasattr(view, "store"))
    ledger.answer(replace(outcome, files=any(view.changed_here() for view in views)))


def _outcome(
    call: ToolCall, outcome: Outcome, progress: _Progress, message: str = ""
) -> CallOutcome:
    from weakincentives.runtime.ledger import CallOutcome

    return CallOutcome(call.id, call.name, outcome, progress.timestamp, message)


def _outcome_of_failure(progress: _Progress, result: ToolResult[Any]) -> Outcome:
    if progress.compensated:
        return "compensated"
    if progress.reached_outside:
        return "unknown"
    # A handler that answers knows that it did nothing; one that broke off may have.
    return "rolled_back" if progress.answered or not progress.ran else "unknown"


# Another try


def _is_tried_again(progress: _Progress, result: ToolResult[Any], error: BaseException) -> bool:
    """Whether the tool's policy wants a failed attempt to be followed by another."""
    tool, failure = progress.tool, result.failure
    if tool is None or tool.retry is None or failure is None or not progress.ran:
        return False
    if _raises_through(error) or progress.transaction.settled or progress.succeeded:
        return False
    if isinstance(error, Refusal):
        return False  # it would be refused again
    if progress.ledger is not None and not progress.compensated:
        return False  # nobody knows whether it took effect
    if not tool.retry.retries(failure, progress.attempts - 1):
        return False
    wait = tool.retry.backoff.delay(progress.attempts)
    deadline = progress.bound.deadline
    if deadline is not None and deadline.remaining() <= wait:
        return False  # it would be over before the next attempt begins
    _logger.info("tool %s failed (%s); tried again in %.3g s", tool.name, failure.code, wait)
    progress.attempts += 1
    progress.wait = wait
    return True


async def _pause(progress: _Progress, context: ToolContext) -> None:
    """Wait for the next attempt; whoever cancels the caller's signal need not wait for it."""
    until = progress.clock.monotonic() + progress.wait
    while (left := until - progress.clock.monotonic()) > 0:
        if context.signal.cancelled:
            raise ToolTimeout(f"cancelled between attempts: {context.signal.reason}")
        await progress.clock.sleep(min(left, 0.1))


# What follows a commit

_MAX_CASCADE = 8


async def _follow_up(
    progress: _Progress,
    offers: Mapping[str, Offer],
    context: ToolContext,
    recorded: list[_Recorded],
    depth: int,
    on_loop: bool,
) -> None:
    """Send notifications and call what is to be called next."""
    from weakincentives.prompt.contracts import CascadeEffect, NotificationEffect

    transaction = progress.transaction
    transaction_under_way.set(None)
    for effect, result in transaction.after_commit:
        try:
            if isinstance(effect, CascadeEffect) and effect.apply is None:
                call, found = _cascaded(effect, result, offers)
                if call is not None:
                    args = (call, found, context, transaction.base, None, recorded)
                    await _traced(_pipeline, *args, None, depth + 1, on_loop)
            elif isinstance(effect, NotificationEffect) and effect.apply is None:
                recorded.append(partial(effect.emit, context, result))
            else:
                await effect.run(context, result)
        except Exception:
            name = effect.description or effect.type
            _logger.exception("effect %r failed after the commit; the call stays", name)


async def run_cascade(
    effect: CascadeEffect, result: ToolResult[Any], context: ToolContext
) -> ToolResult[Any] | None:
    """Make the call that a cascade asks for; None where its condition does not hold."""
    call, offers = _cascaded(effect, result, _offers(context))
    return None if call is None else await _arun(call, offers, context)


def _cascaded(
    effect: CascadeEffect, result: ToolResult[Any], offers: Mapping[str, Offer]
) -> tuple[ToolCall | None, Mapping[str, Offer]]:
    if effect.trigger_condition is not None and not effect.trigger_condition(result):
        return None, offers
    tool = effect.trigger_tool
    arguments = effect.arguments
    params = arguments(result) if callable(arguments) else arguments
    if isinstance(tool, str):
        return ToolCall(tool, params), offers
    known = offers.get(tool.name)
    if known is not None and known.tool is tool:
        return ToolCall(tool.name, params), offers
    return ToolCall(tool.name, params), {**offers, tool.name: Offer.of(tool)}


_RAISED_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (DeadlineExceededError, "DEADLINE_EXCEEDED"),
    (BudgetExceededError, "BUDGET_EXCEEDED"),
    (PromptEvaluationError, "EVALUATION_STOPPED"),
    (VisibilityExpansionRequired, "VISIBILITY_EXPANSION"),
)


def _answer(progress: _Progress, error: BaseException) -> ToolResult[Any]:
    """Return what a failure means for the model."""
    if isinstance(error, _Failed):
        progress.answered = True
        return _logged(progress, _well_formed(progress, error.result))
    if isinstance(error, Suspended):
        progress.answered = True  # whoever stops to be called again has not done it yet
        return _suspended(progress, error)
    text = _text(error)
    if isinstance(error, Refusal):
        if isinstance(error, PolicyDenied):
            progress.denied_by = error.policy
        return _logged(
            progress,
            ToolResult.error(
                text,
                code=error.code,
                recoverable=error.recoverable,
                suggestions=error.suggestions,
            ),
        )
    if isinstance(error, ToolTimeout):
        return _logged(progress, ToolResult.error(text, code="TIMEOUT"))
    if isinstance(error, MergeConflict):
        advice = ("Look again, then retry",)
        return _logged(progress, ToolResult.error(text, code="CONFLICT", suggestions=advice))
    if _raises_through(error):
        code = next((c for cls, c in _RAISED_CODES if isinstance(error, cls)), None)
        said = _interrupted(progress) if code is None else f"{type(error).__name__}: {text}"
        return ToolResult.error(said, code=code or "INTERRUPTED", recoverable=False)
    if isinstance(error, ContractError):
        return _logged(progress, ToolResult.error(text, code="CONTRACT_VIOLATION"))
    if isinstance(error, (ToolValidationError, ValueError)):
        result = ToolResult.error(text, code="VALIDATION_FAILED")
        if isinstance(error, ToolValidationError):
            return _logged(progress, result)
        # A library's own, not the handler's word: most likely a bug.
        is_bug = isinstance(error, (JSONDecodeError, UnicodeError))
        return _logged(progress, result, error, logging.ERROR if is_bug else logging.INFO)
    if isinstance(error, TypeError):
        _logger.error("tool %s raised a TypeError", progress.call.name, exc_info=error)
        message = f"Tool '{progress.call.name}' failed on a value of the wrong type: {text}"
        return ToolResult.error(message, code="TYPE_ERROR", recoverable=False)
    if isinstance(error, NeedsItsPlace):  # nested: the call it belongs to is taken again
        return ToolResult.error(text, code="NEEDS_ITS_PLACE")
    _logger.error("tool %s failed", progress.call.name, exc_info=error)
    from weakincentives.retry import code_of

    code = code_of(error)  # those of the world outside: another try may succeed
    return ToolResult.error(
        f"Internal error: {text}", code=code or "INTERNAL_ERROR", recoverable=code is not None
    )


def _suspended(progress: _Progress, error: BaseException) -> ToolResult[Any]:
    undone = " and rolled back" if progress.ran else ""
    said = f"'{progress.call.name}' was suspended{undone}: {type(error).__name__}"
    return ToolResult.error(said, code=SUSPENDED)


def _interrupted(progress: _Progress) -> str:
    ended = "ended, and was rolled back" if progress.ran else "ran"
    return f"'{progress.call.name}' was interrupted before it {ended}"


def _logged(
    progress: _Progress,
    result: ToolResult[Any],
    error: BaseException | None = None,
    level: int = logging.INFO,
) -> ToolResult[Any]:
    """Return the result of an expected failure, with a line in the log; no error in itself."""
    if _logger.isEnabledFor(level):
        name, code = shown(progress.call.name), cast("ToolError", result.failure).code
        said = shown(result.message.partition("\n")[0])
        _logger.log(level, "tool %s failed (%s): %s", name, code, said, exc_info=error)
    return result


def _well_formed(progress: _Progress, result: ToolResult[Any]) -> ToolResult[Any]:
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


def _raises_through(error: BaseException) -> bool:
    return not isinstance(error, Exception) or isinstance(
        error, (PromptEvaluationError, VisibilityExpansionRequired, Suspended)
    )


def _text(error: BaseException) -> str:
    try:
        if type(error).__str__ is KeyError.__str__:  # the key alone says nothing
            return f"{type(error).__name__}: {error}"
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def _end(progress: _Progress, recorded: list[_Recorded]) -> None:
    """Make sure of the end, whatever interrupted it, and hand out the record."""
    transaction = progress.transaction
    error = sys.exc_info()[1]
    if not transaction.settled:
        _undo(progress, _answer(progress, error or RuntimeError("the call did not end")))
    try:
        transaction.close(error)
    except Exception:
        _logger.exception("closing the resources of a call failed")
    finally:
        if progress.event is not None:
            recorded += transaction.nested
            recorded.append(progress.event)
            if progress.ledger is not None and progress.outcome is not None:
                progress.ledger.end(progress.outcome)
            if transaction.parent is None and transaction.forks and progress.event.success:
                recorded += transaction.listeners
