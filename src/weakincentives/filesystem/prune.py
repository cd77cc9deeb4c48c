"""What a store takes on the disk, and the removal of what nothing needs any more."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import NamedTuple

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.gate import ProcessLock
from weakincentives.core.state import forget_store, workspace_stores
from weakincentives.errors import StoreRefused, WorkspaceLocked
from weakincentives.filesystem.history import KEPT, History, Past
from weakincentives.filesystem.scan import External, last_scan
from weakincentives.filesystem.store import Limits, Note, Objects, open_store
from weakincentives.filesystem.tree import Held, files_below, remove_path, remove_tree

logger = logging.getLogger("weakincentives.filesystem")

KINDS = {
    "objects": "contents",
    KEPT: "contents",
    "log.db": "history",
    "log.db-wal": "history",
    "log.db-shm": "history",
    "runs": "runs",
    "branches": "branches",
    "scan": "scan index",
    "left": "left-over files",
}
"""What each directory of a store holds."""
OTHER = "other"


class Pruned(NamedTuple):
    """What was removed from a store, or would be."""

    calls: int = 0
    """Calls that can no longer be undone."""
    contents: int = 0
    """Replaced contents that nothing referred to, besides those of the calls."""
    compressed: int = 0
    left: int = 0
    """Files and directories that could not be restored once."""
    set_aside: int = 0
    """What no call has named: a loss of power may have cost the call. It is in ``left`` now."""
    scan_index: bool = False


def abandoned_stores(limits: Limits) -> list[Path]:
    """Return the stores of directories that no longer exist and that nobody has used lately."""
    before, found = limits.oldest(SYSTEM_CLOCK.time()), list[Path]()
    with contextlib.suppress(FileNotFoundError):
        for store in sorted(Path(workspace_stores()).iterdir()):
            with contextlib.suppress(FileNotFoundError, StoreRefused):
                if os.lstat(store / "lock").st_mtime < before:  # written whenever it is opened
                    note = Note.read(store)
                    if note is not None and not os.path.lexists(note.path):
                        found.append(store)
    return found


def remove_abandoned(limits: Limits) -> list[Path]:
    """Remove ``abandoned_stores``; returns those that no process has open."""
    removed: list[Path] = []
    for store in abandoned_stores(limits):
        with contextlib.suppress(WorkspaceLocked), Held(open_store(store)) as fd:
            lock = ProcessLock(fd, store, wait=None, alone=True)
            try:
                remove_tree(store)
            finally:
                lock.close()
            forget_store(store.name)
            removed.append(store)
    return removed


def disk_usage(store: Path) -> dict[str, int]:
    """Return the bytes on disk by kind of content; what others remove meanwhile is left out."""
    found = dict.fromkeys((*KINDS.values(), OTHER), 0)
    with contextlib.suppress(FileNotFoundError), os.scandir(store) as entries:
        for each in entries:
            kind = KINDS.get(each.name, OTHER)
            with contextlib.suppress(FileNotFoundError):
                found[kind] += _size(each.stat(follow_symlinks=False), Path(each.path))
    return found


def _size(status: os.stat_result, path: Path) -> int:
    below = files_below(path) if stat.S_ISDIR(status.st_mode) else ()
    return sum(each.st_blocks * 512 for each in (status, *below))


def to_prune(past: Past, limits: Limits, *, left_too: bool = False) -> Pruned:
    """Return what :func:`prune` would remove; takes no lock. Compression is not tried."""
    now = SYSTEM_CLOCK.time()
    store = past.objects.path.parent
    unused, unnamed = past.unused()
    return Pruned(
        calls=sum(1 for _ in past.beyond(limits, now)),
        contents=len(unused),
        left=len(_old(store / "left", limits.oldest(now))) if left_too else 0,
        scan_index=last_scan(store / "scan") < limits.oldest(now),
        set_aside=len(unnamed),
    )


def prune(
    history: History, external: External, limits: Limits, *, left_too: bool = False
) -> Pruned:
    """Remove what exceeds the limits and what nothing refers to; compress the rest.

    For the process that holds the store's lock, between transactions. After a kill or an error,
    calling it again completes it.
    """
    history.finish_earlier()
    before, objects = limits.oldest(SYSTEM_CLOCK.time()), history.store.objects
    calls, (contents, set_aside) = history.prune(limits), history.sweep()
    old = _old(history.store.path / "left", before) if left_too else []
    for path in old:
        remove_path(path)
    return Pruned(
        calls=calls,
        contents=contents,
        compressed=_compress(objects),
        left=len(old),
        scan_index=external.forget(before),
        set_aside=set_aside,
    )


def _compress(objects: Objects) -> int:
    """Compress all objects where that is worthwhile; returns how many."""
    count = 0
    try:
        for digest in objects:
            count += objects.compress(digest, safe=True)
    except OSError as error:  # a full disk, for example: the removals must not fail with it
        logger.warning("The other contents were not compressed: %s", error)
    return count


def _old(folder: Path, before: float) -> list[Path]:
    """Return what was put into a directory before some time."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        # A renamed file keeps its modification time, not its change time.
        old = (each for each in entries if each.stat(follow_symlinks=False).st_ctime < before)
        return [Path(each.path) for each in old]
    return []
