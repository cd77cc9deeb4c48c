"""`wink run`, `resume`, `chat` and `send`: an agent on a real directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from weakincentives.cli.common import Misuse, echo, examples, existing_directory, find_run, text_of
from weakincentives.cli.options import (
    AsJson,
    AskElsewhere,
    Attach,
    BranchName,
    InPlace,
    NoMerge,
    Quiet,
    RunSettings,
    Task,
    Temperature,
    Workspace,
    Yes,
    run_argument,
)
from weakincentives.cli.saved_runs import KIND, inbox_of, with_flags_of
from weakincentives.errors import SessionError, SnapshotError

if TYPE_CHECKING:
    from weakincentives.core.media import Media
    from weakincentives.runtime.calls import Run


@examples(
    'wink run "fix the failing test" --model openai:gpt-5-mini',
    'wink run "rename User to Account" -w ~/project --dry-run   # only shows the diff',
    'wink run "update the docs" --policy protect=src --ask shell_execute',
    'wink run "move the modules" --in-place                     # no other agent meanwhile',
    'echo "tidy up" | wink run - --model local --json',
    'wink run "fix the bug" --attempts 4 --judge "pytest -q"   # merges the best',
    'wink run "try the new parser" --branch parser --no-merge   # leaves the directory alone',
    more="Settings can also be in wink.toml in the directory, or in variables such as WINK_MODEL.",
)
def run(
    task: Task,
    workspace: Workspace = Path(),
    *,
    settings: RunSettings,
    attach: Attach = None,
    yes: Yes = False,
    ask_elsewhere: AskElsewhere = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Roll back the whole run; show its diff.")
    ] = False,
    attempts: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Try N times at once, each on a branch; merge the best."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run in each attempt; it passes with exit code 0."),
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="A,B", help="Models that the attempts use in turn.")
    ] = None,
    temperature: Temperature = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many attempts are made at a time.")
    ] = 4,
    branch: BranchName = None,
    no_merge: NoMerge = False,
    in_place: InPlace = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Let an agent work on a directory.

    Each call is committed or rolled back as a whole.
    """
    from weakincentives.cli.config import load_settings

    if in_place and (branch or no_merge):
        raise Misuse("name only one of --in-place and --branch or --no-merge")
    task = text_of(task, 'the task is empty: wink run "..."')
    flags = settings.given()
    if attempts is not None:
        from weakincentives.cli.attempts import Attempts
        from weakincentives.runtime.forks import absolute

        if not judge or dry_run or in_place:
            raise Misuse(
                "--attempts needs --judge COMMAND, and goes with neither --dry-run nor --in-place"
            )
        _attached(attach)  # refuse what cannot be attached, before anything
        return Attempts(
            settings=load_settings(workspace, **flags),
            flags=flags,
            more=[
                *(["--yes"] if yes else ()),
                *(["--ask-elsewhere"] if ask_elsewhere else ()),
                *(f"--attach={each}" for each in attach or ()),
            ],
            task=task,
            judge=judge,
            count=attempts,
            models=[absolute(each) for each in _listed(models)],
            temperatures=[
                cast("float", load_settings(workspace, temperature=each).temperature)
                for each in _listed(temperature)
            ],
            name="" if branch in (None, "-") else branch,
            jobs=jobs,
            merge=not no_merge,
            as_json=as_json,
            quiet=quiet,
        ).perform()
    if judge is not None or models is not None:
        raise Misuse("--judge and --models need --attempts N")
    from weakincentives.cli.agent import AgentRun

    flags |= {} if temperature is None else {"temperature": temperature}
    return AgentRun(
        settings=load_settings(workspace, **flags),
        flags=flags,
        message=task,
        yes=yes,
        ask_elsewhere=ask_elsewhere,
        dry_run=dry_run,
        branch=branch or ("-" if no_merge else None),
        no_merge=no_merge,
        in_place=in_place,
        as_json=as_json,
        quiet=quiet,
        attached=_attached(attach),
    ).perform()


def _listed(text: str | None) -> list[str]:
    return [each for each in (text or "").split(",") if each]


def _attached(paths: list[Path] | None) -> Sequence[Media]:
    from weakincentives.core.media import Media

    try:
        return [Media.from_file(path) for path in paths or ()]
    except (OSError, ValueError) as error:
        raise Misuse(f"--attach: {error}") from error


@examples(
    "wink resume                              # the last run that has not finished",
    "wink resume 20261116-0630                # this one; a prefix of the id is enough",
    'wink resume 20261116-0630 "now the docs"',
    'wink resume "now the docs"               # the last one; a message has a space, an id has not',
)
def resume(
    run_id: Annotated[
        str | None, run_argument("Which run; by default the last that has not finished.")
    ] = None,
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="MESSAGE", help="What to tell the model; required for a finished run."
        ),
    ] = None,
    workspace: Workspace = Path(),
    *,
    settings: RunSettings,
    attach: Attach = None,
    yes: Yes = False,
    ask_elsewhere: AskElsewhere = False,
    in_place: InPlace = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Resume an interrupted run, or continue a finished one."""
    from weakincentives.cli.config import load_settings

    if run_id is not None and message is None and " " in run_id:
        run_id, message = None, run_id  # wink resume "and the docs"
    earlier = _run_to_resume(existing_directory(workspace), run_id, message)
    flags, stored = with_flags_of(earlier, settings.given())
    from weakincentives.cli.agent import AgentRun

    return AgentRun(
        settings=load_settings(workspace, stored=stored, **flags),
        flags=flags,
        message=message,
        yes=yes,
        ask_elsewhere=ask_elsewhere,
        in_place=in_place,
        as_json=as_json,
        quiet=quiet,
        attached=_attached(attach),
        no_merge=bool(earlier.data.about.get("no_merge")),
        earlier=earlier,
    ).perform()


@examples(
    "wink chat --model openai:gpt-5-mini",
    "wink chat --resume                       # the last chat or run on this directory",
    "wink chat --resume k3f -w ~/project",
    "wink chat --branch parser                # the directory changes when you type /merge",
    "printf 'fix the test\\n/diff\\n' | wink chat -m openai:gpt-5-mini",
)
def chat(
    run_id: Annotated[
        str | None, run_argument("With --resume: which chat or run; by default the last.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", "-r", help="Continue a chat, or a run.")
    ] = False,
    workspace: Workspace = Path(),
    *,
    settings: RunSettings,
    yes: Yes = False,
    branch: BranchName = None,
    in_place: InPlace = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Talk with an agent that works on a directory.

    Type /help for the commands.
    """
    from weakincentives.cli.chat import Chat
    from weakincentives.cli.config import load_settings

    flags, earlier, stored = settings.given(), None, list[str]()
    if resume:
        earlier = _run_to_resume(existing_directory(workspace), run_id, "")
        flags, stored = with_flags_of(earlier, flags)
    elif run_id is not None:
        raise Misuse(f"to continue a chat or a run: wink chat --resume {run_id}")
    return Chat(
        settings=load_settings(workspace, stored=stored, **flags),
        flags=flags,
        message=None,
        yes=yes,
        branch=branch,
        no_merge=True,  # /merge does it
        in_place=in_place,
        as_json=as_json,
        quiet=quiet,
        earlier=earlier,
    ).perform()


@examples(
    'wink send "use pytest, not unittest"     # to the run in progress on this directory',
    'wink send k3f "leave the docs" -w ~/project',
    "git diff | wink send -",
)
def send(
    run_id: Annotated[
        str | None, run_argument("Which run; by default the one in progress.")
    ] = None,
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="MESSAGE",
            help="What to say; - reads it from standard input.",
            show_default=False,
        ),
    ] = None,
    workspace: Workspace = Path(),
) -> None:
    """Send a message to a run in progress.

    The model reads it before its next turn.
    """
    from weakincentives.runtime import Inbox, SavedSession
    from weakincentives.runtime.calls import runs_of

    if message is None:
        run_id, message = None, run_id
    elif run_id is not None and " " in run_id:
        raise Misuse(f'name the run first: wink send {message} "..."')
    message = text_of(message or "", 'give a message: wink send "..."')
    directory = existing_directory(workspace)
    runs = runs_of(directory)[::-1] if run_id is None else [find_run(directory, run_id)]
    for run in runs:
        with suppress(SessionError):
            Inbox(inbox_of(run.path)).send(message)
            echo(f"sent to {run.id}", err=True)
            return
    if run_id is None:
        raise Misuse(f"no run is in progress in {directory}; nothing was sent")
    name = runs[0].id
    if SavedSession.is_in_use(runs[0].path):
        raise Misuse(f"{name} is a chat that waits for input: type the message there")
    raise Misuse(f'{name} is not in progress; to continue it: wink resume {name} "..."')


def _run_to_resume(directory: Path, run_id: str | None, message: str | None) -> Run:
    """Return the named run, or the last that can be resumed."""
    from weakincentives.runtime import SavedSession, SavedSessionData
    from weakincentives.runtime.calls import runs_of

    finished: Run | None = None
    running: Run | None = None
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
        if run_id is None and SavedSession.is_in_use(run.path):
            running = running or run
            continue
        if message is not None or not run.has_ended or _is_unmerged(directory, run):
            return run
        finished = finished or run
    if finished is not None:
        name = finished.id
        raise Misuse(f'{name} has finished; give a message to continue: wink resume {name} "..."')
    if running is not None:
        raise Misuse(f"{running.id} is running in another process")
    if run_id is not None:
        raise Misuse(f"{run_id} cannot be resumed: it is a dry run, or not a `wink run`")
    raise Misuse(f'there is no run to resume in {directory}; start one: wink run "..."')


def _is_unmerged(directory: Path, run: Run) -> bool:
    """Whether a run was stopped between the model's end and the end of the merge."""
    from weakincentives.filesystem import branches_of

    if not run.branch or run.data.about.get("no_merge"):
        return False
    return any(each.name == run.branch and each.commits for each in branches_of(directory))
