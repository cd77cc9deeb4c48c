"""What a command is set to: flags, then the environment, then ``wink.toml``, then the defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

from pydantic import AfterValidator, Field, StrictBool, StringConstraints, TypeAdapter
from pydantic import ValidationError as Invalid

from weakincentives.cli.common import FILE_NAME, Misuse, existing_directory, hint

SUITES = ("files", "shell", "planning", "digest", "python")
SANDBOXES = ("auto", "podman", "bubblewrap", "namespaces", "none")

_PREFIX = "WINK_"


def _one_of(*choices: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in choices:
            near = hint(value, choices)
            raise ValueError(f"one of {', '.join(choices)}{near and f' ({near})'}")
        return value

    return AfterValidator(check)


def _is(expected: str) -> Any:
    """Return the field of a key: what is expected of its value, in words."""
    return Field(description=expected)


Text = Annotated[str, StringConstraints(pattern=r"\S")]
Count = Annotated[int, Field(strict=True, ge=1)]
Texts = tuple[Text, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Which calls are refused."""

    read_before_write: Annotated[StrictBool, _is("true or false")] = True
    protect: Annotated[Texts, _is("a list of globs")] = ()
    """Globs of paths that must stay as they are."""
    deny: Annotated[Texts, _is("a list of names")] = ()
    """Tools that must not be called, by name or pattern: ``delete_*``."""
    quota: Annotated[
        Mapping[Text, Annotated[int, Field(strict=True, ge=0)]], _is("a whole number for each tool")
    ] = field(default_factory=dict[str, int])
    """How often a tool may be called in a run; ``*`` counts the calls of all tools together."""
    rate: Annotated[
        Mapping[Text, Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}/minute$")]],
        _is("a text such as '5/minute' for each tool"),
    ] = field(default_factory=dict[str, str])
    """How often a tool may be called within a minute: ``5/minute``."""
    after: Annotated[Mapping[Text, Texts], _is("a list of tools for each tool")] = field(
        default_factory=dict[str, tuple[str, ...]]
    )
    """Tools that must have succeeded before another may be called."""
    use: Annotated[Texts, _is("a list of module:object")] = ()
    """Policies of your own: ``module:object`` or ``file.py:object``."""
    unprotect: Annotated[Texts, _is("a list of globs")] = ()
    """Globs of paths that may be changed although their names protect them: ``.git/config``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a command needs to know to give an agent a workspace."""

    workspace: Path
    """Resolved; a directory that exists."""
    model: Annotated[Text | None, _is("the name of a model")] = None
    suites: Annotated[
        tuple[Annotated[str, _one_of(*SUITES)], ...], _is(f"a list of {', '.join(SUITES)}")
    ] = ("files", "shell", "planning", "digest")
    sandbox: Annotated[str, _one_of(*SANDBOXES), _is(f"one of {', '.join(SANDBOXES)}")] = "auto"
    ask: Annotated[Texts, _is("a list of names")] = ()
    """Tools, or reaches, that need approval."""
    max_turns: Annotated[Count, _is("a whole number of at least 1")] = 100
    max_tokens: Annotated[Count | None, _is("a whole number of at least 1")] = None
    time_limit: Annotated[
        Annotated[float, Field(strict=True, gt=0, lt=1e9)] | None,
        _is("a positive number of seconds"),
    ] = None
    sections: Annotated[Texts, _is("a list of module:object")] = ()
    """More to offer: ``module:object`` or ``file.py:object``."""
    policy: PolicySettings = field(default_factory=PolicySettings)
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The code that the user has named just now, in flags or variables."""
    specs_of_file: tuple[str, ...] = field(default=(), compare=False)
    """The code that the file names."""
    needs_file: bool = field(default=False, compare=False)
    """The file names code that is loaded, or lifts a protection: it is to be approved."""
    files: tuple[Path, ...] = field(default=(), compare=False)
    """Files of rules that flags name."""

    @property
    def specs(self) -> tuple[str, ...]:
        """All code that is named."""
        return (*self.sections, *self.policy.use)


_TOP = ("model", "suites", "sandbox", "ask", "max_turns", "max_tokens", "time_limit", "sections")
KEYS = (*_TOP, *(f"policy.{each.name}" for each in fields(PolicySettings)))
"""Every key that can be set, in the order of the documentation."""
_CODE = ("sections", "policy.use")


def load_settings(workspace: Path, *, stored: Sequence[str] = (), **flags: object) -> Settings:
    """Return what holds for a workspace; what is wrong in it raises Misuse.

    Flags are called as the keys are; one that is None was not given. ``policy`` takes texts, such
    as ``protect=GLOB``; they and ``ask`` add to what else is set, so that no rule is dropped by
    naming another. ``stored`` are those of them that come from a run that is resumed: nobody has
    just named them.
    """
    workspace = existing_directory(workspace)
    file = _from_file(workspace / FILE_NAME)
    variables = _from_environment(os.environ)
    found = file | variables
    given = _code_in(variables)
    rules = cast("Sequence[str]", flags.pop("policy", None) or ())
    for name, value in flags.items():
        if value is not None:
            checked = _checked("", name, value)
            found[name] = (*found.get(name, ()), *checked) if name == "ask" else checked
            given |= _code_in({name: checked})
    for rule in rules:
        more = _from_rule(rule)
        if rule not in stored:
            given |= _code_in(more) - _code_in(found)
        found |= {key: _added(found.get(key), value) for key, value in more.items()}
    chosen = "sandbox" in variables or flags.get("sandbox") is not None
    lifts = (file.get("sandbox") == "none" and not chosen) or bool(file.get("policy.unprotect"))
    policy = {key.removeprefix("policy."): found.pop(key) for key in list(found) if "." in key}
    settings = Settings(workspace=workspace, policy=PolicySettings(**policy), **found)
    loaded = {*settings.specs} - given
    return replace(
        settings,
        given=frozenset(given),
        specs_of_file=tuple(spec for key in _CODE for spec in file.get(key, ())),
        needs_file=lifts or bool(loaded & _code_in(file)),
        files=tuple(Path(rule).expanduser().resolve() for rule in rules if _is_file(rule)),
    )


def _code_in(values: Mapping[str, Any]) -> set[str]:
    return {spec for key in _CODE for spec in values.get(key, ())}


# Where values come from


def _from_file(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    found: dict[str, Any] = {}
    for key, value in _read(path).items():
        if key == "policy":
            found |= _from_table(path.name, value)
        else:
            _known(path.name, key, [*_TOP, "policy"])
            found[key] = _checked(path.name, key, value)
    return found


def _from_table(where: str, table: object) -> dict[str, Any]:
    """Return the checked values of a table of policies."""
    if not isinstance(table, dict):
        raise Misuse(f"{where}: policy is a table, such as [policy]; got {_shown(table)}")
    found: dict[str, Any] = {}
    for name, value in cast("dict[str, object]", table).items():
        _known(where, f"policy.{name}", KEYS)
        found[f"policy.{name}"] = _checked(where, f"policy.{name}", value)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise Misuse(f"{path} is not a file")
        # With an end of its last line, or the place of an error there is "end of document".
        return tomllib.loads(path.read_text("utf-8") + "\n")
    except tomllib.TOMLDecodeError as error:
        raise Misuse(f"{path.name} is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise Misuse(f"{path.name} is not UTF-8 text: byte {error.start} is wrong") from error
    except OSError as error:
        raise Misuse(f"{path} cannot be read: {error.strerror or error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    variables = {_PREFIX + key.replace(".", "_").upper(): key for key in KEYS}
    for name, text in environment.items():
        if not name.startswith(_PREFIX) or not text:
            continue
        if name in variables:
            found[variables[name]] = _from_text(name, variables[name], text)
        elif near := hint(name, variables, cutoff=0.85):
            # Others may have variables of this kind, too; one that is nearly ours is a slip.
            raise Misuse(f"there is no variable {name}; {near}")
    return found


def _from_rule(spec: str) -> dict[str, Any]:
    """Return the values of one more rule: ``name=value``, a TOML file, or ``module:object``."""
    name, equals, text = spec.partition("=")
    if equals:
        key = f"policy.{name.strip()}"
        _known("--policy", key, KEYS)
        return {key: _from_text("--policy", key, text)}
    if _is_file(spec):
        path = Path(spec).expanduser()
        if not os.path.lexists(path):
            raise Misuse(f"--policy: there is no file {spec}")
        table = _read(path)
        return _from_table(path.name, table["policy"] if list(table) == ["policy"] else table)
    if ":" in spec:
        return {"policy.use": _checked("--policy", "policy.use", [spec])}
    raise Misuse(
        f"--policy: {_shown(spec)} is none of NAME=VALUE (such as protect=GLOB, deny=TOOL or "
        "quota=TOOL:N), a .toml file, and module:object"
    )


def _is_file(spec: str) -> bool:
    return "=" not in spec and spec.endswith(".toml")


def _added(before: Any, more: Any) -> Any:
    """Return a value with another one: lists and tables add up."""
    if before is None or isinstance(more, bool):
        return more
    return before | more if hasattr(more, "keys") else before + more


# What values look like


@cache
def _kind(key: str) -> tuple[TypeAdapter[Any], str]:
    """Return what checks the values of a key, and what is expected of them, in words."""
    name = key.removeprefix("policy.")
    hints = get_type_hints(PolicySettings if name != key else Settings, include_extras=True)
    return TypeAdapter(hints[name]), hints[name].__metadata__[-1].description


def _checked(where: str, key: str, value: object) -> Any:
    """Return a value as it is kept; ``where`` is empty for a flag, which is called as its key."""
    adapter, expected = _kind(key)
    try:
        return adapter.validate_python(value)
    except Invalid as error:
        own = error.errors()[0].get("ctx", {}).get("error")  # says more than what is expected
        place = f"{where}: {key}" if where else f"--{key.replace('_', '-')}"
        raise Misuse(f"{place}: expected {own or expected}, got {_shown(value)}") from error


def _from_text(where: str, key: str, text: str) -> Any:
    """Return the value that a variable or a flag writes as a text."""
    read = _READ.get(key, _parts)
    try:
        value = read(text)
    except ValueError as error:
        raise Misuse(f"{where}: {key}: expected {error}, got {_shown(text)}") from error
    if value in ([], {}):  # a variable of the shell's that is not set, and so a rule about nothing
        raise Misuse(f"{where}: {key}: expected {_kind(key)[1]}, got {_shown(text)}")
    return _checked(where, key, value)


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _word(text: str) -> object:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(
        text.strip().lower(), text
    )


def _parts(text: str, between: str = ",") -> list[str]:
    return [part.strip() for part in text.split(between) if part.strip()]


def _pairs(read: Callable[[str], object]) -> Callable[[str], object]:
    def pairs(text: str) -> object:
        table: dict[str, object] = {}
        for part in _parts(text):
            name, colon, value = part.partition(":")
            if not colon or not value.strip():
                raise ValueError("TOOL:VALUE, or several with commas between")
            table[name.strip()] = read(value.strip())
        return table

    return pairs


_READ: Mapping[str, Callable[[str], object]] = {
    "model": str,
    "sandbox": str,
    "max_turns": _number,
    "max_tokens": _number,
    "time_limit": _number,
    "policy.read_before_write": _word,
    "policy.quota": _pairs(_number),
    "policy.rate": _pairs(str),
    "policy.after": _pairs(lambda text: _parts(text, "+")),
}
"""How a text is read; all other keys are lists, with commas between."""


# What is said about them


def _known(where: str, key: str, keys: Iterable[str]) -> None:
    keys = list(keys)
    if key in keys:
        return
    known = hint(key, keys, f"there are {', '.join(sorted(keys))}", cutoff=0.5)
    raise Misuse(f"{where}: there is no key {_shown(key)[1:-1]}; {known}")


def _shown(value: object) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"
