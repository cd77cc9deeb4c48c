"""The server answers only the browser that has opened the link, and only its own page."""

from __future__ import annotations

import asyncio
import json
import socket as sockets
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from run_world import Work, opened

from weakincentives.core.serving import listen, serve_app
from weakincentives.debugger import Views
from weakincentives.debugger.server import Actions, Debugger, Watch
from weakincentives.errors import WinkError


class Server:
    """A server in a thread, and a client that sends what it is told to."""

    def __init__(self, views: Views, actions: Actions) -> None:
        self._listening = listen()
        self.port = self._listening.getsockname()[1]
        self.debugger: Debugger
        self._views, self._actions = views, actions
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[None]
        self.cookie = ""
        self._connections: list[HTTPConnection] = []

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.debugger = Debugger(self._views, port=self.port, actions=self._actions)
        serving = serve_app(self.debugger.app, self._listening, on_stop=self.debugger.stop)
        self._task = asyncio.ensure_future(serving)
        self._ready.set()
        await asyncio.wait([self._task])

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()
            self._listening.close()
        for connection in self._connections:
            connection.close()

    def open(self, method: str, path: str, body: Any = None, **headers: str) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        self._connections.append(connection)
        sent = {"Cookie": self.cookie} if self.cookie else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else json.dumps(body)
        place = f"{self.debugger.place}{path}"
        connection.request(method, place, data, {k: v for k, v in sent.items() if v})
        return connection.getresponse()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return read(self.open("GET", path, **headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        ours = {"Origin": self.origin, "Content_Type": "application/json"}
        return read(self.open("POST", path, body, **(ours | headers)))

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_in(self) -> None:
        response = self.open("GET", f"/?{self.debugger.links.new().partition('?')[2]}")
        response.read()
        self.cookie = response.headers["Set-Cookie"].partition(";")[0]


def read(response: HTTPResponse) -> tuple[int, Any]:
    data = response.read()
    if response.headers.get("Content-Type", "").startswith("application/json"):
        return response.status, json.loads(data)
    return response.status, data.decode()


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    with opened(tmp_path) as work:
        work.write("a1")
        yield work


@pytest.fixture
def server(work: Work) -> Iterator[Server]:
    def undo(workspace: Path, target: str, body: dict[str, Any]) -> dict[str, Any]:
        if "refuse" in body:
            raise WinkError("it has changed since")
        if "wrong" in body:
            raise ValueError("call must be a number")
        return {"workspace": str(workspace), "target": target, "body": body}

    waiting = [{"id": "q1", "tool": "write"}]
    actions = Actions(posts={"undo": undo, "approve": undo}, approvals=lambda _: waiting)
    views = Views(work.files.root, approvals=lambda: waiting)
    server = Server(views, actions)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def test_the_link_works_once(server: Server) -> None:
    link = f"/?{server.debugger.links.new().partition('?')[2]}"

    first = server.open("GET", link)
    first.read()
    second = server.open("GET", link)

    assert first.status == 200
    cookie = first.headers["Set-Cookie"]
    assert f"Path={server.debugger.place}/;" in cookie  # else every server of this host gets it
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    status, page = read(second)
    assert status == 401
    assert "wink debug" in page
    assert second.headers["Set-Cookie"] is None


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/workspace", "/api/events", "/nothing"])
def test_without_the_cookie_nothing_is_answered(server: Server, path: str) -> None:
    assert server.get(path) == (401, "Open the link that `wink debug` prints\n")
    server.cookie = "wink_debug=guessed"
    assert server.get(path)[0] == 401


def test_outside_its_own_path_there_is_nothing_even_with_the_cookie(server: Server) -> None:
    server.log_in()
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    for path in ("/", "/api/workspace", f"{server.debugger.place}x/api/workspace"):
        connection.request("GET", path, headers={"Cookie": server.cookie})
        response = connection.getresponse()
        response.read()
        assert response.status == 401
    connection.close()


def test_a_wrong_token_does_not_use_up_the_link(server: Server) -> None:
    assert server.get("/?token=guessed")[0] == 401
    server.log_in()
    assert server.get("/api/workspace")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""]
)
def test_a_foreign_host_is_refused(server: Server, host: str) -> None:
    """DNS rebinding: a page of another name that leads here has its cookie, and our port."""
    server.log_in()

    connection = sockets.create_connection(("127.0.0.1", server.port), timeout=60)
    lines = [
        f"GET {server.debugger.place}/api/workspace HTTP/1.1",
        f"Host: {host.format(port=server.port)}",
        f"Cookie: {server.cookie}",
        "Connection: close",
    ]
    with connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b""))

    assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))
    assert b"writable" not in answer


def test_other_names_of_this_machine_are_ours(server: Server) -> None:
    server.log_in()

    assert server.get("/api/workspace", Host=f"localhost:{server.port}")[0] == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        "https://127.0.0.1:{port}",
        "http://localhost:{port}",
    ],
)
def test_a_foreign_origin_is_refused(server: Server, origin: str) -> None:
    server.log_in()
    origin = origin.format(port=server.port)

    assert server.get("/api/workspace", Origin=origin) == (403, "Origin header not allowed\n")
    assert server.post("/api/runs/x/undo", {}, Origin=origin)[0] == 403


def test_every_answer_has_the_security_headers(server: Server) -> None:
    refused = server.open("GET", "/api/workspace")
    refused.read()
    server.log_in()
    for response in (refused, server.open("GET", "/api/workspace"), server.open("GET", "/none")):
        response.read()
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.headers["Cache-Control"] == "no-store"


def test_views_are_answered_as_json(server: Server, work: Work) -> None:
    server.log_in()

    status, view = server.get(f"/api/runs/{work.run.id}")

    assert status == 200
    assert [row["tool"] for row in view["calls"]] == ["write"]
    query = "serial=1&path=a"
    assert server.get(f"/api/runs/{work.run.id}/file?{query}")[1]["text"] == "a1"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("runs/none", 404),
        ("runs/..%2f..%2fx", 404),
        ("nothing", 404),
        ("runs/{run}/file?serial=1&path=../../etc/passwd", 400),
        ("runs/{run}/file?serial=1&path=%2Fetc%2Fpasswd", 400),
        ("runs/{run}/file?serial=x&path=a", 400),
        ("runs/{run}/file?serial=99&path=a", 404),
        ("runs/{run}/versions", 400),
        ("runs/{run}/calls/99", 404),
        ("runs/{run}/slices?key=nope", 404),
        ("compare?a=x&b=y", 400),
    ],
)
def test_wrong_requests_are_refused_with_a_reason(
    server: Server, work: Work, path: str, status: int
) -> None:
    server.log_in()

    answer = server.get(f"/api/{path.format(run=work.run.id)}")

    assert answer[0] == status
    assert answer[1]["error"]


def test_large_answers_are_compressed(server: Server, work: Work) -> None:
    server.log_in()

    response = server.open("GET", f"/api/runs/{work.run.id}", Accept_Encoding="gzip")
    response.read()

    assert response.headers["Content-Encoding"] == "gzip"


# Actions


def test_an_action_gets_the_run_and_the_body(server: Server, work: Work) -> None:
    server.log_in()

    answer = server.post(f"/api/runs/{work.run.id}/undo", {"call": 1})

    root = str(work.files.root)
    assert answer == (200, {"workspace": root, "target": work.run.id, "body": {"call": 1}})
    assert server.post("/api/approvals/q1", {"approved": True})[1]["target"] == "q1"


def test_an_action_that_is_refused_says_why(server: Server) -> None:
    server.log_in()

    assert server.post("/api/runs/x/undo", {"refuse": 1}) == (
        409,
        {"error": "it has changed since"},
    )
    assert server.post("/api/runs/x/undo", {"wrong": 1}) == (
        400,
        {"error": "call must be a number"},
    )
    assert server.post("/api/runs/x/fly", {})[0] == 404
    assert server.post("/api/runs/x/undo", [1])[0] == 400


def test_an_action_needs_json_and_our_origin(server: Server) -> None:
    """A form of another page can send neither."""
    server.log_in()

    assert server.post("/api/runs/x/undo", {}, Content_Type="text/plain")[0] == 400
    assert server.post("/api/runs/x/undo", {}, Origin="")[0] == 403


# Live


def events(response: HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    while line := response.fp.readline().decode():
        if line.startswith("event: "):
            name = line.removeprefix("event: ").strip()
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_changes_are_told_as_they_happen(server: Server, work: Work) -> None:
    server.log_in()
    response = server.open("GET", "/api/events")
    stream = events(response)

    assert response.headers["Content-Type"].startswith("text/event-stream")
    name, data = next(stream)
    assert (name, [(run["id"], run["calls"]) for run in data]) == ("runs", [(work.run.id, 1)])
    assert next(stream) == ("approvals", [{"id": "q1", "tool": "write"}])
    work.write("b1")
    while (news := next(stream))[1][0]["calls"] != 2:
        assert news[0] == "runs"
    work.saved.close()
    while not (news[0] == "runs" and news[1][0]["state"] == "finished"):
        news = next(stream)
    response.close()


def test_what_was_undone_elsewhere_is_told(work: Work) -> None:
    work.write("b1")
    watch = Watch(Views(work.files.root))
    assert list(watch.news())
    assert list(watch.news()) == []

    work.files.undo(work.files.history()[-1])

    news = [each for _ in range(4) for each in watch.news()]
    assert news == [("changed", {})]


def test_numbers_that_json_does_not_have_are_texts(work: Work) -> None:
    odd = [{"arguments": {"x": float("nan"), "y": [float("inf")]}}]
    server = Server(Views(work.files.root, approvals=lambda: odd), Actions())
    server.start()
    try:
        server.log_in()
        workspace = server.get("/api/workspace")[1]
    finally:
        server.stop()
    assert workspace["approvals"] == [{"arguments": {"x": "nan", "y": ["inf"]}}]


def test_the_server_stops_while_a_page_is_open(server: Server) -> None:
    server.log_in()
    response = server.open("GET", "/api/events")
    next(events(response))

    stopping = threading.Thread(target=server.stop)
    stopping.start()
    assert all(name for name, _ in events(response))  # until the stream has ended

    stopping.join()
    with pytest.raises(ConnectionRefusedError):
        sockets.create_connection(("127.0.0.1", server.port), timeout=5)


def test_a_client_that_does_not_read_blocks_nobody(server: Server, work: Work) -> None:
    server.log_in()
    idle = [server.open("GET", "/api/events") for _ in range(5)]

    assert server.get(f"/api/runs/{work.run.id}")[0] == 200
    for each in idle:
        each.close()
