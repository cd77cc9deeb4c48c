"""A model that plays a script: the same turns every time, no key, no network."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from weakincentives.adapters.base import Adapter
from weakincentives.core.budget import TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.errors import MissingExtra, ParseError, ProviderError, ProviderRejected
from weakincentives.runtime.conversation import ModelRequest, ModelTurn
from weakincentives.serde import parse

_Played: TypeAlias = ModelTurn | ProviderError | str
Turn: TypeAlias = _Played | Callable[[ModelRequest], _Played]
"""A text, a turn with calls, an error to raise, or a function of the request that returns one."""

Wanted: TypeAlias = ToolCall | tuple[str, Mapping[str, object]] | str


def says(text: str, **fields: Any) -> ModelTurn:
    """Return a turn that ends with a text; other fields are those of ``ModelTurn``."""
    return ModelTurn(text=text, **fields)


def calls(*wanted: Wanted, text: str = "", **fields: Any) -> ModelTurn:
    """Return a turn with tool calls.

    >>> calls(("read_file", {"path": "a.txt"}), "list_files").stop_reason
    'tool_use'
    """
    made = tuple(map(_call, wanted))
    return ModelTurn(text=text, tool_calls=made, stop_reason="tool_use", **fields)


def _call(wanted: Wanted) -> ToolCall:
    if isinstance(wanted, ToolCall):
        return wanted
    if isinstance(wanted, str):
        return ToolCall(wanted)
    name, params = wanted
    return ToolCall(name, dict(params))


def stream_text(request: ModelRequest, turn: ModelTurn) -> None:
    """Pass the text of a turn to the request's listener, line by line."""
    if request.on_text is not None:
        for line in turn.text.splitlines(keepends=True):
            request.on_text(line)


class ScriptedAdapter(Adapter):
    """Plays turns in order. A turn is a text, calls, an error, or a function of the request.

    >>> from weakincentives import MarkdownSection, Prompt, PromptTemplate, Session
    >>> prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="Task", template="Greet.")]))
    >>> ScriptedAdapter(["Hello."]).evaluate(prompt, Session()).text
    'Hello.'
    """

    name = "scripted"
    needs_loop = False
    asks_provider = False

    def __init__(self, turns: Iterable[Turn]) -> None:
        if isinstance(turns, str):
            raise TypeError(f"a script is a list of turns, got {turns!r}: write [{turns!r}]")
        self._turns = iter(turns)
        self._played = 0
        self._lock = threading.RLock()  # runs in several threads may share a script
        self.last_request: ModelRequest | None = None

    @classmethod
    def from_file(cls, path: str | Path, *, skip: int = 0) -> ScriptedAdapter:
        """Return an adapter that plays a file: a list of turns, in YAML or JSON.

        A turn has ``say`` (a text), ``call`` (a list of ``{tool: parameters}``), or both, and
        optionally ``usage`` with ``input_tokens`` and ``output_tokens``. ``skip`` leaves out the
        turns that a resumed run has already taken.
        """
        return cls(_read(Path(path))[skip:])

    async def complete(self, request: ModelRequest) -> ModelTurn:
        turn = self._next(request)
        if isinstance(turn, ProviderError):
            raise turn
        if isinstance(turn, str):
            turn = says(turn)
        stream_text(request, turn)
        return turn

    def _next(self, request: ModelRequest) -> _Played:
        self.last_request = request
        with self._lock:
            turn = next(self._turns, None)
            self._played += turn is not None
        if turn is None:
            last = request.messages[-1]
            raise ProviderRejected(
                f"the script has {self._played} turns, and the model was asked for one more; "
                f"the last message was from the {last.role}: {last.text!r}"
            )
        return turn(request) if callable(turn) else turn


# Scripts in files


def _read(path: Path) -> list[Turn]:
    text = path.read_text("utf-8")
    try:
        turns: object = json.loads(text) if path.suffix == ".json" else _from_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path.name}: cannot be read: {error}") from error
    if not isinstance(turns, list):
        raise ValueError(f"{path.name}: a script is a list of turns")
    made: list[Turn] = []
    for n, each in enumerate(cast("list[object]", turns), 1):
        try:
            made.append(each if isinstance(each, str) else _turn(parse(_FileTurn, each)))
        except ParseError as error:
            expected = "a turn is a text, or has say, call and usage"
            raise ParseError(f"{path.name}, turn {n}: {expected}", error.details) from error
    return made


def _from_yaml(text: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra("yaml", "PyYAML") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class _FileTurn:
    say: str = ""
    call: tuple[str | dict[str, dict[str, Any] | None], ...] = ()
    usage: TokenUsage = field(default_factory=TokenUsage)


def _turn(turn: _FileTurn) -> ModelTurn:
    wanted: list[Wanted] = []
    for n, each in enumerate(turn.call):
        call = {each: None} if isinstance(each, str) else each
        if len(call) != 1:
            text = f"Expected a tool's name, or {{name: parameters}}; got {each!r}"
            raise ParseError("Not one call", {f"call.{n}": text})
        wanted += [(name, params or {}) for name, params in call.items()]
    if not wanted:
        return says(turn.say, usage=turn.usage)
    return calls(*wanted, text=turn.say, usage=turn.usage)
