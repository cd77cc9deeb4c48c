"""How a run is shown: live on a terminal, as plain lines elsewhere, or as JSON for machines.

All three are made from the same events: the runtime's own, and three that only the command line
knows. Whatever a model or a file brings is made harmless first: no control character and no escape
sequence of theirs ever reaches a terminal.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

from weakincentives.budget import NO_TOKENS, TokenUsage
from weakincentives.cli.common import diff_style, shortened, summary_of
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.contrib.tools import Plan
from weakincentives.runtime.conversation import (
    Retrying,
    RunEvent,
    SentBack,
    TextDelta,
    ToolStarted,
    TurnEnded,
    TurnStarted,
)
from weakincentives.text import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

    from weakincentives.call import ToolCall
    from weakincentives.contrib.tools.planning import PlanStep
    from weakincentives.runtime import ToolInvoked

# What happens in a run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
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


@dataclass(frozen=True, slots=True)
class ChangedFile:
    path: str
    added: int = 0
    removed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """The record of a call, with what only its run can tell."""

    record: ToolInvoked
    arguments: Any
    """As the model gave them."""
    rolled_back: bool = False
    """Whether it ran, and what it did was undone."""
    files: tuple[ChangedFile, ...] = ()

    @property
    def outcome(self) -> Literal["committed", "failed", "denied"]:
        if self.record.success:
            return "committed"
        return "denied" if self.record.denied_by else "failed"

    @property
    def output(self) -> str:
        """The end of what the model is given besides the message: of tests, what matters."""
        result = self.record.result
        text = "" if result.value is None else result.render()
        return text if len(text) <= _MAX_OUTPUT else f"...{text[-_MAX_OUTPUT:]}"


_MAX_OUTPUT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The last event of a run."""

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
    """The command that continues it."""
    notes: tuple[str, ...] = ()


Event: TypeAlias = RunStarted | RunEvent | CallEnded | Plan | RunResult
"""A plan is told when it has changed."""


@dataclass(slots=True)
class Progress:
    """How far a run is: its totals, and what happens now."""

    turn: int = 0
    text: str = ""
    """What the model is saying."""
    under_way: dict[str, tuple[ToolCall, float]] = field(
        default_factory=dict[str, "tuple[ToolCall, float]"]
    )
    plan: Plan | None = None
    usage: TokenUsage = NO_TOKENS
    calls: int = 0
    rolled_back: int = 0
    denied: int = 0
    files: dict[str, ChangedFile] = field(default_factory=dict[str, ChangedFile])
    began: float = field(default_factory=SYSTEM_CLOCK.monotonic)

    def note(self, event: Event) -> None:
        match event:
            case TurnStarted():
                self.turn, self.text = event.number, ""
            case TextDelta():
                self.text = (self.text + event.text)[-2000:]
            case Retrying():
                self.text = ""
            case TurnEnded():
                self.text = ""
                self.usage = self.usage + event.turn.usage
            case ToolStarted():
                self.under_way[event.call.id] = event.call, SYSTEM_CLOCK.monotonic()
            case CallEnded():
                self.under_way.pop(event.record.call_id, None)
                self.calls += 1
                self.rolled_back += event.rolled_back
                self.denied += event.outcome == "denied"
                for each in event.files:
                    known = self.files.get(each.path, ChangedFile(each.path))
                    lines = known.added + each.added, known.removed + each.removed
                    self.files[each.path] = ChangedFile(each.path, *lines)
            case Plan():
                self.plan = event
            case _:
                pass


# The three views


class View:
    """Shows a run, and keeps its progress."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._words = Words(is_utf8(out))
        self._lock = threading.RLock()
        self.progress = Progress()

    def show(self, event: Event) -> None:
        """Show what has happened."""
        # Not while something is printed: the thread that draws has the console's lock then, and
        # waits for this one.
        with self._lock:
            before = self.progress.plan
            self.progress.note(event)
        self._print(event, before)

    def _print(self, event: Event, before: Plan | None) -> None:
        raise NotImplementedError

    def ask(self, question: Sequence[str], answers: Mapping[str, str]) -> str:
        """Put a question to the person at the terminal, and return one of the answers."""
        return _ask_plainly(self._out, question, answers)

    def close(self) -> None:
        """Leave the terminal as it was."""


@contextmanager
def open_view(*, as_json: bool = False, quiet: bool = False) -> Generator[View]:
    """Yield the view that fits where the output goes."""
    out = sys.stdout if sys.stdout.isatty() else sys.stderr
    if as_json:
        view: View = JsonView(sys.stdout)
    elif quiet or not out.isatty() or os.environ.get("TERM") == "dumb":
        view = PlainView(out, sys.stdout, quiet=quiet)
    else:
        view = LiveView(out)
    try:
        yield view
    finally:
        view.close()


class JsonView(View):
    """One JSON object a line."""

    def _print(self, event: Event, before: Plan | None) -> None:
        fields = _json_fields(event)
        if fields is not None:
            # With escapes: what a terminal, or a log, makes of the line is not for a model to say.
            print(json.dumps(fields, default=repr), file=self._out, flush=True)

    def ask(self, question: Sequence[str], answers: Mapping[str, str]) -> str:
        return _ask_plainly(sys.stderr, question, answers)


def _json_fields(event: Event) -> dict[str, object] | None:
    """Return an event as the documentation lists it; None for one that machines do not need."""
    match event:
        case RunStarted():
            return {"type": "run_started", **asdict(event)}
        case TurnStarted():
            return {"type": "turn_started", "turn": event.number}
        case TurnEnded(number, turn):
            return {
                "type": "turn_ended",
                "turn": number,
                "text": turn.text,
                "input_tokens": turn.usage.input_tokens,
                "output_tokens": turn.usage.output_tokens,
                "calls": len(turn.tool_calls),
            }
        case ToolStarted(call):
            return {
                "type": "tool_started",
                "call": call.id,
                "tool": call.name,
                "arguments": call.params,
            }
        case CallEnded():
            record = event.record
            return {
                "type": "tool_ended",
                "call": record.call_id,
                "tool": record.tool_name,
                "arguments": event.arguments,
                "outcome": event.outcome,
                "message": record.result.message,
                "seconds": record.duration,
                "output": event.output,
                "rolled_back": event.rolled_back,
                "files": [asdict(each) for each in event.files],
                "denied_by": record.denied_by,
                "notes": record.notes,
            }
        case Plan():
            steps = [asdict(step) for step in event.steps]
            return {"type": "plan", "objective": event.objective, "steps": steps}
        case Retrying():
            return {"type": "retrying", "error": str(event.error), "wait": event.wait}
        case SentBack():
            return {"type": "sent_back", "reason": event.reason}
        case RunResult():
            return {"type": "result", **asdict(event)}
        case _:
            return None


class PlainView(View):
    """Plain lines, without a single control code.

    Progress goes to ``out``; what the run is for, its answer and the diff, to ``results``.
    """

    def __init__(self, out: TextIO, results: TextIO, *, quiet: bool = False) -> None:
        super().__init__(out)
        self._results = results
        self._quiet = quiet

    def _print(self, event: Event, before: Plan | None) -> None:
        is_plan = isinstance(event, Plan)
        lines = self._words.plan_news(event, before) if is_plan else self._words.lines(event)
        for line in () if self._quiet else lines:
            print(line.plain.rstrip(), file=self._out, flush=True)
        if isinstance(event, RunResult):
            diff = event.diff if event.diff is None else event.diff or _NO_DIFF
            for text in filter(None, (diff, event.text)):
                print(self._words.text(text, lines=True), file=self._results, flush=True)


def _ask_plainly(out: IO[str], question: Sequence[str], answers: Mapping[str, str]) -> str:
    import termios  # not everywhere; but where it is not, there is no terminal to ask at

    for line in question:
        if not is_utf8(out):
            line = line.encode("ascii", "backslashreplace").decode()
        print(line, file=out, flush=True)
    # What was typed before the question is no answer to it.
    termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    choices = f"{', '.join(answers.values())} [{'/'.join(answers)}]? "
    while True:
        print(choices, file=out, end="", flush=True)
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


class LiveView(View):
    """What happens now in a few lines at the bottom, and a line above for each call that ended."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console

        super().__init__(out)
        self._console = Console(file=out, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._switching = threading.Lock()
        self._is_asking = self._is_closed = False
        self._start()

    def _print(self, event: Event, before: Plan | None) -> None:
        if self._is_asking:  # Ctrl-C was the answer; below the question, not behind it
            self._is_asking = False
            self._console.print()
        lines = self._words.lines(event)
        if isinstance(event, RunResult):
            self.close()
            lines = [*self._words.plan(self.progress.plan), *lines]
        for line in lines:
            if line.no_wrap:
                # The sign for what is left out is no ASCII.
                overflow = "ellipsis" if self._words.is_utf8 else "crop"
                self._console.print(line, no_wrap=True, overflow=overflow)
            else:
                # What is to be copied must be in one piece: the terminal goes on a line below.
                self._console.print(line, soft_wrap=line.overflow == "ignore")
        if isinstance(event, RunResult):
            if event.diff is not None:
                for each in self._words.text(event.diff or _NO_DIFF, lines=True).split("\n"):
                    self._console.print(_plain(each, diff_style(each)), soft_wrap=True)
            if event.text:
                self._console.print(_plain(f"\n{self._words.text(event.text, lines=True)}"))

    def ask(self, question: Sequence[str], answers: Mapping[str, str]) -> str:
        self._pause()
        self._is_asking = True
        try:
            return super().ask(question, answers)
        finally:
            self._is_asking = False
            self._start()

    def close(self) -> None:
        self._is_closed = True
        self._pause()

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

    def _pause(self) -> None:
        with self._switching:
            live, self._live = self._live, None
        if live is not None:
            live.stop()  # not under our lock: it waits for the thread that draws

    def _region(self) -> RenderableType:
        """Return the lines at the bottom."""
        from rich.console import Group

        with self._lock:
            width, room = self._console.width, max(self._console.height - 2, 1)
            lines = self._words.region(self.progress, width, SYSTEM_CLOCK.monotonic())
        return Group(*lines[-room:])


_NO_DIFF = "(nothing would change)"


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
_STEP_STYLES = {"done": "green", "in-progress": "bold", "blocked": "yellow"}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_SPINNER = "|/-\\"
_PLAN_LINES = 7


class Words:
    """Events in words, with or without more than ASCII."""

    def __init__(self, is_utf8: bool) -> None:
        self.is_utf8 = is_utf8
        self._signs = _SIGNS if is_utf8 else _ASCII_SIGNS
        self._steps = _STEPS if is_utf8 else _ASCII_STEPS
        self._spinner = _SPINNER if is_utf8 else _ASCII_SPINNER

    def text(self, text: str, *, lines: bool = False) -> str:
        """Return a text that can be shown as it is."""
        text = harmless(text, lines=lines)
        return text if self.is_utf8 else text.encode("ascii", "backslashreplace").decode()

    def lines(self, event: Event) -> list[Text]:
        """Return the lines that stay."""
        match event:
            case RunStarted():
                return self._started(event)
            case TurnEnded(_, turn) if turn.text and turn.tool_calls:
                return [_plain(self.text(turn.text, lines=True), "dim")]
            case CallEnded():
                return self._ended(event)
            case Retrying():
                words = f"asked again in {event.wait:.0f} s: {self.text(str(event.error))}"
                return [_plain(words, "yellow")]
            case SentBack():
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
        line.append(f" {self.text(event.record.tool_name)}", style="bold")
        if event.outcome == "denied" and self.is_utf8:  # else the sign is the word
            line.append(" denied", style="bold yellow")
        if event.rolled_back:
            line.append(" rolled back", style="bold red")
        about = self.text(summary_of(event.arguments))
        line.append(f" {about}".rstrip())
        for each in event.files[:3]:
            path = self.text(shortened(each.path, 40))
            line.append("" if path == about else f" {path}")
            line.append(f" +{each.added}" if each.added else "", style="green")
            line.append(f" -{each.removed}" if each.removed else "", style="red")
        if len(event.files) > 3:
            line.append(f" and {len(event.files) - 3} more files")
        line.append(f" {_seconds(event.record.duration)}", style="dim")
        if event.outcome == "committed":
            return [line]
        # The end of what a test or a compiler says is what matters of it.
        message, last = event.record.result.message, event.output.rstrip().rpartition("\n")[2]
        reasons = [message, last] if last and last not in message else [message]
        return [line, *(_one_line(f"  {self.text(shortened(r, 300))}", "dim") for r in reasons)]

    def _result(self, event: RunResult) -> list[Text]:
        parts = [_count(event.turns, "turn"), *_counts(event)]
        if event.files and not event.dry_run:
            parts.append(f"{_count(len(event.files), 'file')} changed")
        if tokens := event.input_tokens + event.output_tokens:
            parts.append(f"{tokens:,} tokens")
        if event.cost_usd is not None:
            parts.append(f"${event.cost_usd:.4f}")
        totals = f"{event.outcome}: {', '.join(parts)}, {_seconds(event.seconds)}"
        lines = [_plain(totals, "green" if event.outcome == "done" else "red")]
        if event.error:
            lines.append(_plain(self.text(event.error), "red"))
        if event.dry_run:
            lines.append(_plain("Everything was rolled back: it was a dry run. The diff:"))
        if event.resume:
            lines.append(_plain(f"Go on with: {self.text(event.resume)}", "bold", "ignore"))
        return lines

    # The lines at the bottom of a terminal

    def region(self, progress: Progress, width: int, now: float) -> list[Text]:
        """Return what happens now: never more than a dozen lines."""
        turning = self._spinner[int(now * 8) % len(self._spinner)]
        said: list[str] = []  # the end of it
        for line in self.text(progress.text, lines=True).split("\n")[-3:]:
            said += re.findall(f".{{1,{max(width - 3, 10)}}}", line)
        lines = [_one_line(f"  {line}", "italic") for line in said[-3:]]
        lines += self.plan(progress.plan, _PLAN_LINES)
        for call, since in list(progress.under_way.values())[:3]:
            line = _one_line()
            line.append(f"{turning} ", style="cyan")
            line.append(self.text(call.name), style="bold")
            line.append(f" {self.text(summary_of(call.params))}".rstrip())
            line.append(f" {_seconds(now - since)}", style="dim")
            lines.append(line)
        if len(progress.under_way) > 3:
            lines.append(_one_line(f"  and {len(progress.under_way) - 3} more calls", "dim"))
        if not progress.under_way:
            doing = "answering" if progress.text else "thinking"
            what = f"turn {progress.turn}: {doing}" if progress.turn else "starting"
            lines.append(_one_line(f"{turning} {what}", "cyan"))
        tokens = progress.usage.input_tokens + progress.usage.output_tokens
        parts = [*_counts(progress), f"{tokens:,} tokens", _seconds(now - progress.began)]
        lines.append(_one_line(f"  {', '.join(parts)}, Ctrl-C stops", "dim"))
        if not self.is_utf8:
            for line in lines:
                line.overflow = "crop"
        return lines

    def plan(self, plan: Plan | None, most: int | None = None) -> list[Text]:
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

    def plan_news(self, plan: Plan, before: Plan | None) -> list[Text]:
        """Return the steps of a plan that are not as they were."""
        known = dict(enumerate(() if before is None else before.steps, 1))
        steps = enumerate(plan.steps, 1)
        news = [self._step(number, step) for number, step in steps if known.get(number) != step]
        return [*self.plan(plan)[:1], *news]

    def _step(self, number: int, step: PlanStep) -> Text:
        note = f" ({step.note})" if step.note and step.status == "blocked" else ""
        sign = self._steps.get(step.status, "?")
        style = _STEP_STYLES.get(step.status, "dim")
        return _one_line(f"  {sign} {number}. {self.text(step.title + note)}", style)


def _plain(text: str, style: str = "", overflow: Literal["fold", "ignore"] = "fold") -> Text:
    from rich.text import Text

    return Text(text, style=style, overflow=overflow)


def _one_line(text: str = "", style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis", end="\n")


def _counts(run: Progress | RunResult) -> list[str]:
    parts = [_count(run.calls, "call")]
    if run.rolled_back:
        parts.append(f"{run.rolled_back} rolled back")
    if run.denied:
        parts.append(f"{run.denied} denied")
    return parts


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}s"
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def _count(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"
