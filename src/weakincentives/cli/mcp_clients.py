"""`wink mcp install` and `wink mcp uninstall`: our server in the settings of MCP clients."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weakincentives.cli.common import Misuse, echo, examples, existing_directory, hint
from weakincentives.cli.options import Workspace
from weakincentives.cli.settings_files import (
    Change,
    apply,
    read_settings,
    show,
    with_member,
    without_member,
)
from weakincentives.core.programs import find_program

_NAME = "wink"


@dataclass(frozen=True)
class _Client:
    """An MCP client, and where its settings have the servers that it starts."""

    title: str
    place: Callable[[Path], Path]
    """Its settings, for a workspace."""
    key: str
    workspace: str = ""
    """What it inserts for the workspace; empty if the path must be given."""
    entry: Mapping[str, Any] | None = None
    """More members of the entry."""
    next_step: str = "Restart it to use the server."

    def change(self, workspace: Path, entry: Mapping[str, Any] | None) -> Change:
        """Return the settings with our server, or without it."""
        path = self.place(workspace)
        before = read_settings(path)
        try:
            if entry is not None:
                after = with_member(before or "", (self.key, _NAME), entry)
            else:
                after = None if before is None else without_member(before, (self.key, _NAME))
        except ValueError as error:
            raise Misuse(f"the settings in {path} cannot be changed: {error}") from error
        return Change(path, before, after)

    def server(self, workspace: Path) -> dict[str, Any]:
        """Return our server as the client's settings describe it."""
        place = self.workspace or str(workspace)
        command = {"command": _program(), "args": ["mcp", "--workspace", place]}
        return {**(self.entry or {}), **command}


def _program() -> str:
    """Return the full path of this program: a client may have another PATH."""
    beside = Path(sys.executable).with_name("wink")
    found = str(beside) if beside.exists() else find_program("wink")
    return os.path.abspath(found or sys.argv[0])


def _home(variable: str, otherwise: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / otherwise)


def _claude_desktop(workspace: Path) -> Path:
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    elif sys.platform == "win32":
        base = _home("APPDATA", "AppData/Roaming")
    else:
        base = _home("XDG_CONFIG_HOME", ".config")
    return base / "Claude" / "claude_desktop_config.json"


def _zed(workspace: Path) -> Path:
    if sys.platform == "win32":
        return _home("APPDATA", "AppData/Roaming") / "Zed" / "settings.json"
    # On macOS, too.
    base = Path.home() / ".config" if sys.platform == "darwin" else None
    return (base or _home("XDG_CONFIG_HOME", ".config")) / "zed" / "settings.json"


_CLIENTS = {
    "claude-code": _Client(
        "Claude Code",
        lambda workspace: workspace / ".mcp.json",
        "mcpServers",
        workspace=".",
        next_step="It asks once whether to use the server.",
    ),
    "claude-desktop": _Client("Claude Desktop", _claude_desktop, "mcpServers"),
    "cursor": _Client(
        "Cursor",
        lambda workspace: workspace / ".cursor" / "mcp.json",
        "mcpServers",
        workspace="${workspaceFolder}",
        entry={"type": "stdio"},
    ),
    "vscode": _Client(
        "VS Code",
        lambda workspace: workspace / ".vscode" / "mcp.json",
        "servers",
        workspace="${workspaceFolder}",
        entry={"type": "stdio"},
    ),
    "zed": _Client("Zed", _zed, "context_servers", entry={"env": {}}),
}


def _complete(incomplete: str) -> Sequence[str]:
    return [name for name in _CLIENTS if name.startswith(incomplete)]


_ClientName = Annotated[
    str,
    typer.Argument(
        metavar="CLIENT",
        help=f"The client: {', '.join(_CLIENTS)}.",
        autocompletion=_complete,
        show_default=False,
    ),
]
_PrintOnly = Annotated[bool, typer.Option("--print", help="Only show the changes.")]


def _client(name: str) -> _Client:
    if name not in _CLIENTS:
        known = f"the clients are {', '.join(_CLIENTS)}"
        raise Misuse(f"unknown client {name!r}; {hint(name, _CLIENTS, known)}")
    return _CLIENTS[name]


@examples(
    "wink mcp install cursor",
    "wink mcp install claude-desktop --workspace ~/project",
    "wink mcp install zed --print                  # only show the changes",
    more="Settings that are replaced are kept beside them. Comments and other servers stay.",
)
def install(
    client: _ClientName, workspace: Workspace = Path(), print_only: _PrintOnly = False
) -> None:
    """Have an MCP client start `wink mcp` on a directory."""
    chosen, directory = _client(client), existing_directory(workspace).resolve()
    change = chosen.change(directory, chosen.server(directory))
    if change.before == change.after:
        echo(f"{chosen.title} has this server already, in {change.path}.")
        return
    show([change])
    if not print_only:
        apply([change])
        echo(f"{chosen.title} uses wink in {directory}. {chosen.next_step}")
        echo(f"To undo this: wink mcp uninstall {client}")


@examples("wink mcp uninstall cursor", "wink mcp uninstall zed --print")
def uninstall(
    client: _ClientName, workspace: Workspace = Path(), print_only: _PrintOnly = False
) -> None:
    """Remove `wink mcp` from the settings of an MCP client."""
    chosen = _client(client)
    change = chosen.change(existing_directory(workspace).resolve(), None)
    if change.before == change.after:
        echo(f"{chosen.title} has no server of wink in {change.path}.")
        return
    show([change])
    if not print_only:
        apply([change])
