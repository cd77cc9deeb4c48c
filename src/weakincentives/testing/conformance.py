"""What an adapter is run against: cases, the trial that each is given, and what a trial checks.

A case lets the model answer with fixed turns and looks at what came of them: the response, the
state, and what reached the model. The cases themselves are in ``cases``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar
from unittest import SkipTest

from weakincentives.adapters.base import Adapter
from weakincentives.call import ToolCall
from weakincentives.clock import FakeClock
from weakincentives.errors import ProviderError
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt.prompt import Prompt, PromptTemplate
from weakincentives.prompt.section import MarkdownSection, Section
from weakincentives.prompt.tool import Tool
from weakincentives.runtime.conversation import Message, ModelTurn, PromptResponse, RunEvent
from weakincentives.runtime.events import PromptRendered, ToolInvoked
from weakincentives.runtime.session import Session

__all__ = ["AdapterCase", "Asked", "MakeAdapter", "Played", "Served", "Trial"]

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
    body: Callable[[Trial], None]

    def __str__(self) -> str:
        return self.name

    def check(self, make_adapter: MakeAdapter, *, streaming: bool = False) -> None:
        """Raise AssertionError, with the case and what is wrong, unless the adapter does it.

        With ``streaming``, somebody listens to every run, so that text is asked for as it comes.
        """
        trial = Trial(make_adapter, streaming)
        try:
            self.body(trial)
        except SkipTest:
            raise
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{self.name}: it ended with {_named(error)}") from error


# What a case works with


@dataclass(frozen=True)
class Note:
    """What the tools of the cases leave in the session."""

    text: str


class Trial:
    """An adapter under test with a session, files and a clock; checks what every run must keep."""

    def __init__(self, make_adapter: MakeAdapter, streaming: bool = False) -> None:
        self._make_adapter = make_adapter
        self._streaming = streaming
        self.clock = FakeClock()
        self.session = Session(clock=self.clock)
        self.files = MemoryFilesystem({"a.txt": "old"}, clock=self.clock)
        self._turns: Sequence[Played] = ()
        self._asked: Callable[[], Sequence[Asked]] | None = None
        self._before = 0
        """How many messages the session had when the adapter was made."""

    def again(self) -> Trial:
        """Return another trial of the same adapter, with nothing in it."""
        return Trial(self._make_adapter, self._streaming)

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
        if isinstance(made, Served):
            self._asked = made.asked
            return made.adapter
        self._asked = None
        return made

    def evaluate(self, prompt: Prompt[Any], *turns: Played, **options: Any) -> PromptResponse[Any]:
        """Run to the end in the caller's thread, and check what every run must keep."""
        response = self.adapter(*turns).evaluate(prompt, self.session, **self.heard(options))
        self.check()
        return response

    async def aevaluate(
        self, prompt: Prompt[Any], *turns: Played, **options: Any
    ) -> PromptResponse[Any]:
        """Run to the end on the caller's event loop, and check what every run must keep."""
        adapter = self.adapter(*turns)
        response = await adapter.aevaluate(prompt, self.session, **self.heard(options))
        self.check()
        return response

    def fails(self, kind: type[E], prompt: Prompt[Any], *turns: Played, **options: Any) -> E:
        """Run, and return the error of this kind that must end the run."""
        try:
            response = self.evaluate(prompt, *turns, **options)
        except kind as error:
            self.check()
            return error
        answered = f"it must end with {kind.__name__}, and it answered {response.text!r}"
        raise AssertionError(answered)

    def heard(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a run with a listener, where the trial has one."""
        return {"on_event": _listen, **options} if self._streaming else options

    # What there is to look at

    @property
    def asked(self) -> Sequence[Asked] | None:
        """What the provider got; None where that is not known."""
        return None if self._asked is None else self._asked()

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self.session[Note]]

    @property
    def said(self) -> list[tuple[str, str]]:
        """The conversation: who said what."""
        return [(message.role, message.text) for message in self.session[Message]]

    @property
    def answers(self) -> list[str]:
        """What the tools answered."""
        return [text for role, text in self.said if role == "tool"]

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
            if message.role == "tool":
                call = waiting.pop(0) if waiting else None
                if call is None or call.id != message.call_id:
                    fail(f"an answer is out of place: {message.text!r}")
                record = records.get(call.id)
                if record is None or record.tool_name != call.name:
                    fail(f"the call {call.name!r} was answered and is not on record")
                if call.name != "open_sections":  # answered by whoever opens them
                    same(f"the answer of {call.name!r}", message.text, record.result.render())
            else:
                if waiting:
                    fail(f"the call {waiting[0].name!r} was never answered")
                waiting = list(message.tool_calls)

    def _check_asked(self, asked: Sequence[Asked], messages: Sequence[Message]) -> None:
        starts = [n for n, message in enumerate(messages) if message.is_first]
        answered = [n for n, m in enumerate(messages) if n >= self._before and m.role == "model"]
        given = [isinstance(turn, ModelTurn) for turn in self._turns[: len(asked)]]
        same("the number of turns that the provider gave", sum(given), len(answered))
        for number, request in enumerate(asked):
            turns_before = sum(given[:number])
            end = answered[turns_before] if turns_before < len(answered) else len(messages)
            start = max(n for n in starts if n < end)
            _check_request(number + 1, request, messages[start:end])
        self._check_rendered(asked)

    def _check_rendered(self, asked: Sequence[Asked]) -> None:
        """Compare the prompt and the tools that were offered, first and last."""
        rendered = self.session[PromptRendered].all()
        if not asked or not rendered:
            return
        for request, shown in ((asked[0], rendered[0]), (asked[-1], rendered[-1])):
            if shown.text not in request.system:
                fail(f"the provider got another prompt: {request.system!r}, not {shown.text!r}")
            same("the offered tools", sorted(request.tools), sorted(shown.tool_names))


def _check_request(number: int, request: Asked, messages: Sequence[Message]) -> None:
    what = f"what the provider got with request {number}"
    seen, expected = map(_comparable, (request.messages, messages))
    same(f"{what} (role, text, calls)", seen, expected)
    for got, message in zip(request.messages, messages, strict=True):
        ids = [(got.call_id, message.call_id)]
        ids += [(a.id, b.id) for a, b in zip(got.tool_calls, message.tool_calls, strict=True)]
        for seen_id, expected_id in ids:
            if seen_id:
                same(f"a call id in {what}", seen_id, expected_id)


def _comparable(messages: Sequence[Message]) -> list[tuple[str, str, list[tuple[str, object]]]]:
    return [(m.role, m.text, [(c.name, c.params) for c in m.tool_calls]) for m in messages]


def _listen(event: RunEvent) -> None:
    """Hear of everything, so that text is asked for as it comes."""


# Saying what is wrong


def same(what: str, seen: object, expected: object) -> None:
    """Raise AssertionError, in a sentence, unless both are equal."""
    if seen != expected:
        fail(f"{what} is {seen!r}; it must be {expected!r}")


def fail(text: str) -> NoReturn:
    """Raise AssertionError, also where Python leaves assertions out."""
    raise AssertionError(text)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
