"""The command `wink`: its commands, and how every error becomes one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NoReturn, cast

import typer

from weakincentives.cli import demo, doctor, history, mcp, run, tools
from weakincentives.cli.common import Misuse, echo, say
from weakincentives.errors import WinkError

app = typer.Typer(
    name="wink",
    help="Run an LLM agent's tools as transactions: committed, or rolled back as if never begun.",
    epilog="Start with `wink demo`. Then: `wink doctor`, and `wink run --help`. "
    "The documentation is part of the source distribution: docs/.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from weakincentives import __version__

        echo(f"wink {__version__}")
        raise typer.Exit


@app.callback()
def _wink(  # pyright: ignore[reportUnusedFunction]  # typer keeps it
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


demo.register(app)
run.register(app)
history.register(app)
tools.register(app)
doctor.register(app)
mcp.register(app)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `wink` and exit: 0 when it went well, 1 when it failed, 2 for wrong use."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: a file that is opened next would take its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # until the end
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a stream of somebody's own
            cast("Any", stream).reconfigure(errors="backslashreplace")
    try:
        # Typer's own way of ending would print boxes and tracebacks.
        sys.exit(app(arguments, standalone_mode=False) or 0)
    except typer.TyperException as error:
        _fail(error.format_message(), 2)
    except Misuse as error:
        _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:
        # Whoever read our output has gone; so must what is left of it, or Python complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (WinkError, OSError) as error:
        _fail(str(error), 1)


def _fail(message: str, code: int) -> NoReturn:
    if message:  # none where typer has shown the help already
        say(message)
    sys.exit(code)
