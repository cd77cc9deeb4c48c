"""A server's tool as a declaration of ours: a name that providers take, a schema we can hold to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from weakincentives.errors import ToolDefinitionError
from weakincentives.prompt.raw_schema import plain_schema

__all__ = ["honoured_schema", "offered_names"]

_LONGEST = 64


def offered_names(
    names: Iterable[str], *, prefix: str, rename: Mapping[str, str], known: Mapping[str, str]
) -> dict[str, str]:
    """Return what each tool of a server is called here; those in ``known`` keep their names."""
    given = {name: known[name] for name in names if name in known}
    taken = set(known.values())
    new = [name for name in names if name not in given]

    def rank(name: str) -> tuple[bool, bool]:
        return name not in rename, _plain(prefix + name) != name

    # First those that the user chose, then those that can stay: the others make way for them.
    for name in sorted(new, key=rank):
        given[name] = _unique(rename.get(name) or _plain(prefix + name), taken)
        taken.add(given[name])
    return given


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "_", name.lower()).strip("_")[:_LONGEST] or "tool"


def _unique(name: str, taken: set[str]) -> str:
    made, number = name, 2
    while made in taken:
        suffix = f"-{number}"
        made = name[: _LONGEST - len(suffix)] + suffix
        number += 1
    return made


def honoured_schema(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for a tool's arguments; refuse what they could not be checked against."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    own = plain_schema(name, schema)
    resource = DRAFT202012.create_resource(own)
    base = resource.id() or ""
    resolver = Registry[Any]().with_resource(base, resource).crawl().resolver(base)
    for reference in _references(own):
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise ToolDefinitionError(
                f"the schema of tool {name!r} refers to {reference!r}, which is not in it, and "
                "nothing is fetched"
            ) from error
    return own


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in cast("dict[str, object]", schema).items():
            if key == "$ref" and isinstance(value, str):
                yield value
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for each in cast("list[object]", schema):
            yield from _references(each)
