"""Prompts that a server offers to its client's user: sections, templates, and tools that write one.

A tool that writes a prompt runs through the pipeline, like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from weakincentives.core.media import Media
from weakincentives.errors import MissingExtra, ParseError, PromptError
from weakincentives.mcp.client_call import blocks_of
from weakincentives.mcp.server_resources import Completer
from weakincentives.prompt.prompt import Prompt, PromptTemplate, walk
from weakincentives.prompt.tool import Tool
from weakincentives.serde import parse, schema
from weakincentives.tool_result import ToolResult

try:
    from mcp.shared.exceptions import MCPError
    from mcp.types import INVALID_PARAMS, PromptArgument
    from mcp.types import Prompt as ListedPrompt
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error

_MOST_COMPLETED = 100
"""What the protocol allows in one answer."""


@dataclass(frozen=True, kw_only=True)
class McpPrompt:
    """A prompt that a tool writes: it returns a text, media, a list of both, or of messages.

    A message is a pair of a role, ``"user"`` or ``"assistant"``, and its content. The tool's
    parameters are the prompt's arguments.
    """

    tool: Tool[Any, Any]
    complete: Mapping[str, Completer] = field(default_factory=dict[str, Completer])
    """What the arguments may be, for clients that help their users to fill them in."""

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return [self.tool.parameters]

    def listed(self) -> ListedPrompt:
        return ListedPrompt(
            name=self.name,
            title=None if self.tool.title == self.name else self.tool.title,
            description=self.tool.description,
            arguments=_arguments(self.tool.parameters),
        )

    def parameters(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Return arguments, which are texts, as the tool takes them."""
        properties = self.tool.parameters.get("properties", {})
        return {name: _read(properties.get(name, {}), text) for name, text in given.items()}


class TemplatePrompt:
    """A prompt template: the fields of its sections' parameters are the arguments."""

    def __init__(self, template: PromptTemplate[Any]) -> None:
        self.name = template.key
        self.complete: Mapping[str, Completer] = {}
        self._template = template
        types = [node.section.params_type for node in walk(template.nodes)]
        self._types: list[type[Any]] = list(dict.fromkeys(each for each in types if each))
        self._schemas = {each: schema(each) for each in self._types}

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return list(self._schemas.values())

    def listed(self) -> ListedPrompt:
        arguments = [each for found in self.schemas for each in _arguments(found)]
        named = {each.name: each for each in arguments}
        return ListedPrompt(
            name=self.name, description=self._template.name, arguments=list(named.values())
        )

    def messages(self, given: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the filled-in template as one message, with its media."""
        known = {name for each in self.schemas for name in each["properties"]}
        if unknown := sorted(given.keys() - known):
            raise MCPError(INVALID_PARAMS, f"unknown arguments: {', '.join(unknown)}")
        try:
            params = [
                parse(
                    kind,
                    {
                        name: _read(properties[name], text)
                        for properties in [found["properties"]]
                        for name, text in given.items()
                        if name in properties
                    },
                )
                for kind, found in self._schemas.items()
            ]
            rendered = Prompt(self._template).bind(*params).render()
        except (ParseError, PromptError) as error:
            raise MCPError(INVALID_PARAMS, str(error)) from error
        return messages_of([rendered.text, *rendered.media])


def _arguments(parameters: Mapping[str, Any]) -> list[PromptArgument]:
    required = parameters.get("required", ())
    return [
        PromptArgument(name=name, description=each.get("description"), required=name in required)
        for name, each in parameters.get("properties", {}).items()
    ]


def _read(found: Mapping[str, Any], text: str) -> Any:
    """Return an argument as its schema has it: all arguments of prompts are texts."""
    if found.get("type") != "string" and "enum" not in found:
        with suppress(ValueError):
            return json.loads(text)
    return text


def result_messages(result: ToolResult[Any]) -> list[dict[str, Any]]:
    """Return what a tool wrote as messages."""
    value = result.value
    if isinstance(value, str | Media):
        return messages_of([*([result.message] if result.message else []), value])
    if isinstance(value, Sequence):
        return messages_of(cast("Sequence[Any]", value))
    return messages_of([result.render(), *result.media])


def messages_of(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """Return texts, media, and pairs of a role and content as messages of MCP."""
    pairs: list[tuple[str, Any]] = [
        cast("tuple[str, Any]", part) if isinstance(part, tuple) else ("user", part)
        for part in parts
        if part != ""
    ]
    return [
        {"role": role, "content": block} for role, content in pairs for block in blocks_of(content)
    ]


def completed(values: Sequence[str], start: str) -> dict[str, Any]:
    """Return the values that begin with a text, in the wire format."""
    fitting = [each for each in dict.fromkeys(values) if each.lower().startswith(start.lower())]
    return {
        "completion": {
            "values": fitting[:_MOST_COMPLETED],
            "total": len(fitting),
            "hasMore": len(fitting) > _MOST_COMPLETED,
        }
    }


def choices_in(parameters: Mapping[str, Any], name: str) -> list[str]:
    """Return what a parameter can be, by its schema."""
    found = parameters.get("properties", {}).get(name, {})
    if found.get("type") == "boolean":
        return ["true", "false"]
    return [str(each) for each in found.get("enum", ())]
