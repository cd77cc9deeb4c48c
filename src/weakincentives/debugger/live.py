"""What changes while the page is open: new and changed runs, and calls that wait for a person."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weakincentives.debugger.views import Views
from weakincentives.runtime.calls import Run

_FIRST = 20
"""How many of the newest runs a new page is told about: they may have changed since it asked."""


class Watch:
    """Tells what has changed since it was last asked; looks at names and times of files only."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._seen: dict[str, tuple[int, int]] | None = None
        """Time and size of each run's file."""
        self._running: set[str] = set()
        self._changed_at: object = None
        self._wait = 0
        """Looks until the page is told that the history has changed, if no run says why."""
        self._approvals: list[Any] | None = None

    def news(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and data of events."""
        files = dict(self._files())
        if self._seen is None:
            newest = sorted(files, key=lambda run_id: files[run_id])[-_FIRST:]
            changed = sorted(newest)
        else:
            # The end of a run does not change its file.
            changed = [
                run_id
                for run_id in sorted(files)
                if files[run_id] != self._seen.get(run_id) or run_id in self._running
            ]
        summaries = [self._views.summary(Run(self._path(run_id))) for run_id in changed]
        told = [
            each
            for each in summaries
            if self._seen is None
            or files[each["id"]] != self._seen.get(each["id"])
            or each["state"] != "running"
        ]
        is_first, gone = self._seen is None, (self._seen or {}).keys() - files.keys()
        self._seen = files
        self._running -= set(changed)
        self._running |= {each["id"] for each in summaries if each["state"] == "running"}
        if told:
            yield "runs", told
        if gone or self._is_outdated(is_first, bool(told)):
            yield "changed", {}  # by an undo, a merge or a deletion
        approvals = list(self._views.approvals())
        if approvals != self._approvals:
            self._approvals = approvals
            yield "approvals", approvals

    def _is_outdated(self, is_first: bool, is_told: bool) -> bool:
        """Whether the history has changed, but not by a call: its run is saved right after it."""
        before, self._changed_at = self._changed_at, self._views.changed_at()
        if before != self._changed_at and not is_first:
            self._wait = 2
        if is_told or not self._wait:
            self._wait = 0
            return False
        self._wait -= 1
        return not self._wait

    def _path(self, run_id: str) -> Path:
        return self._views.runs / f"{run_id}.jsonl"

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        try:
            with os.scandir(self._views.runs) as found:
                for each in found:
                    if each.name.endswith(".jsonl"):
                        status = each.stat(follow_symlinks=False)
                        name = each.name.removesuffix(".jsonl")
                        yield name, (status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            return
