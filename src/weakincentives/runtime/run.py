"""One run: ask the model, run the calls of its turn through the pipeline, until it is done.

The loop is written once, as a coroutine. Sync code steps it in the caller's thread: only the
request to the model uses an event loop, and handlers run in the caller's thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from weakincentives.core.budget import NO_TOKENS, Budget, BudgetTracker, TokenPrice, TokenUsage
from weakincentives.core.call import (
    RunContext,
    ToolCall,
    current_view,
    new_call_id,
    transaction_under_way,
)
from weakincentives.core.deadlines import Deadline, Heartbeat, check_deadline
from weakincentives.core.logs import get_logger
from weakincentives.core.media import Content, split_content
from weakincentives.errors import (
    CallLimitExceeded,
    ContextOverflow,
    DeadlineExceededError,
    OutputParseError,
    PromptEvaluationError,
    ProviderError,
    ProviderRejected,
    TaskNotCompleted,
    TurnLimitExceeded,
    VisibilityExpansionRequired,
)
from weakincentives.prompt.completion import TaskCompletionChecker, check_completion
from weakincentives.prompt.feedback import Feedback, FeedbackProvider, collect_feedback
from weakincentives.prompt.prompt import Prompt, RenderedPrompt, check_prompt
from weakincentives.prompt.section import expand
from weakincentives.prompt.structured_output import (
    PartialAnswer,
    output_schema,
    parse_structured_output,
    requested_type,
    validated,
)
from weakincentives.prompt.tool import DEFAULT_MAX_RESULT_CHARS, Tool, ToolContext
from weakincentives.retry import RetryPolicies, RetryPolicy
from weakincentives.runtime.conversation import (
    ContextCompacted,
    Message,
    MessageReceived,
    ModelRequest,
    ModelTurn,
    PartialOutput,
    PromptResponse,
    Retrying,
    RunEnded,
    RunEvent,
    SentBack,
    TextDelta,
    ToolCommitted,
    ToolProgress,
    ToolRefused,
    ToolRolledBack,
    ToolStarted,
    TurnEnded,
    TurnStarted,
    last_conversation,
)
from weakincentives.runtime.tool_call import (
    aexecute_tool,
    aexecute_tools,
    execute_tool,
    execute_tools,
    step_by_hand,
)
from weakincentives.runtime.window import (
    SUMMARY_INSTRUCTIONS,
    ContextPolicy,
    ShortenAndSummarize,
    ShownConversation,
    outline,
    read_result_tool,
    transcript,
)
from weakincentives.session import events
from weakincentives.session.events import PromptExecuted, ToolInvoked
from weakincentives.session.session import Session
from weakincentives.tool_result import ToolError, ToolResult, shortened

if TYPE_CHECKING:
    from typing import Unpack

    from weakincentives.prompt.approval import Approval
    from weakincentives.runtime.inbox import Inbox

T = TypeVar("T")

_logger = get_logger(__name__)

BEGIN = "Begin."
"""The user's message by default: the prompt says what to do."""

_CANCELLED = "The turn was interrupted before this call ran: it has changed nothing"
_NOT_DONE = "The task is not done yet. "
_TOO_MANY_CALLS = "The model asked for more than {} tool calls, all that the run allows"
_OPENED = ToolResult[Any].ok(None, "Opened. The prompt shows it in full now.")
_MAX_SENT_BACK = 3
"""How often in a row a model that stops too early is sent back."""

_MAX_OVERFLOWS = 2
"""How often a request that the provider rejects as too long is shortened and sent again."""


requests_refused = False
"""Whether requests to real models are refused, as in tests: see ``testing.no_model_requests``."""


class Model(Protocol):
    """The part of an adapter that a run uses."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> str:
        """The provider's name for the model; empty if the provider chooses."""
        ...

    @property
    def needs_loop(self) -> bool:
        """Whether ``complete`` needs an event loop."""
        ...

    @property
    def provider_tools(self) -> Sequence[Tool[Any, Any]]: ...

    @property
    def asks_provider(self) -> bool:
        """Whether ``complete`` asks a real model."""
        ...

    @property
    def manages_context(self) -> bool:
        """Whether the provider shortens a long conversation itself."""
        ...

    async def complete(self, request: ModelRequest) -> ModelTurn: ...

    async def context_window(self) -> int | None: ...

    def price(self) -> TokenPrice | None: ...

    async def end_run(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The limits of a run, and its feedback and completion checks."""

    max_turns: int | None = 100
    max_tool_calls: int | None = None
    time_limit: float | None = None
    """Seconds; a deadline passed with the run takes precedence."""
    budget: Budget | None = None
    """Tokens and money; a budget passed with the run takes precedence."""
    context: ContextPolicy | None = field(default_factory=ShortenAndSummarize)
    """What the model still sees as its context window fills; None sends everything."""
    context_window: int | None = None
    """Tokens. Default: as the provider says, or as it rejects."""
    feedback: Sequence[FeedbackProvider] = ()
    completion: TaskCompletionChecker | None = None
    """Checked when the model stops: it is sent back with the reason until the task is done."""
    retry: RetryPolicy = field(default=RetryPolicies.STANDARD)
    """For requests to the provider; tools have their own."""
    output_retries: int = 2
    """How often in a row an answer that does not match the output type is sent back."""
    max_concurrency: int | None = None
    """How many calls of one turn run concurrently."""
    tool_config: Mapping[str, object] = field(default_factory=dict[str, object])
    """For tools, as ``context.config``."""
    tools: Collection[str] | Callable[[Tool[Any, Any]], bool] | None = None
    """The tools that the run offers, by name or by a function; by default all of the prompt."""
    debug: bool = False
    """Whether a handler's exception ends the run and is raised, once the call is undone."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.startswith(("max_", "context_")) and value is not None and value < 1:
                raise ValueError(f"{each.name} must be at least 1, got {value}")
        if self.time_limit is not None and not self.time_limit > 0:
            raise ValueError(f"time_limit must be positive, got {self.time_limit}")
        if self.output_retries < 0:
            raise ValueError(f"output_retries must not be negative, got {self.output_retries}")


_DEFAULTS = RunConfig()


class RunOptions(TypedDict, total=False):
    """The options of a run."""

    config: RunConfig
    deadline: Deadline | None
    """When the run must have ended; raises DeadlineExceededError."""
    budget: Budget | BudgetTracker | None
    """The tokens and the money it may use; raises BudgetExceededError."""
    on_event: Callable[[RunEvent], object] | None
    """Called with text, turns and calls as they happen."""
    run_context: RunContext | None
    """Ids of the run, for tools and records; missing ones are generated."""
    heartbeat: Heartbeat | None
    """Beats with every turn and call."""
    resume: bool | None
    """Whether to continue a conversation of the session: open calls are answered first, recorded
    calls do not run again. None, the default: the last one of this prompt, if there is one, except
    inside a call of a tool; otherwise a conversation begins. True: the last one, whatever its
    prompt; raises PromptEvaluationError if there is none. False: a conversation begins."""
    cancel_open_calls: bool
    """Answer the open calls of an interrupted turn that have no record without running them."""
    inbox: Inbox | None
    """Messages to the run while it is in progress, as from another process."""


_in_use: dict[tuple[int, str], Run] = {}
"""The runs of this process, by the id of the session object and the conversation."""


def _nothing() -> None:
    pass


def _opens_sections(result: ToolResult[Any]) -> bool:
    return result.failure is not None and result.failure.code == "VISIBILITY_EXPANSION"


class Run:
    """A conversation of one model with one session, from its first turn to its end."""

    def __init__(
        self, model: Model, prompt: Prompt[Any], session: Session, **options: Unpack[RunOptions]
    ) -> None:
        self._model = model
        self._prompt = prompt
        self._session = session
        self._config = config = options.get("config", _DEFAULTS)
        self._on_event = options.get("on_event")
        self._resume = options.get("resume")
        self._cancels = options.get("cancel_open_calls", False)
        self._given_inbox, self._inbox = options.get("inbox"), None
        self._clock = session.clock
        check_prompt(prompt)
        deadline, budget = options.get("deadline"), options.get("budget") or config.budget
        check_deadline(deadline)
        if deadline is None and config.time_limit is not None:
            deadline = Deadline.after(config.time_limit, clock=self._clock)
        tracker = BudgetTracker(budget) if isinstance(budget, Budget) else budget
        self._tracker_is_given = isinstance(budget, BudgetTracker)
        """Then it has what was spent before, as far as that is to count."""
        self._price = None
        if tracker is not None:
            self._price = tracker.budget.priced(model.price(), self._model_name)
        run_id = uuid.uuid4().hex
        ids = options.get("run_context") or RunContext(run_id=run_id)
        self._trace_is_given = bool(ids.trace_id)
        self._context = ToolContext(
            session=session,
            prompt=prompt,
            adapter=model,
            deadline=deadline,
            budget_tracker=tracker,
            run_context=ids.filled(
                run_id=run_id,
                loop_id=ids.run_id or run_id,
                agent_id=prompt.template.name,
                trace_id=run_id,
            ),
            heartbeat=options.get("heartbeat"),
            config=config.tool_config,
            debug=config.debug,
            on_report=self._report,
        )
        self._output_type: Any = prompt.template.output_type
        if self._output_type is not None:
            output_schema(self._output_type)  # refuse an unsupported type now
        self._requested_type = requested_type(self._output_type)
        self._partial = (
            None if self._requested_type is None else PartialAnswer(self._requested_type)
        )
        self._rendered: RenderedPrompt | None = None
        self._filtered: tuple[RenderedPrompt, RenderedPrompt] | None = None
        """A rendering, and the same with the tools that the run offers."""
        self._messages: list[Message] = []
        self._shown = ShownConversation()
        self._conversation = ""
        self._depth = current_view(session).depth
        self._usage = NO_TOKENS
        self._turns = 0
        self._calls = 0
        self._mismatches = 0
        """How many answers in a row did not match the output type."""
        self._early_stops = 0
        """How often in a row the model stopped before the task was done."""
        self._in_progress: dict[str, ToolCall] = {}
        self._ids: set[str] = set()
        """The ids of all calls in the session's messages, including those of other runs."""
        self._scanned = 0
        """How many messages have been scanned for ids."""
        self._offers_rest = False
        """Whether the model is offered the tool that reads the rest of a shortened result."""
        self._asked_for_window = False
        self._started = self._clock.time()
        self._stop_listening: Callable[[], None] = _nothing
        self.blocks = False
        """Whether its coroutines end at once, because what they wait for blocks the thread."""

    def evaluate(self, message: Content | None = None) -> PromptResponse[Any]:
        """Run to the end, in the caller's thread."""
        self.blocks = True
        return step_by_hand(self._traced, message)

    async def aevaluate(self, message: Content | None = None) -> PromptResponse[Any]:
        """Run to the end, on the caller's event loop."""
        return await self._traced(message)

    def step(
        self, tool_results: Sequence[ToolResult[Any]] | None, message: Content | None
    ) -> PromptResponse[Any]:
        """Take one turn, in the caller's thread."""
        self.blocks = True
        return step_by_hand(self.astep, tool_results, message)

    async def astep(
        self, tool_results: Sequence[ToolResult[Any]] | None, message: Content | None
    ) -> PromptResponse[Any]:
        """Take one turn, on the caller's event loop."""
        try:
            if tool_results is None:
                self._begin_conversation(message)
            else:
                self._resume = True
                self._load_conversation()
                self._render()  # a tool's own limit for its results is in it
                self._add_results(tool_results)
                self._add_user_message(message)
            turn = await self._turn()
        finally:
            _in_use.pop((id(self._session), self._conversation), None)
            await self._wait_for(self._model.end_run, self._model.needs_loop)
        output = None
        if not turn.tool_calls and self._output_type is not None:
            output = self._output_of(turn)
        return self._response(turn.text, turn, output)

    # The loop

    def _traced(self, message: Content | None) -> Coroutine[Any, Any, PromptResponse[Any]]:
        telemetry = events.telemetry
        if telemetry is None:
            return self._run(message)
        return telemetry.run(self._context, self._run, message)

    async def _run(self, message: Content | None) -> PromptResponse[Any]:
        try:
            if self.begin():
                await self._answer_open_calls()
                self._receive()
            self.say(message)
            response = None
            while response is None:
                turn = await self.take_turn()
                if turn.tool_calls:
                    await self._answer(turn.tool_calls)
                else:
                    response = self.conclude(turn)
        except BaseException as error:
            await self.end(error)
            raise
        await self.end(response)
        return response

    # Its parts, for those who drive it from outside, such as a durable engine

    def begin(self, *, counts: bool = False) -> bool:
        """Load the conversation to continue, and tell whether there is one; ``end`` must follow.

        With ``counts``, its turns, calls and tokens count towards the limits of this run.
        """
        self._started = self._clock.time()
        telemetry = events.telemetry
        if telemetry is not None and not self._trace_is_given and (found := telemetry.trace_id()):
            ids = self._context.run_context or RunContext()
            self._context = self._context.having(run_context=replace(ids, trace_id=found))
        self._stop_listening = self._listen()
        if self._given_inbox is not None:
            self._given_inbox.open()
            self._inbox = self._given_inbox
        found = self._load_conversation()
        if found and counts:
            self._count()
        return found

    def say(self, message: Content | None) -> None:
        """Add a message of the user, which may begin the conversation; None if it can go on."""
        if self._messages:
            self._add_user_message(message)
        else:
            self._begin_conversation(message)

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return self._messages

    async def take_turn(self) -> ModelTurn:
        """Ask the model once; ``conclude`` must follow if it makes no calls."""
        self._receive()
        return await self._turn()

    async def make_call(self, call: ToolCall, approval: Approval | None = None) -> ToolResult[Any]:
        """Make a call of the last turn, unless it is on record; ``add_answers`` tells the model."""
        known = self._on_record([call]).get(call.id)
        if known is not None:
            return known
        most = self._config.max_tool_calls
        if most is not None and self._calls >= most:
            raise CallLimitExceeded(_TOO_MANY_CALLS.format(most))
        self._render()
        self._in_progress = {call.id: call}
        self._emit(ToolStarted, call)
        run = execute_tool if self.blocks else aexecute_tool
        try:
            answer = run(call, context=self._context, approval=approval)
            result = answer if isinstance(answer, ToolResult) else await answer
        except VisibilityExpansionRequired as request:
            (result,) = self._expanded([call], request)
        self._calls += 1
        return result

    def add_answers(self) -> None:
        """Add the answers to the calls of the last turn, all of which have ended."""
        calls = self._open_calls()
        if calls:
            self._render()  # a tool's own limit for its results is in it
            on_record = self._on_record(calls)
            results = [on_record[call.id] for call in calls]
            self._add_all(calls, [_OPENED if _opens_sections(e) else e for e in results])

    def conclude(self, turn: ModelTurn) -> PromptResponse[Any] | None:
        """Return the response if a turn without calls is the last; else the model was told why."""
        response = None if self._receive() else self._finished(turn)
        if self._inbox is None or response is None:
            return response
        return response if self._inbox.close(if_empty=True) else None

    async def end(self, outcome: PromptResponse[Any] | BaseException | None) -> None:
        """Record how the run ended, and let go of the session and the model."""
        reason = "interrupted"
        if isinstance(outcome, PromptResponse):
            reason = outcome.stop_reason
        elif isinstance(outcome, Exception):
            reason = type(outcome).__name__
            if isinstance(outcome, PromptEvaluationError):
                text = self._messages[-1].text if self._messages else ""
                outcome.response = self._response(text)
        _in_use.pop((id(self._session), self._conversation), None)
        if self._inbox is not None:
            self._inbox.close()
        self._stop_listening()
        try:
            if outcome is not None:
                self._log(
                    PromptExecuted(
                        prompt_ns=self._prompt.ns,
                        prompt_key=self._prompt.key,
                        adapter=self._model.name,
                        stop_reason=reason,
                        timestamp=self._started,
                        duration=self._clock.time() - self._started,
                        usage=self._usage,
                    )
                )
        finally:  # even if a reducer fails on the record, no program may be left running
            await self._wait_for(self._model.end_run, self._model.needs_loop)
        if isinstance(outcome, PromptResponse):
            self._emit(RunEnded, outcome)

    def _log(self, event: object) -> None:
        self._session.dispatch(event)
        self._session.dispatcher.publish(event)

    def _response(
        self, text: str, turn: ModelTurn | None = None, output: object = None
    ) -> PromptResponse[Any]:
        return PromptResponse(
            text=text,
            media=() if turn is None else turn.media,
            output=output,
            usage=self._usage,
            stop_reason="end_turn" if turn is None else turn.stop_reason,
            tool_calls=() if turn is None else turn.tool_calls,
            turns=self._turns,
            calls=self._calls,
        )

    def _finished(self, turn: ModelTurn) -> PromptResponse[Any] | None:
        """Return the answer, or None if the model was sent back."""
        if turn.stop_reason == "refusal":
            return self._response(turn.text, turn)  # sent back, it would refuse again
        checker = self._config.completion
        if checker is not None:
            found = check_completion(checker, self._context)
            if not found.done:
                self._early_stops += 1
                if self._early_stops > _MAX_SENT_BACK:
                    raise TaskNotCompleted(f"The model stopped before it was done: {found.reason}")
                self._send_back(f"{_NOT_DONE}{found.reason}")
                return None
        if self._output_type is None:
            return self._response(turn.text, turn)
        try:
            output = self._output_of(turn)
        except OutputParseError as error:
            self._mismatches += 1
            if self._mismatches > self._config.output_retries:
                raise
            self._send_back(str(error))
            return None
        return self._response(turn.text, turn, output)

    def _output_of(self, turn: ModelTurn) -> Any:
        """Return an answer as the output type; raises OutputParseError."""
        output = parse_structured_output(turn.text, self._output_type)
        return validated(output, self._prompt.template.output_validators, turn.text)

    def _send_back(self, reason: str) -> None:
        self._add_message(role="user", text=reason)
        self._emit(SentBack, reason)

    # The conversation

    def _begin_conversation(self, message: Content | None) -> None:
        self._conversation = uuid.uuid4().hex
        _in_use[id(self._session), self._conversation] = self
        self._say(message or BEGIN, is_first=True, prompt=self._prompt_name)

    def _add_message(self, **fields: Any) -> None:
        message = Message(**fields, conversation=self._conversation, depth=self._depth)
        self._messages.append(message)
        self._shown.add(message)
        self._log(message)

    def _say(self, message: Content, **fields: Any) -> None:
        text, media = split_content(message)
        self._add_message(role="user", text=text, media=media, **fields)

    def _add_user_message(self, message: Content | None) -> None:
        """Add the user's message; one is required after a message of the model."""
        if message is not None or self._messages[-1].role == "model":
            self._say(message or ("Go on." if self._resume else BEGIN))

    @property
    def _prompt_name(self) -> str:
        return f"{self._prompt.ns}:{self._prompt.key}"

    def _load_conversation(self) -> bool:
        """Load the conversation to continue, at this depth of nested calls; False if a new one is
        to begin.

        By default a nested run begins a new one: the call around the last one may have been rolled
        back, or may run concurrently.
        """
        if self._resume is False or (self._resume is None and self._depth):
            return False
        prompt = None if self._resume else self._prompt_name
        found = last_conversation(self._session, depth=self._depth, prompt=prompt)
        problem = "there is nothing to resume: the session has no conversation yet"
        if found:
            key = id(self._session), found[0].conversation
            if _in_use.setdefault(key, self) is self:
                self._messages, self._conversation = found, found[0].conversation
                self._shown = ShownConversation()
                self._shown.load(self._messages, self._session, self._model_name)
                return True
            problem = "the conversation cannot be resumed: another run continues it now"
        if self._resume:
            raise PromptEvaluationError(problem)
        return False

    def _count(self) -> None:
        """Count what the conversation has used so far."""
        calls = self._open_calls()
        self._turns = sum(each.role == "model" for each in self._messages)
        self._calls = sum(each.role == "tool" for each in self._messages)
        self._calls += len(self._on_record(calls))
        compacted = self._session[ContextCompacted].all()
        used = [e.usage for e in compacted if e.conversation == self._conversation]
        used += [each.usage for each in self._messages if each.usage is not None]
        self._usage, tracker = sum(used, NO_TOKENS), self._context.budget_tracker
        if tracker is not None and not self._tracker_is_given:
            tracker.record(self._usage, self._price)
        for message in reversed(self._messages):
            if message.tool_calls or message.role == "tool":
                break
            if message.role == "user" and not message.sent_id and not message.is_first:
                is_early = message.text.startswith(_NOT_DONE)
                self._early_stops += is_early
                self._mismatches += not is_early

    def _receive(self) -> bool:
        """Add the messages that were sent to the run; tell whether there were any."""
        sent = () if self._inbox is None else self._inbox.take()
        if not sent:
            return False
        known = {message.sent_id for message in self._session[Message].newest_first()}
        new = [(sent_id, text) for sent_id, text in sent if sent_id not in known]
        for sent_id, text in new:
            self._add_message(role="user", text=text, sent_id=sent_id)
            self._emit(MessageReceived, text)
        return bool(new)

    def _open_calls(self) -> list[ToolCall]:
        """Return the calls of the last turn that have no answer."""
        answered: set[str] = set()
        for message in reversed(self._messages):
            if message.role == "model":
                return [call for call in message.tool_calls if call.id not in answered]
            answered.add(message.call_id)
        return []

    async def _answer_open_calls(self) -> None:
        """Answer the open calls of an interrupted run; calls on record are not re-run."""
        calls = self._open_calls()
        tracker = self._context.budget_tracker
        if tracker is not None:
            tracker.check()  # now: a call that is open is not to fail because of it
        if calls:
            self._render()  # a tool's own limit for its results is in it
        on_record = self._on_record(calls)
        for call in calls:
            if call.id in on_record:
                self._add_answer(call, on_record[call.id])
        left = [call for call in calls if call.id not in on_record]
        if self._cancels:
            for call in left:
                self._add_answer(call, ToolResult.error(_CANCELLED))
        elif left:
            await self._answer(left)

    def _add_results(self, results: Sequence[ToolResult[Any]]) -> None:
        by_id = {result.call_id: result for result in results if result.call_id}
        in_order = iter([result for result in results if not result.call_id])
        answers: list[tuple[ToolCall, ToolResult[Any]]] = []
        for call in self._open_calls():
            result = by_id.pop(call.id, None) or next(in_order, None)
            if result is None:
                raise ValueError(f"there is no result for call {call.id} of tool {call.name!r}")
            answers.append((call, result))
        if by_id or next(in_order, None) is not None:
            raise ValueError("a result answers none of the calls of the last turn")
        for call, result in answers:  # only once all of them match
            self._add_answer(call, result)

    def _add_answer(
        self, call: ToolCall, result: ToolResult[Any], feedback: Sequence[Feedback] = ()
    ) -> None:
        rendered = self._context.rendered_prompt
        offer = None if rendered is None else rendered.offers.get(call.name)
        most = DEFAULT_MAX_RESULT_CHARS if offer is None else offer.tool.max_result_chars
        answer = result.render()
        if most is not None and len(answer) > most:
            answer = shortened(answer, call.id, most)
        parts = [answer, *(each.text for each in feedback)]
        text = "\n\n".join(part for part in parts if part)
        self._add_message(role="tool", call_id=call.id, text=text, media=result.media)

    # The model's turn

    async def _turn(self) -> ModelTurn:
        allowed = self._config.max_turns
        if allowed is not None and self._turns >= allowed:
            raise TurnLimitExceeded(f"The model had {allowed} turns, all that the run allows")
        deadline, tracker = self._context.deadline, self._context.budget_tracker
        if deadline is not None:
            deadline.check()
        if tracker is not None:
            tracker.check()
        self._context.beat()
        self._render()
        await self._make_room()
        request = self._request(self._offered())
        self._turns += 1
        self._emit(TurnStarted, self._turns, request)
        if self._partial is not None:
            self._partial.clear()
        turn = self._with_unique_ids(await self._ask_within_window(request))
        self._add_message(
            role="model",
            text=turn.text,
            tool_calls=turn.tool_calls,
            wire=turn.wire,
            usage=turn.usage if turn.usage.total_tokens else None,
            request_bytes=self._shown.request_bytes if self._shown.prompt_bytes else 0,
            media=turn.media,
        )
        self._emit(TurnEnded, self._turns, turn)
        self._spent(turn.usage)
        return turn

    def _request(self, rendered: RenderedPrompt) -> ModelRequest:
        deadline = self._context.deadline
        return ModelRequest(
            prompt=rendered,
            messages=tuple(self._shown.messages),  # events keep it, and the list grows
            output_type=self._requested_type,
            timeout=None if deadline is None else deadline.remaining(),
            on_text=None if self._on_event is None else self._emit_text,
            session=self._session,
        )

    def _spent(self, usage: TokenUsage) -> None:
        self._usage = self._usage + usage
        tracker = self._context.budget_tracker
        if tracker is not None:
            tracker.record(usage, self._price)
            tracker.check()

    def _chosen(self, rendered: RenderedPrompt) -> RenderedPrompt:
        """Return the prompt with the tools that the run offers."""
        wanted = self._config.tools
        if wanted is None:
            return rendered
        if self._filtered is None or self._filtered[0] is not rendered:
            self._filtered = rendered, rendered.only(wanted)
        return self._filtered[1]

    def _render(self) -> None:
        """Render the prompt for the session's present state."""
        rendered = self._chosen(self._prompt.render(self._session))
        if rendered is self._rendered and self._offers_rest == self._shown.has_shortened:
            return
        self._rendered = rendered
        self._offers_rest = self._shown.has_shortened
        if self._offers_rest:
            rendered = rendered.with_tools([read_result_tool()], self._prompt.policies)
        if self._model.provider_tools:
            rendered = rendered.with_provider_tools(
                self._model.provider_tools, self._prompt.policies
            )
        self._context = self._context.having(rendered_prompt=rendered)

    # The context window

    @property
    def _model_name(self) -> str:
        return f"{self._model.name}:{self._model.model}".rstrip(":")

    async def _make_room(self) -> None:
        """Shorten what the model sees if the next request might not fit."""
        policy, shown = self._config.context, self._shown
        if policy is None or self._model.manages_context:
            return
        shown.measure(self._offered())
        if shown.is_small:
            return
        if not self._asked_for_window:
            self._asked_for_window = True
            window = self._config.context_window
            if window is None:
                window = await self._wait_for(self._model.context_window, self._model.needs_loop)
            shown.window = min(filter(None, (window, shown.window)), default=None)
        if shown.is_full(policy):
            await self._compact(policy)

    async def _compact(self, policy: ContextPolicy, *, was_rejected: bool = False) -> None:
        """Let the policy choose what the model sees from now on, and record it."""
        shown, summaries, usage = self._shown, list[str](), list[TokenUsage]()

        async def summarize(messages: Sequence[Message], most: int) -> str:
            turn = await self._summary(messages, most)
            usage.append(turn.usage)
            text = turn.text.strip()
            summaries.append(text if text and turn.stop_reason != "refusal" else "")
            return summaries[-1] or outline(messages, most)

        chosen = await policy.compact(shown.messages, shown.room(policy, summarize))
        record = shown.compacted(
            chosen,
            self._messages,
            summary="\n\n".join(filter(None, summaries)),
            usage=sum(usage, NO_TOKENS),
            model=self._model_name,
            was_rejected=was_rejected,
        )
        self._log(record)
        self._render()  # it may offer the tool that reads the rest
        shown.measure(self._offered())
        self._emit(lambda: record)
        self._spent(record.usage)

    async def _summary(self, messages: Sequence[Message], most: int) -> ModelTurn:
        """Ask the model for a summary; an empty one if even that does not fit."""
        text = transcript(messages, self._shown.bytes_for_summary)
        instructions = SUMMARY_INSTRUCTIONS.format(words=max(most // 8, 30))
        request = replace(
            self._request(RenderedPrompt(instructions, ())),
            messages=[Message(role="user", text=text, conversation=self._conversation)],
            output_type=None,
            on_text=None,
        )
        try:
            return await self._ask_traced(request)
        except ContextOverflow as error:
            _logger.warning("the model cannot summarize the conversation: %s", error)
            return ModelTurn()

    async def _ask_within_window(self, request: ModelRequest) -> ModelTurn:
        """Ask; if the provider rejects the request as too long, shorten it and ask again."""
        policy = self._config.context
        for _ in range(_MAX_OVERFLOWS):
            try:
                return await self._ask_traced(request)
            except ContextOverflow as error:
                size = self._shown.request_bytes
                if policy is None or self._model.manages_context:
                    raise
                self._shown.learn(error)
                await self._compact(policy, was_rejected=True)
                if self._shown.request_bytes >= size:
                    raise
                request = self._request(self._offered())
        return await self._ask_traced(request)

    async def _ask_traced(self, request: ModelRequest) -> ModelTurn:
        telemetry = events.telemetry
        if telemetry is None:
            return await self._ask(request)
        return await telemetry.turn(self._context, self._ask, request)

    def _offered(self) -> RenderedPrompt:
        rendered = self._context.rendered_prompt
        assert rendered is not None
        return rendered

    async def _ask(self, request: ModelRequest) -> ModelTurn:
        """Ask until the provider answers, as often as the retry policy allows."""
        policy, attempt, deadline = self._config.retry, 0, self._context.deadline
        while True:
            try:
                return await self._wait_for(lambda: self._complete(request), self._model.needs_loop)
            except ProviderError as error:
                failure = ToolError(error.code, str(error), error.recoverable)
                if not policy.retries(failure, attempt):
                    raise
                attempt += 1
                wait = max(policy.backoff.delay(attempt), error.retry_after or 0.0)
                if deadline is not None and wait >= deadline.remaining():
                    raise DeadlineExceededError(
                        f"The next try would be in {wait:.1f} s, after the deadline: {error}"
                    ) from error
                _logger.warning("retrying %s in %.1f s: %s", self._model.name, wait, error)
                self._emit(Retrying, error, wait, attempt + 1)
                if self._partial is not None:
                    self._partial.clear()
            await self._wait_for(lambda: self._clock.sleep(wait))  # noqa: B023  # awaited here
            if deadline is not None:
                deadline.check()

    async def _complete(self, request: ModelRequest) -> ModelTurn:
        if requests_refused and self._model.asks_provider:
            raise ProviderRejected(
                f"a test asked the model {self._model.name!r}, and no_model_requests() refuses "
                "that: use a ScriptedAdapter, a MadeUpAdapter or a recording"
            )
        deadline = self._context.deadline
        if deadline is None or not self._model.needs_loop:
            return await self._model.complete(request)
        import asyncio

        limit = asyncio.timeout(deadline.remaining())
        try:
            async with limit:
                return await self._model.complete(request)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceededError("The deadline passed before the model answered") from error

    def _with_unique_ids(self, turn: ModelTurn) -> ModelTurn:
        """Return the turn with call ids that are unique in the session.

        Some servers count from zero in every turn, and the id of a call that reaches outside keeps
        it from being made twice.
        """
        if not turn.tool_calls:
            return turn
        messages = self._session.read_slice(Message)
        for message in islice(messages.newest_first(), len(messages) - self._scanned):
            self._ids.update(call.id for call in message.tool_calls)
        self._scanned = len(messages)
        calls: list[ToolCall] = []
        for call in turn.tool_calls:
            if not call.id or call.id in self._ids:
                call = replace(call, id=new_call_id())
            self._ids.add(call.id)
            calls.append(call)
        return replace(turn, tool_calls=tuple(calls), stop_reason="tool_use")

    # The answers to its calls

    async def _answer(self, calls: Sequence[ToolCall]) -> None:
        allowed = self._config.max_tool_calls
        room = len(calls) if allowed is None else allowed - self._calls
        self._in_progress = {call.id: call for call in calls[:room]}
        for call in calls[:room]:
            self._emit(ToolStarted, call)
        results = await self._execute(calls[:room])
        self._calls += len(results)
        self._add_all(calls, results)
        if len(calls) > room:
            raise CallLimitExceeded(_TOO_MANY_CALLS.format(allowed))

    def _add_all(self, calls: Sequence[ToolCall], results: Sequence[ToolResult[Any]]) -> None:
        """Add the answers of a turn's calls; feedback goes with the last."""
        feedback: tuple[Feedback, ...] = ()
        if self._config.feedback and results:
            feedback = collect_feedback(self._config.feedback, context=self._context)
        for place, (call, result) in enumerate(zip(calls, results, strict=False), 1):
            self._add_answer(call, result, feedback if place == len(results) else ())
        self._early_stops = self._mismatches = 0

    async def _execute(self, calls: Sequence[ToolCall]) -> list[ToolResult[Any]]:
        results: list[ToolResult[Any]] = []
        run = execute_tools if self.blocks else aexecute_tools
        limit = self._config.max_concurrency
        while len(results) < len(calls):
            left = calls[len(results) :]
            try:
                answer = run(left, context=self._context, max_concurrency=limit)
                results += answer if isinstance(answer, tuple) else await answer
            except VisibilityExpansionRequired as request:
                results += self._expanded(left, request)
        return results

    def _expanded(
        self, calls: Sequence[ToolCall], request: VisibilityExpansionRequired
    ) -> list[ToolResult[Any]]:
        """Expand the sections; return the answers up to the call that requested it."""
        on_record = self._on_record(calls)
        results = [on_record[call.id] for call in calls if call.id in on_record]
        expand(self._session, request)
        self._render()
        opened = ", ".join(request.section_keys)
        answer = ToolResult.ok(None, f"Opened: {opened}. The prompt shows it in full now.")
        return [*results[:-1], replace(answer, call_id=results[-1].call_id)]

    def _on_record(self, calls: Sequence[ToolCall]) -> dict[str, ToolResult[Any]]:
        """Return the results of those calls that have ended, by id."""
        found = {call.id: self._session.record_of(call.id) for call in calls}
        # A suspended call is to be made again.
        return {key: each.result for key, each in found.items() if each and not each.suspended}

    # Events and waiting

    def _listen(self) -> Callable[[], None]:
        """Emit the end of each call when it happens."""
        if self._on_event is None:
            return _nothing

        def ended(record: ToolInvoked) -> None:
            call = self._in_progress.get(record.call_id)
            if call is not None:
                failed = ToolRolledBack if record.ran else ToolRefused
                kind = ToolCommitted if record.success else failed
                self._emit(kind, call, record.result, record)

        return self._session.dispatcher.subscribe(ToolInvoked, ended)

    def _report(self, call_id: str, message: str, done: float | None, total: float | None) -> None:
        """Emit the progress of a call, or of a call nested in it."""
        transaction = transaction_under_way.get()
        while transaction is not None and transaction.call.id not in self._in_progress:
            transaction = transaction.parent
        call = self._in_progress.get(call_id) if transaction is None else transaction.call
        if call is not None:
            self._emit(ToolProgress, call, message, done, total)

    def _emit(self, kind: Callable[..., RunEvent], *about: Any) -> None:
        if self._on_event is None and events.telemetry is None:
            return
        event = kind(*about)
        if events.telemetry is not None:
            events.telemetry.note(event)
        try:
            if self._on_event is not None:
                self._on_event(event)
        except Exception:
            _logger.exception("the listener of a run failed on %s", event)

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        self._emit(TextDelta, text)
        value = None if self._partial is None else self._partial.add(text)
        if value is not None:
            self._emit(PartialOutput, value)

    async def _wait_for(
        self, start: Callable[[], Coroutine[Any, Any, T]], needs_loop: bool = True
    ) -> T:
        """Await what needs an event loop: the caller's, or one in the background."""
        if not (self.blocks and needs_loop):
            return await start()
        from weakincentives.core.loops import run_blocking

        return run_blocking(start)
