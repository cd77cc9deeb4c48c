"""Undo what calls changed in files, or see first what that would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weakincentives.errors import UndoRefused
from weakincentives.filesystem import Branch, Committed, FileChange, HostFilesystem
from weakincentives.filesystem.diffs import Detail
from weakincentives.runtime.at import moment_of
from weakincentives.runtime.calls import Call, Calls, Run, in_place
from weakincentives.runtime.rewind import REWIND, Parts, since

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


def preview_undo(
    calls: Calls, chosen: Sequence[Call], *, force: bool = False, detail: Detail | None = None
) -> Preview:
    """Return how undoing calls would change files; raises UndoRefused as undoing would."""
    history, committed = calls.history_on(chosen[-1].branch), committed_of(chosen)
    if not force and (obstacles := history.obstacles(committed)):
        raise UndoRefused(obstacles)
    staying = () if force else tuple(history.changed_since(committed))
    return _previewed(history.diff(committed, reverse=True, detail=detail, raw=True), staying)


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
    edited = history.changed_since(undone)
    if not force and any(edited.values()):
        raise UndoRefused({path: by for path, by in edited.items() if by})
    if not undone:
        return Preview()
    changes = history.diff(undone, reverse=True, detail=detail, raw=True)
    return _previewed(changes, () if force else tuple(edited))
