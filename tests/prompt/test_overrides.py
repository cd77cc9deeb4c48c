"""Overrides: texts of a prompt replaced by tag, and refused when they are out of date."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.errors import PromptOverrideError, StaleOverride, ToolDefinitionError
from weakincentives.prompt import (
    ExampleData,
    ExamplesOverride,
    MarkdownSection,
    Prompt,
    PromptOverrides,
    PromptOverridesStore,
    PromptTemplate,
    QuotaPolicy,
    RenderedPrompt,
    Section,
    SectionOverride,
    TextOverride,
    Tool,
    ToolContext,
    ToolExample,
    ToolOverride,
    ToolResult,
    describe,
    tool,
)
from weakincentives.runtime import Session


@dataclass(frozen=True)
class Target:
    environment: str
    """Where to deploy to."""
    replicas: int = 1


@dataclass(frozen=True)
class Deployed:
    url: str


@dataclass(frozen=True)
class Guest:
    name: str


class Clock(Section[Any]):
    """A section that makes its text itself."""

    def body(self, params: object, session: Session | None) -> str:
        return "It is noon."


def deploy_handler(params: Target, *, context: ToolContext) -> ToolResult[Deployed]:
    return ToolResult.ok(Deployed(f"https://{params.environment}"))


DEPLOY = Tool[Target, Deployed](
    name="deploy",
    description="Deploy the project.",
    handler=deploy_handler,
    examples=[ToolExample("To staging", Target("staging"), Deployed("https://staging"))],
)


@tool
def status(service: str, verbose: bool = False) -> str:
    """Say how a service is.

    Args:
        service: Its name.
    """
    return f"{service} is up, {verbose}"


LOCKED = Tool[Target, Deployed](
    name="roll_back", description="Roll back.", handler=deploy_handler, accepts_overrides=False
)


def template(
    greeting: str = "Hello $name.", steps: str = "Test first.", deploy: Tool[Any, Any] = DEPLOY
) -> PromptTemplate[Any]:
    return PromptTemplate(
        ns="ops",
        key="release",
        policies=[QuotaPolicy(max_calls=3)],
        sections=[
            MarkdownSection[Guest](title="Greeting", template=greeting),
            MarkdownSection(
                title="Guide",
                template="How we work.",
                tools=[status],
                children=[
                    MarkdownSection(title="Steps", template=steps, tools=[deploy, LOCKED]),
                    MarkdownSection(
                        title="Law", template="Never on Fridays.", accepts_overrides=False
                    ),
                ],
            ),
            Clock(title="Clock"),
        ],
    )


def overrides(sections: Mapping[str, SectionOverride], tag: str = "new") -> PromptOverrides:
    return PromptOverrides(ns="ops", key="release", tag=tag, sections=sections)


def about_deploy(**changes: Any) -> PromptOverrides:
    return overrides({"guide/steps": SectionOverride(tools={"deploy": ToolOverride(**changes)})})


def rendered(with_overrides: PromptOverrides | None) -> RenderedPrompt:
    return Prompt(template(), overrides=with_overrides).bind(Guest("Ada")).render()


def definition(name: str, given: RenderedPrompt) -> dict[str, Any]:
    return given.offers[name].tool.definition()


def refused(given: PromptOverrides, kind: type[PromptOverrideError] = PromptOverrideError) -> str:
    with pytest.raises(kind) as caught:
        Prompt(template(), overrides=given)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture
def store(tmp_path: Path) -> PromptOverridesStore:
    return PromptOverridesStore(tmp_path / "overrides")


# What can be replaced


def test_the_text_of_a_section_is_replaced_and_takes_its_parameters():
    text = TextOverride.of("Hello $name.", "Good day,\n$name.")

    given = rendered(overrides({"greeting": SectionOverride(text=text)}))

    assert given.text == rendered(None).text.replace("Hello Ada.", "Good day,\nAda.")
    assert given.overrides_tag == "new"
    assert rendered(None).overrides_tag == ""


def test_the_text_of_a_nested_section_is_replaced():
    text = TextOverride.of("Test first.", "Test twice.")

    given = rendered(overrides({"guide/steps": SectionOverride(text=text)}))

    assert given.text == rendered(None).text.replace("Test first.", "Test twice.")


def test_the_description_of_a_tool_is_replaced():
    given = rendered(
        about_deploy(description=TextOverride.of("Deploy the project.", "Ship the project."))
    )

    assert definition("deploy", given) == {
        **DEPLOY.definition(),
        "description": "Ship the project.",
    }


def test_the_description_of_a_parameter_is_replaced_in_the_schema():
    changed = {
        "environment": TextOverride.of("Where to deploy to.", "staging or production"),
        "replicas": TextOverride.of("", "How many."),
    }

    given = rendered(about_deploy(parameters=changed))

    expected = DEPLOY.definition()
    expected["parameters"]["properties"]["environment"]["description"] = "staging or production"
    expected["parameters"]["properties"]["replicas"]["description"] = "How many."
    assert definition("deploy", given) == expected
    assert "description" not in DEPLOY.parameters["properties"]["replicas"]


def test_the_examples_of_a_tool_are_replaced_by_values_of_its_types():
    current = describe(template()).sections["guide/steps"].tools["deploy"].examples
    assert current is not None
    new = ExampleData(
        description="To production",
        input={"environment": "prod", "replicas": 3},
        output={"url": "https://prod"},
    )

    given = rendered(about_deploy(examples=replace(current, examples=(*current.examples, new))))

    assert given.offers["deploy"].tool.examples == (
        *DEPLOY.examples,
        ToolExample("To production", Target("prod", 3), Deployed("https://prod")),
    )


def test_examples_of_decorated_and_raw_tools_are_replaced():
    raw = Tool.from_schema(
        "raw", "Raw.", {"type": "object", "properties": {"a": {"type": "integer"}}}, None
    )
    section = MarkdownSection(title="T", tools=[status, raw])
    prompt_template = PromptTemplate(sections=[section])
    now = describe(prompt_template)
    tools = now.sections["t"].tools
    none = tools["raw"].examples
    assert none is not None
    assert none == tools["status"].examples == ExamplesOverride(replaces=none.replaces, examples=())
    given = PromptOverrides(
        ns=now.ns,
        key=now.key,
        tag="x",
        sections={
            "t": SectionOverride(
                tools={
                    "raw": ToolOverride(
                        parameters={"a": TextOverride.of("", "A number.")},
                        examples=replace(
                            none, examples=(ExampleData(description="r", input={"a": 1}, output=2),)
                        ),
                    ),
                    "status": ToolOverride(
                        examples=replace(
                            none,
                            examples=(
                                ExampleData(
                                    description="s", input={"service": "db"}, output="db is up"
                                ),
                            ),
                        ),
                    ),
                }
            )
        },
    )

    by_name = {each.name: each for each in Prompt(prompt_template, overrides=given).render().tools}

    assert by_name["raw"].definition()["examples"] == [
        {"description": "r", "input": {"a": 1}, "output": 2}
    ]
    assert by_name["raw"].parameters["properties"]["a"]["description"] == "A number."
    assert by_name["status"].definition()["examples"] == [
        {"description": "s", "input": {"service": "db", "verbose": False}, "output": "db is up"}
    ]


def test_an_overridden_tool_still_runs_under_its_policies():
    prompt = Prompt(
        template(),
        overrides=about_deploy(description=TextOverride.of("Deploy the project.", "Ship it.")),
    ).bind(Guest("Ada"))
    given = prompt.render()

    offer = given.offers["deploy"]

    assert prompt.policies == prompt.template.policies
    assert [each.name for each in offer.policies] == [
        each.name for each in rendered(None).offers["deploy"].policies
    ]
    result = offer.tool({"environment": "prod"}, context=ToolContext(session=Session()))
    assert result.value == Deployed("https://prod")


def test_binding_keeps_the_overrides_and_leaves_bound_sections_alone():
    text = TextOverride.of("Test first.", "Test twice.")
    given = overrides({"guide/steps": SectionOverride(text=text)})
    prompt = Prompt(template(), overrides=given).bind(Guest("Ada"))

    again = prompt.bind(sections=[MarkdownSection(title="Steps", template="Test first.")])

    assert again.overrides is given
    assert "Test twice." in again.render().text
    assert again.render().text.endswith("Steps\n\nTest first.")


# What cannot


def test_every_unknown_name_is_refused_with_the_known_ones():
    text = TextOverride.of("", "new")

    message = refused(
        overrides(
            {
                "guide/stepz": SectionOverride(text=text),
                "guide/steps": SectionOverride(
                    tools={
                        "deply": ToolOverride(description=text),
                        "deploy": ToolOverride(parameters={"env": text}),
                    }
                ),
            }
        )
    )

    assert message.splitlines() == [
        "overrides 'new' of prompt ops/release cannot be applied",
        "  the prompt has no section 'guide/stepz' that can be overridden; sections: "
        "greeting, guide, guide/steps",
        "  section 'guide/steps' has no tool 'deply' that can be overridden; tools: deploy",
        "  tool 'deploy' of section 'guide/steps' has no parameter 'env' that can be overridden; "
        "parameters: environment, replicas",
    ]


def test_what_does_not_accept_overrides_is_refused_and_not_described():
    text = TextOverride.of("Roll back.", "Go back.")
    law = SectionOverride(text=TextOverride.of("Never on Fridays.", "On Fridays."))
    steps = SectionOverride(tools={"roll_back": ToolOverride(description=text)})

    message = refused(overrides({"guide/law": law, "guide/steps": steps}))

    assert "has no section 'guide/law' that can be overridden" in message
    assert "section 'guide/steps' has no tool 'roll_back' that can be overridden" in message
    described = describe(template()).sections
    assert "guide/law" not in described
    assert list(described["guide/steps"].tools) == ["deploy"]


def test_a_section_that_makes_its_text_itself_is_refused():
    text = TextOverride.of("It is noon.", "It is late.")

    message = refused(overrides({"clock": SectionOverride(text=text)}))

    assert "has no section 'clock' that can be overridden" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [("Hello $nam.", "unknown placeholders $nam; Guest has name"), ("5 $", "without a placehol")],
)
def test_placeholders_are_checked_again(text: str, says: str):
    changed = SectionOverride(text=TextOverride.of("Hello $name.", text))

    assert says in refused(overrides({"greeting": changed}))


def test_a_description_is_held_to_the_tools_contract():
    long = TextOverride.of("Deploy the project.", "x" * 201)
    empty = TextOverride.of("Deploy the project.", " ")

    assert "has 201 characters" in refused(about_deploy(description=long))
    assert "needs a description" in refused(about_deploy(description=empty))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input": {"environment": 1}}, "example 1: "),
        ({"input": "staging"}, "Invalid parameters for tool 'deploy'"),
        ({"output": {"uri": "x"}}, "uri: Unknown field"),
        ({"output": None}, "example 1: "),
        ({"description": ""}, "1 to 200 characters"),
    ],
)
def test_examples_are_held_against_the_tools_types(change: dict[str, Any], says: str):
    current = describe(template()).sections["guide/steps"].tools["deploy"].examples
    assert current is not None
    wrong = replace(current, examples=(replace(current.examples[0], **change),))

    assert says in refused(about_deploy(examples=wrong))


def test_overrides_of_another_prompt_are_refused():
    given = PromptOverrides(ns="ops", key="other", tag="new")

    assert "of prompt ops/other are not for ops/release" in refused(given)


def test_a_tool_refuses_a_description_for_a_parameter_it_does_not_have():
    with pytest.raises(ToolDefinitionError, match="no parameters env to describe; it has envi"):
        DEPLOY.replace(parameter_descriptions={"env": "Where."})


# What is out of date


def test_a_stale_override_is_refused_and_says_how_to_renew_it():
    stale = TextOverride.of("Test a lot.", "Test twice.")
    now = TextOverride.of("Test first.", "").replaces

    message = refused(overrides({"guide/steps": SectionOverride(text=stale)}), StaleOverride)

    assert message == (
        "overrides 'new' of prompt ops/release are stale\n"
        f"  section 'guide/steps': its text has changed: the override replaces {stale.replaces}, "
        f"the current hash is {now}, of 'Test first.'; compare both, then write "
        f'"replaces": "{now}" to keep the override, or delete it'
    )


def test_a_stale_override_can_be_skipped_with_a_warning(caplog: pytest.LogCaptureFixture):
    stale = SectionOverride(text=TextOverride.of("Test a lot.", "Test twice."))
    fresh = SectionOverride(text=TextOverride.of("Hello $name.", "Hi $name."))
    given = overrides({"guide/steps": stale, "greeting": fresh})

    with caplog.at_level(logging.WARNING):
        text = rendered(replace(given, on_stale="skip")).text

    assert text == rendered(None).text.replace("Hello Ada.", "Hi Ada.")
    assert "skipped: section 'guide/steps': its text has changed" in caplog.text


def seeded(prompt_template: PromptTemplate[Any]) -> PromptOverrides:
    return overrides(describe(prompt_template).sections, tag="seed")


CHANGES: dict[str, dict[str, Any]] = {
    "section 'greeting': its text": {"greeting": "Welcome $name."},
    "section 'guide/steps': its text": {"steps": "Test never."},
    "tool 'deploy' of section 'guide/steps': its description": {"deploy": {"description": "Ship."}},
    "tool 'deploy' of section 'guide/steps': the description of 'environment'": {
        "deploy": {"parameter_descriptions": {"environment": "Any."}}
    },
    "tool 'deploy' of section 'guide/steps': its examples": {"deploy": {"examples": ()}},
}


@given(st.sets(st.sampled_from(sorted(CHANGES))))
def test_a_change_makes_exactly_the_touched_overrides_stale(touched: set[str]):
    texts: dict[str, Any] = {}
    tool_changes: dict[str, Any] = {}
    for what in touched:
        change = dict(CHANGES[what])
        tool_changes.update(change.pop("deploy", {}))
        texts.update(change)
    changed = template(**texts, deploy=DEPLOY.replace(**tool_changes))

    try:
        seeded(template()).apply(changed)
        stale: set[str] = set()
    except StaleOverride as error:
        stale = {problem.split(" has changed")[0] for problem in error.problems}

    assert stale == touched


# The store


def test_an_unedited_seed_changes_nothing(store: PromptOverridesStore):
    written = store.seed(template(), "same")

    loaded = store.load("ops", "release", "same")

    assert loaded == written
    given, plain = rendered(loaded), rendered(None)
    assert given.text == plain.text
    assert given.tools == plain.tools


TEXT = st.text(min_size=1, max_size=20).filter(str.strip)
NAME = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda n: n != "context")


@st.composite
def templates(draw: st.DrawFn) -> PromptTemplate[Any]:
    names = iter(draw(st.lists(NAME, unique=True, min_size=6, max_size=6)))

    def a_tool(name: str) -> Tool[Any, Any]:
        properties = draw(
            st.dictionaries(NAME, st.fixed_dictionaries({}, optional={"description": TEXT}))
        )
        examples = draw(st.lists(st.tuples(TEXT, st.dictionaries(TEXT, JSON), JSON), max_size=2))
        return Tool.from_schema(
            name,
            draw(TEXT),
            {"type": "object", "properties": properties},
            None,
            examples=[ToolExample(*each) for each in examples],
        )

    def section(depth: int) -> Section[Any]:
        text = draw(st.text(max_size=30)).replace("$", "$$")
        children = [section(depth - 1) for _ in range(draw(st.integers(0, depth)))]
        name = next(names, None)
        tools = [] if name is None else [a_tool(name)]
        return MarkdownSection(
            title=draw(st.sampled_from("ABC")), template=text, tools=tools, children=children
        )

    return PromptTemplate(key="any", sections=[section(2) for _ in range(draw(st.integers(1, 2)))])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@pytest.mark.heavy
@given(templates())
def test_seeding_any_prompt_changes_nothing(any_template: PromptTemplate[Any]):
    with tempfile.TemporaryDirectory() as root:
        store = PromptOverridesStore(root)
        written = store.seed(any_template, "same")
        loaded = store.load("default", "any", "same")

    assert loaded == written
    given, plain = Prompt(any_template, overrides=loaded).render(), Prompt(any_template).render()
    assert given.text == plain.text
    assert [t.definition() for t in given.tools] == [t.definition() for t in plain.tools]


TEXTS = st.builds(TextOverride.of, st.text(), st.text())
TOOLS = st.builds(
    ToolOverride,
    description=st.none() | TEXTS,
    parameters=st.dictionaries(st.text(), TEXTS, max_size=3),
    examples=st.none()
    | st.builds(
        ExamplesOverride,
        replaces=st.text(),
        examples=st.lists(
            st.builds(ExampleData, description=st.text(), input=JSON, output=JSON), max_size=2
        ).map(tuple),
    ),
)
SECTIONS = st.dictionaries(
    st.text(),
    st.builds(
        SectionOverride,
        text=st.none() | TEXTS,
        tools=st.dictionaries(st.text(), TOOLS, max_size=2),
    ),
    max_size=3,
)


@given(SECTIONS)
def test_what_is_saved_comes_back_equal(sections: dict[str, SectionOverride]):
    with tempfile.TemporaryDirectory() as root:
        store = PromptOverridesStore(root)
        store.save(overrides(sections))

        assert store.load("ops", "release", "new") == overrides(sections)


def test_a_file_is_made_to_be_reviewed(store: PromptOverridesStore):
    text = TextOverride.of("Test first.", "Test twice.\nThen „ship“.")

    path = store.save(overrides({"guide/steps": SectionOverride(text=text)}))

    assert path == store.root / "ops" / "release" / "new.json"
    assert path.read_text(encoding="utf-8") == (
        "{\n"
        '  "format": 1,\n'
        '  "sections": {\n'
        '    "guide/steps": {\n'
        '      "text": {\n'
        '        "lines": [\n'
        '          "Test twice.",\n'
        '          "Then „ship“."\n'
        "        ],\n"
        f'        "replaces": "{text.replaces}"\n'
        "      }\n"
        "    }\n"
        "  }\n"
        "}\n"
    )
    assert list(path.parent.iterdir()) == [path]


def test_a_seed_is_edited_and_used(store: PromptOverridesStore):
    store.seed(Prompt(template()), "brief")
    path = store.path("ops", "release", "brief")
    path.write_text(path.read_text().replace("Test first.", "Test."))

    given = rendered(store.load("ops", "release", "brief"))

    assert given.text == rendered(None).text.replace("Test first.", "Test.")


def test_seeding_from_a_prompt_with_overrides_takes_the_originals(store: PromptOverridesStore):
    text = TextOverride.of("Test first.", "Test twice.")
    prompt = Prompt(template(), overrides=overrides({"guide/steps": SectionOverride(text=text)}))

    assert describe(prompt) == describe(template())
    assert store.seed(prompt, "again").sections == describe(template()).sections


def test_seeding_never_overwrites(store: PromptOverridesStore):
    store.seed(template(), "same")

    with pytest.raises(PromptOverrideError, match="exists; delete it, or seed another tag"):
        store.seed(template(), "same")


def test_tags_are_listed_and_deleted(store: PromptOverridesStore):
    assert store.tags("ops", "release") == ()
    for tag in ("b", "a"):
        store.save(overrides({}, tag=tag))

    assert store.tags("ops", "release") == ("a", "b")
    assert store.delete("ops", "release", "a")
    assert not store.delete("ops", "release", "a")
    assert store.tags("ops", "release") == ("b",)
    assert store.load("ops", "release", "a") is None


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "a\\b", "/etc", ".hidden", "a\n"])
def test_names_that_lead_elsewhere_are_refused(store: PromptOverridesStore, name: str):
    for ns, key, tag in ((name, "k", "t"), ("n", name, "t"), ("n", "k", name)):
        with pytest.raises(PromptOverrideError, match="cannot name a file"):
            store.load(ns, key, tag)
        with pytest.raises(PromptOverrideError, match="cannot name a file"):
            store.save(PromptOverrides(ns=ns, key=key, tag=tag))


def test_a_malformed_file_is_refused_with_all_its_problems(store: PromptOverridesStore):
    path = store.save(overrides({}))
    wrong = {"format": 2, "sections": {"a": {"text": {"lines": "one"}, "tols": {}}}}
    path.write_text(json.dumps(wrong))

    with pytest.raises(PromptOverrideError) as caught:
        store.load("ops", "release", "new")

    assert str(caught.value).startswith(f"{path} is malformed\n")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "format",
        "sections.a.text.replaces",
        "sections.a.text.lines",
        "sections.a.tols",
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "Not valid JSON"),
        (b"\xff", "Not valid JSON"),
        (b"[" * 100_000, "Not valid JSON"),
        (b"[]", "is malformed"),
        (b'{"format": 1, "sections": {"\\ud800": {}}}', "is malformed"),
    ],
)
def test_what_is_not_json_is_refused(store: PromptOverridesStore, content: bytes, says: str):
    path = store.save(overrides({}))
    path.write_bytes(content)

    with pytest.raises(PromptOverrideError, match=says) as caught:
        store.load("ops", "release", "new")

    assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", ["\ud800", float("nan"), object()])
def test_a_failed_save_leaves_the_file_as_it_was(store: PromptOverridesStore, value: object):
    path = store.save(overrides({}))
    before = path.read_bytes()
    example = ExampleData(description="d", input={}, output=value)
    examples = ExamplesOverride(replaces="", examples=(example,))

    with pytest.raises(PromptOverrideError, match="cannot be written as JSON"):
        store.save(about_deploy(examples=examples))

    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
