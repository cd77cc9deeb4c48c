"""Progressive disclosure: sections that are shown as a summary until the model opens them.

The choice lives in the session, so it follows snapshots, restore and reset. The model makes it
with ``open_sections``, which raises: the call is rolled back, whoever runs the loop notes the
choice with ``expand(session, error)`` and renders again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from weakincentives.errors import ToolValidationError, VisibilityExpansionRequired
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.slices import Reducer, Slice, upsert_by

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session


class SectionVisibility(Enum):
    """How much of a section the model is shown."""

    FULL = "full"
    SUMMARY = "summary"
    """Its heading and summary; neither its children nor its tools."""


@dataclass(frozen=True, slots=True)
class VisibilityState:
    """What was chosen for one section. A STATE slice: it follows snapshots."""

    section: str
    """The path of the section: the keys from the outermost to its own, joined by "/"."""
    visibility: SectionVisibility


_note: Reducer[VisibilityState] = upsert_by(lambda state: state.section)


def set_visibility(session: Session, section: str, visibility: SectionVisibility) -> None:
    """Choose how the next renderings for this session show the section at a path."""
    state = VisibilityState(section, SectionVisibility(visibility))
    session[VisibilityState].update(lambda current: Slice.of(_note(current, state)))


def expand(session: Session, error: VisibilityExpansionRequired) -> None:
    """Open the sections that a call of ``open_sections`` asked for; then render again."""
    for section in error.section_keys:
        set_visibility(session, section, SectionVisibility.FULL)


def chosen(session: Session | None) -> dict[str, SectionVisibility]:
    """Return what was chosen in the session, by path."""
    if session is None:
        return {}
    return {state.section: state.visibility for state in session.read_slice(VisibilityState)}


def how_to_open(path: str) -> str:
    """Return the line that stands below a summary."""
    return (
        f"_This is a summary. To get the whole section and its tools, call `open_sections` with "
        f'`"{path}"`; to only read it, call `read_section`._'
    )


# The tools of a prompt that has summaries


@dataclass(frozen=True, slots=True)
class OpenSectionsParams:
    section_keys: tuple[str, ...]
    """The sections to open, as the lines below their summaries name them."""
    reason: str
    """Why they are needed, in one sentence."""


@dataclass(frozen=True, slots=True)
class ReadSectionParams:
    section_key: str
    """The section to read, as the line below its summary names it."""


@dataclass(frozen=True, slots=True)
class SectionText:
    section: str
    text: str

    def render(self) -> str:
        return self.text


def _open_sections(params: OpenSectionsParams, *, context: ToolContext) -> ToolResult[None]:
    keys = tuple(dict.fromkeys(params.section_keys))
    _refuse_others(keys, context)
    raise VisibilityExpansionRequired(
        f"Open sections: {', '.join(keys)}. Reason: {params.reason}", section_keys=keys
    )


def _read_section(params: ReadSectionParams, *, context: ToolContext) -> ToolResult[SectionText]:
    path = params.section_key
    _refuse_others((path,), context)
    prompt = context.prompt or context.session.prompt
    if prompt is None:
        raise ToolValidationError("no prompt was rendered for this session")
    return ToolResult.ok(SectionText(path, prompt.section_text(path, context.session)))


def _refuse_others(keys: Sequence[str], context: ToolContext) -> None:
    """Refuse what the model was not shown as a summary."""
    rendered = context.rendering
    summarized = () if rendered is None else rendered.summarized
    others = ", ".join(repr(key) for key in keys if key not in summarized)
    if keys and not others:
        return
    if keys:
        problem = f"Not a summarized section: {others}. It does not exist or is open already"
    else:
        problem = "No section is named"
    known = ", ".join(summarized) or "none"
    raise ToolValidationError(f"{problem}. Summarized sections: {known}")


@cache  # when first needed: to make a tool loads what checks its parameters
def disclosure_tools() -> tuple[Tool[Any, Any], ...]:
    """Return the tools that a prompt with summarized sections offers."""
    return (
        Tool[OpenSectionsParams, None](
            name="open_sections",
            description="Show summarized sections in full and get their tools.",
            handler=_open_sections,
            reach="read",
        ),
        Tool[ReadSectionParams, SectionText](
            name="read_section",
            description="Read the full text of a summarized section without opening it.",
            handler=_read_section,
            reach="read",
        ),
    )
