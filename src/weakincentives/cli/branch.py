"""`wink fork`, `rerun` and `branch`: branches of a workspace, and agents that work on them."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from weakincentives.cli.common import (
    FOR_OTHERS,
    InUse,
    Misuse,
    echo,
    examples,
    existing_directory,
    hint,
    open_branch,
    open_workspace,
    say,
    table,
)
from weakincentives.cli.history import Files, find_call, print_diff
from weakincentives.cli.options import (
    AnyCall,
    AsJson,
    AskElsewhere,
    Before,
    CallName,
    Everything,
    Model,
    Policy,
    Quiet,
    RunSettings,
    Workspace,
    Yes,
    complete_branches,
)
from weakincentives.cli.run import resume
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.text import counted, harmless
from weakincentives.errors import FilesystemError, MergeConflict, WorkspaceLocked

if TYPE_CHECKING:
    from weakincentives.filesystem import Branch, BranchInfo
    from weakincentives.filesystem.merging import Prefer
    from weakincentives.runtime.calls import Call, Calls

WORKSPACE = "workspace"
"""Stands for the directory itself where a branch is named."""
_MOST_PATHS = 20

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A branch.", autocompletion=complete_branches)
]


@examples(
    "wink fork                          # the last run as it is now, on a branch",
    "wink fork k3f/4 --name parser      # as just after this call; --before: before it",
    'wink resume parser "use a regex"   # continues there; the directory stays as it is',
    "wink branch merge parser           # when you like what it did",
)
def fork(
    call: AnyCall = None,
    workspace: Workspace = Path(),
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="By default a few letters.")
    ] = None,
    before: Before = False,
) -> None:
    """Make a branch that starts at a call, or from now.

    It begins with the files, session and conversation at that point.
    """
    from weakincentives.runtime.calls import Calls
    from weakincentives.runtime.forks import fork_call

    calls = Calls(existing_directory(workspace))
    if call is None and before:
        raise Misuse("--before needs a CALL")
    found = _last_call(calls) if call is None else find_call(calls, call)
    with _refusing():
        made = fork_call(calls, found, name=name or "", before=before, now=call is None)
    if found is None or made.run is None:
        echo(f'Made the branch {made.branch}. To work on it: wink run "..." --branch {made.branch}')
    else:
        when, mark = "before" if before else "after", made.run.mark
        what = f"{when} {found.name} {found.tool}"
        echo(f"Made the branch {made.branch} and the run {mark}, from just {what}.")
        is_ours = made.run.data.about.get("kind") in ("run", "chat")
        go_on = f"wink resume {made.branch}" if is_ours else f"wink run --branch {made.branch}"
        echo(f'To continue there: {go_on} "..."; then: wink branch merge {made.branch}')


@contextmanager
def _refusing() -> Generator[None]:
    """Raise Misuse where a fork is refused."""
    try:
        yield
    except LookupError as error:
        raise Misuse(str(error.args[0])) from error
    except (FilesystemError, ValueError) as error:
        raise Misuse(str(error)) from error


def _last_call(calls: Calls) -> Call | None:
    for run in calls.newest_runs[:1]:
        for each in reversed(calls.of_run(run)):
            return each
    return None


@examples(
    "wink rerun k3f/4 --set path=src/b.py        # with one other argument",
    "wink rerun k3f/4 --section your-work=my.txt # the model is asked again, with this text",
    "wink rerun k3f/4 --policy protect=src       # the same call under another rule",
    "wink branch diff m7x workspace              # how the two differ",
)
def rerun(
    call: CallName,
    message: Annotated[
        str | None, typer.Argument(metavar="MESSAGE", help="What to tell the model.")
    ] = None,
    workspace: Workspace = Path(),
    changed: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Change an argument of the call. Can be repeated."
        ),
    ] = None,
    arguments: Annotated[
        str | None, typer.Option(metavar="JSON", help="Replace all arguments of the call.")
    ] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(
            "--section",
            metavar="PATH=FILE",
            help="Replace the text of a section of the prompt by a file. Can be repeated.",
        ),
    ] = None,
    policy: Policy = None,
    model: Model = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Of the branch; by default a few letters."),
    ] = None,
    yes: Yes = False,
    ask_elsewhere: AskElsewhere = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Make a call again, changed, and continue on a branch.

    Everything before the call is kept, without asking the model again. The turn stays if its
    arguments or the rules change; if only the prompt or the model does, the model is asked again.
    """
    from weakincentives.runtime.calls import Calls
    from weakincentives.runtime.forks import Change, rerun_call

    calls = Calls(existing_directory(workspace))
    found = find_call(calls, call)
    with _refusing():
        change = Change(
            arguments=_arguments(found, changed or (), arguments),
            sections=dict(map(_section, section or ())),
            policies=policy or (),
            model=model or "",
            message=message or "",
        )
        made = rerun_call(calls, found, change, name=name or "")
    assert made.run is not None
    try:
        code = resume(
            made.run.id,
            message,
            workspace,
            settings=RunSettings(policy=policy),
            yes=yes,
            ask_elsewhere=ask_elsewhere,
            as_json=as_json,
            quiet=quiet,
        )
    except Misuse:  # it did not start
        made.discard()
        raise
    if not as_json and not quiet:
        echo(f"To compare: wink branch diff {made.branch} workspace", err=True)
    return code


def _arguments(call: Call, changed: Sequence[str], whole: str | None) -> Mapping[str, Any] | None:
    """Return the arguments of the changed call; None if they do not change."""
    from weakincentives.runtime.forks import asked_arguments

    if whole is not None:
        if changed:
            raise Misuse("name only one of --set and --arguments")
        try:
            given: object = json.loads(whole)
        except ValueError as error:
            raise Misuse(f"--arguments: not JSON: {error}") from error
        if not isinstance(given, dict):
            raise Misuse(f"--arguments: expected a JSON object, got {whole[:80]}")
        return cast("dict[str, Any]", given)
    if not changed:
        return None
    arguments = dict(asked_arguments(call))
    for each in changed:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise Misuse(f"--set: expected NAME=VALUE, got {each!r}")
        arguments[name] = _value(text, arguments.get(name))
    return arguments


def _value(text: str, before: object) -> object:
    """Return a value: text in place of text, otherwise JSON."""
    if isinstance(before, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _section(given: str) -> tuple[str, str]:
    path, equals, file = given.partition("=")
    if not equals or not path:
        near = hint(given, ["your-work"], "such as your-work=my.txt")
        raise Misuse(f"--section: expected PATH=FILE, got {given!r}; {near}")
    try:
        return path, Path(file).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Misuse(f"--section: cannot read {file}: {reason}") from error


# branch


def list_branches(workspace: Workspace = Path(), as_json: AsJson = False) -> None:
    """List the branches, their runs and changed files."""
    from weakincentives.runtime.calls import Calls

    calls = Calls(existing_directory(workspace))
    rows = [_row(calls, each) for each in calls.branches.values()]
    if as_json:
        for row in rows:
            echo(json.dumps(row))
        return
    if not rows:
        echo("There are no branches.", err=True)
        return
    now = SYSTEM_CLOCK.time()
    lines = [["NAME", "RUN", "AGE", "CALLS", "FILES", "BEHIND", ""]]
    for row in rows:
        shown = (row["name"], row["run"] or "-", _age(now - float(row["time"])), row["calls"])
        state = "in use" if row["in_use"] else ""
        lines.append([*map(str, shown), str(len(row["files"])), str(row["behind"]), state])
    for line in table(lines):
        echo(line)


def _row(calls: Calls, info: BranchInfo) -> dict[str, Any]:
    run = next((each for each in reversed(calls.runs) if each.branch == info.name), None)
    last = [each.time for each in info.commits[-1:]]
    return {
        "name": info.name,
        "run": None if run is None else run.mark,
        "task": "" if run is None else run.title,
        "time": max([info.began, *last]),
        "calls": len(info.commits),
        "files": info.paths,
        "behind": sum(each.serial > info.base for each in calls.committed.values()),
        "in_use": info.is_in_use,
        "size": info.size,
    }


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


@examples(
    "wink branch diff parser            # what it changed",
    "wink branch diff parser workspace  # how it differs from the directory now",
    "wink branch diff parser lexer      # how it differs from another branch",
)
def diff(
    name: Name,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            help="Another branch, or `workspace`; by default what the branch began with.",
            autocompletion=complete_branches,
        ),
    ] = None,
    workspace: Workspace = Path(),
    everything: Everything = False,
    as_json: AsJson = False,
) -> int:
    """Show the changes of a branch, as a patch for git.

    Or how it differs from another branch, or from the directory.
    """
    from weakincentives.filesystem import BranchHistory

    directory = existing_directory(workspace)
    files = Files(directory, everything)
    with BranchHistory(directory, _named(directory, name)) as history:
        if other is None:
            last = len(history.info.commits)
            changes = history.diff_between(0, last, detail=files.is_shown, raw=not as_json)
        elif other == WORKSPACE:
            changes = history.diff_from_workspace(detail=files.is_shown)
        else:
            with BranchHistory(directory, _named(directory, other)) as second:
                changes = history.diff_from(second, detail=files.is_shown)
        return print_diff(changes, files, as_json=as_json)


@examples(
    "wink branch merge parser --dry-run",
    "wink branch merge parser",
    "wink branch merge parser --prefer branch   # where both changed the same lines",
    more="Nothing is merged if there are conflicts; wink undo undoes a merge.",
)
def merge(
    name: Name,
    workspace: Workspace = Path(),
    prefer: Annotated[
        str | None,
        typer.Option(metavar="branch|workspace", help="Whose version of a conflicting file wins."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not drop the branch; it begins again from there.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the conflicts and what would change.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Merge a branch into the directory, and drop it.

    In one step that can be undone.
    """
    from weakincentives.filesystem import drop_branch

    directory = existing_directory(workspace)
    _named(directory, name)
    with open_branch(directory, name) as branch:
        with branch.merging(prefer=_preference(prefer)) as plan:
            conflicts = {"/".join(parts): why for parts, why in sorted(plan.conflicts.items())}
            say(*(f"{path} {why}" for path, why in conflicts.items()))
            paths = plan.paths
            if plan.conflicts and prefer is None:
                if as_json:
                    echo(json.dumps({"merged": False, "conflicts": conflicts}))
                say("nothing was merged: use --prefer, or let an agent of the branch resolve it")
                return 1
        if not dry_run:
            paths = _merge(branch, directory, _preference(prefer))
            if keep:
                branch.begin_anew()
    if as_json:
        done = {"merged": not dry_run and bool(paths), "dry_run": dry_run}
        echo(json.dumps({**done, "paths": list(paths), "conflicts": conflicts}))
    else:
        verb = "would change" if dry_run else "changed"
        echo(f"{verb} {counted(len(paths), 'path')}" if paths else "nothing to merge")
        for path in paths[:_MOST_PATHS]:
            echo(f"  {harmless(path)}")
        if len(paths) > _MOST_PATHS:
            echo(f"  and {len(paths) - _MOST_PATHS} more")
    if not dry_run and not keep:
        drop_branch(directory, name)
    return 0


def _merge(branch: Branch, directory: Path, prefer: Prefer | None) -> tuple[str, ...]:
    try:
        rules = _unprotected(directory)
        with open_workspace(directory, unprotected=rules, wait=FOR_OTHERS) as files:
            return branch.merge_into(files, prefer=prefer)
    except MergeConflict as error:  # changed at this very moment
        raise Misuse(f"nothing was merged: {error}") from error
    except WorkspaceLocked as error:  # since it was opened
        raise InUse(error, str(directory)) from error


def _unprotected(directory: Path) -> Sequence[str]:
    """Return the paths that the settings of a directory allow calls to change."""
    from weakincentives.cli.config import load_settings
    from weakincentives.cli.trust import trust_of

    settings = load_settings(directory, suites=[], sections=[])
    if settings.policy.unprotect:
        trust_of(settings.workspace).admit(settings)
    return settings.policy.unprotect


def _preference(given: str | None) -> Prefer | None:
    if given not in (None, "branch", "workspace"):
        raise Misuse(f"--prefer: {given!r} is neither branch nor workspace")
    return given


def drop(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Branches.", autocompletion=complete_branches),
    ],
    workspace: Workspace = Path(),
) -> int:
    """Remove branches, which cannot be undone."""
    from weakincentives.filesystem import drop_branch

    directory, code = existing_directory(workspace), 0
    for name in names:
        _named(directory, name)
        try:
            drop_branch(directory, name)
            echo(f"dropped {name}")
        except WorkspaceLocked as error:
            say(f"{name} is in use by {InUse(error, name).user}; it was not dropped")
            code = 1
    return code


def checkout(
    name: Name,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
    workspace: Workspace = Path(),
) -> None:
    """Copy the files of a branch to a new directory."""
    from weakincentives.filesystem import BranchHistory

    root = existing_directory(workspace)
    with BranchHistory(root, _named(root, name)) as history:
        history.files.export(directory)
    echo(f"checked out {name} to {directory}", err=True)


def _named(workspace: Path, name: str) -> BranchInfo:
    """Return a branch; raise Misuse if there is none of this name."""
    from weakincentives.filesystem import branches_of

    found = {each.name: each for each in branches_of(workspace)}
    if name not in found:
        near = hint(name, found, "`wink branch list` lists them")
        raise Misuse(f"no branch {name!r} in {workspace}; {near}")
    return found[name]
