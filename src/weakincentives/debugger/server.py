"""The debugger's server: on loopback, for one browser, with links that work once.

A link's token is exchanged for a cookie. Every request must have that cookie, our Host and, if it
has an Origin, ours. The page may load nothing from elsewhere, and no script but its own. It is
below a random path: without one, a browser would send the cookie to all servers of this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import json
import os
import secrets
import socket as sockets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from weakincentives.core.gc_pause import no_collection
from weakincentives.debugger.contents import to_json
from weakincentives.debugger.links import Links, announced
from weakincentives.debugger.records import Json, NotFound
from weakincentives.debugger.views import Views
from weakincentives.errors import MissingExtra, WinkError
from weakincentives.runtime.calls import run_file

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.datastructures import MutableHeaders
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import (
        FileResponse,
        HTMLResponse,
        PlainTextResponse,
        Response,
        StreamingResponse,
    )
    from starlette.routing import Route

    from weakincentives.core.serving import LOOPBACK, foreign, listen, serve_app
except ImportError as error:
    raise MissingExtra("debug", "starlette") from error

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from weakincentives.runtime.stores.runs import Runs

Action = Callable[[Path, str, Json], Json]
"""Does what the page asks for: gets the workspace, the id of a run or an approval, and the body.

Raises WinkError if it is refused now, ValueError if the request is wrong, NotFound."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_STATIC = Path(__file__).parent / "static"
_FILES = {
    "": ("index.html", "text/html"),
    "app.js": ("app.js", "text/javascript"),
    "app.css": ("app.css", "text/css"),
    "LICENSES.txt": ("LICENSES.txt", "text/plain"),
}
_COOKIE = "wink_debug"
_MAX_BODY = 4 << 20
_POLL = 0.5
"""Seconds between looks at the files of runs, while a page is open."""
_SILENCE = 15.0
"""Seconds after which a silent connection gets a sign of life."""
_ENTER = """<!doctype html>
<meta charset="utf-8">
<title>WINK debugger</title>
<link rel="icon" href="data:,">
<meta http-equiv="refresh" content="0;url=./#run={}">
"""
_USED = """<!doctype html>
<meta charset="utf-8">
<title>This link does not work</title>
<h1>This link does not work any more</h1>
<p>Each link opens the page once, in one browser. <code>wink debug --link</code> prints a new one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What the page can do besides looking."""

    posts: Mapping[str, Action] = field(default_factory=dict[str, Action])
    """By name: undo, rewind, fork and rerun for a run; approve for an approval."""
    approvals: Callable[[Path], Sequence[Json]] = lambda _: ()
    """Returns the calls of live runs that wait for a person."""

    @classmethod
    def ours(cls, runs: Runs | None = None) -> Actions:
        """Return what `wink debug` offers; with the approvals that wait in a database."""
        from weakincentives.debugger import actions

        names = ("undo", "rewind", "fork", "rerun")
        posts: dict[str, Action] = {name: getattr(actions, name) for name in names}
        posts["approve"] = partial(actions.approve, runs=runs)
        return cls(posts=posts, approvals=partial(actions.approvals, runs=runs))


class Debugger:
    """The application, and its links.

    It refuses foreign requests, exchanges the token for a cookie, and sets the headers.
    """

    def __init__(
        self, views: Views, *, port: int, actions: Actions | None = None, run: str = ""
    ) -> None:
        self.views = views
        self.place = f"/{secrets.token_urlsafe(16)}"
        """The path that everything is below."""
        self.run = run
        """The run that the page opens with."""
        self.links = Links(f"http://127.0.0.1:{port}{self.place}/")
        self._secret = secrets.token_urlsafe(32)
        self._port = port
        self._posts = (actions or Actions()).posts
        self._stopping = asyncio.Event()
        app = Starlette(
            routes=[
                Route("/api/events", self._events),
                Route("/api/runs/{target}/{action}", self._post, methods=["POST"]),
                Route("/api/{action:str}/{target}", self._post, methods=["POST"]),
                Route("/api/{path:path}", self._get),
                Route("/{name:path}", self._file),  # also "/"
            ]
        )
        self._app = GZipMiddleware(app, compresslevel=2)

    def stop(self) -> None:
        """End the streams of events."""
        self._stopping.set()

    # Guarding

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, if it is ours."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        path = cast("str", scope["path"])
        below = path.removeprefix(self.place) if path.startswith(f"{self.place}/") else None
        answer = self._own_answer(scope, below)
        if answer is None:
            await self._app({**scope, "path": below}, receive, send_with_headers)
        else:
            await answer(scope, receive, send_with_headers)

    def _own_answer(self, scope: Scope, path: str | None) -> Response | None:
        request = HTTPConnection(scope)
        if refused := foreign(request.headers, LOOPBACK, self._port):
            return PlainTextResponse(f"{refused}\n", 403)
        given = request.query_params.get("token") if path == "/" else None
        if given is not None:
            return self._exchanged(given, request.query_params.get("run", self.run))
        cookie = request.cookies.get(_COOKIE, "")
        if path is None or not hmac.compare_digest(cookie.encode(), self._secret.encode()):
            return PlainTextResponse("Open the link that `wink debug` prints\n", 401)
        return None

    def _exchanged(self, given: str, run: str) -> Response:
        """Return the page with the cookie, for the token; it does so once."""
        if not self.links.take(given):
            return HTMLResponse(_USED, 401)
        # No redirect: after a click on another site, the browser would not send the cookie with it.
        answer = HTMLResponse(_ENTER.format(quote(run)))
        place = f"{self.place}/"
        answer.set_cookie(_COOKIE, self._secret, path=place, httponly=True, samesite="strict")
        return answer

    # Requests

    async def _get(self, request: Request) -> Response:
        path, query = request.path_params["path"], dict(request.query_params)
        return await _answer(lambda: self.views.get_json(path, query))

    async def _post(self, request: Request) -> Response:
        name, target = request.path_params["action"], request.path_params["target"]
        name = "approve" if name == "approvals" else name
        action = self._posts.get(name)
        if action is None or not self.views.writable:
            return _json({"error": f"{name} is not possible here"}, 404)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return _json({"error": "send application/json"}, 400)
        if "origin" not in request.headers:
            return _json({"error": "Origin header missing"}, 403)
        try:
            body = json.loads(await _body(request))
        except (ValueError, RecursionError) as error:
            return _json({"error": f"the body is not JSON: {error}"}, 400)
        if not isinstance(body, dict):
            return _json({"error": "the body must be an object"}, 400)
        return await _answer(lambda: to_json(action(self.views.path, target, cast("Json", body))))

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        watch, silent = Watch(self.views), 0.0
        yield "retry: 1000\n\n"
        while not self._stopping.is_set():
            for name, data in await run_in_threadpool(lambda: list(watch.news())):
                yield f"event: {name}\ndata: {to_json(data)}\n\n"
                silent = 0.0
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _POLL)
            silent += _POLL
            if silent >= _SILENCE:
                yield ":\n\n"
                silent = 0.0

    async def _file(self, request: Request) -> Response:
        found = _FILES.get(request.path_params["name"])
        if found is None or not (_STATIC / found[0]).is_file():
            return PlainTextResponse("Not found\n", 404)
        return FileResponse(_STATIC / found[0], media_type=found[1])


async def _answer(made: Callable[[], str]) -> Response:
    """Return the JSON that a function makes, which may take long, or why there is none."""
    try:
        return Response(await run_in_threadpool(made), media_type="application/json")
    except NotFound as error:
        return _json({"error": str(error)}, 404)
    except (WinkError, OSError) as error:
        return _json({"error": str(error)}, 409)
    except (LookupError, RecursionError, ValueError) as error:
        return _json({"error": str(error)}, 400)


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


async def _body(request: Request) -> bytes:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _MAX_BODY:
            raise ValueError("too large")
    return data


# What changes while the page is open

_FIRST = 20
"""How many of the newest runs a new page is told about: they may have changed since it asked."""


class Watch:
    """Tells what has changed since it was last asked; looks at names and times of files only."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._seen: dict[str, tuple[int, int]] | None = None
        """Time and size of each run's file."""
        self._running: set[str] = set()
        self._changed_at: object = None
        self._wait = 0
        """Looks until the page is told that the history has changed, if no run says why."""
        self._approvals: list[Any] | None = None

    def news(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and data of events."""
        files, seen = dict(self._files()), self._seen
        if seen is None:
            changed = set(sorted(files, key=lambda run_id: files[run_id])[-_FIRST:])
        else:
            changed = {run_id for run_id in files if files[run_id] != seen.get(run_id)}
        # The end of a run does not change its file.
        looked_at = sorted(changed | (self._running & files.keys()))
        summaries = [self._views.summary(run_file(self._views.store, each)) for each in looked_at]
        told = [each for each in summaries if each["id"] in changed or each["state"] != "running"]
        self._seen = files
        self._running = {each["id"] for each in summaries if each["state"] == "running"}
        if told:
            yield "runs", told
        is_gone = seen is not None and not seen.keys() <= files.keys()
        if self._is_outdated(seen is None, bool(told)) or is_gone:
            yield "changed", {}  # by an undo, a merge or a deletion
        approvals = list(self._views.approvals())
        if approvals != self._approvals:
            self._approvals = approvals
            yield "approvals", approvals

    def _is_outdated(self, is_first: bool, is_told: bool) -> bool:
        """Whether the history has changed, but not by a call: its run is saved right after it."""
        before, self._changed_at = self._changed_at, self._views.changed_at()
        if before != self._changed_at and not is_first:
            self._wait = 2
        if is_told or not self._wait:
            self._wait = 0
            return False
        self._wait -= 1
        return not self._wait

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        try:
            with os.scandir(self._views.store / "runs") as found:
                for each in found:
                    if each.name.endswith(".jsonl"):
                        status = each.stat(follow_symlinks=False)
                        name = each.name.removesuffix(".jsonl")
                        yield name, (status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            return


# Serving


def serve(
    workspace: Path,
    *,
    on_ready: Callable[[str], object],
    run: str = "",
    port: int = 0,
    actions: Actions | None = None,
) -> None:
    """Serve the debugger of a workspace until interrupted.

    Args:
        on_ready: Gets the link.
        run: The id of a run to open the page with.
        port: By default any free one.

    Raises:
        OSError: The port cannot be opened.
    """
    actions = actions or Actions.ours()
    views = Views(workspace, approvals=lambda: actions.approvals(views.path))
    with listen(port=port) as listening, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(views, listening, actions, run, on_ready))


def _warm(views: Views, run: str) -> None:
    with no_collection():
        views.warm(run)
        gc.freeze()  # all of it stays: each later collection would look through it for nothing


async def _serve(
    views: Views,
    listening: sockets.socket,
    actions: Actions,
    run: str,
    on_ready: Callable[[str], object],
) -> None:
    port = listening.getsockname()[1]
    debugger = Debugger(views, port=port, actions=actions, run=run)
    # Most of the work for the first page, while the browser starts.
    threading.Thread(target=_warm, args=[views, run], daemon=True).start()
    with announced(views.path, debugger.links.address):
        on_ready(debugger.links.new())
        await serve_app(debugger.app, listening, on_stop=debugger.stop)
