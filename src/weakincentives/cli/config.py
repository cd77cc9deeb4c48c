"""Settings: flags, then environment variables, then ``wink.toml``, then the defaults."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from weakincentives.cli.common import FILE_NAME, Misuse, existing_directory, hint
from weakincentives.cli.trust import Found, trust_of
from weakincentives.contrib.tools import SandboxLimits, SandboxSettings

if TYPE_CHECKING:
    from weakincentives.prompt.approval import ApprovalRule

Suite = Literal["files", "shell", "planning", "digest", "python"]
SUITES: tuple[str, ...] = get_args(Suite)
Text = Annotated[str, StringConstraints(pattern=r"\S")]
Texts = tuple[Text, ...]
Count = Annotated[int, Field(ge=1)]
_PRICE = r"^[0-9]{1,9}(\.[0-9]{1,9})?/[0-9]{1,9}(\.[0-9]{1,9})?$"


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


class RuleSettings(BaseModel):
    """Calls that are approved without asking."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool: Text
    path: str = ""
    """A glob of paths."""
    command: Texts = ()
    """The first words of a command."""


class Values(BaseModel):
    """Everything that can be set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Text | None = None
    suites: tuple[Suite, ...] = ("files", "shell", "planning", "digest")
    sandbox: SandboxSettings = SandboxSettings()
    ask: Texts = ()
    """Tools, or reaches, that need approval."""
    approve: tuple[RuleSettings, ...] = ()
    """Calls among them that do not."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """How varied the model's answers are; the model's own default if it is not set."""
    max_turns: Count = 100
    max_tokens: Count | None = None
    max_cost: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    """US dollars."""
    price: Annotated[str, StringConstraints(pattern=_PRICE)] | None = None
    """Dollars per million input and output tokens, for a model whose price is not known."""
    context_window: Count | None = None
    """The tokens that the model takes, if its provider does not tell."""
    time_limit: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    branches: bool = True
    """Whether a run works on a branch while others have the directory open."""
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


_TABLES = ("sandbox", "policy")
KEYS = (
    *(name for name in Values.model_fields if name not in (*_TABLES, "approve")),
    *(f"sandbox.{each.name}" for each in fields(SandboxSettings)),
    *(f"policy.{name}" for name in PolicySettings.model_fields),
)
"""Every key that a flag or variable can have, too, in the order of the documentation."""
_CODE = ("sections", "policy.use")
_LISTS = (
    "sandbox.network",
    *(key for key in KEYS if isinstance(attrgetter(key)(Values()), tuple)),
)
_PAIRS = ("policy.quota", "policy.rate", "policy.after", "sandbox.limits")
_LARGEST = 1 << 20
_WIDER = tuple(f"sandbox.{name}" for name in ("read", "write", "env", "network", "limits", "image"))
"""What lets commands see, change or use more: in a file, it needs approval."""


def load_settings(
    workspace: Path,
    *,
    stored: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **flags: object,
) -> Settings:
    """Return the settings for a workspace; raise Misuse if they are wrong.

    Flags have the names of the keys; None means not given. ``policy`` takes rules as text, such as
    ``protect=GLOB``, and ``sandbox`` an engine or settings, such as ``read=DIR``. Rules, lists of
    the sandbox and ``ask`` add to the other settings. ``stored`` are the rules among them that come
    from a resumed run: the user has not just chosen those.
    """
    workspace = existing_directory(workspace)
    path = workspace / FILE_NAME
    file = _validated(FILE_NAME, _read(path), is_text=False) if os.path.lexists(path) else {}
    variables = _from_environment(os.environ if environment is None else environment)
    found = file | variables
    given = _code_in(variables)
    rules = cast("Sequence[str]", flags.pop("policy", None) or ())
    boxes = cast("str | Sequence[str]", flags.pop("sandbox", None) or ())
    boxes = [_from_box(each) for each in ([boxes] if isinstance(boxes, str) else boxes)]
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
    for more in boxes:
        found |= {key: _added(found.get(key), value) for key, value in more.items()}
    chosen = "sandbox.engine" in variables or any("sandbox.engine" in each for each in boxes)
    lifts = (file.get("sandbox.engine") == "none" and not chosen) or any(
        file.get(key, "off") != "off" and key not in variables for key in _WIDER
    )
    lifts = lifts or any(file.get(key) for key in ("policy.unprotect", "approve"))
    loaded = _code_in(found) - given
    return Settings(
        workspace=workspace,
        policy=PolicySettings(**_table(found, "policy")),
        sandbox=_sandbox(_table(found, "sandbox")),
        given=frozenset(given),
        specs_of_file=tuple(spec for key in _CODE for spec in file.get(key, ())),
        needs_file=lifts or bool(loaded & _code_in(file)),
        files=tuple(Path(rule).expanduser().resolve() for rule in rules if _is_file(rule)),
        **{key: value for key, value in found.items() if "." not in key},
    )


def save_rule(workspace: Path, rule: ApprovalRule) -> None:
    """Add a rule to the end of ``wink.toml``, as approved; the rest of the file stays as it is."""
    path, trust = workspace / FILE_NAME, trust_of(workspace)
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise Misuse(f"{path} is not a regular file")
    before = path.read_bytes() if path.exists() else b""
    # What the file itself says. After it was read: what is approved below must be what was checked.
    settings = load_settings(workspace, environment={})
    digest = hashlib.sha256(before).hexdigest()
    if settings.needs_file and trust.approved().get(FILE_NAME) != digest:
        raise Misuse(f"{FILE_NAME} was changed; review it, then run: wink policy trust")
    fields = {"tool": rule.tool, "path": rule.path, "command": list(rule.command)}
    lines = ["[[approve]]"]
    # JSON is TOML, for strings and lists of strings without rare control characters.
    lines += [
        f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items() if value
    ]
    head = b"" if not before else b"\n" if before.endswith(b"\n") else b"\n\n"
    by_hand = f"add it to {path} yourself: {', '.join(lines[1:])}"
    try:
        after = before + head + "\n".join((*lines, "")).encode()
        added = tomllib.loads(after.decode())["approve"][len(settings.approve) :]
        if [RuleSettings(**each) for each in added] != [RuleSettings(**cast("Any", fields))]:
            raise Misuse(by_hand)
    except (ValueError, TypeError) as error:
        raise Misuse(f"{by_hand} ({error})") from error
    _replace(path, before, after)
    trust.approve([Found(FILE_NAME, hashlib.sha256(after).hexdigest(), "changed")])


def _replace(path: Path, before: bytes, after: bytes) -> None:
    """Replace a file's content as a whole, unless it is no longer what it was."""
    descriptor, staged = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(after)
            file.flush()
            os.fsync(descriptor)
        exists = path.exists()
        os.chmod(staged, path.stat().st_mode & 0o7777 if exists else 0o644)
        if (path.read_bytes() if exists else b"") != before:
            raise Misuse(f"{path.name} is being changed by somebody else; try again")
        os.replace(staged, path)
    except BaseException:
        os.unlink(staged)
        raise


def _table(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    keys = [key for key in found if key.startswith(f"{name}.")]
    return {key.removeprefix(f"{name}."): found[key] for key in keys}


def _sandbox(table: dict[str, Any]) -> SandboxSettings:
    """Return settings of several sources, which may contradict each other."""
    try:
        limits = SandboxLimits(**table.pop("limits", {}))
        return SandboxSettings(limits=limits, **table)
    except ValueError as error:
        raise Misuse(f"sandbox: {error}") from error


def _code_in(values: Mapping[str, Any]) -> set[str]:
    return {spec for key in _CODE for spec in values.get(key, ())}


def _validated(where: str, data: Mapping[str, Any], *, is_text: bool) -> dict[str, Any]:
    """Return the values of one source, by key; ``where`` is empty for flags."""
    table = data.get("sandbox", {})
    if isinstance(table, str):
        data, table = {**data, "sandbox": {"engine": table}}, {"engine": table}
    try:
        if is_text:
            values = Values.model_validate(data)
        else:  # as JSON: strict about numbers, but an array may become a tuple
            values = Values.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        # Without the alternatives of a type, such as literal['off'].
        key = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        key = "sandbox" if key == "sandbox.engine" else key
        place = f"{where}: {key}" if where else f"--{key.replace('_', '-')}"
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = sorted((*KEYS, "approve"))
            near = hint(key, known, f"the keys are {', '.join(known)}", cutoff=0.5)
            raise Misuse(f"{where}: unknown key {ascii(key)[1:-1]}; {near}") from error
        if first["type"] == "value_error":
            raise Misuse(f"{place}: {first['msg'].removeprefix('Value error, ')}") from error
        raise Misuse(f"{place}: {first['msg']}, got {_shown(first['input'])}") from error
    found = {name: getattr(values, name) for name in values.model_fields_set - set(_TABLES)}
    policy, sandbox = values.policy, values.sandbox
    found |= {f"sandbox.{name}": getattr(sandbox, name) for name in table}
    if "limits" in table:
        found["sandbox.limits"] = {name: getattr(sandbox.limits, name) for name in table["limits"]}
    return found | {f"policy.{name}": getattr(policy, name) for name in policy.model_fields_set}


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


# The sources


def _read(path: Path) -> dict[str, Any]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
            raise Misuse(f"{path} is not a file")
        if status.st_size > _LARGEST:
            raise Misuse(f"{path} is too large: settings have at most {_LARGEST >> 20} MiB")
        if not status.st_size:  # empty, or the kernel's: reading some of its files never ends
            path.open("rb").close()
            return {}
        # With a final newline, an error there has a line and column.
        return tomllib.loads(path.read_text("utf-8") + "\n")
    except ValueError as error:
        raise Misuse(f"{path.name} is not TOML: {error}") from error
    except OSError as error:
        raise Misuse(f"cannot read {path}: {error.strerror or error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    variables = {f"WINK_{key.replace('.', '_').upper()}": key for key in KEYS}
    variables["WINK_SANDBOX"] = "sandbox.engine"
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


def _from_box(spec: str) -> dict[str, Any]:
    """Return the values of ``--sandbox``: an engine, or ``name=value``."""
    name, equals, text = spec.partition("=")
    if not equals:
        return _validated("", {"sandbox": spec}, is_text=True)
    return _from_text("--sandbox", f"sandbox.{name.strip()}", text)


def _is_file(spec: str) -> bool:
    return "=" not in spec and spec.endswith(".toml")


def _added(before: Any, more: Any) -> Any:
    """Return a value with another added to it: lists and tables add up."""
    if isinstance(before, dict) and isinstance(more, dict):
        return cast("dict[str, Any]", before | more)
    if isinstance(before, tuple) and isinstance(more, tuple):
        return cast("Texts", before + more)
    return more


def _from_text(where: str, key: str, text: str) -> dict[str, Any]:
    """Return the value that a variable or rule has as text."""
    value: object = text
    if key in _PAIRS:
        value = dict(_pair(where, key, part) for part in _parts(text))
    elif (where, key) == ("--sandbox", "sandbox.env"):
        value = [text]  # a value may have commas
    elif key in _LISTS and (key, text) != ("sandbox.network", "off"):
        value = _parts(text)
    if not value:  # probably an unset shell variable
        raise Misuse(f"{where}: {key} is empty")
    table, dot, name = key.partition(".")
    return _validated(where, {table: {name: value} if dot else value}, is_text=True)


def _pair(where: str, key: str, part: str) -> tuple[str, object]:
    tool, _, value = (each.strip() for each in part.partition(":"))
    if not value:
        raise Misuse(f"{where}: {key}: expected TOOL:VALUE, or several separated by commas")
    return tool, _parts(value, "+") if key == "policy.after" else value


def _parts(text: str, separator: str = ",") -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]
