"""Texts of a prompt replaced by tag, from JSON files that a team can review.

An override carries the hash of what it replaces. When the original changes, the override is stale:
it is refused and named, so that nobody's edit silently hides somebody else's. Names, types and
structure cannot be overridden.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from weakincentives.errors import (
    InvalidArguments,
    ParseError,
    PromptOverrideError,
    PromptValidationError,
    StaleOverride,
    ToolDefinitionError,
)
from weakincentives.logs import get_logger
from weakincentives.prompt.prompt import Prompt, PromptTemplate
from weakincentives.prompt.section import MarkdownSection, Section
from weakincentives.prompt.signatures import UNKNOWN
from weakincentives.prompt.tool import Tool, ToolExample, described_parameters
from weakincentives.serde import dump, parse

OutT = TypeVar("OutT")
OnStale = Literal["raise", "skip"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_log = get_logger("weakincentives.prompt.overrides")


# What an override says


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOverride:
    """A text, line by line as it is reviewed, and the hash of the one it replaces."""

    replaces: str
    lines: tuple[str, ...]

    @classmethod
    def of(cls, original: str, text: str) -> TextOverride:
        """Return the override that puts ``text`` in the place of ``original``."""
        return cls(replaces=_hash(original), lines=tuple(text.split("\n")))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleData:
    """An example of a tool as plain JSON, held against the tool's types when it is applied."""

    description: str
    input: Any
    output: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesOverride:
    """The examples of a tool, and the hash of all those they replace."""

    replaces: str
    examples: tuple[ExampleData, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOverride:
    """What is said otherwise about a tool; what is left out stays as it is."""

    description: TextOverride | None = None
    parameters: Mapping[str, TextOverride] = field(default_factory=dict[str, TextOverride])
    examples: ExamplesOverride | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionOverride:
    """What is said otherwise in a section and about its tools."""

    text: TextOverride | None = None
    tools: Mapping[str, ToolOverride] = field(default_factory=dict[str, ToolOverride])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDescriptor:
    """Everything in a prompt that can be overridden, with its hash and its text as it is."""

    ns: str
    key: str
    sections: Mapping[str, SectionOverride]
    """By path, such as ``guide/deploy``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOverrides:
    """The overrides of one prompt under one tag. ``Prompt(template, overrides=...)`` uses them."""

    ns: str
    key: str
    tag: str
    sections: Mapping[str, SectionOverride] = field(default_factory=dict[str, SectionOverride])
    """By path, such as ``guide/deploy``."""
    on_stale: OnStale = "raise"
    """``skip`` logs a stale override and leaves the original."""

    def apply(self, template: PromptTemplate[OutT]) -> PromptTemplate[OutT]:
        """Return the template with the texts replaced, or raise with everything that is wrong."""
        if (self.ns, self.key) != (template.ns, template.key):
            raise PromptOverrideError(
                f"overrides {self.tag!r} are for prompt {self.ns}/{self.key}, "
                f"not for {template.ns}/{template.key}"
            )
        run = _Application(self)
        known = [path for path, _ in _sections(template)]
        run.expect("section", self.sections, known, "the prompt")
        changed = template.with_sections(run.section)
        run.finish()
        return changed


# What there is to override


def describe(prompt: Prompt[Any] | PromptTemplate[Any]) -> PromptDescriptor:
    """Return every text that can be overridden, as it is without any override."""
    template = prompt.template if isinstance(prompt, Prompt) else prompt
    template = template.original or template
    found = {path: _describe_section(section) for path, section in _sections(template)}
    nothing = SectionOverride()
    return PromptDescriptor(
        ns=template.ns,
        key=template.key,
        sections={path: each for path, each in found.items() if each != nothing},
    )


def _sections(template: PromptTemplate[Any]) -> list[tuple[str, Section[Any]]]:
    found: list[tuple[str, Section[Any]]] = []

    def note(path: str, section: Section[Any]) -> Section[Any]:
        found.append((path, section))
        return section

    template.with_sections(note)
    return found


def _describe_section(section: Section[Any]) -> SectionOverride:
    text = None
    if isinstance(section, MarkdownSection) and section.accepts_overrides:
        text = TextOverride.of(section.template, section.template)
    accepting = (tool for tool in section.tools if tool.accepts_overrides)
    return SectionOverride(text=text, tools={tool.name: _describe_tool(tool) for tool in accepting})


def _describe_tool(tool: Tool[Any, Any]) -> ToolOverride:
    examples = _examples_of(tool)
    return ToolOverride(
        description=TextOverride.of(tool.description, tool.description),
        parameters={
            name: TextOverride.of(text, text) for name, text in _parameter_texts(tool).items()
        },
        examples=ExamplesOverride(replaces=_hash(dump(examples)), examples=examples),
    )


def _parameter_texts(tool: Tool[Any, Any]) -> dict[str, str]:
    parameters = described_parameters(tool.parameters)
    return {name: str(each.get("description", "")) for name, each in parameters.items()}


def _examples_of(tool: Tool[Any, Any]) -> tuple[ExampleData, ...]:
    return tuple(ExampleData(**each) for each in tool.definition().get("examples", ()))


def _hash(value: object) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:16]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)


# How it is applied


class _Application:
    """One run of overrides over a template; collects what is wrong on the way."""

    def __init__(self, overrides: PromptOverrides) -> None:
        self.overrides = overrides
        self.problems: list[str] = []
        self.stale: list[str] = []

    def section(self, path: str, section: Section[Any]) -> Section[Any]:
        override = self.overrides.sections.get(path)
        if override is None:
            return section
        where = f"section {path!r}"
        if override.text is not None:
            section = self._text(where, section, override.text)
        self.expect("tool", override.tools, [tool.name for tool in section.tools], where)
        tools = tuple(
            self._tool(path, tool, override.tools.get(tool.name)) for tool in section.tools
        )
        if any(new is not old for new, old in zip(tools, section.tools, strict=True)):
            section = copy.copy(section)
            section.tools = tools
        return section

    def _text(self, where: str, section: Section[Any], text: TextOverride) -> Section[Any]:
        if not isinstance(section, MarkdownSection):
            self.problems.append(
                f"{where}: its text cannot be overridden: {type(section).__name__} makes it itself"
            )
            return section
        if not section.accepts_overrides:
            self.problems.append(f"{where}: its text cannot be overridden: accepts_overrides=False")
        elif self._replaces(f"{where}: its text", text, section.template):
            try:
                return section.with_template(text.text)
            except PromptValidationError as error:
                self.problems.append(f"{where}: {error}")
        return section

    def _tool(
        self, path: str, tool: Tool[Any, Any], override: ToolOverride | None
    ) -> Tool[Any, Any]:
        if override is None or override == ToolOverride():
            return tool
        where = f"tool {tool.name!r} of section {path!r}"
        if not tool.accepts_overrides:
            self.problems.append(f"{where} cannot be overridden: accepts_overrides=False")
            return tool
        changes: dict[str, Any] = {}
        text = override.description
        if text is not None and self._replaces(f"{where}: its description", text, tool.description):
            changes["description"] = text.text
        texts = self._parameters(where, tool, override)
        if texts:
            changes["parameter_descriptions"] = {**tool.parameter_descriptions, **texts}
        if override.examples is not None:
            changes.update(self._examples(where, tool, override.examples))
        try:
            return tool.replace(**changes) if changes else tool
        except ToolDefinitionError as error:
            self.problems.append(f"{where}: {error}")
            return tool

    def _parameters(
        self, where: str, tool: Tool[Any, Any], override: ToolOverride
    ) -> dict[str, str]:
        current = _parameter_texts(tool)
        self.expect("parameter", override.parameters, list(current), where)
        return {
            name: text.text
            for name, text in override.parameters.items()
            if name in current
            and self._replaces(f"{where}: the description of {name!r}", text, current[name])
        }

    def _examples(
        self, where: str, tool: Tool[Any, Any], override: ExamplesOverride
    ) -> dict[str, Any]:
        current = _examples_of(tool)
        if not self._is_fresh(f"{where}: its examples", override.replaces, dump(current)):
            return {}
        if _canonical(dump(override.examples)) == _canonical(dump(current)):
            return {}
        made: list[ToolExample[Any, Any]] = []
        for number, data in enumerate(override.examples, start=1):
            try:
                made.append(_example(tool, data, current))
            except (InvalidArguments, ParseError, ToolDefinitionError, TypeError) as error:
                self.problems.append(f"{where}: example {number}: {error}")
        return {"examples": made}

    def _replaces(self, what: str, override: TextOverride, current: str) -> bool:
        """Whether the override is in order and says something else than there is."""
        return self._is_fresh(what, override.replaces, current) and override.text != current

    def _is_fresh(self, what: str, replaces: str, current: object) -> bool:
        now = _hash(current)
        if replaces == now:
            return True
        self.stale.append(
            f"{what} has changed: the override replaces {replaces}, and now there is {now}, "
            f"{_shortened(current)}; look at both, then write "
            f'"replaces": "{now}" to keep the override, or delete it'
        )
        return False

    def expect(self, kind: str, given: Mapping[str, object], known: list[str], where: str) -> None:
        """Note every name that is overridden and that there is not."""
        for name in given:
            if name not in known:
                there = ", ".join(known) or "none"
                self.problems.append(f"{where} has no {kind} {name!r}; {kind}s there: {there}")

    def finish(self) -> None:
        mine = self.overrides
        label = f"overrides {mine.tag!r} of prompt {mine.ns}/{mine.key}"
        if mine.on_stale == "skip":
            for stale in self.stale:
                _log.warning("%s, skipped: %s", label, stale)
            self.stale = []
        if self.problems:
            raise PromptOverrideError(f"{label} cannot be applied", [*self.problems, *self.stale])
        if self.stale:
            raise StaleOverride(f"{label} are stale", self.stale)


def _example(
    tool: Tool[Any, Any], data: ExampleData, current: tuple[ExampleData, ...]
) -> ToolExample[Any, Any]:
    """Return the example with values of the tool's types.

    A value that an example of the tool has already is taken from there: it may be one that cannot
    be read back from JSON.
    """
    given, shown = _canonical(data.input), _canonical(data.output)
    inputs = {_canonical(old.input): e.input for old, e in zip(current, tool.examples, strict=True)}
    outputs = {
        _canonical(old.output): e.output for old, e in zip(current, tool.examples, strict=True)
    }
    result_type = Any if tool.result_type is UNKNOWN else tool.result_type
    return ToolExample(
        description=data.description,
        input=inputs[given] if given in inputs else tool.parse(given),
        output=outputs[shown] if shown in outputs else parse(result_type, shown),
    )


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


# Where they are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    format: Literal[1]
    sections: Mapping[str, SectionOverride]


class PromptOverridesStore:
    """Overrides as files: ``<root>/<ns>/<prompt key>/<tag>.json``."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def path(self, ns: str, key: str, tag: str) -> Path:
        """Return where the overrides of a prompt under a tag are kept."""
        return self._directory(ns, key) / f"{_checked('tag', tag)}.json"

    def load(
        self, ns: str, key: str, tag: str, *, on_stale: OnStale = "raise"
    ) -> PromptOverrides | None:
        """Return what is stored, or None; raise with every problem of a malformed file."""
        path = self.path(ns, key, tag)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            data = json.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise PromptOverrideError(f"{path} is not JSON: {error}") from error
        try:
            file = parse(_File, _canonical(data))
        except ParseError as error:
            raise PromptOverrideError(f"{path} is malformed", error.problems) from error
        return PromptOverrides(ns=ns, key=key, tag=tag, sections=file.sections, on_stale=on_stale)

    def save(self, overrides: PromptOverrides) -> Path:
        """Write the overrides, all or nothing, over what is stored; return the file."""
        path = self.path(overrides.ns, overrides.key, overrides.tag)
        file = _File(format=1, sections=overrides.sections)
        try:
            text = json.dumps(
                _without_empty(dump(file)),
                indent=2,
                sort_keys=True,
                ensure_ascii=False,
                allow_nan=False,
            )
            content = f"{text}\n".encode()
        except (TypeError, ValueError) as error:
            raise PromptOverrideError(f"{path} cannot be written as JSON: {error}") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, content)
        return path

    def seed(self, prompt: Prompt[Any] | PromptTemplate[Any], tag: str) -> PromptOverrides:
        """Write a file with the texts as they are, to be edited; never over one that is there.

        Delete the entries that are not edited: an override that says the same still goes stale.
        """
        now = describe(prompt)
        path = self.path(now.ns, now.key, tag)
        if path.exists():
            raise PromptOverrideError(f"{path} exists; delete it, or seed another tag")
        seeded = PromptOverrides(ns=now.ns, key=now.key, tag=tag, sections=now.sections)
        self.save(seeded)
        return seeded

    def delete(self, ns: str, key: str, tag: str) -> bool:
        """Delete what is stored; return whether there was anything."""
        try:
            self.path(ns, key, tag).unlink()
        except FileNotFoundError:
            return False
        return True

    def tags(self, ns: str, key: str) -> tuple[str, ...]:
        """Return the tags that are stored for a prompt, sorted."""
        found = (path.stem for path in self._directory(ns, key).glob("*.json"))
        return tuple(sorted(tag for tag in found if _NAME.fullmatch(tag)))

    def _directory(self, ns: str, key: str) -> Path:
        return self.root / _checked("namespace", ns) / _checked("prompt key", key)


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PromptOverrideError(
            f"{what} {name!r} cannot name a file: it must match ^{_NAME.pattern}$"
        )
    return name


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse what a merge of two edits leaves behind; JSON itself would keep the last."""
    repeated = sorted(name for name, times in Counter(n for n, _ in pairs).items() if times > 1)
    if repeated:
        raise ValueError(f"given twice: {', '.join(repeated)}")
    return dict(pairs)


def _without_empty(file: dict[str, Any]) -> dict[str, Any]:
    """Leave out what overrides nothing, so that a reviewer reads only what does."""

    def kept(entry: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entry.items() if value not in (None, {})}

    sections: dict[str, Any] = file["sections"]
    for section in sections.values():
        section["tools"] = {name: kept(tool) for name, tool in section["tools"].items()}
    return {**file, "sections": {path: kept(each) for path, each in sections.items()}}


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
