"""`wink mcp`: the tools of a workspace for any MCP client, with rules, rollback and undo."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weakincentives.cli.common import (
    Misuse,
    Workspace,
    complete_suites,
    examples,
    open_workspace,
    say,
)
from weakincentives.errors import SnapshotError

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.mcp import McpServer
    from weakincentives.runtime import SavedSession

_KIND = "mcp"
_EXAMPLE = examples(
    "wink mcp --workspace ~/project                      # for a client that starts it itself",
    "wink mcp --workspace ~/project --http --port 8765   # for clients that connect to it",
    "wink mcp mypackage.tools:section                    # your own tools",
    more='In the documentation: "Serving a workspace"; for the settings of a client: "Setting '
    'up a client".',
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("mcp", epilog=_EXAMPLE)(_mcp)


def _mcp(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC",
            help="Serve these sections, registries or tools (module:object or file.py:object) "
            "instead of the file, shell and planning suites.",
        ),
    ] = None,
    workspace: Workspace = Path(),
    http: Annotated[
        bool, typer.Option("--http", help="Serve streamable HTTP; else standard input and output.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="With --http: the address; others than this machine need another.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --http; 0 is any free one.")
    ] = 0,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="WINK_MCP_TOKEN", help="With --http: what clients must know; else one is made."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin a new session; else the last one goes on.")
    ] = False,
    suites: Annotated[
        str | None,
        typer.Option(
            help="What to offer: files,shell,planning,digest,python.",
            autocompletion=complete_suites,
        ),
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="auto, podman, bubblewrap, namespaces or none.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="One more rule, such as protect=GLOB; repeat it.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what goes on.")] = False,
) -> None:
    """Serve the tools of a workspace to any MCP client: transactions, rules and undo included."""
    from weakincentives.cli.config import load_settings
    from weakincentives.mcp.wire import claimed_wire
    from weakincentives.runtime import configure_logging

    # First of all: what is loaded from here on may print, and the wire is the protocol's.
    with claimed_wire() as wire:
        configure_logging("INFO" if verbose else "WARNING")
        settings = load_settings(
            workspace,
            suites=_chosen_suites(specs, suites),
            sections=specs or None,
            sandbox=sandbox,
            policy=policy,
        )
        with _server(settings, fresh=fresh) as server:
            if http:
                _serve_http(server, settings, host, port, token)
            else:
                _until_told(lambda: server.run_stdio(wire))


def _chosen_suites(specs: list[str] | None, suites: str | None) -> list[str] | None:
    if suites is not None:
        return [name.strip() for name in suites.split(",") if name.strip()]
    return [] if specs else None


@contextmanager
def _server(settings: Settings, *, fresh: bool) -> Generator[McpServer]:
    from weakincentives.cli.workbench import open_workbench
    from weakincentives.mcp import McpServer

    with open_workspace(settings.workspace):
        pass  # one that is in use is told before a session is looked for
    saved = (None if fresh else _last_session(settings)) or _new_session(settings)
    with saved, open_workbench(settings, saved.session) as workbench:
        yield McpServer(workbench.prompt, session=saved.session, time_limit=settings.time_limit)


# The session, which goes on from one start to the next


def _last_session(settings: Settings) -> SavedSession | None:
    """Return the last session that served the same, if it can be resumed."""
    from weakincentives.cli.workbench import load_types
    from weakincentives.runtime import SavedSession
    from weakincentives.runtime.calls import runs_of

    load_types(settings)
    for run in reversed(runs_of(settings.workspace)):
        try:
            if run.data.about == _about(settings):
                return SavedSession.open(run.path)
        except SnapshotError as error:
            say(f"a new session begins, because the last one: {error}")
            return None
    return None


def _new_session(settings: Settings) -> SavedSession:
    from weakincentives.filesystem.store import location_of
    from weakincentives.runtime import SavedSession, Session
    from weakincentives.runtime.calls import new_run

    run = new_run(location_of(settings.workspace))
    return SavedSession.create(run.path, Session(session_id=run.id), about=_about(settings))


def _about(settings: Settings) -> dict[str, object]:
    return {"kind": _KIND, "suites": settings.suites, "sections": settings.sections}


# Serving


def _serve_http(
    server: McpServer, settings: Settings, host: str, port: int, token: str | None
) -> None:
    import secrets
    from ipaddress import ip_address

    from weakincentives.mcp.http import PATH, listen, serve

    secret = token or secrets.token_urlsafe(32)
    try:
        with listen(host, port) as listening:
            place, number = listening.getsockname()[:2]
            shown = f"[{place}]" if ":" in place else place
            say(f"{settings.workspace} at http://{shown}:{number}{PATH}")
            if not ip_address(place).is_loopback:
                say(
                    "other machines can reach it, and nothing is encrypted: put a proxy with TLS "
                    "in front"
                )
            if token is None:
                say(f"Authorization: Bearer {secret}")
            _until_told(lambda: serve(server, listening, secret))
    except OSError as error:
        reason = error.strerror or str(error)
        raise Misuse(f"{host} port {port} cannot be served: {reason}; name another") from error


def _until_told(start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Serve until the client leaves or a signal comes; calls under way are rolled back then."""
    import asyncio
    import signal

    told: list[int] = []

    async def run() -> None:
        task = asyncio.ensure_future(start())

        def end(number: int) -> None:
            told.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        await asyncio.wait([task])
        # What the mcp package makes of being cut off in the middle of a message is no news.
        if not task.cancelled() and not (told and task.exception()):
            task.result()

    asyncio.run(run())
    if told:
        raise typer.Exit(128 + told[0])
