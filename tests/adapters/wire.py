"""A provider on loopback that speaks chat completions, responses and Anthropic's messages.

It answers with the turns it is given, and refuses what the real ones would: a wrong order of
messages, a call without an answer or a schema that strict mode does not take is a 400.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from waiting import is_readable
from weakincentives.adapters import Message, ModelTurn
from weakincentives.core.call import ToolCall
from weakincentives.errors import (
    MalformedResponse,
    ProviderError,
    ProviderThrottled,
    ProviderUnavailable,
)
from weakincentives.testing import Asked
from wire_messages import messages_problems, read_messages, stream_of

__all__ = ["Raw", "Script", "WireServer", "chat_sse", "responses_sse", "strict_problems"]

NO_REASONING = "plain-model"
"""A model that does not take a request for encrypted reasoning."""


@dataclass(frozen=True)
class Raw:
    """An answer byte by byte."""

    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False
    """Whether the connection ends before the answer does."""


Played: TypeAlias = ModelTurn | ProviderError | Raw


@dataclass
class Script:
    """What one adapter is answered with, and what it asked."""

    base_url: str
    turns: list[Played]
    fills_answers: bool = False
    """Whether the final answer, too, has a null for every key that it leaves out."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of each request; names as in "X-Mine"."""
    problems: list[str] = field(default_factory=list)
    """Why requests were refused."""
    api: str = ""

    def asked(self) -> list[Asked]:
        """Return every request, read back."""
        return [_READ[self.api](body) for body in self.bodies]

    def tool_texts(self) -> list[str]:
        """Return what the tools answered, as the last request has it."""
        return [each.text for each in self.asked()[-1].messages if each.role == "tool"]


class WireServer:
    """The server; every script has an address of its own."""

    def __enter__(self) -> WireServer:
        self.scripts: dict[str, Script] = {}
        self.stopping = threading.Event()
        self.connections = 0
        self.sent: list[bytes] = []
        """The bodies of all answers."""
        self.changed = threading.Condition()
        self._certificates = _Certificates()
        server = self

        class Handler(_Handler):
            wire = server

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._certificates.put_back()

    def is_left_alone(self) -> bool:
        """Wait until nobody is connected any more."""
        with self.changed:
            return self.changed.wait_for(lambda: self.connections == 0, timeout=120)

    def count(self, by: int) -> None:
        with self.changed:
            self.connections += by
            self.changed.notify_all()

    def play(self, *turns: Played, fills_answers: bool = False) -> Script:
        """Return a script that answers with these."""
        number = str(len(self.scripts))
        address = f"http://127.0.0.1:{self._server.server_address[1]}/{number}/v1"
        script = Script(address, list(turns), fills_answers)
        self.scripts[number] = script
        return script


class _Certificates:
    """Lets clients read one certificate only: all of them take most of the time of a test."""

    def __init__(self) -> None:
        self._before = os.environ.get("SSL_CERT_FILE")
        self._directory = TemporaryDirectory()
        known = ssl.create_default_context().get_ca_certs(binary_form=True)
        if known:
            one = Path(self._directory.name, "one.pem")
            one.write_text(ssl.DER_cert_to_PEM_cert(known[0]))
            os.environ["SSL_CERT_FILE"] = str(one)

    def put_back(self) -> None:
        self._directory.cleanup()
        os.environ.pop("SSL_CERT_FILE", None)
        if self._before is not None:
            os.environ["SSL_CERT_FILE"] = self._before


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Let a client go that hangs up; anything else is a bug of this file."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # passed on


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wire: WireServer

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def setup(self) -> None:
        self.wire.count(1)
        super().setup()

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self.wire.count(-1)

    def do_POST(self) -> None:  # the library's name
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, number, _, *path = self.path.split("/")
        script = self.wire.scripts[number]
        api = script.api = path[0]
        script.bodies.append(body)
        script.headers.append({name.title(): value for name, value in self.headers.items()})
        problems = [*_PROBLEMS[api](body), *_key_problems(self.headers)]
        if problems:
            script.problems += problems
            return self.send(_error(400, "invalid_request_error", problems[0]))
        if not script.turns:
            return self.send(_error(400, "invalid_request_error", "the script has no more turns"))
        turn = script.turns.pop(0)
        if isinstance(turn, Raw):
            return self.send(turn)
        if isinstance(turn, ModelTurn):
            return self.send(_answer(api, body, turn, script))
        return self.fail(api, body, turn)

    def fail(self, api: str, body: dict[str, Any], error: ProviderError) -> None:
        whole = _answer(api, body, ModelTurn(text="This will be cut off"), None)
        if error.code == "TIMEOUT":
            self.never_answer()
        elif error.code == "NETWORK":
            cut = whole.body[: len(whole.body) // 2]
            self.send(Raw(cut, content_type=whole.content_type, is_cut=True))
        elif isinstance(error, ProviderThrottled):
            wait = "" if error.retry_after is None else f"{error.retry_after:g}"
            headers = {"Retry-After": wait} if wait else {}
            self.send(_error(429, "rate_limit_exceeded", str(error), headers))
        elif isinstance(error, ProviderUnavailable):
            self.send(_error(503, "server_error", str(error)))
        elif isinstance(error, MalformedResponse):
            nonsense = b"{}"
            if body.get("stream"):
                nonsense = b'event: message_start\ndata: {"choices": 5, "output": 5}\n\n'
            self.send(Raw(nonsense, content_type=whole.content_type))
        else:
            text = f"Incorrect API key provided: {error}"
            self.send(_error(401, "invalid_api_key", text))

    def never_answer(self) -> None:
        """Wait until the client hangs up."""
        self.close_connection = True
        while not self.wire.stopping.is_set():
            if is_readable(self.connection.fileno(), 0.05):
                return

    def send(self, answer: Raw) -> None:
        self.wire.sent.append(answer.body)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        if "Date" in answer.headers:  # take the place of our own
            self._headers_buffer = [  # type: ignore[has-type]  # the library's
                line for line in self._headers_buffer if not line.startswith(b"Date:")
            ]
        for name, value in answer.headers.items():
            self.send_header(name, value)
        is_stream = answer.content_type == "text/event-stream"
        if is_stream:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(answer.body) * (2 if answer.is_cut else 1)))
        self.end_headers()
        if is_stream:
            for event in re.findall(rb".*?\n\n|.+", answer.body, re.DOTALL):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                self.wfile.flush()
            if not answer.is_cut:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(answer.body)
        self.close_connection = answer.is_cut


def _error(status: int, code: str, text: str, headers: dict[str, str] | None = None) -> Raw:
    kind = "invalid_request_error" if status < 429 else code
    error = {"message": text, "type": kind, "code": code, "param": None}
    return Raw(json.dumps({"error": error}).encode(), status, headers=headers or {})


# What a model's turn looks like


def _answer(api: str, body: dict[str, Any], turn: ModelTurn, script: Script | None) -> Raw:
    if api == "messages":
        number = 0 if script is None else len(script.bodies)
        return Raw(stream_of(body, turn, number), content_type="text/event-stream")
    turn = _as_strict_mode_writes(api, body, turn, script)
    make = _completion if api == "chat" else _response
    data = make(body, turn)
    if not body.get("stream"):
        return Raw(json.dumps(data).encode())
    split = chat_sse if api == "chat" else responses_sse
    return Raw(split(data), content_type="text/event-stream")


def _as_strict_mode_writes(
    api: str, body: dict[str, Any], turn: ModelTurn, script: Script | None
) -> ModelTurn:
    """Give keys that were left out a null, where the schema says that all are there."""
    tools = [each.get("function", each) for each in body.get("tools", ())]
    strict = {each["name"]: each["parameters"] for each in tools if each.get("strict")}
    calls = tuple(
        ToolCall(call.name, _filled(strict[call.name], call.params, strict[call.name]), call.id)
        if call.name in strict and isinstance(call.params, dict)
        else call
        for call in turn.tool_calls
    )
    text, form = turn.text, _answer_form(api, body)
    if script is not None and script.fills_answers and form and form["strict"] and not calls:
        text = json.dumps(_filled(form["schema"], json.loads(text), form["schema"]))
    return ModelTurn(
        text=text,
        tool_calls=calls,
        stop_reason=turn.stop_reason,
        usage=turn.usage,
        model=turn.model,
        wire=turn.wire,
    )


def _filled(node: dict[str, Any], value: Any, root: dict[str, Any]) -> Any:
    node = _resolved(node, root)
    if isinstance(value, list):
        return [_filled(node.get("items", {}), each, root) for each in value]
    if not isinstance(value, dict):
        return value
    found = {k: _filled(node.get("properties", {}).get(k, {}), v, root) for k, v in value.items()}
    for name, each in node.get("properties", {}).items():
        if name not in found and {"type": "null"} in each.get("anyOf", ()):
            found[name] = None
    return found


def _resolved(node: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    branches = [each for each in node.get("anyOf", ()) if each != {"type": "null"}]
    if len(branches) == 1:
        node = branches[0]
    if "$ref" in node:
        node = root["$defs"][node["$ref"].removeprefix("#/$defs/")]
    return node


def _answer_form(api: str, body: dict[str, Any]) -> dict[str, Any] | None:
    if api == "chat":
        return body.get("response_format", {}).get("json_schema")
    return body.get("text", {}).get("format")


def _arguments(call: ToolCall) -> str:
    return call.params if isinstance(call.params, str) else json.dumps(call.params)


def _completion(body: dict[str, Any], turn: ModelTurn) -> dict[str, Any]:
    beside = turn.wire or {"chat": {}, "calls": []}
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or None, "refusal": None}
    finish = "tool_calls" if turn.tool_calls else "stop"
    if turn.stop_reason == "refusal":
        message |= {"content": None, "refusal": turn.text}
    elif turn.stop_reason == "max_tokens":
        finish = "length"
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call)},
                **(beside["calls"][n] if beside["calls"] else {}),
            }
            for n, call in enumerate(turn.tool_calls)
        ]
    spent = turn.usage
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": turn.model or body["model"],
        "choices": [
            {"index": 0, "message": message | beside["chat"], "finish_reason": finish},
        ],
        "usage": {
            "prompt_tokens": spent.input_tokens,
            "completion_tokens": spent.output_tokens,
            "total_tokens": spent.total_tokens,
        },
    }


def chat_sse(completion: dict[str, Any]) -> bytes:
    """Return the same answer as a stream of small pieces."""
    about = {**completion, "object": "chat.completion.chunk"}
    usage, (choice,) = about.pop("usage"), about.pop("choices")
    deltas = [{"role": "assistant", "content": ""}, *_deltas(choice["message"]), {}]
    chunks = [
        {**about, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in deltas
    ]
    chunks[-1]["choices"][0]["finish_reason"] = choice["finish_reason"]
    chunks.append({**about, "choices": [], "usage": usage})
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join(
        [": a comment, as servers send to keep alive\n\n", *lines, "data: [DONE]\n\n"]
    ).encode()


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in message.items():
        if name == "tool_calls":
            for index, call in enumerate(value):
                function = {**call["function"], "arguments": ""}
                yield {"tool_calls": [{**call, "index": index, "function": function}]}
                for piece in _pieces(call["function"]["arguments"]):
                    yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
        elif name != "role" and isinstance(value, str):
            yield from ({name: piece} for piece in _pieces(value))
        elif name != "role" and value is not None:
            yield {name: value}


def _pieces(text: str) -> list[str]:
    return [text[n : n + 7] for n in range(0, len(text), 7)]


def _response(body: dict[str, Any], turn: ModelTurn) -> dict[str, Any]:
    output: list[dict[str, Any]] = list((turn.wire or {}).get("responses", ()))
    if turn.text:
        part = {"type": "output_text", "text": turn.text, "annotations": []}
        if turn.stop_reason == "refusal":
            part = {"type": "refusal", "refusal": turn.text}
        said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        output.append({**said, "content": [part]})
    output += [
        {
            "type": "function_call",
            "id": f"fc_{n}",
            "call_id": call.id,
            "name": call.name,
            "arguments": _arguments(call),
            "status": "completed",
        }
        for n, call in enumerate(turn.tool_calls)
    ]
    was_cut, spent = turn.stop_reason == "max_tokens", turn.usage
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": turn.model or body["model"],
        "status": "incomplete" if was_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
        "output": output,
        "usage": {
            "input_tokens": spent.input_tokens,
            "output_tokens": spent.output_tokens,
            "total_tokens": spent.total_tokens,
        },
    }


def responses_sse(response: dict[str, Any]) -> bytes:
    """Return the same answer as a stream of events."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item.get("id", "")}
        empty = {name: value for name, value in item.items() if name != "content"}
        events.append({"type": "response.output_item.added", **at, "item": empty})
        for part in item.get("content", ()):
            kind = part["type"]
            events += [
                {"type": f"response.{kind}.delta", **at, "content_index": 0, "delta": piece}
                for piece in _pieces(part.get("text") or part.get("refusal") or "")
            ]
        if item["type"] == "function_call":
            events += [
                {"type": "response.function_call_arguments.delta", **at, "delta": piece}
                for piece in _pieces(item["arguments"])
            ]
        events.append({"type": "response.output_item.done", **at, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    return "".join(
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': n})}\n\n"
        for n, event in enumerate(events)
    ).encode()


# What is refused

CHAT_FIELDS = frozenset(
    [
        "model",
        "messages",
        "tools",
        "tool_choice",
        "response_format",
        "stream",
        "stream_options",
        "temperature",
        "max_completion_tokens",
        "max_tokens",
        "parallel_tool_calls",
        "reasoning_effort",
    ]
)
MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}
"""The last is not OpenAI's, but that of servers whose models reason aloud."""
RESPONSES_FIELDS = frozenset(
    [
        "model",
        "instructions",
        "input",
        "tools",
        "tool_choice",
        "text",
        "stream",
        "store",
        "include",
        "temperature",
        "reasoning",
        "max_output_tokens",
        "parallel_tool_calls",
    ]
)
STRICT_KEYWORDS = frozenset(
    [
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "anyOf",
        "enum",
        "const",
        "$ref",
        "$defs",
        "description",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minItems",
        "maxItems",
    ]
)
STRICT_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"]
)


def _key_problems(headers: Any) -> Iterator[str]:
    if not re.fullmatch(r"Bearer \S+", headers.get("Authorization", "")):
        yield "You didn't provide an API key"


def _field_problems(body: dict[str, Any], known: frozenset[str]) -> Iterator[str]:
    for name in body:
        if name not in known:
            yield f"Unknown parameter: '{name}'"


def chat_problems(body: dict[str, Any]) -> Iterator[str]:
    """Yield what OpenAI's chat completions would not take."""
    yield from _field_problems(body, CHAT_FIELDS)
    if "stream_options" in body and not body.get("stream"):
        yield "The 'stream_options' parameter is only allowed when 'stream' is enabled"
    messages = body["messages"]
    if [m["role"] for m in messages].count("system") != 1 or messages[0]["role"] != "system":
        yield "the system message stands first, and once"
    waiting: list[str] = []
    seen: set[str] = set()
    for n, message in enumerate(messages):
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                yield f"messages.[{n}]: 'tool' must answer a preceding message with 'tool_calls'"
            else:
                waiting.remove(message["tool_call_id"])
            if not isinstance(message["content"], str):
                yield f"messages.[{n}]: a tool answers with text"
            continue
        if waiting:
            yield f"An assistant message with 'tool_calls' must be followed by answers to {waiting}"
        waiting = []
        for call in message.get("tool_calls", ()):
            waiting.append(call["id"])
            yield from _call_problems(n, call["id"], call["function"], seen)
        if isinstance(message.get("content"), list):
            yield from _part_problems(n, message, CHAT_PARTS)
        for name in message.keys() - MESSAGE_FIELDS:
            yield f"messages.[{n}]: unknown field '{name}'"
        if message.get("content") is None and not message.get("tool_calls"):
            yield f"messages.[{n}]: content is null"
    if waiting:
        yield f"An assistant message with 'tool_calls' must be followed by answers to {waiting}"
    tools = body.get("tools", ())
    yield from _tool_problems([each["function"] for each in tools if each["type"] == "function"])
    yield from _format_problems(body.get("response_format", {}).get("json_schema"))


CHAT_PARTS = {
    "text": r"(?s).+",
    "image_url": r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+=*",
    "input_audio": r"(wav|mp3) [A-Za-z0-9+/]+=*",
    "file": r"(?s).+ data:application/pdf;base64,[A-Za-z0-9+/]+=*",
}
INPUT_PARTS = {
    "input_text": CHAT_PARTS["text"],
    "input_image": CHAT_PARTS["image_url"],
    "input_file": CHAT_PARTS["file"],
}


def _part_problems(n: int, item: dict[str, Any], known: dict[str, str]) -> Iterator[str]:
    """Yield what is wrong with parts of content, each read back as one text."""
    for part in item.get("output") or item["content"]:
        kind, rest = part["type"], {name: each for name, each in part.items() if name != "type"}
        match kind:
            case "image_url":
                text = rest["image_url"]["url"]
            case "input_image":
                text = rest["image_url"]
            case "input_audio":
                text = "{format} {data}".format(**rest["input_audio"])
            case "file" | "input_file":
                text = "{filename} {file_data}".format(**rest.get("file", rest))
            case _:
                text = str(rest.get("text"))
        if kind not in known or not re.fullmatch(known[kind], text):
            yield f"[{n}]: invalid content part {kind!r}"


def responses_problems(body: dict[str, Any]) -> Iterator[str]:
    """Yield what OpenAI's responses API would not take."""
    yield from _field_problems(body, RESPONSES_FIELDS)
    wants_reasoning = "reasoning.encrypted_content" in body.get("include", ())
    if wants_reasoning and body["model"] == NO_REASONING:
        yield "Encrypted content is not supported with this model."
    waiting: list[str] = []
    seen: set[str] = set()
    for n, item in enumerate(body["input"]):
        kind = item.get("type", "message")
        if kind == "function_call_output":
            if item["call_id"] not in waiting:
                yield f"No tool call found for function call output with call_id {item['call_id']}"
            else:
                waiting.remove(item["call_id"])
            if isinstance(item["output"], list):
                yield from _part_problems(n, item, INPUT_PARTS)
        elif kind == "function_call":
            waiting.append(item["call_id"])
            yield from _call_problems(n, item["call_id"], item, seen)
        elif kind == "message":
            if waiting and item["role"] == "user":
                yield f"No tool output found for function call {waiting[0]}"
            if "role" not in item or "content" not in item:
                yield f"input[{n}]: a message has a role and content"
            elif item["role"] == "user" and isinstance(item["content"], list):
                yield from _part_problems(n, item, INPUT_PARTS)
        elif kind == "image_generation_call":
            if not item.get("result"):
                yield f"input[{n}]: a picture without a result"
        elif kind == "reasoning":
            if not body.get("store", True) and not item.get("encrypted_content"):
                yield f"Item '{item['id']}' not found: items are not persisted without 'store'"
        else:
            yield f"input[{n}]: unknown type {kind!r}"
    if waiting:
        yield f"No tool output found for function call {waiting[0]}"
    tools = [each for each in body.get("tools", ()) if each["type"] == "function"]
    for each in tools:
        if not isinstance(each.get("strict"), bool):
            yield f"tools: {each['name']} does not say whether it is strict"
    yield from _tool_problems(tools)
    yield from _format_problems(body.get("text", {}).get("format"))


def _call_problems(n: int, id: str, call: dict[str, Any], seen: set[str]) -> Iterator[str]:  # noqa: A002
    if not id or id in seen:
        yield f"[{n}]: the call id {id!r} is empty or was there before"
    seen.add(id)
    try:
        if not isinstance(json.loads(call["arguments"]), dict):
            yield f"[{n}]: arguments are not an object"
    except ValueError:  # what llama.cpp and vLLM say, and the other providers behind LiteLLM
        yield f"[{n}]: Failed to parse tool call arguments as JSON"


def _tool_problems(functions: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = [each["name"] for each in functions]
    if len(set(names)) < len(names):
        yield "tools: names must be unique"
    for each in functions:
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", each["name"]):
            yield f"Invalid function name {each['name']!r}"
        if not 1 <= len(each["description"]) <= 1024:
            yield f"Invalid description of {each['name']}: 1 to 1024 characters"
        if each["parameters"].get("type") != "object":
            yield f"Invalid schema for function '{each['name']}': not an object"
        if each.get("strict"):
            for problem in strict_problems(each["parameters"]):
                yield f"Invalid schema for function '{each['name']}': {problem}"


def _format_problems(form: dict[str, Any] | None) -> Iterator[str]:
    if form is None:
        return
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", form["name"]):
        yield f"Invalid name {form['name']!r}"
    if form["strict"]:
        for problem in strict_problems(form["schema"]):
            yield f"Invalid schema for response_format '{form['name']}': {problem}"


def strict_problems(schema: dict[str, Any]) -> Iterator[str]:
    """Yield what strict mode would not take of a schema."""
    if schema.get("type") != "object" or "anyOf" in schema:
        yield "schema must be a JSON Schema of 'type: \"object\"'"
    yield from _node_problems(schema, schema, ())


def _node_problems(node: Any, root: dict[str, Any], at: tuple[str, ...]) -> Iterator[str]:
    where = f"In context={at}"
    if not isinstance(node, dict):
        yield f"{where}, {node!r} is not a schema"
        return
    for keyword in node:
        if keyword not in STRICT_KEYWORDS:
            yield f"{where}, '{keyword}' is not permitted"
    if "$ref" in node:
        if len(node) > 1:
            yield f"{where}, $ref cannot have keywords {set(node) - {'$ref'}}"
        if node["$ref"] != "#" and node["$ref"].removeprefix("#/$defs/") not in root.get(
            "$defs", {}
        ):
            yield f"{where}, reference to component '{node['$ref']}' which was not found"
        return
    if "type" not in node and "anyOf" not in node:
        yield f"{where}, schema must have a 'type' key"
    if "format" in node and node["format"] not in STRICT_FORMATS:
        yield f"{where}, '{node['format']}' is not a valid format"
    if node.get("type") == "object":
        if node.get("additionalProperties") is not False:
            yield f"{where}, 'additionalProperties' is required to be supplied and to be false"
        if sorted(node.get("required", ())) != sorted(node.get("properties", {})):
            yield f"{where}, 'required' must be an array including every key in properties"
    if node.get("type") == "array" and "items" not in node:
        yield f"{where}, array schema missing items"
    for name, each in {**node.get("properties", {}), **node.get("$defs", {})}.items():
        yield from _node_problems(each, root, (*at, name))
    for n, each in enumerate(node.get("anyOf", ())):
        yield from _node_problems(each, root, (*at, str(n)))
    if "items" in node:
        yield from _node_problems(node["items"], root, (*at, "items"))


# Requests read back


def _read_chat(body: dict[str, Any]) -> Asked:
    system, *rest = body["messages"]
    return Asked(
        system=system["content"],
        messages=[_message_of(each) for each in rest],
        tools=[each["function"]["name"] for each in body.get("tools", ())],
    )


def _message_of(message: dict[str, Any]) -> Message:
    calls = [_call_of(call["function"], call["id"]) for call in message.get("tool_calls", ())]
    return Message(
        role={"assistant": "model"}.get(message["role"], message["role"]),
        text=message.get("content") or "",
        tool_calls=tuple(calls),
        call_id=message.get("tool_call_id", ""),
    )


def _read_responses(body: dict[str, Any]) -> Asked:
    messages: list[Message] = []
    text, calls, is_open = "", [], False

    def close() -> None:
        nonlocal text, calls, is_open
        if is_open:
            messages.append(Message(role="model", text=text, tool_calls=tuple(calls)))
        text, calls, is_open = "", [], False

    for item in body["input"]:
        if item.get("type") == "function_call_output":
            close()
            messages.append(Message(role="tool", text=item["output"], call_id=item["call_id"]))
        elif item.get("role") == "user":
            close()
            messages.append(Message(role="user", text=item["content"]))
        else:
            is_open = True
            if item.get("type") == "function_call":
                calls.append(_call_of(item, item["call_id"]))
            elif "role" in item:
                text += _text_of(item["content"])
    close()
    tools = [each["name"] for each in body.get("tools", ())]
    return Asked(system=body["instructions"], messages=messages, tools=tools)


def _text_of(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)


def _call_of(function: dict[str, Any], id: str) -> ToolCall:  # noqa: A002
    params = json.loads(function["arguments"])
    return ToolCall(function["name"], params.get("not_json", params), id)


_PROBLEMS = {
    "chat": chat_problems,
    "responses": responses_problems,
    "messages": messages_problems,
}
_READ = {"chat": _read_chat, "responses": _read_responses, "messages": read_messages}


def everything_in(error: BaseException) -> str:
    """Return all that can be seen of an error and of those behind it, at whatever depth."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and each not in seen:
            seen.append(each)
            left += [each.__cause__, each.__context__]
    parts = [f"{each!r} {each} {vars(each)} {getattr(each, 'request', '')}" for each in seen]
    headers = [str(dict(each.request.headers)) for each in seen if hasattr(each, "request")]
    return "\n".join([*traceback.format_exception(error), *parts, *headers])
