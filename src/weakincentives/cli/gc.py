"""`wink gc`: what the store of a directory takes on the disk, and less of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from weakincentives.cli.common import (
    Misuse,
    echo,
    examples,
    existing_directory,
    open_workspace,
    say,
)
from weakincentives.cli.options import AsJson, Workspace
from weakincentives.core.text import counted, harmless

if TYPE_CHECKING:
    from weakincentives.filesystem import Limits, Pruned
    from weakincentives.runtime.calls import Run


class _Limits(NamedTuple):
    history: Limits
    runs: Limits
    left_too: bool
    """Only an explicit age removes content that could not be restored: it may be the only copy."""


@examples(
    "wink gc --dry-run             # what the store takes, and what would be removed",
    "wink gc                       # to the limits below; compress the rest",
    "wink gc --older-than 7        # only the last week of calls and runs",
    "wink gc --keep 50M",
    more="By default the history keeps 90 days (in any case the newest 100 calls), 10,000 calls "
    "and 256 MiB; runs are kept for 90 days (in any case the newest 20), 1,000 of them and 256 "
    "MiB. The oldest go first. Never removed: the newest run, a run in use, an unfinished run of "
    "the last 30 days, and whatever a branch needs.",
)
def gc(
    workspace: Workspace = Path(),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            metavar="DAYS",
            min=0,
            help="Remove all calls and runs that are older, and left-over files. [default: 90, "
            "and no left-over files]",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            metavar="SIZE",
            help="Maximum size of the history, and of the runs: 50M, 1GiB. [default: 256MiB]",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show and reduce the disk use of a directory's history."""
    from weakincentives.filesystem.prune import abandoned_stores, disk_usage, remove_abandoned
    from weakincentives.filesystem.store import HISTORY_LIMITS, Note, location_of

    directory = existing_directory(workspace)
    limits = _limits(older_than, keep)
    store = location_of(directory)
    gone = (abandoned_stores if dry_run else remove_abandoned)(HISTORY_LIMITS)
    if gone and not as_json:
        one = "history of a directory that no longer exists"
        many = "histories of directories that no longer exist"
        echo(f"{'Would remove' if dry_run else 'Removed'} {counted(len(gone), one, many)}.")
    if Note.read(store) is None:
        echo(f"No history yet in {harmless(str(directory))}", err=True)
        return 0
    before = disk_usage(store)
    pruned, runs = (_planned if dry_run else _prune)(directory, store, limits)
    after = before if dry_run else disk_usage(store)
    if as_json:
        done = {**pruned._asdict(), "runs": [run.id for run in runs], "stores": [*map(str, gone)]}
        sizes = {"before": before, "after": after}
        echo(json.dumps({"store": str(store), "dry_run": dry_run, **sizes, "removed": done}))
        return 0
    _show(store, before, after)
    echo(_sentence(pruned, len(runs), dry_run=dry_run))
    return 0


def _limits(older_than: float | None, keep: str | None) -> _Limits:
    from weakincentives.filesystem.store import HISTORY_LIMITS
    from weakincentives.runtime.calls import RUN_LIMITS

    limits = [HISTORY_LIMITS, RUN_LIMITS]
    if keep is not None:
        limits = [replace(each, size=_size(keep)) for each in limits]
    if older_than is not None:
        limits = [replace(each, days=older_than, newest=0) for each in limits]
    return _Limits(*limits, left_too=older_than is not None)


def _size(text: str) -> int:
    from weakincentives.contrib.tools.sandbox.limits import byte_size

    size = byte_size(text)
    if not isinstance(size, int):
        raise Misuse(f"{text!r} is not a size; use 50M or 1GiB, for example")
    return size


def _planned(directory: Path, store: Path, limits: _Limits) -> tuple[Pruned, list[Run]]:
    from weakincentives.filesystem import WorkspaceHistory
    from weakincentives.runtime.calls import old_runs

    history = WorkspaceHistory(directory)
    pruned = history.to_prune(limits.history, left_too=limits.left_too)
    return pruned, list(old_runs(store, limits.runs))


def _prune(directory: Path, store: Path, limits: _Limits) -> tuple[Pruned, list[Run]]:
    from weakincentives.runtime.calls import delete_runs, old_runs

    with open_workspace(directory) as files:
        say(*files.recovered)
        pruned = files.prune(limits.history, left_too=limits.left_too)
        return pruned, delete_runs(old_runs(store, limits.runs))


def _show(store: Path, before: Mapping[str, int], after: Mapping[str, int]) -> None:
    from weakincentives.contrib.tools.sandbox.limits import binary_size

    echo(harmless(str(store)))
    rows = [(kind, before[kind], after[kind]) for kind in before if before[kind] or after[kind]]
    for kind, was, now in [*rows, ("total", sum(before.values()), sum(after.values()))]:
        change = "" if was == now else f" -> {binary_size(now)}"
        echo(f"  {kind:<16}{binary_size(was):>12}{change}")


def _sentence(pruned: Pruned, runs: int, *, dry_run: bool) -> str:
    found = {
        "call": pruned.calls,
        "unused content": pruned.contents,
        "run": runs,
        "left-over file": pruned.left,
        "scan index": int(pruned.scan_index),
    }
    parts = [counted(count, what) for what, count in found.items() if count]
    removed = f"{'Would remove' if dry_run else 'Removed'}: {', '.join(parts) or 'nothing'}."
    if pruned.set_aside:
        removed += f" Set aside, because no call names it: {counted(pruned.set_aside, 'content')}."
    if pruned.compressed:
        removed += f" Compressed: {counted(pruned.compressed, 'content')}."
    return removed
