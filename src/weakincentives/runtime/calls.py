"""The calls of a workspace: the records of its runs, joined with the history of the directory.

Reading takes no lock, so it works while an agent runs. Values stay in their JSON form: showing a
call does not load the types it used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, cast

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.gc_pause import no_collection
from weakincentives.core.logs import get_logger
from weakincentives.core.text import letters
from weakincentives.errors import SnapshotError
from weakincentives.filesystem import (
    BranchHistory,
    BranchInfo,
    Committed,
    FileChange,
    FilesAt,
    HostFilesystem,
    WorkspaceHistory,
    branches_of,
)
from weakincentives.filesystem.diffs import Detail
from weakincentives.filesystem.history import BRANCHES
from weakincentives.filesystem.store import Limits, Note, location_of
from weakincentives.filesystem.tree import files_below
from weakincentives.runtime.at import (
    StateAt,
    moment_of,
    outermost,
    serial_at,
)
from weakincentives.runtime.conversation import Message, still_seen
from weakincentives.runtime.index import MESSAGES, RECORDS, CallIndex, fields_of
from weakincentives.runtime.rows import CallRows, RowChange, RowHistory
from weakincentives.runtime.saved import SavedSession, not_undone
from weakincentives.runtime.stores.saves import SavedSessionData, inherited_calls
from weakincentives.serde.exact import plain, thaw
from weakincentives.session.session import Session
from weakincentives.session.slices import Slice

_logger = get_logger(__name__)

_COMPACTIONS = "weakincentives.runtime.conversation:ContextCompacted"
_ENDS = "weakincentives.session.events:PromptExecuted"
_SUFFIX = ".jsonl"
ROLLED_BACK = "rolled back"
"""Notes in a branch when a program was rolled back whose changes it has: no call of its own."""
_MANY = 10_000
"""Runs beyond which the letters in an id are more."""


@dataclass(frozen=True)
class Run:
    """A run, and the file of its session."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.stem

    @property
    def mark(self) -> str:
        """The letters at the end of the id: a short name to type."""
        return self.id.rpartition("-")[2]

    @property
    def saved_at(self) -> float:
        """When it was last saved, in unix seconds; 0 if the file is gone."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    @cached_property
    def data(self) -> SavedSessionData:
        """The records up to the first damaged line; raises SnapshotError if none can be read."""
        return SavedSessionData.read(self.path, partly=True)

    @cached_property
    def index(self) -> CallIndex:
        """Where its calls are."""
        with no_collection():
            return CallIndex.of(self.data.log, self.inherited)

    @cached_property
    def messages(self) -> Slice[Message]:
        """All messages of its conversations; each is decoded when it is first read."""
        return Slice[Message].decoded(self.data.log.get(MESSAGES, []), _thawed)

    @property
    def branch(self) -> str:
        """The branch that it works on; empty for the directory itself."""
        return str(self.data.about.get("branch") or "")

    @property
    def is_dry(self) -> bool:
        return bool(self.data.about.get("dry_run"))

    @property
    def title(self) -> str:
        """Its task, or else its title or kind."""
        about = self.data.about
        return str(about.get("task") or about.get("title") or about.get("kind") or "")

    def sitting(self, moment: float) -> int:
        """Return which start of an MCP server was the last before a moment; 0 for other runs.

        A server resumes its session whenever a client starts it. What a person calls the last run
        is what was done since then; a resumed `wink run` is one run.
        """
        if self.data.about.get("kind") != "mcp":
            return 0
        return bisect_right(self.data.resumed, moment)

    @property
    def has_ended(self) -> bool:
        """Whether the model has finished, and got no message since."""
        ends = self._log(_ENDS)
        messages = [each for each in self._log(MESSAGES) if not each.get("depth")]
        last = messages[-1].get("conversation") if messages else None
        own = [each for each in messages if each.get("conversation") == last]
        seen = still_seen((each.get("rewound_to"), each.get("as_of")) for each in own)
        is_over = bool(ends) and ends[-1]["stop_reason"] in ("end_turn", "max_tokens", "refusal")
        if not is_over or not seen:
            return False
        newest = own[seen[-1]]
        return newest.get("role") == "model" and not plain(newest.get("tool_calls"))

    @property
    def turns(self) -> int:
        """The number of requests to the model: its turns, and summaries of the conversation."""
        messages = self._log(MESSAGES)
        turns = sum(each.get("role") == "model" and not each.get("depth") for each in messages)
        return turns + sum(bool(each.get("summary")) for each in self._log(_COMPACTIONS))

    @property
    def compactions(self) -> int:
        """How often the conversation was shortened for the model."""
        return len(self._log(_COMPACTIONS))

    @property
    def inherited(self) -> int:
        """How many calls it has from the run that it was forked from, which lists them."""
        return inherited_calls(self.data.about)

    def calls(self, after: int = 0) -> list[Call]:
        """Return its own calls, oldest first, or only those after the call with a number."""
        start = max(self.inherited, after)
        with no_collection():
            records = map(fields_of, self.data.log.get(RECORDS, [])[start:])
            calls = [
                Call(
                    call_id=str(record["call_id"]),
                    tool=str(record["tool_name"]),
                    time=float(record["timestamp"]),
                    run=self,
                    number=number,
                    record=record,
                )
                for number, record in enumerate(records, start + 1)
                if "call_id" in record
            ]
            later: dict[str, Call] = {}
            for call in reversed(calls):  # a call ends after those nested in it
                assert call.record is not None
                call.outer = later.get(str(call.record.get("nested_in", "")))
                later[call.call_id] = call
            return calls

    def answer_to(self, call_id: str) -> str | None:
        """Return the tool message that the model got for a call; None if it made no such call."""
        place = self.index.answered.get(call_id)
        if place is None:
            return None
        return str(plain(fields_of(self.data.log[MESSAGES][place])["text"]))

    def _log(self, kind: str) -> list[Mapping[str, Any]]:
        return [fields_of(value) for value in self.data.log.get(kind, ())]


def new_run(store: Path, mark: str = "") -> Run:
    """Return a run that begins now, with a new id; ``store`` is ``HostFilesystem.store``."""
    moment = datetime.fromtimestamp(SYSTEM_CLOCK.time(), UTC).strftime("%Y%m%d-%H%M%S")
    return Run(_folder(store) / f"{moment}-{mark or new_mark(store)}{_SUFFIX}")


def run_file(store: Path, run_id: str) -> Run:
    """Return where a run with this id is, or would be, in a store."""
    return Run(_folder(store) / f"{run_id}{_SUFFIX}")


def new_mark(store: Path) -> str:
    """Return letters for the end of a run's id that no other run of a workspace has."""
    taken: set[str] = set()
    with suppress(OSError):
        taken.update(Run(Path(name)).mark for name in os.listdir(_folder(store)))
    while (mark := letters(os.urandom(3 if len(taken) < _MANY else 5))) in taken:
        pass
    return mark


def open_run(
    workspace: str | os.PathLike[str] | HostFilesystem,
    title: str = "",
    *,
    key: str = "",
    types: Iterable[type] = (),
) -> SavedSession:
    """Begin a run on a workspace: `wink log` shows the calls of its session, saved as they end.

    With a key, the run that was begun with the same key is continued; ``types`` are those in its
    session that no imported module defines. Use it in a ``with`` block:

    >>> with open_run(".", "Nightly cleanup") as run:  # doctest: +SKIP
    ...     tools = ToolRegistry([...], workspace=".", session=run.session)

    Raises:
        SessionInUse: The run is open, here or in another process.
        SnapshotError: The run to continue is damaged, or has values of unknown types.
    """
    if isinstance(workspace, HostFilesystem):
        store = workspace.store
    else:
        store = location_of(Path(workspace).resolve())
        Note.read(store)
    # The letters of a key are found without opening the other runs.
    mark = letters(hashlib.sha256(key.encode()).digest()[:8]) if key else ""
    for path in sorted(_folder(store).glob(f"*-{mark}{_SUFFIX}")) if key else ():
        if Run(path).data.about.get("key") == key:
            return SavedSession.open(path, types=types)
    return begin_run(store, {"kind": "hosted", "title": title, "key": key}, mark)


def begin_run(store: Path, about: Mapping[str, object], mark: str = "") -> SavedSession:
    """Begin a run whose session is saved from now on; ``store`` is ``HostFilesystem.store``."""
    tidy_runs(store)
    while True:
        run = new_run(store, mark)
        try:
            return SavedSession.create(run.path, Session(session_id=run.id), about=about)
        except FileExistsError:  # another process has begun a run with this id just now
            if mark:
                raise


def runs_of(workspace: Path) -> tuple[Run, ...]:
    """Return the runs of a workspace, oldest first. Takes no lock: an agent may be running.

    Raises:
        StoreRefused: The store may not have been written by this user.
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


# Removing old runs

RUN_LIMITS = Limits(count=1_000, newest=20)
UNFINISHED_DAYS = 30.0
"""How long a run that has not finished stays, whatever the limits."""
_ID = re.compile("[0-9]{8}-[0-9]{6}-[a-z0-9]+")
_AT_ONCE = 8
"""How many old runs are looked at when a new one begins."""


def tidy_runs(store: Path) -> None:
    """Delete a few of the oldest runs beyond the limits: for the beginning of a new run."""
    delete_runs(islice(old_runs(store, RUN_LIMITS, most=_AT_ONCE), _AT_ONCE))


def delete_runs(runs: Iterable[Run]) -> list[Run]:
    """Delete runs with everything that belongs to them; returns those that were not in use."""
    deleted: list[Run] = []
    for run in runs:
        try:
            if SavedSession.delete(run.path):
                deleted.append(run)
        except OSError as error:
            _logger.warning("The run %s could not be deleted: %s", run.id, error)
    return deleted


def old_runs(store: Path, limits: Limits, *, most: int | None = None) -> Iterator[Run]:
    """Yield the runs beyond some limits, oldest first, and remains of deleted ones.

    Never the newest, a run in use, one that has not finished and was saved in the last
    ``UNFINISHED_DAYS`` days, or one with a branch. At most ``most`` are looked at.
    """
    now = SYSTEM_CLOCK.time()
    saved, remains = _saved(store)
    yield from remains
    total, count = sum(size for _, size, _ in saved), len(saved)
    for at, size, run in saved[:-1][:most]:
        if not limits.are_exceeded(total, count, lambda at=at: at, now):
            return
        if _may_go(run, now - at):
            yield run
            total, count = total - size, count - 1


def _may_go(run: Run, age: float) -> bool:
    with suppress(FileNotFoundError):
        if SavedSession.is_in_use(run.path):
            return False
        is_old = age > UNFINISHED_DAYS * 86_400
        try:
            branch = run.data.about.get("branch")
            folder = run.path.parent.parent / BRANCHES
            return not (branch and (folder / str(branch)).exists()) and (is_old or run.has_ended)
        except SnapshotError:
            return is_old
    return False


def _saved(store: Path) -> tuple[list[tuple[float, int, Run]], list[Run]]:
    """Return time, size and run of all that are saved, oldest first, and those half deleted."""
    sizes: Counter[str] = Counter()
    times: dict[str, float] = {}
    with suppress(FileNotFoundError), os.scandir(_folder(store)) as found:
        for each in found:
            status, stem = each.stat(follow_symlinks=False), each.name.partition(".")[0]
            if stat.S_ISLNK(status.st_mode) or not _ID.fullmatch(stem):
                continue  # not ours
            below = files_below(Path(each.path)) if stat.S_ISDIR(status.st_mode) else ()
            sizes[stem] += status.st_size + sum(file.st_size for file in below)
            if each.name == f"{stem}{_SUFFIX}":
                times[stem] = status.st_mtime
    runs = {stem: Run(_folder(store) / f"{stem}{_SUFFIX}") for stem in sizes}
    saved = sorted((times[stem], sizes[stem], stem) for stem in times)
    return (
        [(at, size, runs[stem]) for at, size, stem in saved],
        [runs[stem] for stem in sizes.keys() - times.keys()],
    )


@dataclass(kw_only=True, eq=False)
class Call:
    """One call: in the records of a run, in the history of the directory, or in both."""

    call_id: str
    tool: str
    """Empty for changes outside of any call."""
    time: float
    run: Run | None = None
    number: int = 0
    """Its number in the run; the first is 1."""
    record: Mapping[str, Any] | None = None
    """The fields of its ToolInvoked, in JSON form."""
    outer: Call | None = None
    """The call that it is nested in, if any."""
    committed: Committed | None = None
    """Its entry in the history: what can be undone of it."""
    branch: str = ""
    """The branch whose history has it; empty for that of the directory."""
    is_undone: bool = False
    is_partly_undone: bool = False
    """Whether the undo left something of it: what others had changed since."""
    files: tuple[FileChange, ...] = ()
    """The files it changed; filled in by ``Calls.with_files``."""
    rows: Sequence[tuple[RowHistory, Sequence[RowChange]]] = ()
    """The rows it changed, by database; filled in by ``Calls.with_files``."""
    row_undoes: tuple[str, ...] = ()
    """The ids of the calls whose rows it undid."""
    has_rows: bool = False
    """Whether it is on record in a database."""
    rows_are_undone: bool = False

    @property
    def name(self) -> str:
        """Its name for people."""
        if self.run is not None:
            return f"{self.run.mark}/{self.number}"
        return f"{self.branch}/{self.call_id}" if self.branch else self.call_id

    @property
    def undoes(self) -> tuple[str, ...]:
        """The ids of the calls that it undid."""
        return self.row_undoes if self.committed is None else tuple(self.committed.undoes)

    @property
    def result(self) -> Mapping[str, Any]:
        return {} if self.record is None else fields_of(self.record.get("result"))

    @property
    def arguments(self) -> object:
        return None if self.record is None else plain(self.record["params"])

    @property
    def details(self) -> dict[str, Any]:
        """What its record says of how it went, as plain JSON; empty without a record."""
        if self.record is None:
            return {}
        record, result = self.record, cast("dict[str, Any]", plain(dict(self.result)))
        metadata: dict[str, Any] = result.get("metadata") or {}
        return {
            "duration": record.get("duration", 0.0),
            "attempts": max(record.get("attempts", 1), metadata.get("attempts", 1)),
            "policies": plain(record.get("policies", [])),
            "denied_by": record.get("denied_by", ""),
            "notes": plain(record.get("notes", [])),
            "conflicts": plain(record.get("conflicts", [])),
            "message": str(result.get("message", "")),
            "value": result.get("value"),
            "failure": result.get("failure"),
            "rolled_back": metadata.get("undone", []),
            "not_rolled_back": metadata.get("not_undone", []),
            "degraded": metadata.get("degraded", []),
        }

    @property
    def is_suspended(self) -> bool:
        """Whether it was rolled back to wait for an answer from outside."""
        return fields_of(self.result.get("failure") or {}).get("code") == "SUSPENDED"

    @property
    def can_be_undone(self) -> bool:
        """Whether its changes are in place, or some of them."""
        in_files = self.committed is not None and (not self.is_undone or self.is_partly_undone)
        return in_files or (self.has_rows and not self.rows_are_undone)

    @property
    def has_changes(self) -> bool:
        """Whether the history of the directory, or a database, knows what it changed."""
        return self.committed is not None or self.has_rows

    @property
    def outcome(self) -> str:
        """How it ended, in a word or two."""
        if self.has_changes and not self.can_be_undone:
            return "undone"
        if self.is_undone or self.rows_are_undone:
            return "partly undone"
        if self.has_changes:
            return "undo" if self.undoes else "committed"
        if self.record is None or self.record["success"]:
            # Its changes were committed, or not, with the call it is nested in.
            if self.outer is not None and self.outer.outcome not in ("ok", "committed"):
                return self.outer.outcome
            return "dry run" if self.run is not None and self.run.is_dry else "ok"
        if self.record["denied_by"]:
            return "denied"
        if self.is_suspended:
            return "suspended"
        return "rolled back" if self.record["ran"] else "refused"

    @property
    def shown(self) -> str:
        """Its result as the model saw it."""
        if self.record is None or self.run is None:
            return ""
        answer = self.run.answer_to(self.call_id)
        return rendered_result(self.record["result"]) if answer is None else answer


class Commits:
    """The commits of a history by call, and the calls that are undone in it."""

    def __init__(self, history: Iterable[Committed] = ()) -> None:
        self.by_call: dict[str, list[Committed]] = {}
        """Oldest first; a call id may have been committed repeatedly."""
        self.undone: Set[str] = frozenset()
        """Another object as soon as something else is undone."""
        self.partly: Set[str] = frozenset()
        """Those of them of which something is left."""
        self._history: list[Committed] = []
        self.extend(history)

    def extend(self, added: Iterable[Committed]) -> None:
        """Add new commits; costs only those, unless they undo something."""
        added = list(added)
        for each in added:
            self.by_call.setdefault(each.call_id, []).append(each)
        self._history += added  # another thread counts only commits that it can find
        if any(each.undoes or each.call_id in self.undone for each in added):
            live = not_undone(self._history)
            self.partly = _partly_undone(self._history, live)
            self.undone = self.by_call.keys() - live

    @property
    def count(self) -> int:
        return len(self._history)


def _partly_undone(history: Sequence[Committed], live: Set[str]) -> set[str]:
    """Return the calls of which the newest undo that is in place left something."""
    found: dict[str, bool] = {}
    for each in reversed(history):
        if each.call_id in live:
            for other in each.undoes:
                found.setdefault(other, other in each.partly)
    return {call_id for call_id, is_partly in found.items() if is_partly}


def join(call: Call, histories: Mapping[str, Commits]) -> None:
    """Fill in the commit of a call, given the histories of the directory and of branches."""
    if call.is_suspended:  # what its id has in the history is from when it was made again
        return
    on_branch = "" if call.run is None else call.run.branch
    for branch in [call.branch] if call.branch else ["", on_branch]:
        commits = histories.get(branch)
        if commits is not None and call.call_id in commits.by_call:
            call.branch, call.committed = branch, commits.by_call[call.call_id][-1]
            call.is_undone = call.call_id in commits.undone
            call.is_partly_undone = call.is_undone and call.call_id in commits.partly
            return


class Calls:
    """The calls of a workspace; lines are counted in files for which ``detail`` returns true."""

    def __init__(
        self,
        workspace: Path,
        *,
        detail: Detail | None = None,
        databases: Sequence[RowHistory] = (),
    ) -> None:
        self.workspace = workspace
        self.databases = databases
        self.history = WorkspaceHistory(workspace)
        self._histories: dict[str, WorkspaceHistory | BranchHistory] = {"": self.history}
        self._detail = detail

    @cached_property
    def _history(self) -> tuple[Committed, ...]:
        return self.history.calls()

    @property
    def committed(self) -> dict[str, Committed]:
        """The calls in the history of the directory by id, oldest first."""
        return self._committed_on("")

    def _committed_on(self, branch: str) -> dict[str, Committed]:
        return {call_id: each[-1] for call_id, each in self._commits[branch].by_call.items()}

    @cached_property
    def branches(self) -> dict[str, BranchInfo]:
        """The branches by name, oldest first."""
        return {each.name: each for each in branches_of(self.workspace)}

    @cached_property
    def _commits(self) -> dict[str, Commits]:
        """The commits of the directory, under the empty name, and of each branch."""
        on_branches = {name: Commits(info.commits) for name, info in self.branches.items()}
        return {"": Commits(self._history), **on_branches}

    @cached_property
    def _in_databases(self) -> Sequence[tuple[RowHistory, dict[str, CallRows], Set[str]]]:
        """Each database that can be read, its calls by id, and those that are undone."""
        found: list[tuple[RowHistory, dict[str, CallRows], Set[str]]] = []
        for database in self.databases:
            try:
                calls = [each for each in database.calls() if each.count]
            except Exception as error:  # of any driver
                self.unreadable.append(f"{database.title} cannot be read: {_first_line(error)}")
                continue
            by_id = {each.call_id: each for each in calls}
            found.append((database, by_id, by_id.keys() - not_undone(calls)))
        return found

    @cached_property
    def unreadable(self) -> list[str]:
        """A sentence for each database that could not be read."""
        return []

    def history_on(self, branch: str) -> WorkspaceHistory | BranchHistory:
        """Return the history of a branch, or that of the directory if the name is empty."""
        if branch not in self._histories:
            self._histories[branch] = BranchHistory(self.workspace, self.branches[branch])
        return self._histories[branch]

    def history_of(self, call: Call) -> WorkspaceHistory | BranchHistory:
        """Return the history that a call is in; raises LookupError as ``place_of`` does."""
        return self.history_on(self._branch_of(call))

    def place_of(self, call: Call, *, before: bool = False) -> tuple[str, int]:
        """Return the branch of a call, and the commit whose files it has left or found.

        The name of the branch is empty for the directory itself.

        Raises:
            LookupError: It was made on a branch that is gone, or the history no longer goes back
                that far.
        """
        branch, committed = self._branch_of(call), outermost(call).committed
        if call.run is None:
            assert committed is not None
            return branch, committed.serial - before
        newest_first = reversed(self.branches[branch].commits if branch else self._history)
        return branch, serial_at(moment_of(call), call.run.index, newest_first, before=before)

    def _branch_of(self, call: Call) -> str:
        name = call.branch
        if not name and call.committed is None and call.run is not None:
            name = call.run.branch
            info = self.branches.get(name)
            if name and (info is None or call.time < _beginning(info)):
                raise LookupError(
                    f"{call.name} was made on the branch {name}, which is gone; `wink log --run"
                    f" {call.run.mark}` shows the call that merged it"
                )
        return name

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The runs of the workspace, oldest first; each is read at most once."""
        return runs_of(self.workspace)

    @property
    def newest_runs(self) -> list[Run]:
        """The runs by their last save, newest first: an old run may have been resumed."""
        return sorted(self.runs, key=lambda run: run.saved_at, reverse=True)

    def of_run(self, run: Run) -> list[Call]:
        """Return the calls of a run, oldest first; raises SnapshotError if it cannot be read."""
        return self._joined(run.calls())

    def latest(self, count: int | None, run: Run | None = None) -> list[Call]:
        """Return the newest ``count`` calls, or all, with their files; oldest first."""
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

    def changed(self, branch: str = "") -> list[Call]:
        """Return the calls in the history of the directory, or of a branch, oldest first."""
        records = {call.call_id: call for call in _readable_calls(self.runs)}
        found = {
            call_id: records.get(call_id) or _unrecorded(each, branch)
            for call_id, each in self._committed_on(branch).items()
        }
        if branch:
            return self._joined(found.values())
        for _, by_id, _ in self._in_databases:
            for call_id, each in by_id.items():
                if call_id not in found:
                    found[call_id] = records.get(call_id) or _only_in_database(each)
        joined = self._joined(found.values())
        if self._in_databases:
            joined.sort(key=lambda call: call.time)
        return joined

    def by_run(self) -> list[list[Call]]:
        """Return the calls in the history by run, the run with the newest change last.

        A call without a run is by itself. What a person has undone is no run.
        """
        groups: dict[object, list[Call]] = {}
        for call in self.changed():
            if call.run is None and call.undoes:
                continue
            key = call.run and (call.run.id, call.run.sitting(call.time))
            group = groups.pop(key or call.call_id, [])
            group.append(call)
            groups[key or call.call_id] = group
        return list(groups.values())

    def by_id(self, call_id: str) -> Call | None:
        """Return the call with this id, or None."""
        for call in self._joined(_readable_calls(self.newest_runs)):
            if call.call_id == call_id:
                return call
        branch, _, unrecorded = call_id.rpartition("/")
        found = self._committed_on(branch) if branch in self._commits else {}
        committed = found.get(unrecorded)
        if committed is not None:
            return self._joined([_unrecorded(committed, branch)])[0]
        for _, by_id, _ in self._in_databases:
            if call_id in by_id:
                return self._joined([_only_in_database(by_id[call_id])])[0]
        return None

    def at(self, call: Call, *, before: bool = False, types: Iterable[type] = ()) -> StateAt:
        """Return files, session and conversation just after a call, or before it.

        Nothing is changed and no lock is taken. ``types`` are those in the session that no
        imported module defines.

        Raises:
            LookupError: The history no longer goes back that far.
        """
        files = self.files_at(call, before=before)
        return StateAt(files=files, call=call, before=before, types=tuple(types))

    def files_at(self, call: Call, *, before: bool = False) -> FilesAt:
        """Return the files just after a call, or before it; raises LookupError as ``at`` does."""
        branch, serial = self.place_of(call, before=before)
        return self.history_on(branch).files_at(serial)

    def names(self) -> dict[str, str]:
        """Return the names for people of the calls in the history, by id."""
        return {call.call_id: call.name for call in self.changed()}

    def damage(self) -> Iterator[str]:
        """Yield a sentence for each run whose file is damaged."""
        for run in self.runs:
            try:
                if run.data.damage:
                    yield f"{run.data.damage}: the rest of the file is not shown"
            except (OSError, SnapshotError) as error:
                if run.path.exists() and run.path.stat().st_size:  # else nothing was saved yet
                    yield str(error)

    def with_files(self, calls: list[Call]) -> list[Call]:
        """Fill in the files that calls changed, reading the history from the newest on."""
        for branch in {call.branch for call in calls}:
            wanted = {
                each.call_id: each for each in calls if each.committed and each.branch == branch
            }
            for changes in self.history_on(branch).changes(self._detail) if wanted else ():
                call = wanted.pop(changes.call.call_id, None)
                if call is not None:
                    call.files = changes.files
                if not wanted:
                    break
        self._fill_in_rows(calls)
        return calls

    def _fill_in_rows(self, calls: Sequence[Call]) -> None:
        with_rows = {call.call_id: call for call in calls if call.has_rows}
        for database, by_id, _ in self._in_databases if with_rows else ():
            wanted = [call_id for call_id in with_rows if call_id in by_id]
            for call_id, rows in database.changes(wanted).items():
                call = with_rows[call_id]
                call.rows = [*call.rows, (database, rows)]

    def _joined(self, calls: Iterable[Call]) -> list[Call]:
        calls = list(calls)
        for call in calls:
            join(call, self._commits)
            for _, by_id, undone in self._in_databases:
                row = by_id.get(call.call_id)
                if row is not None:
                    call.has_rows, call.row_undoes = True, row.undoes
                    call.rows_are_undone = call.call_id in undone
        return calls

    def _without_a_run(self, calls: list[Call]) -> list[Call]:
        """Return calls without a record in a run: of other programs, or an undo by a person."""
        known = {call.call_id for call in calls}
        oldest = min((call.time for call in calls), default=0.0)
        in_files = {call_id for branch in self._commits for call_id in self._committed_on(branch)}
        only_rows = {
            call_id: each
            for _, by_id, _ in self._in_databases
            for call_id, each in by_id.items()
            if call_id not in known and call_id not in in_files and each.at >= oldest
        }
        shown = (
            branch
            for branch in self._commits
            if not branch or ROLLED_BACK not in self.branches[branch].about
        )
        committed = (
            _unrecorded(each, branch)
            for branch in shown
            for each in self._committed_on(branch).values()
            if each.call_id not in known and each.time >= oldest
        )
        return self._joined([*committed, *map(_only_in_database, only_rows.values())])


def _beginning(branch: BranchInfo) -> float:
    """Return when a branch began; rebasing begins it again."""
    return min([branch.began, *(each.time for each in branch.commits[:1])])


def in_place(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of a run whose changes are in place."""
    own = {call.call_id for call in calls}
    return [
        call
        for call in calls
        if (
            (call.committed is not None and not call.is_undone)
            or (call.has_rows and not call.rows_are_undone)
        )
        # An undo of the run's own calls leaves nothing to undo.
        and not (call.undoes and own.issuperset(call.undoes))
    ]


def _unrecorded(committed: Committed, branch: str = "") -> Call:
    return Call(call_id=committed.call_id, tool=committed.tool, time=committed.time, branch=branch)


def _only_in_database(found: CallRows) -> Call:
    return Call(call_id=found.call_id, tool=found.tool, time=found.at)


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


def _readable_calls(runs: Iterable[Run]) -> Iterator[Call]:
    for run in runs:
        try:
            yield from run.calls()
        except (OSError, SnapshotError):
            continue  # nothing was saved yet, or the file is not ours


# Values in their JSON form


def _thawed(items: list[Any]) -> tuple[Message, ...]:
    return tuple(map(thaw, items))


def rendered_result(result: Any) -> str:
    """Return a result as the model saw it, if its types can be loaded; else its fields."""
    try:
        for module in set(
            re.findall(r'"(weakincentives(?:\.\w+)+):', json.dumps(result, default=str))
        ):
            if module not in sys.modules:
                import_module(module)  # only our own modules, whatever the file says
        return str(thaw(result).render())
    except (SnapshotError, ImportError):
        return plain_result(result)


def plain_result(result: Any) -> str:
    """Return the message and the value of a result."""
    fields = fields_of(result)
    message, value = (plain(fields.get(name)) for name in ("message", "value"))
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "\n".join(str(part) for part in (message, value and shown) if part)
