"""What the page can do: undo, rewind, fork, rerun and approve.

Each action gets the workspace, the id of a run or of an approval, and the JSON body of the request.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from weakincentives.contrib.databases import known_databases
from weakincentives.contrib.tools.suite import load_types
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.state import python
from weakincentives.core.text import harmless
from weakincentives.debugger.contents import change_json, change_kind
from weakincentives.debugger.records import Json, NotFound
from weakincentives.errors import DatabaseUnavailable, ParseError, WinkError
from weakincentives.filesystem import FileChange
from weakincentives.filesystem.diffs import Detail
from weakincentives.filesystem.ignored import IgnoredFiles
from weakincentives.runtime.approvals import (
    PendingApproval,
    answer_approval,
    pending_approvals,
)
from weakincentives.runtime.calls import Call, Calls, Run, runs_of
from weakincentives.runtime.forks import Change, Fork, fork_call, rerun_call
from weakincentives.runtime.rewind import Parts, rewind_run
from weakincentives.runtime.saved import SavedSession
from weakincentives.runtime.stores.runs import Runs, WaitingApproval
from weakincentives.runtime.undo import (
    Preview,
    calls_to_undo,
    open_files,
    preview_rewind,
    preview_undo,
    undo_calls,
    undoes_rewind,
)
from weakincentives.serde import parse

T = TypeVar("T")

_STARTS_WITHIN = 60.0
"""Seconds for a run to start."""
_POLL = 0.05


class Refused(WinkError):
    """An action is not possible now; the message says why, and what to do."""


# The bodies of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class _Undo:
    call: int | None = None
    """None for all calls of the run."""
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rewind:
    call: int
    before: bool = False
    parts: Parts = "all"
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fork:
    call: int
    before: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rerun(Change):
    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    approved: bool
    digest: str
    reason: str = ""
    arguments: dict[str, Any] | None = None


def _parsed(kind: type[T], body: Json) -> T:
    try:
        return parse(kind, {"dry_run" if key == "dryRun" else key: body[key] for key in body})
    except ParseError as error:  # the request is wrong; it is not refused for now
        raise ValueError(f"the body is not as expected: {'; '.join(error.problems)}") from error


# Going back


def undo(workspace: Path, run_id: str, body: Json) -> Json:
    """Undo what a run, or one of its calls, has changed in files."""
    asked = _parsed(_Undo, body)
    calls, run = _calls(workspace, run_id)
    chosen = calls_to_undo(calls, run) if asked.call is None else [_call(calls, run, asked.call)]
    with _refusing():
        if asked.call is not None and undoes_rewind(calls, chosen[0]):
            back = _Rewind(call=asked.call, before=True, force=asked.force, dry_run=asked.dry_run)
            return {"undone": [chosen[0].name], **_rewound(calls, run, chosen[0], back)}
        left = [each for each in chosen if each.has_changes and each.can_be_undone]
        if not left:
            raise Refused("nothing to undo: it changed no files, or it is already undone")
        names = [each.name for each in left]
        if asked.dry_run:
            shown = preview_undo(calls, left, force=asked.force, detail=_detail(workspace))
            return {
                "undone": names,
                "notes": _staying(shown),
                "changes": _changes(shown.changes),
            }
        with open_files(workspace, left[-1].branch) as files:
            undone = undo_calls(calls, files, left, force=asked.force)
            return {"undone": names, "notes": [*files.recovered, *undone.notes]}


def rewind(workspace: Path, run_id: str, body: Json) -> Json:
    """Take files, session and conversation of a run back to a call."""
    asked = _parsed(_Rewind, body)
    calls, run = _calls(workspace, run_id)
    return _rewound(calls, run, _call(calls, run, asked.call), asked)


def _rewound(calls: Calls, run: Run, call: Call, asked: _Rewind) -> Json:
    where: dict[str, Any] = {"before": asked.before, "parts": asked.parts, "force": asked.force}
    with _refusing():
        if asked.dry_run:
            found = preview_rewind(calls, call, run, detail=_detail(calls.workspace), **where)
            return {
                "number": None,
                "notes": _staying(found),
                "changes": _changes(found.changes),
            }
        load_types()
        branch = run.branch if run.branch in calls.branches else ""
        with open_files(calls.workspace, branch) as files, SavedSession.open(run.path) as saved:
            done = rewind_run(saved, files, call.number, databases=calls.databases, **where)
            return {"number": done.number, "notes": [*files.recovered, *done.notes]}


def _staying(found: Preview) -> list[str]:
    return [f"{path} was changed outside wink since, and stays" for path in found.staying]


def _detail(workspace: Path) -> Detail:
    ignored = IgnoredFiles(workspace)
    return lambda path: not ignored(path)


def _changes(changes: Sequence[FileChange]) -> list[Json]:
    return [change_json(each, change_kind(each)) for each in changes]


# Another way to go on


def fork(workspace: Path, run_id: str, body: Json) -> Json:
    """Make a branch with the files, session and conversation at a call."""
    asked = _parsed(_Fork, body)
    calls, run = _calls(workspace, run_id)
    call = _call(calls, run, asked.call)
    with _refusing():
        return _forked(fork_call(calls, call, name=asked.name, before=asked.before))


def rerun(workspace: Path, run_id: str, body: Json) -> Json:
    """Make a call again, changed, and continue from there on a branch, in another process."""
    change = _parsed(_Rerun, body)
    calls, run = _calls(workspace, run_id)
    with _refusing():
        made = rerun_call(calls, _call(calls, run, change.call), change)
    try:
        _start(made, change)
    except BaseException:
        made.discard()
        raise
    return _forked(made)


def _start(made: Fork, change: Change) -> None:
    """Resume a run in a process of its own; raises Refused if it does not start."""
    assert made.run is not None
    log = made.run.path.with_suffix(".out")
    # The rules are known to the run; named here, too, since the person has just chosen them.
    argv = [*python(_PROGRAM), "resume", made.run.id]
    argv += [f"--workspace={made.workspace}", "--json", "--ask-elsewhere"]
    argv += [f"--policy={each}" for each in change.policies]
    argv += ["--", change.message] if change.message else []
    with open(log, "wb", opener=_private) as out:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    late = SYSTEM_CLOCK.monotonic() + _STARTS_WITHIN
    while not _has_started(log):
        with suppress(subprocess.TimeoutExpired):
            child.wait(_POLL)
            if not _has_started(log):
                raise Refused(f"the run did not start: {_said(log)}")
        if SYSTEM_CLOCK.monotonic() > late:
            child.kill()
            child.wait()
            raise Refused(f"the run did not start within {_STARTS_WITHIN:g} s: {_said(log)}")
    _children.append(child)
    _children[:] = [each for each in _children if each.poll() is None]


_PROGRAM = "from weakincentives.cli.entry import main; main()"
_MOST_SHOWN = 200_000
"""Characters of a request; beyond that, it says that not everything is shown."""
_children: list[subprocess.Popen[bytes]] = []
"""Runs in progress, so that those that have ended do not stay as zombies."""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _has_started(log: Path) -> bool:
    """Whether a run has written its first event: whatever is wrong before that is reported."""
    return any(line.startswith(b"{") for line in log.read_bytes().splitlines(keepends=True)[:20])


def _said(log: Path) -> str:
    text = log.read_text("utf-8", "backslashreplace").strip().removeprefix("wink: ")
    return harmless(text[-2000:]) or "it said nothing"


def _forked(made: Fork) -> Json:
    return {"branch": made.branch, "run": None if made.run is None else made.run.id}


# Approvals


def approvals(workspace: Path, runs: Runs | None = None) -> Sequence[Json]:
    """Return what runs in progress ask, and those that wait in a database, oldest first."""
    found = [_asked(each.run.id, each) for each in pending_approvals(workspace)]
    if runs is not None:
        with suppress(DatabaseUnavailable):  # the rest of the page works without it
            found += [_asked(each.run, each) for each in runs.pending()]
    return sorted(found, key=lambda each: each["since"])


def _asked(run: str, pending: PendingApproval | WaitingApproval) -> Json:
    request = pending.request
    return {
        "run": run,
        "id": pending.id,
        "call": request.call_id,
        "tool": request.tool_name,
        "question": request.question,
        "arguments": request.arguments,
        "reach": request.reach or "unstated",
        # As on a terminal: invisible characters are marked.
        "shown": request.describe(_MOST_SHOWN),
        "digest": pending.digest,
        "since": pending.since,
    }


def approve(workspace: Path, request_id: str, body: Json, *, runs: Runs | None = None) -> Json:
    """Answer a request of a run in progress, or of one that waits in a database."""
    answer = asdict(_parsed(_Answer, body))
    for pending in pending_approvals(workspace):
        if pending.id == request_id:
            answer_approval(pending, **answer)
            return {}
    if runs is not None:
        runs.answer(request_id, **answer)
        return {}
    raise Refused("the run no longer waits for this answer")


# Finding and refusing


def _calls(workspace: Path, run_id: str) -> tuple[Calls, Run]:
    calls = Calls(workspace, databases=known_databases(workspace))
    for run in runs_of(workspace):
        if run.id == run_id:
            return calls, run
    raise NotFound(f"no run {run_id}")


def _call(calls: Calls, run: Run, number: int) -> Call:
    for call in calls.of_run(run):
        if call.number == number:
            return call
    raise NotFound(f"the run {run.id} has no call {number}")


@contextmanager
def _refusing() -> Generator[None]:
    """Raise Refused where something is not possible with this history or this run."""
    try:
        yield
    except WinkError:
        raise
    except (LookupError, ValueError, NotImplementedError) as error:
        raise Refused(str(error.args[0] if error.args else error)) from error
