"""`wink mcp` as a program of its own, spoken to line by line: for what no client library sends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOOLS = f"{Path(__file__).parent / 'served_tools.py'}:tools"
SECONDS = 240
"""How long anything may take before a test gives up: the machine may be busy."""


class Program:
    """A server at the other end of two pipes."""

    def __init__(
        self,
        workspace: Path,
        *options: str,
        specs: tuple[str, ...] = (TOOLS,),
        env: Mapping[str, str] = os.environ,
    ) -> None:
        command = [sys.executable, "-m", "weakincentives.cli", "mcp", "-w", str(workspace)]
        self.process = subprocess.Popen(
            [*command, *options, *specs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**env, "PYTHONWARNINGS": "ignore"},
        )
        self._number = 0

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        left = memoryview(data)
        while left:
            left = left[self.process.stdin.write(left) :]  # type: ignore[union-attr]

    def read(self) -> dict[str, Any]:
        """Return the next line that the server sends; it must be JSON."""
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        assert line, self.end()
        return json.loads(line)

    def ask(self, method: str, /, **params: Any) -> int:
        """Send a request and return its number."""
        self._number += 1
        message = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        self.write(json.dumps(message).encode() + b"\n")
        return self._number

    def answer(self, number: int) -> dict[str, Any]:
        """Return the answer to a request; what comes before it is passed over."""
        while (message := self.read()).get("id") != number or "method" in message:
            pass
        return message

    def begin(self) -> Program:
        """Shake hands."""
        info = {"name": "test", "version": "1"}
        number = self.ask(
            "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=info
        )
        assert "result" in self.answer(number)
        self.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
        return self

    def start(self, tool: str, **arguments: Any) -> int:
        return self.ask("tools/call", name=tool, arguments=arguments)

    def call(self, tool: str, **arguments: Any) -> str:
        """Call a tool and return what it says."""
        result = self.answer(self.start(tool, **arguments))["result"]
        return "".join(part["text"] for part in result["content"])

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Close its input, or send it a signal; return how it exits and what it said."""
        if number is None:
            self.process.stdin.close()  # type: ignore[union-attr]
        else:
            self.process.send_signal(number)
        code = self.process.wait(SECONDS)
        return code, self.process.stderr.read().decode()  # type: ignore[union-attr]


def wait_until_there(path: Path) -> None:
    """Wait for a file that another process makes."""
    until = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.005)


SIGNALS = (signal.SIGTERM, signal.SIGINT)
