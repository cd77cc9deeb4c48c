"""A service that counts, in a process of its own: what takes effect there is not ours to undo."""

from __future__ import annotations

import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection

counts: Counter[str] = Counter()
most: Counter[str] = Counter()


class Orders(BaseHTTPRequestHandler):
    """It does not know a repeated order from a new one: ordering twice has effect twice.

    At ``/once`` it does.
    """

    def do_POST(self) -> None:
        key = self._key
        if self.path != "/once" or not counts[key]:
            counts[key] += 1
        most[key] = max(most[key], counts[key])
        self._answer(counts[key])

    def do_DELETE(self) -> None:
        counts[self._key] = 0
        self._answer(0)

    def do_GET(self) -> None:
        if self.path == "/all":
            self._answer({"counts": counts, "most": most})
        else:
            self._answer(counts[self._key])

    @property
    def _key(self) -> str:
        return self.headers["Idempotency-Key"]

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
        except OSError:
            """Whoever asked was killed."""

    def log_message(self, *args: object) -> None:
        """Nothing to say."""


class Service(HTTPServer):
    # One request at a time, in the order in which they came: what a killed client sent is done
    # before anyone asks about it.
    request_queue_size = 100

    def handle_error(self, *args: object) -> None:
        """A client that was killed in the middle of a request."""


def serve(port: Connection) -> None:
    service = Service(("127.0.0.1", 0), Orders)
    port.send(service.server_address[1])
    service.serve_forever()
