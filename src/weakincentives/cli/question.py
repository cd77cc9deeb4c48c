"""Asking a person about a call: all of it, in a form that stands for one call only."""

from __future__ import annotations

import getpass
import glob
import json
import os
import re
import select
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from weakincentives.cli.common import FILE_NAME, Misuse, diff_style, say, shortened
from weakincentives.cli.view import View, is_utf8
from weakincentives.core.programs import (
    find_program,
    missing_program,
    safe_environment,
    script_in_reach,
)
from weakincentives.core.text import harmless, visible
from weakincentives.errors import FilesystemError, InvalidArguments, ToolValidationError
from weakincentives.prompt.approval import Approval, ApprovalRequest, ApprovalRule, plain_words
from weakincentives.runtime.approvals import POLL, ApprovalDesk
from weakincentives.runtime.approvals import Question as Published


class Approver:
    """Asks the person at the terminal, and lets other processes answer.

    Args:
        desk: Where other processes find the question.
        waits: Whether to wait for them if there is no terminal.
        where: How they answer, for a person.
        save: Saves a rule for all later runs.
    """

    def __init__(
        self,
        view: View,
        desk: ApprovalDesk,
        *,
        yes: bool,
        waits: bool = False,
        where: str = "",
        save: Callable[[ApprovalRule], object] | None = None,
    ) -> None:
        self._view = view
        self._desk = desk
        self._yes = yes
        self._waits = waits
        self._where = where
        self._save = save

    def ask(self, request: ApprovalRequest) -> Approval:
        if self._yes:
            return Approval(True, by="--yes")
        has_terminal = sys.stdin.isatty() and sys.stderr.isatty()
        if not has_terminal and not self._waits:
            return Approval(False, reason="there is no terminal to ask at")
        with self._desk.asking(request) as question, self._view.asking() as out:
            own = Approval(False, reason="the question was not answered")
            if has_terminal:
                with suppress(EOFError):
                    own = self._approval(request, _Talk(out, lambda: self._is_over(question)))
            else:
                say(f"{request.question} It waits for an answer: {self._where}")
                while not self._is_over(question):
                    select.select([], [], [], POLL)
            answer = question.settle(own)
            if answer is not own and has_terminal:
                said = "approved" if answer.approved else "denied"
                print(f"\n{said} elsewhere by {visible(answer.by)}", file=out, flush=True)
            return answer

    def _is_over(self, question: Published) -> bool:
        return question.is_answered or not self._view.is_asking

    def _approval(self, request: ApprovalRequest, talk: _Talk) -> Approval:
        arguments = None
        while True:
            answers = {**_ANSWERS, "e": "edit", "a": "always"}
            said, by = _answer(request, talk, answers), _person()
            if said == "y":
                return Approval(True, by, arguments=arguments)
            if said == "n":
                return Approval(False, by)
            if said == "r":
                return Approval(False, by, talk.line("Reason, for the model: "))
            if said == "e":
                request = _edited(request, talk)
                arguments = request.arguments
            elif (rule := self._rule(request, talk)) is not None:
                return Approval(True, by, arguments=arguments, always=rule)

    def _rule(self, request: ApprovalRequest, talk: _Talk) -> ApprovalRule | None:
        """Ask which calls to approve from now on, and whether to save that; None to go back."""
        try:
            rule = _chosen_rule(request, talk)
        except (FilesystemError, ValueError) as error:
            talk.tell("No rule:", str(error))
            return None
        if rule is None:
            return None
        talk.tell("Approve without asking:", str(rule))
        answers = {} if self._save is None else {"s": f"save to {FILE_NAME}"}
        said = talk.choose([], {**answers, "o": "for this session only", "b": "back"})
        if said == "s" and self._save is not None:
            try:
                self._save(rule)
            except (Misuse, OSError) as error:
                talk.tell("Not saved; it holds for this session only:", str(error))
        return None if said == "b" else rule


def choose(question: Sequence[str], answers: Mapping[str, str]) -> str:
    """Ask the person at the terminal, outside of a call; return the key of an answer.

    Raises:
        EOFError: They have left.
    """
    return _Talk(sys.stderr, lambda: False).choose(question, answers)


def ask_here(request: ApprovalRequest, is_over: Callable[[], bool]) -> Approval:
    """Ask the person at the terminal about a call of another process.

    Raises:
        EOFError: They have left, or it is over.
    """
    talk = _Talk(sys.stderr, is_over)
    said, by = _answer(request, talk, _ANSWERS), _person()
    reason = talk.line("Reason, for the model: ") if said == "r" else ""
    return Approval(said == "y", by, reason)


_ANSWERS = {"y": "yes", "n": "no", "r": "no with a reason"}
_HELP = {
    "y": "run the call",
    "n": "do not run it; the model is told that you denied it",
    "r": "do not run it; the model reads your reason",
    "e": "change an argument first, then answer",
    "a": "run it, and from now on all calls like it: you choose which",
    "v": "show every argument in full, and those with their default value",
}
"""What each answer does. Arguments that have their default value are not in the question."""


def _answer(request: ApprovalRequest, talk: _Talk, answers: Mapping[str, str]) -> str:
    width, height = _terminal_size()
    asked = question(request, width=width, height=height)
    some = {**answers, "v": "view all"} if asked.hidden else answers
    said = talk.choose(asked.lines, some, _HELP)
    if said == "v":
        asked = question(request, width=width, height=None)
        said = talk.choose(asked.lines, answers, _HELP)
    return said


def _edited(request: ApprovalRequest, talk: _Talk) -> ApprovalRequest:
    """Let the person change one argument; return the request with it."""
    # Numbered, since a name that a model made up could imitate the question.
    names = {
        name if _PLAIN_NAME.fullmatch(name) else f"#{number}": name
        for number, name in enumerate(request.arguments, 1)
    }
    label = next(iter(names), "")
    if len(names) > 1:
        label = talk.line(f"Which argument ({', '.join(names)})? ")
    if label not in names or request.revise is None:
        talk.say("There is nothing to edit by that name.")
        return request
    name = names[label]
    try:
        value = talk.edited(label, request.arguments[name])
        return request.revise({**request.arguments, name: value})
    except (InvalidArguments, ToolValidationError, OSError, ValueError) as error:
        talk.tell("Not changed:", str(error))
        return request


def _chosen_rule(request: ApprovalRequest, talk: _Talk) -> ApprovalRule | None:
    tool, preview = request.tool_name, request.preview
    kinds = {"t": f"all calls of {tool}"}
    kinds |= {"p": "some paths"} if preview.paths else {}
    kinds |= {"c": "some commands"} if preview.command else {}
    said = talk.choose(["Approve from now on:"], {**kinds, "b": "back"})
    if said == "b":
        return None
    rule = ApprovalRule(tool=tool)
    if said == "p":
        near = glob.escape(os.path.commonpath(preview.paths))
        near += "/**" if near and len(preview.paths) > 1 else ""
        path = talk.line(f"Paths, as a glob [{shortened(near, 60)}]: ") or near
        if not path:  # without one, the rule would be for all calls
            raise ValueError("give a glob of paths")
        rule = ApprovalRule(tool=tool, path=path)
    elif said == "c":
        near = shortened(shlex.join(preview.command), 60)
        typed = talk.line(f"Commands that begin with [{near}]: ")
        command = plain_words(typed) if typed else preview.command
        if not command:
            raise ValueError("give the first words of a command, without shell syntax")
        rule = ApprovalRule(tool=tool, command=command)
    if not rule.covers(request):
        raise ValueError("it would not cover this call")
    return rule


class _Talk:
    """Questions and answers on a terminal, line by line."""

    def __init__(self, out: TextIO, is_over: Callable[[], bool]) -> None:
        self._out = out
        self._is_over = is_over
        self._terminal = sys.stdin.fileno()

    def say(self, line: str, end: str = "\n", style: str = "") -> None:
        if not is_utf8(self._out):
            line = line.encode("ascii", "backslashreplace").decode()
        if style:  # unless the person wants no colours
            from rich.console import Console

            console = Console(file=self._out, highlight=False, markup=False, emoji=False)
            console.print(line, style=style, end=end, soft_wrap=True)
        else:
            print(line, file=self._out, end=end, flush=True)

    def tell(self, head: str, text: str) -> None:
        """Say something with text of others in it."""
        self.say(head)
        for line in _block(visible(text).split("\n"), max(_terminal_size()[0], 40)):
            self.say(line)

    def choose(
        self,
        question: Sequence[str],
        answers: Mapping[str, str],
        explained: Mapping[str, str] | None = None,
    ) -> str:
        """Ask, and return the key of an answer; ``?`` shows what each does, if that is given."""
        is_diff = False
        for line in question:
            is_diff = line == _CHANGE or (is_diff and line.startswith("    "))
            self.say(line, style=diff_style(line[len(_GUTTER) :]) if is_diff else "")
        keys = [*answers, "?"] if explained else [*answers]
        words, keys = ", ".join(answers.values()), f"[{'/'.join(keys)}]? "
        is_narrow = len(words) + len(keys) + 8 > _terminal_size()[0]
        choices = f"{words}\n{keys}" if is_narrow else f"{words} {keys}"
        while True:
            said = self.line(choices).lower()
            for key, answer in answers.items():
                if said in (key, answer):
                    return key
            if said == "?" and explained:
                for key, answer in answers.items():
                    self.say(f"  {key}  {answer}: {explained[key]}")

    def line(self, label: str) -> str:
        """Return a line that a person types; what was typed before, or pasted, does not count.

        Not ``input``: a thread that waits inside a file object when the program ends would crash.
        """
        import termios  # only where there are terminals

        while True:
            termios.tcflush(self._terminal, termios.TCIFLUSH)
            self.say(label, end="")
            said = b""
            while not said.endswith(b"\n"):
                if not self._is_ready(0.2):
                    continue
                more = os.read(self._terminal, 1024)
                if not more:
                    self.say("")
                    raise EOFError("the terminal was closed")
                said += more
            if not self._is_ready(0.05):
                return said.decode(errors="replace").strip()
            self.say("Several lines came at once. Type one line.")

    def _is_ready(self, seconds: float) -> bool:
        if self._is_over():
            raise EOFError("the call has ended")
        return bool(select.select([self._terminal], [], [], seconds)[0])

    def edited(self, label: str, value: object) -> object:
        """Return a value that the person has changed in their editor, or typed."""
        is_text = isinstance(value, str)
        text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
        if editor:
            new = self._in_editor(editor, text)
            return new if is_text else json.loads(new)
        new = self.line(f"New value of {label}, as text or JSON: ")
        if not new:
            raise ValueError("nothing was typed")
        try:
            return json.loads(new) if not is_text or new.startswith('"') else new
        except ValueError:
            return new

    def _in_editor(self, editor: Sequence[str], text: str) -> str:
        with tempfile.TemporaryDirectory(prefix="wink-") as folder:
            path = Path(folder, "argument.txt")
            path.write_text(text, "utf-8", newline="")
            code = self._run([*editor, str(path)])
            if code:
                raise ValueError(f"the editor exited with code {code}")
            new = path.read_bytes().decode()
        # Editors add a line end.
        return new.removesuffix("\n") if not text.endswith("\n") else new

    def _run(self, argv: list[str]) -> int:
        """Run a program in the foreground of the terminal: Ctrl-C is for it, not for us."""
        program = find_program(argv[0])
        if program is None:
            raise ValueError(missing_program(argv[0]))
        if why := script_in_reach(program, argv[1:-1], os.getcwd()):
            raise ValueError(why)
        # It may be redirected, but the editor needs the terminal.
        screen = [(os.POSIX_SPAWN_DUP2, sys.stderr.fileno(), 1)]
        signals = {signal.SIGTTOU}
        # A program in the background may change the foreground only if it blocks this signal.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            child = os.posix_spawn(
                program,
                argv,
                safe_environment(),
                file_actions=screen,
                setpgroup=0,
                setsigmask=before,
            )
            os.tcsetpgrp(self._terminal, child)
            while True:
                _, status = os.waitpid(child, os.WUNTRACED)
                if not os.WIFSTOPPED(status):
                    return os.waitstatus_to_exitcode(status)
                os.killpg(child, signal.SIGCONT)  # it read before it was in front, or by Ctrl-Z
        finally:
            os.tcsetpgrp(self._terminal, os.getpgrp())
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _terminal_size() -> tuple[int, int]:
    return os.get_terminal_size(sys.stderr.fileno())


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "the person at the terminal"


_GUTTER, _WRAPPED = "    | ", "    : "
"""Before each line of a value, and before the rest of a line that is too wide.

So no line begins with text from a model, which could imitate an argument or the question.
"""
_CHANGE = "  the change:"
_PROMPT = "  $ "
_FIRST, _LAST = 10, 4
"""Lines shown of a long value."""
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,39}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Question:
    lines: tuple[str, ...]
    hidden: int = 0
    """How many lines, or arguments that the diff shows, are hidden."""


def question(request: ApprovalRequest, *, width: int, height: int | None) -> Question:
    """Return the question about a call; with a height, long values are cut and marked."""
    width = max(width, 40)
    preview = request.preview
    left_out = () if height is None else {*preview.in_diff, *request.defaults}
    blocks = [list(_diff_lines(preview.diff, width))]
    for name, value in request.arguments.items():
        if preview.script and name == preview.script and isinstance(value, str):
            blocks.append(list(_script_lines(value, width)))
        elif name not in left_out:
            blocks.append(list(_value_lines(name, value, width)))
    blocks.append(list(_fact_lines(preview.facts, width, is_short=height is not None)))
    everything = [line for lines in blocks for line in lines] or ["  no arguments"]
    if height is None or len(everything) + 2 <= height:
        in_diff = () if height is None else preview.in_diff
        return Question((request.question, *everything), len(in_diff))
    room = max(height - 4, _FIRST + _LAST + 2)
    shown = [line for lines in blocks for line in _cut(lines)][:room]
    marks = sum(line.startswith(_MARK) for line in shown)
    hidden = len(everything) - len(shown) + marks
    mark = (
        f"NOT EVERYTHING IS SHOWN: {hidden:,} of {len(everything):,} lines are hidden; v shows all."
    )
    return Question((request.question, *shown, mark), hidden)


def _diff_lines(diff: str, width: int) -> Iterator[str]:
    if diff:
        yield _CHANGE
        yield from _block(visible(diff.replace("\\", "\\\\")).rstrip("\n").split("\n"), width)


def _fact_lines(facts: Mapping[str, str], width: int, *, is_short: bool) -> Iterator[str]:
    if facts:
        yield "  what it can reach:"
        told = [harmless(f"{name}: {text}") for name, text in facts.items()]
        yield from _block(["; ".join(told)] if is_short else told, width)


def _script_lines(text: str, width: int) -> Iterator[str]:
    """Yield a command as one types it; backslashes are doubled, as in all texts here."""
    from rich.cells import chop_cells

    lines = visible(text.replace("\\", "\\\\")).split("\n")
    if len(lines) > 1:
        yield f"{_PROMPT}({_count(lines)}):"
        yield from _block(lines, width)
        return
    start = _PROMPT
    for piece in chop_cells(lines[0], width - len(_GUTTER) - 1) or [""]:
        yield f"{start}{piece}"
        start = _WRAPPED


_MARK = "    ... "


def _cut(lines: Sequence[str]) -> Iterator[str]:
    hidden = lines[_FIRST:-_LAST]
    if len(hidden) < 2:
        yield from lines
        return
    yield from lines[:_FIRST]
    characters = sum(len(line) - len(_GUTTER) for line in hidden)
    yield f"{_MARK}{len(hidden):,} lines ({characters:,} characters) hidden"
    yield from lines[-_LAST:]


def _value_lines(name: str, value: object, width: int) -> Iterator[str]:
    """Yield an argument: on one line as JSON, or as a block with a gutter."""
    label = _label(name)
    if _cells(label) > width // 2 - 6:
        yield "  (a long name):"
        yield from _block([_json(name)], width)
        label = "(its value)"
    short = f"  {label}: {_json(value)}"
    has_lines = isinstance(value, str) and "\n" in value
    if len(short) < width and _cells(short) < width and not has_lines:
        yield short
    elif isinstance(value, str):
        lines = visible(value.replace("\\", "\\\\")).split("\n")
        has_end = lines[-1] == ""
        lines = lines[:-1] if has_end else lines
        head = f"  {label}: text, {_count(lines)}"
        counted = f"{head}, {len(value):,} characters"
        yield counted if _cells(counted) <= width else head
        yield from _block(lines, width)
        if not has_end:
            yield "    \\ no newline at the end"
    else:
        lines = visible(json.dumps(value, indent=2, ensure_ascii=False)).split("\n")
        yield f"  {label}: JSON, {_count(lines)}"
        yield from _block(lines, width)


def _label(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else _json(name)


def _json(value: object) -> str:
    return visible(json.dumps(value, ensure_ascii=False))


def _block(lines: Sequence[str], width: int) -> Iterator[str]:
    from rich.cells import chop_cells

    room = width - len(_GUTTER) - 1
    for line in lines:
        gutter = _GUTTER
        for piece in chop_cells(line, room) or [""]:
            yield f"{gutter}{piece}"
            gutter = _WRAPPED


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _count(lines: Sequence[str]) -> str:
    return "1 line" if len(lines) == 1 else f"{len(lines):,} lines"
