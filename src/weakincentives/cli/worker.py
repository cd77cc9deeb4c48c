"""`wink submit`, `worker`, `ps`, `cancel`, `fetch`: runs that survive processes and machines."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weakincentives.cli.common import (
    Misuse,
    echo,
    examples,
    say,
    shortened,
    table,
    text_of,
)
from weakincentives.cli.database import (
    cache_directory,
    check_outside,
    machine_name,
    objects_url,
    open_database,
    open_runs,
    open_storage,
)
from weakincentives.cli.fetching import Fetch
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
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.text import counted
from weakincentives.errors import (
    FilesystemError,
    MissingExtra,
)

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.filesystem.transfer import ObjectStorage
    from weakincentives.runtime.stores.database import Database
    from weakincentives.runtime.stores.runs import DurableRun, Runs, Status


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
        code = _perform_runs(
            opened,
            open_storage(url, opened),
            machine=here,
            jobs=jobs,
            lease=lease,
            as_json=as_json,
        )
    _end_waiting_threads(code)
    return code


def _end_waiting_threads(code: int) -> None:
    """End the process where a thread of DBOS still waits for a run that another worker took over.

    Python would wait for it at the end, and so for ever.
    """
    until = SYSTEM_CLOCK.monotonic() + _PATIENCE
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, until - SYSTEM_CLOCK.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


_PATIENCE = 5.0
"""Seconds that threads have to end, once a worker has stopped."""


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
