"""A server on loopback that speaks the Messages API with streaming, and plays fixed turns."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

from weakincentives.adapters import ModelTurn
from weakincentives.core.call import ToolCall
from weakincentives.errors import (
    MalformedResponse,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
)

Turns = Sequence[ModelTurn | ProviderError] | Callable[[dict[str, Any]], ModelTurn | ProviderError]
NATIVE = {"bash": "Bash", "edit": "Edit", "read": "Read", "write": "Write"}


class MessagesServer(ThreadingHTTPServer):
    """Answers each request for a message with the next turn."""

    daemon_threads = True

    def __init__(self, turns: Turns, keeps_calls: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.choose = turns if callable(turns) else None
        self.turns = [] if callable(turns) else list(turns)
        self.keeps_calls = keeps_calls
        self.requests: list[dict[str, Any]] = []
        self.numbers = count(1)
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """What makes the program speak to this server."""
        return {"ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": "not-a-key"}

    def tool_results(self) -> list[dict[str, Any]]:
        """Return all tool results that reached the model, in order, each once."""
        found: dict[str, dict[str, Any]] = {}
        for request in self.requests:
            for message in request["messages"]:
                if isinstance(message["content"], list):
                    for block in message["content"]:
                        if block["type"] == "tool_result":
                            found[block["tool_use_id"]] = block
        return list(found.values())


@contextmanager
def serving(turns: Turns, *, keeps_calls: bool = False) -> Iterator[MessagesServer]:
    """Serve turns, or what a function of the request returns.

    With ``keeps_calls``, the names and ids of calls are sent as they are.
    """
    server = MessagesServer(turns, keeps_calls)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: MessagesServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as it is inherited
        pass

    def do_HEAD(self) -> None:
        self._send(200, b"", "text/plain")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "count_tokens" in self.path:
            self._send(200, b'{"input_tokens": 1}', "application/json")
            return
        assert request["stream"], "the program asks for a stream"
        server = self.server
        server.requests.append(request)
        turn: ModelTurn | ProviderError = ModelTurn(text="The script has ended.")
        if server.choose is not None:
            turn = server.choose(request)
        elif server.turns:
            turn = server.turns.pop(0)
        if isinstance(turn, ProviderError):
            self._fail(turn)
            return
        events = _events(turn, request["model"], next(server.numbers), server.keeps_calls)
        self._send(200, b"".join(events), "text/event-stream")

    def _fail(self, error: ProviderError) -> None:
        if isinstance(error, MalformedResponse):
            self._send(200, b"<html>This is not an answer.</html>", "text/html")
        elif error.code == "TIMEOUT":
            self.server.closing.wait(600)
        elif error.code == "NETWORK":
            begun = b"".join(
                _events(ModelTurn(text="It is"), "claude", next(self.server.numbers))[:3]
            )
            self._head(200, len(begun) + 1000, "text/event-stream")
            self.wfile.write(begun)
            self.close_connection = True
        else:
            status, kind = 503, "api_error"
            if isinstance(error, ProviderThrottled):
                status, kind = 429, "rate_limit_error"
            elif isinstance(error, ProviderRejected):
                status, kind = 401, "authentication_error"
            body = {"type": "error", "error": {"type": kind, "message": str(error)}}
            self._send(status, json.dumps(body).encode(), "application/json", error.retry_after)

    def _send(self, status: int, body: bytes, kind: str, retry_after: float | None = None) -> None:
        self._head(status, len(body), kind, retry_after)
        self.wfile.write(body)

    def _head(self, status: int, length: int, kind: str, retry_after: float | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(length))
        if retry_after is not None:
            self.send_header("retry-after", str(int(retry_after)))
        self.end_headers()


def _events(turn: ModelTurn, model: str, number: int, keeps_calls: bool = False) -> list[bytes]:
    """Return the stream of a turn; every message and tool use has an id of its own."""
    usage = {"input_tokens": turn.usage.input_tokens, "output_tokens": 1}
    message = {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": model,
        "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    events: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if turn.text:
        half = len(turn.text) // 2
        pieces = [piece for piece in (turn.text[:half], turn.text[half:]) if piece]
        deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
        blocks.append(({"type": "text", "text": ""}, deltas))
    for place, call in enumerate(turn.tool_calls):
        name, use_id = _name(call), f"toolu_{number}_{place}"
        if keeps_calls:
            name, use_id = call.name, call.id
        start = {"type": "tool_use", "id": use_id, "name": name}
        text = call.params if isinstance(call.params, str) else json.dumps(call.params)
        deltas = [{"type": "input_json_delta", "partial_json": text}]
        blocks.append(({**start, "input": {}}, deltas))
    for index, (start, deltas) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        events += [{"type": "content_block_delta", "index": index, "delta": d} for d in deltas]
        events.append({"type": "content_block_stop", "index": index})
    reason = "tool_use" if turn.tool_calls else turn.stop_reason
    usage = {"output_tokens": turn.usage.output_tokens}
    delta = {"stop_reason": reason, "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": usage})
    events.append({"type": "message_stop"})
    return [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]


def _name(call: ToolCall) -> str:
    return NATIVE.get(call.name, f"mcp__wink__{call.name}")
