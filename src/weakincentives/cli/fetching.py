"""Copies a run of a database to this machine, on a branch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weakincentives.cli.common import Misuse, existing_directory, find_run, say
from weakincentives.cli.database import (
    cache_directory,
    is_named,
    machine_name,
    objects_url,
    open_runs,
    open_storage,
)
from weakincentives.errors import (
    AlreadyExists,
    NoSuchBranch,
    NoSuchRun,
    ObjectMissing,
    WorkspaceLocked,
)

if TYPE_CHECKING:
    from weakincentives.filesystem.transfer import ObjectStorage
    from weakincentives.runtime.calls import Run
    from weakincentives.runtime.stores.runs import DurableRun, Runs
    from weakincentives.runtime.stores.saves import SavedSessionData


def where_to_look(run: str | None, workspace: Path, database: str | None) -> Path:
    """Return the directory to see a run in; one of a database is fetched first."""
    if run is None or not is_named(database):
        return workspace
    if database is None:  # not named just now: what is here comes first
        with suppress(Misuse):
            find_run(existing_directory(workspace), run)
            return workspace
    with open_runs(database, must_exist=True) as runs:
        try:
            found = runs.find(run)
        except NoSuchRun:
            if database is None:
                return workspace
            raise
        objects = open_storage(objects_url(None), runs.database)
        return Fetch(runs, found, objects, machine=machine_name(None)).to_look_at()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A run that is here now."""

    run: Run
    branch: str
    calls: int
    """How many calls have changed files."""


class Fetch:
    """Copies a run from a database."""

    def __init__(
        self, runs: Runs, run: DurableRun, objects: ObjectStorage, *, machine: str
    ) -> None:
        from weakincentives.durable.host import BranchLines, base_of_run
        from weakincentives.runtime.stores.saves import SavedSessionData
        from weakincentives.runtime.stores.sql import SqlStore

        self._store = SqlStore(runs.database, patience=5.0)
        self._run = run
        self._objects = objects
        self._machine = machine
        try:
            self._data: SavedSessionData = SavedSessionData.read(
                self._store.log(run.id), partly=True
            )
        except FileNotFoundError:
            raise Misuse(f"{run.id} is {run.status}: no worker has begun it yet") from None
        branch = BranchLines.of(self._data.files)
        self._base = base_of_run(run) if branch is None else branch.base
        self._lines = () if branch is None else branch.lines
        origin = cast("Mapping[str, str]", run.about.get("from") or {})
        self._from = origin.get("machine", ""), origin.get("workspace", "")

    @property
    def is_local(self) -> bool:
        """Whether only the machine that it ran on has its base."""
        return self._base.get("kind") == "local"

    def directory(self, named: Path | None = None) -> Path:
        """Return the directory that the run was submitted from; raise Misuse if it is not here."""
        if named is not None:
            return existing_directory(named)
        machine, path = self._from
        if machine == self._machine and os.path.isdir(path):
            return existing_directory(Path(path))
        way = "fetch it there" if self.is_local else "or make a new directory: --into DIR"
        raise Misuse(
            f"{self._run.id} was submitted from {path} on {machine or 'another machine'}, which is "
            f"not this one ({self._machine}); {way}"
        )

    def new_directory(self, path: Path) -> Path:
        """Make a directory with the base of the run."""
        from weakincentives.filesystem.portable import Base, materialize

        if self.is_local:
            raise Misuse(f"{self._run.id} has its base in a directory, not in storage: no --into")
        try:
            return materialize(Base.decode(self._base), path.expanduser(), self._objects)
        except AlreadyExists as error:
            raise Misuse(str(error)) from error
        except ObjectMissing as error:
            raise Misuse(f"{error}; it was submitted with {self._storage()}") from error

    def into(self, directory: Path, *, force: bool = False) -> Fetched:
        """Copy the run into the store of a workspace; a copy that is there already is updated."""
        from weakincentives.filesystem import branches_of, drop_branch
        from weakincentives.filesystem.portable import unpack_branch
        from weakincentives.filesystem.store import location_of
        from weakincentives.runtime.calls import run_file
        from weakincentives.runtime.forks import RUN

        run = run_file(location_of(directory), self._run.id)
        if run.path.exists() and not force and not _is_untouched(run.path):
            raise Misuse(f"{run.id} is here, and was continued here; --force replaces that")
        branch = str(self._data.about.get("branch") or self._run.mark)
        for each in branches_of(directory):
            if each.name == branch and each.about.get(RUN) != self._run.mark:
                raise Misuse(f"there is another branch {branch} in {directory}; drop it first")
        try:
            with suppress(NoSuchBranch):
                drop_branch(directory, branch)
            unpack_branch(
                directory, branch, self._lines, self._objects,
                about={RUN: self._run.mark}, **self._point(directory),
            ).close()  # fmt: skip
        except WorkspaceLocked as error:
            raise Misuse(f"the branch {branch} is in use by process {error.pid}") from error
        except ObjectMissing as error:
            raise Misuse(f"{error}; it was submitted with {self._storage()}") from error
        self._copy_session(run)
        return Fetched(run=run, branch=branch, calls=len(self._lines))

    def session_into(self, directory: Path) -> None:
        """Copy the run without its branch: its changes are in the directory."""
        from weakincentives.filesystem.store import location_of
        from weakincentives.runtime.calls import run_file

        self._copy_session(run_file(location_of(directory), self._run.id))

    def _copy_session(self, run: Run) -> None:
        from weakincentives.runtime.stores.files import FileStore
        from weakincentives.runtime.stores.saves import copy_session

        copy_session(self._store, self._run.id, FileStore(run.path.parent), run.path.name)
        _note(run.path).write_text(json.dumps({"sha256": _digest(run.path)}))

    def _point(self, directory: Path) -> dict[str, Any]:
        """Return where the base is in the history of the directory it comes from."""
        if "serial" not in self._base or str(directory) != self._from[1]:
            return {}
        return {"serial": self._base["serial"], "moment": self._base.get("moment", 0)}

    def to_look_at(self) -> Path:
        """Return a directory to see the run in: its own, or else a copy that only this user has."""
        from weakincentives.filesystem import HostFilesystem
        from weakincentives.runtime.calls import run_file

        try:
            place = self.directory()
        except Misuse:
            place = cache_directory() / "fetched" / self._run.id
            if self.is_local:
                say(f"the files of {self._run.id} are on {self._run.machine}: they are not shown")
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                with HostFilesystem(place) as files:
                    self._copy_session(run_file(files.store, self._run.id))
                return place
            if not place.exists():
                self.new_directory(place)
        self.into(place)
        return place

    def _storage(self) -> str:
        return f"--objects {self._run.about.get('objects') or 'database'}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _note(path: Path) -> Path:
    return path.with_suffix(".fetched")


def _is_untouched(path: Path) -> bool:
    """Whether a copy is as it was fetched."""
    try:
        return json.loads(_note(path).read_text())["sha256"] == _digest(path)
    except (OSError, ValueError, LookupError):
        return False
