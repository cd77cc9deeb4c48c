"""Runs that are longer than the model's context window, over the wire."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from wire import Raw, WireServer, chat_problems

import weakincentives as wink
from weakincentives.adapters import OpenAIAdapter, RunConfig
from weakincentives.errors import ContextOverflow, ProviderError

openai = pytest.importorskip("openai")

WINDOW = 16_384
TURNS = 200


# How providers say that a request is too long


@pytest.fixture(scope="module")
def wire() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


def ask(wire: WireServer, status: int, error: dict[str, Any]) -> ProviderError:
    """Return the error of a run whose provider rejects everything."""
    refusal = Raw(json.dumps({"error": error}).encode(), status=status)
    script = wire.play(*[refusal] * 5)
    section = wink.MarkdownSection(title="Task", template="Do it.")
    prompt = wink.Prompt(wink.PromptTemplate(sections=[section]))
    adapter = OpenAIAdapter("m", base_url=script.base_url, api_key="sk-1234567890")
    with pytest.raises(ProviderError) as raised:
        adapter.evaluate(prompt, wink.Session(), config=RunConfig(context=None))
    return raised.value


@pytest.mark.parametrize(
    ("status", "error", "limit", "tokens"),
    [
        pytest.param(
            400,
            {
                "message": "This model's maximum context length is 128000 tokens. However, your "
                "messages resulted in 130500 tokens. Please reduce the length of the messages.",
                "type": "invalid_request_error",
                "code": "context_length_exceeded",
            },
            128_000,
            130_500,
            id="openai",
        ),
        pytest.param(
            400,
            {
                "message": "Your input exceeds the context window of this model. Please adjust "
                "your input and try again.",
                "code": "context_length_exceeded",
            },
            None,
            None,
            id="openai-responses",
        ),
        pytest.param(
            400,
            {
                "message": "prompt is too long: 208310 tokens > 200000 maximum",
                "type": "invalid_request_error",
            },
            200_000,
            208_310,
            id="anthropic",
        ),
        pytest.param(
            400,
            {
                "message": "request (9000 tokens) exceeds the available context size (8192 "
                "tokens), try increasing it",
                "type": "exceed_context_size_error",
                "code": 400,
                "n_prompt_tokens": 9000,
                "n_ctx": 8192,
            },
            8_192,
            9_000,
            id="llama.cpp",
        ),
        pytest.param(
            400,
            {
                "message": "This model's maximum context length is 4096 tokens. However, you "
                "requested 5000 tokens (4500 in the messages, 500 in the completion).",
                "code": 400,
            },
            4_096,
            None,
            id="vllm",
        ),
        pytest.param(
            400,
            {
                "message": "litellm.ContextWindowExceededError: litellm.BadRequestError: "
                "AnthropicError - prompt is too long: 210,000 tokens > 200,000 maximum"
            },
            200_000,
            210_000,
            id="litellm",
        ),
        pytest.param(
            400,
            {
                "message": "The input token count (1200000) exceeds the maximum number of tokens "
                "allowed (1048576)."
            },
            1_048_576,
            1_200_000,
            id="gemini",
        ),
        pytest.param(
            413, {"code": "request_too_large", "message": "too large"}, None, None, id="413"
        ),
        pytest.param(
            400,
            {"message": f"prompt is too long: {'9' * 5000} tokens > , maximum"},
            None,
            None,
            id="nonsense",
        ),
    ],
)
def test_a_request_that_is_too_long_is_recognized(
    wire: WireServer, status: int, error: dict[str, Any], limit: int | None, tokens: int | None
) -> None:
    raised = ask(wire, status, error)

    assert isinstance(raised, ContextOverflow), raised
    assert (raised.limit, raised.tokens) == (limit, tokens)
    assert "cannot take so long a conversation" in str(raised)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "Invalid schema for function 'look': context is required"),
        (401, "Incorrect API key provided"),
    ],
)
def test_other_rejections_are_not_taken_for_it(wire: WireServer, status: int, message: str) -> None:
    raised = ask(wire, status, {"message": message, "code": "invalid_request_error"})

    assert not isinstance(raised, ContextOverflow)


# A server with a small window


class SmallServer(ThreadingHTTPServer):
    """A model that takes 16k tokens, rejects longer requests, and makes 200 calls.

    It writes a file in every other turn, and reads a long one in between.
    """

    daemon_threads = True
    request_queue_size = 20

    def __init__(self, *, tells: bool, turns: int = TURNS) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tells = tells
        self.turns = turns
        self.bodies: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.rejected = 0
        self.summaries = 0
        self.kill_at: dict[int, str] = {}
        """When to kill the client: at which request, and before or after the answer."""
        self.client: subprocess.Popen[str] | None = None

    def handle_error(self, request: object, client_address: object) -> None:
        """Let a client go that was killed; anything else is a bug of this file."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # passed on

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def kill(self, when: str) -> bool:
        if self.kill_at.get(len(self.bodies)) != when or self.client is None:
            return False
        os.kill(self.client.pid, signal.SIGKILL)
        self.client.wait()
        return True


def tokens_of(body: dict[str, Any]) -> int:
    """Count tokens in a way of its own: words of up to five letters, and every other character."""
    text = json.dumps([body["messages"], body.get("tools", [])])
    return len(re.findall(r"\w{1,5}|[^\w\s]", text))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SmallServer

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:  # the library's name
        model = {"id": "small", "object": "model"}
        if self.server.tells:
            model |= {"max_model_len": WINDOW}  # type: ignore[dict-item]
        self._send(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:  # the library's name
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.bodies.append(body)
        if server.kill("before"):
            return
        server.problems += chat_problems(body)
        tokens = tokens_of(body)
        if tokens > WINDOW:
            server.rejected += 1
            text = (
                f"This model's maximum context length is {WINDOW} tokens. However, your messages "
                f"resulted in {tokens} tokens."
            )
            error = {"message": text, "code": "context_length_exceeded", "param": None}
            self._send(400, {"error": {**error, "type": "invalid_request_error"}})
        else:
            self._answer(body, tokens)
        server.kill("after")

    def _answer(self, body: dict[str, Any], tokens: int) -> None:
        server = self.server
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if "tools" not in body:
            server.summaries += 1
            message["content"] = f"Summary {server.summaries}: notes were written one by one."
        else:
            message |= self._turn(body)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        usage = {"prompt_tokens": tokens, "completion_tokens": 30, "total_tokens": tokens + 30}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        answer = {"id": "x", "created": 1, "model": "small", "choices": [choice], "usage": usage}
        if not body.get("stream"):
            return self._send(200, {**answer, "object": "chat.completion"})
        for call in message.get("tool_calls", ()):
            call["index"] = 0
        delta = {"index": 0, "delta": message, "finish_reason": reason}
        chunk = {**answer, "object": "chat.completion.chunk", "choices": [delta]}
        return self._send_raw(
            200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "text/event-stream"
        )

    def _turn(self, body: dict[str, Any]) -> dict[str, Any]:
        """Continue after the last call, however often it is asked."""
        last = body["messages"][-1]
        done = int(last["tool_call_id"].partition("-")[2]) if last["role"] == "tool" else 0
        if done == self.server.turns:
            return {"content": "All notes are written."}
        name, arguments = "read_file", {"path": "long.txt"}
        if done % 2:
            name, arguments = "write_file", {"path": f"notes/{done}.txt", "content": f"{done}\n"}
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call-{done + 1}", "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _send(self, status: int, data: object) -> None:
        self._send_raw(status, json.dumps(data), "application/json")

    def _send_raw(self, status: int, text: str, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Any:
    def start(**options: Any) -> SmallServer:
        server = SmallServer(**options)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        request.addfinalizer(stop)
        return server

    return start


def workspace(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "notes").mkdir(parents=True)
    text = "\n".join(f"{n}: the quick brown fox jumps over the lazy dog" for n in range(120))
    (project / "long.txt").write_text(text)
    return project


class Client:
    """The command line, on a directory, with a server."""

    def __init__(self, tmp_path: Path, server: SmallServer) -> None:
        self.project = workspace(tmp_path)
        self.server = server
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WINK_")},
            "HOME": str(tmp_path),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": "sk-1234567890",
        }

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "weakincentives.cli", *arguments, "-w", str(self.project)]
        self.server.client = subprocess.Popen(
            command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = self.server.client.communicate()
        return self.server.client.returncode, out, err


def sent(body: dict[str, Any]) -> str:
    return json.dumps([body["messages"], body.get("tools")])


@pytest.mark.heavy
@pytest.mark.parametrize("tells", [True, False], ids=["known", "unknown"])
def test_a_run_of_200_turns_in_a_16k_window_finishes_also_across_kills(
    tmp_path: Path, serve: Any, tells: bool
) -> None:
    server: SmallServer = serve(tells=tells)
    wink_command = Client(tmp_path, server)
    server.kill_at = {35: "before", 60: "after", 61: "before", 120: "before", 121: "after"}

    outcomes = [
        wink_command("run", "write the notes", "-m", "openai:small", "--max-turns", "1000", "-q")
    ]
    while outcomes[-1][0] == -signal.SIGKILL:
        outcomes.append(wink_command("resume", "-q"))
    log = wink_command("log", "-n", "3")

    assert outcomes[-1][:2] == (0, "All notes are written.\n"), outcomes[-1]
    assert len(outcomes) == 1 + len(server.kill_at)
    assert server.problems == []
    notes = {path.name: path.read_text() for path in (wink_command.project / "notes").iterdir()}
    assert notes == {f"{n}.txt": f"{n}\n" for n in range(1, TURNS, 2)}
    assert server.rejected == (0 if tells else 1)
    assert server.summaries > 2
    for body in server.bodies:
        if "tools" in body:
            first = body["messages"][:2]
            assert [message["role"] for message in first] == ["system", "user"]
            assert first[1]["content"].startswith("write the notes")
    # What was sent and not answered before the kill is sent again, byte for byte.
    for number, when in server.kill_at.items():
        if when == "before":
            assert sent(server.bodies[number]) == sent(server.bodies[number - 1]), number
    assert "the context window was full; compacted" in log[2]


def test_a_run_learns_the_window_from_the_servers_list_of_models(serve: Any) -> None:
    server: SmallServer = serve(tells=True, turns=1)
    adapter = OpenAIAdapter("small", base_url=server.base_url, api_key="sk-1234567890")
    other = OpenAIAdapter("other", base_url=server.base_url, api_key="sk-1234567890")
    nobody = OpenAIAdapter("small", base_url="http://127.0.0.1:9/v1", api_key="sk-1234567890")

    async def windows() -> list[int | None]:
        return [await each.context_window() for each in (adapter, other, nobody)]

    assert asyncio.run(windows()) == [WINDOW, None, None]


@pytest.mark.heavy
@pytest.mark.parametrize("stream", [True, False])
def test_a_rejected_request_is_shortened_and_sent_again(serve: Any, stream: bool) -> None:
    server: SmallServer = serve(tells=False, turns=24)
    adapter = OpenAIAdapter("small", base_url=server.base_url, api_key="sk-1234567890")
    texts: list[object] = []

    @wink.tool(reach="read")
    def read_file(path: str) -> str:
        """Read a file."""
        return "the quick brown fox jumps over the lazy dog\n" * 150

    @wink.tool(reach="read")
    def write_file(path: str, content: str) -> str:
        """Write a file."""
        return "written"

    section = wink.MarkdownSection(title="T", template="Work.", tools=[read_file, write_file])
    prompt = wink.Prompt(wink.PromptTemplate(sections=[section]))
    options: dict[str, Any] = {"on_event": texts.append} if stream else {}

    response = adapter.evaluate(prompt, wink.Session(), **options)

    assert response.text == "All notes are written."
    assert server.rejected == 1
    assert server.problems == []
