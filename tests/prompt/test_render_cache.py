"""Rendering again: the same as from scratch, and no more work than what has changed."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.errors import PromptRenderError
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    RenderedPrompt,
    Section,
    SectionVisibility,
    Tool,
    ToolExample,
    set_visibility,
    tool,
)
from weakincentives.runtime import Session, ToolCall, execute_tool

FULL, SUMMARY = SectionVisibility.FULL, SectionVisibility.SUMMARY


@dataclass(frozen=True)
class Guest:
    name: str


@dataclass
class Mood:
    """Parameters that change under the prompt."""

    words: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Basket:
    """Frozen, but what is in it is not."""

    items: list[str]


@dataclass(frozen=True)
class Note:
    text: str


class Notes(Section[Any]):
    """A body that depends on the session."""

    def body(self, params: Any, session: Session | None) -> str:
        return "" if session is None else " ".join(note.text for note in session[Note].all())


@functools.cache
def make(name: str) -> Tool[Any, Any]:
    @tool(name=name, examples=[ToolExample("Say hi", {"text": "hi"}, "hi")])
    def answer(text: str = "") -> str:
        """Answer."""
        return name

    return answer


# Any tree, any change


@dataclass(frozen=True)
class Plan:
    """What a section of a random tree is made from."""

    kind: str
    tools: int
    children: tuple[Plan, ...]


def plans(children: st.SearchStrategy[tuple[Plan, ...]]) -> st.SearchStrategy[tuple[Plan, ...]]:
    kinds = st.sampled_from(["plain", "guest", "mood", "notes"])
    return st.lists(
        st.builds(Plan, kinds, st.integers(0, 2), children), min_size=1, max_size=3
    ).map(tuple)


TREES = st.recursive(st.just(()), plans, max_leaves=12)


class World:
    """A random tree with the switches that its sections look at."""

    def __init__(self, tree: tuple[Plan, ...]) -> None:
        self.disabled: set[str] = set()
        self.summarized: set[str] = set()
        self.tools: dict[str, str] = {}
        """The path of each tool's section."""
        self.paths: list[str] = []
        self.template = PromptTemplate(
            sections=[self.section(plan, f"s{n}", "") for n, plan in enumerate(tree)],
            policies=[QuotaPolicy(10_000)],
        )
        self.session = Session()
        self.mood = Mood()
        self.guest = Guest("Ada")

    def section(self, plan: Plan, key: str, above: str) -> Section[Any]:
        path = f"{above}{key}"
        self.paths.append(path)
        names = [f"t{len(self.tools) + n}" for n in range(plan.tools)]
        self.tools.update(dict.fromkeys(names, path))
        options: dict[str, Any] = {
            "key": key,
            "title": path,
            "tools": [make(name) for name in names],
            "summary": "In short.",
            "enabled": lambda: path not in self.disabled,
            "visibility": lambda: SUMMARY if path in self.summarized else FULL,
            "children": [
                self.section(child, f"s{n}", f"{path}/") for n, child in enumerate(plan.children)
            ],
        }
        if plan.kind == "notes":
            return Notes(**options)
        if plan.kind == "guest":
            return MarkdownSection[Guest](template="Hello $name", **options)
        if plan.kind == "mood":
            return MarkdownSection[Mood](template="Feel $words", **options)
        return MarkdownSection(template="Text.", **options)

    def change(self, what: str, place: int) -> None:
        path = self.paths[place % len(self.paths)] if self.paths else "s0"
        if what == "enabled":
            self.disabled ^= {path}
        elif what == "visibility":
            self.summarized ^= {path}
        elif what == "choice":
            set_visibility(self.session, path, SUMMARY if place % 2 else FULL)
        elif what == "mood":
            self.mood.words.append(str(place))
        elif what == "note":
            self.session.dispatch(Note(str(place)))
        elif what == "guest":
            self.guest = Guest(str(place % 3))

    def fresh(self) -> Prompt[Any]:
        return Prompt(self.template).bind(self.guest, self.mood)

    def is_hidden(self, rendered: RenderedPrompt, path: str) -> bool:
        """Whether a section or one around it is disabled, or it is in or below a summary."""
        keys = path.split("/")
        around = ["/".join(keys[: n + 1]) for n in range(len(keys))]
        return any(each in self.disabled or each in rendered.summarized for each in around)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["enabled", "visibility", "choice", "mood", "note", "guest", "none"]),
        st.integers(0, 40),
        st.booleans(),
    ),
    max_size=12,
)


@given(TREES, CHANGES)
def test_rendering_again_is_the_same_as_rendering_from_scratch(
    tree: tuple[Plan, ...], changes: list[tuple[str, int, bool]]
):
    world = World(tree)
    prompt = world.fresh()
    for what, place, examples in changes:
        world.change(what, place)
        if what == "guest":
            prompt = prompt.bind(world.guest)

        again = prompt.render(world.session, examples=examples)

        assert again == world.fresh().render(world.session, examples=examples)
        assert again == prompt.render(world.session, examples=examples)


@given(TREES, CHANGES)
def test_no_tool_of_a_hidden_section_is_offered_or_can_be_called(
    tree: tuple[Plan, ...], changes: list[tuple[str, int, bool]]
):
    world = World(tree)
    prompt = world.fresh()
    for what, place, _ in changes:
        world.change(what, place)
        rendered = prompt.render(world.session)
        offered = {each.name for each in rendered.tools}

        assert offered == set(rendered.offers)
        for name, path in world.tools.items():
            assert (name in offered) is not world.is_hidden(rendered, path)
            result = execute_tool(ToolCall(name), session=world.session)
            if name in offered:
                assert result.value == name
            else:
                assert result.failure is not None
                assert result.failure.code == "TOOL_NOT_FOUND"


def numbered(world: World, rendered: RenderedPrompt) -> Iterator[tuple[str, str]]:
    """Yield what headings there must be: the number and the path, from the tree alone."""

    def below(sections: tuple[Section[Any], ...], number: str) -> Iterator[tuple[str, str]]:
        here = [s for s in sections if s.title not in world.disabled]
        for n, section in enumerate(here, 1):
            yield f"{number}{n}.", section.title
            if section.title not in rendered.summarized:
                yield from below(section.children, f"{number}{n}.")

    return below(world.template.sections, "")


@given(TREES, CHANGES)
def test_the_numbers_match_the_tree(tree: tuple[Plan, ...], changes: list[tuple[str, int, bool]]):
    world = World(tree)
    prompt = world.fresh()
    for what, place, _ in changes:
        world.change(what, place)
        rendered = prompt.render(world.session)

        found = re.findall(r"^#+ ([\d.]+) (.*)$", rendered.text, re.MULTILINE)
        assert found == list(numbered(world, rendered))


# What is kept and what is not


class Counting(MarkdownSection[Guest]):
    """A section that counts how often it is asked for its text."""

    depends_only_on_params = True

    def __init__(self, **options: Any) -> None:
        super().__init__(template="Hello $name", **options)
        self.asked = 0

    def body(self, params: Any, session: Session | None) -> str:
        self.asked += 1
        return super().body(params, session)


def test_only_what_has_changed_is_rendered_again():
    off: set[str] = set()
    sections = [
        Counting(key=key, tools=[make(key)], enabled=lambda key=key: key not in off)
        for key in ("a", "b", "c", "d")
    ]
    prompt = Prompt(PromptTemplate(sections=sections)).bind(Guest("Ada"))
    first = prompt.render()
    again = prompt.render()

    assert [section.asked for section in sections] == [1, 1, 1, 1]
    assert again.tools is first.tools
    assert again.offers is first.offers
    off.add("c")
    changed = prompt.render()
    assert [section.asked for section in sections] == [1, 1, 1, 2]  # d has another number now
    assert "c" not in changed.offers


def test_prompts_that_differ_in_parameters_do_not_mix():
    section = Counting(key="a")
    prompt = Prompt(PromptTemplate(sections=[section]))
    ada, bob = prompt.bind(Guest("Ada")), prompt.bind(Guest("Bob"))

    for _ in range(2):
        assert "Hello Ada" in ada.render().text
        assert "Hello Bob" in bob.render().text
    with pytest.raises(PromptRenderError, match="needs Guest"):
        prompt.render()


@pytest.mark.parametrize(
    ("params", "change"),
    [
        (Mood(["good"]), lambda params: params.words.append("bad")),
        (Basket(["good"]), lambda params: params.items.append("bad")),
    ],
)
def test_parameters_that_can_change_are_looked_at_every_time(params: Any, change: Any):
    (name,) = vars(params)
    section = MarkdownSection(key="a", template=f"It is ${name}", default_params=params)
    prompt = Prompt(PromptTemplate(sections=[section]))
    prompt.render()

    change(params)

    assert "bad" in prompt.render().text


def test_a_body_of_its_own_is_asked_every_time_unless_it_says_otherwise():
    class Clocked(MarkdownSection[Any]):
        ticks = 0

        def body(self, params: Any, session: Session | None) -> str:
            self.ticks += 1
            return str(self.ticks)

    prompt = Prompt(PromptTemplate(sections=[Clocked(key="clock")]))

    assert [prompt.render().text[-1] for _ in range(3)] == ["1", "2", "3"]


# Examples in the text


@dataclass(frozen=True)
class Sum:
    numbers: tuple[int, ...]


def test_examples_stand_below_the_text_of_their_section_where_asked_for():
    @tool(
        examples=[
            ToolExample("Two", {"numbers": [1, 2]}, Sum((3,))),
            ToolExample("None at all", {"numbers": []}, Sum(())),
        ]
    )
    def add(numbers: tuple[int, ...]) -> Sum:
        """Add."""
        return Sum((sum(numbers),))

    inner = MarkdownSection(key="inner")
    prompt = Prompt(
        PromptTemplate(
            sections=[
                MarkdownSection(key="sums", template="Add.", tools=[add], children=[inner]),
                MarkdownSection(key="gone", enabled=lambda: False, tools=[make("x")]),
            ]
        )
    )

    assert "Examples" not in prompt.render().text
    assert prompt.render(examples=True).text == (
        "## 1. Sums\n\nAdd.\n\n**Examples**\n\n"
        "- `add`: Two\n"
        '  - call: `{"numbers": [1, 2]}`\n'
        '  - result: `{"numbers": [3]}`\n'
        "- `add`: None at all\n"
        '  - call: `{"numbers": []}`\n'
        '  - result: `{"numbers": []}`\n\n'
        "### 1.1. Inner"
    )
    assert "Examples" not in prompt.render().text
