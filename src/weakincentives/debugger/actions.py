"""What the page can do: undo, rewind, fork, rerun and approve.

Each action gets the workspace, the id of a run or of an approval, and the JSON body of the request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.contrib.tools.suite import load_types
from weakincentives.debugger.contents import capped, to_wire
from weakincentives.debugger.placed import NotFound
from weakincentives.debugger.records import Json
from weakincentives.durable.runs import Runs, WaitingApproval
from weakincentives.errors import DatabaseUnavailable, WinkError
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
from weakincentives.runtime.undo import (
    calls_to_undo,
    open_files,
    preview_rewind,
    preview_undo,
    undoes_rewind,
)
from weakincentives.text import harmless

T = TypeVar("T")

_STARTS_WITHIN = 60.0
"""Seconds for a run to start."""
_POLL = 0.05
_PARTS = ("all", "files", "conversation")


class Refused(WinkError):
    """An action is not possible now; the message says why, and what to do."""


# Going back


def undo(workspace: Path, run_id: str, body: Json) -> Json:
    """Undo what a run, or one of its calls, has changed in files."""
    number = _field(body, "call", int)
    force, dry_run = _flag(body, "force"), _flag(body, "dryRun")
    calls, run = _calls(workspace, run_id)
    chosen = calls_to_undo(calls, run) if number is None else [_call(calls, run, number)]
    with _refusing():
        if number is not None and undoes_rewind(calls, chosen[0]):
            done = _rewind(calls, run, chosen[0], before=True, force=force, dry_run=dry_run)
            return {"undone": [chosen[0].name], **done}
        left = [each for each in chosen if each.committed and not each.is_undone]
        if not left:
            raise Refused("nothing to undo: it changed no files, or it is already undone")
        names = [each.name for each in left]
        if dry_run:
            shown = preview_undo(calls, left, force=force, detail=_shown(workspace))
            return {"undone": names, "notes": [], "changes": _diffs(shown)}
        with open_files(workspace, left[-1].branch) as files:
            notes = files.undo(*(each.call_id for each in left), force=force)
            return {"undone": names, "notes": [*files.recovered, *notes]}


def rewind(workspace: Path, run_id: str, body: Json) -> Json:
    """Take files, session and conversation of a run back to a call."""
    calls, run = _calls(workspace, run_id)
    call = _call(calls, run, _required(body, "call", int))
    parts = _field(body, "parts", str) or "all"
    if parts not in _PARTS:
        raise ValueError(f"parts: expected one of {', '.join(_PARTS)}, got {parts!r}")
    return _rewind(
        calls,
        run,
        call,
        before=_flag(body, "before"),
        parts=parts,
        force=_flag(body, "force"),
        dry_run=_flag(body, "dryRun"),
    )


def _rewind(
    calls: Calls,
    run: Run,
    call: Call,
    *,
    before: bool,
    force: bool,
    dry_run: bool,
    parts: Parts = "all",
) -> Json:
    where: dict[str, Any] = {"before": before, "parts": parts, "force": force}
    with _refusing():
        if dry_run:
            detail = _shown(calls.workspace)
            found = preview_rewind(calls, call, run, detail=detail, **where)
            staying = [
                f"{path} was changed outside wink since, and stays" for path in found.staying
            ]
            return {"number": None, "notes": staying, "changes": _diffs(found.changes)}
        load_types()
        branch = run.branch if run.branch in calls.branches else ""
        with open_files(calls.workspace, branch) as files, SavedSession.open(run.path) as saved:
            done = rewind_run(saved, files, call.number, **where)
            return {"number": done.number, "notes": [*files.recovered, *done.notes]}


# Another way to go on


def fork(workspace: Path, run_id: str, body: Json) -> Json:
    """Make a branch with the files, session and conversation at a call."""
    name, before = _field(body, "name", str) or "", _flag(body, "before")
    calls, run = _calls(workspace, run_id)
    call = _call(calls, run, _required(body, "call", int))
    with _refusing():
        return _forked(fork_call(calls, call, name=name, before=before))


def rerun(workspace: Path, run_id: str, body: Json) -> Json:
    """Make a call again, changed, and continue from there on a branch, in another process."""
    calls, run = _calls(workspace, run_id)
    call = _call(calls, run, _required(body, "call", int))
    change = Change(
        arguments=_object(body, "arguments"),
        sections=_texts(body, "sections"),
        policies=_list(body, "policies"),
        model=_field(body, "model", str) or "",
        message=_field(body, "message", str) or "",
    )
    with _refusing():
        made = rerun_call(calls, call, change)
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
    # Not from the current directory: an agent may have written a package of our name there.
    argv = [sys.executable, "-P", "-m", "weakincentives.cli", "resume", made.run.id]
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
    approved, digest = _required(body, "approved", bool), _required(body, "digest", str)
    reason, arguments = _field(body, "reason", str) or "", _object(body, "arguments")
    for pending in pending_approvals(workspace):
        if pending.id == request_id:
            answer_approval(
                pending, approved=approved, digest=digest, reason=reason, arguments=arguments
            )
            return {}
    if runs is not None:
        runs.answer(
            request_id, approved=approved, digest=digest, reason=reason, arguments=arguments
        )
        return {}
    raise Refused("the run no longer waits for this answer")


# Requests


def _calls(workspace: Path, run_id: str) -> tuple[Calls, Run]:
    calls = Calls(workspace)
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


def _field(body: Json, name: str, kind: type[T]) -> T | None:
    value: object = body.get(name)
    if value is None:
        return None
    # For Python, True is a number.
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise ValueError(f"{name}: expected {kind.__name__}, got {json.dumps(value)[:80]}")
    return value


def _required(body: Json, name: str, kind: type[T]) -> T:
    value = _field(body, name, kind)
    if value is None:
        raise ValueError(f"{name} is missing")
    return value


def _flag(body: Json, name: str) -> bool:
    return bool(_field(body, name, bool))


def _object(body: Json, name: str) -> Json | None:
    return cast("Json | None", _field(body, name, dict))


def _texts(body: Json, name: str) -> Mapping[str, str]:
    given = _object(body, name) or {}
    return {each: _required(given, each, str) for each in given}


def _list(body: Json, name: str) -> Sequence[str]:
    given = cast("list[object] | None", _field(body, name, list)) or []
    return [_required({name: each}, name, str) for each in given]


# Changes


def _shown(workspace: Path) -> Detail:
    ignored = IgnoredFiles(workspace)

    def is_shown(path: str) -> bool:
        return not ignored(path)

    return is_shown


def _diffs(changes: Sequence[FileChange]) -> list[Json]:
    return [_diff(each) for each in changes]


def _diff(change: FileChange) -> Json:
    patch, note = ("", change.note) if change.is_binary else capped(change.text, change.note)
    head = change.text.split("\n@@", 1)[0]
    gone, new = "\ndeleted file mode" in head, "\nnew file mode" in head
    return {
        "path": to_wire(change.path),
        "origin": to_wire(change.origin or ""),
        "kind": "deleted" if gone else "added" if new else "changed",
        "added": change.added,
        "removed": change.removed,
        "binary": change.is_binary,
        "note": note,
        "patch": patch,
    }
