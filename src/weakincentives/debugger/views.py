"""What the page shows, as JSON data: runs, calls, files, slices and prompts.

Nothing is changed and no lock is taken, so an agent may be running. Each answer has a path, such as
``runs/ID/calls/7``: the live page asks the server for it, and an export has it embedded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from weakincentives.adapters.catalog import known_price
from weakincentives.core.budget import TokenPrice, TokenUsage
from weakincentives.debugger.contents import (
    Contents,
    VersionSteps,
    World,
    chain_of,
    from_wire,
    kind_of,
    text_of,
    to_json,
    to_wire,
    wire_path,
)
from weakincentives.debugger.records import (
    UNKNOWN,
    History,
    Json,
    NotFound,
    Placed,
    RunCalls,
    RunRecords,
    SliceNotes,
    TurnNotes,
)
from weakincentives.errors import WinkError
from weakincentives.filesystem import BranchInfo, WorkspaceHistory, branches_of
from weakincentives.filesystem.store import location_of
from weakincentives.filesystem.versions import (
    BranchVersions,
    CommitSteps,
    Versions,
    WorkspaceVersions,
)
from weakincentives.runtime.at import outermost
from weakincentives.runtime.calls import Call, Commits, Run, rendered_result, run_file, runs_of
from weakincentives.runtime.saved import SavedSession
from weakincentives.serde.exact import plain
from weakincentives.session.events import EDITED

_MAX_PATHS = 50_000
_MAX_COMPARED = 2_000
_SLACK = 1.0
"""Seconds; the time of a file is less exact than that of a commit."""


@dataclass(slots=True)
class _Known:
    """What is in memory of one run."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the file is read, never while an answer is made."""
    joining: threading.Lock = field(default_factory=threading.Lock)
    """Held while its calls are joined with the history, and while all of them are encoded."""
    records: RunRecords | None = None
    calls: RunCalls | None = None
    answer: tuple[object, str] = (None, "")
    """All turns and calls as JSON, and what it was made from."""


@dataclass(slots=True)
class _History:
    """What is in memory of the history of the directory, or of a branch."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    versions: Versions | None = None
    commits: Commits = field(default_factory=Commits)


class Views:
    """All that the page shows of one workspace. For use by several threads.

    Args:
        approvals: Returns the calls of live runs that wait for a person.
    """

    def __init__(
        self,
        workspace: Path,
        *,
        approvals: Callable[[], Sequence[Json]] = tuple,
        writable: bool = True,
    ) -> None:
        self.path = Path(os.path.realpath(workspace))
        self.approvals = approvals
        self.writable = writable
        self._runs: dict[str, _Known] = {}
        self._histories: dict[str, _History] = {}
        self._lock = threading.Lock()
        self.store = location_of(self.path)
        self._past = WorkspaceHistory(self.path).past()
        self.contents = Contents(self.path, self.store, lambda: self._history("").versions)

    # By path

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return the value of a path.

        Raises:
            NotFound: There is none.
            ValueError: The query is wrong.
        """
        query = query or {}
        match path.split("/"):
            case ["workspace"]:
                return self.workspace()
            case ["runs", run]:
                return self.run(run, after=_number(query, "after", 0))
            case ["runs", run, "calls", number] if number.isdecimal():
                return self.call(run, int(number))
            case ["runs", run, "tree"]:
                return self.tree(run)
            case ["runs", run, "file"]:
                return self.file(run, _number(query, "serial"), _asked(query, "path"))
            case ["runs", run, "versions"]:
                return self.versions(run, _asked(query, "path"))
            case ["runs", run, "slices"]:
                return self.slices(run, _asked(query, "key"))
            case ["runs", run, "prompts"]:
                return self.prompts(run)
            case ["runs", run, "search"]:
                from weakincentives.debugger.search import search

                kinds = query.get("in", "")
                return search(self, run, _asked(query, "q"), kinds.split(",") if kinds else ())
            case ["compare"]:
                a, b = _asked(query, "a"), _asked(query, "b")
                before = bool(query.get("before_a")), bool(query.get("before_b"))
                return self.compare(a, b, before=before)
            case _:
                raise NotFound(f"there is no {path}")

    def get_json(self, path: str, query: Mapping[str, str] | None = None) -> str:
        """Return the value of a path as JSON."""
        match path.split("/"):
            case ["runs", run] if not query:
                return self._run_json(run)
            case _:
                return to_json(self.get(path, query))

    # The workspace

    def workspace(self) -> Json:
        runs = runs_of(self.path)
        return {
            "name": self.path.name,
            "path": str(self.path),
            "writable": self.writable,
            "runs": [self.summary(run) for run in runs],
            "branches": self.branches(runs),
            "approvals": list(self.approvals()),
        }

    def branches(self, runs: Sequence[Run] | None = None) -> list[Json]:
        """Return the branches; the run of each is the newest one that works on it."""
        by_branch: dict[str, str] = {}
        for run in runs_of(self.path) if runs is None else runs:
            with contextlib.suppress(OSError, WinkError, NotFound):
                by_branch[self.records(run.id).run.branch] = run.id
        with contextlib.suppress(OSError, WinkError):
            return [
                {
                    "name": each.name,
                    "run": by_branch.get(each.name),
                    "base": each.base,
                    "commits": len(each.commits),
                    "files": [to_wire(path) for path in each.paths],
                    "inUse": each.is_in_use,
                    "time": each.commits[-1].time if each.commits else each.began,
                }
                for each in branches_of(self.path)
            ]
        return []

    def summary(self, run: Run) -> Json:
        """Return what lists show of a run, or why it cannot be read."""
        summary: Json = {
            "id": run.id,
            "mark": run.mark,
            "title": "",
            "kind": "",
            "model": "",
            "began": run.saved_at,
            "saved": run.saved_at,
            "state": "interrupted",
            "branch": "",
            "dry": False,
            "forkedFrom": None,
            "turns": 0,
            "calls": 0,
            "tokens": 0,
            "cost": None,
            "damage": None,
            "result": None,
        }
        try:
            summary |= _summary(self.records(run.id))
            # While a run goes on, each look would count all its calls again.
            if summary["state"] != "running":
                summary["result"] = _result(self.joined(run.id))
        except (OSError, WinkError, NotFound) as error:
            return summary | {"damage": str(error), "state": _state(run)}
        return summary

    # One run

    def run(self, run_id: str, *, after: int = 0) -> Json:
        """Return the turns and calls of a run, or only those after a call, and the commits."""
        joined = self.joined(run_id)
        return {"run": _summary(joined.records), **self._timeline(joined, after)}

    def _run_json(self, run_id: str) -> str:
        """Return a whole run as JSON; encodes it only when it has changed."""
        joined, known = self.joined(run_id), self._known(run_id)
        state = joined, joined.records.version
        with known.joining:
            if known.answer[0] != state:
                known.answer = state, to_json(self._timeline(joined))
            rest = known.answer[1]
        return f'{{"run":{to_json(_summary(joined.records))},{rest[1:]}'

    def _timeline(self, joined: RunCalls, after: int = 0) -> Json:
        records, run = joined.records, joined.records.run
        known = joined.until(after)
        sent = max(joined.base, joined.placed[known - 1].highest if known else 0)
        price, least = _price(run), max(run.inherited, after)
        first = bisect_left(records.turns, True, key=lambda turn: _is_shown(turn, least))
        return {
            "turns": [_turn(turn, price, run.inherited) for turn in records.turns[first:]],
            "calls": [_row(each, joined) for each in joined.placed[known:]],
            "commits": self._commits(joined, sent),
            "base": joined.base,
            "prompts": len(records.prompts),
            "slices": [
                {
                    "name": each.name,
                    "key": each.key,
                    "log": each.is_log,
                    "versions": len(each.steps),
                }
                for each in records.slices.values()
            ],
            "note": _note(joined),
        }

    def call(self, run_id: str, number: int) -> Json:
        joined = self.joined(run_id)
        placed, records = joined.find(number), joined.records
        notes, row = records.notes[number - 1], _row(placed, joined)
        record = records.fields(notes.item)
        answer = records.answer(number)
        commit = joined.commit_of(placed)
        changes = [] if commit is None else self.contents.changes(joined.versions, commit)
        return {
            **row,
            **_page_of(replace(placed.call, record=record)),
            "text": _text_of_turn(records, row["turn"]),
            "result": _shown(record, None if answer is None else records.fields(answer)),
            "changes": changes,
            "state": [_slice_diff(records, records.slices[k], number) for k in notes.slices],
            "canUndo": self.writable and commit is not None and placed.call.can_be_undone,
        }

    def slices(self, run_id: str, key: str) -> Json:
        records = self.records(run_id)
        found = records.slices.get(key)
        if found is None:
            raise NotFound(f"the run has no slice {key}")
        steps = zip(found.steps, records.added(found.steps), strict=True)
        return {
            "key": key,
            "name": found.name,
            "log": found.is_log,
            "steps": [
                {"call": each.call, "keep": each.keep, "added": added, "between": each.between}
                for each, added in steps
            ],
        }

    def prompts(self, run_id: str) -> Json:
        records = self.records(run_id)
        found = list(records.prompts)
        fields = records.all_fields([each.item for each in found])
        return {
            "prompts": [
                {
                    "turn": each.turn,
                    "time": prompt.get("timestamp", 0.0),
                    "text": str(plain(prompt.get("text", ""))),
                    "tools": plain(prompt.get("tool_names", [])),
                    "sections": _sections(prompt),
                }
                for each, prompt in zip(found, fields, strict=True)
            ]
        }

    # Files

    def tree(self, run_id: str) -> Json:
        joined = self.joined(run_id)
        found = self.contents.paths_at(World(joined.versions, joined.base))
        paths = sorted(to_wire("/".join(parts)) for parts in found)
        return {
            "serial": joined.base,
            "paths": paths[:_MAX_PATHS],
            "truncated": len(paths) > _MAX_PATHS,
        }

    def file(self, run_id: str, serial: int, path: str) -> Json:
        parts = from_wire(path)
        joined = self.joined(run_id)
        if serial > joined.versions.last:
            raise NotFound(f"there is no commit {serial}")
        entry, read = self.contents.at(World(joined.versions, serial), parts)
        text, note = text_of(entry, read)
        size = 0 if entry is None else entry.size
        exists = entry is not None
        found = {"path": path, "serial": serial, "exists": exists, "text": text}
        return found | {"note": note, "size": size}

    def versions(self, run_id: str, path: str) -> Json:
        parts = from_wire(path)
        joined = self.joined(run_id)
        versions = joined.versions
        chain = chain_of(versions, parts, joined.base, joined.top)
        first = chain[0][2] if chain else parts
        entry, read = self.contents.at(World(versions, joined.base), first)
        base, note = text_of(entry, read)
        names = self._names(joined, [commit for commit, _, _ in chain])
        steps = VersionSteps(versions, base, None if entry is None else entry.digest)
        for commit, step, here in chain:
            number = joined.commits.get(commit.call.serial)
            steps.add(commit, step, here, number, names[commit.call.serial])
        return {"path": path, "base": base, "note": note, "steps": steps.found}

    def compare(self, a: str, b: str, *, before: tuple[bool, bool] = (False, False)) -> Json:
        """Return what differs between the worlds of two calls, given as RUN/N."""
        sides: list[tuple[World, RunRecords, int, bool]] = []
        for name, is_before in zip((a, b), before, strict=True):
            run, _, number = name.rpartition("/")
            if not number.isdecimal():
                raise ValueError(f"{name!r} is not RUN/N")
            joined = self.joined(run)
            placed = joined.find(int(number))
            serial = placed.before if is_before else placed.after
            if serial == UNKNOWN:
                raise NotFound(_note(joined) or f"the files at {name} are not known")
            world = World(joined.versions, serial)
            sides.append((world, joined.records, outermost(placed.call).number, is_before))
        files = list(self.contents.differing(sides[0][0], sides[1][0]))
        return {
            "files": files[:_MAX_COMPARED],
            "slices": _differing_slices(sides[0][1:], sides[1][1:]),
            "truncated": len(files) > _MAX_COMPARED,
        }

    # What others share

    def records(self, run_id: str) -> RunRecords:
        """Return the records of a run as they are now; raises SnapshotError if none can be read."""
        is_name = run_id and not {"/", "\0"} & set(run_id) and not run_id.startswith(".")
        path = run_file(self.store, run_id).path
        if not is_name or not path.exists():
            raise NotFound(f"there is no run {run_id}")
        known = self._known(run_id)
        with known.lock:
            if known.records is None or not known.records.refresh():
                known.records = RunRecords(path)
            return known.records

    def joined(self, run_id: str) -> RunCalls:
        """Return the calls of a run with their places in the history."""
        records = self.records(run_id)
        branch = records.run.branch
        branch = branch if branch and branch in _branches(self.path) else ""
        histories = {name: self._history(name) for name in dict.fromkeys(["", branch])}
        known = self._known(run_id)
        with known.joining:
            calls = known.calls
            if calls is None or not calls.is_current(records, histories):
                calls = known.calls = RunCalls(records, branch, histories, calls)
            return calls

    def warm(self, run_id: str = "") -> None:
        """Read the history and all runs, this one or the newest first: a later look is fast."""
        with contextlib.suppress(OSError, WinkError, NotFound):
            newest_first = sorted(runs_of(self.path), key=lambda run: run.saved_at, reverse=True)
            for first in [run_id] if run_id else [run.id for run in newest_first[:1]]:
                self._run_json(first)
            for run in newest_first:
                self.summary(run)

    def changed_at(self) -> object:
        """Return a value that differs after a commit, or when there are other branches."""
        found = [0]
        with contextlib.suppress(OSError):
            found.append(os.stat(self.store / "branches").st_mtime_ns)
        with contextlib.suppress(WinkError):
            found += self._past.changed_at()
        return tuple(found)

    # Reading

    def _known(self, run_id: str) -> _Known:
        with self._lock:
            return self._runs.setdefault(run_id, _Known())

    def _history(self, branch: str) -> History:
        """Return the commits of a branch, or of the directory if the name is empty."""
        with self._lock:
            known = self._histories.setdefault(branch, _History())
        with known.lock:
            if branch:
                info, last = _branches(self.path)[branch], known.versions
                if not isinstance(last, BranchVersions) or last.info != info:
                    last = last if isinstance(last, BranchVersions) else None
                    known.versions = BranchVersions(self.path, info, last)
                    known.commits = Commits()
            versions = known.versions
            if versions is None:
                versions = known.versions = WorkspaceVersions(WorkspaceHistory(self.path))
            versions.refresh()
            known.commits.extend(each.call for each in versions.commits[known.commits.count :])
            return History(versions, known.commits)

    def _commits(self, joined: RunCalls, after: int) -> list[Json]:
        since = joined.versions.since(after)
        commits = [each for each in since if each.call.serial <= joined.top]
        names = self._names(joined, commits)
        return [
            {
                "serial": each.call.serial,
                "call": joined.commits.get(each.call.serial),
                "name": names[each.call.serial],
                "tool": each.call.tool,
                "time": each.call.time,
                "files": [
                    [
                        wire_path(step.parts),
                        kind_of(step),
                        wire_path(step.origin) if step.origin else "",
                    ]
                    for step in each.steps
                ],
            }
            for each in commits
        ]

    def _names(self, joined: RunCalls, commits: Sequence[CommitSteps]) -> dict[int, str]:
        """Return names for people of commits, by serial."""
        mark, own = joined.records.run.mark, joined.commits
        foreign = [each.call for each in commits if each.call.serial not in own]
        others = self._other_calls(joined, [each.time for each in foreign]) if foreign else {}
        return {
            each.call.serial: f"{mark}/{own[each.call.serial]}"
            if each.call.serial in own
            else others.get(each.call.call_id, each.call.call_id)
            for each in commits
        }

    def _other_calls(self, joined: RunCalls, times: Sequence[float]) -> dict[str, str]:
        """Return names of the calls of other runs at that time, by id."""
        found: dict[str, str] = {}
        for run in runs_of(self.path):
            if run.id == joined.records.run.id or run.saved_at + _SLACK < min(times):
                continue
            with contextlib.suppress(OSError, WinkError, NotFound):
                records = self.records(run.id)
                if records.run.data.began <= max(times):
                    found |= {each.call_id: each.name for each in records.run.calls()}
        return found


def _branches(workspace: Path) -> dict[str, BranchInfo]:
    with contextlib.suppress(OSError, WinkError):
        return {each.name: each for each in branches_of(workspace)}
    return {}


def _number(query: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    given = query.get(name)
    if given is None and otherwise is not None:
        return otherwise
    if given is None or not given.isdecimal() or len(given) > 15:
        raise ValueError(f"{name}= must be a number, got {given!r}")
    return int(given)


def _asked(query: Mapping[str, str], name: str) -> str:
    if not query.get(name):
        raise ValueError(f"{name}= is missing")
    return query[name]


def _note(joined: RunCalls) -> str:
    """Say why the files of some calls are not known, if so."""
    if joined.is_complete:
        return ""
    run = joined.records.run
    if run.branch and not joined.branch:
        return f"The run worked on the branch {run.branch}, which is gone: its files are not known"
    return "The history no longer goes back to the first calls: their files are not known"


# Rows


def _summary(records: RunRecords) -> Json:
    run, about = records.run, records.run.data.about
    price = _price(run)
    usages = [turn.usage for turn in records.turns]
    return {
        "id": run.id,
        "mark": run.mark,
        "title": run.title,
        "kind": str(about.get("kind") or ""),
        "model": str(about.get("model") or ""),
        "began": run.data.began,
        "saved": max(run.data.at, run.data.began),
        "state": _state(run, records),
        "branch": run.branch,
        "dry": run.is_dry,
        "forkedFrom": about.get("forked_from"),
        "turns": records.requests,
        "calls": len(records.notes) - run.inherited,
        "tokens": records.usage.total_tokens,
        "cost": None if price is None else sum(map(price.of, usages)),
        "damage": records.damage or None,
    }


def _result(joined: RunCalls) -> Json:
    """Return what a run came to: its files, and the calls that did not end well."""
    kinds: dict[str, str] = {}
    outcomes: Counter[str] = Counter()
    for placed in joined.placed:
        if placed.call.outer is not None:
            continue
        outcomes[placed.call.outcome] += 1
        commit = joined.commit_of(placed)
        if commit is None or placed.call.outcome == "undone":
            continue
        for step in commit.steps:
            path, kind = wire_path(step.parts), kind_of(step)
            if step.origin:
                _add(kinds, wire_path(step.origin), "deleted")
            _add(kinds, path, kind)
    return {
        "files": dict(Counter(kinds.values())),
        "outcomes": {name: outcomes[name] for name in _WORTH_A_LOOK if outcomes[name]},
        "exit": _exit_code(joined),
    }


_WORTH_A_LOOK = ("rolled back", "denied", "refused", "suspended", "undone", "partly undone")


def _add(kinds: dict[str, str], path: str, kind: str) -> None:
    """Note what a further call did to a file: what came and went is not a change."""
    match kinds.pop(path, None), kind:
        case "added", "deleted":
            pass
        case "added", "changed":
            kinds[path] = "added"
        case "deleted", "added":
            kinds[path] = "changed"
        case _:
            kinds[path] = kind


def _exit_code(joined: RunCalls) -> int | None:
    """Return the exit code of a program that `wink exec` ran."""
    records = joined.records
    if records.run.data.about.get("kind") != "exec" or not joined.placed:
        return None
    record = records.fields(records.notes[joined.placed[-1].call.number - 1].item)
    found = _EXITED.search(_shown(record, None))
    if found is None:
        return 0 if record["success"] else None
    return int(found[1])


_EXITED = re.compile(r" exited with code (\d+)$")


def _state(run: Run, records: RunRecords | None = None) -> str:
    with contextlib.suppress(OSError):
        if SavedSession.is_in_use(run.path):
            return "running"
    if records is None:
        return "interrupted"
    return "finished" if records.is_over else "interrupted"


def _price(run: Run) -> TokenPrice | None:
    """Return the price of the model that a run asked, if it is known."""
    about = run.data.about
    kind, _, name = str(about.get("model") or "").partition(":")
    if kind == "local":
        return TokenPrice(input=0, output=0)
    known = known_price(name or kind) or known_price(f"{kind}/{name}")
    flags = about.get("flags")
    given = cast("Mapping[str, object]", flags).get("price") if isinstance(flags, Mapping) else None
    if known is None and given:
        with contextlib.suppress(ValueError):
            read, written = map(float, str(given).split("/"))
            return TokenPrice(input=read, output=written)
    return known


def _is_shown(turn: TurnNotes, after: int) -> bool:
    """Whether a turn made a call after the one with this number, or came after it."""
    return turn.preceding >= after or any(number > after for number in turn.calls)


def _turn(turn: TurnNotes, price: TokenPrice | None, inherited: int) -> Json:
    usage: TokenUsage = turn.usage
    return {
        "n": turn.number,
        "text": turn.text,
        "calls": [number for number in turn.calls if number > inherited],
        "tokens": [usage.input_tokens, usage.output_tokens],
        "cost": None if price is None else price.of(usage),
        "user": turn.user,
    }


def _row(placed: Placed, joined: RunCalls) -> Json:
    call, commit, slices = placed.call, joined.commit_of(placed), joined.records.slices
    notes = joined.records.notes[call.number - 1]
    record = call.record or {}
    return {
        "n": call.number,
        "id": call.call_id,
        "tool": call.tool,
        "summary": notes.summary,
        "outcome": call.outcome,
        "time": call.time,
        "duration": record.get("duration", 0.0),
        "turn": joined.turn_of(call),
        "nestedIn": None if call.outer is None else call.outer.number,
        "place": record.get("place"),
        "lane": placed.lane,
        "attempts": record.get("attempts", 1),
        "retries": call.result.get("retries", 0),
        "conflicts": plain(record.get("conflicts", [])),
        "before": placed.before,
        "after": placed.after,
        "files": 0 if commit is None else len(commit.steps),
        "slices": [slices[key].name for key in notes.slices],
        "error": notes.error,
    }


# One call


def _page_of(call: Call) -> Json:
    """Return what the page shows of a call with its whole record."""
    details = call.details
    notes, failure = [str(each) for each in details["notes"]], details["failure"]
    return {
        "arguments": call.arguments,
        "edited": EDITED in notes,
        "problems": _problems(details["message"]),
        "policies": _policies(details, notes),
        "message": details["message"],
        "value": details["value"],
        "failure": failure and {**_FAILURE, **failure},
        "undone": details["rolled_back"],
        "notUndone": details["not_rolled_back"],
        "notes": [*notes, *map(str, details["degraded"])],
    }


_FAILURE: Json = {"code": "", "message": "", "recoverable": True, "suggestions": []}


def _problems(message: str) -> dict[str, str]:
    """Return what is wrong with arguments, by path, from the message that the model got."""
    if message.startswith("{"):
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            return {str(path): str(text) for path, text in json.loads(message)["details"].items()}
    return {}


def _policies(details: Json, notes: Sequence[str]) -> list[Json]:
    """Return the policies that were asked."""
    names, denied_by = [str(each) for each in details["policies"]], details["denied_by"]
    found: list[Json] = []
    is_denied = False
    for name in names:
        answer = "not asked" if is_denied else "allowed"
        if name == denied_by and not is_denied:
            answer, is_denied = "denied", True
        own = (note for note in notes if note.startswith(f"{name}: "))
        note = next(own, "").removeprefix(f"{name}: ")
        found.append({"name": name, "answer": answer, "note": note})
    return found


def _sections(prompt: Json) -> list[Json]:
    """Return the sections of a prompt without headings."""
    text, start = str(plain(prompt.get("text", ""))), 0
    found: list[Json] = []
    for path, length in cast("list[Any]", plain(prompt.get("sections", []))):
        block = text[start : start + length]
        body = block.partition("\n")[2].lstrip("\n") if block.startswith("#") else block
        found.append({"path": path, "text": body})
        start += length + 2
    return found


def _text_of_turn(records: RunRecords, turn: int) -> str:
    if not turn:
        return ""
    return str(plain(records.fields(records.turns[turn - 1].item).get("text", "")))


def _shown(record: Json, answer: Json | None) -> str:
    """Return a result as the model saw it."""
    if answer is not None:
        return str(plain(answer.get("text", "")))
    return rendered_result(record["result"]) if record.get("result") else ""


def _slice_diff(records: RunRecords, slice_: SliceNotes, number: int) -> Json:
    steps = slice_.until(number)
    start = slice_.until(number, before=True)
    if slice_.is_log:
        before, after = [], [v for some in records.added(slice_.steps[start:steps]) for v in some]
    else:
        before, after = records.value(slice_, start), records.value(slice_, steps)
    found = {"name": slice_.name, "key": slice_.key, "log": slice_.is_log}
    return found | {"before": before, "after": after}


def _differing_slices(
    one: tuple[RunRecords, int, bool], two: tuple[RunRecords, int, bool]
) -> list[Json]:
    found: list[Json] = []
    for key in {**one[0].slices, **two[0].slices}:
        values: list[list[Any]] = []
        name = ""
        for records, number, before in (one, two):
            slice_ = records.slices.get(key)
            name = name if slice_ is None else slice_.name
            steps = 0 if slice_ is None else slice_.until(number, before=before)
            values.append([] if slice_ is None else records.value(slice_, steps))
        if values[0] != values[1]:
            found.append({"key": key, "name": name, "a": values[0], "b": values[1]})
    return found
