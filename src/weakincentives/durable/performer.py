"""Performs the steps of a run on its open session, each as often as an engine likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from weakincentives.core.call import ToolCall
from weakincentives.core.logs import get_logger
from weakincentives.durable.steps import (
    Call,
    CallResult,
    Ended,
    Finish,
    FinishResult,
    LocalJournal,
    Step,
    StepResult,
    Turn,
    TurnResult,
    WholeRun,
    drive,
    result_of_end,
)
from weakincentives.errors import (
    ApprovalNeeded,
    DatabaseUnavailable,
    LeaseLost,
    PromptEvaluationError,
    SessionInUse,
    StorageUnavailable,
    WinkError,
    WorkspaceLocked,
)
from weakincentives.runtime.conversation import Message, ModelTurn, PromptResponse
from weakincentives.runtime.run import Run, RunOptions
from weakincentives.runtime.tool_call import step_by_hand
from weakincentives.session.events import PromptExecuted
from weakincentives.session.session import Session

if TYPE_CHECKING:
    from weakincentives.adapters.base import Adapter
    from weakincentives.core.media import Content
    from weakincentives.prompt.approval import Approval, ApprovalRequest
    from weakincentives.prompt.prompt import Prompt

_logger = get_logger(__name__)

NOT_OF_THE_RUN = (
    DatabaseUnavailable,
    LeaseLost,
    SessionInUse,
    StorageUnavailable,
    WorkspaceLocked,
)
"""Errors that say nothing about a run: it continues elsewhere, or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run works with, once its session and its files are open."""

    adapter: Adapter
    prompt: Prompt[Any]
    options: RunOptions = field(default_factory=RunOptions)
    message: Content | None = None
    """The first message: by default the task of the run. If it is empty, the prompt says it all."""


class Approvals(Protocol):
    """Where requests for approval are stored, and answered later."""

    def ask(self, request: ApprovalRequest) -> str:
        """Store a request, and return the id that its answer will be known by."""
        ...

    def answered(self, request: ApprovalRequest) -> Approval | None: ...


class SessionSteps:
    """Performs steps with a session that is open in this process.

    Every step looks into the session first: a turn that is there is not taken again, a call on
    record is not made again. When a step returns, ``save`` has made everything durable.

    Args:
        message: The first message, unless ``prepared`` has another one.
        save: Makes the session durable, or raises.
        approvals: Without it, a call that needs a person fails the run.
        finish: Called at the end of a sitting; returns what the model must be told before the run
            can end, if anything.
        check: Called before each step; returns how the run has ended meanwhile, if it has.
    """

    def __init__(
        self,
        prepared: Prepared,
        session: Session,
        *,
        message: Content | None = None,
        save: Callable[[], object],
        approvals: Approvals | None = None,
        finish: Callable[[Finish, str], str] | None = None,
        check: Callable[[], Ended | None] | None = None,
    ) -> None:
        self._prepared = prepared
        self._session = session
        self._message = message if prepared.message is None else prepared.message
        self._save = save
        self._approvals = approvals
        self._finish = finish
        self._check = check
        self._run: Run | None = None
        self._known: dict[str, ToolCall] = {}

    def perform(self, step: Step) -> StepResult:
        """Perform a step; a failure of the run is a result."""
        if isinstance(step, Finish):
            return self._finished(step)
        if isinstance(step, WholeRun):
            return FinishResult(step_by_hand(drive, step.run, LocalJournal(self)))
        ended = None if self._check is None else self._check()
        if ended:
            return result_of_end(step, ended)
        try:
            return self._turn(step) if isinstance(step, Turn) else self._call(step)
        except Exception as error:
            return result_of_end(step, "failed", self._failed(error))

    def close(self) -> None:
        """Let go of the session and the model, without a record of an end."""
        run, self._run = self._run, None
        if run is not None:
            step_by_hand(run.end, None)

    # Turns

    def _turn(self, step: Turn) -> TurnResult:
        run = self._open()
        taken = sum(each.role == "model" for each in run.messages)
        n = step.n or max(taken, 1)
        if n > taken + 1:
            raise WinkError(f"turn {n} follows turn {taken + 1}, which is not in the session")
        if n > taken:
            run.add_answers()
            turn = step_by_hand(run.take_turn)
            is_last = True
        else:
            turn, is_last = _turn_on_record(run, n)
        if turn.tool_calls:
            self._save()
            return TurnResult(n, tuple((each.id, each.name) for each in turn.tool_calls))
        response = run.conclude(turn) if is_last else None
        if response is not None:
            self._end(response)
        self._save()
        return TurnResult(n, ended=None if response is None else "done")

    def _open(self) -> Run:
        """Return the run, with the conversation as the session has it."""
        if self._run is None:
            prepared = self._prepared
            model = prepared.adapter.begin_run()
            run = Run(model, prepared.prompt, self._session, **prepared.options)
            run.blocks = True
            run.begin(counts=True)
            self._run = run
        if not self._run.messages:
            self._run.say(self._message)
        return self._run

    def _end(self, outcome: PromptResponse[Any] | Exception) -> None:
        """Record the end of the run, unless a step that was cut short has."""
        run, self._run = self._run, None
        if run is None:
            return
        last = self._session[PromptExecuted].latest()
        is_known = (
            isinstance(outcome, PromptResponse)
            and last is not None
            and outcome.usage == last.usage
            and outcome.usage.total_tokens > 0
            and outcome.stop_reason == last.stop_reason
        )
        step_by_hand(run.end, None if is_known else outcome)

    def _failed(self, error: Exception) -> str:
        """Record a failure of the run and return it in words; raise what is not one of the run.

        The session may not be ours any more, or the database out of reach: the
        process that continues the run finds it as it was.
        """
        if isinstance(error, NOT_OF_THE_RUN):
            raise error
        if not isinstance(error, WinkError):
            _logger.exception("a step failed")
        self._save()
        self._end(error)
        self._save()
        return in_words(error)

    # Calls

    def _call(self, step: Call) -> CallResult:
        run = self._open()
        call = self._call_of(run, step)
        result = self._made(run, call)
        self._save()
        if isinstance(result, str):
            return CallResult(success=False, waits_for=result)
        return CallResult(success=result)

    def _call_of(self, run: Run, step: Call) -> ToolCall:
        for message in reversed(run.messages):
            for call in message.tool_calls:
                if call.id == step.call_id:
                    if step.params is None:
                        return call
                    return ToolCall(step.name, dict(step.params), step.call_id)
        raise WinkError(f"call {step.call_id} of {step.name} is not in the session")

    def _made(self, run: Run, call: ToolCall) -> bool | str:
        """Make a call; returns whether it succeeded, or the id of the approval that it needs."""
        approval = None
        while True:
            try:
                return step_by_hand(run.make_call, call, approval).success
            except ApprovalNeeded as needed:
                request, desk = needed.request, self._approvals
                if desk is None:
                    raise PromptEvaluationError(f"nobody can be asked: {request}") from needed
                approval = desk.answered(request)
                if approval is None:
                    waits_for = desk.ask(request)
                    approval = desk.answered(request)  # meanwhile
                    if approval is None:
                        return waits_for

    # The end of a sitting

    def _finished(self, step: Finish) -> FinishResult:
        told = ""
        if self._finish is not None:
            answer = last_answer(self._session) if step.status == "done" else step.detail
            told = self._finish(step, answer)
        if told:
            run = self._open()
            run.say(told)
            self._save()
            return FinishResult(step.status, goes_on=True)
        self.close()
        return FinishResult(step.status)


def in_words(error: Exception) -> str:
    return str(error) if isinstance(error, WinkError) else f"{type(error).__name__}: {error}"


def _turn_on_record(run: Run, n: int) -> tuple[ModelTurn, bool]:
    """Return a turn as the session has it, and whether nothing follows it."""
    places = [place for place, each in enumerate(run.messages) if each.role == "model"]
    message = run.messages[places[n - 1]]
    turn = ModelTurn(
        text=message.text,
        tool_calls=message.tool_calls,
        stop_reason="tool_use" if message.tool_calls else "end_turn",
        wire=message.wire,
        media=message.media,
    )
    return turn, places[n - 1] == len(run.messages) - 1


def last_answer(session: Session) -> str:
    """Return the text of the model's last message."""
    for message in session[Message].newest_first():
        if message.role == "model" and not message.depth:
            return message.text
    return ""
