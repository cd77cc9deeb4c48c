"""`wink run` and `wink resume`: an agent on a real directory, from its first turn to its end."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast

import typer

from weakincentives.cli.common import (
    AsJson,
    Misuse,
    Workspace,
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
    from weakincentives.cli.config import Settings
    from weakincentives.cli.models import OpenedModel, Price
    from weakincentives.cli.view import ChangedFile, Event, RunResult, View
    from weakincentives.cli.workbench import Workbench
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.prompt import PolicyDecision, Tool, ToolContext, ToolResult
    from weakincentives.runtime import SavedSession, Session, ToolInvoked
    from weakincentives.runtime.calls import Run

KIND = "run"
"""What the files of runs say they are of, among those of other commands."""

_RUN_EXAMPLES = examples(
    'wink run "fix the failing test" --model openai:gpt-5-mini',
    'wink run "rename User to Account" -w ~/project --dry-run    # shows the diff, keeps nothing',
    'wink run "update the docs" --policy protect=src --ask shell_execute',
    'echo "tidy up" | wink run - --model local --json',
    more="Settings can stand in wink.toml in the directory, and in variables such as WINK_MODEL.\n"
    'In the documentation: "The commands".',
)
_RESUME_EXAMPLES = examples(
    "wink resume                              # the last run that did not come to its end",
    "wink resume 20261116-0630                # this one; the beginning of its name is enough",
    'wink resume 20261116-0630 "and now the docs, too"',
    more='In the documentation: "The commands".',
)

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="openai:NAME, openai-responses:NAME, litellm:PROVIDER/NAME, claude[:NAME], "
        "local[:FILE] or scripted:FILE.",
        autocompletion=complete_models,
    ),
]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="One more rule: protect=GLOB, deny=TOOL, quota=TOOL:N, a .toml file, or "
        "module:object. Repeat it for more.",
    ),
]
MaxTurns = Annotated[int | None, typer.Option(help="How many turns the model may have.")]
MaxTokens = Annotated[int | None, typer.Option(help="How many tokens it may use.")]
TimeLimit = Annotated[float | None, typer.Option(help="How many seconds it may take.")]
SandboxName = Annotated[
    str | None,
    typer.Option(help="What commands run in: auto, podman, bubblewrap, namespaces or none."),
]
Ask = Annotated[
    list[str] | None,
    typer.Option(
        "--ask",
        help="Ask before calls of this tool, or of this reach. Repeat it for more.",
        autocompletion=complete_tools,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Approve all that would be asked.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer only.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("run", epilog=_RUN_EXAMPLES)(run)
    app.command("resume", epilog=_RESUME_EXAMPLES)(resume)


def run(
    task: Annotated[str, typer.Argument(help="What to do; - reads it from standard input.")],
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
        bool, typer.Option("--dry-run", help="Roll the whole run back at the end; show its diff.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Let an agent work on a directory. Every call it makes is kept as a whole, or undone."""
    from weakincentives.cli.config import load_settings

    task = sys.stdin.read() if task == "-" else task
    if not task.strip():
        raise Misuse('what is to be done? The task is empty: wink run "..."')
    flags = _given(
        model=_anywhere(model),
        policy=[_anywhere(each) for each in policy or ()] or None,
        max_turns=max_turns,
        max_tokens=max_tokens,
        time_limit=time_limit,
        sandbox=sandbox,
        ask=ask or None,
    )
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
            help="Which run; the last that did not come to its end.",
            autocompletion=complete_runs,
        ),
    ] = None,
    message: Annotated[
        str | None, typer.Argument(help="What to say to the model; a run that ended needs it.")
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
    """Go on with a run: one that was interrupted, stopped, killed, or that ended."""
    if run_id is not None and message is None and " " in run_id:
        run_id, message = None, run_id  # wink resume "and the docs, too"
    from weakincentives.cli.config import load_settings

    earlier = _run_to_resume(existing_directory(workspace), run_id, message)
    flags = dict(cast("Mapping[str, Any]", earlier.data.about.get("flags", {})))
    # Rules add up: what held for the run goes on to hold.
    rules = [_anywhere(each) for each in policy or ()]
    stored = [each for each in flags.get("policy", ()) if each not in rules]
    flags |= _given(
        model=_anywhere(model),
        policy=[*flags.get("policy", ()), *rules] or None,
        max_turns=max_turns,
        max_tokens=max_tokens,
        time_limit=time_limit,
        sandbox=sandbox,
        ask=[*flags.get("ask", ()), *(ask or ())] or None,
    )
    return AgentRun(
        settings=load_settings(workspace, stored=stored, **flags),
        flags=flags,
        message=message,
        yes=yes,
        as_json=as_json,
        quiet=quiet,
        earlier=earlier,
    ).perform()


def _given(**flags: object) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _anywhere(named: str | None) -> str | None:
    """Return what names a file so that it is found from any directory: a run may be resumed."""
    if named is None:
        return None
    kind, colon, file = named.partition(":")
    if kind in ("scripted", "local") and file:
        return f"{kind}{colon}{Path(file).expanduser().absolute()}"
    if named.endswith(".toml") and "=" not in named:
        return str(Path(named).expanduser().absolute())
    return named


# Which run to resume


def _run_to_resume(directory: Path, run_id: str | None, message: str | None) -> Run:
    """Return the run that is meant: the named one, else the last that can go on."""
    from weakincentives.runtime import SavedSessionData
    from weakincentives.runtime.calls import runs_of

    ended: Run | None = None
    for run in reversed(runs_of(directory)) if run_id is None else [find_run(directory, run_id)]:
        try:
            SavedSessionData.read(run.path)  # to its end: nothing goes on from a damaged one
        except (OSError, SnapshotError) as error:
            if run_id is None and b"\n" not in run.path.read_bytes():
                continue  # it was killed at once
            raise Misuse(f"{run.id} cannot be resumed: {error}") from error
        about = run.data.about
        if about.get("kind") != KIND or about.get("dry_run"):
            continue
        if message is not None or not run.has_ended:
            return run
        ended = ended or run
    if ended is not None:
        raise Misuse(
            f'{ended.id} came to its end; say what to do next: wink resume {ended.id} "..."'
        )
    if run_id is not None:
        raise Misuse(f"{run_id} cannot be resumed: it is a dry run, or not of `wink run`")
    raise Misuse(f'there is no run in {directory} to resume; begin one: wink run "..."')


# From the first turn to the end


@dataclass(frozen=True, kw_only=True)
class AgentRun:
    """A run that the person asks for: a new one, or one that goes on."""

    settings: Settings
    flags: Mapping[str, Any]
    message: str | None
    yes: bool = False
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False
    earlier: Run | None = None
    watch: Callable[[Event], Event] | None = None
    """Hears of every event before it is shown, and may say more."""

    @property
    def task(self) -> str:
        """What the run is for. One that was stopped before its first turn has not been told."""
        task = None if self.earlier is None else self.earlier.data.about.get("task")
        return "\n\n".join(str(each) for each in (task, self.message) if each)

    def perform(self) -> int:
        """Run the agent and return the exit code."""
        from weakincentives.cli.workbench import admit_code

        admit_code(self.settings)
        with _stopping() as stop:
            try:
                outcome = self._performed(stop)
            except KeyboardInterrupt:  # before there was anything to go on with
                say("interrupted")
                outcome = "interrupted"
        return {"done": 0, "failed": 1, "interrupted": stop.exit_code}[outcome]

    def _performed(self, stop: _Stop) -> str:
        """Run the agent, show what came of it, and return how it ended."""
        from weakincentives.cli.models import open_model
        from weakincentives.cli.view import open_view

        settings = self.settings
        turns = 0 if self.earlier is None else self.earlier.turns
        with (
            open_model(settings.model, turns=turns) as model,
            open_workspace(settings.workspace, unprotected=settings.policy.unprotect) as files,
            self._saved() as saved,
            _trial(files) if self.dry_run else nullcontext(files) as work,
            open_view(as_json=self.as_json, quiet=self.quiet) as view,
        ):
            report = _Report(self, view, model.price)
            result = self._agent(model, work, saved, report, stop)
            if self.dry_run:
                result = replace(result, diff="".join(each.text for each in work.diff_here()))
            report.show(result)
        return result.outcome

    @contextmanager
    def _saved(self) -> Generator[SavedSession | None]:
        """Yield the session of the run that goes on, if one does."""
        from weakincentives.cli.workbench import load_types
        from weakincentives.runtime import SavedSession

        if self.earlier is None:
            yield None
            return
        load_types(self.settings)
        try:
            saved = SavedSession.open(self.earlier.path)
        except SessionInUse as error:
            raise Misuse(f"{self.earlier.id} is under way in another process") from error
        with saved:
            yield saved

    def _agent(
        self,
        model: OpenedModel,
        files: HostFilesystem,
        saved: SavedSession | None,
        report: _Report,
        stop: _Stop,
    ) -> RunResult:
        """Let the model work, and return how that ended."""
        from weakincentives.cli.question import Approver
        from weakincentives.cli.workbench import open_workbench
        from weakincentives.runtime import Session

        session = Session() if saved is None else saved.session
        if saved is not None:
            saved.take_back_unrecorded(files)
        ask = Approver(report.view, yes=self.yes).ask
        policies = [report, *([_OnlyWhatCanBeUndone()] if self.dry_run else [])]
        with (
            open_workbench(
                self.settings, session, ask=ask, files=files, policies=policies
            ) as workbench,
            # Begun once nothing can be wrong any more with what was asked for.
            self._begun(workbench) if saved is None else nullcontext(saved) as kept,
            _logged_to(kept.path.with_suffix(".log")),
        ):
            try:
                try:
                    report.begin(kept.path.stem, workbench)
                    return report.result("done", text=self._evaluate(model, workbench, report))
                except WinkError as error:
                    return report.result("failed", error=str(error))
                finally:
                    stop.is_over = True
            except KeyboardInterrupt:
                return report.result("interrupted")

    def _begun(self, workbench: Workbench) -> SavedSession:
        """Keep the session of a run that begins in a file of the workspace."""
        from weakincentives.runtime import SavedSession
        from weakincentives.runtime.calls import new_run

        about = {
            "kind": KIND,
            "task": self.message,
            "model": self.settings.model,
            "dry_run": self.dry_run,
            "flags": dict(self.flags),
        }
        run = new_run(workbench.filesystem.store)
        return SavedSession.create(run.path, workbench.session, about=about)

    def _evaluate(self, model: OpenedModel, workbench: Workbench, report: _Report) -> str:
        from weakincentives.adapters import Message, RunConfig
        from weakincentives.budget import Budget
        from weakincentives.runtime import ToolInvoked

        settings, session = self.settings, workbench.session
        most = settings.max_tokens
        config = RunConfig(
            max_turns=settings.max_turns,
            time_limit=settings.time_limit,
            budget=None if most is None else Budget(max_total_tokens=most),
            completion=workbench.completion,
        )
        has_begun = session[Message].latest() is not None
        ignore = session.dispatcher.subscribe(ToolInvoked, report.call_ended)
        try:
            response = model.adapter.evaluate(
                workbench.prompt,
                session,
                message=self.message if has_begun else self.task,
                resume=has_begun,
                config=config,
                on_event=report.show,
            )
        finally:
            ignore()
        return response.text


@contextmanager
def _trial(files: HostFilesystem) -> Generator[HostFilesystem]:
    """Yield a view of the workspace that is undone in the end; after a kill, by who opens it next.

    All calls are savepoints in one transaction that is never committed.
    """
    view = files.fork_in_place()
    try:
        yield view
    finally:
        files.discard(view)


@contextmanager
def _logged_to(path: Path) -> Generator[None]:
    """Put what the library has to say beside the session: a terminal is for the person's run."""
    from weakincentives.runtime import configure_logging

    # A thread that was left behind may have something to say after the end: to nobody.
    logging.getLogger("weakincentives").addHandler(logging.NullHandler())
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as log:
        handler = configure_logging(logging.WARNING, stream=log)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)


# What is told of it


class _Report:
    """Shows a run as it goes; also a policy, to see what each call changes."""

    name = "report"

    def __init__(self, run: AgentRun, view: View, price: Price | None) -> None:
        self.view = view
        self._run = run
        self._price = price
        self._id = ""
        self._session: Session | None = None
        self._readers: set[str] = set()
        """Tools that change nothing, so that nothing of theirs is rolled back."""
        self._changed: dict[str, tuple[ChangedFile, ...]] = {}
        """What calls have changed, by id, while it is not known whether that is kept."""

    def show(self, event: Event) -> None:
        self.view.show(event if self._run.watch is None else self._run.watch(event))

    def begin(self, run_id: str, workbench: Workbench) -> None:
        """Show that a run begins, and on what."""
        from weakincentives.cli.view import RunStarted

        self._id, self._session = run_id, workbench.session
        self._readers = {tool.name for tool in workbench.tools if tool.reach == "read"}
        settings = workbench.settings
        notes = workbench.filesystem.recovered
        if settings.sandbox == "none" and workbench.shell is not None:
            notes = (*notes, "Commands run without a sandbox: they can do all that you can.")
        self.show(
            RunStarted(
                run=run_id,
                workspace=str(settings.workspace),
                model=str(settings.model),
                task=self._run.message or self._run.task,
                commands=workbench.sandbox,
                dry_run=self._run.dry_run,
                resumed=self._run.earlier is not None,
                notes=notes,
            )
        )

    def call_ended(self, record: ToolInvoked) -> None:
        """Show how a call of the model's has ended; those nested in it are its own affair."""
        from weakincentives.cli.view import CallEnded
        from weakincentives.contrib.tools import Plan

        progress = self.view.progress
        if record.call_id not in progress.under_way:
            return
        call, _ = progress.under_way[record.call_id]
        changed = self._changed.pop(record.call_id, ())
        self.show(
            CallEnded(
                record=record,
                arguments=call.params,
                rolled_back=record.ran
                and not record.success
                and record.tool_name not in self._readers,
                files=changed if record.success else (),
            )
        )
        assert self._session is not None
        plan = self._session[Plan].latest()
        if plan is not None and plan != progress.plan:
            self.show(plan)

    def check(
        self, tool: Tool[Any, Any], params: object, *, context: ToolContext
    ) -> PolicyDecision:
        from weakincentives.prompt import PolicyDecision

        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: object, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        """Note what a call changes, seen from inside of it."""
        if tool.reach != "read":
            self._changed[context.call_id] = _changes(cast("HostFilesystem", context.filesystem))

    def result(
        self, outcome: Literal["done", "failed", "interrupted"], *, text: str = "", error: str = ""
    ) -> RunResult:
        """Return how the run ended, to be shown last."""
        from weakincentives.cli.view import RunResult

        progress, dry_run = self.view.progress, self._run.dry_run
        return RunResult(
            run=self._id,
            outcome=outcome,
            text=text,
            error=error,
            turns=progress.turn,
            calls=progress.calls,
            rolled_back=progress.rolled_back,
            denied=progress.denied,
            files=tuple(progress.files[path] for path in sorted(progress.files)),
            input_tokens=progress.usage.input_tokens,
            output_tokens=progress.usage.output_tokens,
            cost_usd=None if self._price is None else self._price(progress.usage),
            seconds=SYSTEM_CLOCK.monotonic() - progress.began,
            dry_run=dry_run,
            resume=None if outcome == "done" or dry_run else self._resume_with(),
        )

    def _resume_with(self) -> str | None:
        if not self._id:  # it was stopped before it began
            return None
        workspace = self._run.settings.workspace
        where = "" if workspace == Path.cwd() else f" -w {shlex.quote(str(workspace))}"
        return f"wink resume {self._id}{where}"


_MAX_COUNTED = 100
"""Files whose lines are counted; of more, only the names are told."""


def _changes(files: HostFilesystem) -> tuple[ChangedFile, ...]:
    """Return what a call has changed so far, with how many lines came and went."""
    from weakincentives.cli.view import ChangedFile

    paths = files.changed_here()
    if len(paths) > _MAX_COUNTED:
        return tuple(map(ChangedFile, paths))
    return tuple(ChangedFile(each.path, each.added, each.removed) for each in files.diff_here())


class _OnlyWhatCanBeUndone:
    """Refuses, in a dry run, what would stay."""

    name = "dry_run"

    def applies_to(self, tool: Tool[Any, Any]) -> bool:
        return tool.reach not in ("read", "reversible")

    def check(self, tool_name: str, params: object, context: object) -> str | None:
        return (
            f"This is a dry run, and what '{tool_name}' does outside of the workspace could not be "
            "undone. Go on as far as you can without it"
        )


# Stopping


@dataclass(slots=True)
class _Stop:
    """How the person stopped the run, and when."""

    by: int = signal.SIGINT
    at: float | None = None
    is_over: bool = False
    """Whether the run has ended: what is left is closed and shown, which a signal must not cut."""

    @property
    def exit_code(self) -> int:
        return 128 + self.by


@contextmanager
def _stopping() -> Generator[_Stop]:
    """Let the first Ctrl-C stop the run at a clean point, and the next one at once.

    As Ctrl-C counts that the program is told to end, or that its terminal is closed.
    """
    stop = _Stop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def interrupt(number: int, frame: object) -> None:
        if stop.at is None:
            stop.at = SYSTEM_CLOCK.monotonic()
            if not stop.is_over:
                raise KeyboardInterrupt
        # `timeout`, `make` and others pass one signal on twice; a person takes longer than that.
        if SYSTEM_CLOCK.monotonic() - stop.at > _TWICE:
            _end_at_once(stop)

    def terminate(number: int, frame: object) -> None:
        if stop.at is None:
            stop.by = number
        for each in terminals:
            if not os.isatty(each):  # it is closed, and to write to it would be an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), each)
        # As Ctrl-C: that is held back where something must not be cut in two.
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)
    if before[signal.SIGHUP] is not signal.SIG_IGN:  # else it is to go on: nohup
        signal.signal(signal.SIGHUP, terminate)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            if stop.at is None:
                signal.signal(number, handler)
            elif number != signal.SIGINT:
                # On its way out, which a signal that comes twice must not cut short. Not handled:
                # Python takes its handlers away before it ends.
                signal.signal(number, signal.SIG_IGN)


_TWICE = 0.3
"""Seconds within which a second signal is taken for the first."""


def _end_at_once(stop: _Stop) -> NoReturn:
    """End as a kill would: whoever opens the directory next undoes the call under way."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h")  # the cursor, which the live view hides
    os.write(2, b"\nwink: ended at once; the call under way is undone by the next wink command\n")
    os._exit(stop.exit_code)
