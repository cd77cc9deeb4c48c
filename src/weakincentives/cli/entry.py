"""The command `wink`: where it starts, its commands, and how every error becomes one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `wink` with the arguments, by default those of the process, and exit.

    The exit code is 0 for success, 1 for failure, 2 for wrong use.
    """
    if arguments is None:
        # First of all: the workspace may be on the path, and must not shadow installed modules.
        installed = (sys.prefix, sys.base_prefix)
        sys.path.sort(key=lambda each: not each.startswith(installed))
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file opened would take its descriptor
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # until the end
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # `git diff | wink send -` may not be UTF-8
        with suppress(AttributeError, ValueError):  # replaced by some other object
            cast("Any", stream).reconfigure(errors="backslashreplace")
    try:
        _run(arguments)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "prompt_toolkit"):
            raise
        _fail(f"{error.name} is missing; run: pip install 'wink-runtime[cli]'", 2)


def _run(arguments: Sequence[str] | None) -> NoReturn:
    import typer

    from weakincentives.cli.common import Misuse
    from weakincentives.errors import WinkError

    try:
        # Typer's standalone mode would print boxes and tracebacks.
        sys.exit(make_app()(arguments, standalone_mode=False) or 0)
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


def make_app() -> typer.Typer:
    """Return the command line with all commands."""
    import typer

    from weakincentives.cli import (
        approve,
        branch,
        debug,
        demo,
        doctor,
        gc,
        history,
        hook,
        mcp,
        run,
        tools,
        worker,
    )
    from weakincentives.cli import (
        exec as exec_,
    )

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

    demo.register(app)
    run.register(app)
    approve.register(app)
    run.register_chat(app)
    for module in (exec_, history, debug, branch, worker, tools, doctor, gc, mcp):
        module.register(app)
    hook.register(app)
    return app
