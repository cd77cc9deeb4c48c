"""Undo what calls changed in files, or see first what that would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weakincentives.core import locks
from weakincentives.core.call import ToolCall, new_id
from weakincentives.errors import UndoRefused
from weakincentives.filesystem import Branch, Committed, FileChange, HostFilesystem
from weakincentives.filesystem.diffs import Detail
from weakincentives.runtime.at import moment_of
from weakincentives.runtime.calls import Call, Calls, Run, in_place
from weakincentives.runtime.rewind import REWIND, Parts, since
from weakincentives.runtime.rows import RowHistory, UndoneRows, notes_on, undoing_rows

PATIENCE = 3.0
"""Seconds to wait for a call of another process, for a command that only takes a moment."""


def open_files(workspace: Path, branch: str = "") -> HostFilesystem:
    """Open a branch, or the directory if the name is empty; a killed call is rolled back first.

    Raises:
        WorkspaceLocked: Another process has it to itself.
        FilesystemError: There is no such branch.
    """
    if branch:
        return Branch.open(workspace, branch)
    return HostFilesystem(workspace, shared=True, wait=PATIENCE)


def calls_to_undo(calls: Calls, run: Run) -> list[Call]:
    """Return the calls of a run whose changes are in place; all of them if there are none."""
    found = calls.of_run(run)
    left = in_place(found) or found
    # Of a run that was merged and went on: what is on its branch now.
    return [each for each in left if each.branch == left[-1].branch]


def committed_of(chosen: Sequence[Call]) -> list[Committed]:
    return [each.committed for each in chosen if each.committed is not None]


@dataclass(frozen=True, slots=True)
class Preview:
    """What an undo or a rewind would change in files."""

    changes: Sequence[FileChange] = ()
    staying: tuple[str, ...] = ()
    """Paths that were changed outside of calls since, and would stay."""
    rows: Sequence[tuple[RowHistory, UndoneRows]] = ()
    """What would change in databases."""


def preview_undo(
    calls: Calls, chosen: Sequence[Call], *, force: bool = False, detail: Detail | None = None
) -> Preview:
    """Return what undoing calls would change; raises UndoRefused or RowUndoRefused as it would."""
    history, committed = calls.history_on(chosen[-1].branch), committed_of(chosen)
    if not force and committed and (obstacles := history.obstacles(committed)):
        raise UndoRefused(obstacles)
    ids = [each.call_id for each in chosen if each.has_rows]
    rows = [
        (each, each.undo(ids, call_id="undo", force=force, dry_run=True))
        for each in (calls.databases if ids else ())
    ]
    if not committed:
        return Preview(rows=rows)
    staying = () if force else tuple(history.changed_since(committed))
    changes = history.diff(committed, reverse=True, detail=detail, raw=True)
    return replace(_previewed(changes, staying), rows=rows)


@dataclass(frozen=True, slots=True)
class Undone:
    """Calls that were undone."""

    call_id: str
    """The id of the undo itself; empty if there was nothing to undo."""
    notes: tuple[str, ...]
    """A sentence for each thing that is not as it was before the calls."""
    rows: Sequence[tuple[RowHistory, UndoneRows]] = ()


def undo_calls(
    calls: Calls, files: HostFilesystem, chosen: Sequence[Call], *, force: bool = False
) -> Undone:
    """Undo what calls changed in files and rows: everything, or nothing.

    A row that someone else has changed since is left alone and named. Rows first: after a kill
    between the two, the same undo goes on with the files.

    Raises:
        UndoRefused: Files have changed since.
        RowUndoRefused: A rule of a database is in the way.
    """
    in_files = [each.call_id for each in chosen if each.committed is not None]
    with_rows = [each.call_id for each in chosen if each.has_rows]
    if not with_rows:
        notes = files.undo(*in_files, force=force)
        newest = next(files.newest_first(), None)
        is_done = newest is not None and newest.undoes == tuple(in_files)
        return Undone(newest.call_id if newest is not None and is_done else "", notes)
    history = calls.history_on(chosen[-1].branch)
    if not force and in_files and (obstacles := history.obstacles(committed_of(chosen))):
        raise UndoRefused(obstacles)
    own = ToolCall("undo", None, f"undo_{new_id()[:12]}")
    with (
        locks.defer_interrupts(),  # Ctrl-C must not leave the rows undone and the files not
        undoing_rows(calls.databases, with_rows, own.id, force=force) as rows,
    ):
        notes = files.undo(*in_files, force=force, call=own) if in_files else ()
    is_done = bool(in_files) or any(found.changes for _, found in rows)
    return Undone(own.id if is_done else "", (*notes, *notes_on(rows)), rows)


def _previewed(changes: Sequence[FileChange], staying: tuple[str, ...]) -> Preview:
    return Preview([each for each in changes if each.path not in staying], staying)


def undoes_rewind(calls: Calls, call: Call) -> bool:
    """Whether a call is a rewind, which is undone by rewinding to before it.

    Raises:
        ValueError: It is, and the run has made calls since.
    """
    if call.tool != REWIND or call.run is None:
        return False
    if call.number != calls.of_run(call.run)[-1].number:
        raise ValueError(
            f"the run has made calls since; to go back over them, too: "
            f"wink rewind --before {call.name}"
        )
    return True


def preview_rewind(
    calls: Calls,
    call: Call,
    run: Run,
    *,
    before: bool = False,
    parts: Parts = "all",
    force: bool = False,
    detail: Detail | None = None,
) -> Preview:
    """Return what rewinding a run to a call would change.

    Raises:
        LookupError: The history no longer goes back that far.
        UndoRefused: Other calls have changed the same files since.
    """
    if parts == "conversation":
        return Preview()
    history = calls.history_of(call)
    undone = since(moment_of(call), run.index, history.newest_first(), before=before)
    ids = [each.call_id for each in calls.of_run(run)[call.number - before :] if each.has_rows]
    rows = [
        (each, each.undo(ids, call_id="rewind", force=force, dry_run=True))
        for each in (calls.databases if ids else ())
    ]
    edited = history.changed_since(undone)
    if not force and any(edited.values()):
        raise UndoRefused({path: by for path, by in edited.items() if by})
    if not undone:
        return Preview(rows=rows)
    changes = history.diff(undone, reverse=True, detail=detail, raw=True)
    return replace(_previewed(changes, () if force else tuple(edited)), rows=rows)
