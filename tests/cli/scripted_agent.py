"""Runs another vendor's agent with a scripted model, where nothing but loopback can be reached.

A program of its own, since it works in a network namespace: `unshare --net python scripted_agent.py
SPEC`. The model speaks whatever the agent asks for: Anthropic's Messages, OpenAI's Responses and
chat completions, Gemini's content stream.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

PORT = 8123
"""Where the model is: nobody else is in the namespace."""
SUB = "SUBTASK"
"""Begins the task of a sub-agent, which has a script of its own."""
_NUMBERS = count(1)


class Model(ThreadingHTTPServer):
    """Plays turns: each is a list of calls, with a name and arguments, or a text."""

    daemon_threads = True

    def __init__(self, scripts: dict[str, list[Any]], log: Path) -> None:
        super().__init__(("127.0.0.1", PORT), _Handler)
        self._scripts = scripts
        self._log = log
        self._lock = threading.Lock()

    def turn(self, path: str, request: dict[str, Any]) -> tuple[str, list[Any]]:
        """Return what the model says, and which calls it makes."""
        with self._lock, self._log.open("a") as log:
            log.write(json.dumps({"path": path, "request": request}) + "\n")
        if not request.get("tools"):
            return "A title", []  # or something else that is not the conversation
        messages: list[dict[str, Any]] = (
            request.get("messages") or request.get("contents") or request["input"]
        )
        first = json.dumps([each for each in messages if each.get("role") == "user"])
        is_sub = SUB in first
        left = self._scripts["sub" if is_sub else "main"]
        with self._lock:
            turn: Any = left.pop(0) if left else "Done."
        return (turn, []) if isinstance(turn, str) else ("", turn)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Model  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as it is inherited
        pass

    def do_HEAD(self) -> None:
        self._send(b"", "text/plain")

    def do_GET(self) -> None:
        models = [{"id": "scripted", "object": "model", "name": "scripted"}]
        self._send(json.dumps({"object": "list", "data": models}).encode(), "application/json")

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            request: dict[str, Any] = json.loads(data)
        except ValueError:
            request = {}
        path = self.path.partition("?")[0]
        if "count" in path:  # tokens
            said = {"input_tokens": 1, "totalTokens": 1}
            self._send(json.dumps(said).encode(), "application/json")
            return
        text, calls = self.server.turn(path, request)
        number = next(_NUMBERS)
        if path.endswith("/messages"):
            events = _messages(text, calls, number, request)
        elif path.endswith("/responses"):
            events = _responses(text, calls, number, request)
        elif path.endswith("/chat/completions"):
            if not request.get("stream"):
                self._send(
                    json.dumps(_completion(text, calls, number)).encode(), "application/json"
                )
                return
            events = _chunks(text, calls, number)
        else:
            answer = _content(text, calls, number)
            if "stream" not in path:
                self._send(json.dumps(answer).encode(), "application/json")
                return
            events = iter([("", answer)])
        lines = [
            (f"event: {name}\n" if name else "")
            + f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
            for name, data in events
        ]
        self._send("".join(lines).encode(), "text/event-stream")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)


_Events = Iterator[tuple[str, Any]]


def _messages(text: str, calls: list[Any], number: int, request: dict[str, Any]) -> _Events:
    message: dict[str, Any] = {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": request["model"],
        "content": [], "stop_reason": None, "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip
    yield "message_start", {"type": "message_start", "message": message}
    blocks: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if text:
        blocks.append(({"type": "text", "text": ""}, {"type": "text_delta", "text": text}))
    for place, (name, arguments) in enumerate(calls):
        start: dict[str, Any] = {
            "type": "tool_use",
            "id": f"toolu_{number}_{place}",
            "name": name,
            "input": {},
        }
        blocks.append((start, {"type": "input_json_delta", "partial_json": json.dumps(arguments)}))
    for index, (start, delta) in enumerate(blocks):
        for kind, more in (
            ("content_block_start", {"content_block": start}),
            ("content_block_delta", {"delta": delta}),
            ("content_block_stop", {}),
        ):
            yield kind, {"type": kind, "index": index, **more}
    delta = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    usage = {"output_tokens": 1}
    yield "message_delta", {"type": "message_delta", "delta": delta, "usage": usage}
    yield "message_stop", {"type": "message_stop"}


def _responses(text: str, calls: list[Any], number: int, request: dict[str, Any]) -> _Events:
    custom = {each.get("name") for each in request["tools"] if each["type"] == "custom"}
    items: list[dict[str, Any]] = []
    if text:
        content = [{"type": "output_text", "text": text}]
        item = {"type": "message", "id": f"m{number}", "role": "assistant", "content": content}
        items.append(item)
    for place, (name, arguments) in enumerate(calls):
        own = {"id": f"f{number}_{place}", "call_id": f"c{number}_{place}", "name": name}
        if name in custom:
            items.append({"type": "custom_tool_call", **own, "input": arguments})
        else:
            given = json.dumps(arguments)
            items.append({"type": "function_call", **own, "arguments": given})
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    response = {"id": f"r{number}"}
    yield "response.created", {"type": "response.created", "response": response}
    for item in items:
        kind = "response.output_item.done"
        yield kind, {"type": kind, "item": item}
    done = {**response, "usage": usage}
    yield "response.completed", {"type": "response.completed", "response": done}


def _tool_calls(calls: list[Any], number: int) -> list[dict[str, Any]]:
    return [
        {
            "index": place,
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for place, (name, arguments) in enumerate(calls)
    ]


def _completion(text: str, calls: list[Any], number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = _tool_calls(calls, number)
    reason = "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    own = {"id": f"chat{number}", "object": "chat.completion", "created": 1, "model": "scripted"}
    return {**own, "choices": [choice], "usage": usage}


def _chunks(text: str, calls: list[Any], number: int) -> _Events:
    own = {"id": f"chat{number}", "created": 1, "model": "scripted"}
    own["object"] = "chat.completion.chunk"
    delta: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        delta["tool_calls"] = _tool_calls(calls, number)
    yield "", {**own, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    reason = "tool_calls" if calls else "stop"
    yield "", {**own, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    yield "", {**own, "choices": [], "usage": usage}
    yield "", "[DONE]"


def _content(text: str, calls: list[Any], number: int) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"text": text}] if text else []
    parts += [{"functionCall": {"name": name, "args": arguments}} for name, arguments in calls]
    candidate = {"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    return {"candidates": [candidate], "usageMetadata": usage, "responseId": f"r{number}"}


def bring_up_loopback() -> None:
    """Make loopback work, as `ip link set lo up` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # up, and running
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


def main(spec: dict[str, Any]) -> int:
    """Start the model, and run the agent."""
    bring_up_loopback()
    with Model(spec["scripts"], Path(spec["log"])) as model:
        threading.Thread(target=model.serve_forever, args=(0.01,), daemon=True).start()
        process = subprocess.Popen(
            spec["command"], cwd=spec["cwd"], env=spec["env"], stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):  # to cancel it
            signal.signal(number, lambda number, _: os.killpg(process.pid, number))
        return process.wait()


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
