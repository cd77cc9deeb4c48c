"""The calls of a workspace: what its runs have on record, joined with what the directory can undo.

This only looks, and so works while an agent does. Values stay as the file has them: to show a call,
none of the types that it used needs to be loaded.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import SnapshotError
from weakincentives.filesystem import Committed, FileChange, WorkspaceHistory
from weakincentives.filesystem.store import Note, location_of
from weakincentives.runtime.saved import SavedSessionData, not_undone

_RECORDS = "weakincentives.runtime.events:ToolInvoked"
_MESSAGES = "weakincentives.runtime.conversation:Message"
_ENDS = "weakincentives.runtime.events:PromptExecuted"
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Run:
    """A run, and the file that has its session."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.stem

    @property
    def mark(self) -> str:
        """The letters at the end of the id: a name that is short enough to type."""
        return self.id.rpartition("-")[2]

    @property
    def saved_at(self) -> float:
        """When something was last added, in unix seconds; 0 for one that is gone."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    @cached_property
    def data(self) -> SavedSessionData:
        """What is on record, as far as that can be read; raises SnapshotError if nothing can."""
        return SavedSessionData.read(self.path, partly=True)

    @property
    def is_dry(self) -> bool:
        return bool(self.data.about.get("dry_run"))

    @property
    def title(self) -> str:
        """What it was told to do, or what else it is of."""
        about = self.data.about
        return str(about.get("task") or about.get("title") or about.get("kind") or "")

    @property
    def has_ended(self) -> bool:
        """Whether the model has finished, and nobody has spoken to it since."""
        ends, messages = self._log(_ENDS), self._log(_MESSAGES)
        is_over = bool(ends) and ends[-1]["stop_reason"] in ("end_turn", "max_tokens", "refusal")
        return is_over and bool(messages) and messages[-1].get("role") == "model"

    @property
    def turns(self) -> int:
        """How often the model has spoken."""
        messages = self._log(_MESSAGES)
        return sum(each.get("role") == "model" and not each.get("depth") for each in messages)

    def calls(self) -> list[Call]:
        """Return its calls, oldest first."""
        calls = [
            Call(
                call_id=str(record["call_id"]),
                tool=str(record["tool_name"]),
                time=float(record["timestamp"]),
                run=self,
                number=number,
                record=record,
            )
            for number, record in enumerate(self._log(_RECORDS), 1)
            if "call_id" in record
        ]
        later: dict[str, Call] = {}
        for call in reversed(calls):  # a call ends after those that are nested in it
            assert call.record is not None
            call.outer = later.get(str(call.record.get("nested_in", "")))
            later[call.call_id] = call
        return calls

    def answer_to(self, call_id: str) -> str | None:
        """Return what the model was answered to a call, where a model asked for it."""
        for message in self._log(_MESSAGES):
            if message.get("role") == "tool" and message.get("call_id") == call_id:
                return str(plain(message["text"]))
        return None

    def _log(self, kind: str) -> list[Mapping[str, Any]]:
        return [_fields(value) for value in self.data.log.get(kind, ())]


def new_run(store: Path) -> Run:
    """Return a name and place for a run that begins now; ``store`` is ``HostFilesystem.store``."""
    moment = datetime.fromtimestamp(SYSTEM_CLOCK.time(), UTC).strftime("%Y%m%d-%H%M%S")
    mark = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(3))
    return Run(_folder(store) / f"{moment}-{mark}{_SUFFIX}")


def runs_of(workspace: Path) -> tuple[Run, ...]:
    """Return the runs of a workspace, oldest first. Opens nothing, so others may be at work.

    Raises:
        StoreRefused: It is not certain that this user wrote the store they are in.
    """
    store = location_of(workspace)
    Note.read(store)
    try:
        names = sorted(os.listdir(_folder(store)))
    except OSError:
        return ()
    return tuple(Run(_folder(store) / name) for name in names if name.endswith(_SUFFIX))


def _folder(store: Path) -> Path:
    return store / "runs"


@dataclass(kw_only=True, eq=False)
class Call:
    """One call: on record in a run, known to the directory's history, or both."""

    call_id: str
    tool: str
    """Empty for what was done outside of any call."""
    time: float
    run: Run | None = None
    number: int = 0
    """Its place in the run; the first is 1."""
    record: Mapping[str, Any] | None = None
    """The fields of its ToolInvoked, frozen."""
    outer: Call | None = None
    """The call that made it, if one did."""
    committed: Committed | None = None
    """What the directory can undo of it."""
    is_undone: bool = False
    files: tuple[FileChange, ...] = ()
    """What it changed, as far as that is known."""

    @property
    def name(self) -> str:
        """How a person can call it."""
        return self.call_id if self.run is None else f"{self.run.mark}/{self.number}"

    @property
    def undoes(self) -> tuple[str, ...]:
        """The ids of the calls that it undid."""
        return () if self.committed is None else tuple(self.committed.undoes)

    @property
    def result(self) -> Mapping[str, Any]:
        return {} if self.record is None else _fields(self.record["result"])

    @property
    def arguments(self) -> object:
        return None if self.record is None else plain(self.record["params"])

    @property
    def outcome(self) -> str:
        """What came of it, in a word or two."""
        if self.is_undone:
            return "undone"
        if self.committed is not None:
            return "undo" if self.undoes else "committed"
        if self.record is None or self.record["success"]:
            # What it did became part of the call it is nested in.
            if self.outer is not None and self.outer.outcome not in ("ok", "committed"):
                return self.outer.outcome
            return "dry run" if self.run is not None and self.run.is_dry else "ok"
        if self.record["denied_by"]:
            return "denied"
        if _fields(self.result.get("failure") or {}).get("code") == "SUSPENDED":
            return "suspended"
        return "rolled back" if self.record["ran"] else "refused"

    @property
    def shown(self) -> str:
        """What the model saw of its result."""
        if self.record is None or self.run is None:
            return ""
        answer = self.run.answer_to(self.call_id)
        return _rendered(self.record["result"]) if answer is None else answer


class Calls:
    """The calls of a workspace."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.history = WorkspaceHistory(workspace)

    @cached_property
    def committed(self) -> dict[str, Committed]:
        """What can be undone, by call, oldest first."""
        return {each.call_id: each for each in self.history.calls()}

    @cached_property
    def undone(self) -> set[str]:
        """The calls that were undone, and are so still."""
        return self.committed.keys() - not_undone(self.history.calls())

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The runs of the workspace, each read at most once."""
        return runs_of(self.workspace)

    @property
    def newest_runs(self) -> list[Run]:
        """The runs by when they were last at work: one can be resumed after a later one."""
        return sorted(self.runs, key=lambda run: run.saved_at, reverse=True)

    def of_run(self, run: Run) -> list[Call]:
        """Return the calls of a run, oldest first; raises SnapshotError if it cannot be read."""
        return self._joined(run.calls())

    def latest(self, count: int | None, run: Run | None = None) -> list[Call]:
        """Return the newest calls, oldest first, with what they changed; all where None."""
        found: list[Call] = []
        for each in self.newest_runs if run is None else [run]:
            newest = sorted(call.time for call in found)[-count:] if count else []
            if newest and len(newest) == count and newest[0] >= each.saved_at:
                break
            found += self._joined(_readable_calls([each]))
        if run is None:
            found += self._without_a_run(found)
        found.sort(key=lambda call: (call.time, call.number))
        return self.with_files(found[-count:] if count else found)

    def changed(self) -> list[Call]:
        """Return the calls that changed files and can be undone, oldest first."""
        records = {call.call_id: call for call in _readable_calls(self.runs)}
        return self._joined(
            records.get(call_id) or _unrecorded(each) for call_id, each in self.committed.items()
        )

    def by_id(self, call_id: str) -> Call | None:
        """Return the call with this id, if there is one."""
        for call in self._joined(_readable_calls(self.newest_runs)):
            if call.call_id == call_id:
                return call
        committed = self.committed.get(call_id)
        return None if committed is None else self._joined([_unrecorded(committed)])[0]

    def names(self) -> dict[str, str]:
        """Return how a person can call each of the calls that changed files, by id."""
        return {call.call_id: call.name for call in self.changed()}

    def damage(self) -> Iterator[str]:
        """Yield a sentence for each run whose file cannot be read to its end."""
        for run in self.runs:
            try:
                if run.data.damage:
                    yield f"{run.data.damage}: what follows in it is not shown"
            except (OSError, SnapshotError) as error:
                if run.path.exists() and run.path.stat().st_size:  # else it has only begun
                    yield str(error)

    def with_files(self, calls: list[Call]) -> list[Call]:
        """Find out what calls changed, from the newest on, as far back as is needed."""
        wanted = {call.call_id: call for call in calls if call.committed is not None}
        for changes in self.history.changes() if wanted else ():
            call = wanted.pop(changes.call.call_id, None)
            if call is not None:
                call.files = changes.files
            if not wanted:
                break
        return calls

    def _joined(self, calls: Iterable[Call]) -> list[Call]:
        calls = list(calls)
        for call in calls:
            call.committed = self.committed.get(call.call_id)
            call.is_undone = call.call_id in self.undone
        return calls

    def _without_a_run(self, calls: list[Call]) -> list[Call]:
        """Return what was done by others: programs that keep no run, people who undid something."""
        known = {call.call_id for call in calls}
        oldest = min((call.time for call in calls), default=0.0)
        return self._joined(
            _unrecorded(each)
            for each in self.committed.values()
            if each.call_id not in known and each.time >= oldest
        )


def _unrecorded(committed: Committed) -> Call:
    return Call(call_id=committed.call_id, tool=committed.tool, time=committed.time)


def _readable_calls(runs: Iterable[Run]) -> Iterator[Call]:
    for run in runs:
        try:
            yield from run.calls()
        except (OSError, SnapshotError):
            continue  # it has only begun, or is none of ours


# Frozen values


def _fields(value: Any) -> Mapping[str, Any]:
    """Return the fields of a frozen dataclass; none of what could not be saved."""
    return cast("Mapping[str, Any]", value.get("fields", {}))


def plain(value: Any) -> object:
    """Return a frozen value for people and machines to read: without its types."""
    if isinstance(value, list):
        return [plain(each) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    data = cast("dict[str, Any]", value)
    if "$" not in data:
        return {key: plain(each) for key, each in data.items()}
    if "fields" in data:
        return {key: plain(each) for key, each in data["fields"].items()}
    if "items" in data:
        return [plain(each) for each in data["items"]]
    if "pairs" in data:
        return {str(plain(key)): plain(each) for key, each in data["pairs"]}
    if data["$"] == "str":  # it has half a surrogate pair, which is shown as its escape
        text = base64.b64decode(data["base64"]).decode("utf-8", "surrogatepass")
        return text.encode("utf-8", "backslashreplace").decode()
    for key in ("name", "text", "value", "base64", "hex"):
        if key in data:
            return plain(data[key])
    return json.dumps(data)


def _rendered(result: Any) -> str:
    """Return a result as the model saw it, if its types are known; else its parts."""
    from weakincentives.serde import thaw

    try:
        for module in set(re.findall(r'"(weakincentives(?:\.\w+)+):', json.dumps(result))):
            if module not in sys.modules:
                import_module(module)  # one of ours, and so nothing that a file could choose
        return str(thaw(result).render())
    except (SnapshotError, ImportError):
        fields = _fields(result)
        value = plain(fields["value"])
        parts = [plain(fields["message"]), value and json.dumps(value, ensure_ascii=False)]
        return "\n".join(str(part) for part in parts if part)
