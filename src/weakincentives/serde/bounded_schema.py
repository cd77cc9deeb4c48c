"""JSON schemas of others, checked within bounds: no schema makes a check take forever.

A small schema can be endless to check: branches that double at each level, circular references, a
pattern like ``^(a+)+$``. So the size of a schema is limited, every check has a budget of steps, and
patterns are matched in linear time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, cast

from weakincentives.core.text import counted_repeats, linear_matcher
from weakincentives.errors import InvalidPattern, ParseError
from weakincentives.serde.problems import MISSING, shown
from weakincentives.serde.typed import dump

_MAX_SCHEMA = 256 * 1024
"""Characters of a schema as JSON."""
_MAX_DEPTH = 50
"""Nested objects and arrays in a schema."""
_MAX_NESTED = 130
"""Nested keywords in a check. Below Python's own limit, which cannot be caught in every place."""
_MAX_STEPS = 200_000
"""Cost of a check: one step for each keyword, more for long values."""
_MAX_PATTERN = 2000
_MAX_REPEATS = 100_000
_MAX_PROBLEMS = 100
_MAX_TEXT = 1000
"""Characters of one problem's text: a schema, and the names in it, may be long."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NOT_SCHEMAS = ("const", "default", "enum", "example", "examples")

Error = Any
"""A ``ValidationError`` of jsonschema, which has no types of its own."""


class TooMuchToCheck(ValueError):
    """A value could not be checked within the budget."""


class _Budget:
    __slots__ = ("left", "nested")

    def __init__(self) -> None:
        self.left = _MAX_STEPS
        self.nested = 0

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooMuchToCheck(f"checking it takes more than {_MAX_STEPS:,} steps")


_budget: ContextVar[_Budget] = ContextVar("_budget")


class BoundedSchema:
    """A JSON schema to check values against; ValueError if it is invalid or too big."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        import jsonschema
        from jsonschema.validators import validator_for
        from referencing import Registry

        self.schema = bounded_copy(schema)
        text = json.dumps(self.schema)
        self._has_defaults = '"default"' in text
        self._matchers = _Matchers(self.schema)
        dialect: Any = validator_for(self.schema, default=jsonschema.Draft202012Validator)
        # An explicit registry: without one, jsonschema fetches remote references from the network.
        meta = _bounded(dialect, self._matchers)(dialect.META_SCHEMA, registry=Registry[Any]())
        for error in self._spending(lambda: meta.iter_errors(self.schema)):
            place = ".".join(map(str, error.absolute_path)) or "the top level"
            raise ValueError(f"not a valid JSON schema, at {place}: {error.message[:300]}")
        made = _bounded(dialect, self._matchers, len(text))
        self._validator = made(self.schema, registry=Registry[Any]())

    def errors(self, value: object) -> Iterator[Error]:
        """Yield the errors of a value; raise TooMuchToCheck, or the error of a broken schema."""
        return self._spending(lambda: self._validator.iter_errors(value))

    def parse(self, data: object) -> dict[str, Any]:
        """Return arguments as a dict with the schema's defaults; ParseError with all problems."""
        arguments = _from_json(data)
        found: dict[str, dict[str, None]] = {}
        try:
            for error in self.errors(arguments):
                for path, text in self._problems(error):
                    found.setdefault(path, {})[text] = None
        except Exception as error:  # too much, an unresolvable reference, too deep nesting
            text = f"Cannot be checked: {str(error)[:_MAX_TEXT]}"
            raise ParseError("cannot be checked", {"": text}) from error
        if found:
            raise ParseError("invalid arguments", _details(found))
        if not self._has_defaults:
            return arguments
        filled = _filled(arguments, self.schema)
        try:
            return arguments if any(self.errors(filled)) else filled
        except Exception:  # too much to check with the defaults: the arguments alone are valid
            return arguments

    def _spending(self, errors: Callable[[], Iterator[Error]]) -> Iterator[Error]:
        # Not lazily: the budget must not stay set while the caller goes on.
        token = _budget.set(_Budget())
        try:
            return iter(list(errors()))
        except RecursionError as error:
            raise TooMuchToCheck("it is nested too deeply, or refers to itself") from error
        finally:
            _budget.reset(token)

    # Errors in words

    def _problems(self, error: Error) -> Iterator[tuple[str, str]]:
        """Yield path and sentence for each problem that one error of jsonschema stands for."""
        path = ".".join(map(str, error.absolute_path))
        prefix = f"{path}." if path else ""
        rule, wanted, value = error.validator, error.validator_value, error.instance
        if rule in ("anyOf", "oneOf") and error.context:
            yield from self._nearest(path, error)
        elif rule == "type":
            yield path, f"Expected type {_either(wanted)}, got {shown(value)}"
        elif rule == "required":
            yield from ((prefix + n, MISSING) for n in wanted if n not in value)
        elif rule == "additionalProperties" and wanted is False:
            known = error.schema.get("properties", ())
            patterns = error.schema.get("patternProperties", ())
            expected = f"expected one of: {', '.join(known)}" if known else "no fields are expected"
            for name in value:
                if name not in known and not any(self._matchers.match(p, name) for p in patterns):
                    yield prefix + name, f"Unknown field; {expected}"
        elif rule == "enum":
            choices = ", ".join(c if isinstance(c, str) else json.dumps(c) for c in wanted)
            name = path.rsplit(".", 1)[-1] or "value"
            yield path, f"{name} must be one of: {choices}, got {shown(value)}"
        elif rule is None:  # the schema `false`
            yield path, f"Not allowed, got {shown(value)}"
        else:
            # Not jsonschema's own sentence: it repeats the value, however long.
            expected = json.dumps(wanted, ensure_ascii=False)
            yield path, f"Expected {rule} {expected}, got {shown(value)}"

    def _nearest(self, path: str, error: Error) -> Iterator[tuple[str, str]]:
        """Yield the problems of the branch that a value was most likely meant for."""
        branches: dict[int, list[Error]] = {}
        for each in error.context:
            branches.setdefault(each.relative_schema_path[0], []).append(each)
        alike = [found for found in branches.values() if not any(map(_is_another_type, found))]
        if alike:
            for each in min(alike, key=len):
                yield from self._problems(each)
        else:
            types = [_either(e.validator_value) for e in error.context if _is_another_type(e)]
            yield path, f"Expected type {' or '.join(types)}, got {shown(error.instance)}"


@lru_cache(maxsize=256)
def bounded_schema(text: str) -> BoundedSchema:
    """Return the BoundedSchema of JSON text; checking a schema takes milliseconds."""
    return BoundedSchema(json.loads(text))


def _is_another_type(error: Error) -> bool:
    return error.validator == "type" and not error.relative_path


def _either(types: str | list[str]) -> str:
    return types if isinstance(types, str) else " or ".join(types)


def _details(found: Mapping[str, Mapping[str, None]]) -> dict[str, str]:
    details = {
        path[:_MAX_TEXT]: "; ".join(texts)[:_MAX_TEXT]
        for path, texts in list(found.items())[:_MAX_PROBLEMS]
    }
    if len(found) > _MAX_PROBLEMS:
        more = f"These are {_MAX_PROBLEMS} of {len(found)} problems"
        details[""] = f"{details['']}; {more}" if "" in details else more
    return details


def _from_json(data: object) -> Any:
    """Return JSON text, or data that can be written as such, as new dicts and lists."""

    def no_constant(text: str) -> None:
        raise ValueError(f"{text} is not a JSON number")

    try:
        text = data if isinstance(data, str | bytes | bytearray) else json.dumps(dump(data))
        return json.loads(text, parse_constant=no_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParseError("not JSON", {"": f"Not valid JSON: {error}"}) from error


def _filled(value: Any, schema: Any) -> Any:
    """Return a value with the defaults of its schema."""
    if not isinstance(schema, dict):
        return value
    node = cast("dict[str, Any]", schema)
    if isinstance(value, dict):
        filled = dict(cast("dict[str, Any]", value))
        for name, part in node.get("properties", {}).items():
            if name in filled:
                filled[name] = _filled(filled[name], part)
            elif isinstance(part, dict) and "default" in part:
                filled[name] = copy.deepcopy(cast("Any", part["default"]))
        return filled
    if isinstance(value, list) and "items" in node:
        return [_filled(item, node["items"]) for item in cast("list[Any]", value)]
    return cast("object", value)


def bounded_copy(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema; ValueError if it is too big."""
    try:
        text = json.dumps(schema, allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if len(text) > _MAX_SCHEMA:
        raise ValueError(
            f"the schema has {len(text):,} characters as JSON; at most {_MAX_SCHEMA:,} are allowed"
        )
    plain = json.loads(text)
    level: list[object] = [plain]
    for _ in range(_MAX_DEPTH):
        level = [below for each in level for below in _below(each)]
    if level:
        raise ValueError(f"the schema is nested more than {_MAX_DEPTH} levels deep")
    return plain


def _below(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from cast("dict[str, object]", value).values()
    elif isinstance(value, list):
        yield from cast("list[object]", value)


class _Matchers:
    """Matches the patterns of a schema in linear time; ValueError if one cannot be."""

    def __init__(self, schema: object) -> None:
        self._known: dict[str, tuple[Callable[[str], bool], int]] = {}
        nodes = list(_nodes(schema))
        keywords = {key for node in nodes for key in node}
        if {"patternProperties", "unevaluatedProperties"} <= keywords:
            raise ValueError("unevaluatedProperties with patternProperties cannot be checked")
        for node in nodes:
            for pattern in (node.get("pattern"), *(node.get("patternProperties") or ())):
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
                    f"{error}. Patterns are matched in linear time: without look-around and "
                    "back-references"
                ) from error
            self._known[pattern] = is_match, counted_repeats(pattern)
        return self._known[pattern]


def _nodes(schema: object) -> Iterator[dict[str, Any]]:
    """Yield every object in a schema that may be a schema itself."""
    if isinstance(schema, dict):
        node = cast("dict[str, Any]", schema)
        yield node
        for key, value in node.items():
            if key not in _NOT_SCHEMAS:
                yield from _nodes(value)
    elif isinstance(schema, list):
        for each in cast("list[object]", schema):
            yield from _nodes(each)


# The keywords


def _bounded(dialect: Any, matchers: _Matchers, size: int = 0) -> Any:
    """Return a dialect that counts every check, and matches in linear time."""
    from jsonschema import validators

    extend: Any = validators.extend  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # it has no types
    own = {
        "pattern": partial(_pattern, matchers),
        "patternProperties": partial(_pattern_properties, matchers),
        "additionalProperties": partial(_additional_properties, matchers),
        "uniqueItems": _unique_items,
    }
    keywords = {
        name: partial(_counted, own.get(name, check), size if name in _REFERENCES else 0)
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
    check: Any, size: int, validator: Any, wanted: Any, value: object, schema: Any
) -> Iterator[Error]:
    budget = _budget.get()
    budget.spend(1 + _length(wanted) // 10 + _length(value) // 500)
    if size and wanted != "#" and not str(wanted).startswith("#/"):
        budget.spend(size // 30)  # an anchor, which is searched for all over the schema
    budget.nested += 1
    if budget.nested > _MAX_NESTED:
        raise TooMuchToCheck("it is nested too deeply, or refers to itself")
    try:
        for error in check(validator, wanted, value, schema) or ():
            budget.spend(1 + len(repr(value)) // 1000)  # its message repeats the value
            yield error
    finally:
        budget.nested -= 1


def _length(value: object) -> int:
    return len(cast("str", value)) if isinstance(value, str | dict | list) else 1


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
    """Return a key that is equal for equal JSON: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value).items()
        return "object", frozenset((name, _hashable(each)) for name, each in fields)
    if isinstance(value, list):
        return "array", tuple(map(_hashable, cast("list[object]", value)))
    return type(value) is bool, cast("Hashable", value)


def _error(message: str) -> Error:
    import jsonschema

    return jsonschema.ValidationError(message)
