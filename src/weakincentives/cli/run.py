"""`wink run` and `wink resume`: an agent on a real directory, from its first turn to its end."""

from __future__ import annotations

import getpass
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer

from weakincentives.cli.completion import complete_models, complete_runs, complete_tools
from weakincentives.cli.config import Settings, load_settings
from weakincentives.cli.misuse import Misuse
from weakincentives.cli.options import AsJson, Workspace
from weakincentives.cli.output import echo
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import SessionInUse, SnapshotError, WinkError

if TYPE_CHECKING:
    from weakincentives.cli.models import OpenedModel
    from weakincentives.cli.report import Report
    from weakincentives.cli.runs import RunFile
    from weakincentives.cli.view import RunResult, View
    from weakincentives.cli.workbench import Workbench
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.prompt import Tool
    from weakincentives.prompt.approval import Approval, ApprovalRequest
    from weakincentives.runtime import SavedSession, SavedSessionData

__all__ = ["register", "run_task"]

T = TypeVar("T")

KIND = "run"
"""What the files of runs say they are of, among those of other commands."""

_RUN_EXAMPLES = """
Examples:

  wink run "fix the failing test" --model openai:gpt-5-mini

  wink run "rename User to Account" -w ~/project --dry-run    # shows the diff, keeps nothing

  wink run "update the docs" --policy protect=src --ask shell_execute

  echo "tidy up" | wink run - --model local --json

Settings can stand in wink.toml in the directory, and in variables such as WINK_MODEL.
In the documentation: "The commands".
"""
_RESUME_EXAMPLES = """
Examples:

  wink resume                              # the last run that did not come to its end

  wink resume 20261116-0630                # this one; the beginning of its name is enough

  wink resume 20261116-0630 "and now the docs, too"

In the documentation: "The commands".
"""

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
    order = _Order(
        settings=load_settings(workspace, **flags),
        flags=flags,
        message=task,
        yes=yes,
        dry_run=dry_run,
        as_json=as_json,
        quiet=quiet,
    )
    return _perform(order)


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
    directory = load_settings(workspace).workspace
    earlier = _run_to_resume(directory, run_id, message)
    flags = dict(cast("Mapping[str, Any]", earlier.data.about.get("flags", {})))
    more = _given(
        model=_anywhere(model),
        max_turns=max_turns,
        max_tokens=max_tokens,
        time_limit=time_limit,
        sandbox=sandbox,
    )
    # Rules add up: what held for the run goes on to hold.
    rules_now = [_anywhere(each) for each in policy or ()]
    stored = [each for each in flags.get("policy", ()) if each not in rules_now]
    for name, rules in (("policy", rules_now), ("ask", ask)):
        if rules:
            more[name] = [*flags.get(name, ()), *rules]
    flags |= more
    order = _Order(
        settings=load_settings(workspace, stored=stored, **flags),
        flags=flags,
        message=message,
        yes=yes,
        as_json=as_json,
        quiet=quiet,
        earlier=earlier,
    )
    return _perform(order)


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


# Which run to take up


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A run that is taken up."""

    run: RunFile
    data: SavedSessionData

    @property
    def has_ended(self) -> bool:
        """Whether the model came to its end, and nobody has spoken to it since."""
        from weakincentives.runtime import PromptExecuted
        from weakincentives.runtime.conversation import Message

        executed, said = self._last(PromptExecuted), self._last(Message)
        is_over = executed is not None and executed.stop_reason in _ENDS
        return is_over and said is not None and said.role == "model"

    @property
    def turns(self) -> int:
        """How often the model has spoken."""
        from weakincentives.runtime.conversation import Message
        from weakincentives.runtime.session import type_name
        from weakincentives.serde import thaw

        said: list[Message] = [thaw(each) for each in self.data.log.get(type_name(Message), ())]
        return sum(1 for each in said if each.role == "model" and each.depth == 0)

    def _last(self, kind: type[T]) -> T | None:
        from weakincentives.runtime.session import type_name
        from weakincentives.serde import thaw

        values = self.data.log.get(type_name(kind))
        return thaw(values[-1]) if values else None


_ENDS = ("end_turn", "max_tokens", "refusal")


def _run_to_resume(directory: Path, run_id: str | None, message: str | None) -> _Earlier:
    """Return the run that is meant: the named one, else the last that can go on."""
    from weakincentives.cli.runs import find_run, runs_of

    runs = reversed(runs_of(directory)) if run_id is None else [find_run(directory, run_id)]
    ended: _Earlier | None = None
    for each in runs:
        if run_id is not None or b"\n" in each.path.read_bytes():  # else it was killed at once
            _check_readable(each)
        earlier = _earlier(each)
        if earlier is None:
            continue
        if message is not None or not earlier.has_ended:
            return earlier
        ended = ended or earlier
    if ended is not None:
        raise Misuse(
            f'{ended.run.id} came to its end; say what to do next: wink resume {ended.run.id} "..."'
        )
    if run_id is not None:
        raise Misuse(f"{run_id} cannot be resumed: it is a dry run, or not of `wink run`")
    raise Misuse(f'there is no run in {directory} to resume; begin one: wink run "..."')


def _check_readable(run: RunFile) -> None:
    """Say why a run that somebody named cannot go on, if its file is damaged or not ours."""
    try:
        run.read()
    except (OSError, SnapshotError) as error:
        raise Misuse(f"{run.id} cannot be resumed: {error}") from error


def _earlier(run: RunFile) -> _Earlier | None:
    """Return what a run's file holds; None for one that cannot go on."""
    try:
        data = run.read()
    except (OSError, SnapshotError):
        return None
    about = data.about
    can_go_on = about.get("kind") == KIND and not about.get("dry_run")
    return _Earlier(run, data) if can_go_on else None


# From the first turn to the end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What the person wants."""

    settings: Settings
    flags: Mapping[str, Any]
    message: str | None
    yes: bool = False
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False
    earlier: _Earlier | None = None

    @property
    def task(self) -> str:
        """What the run is for. One that was stopped before its first turn has not been told."""
        task = None if self.earlier is None else self.earlier.data.about.get("task")
        return "\n\n".join(str(each) for each in (task, self.message) if each)


def run_task(task: str, workspace: Path, *, watch: Callable[[View], View], **flags: object) -> int:
    """Run a task as `wink run` does; ``watch`` makes, of the view, one that hears of it, too."""
    given = _given(**flags)
    order = _Order(settings=load_settings(workspace, **given), flags=given, message=task)
    return _perform(order, watch)


def _perform(order: _Order, watch: Callable[[View], View] = lambda view: view) -> int:
    """Run the agent and return the exit code."""
    from weakincentives.cli.workbench import admit_code

    admit_code(order.settings)
    with _stopping() as stop:
        try:
            outcome = _performed(order, watch, stop)
        except KeyboardInterrupt:  # before there was anything to go on with
            echo("wink: interrupted", err=True)
            outcome = "interrupted"
    return {"done": 0, "failed": 1, "interrupted": stop.exit_code}[outcome]


def _performed(order: _Order, watch: Callable[[View], View], stop: _Stop) -> str:
    """Run the agent, show what came of it, and return how it ended."""
    from weakincentives.cli.models import open_model
    from weakincentives.cli.view import open_view
    from weakincentives.cli.workbench import open_workspace

    settings, earlier = order.settings, order.earlier
    turns = 0 if earlier is None else earlier.turns
    with (
        open_model(settings.model, turns=turns) as model,
        open_workspace(settings.workspace, unprotected=settings.policy.unprotect) as files,
        _taken_up(order) as saved,
        _trial(files) if order.dry_run else nullcontext(files) as work,
        open_view(as_json=order.as_json, quiet=order.quiet) as opened,
    ):
        view = watch(opened)
        result = _agent(order, model, work, saved, view, stop)
        if order.dry_run:
            result = replace(result, diff="".join(each.text for each in work.diff_here()))
        view.show(result)
    return result.outcome


@contextmanager
def _taken_up(order: _Order) -> Generator[SavedSession | None]:
    """Yield the session of the run that is taken up, if one is."""
    from weakincentives.cli.workbench import load_types
    from weakincentives.runtime import SavedSession

    if order.earlier is None:
        yield None
        return
    load_types(order.settings)
    try:
        saved = SavedSession.open(order.earlier.run.path)
    except SessionInUse as error:
        raise Misuse(f"{order.earlier.run.id} is under way in another process") from error
    with saved:
        yield saved


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


def _agent(
    order: _Order,
    model: OpenedModel,
    files: HostFilesystem,
    saved: SavedSession | None,
    view: View,
    stop: _Stop,
) -> RunResult:
    """Let the model work, and return how that ended."""
    from weakincentives.cli.report import Report
    from weakincentives.cli.workbench import open_workbench
    from weakincentives.runtime import Session

    session = Session() if saved is None else saved.session
    if saved is not None:
        saved.take_back_unrecorded(files)
    report = Report(
        view,
        task=order.message or order.task,
        dry_run=order.dry_run,
        resumed=order.earlier is not None,
        price=model.price,
    )
    approver = _Approver(view, yes=order.yes)
    policies = [report, *([_OnlyWhatCanBeUndone()] if order.dry_run else [])]
    with (
        open_workbench(
            order.settings, session, ask=approver.ask, files=files, policies=policies
        ) as workbench,
        # Begun once nothing can be wrong any more with what was asked for.
        _begun(order, workbench) if saved is None else nullcontext(saved) as kept,
        _logged_to(kept.path.with_suffix(".log")),
    ):
        try:
            try:
                report.begin(kept.path.stem, workbench)
                return report.result("done", text=_evaluate(order, model, workbench, report))
            except WinkError as error:
                return report.result("failed", error=str(error))
            finally:
                stop.is_over = True
        except KeyboardInterrupt:
            return report.result("interrupted")


def _begun(order: _Order, workbench: Workbench) -> SavedSession:
    """Keep the session of a run that begins in a file of the workspace."""
    from weakincentives.cli.runs import new_run
    from weakincentives.runtime import SavedSession

    about = {
        "kind": KIND,
        "task": order.message,
        "model": order.settings.model,
        "dry_run": order.dry_run,
        "flags": dict(order.flags),
    }
    run = new_run(workbench.filesystem.store)
    return SavedSession.create(run.path, workbench.session, about=about)


def _evaluate(order: _Order, model: OpenedModel, workbench: Workbench, report: Report) -> str:
    from weakincentives.adapters import Message, RunConfig
    from weakincentives.budget import Budget
    from weakincentives.runtime import ToolInvoked

    settings, session = order.settings, workbench.session
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
            message=order.message if has_begun else order.task,
            resume=has_begun,
            config=config,
            on_event=report.hear,
        )
    finally:
        ignore()
    return response.text


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


# Asking


class _Approver:
    """Asks the person at the terminal."""

    def __init__(self, view: View, *, yes: bool) -> None:
        self._view = view
        self._yes = yes
        self._always: set[str] = set()

    def ask(self, request: ApprovalRequest) -> Approval:
        from weakincentives.prompt import Approval

        if self._yes:
            return Approval(True, by="--yes")
        if request.tool_name in self._always:
            return Approval(True, by=_person(), reason="always")
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return Approval(False, reason="nobody is at the terminal to be asked")
        try:
            said = self._said(request)
        except EOFError:
            return Approval(False, reason="the question was not answered")
        if said == "a":
            self._always.add(request.tool_name)
        return Approval(said != "n", by=_person(), reason="always" if said == "a" else "")

    def _said(self, request: ApprovalRequest) -> str:
        """Return the person's answer; where not everything was shown, they may ask for it."""
        from weakincentives.cli.question import question

        head = f"{request.tool_name} wants to run; {_REACHES[request.reach]}."
        answers = {"y": "yes", "n": "no", "a": "always"}
        width, height = os.get_terminal_size(sys.stderr.fileno())
        asked = question(head, request.arguments, width=width, height=height)
        more = {"v": "view all"} if asked.hidden else {}
        said = self._view.ask(asked.lines, answers | more)
        if said != "v":
            return said
        asked = question(head, request.arguments, width=width, height=None)
        return self._view.ask(asked.lines, answers)


_REACHES = {
    "read": "it changes nothing",
    "reversible": "what it does can be undone",
    "compensable": "it reaches outside of the directory, and takes that back when it fails",
    "irreversible": "it reaches outside of the directory, and that cannot be undone",
    None: "what it does outside of the directory cannot be undone",
}


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "the person at the terminal"


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
