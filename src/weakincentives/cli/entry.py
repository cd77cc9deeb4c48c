"""The command `wink`: where it starts, its commands, and how every error becomes one line."""

from __future__ import annotations

import os
import re
import site
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    import typer
    from typer.core import TyperGroup


SECTIONS = {
    "Agents you already have": {
        "hook install": "hook.install",
        "hook uninstall": "hook.uninstall",
        "hook run": "hook.run",
        "exec": "exec.exec_program",
        "mcp": "mcp.mcp",
        "mcp install": "mcp_clients.install",
        "mcp uninstall": "mcp_clients.uninstall",
        "mcp inspect": "mcp_inspect.inspect",
    },
    "See and undo": {
        "log": "history.log",
        "show": "history.show",
        "diff": "history.diff",
        "undo": "history.undo",
        "rewind": "history.rewind",
        "debug": "debug.debug",
        "export": "debug.export",
        "query": "debug.query",
    },
    "Run an agent": {
        "run": "run.run",
        "chat": "run.chat",
        "resume": "run.resume",
        "send": "run.send",
        "approve": "approve.approve",
    },
    "Branches": {
        "fork": "branch.fork",
        "rerun": "branch.rerun",
        "branch list": "branch.list_branches",
        "branch diff": "branch.diff",
        "branch merge": "branch.merge",
        "branch drop": "branch.drop",
        "branch checkout": "branch.checkout",
    },
    "Background runs": {
        "submit": "worker.submit",
        "worker": "worker.worker",
        "ps": "worker.ps",
        "cancel": "worker.cancel",
        "fetch": "worker.fetch",
    },
    "Set up": {
        "demo": "demo.demo",
        "doctor": "doctor.doctor",
        "setup": "setup.setup",
        "tools": "tools.tools",
        "policy check": "tools.check",
        "policy trust": "tools.trust",
        "gc": "gc.gc",
    },
}
"""The sections of `wink --help`: each command, and its function in a module of this package."""
_GROUPS = {
    "branch": "List, compare, merge, drop and check out branches.",
    "policy": "Check the rules of a directory, and trust its code.",
    "hook": "Record every call of a coding agent.",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `wink` with the arguments, by default those of the process, and exit.

    The exit code is 0 for success, 1 for failure, 2 for wrong use or a missing extra.
    """
    if arguments is None:
        # First of all: the workspace may be on the path, and must not shadow installed modules.
        if sys.flags.ignore_environment:  # a run that we have started: see ``state.python``
            named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            sys.path += [os.path.abspath(each) for each in named if each]
        library = os.path.dirname(os.__file__)
        installed = library, f"{library}/lib-dynload", *site.getsitepackages()
        sys.path.sort(key=lambda each: each not in installed)
        if any(os.path.isdir(each) for each in sys.path if each not in installed):
            from weakincentives.core.programs import drop_planted_modules

            drop_planted_modules()
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
        from weakincentives.errors import MissingExtra

        _fail(str(MissingExtra("cli", error.name)), 2)


def _serve_later_events(arguments: Sequence[str]) -> None:
    """Leave a process behind that records an agent's next events, if this is one of them."""
    if list(arguments[:2]) != ["hook", "run"]:
        return
    from weakincentives.cli.hooks import resident
    from weakincentives.errors import WinkError

    with suppress(WinkError, OSError):  # without it, each event is only slower
        resident.start()


def _run(arguments: Sequence[str] | None) -> NoReturn:
    from weakincentives.cli.common import Misuse
    from weakincentives.errors import MissingExtra, WinkError

    words = sys.argv[1:] if arguments is None else arguments
    try:
        if not words and "_WINK_COMPLETE" not in os.environ:
            from weakincentives.cli.start import start

            start()
            sys.exit(0)
        sys.exit(_run_quickly(words) if _is_quick(words) else _run_command(arguments, words))
    except (Misuse, MissingExtra) as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        # Drop the rest of the output, or Python complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (WinkError, OSError) as error:
        _fail(str(error), 1)


def _is_quick(words: Sequence[str]) -> bool:
    """Tell whether this is a command without options that must start quickly."""
    is_event = len(words) == 3 and words[0] == "hook" and words[1] == "run"
    return (is_event and words[2][:1] != "-") or (len(words) > 2 and list(words[:2]) == _EXEC)


_EXEC = ["exec", "--"]


def _run_quickly(words: Sequence[str]) -> int:
    """Run such a command without typer, which takes longer to load than the command takes."""
    if words[0] == "exec":
        from weakincentives.cli.execution import execute

        return execute(words[2:])
    from weakincentives.cli.hooks.program import record

    record(words[2])
    return 0


def _run_command(arguments: Sequence[str] | None, words: Sequence[str]) -> int:
    import typer

    try:
        # Typer's standalone mode would print boxes and tracebacks.
        return make_app(*words[:1])(arguments, standalone_mode=False, prog_name="wink") or 0
    except typer.TyperException as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # a group without a command: this is its help
            typer.echo(message)
            sys.exit(2)
        _fail(f"{_worded(message)}; see: {_help_of(error, words)}", 2)
    except typer.Abort:
        _fail("interrupted", 130)


def _worded(message: str) -> str:
    """Return an error of the parser in our words."""
    extra = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.+)\)", message)
    if extra is not None:
        words = extra[1]
        return f"unexpected argument{'s' if ' ' in words else ''}: {words}"
    said, question, name = message.removesuffix(".").partition(". Did you mean ")
    return f"{said}: did you mean {name}" if question else said


def _help_of(error: typer.TyperException, words: Sequence[str]) -> str:
    """Return how to show the help of the command that was used wrongly."""
    context = getattr(error, "ctx", None)
    if context is not None:
        return f"wink {context.command_path.partition(' ')[2]} --help".replace("  ", " ")
    known = {name for names in SECTIONS.values() for name in names}
    named = [" ".join(words[:2]), *words[:1]]  # an option without its value has no context
    return " ".join(["wink", *[each for each in named if each in known][:1], "--help"])


def _fail(message: str, code: int) -> NoReturn:
    from weakincentives.core.text import harmless

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
        cls=_in_sections(),
        help="See and undo every change that a coding agent makes, or run one whose every call is "
        "committed or rolled back as a whole.",
        epilog="`wink` alone says what to do next in this directory; `wink COMMAND --help` has "
        "examples.",
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
    every = {name: place for names in SECTIONS.values() for name, place in names.items()}
    chosen = {name: place for name, place in every.items() if name.split()[0] == called}
    for words, place in (chosen or every).items():
        group, _, name = words.rpartition(" ")
        if group not in apps:  # a command that is a group, too
            group, name = "", words
        module, _, function = place.partition(".")
        command = getattr(import_module(f"weakincentives.cli.{module}"), function)
        # What comes after the program's name is the program's.
        takes_program = name in ("exec", "mcp inspect")
        context = {"allow_interspersed_args": False} if takes_program else None
        add = apps[group].command(name, epilog=EPILOGS.get(command), context_settings=context)
        add(expanded(command))
    return app


def _in_sections() -> type[TyperGroup]:
    """Return a group whose help lists the commands in sections, with their whole summaries."""
    from typer.core import TyperGroup

    class Sections(TyperGroup):
        def format_options(self, ctx: Any, formatter: Any) -> None:
            for each in cast("list[Any]", self.params):
                if each.name in ("install_completion", "show_completion"):
                    each.hidden = True  # `wink setup` installs it
            super().format_options(ctx, formatter)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            both = " ".join(args[:2])
            if both in self.commands:
                return both, self.commands[both], args[2:]
            return super().resolve_command(ctx, args)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            for section, names in SECTIONS.items():
                rows = {name.split()[0]: "" for name in names}
                for name in rows:
                    if (command := self.get_command(ctx, name)) is not None:
                        rows[name] = command.get_short_help_str(1000)
                with formatter.section(section):
                    formatter.write_dl(list(rows.items()))

    return Sections
