"""Overrides: texts of a prompt replaced by tag, from JSON files that a team can review.

An override has the hash of the text it replaces. When the original changes, the override is stale:
it is refused and named, so that it never hides a later edit. Names, types and structure cannot be
overridden.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import reprlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from weakincentives.core.logs import get_logger
from weakincentives.errors import (
    InvalidArguments,
    ParseError,
    PromptOverrideError,
    PromptValidationError,
    StaleOverride,
    ToolDefinitionError,
)
from weakincentives.prompt.prompt import Prompt, PromptTemplate, walk
from weakincentives.prompt.section import MarkdownSection, Section
from weakincentives.prompt.signatures import UNKNOWN
from weakincentives.prompt.tool import Tool, ToolExample, described_parameters
from weakincentives.serde import dump, parse

OutT = TypeVar("OutT")
OnStale = Literal["raise", "skip"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_log = get_logger("weakincentives.prompt.overrides")


# Overrides as data


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOverride:
    """A text as lines, for review, and the hash of the text it replaces."""

    replaces: str
    lines: tuple[str, ...]

    @classmethod
    def of(cls, original: str, text: str) -> TextOverride:
        """Return the override that replaces ``original`` by ``text``."""
        return cls(replaces=_hash(original), lines=tuple(text.split("\n")))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleData:
    """An example of a tool as plain JSON, checked against the tool's types when applied."""

    description: str
    input: Any
    output: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesOverride:
    """The examples of a tool, and the hash of those they replace."""

    replaces: str
    examples: tuple[ExampleData, ...]

    @property
    def text(self) -> str:
        return json.dumps(dump(self.examples), ensure_ascii=False)


AnyOverride = TextOverride | ExamplesOverride


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOverride:
    """The overridden texts of a tool; the others stay as they are."""

    description: TextOverride | None = None
    parameters: Mapping[str, TextOverride] = field(default_factory=dict[str, TextOverride])
    examples: ExamplesOverride | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionOverride:
    """The overridden texts of a section and its tools."""

    text: TextOverride | None = None
    tools: Mapping[str, ToolOverride] = field(default_factory=dict[str, ToolOverride])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDescriptor:
    """Everything in a prompt that can be overridden, with its hash and current text."""

    ns: str
    key: str
    sections: Mapping[str, SectionOverride]
    """By path, such as ``guide/deploy``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOverrides:
    """The overrides of one prompt under one tag, for ``Prompt(template, overrides=...)``."""

    ns: str
    key: str
    tag: str
    sections: Mapping[str, SectionOverride] = field(default_factory=dict[str, SectionOverride])
    """By path, such as ``guide/deploy``."""
    on_stale: OnStale = "raise"
    """``skip`` logs a stale override and leaves the original."""

    def apply(self, template: PromptTemplate[OutT]) -> PromptTemplate[OutT]:
        """Return the template with the texts replaced, or raise with every problem."""
        label = f"overrides {self.tag!r} of prompt {self.ns}/{self.key}"
        if (self.ns, self.key) != (template.ns, template.key):
            raise PromptOverrideError(f"{label} are not for {template.ns}/{template.key}")
        editor = _Editor(self, describe(template))
        changed = template.with_sections(editor.section)
        if self.on_stale == "skip":
            for stale in editor.stale:
                _log.warning("%s, skipped: %s", label, stale)
            editor.stale.clear()
        if editor.problems:
            problems = [*editor.problems, *editor.stale]
            raise PromptOverrideError(f"{label} cannot be applied", problems)
        if editor.stale:
            raise StaleOverride(f"{label} are stale", editor.stale)
        return changed


# The current texts


def describe(prompt: Prompt[Any] | PromptTemplate[Any]) -> PromptDescriptor:
    """Return every text that can be overridden, as it is without any override."""
    template = prompt.template if isinstance(prompt, Prompt) else prompt
    template = template.original or template
    described = {node.path: _describe_section(node.section) for node in walk(template.nodes)}
    sections = {path: each for path, each in described.items() if each != SectionOverride()}
    return PromptDescriptor(ns=template.ns, key=template.key, sections=sections)


def _describe_section(section: Section[Any]) -> SectionOverride:
    text = None
    if isinstance(section, MarkdownSection) and section.accepts_overrides:
        text = TextOverride.of(section.template, section.template)
    tools = {tool.name: _describe_tool(tool) for tool in section.tools if tool.accepts_overrides}
    return SectionOverride(text=text, tools=tools)


def _describe_tool(tool: Tool[Any, Any]) -> ToolOverride:
    definition = tool.definition()
    parameters = described_parameters(definition["parameters"])
    texts = {name: str(each.get("description", "")) for name, each in parameters.items()}
    examples = tuple(ExampleData(**each) for each in definition.get("examples", ()))
    return ToolOverride(
        description=TextOverride.of(tool.description, tool.description),
        parameters={name: TextOverride.of(text, text) for name, text in texts.items()},
        examples=ExamplesOverride(replaces=_hash(dump(examples)), examples=examples),
    )


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class _Editor:
    """Applies overrides to the sections of a template, and collects the problems."""

    def __init__(self, overrides: PromptOverrides, now: PromptDescriptor) -> None:
        self.overrides = overrides.sections
        self.now = now.sections
        self.problems: list[str] = []
        self.stale: list[str] = []
        self._check_names("section", self.overrides, self.now, "the prompt")

    def section(self, path: str, section: Section[Any]) -> Section[Any]:
        override, now = self.overrides.get(path), self.now.get(path)
        if override is None or now is None:
            return section
        where = f"section {path!r}"
        changed = copy.copy(section)
        if override.text is not None and now.text is None:
            self.problems.append(f"{where}: its text cannot be overridden")
        elif isinstance(changed, MarkdownSection) and (
            text := self._edited(f"{where}: its text", override.text, now.text)
        ):
            try:
                changed = changed.with_template(text.text)
            except PromptValidationError as error:
                self.problems.append(f"{where}: {error}")
        self._check_names("tool", override.tools, now.tools, where)
        changed.tools = tuple(
            self._tool(where, tool, override.tools.get(tool.name), now.tools.get(tool.name))
            for tool in section.tools
        )
        return changed

    def _tool(
        self,
        where: str,
        tool: Tool[Any, Any],
        override: ToolOverride | None,
        now: ToolOverride | None,
    ) -> Tool[Any, Any]:
        if override is None or now is None:
            return tool
        where = f"tool {tool.name!r} of {where}"
        changes: dict[str, Any] = {}
        if text := self._edited(f"{where}: its description", override.description, now.description):
            changes["description"] = text.text
        self._check_names("parameter", override.parameters, now.parameters, where)
        texts = {
            name: self._edited(f"{where}: the description of {name!r}", text, now.parameters[name])
            for name, text in override.parameters.items()
            if name in now.parameters
        }
        edited = {name: text.text for name, text in texts.items() if text}
        if edited:
            changes["parameter_descriptions"] = {**tool.parameter_descriptions, **edited}
        if examples := self._edited(f"{where}: its examples", override.examples, now.examples):
            changes["examples"] = self._examples(where, tool, examples)
        try:
            return tool.replace(**changes) if changes else tool
        except ToolDefinitionError as error:
            self.problems.append(f"{where}: {error}")
            return tool

    def _examples(
        self, where: str, tool: Tool[Any, Any], override: ExamplesOverride
    ) -> list[ToolExample[Any, Any]]:
        result_type = Any if tool.result_type is UNKNOWN else tool.result_type
        made: list[ToolExample[Any, Any]] = []
        for number, data in enumerate(override.examples, start=1):
            try:
                given = tool.parse(json.dumps(data.input))
                output = parse(result_type, json.dumps(data.output))
                made.append(ToolExample(data.description, given, output))
            except (InvalidArguments, ParseError, ToolDefinitionError, TypeError) as error:
                self.problems.append(f"{where}: example {number}: {error}")
        return made

    def _edited(self, what: str, override: AnyOverride | None, now: AnyOverride | None) -> Any:
        """Return the override if it is not stale and differs from the current value."""
        if override is None or now is None or override == now:
            return None
        if override.replaces == now.replaces:
            return override
        self.stale.append(
            f"{what} has changed: the override replaces {override.replaces}, the current hash is "
            f"{now.replaces}, of {reprlib.repr(now.text)}; compare both, then write "
            f'"replaces": "{now.replaces}" to keep the override, or delete it'
        )
        return None

    def _check_names(
        self, kind: str, given: Mapping[str, object], known: Mapping[str, object], where: str
    ) -> None:
        for name in given:
            if name not in known:
                there = ", ".join(known) or "none"
                self.problems.append(
                    f"{where} has no {kind} {name!r} that can be overridden; {kind}s: {there}"
                )


# Files


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    format: Literal[1]
    sections: Mapping[str, SectionOverride]


class PromptOverridesStore:
    """Overrides as files: ``<root>/<ns>/<prompt key>/<tag>.json``."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def path(self, ns: str, key: str, tag: str) -> Path:
        return self._directory(ns, key) / f"{_checked('tag', tag)}.json"

    def load(
        self, ns: str, key: str, tag: str, *, on_stale: OnStale = "raise"
    ) -> PromptOverrides | None:
        """Return the stored overrides, or None; raise with every problem of a malformed file."""
        path = self.path(ns, key, tag)
        try:
            file = parse(_File, path.read_bytes())
        except FileNotFoundError:
            return None
        except ParseError as error:
            raise PromptOverrideError(f"{path} is malformed", error.problems) from error
        return PromptOverrides(ns=ns, key=key, tag=tag, sections=file.sections, on_stale=on_stale)

    def save(self, overrides: PromptOverrides) -> Path:
        """Replace the stored overrides, all or nothing; return the file."""
        path = self.path(overrides.ns, overrides.key, overrides.tag)
        try:
            data = _without_empty(dump(_File(format=1, sections=overrides.sections)))
            text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
            content = f"{text}\n".encode()
        except (TypeError, ValueError) as error:
            raise PromptOverrideError(f"{path} cannot be written as JSON: {error}") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp")
        try:
            with staged.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)
        return path

    def seed(self, prompt: Prompt[Any] | PromptTemplate[Any], tag: str) -> PromptOverrides:
        """Write a file with the current texts, to be edited; never overwrite one.

        Delete the entries that you do not edit: they go stale, too.
        """
        now = describe(prompt)
        path = self.path(now.ns, now.key, tag)
        if path.exists():
            raise PromptOverrideError(f"{path} exists; delete it, or seed another tag")
        seeded = PromptOverrides(ns=now.ns, key=now.key, tag=tag, sections=now.sections)
        self.save(seeded)
        return seeded

    def delete(self, ns: str, key: str, tag: str) -> bool:
        """Delete the stored overrides; return whether there were any."""
        path = self.path(ns, key, tag)
        found = path.exists()
        path.unlink(missing_ok=True)
        return found

    def tags(self, ns: str, key: str) -> tuple[str, ...]:
        return tuple(sorted(path.stem for path in self._directory(ns, key).glob("[!.]*.json")))

    def _directory(self, ns: str, key: str) -> Path:
        return self.root / _checked("namespace", ns) / _checked("prompt key", key)


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PromptOverrideError(
            f"{what} {name!r} cannot name a file: it must match ^{_NAME.pattern}$"
        )
    return name


def _without_empty(file: dict[str, Any]) -> dict[str, Any]:
    """Leave out optional entries that override nothing, so that a file is short to review."""

    def kept(entry: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entry.items() if value not in (None, {})}

    sections: dict[str, Any] = file["sections"]
    for section in sections.values():
        section["tools"] = {name: kept(tool) for name, tool in section["tools"].items()}
    return {**file, "sections": {path: kept(each) for path, each in sections.items()}}
