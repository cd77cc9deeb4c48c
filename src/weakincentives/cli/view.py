"""How a run is shown: live on a terminal, as plain lines elsewhere, or as JSON.

All three views render the same events: the runtime's own, and three of the command line. Text from
models and files is escaped first: no control character of theirs ever reaches a terminal.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

from weakincentives.cli.common import diff_style, shortened, summary_of
from weakincentives.contrib.tools import Plan
from weakincentives.contrib.tools.planning import PlanStep
from weakincentives.core.budget import TokenPrice
from weakincentives.core.call import ToolCall
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.locks import defer_interrupts
from weakincentives.core.text import counted, harmless
from weakincentives.runtime import ToolInvoked
from weakincentives.runtime.conversation import (
    ContextCompacted,
    MessageReceived,
    ModelTurn,
    Retrying,
    RunEvent,
    SentBack,
    TextDelta,
    ToolProgress,
    ToolStarted,
    TurnEnded,
    TurnStarted,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

Outcome = Literal["done", "failed", "interrupted"]

# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    run: str
    workspace: str
    model: str
    task: str
    commands: str = ""
    """What commands run in."""
    branch: str = ""
    """The branch that the run works on; empty for the directory itself."""
    dry_run: bool = False
    resumed: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChangedFile:
    path: str
    added: int = 0
    removed: int = 0
    ignored: bool = False
    """Whether git ignores it, or a tool generated it: then it is only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """The record of a call, and what it changed."""

    record: ToolInvoked
    arguments: Any
    """As the model gave them, or as a person has edited them."""
    rolled_back: bool = False
    files: tuple[ChangedFile, ...] = ()
    is_merge: bool = False
    """Merges what other calls of the run have changed: its files are counted already."""

    @property
    def outcome(self) -> Literal["committed", "ok", "rolled back", "denied", "refused"]:
        """In the words of `wink log`."""
        if self.record.success:
            return "committed" if self.files else "ok"
        if self.record.denied_by:
            return "denied"
        return "rolled back" if self.record.ran else "refused"

    @property
    def output(self) -> str:
        """The end of the rendered value: of a test's output, the part that matters."""
        result = self.record.result
        text = "" if result.value is None else result.render()
        return text if len(text) <= _MAX_OUTPUT else f"...{text[-_MAX_OUTPUT:]}"


_MAX_OUTPUT = 2000


@dataclass(slots=True, kw_only=True)
class RunResult:
    """The totals of a run so far, and its last event."""

    run: str = ""
    outcome: Outcome = "failed"
    text: str = ""
    error: str = ""
    turns: int = 0
    calls: int = 0
    rolled_back: int = 0
    denied: int = 0
    files: dict[str, ChangedFile] = field(default_factory=dict[str, ChangedFile])
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None
    """None if the price is unknown."""
    seconds: float = 0.0
    dry_run: bool = False
    diff: str | None = None
    """Of a dry run: what it would have changed."""
    resume: str | None = None
    """The command that resumes it."""
    branch: str | None = None
    """The branch that has its changes, if they are not in the directory."""

    def add(self, event: Event, price: TokenPrice | None = None) -> None:
        match event:
            case TurnStarted():
                self.turns += 1
            case TurnEnded(turn=ModelTurn(usage=usage)) | ContextCompacted(usage=usage):
                self.input_tokens += usage.input_tokens
                self.output_tokens += usage.output_tokens
                if price is not None:
                    self.cost_usd = (self.cost_usd or 0.0) + price.of(usage)
            case CallEnded():
                self.calls += 1
                self.rolled_back += event.rolled_back
                self.denied += event.outcome == "denied"
                for each in () if event.is_merge else event.files:
                    before = self.files.get(each.path, ChangedFile(each.path))
                    lines = before.added + each.added, before.removed + each.removed
                    self.files[each.path] = ChangedFile(each.path, *lines, each.ignored)
            case _:
                pass

    @property
    def counts(self) -> list[str]:
        parts = [counted(self.calls, "call")]
        parts += [f"{self.rolled_back} rolled back"] if self.rolled_back else []
        return parts + ([f"{self.denied} denied"] if self.denied else [])

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


Event: TypeAlias = RunStarted | RunEvent | CallEnded | Plan | RunResult
"""A plan is an event when it has changed."""


def _json_fields(event: Event) -> dict[str, object] | None:
    """Return an event as docs/cli.md lists it; None for one that is not listed."""
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
        case ToolProgress(call, message, done, total):
            return {
                "type": "tool_progress",
                "call": call.id,
                "tool": call.name,
                "message": message,
                "done": done,
                "total": total,
            }
        case CallEnded(record=record):
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
        case ContextCompacted():
            names = ("shortened", "removed", "summary", "tokens_before", "tokens_after", "window")
            about = {name: getattr(event, name) for name in names}
            return {"type": "context_compacted", **about}
        case MessageReceived():
            return {"type": "message", "text": event.text}
        case SentBack():
            return {"type": "sent_back", "reason": event.reason}
        case RunResult():
            files = [asdict(event.files[path]) for path in sorted(event.files)]
            return {"type": "result", **asdict(event), "files": files}
        case _:
            return None


# The three views


class View:
    """Shows a run, and holds its progress."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._words = Words(is_utf8(out))
        self._lock = threading.RLock()
        self.totals = RunResult()
        self.price: TokenPrice | None = None
        """The model's price; None if it is unknown."""
        self.text = ""
        """The end of what the model is saying."""
        self.plan: Plan | None = None
        self._plan_before: Plan | None = None
        """The plan when the run began."""
        self.on_line: Callable[[str], bool] | None = None
        """Sends a line that a person types meanwhile; tells whether it was sent."""
        self.on_end: Callable[[], object] | None = None
        """Called when a person presses Ctrl-D on an empty line."""
        self.typed = ""
        """What a person has typed of the next line."""
        self.queued: list[str] = []
        """Lines that were sent and not received yet."""
        self.running: dict[str, tuple[ToolCall, float]] = {}
        """The calls that run now, by id, with their start."""
        self.progress: dict[str, str] = {}
        """What running calls have reported last."""
        self.began = SYSTEM_CLOCK.monotonic()
        self.is_asking = False
        """Whether a question to the person is open; the end of the call closes it."""

    def show(self, event: Event) -> None:
        # Not while printing: the drawing thread then holds the console's lock and waits for ours.
        with self._lock:
            before = self.plan
            self.totals.add(event, self.price)
            match event:
                case TextDelta():
                    self.text = (self.text + event.text)[-2000:]
                case TurnStarted() | Retrying() | TurnEnded():
                    self.text = ""
                case ToolStarted(call):
                    self.running[call.id] = call, SYSTEM_CLOCK.monotonic()
                case ToolProgress(call, message, done, total):
                    share = f"{done / total:.0%} " if done is not None and total else ""
                    self.progress[call.id] = f"{share}{message}"
                case CallEnded():
                    self.running.pop(event.record.call_id, None)
                    self.progress.pop(event.record.call_id, None)
                case Plan():
                    self.plan = event
                case MessageReceived(text) if text in self.queued:
                    self.queued.remove(text)
                case _:
                    pass
        self._print(event, before)
        if isinstance(event, CallEnded | RunResult):
            self.is_asking = False  # Ctrl-C was the answer

    def _print(self, event: Event, before: Plan | None) -> None:
        raise NotImplementedError

    @contextmanager
    def asking(self) -> Generator[TextIO]:
        """Yield the terminal for a question; nothing else is shown on it meanwhile."""
        self.is_asking = True
        try:
            yield self._out
        finally:
            self.is_asking = False

    def plan_text(self, plan: Plan) -> str:
        return "\n".join(line.plain for line in self._words.plan_lines(plan))

    def begin(self) -> None:
        """Show another run, from zero; after ``close``, or after a result."""
        self.totals = RunResult(run=self.totals.run)
        self.text = ""
        self._plan_before = self.plan
        self.running.clear()
        self.began = SYSTEM_CLOCK.monotonic()

    def close(self) -> None:
        """Leave the terminal as it was."""


@contextmanager
def open_view(*, as_json: bool = False, quiet: bool = False) -> Generator[View]:
    """Yield the view that suits the output."""
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
    """One JSON object per line, in ASCII."""

    def _print(self, event: Event, before: Plan | None) -> None:
        fields = _json_fields(event)
        if fields is not None:
            print(json.dumps(fields, default=repr), file=self._out, flush=True)

    @contextmanager
    def asking(self) -> Generator[TextIO]:
        with super().asking():
            yield sys.stderr


class PlainView(View):
    """Plain lines: progress on ``out``, the answer and the diff on ``results``."""

    def __init__(self, out: TextIO, results: TextIO, *, quiet: bool = False) -> None:
        super().__init__(out)
        self._results = results
        self._quiet = quiet

    def _print(self, event: Event, before: Plan | None) -> None:
        is_plan = isinstance(event, Plan)
        lines = self._words.plan_changes(event, before) if is_plan else self._words.lines(event)
        for line in () if self._quiet else lines:
            print(line.plain.rstrip(), file=self._out, flush=True)
        if isinstance(event, RunResult):
            for text in filter(None, (_diff_of(event), event.text)):
                print(self._words.text(text, lines=True), file=self._results, flush=True)


def _diff_of(result: RunResult) -> str | None:
    return "(nothing would change)" if result.diff == "" else result.diff


class LiveView(View):
    """A line for each call that ended, and below them a few live lines."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console

        super().__init__(out)
        self._console = Console(file=out, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._is_over = threading.Event()
        """That of the thread which draws the live lines."""
        self._drawing = threading.RLock()
        """Held while something is written: rich erases as many lines as it drew last."""
        self._switching = threading.Lock()
        self._keys: _Keys | None = None
        self._is_closed = False
        self._start()

    def _print(self, event: Event, before: Plan | None) -> None:
        if isinstance(event, RunResult):
            self.close()
        with self._drawing:
            self._print_lines(event)

    def _print_lines(self, event: Event) -> None:
        if self.is_asking:  # Ctrl-C was the answer: continue below the question
            self._console.print()
        lines = self._words.lines(event)
        if isinstance(event, RunResult) and self.plan is not self._plan_before:
            lines = [*self._words.plan_lines(self.plan), *lines]
        for line in lines:
            if line.no_wrap:
                overflow = "ellipsis" if self._words.is_utf8 else "crop"  # "…" is not ASCII
                self._console.print(line, no_wrap=True, overflow=overflow)
            else:  # a command to copy is not broken into lines
                self._console.print(line, soft_wrap=line.overflow == "ignore")
        if isinstance(event, RunResult):
            if diff := _diff_of(event):
                for each in self._words.text(diff, lines=True).split("\n"):
                    self._console.print(_plain(each, diff_style(each)), soft_wrap=True)
            if event.text:
                self._console.print(_plain(f"\n{self._words.text(event.text, lines=True)}"))

    @contextmanager
    def asking(self) -> Generator[TextIO]:
        self._pause()
        try:
            with super().asking() as out:
                yield out
        finally:
            self._start()

    def begin(self) -> None:
        super().begin()
        self._is_closed = False
        self._start()

    def close(self) -> None:
        self._is_closed = True
        self._pause()

    def _start(self) -> None:
        from rich.live import Live

        # Ctrl-C in between would leave the terminal without its echo.
        with defer_interrupts(), self._switching:
            # A question was still open when the run ended, or when the next one began.
            if self._is_closed or self._live is not None:
                return
            self._live = Live(
                get_renderable=self._region,
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            with self._drawing:
                self._live.start()
            self._is_over = threading.Event()
            args = self._live, self._is_over
            threading.Thread(target=self._draw, args=args, daemon=True).start()
            if self.on_line is not None:
                self._keys = _Keys(self)

    def _pause(self) -> None:
        with self._switching:
            self._is_over.set()
            live, self._live = self._live, None
            keys, self._keys = self._keys, None
        if keys is not None:
            keys.stop()
        if live is not None:
            with self._drawing:
                live.stop()

    def _draw(self, live: Live, is_over: threading.Event) -> None:
        while not is_over.wait(1 / 8):
            with self._drawing:
                if not is_over.is_set():
                    live.refresh()

    def _region(self) -> RenderableType:
        from rich.console import Group

        with self._lock:
            width, room = self._console.width, max(self._console.height - 2, 1)
            lines = self._words.region(self, width, SYSTEM_CLOCK.monotonic())
        return Group(*lines[-room:])


_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|O.|[^\[O])")
_CUT_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*|O)?$")


class _Keys:
    """Reads what a person types below a live view, without the terminal's echo."""

    def __init__(self, view: View) -> None:
        import termios

        self._view = view
        self._is_over = threading.Event()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        terminal = sys.stdin.fileno()
        self._before = termios.tcgetattr(terminal)
        mode = termios.tcgetattr(terminal)
        mode[3] &= ~(termios.ECHO | termios.ICANON)  # Ctrl-C is still a signal
        termios.tcsetattr(terminal, termios.TCSADRAIN, mode)
        _at_exit.append(self._restore)
        self._thread = threading.Thread(target=self._read, args=(terminal,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        try:
            self._thread.join()
        finally:
            self._restore()
            _at_exit.remove(self._restore)

    def _restore(self) -> None:
        import termios

        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)

    def _read(self, terminal: int) -> None:
        rest = ""
        while not self._is_over.is_set():
            if not select.select([terminal], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(terminal, 1024)
            except OSError:
                return
            if not data:
                return
            text = _SEQUENCE.sub("", rest + self._decode(data))
            cut = _CUT_SEQUENCE.search(text)
            rest = cut[0] if cut else ""
            for key in text.removesuffix(rest):
                self._press(key)

    def _press(self, key: str) -> None:
        view = self._view
        if key in "\r\n":
            line, view.typed = view.typed, ""
            if view.on_line is not None and line.strip():
                view.queued.append(line)
                if not view.on_line(line):
                    view.queued.remove(line)
        elif key in "\x7f\b":
            view.typed = view.typed[:-1]
        elif key == "\x15":  # Ctrl-U
            view.typed = ""
        elif key == "\x04" and not view.typed and view.on_end is not None:  # Ctrl-D
            view.on_end()
        elif key.isprintable():
            view.typed += key


_at_exit: list[Callable[[], None]] = []


def restore_terminal() -> None:
    """Leave the terminal as it was, at an exit that closes nothing."""
    for restore in _at_exit:
        restore()


# Words


def is_utf8(out: IO[str]) -> bool:
    """Tell whether the output can show more than ASCII."""
    named = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    encoding = (getattr(out, "encoding", None) or "ascii").lower().replace("-", "")
    # Python treats these two locales as UTF-8; a terminal may not.
    return encoding.startswith("utf") and named not in ("C", "POSIX")


_SIGNS = {"committed": "✓", "ok": "✓", "rolled back": "✗", "denied": "⊘", "refused": "✗"}
_ASCII_SIGNS = {**{each: each for each in _SIGNS}, "committed": "ok", "rolled back": "failed"}
_STYLES = {
    "committed": "green",
    "ok": "green",
    "rolled back": "red",
    "denied": "yellow",
    "refused": "red",
}
_STEPS = {"done": "✓", "in-progress": "▸", "blocked": "!", "pending": "·"}
_ASCII_STEPS = {"done": "[x]", "in-progress": "[>]", "blocked": "[!]", "pending": "[ ]"}
_STEP_STYLES = {"done": "green", "in-progress": "bold", "blocked": "yellow"}
_PLAN_LINES = 7
_MOST_FILES = 10
"""How many changed files the end of a run lists."""


class Words:
    """Events as lines of text, in UTF-8 or ASCII."""

    def __init__(self, is_utf8: bool) -> None:
        self.is_utf8 = is_utf8
        self._signs = _SIGNS if is_utf8 else _ASCII_SIGNS
        self._steps = _STEPS if is_utf8 else _ASCII_STEPS
        self._spinner = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏" if is_utf8 else "|/-\\"

    def text(self, text: str, *, lines: bool = False) -> str:
        """Return a text that is safe to show."""
        text = harmless(text, lines=lines)
        return text if self.is_utf8 else text.encode("ascii", "backslashreplace").decode()

    def lines(self, event: Event) -> list[Text]:
        """Return the lines that an event leaves."""
        match event:
            case RunStarted():
                return self._started(event)
            case TurnEnded(_, turn) if turn.text and turn.tool_calls:
                return [_plain(self.text(turn.text, lines=True), "dim")]
            case CallEnded():
                return self._ended(event)
            case Retrying():
                words = f"retrying in {event.wait:.0f} s: {self.text(str(event.error))}"
                return [_plain(words, "yellow")]
            case ContextCompacted():
                return [_plain(compaction_line(event), "dim")]
            case MessageReceived():
                return [_plain(f"> {self.text(event.text, lines=True)}", "bold")]
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
        branch = f" (branch: {event.branch})" if event.branch else ""
        return [_plain(f"{head}{branch}{commands}", "dim", "ignore"), *task, *notes]

    def _ended(self, event: CallEnded) -> list[Text]:
        line = _one_line()
        line.append(self._signs[event.outcome], style=_STYLES[event.outcome])
        line.append(f" {self.text(event.record.tool_name)}", style="bold")
        if event.outcome == "denied" and self.is_utf8:  # in ASCII the sign is the word
            line.append(" denied", style="bold yellow")
        if event.rolled_back:
            line.append(" rolled back", style="bold red")
        about = self.text(summary_of(event.arguments))
        line.append(f" {about}".rstrip())
        files, ignored = _parted(event.files)
        for each in files[:3]:
            path = self.text(shortened(each.path, 40))
            line.append("" if path == about else f" {path}")
            _append_counts(line, each)
        if len(files) > 3:
            line.append(f" and {counted(len(files) - 3, 'more file')}")
        line.append(f" + {counted(ignored, 'ignored file')}" if ignored else "", style="dim")
        line.append(f" {_seconds(event.record.duration)}", style="dim")
        if event.record.success:
            return [line]
        message, last = event.record.result.message, event.output.rstrip().rpartition("\n")[2]
        reasons = [message, last] if last and last not in message else [message]
        return [line, *(_one_line(f"  {self.text(shortened(r, 300))}", "dim") for r in reasons)]

    def _result(self, event: RunResult) -> list[Text]:
        parts = [counted(event.turns, "turn"), *event.counts]
        files, ignored = _parted(event.files.values())
        if event.files and not event.dry_run:
            parts.append(f"{counted(len(files), 'file')} changed")
        if event.tokens:
            parts.append(f"{event.tokens:,} tokens")
        if event.cost_usd:
            parts.append(f"${event.cost_usd:.4f}")
        totals = f"{event.outcome}: {', '.join(parts)}, {_seconds(event.seconds)}"
        lines = [_plain(totals, "green" if event.outcome == "done" else "red")]
        if not event.dry_run:  # its diff shows them
            for each in sorted(files, key=lambda file: file.path)[:_MOST_FILES]:
                lines.append(_one_line(f"  {self.text(each.path)}"))
                _append_counts(lines[-1], each)
            if len(files) > _MOST_FILES:
                lines.append(_one_line(f"  and {len(files) - _MOST_FILES} more files", "dim"))
            if ignored:
                lines.append(_one_line(f"  + {counted(ignored, 'ignored file')}", "dim"))
        if event.error:
            lines.append(_plain(self.text(event.error), "red"))
        if event.dry_run:
            lines.append(_plain("Dry run: everything was rolled back. The diff:"))
        if event.branch:
            merge = f"wink branch merge {event.branch}"
            lines.append(_plain(f"The changes are on the branch {event.branch}: {merge}", "bold"))
        if event.resume:
            lines.append(_plain(f"Resume with: {self.text(event.resume)}", "bold", "ignore"))
        return lines

    def region(self, view: View, width: int, now: float) -> list[Text]:
        """Return the live lines: at most about a dozen."""
        spinner = self._spinner[int(now * 8) % len(self._spinner)]
        said: list[str] = []
        for line in self.text(view.text, lines=True).split("\n")[-3:]:
            said += re.findall(f".{{1,{max(width - 3, 10)}}}", line)
        lines = [_one_line(f"  {line}", "italic") for line in said[-3:]]
        lines += self.plan_lines(view.plan, _PLAN_LINES)
        for call, since in list(view.running.values())[:3]:
            line = _one_line()
            line.append(f"{spinner} ", style="cyan")
            line.append(self.text(call.name), style="bold")
            line.append(f" {self.text(summary_of(call.params))}".rstrip())
            line.append(f" {_seconds(now - since)}", style="dim")
            line.append(f" {self.text(view.progress.get(call.id, ''))}".rstrip(), style="dim")
            lines.append(line)
        if len(view.running) > 3:
            lines.append(_one_line(f"  and {len(view.running) - 3} more calls", "dim"))
        if not view.running:
            doing = "answering" if view.text else "thinking"
            turn = view.totals.turns
            what = f"turn {turn}: {doing}" if turn else "starting"
            lines.append(_one_line(f"{spinner} {what}", "cyan"))
        lines += [_one_line(f"queued: {self.text(each)}", "dim") for each in view.queued[-2:]]
        if view.typed:
            lines.append(_one_line(f"> {self.text(view.typed[-max(width - 4, 10) :])}", "bold"))
        tokens = f"{view.totals.tokens:,} tokens"
        parts = [*view.totals.counts, tokens, _seconds(now - view.began)]
        lines.append(_one_line(f"  {', '.join(parts)}, Ctrl-C stops", "dim"))
        for line in () if self.is_utf8 else lines:
            line.overflow = "crop"
        return lines

    def plan_lines(self, plan: Plan | None, most: int | None = None) -> list[Text]:
        """Return a plan as a checklist; of a long one, the part around the current step."""
        if plan is None:
            return []
        steps = list(enumerate(plan.steps, 1))
        done = sum(1 for _, step in steps if step.status == "done")
        current = next((n for n, step in steps if step.status != "done"), len(steps))
        start = 0 if most is None else max(0, min(current - 2, len(steps) - most))
        lines = [_one_line(f"plan: {done} of {len(steps)} done", "dim")]
        shown = steps[start:] if most is None else steps[start : start + most]
        return lines + [self._step(number, step) for number, step in shown]

    def plan_changes(self, plan: Plan, before: Plan | None) -> list[Text]:
        """Return the steps of a plan that have changed."""
        known = dict(enumerate(() if before is None else before.steps, 1))
        steps = enumerate(plan.steps, 1)
        changed = [self._step(number, step) for number, step in steps if known.get(number) != step]
        return [*self.plan_lines(plan)[:1], *changed]

    def _step(self, number: int, step: PlanStep) -> Text:
        note = f" ({step.note})" if step.note and step.status == "blocked" else ""
        sign = self._steps.get(step.status, "?")
        style = _STEP_STYLES.get(step.status, "dim")
        return _one_line(f"  {sign} {number}. {self.text(step.title + note)}", style)


def compaction_line(event: ContextCompacted) -> str:
    """Return a line about what the model no longer sees."""
    parts = [f"{counted(event.shortened, 'result')} shortened"] if event.shortened else []
    if event.removed:
        how = "summarized" if event.summary else "removed"
        parts.append(f"{counted(event.removed, 'message')} {how}")
    size = f"about {event.tokens_before:,} tokens became {event.tokens_after:,}"
    return f"context compacted: {', '.join(parts) or 'nothing to remove'} ({size})"


def _plain(text: str, style: str = "", overflow: Literal["fold", "ignore"] = "fold") -> Text:
    from rich.text import Text

    return Text(text, style=style, overflow=overflow)


def _one_line(text: str = "", style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis", end="\n")


def _parted(files: Iterable[ChangedFile]) -> tuple[list[ChangedFile], int]:
    """Return the files to list, and the number of ignored ones."""
    files = list(files)
    listed = [each for each in files if not each.ignored]
    return listed, len(files) - len(listed)


def _append_counts(line: Text, file: ChangedFile) -> None:
    line.append(f" +{file.added}" if file.added else "", style="green")
    line.append(f" -{file.removed}" if file.removed else "", style="red")


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}s"
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"
