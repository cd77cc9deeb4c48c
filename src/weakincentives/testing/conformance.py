"""What every adapter must do: the cases, and the trial that runs an adapter through each.

In a case the model answers with fixed turns; then the response, the state, and the requests that
reached the provider are checked.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias
from unittest import SkipTest

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.scripted import calls, says
from weakincentives.core.budget import Budget, TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.core.clock import FakeClock
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import (
    BudgetExceededError,
    CallLimitExceeded,
    DeadlineExceededError,
    MalformedResponse,
    OutputParseError,
    PromptError,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
    ToolValidationError,
    TurnLimitExceeded,
)
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Section,
    SectionVisibility,
    Tool,
    ToolContext,
    tool,
)
from weakincentives.runtime import Inbox, PromptRendered, Session, ToolInvoked, execute_tool
from weakincentives.runtime.conversation import (
    Message,
    ModelTurn,
    PromptResponse,
    Retrying,
    RunEvent,
    TextDelta,
    TurnStarted,
)
from weakincentives.runtime.run import RunConfig

Played: TypeAlias = ModelTurn | ProviderError
"""The provider's answer to a request: a turn of the model, or a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as the provider received it, read back from its format."""

    system: str
    messages: Sequence[Message]
    """Compared by role, text, calls and call id; empty ids are not compared."""
    tools: Sequence[str]
    """The names of the offered functions."""


@dataclass(frozen=True, slots=True)
class Served:
    """An adapter whose requests are compared as well."""

    adapter: Adapter
    asked: Callable[[], Sequence[Asked]]
    """Returns every request so far, failed ones included."""


MakeAdapter: TypeAlias = Callable[[Sequence[Played]], Adapter | Served]
"""Returns a fresh adapter whose provider answers its requests with these, in order.

``ProviderThrottled`` is a refusal that says to wait ``retry_after`` seconds;
``ProviderUnavailable`` a server error, with ``code="NETWORK"`` an answer that breaks off, with
``code="TIMEOUT"`` one that never arrives; ``ProviderRejected`` a permanent refusal;
``MalformedResponse`` an answer that does not follow the format. To skip a failure that the
provider's format cannot express, raise ``unittest.SkipTest`` with the reason.
"""


@dataclass(frozen=True, slots=True)
class AdapterCase:
    """One thing that every adapter must do."""

    name: str
    text: str
    """The requirement, in one sentence."""
    body: Callable[[_Trial], None]

    def __str__(self) -> str:
        return self.name

    def check(self, make_adapter: MakeAdapter, *, streaming: bool = False) -> None:
        """Raise AssertionError, with the case and the reason, unless the adapter passes.

        With ``streaming``, every run has a listener, so that text is streamed.
        """
        try:
            self.body(_Trial(make_adapter, streaming))
        except SkipTest:
            raise
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {error}") from error
        except Exception as error:
            why = f"the run ended with {type(error).__name__}: {error}"
            raise AssertionError(f"{self.name}: {why}") from error


@dataclass(frozen=True)
class _Note:
    """What the tools of the cases leave in the session."""

    text: str


class _Trial:
    """An adapter under test with a session, files and a clock."""

    def __init__(self, make_adapter: MakeAdapter, streaming: bool = False) -> None:
        self._make_adapter = make_adapter
        self._options: dict[str, Any] = {"on_event": _listen} if streaming else {}
        self.clock = FakeClock()
        self.session = Session(clock=self.clock)
        self.files = MemoryFilesystem({"a.txt": "old"}, clock=self.clock)
        self.response: PromptResponse[Any] | None = None
        self.error: PromptError | None = None
        """What ended the last run, where it failed."""
        self._turns: Sequence[Played] = ()
        self._requests: Callable[[], Sequence[Asked]] | None = None
        self._began = self.clock.time()
        self._before = 0
        """How many messages the session had when the adapter was made."""

    def again(self) -> _Trial:
        """Return a fresh trial of the same adapter."""
        return _Trial(self._make_adapter, bool(self._options))

    def prompt(
        self, *tools: Tool[Any, Any], sections: Sequence[Section[Any]] = (), **options: Any
    ) -> Prompt[Any]:
        """Return a prompt with these tools, over the trial's files."""
        section = MarkdownSection(title="Task", template="Do it.", tools=tools)
        template: PromptTemplate[Any] = PromptTemplate(
            sections=[section, *sections], resources={Filesystem: self.files}, **options
        )
        return Prompt(template)

    def adapter(self, *turns: Played) -> Adapter:
        """Return an adapter whose model answers with these; ``check`` is about the last one."""
        made = self._make_adapter(deepcopy(turns))
        self._turns, self._before = turns, len(self.session[Message])
        self._requests = made.asked if isinstance(made, Served) else None
        return made.adapter if isinstance(made, Served) else made

    def evaluate(self, prompt: Prompt[Any], *turns: Played, **options: Any) -> None:
        """Run to the end in the caller's thread, and check what every run must guarantee."""
        options = {**self._options, **options}
        self.response = self.adapter(*turns).evaluate(prompt, self.session, **options)
        self.check()

    async def aevaluate(self, prompt: Prompt[Any], *turns: Played, **options: Any) -> None:
        """Run to the end on the caller's event loop, and check the same."""
        options = {**self._options, **options}
        self.response = await self.adapter(*turns).aevaluate(prompt, self.session, **options)
        self.check()

    def step(self, adapter: Adapter, prompt: Prompt[Any], **options: Any) -> Sequence[ToolCall]:
        """Take one turn of the model and return its calls."""
        self.response = adapter.step(prompt, self.session, **self._options, **options)
        return self.response.tool_calls

    def fails(
        self,
        kind: type[PromptError],
        prompt: Prompt[Any],
        *turns: Played,
        **options: Any,
    ) -> None:
        """Run, and check that the run ends with an error of this kind."""
        try:
            self.evaluate(prompt, *turns, **options)
        except kind as error:
            self.error = error
            self.check()
        else:
            text = getattr(self.response, "text", "")
            _fail(f"the run must end with {kind.__name__}, but it answered {text!r}")

    @property
    def requests(self) -> Sequence[Asked] | None:
        """What the provider received; None where that is unknown."""
        return None if self._requests is None else self._requests()

    @property
    def said(self) -> list[tuple[str, str]]:
        """Role and text of each message."""
        return [(message.role, message.text) for message in self.session[Message]]

    @property
    def answers(self) -> list[str]:
        """The results of the tools."""
        return [text for role, text in self.said if role == "tool"]

    @property
    def waited(self) -> float:
        return self.clock.time() - self._began

    def expect(self, **expected: object) -> None:
        """Compare the state after a run, and fields of the response, by name."""
        records = self.session[ToolInvoked].all()
        spent = getattr(self.error, "response", None) or PromptResponse[Any]()
        state: dict[str, object] = {
            "notes": [note.text for note in self.session[_Note]],
            "said": self.said,
            "roles": [role for role, _ in self.said],
            "answers": self.answers,
            "ran": [record.ran for record in records],
            "different_ids": len({record.call_id for record in records}),
            "contents": {path: self.files.read(path) for path in sorted(self.files.glob("**/*"))},
            "waited": self.waited,
            "recoverable": getattr(self.error, "recoverable", None),
            "usage_with_error": spent.usage,
            "response": self.response,
        }
        for name, value in expected.items():
            seen = state[name] if name in state else getattr(self.response, name)
            _same(name, seen, value)

    # What every run must guarantee

    def check(self) -> None:
        """Check that all calls are answered in order, and that the provider saw it."""
        messages = self.session[Message].all()
        self._check_answers(messages)
        if self.requests is not None:
            self._check_requests(self.requests, messages)

    def _check_answers(self, messages: Sequence[Message]) -> None:
        records = {record.call_id: record for record in self.session[ToolInvoked]}
        waiting: list[ToolCall] = []
        for message in messages:
            if message.role != "tool":
                if waiting:
                    _fail(f"the call {waiting[0].name!r} was never answered")
                waiting = list(message.tool_calls)
                continue
            call = waiting.pop(0) if waiting else None
            if call is None or call.id != message.call_id:
                _fail(f"an answer is out of order: {message.text!r}")
            record = records.get(call.id)
            if record is None or record.tool_name != call.name:
                _fail(f"the call {call.name!r} was answered but not recorded")
            if call.name != "open_sections":  # answered by the run itself
                _same(f"the answer of {call.name!r}", message.text, record.result.render())

    def _check_requests(self, requests: Sequence[Asked], messages: Sequence[Message]) -> None:
        starts = [n for n, message in enumerate(messages) if message.is_first]
        answered = [n for n, m in enumerate(messages) if n >= self._before and m.role == "model"]
        given = [isinstance(turn, ModelTurn) for turn in self._turns[: len(requests)]]
        _same("the number of turns that the provider gave", sum(given), len(answered))
        for number, request in enumerate(requests):
            turns_before = sum(given[:number])
            end = answered[turns_before] if turns_before < len(answered) else len(messages)
            start = max(n for n in starts if n < end)
            _check_request(number + 1, request, messages[start:end])
        rendered = self.session[PromptRendered].all()
        if requests and rendered:
            for request, shown in ((requests[0], rendered[0]), (requests[-1], rendered[-1])):
                _mentions("the system prompt in the request", request.system, shown.text)
                _same("the offered tools", sorted(request.tools), sorted(shown.tool_names))


def _check_request(number: int, request: Asked, messages: Sequence[Message]) -> None:
    what = f"request {number}"
    seen, expected = map(_comparable, (request.messages, messages))
    _same(f"{what} (role, text, calls)", seen, expected)
    for got, message in zip(request.messages, messages, strict=True):
        ids = [(got.call_id, message.call_id)]
        ids += [(a.id, b.id) for a, b in zip(got.tool_calls, message.tool_calls, strict=True)]
        for seen_id, expected_id in ids:
            if seen_id:
                _same(f"a call id in {what}", seen_id, expected_id)


def _comparable(messages: Sequence[Message]) -> list[tuple[str, str, list[tuple[str, object]]]]:
    return [(m.role, m.text, [(c.name, c.params) for c in m.tool_calls]) for m in messages]


def _listen(event: RunEvent) -> None:
    """Listen to everything, so that text is streamed."""


def _same(what: str, seen: object, expected: object) -> None:
    if seen != expected:
        _fail(f"{what} is {seen!r}; it must be {expected!r}")


def _mentions(what: str, text: str, *words: str) -> None:
    for word in words:
        if word not in text:
            _fail(f"{what} does not mention {word!r}: {text!r}")


def _fail(text: str) -> NoReturn:
    raise AssertionError(text)  # unlike the statement, never optimized away


# The cases

_CASES: list[AdapterCase] = []


def adapter_cases() -> tuple[AdapterCase, ...]:
    """Return what every adapter must do; run ``case.check(make_adapter)`` with each.

    ``make_adapter`` gets the model's answers, turn by turn: see ``MakeAdapter``.
    """
    return tuple(_CASES)


def _case(name: str) -> Callable[[Callable[[_Trial], None]], Callable[[_Trial], None]]:
    def add(body: Callable[[_Trial], None]) -> Callable[[_Trial], None]:
        _CASES.append(AdapterCase(name, str(body.__doc__), body))
        return body

    return add


@tool
def note(text: str, *, context: ToolContext) -> str:
    """Keep a note."""
    context.session.dispatch(_Note(text))
    return f"Noted: {text}"


@tool
def write(path: str, content: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, content)
    return f"Wrote {path}"


_MILK, _EGGS = ("note", {"text": "milk"}), ("note", {"text": "eggs"})
_SPENT = TokenUsage(input_tokens=40, output_tokens=20)


_CUT_OFF = ProviderUnavailable("cut off", code="NETWORK")
_NO_ANSWER = ProviderUnavailable("no answer", code="TIMEOUT")
_MALFORMED = MalformedResponse("what is this")


# The model speaks and calls


@_case("plain text")
def plain_text(trial: _Trial) -> None:
    """A text is the response, unchanged, with its usage."""
    text = 'Grüße, "world":\n\n\t1 < 2 & 你好 🙂\nbye'

    trial.evaluate(trial.prompt(), says(text, usage=_SPENT), message="Greet.")

    trial.expect(text=text, stop_reason="end_turn", usage=_SPENT)
    trial.expect(said=[("user", "Greet."), ("model", text)])


@_case("one call")
def one_call(trial: _Trial) -> None:
    """A call runs once; its answer goes back, with the text next to the call."""
    turns = calls(_MILK, text="Let me see.", usage=_SPENT), says("Done.", usage=_SPENT)

    trial.evaluate(trial.prompt(note), *turns)

    trial.expect(text="Done.", turns=2, calls=1, usage=_SPENT + _SPENT, notes=["milk"])
    model = [("model", "Let me see."), ("tool", "Noted: milk"), ("model", "Done.")]
    trial.expect(said=[("user", "Begin."), *model])


@_case("several calls in one turn")
def several_calls(trial: _Trial) -> None:
    """The calls of one turn run concurrently, and are answered in order."""
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

    _same("the order in which they ended", seen, [2, 1, 0])
    trial.expect(answers=["Seen 0", "Seen 1", "Seen 2"], ran=[True] * 3)


async def _comes_true(holds: Callable[[], bool]) -> bool:
    """Let the other calls of the turn, on the same loop, run until a condition holds."""
    for _ in range(10_000):
        if holds():
            return True
        await asyncio.sleep(0)
    return False


@_case("odd text in an answer")
def odd_text(trial: _Trial) -> None:
    """A tool's answer reaches the model byte for byte."""
    text = ' "a"\n\n\t\\n <b>&amp;</b> {"x": [1]} ```py\u2028é 你 🙂 '

    @tool
    def read() -> str:
        """Read it."""
        return text

    trial.evaluate(trial.prompt(read), calls("read"), says("Done."))

    trial.expect(answers=[text])


# The model makes mistakes


@_case("bad arguments")
def bad_arguments(trial: _Trial) -> None:
    """The model is told every problem, nothing runs, and it may try again."""
    _continues_after(trial, ("note", {"txet": "milk"}), "txet", "text")


@_case("arguments that are not JSON")
def arguments_not_json(trial: _Trial) -> None:
    """The model is told, nothing runs, and it may try again."""
    _continues_after(trial, ToolCall("note", '{"text": "mil'), "JSON")


def _continues_after(trial: _Trial, wrong: Any, *told: str) -> None:
    trial.evaluate(trial.prompt(note), calls(wrong), calls(_MILK), says("Done."))

    trial.expect(notes=["milk"], ran=[False, True])
    _mentions("the first answer", trial.answers[0], *told)


@_case("unknown tool")
def unknown_tool(trial: _Trial) -> None:
    """A call of a tool that was not offered is answered, and the run continues."""
    trial.evaluate(trial.prompt(note), calls("no_such_tool"), says("I see."))

    trial.expect(text="I see.")
    _mentions("the answer", trial.answers[0], "no_such_tool", "note")


@_case("denied by a policy")
def denied(trial: _Trial) -> None:
    """The model is told why, nothing runs, and it may do something else."""

    class NoSecrets:
        def check(self, tool_name: str, params: Any, context: ToolContext) -> str | None:
            return "Secrets must not change" if params.path == "secret" else None

    wanted = [("write", {"path": path, "content": "x"}) for path in ("secret", "b.txt")]

    trial.evaluate(trial.prompt(write, policies=[NoSecrets()]), *map(calls, wanted), says("Done."))

    trial.expect(answers=["Secrets must not change", "Wrote b.txt"])
    trial.expect(contents={"a.txt": "old", "b.txt": "x"})


@_case("a handler fails")
def handler_fails(trial: _Trial) -> None:
    """Session and files are rolled back, and the model is told."""

    @tool
    def spoil(*, context: ToolContext) -> str:
        """Change things, then fail."""
        context.session.dispatch(_Note("half done"))
        context.filesystem.write("a.txt", "spoilt")
        context.filesystem.write("b.txt", "new")
        raise ToolValidationError("The disk is full.")

    trial.evaluate(trial.prompt(spoil, note), calls("spoil"), calls(_MILK), says("Ok."))

    _mentions("the first answer", trial.answers[0], "The disk is full.")
    trial.expect(text="Ok.", notes=["milk"], contents={"a.txt": "old"})


@_case("the same call ids again")
def ids_again(trial: _Trial) -> None:
    """No call is lost when a provider numbers calls from zero in every turn."""

    def counted(*texts: str) -> ModelTurn:
        return calls(*(ToolCall("note", {"text": text}, "call_0") for text in texts))

    trial.evaluate(trial.prompt(note), counted("a"), counted("b", "c"), says("Done."))

    trial.expect(notes=["a", "b", "c"], answers=["Noted: a", "Noted: b", "Noted: c"])
    trial.expect(different_ids=3)


# The model stops


@_case("cut off at the token limit")
def max_tokens(trial: _Trial) -> None:
    """A truncated answer ends the run with its text, and says so."""
    trial.evaluate(trial.prompt(), says("Once upon a", stop_reason="max_tokens"))

    trial.expect(text="Once upon a", stop_reason="max_tokens")


@_case("refusal")
def refusal(trial: _Trial) -> None:
    """A refusal ends the run, and says so."""
    trial.evaluate(trial.prompt(), says("I will not.", stop_reason="refusal"))

    trial.expect(text="I will not.", stop_reason="refusal")


@_case("empty answer")
def empty_answer(trial: _Trial) -> None:
    """An empty answer ends the run."""
    trial.evaluate(trial.prompt(note), calls(_MILK), says(""))

    trial.expect(text="", stop_reason="end_turn", notes=["milk"])


# Structured output


@dataclass(frozen=True)
class City:
    name: str
    people: int


_RIGHT, _WRONG = says('{"name": "Ulm", "people": 3}'), says('{"name": "Ulm", "people": "few"}')


@_case("structured output")
def structured_output(trial: _Trial) -> None:
    """The answer is returned as the output type, also after calls."""
    trial.evaluate(trial.prompt(note, output_type=City), calls(_MILK), _RIGHT)

    trial.expect(output=City("Ulm", 3), text=_RIGHT.text)


@_case("structured output, a list")
def structured_list(trial: _Trial) -> None:
    """A list is returned as a list."""
    answer = says('{"items": [{"name": "Ulm", "people": 3}, {"name": "Bonn", "people": 4}]}')

    trial.evaluate(trial.prompt(output_type=list[City]), answer)

    trial.expect(output=[City("Ulm", 3), City("Bonn", 4)])


@_case("structured output, wrong at first")
def structured_wrong_first(trial: _Trial) -> None:
    """An answer that does not fit is sent back with the problems; the next one counts."""
    trial.evaluate(trial.prompt(output_type=City), _WRONG, _RIGHT)

    trial.expect(output=City("Ulm", 3))
    _mentions("what the model was told", trial.said[2][1], "people")


@_case("structured output, never right")
def structured_never(trial: _Trial) -> None:
    """The run ends with OutputParseError after the allowed retries; committed calls stay."""
    config = RunConfig(output_retries=1)
    prompt = trial.prompt(note, output_type=City)

    trial.fails(OutputParseError, prompt, calls(_MILK), _WRONG, _WRONG, config=config)

    _mentions("the error", str(trial.error), "people")
    trial.expect(notes=["milk"], roles=["user", "model", "tool", "model", "user", "model"])


# The provider fails


@_case("provider error")
def provider_error(trial: _Trial) -> None:
    """A failed request is retried; the conversation shows nothing of it."""
    turns = calls(_MILK), ProviderUnavailable("overloaded"), says("Done.")

    trial.evaluate(trial.prompt(note), *turns)

    trial.expect(text="Done.", turns=2, calls=1, notes=["milk"])
    trial.expect(roles=["user", "model", "tool", "model"])


@_case("throttled")
def throttled(trial: _Trial) -> None:
    """The run waits as long as the provider asks."""
    trial.evaluate(trial.prompt(), ProviderThrottled("slow down", retry_after=42), says("Hello."))

    trial.expect(text="Hello.")
    if trial.waited < 42:
        _fail(f"the provider said to wait 42 s, but the retry came after {trial.waited:g} s")


@_case("rejected")
def rejected(trial: _Trial) -> None:
    """A rejected request is not retried."""
    turns = ProviderRejected("no such key"), says("Hello.")

    trial.fails(ProviderRejected, trial.prompt(note), *turns)

    trial.expect(recoverable=False, waited=0.0, said=[("user", "Begin.")])


@_case("cut off in the middle")
def cut_off(trial: _Trial) -> None:
    """An incomplete answer is not accepted: the request is retried."""
    trial.evaluate(trial.prompt(note), _CUT_OFF, calls(_MILK), says("Whole."))

    trial.expect(text="Whole.", notes=["milk"])


@_case("malformed response")
def malformed(trial: _Trial) -> None:
    """A malformed answer is not accepted: the request is retried."""
    trial.evaluate(trial.prompt(note), _MALFORMED, calls(_MILK), says("Ok."))

    trial.expect(text="Ok.", notes=["milk"])


@_case("never a whole response")
def never_whole(trial: _Trial) -> None:
    """A provider that always fails ends the run with ProviderError; committed calls stay."""
    failures = _MALFORMED, _MALFORMED, _CUT_OFF, _CUT_OFF

    trial.fails(ProviderError, trial.prompt(note), calls(_MILK), *failures, says("Too late."))

    trial.expect(notes=["milk"], roles=["user", "model", "tool"])


# Limits


def _hanging(begin: Callable[[], object]) -> Tool[Any, Any]:
    @tool
    async def hang(*, context: ToolContext) -> str:
        """Change things, and never return."""
        begin()
        context.session.dispatch(_Note("half done"))
        context.filesystem.write("a.txt", "spoilt")
        await asyncio.Event().wait()
        return "never"

    return hang


@_case("deadline in a tool")
def deadline_in_tool(trial: _Trial) -> None:
    """The running call is rolled back at the deadline; committed calls stay."""

    @tool
    def pass_time(*, context: ToolContext) -> str:
        """Let almost all of the time pass."""
        context.session.dispatch(_Note("almost"))
        trial.clock.advance(99.9)
        return "Almost over"

    prompt = trial.prompt(pass_time, _hanging(lambda: trial.expect(notes=["almost"])))
    turns = calls("pass_time", "hang"), says("Too late.")
    deadline = Deadline.after(100, clock=trial.clock)

    trial.fails(DeadlineExceededError, prompt, *turns, deadline=deadline)

    trial.expect(notes=["almost"], contents={"a.txt": "old"})


@_case("deadline while the model is waited for")
def deadline_in_turn(trial: _Trial) -> None:
    """A model that does not answer in time ends the run."""
    turns = _NO_ANSWER, says("Too late.")
    deadline = Deadline.after(0.3, clock=trial.clock)

    trial.fails(DeadlineExceededError, trial.prompt(), *turns, deadline=deadline)

    trial.expect(said=[("user", "Begin.")])


@_case("budget exceeded")
def budget_exceeded(trial: _Trial) -> None:
    """The turn that exceeds the budget is the last, and its calls do not run."""
    turns = calls(_MILK, usage=_SPENT), calls(_EGGS, usage=_SPENT), says("Too late.")
    budget = Budget(max_total_tokens=100)

    trial.fails(BudgetExceededError, trial.prompt(note), *turns, budget=budget)

    trial.expect(notes=["milk"], usage_with_error=_SPENT + _SPENT)


@_case("too many turns")
def too_many_turns(trial: _Trial) -> None:
    """The run ends at the limit; committed calls stay."""
    turns = calls(_MILK), calls(_EGGS), says("Too late.")

    trial.fails(TurnLimitExceeded, trial.prompt(note), *turns, config=RunConfig(max_turns=2))

    trial.expect(notes=["milk", "eggs"])


@_case("too many calls")
def too_many_calls(trial: _Trial) -> None:
    """Calls beyond the limit do not run; committed calls stay."""
    turns = calls(_MILK, _EGGS, ("note", {"text": "ham"})), says("Too late.")

    trial.fails(CallLimitExceeded, trial.prompt(note), *turns, config=RunConfig(max_tool_calls=2))

    trial.expect(notes=["milk", "eggs"], answers=["Noted: milk", "Noted: eggs"])


# The prompt changes during the run


@_case("progressive disclosure")
def progressive_disclosure(trial: _Trial) -> None:
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

    trial.expect(notes=["milk"])
    if trial.requests is not None:
        shown = [("fresh" in each.system, "note" in each.tools) for each in trial.requests]
        expected = [(False, False), (True, True), (True, True)]
        _same("whether the section and its tool are sent", shown, expected)


# Cancelled and resumed


@_case("cancelled in a tool")
def cancelled_in_tool(trial: _Trial) -> None:
    """The running call is rolled back, the session is consistent, and the run can be resumed."""
    started = asyncio.Event()
    prompt = trial.prompt(note, _hanging(started.set))

    asyncio.run(_cancelled(trial.aevaluate(prompt, calls(_MILK), calls("hang")), started))
    trial.check()
    trial.expect(notes=["milk"], contents={"a.txt": "old"})

    trial.evaluate(prompt, calls(_EGGS), says("Stopped."), resume=True)

    trial.expect(text="Stopped.", notes=["milk", "eggs"])


@_case("cancelled while the model is waited for")
def cancelled_in_turn(trial: _Trial) -> None:
    """The run ends at once, the session is consistent, and the run can be resumed."""
    if not trial.adapter().needs_loop:
        raise SkipTest("this adapter never waits")
    asked, prompt = asyncio.Event(), trial.prompt(note)

    def listen(event: RunEvent) -> None:
        if isinstance(event, TurnStarted):
            asked.set()

    run = trial.aevaluate(prompt, _NO_ANSWER, says("Too late."), on_event=listen)
    asyncio.run(_cancelled(run, asked))
    trial.expect(said=[("user", "Begin.")])

    trial.evaluate(prompt, calls(_MILK), says("Done."), resume=True)

    trial.expect(text="Done.", notes=["milk"])


async def _cancelled(run: Coroutine[Any, Any, object], when: asyncio.Event) -> None:
    """Cancel a run at an event; it must end with CancelledError."""
    task, moment = asyncio.ensure_future(run), asyncio.ensure_future(when.wait())
    await asyncio.wait([task, moment], return_when=asyncio.FIRST_COMPLETED)
    moment.cancel()
    if task.done():
        _fail(f"the run ended before it could be cancelled: {task.result()!r}")
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return
    _fail("a cancelled run must end with CancelledError")


@_case("resumed")
def resumed(trial: _Trial) -> None:
    """An interrupted run continues: a recorded call is answered and does not run again."""
    prompt = trial.prompt(note)
    first, _ = trial.step(trial.adapter(calls(_MILK, _EGGS)), prompt)
    execute_tool(first, session=trial.session)

    trial.evaluate(prompt, says("Done."), resume=True)

    trial.expect(text="Done.", notes=["milk", "eggs"], answers=["Noted: milk", "Noted: eggs"])


@_case("continued")
def continued(trial: _Trial) -> None:
    """A second evaluation with the same prompt continues the conversation."""
    prompt = trial.prompt(note)
    trial.evaluate(prompt, calls(_MILK), says("Noted."), message="Note milk.")

    trial.evaluate(prompt, calls(_EGGS), says("Done."), message="And eggs.")

    trial.expect(text="Done.", notes=["milk", "eggs"], answers=["Noted: milk", "Noted: eggs"])
    trial.expect(roles=["user", "model", "tool", "model"] * 2)
    if len({message.conversation for message in trial.session[Message]}) != 1:
        _fail("the second evaluation did not continue the conversation")


@_case("message to a run in progress")
def sent(trial: _Trial) -> None:
    """A message that is sent during a call reaches the model with the call's answer."""
    with tempfile.TemporaryDirectory(prefix="wink-") as place:
        inbox = Inbox(Path(place) / "inbox")

        @tool
        def hear() -> str:
            """Let the user speak."""
            inbox.send("Also note eggs.")
            return "Heard"

        prompt = trial.prompt(hear, note)
        trial.evaluate(prompt, calls("hear"), calls(_EGGS), says("Done."), inbox=inbox)

    trial.expect(text="Done.", notes=["eggs"], answers=["Heard", "Noted: eggs"])
    trial.expect(roles=["user", "model", "tool", "user", "model", "tool", "model"])


# Other ways to run


@_case("step by step")
def step_by_step(trial: _Trial) -> None:
    """A program that drives the loop gets each turn's calls, and passes back their results."""

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

    (first,) = trial.step(adapter, prompt)
    trial.expect(stop_reason="tool_use")
    result = execute_tool(first, session=trial.session)
    _same("whether it succeeds", result.success, False)

    (second,) = trial.step(adapter, prompt, tool_results=[result])
    _same("the parameters", second.params, {"path": "a.txt", "overwrite": True})
    result = execute_tool(second, session=trial.session)
    _same("whether it succeeds", result.success, True)

    trial.step(adapter, prompt, tool_results=[result])
    trial.expect(text="Done.", stop_reason="end_turn", tool_calls=(), contents={"a.txt": "new"})
    trial.check()


@_case("streamed text")
def streamed(trial: _Trial) -> None:
    """The pieces of text that a listener gets add up to the model's text."""
    pieces: list[str] = []

    def listen(event: RunEvent) -> None:
        if isinstance(event, TextDelta):
            pieces.append(event.text)
        elif isinstance(event, Retrying):
            pieces.clear()

    turns = calls(_MILK, text="First,\nmilk. "), says("Then 你好 🙂,\n\neggs.")

    trial.evaluate(trial.prompt(note), _CUT_OFF, *turns, on_event=listen)

    _same("the pieces put together", "".join(pieces), "".join(turn.text for turn in turns))
    trial.expect(text=turns[1].text)


@_case("sync and async")
def sync_and_async(trial: _Trial) -> None:
    """Both entry points do the same."""
    other = trial.again()
    turns = calls(_MILK, ("note", {})), calls("nothing"), says("Done.", usage=_SPENT)

    trial.evaluate(trial.prompt(note), *turns)
    asyncio.run(other.aevaluate(other.prompt(note), *turns))

    other.expect(response=trial.response, said=trial.said, notes=["milk"])
