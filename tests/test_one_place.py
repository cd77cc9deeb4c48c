"""One list, one place: a second list of the same names, or a second wording, is an error."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import weakincentives
from weakincentives.adapters import Adapter, ScriptedAdapter
from weakincentives.cli import models, options
from weakincentives.cli.models import PROVIDERS
from weakincentives.contrib.tools.sandbox.engines import ENGINES, Unconfined
from weakincentives.contrib.tools.sandbox.settings import EngineName, SandboxChoice
from weakincentives.prompt import refusals
from weakincentives.runtime.forks import MODEL_FILES

SOURCE = Path(weakincentives.__file__).parent


class Source:
    """The parts of a module that the checks look at; each is parsed once."""

    def __init__(self, tree: ast.AST) -> None:
        nodes = list(ast.walk(tree))
        self.lists = list(lists(nodes))
        self.strings = {
            each.value
            for each in nodes
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        }
        self.calls = [each for each in nodes if isinstance(each, ast.Call)]
        self.keys = {
            each.slice.value
            for each in nodes
            if isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Constant)
        }


@cache
def sources() -> dict[str, Source]:
    files = sorted(SOURCE.rglob("*.py"))
    return {str(file.relative_to(SOURCE)): Source(ast.parse(file.read_text())) for file in files}


def lists(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, set[str]]]:
    """Yield the line and the strings of everything that tells several names apart."""
    for node in nodes:
        parts: list[ast.AST] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = list(node.elts)
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Match):
            parts = [
                each.value
                for case in node.cases
                for each in ast.walk(case.pattern)
                if isinstance(each, ast.MatchValue)
            ]
        found = {
            part.value
            for part in parts
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        if found:
            yield getattr(node, "lineno", 0), found


def copies(names: Collection[str], home: str, several: int) -> list[str]:
    """Return where, outside of its home, a list has several of these names."""
    return [
        f"{file}:{line}: {sorted(found & set(names))}"
        for file, source in sources().items()
        if file != home
        for line, found in source.lists
        if len(found & set(names)) >= several
    ]


def test_a_second_list_would_be_found():
    """The check can fail."""
    for code in (
        "if kind in ('openai', 'litellm', 'local'): ...",
        "match kind:\n    case 'openai' | 'litellm': ...\n    case 'local': ...",
        "NEW = {'openai': 1, 'litellm': 2, 'local': 3}",
        "Kind = Literal['openai', 'litellm', 'local']",
    ):
        found = Source(ast.parse(code)).lists
        assert any(len(names & PROVIDERS.keys()) == 3 for _, names in found)


# Providers


# Extras are called like their providers: two lists are about packages. The third is compared below.
OTHERS = {"cli/doctor.py", "adapters/__init__.py", "runtime/forks.py"}


def test_providers_are_listed_once():
    found = copies(PROVIDERS, "cli/models.py", 2)

    assert [each for each in found if each.partition(":")[0] not in OTHERS] == []
    assert set(MODEL_FILES) == {kind for kind, each in PROVIDERS.items() if each.find is not None}


@pytest.mark.parametrize("kind", PROVIDERS)
def test_a_provider_opens_its_adapter(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From its entry alone: nothing else decides by the name."""
    opened: list[models.Provider] = []
    adapter = ScriptedAdapter([])

    def opener(asked: object) -> Adapter:
        opened.append(PROVIDERS[kind])
        return adapter

    monkeypatch.setitem(PROVIDERS, kind, replace(PROVIDERS[kind], open=opener))

    with models.open_model(f"{kind}:name") as found:
        assert found is adapter
    assert opened


# Engines


def test_engines_are_listed_once():
    assert copies(get_args(EngineName), "contrib/tools/sandbox/settings.py", 2) == []


def test_every_engine_has_a_class_and_every_choice_an_engine():
    classes = [*ENGINES, Unconfined]

    assert [each.name for each in classes] == list(get_args(EngineName))
    assert set(get_args(SandboxChoice)) == {"auto", *get_args(EngineName)}
    assert all(each.told for each in classes)


def test_help_names_every_engine():
    (option,) = (each for each in options.Sandbox.__metadata__ if getattr(each, "help", None))

    assert all(re.search(rf"\b{name}\b", option.help) for name in get_args(SandboxChoice))


# Refusals

WORDS = (
    "not approved by",
    "' was not approved",
    "is not allowed here",
    "Denied by policy",
    "could not decide and denies",
    "other arguments than were approved",
)


def test_the_words_of_a_refusal_are_in_one_file():
    found = {
        file
        for file, source in sources().items()
        if any(words in text for text in source.strings for words in WORDS)
    }

    assert found == {"prompt/refusals.py"}


def test_a_refusal_says_who_refused_and_why():
    assert refusals.by_person("pay", "eve", "too much") == (
        "Call to 'pay' was not approved by eve: too much"
    )
    assert refusals.by_person("pay") == "Call to 'pay' was not approved"


def test_policies_are_asked_in_one_place():
    """Admission asks; the sandboxed Python asks its own policy about a path before it opens it."""
    asking = {
        file
        for file, source in sources().items()
        for call in source.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "check"
        and any(keyword.arg == "context" for keyword in call.keywords)
    }

    assert asking == {"runtime/admission.py", "contrib/tools/asteval.py"}


# The model's name


def test_the_model_of_an_adapter_is_an_attribute_of_its_type():
    guessed = [
        file
        for file, source in sources().items()
        for call in source.calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "getattr"
        and isinstance(call.args[1], ast.Constant)
        and call.args[1].value == "model"
    ]

    assert guessed == []
    assert ScriptedAdapter([]).model == ""


# Records


def test_the_record_of_a_call_is_read_in_one_place():
    """``Call.details`` reads what a record says of how a call went, older records included."""
    for file in ("cli/history.py", "debugger/query.py"):
        read = sources()[file].keys
        assert not read & {"metadata", "undone", "not_undone"}, file
