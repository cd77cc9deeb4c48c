"""What a run tells, turned into events to show."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from weakincentives.budget import NO_TOKENS, TokenUsage
from weakincentives.cli import view as shown
from weakincentives.cli.view import (
    CallEnded,
    ChangedFile,
    PlanChanged,
    PlanLine,
    RunResult,
    RunStarted,
    View,
)
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.contrib.tools import Plan
from weakincentives.prompt import PolicyDecision, Tool, ToolContext, ToolResult
from weakincentives.runtime import conversation as told

if TYPE_CHECKING:
    from weakincentives.cli.workbench import Workbench
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.runtime import ToolInvoked
    from weakincentives.runtime.conversation import RunEvent

__all__ = ["Report"]


class Report:
    """Turns what a run tells into events to show; also a policy, to see what each call changes."""

    name = "report"

    def __init__(
        self,
        view: View,
        *,
        task: str,
        dry_run: bool,
        resumed: bool,
        price: Callable[[TokenUsage], float | None] | None,
    ) -> None:
        self._view = view
        self._task = task
        self._dry_run = dry_run
        self._resumed = resumed
        self._price = price
        self._run = ""
        self._began = SYSTEM_CLOCK.monotonic()
        self._workbench: Workbench | None = None
        self._under_way: dict[str, object] = {}
        """The arguments of calls, by id."""
        self._changed: dict[str, tuple[ChangedFile, ...]] = {}
        """What calls have changed, by id, while it is not known whether that is kept."""
        self._files: dict[str, tuple[int, int]] = {}
        self._plan: object = None
        self._readers: set[str] = set()
        """Tools that change nothing, so that nothing of theirs is rolled back."""
        self._usage = NO_TOKENS
        self._turns = self._calls = self._rolled_back = self._denied = 0

    def begin(self, run: str, workbench: Workbench) -> None:
        """Show that a run begins, and on what."""
        self._run, self._workbench = run, workbench
        self._readers = {tool.name for tool in workbench.tools if tool.reach == "read"}
        settings = workbench.settings
        notes = workbench.filesystem.recovered
        if settings.sandbox == "none" and workbench.shell is not None:
            notes = (*notes, "Commands run without a sandbox: they can do all that you can.")
        self._view.show(
            RunStarted(
                run=self._run,
                workspace=str(settings.workspace),
                model=str(settings.model),
                task=self._task,
                commands=workbench.sandbox,
                dry_run=self._dry_run,
                resumed=self._resumed,
                notes=notes,
            )
        )

    # What the run tells

    def hear(self, event: RunEvent) -> None:
        """Show what a run tells while it goes on."""
        match event:
            case told.TurnStarted(number=number):
                self._turns = number
                self._view.show(shown.TurnStarted(turn=number))
            case told.TextDelta(text=text):
                self._view.show(shown.TextCame(text=text))
            case told.TurnEnded(number=number, turn=turn):
                self._usage = self._usage + turn.usage
                self._view.show(
                    shown.TurnDone(
                        turn=number,
                        text=turn.text,
                        input_tokens=turn.usage.input_tokens,
                        output_tokens=turn.usage.output_tokens,
                        calls=len(turn.tool_calls),
                    )
                )
            case told.ToolStarted(call=call):
                self._under_way[call.id] = call.params
                self._view.show(
                    shown.CallStarted(call=call.id, tool=call.name, arguments=call.params)
                )
            case told.Retrying(error=error, wait=wait):
                self._view.show(shown.Retried(error=str(error), wait=wait))
            case told.SentBack(reason=reason):
                self._view.show(shown.SentBackToWork(reason=reason))
            case _:
                pass

    def call_ended(self, record: ToolInvoked) -> None:
        """Show how a call of the model's has ended; those nested in it are its own affair."""
        if record.call_id not in self._under_way:
            return
        arguments = self._under_way.pop(record.call_id)
        changed = self._changed.pop(record.call_id, ())
        outcome = "committed" if record.success else "denied" if record.denied_by else "failed"
        rolled_back = record.ran and not record.success and record.tool_name not in self._readers
        self._calls += 1
        self._rolled_back += rolled_back
        self._denied += outcome == "denied"
        for each in changed if record.success else ():
            added, removed = self._files.get(each.path, (0, 0))
            self._files[each.path] = added + each.added, removed + each.removed
        self._view.show(
            CallEnded(
                call=record.call_id,
                tool=record.tool_name,
                arguments=arguments,
                outcome=outcome,
                message=record.result.message,
                output=_end_of(record.result.render()) if record.result.value is not None else "",
                seconds=record.duration,
                rolled_back=rolled_back,
                files=changed if record.success else (),
                denied_by=record.denied_by,
                notes=record.notes,
            )
        )
        self._show_plan()

    def _show_plan(self) -> None:
        assert self._workbench is not None
        plan = self._workbench.session[Plan].latest()
        if plan is None or plan == self._plan:
            return
        self._plan = plan
        steps = [PlanLine(title=s.title, status=s.status, note=s.note) for s in plan.steps]
        self._view.show(PlanChanged(objective=plan.objective, steps=tuple(steps)))

    # What a call changes, seen from inside of it

    def check(
        self, tool: Tool[Any, Any], params: object, *, context: ToolContext
    ) -> PolicyDecision:
        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: object, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.reach != "read":
            self._changed[context.call_id] = _changes(cast("HostFilesystem", context.filesystem))

    # The end

    def result(
        self, outcome: Literal["done", "failed", "interrupted"], *, text: str = "", error: str = ""
    ) -> RunResult:
        """Return how the run ended, to be shown last."""
        return RunResult(
            run=self._run,
            outcome=outcome,
            text=text,
            error=error,
            turns=self._turns,
            calls=self._calls,
            rolled_back=self._rolled_back,
            denied=self._denied,
            files=tuple(
                ChangedFile(path=path, added=added, removed=removed)
                for path, (added, removed) in sorted(self._files.items())
            ),
            input_tokens=self._usage.input_tokens,
            output_tokens=self._usage.output_tokens,
            cost_usd=None if self._price is None else self._price(self._usage),
            seconds=SYSTEM_CLOCK.monotonic() - self._began,
            dry_run=self._dry_run,
            resume=None if outcome == "done" or self._dry_run else self._resume_with(),
        )

    def _resume_with(self) -> str | None:
        if self._workbench is None:  # it was stopped before it began
            return None
        workspace = self._workbench.settings.workspace
        where = "" if workspace == Path.cwd() else f" -w {shlex.quote(str(workspace))}"
        return f"wink resume {self._run}{where}"


_MAX_OUTPUT = 2000


def _end_of(text: str) -> str:
    """Return the last lines of what a call said: with tests and compilers, those that matter."""
    return text if len(text) <= _MAX_OUTPUT else f"...{text[-_MAX_OUTPUT:]}"


_MAX_COUNTED = 100
"""Files whose lines are counted; of more, only the names are told."""


def _changes(files: HostFilesystem) -> tuple[ChangedFile, ...]:
    """Return what a call has changed so far, with how many lines came and went."""
    paths = files.changed_here()
    if len(paths) > _MAX_COUNTED:
        return tuple(ChangedFile(path=path) for path in paths)
    return tuple(
        ChangedFile(path=each.path, added=each.added, removed=each.removed)
        for each in files.diff_here()
    )
