"""`wink submit`, `worker`, `ps`, `cancel`, `fetch`: runs that survive processes and machines."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from weakincentives.cli.common import (
    Misuse,
    echo,
    examples,
    existing_directory,
    find_run,
    say,
    shortened,
    table,
)
from weakincentives.cli.database import (
    cache_directory,
    check_outside,
    is_named,
    machine_name,
    objects_url,
    open_database,
    open_runs,
    open_storage,
)
from weakincentives.cli.options import (
    AsJson,
    BranchName,
    DatabaseUrl,
    DurableRunName,
    Machine,
    NoMerge,
    Objects,
    SubmitSettings,
    Task,
    Verbose,
    Workspace,
    Yes,
)
from weakincentives.cli.run import text_of
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.text import counted
from weakincentives.errors import (
    AlreadyExists,
    FilesystemError,
    MissingExtra,
    NoSuchBranch,
    NoSuchRun,
    ObjectMissing,
    WorkspaceLocked,
)

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.filesystem.transfer import ObjectStorage
    from weakincentives.runtime.calls import Run
    from weakincentives.runtime.stores.database import Database
    from weakincentives.runtime.stores.runs import DurableRun, Runs, Status
    from weakincentives.runtime.stores.saves import SavedSessionData


LOOK = 0.5
"""Seconds between two looks at a run that is waited for."""
_ENDED = 20
"""How many runs that have ended `wink ps --all` shows."""
_SEEN = 60.0
"""Seconds after which a silent worker is not counted."""


# submit


@examples(
    'wink submit "fix the failing test" --model openai:gpt-5-mini',
    'wink submit "update the docs" --ask shell_execute --wait',
    'wink submit "try the new parser" --no-merge        # the changes stay on a branch',
    'wink submit "port it" --anywhere                   # any machine may work on a copy',
    'echo "tidy up" | wink submit - --database postgresql://wink@db/wink',
    more="A worker performs it: see `wink worker --help`.",
)
def submit(
    task: Task,
    workspace: Workspace = Path(),
    *,
    settings: SubmitSettings,
    yes: Yes = False,
    anywhere: Annotated[
        bool,
        typer.Option("--anywhere", help="Store the directory, so that any machine can work on it."),
    ] = False,
    git: Annotated[
        str | None,
        typer.Option(
            "--git",
            metavar="REPOSITORY",
            help="Any machine can work on it: they get this commit from the repository's URL.",
        ),
    ] = None,
    branch: BranchName = None,
    no_merge: NoMerge = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it ends or needs an approval.")
    ] = False,
    database: DatabaseUrl = None,
    objects: Objects = None,
    machine: Machine = None,
    as_json: AsJson = False,
) -> int:
    """Queue a run for a worker.

    It survives the death of processes and machines.
    """
    from weakincentives.cli.config import load_settings

    task = text_of(task, 'the task is empty: wink submit "..."')
    if anywhere and git:
        raise Misuse("name only one of --anywhere and --git")
    flags = settings.given()
    chosen = load_settings(workspace, **flags)
    _check(chosen, flags)
    here = machine_name(machine)
    is_portable = anywhere or git is not None
    with open_runs(database) as runs:
        check_outside(runs.database, chosen.workspace)
        place = {"workspace": str(chosen.workspace), "machine": here}
        stored = objects_url(objects)
        about = {
            "kind": "run",
            "task": task,
            "model": chosen.model,
            "flags": {**flags, "model": chosen.model},
            "branch": branch or "-",
            "no_merge": no_merge or branch is not None or is_portable,
            "yes": yes,
            "base": _base(chosen, git, open_storage(stored, runs.database))
            if is_portable
            else {"kind": "local", "workspace": place["workspace"]},
            "objects": stored,
            "from": place,
        }
        run = runs.submit(
            task,
            about=about,
            machine="" if is_portable else here,
            partition="" if about["no_merge"] else f"{here}:{chosen.workspace}",
        )
        return _submitted(runs, run, wait=wait, as_json=as_json)


def _base(settings: Settings, repository: str | None, objects: ObjectStorage) -> dict[str, Any]:
    """Return what any machine can work on: a commit, or the directory as it is now."""
    from weakincentives.filesystem.portable import git_base, store_tree

    directory = settings.workspace
    try:
        if repository is not None:
            return git_base(directory, repository=repository).encode()
        return store_tree(directory, objects, gitignore=True).encode()
    except FilesystemError as error:
        raise Misuse(str(error)) from error


def _check(settings: Settings, flags: Mapping[str, Any]) -> None:
    """Refuse what a worker could not perform, and note that the user has named this code."""
    from weakincentives.cli.config import load_settings
    from weakincentives.cli.hosting import stored_flags
    from weakincentives.cli.models import check_model, problem_with_file
    from weakincentives.cli.trust import trust_of

    check_model(settings.model, temperature=settings.temperature)
    if problem := problem_with_file(str(settings.model)):
        raise Misuse(problem)
    trust = trust_of(settings.workspace)
    trust.admit(settings)
    # For a worker, the flags of a run are data: it loads only code that is approved.
    later = load_settings(settings.workspace, **stored_flags(flags))
    trust.approve(trust.missing(later))


def _submitted(runs: Runs, run: DurableRun, *, wait: bool, as_json: bool) -> int:
    if wait:
        return _watch(runs, run, as_json=as_json)
    if as_json:
        echo(json.dumps(as_values(run)))
    else:
        echo(run.id)
        _hint(runs, run)
    return 0


def _hint(runs: Runs, run: DurableRun) -> None:
    """Tell the user if no worker will take a run."""
    if any(run.machine in ("", each.machine) for each in _living(runs)):
        return
    where = f" on {run.machine}" if run.machine else ""
    say(f"no worker is running{where}; start one: wink worker")


def _living(runs: Runs) -> list[Any]:
    return [each for each in runs.workers() if each.seen < _SEEN]


def _watch(runs: Runs, run: DurableRun, *, as_json: bool) -> int:
    """Show every change of a run until it ends or waits for a person."""
    shown, pause = "", threading.Event()
    _hint(runs, run)
    while True:
        if run.status != shown:
            shown = run.status
            echo(json.dumps(as_values(run)) if as_json else f"{run.mark}: {run.status}", err=True)
        if run.status not in ("queued", "running"):
            break
        pause.wait(LOOK)
        run = runs.find(run.id)
    if run.status == "waiting":
        say(f"it needs an approval: wink approve {run.mark}")
        return 3
    if not as_json:
        echo(run.detail, err=run.status != "done")
    return 0 if run.status == "done" else 1


# worker


@examples(
    "wink worker                                             # for the runs of this user",
    "wink worker --jobs 4 --database postgresql://wink@db/wink",
    "wink worker --objects s3://bucket/wink                  # runs of any machine, too",
    more="Any number of workers can run, on any number of machines. Ctrl-C stops one: its runs "
    "continue elsewhere.",
)
def worker(
    database: DatabaseUrl = None,
    objects: Objects = None,
    machine: Machine = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many runs it performs at a time.")
    ] = 4,
    lease: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="After this long without a sign of life, a worker counts as dead.",
        ),
    ] = 30.0,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> int:
    """Perform queued runs until it is stopped."""
    from importlib.util import find_spec

    from weakincentives.runtime import configure_logging

    if find_spec("dbos") is None:
        raise Misuse(str(MissingExtra("durable", "dbos")))
    configure_logging("INFO" if verbose else "WARNING")
    here, url = machine_name(machine), objects_url(objects)
    with open_database(database) as opened, open(os.devnull) as nothing:
        os.environ.pop("WINK_DATABASE", None)  # whatever a run starts does not get it
        sys.stdin = nothing  # no one is asked here
        return _perform_runs(
            opened,
            open_storage(url, opened),
            machine=here,
            jobs=jobs,
            lease=lease,
            as_json=as_json,
        )


def _perform_runs(
    database: Database,
    objects: ObjectStorage,
    *,
    machine: str,
    jobs: int,
    lease: float,
    as_json: bool,
) -> int:
    from weakincentives.cli.hosting import ToldRuns, leave_here, opening_of, prepare
    from weakincentives.durable.dbos import DbosEngine, Worker

    def tell(run: DurableRun) -> None:
        echo(json.dumps(as_values(run)) if as_json else _event(run))

    def leave(run: DurableRun) -> None:
        leave_here(runs, run, objects, machine)

    runs = ToldRuns(database, tell=tell, leave=leave)
    made = Worker(
        DbosEngine(database.url),
        runs,
        prepare,
        objects=objects,
        cache=cache_directory() / "bases",
        machine=machine,
        concurrency=jobs,
        lease=lease,
        opening=opening_of,
    )
    say(f"worker {made.name} takes runs from {database.shown}; Ctrl-C stops it")
    with _stopped_by_signals(made.stop) as stopped:
        made.run()
    say("stopped; its runs continue elsewhere, or when a worker is started")
    return 128 + stopped[0] if stopped else 0


def _event(run: DurableRun) -> str:
    """Return what people are told about a run that has begun, waits or has ended."""
    moment = datetime.fromtimestamp(SYSTEM_CLOCK.time()).strftime("%H:%M:%S")
    said = {
        "running": shortened(run.task, 80),
        "waiting": f"{run.detail}; answer with: wink approve {run.mark}",
        "queued": "it was answered meanwhile, and continues",
    }.get(run.status, shortened(run.detail, 200))
    return f"{moment} {run.mark} {run.status}{f': {said}' if said else ''}"


@contextmanager
def _stopped_by_signals(stop: Callable[[], object]) -> Generator[list[int]]:
    """Let the first signal stop the worker after its steps in progress, and the next one at once.

    Yields a list that gets the signal.
    """
    got: list[int] = []

    def handle(number: int, frame: object) -> None:
        if got:
            os.write(2, b"wink: stopped at once; its runs continue elsewhere\n")
            os._exit(128 + number)
        got.append(number)
        os.write(2, b"wink: stopping after the steps in progress; once more stops at once\n")
        stop()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number in before:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ps


@examples(
    "wink ps                       # what is queued, running, or waits for you",
    "wink ps --all --json",
)
def ps(
    database: DatabaseUrl = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Show runs that have ended, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List queued, running and waiting runs."""
    from weakincentives.runtime.stores.runs import UNFINISHED

    with open_runs(database, must_exist=True) as runs:
        found = runs.list(status=None if everything else UNFINISHED)
        if as_json:
            for each in found:
                echo(json.dumps(as_values(each)))
            return
        for line in table(list(_rows(found))) if found else ():
            echo(line)
        _footer(runs)


def as_values(run: DurableRun) -> dict[str, Any]:
    """Return what programs are told about a run."""
    return {
        "run": run.id,
        "status": run.status,
        "task": run.task,
        "model": run.about.get("model"),
        "machine": run.machine,
        "worker": run.worker,
        "sitting": run.sitting,
        "submitted_at": run.submitted_at,
        "updated_at": run.updated_at,
        "detail": run.detail,
    }


def _rows(found: list[DurableRun]) -> Iterator[Sequence[str]]:
    yield "RUN", "STATUS", "SINCE", "WHERE", "TASK"
    for each in found:
        moment = datetime.fromtimestamp(each.updated_at).strftime("%m-%d %H:%M")
        where = each.worker if each.status == "running" else each.machine or "anywhere"
        told = {"waiting": each.detail, "failed": each.detail}.get(each.status, "")
        task = shortened(each.task, 50) + (f"  ({shortened(told, 50)})" if told else "")
        yield each.mark, each.status, moment, shortened(where, 24), task


def _footer(runs: Runs) -> None:
    counts = runs.count()
    shown: list[Status] = [each for each in ("done", "failed", "cancelled") if counts.get(each)]
    ended = ", ".join(f"{counts[each]} {each}" for each in shown)
    workers = _living(runs)
    said = counted(len(workers), "worker") if workers else "no worker is running: wink worker"
    echo(f"{said}{f'; {ended}' if ended else ''}", err=True)
    if waiting := counts.get("waiting"):
        echo(f"{counted(waiting, 'run')} waiting for an approval: wink approve", err=True)


# cancel


@examples("wink cancel k3f")
def cancel(run: DurableRunName, database: DatabaseUrl = None) -> None:
    """Cancel a background run.

    A worker stops it before its next step; its changes are not merged.
    """
    with open_runs(database, must_exist=True) as runs:
        found = runs.cancel(runs.find(run).id)
        say(f"cancelled: {found.id}")


# fetch


@examples(
    "wink fetch k3f                     # into the directory that it was submitted from",
    "wink diff k3f                      # what it changed; then: wink branch merge k3f",
    "wink fetch k3f --into ~/copy       # elsewhere: a new directory with its base",
)
def fetch(
    run: DurableRunName,
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace",
            "-w",
            metavar="DIR",
            help="The directory that it was submitted from, if it has been moved since.",
            show_default=False,
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Make this new directory with the base of the run."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a copy that was continued here.")
    ] = False,
    database: DatabaseUrl = None,
    objects: Objects = None,
    machine: Machine = None,
) -> None:
    """Bring a background run here, on a branch.

    To look at, compare, continue or merge.
    """
    if workspace is not None and into is not None:
        raise Misuse("name only one of --workspace and --into")
    with open_runs(database, must_exist=True) as runs:
        found = Fetch(
            runs,
            runs.find(run),
            open_storage(objects_url(objects), runs.database),
            machine=machine_name(machine),
        )
        place = found.new_directory(into) if into is not None else found.directory(workspace)
        made = found.into(place, force=force)
        calls = counted(made.calls, "change") if made.calls else "no changes"
        echo(f"{made.run.id}: {calls} on the branch {made.branch} of {place}")
        where = "" if place == Path.cwd() else f" -w {place}"
        say(f"wink log {made.run.mark}{where}; wink branch merge {made.branch}{where}")


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
