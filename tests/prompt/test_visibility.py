"""Progressive disclosure: summaries, the tools that open them, and the choice in the session."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import pytest

from weakincentives.errors import (
    PromptRenderError,
    PromptValidationError,
    VisibilityExpansionRequired,
)
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    Section,
    SectionVisibility,
    Tool,
    ToolContext,
    VisibilityState,
    expand,
    set_visibility,
    tool,
)
from weakincentives.runtime import Session, Snapshot, ToolCall, ToolInvoked, execute_tool

FULL, SUMMARY = SectionVisibility.FULL, SectionVisibility.SUMMARY
OPENERS = ["open_sections", "read_section"]


@dataclass(frozen=True)
class Guest:
    name: str


@functools.cache
def make(name: str) -> Tool[Any, Any]:
    @tool(name=name)
    def answer() -> str:
        """Answer."""
        return name

    return answer


def prompt_of(*sections: Section[Any], **options: Any) -> Prompt[Any]:
    return Prompt(PromptTemplate(sections=sections, **options))


def archive(**options: Any) -> Section[Any]:
    """A section with a tool and a child, summarized unless told otherwise."""
    child = MarkdownSection(key="index", template="Sorted by year.", tools=[make("look_up")])
    settings: dict[str, Any] = {
        "key": "archive",
        "template": "All the old files.",
        "summary": "Old files.",
        "tools": [make("restore")],
        "children": [child],
        "visibility": SUMMARY,
    }
    return MarkdownSection(**(settings | options))


def work() -> Section[Any]:
    return MarkdownSection(key="work", template="Do it.", tools=[make("act")])


@pytest.fixture
def session() -> Session:
    return Session()


def names(prompt: Prompt[Any]) -> list[str]:
    return [each.name for each in prompt.rendered.tools]


def open_sections(session: Session, *keys: str) -> VisibilityExpansionRequired:
    call = ToolCall("open_sections", {"section_keys": list(keys), "reason": "I need it"})
    with pytest.raises(VisibilityExpansionRequired) as caught:
        execute_tool(call, session=session)
    return caught.value


# Rendering


def test_a_summarized_section_shows_its_summary_and_how_to_open_it():
    prompt = prompt_of(archive(), work())

    text = prompt.render().text.split("\n\n")

    assert text[:2] == ["## 1. Archive", "Old files."]
    assert '`open_sections` with `"archive"`' in text[2]
    assert "`read_section`" in text[2]
    assert text[3:] == ["## 2. Work", "Do it."]


def test_a_summarized_section_keeps_its_tools_and_children_to_itself(session: Session):
    prompt = prompt_of(archive(), work())
    rendered = prompt.render(session)

    assert names(prompt) == ["act", *OPENERS]
    assert rendered.summarized == ("archive",)
    for hidden in ("restore", "look_up"):
        result = execute_tool(ToolCall(hidden), session=session)
        assert result.failure is not None
        assert result.failure.code == "TOOL_NOT_FOUND"


def test_the_tools_that_open_sections_are_offered_only_where_there_is_something_to_open():
    assert names(prompt_of(archive(visibility=FULL), work())) == ["restore", "look_up", "act"]
    assert names(prompt_of(archive(enabled=lambda: False), work())) == ["act"]


def test_a_summary_takes_parameters():
    section = MarkdownSection[Guest](key="desk", summary="For $name", visibility=SUMMARY)

    assert "For Ada" in prompt_of(section).bind(Guest("Ada")).render().text


def test_visibility_may_be_a_function_of_the_session():
    section = archive(visibility=lambda session: FULL if session[Guest].all() else SUMMARY)
    session = Session()
    prompt = prompt_of(section)

    assert prompt.render(session).summarized == ("archive",)
    session.dispatch(Guest("Ada"))
    assert prompt.render(session).summarized == ()


def test_visibility_that_is_none_is_named_with_the_path():
    inner = archive(visibility=lambda: "half")

    with pytest.raises(PromptRenderError, match="section outer/archive: visibility must return"):
        prompt_of(MarkdownSection(key="outer", children=[inner])).render()


def test_what_may_be_summarized_needs_a_summary():
    for visibility in (SUMMARY, lambda session: FULL):
        with pytest.raises(PromptValidationError, match=r"'archive': .*needs summary="):
            archive(summary="", visibility=visibility)


def test_a_summary_is_checked_like_a_template():
    with pytest.raises(PromptValidationError, match=r"unknown placeholders \$nam"):
        MarkdownSection[Guest](key="desk", summary="For $nam")
    with pytest.raises(PromptValidationError, match="the summary has a '\\$'"):
        MarkdownSection(key="desk", summary="5$")


@pytest.mark.parametrize("wrong", ["summary", None, lambda a, b, c: FULL])
def test_visibility_that_cannot_be_asked_is_refused(wrong: object):
    with pytest.raises(PromptValidationError, match="visibility"):
        archive(visibility=wrong)


def test_a_tool_of_the_same_name_as_ours_is_refused():
    section = MarkdownSection(key="mine", tools=[make("open_sections")])

    with pytest.raises(PromptValidationError, match=r"'open_sections'.*'mine'.*that open sections"):
        prompt_of(section, archive()).render()


# Opening


def test_opening_is_up_to_whoever_runs_the_loop(session: Session):
    prompt = prompt_of(archive(), work())
    prompt.render(session)

    error = open_sections(session, "archive", "archive")

    assert error.section_keys == ("archive",)
    assert "I need it" in str(error)
    assert session[VisibilityState].all() == ()
    assert [event.success for event in session[ToolInvoked].all()] == [False]
    expand(session, error)
    text = prompt.render(session).text
    assert text == (
        "## 1. Archive\n\nAll the old files.\n\n### 1.1. Index\n\nSorted by year.\n\n"
        "## 2. Work\n\nDo it."
    )
    assert names(prompt) == ["restore", "look_up", "act"]
    assert execute_tool(ToolCall("look_up"), session=session).value == "look_up"


def test_a_section_inside_an_opened_one_is_opened_in_a_second_step(session: Session):
    inner = archive(children=[])
    outer = MarkdownSection(key="outer", summary="More.", visibility=SUMMARY, children=[inner])
    prompt = prompt_of(outer)

    assert prompt.render(session).summarized == ("outer",)
    expand(session, open_sections(session, "outer"))
    assert prompt.render(session).summarized == ("outer/archive",)
    expand(session, open_sections(session, "outer/archive"))
    assert prompt.render(session).summarized == ()
    assert names(prompt) == ["restore"]


def test_a_key_that_is_not_summarized_is_refused_with_those_that_are(session: Session):
    prompt_of(archive(), work()).render(session)

    for keys in (["work"], ["archive", "attic"], []):
        call = ToolCall("open_sections", {"section_keys": keys, "reason": "why not"})
        result = execute_tool(call, session=session)
        assert not result.success
        assert result.message.endswith("Summarized sections: archive")
    assert (
        "'attic'"
        in execute_tool(ToolCall("read_section", {"section_key": "attic"}), session=session).message
    )


def test_one_session_does_not_open_sections_for_another():
    ours, theirs = Session(), Session()
    prompt = prompt_of(archive())
    prompt.render(theirs)
    set_visibility(ours, "archive", FULL)
    prompt.render(ours)

    assert execute_tool(ToolCall("restore"), session=ours).success
    result = execute_tool(ToolCall("restore"), session=theirs)
    assert result.failure is not None
    assert result.failure.code == "TOOL_NOT_FOUND"
    expand(theirs, open_sections(theirs, "archive"))


def test_policies_of_the_prompt_govern_the_tools_that_open_sections(session: Session):
    prompt_of(archive(), policies=[QuotaPolicy(0)]).render(session)

    call = ToolCall("read_section", {"section_key": "archive"})

    assert "Quota" in execute_tool(call, session=session).message


# Reading


def test_reading_gives_the_full_text_and_opens_nothing(session: Session):
    nested = archive(key="more", tools=[], children=[])
    inner = archive(tools=[], children=[nested])
    prompt = prompt_of(work(), inner)
    before = prompt.render(session)

    result = execute_tool(ToolCall("read_section", {"section_key": "archive"}), session=session)

    assert result.render() == (
        "## 2. Archive\n\nAll the old files.\n\n### 2.1. More\n\nAll the old files."
    )
    assert session[VisibilityState].all() == ()
    assert prompt.render(session) == before


def test_reading_leaves_alone_what_was_not_asked_for():
    """What is below another summary may lack its parameters still."""
    unready = MarkdownSection[Guest](key="desk", template="$name")
    prompt = prompt_of(archive(key="other", children=[unready]), archive(tools=[]))

    assert "Sorted by year." in prompt.section_text("archive")
    assert prompt.section_text("archive/index") == "### 2.1. Index\n\nSorted by year."
    with pytest.raises(PromptRenderError, match="section 'attic' does not exist"):
        prompt.section_text("attic")


# The choice


def test_the_choice_follows_snapshot_restore_and_reset(session: Session):
    prompt = prompt_of(archive())
    closed = session.snapshot()
    set_visibility(session, "archive", FULL)
    assert prompt.render(session).summarized == ()

    session.restore(closed)
    assert prompt.render(session).summarized == ("archive",)
    set_visibility(session, "archive", FULL)
    session.reset()
    assert prompt.render(session).summarized == ("archive",)


def test_the_choice_can_be_written_and_read_in_another_process(session: Session):
    set_visibility(session, "archive", FULL)

    again = Session.from_snapshot(Snapshot.from_json(session.snapshot().to_json()))

    assert prompt_of(archive()).render(again).summarized == ()


def test_a_section_can_be_closed_again(session: Session):
    prompt = prompt_of(archive(visibility=FULL), work())
    set_visibility(session, "archive", SUMMARY)
    assert names(prompt_of(work())) == ["act"]

    assert prompt.render(session).summarized == ("archive",)
    set_visibility(session, "archive", FULL)
    assert prompt.render(session).summarized == ()
    assert session[VisibilityState].all() == (VisibilityState("archive", FULL),)


def test_what_a_failed_call_chose_is_taken_back(session: Session):
    @tool
    def choose(*, context: ToolContext) -> str:
        """Choose, and fail."""
        set_visibility(context.session, "archive", FULL)
        raise ValueError("after all, no")

    prompt = prompt_of(archive(), MarkdownSection(key="own", tools=[choose]))
    prompt.render(session)

    assert not execute_tool(ToolCall("choose"), session=session).success
    assert prompt.render(session).summarized == ("archive",)


def test_a_choice_that_an_earlier_version_saved_is_still_read():
    """Its classes were in a module of their own then."""
    module = "weakincentives.prompt.visibility"
    chosen = {"$": "enum", "type": f"{module}:SectionVisibility", "name": "FULL"}
    fields = {"section": "guide/deploy", "visibility": chosen}
    state = {"$": "dataclass", "type": f"{module}:VisibilityState", "fields": fields}
    written = {
        "wink_snapshot": 1, "tag": "", "taken_at": 1.0, "log": [],
        "state": [[f"{module}:VisibilityState", {"$": "tuple", "items": [state]}]],
    }  # fmt: skip
    session = Session()

    session.restore(Snapshot.from_json(json.dumps(written)))

    assert session[VisibilityState].all() == (VisibilityState("guide/deploy", FULL),)
