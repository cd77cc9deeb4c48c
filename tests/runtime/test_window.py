"""What the model still sees as its context window fills."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weakincentives as wink
from weakincentives.adapters import (
    ContextCompacted,
    Message,
    ModelRequest,
    ModelTurn,
    RunConfig,
    RunEvent,
    ScriptedAdapter,
    calls,
    record,
    replay,
    says,
)
from weakincentives.core.budget import Budget, TokenPrice, TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.errors import BudgetExceededError, ContextOverflow, ProviderRejected
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, ToolContext, tool
from weakincentives.runtime import (
    ContextPolicy,
    DropOldest,
    Room,
    SavedSession,
    Session,
    ShortenAndSummarize,
    ToolInvoked,
)
from weakincentives.runtime.window import size_of_prompt

# Policies


def room(tokens: int, asked: list[Sequence[Message]] | None = None) -> Room:
    """Return a room in which a byte is a token, and a request without messages has 100."""

    def count(messages: Sequence[Message]) -> int:
        sizes = (
            20 + len(each.text.encode()) + sum(len(repr(call)) for call in each.tool_calls)
            for each in messages
        )
        return 100 + sum(sizes)

    async def summarize(messages: Sequence[Message], most: int) -> str:
        if asked is not None:
            asked.append(messages)
        return f"{len(messages)} messages were here. " * 1000

    return Room(tokens, count, summarize)


def compact(policy: ContextPolicy, messages: Sequence[Message], space: Room) -> Sequence[Message]:
    return asyncio.run(policy.compact(messages, space))


def conversation(*turns: Sequence[str], task: str = "the task", written: str = "") -> list[Message]:
    """Return a conversation of turns with one call for each text, which is its result."""
    messages = [Message(role="user", text=task)]
    for number, results in enumerate(turns):
        ids = [f"call-{number}-{n}" for n in range(len(results))]
        made = tuple(ToolCall("look", {"at": number, "for": written}, each) for each in ids)
        messages.append(Message(role="model", text=f"turn {number}", tool_calls=made))
        messages += [
            Message(role="tool", text=text, call_id=each)
            for each, text in zip(ids, results, strict=True)
        ]
    return messages


texts = st.text(max_size=30).flatmap(
    lambda text: st.integers(0, 300).map(lambda times: text * times)
)
conversations = st.builds(
    lambda turns, said, task, written: with_user(
        conversation(*turns, task=task, written=written), said
    ),
    st.lists(st.lists(texts, min_size=1, max_size=3), min_size=1, max_size=12),
    st.dictionaries(st.integers(0, 12), st.text(min_size=1, max_size=20), max_size=3),
    st.text(min_size=1, max_size=50),
    st.integers(0, 400).map("w".__mul__),
)
policies = st.one_of(
    st.builds(ShortenAndSummarize, keep_turns=st.integers(1, 5), keep_chars=st.integers(10, 900)),
    st.builds(DropOldest, target=st.floats(0.2, 1.0)),
)


def with_user(messages: list[Message], said: dict[int, str]) -> list[Message]:
    """Add messages of the user after some turns."""
    made: list[Message] = []
    turn = -1
    for message in messages:
        if message.role == "model":
            if turn in said:
                made.append(Message(role="user", text=said[turn]))
            turn += 1
        made.append(message)
    return made


def assert_paired(messages: Sequence[Message]) -> None:
    waiting: list[str] = []
    for message in messages:
        if message.role == "tool":
            assert message.call_id in waiting, "a result without its call"
            waiting.remove(message.call_id)
        else:
            assert not waiting, "a call without its result"
            waiting = [call.id for call in message.tool_calls]
    assert not waiting


@settings(max_examples=100, deadline=None)
@given(messages=conversations, policy=policies, tokens=st.integers(4000, 30_000))
def test_whatever_a_policy_removes_the_rest_is_a_conversation_that_fits(
    messages: list[Message], policy: ShortenAndSummarize | DropOldest, tokens: int
) -> None:
    space = room(tokens)

    shown = compact(policy, messages, space)

    assert_paired(shown)
    assert space.count(shown) <= tokens, "it is over the limit"
    assert shown[0].role == "user"
    assert shown[0].text.startswith(messages[0].text), "the user's task is gone"
    last = max(n for n, message in enumerate(messages) if message.role == "model")
    assert [m.tool_calls for m in messages[last:]] == [
        m.tool_calls for m in shown[-len(messages[last:]) :]
    ], "the newest turn is gone"
    assert compact(policy, messages, space) == shown, "it is not deterministic"
    assert compact(policy, shown, space) == shown, "it is not idempotent"


@pytest.mark.parametrize("policy", [ShortenAndSummarize(), DropOldest()])
def test_a_conversation_that_fits_stays_as_it_is(policy: ContextPolicy) -> None:
    messages = conversation(["a"], ["b"], ["c"], ["d"])

    assert list(compact(policy, messages, room(5000))) == messages


def test_old_results_are_shortened_before_anything_is_summarized() -> None:
    asked: list[Sequence[Message]] = []
    long = "\n".join(f"line {n}" for n in range(1000))
    messages = conversation([long], [long], ["three"], ["four"], ["five"])

    shown = compact(ShortenAndSummarize(), messages, room(12_000, asked))

    assert not asked
    old = shown[2].text
    assert old.startswith("line 0\nline 1\n")
    assert 'more characters: read_result(call_id="call-0-0", offset=' in old
    assert list(shown[5:]) == messages[5:]


def test_older_turns_are_summarized_when_that_is_not_enough() -> None:
    asked: list[Sequence[Message]] = []
    messages = conversation(*([f"result {n} " * 20] for n in range(60)))

    shown = compact(ShortenAndSummarize(), messages, room(8_000, asked))

    assert len(asked) == 1
    assert "messages were here" in shown[0].text
    assert list(shown[-6:]) == messages[-6:], "the newest turns stay whole"
    assert 6 < len(shown) < 60


@pytest.mark.parametrize("policy", [ShortenAndSummarize(), DropOldest()])
def test_what_the_user_said_later_stays_word_for_word(policy: ContextPolicy) -> None:
    messages = with_user(
        conversation(*([f"result {n} " * 20] for n in range(60))), {3: "Never touch main.py!"}
    )
    space = room(8_000)

    once = compact(policy, messages, space)
    more = conversation(*([f"more {n} " * 20] for n in range(60)))[1:]
    twice = compact(policy, [*once, *more], space)

    for shown in (once, twice):
        assert "Never touch main.py!" in shown[0].text
        assert shown[0].text.count("What happened so far") == 1


@pytest.mark.parametrize("name", ["start", "target"])
@pytest.mark.parametrize("value", [0, 1.5, -1])
def test_a_share_is_between_nothing_and_all(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a share"):
        DropOldest(**{name: value})


@pytest.mark.parametrize("name", ["keep_turns", "keep_chars"])
def test_something_of_a_conversation_stays(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        ShortenAndSummarize(**{name: 0})


# Runs


@tool(reach="read")
def look(at: int) -> str:
    """Look at something long."""
    return f"What is at {at}:\n" + "\n".join(f"{at}.{n} lorem ipsum" for n in range(80))


def prompt(*tools: Any) -> Prompt[Any]:
    section = MarkdownSection(title="Rules", template="Be careful.", tools=tools or (look,))
    return Prompt(PromptTemplate(sections=[section]))


WINDOW = 4_000


def tokens_of(request: ModelRequest) -> int:
    """Count tokens as a provider would: not quite as the run estimates."""
    size = len(request.prompt.text) + sum(len(str(t.definition())) for t in request.prompt.tools)
    for message in request.messages:
        size += len(message.text) + len(str([c.params for c in message.tool_calls]))
    return size * 2 // 7


class SmallModel:
    """A model that makes a number of calls, and rejects requests that are too long."""

    def __init__(self, turns: int, *, tells: bool = True, counts: bool = True) -> None:
        self.turns = turns
        self.tells = tells
        self.counts = counts
        self.requests: list[ModelRequest] = []
        self.rejected = 0
        self.summaries = 0

    def __call__(self, request: ModelRequest) -> ModelTurn | ContextOverflow:
        tokens = tokens_of(request)
        if tokens > WINDOW:
            self.rejected += 1
            about = {"limit": WINDOW, "tokens": tokens} if self.tells else {}
            return ContextOverflow("too long", **about)
        usage = TokenUsage(input_tokens=tokens if self.counts else 0, output_tokens=10)
        if not request.prompt.tools:
            self.summaries += 1
            return says(f"Summary {self.summaries}: much was looked at.", usage=usage)
        self.requests.append(replace(request, messages=tuple(request.messages)))
        done = len(request.session[ToolInvoked]) if request.session is not None else 0
        if done >= self.turns:
            return says("Done.", usage=usage)
        return calls(("look", {"at": done}), text=f"Turn {done}.", usage=usage)

    def adapter(self, window: int | None = None) -> ScriptedAdapter:
        adapter = ScriptedAdapter([self] * 10 * (self.turns + 10))

        async def context_window() -> int | None:
            return window

        adapter.context_window = context_window  # type: ignore[method-assign]
        return adapter


NO_LIMIT = RunConfig(max_turns=None)


@pytest.mark.parametrize("window", [WINDOW, None], ids=["known", "unknown"])
@pytest.mark.parametrize("tells", [True, False], ids=["tells", "does_not_tell"])
@pytest.mark.parametrize("counts", [True, False], ids=["counts", "does_not_count"])
@pytest.mark.parametrize("policy", [ShortenAndSummarize(), DropOldest()], ids=["default", "drop"])
def test_a_run_that_is_longer_than_the_window_finishes(
    policy: ContextPolicy, window: int | None, tells: bool, counts: bool
) -> None:
    model, session, seen = SmallModel(60, tells=tells, counts=counts), Session(), list[RunEvent]()
    config = replace(NO_LIMIT, context=policy)

    response = model.adapter(window).evaluate(
        prompt(), session, message="Look around.", config=config, on_event=seen.append
    )

    assert response.text == "Done."
    assert len(session[ToolInvoked]) == 60
    compacted = [event for event in seen if isinstance(event, ContextCompacted)]
    assert tuple(compacted) == session[ContextCompacted].all()
    assert compacted
    for request in model.requests:
        assert_paired(request.messages)
        assert request.messages[0].text.startswith("Look around.")
        assert request.prompt.text.endswith("Be careful.")
    if window is not None and counts:
        assert model.rejected == 0
    assert len(session[Message]) == 1 + 2 * 60 + 1, "the session has all of it"


def test_old_pictures_are_no_longer_sent_when_the_window_is_full() -> None:
    @wink.tool(reach="read")
    def draw(n: int) -> wink.Media:
        """Draw something."""
        return wink.Media(b"\x89PNG\r\n\x1a\n" + bytes([n]), "image/png", name=f"{n}.png")

    shown: list[tuple[str, ...]] = []

    def model(request: ModelRequest) -> ModelTurn:
        media = [each for message in request.messages for each in message.media]
        shown.append(tuple(each.name for each in media))
        done = len(request.session[ToolInvoked]) if request.session is not None else 0
        return says("Done.") if done == 12 else calls(("draw", {"n": done}))

    section = MarkdownSection(title="Draw", template="Draw.", tools=[draw])
    config = RunConfig(context_window=16_000)
    ScriptedAdapter([model] * 40).evaluate(
        Prompt(PromptTemplate(sections=[section])), Session(), config=config
    )

    assert max(map(len, shown)) < 10
    assert shown[-1][-1] == "11.png", "the newest are"


def test_the_model_can_read_the_rest_of_a_shortened_result() -> None:
    class Curious(SmallModel):
        wanted = ""

        def __call__(self, request: ModelRequest) -> ModelTurn | ContextOverflow:
            if self.wanted:
                return says(request.messages[-1].text)
            cut = [m for m in request.messages if "read_result(" in m.text and m.role == "tool"]
            if not cut:
                return super().__call__(request)
            assert "read_result" in [tool.name for tool in request.prompt.tools]
            self.wanted = cut[0].call_id
            wanted = {"call_id": self.wanted, "offset": 1000, "length": 50}
            return calls(("read_result", wanted))

    model, session = Curious(60), Session()
    config = replace(NO_LIMIT, context=ShortenAndSummarize(keep_turns=1))

    response = model.adapter(WINDOW).evaluate(prompt(), session, config=config)

    (first,) = (r for r in session[ToolInvoked] if r.call_id == model.wanted)
    assert response.text.startswith(first.result.render()[1000:1050])
    assert "more characters: offset=1050]" in response.text
    assert "read_result" not in [t.name for t in model.requests[0].prompt.tools]


def test_a_result_has_a_size_cap_and_the_rest_can_be_read() -> None:
    @tool(reach="read", max_result_chars=1_000)
    def dump_all() -> str:
        """Print everything."""
        return "\n".join(f"line {n}" for n in range(1000))

    session = Session()
    seen: list[str] = []

    def read_on(request: ModelRequest) -> ModelTurn:
        seen.append(request.messages[-1].text)
        call_id = request.messages[-1].call_id
        return calls(("read_result", {"call_id": call_id, "offset": 8881}))

    def finish(request: ModelRequest) -> ModelTurn:
        seen.append(request.messages[-1].text)
        return says("Done.")

    script = ScriptedAdapter([calls("dump_all"), read_on, finish])
    script.evaluate(prompt(dump_all), session)

    assert 900 < len(seen[0]) < 1_200
    assert "[7893 more characters: read_result(call_id=" in seen[0]
    assert seen[1] == "line 999"


@pytest.mark.parametrize(
    ("arguments", "says_what"),
    [
        ({"call_id": "nobody"}, "There is no result of a call 'nobody'"),
        ({"call_id": "mine", "offset": 99_999}, "give an offset below that"),
        ({"call_id": "mine", "offset": -1}, "give an offset below that"),
        ({"call_id": "mine", "length": 0}, "a length of up to 100000"),
    ],
)
def test_a_wrong_place_in_a_result_is_explained(
    arguments: dict[str, object], says_what: str
) -> None:
    @tool(reach="read", max_result_chars=500)
    def dump_all() -> str:
        """Print everything."""
        return "x" * 2000

    session = Session()
    first = ToolCall("dump_all", {}, "mine")
    script = ScriptedAdapter([calls(first), calls(("read_result", arguments)), "Done."])

    script.evaluate(prompt(dump_all), session)

    answered = session[ToolInvoked].latest()
    assert answered is not None
    assert not answered.success
    assert says_what in answered.result.message


def test_a_tool_of_the_user_called_read_result_stays() -> None:
    @tool(reach="read")
    def read_result() -> str:
        """Mine."""
        return "mine"

    @tool(reach="read", max_result_chars=500)
    def dump_all() -> str:
        """Print everything."""
        return "x" * 2000

    session = Session()
    script = ScriptedAdapter([calls("dump_all"), calls("read_result"), "Done."])

    script.evaluate(prompt(dump_all, read_result), session)

    last = session[ToolInvoked].latest()
    assert last is not None
    assert last.result.value == "mine"


def test_without_a_policy_everything_is_sent() -> None:
    model = SmallModel(60)

    with pytest.raises(ContextOverflow, match="too long"):
        model.adapter(WINDOW).evaluate(prompt(), Session(), config=replace(NO_LIMIT, context=None))

    assert model.summaries == 0


def test_a_run_that_died_of_its_length_can_be_resumed() -> None:
    model, session = SmallModel(60), Session()
    with pytest.raises(ContextOverflow):
        model.adapter().evaluate(prompt(), session, config=replace(NO_LIMIT, context=None))

    response = model.adapter().evaluate(prompt(), session, resume=True, config=NO_LIMIT)

    assert response.text == "Done."
    assert session[ContextCompacted].all()[0].was_rejected


def test_a_task_that_is_too_long_is_reported_not_repeated() -> None:
    model = SmallModel(1)

    with pytest.raises(ContextOverflow, match="too long"):
        model.adapter(WINDOW).evaluate(prompt(), Session(), message="x" * 100_000)

    assert model.rejected <= 3


def test_a_summary_counts_against_the_budget() -> None:
    model, session = SmallModel(60), Session()

    response = model.adapter(WINDOW).evaluate(prompt(), session, config=NO_LIMIT)

    told = [m.usage for m in session[Message] if m.usage is not None]
    summaries = [each.usage for each in session[ContextCompacted]]
    assert response.usage == sum((*told, *summaries), TokenUsage())
    assert model.summaries == len([each for each in summaries if each.input_tokens])


def test_a_resumed_run_sends_the_same_requests(tmp_path: Path) -> None:
    """Interrupted at every request, summaries included: each is asked as it would have been."""
    whole = SmallModel(30)
    whole.adapter(WINDOW).evaluate(prompt(), Session(), config=NO_LIMIT)

    model, path = SmallModel(30), tmp_path / "run.jsonl"
    SavedSession.create(path, Session()).close()
    asked = 0
    finished = False
    while not finished:
        with SavedSession.open(path) as saved:
            script = interrupted_after(model, 3)
            begun = saved.session[Message].latest() is not None
            try:
                script.evaluate(prompt(), saved.session, resume=begun, config=NO_LIMIT)
                finished = True
            except KeyboardInterrupt:
                asked += 1

    assert asked > 10
    assert [comparable(r) for r in unique(model.requests)] == [
        comparable(r) for r in whole.requests
    ]


def interrupted_after(model: SmallModel, turns: int) -> ScriptedAdapter:
    left = turns

    def ask(request: ModelRequest) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return model(request)

    adapter = ScriptedAdapter([ask] * 100)

    async def context_window() -> int:
        return WINDOW

    adapter.context_window = context_window  # type: ignore[method-assign]
    return adapter


def comparable(request: ModelRequest) -> list[tuple[str, str, int]]:
    return [
        (m.role, re.sub(r"call_[0-9a-f]+_\d+", "call", m.text), len(m.tool_calls))
        for m in request.messages
    ]


def unique(requests: Sequence[ModelRequest]) -> list[ModelRequest]:
    found: dict[int, ModelRequest] = {}
    for request in requests:
        done = len([m for m in request.messages if m.role == "tool"])
        last = request.messages[-1].text
        found.setdefault(hash((done, last)), request)
    return list(found.values())


def test_a_recording_of_a_long_run_replays(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    model = SmallModel(40)
    record(model.adapter(WINDOW), path).evaluate(prompt(), Session(), config=NO_LIMIT)

    session = Session()
    player = replay(path, strict=True)
    response = player.evaluate(prompt(), session, config=NO_LIMIT)

    assert response.text == "Done."
    assert player.divergence is None
    assert model.summaries
    assert len([each for each in session[ContextCompacted] if each.summary]) == model.summaries


def test_a_recorded_rejection_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "rejected.jsonl"
    model = SmallModel(40)
    record(model.adapter(None), path).evaluate(prompt(), Session(), config=NO_LIMIT)
    assert model.rejected

    player = replay(path, strict=True)

    assert player.evaluate(prompt(), Session(), config=NO_LIMIT).text == "Done."


class Wrong:
    """A policy with a bug."""

    start = 0.5

    def __init__(self, choose: Callable[[Sequence[Message]], Sequence[Message]]) -> None:
        self._choose = choose

    async def compact(self, messages: Sequence[Message], room: Room) -> Sequence[Message]:
        return self._choose(messages)


@pytest.mark.parametrize(
    ("choose", "problem"),
    [
        (lambda messages: messages[1:], "must keep the first message"),
        (lambda messages: (), "must keep the first message"),
        (lambda messages: messages[:-1], "removed the result of"),
        (lambda messages: [messages[0], *messages[2:]], "removed the call of"),
    ],
)
def test_a_policy_that_breaks_the_conversation_is_refused(
    choose: Callable[[Sequence[Message]], Sequence[Message]], problem: str
) -> None:
    model = SmallModel(60)

    with pytest.raises(ValueError, match=f"a context policy {problem}"):
        model.adapter(WINDOW).evaluate(
            prompt(), Session(), config=replace(NO_LIMIT, context=Wrong(choose))
        )


def test_an_estimate_costs_what_is_new_not_what_there_is() -> None:
    """Sizes are added up: a message is measured when it is added and when it is compacted."""
    measured: list[int] = []

    class Text(str):
        __slots__ = ()

        def isascii(self) -> bool:
            measured.append(1)
            return super().isascii()

    def turn(request: ModelRequest) -> ModelTurn:
        done = sum(m.role == "model" for m in request.messages)
        if done == 200:
            return says("Done.")
        return calls(("note", {}), text=Text("x" * 50))

    @tool(reach="read")
    def note(*, context: ToolContext) -> str:
        """Note."""
        return "noted"

    ScriptedAdapter([turn] * 201).evaluate(
        prompt(note), Session(), config=replace(NO_LIMIT, context_window=1_000_000)
    )

    assert len(measured) <= 2 * 201


# Money


def test_a_limit_in_money_that_cannot_be_checked_is_refused_at_the_start() -> None:
    session = Session()

    with pytest.raises(ValueError, match="the price of scripted is unknown; give Budget"):
        ScriptedAdapter(["Hello."]).evaluate(prompt(), session, budget=Budget(max_cost_usd=1))

    assert session[Message].all() == ()


def test_a_run_that_spends_too_much_is_stopped() -> None:
    model, session = SmallModel(60), Session()
    price = TokenPrice(input=10, output=10)

    with pytest.raises(
        BudgetExceededError, match=r"Spent \$0\.1\d+; the budget is \$0\.1"
    ) as stopped:
        model.adapter(WINDOW).evaluate(
            prompt(), session, config=NO_LIMIT, budget=Budget(max_cost_usd=0.1, price=price)
        )

    assert stopped.value.response is not None
    assert 10_000 < stopped.value.response.usage.total_tokens < 15_000


def test_a_conversation_that_was_rewound_is_not_shown_as_it_was_compacted_before() -> None:
    """A record of other messages than those that the conversation has now does not apply."""
    model, session = SmallModel(30), Session()
    model.adapter(WINDOW).evaluate(prompt(), session, config=NO_LIMIT)
    last = session[ContextCompacted].latest()
    assert last is not None
    session.dispatch(replace(last, digest=last.digest + 1, shown=(0,)))

    seen = ScriptedAdapter(["Still here."])
    seen.evaluate(prompt(), session, message="And?", resume=True, config=NO_LIMIT)

    assert seen.last_request is not None
    assert len(seen.last_request.messages) > 2
    assert_paired(seen.last_request.messages)


def last_text(seen: list[str]) -> Callable[[ModelRequest], ModelTurn]:
    def finish(request: ModelRequest) -> ModelTurn:
        seen.append(request.messages[-1].text)
        return says("Done.")

    return finish


@tool(reach="read", max_result_chars=1_000)
def print_all() -> str:
    """Print everything."""
    return "\n".join(f"line {n}" for n in range(1000))


def test_a_recorded_answer_has_the_size_cap_of_its_tool_after_a_kill(tmp_path: Path) -> None:
    path, killed, seen = tmp_path / "run.jsonl", tmp_path / "killed.jsonl", list[str]()
    with SavedSession.create(path, Session()) as saved:
        saved.session.dispatcher.subscribe(
            ToolInvoked, lambda _: killed.write_bytes(path.read_bytes())
        )
        script = ScriptedAdapter([calls("print_all"), last_text(seen)])
        script.evaluate(prompt(print_all), saved.session)
    with SavedSession.open(killed) as saved:
        script = ScriptedAdapter([last_text(seen)])
        script.evaluate(prompt(print_all), saved.session, resume=True)

    assert seen[0] == seen[1]


def test_a_result_that_is_given_to_a_step_has_the_size_cap_of_its_tool() -> None:
    session, seen = Session(), list[str]()
    script = ScriptedAdapter([calls("print_all"), last_text(seen)])
    turn = script.step(prompt(print_all), session)

    results = [wink.execute_tool(call, session=session) for call in turn.tool_calls]
    script.step(prompt(print_all), session, tool_results=results)

    assert len(seen[0]) < 1_200


def test_a_resumed_run_offers_the_same_tools(tmp_path: Path) -> None:
    """Also once the shortened result is no longer shown."""
    offered: dict[int, list[str]] = {}

    def model(request: ModelRequest) -> ModelTurn:
        assert request.session is not None
        done = len(request.session[ToolInvoked])
        offered[done] = [each.name for each in request.prompt.tools]
        if done == 15:
            return says("Done.")
        return calls(("look", {"at": done})) if done else calls("print_all")

    config = RunConfig(context_window=WINDOW, context=DropOldest())
    ScriptedAdapter([model] * 20).evaluate(prompt(look, print_all), Session(), config=config)
    whole = dict(offered)
    with SavedSession.create(tmp_path / "run.jsonl", Session()) as saved:
        script = ScriptedAdapter([model] * 14)
        with pytest.raises(ProviderRejected):
            script.evaluate(prompt(look, print_all), saved.session, config=config)
    with SavedSession.open(tmp_path / "run.jsonl") as saved:
        script = ScriptedAdapter([model] * 20)
        script.evaluate(prompt(look, print_all), saved.session, config=config)

    assert offered == whole
    assert whole[15] == ["look", "print_all", "read_result"]


def test_the_size_of_a_prompt_includes_its_media() -> None:
    document = wink.Media(b"%PDF-" + b"x" * 30_000)
    section = MarkdownSection(title="Rules", template="Be careful.", media=[document])
    rendered = Prompt(PromptTemplate(sections=[section])).render(Session())

    assert size_of_prompt(rendered) > 15_000
