"""A run of an agent on a directory, from its start to its result."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from weakincentives.adapters import (
    Adapter,
    RunConfig,
    RunEvent,
    RunOptions,
    SentBack,
    ToolEnded,
    ToolRolledBack,
)
from weakincentives.cli.common import FOR_OTHERS, InUse, open_branch, open_workspace, say
from weakincentives.cli.config import Settings, save_rule
from weakincentives.cli.models import budget_of, open_model, price_of, tracker_of
from weakincentives.cli.question import Approver
from weakincentives.cli.saved_runs import KIND, inbox_of, open_session
from weakincentives.cli.signals import Stop, stopping
from weakincentives.cli.trust import trust_of
from weakincentives.cli.view import (
    CallEnded,
    ChangedFile,
    Event,
    Outcome,
    RunStarted,
    View,
    open_view,
)
from weakincentives.cli.workbench import (
    Workbench,
    check_fits_branch,
    open_workbench,
    prefers_branch,
)
from weakincentives.contrib.databases import known_databases
from weakincentives.contrib.tools import Plan
from weakincentives.core.budget import BudgetTracker
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.media import Content, Media
from weakincentives.errors import (
    MergeConflict,
    WinkError,
    WorkspaceLocked,
)
from weakincentives.filesystem import Branch, HostFilesystem, drop_branch, present_in
from weakincentives.filesystem.diffs import diff_text
from weakincentives.filesystem.ignored import IgnoredFiles
from weakincentives.filesystem.store import location_of
from weakincentives.prompt import PolicyDecision, Tool, ToolContext, ToolResult
from weakincentives.runtime import (
    ApprovalDesk,
    Inbox,
    SavedSession,
    Session,
    ToolInvoked,
    configure_logging,
)
from weakincentives.runtime.calls import Run, new_run, tidy_runs
from weakincentives.runtime.conversation import Message, last_conversation
from weakincentives.runtime.forks import RUN, SECTIONS
from weakincentives.runtime.merge import merge_branch, rebased
from weakincentives.serde import dump


@dataclass(kw_only=True)
class AgentRun:
    """A run, new or resumed, from its start to its result.

    It is also a policy, to see from inside each call what the call changes.
    """

    name = "report"
    merges = True
    """Whether a branch is merged at the end, so that a run may choose to work on one."""
    patience = 0.3
    """Seconds during which another signal does not stop it at once."""

    settings: Settings
    flags: Mapping[str, Any]
    message: str | None
    yes: bool = False
    ask_elsewhere: bool = False
    """Whether to wait for the answer of another process if there is no terminal to ask at."""
    dry_run: bool = False
    branch: str | None = None
    """The branch to work on; ``-`` has the mark of the run for a name."""
    no_merge: bool = False
    in_place: bool = False
    """Whether to lock other processes out of the directory."""
    as_json: bool = False
    quiet: bool = False
    attached: Sequence[Media] = ()
    """Goes with the message."""
    earlier: Run | None = None
    watch: Callable[[Event], Event] | None = None
    """Sees every event first, and may replace it."""

    _view: View = field(init=False)
    _workbench: Workbench = field(init=False)
    _run_file: Run = field(init=False)
    _saved: SavedSession = field(init=False)
    _changed: dict[str, tuple[ChangedFile, ...]] = field(
        init=False, default_factory=dict[str, "tuple[ChangedFile, ...]"]
    )
    """What calls have changed, by id, until they commit or roll back."""
    _ignored: IgnoredFiles | None = field(init=False, default=None)
    _branch: Branch | None = field(init=False, default=None)
    """What the run works on, if not on the directory itself."""
    _is_merged: bool = field(init=False, default=False)

    def perform(self) -> int:
        """Run the agent and return the exit code."""
        trust_of(self.settings.workspace).admit(self.settings)
        with stopping(self.patience) as stop:
            try:
                outcome = self._perform(stop)
            except KeyboardInterrupt:  # before the run began
                say("interrupted")
                outcome = "interrupted"
        return {"done": 0, "failed": 1, "interrupted": stop.exit_code}[outcome]

    def _perform(self, stop: Stop) -> Outcome:
        settings = self.settings
        turns = 0 if self.earlier is None else self.earlier.turns
        with (
            open_model(settings.model, turns=turns, temperature=settings.temperature) as adapter,
            self._open_files() as files,
            self._resumed() as saved,
            _trial(files) if self.dry_run else nullcontext(files) as work,
            open_view(as_json=self.as_json, quiet=self.quiet) as self._view,
        ):
            budget_of(settings, adapter)  # refuse a limit that cannot be checked, before anything
            self._view.price = price_of(settings, adapter)
            result = self._view.totals
            with self._open_workbench(work, saved), self._recording(saved):
                self._work(adapter, stop)
            if self.dry_run:
                result.dry_run = True
                result.diff = diff_text(work.diff_here())
            elif result.outcome != "done" and result.run:
                result.resume = f"wink resume {result.run}{self._where}"
            if self._branch is not None and not self._is_merged and not self.dry_run:
                result.branch = self._branch.name
            self._show_result()
        return result.outcome

    @property
    def _where(self) -> str:
        """What a command needs to find the directory from here."""
        workspace = self.settings.workspace
        return "" if workspace == Path.cwd() else f" -w {shlex.quote(str(workspace))}"

    @contextmanager
    def _open_files(self) -> Generator[HostFilesystem]:
        """Yield the directory, or the branch that the run works on."""
        workspace = self.settings.workspace
        self._run_file = self.earlier or new_run(location_of(workspace))
        files = self._directory_or_branch()
        try:
            with files:
                yield files
        finally:
            if self._branch is not None and self._is_done_with(self._branch):
                drop_branch(workspace, self._branch.name)

    def _is_done_with(self, branch: Branch) -> bool:
        """Whether the branch can be dropped: this run made it, and it is merged or empty."""
        if branch.info.about.get(RUN) != self._run_file.mark:
            return False
        return self._is_merged or self.dry_run or not self._run_file.path.exists()

    def _directory_or_branch(self) -> HostFilesystem:
        workspace, rules = self.settings.workspace, self.settings.policy.unprotect
        name = self.branch
        if self.earlier is not None:
            name = cast("str | None", self.earlier.data.about.get("branch"))
        if name is None:
            # A dry run is one transaction from its start to its end.
            alone = self.in_place or self.dry_run
            may_branch = self.merges and not alone and self.earlier is None
            others = present_in(workspace) if may_branch and prefers_branch(self.settings) else ()
            if not others:
                try:
                    return open_workspace(workspace, unprotected=rules, alone=alone)
                except InUse as error:
                    if not may_branch:
                        raise
                    others = (error.pid or 0,)
            name = "-"
            say(f"process {others[0]} is at work here, too; this run works on a branch")
        name = self._run_file.mark if name == "-" else name
        self._branch = open_branch(workspace, name, run=self._run_file.mark, unprotected=rules)
        return self._branch

    def _resumed(self) -> AbstractContextManager[SavedSession | None]:
        """Open the saved session of a resumed run; None for a new run."""
        return open_session(self.earlier, self.settings) if self.earlier else nullcontext()

    @contextmanager
    def _open_workbench(self, files: HostFilesystem, saved: SavedSession | None) -> Generator[None]:
        if saved is not None:
            saved.recover(files, databases=known_databases(self.settings.workspace))
        save = None if self.dry_run else partial(save_rule, self.settings.workspace)
        about: Mapping[str, object] = {} if self.earlier is None else self.earlier.data.about
        approver = Approver(
            self._view,
            ApprovalDesk(self._run_file.path),
            yes=self.yes,
            waits=self.ask_elsewhere,
            where=f"wink approve {self._run_file.mark}{self._where}",
            save=save,
        )
        with open_workbench(
            self.settings,
            Session() if saved is None else saved.session,
            ask=approver.ask,
            files=files,
            policies=[self, _OnlyReversible()] if self.dry_run else [self],
            texts=cast("Mapping[str, str]", about.get(SECTIONS, {})),
        ) as self._workbench:
            if self._branch is not None:
                check_fits_branch(self._workbench)
            yield

    @contextmanager
    def _recording(self, saved: SavedSession | None) -> Generator[None]:
        """Save the session, and write the log next to it.

        Only now: whatever is wrong with the settings has been reported.
        """
        with (
            self._new_session() if saved is None else nullcontext(saved) as self._saved,
            _logged_to(self._saved.path.with_suffix(".log")),
        ):
            yield

    def _work(self, adapter: Adapter, stop: Stop) -> None:
        """Let the model work on the message, and note the outcome."""
        result = self._view.totals
        try:
            try:
                self._start()
                if self.earlier is None or self.message or not self.earlier.has_ended:
                    result.text = self._evaluate(adapter)
                if self._branch is not None and not self.no_merge and not self.dry_run:
                    self._finish(self._branch, adapter)
                result.outcome = "done"
            except WinkError as error:
                result.error = str(error)
            finally:
                stop.is_over = True
        except KeyboardInterrupt:
            result.outcome = "interrupted"

    def _show_result(self) -> None:
        result = self._view.totals
        result.seconds = SYSTEM_CLOCK.monotonic() - self._view.began
        self._show(result)

    def _new_session(self) -> SavedSession:
        tidy_runs(self._run_file.path.parent.parent)
        about = {
            "kind": KIND,
            "task": self.message,
            "model": self.settings.model,
            "dry_run": self.dry_run,
            "flags": dict(self.flags),
        }
        if self._branch is not None:
            about |= {"branch": self._branch.name, "no_merge": self.no_merge}
        return SavedSession.create(self._run_file.path, self._workbench.session, about=about)

    def _start(self) -> None:
        workbench, settings = self._workbench, self.settings
        run_id = self._view.totals.run = self._run_file.id
        notes = workbench.filesystem.recovered
        if settings.sandbox.engine == "none" and workbench.shell is not None:
            notes = (*notes, "Commands run without a sandbox: they can do everything you can.")
        self._show(
            RunStarted(
                run=run_id,
                workspace=str(settings.workspace),
                model=str(settings.model),
                task=self.message or self._whole_task(),
                commands=workbench.sandbox,
                branch="" if self._branch is None else self._branch.name,
                dry_run=self.dry_run,
                resumed=self.earlier is not None,
                notes=notes,
            )
        )

    def _whole_task(self) -> str:
        """Return the first message of a run; one that was killed early may not have sent it."""
        task = None if self.earlier is None else self.earlier.data.about.get("task")
        return "\n\n".join(str(each) for each in (task, self.message) if each)

    def _with_attached(self, message: str | None) -> Content | None:
        return [*([message] if message else []), *self.attached] if self.attached else message

    def _evaluate(self, adapter: Adapter, message: str | None = None) -> str:
        """Let the model work on a message, by default the run's own."""
        session = self._workbench.session
        has_begun = bool(last_conversation(session))
        # The task was sent, also if the user went back to before it: it is not sent again.
        was_sent = session[Message].latest() is not None
        options = self._options(adapter)
        options["resume"], options["on_event"] = has_begun, self._hear
        own = self._with_attached(self.message if was_sent else self._whole_task())
        prompt = self._workbench.prompt
        return adapter.evaluate(prompt, session, message=message or own, **options).text

    # The end of a run on a branch

    def _finish(self, branch: Branch, adapter: Adapter) -> None:
        """Merge the branch; the model gets the chance to deal with conflicts.

        Raises:
            MergeConflict: Others were quicker each time. The branch stays.
            WorkspaceLocked: Another process has the directory to itself.
        """
        for left in reversed(range(_REBASES + 1)):
            problem = self._merge(branch)
            if not problem:
                self._is_merged = True
                if not self._is_done_with(branch):
                    branch.begin_anew()
                return
            if not left:
                raise MergeConflict(problem)
            told = rebased(branch)
            self._show(SentBack(problem))
            self._view.totals.text = self._evaluate(adapter, told)

    def _merge(self, branch: Branch) -> str:
        """Merge a branch into the directory in one call; returns why that was refused, if so."""
        if not branch.has_changes:
            return ""
        session, rules = self._workbench.session, self.settings.policy.unprotect
        workspace = self.settings.workspace
        try:
            files = open_workspace(workspace, unprotected=rules, wait=FOR_OTHERS)
        except InUse as error:
            raise WorkspaceLocked(f"{workspace} is in use by {error.user}", error.pid) from error
        with files:
            mark = self._run_file.mark
            result = merge_branch(branch, files, session, mark=mark, policies=[self])
        record = session[ToolInvoked].latest()
        assert record is not None
        changed = self._changed.pop(record.call_id, ())
        about = {"branch": branch.name}
        self._show(CallEnded(record=record, arguments=about, files=changed, is_merge=True))
        return "" if result.success else result.message

    def _options(self, adapter: Adapter) -> RunOptions:
        settings = self.settings
        config = RunConfig(
            max_turns=settings.max_turns,
            time_limit=settings.time_limit,
            context_window=settings.context_window,
            completion=self._workbench.completion,
        )
        return {
            "config": config,
            "budget": self._budget_tracker(adapter),
            "inbox": Inbox(inbox_of(self._saved.path)),
        }

    def _budget_tracker(self, adapter: Adapter) -> BudgetTracker | None:
        return tracker_of(self.settings, adapter, self._workbench.session)

    # What is shown

    def _show(self, event: Event) -> None:
        self._view.show(event if self.watch is None else self.watch(event))

    def _hear(self, event: RunEvent) -> None:
        """Show an event of the run; the end of a call with what it changed."""
        if not isinstance(event, ToolEnded):
            self._show(event)
            return
        changed = self._changed.pop(event.call.id, ())
        self._show(
            CallEnded(
                record=event.record,
                arguments=dump(event.record.params) if event.record.edited else event.call.params,
                rolled_back=isinstance(event, ToolRolledBack) and bool(event.undone),
                files=changed if event.result.success else (),
            )
        )
        plan = self._workbench.session[Plan].latest()
        if plan is not None and plan != self._view.plan:
            self._show(plan)

    def check(
        self, tool: Tool[Any, Any], params: object, *, context: ToolContext
    ) -> PolicyDecision:
        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: object, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.reach == "read":
            return
        files = cast("HostFilesystem", context.filesystem)
        paths = files.changed_here()
        if not paths:
            return
        if self._ignored is None or any(path.endswith(".gitignore") for path in paths):
            self._ignored = IgnoredFiles(self.settings.workspace)
        ignored = {path: self._ignored(path) for path in paths}
        is_counted = sum(not each for each in ignored.values()) <= _MAX_COUNTED
        self._changed[context.call_id] = tuple(
            ChangedFile(each.path, each.added, each.removed, ignored[each.path])
            for each in files.diff_here(lambda path: is_counted and not ignored[path])
        )


_REBASES = 3
"""How often the model may deal with conflicts."""
_MAX_COUNTED = 100
"""Files of one call whose changed lines are counted; beyond that only paths are shown."""


class _OnlyReversible:
    """Denies, in a dry run, tools that reach outside the directory."""

    name = "dry_run"

    def applies_to(self, tool: Tool[Any, Any]) -> bool:
        return tool.reach not in ("read", "reversible")

    def check(self, tool_name: str, params: object, context: object) -> str | None:
        return (
            f"This is a dry run, and the effects of '{tool_name}' outside the workspace could not "
            "be undone. Continue as far as you can without it"
        )


@contextmanager
def _trial(files: HostFilesystem) -> Generator[HostFilesystem]:
    """Yield a view of the workspace that is rolled back at the end, or after a kill.

    All calls are savepoints in one transaction that is never committed.
    """
    view = files.fork_in_place()
    try:
        yield view
    finally:
        files.discard(view)


@contextmanager
def _logged_to(path: Path) -> Generator[None]:
    """Write the library's log to a file next to the session."""
    # An abandoned thread may log after the end.
    logging.getLogger("weakincentives").addHandler(logging.NullHandler())
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as log:
        handler = configure_logging(logging.WARNING, stream=log)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)
