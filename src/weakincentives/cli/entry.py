"""The command `wink`: where it starts, its commands, and how every error becomes one line."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    import typer


_COMMANDS = {
    "demo": "demo.demo",
    "run": "run.run",
    "resume": "run.resume",
    "send": "run.send",
    "approve": "approve.approve",
    "chat": "run.chat",
    "exec": "exec.exec_program",
    "log": "history.log",
    "show": "history.show",
    "diff": "history.diff",
    "undo": "history.undo",
    "rewind": "history.rewind",
    "debug": "debug.debug",
    "export": "debug.export",
    "query": "debug.query",
    "fork": "branch.fork",
    "rerun": "branch.rerun",
    "submit": "worker.submit",
    "worker": "worker.worker",
    "ps": "worker.ps",
    "cancel": "worker.cancel",
    "fetch": "worker.fetch",
    "tools": "tools.tools",
    "doctor": "doctor.doctor",
    "gc": "gc.gc",
    "mcp": "mcp.mcp",
    "branch list": "branch.list_branches",
    "branch diff": "branch.diff",
    "branch merge": "branch.merge",
    "branch drop": "branch.drop",
    "branch checkout": "branch.checkout",
    "policy check": "tools.check",
    "policy approve": "tools.approve",
    "hook install": "hook.install",
    "hook uninstall": "hook.uninstall",
    "hook run": "hook.run",
}
"""Each command, and its function in a module of this package."""
_GROUPS = {
    "branch": "List, compare, merge, drop and check out branches.",
    "policy": "Check and approve the rules of a directory.",
    "hook": "Record every tool that a coding agent uses.",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `wink` with the arguments, by default those of the process, and exit.

    The exit code is 0 for success, 1 for failure, 2 for wrong use.
    """
    if arguments is None:
        # First of all: the workspace may be on the path, and must not shadow installed modules.
        if sys.flags.ignore_environment:  # a run that we have started: see ``state.python``
            named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            sys.path += [os.path.abspath(each) for each in named if each]
        library = os.path.dirname(os.__file__)
        installed = library, f"{library}/lib-dynload", *site.getsitepackages()
        sys.path.sort(key=lambda each: each not in installed)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file opened would take its descriptor
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # until the end
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # `git diff | wink send -` may not be UTF-8
        with suppress(AttributeError, ValueError):  # replaced by some other object
            cast("Any", stream).reconfigure(errors="backslashreplace")
    try:
        if arguments is None:
            _serve_later_events(sys.argv[1:])
        _run(arguments)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "prompt_toolkit"):
            raise
        _fail(f"{error.name} is missing; run: pip install 'wink-runtime[cli]'", 2)


def _serve_later_events(arguments: Sequence[str]) -> None:
    """Leave a process behind that records an agent's next events, if this is one of them."""
    if list(arguments[:2]) != ["hook", "run"]:
        return
    from weakincentives.cli.hooks import resident
    from weakincentives.errors import WinkError

    with suppress(WinkError, OSError):  # without it, each event is only slower
        resident.start()


def _run(arguments: Sequence[str] | None) -> NoReturn:
    import typer

    from weakincentives.cli.common import Misuse
    from weakincentives.errors import WinkError

    try:
        # Typer's standalone mode would print boxes and tracebacks.
        app = make_app(*(sys.argv[1:] if arguments is None else arguments)[:1])
        sys.exit(app(arguments, standalone_mode=False) or 0)
    except typer.TyperException as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # called without arguments: this is the help
            typer.echo(message)
            sys.exit(2)
        _fail(message, 2)
    except Misuse as error:
        _fail(str(error), 2)
    except typer.Abort:
        _fail("interrupted", 130)
    except BrokenPipeError:
        # Drop the rest of the output, or Python complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (WinkError, OSError) as error:
        _fail(str(error), 1)


def _fail(message: str, code: int) -> NoReturn:
    from weakincentives.text import harmless

    sys.stderr.write(f"wink: {harmless(message)}\n")
    sys.exit(code)


def make_app(called: str = "") -> typer.Typer:
    """Return the command line with all commands, or with the one that is called.

    Typer builds the options of every command it knows, which takes longer than most commands.
    """
    import typer

    from weakincentives.cli.common import EPILOGS
    from weakincentives.cli.options import expanded

    app = typer.Typer(
        name="wink",
        help="Run an LLM agent's tools as transactions: committed, or rolled back completely.",
        epilog="Start with `wink demo`, then `wink doctor` and `wink run --help`. "
        "The documentation is in docs/ in the source distribution.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich takes longer to load than the rest of `wink --help`
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            from weakincentives import __version__

            typer.echo(f"wink {__version__}")
            raise typer.Exit

    @app.callback()
    def _wink(  # pyright: ignore[reportUnusedFunction]  # typer calls it
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        pass

    apps = {"": app}
    for name, sentence in _GROUPS.items():
        apps[name] = typer.Typer(help=sentence, no_args_is_help=True, rich_markup_mode=None)
        apps[name].callback()(lambda: None)  # or a group with one command would be that command
        app.add_typer(apps[name], name=name)
    commands = {each: _COMMANDS[each] for each in _COMMANDS if each.split()[0] == called}
    for words, place in (commands or _COMMANDS).items():
        group, _, name = words.rpartition(" ")
        module, _, function = place.partition(".")
        command = getattr(import_module(f"weakincentives.cli.{module}"), function)
        # What comes after the program's name is the program's.
        context = {"allow_interspersed_args": False} if name == "exec" else None
        add = apps[group].command(name, epilog=EPILOGS.get(command), context_settings=context)
        add(expanded(command))
    return app
