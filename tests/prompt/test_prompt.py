"""Prompts: a tree of sections, bound to parameters and resources, rendered for a model."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.errors import PromptValidationError, ResourceError, UnboundResource
from weakincentives.prompt import (
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    QuotaPolicy,
    RenderedPrompt,
    Section,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
    tool,
)
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.runtime import PromptRendered, Session, ToolCall, execute_tool


@dataclass(frozen=True)
class Guest:
    name: str


@dataclass(frozen=True)
class Place:
    city: str


class Config:
    def __init__(self, source: str) -> None:
        self.source = source


@functools.cache
def make(name: str) -> Tool[Any, Any]:
    @tool(name=name)
    def answer(*, context: ToolContext) -> str:
        """Answer."""
        return context.resources.get(Config).source

    return answer


def prompt_of(*sections: Section[Any], **options: Any) -> Prompt[Any]:
    return Prompt(PromptTemplate(sections=sections, **options))


WELCOME = MarkdownSection[Guest](key="welcome", template="Hello $name")
SCENE = MarkdownSection[Place](key="scene", template="In $city")


# Rendering


def test_each_section_takes_the_parameters_of_its_own_type():
    prompt = prompt_of(WELCOME, SCENE).bind(Place("Rome"), Guest("Ada"))

    assert prompt.render().text == "## 1. Welcome\n\nHello Ada\n\n## 2. Scene\n\nIn Rome"
    assert str(prompt.render()) == prompt.render().text


def test_tools_come_in_the_order_in_which_they_are_declared():
    tools = [make(name) for name in ("zeta", "alpha", "mid", "last")]
    inner = MarkdownSection(key="inner", tools=[tools[2]])
    outer = MarkdownSection(key="outer", tools=tools[:2], children=[inner])

    rendered = prompt_of(outer, MarkdownSection(tools=tools[3:])).render()

    assert isinstance(rendered, RenderedPrompt)
    assert rendered.tools == tuple(tools)


def test_a_prompt_without_sections_is_empty():
    rendered = prompt_of().render()

    assert (rendered.text, rendered.tools) == ("", ())


def test_rendering_for_a_session_tells_it_what_its_calls_can_name():
    session = Session()
    prompt = prompt_of(MarkdownSection(title="Work", tools=[make("one")])).bind(
        resources={Config: Config("bound")}
    )

    rendered = prompt.render(session)

    assert (session.prompt, session.rendered) == (prompt, rendered)
    assert [event.tool_names for event in session[PromptRendered].all()] == [("one",)]
    assert execute_tool(ToolCall("one"), session=session).value == "bound"


def test_the_last_rendering_is_kept_and_made_when_asked_for():
    prompt = prompt_of(MarkdownSection(title="Work"))

    assert prompt.rendered is prompt.rendered
    assert prompt.render() is prompt.rendered


def test_names_are_derived_where_they_are_left_out():
    template = PromptTemplate(sections=[MarkdownSection(title="Code Review")])

    assert (template.ns, template.key, template.name) == ("default", "code-review", "Code Review")
    assert (Prompt(template).ns, Prompt(template).key) == ("default", "code-review")
    named = PromptTemplate(ns="reviews", key="daily", name="Daily")
    assert (named.ns, named.key, named.name) == ("reviews", "daily", "Daily")
    assert PromptTemplate().key == "prompt"


def test_a_template_carries_the_type_of_its_answer():
    assert PromptTemplate[Guest](sections=[]).output_type is Guest
    assert PromptTemplate(sections=[]).output_type is None


# Duplicates


def test_two_tools_of_one_name_are_refused_where_the_template_is_made():
    inner = MarkdownSection(key="inner", tools=[make("same")])

    with pytest.raises(PromptValidationError, match="'same': one in section 'a', one in 'b/inner'"):
        PromptTemplate(
            sections=[
                MarkdownSection(key="a", tools=[make("same")]),
                MarkdownSection(key="b", children=[inner]),
            ]
        )


def test_two_tools_of_one_name_that_depend_on_a_condition_are_refused_when_both_are_there():
    def section(key: str) -> Section[Any]:
        return MarkdownSection[Guest](
            key=key, tools=[make("same")], enabled=lambda params: key in params.name
        )

    prompt = prompt_of(section("a"), section("b"))

    assert len(prompt.bind(Guest("a")).render().tools) == 1
    with pytest.raises(PromptValidationError, match="two tools are called 'same'"):
        prompt.bind(Guest("ab")).render()


def test_two_sections_of_one_key_are_refused():
    with pytest.raises(PromptValidationError, match="duplicate section keys in the prompt: scene"):
        prompt_of(SCENE, SCENE)
    with pytest.raises(PromptValidationError, match="duplicate section keys in a/b: x, y"):
        pairs = [MarkdownSection(key=key) for key in "yxzxy"]
        prompt_of(MarkdownSection(key="a", children=[MarkdownSection(key="b", children=pairs)]))
    with pytest.raises(PromptValidationError, match="duplicate section keys"):
        prompt_of(SCENE).bind(sections=[SCENE])


def test_a_key_may_come_again_at_another_place():
    nested = MarkdownSection(key="outer", children=[SCENE])

    assert prompt_of(SCENE, nested).bind(Place("Rome")).render().text.count("In Rome") == 2


def test_a_derived_key_makes_way_for_one_that_is_given():
    sections = [
        MarkdownSection(title="Scene"),
        MarkdownSection(key="scene"),
        MarkdownSection(title="Scene"),
    ]

    assert prompt_of(*sections).render().text.count("Scene") == 3


# Binding


def test_binding_returns_another_prompt():
    template = PromptTemplate(sections=[WELCOME])
    prompt = Prompt(template)

    ada = prompt.bind(Guest("Ada"))
    bob = ada.bind(Guest("Bob"), sections=[SCENE], resources={Config: Config("bob")})

    assert "Hello Ada" in ada.render().text
    assert "In Rome" in bob.bind(Place("Rome")).render().text
    assert "Scene" not in ada.render().text
    assert ada.resources.find(Config) is None
    assert bob.template is ada.template is template
    assert len({id(each.resources) for each in (prompt, ada, bob)}) == 3


def test_what_is_bound_last_counts():
    prompt = prompt_of(WELCOME).bind(Guest("Ada")).bind(Guest("Bob"), None, Guest("Cyd"))

    assert "Hello Cyd" in prompt.render().text


def test_parameters_that_no_section_takes_are_no_error():
    assert prompt_of(MarkdownSection(title="Work")).bind(Guest("Ada"), None).render().text


@pytest.mark.parametrize("wrong", [Guest, {"name": "Ada"}, "Ada", 3])
def test_parameters_that_are_no_dataclass_instance_are_refused(wrong: object):
    with pytest.raises(PromptValidationError, match="parameters are dataclass instances"):
        prompt_of(WELCOME).bind(wrong)


def test_sections_are_added_after_those_of_the_template():
    one, two, three = (MarkdownSection(title=t, tools=[make(t)]) for t in ("a", "b", "c"))

    prompt = prompt_of(one).bind(sections=[two]).bind(sections=[three])

    assert [t.name for t in prompt.render().tools] == ["a", "b", "c"]
    with pytest.raises(PromptValidationError, match="two tools are called 'a'"):
        prompt.bind(sections=[MarkdownSection(title="again", tools=[make("a")])])


def test_extra_tools_are_offered_with_a_warning():
    with pytest.warns(UserWarning, match="without guidance") as caught:
        prompt = prompt_of().bind(extra_tools=[make("one")])
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="without guidance"):
        prompt = prompt.bind(extra_tools=[make("two")])

    assert [t.name for t in prompt.render().tools] == ["one", "two"]


# Resources


def test_what_is_bound_wins_over_sections_and_they_over_the_template():
    inner = MarkdownSection(key="inner", resources={Config: Config("inner")})
    outer = MarkdownSection(key="outer", resources={Config: Config("outer")}, children=[inner])
    plain = MarkdownSection(key="plain", children=[])
    ours = {Config: Config("template")}

    def source(prompt: Prompt[Any]) -> str:
        return prompt.resources.get(Config).source

    assert source(prompt_of(plain, resources=ours)) == "template"
    assert source(prompt_of(outer, resources=ours)) == "inner"
    bound = prompt_of(outer, resources=ours).bind(resources={Config: Config("bound")})
    assert source(bound) == "bound"
    assert source(bound.bind(resources={Config: Config("later")})) == "later"
    assert source(bound.bind()) == "bound"


def test_resources_come_as_a_mapping_or_a_registry():
    registry = ResourceRegistry.of(Binding(Config, lambda r: Config("made")))

    for prompt in (
        prompt_of().bind(resources=registry),
        prompt_of(resources=registry),
        prompt_of(MarkdownSection(resources=registry)),
    ):
        assert prompt.resources.get(Config).source == "made"


class Connection:
    """Notes what happens to it."""

    def __init__(self, log: list[str], name: str = "it") -> None:
        self.log = log
        self.name = name
        log.append(f"open {name}")

    def close(self) -> None:
        self.log.append(f"close {self.name}")


def with_connection(log: list[str]) -> Prompt[Any]:
    return prompt_of().bind(resources={Connection: Binding(Connection, lambda r: Connection(log))})


def test_resources_are_made_when_asked_for_and_closed_at_the_end_of_with():
    log: list[str] = []
    prompt = with_connection(log)

    with prompt.resources as resources:
        assert log == []
        assert resources.get(Connection) is prompt.resources.get(Connection)
        assert log == ["open it"]
    assert log == ["open it", "close it"]


def test_blocks_nest_and_the_outermost_closes():
    log: list[str] = []
    prompt = with_connection(log)

    with prompt.resources:
        with prompt.resources:
            prompt.resources.get(Connection)
        assert log == ["open it"]
    assert log == ["open it", "close it"]


def test_resources_can_be_used_again_with_fresh_instances():
    log: list[str] = []
    prompt = with_connection(log)

    for _ in range(2):
        with prompt.resources:
            prompt.resources.get(Connection)

    assert log == ["open it", "close it"] * 2


def test_what_was_opened_before_the_block_is_closed_with_it():
    log: list[str] = []
    prompt = with_connection(log)
    prompt.resources.get(Connection)

    with prompt.resources:
        pass

    assert log == ["open it", "close it"]


def test_closing_does_not_hide_an_error():
    class Stuck(Connection):
        def close(self) -> None:
            raise RuntimeError("stuck")

    prompt = prompt_of().bind(resources={Stuck: Binding(Stuck, lambda r: Stuck([]))})

    with pytest.raises(ValueError, match="first"), prompt.resources:
        prompt.resources.get(Stuck)
        raise ValueError("first")
    with pytest.raises(RuntimeError, match="stuck"), prompt.resources:
        prompt.resources.get(Stuck)


def test_a_resource_that_is_not_bound_is_named():
    with pytest.raises(UnboundResource, match="Config"):
        prompt_of().resources.get(Config)
    assert prompt_of().resources.find(Config) is None


def test_a_resource_that_makes_no_sense_is_refused_where_it_is_bound():
    with pytest.raises(ResourceError):
        prompt_of().bind(resources={Config: None})
    with pytest.raises(ResourceError):
        MarkdownSection(resources=[Config("x")])


def test_threads_share_one_instance():
    log: list[str] = []
    prompt = with_connection(log)
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait()
        prompt.resources.get(Connection)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert log == ["open it"]


def test_a_tool_call_gets_the_resources_of_the_prompt():
    prompt = prompt_of(
        MarkdownSection(title="Work", tools=[make("one")], resources={Config: Config("section")})
    )
    session = Session()

    context = ToolContext(session=session, prompt=prompt, resources=prompt.resources)

    assert execute_tool(ToolCall("one"), context=context).value == "section"
    assert execute_tool(ToolCall("one"), session=session, prompt=prompt).value == "section"


# Policies of the whole prompt


class Recorder:
    """A policy that notes when it is asked and told."""

    name = "recorder"

    def __init__(self) -> None:
        self.log: list[str] = []

    def check(self, tool: Any, params: object, *, context: ToolContext) -> Any:
        self.log.append(f"asked {tool.name}")
        return PolicyDecision.allow()

    def on_start(self, tool: Any, params: object, *, context: ToolContext) -> None:
        self.log.append(f"started {tool.name}")

    def on_result(
        self, tool: Any, params: object, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        self.log.append(f"told {tool.name}")


def test_a_policy_that_is_attached_in_several_places_hears_everything_once():
    policy = Recorder()
    sections = [
        MarkdownSection(title=name, tools=[make(name)], policies=[policy, policy])
        for name in ("a", "b")
    ]
    prompt = prompt_of(*sections, policies=[policy], resources={Config: Config("x")})
    session = Session()
    prompt.render(session)

    assert execute_tool(ToolCall("a"), session=session).success

    assert policy.log == ["asked a", "started a", "told a"]


def test_a_policy_hears_of_successes_while_its_section_is_disabled():
    """It may be enabled later, and must know what has been done."""
    policy = SequentialDependencyPolicy(dependencies={"deploy": frozenset({"test"})})
    ready: list[bool] = []
    prompt = prompt_of(
        MarkdownSection(title="Test", tools=[make("test")]),
        MarkdownSection(
            title="Deploy",
            tools=[make("deploy")],
            policies=[policy],
            enabled=lambda: bool(ready),
        ),
        resources={Config: Config("x")},
    )
    session = Session()
    prompt.render(session)
    execute_tool(ToolCall("test"), session=session)

    assert "Tool 'deploy' not found" in execute_tool(ToolCall("deploy"), session=session).message
    ready.append(True)
    prompt.render(session)
    assert execute_tool(ToolCall("deploy"), session=session).success


def test_two_policies_that_would_count_together_are_refused():
    with pytest.raises(PromptValidationError, match="both called 'quota'"):
        prompt_of(
            MarkdownSection(key="a", policies=[QuotaPolicy(3)]),
            MarkdownSection(key="b", policies=[QuotaPolicy(5)]),
        )
    with pytest.raises(PromptValidationError, match="both called 'quota'"):
        prompt_of(MarkdownSection(policies=[QuotaPolicy(3)]), policies=[QuotaPolicy(3)])
    prompt_of(MarkdownSection(policies=[QuotaPolicy(3)]), policies=[QuotaPolicy(3, name="whole")])


# A tree, whatever it looks like

TREES = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.booleans(), inner), max_size=3),
    max_leaves=12,
)


def built(tree: list[Any], names: list[str], seen: list[str], above: bool = True) -> list[Any]:
    sections: list[Section[Any]] = []
    for is_on, inner in tree:
        name = f"t{len(names)}"
        names.append(name)
        if above and is_on:
            seen.append(name)
        children = built(inner, names, seen, above and is_on)
        sections.append(
            MarkdownSection(
                title=name, tools=[make(name)], children=children, enabled=lambda on=is_on: on
            )
        )
    return sections


@given(tree=TREES)
def test_exactly_what_is_enabled_is_shown_and_offered_in_order(tree: list[Any]):
    names: list[str] = []
    seen: list[str] = []
    prompt = prompt_of(*built(tree, names, seen))

    rendered = prompt.render()

    assert [t.name for t in rendered.tools] == seen
    headings = [line.rsplit(" ", 1)[1] for line in rendered.text.splitlines() if line]
    assert headings == seen
    assert prompt.render() == rendered
