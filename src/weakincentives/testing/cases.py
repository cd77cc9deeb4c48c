"""What every adapter must do, a function each: tools, the model's turns, what must come of them.

They stand in the order of ``adapter_cases``; their docstrings say what is promised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

from weakincentives.adapters.scripted import calls, says
from weakincentives.budget import Budget, TokenUsage
from weakincentives.call import ToolCall
from weakincentives.deadlines import Deadline
from weakincentives.errors import (
    BudgetExceededError,
    CallLimitExceeded,
    DeadlineExceededError,
    MalformedResponse,
    OutputParseError,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
    ToolValidationError,
    TurnLimitExceeded,
)
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.decorator import tool
from weakincentives.prompt.section import MarkdownSection, SectionVisibility
from weakincentives.runtime.conversation import (
    ModelTurn,
    Retrying,
    RunEvent,
    TextDelta,
    TurnStarted,
)
from weakincentives.runtime.evaluation import RunConfig
from weakincentives.runtime.events import ToolInvoked
from weakincentives.runtime.tool_call import execute_tool
from weakincentives.testing.conformance import AdapterCase, Note, Trial, fail, same

__all__ = ["adapter_cases"]

_CASES: list[AdapterCase] = []


def adapter_cases() -> tuple[AdapterCase, ...]:
    """Return what every adapter must do; run ``case.check(make_adapter)`` with each.

    ``make_adapter`` gets what the model shall answer with, turn by turn: see ``MakeAdapter``.
    """
    return tuple(_CASES)


def _case(name: str) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    def add(body: Callable[[Trial], None]) -> Callable[[Trial], None]:
        _CASES.append(AdapterCase(name, str(body.__doc__), body))
        return body

    return add


# Tools that most cases use


@tool
def note(text: str, *, context: ToolContext) -> str:
    """Keep a note."""
    context.session.dispatch(Note(text))
    return f"Noted: {text}"


@tool
def write(path: str, content: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, content)
    return f"Wrote {path}"


_MILK, _EGGS = ("note", {"text": "milk"}), ("note", {"text": "eggs"})
_SPENT = TokenUsage(input_tokens=40, output_tokens=20)

# The model speaks and calls


@_case("plain text")
def plain_text(trial: Trial) -> None:
    """An answer in words is the response, as it stands, with what it cost."""
    text = 'Grüße, "world":\n\n\t1 < 2 & 你好 🙂\nbye'

    response = trial.evaluate(trial.prompt(), says(text, usage=_SPENT), message="Greet.")

    same("the text", response.text, text)
    same("the stop reason", response.stop_reason, "end_turn")
    same("the usage", response.usage, _SPENT)
    same("the conversation", trial.said, [("user", "Greet."), ("model", text)])


@_case("one call")
def one_call(trial: Trial) -> None:
    """A call is run once; its answer goes back, and words beside it are kept."""
    turns = calls(_MILK, text="Let me see.", usage=_SPENT), says("Done.", usage=_SPENT)

    response = trial.evaluate(trial.prompt(note), *turns)

    same("the text", response.text, "Done.")
    same("turns and calls", (response.turns, response.calls), (2, 1))
    same("the usage", response.usage, _SPENT + _SPENT)
    same("the notes", trial.notes, ["milk"])
    expected = [
        ("user", "Begin."),
        ("model", "Let me see."),
        ("tool", "Noted: milk"),
        ("model", "Done."),
    ]
    same("the conversation", trial.said, expected)


@_case("several calls in one turn")
def several_calls(trial: Trial) -> None:
    """Calls of one turn run together, and are answered in their order."""
    arrived: list[int] = []
    seen: list[int] = []

    @tool(reach="read")
    async def look(place: int) -> str:
        """Look at a place; the last one is seen first."""
        arrived.append(place)
        together = await _comes_true(lambda: len(arrived) == 3)
        await _comes_true(lambda: len(seen) == 2 - place)
        seen.append(place)
        return f"Seen {place}" if together else f"Seen {place} alone"

    wanted = [("look", {"place": place}) for place in range(3)]

    trial.evaluate(trial.prompt(look), calls(*wanted), says("Done."))

    same("the order in which they ended", seen, [2, 1, 0])
    same("the answers", trial.answers, ["Seen 0", "Seen 1", "Seen 2"])
    same("the calls on record", len(trial.session[ToolInvoked]), 3)


async def _comes_true(holds: Callable[[], bool]) -> bool:
    """Give the other calls of the turn, which are on the same loop, every chance to go on."""
    for _ in range(10_000):
        if holds():
            return True
        await asyncio.sleep(0)
    return False


@_case("odd text in an answer")
def odd_text(trial: Trial) -> None:
    """What a tool answers reaches the model byte for byte."""
    text = ' "a"\n\n\t\\n <b>&amp;</b> {"x": [1]} ```py\u2028é 你 🙂 '

    @tool
    def read() -> str:
        """Read it."""
        return text

    trial.evaluate(trial.prompt(read), calls("read"), says("Done."))

    same("the answers", trial.answers, [text])


# The model is wrong


@_case("bad arguments")
def bad_arguments(trial: Trial) -> None:
    """The model is told all that is wrong, nothing runs, and its next try counts."""
    turns = calls(("note", {"txet": "milk"})), calls(_MILK), says("Done.")

    trial.evaluate(trial.prompt(note), *turns)

    same("the notes", trial.notes, ["milk"])
    same("what ran", [record.ran for record in trial.session[ToolInvoked]], [False, True])
    _mentions("the first answer", trial.answers[0], "txet", "text")


@_case("arguments that are not JSON")
def arguments_not_json(trial: Trial) -> None:
    """Arguments that cannot be read are the model's to mend: the run goes on."""
    turns = calls(ToolCall("note", '{"text": "mil')), calls(_MILK), says("Done.")

    trial.evaluate(trial.prompt(note), *turns)

    same("the notes", trial.notes, ["milk"])
    same("what ran", [record.ran for record in trial.session[ToolInvoked]], [False, True])
    _mentions("the first answer", trial.answers[0], "JSON")


@_case("unknown tool")
def unknown_tool(trial: Trial) -> None:
    """A call of a tool that nobody offered is answered, and the run goes on."""
    response = trial.evaluate(trial.prompt(note), calls("no_such_tool"), says("I see."))

    same("the text", response.text, "I see.")
    _mentions("the answer", trial.answers[0], "no_such_tool", "note")


@_case("denied by a policy")
def denied(trial: Trial) -> None:
    """The model is told why, nothing runs, and it may do something else."""

    class NoSecrets:
        def check(self, tool_name: str, params: Any, context: ToolContext) -> str | None:
            return "Secrets stay as they are" if params.path == "secret" else None

    turns = (
        calls(("write", {"path": "secret", "content": "x"})),
        calls(("write", {"path": "b.txt", "content": "x"})),
        says("Done."),
    )

    trial.evaluate(trial.prompt(write, policies=[NoSecrets()]), *turns)

    same("the answers", trial.answers, ["Secrets stay as they are", "Wrote b.txt"])
    same("the files", sorted(trial.files.glob("**/*")), ["a.txt", "b.txt"])


@_case("a handler fails")
def handler_fails(trial: Trial) -> None:
    """What a failed call did to the session and to files is gone, and the model is told."""

    @tool
    def spoil(*, context: ToolContext) -> str:
        """Change things, then fail."""
        context.session.dispatch(Note("half done"))
        context.filesystem.write("a.txt", "spoilt")
        context.filesystem.write("b.txt", "new")
        raise ToolValidationError("The disk is full.")

    response = trial.evaluate(trial.prompt(spoil, note), calls("spoil"), calls(_MILK), says("Ok."))

    same("the text", response.text, "Ok.")
    _mentions("the first answer", trial.answers[0], "The disk is full.")
    same("the notes", trial.notes, ["milk"])
    same("the files", sorted(trial.files.glob("**/*")), ["a.txt"])
    same("a.txt", trial.files.read("a.txt"), "old")


@_case("the same call ids again")
def ids_again(trial: Trial) -> None:
    """A provider that counts calls from zero in every turn loses none of them."""

    def counted(*texts: str) -> ModelTurn:
        return calls(*(ToolCall("note", {"text": text}, "call_0") for text in texts))

    trial.evaluate(trial.prompt(note), counted("a"), counted("b", "c"), says("Done."))

    same("the notes", trial.notes, ["a", "b", "c"])
    same("the answers", trial.answers, ["Noted: a", "Noted: b", "Noted: c"])
    same("how many ids there are", len({r.call_id for r in trial.session[ToolInvoked]}), 3)


# How the model stops


@_case("cut off at the token limit")
def max_tokens(trial: Trial) -> None:
    """An answer that is too long ends with what there is of it, and says so."""
    response = trial.evaluate(trial.prompt(), says("Once upon a", stop_reason="max_tokens"))

    same(
        "text and stop reason", (response.text, response.stop_reason), ("Once upon a", "max_tokens")
    )


@_case("refusal")
def refusal(trial: Trial) -> None:
    """A model that does not want to ends the run, and says so."""
    response = trial.evaluate(trial.prompt(), says("I will not.", stop_reason="refusal"))

    same("text and stop reason", (response.text, response.stop_reason), ("I will not.", "refusal"))


@_case("empty answer")
def empty_answer(trial: Trial) -> None:
    """A model that says nothing is done."""
    response = trial.evaluate(trial.prompt(note), calls(_MILK), says(""))

    same("text and stop reason", (response.text, response.stop_reason), ("", "end_turn"))
    same("the notes", trial.notes, ["milk"])


# Structured output


@dataclass(frozen=True)
class City:
    name: str
    people: int


_RIGHT, _WRONG = says('{"name": "Ulm", "people": 3}'), says('{"name": "Ulm", "people": "few"}')


@_case("structured output")
def structured_output(trial: Trial) -> None:
    """The answer comes as the output type, tools before it or not."""
    prompt = trial.prompt(note, output_type=City)

    response = trial.evaluate(prompt, calls(_MILK), _RIGHT)

    same("the output", response.output, City("Ulm", 3))
    same("the text", response.text, _RIGHT.text)


@_case("structured output, a list")
def structured_list(trial: Trial) -> None:
    """A list comes as a list."""
    answer = says('{"items": [{"name": "Ulm", "people": 3}, {"name": "Bonn", "people": 4}]}')

    response = trial.evaluate(trial.prompt(output_type=list[City]), answer)

    same("the output", response.output, [City("Ulm", 3), City("Bonn", 4)])


@_case("structured output, wrong at first")
def structured_wrong_first(trial: Trial) -> None:
    """An answer that does not fit goes back with what is wrong; the next one counts."""
    response = trial.evaluate(trial.prompt(output_type=City), _WRONG, _RIGHT)

    same("the output", response.output, City("Ulm", 3))
    _mentions("what the model was told", trial.said[2][1], "people")


@_case("structured output, never right")
def structured_never(trial: Trial) -> None:
    """The run ends with OutputParseError after the allowed tries; what was done stays."""
    config = RunConfig(output_retries=1)
    prompt = trial.prompt(note, output_type=City)

    error = trial.fails(OutputParseError, prompt, calls(_MILK), _WRONG, _WRONG, config=config)

    _mentions("the error", str(error), "people")
    same("the notes", trial.notes, ["milk"])
    roles = [role for role, _ in trial.said]
    same("who spoke", roles, ["user", "model", "tool", "model", "user", "model"])


# The provider fails


@_case("provider error")
def provider_error(trial: Trial) -> None:
    """A request that failed is made again; the conversation shows nothing of it."""
    turns = calls(_MILK), ProviderUnavailable("overloaded"), says("Done.")

    response = trial.evaluate(trial.prompt(note), *turns)

    same("the text", response.text, "Done.")
    same("turns and calls", (response.turns, response.calls), (2, 1))
    same("the notes", trial.notes, ["milk"])
    same("who spoke", [role for role, _ in trial.said], ["user", "model", "tool", "model"])


@_case("throttled")
def throttled(trial: Trial) -> None:
    """The wait that the provider asks for is kept."""
    started = trial.clock.time()

    response = trial.evaluate(
        trial.prompt(), ProviderThrottled("slow down", retry_after=42), says("Hello.")
    )

    same("the text", response.text, "Hello.")
    waited = trial.clock.time() - started
    if waited < 42:
        fail(f"the provider said to wait 42 s, and it was asked again after {waited:g} s")


@_case("rejected")
def rejected(trial: Trial) -> None:
    """A request that the provider does not take is not made again."""
    started = trial.clock.time()

    error = trial.fails(
        ProviderRejected, trial.prompt(note), ProviderRejected("no such key"), says("Hello.")
    )

    same("whether the error may pass", error.recoverable, False)
    same("the wait", trial.clock.time() - started, 0.0)
    same("the conversation", trial.said, [("user", "Begin.")])


@_case("cut off in the middle")
def cut_off(trial: Trial) -> None:
    """An answer whose end is missing is not taken for an answer: it is asked for again."""
    turns = ProviderUnavailable("cut off", code="NETWORK"), calls(_MILK), says("Whole.")

    response = trial.evaluate(trial.prompt(note), *turns)

    same("the text", response.text, "Whole.")
    same("the notes", trial.notes, ["milk"])


@_case("malformed response")
def malformed(trial: Trial) -> None:
    """What is not an answer is not taken for one: it is asked for again."""
    turns = MalformedResponse("what is this"), calls(_MILK), says("Fine.")

    response = trial.evaluate(trial.prompt(note), *turns)

    same("the text", response.text, "Fine.")
    same("the notes", trial.notes, ["milk"])


@_case("never a whole response")
def never_whole(trial: Trial) -> None:
    """A provider that fails every time ends the run with ProviderError; what was done stays."""
    failures: list[ProviderError] = [MalformedResponse("what is this") for _ in range(2)]
    failures += [ProviderUnavailable("cut off", code="NETWORK") for _ in range(2)]

    trial.fails(ProviderError, trial.prompt(note), calls(_MILK), *failures, says("Too late."))

    same("the notes", trial.notes, ["milk"])
    same("who spoke", [role for role, _ in trial.said], ["user", "model", "tool"])


# Limits


@_case("deadline in a tool")
def deadline_in_tool(trial: Trial) -> None:
    """A call that is under way at the deadline is rolled back; those before it stay."""

    @tool
    def pass_time(*, context: ToolContext) -> str:
        """Let almost all of the time go by."""
        context.session.dispatch(Note("almost"))
        trial.clock.advance(99.9)
        return "Almost over"

    @tool
    async def hang(*, context: ToolContext) -> str:
        """Change things, and never come back."""
        if "almost" not in trial.notes:
            raise ToolValidationError("It is too early.")
        context.session.dispatch(Note("half done"))
        context.filesystem.write("a.txt", "spoilt")
        await asyncio.Event().wait()
        return "never"

    prompt, turn = trial.prompt(pass_time, hang), calls("pass_time", "hang")
    deadline = Deadline.after(100, clock=trial.clock)

    trial.fails(DeadlineExceededError, prompt, turn, says("Too late."), deadline=deadline)

    same("the notes", trial.notes, ["almost"])
    same("a.txt", trial.files.read("a.txt"), "old")


@_case("deadline while the model is waited for")
def deadline_in_turn(trial: Trial) -> None:
    """A model that does not answer in time ends the run."""
    never = ProviderUnavailable("no answer", code="TIMEOUT")
    deadline = Deadline.after(0.3, clock=trial.clock)

    trial.fails(DeadlineExceededError, trial.prompt(), never, says("Too late."), deadline=deadline)

    same("the conversation", trial.said, [("user", "Begin.")])


@_case("budget exceeded")
def budget_exceeded(trial: Trial) -> None:
    """The turn that passes the budget is the last, and its calls are not run."""
    turns = calls(_MILK, usage=_SPENT), calls(_EGGS, usage=_SPENT), says("Too late.")

    error = trial.fails(
        BudgetExceededError, trial.prompt(note), *turns, budget=Budget(max_total_tokens=100)
    )

    same("the notes", trial.notes, ["milk"])
    same("the usage", None if error.response is None else error.response.usage, _SPENT + _SPENT)


@_case("too many turns")
def too_many_turns(trial: Trial) -> None:
    """A model that never comes to an end is stopped; what was done stays."""
    turns = calls(_MILK), calls(_EGGS), says("Too late.")

    trial.fails(TurnLimitExceeded, trial.prompt(note), *turns, config=RunConfig(max_turns=2))

    same("the notes", trial.notes, ["milk", "eggs"])


@_case("too many calls")
def too_many_calls(trial: Trial) -> None:
    """Calls over the limit are not run; those before stay."""
    turns = calls(_MILK, _EGGS, ("note", {"text": "ham"})), says("Too late.")

    trial.fails(CallLimitExceeded, trial.prompt(note), *turns, config=RunConfig(max_tool_calls=2))

    same("the notes", trial.notes, ["milk", "eggs"])
    same("the answers", trial.answers, ["Noted: milk", "Noted: eggs"])


# The prompt changes under way


@_case("progressive disclosure")
def progressive_disclosure(trial: Trial) -> None:
    """A section that the model opens is in its next request, with its tools."""
    more = MarkdownSection(
        title="Shopping",
        template="Buy only what is fresh.",
        summary="How to shop.",
        visibility=SectionVisibility.SUMMARY,
        tools=[note],
    )
    opening = {"section_keys": ["shopping"], "reason": "to shop"}
    turns = calls(("open_sections", opening)), calls(_MILK), says("Done.")

    trial.evaluate(trial.prompt(write, sections=[more]), *turns)

    same("the notes", trial.notes, ["milk"])
    if trial.asked is not None:
        shown = ["fresh" in request.system for request in trial.asked]
        same("whether the section is shown", shown, [False, True, True])
        offered = ["note" in request.tools for request in trial.asked]
        same("whether its tool is offered", offered, [False, True, True])


# Broken off, and taken up again


@_case("cancelled in a tool")
def cancelled_in_tool(trial: Trial) -> None:
    """The call under way is rolled back, the session is whole, and the run can be taken up."""
    started = asyncio.Event()

    @tool
    async def hang(*, context: ToolContext) -> str:
        """Change things, and never come back."""
        context.session.dispatch(Note("half done"))
        context.filesystem.write("a.txt", "spoilt")
        started.set()
        await asyncio.Event().wait()
        return "never"

    prompt = trial.prompt(note, hang)

    asyncio.run(_cancelled(trial.aevaluate(prompt, calls(_MILK), calls("hang")), started))
    trial.check()
    same("the notes", trial.notes, ["milk"])
    same("a.txt", trial.files.read("a.txt"), "old")

    response = trial.evaluate(prompt, calls(_EGGS), says("Stopped."), resume=True)

    same("the text", response.text, "Stopped.")
    same("the notes", trial.notes, ["milk", "eggs"])


@_case("cancelled while the model is waited for")
def cancelled_in_turn(trial: Trial) -> None:
    """The run ends at once, the session is whole, and the run can be taken up."""
    if not trial.adapter().needs_loop:
        raise SkipTest("this adapter never waits")
    asked, prompt = asyncio.Event(), trial.prompt(note)

    def listen(event: RunEvent) -> None:
        if isinstance(event, TurnStarted):
            asked.set()

    never = ProviderUnavailable("no answer", code="TIMEOUT")
    run = trial.aevaluate(prompt, never, says("Too late."), on_event=listen)
    asyncio.run(_cancelled(run, asked))
    same("the conversation", trial.said, [("user", "Begin.")])

    response = trial.evaluate(prompt, calls(_MILK), says("Done."), resume=True)

    same("the text", response.text, "Done.")
    same("the notes", trial.notes, ["milk"])


async def _cancelled(run: Coroutine[Any, Any, object], when: asyncio.Event) -> None:
    """Cancel a run at a moment; it must end with CancelledError."""
    task, moment = asyncio.ensure_future(run), asyncio.ensure_future(when.wait())
    await asyncio.wait([task, moment], return_when=asyncio.FIRST_COMPLETED)
    moment.cancel()
    if task.done():
        fail(f"the run ended before it could be cancelled: {task.result()!r}")
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return
    fail("a run that is cancelled must end with CancelledError")


@_case("taken up again")
def taken_up(trial: Trial) -> None:
    """A run that broke off goes on: a call on record is not run again, and is answered."""
    prompt = trial.prompt(note)
    step = trial.adapter(calls(_MILK, _EGGS)).step(prompt, trial.session, **trial.heard({}))
    execute_tool(step.tool_calls[0], session=trial.session)

    response = trial.evaluate(prompt, says("Done."), resume=True)

    same("the text", response.text, "Done.")
    same("the notes", trial.notes, ["milk", "eggs"])
    same("the answers", trial.answers, ["Noted: milk", "Noted: eggs"])


# Other ways to run


@_case("step by step")
def step_by_step(trial: Trial) -> None:
    """Whoever drives the loop gets each turn's calls, and hands back their results."""

    @tool
    def create(path: str, overwrite: bool = False, *, context: ToolContext) -> str:
        """Create a file."""
        if context.filesystem.exists(path) and not overwrite:
            raise ToolValidationError(f"{path} already exists. Use overwrite=true to replace it.")
        context.filesystem.write(path, "new")
        return f"Created {path}"

    prompt = trial.prompt(create)
    adapter = trial.adapter(
        calls(("create", {"path": "a.txt"})),
        calls(("create", {"path": "a.txt", "overwrite": True})),
        says("Done."),
    )
    options = trial.heard({})

    first = adapter.step(prompt, trial.session, **options)
    same("the first stop reason", first.stop_reason, "tool_use")
    result = execute_tool(first.tool_calls[0], session=trial.session)
    same("whether it succeeds", result.success, False)

    second = adapter.step(prompt, trial.session, tool_results=[result], **options)
    same("the parameters", second.tool_calls[0].params, {"path": "a.txt", "overwrite": True})
    result = execute_tool(second.tool_calls[0], session=trial.session)
    same("whether it succeeds", result.success, True)

    last = adapter.step(prompt, trial.session, tool_results=[result], **options)
    same("the end", (last.text, last.stop_reason, last.tool_calls), ("Done.", "end_turn", ()))
    same("a.txt", trial.files.read("a.txt"), "new")
    trial.check()


@_case("text as it comes")
def streamed(trial: Trial) -> None:
    """Pieces of text that a listener gets are, put together, what the model said."""
    pieces: list[str] = []

    def listen(event: RunEvent) -> None:
        if isinstance(event, TextDelta):
            pieces.append(event.text)
        elif isinstance(event, Retrying):
            pieces.clear()

    turns = calls(_MILK, text="First,\nmilk. "), says("Then 你好 🙂,\n\neggs.")
    cut = ProviderUnavailable("cut off", code="NETWORK")

    response = trial.evaluate(trial.prompt(note), cut, *turns, on_event=listen)

    same("the pieces put together", "".join(pieces), "".join(turn.text for turn in turns))
    same("the text", response.text, turns[1].text)


@_case("sync and async")
def sync_and_async(trial: Trial) -> None:
    """Both ways in do the same."""
    other = trial.again()
    turns = calls(_MILK, ("note", {})), calls("nothing"), says("Done.", usage=_SPENT)

    response = trial.evaluate(trial.prompt(note), *turns)
    other_response = asyncio.run(other.aevaluate(other.prompt(note), *turns))

    same("the response", other_response, response)
    same("the conversation", other.said, trial.said)
    same("the notes", other.notes, trial.notes)


def _mentions(what: str, text: str, *words: str) -> None:
    for word in words:
        if word not in text:
            fail(f"{what} does not mention {word!r}: {text!r}")
