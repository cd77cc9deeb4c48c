"""A plug-in for Claude Code: our hooks, and `/wink:undo`, `/wink:log` and `/wink:diff`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from weakincentives import __version__
from weakincentives.cli.common import Misuse, echo
from weakincentives.cli.hooks.adapters import ADAPTERS
from weakincentives.cli.hooks.install import COMMANDS, SHOWN, matchers_of, own_program
from weakincentives.core.programs import find_program, missing_program, safe_environment

_NAME = "wink@wink"
"""The plug-in, and its marketplace: a directory of ours."""


def plugin_directory() -> Path:
    """Return where the plug-in is written to, for Claude Code to copy."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "wink" / "claude-plugin"


def plugin_files() -> Mapping[str, str]:
    """Return the files of the plug-in and of its marketplace, by path."""
    about = "Undo each tool call of Claude Code"
    plugin = {"name": "wink", "version": __version__, "description": about}
    entry = {"name": "wink", "source": "./plugin", "description": about}
    market = {"name": "wink", "owner": {"name": "wink"}, "plugins": [entry]}
    hooks = {event: [matcher] for event, matcher in matchers_of(ADAPTERS["claude"]).items()}
    files = {
        ".claude-plugin/marketplace.json": _dumped(market),
        "plugin/.claude-plugin/plugin.json": _dumped(plugin),
        "plugin/hooks/hooks.json": _dumped({"hooks": hooks}),
    }
    for name, (description, arguments) in COMMANDS.items():
        files[f"plugin/commands/{name}.md"] = _command(name, description, arguments)
    return files


def install_plugin() -> None:
    """Write the plug-in, and have Claude Code install it.

    Raises:
        Misuse: Claude Code is missing, or refuses it.
    """
    place = plugin_directory()
    shutil.rmtree(place, ignore_errors=True)
    for name, text in plugin_files().items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    remove_plugin()  # it keeps a copy of an earlier one with the same version
    _claude("marketplace", "add", str(place))
    _claude("install", _NAME)


def remove_plugin() -> None:
    """Have Claude Code forget the plug-in, if it has it."""
    program = find_program("claude")
    if plugin_directory().exists() and program is not None:
        for words in (("uninstall", _NAME), ("marketplace", "remove", "wink")):
            _run(program, *words)


def show_plugin() -> None:
    """Print what would be installed."""
    for name, text in plugin_files().items():
        echo(f"{plugin_directory() / name}:\n{text}")


def _claude(*words: str) -> None:
    shown = shlex.join(["claude", "plugin", *words])
    program = find_program("claude")
    if program is None:
        raise Misuse(f"{missing_program('claude')}; run where it is: {shown}")
    done = _run(program, *words)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise Misuse(f"{shown} failed: {reason[-1] if reason else 'no reason given'}")


def _run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Claude Code outside of the project, whose settings an agent may have written."""
    return subprocess.run(
        [program, "plugin", *words], cwd=plugin_directory(), env=safe_environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def _command(name: str, description: str, arguments: str) -> str:
    program = shlex.join([*own_program(), name])
    return (
        f"---\ndescription: {json.dumps(description)}\nargument-hint: {json.dumps(arguments)}\n"
        f"allowed-tools: Bash({program}:*)\n---\n\n!`{program} $ARGUMENTS`\n\n{SHOWN}\n"
    )


def _dumped(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
