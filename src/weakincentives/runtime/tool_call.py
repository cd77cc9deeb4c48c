"""The pipeline: what happens between a model's call and its answer. Everything goes through here.

look up → parse → policies → limits → snapshot → handler → policies told → commit, or roll back;
recorded either way. It is written once, as a coroutine: a call whose parts are all sync is stepped
by hand, without an event loop.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import replace
from threading import Lock
from typing import Any, NoReturn, cast

from weakincentives.call import CancellationToken, ToolCall, transaction_under_way
from weakincentives.clock import Clock
from weakincentives.errors import (
    BudgetExceededError,
    ContractError,
    DeadlineExceededError,
    MergeConflict,
    PolicyDenied,
    PromptEvaluationError,
    Refusal,
    ToolNotFound,
    ToolTimeout,
    ToolValidationError,
    VisibilityExpansionRequired,
    WinkError,
)
from weakincentives.logs import get_logger
from weakincentives.prompt.policies import ALLOWED, AttachedPolicy
from weakincentives.prompt.prompt import Offer, Prompt
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolError, ToolMetadata, ToolResult
from weakincentives.resources import ResourceContext, ResourceRegistry
from weakincentives.runtime.events import ToolInvoked
from weakincentives.runtime.session import Session
from weakincentives.runtime.transactions import CallResources, Transaction

__all__ = ["acall_tool", "aexecute_tool", "call_tool", "execute_tool"]

_logger = get_logger(__name__)

# A nested call runs in the turn of the call it belongs to.
_HAS_ITS_TURN = nullcontext()
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


def _run(call: ToolCall, offers: Mapping[str, Offer], context: ToolContext) -> ToolResult[Any]:
    offer = offers.get(call.name)
    needs_loop = context.deadline is not None or (offer is not None and offer.needs_loop)
    session, parent = _base(context)
    gate = session.gate
    if gate is not None and gate.locked():
        _wait(gate)
    recorded: list[ToolInvoked] = []
    try:
        with gate or _HAS_ITS_TURN:
            if needs_loop:
                return _run_on_loop(call, offers, context, session, parent, recorded)
            return copy_context().run(_step, call, offers, context, session, parent, recorded)
    finally:
        _publish(session, recorded)


def _run_on_loop(*args: Any) -> ToolResult[Any]:
    from weakincentives.runtime.loops import run_blocking

    return run_blocking(lambda: _pipeline(*args))


def _step(*args: Any) -> ToolResult[Any]:
    """Run the pipeline by hand: nothing in it waits, so its first step is also its last."""
    try:
        _pipeline(*args).send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a sync call waited for something; this is a bug in the runtime")


async def _arun(
    call: ToolCall, offers: Mapping[str, Offer], context: ToolContext
) -> ToolResult[Any]:
    import asyncio

    session, parent = _base(context)
    gate = session.gate
    held = False
    recorded: list[ToolInvoked] = []
    try:
        while gate is not None and not (held := gate.acquire(blocking=False)):
            # Held by another call on this session. Looked at again, not waited for: blocking here
            # would stop the loop that the other call may need to end.
            await asyncio.sleep(0.001)
        if gate is not None:
            _held_by[gate] = asyncio.get_running_loop()
        # A task of its own, so that what it sets in its context stays there.
        return await asyncio.create_task(
            _pipeline(call, offers, context, session, parent, recorded)
        )
    finally:
        if held and gate is not None:
            _held_by.pop(gate, None)
            gate.release()
        _publish(session, recorded)


def _publish(session: Session, recorded: list[ToolInvoked]) -> None:
    """Tell subscribers, once the call and its turn are over: they may call tools themselves."""
    for event in recorded:
        session.dispatcher.publish(event)


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


class _Progress:
    """How far a call has come."""

    # Defaults on the class: most calls end without setting all of them.
    tool: Tool[Any, Any] | None = None
    ran: bool = False
    undone: tuple[str, ...] = ()
    not_undone: tuple[str, ...] = ()
    event: ToolInvoked | None = None

    def __init__(self, call: ToolCall, transaction: Transaction, clock: Clock) -> None:
        self.call = call
        self.params = call.params
        self.transaction = transaction
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
    recorded: list[ToolInvoked],
) -> ToolResult[Any]:
    transaction = Transaction(call, session, _resource_context(context), parent, context)
    transaction_under_way.set(transaction)
    progress = _Progress(call, transaction, session.clock)
    signal = CancellationToken()
    try:
        offer = offers.get(call.name) or _unknown(call, offers)
        tool = progress.tool = offer.tool
        params = progress.params = tool.parse(call.params)
        bound = context.bound_to(transaction.session, transaction.resources, call.id, signal)
        for policy in offer.policies:
            try:
                verdict = policy.check(tool, params, context=bound)
                reason = None if verdict is ALLOWED else await _denial(policy, verdict)
            except Exception as error:
                raise _undecided(policy, error) from error
            if reason is not None:
                raise PolicyDenied(reason)
        _check_limits(bound)
        _start(progress, offer, params, bound)
        if tool.timeout is None and bound.deadline is None and not tool.is_async:
            try:
                answer = tool.handler(params, context=bound)  # type: ignore[misc]  # _start looked
            except StopIteration as error:  # which a coroutine cannot let through
                raise RuntimeError(f"the handler raised StopIteration: {error}") from error
        else:
            answer = await _handle_on_loop(tool, params, bound)
        result = _succeeded(answer)
        _accept(progress, offer, params, result, bound)
        result = _completed(progress, result)
        transaction.commit(progress.event)
    except BaseException as error:  # the one place that undoes
        result = _undo(progress, error)
        signal.cancel(result.message)
        if _raises_through(error):
            raise
    finally:
        _end(progress, recorded)
    return result


def _unknown(call: ToolCall, offers: Mapping[str, Offer]) -> NoReturn:
    from difflib import get_close_matches

    name = str(call.name)
    near = get_close_matches(name, offers, n=3)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    known = ", ".join(sorted(offers)) or "none"
    raise ToolNotFound(f"Unknown tool '{name}'. {hint}Available tools: {known}", suggestions=near)


async def _denial(policy: AttachedPolicy, verdict: Any) -> str | None:
    """Return why the call is denied, once an async policy has said so; None when it is not."""
    return policy.denial(await verdict if policy.is_async else verdict)


def _undecided(policy: AttachedPolicy, error: Exception) -> PolicyDenied:
    """Fail closed: a policy that cannot decide does not allow."""
    _logger.error("policy %s failed and denies the call", policy.name, exc_info=error)
    return PolicyDenied(f"Policy '{policy.name}' could not decide and denies the call: {error!r}")


def _check_limits(context: ToolContext) -> None:
    if context.deadline is not None:
        context.deadline.check()
    if context.budget_tracker is not None:
        context.budget_tracker.check()


def _start(progress: _Progress, offer: Offer, params: object, context: ToolContext) -> None:
    """Take the snapshots and tell policies that the call is about to run."""
    tool = offer.tool
    if tool.handler is None:
        raise Refusal(f"Tool '{tool.name}' is run by the provider and has no handler here")
    for policy in offer.counters:
        policy.on_start(tool, params, context=context)  # type: ignore[misc]  # or it were not here
    progress.ran = True
    if context.heartbeat is not None:
        context.heartbeat.beat()
    if tool.reach == "read" or progress.transaction.reads_only:
        progress.transaction.read_only()
    else:
        progress.transaction.take_snapshots()


async def _handle_on_loop(tool: Tool[Any, Any], params: object, context: ToolContext) -> Any:
    """Run a handler that is async, or that somebody waits for only so long."""
    import asyncio
    from inspect import isawaitable

    from weakincentives.runtime.loops import in_thread

    handler: Any = tool.handler

    async def shielded() -> Any:
        # As a value: an interrupt raised inside a task would end the whole loop.
        try:
            answer = handler(params, context=context)
            return await answer if isawaitable(answer) else answer, None
        except (KeyboardInterrupt, SystemExit) as interrupt:
            return None, interrupt

    if tool.is_async:
        work: asyncio.Future[Any] = asyncio.ensure_future(shielded())
    else:
        work = in_thread(lambda: (handler(params, context=context), None))
    remaining = None if context.deadline is None else context.deadline.remaining()
    limit = min((t for t in (tool.timeout, remaining) if t is not None), default=None)
    try:
        done, _ = await asyncio.wait({work}, timeout=limit)
    except asyncio.CancelledError:
        work.cancel()
        if tool.is_async:
            # Let it clean up; its session and files are still its own.
            await asyncio.wait({work}, timeout=5)
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


def _succeeded(answer: Any) -> ToolResult[Any]:
    """Return a handler's answer if it is a success; raise for all others."""
    if not isinstance(answer, ToolResult):
        if hasattr(answer, "close") and hasattr(answer, "send"):
            answer.close()  # a coroutine that a sync handler returned: nobody will await it
        raise TypeError(
            f"the handler returned {type(answer).__name__}, not a ToolResult; "
            "return ToolResult.ok(...) or ToolResult.error(...)"
        )
    result = cast("ToolResult[Any]", answer)
    if not result.success:
        raise _Failed(result)
    return result


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
    for policy in offer.listeners:
        try:
            policy.on_result(offer.tool, params, result, context=context)  # type: ignore[misc]
        except Exception as error:  # fail closed: what a policy did not note did not happen
            raise RuntimeError(f"policy '{policy.name}' failed on the result: {error!r}") from error


# How a call ends


def _completed(progress: _Progress, result: ToolResult[Any]) -> ToolResult[Any]:
    """Return the result as it is handed out, and note the record that goes with it."""
    call = progress.call
    duration = progress.clock.monotonic() - progress.started
    completed: ToolResult[Any] = ToolResult(
        result.message,
        result.value,
        result.success,
        result.exclude_value_from_context,
        result.failure,
        ToolMetadata(
            call.name, progress.timestamp, duration, 1, progress.undone, progress.not_undone
        ),
        call.id,
    )
    progress.event = ToolInvoked(
        tool_name=call.name,
        params=progress.params,
        result=completed,
        success=result.success,
        timestamp=progress.timestamp,
        duration=duration,
        call_id=call.id,
        ran=progress.ran,
    )
    return completed


def _undo(progress: _Progress, error: BaseException) -> ToolResult[Any]:
    """Roll back and record; after the commit point there is nothing to undo."""
    transaction = progress.transaction
    if transaction.settled and progress.event is not None:
        return progress.event.result
    result = _answer(progress, error)
    if progress.ran:
        progress.undone, progress.not_undone = transaction.restore()
        reach = None if progress.tool is None else progress.tool.reach
        if reach in ("compensable", "irreversible"):
            outside = "what it did outside the session, files and resources"
            progress.not_undone = (*progress.not_undone, outside)
    result = _completed(progress, result)
    transaction.roll_back(progress.event)
    return result


_RAISED_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (DeadlineExceededError, "DEADLINE_EXCEEDED"),
    (BudgetExceededError, "BUDGET_EXCEEDED"),
    (PromptEvaluationError, "EVALUATION_STOPPED"),
    (VisibilityExpansionRequired, "VISIBILITY_EXPANSION"),
)


def _answer(progress: _Progress, error: BaseException) -> ToolResult[Any]:
    """Return what a failure means for the model."""
    if isinstance(error, _Failed):
        return _well_formed(progress.call, error.result)
    text = _text(error)
    if isinstance(error, Refusal):
        return ToolResult.error(text, code=error.code, suggestions=error.suggestions)
    if isinstance(error, ToolTimeout):
        return ToolResult.error(text, code="TIMEOUT")
    if isinstance(error, MergeConflict):
        return ToolResult.error(text, code="CONFLICT", suggestions=("Look again, then retry",))
    if _raises_through(error):
        code = next((c for cls, c in _RAISED_CODES if isinstance(error, cls)), "INTERRUPTED")
        return ToolResult.error(f"{type(error).__name__}: {text}", code=code, recoverable=False)
    if isinstance(error, ContractError):
        return ToolResult.error(text, code="CONTRACT_VIOLATION")
    if isinstance(error, (ToolValidationError, ValueError)):
        return ToolResult.error(text, code="VALIDATION_FAILED")
    if isinstance(error, TypeError):
        _logger.error("tool %s raised a TypeError", progress.call.name, exc_info=error)
        message = f"Tool '{progress.call.name}' failed on a value of the wrong type: {text}"
        return ToolResult.error(message, code="TYPE_ERROR", recoverable=False)
    _logger.error("tool %s failed", progress.call.name, exc_info=error)
    return ToolResult.error(f"Internal error: {text}", code="INTERNAL_ERROR", recoverable=False)


def _well_formed(call: ToolCall, result: ToolResult[Any]) -> ToolResult[Any]:
    """Return a handler's own failure with a message and a ToolError, whatever it left out."""
    message = result.message or f"Tool '{call.name}' failed without saying why"
    failure = result.failure or ToolError("EXECUTION_FAILED", message)
    return replace(result, message=message, failure=failure)


def _raises_through(error: BaseException) -> bool:
    return not isinstance(error, Exception) or isinstance(
        error, (PromptEvaluationError, VisibilityExpansionRequired)
    )


def _text(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def _end(progress: _Progress, recorded: list[ToolInvoked]) -> None:
    """Make sure of the end, whatever interrupted it, and hand out the record."""
    transaction = progress.transaction
    error = sys.exc_info()[1]
    if not transaction.settled:
        _undo(progress, error or RuntimeError("the call did not end"))
    try:
        transaction.close(error)
    except Exception:
        _logger.exception("closing the resources of a call failed")
    finally:
        if progress.event is not None:
            recorded.append(progress.event)
