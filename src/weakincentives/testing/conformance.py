"""What every adapter must do: the cases, and the trial that runs an adapter through each.

A case lets the model answer with fixed turns and looks at what came of them: the response, the
state, and what reached the model. Its docstring says what is promised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar
from unittest import SkipTest

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.scripted import calls, says
from weakincentives.budget import Budget, TokenUsage
from weakincentives.call import ToolCall
from weakincentives.clock import FakeClock
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
from weakincentives.runtime import PromptRendered, Session, ToolInvoked, execute_tool
from weakincentives.runtime.conversation import (
    Message,
    ModelTurn,
    PromptResponse,
    Retrying,
    RunEvent,
    TextDelta,
    TurnStarted,
)
from weakincentives.runtime.evaluation import RunConfig

E = TypeVar("E", bound=BaseException)

Played: TypeAlias = ModelTurn | ProviderError
"""What the provider answers a request with: a turn of the model, or a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as the provider got it, read back from its format."""

    system: str
    """The text that stands before the messages."""
    messages: Sequence[Message]
    """Their role, text, calls and call id are compared; ids that are empty are not."""
    tools: Sequence[str]
    """The names of the functions that were offered."""


@dataclass(frozen=True, slots=True)
class Served:
    """An adapter, and what its provider was asked: then that is compared as well."""

    adapter: Adapter
    asked: Callable[[], Sequence[Asked]]
    """Returns every request so far, those that failed included."""


MakeAdapter: TypeAlias = Callable[[Sequence[Played]], Adapter | Served]
"""Gives a fresh adapter whose provider answers its requests with these, in order.

What a failure stands for: ``ProviderThrottled`` is a refusal that says to wait ``retry_after``
seconds; ``ProviderUnavailable`` a server error, or with ``code="NETWORK"`` an answer that is cut
off in the middle, or with ``code="TIMEOUT"`` one that never comes; ``ProviderRejected`` a refusal
that stays; ``MalformedResponse`` an answer that is not what the interface promises. One that the
provider's format cannot express is skipped: raise ``unittest.SkipTest`` with the reason.
"""


@dataclass(frozen=True, slots=True)
class AdapterCase:
    """One thing that every adapter must do."""

    name: str
    text: str
    """What it must do, in a sentence."""
    body: Callable[[_Trial], None]

    def __str__(self) -> str:
        return self.name

    def check(self, make_adapter: MakeAdapter, *, streaming: bool = False) -> None:
        """Raise AssertionError, with the case and what is wrong, unless the adapter does it.

        With ``streaming``, every run has a listener, so that text is asked for as it comes.
        """
        try:
            self.body(_Trial(make_adapter, streaming))
        except SkipTest:
            raise
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {error}") from error
        except Exception as error:
            why = f"it ended with {type(error).__name__}: {error}"
            raise AssertionError(f"{self.name}: {why}") from error


# What a case works with


@dataclass(frozen=True)
class _Note:
    """What the tools of the cases leave in the session."""

    text: str


class _Trial:
    """An adapter under test with a session, files and a clock; checks what every run must keep."""

    def __init__(self, make_adapter: MakeAdapter, streaming: bool = False) -> None:
        self._make_adapter = make_adapter
        self._options: dict[str, Any] = {"on_event": _listen} if streaming else {}
        self.clock = FakeClock()
        self.session = Session(clock=self.clock)
        self.files = MemoryFilesystem({"a.txt": "old"}, clock=self.clock)
        self.response: PromptResponse[Any] | None = None
        """How the last run ended."""
        self._turns: Sequence[Played] = ()
        self._asked: Callable[[], Sequence[Asked]] | None = None
        self._began = self.clock.time()
        self._before = 0
        """How many messages the session had when the adapter was made."""

    def again(self) -> _Trial:
        """Return another trial of the same adapter, with nothing in it."""
        other = _Trial(self._make_adapter)
        other._options = self._options
        return other

    def prompt(
        self, *tools: Tool[Any, Any], sections: Sequence[Section[Any]] = (), **options: Any
    ) -> Prompt[Any]:
        """Return a prompt that offers these tools, over the files of the trial."""
        section = MarkdownSection(title="Task", template="Do it.", tools=tools)
        template: PromptTemplate[Any] = PromptTemplate(
            sections=[section, *sections], resources={Filesystem: self.files}, **options
        )
        return Prompt(template)

    def adapter(self, *turns: Played) -> Adapter:
        """Return an adapter whose model answers with these; ``check`` is about the last one."""
        made = self._make_adapter(turns)
        self._turns, self._before = turns, len(self.session[Message])
        self._asked = made.asked if isinstance(made, Served) else None
        return made.adapter if isinstance(made, Served) else made

    def evaluate(self, prompt: Prompt[Any], *turns: Played, **options: Any) -> None:
        """Run to the end in the caller's thread, and check what every run must keep."""
        options = {**self._options, **options}
        self.response = self.adapter(*turns).evaluate(prompt, self.session, **options)
        self.check()

    async def aevaluate(self, prompt: Prompt[Any], *turns: Played, **options: Any) -> None:
        """Run to the end on the caller's event loop, and check what every run must keep."""
        options = {**self._options, **options}
        self.response = await self.adapter(*turns).aevaluate(prompt, self.session, **options)
        self.check()

    def step(self, adapter: Adapter, prompt: Prompt[Any], **options: Any) -> Sequence[ToolCall]:
        """Take one turn of the model; returns its calls."""
        self.response = adapter.step(prompt, self.session, **self._options, **options)
        return self.response.tool_calls

    def fails(self, kind: type[E], prompt: Prompt[Any], *turns: Played, **options: Any) -> E:
        """Run, and return the error of this kind that must end the run."""
        try:
            self.evaluate(prompt, *turns, **options)
        except kind as error:
            self.check()
            return error
        text = getattr(self.response, "text", "")
        raise AssertionError(f"it must end with {kind.__name__}, and it answered {text!r}")

    # What there is to look at

    @property
    def asked(self) -> Sequence[Asked] | None:
        """What the provider got; None where that is not known."""
        return None if self._asked is None else self._asked()

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self.session[_Note]]

    @property
    def said(self) -> list[tuple[str, str]]:
        """The conversation: who said what."""
        return [(message.role, message.text) for message in self.session[Message]]

    @property
    def roles(self) -> list[str]:
        return [message.role for message in self.session[Message]]

    @property
    def answers(self) -> list[str]:
        """What the tools answered."""
        return [text for role, text in self.said if role == "tool"]

    @property
    def ran(self) -> list[bool]:
        """Which of the calls on record were run."""
        return [record.ran for record in self.session[ToolInvoked]]

    @property
    def contents(self) -> dict[str, str]:
        """The files."""
        return {path: self.files.read(path) for path in sorted(self.files.glob("**/*"))}

    @property
    def waited(self) -> float:
        return self.clock.time() - self._began

    def expect(self, **expected: object) -> None:
        """Compare what there is to look at, or fields of the response, by name."""
        for name, value in expected.items():
            _same(name, getattr(self if hasattr(self, name) else self.response, name), value)

    # What every run must keep

    def check(self) -> None:
        """Check that all calls are answered in order, as recorded, and that the provider saw it."""
        messages = self.session[Message].all()
        self._check_answers(messages)
        if self._asked is not None:
            self._check_asked(self._asked(), messages)

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
                _fail(f"an answer is out of place: {message.text!r}")
            record = records.get(call.id)
            if record is None or record.tool_name != call.name:
                _fail(f"the call {call.name!r} was answered and is not on record")
            if call.name != "open_sections":  # answered by whoever opens them
                _same(f"the answer of {call.name!r}", message.text, record.result.render())

    def _check_asked(self, asked: Sequence[Asked], messages: Sequence[Message]) -> None:
        starts = [n for n, message in enumerate(messages) if message.is_first]
        answered = [n for n, m in enumerate(messages) if n >= self._before and m.role == "model"]
        given = [isinstance(turn, ModelTurn) for turn in self._turns[: len(asked)]]
        _same("the number of turns that the provider gave", sum(given), len(answered))
        for number, request in enumerate(asked):
            turns_before = sum(given[:number])
            end = answered[turns_before] if turns_before < len(answered) else len(messages)
            start = max(n for n in starts if n < end)
            _check_request(number + 1, request, messages[start:end])
        rendered = self.session[PromptRendered].all()
        if asked and rendered:
            for request, shown in ((asked[0], rendered[0]), (asked[-1], rendered[-1])):
                _mentions("the prompt that the provider got", request.system, shown.text)
                _same("the offered tools", sorted(request.tools), sorted(shown.tool_names))


def _check_request(number: int, request: Asked, messages: Sequence[Message]) -> None:
    what = f"what the provider got with request {number}"
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
    """Hear of everything, so that text is asked for as it comes."""


def _same(what: str, seen: object, expected: object) -> None:
    if seen != expected:
        _fail(f"{what} is {seen!r}; it must be {expected!r}")


def _mentions(what: str, text: str, *words: str) -> None:
    for word in words:
        if word not in text:
            _fail(f"{what} does not mention {word!r}: {text!r}")


def _fail(text: str) -> NoReturn:
    raise AssertionError(text)  # not a statement that Python may leave out


# The cases

_CASES: list[AdapterCase] = []


def adapter_cases() -> tuple[AdapterCase, ...]:
    """Return what every adapter must do; run ``case.check(make_adapter)`` with each.

    ``make_adapter`` gets what the model shall answer with, turn by turn: see ``MakeAdapter``.
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


def _cut_off() -> ProviderError:
    return ProviderUnavailable("cut off", code="NETWORK")


def _no_answer() -> ProviderError:
    return ProviderUnavailable("no answer", code="TIMEOUT")


# The model speaks and calls


@_case("plain text")
def plain_text(trial: _Trial) -> None:
    """An answer in words is the response, as it stands, with what it cost."""
    text = 'Grüße, "world":\n\n\t1 < 2 & 你好 🙂\nbye'

    trial.evaluate(trial.prompt(), says(text, usage=_SPENT), message="Greet.")

    trial.expect(text=text, stop_reason="end_turn", usage=_SPENT)
    trial.expect(said=[("user", "Greet."), ("model", text)])


@_case("one call")
def one_call(trial: _Trial) -> None:
    """A call is run once; its answer goes back, and words beside it are kept."""
    turns = calls(_MILK, text="Let me see.", usage=_SPENT), says("Done.", usage=_SPENT)

    trial.evaluate(trial.prompt(note), *turns)

    trial.expect(text="Done.", turns=2, calls=1, usage=_SPENT + _SPENT, notes=["milk"])
    model = [("model", "Let me see."), ("tool", "Noted: milk"), ("model", "Done.")]
    trial.expect(said=[("user", "Begin."), *model])


@_case("several calls in one turn")
def several_calls(trial: _Trial) -> None:
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

    _same("the order in which they ended", seen, [2, 1, 0])
    trial.expect(answers=["Seen 0", "Seen 1", "Seen 2"], ran=[True] * 3)


async def _comes_true(holds: Callable[[], bool]) -> bool:
    """Give the other calls of the turn, which are on the same loop, every chance to go on."""
    for _ in range(10_000):
        if holds():
            return True
        await asyncio.sleep(0)
    return False


@_case("odd text in an answer")
def odd_text(trial: _Trial) -> None:
    """What a tool answers reaches the model byte for byte."""
    text = ' "a"\n\n\t\\n <b>&amp;</b> {"x": [1]} ```py\u2028é 你 🙂 '

    @tool
    def read() -> str:
        """Read it."""
        return text

    trial.evaluate(trial.prompt(read), calls("read"), says("Done."))

    trial.expect(answers=[text])


# The model is wrong


@_case("bad arguments")
def bad_arguments(trial: _Trial) -> None:
    """The model is told all that is wrong, nothing runs, and its next try counts."""
    _goes_on_after(trial, ("note", {"txet": "milk"}), "txet", "text")


@_case("arguments that are not JSON")
def arguments_not_json(trial: _Trial) -> None:
    """Arguments that cannot be read are the model's to mend: the run goes on."""
    _goes_on_after(trial, ToolCall("note", '{"text": "mil'), "JSON")


def _goes_on_after(trial: _Trial, wrong: Any, *told: str) -> None:
    trial.evaluate(trial.prompt(note), calls(wrong), calls(_MILK), says("Done."))

    trial.expect(notes=["milk"], ran=[False, True])
    _mentions("the first answer", trial.answers[0], *told)


@_case("unknown tool")
def unknown_tool(trial: _Trial) -> None:
    """A call of a tool that nobody offered is answered, and the run goes on."""
    trial.evaluate(trial.prompt(note), calls("no_such_tool"), says("I see."))

    trial.expect(text="I see.")
    _mentions("the answer", trial.answers[0], "no_such_tool", "note")


@_case("denied by a policy")
def denied(trial: _Trial) -> None:
    """The model is told why, nothing runs, and it may do something else."""

    class NoSecrets:
        def check(self, tool_name: str, params: Any, context: ToolContext) -> str | None:
            return "Secrets stay as they are" if params.path == "secret" else None

    wanted = [("write", {"path": path, "content": "x"}) for path in ("secret", "b.txt")]

    trial.evaluate(trial.prompt(write, policies=[NoSecrets()]), *map(calls, wanted), says("Done."))

    trial.expect(answers=["Secrets stay as they are", "Wrote b.txt"])
    trial.expect(contents={"a.txt": "old", "b.txt": "x"})


@_case("a handler fails")
def handler_fails(trial: _Trial) -> None:
    """What a failed call did to the session and to files is gone, and the model is told."""

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
    """A provider that counts calls from zero in every turn loses none of them."""

    def counted(*texts: str) -> ModelTurn:
        return calls(*(ToolCall("note", {"text": text}, "call_0") for text in texts))

    trial.evaluate(trial.prompt(note), counted("a"), counted("b", "c"), says("Done."))

    trial.expect(notes=["a", "b", "c"], answers=["Noted: a", "Noted: b", "Noted: c"])
    _same("how many ids there are", len({r.call_id for r in trial.session[ToolInvoked]}), 3)


# How the model stops


@_case("cut off at the token limit")
def max_tokens(trial: _Trial) -> None:
    """An answer that is too long ends with what there is of it, and says so."""
    trial.evaluate(trial.prompt(), says("Once upon a", stop_reason="max_tokens"))

    trial.expect(text="Once upon a", stop_reason="max_tokens")


@_case("refusal")
def refusal(trial: _Trial) -> None:
    """A model that does not want to ends the run, and says so."""
    trial.evaluate(trial.prompt(), says("I will not.", stop_reason="refusal"))

    trial.expect(text="I will not.", stop_reason="refusal")


@_case("empty answer")
def empty_answer(trial: _Trial) -> None:
    """A model that says nothing is done."""
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
    """The answer comes as the output type, tools before it or not."""
    trial.evaluate(trial.prompt(note, output_type=City), calls(_MILK), _RIGHT)

    trial.expect(output=City("Ulm", 3), text=_RIGHT.text)


@_case("structured output, a list")
def structured_list(trial: _Trial) -> None:
    """A list comes as a list."""
    answer = says('{"items": [{"name": "Ulm", "people": 3}, {"name": "Bonn", "people": 4}]}')

    trial.evaluate(trial.prompt(output_type=list[City]), answer)

    trial.expect(output=[City("Ulm", 3), City("Bonn", 4)])


@_case("structured output, wrong at first")
def structured_wrong_first(trial: _Trial) -> None:
    """An answer that does not fit goes back with what is wrong; the next one counts."""
    trial.evaluate(trial.prompt(output_type=City), _WRONG, _RIGHT)

    trial.expect(output=City("Ulm", 3))
    _mentions("what the model was told", trial.said[2][1], "people")


@_case("structured output, never right")
def structured_never(trial: _Trial) -> None:
    """The run ends with OutputParseError after the allowed tries; what was done stays."""
    config = RunConfig(output_retries=1)
    prompt = trial.prompt(note, output_type=City)

    error = trial.fails(OutputParseError, prompt, calls(_MILK), _WRONG, _WRONG, config=config)

    _mentions("the error", str(error), "people")
    trial.expect(notes=["milk"], roles=["user", "model", "tool", "model", "user", "model"])


# The provider fails


@_case("provider error")
def provider_error(trial: _Trial) -> None:
    """A request that failed is made again; the conversation shows nothing of it."""
    turns = calls(_MILK), ProviderUnavailable("overloaded"), says("Done.")

    trial.evaluate(trial.prompt(note), *turns)

    trial.expect(text="Done.", turns=2, calls=1, notes=["milk"])
    trial.expect(roles=["user", "model", "tool", "model"])


@_case("throttled")
def throttled(trial: _Trial) -> None:
    """The wait that the provider asks for is kept."""
    trial.evaluate(trial.prompt(), ProviderThrottled("slow down", retry_after=42), says("Hello."))

    trial.expect(text="Hello.")
    if trial.waited < 42:
        _fail(f"the provider said to wait 42 s, and it was asked again after {trial.waited:g} s")


@_case("rejected")
def rejected(trial: _Trial) -> None:
    """A request that the provider does not take is not made again."""
    turns = ProviderRejected("no such key"), says("Hello.")

    error = trial.fails(ProviderRejected, trial.prompt(note), *turns)

    _same("whether the error may pass", error.recoverable, False)
    trial.expect(waited=0.0, said=[("user", "Begin.")])


@_case("cut off in the middle")
def cut_off(trial: _Trial) -> None:
    """An answer whose end is missing is not taken for an answer: it is asked for again."""
    trial.evaluate(trial.prompt(note), _cut_off(), calls(_MILK), says("Whole."))

    trial.expect(text="Whole.", notes=["milk"])


@_case("malformed response")
def malformed(trial: _Trial) -> None:
    """What is not an answer is not taken for one: it is asked for again."""
    trial.evaluate(trial.prompt(note), MalformedResponse("what is this"), calls(_MILK), says("Ok."))

    trial.expect(text="Ok.", notes=["milk"])


@_case("never a whole response")
def never_whole(trial: _Trial) -> None:
    """A provider that fails every time ends the run with ProviderError; what was done stays."""
    failures: list[ProviderError] = [MalformedResponse("what is this") for _ in range(2)]
    failures += [_cut_off(), _cut_off()]

    trial.fails(ProviderError, trial.prompt(note), calls(_MILK), *failures, says("Too late."))

    trial.expect(notes=["milk"], roles=["user", "model", "tool"])


# Limits


def _hanging(begin: Callable[[], object]) -> Tool[Any, Any]:
    @tool
    async def hang(*, context: ToolContext) -> str:
        """Change things, and never come back."""
        begin()
        context.session.dispatch(_Note("half done"))
        context.filesystem.write("a.txt", "spoilt")
        await asyncio.Event().wait()
        return "never"

    return hang


@_case("deadline in a tool")
def deadline_in_tool(trial: _Trial) -> None:
    """A call that is under way at the deadline is rolled back; those before it stay."""

    @tool
    def pass_time(*, context: ToolContext) -> str:
        """Let almost all of the time go by."""
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
    turns = _no_answer(), says("Too late.")
    deadline = Deadline.after(0.3, clock=trial.clock)

    trial.fails(DeadlineExceededError, trial.prompt(), *turns, deadline=deadline)

    trial.expect(said=[("user", "Begin.")])


@_case("budget exceeded")
def budget_exceeded(trial: _Trial) -> None:
    """The turn that passes the budget is the last, and its calls are not run."""
    turns = calls(_MILK, usage=_SPENT), calls(_EGGS, usage=_SPENT), says("Too late.")
    budget = Budget(max_total_tokens=100)

    error = trial.fails(BudgetExceededError, trial.prompt(note), *turns, budget=budget)

    trial.expect(notes=["milk"])
    _same("the usage", None if error.response is None else error.response.usage, _SPENT + _SPENT)


@_case("too many turns")
def too_many_turns(trial: _Trial) -> None:
    """A model that never comes to an end is stopped; what was done stays."""
    turns = calls(_MILK), calls(_EGGS), says("Too late.")

    trial.fails(TurnLimitExceeded, trial.prompt(note), *turns, config=RunConfig(max_turns=2))

    trial.expect(notes=["milk", "eggs"])


@_case("too many calls")
def too_many_calls(trial: _Trial) -> None:
    """Calls over the limit are not run; those before stay."""
    turns = calls(_MILK, _EGGS, ("note", {"text": "ham"})), says("Too late.")

    trial.fails(CallLimitExceeded, trial.prompt(note), *turns, config=RunConfig(max_tool_calls=2))

    trial.expect(notes=["milk", "eggs"], answers=["Noted: milk", "Noted: eggs"])


# The prompt changes under way


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
    if trial.asked is not None:
        shown = [("fresh" in each.system, "note" in each.tools) for each in trial.asked]
        expected = [(False, False), (True, True), (True, True)]
        _same("whether the section is shown, and its tool", shown, expected)


# Broken off, and taken up again


@_case("cancelled in a tool")
def cancelled_in_tool(trial: _Trial) -> None:
    """The call under way is rolled back, the session is whole, and the run can be taken up."""
    started = asyncio.Event()
    prompt = trial.prompt(note, _hanging(started.set))

    asyncio.run(_cancelled(trial.aevaluate(prompt, calls(_MILK), calls("hang")), started))
    trial.check()
    trial.expect(notes=["milk"], contents={"a.txt": "old"})

    trial.evaluate(prompt, calls(_EGGS), says("Stopped."), resume=True)

    trial.expect(text="Stopped.", notes=["milk", "eggs"])


@_case("cancelled while the model is waited for")
def cancelled_in_turn(trial: _Trial) -> None:
    """The run ends at once, the session is whole, and the run can be taken up."""
    if not trial.adapter().needs_loop:
        raise SkipTest("this adapter never waits")
    asked, prompt = asyncio.Event(), trial.prompt(note)

    def listen(event: RunEvent) -> None:
        if isinstance(event, TurnStarted):
            asked.set()

    run = trial.aevaluate(prompt, _no_answer(), says("Too late."), on_event=listen)
    asyncio.run(_cancelled(run, asked))
    trial.expect(said=[("user", "Begin.")])

    trial.evaluate(prompt, calls(_MILK), says("Done."), resume=True)

    trial.expect(text="Done.", notes=["milk"])


async def _cancelled(run: Coroutine[Any, Any, object], when: asyncio.Event) -> None:
    """Cancel a run at a moment; it must end with CancelledError."""
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
    _fail("a run that is cancelled must end with CancelledError")


@_case("taken up again")
def taken_up(trial: _Trial) -> None:
    """A run that broke off goes on: a call on record is not run again, and is answered."""
    prompt = trial.prompt(note)
    first, _ = trial.step(trial.adapter(calls(_MILK, _EGGS)), prompt)
    execute_tool(first, session=trial.session)

    trial.evaluate(prompt, says("Done."), resume=True)

    trial.expect(text="Done.", notes=["milk", "eggs"], answers=["Noted: milk", "Noted: eggs"])


# Other ways to run


@_case("step by step")
def step_by_step(trial: _Trial) -> None:
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


@_case("text as it comes")
def streamed(trial: _Trial) -> None:
    """Pieces of text that a listener gets are, put together, what the model said."""
    pieces: list[str] = []

    def listen(event: RunEvent) -> None:
        if isinstance(event, TextDelta):
            pieces.append(event.text)
        elif isinstance(event, Retrying):
            pieces.clear()

    turns = calls(_MILK, text="First,\nmilk. "), says("Then 你好 🙂,\n\neggs.")

    trial.evaluate(trial.prompt(note), _cut_off(), *turns, on_event=listen)

    _same("the pieces put together", "".join(pieces), "".join(turn.text for turn in turns))
    trial.expect(text=turns[1].text)


@_case("sync and async")
def sync_and_async(trial: _Trial) -> None:
    """Both ways in do the same."""
    other = trial.again()
    turns = calls(_MILK, ("note", {})), calls("nothing"), says("Done.", usage=_SPENT)

    trial.evaluate(trial.prompt(note), *turns)
    asyncio.run(other.aevaluate(other.prompt(note), *turns))

    other.expect(response=trial.response, said=trial.said, notes=trial.notes)
