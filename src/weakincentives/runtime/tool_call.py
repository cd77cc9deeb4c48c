"""Entry points: one call or the calls of a turn, from sync code or on the caller's event loop.

Calls on one session, or on one workspace, pass a gate one after the other. A call whose parts are
all sync is stepped by hand; any other runs on a loop: the caller's, or one in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from weakincentives.core.call import CancellationToken, ToolCall, transaction_under_way
from weakincentives.core.gate import Gate, Lease, ProcessLock, TooLate
from weakincentives.core.logs import get_logger
from weakincentives.errors import WinkError
from weakincentives.prompt.policies import attach
from weakincentives.prompt.prompt import OfferedTool, Prompt, check_prompt
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.runtime.answers import on_record
from weakincentives.runtime.effects import cascaded, finish, undo_effects
from weakincentives.runtime.pipeline import run_call
from weakincentives.runtime.snapshots import tool_transaction
from weakincentives.runtime.transactions import (
    CallResources,
    CallSetting,
    Recorded,
    Transaction,
    TurnSlot,
)
from weakincentives.runtime.turn import (
    DEFAULT_CONCURRENCY,
    Group,
    JoinedTurn,
    first_place,
    groups,
    run_together,
)
from weakincentives.session.events import ToolInvoked
from weakincentives.session.session import Session
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.prompt.approval import Approval
    from weakincentives.prompt.contracts import Effect

T = TypeVar("T")
AnyResult = ToolResult[Any]
Offers = Mapping[str, OfferedTool]

_logger = get_logger(__name__)

_NEVER_CANCELLED = CancellationToken()
"""For the surroundings of a call; the call itself has a token of its own."""


# Entry points


def execute_tool(
    call: ToolCall,
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
    once: bool = False,
    approval: Approval | None = None,
) -> AnyResult:
    """Run one call and return its result; failures are results, too.

    The tools are those of the context's prompt, or of ``prompt``, or of the prompt that the
    session last rendered.

    Args:
        once: A call that is on record, with the same id, tool and arguments, returns its recorded
            answer and runs nothing.
        approval: What a person has decided about the call, after ``admit`` or ``ApprovalNeeded``.
    """
    context = context or context_of(session, prompt)
    return _OneCall(call, context.offers, context, once=once, approval=approval).run()


async def aexecute_tool(
    call: ToolCall,
    *,
    context: ToolContext | None = None,
    session: Session | None = None,
    prompt: Prompt[Any] | None = None,
    once: bool = False,
    approval: Approval | None = None,
) -> AnyResult:
    """Run one call on the caller's event loop."""
    context = context or context_of(session, prompt)
    return await _OneCall(call, context.offers, context, once=once, approval=approval).arun()


def call_tool(tool: Tool[Any, Any], params: object, context: ToolContext | None) -> AnyResult:
    """Run one tool, whether or not the context's prompt offers it."""
    return _call_of(tool, params, context).run()


async def acall_tool(
    tool: Tool[Any, Any], params: object, context: ToolContext | None
) -> AnyResult:
    """Run one tool on the caller's event loop."""
    return await _call_of(tool, params, context).arun()


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
    results: list[AnyResult] = []
    for work in _works(calls, context or context_of(session, prompt), max_concurrency):
        results += work.run() if isinstance(work, _Together) else (work.run(),)
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
    results: list[AnyResult] = []
    for work in _works(calls, context or context_of(session, prompt), max_concurrency):
        results += await work.arun() if isinstance(work, _Together) else (await work.arun(),)
    return tuple(results)


def _works(
    calls: Iterable[ToolCall], context: ToolContext, max_concurrency: int | None
) -> Iterator[_OneCall | _Together]:
    """Yield the calls of a turn in order, grouped by what may run concurrently."""
    if max_concurrency is not None and max_concurrency < 1:
        raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
    most = max_concurrency or DEFAULT_CONCURRENCY
    offers = context.offers  # what the model was shown when it made the calls
    for group in groups(calls, context, most):
        if len(group) == 1:
            number, call = group[0]
            yield _OneCall(call, offers, context, TurnSlot(number))
        else:
            yield _Together(group, most, offers, context)


async def apply_effects(
    tool: Tool[Any, Any], result: AnyResult, context: ToolContext, params: object = None
) -> tuple[Effect, ...]:
    """Apply a tool's effects for a result from elsewhere; returns those that were applied.

    ``params`` are for effects that ask for them.

    As a transaction: when one fails, those before it are rolled back, session and resources are
    as before, and the error is raised. State and memory come first, then notifications, then
    cascades, each a call of its own.
    """
    from weakincentives.prompt.contracts import CascadeEffect

    applied: list[Effect] = []
    cascades: list[CascadeEffect] = []
    with tool_transaction(context.session, context.resources, tag=f"effects:{tool.name}"):
        try:
            for effect in sorted(tool.effects, key=lambda each: each.after_commit):
                if isinstance(effect, CascadeEffect) and not effect.triggers(result):
                    continue
                if isinstance(effect, CascadeEffect) and effect.apply is None:
                    cascades.append(effect)
                else:
                    await finish(effect.run(context, result, params))
                    applied.append(effect)
        except BaseException:
            await undo_effects(applied, result, context, params)
            raise
    for cascade in cascades:
        call, offers = cascaded(cascade, result, context.offers)
        await _OneCall(call, offers, context).arun()
        applied.append(cascade)
    return tuple(applied)


# Through the gates: calls on one session, or on one workspace, run one after the other


class _KeptOut(Exception):
    """A gate could not be entered."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Submission(CallSetting, Generic[T]):
    """Work that passes the gates as one: a call, concurrent calls of a turn, or an admission."""

    needs_loop = True
    """Whether it needs an event loop; if not, sync code steps it by hand."""
    changes_in_thread = False
    """Whether what it changes while it runs, it changes in a thread of its own."""
    only_reads = False
    """Whether it only reads, so that it need not wait for a call that has not changed anything."""
    joining: ToolCall | None = None
    """A call that may run concurrently: it joins the turn under way on its event loop, or begins
    one that others can join."""

    def start(self, place: TurnSlot | None = None) -> Coroutine[Any, Any, T]:
        """Return the work as a coroutine; ``place`` is that of a call that joins others."""
        raise NotImplementedError

    def run(self) -> T:
        """Run from sync code."""
        self.on_loop = self.needs_loop
        try:
            run: Any = partial(copy_context().run, step_by_hand)
            if self.on_loop:
                from weakincentives.core.loops import run_blocking as run
            gates = self.gates()
            if self.parent is not None and any(gate.is_on_this_loop for gate in gates):
                gates = ()  # nested: the call inside could not go on while this one waits
            try:
                return self._in_turn(gates, run)
            except TooLate:
                self.late = True
            except _KeptOut as gate_error:
                self.gate_error = gate_error.error
            return run(self.start)
        finally:
            if self.entered is not None:
                self.leave()
            self._publish()

    def _in_turn(self, gates: tuple[Gate, ...], run: Callable[..., T]) -> T:
        if not gates:
            return run(self.start)
        gate, others = gates[0], gates[1:]
        work = partial(self._in_turn, others, run) if others else partial(run, self.start)
        if gate.between is not None:
            work = partial(self._between, gate, gate.between, work)
        if gate.line or gate.lock.locked():
            self._note_wait(gate)
            try:
                with gate.turn(self.context.deadline), gate.lock:
                    return work()
            finally:
                self._note_wait(None)
        try:
            with gate.lock:
                return work()
        finally:
            if gate.line:
                gate.wake_next()

    def _note_wait(self, gate: Gate | None) -> None:
        """Note where a call waits that is made in another one's handler, or in a block by hand.

        What is inside may wait for an object that those have to themselves.
        """
        under = self.made_under
        if under is not None:
            under.waits_at = gate

    def _between(self, gate: Gate, lock: ProcessLock, work: Callable[[], T]) -> T:
        """Work while we hold the gate's lock between processes."""
        try:
            try:
                lock.take(self.context.deadline)
                gate.catch_up(lock)
            except (WinkError, OSError) as error:
                raise _KeptOut(error) from error
            return work()
        finally:
            lock.is_held = False
            lock.release()

    async def arun(self) -> T:
        """Run on the caller's event loop."""
        try:
            return await self._ain_turn()
        finally:
            if self.entered is not None:
                self.leave()
            self._publish()

    async def _ain_turn(self) -> T:
        import asyncio

        gates, call, deadline = self.gates(), self.joining, self.context.deadline
        held: list[Gate] = []
        leases: dict[Gate, Lease] = {}
        turn: JoinedTurn | None = None
        place: TurnSlot | None = None
        try:
            try:
                may_join = None if call is None else self._may_join
                for gate in gates:
                    waits = gate.locked()
                    may_pass = None
                    if gate.beside is not None and self.only_reads:
                        may_pass = partial(self._may_pass, gate, leases)
                    try:
                        if waits:
                            self._note_wait(gate)
                        is_inside = await gate.enter(deadline, may_join, may_pass)
                    except (WinkError, OSError) as error:
                        self.gate_error = error
                        break
                    finally:
                        if waits:
                            self._note_wait(None)
                    if is_inside:
                        held.append(gate)
                    elif gate not in leases:
                        turn = gate.joined
                        break
                    may_join = None  # only at the first gate: a turn holds all of them
                self.leases = leases
                if not self.changes_in_thread or turn is not None:
                    for gate in held:
                        gate.blocks = asyncio.get_running_loop()
                if call is not None and turn is not None:
                    place = turn.join(call.id, deadline)
                    self.leases = turn.leases
                elif self.gate_error is not None:
                    pass
                elif call is not None and gates and not self.resources.in_place:
                    reads = self.offers[call.name].tool.reach == "read"
                    if not reads:
                        await asyncio.sleep(0)  # those that are started together get in line
                    # A lone call that writes does so in place: programs it starts see its files.
                    if reads or gates[0].line:
                        place = first_place(reads=reads)
                        for gate in held:
                            gate.blocks = asyncio.get_running_loop()
                        turn = JoinedTurn(gates, place, call.id, leases)
                        held, leases = [], {}
            except TooLate:
                self.late = True
            # A task of its own, so that its context variables do not reach the caller.
            value, interrupt = await asyncio.create_task(self._shielded(place))
            if interrupt is not None:
                raise interrupt
            return cast("T", value)
        finally:
            for lease in leases.values():
                lease.end()
            for gate in reversed(held):
                gate.release()
            if turn is not None and place is not None:
                turn.leave(place)

    async def _shielded(self, place: TurnSlot | None) -> tuple[T | None, BaseException | None]:
        # As a value: an interrupt raised inside a task would end the whole loop.
        try:
            return await self.start(place), None
        except (KeyboardInterrupt, SystemExit) as interrupt:
            return None, interrupt

    def _may_join(self) -> bool:
        gates = self.gates()
        call, turn = cast("ToolCall", self.joining), cast("JoinedTurn | None", gates[0].joined)
        return (
            turn is not None
            and not self.resources.in_place
            and turn.admits(gates, call.id, reads=self.only_reads)
            and self.offers[call.name].may_join(DEFAULT_CONCURRENCY, self.context)
        )

    def _may_pass(self, gate: Gate, leases: dict[Gate, Lease]) -> bool:
        import asyncio

        if gate.beside is None or gate.blocks is asyncio.get_running_loop():
            return False
        lease = gate.beside()
        if lease is not None:
            leases[gate] = lease
        return lease is not None

    def gates(self) -> tuple[Gate, ...]:
        gate = self.session.gate
        if gate is None:
            # Nested: the call it belongs to holds the others.
            return () if self.parent is None else (self.parent.gate,)
        others = self.resources.gates
        if not others:
            return (gate,)
        outer = transaction_under_way.get()
        if outer is not None and not set(others).isdisjoint(outer.resource_context.gates):
            raise RuntimeError(
                "the call under way holds the workspace of this call: pass on its context, as in "
                "tool(params, context=context)"
            )
        return (gate, *others)

    def _publish(self) -> None:
        """Publish the records before the caller gets its answer: a saved session saves them now.

        The gates are free, so that subscribers may call tools themselves, unless other calls of a
        joined turn are under way: then a sync call from their event loop raises RuntimeError.
        """
        # Those of a nested call go out with its parent: if that is re-run, they never happened.
        parent, recorded = self.parent, self.recorded
        if parent is not None and parent.concurrent and parent.holds(recorded):
            return
        for each in recorded:
            if isinstance(each, ToolInvoked):
                self.session.dispatcher.publish(each)
            else:
                try:
                    each()
                except Exception:
                    _logger.exception("a step after the commit failed; the call stays committed")


class _OneCall(Submission[AnyResult]):
    """One call."""

    def __init__(
        self,
        call: ToolCall,
        offers: Offers,
        context: ToolContext,
        place: TurnSlot | None = None,
        once: bool = False,
        approval: Approval | None = None,
    ) -> None:
        if approval is not None:
            offers = _approvable(offers, call.name)
        super().__init__(context, offers)
        self.approval = approval
        self._call, self._place, self._once = call, place, once
        offer = offers.get(call.name)
        self.needs_loop = context.deadline is not None or (offer is not None and offer.needs_loop)
        if place is None and offer is not None and offer.may_run_concurrently:
            self.joining = call
        if offer is not None:
            self.only_reads = offer.tool.reach == "read"
            self.changes_in_thread = not (offer.tool.is_async or offer.tool.effects)

    def start(self, place: TurnSlot | None = None) -> Coroutine[Any, Any, AnyResult]:
        place = self._place or place
        if self._once:
            return self._start_once(place)
        return run_call(self, self._call, self.recorded, place)

    async def _start_once(self, place: TurnSlot | None) -> AnyResult:
        """Return the answer on record, or run the call: inside the gate, so that it runs once."""
        call, known = on_record(self._call, self.session, self.offers)
        return await run_call(self, call, self.recorded, place) if known is None else known


class _Together(Submission[list[AnyResult]]):
    """Concurrent calls of a turn."""

    def __init__(
        self, group: Group, max_concurrency: int, offers: Offers, context: ToolContext
    ) -> None:
        super().__init__(context, offers)
        self._group, self._max_concurrency = group, max_concurrency

    async def start(self, place: TurnSlot | None = None) -> list[AnyResult]:
        """Run the calls. Their records come in call order."""
        records: list[list[Recorded]] = [[] for _ in self._group]
        starts = [
            (number, partial(run_call, self, call, recorded))
            for (number, call), recorded in zip(self._group, records, strict=True)
        ]
        try:
            return await run_together(starts, self._max_concurrency)
        finally:
            self.recorded += (event for each in records for event in each)


def _approvable(offers: Offers, name: str) -> Offers:
    """Return the tools with a policy that notes the answer of a person whom no other one asks."""
    from weakincentives.prompt.approval import ApprovalPolicy

    offer = offers.get(name)
    if offer is None or any(policy.asks_a_person for policy in offer.policies):
        return offers
    asked = OfferedTool.of(offer.tool, (*offer.rules, *attach([ApprovalPolicy()])), offer.listeners)
    return {**offers, name: asked}


def step_by_hand(start: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run a coroutine in which nothing waits: its first step is also its last."""
    try:
        # In one expression: an interrupt must not find a coroutine that was never started.
        start(*args).send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a sync call waited for something; this is a bug in the runtime")


# Contexts


def context_of(session: Session | None, prompt: Prompt[Any] | None) -> ToolContext:
    if session is None:
        raise TypeError("execute_tool needs context=... or session=...")
    rendered = None
    if prompt is not None:
        check_prompt(prompt)
    else:
        prompt, rendered = session.prompt, session.rendered
    if prompt is None:
        raise WinkError(
            "no prompt was rendered for this session: pass prompt=..., or render one with "
            "prompt.render(session)"
        )
    return ToolContext(
        session=session,
        prompt=prompt,
        rendered_prompt=rendered,
        resources=prompt.resources,
        signal=_NEVER_CANCELLED,
    )


def _context_under_way() -> ToolContext:
    under_way: Transaction | None = transaction_under_way.get()
    if under_way is None:
        return ToolContext(session=Session())
    parent = under_way.open()
    # The policies, limits and ids of the call under way hold for the calls it makes.
    return parent.context.having(
        session=parent.session, resources=CallResources(parent), call_id=parent.call.id
    )


def _call_of(tool: Tool[Any, Any], params: object, context: ToolContext | None) -> _OneCall:
    """Return a call of a tool: as the context offers it, or without policies if it does not."""
    context = context or _context_under_way()
    offers = context.offers
    offered = offers.get(tool.name)
    if offered is None or offered.tool is not tool:
        offers = {tool.name: OfferedTool.of(tool)}
    return _OneCall(ToolCall(tool.name, params), offers, context)
