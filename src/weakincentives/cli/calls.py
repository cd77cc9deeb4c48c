"""The calls of a workspace: what runs have on record, joined with what the directory can undo."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weakincentives.cli.misuse import Misuse
from weakincentives.cli.runs import RunFile, find_run, runs_of
from weakincentives.errors import SnapshotError

if TYPE_CHECKING:
    from weakincentives.filesystem import Committed, FileChange, WorkspaceHistory
    from weakincentives.runtime import SavedSessionData

__all__ = ["Call", "Calls", "Run", "plain"]

_RECORDS = "weakincentives.runtime.events:ToolInvoked"
_MESSAGES = "weakincentives.runtime.conversation:Message"
_ENDS = "weakincentives.runtime.events:PromptExecuted"


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A run, as far as it is on record."""

    file: RunFile
    data: SavedSessionData

    @property
    def is_dry(self) -> bool:
        return bool(self.data.about.get("dry_run"))

    @property
    def title(self) -> str:
        """What it was told to do, or what else it is of."""
        about = self.data.about
        return str(about.get("task") or about.get("title") or about.get("kind") or "")

    @property
    def ending(self) -> str:
        """Why its last conversation ended; empty while it goes on, or where it was broken off."""
        ends = self.data.log.get(_ENDS, [])
        said = self.data.log.get(_MESSAGES, [])
        if not ends or (said and _fields(said[-1]).get("role") != "model"):
            return ""
        return str(_fields(ends[-1]).get("stop_reason", ""))

    def calls(self) -> list[Call]:
        """Return its calls, oldest first."""
        records = map(_fields, self.data.log.get(_RECORDS, []))
        calls = [
            Call(
                call_id=str(record["call_id"]),
                tool=str(record["tool_name"]),
                time=float(record["timestamp"]),
                run=self,
                number=number,
                record=record,
            )
            for number, record in enumerate(records, 1)
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
        for message in map(_fields, self.data.log.get(_MESSAGES, [])):
            if message.get("role") == "tool" and message.get("call_id") == call_id:
                return str(plain(message["text"]))
        return None


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
    files: tuple[FileChange, ...] | None = None
    """What it changed; None where that is not known."""

    @property
    def name(self) -> str:
        """How a person can call it."""
        return self.call_id if self.run is None else f"{self.run.file.mark}/{self.number}"

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
            return "undo" if self.committed.undoes else "committed"
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
    """The calls of a workspace. Looks only, and so works while an agent does."""

    def __init__(self, workspace: Path) -> None:
        from weakincentives.filesystem import WorkspaceHistory

        self.workspace = workspace
        self.history: WorkspaceHistory = WorkspaceHistory(workspace)

    @cached_property
    def committed(self) -> dict[str, Committed]:
        """What can be undone, by call, oldest first."""
        return {each.call_id: each for each in self.history.calls()}

    @cached_property
    def undone(self) -> set[str]:
        """The calls that were taken back, and are so still."""
        found: set[str] = set()
        for each in reversed(self.committed.values()):
            if each.call_id not in found:  # an undo that was undone itself does not count
                found.update(each.undoes)
        return found

    def latest(self, count: int | None, run: RunFile | None = None) -> list[Call]:
        """Return the newest calls, oldest first, with what they changed; all where None."""
        found: list[Call] = []
        for each in self._newest_first() if run is None else [run]:
            newest = sorted(call.time for call in found)[-count:] if count else []
            if newest and len(newest) == count and newest[0] >= each.saved_at:
                break
            found += [call for read in _read([each]) for call in self._joined(read.calls())]
        if run is None:
            found += self._without_a_run(found)
        found.sort(key=lambda call: (call.time, call.number))
        found = found[-count:] if count else found
        self._fill_in(found)
        return found

    def _newest_first(self) -> list[RunFile]:
        """Return the runs by when they were last at work: one can be taken up after a later one."""
        return sorted(runs_of(self.workspace), key=lambda run: run.saved_at, reverse=True)

    def find(self, wanted: str) -> Call:
        """Return the call that is meant: an id, RUN/N, or N of the last run; else raises Misuse."""
        run, slash, number = wanted.rpartition("/")
        if slash and number.isdecimal():
            return self._numbered(find_run(self.workspace, run), number)
        runs = self._newest_first()
        if wanted.isdecimal() and runs:
            return self._numbered(runs[0], wanted)
        for each in _read(runs):
            for call in self._joined(each.calls()):
                if call.call_id == wanted:
                    self._fill_in([call])
                    return call
        if wanted in self.committed:
            call = self._of(self.committed[wanted])
            self._fill_in([call])
            return call
        raise Misuse(f"there is no call {wanted!r} in {self.workspace}; `wink log` lists them")

    def damage(self) -> Iterator[str]:
        """Yield a sentence for each record that cannot be read; what is shown is the rest."""
        yield from self.history.damaged()
        yield from self.damaged_runs()

    def damaged_runs(self) -> Iterator[str]:
        """Yield a sentence for each run whose file cannot be read to its end."""
        for run in runs_of(self.workspace):
            try:
                if damage := run.read(partly=True).damage:
                    yield f"{damage}: what follows in it is not shown"
            except (OSError, SnapshotError) as error:
                if run.saved_size:
                    yield str(error)

    def names(self) -> dict[str, str]:
        """Return how a person can call each of the calls that changed files, by id."""
        return {call.call_id: call.name for call in self.changed()}

    def changed(self) -> list[Call]:
        """Return the calls that changed files and can be undone, oldest first."""
        records = {
            call.call_id: call for run in _read(runs_of(self.workspace)) for call in run.calls()
        }
        found = [records.get(call_id) or self._of(each) for call_id, each in self.committed.items()]
        return self._joined(found)

    def _numbered(self, run: RunFile, number: str) -> Call:
        try:
            calls = self._joined(Run(run, run.read(partly=True)).calls())
        except (OSError, SnapshotError) as error:
            raise Misuse(f"the run {run.id} cannot be read: {error}") from error
        for call in calls:
            if str(call.number) == number:
                self._fill_in([call])
                return call
        raise Misuse(f"the run {run.id} has {len(calls)} calls; there is no call {number}")

    def _joined(self, calls: list[Call]) -> list[Call]:
        for call in calls:
            call.committed = self.committed.get(call.call_id)
            call.is_undone = call.call_id in self.undone
        return calls

    def _of(self, committed: Committed) -> Call:
        call = Call(call_id=committed.call_id, tool=committed.tool, time=committed.time)
        return self._joined([call])[0]

    def _without_a_run(self, calls: list[Call]) -> Iterator[Call]:
        """Yield what was done by others: programs that keep no run, people who undid something."""
        known = {call.call_id for call in calls}
        oldest = min((call.time for call in calls), default=0.0)
        for call_id, committed in self.committed.items():
            if call_id not in known and committed.time >= oldest:
                yield self._of(committed)

    def _fill_in(self, calls: Iterable[Call]) -> None:
        """Find out what calls changed, from the newest on, as far back as is needed."""
        wanted = {call.call_id: call for call in calls if call.committed is not None}
        for changes in self.history.changes() if wanted else ():
            call = wanted.pop(changes.call.call_id, None)
            if call is not None:
                call.files = changes.files
            if not wanted:
                break


def _read(runs: Iterable[RunFile]) -> Iterator[Run]:
    for run in runs:
        try:
            yield Run(run, run.read(partly=True))
        except (OSError, SnapshotError):
            continue  # it has only begun, or is none of ours


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
