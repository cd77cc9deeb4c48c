"""Calls that another program runs, or asks a person about: admission, denials, open-ended calls.

For frameworks that keep their own loop. Everything goes through the pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from weakincentives.core.call import ToolCall, transaction_under_way
from weakincentives.errors import ApprovalNeeded, PolicyDenied, Refusal, WinkError
from weakincentives.prompt.prompt import OfferedTool, RenderedPrompt
from weakincentives.prompt.refusals import by_person
from weakincentives.runtime.answers import on_record, raises_through
from weakincentives.runtime.pipeline import admit as admitted
from weakincentives.runtime.pipeline import end, undo
from weakincentives.runtime.tool_call import Submission, aexecute_tool
from weakincentives.runtime.transactions import Transaction, TurnSlot
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.prompt.approval import Approval, ApprovalRequest
    from weakincentives.prompt.tool import ToolContext

AnyResult = ToolResult[Any]


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a call may run."""

    state: Literal["refused", "needs_approval", "ready"]
    result: AnyResult | None = None
    """The answer to a refused call. It is on record."""
    request: ApprovalRequest | None = None
    """What to ask a person. Their answer goes into ``execute(..., approval=...)``."""


def admit(
    call: ToolCall,
    context: ToolContext,
    *,
    once: bool = False,
    approval: Approval | None = None,
) -> Admission:
    """Check whether a call may run, and run nothing; executing it checks again.

    A person is asked last: when all other policies allow the call. With ``once``, a call that is on
    record is ready: its answer is there. An ``approval`` counts for the call as well.
    """
    return _Admitting(call, context, once, approval).run()


async def aadmit(
    call: ToolCall,
    context: ToolContext,
    *,
    once: bool = False,
    approval: Approval | None = None,
) -> Admission:
    """Check on the caller's event loop whether a call may run."""
    return await _Admitting(call, context, once, approval).arun()


def refuse(call: ToolCall, context: ToolContext, reason: str, *, by: str = "") -> AnyResult:
    """Record that a call was denied elsewhere, and return the answer for the model."""
    return _Denying(call, context, reason, by).run()


async def arefuse(call: ToolCall, context: ToolContext, reason: str, *, by: str = "") -> AnyResult:
    """Record on the caller's event loop that a call was denied elsewhere."""
    return await _Denying(call, context, reason, by).arun()


class _Admitting(Submission[Admission]):
    def __init__(
        self, call: ToolCall, context: ToolContext, once: bool, approval: Approval | None
    ) -> None:
        super().__init__(context, context.offers)
        self.approval = approval
        self._call, self._once = call, once

    async def start(self, place: TurnSlot | None = None) -> Admission:
        call, known = self._call, None
        if self._once:
            call, known = on_record(call, self.session, self.offers)
        if known is not None:
            return Admission("ready")
        try:
            result = await _checked(self, call, admitted)
        except ApprovalNeeded as needed:
            return Admission("needs_approval", request=needed.request)
        return Admission("ready") if result is None else Admission("refused", result)


class _Denying(Submission[AnyResult]):
    def __init__(self, call: ToolCall, context: ToolContext, reason: str, by: str) -> None:
        super().__init__(context, context.offers)
        self._call, self._reason, self._by = call, reason, by

    async def start(self, place: TurnSlot | None = None) -> AnyResult:
        call, by = self._call, self._by
        record = self.session.record_of(call.id)
        if record is not None and (record.suspended or record.denied_by):
            # The framework may know the tool by another name, or its arguments without the
            # defaults.
            call = ToolCall(record.tool_name, record.params, call.id)
        call, known = on_record(call, self.session, self.offers)
        if known is not None:
            return known  # a framework that resumes reports the denial again

        async def deny(transaction: Transaction) -> None:
            offer = self.offers.get(call.name)
            if offer is not None:
                transaction.asked.tool = offer.tool
                with suppress(Refusal):  # then the record has what the model sent
                    transaction.asked.params = offer.tool.parse(call.params)
            raise PolicyDenied(by_person(call.name, by, self._reason), policy=by or "approval")

        result = await _checked(self, call, deny)
        assert result is not None
        return result


async def _checked(
    work: Submission[Any],
    call: ToolCall,
    check: Callable[[Transaction], Coroutine[Any, Any, object]],
) -> AnyResult | None:
    """Return the recorded refusal of a call, or None if the check lets it pass: then nothing is."""
    transaction = Transaction(work, call, work.recorded)
    transaction_under_way.set(transaction)
    try:
        await check(transaction)
        if transaction.is_open and work.approval is None:
            transaction.forget()  # a policy opened it, and will be asked again
        elif transaction.is_open:
            transaction.undo()
            transaction.roll_back(None)  # the answer is logged: it counts for the call
        transaction.settled = True
    except BaseException as error:
        await undo(transaction, error)
        if raises_through(error):
            raise
    finally:
        end(transaction)
    return None if transaction.event is None else transaction.event.result


class OpenCall:
    """A call whose work is done by its caller, in a ``with`` or ``async with`` block.

    >>> with registry.begin("bash", {"command": "make"}) as call:  # doctest: +SKIP
    ...     if call.result is None:
    ...         call.ok(run(call.params["command"]))

    It is admitted when the block begins; a refused call, or one that is on record, has its
    ``result`` at once, and nothing must be done. ``ok`` and ``fail`` say how it went. The call is
    committed or rolled back when the block ends; it is aborted if neither was said. For hooks
    that cannot share a block there are ``start`` and ``end``.
    """

    def __init__(
        self,
        call: ToolCall,
        context: ToolContext,
        *,
        once: bool = False,
        approval: Approval | None = None,
    ) -> None:
        self.result: AnyResult | None = None
        """How the call ended; None while it is under way."""
        self.params: Any = None
        """The parsed arguments; a person may have edited them."""
        self.context: ToolContext | None = None
        """Bound to the call: pass it to calls that belong to this one."""
        self._session = context.session
        context = context.having(rendered_prompt=self._run_here(call.name, context))
        self._execute = partial(aexecute_tool, call, context=context, once=once, approval=approval)
        self._task: asyncio.Task[AnyResult] | None = None

    def _run_here(self, name: str, context: ToolContext) -> RenderedPrompt:
        """Return what a context offers, with the work of one tool done by the caller."""
        rendered = context.rendering or RenderedPrompt("", ())
        offer = rendered.offers.get(name)
        if offer is None:
            return rendered  # the call is refused
        # A retry, or the re-run of a call that joins others, would wait for work that is not done
        # again.
        tool = offer.tool.replace(
            handler=self._work, checked=False, result_type=Any, retry=None, concurrent=False
        )
        hosted = OfferedTool.of(tool, offer.rules, offer.listeners)
        return replace(rendered, offers={**rendered.offers, name: hosted})

    async def start(self) -> OpenCall:
        """Wait until the call is admitted; a suspended one raises, such as ``ApprovalNeeded``."""
        if self._task is not None:
            raise WinkError("this call has begun already: begin another")
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[AnyResult] = self._loop.create_future()
        self._admitted: asyncio.Future[None] = self._loop.create_future()
        self._task = self._loop.create_task(self._execute())
        try:
            await asyncio.wait((self._task, self._admitted), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # cancelled while another call is under way
            self._task.cancel()
            raise
        if self._task.done():
            self.result = self._task.result()
        return self

    async def _work(self, params: Any, *, context: ToolContext) -> AnyResult:
        self.params, self.context = params, context
        self._admitted.set_result(None)
        return await self._answer

    def ok(self, value: object = None, message: str = "") -> None:
        """Say that the work is done; what was said first counts."""
        self._say(lambda: self._answer.set_result(ToolResult.ok(value, message)))

    def fail(self, error: str | Exception) -> None:
        """Say that the work failed: with a message, nothing took effect; with an error, it may."""
        if isinstance(error, Exception):
            self._say(lambda: self._answer.set_exception(error))
        else:
            self._say(lambda: self._answer.set_result(ToolResult.error(error)))

    def _say(self, answer: Callable[[], object]) -> None:
        # Perhaps from another thread.
        self._loop.call_soon_threadsafe(lambda: self._answer.done() or answer())

    async def end(self, error: BaseException | None = None) -> AnyResult:
        """Commit the call, or roll it back, and return its result.

        Without an answer it is aborted, because of ``error`` if one is given.
        """
        if self._task is None:
            raise WinkError("this call has not begun")
        if isinstance(error, Exception):
            self._say(lambda: self._answer.set_exception(error))
        else:
            self._say(self._answer.cancel)
        while not self._task.done():
            try:
                await asyncio.wait((self._task,))
            except asyncio.CancelledError:  # its rollback is waited for
                self._say(self._answer.cancel)
        if self.context is None:
            return self._task.result()  # refused, or on record
        record = self._session.record_of(self.context.call_id)
        assert record is not None
        self.result = record.result
        return self.result

    async def __aenter__(self) -> OpenCall:
        return await self.start()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.end(exc)

    def __enter__(self) -> OpenCall:
        from weakincentives.core.loops import run_blocking

        return run_blocking(self.start)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self.end(exc), self._loop).result()
