"""How a run is shown: live on a terminal, as plain lines elsewhere, or as JSON for machines.

All three are made from the same events. Whatever a model or a file brings is made harmless first:
no control character and no escape sequence of theirs ever reaches a terminal.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TextIO, cast

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.text import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

__all__ = [
    "CallEnded",
    "CallStarted",
    "ChangedFile",
    "Event",
    "PlanChanged",
    "PlanLine",
    "Retried",
    "RunResult",
    "RunStarted",
    "SentBackToWork",
    "TextCame",
    "TurnDone",
    "TurnStarted",
    "View",
    "harmless",
    "open_view",
    "summary_of",
]

Outcome = Literal["committed", "failed", "denied"]


# What happens in a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something to show. In JSON it has the fields of its class, and ``type``."""

    type: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    type: ClassVar[str] = "run_started"
    run: str
    workspace: str
    model: str
    task: str
    commands: str = ""
    """What commands run in."""
    dry_run: bool = False
    resumed: bool = False
    notes: tuple[str, ...] = ()
    """What the person should know before it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted(Event):
    type: ClassVar[str] = "turn_started"
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCame(Event):
    """A piece of the model's text; JSON has the whole text when the turn is done."""

    type: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDone(Event):
    type: ClassVar[str] = "turn_ended"
    turn: int
    text: str
    input_tokens: int = 0
    output_tokens: int = 0
    calls: int = 0
    """How many calls the model asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted(Event):
    type: ClassVar[str] = "tool_started"
    call: str
    tool: str
    arguments: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    path: str
    added: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded(Event):
    type: ClassVar[str] = "tool_ended"
    call: str
    tool: str
    arguments: Any
    outcome: Outcome
    message: str
    """What the model is told, without the value."""
    seconds: float
    output: str = ""
    """The end of what the model is given besides the message."""
    rolled_back: bool = False
    """Whether it ran, and what it did was taken back."""
    files: tuple[ChangedFile, ...] = ()
    denied_by: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    title: str
    status: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanged(Event):
    type: ClassVar[str] = "plan"
    objective: str
    steps: tuple[PlanLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried(Event):
    """The provider failed and is asked again; text of this turn does not count."""

    type: ClassVar[str] = "retrying"
    error: str
    wait: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBackToWork(Event):
    """The model stopped, and was told to go on."""

    type: ClassVar[str] = "sent_back"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Event):
    """The last event of a run."""

    type: ClassVar[str] = "result"
    run: str
    outcome: Literal["done", "failed", "interrupted"]
    text: str = ""
    error: str = ""
    turns: int = 0
    calls: int = 0
    rolled_back: int = 0
    denied: int = 0
    files: tuple[ChangedFile, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None
    """None where nobody knows the price."""
    seconds: float = 0.0
    dry_run: bool = False
    diff: str | None = None
    """Of a dry run: what it would have changed."""
    resume: str | None = None
    """The command that goes on with it."""
    notes: tuple[str, ...] = ()


# A call in a few words


def shortened(text: str, limit: int) -> str:
    """Return a text on one line of at most so many characters, and harmless."""
    start = harmless(text[: 4 * limit])  # a long one is not worth looking at to its end
    if len(start) <= limit and len(text) <= 4 * limit:
        return start
    return f"{start[: limit - 3]}..."


_MAIN_ARGUMENTS = (
    "command",
    "path",
    "source",
    "pattern",
    "query",
    "code",
    "objective",
    "step",
    "steps",
    "url",
    "topic",
)


def summary_of(arguments: object, limit: int = 60) -> str:
    """Return what a call is about, in a few words: its main argument, or the first ones."""
    if not isinstance(arguments, Mapping):
        return "" if arguments is None else shortened(str(arguments), limit)
    given = cast("Mapping[str, object]", arguments)
    if "source" in given and "destination" in given:
        return shortened(f"{given['source']} -> {given['destination']}", limit)
    if "step" in given and "status" in given:
        return shortened(f"{given['step']} {given['status']}", limit)
    for name in _MAIN_ARGUMENTS:
        if given.get(name):
            return shortened(_words(given[name]), limit)
    return shortened(", ".join(f"{name}={value!r}" for name, value in given.items()), limit)


def _words(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, cast("Sequence[object]", value)))
    return str(value)


# The three views


class View(Protocol):
    """Shows a run."""

    def show(self, event: Event) -> None:
        """Show what has happened."""
        ...

    def ask(self, question: Sequence[str], answers: Mapping[str, str]) -> str:
        """Put a question to the person at the terminal, and return one of the answers."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


@contextmanager
def open_view(*, as_json: bool = False, quiet: bool = False) -> Generator[View]:
    """Yield the view that fits where the output goes."""
    view = _view(as_json, quiet)
    try:
        yield view
    finally:
        view.close()


def _view(as_json: bool, quiet: bool) -> View:
    if as_json:
        return JsonView(sys.stdout)
    out = sys.stdout if sys.stdout.isatty() else sys.stderr
    if quiet or not out.isatty() or os.environ.get("TERM") == "dumb":
        return PlainView(out, sys.stdout, quiet=quiet)
    return LiveView(out)


class JsonView:
    """One JSON object a line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, event: Event) -> None:
        if isinstance(event, TextCame):
            return
        fields = {"type": event.type, **dataclasses.asdict(event)}
        # With escapes: what a terminal, or a log, makes of the line is not for a model to say.
        print(json.dumps(fields, default=repr), file=self._out, flush=True)

    def ask(self, question: Sequence[str], answers: Mapping[str, str]) -> str:
        return _ask_plainly(sys.stderr, question, answers)

    def close(self) -> None:
        pass


class PlainView:
    """Plain lines, without a single control code.

    Progress goes to ``out``; what the run is for, its answer and the diff, to ``results``.
    """

    def __init__(self, out: TextIO, results: TextIO, *, quiet: bool = False) -> None:
        self._out = out
        self._results = results
        self._quiet = quiet
        self._plan: PlanChanged | None = None
        self._words = Words(is_utf8(out))

    def show(self, event: Event) -> None:
        if not self._quiet:
            lines = self._words.lines(event)
            if isinstance(event, PlanChanged):
                lines, self._plan = self._words.plan_news(event, self._plan), event
            for line in lines:
                print(line.plain.rstrip(), file=self._out, flush=True)
        if isinstance(event, RunResult):
            diff = event.diff if event.diff is None else event.diff or _NO_DIFF
            for text in filter(None, (diff, event.text)):
                print(self._words.text(text, lines=True), file=self._results, flush=True)

    def ask(self, question: Sequence[str], answers: Mapping[str, str]) -> str:
        return _ask_plainly(self._out, question, answers)

    def close(self) -> None:
        pass


def _ask_plainly(out: IO[str], question: Sequence[str], answers: Mapping[str, str]) -> str:
    import termios  # not everywhere; but where it is not, there is no terminal to ask at

    for line in question:
        if not is_utf8(out):
            line = line.encode("ascii", "backslashreplace").decode()
        print(line, file=out, flush=True)
    # What was typed before the question is no answer to it.
    termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    while True:
        print(
            f"{', '.join(answers.values())} [{'/'.join(answers)}]? ", file=out, end="", flush=True
        )
        try:
            said = _line_from(sys.stdin.fileno()).strip().lower()
        except EOFError:
            print(file=out, flush=True)
            raise
        for key, answer in answers.items():
            if said in (key, answer):
                return key


def _line_from(terminal: int) -> str:
    """Return what a person types, up to the end of the line.

    Not ``input``: this is not the main thread, and one that waits inside a file object when the
    program ends would take the whole of it down.
    """
    said = b""
    while not said.endswith(b"\n"):
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        more = os.read(terminal, 1024)
        if not more:
            raise EOFError("the terminal was closed")
        said += more
    return said.decode(errors="replace")


class LiveView:
    """What happens now in a few lines at the bottom, and a line above for each call that ended."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console

        self._words = Words(is_utf8(out))
        self._console = Console(file=out, highlight=False, markup=False, emoji=False)
        self._state = _State()
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._switching = threading.Lock()
        self._is_asking = self._is_closed = False
        self._start()

    def show(self, event: Event) -> None:
        # Not while something is printed: the thread that draws has the console's lock then, and
        # waits for this one.
        with self._lock:
            self._state.note(event)
        if self._is_asking:  # Ctrl-C was the answer; below the question, not behind it
            self._is_asking = False
            self._console.print()
        if isinstance(event, RunResult):
            self.close()
            for line in self._words.plan(self._state.plan):
                self._print(line)
        for line in self._words.lines(event):
            self._print(line)
        if isinstance(event, RunResult):
            if event.diff is not None:
                self._show_diff(event.diff)
            if event.text:
                self._console.print(_plain(f"\n{self._words.text(event.text, lines=True)}"))

    def ask(self, question: Sequence[str], answers: Mapping[str, str]) -> str:
        self._pause()
        self._is_asking = True
        try:
            return _ask_plainly(self._console.file, question, answers)
        finally:
            self._is_asking = False
            self._start()

    def _start(self) -> None:
        """Begin to draw, below all that stands there by now."""
        from rich.live import Live

        with self._switching:
            if self._is_closed:  # a question was left open at the end, and is given up only now
                return
            self._live = Live(
                get_renderable=self._region,
                console=self._console,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def close(self) -> None:
        self._is_closed = True
        self._pause()

    def _pause(self) -> None:
        with self._switching:
            live, self._live = self._live, None
        if live is not None:
            live.stop()  # not under our lock: it waits for the thread that draws

    def _print(self, line: Text) -> None:
        if line.no_wrap:
            # The sign for what is left out is no ASCII.
            overflow = "ellipsis" if self._words.is_utf8 else "crop"
            self._console.print(line, no_wrap=True, overflow=overflow)
        else:
            # What is to be copied must be in one piece: the terminal itself goes on a line below.
            self._console.print(line, soft_wrap=line.overflow == "ignore")

    def _show_diff(self, diff: str) -> None:
        for line in self._words.text(diff, lines=True).split("\n"):
            style = next((s for mark, s in _DIFF_STYLES if line.startswith(mark)), "")
            self._console.print(_plain(line, style), soft_wrap=True)
        if not diff:
            self._console.print(_plain(_NO_DIFF))

    # The lines at the bottom

    def _region(self) -> RenderableType:
        from rich.console import Group

        with self._lock:
            width, room = self._console.width, max(self._console.height - 2, 1)
            lines = self._words.region(self._state, width, SYSTEM_CLOCK.monotonic())
        return Group(*lines[-room:])


_NO_DIFF = "(nothing would change)"
_DIFF_STYLES = (
    ("+++", "bold"),
    ("---", "bold"),
    ("+", "green"),
    ("-", "red"),
    ("@@", "cyan"),
)


@dataclass(slots=True)
class _State:
    """What the lines at the bottom tell."""

    turn: int = 0
    text: str = ""
    under_way: dict[str, tuple[CallStarted, float]] = field(
        default_factory=dict[str, tuple[CallStarted, float]]
    )
    plan: PlanChanged | None = None
    tokens: int = 0
    calls: int = 0
    rolled_back: int = 0
    denied: int = 0
    began: float = field(default_factory=SYSTEM_CLOCK.monotonic)

    def note(self, event: Event) -> None:
        match event:
            case TurnStarted():
                self.turn, self.text = event.turn, ""
            case TextCame():
                self.text = (self.text + event.text)[-2000:]
            case Retried():
                self.text = ""
            case TurnDone():
                self.text = ""
                self.tokens += event.input_tokens + event.output_tokens
            case CallStarted():
                self.under_way[event.call] = event, SYSTEM_CLOCK.monotonic()
            case CallEnded():
                self.under_way.pop(event.call, None)
                self.calls += 1
                self.rolled_back += event.rolled_back
                self.denied += event.outcome == "denied"
            case PlanChanged():
                self.plan = event
            case _:
                pass


# In words


def is_utf8(out: IO[str]) -> bool:
    """Whether what reads the output understands more than ASCII."""
    named = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    encoding = (getattr(out, "encoding", None) or "ascii").lower().replace("-", "")
    # Python itself takes these two for UTF-8; a terminal that is set to them need not.
    return encoding.startswith("utf") and named not in ("C", "POSIX")


_SIGNS = {"committed": "✓", "failed": "✗", "denied": "⊘"}
_ASCII_SIGNS = {"committed": "ok", "failed": "failed", "denied": "denied"}
_STYLES = {"committed": "green", "failed": "red", "denied": "yellow"}
_STEPS = {"done": "✓", "in-progress": "▸", "blocked": "!", "pending": "·"}
_ASCII_STEPS = {"done": "[x]", "in-progress": "[>]", "blocked": "[!]", "pending": "[ ]"}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_SPINNER = "|/-\\"
_PLAN_LINES = 7


class Words:
    """Events in words, with or without more than ASCII."""

    def __init__(self, is_utf8: bool) -> None:
        self.is_utf8 = is_utf8
        self._signs = _SIGNS if is_utf8 else _ASCII_SIGNS
        self._steps = _STEPS if is_utf8 else _ASCII_STEPS

    def text(self, text: str, *, lines: bool = False) -> str:
        """Return a text that can be shown as it is."""
        text = harmless(text, lines=lines)
        return text if self.is_utf8 else text.encode("ascii", "backslashreplace").decode()

    def lines(self, event: Event) -> list[Text]:
        """Return the lines that stay."""
        match event:
            case RunStarted():
                return self._started(event)
            case TurnDone() if event.text and event.calls:
                return [_plain(self.text(event.text, lines=True), "dim")]
            case CallEnded():
                return self._ended(event)
            case PlanChanged():
                return []
            case Retried():
                words = f"asked again in {event.wait:.0f} s: {self.text(event.error)}"
                return [_plain(words, "yellow")]
            case SentBackToWork():
                return [_plain(f"sent back: {self.text(event.reason)}", "yellow")]
            case RunResult():
                return self._result(event)
            case _:
                return []

    def _started(self, event: RunStarted) -> list[Text]:
        verb = "resumed" if event.resumed else "dry run" if event.dry_run else "run"
        head = f"{verb} {event.run} on {self.text(event.workspace)} with {self.text(event.model)}"
        commands = f" (commands: {event.commands})" if event.commands else ""
        task = [_plain(f"> {self.text(event.task, lines=True)}", "bold")] if event.task else []
        notes = [_plain(self.text(note)) for note in event.notes]
        return [_plain(f"{head}{commands}", "dim", "ignore"), *task, *notes]

    def _ended(self, event: CallEnded) -> list[Text]:
        line = _one_line()
        line.append(self._signs[event.outcome], style=_STYLES[event.outcome])
        line.append(f" {self.text(event.tool)}", style="bold")
        if event.outcome == "denied" and self.is_utf8:  # else the sign is the word
            line.append(" denied", style="bold yellow")
        if event.rolled_back:
            line.append(" rolled back", style="bold red")
        about = self.text(summary_of(event.arguments))
        line.append(f" {about}".rstrip())
        self._append_files(line, event.files, about)
        line.append(f" {_seconds(event.seconds)}", style="dim")
        if event.outcome == "committed":
            return [line]
        # The end of what a test or a compiler says is what matters of it.
        last = event.output.rstrip().rpartition("\n")[2]
        more = [last] if last and last not in event.message else []
        return [
            line,
            *(
                _one_line(f"  {self.text(shortened(each, 300))}", "dim")
                for each in (event.message, *more)
            ),
        ]

    def _append_files(self, line: Text, files: Sequence[ChangedFile], about: str) -> None:
        for each in files[:3]:
            path = self.text(shortened(each.path, 40))
            line.append("" if path == about else f" {path}")
            if each.added:
                line.append(f" +{each.added}", style="green")
            if each.removed:
                line.append(f" -{each.removed}", style="red")
        if len(files) > 3:
            line.append(f" and {len(files) - 3} more files")

    def _result(self, event: RunResult) -> list[Text]:
        style = "green" if event.outcome == "done" else "red"
        lines = [_plain(self._totals(event), style)]
        if event.error:
            lines.append(_plain(self.text(event.error), "red"))
        lines += [_plain(self.text(note)) for note in event.notes]
        if event.dry_run:
            lines.append(_plain("Everything was rolled back: it was a dry run. The diff:"))
        if event.resume:
            lines.append(_plain(f"Go on with: {self.text(event.resume)}", "bold", "ignore"))
        return lines

    def _totals(self, event: RunResult) -> str:
        parts = [f"{_count(event.turns, 'turn')}", _count(event.calls, "call")]
        if event.rolled_back:
            parts.append(f"{event.rolled_back} rolled back")
        if event.denied:
            parts.append(f"{event.denied} denied")
        if event.files and not event.dry_run:
            parts.append(f"{_count(len(event.files), 'file')} changed")
        tokens = event.input_tokens + event.output_tokens
        if tokens:
            parts.append(f"{tokens:,} tokens")
        if event.cost_usd is not None:
            parts.append(f"${event.cost_usd:.4f}")
        return f"{event.outcome}: {', '.join(parts)}, {_seconds(event.seconds)}"

    # The lines at the bottom of a terminal

    def region(self, state: _State, width: int, now: float) -> list[Text]:
        """Return what happens now: never more than a dozen lines."""
        spinner = _SPINNER if self.is_utf8 else _ASCII_SPINNER
        turning = spinner[int(now * 8) % len(spinner)]
        lines = [*self._said(state, width), *self.plan(state.plan, _PLAN_LINES)]
        if state.under_way:
            for started, since in list(state.under_way.values())[:3]:
                line = _one_line()
                line.append(f"{turning} ", style="cyan")
                line.append(self.text(started.tool), style="bold")
                line.append(f" {self.text(summary_of(started.arguments))}".rstrip())
                line.append(f" {_seconds(now - since)}", style="dim")
                lines.append(line)
            if len(state.under_way) > 3:
                lines.append(_one_line(f"  and {len(state.under_way) - 3} more calls", "dim"))
        elif state.turn:
            doing = "answering" if state.text else "thinking"
            lines.append(_one_line(f"{turning} turn {state.turn}: {doing}", "cyan"))
        else:
            lines.append(_one_line(f"{turning} starting", "cyan"))
        lines.append(self._footer(state, now))
        if not self.is_utf8:
            for line in lines:
                line.overflow = "crop"
        return lines

    def _said(self, state: _State, width: int) -> list[Text]:
        """Return the end of what the model is saying."""
        said: list[str] = []
        for line in self.text(state.text, lines=True).split("\n")[-3:]:
            said += re.findall(f".{{1,{max(width - 3, 10)}}}", line)
        return [_one_line(f"  {line}", "italic") for line in said[-3:]]

    def plan(self, plan: PlanChanged | None, most: int | None = None) -> list[Text]:
        """Return a plan as a checklist; of a long one, the part where the work is."""
        if plan is None:
            return []
        steps = list(enumerate(plan.steps, 1))
        done = sum(1 for _, step in steps if step.status == "done")
        first = next((n for n, step in steps if step.status != "done"), len(steps))
        start = 0 if most is None else max(0, min(first - 2, len(steps) - most))
        lines = [_one_line(f"plan: {done} of {len(steps)} done", "dim")]
        shown = steps[start:] if most is None else steps[start : start + most]
        return lines + [self._step(number, step) for number, step in shown]

    def plan_news(self, plan: PlanChanged, before: PlanChanged | None) -> list[Text]:
        """Return the steps of a plan that are not as they were."""
        known = dict(enumerate(() if before is None else before.steps, 1))
        steps = enumerate(plan.steps, 1)
        news = [self._step(number, step) for number, step in steps if known.get(number) != step]
        return [*self.plan(plan)[:1], *news]

    def _step(self, number: int, step: PlanLine) -> Text:
        style = {"done": "green", "in-progress": "bold", "blocked": "yellow"}.get(step.status)
        note = f" ({step.note})" if step.note and step.status == "blocked" else ""
        sign = self._steps.get(step.status, "?")
        return _one_line(f"  {sign} {number}. {self.text(step.title + note)}", style or "dim")

    def _footer(self, state: _State, now: float) -> Text:
        parts = [_count(state.calls, "call")]
        if state.rolled_back:
            parts.append(f"{state.rolled_back} rolled back")
        if state.denied:
            parts.append(f"{state.denied} denied")
        parts += [f"{state.tokens:,} tokens", _seconds(now - state.began), "Ctrl-C stops"]
        return _one_line(f"  {', '.join(parts)}", "dim")


def _plain(text: str, style: str = "", overflow: Literal["fold", "ignore"] = "fold") -> Text:
    from rich.text import Text

    return Text(text, style=style, overflow=overflow)


def _one_line(text: str = "", style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis", end="\n")


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}s"
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def _count(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"
