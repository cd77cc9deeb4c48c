"""A model that makes up valid arguments, and a guard against requests to real ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import jsonschema

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.scripted import calls, says, stream_text
from weakincentives.prompt.structured_output import output_schema
from weakincentives.runtime import run
from weakincentives.runtime.conversation import ModelRequest, ModelTurn

_MOST_DEEP = 12
_FORMATS = {
    "date": "2026-01-02",
    "date-time": "2026-01-02T03:04:05Z",
    "duration": "PT1H",
    "email": "ann@example.com",
    "time": "03:04:05Z",
    "uri": "https://example.com/",
    "uuid": "12345678-1234-5678-1234-567812345678",
}


class MadeUpAdapter(Adapter):
    """Calls every tool once, with arguments that fit its schema, then answers.

    For a first test of an application, without a script: do all tools run?

    >>> import weakincentives as wink
    >>> @wink.tool
    ... def greet(name: str, times: int = 1) -> str:
    ...     '''Greet.'''
    ...     return name * times
    >>> section = wink.MarkdownSection(title="Desk", tools=[greet])
    >>> prompt = wink.Prompt(wink.PromptTemplate(sections=[section]))
    >>> MadeUpAdapter().evaluate(prompt, wink.Session()).calls
    1

    Args:
        tools: The tools to call; by default all that are offered.
        text: The last answer, unless the prompt has an output type: that is made up, too.
    """

    name = "made-up"
    needs_loop = False
    asks_provider = False

    def __init__(self, tools: Collection[str] | None = None, *, text: str = "Done.") -> None:
        self._tools = tools
        self._text = text
        self._lock = threading.Lock()
        self.last_request: ModelRequest | None = None

    async def complete(self, request: ModelRequest) -> ModelTurn:
        self.last_request = request
        if not any(message.role == "tool" for message in request.messages):
            wanted = [
                (tool.name, cast("Mapping[str, object]", made_up(tool.parameters)))
                for tool in request.prompt.tools
                if tool.handler is not None and (self._tools is None or tool.name in self._tools)
            ]
            if wanted:
                return calls(*wanted)
        text = self._text
        if request.output_type is not None:
            text = json.dumps(made_up(output_schema(request.output_type)))
        turn = says(text)
        stream_text(request, turn)
        return turn


def made_up(schema: Mapping[str, Any]) -> Any:
    """Return the smallest value that fits a JSON schema; the same each time.

    Raises:
        ValueError: None could be made up, for a pattern for example.
    """
    value = _value(schema, schema, 0)
    validator: Any = jsonschema.Draft202012Validator(schema)
    problem = next(iter(validator.iter_errors(value)), None)
    if problem is not None:
        raise ValueError(f"no value could be made up: {problem.message}; give the model a script")
    return value


def _value(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if depth > _MOST_DEEP or not isinstance(schema, Mapping):
        return None
    node = cast("Mapping[str, Any]", schema)
    for key in ("const", "default"):
        if key in node:
            return node[key]
    if node.get("examples"):
        return node["examples"][0]
    if node.get("enum"):
        return node["enum"][0]
    if "$ref" in node:
        found: Any = root
        for part in str(node["$ref"]).removeprefix("#/").split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
        return _value(found, root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if node.get(key):
            # The last one where a type holds itself, as the first would never end.
            return _value(node[key][-1 if depth > _MOST_DEEP // 2 else 0], root, depth + 1)
    kind = node.get("type")
    if isinstance(kind, list):
        kind = cast("list[str]", kind)[0]
    if kind == "object" or (kind is None and "properties" in node):
        properties: Mapping[str, Any] = node.get("properties", {})
        return {
            name: _value(properties.get(name, {}), root, depth + 1)
            for name in node.get("required", ())
        }
    if kind == "array":
        first: list[Any] = [_value(each, root, depth + 1) for each in node.get("prefixItems", ())]
        missing = max(0, int(node.get("minItems", 0)) - len(first))
        return [*first, *(_value(node.get("items", {}), root, depth + 1) for _ in range(missing))]
    if kind in ("integer", "number"):
        return _number(node, kind == "integer")
    return {"boolean": False, "null": None, "string": _text(node)}.get(str(kind), "a")


def _number(node: Mapping[str, Any], whole: bool) -> float:
    step = 1 if whole else 0.5
    low, high = node.get("minimum"), node.get("maximum")
    if "exclusiveMinimum" in node:
        low = node["exclusiveMinimum"] + step
    if "exclusiveMaximum" in node:
        high = node["exclusiveMaximum"] - step
    value = low if low is not None else min(1, 1 if high is None else high)
    multiple = node.get("multipleOf")
    return value if not multiple else -(-value // multiple) * multiple


def _text(node: Mapping[str, Any]) -> str:
    text = _FORMATS.get(str(node.get("format")), "a")
    return text if node.get("format") else text * max(1, int(node.get("minLength", 1)))


@contextmanager
def no_model_requests() -> Generator[None]:
    """Refuse requests to real models in the block, in every thread: for the tests of a project.

    Scripted, replayed and made-up models go on. As a fixture for all tests::

        @pytest.fixture(autouse=True)
        def offline():
            with no_model_requests():
                yield
    """
    before, run.requests_refused = run.requests_refused, True
    try:
        yield
    finally:
        run.requests_refused = before
