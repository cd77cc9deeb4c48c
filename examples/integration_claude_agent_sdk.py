"""The Claude Agent SDK, with and without WINK: a command fails half way.

    pip install 'wink-runtime[claude-agent-sdk]'
    python examples/integration_claude_agent_sdk.py

Claude runs a command with the Bash of its own program; it writes a release into two files and fails
before the third. Without us the release is half done. With us the files are as before, and Claude
is told so. Without ANTHROPIC_API_KEY a script speaks for Claude, and no network is needed.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import claude_agent_sdk
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage

from weakincentives.integrations import claude

COMMAND = "echo 2.0 > VERSION && echo '2.0: everything is new' > CHANGES && cat NOTES >> README"
TASK = f"Run this command once: `{COMMAND}`. Then say whether the release is done."


async def run(project: Path, home: str, env: dict[str, str], *, with_us: bool) -> str:
    """Let Claude work on the project, and return its last words."""
    options = ClaudeAgentOptions(
        model=os.environ.get("ANTHROPIC_MODEL"),
        cwd=project,
        tools=["Bash"],
        allowed_tools=["Bash"],
        setting_sources=[],
        env={"HOME": home, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", **env},
    )
    if with_us:
        messages = claude.query(TASK, options, workspace=project)
    else:
        messages = claude_agent_sdk.query(prompt=TASK, options=options)
    words = ""
    async for message in messages:
        if isinstance(message, ResultMessage):
            words = message.result or ""
    return words


# What speaks for Claude where there is no key


def scripted(request: dict[str, Any]) -> dict[str, Any]:
    """Return the model's next words: the command, then what it was told about it."""
    messages: list[Any] = request["messages"]
    contents: list[Any] = [each["content"] for each in messages if each["role"] == "user"]
    for block in contents[-1]:
        if block["type"] == "tool_result":
            told = " ".join(str(block["content"]).split())
            if "Rolled back" in json.dumps(messages):
                told += ". It was rolled back."
            return {"type": "text", "text": f"I was told: {told}"}
    given = {"command": COMMAND, "description": "Release 2.0"}
    return {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": given}


class Handler(BaseHTTPRequestHandler):
    """Answers as the provider's interface does, in a stream of events."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as it is inherited
        pass

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        block = scripted(request)
        is_use = block["type"] == "tool_use"
        delta = {"type": "text_delta", "text": block.get("text")}
        if is_use:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        usage = {"input_tokens": 1, "output_tokens": 1}
        message: dict[str, Any] = {
            "id": f"msg_{len(request['messages'])}", "type": "message", "role": "assistant",
            "model": request["model"], "content": [], "stop_reason": None, "usage": usage,
        }  # fmt: skip
        start: dict[str, Any] = {**block, "input": {}} if is_use else {"type": "text", "text": ""}
        reason = {"stop_reason": "tool_use" if is_use else "end_turn", "stop_sequence": None}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": start},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": reason, "usage": usage},
            {"type": "message_stop"},
        ]
        body = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def environment() -> Generator[dict[str, str]]:
    """Provide what makes the program ask the provider, or else the script."""
    if os.environ.get("ANTHROPIC_API_KEY"):
        yield {}
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        place = f"http://127.0.0.1:{server.server_address[1]}"
        yield {"ANTHROPIC_BASE_URL": place, "ANTHROPIC_API_KEY": "none"}
        server.shutdown()


def main() -> None:
    for title, with_us in (("without us", False), ("with us", True)):
        with tempfile.TemporaryDirectory() as place, environment() as env:
            project = Path(place, "project")
            project.mkdir()
            (project / "VERSION").write_text("1.0\n")
            words = asyncio.run(run(project, place, env, with_us=with_us))
            files = {path.name: path.read_text() for path in sorted(project.iterdir())}
            print(f"{title}: {files}\n  {words}")


if __name__ == "__main__":
    main()
