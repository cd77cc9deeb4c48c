"""Merges our hooks into the settings of coding agents, and takes them out again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from weakincentives import __version__
from weakincentives.cli.common import Misuse
from weakincentives.cli.hooks.adapters import Adapter
from weakincentives.cli.hooks.recording import PATIENCE
from weakincentives.cli.settings_files import Change, read_settings

CLIENT = Path(__file__).with_name("client.py")
PLUGINS = Path(__file__).with_name("plugins")
_OURS = re.compile(r"weakincentives[./]cli[/ ]hooks?[/ ](client\.py|run)")
"""Recognises our commands, of whatever installation of wink."""
_FAILS_CLOSED = " || exit 2"
"""Only exit code 2 denies a tool: without us it must not run unrecorded."""
Json = dict[str, Any]


def changes_to_install(adapter: Adapter) -> list[Change]:
    """Return what installs the hooks of this installation, in place of earlier ones."""
    return _changed(_INSTALLED[adapter.program](adapter))


def changes_to_uninstall(adapter: Adapter) -> list[Change]:
    """Return what takes all our hooks out of the agent's settings."""
    return _changed(_without(each) for each in _INSTALLED[adapter.program](adapter))


def hook_command(adapter: Adapter, *, fails_closed: bool = False) -> str:
    """Return the command that records an event, from any directory and with any PATH."""
    words = [sys.executable, "-I", "-S", str(CLIENT), adapter.program]
    return shlex.join(words) + (_FAILS_CLOSED if fails_closed else "")


def _changed(wanted: Iterator[Change] | Sequence[Change]) -> list[Change]:
    return [each for each in wanted if each.after != each.before]


# Settings in JSON


def _settings(path: Path) -> tuple[str | None, Json]:
    text = read_settings(path)
    try:
        found: object = json.loads(text) if text and text.strip() else {}
    except ValueError as error:
        raise Misuse(
            f"{path} has comments, or is damaged ({error}): add the hooks by hand, as in a "
            "directory without such a file: HOME=$(mktemp -d) wink hook install AGENT --print"
        ) from error
    settings = cast("Json", found) if isinstance(found, dict) else {"hooks": None}
    if not isinstance(settings.get("hooks", {}), dict):
        raise Misuse(f"{path} is not a file of settings: it must be an object, and so its hooks")
    return text, settings


def _merged(path: Path, ours: Mapping[str, Json]) -> Change:
    """Return the settings with our hooks in place of earlier ones of ours."""
    before, settings = _settings(path)
    hooks = _others(settings.get("hooks", {}))
    for event, matcher in ours.items():
        hooks[event] = [*hooks.get(event, []), matcher]
    settings = {**settings, "hooks": hooks}
    return Change(path, before, _dumped(settings, before))


def _others(hooks: Json) -> Json:
    """Return hooks without ours."""
    left: Json = {}
    for event, matchers in hooks.items():
        kept = matchers
        if isinstance(matchers, list):
            kept = [
                matcher for matcher in cast("list[Any]", matchers) if not _OURS.search(str(matcher))
            ]
            if not kept and matchers:
                continue
        left[event] = kept
    return left


def _dumped(settings: Json, before: str | None) -> str | None:
    """Return the text of settings; as it was if they say the same."""
    if before is not None and before.strip() and json.loads(before) == settings:
        return before
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _without(change: Change) -> Change:
    """Return what removes our part from a file."""
    path, before = change.path, change.before
    if before is None:
        return Change(path, None, None)
    if path.suffix == ".toml":
        left = _without_trust(before, path.with_name("hooks.json"))
        return Change(path, before, left if left.strip() else None)
    if change.is_ours:
        return Change(path, before, None, is_ours=True)
    _, settings = _settings(path)
    hooks = _others(settings.get("hooks", {}))
    if hooks == settings.get("hooks", {}):
        return Change(path, before, before)
    settings["hooks"] = hooks
    if not hooks:
        del settings["hooks"]
    return Change(path, before, _dumped(settings, before) if settings else None)


# Each agent


def _home(variable: str, otherwise: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / otherwise)


def matchers_of(adapter: Adapter, patience: int = PATIENCE, **more: object) -> dict[str, Json]:
    """Return our hook for each event, as Claude Code and its likes want them."""
    found: dict[str, Json] = {}
    for event, kind in adapter.kinds.items():
        command = hook_command(adapter, fails_closed=kind == "before")
        hook = {"type": "command", "command": command, "timeout": patience, **more}
        is_for_tools = kind in ("before", "after", "failed")
        found[event] = {**({"matcher": "*"} if is_for_tools else {}), "hooks": [hook]}
    return found


def _claude(adapter: Adapter) -> Iterator[Change]:
    place = _home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json"
    yield _merged(place, matchers_of(adapter))


def _gemini(adapter: Adapter) -> Iterator[Change]:
    place = _home("GEMINI_CLI_HOME", "") / ".gemini" / "settings.json"
    yield _merged(place, matchers_of(adapter, PATIENCE * 1000, name="wink"))


def _qwen(adapter: Adapter) -> Iterator[Change]:
    place = _home("QWEN_HOME", ".qwen") / "settings.json"
    yield _merged(place, matchers_of(adapter))


def _codex(adapter: Adapter) -> Iterator[Change]:
    """Codex runs only hooks that its settings trust, as they are at the moment."""
    home = _home("CODEX_HOME", ".codex")
    if "CODEX_HOME" in os.environ:
        home = Path(os.path.realpath(home))  # as Codex does
    matchers = matchers_of(adapter)
    for event in ("Interrupt", "SessionEnd"):
        matchers[event]["hooks"][0]["timeout"] = 3  # at most
    hooks = _merged(home / "hooks.json", matchers)
    yield hooks
    assert hooks.after is not None
    before = read_settings(home / "config.toml")
    text = _without_trust(before or "", hooks.path)
    added = "".join(
        f'\n[hooks.state.{json.dumps(key)}]\ntrusted_hash = "{digest}"\n'
        for key, digest in _trusted(hooks.path, json.loads(hooks.after)["hooks"])
    )
    after = (text.rstrip("\n") + "\n" + added).lstrip("\n")
    try:
        tomllib.loads(after)
    except ValueError as error:
        raise Misuse(f"{home / 'config.toml'} is not TOML: {error}") from error
    yield Change(home / "config.toml", before, after)


def _trusted(path: Path, hooks: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and digest of each hook of ours, as Codex names and digests them."""
    for event, matchers in hooks.items():
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", event).lower()
        for place, matcher in enumerate(matchers):
            if not _OURS.search(str(matcher)):
                continue
            for number, hook in enumerate(matcher["hooks"]):
                identity = {"event_name": name, "hooks": [{**hook, "async": False}]}
                if "matcher" in matcher and event not in _CODEX_UNMATCHED:
                    identity["matcher"] = matcher["matcher"]
                text = json.dumps(
                    identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False
                )
                digest = hashlib.sha256(text.encode()).hexdigest()
                yield f"{path}:{name}:{place}:{number}", f"sha256:{digest}"


_CODEX_UNMATCHED = frozenset({"UserPromptSubmit", "Stop", "Interrupt"})


def _without_trust(text: str, hooks: Path) -> str:
    """Return Codex's settings without what they say of our hooks."""
    found = read_settings(hooks)
    if found is None:
        return text
    names = [key for key, _ in _trusted(hooks, json.loads(found).get("hooks", {}))]
    for name in names:
        header = re.escape(f"[hooks.state.{json.dumps(name)}]")
        own = rf"(?:(?<=\n)\n)?^{header}\n(?:(?!\[).+\n?)*"
        text = re.sub(own, "", text, flags=re.MULTILINE)
    return text


def _copilot(adapter: Adapter) -> Iterator[Change]:
    place = _home("COPILOT_HOME", ".copilot") / "hooks" / "wink.json"
    yield _own(place, {"version": 1, "hooks": _lists(matchers_of(adapter))})


def _goose(adapter: Adapter) -> Iterator[Change]:
    place = Path.home() / ".agents" / "plugins" / "wink"
    about = "Undo each tool call of goose"
    matchers = matchers_of(adapter, on_failure="block")
    for matcher in matchers.values():
        matcher.pop("matcher", None)  # it is a regular expression there: without one, all tools
    yield _own(
        place / "plugin.json", {"name": "wink", "version": __version__, "description": about}
    )
    yield _own(place / "hooks" / "hooks.json", {"hooks": _lists(matchers)})


def _cline(adapter: Adapter) -> Iterator[Change]:
    """Cline runs one script for each event, and goes on if it fails."""
    place = _home("CLINE_DIR", ".cline") / "hooks"
    for event, kind in adapter.kinds.items():
        path = _script_of(place, event)
        command = hook_command(adapter)
        run = f"said=$({command}) || said={shlex.quote(_CANCELLED)}\nprintf '%s\\n' \"$said\"\n"
        text = f"#!/bin/sh\n{_ABOUT}\n{run if kind == 'before' else f'exec {command}' + chr(10)}"
        yield Change(path, read_settings(path), text, mode=0o755, is_ours=True)


_ABOUT = "# Written by `wink hook install cline`, removed by `wink hook uninstall cline`."
_CANCELLED = json.dumps(
    {
        "cancel": True,
        "errorMessage": "wink cannot record this tool, so it does not run: wink doctor tells more",
    }
)


def _script_of(place: Path, event: str) -> Path:
    """Return the script of ours for an event, or a name that nobody else's has."""
    paths = [place / f"{event}{suffix}" for suffix in ("", ".sh", ".bash", ".zsh")]
    texts = {path: read_settings(path) for path in paths}
    ours = [path for path, text in texts.items() if text is not None and _OURS.search(text)]
    free = [path for path, text in texts.items() if text is None]
    if not ours and not free:
        raise Misuse(f"{place} has a script of every name for {event}: remove one")
    return [*ours, *free][0]


def _own(path: Path, value: object) -> Change:
    """Return a file of settings that is wholly ours."""
    return Change(path, read_settings(path), json.dumps(value, indent=2) + "\n", is_ours=True)


def _lists(matchers: Mapping[str, Json]) -> dict[str, list[Json]]:
    return {event: [matcher] for event, matcher in matchers.items()}


def _opencode(adapter: Adapter) -> Iterator[Change]:
    home = _home("XDG_CONFIG_HOME", ".config") / "opencode"
    yield _plugin(adapter, home / "plugins" / "wink.js", "opencode.js")


def _pi(adapter: Adapter) -> Iterator[Change]:
    home = _home("PI_CODING_AGENT_DIR", ".pi/agent")
    yield _plugin(adapter, home / "extensions" / "wink.ts", "pi.ts")


def _plugin(adapter: Adapter, path: Path, template: str) -> Change:
    """Return a plug-in of ours, with the command in it."""
    words = [sys.executable, "-I", "-S", str(CLIENT), adapter.program]
    text = (PLUGINS / template).read_text().replace('["wink"]', json.dumps(words))
    return Change(path, read_settings(path), text, is_ours=True)


_INSTALLED: Mapping[str, Callable[[Adapter], Iterator[Change]]] = {
    "claude": _claude,
    "cline": _cline,
    "codex": _codex,
    "copilot": _copilot,
    "gemini": _gemini,
    "goose": _goose,
    "opencode": _opencode,
    "pi": _pi,
    "qwen": _qwen,
}
