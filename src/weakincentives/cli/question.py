"""Asking a person about a call: all of it, in a form that stands for one call only."""

from __future__ import annotations

import getpass
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weakincentives.prompt.approval import Approval, ApprovalRequest
from weakincentives.text import visible

if TYPE_CHECKING:
    from weakincentives.cli.view import View


class Approver:
    """Asks the person at the terminal."""

    def __init__(self, view: View, *, yes: bool) -> None:
        self._view = view
        self._yes = yes
        self._always: set[str] = set()

    def ask(self, request: ApprovalRequest) -> Approval:
        if self._yes:
            return Approval(True, by="--yes")
        if request.tool_name in self._always:
            return Approval(True, by=_person(), reason="always")
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return Approval(False, reason="nobody is at the terminal to be asked")
        try:
            said = self._said(request)
        except EOFError:
            return Approval(False, reason="the question was not answered")
        if said == "a":
            self._always.add(request.tool_name)
        return Approval(said != "n", by=_person(), reason="always" if said == "a" else "")

    def _said(self, request: ApprovalRequest) -> str:
        """Return the person's answer; where not everything was shown, they may ask for it."""
        head = f"{request.tool_name} wants to run; {_REACHES[request.reach]}."
        answers = {"y": "yes", "n": "no", "a": "always"}
        width, height = os.get_terminal_size(sys.stderr.fileno())
        asked = question(head, request.arguments, width=width, height=height)
        more = {"v": "view all"} if asked.hidden else {}
        said = self._view.ask(asked.lines, answers | more)
        if said != "v":
            return said
        asked = question(head, request.arguments, width=width, height=None)
        return self._view.ask(asked.lines, answers)


_REACHES = {
    "read": "it changes nothing",
    "reversible": "what it does can be undone",
    "compensable": "it reaches outside of the directory, and takes that back when it fails",
    "irreversible": "it reaches outside of the directory, and that cannot be undone",
    None: "what it does outside of the directory cannot be undone",
}


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "the person at the terminal"


_GUTTER, _WRAPPED = "    | ", "    : "
"""What stands before each line of a value, and before the rest of one that is too wide.

No text of others begins a line, so that none can look like an argument, or like the question.
"""
_FIRST, _LAST = 10, 4
"""Lines that are shown of a long value."""
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,39}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked."""

    lines: tuple[str, ...]
    hidden: int = 0
    """How many lines are left out; the last line says so."""


def question(
    head: str, arguments: Mapping[str, Any], *, width: int, height: int | None
) -> Question:
    """Return what to ask about a call; with a height, long values are cut, and that is said."""
    width = max(width, 40)
    values = [list(_value_lines(*each, width)) for each in arguments.items()]
    everything = [line for lines in values for line in lines] or ["  no arguments"]
    if height is None or len(everything) + 2 <= height:
        return Question((head, *everything))
    room = max(height - 4, _FIRST + _LAST + 2)
    shown = [line for lines in values for line in _cut(lines)][:room]
    marks = sum(line.startswith(_MARK) for line in shown)
    hidden = len(everything) - len(shown) + marks
    said = f"NOT ALL IS SHOWN: {hidden:,} of {len(everything):,} lines are left out; v shows all."
    return Question((head, *shown, said), hidden)


_MARK = "    ... "


def _cut(lines: Sequence[str]) -> Iterator[str]:
    hidden = lines[_FIRST:-_LAST]
    if len(hidden) < 2:
        yield from lines
        return
    yield from lines[:_FIRST]
    characters = sum(len(line) - len(_GUTTER) for line in hidden)
    yield f"{_MARK}{len(hidden):,} lines ({characters:,} characters) are not shown here"
    yield from lines[-_LAST:]


def _value_lines(name: str, value: object, width: int) -> Iterator[str]:
    """Yield an argument: on one line as JSON, or as a block of lines with a gutter."""
    label = name if _PLAIN_NAME.fullmatch(name) else _json(name)
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
