"""What happens between a model's turns, whichever adapter it speaks through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.adapters import (
    Message,
    ModelRequest,
    ModelTurn,
    PromptResponse,
    Retrying,
    RunConfig,
    RunEvent,
    ScriptedAdapter,
    SentBack,
    TextDelta,
    ToolEnded,
    ToolStarted,
    calls,
    says,
)
from weakincentives.core.budget import Budget, BudgetTracker, TokenUsage
from weakincentives.core.clock import FakeClock
from weakincentives.core.deadlines import Deadline, Heartbeat
from weakincentives.errors import (
    BudgetExceededError,
    CallLimitExceeded,
    DeadlineExceededError,
    OutputParseError,
    PromptEvaluationError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
    ReducerError,
    TaskNotCompleted,
    TurnLimitExceeded,
)
from weakincentives.prompt import (
    CallCountFeedback,
    CompletionResult,
    Custom,
    MarkdownSection,
    Prompt,
    PromptTemplate,
    SectionVisibility,
    ToolContext,
    ToolResult,
)
from weakincentives.retry import RetryPolicies
from weakincentives.runtime import (
    PromptExecuted,
    PromptRendered,
    Session,
    ToolInvoked,
    execute_tool,
)


@dataclass(frozen=True)
class Added:
    n: int


@dataclass(frozen=True)
class Total:
    total: int


@wink.tool(reach="reversible")
def add(n: int, *, context: ToolContext) -> str:
    """Add a number."""
    context.session[Added].append(Added(n))
    if n < 0:
        raise ValueError("n must not be negative")
    return f"added {n}"


@wink.tool
def details() -> str:
    """Tell more."""
    return "the details"


def prompt(*sections: MarkdownSection[Any], output: Any = None) -> Prompt[Any]:
    adding = MarkdownSection(title="Adding", template="Add numbers.", tools=[add])
    return Prompt(PromptTemplate(sections=[adding, *sections], output_type=output))


def adds(*numbers: int) -> ModelTurn:
    return calls(*(("add", {"n": n}) for n in numbers))


Evaluate = Callable[..., PromptResponse[Any]]


@pytest.fixture(params=["sync", "async"])
def evaluate(request: pytest.FixtureRequest) -> Evaluate:
    """Run a script of turns to its end, from sync code or on an event loop."""

    def run(turns: list[Any], prompt: Prompt[Any], session: Session, **options: Any) -> Any:
        adapter = ScriptedAdapter(turns)
        if request.param == "sync":
            return adapter.evaluate(prompt, session, **options)
        return asyncio.run(adapter.aevaluate(prompt, session, **options))

    return run


def said(session: Session) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in session[Message]]


def test_a_run_ends_with_the_models_words(evaluate: Evaluate):
    session = Session()

    response = evaluate([adds(1, 2), "Three."], prompt(), session)

    assert (response.text, response.stop_reason, response.output) == ("Three.", "end_turn", None)
    assert (response.turns, response.calls, response.tool_calls) == (2, 2, ())
    assert session[Added].all() == (Added(1), Added(2))
    assert said(session) == [
        ("user", "Begin."),
        ("model", ""),
        ("tool", "added 1"),
        ("tool", "added 2"),
        ("model", "Three."),
    ]


def test_every_kind_of_failure_reaches_the_model_and_leaves_nothing(evaluate: Evaluate):
    session = Session()
    turn = calls(("add", {"n": -1}), ("add", {"n": "1"}), "multiply", ("add", {"n": 5}))

    evaluate([turn, "Done."], prompt(), session)

    answers = [text for role, text in said(session) if role == "tool"]
    assert answers[0] == "n must not be negative"
    assert "Invalid parameters for tool 'add'" in answers[1]
    assert answers[2] == "Tool 'multiply' not found. Available tools: add"
    assert answers[3] == "added 5"
    assert session[Added].all() == (Added(5),)


def test_the_users_words_open_the_conversation(evaluate: Evaluate):
    session = Session()

    evaluate(["Hello."], prompt(), session, message="Good morning.")

    assert said(session)[0] == ("user", "Good morning.")


def test_a_session_is_told_once_what_was_rendered_and_how_the_run_ended(evaluate: Evaluate):
    session = Session()

    evaluate([adds(1), adds(2), adds(3), "Six."], prompt(), session)

    assert len(session[PromptRendered]) == 1
    (executed,) = session[PromptExecuted]
    assert (executed.adapter, executed.stop_reason) == ("scripted", "end_turn")


def test_sections_that_come_and_go_change_what_the_next_turn_is_offered(evaluate: Evaluate):
    more = MarkdownSection(
        title="More",
        template="Now there is more.",
        tools=[details],
        enabled=lambda params, *, session: len(session[Added]) > 0,
    )
    offered: list[list[str]] = []

    def look(turn: ModelTurn | str) -> Callable[[ModelRequest], ModelTurn | str]:
        def answer(request: ModelRequest) -> ModelTurn | str:
            offered.append([tool.name for tool in request.prompt.tools])
            return turn

        return answer

    evaluate([look(adds(1)), look("Done.")], prompt(more), Session())

    assert offered == [["add"], ["add", "details"]]


# Structured output


def test_an_answer_that_does_not_fit_is_sent_back_with_what_is_wrong(evaluate: Evaluate):
    session = Session()

    response = evaluate(
        ["It is three.", '{"total": "3"}', '{"total": 3}'], prompt(output=Total), session
    )

    assert response.output == Total(3)
    sent_back = [text for role, text in said(session) if role == "user"][1:]
    assert "holds no JSON" in sent_back[0]
    assert "total: Expected type integer" in sent_back[1]


def test_an_answer_that_never_fits_ends_the_run(evaluate: Evaluate):
    with pytest.raises(OutputParseError, match="holds no JSON"):
        evaluate(["a", "b", "c", "d"], prompt(output=Total), Session())


def test_a_refusal_ends_the_run_and_is_not_sent_back(evaluate: Evaluate):
    response = evaluate(
        [says("I will not do that.", stop_reason="refusal")], prompt(output=Total), Session()
    )

    assert (response.stop_reason, response.output) == ("refusal", None)


def test_a_type_that_is_no_answer_is_refused_before_the_model_is_asked(evaluate: Evaluate):
    with pytest.raises(TypeError, match="has no JSON form"):
        evaluate([ProviderRejected("never asked")], prompt(output=Session), Session())


def test_tries_at_an_answer_are_counted_anew_after_work(evaluate: Evaluate):
    turns = ["a", "b", adds(1), "c", "d", '{"total": 1}']

    assert evaluate(turns, prompt(output=Total), Session()).output == Total(1)


# Progressive disclosure


HIDDEN = MarkdownSection(
    title="More",
    template="All of it.",
    summary="There is more.",
    visibility=SectionVisibility.SUMMARY,
    tools=[details],
)


def test_a_section_that_the_model_opens_is_there_for_the_rest_of_its_turn(evaluate: Evaluate):
    session = Session()
    opening = ("open_sections", {"section_keys": ["more"], "reason": "I need it"})
    texts: list[str] = []

    def look(request: ModelRequest) -> str:
        texts.append(request.prompt.text)
        return "Done."

    turn = calls(("add", {"n": 1}), opening, "details", ("add", {"n": 2}))
    response = evaluate([turn, look], prompt(HIDDEN), session)

    assert [text for role, text in said(session) if role == "tool"] == [
        "added 1",
        "Opened: more. The prompt shows it in full now.",
        "the details",
        "added 2",
    ]
    assert "All of it." in texts[0]
    assert session[Added].all() == (Added(1), Added(2))
    assert response.calls == 4


# Feedback and completion


def test_feedback_stands_at_the_end_of_the_turns_last_answer(evaluate: Evaluate):
    session = Session()

    evaluate(
        [adds(1), adds(2, 3), "Done."],
        prompt(),
        session,
        config=RunConfig(feedback=[CallCountFeedback(3)]),
    )

    answers = [text for role, text in said(session) if role == "tool"]
    assert answers[:2] == ["added 1", "added 2"]
    assert answers[2].startswith("added 3\n\n3 tool calls so far.")


def _added_three(context: ToolContext) -> CompletionResult:
    left = 3 - len(context.session[Added])
    return CompletionResult(left <= 0, f"{left} numbers are missing.")


def test_a_model_that_stops_too_early_is_sent_back_with_the_reason(evaluate: Evaluate):
    session, events = Session(), list[RunEvent]()

    response = evaluate(
        [adds(1), "Done.", adds(2, 3), "Really done."],
        prompt(),
        session,
        config=RunConfig(completion=Custom(_added_three)),
        on_event=events.append,
    )

    assert response.text == "Really done."
    reasons = [event.reason for event in events if isinstance(event, SentBack)]
    assert reasons == ["The task is not done yet. 2 numbers are missing."]
    assert ("user", reasons[0]) in said(session)


def test_a_model_that_only_claims_to_be_done_ends_the_run(evaluate: Evaluate):
    with pytest.raises(TaskNotCompleted, match="3 numbers are missing"):
        evaluate(
            ["Done."] * 10,
            prompt(),
            Session(),
            config=RunConfig(completion=Custom(_added_three)),
        )


# Limits


def test_the_turns_of_a_run_are_limited(evaluate: Evaluate):
    session = Session()

    with pytest.raises(TurnLimitExceeded, match="had 3 turns") as caught:
        evaluate((adds(n) for n in range(99)), prompt(), session, config=RunConfig(max_turns=3))

    assert session[Added].all() == (Added(0), Added(1), Added(2))
    assert caught.value.response is not None
    assert (caught.value.response.turns, caught.value.response.calls) == (3, 3)
    assert session[PromptExecuted].latest().stop_reason == "TurnLimitExceeded"


def test_the_calls_of_a_run_are_limited_also_within_a_turn(evaluate: Evaluate):
    session = Session()

    with pytest.raises(CallLimitExceeded, match="more than 3 tool calls"):
        evaluate(
            [adds(1, 2), adds(3, 4, 5), "Done."],
            prompt(),
            session,
            config=RunConfig(max_tool_calls=3),
        )

    assert session[Added].all() == (Added(1), Added(2), Added(3))


def test_a_run_may_use_all_of_its_calls(evaluate: Evaluate):
    config = RunConfig(max_tool_calls=3, max_turns=2)

    assert evaluate([adds(1, 2, 3), "Done."], prompt(), Session(), config=config).text == "Done."


def test_the_tokens_of_a_run_are_limited(evaluate: Evaluate):
    session, tracker = Session(), BudgetTracker(Budget(max_total_tokens=100))
    used = TokenUsage(input_tokens=30, output_tokens=30)
    turns = [calls(("add", {"n": n}), usage=used) for n in range(9)]

    with pytest.raises(BudgetExceededError, match="Used 120 total tokens; the budget is 100"):
        evaluate(turns, prompt(), session, budget=tracker)

    assert session[Added].all() == (Added(0),), "the turn that went too far is not carried out"
    assert tracker.used.total_tokens == 120


def test_a_response_has_the_tokens_of_all_turns(evaluate: Evaluate):
    one = TokenUsage(input_tokens=10, output_tokens=1)

    response = evaluate(
        [calls("add", usage=one), says("Done.", usage=one)],
        prompt(),
        Session(),
        budget=Budget(max_total_tokens=100),
    )

    assert response.usage == TokenUsage(input_tokens=20, output_tokens=2)


def test_a_deadline_in_the_middle_keeps_what_was_committed(evaluate: Evaluate):
    clock = FakeClock()
    session = Session(clock=clock)

    def slow(request: ModelRequest) -> ModelTurn:
        clock.advance(20)
        return adds(len(request.messages))

    with pytest.raises(DeadlineExceededError) as caught:
        evaluate([slow] * 9, prompt(), session, deadline=Deadline.after(50, clock=clock))

    assert len(session[Added]) == 2
    assert caught.value.response is not None
    assert caught.value.response.turns == 3


def test_a_time_limit_is_a_deadline_from_the_start_of_the_run(evaluate: Evaluate):
    clock = FakeClock()

    def slow(request: ModelRequest) -> ModelTurn:
        clock.advance(20)
        return adds(1)

    with pytest.raises(DeadlineExceededError):
        evaluate([slow] * 9, prompt(), Session(clock=clock), config=RunConfig(time_limit=30))


@pytest.mark.parametrize(
    "wrong", [{"max_turns": 0}, {"max_tool_calls": 0}, {"time_limit": 0}, {"output_retries": -1}]
)
def test_a_limit_that_makes_no_sense_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RunConfig(**wrong)


def test_a_heart_beats_with_every_turn_and_call(evaluate: Evaluate):
    heart = Heartbeat()

    evaluate([adds(1, 2), "Done."], prompt(), Session(), heartbeat=heart)

    assert heart.beats >= 4


# The provider fails


def test_a_provider_that_fails_is_asked_again_and_the_wait_is_its_own(evaluate: Evaluate):
    clock, events = FakeClock(), list[RunEvent]()
    before = clock.time()

    response = evaluate(
        [ProviderThrottled("slow down", retry_after=7), ProviderUnavailable("503"), "Hello."],
        prompt(),
        Session(clock=clock),
        on_event=events.append,
    )

    assert response.text == "Hello."
    assert response.turns == 1
    assert [event.wait for event in events if isinstance(event, Retrying)] == [7, 2]
    assert clock.time() - before == 9


def test_a_request_that_is_rejected_is_not_made_again(evaluate: Evaluate):
    with pytest.raises(ProviderRejected, match="no such model"):
        evaluate([ProviderRejected("no such model"), "Hello."], prompt(), Session())


def test_retries_of_requests_come_to_an_end(evaluate: Evaluate):
    with pytest.raises(ProviderUnavailable):
        evaluate([ProviderUnavailable("down")] * 9, prompt(), Session(clock=FakeClock()))


def test_requests_are_made_once_where_the_config_says_so(evaluate: Evaluate):
    config = RunConfig(retry=RetryPolicies.NONE)

    with pytest.raises(ProviderUnavailable):
        evaluate([ProviderUnavailable("down"), "Hello."], prompt(), Session(), config=config)


def test_a_wait_that_is_longer_than_the_deadline_is_not_begun(evaluate: Evaluate):
    clock = FakeClock()
    before = clock.time()

    with pytest.raises(DeadlineExceededError, match="slow down"):
        evaluate(
            [ProviderThrottled("slow down", retry_after=60), "Hello."],
            prompt(),
            Session(clock=clock),
            deadline=Deadline.after(30, clock=clock),
        )

    assert clock.time() == before


# Who is told


def test_a_listener_hears_text_turns_and_calls_in_order(evaluate: Evaluate):
    events: list[RunEvent] = []

    evaluate([adds(1, -1), "One\nand two."], prompt(), Session(), on_event=events.append)

    assert [type(event).__name__ for event in events] == [
        *("TurnStarted", "TurnEnded", "ToolStarted", "ToolStarted"),
        *("ToolCommitted", "ToolRolledBack"),
        *("TurnStarted", "TextDelta", "TextDelta", "TurnEnded", "RunEnded"),
    ]
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "One\nand two."
    started = [event.call.id for event in events if isinstance(event, ToolStarted)]
    ended = [event for event in events if isinstance(event, ToolEnded)]
    assert [event.call.id for event in ended] == started
    assert [event.result.success for event in ended] == [True, False]


def test_a_listener_that_fails_does_not_end_the_run(
    evaluate: Evaluate, caplog: pytest.LogCaptureFixture
):
    def fails(event: RunEvent) -> None:
        raise RuntimeError("the screen is gone")

    assert evaluate([adds(1), "Done."], prompt(), Session(), on_event=fails).text == "Done."
    assert "the screen is gone" in caplog.text


# Ids


def test_calls_with_ids_that_were_used_before_get_new_ones(evaluate: Evaluate):
    session = Session()
    turns = [calls(wink.ToolCall("add", {"n": n}, id="call_0")) for n in range(3)]

    evaluate([*turns, "Done."], prompt(), session)
    evaluate([*turns, "Done."], prompt(), session)

    ids = [record.call_id for record in session[ToolInvoked]]
    assert len(set(ids)) == 6
    assert ids[0] == "call_0"
    asked = [call.id for message in session[Message] for call in message.tool_calls]
    answered = [message.call_id for message in session[Message] if message.role == "tool"]
    assert asked == answered == ids


# Step by step, and going on


def test_a_step_is_one_turn_and_leaves_its_calls_to_the_caller():
    session, adapter, task = Session(), ScriptedAdapter([adds(1, 2), "Three."]), prompt()

    first = adapter.step(task, session)
    results = [execute_tool(call, session=session) for call in first.tool_calls]
    second = adapter.step(task, session, tool_results=results)

    assert (first.stop_reason, first.tool_calls[1].params) == ("tool_use", {"n": 2})
    assert (second.stop_reason, second.text) == ("end_turn", "Three.")
    assert said(session)[2:4] == [("tool", "added 1"), ("tool", "added 2")]


def test_results_of_a_step_are_matched_by_the_call_they_answer():
    session, adapter, task = Session(), ScriptedAdapter([adds(1, 2), "Three."]), prompt()

    first = adapter.step(task, session)
    results = [execute_tool(call, session=session) for call in first.tool_calls]
    adapter.step(task, session, tool_results=results[::-1])

    assert said(session)[2:4] == [("tool", "added 1"), ("tool", "added 2")]


def test_a_step_wants_a_result_for_every_call():
    session, adapter, task = Session(), ScriptedAdapter([adds(1, 2), "Three."]), prompt()
    first = adapter.step(task, session)
    one = execute_tool(first.tool_calls[0], session=session)

    with pytest.raises(ValueError, match=r"no result for call .* of tool 'add'"):
        adapter.step(task, session, tool_results=[one])
    with pytest.raises(ValueError, match="answers none"):
        adapter.step(task, session, tool_results=[ToolResult.ok()] * 3)


def test_a_last_step_has_the_output():
    session, adapter = Session(), ScriptedAdapter(['{"total": 3}'])

    assert asyncio.run(adapter.astep(prompt(output=Total), session)).output == Total(3)


def test_a_run_that_was_broken_off_goes_on_where_it_was(evaluate: Evaluate):
    session, task = Session(), prompt()
    with pytest.raises(CallLimitExceeded):
        evaluate([adds(1, 2, 3)], task, session, config=RunConfig(max_tool_calls=1))

    response = evaluate(["Six."], task, session, resume=True)

    assert response.text == "Six."
    assert session[Added].all() == (Added(1), Added(2), Added(3)), "each of them once"
    assert said(session) == [
        ("user", "Begin."),
        ("model", ""),
        ("tool", "added 1"),
        ("tool", "added 2"),
        ("tool", "added 3"),
        ("model", "Six."),
    ]


def test_a_call_on_record_is_not_run_again_when_a_run_goes_on(evaluate: Evaluate):
    session, task = Session(), prompt()
    first = ScriptedAdapter([adds(1, 2)]).step(task, session)
    execute_tool(first.tool_calls[0], session=session)  # and then the process ends

    evaluate(["Three."], task, session, resume=True)

    assert session[Added].all() == (Added(1), Added(2))


def test_a_conversation_can_be_taken_up_with_more_words(evaluate: Evaluate):
    session, task = Session(), prompt()
    evaluate(["Hello."], task, session)

    evaluate(["One."], task, session, resume=True, message="Count.")

    assert said(session)[1:] == [("model", "Hello."), ("user", "Count."), ("model", "One.")]


def test_there_must_be_something_to_resume(evaluate: Evaluate):
    with pytest.raises(PromptEvaluationError, match="nothing to resume"):
        evaluate(["Hello."], prompt(), Session(), resume=True)


def test_a_second_evaluation_continues_the_conversation(evaluate: Evaluate):
    session, task = Session(), prompt()
    evaluate([adds(1), "One."], task, session, message="Add 1.")

    evaluate([lambda request: f"{len(request.messages)} messages."], task, session, message="More.")

    assert said(session)[-2:] == [("user", "More."), ("model", "5 messages.")]
    assert len({message.conversation for message in session[Message]}) == 1


def test_a_second_evaluation_without_a_message_lets_the_prompt_say_what_to_do(evaluate: Evaluate):
    session = Session()
    evaluate(["Hello."], prompt(), session)

    evaluate(["Hello again."], prompt(), session)

    assert said(session)[1:] == [("model", "Hello."), ("user", "Begin."), ("model", "Hello again.")]


def test_a_second_evaluation_answers_the_open_calls_of_the_first(evaluate: Evaluate):
    session, limits = Session(), RunConfig(max_tool_calls=1)
    with pytest.raises(CallLimitExceeded):
        evaluate([adds(1, 2)], prompt(), session, config=limits)

    evaluate(["Three."], prompt(), session, message="And?")

    assert said(session)[2:] == [
        ("tool", "added 1"),
        ("tool", "added 2"),
        ("user", "And?"),
        ("model", "Three."),
    ]


def test_a_conversation_begins_anew_on_request(evaluate: Evaluate):
    session = Session()
    evaluate(["Hello."], prompt(), session)

    evaluate([lambda request: f"{len(request.messages)}"], prompt(), session, resume=False)

    assert said(session)[-1] == ("model", "1")


def test_each_prompt_continues_its_own_conversation(evaluate: Evaluate):
    def named(key: str) -> Prompt[Any]:
        return Prompt(PromptTemplate(key=key, sections=[MarkdownSection(title="Say")]))

    def seen(request: ModelRequest) -> str:
        return "+".join(message.text for message in request.messages)

    session = Session()
    for key, message in (("a", "1"), ("b", "2"), ("a", "3")):
        answer = evaluate([seen], named(key), session, message=message).text

    assert answer == "1+1+3"
    last = evaluate([seen], named("c"), session, message="4", resume=True)
    assert last.text == "1+1+3+1+1+3+4"  # the last one, whatever its prompt


def test_a_model_inside_a_tool_begins_anew_in_each_call(evaluate: Evaluate):
    """The call around the last conversation may have been rolled back."""

    @wink.tool(reach="reversible")
    def delegate(fail: bool, *, context: ToolContext) -> str:
        """Ask another model."""
        model = ScriptedAdapter([lambda request: f"{len(request.messages)}"])
        answer = model.evaluate(prompt(), context.session, message="Go.").text
        if fail:
            raise ValueError("rolled back")
        return answer

    session, outer = Session(), prompt(MarkdownSection(title="Outer", tools=[delegate]))
    turns = [calls(("delegate", {"fail": fail})) for fail in (True, False, False)]

    evaluate([*turns, "Done."], outer, session)

    answers = [m.text for m in session[Message] if m.role == "tool"]
    assert answers == ["rolled back", "1", "1"]


def test_a_conversation_in_progress_is_not_continued_by_another_run(evaluate: Evaluate):
    session = Session()

    def meanwhile(request: ModelRequest) -> str:
        with pytest.raises(PromptEvaluationError, match="another run continues it now"):
            ScriptedAdapter(["No."]).evaluate(prompt(), session, resume=True)
        other = ScriptedAdapter([lambda request: f"{len(request.messages)}"])
        return other.evaluate(prompt(), session, message="Hi.").text

    assert evaluate([meanwhile], prompt(), session).text == "1"
    assert evaluate(["Yes."], prompt(), session, resume=True).text == "Yes."


def test_a_conversation_survives_in_a_snapshot():
    session, task = Session(), prompt()
    ScriptedAdapter([adds(1), "Done."]).evaluate(task, session)

    text = session.snapshot().to_json()
    from weakincentives.runtime import Snapshot

    again = Session.from_snapshot(Snapshot.from_json(text, types=[Added, Message]))
    ScriptedAdapter(["Yes."]).evaluate(task, again, resume=True, message="Sure?")

    assert said(again)[-3:] == [("model", "Done."), ("user", "Sure?"), ("model", "Yes.")]


# Nested, cancelled


def test_a_tool_may_run_a_model_of_its_own(evaluate: Evaluate):
    @wink.tool(reach="reversible")
    def delegate(*, context: ToolContext) -> str:
        """Let another model do it."""
        return ScriptedAdapter([adds(7, -7), "Seven."]).evaluate(prompt(), context.session).text

    outer = Prompt(PromptTemplate(sections=[MarkdownSection(title="Outer", tools=[delegate])]))
    session = Session()

    response = evaluate([calls("delegate"), "Done."], outer, session)

    assert response.text == "Done."
    assert session[Added].all() == (Added(7),)
    assert [record.tool_name for record in session[ToolInvoked]] == ["add", "add", "delegate"]


def test_a_run_that_is_cancelled_in_a_tool_leaves_nothing_of_that_tool():
    started = asyncio.Event()

    @wink.tool(reach="reversible")
    async def wait(*, context: ToolContext) -> str:
        """Wait for ever."""
        context.session[Added].append(Added(99))
        started.set()
        await asyncio.Event().wait()
        return "never"

    waiting = MarkdownSection(title="Waiting", tools=[wait])
    session = Session()

    async def scenario() -> None:
        adapter = ScriptedAdapter([adds(1), calls("wait")])
        run = asyncio.create_task(adapter.aevaluate(prompt(waiting), session))
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(scenario())

    assert session[Added].all() == (Added(1),)
    assert session[PromptExecuted].latest().stop_reason == "interrupted"


def test_an_interrupt_in_a_handler_ends_the_run_at_once():
    @wink.tool(reach="reversible")
    def stop(*, context: ToolContext) -> str:
        """Press Ctrl-C."""
        context.session[Added].append(Added(99))
        raise KeyboardInterrupt

    session = Session()
    stopping = MarkdownSection(title="Stopping", tools=[stop])

    with pytest.raises(KeyboardInterrupt):
        ScriptedAdapter([adds(1), calls("stop"), "Done."]).evaluate(prompt(stopping), session)

    assert session[Added].all() == (Added(1),)


# Several conversations in one session


def _delegate(*turns: Any) -> Any:
    @wink.tool(reach="reversible")
    def delegate(*, context: ToolContext) -> str:
        """Let another model do it."""
        return ScriptedAdapter(turns).evaluate(prompt(), context.session).text

    return MarkdownSection(title="Delegating", tools=[delegate])


def test_a_run_that_goes_on_leaves_out_what_models_of_its_tools_said(evaluate: Evaluate):
    session, delegating = Session(), _delegate(adds(7), "Seven.")
    with pytest.raises(ProviderRejected):
        evaluate([calls("delegate"), ProviderRejected("no")], prompt(delegating), session)
    asked: list[list[tuple[str, str]]] = []

    def look(request: ModelRequest) -> str:
        asked.append([(message.role, message.text) for message in request.messages])
        return "Done."

    evaluate([look], prompt(delegating), session, resume=True)

    assert asked == [[("user", "Begin."), ("model", ""), ("tool", "Seven.")]]


def test_a_run_that_is_interrupted_in_a_model_of_a_tool_goes_on_as_itself(evaluate: Evaluate):
    @wink.tool(reach="reversible")
    def stop() -> str:
        """Press Ctrl-C."""
        raise KeyboardInterrupt

    @wink.tool(reach="reversible")
    def delegate(*, context: ToolContext) -> str:
        """Let another model do it."""
        inner = prompt(MarkdownSection(title="Stopping", tools=[stop]))
        return ScriptedAdapter([calls("stop")]).evaluate(inner, context.session).text

    outer = prompt(MarkdownSection(title="Delegating", tools=[delegate]))
    session = Session()
    with pytest.raises(KeyboardInterrupt):
        ScriptedAdapter([calls("delegate")]).evaluate(outer, session)

    evaluate(["I see."], outer, session, resume=True)

    assert [(m.role, m.depth) for m in session[Message]] == [
        *(("user", 0), ("model", 0)),
        *(("user", 1), ("model", 1)),
        *(("tool", 0), ("model", 0)),
    ]


def test_a_tool_can_go_on_with_the_conversation_it_had(evaluate: Evaluate):
    words = iter(["Hello.", "Hello again."])

    @wink.tool(reach="reversible")
    def talk(*, context: ToolContext) -> str:
        """Talk to another model."""
        resume = any(message.depth == 1 for message in context.session[Message])
        model = ScriptedAdapter([lambda request: f"{next(words)} ({len(request.messages)})"])
        return model.evaluate(prompt(), context.session, resume=resume, message="Hi.").text

    session, talking = Session(), prompt(MarkdownSection(title="Talking", tools=[talk]))

    evaluate([calls("talk"), calls("talk"), "Done."], talking, session)

    answers = [text for role, text in said(session) if role == "tool"]
    assert answers == ["Hello. (1)", "Hello again. (3)"]


def test_runs_at_the_same_time_keep_their_conversations_apart():
    """Both providers count calls from zero; the second run ends first and is not the last."""
    session, order = Session(), asyncio.Queue[None]()

    class Slow(ScriptedAdapter):
        needs_loop = True

        async def complete(self, request: ModelRequest) -> ModelTurn:
            await order.get()
            return await super().complete(request)

    def turn(n: int) -> ModelTurn:
        return calls(wink.ToolCall("add", {"n": n}, "call_0"))

    async def scenario() -> None:
        runs = [
            asyncio.create_task(Slow(turns).aevaluate(prompt(), session, message=turns[-1]))
            for turns in ([turn(1), turn(2), "First."], [turn(10), turn(20), "Second."])
        ]
        for _ in range(6):
            order.put_nowait(None)
        await asyncio.gather(*runs)

    asyncio.run(scenario())

    assert sorted(each.n for each in session[Added]) == [1, 2, 10, 20]
    conversations: dict[str, list[str]] = {}
    for message in session[Message]:
        conversations.setdefault(message.conversation, []).append(message.text)
    assert sorted(conversations.values()) == [
        ["First.", "", "added 1", "", "added 2", "First."],
        ["Second.", "", "added 10", "", "added 20", "Second."],
    ]
    ids = [call.id for message in session[Message] for call in message.tool_calls]
    assert len(set(ids)) == 4


# More ways to break off


def test_a_listener_hears_the_end_of_calls_that_were_left_open(evaluate: Evaluate):
    session, heard = Session(), list[RunEvent]()
    with pytest.raises(CallLimitExceeded):
        evaluate([adds(1, 2)], prompt(), session, config=RunConfig(max_tool_calls=1))

    evaluate(["Done."], prompt(), session, resume=True, on_event=heard.append)

    ended = [event.call.params for event in heard if isinstance(event, ToolEnded)]
    assert ended == [{"n": 2}]


def test_a_prompt_that_cannot_be_rendered_any_more_ends_the_run_and_it_can_be_taken_up(
    evaluate: Evaluate,
):
    broken = True

    def enabled(*, session: Session) -> bool:
        if broken and session[Added]:
            raise ValueError("the settings are gone")
        return True

    section = MarkdownSection(title="Settings", template="Settings.", enabled=enabled)
    session = Session()

    with pytest.raises(ValueError, match="the settings are gone"):
        evaluate([adds(1), "Done."], prompt(section), session)

    assert session[PromptExecuted].latest().stop_reason == "ValueError"
    broken = False
    assert evaluate(["Done."], prompt(section), session, resume=True).text == "Done."
    assert session[Added].all() == (Added(1),)


def test_an_adapter_with_a_timeout_of_its_own_has_not_missed_the_deadline():
    class Hasty(ScriptedAdapter):
        needs_loop = True

        async def complete(self, request: ModelRequest) -> ModelTurn:
            raise TimeoutError("a socket was slow")

    with pytest.raises(TimeoutError, match="a socket was slow"):
        Hasty([]).evaluate(prompt(), Session(), deadline=Deadline.after(60))


def test_the_end_of_a_run_is_told_also_when_it_cannot_be_recorded():
    ended: list[str] = []

    class Ending(ScriptedAdapter):
        async def end_run(self) -> None:
            ended.append("told")

    def fails(current: Any, event: PromptExecuted) -> Any:
        raise ValueError("no room")

    session = Session()
    session[Total].register(PromptExecuted, fails)

    with pytest.raises(ReducerError):
        Ending(["Done."]).evaluate(prompt(), session)

    assert ended == ["told"]


def test_a_step_with_a_result_missing_can_be_taken_again_with_all():
    session, model = Session(), ScriptedAdapter([adds(1, 2), "Three."])
    turn = model.step(prompt(), session)
    results = [execute_tool(call, session=session) for call in turn.tool_calls]

    with pytest.raises(ValueError, match="there is no result for call"):
        model.step(prompt(), session, tool_results=results[:1])

    assert model.step(prompt(), session, tool_results=results).text == "Three."
    assert said(session)[2:] == [("tool", "added 1"), ("tool", "added 2"), ("model", "Three.")]


def test_a_step_that_goes_on_needs_a_conversation():
    with pytest.raises(PromptEvaluationError, match="there is nothing to resume"):
        ScriptedAdapter(["Hello."]).step(prompt(), Session(), tool_results=[])


def test_a_step_after_the_models_last_word_asks_it_to_go_on():
    session, model = Session(), ScriptedAdapter(["One.", "Two."])
    model.step(prompt(), session)

    model.step(prompt(), session, tool_results=[])

    assert [role for role, _ in said(session)] == ["user", "model", "user", "model"]
