"""Web sites on loopback for the browser tests; each remembers what it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Site:
    """A server on a port of its own. Pages are texts, or functions that answer the request."""

    def __init__(self) -> None:
        self.pages: dict[str, str | Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                page = site.pages.get(self.path)
                if page is None:
                    self.send_error(404)
                elif callable(page):
                    page(self)
                else:
                    answer(self, page)

            def log_message(self, *args: object) -> None:
                """Nothing to say."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.host = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def answer(request: BaseHTTPRequestHandler, body: str, status: int = 200, **headers: str) -> None:
    data = body.encode()
    request.send_response(status)
    request.send_header("Content-Type", "text/html; charset=utf-8")
    request.send_header("Content-Length", str(len(data)))
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(data)


def redirect(target: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda request: answer(request, "", 302, Location=target)
