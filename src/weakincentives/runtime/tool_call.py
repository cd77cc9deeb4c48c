"""The ways in: one call or the calls of a turn, from sync code or on the caller's event loop.

Calls on one session, or on one workspace, pass a gate one after the other. A call whose parts are
all sync is stepped by hand; any other runs on a loop: the caller's, or one in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from contextvars import copy_context
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weakincentives.call import ToolCall, transaction_under_way
from weakincentives.errors import WinkError
from weakincentives.gate import Gate, TooLate
from weakincentives.logs import get_logger
from weakincentives.prompt.prompt import Offer, Prompt
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.runtime.effects import cascaded
from weakincentives.runtime.events import ToolInvoked
from weakincentives.runtime.pipeline import run_call
from weakincentives.runtime.progress import Recorded, Surroundings, offers_of, opened
from weakincentives.runtime.session import Session
from weakincentives.runtime.transactions import Place
from weakincentives.runtime.turn import Group, Turn, run_together

if TYPE_CHECKING:
    from weakincentives.prompt.contracts import CascadeEffect

T = TypeVar("T")
AnyResult = ToolResult[Any]
Offers = Mapping[str, Offer]

_logger = get_logger(__name__)


# Ways in


def execute_tool(
    call: ToolCall,
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
) -> AnyResult:
    """Run one call and return its result; failures are results, too.

    The tools are those of the context's prompt, or of ``prompt``, or of the prompt that the
    session last rendered.
    """
    if context is None:
        context = _context(session, prompt)
    return _run(call, offers_of(context), context)


async def aexecute_tool(
    call: ToolCall,
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
) -> AnyResult:
    """Run one call on the caller's event loop."""
    if context is None:
        context = _context(session, prompt)
    return await _arun(call, offers_of(context), context)


def call_tool(tool: Tool[Any, Any], params: object, context: ToolContext | None) -> AnyResult:
    """Run one tool, offered by the context's prompt or not."""
    context = context or _context_under_way()
    return _run(ToolCall(tool.name, params), _with(tool, context), context)


async def acall_tool(
    tool: Tool[Any, Any], params: object, context: ToolContext | None
) -> AnyResult:
    """Run one tool on the caller's event loop."""
    context = context or _context_under_way()
    return await _arun(ToolCall(tool.name, params), _with(tool, context), context)


def execute_tools(
    calls: Iterable[ToolCall],
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
    max_concurrency: int | None = None,
) -> tuple[AnyResult, ...]:
    """Run the calls of one model turn and return their results, in call order.

    Neighbours that may run together do: tools with an async handler, or ``concurrent=True``, whose
    reach is ``read`` or ``reversible``. All others run alone. Either way the outcome is that of
    running one after the other; a call that conflicts is re-run in order.

    A call that raises through (a deadline, an interrupt) ends the turn: the calls before it are
    committed, those after it are not.
    """
    if context is None:
        context = _context(session, prompt)
    turn = Turn(calls, context, max_concurrency)
    results: list[AnyResult] = []
    for group in turn.groups():
        if len(group) == 1:
            number, call = group[0]
            results.append(_run(call, turn.offers, context, Place(number)))
        else:
            work = _Work(context, turn.offers)
            results += work.run(partial(work.together, turn, group), True)
    return tuple(results)


async def aexecute_tools(
    calls: Iterable[ToolCall],
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
    max_concurrency: int | None = None,
) -> tuple[AnyResult, ...]:
    """Run the calls of one model turn on the caller's event loop."""
    if context is None:
        context = _context(session, prompt)
    turn = Turn(calls, context, max_concurrency)
    results: list[AnyResult] = []
    for group in turn.groups():
        if len(group) == 1:
            number, call = group[0]
            results.append(await _arun(call, turn.offers, context, Place(number)))
        else:
            work = _Work(context, turn.offers)
            results += await work.arun(partial(work.together, turn, group))
    return tuple(results)


async def run_cascade(
    effect: CascadeEffect, result: AnyResult, context: ToolContext
) -> AnyResult | None:
    """Make the call that a cascade asks for; None where its condition does not hold."""
    call, offers = cascaded(effect, result, offers_of(context))
    return None if call is None else await _arun(call, offers, context)


# Through the gates: calls on one session, or on one workspace, run one after the other


class _Work(Surroundings):
    """What passes the gates together: one call, or calls of a turn that run at the same time."""

    async def together(self, turn: Turn, group: Group) -> list[AnyResult]:
        """Run calls at the same time. Their records come in call order."""
        records: list[list[Recorded]] = [[] for _ in group]
        starts = [
            (number, partial(run_call, self, call, recorded, True))
            for (number, call), recorded in zip(group, records, strict=True)
        ]
        try:
            return await run_together(starts, turn.max_concurrency)
        finally:
            self.recorded += (event for each in records for event in each)

    def run(self, start: Callable[[], Coroutine[Any, Any, T]], needs_loop: bool) -> T:
        """Run it from sync code."""
        try:
            run: Any = _run_blocking if needs_loop else _run_here
            try:
                return self._in_turn(self.gates(), run, start)
            except TooLate:
                self.late = True
                return run(start)
        finally:
            self._publish()

    def _in_turn(self, gates: tuple[Gate, ...], run: Callable[..., T], start: Any) -> T:
        if not gates:
            return run(start)
        gate, others = gates[0], gates[1:]
        if gate.line or gate.lock.locked():
            with gate.turn(self.context.deadline), gate.lock:
                return self._in_turn(others, run, start)
        try:
            with gate.lock:
                return self._in_turn(others, run, start) if others else run(start)
        finally:
            if gate.line:
                gate.wake_next()

    async def arun(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run it on the caller's event loop."""
        try:
            return await self._ain_turn(start)
        finally:
            self._publish()

    async def _ain_turn(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        import asyncio

        held: list[Gate] = []
        try:
            try:
                for gate in self.gates():
                    await gate.enter(self.context.deadline)
                    held.append(gate)
            except TooLate:
                self.late = True
            # A task of its own, so that what it sets in its context stays there.
            value, interrupt = await asyncio.create_task(_shielded(start))
            if interrupt is not None:
                raise interrupt
            return cast("T", value)
        finally:
            for gate in reversed(held):
                gate.release()

    def gates(self) -> tuple[Gate, ...]:
        gate = self.session.gate
        if gate is None:
            return ()  # nested: it runs in the turn of the call it belongs to
        others = self.resources.gates
        if not others:
            return (gate,)
        outer = transaction_under_way.get()
        if outer is not None and not set(others).isdisjoint(outer.resource_context.gates):
            raise RuntimeError(
                "this call works on a workspace that the call under way holds: pass that call's "
                "context on, as in tool(params, context=context)"
            )
        return (gate, *others)

    def _publish(self) -> None:
        """Tell subscribers, once the call and its turn are over: they may call tools themselves."""
        # Told with the call it is nested in: when that is re-run, this has not happened.
        parent, recorded = self.parent, self.recorded
        if parent is not None and parent.beside and parent.holds(recorded):
            return
        for each in recorded:
            if isinstance(each, ToolInvoked):
                self.session.dispatcher.publish(each)
            else:
                try:
                    each()
                except Exception:
                    _logger.exception("what follows a commit failed; the call stays")


def _run(
    call: ToolCall, offers: Offers, context: ToolContext, place: Place | None = None
) -> AnyResult:
    offer = offers.get(call.name)
    needs_loop = context.deadline is not None or (offer is not None and offer.needs_loop)
    work = _Work(context, offers)
    return work.run(partial(run_call, work, call, work.recorded, needs_loop, place), needs_loop)


async def _arun(
    call: ToolCall, offers: Offers, context: ToolContext, place: Place | None = None
) -> AnyResult:
    work = _Work(context, offers)
    return await work.arun(partial(run_call, work, call, work.recorded, True, place))


def _run_blocking(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    from weakincentives.runtime.loops import run_blocking

    return run_blocking(start)


def _run_here(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
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


async def _shielded(
    start: Callable[[], Coroutine[Any, Any, T]],
) -> tuple[T | None, BaseException | None]:
    # As a value: an interrupt raised inside a task would end the whole loop.
    try:
        return await start(), None
    except (KeyboardInterrupt, SystemExit) as interrupt:
        return None, interrupt


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
    under_way = transaction_under_way.get()
    if under_way is None:
        return ToolContext(session=Session())
    parent = opened(under_way)
    # All that surrounds the call under way holds for those it makes: policies, limits, ids.
    outer = parent.context
    return outer.bound_to(parent.session, parent.resources, parent.call.id, outer.signal)


def _with(tool: Tool[Any, Any], context: ToolContext) -> Offers:
    """Return the tools that the context offers, or this one alone where it is not among them."""
    offers = offers_of(context)
    offered = offers.get(tool.name)
    if offered is not None and offered.tool is tool:
        return offers
    return {tool.name: Offer.of(tool)}
