"""What a tool answers, and how the model sees it."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.prompt import ToolError, ToolMetadata, ToolResult


def shown(value: object, message: str = "") -> str:
    return ToolResult.ok(value, message=message).render()


@dataclass(frozen=True)
class Said:
    words: tuple[str, ...]

    def render(self) -> str:
        return "\n".join(self.words)


@dataclass(frozen=True)
class Unsaid:
    name: str
    sizes: tuple[int, ...] = ()
    data: bytes = b""


class Point(NamedTuple):
    x: int
    y: int


class Colour(StrEnum):
    RED = "red"


# The two ways to make one


def test_ok_is_a_success_with_a_value_and_a_message():
    result = ToolResult.ok(Said(("hi",)), message="Done")

    assert (result.success, result.value, result.message) == (True, Said(("hi",)), "Done")
    assert (result.failure, result.exclude_value_from_context) == (None, False)
    assert ToolResult.ok(3, "Three") == ToolResult(message="Three", value=3)


def test_ok_needs_neither_value_nor_message():
    assert ToolResult.ok() == ToolResult(message="", value=None)


def test_error_is_a_failure_without_a_value():
    result = ToolResult.error("File not found: config.json")

    assert (result.success, result.value) == (False, None)
    assert result.message == "File not found: config.json"
    assert result.failure == ToolError("EXECUTION_FAILED", "File not found: config.json")


def test_error_says_more_for_programs():
    result = ToolResult.error(
        "No such city", code="NOT_FOUND", recoverable=False, suggestions=["Rome", "Roma"]
    )

    assert result.failure == ToolError("NOT_FOUND", "No such city", False, ("Rome", "Roma"))
    with pytest.raises(TypeError):
        ToolResult.error("No such city", "NOT_FOUND")


def test_the_full_form_has_the_chapters_four_fields():
    result = ToolResult(
        message="Read 1.2MB", value="x", success=True, exclude_value_from_context=True
    )

    assert (result.metadata, result.call_id) == (ToolMetadata(), "")
    assert result.render() == "Read 1.2MB"
    assert result.value == "x"


# The six rules


def test_a_dataclass_with_render_says_it_itself():
    assert shown(Said(("one", "two"))) == "one\ntwo"


def test_a_dataclass_without_render_is_json_with_a_warning(caplog: pytest.LogCaptureFixture):
    fresh = make_dataclass("Fresh", [("name", str), ("size", int)])

    with caplog.at_level(logging.WARNING):
        assert shown(fresh("a", 1)) == '{"name": "a", "size": 1}'

    assert "Fresh has no render()" in caplog.text


def test_the_warning_comes_once_per_type(caplog: pytest.LogCaptureFixture):
    fresh = make_dataclass("Fresh", [("name", str)])
    other = make_dataclass("Other", [("name", str)])

    with caplog.at_level(logging.WARNING):
        for value in (fresh("a"), fresh("b"), other("c"), [fresh("d")]):
            shown(value)

    assert [record.args for record in caplog.records] == [("Fresh",), ("Other",)]


def test_the_warning_keeps_no_type_alive():
    fresh = make_dataclass("Fresh", [("name", str)])
    shown(fresh("a"))
    seen = weakref.ref(fresh)

    del fresh
    gc.collect()

    assert seen() is None


@pytest.mark.parametrize(
    "mapping",
    [
        {"name": "é", "sizes": [1, 2]},
        OrderedDict(name="é", sizes=(1, 2)),
        MappingProxyType({"name": "é", "sizes": [1, 2]}),
    ],
)
def test_a_mapping_is_json(mapping: object):
    assert shown(mapping) == '{"name": "é", "sizes": [1, 2]}'


def test_a_mapping_of_dataclasses_is_json_all_the_way_down():
    assert json.loads(shown({"it": Said(("hi",)), 3: None})) == {"it": {"words": ["hi"]}, "3": None}


@pytest.mark.parametrize("sequence", [["a", "b"], ("a", "b"), deque(["a", "b"])])
def test_a_sequence_is_one_line_per_item(sequence: object):
    assert shown(sequence) == "a\nb"


def test_the_items_of_a_sequence_are_rendered_by_the_same_rules():
    items = [Said(("hi",)), {"a": 1}, "text", 3, True, 1.5, None]

    assert shown(items) == 'hi\n{"a": 1}\ntext\n3\ntrue\n1.5\n'


def test_a_sequence_within_a_sequence_stays_on_its_line():
    assert shown([["a", 1], ("b", 2), Point(3, 4), []]) == '["a", 1]\n["b", 2]\n[3, 4]\n[]'


def test_a_string_is_used_as_it_is():
    for text in ("plain", "with\nlines", "  spaces  ", '{"not": "parsed"}'):
        assert shown(text) == text
    assert shown(Colour.RED) == "red"


def test_none_is_empty():
    assert shown(None) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (-2.5, "-2.5"),
        (True, "true"),
        (False, "false"),
        (b"hi", '"aGk="'),
        (set(), ""),
        ({"b", "a", "c"}, "a\nb\nc"),
        (frozenset({("b", 1), ("a", 2)}), '["a", 2]\n["b", 1]'),
        (Point(1, 2), "1\n2"),
        (range(3), "0\n1\n2"),
    ],
)
def test_what_no_rule_names_is_as_close_to_them_as_can_be(value: object, text: str):
    assert shown(value) == text


def test_what_cannot_be_written_as_json_is_shown_as_python_shows_it():
    class Odd:
        def __repr__(self) -> str:
            return "<odd>"

    assert shown(Odd()) == "<odd>"
    assert shown({"it": Odd()}) == "{'it': <odd>}"
    assert shown([Odd(), Odd]) == f"<odd>\n{Odd!r}"


def test_a_render_that_fails_does_not_cost_the_model_its_answer(caplog: pytest.LogCaptureFixture):
    @dataclass
    class Broken:
        name: str

        def render(self) -> str:
            raise RuntimeError("no words")

    assert shown(Broken("a"), message="Done") == 'Done\n{"name": "a"}'
    assert "Broken.render() failed" in caplog.text
    assert "no words" in caplog.text


# Message and value together


@pytest.mark.parametrize(
    ("message", "value", "text"),
    [
        ("Found 2", ("a", "b"), "Found 2\na\nb"),
        ("Found none", (), "Found none"),
        ("Done", None, "Done"),
        ("Done", "", "Done"),
        ("", "text", "text"),
        ("", None, ""),
        ("Zero", 0, "Zero\n0"),
    ],
)
def test_the_model_sees_the_message_a_newline_and_the_value(message: str, value: Any, text: str):
    """Empty parts are left out."""
    assert shown(value, message) == text


def test_an_excluded_value_is_not_rendered():
    @dataclass
    class Costly:
        def render(self) -> str:
            raise AssertionError("rendered")

    result = ToolResult(message="Read it", value=Costly(), exclude_value_from_context=True)

    assert result.render() == "Read it"


def test_a_failure_shows_its_value_too():
    result = ToolResult(message="Two of three failed", value=["b", "c"], success=False)

    assert result.render() == "Two of three failed\nb\nc"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.builds(Said, st.lists(st.text(max_size=4)).map(tuple))
    | st.builds(Unsaid, st.text(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(value=VALUES, message=st.text(max_size=10))
def test_rendering_gives_the_same_text_for_the_same_value(value: Any, message: str):
    result = ToolResult.ok(value, message=message)

    assert result.render() == result.render()
    assert result.render().startswith(message)


@given(items=st.lists(st.text(max_size=4)))
def test_a_set_reads_the_same_however_it_was_made(items: list[str]):
    assert shown(set(items)) == shown(frozenset(reversed(items))) == "\n".join(sorted(set(items)))


@dataclass
class Many:
    """Fields of every kind that JSON can say."""

    names: list[str] = field(default_factory=lambda: ["a"])
    inner: Unsaid = field(default_factory=lambda: Unsaid("x", (1,), b"hi"))


def test_json_says_every_field_of_a_dataclass():
    assert json.loads(shown(Many())) == {
        "names": ["a"],
        "inner": {"name": "x", "sizes": [1], "data": "aGk="},
    }


# Long texts

NOTE = '\n[9 more characters: read_result(call_id="x", offset=5)]'


@given(
    st.lists(st.sampled_from(["word ", "\n", "é🌍", NOTE, NOTE[:-1], "x" * 700]), max_size=40),
    st.integers(1, 3000),
    st.integers(1, 3000),
)
def test_of_a_long_text_the_first_lines_are_shown_and_where_the_rest_is(
    parts: list[str], first: int, second: int
):
    text = "".join(parts).removesuffix(NOTE)
    result = ToolResult(message=text, call_id="call-1")

    cut = result.render(first)
    again = ToolResult(message=cut, call_id="call-1").render(second)

    for seen, most in ((cut, first), (again, min(first, second))):
        if seen == text:
            assert len(text) <= most + 200 + len(NOTE)
            continue
        head, _, note = seen.rpartition("\n[")
        left, _, offset = note.partition(' more characters: read_result(call_id="call-1", offset=')
        assert offset == f"{len(head)})]"
        assert text.startswith(head)
        assert int(left) == len(text) - len(head) or text.endswith(")]")
        assert len(head) <= max(most, first if seen == cut else 0) + 200
    assert ToolResult(message=cut, call_id="call-1").render(first) == cut


def test_a_result_cannot_avoid_the_cut_with_a_line_that_looks_like_one():
    planted = "\n[9 more characters: read_result(call_id=" + "x" * 100_000 + ")]"

    assert len(ToolResult(message=f"a{planted}", call_id="c").render(1_000)) < 1_300
    assert len(ToolResult(message=f"a{NOTE}" + "x" * 100_000, call_id="c").render(1_000)) < 1_300
