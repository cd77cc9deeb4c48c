"""`wink fork` and `wink branch`: branches of a workspace, and agents that work on them."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weakincentives.cli.common import (
    AsJson,
    Misuse,
    Workspace,
    complete_branches,
    echo,
    examples,
    existing_directory,
    hint,
    in_use,
    opened_workspace,
    say,
    user,
)
from weakincentives.cli.history import (
    Before,
    CallName,
    Everything,
    Files,
    find_call,
    print_diff,
)
from weakincentives.text import harmless

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.cli.workbench import Workbench
    from weakincentives.filesystem import Branch, BranchInfo
    from weakincentives.filesystem.merging import Prefer
    from weakincentives.runtime.calls import Call, Calls

WORKSPACE = "workspace"
"""Stands for the directory itself where a branch is named."""
FOR_OTHERS = 10.0
"""Seconds to wait for another process that has the directory to itself."""
_MOST_PATHS = 20

# An agent on a branch


def open_branch(
    workspace: Path, name: str, *, run: str = "", unprotected: Iterable[str] = ()
) -> Branch:
    """Open a branch, or make one; raise Misuse if it is in use, or cannot have this name."""
    from weakincentives.errors import FilesystemError, NoSuchBranch, WorkspaceLocked
    from weakincentives.filesystem import Branch
    from weakincentives.runtime.forks import RUN

    rules = tuple(unprotected)
    try:
        try:
            return Branch.open(workspace, name, unprotected=rules)
        except NoSuchBranch:
            about = {RUN: run} if run else {}
            return Branch.create(workspace, name, about=about, unprotected=rules)
    except WorkspaceLocked as error:
        raise Misuse(f"the branch {name} is in use by process {error.pid}") from error
    except FilesystemError as error:
        raise Misuse(str(error)) from error


def prefers_branch(settings: Settings) -> bool:
    """Whether a run works on a branch while others have the directory open.

    Not one with tools of the user's own, or of a vendor's program: they may reach the directory.
    """
    from weakincentives.filesystem.overlay import find_way
    from weakincentives.filesystem.store import location_of

    own = settings.sections or str(settings.model).partition(":")[0] == "claude"
    if not settings.branches or own:
        return False
    store = location_of(settings.workspace)
    has_store = "shell" in settings.suites and store.exists()
    return not (has_store and isinstance(find_way(settings.workspace, store), str))


def check_fits_branch(workbench: Workbench) -> None:
    """Raise Misuse if a tool can only work on the directory itself."""
    from weakincentives.filesystem.overlay import find_way

    external = [name for name, each in workbench.offers.items() if each.tool.writes == "external"]
    if external:
        raise Misuse(
            f"{', '.join(external)} starts programs that change the directory itself, so it cannot"
            " work on a branch; use --in-place"
        )
    files = workbench.filesystem
    way = "" if workbench.shell is None else find_way(files.root, files.store)
    if isinstance(way, str) and way:
        raise Misuse(
            f"commands on a branch need an overlay: {way}; use --in-place, or leave out the suite"
            ' "shell"'
        )


# Commands

_PAGE = 'In the documentation: "Branches".'
_FORK_EXAMPLES = examples(
    "wink fork                          # the last run as it is now, on a branch",
    "wink fork k3f/4 --name parser      # as just after this call; --before: before it",
    'wink resume parser "use a regex"   # continues there; the directory stays as it is',
    more=_PAGE,
)
_DIFF_EXAMPLES = examples(
    "wink branch diff parser            # what it changed",
    "wink branch diff parser workspace  # how it differs from the directory now",
    "wink branch diff parser lexer      # how it differs from another branch",
    more=_PAGE,
)
_MERGE_EXAMPLES = examples(
    "wink branch merge parser --dry-run",
    "wink branch merge parser",
    "wink branch merge parser --prefer branch   # where both changed the same lines",
    more=f"Nothing is merged if there are conflicts; wink undo undoes a merge. {_PAGE}",
)
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A branch.", autocompletion=complete_branches)
]


def register(app: typer.Typer) -> None:
    branch = typer.Typer(
        help="List, compare, merge, drop and check out branches.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    branch.command("list")(list_branches)
    branch.command("diff", epilog=_DIFF_EXAMPLES)(diff)
    branch.command("merge", epilog=_MERGE_EXAMPLES)(merge)
    branch.command("drop")(drop)
    branch.command("checkout")(checkout)
    app.command("fork", epilog=_FORK_EXAMPLES)(fork)
    app.add_typer(branch, name="branch")


def fork(
    call: CallName = None,
    workspace: Workspace = Path(),
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="By default a few letters.")
    ] = None,
    before: Before = False,
) -> None:
    """Make a branch with the files, session and conversation as they were at a call, or now."""
    from weakincentives.runtime.calls import Calls
    from weakincentives.runtime.forks import fork_call

    calls = Calls(existing_directory(workspace))
    if call is None and before:
        raise Misuse("--before needs a CALL")
    found = _last_call(calls) if call is None else find_call(calls, call)
    with refusing():
        made = fork_call(calls, found, name=name or "", before=before, now=call is None)
    if found is None or made.run is None:
        echo(f'Made the branch {made.branch}. To work on it: wink run "..." --branch {made.branch}')
    else:
        when, mark = "before" if before else "after", made.run.mark
        what = f"{when} {found.name} {found.tool}"
        echo(f"Made the branch {made.branch} and the run {mark}, from just {what}.")
        echo(f'To continue there: wink resume {mark} "..."')


@contextmanager
def refusing() -> Generator[None]:
    """Raise Misuse where a fork is refused."""
    from weakincentives.errors import FilesystemError

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


def list_branches(workspace: Workspace = Path(), as_json: AsJson = False) -> None:
    """List the branches: their runs, what they changed, and whether they are in use."""
    from weakincentives.clock import SYSTEM_CLOCK
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
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        echo("  ".join(cells).rstrip())


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
) -> int:
    """Show what a branch changed, as a patch for `git apply`; or how it differs from another."""
    from weakincentives.filesystem import BranchHistory

    directory = existing_directory(workspace)
    files = Files(directory, everything)
    with BranchHistory(directory, _named(directory, name)) as history:
        if other is None:
            last = len(history.info.commits)
            changes = history.diff_between(0, last, detail=files.is_shown, raw=True)
        elif other == WORKSPACE:
            changes = history.diff_from_workspace(detail=files.is_shown)
        else:
            with BranchHistory(directory, _named(directory, other)) as second:
                changes = history.diff_from(second, detail=files.is_shown)
        return print_diff(changes, files)


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
) -> int:
    """Merge a branch into the directory, in one step that can be undone; then drop it."""
    from weakincentives.filesystem import drop_branch

    directory = existing_directory(workspace)
    _named(directory, name)
    with open_branch(directory, name) as branch:
        with branch.merging(prefer=_preference(prefer)) as plan:
            for parts, why in sorted(plan.conflicts.items()):
                say(f"{'/'.join(parts)} {why}")
            paths = plan.paths
            if plan.conflicts and prefer is None:
                say("nothing was merged: use --prefer, or let an agent of the branch resolve it")
                return 1
        if not dry_run:
            paths = _merge(branch, directory, _preference(prefer))
            if keep:
                branch.begin_anew()
    verb = "would change" if dry_run else "changed"
    echo(f"{verb} {len(paths)} paths" if paths else "nothing to merge")
    for path in paths[:_MOST_PATHS]:
        echo(f"  {harmless(path)}")
    if len(paths) > _MOST_PATHS:
        echo(f"  and {len(paths) - _MOST_PATHS} more")
    if not dry_run and not keep:
        drop_branch(directory, name)
    return 0


def _merge(branch: Branch, directory: Path, prefer: Prefer | None) -> tuple[str, ...]:
    from weakincentives.errors import MergeConflict, WorkspaceLocked

    try:
        with opened_workspace(directory, wait=FOR_OTHERS) as files:
            return branch.merge_into(files, prefer=prefer)
    except WorkspaceLocked as error:
        raise in_use(error, directory) from error
    except MergeConflict as error:  # changed at this very moment
        raise Misuse(f"nothing was merged: {error}") from error


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
    """Remove branches and everything that only they hold. That cannot be undone."""
    from weakincentives.errors import WorkspaceLocked
    from weakincentives.filesystem import drop_branch

    directory, code = existing_directory(workspace), 0
    for name in names:
        _named(directory, name)
        try:
            drop_branch(directory, name)
            echo(f"dropped {name}")
        except WorkspaceLocked as error:
            say(f"{name} is in use by {user(error)}; it was not dropped")
            code = 1
    return code


def checkout(
    name: Name,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
    workspace: Workspace = Path(),
) -> None:
    """Create a directory with the files of a branch: a copy, to look at with other programs."""
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
