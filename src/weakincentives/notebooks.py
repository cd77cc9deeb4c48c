"""How results look in a notebook: outcome, text and diff, readable on a light and a dark page."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from weakincentives.core.text import harmless

if TYPE_CHECKING:
    from weakincentives.tool_result import ToolResult

_GREEN, _RED, _GREY = "#2e8b57", "#d2504b", "#808080"
_MOST_LINES = 200


def html_of(result: ToolResult[Any]) -> str:
    """Return a result as HTML: nothing in it can act on the page."""
    metadata, failure = result.metadata, result.failure
    colour = _GREEN if result.success else _RED
    outcome = "success" if result.success else "failed"
    outcome += "" if failure is None else f" ({failure.code})"
    took = f", {metadata.duration * 1000:.1f} ms" if metadata.duration else ""
    head = f"<b>{_text(metadata.tool_name or 'result')}</b>: "
    head += f'<b style="color:{colour}">{_text(outcome)}</b>{took}'
    parts = [f"<div>{head}</div>"]
    if shown := result.render():
        parts.append(_block([_text(line) for line in shown.split("\n")]))
    if metadata.undone:
        parts.append(f"<div>Rolled back: {_text(', '.join(metadata.undone))}</div>")
    parts += [f"<div>Not undone: {_text(each)}</div>" for each in metadata.not_undone]
    if result.success and (diff := result.diff):
        parts.append(_block([_diff_line(line) for line in diff.rstrip("\n").split("\n")]))
    return f'<div style="border-left:3px solid {colour};padding-left:.6em">{"".join(parts)}</div>'


def _diff_line(line: str) -> str:
    colour = {"+": _GREEN, "-": _RED, "@": _GREY, "d": _GREY, "#": _GREY}.get(line[:1])
    style = "" if colour is None else f' style="color:{colour}"'
    return f"<span{style}>{_text(line)}</span>"


def _block(lines: list[str]) -> str:
    left = len(lines) - _MOST_LINES
    shown = [*lines[:_MOST_LINES], f"... {left} more lines"] if left > 1 else lines
    text = "\n".join(shown)
    return f'<pre style="overflow:auto;margin:.3em 0">{text}</pre>'


def _text(text: str) -> str:
    return escape(harmless(text, lines=True))
