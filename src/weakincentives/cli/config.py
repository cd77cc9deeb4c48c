"""What a command is set to: flags, then the environment, then ``wink.toml``, then the defaults."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from weakincentives.cli.misuse import Misuse

__all__ = [
    "FILE_NAME",
    "KEYS",
    "SUITES",
    "PolicySettings",
    "Settings",
    "existing_directory",
    "load_settings",
]

FILE_NAME = "wink.toml"
SUITES = ("files", "shell", "planning", "digest", "python")
SANDBOXES = ("auto", "podman", "bubblewrap", "namespaces", "none")

_PREFIX = "WINK_"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Which calls are refused."""

    read_before_write: bool = True
    protect: tuple[str, ...] = ()
    """Globs of paths that must stay as they are."""
    deny: tuple[str, ...] = ()
    """Tools that must not be called, by name or pattern: ``delete_*``."""
    quota: Mapping[str, int] = field(default_factory=dict[str, int])
    """How often a tool may be called in a run; ``*`` counts the calls of all tools together."""
    rate: Mapping[str, str] = field(default_factory=dict[str, str])
    """How often a tool may be called within a minute: ``5/minute``."""
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Tools that must have succeeded before another may be called."""
    use: tuple[str, ...] = ()
    """Policies of your own: ``module:object`` or ``file.py:object``."""
    unprotect: tuple[str, ...] = ()
    """Globs of paths that may be changed although their names protect them: ``.git/config``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a command needs to know to give an agent a workspace."""

    workspace: Path
    """Resolved; a directory that exists."""
    model: str | None = None
    suites: tuple[str, ...] = ("files", "shell", "planning", "digest")
    sandbox: str = "auto"
    ask: tuple[str, ...] = ()
    """Tools, or reaches, that need approval."""
    policy: PolicySettings = field(default_factory=PolicySettings)
    max_turns: int = 100
    max_tokens: int | None = None
    time_limit: float | None = None
    """Seconds."""
    sections: tuple[str, ...] = ()
    """More to offer: ``module:object`` or ``file.py:object``."""
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
    given = {spec for key in _CODE for spec in variables.get(key, ())}
    for name, value in flags.items():
        if value is None:
            continue
        if name == "policy":
            for spec in cast("Sequence[str]", value):
                found, before = _with_policy(found, spec), found
                if spec not in stored:
                    given |= {*found.get("policy.use", ())} - {*before.get("policy.use", ())}
        elif name == "ask":
            found[name] = (*found.get(name, ()), *_checked("", name, value))
        else:
            found[name] = _checked("", name, value)
            if name in _CODE:
                given |= {*found[name]}
    rules = [
        Path(each) for each in cast("Sequence[str]", flags.get("policy") or ()) if _is_file(each)
    ]
    specs_of_file = tuple(spec for key in _CODE for spec in file.get(key, ()))
    loaded = {spec for key in _CODE for spec in found.get(key, ())} - given
    chosen = "sandbox" in variables or flags.get("sandbox") is not None
    lifts = (file.get("sandbox") == "none" and not chosen) or bool(file.get("policy.unprotect"))
    policy = PolicySettings(
        **{key.removeprefix("policy."): found.pop(key) for key in list(found) if "." in key}
    )
    return Settings(
        workspace=workspace,
        policy=policy,
        given=frozenset(given),
        specs_of_file=specs_of_file,
        needs_file=lifts or bool(loaded & {*specs_of_file}),
        files=tuple(path.expanduser().resolve() for path in rules),
        **found,
    )


def _is_file(spec: str) -> bool:
    return "=" not in spec and spec.endswith(".toml")


def existing_directory(path: Path) -> Path:
    """Return a directory, resolved; one that cannot be looked into raises Misuse."""
    try:
        resolved = path.expanduser().resolve(strict=True)
        if not resolved.is_dir():
            raise Misuse(f"{path} is a file; --workspace takes the directory to work on")
        os.listdir(resolved)
    except FileNotFoundError:
        raise Misuse(f"there is no directory {path}; make it, or name another one") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise Misuse(f"the directory {path} cannot be opened: {_reason(error)}") from error
    return resolved


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# Where values come from


def _from_file(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    found: dict[str, Any] = {}
    for key, value in _read(path).items():
        if key == "policy":
            found |= _table(path.name, value)
        else:
            _known(path.name, key, [each for each in KEYS if "." not in each] + ["policy"])
            found[key] = _checked(path.name, key, value)
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
        raise Misuse(f"{path} cannot be read: {_reason(error)}") from error


def _table(where: str, table: object) -> dict[str, Any]:
    """Return the checked values of a table of policies."""
    if not isinstance(table, dict):
        raise Misuse(f"{where}: policy is a table, such as [policy]; got {_shown(table)}")
    found: dict[str, Any] = {}
    for name, value in cast("dict[str, object]", table).items():
        _known(where, f"policy.{name}", KEYS)
        found[f"policy.{name}"] = _checked(where, f"policy.{name}", value)
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    variables = {variable(key): key for key in KEYS}
    for name, text in environment.items():
        if not name.startswith(_PREFIX) or not text:
            continue
        if name in variables:
            found[variables[name]] = _parsed(name, variables[name], text)
        elif near := get_close_matches(name, variables, n=1, cutoff=0.85):
            # Others may have variables of this kind, too; one that is nearly ours is a slip.
            raise Misuse(f"there is no variable {name}; did you mean {near[0]}?")
    return found


def variable(key: str) -> str:
    """Return the environment variable that stands for a key."""
    return _PREFIX + key.replace(".", "_").upper()


def _with_policy(found: dict[str, Any], spec: str) -> dict[str, Any]:
    """Return the values with one more rule: ``name=value``, a TOML file, or ``module:object``."""
    name, equals, text = spec.partition("=")
    if equals:
        key = f"policy.{name.strip()}"
        _known("--policy", key, KEYS)
        more = {key: _parsed("--policy", key, text)}
    elif _is_file(spec):
        path = Path(spec).expanduser()
        if not os.path.lexists(path):
            raise Misuse(f"--policy: there is no file {spec}")
        table = _read(path)
        more = _table(path.name, table["policy"] if list(table) == ["policy"] else table)
    elif ":" in spec:
        more = {"policy.use": _checked("--policy", "policy.use", [spec])}
    else:
        raise Misuse(
            f"--policy: {_shown(spec)} is none of NAME=VALUE (such as protect=GLOB, deny=TOOL or "
            "quota=TOOL:N), a .toml file, and module:object"
        )
    added: dict[str, Any] = {key: _added(found.get(key), value) for key, value in more.items()}
    return {**found, **added}


def _added(before: object, more: object) -> object:
    if isinstance(more, tuple):
        return (*cast("tuple[object, ...]", before or ()), *cast("tuple[object, ...]", more))
    if isinstance(more, dict):
        return cast("dict[str, object]", before or {}) | cast("dict[str, object]", more)
    return more


def _known(where: str, key: str, keys: Iterable[str]) -> None:
    keys = list(keys)
    if key in keys:
        return
    near = get_close_matches(key, keys, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(keys))}"
    raise Misuse(f"{where}: there is no key {_shown(key)[1:-1]}; {hint}")


def _parsed(where: str, key: str, text: str) -> Any:
    try:
        value = KEYS[key].from_text(text)
    except ValueError as error:
        raise Misuse(f"{where}: {key}: expected {error}, got {_shown(text)}") from error
    if value in ([], {}):  # a variable of the shell's that is not set, and so a rule about nothing
        raise Misuse(f"{where}: {key}: expected {KEYS[key].expected}, got {_shown(text)}")
    return _checked(where, key, value)


def _checked(where: str, key: str, value: object) -> Any:
    """Return a value as it is kept; ``where`` is empty for a flag, which is called as its key."""
    kind = KEYS[key]
    try:
        return kind.check(value)
    except ValueError as error:
        place = f"{where}: {key}" if where else f"--{key.replace('_', '-')}"
        expected = str(error) or kind.expected
        raise Misuse(f"{place}: expected {expected}, got {_shown(value)}") from error


def _shown(value: object) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


# What values look like


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: in words, how it is checked, and how it is written in a variable or flag."""

    expected: str
    check: Callable[[object], Any]
    """Returns the value as it is kept; raises ValueError, maybe with what was expected instead."""
    from_text: Callable[[str], object]
    """Returns what a text stands for, still to be checked."""
    example: str
    """How it is written in a file."""


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _one_of(*choices: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            near = get_close_matches(str(value), choices, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"one of {', '.join(choices)}{hint}")
        return value

    return check


def _list_of(check: Callable[[object], str]) -> Callable[[object], tuple[str, ...]]:
    def check_all(value: object) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError
        return tuple(check(each) for each in cast("Sequence[object]", value))

    return check_all


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError
    return value


def _limit(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ValueError
    return float(value)


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _rate(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\d{1,9}/minute", value):
        raise ValueError
    return value


def _by_tool(check: Callable[[object], Any]) -> Callable[[object], dict[str, Any]]:
    def check_all(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError
        table = cast("dict[str, object]", value)
        return {_text(name): check(each) for name, each in table.items()}

    return check_all


def _as_it_is(text: str) -> object:
    return text


def _number(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _word(text: str) -> object:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(
        text.strip().lower(), text
    )


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pairs(from_text: Callable[[str], object]) -> Callable[[str], object]:
    def pairs(text: str) -> object:
        table: dict[str, object] = {}
        for part in _parts(text):
            name, colon, value = part.partition(":")
            if not colon or not value.strip():
                raise ValueError("TOOL:VALUE, or several with commas between")
            table[name.strip()] = from_text(value.strip())
        return table

    return pairs


def _plus(text: str) -> object:
    return [part.strip() for part in text.split("+") if part.strip()]


_NAMES = Kind("a list of names", _list_of(_text), _parts, '["shell_execute"]')
_SPECS = Kind("a list of module:object", _list_of(_text), _parts, '["tools.py:section"]')

KEYS: Mapping[str, Kind] = {
    "model": Kind("the name of a model", _text, _as_it_is, '"openai:gpt-5-mini"'),
    "suites": Kind(
        f"a list of {', '.join(SUITES)}", _list_of(_one_of(*SUITES)), _parts, '["files", "shell"]'
    ),
    "sandbox": Kind(f"one of {', '.join(SANDBOXES)}", _one_of(*SANDBOXES), _as_it_is, '"auto"'),
    "ask": _NAMES,
    "max_turns": Kind("a whole number of at least 1", _count, _number, "100"),
    "max_tokens": Kind("a whole number of at least 1", _count, _number, "200_000"),
    "time_limit": Kind("a positive number of seconds", _seconds, _number, "600"),
    "sections": _SPECS,
    "policy.read_before_write": Kind("true or false", _yes_or_no, _word, "true"),
    "policy.protect": Kind("a list of globs", _list_of(_text), _parts, '[".git/**", "*.lock"]'),
    "policy.deny": _NAMES,
    "policy.quota": Kind(
        "a whole number for each tool", _by_tool(_limit), _pairs(_number), "{ shell_execute = 20 }"
    ),
    "policy.rate": Kind(
        "a text such as '5/minute' for each tool",
        _by_tool(_rate),
        _pairs(_as_it_is),
        '{ shell_execute = "5/minute" }',
    ),
    "policy.after": Kind(
        "a list of tools for each tool",
        _by_tool(_list_of(_text)),
        _pairs(_plus),
        '{ deploy = ["run_tests"] }',
    ),
    "policy.use": _SPECS,
    "policy.unprotect": Kind("a list of globs", _list_of(_text), _parts, '[".git/config"]'),
}
"""Every key that can be set, in the order of the documentation."""
