"""Spans as OpenTelemetry's own SDK collects them."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

import weakincentives as wink
from weakincentives.adapters import RunConfig, ScriptedAdapter, calls, says
from weakincentives.core.budget import TokenUsage
from weakincentives.core.call import RunContext
from weakincentives.core.clock import FakeClock
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import (
    DeadlineExceededError,
    MissingExtra,
    ProviderRejected,
    ProviderThrottled,
    TurnLimitExceeded,
)
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    CascadeEffect,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    SectionVisibility,
)
from weakincentives.retry import RetryPolicies, RetryPolicy
from weakincentives.runtime import (
    Session,
    ShortenAndSummarize,
    ToolCall,
    ToolInvoked,
    ToolRegistry,
    execute_tool,
    execute_tools,
    sequence,
)
from weakincentives.telemetry import instrument


@dataclass
class Trace:
    """What was exported, by the names of the spans."""

    provider: TracerProvider
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    @property
    def tree(self) -> list[str]:
        """Names in the order of their start, each indented below the span it belongs to."""
        by_id = {span.context.span_id: span for span in self.spans}

        def depth(span: ReadableSpan) -> int:
            return 0 if span.parent is None else 1 + depth(by_id[span.parent.span_id])

        return ["  " * depth(span) + span.name for span in self.spans]

    def one(self, name: str) -> ReadableSpan:
        (found,) = (span for span in self.spans if span.name == name)
        return found

    def attributes(self, name: str) -> dict[str, Any]:
        return dict(self.one(name).attributes or {})


@pytest.fixture
def traced() -> Iterator[Callable[..., Trace]]:
    """Switch telemetry on; it is off again afterwards."""
    stops: list[Callable[[], None]] = []

    def start(**options: Any) -> Trace:
        trace = Trace(TracerProvider())
        stops.append(instrument(tracer_provider=trace.provider, **options))
        return trace

    yield start
    for stop in stops:
        stop()


@wink.tool(reach="reversible")
def note(text: str, *, context: wink.ToolContext) -> str:
    """Write a note down."""
    context.filesystem.write("note.txt", text)
    return f"noted {text}"


@wink.tool(reach="reversible")
def write_file(path: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, "new")
    return "written"


@wink.tool(reach="reversible")
def spoil(text: str, *, context: wink.ToolContext) -> str:
    """Write a note down, and fail."""
    context.filesystem.write("note.txt", text)
    raise ValueError(f"no {text} please")


def prompt_with(*tools: Any, policies: Any = (), **options: Any) -> Prompt[Any]:
    section = wink.MarkdownSection(
        title="Desk", template="Take notes.", tools=list(tools), policies=policies
    )
    template = PromptTemplate(sections=[section], name="clerk", **options)
    files = MemoryFilesystem({"a.txt": "old"})
    return Prompt(template).bind(resources={Filesystem: files})


def desk(*tools: Any, **options: Any) -> Session:
    session = Session(clock=FakeClock())
    prompt_with(*tools, **options).render(session)
    return session


# The tree


def test_a_run_holds_its_turns_and_calls(traced: Callable[..., Trace]):
    seen = traced()
    model = ScriptedAdapter([calls(("note", {"text": "milk"})), says("Done.")])

    model.evaluate(prompt_with(note), Session())

    assert seen.tree == ["invoke_agent clerk", "  chat", "  execute_tool note", "  chat"]
    kinds = [span.kind for span in seen.spans]
    assert kinds == [SpanKind.INTERNAL, SpanKind.CLIENT, SpanKind.INTERNAL, SpanKind.CLIENT]
    assert all(span.status.status_code is StatusCode.UNSET for span in seen.spans)


def test_an_async_run_has_the_same_tree(traced: Callable[..., Trace]):
    seen = traced()
    model = ScriptedAdapter([calls(("note", {"text": "milk"})), says("Done.")])

    asyncio.run(model.aevaluate(prompt_with(note), Session()))

    assert seen.tree == ["invoke_agent clerk", "  chat", "  execute_tool note", "  chat"]


def test_one_step_is_a_turn_without_a_run(traced: Callable[..., Trace]):
    seen = traced()

    ScriptedAdapter([says("Hello.")]).step(prompt_with(note), Session())

    assert seen.tree == ["chat"]


def test_a_call_without_a_model_has_its_span_below_the_caller_s(traced: Callable[..., Trace]):
    seen = traced()
    tools = ToolRegistry([note], resources={Filesystem: MemoryFilesystem()})

    with seen.provider.get_tracer("mine").start_as_current_span("mine"):
        tools.execute("note", {"text": "milk"})
        execute_tool(ToolCall("note", {"text": "milk"}), session=desk(note))

    assert seen.tree == ["mine", "  execute_tool note", "  execute_tool note"]


@pytest.mark.parametrize("how", ["sync", "async", "thread", "timeout", "deadline"])
def test_what_a_handler_traces_is_below_its_call(traced: Callable[..., Trace], how: str):
    seen = traced()
    tracer = seen.provider.get_tracer("handler")

    def work(*, context: wink.ToolContext) -> str:
        """Work."""
        with tracer.start_as_current_span("work"):
            return "worked"

    async def awork(*, context: wink.ToolContext) -> str:
        """Work."""
        await asyncio.sleep(0)
        return work(context=context)

    options = {"thread": {"concurrent": True}, "timeout": {"timeout": 600}}.get(how, {})
    busy = wink.tool(awork if how == "async" else work, name="busy", reach="read", **options)
    limit = Deadline.after(600) if how == "deadline" else None
    turn = calls("busy", "busy") if how in ("async", "thread") else calls("busy")

    ScriptedAdapter([turn, "Done."]).evaluate(prompt_with(busy), Session(), deadline=limit)

    below = {span.parent.span_id for span in seen.spans if span.name == "work" and span.parent}
    tools = {span.context.span_id for span in seen.spans if span.name == "execute_tool busy"}
    assert below == tools
    assert len(tools) == len(turn.tool_calls)


def test_calls_that_run_together_each_have_their_own_span(traced: Callable[..., Trace]):
    """One that is taken again is still one call, and says what came in its way."""
    seen = traced()

    @dataclass(frozen=True)
    class Stock:
        pieces: int

    @wink.tool(reach="reversible")
    async def sell(pieces: int, *, context: wink.ToolContext) -> str:
        """Sell some."""
        stock = context.session[Stock].latest()
        assert stock is not None
        await asyncio.sleep(0)
        context.session[Stock].seed(Stock(stock.pieces - pieces))
        return "sold"

    session = desk(sell)
    session[Stock].seed(Stock(10))
    execute_tools([ToolCall("sell", {"pieces": n}) for n in (1, 2, 3)], session=session)

    assert session[Stock].latest() == Stock(4)
    assert seen.tree == ["execute_tool sell"] * 3
    found = [dict(span.attributes or {}) for span in seen.spans]
    assert [each["wink.taken"] for each in found] == [1, 2, 2]
    assert [each.get("wink.conflicts") for each in found] == [None, ("Stock",), ("Stock",)]


def test_the_members_of_a_composed_tool_are_below_it(traced: Callable[..., Trace]):
    seen = traced()
    both = sequence([note, spoil], name="both")

    execute_tool(ToolCall("both", {"text": "milk"}), session=desk(both))

    assert seen.tree == ["execute_tool both", "  execute_tool note", "  execute_tool spoil"]
    outcomes = [dict(span.attributes or {})["wink.outcome"] for span in seen.spans]
    assert outcomes == ["rolled back", "committed", "rolled back"]


def test_a_call_from_a_thread_of_a_handler_is_below_the_handler_s(traced: Callable[..., Trace]):
    seen = traced()

    @wink.tool(reach="reversible")
    def delegate(*, context: wink.ToolContext) -> str:
        """Let a thread do it."""
        thread = threading.Thread(target=lambda: note({"text": "milk"}, context=context))
        thread.start()
        thread.join()
        return "delegated"

    execute_tool(ToolCall("delegate"), session=desk(delegate, note))

    assert seen.tree == ["execute_tool delegate", "  execute_tool note"]


def test_nothing_is_kept_of_a_span_that_has_ended(traced: Callable[..., Trace]):
    seen = traced()
    spans: list[weakref.ref[Any]] = []

    @wink.tool(reach="read")
    def look(*, context: wink.ToolContext) -> str:
        """Look."""
        spans.append(weakref.ref(get_current_span()))
        return "seen"

    execute_tool(ToolCall("look"), session=desk(look))
    seen.exporter.clear()
    gc.collect()

    assert [span() for span in spans] == [None]


def test_what_a_commit_sets_off_is_below_the_call(traced: Callable[..., Trace]):
    seen = traced()
    cascade = CascadeEffect(trigger_tool="note", arguments={"text": "more"})
    starts = wink.tool(lambda *, context: "ok", name="starts", description="S.", effects=[cascade])

    execute_tool(ToolCall("starts"), session=desk(starts, note))

    assert seen.tree == ["execute_tool starts", "  execute_tool note"]


# What a call's span says


def test_a_success_says_that_it_was_committed(traced: Callable[..., Trace]):
    seen = traced()
    session = desk(note, policies=[ReadBeforeWritePolicy()])
    call = ToolCall("note", {"text": "milk"})

    execute_tool(call, session=session)

    assert seen.attributes("execute_tool note") == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "note",
        "gen_ai.tool.call.id": call.id,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.description": "Write a note down.",
        "gen_ai.conversation.id": session.session_id,
        "wink.reach": "reversible",
        "wink.outcome": "committed",
        "wink.attempts": 1,
        "wink.taken": 1,
        "wink.policy.decision": "allowed",
    }


def test_a_denial_says_who_denied_and_why(traced: Callable[..., Trace]):
    seen = traced()
    session = desk(write_file, policies=[ReadBeforeWritePolicy()])

    execute_tool(ToolCall("write_file", {"path": "a.txt"}), session=session)

    found = seen.attributes("execute_tool write_file")
    assert found["wink.policy.decision"] == "denied"
    assert found["wink.policy.name"] == ReadBeforeWritePolicy().name
    assert found["wink.policy.reason"] == "Cannot write to a.txt without reading it first"
    assert found["wink.outcome"] == "denied"
    assert found["error.type"] == "POLICY_DENIED"
    assert "wink.undone" not in found
    assert seen.one("execute_tool write_file").status.status_code is StatusCode.ERROR


def test_the_record_names_the_policy_that_denied_also_when_it_broke():
    class Broken:
        name = "broken"

        def check(self, tool: Any, params: Any, *, context: Any) -> Any:
            raise OSError("no disk")

    session = desk(note, policies=[Broken()])

    execute_tool(ToolCall("note", {"text": "milk"}), session=session)

    assert [record.denied_by for record in session[ToolInvoked].all()] == ["broken"]


def test_a_failure_says_what_was_undone(traced: Callable[..., Trace]):
    seen = traced()

    execute_tool(ToolCall("spoil", {"text": "milk"}), session=desk(spoil))

    found = seen.attributes("execute_tool spoil")
    assert found["wink.outcome"] == "rolled back"
    assert found["wink.undone"] == ("session", "Filesystem")
    assert found["error.type"] == "VALIDATION_FAILED"
    assert "wink.policy.decision" not in found  # nobody was asked


def test_what_could_not_be_undone_is_said(traced: Callable[..., Trace]):
    seen = traced()

    @wink.tool(reach="irreversible")
    def send(*, context: wink.ToolContext) -> str:
        """Send it."""
        raise ValueError("lost on the way")

    execute_tool(ToolCall("send"), session=desk(send))

    (not_undone,) = seen.attributes("execute_tool send")["wink.not_undone"]
    assert "outside" in not_undone


def test_all_attempts_of_a_call_are_one_span(traced: Callable[..., Trace]):
    seen = traced()
    answers = iter([ConnectionError("gone"), ConnectionError("gone"), "there"])

    @wink.tool(reach="reversible", retry=RetryPolicy(max_retries=5))
    def fetch(*, context: wink.ToolContext) -> str:
        """Fetch it."""
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    execute_tool(ToolCall("fetch"), session=desk(fetch))

    found = seen.attributes("execute_tool fetch")
    assert (found["wink.attempts"], found["wink.outcome"]) == (3, "committed")
    assert "error.type" not in found


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (ToolCall("nothing_like_it"), "TOOL_NOT_FOUND"),
        (ToolCall("note", {"text": 3}), "INVALID_ARGUMENTS"),
        (ToolCall("note", "{not json"), "INVALID_ARGUMENTS"),
    ],
)
def test_a_refusal_has_a_span_like_any_other(
    traced: Callable[..., Trace], call: ToolCall, code: str
):
    seen = traced()

    execute_tool(call, session=desk(note))

    found = seen.attributes(f"execute_tool {call.name}")
    assert (found["wink.outcome"], found["error.type"]) == ("refused", code)


def test_opening_a_section_is_no_error(traced: Callable[..., Trace]):
    seen = traced()
    section = wink.MarkdownSection(
        title="Desk",
        template="Take notes.",
        summary="About notes.",
        tools=[note],
        visibility=SectionVisibility.SUMMARY,
    )
    prompt = Prompt(PromptTemplate(sections=[section], name="clerk"))
    opens = ("open_sections", {"section_keys": ["desk"], "reason": "to write"})

    ScriptedAdapter([calls(opens), "Done."]).evaluate(prompt, Session())

    assert seen.tree == ["invoke_agent clerk", "  chat", "  execute_tool open_sections", "  chat"]
    assert all(span.status.status_code is StatusCode.UNSET for span in seen.spans)


# What the spans of runs and turns say


def test_tools_are_told_the_trace_that_they_are_in(traced: Callable[..., Trace]):
    seen = traced()
    told: list[str] = []

    @wink.tool
    def look(*, context: wink.ToolContext) -> None:
        """Look around."""
        told.append(context.trace_id)

    for ids in (None, RunContext(trace_id="t" * 32)):
        model = ScriptedAdapter([calls("look"), says("Done.")])
        model.evaluate(prompt_with(look), Session(), run_context=ids)

    (span, _) = [each for each in seen.spans if each.name.startswith("invoke_agent")]
    assert told == [f"{span.context.trace_id:032x}", "t" * 32]


def test_a_run_says_who_ran_and_what_it_used(traced: Callable[..., Trace]):
    seen = traced()
    session = Session()
    model = ScriptedAdapter(
        [
            calls(("note", {"text": "milk"}), usage=TokenUsage(input_tokens=5, output_tokens=2)),
            says("Done.", usage=TokenUsage(input_tokens=9, output_tokens=1)),
        ]
    )
    ids = RunContext(run_id="run-1", loop_id="loop-1", agent_id="agent-1")

    model.evaluate(prompt_with(note), session, run_context=ids)

    assert seen.attributes("invoke_agent clerk") == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "scripted",
        "gen_ai.agent.name": "clerk",
        "gen_ai.agent.id": "agent-1",
        "gen_ai.conversation.id": session.session_id,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 14,
        "gen_ai.usage.output_tokens": 3,
        "wink.run.id": "run-1",
        "wink.loop.id": "loop-1",
        "wink.prompt.ns": "default",
        "wink.prompt.key": "clerk",
        "wink.turns": 2,
        "wink.calls": 1,
    }


def test_a_turn_says_which_model_was_asked_and_which_answered(traced: Callable[..., Trace]):
    seen = traced()
    session = Session()
    usage = TokenUsage(input_tokens=5, output_tokens=2)
    model = ScriptedAdapter([says("Cut o", model="tiny-2", stop_reason="max_tokens", usage=usage)])
    model.model = "tiny"  # type: ignore[attr-defined]  # as adapters of providers have it

    model.evaluate(prompt_with(note), session)

    assert seen.attributes("chat tiny") == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "scripted",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny-2",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.conversation.id": session.session_id,
        "gen_ai.output.type": "text",
        "wink.attempts": 1,
    }


def test_a_provider_that_is_asked_again_is_one_turn(traced: Callable[..., Trace]):
    seen = traced()
    model = ScriptedAdapter([ProviderThrottled("slow down", retry_after=7), says("Done.")])

    model.evaluate(prompt_with(note), Session(clock=FakeClock()))

    assert seen.tree == ["invoke_agent clerk", "  chat"]
    assert seen.attributes("chat")["wink.attempts"] == 2
    (event,) = seen.one("chat").events
    assert event.name == "wink.retry"
    assert dict(event.attributes or {}) == {"error.type": "RATE_LIMIT", "wink.retry.wait": 7}


@pytest.mark.parametrize("content", [False, True])
def test_reported_progress_is_noted_in_the_span_of_the_call(
    traced: Callable[..., Trace], content: bool
):
    @wink.tool(reach="read")
    def copy(*, context: wink.ToolContext) -> str:
        """Copy files."""
        context.report("secret.txt", done=1, total=2)
        return "copied"

    seen = traced(content=content)

    ScriptedAdapter([calls(("copy", {})), says("Done.")]).evaluate(prompt_with(copy), Session())

    (event,) = seen.one("execute_tool copy").events
    assert event.name == "wink.progress"
    told = {"message": "secret.txt"} if content else {}
    assert dict(event.attributes or {}) == {"wink.progress": 1, "wink.progress.total": 2, **told}


@pytest.mark.parametrize("content", [False, True])
def test_a_full_context_window_is_noted_in_the_span_of_the_run(
    traced: Callable[..., Trace], content: bool
):
    @wink.tool(reach="read")
    def read(*, context: wink.ToolContext) -> str:
        """Read much."""
        return "word " * 1000

    seen = traced(content=content)
    turns = [calls("read")] * 8
    model = ScriptedAdapter([*turns, says("A summary."), says("Done.")])

    config = RunConfig(context_window=15_000, context=ShortenAndSummarize(target=0.1))
    model.evaluate(prompt_with(read), Session(), config=config)

    (event,) = seen.one("invoke_agent clerk").events
    assert event.name == "wink.context_compacted"
    sizes = dict(event.attributes or {})
    assert sizes.pop("wink.tokens.after") < sizes.pop("wink.tokens.before")
    assert sizes == ({"summary": "A summary."} if content else {})


def test_a_provider_error_ends_turn_and_run(traced: Callable[..., Trace]):
    seen = traced()
    model = ScriptedAdapter([calls(("note", {"text": "milk"})), ProviderRejected("wrong key")])

    with pytest.raises(ProviderRejected):
        model.evaluate(prompt_with(note), Session(), config=RunConfig(retry=RetryPolicies.NONE))

    *_, last = seen.spans
    assert (last.name, dict(last.attributes or {})["error.type"]) == ("chat", "ProviderRejected")
    run = seen.attributes("invoke_agent clerk")
    assert (run["error.type"], run["wink.turns"], run["wink.calls"]) == ("ProviderRejected", 2, 1)
    assert "gen_ai.response.finish_reasons" not in run
    assert seen.one("invoke_agent clerk").status.status_code is StatusCode.ERROR


def test_a_limit_is_an_error_of_the_run_alone(traced: Callable[..., Trace]):
    seen = traced()
    model = ScriptedAdapter([calls(("note", {"text": "milk"}))])

    with pytest.raises(TurnLimitExceeded):
        model.evaluate(prompt_with(note), Session(), config=RunConfig(max_turns=1))

    failed = [span.name for span in seen.spans if span.status.status_code is StatusCode.ERROR]
    assert failed == ["invoke_agent clerk"]


def test_a_deadline_shows_where_it_struck(traced: Callable[..., Trace]):
    seen = traced()
    clock = FakeClock()

    @wink.tool(reach="reversible")
    def dawdle(*, context: wink.ToolContext) -> str:
        """Take long."""
        clock.advance(100)
        context.deadline.check()
        return "late"

    with pytest.raises(DeadlineExceededError):
        ScriptedAdapter([calls("dawdle")]).evaluate(
            prompt_with(dawdle), Session(clock=clock), deadline=Deadline.after(60, clock=clock)
        )

    assert seen.attributes("execute_tool dawdle")["error.type"] == "DEADLINE_EXCEEDED"
    assert seen.attributes("execute_tool dawdle")["wink.outcome"] == "rolled back"
    assert seen.attributes("invoke_agent clerk")["error.type"] == "DeadlineExceededError"


# Content


def everything(seen: Trace) -> str:
    return "\n".join(span.to_json() for span in seen.spans)


def busy_run() -> None:
    """A run in which a word passes through every place where content could leak from."""
    model = ScriptedAdapter(
        [
            calls(("note", {"text": "SECRET"}), text="SECRET"),
            calls(("spoil", {"text": "SECRET"}), ("note", {"text": ["SECRET"]})),
            ProviderRejected("SECRET"),
        ]
    )
    section = wink.MarkdownSection(title="Desk", template="SECRET", tools=[note, spoil])
    prompt = Prompt(PromptTemplate(sections=[section], name="clerk"))
    files = {Filesystem: MemoryFilesystem()}
    with pytest.raises(ProviderRejected):
        model.evaluate(prompt.bind(resources=files), Session(), message="SECRET")


def test_nothing_that_anybody_wrote_is_in_the_spans(traced: Callable[..., Trace]):
    seen = traced()

    busy_run()

    assert len(seen.spans) == 7
    assert "SECRET" not in everything(seen)


def test_content_is_there_when_it_is_asked_for(traced: Callable[..., Trace]):
    seen = traced(content=True)

    busy_run()

    run, first, noted, second, spoilt, refused, last = seen.spans
    said = dict(second.attributes or {})
    assert json.loads(said["gen_ai.system_instructions"])[0]["content"].endswith("SECRET")
    begin, asked, answered = json.loads(said["gen_ai.input.messages"])
    assert begin == {"role": "user", "parts": [{"type": "text", "content": "SECRET"}]}
    text, call = asked["parts"]
    assert (asked["role"], text["content"]) == ("assistant", "SECRET")
    assert (call["type"], call["name"]) == ("tool_call", "note")
    assert call["arguments"] == {"text": "SECRET"}
    answer = {"type": "tool_call_response", "id": call["id"], "response": "noted SECRET"}
    assert answered == {"role": "tool", "parts": [answer]}
    (output,) = json.loads(said["gen_ai.output.messages"])
    assert (output["role"], output["finish_reason"]) == ("assistant", "tool_call")
    assert [each["name"] for each in json.loads(said["gen_ai.tool.definitions"])] == [
        "note",
        "spoil",
    ]
    done = dict(noted.attributes or {})
    assert json.loads(done["gen_ai.tool.call.arguments"]) == {"text": "SECRET"}
    assert done["gen_ai.tool.call.result"] == "noted SECRET"
    assert spoilt.status.description == "no SECRET please"
    assert "SECRET" in str(refused.status.description)
    assert run.status.description == last.status.description == "SECRET"
    assert dict(first.attributes or {})["gen_ai.response.finish_reasons"] == ("tool_call",)


# By the conventions, and switched on and off


def test_every_name_is_one_of_the_conventions_or_our_own(traced: Callable[..., Trace]):
    seen = traced(content=True)
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}

    busy_run()

    names = {name for span in seen.spans for name in span.attributes or {}}
    ours = {name for name in names if name.startswith("wink.")}
    assert names - ours - known == {"error.type"}
    assert len(ours) > 5


def test_switched_off_there_are_no_more_spans():
    seen = Trace(TracerProvider())
    stop = instrument(tracer_provider=seen.provider)
    session = desk(note)
    execute_tool(ToolCall("note", {"text": "milk"}), session=session)

    stop()
    execute_tool(ToolCall("note", {"text": "milk"}), session=session)

    assert seen.tree == ["execute_tool note"]


def test_the_last_to_switch_it_on_has_it(traced: Callable[..., Trace]):
    """What the first was given to switch it off does not switch off the second."""
    first = Trace(TracerProvider())
    stop_first = instrument(tracer_provider=first.provider)
    second = traced()

    stop_first()
    execute_tool(ToolCall("note", {"text": "milk"}), session=desk(note))

    assert (first.tree, second.tree) == ([], ["execute_tool note"])


def test_a_trace_that_is_not_sampled_costs_the_call_nothing(traced: Callable[..., Trace]):
    unsampled = Trace(TracerProvider(sampler=ALWAYS_OFF))
    stop = instrument(tracer_provider=unsampled.provider, content=True)

    result = execute_tool(ToolCall("note", {"text": "milk"}), session=desk(note))
    stop()

    assert result.success
    assert unsampled.tree == []


PROGRAM = """
import sys
from weakincentives import MarkdownSection, Prompt, PromptTemplate, Session, tool
from weakincentives.adapters import ScriptedAdapter, calls
import weakincentives.telemetry

@tool(reach="read")
def look(*, context) -> str:
    "Look."
    return "seen"

prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="Work", tools=[look])]))
print(ScriptedAdapter([calls("look"), "Done."]).evaluate(prompt, Session()).text)
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_switched_off_nothing_of_opentelemetry_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )

    assert done.stdout.split("\n")[:2] == ["Done.", "[]"]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)

    with pytest.raises(MissingExtra, match=r"pip install .*\[otel\]"):
        instrument()


def test_the_example_prints_its_trace():
    program = Path(__file__).parents[1] / "examples" / "traced_run.py"

    shown = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True
    ).stdout

    assert "execute_tool write_file   denied, Cannot write to plan.txt" in shown
    assert "execute_tool publish      rolled back, session, Filesystem" in shown
    assert shown.splitlines()[-1].startswith("invoke_agent editor")
