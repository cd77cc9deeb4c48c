"""`wink mcp`: the tools of a workspace for any MCP client, with rules, rollback and undo."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from weakincentives.cli.common import Misuse, examples, open_branch, open_workspace, say
from weakincentives.cli.database import open_runs, setting
from weakincentives.cli.options import (
    InPlace,
    Policy,
    Sandbox,
    Verbose,
    Workspace,
    complete_branches,
    complete_suites,
)
from weakincentives.errors import SessionInUse, SnapshotError

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.mcp import McpServer
    from weakincentives.prompt import Section
    from weakincentives.prompt.approval import Ask
    from weakincentives.runtime import SavedSession
    from weakincentives.session.session import Session


@examples(
    "wink mcp --workspace ~/project                      # for a client that starts it itself",
    "wink mcp --workspace ~/project --http --port 8765   # for clients that connect to it",
    "wink mcp mypackage.tools:section                    # your own tools",
    "wink mcp install cursor                             # in a client's settings; see its --help",
    "wink mcp inspect https://example.com/mcp            # try a server by hand; see its --help",
    more="Several servers can work on one directory, and so can `wink run`: their calls take "
    "turns. --in-place keeps others out.",
)
def mcp(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC",
            help="Serve these sections, registries or tools (module:object or file.py:object) "
            "instead of the suites.",
        ),
    ] = None,
    workspace: Workspace = Path(),
    http: Annotated[
        bool, typer.Option("--http", help="Serve streamable HTTP instead of standard input.")
    ] = False,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="With --http: the address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="With --http: 0 is any free port.")
    ] = 0,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            envvar="WINK_MCP_TOKEN",
            help="With --http: the token that clients must send; by default a new one.",
        ),
    ] = None,
    oauth: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --http: let in whom this authorization server gives a token, instead.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --oauth: the address at which clients find this server, if a proxy is in "
            "front.",
        ),
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --oauth: what a token must allow; repeatable."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new session instead of resuming the last.")
    ] = False,
    suites: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="The suites to offer: files,shell,planning,digest,python.",
            autocompletion=complete_suites,
        ),
    ] = None,
    sandbox: Sandbox = None,
    policy: Policy = None,
    in_place: InPlace = False,
    branch: Annotated[
        str | None,
        typer.Option(
            "--branch",
            metavar="NAME",
            help="Work on this branch, a new one by default.",
            autocompletion=complete_branches,
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            metavar="URL",
            help="Let the client's user answer what runs in this database ask. Of a client that "
            "cannot ask its user, calls wait there for `wink approve`.",
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Serve the tools of a directory to MCP clients."""
    from weakincentives.cli.config import load_settings
    from weakincentives.mcp.stdio import claimed_wire
    from weakincentives.runtime import configure_logging

    # First of all: code that is loaded later may print, and standard output is the protocol's.
    with claimed_wire() as wire:
        configure_logging("INFO" if verbose else "WARNING")
        chosen = [name.strip() for name in (suites or "").split(",") if name.strip()]
        settings = load_settings(
            workspace,
            suites=None if suites is None and not specs else chosen,
            sections=specs or None,
            sandbox=sandbox,
            policy=policy,
        )
        with (
            _approvals(database, settings) as (more, ask),
            _server(
                settings, branch, more, ask, fresh=fresh, in_place=in_place, many=http
            ) as server,
        ):
            if http:
                auth = None if oauth is None else _OAuth(oauth, url, tuple(scope or ()))
                _serve_http(server, settings, host, port, token, auth)
            else:
                _until_stopped(lambda: server.run_stdio(wire))


class _OAuth(NamedTuple):
    issuer: str
    url: str | None
    scopes: tuple[str, ...]


@contextmanager
def _approvals(
    database: str | None, settings: Settings
) -> Generator[tuple[Sequence[Section[Any]], Ask]]:
    """Yield how calls are approved, and a section with which the client's user answers what durable
    runs ask.
    """
    from weakincentives.mcp import AskElsewhere, ask_client
    from weakincentives.mcp.elicitation import approvals_section

    if not setting("database", database):
        yield (), ask_client
        return
    with ExitStack() as opened:
        # Late, unless it is named here: a server works without it, too.
        runs = cache(lambda: opened.enter_context(open_runs(database)))
        ask = AskElsewhere(runs, {"workspace": str(settings.workspace)})
        with closing(ask):
            # One more tool for every model: only where it is wanted.
            more = () if database is None else (approvals_section(runs()),)
            yield more, ask


@contextmanager
def _server(
    settings: Settings,
    branch: str | None,
    more: Sequence[Section[Any]],
    ask: Ask,
    *,
    fresh: bool,
    in_place: bool,
    many: bool,
) -> Generator[McpServer]:
    from weakincentives.cli.workbench import check_fits_branch, open_workbench
    from weakincentives.filesystem.store import location_of
    from weakincentives.mcp import McpServer
    from weakincentives.runtime.calls import begin_run
    from weakincentives.session.session import Session

    about: dict[str, object] = {
        "kind": "mcp",
        "suites": settings.suites,
        "sections": settings.sections,
    }
    about |= {"branch": branch} if branch else {}
    # First: a directory in use is reported before a session is opened.
    with _files(settings, branch, alone=in_place) as files, ExitStack() as saves:

        def session_of(about: Mapping[str, object]) -> Session:
            from weakincentives.contrib.databases import known_databases

            saved = None if fresh else _last_session(settings, about)
            if saved is not None:
                saved.recover(files, databases=known_databases(settings.workspace))
                saved.mark_resumed()
            saved = saved or begin_run(location_of(settings.workspace), about)
            return saves.enter_context(saved).session

        # One that is not saved stands for all clients over HTTP: each has its own.
        session = Session() if many else session_of(about)
        with open_workbench(settings, session, ask=ask, files=files, more=more) as bench:
            if branch:
                check_fits_branch(bench)

            def new_session(client: str) -> Session:
                made = session_of({**about, "client": client})
                made.register_like(session)
                return made

            yield McpServer(
                bench.prompt,
                session=session,
                new_session=new_session if many else None,
                time_limit=settings.time_limit,
            )


def _files(
    settings: Settings, branch: str | None, *, alone: bool
) -> AbstractContextManager[HostFilesystem]:
    workspace, rules = settings.workspace, settings.policy.unprotect
    if branch:
        return open_branch(workspace, branch, unprotected=rules)
    return open_workspace(workspace, unprotected=rules, alone=alone)


def _last_session(settings: Settings, about: Mapping[str, object]) -> SavedSession | None:
    """Return the last session that served the same tools, if it can be resumed.

    One that another server uses is not ours.
    """
    from weakincentives.cli.workbench import load_types
    from weakincentives.runtime import SavedSession
    from weakincentives.runtime.calls import runs_of

    load_types(settings)
    for run in reversed(runs_of(settings.workspace)):
        try:
            if run.data.about == about:
                return SavedSession.open(run.path)
        except SessionInUse:
            continue
        except SnapshotError as error:
            say(f"starting a new session, because the last one cannot be resumed: {error}")
            return None
    return None


def _serve_http(
    server: McpServer,
    settings: Settings,
    host: str,
    port: int,
    token: str | None,
    oauth: _OAuth | None,
) -> None:
    import secrets
    from ipaddress import ip_address

    from weakincentives.mcp import McpAuth
    from weakincentives.mcp.http import PATH, listen, serve

    if oauth is not None and token is not None:
        raise Misuse("clients have a token of yours, or one of OAuth: leave --token or --oauth out")
    secret = None if oauth is not None else token or secrets.token_urlsafe(32)
    auth = None
    try:
        with listen(host, port) as listening:
            place, number = listening.getsockname()[:2]
            shown = f"[{place}]" if ":" in place else place
            address = f"http://{shown}:{number}{PATH}"
            say(f"{settings.workspace} at {address}")
            if oauth is not None:
                try:
                    auth = McpAuth(
                        issuer=oauth.issuer, url=oauth.url or address, scopes=oauth.scopes
                    )
                except ValueError as error:
                    raise Misuse(f"--oauth and --url: {error}") from error
            if not ip_address(place).is_loopback:
                say(
                    "other machines can connect, and nothing is encrypted: put a proxy with TLS "
                    "in front"
                )
            if token is None and secret is not None:
                say(f"Authorization: Bearer {secret}")
            _until_stopped(lambda: serve(server, listening, secret, auth=auth))
    except OSError as error:
        reason = error.strerror or str(error)
        raise Misuse(f"cannot listen on {host} port {port}: {reason}; choose another") from error


def _until_stopped(start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Serve until the client leaves or a signal comes; running calls are then rolled back."""
    import asyncio
    import signal

    signals: list[int] = []

    async def run() -> None:
        task = asyncio.ensure_future(start())

        def end(number: int) -> None:
            signals.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        await asyncio.wait([task])
        # Cancelled in the middle of a message, the mcp package raises errors of its own.
        if not task.cancelled() and not (signals and task.exception()):
            task.result()

    asyncio.run(run())
    if signals:
        raise typer.Exit(128 + signals[0])
