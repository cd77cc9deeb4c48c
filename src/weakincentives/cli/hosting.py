"""What a worker gives the runs that it performs: what `wink run` would, from their stored flags."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from weakincentives.adapters import Message, RunConfig
from weakincentives.cli.common import Misuse
from weakincentives.cli.config import Settings, load_settings
from weakincentives.cli.fetching import Fetch
from weakincentives.cli.models import open_model, tracker_of
from weakincentives.cli.workbench import check_fits_branch, load_types, open_workbench
from weakincentives.contrib.tools.suite import load_types as load_own_types
from weakincentives.core.logs import get_logger
from weakincentives.durable.host import LOCAL, OF_RUN, Opening, base_of_run
from weakincentives.durable.performer import Prepared
from weakincentives.errors import WinkError
from weakincentives.filesystem import HostFilesystem, branches_of, drop_branch
from weakincentives.filesystem.transfer import ObjectStorage
from weakincentives.prompt.approval import Approval
from weakincentives.runtime import Session
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import DurableRun, Runs, Status

_logger = get_logger(__name__)


class ToldRuns(Runs):
    """Runs whose sittings are told about as they begin and end.

    Args:
        tell: Called with a run whenever it begins, waits or has ended.
        leave: Called with a run before it counts as ended.
    """

    def __init__(
        self,
        database: Database,
        *,
        tell: Callable[[DurableRun], object],
        leave: Callable[[DurableRun], object],
    ) -> None:
        super().__init__(database)
        self._tell = tell
        self._leave_run = leave
        self._begun: set[str] = set()
        self._guard = threading.Lock()

    def begin(self, run_id: str, sitting: int, worker: str) -> bool:
        """Note that a worker performs a sitting, and tell it."""
        is_current = super().begin(run_id, sitting, worker)
        run = self.find(run_id)
        with self._guard:
            is_new = is_current and run.workflow not in self._begun
            self._begun.add(run.workflow)
        if is_new:
            self._tell(run)
        return is_current

    def end(self, run_id: str, sitting: int, status: Status, detail: str = "") -> DurableRun | None:
        """Note how a sitting ended, and tell it."""
        self._leave_run(replace(self.find(run_id), status=status))
        run = super().end(run_id, sitting, status, detail)
        if run is not None:
            self._tell(run)
        return run


def stored_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags as those of a stored run: code that they name has to be approved."""
    return {**flags, "stored": list(flags.get("policy", ()))}


def settings_of(run: DurableRun, workspace: Path) -> Settings:
    """Return the settings of a run on a directory; code that they name has to be approved here."""
    return load_settings(workspace, **stored_flags(run.about.get("flags") or {}))


def opening_of(run: DurableRun) -> Opening:
    """Import the types that the session of a run may have, and return what its files need."""
    load_own_types()
    base = base_of_run(run)
    if base["kind"] != LOCAL:  # its directory is not here yet, and none of its code is approved
        return Opening()
    with _as_failures():
        settings = settings_of(run, Path(str(base["workspace"])))
        load_types(settings)
    return Opening(unprotected=settings.policy.unprotect)


def leave_here(runs: Runs, run: DurableRun, objects: ObjectStorage, machine: str) -> None:
    """Show a run that has ended in the directory that it worked on, like one of `wink run`.

    A branch that was not merged is left there. What fails, or a kill prevents, `wink fetch` does.
    """
    if not run.has_ended or base_of_run(run)["kind"] != LOCAL or run.machine != machine:
        return
    try:
        fetch = Fetch(runs, run, objects, machine=machine)
        place = fetch.directory()
        if run.status == "done" and not run.about.get("no_merge"):
            fetch.session_into(place)
        else:
            fetch.into(place)
        for each in branches_of(place):
            if each.about.get(OF_RUN) == run.id:
                drop_branch(place, each.name)
    except (Misuse, OSError, WinkError) as error:
        _logger.warning("%s was not copied to its directory; use wink fetch: %s", run.id, error)


@contextmanager
def prepare(run: DurableRun, files: HostFilesystem, session: Session) -> Generator[Prepared]:
    """Yield what `wink run` would give the run; a call that needs approval is suspended."""
    with ExitStack() as stack:
        with _as_failures():
            settings = settings_of(run, files.root)
            turns = sum(each.role == "model" and not each.depth for each in session[Message])
            adapter = stack.enter_context(
                open_model(settings.model, turns=turns, temperature=settings.temperature)
            )
            is_approved = bool(run.about.get("yes"))
            bench = stack.enter_context(
                open_workbench(
                    settings,
                    session,
                    ask=(lambda request: Approval(True, "--yes")) if is_approved else None,
                    suspends=not is_approved,
                    files=files,
                )
            )
            check_fits_branch(bench)
            tracker = tracker_of(settings, adapter, session)
        config = RunConfig(
            max_turns=settings.max_turns,
            time_limit=settings.time_limit,
            context_window=settings.context_window,
            completion=bench.completion,
        )
        yield Prepared(
            adapter=adapter, prompt=bench.prompt, options={"config": config, "budget": tracker}
        )


@contextmanager
def _as_failures() -> Generator[None]:
    """Turn wrong settings into a failure of the run; the worker goes on."""
    try:
        yield
    except Misuse as error:
        raise WinkError(str(error)) from error
