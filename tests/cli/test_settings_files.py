"""Files of settings are changed in their text: comments, order and layout stay."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.cli.settings_files import (
    Change,
    apply,
    member,
    with_member,
    without_member,
)

KEYS = ("mcpServers", "wink")
OURS = {"command": "wink", "args": ["mcp"]}
COMMENTED = """\
// Settings of an editor
{
    "theme": "dark", // at night
    /* "mcpServers": {}, */
    "mcpServers": {
        "other": {"command": "x, y }"}, // "wink": here it is not
    },
    "last": [1, {"mcpServers": 2}],
}
"""


def test_a_member_is_added_and_taken_out_of_settings_with_comments():
    added = with_member(COMMENTED, KEYS, OURS)

    assert member(added, KEYS) == OURS
    assert member(added, ("mcpServers", "other")) == {"command": "x, y }"}
    for line in COMMENTED.splitlines():
        assert line in added
    assert '        "wink": {\n            "command": "wink",' in added
    left = without_member(added, KEYS)
    assert left is not None
    assert member(left, ("mcpServers",)) == {"other": {"command": "x, y }"}}
    assert "// at night" in left
    assert "// Settings of an editor" in left


def test_a_member_that_is_there_is_replaced():
    once = with_member(COMMENTED, KEYS, {"command": "old"})
    assert with_member(once, KEYS, OURS) == with_member(COMMENTED, KEYS, OURS)
    assert with_member(with_member("", KEYS, OURS), KEYS, OURS) == with_member("", KEYS, OURS)


@pytest.mark.parametrize("text", ["", "  \n", "{}", "{\n}\n", '{"mcpServers": {}}'])
def test_what_held_nothing_else_is_removed_with_it(text: str):
    assert without_member(with_member(text, KEYS, OURS), KEYS) is None


def test_what_is_not_there_is_not_removed():
    assert without_member(COMMENTED, KEYS) == COMMENTED


@pytest.mark.parametrize(
    "text",
    ["[1]", '{"a": }', '{"a": 1} {}', '{"a" 1}', '{"a": 1', '{"a": [1}', "// nothing", '{"a": "b'],
)
def test_what_is_damaged_is_not_changed(text: str):
    with pytest.raises(ValueError, match=r"."):
        with_member(text, KEYS, OURS)


def test_what_is_no_object_is_named():
    with pytest.raises(ValueError, match="mcpServers is not an object"):
        with_member('{"mcpServers": 7}', KEYS, OURS)


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=5), values, max_size=4),
    st.sampled_from([None, 1, 2, "\t"]),
    values,
)
def test_any_settings_say_the_same_but_for_the_member(
    settings: dict[str, Any], indent: int | str | None, value: Any
):
    text = json.dumps(settings, indent=indent, ensure_ascii=False)
    added = with_member(text, ("ours", "wink"), value) if "ours" not in settings else text
    if "ours" in settings:
        return
    assert json.loads(added) == {**settings, "ours": {"wink": value}}
    left = without_member(added, ("ours", "wink"))
    assert (json.loads(left) if left is not None else {}) == settings


def test_the_file_is_kept_as_it_was_with_its_mode_and_behind_its_link(tmp_path: Path):
    real = tmp_path / "elsewhere" / "settings.json"
    real.parent.mkdir()
    real.write_text(COMMENTED)
    real.chmod(0o600)
    link = tmp_path / "settings.json"
    os.symlink(real, link)

    apply([Change(link, COMMENTED, "{}\n")])

    assert link.is_symlink()
    assert real.read_text() == "{}\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    (kept,) = real.parent.glob("settings.json.before-wink-*")
    assert kept.read_text() == COMMENTED
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
