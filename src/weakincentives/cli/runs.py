"""The runs of a workspace: where their sessions are kept, and how a person names them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from weakincentives.cli.misuse import Misuse
from weakincentives.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from weakincentives.runtime import SavedSessionData

__all__ = ["RunFile", "find_run", "new_run", "runs_of"]

_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


@dataclass(frozen=True, slots=True)
class RunFile:
    """The file that has a run's session."""

    id: str
    path: Path

    @property
    def mark(self) -> str:
        """The letters at the end of the id: a name that is short enough to type."""
        return self.id.rpartition("-")[2]

    @property
    def saved_at(self) -> float:
        """When something was last added, in unix seconds; 0 for one that is gone."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def saved_size(self) -> int:
        """How many bytes there are of it; 0 for one that has only begun, or is gone."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self, *, partly: bool = False) -> SavedSessionData:
        """Return what it holds, also while the run is under way: see ``SavedSessionData.read``."""
        from weakincentives.runtime import SavedSessionData

        return SavedSessionData.read(self.path, partly=partly)


def new_run(store: Path) -> RunFile:
    """Return a name and place for a run that begins now; ``store`` is ``HostFilesystem.store``."""
    moment = datetime.fromtimestamp(SYSTEM_CLOCK.time(), UTC).strftime("%Y%m%d-%H%M%S")
    mark = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(3))
    run_id = f"{moment}-{mark}"
    return RunFile(run_id, _folder(store) / f"{run_id}.jsonl")


def runs_of(workspace: Path) -> tuple[RunFile, ...]:
    """Return the runs of a workspace, oldest first. Opens nothing, so others may be at work.

    Raises:
        StoreRefused: It is not certain that this user wrote the store they are in.
    """
    from weakincentives.filesystem.store import Note, location_of

    store = location_of(workspace)
    Note.read(store)
    return _runs_in(store)


def find_run(workspace: Path, wanted: str) -> RunFile:
    """Return the run with this id; else raises Misuse.

    The beginning of the id is enough where no other has it, and so are the letters at its end.
    """
    runs = runs_of(workspace)
    found = [run for run in runs if wanted and (run.id.startswith(wanted) or run.mark == wanted)]
    exact = [run for run in found if run.id == wanted]
    if len(found) == 1 or exact:
        return (exact or found)[0]
    if found:
        ids = ", ".join(run.id for run in found[-3:])
        raise Misuse(f"{wanted!r} is the name of {len(found)} runs: {ids}; say more of it")
    newest = f"; the newest is {runs[-1].id}" if runs else ": it has none yet"
    raise Misuse(f"there is no run {wanted!r} in {workspace}{newest}")


def _runs_in(store: Path) -> tuple[RunFile, ...]:
    try:
        names = sorted(os.listdir(_folder(store)))
    except OSError:
        return ()
    suffix = ".jsonl"
    return tuple(
        RunFile(name.removesuffix(suffix), _folder(store) / name)
        for name in names
        if name.endswith(suffix)
    )


def _folder(store: Path) -> Path:
    return store / "runs"
