"""A model's answer becomes a value of the output type, or an error it can learn from."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from weakincentives.adapters import ScriptedAdapter
from weakincentives.errors import NoOutput, OutputParseError, PromptError
from weakincentives.prompt import Prompt, PromptTemplate
from weakincentives.prompt.structured_output import (
    output_instructions,
    output_schema,
    parse_structured_output,
)
from weakincentives.runtime import Session
from weakincentives.serde import dump


class Severity(Enum):
    LOW = "low"
    HIGH = "high"


@dataclass(frozen=True)
class Finding:
    """Something worth fixing."""

    title: str
    lines: tuple[int, ...] = ()
    severity: Severity = Severity.LOW
    fixed: bool | None = None
    """Whether it was fixed already."""


@dataclass(frozen=True)
class Review:
    verdict: Literal["approve", "reject"]
    findings: tuple[Finding, ...] = ()
    scores: dict[str, float] | None = None


@dataclass(frozen=True)
class Tree:
    name: str
    parts: tuple[Tree, ...] = ()


def problems_of(text: str, output_type: Any) -> dict[str, str]:
    with pytest.raises(OutputParseError) as caught:
        parse_structured_output(text, output_type)
    assert caught.value.raw == text
    return caught.value.details


def test_bare_json_becomes_a_value_of_the_type():
    text = '{"verdict": "approve", "findings": [{"title": "Typo", "lines": [3]}]}'

    assert parse_structured_output(text, Review) == Review("approve", (Finding("Typo", (3,)),))


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"title": "Typo"}\n```',
        '```\n{"title": "Typo"}\n```',
        '~~~ JSON\r\n{"title": "Typo"}\r\n~~~\r\n',
        'Here:\n  ```json\n  {"title": "Typo"}\n  ```\nThat is all [1].',
        '```json {"title": "Typo"}```',
        '```json\n{"title": "Typo"}',
        'The answer is {"title": "Typo"}; see [1], [0, 1) and {braces}.',
        'See [1] in [0, 1):\n{"title": "Typo"}',
        '\ufeff{"title": "Typo"}',
    ],
)
def test_json_is_found_in_fences_and_in_prose(text: str):
    assert parse_structured_output(text, Finding) == Finding("Typo")


def test_the_last_fenced_block_that_is_json_counts():
    text = (
        'First:\n```json\n{"title": "draft"}\n```\nBetter:\n```json\n{"title": "final"}\n```\n'
        "Tested with\n```python\nprint({})\n```\n"
    )

    assert parse_structured_output(text, Finding).title == "final"


def test_the_last_object_in_prose_counts():
    text = 'Not {"title": "draft"} but {"title": "final"}.'

    assert parse_structured_output(text, Finding).title == "final"


def test_a_fenced_block_goes_before_an_object_in_prose():
    text = '```json\n{"title": "answer"}\n```\nInstead of {"title": "other"}.'

    assert parse_structured_output(text, Finding).title == "answer"


def test_a_fence_inside_a_string_of_the_answer_is_part_of_it():
    finding = Finding('Write it as\n```json\n{"title": "x"}\n```\n')

    assert parse_structured_output(json.dumps(dump(finding)), Finding) == finding


@pytest.mark.parametrize(
    "text",
    [
        '[{"title": "a"}, {"title": "b"}]',
        '{"items": [{"title": "a"}, {"title": "b"}]}',
        'See [1]: {"items": [{"title": "a"}, {"title": "b"}]}',
        '```json\n[{"title": "a"}, {"title": "b"}]\n```',
    ],
)
def test_a_list_is_taken_bare_or_wrapped(text: str):
    assert parse_structured_output(text, list[Finding]) == [Finding("a"), Finding("b")]


def test_a_tuple_stays_a_tuple():
    assert parse_structured_output('[{"title": "a"}]', tuple[Finding, ...]) == (Finding("a"),)


def test_all_problems_come_at_once_each_with_its_path():
    text = (
        "```json\n"
        '{"verdict": "maybe", "findings": [{"title": 3, "lines": ["4"]}], "mood": "good"}\n```'
    )

    details = problems_of(text, Review)

    assert set(details) == {"verdict", "findings.0.title", "findings.0.lines.0", "mood"}
    assert "approve" in details["verdict"]


def test_the_message_tells_the_model_what_to_do():
    with pytest.raises(PromptError) as caught:
        parse_structured_output('{"title": 3}', Finding)

    assert str(caught.value) == (
        "The answer does not fit what was asked for. "
        "Answer again, as JSON and nothing else, with all of this corrected:\n"
        "  title: Expected type string, got integer 3"
    )


def test_nothing_is_converted():
    assert set(problems_of('{"title": "a", "lines": ["1"], "fixed": "true"}', Finding)) == {
        "lines.0",
        "fixed",
    }


def test_problems_in_a_wrapped_list_are_named_from_the_top():
    assert set(problems_of('{"items": [{"title": 1}], "note": ""}', list[Finding])) == {
        "items.0.title",
        "note",
    }


def test_a_list_is_not_taken_for_one_value_nor_the_other_way_round():
    assert "object" in problems_of('[{"title": "a"}]', Finding)[""]
    assert "object" in problems_of('Here: [{"title": "a"}]', Finding)[""]
    assert set(problems_of('{"title": "a"}', list[Finding])) == {"items", "title"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "The answer is empty; expected JSON"),
        (" \n", "The answer is empty; expected JSON"),
        ("I could not find anything.", "The answer holds no JSON object or array"),
        (
            'Sure:\n```json\n{"title": "a"\n "lines": []}\n```',
            "The JSON is invalid: Expecting ',' delimiter at line 4, column 2 of the answer",
        ),
    ],
)
def test_the_error_says_where_the_json_is_missing_or_broken(text: str, reason: str):
    assert problems_of(text, Finding) == {"": reason}


@pytest.mark.parametrize(
    "text",
    [
        'Here: {"name": "a", "parts": [{"name": "b"}',
        'Here: {"name": "a" "parts": [{"name": "b"}]}',
        'Here: {"name": "a", "parts": [{"name": "b"}], } or so',
        '```json\n{"name": "a", "note: {, "parts": [{"name": "b"}]}\n```',
        'First {"name": "draft"}, then {"name": "fin',
        '```json\n{"name": "draft"}\n```\nBetter:\n```json\n{"name": "fin',
    ],
)
def test_a_part_of_a_broken_answer_is_never_taken_for_the_answer(text: str):
    assert "is invalid" in problems_of(text, Tree)[""]


@pytest.mark.parametrize("piece", ["[", "[0,", '{"a', '{"a":', '["[\\",', "```\n", "[[],", '"\\"'])
def test_hopeless_text_is_refused_in_no_time(piece: str):
    start = time.thread_time()  # computed, not waited for others on this machine

    problems_of("x " + piece * 20_000, Finding)

    assert time.thread_time() - start < 60  # minutes, where each piece is tried again and again


def test_a_number_too_long_to_read_is_a_problem_of_the_answer():
    assert "is invalid" in problems_of('{"lines": [%s]}' % ("1" * 5000), Finding)[""]


@pytest.mark.parametrize("text", ['{"title": "\ud800"}', '{"title": "\\ud800"}'])
def test_half_a_character_is_a_problem_of_the_answer(text: str):
    assert "Not valid JSON" in problems_of(text, Finding)[""]


def test_the_schema_is_that_of_the_type():
    found = output_schema(Finding)

    assert found["type"] == "object"
    assert found["additionalProperties"] is False
    assert found["description"] == "Something worth fixing."
    assert found["properties"]["fixed"]["description"] == "Whether it was fixed already."


@pytest.mark.parametrize("output_type", [list[Finding], list[Tree], tuple[Review, ...]])
def test_the_schema_of_a_list_has_an_object_at_the_top(output_type: Any):
    found = output_schema(output_type)

    Draft202012Validator.check_schema(found)
    assert found["type"] == "object"
    assert found["required"] == ["items"]
    assert found["properties"]["items"]["type"] == "array"


def test_the_schema_is_the_callers_to_change():
    output_schema(list[Finding])["properties"].clear()

    assert output_schema(list[Finding])["properties"]


def test_what_is_no_object_is_asked_for_in_one():
    assert output_schema(int)["required"] == ["result"]
    assert parse_structured_output('{"result": 3}', int) == 3
    assert parse_structured_output("3", int) == 3
    assert 'under the key "result"' in output_instructions(Finding | Review)
    with pytest.raises(OutputParseError, match="Expected type integer"):
        parse_structured_output('{"result": "3"}', int)


def test_an_answer_is_one_of_a_union():
    either = Finding | Review
    for answer, wanted in (
        ('{"result": {"title": "Typo", "lines": [3]}}', Finding("Typo", (3,))),
        ('{"title": "Typo", "lines": [3]}', Finding("Typo", (3,))),
        ('{"result": {"verdict": "approve"}}', Review("approve")),
    ):
        assert parse_structured_output(answer, either) == wanted
    with pytest.raises(OutputParseError):
        parse_structured_output("I would rather not", either)


def test_text_is_an_answer_where_a_union_has_it():
    assert parse_structured_output("I would rather not", Finding | str) == "I would rather not"
    assert parse_structured_output('{"result": "no"}', Finding | str) == "no"
    assert parse_structured_output('{"result": {"title": "a"}}', Finding | str) == Finding("a")
    assert parse_structured_output("plain", str) == "plain"


def book(number: int, seat: str = "12A") -> str:
    """Book a seat."""
    if number < 1:
        raise ValueError("there is no such train")
    return f"{number}/{seat}"


def test_a_function_is_called_with_the_answer():
    assert output_schema(book)["properties"].keys() == {"number", "seat"}
    assert parse_structured_output('{"number": 3}', book) == "3/12A"
    assert problems_of('{"number": 0}', book) == {"": "there is no such train"}
    assert problems_of('{"number": "x"}', book) == {
        "number": "Expected type integer, got string 'x'"
    }


def test_the_model_is_told_what_a_validator_refuses():
    def has_lines(finding: Finding) -> None:
        if not finding.lines:
            raise ValueError("name at least one line")

    def upper(finding: Finding) -> Finding:
        return Finding(finding.title.upper(), finding.lines)

    template = PromptTemplate[Finding](output_validators=[has_lines, upper])
    adapter = ScriptedAdapter(['{"title": "a"}', '{"title": "a", "lines": [2]}'])
    response = adapter.evaluate(Prompt(template), Session())

    assert response.unwrap() == Finding("A", (2,))
    assert adapter.last_request is not None
    assert "name at least one line" in adapter.last_request.messages[-1].text


@pytest.mark.parametrize(
    ("kind", "answer", "wanted"),
    [
        (str, "hello", "hello"),
        (int, '{"result": 3}', 3),
        (Finding | Review, '{"result": {"verdict": "approve"}}', Review("approve")),
        (book, '{"number": 3}', "3/12A"),
    ],
)
def test_output_of_every_kind_comes_from_a_run(kind: Any, answer: str, wanted: object):
    prompt = Prompt(PromptTemplate(output_type=kind))

    assert ScriptedAdapter([answer]).evaluate(prompt, Session()).unwrap() == wanted


def test_a_run_without_an_output_says_so():
    response = ScriptedAdapter(["hello"]).evaluate(Prompt(PromptTemplate()), Session())

    with pytest.raises(NoOutput, match="has given no output"):
        response.unwrap()


@pytest.mark.parametrize("output_type", [Finding, list[Finding]])
def test_the_instructions_hold_the_schema(output_type: Any):
    text = output_instructions(output_type)

    assert json.loads(text.split("```json\n")[1].removesuffix("\n```")) == output_schema(
        output_type
    )
    assert ('under the key "items"' in text) == (output_type is not Finding)
    assert output_instructions(output_type) == text


findings = st.builds(
    Finding,
    st.text(),
    st.lists(st.integers(), max_size=3).map(tuple),
    st.sampled_from(Severity),
    st.none() | st.booleans(),
)
reviews = st.builds(
    Review,
    st.sampled_from(["approve", "reject"]),
    st.lists(findings, max_size=3).map(tuple),
    st.none() | st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
)
# No brackets, and no line that could be taken for a fence.
prose = st.text(st.characters(codec="utf-8", exclude_characters="[]{}`~"))
wrappings = st.one_of(
    st.just("%s"),
    st.builds("{}```json\n%s\n```{}".format, prose.map(lambda p: p and f"{p}\n"), prose),
    st.builds("{}```\n%s\n```\n{}".format, prose.map(lambda p: p and f"{p}\n"), prose),
    st.builds("{}\n~~~~\n%s\n~~~~\n".format, prose),
    st.builds("{} %s {}".format, prose, prose),
)


def wrapped(wrapping: str, value: object, indent: int | None, ascii_only: bool) -> str:
    before, _, after = wrapping.partition("%s")
    return before + json.dumps(dump(value), indent=indent, ensure_ascii=ascii_only) + after


@given(reviews, wrappings, st.sampled_from([None, 2]), st.booleans())
def test_a_value_in_any_wrapping_comes_back(
    review: Review, wrapping: str, indent: int | None, ascii_only: bool
):
    assert parse_structured_output(wrapped(wrapping, review, indent, ascii_only), Review) == review


@given(st.lists(findings, max_size=3), wrappings, st.sampled_from([None, 2]), st.booleans())
def test_a_list_in_any_wrapping_comes_back(
    values: list[Finding], wrapping: str, indent: int | None, bare: bool
):
    text = wrapped(wrapping, values if bare else {"items": values}, indent, ascii_only=False)

    assert parse_structured_output(text, list[Finding]) == values


@given(reviews | st.lists(findings))
def test_what_is_accepted_fits_the_schema(value: object):
    is_list = isinstance(value, list)
    document = {"items": dump(value)} if is_list else dump(value)

    Draft202012Validator(output_schema(list[Finding] if is_list else Review)).validate(document)


json_like = st.lists(
    st.sampled_from(['{"title": ', '"a"', "{", "}", "[", "]", ",", ":", "1", "\n", "```", "json\n"])
).map("".join)


@given(st.text(st.characters()) | json_like, st.sampled_from([Finding, list[Finding], Tree]))
def test_arbitrary_text_raises_nothing_but_an_output_error(text: str, output_type: Any):
    with suppress(OutputParseError):
        parse_structured_output(text, output_type)
