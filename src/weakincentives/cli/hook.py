"""`wink hook`: what other vendors' agents do to a directory becomes our calls."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weakincentives.cli.common import Misuse, echo, examples

if TYPE_CHECKING:
    from weakincentives.cli.hooks.adapters import Adapter

Agent = Annotated[
    str, typer.Argument(metavar="AGENT", help="Its program, such as claude or codex.")
]


@examples(
    "wink hook install claude            # shows what it changes in your settings",
    "claude                              # as always: every tool that it uses is recorded",
    "wink log                            # afterwards, in the same directory",
    "wink hook install claude --plugin   # with the commands /wink:undo, /wink:log and /wink:diff",
    "wink hook install codex --print     # change nothing, only show it",
    more="Your settings are kept, and what is changed is copied first. If a tool cannot be "
    "recorded, it does not run.",
)
def install(
    agent: Agent,
    print_only: Annotated[bool, typer.Option("--print", help="Only show the changes.")] = False,
    plugin: Annotated[
        bool,
        typer.Option("--plugin", help="For claude: as a plug-in, with /wink:undo and others."),
    ] = False,
) -> None:
    """Have a coding agent tell wink of every tool that it uses."""
    from weakincentives.cli.hooks.adapters import adapter_of
    from weakincentives.cli.hooks.install import changes_to_install
    from weakincentives.cli.settings_files import apply, show

    adapter = adapter_of(agent)
    if plugin:
        _install_plugin(adapter, print_only)
        return
    changes = changes_to_install(adapter)
    show(changes)
    if print_only:
        return
    apply(changes)
    if changes:
        echo(
            f"{adapter.title} is recorded from its next start on; to undo this: "
            f"wink hook uninstall {adapter.program}"
        )
    else:
        echo(f"{adapter.title} has these hooks already.")


def _install_plugin(adapter: Adapter, print_only: bool) -> None:
    from weakincentives.cli.hooks.claude_plugin import install_plugin, show_plugin
    from weakincentives.cli.hooks.install import changes_to_uninstall
    from weakincentives.cli.settings_files import apply, show

    if adapter.program != "claude":
        raise Misuse(f"--plugin is for claude; run: wink hook install {adapter.program}")
    show(changes_to_uninstall(adapter))  # or each event would be told twice
    if print_only:
        show_plugin()
        return
    install_plugin()
    apply(changes_to_uninstall(adapter))  # of the settings as Claude Code has left them
    echo(
        "Claude Code has the plug-in wink: it is recorded from its next start on, and has the"
        " commands /wink:undo, /wink:log and /wink:diff; to undo this: wink hook uninstall claude"
    )


@examples("wink hook uninstall claude", "wink hook uninstall codex --print")
def uninstall(
    agent: Agent,
    print_only: Annotated[bool, typer.Option("--print", help="Only show the changes.")] = False,
) -> None:
    """Remove the hooks from a coding agent's settings.

    What was recorded stays.
    """
    from weakincentives.cli.hooks.adapters import adapter_of
    from weakincentives.cli.hooks.claude_plugin import plugin_directory, remove_plugin
    from weakincentives.cli.hooks.install import changes_to_uninstall
    from weakincentives.cli.settings_files import apply, show

    adapter = adapter_of(agent)
    changes = changes_to_uninstall(adapter)
    show(changes)
    has_plugin = adapter.program == "claude" and plugin_directory().exists()
    if not print_only:
        apply(changes)
        if has_plugin:
            remove_plugin()
            shutil.rmtree(plugin_directory())
            echo("Claude Code's plug-in wink is removed.")
    if not changes and not has_plugin:
        echo(f"{adapter.title} has no hooks of wink.")


@examples(
    more="An agent starts it at each of its events, with a JSON object on standard input: see "
    "`wink hook install`."
)
def run(
    agent: Agent,
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace",
            "-w",
            metavar="DIR",
            help="The directory to record; by default the agent's project.",
        ),
    ] = None,
) -> None:
    """Record one event; agents start this, not people."""
    from weakincentives.cli.hooks.program import record

    record(agent, workspace)
