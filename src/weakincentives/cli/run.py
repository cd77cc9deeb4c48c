"""`wink run` and `wink resume`: an agent on a real directory."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from weakincentives.cli.common import (
    AsJson,
    Misuse,
    Policy,
    SandboxName,
    Workspace,
    Yes,
    complete_models,
    complete_runs,
    complete_tools,
    examples,
    existing_directory,
    find_run,
    open_workspace,
    say,
)
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import SessionInUse, SnapshotError, WinkError

if TYPE_CHECKING:
    from weakincentives.adapters import Adapter
    from weakincentives.cli.config import Settings
    from weakincentives.cli.view import ChangedFile, Event, Outcome, View
    from weakincentives.cli.workbench import Workbench
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.prompt import PolicyDecision, Tool, ToolContext, ToolResult
    from weakincentives.runtime import SavedSession, ToolInvoked
    from weakincentives.runtime.calls import Run

KIND = "run"
"""Marks the saved sessions of runs."""

_RUN_EXAMPLES = examples(
    'wink run "fix the failing test" --model openai:gpt-5-mini',
    'wink run "rename User to Account" -w ~/project --dry-run   # only shows the diff',
    'wink run "update the docs" --policy protect=src --ask shell_execute',
    'echo "tidy up" | wink run - --model local --json',
    more="Settings can also be in wink.toml in the directory, or in variables such as WINK_MODEL.\n"
    'In the documentation: "The commands".',
)
_RESUME_EXAMPLES = examples(
    "wink resume                              # the last run that has not finished",
    "wink resume 20261116-0630                # this one; a prefix of the id is enough",
    'wink resume 20261116-0630 "now the docs"',
    more='In the documentation: "The commands".',
)

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="openai:NAME, openai-responses:NAME, litellm:PROVIDER/NAME, claude[:NAME], "
        "local[:FILE] or scripted:FILE.",
        autocompletion=complete_models,
    ),
]
MaxTurns = Annotated[int | None, typer.Option(metavar="N", help="Limit the model's turns.")]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Limit the tokens.")]
TimeLimit = Annotated[float | None, typer.Option(metavar="SECONDS", help="Limit the time.")]
Ask = Annotated[
    list[str] | None,
    typer.Option(
        "--ask",
        metavar="TOOL",
        help="Ask before calls of this tool, or of this reach. Can be repeated.",
        autocompletion=complete_tools,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")]


def register(app: typer.Typer) -> None:
    app.command("run", epilog=_RUN_EXAMPLES)(run)
    app.command("resume", epilog=_RESUME_EXAMPLES)(resume)


def run(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="What to do; - reads it from standard input.")
    ],
    workspace: Workspace = Path(),
    model: Model = None,
    policy: Policy = None,
    max_turns: MaxTurns = None,
    max_tokens: MaxTokens = None,
    time_limit: TimeLimit = None,
    sandbox: SandboxName = None,
    ask: Ask = None,
    yes: Yes = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Roll back the whole run; show its diff.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Let an agent work on a directory. Each call is committed or rolled back as a whole."""
    from weakincentives.cli.config import load_settings

    task = sys.stdin.read() if task == "-" else task
    if not task.strip():
        raise Misuse('the task is empty: wink run "..."')
    flags = _given(model, policy, max_turns, max_tokens, time_limit, sandbox, ask)
    return AgentRun(
        settings=load_settings(workspace, **flags),
        flags=flags,
        message=task,
        yes=yes,
        dry_run=dry_run,
        as_json=as_json,
        quiet=quiet,
    ).perform()


def resume(
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Which run; by default the last that has not finished.",
            autocompletion=complete_runs,
        ),
    ] = None,
    message: Annotated[
        str | None,
        typer.Argument(metavar="MESSAGE", help="What to tell the model; a finished run needs it."),
    ] = None,
    workspace: Workspace = Path(),
    model: Model = None,
    policy: Policy = None,
    max_turns: MaxTurns = None,
    max_tokens: MaxTokens = None,
    time_limit: TimeLimit = None,
    sandbox: SandboxName = None,
    ask: Ask = None,
    yes: Yes = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Resume a run that was interrupted, failed or killed, or continue one that has finished."""
    from weakincentives.cli.config import load_settings

    if run_id is not None and message is None and " " in run_id:
        run_id, message = None, run_id  # wink resume "and the docs"
    earlier = _run_to_resume(existing_directory(workspace), run_id, message)
    flags = dict(cast("Mapping[str, Any]", earlier.data.about.get("flags", {})))
    given = _given(model, policy, max_turns, max_tokens, time_limit, sandbox, ask)
    stored = [each for each in flags.get("policy", ()) if each not in given.get("policy", ())]
    for name in {"policy", "ask"} & given.keys():  # rules add up
        given[name] = [*flags.get(name, ()), *given[name]]
    flags |= given
    return AgentRun(
        settings=load_settings(workspace, stored=stored, **flags),
        flags=flags,
        message=message,
        yes=yes,
        as_json=as_json,
        quiet=quiet,
        earlier=earlier,
    ).perform()


def _given(
    model: str | None,
    policy: list[str] | None,
    max_turns: int | None,
    max_tokens: int | None,
    time_limit: float | None,
    sandbox: str | None,
    ask: list[str] | None,
) -> dict[str, Any]:
    flags = {
        "model": model and _absolute(model),
        "policy": [_absolute(each) for each in policy or ()] or None,
        "max_turns": max_turns,
        "max_tokens": max_tokens,
        "time_limit": time_limit,
        "sandbox": sandbox,
        "ask": ask or None,
    }
    return {name: value for name, value in flags.items() if value is not None}


def _absolute(named: str) -> str:
    """Return a model or rule with an absolute path: a run may be resumed from elsewhere."""
    kind, colon, file = named.partition(":")
    if kind in ("scripted", "local") and file:
        return f"{kind}{colon}{Path(file).expanduser().absolute()}"
    if named.endswith(".toml") and "=" not in named:
        return str(Path(named).expanduser().absolute())
    return named


def _run_to_resume(directory: Path, run_id: str | None, message: str | None) -> Run:
    """Return the named run, or the last that can be resumed."""
    from weakincentives.runtime import SavedSessionData
    from weakincentives.runtime.calls import runs_of

    finished: Run | None = None
    for run in reversed(runs_of(directory)) if run_id is None else [find_run(directory, run_id)]:
        try:
            SavedSessionData.read(run.path)  # to its end: a damaged one is not resumed
        except (OSError, SnapshotError) as error:
            if run_id is None and b"\n" not in run.path.read_bytes():
                continue  # killed at its start
            raise Misuse(f"{run.id} cannot be resumed: {error}") from error
        about = run.data.about
        if about.get("kind") != KIND or about.get("dry_run"):
            continue
        if message is not None or not run.has_ended:
            return run
        finished = finished or run
    if finished is not None:
        name = finished.id
        raise Misuse(f'{name} has finished; give a message to continue: wink resume {name} "..."')
    if run_id is not None:
        raise Misuse(f"{run_id} cannot be resumed: it is a dry run, or not a `wink run`")
    raise Misuse(f'there is no run to resume in {directory}; start one: wink run "..."')


# The run


@dataclass(kw_only=True)
class AgentRun:
    """A run, new or resumed, from its start to its result.

    It is also a policy, to see from inside each call what the call changes.
    """

    name = "report"

    settings: Settings
    flags: Mapping[str, Any]
    message: str | None
    yes: bool = False
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False
    earlier: Run | None = None
    watch: Callable[[Event], Event] | None = None
    """Sees every event first, and may replace it."""

    _view: View = field(init=False)
    _workbench: Workbench = field(init=False)
    _changed: dict[str, tuple[ChangedFile, ...]] = field(
        init=False, default_factory=dict[str, "tuple[ChangedFile, ...]"]
    )
    """What calls have changed, by id, until they commit or roll back."""

    def perform(self) -> int:
        """Run the agent and return the exit code."""
        from weakincentives.cli.trust import trust_of

        trust_of(self.settings.workspace).admit(self.settings)
        with _stopping() as stop:
            try:
                outcome = self._perform(stop)
            except KeyboardInterrupt:  # before the run began
                say("interrupted")
                outcome = "interrupted"
        return {"done": 0, "failed": 1, "interrupted": stop.exit_code}[outcome]

    def _perform(self, stop: _Stop) -> Outcome:
        from weakincentives.cli.models import cost_of, open_model
        from weakincentives.cli.view import open_view

        settings = self.settings
        turns = 0 if self.earlier is None else self.earlier.turns
        with (
            open_model(settings.model, turns=turns) as adapter,
            open_workspace(settings.workspace, unprotected=settings.policy.unprotect) as files,
            self._resumed() as saved,
            _trial(files) if self.dry_run else nullcontext(files) as work,
            open_view(as_json=self.as_json, quiet=self.quiet) as self._view,
        ):
            result = self._view.totals
            self._run(adapter, work, saved, stop)
            result.seconds = SYSTEM_CLOCK.monotonic() - self._view.began
            result.cost_usd = cost_of(settings.model, result.input_tokens, result.output_tokens)
            if self.dry_run:
                result.dry_run = True
                result.diff = "".join(each.text for each in work.diff_here())
            elif result.outcome != "done" and result.run:
                here = settings.workspace == Path.cwd()
                where = "" if here else f" -w {shlex.quote(str(settings.workspace))}"
                result.resume = f"wink resume {result.run}{where}"
            self._show(result)
        return result.outcome

    @contextmanager
    def _resumed(self) -> Generator[SavedSession | None]:
        """Yield the saved session of a resumed run; None for a new run."""
        from weakincentives.cli.workbench import load_types
        from weakincentives.runtime import SavedSession

        if self.earlier is None:
            yield None
            return
        load_types(self.settings)
        try:
            saved = SavedSession.open(self.earlier.path)
        except SessionInUse as error:
            raise Misuse(f"{self.earlier.id} is running in another process") from error
        with saved:
            yield saved

    def _run(
        self, adapter: Adapter, files: HostFilesystem, saved: SavedSession | None, stop: _Stop
    ) -> None:
        """Let the model work, and note the outcome."""
        from weakincentives.cli.question import Approver
        from weakincentives.cli.workbench import open_workbench
        from weakincentives.runtime import Session

        if saved is not None:
            saved.undo_unrecorded(files)
        with (
            open_workbench(
                self.settings,
                Session() if saved is None else saved.session,
                ask=Approver(self._view, yes=self.yes).ask,
                files=files,
                policies=[self, _OnlyReversible()] if self.dry_run else [self],
            ) as self._workbench,
            # Saved only now: whatever is wrong with the settings has been reported.
            self._new_session() if saved is None else nullcontext(saved) as session,
            _logged_to(session.path.with_suffix(".log")),
        ):
            result = self._view.totals
            try:
                try:
                    self._start(session.path.stem)
                    result.text = self._evaluate(adapter)
                    result.outcome = "done"
                except WinkError as error:
                    result.error = str(error)
                finally:
                    stop.is_over = True
            except KeyboardInterrupt:
                result.outcome = "interrupted"

    def _new_session(self) -> SavedSession:
        from weakincentives.runtime import SavedSession
        from weakincentives.runtime.calls import new_run

        about = {
            "kind": KIND,
            "task": self.message,
            "model": self.settings.model,
            "dry_run": self.dry_run,
            "flags": dict(self.flags),
        }
        run = new_run(self._workbench.filesystem.store)
        return SavedSession.create(run.path, self._workbench.session, about=about)

    def _start(self, run_id: str) -> None:
        from weakincentives.cli.view import RunStarted

        workbench, settings = self._workbench, self.settings
        self._view.totals.run = run_id
        notes = workbench.filesystem.recovered
        if settings.sandbox == "none" and workbench.shell is not None:
            notes = (*notes, "Commands run without a sandbox: they can do everything you can.")
        self._show(
            RunStarted(
                run=run_id,
                workspace=str(settings.workspace),
                model=str(settings.model),
                task=self.message or self._whole_task(),
                commands=workbench.sandbox,
                dry_run=self.dry_run,
                resumed=self.earlier is not None,
                notes=notes,
            )
        )

    def _whole_task(self) -> str:
        """Return the first message of a run; one that was killed early may not have sent it."""
        task = None if self.earlier is None else self.earlier.data.about.get("task")
        return "\n\n".join(str(each) for each in (task, self.message) if each)

    def _evaluate(self, adapter: Adapter) -> str:
        from weakincentives.adapters import Message, RunConfig
        from weakincentives.budget import Budget
        from weakincentives.runtime import ToolInvoked

        settings, session = self.settings, self._workbench.session
        most = settings.max_tokens
        config = RunConfig(
            max_turns=settings.max_turns,
            time_limit=settings.time_limit,
            budget=None if most is None else Budget(max_total_tokens=most),
            completion=self._workbench.completion,
        )
        has_begun = session[Message].latest() is not None
        unsubscribe = session.dispatcher.subscribe(ToolInvoked, self._call_ended)
        try:
            response = adapter.evaluate(
                self._workbench.prompt,
                session,
                message=self.message if has_begun else self._whole_task(),
                resume=has_begun,
                config=config,
                on_event=self._show,
            )
        finally:
            unsubscribe()
        return response.text

    # What is shown

    def _show(self, event: Event) -> None:
        self._view.show(event if self.watch is None else self.watch(event))

    def _call_ended(self, record: ToolInvoked) -> None:
        """Show how a call of the model ended; nested calls are not shown."""
        from weakincentives.cli.view import CallEnded
        from weakincentives.contrib.tools import Plan

        if record.call_id not in self._view.running:
            return
        call, _ = self._view.running[record.call_id]
        changed = self._changed.pop(record.call_id, ())
        self._show(
            CallEnded(
                record=record,
                arguments=call.params,
                rolled_back=record.ran
                and not record.success
                and record.tool_name not in self._workbench.readers,
                files=changed if record.success else (),
            )
        )
        plan = self._workbench.session[Plan].latest()
        if plan is not None and plan != self._view.plan:
            self._show(plan)

    def check(
        self, tool: Tool[Any, Any], params: object, *, context: ToolContext
    ) -> PolicyDecision:
        from weakincentives.prompt import PolicyDecision

        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: object, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        from weakincentives.cli.view import ChangedFile

        if tool.reach == "read":
            return
        files = cast("HostFilesystem", context.filesystem)
        paths = files.changed_here()
        if len(paths) > _MAX_COUNTED:
            changed = tuple(map(ChangedFile, paths))
        else:
            diffs = files.diff_here()
            changed = tuple(ChangedFile(each.path, each.added, each.removed) for each in diffs)
        self._changed[context.call_id] = changed


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
    from weakincentives.runtime import configure_logging

    # An abandoned thread may log after the end.
    logging.getLogger("weakincentives").addHandler(logging.NullHandler())
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as log:
        handler = configure_logging(logging.WARNING, stream=log)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)


# Stopping


@dataclass(slots=True)
class _Stop:
    """Which signal stopped the run, and when."""

    by: int = signal.SIGINT
    at: float | None = None
    is_over: bool = False
    """The run has ended: closing and showing its result must not be interrupted."""

    @property
    def exit_code(self) -> int:
        return 128 + self.by


@contextmanager
def _stopping() -> Generator[_Stop]:
    """Let the first signal stop the run at a clean point, and the next one at once."""
    stop = _Stop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def interrupt(number: int, frame: object) -> None:
        if stop.at is None:
            stop.at = SYSTEM_CLOCK.monotonic()
            if not stop.is_over:
                raise KeyboardInterrupt
        # `timeout` and `make` pass one signal on twice, within moments.
        if SYSTEM_CLOCK.monotonic() - stop.at > 0.3:
            _end_at_once(stop)

    def terminate(number: int, frame: object) -> None:
        if stop.at is None:
            stop.by = number
        for each in terminals:
            if not os.isatty(each):  # closed: writing to it would fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), each)
        # As SIGINT, which is held back in critical sections.
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)
    if before[signal.SIGHUP] is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, terminate)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            if stop.at is None:
                signal.signal(number, handler)
            elif number != signal.SIGINT:
                # A repeated signal must not cut the exit short; Python removes handlers before it
                # ends, so ignore it.
                signal.signal(number, signal.SIG_IGN)


def _end_at_once(stop: _Stop) -> NoReturn:
    """Exit like a kill: the next process to open the directory rolls back the current call."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h")  # the cursor, which the live view hides
    os.write(2, b"\nwink: stopped at once; the next wink command rolls back the current call\n")
    os._exit(stop.exit_code)
