"""Settings: flags, then environment variables, then ``wink.toml``, then the defaults."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from weakincentives.cli.common import FILE_NAME, Misuse, existing_directory, hint

Suite = Literal["files", "shell", "planning", "digest", "python"]
SUITES: tuple[str, ...] = get_args(Suite)
Text = Annotated[str, StringConstraints(pattern=r"\S")]
Texts = tuple[Text, ...]
Count = Annotated[int, Field(ge=1)]


class PolicySettings(BaseModel):
    """Which calls are denied."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    read_before_write: bool = True
    protect: Texts = ()
    """Globs of paths that must not change."""
    deny: Texts = ()
    """Tools that must not be called, by name or pattern: ``delete_*``."""
    quota: Mapping[Text, Annotated[int, Field(ge=0)]] = {}
    """How often a tool may be called in a run; ``*`` counts all tools together."""
    rate: Mapping[Text, Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}/minute$")]] = {}
    """How often a tool may be called within a minute: ``5/minute``."""
    after: Mapping[Text, Texts] = {}
    """Tools that must have succeeded before another may be called."""
    use: Texts = ()
    """Policies of your own: ``module:object`` or ``file.py:object``."""
    unprotect: Texts = ()
    """Globs of paths that may change although they are protected by default: ``.git/config``."""


class Values(BaseModel):
    """Everything that can be set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Text | None = None
    suites: tuple[Suite, ...] = ("files", "shell", "planning", "digest")
    sandbox: Literal["auto", "podman", "bubblewrap", "namespaces", "none"] = "auto"
    ask: Texts = ()
    """Tools, or reaches, that need approval."""
    max_turns: Count = 100
    max_tokens: Count | None = None
    time_limit: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    sections: Texts = ()
    """More tools: ``module:object`` or ``file.py:object``."""
    policy: PolicySettings = PolicySettings()


class Settings(Values):
    """The settings for a workspace, and where the code that they name comes from."""

    workspace: Path
    """An existing directory, resolved."""
    given: frozenset[str] = frozenset()
    """Code that flags or variables name: the user has chosen it just now."""
    specs_of_file: tuple[str, ...] = ()
    """Code that the file names."""
    needs_file: bool = False
    """The file names code to load, or lifts a protection: it needs approval."""
    files: tuple[Path, ...] = ()
    """Files of rules that flags name."""

    @property
    def specs(self) -> tuple[str, ...]:
        """All code that is named."""
        return (*self.sections, *self.policy.use)


_TOP = tuple(name for name in Values.model_fields if name != "policy")
KEYS = (*_TOP, *(f"policy.{name}" for name in PolicySettings.model_fields))
"""Every key, in the order of the documentation."""
_CODE = ("sections", "policy.use")
_SCALARS = ("model", "sandbox", "max_turns", "max_tokens", "time_limit", "policy.read_before_write")
_TABLES = ("policy.quota", "policy.rate", "policy.after")


def load_settings(workspace: Path, *, stored: Sequence[str] = (), **flags: object) -> Settings:
    """Return the settings for a workspace; raise Misuse if they are wrong.

    Flags have the names of the keys; None means not given. ``policy`` takes rules as text, such as
    ``protect=GLOB``. Rules and ``ask`` add to the other settings. ``stored`` are the rules among
    them that come from a resumed run: the user has not just chosen those.
    """
    workspace = existing_directory(workspace)
    path = workspace / FILE_NAME
    file = _validated(FILE_NAME, _read(path), is_text=False) if os.path.lexists(path) else {}
    variables = _from_environment(os.environ)
    found = file | variables
    given = _code_in(variables)
    rules = cast("Sequence[str]", flags.pop("policy", None) or ())
    flags = {name: value for name, value in flags.items() if value is not None}
    checked = _validated("", flags, is_text=True)
    given |= _code_in(checked)
    checked["ask"] = (*found.get("ask", ()), *checked.get("ask", ()))
    found |= checked
    for rule in rules:
        more = _from_rule(rule)
        if rule not in stored:
            given |= _code_in(more) - _code_in(found)
        found |= {key: _added(found.get(key), value) for key, value in more.items()}
    chosen = "sandbox" in variables or "sandbox" in flags
    lifts = (file.get("sandbox") == "none" and not chosen) or bool(file.get("policy.unprotect"))
    loaded = _code_in(found) - given
    policy = {key.removeprefix("policy."): found.pop(key) for key in list(found) if "." in key}
    return Settings(
        workspace=workspace,
        policy=PolicySettings(**policy),
        given=frozenset(given),
        specs_of_file=tuple(spec for key in _CODE for spec in file.get(key, ())),
        needs_file=lifts or bool(loaded & _code_in(file)),
        files=tuple(Path(rule).expanduser().resolve() for rule in rules if _is_file(rule)),
        **found,
    )


def _code_in(values: Mapping[str, Any]) -> set[str]:
    return {spec for key in _CODE for spec in values.get(key, ())}


def _validated(where: str, data: Mapping[str, Any], *, is_text: bool) -> dict[str, Any]:
    """Return the values of one source, by key; ``where`` is empty for flags."""
    try:
        if is_text:
            values = Values.model_validate(data)
        else:  # as JSON: strict about numbers, but an array may become a tuple
            values = Values.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        place = f"{where}: {key}" if where else f"--{key.replace('_', '-')}"
        if first["type"] == "extra_forbidden":
            near = hint(key, KEYS, f"the keys are {', '.join(sorted(KEYS))}", cutoff=0.5)
            raise Misuse(f"{where}: unknown key {ascii(key)[1:-1]}; {near}") from error
        raise Misuse(f"{place}: {first['msg']}, got {_shown(first['input'])}") from error
    found = {name: getattr(values, name) for name in values.model_fields_set - {"policy"}}
    policy = values.policy
    return found | {f"policy.{name}": getattr(policy, name) for name in policy.model_fields_set}


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


# The sources


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise Misuse(f"{path} is not a file")
        # With a final newline, an error there has a line and column.
        return tomllib.loads(path.read_text("utf-8") + "\n")
    except ValueError as error:
        raise Misuse(f"{path.name} is not TOML: {error}") from error
    except OSError as error:
        raise Misuse(f"cannot read {path}: {error.strerror or error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    variables = {f"WINK_{key.replace('.', '_').upper()}": key for key in KEYS}
    for name, text in environment.items():
        if not name.startswith("WINK_") or not text:
            continue
        if name in variables:
            found |= _from_text(name, variables[name], text)
        elif near := hint(name, variables, cutoff=0.85):
            raise Misuse(f"unknown variable {name}; {near}")
    return found


def _from_rule(spec: str) -> dict[str, Any]:
    """Return the values of a rule: ``name=value``, a TOML file, or ``module:object``."""
    name, equals, text = spec.partition("=")
    if equals:
        return _from_text("--policy", f"policy.{name.strip()}", text)
    if _is_file(spec):
        path = Path(spec).expanduser()
        table = _read(path)
        whole = table if list(table) == ["policy"] else {"policy": table}
        return _validated(path.name, whole, is_text=False)
    if ":" in spec:
        return _from_text("--policy", "policy.use", spec)
    raise Misuse(
        f"--policy: expected NAME=VALUE (such as protect=GLOB, deny=TOOL or quota=TOOL:N), a .toml "
        f"file or module:object, got {_shown(spec)}"
    )


def _is_file(spec: str) -> bool:
    return "=" not in spec and spec.endswith(".toml")


def _added(before: Any, more: Any) -> Any:
    """Return a value with another added to it: lists and tables add up."""
    if before is None or isinstance(more, bool):
        return more
    return before | more if isinstance(more, Mapping) else before + more


def _from_text(where: str, key: str, text: str) -> dict[str, Any]:
    """Return the value that a variable or rule has as text."""
    value: object = text
    if key in _TABLES:
        value = dict(_pair(where, key, part) for part in _parts(text))
    elif key not in _SCALARS:
        value = _parts(text)
    if not value:  # probably an unset shell variable
        raise Misuse(f"{where}: {key} is empty")
    name = key.removeprefix("policy.")
    return _validated(
        where, {name: value} if name == key else {"policy": {name: value}}, is_text=True
    )


def _pair(where: str, key: str, part: str) -> tuple[str, object]:
    tool, _, value = (each.strip() for each in part.partition(":"))
    if not value:
        raise Misuse(f"{where}: {key}: expected TOOL:VALUE, or several separated by commas")
    return tool, _parts(value, "+") if key == "policy.after" else value


def _parts(text: str, separator: str = ",") -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]
