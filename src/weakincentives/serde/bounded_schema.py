"""JSON schemas of others, checked within bounds: no schema makes a check take forever.

A schema can be small and its check endless: branches that double at each level, references in a
circle, a pattern like ``^(a+)+$``. So the schema is bounded when it is taken, every check has a
budget of steps, and patterns are matched in linear time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

from weakincentives.errors import InvalidPattern
from weakincentives.text import counted_repeats, linear_matcher

MAX_SCHEMA = 256 * 1024
"""Characters of a schema as JSON."""
MAX_DEPTH = 50
"""Objects and arrays within each other in a schema."""
_MAX_NESTED = 130
"""Keywords within each other in a check. Below the limit of Python: where that is met in the middle
of a look-up, it is not an error that can be caught."""
MAX_STEPS = 200_000
"""What a check may cost: a keyword that is looked at is one step, more for long values."""
_MAX_PATTERN = 2000
_MAX_REPEATS = 100_000
_NOT_SCHEMAS = ("const", "default", "enum", "example", "examples")

Error = Any
"""A ``ValidationError`` of jsonschema, which has no types of its own."""


class TooMuchToCheck(ValueError):
    """A value could not be checked within the budget."""


class _Budget:
    __slots__ = ("left", "nested")

    def __init__(self) -> None:
        self.left = MAX_STEPS
        self.nested = 0

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuchToCheck(f"checking it takes more than {MAX_STEPS:,} steps")


_budget: ContextVar[_Budget] = ContextVar("_budget")


class BoundedSchema:
    """A JSON schema that values are checked against; ValueError where it is none, or too big."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        import jsonschema
        from jsonschema.validators import validator_for
        from referencing import Registry

        self.schema = bounded_copy(schema)
        self._matchers = _Matchers(self.schema)
        dialect: Any = validator_for(self.schema, default=jsonschema.Draft202012Validator)
        # An explicit registry: without one, jsonschema fetches remote references from the network.
        meta = _bounded(dialect, self._matchers)(dialect.META_SCHEMA, registry=Registry[Any]())
        for error in self._spending(lambda: meta.iter_errors(self.schema)):
            place = ".".join(map(str, error.absolute_path)) or "the top level"
            raise ValueError(f"not a valid JSON schema, at {place}: {_in_short(error.message)}")
        made = _bounded(dialect, self._matchers, size=_weight(self.schema, None))
        self._validator = made(self.schema, registry=Registry[Any]())

    def errors(self, value: object) -> Iterator[Error]:
        """Yield what is wrong with a value; raises TooMuchToCheck, or what a bad schema causes."""
        return self._spending(lambda: self._validator.iter_errors(value))

    def matches(self, pattern: str, text: str) -> bool:
        """Whether a text matches a pattern of the schema."""
        return self._matchers.match(pattern, text)

    def _spending(self, errors: Callable[[], Iterator[Error]]) -> Iterator[Error]:
        # At once: a budget that is set while somebody else goes on would be theirs, too.
        token = _budget.set(_Budget())
        try:
            return iter(list(errors()))
        except RecursionError as error:
            raise TooMuchToCheck("it is nested too deeply, or refers to itself") from error
        finally:
            _budget.reset(token)


def bounded_copy(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of our own; ValueError where it is too big."""
    try:
        text = json.dumps(schema, allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if len(text) > MAX_SCHEMA:
        raise ValueError(
            f"the schema has {len(text):,} characters as JSON; at most {MAX_SCHEMA:,} are taken"
        )
    plain = json.loads(text)
    level: list[object] = [plain]
    for _ in range(MAX_DEPTH):
        level = [below for each in level for below in _below(each)]
    if level:
        raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    return plain


def _below(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from cast("dict[str, object]", value).values()
    elif isinstance(value, list):
        yield from cast("list[object]", value)


class _Matchers:
    """Matches the patterns of a schema in linear time; ValueError for one that cannot be."""

    def __init__(self, schema: object) -> None:
        self._known: dict[str, tuple[Callable[[str], bool], int]] = {}
        keywords = {str(key) for node in _nodes(schema) for key in node}
        if {"patternProperties", "unevaluatedProperties"} <= keywords:
            raise ValueError("unevaluatedProperties beside patternProperties cannot be checked")
        for node in _nodes(schema):
            for pattern in (node.get("pattern"), *_keys(node.get("patternProperties"))):
                if isinstance(pattern, str):
                    self._matcher(pattern)

    def match(self, pattern: str, text: str) -> bool:
        is_match, repeats = self._matcher(pattern)
        _budget.get(_Budget()).spend(len(text) * repeats // 10_000)
        return is_match(text)

    def _matcher(self, pattern: str) -> tuple[Callable[[str], bool], int]:
        if pattern not in self._known:
            try:
                is_match = linear_matcher(
                    pattern, max_length=_MAX_PATTERN, max_repeats=_MAX_REPEATS
                )
            except InvalidPattern as error:
                raise ValueError(
                    f"{error}. Patterns are matched in linear time: without looking around, and "
                    "without references to groups"
                ) from error
            self._known[pattern] = is_match, counted_repeats(pattern)
        return self._known[pattern]


def _nodes(schema: object) -> Iterator[Mapping[str, object]]:
    """Yield every object of a schema that may be one itself."""
    if isinstance(schema, dict):
        node = cast("dict[str, object]", schema)
        yield node
        for key, value in node.items():
            if key not in _NOT_SCHEMAS:
                yield from _nodes(value)
    elif isinstance(schema, list):
        for each in cast("list[object]", schema):
            yield from _nodes(each)


def _keys(value: object) -> Sequence[object]:
    return list(cast("dict[str, object]", value)) if isinstance(value, dict) else ()


def _in_short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}…"


# The keywords


def _bounded(dialect: Any, matchers: _Matchers, size: int = 0) -> Any:
    """Return a dialect that counts every look at a schema, and matches in linear time."""
    from jsonschema import validators

    extend: Any = validators.extend  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # it has no types
    sizes: dict[int, int] = {}
    own = {
        "pattern": partial(_pattern, matchers),
        "patternProperties": partial(_pattern_properties, matchers),
        "additionalProperties": partial(_additional_properties, matchers),
        "uniqueItems": _unique_items,
        **{
            name: partial(_reference, dialect.VALIDATORS[name], size)
            for name in ("$ref", "$dynamicRef", "$recursiveRef")
            if name in dialect.VALIDATORS
        },
    }
    keywords = {
        name: partial(_counted, own.get(name, check), sizes)
        for name, check in dialect.VALIDATORS.items()
    }
    made: Any = extend(dialect, keywords)
    # Theirs looks for a `$schema` in every part, and goes on with a dialect that does not count.
    made.evolve = _evolved
    return made


def _evolved(validator: Any, **changes: Any) -> Any:
    import attrs

    return attrs.evolve(validator, **changes)


def _counted(
    check: Any, sizes: dict[int, int], validator: Any, wanted: Any, value: object, schema: Any
) -> Iterator[Error]:
    budget = _budget.get()
    budget.spend(1 + _weight(wanted, sizes) // 20 + _length(value) // 500)
    budget.nested += 1
    if budget.nested > _MAX_NESTED:
        raise TooMuchToCheck("it is nested too deeply, or refers to itself")
    try:
        for error in check(validator, wanted, value, schema) or ():
            # It repeats the value, however long.
            budget.spend(1 + _weight(value, None) // 20)
            yield error
    finally:
        budget.nested -= 1


def _weight(value: object, known: dict[int, int] | None) -> int:
    """Return how much there is in a value; ``known`` are those of a schema, which stay."""
    if not isinstance(value, dict | list):
        return 1 + _length(value) // 200
    own_id = id(cast("object", value))
    if known is not None and own_id in known:
        return known[own_id]
    weight, left = 0, [cast("object", value)]
    while left:
        each = left.pop()
        weight += 1 + (len(each) // 200 if isinstance(each, str) else 0)
        left.extend(_below(each))
    if known is not None:
        known[own_id] = weight
    return weight


def _length(value: object) -> int:
    return len(cast("str", value)) if isinstance(value, str | dict | list) else 1


def _reference(
    check: Any, size: int, validator: Any, wanted: Any, value: object, schema: Any
) -> Iterator[Error]:
    if wanted != "#" and not str(wanted).startswith("#/"):
        _budget.get().spend(size // 4)  # a name, which is looked for all over the schema
    yield from check(validator, wanted, value, schema)


def _pattern(
    matchers: _Matchers, validator: Any, wanted: str, value: object, schema: Any
) -> Iterator[Error]:
    if isinstance(value, str) and not matchers.match(wanted, value):
        yield _error(f"does not match {wanted!r}")


def _pattern_properties(
    matchers: _Matchers, validator: Any, wanted: Any, value: object, schema: Any
) -> Iterator[Error]:
    if not isinstance(value, dict):
        return
    for pattern, below in wanted.items():
        for name, each in cast("dict[str, object]", value).items():
            _budget.get().spend(1)
            if matchers.match(pattern, name):
                yield from validator.descend(each, below, path=name, schema_path=pattern)


def _additional_properties(
    matchers: _Matchers, validator: Any, wanted: Any, value: object, schema: Any
) -> Iterator[Error]:
    if not isinstance(value, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", ())
    _budget.get().spend(len(cast("dict[str, object]", value)) * len(patterns))
    for name, each in cast("dict[str, object]", value).items():
        if name in known or any(matchers.match(pattern, name) for pattern in patterns):
            continue
        if wanted is False:
            yield _error("has fields that are not allowed")
            return
        yield from validator.descend(each, wanted, path=name)


def _unique_items(validator: Any, wanted: Any, value: object, schema: Any) -> Iterator[Error]:
    if wanted and isinstance(value, list):
        items = [_hashable(each) for each in cast("list[object]", value)]
        if len(set(items)) < len(items):
            yield _error("has non-unique elements")


def _hashable(value: object) -> Hashable:
    """Return what is equal for equal JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value).items()
        return "object", frozenset((name, _hashable(each)) for name, each in fields)
    if isinstance(value, list):
        return "array", tuple(map(_hashable, cast("list[object]", value)))
    return type(value) is bool, cast("Hashable", value)


def _error(message: str) -> Error:
    import jsonschema

    return jsonschema.ValidationError(message)
