"""Settings of other programs: what we would change in them is shown, and copied before it is.

Such files are often JSON with comments. One member is set or removed in their text, so that
comments, order and layout stay.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from difflib import unified_diff
from pathlib import Path
from typing import Any, cast

from weakincentives.cli.common import Misuse, echo
from weakincentives.core.clock import SYSTEM_CLOCK


@dataclass(frozen=True)
class Change:
    """A file as it is and as it will be; None if it does not exist."""

    path: Path
    before: str | None
    after: str | None
    mode: int = 0o644
    is_ours: bool = False
    """Whether all of the file is ours: then nothing of a person's is lost with it."""


def show(changes: Sequence[Change]) -> None:
    """Print the changes as a diff."""
    for each in changes:
        path = str(each.path)
        lines = unified_diff(
            (each.before or "").splitlines(),
            (each.after or "").splitlines(),
            path if each.before is not None else os.devnull,
            path if each.after is not None else os.devnull,
            lineterm="",
        )
        echo("\n".join(lines))


def apply(changes: Sequence[Change]) -> None:
    """Write the changes; what is replaced is copied first."""
    for each in changes:
        path = Path(os.path.realpath(each.path))  # settings may be links into another directory
        mode = each.mode
        if each.before is not None:
            mode = stat.S_IMODE(path.stat().st_mode)
            if not each.is_ours:
                now = f"{datetime.fromtimestamp(SYSTEM_CLOCK.time()):%Y%m%d-%H%M%S}"
                copy = path.with_name(f"{path.name}.before-wink-{now}")
                _write(copy, each.before, mode)
                echo(f"The earlier file is kept as {copy}")
        if each.after is None:
            path.unlink()
            with suppress(OSError):  # where something else is left
                path.parent.rmdir()
                path.parent.parent.rmdir()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, each.after, mode)


def read_settings(path: Path) -> str | None:
    """Return the text of a file of settings; None if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise Misuse(f"{path} is not text: {error}") from error


def _write(path: Path, text: str, mode: int) -> None:
    staged = path.with_name(f"{path.name}.wink-{os.getpid()}")
    staged.write_text(text, encoding="utf-8")
    staged.chmod(mode)
    os.replace(staged, path)


# JSON with comments


def with_member(text: str, keys: Sequence[str], value: object) -> str:
    """Return settings with a member set, for example ``mcpServers``, ``wink``.

    Raises:
        ValueError: The text is not an object of settings.
    """
    text = text if text.strip() else "{}\n"
    place = _parsed(text)
    for depth, key in enumerate(keys):
        if place.members is None:
            raise ValueError(f"{'.'.join(keys[:depth]) or 'it'} is not an object")
        member = place.members.get(key)
        if member is None:
            inner = value
            for each in reversed(keys[depth + 1 :]):
                inner = {each: inner}
            return _checked(_inserted(text, place, depth, key, inner), keys, value)
        place = member.value
    shown = _dumped(value, _indent(text) * len(keys), _indent(text))
    return _checked(text[: place.start] + shown + text[place.end :], keys, value)


def without_member(text: str, keys: Sequence[str]) -> str | None:
    """Return settings without a member, and without what contained nothing else.

    None if nothing is left, not even a comment.
    """
    place, parents = _parsed(text), list[tuple[_Value, str]]()
    for key in keys:
        if place.members is None or key not in place.members:
            return text
        parents.append((place, key))
        place = place.members[key].value
    for holder, key in reversed(parents):
        assert holder.members is not None
        if len(holder.members) > 1 or holder is parents[0][0]:
            left = _removed(text, holder, key)
            return None if re.fullmatch(r"\s*\{\s*\}\s*", left) else left
    return text


def member(text: str, keys: Sequence[str]) -> Any:
    """Return the value of a member, or None."""
    found: Any = _parsed(text).plain if text.strip() else {}
    for key in keys:
        found = cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None
    return found


def _checked(text: str, keys: Sequence[str], value: object) -> str:
    if member(text, keys) != value:  # pragma: no cover
        raise ValueError("it cannot be changed without damage")
    return text


def _inserted(text: str, place: _Value, depth: int, key: str, value: object) -> str:
    assert place.members is not None
    unit = _indent(text)
    indent = unit * (depth + 1)
    shown = f"{indent}{json.dumps(key, ensure_ascii=False)}: {_dumped(value, indent, unit)}"
    if place.members:
        last = list(place.members.values())[-1].value.end
        comma = re.match(r"\s*,", text[last:])
        end = last if comma is None else last + comma.end()
        said = re.match(r"[ \t]*//[^\n]*", text[end:])  # about the member before
        at = end if said is None else end + said.end()
        return f"{text[:end]}{',' if comma is None else ''}{text[end:at]}\n{shown}{text[at:]}"
    at = place.start + 1
    return f"{text[:at]}\n{shown}\n{unit * depth}{text[at:].lstrip()}"


def _removed(text: str, holder: _Value, key: str) -> str:
    assert holder.members is not None
    found = holder.members[key]
    start, end = found.start, found.value.end
    after = re.match(r"\s*,", text[end:])
    if after is not None:
        end += after.end()
    else:
        before = re.search(r",\s*$", text[:start])
        start = start if before is None else before.start()
    # With the whole line, if nothing else is on it.
    line = re.search(r"\n[ \t]*$", text[:start])
    if line is not None and re.match(r"[ \t]*(\n|$)", text[end:]):
        start = line.start()
    return text[:start] + text[end:]


def _indent(text: str) -> str:
    found = re.match(r"\{[^\n]*\n([ \t]+)\S", text[_skip(text, 0) :])
    return found.group(1) if found else "  "


def _dumped(value: object, indent: str, unit: str) -> str:
    return json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", f"\n{indent}")


@dataclass
class _Value:
    """A value, and where it is in the text."""

    start: int
    end: int
    plain: Any
    members: dict[str, _Member] | None = None


@dataclass
class _Member:
    start: int
    value: _Value = field(repr=False)


_SPACE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_PLAIN = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s,\]}/"]+', re.DOTALL)


def _parsed(text: str) -> _Value:
    start = 1 if text.startswith("\ufeff") else 0
    try:
        value = _value(text, _skip(text, start))
    except (IndexError, RecursionError) as error:
        raise ValueError("it is damaged") from error
    if _skip(text, value.end) != len(text):
        raise ValueError(f"it is damaged at {_position(text, value.end)}")
    if value.members is None:
        raise ValueError("it is not an object")
    return value


def _value(text: str, start: int) -> _Value:
    if text[start] not in "{[":
        found = _PLAIN.match(text, start)
        if found is None:
            raise ValueError(f"it is damaged at {_position(text, start)}")
        return _Value(start, found.end(), json.loads(found.group()))
    is_object, at = text[start] == "{", _skip(text, start + 1)
    members: dict[str, _Member] = {}
    items: list[Any] = []
    while text[at] not in "}]":
        key_start, key = at, ""
        if is_object:
            name = _value(text, at)
            if not isinstance(name.plain, str):
                raise ValueError(f"it is damaged at {_position(text, at)}")
            key, at = name.plain, _skip(text, name.end)
            if text[at] != ":":
                raise ValueError(f"it is damaged at {_position(text, at)}")
            at = _skip(text, at + 1)
        value = _value(text, at)
        members[key] = _Member(key_start, value)
        items.append(value.plain)
        at = _skip(text, value.end)
        if text[at] == ",":
            at = _skip(text, at + 1)
        elif text[at] not in "}]":
            raise ValueError(f"it is damaged at {_position(text, at)}")
    if text[at] != ("}" if is_object else "]"):
        raise ValueError(f"it is damaged at {_position(text, at)}")
    if is_object:
        plain = {name: each.value.plain for name, each in members.items()}
        return _Value(start, at + 1, plain, members)
    return _Value(start, at + 1, items)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _position(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1}"
