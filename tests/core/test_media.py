"""Media: checked when made, never dumped, and found in the values of tools."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives import Media
from weakincentives.core.media import MAX_MEDIA_BYTES, split_content
from weakincentives.prompt import ToolResult
from weakincentives.serde import freeze, thaw

PNG = b"\x89PNG\r\n\x1a\n\xfb\xff\xfe..."


def test_the_type_is_found_in_the_data_and_aliases_have_one_spelling():
    assert Media(PNG).media_type == "image/png"
    assert Media(b"x", "IMAGE/JPG; q=1").media_type == "image/jpeg"
    assert Media(b"x", "audio/x-wav").media_type == "audio/wav"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"data": "text"}, "must be bytes, got str"),
        ({"data": b""}, "is empty"),
        ({"data": b"?"}, "like 'image/png'; the data is of no known one"),
        ({"data": b"?", "media_type": "png"}, "like 'image/png'; got 'png'"),
        ({"data": bytes(MAX_MEDIA_BYTES + 1), "name": "a.bin"}, "a.bin has 20 MB; Media holds"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_made(arguments: dict[str, Any], said: str):
    with pytest.raises((TypeError, ValueError), match=said):
        Media(**arguments)


def test_neither_text_shows_the_bytes_or_more_than_one_line():
    media = Media(b"secret" * 1000, "application/x-y", "a\nb\x1b[31m.bin")

    assert media.render() == r"[application/x-y, 6 kB: a b\x1b[31m.bin]"
    assert "secret" not in repr(media)
    assert "secret" not in repr(ToolResult.ok(media))


def test_a_file_has_the_type_of_its_content_or_else_of_its_name(tmp_path: Path):
    for name, data in {"a.txt": PNG, "b.csv": b"1,2\n", "c": b"?"}.items():
        (tmp_path / name).write_bytes(data)

    made = [Media.from_file(tmp_path / name) for name in ("a.txt", "b.csv", "c")]

    assert [each.media_type for each in made] == [
        "image/png",
        "text/csv",
        "application/octet-stream",
    ]
    assert made[0].name == "a.txt"


@dataclass
class Box:
    content: object
    more: dict[str, object] = field(default_factory=dict)

    def render(self) -> str:
        return "a box"


media = st.builds(Media, st.binary(min_size=1, max_size=8), st.just("image/png"))
values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.binary(max_size=3) | media,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Box, inner, st.dictionaries(st.text(max_size=2), inner, max_size=2))
    ),
    max_leaves=6,
)


def flat(value: Any) -> list[Media]:
    if isinstance(value, Media):
        return [value]
    if isinstance(value, Box):
        return flat(value.content) + flat(value.more)
    parts = value.values() if isinstance(value, dict) else value
    return (
        [x for each in parts for x in flat(each)] if isinstance(value, dict | list | tuple) else []
    )


@given(values)
def test_a_result_has_the_media_of_its_value_in_order_and_a_failed_one_none(value: object):
    assert list(ToolResult.ok(value).media) == flat(value)
    assert ToolResult("no", value, success=False).media == ()
    assert ToolResult("hidden", value, exclude_value_from_context=True).media == ()


@given(media)
def test_media_are_the_same_after_a_snapshot(each: Media):
    assert thaw(freeze(each)) == each


def test_annotations_without_a_hash_are_no_obstacle():
    hint = Annotated[int, {"unit": "km"}]
    odd = make_dataclass("Odd", [("count", hint), ("picture", object)])

    assert ToolResult.ok([odd(1, Media(PNG))]).media == (Media(PNG),)


def test_a_value_without_a_text_of_its_own_shows_no_bytes():
    @dataclass
    class Plain:
        title: str
        image: Media

    text = ToolResult.ok(Plain("Sea", Media(PNG, name="sea.png"))).render()

    assert text == (
        '{"title": "Sea", "image": {"data": "", "media_type": "image/png", "name": "sea.png", '
        '"uri": ""}}'
    )


def test_a_message_has_a_placeholder_for_each_medium_in_order():
    image = Media(PNG, name="a.png")

    assert split_content("Look") == ("Look", ())
    assert split_content(image) == (image.render(), (image,))
    assert split_content(["See", image, "!"]) == (f"See\n{image.render()}\n!", (image,))
