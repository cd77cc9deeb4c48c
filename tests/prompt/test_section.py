"""Sections: guidance with the tools, policies and resources it is about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from weakincentives.errors import PromptRenderError, PromptValidationError
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    ReadBeforeWritePolicy,
    Section,
    tool,
)
from weakincentives.runtime import Session

T = TypeVar("T")


@dataclass(frozen=True)
class Guest:
    name: str
    age: int = 30


@tool
def read_file(path: str) -> str:
    """Read a file."""
    return path


@tool
def write_file(path: str) -> str:
    """Write a file."""
    return path


def text_of(*sections: Section[Any], params: tuple[object, ...] = ()) -> str:
    return Prompt(PromptTemplate(sections=sections)).bind(*params).render().text


# Keys and titles


def test_tools_and_policies_are_enough():
    section = MarkdownSection(tools=[read_file, write_file], policies=[ReadBeforeWritePolicy()])

    rendered = Prompt(PromptTemplate(sections=[section])).render()

    assert rendered.tools == (read_file, write_file)
    assert rendered.text == "## 1. Section"


def test_nothing_at_all_is_enough():
    assert text_of(MarkdownSection(), MarkdownSection()) == "## 1. Section\n\n## 2. Section 2"


def test_title_and_key_are_made_from_each_other():
    assert MarkdownSection(key="file_ops-v2").title == "File Ops V2"
    assert text_of(MarkdownSection(key="file-ops")) == "## 1. File Ops"
    assert MarkdownSection(title="File Operations (new!)").derived_key() == "file-operations-new"
    assert MarkdownSection(title="日本").derived_key() == "section"


@pytest.mark.parametrize("key", ["File", "a b", "-a", "a/b", "x" * 65])
def test_a_key_that_cannot_be_addressed_is_refused(key: str):
    with pytest.raises(PromptValidationError, match="section key"):
        MarkdownSection(key=key)


# Templates


def test_fields_of_the_parameters_stand_in_the_template():
    section = MarkdownSection[Guest](title="Welcome", template="Hello $name, ${age}. It costs $$5.")

    assert text_of(section, params=(Guest("Ada"),)) == (
        "## 1. Welcome\n\nHello Ada, 30. It costs $5."
    )


def test_a_template_is_dedented_and_stripped():
    section = MarkdownSection(
        title="Deployment",
        template="""
            Deploy.

              - after testing
        """,
    )

    assert text_of(section) == "## 1. Deployment\n\nDeploy.\n\n  - after testing"


def test_a_value_that_looks_like_a_placeholder_is_left_alone():
    section = MarkdownSection[Guest](title="Welcome", template="Hello $name")

    assert "Hello $age $$" in text_of(section, params=(Guest("$age $$"),))


def test_an_unknown_placeholder_is_refused_where_it_is_written():
    with pytest.raises(
        PromptValidationError, match=r"'welcome': unknown placeholders \$nam; Guest"
    ):
        MarkdownSection[Guest](key="welcome", template="Hello $nam")
    with pytest.raises(
        PromptValidationError, match=r"unknown placeholders \$HOME; it has no param"
    ):
        MarkdownSection(key="welcome", template="See $HOME")


def test_a_dollar_that_begins_nothing_is_refused():
    with pytest.raises(PromptValidationError, match=r"write '\$\$'"):
        MarkdownSection(title="Prices", template="It costs $5")


def test_parameters_that_are_missing_or_of_another_type_are_named_with_the_path():
    inner = MarkdownSection[Guest](key="inner", template="$name")
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(key="outer", children=[inner])]))

    @dataclass
    class Other:
        name: str

    with pytest.raises(PromptRenderError, match=r"section outer/inner needs Guest.*is nothing"):
        prompt.render()
    with pytest.raises(PromptRenderError, match=r"section outer/inner needs Guest.*is Other"):
        prompt.bind(Other("x")).render()


def test_default_params_are_used_where_none_are_bound():
    section = MarkdownSection(title="Hi", template="$name", default_params=Guest("Ada"))

    assert text_of(section).endswith("Ada")
    assert text_of(section, params=(Guest("Bob"),)).endswith("Bob")


def test_default_params_of_another_type_are_refused():
    @dataclass
    class Other:
        pass

    with pytest.raises(PromptValidationError, match="default_params must be Guest, got Other"):
        MarkdownSection[Guest](title="Hi", default_params=Other())


def test_parameters_that_are_no_dataclass_are_refused():
    for wrong in (str, dict[str, str], list):
        with pytest.raises(PromptValidationError, match="must be a dataclass"):
            MarkdownSection[wrong](title="Hi")


def test_an_instance_of_a_subclass_is_taken_unless_there_is_a_closer_one():
    @dataclass(frozen=True)
    class Regular(Guest):
        since: int = 1999

    section = MarkdownSection[Guest](title="Hi", template="$name")

    assert text_of(section, params=(Regular("Reg"),)).endswith("Reg")
    assert text_of(section, params=(Guest("Gus"), Regular("Reg"))).endswith("Gus")


# Sections of one's own


class Greeting(MarkdownSection[Guest]):
    def __init__(self) -> None:
        super().__init__(title="Greeting", template="Hello $name")


class Shouting(Greeting):
    def body(self, params: Any, session: Session | None) -> str:
        return super().body(params, session).upper()


class Anything(Section[T]):
    def body(self, params: Any, session: Session | None) -> str:
        return f"{params} {session and session.session_id}"


def test_a_subclass_says_its_parameters_in_its_base():
    assert text_of(Greeting(), params=(Guest("Ada"),)).endswith("Hello Ada")
    assert text_of(Shouting(), params=(Guest("Ada"),)).endswith("HELLO ADA")


def test_a_generic_subclass_gets_its_parameters_where_it_is_made():
    template = PromptTemplate(sections=[Anything(title="None"), Anything[Guest](title="Some")])

    text = Prompt(template).bind(Guest("Ada", 3)).render(Session(session_id="s1")).text

    assert text == "## 1. None\n\nNone s1\n\n## 2. Some\n\nGuest(name='Ada', age=3) s1"


def test_an_error_in_a_body_is_named_with_the_path():
    class Broken(Section[Any]):
        def body(self, params: Any, session: Session | None) -> str:
            raise PromptRenderError("no weather today")

    with pytest.raises(PromptRenderError, match="section outer/broken: no weather today"):
        text_of(MarkdownSection(key="outer", children=[Broken(key="broken")]))


# Children


def test_children_are_numbered_and_indented_by_heading():
    deep = MarkdownSection(title="F")
    for title in "EDC":
        deep = MarkdownSection(title=title, children=[deep])
    text = text_of(
        MarkdownSection(title="A", template="Text.", children=[MarkdownSection(title="B"), deep]),
        MarkdownSection(title="G", template="End."),
    )

    assert text.split("\n\n") == [
        "## 1. A",
        "Text.",
        "### 1.1. B",
        "### 1.2. C",
        "#### 1.2.1. D",
        "##### 1.2.1.1. E",
        "###### 1.2.1.1.1. F",
        "## 2. G",
        "End.",
    ]


def test_a_disabled_section_takes_its_subtree_and_tools_along_and_leaves_no_gap():
    asked: list[str] = []
    child = MarkdownSection(
        title="Child", tools=[read_file], enabled=lambda: not asked.append("child")
    )
    sections = [
        MarkdownSection(title="Off", enabled=lambda: False, tools=[write_file], children=[child]),
        MarkdownSection(title="On"),
    ]

    rendered = Prompt(PromptTemplate(sections=sections)).render()

    assert rendered.text == "## 1. On"
    assert rendered.tools == ()
    assert asked == []


# Conditions


@dataclass
class Flag:
    on: bool


def method_condition(session: Session) -> bool:
    return session.session_id == "on"


class Condition:
    def __call__(self, params: Flag) -> bool:
        return params.on


LIMIT = 3


@pytest.mark.parametrize(
    "enabled",
    [
        lambda params: params.on,
        lambda flag: flag.on,
        lambda flag, /: flag.on,
        lambda *, params: params.on,
        lambda session: session.session_id == "on",
        lambda *, session: session.session_id == "on",
        lambda params, session: params.on and session.session_id == "on",
        lambda session, params: params.on and session.session_id == "on",
        lambda p, s: p.on and s.session_id == "on",
        lambda p, s, /: p.on and s.session_id == "on",
        lambda params, *, session: params.on and session.session_id == "on",
        lambda params, session=None: params.on and session.session_id == "on",
        lambda params, limit=LIMIT: params.on and limit == 3,
        lambda *args, **kwargs: True,
        method_condition,
        Condition(),
    ],
)
def test_a_condition_asks_for_params_session_both_or_nothing(enabled: Any):
    section = MarkdownSection[Flag](title="Maybe", enabled=enabled)
    prompt = Prompt(PromptTemplate(sections=[section]))
    free = enabled.__code__.co_flags & 0x04 if hasattr(enabled, "__code__") else 0

    assert prompt.bind(Flag(True)).render(Session(session_id="on")).text == "## 1. Maybe"
    if not free:
        assert prompt.bind(Flag(False)).render(Session(session_id="off")).text == ""


def test_a_condition_without_a_session_gets_none():
    asked: list[object] = []
    section = MarkdownSection(title="Maybe", enabled=lambda session: asked.append(session) or True)

    assert text_of(section) == "## 1. Maybe"
    assert asked == [None]


def test_a_condition_is_asked_once_per_rendering():
    asked: list[int] = []
    section = MarkdownSection(
        title="Maybe",
        tools=[read_file],
        policies=[QuotaPolicy(3)],
        enabled=lambda: not asked.append(1),
    )
    prompt = Prompt(PromptTemplate(sections=[section]))

    prompt.render()
    assert len(asked) == 1
    prompt.render()
    assert len(asked) == 2


async def async_condition() -> bool:
    return True


@pytest.mark.parametrize("enabled", [True, "yes", async_condition, lambda a, b, c: True])
def test_what_cannot_be_asked_is_refused(enabled: Any):
    with pytest.raises(PromptValidationError, match="enabled"):
        MarkdownSection(title="Maybe", enabled=enabled)


# What does not belong


def test_what_is_no_tool_is_refused():
    with pytest.raises(PromptValidationError, match=r"section 'files': .* is not a Tool"):
        MarkdownSection(key="files", tools=[lambda: None])


def test_what_is_no_section_is_refused_with_its_place():
    with pytest.raises(PromptValidationError, match="in the prompt: 'text' is not a Section"):
        PromptTemplate(sections=["text"])
    with pytest.raises(PromptValidationError, match="in outer: 'text' is not a Section"):
        PromptTemplate(sections=[MarkdownSection(key="outer", children=["text"])])


def test_a_section_that_contains_itself_is_refused():
    inner = MarkdownSection(key="inner")
    outer = MarkdownSection(key="outer", children=[inner])
    inner.children = (outer,)

    with pytest.raises(PromptValidationError, match="in outer/inner: section 'outer' contains it"):
        PromptTemplate(sections=[outer])


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="colour"):
        MarkdownSection(title="Red", colour="red")


@dataclass
class Sized:
    """Parameters that are falsy as a value are parameters all the same."""

    items: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)


def test_parameters_may_be_falsy():
    section = MarkdownSection(title="Items", template="$items", default_params=Sized())

    assert text_of(section).endswith("[]")
    assert text_of(section, params=(Sized(["a"]), Sized())).endswith("[]")
