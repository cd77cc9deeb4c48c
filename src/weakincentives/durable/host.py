"""Opens a run in this process, from what the database and object storage have, and performs it.

What a dead worker has left on disk is not used: the session comes from the database, and the branch
is rebuilt from the lines in it. So any process that opens a run sees exactly what is recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weakincentives.core.logs import get_logger
from weakincentives.durable.performer import NOT_OF_THE_RUN, Prepared, SessionSteps, in_words
from weakincentives.durable.steps import (
    Call,
    Ended,
    Finish,
    FinishResult,
    Step,
    StepResult,
    Turn,
    result_of_end,
)
from weakincentives.errors import (
    AlreadyExists,
    MergeConflict,
    SnapshotError,
    WinkError,
)
from weakincentives.filesystem import Branch, HostFilesystem, branches_of, drop_branch
from weakincentives.filesystem.branch_log import make_store, point_now
from weakincentives.filesystem.portable import (
    Base,
    BranchUpload,
    ObjectStorage,
    materialize,
    unpack_branch,
)
from weakincentives.filesystem.store import location_of
from weakincentives.prompt.approval import Approval, ApprovalRequest
from weakincentives.runtime import OutcomeLedger, SavedSession
from weakincentives.runtime.merge import MERGE, merge_branch, rebased
from weakincentives.runtime.stores.runs import DurableRun, Runs
from weakincentives.runtime.stores.sql import SqlStore
from weakincentives.session.events import ToolInvoked
from weakincentives.session.session import Session

_logger = get_logger(__name__)

LOCAL = "local"
"""The kind of a base that is a directory of one machine."""
EMPTY = "empty"
"""The kind of a base of runs that need no files: an empty directory."""
OF_RUN = "durable_run"
"""Notes in a branch which run it is of."""
_BASE = "wink_base"
_REBASES = 3
"""How often the model may deal with conflicts."""


class Elsewhere(BaseException):
    """This process does not go on with a run: another one has it, or will.

    Not an Exception, so that an engine does not record it as the outcome of a step.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What must be known to open a run."""

    types: Sequence[type] = ()
    """Of its session, beyond those of imported modules."""
    unprotected: Sequence[str] = ()
    """Files of ours that the run may see; see ``HostFilesystem``."""
    session: Callable[[], Session] = Session
    """Returns the session of a new run; a resumed session gets its reducers."""


Prepare = Callable[[DurableRun, HostFilesystem, Session], AbstractContextManager[Prepared]]
"""Returns what a run works with, for as long as it is open here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """Where the runs of a process come from, and what they get."""

    runs: Runs
    store: SqlStore
    objects: ObjectStorage
    """Has the contents of changed files, and stored trees."""
    prepare: Prepare
    cache: Path
    """A directory for copies of bases that come from elsewhere."""
    opening: Callable[[DurableRun], Opening] = field(default=lambda run: Opening())
    worker: str = ""
    """Its name in the table of runs."""
    wait: float = 60.0
    """Seconds to wait for a session that is in use, or for the directory: longer than a lease."""
    is_stopping: Callable[[], bool] = field(default=lambda: False)
    """Asked before each step; then the run continues elsewhere."""


@dataclass(frozen=True, slots=True)
class BranchLines:
    """What the log of a session says about the run's branch."""

    base: Mapping[str, Any]
    lines: tuple[str, ...]

    @classmethod
    def of(cls, attached: Sequence[str]) -> BranchLines | None:
        """Return the branch that the lines of a session describe: after its last base."""
        for place in reversed(range(len(attached))):
            if attached[place].startswith(f'{{"{_BASE}"'):
                values = json.loads(attached[place])[_BASE]
                return cls(values, tuple(attached[place + 1 :]))
        return None


class _Upload:
    """The lines of a branch, behind a line with its base; for ``SavedSession.attach``."""

    def __init__(self, branch: Branch, objects: ObjectStorage, base: Mapping[str, Any]) -> None:
        self._branch = branch
        self._objects = objects
        self._base = base
        self._upload = BranchUpload(branch, objects)
        self._head: list[str] = []

    def begin(self, saved: int | None = None) -> None:
        """Begin with so many lines that are saved, or with a line for the base."""
        self._upload = BranchUpload(self._branch, self._objects, saved=saved or 0)
        self._head = [] if saved is not None else [json.dumps({_BASE: dict(self._base)})]

    def rebase(self) -> None:
        """Begin anew: the branch has another base now."""
        info = self._branch.info
        self._base = {**self._base, "serial": info.base, "moment": info.moment}
        self.begin()

    def pending(self) -> Sequence[str]:
        return [*self._head, *self._upload.pending()]

    def saved(self, count: int) -> None:
        heads = min(count, len(self._head))
        del self._head[:heads]
        self._upload.saved(count - heads)


class _RunApprovals:
    """The requests of one run, in the database."""

    def __init__(self, runs: Runs, run_id: str) -> None:
        self._runs = runs
        self._run_id = run_id

    def ask(self, request: ApprovalRequest) -> str:
        return self._runs.ask(self._run_id, request) or "the run has ended"

    def answered(self, request: ApprovalRequest) -> Approval | None:
        return self._runs.answered(
            self._run_id, request.call_id, request.digest, request.policy_name
        )


class RunHost:
    """One sitting of a run in this process. It is opened by the first step that needs it.

    Raises ``Elsewhere`` from a step if this process must not go on with the run.
    """

    def __init__(self, run_id: str, sitting: int, hosting: Hosting) -> None:
        self.run_id = run_id
        self.sitting = sitting
        self._hosting = hosting
        self._opened: ExitStack | None = None
        self._ended: Ended | None = None

    def perform(self, step: Step) -> StepResult:
        """Perform a step. When it returns, everything is in the database."""
        if self._hosting.is_stopping():
            self.close()
            raise Elsewhere("this worker is stopping")
        try:
            if isinstance(step, Finish) and step.status != "done":
                return self._end(step.status, step.detail)
            try:
                ended = self._open()
            except Exception as error:
                if isinstance(error, NOT_OF_THE_RUN):
                    raise
                self.close()
                _logger.exception("run %s cannot be opened", self.run_id)
                return self._failed(step, error)
            return result_of_end(step, ended) if ended is not None else self._steps.perform(step)
        except NOT_OF_THE_RUN as error:
            _logger.warning("run %s continues elsewhere, or later: %s", self.run_id, error)
            self.close()
            raise Elsewhere(str(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the session and everything else; without effect if it is not open."""
        opened, self._opened = self._opened, None
        if opened is not None:
            try:
                opened.close()
            except NOT_OF_THE_RUN as error:
                _logger.warning("run %s was not saved once more: %s", self.run_id, error)
            except Exception:
                _logger.exception("closing run %s failed", self.run_id)

    # Opening

    def _open(self) -> Ended | None:
        """Open the run, if it is not; returns how it has ended, if it has."""
        if self._opened is not None:
            return None
        hosting = self._hosting
        with ExitStack() as stack:
            run = self._run = hosting.runs.find(self.run_id)
            if run.sitting != self.sitting or run.has_ended or run.status == "waiting":
                return _how(run)
            opening = hosting.opening(run)
            saved = self._saved = self._open_session(run, opening)
            stack.callback(saved.close)
            self._base, files = self._open_branch(run, opening, stack)
            self._branch = files
            ledger = saved.ledger
            assert ledger is not None
            saved.recover(files, ledger=ledger)
            if not hosting.runs.begin(run.id, self.sitting, hosting.worker):
                return _how(hosting.runs.find(run.id))
            prepared = stack.enter_context(hosting.prepare(run, files, saved.session))
            # In the same database as the session, under the same lease.
            prompt = prepared.prompt.bind(resources={OutcomeLedger: ledger})
            stack.enter_context(prompt.resources)
            self._steps = SessionSteps(
                replace(prepared, prompt=prompt),
                saved.session,
                message=run.task,
                save=saved.save,
                approvals=_RunApprovals(hosting.runs, run.id),
                finish=self._finish,
                check=lambda: "cancelled" if hosting.runs.is_cancelled(run.id) else None,
            )
            stack.callback(self._steps.close)
            self._opened = stack.pop_all()
        return None

    def _open_session(self, run: DurableRun, opening: Opening) -> SavedSession:
        store, wait, session = self._hosting.store, self._hosting.wait, opening.session()
        while True:
            with suppress(FileNotFoundError):
                saved = SavedSession.open(run.id, store=store, wait=wait, types=opening.types)
                saved.session.register_like(session)
                return saved
            with suppress(FileExistsError):  # another worker was quicker
                return SavedSession.create(run.id, session, about=run.about, store=store)

    def _open_branch(
        self, run: DurableRun, opening: Opening, stack: ExitStack
    ) -> tuple[Mapping[str, Any], Branch]:
        """Make a branch as the session has it, for this process alone."""
        saved, objects = self._saved, self._hosting.objects
        known = BranchLines.of(saved.attached)
        base = base_of_run(run) if known is None else known.base
        root = self._root(base)
        if known is None and base["kind"] == LOCAL:
            base = {**base, **_point(root)}
        name = f"{run.mark}.{saved.token}"
        branch = unpack_branch(
            root,
            name,
            () if known is None else known.lines,
            objects,
            serial=base.get("serial") if base["kind"] == LOCAL else None,
            moment=base.get("moment", 0) if base["kind"] == LOCAL else 0,
            about={OF_RUN: run.id},
            unprotected=tuple(opening.unprotected),
        )
        stack.callback(branch.close)
        self._upload = _Upload(branch, objects, base)
        self._upload.begin(None if known is None else len(known.lines))
        saved.attach(self._upload)
        _drop_leftovers(root, run.id, name)
        return base, branch

    def _root(self, base: Mapping[str, Any]) -> Path:
        """Return the directory of a base; a copy of it, if it comes from elsewhere."""
        if base["kind"] == LOCAL:
            return Path(os.path.realpath(str(base["workspace"])))
        if base["kind"] == EMPTY:
            root = self._hosting.cache / EMPTY
            root.mkdir(parents=True, exist_ok=True)
            return root
        found = Base.decode(base)
        key = hashlib.sha256(json.dumps(found.encode(), sort_keys=True).encode()).hexdigest()
        root = self._hosting.cache / key[:32]
        if not root.exists():
            with suppress(AlreadyExists):  # another process was quicker
                materialize(found, root, self._hosting.objects)
        return root

    # The end of a sitting

    def _end(self, status: Ended, detail: str) -> FinishResult:
        """Note the end of a sitting; the session is free before anybody learns of it."""
        self.close()
        self._hosting.runs.end(self.run_id, self.sitting, status, detail)
        return FinishResult(status)

    def _failed(self, step: Step, error: Exception) -> StepResult:
        if isinstance(step, Turn | Call):
            return result_of_end(step, "failed", in_words(error))
        return self._end("failed", in_words(error))

    def _finish(self, step: Finish, detail: str) -> str:
        """End a sitting, with the merge of its changes; returns what the model must know first."""
        status = step.status
        is_merged = False
        if status == "done" and self._merges:
            try:
                told = self._merge()
            except MergeConflict as error:
                status, detail = "failed", str(error)
            else:
                if told:
                    return told
                is_merged = True
        name, root = self._branch.name, self._branch.root
        self._saved.save()
        self._end(status, detail)
        if is_merged:
            with suppress(WinkError):
                drop_branch(root, name)
        return ""

    @property
    def _merges(self) -> bool:
        return self._base["kind"] == LOCAL and not self._run.about.get("no_merge")

    def _merge(self) -> str:
        """Merge the branch into its workspace; returns what the model must know in a conflict."""
        branch, session = self._branch, self._saved.session
        if not branch.has_changes:
            return ""
        rules = self._hosting.opening(self._run).unprotected
        root = branch.root
        with HostFilesystem(root, unprotected=rules, shared=True, wait=self._hosting.wait) as files:
            result = merge_branch(
                branch, files, session, mark=self._run.mark, check=self._saved.confirm
            )
        self._saved.save()
        if result.success:
            return ""
        tries = [e for e in session[ToolInvoked].all() if e.tool_name == MERGE and not e.success]
        if len(tries) > _REBASES:
            raise MergeConflict(result.message)
        told = rebased(branch)
        self._upload.rebase()
        return told


def base_of_run(run: DurableRun) -> Mapping[str, Any]:
    """Return the base that a run was submitted with: a directory of a machine, or a portable one.

    Raises:
        SnapshotError: It has none.
    """
    base = run.about.get("base")
    if isinstance(base, Mapping):
        return dict(base)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    place = run.about.get("from") or run.about
    if "workspace" not in place:
        raise SnapshotError(f"run {run.id} names no directory to work on")
    return {"kind": LOCAL, "workspace": str(place["workspace"])}


def _point(root: Path) -> dict[str, int]:
    """Return where the history of a workspace is now."""
    main = location_of(root)
    make_store(root, main)
    serial, moment = point_now(root, main)
    return {"serial": serial, "moment": moment}


def _drop_leftovers(root: Path, run_id: str, name: str) -> None:
    """Remove the branches that dead workers have left of a run."""
    for each in branches_of(root):
        if each.about.get(OF_RUN) == run_id and each.name != name:
            with suppress(WinkError):  # a paused worker may still have it
                drop_branch(root, each.name)


def _how(run: DurableRun) -> Ended:
    """Return how a sitting has ended that is not to be performed."""
    return "waiting" if run.status in ("queued", "running", "waiting") else run.status
