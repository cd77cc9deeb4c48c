"""Record a run and replay it: the model's same turns, and the first difference in what they do.

A recording is a file of JSON lines: each turn of the model, then the results of its calls and
their changes to session and files. A replay compares those.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeAlias, cast

from weakincentives.adapters.base import Adapter
from weakincentives.adapters.scripted import stream_text
from weakincentives.core.budget import TokenPrice, TokenUsage
from weakincentives.core.call import ToolCall, current_view
from weakincentives.core.logs import get_logger
from weakincentives.core.media import Media
from weakincentives.errors import (
    ContextOverflow,
    FilesystemError,
    MalformedResponse,
    NoSuchFile,
    ProviderError,
    ProviderRejected,
    ProviderThrottled,
    ProviderUnavailable,
    ReplayDiverged,
    ResourceError,
    SnapshotError,
)
from weakincentives.filesystem import Filesystem
from weakincentives.prompt.policies import CompletedTools
from weakincentives.prompt.prompt import RenderedPrompt
from weakincentives.runtime.conversation import Message, ModelRequest, ModelTurn
from weakincentives.runtime.run import Model
from weakincentives.serde import dump, freeze, parse
from weakincentives.session.events import PromptExecuted, ToolInvoked
from weakincentives.session.session import Session
from weakincentives.session.slices import EMPTY, Slice

_logger = get_logger(__name__)

Seen: TypeAlias = dict[str, str]
"""Observations by subject: an answer, a slice, a file; without those that did not change."""
OnCalls: TypeAlias = Callable[[Mapping[int, str], Seen], None]


def record(adapter: Adapter, path: str | Path) -> Adapter:
    """Return an adapter that does the same and writes each turn to a new file, for ``replay``.

    Each line is written at once, so the recording of a killed run can be replayed. Several runs
    may use one file, one after the other.
    """
    return _RecordingAdapter(adapter, _File(Path(path), adapter.name))


def replay(path: str | Path, *, strict: bool = False) -> ReplayAdapter:
    """Return an adapter that plays a recording and compares the results.

    The first difference is logged and is the adapter's ``divergence``. With ``strict`` it ends
    the run with ReplayDiverged, before the next turn.
    """
    return ReplayAdapter(Path(path), strict=strict)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a replayed run and its recording."""

    turn: int
    """The turn of the model; the first is 1."""
    call: int
    """The call of that turn, the first is 1; 0 when the request for the turn differs."""
    tool: str
    """The tool that was called; several for concurrent calls whose answers are the same."""
    recorded: Mapping[str, str]
    """What differs, by subject: an answer, a slice, a file, the prompt, a tool."""
    came: Mapping[str, str]
    """The same in the replayed run."""

    def __str__(self) -> str:
        where = f"turn {self.turn}"
        if self.call:
            where += f", call {self.call} ({self.tool})"
        pairs = ((name, self.recorded[name], self.came[name]) for name in self.recorded)
        return f"{where}: " + "; ".join(f"{n} was {old!r}, now {new!r}" for n, old, new in pairs)


class _RecordingAdapter(Adapter):
    """Passes on the turns of another adapter, or of one run of it, and writes them down."""

    def __init__(self, asked: Model, file: _File) -> None:
        self.name = asked.name
        self.model = asked.model
        self.needs_loop = asked.needs_loop
        self.asks_provider = asked.asks_provider
        self.manages_context = asked.manages_context
        self.provider_tools = asked.provider_tools
        self._asked = asked
        self._file = file

    def begin_run(self) -> Model:
        return _RecordingAdapter(cast("Adapter", self._asked).begin_run(), self._file)

    async def context_window(self) -> int | None:
        self._file.window = await self._asked.context_window()
        return self._file.window

    def price(self) -> TokenPrice | None:
        return self._asked.price()

    async def end_run(self) -> None:
        await self._asked.end_run()

    async def complete(self, request: ModelRequest) -> ModelTurn:
        asked = self._file.asked(request)
        try:
            turn = await self._asked.complete(request)
        except ProviderError as error:
            self._file.write_turn({"asked": asked, "error": _error_to_json(error)})
            raise
        self._file.write_turn({"asked": asked, "turn": asdict(turn)})
        return turn


class _File:
    """The file of a recording, and the run that is being recorded."""

    def __init__(self, path: Path, adapter: str) -> None:
        self._path = path
        self._watch: _Watch | None = None
        self.window: int | None = None
        """The model's context window; a replay must shorten the conversation as the run did."""
        path.touch(mode=0o600, exist_ok=False)
        self.write({"wink_recording": 1, "adapter": adapter})

    def asked(self, request: ModelRequest) -> Seen:
        self._watch = _watching(self._watch, request, self._on_calls)
        return self._watch.asked(request)

    def _on_calls(self, calls: Mapping[int, str], seen: Seen) -> None:
        self.write({"calls": [*calls], "seen": seen})

    def write_turn(self, line: Mapping[str, object]) -> None:
        self.write(line if self.window is None else {**line, "context_window": self.window})

    def write(self, line: Mapping[str, object]) -> None:
        data = json.dumps(line, default=dump) + "\n"
        # One write: a kill can only tear the last line.
        with self._path.open("ab", buffering=0) as file:
            file.write(data.encode("ascii"))


class ReplayAdapter(Adapter):
    """Plays a recording; ``divergence`` is the first difference."""

    name = "replay"
    needs_loop = False
    asks_provider = False

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self._name = path.name
        lines = _read(path)
        windows = (line["context_window"] for line in lines if "context_window" in line)
        self._window: int | None = next(windows, None)
        self._lines = iter(lines)
        self._next: dict[str, Any] | None = next(self._lines, None)
        self._strict = strict
        self._watch: _Watch | None = None
        self._turn = 0
        self.divergence: Divergence | None = None

    async def context_window(self) -> int | None:
        return self._window

    async def complete(self, request: ModelRequest) -> ModelTurn:
        self._watch = _watching(self._watch, request, self._on_calls)
        asked = self._watch.asked(request)
        self._skip_calls()
        line = self._next
        if line is not None:
            self._compare(0, "", line["asked"], asked)
        if self._strict and self.divergence is not None:
            raise ReplayDiverged(self.divergence)
        if line is None:
            raise ProviderRejected(
                f"{self._name} ends after turn {self._turn}, and the model was asked for one more"
            )
        self._next = next(self._lines, None)
        if "error" in line:
            raise _error_from_json(line["error"])
        self._turn += 1
        turn = _turn_from_json(line["turn"])
        stream_text(request, turn)
        return turn

    def _on_calls(self, calls: Mapping[int, str], seen: Seen) -> None:
        line = self._next
        if line is None:
            return  # nothing is recorded of these calls
        recorded: Seen = {"calls": "none"}
        if "calls" in line:
            recorded = line["seen"]
            self._next = next(self._lines, None)
        answers = {number: f"answer {number}" for number in calls}
        differ = (n for n, name in answers.items() if recorded.get(name) != seen.get(name))
        number = next(differ, 0)
        tool = calls.get(number) or ", ".join(calls.values())
        self._compare(number or min(calls), tool, recorded, seen)

    def _skip_calls(self) -> None:
        """Go to the next turn; a recorded call that was not made is a difference."""
        while self._next is not None and "calls" in self._next:
            calls = self._next["seen"]["calls"]
            self._compare(self._next["calls"][0], calls, {"calls": calls}, {"calls": "none"})
            self._next = next(self._lines, None)

    def _compare(self, call: int, tool: str, recorded: Seen, came: Seen) -> None:
        if self.divergence is not None:
            return  # later differences mostly follow from the first
        names = [n for n in sorted({*recorded, *came}) if recorded.get(n) != came.get(n)]
        if names:
            pairs = {n: _around(recorded.get(n), came.get(n)) for n in names}
            self.divergence = Divergence(
                self._turn + (call == 0),
                call,
                tool,
                {name: pair[0] for name, pair in pairs.items()},
                {name: pair[1] for name, pair in pairs.items()},
            )
            _logger.warning("the run differs from %s: %s", self._name, self.divergence)


def _around(recorded: str | None, came: str | None) -> tuple[str, str]:
    """Return both texts, cut to where they differ."""
    texts = ["unchanged" if text is None else text for text in (recorded, came)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    start = max(0, same - 40)
    cut = [("…" if start else "") + text[start : start + 200] for text in texts]
    return cut[0], cut[1]


# Observing a run


def _watching(watch: _Watch | None, request: ModelRequest, on_calls: OnCalls) -> _Watch:
    """Return the watch of a request's run: the same as before, or a new one for another run."""
    if request.session is None:
        raise ValueError("to record or replay, a request needs the session of its run")
    if watch is not None and watch.session is request.session and watch.is_open:
        return watch
    if watch is not None:
        watch.close()
    return _Watch(request.session, on_calls)


class _Watch:
    """Observes one run: what is new in each request, and what each call changes."""

    def __init__(self, session: Session, on_calls: OnCalls) -> None:
        self.session = session
        self.is_open = True
        self._on_calls = on_calls
        self._rendered: RenderedPrompt | None = None
        self._tools: Seen = {}
        self._conversation = ""
        self._depth = current_view(session).depth
        self._state: Mapping[type, Slice[Any]] = {}
        self._files = _files_of(session)
        self._before = None if self._files is None else self._files.snapshot()
        self._records = len(session[ToolInvoked])
        self._stops = [
            session.dispatcher.subscribe(ToolInvoked, self._called),
            session.dispatcher.subscribe(PromptExecuted, self._ended),
        ]

    def close(self) -> None:
        self.is_open = False
        for stop in self._stops:
            stop()
        self._files = self._before = None  # a snapshot keeps the history of a workspace alive

    def _ended(self, event: PromptExecuted) -> None:
        # Other sessions may share the bus, and a tool may run a model of its own.
        is_its_own = self.session[PromptExecuted].latest() is event
        if is_its_own and current_view(self.session).depth == self._depth:
            self.close()

    def asked(self, request: ModelRequest) -> Seen:
        self._conversation = request.messages[-1].conversation
        new = takewhile(lambda message: message.role != "model", reversed(request.messages))
        said = [message for message in new if message.role == "user"][::-1]
        seen = {f"message {n}": _steady_text(each.text) for n, each in enumerate(said, 1)}
        for n, each in enumerate(said, 1):
            seen |= _media(f"message {n}", each.media)
        return {**seen, **self._offered(request.prompt), **self._changes()}

    def _offered(self, rendered: RenderedPrompt) -> Seen:
        last, self._rendered = self._rendered, rendered
        if rendered is last:
            return {}
        seen = {} if last is not None and last.text == rendered.text else {"prompt": rendered.text}
        tools = {f"tool {tool.name}": _json(tool.definition()) for tool in rendered.tools}
        seen |= {name: text for name, text in tools.items() if self._tools.get(name) != text}
        seen |= {name: "not offered" for name in self._tools if name not in tools}
        self._tools = tools
        return {**seen, **_media("prompt", rendered.media)}

    def _called(self, record: ToolInvoked) -> None:
        """Report a call; concurrent calls are reported together, when all have ended."""
        said = (m for m in self.session[Message].newest_first() if self._is_of_the_model(m))
        turn = next(said, Message(role="model"))
        numbers = {call.id: n for n, call in enumerate(turn.tool_calls, 1)}
        if record.call_id not in numbers:
            return  # nested in another call, or of another session on the bus
        records = self.session[ToolInvoked]
        ended, self._records = len(records) - self._records, len(records)
        new = [r for r in islice(records.newest_first(), ended) if r.call_id in numbers][::-1]
        if not new:
            return
        calls = {numbers[r.call_id]: r.tool_name for r in new}
        seen = {"calls": ", ".join(calls.values())}
        for r in new:
            name = f"answer {numbers[r.call_id]}"
            seen |= {name: _steady_text(r.result.render()), **_media(name, r.result.media)}
        self._on_calls(calls, {**seen, **self._changes()})

    def _is_of_the_model(self, message: Message) -> bool:
        return message.conversation == self._conversation and message.role == "model"

    def _changes(self) -> Seen:
        """Return the changes in slices and files since the last time."""
        before, self._state = self._state, self.session.snapshot().state
        now = self.session.clock.time()
        seen: Seen = {}
        for kind in {**before, **self._state}:
            if kind is CompletedTools:
                continue  # its effect on policies shows in the answers of later calls
            old, new = before.get(kind, EMPTY), self._state.get(kind, EMPTY)
            text = "" if old is new else _changed_values(old.all(), new.all(), now)
            if text:
                name = f"slice {kind.__qualname__}"
                seen[name] = _short(seen.get(name, "") + text)
        if (files := self._files) is not None:
            earlier, self._before = self._before, files.snapshot()
            changed = files.changed_since(earlier)
            seen |= {f"file {path}": _content(files, path) for path in changed}
        return seen


def _media(what: str, media: tuple[Media, ...]) -> Seen:
    if not media:
        return {}
    return {f"media of {what}": ", ".join(f"{m.render()} sha256 {m.digest[:16]}" for m in media)}


def _files_of(session: Session) -> Filesystem | None:
    try:
        files = None if session.prompt is None else session.prompt.resources.find(Filesystem)
    except ResourceError:
        return None  # the tools that need it will fail
    return files if hasattr(files, "changed_since") else None


def _content(files: Filesystem, path: str) -> str:
    try:
        kind = files.stat(path).kind
        if kind != "file":
            return kind
        data = files.read_bytes(path)
    except NoSuchFile:
        return "gone"
    except FilesystemError as error:
        return type(error).__name__
    return f"{len(data)} bytes, sha256 {_digest(data)}"


def _changed_values(old: tuple[object, ...], new: tuple[object, ...], now: float) -> str:
    """Return the number of values and the new ones, by position; nothing if none is new."""
    places = [n for n in range(len(new)) if n >= len(old) or not _equal(old[n], new[n])]
    if not places and len(old) == len(new):
        return ""
    values = "".join(f"; {n}: {_value(new[n], now)}" for n in places)
    return f"{len(new)} values{values}"


def _equal(old: object, new: object) -> bool:
    try:
        return old is new or bool(old == new)
    except Exception:  # of a user's class
        return False


def _value(value: object, now: float) -> str:
    try:
        return _json(_steady(freeze(value), now))
    except SnapshotError:
        return f"a {type(value).__qualname__}"


# Values that differ in every run: call ids, and the current time

_CALL_ID = re.compile(r"\bcall_[0-9a-f]{12}_\d+\b")


def _steady_text(text: str) -> str:
    return _short(_CALL_ID.sub("call_…", text))


def _steady(data: object, now: float) -> object:
    """Return frozen data without call ids, times of this run, and module names."""
    if isinstance(data, str):
        return _CALL_ID.sub("call_…", data)
    if isinstance(data, (int, float)):
        return "now" if _is_now(data, now) else data
    if isinstance(data, list):
        return [_steady(each, now) for each in cast("list[object]", data)]
    if not isinstance(data, dict):
        return data
    fields = cast("dict[str, Any]", data)
    if fields.get("$") == "datetime":
        moment = datetime.fromisoformat(fields["text"]).timestamp()
        return "now" if _is_now(moment, now) else fields
    steady = {name: _steady(each, now) for name, each in fields.items()}
    if "$" not in fields or "type" not in fields:
        return steady
    kind = str(fields["type"]).rpartition(":")[2]
    return {kind: steady["fields"]} if "fields" in steady else {**steady, "type": kind}


def _is_now(value: float, now: float) -> bool:
    """Whether a number is a time within a day of now; a clock that starts near 0 is a fake."""
    return now > 1e9 and abs(value - now) < 86_400


def _json(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, sort_keys=True)


def _short(text: str) -> str:
    """Return the text, or the start and the digest of a long one."""
    if len(text) <= 2_000:
        return text
    digest = _digest(text.encode("utf-8", "surrogatepass"))
    return f"{text[:200]}… ({len(text)} characters, sha256 {digest})"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# The file format


def _read(path: Path) -> list[dict[str, Any]]:
    whole, _, _ = path.read_bytes().rpartition(b"\n")  # without a torn last line
    try:
        head, *lines = [json.loads(line) for line in whole.split(b"\n")]
        version = head["wink_recording"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path.name} is not a recording: {error!r}") from error
    if version != 1:
        raise ValueError(f"{path.name} is a recording that this version cannot read")
    return lines


def _turn_from_json(data: dict[str, Any]) -> ModelTurn:
    data["tool_calls"] = tuple(ToolCall(**call) for call in data["tool_calls"])
    data["usage"] = TokenUsage(**data["usage"])
    data["media"] = tuple(parse(Media, each) for each in data.get("media", ()))
    return ModelTurn(**data)


_ERRORS = (
    ProviderThrottled,
    ProviderUnavailable,
    ContextOverflow,
    ProviderRejected,
    MalformedResponse,
)


def _error_to_json(error: ProviderError) -> dict[str, Any]:
    kind = next((each for each in _ERRORS if isinstance(error, each)), ProviderError)
    about: dict[str, Any] = {"code": error.code, "retry_after": error.retry_after}
    if isinstance(error, ContextOverflow):
        about |= {"limit": error.limit, "tokens": error.tokens}
    return {"kind": kind.__name__, "message": str(error), **about}


def _error_from_json(data: dict[str, Any]) -> ProviderError:
    kinds = {kind.__name__: kind for kind in (ProviderError, *_ERRORS)}
    return kinds[data.pop("kind")](data.pop("message"), **data)
